//! Adafactor.

use slabwise_kernels::dtype::DType;

use super::{Optimizer, Schedule, Weight, at_least_zero};
use crate::trace::Trace;

/// Adafactor (Shazeer & Stern 2018), as PyTorch has it: the second moment of a matrix is kept as
/// the means of its rows and of its columns, so that the state of an `[n, m]` weight has n + m
/// numbers; Adam's has 2nm. With gradient g, weight w, rate η, step t = 1, 2, …, the root mean
/// square RMS:
///
/// ```text
/// δ = t^−0.8
/// r ← r + δ·(mean of g² over the last axis − r)            the state "adafactor.rows.<weight>"
/// c ← c + δ·(mean of g² over the last axis but one − c)    the state "adafactor.columns.<weight>"
/// v = r·c / max(mean of r, ε₁)
/// v ← v + δ·(g² − v)      for a weight of fewer than 2 axes, the state "adafactor.v.<weight>"
/// u = g/√max(v, ε₁²)
/// w ← w − η·λ·w − max(ε₂, RMS(w))·min(η, 1/√t) · u/max(1, RMS(u)/d)
/// ```
///
/// ```
/// # use slabwise::optim::{Adafactor, Optimizer};
/// let optimizer = Adafactor::new(1e-2).weight_decay(0.01);
/// # optimizer.check().unwrap();
/// ```
#[derive(Clone, Debug)]
pub struct Adafactor {
    rate: Schedule,
    exponent: f64,
    eps: [f64; 2],
    clip: f64,
    weight_decay: f64,
}

impl Adafactor {
    /// With ε₁ = 2⁻²³, ε₂ = 1e-3, d = 1 and λ = 0. The rate is relative to the size of the weights;
    /// 0.01 is usual.
    pub fn new(rate: impl Into<Schedule>) -> Self {
        Adafactor {
            rate: rate.into(),
            exponent: -0.8,
            eps: [f64::from(f32::EPSILON), 1e-3],
            clip: 1.0,
            weight_decay: 0.0,
        }
    }

    /// With this exponent of t in δ, at most 0.
    pub fn exponent(mut self, exponent: f64) -> Self {
        self.exponent = exponent;
        self
    }

    /// With these ε₁ and ε₂: the least size of √v and of a weight.
    pub fn eps(mut self, of_gradient: f64, of_weight: f64) -> Self {
        self.eps = [of_gradient, of_weight];
        self
    }

    /// With this d, at least 1.
    pub fn clip(mut self, clip: f64) -> Self {
        self.clip = clip;
        self
    }

    /// With this λ.
    pub fn weight_decay(mut self, weight_decay: f64) -> Self {
        self.weight_decay = weight_decay;
        self
    }
}

impl Optimizer for Adafactor {
    fn check(&self) -> Result<(), String> {
        self.rate
            .check()
            .map_err(|why| format!("adafactor: {why}"))?;
        let (exponent, clip) = (self.exponent, self.clip);
        if !(exponent.is_finite() && exponent <= 0.0) {
            return Err(format!(
                "adafactor: the exponent is {exponent}, not a finite number of at most 0"
            ));
        }
        if !(clip.is_finite() && clip >= 1.0) {
            return Err(format!(
                "adafactor: the clipping threshold is {clip}, not a finite number of at least 1"
            ));
        }
        at_least_zero("adafactor: ε₁", self.eps[0])?;
        at_least_zero("adafactor: ε₂", self.eps[1])?;
        at_least_zero("adafactor: the weight decay", self.weight_decay)
    }

    fn update<'t>(&self, trace: &'t Trace, weights: &[Weight<'t>]) {
        let rate = self.rate.rate(trace);
        let t = (trace.completed_steps() + 1).cast(DType::F32);
        let share = t.pow(self.exponent as f32);
        let [least_size, least_weight] = self.eps.map(|eps| eps as f32);
        for weight in weights {
            let (w, g) = (weight.value(), weight.gradient());
            let square = g.square();
            let toward = |state: crate::trace::State<'t>, new| {
                let next = state.value() + (new - state.value()) * share;
                state.set(next);
                next
            };
            let rank = w.rank();
            let v = if rank < 2 {
                toward(weight.state("adafactor.v"), square)
            } else {
                let rows = weight.state_along("adafactor.rows", rank - 1);
                let rows = toward(rows, square.mean_keep(rank - 1));
                let columns = weight.state_along("adafactor.columns", rank - 2);
                let columns = toward(columns, square.mean_keep(rank - 2));
                // Divided before the product is taken, on the rows alone.
                rows / rows.mean_keep(rank - 2).maximum(least_size) * columns
            };
            let u = g * v.maximum(least_size * least_size).rsqrt();
            let size = |x: crate::tensor::Tensor<'t>| x.square().mean().sqrt();
            let clipped = (size(u) / self.clip as f32).maximum(1.0);
            let rate = weight.scaled(rate);
            let step = size(w).maximum(least_weight) * rate.minimum(t.rsqrt()) / clipped;
            weight.set(weight.decayed_value(self.weight_decay, rate) - u * step);
        }
    }
}
