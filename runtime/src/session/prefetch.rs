//! Inputs that arrive while a step runs.
//!
//! A program has `n` slots for its inputs: the planned places, which kernels read, and a ring of `n
//! - 1` more, which take the batches that come next: on the CPU a thread copies them there, on a
//! CUDA device they are written to pinned memory of the host and travel on a stream of their own. A
//! batch moves from the ring to its places when its step begins. So every step runs at the same
//! addresses, inputs share bytes of the slab with what lives after them as without slots, and each
//! slot more takes the bytes of the inputs once more. (To run steps in the slots themselves, in
//! turn, would save that move, and take `n` slots of their own for the whole step, and `n` recorded
//! steps of a device that replays them.)

use std::sync::Arc;

use slabwise_kernels::copies::Ticket;
use slabwise_kernels::dtype::DType;
use slabwise_kernels::memory::Region;
use slabwise_kernels::size::Env;

use super::Session;
use super::slots::Slots;
use crate::backend::{Slot, SlotWriter};
use crate::buffer::Output;
use crate::error::{Error, Result};
use crate::feed::{Feed, Source};
use crate::program::{Compiled, Program};

/// A batch under way.
struct Batch {
    /// Names it, where a thread copies it.
    ticket: Option<Ticket>,
    env: Env,
}

/// Where an input lies in a slot.
#[derive(Clone, Copy)]
struct Part {
    /// None if no kernel reads it.
    buffer: Option<usize>,
    offset: u64,
    dtype: DType,
}

/// The slots ahead of a program.
pub(super) struct Ring {
    pub(super) region: Region,
    /// From one slot to the next.
    stride: u64,
    parts: Arc<[Part]>,
    slots: Slots<Batch>,
    /// The device's number of it, where copies are the device's to make.
    number: usize,
    /// The end of the highest byte in use so far.
    used: u64,
    /// What was wrong with the batch that follows those in slots.
    failed: Option<Error>,
}

impl Session {
    /// How many slots inputs have, the one that kernels read included: 1 unless told otherwise.
    /// Programs compiled from now on can take up to `slots - 1` batches
    /// [ahead](Session::run_ahead), for which their slab grows by the bytes of their inputs as
    /// often, and on a CUDA device as much of the host's memory is pinned; those with
    /// [free](crate::Dim::free) lengths take none. Results do not depend on it.
    #[must_use]
    pub fn with_prefetch(mut self, slots: usize) -> Self {
        self.slots_of_inputs = slots.max(1);
        self
    }

    /// The slots of inputs beside the planned ones.
    pub(crate) fn slots_ahead(&self) -> usize {
        self.slots_of_inputs - 1
    }

    /// Memory for the slots of a program; which ring it is, if its plan has any.
    pub(crate) fn open_slots(&mut self, inner: &Compiled) -> Result<Option<usize>> {
        let mut stride = 0;
        let part = |input: &crate::program::InputSlot| {
            let offset = stride;
            stride += input.buffer.map_or(0, |b| inner.buffers[b].place.bytes);
            Part {
                buffer: input.buffer,
                offset,
                dtype: input.dtype,
            }
        };
        let parts: Arc<[Part]> = inner.inputs.iter().map(part).collect();
        let bytes = inner.plan.persistent().ahead;
        if bytes == 0 || stride == 0 {
            return Ok(None);
        }
        let ahead = (bytes / stride) as usize;
        let region = self.reserve(bytes, &format!("slots of the inputs of \"{}\"", inner.name))?;
        let number = self.memory.open_queue(&region, ahead, inner.copies.len())?;
        let slots = Slots::new(ahead);
        let ring = Ring {
            region,
            stride,
            parts,
            slots,
            number,
            used: 0,
            failed: None,
        };
        self.rings.push(ring);
        Ok(Some(self.rings.len() - 1))
    }

