//! Averages of weights over the steps.

use super::{Optimizer, Weight, below_one};
use crate::trace::Trace;

/// An optimizer that averages the weights it makes; see [`Optimizer::ema`].
#[derive(Clone, Debug)]
pub struct Ema<O> {
    inner: O,
    decay: f64,
}

impl<O> Ema<O> {
    pub(super) fn new(inner: O, decay: f64) -> Self {
        Ema { inner, decay }
    }
}

impl<O: Optimizer> Optimizer for Ema<O> {
    fn check(&self) -> Result<(), String> {
        below_one("ema: the decay", self.decay)?;
        self.inner.check()
    }

    fn is_elementwise(&self) -> bool {
        self.inner.is_elementwise()
    }

    fn update<'t>(&self, trace: &'t Trace, weights: &[Weight<'t>]) {
        self.inner.update(trace, weights);
        weights
            .iter()
            .for_each(|w| trace.keep_average(w.variable, self.decay as f32));
    }
}
