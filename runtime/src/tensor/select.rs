//! Selection by value: results have data-dependent lengths.
//!
//! To later operations such a length is a dimension like a bounded one. Values that have it are not
//! planned in the slab: they live in the pool, or in bytes of the slab that are free in the plan at
//! that time.

use std::panic::Location;

use slabwise_kernels::dtype::DType;
use slabwise_kernels::scalar::{ScalarOp, Value};
use slabwise_kernels::size::Size;
use slabwise_kernels::spec::{Dims, ReduceOp};
use smallvec::SmallVec;

use super::elementwise::broadcast_all;
use super::{AxisIndex, Operand, Tensor, check_index, checked, checked_as, no_axis};
use crate::graph::Graph;
use crate::ops::{Axes, GraphBuilder, NodeId, Op};
use crate::shape::elements;
use crate::trace::countable;

/// The number of a node's elements, if they can be numbered.
fn numbered(g: &Graph, what: &str, x: NodeId) -> Result<Size, String> {
    countable(what, &g.symbols, g.dims(x))?;
    elements(g.dims(x)).ok_or_else(|| {
        format!(
            "{what}: the number of elements of {} has no form as one size",
            g.symbols.show(g.dims(x))
        )
    })
}

/// The elements in one axis.
fn flat(g: &mut Graph, x: NodeId, count: Size) -> NodeId {
    g.reshape(x, &Dims::from_slice(&[count]))
}

/// A new data-dependent length, which a scalar (i32) has in a run; at most `most`.
fn found(g: &mut Graph, length: NodeId, most: Size) -> Result<Size, String> {
    let symbol = g.symbols.data_dependent(most)?;
    checked(g, Op::Bind { symbol }, &[length])?;
    Ok(Size::symbol(symbol))
}

/// A data-dependent length, given by a scalar (i32) in a run and checked to lie within `most`. Each
/// scalar has one length, so that values measured by it have the same length.
fn found_once(g: &mut Graph, length: NodeId, most: Size) -> Result<Size, String> {
    let asked = g.ids().rev().find_map(|id| match g.node(id).op {
        Op::Bind { symbol } if same_view(g, g.node(id).inputs[0], length) => Some(symbol),
        _ => None,
    });
    asked.map_or_else(|| found(g, length, most), |symbol| Ok(Size::symbol(symbol)))
}

/// Whether two nodes are the same views of one node, or the same number.
fn same_view(g: &Graph, a: NodeId, b: NodeId) -> bool {
    let (x, y) = (g.node(a), g.node(b));
    a == b
        || (matches!(x.op, Op::Const(_)) && x.op == y.op && x.dims == y.dims)
        || (x.op.is_view()
            && x.op == y.op
            && x.dims == y.dims
            && same_view(g, x.inputs[0], y.inputs[0]))
}

/// Row-major positions of true elements: i32 of one axis. Each mask is searched once, so that all
/// selections by it have the same length.
fn true_positions(g: &mut Graph, what: &str, mask: NodeId) -> Result<NodeId, String> {
    let most = numbered(g, what, mask)?;
    let mask = flat(g, mask, most);
    let asked = g
        .ids()
        .rev()
        .find(|&id| g.node(id).op == Op::Nonzero && same_view(g, g.node(id).inputs[0], mask));
    if let Some(positions) = asked {
        return Ok(positions);
    }
    let ones = g.cast(mask, DType::I32);
    let count = g.reduce(ReduceOp::Sum, ones, &[0]);
    let count = g.reshape(count, &Dims::new());
    let length = found(g, count, most)?;
    checked_as(
        g,
        Op::Nonzero,
        &[mask],
        DType::I32,
        &Dims::from_slice(&[length]),
    )
}

/// Gathers elements of one axis by positions that are in range.
fn taken(g: &mut Graph, x: NodeId, positions: NodeId) -> NodeId {
    let (dtype, dims) = (g.dtype(x), g.dims(positions).clone());
    g.emit(Op::Gather { axis: 0 }, &[x, positions], dtype, dims)
}

