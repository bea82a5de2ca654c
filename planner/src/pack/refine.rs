//! What follows the fast heuristics: improvement and exact search in turns, each taken up again where it stopped.

use super::exact::Exact;
use super::improve::Improve;
use super::lives::Lives;
use super::portfolio::Budget;
use super::sections::Sections;
use super::{Found, Method};

/// Items placed by the improvement in one turn.
const PLACED: u64 = 400_000;

/// Nodes of the exact search in one turn.
const NODES: u64 = 8_000;

/// What a node costs, in items placed: both take about the same time then.
const NODE: u64 = PLACED / NODES;

/// Up to how many items the exact search takes part; above, it would not get through its first descent in its turn.
const EXACT_MAX: usize = 4_000;

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
    let mut improve = Improve::new(sections, lives, refined.found.clone(), budget.seed);
    let mut exact = (sections.spans.len() <= EXACT_MAX).then(|| Exact::new(sections, refined.found.clone(), lower_bound, budget.seed));
    let mut effort = budget.effort;
    while effort > 0 && refined.found.height > budget.goal.max(refined.lower_bound) && !budget.is_over() {
        if let Some(exact) = &mut exact {
            exact.offer(&refined.found);
            exact.run(budget.goal, NODES, budget.threads, budget.deadline);
            refined.lower_bound = exact.lower_bound();
            refined.take(exact.best(), Method::Search);
            effort = effort.saturating_sub(NODES * NODE);
        }
        if refined.found.height > budget.goal.max(refined.lower_bound) {
            let turn = Budget { effort: effort.min(PLACED), ..*budget };
            improve.run(&turn);
            refined.take(improve.best(), Method::SqueakyWheel);
            effort = effort.saturating_sub(PLACED);
        }
    }
    refined
}

impl Refined {
    fn take(&mut self, found: &Found, method: Method) {
        if found.height < self.found.height {
            (self.found, self.method) = (found.clone(), method);
        }
    }
}
