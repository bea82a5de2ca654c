//! Clipping of gradients: of all together by their norm, of each number by its size.

use super::{Optimizer, Weight};
use crate::tensor::Tensor;
use crate::trace::Trace;

/// An optimizer on gradients clipped by their global norm; see [`Optimizer::clip_norm`].
#[derive(Clone, Debug)]
pub struct ClipNorm<O> {
    inner: O,
    max: f64,
}

/// An optimizer on gradients clipped by value; see [`Optimizer::clip_value`].
#[derive(Clone, Debug)]
pub struct ClipValue<O> {
    inner: O,
    max: f64,
}

impl<O> ClipNorm<O> {
    pub(super) fn new(inner: O, max: f64) -> Self {
        ClipNorm { inner, max }
    }
}

impl<O> ClipValue<O> {
    pub(super) fn new(inner: O, max: f64) -> Self {
        ClipValue { inner, max }
    }
}

/// A clipping bound: a finite number above 0.
fn above_zero(what: &str, max: f64) -> Result<(), String> {
    if max.is_finite() && max > 0.0 {
        Ok(())
    } else {
        Err(format!("{what} is {max}, not a finite number above 0"))
    }
}

/// The same weights with other gradients.
fn clipped<'t>(weights: &[Weight<'t>], rule: impl Fn(Tensor<'t>) -> Tensor<'t>) -> Vec<Weight<'t>> {
    weights
        .iter()
        .map(|w| w.with_gradient(rule(w.gradient())))
        .collect()
}

impl<O: Optimizer> Optimizer for ClipNorm<O> {
    fn check(&self) -> Result<(), String> {
        above_zero("clip_norm: the largest norm", self.max)?;
        self.inner.check()
    }

    /// g ← g · min(max/(‖g‖ + 10⁻⁶), 1), the norm over the gradients of all weights, as in PyTorch.
    fn update<'t>(&self, trace: &'t Trace, weights: &[Weight<'t>]) {
        let squares = weights.iter().map(|w| w.gradient().square().sum());
        let Some(total) = squares.reduce(|a, b| a + b) else {
            return;
        };
        let factor = (self.max as f32 / (total.sqrt() + 1e-6)).minimum(1.0);
        self.inner.update(trace, &clipped(weights, |g| g * factor));
    }
}

impl<O: Optimizer> Optimizer for ClipValue<O> {
    fn check(&self) -> Result<(), String> {
        above_zero("clip_value: the largest size", self.max)?;
        self.inner.check()
    }

    fn is_elementwise(&self) -> bool {
        self.inner.is_elementwise()
    }

    /// Each number of g ← that number, or the nearest in ±max.
    fn update<'t>(&self, trace: &'t Trace, weights: &[Weight<'t>]) {
        let max = self.max as f32;
        self.inner
            .update(trace, &clipped(weights, |g| g.clamp(-max, max)));
    }
}
