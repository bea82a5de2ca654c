//! Copies that are made while kernels run: between the slab and the host, where idle values wait.
//!
//! On the CPU a thread makes them, and what stands for the host is memory beside the slab. On a
//! CUDA device it is pinned memory, and copies have streams of their own, ordered by events at the
//! steps that start them and wait for them.

use slabwise_kernels::copies::Ticket;
use slabwise_kernels::memory::Region;

use super::Backend;
use crate::error::Result;

impl Backend {
    /// An arena of the host for what leaves the slab, and which the error would name.
    pub fn reserve_host(&mut self, bytes: u64, what: &str) -> Result<Region> {
        match self {
            Backend::Cpu(_) => self.reserve(bytes, what),
            #[cfg(feature = "cuda")]
            Backend::Cuda(gpu) => gpu.reserve_host(bytes, what),
        }
    }

    /// Makes ready for so many copies in flight at once, so that starting them allocates nothing.
    pub fn prepare_copies(&mut self, most: usize) -> Result<()> {
        match self {
            Backend::Cpu(memory) => {
                memory.prepare_copies(most);
                Ok(())
            }
            #[cfg(feature = "cuda")]
            Backend::Cuda(gpu) => gpu.prepare_copies(most),
        }
    }

    /// Makes ready for batches in so many slots, which a region of the device is cut into, beside
    /// so many copies of a run; the device's number of these slots.
    pub fn open_ring(&mut self, region: &Region, slots: usize, copies: usize) -> Result<usize> {
        match self {
            Backend::Cpu(memory) => {
                let _ = region;
                memory.prepare_copies(slots + copies);
                Ok(0)
            }
            #[cfg(feature = "cuda")]
            Backend::Cuda(gpu) => gpu.open_ring(region, slots),
        }
    }

    /// Starts a copy of a run, whose number is `copy`. What names it is for
    /// [`Backend::finish_copy`].
    pub fn start_copy(
        &mut self,
        copy: usize,
        from: &Region,
        to: &Region,
    ) -> Result<Option<Ticket>> {
        // The thread knows copies by tickets.
        let _ = copy;
        match self {
            Backend::Cpu(memory) => Ok(Some(memory.start_copy(from, to))),
            #[cfg(feature = "cuda")]
            Backend::Cuda(gpu) => gpu.start_copy(copy, from, to).map(|()| None),
        }
    }

    /// Lets what follows wait for a copy.
    pub fn finish_copy(&mut self, copy: usize, ticket: Option<Ticket>) -> Result<()> {
        let _ = copy;
        match self {
            Backend::Cpu(memory) => {
                ticket
                    .into_iter()
                    .for_each(|ticket| memory.wait_for(ticket));
                Ok(())
            }
            #[cfg(feature = "cuda")]
            Backend::Cuda(gpu) => gpu.finish_copy(copy),
        }
    }

    /// Waits until nothing is under way.
    pub fn settle_copies(&mut self) {
        match self {
            Backend::Cpu(memory) => memory.wait_for_all(),
            #[cfg(feature = "cuda")]
            Backend::Cuda(gpu) => gpu.settle_copies(),
        }
    }
}
