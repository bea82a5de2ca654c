//! Transfers: values that are copied to the host while they lie idle and prefetched before their
//! next use, and bytes that ranks exchange.
//!
//! A program says at which steps transfers start and must have ended; the device makes them.

use slabwise_kernels::memory::Region;
use slabwise_kernels::size::Env;

use super::Session;
use super::steps::{Buffers, Run, Ticket};
use crate::backend::Call;
use crate::error::Result;
use crate::memory::offload::Offload;
use crate::program::{Compiled, Transfer};

impl Session {
    /// Lets programs whose slab would be larger than the budget offload values to the host while
    /// they lie idle, where that costs less time than recomputing them. Results have the same bits.
    /// Without a budget nothing is offloaded.
    ///
    /// On a CUDA device the host's space is pinned memory, and there is a stream for the copies of
    /// each direction. On the CPU it is memory beside the slab, and a thread makes the copies. That
    /// saves no memory of the machine; its purpose is to make, test and compare plans for devices
    /// with separate memory. Where the system pins too little, compiling is an error;
    /// [`Offload::with_host_bytes`] bounds it.
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
        self.memory.grow_host(inner)
    }

    /// Starts a transfer.
    pub(super) fn start_transfer(
        &mut self,
        run: &Run<'_>,
        step: usize,
        transfer: usize,
        env: &Env,
    ) -> Result<()> {
        let inner = run.inner;
        self.execution.tickets[transfer] = match &inner.transfers[transfer] {
            Transfer::Ranks(kernel, places) => {
                self.synchronize_ranks(inner)?;
                let [from, to] = places;
                let arguments = [self.argument(run, from, env)?, self.argument(run, to, env)?];
                let call = Call {
                    loaded: inner.loaded.as_ref(),
                    step,
                    kernel,
                    slice: None,
                    arguments: &arguments,
                    workspace: Region::default(),
                    sizes: env,
                    team: &self.execution.team,
                    transport: self.world.transport(),
                };
                Ticket::Exchange(self.memory.backend.start_exchange(&call)?)
            }
            &Transfer::Host { from, to } => {
                let bytes = inner.buffers[from].bytes_at(env);
                let from = self.region_of(run, from)?.part(0, bytes);
                let to = self.region_of(run, to)?.part(0, bytes);
                if let Buffers::Pooled(_) = run.buffers {
                    // At once: this mode is for comparing memory, and a caching pool plans no
                    // copies ahead.
                    return self.memory.backend.copy(&from, &to);
                }
                let ticket = self.memory.backend.start_copy(transfer, &from, &to)?;
                ticket.map_or(Ticket::None, Ticket::Copy)
            }
        };
        Ok(())
    }

    /// Waits until a transfer has ended.
    pub(super) fn finish_transfer(&mut self, run: &Run<'_>, transfer: usize) -> Result<()> {
        let ticket = self.execution.tickets[transfer];
        let backend = &mut self.memory.backend;
        match (&run.inner.transfers[transfer], ticket) {
            (Transfer::Host { .. }, _) if matches!(run.buffers, Buffers::Pooled(_)) => Ok(()),
            (Transfer::Host { .. }, Ticket::Copy(ticket)) => {
                backend.finish_copy(transfer, Some(ticket))
            }
            (Transfer::Host { .. }, _) => backend.finish_copy(transfer, None),
            (Transfer::Ranks(..), Ticket::Exchange(exchange)) => match self.world.transport() {
                Some(transport) => backend.finish_exchange(exchange, transport),
                None => Ok(()),
            },
            (Transfer::Ranks(..), _) => Ok(()),
        }
    }
}
