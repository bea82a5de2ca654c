//! A CUDA device in use by a session.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use slabwise_cuda::compiler::Compiler;
use slabwise_cuda::driver::DriverError;
use slabwise_cuda::{Device, Launch, Limits, Lowered, Overlap, Picks, Program, Run, Tuner, Work};
use slabwise_kernels::cpu::Fault;
use slabwise_kernels::dtype::DType;
use slabwise_kernels::memory::{Memory, Region};
use slabwise_kernels::size::{Env, Size};
use slabwise_kernels::spec::Spec;
use slabwise_planner::Bytes;

use super::{Kernel, Resources, scratch};
use crate::error::{Error, Mistake, Result};
use crate::memory::{MemoryConfig, MemoryInfo, Policy, Range};
use crate::settings::{AUTOTUNE, BRANCHES, CUDNN, EARLY_LAUNCH, GRAPHS, switch, threads};

/// A kernel that looks for indices out of range.
#[derive(Clone, Debug)]
pub(crate) struct Check {
    /// Where the user asked for it; its message is filled in.
    pub mistake: Mistake,
    /// The step that looks.
    pub step: u32,
    /// Whose indices they are.
    pub of: String,
    /// Whether the index is a length that the run asks for.
    pub kind: super::CheckKind,
    /// One more than the largest index allowed.
    pub limit: Size,
    /// The input that holds the indices, all of it, if there is one: then the host looks before
    /// anything runs.
    pub input: Option<usize>,
}

/// Steps of a program that a recorded run does by one kernel, when the last of them has its turn.
pub(crate) struct Group {
    /// The steps, ascending.
    pub members: Vec<usize>,
    /// All of them, with the arguments of one after those of the other.
    pub kernel: Lowered,
}

/// What the kernels of a compiled program became on the device.
pub(crate) struct Loaded {
    /// Its steps are those of the program, then the groups.
    pub program: Program,
    pub checks: Arc<[Check]>,
    groups: Vec<Group>,
    /// The launches that each launch of a recorded run waits for; `None` if they run one after the
    /// other.
    after: Option<Vec<Vec<u32>>>,
}

/// A step of a run that is recorded.
pub(crate) enum Recorded<'a> {
    /// A kernel, its arguments and its workspace.
    Run(&'a Kernel, Vec<Region>, Region),
    /// The copy of this number starts: from where, to where.
    Start(usize, Region, Region),
    /// The copy of this number is waited for.
    Finish(usize),
}

/// The device, and what was asked of it lately.
pub(crate) struct Gpu {
    pub device: Device,
    name: String,
    /// The checks of the program that ran last, and its sizes.
    running: Mutex<(Arc<[Check]>, Env)>,
    saved: Mutex<Option<PathBuf>>,
    /// What somebody found who could not tell.
    untold: Mutex<Option<Error>>,
    /// Whether runs are recorded as graphs.
    pub graphs: bool,
    /// How much of a graph's work may overlap.
    pub overlap: Overlap,
    ordinal: u32,
    /// Whether products are timed.
    tunes: bool,
    /// Whether cuDNN is asked for convolutions.
    cudnn: bool,
    /// The sizes of the last run, which lie on the device.
    pub published: Option<Env>,
    /// Whether inputs are being put in place.
    placing: bool,
}

impl Gpu {
    pub fn open(ordinal: u32, config: &MemoryConfig) -> Result<Gpu> {
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
        let (saved, untold) = (Mutex::default(), Mutex::default());
        Ok(Gpu {
            device,
            name,
            running,
            saved,
            untold,
            graphs,
            overlap,
            ordinal,
            tunes,
            cudnn,
            published: None,
            placing: false,
        })
    }

    /// Limits of the device's memory, unless some of it is in use already.
    pub fn configure(&mut self, config: &MemoryConfig) -> Result<()> {
        self.device.set_limits(limits(config)?);
        check_pages(&self.device, &self.name, config)
    }

    /// Keeps an error for whoever asks next.
    pub fn keep(&self, error: Error) {
        self.untold
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .get_or_insert(error);
    }

    pub fn target(&self) -> slabwise_cuda::Target {
        self.device.properties().target
    }

    /// Who times products, if they are timed, in at most so many bytes.
    pub fn tuner(&self, room: Option<u64>) -> Option<Tuner> {
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

    /// The error that a driver's is to a user.
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

    /// The bill: what was asked for, and who has the rest.
    fn out_of_memory(&self, what: &str, bytes: u64) -> Error {
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
            what: what.into(),
            bytes: Bytes(bytes),
            more,
        }
    }

    pub fn reserve(&mut self, bytes: u64, what: &str) -> Result<Region> {
        self.device.reserve(bytes).map_err(|e| match e {
            DriverError::OutOfMemory { .. } => self.out_of_memory(what, bytes),
            other => self.error(other),
        })
    }

