//! Sessions: weights, one slab, and the programs that share both.

mod any;
mod checks;
mod data_dependent;
mod debug;
mod dynamic;
mod execution;
mod finite;
mod link;
mod load;
mod measure;
mod memory;
mod outputs;
mod plateau;
mod prefetch;
mod profile;
mod ranks;
mod shapes;
mod shared;
mod slots;
mod steps;
mod summary;
mod transfers;
mod values;
mod variables;

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use slabwise_kernels::cpu::{Config, Isa, Team};
use slabwise_kernels::dtype::DType;
use slabwise_kernels::memory::Region;
use slabwise_kernels::size::Env;
use smallvec::SmallVec;

use crate::backend::Target;
use crate::buffer::Output;
use crate::compile::CompileOptions;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::feed::{Feed, Source};
use crate::graph::Graph;
use crate::memory::budget::{Allowance, Budget};
use crate::params::Params;
use crate::passes::DumpOptions;
use crate::plan::Plan;
use crate::program::layers::layer_outputs;
use crate::program::{Compiled, Program, Step};
use crate::settings;
use crate::tensor::Tensor;
use crate::trace::Trace;
use crate::words;
use crate::world::World;

pub use crate::backend::Roofline;
pub use any::AnyProgram;
pub use debug::DebugValue;
pub(crate) use execution::Execution;
pub(crate) use memory::Memory;
use memory::to_truth;
pub use profile::{KernelFamily, KernelTime, Loss, Profile};
pub(crate) use steps::{Buffers, Run};
pub use summary::{LayerSummary, Summary};
pub(crate) use variables::{BestEpoch, Variable, Variables, fixed};

/// The memory that a run used, measured from the addresses that its kernels were given.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RunStats {
    /// One past the highest byte of the slab that was passed to a kernel, staged as input or read
    /// as output, without the gaps lent to values of data-dependent size.
    pub peak_slab_bytes: u64,
    /// The most bytes in gaps of the slab that values of data-dependent size took at once.
    pub lent_bytes: u64,
    /// The most bytes of the pool that such values took at once.
    pub pool_bytes: u64,
}

/// Weights, one slab and the programs that share them, on one device.
pub struct Session {
    pub(crate) id: u64,
    pub(crate) device: Device,
    /// The options of programs compiled from now on.
    pub(crate) options: CompileOptions,
    /// Where the program is written after each pass of its compilation.
    pub(crate) dump: Option<DumpOptions>,
    pub(crate) variables: Variables,
    pub(crate) memory: Memory,
    pub(crate) execution: Execution,
    /// The ranks that its programs run on together.
    pub(crate) world: World,
}

static SESSIONS: AtomicU64 = AtomicU64::new(1);

impl Session {
    /// A session with the parameters that models have declared in `params`. Nothing is allocated
    /// before a program is compiled.
    pub fn new(device: Device, params: Params) -> Result<Self> {
        settings::check()?;
        let id = SESSIONS.fetch_add(1, Ordering::Relaxed);
        Ok(Session {
            id,
            device,
            options: CompileOptions::default(),
            dump: DumpOptions::of_environment()?,
            variables: Variables::new(params),
            memory: Memory::open(device, id)?,
            execution: Execution::new()?,
            world: World::alone(),
        })
    }

    /// Sets the maximum number of bytes for weights, state and slab. A program that needs more
    /// recomputes some of its values instead of keeping them, with the same results. If that does
    /// not suffice, compiling it is an error.
    #[must_use]
    pub fn with_budget(mut self, budget: impl Into<Budget>) -> Self {
        self.memory.budget = Allowance::new(budget.into());
        self
    }

    /// Sets the number of threads that kernels use, including the caller's. Results do not depend
    /// on it.
    #[must_use]
    pub fn with_threads(mut self, threads: usize) -> Self {
        self.execution.team = Team::new(threads.clamp(1, 1024));
        self.execution.has_own_threads = true;
        self
    }

    /// Sets the options of programs compiled from now on.
    #[must_use]
    pub fn with_options(mut self, options: CompileOptions) -> Self {
        self.options = options;
        self
    }

