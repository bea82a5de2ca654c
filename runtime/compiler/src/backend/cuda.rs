//! A CUDA device as a back end.

mod dependencies;
mod dump;
mod functions;
mod fusion;
mod load;
mod pool;
mod recording;
mod survey;
mod target;

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use slabwise_cuda::compiler::Compiler;
use slabwise_cuda::driver::DriverError;
use slabwise_cuda::{Device, Launch, Limits, Overlap, Picks, Tuner};
use slabwise_kernels::collective::Transport;
use slabwise_kernels::copies::Ticket;
use slabwise_kernels::cpu::{Config, Fault, Team};
use slabwise_kernels::memory::{Memory, Region};
use slabwise_kernels::size::Env;
use slabwise_kernels::spec::Spec;
use slabwise_planner::Bytes;

pub use self::functions::functions;
pub(crate) use self::fusion::groups;
pub use self::load::Loaded;
pub(crate) use self::survey::{survey, usable};
pub use self::target::{Kernel, Target};
pub(crate) use slabwise_cuda::Choice;

use self::recording::Recorded;
use super::HalfProducts;
use super::{
    Backend, Bindings, Call, Capabilities, Check, LoadRequest, Replay, Roofline, Slot, SlotWriter,
    scratch, write_sizes,
};
use crate::error::{Error, Mistake, Result};
use crate::memory::{MemoryConfig, Policy, Source};
use crate::settings::{AUTOTUNE, BRANCHES, CUDNN, EARLY_LAUNCH, GRAPHS, switch, threads};

const CAPABILITIES: Capabilities = Capabilities {
    half_products: HalfProducts::OfOneType,
    // The kernel of a product may follow from its epilogue, or be a measured choice.
    late_epilogues: false,
    rounds_attention_gradients: true,
    epilogue_sums: true,
    prologues: false,
    micro_batches: false,
    recorded_launches: true,
    asynchronous: true,
};

/// Opens a device.
pub(super) fn open(ordinal: u32) -> Result<Box<dyn Backend>> {
    Ok(Box::new(Gpu::open(ordinal, &MemoryConfig::default())?))
}

/// A CUDA device in use by a session, and its latest work.
pub(super) struct Gpu {
    device: Device,
    name: String,
    ordinal: u32,
    /// The checks of the program that ran last, and its sizes.
    running: Mutex<(Arc<[Check]>, Env)>,
    /// The last checkpoint.
    saved: Mutex<Option<PathBuf>>,
    /// An asynchronous error that has not been reported yet.
    pending: Mutex<Option<Error>>,
    /// Whether runs are recorded as graphs.
    graphs: bool,
    /// How much of a graph's work may overlap.
    overlap: Overlap,
    /// Whether products are timed.
    tunes: bool,
    /// Whether cuDNN may compute convolutions.
    cudnn: bool,
    /// The sizes of the last run, which lie on the device.
    published: Option<Env>,
    /// Whether inputs are being written.
    in_inputs: bool,
    /// The steps recorded so far, while a run is recorded.
    recording: Option<Vec<Recorded>>,
}

impl Gpu {
    fn open(ordinal: u32, config: &MemoryConfig) -> Result<Gpu> {
        let name = crate::device::Device::Cuda(ordinal).to_string();
        let device = Device::open(ordinal, limits(config)?).map_err(|e| Error::Device {
            device: name.clone(),
            why: e.to_string(),
        })?;
        check_pages(&device, &name, config)?;
        let (graphs, overlap) = (
            switch(GRAPHS)?,
            Overlap {
                branches: switch(BRANCHES)?,
                launches: switch(EARLY_LAUNCH)?,
            },
        );
        let (tunes, cudnn) = (switch(AUTOTUNE)?, switch(CUDNN)?);
        if let Some(threads) = threads()? {
            Compiler::of_process().set_threads(threads);
        }
        let running = Mutex::new((Arc::new([]) as Arc<[Check]>, Env::default()));
        Ok(Gpu {
            device,
            name,
            ordinal,
            running,
            saved: Mutex::default(),
            pending: Mutex::default(),
            graphs,
            overlap,
            tunes,
            cudnn,
            published: None,
            in_inputs: false,
            recording: None,
        })
    }

