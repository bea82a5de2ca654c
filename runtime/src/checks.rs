//! Memory checks: dead bytes of the slab hold NaN, and nobody writes them.
//!
//! With [`CompileOptions::check_memory`](crate::CompileOptions::check_memory) every buffer has a guard behind it. Bytes that
//! belong to no live buffer (guards among them) hold `0xFF`, which is NaN in every float type. After each kernel the bytes
//! outside of what is live then must hold it still; then what ended is filled again. A kernel that reads a buffer which had
//! ended computes with NaN; one that writes where it must not is named.

use slabwise_kernels::memory::Region;

use crate::error::{Error, Result};
use crate::program::{Compiled, Planned};
use crate::session::Session;

const POISON: u8 = 0xFF;

/// The parts of the slab in use at a step, ascending.
fn live(inner: &Compiled, step: usize) -> Vec<(u64, u64)> {
    let lifetimes = &inner.plan.offsets().lifetimes;
    let mut parts: Vec<(u64, u64)> = inner
        .buffers
        .iter()
        .zip(lifetimes)
        .filter(|(b, l)| !b.on_host && (l.start as usize) <= step && step < l.end as usize)
        .map(|(b, _)| (b.place.offset, b.place.offset + b.used))
        .collect();
    if let Some(Planned { offset, bytes }) = inner.steps.get(step).map(|s| s.workspace) {
        parts.push((offset, offset + bytes));
    }
    parts.sort_unstable();
    parts
}

/// Calls `visit` with every stretch of the slab that is in none of the parts.
fn gaps(parts: &[(u64, u64)], end: u64, mut visit: impl FnMut(u64, u64)) {
    let mut at = 0;
    for &(start, stop) in parts {
        if start > at {
            visit(at, start);
        }
        at = at.max(stop);
    }
    if end > at {
        visit(at, end);
    }
}

/// Before the first step: everything but the inputs is dead.
pub(crate) fn begin(session: &mut Session, inner: &Compiled, slab: Region) -> Result<()> {
    let lifetimes = &inner.plan.offsets().lifetimes;
    let mut inputs: Vec<(u64, u64)> = inner
        .inputs
        .iter()
        .filter_map(|i| i.buffer)
        .filter(|&b| lifetimes[b].start == 0)
        .map(|b| (inner.buffers[b].place.offset, inner.buffers[b].place.offset + inner.buffers[b].used))
        .collect();
    inputs.sort_unstable();
    poison(session, &inputs, slab)
}

/// Fills what is in none of the parts.
fn poison(session: &mut Session, parts: &[(u64, u64)], slab: Region) -> Result<()> {
    let mut filled = Ok(());
    gaps(parts, slab.bytes, |from, to| {
        if filled.is_ok() {
            filled = session.memory.fill(&slab.part(from, to - from), POISON);
        }
    });
    filled
}

/// After a step: what was not live is untouched, and what ended is dead.
pub(crate) fn after(session: &mut Session, inner: &Compiled, slab: Region, step: usize) -> Result<()> {
    let mut broken = None;
    let live = live(inner, step);
    session.memory.look(&slab, |memory, slab| {
        gaps(&live, slab.bytes, |from, to| {
            let bytes = memory.bytes(&slab.part(from, to - from));
            if let Some(at) = bytes.iter().position(|b| *b != POISON) {
                broken.get_or_insert(from + at as u64);
            }
        });
    })?;
    if let Some(at) = broken {
        let message = format!("byte {at} of the slab was written, which belongs to no live buffer");
        return Err(Error::MemoryCheck { step, task: inner.steps[step].name.clone(), message });
    }
    // What lives on is what is live in the next step, less what only begins there.
    let lifetimes = &inner.plan.offsets().lifetimes;
    let mut staying: Vec<(u64, u64)> = inner
        .buffers
        .iter()
        .zip(lifetimes)
        .filter(|(b, l)| !b.on_host && (l.start as usize) <= step && (l.end as usize) > step + 1)
        .map(|(b, _)| (b.place.offset, b.place.offset + b.used))
        .collect();
    // Outputs outlive the last step.
    if step + 1 == inner.steps.len() {
        staying
            .extend(inner.outputs.iter().map(|&o| (inner.buffers[o].place.offset, inner.buffers[o].place.offset + inner.buffers[o].used)));
    }
    staying.sort_unstable();
    poison(session, &staying, slab)
}
