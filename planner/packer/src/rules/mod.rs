//! Rules: given offsets, gaps, aliases, contiguous groups, in-place pairs and several spaces.
//!
//! Problems with constraints are split into spaces and into time intervals that no life spans. Each
//! part goes to the simplest packer that supports its constraints.
//!
//! The pairs computed in place are chosen together with the offsets. Three choices are packed and
//! the best is kept: pairs of equal size joined into one rectangle, which never raises the bytes
//! alive; all pairs joined, largest savings first; and no pair joined, where the packer for blocks
//! of any shape uses a pair whenever that helps.

use crate::error::ProblemError;
use crate::method::Method;
use crate::packing::{Extent, Packing, Proof};
use crate::plain::portfolio::{Budget, Limits, Plain, pack_plain};
use crate::problem::{Gap, InPlace, Item, Placement, Problem};
use blocks::{Blocks, free_to_join};
use bound::lower_bounds;
pub(crate) use bound::total_lower_bound;
use general::General;

mod blocks;
mod bound;
mod general;

/// Checks that the constraints of a problem do not contradict each other. Each must be valid by
/// itself.
pub(crate) fn verify(problem: &Problem) -> Result<(), ProblemError> {
    Blocks::new(problem, &[]).and_then(|blocks| blocks.verify(problem))
}

/// Packs a verified problem with constraints.
pub(crate) fn pack(problem: &Problem, limits: &Limits) -> Result<Packing, ProblemError> {
    let blocks = Blocks::new(problem, &[])?;
    let bounds = lower_bounds(problem, &blocks);
    let mut packing = Packing {
        offsets: blocks
            .place
            .iter()
            .map(|&(block, above)| blocks.list[block as usize].lowest() + above)
            .collect(),
        height: 0,
        lower_bound: 0,
        proof: None,
        method: Method::Apart,
        in_place: Vec::new(),
        spaces: bounds
            .iter()
            .map(|&lower_bound| Extent {
                height: 0,
                lower_bound,
            })
            .collect(),
    };
    let capacities = problem.capacities();
    let mut budget = Budget::new(limits);
    let mut proofs: Vec<Option<Proof>> = vec![Some(Proof::Search); bounds.len()];
    let mut taken: Vec<usize> = Vec::new();
    let mut highest = 0;
    for part in split(problem, &blocks) {
        let extent = &mut packing.spaces[part.space];
        let enough = capacities[part.space].or(limits.capacity).unwrap_or(0);
        budget.goal = extent.lower_bound.max(enough).max(extent.height);
        let found = pack_part(&part.problem, &budget)?;
        part.items
            .iter()
            .zip(&found.offsets)
            .for_each(|(&item, &offset)| packing.offsets[item] = offset);
        taken.extend(found.in_place.iter().map(|&pair| part.pairs[pair]));
        if found.height > extent.height {
            (extent.height, proofs[part.space]) = (found.height, found.proof);
        }
        if found.height > highest {
            (highest, packing.method) = (found.height, found.method);
        }
    }
    taken.sort_unstable();
    packing.in_place = taken
        .into_iter()
        .map(|pair| problem.in_place[pair])
        .collect();
    for (extent, proof) in packing.spaces.iter().zip(&mut proofs) {
        packing.height = packing.height.saturating_add(extent.height);
        packing.lower_bound = packing.lower_bound.saturating_add(extent.lower_bound);
        if extent.height == extent.lower_bound {
            *proof = Some(Proof::Bound);
        }
    }
    // The whole is optimal if each space is. The bound proves it only if it does so for each space.
    let weakest = |so_far: Proof, proof: Option<Proof>| {
        Some(if proof? == Proof::Search {
            Proof::Search
        } else {
            so_far
        })
    };
    packing.proof = proofs.into_iter().try_fold(Proof::Bound, weakest);
    Ok(packing)
}

/// Items of one space between two instants that no life spans, as a separate problem.
struct Part {
    space: usize,
    /// The indices of the items and pairs in the whole problem.
    items: Vec<usize>,
    pairs: Vec<usize>,
    problem: Problem,
}

