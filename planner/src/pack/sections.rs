//! The simple problem that the packers work on: time cut into as few sections as tell lives apart.

use super::problem::Problem;

/// An item with its life in sections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Span {
    /// The first section of its life.
    pub(super) start: u32,
    /// The section after its last one; larger than `start`.
    pub(super) end: u32,
    /// The bytes it takes up: whole units of `align`, at least one.
    pub(super) size: u64,
    /// A power of two of which its offset is a multiple.
    pub(super) align: u64,
    /// How long it lives, in the problem's own time.
    pub(super) width: u64,
}

/// The items that need space. A section is a maximal set of items that live at once: a stretch of time after which
/// something ends before anything new begins. Two lives overlap exactly if they have a section in common (intervals have
/// the Helly property), so a packing is valid in sections if and only if it is valid in time; the moments in between,
/// where only part of such a set lives, cannot be the fullest and are left out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Sections {
    pub(super) spans: Vec<Span>,
    count: usize,
}

/// Some of the spans, those between two instants that no life crosses, as a problem of their own.
pub(super) struct Part {
    /// Which spans of the whole these are.
    pub(super) spans: Vec<u32>,
    pub(super) sections: Sections,
}

impl Sections {
    /// The items at the indices `placed`, each of which has bytes and a life.
    pub(super) fn new(problem: &Problem, placed: &[usize]) -> Self {
        let items = || placed.iter().map(|&i| &problem.items[i]);
        // At one instant, ends (false) sort before starts.
        let mut events: Vec<(u64, bool)> = items().flat_map(|item| [(item.life.start, true), (item.life.end, false)]).collect();
        events.sort_unstable();
        events.dedup();
        // For each event, how many sections are complete once it has happened.
        let (mut complete, mut fresh) = (0u32, false);
        let mut completes = Vec::with_capacity(events.len());
        for &(_, starts) in &events {
            complete += u32::from(!starts && fresh);
            fresh = starts;
            completes.push(complete);
        }
        let section = |instant: u64, starts: bool| completes[events.partition_point(|&event| event < (instant, starts))];
        let spans = items().map(|item| Span {
            start: section(item.life.start, true),
            end: section(item.life.end, false),
            size: item.occupied(),
            align: item.align,
            width: item.life.steps(),
        });
        Sections { spans: spans.collect(), count: complete as usize }
    }

    /// How many sections there are.
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

    /// The largest sum of sizes alive in one section.
    pub(super) fn lower_bound(&self) -> u64 {
        self.live().into_iter().max().unwrap_or(0)
    }

    /// Cuts the problem at every instant that no life crosses; the parts can be packed one by one.
    pub(super) fn parts(&self) -> Vec<Part> {
        let mut order: Vec<u32> = (0..self.spans.len() as u32).collect();
        order.sort_by_key(|&i| (self.spans[i as usize].start, i));
        let mut parts: Vec<Part> = Vec::new();
        let (mut first, mut reached) = (0, 0);
        for i in order {
            let span = self.spans[i as usize];
            if parts.is_empty() || span.start >= reached {
                first = span.start;
                parts.push(Part { spans: Vec::new(), sections: Sections { spans: Vec::new(), count: 0 } });
            }
            reached = reached.max(span.end);
            if let Some(part) = parts.last_mut() {
                part.spans.push(i);
                part.sections.spans.push(Span { start: span.start - first, end: span.end - first, ..span });
                part.sections.count = (reached - first) as usize;
            }
        }
        parts
    }
}
