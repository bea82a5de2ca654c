//! What follows the fast heuristics: improvement and exact search in turns, each taken up again where it stopped. Both are charged
//! for what they cost, in items placed by the improvement, and the one that has had less has the next turn.

use super::exact::{Exact, ROUND};
use super::improve::Improve;
use super::lives::Lives;
use super::portfolio::Budget;
use super::sections::Sections;
use super::{Found, Method};

/// Items placed by the improvement in one turn.
const PLACED: u64 = 400_000;

/// What a node of the exact search costs at least, in items placed.
const NODE: u64 = PLACED / ROUND;

/// So many places of items in sections, which a node looks at where the problem is large, cost as much as placing one.
const PLACES: u64 = 128;

/// Up to how many items the exact search takes part; above, it would not get through its first descent in its turn.
const EXACT_MAX: usize = 4_000;

/// The search ends when one part in so many of the effort has neither lowered the packing nor raised the bound.
const STALE: u64 = 2;

/// A packing and what is known about it.
pub(super) struct Refined {
    pub(super) found: Found,
    pub(super) method: Method,
    /// Proved: no packing is lower.
    pub(super) lower_bound: u64,
}

/// Lowers a packing until it meets the goal or is proved to be the lowest, or the budget is spent. Deterministic, whatever the
/// number of threads, unless the time ends it.
pub(super) fn refine(sections: &Sections, lives: &Lives, found: Found, method: Method, budget: &Budget) -> Refined {
    let lower_bound = sections.lower_bound();
    let mut refined = Refined { found, method, lower_bound };
    let mut improve = Improve::new(sections, lives, refined.found.clone(), budget.seed, budget.effort);
    let mut exact = (sections.spans.len() <= EXACT_MAX).then(|| Exact::new(sections, refined.found.clone(), lower_bound, budget.seed));
    let round = round_cost(sections);
    let (mut searched, mut spent, mut fruitless) = (0u64, 0u64, 0u64);
    while spent < budget.effort && fruitless <= budget.effort / STALE && !budget.is_over() {
        let before = (refined.found.height, refined.lower_bound);
        if before.0 <= budget.goal.max(before.1) {
            break;
        }
        let left = budget.effort - spent;
        let due = round <= left && searched.saturating_add(round) <= improve.placed().saturating_add(PLACED);
        if let Some(exact) = exact.as_mut().filter(|_| due) {
            exact.offer(&refined.found);
            exact.run(budget.goal, ROUND, budget.threads, budget.deadline);
            refined.lower_bound = exact.lower_bound();
            refined.take(exact.best(), Method::Search);
            searched = searched.saturating_add(round);
        } else {
            improve.run(&Budget { effort: left.min(PLACED), ..*budget });
            refined.take(improve.best(), Method::SqueakyWheel);
        }
        let now = searched.saturating_add(improve.placed());
        let won = before != (refined.found.height, refined.lower_bound);
        fruitless = if won { 0 } else { fruitless.saturating_add(now - spent) };
        spent = now;
    }
    refined
}

/// What a round of the exact search costs, in items placed: each of its nodes looks at most places of items in sections.
fn round_cost(sections: &Sections) -> u64 {
    let places: u64 = sections.spans.iter().map(|span| u64::from(span.end - span.start)).sum();
    (places / PLACES).max(NODE).saturating_mul(ROUND)
}

impl Refined {
    fn take(&mut self, found: &Found, method: Method) {
        if found.height < self.found.height {
            (self.found, self.method) = (found.clone(), method);
        }
    }
}
