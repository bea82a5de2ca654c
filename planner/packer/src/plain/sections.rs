//! The simple problem that the packers work on: time divided into as few sections as distinguish
//! the lives.

use crate::problem::{Item, Problem};
use std::borrow::Cow;
use std::collections::BTreeMap;

/// An item with its life in sections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Span {
    /// The first section of its life.
    pub(super) start: u32,
    /// The section after its last one; larger than `start`.
    pub(super) end: u32,
    /// The bytes that it occupies: whole units of the finest alignment of all items, at least one.
    pub(super) size: u64,
    /// The bytes that it needs. The highest item of a packing ends with these.
    pub(super) bytes: u64,
    /// A power of two that divides its offset.
    pub(super) align: u64,
    /// The length of its life, in the problem's own time.
    pub(super) width: u64,
}

/// The items that need space. A section is a maximal set of items that live at once: an interval of
/// time after which an item ends before a new one begins. Two lives overlap exactly if they have a
/// section in common (intervals have the Helly property), so a packing is valid in sections if and
/// only if it is valid in time. The instants in between, where only part of such a set lives,
/// cannot be the fullest and are left out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Sections {
    pub(super) spans: Vec<Span>,
    count: usize,
}

/// The spans between two instants that no life extends across, as a separate problem.
pub(super) struct Part {
    /// The indices of its spans in the whole.
    pub(super) spans: Vec<u32>,
    pub(super) sections: Sections,
}

impl Sections {
    /// The items at the indices `placed`, each of which has bytes and a life.
    ///
    /// If all offsets are multiples of a unit, no other item can use the rest of an item's last
    /// unit, so that counting it as the item's loses nothing, except at the top of the packing:
    /// heights count [`Span::bytes`].
    pub(crate) fn new(problem: &Problem, placed: &[usize]) -> Self {
        let item = |at: u32| &problem.items[placed[at as usize]];
        let unit = placed
            .iter()
            .map(|&i| problem.items[i].align)
            .min()
            .unwrap_or(1);
        let empty = |item: &Item| {
            let (size, width) = (item.size.next_multiple_of(unit), item.life.steps());
            Span {
                start: 0,
                end: 0,
                size,
                bytes: item.size,
                align: item.align,
                width,
            }
        };
        let mut spans: Vec<Span> = placed.iter().map(|&i| empty(&problem.items[i])).collect();
        let sorted = |instant: &dyn Fn(u32) -> u64| {
            let mut events: Vec<(u64, u32)> = (0..placed.len() as u32)
                .map(|at| (instant(at), at))
                .collect();
            events.sort_unstable();
            events
        };
        let mut ends = sorted(&|at| item(at).life.end).into_iter().peekable();
        // The number of complete sections, and whether an item has begun since.
        let (mut complete, mut fresh) = (0, false);
        let mut end_until = |instant: u64, fresh: &mut bool, spans: &mut [Span]| {
            // At one instant, ends come before starts.
            while let Some((_, at)) = ends.next_if(|&(end, _)| end <= instant) {
                complete += u32::from(std::mem::take(fresh));
                spans[at as usize].end = complete;
            }
            complete
        };
        for (start, at) in sorted(&|at| item(at).life.start) {
            spans[at as usize].start = end_until(start, &mut fresh, &mut spans);
            fresh = true;
        }
        let count = end_until(u64::MAX, &mut fresh, &mut spans) as usize;
        Sections { spans, count }
    }

    /// The number of sections.
    pub(super) fn count(&self) -> usize {
        self.count
    }

    /// The bytes alive in each section.
    pub(super) fn live(&self) -> Vec<u64> {
        let mut changes = vec![0i128; self.count + 1];
        for span in &self.spans {
            changes[span.start as usize] += i128::from(span.size);
            changes[span.end as usize] -= i128::from(span.size);
        }
        let sums = changes.iter().scan(0i128, |live, change| {
            *live += change;
            Some(u64::try_from(*live).unwrap_or(u64::MAX))
        });
        sums.take(self.count).collect()
    }

    /// The lower bound: the largest sum of sizes alive in one section, less the largest unused rest
    /// of a unit among those items, since one of them lies highest.
    pub(super) fn lower_bound(&self) -> u64 {
        let live = self.live();
        if self.is_whole() {
            return live.into_iter().max().unwrap_or(0);
        }
        let (mut begin, mut end) = (
            vec![Vec::new(); self.count],
            vec![Vec::new(); self.count + 1],
        );
        for span in self.spans.iter().filter(|span| span.size > span.bytes) {
            begin[span.start as usize].push(span.size - span.bytes);
            end[span.end as usize].push(span.size - span.bytes);
        }
        let mut rests: BTreeMap<u64, usize> = BTreeMap::new();
        let mut bound = 0;
        for ((live, begin), end) in live.into_iter().zip(begin).zip(end) {
            begin
                .into_iter()
                .for_each(|rest| *rests.entry(rest).or_insert(0) += 1);
            for rest in end {
                if let Some(count) = rests.get_mut(&rest).filter(|count| **count > 1) {
                    *count -= 1;
                } else {
                    rests.remove(&rest);
                }
            }
            bound = bound.max(live - rests.last_key_value().map_or(0, |(&rest, _)| rest));
        }
        bound
    }

