//! Selection by integer indices. An index out of range fails the run, naming the user's line.

use std::panic::Location;

use slabwise_kernels::dtype::DType;
use slabwise_kernels::scalar::ScalarOp;
use slabwise_kernels::size::Size;
use slabwise_kernels::spec::Dims;
use smallvec::SmallVec;

use super::elementwise::{broadcast_all, broadcast_shape};
use super::select::size_like;
use super::{AxisIndex, Tensor, check_index, checked, no_axis};
use crate::graph::Graph;
use crate::ops::{GraphBuilder, NodeId, Op};
use crate::shape::elements;
use crate::trace::{Line, countable};
use crate::words::count;

/// Refuses a tensor that is not an index.
pub(super) fn require_index(g: &Graph, what: &str, index: NodeId) -> Result<(), String> {
    match g.dtype(index) {
        DType::I32 | DType::U8 => Ok(()),
        other => Err(format!("{what}: indices are i32 or u8, not {other}")),
    }
}

/// Whether an integer equals the position along the last axis: `[…] → […, n]`, truth values.
pub(super) fn matches_position(g: &mut Graph, index: NodeId, n: Size) -> NodeId {
    let mut dims = g.dims(index).clone();
    dims.push(Size::ONE);
    let index = g.reshape(index, &dims);
    let last = dims.len() - 1;
    dims[last] = n;
    let index = g.broadcast(index, &dims);
    let mut strides: Dims = SmallVec::from_elem(Size::ZERO, dims.len());
    strides[last] = Size::ONE;
    let position = g.emit(Op::Index(strides), &[], DType::I32, dims);
    g.scalar(ScalarOp::Eq, &[position, index])
}

/// The row-major positions, and their limit, of coordinates along axes of these lengths: one tensor
/// of coordinates per axis, of one shape. Coordinates out of range fail the run.
pub(super) fn flat_places(
    g: &mut Graph,
    what: &str,
    places: &[NodeId],
    axes: &[Size],
) -> Result<(NodeId, Size), String> {
    let shape = g.dims(places[0]).clone();
    let no_form = || format!("{what}: the number of indices has no form as one size");
    let n = elements(&shape).ok_or_else(no_form)?;
    let count = elements(axes)
        .ok_or_else(|| format!("{what}: the number of places has no form as one size"))?;
    countable(what, &g.symbols, axes)?;
    let list = Dims::from_slice(&[n]);
    let mut flat: Option<NodeId> = None;
    for (&place, &len) in places.iter().zip(axes) {
        check_index(g, place, len);
        let place = g.reshape(place, &list);
        let place = g.cast(place, DType::I32);
        flat = Some(match flat {
            None => place,
            Some(before) => {
                let len = size_like(g, len, before);
                let rows = g.mul(before, len);
                g.add(rows, place)
            }
        });
    }
    let flat = flat.ok_or_else(|| format!("{what}: at least one axis is indexed"))?;
    Ok((flat, count))
}

/// The columns of an index `[…, k]`: coordinates along k axes of a tensor, behind `batch` others.
pub(super) fn coordinates(
    g: &mut Graph,
    what: &str,
    x: NodeId,
    index: NodeId,
    batch: usize,
) -> Result<Vec<NodeId>, String> {
    require_index(g, what, index)?;
    let (dims, of) = (g.dims(index).clone(), g.dims(x).len());
    let columns = dims.last().and_then(|k| k.as_fixed());
    let columns = columns.and_then(|k| usize::try_from(k).ok());
    let fits = columns.filter(|&k| k > 0 && batch + k <= of && dims.len() > batch);
    let Some(columns) = fits else {
        return Err(format!(
            "{what} of {} by {}: the last axis of the index is one to {} coordinates",
            g.symbols.show(g.dims(x)),
            g.symbols.show(&dims),
            of.saturating_sub(batch)
        ));
    };
    let (dtype, last) = (g.dtype(index), dims.len() - 1);
    Ok((0..columns)
        .map(|k| {
            let mut start: Dims = SmallVec::from_elem(Size::ZERO, dims.len());
            start[last] = Size::fixed(k as i64);
            let step = SmallVec::from_elem(1, dims.len());
            let mut one = dims.clone();
            one[last] = Size::ONE;
            let column = g.emit(Op::Slice { start, step }, &[index], dtype, one);
            g.reshape(column, &Dims::from_slice(&dims[..last]))
        })
        .collect())
}

