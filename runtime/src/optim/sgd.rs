//! Stochastic gradient descent.

use super::{Optimizer, Schedule, Weight, at_least_zero};
use crate::trace::Trace;

/// Stochastic gradient descent, with momentum μ and weight decay λ if set. With gradient g, weight
/// w, rate η:
///
/// ```text
/// g ← g + λ·w
/// v ← μ·v + g            the state "sgd.momentum.<weight>", only with momentum
/// w ← w − η·v            w − η·(g + μ·v) with Nesterov's momentum, w − η·g without momentum
/// ```
///
/// Momentum in the form of Sutskever et al. (2013), with the rate outside of v, as PyTorch has it.
#[derive(Clone, Debug)]
pub struct Sgd {
    rate: Schedule,
    momentum: f64,
    nesterov: bool,
    weight_decay: f64,
}

impl Sgd {
    /// Plain gradient descent; it keeps no state.
    pub fn new(rate: impl Into<Schedule>) -> Self {
        Sgd {
            rate: rate.into(),
            momentum: 0.0,
            nesterov: false,
            weight_decay: 0.0,
        }
    }

    /// With momentum; 0.9 is usual.
    pub fn momentum(mut self, momentum: f64) -> Self {
        self.momentum = momentum;
        self
    }

    /// With Nesterov's form of momentum.
    pub fn nesterov(mut self) -> Self {
        self.nesterov = true;
        self
    }

    /// With λ times the weight added to its gradient.
    pub fn weight_decay(mut self, weight_decay: f64) -> Self {
        self.weight_decay = weight_decay;
        self
    }
}

impl Optimizer for Sgd {
    fn check(&self) -> Result<(), String> {
        self.rate.check().map_err(|why| format!("sgd: {why}"))?;
        at_least_zero("sgd: the momentum", self.momentum)?;
        at_least_zero("sgd: the weight decay", self.weight_decay)?;
        if self.nesterov && self.momentum == 0.0 {
            return Err("sgd: Nesterov's form needs a momentum".into());
        }
        Ok(())
    }

    fn is_elementwise(&self) -> bool {
        true
    }

    fn update<'t>(&self, trace: &'t Trace, weights: &[Weight<'t>]) {
        let rate = self.rate.rate(trace);
        for weight in weights {
            let (w, mut g) = (weight.value(), weight.gradient());
            let decay = weight.weight_decay().unwrap_or(self.weight_decay);
            if decay != 0.0 {
                g = g + w * decay as f32;
            }
            if self.momentum != 0.0 {
                let state = weight.state("sgd.momentum");
                let v = state.value() * self.momentum as f32 + g;
                state.set(v);
                g = if self.nesterov {
                    g + v * self.momentum as f32
                } else {
                    v
                };
            }
            weight.set(w - g * weight.scaled(rate));
        }
    }
}
