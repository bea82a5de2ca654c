//! Rearrangements of elements: reversed, rotated, repeated, in parts, in triangles, and between
//! channels and spatial positions.

use std::panic::Location;

use slabwise_kernels::dtype::DType;
use slabwise_kernels::scalar::ScalarOp;
use slabwise_kernels::size::Size;
use slabwise_kernels::spec::Dims;
use smallvec::SmallVec;

use super::join::PARTS_MAX;
use super::{AxisIndex, AxisSet, Tensor, checked, no_axis};
use crate::graph::Graph;
use crate::ops::{Axes, GraphBuilder, NodeId, Op};
use crate::shape::elements;
use crate::words::count;

impl<'t> Tensor<'t> {
    /// The elements along some axes in reverse order.
    #[doc(alias = "reverse")]
    #[track_caller]
    pub fn flip(self, axes: impl AxisSet) -> Tensor<'t> {
        self.trace.record(Location::caller(), &[self], |g, ids| {
            let mut x = ids[0];
            for axis in axes.axes(g.dims(x).len()) {
                let Some(&n) = g.dims(x).get(axis) else {
                    return Err(no_axis(g, "flip", axis, x));
                };
                if n.is(0) || n.is(1) {
                    continue;
                }
                let [place, last] = [ramp(g, n), last_position(g, n)?];
                let index = g.scalar(ScalarOp::Sub, &[last, place]);
                x = pick(g, x, axis, index)?;
            }
            Ok(x)
        })
    }

    /// The elements along an axis rotated by `shift` positions (backwards if it is negative):
    /// elements that leave at one end enter at the other.
    #[track_caller]
    pub fn roll(self, axis: impl AxisIndex, shift: i64) -> Tensor<'t> {
        let axis = axis.index(self.rank());
        self.trace.record(Location::caller(), &[self], |g, ids| {
            let x = ids[0];
            let Some(&n) = g.dims(x).get(axis) else {
                return Err(no_axis(g, "roll", axis, x));
            };
            let Some(len) = n.as_fixed() else {
                return Err(format!(
                    "roll: axis {axis} of {} has no fixed length",
                    g.symbols.show(g.dims(x))
                ));
            };
            let by = if len > 0 { shift.rem_euclid(len) } else { 0 };
            if by == 0 {
                return Ok(x);
            }
            let parts = [(len - by, by), (0, len - by)].map(|(start, count)| {
                let (dtype, mut dims) = (g.dtype(x), g.dims(x).clone());
                dims[axis] = Size::fixed(count);
                let mut starts: Dims = SmallVec::from_elem(Size::ZERO, dims.len());
                starts[axis] = Size::fixed(start);
                let step = SmallVec::from_elem(1, dims.len());
                let op = Op::Slice {
                    start: starts,
                    step,
                };
                g.emit(op, &[x], dtype, dims)
            });
            checked(g, Op::Concat { axis }, &parts)
        })
    }

    /// The whole tensor repeated a number of times along each axis; with more numbers than axes,
    /// axes of length 1 are added in front.
    #[doc(alias = "repeat")]
    #[track_caller]
    pub fn tile(self, times: impl AsRef<[usize]>) -> Tensor<'t> {
        let times = times.as_ref();
        self.trace.record(Location::caller(), &[self], |g, ids| {
            let dims = g.dims(ids[0]).clone();
            let Some(added) = times.len().checked_sub(dims.len()) else {
                return Err(format!(
                    "tile of {}: {} for {}",
                    g.symbols.show(&dims),
                    count(times.len(), "number"),
                    count(dims.len(), "axis")
                ));
            };
            let mut all: Dims = SmallVec::from_elem(Size::ONE, added);
            all.extend(dims);
            let mut x = g.reshape(ids[0], &all);
            for (axis, &times) in times.iter().enumerate() {
                x = repeat(g, "tile", x, axis, times, true)?;
            }
            Ok(x)
        })
    }

    /// Each element along an axis repeated `times` times in a row: `[a, b]` twice is
    /// `[a, a, b, b]`.
    #[track_caller]
    pub fn repeat_interleave(self, axis: impl AxisIndex, times: usize) -> Tensor<'t> {
        let axis = axis.index(self.rank());
        self.trace.record(Location::caller(), &[self], |g, ids| {
            if axis >= g.dims(ids[0]).len() {
                return Err(no_axis(g, "repeat_interleave", axis, ids[0]));
            }
            repeat(g, "repeat_interleave", ids[0], axis, times, false)
        })
    }

    /// An axis of fixed length in at most `parts` parts, all as long as the first but the last,
    /// which may be shorter. Parts of equal length: [`Tensor::split`].
    #[track_caller]
    pub fn chunk(self, axis: impl AxisIndex, parts: usize) -> Vec<Tensor<'t>> {
        let axis = axis.index(self.rank());
        let x = self.fixed_axis("chunk", axis);
        let length = x.len(axis).unwrap_or(0);
        let x = x.require(Location::caller(), |_, _| match parts {
            0 => Err("chunk: into 0 parts".into()),
            n if n > PARTS_MAX => Err(format!("chunk: {n} parts are more than {PARTS_MAX}")),
            _ => Ok(()),
        });
        if x.is_poisoned() {
            return vec![x; parts.clamp(1, PARTS_MAX)];
        }
        let each = length.div_ceil(parts);
        let mut lengths = vec![each; length.checked_div(each).unwrap_or(parts)];
        let rest = length - lengths.iter().sum::<usize>();
        lengths.extend((rest > 0).then_some(rest));
        x.split_lengths(axis, lengths)
    }

    /// An axis of fixed length split into parts of the given lengths, which add up to its own.
    #[track_caller]
    pub fn split_lengths(
        self,
        axis: impl AxisIndex,
        lengths: impl AsRef<[usize]>,
    ) -> Vec<Tensor<'t>> {
        let axis = axis.index(self.rank());
        let lengths = lengths.as_ref();
        let x = self.fixed_axis("split_lengths", axis);
        let x = x.require(Location::caller(), |g, x| {
            let sum = lengths.iter().try_fold(0usize, |sum, n| sum.checked_add(*n));
            let whole = g.dims(x)[axis].as_fixed();
            if sum.and_then(|n| i64::try_from(n).ok()) == whole && lengths.len() <= PARTS_MAX {
                return Ok(());
            }
            Err(format!(
                "split_lengths: axis {axis} of {} cannot be split into {}; they must add up to its length",
                g.symbols.show(g.dims(x)),
                count(lengths.len(), "part")
            ))
        });
        let mut start = 0;
        let mut parts = Vec::new();
        for &length in lengths.iter().take(PARTS_MAX) {
            parts.push(if x.is_poisoned() {
                x
            } else {
                x.slice(axis, start..start + length)
            });
            start = start.saturating_add(length);
        }
        parts
    }

    /// The slices of an axis of fixed length, one by one, without the axis.
    #[track_caller]
    pub fn unbind(self, axis: impl AxisIndex) -> Vec<Tensor<'t>> {
        let axis = axis.index(self.rank());
        let x = self.fixed_axis("unbind", axis);
        let length = x.len(axis).unwrap_or(0);
        let x = x.require(Location::caller(), |_, _| match length {
            n if n > PARTS_MAX => Err(format!("unbind: {n} parts are more than {PARTS_MAX}")),
            _ => Ok(()),
        });
        let mut parts = Vec::new();
        for at in 0..length.min(PARTS_MAX) {
            parts.push(x.slice(axis, at..=at).squeeze(axis));
        }
        parts
    }

    /// The axis `from` moved, so that it becomes axis `to`; the others keep their order.
    #[doc(alias = "moveaxis")]
    #[track_caller]
    pub fn movedim(self, from: impl AxisIndex, to: impl AxisIndex) -> Tensor<'t> {
        let rank = self.rank();
        let (from, to) = (from.index(rank), to.index(rank));
        self.trace.record(Location::caller(), &[self], |g, ids| {
            let rank = g.dims(ids[0]).len();
            if let Some(axis) = [from, to].into_iter().find(|&axis| axis >= rank) {
                return Err(no_axis(g, "movedim", axis, ids[0]));
            }
            let mut axes: Axes = (0..rank).filter(|&axis| axis != from).collect();
            axes.insert(to, from);
            Ok(g.permute(ids[0], &axes))
        })
    }

    /// The lower triangle of the last two axes: elements whose column is at most their row plus
    /// `diagonal`; the others become 0, even NaN.
    #[track_caller]
    pub fn tril(self, diagonal: i64) -> Tensor<'t> {
        self.triangle("tril", ScalarOp::Le, diagonal)
    }

    /// The upper triangle of the last two axes: elements whose column is at least their row plus
    /// `diagonal`; the others become 0, even NaN.
    #[track_caller]
    pub fn triu(self, diagonal: i64) -> Tensor<'t> {
        self.triangle("triu", ScalarOp::Ge, diagonal)
    }

    #[track_caller]
    fn triangle(self, what: &str, kept: ScalarOp, diagonal: i64) -> Tensor<'t> {
        self.trace.record(Location::caller(), &[self], |g, ids| {
            let (dtype, dims) = (g.dtype(ids[0]), g.dims(ids[0]).clone());
            let Some(columns) = dims.len().checked_sub(1).filter(|&last| last > 0) else {
                return Err(format!(
                    "{what} of {}: two axes are needed",
                    g.symbols.show(&dims)
                ));
            };
            // Beyond an i32 there is no axis.
            let diagonal = diagonal.clamp(-(1 << 30), 1 << 30);
            let [row, column] = [columns - 1, columns].map(|axis| {
                let mut strides: Dims = SmallVec::from_elem(Size::ZERO, dims.len());
                strides[axis] = Size::ONE;
                g.emit(Op::Index(strides), &[], DType::I32, dims.clone())
            });
            let offset = integer(g, diagonal as i32, &dims);
            let bound = g.add(row, offset);
            let keep = g.scalar(kept, &[column, bound]);
            let zero = g.full(0.0, dtype.lane().stored(), &dims);
            let chosen = g.scalar(ScalarOp::Select, &[keep, ids[0], zero]);
            Ok(g.cast(chosen, dtype))
        })
    }

    /// Channels rearranged to spatial positions: `[…, c·r·r, h, w]` gives `[…, c, h·r, w·r]` (Shi
    /// et al. 2016).
    #[track_caller]
    pub fn pixel_shuffle(self, factor: usize) -> Tensor<'t> {
        self.channels_to_space("pixel_shuffle", factor, false)
    }

    /// Spatial positions rearranged to channels, the inverse of [`Tensor::pixel_shuffle`]:
    /// `[…, c, h·r, w·r]` gives `[…, c·r·r, h, w]`.
    #[track_caller]
    pub fn pixel_unshuffle(self, factor: usize) -> Tensor<'t> {
        self.space_to_channels("pixel_unshuffle", factor, false)
    }

    /// Channels rearranged to spatial positions, where the position inside a block is the outer
    /// index and the channel the inner one: `[…, r·r·c, h, w]` gives `[…, c, h·r, w·r]`.
    /// [`Tensor::pixel_shuffle`] has the other order.
    #[track_caller]
    pub fn depth_to_space(self, block: usize) -> Tensor<'t> {
        self.channels_to_space("depth_to_space", block, true)
    }

    /// Spatial positions rearranged to channels, the inverse of [`Tensor::depth_to_space`]:
    /// `[…, c, h·r, w·r]` gives `[…, r·r·c, h, w]`.
    #[track_caller]
    pub fn space_to_depth(self, block: usize) -> Tensor<'t> {
        self.space_to_channels("space_to_depth", block, true)
    }

    #[track_caller]
    fn channels_to_space(self, what: &str, factor: usize, block_first: bool) -> Tensor<'t> {
        self.trace.record(Location::caller(), &[self], |g, ids| {
            let dims = g.dims(ids[0]).clone();
            let Some((&[c, h, w], batch, r)) = image(&dims, factor) else {
                return Err(no_blocks(g, what, &dims, factor));
            };
            let Some(c) = c.checked_div(factor as i64 * factor as i64) else {
                return Err(no_blocks(g, what, &dims, factor));
            };
            let split = if block_first {
                [r, r, c, h, w]
            } else {
                [c, r, r, h, w]
            };
            let order = if block_first {
                [2, 3, 0, 4, 1]
            } else {
                [0, 3, 1, 4, 2]
            };
            let joined = [Some(c), h.checked_mul(r), w.checked_mul(r)];
            regroup(g, what, ids[0], batch, &split, &order, &joined)
        })
    }

    #[track_caller]
    fn space_to_channels(self, what: &str, factor: usize, block_first: bool) -> Tensor<'t> {
        self.trace.record(Location::caller(), &[self], |g, ids| {
            let dims = g.dims(ids[0]).clone();
            let Some((&[c, h, w], batch, r)) = image(&dims, factor) else {
                return Err(no_blocks(g, what, &dims, factor));
            };
            let parts = |n: Size| n.checked_div(factor as i64);
            let (Some(h), Some(w)) = (parts(h), parts(w)) else {
                return Err(no_blocks(g, what, &dims, factor));
            };
            let split = [c, h, r, w, r];
            let order = if block_first {
                [2, 4, 0, 1, 3]
            } else {
                [0, 2, 4, 1, 3]
            };
            let channels = c.checked_mul(r).and_then(|c| c.checked_mul(r));
            let joined = [channels, Some(h), Some(w)];
            regroup(g, what, ids[0], batch, &split, &order, &joined)
        })
    }

    /// This tensor, if the axis exists and has a fixed length.
    #[track_caller]
    pub(super) fn fixed_axis(self, what: &str, axis: usize) -> Tensor<'t> {
        self.require(Location::caller(), |g, x| match g.dims(x).get(axis) {
            None => Err(no_axis(g, what, axis, x)),
            Some(n) if n.as_fixed().is_none() => Err(format!(
                "{what}: axis {axis} of {} has no fixed length",
                g.symbols.show(g.dims(x))
            )),
            Some(_) => Ok(()),
        })
    }
}

