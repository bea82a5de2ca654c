//! Slices, splits, concatenation and padding.

use std::ops::{Bound, RangeBounds};
use std::panic::Location;

use slabwise_kernels::dtype::DType;
use slabwise_kernels::scalar::ScalarOp;
use slabwise_kernels::size::{Env, Size};
use slabwise_kernels::spec::Dims;
use smallvec::SmallVec;

use super::{AxisIndex, Tensor, checked, no_axis, number};
use crate::graph::Graph;
use crate::ops::{GraphBuilder, NodeId, Op};
use crate::shape::{Computed, Share};
use crate::trace::{Trace, countable};
use crate::words::count;

/// The most parts of a split, because more are likelier a typing error than a model.
pub(super) const PARTS_MAX: usize = 1 << 16;

impl<'t> Tensor<'t> {
    /// The part of an axis in `range`, as in `x.slice(1, 2..5)`. On a bounded axis, only positions
    /// that exist at every length can be taken.
    #[track_caller]
    pub fn slice(self, axis: impl AxisIndex, range: impl RangeBounds<usize>) -> Tensor<'t> {
        let axis = axis.index(self.rank());
        self.slice_step(axis, range, 1)
    }

    /// Every `step`-th element of the part of an axis in `range`.
    #[track_caller]
    pub fn slice_step(
        self,
        axis: impl AxisIndex,
        range: impl RangeBounds<usize>,
        step: usize,
    ) -> Tensor<'t> {
        let axis = axis.index(self.rank());
        self.trace.record(Location::caller(), &[self], |g, ids| {
            let Some(&len) = g.dims(ids[0]).get(axis) else {
                return Err(no_axis(g, "slice", axis, ids[0]));
            };
            let (start, count) = cut(len, &range, step)
                .ok_or_else(|| no_part(g, "slice", ids[0], axis, &range, step))?;
            Ok(take(
                g,
                ids[0],
                axis,
                Size::fixed(start),
                count,
                step as u32,
            ))
        })
    }

    /// The elements of an axis from `start` to before `end` by `step`, like `x[start:end:step]` of
    /// Python: negative numbers count from the end, numbers beyond it are clamped, `None` is the
    /// first or last element in the direction of the step, which is not 0. On an axis without a
    /// fixed length only all elements can be taken, in either direction. With a positive step the
    /// result is a view; with a negative one it is gathered.
    #[track_caller]
    pub fn slice_by(
        self,
        axis: impl AxisIndex,
        start: Option<isize>,
        end: Option<isize>,
        step: isize,
    ) -> Tensor<'t> {
        let axis = axis.index(self.rank());
        self.trace.record(Location::caller(), &[self], |g, ids| {
            let Some(&len) = g.dims(ids[0]).get(axis) else {
                return Err(no_axis(g, "slice_by", axis, ids[0]));
            };
            let wide = i64::try_from(step)
                .ok()
                .filter(|&n| n != 0 && n != i64::MIN);
            let step = wide.ok_or_else(|| format!("slice_by: a step of {step}"))?;
            let distance = u32::try_from(step.unsigned_abs())
                .map_err(|_| format!("slice_by: a step of {step}"))?;
            let whole = start.is_none() && end.is_none() && distance == 1;
            let (first, count) = match len.as_fixed() {
                Some(len) => {
                    let (first, count) = python_range(len, start, end, step);
                    (Size::fixed(first), Size::fixed(count))
                }
                None if whole && step > 0 => return Ok(ids[0]),
                None if whole => {
                    let last = len.checked_sub(Size::ONE);
                    (last.ok_or("slice_by: the length has no form")?, len)
                }
                None => {
                    return Err(format!(
                        "slice_by: axis {axis} of {} has no fixed length",
                        g.symbols.show(g.dims(ids[0]))
                    ));
                }
            };
            if step > 0 {
                return Ok(take(g, ids[0], axis, first, count, distance));
            }
            let mut dims = g.dims(ids[0]).clone();
            dims[axis] = count;
            let list = Dims::from_slice(&[count]);
            countable("slice_by", &g.symbols, &[len])?;
            let strides = Dims::from_slice(&[Size::from(distance)]);
            let along = g.emit(Op::Index(strides), &[], DType::I32, list.clone());
            let first = super::select::size_like(g, first, along);
            let index = g.scalar(ScalarOp::Sub, &[first, along]);
            let mut column: Dims = SmallVec::from_elem(Size::ONE, dims.len());
            column[axis] = count;
            let index = g.reshape(index, &column);
            let index = g.broadcast(index, &dims);
            checked(g, Op::Gather { axis }, &[ids[0], index])
        })
    }

    /// An axis split into `parts` of equal length, in order. 0 parts are a mistake; the result is
    /// then one poisoned tensor.
    #[track_caller]
    pub fn split(self, axis: impl AxisIndex, parts: usize) -> Vec<Tensor<'t>> {
        let axis = axis.index(self.rank());
        let at = Location::caller();
        let mut part_len = Size::ZERO;
        let x = self.require(at, |g, x| {
            let Some(&len) = g.dims(x).get(axis) else {
                return Err(no_axis(g, "split", axis, x));
            };
            let whole = i64::try_from(parts)
                .ok()
                .filter(|_| parts <= PARTS_MAX)
                .and_then(|n| len.checked_div(n));
            part_len = whole.ok_or_else(|| {
                let shown = len.show(|s| g.symbols.name(s));
                let help = match len.symbols().next() {
                    Some(_) if axis == 0 => {
                        format!("; shares({parts}) cuts it into parts of nearly equal length")
                    }
                    _ => String::new(),
                };
                format!(
                    "split axis {axis} of {} into {parts} parts: {shown} does not divide{help}",
                    g.symbols.show(g.dims(x))
                )
            })?;
            Ok(())
        });
        let part = |i: usize| {
            self.trace.record(at, &[x], |g, ids| {
                let start = part_len
                    .checked_mul(Size::fixed(i as i64))
                    .ok_or("split: a part's start overflows")?;
                Ok(take(g, ids[0], axis, start, part_len, 1))
            })
        };
        (0..parts.clamp(1, PARTS_MAX)).map(part).collect()
    }

    /// The rows of a batch cut into `parts` parts of nearly equal length, the longer ones first:
    /// those of the [grains](crate::World::with_grains) of a rank, or the micro-batches of
    /// [`Trace::minimize_in_parts`]. The length of the first axis is
    /// a multiple of `parts`, or a bounded dimension, whose length in each run is a number of rows.
    #[track_caller]
    pub fn shares(self, parts: usize) -> Vec<Tensor<'t>> {
        let at = Location::caller();
        if self.is_poisoned() {
            return vec![self; parts.min(PARTS_MAX)];
        }
        let first = self.trace.with_graph(|g| {
            let length = *g.dims(self.id).first()?;
            let rows = length.symbols().next()?;
            (length == Size::symbol(rows)).then_some(rows)
        });
        let Some(rows) = first.filter(|_| (2..=PARTS_MAX).contains(&parts)) else {
            return self.trace.on_behalf(at, || self.split(0, parts));
        };
        let parts = parts as u32;
        let part = |from: u32| {
            self.trace.record(at, &[self], |g, ids| {
                let mut share = |from, to| {
                    let share = Share {
                        rows,
                        parts,
                        from,
                        to,
                    };
                    g.symbols.share(share).map(Size::symbol)
                };
                let length = share(from, from + 1)?;
                let start = if from > 0 {
                    share(0, from)?
                } else {
                    Size::ZERO
                };
                Ok(take(g, ids[0], 0, start, length, 1))
            })
        };
        (0..parts).map(part).collect()
    }

    /// This tensor padded with `value`, by a number of elements before and after along each axis.
    #[track_caller]
    pub fn pad(self, pads: impl AsRef<[(usize, usize)]>, value: f32) -> Tensor<'t> {
        let pads = pads.as_ref();
        self.trace.record(Location::caller(), &[self], |g, ids| {
            let (dtype, mut dims) = (g.dtype(ids[0]), g.dims(ids[0]).clone());
            if pads.len() != dims.len() {
                return Err(format!(
                    "pad of {}: {} for {}",
                    g.symbols.show(&dims),
                    count(pads.len(), "pair"),
                    count(dims.len(), "axis")
                ));
            }
            let value = number(value, dtype).map_err(|why| format!("pad: {why}"))?;
            let size = |n: usize| i64::try_from(n).ok().map(Size::fixed);
            let mut start = Dims::new();
            for (dim, &(before, after)) in dims.iter_mut().zip(pads) {
                let whole = size(before)
                    .zip(size(after))
                    .and_then(|(b, a)| dim.checked_add(b)?.checked_add(a));
                *dim = whole.ok_or_else(|| format!("pad: {before} and {after} are too many"))?;
                start.push(Size::fixed(before as i64));
            }
            let step = SmallVec::from_elem(1, dims.len());
            Ok(g.emit(Op::Pad { start, step, value }, ids, dtype, dims))
        })
    }
}

