//! Sessions: weights, one slab, and the programs that share them.

mod copies;
mod link;
mod load;
mod measure;
mod outputs;
mod prefetch;
mod room;
mod shared;
mod slots;
mod steps;
mod values;

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use slabwise_kernels::copies::Ticket;
use slabwise_kernels::cpu::{Config, Isa, Team};
use slabwise_kernels::dtype::DType;
use slabwise_kernels::memory::Region;
use slabwise_kernels::size::{Env, MAX_SYMBOLS, Size};
use slabwise_planner::{ALIGN, Bytes};
use smallvec::SmallVec;

use crate::backend::{self, Backend, Target};
use crate::buffer::{Buffer, Output};
use crate::compile::{CompileOptions, variable_bytes};
use crate::device::Device;
use crate::error::{Error, Result};
use crate::feed::{Feed, Source};
use crate::found::DataDependent;
use crate::graph::{Graph, VariableInfo};
use crate::memory::budget::{Allowance, Budget};
use crate::memory::offload::Offload;
use crate::memory::{Handle, MemoryConfig, Pool};
use crate::params::Params;
use crate::passes::DumpOptions;
use crate::plan::Plan;
use crate::program::{Compiled, Program, Step, lengths};
use crate::settings;
use crate::shapes::first_lengths;
use crate::tensor::Tensor;
use crate::trace::Trace;
use crate::words;

pub use crate::backend::Roofline;
pub use measure::KernelTime;
pub(crate) use steps::{Buffers, Run};

/// A weight or state variable of a session.
pub(crate) struct Variable {
    pub info: VariableInfo,
    pub region: Region,
}

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

/// The place of a buffer of the user.
struct Slot {
    region: Region,
    /// The number of buffers that had the slot before, or of donations of this one. It tells
    /// handles apart.
    generation: u64,
    /// The first generation of the buffer that has the slot now, or of the next. Earlier ones
    /// belong to freed buffers.
    born: u64,
}

/// Weights, one slab and the programs that share them, on one device.
pub struct Session {
    pub(crate) id: u64,
    pub(crate) device: Device,
    pub(crate) params: Params,
    pub(crate) memory: Box<dyn Backend>,
    pub(crate) team: Team,
    pub(crate) variables: Vec<Variable>,
    pub(crate) options: CompileOptions,
    pub(crate) pool: Pool,
    pub(crate) dynamic: Vec<Option<Handle>>,
    pub(crate) data_dependent: DataDependent,
    by_name: HashMap<Arc<str>, usize>,
    counters: Vec<shared::SharedCounter>,
    slab: Option<Region>,
    /// The memory of the host for values that programs offload.
    host: Option<Region>,
    /// The copies that a run has started.
    tickets: Vec<Option<Ticket>>,
    sizes: Region,
    pub(crate) budget: Allowance,
    pub(crate) offload: Option<Offload>,
    /// Where the program is written after each pass of its compilation.
    pub(crate) dump: Option<DumpOptions>,
    input_slots: usize,
    /// The prefetch queues of programs.
    queues: Vec<prefetch::Queue>,
    slots: Vec<Slot>,
    /// The slots that no buffer has.
    free_slots: Vec<usize>,
    stats: RunStats,
    profile: Option<Vec<f64>>,
    recording: Option<measure::Recording>,
}

static SESSIONS: AtomicU64 = AtomicU64::new(1);

/// The default number of threads of a session: `SLABWISE_THREADS`, or one for each core.
fn default_threads() -> Result<usize> {
    Ok(settings::threads()?
        .unwrap_or_else(|| std::thread::available_parallelism().map_or(1, usize::from)))
}

impl Session {
    /// A session with the parameters that models have declared in `params`. Nothing is allocated
    /// before a program is compiled.
    pub fn new(device: Device, params: Params) -> Result<Self> {
        settings::check()?;
        let memory = backend::open(device)?;
        Ok(Session {
            id: SESSIONS.fetch_add(1, Ordering::Relaxed),
            device,
            params,
            memory,
            team: Team::new(default_threads()?),
            variables: Vec::new(),
            options: CompileOptions::default(),
            pool: crate::dynamic::open_pool(&MemoryConfig::default())?,
            dynamic: Vec::new(),
            data_dependent: DataDependent::default(),
            by_name: HashMap::new(),
            counters: Vec::new(),
            slab: None,
            host: None,
            tickets: Vec::new(),
            sizes: Region::default(),
            budget: Allowance::default(),
            offload: None,
            dump: DumpOptions::of_environment()?,
            input_slots: 1,
            queues: Vec::new(),
            slots: Vec::new(),
            free_slots: Vec::new(),
            stats: RunStats::default(),
            profile: None,
            recording: None,
        })
    }

