//! The search for the kernels to run on micro-batches, and for the sizes of these, so that a budget
//! is kept.

use rustc_hash::FxHashSet;
use slabwise_planner::{Buffer, BufferId, Options, Plan, TaskId, plan_for, plan_within};

use super::Candidates;
use crate::backend::{KernelCache, Target};
use crate::ir::Program;
use crate::passes::error::PassError;
use crate::passes::pipeline::{Broken, Form, Pass};
use crate::passes::workspaces::grow_workspaces;

/// Most micro-batches of a kernel.
const MOST_SLICES: u32 = 64;
/// Most calls of a program on micro-batches: planning takes longer the more there are.
const MOST_TASKS: usize = 2000;
/// Kernels are chosen that touch a value of the available bytes, of a fraction of them, or any at
/// all.
const SHARES: [u64; 4] = [1, 4, 16, u64::MAX];
/// Programs that were almost small enough, in which micro-batches may be recomputed.
const TRIED_AGAIN: usize = 2;
/// Most kernels that are tried on the whole batch again, and the part of the program's time that
/// micro-batches of one must cost for that.
const MOST_WHOLE: usize = 16;
const WORTH: f64 = 1e-3;
/// Most of them where micro-batches are recomputed, which takes longer to find.
const MOST_AGAIN: usize = 3;
/// Extra time below which recomputing micro-batches would not pay.
const LITTLE: f64 = 0.02;
/// The divisor of the effort for the search of micro-batches to recompute: there are many, of
/// little cost each.
const AGAIN: u64 = 8;

/// A program on micro-batches, planned.
pub(crate) struct Found {
    /// The program.
    pub program: Program,
    /// Its plan, not yet checked; above the available bytes if none was found that is not.
    pub plan: Plan,
    /// The recomputed calls.
    pub recomputed: Vec<TaskId>,
    /// A lower bound of the slab of these kernels on any micro-batches, in any order and however
    /// often.
    pub floor: u64,
}

impl Found {
    /// The modelled time of the program.
    fn cost(&self) -> f64 {
        self.program.time()
    }
}

impl Form for Found {
    fn verify(&self) -> Result<(), Broken> {
        Form::verify(&self.program)
    }

    fn text(&self) -> String {
        self.program.text()
    }

    fn dot(&self) -> Option<String> {
        self.program.dot()
    }

    fn count(&self) -> usize {
        self.program.count()
    }
}

/// The pass; its fields as the arguments of [`micro_batches_within`].
pub(crate) struct SplitBatch<'a> {
    pub target: &'a Target,
    pub kernels: &'a KernelCache,
    pub room: u64,
    pub options: &'a Options,
}

impl Pass for SplitBatch<'_> {
    const NAME: &'static str = "micro-batch";
    type Input = Program;
    type Output = Option<Found>;

    fn run(&self, program: &Program) -> Result<Option<Found>, PassError> {
        micro_batches_within(program, self)
    }
}

/// Plans a program so that its slab is no larger than `room`, by running kernels on micro-batches,
/// and where that is not enough by recomputing some of these: the fastest plan of those found, as
/// modelled, or the smallest if none keeps to `room`. `None` if no kernel can run on micro-batches.
/// Deterministic.
///
/// # Errors
/// If a program cannot be planned.
fn micro_batches_within(
    program: &Program,
    pass: &SplitBatch<'_>,
) -> Result<Option<Found>, PassError> {
    let SplitBatch {
        target,
        kernels,
        room,
        options,
    } = *pass;
    if !target.capabilities().micro_batches {
        return Ok(None);
    }
    let Some(candidates) = Candidates::new(program, target, kernels)? else {
        return Ok(None);
    };
    let search = Search {
        candidates: &candidates,
        target,
        floor: floor(&candidates),
        room,
        options,
        base: program.time(),
    };
    let (mut best, mut tight) = search.first()?;
    if let Some((found, way)) = best.take() {
        best = Some(search.fewer(found, way, false)?);
    }
    // A program that is nearly small enough may be faster, though some of it is recomputed.
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
            let found = search.recomputed(found)?;
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

/// The calls that run on micro-batches, and the number of examples of these.
#[derive(Clone)]
struct Way {
    chosen: Vec<bool>,
    examples: u32,
}

/// The search for the calls to choose.
struct Search<'a> {
    candidates: &'a Candidates<'a>,
    target: &'a Target,
    floor: u64,
    room: u64,
    options: &'a Options,
    /// The time of the program on the whole batch.
    base: f64,
}

