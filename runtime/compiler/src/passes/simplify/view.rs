//! Rules of views, of concatenation and padding, and of reductions along axes. All only move values, so
//! that all are exact.

use slabwise_kernels::dtype::DType;
use slabwise_kernels::scalar::Value;
use slabwise_kernels::size::Size;
use slabwise_kernels::spec::{Dims, ReduceOp};
use smallvec::SmallVec;

use super::Builder;
use crate::ops::{Axes, GraphBuilder, NodeId, Op};

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
            let Op::Permute(first) = b.op(x) else {
                return None;
            };
            let both: Axes = axes.iter().map(|&a| first[a]).collect();
            let from = b.operand(x);
            Some(b.permute(from, &both))
        }
        Op::Slice { step, .. } | Op::Pad { step, .. }
            if unchanged && step.iter().all(|&s| s == 1) =>
        {
            Some(x)
        }
        Op::Slice { start, step } => slice(b, start, step, x, dims),
        Op::Concat { .. } if inputs.len() == 1 => Some(x),
        Op::Concat { axis } => {
            // The parts of a part are parts of the whole, and can be written into it; those of one that
            // others read too would be copied once more for each of them.
            let parts = |&i: &NodeId| {
                if b.op(i) == op && !b.shared.contains(&i) {
                    b.new.node(i).inputs.to_vec()
                } else {
                    vec![i]
                }
            };
            let flat: Vec<NodeId> = inputs.iter().flat_map(parts).collect();
            let dtype = b.dtype(x);
            if flat.len() > inputs.len() {
                return Some(b.emit(Op::Concat { axis: *axis }, &flat, dtype, dims.clone()));
            }
            if let Some(whole) = of_slices(b, *axis, inputs, dims) {
                return Some(whole);
            }
            let (parts, inner) = divided(b, *axis, inputs)?;
            let mut apart = dims.clone();
            apart[*axis] = parts
                .iter()
                .try_fold(Size::ZERO, |n, &part| n.checked_add(b.dims(part)[*axis]))?;
            apart.insert(*axis + 1, inner);
            let joined = b.emit(Op::Concat { axis: *axis }, &parts, dtype, apart);
            Some(b.emit(Op::Reshape, &[joined], dtype, dims.clone()))
        }
        _ => None,
    }
}

/// The value whose slices, one after the other along an axis and all of it, are joined.
fn of_slices(b: &Builder, axis: usize, parts: &[NodeId], dims: &Dims) -> Option<NodeId> {
    let whole = *b.new.node(*parts.first()?).inputs.first()?;
    let mut offset = Size::ZERO;
    for &part in parts {
        let Op::Slice { start, step } = b.op(part) else {
            return None;
        };
        let mut starts = start.iter().enumerate();
        let follows = starts.all(|(i, &at)| at == if i == axis { offset } else { Size::ZERO });
        if b.operand(part) != whole || !follows || step.iter().any(|&step| step != 1) {
            return None;
        }
        offset = offset.checked_add(b.dims(part)[axis])?;
    }
    (b.dims(whole) == dims).then_some(whole)
}

/// The normal form of a constant of a shape: the number, under as many axes of length 1, repeated.
fn is_plain_constant(b: &Builder, op: &Op, x: NodeId) -> bool {
    match op {
        Op::Reshape => matches!(b.op(x), Op::Const(_)),
        Op::Expand => *b.op(x) == Op::Reshape && matches!(b.op(b.operand(x)), Op::Const(_)),
        _ => false,
    }
}

fn slice(
    b: &mut Builder,
    start: &Dims,
    step: &SmallVec<[u32; 6]>,
    x: NodeId,
    dims: &Dims,
) -> Option<NodeId> {
    let (dtype, inner) = (b.dtype(x), b.new.node(x).clone());
    match &inner.op {
        // start₁ + (start₂ + c · step₂) · step₁
        Op::Slice {
            start: first,
            step: by,
        } => {
            let mut starts = Dims::new();
            let mut steps = SmallVec::new();
            for i in 0..dims.len() {
                starts.push(
                    start[i]
                        .checked_mul(Size::from(by[i]))?
                        .checked_add(first[i])?,
                );
                steps.push(step[i].checked_mul(by[i])?);
            }
            let op = Op::Slice {
                start: starts,
                step: steps,
            };
            Some(b.emit(op, &[inner.inputs[0]], dtype, dims.clone()))
        }
        // A slice of a padding that removes it.
        Op::Pad {
            start: at,
            step: by,
            ..
        } if at == start && by == step && b.dims(inner.inputs[0]) == dims => Some(inner.inputs[0]),
        Op::Concat { axis } => {
            let (part, offset) = part_of(
                b,
                x,
                *axis,
                &inner.inputs,
                (start[*axis], step[*axis], dims[*axis]),
            )?;
            let mut start = start.clone();
            start[*axis] = start[*axis].checked_sub(offset)?;
            Some(b.emit(
                Op::Slice {
                    start,
                    step: step.clone(),
                },
                &[part],
                dtype,
                dims.clone(),
            ))
        }
        _ => None,
    }
}