    /// The tuner of products in at most so many bytes, if products are timed.
    fn tuner(&self, room: Option<u64>) -> Option<Tuner> {
        let (ordinal, limits, cudnn) = (self.ordinal, *self.device.limits(), self.cudnn);
        let tuner = || Tuner {
            ordinal,
            limits,
            room,
            worth: slabwise_cuda::WORTH,
            cudnn,
            picks: Picks::of_process(),
        };
        self.tunes.then(tuner)
    }

    /// The error to report to the user for an error of the driver.
    pub fn error(&self, error: DriverError) -> Error {
        match error {
            DriverError::Lost(why) => {
                let saved = self
                    .saved
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .clone();
                Error::Lost {
                    device: self.name.clone(),
                    why,
                    saved,
                }
            }
            DriverError::OutOfMemory { bytes } => self.out_of_memory("work on the device", bytes),
            other => Error::Device {
                device: self.name.clone(),
                why: other.to_string(),
            },
        }
    }

    /// The OOM report: the requested bytes, and the holders of the others.
    fn out_of_memory(&self, purpose: &str, bytes: u64) -> Error {
        let usage = self.device.usage();
        let (free, total) = self.device.memory().unwrap_or_default();
        let more = format!(
            " on {}: of its {}, {} are free; slabwise may use {} (SLABWISE_MEM_FRACTION) and uses {} of them, of which {} by sessions",
            self.name,
            Bytes(total),
            Bytes(free),
            Bytes(usage.limit),
            Bytes(usage.reserved),
            Bytes(usage.used)
        );
        Error::OutOfMemory {
            what: purpose.into(),
            bytes: Bytes(bytes),
            more,
        }
    }

    /// Fails if a run that is done met a value out of range, or with the pending error; either is
    /// reported once.
    pub fn faults(&self) -> Result<()> {
        if let Some(error) = self
            .pending
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take()
        {
            return Err(error);
        }
        let Some(found) = self.device.fault() else {
            return Ok(());
        };
        self.device.clear_fault().map_err(|e| self.error(e))?;
        let (checks, env) = self
            .running
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone();
        let check = checks
            .iter()
            .find(|check| check.step == found.step)
            .ok_or_else(|| Error::Internal("a fault that no kernel looks for".into()))?;
        Err(check.fault(u64::from(found.position), i64::from(found.value), &env))
    }

    /// The checks and sizes of the program that faults are reported for.
    fn running(&mut self) -> &mut (Arc<[Check]>, Env) {
        self.running
            .get_mut()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Launches a kernel.
    fn launch(&mut self, loaded: &Loaded, call: &Call<'_>) -> Result<()> {
        let Call {
            step,
            kernel,
            arguments,
            workspace,
            sizes,
            ..
        } = *call;
        let kernel = cuda_kernel(step, kernel)?;
        within(&kernel.spec, arguments, sizes)?;
        let launch = Launch {
            step,
            kernel: &kernel.lowered,
            arguments,
            workspace,
        };
        let launched = self.device.launch(&loaded.program, sizes, &launch);
        launched.map_err(|e| self.error(e))
    }
}

/// The CUDA kernel of a step.
fn cuda_kernel(step: usize, kernel: &super::Kernel) -> Result<&Kernel> {
    if let super::Kernel::Cuda(kernel) = kernel {
        Ok(kernel)
    } else {
        Err(Error::Internal(format!(
            "kernel {step} was prepared for another device"
        )))
    }
}

impl Backend for Gpu {
    fn capabilities(&self) -> Capabilities {
        CAPABILITIES
    }

    fn target(&self, _config: Config, room: Option<u64>) -> super::Target {
        super::Target::Cuda(Target {
            target: self.device.properties().target,
            tuner: self.tuner(room),
            modelled: Arc::default(),
        })
    }

    fn source(&mut self) -> &mut dyn Source {
        self
    }

