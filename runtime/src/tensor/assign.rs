//! Assignment to parts: slices with fixed bounds, and slices whose start a run decides.

use std::ops::RangeBounds;
use std::panic::Location;

use slabwise_kernels::dtype::DType;
use slabwise_kernels::scalar::ScalarOp;
use slabwise_kernels::size::Size;
use slabwise_kernels::spec::Dims;
use smallvec::SmallVec;

use super::elementwise::broadcast_shape;
use super::join::{cut, no_part};
use super::{AxisIndex, Operand, Tensor, check_index, checked_as, no_axis};
use crate::graph::Graph;
use crate::ops::{GraphBuilder, NodeId, Op};

/// The values for a part: of its type, broadcast to its shape.
fn values_for(
    g: &mut Graph,
    what: &str,
    x: NodeId,
    value: NodeId,
    part: &Dims,
) -> Result<NodeId, String> {
    if g.dtype(value) != g.dtype(x) {
        return Err(format!(
            "{what} {} to a part of {}: the types must agree; convert with cast",
            g.dtype(value),
            g.dtype(x)
        ));
    }
    if broadcast_shape(g.dims(value), part).as_ref() != Some(part) {
        return Err(format!(
            "{what} {} to a part of {}: values that broadcast to {} are needed",
            g.symbols.show(g.dims(value)),
            g.symbols.show(g.dims(x)),
            g.symbols.show(part)
        ));
    }
    Ok(g.broadcast(value, part))
}

