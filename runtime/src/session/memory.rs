//! The memory of a session: its device, the slab, the pool, buffers of the user, and optional
//! buffers that make it faster, which are freed where memory is short.

use std::sync::Arc;

use slabwise_kernels::dtype::DType;
use slabwise_kernels::memory::Region;
use slabwise_kernels::size::MAX_SYMBOLS;
use slabwise_planner::Bytes;

use super::prefetch;
use crate::backend::{self, Backend};
use crate::buffer::Buffer;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::feed::Lengths;
use crate::memory::budget::Allowance;
use crate::memory::offload::Offload;
use crate::memory::{MemoryConfig, Pool};
use crate::program::Compiled;
use crate::world::World;

/// The memory of a session, and the device that it is on.
pub(crate) struct Memory {
    pub backend: Box<dyn Backend>,
    /// The pool of the dynamic mode and of values of data-dependent size.
    pub pool: Pool,
    /// The limit of weights, state and slab.
    pub budget: Allowance,
    pub offload: Option<Offload>,
    pub(super) slab: Option<Region>,
    /// The memory of the host for values that programs offload.
    pub(super) host: Option<Region>,
    /// The sizes of a run, where its kernels read them.
    pub(super) sizes: Region,
    pub(super) buffers: Residents,
    /// The slots of each program for its inputs, including the one that kernels read.
    pub(super) input_slots: usize,
    /// The prefetch queues of programs.
    pub(super) queues: Vec<prefetch::Queue>,
}

/// The buffers that the user keeps on the device between runs.
pub(super) struct Residents {
    /// The number of the session, which tells its buffers from those of others.
    session: u64,
    pub slots: Vec<Slot>,
    /// The slots that no buffer has.
    free: Vec<usize>,
}

/// The place of a buffer of the user.
pub(super) struct Slot {
    pub region: Region,
    /// The number of buffers that had the slot before, or of donations of this one. It tells
    /// handles apart.
    pub generation: u64,
    /// The first generation of the buffer that has the slot now, or of the next. Earlier ones
    /// belong to freed buffers.
    born: u64,
}

impl Residents {
    /// A handle of a new buffer.
    pub fn add(
        &mut self,
        region: Region,
        name: Arc<str>,
        dtype: DType,
        lengths: Lengths,
    ) -> Buffer {
        let slot = self.free.pop().unwrap_or(self.slots.len());
        match self.slots.get_mut(slot) {
            Some(slot) => slot.region = region,
            None => self.slots.push(Slot {
                region,
                generation: 0,
                born: 0,
            }),
        }
        Buffer {
            session: self.session,
            slot,
            generation: self.slots[slot].generation,
            name,
            dtype,
            lengths,
        }
    }

    /// The region of a buffer.
    ///
    /// # Errors
    /// If it belongs to another session, or was freed or donated.
    pub fn region(&self, buffer: &Buffer) -> Result<Region> {
        if buffer.session != self.session {
            return Err(Error::Foreign(format!(
                "buffer \"{}\" belongs to another session; upload its values to this one",
                buffer.name
            )));
        }
        let name = || buffer.name.to_string();
        match self.slots.get(buffer.slot) {
            Some(slot) if slot.generation == buffer.generation => Ok(slot.region),
            Some(slot) if buffer.generation < slot.born => Err(Error::Freed { name: name() }),
            _ => Err(Error::Donated { name: name() }),
        }
    }

    /// Makes every handle of a buffer invalid; the region that it had.
    pub fn remove(&mut self, buffer: &Buffer) -> Result<Region> {
        let region = self.region(buffer)?;
        let slot = &mut self.slots[buffer.slot];
        slot.generation += 1;
        slot.born = slot.generation;
        self.free.push(buffer.slot);
        Ok(region)
    }
}

impl Memory {
    /// The memory of a session, whose number is `session`, on a device.
    pub fn open(device: Device, session: u64) -> Result<Self> {
        Ok(Memory {
            backend: backend::open(device)?,
            pool: super::dynamic::open_pool(&MemoryConfig::default())?,
            budget: Allowance::default(),
            offload: None,
            slab: None,
            host: None,
            sizes: Region::default(),
            buffers: Residents {
                session,
                slots: Vec::new(),
                free: Vec::new(),
            },
            input_slots: 1,
            queues: Vec::new(),
        })
    }

    /// Bytes of the slab.
    pub fn slab_bytes(&self) -> u64 {
        self.slab.map_or(0, |s| s.bytes)
    }

    /// Bytes of the host's memory for offloaded values.
    pub fn host_bytes(&self) -> u64 {
        self.host.map_or(0, |host| host.bytes)
    }

    /// Bytes of all prefetch queues.
    pub fn queue_bytes(&self) -> u64 {
        let queues = self.queues.iter().map(|queue| queue.region.bytes);
        queues.fold(0, u64::saturating_add)
    }

    /// The sizes of a run.
    pub fn sizes(&self) -> Region {
        self.sizes
    }

    pub(super) fn slab(&self) -> Result<Region> {
        self.slab
            .ok_or_else(|| Error::Internal("a program without a slab".into()))
    }

    /// Reserves the memory for the sizes of a run.
    pub fn reserve_sizes(&mut self) -> Result<()> {
        if self.sizes.bytes == 0 {
            self.sizes = self
                .backend
                .reserve(4 * MAX_SYMBOLS as u64, "the sizes of runs")?;
        }
        Ok(())
    }

