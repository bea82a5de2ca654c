//! Shape rules of the operations that select elements by their values: positions of true elements,
//! sort orders, non-maximum suppression. They have no gradient, because positions are integers.

use slabwise_kernels::dtype::DType;
use slabwise_kernels::size::Symbol;
use slabwise_kernels::spec::Dims;

use super::rules::{Rule, TensorType};
use crate::shape::Symbols;

pub(super) fn infer_bind(symbol: Symbol, given: TensorType<'_>, symbols: &Symbols) -> Rule {
    if given.dtype != DType::I32 || !given.dims.is_empty() || !symbols.is_data_dependent(symbol) {
        return Err(format!(
            "a length is one i32, not {} {}",
            given.dtype,
            symbols.show(given.dims)
        ));
    }
    Ok((DType::I32, Dims::new()))
}

pub(super) fn infer_nonzero(given: TensorType<'_>, dims: &Dims) -> Rule {
    if given.dtype != DType::Bool || dims.len() != 1 {
        return Err(format!(
            "positions of the true elements of a {} tensor: a mask of truth values is needed",
            given.dtype
        ));
    }
    Ok((DType::I32, dims.clone()))
}

pub(super) fn infer_sort(given: TensorType<'_>, dims: &Dims, symbols: &Symbols) -> Rule {
    if given.dims.is_empty() || given.dtype == DType::Bool {
        return Err(format!(
            "argsort of {} {}: numbers along an axis are needed",
            given.dtype,
            symbols.show(given.dims)
        ));
    }
    let bounds = symbols.bounds();
    let last = given.dims.len() - 1;
    let fits = dims.len() == given.dims.len()
        && dims[..last] == given.dims[..last]
        && dims[last].at(&bounds) <= given.dims[last].at(&bounds);
    if !fits {
        return Err(format!(
            "argsort of {} to {}: positions of at most all elements are needed",
            symbols.show(given.dims),
            symbols.show(dims)
        ));
    }
    Ok((DType::I32, dims.clone()))
}

pub(super) fn infer_non_max_suppression(
    threshold: f32,
    given: TensorType<'_>,
    symbols: &Symbols,
) -> Rule {
    if given.dtype != DType::F32 || given.dims.len() != 2 || !given.dims[1].is(4) {
        return Err(format!(
            "nms of {} {}: f32 boxes [count, 4] are needed",
            given.dtype,
            symbols.show(given.dims)
        ));
    }
    if !(0.0..=1.0).contains(&threshold) {
        return Err(format!(
            "nms: boxes share a part of 0 to 1, not {threshold}"
        ));
    }
    Ok((DType::Bool, Dims::from_slice(&given.dims[..1])))
}
