//! The search after the fast heuristics: improvement and exact search alternate, each resumed where
//! it stopped. Both are charged for their cost, counted in items placed by the improvement, and the
//! one that has spent less has the next turn.

use super::Found;
use super::exact::{Exact, ROUND};
use super::improve::Improve;
use super::lives::Lives;
use super::portfolio::Budget;
use super::sections::Sections;
use crate::method::Method;

/// Items placed by the improvement in one turn.
const PLACED: u64 = 400_000;

/// The minimum cost of a node of the exact search, in items placed.
const NODE: u64 = PLACED / ROUND;

/// The number of places of items in sections that cost as much as placing one item; a node visits
/// many of them where the problem is large.
const PLACES: u64 = 128;

/// The most items for which the exact search runs; with more, its first descent would not fit into
/// its turn.
const EXACT_MAX: usize = 4_000;

/// The search ends when this fraction of the effort (one part in `STALE`) has neither lowered the
/// packing nor raised the bound.
const STALE: u64 = 2;

/// A packing and its proved bound.
pub(super) struct Refined {
    pub(super) found: Found,
    pub(super) method: Method,
    /// The proved lower bound of the height.
    pub(super) lower_bound: u64,
}

/// Lowers a packing until it meets the goal or is proved optimal, or the budget is spent.
/// Deterministic for any number of threads, unless the time ends it.
pub(super) fn refine(
    sections: &Sections,
    lives: &Lives,
    found: Found,
    method: Method,
    budget: &Budget,
) -> Refined {
    let lower_bound = sections.lower_bound();
    let mut refined = Refined {
        found,
        method,
        lower_bound,
    };
    let round = round_cost(sections);
    // A small problem gets whole rounds for any effort, and the whole effort, because that takes a
    // tenth of a second.
    let is_small = round <= PLACED;
    let (total, stale) = if is_small {
        (budget.effort, u64::MAX)
    } else {
        let total = worthwhile(
            budget.effort,
            refined.found.height,
            budget.goal.max(lower_bound),
        );
        (total, total / STALE)
    };
    let mut improve = Improve::new(
        sections,
        lives,
        refined.found.clone(),
        budget.seed,
        if is_small { u64::MAX } else { total },
    );
    let mut exact = (sections.spans.len() <= EXACT_MAX)
        .then(|| Exact::new(sections, refined.found.clone(), lower_bound, budget.seed));
    let (mut left, mut searched, mut improved, mut fruitless) = (total, 0u64, 0u64, 0u64);
    while left > 0
        && fruitless <= stale
        && refined.found.height > budget.goal.max(refined.lower_bound)
        && !budget.is_over()
    {
        let before = (refined.found.height, refined.lower_bound);
        let due = (is_small || round <= left)
            && searched.saturating_add(round) <= improved.saturating_add(PLACED);
        let spent = if let Some(exact) = exact.as_mut().filter(|_| due) {
            exact.offer(&refined.found);
            exact.run(budget.goal, ROUND, budget.threads, budget.deadline);
            refined.lower_bound = exact.lower_bound();
            refined.take(exact.best(), Method::Search);
            searched = searched.saturating_add(round);
            round
        } else {
            improve.run(&Budget {
                effort: left.min(PLACED),
                ..*budget
            });
            refined.take(improve.best(), Method::SqueakyWheel);
            improved = improved.saturating_add(PLACED);
            PLACED
        };
        left = left.saturating_sub(spent);
        let won = before != (refined.found.height, refined.lower_bound);
        fruitless = if won {
            0
        } else {
            fruitless.saturating_add(spent)
        };
    }
    refined
}

/// The part of an effort worth spending on a packing that can be lowered at most to `bound`: one
/// part in `LEAST` for the last bytes, all of it where the gain may be one part in `WORTH` of the
/// height.
fn worthwhile(effort: u64, height: u64, bound: u64) -> u64 {
    const WORTH: u128 = 100;
    const LEAST: u128 = 4;
    if effort == u64::MAX {
        return effort;
    }
    let whole = u128::from(height.max(1));
    let won = (WORTH * u128::from(height.saturating_sub(bound))).clamp(whole / LEAST, whole);
    (u128::from(effort) * won / whole) as u64
}

/// The cost of a round of the exact search, in items placed: each of its nodes visits most places
/// of items in sections.
fn round_cost(sections: &Sections) -> u64 {
    let places: u64 = sections
        .spans
        .iter()
        .map(|span| u64::from(span.end - span.start))
        .sum();
    (places / PLACES).max(NODE).saturating_mul(ROUND)
}

impl Refined {
    fn take(&mut self, found: &Found, method: Method) {
        if found.height < self.found.height {
            (self.found, self.method) = (found.clone(), method);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::portfolio::stacked;
    use super::super::tests::sections;
    use super::*;
    use crate::generate::{Cuts, tiling};

    #[test]
    fn rounds_that_cost_more_than_the_effort_are_not_begun() {
        let sections = sections(&tiling(5, 1_000, 1 << 12, 1 << 12, Cuts::Mixed).problem);
        let effort = 500_000;
        assert!(
            round_cost(&sections) > effort,
            "a round costs {}",
            round_cost(&sections)
        );
        let budget = Budget {
            goal: 0,
            deadline: None,
            effort,
            threads: 1,
            seed: 0,
        };
        let (lives, incumbent) = (Lives::new(&sections), stacked(&sections));
        let refined = refine(&sections, &lives, incumbent.clone(), Method::Apart, &budget);
        assert!(
            sections.lower_bound() < refined.found.height
                && refined.found.height < incumbent.height
        );
        assert_eq!(
            (refined.method, refined.lower_bound),
            (Method::SqueakyWheel, sections.lower_bound())
        );
    }

    #[test]
    fn the_possible_gain_limits_the_spent_effort() {
        assert_eq!(worthwhile(1_000_000, 1_000, 990), 1_000_000);
        assert_eq!(worthwhile(1_000_000, 1_000, 995), 500_000);
        assert_eq!(worthwhile(1_000_000, 1_000, 999), 250_000);
        assert_eq!(worthwhile(u64::MAX, 1_000, 999), u64::MAX);
    }
}