/// Channels, rows and columns of images, the axes before them, and the factor.
fn image(dims: &Dims, factor: usize) -> Option<(&[Size; 3], &[Size], Size)> {
    let (batch, image) = dims.split_last_chunk::<3>()?;
    let factor = i64::try_from(factor)
        .ok()
        .filter(|n| (1..1 << 16).contains(n))?;
    Some((image, batch, Size::fixed(factor)))
}

fn no_blocks(g: &Graph, what: &str, dims: &Dims, factor: usize) -> String {
    format!(
        "{what} of {} by {factor}: images […, channels, h, w] that divide into blocks of \
         {factor}×{factor} are needed",
        g.symbols.show(dims)
    )
}

/// The last axes split, put into another order, and joined.
fn regroup(
    g: &mut Graph,
    what: &str,
    x: NodeId,
    batch: &[Size],
    split: &[Size],
    order: &[usize],
    joined: &[Option<Size>],
) -> Result<NodeId, String> {
    let with = |rest: &[Size]| -> Dims { batch.iter().chain(rest).copied().collect() };
    let x = g.reshape(x, &with(split));
    let axes: Axes = (0..batch.len())
        .chain(order.iter().map(|axis| batch.len() + axis))
        .collect();
    let x = g.permute(x, &axes);
    let joined: Option<Vec<Size>> = joined.iter().copied().collect();
    let joined = joined.ok_or_else(|| format!("{what}: a length has no form as one size"))?;
    Ok(g.reshape(x, &with(&joined)))
}

