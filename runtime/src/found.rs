//! Values whose size a run finds: where they lie.
//!
//! All else of a program is planned, and its order too; so it is known between which steps such a
//! value lives. When its first step comes, its size is known as well. It then takes a hole of the
//! slab, one that the plan leaves free for just as long, if there is one; else a block of the pool.
//! After its last step it gives them back.

use slabwise_kernels::cpu::Fault;
use slabwise_kernels::memory::Region;
use slabwise_kernels::size::Env;
use slabwise_planner::{ALIGN, Bytes, Lifetime};

use crate::error::{Error, Result};
use crate::memory::{Handle, Stream, TagId};
use crate::program::{Binds, Compiled, Planned, lengths};
use crate::session::Session;
use crate::shape::Extent;

/// What the values of a run that have no place in the plan take.
#[derive(Default)]
pub(crate) struct Found {
    /// By buffer of the program; outputs are kept until the next run.
    held: Vec<Option<Piece>>,
    /// Bytes of the slab and of the pool that are taken now, and the most of each in this run.
    lent: u64,
    lent_max: u64,
    pooled: u64,
    pooled_max: u64,
}

#[derive(Clone, Copy)]
enum Piece {
    Slab(Planned),
    Pool(Handle, u64),
}

impl Found {
    fn add(&mut self, piece: Piece) {
        match piece {
            Piece::Slab(part) => self.lent += part.bytes,
            Piece::Pool(_, bytes) => self.pooled += bytes,
        }
        (self.lent_max, self.pooled_max) = (
            self.lent_max.max(self.lent),
            self.pooled_max.max(self.pooled),
        );
    }

    /// The most bytes of the slab's holes, and of the pool, that values took at once in the last
    /// run.
    pub fn most(&self) -> (u64, u64) {
        (self.lent_max, self.pooled_max)
    }
}

impl Session {
    /// Gives back what the last run left, and makes ready for this one.
    pub(crate) fn begin_found(&mut self, inner: &Compiled) -> Result<()> {
        for at in 0..self.found.held.len() {
            self.give_piece(at)?;
        }
        self.found = Found {
            held: std::mem::take(&mut self.found.held),
            ..Found::default()
        };
        self.found.held.clear();
        if inner.finds {
            self.found.held.resize(inner.buffers.len(), None);
        }
        Ok(())
    }

    /// Memory for the values of unplanned size that a step begins to write.
    pub(crate) fn make_room(
        &mut self,
        inner: &Compiled,
        at: usize,
        env: &Env,
        slab: Region,
    ) -> Result<()> {
        for &b in inner.steps[at]
            .begins
            .iter()
            .filter(|&&b| inner.buffers[b].found)
        {
            let buffer = &inner.buffers[b];
            let elements: usize = lengths(&buffer.dims, env).iter().product();
            let bytes = elements as u64 * buffer.dtype.bytes() as u64;
            let piece = match self.lend(inner, b, bytes, slab) {
                Some(part) => Piece::Slab(part),
                None => {
                    self.within_budget(inner, b, bytes)?;
                    let tag = self.tag_ids(inner)[b];
                    let source = self.memory.source();
                    let taken = self.pool.allocate(source, bytes, Stream::default(), tag);
                    let handle = taken.map_err(|bill| Error::Memory {
                        program: inner.name.to_string(),
                        bill,
                    })?;
                    Piece::Pool(handle, bytes)
                }
            };
            self.found.add(piece);
            self.found.held[b] = Some(piece);
        }
        Ok(())
    }

    /// Weights, state, slab and what such values have of the pool share one budget.
    fn within_budget(&self, inner: &Compiled, b: usize, bytes: u64) -> Result<()> {
        let planned = self.persistent_bytes().saturating_add(self.slab_bytes());
        match self.budget.bytes() {
            Some(budget)
                if planned
                    .saturating_add(self.found.pooled)
                    .saturating_add(bytes)
                    > budget.0 =>
            {
                Err(Error::Room {
                    program: inner.name.to_string(),
                    what: inner.tags[b].name.to_string(),
                    bytes: Bytes(bytes),
                    budget,
                    planned: Bytes(planned),
                    pool: Bytes(self.found.pooled),
                })
            }
            _ => Ok(()),
        }
    }