/// A size as i32, repeated to the shape of a node.
pub(super) fn size_like(g: &mut Graph, size: Size, like: NodeId) -> NodeId {
    let dims = g.dims(like).clone();
    let one = match size.as_fixed().map(i32::try_from) {
        Some(Ok(n)) => g.emit(Op::Const(Value::I32(n)), &[], DType::I32, Dims::new()),
        _ => g.emit(Op::Size(size), &[], DType::I32, Dims::new()),
    };
    g.broadcast(one, &dims)
}

/// The order along the last axis, as positions.
fn order(g: &mut Graph, x: NodeId, descending: bool) -> Result<NodeId, String> {
    let dims = g.dims(x).clone();
    countable("argsort", &g.symbols, &dims)?;
    checked_as(g, Op::Sort { descending }, &[x], DType::I32, &dims)
}

/// The order along an axis, as positions: of the first `wanted`, or of all.
pub(super) fn order_along(
    g: &mut Graph,
    what: &str,
    x: NodeId,
    axis: usize,
    wanted: Option<Size>,
    descending: bool,
) -> Result<NodeId, String> {
    let rank = g.dims(x).len();
    if axis >= rank {
        return Err(no_axis(g, what, axis, x));
    }
    if g.dtype(x) == DType::Bool {
        return Err(format!("{what} does not take bool; convert with cast"));
    }
    countable(what, &g.symbols, g.dims(x))?;
    let to_last = axis_last(axis, rank);
    let moved = g.permute(x, &to_last);
    let mut dims = g.dims(moved).clone();
    if let Some(wanted) = wanted {
        dims[rank - 1] = wanted;
    }
    let positions = checked_as(g, Op::Sort { descending }, &[moved], DType::I32, &dims)?;
    Ok(g.permute(positions, &axis_back(axis, rank)))
}

/// The axes with one of them last.
pub(super) fn axis_last(axis: usize, rank: usize) -> Axes {
    (0..rank).filter(|&a| a != axis).chain([axis]).collect()
}

/// The inverse of [`axis_last`].
pub(super) fn axis_back(axis: usize, rank: usize) -> Axes {
    let mut axes: Axes = (0..rank - 1).collect();
    axes.insert(axis, rank - 1);
    axes
}

