//! What a session's device does for it: memory to hold weights and slab, and kernels that run
//! there.
//!
//! On the CPU both are at hand. What lies on another device is reached by copies: [`Backend::look`]
//! and [`Backend::edit`] show a region as host memory wherever it lies.

mod copies;
#[cfg(feature = "cuda")]
mod cuda;
mod pool;

use slabwise_kernels::cpu::{self, Config, Fault, SpecError, Team};
use slabwise_kernels::memory::{Memory, Region};
use slabwise_kernels::size::Env;
use slabwise_kernels::slice::Slice;
use slabwise_kernels::spec::Spec;
use slabwise_planner::Bytes;

#[cfg(feature = "cuda")]
pub(crate) use cuda::{Check, Gpu, Group, Loaded, Recorded};

use crate::device::Device;
use crate::error::{Error, Result};
use crate::memory::{MemoryConfig, available};

/// What kernels are prepared for.
#[derive(Clone, Debug)]
pub enum Target {
    /// The CPU, and the most bytes of a kernel's workspace, where one can do with fewer than it is
    /// fastest with.
    Cpu(Config, u64),
    /// A CUDA device, and who times products there, if somebody does.
    #[cfg(feature = "cuda")]
    Cuda(slabwise_cuda::Target, Option<slabwise_cuda::Tuner>),
}

/// How a spec is computed, where there is a choice.
#[cfg(feature = "cuda")]
pub(crate) use slabwise_cuda::Choice;

/// Without the feature there is no choice.
#[cfg(not(feature = "cuda"))]
#[derive(Clone, Debug, Default)]
pub(crate) struct Choice {}

impl Target {
    /// Whether products take halves as they are; the CPU has kernels for f32 alone.
    pub(crate) fn multiplies_halves(&self) -> bool {
        match self {
            Target::Cpu(..) => false,
            #[cfg(feature = "cuda")]
            Target::Cuda(..) => true,
        }
    }

    /// How each of a program's specs is best computed. `guarded` as for [`Kernel::new`].
    pub(crate) fn choose(&self, specs: &[(&Spec, bool)], bounds: &Env) -> Vec<Choice> {
        match self {
            #[cfg(feature = "cuda")]
            Target::Cuda(target, Some(tuner)) => {
                let of = |&(spec, guarded): &(_, bool)| {
                    (spec, slabwise_cuda::Target { guarded, ..*target })
                };
                tuner.choose(&specs.iter().map(of).collect::<Vec<_>>(), bounds)
            }
            _ => {
                let _ = bounds;
                vec![Choice::default(); specs.len()]
            }
        }
    }

    /// Whether what two loops both sum has the same bits in both, in every run; `None` where that
    /// is not known.
    pub(crate) fn sums_alike(&self, a: &Spec, b: &Spec, bounds: &Env) -> Option<bool> {
        match self {
            Target::Cpu(config, _) => cpu::sums_alike(a, b, bounds, config),
            #[cfg(feature = "cuda")]
            Target::Cuda(target, _) => slabwise_cuda::sums_alike(a, b, bounds, target).ok(),
        }
    }

    /// The same with the smallest workspaces that kernels can do with, if it matters to them.
    pub(crate) fn lean(&self) -> Option<Target> {
        match self {
            Target::Cpu(config, _) => Some(Target::Cpu(*config, 0)),
            #[cfg(feature = "cuda")]
            Target::Cuda(..) => None,
        }
    }

    /// The same with products of f32 that round to tf32 or not, where that is faster.
    pub(crate) fn with_tf32(self, tf32: bool) -> Target {
        match self {
            #[cfg(feature = "cuda")]
            Target::Cuda(target, tuner) => {
                Target::Cuda(slabwise_cuda::Target { tf32, ..target }, tuner)
            }
            cpu => {
                let _ = tf32;
                cpu
            }
        }
    }

    /// The same with products timed of this many multiplications and more, or none.
    pub(crate) fn timed_from(self, worth: Option<i64>) -> Target {
        match self {
            #[cfg(feature = "cuda")]
            Target::Cuda(target, tuner) => {
                let timed = worth
                    .and_then(|worth| tuner.map(|tuner| slabwise_cuda::Tuner { worth, ..tuner }));
                Target::Cuda(target, timed)
            }
            cpu => {
                let _ = worth;
                cpu
            }
        }
    }
}