    /// The pool's numbers of a program's tags.
    pub(crate) fn tag_ids<'a>(&self, inner: &'a Compiled) -> &'a [TagId] {
        inner.tag_ids.get_or_init(|| {
            inner
                .tags
                .iter()
                .map(|tag| self.pool.tag(tag.clone()))
                .collect()
        })
    }

    /// A part of the slab that the plan and others leave free while a buffer lives.
    fn lend(&self, inner: &Compiled, b: usize, bytes: u64, slab: Region) -> Option<Planned> {
        let holes = inner.holes.get(b).filter(|holes| !holes.is_empty())?;
        let mut taken: Vec<Planned> = self
            .found
            .held
            .iter()
            .filter_map(|p| {
                if let Some(Piece::Slab(part)) = p {
                    Some(*part)
                } else {
                    None
                }
            })
            .collect();
        taken.sort_unstable_by_key(|part| part.offset);
        fit(
            holes,
            &taken,
            bytes.max(1).next_multiple_of(ALIGN),
            slab.bytes,
        )
    }

    /// Where a value of unplanned size lies now; nowhere before its first step.
    pub(crate) fn found_region(&self, b: usize, slab: Region) -> Result<Region> {
        match self.found.held.get(b).copied().flatten() {
            Some(Piece::Slab(part)) => Ok(slab.part(part.offset, part.bytes)),
            Some(Piece::Pool(handle, _)) => self
                .pool
                .region(handle)
                .map_err(|e| Error::Internal(e.to_string())),
            None => Ok(Region::default()),
        }
    }

    /// After a step: the length it found, if it found one, and the memory of what had its last use.
    pub(crate) fn end_found(&mut self, inner: &Compiled, at: usize) -> Result<()> {
        for &b in inner.steps[at]
            .ends
            .iter()
            .filter(|&&b| inner.buffers[b].found && !inner.outputs.contains(&b))
        {
            self.give_piece(b)?;
        }
        Ok(())
    }

    fn give_piece(&mut self, b: usize) -> Result<()> {
        match self.found.held[b].take() {
            Some(Piece::Slab(part)) => self.found.lent = self.found.lent.saturating_sub(part.bytes),
            Some(Piece::Pool(handle, bytes)) => {
                self.found.pooled = self.found.pooled.saturating_sub(bytes);
                self.pool
                    .free(self.memory.source(), handle)
                    .map_err(|e| Error::Internal(e.to_string()))?;
            }
            None => {}
        }
        Ok(())
    }

    /// Reads the length that a step found and makes it that of the rest of the run.
    pub(crate) fn bind_length(
        &mut self,
        inner: &Compiled,
        at: usize,
        scalar: Option<&Region>,
        env: &mut Env,
    ) -> Result<()> {
        let (Some(Binds { symbol, offset }), Some(scalar)) = (inner.steps[at].binds, scalar) else {
            return Ok(());
        };
        let part = scalar.part(4 * offset.at(env).max(0) as u64, 4);
        let length = self.memory.read_i32(&part)?;
        // The step's kernel has checked it, but where a device checks, the run has not stopped for
        // it.
        let most = if let Extent::Found(most) = inner.symbols.extent(symbol) {
            most.at(env)
        } else {
            0
        };
        let found = u32::try_from(length).ok().filter(|&n| i64::from(n) <= most);
        let Some(found) = found else {
            let limit = u64::try_from(most).unwrap_or(0) + 1;
            return Err(inner.fault(
                at,
                Fault::Index {
                    position: 0,
                    value: i64::from(length),
                    limit,
                },
            ));
        };
        env.0[usize::from(symbol.0)] = found;
        inner.check_needed(Some(at), env)?;
        let sizes = self.sizes();
        self.memory.begin_inputs()?;
        self.memory.publish(&sizes, env)?;
        self.memory.end_inputs()
    }
}

