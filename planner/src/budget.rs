//! Plans that meet a budget: by recomputing values, and with copies to the host.

mod transfers;
mod with_link;

pub use with_link::{OffloadInterval, WithLink, plan_with_link};

use crate::check::{Checked, check_repeats};
use crate::dag::{Buffer, BufferId, Dag, Task};
use crate::plan::{Options, Plan, PlanError, plan};
use crate::remat::DagSearch;
use crate::repeat::Repeated;

/// A plan for a budget, with rematerialization.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Within {
    /// The dag with recomputation, if any task runs twice.
    pub repeated: Option<Checked<Repeated>>,
    /// The plan of `repeated`, or else of the dag itself, not yet checked. It exceeds the budget if
    /// the search found none that meets it.
    pub plan: Plan,
    /// The height of the baseline plan, in which every task runs once.
    pub baseline_height: u64,
    /// A lower bound of the slab for every schedule, however often tasks run.
    pub floor: u64,
}

impl Within {
    fn cost(&self) -> u128 {
        self.repeated.as_ref().map_or(0, |repeated| repeated.cost())
    }
}

/// The number of searches, each for a different target of live bytes.
const TARGETS: usize = 10;

/// The number of searches that may miss their target. A search that misses one target seldom
/// reaches a smaller one, and failing searches take longest.
const FAILURES: usize = 3;

/// Plans a dag so that the slab is no larger than `budget`. If the plan `baseline`, in which no
/// task runs twice, is larger, [`Task::repeatable`] tasks are recomputed. Returns the cheapest plan
/// found that meets the budget, or the smallest if none does. Deterministic.
///
/// The search minimises the sum of live bytes, in which the results of one task count together and
/// in-place pairs as in the plan `baseline`; but the budget limits the slab. Therefore targets for
/// the sum are tried until the slab comes close below the budget.
///
/// # Errors
/// See [`plan`].
pub fn plan_within(
    dag: &Dag,
    baseline: Plan,
    budget: u64,
    options: &Options,
) -> Result<Within, PlanError> {
    dag.verify()?;
    let mut best = Within {
        repeated: None,
        baseline_height: baseline.height,
        plan: baseline,
        floor: floor(dag),
    };
    if best.baseline_height <= budget {
        return Ok(best);
    }
    let Some(search) = DagSearch::new(dag, options) else {
        return Ok(best);
    };
    let largest = search.peak();
    let share = budget as f64 / best.baseline_height as f64;
    let mut target = (largest as f64 * share) as u64;
    // The largest target whose slab met the budget, and the smallest whose slab did not.
    let (mut met, mut missed) = (None::<u64>, largest);
    let mut failures = 0;
    for _ in 0..TARGETS {
        let Some(found) = best_at(dag, &search, target, budget, options)? else {
            break;
        };
        failures += usize::from(!found.is_reached);
        let height = found.plan.height;
        if height <= budget {
            met = met.max(Some(target));
        } else {
            missed = missed.min(target);
        }
        best = best.or(found, budget);
        let next = match met {
            // Raises the target by the unused part of the budget.
            Some(met) => met.saturating_add(
                (missed.saturating_sub(met) / 2).min(budget.saturating_sub(height).max(met / 64)),
            ),
            None => target.saturating_sub((height - budget).max(target / 64)),
        };
        let close = height <= budget && budget - height <= budget / 64;
        if close
            || failures >= FAILURES
            || next == target
            || met.is_some_and(|met| missed.saturating_sub(met) <= largest / 64)
        {
            break;
        }
        target = next;
    }
    // A lower target does not always give a lower slab, nor a higher one a higher. If no target has
    // met the budget, one far below may.
    for eighths in (1..=6).rev() {
        if best.plan.height <= budget || failures >= FAILURES {
            break;
        }
        if let Some(found) = best_at(
            dag,
            &search,
            (largest as f64 * share) as u64 / 8 * eighths,
            budget,
            options,
        )? {
            failures += usize::from(!found.is_reached);
            best = best.or(found, budget);
        }
    }
    Ok(best)
}

/// The schedule that the search finds for a target, with its plan.
fn best_at(
    dag: &Dag,
    search: &DagSearch,
    target: u64,
    budget: u64,
    options: &Options,
) -> Result<Option<Attempt>, PlanError> {
    // A schedule that does other work is rejected: the checker decides, not the search.
    let (runs, is_reached) = search.find(target);
    let Ok(repeated) = check_repeats(dag, Repeated::new(dag, &runs)) else {
        return Ok(None);
    };
    let plan = plan_for(&repeated.dag, budget, options)?;
    Ok(Some(Attempt {
        repeated,
        plan,
        is_reached,
    }))
}

/// The divisor of the effort for the first attempt of a plan.
const QUICK_DIVISOR: u64 = 16;

/// A plan for a yes-or-no question, whether the dag fits the budget: most of the effort is spent
/// only if packing decides it.
///
/// # Errors
/// See [`plan`].
pub fn plan_for(dag: &Dag, budget: u64, options: &Options) -> Result<Plan, PlanError> {
    let quick = plan(
        dag,
        &Options {
            effort: options.effort / QUICK_DIVISOR,
            ..*options
        },
    )?;
    if quick.height <= budget || quick.lower_bound > budget {
        Ok(quick)
    } else {
        plan(dag, options)
    }
}

struct Attempt {
    repeated: Checked<Repeated>,
    plan: Plan,
    /// Whether the live bytes of the schedule meet the target.
    is_reached: bool,
}

impl Within {
    /// The better of this and an attempt.
    fn or(self, Attempt { repeated, plan, .. }: Attempt, budget: u64) -> Within {
        let found = Within {
            repeated: Some(repeated),
            plan,
            ..self
        };
        if found.beats(&self, budget) {
            found
        } else {
            self
        }
    }

    /// Whether it is the better of two: within the budget first, then cheaper, then smaller.
    fn beats(&self, other: &Within, budget: u64) -> bool {
        let rank = |w: &Within| (w.plan.height.max(budget), w.cost(), w.plan.height);
        rank(self) < rank(other)
    }
}

/// A lower bound of the slab: the bytes that one task touches at once, less those that it may
/// overwrite in place; all inputs, which exist together at the start; all outputs, which exist
/// together at the end.
pub(crate) fn floor(dag: &Dag) -> u64 {
    let sum = |of: &dyn Fn(&Buffer) -> bool| {
        dag.buffers
            .iter()
            .filter(|b| of(b))
            .map(Buffer::occupied_on_device)
            .sum::<u64>()
    };
    let mut saved = vec![0; dag.tasks.len()];
    let mut taken: Vec<_> = dag
        .may_reuse
        .iter()
        .map(|pair| (pair.task, pair.to))
        .collect();
    taken.sort_unstable();
    taken.dedup();
    taken
        .iter()
        .for_each(|(task, to)| saved[task.index()] += dag.buffers[to.index()].occupied());
    let need = |(task, saved): (&Task, &u64)| {
        let mut touched: Vec<BufferId> = task.reads.iter().chain(&task.writes).copied().collect();
        touched.sort_unstable();
        touched.dedup();
        let bytes = touched
            .iter()
            .map(|b| dag.buffers[b.index()].occupied_on_device())
            .sum::<u64>();
        (bytes + task.workspace_occupied()).saturating_sub(*saved)
    };
    let tasks = dag.tasks.iter().zip(&saved).map(need).max().unwrap_or(0);
    tasks.max(sum(&|b| b.live_in)).max(sum(&|b| b.live_out))
}