/// An axis repeated: as a whole, or each element by itself.
fn repeat(
    g: &mut Graph,
    what: &str,
    x: NodeId,
    axis: usize,
    times: usize,
    whole: bool,
) -> Result<NodeId, String> {
    if times == 1 {
        return Ok(x);
    }
    let mut dims = g.dims(x).clone();
    let times = i64::try_from(times).map(Size::fixed);
    let long = times
        .ok()
        .and_then(|t| Some((t, dims[axis].checked_mul(t)?)));
    let Some((times, long)) = long else {
        return Err(format!(
            "{what}: axis {axis} of {} becomes too long",
            g.symbols.show(&dims)
        ));
    };
    let added = if whole { axis } else { axis + 1 };
    let mut joined = dims.clone();
    joined[axis] = long;
    dims.insert(added, Size::ONE);
    let x = g.reshape(x, &dims);
    dims[added] = times;
    let x = g.broadcast(x, &dims);
    debug_assert_eq!(elements(&joined), elements(&dims));
    Ok(g.reshape(x, &joined))
}

/// 0, 1, … n − 1: i32 `[n]`.
pub(super) fn ramp(g: &mut Graph, n: Size) -> NodeId {
    g.emit(
        Op::Index(Dims::from_slice(&[Size::ONE])),
        &[],
        DType::I32,
        Dims::from_slice(&[n]),
    )
}

