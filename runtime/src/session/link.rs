//! Programs of a session: compiled for the memory that it has left, and linked to its variables.

use std::time::Instant;

use super::Session;
use crate::compile::{self, CompiledPlan, Environment, MemoryUse};
use crate::error::Result;
use crate::graph::Graph;
use crate::program::Compiled;

impl Session {
    /// Compiles a graph for the memory that is left, up to a checked plan. Nothing is allocated but
    /// the plan itself.
    pub(crate) fn planned(
        &self,
        name: &str,
        graph: &Graph,
        started: Instant,
    ) -> Result<CompiledPlan> {
        compile::refuse_absurd_sizes(graph)?;
        let memory = MemoryUse {
            budget: self.memory.budget,
            offload: self.memory.offload,
            persistent: self
                .variables
                .bytes_with(graph, self.memory.budget.bytes())?,
            slab: self.slab_bytes(),
            queues: self.memory.queue_bytes(),
            prefetch_slots: self.memory.input_slots - 1,
        };
        let environment = Environment {
            device: self.device,
            backend: &*self.memory.backend,
            target: self.target(),
            memory,
            dump: self.dump.as_ref(),
        };
        compile::compile(name, graph, &self.options, &environment, started)
    }

    /// Links a compiled plan to the variables of the session, to which the program may add, and
    /// prepares the device for its runs.
    pub(crate) fn link(&mut self, mut compiled: CompiledPlan) -> Result<Compiled> {
        let room = compiled.room();
        let variables = self.adopt(&compiled.program().graph)?;
        compiled.stage_ended("variables");
        self.memory.budget.settle(room);
        let shown = self.shown(&compiled);
        let mut compiled =
            Compiled::link(compiled, &variables, self.options.shapes.use_gaps, self.id)?;
        compiled.rank = [
            self.world.rank(),
            self.world.ranks(),
            self.world.data().size(),
        ];
        compiled.fingerprint = self.agree(&compiled, shown)?;
        compiled.plan.stage_ended("link");
        self.load_program(&mut compiled)?;
        self.memory.prepare_staging(&mut compiled, room)?;
        self.memory.grow_slab(&compiled, &self.world)?;
        self.prepare_copies(&compiled)?;
        compiled.prefetch_queue = self.open_prefetch_queue(&compiled)?;
        compiled.plan.stage_ended("load");
        Ok(compiled)
    }
}