impl<'t> Tensor<'t> {
    /// The positions of nonzero elements: i32 `[count, axes]`, one row of coordinates for each, in
    /// row-major order. Their number is data-dependent.
    #[track_caller]
    pub fn nonzero(self) -> Tensor<'t> {
        self.trace.record(Location::caller(), &[self], |g, ids| {
            let (x, dtype, dims) = (ids[0], g.dtype(ids[0]), g.dims(ids[0]).clone());
            let mask = if dtype == DType::Bool {
                x
            } else {
                let zero = g.full(0.0, dtype, &dims);
                g.scalar(ScalarOp::Ne, &[x, zero])
            };
            let positions = true_positions(g, "nonzero", mask)?;
            let count = g.dims(positions)[0];
            if dims.is_empty() {
                return Ok(g.full(0.0, DType::I32, &Dims::from_slice(&[count, Size::ZERO])));
            }
            let mut columns = Vec::with_capacity(dims.len());
            let mut below = Size::ONE;
            for &dim in dims.iter().rev() {
                // position / below − position / (below · dim) · dim
                let row = below
                    .checked_mul(dim)
                    .ok_or("nonzero: a stride has no form as one size")?;
                let (a, b, n) = (
                    size_like(g, below, positions),
                    size_like(g, row, positions),
                    size_like(g, dim, positions),
                );
                let steps = g.scalar(ScalarOp::Div, &[positions, a]);
                let whole = g.scalar(ScalarOp::Div, &[positions, b]);
                let before = g.mul(whole, n);
                let coordinate = g.scalar(ScalarOp::Sub, &[steps, before]);
                columns.push(g.reshape(coordinate, &Dims::from_slice(&[count, Size::ONE])));
                below = row;
            }
            columns.reverse();
            if let [only] = columns[..] {
                Ok(only)
            } else {
                checked(g, Op::Concat { axis: 1 }, &columns)
            }
        })
    }

    /// The elements at which a mask is true, in row-major order: `[count]`. The mask and this
    /// tensor are broadcast to one shape. The number of elements is data-dependent, and the same
    /// for all selections by one mask. A gradient goes back to the position of its element.
    #[track_caller]
    pub fn masked_select(self, mask: Tensor<'t>) -> Tensor<'t> {
        self.trace
            .record(Location::caller(), &[self, mask], |g, ids| {
                if g.dtype(ids[1]) != DType::Bool {
                    return Err(format!(
                        "masked_select by {}: a mask of truth values is needed",
                        g.dtype(ids[1])
                    ));
                }
                let both = broadcast_all(g, "masked_select", ids)?;
                let positions = true_positions(g, "masked_select", both[1])?;
                let count = numbered(g, "masked_select", both[0])?;
                let x = flat(g, both[0], count);
                Ok(taken(g, x, positions))
            })
    }

    /// The slices of an axis at which a mask `[n]` is true, where n is the axis's length. Their
    /// number is data-dependent, and the same for all selections by one mask. A gradient goes back
    /// to the position of its slice.
    #[track_caller]
    pub fn compress(self, axis: impl AxisIndex, mask: Tensor<'t>) -> Tensor<'t> {
        let axis = axis.index(self.rank());
        self.trace.record(Location::caller(), &[self, mask], |g, ids| {
            let mut dims = g.dims(ids[0]).clone();
            let Some(&len) = dims.get(axis) else { return Err(no_axis(g, "compress", axis, ids[0])) };
            if g.dtype(ids[1]) != DType::Bool || g.dims(ids[1]).as_slice() != [len] {
                let (x, mask) = (g.symbols.show(&dims), g.symbols.show(g.dims(ids[1])));
                return Err(format!("compress axis {axis} of {x} by {} {mask}: one truth value for each slice is needed", g.dtype(ids[1])));
            }
            let positions = true_positions(g, "compress", ids[1])?;
            let mut along: Dims = SmallVec::from_elem(Size::ONE, dims.len());
            (along[axis], dims[axis]) = (g.dims(positions)[0], g.dims(positions)[0]);
            let index = g.reshape(positions, &along);
            let index = g.broadcast(index, &dims);
            checked(g, Op::Gather { axis }, &[ids[0], index])
        })
    }

    /// The distinct values of all elements, ascending: `[count]`. Each NaN differs from every
    /// other. Their number is data-dependent. There is no gradient.
    #[track_caller]
    pub fn unique(self) -> Tensor<'t> {
        self.trace.record(Location::caller(), &[self], |g, ids| {
            let count = numbered(g, "unique", ids[0])?;
            let x = flat(g, ids[0], count);
            let x = if g.dtype(x).is_float() {
                // Arithmetic on halves gives f32.
                let dtype = g.dtype(x);
                let detached = g.scalar(ScalarOp::Detach, &[x]);
                g.cast(detached, dtype)
            } else {
                x
            };
            let ascending = order(g, x, false)?;
            let sorted = taken(g, x, ascending);
            let dims = Dims::from_slice(&[count]);
            let place = g.emit(
                Op::Index(Dims::from_slice(&[Size::ONE])),
                &[],
                DType::I32,
                dims.clone(),
            );
            let (zero, one) = (
                g.full(0.0, DType::I32, &dims),
                g.full(1.0, DType::I32, &dims),
            );
            let before = g.scalar(ScalarOp::Sub, &[place, one]);
            let before = g.scalar(ScalarOp::Max, &[before, zero]);
            let neighbour = taken(g, sorted, before);
            let (differs, is_first) = (
                g.scalar(ScalarOp::Ne, &[sorted, neighbour]),
                g.scalar(ScalarOp::Eq, &[place, zero]),
            );
            let starts = g.scalar(ScalarOp::Or, &[differs, is_first]);
            let positions = true_positions(g, "unique", starts)?;
            Ok(taken(g, sorted, positions))
        })
    }

    /// The part of an axis that begins at `start` and is `length` long, both i32 scalars of the
    /// run. A part outside of the axis fails the run. Parts measured by the same length tensor have
    /// the same length: two of them can be added, even parts of different tensors. A gradient goes
    /// back to the position of its element.
    #[track_caller]
    pub fn dynamic_slice(
        self,
        axis: impl AxisIndex,
        start: impl Operand<'t>,
        length: impl Operand<'t>,
    ) -> Tensor<'t> {
        let axis = axis.index(self.rank());
        let at = Location::caller();
        let (start, length) = (
            start.lift(self.trace, DType::I32, at),
            length.lift(self.trace, DType::I32, at),
        );
        self.trace.record(at, &[self, start, length], |g, ids| {
            let (len, _) = part_of(g, "dynamic_slice", ids, axis)?;
            let past = len
                .checked_add(Size::ONE)
                .ok_or("dynamic_slice: the axis is too long")?;
            check_index(g, ids[1], past);
            let part = found_once(g, ids[2], len)?;
            let end = g.add(ids[1], ids[2]);
            check_index(g, end, past);
            slice_from(g, ids[0], axis, ids[1], part)
        })
    }

    /// The `length` elements of an axis from `start` on, an i32 scalar of the run. A part outside
    /// of the axis fails the run. Because the length is known, the result is planned in the slab.
    #[track_caller]
    pub fn slice_from(
        self,
        axis: impl AxisIndex,
        start: impl Operand<'t>,
        length: usize,
    ) -> Tensor<'t> {
        let axis = axis.index(self.rank());
        self.part_from("slice_from", axis, start, length, false)
    }

    /// [`Tensor::slice_from`] with a start that cannot fail: it is clamped to the nearest start
    /// that fits, so that a step of a scan may use it.
    #[track_caller]
    pub fn slice_clamped(
        self,
        axis: impl AxisIndex,
        start: impl Operand<'t>,
        length: usize,
    ) -> Tensor<'t> {
        let axis = axis.index(self.rank());
        self.part_from("slice_clamped", axis, start, length, true)
    }

    #[track_caller]
    fn part_from(
        self,
        what: &'static str,
        axis: usize,
        start: impl Operand<'t>,
        length: usize,
        is_clamped: bool,
    ) -> Tensor<'t> {
        let at = Location::caller();
        let start = start.lift(self.trace, DType::I32, at);
        self.trace.record(at, &[self, start], |g, ids| {
            let (len, shown) = part_of(g, what, ids, axis)?;
            let part = i64::try_from(length)
                .map_err(|_| format!("{what}: {length} elements of {shown}"))?;
            let past = len
                .checked_sub(Size::fixed(part))
                .and_then(|n| n.checked_add(Size::ONE));
            let Some(past) = past.filter(|n| n.as_fixed().is_none_or(|n| n > 0)) else {
                return Err(format!(
                    "{what}: axis {axis} of {shown} does not have {length} elements"
                ));
            };
            let start = match is_clamped {
                true => clamped(g, what, ids[1], past)?,
                false => {
                    check_index(g, ids[1], past);
                    ids[1]
                }
            };
            slice_from(g, ids[0], axis, start, Size::fixed(part))
        })
    }

    /// The positions (i32) that sort the elements along the last axis, the smallest first or, if
    /// `descending`, the largest first. Equal elements keep their order; NaN counts as largest.
    #[track_caller]
    pub fn argsort(self, descending: bool) -> Tensor<'t> {
        self.trace.record(Location::caller(), &[self], |g, ids| {
            order(g, ids[0], descending)
        })
    }

    /// The elements along the last axis sorted, in the order of [`Tensor::argsort`]. A gradient
    /// goes back to the position of its element.
    #[track_caller]
    pub fn sort(self, descending: bool) -> Tensor<'t> {
        self.trace.record(Location::caller(), &[self], |g, ids| {
            let positions = order(g, ids[0], descending)?;
            let axis = g.dims(ids[0]).len() - 1;
            checked(g, Op::Gather { axis }, &[ids[0], positions])
        })
    }

    /// [`Tensor::argsort`] along any axis.
    #[track_caller]
    pub fn argsort_along(self, axis: impl AxisIndex, descending: bool) -> Tensor<'t> {
        let axis = axis.index(self.rank());
        self.trace.record(Location::caller(), &[self], |g, ids| {
            order_along(g, "argsort", ids[0], axis, None, descending)
        })
    }

    /// [`Tensor::sort`] along any axis.
    #[track_caller]
    pub fn sort_along(self, axis: impl AxisIndex, descending: bool) -> Tensor<'t> {
        let axis = axis.index(self.rank());
        self.trace.record(Location::caller(), &[self], |g, ids| {
            let positions = order_along(g, "sort", ids[0], axis, None, descending)?;
            checked(g, Op::Gather { axis }, &[ids[0], positions])
        })
    }

    /// Non-maximum suppression: of boxes `[n, 4]` (two corners x₀, y₀, x₁, y₁) with scores `[n]`,
    /// the positions (i32 `[count]`) of the selected boxes, the highest score first. A box is
    /// selected if its intersection with each better selected one is at most `threshold` of their
    /// union. Their number is data-dependent.
    #[track_caller]
    pub fn nms(self, scores: Tensor<'t>, threshold: f32) -> Tensor<'t> {
        self.trace.record(Location::caller(), &[self, scores], |g, ids| {
            let (boxes, scores) = (g.dims(ids[0]).clone(), g.dims(ids[1]).clone());
            if boxes.len() != 2 || scores.as_slice() != &boxes[..1] || g.dtype(ids[1]) != DType::F32 {
                let (boxes, scores) = (g.symbols.show(&boxes), g.symbols.show(&scores));
                return Err(format!(
                    "nms of boxes {boxes} with scores {} {scores}: [count, 4] and f32 [count] are needed",
                    g.dtype(ids[1])
                ));
            }
            let best_first = order(g, ids[1], true)?;
            let column = g.reshape(best_first, &Dims::from_slice(&[boxes[0], Size::ONE]));
            let rows = g.broadcast(column, &boxes);
            let sorted = checked(g, Op::Gather { axis: 0 }, &[ids[0], rows])?;
            let stays = checked(g, Op::NonMaxSuppression { threshold }, &[sorted])?;
            let positions = true_positions(g, "nms", stays)?;
            Ok(taken(g, best_first, positions))
        })
    }
}

