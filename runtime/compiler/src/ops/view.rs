//! Operations that only rearrange: reshape, permute, expand, slice, concatenation and padding.

use slabwise_kernels::scalar::Value;
use slabwise_kernels::size::Size;
use slabwise_kernels::spec::Dims;
use smallvec::SmallVec;

use super::rules::{Gradients, Rule, TensorType};
use super::{Axes, GraphBuilder, NodeId, Op};
use crate::shape::Symbols;

pub(super) fn infer_reshape(given: TensorType<'_>, dims: &Dims, symbols: &Symbols) -> Rule {
    let (from, to) = (symbols.elements(given.dims), symbols.elements(dims));
    if from.is_none() || from != to {
        let count = |n: Option<Size>| n.map_or("too many".into(), |n| n.show(|s| symbols.name(s)));
        return Err(format!(
            "reshape {} to {}: {} elements become {}",
            symbols.show(given.dims),
            symbols.show(dims),
            count(from),
            count(to)
        ));
    }
    Ok((given.dtype, dims.clone()))
}

pub(super) fn infer_permute(axes: &Axes, given: TensorType<'_>) -> Rule {
    let mut seen = axes.clone();
    seen.sort_unstable();
    if !seen.iter().copied().eq(0..given.dims.len()) {
        return Err(format!(
            "permute by {axes:?}: each of the {} axes is named once",
            given.dims.len()
        ));
    }
    Ok((given.dtype, axes.iter().map(|&a| given.dims[a]).collect()))
}

pub(super) fn infer_expand(given: TensorType<'_>, dims: &Dims, symbols: &Symbols) -> Rule {
    let fits = given.dims.len() == dims.len()
        && given.dims.iter().zip(dims).all(|(a, b)| a == b || a.is(1));
    if !fits {
        return Err(format!(
            "expand {} to {}: only axes of length 1 repeat",
            symbols.show(given.dims),
            symbols.show(dims)
        ));
    }
    Ok((given.dtype, dims.clone()))
}

pub(super) fn infer_concat(axis: usize, given: &[TensorType<'_>], symbols: &Symbols) -> Rule {
    let Some(first) = given.first() else {
        return Err("concat of no tensors".into());
    };
    let mut dims = Dims::from_slice(first.dims);
    if axis >= dims.len() {
        return Err(format!(
            "concat along axis {axis} of {}",
            symbols.show(first.dims)
        ));
    }
    for other in &given[1..] {
        let alike = other.dtype == first.dtype && other.dims.len() == dims.len();
        if !alike
            || other
                .dims
                .iter()
                .zip(&dims)
                .enumerate()
                .any(|(i, (a, b))| i != axis && a != b)
        {
            let (a, b) = (symbols.show(first.dims), symbols.show(other.dims));
            return Err(format!(
                "concat {} {a} and {} {b} along axis {axis}: the other axes and the types must agree",
                first.dtype, other.dtype
            ));
        }
        dims[axis] = dims[axis].checked_add(other.dims[axis]).ok_or_else(|| {
            format!(
                "concat along axis {axis}: lengths of two bounded dimensions do not add up to one"
            )
        })?;
    }
    Ok((first.dtype, dims))
}

pub(super) fn back_through_reshape(g: &mut dyn GraphBuilder, x: NodeId, dy: NodeId) -> NodeId {
    let dims = g.dims(x).clone();
    g.reshape(dy, &dims)
}

pub(super) fn back_through_permute(g: &mut dyn GraphBuilder, axes: &Axes, dy: NodeId) -> NodeId {
    let mut inverse: Axes = SmallVec::from_elem(0, axes.len());
    for (i, &a) in axes.iter().enumerate() {
        inverse[a] = i;
    }
    g.permute(dy, &inverse)
}

pub(super) fn back_through_expand(g: &mut dyn GraphBuilder, x: NodeId, dy: NodeId) -> NodeId {
    let dims = g.dims(x).clone();
    g.unbroadcast(dy, &dims)
}

pub(super) fn back_through_slice(
    g: &mut dyn GraphBuilder,
    start: &Dims,
    step: &SmallVec<[u32; 6]>,
    x: NodeId,
    dy: NodeId,
) -> NodeId {
    let (dims, dtype) = (g.dims(x).clone(), g.dtype(dy));
    let op = Op::Pad {
        start: start.clone(),
        step: step.clone(),
        value: Value::F32(0.0).cast(dtype.lane()),
    };
    g.emit(op, &[dy], dtype, dims)
}

pub(super) fn back_through_pad(
    g: &mut dyn GraphBuilder,
    start: &Dims,
    step: &SmallVec<[u32; 6]>,
    x: NodeId,
    dy: NodeId,
) -> NodeId {
    let (dims, dtype) = (g.dims(x).clone(), g.dtype(dy));
    g.emit(
        Op::Slice {
            start: start.clone(),
            step: step.clone(),
        },
        &[dy],
        dtype,
        dims,
    )
}

pub(super) fn back_through_concat(
    g: &mut dyn GraphBuilder,
    axis: usize,
    inputs: &[NodeId],
    dy: NodeId,
) -> Gradients {
    let mut at = Size::ZERO;
    let mut parts = Gradients::new();
    for &input in inputs {
        let dims = g.dims(input).clone();
        let mut start: Dims = SmallVec::from_elem(Size::ZERO, dims.len());
        start[axis] = at;
        at = at
            .checked_add(dims[axis])
            .expect("the shape rule added these up");
        parts.push(Some(back_through_pad(
            g,
            &start,
            &SmallVec::from_elem(1, dims.len()),
            input,
            dy,
        )));
    }
    parts
}
