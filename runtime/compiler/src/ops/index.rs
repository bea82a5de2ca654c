//! Choosing elements by integer indices, and its gradient.

use slabwise_kernels::dtype::DType;
use slabwise_kernels::spec::Dims;
use smallvec::SmallVec;

use super::rules::{Gradients, Rule, TensorType};
use super::{GraphBuilder, NodeId, Op};
use crate::shape::Symbols;

pub(super) fn infer_gather(axis: usize, given: &[TensorType<'_>], symbols: &Symbols) -> Rule {
    let (source, index) = (given[0], given[1]);
    let say = |why: &str| {
        Err(format!(
            "gather from {} by {} along axis {axis}: {why}",
            symbols.show(source.dims),
            symbols.show(index.dims)
        ))
    };
    if axis >= source.dims.len() || source.dims.len() != index.dims.len() {
        return say("both need equally many axes, and the axis");
    }
    if !matches!(index.dtype, DType::I32 | DType::U8) {
        return say("indices are i32 or u8");
    }
    if source
        .dims
        .iter()
        .zip(index.dims)
        .enumerate()
        .any(|(i, (s, d))| i != axis && s != d)
    {
        return say("the other axes differ");
    }
    Ok((source.dtype, Dims::from_slice(index.dims)))
}

pub(super) fn gradient_of_gather(
    g: &mut dyn GraphBuilder,
    axis: usize,
    inputs: &[NodeId],
    dy: NodeId,
) -> Gradients {
    if !g.dtype(inputs[0]).is_float() {
        return SmallVec::from_elem(None, 2);
    }
    let dims = g.dims(inputs[0]).clone();
    let dx = g.emit(Op::ScatterAdd { axis }, &[dy, inputs[1]], DType::F32, dims);
    SmallVec::from_iter([Some(dx), None])
}

pub(super) fn gradient_of_scatter(
    g: &mut dyn GraphBuilder,
    axis: usize,
    inputs: &[NodeId],
    d: NodeId,
) -> Gradients {
    let dims = g.dims(inputs[1]).clone();
    let back = g.emit(Op::Gather { axis }, &[d, inputs[1]], DType::F32, dims);
    SmallVec::from_iter([Some(back), None])
}
