//! The back ends: the devices that a session's memory lies on and its kernels run on.
//!
//! A back end has two halves. [`Target`] is the device at compile time: it prepares
//! kernels and answers which [`Capabilities`] the passes may rely on. [`Backend`] is the device at
//! run time: its memory, and the kernels that are launched on it. The memory of the CPU is directly
//! accessible; that of another device is reached by copies, so `map_read` and
//! [`map_write`](Backend::map_write) give access to a region of any device as host memory.
//!
//! Without the feature `cuda` the module `cuda` is a dummy whose types have no values, so nothing
//! else depends on the feature.

#![cfg_attr(
    not(feature = "cuda"),
    allow(dead_code, reason = "some data is for devices that load programs")
)]

mod cache;
mod choice;
mod cpu;
#[cfg_attr(not(feature = "cuda"), path = "backend/dummy_cuda.rs")]
mod cuda;
mod target;

use std::path::Path;
use std::sync::Arc;

use slabwise_kernels::collective::{Exchange, Transport};
use slabwise_kernels::copies::{Fill, Ticket};
use slabwise_kernels::cpu::{Config, Fault, Team};
use slabwise_kernels::memory::{Memory, OutOfMemory, Region};
use slabwise_kernels::micro_batch::MicroBatch;
use slabwise_kernels::size::{Env, Size};
use slabwise_planner::Bytes;

pub use cache::KernelCache;
pub use cuda::Loaded;
#[cfg(feature = "cuda")]
pub use cuda::functions;
#[cfg(feature = "cuda")]
pub(crate) use cuda::groups;
pub(crate) use cuda::{Choice, survey, usable};
pub use target::{Kernel, Target};

use crate::device::Device;
use crate::error::{Error, Mistake, Result};
use crate::memory::{MemoryConfig, Source};

/// The properties of a device that the passes and the session depend on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capabilities {
    /// The products that take operands in halves.
    pub half_products: HalfProducts,
    /// The bits of a product do not depend on its epilogue, so a task may be fused into the product
    /// that it reads after the kernels are chosen.
    pub late_epilogues: bool,
    /// The gradient of attention may be rounded by the kernels that compute it.
    pub rounds_attention_gradients: bool,
    /// A product may sum values of its epilogue over its rows.
    pub epilogue_sums: bool,
    /// A convolution may compute its input while it reads it.
    pub prologues: bool,
    /// Kernels may run on part of the batch.
    pub micro_batches: bool,
    /// Runs are recorded, and replayed by one call.
    pub recorded_launches: bool,
    /// Launches return before the kernel has run.
    pub asynchronous: bool,
}

/// The sectors of a device's memory.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sectors {
    /// The bytes of a sector, which memory moves at once.
    pub bytes: u64,
    /// Bytes that memory moves in a cycle, of those that products are modelled in.
    pub bytes_per_cycle: f64,
}

/// The products of a device that take f16 and bf16 operands as they are; operands of others are
/// converted to f32 first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HalfProducts {
    /// Matrix products, each operand of any float type.
    Matrices,
    /// Matrix products and convolutions, both operands of one type.
    OfOneType,
}

/// The resources of a GPU's multiprocessor that a kernel's function uses, as its assembler reports
/// them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Resources {
    /// The function's name, which says which kind of kernel it is.
    pub function: String,
    /// Registers of a thread.
    pub registers: u32,
    /// Bytes that a thread writes to memory because it has too few registers.
    pub spill_bytes: u32,
    /// Bytes of shared memory of a block, without those that a launch adds.
    pub shared_bytes: u32,
}

/// The upper limits of a device's speed.
#[derive(Clone, Debug, PartialEq)]
pub struct Roofline {
    /// Operations in a second: of products of f32, or of tf32 where [that is
    /// allowed](crate::compile::CompileOptions::tf32); of products of halves; of all other code.
    pub flops: [f64; 3],
    /// Bytes from or to memory in a second.
    pub bytes: f64,
    /// The source of the numbers.
    pub source: String,
}

impl Roofline {
    /// The least time of so many operations of a product, of halves or not, and of its code, and of
    /// so many bytes.
    #[doc(hidden)]
    pub fn least_seconds(&self, [product, code]: [u64; 2], halves: bool, bytes: u64) -> f64 {
        let [exact, half, rest] = self.flops;
        let computing = product as f64 / if halves { half } else { exact } + code as f64 / rest;
        computing.max(bytes as f64 / self.bytes)
    }
}

/// The property of its values that a check tests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CheckKind {
    /// Indices lie in range.
    Index,
    /// A requested length is possible.
    Length,
    /// Elements are finite.
    Finite,
}

