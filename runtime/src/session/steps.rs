//! The step loop: the kernels and transfers of a program, one after the other.
//!
//! The same loop runs a program in its slab and in blocks of the pool, and records a run on a
//! device that replays it. The cases differ in [where buffers lie](Buffers), and in whether the
//! device launches a kernel or notes it.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use slabwise_kernels::collective::Exchange;
use slabwise_kernels::copies;
use slabwise_kernels::memory::Region;
use slabwise_kernels::size::Env;
use slabwise_kernels::spec::MAX_ARGUMENTS;
use smallvec::SmallVec;

use super::checks::Watch;
use super::dynamic::Pooled;
use super::measure::StepClock;
use super::{RunStats, Session};
use crate::backend::Call;
use crate::error::Result;
use crate::program::{Compiled, Place, Work};

/// Where the buffers of a run lie.
pub(crate) enum Buffers<'a> {
    /// At their planned offsets in the slab and in the host's space; those of data-dependent size
    /// in gaps of the slab or in the pool.
    Planned { slab: Region, host: Region },
    /// In blocks of the pool.
    Pooled(&'a mut Pooled),
}

/// A run of a program.
pub(crate) struct Run<'a> {
    pub inner: &'a Compiled,
    /// The regions of inputs that are read in place from the caller's memory.
    pub fed: &'a [Option<Region>],
    pub buffers: Buffers<'a>,
    /// Whether the device notes the kernels instead of launching them.
    pub recorded: bool,
}

/// A transfer that a run has started.
#[derive(Clone, Copy, Debug, Default)]
pub(super) enum Ticket {
    /// Not yet, or one of a kind that is waited for in another way.
    #[default]
    None,
    Copy(copies::Ticket),
    Exchange(Exchange),
}

/// The regions of a kernel's arguments.
type Arguments = SmallVec<[Region; MAX_ARGUMENTS]>;

impl Session {
    /// Runs a program whose inputs lie at their planned offsets, or in the regions of `fed`.
    pub(super) fn run_fed(
        &mut self,
        inner: &Compiled,
        env: &mut Env,
        fed: &[Option<Region>],
    ) -> Result<()> {
        self.execution.stats = RunStats::default();
        self.execution
            .data_dependent
            .begin(inner, &mut self.memory)?;
        let (slab, host) = (self.memory.slab()?, self.memory.host.unwrap_or_default());
        let (_, staged) = self.memory.backend.staging();
        self.memory.backend.start(inner.loaded.as_ref(), env)?;
        if !self.run_recorded(inner, slab, fed, env)? {
            let mut run = Run {
                inner,
                fed,
                buffers: Buffers::Planned { slab, host },
                recorded: false,
            };
            let launched = || self.run_launched(&mut run, env);
            // A custom kernel may panic.
            let launched = catch_unwind(AssertUnwindSafe(launched));
            if !matches!(launched, Ok(Ok(()))) {
                // The next run finds nothing in flight.
                let transport = self.world.transport();
                self.memory.backend.finish_transfers(transport);
            }
            launched.unwrap_or_else(|panic| resume_unwind(panic))?;
        }
        let (lent_bytes, pool_bytes) = self.execution.data_dependent.most();
        self.execution.stats = RunStats {
            peak_slab_bytes: inner.peak() + staged,
            lent_bytes,
            pool_bytes,
        };
        if pool_bytes > 0 {
            self.memory.pool.end_step(self.memory.backend.source());
        }
        Ok(())
    }

    fn run_launched(&mut self, run: &mut Run<'_>, env: &mut Env) -> Result<()> {
        self.run_steps(run, env)?;
        self.memory.backend.end_run(run.inner.loaded.as_ref())
    }

