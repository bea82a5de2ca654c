//! What leaves the slab for the host and comes back, while a program runs.
//!
//! A program says at which steps copies start and are waited for; the device makes them.

use super::Session;
use crate::error::Result;
use crate::memory::offload::Offload;
use crate::program::Compiled;

impl Session {
    /// Lets programs whose slab would be larger than the budget send values to the host while they
    /// lie idle, where that costs less time than computing them again. Results are the same bits.
    /// Without a budget nothing is sent.
    ///
    /// On a CUDA device the host's space is pinned memory, and copies have streams of their own,
    /// one in each direction. On the CPU it is memory beside the slab, and copies are made by a
    /// thread: so that plans for devices with memory of their own can be made, tested and compared,
    /// not to save memory of the machine.
    #[must_use]
    pub fn with_offload(mut self, offload: impl Into<Option<Offload>>) -> Self {
        self.offload = offload.into();
        self
    }

    /// Bytes of the host's memory that hold what leaves the slab: what the program that sends most
    /// needs.
    pub fn host_bytes(&self) -> u64 {
        self.host.map_or(0, |host| host.bytes)
    }

    /// Memory for what a program sends to the host, and what makes its copies, if it makes any.
    pub(crate) fn prepare_copies(&mut self, inner: &Compiled) -> Result<()> {
        if inner.copies.is_empty() {
            return Ok(());
        }
        self.memory.prepare_copies(inner.copies.len())?;
        self.tickets.reserve(inner.copies.len());
        if self.host_bytes() < inner.host_bytes {
            if let Some(old) = self.host.take() {
                self.memory.release(old.arena);
            }
            let what = format!("what \"{}\" sends to the host", inner.name);
            self.host = Some(self.memory.reserve_host(inner.host_bytes, &what)?);
        }
        Ok(())
    }
}