/// A step that looks for values out of range.
#[derive(Clone, Debug)]
pub struct Check {
    /// The mistake to report at the user's line; its message is filled in.
    pub mistake: Mistake,
    /// The step's number.
    pub step: u32,
    /// The name of the checked value.
    pub of: String,
    /// The checked property.
    pub kind: CheckKind,
    /// One more than the largest value allowed.
    pub limit: Size,
    /// The input that is checked as a whole, if it is one. The host can check it before the run.
    pub input: Option<usize>,
}

/// The message for a check of `of` that failed.
pub fn describe(fault: Fault, kind: CheckKind, of: &str) -> String {
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
            "a length of {value} is requested; 0 to {} are possible",
            limit.saturating_sub(1)
        ),
        CheckKind::Index if of.is_empty() => fault.to_string(),
        CheckKind::Index => format!("{fault}, in {of}"),
    }
}

/// The description of a compiled program for a device that loads its kernels.
pub struct LoadRequest<'a> {
    /// The program's name.
    pub name: &'a str,
    /// The sizes at which dynamic dimensions have their bounds.
    pub bounds: Env,
    /// The steps, in their order.
    pub steps: Vec<LoadStep<'a>>,
    /// Whether it copies to or from the host while it runs.
    pub has_copies: bool,
    /// Whether sizes of its buffers depend on data.
    pub is_dynamic: bool,
    /// Bytes of inputs and sizes that are written before each run.
    pub input_bytes: u64,
    /// Whether steps may be fused horizontally.
    pub horizontal_fusion: bool,
}

/// A step of a [`LoadRequest`].
pub struct LoadStep<'a> {
    /// The step's name.
    pub name: &'a str,
    /// The kernel; none if the step starts or finishes a copy.
    pub kernel: Option<&'a Arc<Kernel>>,
    /// The memory of the kernel's arguments.
    pub arguments: Vec<Extent>,
    /// The bytes of the slab from one offset to another that are its workspace.
    pub workspace: (u64, u64),
    /// The check that it makes, if it makes one.
    pub check: Option<Check>,
    /// Bytes that it moves at the bounds.
    pub bytes: u64,
    /// Arithmetic operations at the bounds.
    pub flops: u64,
}

/// The memory of an argument.
#[derive(Clone, Copy, Debug)]
pub enum Extent {
    /// In the slab, from one offset to another.
    Slab(u64, u64),
    /// In this variable.
    Variable(usize),
    /// In the sizes of the run.
    Sizes,
}

/// A kernel to launch: on all of the batch, or on a slice of it.
pub struct Call<'a> {
    /// The program on the device, where kernels are loaded.
    pub loaded: Option<&'a Loaded>,
    /// The step's number.
    pub step: usize,
    /// The kernel.
    pub kernel: &'a Kernel,
    /// The examples that it runs on, if those are not all.
    pub slice: Option<MicroBatch>,
    /// The memory of its arguments.
    pub arguments: &'a [Region],
    /// The memory of its workspace.
    pub workspace: Region,
    /// The sizes of the run.
    pub sizes: &'a Env,
    /// The threads that run it.
    pub team: &'a Team,
    /// The ranks that it exchanges bytes with, if it does.
    pub transport: Option<&'a dyn Transport>,
}

/// The sizes and addresses of a run, by which a recorded run is found again.
pub struct Bindings<'a> {
    /// The sizes of the run.
    pub sizes: &'a Env,
    /// The slab.
    pub slab: Region,
    /// The memory of the host that copies of the run use.
    pub host: Option<Region>,
    /// The number of inputs.
    pub inputs: usize,
    /// Where inputs lie that are not at their planned offsets; it may be shorter than `inputs`.
    pub fed: &'a [Option<Region>],
}

/// The result of looking for a recording of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Replay {
    /// The run was replayed.
    Done,
    /// The run should be recorded.
    Record,
    /// The kernels should be launched one by one.
    Launch,
}

/// The bytes of a batch, written to a slot of a prefetch queue: now or by a thread.
pub trait SlotWriter {
    /// Writes the bytes, and checks them.
    fn write(&mut self, slot: &mut [u8]) -> Result<()>;
    /// A function that writes the bytes later. Called at most once, and then instead of
    /// [`write`](SlotWriter::write).
    fn take_task(&mut self) -> Fill;
}

/// A slot of a prefetch queue.
#[derive(Clone, Copy, Debug)]
pub struct Slot {
    /// The device's number of the queue.
    pub queue: usize,
    /// The slot's number in the queue.
    pub number: u64,
    /// The slot's bytes.
    pub region: Region,
}

/// A device in use by a session. The default methods are those of a device that shares the memory
/// and the clock of the host.
pub trait Backend: Send + Sync {
    /// The properties of the device.
    fn capabilities(&self) -> Capabilities;

