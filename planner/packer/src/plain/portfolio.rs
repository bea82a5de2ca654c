//! The portfolio of packers: their order and their stopping rules.

use super::lives::Lives;
use super::refine::{Refined, refine};
use super::sections::{Sections, Span};
use super::skyline::Skyline;
use super::{Found, greedy, orders};
use crate::method::{Method, Rank};
use crate::packing::{Extent, Packing, Proof};
use crate::problem::Problem;
use crate::rects::{Rect, overlap};
use std::time::{Duration, Instant};

/// The portfolio: methods that met the bound most often at the lowest cost come first. Measured on
/// the heaps of whole training steps, where one of the first four nearly always ends the search.
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

/// The largest cost of a pass at which the methods that look at pairs of items (first and best fit)
/// take part: some hundredths of a second.
const GREEDY_MAX: u64 = 1 << 25;

/// Limits of the search for a low packing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// A height that is good enough: the search ends when it is reached. It always ends at the
    /// lower bound.
    pub capacity: Option<u64>,
    /// Ends the search at the next opportunity. `None`: only `effort` ends it. With a time limit,
    /// the result depends on the machine.
    pub time: Option<Duration>,
    /// The number of item placements that improvement and exact search may spend. A step of the
    /// exact search is charged for its cost, in placed items. The search runs in rounds, so that it
    /// may exceed a small effort by one round. Where a round is expensive, less is spent: all of
    /// the effort where more than 1 % of the height may still be gained, down to a quarter where
    /// almost nothing may, and half of that without success ends the search. If `time` is not set,
    /// the result depends on this number alone, and not on the machine or `threads`. 0: fast
    /// heuristics, and every order of up to eight items, which any effort includes.
    pub effort: u64,
    /// The number of threads that may work at once; the result does not depend on it.
    pub threads: usize,
    /// The seed of the random choices.
    pub seed: u64,
}

impl Default for Limits {
    /// Fast heuristics, on one thread, and every order of up to eight items.
    fn default() -> Self {
        Limits {
            capacity: None,
            time: None,
            effort: 0,
            threads: 1,
            seed: 0,
        }
    }
}

/// The unspent part of the limits.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Budget {
    /// The height at which the search stops.
    pub(crate) goal: u64,
    pub(crate) deadline: Option<Instant>,
    pub(crate) effort: u64,
    pub(crate) threads: usize,
    pub(crate) seed: u64,
}

impl Budget {
    /// The limits, with the time counted from now; the goal is the lowest possible height.
    pub(crate) fn new(limits: &Limits) -> Self {
        Budget {
            goal: 0,
            deadline: limits
                .time
                .and_then(|time| Instant::now().checked_add(time)),
            effort: limits.effort,
            threads: limits.threads.max(1),
            seed: limits.seed,
        }
    }

    /// Whether the time is up.
    pub(crate) fn is_over(&self) -> bool {
        self.deadline
            .is_some_and(|deadline| Instant::now() >= deadline)
    }
}

/// Every item on its own bytes.
pub(crate) fn apart(problem: &Problem) -> Packing {
    let (placed, sections) = plain_sections(problem);
    let offsets = stacked(&sections).offsets;
    Plain::new(problem, &placed, &sections, &offsets, Method::Apart).into_packing()
}

/// A packing of items without constraints.
pub(crate) struct Plain {
    /// The offset of each item.
    pub(crate) offsets: Vec<u64>,
    pub(crate) height: u64,
    lower_bound: u64,
    pub(crate) method: Method,
    /// [`Proof::Search`], if the search for a lower packing was exhausted.
    pub(crate) proof: Option<Proof>,
}

impl Plain {
    /// From the offsets of the items that need space.
    fn new(
        problem: &Problem,
        placed: &[usize],
        sections: &Sections,
        found: &[u64],
        method: Method,
    ) -> Self {
        let lower_bound = sections.lower_bound();
        let mut plain = Plain {
            offsets: vec![0; problem.items.len()],
            height: 0,
            lower_bound,
            method,
            proof: None,
        };
        for (&item, &offset) in placed.iter().zip(found) {
            plain.offsets[item] = offset;
            plain.height = plain.height.max(offset + problem.items[item].size);
        }
        plain
    }

