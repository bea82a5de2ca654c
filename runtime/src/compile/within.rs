//! A program within a budget: kernels run again, or taken apart first, whichever costs less.

use std::collections::BTreeSet;

use slabwise_planner::{Dag, Options, Plan, Task, plan, plan_within};

use crate::backend::Target;
use crate::error::{Error, Result};
use crate::graph::Graph;
use crate::passes::{Scheduled, schedule, unfuse};
use crate::plan::Again;

/// Kernels that touch more than the room divided by these are taken apart, to see whether that costs less than other ways.
const PARTS: [u64; 2] = [1, 2];

/// So little more time that taking kernels apart would not pay.
const LITTLE: f64 = 0.02;

/// A program's kernels in their plan, not yet checked, and what was done to them to keep a budget.
pub(super) struct Fitted {
    pub scheduled: Scheduled,
    pub offsets: Plan,
    pub again: Again,
}

/// Fits a scheduled program, whose plan runs everything once, into `room` bytes. If nothing does, it is the smallest found.
pub(super) fn within(graph: &Graph, all: (Scheduled, Plan), room: u64, options: &Options, target: &Target, guard: u64) -> Result<Fitted> {
    let internal = |e: String| Error::Internal(e);
    let (once, base) = (all.1.height, cost(&all.0.dag));
    let touched = touched(&all.0.dag);
    let mut candidates = vec![all];
    for parts in PARTS {
        let chosen: Vec<bool> = touched.iter().map(|&bytes| bytes > room / parts).collect();
        let apart = unfuse(graph, &candidates[0].0.tasks, &chosen);
        if candidates.iter().all(|(other, _)| apart.len() > other.tasks.len()) {
            let scheduled = schedule(graph, apart, target, guard).map_err(internal)?;
            let offsets = plan(&scheduled.dag, options).map_err(|e| internal(e.to_string()))?;
            candidates.push((scheduled, offsets));
        }
    }
    let mut best: Option<Fitted> = None;
    let mut floor = u64::MAX;
    for (mut scheduled, offsets) in candidates {
        let found = plan_within(&scheduled.dag, offsets, room, options).map_err(|e| internal(e.to_string()))?;
        floor = floor.min(found.floor);
        let mut again = Again { once, ..Again::default() };
        if let Some(repeated) = found.repeated {
            again.tasks = repeated.again();
            scheduled = scheduled.repeated(repeated.into_inner());
        }
        again.overhead = cost(&scheduled.dag) / base - 1.0;
        let fitted = Fitted { scheduled, offsets: found.plan, again };
        // Within the budget first, then cheaper, then smaller.
        let rank = |f: &Fitted| (f.offsets.height.max(room), f.again.overhead, f.offsets.height);
        if best.as_ref().is_none_or(|best| rank(&fitted) < rank(best)) {
            best = Some(fitted);
        }
        if best.as_ref().is_some_and(|best| best.offsets.height <= room && best.again.overhead <= LITTLE) {
            break;
        }
    }
    let mut best = best.ok_or_else(|| internal("no plan".into()))?;
    best.again.floor = floor;
    Ok(best)
}

/// The bytes that each task needs by itself.
fn touched(dag: &Dag) -> Vec<u64> {
    let bytes = |task: &Task| {
        let buffers: BTreeSet<_> = task.reads.iter().chain(&task.writes).collect();
        buffers.iter().map(|b| dag.buffers[b.index()].occupied()).sum::<u64>() + task.workspace_occupied()
    };
    dag.tasks.iter().map(bytes).collect()
}

/// The time of all tasks, in the unit of [`slabwise_planner::Task::cost`].
fn cost(dag: &Dag) -> f64 {
    dag.tasks.iter().map(|task| task.cost as f64).sum::<f64>().max(1.0)
}
