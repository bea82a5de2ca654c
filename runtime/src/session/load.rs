//! Loading programs on a device, and runs that the device replays.

use slabwise_kernels::memory::Region;
use slabwise_kernels::size::Env;
use slabwise_kernels::spec::{Body, Operand};

use super::Session;
use super::steps::{Buffers, Run};
use crate::backend::{Bindings, Check, Extent, LoadRequest, LoadStep, Replay};
use crate::error::{Mistake, Result};
use crate::passes::{moved, operations};
use crate::program::{Compiled, Place, Step, Work};
use crate::settings::NanCheck;

impl Session {
    /// Loads a program's kernels, and makes room for its inputs and sizes, as far as this session's
    /// device needs that.
    pub(crate) fn load_program(&mut self, inner: &mut Compiled) -> Result<()> {
        self.memory.reserve_sizes()?;
        let bounds = inner.symbols.bounds();
        let inputs = inner.inputs.iter().filter_map(|i| i.buffer);
        let input_bytes: u64 = inputs.map(|b| inner.buffers[b].place.bytes).sum();
        let request = LoadRequest {
            name: &inner.name,
            bounds,
            steps: (0..inner.steps.len())
                .map(|at| load_step(inner, at, &bounds))
                .collect(),
            has_copies: inner.copies() > 0,
            is_dynamic: inner.has_data_dependent,
            // Each starts at a multiple of 16 bytes.
            input_bytes: input_bytes + self.memory.sizes.bytes,
            horizontal_fusion: self.options.fuse.horizontal,
        };
        inner.loaded = self.memory.backend.load(&request)?;
        Ok(())
    }

    /// Replays the whole run by one call, where that can be: `false` if its kernels are to be
    /// launched one by one.
    pub(super) fn run_recorded(
        &mut self,
        inner: &Compiled,
        slab: Region,
        fed: &[Option<Region>],
        env: &mut Env,
    ) -> Result<bool> {
        let Some(loaded) = &inner.loaded else {
            return Ok(false);
        };
        if self.execution.is_profiled()
            || self.execution.recording.is_some()
            || self.execution.nan_check != NanCheck::Off
            || inner.guard > 0
            || inner.has_data_dependent
            || !self.memory.backend.capabilities().recorded_launches
        {
            return Ok(false);
        }
        let sizes = *env;
        let bindings = Bindings {
            sizes: &sizes,
            slab,
            // Programs without copies do not depend on the host's address.
            host: self.memory.host.filter(|_| inner.copies() > 0),
            inputs: inner.inputs.len(),
            fed,
        };
        match self.memory.backend.replay(loaded, &bindings)? {
            Replay::Done => Ok(true),
            Replay::Launch => Ok(false),
            Replay::Record => {
                self.memory.backend.begin_recording();
                let buffers = Buffers::Planned {
                    slab,
                    host: self.memory.host.unwrap_or_default(),
                };
                let mut run = Run {
                    inner,
                    fed,
                    buffers,
                    recorded: true,
                };
                let recorded = self.run_steps(&mut run, env);
                self.memory
                    .backend
                    .end_recording(loaded, &bindings, recorded)
            }
        }
    }
}

/// A step as its device needs to know it.
fn load_step<'a>(inner: &'a Compiled, at: usize, bounds: &Env) -> LoadStep<'a> {
    let step = &inner.steps[at];
    let kernel = match &step.work {
        Work::Run(kernel) => Some(kernel),
        Work::Start(_) | Work::Finish(_) => None,
    };
    let extent = |place: &Place| match *place {
        Place::Planned(b) | Place::MicroBatch(b, _) => {
            let place = inner.buffers[b].place;
            Extent::Slab(place.offset, place.offset + place.bytes)
        }
        Place::Variable(v) => Extent::Variable(v),
        Place::Sizes => Extent::Sizes,
    };
    let [product, code] = kernel.map_or([0; 2], |kernel| operations(kernel.spec(), bounds));
    LoadStep {
        name: &step.name,
        kernel,
        arguments: step.places.iter().map(extent).collect(),
        workspace: (
            step.workspace.offset,
            step.workspace.offset + step.workspace.bytes,
        ),
        check: check(inner, at, step),
        bytes: kernel.map_or(0, |kernel| moved(kernel.spec(), bounds)),
        flops: product.saturating_add(code),
    }
}

/// The check that a step makes, if it makes one.
fn check(inner: &Compiled, at: usize, step: &Step) -> Option<Check> {
    let spec = step.kernel()?.spec();
    let Body::BoundsCheck(check) = &spec.body else {
        return None;
    };
    let whole = Operand::contiguous(check.index.dtype, &spec.dims).as_ref() == Some(&check.index);
    let input = match step.places[0] {
        Place::Planned(buffer) if whole => inner.input_of[buffer].filter(|&i| {
            crate::shape::elements(&inner.inputs[i].dims) == crate::shape::elements(&spec.dims)
        }),
        _ => None,
    };
    Some(Check {
        mistake: Mistake {
            location: step.origin.location,
            layer: step.origin.layer.to_string(),
            message: String::new(),
        },
        step: at as u32,
        of: inner.indices_of(at).to_string(),
        kind: step.checks(),
        limit: check.limit,
        input,
    })
}
