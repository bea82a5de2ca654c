//! Copies of values that cannot be expressed as views.

use slabwise_kernels::size::Size;
use slabwise_kernels::spec::Dims;
use smallvec::SmallVec;

use super::{Views, contiguous};
use crate::graph::{Graph, Node};
use crate::ops::{GraphBuilder, NodeId, Op};

/// A slice or padding. Where the first element lies at a sum that has no form as a size (starts
/// along two axes, with strides of different lengths), it becomes one along each axis, with copies
/// between them.
pub(super) fn one_axis_at_a_time(
    out: &mut Graph,
    views: &mut Views,
    input: NodeId,
    node: &Node,
) -> NodeId {
    let (start, step, pads) = match &node.op {
        Op::Slice { start, step } => (start, step, false),
        Op::Pad { start, step, .. } => (start, step, true),
        op => unreachable!("{} is no slice", op.name()),
    };
    let has_form = |out: &Graph, views: &mut Views, id: NodeId| {
        views.extend(out);
        views.view(out, id).is_some()
    };
    let first_of = |dims: &[Size], start: &[Size]| {
        let strides = contiguous(dims)?;
        start
            .iter()
            .zip(&strides)
            .try_fold(Size::ZERO, |sum, (start, stride)| {
                sum.checked_add(start.checked_mul(*stride)?)
            })
    };
    let whole = if pads {
        first_of(&node.dims, start).is_some()
    } else {
        true
    };
    if whole {
        let made = out.emit(node.op.clone(), &[input], node.dtype, node.dims.clone());
        // A form that is missing below the slice is not missing because of it.
        if pads || has_form(out, views, made) || !has_form(out, views, input) {
            return made;
        }
    }
    let mut value = input;
    for axis in 0..start.len() {
        let mut dims = out.node(value).dims.clone();
        if dims[axis] == node.dims[axis] && start[axis].is(0) && step[axis] == 1 {
            continue;
        }
        dims[axis] = node.dims[axis];
        let mut along: Dims = SmallVec::from_elem(Size::ZERO, start.len());
        let mut by = SmallVec::from_elem(1, start.len());
        (along[axis], by[axis]) = (start[axis], step[axis]);
        let op = match &node.op {
            Op::Pad { value, .. } => Op::Pad {
                start: along,
                step: by,
                value: *value,
            },
            _ => Op::Slice {
                start: along,
                step: by,
            },
        };
        // A padding is of a value of its own.
        let below = if pads && value != input {
            copy(out, value)
        } else {
            value
        };
        value = out.emit(op.clone(), &[below], node.dtype, dims.clone());
        if !pads && !has_form(out, views, value) {
            let below = readable(out, views, below, true);
            let below = copy(out, below);
            value = out.emit(op, &[below], node.dtype, dims);
        }
    }
    value
}

/// A number or an index lies in no buffer: kernels make it themselves. Where a use cannot (operands
/// of anchors, views that do more than rename and repeat), it gets one.
pub(super) fn readable(out: &mut Graph, views: &mut Views, id: NodeId, pointwise: bool) -> NodeId {
    views.extend(out);
    let (source, axes) = views.axes(out, id);
    let made = matches!(
        out.node(source).op,
        Op::Const(_) | Op::Size(_) | Op::Index(_)
    );
    if made && !(pointwise && axes.is_some()) {
        over_copy(out, id)
    } else {
        id
    }
}

/// The same views over a copy of their base.
fn over_copy(out: &mut Graph, id: NodeId) -> NodeId {
    let node = out.node(id).clone();
    if !node.op.is_view() {
        return copy(out, id);
    }
    let below = over_copy(out, node.inputs[0]);
    out.emit(node.op, &[below], node.dtype, node.dims)
}

pub(super) fn copy(out: &mut Graph, id: NodeId) -> NodeId {
    let node = out.node(id);
    let (dtype, dims) = (node.dtype, node.dims.clone());
    out.emit(Op::Copy, &[id], dtype, dims)
}

/// The value itself if the elements of a row are neighbours in memory, or a copy.
pub(super) fn with_whole_rows(out: &mut Graph, views: &mut Views, id: NodeId) -> NodeId {
    views.extend(out);
    let view = views.view(out, id);
    match view.and_then(|view| view.strides.last().copied()) {
        Some(step) if step.is(1) => id,
        _ => copy(out, id),
    }
}
