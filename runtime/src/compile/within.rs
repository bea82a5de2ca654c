//! A program within a budget: kernels run again, or taken apart first, or values sent to the host,
//! whichever costs less. Kernels get smaller workspaces for it, and where none of these is enough,
//! they run on slices of the batch.

use std::cmp::Ordering;
use std::collections::BTreeSet;

use slabwise_planner::{
    self as planner, Bytes, Dag, Link, Options, Plan, Trip, WithLink, plan, plan_for,
    plan_with_link, plan_within,
};

use crate::backend::Target;
use crate::error::{Error, Result};
use crate::graph::Graph;
use crate::memory::offload::Offload;
use crate::passes::{
    Scheduled, Task, UNITS_PER_SECOND, alias, prologues, rejoin, schedule, slices_within, time,
    unfuse, widen,
};
use crate::plan::{Again, InSlices, Sent};
use crate::session::Session;

/// A first look at each way takes this part of the effort.
const GLANCE: u64 = 16;

/// Of ways that did not fit at a glance, so many are searched more closely, each with this part of
/// the effort.
const CLOSELY: usize = 2;
const UNFIT: u64 = 4;

/// So little more time that taking kernels apart would not pay.
const LITTLE: f64 = 0.02;

/// A program's kernels in their plan, not yet checked, and what was done to them to keep a budget.
pub(super) struct Fitted {
    pub scheduled: Scheduled,
    pub offsets: Plan,
    pub again: Again,
}

/// Fits a scheduled program, whose plan runs everything once, into `room` bytes. If nothing does,
/// it is the smallest found.
pub(super) fn within(
    graph: &Graph,
    all: (Scheduled, Plan),
    room: u64,
    session: &Session,
    guard: u64,
) -> Result<Fitted> {
    let internal = |e: String| Error::Internal(e);
    let (options, target) = (&session.options.planner, &session.target_of(graph));
    let (once, base) = (all.1.height, time(&all.0.dag));
    let mut fit = Fit {
        graph,
        room,
        session,
        target,
        once,
        base,
    };
    let glance = Options {
        effort: options.effort / GLANCE,
        ..*options
    };
    let tasks = all.0.tasks.clone();
    let mut tried = fit.ways(all, &glance, guard)?;
    // Whoever can keep to the budget otherwise does so with workspaces that kernels are fastest
    // with.
    let lean = target
        .lean()
        .filter(|_| !session.options.wide && session.offload.is_none());
    if let Some(lean) = lean
        .as_ref()
        .filter(|_| tried.iter().all(|(fitted, _)| fitted.offsets.height > room))
    {
        let scheduled = schedule(graph, tasks, lean, guard).map_err(internal)?;
        let offsets = plan(&scheduled.dag, &glance).map_err(|e| internal(e.to_string()))?;
        fit.target = lean;
        tried = fit.ways((scheduled, offsets), &glance, guard)?;
    }
    let whole = tried[0].1.0.clone();
    let floor = tried
        .iter()
        .map(|(fitted, _)| fitted.again.floor)
        .min()
        .unwrap_or(0);
    // The best at a glance is searched more closely; of what did not fit, more than one.
    tried.sort_by(|(a, _), (b, _)| {
        fit.rank(a)
            .partial_cmp(&fit.rank(b))
            .unwrap_or(Ordering::Equal)
    });
    let mut best: Option<Fitted> = None;
    for (fitted, way) in tried.into_iter().take(CLOSELY) {
        if best
            .as_ref()
            .is_some_and(|best| best.offsets.height <= room)
        {
            break;
        }
        let fits = fitted.offsets.height <= room;
        let effort = if fits {
            options.effort
        } else {
            options.effort / UNFIT
        };
        let enough = if fits {
            fitted.again.overhead <= LITTLE
        } else {
            floor > room
        };
        let closely = if enough {
            None
        } else {
            Some(fit.fit(&way, &Options { effort, ..*options })?)
        };
        for fitted in [Some(fitted), closely].into_iter().flatten() {
            if best
                .as_ref()
                .is_none_or(|best| fit.rank(&fitted) < fit.rank(best))
            {
                best = Some(fitted);
            }
        }
    }
    let mut best = best.ok_or_else(|| internal("no plan".into()))?;
    best.again.floor = floor;
    if best.offsets.height > room && !session.options.unsliced {
        let found =
            slices_within(graph, &whole, fit.target, guard, room, options).map_err(internal)?;
        if let Some(found) = found.filter(|found| found.plan.height < best.offsets.height) {
            let sliced = found.scheduled.sliced.as_ref();
            let sliced = sliced.map(|s| InSlices {
                kernels: s.kernels,
                slices: s.count,
                examples: s.examples,
            });
            let overhead = time(&found.scheduled.dag) / base - 1.0;
            let again = Again {
                tasks: found.again,
                overhead,
                once,
                floor: floor.min(found.floor),
                sliced,
                ..Again::default()
            };
            best = Fitted {
                scheduled: found.scheduled,
                offsets: found.plan,
                again,
            };
        }
    }
    Ok(best)
}