    /// Runs a program on the next of these batches, while up to one less than [the
    /// slots](Session::with_prefetch) of those that follow are copied to the device; nothing once
    /// all have run. Call it with the same batches until then.
    ///
    /// # Errors
    /// As [`Session::run`]; what is wrong with a batch is told when it is its turn, and the next
    /// call goes on with the one after it.
    pub fn run_ahead<const N: usize, F>(
        &mut self,
        program: &Program<N>,
        batches: &mut impl Iterator<Item = F>,
    ) -> Result<Option<[Output<'_>; N]>>
    where
        F: Feed + Send + 'static,
    {
        let inner = &program.inner;
        self.ready(inner)?;
        let Some(ring) = inner.ring else {
            return match batches.next() {
                Some(batch) => self.run(program, batch).map(Some),
                None => Ok(None),
            };
        };
        self.fill_slots(inner, ring, batches);
        if self.rings[ring].slots.first().is_none() {
            return self.rings[ring].failed.take().map_or(Ok(None), Err);
        }
        let mut env = self.take_slot(inner, ring)?;
        // What is run at once overlaps with copies that were started before it; what is only asked
        // for, with those started after.
        let at_once = !self.memory.capabilities().asynchronous;
        if at_once {
            self.fill_slots(inner, ring, batches);
        }
        self.run_taken(inner, ring, &mut env)?;
        if !at_once {
            self.fill_slots(inner, ring, batches);
        }
        let slab = self.slab()?;
        self.outputs(inner, &(), &env, slab).map(Some)
    }

    /// Starts to copy a batch into the program's next free [slot](Session::with_prefetch), for
    /// [`Session::run_prefetched`]. On a CUDA device, indices out of range are found here.
    ///
    /// # Errors
    /// If the batch does not fit the program, one of its inputs is no array of the host, or no slot
    /// is free.
    pub fn prefetch<const N: usize>(
        &mut self,
        program: &Program<N>,
        batch: impl Feed + Send + 'static,
    ) -> Result<()> {
        let inner = &program.inner;
        self.ready(inner)?;
        let ring = inner.ring.ok_or_else(|| self.no_slots(inner))?;
        self.fill_slot(inner, ring, batch)
    }

    /// Runs a program on the batch that was [prefetched](Session::prefetch) first.
    ///
    /// # Errors
    /// As [`Session::run`], and if there is none.
    pub fn run_prefetched<const N: usize>(
        &mut self,
        program: &Program<N>,
    ) -> Result<[Output<'_>; N]> {
        let inner = &program.inner;
        self.ready(inner)?;
        let ring = inner.ring.ok_or_else(|| self.no_slots(inner))?;
        let mut env = self.take_slot(inner, ring)?;
        self.run_taken(inner, ring, &mut env)?;
        let slab = self.slab()?;
        self.outputs(inner, &(), &env, slab)
    }

    fn no_slots(&self, inner: &Compiled) -> Error {
        Error::Value(format!(
            "\"{}\" has no slots for batches ahead: it takes no inputs, has free lengths, or was compiled without with_prefetch(2) or more",
            inner.name
        ))
    }

    /// Fills free slots for as long as there are batches, up to the first that is wrong.
    fn fill_slots<F: Feed + Send + 'static>(
        &mut self,
        inner: &Compiled,
        ring: usize,
        batches: &mut impl Iterator<Item = F>,
    ) {
        while self.rings[ring].failed.is_none() && self.rings[ring].slots.free().is_some() {
            let Some(batch) = batches.next() else { return };
            self.rings[ring].failed = self.fill_slot(inner, ring, batch).err();
        }
    }

    fn fill_slot(
        &mut self,
        inner: &Compiled,
        ring: usize,
        batch: impl Feed + Send + 'static,
    ) -> Result<()> {
        let env = inner.sizes(&batch)?;
        let mut elsewhere = None;
        batch.each(&mut |at, source| {
            if !matches!(source, Source::Host { .. }) {
                elsewhere.get_or_insert(at);
            }
        });
        if let Some(at) = elsewhere {
            let message = "it is a buffer of the device, which needs no copy ahead; run the step with it instead".into();
            return Err(Error::Input {
                name: inner.inputs[at].name.to_string(),
                message,
            });
        }
        let Ring {
            region,
            stride,
            parts,
            slots,
            number,
            used,
            ..
        } = &mut self.rings[ring];
        let Some(slot) = slots.free() else {
            let message = format!(
                "all slots of \"{}\" hold batches that have not run yet; run_prefetched frees one",
                inner.name
            );
            return Err(Error::Value(message));
        };
        let to = region.part(slot * *stride, *stride);
        *used = (*used).max((slot + 1) * *stride);
        let slot = Slot {
            queue: *number,
            number: slot,
            region: to,
        };
        let mut writer = BatchWriter {
            batch: Some(batch),
            parts,
            inner,
            env: &env,
        };
        let ticket = self.memory.fill_slot(slot, &mut writer)?;
        self.rings[ring].slots.fill(Batch { ticket, env });
        Ok(())
    }

