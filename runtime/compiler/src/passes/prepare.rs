//! Preparing kernels: each call gets its kernel for the device, its modelled time, and the clone by
//! which it may be recomputed.

use slabwise_kernels::spec::Body;

use super::cost::cost;
use super::error::PassError;
use super::pipeline::Pass;
use super::recompute::{kept, recompute_clone};
use crate::backend::{Choice, KernelCache, Target};
use crate::ir::{KernelCall, Program, Recompute};

/// The pass; its fields as the arguments of `prepare`.
pub struct Prepare<'a> {
    /// The device.
    pub target: &'a Target,
    /// Bytes after every value that no kernel may touch.
    pub guard: u64,
    /// The kernels that are prepared already.
    pub kernels: &'a KernelCache,
}

impl Pass for Prepare<'_> {
    const NAME: &'static str = "prepare";
    type Input = Program;
    type Output = Program;

    fn run(&self, program: &Program) -> Result<Program, PassError> {
        prepare(program.clone(), self.target, self.guard, self.kernels)
    }
}

/// The program with all its kernels prepared for the device, and its values numbered in the order
/// in which calls name them.
///
/// `guard` bytes that no kernel may touch are kept after every value (0 except for memory checks).
///
/// # Errors
/// If the device has no kernel for a call.
fn prepare(
    mut program: Program,
    target: &Target,
    guard: u64,
    kernels: &KernelCache,
) -> Result<Program, PassError> {
    program.guard = guard;
    program.renumber_by_use();
    let bounds = program.graph.symbols.bounds();
    // If a kernel checks indices, assignments of variables first test whether one was out of range.
    let checks = |call: &KernelCall| matches!(call.spec.body, Body::BoundsCheck(_));
    let checked = program.kernels.iter().any(checks);
    let kept = kept(&program.graph);
    // The planner places no data-dependent values, so it cannot decide to recompute them.
    let in_pool = |call: &KernelCall| {
        let mut values = call.args.iter().map(|&value| program.value(value));
        values.any(|value| value.data_dependent)
    };
    let clones: Vec<Option<KernelCall>> = program
        .kernels
        .iter()
        .map(|call| recompute_clone(&program, target, call, &kept).filter(|_| !in_pool(call)))
        .collect();
    let guarded = |call: &KernelCall| checked && !program.assigned(call).is_empty();
    let all: Vec<(&KernelCall, bool)> = program
        .kernels
        .iter()
        .chain(clones.iter().flatten())
        .map(|call| (call, guarded(call)))
        .collect();
    // All at once, so that a recompute clone gets the same kernel as its call.
    let specs: Vec<_> = all
        .iter()
        .map(|(call, guarded)| (&call.spec, *guarded))
        .collect();
    let mut choices = target.choose(&specs, &bounds).into_iter();
    let guards: Vec<bool> = program.kernels.iter().map(guarded).collect();
    let prepared =
        |call: &mut KernelCall, guarded: bool, choice: Option<Choice>| -> Result<(), PassError> {
            let choice = choice.unwrap_or_default();
            let kernel = kernels.prepare(&call.spec, &bounds, target, guarded, choice);
            let kernel = kernel.map_err(|source| PassError::Prepare {
                kernel: call.name.clone(),
                source,
            })?;
            (call.kernel, call.cost) = (Some(kernel), cost(&call.spec, &bounds));
            Ok(())
        };
    for (call, &guarded) in program.kernels.iter_mut().zip(&guards) {
        prepared(call, guarded, choices.next())?;
    }
    for (call, clone) in program.kernels.iter_mut().zip(clones) {
        call.recompute = match clone {
            None => Recompute::Never,
            Some(mut clone) => {
                let choice = choices.next();
                if clone.spec.stores.len() < call.spec.stores.len() {
                    prepared(&mut clone, false, choice)?;
                    Recompute::Clone(Box::new(clone))
                } else {
                    Recompute::Same
                }
            }
        };
    }
    Ok(program)
}
