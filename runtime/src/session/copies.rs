//! Offloading: values that are copied to the host while they lie idle, and prefetched before their
//! next use.
//!
//! A program says at which steps copies start and must have ended; the device makes them.

use super::Session;
use crate::error::Result;
use crate::memory::offload::Offload;
use crate::program::Compiled;

impl Session {
    /// Lets programs whose slab would be larger than the budget offload values to the host while
    /// they lie idle, where that costs less time than recomputing them. Results are the same bits.
    /// Without a budget nothing is offloaded.
    ///
    /// On a CUDA device the host's space is pinned memory, and there is a stream for the copies of
    /// each direction. On the CPU it is memory beside the slab, and a thread makes the copies. That
    /// saves no memory of the machine; it is there so that plans for devices with separate memory
    /// can be made, tested and compared.
    #[must_use]
    pub fn with_offload(mut self, offload: impl Into<Option<Offload>>) -> Self {
        self.memory.offload = offload.into();
        self
    }

    /// Bytes of the host's memory for offloaded values, as the program that offloads most needs
    /// them.
    pub fn host_bytes(&self) -> u64 {
        self.memory.host_bytes()
    }

    /// Reserves the host's memory for a program's offloaded values, and prepares for its copies.
    pub(crate) fn prepare_copies(&mut self, inner: &Compiled) -> Result<()> {
        self.execution.tickets.reserve(inner.transfers.len());
        let copies = inner.copies();
        if copies == 0 {
            return Ok(());
        }
        self.memory.backend.prepare_copies(copies)?;
        if self.host_bytes() < inner.host_bytes {
            if let Some(old) = self.memory.host.take() {
                self.memory.backend.release(old.arena);
            }
            let purpose = format!("the values that \"{}\" offloads to the host", inner.name);
            self.memory.host = Some(
                self.memory
                    .backend
                    .reserve_host(inner.host_bytes, &purpose)?,
            );
        }
        Ok(())
    }
}
