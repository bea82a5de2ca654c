//! Softmax and its relatives, losses, dropout: compositions that fuse into few kernels.
//!
//! A loss is a mean over all elements, unless a [`Reduction`] says otherwise. Over no elements a
//! mean is NaN, as in PyTorch; but a training trace refuses such a loss: a fixed length of 0 in
//! `compile`, other lengths in the run in which they are 0, before a weight is changed.

mod classes;
mod elements;
mod sequences;
mod vectors;

use std::panic::Location;

use slabwise_kernels::dtype::DType;
use slabwise_kernels::scalar::ScalarOp;
use slabwise_kernels::spec::{Dims, ReduceOp};

use super::index::{matches_position, require_index};
use super::{AxisIndex, Operand, Tensor, check_index};
use crate::graph::Graph;
use crate::ops::{Axes, GraphBuilder, NodeId};
use crate::shape::elements;
use crate::trace::Line;

pub use classes::CrossEntropy;
pub use sequences::Ctc;

/// The reduction of the losses of single elements to one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Reduction {
    /// None: a loss for each element.
    None,
    /// Their mean.
    #[default]
    Mean,
    /// Their sum.
    Sum,
    /// Their sum, divided by the length of the first axis.
    BatchMean,
}

impl<'t> Tensor<'t> {
    /// The reduction of the losses of single elements; `what` is the name of the loss.
    #[track_caller]
    fn reduced(self, what: &str, reduction: Reduction) -> Tensor<'t> {
        match reduction {
            Reduction::None => self,
            Reduction::Mean => self.mean_loss(what),
            Reduction::Sum => self.sum(),
            Reduction::BatchMean => {
                let at = Location::caller();
                let x = self.require(at, |g, x| match g.dims(x).len() {
                    0 => Err(format!("{what}: a mean over the batch of a scalar")),
                    _ => Ok(()),
                });
                if x.is_poisoned() {
                    return x;
                }
                let first: &[usize] = if self.trace.is_training() { &[0] } else { &[] };
                let x = x.with_elements(at, what, first, "has a mean to learn from");
                let n = self.trace.record(at, &[x], |g, ids| {
                    super::reduce::count(g, ids[0], &Axes::from_slice(&[0]))
                });
                x.sum() / n
            }
        }
    }

    /// The mean of a loss over all elements. A training trace refuses a run without any: their mean
    /// is NaN, and a step by it would put NaN into every weight. Other traces give NaN.
    #[track_caller]
    fn mean_loss(self, what: &str) -> Tensor<'t> {
        let axes: Vec<usize> = (0..self.rank())
            .filter(|_| self.trace.is_training())
            .collect();
        self.with_elements(Location::caller(), what, &axes, "has a mean to learn from")
            .mean()
    }

    /// An integer near the maximum along an axis, which stays with length 1. Subtracted before
    /// exponentials it keeps them finite as the maximum itself would; and a rounded value has no
    /// gradient, which would cancel anyway.
    #[track_caller]
    pub(super) fn level(self, axis: usize) -> Tensor<'t> {
        let highest = |g: &mut Graph, ids: &[NodeId]| Ok(g.reduce(ReduceOp::Max, ids[0], &[axis]));
        self.trace
            .record(Location::caller(), &[self], highest)
            .ceil()
    }

    /// eˣ along an axis, scaled so that the largest lies in 1/e..=1.
    #[track_caller]
    pub(super) fn exponentials(self, axis: usize) -> Tensor<'t> {
        let x = self.require_float_axis(Location::caller(), "softmax", axis);
        (x - x.level(axis)).exp()
    }

    /// eˣ/Σeˣ along an axis.
    #[track_caller]
    pub fn softmax(self, axis: impl AxisIndex) -> Tensor<'t> {
        let axis = axis.index(self.rank());
        let e = self.exponentials(axis);
        e / e.sum_keep(axis)
    }

    /// ln softmax along an axis, without its rounding errors.
    #[track_caller]
    pub fn log_softmax(self, axis: impl AxisIndex) -> Tensor<'t> {
        let axis = axis.index(self.rank());
        let x = self.require_float_axis(Location::caller(), "log_softmax", axis);
        let x = x - x.level(axis);
        x - x.exp().sum_keep(axis).ln()
    }

    /// ln Σeˣ along an axis, which is removed: −∞ where every element is −∞.
    #[track_caller]
    pub fn logsumexp(self, axis: impl AxisIndex) -> Tensor<'t> {
        let axis = axis.index(self.rank());
        let x = self.require_float_axis(Location::caller(), "logsumexp", axis);
        let level = x.level(axis);
        // ∞ − ∞ is NaN, so an infinite level is not subtracted.
        let level = level.abs().equal(f32::INFINITY).select(0.0, level);
        let sum = (x - level).exp().sum_keep(axis).ln() + level;
        sum.squeeze(axis)
    }

    /// The mean of −ln softmax(logits) at the labels: logits `[batch…, classes]` (f32), labels
    /// `[batch…]` (i32 or u8). A label outside of `0..classes` fails the run. Of no elements it is
    /// NaN; a training trace refuses a run of them.
    #[track_caller]
    pub fn cross_entropy(self, labels: Tensor<'t>) -> Tensor<'t> {
        self.cross_entropy_smoothed(labels, 0.0)
    }

    /// [`Tensor::cross_entropy`] against labels of which the share `smoothing` (in 0..=1) is spread
    /// evenly over all classes (Szegedy et al. 2016). Of no elements it is NaN; a training trace
    /// refuses a run of them.
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
        let Some(axis) = logits.rank().checked_sub(1) else {
            return logits;
        };
        let x = logits - logits.level(axis);
        // ln Σeˣ − x at the label, in one pass over the row: the label is compared, not used as an
        // address.
        let picked = self.trace.record(at, &[x, labels], |g, ids| {
            let classes = g.dims(ids[0])[axis];
            check_index(g, ids[1], classes);
            let hit = matches_position(g, ids[1], classes);
            let dims = g.dims(ids[0]).clone();
            let zero = g.full(0.0, DType::F32, &dims);
            let only = g.scalar(ScalarOp::Select, &[hit, ids[0], zero]);
            Ok(g.reduce(ReduceOp::Sum, only, &[axis]))
        });
        let wanted = if smoothing == 0.0 {
            picked
        } else {
            picked * (1.0 - smoothing) + x.mean_keep(axis) * smoothing
        };
        (x.exp().sum_keep(axis).ln() - wanted).mean_loss("cross_entropy")
    }

    /// The mean of −(t·ln p + (1 − t)·ln(1 − p)) for probabilities p (this tensor) and targets t in
    /// 0..=1. Logarithms below −100 count as −100, and the gradient is (p − t)/max(p(1 − p),
    /// 10⁻¹²): finite and large where p is 0 or 1 and wrong. A p outside of 0..=1 gives NaN. Of
    /// logits, [`Tensor::binary_cross_entropy_with_logits`] is exact. Of no elements it is NaN; a
    /// training trace refuses a run of them.
    #[track_caller]
    pub fn binary_cross_entropy(self, target: Tensor<'t>) -> Tensor<'t> {
        self.binary_cross_entropy_by(target, Reduction::Mean)
    }

    /// [`Tensor::binary_cross_entropy`] of each element, reduced in a given way.
    #[track_caller]
    pub fn binary_cross_entropy_by(self, target: Tensor<'t>, reduction: Reduction) -> Tensor<'t> {
        let (p, t) = self.beside_target("binary_cross_entropy", target, Location::caller());
        let (hit, miss) = (p.ln(), (-p).log1p());
        let loss = (t - 1.0) * miss.maximum(-100.0) - t * hit.maximum(-100.0);
        let slope = (p - t) / ((1.0 - p) * p).maximum(1e-12);
        loss.detach()
            .with_slope(p, slope)
            .with_slope(t, miss - hit)
            .reduced("binary_cross_entropy", reduction)
    }

    /// The mean of −(t·ln σ(x) + (1 − t)·ln(1 − σ(x))) for logits x (this tensor) and targets t in
    /// 0..=1, without rounding σ(x): the gradient is σ(x) − t. At x = ±∞ the loss is ∞, or NaN
    /// where the target is that very side (0 · ∞). Of no elements it is NaN; a training trace
    /// refuses a run of them.
    #[track_caller]
    pub fn binary_cross_entropy_with_logits(self, target: Tensor<'t>) -> Tensor<'t> {
        self.binary_cross_entropy_with_logits_by(target, Reduction::Mean)
    }

    /// [`Tensor::binary_cross_entropy_with_logits`] of each element, reduced in a given way.
    #[track_caller]
    pub fn binary_cross_entropy_with_logits_by(
        self,
        target: Tensor<'t>,
        reduction: Reduction,
    ) -> Tensor<'t> {
        let (x, t) = self.beside_target(
            "binary_cross_entropy_with_logits",
            target,
            Location::caller(),
        );
        // ln(1 + eˣ) − x·t, as max(x, 0) − x·t + ln(1 + e^−|x|) with one product: no difference of
        // infinities.
        let loss = x * (x.gt(0.0).select(1.0, 0.0) - t) + (-x.abs()).exp().log1p();
        let loss = loss
            .detach()
            .with_slope(x, x.sigmoid() - t)
            .with_slope(t, -x);
        loss.reduced("binary_cross_entropy_with_logits", reduction)
    }

    /// The mean of Huber's loss (1964) of d = x − target: d²/2 up to |d| = `delta`, from there on
    /// the line `delta`·(|d| − `delta`/2), whose slope is ±`delta` at ±∞ too. Of no elements it is
    /// NaN; a training trace refuses a run of them.
    #[track_caller]
    pub fn huber(self, target: impl Operand<'t>, delta: f32) -> Tensor<'t> {
        self.huber_by(target, delta, Reduction::Mean)
    }

    /// [`Tensor::huber`] of each element, reduced in a given way.
    #[track_caller]
    pub fn huber_by(
        self,
        target: impl Operand<'t>,
        delta: f32,
        reduction: Reduction,
    ) -> Tensor<'t> {
        let x = self.require(Location::caller(), |_, _| match delta {
            delta if delta > 0.0 && delta.is_finite() => Ok(()),
            _ => Err(format!("huber: the loss cannot become a line at {delta}")),
        });
        let (x, target) = x.beside_target("huber", target, Location::caller());
        let d = x - target;
        let far = d.abs();
        let near = far.minimum(delta);
        (near * (far - near * 0.5)).reduced("huber", reduction)
    }

    /// The mean of (x − target)². The target is a number, or a tensor of this one's shape and type;
    /// no loss that compares element by element broadcasts. Of no elements it is NaN; a training
    /// trace refuses a run of them.
    #[track_caller]
    pub fn mse(self, target: impl Operand<'t>) -> Tensor<'t> {
        self.mse_by(target, Reduction::Mean)
    }

    /// [`Tensor::mse`] of each element, reduced in a given way.
    #[track_caller]
    pub fn mse_by(self, target: impl Operand<'t>, reduction: Reduction) -> Tensor<'t> {
        let (x, target) = self.beside_target("mse", target, Location::caller());
        (x - target).square().reduced("mse", reduction)
    }

    /// The mean of |x − target|, for a target as of [`Tensor::mse`].
    #[track_caller]
    pub fn l1(self, target: impl Operand<'t>) -> Tensor<'t> {
        self.l1_by(target, Reduction::Mean)
    }

    /// [`Tensor::l1`] of each element, reduced in a given way.
    #[track_caller]
    pub fn l1_by(self, target: impl Operand<'t>, reduction: Reduction) -> Tensor<'t> {
        let (x, target) = self.beside_target("l1", target, Location::caller());
        (x - target).abs().reduced("l1", reduction)
    }

    /// This tensor and the target that a loss compares it with element by element: a number, or a
    /// tensor of the same shape and type. Broadcasting is refused, because `[n, 1]` and `[n]` would
    /// silently give the mean over n × n pairs.
    fn beside_target(
        self,
        what: &str,
        target: impl Operand<'t>,
        at: Line,
    ) -> (Tensor<'t>, Tensor<'t>) {
        let number = target.own_type().is_none();
        let target = target.lift(self.trace, self.dtype(), at);
        let x = self.trace.record(at, &[self, target], |g, ids| {
            let [(x, of_x), (y, of_y)] = [ids[0], ids[1]].map(|id| (g.dims(id), g.dtype(id)));
            let say =
                |why: String| Err(format!("{what} of {of_x} {} with a target {of_y} {}: {why}", g.symbols.show(x), g.symbols.show(y)));
            let but_one = |long: &Dims, short: &Dims| {
                let without =
                    |axis: usize| long.iter().enumerate().filter(|(i, _)| *i != axis).all(|(i, d)| short[i - usize::from(i > axis)] == *d);
                (0..long.len()).find(|&axis| long.len() == short.len() + 1 && long[axis].is(1) && without(axis))
            };
            if of_x != DType::F32 || (of_y != of_x && !number) {
                return say("both are to be f32; convert with cast(F32)".into());
            }
            if number || x == y {
                return Ok(ids[0]);
            }
            if let Some(axis) = but_one(x, y) {
                return say(format!("a loss compares equal shapes; squeeze({axis}) on the prediction makes them so"));
            }
            if let Some(axis) = but_one(y, x) {
                return say(format!("a loss compares equal shapes; squeeze({axis}) on the target makes them so"));
            }
            match elements(x).is_some() && elements(x) == elements(y) {
                true => say("a loss compares equal shapes; reshape one to the shape of the other".into()),
                false => say("a loss compares equal shapes; if the target is to be repeated, say so with expand".into()),
            }
        });
        if x.is_poisoned() { (x, x) } else { (x, target) }
    }

    /// In a training trace zeroes each element with probability `p` and scales the others by 1/(1 −
    /// p) (Srivastava et al. 2014); otherwise the identity. Dropped elements become 0, even NaN and
    /// ∞.
    #[track_caller]
    pub fn dropout(self, p: f32) -> Tensor<'t> {
        let x = self.require(Location::caller(), |g, x| {
            if !(0.0..=1.0).contains(&p) {
                return Err(format!("dropout: {p} is not a probability"));
            }
            if g.dtype(x) != DType::F32 {
                return Err(format!(
                    "dropout does not take {}; convert with cast",
                    g.dtype(x)
                ));
            }
            Ok(())
        });
        if !self.trace.is_training() || p == 0.0 {
            return x;
        }
        // With p = 1 no element stays, and an infinite scale must not meet a zero.
        let scale = if p < 1.0 { 1.0 / (1.0 - p) } else { 0.0 };
        x.uniform_like().ge(p).select(x * scale, 0.0)
    }
}