    /// The target that kernels are prepared for. Products are timed in at most `room` bytes, where
    /// they are timed.
    fn target(&self, config: Config, room: Option<u64>) -> Target;

    /// The host's memory, if everything lies there.
    fn host(&self) -> Option<&Memory> {
        None
    }

    /// The memory as the pool sees it. All work of a session is one stream's, in order. Therefore
    /// memory of that stream can be used again without waiting, and a device waits by itself before
    /// it gives memory back.
    fn source(&mut self) -> &mut dyn Source;

    /// Sets the limits of the memory from here on.
    fn configure(&mut self, config: &MemoryConfig) -> Result<()> {
        let _ = config;
        Ok(())
    }

    /// Bytes taken from the device.
    fn reserved_bytes(&self) -> u64;

    /// A new arena of zeros. An error names its `purpose`.
    fn reserve(&mut self, bytes: u64, purpose: &str) -> Result<Region>;

    /// A new arena of zeros from which other ranks receive faster; `None` if there is none.
    fn reserve_for_ranks(
        &mut self,
        bytes: u64,
        purpose: &str,
        transport: &dyn Transport,
    ) -> Result<Option<Region>> {
        let _ = (bytes, purpose, transport);
        Ok(None)
    }

    /// Gives an arena back.
    fn release(&mut self, arena: u32);

    /// Copies one region to another of the same length.
    fn copy(&mut self, from: &Region, to: &Region) -> Result<()>;

    /// Fills a region with a byte.
    fn fill(&mut self, region: &Region, byte: u8) -> Result<()>;

    /// A copy of a region in memory of the host, after all runs that were launched.
    fn download(&self, region: &Region) -> Result<(Memory, Region)>;

    /// Lets `change` overwrite all of a region.
    fn map_write(
        &mut self,
        region: &Region,
        change: &mut dyn FnMut(&mut Memory, &Region),
    ) -> Result<()>;

    /// Reads an `i32` that a kernel has written; fails if a value was out of range before that.
    fn read_i32(&self, region: &Region) -> Result<i32>;

    /// Begins to write the inputs of a run.
    fn begin_inputs(&mut self) -> Result<()> {
        Ok(())
    }

    /// Lets `write` write an input of the next run.
    fn upload(&mut self, region: &Region, write: &mut dyn FnMut(&mut [u8])) -> Result<()>;

    /// Writes the sizes of a run to where its kernels read them.
    fn publish(&mut self, region: &Region, sizes: &Env) -> Result<()> {
        self.upload(region, &mut |bytes| write_sizes(bytes, sizes))
    }

    /// Ends the inputs that [`begin_inputs`](Backend::begin_inputs) began.
    fn end_inputs(&mut self) -> Result<()> {
        Ok(())
    }

    /// Bytes of the staging buffer that an input of so many bytes passes through, beside the bytes
    /// that are planned for it.
    fn staging_bytes_for(&self, input: u64) -> u64 {
        let _ = input;
        0
    }

    /// Sets the bytes of the staging buffer for large inputs; `false` if the device has not so much
    /// memory.
    fn set_staging(&mut self, bytes: u64) -> Result<bool> {
        let _ = bytes;
        Ok(true)
    }

    /// Bytes of the staging buffer, and those that the last run used.
    fn staging(&self) -> (u64, u64) {
        (0, 0)
    }

    /// Compiles and loads a program's kernels, if the device has kernels to load.
    fn load(&mut self, request: &LoadRequest<'_>) -> Result<Option<Loaded>> {
        let _ = request;
        Ok(None)
    }

    /// Makes a program the one that faults are reported for from here on, in runs of these sizes.
    fn start(&mut self, loaded: Option<&Loaded>, sizes: &Env) -> Result<()> {
        let _ = (loaded, sizes);
        Ok(())
    }