    /// Whether all items need whole units.
    fn is_whole(&self) -> bool {
        self.spans.iter().all(|span| span.size == span.bytes)
    }

    /// The same sections with the bytes that items need as their sizes.
    pub(super) fn in_bytes(&self) -> Cow<'_, Sections> {
        if self.is_whole() {
            return Cow::Borrowed(self);
        }
        let spans = self
            .spans
            .iter()
            .map(|span| Span {
                size: span.bytes,
                ..*span
            })
            .collect();
        Cow::Owned(Sections {
            spans,
            count: self.count,
        })
    }

    /// For each section, and for the end, the number of spans that start before it: the index of
    /// its first span if all are sorted by start.
    pub(super) fn starts_before(&self) -> Vec<u32> {
        let mut before = vec![0u32; self.count + 1];
        self.spans
            .iter()
            .for_each(|span| before[span.start as usize + 1] += 1);
        (1..before.len()).for_each(|section| before[section] += before[section - 1]);
        before
    }

    /// Splits the problem at every instant that no life spans; the parts can be packed separately.
    pub(super) fn parts(&self) -> Vec<Part> {
        let mut next = self.starts_before();
        let mut order = vec![0u32; self.spans.len()];
        for (i, span) in (0u32..).zip(&self.spans) {
            let at = &mut next[span.start as usize];
            order[*at as usize] = i;
            *at += 1;
        }
        let mut parts: Vec<Part> = Vec::new();
        let (mut first, mut reached) = (0, 0);
        for i in order {
            let span = self.spans[i as usize];
            if parts.is_empty() || span.start >= reached {
                first = span.start;
                parts.push(Part {
                    spans: Vec::new(),
                    sections: Sections {
                        spans: Vec::new(),
                        count: 0,
                    },
                });
            }
            reached = reached.max(span.end);
            if let Some(part) = parts.last_mut() {
                part.spans.push(i);
                part.sections.spans.push(Span {
                    start: span.start - first,
                    end: span.end - first,
                    ..span
                });
                part.sections.count = (reached - first) as usize;
            }
        }
        parts
    }

    /// For each span the largest sum of sizes alive in one of its sections.
    pub(super) fn totals(&self) -> Vec<u64> {
        let live = self.live();
        // Inside of blocks, the maximum since the block began and until it ends; across blocks, the
        // maximum of 2^level of them. A life consists of whole blocks and two rests, or it is short
        // enough to be scanned.
        const BLOCK: usize = 64;
        let mut since = live.clone();
        since
            .chunks_mut(BLOCK)
            .for_each(|block| (1..block.len()).for_each(|i| block[i] = block[i].max(block[i - 1])));
        let mut until = live.clone();
        until.chunks_mut(BLOCK).for_each(|block| {
            (1..block.len())
                .rev()
                .for_each(|i| block[i - 1] = block[i - 1].max(block[i]))
        });
        let mut levels: Vec<Vec<u64>> = vec![until.iter().step_by(BLOCK).copied().collect()];
        while let Some(last) = levels
            .last()
            .filter(|last| last.len() > 1 << (levels.len() - 1))
        {
            let reach = 1 << (levels.len() - 1);
            levels.push(
                last.iter()
                    .zip(&last[reach..])
                    .map(|(a, b)| *a.max(b))
                    .collect(),
            );
        }
        let total = |span: &Span| {
            let (first, last) = (span.start as usize, span.end as usize - 1);
            let (from, to) = (first / BLOCK + 1, last / BLOCK);
            if from > to {
                return live[first..=last].iter().copied().max().unwrap_or(0);
            }
            let rests = until[first].max(since[last]);
            let Some(level) = (to - from).checked_ilog2() else {
                return rests;
            };
            let whole = &levels[level as usize];
            rests.max(whole[from]).max(whole[to - (1 << level)])
        };
        self.spans.iter().map(total).collect()
    }

    /// The number of pairs of spans that live at once: the cost of a packer that compares each span
    /// with all its neighbours.
    pub(super) fn pairs(&self) -> u64 {
        let (mut starts, mut ends) = (vec![0u64; self.count + 1], vec![0u64; self.count + 1]);
        for span in &self.spans {
            starts[span.start as usize] += 1;
            ends[span.end as usize] += 1;
        }
        let (mut alive, mut pairs) = (0u64, 0u64);
        for (starts, ends) in starts.into_iter().zip(ends) {
            alive -= ends;
            // Each newly started span meets the live spans and the new ones before it.
            pairs += starts * alive + starts * starts.saturating_sub(1) / 2;
            alive += starts;
        }
        pairs
    }
}