/// What a program is fitted into.
struct Fit<'a> {
    graph: &'a Graph,
    room: u64,
    session: &'a Session,
    target: &'a Target,
    /// The slab and the modelled time of a program that runs everything once.
    once: u64,
    base: f64,
}

impl Fit<'_> {
    /// Within the budget first, then cheaper, then smaller.
    fn rank(&self, fitted: &Fitted) -> (u64, f64, u64) {
        (
            fitted.offsets.height.max(self.room),
            fitted.again.overhead,
            fitted.offsets.height,
        )
    }

    /// Other kernels for the same program, that have less in memory at once: each value under one
    /// name, all of it made apart, and images made by the convolutions that take them; and only
    /// those kernels taken apart that touch more than there is room for.
    fn other_ways(&self, all: &Scheduled) -> Vec<Vec<Task>> {
        let Fit { graph, target, .. } = *self;
        let touched = touched(&all.dag);
        let named = alias(
            graph,
            target,
            &unfuse(graph, target, &all.tasks, &vec![true; all.tasks.len()]),
        );
        let may_make_images =
            target.capabilities().prologues && !self.session.options.stored_images;
        let mut ways: Vec<Vec<Task>> = may_make_images
            .then(|| prologues(graph, &named))
            .flatten()
            .into_iter()
            .collect();
        ways.push(named);
        let chosen: Vec<bool> = touched.iter().map(|&bytes| bytes > self.room).collect();
        ways.push(unfuse(graph, target, &all.tasks, &chosen));
        // Only values that were made again are named anew or get kernels of their own.
        let stores = |tasks: &[Task]| {
            tasks
                .iter()
                .map(|task| task.spec.stores.len())
                .sum::<usize>()
        };
        let count = |tasks: &[Task]| (tasks.len(), stores(tasks));
        let mut known = vec![count(&all.tasks)];
        ways.retain(|tasks| {
            !known.contains(&count(tasks)) && {
                known.push(count(tasks));
                true
            }
        });
        ways
    }

    /// A program and other kernels for it, each with the best that is found with this effort, up to
    /// one that costs next to nothing.
    fn ways(
        &self,
        first: (Scheduled, Plan),
        options: &Options,
        guard: u64,
    ) -> Result<Vec<(Fitted, (Scheduled, Plan))>> {
        let mut tried = vec![(self.fit(&first, options)?, first)];
        for tasks in self.other_ways(&tried[0].1.0) {
            // Who names one value once has fewer values in memory, and maybe fewer kernels; who
            // takes kernels apart has more.
            if tried
                .iter()
                .any(|(best, _)| best.offsets.height <= self.room && best.again.overhead <= LITTLE)
            {
                break;
            }
            let scheduled =
                schedule(self.graph, tasks, self.target, guard).map_err(Error::Internal)?;
            // A kernel that makes something on both ways may come before and behind another, if
            // that takes its value by the first name.
            let Ok(offsets) = plan(&scheduled.dag, options) else {
                continue;
            };
            let way = (scheduled, offsets);
            tried.push((self.fit(&way, options)?, way));
        }
        Ok(tried)
    }

    /// The best that is found for some kernels with this effort.
    fn fit(&self, (scheduled, once): &(Scheduled, Plan), options: &Options) -> Result<Fitted> {
        let internal = |e: String| Error::Internal(e);
        let found = match self.session.offload {
            Some(offload) => plan_with_link(
                &scheduled.dag,
                once.clone(),
                self.room,
                &link(offload),
                options,
            ),
            None => {
                let found = plan_within(&scheduled.dag, once.clone(), self.room, options);
                found.map(|found| WithLink::without_copies(&scheduled.dag, found))
            }
        };
        let found = found.map_err(|e| internal(e.to_string()))?;
        let again = Again {
            once: self.once,
            overhead: found.time.max(1.0) / self.base - 1.0,
            floor: found.floor,
            ..Again::default()
        };
        let mut fitted = Fitted::new(scheduled.clone(), found, again);
        if !fitted.again.sent.is_empty() {
            return Ok(fitted);
        }
        let (planned, again) = ((&fitted.scheduled, &fitted.offsets), &fitted.again.tasks);
        let joined =
            rejoin(self.graph, planned, again, self.room, self.target).map_err(internal)?;
        fitted = self.widened(fitted)?;
        if let Some((scheduled, tasks)) = joined {
            let offsets = plan_for(&scheduled.dag, self.room, options)
                .map_err(|e| internal(e.to_string()))?;
            let overhead = time(&scheduled.dag) / self.base - 1.0;
            let joined = self.widened(Fitted {
                scheduled,
                offsets,
                again: Again {
                    tasks,
                    overhead,
                    ..fitted.again.clone()
                },
            })?;
            if self.rank(&joined) < self.rank(&fitted) {
                fitted = joined;
            }
        }
        Ok(fitted)
    }

    /// The same with the workspaces that there is room for.
    fn widened(&self, fitted: Fitted) -> Result<Fitted> {
        if fitted.offsets.height > self.room {
            return Ok(fitted);
        }
        let (scheduled, offsets) = widen(
            self.graph,
            fitted.scheduled,
            fitted.offsets,
            self.target,
            self.room,
        )
        .map_err(Error::Internal)?;
        let overhead = time(&scheduled.dag) / self.base - 1.0;
        Ok(Fitted {
            scheduled,
            offsets,
            again: Again {
                overhead,
                ..fitted.again
            },
        })
    }
}

