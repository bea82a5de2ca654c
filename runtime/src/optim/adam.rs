//! Adam and AdamW.

use slabwise_kernels::dtype::DType;

use super::{Optimizer, Schedule, Weight, at_least_zero, below_one, correction};
use crate::tensor::Tensor;
use crate::trace::Trace;

/// Adam (Kingma & Ba 2015). With gradient g, weight w, rate η, step t = 1, 2, …:
///
/// ```text
/// m ← β₁·m + (1 − β₁)·g        the state "adam.m.<weight>"
/// v ← β₂·v + (1 − β₂)·g²       the state "adam.v.<weight>"
/// w ← w − η·c/(1 − β₁ᵗ) · m / (√v + c·ε),   c = √(1 − β₂ᵗ)
/// ```
///
/// ε stands outside of the root, as in PyTorch, which divides √v by c: the same except for
/// rounding, and here a weight needs one division less.
#[derive(Clone, Debug)]
pub struct Adam(Moments);

/// Adam with decoupled weight decay (Loshchilov & Hutter 2019): like [`Adam`], but first w ← w −
/// η·λ·w. Its states are `adamw.m.<weight>` and `adamw.v.<weight>`.
#[derive(Clone, Debug)]
pub struct AdamW(Moments);

#[derive(Clone, Debug)]
struct Moments {
    name: &'static str,
    rate: Schedule,
    betas: [f64; 2],
    eps: f64,
    /// `None` for an optimizer without decay.
    weight_decay: Option<f64>,
    amsgrad: bool,
}

impl Adam {
    /// With β = 0.9, 0.999 and ε = 1e-8.
    pub fn new(rate: impl Into<Schedule>) -> Self {
        Adam(Moments {
            name: "adam",
            rate: rate.into(),
            betas: [0.9, 0.999],
            eps: 1e-8,
            weight_decay: None,
            amsgrad: false,
        })
    }
}

impl AdamW {
    /// With β = 0.9, 0.999, ε = 1e-8 and λ = 0.01.
    pub fn new(rate: impl Into<Schedule>) -> Self {
        AdamW(Moments {
            name: "adamw",
            rate: rate.into(),
            betas: [0.9, 0.999],
            eps: 1e-8,
            weight_decay: Some(0.01),
            amsgrad: false,
        })
    }

    /// With this λ.
    pub fn weight_decay(mut self, weight_decay: f64) -> Self {
        self.0.weight_decay = Some(weight_decay);
        self
    }
}

macro_rules! moments {
    ($($name:ident),*) => {$(
        impl $name {
            /// With these decay rates of the two averages.
            pub fn betas(mut self, first: f64, second: f64) -> Self {
                self.0.betas = [first, second];
                self
            }

            /// With this ε.
            pub fn eps(mut self, eps: f64) -> Self {
                self.0.eps = eps;
                self
            }

            /// With the largest v so far in place of v (Reddi, Kale & Kumar 2018), a third state
            /// `largest` beside `m` and `v`.
            pub fn amsgrad(mut self) -> Self {
                self.0.amsgrad = true;
                self
            }
        }

        impl Optimizer for $name {
            fn check(&self) -> Result<(), String> {
                self.0.check()
            }

            fn is_elementwise(&self) -> bool {
                true
            }

            fn update<'t>(&self, trace: &'t Trace, weights: &[Weight<'t>]) {
                self.0.update(trace, weights);
            }
        }
    )*};
}
moments!(Adam, AdamW);

impl Moments {
    fn check(&self) -> Result<(), String> {
        let name = self.name;
        self.rate.check().map_err(|why| format!("{name}: {why}"))?;
        below_one(&format!("{name}: β₁"), self.betas[0])?;
        below_one(&format!("{name}: β₂"), self.betas[1])?;
        at_least_zero(&format!("{name}: ε"), self.eps)?;
        at_least_zero(
            &format!("{name}: the weight decay"),
            self.weight_decay.unwrap_or(0.0),
        )
    }

    fn update<'t>(&self, trace: &'t Trace, weights: &[Weight<'t>]) {
        let rate = self.rate.rate(trace);
        // Values that all weights share are computed once, on scalars.
        let t = (trace.completed_steps() + 1).cast(DType::F32);
        let [first, second] = self.betas.map(|beta| correction(t, beta));
        let root = second.sqrt();
        let eps = root * self.eps as f32;
        let usual = self.weight_decay.unwrap_or(0.0);
        let factors = |rate: Tensor<'t>, decay: f64| {
            (
                rate * root / first,
                (decay != 0.0).then(|| 1.0 - rate * decay as f32),
            )
        };
        let shared = factors(rate, usual);
        for weight in weights {
            let decay = weight.weight_decay().unwrap_or(usual);
            if self.weight_decay.is_none() && decay != 0.0 {
                return trace.fail_update(format!(
                    "{} has no weight decay, which a group sets; AdamW has",
                    self.name
                ));
            }
            let as_usual = (weight.rate_scale(), decay) == (1.0, usual);
            let (step, kept) = if as_usual {
                shared
            } else {
                factors(weight.scaled(rate), decay)
            };
            let (w, g) = (weight.value(), weight.gradient());
            let slot = |slot: &str| format!("{}.{slot}", self.name);
            let m = weight.average(&slot("m"), self.betas[0], g);
            let mut v = weight.average(&slot("v"), self.betas[1], g.square());
            if self.amsgrad {
                let largest = weight.state(&slot("largest"));
                v = largest.value().maximum(v);
                largest.set(v);
            }
            let change = m / (v.sqrt() + eps) * step;
            let w = kept.map_or(w, |kept| w * kept);
            weight.set(w - change);
        }
    }
}