    pub(crate) fn into_packing(self) -> Packing {
        let Plain {
            offsets,
            height,
            lower_bound,
            method,
            proof,
        } = self;
        let proof = if height == lower_bound {
            Some(Proof::Bound)
        } else {
            proof
        };
        let spaces = vec![Extent {
            height,
            lower_bound,
        }];
        Packing {
            offsets,
            height,
            lower_bound,
            proof,
            method,
            in_place: Vec::new(),
            spaces,
        }
    }
}

/// The items that need space, and the sections of their lives.
fn plain_sections(problem: &Problem) -> (Vec<usize>, Sections) {
    let placed: Vec<usize> = (0..problem.items.len())
        .filter(|&i| problem.items[i].needs_space())
        .collect();
    let sections = Sections::new(problem, &placed);
    (placed, sections)
}

/// Packs a problem as if it had only items and perhaps a start.
pub(crate) fn pack_plain(problem: &Problem, budget: &Budget) -> Plain {
    let (placed, sections) = plain_sections(problem);
    let budget = Budget {
        goal: budget.goal.max(sections.lower_bound()),
        ..*budget
    };
    let start = start(problem, &placed, &sections);
    let mut offsets = vec![0; placed.len()];
    let mut highest = Refined {
        found: Found {
            offsets: Vec::new(),
            height: 0,
        },
        method: Method::Apart,
        lower_bound: 0,
    };
    let mut parts = sections.parts();
    // The fullest part first: no other has to become lower than the height it reached.
    parts.sort_by_cached_key(|part| std::cmp::Reverse(part.sections.lower_bound()));
    let mut lower_bound = 0;
    for part in parts {
        let incumbent = start.as_ref().map(|start| {
            let offsets: Vec<u64> = part
                .spans
                .iter()
                .map(|&span| start[span as usize])
                .collect();
            let top = |(span, offset): (&Span, &u64)| offset + span.bytes;
            let height = part
                .sections
                .spans
                .iter()
                .zip(&offsets)
                .map(top)
                .max()
                .unwrap_or(0);
            (Found { offsets, height }, Method::Start)
        });
        let budget = Budget {
            goal: budget.goal.max(highest.found.height),
            ..budget
        };
        let refined = pack_part(&part.sections, incumbent, &budget);
        lower_bound = lower_bound.max(refined.lower_bound);
        part.spans
            .iter()
            .zip(&refined.found.offsets)
            .for_each(|(&span, &offset)| offsets[span as usize] = offset);
        if refined.found.height > highest.found.height {
            highest = refined;
        }
    }
    let mut plain = Plain::new(problem, &placed, &sections, &offsets, highest.method);
    if plain.height > 0 && plain.height == lower_bound {
        plain.proof = Some(Proof::Search);
    }
    plain
}

