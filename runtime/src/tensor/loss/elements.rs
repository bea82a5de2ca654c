//! Losses that compare a prediction with its target element by element.

use std::f32::consts::TAU;
use std::panic::Location;

use slabwise_kernels::dtype::DType::F32;

use super::Reduction;
use crate::tensor::{Operand, Tensor};

impl<'t> Tensor<'t> {
    /// [`Tensor::huber`] divided by its `beta`: d²/(2·`beta`) up to |d| = `beta`, then |d| − `beta`/2
    /// (Girshick 2015); with `beta` 0 it is |d|.
    #[track_caller]
    pub fn smooth_l1(
        self,
        target: impl Operand<'t>,
        beta: f32,
        reduction: Reduction,
    ) -> Tensor<'t> {
        let at = Location::caller();
        let x = self.require(at, |_, _| match beta {
            beta if beta >= 0.0 && beta.is_finite() => Ok(()),
            _ => Err(format!(
                "smooth_l1: the loss cannot become a line at {beta}"
            )),
        });
        let (x, target) = x.beside_target("smooth_l1", target, at);
        let far = (x - target).abs();
        if beta == 0.0 {
            return far.reduced("smooth_l1", reduction);
        }
        let near = far.minimum(beta);
        (near * (far - near * 0.5) / beta).reduced("smooth_l1", reduction)
    }

    /// The divergence target·(ln target − x) of Kullback and Leibler, of logarithms of
    /// probabilities x and probabilities; 0 where the target is 0, whatever x is there.
    /// [`Reduction::BatchMean`] gives the divergence of distributions.
    #[track_caller]
    pub fn kl_divergence(self, target: impl Operand<'t>, reduction: Reduction) -> Tensor<'t> {
        let (x, t) = self.beside_target("kl_divergence", target, Location::caller());
        let zero = t.equal(0.0);
        let log = zero.select(1.0, t).ln();
        let losses = t * log - t * zero.and(!x.is_finite()).select(0.0, x);
        losses.reduced("kl_divergence", reduction)
    }

    /// [`Tensor::kl_divergence`] from a target of logarithms of probabilities: e^target·(target −
    /// x).
    #[track_caller]
    pub fn kl_divergence_of_logs(
        self,
        target: impl Operand<'t>,
        reduction: Reduction,
    ) -> Tensor<'t> {
        let (x, t) = self.beside_target("kl_divergence", target, Location::caller());
        (t.exp() * (t - x)).reduced("kl_divergence", reduction)
    }

    /// The negative logarithm of a Poisson distribution's probability of the target, except for a
    /// constant: eˣ − target·x, where x is the logarithm of the rate.
    #[track_caller]
    pub fn poisson_nll(self, target: impl Operand<'t>, reduction: Reduction) -> Tensor<'t> {
        let (x, t) = self.beside_target("poisson_nll", target, Location::caller());
        (x.exp() - t * x).reduced("poisson_nll", reduction)
    }

    /// The negative logarithm of a normal distribution's density at the target: ½(ln(2π·v) + (x −
    /// target)²/v), with the mean x and the variance v, a tensor of the same shape of which at
    /// least `eps` counts (PyTorch's default is 10⁻⁶); a smaller one has the gradient at `eps`, so
    /// that it can recover. PyTorch omits the 2π by default.
    #[track_caller]
    pub fn gaussian_nll(
        self,
        target: impl Operand<'t>,
        variance: Tensor<'t>,
        eps: f32,
        reduction: Reduction,
    ) -> Tensor<'t> {
        let at = Location::caller();
        let (x, target) = self.beside_target("gaussian_nll", target, at);
        let (x, variance) = x.beside_target("gaussian_nll", variance, at);
        let slope = self.trace.full(1.0, F32, ());
        let v = variance.maximum(eps).detach().with_slope(variance, slope);
        let losses = ((v * TAU).ln() + (x - target).square() / v) * 0.5;
        losses.reduced("gaussian_nll", reduction)
    }

    /// x where the target is 1, max(0, `margin` − x) where it is −1: for distances that should be
    /// small or large.
    #[track_caller]
    pub fn hinge_embedding(
        self,
        target: impl Operand<'t>,
        margin: f32,
        reduction: Reduction,
    ) -> Tensor<'t> {
        let (x, t) = self.beside_target("hinge_embedding", target, Location::caller());
        t.gt(0.0)
            .select(x, (margin - x).relu())
            .reduced("hinge_embedding", reduction)
    }

    /// The hinge loss max(0, 1 − target·x), for targets of 1 and −1.
    #[track_caller]
    pub fn hinge(self, target: impl Operand<'t>, reduction: Reduction) -> Tensor<'t> {
        let (x, t) = self.beside_target("hinge", target, Location::caller());
        (1.0 - t * x).relu().reduced("hinge", reduction)
    }

    /// ln(1 + e^(−target·x)), for targets of 1 and −1.
    #[track_caller]
    pub fn soft_margin(self, target: impl Operand<'t>, reduction: Reduction) -> Tensor<'t> {
        let (x, t) = self.beside_target("soft_margin", target, Location::caller());
        (-(t * x)).softplus().reduced("soft_margin", reduction)
    }

    /// max(0, `margin` − target·(x − other)): x should be above `other` where the target is 1, and
    /// below it where it is −1.
    #[track_caller]
    pub fn margin_ranking(
        self,
        other: Tensor<'t>,
        target: impl Operand<'t>,
        margin: f32,
        reduction: Reduction,
    ) -> Tensor<'t> {
        let at = Location::caller();
        let (x, other) = self.beside_target("margin_ranking", other, at);
        let (x, t) = x.beside_target("margin_ranking", target, at);
        (margin - t * (x - other))
            .relu()
            .reduced("margin_ranking", reduction)
    }

    /// [`Tensor::binary_cross_entropy_with_logits`], where the loss of targets t counts 1 + (w −
    /// 1)·t times beside that of 1 − t: a weight w of positives, which broadcasts (PyTorch's
    /// `pos_weight`).
    #[track_caller]
    pub fn weighted_binary_cross_entropy_with_logits(
        self,
        target: Tensor<'t>,
        positive: impl Operand<'t>,
        reduction: Reduction,
    ) -> Tensor<'t> {
        let at = Location::caller();
        let what = "weighted_binary_cross_entropy_with_logits";
        let positive = positive.lift(self.trace, F32, at);
        let (x, t) = self.beside_target(what, target, at);
        // −ln σ(x) and −ln σ(−x).
        let (hit, miss) = ((-x).softplus(), x.softplus());
        (hit * t * positive + miss * (1.0 - t)).reduced(what, reduction)
    }

    /// The focal loss of logits and targets in 0..=1 (Lin et al. 2017): the binary cross entropy
    /// times (1 − p)^`gamma`, where p is the probability of the target, and times `alpha` for
    /// positives and 1 − `alpha` for negatives; without these factors if `alpha` is below 0. The
    /// paper's values are ¼ and 2.
    #[track_caller]
    pub fn focal(
        self,
        target: Tensor<'t>,
        alpha: f32,
        gamma: f32,
        reduction: Reduction,
    ) -> Tensor<'t> {
        let (x, t) = self.beside_target("focal", target, Location::caller());
        let losses = x.binary_cross_entropy_with_logits_by(t, Reduction::None);
        let p = x.sigmoid();
        let missed = p * (1.0 - t) + (1.0 - p) * t;
        let mut losses = losses * missed.pow(gamma);
        if alpha >= 0.0 {
            losses = losses * (t * (2.0 * alpha - 1.0) + (1.0 - alpha));
        }
        losses.reduced("focal", reduction)
    }

    /// 1 − (2·Σpt + `smooth`)/(Σp + Σt + `smooth`) of probabilities p and targets t `[n, …]`,
    /// summed over all axes but the first (Milletari et al. 2016): how much two regions differ.
    #[track_caller]
    pub fn dice(self, target: Tensor<'t>, smooth: f32, reduction: Reduction) -> Tensor<'t> {
        let at = Location::caller();
        let (p, t) = self.beside_target("dice", target, at);
        let p = p.require(at, |g, x| {
            match crate::ops::GraphBuilder::dims(g, x).len() {
                0 => Err("dice of a scalar: [n, …] is needed".into()),
                _ => Ok(()),
            }
        });
        let places: Vec<usize> = (1..p.rank()).collect();
        let sum = |x: Tensor<'t>| x.sum_over(places.as_slice());
        let losses = self.trace.on_behalf(at, || {
            let (both, all) = (sum(p * t), sum(p) + sum(t));
            1.0 - (both * 2.0 + smooth) / (all + smooth)
        });
        losses.reduced("dice", reduction)
    }
}
