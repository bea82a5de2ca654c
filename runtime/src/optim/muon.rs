//! Muon.

use super::{Optimizer, Schedule, Weight, at_least_zero};
use crate::tensor::Tensor;
use crate::trace::Trace;

/// Muon (Jordan et al. 2024) for weights that are matrices: each step is made nearly orthogonal. With
/// gradient g, weight w `[n, m]`, rate η:
///
/// ```text
/// b ← μ·b + (1 − μ)·g                        the state "muon.momentum.<weight>"
/// x = (1 − μ)·g + μ·b                        Nesterov's form; b otherwise
/// x ← x/max(‖x‖, ε)
/// x ← a·x + (b·xxᵀ + c·(xxᵀ)²)·x             five times, on the side of the shorter axis
/// w ← w − η·λ·w − η·√max(1, n/m)·x
/// ```
///
/// Products are of f32; PyTorch takes bf16. Biases, norms, embeddings and the last layer
/// [use](Optimizer::using) another optimizer:
///
/// ```
/// # use slabwise::optim::{AdamW, Muon, Optimizer};
/// let optimizer = Muon::new(0.02)
///     .using(|w| w.rank() != 2 || w.name.starts_with("head."), AdamW::new(3e-4));
/// # optimizer.check().unwrap();
/// ```
#[derive(Clone, Debug)]
pub struct Muon {
    rate: Schedule,
    momentum: f64,
    nesterov: bool,
    weight_decay: f64,
    coefficients: [f64; 3],
    eps: f64,
    iterations: u32,
    match_adamw: bool,
}

impl Muon {
    /// With μ = 0.95 in Nesterov's form, λ = 0.1, five iterations with a, b, c = 3.4445, −4.775,
    /// 2.0315, and ε = 1e-7.
    pub fn new(rate: impl Into<Schedule>) -> Self {
        Muon {
            rate: rate.into(),
            momentum: 0.95,
            nesterov: true,
            weight_decay: 0.1,
            coefficients: [3.4445, -4.775, 2.0315],
            eps: 1e-7,
            iterations: 5,
            match_adamw: false,
        }
    }

    /// With this momentum.
    pub fn momentum(mut self, momentum: f64) -> Self {
        self.momentum = momentum;
        self
    }

    /// With plain momentum in place of Nesterov's.
    pub fn plain_momentum(mut self) -> Self {
        self.nesterov = false;
        self
    }

    /// With this λ.
    pub fn weight_decay(mut self, weight_decay: f64) -> Self {
        self.weight_decay = weight_decay;
        self
    }

    /// With this number of iterations of Newton and Schulz, at most 99.
    pub fn iterations(mut self, iterations: u32) -> Self {
        self.iterations = iterations;
        self
    }

    /// With 0.2·√max(n, m) in place of √max(1, n/m), which gives steps of the size of AdamW's, so
    /// that rates and decays of AdamW can be used (Liu et al. 2025).
    pub fn match_adamw(mut self) -> Self {
        self.match_adamw = true;
        self
    }

    /// The orthogonal factor of a matrix, nearly, by the iteration of Newton and Schulz.
    fn orthogonal<'t>(&self, x: Tensor<'t>, tall: bool) -> Tensor<'t> {
        let [a, b, c] = self.coefficients.map(|c| c as f32);
        let norm = x.square().sum().sqrt();
        let mut x = x / norm.maximum(self.eps as f32);
        if tall {
            x = x.t();
        }
        for _ in 0..self.iterations {
            let gram = x.matmul(x.t());
            let factor = gram * b + gram.matmul(gram) * c;
            x = x * a + factor.matmul(x);
        }
        if tall { x.t() } else { x }
    }
}

impl Optimizer for Muon {
    fn check(&self) -> Result<(), String> {
        self.rate.check().map_err(|why| format!("muon: {why}"))?;
        super::below_one("muon: the momentum", self.momentum)?;
        at_least_zero("muon: the weight decay", self.weight_decay)?;
        if self.iterations >= 100 {
            return Err(format!(
                "muon: {} iterations are more than 99",
                self.iterations
            ));
        }
        Ok(())
    }

    fn update<'t>(&self, trace: &'t Trace, weights: &[Weight<'t>]) {
        let rate = self.rate.rate(trace);
        let mu = self.momentum as f32;
        for weight in weights {
            let (w, g) = (weight.value(), weight.gradient());
            let (Some(rows), Some(columns), 2) = (w.len(0), w.len(1), w.rank()) else {
                let info = trace.info(weight.variable);
                return trace.fail_update(format!(
                    "muon changes matrices, and \"{}\" has {} axes; \
                     .using(|w| w.rank() != 2, AdamW::new(…)) gives the others to AdamW",
                    info.name,
                    w.rank()
                ));
            };
            let b = weight.average("muon.momentum", self.momentum, g);
            let x = if self.nesterov { g + (b - g) * mu } else { b };
            let x = self.orthogonal(x, rows > columns);
            let (n, m) = (rows as f64, columns as f64);
            let ratio = if self.match_adamw {
                0.2 * n.max(m).sqrt()
            } else {
                (n / m.max(1.0)).max(1.0).sqrt()
            };
            let rate = weight.scaled(rate);
            let w = weight.decayed_value(self.weight_decay, rate);
            weight.set(w - x * (rate * ratio as f32));
        }
    }
}