/// An incumbent from the offsets that the problem starts with: those, if they are a packing;
/// otherwise the first-fit packing in their order, items without an offset last and larger ones
/// first.
fn start(problem: &Problem, placed: &[usize], sections: &Sections) -> Option<Vec<u64>> {
    if problem.start.is_empty() {
        return None;
    }
    let mut given: Vec<Option<u64>> = vec![None; problem.items.len()];
    problem
        .start
        .iter()
        .for_each(|at| given[at.item] = Some(at.offset));
    let given: Vec<Option<u64>> = placed.iter().map(|&item| given[item]).collect();
    let suits = |(span, offset): (&Span, u64)| {
        offset.is_multiple_of(span.align) && offset.checked_add(span.size).is_some()
    };
    if let Some(offsets) = given.iter().copied().collect::<Option<Vec<u64>>>()
        && sections
            .spans
            .iter()
            .zip(offsets.iter().copied())
            .all(suits)
    {
        let rect = |(item, (span, &low)): (usize, (&Span, &u64))| {
            let (start, end) = (u64::from(span.start), u64::from(span.end));
            Rect {
                item,
                start,
                end,
                low,
                high: low + span.size,
            }
        };
        let rects: Vec<Rect> = sections
            .spans
            .iter()
            .zip(&offsets)
            .enumerate()
            .map(rect)
            .collect();
        if overlap(&rects).is_none() {
            return Some(offsets);
        }
    }
    if greedy::cost(sections) > GREEDY_MAX {
        return None;
    }
    let mut order: Vec<u32> = (0..placed.len() as u32).collect();
    order.sort_by_key(|&span| {
        let offset = given[span as usize];
        (
            offset.is_none(),
            offset,
            std::cmp::Reverse(sections.spans[span as usize].size),
        )
    });
    greedy::pack(
        sections,
        &Lives::new(sections),
        &order,
        greedy::Fit::First,
        u64::MAX,
    )
    .map(|found| found.offsets)
}

/// Places every span above the one before.
pub(super) fn stacked(sections: &Sections) -> Found {
    // The coarsest alignment comes first, because little padding is needed then. Within one
    // alignment, the span that leaves most of its last unit unused comes last.
    let mut order: Vec<usize> = (0..sections.spans.len()).collect();
    order.sort_by_key(|&i| {
        (
            std::cmp::Reverse(sections.spans[i].align),
            sections.spans[i].size - sections.spans[i].bytes,
        )
    });
    let mut found = Found {
        offsets: vec![0; order.len()],
        height: 0,
    };
    for i in order {
        let offset = found.height.next_multiple_of(sections.spans[i].align);
        found.offsets[i] = offset;
        found.height = offset + sections.spans[i].bytes;
    }
    found
}

/// Packs spans that no instant separates, lower than the incumbent if it can.
fn pack_part(sections: &Sections, incumbent: Option<(Found, Method)>, budget: &Budget) -> Refined {
    let few_pairs = greedy::cost(sections) <= GREEDY_MAX;
    let lives = Lives::new(sections);
    let mut skyline = Skyline::new(sections, &lives);
    let mut best = incumbent;
    for method in METHODS {
        let limit = best.as_ref().map_or(u64::MAX, |(found, _)| found.height);
        if limit <= budget.goal || (limit < u64::MAX && budget.is_over()) {
            break;
        }
        let found = match method {
            Method::Skyline(rank) => {
                let height = skyline.pack(&rank.order(sections), limit);
                height.map(|height| Found {
                    offsets: skyline.offsets.clone(),
                    height,
                })
            }
            Method::FirstFit(rank) if few_pairs => greedy::pack(
                sections,
                &lives,
                &rank.order(sections),
                greedy::Fit::First,
                limit,
            ),
            Method::BestFit(rank) if few_pairs => greedy::pack(
                sections,
                &lives,
                &rank.order(sections),
                greedy::Fit::Best,
                limit,
            ),
            _ => None,
        };
        best = found.map(|found| (found, method)).or(best);
    }
    let (found, method) = best.unwrap_or_else(|| (stacked(sections), Method::Apart));
    if found.height <= budget.goal {
        return Refined {
            found,
            method,
            lower_bound: 0,
        };
    }
    if sections.spans.len() <= orders::MAX {
        let lower = orders::lowest(sections, found.height, budget.goal)
            .map(|found| (found, Method::Search));
        let (found, method) = lower.unwrap_or((found, method));
        // The search did not look for packings below the goal.
        let lower_bound = if found.height > budget.goal {
            found.height
        } else {
            0
        };
        return Refined {
            found,
            method,
            lower_bound,
        };
    }
    if budget.effort == 0 {
        return Refined {
            found,
            method,
            lower_bound: 0,
        };
    }
    refine(sections, &lives, found, method, budget)
}
