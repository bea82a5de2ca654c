//! Softmax and its relatives, losses, dropout: compositions that fuse into few kernels.

use std::panic::Location;

use slabwise_kernels::dtype::DType;
use slabwise_kernels::scalar::ScalarOp;
use slabwise_kernels::spec::ReduceOp;

use super::index::{matches_position, require_index};
use super::{Operand, Tensor, check_index};
use crate::ops::Emit;

impl<'t> Tensor<'t> {
    /// An integer near the maximum along an axis, which stays with length 1. Subtracted before exponentials it keeps them
    /// finite as the maximum itself would; and a rounded value has no gradient, so that none flows through the maximum, where
    /// it would cancel anyway.
    #[track_caller]
    fn level(self, axis: usize) -> Tensor<'t> {
        self.max_keep(axis).ceil()
    }

    /// eˣ along an axis, scaled so that the largest lies in 1/e..=1.
    #[track_caller]
    pub(super) fn exponentials(self, axis: usize) -> Tensor<'t> {
        let x = self.require_float_axis(Location::caller(), "softmax", axis);
        (x - x.level(axis)).exp()
    }

    /// eˣ/Σeˣ along an axis.
    #[track_caller]
    pub fn softmax(self, axis: usize) -> Tensor<'t> {
        let e = self.exponentials(axis);
        e / e.sum_keep(axis)
    }

    /// ln softmax along an axis, without its rounding errors.
    #[track_caller]
    pub fn log_softmax(self, axis: usize) -> Tensor<'t> {
        let x = self.require_float_axis(Location::caller(), "log_softmax", axis);
        let x = x - x.level(axis);
        x - x.exp().sum_keep(axis).ln()
    }

    /// ln Σeˣ along an axis, which goes: −∞ where every element is −∞.
    #[track_caller]
    pub fn logsumexp(self, axis: usize) -> Tensor<'t> {
        let x = self.require_float_axis(Location::caller(), "logsumexp", axis);
        let level = x.level(axis);
        // ∞ − ∞ is no number: an infinite level is not subtracted.
        let level = level.abs().equal(f32::INFINITY).select(0.0, level);
        let sum = (x - level).exp().sum_keep(axis).ln() + level;
        sum.squeeze(axis)
    }

    /// The mean of −ln softmax(logits) at the labels: logits `[batch…, classes]` (f32), labels `[batch…]` (i32 or u8). A label
    /// outside of `0..classes` fails the run.
    #[track_caller]
    pub fn cross_entropy(self, labels: Tensor<'t>) -> Tensor<'t> {
        self.cross_entropy_smoothed(labels, 0.0)
    }

    /// [`Tensor::cross_entropy`] against labels of which the share `smoothing` (in 0..=1) is spread evenly over all classes
    /// (Szegedy et al. 2016).
    #[track_caller]
    pub fn cross_entropy_smoothed(self, labels: Tensor<'t>, smoothing: f32) -> Tensor<'t> {
        let at = Location::caller();
        let logits = self.trace.record(at, &[self, labels], |g, ids| {
            let (dims, of_labels) = (g.dims(ids[0]), g.dims(ids[1]));
            let (shown, shown_labels) = (g.symbols.show(dims), g.symbols.show(of_labels));
            let Some((_, batch)) = dims.split_last() else {
                return Err(format!("cross_entropy of {shown}: logits [batch…, classes] are needed"));
            };
            if batch != of_labels.as_slice() {
                return Err(format!("cross_entropy of {shown} with labels {shown_labels}: the labels have another shape than the batch"));
            }
            if g.dtype(ids[0]) != DType::F32 {
                return Err(format!("cross_entropy: logits are {}, not f32", g.dtype(ids[0])));
            }
            if !(0.0..=1.0).contains(&smoothing) {
                return Err(format!("cross_entropy: a share of {smoothing} cannot be spread"));
            }
            require_index(g, "cross_entropy", ids[1])?;
            Ok(ids[0])
        });
        let Some(axis) = logits.rank().checked_sub(1) else { return logits };
        let x = logits - logits.level(axis);
        // ln Σeˣ − x at the label, in one pass over the row: the label is compared, not used as an address.
        let picked = self.trace.record(at, &[x, labels], |g, ids| {
            let classes = g.dims(ids[0])[axis];
            check_index(g, ids[1], classes);
            let hit = matches_position(g, ids[1], classes);
            let dims = g.dims(ids[0]).clone();
            let zero = g.full(0.0, DType::F32, &dims);
            let only = g.scalar(ScalarOp::Select, &[hit, ids[0], zero]);
            Ok(g.reduce(ReduceOp::Sum, only, &[axis]))
        });
        let wanted = if smoothing == 0.0 { picked } else { picked * (1.0 - smoothing) + x.mean_keep(axis) * smoothing };
        (x.exp().sum_keep(axis).ln() - wanted).mean()
    }

    /// The mean of −(t·ln p + (1 − t)·ln(1 − p)) for probabilities p (this tensor) and targets t in 0..=1. Logarithms below −100 count
    /// as −100, and the gradient is (p − t)/max(p(1 − p), 10⁻¹²): finite and large where p is 0 or 1 and wrong. A p outside of 0..=1 gives
    /// NaN. Of logits, [`Tensor::binary_cross_entropy_with_logits`] is exact.
    #[track_caller]
    pub fn binary_cross_entropy(self, target: Tensor<'t>) -> Tensor<'t> {
        let (p, t) = (self, target);
        let (hit, miss) = (p.ln(), (-p).log1p());
        let loss = (t - 1.0) * miss.maximum(-100.0) - t * hit.maximum(-100.0);
        loss.detach().with_slope(p, (p - t) / ((1.0 - p) * p).maximum(1e-12)).with_slope(t, miss - hit).mean()
    }

    /// The mean of −(t·ln σ(x) + (1 − t)·ln(1 − σ(x))) for logits x (this tensor) and targets t in 0..=1, without rounding σ(x): the
    /// gradient is σ(x) − t. At x = ±∞ the loss is ∞, or NaN where the target is that very side (0 · ∞).
    #[track_caller]
    pub fn binary_cross_entropy_with_logits(self, target: Tensor<'t>) -> Tensor<'t> {
        let (x, t) = (self, target);
        // ln(1 + eˣ) − x·t, as max(x, 0) − x·t + ln(1 + e^−|x|) with one product: no difference of infinities.
        let loss = x * (x.gt(0.0).select(1.0, 0.0) - t) + (-x.abs()).exp().log1p();
        loss.detach().with_slope(x, x.sigmoid() - t).with_slope(t, -x).mean()
    }

    /// The mean of Huber's loss (1964) of d = x − target: d²/2 up to |d| = `delta`, from there on the line `delta`·(|d| − `delta`/2), whose slope is ±`delta` at ±∞ too.
    #[track_caller]
    pub fn huber(self, target: impl Operand<'t>, delta: f32) -> Tensor<'t> {
        let x = self.require(Location::caller(), |_, _| match delta {
            delta if delta > 0.0 && delta.is_finite() => Ok(()),
            _ => Err(format!("huber: the loss cannot become a line at {delta}")),
        });
        let d = x - target;
        let far = d.abs();
        let near = far.minimum(delta);
        (near * (far - near * 0.5)).mean()
    }

    /// The mean of (x − target)².
    #[track_caller]
    pub fn mse(self, target: impl Operand<'t>) -> Tensor<'t> {
        (self - target).square().mean()
    }

    /// In a training trace zeroes each element with probability `p` and scales the others by 1/(1 − p) (Srivastava et al.
    /// 2014); otherwise the identity. What is dropped is 0, NaN and ∞ too.
    #[track_caller]
    pub fn dropout(self, p: f32) -> Tensor<'t> {
        let x = self.require(Location::caller(), |g, x| {
            if !(0.0..=1.0).contains(&p) {
                return Err(format!("dropout: {p} is not a probability"));
            }
            if g.dtype(x) != DType::F32 {
                return Err(format!("dropout does not take {}; convert with cast", g.dtype(x)));
            }
            Ok(())
        });
        if !self.trace.is_training() || p == 0.0 {
            return x;
        }
        // With p = 1 nothing stays, and an infinite scale must not meet a zero.
        let scale = if p < 1.0 { 1.0 / (1.0 - p) } else { 0.0 };
        x.uniform_like().ge(p).select(x * scale, 0.0)
    }
}
