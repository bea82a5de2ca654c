//! Task orders with a small peak, and lower bounds of the smallest peak.
//!
//! The search starts with the program's order and three constructions (`list`). It then runs until
//! the peak is proved to be the smallest or the effort is spent (`search`): minimum cuts bound the
//! peak from below (`bound`); beams (`beam`) and depth-first searches (`exact`) of growing size
//! look for an order below a threshold, forwards and backwards in time, and may prove that there is
//! none. Both visit only states in which every task has run that can run without loss (`expand`,
//! `compact`).

use crate::dag::relations::Relations;
use crate::dag::{Dag, DagError, TaskId};
use std::fmt;
use std::time::{Duration, Instant};

mod beam;
mod bound;
mod compact;
mod exact;
mod expand;
mod list;
mod search;

use compact::Compact;
pub(crate) use compact::Sizes;
use expand::{SearchLimits, is_past};
use search::Search;

/// The policy that orders tasks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum OrderPolicy {
    /// The program's own order, changed only where dependencies require it.
    Program,
    /// The order with the smallest peak that the planner finds.
    #[default]
    MinPeak,
}

/// The origin of a plan's order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Schedule {
    /// As the program gives it.
    Program,
    /// Greedy on memory from the first task on.
    Forward,
    /// Greedy on memory from the last task back.
    Backward,
    /// Depth first from the results, larger needs first.
    DepthFirst,
    /// Found by a beam search.
    Beam,
    /// Found by a depth-first search below a threshold.
    Exact,
}

impl fmt::Display for Schedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Schedule::Program => "program order",
            Schedule::Forward => "greedy order",
            Schedule::Backward => "backward greedy order",
            Schedule::DepthFirst => "depth-first order",
            Schedule::Beam => "beam search order",
            Schedule::Exact => "exact search order",
        })
    }
}

/// An order with a small peak, and a lower bound of all peaks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BestOrder<Id = TaskId> {
    /// All tasks in the order found.
    pub order: Vec<Id>,
    /// The live bytes of the largest step of this order.
    pub peak: u64,
    /// A lower bound of the peak of every order.
    pub lower_bound: u64,
    /// The origin of the order.
    pub schedule: Schedule,
}

impl<Id> BestOrder<Id> {
    /// Whether no order is better.
    pub fn is_proved(&self) -> bool {
        self.peak == self.lower_bound
    }

    /// An upper bound of the part of the peak that a better order could save: 0 if it is proved.
    pub fn gap(&self) -> f64 {
        if self.peak == 0 {
            0.0
        } else {
            (self.peak - self.lower_bound) as f64 / self.peak as f64
        }
    }

    /// The same with other ids for the tasks.
    pub(crate) fn renamed<Other>(self, rename: impl FnMut(Id) -> Other) -> BestOrder<Other> {
        let BestOrder {
            order,
            peak,
            lower_bound,
            schedule,
        } = self;
        BestOrder {
            order: order.into_iter().map(rename).collect(),
            peak,
            lower_bound,
            schedule,
        }
    }
}

/// The effort of the search for a better order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum Effort {
    /// An effort that grows with the size of the dag, counted in steps of the search, so that the
    /// same order results every time: some ten milliseconds for a thousand tasks.
    #[default]
    Counted,
    /// Until the peak is proved to be the smallest, or for this long.
    Within(Duration),
}

impl Effort {
    /// The remaining effort some time after the beginning.
    pub(crate) fn after(self, passed: Duration) -> Effort {
        match self {
            Effort::Counted => Effort::Counted,
            Effort::Within(time) => Effort::Within(time.saturating_sub(passed)),
        }
    }

    fn limits(self, tasks: usize) -> SearchLimits {
        match self {
            Effort::Counted if tasks <= 1000 => SearchLimits {
                effort: 200_000,
                deadline: None,
            },
            Effort::Counted => SearchLimits {
                effort: 1_500_000.min(1_000 * tasks as u64),
                deadline: None,
            },
            Effort::Within(time) => SearchLimits {
                effort: u64::MAX,
                deadline: Instant::now().checked_add(time),
            },
        }
    }
}

