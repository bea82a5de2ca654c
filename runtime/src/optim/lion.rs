//! Lion and LAMB: steps whose size does not depend on that of the gradient.

use slabwise_kernels::dtype::DType;

use super::{Optimizer, Schedule, Weight, at_least_zero, below_one, correction};
use crate::trace::Trace;

/// Lion (Chen et al. 2023): the sign of an average. It has one state, half of those of Adam; rates
/// are three to ten times smaller than Adam's. With gradient g, weight w, rate η:
///
/// ```text
/// w ← w − η·(sign(β₁·m + (1 − β₁)·g) + λ·w)
/// m ← β₂·m + (1 − β₂)·g                        the state "lion.m.<weight>"
/// ```
#[derive(Clone, Debug)]
pub struct Lion {
    rate: Schedule,
    betas: [f64; 2],
    weight_decay: f64,
}

impl Lion {
    /// With β = 0.9, 0.99 and λ = 0.
    pub fn new(rate: impl Into<Schedule>) -> Self {
        Lion {
            rate: rate.into(),
            betas: [0.9, 0.99],
            weight_decay: 0.0,
        }
    }

    /// With these weights of the average in a step, and in the next average.
    pub fn betas(mut self, first: f64, second: f64) -> Self {
        self.betas = [first, second];
        self
    }

    /// With this λ.
    pub fn weight_decay(mut self, weight_decay: f64) -> Self {
        self.weight_decay = weight_decay;
        self
    }
}

impl Optimizer for Lion {
    fn check(&self) -> Result<(), String> {
        self.rate.check().map_err(|why| format!("lion: {why}"))?;
        below_one("lion: β₁", self.betas[0])?;
        below_one("lion: β₂", self.betas[1])?;
        at_least_zero("lion: the weight decay", self.weight_decay)
    }

    fn is_elementwise(&self) -> bool {
        true
    }

    fn update<'t>(&self, trace: &'t Trace, weights: &[Weight<'t>]) {
        let rate = self.rate.rate(trace);
        for weight in weights {
            let rate = weight.scaled(rate);
            let (g, before) = (weight.gradient(), weight.state("lion.m").value());
            let beta = self.betas[0];
            let direction = before * beta as f32 + g * (1.0 - beta) as f32;
            weight.average("lion.m", self.betas[1], g);
            let w = weight.decayed_value(self.weight_decay, rate);
            weight.set(w - direction.sign() * rate);
        }
    }
}

/// LAMB (You et al. 2020): steps of Adam, scaled to the norm of each weight, for large batches. With
/// gradient g, weight w, rate η, step t = 1, 2, …:
///
/// ```text
/// m ← β₁·m + (1 − β₁)·g                                  the state "lamb.m.<weight>"
/// v ← β₂·v + (1 − β₂)·g²                                 the state "lamb.v.<weight>"
/// u = m/(1 − β₁ᵗ) / (√(v/(1 − β₂ᵗ)) + ε) + λ·w
/// w ← w − η·‖w‖/‖u‖·u                                    w − η·u where a norm is 0
/// ```
#[derive(Clone, Debug)]
pub struct Lamb {
    rate: Schedule,
    betas: [f64; 2],
    eps: f64,
    weight_decay: f64,
}

impl Lamb {
    /// With β = 0.9, 0.999, ε = 1e-6 and λ = 0.01.
    pub fn new(rate: impl Into<Schedule>) -> Self {
        Lamb {
            rate: rate.into(),
            betas: [0.9, 0.999],
            eps: 1e-6,
            weight_decay: 0.01,
        }
    }

    /// With these decay rates of the two averages.
    pub fn betas(mut self, first: f64, second: f64) -> Self {
        self.betas = [first, second];
        self
    }

    /// With this ε.
    pub fn eps(mut self, eps: f64) -> Self {
        self.eps = eps;
        self
    }

    /// With this λ.
    pub fn weight_decay(mut self, weight_decay: f64) -> Self {
        self.weight_decay = weight_decay;
        self
    }
}

impl Optimizer for Lamb {
    fn check(&self) -> Result<(), String> {
        self.rate.check().map_err(|why| format!("lamb: {why}"))?;
        below_one("lamb: β₁", self.betas[0])?;
        below_one("lamb: β₂", self.betas[1])?;
        at_least_zero("lamb: ε", self.eps)?;
        at_least_zero("lamb: the weight decay", self.weight_decay)
    }

    fn update<'t>(&self, trace: &'t Trace, weights: &[Weight<'t>]) {
        let rate = self.rate.rate(trace);
        let t = (trace.completed_steps() + 1).cast(DType::F32);
        let [first, second] = self.betas.map(|beta| correction(t, beta));
        let root = second.sqrt();
        for weight in weights {
            let (w, g) = (weight.value(), weight.gradient());
            let m = weight.average("lamb.m", self.betas[0], g);
            let v = weight.average("lamb.v", self.betas[1], g.square());
            let mut change = m / first / (v.sqrt() / root + self.eps as f32);
            let decay = weight.weight_decay().unwrap_or(self.weight_decay);
            if decay != 0.0 {
                change = change + w * decay as f32;
            }
            let [of_weight, of_change] = [w, change].map(|x| x.square().sum().sqrt());
            let both = of_weight.gt(0.0).and(of_change.gt(0.0));
            let trust = both.select(of_weight / of_change, 1.0);
            weight.set(w - change * (trust * weight.scaled(rate)));
        }
    }
}