    /// Makes the slab large enough for a program. Other ranks may read sent values in place.
    ///
    /// # Errors
    /// If there is no memory for it; the slab is then as large as before.
    pub fn grow_slab(&mut self, inner: &Compiled, world: &World) -> Result<()> {
        let bytes = inner.slab_bytes;
        if self.slab.is_some_and(|s| s.bytes >= bytes) {
            return Ok(());
        }
        let purpose = format!("the slab of \"{}\"", inner.name);
        let old = self.slab.take();
        let (slab, grown) = self.replace(old, bytes, |memory, bytes| {
            let shared = match world.transport() {
                Some(ranks) => memory.backend.reserve_for_ranks(bytes, &purpose, ranks),
                None => Ok(None),
            };
            // Without such memory, or room for it before optional memory is given up, any will do.
            match shared {
                Ok(Some(slab)) => Ok(slab),
                _ => memory.reserve(bytes, &purpose),
            }
        });
        self.slab = slab;
        grown.map_err(|e| inner.plan.with_holders(e))
    }

    /// Makes the host's memory large enough for the values that a program offloads.
    ///
    /// # Errors
    /// If there is no memory for them; the memory is then as large as before.
    pub(super) fn grow_host(&mut self, inner: &Compiled) -> Result<()> {
        if self.host_bytes() >= inner.host_bytes {
            return Ok(());
        }
        let purpose = format!("the values that \"{}\" offloads to the host", inner.name);
        let old = self.host.take();
        let (host, grown) = self.replace(old, inner.host_bytes, |memory, bytes| {
            memory.backend.reserve_host(bytes, &purpose)
        });
        self.host = host;
        grown
    }

    /// Releases a region and reserves a larger one. If there is no memory for that, the programs
    /// that had the old one get one of its size, for which the memory has just been released.
    fn replace(
        &mut self,
        old: Option<Region>,
        bytes: u64,
        reserve: impl Fn(&mut Memory, u64) -> Result<Region>,
    ) -> (Option<Region>, Result<()>) {
        if let Some(old) = old {
            self.backend.release(old.arena);
        }
        match reserve(self, bytes) {
            Ok(new) => (Some(new), Ok(())),
            Err(error) => (
                old.and_then(|old| reserve(self, old.bytes).ok()),
                Err(error),
            ),
        }
    }

    /// Copies bytes as truth values.
    pub(super) fn copy_truth(&mut self, from: &Region, to: &Region) -> Result<()> {
        let bytes = self
            .backend
            .map_read(from, |memory, from| memory.bytes(from).to_vec())?;
        self.backend.upload(to, &mut |to| {
            to.copy_from_slice(&bytes);
            to_truth(to);
        })
    }

    /// Makes slab and host's memory large enough for a run: they are, unless the memory for them
    /// was lost when a larger program failed.
    pub(super) fn ensure_planned(&mut self, inner: &Compiled, world: &World) -> Result<()> {
        self.grow_slab(inner, world)?;
        self.grow_host(inner)
    }

    /// A new arena; an error names its purpose. If there is no memory for it, optional memory is
    /// given up first: the unused blocks of the pool, then the staging buffer of the next run's
    /// inputs.
    pub(crate) fn reserve(&mut self, bytes: u64, what: &str) -> Result<Region> {
        let short = |result: &Result<Region>| matches!(result, Err(Error::OutOfMemory { .. }));
        let mut reserved = self.backend.reserve(bytes, what);
        if short(&reserved) && self.pool.empty_cache(self.backend.source()) > 0 {
            reserved = self.backend.reserve(bytes, what);
        }
        if short(&reserved) && self.backend.staging().0 > 0 && self.backend.set_staging(0)? {
            reserved = self.backend.reserve(bytes, what);
        }
        reserved
    }

    /// Bytes of the slab, if it must be this high, and of all prefetch queues.
    fn bytes_beside_staging(&self, height: u64) -> u64 {
        let slab = self.slab_bytes().max(height);
        slab.saturating_add(self.queue_bytes())
    }

    /// Makes the staging buffer as large as a program's plan says, or gives up that of other
    /// programs if the budget has no room for it beside this one.
    pub(crate) fn prepare_staging(
        &mut self,
        inner: &mut Compiled,
        room: Option<u64>,
    ) -> Result<()> {
        let (there, _) = self.backend.staging();
        let (ahead, staging) = (
            inner.plan.persistent().prefetch,
            inner.plan.persistent().staging,
        );
        let beside = self
            .bytes_beside_staging(inner.slab_bytes)
            .saturating_add(ahead);
        let wanted = match room {
            Some(room) if beside.saturating_add(there) > room => staging,
            _ => there.max(staging),
        };
        if !self.backend.set_staging(wanted)? {
            log::warn!(
                "\"{}\": no memory for a staging buffer of {} beside the inputs of the current run",
                inner.name,
                Bytes(wanted)
            );
            inner.plan.without_staging();
        }
        Ok(())
    }
}

/// Makes every byte but 0 a 1.
pub(super) fn to_truth(bytes: &mut [u8]) {
    bytes
        .iter_mut()
        .for_each(|byte| *byte = u8::from(*byte != 0));
}