/// Splits a problem into parts. Blocks that never need bytes are in no part.
fn split(problem: &Problem, blocks: &Blocks) -> Vec<Part> {
    let mut order: Vec<usize> = (0..blocks.list.len())
        .filter(|&block| !blocks.list[block].rects.is_empty())
        .collect();
    order.sort_by_key(|&block| {
        (
            blocks.list[block].space,
            blocks.list[block].life.start,
            block,
        )
    });
    let mut parts: Vec<Part> = Vec::new();
    const NONE: (usize, usize) = (usize::MAX, 0);
    // The part of each item, and its index there.
    let mut home = vec![NONE; problem.items.len()];
    let mut reached = 0;
    for block in order {
        let block = &blocks.list[block];
        if parts
            .last()
            .is_none_or(|part| part.space != block.space || block.life.start >= reached)
        {
            parts.push(Part {
                space: block.space,
                items: Vec::new(),
                pairs: Vec::new(),
                problem: Problem::default(),
            });
            reached = 0;
        }
        reached = reached.max(block.life.end);
        let at = parts.len() - 1;
        for &(item, _) in &block.members {
            home[item] = (at, parts[at].items.len());
            parts[at].items.push(item);
            parts[at].problem.items.push(problem.items[item]);
        }
    }
    for &Placement { item, offset } in problem.fixed.iter().filter(|at| home[at.item] != NONE) {
        let (part, item) = home[item];
        parts[part].problem.fixed.push(Placement { item, offset });
    }
    for &Placement { item, offset } in problem.start.iter().filter(|at| home[at.item] != NONE) {
        let (part, item) = home[item];
        parts[part].problem.start.push(Placement { item, offset });
    }
    for &gap in problem.gaps.iter().filter(|gap| home[gap.item] != NONE) {
        let (part, item) = home[gap.item];
        parts[part].problem.gaps.push(Gap { item, ..gap });
    }
    // A group is one block, so all of it is in one part.
    let moved = |group: &Vec<usize>| group.iter().map(|&item| home[item].1).collect::<Vec<_>>();
    for group in problem
        .aliases
        .iter()
        .filter(|group| group.first().is_some_and(|&item| home[item] != NONE))
    {
        parts[home[group[0]].0].problem.aliases.push(moved(group));
    }
    for group in problem
        .contiguous
        .iter()
        .filter(|group| group.first().is_some_and(|&item| home[item] != NONE))
    {
        parts[home[group[0]].0]
            .problem
            .contiguous
            .push(moved(group));
    }
    for (index, pair) in problem.in_place.iter().enumerate() {
        let (from, to) = (home[pair.from], home[pair.to]);
        // If one side needs no bytes at their common step, they may even be in different parts.
        if from != NONE && from.0 == to.0 {
            parts[from.0].pairs.push(index);
            parts[from.0].problem.in_place.push(InPlace {
                from: from.1,
                to: to.1,
            });
        }
    }
    parts
}

/// The best packing found for a part; pairs are indices into its [`Problem::in_place`].
struct Best {
    offsets: Vec<u64>,
    height: u64,
    in_place: Vec<usize>,
    method: Method,
    proof: Option<Proof>,
}

/// A selection of joined pairs, as blocks.
struct Selection {
    joined: Vec<usize>,
    blocks: Blocks,
    /// The blocks as items, if all of them are simple rectangles.
    simple: Option<Problem>,
}

impl Selection {
    fn new(problem: &Problem, joined: Vec<usize>) -> Result<Self, ProblemError> {
        let blocks = Blocks::new(problem, &joined)?;
        let items: Option<Vec<Item>> = blocks.list.iter().map(|block| block.as_item()).collect();
        let start = |items: Vec<Item>| {
            let base = |at: &Placement| {
                let (block, above) = blocks.place[at.item];
                Some(Placement {
                    item: block as usize,
                    offset: at.offset.checked_sub(above)?,
                })
            };
            let mut start: Vec<Placement> = problem.start.iter().filter_map(base).collect();
            start.sort_by_key(|at| at.item);
            start.dedup_by_key(|at| at.item);
            Problem {
                start,
                ..Problem::new(items)
            }
        };
        let simple = items.map(start);
        Ok(Selection {
            joined,
            blocks,
            simple,
        })
    }

    /// Whether the packer of blocks has anything to decide: shapes, or pairs that are not joined.
    fn is_general(&self, problem: &Problem) -> bool {
        self.simple.is_none() || self.joined.len() < problem.in_place.len()
    }

    fn offsets(&self, bases: &[u64]) -> Vec<u64> {
        self.blocks
            .place
            .iter()
            .map(|&(block, above)| bases[block as usize] + above)
            .collect()
    }

    /// Packs the blocks as simple items.
    fn plain(&self, simple: &Problem, budget: &Budget) -> Best {
        let Plain {
            offsets,
            height,
            method,
            proof,
            ..
        } = pack_plain(simple, budget);
        Best {
            offsets: self.offsets(&offsets),
            height,
            in_place: self.joined.clone(),
            method,
            proof,
        }
    }

    /// Packs the blocks as blocks.
    fn general(&self, problem: &Problem, budget: &Budget) -> Best {
        let mut packer = General::new(problem, &self.blocks, &self.joined);
        let found = packer.orders(budget);
        let found = packer.improve(found, budget);
        Best {
            offsets: self.offsets(&found.bases),
            height: found.height,
            in_place: found.taken,
            method: found.method,
            proof: None,
        }
    }
}

