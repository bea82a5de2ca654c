//! Scatter: writes at positions that indices name, for elements, slices, coordinates and segments.
//! An index out of range fails the run, naming the user's line.
//!
//! Results do not depend on the number of threads: values of one position are combined in their
//! row-major order, and of several values that are set the last one remains (as in NumPy).

use std::panic::Location;

use slabwise_kernels::dtype::DType;
use slabwise_kernels::scalar::ScalarOp;
use slabwise_kernels::size::Size;
use slabwise_kernels::spec::{Dims, ReduceOp};
use smallvec::SmallVec;

use super::index::{flat_places, require_index};
use super::{AxisIndex, Operand, Tensor, check_index, checked_as, no_axis};
use crate::graph::Graph;
use crate::ops::{GraphBuilder, NodeId, Op};

/// The reduction of a scatter: how values are combined with the element at their position, and with
/// each other if several have one position.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Scatter {
    /// The last value replaces the element. Its gradient goes to that value alone.
    Set,
    /// The sum, of f32 or i32, which wraps.
    Add,
    /// The product, of f32 or i32, which wraps.
    Mul,
    /// The smallest, of f32 or i32; NaN if any is. Equals share the gradient.
    Min,
    /// The largest, of f32 or i32; NaN if any is. Equals share the gradient.
    Max,
}

impl Scatter {
    /// The reduction of the values, and the operation that joins it with the element.
    fn parts(self) -> Option<(ReduceOp, ScalarOp)> {
        match self {
            Scatter::Set => None,
            Scatter::Add => Some((ReduceOp::Sum, ScalarOp::Add)),
            Scatter::Mul => Some((ReduceOp::Prod, ScalarOp::Mul)),
            Scatter::Min => Some((ReduceOp::Min, ScalarOp::Min)),
            Scatter::Max => Some((ReduceOp::Max, ScalarOp::Max)),
        }
    }
}

/// The message for types that do not go together, or cannot be reduced.
fn check_types(g: &Graph, what: &str, [x, value]: [NodeId; 2], how: Scatter) -> Result<(), String> {
    let (own, other) = (g.dtype(x), g.dtype(value));
    if own != other {
        return Err(format!(
            "{what} of {own} and {other}: the types must agree; convert with cast"
        ));
    }
    if how != Scatter::Set && !matches!(own, DType::F32 | DType::I32) {
        return Err(format!(
            "{what} by {how:?} does not take {own}; convert with cast"
        ));
    }
    Ok(())
}

/// A tensor with values scattered along an axis. Values have its shape except along the axis; the
/// index has the shape of the values, or length 1 along axes on which it does not depend.
fn scatter_along(
    g: &mut Graph,
    axis: usize,
    [x, index, value]: [NodeId; 3],
    how: Scatter,
) -> Result<NodeId, String> {
    let (dims, space) = (g.dims(x).clone(), g.dims(value).clone());
    check_index(g, index, dims[axis]);
    if space[axis].is(0) {
        return Ok(x);
    }
    let Some((reduce, join)) = how.parts() else {
        // The last value of each place, by the largest of their positions.
        let mut own = g.dims(index).clone();
        let column = g.emit(
            Op::Index(Dims::from_slice(&[Size::ONE])),
            &[],
            DType::I32,
            Dims::from_slice(&[space[axis]]),
        );
        let mut along: Dims = SmallVec::from_elem(Size::ONE, own.len());
        along[axis] = space[axis];
        let column = g.reshape(column, &along);
        let column = g.broadcast(column, &own);
        own[axis] = dims[axis];
        let op = Op::Scatter {
            axis,
            reduce: ReduceOp::Max,
        };
        let last = checked_as(g, op, &[column, index], DType::I32, &own)?;
        let zero = g.full(0.0, DType::I32, &own);
        let is_set = g.scalar(ScalarOp::Ge, &[last, zero]);
        let position = g.scalar(ScalarOp::Max, &[last, zero]);
        let position = g.broadcast(position, &dims);
        let is_set = g.broadcast(is_set, &dims);
        let dtype = g.dtype(value);
        let chosen = g.emit(Op::Gather { axis }, &[value, position], dtype, dims);
        let joined = g.scalar(ScalarOp::Select, &[is_set, chosen, x]);
        return Ok(g.cast(joined, dtype));
    };
    let index = g.broadcast(index, &space);
    let dtype = g.dtype(value);
    let op = Op::Scatter { axis, reduce };
    let reduced = checked_as(g, op, &[value, index], dtype, &dims)?;
    Ok(g.scalar(join, &[x, reduced]))
}

