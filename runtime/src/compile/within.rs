//! A program within a budget: kernels run again, or taken apart first, or values sent to the host, whichever costs less. Where
//! none of these is enough, kernels run on slices of the batch.

use std::collections::BTreeSet;

use slabwise_planner::{Bytes, Dag, Link, Plan, Task, Trip, WithLink, plan, plan_with_link, plan_within};

use crate::error::{Error, Result};
use crate::graph::Graph;
use crate::memory::offload::Offload;
use crate::passes::{Scheduled, UNITS_PER_SECOND, schedule, slices_within, time, unfuse};
use crate::plan::{Again, InSlices, Sent};
use crate::session::Session;

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
pub(super) fn within(graph: &Graph, all: (Scheduled, Plan), room: u64, session: &Session, guard: u64) -> Result<Fitted> {
    let internal = |e: String| Error::Internal(e);
    let (options, target) = (&session.options.planner, &session.target_of(graph));
    let (once, base) = (all.1.height, time(&all.0.dag));
    let (whole, touched) = (all.0.clone(), touched(&all.0.dag));
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
        if best.as_ref().is_some_and(|best| best.offsets.height <= room && best.again.overhead <= LITTLE) {
            break;
        }
    }
    let mut best = best.ok_or_else(|| internal("no plan".into()))?;
    best.again.floor = floor;
    if best.offsets.height > room && !session.options.unsliced {
        let found = slices_within(graph, &whole, target, guard, room, options).map_err(internal)?;
        if let Some(found) = found.filter(|found| found.plan.height < best.offsets.height) {
            let sliced = found.scheduled.sliced.as_ref();
            let sliced = sliced.map(|s| InSlices { kernels: s.kernels, slices: s.count, examples: s.examples });
            let overhead = time(&found.scheduled.dag) / base - 1.0;
            let again = Again { tasks: found.again, overhead, once, floor: floor.min(found.floor), sliced, ..Again::default() };
            best = Fitted { scheduled: found.scheduled, offsets: found.plan, again };
        }
    }
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

/// The bytes that each task needs by itself.
fn touched(dag: &Dag) -> Vec<u64> {
    let bytes = |task: &Task| {
        let buffers: BTreeSet<_> = task.reads.iter().chain(&task.writes).collect();
        buffers.iter().map(|b| dag.buffers[b.index()].occupied()).sum::<u64>() + task.workspace_occupied()
    };
    dag.tasks.iter().map(bytes).collect()
}
