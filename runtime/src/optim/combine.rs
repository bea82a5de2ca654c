//! Optimizers made of others: ascent, and another optimizer for some of the weights.

use super::{Optimizer, Weight};
use crate::graph::VariableInfo;
use crate::trace::{Trace, names};

/// An optimizer that increases the loss; see [`Optimizer::maximize`].
#[derive(Clone, Debug)]
pub struct Maximize<O>(pub(super) O);

impl<O: Optimizer> Optimizer for Maximize<O> {
    fn check(&self) -> Result<(), String> {
        self.0.check()
    }

    fn is_elementwise(&self) -> bool {
        self.0.is_elementwise()
    }

    fn update<'t>(&self, trace: &'t Trace, weights: &[Weight<'t>]) {
        let weights: Vec<Weight<'t>> = weights
            .iter()
            .map(|w| w.with_gradient(-w.gradient()))
            .collect();
        self.0.update(trace, &weights);
    }
}

/// An optimizer with another one for some of the weights; see [`Optimizer::using`].
#[derive(Clone, Debug)]
pub struct Using<O, F, P> {
    pub(super) inner: O,
    pub(super) chosen: F,
    pub(super) other: P,
}

impl<O: Optimizer, F: Fn(&VariableInfo) -> bool, P: Optimizer> Optimizer for Using<O, F, P> {
    fn check(&self) -> Result<(), String> {
        self.inner.check()?;
        self.other.check()
    }

    fn is_elementwise(&self) -> bool {
        self.inner.is_elementwise() && self.other.is_elementwise()
    }

    fn update<'t>(&self, trace: &'t Trace, weights: &[Weight<'t>]) {
        let infos: Vec<VariableInfo> = weights.iter().map(|w| trace.info(w.variable)).collect();
        let of = |other: bool| -> Vec<Weight<'t>> {
            weights
                .iter()
                .zip(&infos)
                .filter(|(_, info)| (self.chosen)(info) == other)
                .map(|(weight, _)| *weight)
                .collect()
        };
        let others = of(true);
        if others.is_empty() {
            let known = names(infos.iter());
            return trace.fail_update(format!(
                "using: none of the parameters that learn is chosen; they are {known}"
            ));
        }
        self.other.update(trace, &others);
        let rest = of(false);
        if !rest.is_empty() {
            self.inner.update(trace, &rest);
        }
    }
}
