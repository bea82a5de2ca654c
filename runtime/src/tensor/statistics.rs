//! Variances, norms of vectors, and products of vectors.

use std::panic::Location;

use slabwise_kernels::dtype::DType::F32;
use slabwise_kernels::size::Size;
use slabwise_kernels::spec::Dims;
use smallvec::SmallVec;

use super::reduce::count;
use super::{AxisIndex, AxisSet, Operand, Tensor};
use crate::graph::Graph;
use crate::ops::{GraphBuilder, NodeId, Op};
use crate::trace::Line;

macro_rules! along {
    ($($(#[$doc:meta])* $over:ident $keep:ident($($arg:ident: $type:ty),*);)*) => {
        impl<'t> Tensor<'t> {
            $($(#[$doc])*
            ///
            /// Over the given axes, which are removed; `..` for all.
            #[track_caller]
            pub fn $over(self, axes: impl AxisSet, $($arg: $type),*) -> Tensor<'t> {
                let axes = axes.axes(self.rank());
                self.$keep(axes.as_slice(), $($arg),*).without(&axes)
            })*
        }
    };
}

along! {
    /// The variance Σ(x − mean)²/(n − correction), f32: with correction 1 it is the unbiased
    /// estimate from a sample (Bessel), with 0 the variance of the population. Where n is at most
    /// the correction it is ∞, or NaN if all elements are equal.
    var_over var_keep(correction: usize);
    /// The standard deviation: the root of [`Tensor::var_over`]. Its slope is 0 where it is 0.
    std_over std_keep(correction: usize);
    /// The p-norm (Σ|x|ᵖ)^(1/p) of vectors: with p 1 the sum of magnitudes, with 2 the Euclidean
    /// norm (over both axes of a matrix, the Frobenius norm), with ∞ the largest magnitude, with −∞
    /// the smallest, with 0 the number of elements that are not 0. Its slope is 0 where it is 0.
    norm_over norm_keep(p: f32);
}

impl<'t> Tensor<'t> {
    /// [`Tensor::var_over`], but the axes stay with length 1.
    #[track_caller]
    pub fn var_keep(self, axes: impl AxisSet, correction: usize) -> Tensor<'t> {
        let axes = axes.axes(self.rank());
        let x = self.cast(F32);
        let squares = (x - x.mean_keep(axes.as_slice()))
            .square()
            .sum_keep(axes.as_slice());
        let n = self
            .trace
            .record(Location::caller(), &[squares, x], |g, ids| {
                count(g, ids[1], &axes)
            });
        squares / (n - correction as f32).maximum(0.0)
    }

    /// [`Tensor::std_over`], but the axes stay with length 1.
    #[track_caller]
    pub fn std_keep(self, axes: impl AxisSet, correction: usize) -> Tensor<'t> {
        self.var_keep(axes, correction).sqrt_or_flat()
    }

    /// [`Tensor::norm_over`], but the axes stay with length 1.
    #[track_caller]
    pub fn norm_keep(self, axes: impl AxisSet, p: f32) -> Tensor<'t> {
        let x = self.require_float("norm");
        if p == f32::INFINITY {
            x.abs().max_keep(axes)
        } else if p == f32::NEG_INFINITY {
            x.abs().min_keep(axes)
        } else if p == 0.0 {
            x.not_equal(0.0).cast(F32).sum_keep(axes)
        } else if p == 1.0 {
            x.abs().sum_keep(axes)
        } else if p == 2.0 {
            x.square().sum_keep(axes).sqrt_or_flat()
        } else if p.is_nan() {
            x.require(Location::caller(), |_, _| {
                Err("norm: its power is NaN".into())
            })
        } else {
            x.power_or_flat(p).sum_keep(axes).power_or_flat(1.0 / p)
        }
    }

    /// |x|ᵖ, whose slope at 0 is 0.
    #[track_caller]
    pub(super) fn power_or_flat(self, p: f32) -> Tensor<'t> {
        let zero = self.equal(0.0);
        let of_zero = if p > 0.0 { 0.0 } else { f32::INFINITY };
        zero.select(of_zero, zero.select(1.0, self).abs().pow(p))
    }

    /// Without axes of length 1.
    #[track_caller]
    fn without(self, axes: &[usize]) -> Tensor<'t> {
        self.trace.record(Location::caller(), &[self], |g, ids| {
            let kept = |axis: &usize| !axes.contains(axis);
            let dims: Dims = (0..g.dims(ids[0]).len())
                .filter(kept)
                .map(|axis| g.dims(ids[0])[axis])
                .collect();
            Ok(g.reshape(ids[0], &dims))
        })
    }

    /// The scalar Σ xᵢ·yᵢ of two vectors of one length.
    #[track_caller]
    pub fn dot(self, rhs: impl Operand<'t>) -> Tensor<'t> {
        let at = Location::caller();
        let rhs = rhs.lift(self.trace, self.dtype(), at);
        let x = self.vectors("dot", rhs, at, |a, b| a == b);
        (x * rhs).sum()
    }

    /// The matrix xᵢ·yⱼ of two vectors: `[n]` and `[m]` give `[n, m]`.
    #[track_caller]
    pub fn outer(self, rhs: impl Operand<'t>) -> Tensor<'t> {
        let at = Location::caller();
        let rhs = rhs.lift(self.trace, self.dtype(), at);
        let x = self.vectors("outer", rhs, at, |_, _| true);
        x.unsqueeze(1) * rhs
    }

    fn vectors(
        self,
        what: &str,
        rhs: Tensor<'t>,
        at: Line,
        fit: impl Fn(Size, Size) -> bool,
    ) -> Tensor<'t> {
        self.trace.record(at, &[self, rhs], |g, ids| {
            match (g.dims(ids[0]).as_slice(), g.dims(ids[1]).as_slice()) {
                (&[a], &[b]) if fit(a, b) => Ok(ids[0]),
                (a, b) => Err(format!(
                    "{what} of {} and {}: two vectors are needed{}",
                    g.symbols.show(a),
                    g.symbols.show(b),
                    if what == "dot" { " of one length" } else { "" }
                )),
            }
        })
    }

    /// The cosine of the angle between vectors along an axis, which is removed: Σxy/(|x|·|y|), where
    /// lengths below `eps` count as `eps` (PyTorch's default is 10⁻⁸). Shapes broadcast.
    #[track_caller]
    pub fn cosine_similarity(
        self,
        rhs: impl Operand<'t>,
        axis: impl AxisIndex,
        eps: f32,
    ) -> Tensor<'t> {
        let axis = axis.index(self.rank());
        let y = rhs.lift(self.trace, self.dtype(), Location::caller());
        let x = self.require_float_axis(Location::caller(), "cosine_similarity", axis);
        let [a, b] = [x, y].map(|v| v.norm_keep(axis, 2.0).maximum(eps));
        ((x / a) * (y / b)).sum_over(axis)
    }

    /// The length of x − y + `eps` along the last axis, which is removed, by the p of
    /// [`Tensor::norm_over`] (PyTorch's defaults are 2 and 10⁻⁶). Shapes broadcast.
    #[track_caller]
    pub fn pairwise_distance(self, rhs: impl Operand<'t>, p: f32, eps: f32) -> Tensor<'t> {
        let difference = self - rhs + eps;
        let Some(last) = difference.rank().checked_sub(1) else {
            return difference.require(Location::caller(), |g, x| {
                if x == super::POISON {
                    return Ok(());
                }
                Err(format!(
                    "pairwise_distance of {}: an axis is needed",
                    g.symbols.show(g.dims(x))
                ))
            });
        };
        difference.norm_over(last, p)
    }

    /// The elements of the last two axes whose column is their row plus `offset`, as a last axis: a
    /// view of `[…, n, m]`.
    #[doc(alias = "diag")]
    #[track_caller]
    pub fn diagonal(self, offset: i64) -> Tensor<'t> {
        self.trace.record(Location::caller(), &[self], |g, ids| {
            diagonal(g, ids[0], offset)
        })
    }

    /// The matrices whose [`diagonal`](Tensor::diagonal) at `offset` is the last axis, and that are
    /// 0 elsewhere: `[…, n]` gives `[…, n + |offset|, n + |offset|]`.
    #[doc(alias = "diag")]
    #[track_caller]
    pub fn diag_embed(self, offset: i64) -> Tensor<'t> {
        self.trace.record(Location::caller(), &[self], |g, ids| {
            diag_embed(g, ids[0], offset)
        })
    }

    /// The sum of the diagonal of the last two axes, which are removed.
    #[doc(alias = "trace")]
    #[track_caller]
    pub fn diagonal_sum(self) -> Tensor<'t> {
        let diagonal = self.diagonal(0);
        match diagonal.rank().checked_sub(1) {
            Some(last) => diagonal.sum_over(last),
            None => diagonal,
        }
    }
}

