//! The functions of a program for a described device, so that they can be compiled without one.

use std::collections::BTreeMap;

use slabwise_cuda::{Function, Lowered, Target};
use slabwise_kernels::size::Env;
use slabwise_kernels::spec::Spec;

use crate::backend::Kernel;
use crate::error::{Error, Result};

/// The functions that a device may load for kernels that were prepared for its description, by
/// name: their own, those of horizontally fused steps, and those of the kernels that the tuner would
/// time. Each kernel comes with whether it is guarded.
///
/// # Errors
/// If a kernel was prepared for another device, or has no source.
pub fn functions<'a>(
    kernels: impl IntoIterator<Item = (&'a Kernel, bool)>,
    bounds: &Env,
    target: &Target,
) -> Result<BTreeMap<String, Function>> {
    let invalid = |e: slabwise_kernels::cpu::SpecError| Error::Internal(e.to_string());
    let mut found = BTreeMap::new();
    let mut add = |functions: Vec<Function>| {
        let named = functions.into_iter().map(|f| (f.name.clone(), f));
        found.extend(named);
    };
    let mut specs: [Vec<&Spec>; 2] = Default::default();
    for (kernel, guarded) in kernels {
        let Kernel::Cuda(kernel) = kernel else {
            return Err(Error::Internal(
                "a kernel was prepared for another device".into(),
            ));
        };
        add(kernel.lowered.functions.clone());
        specs[usize::from(guarded)].push(&kernel.spec);
    }
    let of = |guarded: bool| Target { guarded, ..*target };
    for (guarded, specs) in [false, true].into_iter().zip(&specs) {
        let fused = slabwise_cuda::lower_fused(specs, bounds, &of(guarded)).map_err(invalid)?;
        let fused = fused.into_iter().filter(|launch| launch.members.len() > 1);
        fused.for_each(|launch| add(launch.lowered.functions));
    }
    let wanted = [false, true].into_iter().zip(&specs);
    let wanted: Vec<(&Spec, Target)> = wanted
        .flat_map(|(guarded, specs)| specs.iter().map(move |&spec| (spec, guarded)))
        .map(|(spec, guarded)| (spec, of(guarded)))
        .collect();
    let timed: Vec<Lowered> = slabwise_cuda::timed(&wanted, bounds).map_err(invalid)?;
    timed.into_iter().for_each(|lowered| add(lowered.functions));
    Ok(found)
}