/// Two tensors one after the other along an axis, whose lengths do not add up to one size: both are
/// padded to the length of the whole, and each element chosen by its place.
fn append(g: &mut Graph, a: NodeId, b: NodeId, axis: usize) -> Result<NodeId, String> {
    let (mut dims, other, dtype) = (g.dims(a).clone(), g.dims(b).clone(), g.dtype(a));
    let alike = dims.len() == other.len() && dtype == g.dtype(b);
    if !alike || (0..dims.len()).any(|i| i != axis && dims[i] != other[i]) {
        let (a, b) = (g.symbols.show(&dims), g.symbols.show(&other));
        return Err(format!("{a} and {b} differ in another axis or in type"));
    }
    let first = dims[axis];
    dims[axis] = g.symbols.computed(Computed::Sum(first, other[axis]))?;
    countable("concat", &g.symbols, &[dims[axis]])?;
    let value = number(0.0, dtype)?;
    let mut padded = |x: NodeId, from: Size| {
        let mut start: Dims = SmallVec::from_elem(Size::ZERO, dims.len());
        start[axis] = from;
        let step = SmallVec::from_elem(1, dims.len());
        g.emit(Op::Pad { start, step, value }, &[x], dtype, dims.clone())
    };
    let [a, b] = [padded(a, Size::ZERO), padded(b, first)];
    let mut strides: Dims = SmallVec::from_elem(Size::ZERO, dims.len());
    strides[axis] = Size::ONE;
    let place = g.emit(Op::Index(strides), &[], DType::I32, dims);
    let first = super::select::size_like(g, first, place);
    let is_first = g.scalar(ScalarOp::Lt, &[place, first]);
    Ok(g.scalar(ScalarOp::Select, &[is_first, a, b]))
}