pub(super) fn diagonal(g: &mut Graph, x: NodeId, offset: i64) -> Result<NodeId, String> {
    let dims = g.dims(x).clone();
    let say = |g: &Graph| {
        Err(format!(
            "diagonal of {}: two last axes of fixed length are needed",
            g.symbols.show(g.dims(x))
        ))
    };
    let [batch @ .., rows, columns] = dims.as_slice() else {
        return say(g);
    };
    let (Some(rows), Some(columns)) = (rows.as_fixed(), columns.as_fixed()) else {
        return say(g);
    };
    // Row-major, neighbours on the diagonal are columns + 1 elements apart.
    let (row, column) = (offset.saturating_neg().max(0), offset.max(0));
    let count = (rows.saturating_sub(row))
        .min(columns.saturating_sub(column))
        .max(0);
    let mut flat = Dims::from_slice(batch);
    flat.push(Size::fixed(rows * columns));
    let joined = g.reshape(x, &flat);
    let last = flat.len() - 1;
    let mut start: Dims = SmallVec::from_elem(Size::ZERO, flat.len());
    start[last] = Size::fixed(if count > 0 { row * columns + column } else { 0 });
    let mut step: SmallVec<[u32; 6]> = SmallVec::from_elem(1, flat.len());
    step[last] = u32::try_from(columns + 1).map_err(|_| "diagonal: the rows are too long")?;
    flat[last] = Size::fixed(count);
    let dtype = g.dtype(x);
    Ok(g.emit(Op::Slice { start, step }, &[joined], dtype, flat))
}