impl Search<'_> {
    /// Kernels chosen by the values they touch, on ever more micro-batches: the fastest program
    /// that keeps to `room`, and those that do not.
    #[allow(clippy::type_complexity)]
    fn first(&self) -> Result<(Option<(Found, Way)>, Vec<(Found, Way)>), PassError> {
        let (candidates, mut best, mut tight) = (self.candidates, None, Vec::new());
        let all = candidates.bounds.0[usize::from(candidates.batch.0)];
        let mut last = Vec::new();
        for share in SHARES {
            let touches =
                |task: usize| candidates.pays[task] && candidates.largest(task) > self.room / share;
            let chosen: Vec<bool> = (0..candidates.pays.len()).map(touches).collect();
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
                let Some(split) = candidates.split(&way.chosen, way.examples)? else {
                    continue;
                };
                let count = split.micro_batches.map(|micro| micro.count);
                if sizes == count || split.kernels.len() > MOST_TASKS {
                    continue;
                }
                sizes = count;
                let found = self.plan(split)?;
                if found.plan.height > self.room {
                    tight.push((found, way));
                    continue;
                }
                // More micro-batches take more time, but may leave bytes for larger workspaces.
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

    fn plan(&self, program: Program) -> Result<Found, PassError> {
        let plan = plan_for(&program.to_dag(), self.room, self.options)?;
        self.grown(Found {
            floor: self.floor,
            recomputed: Vec::new(),
            plan,
            program,
        })
    }

    /// The same with the largest workspaces that fit.
    fn grown(&self, found: Found) -> Result<Found, PassError> {
        if found.plan.height > self.room {
            return Ok(found);
        }
        let kernels = self.candidates.kernels;
        let (program, plan) =
            grow_workspaces(found.program, found.plan, self.target, self.room, kernels)?;
        Ok(Found {
            program,
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

    /// The same with fewer kernels on micro-batches, as long as that keeps to `room`: the kernels
    /// that these cost most run on the whole batch first.
    fn fewer(
        &self,
        mut found: Found,
        mut way: Way,
        recomputed: bool,
    ) -> Result<(Found, Way), PassError> {
        let (most, worth) = if recomputed {
            (MOST_AGAIN, LITTLE)
        } else {
            (MOST_WHOLE, WORTH)
        };
        let mut costly: Vec<(usize, f64)> = (0..way.chosen.len())
            .filter(|&task| way.chosen[task])
            .map(|task| (task, self.candidates.extra(task, way.examples)))
            .filter(|(_, extra)| *extra > worth * self.base)
            .collect();
        costly.sort_by(|a, b| b.1.total_cmp(&a.1));
        for (task, _) in costly.into_iter().take(most) {
            let mut fewer = way.clone();
            fewer.chosen[task] = false;
            let Some(split) = self.candidates.split(&fewer.chosen, fewer.examples)? else {
                continue;
            };
            let mut other = self.plan(split)?;
            if recomputed && other.plan.height > self.room {
                other = self.recomputed(other)?;
            }
            if other.plan.height <= self.room && other.cost() < found.cost() {
                (found, way) = (other, fewer);
            }
        }
        Ok((found, way))
    }

    /// The same program with some micro-batches recomputed.
    fn recomputed(&self, found: Found) -> Result<Found, PassError> {
        let options = &Options {
            effort: self.options.effort / AGAIN,
            ..*self.options
        };
        let within = plan_within(&found.program.to_dag(), found.plan, self.room, options)?;
        let (mut program, mut recomputed) = (found.program, Vec::new());
        if let Some(repeated) = within.repeated {
            recomputed = repeated.recomputed_tasks();
            program = program.repeated(&repeated);
        }
        self.grown(Found {
            program,
            plan: within.plan,
            recomputed,
            floor: found.floor,
        })
    }
}

/// A lower bound for every choice: the values that a call touches which cannot run on
/// micro-batches, or whose partial sums would be larger, less those that it may write in place; all
/// inputs together, and all outputs.
fn floor(candidates: &Candidates) -> u64 {
    let dag = &candidates.program.to_dag();
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
        .filter(|(at, _)| !candidates.pays[*at]);
    let needs = whole.map(|(at, task)| {
        let touched: FxHashSet<BufferId> = task.reads.iter().chain(&task.writes).copied().collect();
        let in_place = &candidates.program.kernels[at].in_place;
        let taken: FxHashSet<BufferId> = in_place.iter().map(|(_, to)| to.buffer()).collect();
        let own = touched.difference(&taken);
        // Micro-batches could have smaller workspaces.
        let workspace = match candidates.units[at] {
            None => task.workspace_occupied(),
            Some(_) => 0,
        };
        own.map(|b| dag.buffers[b.index()].occupied()).sum::<u64>() + workspace
    });
    needs
        .max()
        .unwrap_or(0)
        .max(sum(&|b| b.live_in))
        .max(sum(&|b| b.live_out))
}