    /// Pinned memory of the host.
    pub fn reserve_host(&mut self, bytes: u64, what: &str) -> Result<Region> {
        self.device.reserve_host(bytes).map_err(|e| match e {
            DriverError::OutOfMemory { .. } => pinned(what, bytes),
            other => self.error(other),
        })
    }

    pub fn prepare_copies(&mut self, most: usize) -> Result<()> {
        self.device.prepare_copies(most).map_err(|e| self.error(e))
    }

    pub fn start_copy(&self, copy: usize, from: &Region, to: &Region) -> Result<()> {
        self.device
            .start_copy(copy, from, to)
            .map_err(|e| self.error(e))
    }

    pub fn finish_copy(&self, copy: usize) -> Result<()> {
        self.device.finish_copy(copy).map_err(|e| self.error(e))
    }

    pub fn open_ring(&mut self, region: &Region, slots: usize) -> Result<usize> {
        self.device.open_ring(*region, slots).map_err(|e| match e {
            DriverError::OutOfMemory { bytes } => pinned("slots of inputs", bytes),
            other => self.error(other),
        })
    }

    /// Sends what `write` writes ahead, to a slot.
    pub fn send_ahead(
        &mut self,
        ring: usize,
        slot: u64,
        write: impl FnOnce(&mut [u8]) -> Result<()>,
    ) -> Result<()> {
        let sent = self.device.send_ahead(ring, slot as usize, write);
        sent.map_err(|e| self.error(e))?
    }

    /// Moves parts of what arrived in a slot to where runs read them.
    pub fn take_ahead(
        &mut self,
        ring: usize,
        slot: u64,
        parts: impl Iterator<Item = (u64, Region)>,
    ) -> Result<()> {
        self.device
            .take_ahead(ring, slot as usize, parts)
            .map_err(|e| self.error(e))
    }

    /// Waits until nothing is under way. If the device is lost, nothing is.
    pub fn settle_copies(&self) {
        let _ = self.device.settle_copies();
    }

    /// Addresses for a pool of so many bytes, if its pages can be mapped by themselves.
    pub fn range(&mut self, bytes: u64) -> Option<Range> {
        match self.device.range(Range::addresses(bytes, 1, true)) {
            Ok(range) => range.map(|(arena, page)| Range {
                arena,
                page,
                pages_move: true,
            }),
            Err(e) => {
                log::warn!(
                    "{}: no addresses for a pool of {}: {e}; it takes arenas instead",
                    self.name,
                    Bytes(bytes)
                );
                None
            }
        }
    }

    pub fn info(&self) -> MemoryInfo {
        let (free, total) = self.device.memory().unwrap_or_default();
        MemoryInfo { free, total }
    }

    pub fn copy(&self, from: &Region, to: &Region) -> Result<()> {
        self.device.copy(from, to).map_err(|e| self.error(e))
    }

    pub fn fill(&self, region: &Region, byte: u8) -> Result<()> {
        self.device.fill(region, byte).map_err(|e| self.error(e))
    }

    /// A region's bytes in memory of the host, once all runs are done.
    pub fn fetch(&self, region: &Region) -> Result<(Memory, Region)> {
        let (mut memory, own) = scratch(region.bytes)?;
        self.device
            .read(region, memory.bytes_mut(&own))
            .map_err(|e| self.error(e))?;
        self.faults()?;
        Ok((memory, own))
    }

    pub fn edit(
        &mut self,
        region: &Region,
        change: impl FnOnce(&mut Memory, &Region),
    ) -> Result<()> {
        let (mut memory, own) = scratch(region.bytes)?;
        change(&mut memory, &own);
        self.device
            .write(region, memory.bytes(&own))
            .map_err(|e| self.error(e))
    }