/// Index tensors for the first axes of a tensor, repeated to one shape.
pub(super) fn broadcast_indices(
    g: &mut Graph,
    what: &str,
    x: NodeId,
    indices: &[NodeId],
) -> Result<Vec<NodeId>, String> {
    if indices.is_empty() || indices.len() > g.dims(x).len() {
        return Err(format!(
            "{what} of {} by {}: one for each of the first axes is needed",
            g.symbols.show(g.dims(x)),
            count(indices.len(), "index")
        ));
    }
    for &index in indices {
        require_index(g, what, index)?;
    }
    broadcast_all(g, what, indices)
}

/// The slices of the axes from `batch` on that coordinates name.
fn gather_at(
    g: &mut Graph,
    what: &str,
    x: NodeId,
    places: &[NodeId],
    batch: usize,
) -> Result<NodeId, String> {
    let (dims, dtype) = (g.dims(x).clone(), g.dtype(x));
    let end = batch + places.len();
    let shape = g.dims(places[0]).clone();
    let alike = shape.len() >= batch && shape[..batch] == dims[..batch];
    if !alike {
        return Err(format!(
            "{what} of {} by coordinates {}: the first {} differ",
            g.symbols.show(&dims),
            g.symbols.show(&shape),
            count(batch, "axis")
        ));
    }
    let (flat, length) = flat_places(g, what, places, &dims[batch..end])?;
    let each = elements(&shape[batch..])
        .ok_or_else(|| format!("{what}: the number of indices has no form as one size"))?;
    let join = |length: Size| -> Dims {
        let own = dims[..batch].iter().chain(std::iter::once(&length));
        own.chain(&dims[end..]).copied().collect()
    };
    let (from, to) = (join(length), join(each));
    let mut columns = to.clone();
    columns[batch + 1..].fill(Size::ONE);
    let index = g.reshape(flat, &columns);
    let index = g.broadcast(index, &to);
    let rows = g.reshape(x, &from);
    let chosen = checked(g, Op::Gather { axis: batch }, &[rows, index])?;
    debug_assert_eq!(g.dtype(chosen), dtype);
    let mut result = shape;
    result.extend(dims[end..].iter().copied());
    Ok(g.reshape(chosen, &result))
}

