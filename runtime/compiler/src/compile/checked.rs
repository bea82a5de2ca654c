//! Programs that the checkers have accepted.
//!
//! A program takes one way from the front half to a session: [`Planned::new`] prepares and plans
//! it, [`Planned::rewrite`] replaces it by another that keeps a budget, [`Planned::check`] accepts
//! it. The fields are private, so that there is no other way:
//!
//! - a rewritten program is compared with the one before it by the [validator],
//! - the program is verified, and
//! - its plan is [checked](slabwise_planner::check) against the dag that is derived from it.
//!
//! The plan is checked in every build. Programs are verified and rewrites validated in debug builds
//! and with `SLABWISE_VERIFY=1`.
//!
//! [validator]: crate::passes::validate

use slabwise_planner::{Checked, Dag, Options, Plan as Offsets};

use super::front::{Front, FrontOptions};
use crate::backend::Target;
use crate::error::{Error, Result};
use crate::ir::Program;
use crate::passes::{PassError, Pipeline, Prepare};
use crate::plan::{Plan, PlanDetails};

/// A prepared program with a plan that no checker has seen. Its values are those of the graph: no
/// pass behind `prepare` has rewritten it, or its rewrite was validated.
pub(super) struct Planned {
    program: Program,
    dag: Dag,
    offsets: Offsets,
}

impl Planned {
    /// The program of the front half with its baseline plan. `ended` is called behind each stage,
    /// with its name and the number of nodes or kernels.
    pub fn new(
        front: &Front<'_>,
        prepare: &Prepare<'_>,
        planner: &Options,
        mut ended: impl FnMut(&'static str, usize),
    ) -> Result<Planned> {
        let program = front.run(FrontOptions::default(), &mut ended)?;
        let program = front.passes.run(prepare, &program)?;
        ended("schedule", program.kernels.len());
        let dag = program.to_dag();
        let offsets = slabwise_planner::plan(&dag, planner).map_err(PassError::from)?;
        ended("plan", program.kernels.len());
        Ok(Planned {
            program,
            dag,
            offsets,
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
    /// That of `rewrite`, or that the new program computes other values, if outputs of passes are
    /// verified.
    pub fn rewrite<T>(
        self,
        passes: &Pipeline,
        target: &Target,
        rewrite: impl FnOnce(Program, Offsets) -> Result<(Program, Offsets, T)>,
    ) -> Result<(Planned, T)> {
        let before = passes.remember(&self.program, &self.offsets.order);
        let (program, offsets, report) = rewrite(self.program, self.offsets)?;
        passes.validate(before.as_ref(), (&program, &offsets.order), target)?;
        let planned = Planned {
            dag: program.to_dag(),
            program,
            offsets,
        };
        Ok((planned, report))
    }

    /// Checks the plan, and verifies the program if outputs of passes are verified.
    ///
    /// # Errors
    /// The first broken invariant.
    pub fn check(self, passes: &Pipeline) -> Result<CheckedProgram> {
        let Planned {
            program,
            dag,
            offsets,
        } = self;
        passes.verify("compile", &program)?;
        let offsets = slabwise_planner::check(&dag, offsets)
            .map_err(|v| Error::Internal(format!("the plan is wrong: {v}")))?;
        Ok(CheckedProgram {
            program,
            dag,
            offsets,
        })
    }
}

/// A program with the plan that the checker accepted for it.
pub(super) struct CheckedProgram {
    program: Program,
    dag: Dag,
    offsets: Checked<Offsets>,
}

impl CheckedProgram {
    pub fn program(&self) -> &Program {
        &self.program
    }

    pub fn dag(&self) -> &Dag {
        &self.dag
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

    /// Ends a stage behind the plan.
    #[doc(hidden)]
    pub fn stage_ended(&mut self, name: &'static str) {
        self.plan.stage_ended(name);
    }

    /// The program and its plan; the promise that they belong together is lost.
    pub fn into_parts(self) -> (Program, Plan) {
        (self.program, self.plan)
    }
}
