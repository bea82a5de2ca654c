//! A program within a budget: kernels run again, or taken apart first, or values sent to the host, whichever costs less.

use slabwise_planner::{Bytes, Dag, Link, Plan, Trip, WithLink, plan, plan_with_link, plan_within};

use crate::error::{Error, Result};
use crate::graph::Graph;
use crate::memory::offload::Offload;
use crate::passes::{REMADE_MIN, Scheduled, UNITS_PER_SECOND, schedule, unfuse};
use crate::plan::{Again, Sent};
use crate::session::Session;

/// A program's kernels in their plan, not yet checked, and what was done to them to keep a budget.
pub(super) struct Fitted {
    pub scheduled: Scheduled,
    pub offsets: Plan,
    pub again: Again,
}

/// Fits a scheduled program, whose plan runs everything once, into `room` bytes. If nothing does, it is the smallest found.
pub(super) fn within(graph: &Graph, all: (Scheduled, Plan), room: u64, session: &Session, guard: u64) -> Result<Fitted> {
    let internal = |e: String| Error::Internal(e);
    let options = &session.options.planner;
    let (once, base) = (all.1.height, cost(&all.0.dag));
    let apart = unfuse(graph, &all.0.tasks, REMADE_MIN as u64);
    let mut candidates = vec![all];
    if apart.len() > candidates[0].0.tasks.len() {
        let scheduled = schedule(graph, apart, &session.config(), guard).map_err(internal)?;
        let offsets = plan(&scheduled.dag, options).map_err(|e| internal(e.to_string()))?;
        candidates.push((scheduled, offsets));
    }
    let mut best: Option<Fitted> = None;
    let mut floor = u64::MAX;
    for (scheduled, offsets) in candidates {
        let found = match session.offload {
            Some(offload) => plan_with_link(&scheduled.dag, offsets, room, &link(offload), options),
            None => plan_within(&scheduled.dag, offsets, room, options).map(|found| WithLink::without_copies(&scheduled.dag, found)),
        };
        let found = found.map_err(|e| internal(e.to_string()))?;
        floor = floor.min(found.floor);
        let again = Again { once, overhead: found.time.max(1.0) / base - 1.0, ..Again::default() };
        let fitted = Fitted::new(scheduled, found, again);
        // Within the budget first, then cheaper, then smaller.
        let rank = |f: &Fitted| (f.offsets.height.max(room), f.again.overhead, f.offsets.height);
        if best.as_ref().is_none_or(|best| rank(&fitted) < rank(best)) {
            best = Some(fitted);
        }
    }
    let mut best = best.ok_or_else(|| internal("no plan".into()))?;
    best.again.floor = floor;
    Ok(best)
}

impl Fitted {
    /// The program that was found, and what is to be told of it besides `again`.
    fn new(mut scheduled: Scheduled, found: WithLink, again: Again) -> Self {
        let WithLink { repeated, offloaded, plan: offsets, trips, .. } = found;
        let mut tasks = repeated.as_ref().map_or_else(Vec::new, |repeated| repeated.again());
        if let Some(repeated) = repeated {
            scheduled = scheduled.repeated(repeated.into_inner());
        }
        let sent = trips.iter().map(|trip| Sent::new(&scheduled.dag, trip)).collect();
        if let Some(offloaded) = offloaded {
            tasks = tasks.into_iter().filter_map(|task| offloaded.run_of(task)).collect();
            scheduled = scheduled.offloaded(offloaded.into_inner());
        }
        Fitted { scheduled, offsets, again: Again { tasks, sent, ..again } }
    }
}

fn link(offload: Offload) -> Link {
    Link { cost_per_byte: UNITS_PER_SECOND / offload.per_second().0.max(1) as f64, host_bytes: offload.host_bytes().map(|bytes| bytes.0) }
}

impl Sent {
    fn new(dag: &Dag, trip: &Trip) -> Self {
        let seconds = |per_byte: f64| per_byte * trip.bytes as f64 / UNITS_PER_SECOND;
        Sent {
            name: dag.buffer_name(trip.buffer).into(),
            bytes: Bytes(trip.bytes),
            used: dag.task_name(trip.used).into(),
            read: dag.task_name(trip.read).into(),
            steps: trip.steps,
            copying_s: seconds(trip.link),
            computing_s: trip.recompute.map(seconds),
        }
    }
}

/// The time of all tasks, in the unit of [`slabwise_planner::Task::cost`].
fn cost(dag: &Dag) -> f64 {
    dag.tasks.iter().map(|task| task.cost as f64).sum::<f64>().max(1.0)
}
