//! Overlap: dags in which collectives run while other tasks do.
//!
//! A collective moves bytes between ranks, on a separate engine. Like a copy to the host
//! ([`Offloaded`](crate::Offloaded)), it becomes two tasks: one starts it and one waits for its
//! end, and both touch all of its buffers. Therefore the rules for all tasks cover it too: its
//! sources live until its end, its destinations from its start, and their readers depend on its
//! end.
//!
//! A collective that overlaps with no kernel gains nothing, and an order of minimum peak ends each
//! lifetime as soon as possible: a bucket of gradients is sent, received, added and consumed before
//! the next gradient is computed. Therefore the tasks get a new order too, in which those that wait
//! for a collective let others pass as long as the bytes suffice ([`walk`]).

mod walk;

use crate::dag::relations::Relations;
use crate::dag::{BufferId, Dag, MayReuse, Task, TaskId};
use crate::liveness::lifetimes;
use crate::offload::Work;
use crate::order::OrderPolicy;
use crate::plan::{Options, Plan, PlanError, plan};
use walk::Walk;

/// A dag derived from another by splitting each collective into its start and its end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Overlapped {
    /// The tasks in the order they are scheduled. Its buffers are those of the original dag.
    pub dag: Dag,
    /// For each task, its role: [`Work::Start`] and [`Work::Finish`] name a collective by its index
    /// in `collectives`.
    pub work: Vec<Work>,
    /// The collectives, tasks of the original dag, in the order in which they start and end.
    pub collectives: Vec<TaskId>,
}

/// A step of a schedule with collectives in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Event {
    Run(u32),
    Start(u32),
    Finish(u32),
}

/// The number of schedules that are planned, each for fewer live bytes, because packing adds gaps.
const TARGETS: usize = 4;

/// Splits the collectives of a dag, given with a plan for it, so that they run beside other tasks.
/// The slab of the result is no larger than `room`, or than that of the plan if that is larger: if
/// none is found, or [`Options::overlap`] is off, each collective ends where it starts, and every
/// offset stays as it is.
/// Deterministic, so that all ranks start and end their collectives in one order.
///
/// # Errors
/// See [`plan`].
pub fn plan_overlapped(
    dag: &Dag,
    once: &Plan,
    collectives: &[TaskId],
    room: u64,
    options: &Options,
) -> Result<(Overlapped, Plan), PlanError> {
    dag.verify()?;
    let room = room.max(once.height);
    let mut is_collective = vec![false; dag.tasks.len()];
    for task in collectives {
        is_collective[task.index()] = true;
    }
    let relations = Relations::new(dag);
    let options = Options {
        order: OrderPolicy::Program,
        ..*options
    };
    let mut target = room;
    for _ in 0..if options.overlap { TARGETS } else { 0 } {
        let walk = Walk::new(dag, &relations, once, &is_collective, target);
        let overlapped = Overlapped::new(dag, &walk.events());
        let planned = plan(&overlapped.dag, &options)?;
        if planned.height <= room {
            return Ok((overlapped, planned));
        }
        target = target.saturating_sub((planned.height - room).max(target / 64));
    }
    let overlapped = Overlapped::in_turn(dag, once, &is_collective);
    if once.reused.iter().any(|p| is_collective[p.task.index()]) {
        let planned = plan(&overlapped.dag, &options)?;
        return Ok((overlapped, planned));
    }
    let planned = overlapped.with_offsets(once);
    Ok((overlapped, planned))
}

impl Overlapped {
    /// The dag whose tasks run in this order.
    fn new(dag: &Dag, events: &[Event]) -> Self {
        let mut new = Overlapped {
            dag: Dag {
                tasks: Vec::with_capacity(events.len()),
                buffers: dag.buffers.clone(),
                may_reuse: Vec::new(),
            },
            work: Vec::with_capacity(events.len()),
            collectives: Vec::new(),
        };
        let mut pairs = dag.may_reuse.clone();
        pairs.sort_unstable();
        // The tasks after which others may run that depend on a task of the original, and the
        // number of a collective.
        let mut end_of = vec![None; dag.tasks.len()];
        let mut number_of = vec![0; dag.tasks.len()];
        let (mut started, mut finished): (Option<TaskId>, Option<TaskId>) = (None, None);
        for &event in events {
            let (Event::Run(of) | Event::Start(of) | Event::Finish(of)) = event;
            let task = &dag.tasks[of as usize];
            let after = task.after.iter().filter_map(|b| end_of[b.index()]);
            let mut half = Task::new(task.name.clone(), &task.reads, &task.writes);
            half.after = after.collect();
            match event {
                Event::Run(_) => {
                    let id = new.dag.add_task(Task {
                        after: half.after,
                        rerun: None,
                        ..task.clone()
                    });
                    new.work.push(Work::Run(TaskId(of)));
                    end_of[of as usize] = Some(id);
                    let first = pairs.partition_point(|pair| pair.task < TaskId(of));
                    let own = pairs[first..].iter().take_while(|p| p.task == TaskId(of));
                    let renamed = own.map(|pair| MayReuse { task: id, ..*pair });
                    new.dag.may_reuse.extend(renamed);
                }
                Event::Start(_) => {
                    number_of[of as usize] = new.collectives.len() as u32;
                    new.work.push(Work::Start(new.collectives.len() as u32));
                    new.collectives.push(TaskId(of));
                    half.after.extend(started);
                    half.cost = task.cost;
                    started = Some(new.dag.add_task(half));
                    end_of[of as usize] = started;
                }
                Event::Finish(_) => {
                    let start = end_of[of as usize];
                    half.name = format!("finish {}", task.name);
                    half.after = start.into_iter().chain(finished).collect();
                    new.work.push(Work::Finish(number_of[of as usize]));
                    finished = Some(new.dag.add_task(half));
                    end_of[of as usize] = finished;
                }
            }
        }
        new
    }

