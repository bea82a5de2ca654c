//! Memory checks: dead bytes of the slab hold NaN, and no kernel may write them.
//!
//! With [`CompileOptions::check_memory`](crate::CompileOptions::check_memory) every buffer has a
//! guard after it. Bytes that belong to no live buffer (guards among them) hold `0xFF`, which is
//! NaN in every float type. After each kernel the bytes outside of the live buffers must still hold
//! it; then the buffers that ended are filled again. A kernel that reads a buffer that has ended
//! computes with NaN; one that writes outside of its buffers is named.

use std::collections::BTreeMap;

use slabwise_kernels::memory::Region;

use super::Session;
use crate::error::{Error, Result};
use crate::program::{Compiled, Planned};

const POISON: u8 = 0xFF;

/// The parts of the slab in use, ascending: where each begins and ends, and how many buffers lie
/// just there.
#[derive(Default)]
struct Parts(BTreeMap<(u64, u64), u32>);

impl Parts {
    fn add(&mut self, part: (u64, u64)) {
        *self.0.entry(part).or_default() += 1;
    }

    fn remove(&mut self, part: (u64, u64)) {
        if let Some(count) = self.0.get_mut(&part) {
            *count -= 1;
            if *count == 0 {
                self.0.remove(&part);
            }
        }
    }

    /// Calls `visit` with every range of the slab that is in none of the parts.
    fn gaps(&self, end: u64, mut visit: impl FnMut(u64, u64)) {
        let mut at = 0;
        for &(start, stop) in self.0.keys() {
            if start > at {
                visit(at, start);
            }
            at = at.max(stop);
        }
        if end > at {
            visit(at, end);
        }
    }

    /// Fills the bytes that are in none of the parts.
    fn poison_others(&self, session: &mut Session, slab: Region) -> Result<()> {
        let mut filled = Ok(());
        self.gaps(slab.bytes, |from, to| {
            if filled.is_ok() {
                filled = session
                    .memory
                    .backend
                    .fill(&slab.part(from, to - from), POISON);
            }
        });
        filled
    }
}

/// The state of the checks in a run: the live bytes at the current step.
pub(crate) struct Watch {
    live: Parts,
    /// The buffers of the slab, in the order in which they begin to live and in that in which they
    /// end, and how many of each have.
    by_start: Vec<usize>,
    by_end: Vec<usize>,
    started: usize,
    ended: usize,
}

/// The part of the slab that a buffer occupies.
fn part(inner: &Compiled, buffer: usize) -> (u64, u64) {
    let buffer = &inner.buffers[buffer];
    (buffer.place.offset, buffer.place.offset + buffer.used)
}

impl Watch {
    /// Before the first step: everything but the inputs is dead.
    pub(crate) fn begin(session: &mut Session, inner: &Compiled, slab: Region) -> Result<Watch> {
        let lifetimes = &inner.plan.offsets().lifetimes;
        let mut inputs = Parts::default();
        let at_start = inner
            .inputs
            .iter()
            .filter_map(|i| i.buffer)
            .filter(|&b| lifetimes[b].start == 0);
        at_start.for_each(|b| inputs.add(part(inner, b)));
        let lives = |b: &usize| !inner.buffers[*b].on_host && !lifetimes[*b].is_empty();
        let mut by_start: Vec<usize> = (0..inner.buffers.len()).filter(lives).collect();
        let mut by_end = by_start.clone();
        by_start.sort_by_key(|&b| lifetimes[b].start);
        by_end.sort_by_key(|&b| lifetimes[b].end);
        inputs.poison_others(session, slab)?;
        Ok(Watch {
            live: Parts::default(),
            by_start,
            by_end,
            started: 0,
            ended: 0,
        })
    }

    /// After a step: checks that dead bytes are untouched, and poisons the buffers that ended.
    pub(crate) fn after(
        &mut self,
        session: &mut Session,
        inner: &Compiled,
        slab: Region,
        step: usize,
    ) -> Result<()> {
        let lifetimes = &inner.plan.offsets().lifetimes;
        let Planned { offset, bytes } = inner.steps[step].workspace;
        let workspace = (offset, offset + bytes);
        while let Some(&b) = self
            .by_start
            .get(self.started)
            .filter(|&&b| lifetimes[b].start <= step as u64)
        {
            self.live.add(part(inner, b));
            self.started += 1;
        }
        self.live.add(workspace);
        let mut broken = None;
        session.memory.backend.map_read(&slab, |memory, slab| {
            self.live.gaps(slab.bytes, |from, to| {
                let bytes = memory.bytes(&slab.part(from, to - from));
                if let Some(at) = bytes.iter().position(|b| *b != POISON) {
                    broken.get_or_insert(from + at as u64);
                }
            });
        })?;
        if let Some(at) = broken {
            let message =
                format!("byte {at} of the slab was written, which belongs to no live buffer");
            return Err(Error::MemoryCheck {
                step,
                task: inner.steps[step].name.clone(),
                message,
            });
        }
        // The bytes that stay live are those live in the next step, less those that begin there.
        self.live.remove(workspace);
        while let Some(&b) = self
            .by_end
            .get(self.ended)
            .filter(|&&b| lifetimes[b].end <= step as u64 + 1)
        {
            self.live.remove(part(inner, b));
            self.ended += 1;
        }
        // Outputs outlive the last step.
        if step + 1 == inner.steps.len() {
            inner
                .outputs
                .iter()
                .for_each(|&o| self.live.add(part(inner, o)));
        }
        self.live.poison_others(session, slab)
    }
}
