//! The fully connected layer.

use super::Module;
use crate::params::{Init, Param, Scope};
use crate::tensor::Tensor;

/// x·Wᵀ + b: `[…, inputs] → […, outputs]`. Weight `[outputs, inputs]`, bias `[outputs]`.
#[derive(Clone, Debug)]
pub struct Linear {
    weight: Param,
    bias: Option<Param>,
}

impl Linear {
    /// Declares `weight` and `bias`, both initially uniform in ±1/√inputs.
    #[track_caller]
    pub fn new(at: Scope, inputs: usize, outputs: usize) -> Self {
        let mut layer = Linear::without_bias(at.clone(), inputs, outputs);
        layer.bias = Some(at.param("bias", (outputs,), Init::kaiming_uniform(inputs)));
        layer
    }

    /// Declares `weight` only.
    #[track_caller]
    pub fn without_bias(at: Scope, inputs: usize, outputs: usize) -> Self {
        Linear {
            weight: at.param("weight", (outputs, inputs), Init::kaiming_uniform(inputs)),
            bias: None,
        }
    }

    /// The weight, `[outputs, inputs]`.
    pub fn weight(&self) -> &Param {
        &self.weight
    }

    /// The bias, `[outputs]`.
    pub fn bias(&self) -> Option<&Param> {
        self.bias.as_ref()
    }
}

impl Module for Linear {
    #[track_caller]
    fn forward<'t>(&self, x: Tensor<'t>) -> Tensor<'t> {
        let product = x.matmul(x.trace().param(&self.weight).t());
        match &self.bias {
            Some(bias) => product + bias,
            None => product,
        }
    }
}
