//! Adagrad and Adadelta: rates by the sum and by the average of squared gradients.

use slabwise_kernels::dtype::DType;

use super::{Optimizer, Schedule, Weight, at_least_zero, below_one};
use crate::params::Init;
use crate::trace::Trace;

/// Adagrad (Duchi, Hazan & Singer 2011). With gradient g, weight w, rate η, step t = 1, 2, …:
///
/// ```text
/// g ← g + λ·w
/// s ← s + g²                                the state "adagrad.sum.<weight>"
/// w ← w − η/(1 + (t − 1)·δ) · g/(√s + ε)
/// ```
#[derive(Clone, Debug)]
pub struct Adagrad {
    rate: Schedule,
    rate_decay: f64,
    first_sum: f64,
    eps: f64,
    weight_decay: f64,
}

impl Adagrad {
    /// With δ = 0, s = 0 at first and ε = 1e-10.
    pub fn new(rate: impl Into<Schedule>) -> Self {
        Adagrad {
            rate: rate.into(),
            rate_decay: 0.0,
            first_sum: 0.0,
            eps: 1e-10,
            weight_decay: 0.0,
        }
    }

    /// With this δ.
    pub fn rate_decay(mut self, rate_decay: f64) -> Self {
        self.rate_decay = rate_decay;
        self
    }

    /// With this sum of squares before the first step.
    pub fn first_sum(mut self, first_sum: f64) -> Self {
        self.first_sum = first_sum;
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
}

impl Optimizer for Adagrad {
    fn check(&self) -> Result<(), String> {
        self.rate.check().map_err(|why| format!("adagrad: {why}"))?;
        at_least_zero("adagrad: the decay of the rate", self.rate_decay)?;
        at_least_zero("adagrad: the first sum", self.first_sum)?;
        at_least_zero("adagrad: ε", self.eps)?;
        at_least_zero("adagrad: the weight decay", self.weight_decay)
    }

    fn is_elementwise(&self) -> bool {
        true
    }

    fn update<'t>(&self, trace: &'t Trace, weights: &[Weight<'t>]) {
        let mut rate = self.rate.rate(trace);
        if self.rate_decay != 0.0 {
            let done = trace.completed_steps().cast(DType::F32);
            rate = rate / (1.0 + done * self.rate_decay as f32);
        }
        let first = Init::Constant(self.first_sum as f32);
        for weight in weights {
            let g = weight.decayed_gradient(self.weight_decay);
            let state = weight.state_from("adagrad.sum", first);
            let sum = state.value() + g.square();
            state.set(sum);
            let change = g / (sum.sqrt() + self.eps as f32);
            weight.set(weight.value() - change * weight.scaled(rate));
        }
    }
}

/// Adadelta (Zeiler 2012). With gradient g, weight w, rate η, decay rate ρ:
///
/// ```text
/// g ← g + λ·w
/// v ← ρ·v + (1 − ρ)·g²             the state "adadelta.v.<weight>"
/// d = √(u + ε)/√(v + ε) · g
/// u ← ρ·u + (1 − ρ)·d²             the state "adadelta.change.<weight>"
/// w ← w − η·d
/// ```
#[derive(Clone, Debug)]
pub struct Adadelta {
    rate: Schedule,
    rho: f64,
    eps: f64,
    weight_decay: f64,
}

impl Adadelta {
    /// With ρ = 0.9 and ε = 1e-6. The paper's rate is 1.
    pub fn new(rate: impl Into<Schedule>) -> Self {
        Adadelta {
            rate: rate.into(),
            rho: 0.9,
            eps: 1e-6,
            weight_decay: 0.0,
        }
    }

    /// With this decay rate of the averages.
    pub fn rho(mut self, rho: f64) -> Self {
        self.rho = rho;
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
}

impl Optimizer for Adadelta {
    fn check(&self) -> Result<(), String> {
        self.rate
            .check()
            .map_err(|why| format!("adadelta: {why}"))?;
        below_one("adadelta: ρ", self.rho)?;
        at_least_zero("adadelta: ε", self.eps)?;
        at_least_zero("adadelta: the weight decay", self.weight_decay)
    }

    fn is_elementwise(&self) -> bool {
        true
    }

    fn update<'t>(&self, trace: &'t Trace, weights: &[Weight<'t>]) {
        let rate = self.rate.rate(trace);
        let eps = self.eps as f32;
        for weight in weights {
            let g = weight.decayed_gradient(self.weight_decay);
            let v = weight.average("adadelta.v", self.rho, g.square());
            let changes = weight.state("adadelta.change");
            let change = (changes.value() + eps).sqrt() / (v + eps).sqrt() * g;
            weight.average("adadelta.change", self.rho, change.square());
            weight.set(weight.value() - change * weight.scaled(rate));
        }
    }
}