/// The length of the axis of which a part is taken, and the shape as text; refuses a missing axis,
/// or a start or length that is not a scalar.
fn part_of(g: &Graph, what: &str, ids: &[NodeId], axis: usize) -> Result<(Size, String), String> {
    let Some(&len) = g.dims(ids[0]).get(axis) else {
        return Err(no_axis(g, what, axis, ids[0]));
    };
    if let Some(&odd) = ids[1..]
        .iter()
        .find(|&&id| g.dtype(id) != DType::I32 || !g.dims(id).is_empty())
    {
        return Err(format!(
            "{what}: start and length are i32 scalars, not {} {}",
            g.dtype(odd),
            g.symbols.show(g.dims(odd))
        ));
    }
    Ok((len, g.symbols.show(g.dims(ids[0])).to_string()))
}

/// Starts moved to the nearest from 0 to below `past`, which is the length of the axis without the
/// part, and 1.
pub(super) fn clamped(
    g: &mut Graph,
    what: &str,
    start: NodeId,
    past: Size,
) -> Result<NodeId, String> {
    if g.symbols.range_of(past).0 < 1 {
        return Err(format!(
            "{what}: the axis may be shorter than the part, which then fits nowhere; pad it first"
        ));
    }
    let last = past.checked_sub(Size::ONE);
    let last = last.ok_or_else(|| format!("{what}: the axis is too long"))?;
    let [zero, last] = [Size::ZERO, last].map(|n| size_like(g, n, start));
    let below = g.scalar(ScalarOp::Min, &[start, last]);
    Ok(g.scalar(ScalarOp::Max, &[below, zero]))
}

/// The part of an axis from a scalar on.
fn slice_from(
    g: &mut Graph,
    x: NodeId,
    axis: usize,
    start: NodeId,
    part: Size,
) -> Result<NodeId, String> {
    let mut dims = g.dims(x).clone();
    dims[axis] = part;
    countable("a slice", &g.symbols, &dims)?;
    let list = Dims::from_slice(&[part]);
    let along = Op::Index(Dims::from_slice(&[Size::ONE]));
    let place = g.emit(along, &[], DType::I32, list.clone());
    let start = g.broadcast(start, &list);
    let index = g.add(place, start);
    let mut column: Dims = SmallVec::from_elem(Size::ONE, dims.len());
    column[axis] = part;
    let index = g.reshape(index, &column);
    let index = g.broadcast(index, &dims);
    checked(g, Op::Gather { axis }, &[x, index])
}