/// A prepared kernel.
pub enum Kernel {
    /// For the CPU.
    Cpu(Box<cpu::Kernel>),
    /// For a CUDA device, with what it was made from.
    #[cfg(feature = "cuda")]
    Cuda(Box<Spec>, slabwise_cuda::Lowered),
}

impl Kernel {
    /// Prepares a spec. `guarded`: it stores to weights or state, which it must not if an index was
    /// out of range before it.
    pub(crate) fn new(
        spec: Spec,
        bounds: &Env,
        target: &Target,
        guarded: bool,
        choice: &Choice,
    ) -> Result<Kernel, SpecError> {
        match target {
            // On the CPU a run has stopped by then.
            Target::Cpu(config, workspace) => {
                let _ = (guarded, choice);
                cpu::Kernel::within(spec, bounds, config, *workspace)
                    .map(|kernel| Kernel::Cpu(Box::new(kernel)))
            }
            #[cfg(feature = "cuda")]
            Target::Cuda(target, _) => {
                let lowered = slabwise_cuda::lower_as(
                    &spec,
                    bounds,
                    &slabwise_cuda::Target { guarded, ..*target },
                    choice,
                )?;
                Ok(Kernel::Cuda(Box::new(spec), lowered))
            }
        }
    }

    /// Bytes of scratch memory a run needs, whatever the sizes up to the bounds.
    pub fn workspace(&self) -> u64 {
        match self {
            Kernel::Cpu(kernel) => kernel.workspace(),
            #[cfg(feature = "cuda")]
            Kernel::Cuda(_, lowered) => slabwise_cuda::workspace_bytes(lowered),
        }
    }

    /// What of it a library of NVIDIA's computes.
    pub(crate) fn library(&self) -> Option<String> {
        match self {
            Kernel::Cpu(_) => None,
            #[cfg(feature = "cuda")]
            Kernel::Cuda(_, lowered) => lowered.library(),
        }
    }

    /// What it computes.
    pub(crate) fn spec(&self) -> &Spec {
        match self {
            Kernel::Cpu(kernel) => kernel.spec(),
            #[cfg(feature = "cuda")]
            Kernel::Cuda(spec, _) => spec,
        }
    }

    /// The kernel as the CPU runs it, if it is one of its.
    pub(crate) fn cpu(&self) -> Option<&cpu::Kernel> {
        match self {
            Kernel::Cpu(kernel) => Some(kernel),
            #[cfg(feature = "cuda")]
            Kernel::Cuda(..) => None,
        }
    }

    /// The largest team that its workspace has room for, where a team runs it.
    pub(crate) fn threads(&self) -> Option<usize> {
        match self {
            Kernel::Cpu(kernel) => Some(kernel.threads()),
            #[cfg(feature = "cuda")]
            Kernel::Cuda(..) => None,
        }
    }
}

/// What a kernel's function uses of a GPU's multiprocessor, as its assembler says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Resources {
    /// The function's name, which says what kind of kernel it is.
    pub function: String,
    /// Registers of a thread.
    pub registers: u32,
    /// Bytes that a thread writes to memory because it has too few registers.
    pub spill_bytes: u32,
    /// Bytes of shared memory of a block, without what a launch adds.
    pub shared_bytes: u32,
}

/// What a check of a run is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CheckKind {
    /// Indices lie in range.
    Index,
    /// A length that is asked for is possible.
    Length,
    /// Elements are finite.
    Finite,
}

/// What is said of a check that failed: an element of `of`, a length that is asked for, or a number
/// that is none.
pub(crate) fn describe(fault: Fault, kind: CheckKind, of: &str) -> String {
    let Fault::Index {
        value,
        limit,
        position,
    } = fault;
    match kind {
        CheckKind::Finite => {
            format!(
                "require_finite: the element at position {position} is {}",
                if value == 1 { "NaN" } else { "infinite" }
            )
        }
        CheckKind::Length => format!(
            "a length of {value} is asked for; 0 to {} are possible",
            limit.saturating_sub(1)
        ),
        CheckKind::Index if of.is_empty() => fault.to_string(),
        CheckKind::Index => format!("{fault}, in {of}"),
    }
}

/// Without the feature no program is loaded anywhere.
#[cfg(not(feature = "cuda"))]
pub(crate) enum Loaded {}

