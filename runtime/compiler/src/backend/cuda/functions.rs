//! The functions of a program for a described device, so that they can be compiled without one.

use std::collections::BTreeMap;

use slabwise_cuda::{Function, Lowered, Target};
use slabwise_kernels::spec::{Body, Spec};

use crate::backend::Kernel;
use crate::error::{Error, Result};
use crate::ir::{KernelCall, Program, Recompute};

/// The functions that a device may load for a program that was compiled for its description, by
/// name: those of its kernels, of horizontally fused steps, and of the kernels that the tuner would
/// time.
///
/// # Errors
/// If a kernel was prepared for another device, or has no source.
pub fn functions(program: &Program, target: &Target) -> Result<BTreeMap<String, Function>> {
    let invalid = |e: slabwise_kernels::cpu::SpecError| Error::Internal(e.to_string());
    let bounds = program.graph.symbols.bounds();
    let mut found = BTreeMap::new();
    let mut add = |functions: Vec<Function>| {
        let named = functions.into_iter().map(|f| (f.name.clone(), f));
        found.extend(named);
    };
    let checks = |call: &KernelCall| matches!(call.spec.body, Body::BoundsCheck(_));
    let checked = program.kernels.iter().any(checks);
    // As prepared: the specs of guarded steps, and those of all others with their clones.
    let mut specs: [Vec<&Spec>; 2] = Default::default();
    for call in &program.kernels {
        let guarded = checked && !program.assigned(call).is_empty();
        let clone = match &call.recompute {
            Recompute::Clone(clone) => Some(&**clone),
            Recompute::Never | Recompute::Same => None,
        };
        for (call, guarded) in [(Some(call), guarded), (clone, false)] {
            let Some(kernel) = call.and_then(|call| call.kernel.as_deref()) else {
                continue;
            };
            let Kernel::Cuda(kernel) = kernel else {
                return Err(Error::Internal(
                    "a kernel was prepared for another device".into(),
                ));
            };
            add(kernel.lowered.functions.clone());
            specs[usize::from(guarded)].push(&kernel.spec);
        }
    }
    let of = |guarded: bool| Target { guarded, ..*target };
    for (guarded, specs) in [false, true].into_iter().zip(&specs) {
        let fused = slabwise_cuda::lower_fused(specs, &bounds, &of(guarded)).map_err(invalid)?;
        let fused = fused.into_iter().filter(|launch| launch.members.len() > 1);
        fused.for_each(|launch| add(launch.lowered.functions));
    }
    let wanted = [false, true].into_iter().zip(&specs);
    let wanted: Vec<(&Spec, Target)> = wanted
        .flat_map(|(guarded, specs)| specs.iter().map(move |&spec| (spec, guarded)))
        .map(|(spec, guarded)| (spec, of(guarded)))
        .collect();
    let timed: Vec<Lowered> = slabwise_cuda::timed(&wanted, &bounds).map_err(invalid)?;
    timed.into_iter().for_each(|lowered| add(lowered.functions));
    Ok(found)
}
