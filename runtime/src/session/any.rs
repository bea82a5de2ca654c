//! Programs whose number of outputs is known at run time, such as those of model files.

use std::time::Instant;

use super::Session;
use super::shapes::first_lengths;
use crate::buffer::Output;
use crate::error::Result;
use crate::feed::Feed;
use crate::plan::Plan;
use crate::program::Program;
use crate::tensor::Tensor;
use crate::trace::Trace;

/// A [`Program`] whose number of outputs is known at run time.
pub struct AnyProgram {
    program: Program<0>,
    outputs: usize,
}

impl AnyProgram {
    /// The memory plan, as [`Program::plan`] has it.
    pub fn plan(&self) -> &Plan {
        self.program.plan()
    }

    /// The number of outputs of a run.
    pub fn outputs(&self) -> usize {
        self.outputs
    }
}

impl Session {
    /// Compiles a trace as [`Session::compile`] does, for a number of outputs that is known at run
    /// time.
    ///
    /// ```
    /// # use slabwise::prelude::*;
    /// # use slabwise::{Session, Params, Device};
    /// # let mut session = Session::new(Device::Cpu, Params::seeded(0))?;
    /// # let trace = Trace::inference();
    /// let x = trace.input("x", F32, (2,));
    /// let outputs = vec![x + 1.0, x * 2.0];
    /// let program = session.compile_any(&trace, &outputs)?;
    /// let results = session.run_any(&program, &[1.0f32, 2.0])?;
    /// assert_eq!(results.len(), 2);
    /// # Ok::<(), slabwise::Error>(())
    /// ```
    ///
    /// # Errors
    /// See [`Session::compile`].
    #[track_caller]
    pub fn compile_any(&mut self, trace: &Trace, outputs: &[Tensor<'_>]) -> Result<AnyProgram> {
        Ok(AnyProgram {
            program: self.compile_traced(trace, outputs)?,
            outputs: outputs.len(),
        })
    }

    /// Plans a trace as [`Session::plan`] does, for a number of outputs that is known at run time.
    ///
    /// # Errors
    /// See [`Session::plan`].
    #[track_caller]
    pub fn plan_any(&self, trace: &Trace, outputs: &[Tensor<'_>]) -> Result<Plan> {
        let started = Instant::now();
        let graph = self.finished(trace, outputs)?;
        let graph = first_lengths(graph, &self.options.shapes);
        Ok(self.planned(trace.name(), &graph, started)?.into_parts().1)
    }

    /// Runs a program as [`Session::run`] does; its outputs are in the order of
    /// [`Session::compile_any`].
    ///
    /// # Errors
    /// See [`Session::run`].
    pub fn run_any(&mut self, program: &AnyProgram, feed: impl Feed) -> Result<Vec<Output<'_>>> {
        let (inner, env, slab) = self.run_planned(&program.program, &feed)?;
        let inner = &*inner;
        let debugged = &program.program.debugged;
        let place = |b: usize| inner.place_in(slab, b);
        self.show((inner, debugged), &env, place)?;
        let donated = self.give_donated(inner, &feed, &env, &mut |b| place(b))?;
        let places = inner.outputs[..program.outputs].iter();
        let regions = places
            .map(|&b| self.output_region(inner, b, slab))
            .collect::<Result<Vec<_>>>()?;
        let all = regions.into_iter().enumerate();
        Ok(all
            .map(|(i, region)| self.output(inner, i, region, &env, &donated))
            .collect())
    }
}