    /// The dag in which each collective ends where it starts, in the order of a plan.
    fn in_turn(dag: &Dag, once: &Plan, is_collective: &[bool]) -> Self {
        let events: Vec<Event> = once
            .order
            .iter()
            .flat_map(|task| match is_collective[task.index()] {
                true => vec![Event::Start(task.0), Event::Finish(task.0)],
                false => vec![Event::Run(task.0)],
            })
            .collect();
        Overlapped::new(dag, &events)
    }

    /// The plan of its tasks in their order with the offsets of a plan of the original dag.
    fn with_offsets(&self, once: &Plan) -> Plan {
        let order: Vec<TaskId> = (0..self.dag.tasks.len() as u32).map(TaskId).collect();
        let mut runs = vec![TaskId(0); once.order.len()];
        let mut workspace_offsets = Vec::with_capacity(order.len());
        for (task, work) in order.iter().zip(&self.work) {
            workspace_offsets.push(match *work {
                Work::Run(of) => {
                    runs[of.index()] = *task;
                    once.workspace_offsets[of.index()]
                }
                Work::Start(_) | Work::Finish(_) => 0,
            });
        }
        let reused = once.reused.iter().map(|pair| MayReuse {
            task: runs[pair.task.index()],
            ..*pair
        });
        let mut reused: Vec<MayReuse> = reused.collect();
        reused.sort_unstable();
        Plan {
            lifetimes: lifetimes(&self.dag, &order),
            order,
            workspace_offsets,
            reused,
            ..once.clone()
        }
    }

    /// The tasks that start and end each collective.
    pub fn halves(&self) -> Vec<[TaskId; 2]> {
        let mut halves = vec![[TaskId(0); 2]; self.collectives.len()];
        for (task, work) in (0..).map(TaskId).zip(&self.work) {
            match *work {
                Work::Start(k) => halves[k as usize][0] = task,
                Work::Finish(k) => halves[k as usize][1] = task,
                Work::Run(_) => {}
            }
        }
        halves
    }

    /// The bytes that collectives in flight hold at each step of a plan: their sources and their
    /// destinations, each buffer once.
    pub fn bytes_in_flight(&self, plan: &Plan) -> Vec<u64> {
        let mut step_of = vec![0; plan.order.len()];
        for (step, task) in plan.order.iter().enumerate() {
            step_of[task.index()] = step;
        }
        let mut held: Vec<(BufferId, usize, usize)> = Vec::new();
        for [start, finish] in self.halves() {
            let task = &self.dag.tasks[start.index()];
            let (from, to) = (step_of[start.index()], step_of[finish.index()] + 1);
            held.extend(
                task.reads
                    .iter()
                    .chain(&task.writes)
                    .map(|b| (*b, from, to)),
            );
        }
        held.sort_unstable();
        let mut changes = vec![0i128; plan.order.len() + 1];
        let mut counted: Option<(BufferId, usize)> = None;
        for (buffer, from, to) in held {
            // The steps of an earlier collective on the same buffer are counted already.
            let until = counted.filter(|c| c.0 == buffer).map_or(0, |c| c.1);
            if to <= until {
                continue;
            }
            let bytes = self.dag.buffers[buffer.index()].occupied_on_device();
            changes[from.max(until)] += i128::from(bytes);
            changes[to] -= i128::from(bytes);
            counted = Some((buffer, to));
        }
        let sums = changes.iter().scan(0i128, |live, change| {
            *live += change;
            Some(*live as u64)
        });
        sums.take(plan.order.len()).collect()
    }
}

#[cfg(test)]
mod tests;
