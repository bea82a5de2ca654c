//! What leaves the slab for the host and comes back, while a program runs.
//!
//! A program says at which steps copies start and are waited for. Here they are those of the memory's copy thread.

use slabwise_kernels::memory::Region;
use slabwise_kernels::size::Env;

use slabwise_kernels::memory::Memory;

use super::Session;
use crate::error::{Error, Result};
use crate::memory::offload::Offload;
use crate::program::Compiled;

impl Session {
    /// Lets programs whose slab would be larger than the budget send values to the host while they lie idle, where that costs
    /// less time than computing them again. Results are the same bits. Without a budget nothing is sent.
    ///
    /// On the CPU the host's space is memory beside the slab, and copies are made by a thread of their own: so that plans for
    /// devices with memory of their own can be made, tested and compared, not to save memory of the machine. On those
    /// devices nothing is sent yet: there a budget is kept by computing again alone.
    #[must_use]
    pub fn with_offload(mut self, offload: impl Into<Option<Offload>>) -> Self {
        self.offload = offload.into();
        self
    }

    /// The way to the host, where copies can be made.
    pub(crate) fn offload(&self) -> Option<Offload> {
        self.offload.filter(|_| self.memory.host().is_some())
    }

    /// The memory that has a thread for copies.
    pub(super) fn copying(&mut self) -> Result<&mut Memory> {
        self.memory.host_mut().ok_or_else(|| Error::Internal("copies on a device that makes none".into()))
    }

    /// Waits until nothing is under way.
    pub(super) fn wait_for_copies(&mut self) {
        if let Some(memory) = self.memory.host_mut() {
            memory.wait_for_all();
        }
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
        self.copying()?.prepare_copies(inner.copies.len());
        self.tickets.reserve(inner.copies.len());
        if self.host_bytes() < inner.host_bytes {
            if let Some(old) = self.host.take() {
                self.memory.release(old.arena);
            }
            let what = format!("what \"{}\" sends to the host", inner.name);
            self.host = Some(self.memory.reserve(inner.host_bytes, &what)?);
        }
        Ok(())
    }

    /// Starts a copy; `place` tells where buffers lie.
    pub(super) fn start_copy(&mut self, inner: &Compiled, copy: usize, env: &Env, place: impl Fn(usize) -> Region) -> Result<()> {
        let copied = inner.copies[copy];
        let bytes = inner.buffers[copied.from].bytes_at(env);
        let [from, to] = [copied.from, copied.to].map(|buffer| place(buffer).part(0, bytes));
        debug_assert_eq!(self.tickets.len(), copy, "copies start in their order");
        let ticket = self.copying()?.start_copy(&from, &to);
        self.tickets.push(ticket);
        Ok(())
    }

    /// Waits until a copy has ended.
    pub(super) fn finish_copy(&mut self, copy: usize) -> Result<()> {
        let ticket = self.tickets[copy];
        self.copying()?.wait_for(ticket);
        Ok(())
    }
}