    /// Writes each program after each compiler pass into a subfolder of this folder, instead of the
    /// folder that `SLABWISE_DUMP` names.
    #[must_use]
    pub fn with_dump(mut self, folder: impl Into<PathBuf>) -> Self {
        self.dump = Some(DumpOptions::all(folder));
        self
    }

    /// The device.
    pub fn device(&self) -> Device {
        self.device
    }

    /// The number of threads that kernels use.
    pub fn threads(&self) -> usize {
        self.execution.team.threads()
    }

    /// The target that kernels are prepared for.
    pub(crate) fn target(&self) -> Target {
        let used = self.persistent_bytes().saturating_add(self.slab_bytes());
        let room = self
            .memory
            .budget
            .bytes()
            .map(|bytes| bytes.0.saturating_sub(used));
        let config = Config {
            threads: self.execution.team.threads(),
            isa: self.options.isa.unwrap_or_else(Isa::detect),
        };
        self.memory
            .backend
            .target(config, room)
            .with_tf32(self.options.tf32)
    }

    /// Bytes of weights and state, each rounded up to its alignment.
    pub fn persistent_bytes(&self) -> u64 {
        self.variables.bytes()
    }

    /// Bytes of the slab, as the largest program compiled so far needs them.
    pub fn slab_bytes(&self) -> u64 {
        self.memory.slab_bytes()
    }

    /// The memory that the last planned run used; nothing after one that failed.
    pub fn last_run(&self) -> RunStats {
        self.execution.stats
    }

