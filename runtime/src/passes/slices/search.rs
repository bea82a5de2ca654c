//! Which kernels to run on slices, and on how many, so that a budget is kept.

use std::collections::HashSet;

use slabwise_planner::{Buffer, BufferId, Dag, Options, Plan, Repeated, plan_for, plan_within};

use super::Cuttable;
use crate::backend::Target;
use crate::graph::Graph;
use crate::passes::Scheduled;

/// Most slices of a kernel.
const MOST_SLICES: u32 = 64;
/// Most tasks of a program in slices: planning takes longer the more there are.
const MOST_TASKS: usize = 2000;
/// Kernels are chosen that touch a value of the room there is, of a fraction of it, or any at all.
const SHARES: [u64; 4] = [1, 4, 16, u64::MAX];
/// Programs that were almost small enough, in which kernels of slices may run again.
const TRIED_AGAIN: usize = 2;
/// The part of the effort that the search for what runs again takes: there are many slices, of little cost each.
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

    /// The better of two: within the room first, then faster, then smaller.
    fn or(self, other: Found, room: u64) -> Found {
        let rank = |f: &Found| (f.plan.height.max(room), f.cost(), f.plan.height);
        if rank(&other) < rank(&self) { other } else { self }
    }
}

/// The time of all tasks, in the unit of [`slabwise_planner::Task::cost`].
pub(crate) fn time(dag: &Dag) -> f64 {
    dag.tasks.iter().map(|task| task.cost as f64).sum::<f64>().max(1.0)
}

/// Plans a program so that its slab is no larger than `room`, by running kernels on slices of the batch, and where that is
/// not enough some of the slices again: the fastest plan of those found, as modelled, or the smallest if none keeps
/// to the room. `None` if nothing can be sliced. Deterministic.
pub fn slices_within(
    graph: &Graph,
    scheduled: &Scheduled,
    target: &Target,
    guard: u64,
    room: u64,
    options: &Options,
) -> Result<Option<Found>, String> {
    // Slices are of the CPU's kernels alone.
    let (config, workspace) = match target {
        Target::Cpu(config, workspace) => (config, *workspace),
        #[cfg(feature = "cuda")]
        Target::Cuda(..) => return Ok(None),
    };
    let Some(cuttable) = Cuttable::new(graph, scheduled, (config, workspace), guard)? else { return Ok(None) };
    let all = cuttable.bounds.0[usize::from(cuttable.batch.0)];
    let floor = floor(&cuttable);
    let (mut best, mut tight): (Option<Found>, Vec<Found>) = (None, Vec::new());
    let mut last = Vec::new();
    for share in SHARES {
        let chosen: Vec<bool> =
            (0..scheduled.tasks.len()).map(|task| cuttable.pays[task] && cuttable.largest(task) > room / share).collect();
        if chosen == last || !chosen.contains(&true) {
            continue;
        }
        let mut sizes = None;
        for count in (1..).map(|power| 1u32 << power).take_while(|&count| count <= MOST_SLICES.min(all)) {
            let Some(cut) = cuttable.cut(&chosen, all.div_ceil(count))? else { continue };
            let count = cut.sliced.as_ref().map(|sliced| sliced.count);
            if sizes == count || cut.tasks.len() > MOST_TASKS {
                continue;
            }
            sizes = count;
            let plan = plan_for(&cut.dag, room, options).map_err(|e| e.to_string())?;
            let found = Found { floor, again: Vec::new(), plan, scheduled: cut };
            if found.plan.height <= room {
                // More slices take more time.
                best = Some(match best.take() {
                    Some(best) => best.or(found, room),
                    None => found,
                });
                break;
            }
            tight.push(found);
        }
        last = chosen;
    }
    if let Some(best) = best {
        return Ok(Some(best));
    }
    tight.sort_by_key(|found| found.plan.height);
    let options = &Options { effort: options.effort / AGAIN, ..*options };
    for found in tight.into_iter().take(TRIED_AGAIN) {
        let found = again(found, room, options)?;
        best = Some(match best.take() {
            Some(best) => best.or(found, room),
            None => found,
        });
    }
    Ok(best)
}

/// The same program with some slices run again.
fn again(found: Found, room: u64, options: &Options) -> Result<Found, String> {
    let within = plan_within(&found.scheduled.dag, found.plan, room, options).map_err(|e| e.to_string())?;
    let (mut scheduled, mut runs) = (found.scheduled, Vec::new());
    if let Some(repeated) = within.repeated {
        let repeated: Repeated = repeated.into_inner();
        runs = repeated.again();
        scheduled = scheduled.repeated(repeated);
    }
    Ok(Found { scheduled, plan: within.plan, again: runs, floor: found.floor })
}

/// What no slicing changes: what a task that cannot be sliced touches, or whose sums would be larger, less what it may do in
/// place; all inputs together, and all outputs.
fn floor(cuttable: &Cuttable) -> u64 {
    let dag = &cuttable.scheduled.dag;
    let sum = |of: &dyn Fn(&Buffer) -> bool| dag.buffers.iter().filter(|b| of(b)).map(Buffer::occupied).sum::<u64>();
    let whole = dag.tasks.iter().enumerate().filter(|(at, _)| !cuttable.pays[*at]);
    let needs = whole.map(|(at, task)| {
        let touched: HashSet<BufferId> = task.reads.iter().chain(&task.writes).copied().collect();
        let taken: HashSet<BufferId> = dag.may_reuse.iter().filter(|pair| pair.task.index() == at).map(|pair| pair.to).collect();
        touched.difference(&taken).map(|b| dag.buffers[b.index()].occupied()).sum::<u64>()
            // Slices could have smaller ones.
            + if cuttable.units[at].is_none() { task.workspace_occupied() } else { 0 }
    });
    needs.max().unwrap_or(0).max(sum(&|b| b.live_in)).max(sum(&|b| b.live_out))
}
