//! Which kernels to run on slices, and on how many, so that a budget is kept.

use rustc_hash::FxHashSet;
use slabwise_planner::{Buffer, BufferId, Dag, Options, Plan, Repeated, plan_for, plan_within};

use super::Cuttable;
use crate::backend::Target;
use crate::graph::Graph;
use crate::passes::{Scheduled, widen};

/// Most slices of a kernel.
const MOST_SLICES: u32 = 64;
/// Most tasks of a program in slices: planning takes longer the more there are.
const MOST_TASKS: usize = 2000;
/// Kernels are chosen that touch a value of the room there is, of a fraction of it, or any at all.
const SHARES: [u64; 4] = [1, 4, 16, u64::MAX];
/// Programs that were almost small enough, in which kernels of slices may run again.
const TRIED_AGAIN: usize = 2;
/// Most kernels that are tried whole again, and the part of the program's time that slices of one
/// must cost for that.
const MOST_WHOLE: usize = 16;
const WORTH: f64 = 1e-3;
/// Most of them where slices run again, which takes longer to find.
const MOST_AGAIN: usize = 3;
/// So little more time that running slices again would not pay.
const LITTLE: f64 = 0.02;
/// The part of the effort that the search for what runs again takes: there are many slices, of
/// little cost each.
const AGAIN: u64 = 8;

/// A program in slices, planned.
pub struct Found {
    /// The program.
    pub scheduled: Scheduled,
    /// Its plan, not yet checked; above the room there is if none was found that is not.
    pub plan: Plan,
    /// The runs that are not the first of their tasks.
    pub again: Vec<slabwise_planner::TaskId>,
    /// A bound below the slab of these kernels in any slices, in any order and however often.
    pub floor: u64,
}

impl Found {
    /// The modelled time of the program.
    fn cost(&self) -> f64 {
        time(&self.scheduled.dag)
    }
}

/// The time of all tasks, in the unit of [`slabwise_planner::Task::cost`].
pub(crate) fn time(dag: &Dag) -> f64 {
    dag.tasks
        .iter()
        .map(|task| task.cost as f64)
        .sum::<f64>()
        .max(1.0)
}

/// Plans a program so that its slab is no larger than `room`, by running kernels on slices of the
/// batch, and where that is not enough some of the slices again: the fastest plan of those found,
/// as modelled, or the smallest if none keeps to the room. `None` if nothing can be sliced.
/// Deterministic.
pub fn slices_within(
    graph: &Graph,
    scheduled: &Scheduled,
    target: &Target,
    guard: u64,
    room: u64,
    options: &Options,
) -> Result<Option<Found>, String> {
    if !target.capabilities().micro_batches {
        return Ok(None);
    }
    let Some(cuttable) = Cuttable::new(graph, scheduled, target, guard)? else {
        return Ok(None);
    };
    let search = Search {
        cuttable: &cuttable,
        target,
        floor: floor(&cuttable),
        room,
        options,
        base: time(&scheduled.dag),
    };
    let (mut best, mut tight) = search.first()?;
    if let Some((found, way)) = best.take() {
        best = Some(search.fewer(found, way, false)?);
    }
    // What is nearly small enough may be faster, though some of it runs again.
    if best
        .as_ref()
        .is_none_or(|(found, _)| found.cost() > search.base * (1.0 + LITTLE))
    {
        tight.retain(|(found, _)| {
            best.as_ref()
                .is_none_or(|(best, _)| found.cost() < best.cost())
        });
        tight.sort_by_key(|(found, _)| found.plan.height);
        for (found, way) in tight.into_iter().take(TRIED_AGAIN) {
            let found = search.again(found)?;
            let other = if found.plan.height <= room {
                search.fewer(found, way, true)?
            } else {
                (found, way)
            };
            best = Some(match best.take() {
                Some(best) => search.better(best, other),
                None => other,
            });
        }
    }
    Ok(best.map(|(found, _)| found))
}

/// What is cut into slices, and how many examples they have.
#[derive(Clone)]
struct Way {
    chosen: Vec<bool>,
    examples: u32,
}

/// The search for what to cut.
struct Search<'a> {
    cuttable: &'a Cuttable<'a>,
    target: &'a Target,
    floor: u64,
    room: u64,
    options: &'a Options,
    /// The time of the program when nothing is cut.
    base: f64,
}

