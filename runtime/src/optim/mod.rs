//! Optimizers: how gradients change weights. An update is part of the program like any other operation, so that a weight's
//! update runs as soon as its gradient exists, and the gradient's bytes end there.

mod adam;
mod clip;
mod schedule;
mod sgd;
#[cfg(test)]
mod tests;

pub use adam::{Adam, AdamW};
pub use clip::ClipNorm;
pub use schedule::Schedule;
pub use sgd::Sgd;

use std::panic::Location;

use crate::tensor::Tensor;
use crate::trace::{State, Trace};

/// A rule that changes weights by their gradients; see [`Trace::minimize`].
pub trait Optimizer {
    /// What is wrong with its numbers, if anything is.
    fn check(&self) -> Result<(), String>;

    /// Adds the update of every weight to the trace.
    fn update<'t>(&self, trace: &'t Trace, weights: &[Weight<'t>]);

    /// The same on gradients scaled down so that their norm, all of them taken as one vector, is at most `max` (Pascanu et
    /// al. 2013).
    fn clip_norm(self, max: f64) -> ClipNorm<Self>
    where
        Self: Sized,
    {
        ClipNorm::new(self, max)
    }
}

/// A weight as an optimizer sees it.
#[derive(Clone, Copy, Debug)]
pub struct Weight<'t> {
    variable: u32,
    value: Tensor<'t>,
    gradient: Tensor<'t>,
}

impl<'t> Weight<'t> {
    pub(crate) fn new(variable: u32, value: Tensor<'t>, gradient: Tensor<'t>) -> Self {
        Weight { variable, value, gradient }
    }

    pub(crate) fn variable(&self) -> u32 {
        self.variable
    }

    /// What it is when the step begins.
    pub fn value(&self) -> Tensor<'t> {
        self.value
    }

    /// The gradient of the loss, in the weight's shape.
    pub fn gradient(&self) -> Tensor<'t> {
        self.gradient
    }

    /// The same weight with another gradient.
    pub fn with_gradient(self, gradient: Tensor<'t>) -> Self {
        Weight { gradient, ..self }
    }

    /// A state that accompanies the weight: of its shape, zeros at first, named `slot.weight` as in `adam.m.head.bias`.
    #[track_caller]
    pub fn state(&self, slot: &str) -> State<'t> {
        let trace = self.value.trace();
        trace.beside_variable(Location::caller(), self.variable, slot)
    }

    /// Makes `value` what the weight is after the step.
    #[track_caller]
    pub fn set(&self, value: Tensor<'t>) {
        self.value.trace().assign(Location::caller(), self.variable, value);
    }
}

/// A number that must be finite and at least 0.
fn at_least_zero(what: &str, value: f64) -> Result<(), String> {
    if value.is_finite() && value >= 0.0 { Ok(()) } else { Err(format!("{what} is {value}, not a finite number of at least 0")) }
}

/// A decay rate: at least 0 and below 1.
fn below_one(what: &str, value: f64) -> Result<(), String> {
    if (0.0..1.0).contains(&value) { Ok(()) } else { Err(format!("{what} is {value}, not in 0..1")) }
}
