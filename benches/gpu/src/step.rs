//! Training steps compiled for a described device, without the device.

use std::time::Instant;

use slabwise::{Device, Params, Trace};
use slabwise_compiler::backend;
use slabwise_compiler::compile::{CompiledPlan, Environment, MemoryUse, compile};
use slabwise_cuda::{Description, Target};
use slabwise_models::Model;

use crate::items;

/// The training step of a model, with the target that its kernels are prepared for.
///
/// # Errors
/// If there is no such model, or its step cannot be compiled.
pub fn compiled(
    model: &str,
    batch: u32,
    precision: &str,
    device: &Description,
) -> Result<(CompiledPlan, Target), String> {
    let text = |e: &dyn std::fmt::Display| e.to_string();
    let model = Model::parse(model).map_err(|e| text(&e))?;
    let (of_products, options) = items::compiled_as(precision);
    let trace = Trace::training().with_precision(of_products);
    let network = model.build(&Params::seeded(0));
    let loss = network.step(&trace, batch.into(), model.optimizer());
    let graph = trace.finish(&[loss]).map_err(|e| format!("{e:?}"))?;
    let target = Target {
        tf32: options.tf32,
        ..device.target()
    };
    // Only asked for the memory that inputs pass through.
    let host = backend::open(Device::Cpu).map_err(|e| text(&e))?;
    let environment = Environment {
        device: Device::Cuda(0),
        backend: &*host,
        target: backend::Target::described(target),
        memory: MemoryUse::default(),
        dump: None,
    };
    let compiled = compile("step", &graph, &options, &environment, Instant::now());
    Ok((compiled.map_err(|e| text(&e))?, target))
}

#[cfg(test)]
mod tests {
    use std::slice;

    use slabwise_compiler::compile::{RecordedKernel, recorded_kernels};
    use slabwise_compiler::ir::CallId;
    use slabwise_kernels::spec::Body;

    use super::*;

    /// A recorded run has each call once, and runs loops of one function by one launch.
    #[test]
    fn recorded_steps_have_every_call_once() {
        let device = Description::named("h100").expect("a description");
        let (step, target) = compiled("resnet20", 4, "bf16", device).expect("a step");
        let program = step.program();
        let recorded = recorded_kernels(&step, &target).expect("kernels");
        let mut calls: Vec<CallId> = Vec::new();
        let mut fused = 0;
        for kernel in &recorded {
            match kernel {
                RecordedKernel::Call(call) => calls.extend(slice::from_ref(call)),
                RecordedKernel::Fused(several, kernel) => {
                    let bounds = program.graph.symbols.bounds();
                    assert!(several.len() > 1 && kernel.launches(&bounds).len() == 1);
                    let is_loop = |call| matches!(program.call(call).spec.body, Body::Loop);
                    assert!(several.iter().all(|&call| is_loop(call)));
                    calls.extend(several);
                    fused += several.len();
                }
            }
        }
        calls.sort_unstable();
        assert!(
            calls
                .iter()
                .map(|call| call.index())
                .eq(0..program.kernels.len())
        );
        assert!(fused > 20, "{fused} of {} calls", calls.len());
    }
}