/// An integer repeated to a shape.
pub(super) fn integer(g: &mut Graph, n: i32, dims: &Dims) -> NodeId {
    let value = slabwise_kernels::scalar::Value::I32(n);
    let one = g.emit(Op::Const(value), &[], DType::I32, Dims::new());
    g.broadcast(one, dims)
}

/// n − 1 for a length, as i32 `[n]`.
fn last_position(g: &mut Graph, n: Size) -> Result<NodeId, String> {
    let like = Dims::from_slice(&[n]);
    let length = length(g, n, &like)?;
    let one = integer(g, 1, &like);
    Ok(g.scalar(ScalarOp::Sub, &[length, one]))
}

/// A length, as i32 repeated to a shape.
pub(super) fn length(g: &mut Graph, n: Size, dims: &Dims) -> Result<NodeId, String> {
    match n.as_fixed().map(i32::try_from) {
        Some(Ok(n)) => Ok(integer(g, n, dims)),
        Some(Err(_)) => Err("an axis has more than 2³¹ elements, which cannot be numbered".into()),
        None => {
            let n = g.emit(Op::Size(n), &[], DType::I32, Dims::new());
            Ok(g.broadcast(n, dims))
        }
    }
}

/// The slices of an axis at positions `[n]` that are in range by construction.
pub(super) fn pick(
    g: &mut Graph,
    x: NodeId,
    axis: usize,
    positions: NodeId,
) -> Result<NodeId, String> {
    let mut dims = g.dims(x).clone();
    let n = g.dims(positions)[0];
    let mut column: Dims = SmallVec::from_elem(Size::ONE, dims.len());
    column[axis] = n;
    dims[axis] = n;
    let index = g.reshape(positions, &column);
    let index = g.broadcast(index, &dims);
    checked(g, Op::Gather { axis }, &[x, index])
}