#[cfg(not(feature = "cuda"))]
impl Loaded {
    pub fn look_at_input(
        &self,
        _: usize,
        _: slabwise_kernels::dtype::DType,
        _: &[u8],
        _: &Env,
    ) -> Result<()> {
        match *self {}
    }
}

/// A device in use by a session.
pub(crate) enum Backend {
    /// The host's memory.
    Cpu(Memory),
    #[cfg(feature = "cuda")]
    Cuda(Box<Gpu>),
}

impl Backend {
    /// Opens a device.
    pub fn open(device: Device) -> Result<Backend> {
        match device {
            Device::Cpu => Ok(Backend::Cpu(Memory::new())),
            #[cfg(feature = "cuda")]
            Device::Cuda(ordinal) => {
                Gpu::open(ordinal, &MemoryConfig::default()).map(|gpu| Backend::Cuda(Box::new(gpu)))
            }
            #[cfg(not(feature = "cuda"))]
            Device::Cuda(_) => device.check().map(|()| Backend::Cpu(Memory::new())),
        }
    }

    /// What kernels are prepared for. Where products are timed that takes at most `room` bytes.
    pub fn target(&self, config: Config, room: Option<u64>) -> Target {
        match self {
            Backend::Cpu(_) => {
                let _ = room;
                Target::Cpu(config, u64::MAX)
            }
            #[cfg(feature = "cuda")]
            Backend::Cuda(gpu) => Target::Cuda(gpu.target(), gpu.tuner(room)),
        }
    }

    /// The host's memory, if that is where everything lies.
    pub fn host(&self) -> Option<&Memory> {
        match self {
            Backend::Cpu(memory) => Some(memory),
            #[cfg(feature = "cuda")]
            Backend::Cuda(_) => None,
        }
    }

    /// An arena of zeros for what the error would name.
    pub fn reserve(&mut self, bytes: u64, what: &str) -> Result<Region> {
        match self {
            Backend::Cpu(memory) => {
                if bytes >= available::WORTH_ASKING
                    && let Some(there) = available::available().filter(|&there| there < bytes)
                {
                    let more = format!(
                        ": {} are free, swap and the limit of the control group counted",
                        Bytes(there)
                    );
                    return Err(Error::OutOfMemory {
                        what: what.into(),
                        bytes: Bytes(bytes),
                        more,
                    });
                }
                memory.reserve(bytes).map_err(|e| refused(what, e))
            }
            #[cfg(feature = "cuda")]
            Backend::Cuda(gpu) => gpu.reserve(bytes, what),
        }
    }

    /// Gives an arena back.
    pub fn release(&mut self, arena: u32) {
        match self {
            Backend::Cpu(memory) => memory.release(arena),
            #[cfg(feature = "cuda")]
            Backend::Cuda(gpu) => gpu.device.release(arena),
        }
    }

    /// Copies one region to another of the same length.
    pub fn copy(&mut self, from: &Region, to: &Region) -> Result<()> {
        match self {
            Backend::Cpu(memory) => {
                memory.copy(from, to);
                Ok(())
            }
            #[cfg(feature = "cuda")]
            Backend::Cuda(gpu) => gpu.copy(from, to),
        }
    }

    /// Fills a region with a byte.
    pub fn fill(&mut self, region: &Region, byte: u8) -> Result<()> {
        match self {
            Backend::Cpu(memory) => {
                memory.bytes_mut(region).fill(byte);
                Ok(())
            }
            #[cfg(feature = "cuda")]
            Backend::Cuda(gpu) => gpu.fill(region, byte),
        }
    }

    /// Shows what a region holds, after all that runs have been asked for.
    pub fn look<T>(&self, region: &Region, see: impl FnOnce(&Memory, &Region) -> T) -> Result<T> {
        match self {
            Backend::Cpu(memory) => Ok(see(memory, region)),
            #[cfg(feature = "cuda")]
            Backend::Cuda(gpu) => gpu
                .fetch(region)
                .map(|(memory, region)| see(&memory, &region)),
        }
    }

    /// What a region holds, in memory of the host of its own.
    pub fn fetch(&self, region: &Region) -> Result<(Memory, Region)> {
        match self {
            Backend::Cpu(memory) => {
                let (mut copy, own) = scratch(region.bytes)?;
                copy.bytes_mut(&own).copy_from_slice(memory.bytes(region));
                Ok((copy, own))
            }
            #[cfg(feature = "cuda")]
            Backend::Cuda(gpu) => gpu.fetch(region),
        }
    }

