//! Programs on a device: their kernels are compiled and loaded, then launched one by one or
//! captured as graphs and replayed.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use slabwise_kernels::memory::Region;
use slabwise_kernels::size::Env;

use crate::abi::{self, WORDS_MAX, Word};
use crate::cache::{self, Cache};
use crate::compiler::Compiler;
use crate::device::{Device, Shared};
use crate::driver::{DriverError, Edges, Function, Graph, Module, Node, Recording, Stream};
use crate::lowered::{Lowered, WORKSPACE_ALIGN};
use crate::nvrtc::{self, Cubin, Usage};
use crate::source::PRELUDE;

/// The maximum number of graphs that a program keeps: one for each set of sizes and resident inputs
/// of its recent runs. It also remembers as many keys of runs that occurred once.
const GRAPHS_MAX: usize = 8;

/// Bytes of a counter.
const COUNTER_BYTES: u64 = size_of::<u32>() as u64;
/// The alignment of a step's counters: a sector of the L2 cache, bytes.
const COUNTERS_ALIGN: u64 = 32;

/// The calls that fail if the driver refuses the edges of a graph.
const EDGE_CALLS: [&str; 7] = [
    "cuStreamGetCaptureInfo",
    "cuGraphNodeGetType",
    "cuStreamUpdateCaptureDependencies",
    "cuLaunchKernel",
    "cuStreamEndCapture",
    "cuGraphInstantiate",
    "cuGraphUpload",
];

/// The statuses by which they refuse edges: an invalid value, and no support.
const EDGES_REFUSED: [i32; 2] = [1, 801];

/// The status of calls during a capture that was invalidated.
const CAPTURE_INVALIDATED: i32 = 901;

/// Why a program cannot be loaded.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// A kernel cannot be compiled.
    #[error(transparent)]
    Compile(#[from] nvrtc::Error),
    /// The cache folder is not safe to use.
    #[error(transparent)]
    Cache(cache::Error),
    /// The driver refuses the code.
    #[error(transparent)]
    Driver(#[from] DriverError),
    /// Its kernels cannot be emulated.
    #[cfg(feature = "emulator")]
    #[error(transparent)]
    Emulator(#[from] crate::emulator::EmulatorError),
}

/// The kernels of a program, loaded on a device.
#[derive(Debug)]
pub struct Program {
    graphs: Mutex<Vec<Recorded>>,
    /// The keys of recent runs that occurred once, the latest last.
    once: Mutex<Vec<Box<[u64]>>>,
    /// The keys of recent runs for whose graphs there was no memory, the latest last.
    without_graph: Mutex<Vec<Box<[u64]>>>,
    /// By step, then by function of the step.
    functions: Vec<Vec<Function>>,
    usage: HashMap<String, Usage>,
    counters: Counters,
    _modules: Vec<Module>,
    /// The stream that runs the program.
    stream: Arc<Stream>,
    /// Dropped after the modules, which need the context.
    shared: Arc<Shared>,
}

/// The counters of a program's steps, see [`Word::Counters`].
#[derive(Debug)]
struct Counters {
    /// The address of all of them; 0 if there are none.
    base: u64,
    /// By step: the offset of its counters, bytes.
    offsets: Vec<u64>,
}

impl Counters {
    /// The offset of each step's counters, and the bytes of all.
    fn layout(steps: &[&Lowered]) -> (Vec<u64>, u64) {
        let mut end = 0;
        let offsets = steps.iter().map(|step| {
            let at = end;
            end += (COUNTER_BYTES * step.counters as u64).next_multiple_of(COUNTERS_ALIGN);
            at
        });
        (offsets.collect(), end)
    }

    /// The address of a step's counter of this number.
    fn of_step(&self, step: usize, first: usize) -> u64 {
        self.base + self.offsets[step] + COUNTER_BYTES * first as u64
    }
}

#[derive(Debug)]
struct Recorded {
    key: Box<[u64]>,
    graph: Graph,
}

/// One kernel of a run.
#[derive(Clone, Copy, Debug)]
pub struct Launch<'a> {
    /// The step of the program.
    pub step: usize,
    /// The kernel that the program was loaded with for this step.
    pub kernel: &'a Lowered,
    /// One region per argument.
    pub arguments: &'a [Region],
    /// At least [`workspace_bytes`] of the kernel.
    pub workspace: Region,
}

/// An operation of a captured run.
#[derive(Clone, Copy, Debug)]
pub enum Work<'a> {
    /// Runs a kernel.
    Launch(Launch<'a>),
    /// Starts a copy, see [`Device::start_copy`].
    Start {
        /// The number of the copy.
        copy: usize,
        /// The source.
        from: Region,
        /// The destination.
        to: Region,
    },
    /// Waits for the copy of this number.
    Finish(usize),
}

/// A run to capture.
#[derive(Clone, Copy, Debug)]
pub struct Run<'a> {
    /// The sizes of the run and the addresses of all its regions: runs with equal keys share a
    /// graph.
    pub key: &'a [u64],
    /// Its sizes.
    pub env: &'a Env,
    /// Whether a kernel checks indices.
    pub checked: bool,
    /// For each operation the earlier operations that it depends on; it may overlap all others.
    /// `None` if each depends on the one before it, which drivers older than CUDA 12.3 always
    /// assume.
    pub after: Option<&'a [Vec<u32>]>,
    /// Whether a kernel is launched before the kernels that it depends on have ended, and then
    /// waits for them itself.
    pub early: bool,
}