    /// Fails if a run has met an index out of range, as far as runs are done; and forgets it then.
    pub fn faults(&self) -> Result<()> {
        if let Some(error) = self
            .untold
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

    /// Waits until all runs are done, and fails if one did.
    pub fn settle(&self) -> Result<()> {
        self.device.synchronize().map_err(|e| self.error(e))?;
        self.faults()
    }

    /// Makes room for this many bytes of inputs in the host's memory.
    pub fn prepare_inputs(&mut self, bytes: u64) -> Result<()> {
        let bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
        self.device
            .prepare_staging(bytes)
            .map_err(|e| self.error(e))
    }

    /// Makes the place for large inputs on their way this large, if the device has so much memory;
    /// else there is none.
    pub fn set_landing(&mut self, bytes: u64) -> Result<bool> {
        self.device.set_landing(bytes).map_err(|e| self.error(e))
    }

    pub fn mark(&mut self) -> Result<()> {
        let marked = self.device.mark();
        marked.map_err(|e| self.error(e))
    }

    pub fn marks(&self) -> Result<Vec<f64>> {
        self.device.marks().map_err(|e| self.error(e))
    }

    pub fn begin_inputs(&mut self) -> Result<()> {
        self.faults()?;
        if std::mem::replace(&mut self.placing, true) {
            // A run that was refused half-way may not have sent its sizes.
            self.published = None;
        }
        self.device.begin_staging().map_err(|e| self.error(e))
    }

    pub fn input(&mut self, region: &Region, write: &mut dyn FnMut(&mut [u8])) -> Result<()> {
        self.device.stage(region, write).map_err(|e| self.error(e))
    }

    pub fn end_inputs(&mut self) -> Result<()> {
        self.placing = false;
        self.device.end_staging().map_err(|e| self.error(e))
    }

    /// Compiles and loads a program's kernels, one for each step, and those of steps that are done
    /// together.
    pub fn load(
        &mut self,
        name: &str,
        kernels: &[&Lowered],
        groups: Vec<Group>,
        after: Option<Vec<Vec<u32>>>,
        checks: Vec<Check>,
    ) -> Result<Loaded> {
        use slabwise_cuda::LoadError;
        self.device.prepare_faults().map_err(|e| self.error(e))?;
        let all: Vec<&Lowered> = kernels
            .iter()
            .copied()
            .chain(groups.iter().map(|group| &group.kernel))
            .collect();
        let program = self.device.load(&all).map_err(|e| match e {
            LoadError::Driver(e) => self.error(e),
            other => Error::Device {
                device: self.name.clone(),
                why: format!("\"{name}\": {other}"),
            },
        })?;
        Ok(Loaded {
            program,
            checks: checks.into(),
            groups,
            after,
        })
    }

    /// The sizes of the run whose faults are met from here on.
    pub fn note_sizes(&mut self, sizes: &Env) {
        self.running
            .get_mut()
            .unwrap_or_else(PoisonError::into_inner)
            .1 = *sizes;
    }

    /// Asks for what was found out of range by all that was asked for until now; it is known once
    /// that is done.
    pub fn look_for_faults(&self) -> Result<()> {
        self.device.look_for_faults().map_err(|e| self.error(e))
    }

    /// Makes a program the one whose faults are met from here on.
    pub fn start(&mut self, loaded: &Loaded, env: &Env) -> Result<()> {
        let other = {
            let running = self
                .running
                .get_mut()
                .unwrap_or_else(PoisonError::into_inner);
            !running.0.is_empty() && !Arc::ptr_eq(&running.0, &loaded.checks)
        };
        if other {
            // What the runs of the other program met is told by its own lines.
            self.settle()?;
        }
        *self
            .running
            .get_mut()
            .unwrap_or_else(PoisonError::into_inner) = (loaded.checks.clone(), *env);
        Ok(())
    }

    pub fn launch(
        &mut self,
        loaded: &Loaded,
        (step, spec, kernel): (usize, &Spec, &Lowered),
        arguments: &[Region],
        workspace: &Region,
        env: &Env,
    ) -> Result<()> {
        within(spec, arguments, env)?;
        let launch = Launch {
            step,
            kernel,
            arguments,
            workspace: *workspace,
        };
        let launched = self.device.launch(&loaded.program, env, &launch);
        launched.map_err(|e| self.error(e))
    }

    /// Ends a run that was launched kernel by kernel.
    pub fn end_launches(&mut self, loaded: &Loaded) -> Result<()> {
        let ended = self.device.end_launches(!loaded.checks.is_empty());
        ended.map_err(|e| self.error(e))
    }

    /// Fails if one of a run's kernels would be refused when it is asked for.
    pub fn foresee<'a>(&self, kernels: impl Iterator<Item = &'a Kernel>, env: &Env) -> Result<()> {
        let lowered = kernels.filter_map(|kernel| {
            if let Kernel::Cuda(_, lowered) = kernel {
                Some(lowered)
            } else {
                None
            }
        });
        self.device.foresee(lowered, env).map_err(|e| self.error(e))
    }

    /// Does a whole run by one call, if it has been recorded under this key.
    pub fn replay(&mut self, loaded: &Loaded, key: &[u64]) -> Result<bool> {
        let replayed = self.device.replay(&loaded.program, key);
        replayed.map_err(|e| self.error(e))
    }