impl Trace {
    /// Tensors of one type concatenated along an axis; their other axes are equal.
    #[track_caller]
    pub fn concat<'t>(&'t self, tensors: &[Tensor<'t>], axis: impl AxisIndex) -> Tensor<'t> {
        let axis = axis.index(tensors.first().map_or(0, |first| first.rank()));
        self.record(Location::caller(), tensors, |g, ids| {
            if let Some(&first) = ids.first()
                && axis >= g.dims(first).len()
            {
                return Err(no_axis(g, "concat", axis, first));
            }
            let lengths = ids.iter().map(|&id| g.dims(id).get(axis).copied());
            let lengths: Option<Vec<Size>> = lengths.collect();
            let has_form = |lengths: &Vec<Size>| {
                let sum = |n: Size, &m: &Size| n.checked_add(m);
                lengths.iter().try_fold(Size::ZERO, sum).is_some()
            };
            if lengths.as_ref().is_none_or(has_form) {
                return checked(g, Op::Concat { axis }, ids);
            }
            // Each pair is checked as if its lengths were equal, and then joined.
            ids[1..].iter().try_fold(ids[0], |all, &next| {
                append(g, all, next, axis).map_err(|why| format!("concat along axis {axis}: {why}"))
            })
        })
    }

    /// Tensors of one type and shape side by side along a new axis, which becomes axis `axis`.
    #[track_caller]
    pub fn stack<'t>(&'t self, tensors: &[Tensor<'t>], axis: impl AxisIndex) -> Tensor<'t> {
        let axis = axis.index(tensors.first().map_or(0, |first| first.rank() + 1));
        self.record(Location::caller(), tensors, |g, ids| {
            let first: Option<(DType, Dims)> =
                ids.first().map(|&id| (g.dtype(id), g.dims(id).clone()));
            if let Some(other) = ids.iter().find(|&&id| {
                Some((g.dtype(id), g.dims(id))) != first.as_ref().map(|(t, d)| (*t, d))
            }) {
                let (a, b) = (
                    g.symbols.show(g.dims(ids[0])),
                    g.symbols.show(g.dims(*other)),
                );
                return Err(format!(
                    "stack {} {a} and {} {b}: types and shapes must agree",
                    g.dtype(ids[0]),
                    g.dtype(*other)
                ));
            }
            if ids.is_empty() {
                return Err("stack of no tensors".into());
            }
            let parts = ids
                .iter()
                .map(|&id| super::view::unsqueeze(g, id, axis, "stack"))
                .collect::<Result<Vec<_>, _>>()?;
            checked(g, Op::Concat { axis }, &parts)
        })
    }
}

/// The message for a part of an axis that does not exist at every length.
pub(super) fn no_part(
    g: &Graph,
    what: &str,
    x: NodeId,
    axis: usize,
    range: &impl RangeBounds<usize>,
    step: usize,
) -> String {
    let text = show_range(range);
    let step = if step == 1 {
        String::new()
    } else {
        format!(" by {step}")
    };
    let len = g.dims(x)[axis].show(|s| g.symbols.name(s));
    format!(
        "{what} {text}{step} of axis {axis} of {}: its length is {len}",
        g.symbols.show(g.dims(x))
    )
}

/// Start and length of a part of an axis, if it exists at every length of the axis.
pub(super) fn cut(len: Size, range: &impl RangeBounds<usize>, step: usize) -> Option<(i64, Size)> {
    // Lengths are monotonic in their symbols, so all symbols at 0 give the least.
    let least = len.checked_at(&Env::default())?;
    let start = match range.start_bound() {
        Bound::Included(&n) => i64::try_from(n).ok()?,
        Bound::Excluded(&n) => i64::try_from(n).ok()?.checked_add(1)?,
        Bound::Unbounded => 0,
    };
    let end = match range.end_bound() {
        Bound::Included(&n) => Some(i64::try_from(n).ok()?.checked_add(1)?),
        Bound::Excluded(&n) => Some(i64::try_from(n).ok()?),
        Bound::Unbounded => None,
    };
    let step = i64::from(u32::try_from(step).ok().filter(|&s| s > 0)?);
    let count = match end {
        Some(end) if start <= end && end <= least => Size::fixed(end - start),
        None if start <= least => len.checked_sub(Size::fixed(start))?,
        _ => return None,
    };
    let count = if step == 1 {
        count
    } else {
        Size::fixed((count.as_fixed()? + step - 1) / step)
    };
    Some((start, count))
}

/// First position and number of the elements of a slice of Python.
fn python_range(len: i64, start: Option<isize>, end: Option<isize>, step: i64) -> (i64, i64) {
    let (low, high) = if step > 0 { (0, len) } else { (-1, len - 1) };
    let place = |at: Option<isize>, default: i64| {
        at.map_or(default, |at| {
            let at = at as i64;
            let at = if at < 0 { at.saturating_add(len) } else { at };
            at.clamp(low, high)
        })
    };
    let (start, end) = if step > 0 {
        (place(start, low), place(end, high))
    } else {
        (place(start, high), place(end, low))
    };
    let span = if step > 0 { end - start } else { start - end };
    let count = if span <= 0 {
        0
    } else {
        (span - 1) / step.abs() + 1
    };
    (if count == 0 { 0 } else { start }, count)
}

fn show_range(range: &impl RangeBounds<usize>) -> String {
    let start = match range.start_bound() {
        Bound::Included(n) => n.to_string(),
        Bound::Excluded(n) => format!("{n}<"),
        Bound::Unbounded => String::new(),
    };
    let end = match range.end_bound() {
        Bound::Included(n) => format!("={n}"),
        Bound::Excluded(n) => n.to_string(),
        Bound::Unbounded => String::new(),
    };
    format!("{start}..{end}")
}

/// The slice itself; the node itself if it is the whole.
fn take(g: &mut Graph, x: NodeId, axis: usize, start: Size, count: Size, step: u32) -> NodeId {
    let (dtype, mut dims) = (g.dtype(x), g.dims(x).clone());
    if dims[axis] == count && step == 1 {
        return x;
    }
    let rank = dims.len();
    let mut starts: Dims = SmallVec::from_elem(Size::ZERO, rank);
    let mut steps: SmallVec<[u32; 6]> = SmallVec::from_elem(1, rank);
    dims[axis] = count;
    starts[axis] = start;
    steps[axis] = step;
    g.emit(
        Op::Slice {
            start: starts,
            step: steps,
        },
        &[x],
        dtype,
        dims,
    )
}
