//! How weights and states are stored: states in halves, and the rounding errors of weights.

use slabwise_kernels::dtype::DType;

use super::{Optimizer, Weight};
use crate::trace::Trace;

/// An optimizer whose states are stored in another type; see [`Optimizer::states_in`].
#[derive(Clone, Debug)]
pub struct StatesIn<O> {
    pub(super) inner: O,
    pub(super) dtype: DType,
}

/// An optimizer that keeps the rounding errors of weights; see [`Optimizer::master_weights`].
#[derive(Clone, Debug)]
pub struct MasterWeights<O>(pub(super) O);

impl<O: Optimizer> Optimizer for StatesIn<O> {
    fn check(&self) -> Result<(), String> {
        if !self.dtype.is_float() {
            return Err(format!(
                "states_in: states are f32, f16 or bf16, not {}",
                self.dtype
            ));
        }
        self.inner.check()
    }

    fn is_elementwise(&self) -> bool {
        self.inner.is_elementwise()
    }

    fn update<'t>(&self, trace: &'t Trace, weights: &[Weight<'t>]) {
        let stored = |w: &Weight<'t>| Weight {
            states: self.dtype,
            ..*w
        };
        let weights: Vec<Weight<'t>> = weights.iter().map(stored).collect();
        self.inner.update(trace, &weights);
    }
}

impl<O: Optimizer> Optimizer for MasterWeights<O> {
    fn check(&self) -> Result<(), String> {
        self.0.check()
    }

    fn is_elementwise(&self) -> bool {
        self.0.is_elementwise()
    }

    fn update<'t>(&self, trace: &'t Trace, weights: &[Weight<'t>]) {
        let whole = |w: &Weight<'t>| {
            if !trace.info(w.variable).dtype.is_half() {
                return *w;
            }
            let remainder = w.state("remainder");
            trace.mark_remainder(remainder, w.variable);
            Weight {
                value: w.value + remainder.value(),
                remainder: Some(remainder),
                ..*w
            }
        };
        let weights: Vec<Weight<'t>> = weights.iter().map(whole).collect();
        self.0.update(trace, &weights);
    }
}
