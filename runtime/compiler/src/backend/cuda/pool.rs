//! A CUDA device's memory as the pool sees it.

use std::time::Duration;

use slabwise_kernels::memory::{Memory, Region};
use slabwise_planner::Bytes;

use super::Gpu;
use crate::memory::{MemoryInfo, Range, Refused, Source, Stream};

impl Source for Gpu {
    fn info(&mut self) -> MemoryInfo {
        let (free, total) = self.device.memory().unwrap_or_default();
        MemoryInfo { free, total }
    }

    fn reserve(&mut self, bytes: u64) -> Result<u32, Refused> {
        self.device
            .reserve(bytes)
            .map(|region| region.arena)
            .map_err(|_| Refused { bytes })
    }

    fn release(&mut self, arena: u32) {
        self.device.release(arena);
    }

    /// Addresses for a pool of so many bytes, if its pages can be mapped one by one. Memory that
    /// was preallocated is a range already, from which the pool has arenas.
    fn range(&mut self, bytes: u64) -> Option<Range> {
        match self.device.range(Range::addresses(bytes, 1, true)) {
            Ok(range) => range.map(|(arena, page)| Range {
                arena,
                page,
                pages_move: true,
            }),
            Err(e) => {
                log::warn!(
                    "{}: no addresses for a pool of {}: {e}; it takes arenas instead",
                    self.name,
                    Bytes(bytes)
                );
                None
            }
        }
    }

    fn map(&mut self, pages: Region) -> Result<(), Refused> {
        self.device
            .map(&pages)
            .map_err(|_| Refused { bytes: pages.bytes })
    }

    fn unmap(&mut self, pages: Region) {
        self.device.unmap(&pages);
    }

    fn remap(&mut self, from: &[Region], to: Region) -> Result<(), Refused> {
        self.device
            .remap(from, &to)
            .map_err(|_| Refused { bytes: to.bytes })
    }

    fn copy(&mut self, _stream: Stream, from: Region, to: Region) {
        // A device that is lost says so at the next call that can fail.
        let _ = self.device.copy(&from, &to);
    }

    fn completed(&mut self, _stream: Stream) -> u64 {
        u64::MAX
    }

    fn synchronize(&mut self, _stream: Stream, _sequence: u64) {}

    fn now(&mut self) -> Duration {
        Memory::new().now()
    }

    fn preallocates(&self) -> bool {
        // The device's reservation preallocates the memory.
        false
    }
}

#[cfg(all(test, feature = "emulator"))]
mod tests;