    /// Lets `change` write all of a region.
    pub fn edit(
        &mut self,
        region: &Region,
        change: impl FnOnce(&mut Memory, &Region),
    ) -> Result<()> {
        match self {
            Backend::Cpu(memory) => {
                change(memory, region);
                Ok(())
            }
            #[cfg(feature = "cuda")]
            Backend::Cuda(gpu) => gpu.edit(region, change),
        }
    }

    /// Begins to put a run's inputs in place.
    pub fn begin_inputs(&mut self) -> Result<()> {
        match self {
            Backend::Cpu(_) => Ok(()),
            #[cfg(feature = "cuda")]
            Backend::Cuda(gpu) => gpu.begin_inputs(),
        }
    }

    /// Lets `write` write an input's bytes, for the run that is asked for next.
    pub fn input(&mut self, region: &Region, write: &mut dyn FnMut(&mut [u8])) -> Result<()> {
        match self {
            Backend::Cpu(memory) => {
                write(memory.bytes_mut(region));
                Ok(())
            }
            #[cfg(feature = "cuda")]
            Backend::Cuda(gpu) => gpu.input(region, write),
        }
    }

    /// Puts the sizes of a run where its kernels find them.
    pub fn publish(&mut self, region: &Region, sizes: &Env) -> Result<()> {
        #[cfg(feature = "cuda")]
        if let Backend::Cuda(gpu) = self {
            gpu.note_sizes(sizes);
            if gpu.published.replace(*sizes) == Some(*sizes) {
                // They are there since the last run.
                return Ok(());
            }
        }
        self.input(region, &mut |bytes| {
            for (slot, &size) in bytes.chunks_exact_mut(4).zip(&sizes.0) {
                slot.copy_from_slice(&i32::try_from(size).unwrap_or(i32::MAX).to_ne_bytes());
            }
        })
    }

    /// The bytes that an input of so many takes on its way, beside those that it is planned at.
    pub fn landing_bytes(&self, input: u64) -> u64 {
        match self {
            Backend::Cpu(_) => {
                let _ = input;
                0
            }
            #[cfg(feature = "cuda")]
            Backend::Cuda(_) => slabwise_cuda::landing_bytes(input),
        }
    }

    /// Makes the place for large inputs on their way this large; `false` if the device has not so
    /// much memory.
    pub fn set_landing(&mut self, bytes: u64) -> Result<bool> {
        match self {
            Backend::Cpu(_) => {
                let _ = bytes;
                Ok(true)
            }
            #[cfg(feature = "cuda")]
            Backend::Cuda(gpu) => gpu.set_landing(bytes),
        }
    }

    /// Bytes for inputs on their way; those that the last run used.
    pub fn landing(&self) -> (u64, u64) {
        match self {
            Backend::Cpu(_) => (0, 0),
            #[cfg(feature = "cuda")]
            Backend::Cuda(gpu) => (gpu.device.landing(), gpu.device.landed()),
        }
    }

    /// Ends what [`Backend::begin_inputs`] began.
    pub fn end_inputs(&mut self) -> Result<()> {
        match self {
            Backend::Cpu(_) => Ok(()),
            #[cfg(feature = "cuda")]
            Backend::Cuda(gpu) => gpu.end_inputs(),
        }
    }

    /// Makes a program the one whose faults are met from here on, in runs of these sizes.
    pub fn start(&mut self, loaded: Option<&Loaded>, sizes: &Env) -> Result<()> {
        match (self, loaded) {
            #[cfg(feature = "cuda")]
            (Backend::Cuda(gpu), Some(loaded)) => gpu.start(loaded, sizes),
            _ => {
                let _ = sizes;
                Ok(())
            }
        }
    }

    /// Runs one kernel of a program, on all of a batch or on a slice of it, or asks for it to be
    /// run.
    #[allow(clippy::too_many_arguments)]
    pub fn run(
        &mut self,
        loaded: Option<&Loaded>,
        (step, kernel, slice): (usize, &Kernel, Option<Slice>),
        args: &[Region],
        workspace: &Region,
        env: &Env,
        team: &Team,
    ) -> Result<Result<(), Fault>> {
        // Without other devices there is nothing that a kernel could be at odds with.
        let _ = step;
        match (self, kernel, loaded) {
            (Backend::Cpu(memory), Kernel::Cpu(kernel), _) => Ok(match slice {
                Some(slice) => kernel.run_slice(memory, args, workspace, env, team, slice),
                None => kernel.run(memory, args, workspace, env, team),
            }),
            #[cfg(feature = "cuda")]
            (Backend::Cuda(gpu), Kernel::Cuda(spec, kernel), Some(loaded)) => gpu
                .launch(loaded, (step, spec, kernel), args, workspace, env)
                .map(Ok),
            #[cfg(feature = "cuda")]
            _ => Err(Error::Internal(format!(
                "kernel {step} was prepared for another device"
            ))),
        }
    }

