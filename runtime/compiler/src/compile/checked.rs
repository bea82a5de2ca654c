//! Programs that the checkers have accepted.
//!
//! There is one path of a program from the front half to a session: [`Planned::new`] prepares and
//! plans it, [`Planned::rewrite`] replaces it by another that keeps a budget, [`Planned::overlap`]
//! lets collectives overlap with calls, [`Planned::check`] accepts it. The fields are private, so
//! that there is no other path:
//!
//! - a rewritten program is verified, as the output of every pass,
//! - it is compared with the program before by the [validator], and
//! - the plan is [checked](slabwise_planner::check) against the dag that is derived from it, and
//!   collectives in flight [are](slabwise_planner::check_overlap) against the dag before.
//!
//! The plan is checked in every build. Programs are verified and rewrites validated in debug builds
//! and with `SLABWISE_VERIFY=1`.
//!
//! [validator]: crate::passes::validate

use slabwise_planner::{
    Checked, Dag, Options, Overlapped, Plan as Offsets, TaskId, check_overlap, plan_overlapped,
};

use super::front::{Front, FrontOptions};
use crate::backend::Target;
use crate::error::{Error, Result};
use crate::ir::{KernelCall, Program};
use crate::passes::{OverlapCollectives, PassError, Pipeline, Prepare, RowPadding};
use crate::plan::{Communication, Plan, PlanDetails};

/// A prepared program with a plan that no checker has seen. Its values are those of the graph: no
/// pass after `prepare` has rewritten it, or its rewrite was validated.
pub(super) struct Planned {
    program: Program,
    dag: Dag,
    offsets: Offsets,
    /// If collectives are in flight while calls run: the dag before, its collectives, and how they
    /// were split.
    overlap: Option<(Dag, Vec<TaskId>, Overlapped)>,
}

