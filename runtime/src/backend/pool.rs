//! A device's memory as the pool sees it.

use slabwise_kernels::memory::{Memory, Region};

use super::Backend;
use crate::memory::{MemoryInfo, Range, Refused, Source, Stream};

/// Memory for the pool. All work of a session is one stream's, in order; so nothing has to be
/// waited for before memory that stays within it is used again, and a device waits by itself before
/// it gives memory back.
impl Source for Backend {
    fn info(&mut self) -> MemoryInfo {
        match self {
            Backend::Cpu(memory) => memory.info(),
            #[cfg(feature = "cuda")]
            Backend::Cuda(gpu) => gpu.info(),
        }
    }

    fn reserve(&mut self, bytes: u64) -> Result<u32, Refused> {
        match self {
            Backend::Cpu(memory) => Source::reserve(memory, bytes),
            #[cfg(feature = "cuda")]
            Backend::Cuda(gpu) => gpu
                .device
                .reserve(bytes)
                .map(|region| region.arena)
                .map_err(|_| Refused { bytes }),
        }
    }

    fn release(&mut self, arena: u32) {
        Backend::release(self, arena);
    }

    fn range(&mut self, bytes: u64) -> Option<Range> {
        match self {
            Backend::Cpu(memory) => memory.range(bytes),
            // What was taken ahead is a range already, from which the pool has arenas.
            #[cfg(feature = "cuda")]
            Backend::Cuda(gpu) => gpu.range(bytes),
        }
    }

    fn map(&mut self, pages: Region) -> Result<(), Refused> {
        match self {
            Backend::Cpu(memory) => memory.map(pages),
            #[cfg(feature = "cuda")]
            Backend::Cuda(gpu) => gpu
                .device
                .map(&pages)
                .map_err(|_| Refused { bytes: pages.bytes }),
        }
    }

    fn unmap(&mut self, pages: Region) {
        match self {
            Backend::Cpu(memory) => memory.unmap(pages),
            #[cfg(feature = "cuda")]
            Backend::Cuda(gpu) => gpu.device.unmap(&pages),
        }
    }

    fn remap(&mut self, from: &[Region], to: Region) -> Result<(), Refused> {
        match self {
            Backend::Cpu(memory) => memory.remap(from, to),
            #[cfg(feature = "cuda")]
            Backend::Cuda(gpu) => gpu
                .device
                .remap(from, &to)
                .map_err(|_| Refused { bytes: to.bytes }),
        }
    }

    fn copy(&mut self, _stream: Stream, from: Region, to: Region) {
        // A device that is lost says so at the next call that can fail.
        let _ = Backend::copy(self, &from, &to);
    }

    fn completed(&mut self, _stream: Stream) -> u64 {
        u64::MAX
    }

    fn synchronize(&mut self, _stream: Stream, _sequence: u64) {}

    fn now(&mut self) -> std::time::Duration {
        Memory::new().now()
    }

    fn preallocates(&self) -> bool {
        // What a device takes ahead, its reservation takes.
        false
    }
}

#[cfg(all(test, feature = "cuda"))]
mod tests;