    /// Records a run.
    pub fn record(
        &mut self,
        loaded: &Loaded,
        key: &[u64],
        env: &Env,
        steps: &[Recorded<'_>],
    ) -> Result<()> {
        let arguments = |&step: &usize| {
            if let Recorded::Run(_, arguments, _) = &steps[step] {
                &arguments[..]
            } else {
                &[]
            }
        };
        let all = |group: &Group| group.members.iter().flat_map(arguments).copied().collect();
        let together: Vec<Vec<Region>> = loaded.groups.iter().map(all).collect();
        let mut work = Vec::with_capacity(steps.len());
        for (step, recorded) in steps.iter().enumerate() {
            match recorded {
                Recorded::Run(Kernel::Cuda(spec, kernel), arguments, workspace) => {
                    within(spec, arguments, env)?;
                    let workspace = *workspace;
                    let group = loaded
                        .groups
                        .iter()
                        .position(|group| group.members.contains(&step));
                    match group.map(|g| (g, &loaded.groups[g])) {
                        None => work.push(Work::Launch(Launch {
                            step,
                            kernel,
                            arguments,
                            workspace,
                        })),
                        Some((g, group)) if group.members.last() == Some(&step) => {
                            let (step, kernel, arguments) =
                                (steps.len() + g, &group.kernel, &together[g][..]);
                            work.push(Work::Launch(Launch {
                                step,
                                kernel,
                                arguments,
                                workspace,
                            }));
                        }
                        Some(_) => {}
                    }
                }
                Recorded::Run(..) => {
                    return Err(Error::Internal(format!(
                        "kernel {step} was prepared for another device"
                    )));
                }
                Recorded::Start(copy, from, to) => work.push(Work::Start {
                    copy: *copy,
                    from: *from,
                    to: *to,
                }),
                Recorded::Finish(copy) => work.push(Work::Finish(*copy)),
            }
        }
        let run = Run {
            key,
            env,
            checked: !loaded.checks.is_empty(),
            after: loaded.after.as_deref(),
            early: self.overlap.launches,
        };
        let recorded = self.device.record(&loaded.program, &run, work.into_iter());
        recorded.map_err(|e| self.error(e))
    }

    pub fn saved(&self, path: &Path) {
        *self.saved.lock().unwrap_or_else(PoisonError::into_inner) = Some(path.into());
    }
}

impl Loaded {
    /// What a kernel's functions use.
    pub fn resources(&self, kernel: &Kernel) -> Vec<Resources> {
        let Kernel::Cuda(_, lowered) = kernel else {
            return Vec::new();
        };
        let used = lowered
            .functions
            .iter()
            .filter_map(|f| self.program.usage(&f.name));
        let of = |u: &slabwise_cuda::nvrtc::Usage| Resources {
            function: u.name.clone(),
            registers: u.registers,
            spill_bytes: u.spill_bytes,
            shared_bytes: u.shared_bytes,
        };
        used.map(of).collect()
    }

    /// Looks for indices out of range in an input on its way to the device, so that a run fails
    /// before it begins.
    pub fn look_at_input(&self, input: usize, dtype: DType, bytes: &[u8], env: &Env) -> Result<()> {
        for check in self
            .checks
            .iter()
            .filter(|check| check.input == Some(input))
        {
            let limit = check.limit.at(env);
            let index = |at: usize| match dtype {
                DType::I32 => bytes[4 * at..]
                    .first_chunk()
                    .map_or(0, |b| i64::from(i32::from_ne_bytes(*b))),
                _ => i64::from(bytes[at]),
            };
            let found =
                (0..bytes.len() / dtype.bytes()).find(|&at| !(0..limit).contains(&index(at)));
            if let Some(at) = found {
                return Err(check.fault(at as u64, index(at), env));
            }
        }
        Ok(())
    }
}

impl Check {
    /// The error for an index that is out of range.
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

/// The error for memory of the host that its system does not pin.
fn pinned(what: &str, bytes: u64) -> Error {
    Error::OutOfMemory {
        what: what.into(),
        bytes: Bytes(bytes),
        more: ": it is memory of the host, and its system pins no more".into(),
    }
}

/// What a configuration says of a device's memory.
fn limits(config: &MemoryConfig) -> Result<Limits> {
    let settings = config.resolve().map_err(|e| Error::Value(e.to_string()))?;
    Ok(Limits {
        fraction: settings.fraction.unwrap_or(0.75),
        bytes_max: settings.limit,
        // On a device that others may use too it is better to know at once; but what is taken is
        // behind addresses for good.
        preallocate: settings
            .preallocate
            .unwrap_or(settings.policy != Some(Policy::Vmm)),
    })
}

/// Whether the device can do what a pool that maps its pages itself needs, if one is asked for.
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
        Ok(false) => {
            refused("another session of this process has preallocated all (SLABWISE_PREALLOCATE)")
        }
        Err(e) => Err(Error::Device {
            device: name.into(),
            why: e.to_string(),
        }),
    }
}

/// Whether all that a kernel reaches lies in its arguments' regions, as the CPU's kernels make sure
/// of at each run.
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