impl Planned {
    /// The program of the front half with its baseline plan. `ended` is called after each stage,
    /// with its name and the number of nodes or kernels. Padding is the first thing that a budget
    /// saves: a plan with padded rows that does not fit is made without them.
    pub fn new(
        made_by: (&Front<'_>, &Prepare<'_>),
        fits: impl Fn(&Planned) -> bool,
        mut ended: impl FnMut(&'static str, usize),
    ) -> Result<Planned> {
        let padding = made_by.0.options.row_padding;
        let planned = Planned::with_padding(made_by, padding, &mut ended)?;
        if fits(&planned) || planned.program.padding().is_empty() {
            return Ok(planned);
        }
        Planned::with_padding(made_by, RowPadding::Off, &mut ended)
    }

    fn with_padding(
        (front, prepare): (&Front<'_>, &Prepare<'_>),
        row_padding: RowPadding,
        mut ended: impl FnMut(&'static str, usize),
    ) -> Result<Planned> {
        let options = FrontOptions {
            row_padding,
            ..FrontOptions::default()
        };
        let program = front.run(options, &mut ended)?;
        let program = front.passes.run(prepare, &program)?;
        ended("schedule", program.kernels.len());
        let dag = program.to_dag();
        let planner = &front.options.planner;
        let offsets = slabwise_planner::plan(&dag, planner).map_err(PassError::from)?;
        ended("plan", program.kernels.len());
        Ok(Planned {
            program,
            dag,
            offsets,
            overlap: None,
        })
    }

    pub fn program(&self) -> &Program {
        &self.program
    }

    pub fn dag(&self) -> &Dag {
        &self.dag
    }

    pub fn offsets(&self) -> &Offsets {
        &self.offsets
    }

    /// Replaces the program and its plan by those that `rewrite` makes of them.
    ///
    /// # Errors
    /// That of `rewrite`; if outputs of passes are verified, the first broken invariant of the new
    /// program, or that it computes other values.
    pub fn rewrite<T>(
        self,
        passes: &Pipeline,
        target: &Target,
        rewrite: impl FnOnce(Program, Offsets) -> Result<(Program, Offsets, T)>,
    ) -> Result<(Planned, T)> {
        let before = passes.remember(&self.program, &self.offsets.order);
        let (program, offsets, report) = rewrite(self.program, self.offsets)?;
        passes.verify("budget", &program)?;
        passes.validate(before.as_ref(), (&program, &offsets.order), target)?;
        let planned = Planned {
            dag: program.to_dag(),
            program,
            offsets,
            overlap: None,
        };
        Ok((planned, report))
    }

    /// Lets the collectives of the program, if it has any, run beside other calls, in a slab no
    /// larger than it is or than `room`.
    ///
    /// # Errors
    /// If outputs of passes are verified, the first broken invariant of the new program, or that it
    /// computes other values.
    pub fn overlap(
        self,
        passes: &Pipeline,
        target: &Target,
        room: u64,
        planner: &Options,
    ) -> Result<Planned> {
        let work = self.program.work();
        let tasks = (0..).map(TaskId).zip(&work);
        let collectives: Vec<TaskId> = tasks
            .filter(|(_, work)| {
                let call = self.program.begun_by(**work);
                call.is_some_and(KernelCall::is_collective)
            })
            .map(|(task, _)| task)
            .collect();
        if collectives.is_empty() {
            return Ok(self);
        }
        // Copies to the host were placed in this order.
        let options = Options {
            overlap: planner.overlap && self.program.transfers.is_empty(),
            ..*planner
        };
        let found = plan_overlapped(&self.dag, &self.offsets, &collectives, room, &options);
        let (overlapped, offsets) = found.map_err(PassError::from)?;
        let dag = self.dag.clone();
        let (planned, ()) = self.rewrite(passes, target, |program, _| {
            let overlapped = &overlapped;
            let program = passes.run(&OverlapCollectives { overlapped }, &program)?;
            Ok((program, offsets, ()))
        })?;
        Ok(Planned {
            overlap: Some((dag, collectives, overlapped)),
            ..planned
        })
    }

    /// Checks the plan.
    ///
    /// # Errors
    /// Its first broken invariant.
    pub fn check(self) -> Result<CheckedProgram> {
        let Planned {
            program,
            dag,
            offsets,
            overlap,
        } = self;
        let mut communication = None;
        let wrong = |v: String| Error::Internal(format!("the plan is wrong: {v}"));
        if let Some((before, collectives, overlapped)) = overlap {
            let overlapped = check_overlap(&before, &collectives, overlapped, &offsets)
                .map_err(|v| wrong(v.to_string()))?;
            let sent = program.sent_by_ranks();
            communication = Some(Communication::new(sent, &dag, &overlapped, &offsets));
            if let Some(call) = program.disturbed_in_flight(&offsets.order) {
                return Err(wrong(format!(
                    "`{}` touches a variable that is in flight between ranks",
                    call.name
                )));
            }
        }
        let offsets = slabwise_planner::check(&dag, offsets).map_err(|v| wrong(v.to_string()))?;
        Ok(CheckedProgram {
            program,
            dag,
            offsets,
            communication,
        })
    }
}

/// A program with the plan that the checker accepted for it.
pub(super) struct CheckedProgram {
    program: Program,
    dag: Dag,
    offsets: Checked<Offsets>,
    communication: Option<Communication>,
}

impl CheckedProgram {
    pub fn program(&self) -> &Program {
        &self.program
    }

    pub fn dag(&self) -> &Dag {
        &self.dag
    }

    /// The exchange of bytes between ranks, if there are several.
    pub fn communication(&self) -> Option<Communication> {
        self.communication
    }

    /// The height of the slab.
    pub fn height(&self) -> u64 {
        self.offsets.height
    }

    /// The compiled program, whose plan has these details.
    pub fn compiled(self, details: PlanDetails, room: Option<u64>) -> CompiledPlan {
        CompiledPlan {
            plan: Plan::new(self.dag, self.offsets, details),
            program: self.program,
            room,
        }
    }
}

/// A compiled program without memory, accepted by the checkers: its rewrites were validated, and
/// its plan was checked. [`compile`](super::compile) alone makes one.
///
/// ```compile_fail,E0451
/// # use slabwise_compiler::{compile::CompiledPlan, ir::Program, plan::Plan};
/// fn unchecked(program: Program, plan: Plan) -> CompiledPlan {
///     CompiledPlan { program, plan, room: None }
/// }
/// ```
pub struct CompiledPlan {
    program: Program,
    plan: Plan,
    room: Option<u64>,
}

impl CompiledPlan {
    /// The program in the late IR, with prepared kernels.
    pub fn program(&self) -> &Program {
        &self.program
    }

    /// Its plan.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// The bytes that the budget leaves for the slab, if there is one.
    pub fn room(&self) -> Option<u64> {
        self.room
    }

    /// Ends a stage after the plan.
    #[doc(hidden)]
    pub fn stage_ended(&mut self, name: &'static str) {
        self.plan.stage_ended(name);
    }

    /// The program and its plan; the promise that they belong together is lost.
    pub fn into_parts(self) -> (Program, Plan) {
        (self.program, self.plan)
    }
}

#[cfg(test)]
mod tests {
    use std::panic::Location;

    use slabwise_kernels::cpu::{Config, Isa};
    use slabwise_kernels::dtype::DType;
    use slabwise_kernels::scalar::ScalarOp;
    use slabwise_kernels::size::Size;
    use slabwise_kernels::spec::{Dims, Inst};

    use super::*;
    use crate::backend::{self, KernelCache};
    use crate::compile::CompileOptions;
    use crate::device::Device;
    use crate::graph::{Graph, InputInfo, Origin, Phase};
    use crate::ops::{GraphBuilder, Op};

    /// Rewrites the program of `tanh(exp(x))`, and checks the result.
    fn rewritten(
        rewrite: impl FnOnce(Program, Offsets) -> Result<(Program, Offsets, ())>,
    ) -> Result<CheckedProgram> {
        let dims = Dims::from_slice(&[Size::fixed(64)]);
        let mut graph = Graph::default();
        graph.set_origin(Origin {
            location: Location::caller(),
            layer: "".into(),
            phase: Phase::Forward,
            part: 0,
            segment: 0,
        });
        graph.inputs.push(InputInfo {
            name: "x".into(),
            dtype: DType::F32,
            dims: dims.clone(),
            donated_to: None,
        });
        let x = graph.emit(Op::Input(0), &[], DType::F32, dims);
        let y = graph.scalar(ScalarOp::Exp, &[x]);
        let y = graph.scalar(ScalarOp::Tanh, &[y]);
        graph.outputs.push(y);
        let config = Config {
            threads: 1,
            isa: Isa::detect(),
        };
        let target = backend::open(Device::Cpu)?.target(config, None);
        let passes = Pipeline::new("test", true, None)?;
        let (options, kernels) = (CompileOptions::default(), KernelCache::default());
        let front = Front {
            graph: &graph,
            options: &options,
            target: &target,
            passes: &passes,
            kernels: &kernels,
        };
        let prepare = Prepare {
            target: &target,
            guard: 0,
            kernels: &kernels,
        };
        let planned = Planned::new((&front, &prepare), |_| true, |_, _| ())?;
        planned.rewrite(&passes, &target, rewrite)?.0.check()
    }

    fn error(checked: Result<CheckedProgram>) -> String {
        checked.err().map_or_else(String::new, |e| e.to_string())
    }

    #[test]
    fn a_rewrite_must_keep_the_values() {
        assert!(rewritten(|program, offsets| Ok((program, offsets, ()))).is_ok());
        let changed = rewritten(|mut program, offsets| {
            let call = &mut program.kernels[0];
            // A kernel belongs to its spec.
            call.kernel = None;
            for inst in &mut call.spec.code {
                if let Inst::Op(op @ ScalarOp::Tanh, _) = inst {
                    *op = ScalarOp::Sin;
                }
            }
            Ok((program, offsets, ()))
        });
        let message = error(changed);
        assert!(
            message.contains("a pass changed the program"),
            "{message:?}"
        );
    }

    #[test]
    fn a_rewritten_program_is_verified_and_its_plan_checked() {
        let message = error(rewritten(|mut program, offsets| {
            program.kernels[0].args.pop();
            Ok((program, offsets, ()))
        }));
        assert!(message.contains("after budget"), "{message:?}");
        let message = error(rewritten(|program, mut offsets| {
            offsets.height += 64;
            Ok((program, offsets, ()))
        }));
        assert!(message.contains("the plan is wrong"), "{message:?}");
    }
}
