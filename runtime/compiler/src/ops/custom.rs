//! Kernels of the user.

use slabwise_kernels::custom::CustomKernel;
use slabwise_kernels::dtype::DType;
use slabwise_kernels::spec::{CUSTOM_INPUTS_MAX, Dims};

use super::{Gradients, GraphBuilder, NodeId, Op, Rule, TensorType};
use crate::shape::Symbols;

/// Inputs of the kernel's types → a result of the declared shape.
pub(super) fn infer(
    kernel: &CustomKernel,
    given: &[TensorType<'_>],
    dims: &Dims,
    symbols: &Symbols,
) -> Rule {
    let (name, types) = (kernel.name(), kernel.inputs());
    if given.len() != types.len() {
        return Err(format!(
            "{name}: {} inputs of a custom kernel of {}",
            given.len(),
            types.len()
        ));
    }
    if !(1..=CUSTOM_INPUTS_MAX).contains(&types.len()) {
        return Err(format!(
            "{name}: a custom kernel of {} inputs; it takes 1 to {CUSTOM_INPUTS_MAX}",
            types.len()
        ));
    }
    for (k, (given, dtype)) in given.iter().zip(types).enumerate() {
        if given.dtype != *dtype {
            return Err(format!(
                "{name}: input {k} is {} {}, and the custom kernel takes {dtype}; convert with \
                 cast",
                given.dtype,
                symbols.show(given.dims)
            ));
        }
    }
    match kernel.result() {
        DType::Bool => Err(format!(
            "{name}: a custom kernel returns no bool; return u8 and compare it with 0"
        )),
        dtype => Ok((dtype, dims.clone())),
    }
}

/// The kernel has no gradient: a node that compiling refuses, if a result needs it.
pub(super) fn gradient(
    g: &mut dyn GraphBuilder,
    kernel: &CustomKernel,
    inputs: &[NodeId],
) -> Gradients {
    let each = inputs.iter().map(|&input| {
        let dims = g.dims(input).clone();
        Some(g.emit(Op::NoGradient(kernel.clone()), &[], DType::F32, dims))
    });
    each.collect()
}