    /// Runs a kernel, or launches it.
    fn run(&mut self, call: &Call<'_>) -> Result<Result<(), Fault>>;

    /// Ends a run whose kernels were launched one by one.
    fn end_run(&mut self, loaded: Option<&Loaded>) -> Result<()> {
        let _ = loaded;
        Ok(())
    }

    /// Replays a run, if it was recorded.
    fn replay(&mut self, loaded: &Loaded, run: &Bindings<'_>) -> Result<Replay> {
        let _ = (loaded, run);
        Ok(Replay::Launch)
    }

    /// Records the kernels and copies from here on instead of starting them.
    fn begin_recording(&mut self) {}

    /// Makes a replayable run of the recorded steps and replays it; `false` if the device keeps no
    /// recording of it. Drops the steps if `recorded` is an error.
    fn end_recording(
        &mut self,
        loaded: &Loaded,
        run: &Bindings<'_>,
        recorded: Result<()>,
    ) -> Result<bool> {
        let _ = (loaded, run);
        recorded.map(|()| false)
    }

    /// Keeps an error that could not be returned, for the next run.
    fn defer(&self, error: Error) {
        drop(error);
    }

    /// Waits until all work that was launched is done.
    fn synchronize(&self) -> Result<()> {
        Ok(())
    }

    /// Begins to note moments by the device's own clock, if it has one.
    fn begin_marks(&mut self) -> bool {
        false
    }

    /// Notes the moment at which all work launched so far is done, by the device's clock.
    fn mark(&mut self) -> Result<()> {
        Ok(())
    }

    /// Seconds from the first moment noted to each. Waits for the last.
    fn marks(&self) -> Result<Vec<f64>> {
        Ok(Vec::new())
    }

    /// The limits of the device's speed, where they are known; on the CPU those of the team.
    fn roofline(&self, tf32: bool, team: &Team) -> Option<Roofline> {
        let _ = (tf32, team);
        None
    }

    /// Notes where the last checkpoint was written, which is told if the device is lost.
    fn saved(&self, path: &Path) {
        let _ = path;
    }

    /// An arena of the host for values that leave the slab. An error names its `purpose`.
    fn reserve_host(&mut self, bytes: u64, purpose: &str) -> Result<Region> {
        self.reserve(bytes, purpose)
    }

    /// Prepares for so many copies in flight at once, so that starting them allocates nothing.
    fn prepare_copies(&mut self, most: usize) -> Result<()>;

    /// Starts a copy of a run, whose number is `copy`. The ticket, if there is one, is for
    /// [`finish_copy`](Backend::finish_copy).
    fn start_copy(&mut self, copy: usize, from: &Region, to: &Region) -> Result<Option<Ticket>>;

    /// Makes later work wait for a copy.
    fn finish_copy(&mut self, copy: usize, ticket: Option<Ticket>) -> Result<()>;

    /// Starts a collective, whose bytes the call's transport moves.
    ///
    /// # Errors
    /// If a rank is lost.
    fn start_exchange(&mut self, call: &Call<'_>) -> Result<Exchange> {
        Err(Error::Internal(format!(
            "step {} exchanges bytes between ranks, which this device does not",
            call.step
        )))
    }

    /// Waits until a collective has ended.
    ///
    /// # Errors
    /// If a rank is lost.
    fn finish_exchange(&mut self, exchange: Exchange, transport: &dyn Transport) -> Result<()> {
        let _ = (exchange, transport);
        Ok(())
    }

    /// Waits until no copy is in flight, and no collective either.
    fn finish_transfers(&mut self, transport: Option<&dyn Transport>);

    /// Opens a prefetch queue of so many slots in a region, for a program of so many copies; the
    /// device's number of the queue.
    fn open_queue(&mut self, region: &Region, slots: usize, copies: usize) -> Result<usize>;

    /// Starts to write a batch to a slot.
    fn fill_slot(&mut self, slot: Slot, writer: &mut dyn SlotWriter) -> Result<Option<Ticket>>;

    /// Moves the parts of a batch, at these offsets of its slot, to where a run reads them.
    fn take_slot(
        &mut self,
        slot: Slot,
        ticket: Option<Ticket>,
        parts: &mut dyn Iterator<Item = (u64, Region)>,
    ) -> Result<()>;
}

impl dyn Backend + '_ {
    /// Shows a region as memory of the host, after all runs that were launched.
    pub fn map_read<T>(
        &self,
        region: &Region,
        read: impl FnOnce(&Memory, &Region) -> T,
    ) -> Result<T> {
        match self.host() {
            Some(memory) => Ok(read(memory, region)),
            None => self
                .download(region)
                .map(|(memory, region)| read(&memory, &region)),
        }
    }
}

/// Opens a device.
pub fn open(device: Device) -> Result<Box<dyn Backend>> {
    match device {
        Device::Cpu => Ok(Box::new(cpu::Cpu::new())),
        Device::Cuda(ordinal) => cuda::open(ordinal),
    }
}

/// Writes the sizes of a run as the kernels of a device read them.
fn write_sizes(bytes: &mut [u8], sizes: &Env) {
    for (slot, &size) in bytes.chunks_exact_mut(4).zip(&sizes.0) {
        slot.copy_from_slice(&i32::try_from(size).unwrap_or(i32::MAX).to_ne_bytes());
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

/// The error for memory that the host refused.
fn refused(purpose: &str, e: OutOfMemory) -> Error {
    Error::OutOfMemory {
        what: purpose.into(),
        bytes: Bytes(e.bytes),
        more: String::new(),
    }
}