fn pack_part(problem: &Problem, budget: &Budget) -> Result<Best, ProblemError> {
    let mut choices = vec![Selection::new(problem, Vec::new())?];
    let mut sets = vec![joinable(problem, true), joinable(problem, false)];
    sets.dedup();
    for set in sets.into_iter().filter(|set| !set.is_empty()) {
        // Joining pairs of tied items may leave no offset that satisfies all constraints.
        choices.extend(Selection::new(problem, set));
    }
    // Pairs of equal size first: they cost nothing and leave rectangles.
    choices[1..].reverse();
    choices.reverse();
    if let [choice] = choices.as_slice()
        && let Some(simple) = choice
            .simple
            .as_ref()
            .filter(|_| !choice.is_general(problem))
    {
        return Ok(choice.plain(simple, budget));
    }
    let quick = Budget {
        effort: 0,
        ..*budget
    };
    let mut best: Option<(Best, usize, bool)> = None;
    let unmet = |best: &Option<(Best, usize, bool)>| {
        best.as_ref()
            .is_none_or(|(best, ..)| best.height > budget.goal)
    };
    for (index, choice) in choices.iter().enumerate() {
        if let Some(simple) = choice.simple.as_ref().filter(|_| unmet(&best)) {
            keep(&mut best, choice.plain(simple, &quick), index, false);
        }
        if unmet(&best) && choice.is_general(problem) {
            keep(&mut best, choice.general(problem, &quick), index, true);
        }
    }
    if unmet(&best) && budget.effort > 0 {
        // Half of the effort goes to the packer that was best, the rest to the one that may choose
        // pairs anew.
        let (favourite, general) = best
            .as_ref()
            .map_or((0, true), |&(_, choice, general)| (choice, general));
        let choice = &choices[favourite];
        if let Some(simple) = choice.simple.as_ref().filter(|_| !general) {
            keep(
                &mut best,
                choice.plain(simple, &budget.half()),
                favourite,
                false,
            );
        }
        let general = if choice.is_general(problem) {
            favourite
        } else {
            choices.len() - 1
        };
        if unmet(&best) && choices[general].is_general(problem) {
            keep(
                &mut best,
                choices[general].general(problem, budget),
                general,
                true,
            );
        }
    }
    let (mut best, ..) = best.expect("each choice is packed in one way at least");
    // A search over the blocks of one choice proves nothing about the other choices.
    best.proof = None;
    Ok(best)
}

/// Keeps the lower packing, with its choice and whether it came from the packer for blocks of any
/// shape.
fn keep(best: &mut Option<(Best, usize, bool)>, found: Best, choice: usize, general: bool) {
    if best
        .as_ref()
        .is_none_or(|(best, ..)| found.height < best.height)
    {
        *best = Some((found, choice, general));
    }
}

/// Pairs that can be joined in advance: items without other constraints, each donating and
/// receiving at most once.
fn joinable(problem: &Problem, equal_only: bool) -> Vec<usize> {
    let mut tied = vec![false; problem.items.len()];
    problem
        .aliases
        .iter()
        .chain(&problem.contiguous)
        .flatten()
        .for_each(|&item| tied[item] = true);
    problem.fixed.iter().for_each(|at| tied[at.item] = true);
    problem.gaps.iter().for_each(|gap| tied[gap.item] = true);
    let size = |item: usize| problem.items[item].size;
    let fits = |pair: &&usize| {
        let InPlace { from, to } = problem.in_place[**pair];
        !tied[from] && !tied[to] && (!equal_only || size(from) == size(to))
    };
    let all: Vec<usize> = (0..problem.in_place.len()).collect();
    let mut pairs: Vec<usize> = all.iter().filter(fits).copied().collect();
    pairs.sort_by_key(|&pair| {
        let InPlace { from, to } = problem.in_place[pair];
        (
            size(from) != size(to),
            std::cmp::Reverse(size(from).min(size(to))),
        )
    });
    let (mut gives, mut takes) = (
        vec![false; problem.items.len()],
        vec![false; problem.items.len()],
    );
    pairs.retain(|&pair| {
        let InPlace { from, to } = problem.in_place[pair];
        let free = free_to_join(problem, &gives, &takes, from, to);
        if free {
            (gives[from], takes[to]) = (true, true);
        }
        free
    });
    pairs.sort_unstable();
    pairs
}

impl Budget {
    /// Half of the remaining budget.
    fn half(&self) -> Budget {
        let now = std::time::Instant::now();
        let deadline = self
            .deadline
            .map(|deadline| now + deadline.saturating_duration_since(now) / 2);
        Budget {
            deadline,
            effort: self.effort / 2,
            ..*self
        }
    }
}
