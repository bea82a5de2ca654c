//! Which packers run, in what order, and when they stop.

use super::problem::{Problem, ProblemError};
use super::sections::Sections;
use super::{Found, Method, Packing, Rank, greedy, skyline};
use std::time::{Duration, Instant};

/// The portfolio: what has met the bound most often and costs least stands first. Measured on the heaps of whole training
/// steps, where one of the first four nearly always ends the search.
pub(super) const METHODS: [Method; 14] = [
    Method::Skyline(Rank::TotalAreaWidth),
    Method::Skyline(Rank::SizeWidth),
    Method::Skyline(Rank::WidthAreaTotal),
    Method::Skyline(Rank::TotalWidthArea),
    Method::FirstFit(Rank::SizeWidth),
    Method::FirstFit(Rank::TotalAreaWidth),
    Method::FirstFit(Rank::TotalSize),
    Method::FirstFit(Rank::Area),
    Method::FirstFit(Rank::WidthAreaTotal),
    Method::FirstFit(Rank::Start),
    Method::BestFit(Rank::SizeWidth),
    Method::BestFit(Rank::TotalSize),
    Method::BestFit(Rank::Area),
    Method::BestFit(Rank::Start),
];

/// Up to how many items the quadratic methods (first and best fit) take part.
const QUADRATIC_MAX: usize = 8_000;

/// How hard to look for a low packing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// A height that is good enough: the search ends when it is reached. The lower bound always is.
    pub capacity: Option<u64>,
    /// Ends the search at the next opportunity. `None`: only `effort` does. What is found then depends on the machine.
    pub time: Option<Duration>,
    /// Steps of improvement and exact search, counted independently of time and threads. 0: fast heuristics only.
    pub effort: u64,
    /// How many threads may work at once; the result does not depend on it.
    pub threads: usize,
    /// Where the random choices begin.
    pub seed: u64,
}

impl Default for Limits {
    /// Fast heuristics only, on one thread.
    fn default() -> Self {
        Limits { capacity: None, time: None, effort: 0, threads: 1, seed: 0 }
    }
}

/// What a packer may still spend.
#[derive(Clone, Copy, Debug)]
pub(super) struct Budget {
    /// A height at which nothing more is to be gained.
    pub(super) goal: u64,
    pub(super) deadline: Option<Instant>,
    pub(super) effort: u64,
    pub(super) threads: usize,
    pub(super) seed: u64,
}

impl Budget {
    /// Whether the time is over.
    pub(super) fn is_over(&self) -> bool {
        self.deadline.is_some_and(|deadline| Instant::now() >= deadline)
    }
}

impl Problem {
    /// Places the items with the best of several fast heuristics, deterministically. A few thousand items take
    /// milliseconds where the bound is met early, as it is for nearly all training steps.
    pub fn pack(&self) -> Result<Packing, ProblemError> {
        self.pack_within(&Limits::default())
    }

    /// Places the items as low as it can within the limits.
    pub fn pack_within(&self, limits: &Limits) -> Result<Packing, ProblemError> {
        self.verify()?;
        let placed: Vec<usize> = (0..self.items.len()).filter(|&i| self.items[i].needs_space()).collect();
        let sections = Sections::new(self, &placed);
        let lower_bound = sections.lower_bound();
        let mut packing = Packing { offsets: vec![0; self.items.len()], height: 0, lower_bound, method: Method::Apart };
        let budget = Budget {
            goal: lower_bound.max(limits.capacity.unwrap_or(0)),
            deadline: limits.time.and_then(|time| Instant::now().checked_add(time)),
            effort: limits.effort,
            threads: limits.threads.max(1),
            seed: limits.seed,
        };
        for part in sections.parts() {
            let (found, method) = pack_part(&part.sections, &budget);
            part.spans.iter().zip(found.offsets).for_each(|(&span, offset)| packing.offsets[placed[span as usize]] = offset);
            if found.height > packing.height {
                (packing.height, packing.method) = (found.height, method);
            }
        }
        Ok(packing)
    }

    /// Gives every item bytes of its own, whether lifetimes overlap or not.
    pub fn apart(&self) -> Result<Packing, ProblemError> {
        self.verify()?;
        let placed: Vec<usize> = (0..self.items.len()).filter(|&i| self.items[i].needs_space()).collect();
        let sections = Sections::new(self, &placed);
        let stacked = stacked(&sections);
        let mut offsets = vec![0; self.items.len()];
        placed.iter().zip(stacked.offsets).for_each(|(&item, offset)| offsets[item] = offset);
        Ok(Packing { offsets, height: stacked.height, lower_bound: sections.lower_bound(), method: Method::Apart })
    }
}

/// Every span above the one before.
fn stacked(sections: &Sections) -> Found {
    // The coarsest alignment first: then nothing needs padding.
    let mut order: Vec<usize> = (0..sections.spans.len()).collect();
    order.sort_by_key(|&i| std::cmp::Reverse(sections.spans[i].align));
    let mut found = Found { offsets: vec![0; order.len()], height: 0 };
    for i in order {
        found.offsets[i] = found.height;
        found.height += sections.spans[i].size;
    }
    found
}

/// Packs spans that no instant tears apart.
fn pack_part(sections: &Sections, budget: &Budget) -> (Found, Method) {
    let quadratic = sections.spans.len() <= QUADRATIC_MAX;
    let mut best: Option<(Found, Method)> = None;
    for method in METHODS {
        let limit = best.as_ref().map_or(u64::MAX, |(found, _)| found.height);
        if limit <= budget.goal {
            break;
        }
        let found = match method {
            Method::Skyline(rank) => skyline::pack(sections, &rank.order(sections), limit),
            Method::FirstFit(rank) if quadratic => greedy::pack(sections, &rank.order(sections), greedy::Fit::First, limit),
            Method::BestFit(rank) if quadratic => greedy::pack(sections, &rank.order(sections), greedy::Fit::Best, limit),
            _ => None,
        };
        best = found.map(|found| (found, method)).or(best);
    }
    best.unwrap_or_else(|| (stacked(sections), Method::Apart))
}