    /// Sets the limits of the device's memory, unless some of it is in use already.
    fn configure(&mut self, config: &MemoryConfig) -> Result<()> {
        self.device.set_limits(limits(config)?);
        check_pages(&self.device, &self.name, config)
    }

    fn reserved_bytes(&self) -> u64 {
        self.device.usage().reserved
    }

    fn reserve(&mut self, bytes: u64, purpose: &str) -> Result<Region> {
        self.device.reserve(bytes).map_err(|e| match e {
            DriverError::OutOfMemory { .. } => self.out_of_memory(purpose, bytes),
            other => self.error(other),
        })
    }

    fn release(&mut self, arena: u32) {
        self.device.release(arena);
    }

    fn copy(&mut self, from: &Region, to: &Region) -> Result<()> {
        self.device.copy(from, to).map_err(|e| self.error(e))
    }

    fn fill(&mut self, region: &Region, byte: u8) -> Result<()> {
        self.device.fill(region, byte).map_err(|e| self.error(e))
    }

    fn download(&self, region: &Region) -> Result<(Memory, Region)> {
        let (mut memory, own) = scratch(region.bytes)?;
        self.device
            .read(region, memory.bytes_mut(&own))
            .map_err(|e| self.error(e))?;
        self.faults()?;
        Ok((memory, own))
    }

    fn map_write(
        &mut self,
        region: &Region,
        change: &mut dyn FnMut(&mut Memory, &Region),
    ) -> Result<()> {
        let (mut memory, own) = scratch(region.bytes)?;
        change(&mut memory, &own);
        self.device
            .write(region, memory.bytes(&own))
            .map_err(|e| self.error(e))
    }

    fn read_i32(&self, region: &Region) -> Result<i32> {
        // The fault record is known once the work launched before is done.
        self.device.look_for_faults().map_err(|e| self.error(e))?;
        let (memory, region) = self.download(region)?;
        Ok(memory.elements::<i32>(&region)[0])
    }

    fn begin_inputs(&mut self) -> Result<()> {
        self.faults()?;
        if std::mem::replace(&mut self.in_inputs, true) {
            // A run that was refused half-way may not have sent its sizes.
            self.published = None;
        }
        self.device.begin_staging().map_err(|e| self.error(e))
    }

    fn upload(&mut self, region: &Region, write: &mut dyn FnMut(&mut [u8])) -> Result<()> {
        self.device.stage(region, write).map_err(|e| self.error(e))
    }

    fn publish(&mut self, region: &Region, sizes: &Env) -> Result<()> {
        self.running().1 = *sizes;
        if self.published.replace(*sizes) == Some(*sizes) {
            // The device has them since the last run.
            return Ok(());
        }
        self.upload(region, &mut |bytes| write_sizes(bytes, sizes))
    }

    fn end_inputs(&mut self) -> Result<()> {
        self.in_inputs = false;
        self.device.end_staging().map_err(|e| self.error(e))
    }

    fn staging_bytes_for(&self, input: u64) -> u64 {
        slabwise_cuda::staging_bytes(input)
    }

    fn set_staging(&mut self, bytes: u64) -> Result<bool> {
        self.device.set_staging(bytes).map_err(|e| self.error(e))
    }

    fn staging(&self) -> (u64, u64) {
        (self.device.staging(), self.device.landed())
    }

    fn load(&mut self, request: &LoadRequest<'_>) -> Result<Option<Loaded>> {
        self.load_program(request).map(Some)
    }

    fn start(&mut self, loaded: Option<&Loaded>, sizes: &Env) -> Result<()> {
        let Some(loaded) = loaded else {
            return Ok(());
        };
        let checks = &self.running().0;
        let other = !checks.is_empty() && !Arc::ptr_eq(checks, &loaded.checks);
        if other {
            // Faults of the other program are reported by its own checks.
            Backend::synchronize(self)?;
        }
        *self.running() = (loaded.checks.clone(), *sizes);
        Ok(())
    }

