//! The budget search: a program is made to fit into the available bytes.
//!
//! Calls are recomputed, values are offloaded to the host, kernels come from other choices of
//! fusion ([`super::front`]), or convolutions compute their own inputs, whichever costs less.
//! Kernels get smaller workspaces if needed, and where none of these is enough, they run on
//! micro-batches.

use std::cmp::Ordering;

use slabwise_planner::{
    Bytes, Dag, Link, OffloadInterval, Options, Plan, WithLink, plan, plan_for, plan_with_link,
    plan_within,
};

use super::CompileOptions;
use super::front::{Front, FrontOptions};
use crate::backend::Target;
use crate::error::{Error, Result};
use crate::ir::{KernelCall, Program};
use crate::memory::offload::Offload;
use crate::passes::{
    ChannelsLast, FusePrologues, FuseRecomputed, GrowWorkspaces, OffloadValues, Pipeline, Prepare,
    RecomputeCalls, SplitBatch, UNITS_PER_SECOND,
};
use crate::plan::{BudgetReport, MicroBatched, OffloadedValue};

/// The coarse search of each candidate takes this part of the effort.
const COARSE: u64 = 16;

/// The number of candidates that are searched again if none fits after the coarse search, and the
/// part of the effort that each takes.
const REFINED: usize = 2;
const UNFIT: u64 = 4;

/// Extra time, as a part of the step's, below which other kernels would not pay.
const LITTLE: f64 = 0.02;

/// A program with its plan, not yet checked, and the report of the measures that keep it within the
/// budget.
pub(super) struct Candidate {
    pub program: Program,
    pub offsets: Plan,
    pub budget_report: BudgetReport,
}

/// A prepared program and its baseline plan, in which every call runs once.
type Baseline = (Program, Plan);

/// Fits a program, given with its baseline plan, into `room` bytes. If no candidate fits, the
/// result is the smallest found.
pub(super) fn fit(
    baseline: Baseline,
    room: u64,
    front: &Front<'_>,
    offload: Option<Offload>,
    target: &Target,
) -> Result<Candidate> {
    let (compile_options, passes) = (front.options, front.passes);
    let guard = baseline.0.guard;
    let options = &compile_options.planner;
    let mut search = Search {
        room,
        options: compile_options,
        offload,
        passes,
        front,
        target,
        once: baseline.1.height,
        base: baseline.0.time(),
    };
    let coarse = Options {
        effort: options.effort / COARSE,
        ..*options
    };
    let first = baseline.0.clone();
    let mut others = None;
    let mut tried = search.coarse(baseline, &mut others, &coarse)?;
    // The fastest workspaces come first; small ones are for budgets that are not kept otherwise.
    let small = target
        .lean()
        .filter(|_| compile_options.measures.small_workspaces);
    if let Some(small) = small
        .as_ref()
        .filter(|_| tried.iter().all(|(found, _)| found.offsets.height > room))
    {
        let prepare = Prepare {
            target: small,
            guard,
            kernels: front.kernels,
        };
        let program = passes.run(&prepare, &first)?;
        let offsets = plan(&program.to_dag(), &coarse).map_err(internal)?;
        search.target = small;
        tried = search.coarse((program, offsets), &mut others, &coarse)?;
    }
    let whole = tried[0].1.0.clone();
    let floor = tried
        .iter()
        .map(|(found, _)| found.budget_report.floor)
        .min()
        .unwrap_or(0);
    tried.sort_by(|(a, _), (b, _)| {
        search
            .rank(a)
            .partial_cmp(&search.rank(b))
            .unwrap_or(Ordering::Equal)
    });
    let mut best = search.refined(tried, floor)?;
    best.budget_report.floor = floor;
    if best.offsets.height > room && compile_options.measures.micro_batch {
        best = search.on_micro_batches(&whole, best)?;
    }
    Ok(best)
}

fn internal(error: impl std::fmt::Display) -> Error {
    Error::Internal(error.to_string())
}

/// The search for a program that keeps a budget.
struct Search<'a> {
    room: u64,
    options: &'a CompileOptions,
    offload: Option<Offload>,
    passes: &'a Pipeline,
    front: &'a Front<'a>,
    target: &'a Target,
    /// The slab and the modelled time of the baseline.
    once: u64,
    base: f64,
}

