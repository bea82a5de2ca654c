//! Offsets for buffers with known lifetimes: the offset-assignment problem (dynamic storage allocation).
//!
//! A [`Problem`] is a list of items, each a half-open lifetime and a size. Wanted is an offset for each so that items alive
//! at once share no byte and the *height*, the largest `offset + size`, is small. No solution is lower than the *lower
//! bound*, the largest sum of sizes alive at one instant; it is not always reachable, and finding the optimum is NP-hard.
//!
//! [`Problem::pack`] runs fast heuristics of two families until one meets the bound and returns the best:
//!
//! - greedy: one item after the other at the lowest free offset or in the tightest gap;
//! - skyline: the lowest valley of what is already stacked gets the best item that fits into it.

use crate::liveness::Lifetime;
use std::fmt;

mod greedy;
mod rank;
mod skyline;

pub use rank::Rank;

/// One thing to place.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Item {
    /// When it needs its bytes. Empty: never, and its offset is 0.
    pub life: Lifetime,
    /// How many bytes. 0: its offset is 0.
    pub size: u64,
    /// Its offset is a multiple of this power of two, and it takes up whole units of it.
    pub align: u64,
}

impl Item {
    /// The bytes it takes up: its size in whole units of its alignment.
    pub fn occupied(&self) -> u64 {
        self.size.checked_next_multiple_of(self.align).unwrap_or(u64::MAX)
    }

    fn needs_space(&self) -> bool {
        self.size > 0 && !self.life.is_empty()
    }
}

/// Items to place in one address range.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Default)]
pub struct Problem {
    /// The items, in any order.
    pub items: Vec<Item>,
}

/// Why a problem cannot be packed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ProblemError {
    /// An alignment is not a power of two.
    #[error("item {item} has alignment {align}, which is no power of two")]
    Alignment {
        /// The index of the item.
        item: usize,
        /// Its alignment.
        align: u64,
    },
    /// All sizes together, in whole units of the coarsest alignment, exceed 64 bits.
    #[error("the items up to {item} together are more bytes than 64 bits hold")]
    TotalSize {
        /// The index of the item at which the sum overflows.
        item: usize,
    },
}

/// How a packing was made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Method {
    /// Every item on bytes of its own.
    Apart,
    /// Each item at the lowest offset free for its whole life.
    FirstFit(Rank),
    /// Each item in the smallest gap free for its whole life.
    BestFit(Rank),
    /// The lowest valley gets the best item inside it.
    Skyline(Rank),
}

impl fmt::Display for Method {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Method::Apart => f.write_str("without reuse"),
            Method::FirstFit(rank) => write!(f, "first fit by {rank}"),
            Method::BestFit(rank) => write!(f, "best fit by {rank}"),
            Method::Skyline(rank) => write!(f, "skyline by {rank}"),
        }
    }
}

/// A solution of a [`Problem`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Packing {
    /// The offset of each item.
    pub offsets: Vec<u64>,
    /// The largest `offset + size`, sizes in whole units of alignment.
    pub height: u64,
    /// No packing is lower than this.
    pub lower_bound: u64,
    /// How it was made.
    pub method: Method,
}