    /// Moves the first batch to where kernels read it; the sizes it has.
    fn take_slot(&mut self, inner: &Compiled, ring: usize) -> Result<Env> {
        let slab = self.slab()?;
        if self.rings[ring].slots.first().is_none() {
            return Err(Error::Value(format!(
                "no batch was prefetched for \"{}\"",
                inner.name
            )));
        }
        // What an earlier run met is told before this batch leaves its slot.
        self.memory.begin_inputs()?;
        let Ring {
            region,
            stride,
            parts,
            slots,
            number,
            ..
        } = &mut self.rings[ring];
        let (Some(slot), Some(Batch { ticket, env })) = (slots.first(), slots.take()) else {
            return Err(Error::Internal("a slot holds no batch".into()));
        };
        let planned = |part: &Part| {
            let buffer = &inner.buffers[part.buffer?];
            Some((
                part.offset,
                slab.part(buffer.place.offset, buffer.bytes_at(&env)),
            ))
        };
        let slot = Slot {
            queue: *number,
            number: slot,
            region: region.part(slot * *stride, *stride),
        };
        let mut moves = parts.iter().filter_map(planned);
        self.memory.take_slot(slot, ticket, &mut moves)?;
        Ok(env)
    }

    /// Runs a program whose inputs lie in their places, taken from a slot.
    fn run_taken(&mut self, inner: &Compiled, ring: usize, env: &mut Env) -> Result<()> {
        self.memory.publish(&self.sizes, env)?;
        self.memory.end_inputs()?;
        self.run_fed(inner, env, &[])?;
        self.stats.peak_slab_bytes += self.rings[ring].used;
        Ok(())
    }
}

/// Writes a batch to a slot.
struct BatchWriter<'a, F> {
    /// None once a task has it.
    batch: Option<F>,
    parts: &'a Arc<[Part]>,
    inner: &'a Compiled,
    env: &'a Env,
}

impl<F: Feed + Send + 'static> SlotWriter for BatchWriter<'_, F> {
    fn write(&mut self, slot: &mut [u8]) -> Result<()> {
        let mut checked = Ok(());
        if let Some(batch) = &self.batch {
            write(batch, self.parts, slot, &mut |at, dtype, bytes| {
                if let (Some(loaded), true) = (&self.inner.loaded, checked.is_ok()) {
                    checked = loaded.check_input(at, dtype, bytes, self.env);
                }
            });
        }
        checked
    }

    fn take_task(&mut self) -> Box<dyn FnOnce(&mut [u8]) + Send> {
        let (batch, parts) = (self.batch.take(), Arc::clone(self.parts));
        Box::new(move |bytes| {
            if let Some(batch) = batch {
                write(&batch, &parts, bytes, &mut |_, _, _| ());
            }
        })
    }
}

/// Writes the inputs of a batch to their parts of a slot, and shows each to `look` as it was given.
fn write(
    batch: &dyn Feed,
    parts: &[Part],
    bytes: &mut [u8],
    look: &mut dyn FnMut(usize, DType, &[u8]),
) {
    batch.each(&mut |at, source| {
        let Source::Host {
            dtype,
            elements,
            copy,
            ..
        } = source
        else {
            return;
        };
        let Some(part) = parts.get(at).filter(|part| part.buffer.is_some()) else {
            return;
        };
        let start = part.offset as usize;
        let Some(to) = bytes.get_mut(start..start + elements * dtype.bytes()) else {
            return;
        };
        copy(to);
        if part.dtype == DType::Bool {
            to.iter_mut().for_each(|byte| *byte = u8::from(*byte != 0));
        }
        look(at, dtype, to);
    });
}