impl<'t> Tensor<'t> {
    /// `result[… i …] = self[… index[… i …] …]` along an axis: index and result have this tensor's
    /// shape, except for any length along the axis.
    #[track_caller]
    pub fn gather(self, axis: impl AxisIndex, index: Tensor<'t>) -> Tensor<'t> {
        let axis = axis.index(self.rank());
        self.trace
            .record(Location::caller(), &[self, index], |g, ids| {
                if axis >= g.dims(ids[0]).len() {
                    return Err(no_axis(g, "gather", axis, ids[0]));
                }
                let result = checked(g, Op::Gather { axis }, ids)?;
                let limit = g.dims(ids[0])[axis];
                check_index(g, ids[1], limit);
                Ok(result)
            })
    }

    /// The slices of an axis that an index `[n]` names, in its order: the axis gets length n.
    #[track_caller]
    pub fn index_select(self, axis: impl AxisIndex, index: Tensor<'t>) -> Tensor<'t> {
        let axis = axis.index(self.rank());
        self.trace
            .record(Location::caller(), &[self, index], |g, ids| {
                let mut dims = g.dims(ids[0]).clone();
                if axis >= dims.len() {
                    return Err(no_axis(g, "index_select", axis, ids[0]));
                }
                let &[n] = g.dims(ids[1]).as_slice() else {
                    return Err(format!(
                        "index_select by {}: an index of one axis is needed",
                        g.symbols.show(g.dims(ids[1]))
                    ));
                };
                require_index(g, "index_select", ids[1])?;
                check_index(g, ids[1], dims[axis]);
                let mut column: Dims = SmallVec::from_elem(Size::ONE, dims.len());
                column[axis] = n;
                dims[axis] = n;
                let index = g.reshape(ids[1], &column);
                let index = g.broadcast(index, &dims);
                checked(g, Op::Gather { axis }, &[ids[0], index])
            })
    }

    /// [`Tensor::gather`] with this tensor and the index broadcast to one shape along the other
    /// axes, as `take_along_axis` of NumPy.
    #[track_caller]
    pub fn take_along_axis(self, axis: impl AxisIndex, index: Tensor<'t>) -> Tensor<'t> {
        let axis = axis.index(self.rank());
        self.trace
            .record(Location::caller(), &[self, index], |g, ids| {
                let (mut dims, mut space) = (g.dims(ids[0]).clone(), g.dims(ids[1]).clone());
                require_index(g, "take_along_axis", ids[1])?;
                if axis >= dims.len() {
                    return Err(no_axis(g, "take_along_axis", axis, ids[0]));
                }
                let say = || {
                    format!(
                        "take_along_axis of {} by {} along axis {axis}: the other axes do not \
                         broadcast",
                        g.symbols.show(g.dims(ids[0])),
                        g.symbols.show(g.dims(ids[1]))
                    )
                };
                if dims.len() != space.len() {
                    return Err(say());
                }
                let (len, count) = (dims[axis], space[axis]);
                (dims[axis], space[axis]) = (Size::ONE, Size::ONE);
                let mut both = broadcast_shape(&dims, &space).ok_or_else(say)?;
                both[axis] = len;
                let x = g.broadcast(ids[0], &both);
                both[axis] = count;
                check_index(g, ids[1], len);
                let index = g.broadcast(ids[1], &both);
                checked(g, Op::Gather { axis }, &[x, index])
            })
    }

    /// The slices that rows of coordinates name: `index` is `[b…, …, k]`, coordinates along the k
    /// axes after the first `batch`, which both tensors have; the result is `[b…, …]` followed by
    /// the other axes. (GatherND of ONNX.)
    #[track_caller]
    pub fn gather_nd(self, index: Tensor<'t>, batch: usize) -> Tensor<'t> {
        self.trace
            .record(Location::caller(), &[self, index], |g, ids| {
                let places = coordinates(g, "gather_nd", ids[0], ids[1], batch)?;
                gather_at(g, "gather_nd", ids[0], &places, batch)
            })
    }

    /// The slices that index tensors name, one for each of the first axes, broadcast to one shape:
    /// that shape followed by the other axes, as `x[i, j]` of NumPy.
    ///
    /// ```
    /// # use slabwise::prelude::*;
    /// # let trace = Trace::inference();
    /// let x = trace.input("x", F32, (4, 5, 6));
    /// let (i, j) = (trace.input("i", I32, (3, 1)), trace.input("j", I32, (2,)));
    /// let y = x.index(&[i, j]); // [3, 2, 6]
    /// ```
    #[track_caller]
    pub fn index(self, indices: &[Tensor<'t>]) -> Tensor<'t> {
        let mut operands = vec![self];
        operands.extend_from_slice(indices);
        self.trace.record(Location::caller(), &operands, |g, ids| {
            let places = broadcast_indices(g, "index", ids[0], &ids[1..])?;
            gather_at(g, "index", ids[0], &places, 0)
        })
    }

    /// The rows of this table `[count, width]` that an index `[…]` names: `[…, width]`.
    #[track_caller]
    pub fn embed(self, index: Tensor<'t>) -> Tensor<'t> {
        let at = Location::caller();
        let table = self.require(at, |g, x| match g.dims(x).len() {
            2 => Ok(()),
            _ => Err(format!(
                "embed by rows of {}: a table [count, width] is needed",
                g.symbols.show(g.dims(x))
            )),
        });
        let flat = self.trace.record(at, &[index], |g, ids| {
            let n = elements(g.dims(ids[0]))
                .ok_or("embed: the number of indices has no form as one size")?;
            Ok(g.reshape(ids[0], &Dims::from_slice(&[n])))
        });
        table.index_select(0, flat).shaped_like(index, at)
    }

    /// Rows `[count, width]`, one for each element of an index `[…]`, as `[…, width]`.
    pub(crate) fn shaped_like(self, index: Tensor<'t>, at: Line) -> Tensor<'t> {
        self.trace.record(at, &[self, index], |g, ids| {
            let mut dims = g.dims(ids[1]).clone();
            dims.push(g.dims(ids[0])[1]);
            Ok(g.reshape(ids[0], &dims))
        })
    }

    /// 1 at the position that each integer names, else 0: `[…] → […, n]`, f32; n is at least 1.
    #[track_caller]
    pub fn one_hot(self, n: usize) -> Tensor<'t> {
        self.trace.record(Location::caller(), &[self], |g, ids| {
            require_index(g, "one_hot", ids[0])?;
            if n == 0 {
                return Err(format!(
                    "one_hot of {} among 0 positions: no index names any",
                    g.symbols.show(g.dims(ids[0]))
                ));
            }
            let n = i32::try_from(n)
                .map_err(|_| format!("one_hot: {n} positions are more than an i32 can number"))?;
            let n = Size::fixed(i64::from(n));
            check_index(g, ids[0], n);
            let hit = matches_position(g, ids[0], n);
            Ok(g.cast(hit, DType::F32))
        })
    }
}
