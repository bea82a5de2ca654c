//! RMSprop.

use super::{Optimizer, Schedule, Weight, at_least_zero, below_one};
use crate::trace::Trace;

/// RMSprop (Tieleman & Hinton 2012). With gradient g, weight w, rate η, decay rate α:
///
/// ```text
/// g ← g + λ·w
/// v ← α·v + (1 − α)·g²        the state "rmsprop.v.<weight>"
/// a ← α·a + (1 − α)·g         the state "rmsprop.mean.<weight>", only if centered
/// s = √v + ε                  √(v − a²) + ε if centered (Graves 2013)
/// b ← μ·b + g/s               the state "rmsprop.momentum.<weight>", only with momentum
/// w ← w − η·b                 w − η·g/s without momentum
/// ```
///
/// ```
/// # use slabwise::optim::{Optimizer, RmsProp};
/// let optimizer = RmsProp::new(1e-3).momentum(0.9).centered();
/// # optimizer.check().unwrap();
/// ```
#[derive(Clone, Debug)]
pub struct RmsProp {
    rate: Schedule,
    alpha: f64,
    eps: f64,
    weight_decay: f64,
    momentum: f64,
    centered: bool,
}

impl RmsProp {
    /// With α = 0.99 and ε = 1e-8.
    pub fn new(rate: impl Into<Schedule>) -> Self {
        RmsProp {
            rate: rate.into(),
            alpha: 0.99,
            eps: 1e-8,
            weight_decay: 0.0,
            momentum: 0.0,
            centered: false,
        }
    }

    /// With this decay rate of the average of squares.
    pub fn alpha(mut self, alpha: f64) -> Self {
        self.alpha = alpha;
        self
    }

    /// With this ε.
    pub fn eps(mut self, eps: f64) -> Self {
        self.eps = eps;
        self
    }

    /// With λ times the weight added to its gradient.
    pub fn weight_decay(mut self, weight_decay: f64) -> Self {
        self.weight_decay = weight_decay;
        self
    }

    /// With momentum.
    pub fn momentum(mut self, momentum: f64) -> Self {
        self.momentum = momentum;
        self
    }

    /// With the variance of the gradient in place of its mean square.
    pub fn centered(mut self) -> Self {
        self.centered = true;
        self
    }
}

impl Optimizer for RmsProp {
    fn check(&self) -> Result<(), String> {
        self.rate.check().map_err(|why| format!("rmsprop: {why}"))?;
        below_one("rmsprop: α", self.alpha)?;
        at_least_zero("rmsprop: ε", self.eps)?;
        at_least_zero("rmsprop: the weight decay", self.weight_decay)?;
        at_least_zero("rmsprop: the momentum", self.momentum)
    }

    fn is_elementwise(&self) -> bool {
        true
    }

    fn update<'t>(&self, trace: &'t Trace, weights: &[Weight<'t>]) {
        let rate = self.rate.rate(trace);
        for weight in weights {
            let g = weight.decayed_gradient(self.weight_decay);
            let v = weight.average("rmsprop.v", self.alpha, g.square());
            let square = if self.centered {
                let mean = weight.average("rmsprop.mean", self.alpha, g);
                // Rounding may leave less than nothing of a constant gradient.
                (v - mean.square()).maximum(0.0)
            } else {
                v
            };
            let mut change = g / (square.sqrt() + self.eps as f32);
            if self.momentum != 0.0 {
                let state = weight.state("rmsprop.momentum");
                change = state.value() * self.momentum as f32 + change;
                state.set(change);
            }
            weight.set(weight.value() - change * weight.scaled(rate));
        }
    }
}