impl Search<'_> {
    /// Kernels chosen by the values they touch, in ever more slices: the fastest that keeps to the
    /// room, and those that do not.
    #[allow(clippy::type_complexity)]
    fn first(&self) -> Result<(Option<(Found, Way)>, Vec<(Found, Way)>), String> {
        let (cuttable, mut best, mut tight) = (self.cuttable, None, Vec::new());
        let all = cuttable.bounds.0[usize::from(cuttable.batch.0)];
        let mut last = Vec::new();
        for share in SHARES {
            let touches =
                |task: usize| cuttable.pays[task] && cuttable.largest(task) > self.room / share;
            let chosen: Vec<bool> = (0..cuttable.pays.len()).map(touches).collect();
            if chosen == last || !chosen.contains(&true) {
                continue;
            }
            let (mut sizes, mut fits) = (None, None);
            for count in (1..)
                .map(|power| 1u32 << power)
                .take_while(|&count| count <= MOST_SLICES.min(all))
            {
                let way = Way {
                    chosen: chosen.clone(),
                    examples: all.div_ceil(count),
                };
                let Some(cut) = cuttable.cut(&way.chosen, way.examples)? else {
                    continue;
                };
                let count = cut.sliced.as_ref().map(|sliced| sliced.count);
                if sizes == count || cut.tasks.len() > MOST_TASKS {
                    continue;
                }
                sizes = count;
                let found = self.plan(cut)?;
                if found.plan.height > self.room {
                    tight.push((found, way));
                    continue;
                }
                // More slices take more time, but may leave room for larger workspaces.
                let cost = found.cost();
                let slower = fits.replace(cost).is_some_and(|before| before <= cost);
                best = Some(match best.take() {
                    Some(best) => self.better(best, (found, way)),
                    None => (found, way),
                });
                if slower {
                    break;
                }
            }
            last = chosen;
        }
        Ok((best, tight))
    }

    fn plan(&self, scheduled: Scheduled) -> Result<Found, String> {
        let plan = plan_for(&scheduled.dag, self.room, self.options).map_err(|e| e.to_string())?;
        self.widened(Found {
            floor: self.floor,
            again: Vec::new(),
            plan,
            scheduled,
        })
    }

    /// The same with the workspaces that there is room for.
    fn widened(&self, found: Found) -> Result<Found, String> {
        if found.plan.height > self.room {
            return Ok(found);
        }
        let (scheduled, plan) = widen(
            self.cuttable.graph,
            found.scheduled,
            found.plan,
            self.target,
            self.room,
        )?;
        Ok(Found {
            scheduled,
            plan,
            ..found
        })
    }

    fn better(&self, one: (Found, Way), other: (Found, Way)) -> (Found, Way) {
        let rank = |f: &Found| (f.plan.height.max(self.room), f.cost(), f.plan.height);
        if rank(&other.0) < rank(&one.0) {
            other
        } else {
            one
        }
    }

    /// The same in slices of fewer kernels, as long as that keeps to the room: those left whole
    /// first that slices cost most.
    fn fewer(&self, mut found: Found, mut way: Way, again: bool) -> Result<(Found, Way), String> {
        let (most, worth) = if again {
            (MOST_AGAIN, LITTLE)
        } else {
            (MOST_WHOLE, WORTH)
        };
        let mut costly: Vec<(usize, f64)> = (0..way.chosen.len())
            .filter(|&task| way.chosen[task])
            .map(|task| (task, self.cuttable.extra(task, way.examples)))
            .filter(|(_, extra)| *extra > worth * self.base)
            .collect();
        costly.sort_by(|a, b| b.1.total_cmp(&a.1));
        for (task, _) in costly.into_iter().take(most) {
            let mut fewer = way.clone();
            fewer.chosen[task] = false;
            let Some(cut) = self.cuttable.cut(&fewer.chosen, fewer.examples)? else {
                continue;
            };
            let mut other = self.plan(cut)?;
            if again && other.plan.height > self.room {
                other = self.again(other)?;
            }
            if other.plan.height <= self.room && other.cost() < found.cost() {
                (found, way) = (other, fewer);
            }
        }
        Ok((found, way))
    }

    /// The same program with some slices run again.
    fn again(&self, found: Found) -> Result<Found, String> {
        let options = &Options {
            effort: self.options.effort / AGAIN,
            ..*self.options
        };
        let within = plan_within(&found.scheduled.dag, found.plan, self.room, options)
            .map_err(|e| e.to_string())?;
        let (mut scheduled, mut runs) = (found.scheduled, Vec::new());
        if let Some(repeated) = within.repeated {
            let repeated: Repeated = repeated.into_inner();
            runs = repeated.again();
            scheduled = scheduled.repeated(repeated);
        }
        self.widened(Found {
            scheduled,
            plan: within.plan,
            again: runs,
            floor: found.floor,
        })
    }
}

/// What no slicing changes: what a task that cannot be sliced touches, or whose sums would be
/// larger, less what it may do in place; all inputs together, and all outputs.
fn floor(cuttable: &Cuttable) -> u64 {
    let dag = &cuttable.scheduled.dag;
    let sum = |of: &dyn Fn(&Buffer) -> bool| {
        dag.buffers
            .iter()
            .filter(|b| of(b))
            .map(Buffer::occupied)
            .sum::<u64>()
    };
    let whole = dag
        .tasks
        .iter()
        .enumerate()
        .filter(|(at, _)| !cuttable.pays[*at]);
    let needs = whole.map(|(at, task)| {
        let touched: FxHashSet<BufferId> = task.reads.iter().chain(&task.writes).copied().collect();
        let taken: FxHashSet<BufferId> = dag
            .may_reuse
            .iter()
            .filter(|pair| pair.task.index() == at)
            .map(|pair| pair.to)
            .collect();
        touched.difference(&taken).map(|b| dag.buffers[b.index()].occupied()).sum::<u64>()
            // Slices could have smaller ones.
            + if cuttable.units[at].is_none() { task.workspace_occupied() } else { 0 }
    });
    needs
        .max()
        .unwrap_or(0)
        .max(sum(&|b| b.live_in))
        .max(sum(&|b| b.live_out))
}