    /// Reads a number that a kernel has made for the host, after all that was asked for before it;
    /// fails if an index was out of range until then.
    pub fn number(&self, region: &Region) -> Result<i32> {
        #[cfg(feature = "cuda")]
        if let Backend::Cuda(gpu) = self {
            gpu.look_for_faults()?;
        }
        self.look(region, |memory, region| memory.elements::<i32>(region)[0])
    }

    /// Ends a run whose kernels were run one by one.
    pub fn end_run(&mut self, loaded: Option<&Loaded>) -> Result<()> {
        match (self, loaded) {
            #[cfg(feature = "cuda")]
            (Backend::Cuda(gpu), Some(loaded)) => gpu.end_launches(loaded),
            _ => Ok(()),
        }
    }

    /// Bytes taken from the device.
    pub fn reserved_bytes(&self) -> u64 {
        match self {
            Backend::Cpu(memory) => memory.reserved_bytes(),
            #[cfg(feature = "cuda")]
            Backend::Cuda(gpu) => gpu.device.usage().reserved,
        }
    }

    /// Keeps an error that could not be told, for the next run.
    pub fn keep(&self, error: Error) {
        match self {
            Backend::Cpu(_) => drop(error),
            #[cfg(feature = "cuda")]
            Backend::Cuda(gpu) => gpu.keep(error),
        }
    }

    /// Memory settings from here on.
    pub fn configure(&mut self, config: &MemoryConfig) -> Result<()> {
        match self {
            Backend::Cpu(_) => {
                let _ = config;
                Ok(())
            }
            #[cfg(feature = "cuda")]
            Backend::Cuda(gpu) => gpu.configure(config),
        }
    }

    /// Begins to note moments by the device's own clock, if it has one.
    pub fn begin_marks(&mut self) -> bool {
        match self {
            Backend::Cpu(_) => false,
            #[cfg(feature = "cuda")]
            Backend::Cuda(gpu) => {
                gpu.device.begin_marks();
                true
            }
        }
    }

    /// Notes the moment at which all is done that was asked for, where that is by the device's
    /// clock.
    pub fn mark(&mut self) -> Result<()> {
        match self {
            Backend::Cpu(_) => Ok(()),
            #[cfg(feature = "cuda")]
            Backend::Cuda(gpu) => gpu.mark(),
        }
    }

    /// Seconds from the first moment noted to each. Waits for the last.
    pub fn marks(&self) -> Result<Vec<f64>> {
        match self {
            Backend::Cpu(_) => Ok(Vec::new()),
            #[cfg(feature = "cuda")]
            Backend::Cuda(gpu) => gpu.marks(),
        }
    }

    /// Waits until all that was asked for is done.
    pub fn settle(&self) -> Result<()> {
        match self {
            Backend::Cpu(_) => Ok(()),
            #[cfg(feature = "cuda")]
            Backend::Cuda(gpu) => gpu.settle(),
        }
    }

    /// Where the last checkpoint was written, for what is said if the device is lost.
    pub fn saved(&self, path: &std::path::Path) {
        match self {
            Backend::Cpu(_) => {
                let _ = path;
            }
            #[cfg(feature = "cuda")]
            Backend::Cuda(gpu) => gpu.saved(path),
        }
    }
}

/// Memory of the host for a copy of this length.
fn scratch(bytes: u64) -> Result<(Memory, Region)> {
    let mut memory = Memory::new();
    let region = memory
        .reserve(bytes)
        .map_err(|e| refused("a copy on the host", e))?;
    Ok((memory, region))
}

/// The error for memory the host refused.
fn refused(what: &str, e: slabwise_kernels::memory::OutOfMemory) -> Error {
    Error::OutOfMemory {
        what: what.into(),
        bytes: Bytes(e.bytes),
        more: String::new(),
    }
}
