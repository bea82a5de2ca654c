//! The CPU as a back end. Its memory is the host's, kernels have run when their launch returns, and
//! a thread makes the copies that overlap with kernels.

use std::sync::{Mutex, PoisonError};

use slabwise_kernels::collective::{Exchange, Transport, TransportError};
use slabwise_kernels::copies::Ticket;
use slabwise_kernels::cpu::{self, Config, Fault, Isa, Peak, SpecError, Team};
use slabwise_kernels::memory::{Memory, Region};
use slabwise_kernels::size::{Env, Symbol};
use slabwise_kernels::spec::Spec;
use slabwise_planner::Bytes;

use super::{
    Backend, Call, Capabilities, HalfProducts, Kernel, Roofline, Slot, SlotWriter, refused, scratch,
};
use crate::error::{Error, Result};
use crate::memory::{Source, available};

pub(super) const CAPABILITIES: Capabilities = Capabilities {
    half_products: HalfProducts::Matrices,
    late_epilogues: true,
    rounds_attention_gradients: false,
    epilogue_sums: false,
    prologues: true,
    micro_batches: true,
    recorded_launches: false,
    asynchronous: false,
};

/// The CPU as a target of kernels.
#[derive(Clone, Copy, Debug)]
pub struct Target {
    pub(super) config: Config,
    /// The most bytes of a kernel's workspace, if it can run with fewer than it is fastest with.
    pub(super) workspace_max: u64,
}

impl Target {
    pub(super) fn prepare(&self, spec: Spec, bounds: &Env) -> Result<cpu::Kernel, SpecError> {
        cpu::Kernel::within(spec, bounds, &self.config, self.workspace_max)
    }

    pub(super) fn sliced(
        &self,
        spec: Spec,
        batch: Symbol,
        examples: u32,
        bounds: &Env,
    ) -> Result<Option<cpu::Kernel>, SpecError> {
        cpu::Kernel::sliced(
            spec,
            batch,
            examples,
            bounds,
            &self.config,
            self.workspace_max,
        )
    }

    pub(super) fn has_same_sums(&self, a: &Spec, b: &Spec, bounds: &Env) -> Option<bool> {
        cpu::has_same_sums(a, b, bounds, &self.config)
    }
}

/// The CPU in use by a session.
pub(super) struct Cpu {
    memory: Memory,
    /// The speed of the last team that was measured.
    peak: Mutex<Option<Peak>>,
    /// The loss of a rank, after which a thread of the transport may still access the memory.
    lost: Option<String>,
}

impl Cpu {
    pub fn new() -> Cpu {
        Cpu {
            memory: Memory::new(),
            peak: Mutex::new(None),
            lost: None,
        }
    }

    /// The error of a transport. If it keeps the memory, nothing reads or writes that any more.
    fn lose(&mut self, TransportError { why, keeps }: TransportError) -> Error {
        if keeps {
            self.lost.get_or_insert_with(|| why.clone());
        }
        Error::Peer(why)
    }

    /// The memory, unless the loss of a rank has made it inaccessible.
    fn own(&self) -> Result<&Memory> {
        match &self.lost {
            None => Ok(&self.memory),
            Some(why) => Err(inaccessible(why)),
        }
    }

    /// Like [`Cpu::own`], to write.
    fn own_mut(&mut self) -> Result<&mut Memory> {
        match &self.lost {
            None => Ok(&mut self.memory),
            Some(why) => Err(inaccessible(why)),
        }
    }
}

fn inaccessible(why: &str) -> Error {
    Error::Peer(format!(
        "{why}; the exchange in progress may still write to the session's memory, so neither its \
         weights can be read nor its programs be run any more: start again from a checkpoint"
    ))
}

/// Refuses many bytes that the host does not have.
fn check_available(bytes: u64, purpose: &str) -> Result<()> {
    if bytes >= available::WORTH_ASKING
        && let Some(free) = available::available().filter(|&free| free < bytes)
    {
        let more = format!(
            ": {} are free, swap and the limit of the control group counted",
            Bytes(free)
        );
        return Err(Error::OutOfMemory {
            what: purpose.into(),
            bytes: Bytes(bytes),
            more,
        });
    }
    Ok(())
}

impl Backend for Cpu {
    fn capabilities(&self) -> Capabilities {
        CAPABILITIES
    }

    fn target(&self, config: Config, _room: Option<u64>) -> super::Target {
        super::Target::Cpu(Target {
            config,
            workspace_max: u64::MAX,
        })
    }

    fn host(&self) -> Option<&Memory> {
        self.own().ok()
    }

    fn source(&mut self) -> &mut dyn Source {
        &mut self.memory
    }

    fn reserved_bytes(&self) -> u64 {
        self.memory.reserved_bytes()
    }

    fn reserve(&mut self, bytes: u64, purpose: &str) -> Result<Region> {
        check_available(bytes, purpose)?;
        self.memory.reserve(bytes).map_err(|e| refused(purpose, e))
    }

    fn reserve_for_ranks(
        &mut self,
        bytes: u64,
        purpose: &str,
        transport: &dyn Transport,
    ) -> Result<Option<Region>> {
        check_available(bytes, purpose)?;
        let arena = transport.arena(bytes);
        Ok(arena.map(|arena| self.memory.adopt(arena)))
    }

