//! Loading: a program's kernels are compiled and loaded once, before its first run.

use std::path::Path;
use std::sync::Arc;

use slabwise_cuda::{LoadError, Lowered, Program};
use slabwise_kernels::dtype::DType;
use slabwise_kernels::size::Env;

use super::dependencies::dependencies;
use super::fusion::{Group, groups};
use super::{Gpu, cuda_kernel, dump};
use crate::backend::{Check, Kernel, LoadRequest, Resources};
use crate::error::{Error, Result};
use crate::settings;

/// The kernels of a compiled program on the device.
pub struct Loaded {
    /// Its steps are those of the program, then the groups.
    pub(super) program: Program,
    pub(super) checks: Arc<[Check]>,
    pub(super) groups: Vec<Group>,
    /// The launches that each launch of a recorded run depends on; `None` if they run one after the
    /// other.
    pub(super) after: Option<Vec<Vec<u32>>>,
    /// The kernels by step; none for half of a copy.
    pub(super) kernels: Vec<Option<Arc<Kernel>>>,
}

impl Gpu {
    /// Compiles and loads a program's kernels, one for each step, and those of horizontally fused
    /// steps; and prepares for its inputs.
    pub(super) fn load_program(&mut self, request: &LoadRequest<'_>) -> Result<Loaded> {
        let groups = if request.horizontal_fusion {
            groups(request, self.device.properties().target)?
        } else {
            Vec::new()
        };
        // Half of a copy runs no function.
        let none = Lowered::new(Vec::new(), 0, |_| Vec::new());
        let kernels = (0..).zip(&request.steps).map(|(at, step)| {
            let kernel = step.kernel.map(|kernel| cuda_kernel(at, kernel));
            kernel.transpose()
        });
        let kernels: Vec<_> = kernels.collect::<Result<_>>()?;
        if let Some(folder) = settings::variable(settings::DUMP) {
            dump::write(Path::new(&folder), self, request, &groups)?;
        }
        let after = if self.overlap.branches {
            dependencies(request, &groups)
        } else {
            None
        };
        self.device.prepare_faults().map_err(|e| self.error(e))?;
        let all: Vec<&Lowered> = kernels
            .iter()
            .map(|kernel| kernel.map_or(&none, |kernel| &kernel.lowered))
            .chain(groups.iter().map(|group| &group.kernel))
            .collect();
        let program = self.device.load(&all).map_err(|e| match e {
            LoadError::Driver(e) => self.error(e),
            other => Error::Device {
                device: self.name.clone(),
                why: format!("\"{}\": {other}", request.name),
            },
        })?;
        let checks = request.steps.iter().filter_map(|step| step.check.clone());
        let loaded = Loaded {
            program,
            checks: checks.collect(),
            groups,
            after,
            kernels: request
                .steps
                .iter()
                .map(|step| step.kernel.cloned())
                .collect(),
        };
        let bytes = usize::try_from(request.input_bytes).unwrap_or(usize::MAX);
        self.device
            .prepare_staging(bytes)
            .map_err(|e| self.error(e))?;
        Ok(loaded)
    }
}

impl Loaded {
    /// The resources that a kernel's functions use.
    pub fn resources(&self, kernel: &Kernel) -> Vec<Resources> {
        let Kernel::Cuda(kernel) = kernel else {
            return Vec::new();
        };
        let used = kernel
            .lowered
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

    /// Looks for values out of range in an input before it is sent to the device, so that a run
    /// fails before it begins.
    pub fn check_input(&self, input: usize, dtype: DType, bytes: &[u8], env: &Env) -> Result<()> {
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
            let fault =
                (0..bytes.len() / dtype.bytes()).find(|&at| !(0..limit).contains(&index(at)));
            if let Some(at) = fault {
                return Err(check.fault(at as u64, index(at), env));
            }
        }
        Ok(())
    }
}