impl Search<'_> {
    /// Within the budget first, then cheaper, then smaller.
    fn rank(&self, candidate: &Candidate) -> (u64, f64, u64) {
        (
            candidate.offsets.height.max(self.room),
            candidate.budget_report.overhead,
            candidate.offsets.height,
        )
    }

    /// Other kernels for the program, with fewer bytes live at once, not yet prepared: one without
    /// rematerialization, in which recomputed values have kernels of their own, with and without
    /// images computed by the convolutions that read them; and one in which recomputed values have
    /// kernels of their own where a kernel would touch more bytes than `room` with them.
    fn other_kernels(&self, program: &Program) -> Result<Vec<Program>> {
        let options = |rematerialize, multi_output_bytes| FrontOptions {
            rematerialize,
            multi_output_bytes,
            channels_last: Some(match program.channels_last() {
                0 => ChannelsLast::Off,
                _ => ChannelsLast::All,
            }),
            ..FrontOptions::default()
        };
        let stored = self.front.run(options(false, 0), |_, _| ())?;
        let mut candidates: Vec<Program> = Vec::new();
        if self.target.capabilities().prologues && self.options.measures.prologue_fusion {
            candidates.extend(self.passes.run(&FusePrologues, &stored)?);
        }
        candidates.push(stored);
        candidates.push(self.front.run(options(true, self.room), |_, _| ())?);
        let mut others: Vec<Program> = Vec::new();
        for candidate in candidates {
            let known = |known: &Program| is_same(known, &candidate);
            if !known(program) && !others.iter().any(known) {
                others.push(candidate);
            }
        }
        Ok(others)
    }

    /// The coarse search: the baseline and other kernels for it, each with the best plan found, up
    /// to one that costs next to nothing. `others` are made when they are first needed.
    fn coarse(
        &self,
        baseline: Baseline,
        others: &mut Option<Vec<Program>>,
        options: &Options,
    ) -> Result<Vec<(Candidate, Baseline)>> {
        let guard = baseline.0.guard;
        let mut tried = vec![(self.fit(&baseline, options)?, baseline)];
        let cheap = |(best, _): &(Candidate, Baseline)| {
            best.offsets.height <= self.room && best.budget_report.overhead <= LITTLE
        };
        if cheap(&tried[0]) {
            return Ok(tried);
        }
        let others = match others {
            Some(others) => others,
            None => others.insert(self.other_kernels(&tried[0].1.0)?),
        };
        for program in others {
            if tried.iter().any(cheap) {
                break;
            }
            let prepare = Prepare {
                target: self.target,
                guard,
                kernels: self.front.kernels,
            };
            let program = self.passes.run(&prepare, program)?;
            let offsets = plan(&program.to_dag(), options).map_err(internal)?;
            // Kernels with other outputs may sum in another order.
            let first = &tried[0].1;
            let same_bits = self.passes.same_bits(
                (&first.0, &first.1.order),
                (&program, &offsets.order),
                self.target,
            )?;
            if !same_bits {
                continue;
            }
            let baseline = (program, offsets);
            tried.push((self.fit(&baseline, options)?, baseline));
        }
        Ok(tried)
    }

    /// The refined search: the best candidates, in the order of their rank, are searched again with
    /// more effort, until one fits.
    fn refined(&self, tried: Vec<(Candidate, Baseline)>, floor: u64) -> Result<Candidate> {
        let options = &self.options.planner;
        let mut best: Option<Candidate> = None;
        for (candidate, baseline) in tried.into_iter().take(REFINED) {
            if best
                .as_ref()
                .is_some_and(|best| best.offsets.height <= self.room)
            {
                break;
            }
            let fits = candidate.offsets.height <= self.room;
            let effort = if fits {
                options.effort
            } else {
                options.effort / UNFIT
            };
            let enough = if fits {
                candidate.budget_report.overhead <= LITTLE
            } else {
                floor > self.room
            };
            let refined = if enough {
                None
            } else {
                Some(self.fit(&baseline, &Options { effort, ..*options })?)
            };
            for candidate in [Some(candidate), refined].into_iter().flatten() {
                if best
                    .as_ref()
                    .is_none_or(|best| self.rank(&candidate) < self.rank(best))
                {
                    best = Some(candidate);
                }
            }
        }
        best.ok_or_else(|| internal("no plan"))
    }

    /// The best plan found for some kernels with this effort.
    fn fit(&self, (program, once): &Baseline, options: &Options) -> Result<Candidate> {
        let dag = program.to_dag();
        let found = match self.offload {
            Some(offload) => plan_with_link(&dag, once.clone(), self.room, &link(offload), options),
            None => plan_within(&dag, once.clone(), self.room, options)
                .map(|found| WithLink::without_copies(&dag, found)),
        };
        let found = found.map_err(internal)?;
        let budget_report = BudgetReport {
            once: self.once,
            overhead: found.time.max(1.0) / self.base - 1.0,
            floor: found.floor,
            ..BudgetReport::default()
        };
        let mut candidate = self.candidate(program, found, budget_report)?;
        if !candidate.budget_report.offloaded.is_empty() {
            return Ok(candidate);
        }
        let Candidate {
            program,
            offsets,
            budget_report,
        } = &candidate;
        let fuse = FuseRecomputed {
            plan: offsets,
            recomputed: &budget_report.tasks,
            room: self.room,
            target: self.target,
            kernels: self.front.kernels,
        };
        let fused = self.passes.run(&fuse, program)?;
        candidate = self.grown(candidate)?;
        if let Some((program, tasks)) = fused {
            let offsets = plan_for(&program.to_dag(), self.room, options).map_err(internal)?;
            let overhead = program.time() / self.base - 1.0;
            let fused = self.grown(Candidate {
                program,
                offsets,
                budget_report: BudgetReport {
                    tasks,
                    overhead,
                    ..candidate.budget_report.clone()
                },
            })?;
            if self.rank(&fused) < self.rank(&candidate) {
                candidate = fused;
            }
        }
        Ok(candidate)
    }

    /// The same with the largest workspaces that fit.
    fn grown(&self, candidate: Candidate) -> Result<Candidate> {
        if candidate.offsets.height > self.room {
            return Ok(candidate);
        }
        let grow = GrowWorkspaces {
            plan: &candidate.offsets,
            target: self.target,
            room: self.room,
            kernels: self.front.kernels,
        };
        let (program, offsets) = self.passes.run(&grow, &candidate.program)?;
        let overhead = program.time() / self.base - 1.0;
        Ok(Candidate {
            program,
            offsets,
            budget_report: BudgetReport {
                overhead,
                ..candidate.budget_report
            },
        })
    }

    /// The program on micro-batches, if that has a smaller slab than the best candidate.
    fn on_micro_batches(&self, program: &Program, best: Candidate) -> Result<Candidate> {
        let options = &self.options.planner;
        let micro_batch = SplitBatch {
            target: self.target,
            kernels: self.front.kernels,
            room: self.room,
            options,
        };
        let found = self.passes.run(&micro_batch, program)?;
        let Some(found) = found.filter(|found| found.plan.height < best.offsets.height) else {
            return Ok(best);
        };
        let micro = found.program.micro_batches;
        let micro_batched = micro.map(|micro| MicroBatched {
            kernels: micro.kernels,
            count: micro.count,
            examples: micro.examples,
        });
        let budget_report = BudgetReport {
            tasks: found.recomputed,
            overhead: found.program.time() / self.base - 1.0,
            once: self.once,
            floor: best.budget_report.floor.min(found.floor),
            micro_batched,
            ..BudgetReport::default()
        };
        Ok(Candidate {
            program: found.program,
            offsets: found.plan,
            budget_report,
        })
    }

    /// The program that the planner found, and the report of its measures besides those of
    /// `budget_report`.
    fn candidate(
        &self,
        program: &Program,
        found: WithLink,
        budget_report: BudgetReport,
    ) -> Result<Candidate> {
        let WithLink {
            repeated,
            offloaded,
            plan: offsets,
            intervals,
            ..
        } = found;
        let mut tasks = Vec::new();
        let mut program = match &repeated {
            Some(repeated) => {
                tasks = repeated.recomputed_tasks();
                self.passes.run(&RecomputeCalls { repeated }, program)?
            }
            None => program.clone(),
        };
        let dag = program.to_dag();
        let offloaded_values = intervals
            .iter()
            .map(|interval| OffloadedValue::new(&dag, interval))
            .collect();
        if let Some(offloaded) = &offloaded {
            tasks = tasks
                .into_iter()
                .filter_map(|task| offloaded.run_of(task))
                .collect();
            program = self.passes.run(&OffloadValues { offloaded }, &program)?;
        }
        Ok(Candidate {
            program,
            offsets,
            budget_report: BudgetReport {
                tasks,
                offloaded: offloaded_values,
                ..budget_report
            },
        })
    }
}

/// Whether two programs launch the same kernels in the same order.
fn is_same(a: &Program, b: &Program) -> bool {
    let same = |(a, b): (&KernelCall, &KernelCall)| a.spec == b.spec;
    a.kernels.len() == b.kernels.len() && a.kernels.iter().zip(&b.kernels).all(same)
}

fn link(offload: Offload) -> Link {
    Link {
        cost_per_byte: UNITS_PER_SECOND / offload.per_second().0.max(1) as f64,
        host_bytes: offload.host_bytes().map(|bytes| bytes.0),
    }
}

impl OffloadedValue {
    fn new(dag: &Dag, interval: &OffloadInterval) -> Self {
        let seconds = |per_byte: f64| per_byte * interval.bytes as f64 / UNITS_PER_SECOND;
        OffloadedValue {
            name: dag.buffer_name(interval.buffer).into(),
            bytes: Bytes(interval.bytes),
            used: dag.task_name(interval.used).into(),
            read: dag.task_name(interval.read).into(),
            steps: interval.steps,
            copying_s: seconds(interval.link),
            computing_s: interval.recompute.map(seconds),
        }
    }
}