    fn release(&mut self, arena: u32) {
        self.memory.release(arena);
    }

    fn copy(&mut self, from: &Region, to: &Region) -> Result<()> {
        self.own_mut()?.copy(from, to);
        Ok(())
    }

    fn fill(&mut self, region: &Region, byte: u8) -> Result<()> {
        self.own_mut()?.bytes_mut(region).fill(byte);
        Ok(())
    }

    fn download(&self, region: &Region) -> Result<(Memory, Region)> {
        let (mut copy, own) = scratch(region.bytes)?;
        copy.bytes_mut(&own)
            .copy_from_slice(self.own()?.bytes(region));
        Ok((copy, own))
    }

    fn map_write(
        &mut self,
        region: &Region,
        change: &mut dyn FnMut(&mut Memory, &Region),
    ) -> Result<()> {
        change(self.own_mut()?, region);
        Ok(())
    }

    fn read_i32(&self, region: &Region) -> Result<i32> {
        Ok(self.own()?.elements::<i32>(region)[0])
    }

    fn upload(&mut self, region: &Region, write: &mut dyn FnMut(&mut [u8])) -> Result<()> {
        write(self.own_mut()?.bytes_mut(region));
        Ok(())
    }

    fn run(&mut self, call: &Call<'_>) -> Result<Result<(), Fault>> {
        let Kernel::Cpu(kernel) = call.kernel else {
            return Err(Error::Internal(format!(
                "kernel {} was prepared for another device",
                call.step
            )));
        };
        let (memory, workspace) = (self.own_mut()?, &call.workspace);
        Ok(match call.slice {
            Some(slice) => kernel.run_slice(
                memory,
                call.arguments,
                workspace,
                call.sizes,
                call.team,
                slice,
            ),
            None => kernel.run(memory, call.arguments, workspace, call.sizes, call.team),
        })
    }

    fn roofline(&self, _tf32: bool, team: &Team) -> Option<Roofline> {
        let mut known = self.peak.lock().unwrap_or_else(PoisonError::into_inner);
        let peak = match *known {
            Some(peak) if peak.threads == team.threads() => peak,
            _ => *known.insert(Peak::measure(Isa::detect(), team)),
        };
        Some(Roofline {
            // Halves are computed as f32, and other code is not made of multiply-adds.
            flops: [peak.flops, peak.flops, peak.flops / 2.0],
            bytes: peak.read.max(peak.copy),
            source: format!(
                "measured with {} threads: {:.1} GFLOP/s, {:.1} GB/s read, {:.1} GB/s copied",
                peak.threads,
                peak.flops / 1e9,
                peak.read / 1e9,
                peak.copy / 1e9
            ),
        })
    }

    fn prepare_copies(&mut self, most: usize) -> Result<()> {
        self.memory.prepare_copies(most);
        Ok(())
    }

    fn start_copy(&mut self, _copy: usize, from: &Region, to: &Region) -> Result<Option<Ticket>> {
        Ok(Some(self.own_mut()?.start_copy(from, to)))
    }

    fn finish_copy(&mut self, _copy: usize, ticket: Option<Ticket>) -> Result<()> {
        if let Some(ticket) = ticket {
            self.memory.wait_for(ticket);
        }
        Ok(())
    }

    fn start_exchange(&mut self, call: &Call<'_>) -> Result<Exchange> {
        let (Kernel::Cpu(kernel), Some(transport)) = (call.kernel, call.transport) else {
            return Err(Error::Internal(format!(
                "step {} exchanges bytes between ranks, and the session has one",
                call.step
            )));
        };
        let started =
            kernel.start_exchange(&mut self.memory, call.arguments, call.sizes, transport);
        started.map_err(|error| self.lose(error))
    }

    fn finish_exchange(&mut self, exchange: Exchange, transport: &dyn Transport) -> Result<()> {
        let done = self.memory.finish_exchange(exchange, transport);
        done.map_err(|error| self.lose(error))
    }

    fn finish_transfers(&mut self, transport: Option<&dyn Transport>) {
        self.memory.wait_for_all();
        while let (None, Some(transport), Some(exchange)) =
            (&self.lost, transport, self.memory.first_exchange())
        {
            // The error that ended the run is the first one.
            let _ = self.finish_exchange(exchange, transport);
        }
    }

    fn open_queue(&mut self, _region: &Region, slots: usize, copies: usize) -> Result<usize> {
        self.memory.prepare_copies(slots + copies);
        Ok(0)
    }

    fn fill_slot(&mut self, slot: Slot, writer: &mut dyn SlotWriter) -> Result<Option<Ticket>> {
        let task = writer.take_task();
        Ok(Some(self.own_mut()?.start_fill(&slot.region, task)))
    }

    fn take_slot(
        &mut self,
        slot: Slot,
        ticket: Option<Ticket>,
        parts: &mut dyn Iterator<Item = (u64, Region)>,
    ) -> Result<()> {
        if let Some(ticket) = ticket {
            self.memory.wait_for(ticket);
        }
        for (offset, to) in parts {
            self.own_mut()?
                .copy(&slot.region.part(offset, to.bytes), &to);
        }
        Ok(())
    }
}
