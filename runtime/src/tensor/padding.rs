//! Padding with values of the tensor itself, and cropping.

use std::panic::Location;

use slabwise_kernels::dtype::DType;
use slabwise_kernels::scalar::ScalarOp;
use slabwise_kernels::size::{Env, Size};
use slabwise_kernels::spec::Dims;
use smallvec::SmallVec;

use super::arrange::{integer, length, pick, ramp};
use super::{Tensor, number};
use crate::graph::Graph;
use crate::ops::{GraphBuilder, NodeId, Op};
use crate::words::count;

/// The values that [`Tensor::pad_with`] adds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum PadMode {
    /// One number.
    Constant(f32),
    /// The elements mirrored at the first and last one, which are not repeated: `c b | a b c | b a`.
    /// Beyond a whole length they are mirrored again.
    Reflect,
    /// The first and last element: `a a | a b c | c c`.
    Replicate,
    /// Circular: the elements from the other end: `b c | a b c | a b`.
    Circular,
}

impl<'t> Tensor<'t> {
    /// This tensor padded along each axis by a number of elements before and after; negative
    /// numbers remove elements instead.
    ///
    /// ```
    /// # use slabwise::prelude::*;
    /// # use slabwise::tensor::PadMode;
    /// # let trace = Trace::inference();
    /// # let x = trace.input("x", F32, (2, 3, 8, 8));
    /// let y = x.pad_with([(0, 0), (0, 0), (1, 1), (2, -1)], PadMode::Reflect);
    /// assert_eq!(y.len(3), Some(9));
    /// ```
    #[track_caller]
    pub fn pad_with(self, pads: impl AsRef<[(i64, i64)]>, padding: PadMode) -> Tensor<'t> {
        let pads = pads.as_ref();
        self.trace.record(Location::caller(), &[self], |g, ids| {
            if pads.len() != g.dims(ids[0]).len() {
                return Err(format!(
                    "pad_with of {}: {} for {}",
                    g.symbols.show(g.dims(ids[0])),
                    count(pads.len(), "pair"),
                    count(g.dims(ids[0]).len(), "axis")
                ));
            }
            let mut x = crop(g, ids[0], pads)?;
            if let PadMode::Constant(value) = padding {
                return constant(g, x, pads, value);
            }
            for (axis, &(before, after)) in pads.iter().enumerate() {
                let (before, after) = (before.max(0), after.max(0));
                if before > 0 || after > 0 {
                    x = pad_axis(g, x, axis, before, after, padding)?;
                }
            }
            Ok(x)
        })
    }
}

/// The length of an axis changed by numbers.
fn changed(g: &Graph, x: NodeId, axis: usize, before: i64, after: i64) -> Result<Size, String> {
    let by = before.checked_add(after).map(Size::fixed);
    let n = by.and_then(|by| g.dims(x)[axis].checked_add(by));
    n.filter(|n| n.checked_at(&g.symbols.bounds()).is_some())
        .ok_or_else(|| {
            format!(
                "pad_with: axis {axis} of {} and {before} and {after} are too many",
                g.symbols.show(g.dims(x))
            )
        })
}

/// Without the elements that negative numbers remove.
fn crop(g: &mut Graph, x: NodeId, pads: &[(i64, i64)]) -> Result<NodeId, String> {
    let removed = |n: i64| n.min(0).saturating_neg();
    if pads.iter().all(|&(b, a)| b >= 0 && a >= 0) {
        return Ok(x);
    }
    let (dtype, mut dims) = (g.dtype(x), g.dims(x).clone());
    let mut start = Dims::new();
    for (axis, &(before, after)) in pads.iter().enumerate() {
        let (first, last) = (removed(before), removed(after));
        let rest = first
            .checked_add(last)
            .and_then(|n| dims[axis].checked_sub(Size::fixed(n)));
        // Lengths are monotonic in their symbols, so all symbols at 0 give the least.
        let rest = rest.filter(|n| n.checked_at(&Env::default()).is_some_and(|n| n >= 0));
        dims[axis] = rest.ok_or_else(|| {
            format!(
                "pad_with: axis {axis} of {} does not have {first} and {last} elements to remove \
                 at every length",
                g.symbols.show(g.dims(x))
            )
        })?;
        start.push(Size::fixed(first));
    }
    let step = SmallVec::from_elem(1, dims.len());
    Ok(g.emit(Op::Slice { start, step }, &[x], dtype, dims))
}

fn constant(g: &mut Graph, x: NodeId, pads: &[(i64, i64)], value: f32) -> Result<NodeId, String> {
    let (dtype, mut dims) = (g.dtype(x), g.dims(x).clone());
    let value = number(value, dtype).map_err(|why| format!("pad_with: {why}"))?;
    let mut start = Dims::new();
    for (axis, &(before, after)) in pads.iter().enumerate() {
        dims[axis] = changed(g, x, axis, before.max(0), after.max(0))?;
        start.push(Size::fixed(before.max(0)));
    }
    let step = SmallVec::from_elem(1, dims.len());
    Ok(g.emit(Op::Pad { start, step, value }, &[x], dtype, dims))
}

/// One axis padded with its own elements.
fn pad_axis(
    g: &mut Graph,
    x: NodeId,
    axis: usize,
    before: i64,
    after: i64,
    padding: PadMode,
) -> Result<NodeId, String> {
    let n = g.dims(x)[axis];
    let long = changed(g, x, axis, before, after)?;
    let shown = g.symbols.show(g.dims(x)).to_string();
    g.need(n, || {
        format!("pad_with: axis {axis} of {shown} has no elements to pad with")
    })?;
    let first = i32::try_from(before).map_err(|_| format!("pad_with: {before} are too many"))?;
    let like = Dims::from_slice(&[long]);
    crate::trace::countable("pad_with", &g.symbols, &like)?;
    let [place, first, zero, one] = [
        ramp(g, long),
        integer(g, first, &like),
        integer(g, 0, &like),
        integer(g, 1, &like),
    ];
    let n = length(g, n, &like)?;
    let last = g.scalar(ScalarOp::Sub, &[n, one]);
    let place = g.scalar(ScalarOp::Sub, &[place, first]);
    let index = match padding {
        PadMode::Reflect => {
            // A walk of period 2(n − 1); of one element it stays where it is.
            let period = g.add(last, last);
            let walked = floor_mod(g, place, period, zero);
            let back = g.scalar(ScalarOp::Sub, &[last, walked]);
            let back = g.scalar(ScalarOp::Abs, &[back]);
            g.scalar(ScalarOp::Sub, &[last, back])
        }
        PadMode::Circular => floor_mod(g, place, n, zero),
        _ => g.scalar(ScalarOp::Clamp, &[place, zero, last]),
    };
    debug_assert_eq!(g.dtype(index), DType::I32);
    pick(g, x, axis, index)
}

/// The remainder with the sign of the divisor, which is at least 0; 0 for a divisor of 0.
fn floor_mod(g: &mut Graph, x: NodeId, y: NodeId, zero: NodeId) -> NodeId {
    let rest = g.scalar(ScalarOp::Fmod, &[x, y]);
    let raised = g.add(rest, y);
    let negative = g.scalar(ScalarOp::Lt, &[rest, zero]);
    g.scalar(ScalarOp::Select, &[negative, raised, rest])
}