/// Which operations of a graph may overlap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Overlap {
    /// Kernels without conflicting accesses may run concurrently.
    pub branches: bool,
    /// A kernel may be launched before the kernels that it depends on have ended.
    pub launches: bool,
}

/// The edges of a captured graph, from the most overlap to none.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum GraphEdges {
    /// The dependencies of the run, and launches before they have ended.
    Early,
    /// The dependencies of the run.
    Dependencies,
    /// Each operation depends on the one before it.
    Chain,
}

impl GraphEdges {
    /// The run with these edges, or fewer if it has fewer.
    fn of<'a>(self, run: &Run<'a>) -> Run<'a> {
        Run {
            after: run.after.filter(|_| self < GraphEdges::Chain),
            early: run.early && self == GraphEdges::Early,
            ..*run
        }
    }

    /// The edges to try if a driver refuses these in a run; `None` if there are no fewer.
    fn fewer(self, run: &Run<'_>) -> Option<(GraphEdges, &'static str)> {
        let own = self.of(run);
        match (own.early, own.after) {
            (true, Some(_)) => Some((
                GraphEdges::Dependencies,
                "kernels of a graph are launched when others have ended",
            )),
            (true, None) | (false, Some(_)) => Some((
                GraphEdges::Chain,
                "kernels of a graph run one after the other",
            )),
            (false, None) => None,
        }
    }
}

/// The planned workspace of a kernel, bytes: its need, and padding for alignment.
pub fn workspace_bytes(kernel: &Lowered) -> u64 {
    if kernel.workspace == 0 {
        0
    } else {
        kernel.workspace + WORKSPACE_ALIGN
    }
}

impl Program {
    /// The resources that a function of the program uses.
    pub fn usage(&self, function: &str) -> Option<&Usage> {
        self.usage.get(function)
    }

    /// The number of captured graphs.
    pub fn graphs(&self) -> usize {
        lock(&self.graphs).len()
    }

    /// Whether a run with this key is worth capturing: it is the program's first, or the key
    /// occurred recently. Records the key.
    ///
    /// Capturing a run costs as much as several runs without a graph, which is never amortized if
    /// every run has new sizes. Runs for whose graphs there was no memory are not worth it.
    pub fn is_worth_recording(&self, key: &[u64]) -> bool {
        let without_graph = lock(&self.without_graph);
        if without_graph.iter().any(|known| **known == *key) {
            return false;
        }
        drop(without_graph);
        let mut once = lock(&self.once);
        if let Some(at) = once.iter().position(|known| **known == *key) {
            once.remove(at);
            return true;
        }
        if once.is_empty() && self.graphs() == 0 {
            return true;
        }
        push_latest(&mut once, key.into());
        false
    }

    /// Destroys the graphs that were used least recently, half of all.
    fn destroy_older_graphs(&self) {
        let mut graphs = lock(&self.graphs);
        let older = graphs.len().div_ceil(2);
        graphs.drain(..older);
    }
}

/// Appends to a list of the latest, which has at most as many elements as a program has graphs.
fn push_latest<T>(list: &mut Vec<T>, latest: T) {
    if list.len() == GRAPHS_MAX {
        list.remove(0);
    }
    list.push(latest);
}

