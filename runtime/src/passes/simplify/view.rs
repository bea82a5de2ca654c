//! Rules of views, of concatenation and padding, and of folds along axes. All only move values, so that all are exact.

use slabwise_kernels::dtype::DType;
use slabwise_kernels::scalar::Value;
use slabwise_kernels::size::Size;
use slabwise_kernels::spec::{Dims, ReduceOp};
use smallvec::SmallVec;

use super::Builder;
use crate::ops::{Axes, Emit, NodeId, Op};

/// A simpler node for a structural operation.
pub(super) fn rewrite(b: &mut Builder, op: &Op, inputs: &[NodeId], dims: &Dims) -> Option<NodeId> {
    let &x = inputs.first()?;
    if op.is_view()
        && let Some(value) = b.known(x)
        && !is_plain_constant(b, op, x)
    {
        // A view of equal numbers has equal numbers.
        let dtype = b.dtype(x);
        return Some(b.full_of(value, dtype, dims));
    }
    let unchanged = b.dims(x) == dims;
    match op {
        Op::Reshape | Op::Expand if unchanged => Some(x),
        // Only the last shape counts.
        Op::Reshape | Op::Expand if b.op(x) == op => {
            let (from, dtype) = (b.operand(x), b.dtype(x));
            Some(b.emit(op.clone(), &[from], dtype, dims.clone()))
        }
        Op::Permute(axes) => {
            if axes.iter().copied().eq(0..axes.len()) {
                return Some(x);
            }
            let Op::Permute(first) = b.op(x) else { return None };
            let both: Axes = axes.iter().map(|&a| first[a]).collect();
            let from = b.operand(x);
            Some(b.permute(from, &both))
        }
        Op::Slice { step, .. } | Op::Pad { step, .. } if unchanged && step.iter().all(|&s| s == 1) => Some(x),
        Op::Slice { start, step } => slice(b, start, step, x, dims),
        Op::Concat { .. } if inputs.len() == 1 => Some(x),
        _ => None,
    }
}

/// The normal form of a constant of a shape: the number, under as many axes of length 1, repeated.
fn is_plain_constant(b: &Builder, op: &Op, x: NodeId) -> bool {
    match op {
        Op::Reshape => matches!(b.op(x), Op::Const(_)),
        Op::Expand => *b.op(x) == Op::Reshape && matches!(b.op(b.operand(x)), Op::Const(_)),
        _ => false,
    }
}

fn slice(b: &mut Builder, start: &Dims, step: &SmallVec<[u32; 6]>, x: NodeId, dims: &Dims) -> Option<NodeId> {
    let (dtype, inner) = (b.dtype(x), b.new.node(x).clone());
    match &inner.op {
        // start₁ + (start₂ + c · step₂) · step₁
        Op::Slice { start: first, step: by } => {
            let mut starts = Dims::new();
            let mut steps = SmallVec::new();
            for i in 0..dims.len() {
                starts.push(start[i].checked_mul(Size::from(by[i]))?.checked_add(first[i])?);
                steps.push(step[i].checked_mul(by[i])?);
            }
            let op = Op::Slice { start: starts, step: steps };
            Some(b.emit(op, &[inner.inputs[0]], dtype, dims.clone()))
        }
        // Taking off what was put on.
        Op::Pad { start: at, step: by, .. } if at == start && by == step && b.dims(inner.inputs[0]) == dims => Some(inner.inputs[0]),
        Op::Concat { axis } => {
            let (part, offset) = part_of(b, *axis, &inner.inputs, start[*axis], step[*axis], dims[*axis])?;
            let mut start = start.clone();
            start[*axis] = start[*axis].checked_sub(offset)?;
            Some(b.emit(Op::Slice { start, step: step.clone() }, &[part], dtype, dims.clone()))
        }
        _ => None,
    }
}

/// The sum of two tensors in neighbouring places among zeros is both of them behind each other, among the zeros that are left:
/// what the gradients of slices add up to.
pub(super) fn join_padded(b: &mut Builder, inputs: &[NodeId], dims: &Dims) -> Option<NodeId> {
    let padded = |id: NodeId| match b.op(id) {
        Op::Pad { start, step, value } if *value == Value::F32(0.0) && step.iter().all(|&s| s == 1) => Some((b.operand(id), start.clone())),
        _ => None,
    };
    let (mut low, mut high) = (padded(inputs[0])?, padded(inputs[1])?);
    let differ: SmallVec<[usize; 6]> =
        (0..dims.len()).filter(|&i| low.1[i] != high.1[i] || b.dims(low.0)[i] != b.dims(high.0)[i]).collect();
    let [axis] = differ[..] else { return None };
    if low.1[axis].as_fixed()? > high.1[axis].as_fixed()? {
        std::mem::swap(&mut low, &mut high);
    }
    if low.1[axis].checked_add(b.dims(low.0)[axis])? != high.1[axis] {
        return None;
    }
    let dtype = b.dtype(low.0);
    let parts: SmallVec<[NodeId; 3]> = [low.0, high.0]
        .into_iter()
        .flat_map(|part| match b.op(part) {
            Op::Concat { axis: along } if *along == axis => b.new.node(part).inputs.clone(),
            _ => SmallVec::from_slice(&[part]),
        })
        .collect();
    let mut joined = b.dims(low.0).clone();
    joined[axis] = joined[axis].checked_add(b.dims(high.0)[axis])?;
    let whole = b.emit(Op::Concat { axis }, &parts, dtype, joined);
    let pad = Op::Pad { start: low.1, step: SmallVec::from_elem(1, dims.len()), value: Value::F32(0.0).cast(dtype.lane()) };
    Some(b.emit(pad, &[whole], dtype, dims.clone()))
}

/// The part of a concatenation that holds all of `start, start + step, …` (`n` places), and where it begins.
fn part_of(b: &Builder, axis: usize, parts: &[NodeId], start: Size, step: u32, n: Size) -> Option<(NodeId, Size)> {
    let mut offset = Size::ZERO;
    for &part in parts {
        let length = b.dims(part)[axis];
        let whole = start == offset && n == length && step == 1;
        let inside = || {
            let (start, n, offset, length) = (start.as_fixed()?, n.as_fixed()?, offset.as_fixed()?, length.as_fixed()?);
            let last = start.checked_add(n.checked_sub(1)?.checked_mul(i64::from(step))?)?;
            Some(n > 0 && start >= offset && last < offset.checked_add(length)?)
        };
        if whole || inside() == Some(true) {
            return Some((part, offset));
        }
        offset = offset.checked_add(length)?;
    }
    None
}

/// A simpler node for a fold: along an axis of length 1 there is nothing to fold.
pub(super) fn rewrite_reduce(b: &mut Builder, op: ReduceOp, axes: &Axes, x: NodeId, dims: &Dims) -> Option<NodeId> {
    let long: Axes = axes.iter().copied().filter(|&a| !b.dims(x)[a].is(1)).collect();
    match (op, long.is_empty()) {
        (ReduceOp::ArgMax | ReduceOp::ArgMin, true) => Some(b.full_of(Value::I32(0), DType::I32, dims)),
        (_, true) => Some(x),
        // The position among the folded elements stays as it was.
        (_, false) => (long.len() < axes.len()).then(|| b.reduce(op, x, &long)),
    }
}
