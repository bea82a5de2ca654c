//! Relatives of Adam: Adamax, NAdam, RAdam.

use slabwise_kernels::dtype::DType;

use super::{Optimizer, Schedule, Weight, at_least_zero, below_one, correction};
use crate::params::Init;
use crate::tensor::Tensor;
use crate::trace::Trace;

/// Adamax (Kingma & Ba 2015): [`Adam`](super::Adam) with the maximum norm. With gradient g, weight
/// w, rate η, step t = 1, 2, …:
///
/// ```text
/// g ← g + λ·w
/// m ← β₁·m + (1 − β₁)·g            the state "adamax.m.<weight>"
/// u ← max(β₂·u, |g| + ε)           the state "adamax.u.<weight>"
/// w ← w − η/(1 − β₁ᵗ) · m/u
/// ```
#[derive(Clone, Debug)]
pub struct Adamax(Rules);

/// Adam with Nesterov's momentum (Dozat 2016). With gradient g, weight w, rate η, step t = 1, 2, …:
///
/// ```text
/// g ← g + λ·w                      if decoupled, w ← w − η·λ·w instead
/// μₜ = β₁·(1 − ½·0.96^(t·ψ))
/// p ← p·μₜ                         the state "nadam.mu.<weight>", a scalar, 1 at first
/// m ← β₁·m + (1 − β₁)·g            the state "nadam.m.<weight>"
/// v ← β₂·v + (1 − β₂)·g²           the state "nadam.v.<weight>"
/// s = √(v/(1 − β₂ᵗ)) + ε
/// w ← w − η·(1 − μₜ)/(1 − p) · g/s − η·μₜ₊₁/(1 − p·μₜ₊₁) · m/s
/// ```
#[derive(Clone, Debug)]
pub struct NAdam {
    rules: Rules,
    momentum_decay: f64,
}

/// Rectified Adam (Liu et al. 2020). With gradient g, weight w, rate η, step t = 1, 2, …:
///
/// ```text
/// g ← g + λ·w                      if decoupled, w ← w − η·λ·w instead
/// m ← β₁·m + (1 − β₁)·g            the state "radam.m.<weight>"
/// v ← β₂·v + (1 − β₂)·g²           the state "radam.v.<weight>"
/// ρ∞ = 2/(1 − β₂) − 1
/// ρₜ = ρ∞ − 2t·β₂ᵗ/(1 − β₂ᵗ)
/// r = √((ρₜ − 4)(ρₜ − 2)ρ∞ / ((ρ∞ − 4)(ρ∞ − 2)ρₜ)) · √(1 − β₂ᵗ)/(√v + ε)   if ρₜ > 5, else 1
/// w ← w − η/(1 − β₁ᵗ) · m·r
/// ```
#[derive(Clone, Debug)]
pub struct RAdam(Rules);

/// The numbers that the three have in common.
#[derive(Clone, Debug)]
struct Rules {
    name: &'static str,
    rate: Schedule,
    betas: [f64; 2],
    eps: f64,
    weight_decay: f64,
    decoupled: bool,
}

impl Adamax {
    /// With β = 0.9, 0.999 and ε = 1e-8.
    pub fn new(rate: impl Into<Schedule>) -> Self {
        Adamax(Rules::new("adamax", rate.into()))
    }

    fn rules(&mut self) -> &mut Rules {
        &mut self.0
    }
}

impl NAdam {
    /// With β = 0.9, 0.999, ε = 1e-8 and ψ = 0.004.
    pub fn new(rate: impl Into<Schedule>) -> Self {
        NAdam {
            rules: Rules::new("nadam", rate.into()),
            momentum_decay: 4e-3,
        }
    }

    /// With this ψ.
    pub fn momentum_decay(mut self, momentum_decay: f64) -> Self {
        self.momentum_decay = momentum_decay;
        self
    }

    /// With weight decay as in [`AdamW`](super::AdamW), not added to the gradient.
    pub fn decoupled(mut self) -> Self {
        self.rules.decoupled = true;
        self
    }

    fn rules(&mut self) -> &mut Rules {
        &mut self.rules
    }
}

impl RAdam {
    /// With β = 0.9, 0.999 and ε = 1e-8.
    pub fn new(rate: impl Into<Schedule>) -> Self {
        RAdam(Rules::new("radam", rate.into()))
    }

    /// With weight decay as in [`AdamW`](super::AdamW), not added to the gradient.
    pub fn decoupled(mut self) -> Self {
        self.0.decoupled = true;
        self
    }

    fn rules(&mut self) -> &mut Rules {
        &mut self.0
    }
}

macro_rules! rules {
    ($($name:ident),*) => {$(
        impl $name {
            /// With these decay rates of the two averages.
            pub fn betas(mut self, first: f64, second: f64) -> Self {
                self.rules().betas = [first, second];
                self
            }

            /// With this ε.
            pub fn eps(mut self, eps: f64) -> Self {
                self.rules().eps = eps;
                self
            }

            /// With this λ.
            pub fn weight_decay(mut self, weight_decay: f64) -> Self {
                self.rules().weight_decay = weight_decay;
                self
            }
        }
    )*};
}
rules!(Adamax, NAdam, RAdam);

impl Rules {
    fn new(name: &'static str, rate: Schedule) -> Self {
        Rules {
            name,
            rate,
            betas: [0.9, 0.999],
            eps: 1e-8,
            weight_decay: 0.0,
            decoupled: false,
        }
    }

    fn check(&self) -> Result<(), String> {
        let name = self.name;
        self.rate.check().map_err(|why| format!("{name}: {why}"))?;
        below_one(&format!("{name}: β₁"), self.betas[0])?;
        below_one(&format!("{name}: β₂"), self.betas[1])?;
        at_least_zero(&format!("{name}: ε"), self.eps)?;
        at_least_zero(&format!("{name}: the weight decay"), self.weight_decay)
    }

