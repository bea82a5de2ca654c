//! What leaves the slab for the host and comes back, while a program runs.
//!
//! A program says at which steps copies start and are waited for. Here they are those of the memory's copy thread.

use slabwise_kernels::memory::Region;
use slabwise_kernels::size::Env;

use super::{Session, out_of_memory};
use crate::error::Result;
use crate::memory::offload::Offload;
use crate::program::Compiled;

impl Session {
    /// Lets programs whose slab would be larger than the budget send values to the host while they lie idle, where that costs
    /// less time than computing them again. Results are the same bits. Without a budget nothing is sent.
    ///
    /// On the CPU the host's space is memory beside the slab, and copies are made by a thread of their own: so that plans for
    /// devices with memory of their own can be made, tested and compared, not to save memory of the machine.
    #[must_use]
    pub fn with_offload(mut self, offload: impl Into<Option<Offload>>) -> Self {
        self.offload = offload.into();
        self
    }

    /// Bytes of the host's memory that hold what leaves the slab: what the program that sends most needs.
    pub fn host_bytes(&self) -> u64 {
        self.host.map_or(0, |host| host.bytes)
    }

    /// Memory and a thread for the copies of a program, if it makes any.
    pub(crate) fn prepare_copies(&mut self, inner: &Compiled) -> Result<()> {
        if inner.copies.is_empty() {
            return Ok(());
        }
        self.memory.prepare_copies(inner.copies.len());
        self.tickets.reserve(inner.copies.len());
        if self.host_bytes() < inner.host_bytes {
            if let Some(old) = self.host.take() {
                self.memory.release(old.arena);
            }
            let what = || format!("what \"{}\" sends to the host", inner.name);
            self.host = Some(self.memory.reserve(inner.host_bytes).map_err(|e| out_of_memory(&what(), e))?);
        }
        Ok(())
    }

    /// Starts a copy; `place` tells where buffers lie.
    pub(super) fn start_copy(&mut self, inner: &Compiled, copy: usize, env: &Env, place: impl Fn(usize) -> Region) {
        let copied = inner.copies[copy];
        let bytes = inner.buffers[copied.from].bytes_at(env);
        let [from, to] = [copied.from, copied.to].map(|buffer| place(buffer).part(0, bytes));
        debug_assert_eq!(self.tickets.len(), copy, "copies start in their order");
        self.tickets.push(self.memory.start_copy(&from, &to));
    }

    /// Waits until a copy has ended.
    pub(super) fn finish_copy(&mut self, copy: usize) {
        self.memory.wait_for(self.tickets[copy]);
    }
}