    fn run(&mut self, call: &Call<'_>) -> Result<Result<(), Fault>> {
        match (&mut self.recording, call.loaded) {
            (Some(steps), _) => steps.push(Recorded::Run {
                step: call.step,
                arguments: call.arguments.into(),
                workspace: call.workspace,
            }),
            (None, Some(loaded)) => self.launch(loaded, call)?,
            (None, None) => return Err(Error::Internal("a program is not loaded".into())),
        }
        Ok(Ok(()))
    }

    fn end_run(&mut self, loaded: Option<&Loaded>) -> Result<()> {
        let Some(loaded) = loaded else {
            return Ok(());
        };
        let ended = self.device.end_launches(!loaded.checks.is_empty());
        ended.map_err(|e| self.error(e))
    }

    fn replay(&mut self, loaded: &Loaded, run: &Bindings<'_>) -> Result<Replay> {
        self.replay_run(loaded, run)
    }

    fn begin_recording(&mut self) {
        self.recording = Some(Vec::new());
    }

    fn end_recording(
        &mut self,
        loaded: &Loaded,
        run: &Bindings<'_>,
        recorded: Result<()>,
    ) -> Result<bool> {
        let steps = self.recording.take().unwrap_or_default();
        recorded?;
        self.record(loaded, run, &steps)
    }

    fn defer(&self, error: Error) {
        self.pending
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .get_or_insert(error);
    }

    /// Waits until all runs are done, and fails if one did.
    fn synchronize(&self) -> Result<()> {
        self.device.synchronize().map_err(|e| self.error(e))?;
        self.faults()
    }

    fn begin_marks(&mut self) -> bool {
        self.device.begin_marks();
        true
    }

    fn mark(&mut self) -> Result<()> {
        self.device.mark().map_err(|e| self.error(e))
    }

    fn marks(&self) -> Result<Vec<f64>> {
        self.device.marks().map_err(|e| self.error(e))
    }

    fn roofline(&self, tf32: bool, _team: &Team) -> Option<Roofline> {
        let device = &self.device.properties().description;
        let f32 = device.f32_peak();
        let product = if tf32 { device.tf32_peak() } else { f32 };
        Some(Roofline {
            flops: [product, device.half_peak(), f32],
            bytes: 1e9 * device.bandwidth.memory,
            source: device.to_string(),
        })
    }

    fn saved(&self, path: &Path) {
        *self.saved.lock().unwrap_or_else(PoisonError::into_inner) = Some(path.into());
    }

    /// Reserves pinned memory of the host.
    fn reserve_host(&mut self, bytes: u64, purpose: &str) -> Result<Region> {
        self.device.reserve_host(bytes).map_err(|e| match &e {
            DriverError::OutOfMemory { .. } => not_pinned(purpose, bytes, None),
            // The operating system's refusal has another code.
            DriverError::Failed { call, .. } if *call == "cuMemHostAlloc" => {
                not_pinned(purpose, bytes, Some(&e))
            }
            _ => self.error(e),
        })
    }

    fn prepare_copies(&mut self, most: usize) -> Result<()> {
        self.device.prepare_copies(most).map_err(|e| self.error(e))
    }

    fn start_copy(&mut self, copy: usize, from: &Region, to: &Region) -> Result<Option<Ticket>> {
        if let Some(steps) = &mut self.recording {
            steps.push(Recorded::Start {
                copy,
                from: *from,
                to: *to,
            });
            return Ok(None);
        }
        let started = self.device.start_copy(copy, from, to);
        started.map(|()| None).map_err(|e| self.error(e))
    }

    fn finish_copy(&mut self, copy: usize, _ticket: Option<Ticket>) -> Result<()> {
        if let Some(steps) = &mut self.recording {
            steps.push(Recorded::Finish(copy));
            return Ok(());
        }
        self.device.finish_copy(copy).map_err(|e| self.error(e))
    }

    /// Waits until no copy is in flight. If the device is lost, none is.
    fn finish_transfers(&mut self, _transport: Option<&dyn Transport>) {
        let _ = self.device.settle_copies();
    }

    fn open_queue(&mut self, region: &Region, slots: usize, _copies: usize) -> Result<usize> {
        self.device
            .open_queue(*region, slots)
            .map_err(|e| self.error(e))
    }