    /// The weight and its gradient after weight decay.
    fn decayed<'t>(&self, weight: &Weight<'t>, rate: Tensor<'t>) -> [Tensor<'t>; 2] {
        if self.decoupled {
            let w = weight.decayed_value(self.weight_decay, rate);
            [w, weight.gradient()]
        } else {
            [weight.value(), weight.decayed_gradient(self.weight_decay)]
        }
    }

    fn slot(&self, slot: &str) -> String {
        format!("{}.{slot}", self.name)
    }
}

/// The number of this step from 1, f32.
fn step(trace: &Trace) -> Tensor<'_> {
    (trace.completed_steps() + 1).cast(DType::F32)
}

impl Optimizer for Adamax {
    fn check(&self) -> Result<(), String> {
        self.0.check()
    }

    fn is_elementwise(&self) -> bool {
        true
    }

    fn update<'t>(&self, trace: &'t Trace, weights: &[Weight<'t>]) {
        let rules = &self.0;
        let rate = rules.rate.rate(trace);
        let correction = correction(step(trace), rules.betas[0]);
        for weight in weights {
            let rate = weight.scaled(rate);
            let [w, g] = rules.decayed(weight, rate);
            let m = weight.average(&rules.slot("m"), rules.betas[0], g);
            let state = weight.state(&rules.slot("u"));
            let u = (state.value() * rules.betas[1] as f32).maximum(g.abs() + rules.eps as f32);
            state.set(u);
            weight.set(w - m / u * (rate / correction));
        }
    }
}

impl Optimizer for NAdam {
    fn check(&self) -> Result<(), String> {
        self.rules.check()?;
        at_least_zero("nadam: the decay of the momentum", self.momentum_decay)
    }

    fn is_elementwise(&self) -> bool {
        true
    }

    fn update<'t>(&self, trace: &'t Trace, weights: &[Weight<'t>]) {
        let rules = &self.rules;
        let [first, second] = rules.betas;
        let rate = rules.rate.rate(trace);
        let t = step(trace);
        let root = correction(t, second).sqrt();
        let momentum = |t: Tensor<'t>| {
            let left = (t * (self.momentum_decay * 0.96f64.ln()) as f32).exp();
            (1.0 - left * 0.5) * first as f32
        };
        let (mu, next) = (momentum(t), momentum(t + 1.0));
        for weight in weights {
            let rate = weight.scaled(rate);
            let [w, g] = rules.decayed(weight, rate);
            let state = weight.scalar_state(&rules.slot("mu"), Init::Constant(1.0));
            let product = state.value() * mu;
            state.set(product);
            let m = weight.average(&rules.slot("m"), first, g);
            let v = weight.average(&rules.slot("v"), second, g.square());
            let size = v.sqrt() / root + rules.eps as f32;
            let of_gradient = rate * (1.0 - mu) / (1.0 - product);
            let of_average = rate * next / (1.0 - product * next);
            weight.set(w - g / size * of_gradient - m / size * of_average);
        }
    }
}

impl Optimizer for RAdam {
    fn check(&self) -> Result<(), String> {
        self.0.check()
    }

    fn is_elementwise(&self) -> bool {
        true
    }

    fn update<'t>(&self, trace: &'t Trace, weights: &[Weight<'t>]) {
        let rules = &self.0;
        let [first, second] = rules.betas;
        let rate = rules.rate.rate(trace);
        let t = step(trace);
        let correction1 = correction(t, first);
        let longest = 2.0 / (1.0 - second) - 1.0;
        // The averaging never becomes long enough to be rectified if ρ∞ ≤ 5.
        let rectified = (longest > 5.0).then(|| {
            let length = averaged_length(t, second);
            let scale = longest / ((longest - 4.0) * (longest - 2.0));
            let root = ((length - 4.0) * (length - 2.0) / length * scale as f32).sqrt();
            (length.gt(5.0), root * correction(t, second).sqrt())
        });
        for weight in weights {
            let rate = weight.scaled(rate);
            let [w, g] = rules.decayed(weight, rate);
            let m = weight.average(&rules.slot("m"), first, g);
            let v = weight.average(&rules.slot("v"), second, g.square());
            let step = rate / correction1;
            let change = match rectified {
                Some((long, factor)) => {
                    m * long.select(factor / (v.sqrt() + rules.eps as f32), 1.0)
                }
                None => m,
            };
            weight.set(w - change * step);
        }
    }
}

/// ρₜ of [`RAdam`], the length of a simple average with the variance of the exponential one. For β
/// close to 1 it is a small difference of large numbers; with x = −ln β and y = t·x it equals
/// (ρ∞ − 2/x) + 2/x·(1 − y/(eʸ − 1)), where the first difference is taken in f64 and the second has
/// the series y/2 − y²/12 + y⁴/720 − … (Bernoulli numbers).
fn averaged_length(t: Tensor<'_>, beta: f64) -> Tensor<'_> {
    let x = -beta.ln();
    let y = t * x as f32;
    let square = y.square();
    let even = [1.0 / 12.0, -1.0 / 720.0, 1.0 / 30_240.0, -1.0 / 1_209_600.0];
    let series = even[..3]
        .iter()
        .rev()
        .fold(square * even[3], |sum, &term| (sum + term) * square);
    let near = y * 0.5 - series;
    let far = 1.0 - y / y.expm1();
    let part = y.lt(0.5).select(near, far);
    let offset = 2.0 / (1.0 - beta) - 1.0 - 2.0 / x;
    part * (2.0 / x) as f32 + offset as f32
}
