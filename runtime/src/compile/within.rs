//! What becomes of a program whose slab is too large: kernels run again, values leave for the host.

use slabwise_planner::{Bytes, Dag, Link, Options, Plan as Offsets, PlanError, WithLink, plan_with_link, plan_within};

use crate::memory::offload::Offload;
use crate::passes::{Scheduled, UNITS_PER_SECOND};
use crate::plan::{Again, Sent};

/// The same program with the smallest slab or one of at most `room` bytes, its plan, and what that takes.
pub(super) fn within(
    scheduled: Scheduled,
    once: Offsets,
    room: u64,
    offload: Option<Offload>,
    options: &Options,
) -> Result<(Scheduled, Offsets, Again), PlanError> {
    let height = once.height;
    let found = match offload {
        Some(offload) => plan_with_link(&scheduled.dag, once, room, &link(offload), options)?,
        None => WithLink::without_copies(&scheduled.dag, plan_within(&scheduled.dag, once, room, options)?),
    };
    let WithLink { repeated, offloaded, plan, trips, time, floor } = found;
    let time_once: f64 = scheduled.dag.tasks.iter().map(|task| task.cost as f64).sum();
    let overhead = time / time_once.max(1.0) - 1.0;
    let tasks = repeated.as_ref().map_or_else(Vec::new, |repeated| repeated.again());
    let scheduled = match repeated {
        Some(repeated) => scheduled.repeated(repeated.into_inner()),
        None => scheduled,
    };
    let sent = trips.iter().map(|trip| Sent::new(&scheduled.dag, trip)).collect();
    let mut again = Again { tasks, sent, overhead, once: height, floor };
    let scheduled = match offloaded {
        Some(offloaded) => {
            again.tasks = again.tasks.iter().filter_map(|task| offloaded.run_of(*task)).collect();
            scheduled.offloaded(offloaded.into_inner())
        }
        None => scheduled,
    };
    Ok((scheduled, plan, again))
}

fn link(offload: Offload) -> Link {
    Link { cost_per_byte: UNITS_PER_SECOND / offload.per_second().0.max(1) as f64, host_bytes: offload.host_bytes().map(|bytes| bytes.0) }
}

impl Sent {
    fn new(dag: &Dag, trip: &slabwise_planner::Trip) -> Self {
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