    fn fill_slot(&mut self, slot: Slot, writer: &mut dyn SlotWriter) -> Result<Option<Ticket>> {
        let write = |bytes: &mut [u8]| writer.write(bytes);
        let sent = self
            .device
            .send_ahead(slot.queue, slot.number as usize, write);
        sent.map_err(|e| self.error(e))?.map(|()| None)
    }

    fn take_slot(
        &mut self,
        slot: Slot,
        _ticket: Option<Ticket>,
        parts: &mut dyn Iterator<Item = (u64, Region)>,
    ) -> Result<()> {
        self.device
            .take_ahead(slot.queue, slot.number as usize, parts)
            .map_err(|e| self.error(e))
    }
}

impl Check {
    /// The error for a value that is out of range.
    pub fn fault(&self, position: u64, value: i64, env: &Env) -> Error {
        let limit = u64::try_from(self.limit.at(env)).unwrap_or(0);
        let message = super::describe(
            Fault::Index {
                position,
                value,
                limit,
            },
            self.kind,
            &self.of,
        );
        Error::Data {
            mistake: Mistake {
                message,
                ..self.mistake.clone()
            },
        }
    }
}

/// The error for memory of the host that the system does not pin, with the driver's reason where it
/// is more than a lack of memory.
fn not_pinned(what: &str, bytes: u64, why: Option<&DriverError>) -> Error {
    let why = why.map_or(String::new(), |why| format!(": {why}"));
    Error::OutOfMemory {
        what: what.into(),
        bytes: Bytes(bytes),
        more: format!(
            ": it is memory of the host, which its system refuses to pin{why}; raise the limit of locked \
             memory (ulimit -l) or bound the offload by Offload::with_host_bytes"
        ),
    }
}

/// The limits of a device's memory by a configuration.
fn limits(config: &MemoryConfig) -> Result<Limits> {
    let settings = config.resolve().map_err(|e| Error::Value(e.to_string()))?;
    Ok(Limits {
        fraction: settings.fraction.unwrap_or(0.75),
        bytes_max: settings.limit,
        // A device may be shared, so memory is reserved at once unless pages are to be mapped
        // later: pages of a reservation stay at their addresses.
        preallocate: settings
            .preallocate
            .unwrap_or(settings.policy != Some(Policy::Vmm)),
    })
}

/// Fails if a pool that maps pages is requested, and the device cannot map pages.
fn check_pages(device: &Device, name: &str, config: &MemoryConfig) -> Result<()> {
    let settings = config.resolve().map_err(|e| Error::Value(e.to_string()))?;
    if settings.policy != Some(Policy::Vmm) {
        return Ok(());
    }
    let refused = |why: &str| {
        let why = format!(
            "the allocator vmm (SLABWISE_ALLOCATOR) maps memory page by page, and {why}; use pool, platform or async"
        );
        Err(Error::Device {
            device: name.into(),
            why,
        })
    };
    if !device.properties().maps_pages {
        return refused("this device cannot");
    }
    if settings.preallocate == Some(true) {
        return refused("nothing is left to map where all is preallocated (SLABWISE_PREALLOCATE)");
    }
    match device.has_ranges() {
        Ok(true) => Ok(()),
        Ok(false) => refused(
            "the driver refuses to, or another session of this process has preallocated all (SLABWISE_PREALLOCATE)",
        ),
        Err(e) => Err(Error::Device {
            device: name.into(),
            why: e.to_string(),
        }),
    }
}

/// Fails if a kernel reaches beyond its arguments' regions, which the CPU's kernels check at each
/// run too.
fn within(spec: &Spec, arguments: &[Region], env: &Env) -> Result<()> {
    for (at, ((operand, dims, _), region)) in spec.arguments().iter().zip(arguments).enumerate() {
        let needed = operand
            .extent(dims, env)
            .saturating_mul(operand.dtype.bytes() as u64);
        if needed > region.bytes {
            return Err(Error::Internal(format!(
                "argument {at} reaches {needed} bytes of a region of {}",
                region.bytes
            )));
        }
    }
    Ok(())
}