fn lock<T>(list: &Mutex<T>) -> MutexGuard<'_, T> {
    list.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Drop for Program {
    fn drop(&mut self) {
        // Any thread may drop the program while it is running, so its code must stay until its runs
        // are done. If the device is lost, none of its memory is in use.
        let _ = self
            .shared
            .context
            .bind()
            .and_then(|()| self.stream.quiesce());
        if let Some(reservation) = &mut *self.shared.reservation() {
            reservation.free(&self.shared.context, self.counters.base);
        }
    }
}

impl Device {
    /// Compiles and loads the kernels of a program, one for each step.
    ///
    /// # Errors
    /// If one cannot be compiled or loaded.
    pub fn load(&self, steps: &[&Lowered]) -> Result<Program, LoadError> {
        self.ready()?;
        for work in steps.iter().filter_map(|step| step.by_library.as_ref()) {
            work.open(&self.shared.libraries)
                .map_err(DriverError::from)?;
        }
        let mut distinct: Vec<abi::Function> = Vec::new();
        let mut known: HashMap<&str, usize> = HashMap::new();
        for function in steps.iter().flat_map(|step| &step.functions) {
            known.entry(&function.name).or_insert_with(|| {
                distinct.push(function.clone());
                distinct.len() - 1
            });
        }
        let (mut modules, mut usage, mut loaded) = (Vec::new(), HashMap::new(), HashMap::new());
        // Functions with tiles in shared memory take the longest to compile, so they come first:
        // otherwise one of them could be the last job.
        distinct.sort_by_key(|function| !function.takes_shared());
        let code = if distinct.is_empty() {
            Vec::new()
        } else {
            self.compile(&distinct)?
        };
        #[cfg(feature = "emulator")]
        crate::emulator::publish(&distinct)?;
        for (function, cubin) in distinct.iter().zip(code) {
            let module = self.noting(Module::load(&cubin.image))?;
            let found =
                module
                    .function(&function.name)
                    .and_then(|found| match function.takes_shared() {
                        true => found.allow_shared(self.properties().target.shared_bytes_max),
                        false => Ok(found),
                    });
            loaded.insert(function.name.as_str(), self.noting(found)?);
            modules.push(module);
            usage.extend(cubin.usage.iter().map(|u| (u.name.clone(), u.clone())));
        }
        let functions = steps
            .iter()
            .map(|step| {
                step.functions
                    .iter()
                    .map(|f| loaded[f.name.as_str()])
                    .collect()
            })
            .collect();
        let counters = self.noting(self.counters(steps))?;
        let (stream, shared) = (self.stream.clone(), self.shared.clone());
        Ok(Program {
            graphs: Mutex::default(),
            once: Mutex::default(),
            without_graph: Mutex::default(),
            functions,
            usage,
            counters,
            _modules: modules,
            stream,
            shared,
        })
    }

    /// The counters of the steps, all zero.
    fn counters(&self, steps: &[&Lowered]) -> Result<Counters, DriverError> {
        let (offsets, bytes) = Counters::layout(steps);
        let base = self.allocate(bytes)?;
        if base != 0 {
            // SAFETY: it is memory of the device of this many bytes.
            let cleared = unsafe { self.stream.fill(base, 0, bytes as usize) };
            if let (Err(e), Some(reservation)) = (cleared, &mut *self.shared.reservation()) {
                reservation.free(&self.shared.context, base);
                return Err(e);
            }
        }
        Ok(Counters { base, offsets })
    }

    /// Compiles functions separately.
    fn compile(&self, functions: &[abi::Function]) -> Result<Vec<Arc<Cubin>>, LoadError> {
        let cache = match Cache::of_user() {
            Ok(cache) => Some(cache),
            Err(e @ cache::Error::NotPrivate { .. }) => return Err(LoadError::Cache(e)),
            Err(e) => {
                log::warn!("{e}; every process compiles its kernels again");
                None
            }
        };
        let programs = nvrtc::Program::each(PRELUDE, functions, self.properties().target.sm);
        Ok(Compiler::of_process().compile(cache.as_ref(), &programs)?)
    }