/// The portfolio: what has met the bound most often and costs least stands first. Measured on the heaps of whole training
/// steps, where one of the first four nearly always ends the search.
const METHODS: [Method; 14] = [
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

impl Problem {
    /// Checks alignments, and that no sum of sizes overflows.
    pub fn verify(&self) -> Result<(), ProblemError> {
        if let Some((item, it)) = self.items.iter().enumerate().find(|(_, it)| !it.align.is_power_of_two()) {
            return Err(ProblemError::Alignment { item, align: it.align });
        }
        // In whole units of the coarsest alignment items stack without gaps, so no heuristic gets higher than this sum.
        let coarsest = self.items.iter().map(|it| it.align).fold(1, u64::max);
        self.items.iter().enumerate().try_fold(0u64, |total, (item, it)| {
            let sum = it.size.checked_next_multiple_of(coarsest).and_then(|size| total.checked_add(size));
            sum.ok_or(ProblemError::TotalSize { item })
        })?;
        Ok(())
    }

    /// The largest sum of occupied bytes alive at one instant.
    pub fn lower_bound(&self) -> u64 {
        let mut events: Vec<(u64, bool, u64)> = Vec::with_capacity(2 * self.items.len());
        for item in self.items.iter().filter(|item| item.needs_space()) {
            // At one instant, ends sort before starts.
            events.extend([(item.life.start, true, item.occupied()), (item.life.end, false, item.occupied())]);
        }
        events.sort_unstable();
        let (mut live, mut bound) = (0u64, 0);
        for (_, starts, bytes) in events {
            live = if starts { live.saturating_add(bytes) } else { live.saturating_sub(bytes) };
            bound = bound.max(live);
        }
        bound
    }

    /// Places the items with the best of several heuristics, deterministically. A few thousand items take milliseconds
    /// where the bound is met early, as it is for nearly all training steps.
    pub fn pack(&self) -> Result<Packing, ProblemError> {
        self.verify()?;
        let lower_bound = self.lower_bound();
        let placed: Vec<usize> = (0..self.items.len()).filter(|&i| self.items[i].needs_space()).collect();
        let sections = Sections::new(self, &placed);
        let quadratic = placed.len() <= QUADRATIC_MAX;
        let mut best: Option<(u64, Vec<u64>, Method)> = None;
        for method in METHODS {
            let limit = best.as_ref().map_or(u64::MAX, |best| best.0);
            if limit == lower_bound {
                break;
            }
            let found = match method {
                Method::Skyline(rank) => skyline::pack(&sections, &rank.order(&sections), limit),
                Method::FirstFit(rank) if quadratic => greedy::pack(&sections, &rank.order(&sections), greedy::Fit::First, limit),
                Method::BestFit(rank) if quadratic => greedy::pack(&sections, &rank.order(&sections), greedy::Fit::Best, limit),
                _ => None,
            };
            if let Some(found) = found {
                best = Some((found.height, found.offsets, method));
            }
        }
        let Some((height, found, method)) = best else { return self.apart() };
        let mut offsets = vec![0; self.items.len()];
        placed.iter().zip(found).for_each(|(&item, offset)| offsets[item] = offset);
        Ok(Packing { offsets, height, lower_bound, method })
    }

    /// Gives every item bytes of its own, whether lifetimes overlap or not.
    pub fn apart(&self) -> Result<Packing, ProblemError> {
        self.verify()?;
        // The coarsest alignment first: then nothing needs padding.
        let mut order: Vec<usize> = (0..self.items.len()).collect();
        order.sort_by_key(|&i| (std::cmp::Reverse(self.items[i].align), i));
        let (mut offsets, mut height) = (vec![0; self.items.len()], 0);
        for i in order.into_iter().filter(|&i| self.items[i].needs_space()) {
            offsets[i] = height;
            height += self.items[i].occupied();
        }
        Ok(Packing { offsets, height, lower_bound: self.lower_bound(), method: Method::Apart })
    }
}

/// An item with its life in sections.
#[derive(Clone, Copy, Debug)]
struct Span {
    start: u32,
    end: u32,
    size: u64,
    align: u64,
}

/// The items that need space, with time cut into sections: the stretches between two instants at which something starts
/// or ends. Nothing changes within one.
struct Sections {
    spans: Vec<Span>,
    /// The instants that bound the sections; one more than there are sections, or none.
    instants: Vec<u64>,
}

impl Sections {
    fn new(problem: &Problem, placed: &[usize]) -> Self {
        let items = || placed.iter().map(|&i| &problem.items[i]);
        let mut instants: Vec<u64> = items().flat_map(|item| [item.life.start, item.life.end]).collect();
        instants.sort_unstable();
        instants.dedup();
        let section = |instant: u64| instants.partition_point(|&t| t < instant) as u32;
        let span =
            |item: &Item| Span { start: section(item.life.start), end: section(item.life.end), size: item.occupied(), align: item.align };
        Sections { spans: items().map(span).collect(), instants }
    }

    fn count(&self) -> usize {
        self.instants.len().saturating_sub(1)
    }
}

/// What a heuristic found: the offset of each span and the height.
struct Found {
    offsets: Vec<u64>,
    height: u64,
}

#[cfg(test)]
mod tests;