impl<'t> Tensor<'t> {
    /// This tensor with the part of an axis in `range` replaced by values that broadcast to the
    /// part, as in `x[:, 2:5] = values` of NumPy.
    ///
    /// ```
    /// # use slabwise::prelude::*;
    /// # let trace = Trace::inference();
    /// let x = trace.input("x", F32, (2, 8));
    /// let y = x.slice_assign(1, 2..5, 0.0);
    /// ```
    #[track_caller]
    pub fn slice_assign(
        self,
        axis: impl AxisIndex,
        range: impl RangeBounds<usize>,
        values: impl Operand<'t>,
    ) -> Tensor<'t> {
        let axis = axis.index(self.rank());
        self.slice_step_assign(axis, range, 1, values)
    }

    /// This tensor with every `step`-th element of the part of an axis in `range` replaced.
    #[track_caller]
    pub fn slice_step_assign(
        self,
        axis: impl AxisIndex,
        range: impl RangeBounds<usize>,
        step: usize,
        values: impl Operand<'t>,
    ) -> Tensor<'t> {
        let axis = axis.index(self.rank());
        let at = Location::caller();
        let values = values.lift(self.trace, self.dtype(), at);
        self.trace.record(at, &[self, values], |g, ids| {
            let (x, dims) = (ids[0], g.dims(ids[0]).clone());
            let Some(&len) = dims.get(axis) else {
                return Err(no_axis(g, "slice_assign", axis, x));
            };
            let (first, count) = cut(len, &range, step)
                .ok_or_else(|| no_part(g, "slice_assign", x, axis, &range, step))?;
            let mut part = dims.clone();
            part[axis] = count;
            let value = values_for(g, "slice_assign", x, ids[1], &part)?;
            let mut start: Dims = SmallVec::from_elem(Size::ZERO, dims.len());
            let mut steps: SmallVec<[u32; 6]> = SmallVec::from_elem(1, dims.len());
            (start[axis], steps[axis]) = (Size::fixed(first), step as u32);
            let dtype = g.dtype(x);
            let op = Op::SliceAssign {
                start,
                step: steps,
                axis: None,
            };
            checked_as(g, op, &[x, value], dtype, &dims)
        })
    }

    /// This tensor with values written over the part of an axis that begins at `start`, an i32
    /// tensor that is read in each run: a scalar, or one number for each slice of the axes before
    /// (with a batch `[n]`, each example has its own start). `values` have this tensor's shape, but
    /// any length along the axis. A part outside of the axis fails the run. [`Tensor::slice_from`]
    /// reads such a part.
    ///
    /// A state that is set to its own value with a part replaced is written in place: the step
    /// touches only the part, for any length of the state, unless the old value is needed later in
    /// the step. Further operations read the new value in place.
    ///
    /// ```
    /// # use slabwise::prelude::*;
    /// # let trace = Trace::inference();
    /// let cache = trace.state("cache", F32, (1024, 64), Init::Constant(0.0));
    /// let position = trace.input("position", I32, ());
    /// let keys = trace.input("keys", F32, (1, 64));
    /// let all = cache.value().dynamic_update_slice(0, position, keys);
    /// cache.set(all);
    /// ```
    #[track_caller]
    pub fn dynamic_update_slice(
        self,
        axis: impl AxisIndex,
        start: impl Operand<'t>,
        values: Tensor<'t>,
    ) -> Tensor<'t> {
        let axis = axis.index(self.rank());
        self.assign_from("dynamic_update_slice", axis, start, values, false)
    }

    /// [`Tensor::dynamic_update_slice`] with a start that cannot fail: it is clamped to the nearest
    /// start that fits, so that a step of a scan may use it.
    #[track_caller]
    pub fn update_clamped(
        self,
        axis: impl AxisIndex,
        start: impl Operand<'t>,
        values: Tensor<'t>,
    ) -> Tensor<'t> {
        let axis = axis.index(self.rank());
        self.assign_from("update_clamped", axis, start, values, true)
    }

    #[track_caller]
    fn assign_from(
        self,
        what: &'static str,
        axis: usize,
        start: impl Operand<'t>,
        values: Tensor<'t>,
        is_clamped: bool,
    ) -> Tensor<'t> {
        let at = Location::caller();
        let start = start.lift(self.trace, DType::I32, at);
        self.trace.record(at, &[self, values, start], |g, ids| {
            let (x, mut place, dims) = (ids[0], ids[2], g.dims(ids[0]).clone());
            if axis >= dims.len() {
                return Err(no_axis(g, what, axis, x));
            }
            let mut part = dims.clone();
            let given = g.dims(ids[1]).clone();
            if given.len() == dims.len() {
                part[axis] = given[axis];
            }
            let value = values_for(g, what, x, ids[1], &part)?;
            // Starts align with the first axes.
            let mut own = g.dims(place).clone();
            let alike = own.len() <= axis && (0..own.len()).all(|a| own[a] == dims[a]);
            if g.dtype(place) != DType::I32 || !alike {
                return Err(format!(
                    "{what} along axis {axis} of {} from {} {}: an i32 scalar, or one \
                     for each slice of the axes before, is needed",
                    g.symbols.show(&dims),
                    g.dtype(place),
                    g.symbols.show(&own)
                ));
            }
            own.resize(dims.len(), Size::ONE);
            let past = dims[axis]
                .checked_sub(part[axis])
                .and_then(|n| n.checked_add(Size::ONE))
                .filter(|n| n.as_fixed().is_none_or(|n| n > 0));
            match past {
                Some(past) if is_clamped => place = super::select::clamped(g, what, place, past)?,
                Some(past) => check_index(g, place, past),
                // Lengths of two dimensions: the end lies in the axis, and the start too.
                None if !is_clamped
                    && (part[axis].as_fixed().is_none() || dims[axis].as_fixed().is_none()) =>
                {
                    let past = dims[axis]
                        .checked_add(Size::ONE)
                        .ok_or_else(|| format!("{what}: the axis is too long"))?;
                    let length = super::select::size_like(g, part[axis], place);
                    let end = g.scalar(ScalarOp::Add, &[place, length]);
                    check_index(g, place, past);
                    check_index(g, end, past);
                }
                None => {
                    return Err(format!(
                        "{what}: axis {axis} of {} does not have the elements of {}",
                        g.symbols.show(&dims),
                        g.symbols.show(&part)
                    ));
                }
            }
            let place = g.reshape(place, &own);
            let dtype = g.dtype(x);
            let op = Op::SliceAssign {
                start: SmallVec::from_elem(Size::ZERO, dims.len()),
                step: SmallVec::from_elem(1, dims.len()),
                axis: Some(axis),
            };
            checked_as(g, op, &[x, value, place], dtype, &dims)
        })
    }
}