    /// Checks that the libraries accept the products of these kernels for the sizes of a run.
    /// Called for a run that is not captured, so that a refusal stops it before any operation is
    /// submitted.
    ///
    /// # Errors
    /// If a library refuses a product.
    pub fn foresee<'a>(
        &self,
        mut kernels: impl Iterator<Item = &'a Lowered>,
        env: &Env,
    ) -> Result<(), DriverError> {
        self.ready()?;
        kernels.try_for_each(|kernel| match kernel.by_library.as_ref() {
            Some(work) => Ok(work.check(env, &self.shared.libraries)?),
            None => Ok(()),
        })
    }

    /// Launches one kernel of a program.
    pub fn launch(
        &mut self,
        program: &Program,
        env: &Env,
        launch: &Launch<'_>,
    ) -> Result<(), DriverError> {
        self.ready()?;
        let fault = self.fault_record()?;
        let submitted = self.submit(program, fault, env, launch, None);
        self.noting(submitted)
    }

    /// Replays the graph of this key: the sizes of a run and the addresses of all its regions.
    /// `false` if there is no such graph.
    pub fn replay(&mut self, program: &Program, key: &[u64]) -> Result<bool, DriverError> {
        self.ready()?;
        let mut graphs = lock(&program.graphs);
        let Some(at) = graphs.iter().position(|g| *g.key == *key) else {
            return Ok(false);
        };
        // The list is in the order of last use.
        graphs[at..].rotate_left(1);
        let replayed = graphs
            .last()
            .map_or(Ok(()), |recorded| self.stream.replay(&recorded.graph));
        drop(graphs);
        self.noting(replayed).map(|()| true)
    }

    /// Captures a run under its key without executing it. Its operations are given in an order that
    /// is valid sequentially. Copies become branches of the graph. A run with checked indices ends
    /// with a copy of the fault record. If the driver refuses the run's edges, fewer are recorded,
    /// here and from then on: the order of the operations implies them. After another failure of the
    /// capture, which may be temporary, the run is captured once more.
    ///
    /// Without memory for the graph, older graphs of the program are destroyed. If there is still
    /// none, the program gets no graph of this run.
    pub fn record<'a>(
        &mut self,
        program: &Program,
        run: &Run<'_>,
        work: impl Iterator<Item = Work<'a>> + Clone,
    ) -> Result<(), DriverError> {
        let (mut edges, mut lowered, mut is_retry) = (self.edges, None, false);
        let graph = loop {
            let error = match self.captured(program, &edges.of(run), work.clone()) {
                Ok(graph) => break graph,
                Err(e) => e,
            };
            match (&error, edges.fewer(run)) {
                (DriverError::Failed { call, status, .. }, Some((fewer, effect)))
                    if EDGE_CALLS.contains(call) && EDGES_REFUSED.contains(status) =>
                {
                    lowered = Some(format!("{effect}: {error}"));
                    edges = fewer;
                }
                (DriverError::Failed { call, status, .. }, _)
                    if (EDGE_CALLS.contains(call) || *status == CAPTURE_INVALIDATED)
                        && !is_retry =>
                {
                    is_retry = true;
                }
                (DriverError::OutOfMemory { .. }, _) if !is_retry => {
                    is_retry = true;
                    program.destroy_older_graphs();
                }
                (DriverError::OutOfMemory { .. }, _) => {
                    log::warn!(
                        "the device has no memory for the graph of a run: its kernels are launched one by one"
                    );
                    push_latest(&mut lock(&program.without_graph), run.key.into());
                    return Ok(());
                }
                _ => return self.noting(Err(error)),
            }
        };
        if let Some(effect) = lowered {
            log::warn!("{effect}");
            self.edges = edges;
        }
        let recorded = Recorded {
            key: run.key.into(),
            graph,
        };
        push_latest(&mut lock(&program.graphs), recorded);
        Ok(())
    }

    /// Captures a run.
    fn captured<'a>(
        &mut self,
        program: &Program,
        run: &Run<'_>,
        work: impl Iterator<Item = Work<'a>>,
    ) -> Result<Graph, DriverError> {
        self.ready()?;
        let fault = self.fault_record()?;
        let edges = Edges::of_driver().filter(|_| run.early || run.after.is_some());
        self.stream.capture(|| {
            let recording = Recording {
                stream: &self.stream,
                edges,
                early: run.early,
            };
            // The last nodes of each operation, where the dependencies are known.
            let mut ends: Vec<Vec<Node>> = Vec::new();
            for (at, piece) in work.enumerate() {
                if let (Some(edges), Some(after)) = (edges, run.after) {
                    let mut front: Vec<Node> = after[at]
                        .iter()
                        .flat_map(|&earlier| &ends[earlier as usize])
                        .copied()
                        .collect();
                    front.sort_unstable();
                    front.dedup();
                    edges.set_front(&self.stream, &front, false)?;
                }
                match piece {
                    Work::Launch(launch) => {
                        self.submit(program, fault, run.env, &launch, Some(&recording))?
                    }
                    Work::Start { copy, from, to } => self.start_copy(copy, &from, &to)?,
                    Work::Finish(copy) => self.finish_copy(copy)?,
                }
                if let (Some(edges), Some(_)) = (edges, run.after) {
                    ends.push(edges.front(&self.stream)?);
                }
            }
            if let (Some(edges), Some(after)) = (edges, run.after) {
                // The end depends on all operations without dependents.
                let mut waited = vec![false; ends.len()];
                after
                    .iter()
                    .flatten()
                    .for_each(|&earlier| waited[earlier as usize] = true);
                let last = ends
                    .iter()
                    .zip(&waited)
                    .filter(|(_, waited)| !**waited)
                    .flat_map(|(end, _)| end)
                    .copied();
                edges.set_front(
                    &self.stream,
                    &last
                        .collect::<std::collections::BTreeSet<_>>()
                        .into_iter()
                        .collect::<Vec<_>>(),
                    false,
                )?;
            }
            if run.checked {
                self.look_for_faults()
            } else {
                Ok(())
            }
        })
    }

    /// Ends a run whose kernels were launched one by one, as a captured run ends.
    pub fn end_launches(&mut self, checked: bool) -> Result<(), DriverError> {
        if checked {
            self.fault_record()?;
            self.look_for_faults()?;
        }
        Ok(())
    }

    /// Submits the work of one kernel, or captures it.
    pub(crate) fn submit(
        &self,
        program: &Program,
        fault: u64,
        env: &Env,
        launch: &Launch<'_>,
        recording: Option<&Recording<'_>>,
    ) -> Result<(), DriverError> {
        let workspace = self
            .address(&launch.workspace)
            .next_multiple_of(WORKSPACE_ALIGN);
        let argument = |argument: u16| self.address(&launch.arguments[usize::from(argument)]);
        if let Some(work) = &launch.kernel.by_library {
            // SAFETY: there is one region for each argument, and the workspace is planned with the
            // bytes that the kernel requests.
            unsafe {
                work.submit(
                    env,
                    &argument,
                    workspace,
                    &self.shared.libraries,
                    &self.stream,
                )?
            };
        }
        let fork = recording
            .filter(|_| launch.kernel.side_by_side)
            .map_or(Ok(None), Recording::fork)?;
        let mut ends = Vec::new();
        for dispatch in launch.kernel.launches(env) {
            if let Some(fork) = &fork {
                fork.start()?;
            }
            let mut words = [0u64; WORDS_MAX];
            assert!(
                dispatch.words.len() <= WORDS_MAX,
                "{} words for a kernel's parameter",
                dispatch.words.len()
            );
            for (slot, word) in words.iter_mut().zip(&dispatch.words) {
                *slot = match *word {
                    Word::Argument(at) => self.address(&launch.arguments[usize::from(at)]),
                    Word::Part(at, offset) => {
                        self.address(&launch.arguments[usize::from(at)]) + offset
                    }
                    Word::Workspace(offset) => workspace + offset,
                    Word::Counters(first) => program.counters.of_step(launch.step, first),
                    Word::Fault => fault,
                    Word::Step => launch.step as u64,
                    Word::Number(n) => n as u64,
                };
            }
            let function = program.functions[launch.step][dispatch.function];
            recording.map_or(Ok(()), Recording::launch_early)?;
            // SAFETY: the function was generated together with this list of words, and accesses
            // through its arguments the elements that their operands describe for these sizes,
            // which are inside of the regions; the device reports a kernel's invalid accesses, and
            // the kernel has no host addresses except those of staging memory.
            unsafe {
                self.stream.launch(
                    function,
                    dispatch.grid,
                    dispatch.block,
                    dispatch.shared_bytes,
                    &words,
                )?
            };
            if let Some(fork) = &fork {
                ends.extend(fork.end()?);
            }
        }
        fork.map_or(Ok(()), |fork| fork.join(&ends))
    }
}
