//! Prefetching: the inputs of the next runs are copied to the device while a run is in progress.
//!
//! A program has `n` slots for its inputs: the planned offsets, which kernels read, and a queue of
//! `n - 1` more for the next batches. On the CPU a thread copies a batch to its slot; on a CUDA
//! device it is written to pinned memory of the host, and a separate stream sends it. A batch moves
//! from the queue to the planned offsets when its run begins. Therefore every run uses the same
//! addresses, inputs share bytes of the slab with later values as they do without a queue, and each
//! slot takes the bytes of the inputs once. (To read the slots in place, in turn, would save the
//! move, but it would reserve all `n` slots for the whole run, and a device that replays runs would
//! record `n` of them.)

use std::sync::Arc;

use slabwise_kernels::copies::{Fill, Ticket};
use slabwise_kernels::dtype::DType;
use slabwise_kernels::memory::Region;
use slabwise_kernels::size::Env;

use super::Session;
use super::memory::to_truth;
use super::slots::Slots;
use crate::backend::{Slot, SlotWriter};
use crate::buffer::Output;
use crate::error::{Error, Result};
use crate::feed::{Feed, Source};
use crate::program::{Compiled, Program};

/// A batch in a slot, or on its way to it.
struct Batch {
    /// The thread's copy, where a thread copies it.
    ticket: Option<Ticket>,
    env: Env,
}

/// The place of an input in a slot.
#[derive(Clone, Copy)]
struct Part {
    /// None if no kernel reads it.
    buffer: Option<usize>,
    offset: u64,
    dtype: DType,
}

/// The prefetch queue of a program.
pub(super) struct Queue {
    pub(super) region: Region,
    /// Bytes from one slot to the next.
    stride: u64,
    parts: Arc<[Part]>,
    slots: Slots<Batch>,
    /// The device's number of the queue.
    number: usize,
    /// The end of the highest byte in use so far.
    used: u64,
    /// The error of the batch after those in slots.
    failed: Option<Error>,
}

impl Session {
    /// Sets the number of slots for inputs, including the one that kernels read; the default is 1.
    /// Programs compiled from now on can [prefetch](Session::run_ahead) up to `slots - 1` batches.
    /// Each takes the bytes of the inputs beside the slab, and on a CUDA device as much pinned
    /// memory of the host. Programs with [unbounded](crate::Dim::unbounded) lengths prefetch none. Results do
    /// not depend on it.
    #[must_use]
    pub fn with_prefetch(mut self, slots: usize) -> Self {
        self.memory.input_slots = slots.max(1);
        self
    }

    /// Reserves the prefetch queue of a program; its number, if the plan has one.
    pub(crate) fn open_prefetch_queue(&mut self, inner: &Compiled) -> Result<Option<usize>> {
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
        let bytes = inner.plan.persistent().prefetch;
        if bytes == 0 || stride == 0 {
            return Ok(None);
        }
        let ahead = (bytes / stride) as usize;
        let region = self
            .memory
            .reserve(bytes, &format!("slots of the inputs of \"{}\"", inner.name))?;
        let opened = self
            .memory
            .backend
            .open_queue(&region, ahead, inner.copies());
        let number = match opened {
            Ok(number) => number,
            Err(error) => {
                self.memory.backend.release(region.arena);
                return Err(error);
            }
        };
        let slots = Slots::new(ahead);
        let queue = Queue {
            region,
            stride,
            parts,
            slots,
            number,
            used: 0,
            failed: None,
        };
        self.memory.queues.push(queue);
        Ok(Some(self.memory.queues.len() - 1))
    }