impl Fitted {
    /// The program that was found, and what is to be told of it besides `again`.
    fn new(mut scheduled: Scheduled, found: WithLink, again: Again) -> Self {
        let WithLink {
            repeated,
            offloaded,
            plan: offsets,
            trips,
            ..
        } = found;
        let mut tasks = repeated
            .as_ref()
            .map_or_else(Vec::new, |repeated| repeated.again());
        if let Some(repeated) = repeated {
            scheduled = scheduled.repeated(repeated.into_inner());
        }
        let sent = trips
            .iter()
            .map(|trip| Sent::new(&scheduled.dag, trip))
            .collect();
        if let Some(offloaded) = offloaded {
            tasks = tasks
                .into_iter()
                .filter_map(|task| offloaded.run_of(task))
                .collect();
            scheduled = scheduled.offloaded(offloaded.into_inner());
        }
        Fitted {
            scheduled,
            offsets,
            again: Again {
                tasks,
                sent,
                ..again
            },
        }
    }
}

fn link(offload: Offload) -> Link {
    Link {
        cost_per_byte: UNITS_PER_SECOND / offload.per_second().0.max(1) as f64,
        host_bytes: offload.host_bytes().map(|bytes| bytes.0),
    }
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
    let bytes = |task: &planner::Task| {
        let buffers: BTreeSet<_> = task.reads.iter().chain(&task.writes).collect();
        buffers
            .iter()
            .map(|b| dag.buffers[b.index()].occupied())
            .sum::<u64>()
            + task.workspace_occupied()
    };
    dag.tasks.iter().map(bytes).collect()
}