/// An index of one axis as a column along `axis` of `rank` axes.
fn column(g: &mut Graph, index: NodeId, axis: usize, rank: usize) -> NodeId {
    let mut along: Dims = SmallVec::from_elem(Size::ONE, rank);
    along[axis] = g.dims(index)[0];
    g.reshape(index, &along)
}

/// Refuses an index that is not one axis of integers.
fn require_list(g: &Graph, what: &str, index: NodeId) -> Result<Size, String> {
    require_index(g, what, index)?;
    match g.dims(index).as_slice() {
        &[n] => Ok(n),
        other => Err(format!(
            "{what} by {}: an index of one axis is needed",
            g.symbols.show(other)
        )),
    }
}

/// Values at coordinates of the leading axes: `places` are the coordinates, of one shape.
fn scatter_at(
    g: &mut Graph,
    what: &str,
    x: NodeId,
    places: &[NodeId],
    value: NodeId,
    how: Scatter,
) -> Result<NodeId, String> {
    let dims = g.dims(x).clone();
    let rest = &dims[places.len()..];
    let (flat, count) = flat_places(g, what, places, &dims[..places.len()])?;
    let shape =
        |first: Size| -> Dims { std::iter::once(first).chain(rest.iter().copied()).collect() };
    let (own, values) = (shape(count), shape(g.dims(flat)[0]));
    let index = column(g, flat, 0, own.len());
    let (rows, value) = (g.reshape(x, &own), g.reshape(value, &values));
    let written = scatter_along(g, 0, [rows, index, value], how)?;
    Ok(g.reshape(written, &dims))
}

