//! Programs on a device: their kernels compiled and loaded, launched one by one or recorded as
//! graphs and done again.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use slabwise_kernels::memory::Region;
use slabwise_kernels::size::Env;

use crate::cache::{self, Cache};
use crate::compiler::Compiler;
use crate::conv::library as conv;
use crate::device::{Device, Shared};
use crate::driver::{DriverError, Edges, Function, Graph, Module, Node, Recording, Stream};
use crate::gemm::library as gemm;
use crate::lower::{self, ByLibrary, Lowered, Word};
use crate::nvrtc::{self, Cubin, Usage};
use crate::source::PRELUDE;

/// Most graphs that a program keeps: one for each set of sizes and resident inputs that it was run
/// with lately. Of as many more it knows that they came once.
const GRAPHS_MAX: usize = 8;

/// Most words of a kernel's parameter: the 4 KiB that every device takes.
const WORDS_MAX: usize = 512;

/// What workspaces start at a multiple of, bytes.
const WORKSPACE_ALIGN: u64 = 256;

/// The first architecture on which a kernel waits by itself for those it depends on.
const EARLY_LAUNCH_SM: u32 = 90;

/// Why a program cannot be loaded.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// It cannot be compiled.
    #[error(transparent)]
    Compile(#[from] nvrtc::Error),
    /// The cache would be a danger.
    #[error(transparent)]
    Cache(cache::Error),
    /// The driver refuses it.
    #[error(transparent)]
    Driver(#[from] DriverError),
    /// Its emulation cannot be made.
    #[cfg(feature = "emulator")]
    #[error(transparent)]
    Emulator(#[from] crate::emulator::EmulatorError),
}

/// The kernels of a program, loaded on a device.
#[derive(Debug)]
pub struct Program {
    graphs: Mutex<Vec<Recorded>>,
    /// The keys of runs that came once lately, the last one last.
    once: Mutex<Vec<Box<[u64]>>>,
    /// By step, then by function of the step.
    functions: Vec<Vec<Function>>,
    usage: HashMap<String, Usage>,
    _modules: Vec<Module>,
    /// What runs it.
    stream: Arc<Stream>,
    /// What is loaded goes before the context does.
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Recorded {
    key: Box<[u64]>,
    graph: Graph,
}

/// One kernel of a run.
#[derive(Clone, Copy, Debug)]
pub struct Launch<'a> {
    /// Which step of the program.
    pub step: usize,
    /// The kernel that the program was loaded with for this step.
    pub kernel: &'a Lowered,
    /// One region for each argument.
    pub arguments: &'a [Region],
    /// At least [`workspace_bytes`] of the kernel.
    pub workspace: Region,
}

/// One thing that a recorded run does.
#[derive(Clone, Copy, Debug)]
pub enum Work<'a> {
    /// It runs a kernel.
    Launch(Launch<'a>),
    /// It starts a copy, see [`Device::start_copy`].
    Start {
        /// The number of the copy.
        copy: usize,
        /// What is copied.
        from: Region,
        /// Where to.
        to: Region,
    },
    /// It waits for the copy of this number.
    Finish(usize),
}

/// A run to record.
#[derive(Clone, Copy, Debug)]
pub struct Run<'a> {
    /// The sizes of the run and the addresses of all that it touches: what another run must have in
    /// common with it to be done by the same record.
    pub key: &'a [u64],
    /// Its sizes.
    pub env: &'a Env,
    /// Whether a kernel looks for indices out of range.
    pub checked: bool,
    /// For each piece of work the earlier ones that it waits for; it may run beside all others.
    /// `None` if each waits for the one before it. Drivers older than CUDA 12.3 do as if it was.
    pub after: Option<&'a [Vec<u32>]>,
    /// Whether a kernel is launched before the kernels end that it waits for, and then waits for
    /// them by itself.
    pub early: bool,
}

/// What of a graph's work may overlap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Overlap {
    /// Kernels that conflict in no byte may run side by side.
    pub branches: bool,
    /// A kernel may be launched before those end that it waits for.
    pub launches: bool,
}

/// Bytes of workspace that a kernel is planned with: what it needs, and what aligning it may cost.
pub fn workspace_bytes(kernel: &Lowered) -> u64 {
    if kernel.workspace == 0 {
        0
    } else {
        kernel.workspace + WORKSPACE_ALIGN
    }
}

impl Program {
    /// What a function of the program uses of a multiprocessor.
    pub fn usage(&self, function: &str) -> Option<&Usage> {
        self.usage.get(function)
    }