/// The stretches of the slab, ascending, that nothing planned takes between two steps. The last has
/// no end: it goes as far as the slab does.
pub(crate) fn holes(
    planned: impl Iterator<Item = (Planned, Lifetime)>,
    life: Lifetime,
) -> Vec<(u64, u64)> {
    let during = |other: &Lifetime| other.start < life.end && life.start < other.end;
    let mut taken: Vec<Planned> = planned
        .filter(|(p, other)| p.bytes > 0 && during(other))
        .map(|(p, _)| p)
        .collect();
    taken.sort_unstable_by_key(|p| p.offset);
    let (mut holes, mut at) = (Vec::new(), 0);
    for part in taken {
        if part.offset > at {
            holes.push((at, part.offset));
        }
        at = at.max((part.offset + part.bytes).next_multiple_of(ALIGN));
    }
    holes.push((at, u64::MAX));
    holes
}

/// The smallest stretch of free bytes in the holes that is large enough; `taken` are lent already,
/// ascending.
pub(crate) fn fit(
    holes: &[(u64, u64)],
    taken: &[Planned],
    bytes: u64,
    slab: u64,
) -> Option<Planned> {
    let mut best: Option<(u64, u64)> = None;
    let mut offer = |from: u64, to: u64| {
        let room = to.saturating_sub(from);
        if room >= bytes && best.is_none_or(|(_, smallest)| room < smallest) {
            best = Some((from, room));
        }
    };
    for &(from, to) in holes {
        let (mut at, to) = (from, to.min(slab));
        for part in taken
            .iter()
            .filter(|p| p.offset < to && p.offset + p.bytes > from)
        {
            offer(at, part.offset);
            at = at.max(part.offset + part.bytes);
        }
        offer(at, to);
    }
    best.map(|(offset, _)| Planned { offset, bytes })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Random rectangles over steps × bytes, and requests that come and go: nothing that was lent
    /// meets what was planned or lent at the same step, and a request is refused only where no
    /// offset would do.
    #[test]
    fn what_is_lent_overlaps_nothing_in_time() {
        arbtest::arbtest(|u| {
            let steps = u.int_in_range(1..=12u64)?;
            let life = |u: &mut arbtest::arbitrary::Unstructured<'_>| -> arbtest::arbitrary::Result<Lifetime> {
                let start = u.int_in_range(0..=steps - 1)?;
                Ok(Lifetime { start, end: u.int_in_range(start + 1..=steps)? })
            };
            let part = |u: &mut arbtest::arbitrary::Unstructured<'_>| -> arbtest::arbitrary::Result<Planned> {
                Ok(Planned { offset: ALIGN * u.int_in_range(0..=20u64)?, bytes: u.int_in_range(0..=5 * ALIGN)? })
            };
            let mut planned = Vec::new();
            for _ in 0..u.int_in_range(0..=8usize)? {
                planned.push((part(u)?, life(u)?));
            }
            let mut wanted = Vec::new();
            for _ in 0..u.int_in_range(1..=6usize)? {
                wanted.push((u.int_in_range(1..=6u64)? * ALIGN, life(u)?));
            }
            wanted.sort_by_key(|(_, life)| life.start);
            let slab = 24 * ALIGN;
            let mut lent: Vec<(Planned, Lifetime)> = Vec::new();
            for (bytes, life) in wanted {
                let mut now: Vec<Planned> = lent
                    .iter()
                    .filter(|(_, l)| l.end > life.start)
                    .map(|(p, _)| *p)
                    .collect();
                now.sort_unstable_by_key(|p| p.offset);
                let found = fit(&holes(planned.iter().copied(), life), &now, bytes, slab);
                let clear = |offset: u64| {
                    let meets = |(p, l): &(Planned, Lifetime)| {
                        let in_time = l.start < life.end && life.start < l.end;
                        in_time
                            && p.bytes > 0
                            && p.offset < offset + bytes
                            && offset < p.offset + p.bytes
                    };
                    offset + bytes <= slab && !planned.iter().chain(&lent).any(meets)
                };
                match found {
                    Some(part) => {
                        assert!(
                            clear(part.offset)
                                && part.bytes == bytes
                                && part.offset.is_multiple_of(ALIGN)
                        );
                        lent.push((part, life));
                    }
                    None => assert!(
                        (0..=24).all(|k| !clear(k * ALIGN)),
                        "{bytes} bytes would fit"
                    ),
                }
            }
            Ok(())
        });
    }
}