impl<'t> Tensor<'t> {
    /// This tensor with values combined with the elements that an index names along an axis:
    /// `self[… index[… i …] …]` is combined with `values[… i …]`, for every `i` of the index. Index
    /// and values have one shape, which may be shorter than this tensor's along the other axes. A
    /// number is a value for every index.
    ///
    /// ```
    /// # use slabwise::prelude::*;
    /// # use slabwise::Scatter;
    /// # let trace = Trace::inference();
    /// let x = trace.input("x", F32, (3, 5));
    /// let index = trace.input("index", I32, (3, 2));
    /// let values = trace.input("values", F32, (3, 2));
    /// let y = x.scatter(1, index, values, Scatter::Max);
    /// ```
    #[track_caller]
    pub fn scatter(
        self,
        axis: impl AxisIndex,
        index: Tensor<'t>,
        values: impl Operand<'t>,
        how: Scatter,
    ) -> Tensor<'t> {
        let axis = axis.index(self.rank());
        let at = Location::caller();
        let values = values.lift(self.trace, self.dtype(), at);
        self.trace.record(at, &[self, index, values], |g, ids| {
            let &[x, index, value] = ids else {
                return Err("scatter: three operands".into());
            };
            if axis >= g.dims(x).len() {
                return Err(no_axis(g, "scatter", axis, x));
            }
            require_index(g, "scatter", index)?;
            check_types(g, "scatter", [x, value], how)?;
            let (dims, space) = (g.dims(x).clone(), g.dims(index).clone());
            let value = if g.dims(value).is_empty() {
                g.broadcast(value, &space)
            } else {
                value
            };
            let bounds = g.symbols.bounds();
            let inside = |a: usize| {
                a == axis || space[a] == dims[a] || {
                    let fixed = space[a].as_fixed().zip(dims[a].as_fixed());
                    fixed.is_some_and(|_| space[a].at(&bounds) <= dims[a].at(&bounds))
                }
            };
            let fits = space.len() == dims.len() && (0..dims.len()).all(inside);
            if !fits || *g.dims(value) != space {
                return Err(format!(
                    "scatter {} by {} along axis {axis} of {}: index and values need one shape, \
                     no longer than the tensor's along the other axes",
                    g.symbols.show(g.dims(value)),
                    g.symbols.show(&space),
                    g.symbols.show(&dims)
                ));
            }
            let mut part = space.clone();
            part[axis] = dims[axis];
            let (start, step) = (
                SmallVec::from_elem(Size::ZERO, dims.len()),
                SmallVec::from_elem(1, dims.len()),
            );
            if part == dims {
                return scatter_along(g, axis, [x, index, value], how);
            }
            let dtype = g.dtype(x);
            let op = Op::Slice {
                start: Dims::clone(&start),
                step: SmallVec::clone(&step),
            };
            let reached = g.emit(op, &[x], dtype, part);
            let written = scatter_along(g, axis, [reached, index, value], how)?;
            let op = Op::SliceAssign {
                start,
                step,
                axis: None,
            };
            checked_as(g, op, &[x, written], dtype, &dims)
        })
    }

    /// This tensor with values added to the elements that an index names along an axis:
    /// [`Tensor::scatter`] by [`Scatter::Add`].
    #[track_caller]
    pub fn scatter_add(
        self,
        axis: impl AxisIndex,
        index: Tensor<'t>,
        values: impl Operand<'t>,
    ) -> Tensor<'t> {
        let axis = axis.index(self.rank());
        self.scatter(axis, index, values, Scatter::Add)
    }

    /// This tensor with slices combined with the slices of an axis that an index `[n]` names, where
    /// `values` have this tensor's shape, but length n along the axis.
    #[track_caller]
    pub fn index_scatter(
        self,
        axis: impl AxisIndex,
        index: Tensor<'t>,
        values: impl Operand<'t>,
        how: Scatter,
    ) -> Tensor<'t> {
        let axis = axis.index(self.rank());
        let at = Location::caller();
        let values = values.lift(self.trace, self.dtype(), at);
        self.trace.record(at, &[self, index, values], |g, ids| {
            let &[x, index, value] = ids else {
                return Err("index_scatter: three operands".into());
            };
            let mut space = g.dims(x).clone();
            if axis >= space.len() {
                return Err(no_axis(g, "index_scatter", axis, x));
            }
            check_types(g, "index_scatter", [x, value], how)?;
            space[axis] = require_list(g, "index_scatter", index)?;
            let value = if g.dims(value).is_empty() {
                g.broadcast(value, &space)
            } else {
                value
            };
            if *g.dims(value) != space {
                return Err(format!(
                    "index_scatter {} along axis {axis} of {}: {} is needed",
                    g.symbols.show(g.dims(value)),
                    g.symbols.show(g.dims(x)),
                    g.symbols.show(&space)
                ));
            }
            let index = column(g, index, axis, space.len());
            scatter_along(g, axis, [x, index, value], how)
        })
    }

    /// This tensor with slices added to the slices of an axis that an index `[n]` names:
    /// [`Tensor::index_scatter`] by [`Scatter::Add`].
    #[track_caller]
    pub fn index_add(
        self,
        axis: impl AxisIndex,
        index: Tensor<'t>,
        values: impl Operand<'t>,
    ) -> Tensor<'t> {
        let axis = axis.index(self.rank());
        self.index_scatter(axis, index, values, Scatter::Add)
    }

    /// This tensor with the slices of an axis that an index `[n]` names replaced:
    /// [`Tensor::index_scatter`] by [`Scatter::Set`].
    #[track_caller]
    pub fn index_copy(
        self,
        axis: impl AxisIndex,
        index: Tensor<'t>,
        values: impl Operand<'t>,
    ) -> Tensor<'t> {
        let axis = axis.index(self.rank());
        self.index_scatter(axis, index, values, Scatter::Set)
    }

    /// This tensor with values combined at coordinates: `index` is `[…, k]`, a row of coordinates
    /// along the first k axes for each value, and `values` are `[…]` followed by the other axes.
    /// (ScatterND of ONNX.)
    #[track_caller]
    pub fn scatter_nd(
        self,
        index: Tensor<'t>,
        values: impl Operand<'t>,
        how: Scatter,
    ) -> Tensor<'t> {
        let at = Location::caller();
        let values = values.lift(self.trace, self.dtype(), at);
        self.trace.record(at, &[self, index, values], |g, ids| {
            let &[x, index, value] = ids else {
                return Err("scatter_nd: three operands".into());
            };
            check_types(g, "scatter_nd", [x, value], how)?;
            let places = super::index::coordinates(g, "scatter_nd", x, index, 0)?;
            let mut space = g.dims(index).clone();
            space.pop();
            space.extend(g.dims(x)[places.len()..].iter().copied());
            let value = if g.dims(value).is_empty() {
                g.broadcast(value, &space)
            } else {
                value
            };
            if *g.dims(value) != space {
                return Err(format!(
                    "scatter_nd {} by {} into {}: {} is needed",
                    g.symbols.show(g.dims(value)),
                    g.symbols.show(g.dims(index)),
                    g.symbols.show(g.dims(x)),
                    g.symbols.show(&space)
                ));
            }
            scatter_at(g, "scatter_nd", x, &places, value, how)
        })
    }

    /// This tensor with values combined at coordinates: one index tensor for each of the first
    /// axes, broadcast to one shape. `values` broadcast to that shape followed by the other axes,
    /// as in `x[i, j] = values` of NumPy.
    #[track_caller]
    pub fn index_put(
        self,
        indices: &[Tensor<'t>],
        values: impl Operand<'t>,
        how: Scatter,
    ) -> Tensor<'t> {
        let at = Location::caller();
        let values = values.lift(self.trace, self.dtype(), at);
        let mut operands = vec![self, values];
        operands.extend_from_slice(indices);
        self.trace.record(at, &operands, |g, ids| {
            let (&[x, value], indices) = ids.split_at(2) else {
                return Err("index_put: two operands".into());
            };
            check_types(g, "index_put", [x, value], how)?;
            let places = super::index::broadcast_indices(g, "index_put", x, indices)?;
            let mut space = g.dims(places[0]).clone();
            space.extend(g.dims(x)[places.len()..].iter().copied());
            let joined = super::elementwise::broadcast_shape(g.dims(value), &space);
            if joined.as_ref() != Some(&space) {
                return Err(format!(
                    "index_put {} into {}: values that broadcast to {} are needed",
                    g.symbols.show(g.dims(value)),
                    g.symbols.show(g.dims(x)),
                    g.symbols.show(&space)
                ));
            }
            let value = g.broadcast(value, &space);
            scatter_at(g, "index_put", x, &places, value, how)
        })
    }

    #[track_caller]
    fn segment(
        self,
        what: &str,
        segments: Tensor<'t>,
        count: usize,
        reduce: ReduceOp,
    ) -> Tensor<'t> {
        self.trace
            .record(Location::caller(), &[self, segments], |g, ids| {
                let &[x, segments] = ids else {
                    return Err(format!("{what}: two operands"));
                };
                let n = require_list(g, what, segments)?;
                let space = g.dims(x).clone();
                if space.first() != Some(&n) {
                    return Err(format!(
                        "{what} of {} by {}: one segment number for each slice of axis 0 is needed",
                        g.symbols.show(&space),
                        g.symbols.show(g.dims(segments))
                    ));
                }
                if !matches!(g.dtype(x), DType::F32 | DType::I32) {
                    return Err(format!(
                        "{what} does not take {}; convert with cast",
                        g.dtype(x)
                    ));
                }
                let count = i64::try_from(count)
                    .ok()
                    .filter(|&n| n <= 1 << 31)
                    .ok_or_else(|| format!("{what}: {count} segments cannot be numbered"))?;
                let mut dims = space.clone();
                dims[0] = Size::fixed(count);
                check_index(g, segments, dims[0]);
                let index = column(g, segments, 0, space.len());
                let index = g.broadcast(index, &space);
                let dtype = g.dtype(x);
                checked_as(
                    g,
                    Op::Scatter { axis: 0, reduce },
                    &[x, index],
                    dtype,
                    &dims,
                )
            })
    }

    /// The sum of the slices of each segment: `[n, …] → [count, …]`, where `segments` `[n]` has the
    /// number of each slice's segment, in any order. 0 for a segment without slices.
    #[track_caller]
    pub fn segment_sum(self, segments: Tensor<'t>, count: usize) -> Tensor<'t> {
        self.segment("segment_sum", segments, count, ReduceOp::Sum)
    }

    /// The product of the slices of each segment, like [`Tensor::segment_sum`]; 1 for a segment
    /// without slices.
    #[track_caller]
    pub fn segment_prod(self, segments: Tensor<'t>, count: usize) -> Tensor<'t> {
        self.segment("segment_prod", segments, count, ReduceOp::Prod)
    }

    /// The largest elements of each segment, like [`Tensor::segment_sum`]; −∞ or the lowest i32 for
    /// a segment without slices.
    #[track_caller]
    pub fn segment_max(self, segments: Tensor<'t>, count: usize) -> Tensor<'t> {
        self.segment("segment_max", segments, count, ReduceOp::Max)
    }

    /// The smallest elements of each segment, like [`Tensor::segment_sum`]; ∞ or the highest i32
    /// for a segment without slices.
    #[track_caller]
    pub fn segment_min(self, segments: Tensor<'t>, count: usize) -> Tensor<'t> {
        self.segment("segment_min", segments, count, ReduceOp::Min)
    }
}