    /// Runs the steps of a program.
    pub(crate) fn run_steps(&mut self, run: &mut Run<'_>, env: &mut Env) -> Result<()> {
        let inner = run.inner;
        let timed = self.execution.is_profiled() || self.execution.recording.is_some();
        let mut clock = timed.then(|| StepClock::start(&mut *self.memory.backend));
        self.execution.tickets.clear();
        let transfers = inner.transfers.len();
        self.execution.tickets.resize(transfers, Ticket::None);
        let mut watch = match run.buffers {
            Buffers::Planned { slab, .. } if inner.guard > 0 => {
                Some((Watch::begin(self, inner, slab)?, slab))
            }
            _ => None,
        };
        let mut search = self.begin_search();
        for (at, step) in inner.steps.iter().enumerate() {
            if let Some(search) = &mut search {
                search.before(self, step)?;
            }
            let workspace = self.begin_step(run, at, env)?;
            let arguments: Arguments = step
                .places
                .iter()
                .map(|place| self.argument(run, place, env))
                .collect::<Result<_>>()?;
            if let Some(clock) = &mut clock {
                clock.mark(&mut *self.memory.backend)?;
            }
            match &step.work {
                Work::Run(kernel) => {
                    let call = Call {
                        loaded: inner.loaded.as_ref(),
                        step: at,
                        kernel,
                        slice: step.slice,
                        arguments: &arguments,
                        workspace,
                        sizes: env,
                        team: &self.execution.team,
                        transport: self.world.transport(),
                    };
                    let done = self.memory.backend.run(&call)?;
                    done.map_err(|fault| inner.fault(at, fault))?;
                    if let Some(search) = &mut search {
                        search.after(self, run, at, &arguments, env)?;
                    }
                    if !run.recorded {
                        self.bind_length(inner, at, arguments.first(), env)?;
                    }
                }
                Work::Start(transfer) => self.start_transfer(run, at, *transfer, env)?,
                Work::Finish(transfer) => self.finish_transfer(run, *transfer)?,
            }
            if let Some(clock) = &mut clock {
                clock.mark(&mut *self.memory.backend)?;
            }
            if let (Some(recording), Buffers::Planned { slab, .. }) =
                (&mut self.execution.recording, &run.buffers)
            {
                recording.note(inner, at, &arguments, workspace, *slab);
            }
            self.end_step(run, at)?;
            if let Some((watch, slab)) = &mut watch {
                watch.after(self, inner, *slab, at)?;
            }
        }
        if let Some(clock) = clock {
            self.note_times(&clock, inner, env)?;
        }
        search.map_or(Ok(()), |search| search.end(self, inner))
    }

    /// Makes room for the values that a step is the first to write; its workspace.
    fn begin_step(&mut self, run: &mut Run<'_>, at: usize, env: &Env) -> Result<Region> {
        match &mut run.buffers {
            Buffers::Planned { slab, .. } => {
                self.execution.data_dependent.allocate(
                    run.inner,
                    at,
                    env,
                    *slab,
                    (&self.variables, &mut self.memory),
                )?;
                let planned = run.inner.steps[at].workspace;
                Ok(slab.part(planned.offset, planned.bytes))
            }
            Buffers::Pooled(blocks) => self.memory.take_blocks(run.inner, blocks, at, env),
        }
    }

    /// Gives back the memory of the values that a step is the last to use.
    fn end_step(&mut self, run: &mut Run<'_>, at: usize) -> Result<()> {
        match &mut run.buffers {
            Buffers::Planned { .. } => {
                self.execution
                    .data_dependent
                    .free(run.inner, at, &mut self.memory)
            }
            Buffers::Pooled(blocks) => self.memory.free_blocks(run.inner, blocks, at),
        }
    }

    /// The region of an argument.
    pub(super) fn argument(&self, run: &Run<'_>, place: &Place, env: &Env) -> Result<Region> {
        match *place {
            Place::Planned(b) => self.region_of(run, b),
            Place::MicroBatch(b, _) => Ok(place.part(self.region_of(run, b)?, env)),
            Place::Variable(v) => Ok(self.variables.list[v].region),
            Place::Sizes => Ok(self.memory.sizes),
        }
    }

    /// The region of a buffer.
    pub(super) fn region_of(&self, run: &Run<'_>, buffer: usize) -> Result<Region> {
        let inner = run.inner;
        let fed = || inner.input_of[buffer].and_then(|input| *run.fed.get(input)?);
        match &run.buffers {
            Buffers::Planned { slab, .. } if inner.buffers[buffer].data_dependent => self
                .execution
                .data_dependent
                .region(buffer, *slab, &self.memory),
            Buffers::Planned { slab, host } => Ok(fed().unwrap_or_else(|| {
                let space = if inner.buffers[buffer].on_host {
                    *host
                } else {
                    *slab
                };
                inner.place_in(space, buffer)
            })),
            Buffers::Pooled(blocks) => fed().map_or_else(|| self.memory.block(blocks, buffer), Ok),
        }
    }
}
