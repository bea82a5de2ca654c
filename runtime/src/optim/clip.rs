//! Clipping by the global norm.

use super::{Optimizer, Weight};
use crate::trace::Trace;

/// An optimizer on clipped gradients; see [`Optimizer::clip_norm`].
#[derive(Clone, Debug)]
pub struct ClipNorm<O> {
    inner: O,
    max: f64,
}

impl<O> ClipNorm<O> {
    pub(super) fn new(inner: O, max: f64) -> Self {
        ClipNorm { inner, max }
    }
}

impl<O: Optimizer> Optimizer for ClipNorm<O> {
    fn check(&self) -> Result<(), String> {
        if !(self.max.is_finite() && self.max > 0.0) {
            return Err(format!("clip_norm: the largest norm is {}, not a finite number above 0", self.max));
        }
        self.inner.check()
    }

    /// g ← g · min(max/(‖g‖ + 10⁻⁶), 1), the norm over the gradients of all weights, as in PyTorch.
    fn update<'t>(&self, trace: &'t Trace, weights: &[Weight<'t>]) {
        let squares = weights.iter().map(|w| w.gradient().square().sum());
        let Some(total) = squares.reduce(|a, b| a + b) else { return };
        let factor = (self.max as f32 / (total.sqrt() + 1e-6)).minimum(1.0);
        let clipped: Vec<Weight<'t>> = weights.iter().map(|w| w.with_gradient(w.gradient() * factor)).collect();
        self.inner.update(trace, &clipped);
    }
}