/// The part of a concatenation that holds all of `start, start + step, …` (`n` places), and where
/// it begins.
fn part_of(
    b: &mut Builder,
    whole: NodeId,
    axis: usize,
    parts: &[NodeId],
    (start, step, n): (Size, u32, Size),
) -> Option<(NodeId, Size)> {
    if !b.starts.contains_key(&whole) {
        let mut starts = Vec::with_capacity(parts.len());
        let mut offset = Size::ZERO;
        for &part in parts {
            starts.push(offset);
            offset = offset.checked_add(b.dims(part)[axis])?;
        }
        b.starts.insert(whole, starts);
    }
    let starts = &b.starts[&whole];
    let holds = |at: usize| {
        let (offset, length) = (starts[at], b.dims(parts[at])[axis]);
        let all = start == offset && n == length && step == 1;
        let inside = || {
            let (start, n, offset, length) = (
                start.as_fixed()?,
                n.as_fixed()?,
                offset.as_fixed()?,
                length.as_fixed()?,
            );
            let last = start.checked_add(n.checked_sub(1)?.checked_mul(i64::from(step))?)?;
            Some(n > 0 && start >= offset && last < offset.checked_add(length)?)
        };
        all || inside() == Some(true)
    };
    // Where all lengths are numbers, the part is the last one that begins there, or an empty one
    // before it.
    let fixed = start
        .as_fixed()
        .filter(|_| starts.last().is_some_and(|last| last.as_fixed().is_some()));
    let from = fixed.map_or(0, |start| {
        starts
            .partition_point(|s| s.as_fixed() < Some(start))
            .saturating_sub(1)
    });
    let upto = fixed.map_or(starts.len(), |start| {
        starts.partition_point(|s| s.as_fixed() <= Some(start))
    });
    (from..upto)
        .find(|&at| holds(at))
        .map(|at| (parts[at], starts[at]))
}

/// The tensors of which the parts of a concatenation are reshapes that join its axis with the next
/// one, and the length of that, if it is the same in all: heads side by side. Then these can be
/// concatenated, and the parts need not be written before the whole.
fn divided(b: &Builder, axis: usize, parts: &[NodeId]) -> Option<(Vec<NodeId>, Size)> {
    let apart = |&part: &NodeId| {
        let (from, to) = (
            b.dims((*b.op(part) == Op::Reshape).then(|| b.operand(part))?),
            b.dims(part),
        );
        let joined = from.len() == to.len() + 1
            && from[..axis] == to[..axis]
            && from[axis + 2..] == to[axis + 1..];
        (joined && from[axis].checked_mul(from[axis + 1]) == Some(to[axis]))
            .then(|| (b.operand(part), from[axis + 1]))
    };
    let found: Vec<(NodeId, Size)> = parts.iter().map(apart).collect::<Option<_>>()?;
    let inner = found.first()?.1;
    found
        .iter()
        .all(|part| part.1 == inner)
        .then(|| (found.into_iter().map(|part| part.0).collect(), inner))
}

/// A sum of neighbours, each on a canvas of zeros: both side by side on one, as the parts of a
/// split give their gradients back. (x + 0 = x, but for −0 + 0 = 0.)
pub(super) fn neighbours(b: &mut Builder, x: NodeId, y: NodeId, dims: &Dims) -> Option<NodeId> {
    let placed = |id: NodeId| {
        let node = b.new.node(id);
        let Op::Pad { start, step, value } = &node.op else {
            return None;
        };
        // −0 is another number.
        let is_zero = matches!(value, Value::F32(zero) if zero.to_bits() == 0);
        (is_zero && step.iter().all(|&s| s == 1)).then(|| (node.inputs[0], start.clone()))
    };
    let [(first, start), (second, behind)] = [placed(x)?, placed(y)?];
    if b.dtype(first) != b.dtype(second) {
        return None;
    }
    let axis = (0..dims.len()).find(|&i| start[i] != behind[i])?;
    let meets = |part: NodeId, start: &Dims, behind: &Dims| {
        start[axis].checked_add(b.dims(part)[axis]) == Some(behind[axis])
    };
    let (parts, start, behind) = if meets(first, &start, &behind) {
        ([first, second], start, behind)
    } else if meets(second, &behind, &start) {
        ([second, first], behind, start)
    } else {
        return None;
    };
    let [one, other] = parts.map(|part| b.dims(part));
    if (0..dims.len()).any(|i| i != axis && (start[i] != behind[i] || one[i] != other[i])) {
        return None;
    }
    let mut both = one.clone();
    both[axis] = one[axis].checked_add(other[axis])?;
    let dtype = b.dtype(x);
    let step = SmallVec::from_elem(1, dims.len());
    let joined = b.emit(Op::Concat { axis }, &parts, dtype, both);
    Some(b.emit(
        Op::Pad {
            start,
            step,
            value: Value::F32(0.0),
        },
        &[joined],
        dtype,
        dims.clone(),
    ))
}

/// A simpler node for a reduction: along an axis of length 1 there is nothing to reduce.
pub(super) fn rewrite_reduce(
    b: &mut Builder,
    op: ReduceOp,
    axes: &Axes,
    x: NodeId,
    dims: &Dims,
) -> Option<NodeId> {
    let long: Axes = axes
        .iter()
        .copied()
        .filter(|&a| !b.dims(x)[a].is(1))
        .collect();
    match (op, long.is_empty()) {
        (ReduceOp::ArgMax | ReduceOp::ArgMin, true) => {
            Some(b.full_of(Value::I32(0), DType::I32, dims))
        }
        (_, true) => Some(x),
        // The position among the reduced elements stays as it was.
        (_, false) => (long.len() < axes.len()).then(|| b.reduce(op, x, &long)),
    }
}