    /// Compiles a trace for these outputs. Programs of one session share weights and slab.
    ///
    /// # Errors
    /// All mistakes of the model together, or the part of it that cannot be planned; and if
    /// weights, state or slab are larger than the host's free memory, including swap and within the
    /// limit of its control group, because Linux would overcommit that memory and end the process
    /// later.
    #[track_caller]
    pub fn compile<const N: usize>(
        &mut self,
        trace: &Trace,
        outputs: [Tensor<'_>; N],
    ) -> Result<Program<N>> {
        self.compile_traced(trace, &outputs)
    }

    /// Compiles a trace for outputs of which the program gives the first `N`.
    #[track_caller]
    fn compile_traced<const N: usize>(
        &mut self,
        trace: &Trace,
        outputs: &[Tensor<'_>],
    ) -> Result<Program<N>> {
        // Outside of the closure, whose line mistakes would name.
        let graph = self.finished(trace, outputs);
        let exchanges = trace.may_exchange(graph.is_err());
        let mut program = self.compile_with_ranks(trace.name(), exchanges, |session| {
            session.compile_outputs(trace.name(), &graph?)
        })?;
        program.debugged = trace.debugged();
        Ok(program)
    }

    /// Plans a trace for these outputs as [`Session::compile`] would, but allocates neither weights
    /// nor slab, so that a program larger than this machine can be planned.
    ///
    /// # Errors
    /// See [`Session::compile`].
    #[track_caller]
    pub fn plan<const N: usize>(&self, trace: &Trace, outputs: [Tensor<'_>; N]) -> Result<Plan> {
        self.plan_any(trace, &outputs)
    }

    /// The graph of a trace, if neither it nor the declarations of parameters have mistakes.
    #[track_caller]
    fn finished(&self, trace: &Trace, outputs: &[Tensor<'_>]) -> Result<Graph> {
        let mut mistakes = self.variables.params.mistakes();
        let finished = trace.finish(outputs);
        if trace
            .params()
            .is_some_and(|p| !p.same(&self.variables.params))
        {
            let read = trace.with_graph(|g| {
                words::list(g.variables.iter().filter(|v| v.is_param).map(|v| &*v.name))
            });
            return Err(Error::Foreign(format!(
                "\"{}\" reads {read}, declared in other Params than this session's; make the session with the Params of the model, of which \
                 clones are as good",
                trace.name()
            )));
        }
        if !trace.is_for(self.world.distribution()) {
            return Err(Error::Value(format!(
                "\"{}\" sums over ranks, and was not traced for the {} of this session's world; call Session::on before tracing, and read a \
                 parameter before a sum over ranks",
                trace.name(),
                words::count(self.world.ranks(), "rank")
            )));
        }
        match finished {
            Ok(graph) if mistakes.is_empty() => {
                if trace.is_training() && !trace.changes_anything() {
                    log::warn!(
                        "\"{}\" is for training but changes no weight and no state: does it lack its minimize?",
                        trace.name()
                    );
                }
                match self.world.distribution().filter(|_| trace.is_training()) {
                    Some(distribution) => trace
                        .with_random_numbers_by_grain(graph, distribution)
                        .map_err(Error::Value),
                    None => Ok(graph),
                }
            }
            Ok(_) => Err(Error::Trace(mistakes)),
            Err(more) => {
                let fresh: Vec<_> = more.into_iter().filter(|m| !mistakes.contains(m)).collect();
                mistakes.extend(fresh);
                Err(Error::Trace(mistakes))
            }
        }
    }

    /// Compiles a graph, which need not come from a [`Trace`]. Programs of one session share
    /// weights and slab.
    ///
    /// # Errors
    /// If the graph does not have `N` outputs, a tensor is larger than any machine's memory, or the
    /// budget does not suffice.
    pub fn compile_graph<const N: usize>(
        &mut self,
        name: &str,
        graph: &Graph,
    ) -> Result<Program<N>> {
        if graph.outputs.len() != N {
            let (has, expected) = (
                words::count(graph.outputs.len(), "output"),
                words::count(N, "output"),
            );
            return Err(Error::Value(format!(
                "\"{name}\" has {has}, {expected} are expected"
            )));
        }
        self.compile_with_ranks(name, graph.has_collectives(), |session| {
            session.compile_outputs(name, graph)
        })
    }

    /// Compiles a graph whose first `N` outputs are those of its user.
    fn compile_outputs<const N: usize>(&mut self, name: &str, graph: &Graph) -> Result<Program<N>> {
        let shared = self.variables.sharing(name, graph)?;
        let mut program = self.compile_for_shapes(name, graph)?;
        program.layers = layer_outputs(graph);
        self.variables.shared = shared;
        Ok(program)
    }

    /// The indices of a graph's variables in this session; new ones are allocated and initialised.
    pub(crate) fn adopt(&mut self, graph: &Graph) -> Result<Vec<usize>> {
        let team = &self.execution.team;
        self.variables.adopt(graph, &mut self.memory, team)
    }

    /// Runs a program on these inputs, inside the slab. The outputs can be read until the next run.
    ///
    /// An error changes nothing, because inputs are checked before the first kernel runs, and
    /// checks of their values (labels within range) run before any weight is written.
    pub fn run<const N: usize>(
        &mut self,
        program: &Program<N>,
        feed: impl Feed,
    ) -> Result<[Output<'_>; N]> {
        let (inner, env, slab) = self.run_planned(program, &feed)?;
        self.outputs((&inner, &program.debugged), &feed, &env, slab)
    }

    /// Runs a program inside the slab: the plan that was run, the sizes of the run, and the slab,
    /// in which its outputs lie.
    fn run_planned<const N: usize>(
        &mut self,
        program: &Program<N>,
        feed: &impl Feed,
    ) -> Result<(Arc<Compiled>, Env, Region)> {
        let inner = self.planned_for(program, feed)?;
        let (env, slab) = self.with_ranks(&inner, |session| {
            let mut env = session.begin(&inner, feed)?;
            session.memory.ensure_planned(&inner, &session.world)?;
            let slab = session.memory.slab()?;
            let regions = session.stage(&inner, feed, &env, &mut |buffer| {
                inner.place_in(slab, buffer)
            })?;
            session.run_fed(&inner, &mut env, &regions)?;
            Ok((env, slab))
        })?;
        Ok((inner, env, slab))
    }

    pub(crate) fn owns(&self, inner: &Compiled) -> Result<()> {
        if inner.session == self.id {
            return Ok(());
        }
        Err(Error::Foreign(format!(
            "program \"{}\" was compiled by another session",
            inner.name
        )))
    }

    /// Whether a program can run here now.
    fn ready(&self, inner: &Compiled) -> Result<()> {
        self.owns(inner)?;
        let (threads, room) = (
            self.execution.team.threads(),
            inner.steps.iter().filter_map(Step::threads).min(),
        );
        if let Some(room) = room.filter(|&room| room < threads) {
            let message = format!(
                "\"{}\" was compiled for {} and the session now has {threads}; set the threads before compiling",
                inner.name,
                words::count(room, "thread")
            );
            return Err(Error::Value(message));
        }
        Ok(())
    }

    /// Checks the inputs of a run and publishes its sizes.
    pub(crate) fn begin(&mut self, inner: &Compiled, feed: &dyn Feed) -> Result<Env> {
        self.ready(inner)?;
        let mut result = Ok(());
        let mut fed: SmallVec<[(usize, bool); 8]> = SmallVec::new();
        feed.each(&mut |at, source| {
            let (buffer, given) = match &source {
                Source::Resident(buffer) => (*buffer, false),
                Source::Donated(donated) => (&donated.0, true),
                Source::Host { .. } => return,
            };
            if result.is_ok() {
                result = self.memory.buffers.region(buffer).map(|_| ());
            }
            if result.is_ok()
                && let Some(input) = inner.inputs.get(at)
            {
                let name = || input.name.to_string();
                let fail = |message: String| Err(Error::Input { name: name(), message });
                if fed.iter().any(|&(slot, gone)| slot == buffer.slot && (gone || given)) {
                    result = fail(format!("the buffer \"{}\" is donated, and fed to another input too; upload a copy of it", buffer.name));
                } else if given && input.donated_to.is_none() {
                    result = fail(format!(
                        "the buffer \"{}\" is donated to it, but no output of \"{}\" takes its bytes; say Trace::donate of the input \
                         before compiling, or feed the buffer without donating it",
                        buffer.name, inner.name
                    ));
                }
            }
            fed.push((buffer.slot, given));
        });
        result?;
        let env = inner.sizes(feed)?;
        self.memory.backend.begin_inputs()?;
        self.memory.backend.publish(&self.memory.sizes, &env)?;
        Ok(env)
    }

    /// Copies inputs of the host, and bytes that are read as truth values, to the regions that `place`
    /// returns; the regions of those that are read where they are on the device.
    pub(crate) fn stage(
        &mut self,
        inner: &Compiled,
        feed: &dyn Feed,
        env: &Env,
        place: &mut dyn FnMut(usize) -> Region,
    ) -> Result<SmallVec<[Option<Region>; 8]>> {
        let mut regions: SmallVec<[Option<Region>; 8]> = SmallVec::new();
        let mut result = Ok(());
        feed.each(&mut |at, source| {
            let Some(buffer) = inner.inputs[at].buffer else {
                regions.push(None);
                return;
            };
            regions.push(match source {
                Source::Host {
                    dtype,
                    elements,
                    copy,
                    ..
                } => {
                    let region = place(buffer).part(0, (elements * dtype.bytes()) as u64);
                    let is_bool = inner.inputs[at].dtype == DType::Bool;
                    let mut faulty = Ok(());
                    let staged = self.memory.backend.upload(&region, &mut |bytes| {
                        copy(bytes);
                        if is_bool {
                            to_truth(bytes);
                        }
                        if let Some(loaded) = &inner.loaded {
                            faulty = loaded.check_input(at, dtype, bytes, env);
                        }
                    });
                    let staged = staged.and(std::mem::replace(&mut faulty, Ok(())));
                    if let (Err(e), true) = (staged, result.is_ok()) {
                        result = Err(e);
                    }
                    None
                }
                Source::Resident(b) | Source::Donated(crate::buffer::Donated(b)) => {
                    let read = self.memory.buffers.region(b).and_then(|region| {
                        if b.dtype == inner.inputs[at].dtype {
                            return Ok(Some(region));
                        }
                        let to = place(buffer).part(0, region.bytes);
                        self.memory.copy_truth(&region, &to).map(|()| None)
                    });
                    read.unwrap_or_else(|e| {
                        result = Err(e);
                        None
                    })
                }
            });
        });
        result
            .and_then(|()| self.memory.backend.end_inputs())
            .map(|()| regions)
    }

    /// Names of all weights and state, in the order they were declared.
    pub fn names(&self) -> impl Iterator<Item = &str> + Clone {
        self.variables.names()
    }
}
