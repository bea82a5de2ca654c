//! Replacing a part of a tensor, and its gradient.

use slabwise_kernels::dtype::DType;
use slabwise_kernels::scalar::{ScalarOp, Value};
use slabwise_kernels::size::Size;
use slabwise_kernels::spec::Dims;
use smallvec::SmallVec;

use super::rules::{Gradients, Rule, TensorType};
use super::{GraphBuilder, NodeId, Op};
use crate::shape::Symbols;

/// Where the part lies: the fields of [`Op::SliceAssign`].
pub(super) struct Part<'a> {
    pub start: &'a Dims,
    pub step: &'a SmallVec<[u32; 6]>,
    pub axis: Option<usize>,
}

pub(super) fn infer(part: &Part<'_>, given: &[TensorType<'_>], symbols: &Symbols) -> Rule {
    let (base, value) = (given[0], given[1]);
    let say = |why: &str| {
        Err(format!(
            "assign {} {} to a part of {} {}: {why}",
            value.dtype,
            symbols.show(value.dims),
            base.dtype,
            symbols.show(base.dims)
        ))
    };
    if base.dtype != value.dtype {
        return say("the types must agree");
    }
    let rank = base.dims.len();
    if value.dims.len() != rank || part.start.len() != rank || part.step.len() != rank {
        return say("both need equally many axes");
    }
    let bounds = symbols.bounds();
    let outside = |a: usize| {
        let span = (value.dims[a].at(&bounds) - 1).saturating_mul(i64::from(part.step[a]));
        let end = part.start[a].at(&bounds).saturating_add(span);
        value.dims[a].at(&bounds) > 0 && end >= base.dims[a].at(&bounds)
    };
    if (0..rank).any(outside) {
        return say("the part does not fit");
    }
    if let Some(axis) = part.axis {
        let place = given[2];
        let fits = |a: usize| place.dims[a].is(1) || (a != axis && place.dims[a] == value.dims[a]);
        let alike = axis < rank && place.dims.len() == rank && (0..rank).all(fits);
        if place.dtype != DType::I32 || !alike {
            return say("the place is i32, one number for each slice along the axis");
        }
    }
    Ok((base.dtype, Dims::from_slice(base.dims)))
}

pub(super) fn gradient(
    g: &mut dyn GraphBuilder,
    part: &Part<'_>,
    inputs: &[NodeId],
    dy: NodeId,
    wanted: &[bool],
) -> Gradients {
    let mut parts: Gradients = SmallVec::from_elem(None, inputs.len());
    if !g.dtype(inputs[0]).is_float() {
        return parts;
    }
    let (dtype, dims) = (g.dtype(dy), g.dims(dy).clone());
    let space = g.dims(inputs[1]).clone();
    if wanted[0] {
        let zeros = g.full(0.0, dtype, &space);
        let mut rest: SmallVec<[NodeId; 3]> = SmallVec::from_slice(inputs);
        (rest[0], rest[1]) = (dy, zeros);
        let op = Op::SliceAssign {
            start: part.start.clone(),
            step: part.step.clone(),
            axis: part.axis,
        };
        parts[0] = Some(g.emit(op, &rest, dtype, dims.clone()));
    }
    if wanted[1] {
        let (mut start, mut step, mut sliced) =
            (part.start.clone(), part.step.clone(), space.clone());
        if let Some(axis) = part.axis {
            (start[axis], step[axis], sliced[axis]) = (Size::ZERO, 1, dims[axis]);
        }
        let slice = g.emit(Op::Slice { start, step }, &[dy], dtype, sliced);
        parts[1] = Some(match part.axis {
            None => slice,
            Some(axis) => {
                let index = places(g, part, axis, inputs[2], space[axis]);
                let index = g.broadcast(index, &space);
                g.emit(Op::Gather { axis }, &[slice, index], dtype, space)
            }
        });
    }
    parts
}

/// The positions along the axis at which a part of this length lies.
fn places(
    g: &mut dyn GraphBuilder,
    part: &Part<'_>,
    axis: usize,
    place: NodeId,
    length: Size,
) -> NodeId {
    let mut dims = g.dims(place).clone();
    dims[axis] = length;
    let mut strides: Dims = SmallVec::from_elem(Size::ZERO, dims.len());
    strides[axis] = Size::from(part.step[axis]);
    let along = g.emit(Op::Index(strides), &[], DType::I32, dims.clone());
    let place = g.broadcast(place, &dims);
    let index = g.scalar(ScalarOp::Add, &[along, place]);
    let start = part.start[axis];
    let first = match start.as_fixed().and_then(|n| i32::try_from(n).ok()) {
        Some(0) => return index,
        Some(n) => g.emit(Op::Const(Value::I32(n)), &[], DType::I32, Dims::new()),
        None => g.emit(Op::Size(start), &[], DType::I32, Dims::new()),
    };
    let first = g.broadcast(first, &dims);
    g.add(index, first)
}