fn diag_embed(g: &mut Graph, x: NodeId, offset: i64) -> Result<NodeId, String> {
    let (dtype, mut dims) = (g.dtype(x), g.dims(x).clone());
    let Some(n) = dims.pop() else {
        return Err("diag_embed of []: an axis is needed".into());
    };
    let Some(n) = n.as_fixed() else {
        return Err(format!(
            "diag_embed of {}: a last axis of fixed length is needed",
            g.symbols.show(g.dims(x))
        ));
    };
    let width = offset
        .checked_abs()
        .and_then(|o| n.checked_add(o))
        .filter(|w| w.checked_mul(*w).is_some())
        .ok_or_else(|| format!("diag_embed: an offset of {offset} is too large"))?;
    let (row, column) = (offset.saturating_neg().max(0), offset.max(0));
    let mut flat = dims.clone();
    flat.push(Size::fixed(width * width));
    let last = flat.len() - 1;
    let mut start: Dims = SmallVec::from_elem(Size::ZERO, flat.len());
    start[last] = Size::fixed(if n > 0 { row * width + column } else { 0 });
    let mut step: SmallVec<[u32; 6]> = SmallVec::from_elem(1, flat.len());
    step[last] = u32::try_from(width + 1).map_err(|_| "diag_embed: the rows are too long")?;
    let value = dtype.hold(slabwise_kernels::scalar::Value::F32(0.0));
    let placed = g.emit(Op::Pad { start, step, value }, &[x], dtype, flat);
    dims.extend([Size::fixed(width), Size::fixed(width)]);
    Ok(g.reshape(placed, &dims))
}