    /// Runs a program on the next of these batches while the batches after it are copied to the
    /// device, as many as there are [slots](Session::with_prefetch) less one; `None` once all have
    /// run. Call it with the same batches until then.
    ///
    /// # Errors
    /// Those of [`Session::run`]. The error of a batch is returned when it is its turn, and the
    /// next call continues with the batch after it.
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
        let Some(queue) = inner.prefetch_queue else {
            return match batches.next() {
                Some(batch) => self.run(program, batch).map(Some),
                None => Ok(None),
            };
        };
        self.fill_slots(inner, queue, batches);
        if self.memory.queues[queue].slots.first().is_none() {
            return match self.memory.queues[queue].failed.take() {
                Some(error) => self.with_ranks(inner, |_| Err(error)),
                None => Ok(None),
            };
        }
        let mut env = self.take_slot(inner, queue)?;
        // Kernels that run at once overlap with copies started before them; kernels that are only
        // launched overlap with copies started after.
        let at_once = !self.memory.backend.capabilities().asynchronous;
        if at_once {
            self.fill_slots(inner, queue, batches);
        }
        self.run_taken(inner, queue, &mut env)?;
        if !at_once {
            self.fill_slots(inner, queue, batches);
        }
        let slab = self.memory.slab()?;
        self.outputs((inner, &program.debugged), &(), &env, slab)
            .map(Some)
    }

    /// Starts to copy a batch to the program's next free [slot](Session::with_prefetch), for
    /// [`Session::run_prefetched`]. On a CUDA device, indices out of range are detected here.
    ///
    /// # Errors
    /// If the batch does not fit the program, one of its inputs is not an array of the host, or no
    /// slot is free.
    pub fn prefetch<const N: usize>(
        &mut self,
        program: &Program<N>,
        batch: impl Feed + Send + 'static,
    ) -> Result<()> {
        let inner = &program.inner;
        self.ready(inner)?;
        let queue = inner.prefetch_queue.ok_or_else(|| self.no_slots(inner))?;
        self.fill_slot(inner, queue, batch)
    }

    /// Runs a program on the batch that was [prefetched](Session::prefetch) first.
    ///
    /// # Errors
    /// Those of [`Session::run`], and if no batch was prefetched.
    pub fn run_prefetched<const N: usize>(
        &mut self,
        program: &Program<N>,
    ) -> Result<[Output<'_>; N]> {
        let inner = &program.inner;
        self.ready(inner)?;
        let queue = inner.prefetch_queue.ok_or_else(|| self.no_slots(inner))?;
        let mut env = self.take_slot(inner, queue)?;
        self.run_taken(inner, queue, &mut env)?;
        let slab = self.memory.slab()?;
        self.outputs((inner, &program.debugged), &(), &env, slab)
    }

    fn no_slots(&self, inner: &Compiled) -> Error {
        Error::Value(format!(
            "\"{}\" has no slots for prefetched batches: it takes no inputs, has unbounded lengths, or was compiled without with_prefetch(2) or more",
            inner.name
        ))
    }

    /// Fills free slots while there are batches, up to the first with an error.
    fn fill_slots<F: Feed + Send + 'static>(
        &mut self,
        inner: &Compiled,
        queue: usize,
        batches: &mut impl Iterator<Item = F>,
    ) {
        while self.memory.queues[queue].failed.is_none()
            && self.memory.queues[queue].slots.free().is_some()
        {
            let Some(batch) = batches.next() else { return };
            self.memory.queues[queue].failed = self.fill_slot(inner, queue, batch).err();
        }
    }

    fn fill_slot(
        &mut self,
        inner: &Compiled,
        queue: usize,
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
            let message = "it is a buffer of the device, which needs no prefetch; run the step with it instead".into();
            return Err(Error::Input {
                name: inner.inputs[at].name.to_string(),
                message,
            });
        }
        let Queue {
            region,
            stride,
            parts,
            slots,
            number,
            used,
            ..
        } = &mut self.memory.queues[queue];
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
        let ticket = self.memory.backend.fill_slot(slot, &mut writer)?;
        self.memory.queues[queue].slots.fill(Batch { ticket, env });
        Ok(())
    }

    /// Moves the first batch to its planned offsets; its sizes.
    fn take_slot(&mut self, inner: &Compiled, queue: usize) -> Result<Env> {
        self.memory.ensure_planned(inner, &self.world)?;
        let slab = self.memory.slab()?;
        if self.memory.queues[queue].slots.first().is_none() {
            return Err(Error::Value(format!(
                "no batch was prefetched for \"{}\"",
                inner.name
            )));
        }
        // An error of an earlier run is returned before this batch leaves its slot.
        self.memory.backend.begin_inputs()?;
        let Queue {
            region,
            stride,
            parts,
            slots,
            number,
            ..
        } = &mut self.memory.queues[queue];
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
        self.memory.backend.take_slot(slot, ticket, &mut moves)?;
        Ok(env)
    }

    /// Runs a program whose inputs were taken from a slot.
    fn run_taken(&mut self, inner: &Compiled, queue: usize, env: &mut Env) -> Result<()> {
        self.with_ranks(inner, |session| {
            let memory = &mut session.memory;
            memory.backend.publish(&memory.sizes, env)?;
            memory.backend.end_inputs()?;
            session.run_fed(inner, env, &[])
        })?;
        self.execution.stats.peak_slab_bytes += self.memory.queues[queue].used;
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

    fn take_task(&mut self) -> Fill {
        let (batch, parts) = (self.batch.take(), Arc::clone(self.parts));
        Box::new(move |bytes| {
            if let Some(batch) = batch {
                write(&batch, &parts, bytes, &mut |_, _, _| ());
            }
        })
    }
}

/// Writes the inputs of a batch to their parts of a slot, and passes the bytes of each to `look`.
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
            to_truth(to);
        }
        look(at, dtype, to);
    });
}