    /// Sets the most memory that weights, state and slab may take. A program that needs more
    /// recomputes some of its values instead of keeping them, with the same results. If that does
    /// not suffice, compiling it is an error.
    #[must_use]
    pub fn with_budget(mut self, budget: impl Into<Budget>) -> Self {
        self.budget = Allowance::new(budget.into());
        self
    }

    /// Sets the number of threads that kernels use, including the caller's. Results do not depend
    /// on it.
    #[must_use]
    pub fn with_threads(mut self, threads: usize) -> Self {
        self.team = Team::new(threads.clamp(1, 1024));
        self
    }

    /// Sets the options of programs compiled from now on.
    #[must_use]
    pub fn with_options(mut self, options: CompileOptions) -> Self {
        self.options = options;
        self
    }

    /// Writes the program after each pass of its compilation into a folder of its own inside of
    /// this one, instead of where `SLABWISE_DUMP` says.
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
        self.team.threads()
    }

    /// The target that kernels are prepared for.
    pub(crate) fn target(&self) -> Target {
        let used = self.persistent_bytes().saturating_add(self.slab_bytes());
        let room = self
            .budget
            .bytes()
            .map(|bytes| bytes.0.saturating_sub(used));
        let config = Config {
            threads: self.team.threads(),
            isa: self.options.isa.unwrap_or_else(Isa::detect),
        };
        self.memory
            .target(config, room)
            .with_tf32(self.options.tf32)
    }

    /// Bytes of weights and state, each rounded up to its alignment.
    pub fn persistent_bytes(&self) -> u64 {
        self.variables
            .iter()
            .map(|v| v.region.bytes.next_multiple_of(ALIGN))
            .sum()
    }

    /// Bytes of the slab, as the largest program compiled so far needs them.
    pub fn slab_bytes(&self) -> u64 {
        self.slab.map_or(0, |s| s.bytes)
    }

    /// The memory that the last run used, measured.
    pub fn last_run(&self) -> RunStats {
        self.stats
    }

    /// Compiles a trace for these outputs. Programs of one session share weights and slab.
    ///
    /// # Errors
    /// All mistakes of the model together, or the part of it that cannot be planned; and if
    /// weights, state or slab are larger than the memory that the host has free now, swap and the
    /// limit of its control group counted. Linux would promise that memory, and end the process
    /// later.
    #[track_caller]
    pub fn compile<const N: usize>(
        &mut self,
        trace: &Trace,
        outputs: [Tensor<'_>; N],
    ) -> Result<Program<N>> {
        let graph = self.finished(trace, &outputs)?;
        self.compile_graph(trace.name(), &graph)
    }

    /// Plans a trace for these outputs as [`Session::compile`] would, but allocates neither weights
    /// nor slab, so that a program larger than this machine can be planned.
    ///
    /// # Errors
    /// As [`Session::compile`].
    #[track_caller]
    pub fn plan<const N: usize>(&self, trace: &Trace, outputs: [Tensor<'_>; N]) -> Result<Plan> {
        let started = Instant::now();
        let graph = self.finished(trace, &outputs)?;
        let graph = first_lengths(graph, &self.options.shapes);
        Ok(self.planned(trace.name(), &graph, started)?.plan)
    }

    /// The graph of a trace, if neither it nor the declarations of parameters have mistakes.
    #[track_caller]
    fn finished(&self, trace: &Trace, outputs: &[Tensor<'_>]) -> Result<Graph> {
        let mut mistakes = self.params.mistakes();
        let finished = trace.finish(outputs);
        if trace.params().is_some_and(|p| !p.same(&self.params)) {
            let read = trace.with_graph(|g| {
                words::list(g.variables.iter().filter(|v| v.is_param).map(|v| &*v.name))
            });
            return Err(Error::Foreign(format!(
                "\"{}\" reads {read}, declared in other Params than this session's; make the session with the Params of the model, of which \
                 clones are as good",
                trace.name()
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
                Ok(graph)
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
    /// If the graph does not have `N` outputs, a tensor is beyond any machine's memory, or the
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
        let counters = self.new_counters(name, graph)?;
        let program = self.compile_for_shapes(name, graph)?;
        self.keep_counters(counters);
        self.grow_slab(&program.inner)?;
        Ok(program)
    }

    /// Reserves the memory for the sizes of a run.
    pub(crate) fn reserve_sizes(&mut self) -> Result<()> {
        if self.sizes.bytes == 0 {
            self.sizes = self
                .memory
                .reserve(4 * MAX_SYMBOLS as u64, "the sizes of runs")?;
        }
        Ok(())
    }

    pub(crate) fn grow_slab(&mut self, inner: &Compiled) -> Result<()> {
        let bytes = inner.slab_bytes;
        if self.slab.is_some_and(|s| s.bytes >= bytes) {
            return Ok(());
        }
        if let Some(old) = self.slab.take() {
            self.memory.release(old.arena);
        }
        let slab = self.reserve(bytes, &format!("the slab of \"{}\"", inner.name));
        self.slab = Some(slab.map_err(|e| inner.plan.with_holders(e))?);
        Ok(())
    }

    /// The variables of a graph that this session does not have yet, and the bytes of each.
    fn fresh(&self, graph: &Graph) -> Result<Vec<(VariableInfo, u64)>> {
        let declared = self
            .params
            .declared()
            .into_iter()
            .map(|p| VariableInfo::of(&p));
        let all: Vec<VariableInfo> = declared.chain(graph.variables.iter().cloned()).collect();
        let mut fresh: Vec<VariableInfo> = Vec::new();
        for info in all {
            let known = self
                .by_name
                .get(&info.name)
                .map(|&at| &self.variables[at].info)
                .or_else(|| fresh.iter().find(|f| f.name == info.name));
            match known {
                Some(known) if (known.dtype, &known.dims) == (info.dtype, &info.dims) => {}
                Some(known) => {
                    let (a, b) = (
                        graph.symbols.show(&known.dims),
                        graph.symbols.show(&info.dims),
                    );
                    return Err(Error::Value(format!(
                        "\"{}\" is {} {a} in this session and {} {b} in this program; give one of them another name",
                        info.name, known.dtype, info.dtype
                    )));
                }
                None => fresh.push(info),
            }
        }
        let sized = fresh
            .into_iter()
            .map(|info| variable_bytes(graph, &info).map(|bytes| (info, bytes)));
        sized.collect()
    }

    /// Bytes of weights and state once a program of this graph is added, each rounded up to its
    /// alignment.
    pub(crate) fn persistent_bytes_with(&self, graph: &Graph) -> Result<u64> {
        Ok(self
            .persistent_bytes()
            .saturating_add(self.room_for(&self.fresh(graph)?)?))
    }

    /// The indices of a graph's variables in this session; new ones are allocated and initialised.
    pub(crate) fn adopt(&mut self, graph: &Graph) -> Result<Vec<usize>> {
        let sized = self.fresh(graph)?;
        let total = self.room_for(&sized)?;
        if !sized.is_empty() {
            let arena = self.reserve(total, "weights and state")?;
            let (first, mut at) = (self.variables.len(), 0);
            for (info, bytes) in sized {
                let region = arena.part(at, bytes);
                at += bytes.next_multiple_of(ALIGN);
                let seed = self.params.seed();
                self.memory.map_write(&region, &mut |memory, region| {
                    crate::init::fill(&info, seed, memory, region)
                })?;
                self.by_name.insert(info.name.clone(), self.variables.len());
                self.variables.push(Variable { info, region });
            }
            self.restart_averages(first)?;
        }
        Ok(graph
            .variables
            .iter()
            .map(|v| self.by_name[&v.name])
            .collect())
    }

    /// The bytes of new variables, each rounded up to its alignment, if they are within the budget.
    fn room_for(&self, fresh: &[(VariableInfo, u64)]) -> Result<u64> {
        let total = fresh.iter().try_fold(0u64, |n, (_, b)| {
            n.checked_add(b.checked_next_multiple_of(ALIGN)?)
        });
        let total = total.ok_or_else(|| {
            Error::Value("the byte count of all weights and state overflows".into())
        })?;
        let needed = Bytes(self.persistent_bytes().saturating_add(total));
        if let Some(budget) = self.budget.bytes()
            && needed > budget
        {
            return Err(Error::Budget {
                program: "weights and state".into(),
                budget,
                needed,
                persistent: needed,
                slab: Bytes(0),
                floor: needed,
                holders: "weights and state alone".into(),
            });
        }
        Ok(total)
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
        let inner = &*self.planned_for(program, &feed)?;
        let mut env = self.begin(inner, &feed)?;
        let slab = self.slab()?;
        let regions = self.stage(inner, &feed, &env, &mut |buffer| {
            inner.place_in(slab, buffer)
        })?;
        self.run_fed(inner, &mut env, &regions)?;
        self.outputs(inner, &feed, &env, slab)
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
            self.team.threads(),
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
                result = self.resident(buffer).map(|_| ());
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
        self.memory.begin_inputs()?;
        self.memory.publish(&self.sizes, &env)?;
        Ok(env)
    }

    /// Copies inputs of the host to the regions that `place` returns; the regions of those that are
    /// on the device.
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
                    let staged = self.memory.upload(&region, &mut |bytes| {
                        copy(bytes);
                        if is_bool {
                            bytes
                                .iter_mut()
                                .for_each(|byte| *byte = u8::from(*byte != 0));
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
                    match self.resident(b) {
                        Ok(region) => Some(region),
                        Err(e) => {
                            result = Err(e);
                            None
                        }
                    }
                }
            });
        });
        result
            .and_then(|()| self.memory.end_inputs())
            .map(|()| regions)
    }

    fn resident(&self, buffer: &Buffer) -> Result<Region> {
        if buffer.session != self.id {
            return Err(Error::Foreign(format!(
                "buffer \"{}\" belongs to another session; upload its values to this one",
                buffer.name
            )));
        }
        let name = || buffer.name.to_string();
        match self.slots.get(buffer.slot) {
            Some(slot) if slot.generation == buffer.generation => Ok(slot.region),
            Some(slot) if buffer.generation < slot.born => Err(Error::Freed { name: name() }),
            _ => Err(Error::Donated { name: name() }),
        }
    }

    /// Makes donated inputs the outputs that they were declared for: the same bytes, under a new
    /// generation of the handle.
    pub(crate) fn give_donated<const N: usize>(
        &mut self,
        inner: &Compiled,
        feed: &dyn Feed,
        env: &Env,
        place: &mut dyn FnMut(usize) -> Region,
    ) -> Result<[Option<Buffer>; N]> {
        let mut given: [Option<Buffer>; N] = std::array::from_fn(|_| None);
        let mut donated: SmallVec<[(usize, Buffer); 2]> = SmallVec::new();
        feed.each(&mut |at, source| {
            if let Source::Donated(d) = source {
                donated.push((at, d.0.clone()));
            }
        });
        for (at, buffer) in donated {
            // A buffer whose bytes no output can take was refused before the run.
            let Some(to) = inner.inputs[at]
                .donated_to
                .map(|t| t as usize)
                .filter(|&t| t < N)
            else {
                continue;
            };
            let slot = &mut self.slots[buffer.slot];
            slot.generation += 1;
            let (region, generation) = (slot.region, slot.generation);
            let output = &inner.buffers[inner.outputs[to]];
            let lengths = lengths(&output.dims, env);
            let bytes = (lengths.iter().product::<usize>() * output.dtype.bytes()) as u64;
            if bytes > region.bytes {
                return Err(Error::Input {
                    name: inner.inputs[at].name.to_string(),
                    message: format!(
                        "the donated buffer has {} bytes, its output needs {bytes}",
                        region.bytes
                    ),
                });
            }
            let from = place(inner.outputs[to]).part(0, bytes);
            self.memory.copy(&from, &region.part(0, bytes))?;
            given[to] = Some(Buffer {
                generation,
                lengths,
                dtype: output.dtype,
                ..buffer
            });
        }
        Ok(given)
    }

    /// Names of all weights and state, in the order they were declared.
    pub fn names(&self) -> impl Iterator<Item = &str> + Clone {
        self.variables
            .iter()
            .filter(|v| !v.info.is_constant())
            .map(|v| &*v.info.name)
    }

    fn find(&self, name: &str) -> Result<&Variable> {
        self.by_name.get(name).map(|&at| &self.variables[at]).ok_or_else(|| {
            if self.params.declared().iter().any(|declared| declared.name() == name) {
                return Error::Value(format!(
                    "\"{name}\" is declared but has no value yet: compile a program first, or load a file with Session::load"
                ));
            }
            if self.names().next().is_none() {
                return Error::Value(format!(
                    "there is no weight or state \"{name}\": the session has none before a program is compiled or a file is loaded"
                ));
            }
            let instead = words::instead(name, "weights and states", self.names());
            Error::Value(format!("there is no weight or state \"{name}\"{instead}"))
        })
    }

    pub(crate) fn sizes(&self) -> Region {
        self.sizes
    }
}

/// The lengths of a variable, all of which are fixed.
pub(crate) fn fixed(dims: &[Size]) -> Vec<u64> {
    dims.iter()
        .map(|d| {
            d.as_fixed()
                .and_then(|n| u64::try_from(n).ok())
                .unwrap_or(0)
        })
        .collect()
}
