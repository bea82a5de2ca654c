//! The kernels of a recorded run on a described CUDA device, so that they can be counted and modelled
//! without one.

use slabwise_cuda::{Lowered, Target};
use slabwise_kernels::size::Env;
use slabwise_planner::{ALIGN, TaskId, Work};

use crate::backend::{Extent, LoadRequest, LoadStep, groups};
use crate::compile::CompiledPlan;
use crate::error::Result;
use crate::ir::{CallId, Source, ValueId};
use crate::passes::{moved, operations};

/// A kernel of a recorded run on a CUDA device.
pub enum RecordedKernel {
    /// That of a call.
    Call(CallId),
    /// Horizontally fused, of several calls.
    Fused(Vec<CallId>, Lowered),
}

/// The kernels of a recorded run in their order, for a program that was prepared for this
/// description and copies nothing to the host.
///
/// # Errors
/// If a kernel has no source.
pub fn recorded_kernels(compiled: &CompiledPlan, target: &Target) -> Result<Vec<RecordedKernel>> {
    let (program, plan) = (compiled.program(), compiled.plan());
    let bounds = program.graph.symbols.bounds();
    let work = program.work();
    let run = |task: &TaskId| match work[task.index()] {
        Work::Run(call) => Some((*task, CallId(call.0))),
        Work::Start(_) | Work::Finish(_) => None,
    };
    let steps: Vec<(TaskId, CallId)> = plan.offsets().order.iter().filter_map(run).collect();
    let request = LoadRequest {
        name: plan.name(),
        bounds,
        steps: steps
            .iter()
            .map(|&step| load_step(compiled, step, &bounds))
            .collect(),
        has_copies: !program.transfers.is_empty(),
        is_dynamic: !plan.data_dependent().is_empty(),
        input_bytes: 0,
        horizontal_fusion: true,
    };
    let mut kernels: Vec<Option<RecordedKernel>> = steps
        .iter()
        .map(|&(_, call)| Some(RecordedKernel::Call(call)))
        .collect();
    for group in groups(&request, *target)? {
        for &member in &group.members {
            kernels[member] = None;
        }
        let calls = group.members.iter().map(|&at| steps[at].1).collect();
        kernels[group.turn] = Some(RecordedKernel::Fused(calls, group.kernel));
    }
    Ok(kernels.into_iter().flatten().collect())
}

/// The step that runs a call.
fn load_step<'a>(
    compiled: &'a CompiledPlan,
    (task, call): (TaskId, CallId),
    bounds: &Env,
) -> LoadStep<'a> {
    let (program, plan) = (compiled.program(), compiled.plan());
    let call = program.call(call);
    let extent = |value: &ValueId| match program.value(*value).source {
        Source::Variable(v) => Extent::Variable(v as usize),
        Source::Sizes => Extent::Sizes,
        Source::Input(_) | Source::Computed => {
            let at = value.index();
            let bytes = plan.dag().buffers[at].bytes.next_multiple_of(ALIGN);
            let offset = plan.offsets().offsets[at];
            Extent::Slab(offset, offset + bytes)
        }
    };
    let workspace = plan.offsets().workspace_offsets[task.index()];
    let [product, code] = operations(&call.spec, bounds);
    LoadStep {
        name: &call.name,
        kernel: call.kernel.as_ref(),
        arguments: call.args.iter().map(extent).collect(),
        workspace: (workspace, workspace + call.workspace()),
        check: None,
        bytes: moved(&call.spec, bounds),
        flops: product.saturating_add(code),
    }
}