/// The effort of a plan: a few milliseconds, spent only if no order made in one pass is proved to
/// be the best.
fn plan_limits(tasks: usize, deadline: Option<Instant>) -> SearchLimits {
    SearchLimits {
        effort: 10_000 + 20 * tasks as u64,
        deadline,
    }
}

/// The orders worth comparing, the program's first; all of them respect the dependencies of a
/// verified dag.
pub(crate) fn candidates(
    dag: &Dag,
    policy: OrderPolicy,
    in_place: bool,
    sizes: Sizes,
) -> Vec<(Schedule, Vec<TaskId>)> {
    let relations = Relations::new(dag);
    if policy == OrderPolicy::Program {
        return vec![(Schedule::Program, relations.program_order())];
    }
    let listed = list::orders(dag, &relations, None);
    let mut orders = listed.clone();
    // Also finds the order for plans without in-place pairs, so that permission for pairs never
    // makes a plan higher.
    for in_place in [true, false]
        .into_iter()
        .filter(|&pairs| in_place || !pairs)
    {
        let problem = Compact::new(dag, &relations, in_place, sizes);
        search_from(
            &problem,
            &listed,
            plan_limits(dag.tasks.len(), None),
            &mut orders,
        );
    }
    orders
}

/// Adds the order that a search finds from the given ones.
fn search_from(
    problem: &Compact,
    listed: &[(Schedule, Vec<TaskId>)],
    limits: SearchLimits,
    orders: &mut Vec<(Schedule, Vec<TaskId>)>,
) {
    let mut search = Search::new(problem, listed);
    search.run(limits);
    if matches!(search.schedule, Schedule::Beam | Schedule::Exact) {
        let order: Vec<TaskId> = search.order.into_iter().map(TaskId).collect();
        if orders.iter().all(|(_, known)| *known != order) {
            orders.push((search.schedule, order));
        }
    }
}

/// Like [`candidates`] with exact bytes and no in-place pairs, as far as time allows until the
/// deadline; if `wants_best`, with the effort of [`Effort::Counted`].
pub(crate) fn candidates_until(
    dag: &Dag,
    wants_best: bool,
    deadline: Option<Instant>,
) -> Vec<Vec<TaskId>> {
    let relations = Relations::new(dag);
    let listed = list::orders(dag, &relations, deadline);
    let mut orders = listed.clone();
    if !is_past(deadline) {
        let problem = Compact::new(dag, &relations, false, Sizes::Exact);
        let tasks = dag.tasks.len();
        search_from(&problem, &listed, plan_limits(tasks, deadline), &mut orders);
        if wants_best {
            search_from(
                &problem,
                &listed,
                SearchLimits {
                    deadline,
                    ..Effort::Counted.limits(tasks)
                },
                &mut orders,
            );
        }
    }
    orders.into_iter().map(|(_, order)| order).collect()
}

/// Searches for the order with the smallest peak, and for a lower bound of all peaks.
///
/// Bytes are counted as in a slab, in whole units of their alignment. With `in_place`, a buffer of
/// [`Dag::may_reuse`] that takes over the bytes of another is not counted twice while its task
/// runs.
///
/// # Errors
/// A [`DagError`] if the dag is broken.
pub fn minimise_peak(dag: &Dag, in_place: bool, effort: Effort) -> Result<BestOrder, DagError> {
    dag.verify()?;
    Ok(best_order(dag, in_place, effort, Sizes::Occupied))
}

/// The same for a verified dag.
pub(crate) fn best_order(dag: &Dag, in_place: bool, effort: Effort, sizes: Sizes) -> BestOrder {
    let limits = effort.limits(dag.tasks.len());
    let relations = Relations::new(dag);
    let problem = Compact::new(dag, &relations, in_place, sizes);
    let mut search = Search::new(&problem, &list::orders(dag, &relations, limits.deadline));
    search.run(limits);
    // A verified dag has no more bytes than 64 bits hold.
    BestOrder {
        peak: search.peak as u64,
        lower_bound: search.bound as u64,
        schedule: search.schedule,
        order: search.order,
    }
    .renamed(TaskId)
}