    /// How many graphs are recorded.
    pub fn graphs(&self) -> usize {
        self.graphs
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .len()
    }

    /// Whether a run of this key is worth recording: it is the program's first, or was asked for
    /// lately. From now on it was.
    ///
    /// To record a run costs as much as some runs without a record, which lengths that are new each
    /// time never gain back.
    pub fn is_worth_recording(&self, key: &[u64]) -> bool {
        let mut once = self.once.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(at) = once.iter().position(|known| **known == *key) {
            once.remove(at);
            return true;
        }
        if once.is_empty() && self.graphs() == 0 {
            return true;
        }
        if once.len() == GRAPHS_MAX {
            once.remove(0);
        }
        once.push(key.into());
        false
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // Any thread may let go of it, while runs of it are under way: their code stays until they
        // are done. If the device is lost nothing of it is in use.
        let _ = self
            .shared
            .context
            .bind()
            .and_then(|()| self.stream.settle());
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
            // A library takes memory of the device, which a run does not.
            match work {
                ByLibrary::Product(_) => self.shared.cublaslt().map(|_| ()),
                ByLibrary::Convolution(_) => self.shared.cudnn().map(|_| ()),
            }
            .map_err(DriverError::from)?;
        }
        let mut distinct: Vec<lower::Function> = Vec::new();
        let mut known: HashMap<&str, usize> = HashMap::new();
        for function in steps.iter().flat_map(|step| &step.functions) {
            known.entry(&function.name).or_insert_with(|| {
                distinct.push(function.clone());
                distinct.len() - 1
            });
        }
        let (mut modules, mut usage, mut loaded) = (Vec::new(), HashMap::new(), HashMap::new());
        // Functions with tiles in shared memory take the compiler the longest: they come first,
        // lest one of them be left at the end.
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
        let (stream, shared) = (self.stream.clone(), self.shared.clone());
        Ok(Program {
            graphs: Mutex::default(),
            once: Mutex::default(),
            functions,
            usage,
            _modules: modules,
            stream,
            shared,
        })
    }

    /// The code of functions, each by itself.
    fn compile(&self, functions: &[lower::Function]) -> Result<Vec<Arc<Cubin>>, LoadError> {
        let cache = match Cache::of_user() {
            Ok(cache) => Some(cache),
            Err(e @ cache::Error::NotPrivate { .. }) => return Err(LoadError::Cache(e)),
            Err(e) => {
                log::warn!("{e}; kernels are compiled anew in each process");
                None
            }
        };
        let programs = nvrtc::Program::each(PRELUDE, functions, self.properties().target.sm);
        Ok(Compiler::of_process().compile(cache.as_ref(), &programs)?)
    }

    /// Asks cuBLASLt for a product, or records it.
    fn multiply(
        &self,
        product: &gemm::Product,
        env: &Env,
        argument: impl Fn(u16) -> u64,
        workspace: u64,
    ) -> Result<(), DriverError> {
        let library = self.shared.cublaslt()?;
        let at = product.addresses(env, argument, workspace);
        match product.call(env, library)? {
            gemm::Call::Nothing => Ok(()),
            // SAFETY: the result is dense where nothing may be left to sum, and lies in its
            // argument or in the workspace.
            gemm::Call::Zeros(bytes) => unsafe { self.stream.fill(at.d, 0, bytes as usize) },
            gemm::Call::Multiply(described, algorithm) => {
                // SAFETY: the product is described by the strides of the arguments' operands, which
                // lie inside of the regions; the workspace is planned with what the algorithm needs
                // at most.
                let asked = unsafe { library.multiply(&described, &algorithm, &at, &self.stream) };
                asked.map_err(DriverError::from)
            }
        }
    }

    /// Asks cuDNN for a convolution, or records it.
    fn convolve(
        &self,
        of: &conv::Convolution,
        env: &Env,
        argument: impl Fn(u16) -> u64,
        workspace: u64,
    ) -> Result<(), DriverError> {
        let library = self.shared.cudnn()?;
        let at = of.addresses(env, argument, workspace);
        match of.call(env, library)? {
            conv::Call::Nothing => Ok(()),
            // SAFETY: a gradient of a weight is dense, and lies in its argument or in the
            // workspace.
            conv::Call::Zeros(bytes) => unsafe { self.stream.fill(at.to, 0, bytes as usize) },
            conv::Call::Convolve(described, algorithm) => {
                // SAFETY: the convolution is described by the strides of the arguments' operands,
                // which lie inside of the regions; the workspace is planned with what the algorithm
                // needs at most.
                let asked = unsafe { library.convolve(&described, &algorithm, &at, &self.stream) };
                asked.map_err(DriverError::from)
            }
        }
    }

    /// Fails if a library refuses a product of these kernels for the sizes of a run: for one that
    /// is not recorded, so that what it refuses stops the run before any of it is done.
    ///
    /// # Errors
    /// If it refuses one.
    pub fn foresee<'a>(
        &self,
        mut kernels: impl Iterator<Item = &'a Lowered>,
        env: &Env,
    ) -> Result<(), DriverError> {
        self.ready()?;
        kernels.try_for_each(|kernel| match kernel.by_library.as_ref() {
            Some(ByLibrary::Product(product)) => {
                Ok(product.call(env, self.shared.cublaslt()?).map(|_| ())?)
            }
            Some(ByLibrary::Convolution(convolution)) => {
                Ok(convolution.call(env, self.shared.cudnn()?).map(|_| ())?)
            }
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

    /// Does the work again that was recorded under this key: the sizes of a run and the addresses
    /// of all that it touches. `false` if there is no such record.
    pub fn replay(&mut self, program: &Program, key: &[u64]) -> Result<bool, DriverError> {
        self.ready()?;
        let mut graphs = program
            .graphs
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let Some(at) = graphs.iter().position(|g| *g.key == *key) else {
            return Ok(false);
        };
        // The last is the one used last.
        graphs[at..].rotate_left(1);
        let replayed = graphs
            .last()
            .map_or(Ok(()), |recorded| self.stream.replay(&recorded.graph));
        drop(graphs);
        self.noting(replayed).map(|()| true)
    }

    /// Records a run under its key, without doing it: its work, in an order that is right one after
    /// the other. Copies become branches of the graph. A run whose indices are checked ends with a
    /// look at what was found.
    pub fn record<'a>(
        &mut self,
        program: &Program,
        run: &Run<'_>,
        work: impl Iterator<Item = Work<'a>>,
    ) -> Result<(), DriverError> {
        self.ready()?;
        let fault = self.fault_record()?;
        let early = run.early && self.properties().target.sm >= EARLY_LAUNCH_SM;
        let edges = Edges::of_driver().filter(|_| early || run.after.is_some());
        let captured = self.stream.capture(|| {
            let recording = Recording {
                stream: &self.stream,
                edges,
                early,
            };
            // The nodes that end each piece of work, where it is known what each waits for.
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
                // The end waits for all that nothing waits for.
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
        });
        let graph = self.noting(captured)?;
        let mut graphs = program
            .graphs
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if graphs.len() == GRAPHS_MAX {
            graphs.remove(0);
        }
        graphs.push(Recorded {
            key: run.key.into(),
            graph,
        });
        Ok(())
    }

    /// Ends a run whose kernels were launched one by one, as a recorded one ends.
    pub fn end_launches(&mut self, checked: bool) -> Result<(), DriverError> {
        if checked {
            self.fault_record()?;
            let asked = self.look_for_faults();
            self.noting(asked)?;
        }
        Ok(())
    }

    /// Asks for one kernel's work, or records it.
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
        match launch.kernel.by_library.as_ref() {
            Some(ByLibrary::Product(product)) => {
                self.multiply(product, env, argument, workspace)?
            }
            Some(ByLibrary::Convolution(convolution)) => {
                self.convolve(convolution, env, argument, workspace)?
            }
            None => {}
        }
        for dispatch in launch.kernel.launches(env) {
            let mut words = [0u64; WORDS_MAX];
            assert!(
                dispatch.words.len() <= WORDS_MAX,
                "{} words for a kernel's parameter",
                dispatch.words.len()
            );
            for (slot, word) in words.iter_mut().zip(&dispatch.words) {
                *slot = match *word {
                    Word::Argument(at) => self.address(&launch.arguments[usize::from(at)]),
                    Word::Workspace(offset) => workspace + offset,
                    Word::Fault => fault,
                    Word::Step => launch.step as u64,
                    Word::Number(n) => n as u64,
                };
            }
            let function = program.functions[launch.step][dispatch.function];
            recording.map_or(Ok(()), Recording::launch_early)?;
            // SAFETY: the function was generated together with this list of words, and reaches
            // through its arguments what their operands say for these sizes, which is inside of the
            // regions; what a kernel does wrong the device reports, and it has no addresses of the
            // host but those of staging memory.
            unsafe {
                self.stream.launch(
                    function,
                    dispatch.grid,
                    dispatch.block,
                    dispatch.shared_bytes,
                    &words,
                )?
            };
        }
        Ok(())
    }
}
