//! Runs on a CUDA device: a program's kernels loaded once, runs whose sizes come again recorded as
//! graphs and done again.

use std::path::Path;

use slabwise_cuda::Lowered;
use slabwise_kernels::memory::Region;
use slabwise_kernels::size::Env;
use slabwise_kernels::spec::{Body, Operand};
use smallvec::SmallVec;

use super::dependencies::dependencies;
use super::together::groups;
use super::{Session, dump};
use crate::backend::{Backend, Check, Kernel, Recorded};
use crate::error::{Error, Mistake, Result};
use crate::program::{Compiled, Place, Work};
use crate::settings;

impl Session {
    /// Compiles and loads a program's kernels, and makes room for its inputs on their way, if this
    /// session's device wants that.
    pub(crate) fn load_program(&mut self, inner: &mut Compiled) -> Result<()> {
        self.reserve_sizes()?;
        let Backend::Cuda(gpu) = &mut self.memory else {
            return Ok(());
        };
        let groups = if self.options.ungrouped {
            Vec::new()
        } else {
            groups(inner, gpu.target())?
        };
        // Half of a copy runs no function.
        let none = Lowered::new(Vec::new(), 0, |_| Vec::new());
        let mut kernels = Vec::with_capacity(inner.steps.len());
        let mut checks = Vec::new();
        for (at, step) in inner.steps.iter().enumerate() {
            let (spec, kernel) = match step.kernel() {
                Some(Kernel::Cuda(spec, kernel)) => (spec, kernel),
                Some(_) => {
                    return Err(Error::Internal(format!(
                        "{} was prepared for another device",
                        step.name
                    )));
                }
                None => {
                    kernels.push(&none);
                    continue;
                }
            };
            kernels.push(kernel);
            if let Body::CheckIndex(check) = &spec.body {
                let mistake = Mistake {
                    location: step.origin.location,
                    layer: step.origin.layer.to_string(),
                    message: String::new(),
                };
                let whole = Operand::contiguous(check.index.dtype, &spec.dims).as_ref()
                    == Some(&check.index);
                let input = match step.places[0] {
                    Place::Planned(buffer) if whole => inner.inputs.iter().position(|i| {
                        i.buffer == Some(buffer)
                            && crate::shape::elements(&i.dims) == crate::shape::elements(&spec.dims)
                    }),
                    _ => None,
                };
                let of = inner.indices_of(at).to_string();
                checks.push(Check {
                    mistake,
                    step: at as u32,
                    of,
                    kind: step.checks(),
                    limit: check.limit,
                    input,
                });
            }
        }
        if let Some(folder) = settings::variable(settings::DUMP) {
            dump::write(Path::new(&folder), gpu, inner, &groups)?;
        }
        let after = if gpu.overlap.branches {
            dependencies(inner, &groups)
        } else {
            None
        };
        inner.loaded = Some(gpu.load(&inner.name, &kernels, groups, after, checks)?);
        let staged: u64 = inner
            .inputs
            .iter()
            .filter_map(|i| i.buffer)
            .map(|b| inner.buffers[b].place.bytes)
            .sum();
        // Each starts at a multiple of 16 bytes.
        gpu.prepare_inputs(staged + self.sizes.bytes)
    }

    /// Does the whole run by one call, where that can be: `false` if its kernels are to be run one
    /// by one.
    pub(super) fn run_recorded(
        &mut self,
        inner: &Compiled,
        slab: Region,
        fed: &[Option<Region>],
        env: &Env,
    ) -> Result<bool> {
        self.memory.start(inner.loaded.as_ref(), env)?;
        let (Backend::Cuda(gpu), Some(loaded)) = (&mut self.memory, &inner.loaded) else {
            return Ok(false);
        };
        if self.profile.is_some()
            || self.recording.is_some()
            || inner.guard > 0
            || inner.finds
            || !gpu.graphs
        {
            return Ok(false);
        }
        let mut key: SmallVec<[u64; 24]> = env.0.iter().map(|&size| u64::from(size)).collect();
        key.push(gpu.device.address(&slab));
        // Programs that send nothing know nothing of the host's.
        let host = self.host.filter(|_| !inner.copies.is_empty());
        key.extend(host.map(|host| gpu.device.host_address(&host)));
        // What arrived ahead lies where it is planned, as what is staged does: the run is the same.
        let own = |input: usize| {
            fed.get(input)
                .copied()
                .flatten()
                .map_or(0, |region| gpu.device.address(&region))
        };
        key.extend((0..inner.inputs.len()).map(own));
        if gpu.replay(loaded, &key)? {
            return Ok(true);
        }
        if !loaded.program.is_worth_recording(&key) {
            let kernels = inner.steps.iter().filter_map(|step| step.kernel());
            return gpu.foresee(kernels, env).map(|()| false);
        }
        let host = host.unwrap_or_default();
        let whole = |b: usize| {
            let own = inner
                .inputs
                .iter()
                .position(|i| i.buffer == Some(b))
                .and_then(|i| *fed.get(i)?);
            own.unwrap_or_else(|| {
                inner.place_in(if inner.buffers[b].on_host { host } else { slab }, b)
            })
        };
        let place = |at: &Place| match *at {
            Place::Planned(b) | Place::Slice(b, _) => at.part(whole(b), env),
            Place::Variable(v) => self.variables[v].region,
            Place::Sizes => self.sizes,
        };
        let recorded = inner.steps.iter().map(|step| match &step.work {
            Work::Run(kernel) => {
                let workspace = slab.part(step.workspace.offset, step.workspace.bytes);
                Recorded::Run(kernel, step.places.iter().map(place).collect(), workspace)
            }
            Work::Start(copy) => {
                let [from, to] = inner.copy_between(*copy, env, whole);
                Recorded::Start(*copy, from, to)
            }
            Work::Finish(copy) => Recorded::Finish(*copy),
        });
        let steps: Vec<Recorded<'_>> = recorded.collect();
        gpu.record(loaded, &key, env, &steps)?;
        gpu.replay(loaded, &key)
    }
}
