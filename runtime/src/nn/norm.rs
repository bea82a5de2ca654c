//! Normalisation over the elements of one example; no state is kept between steps.

use super::Module;
use crate::params::{Init, Param, Scope};
use crate::tensor::Tensor;

/// The tensor, if its last axis is as long as the weight, and that axis.
#[track_caller]
fn last_axis<'t>(x: Tensor<'t>, what: &str, weight: &Param) -> (Tensor<'t>, usize) {
    let last = x.rank().saturating_sub(1);
    (x.require_len(what, last, weight.dims()[0]), last)
}

/// (x − mean)/√(variance + ε)·weight + bias over the last axis (Ba, Kiros & Hinton 2016): `[…, n] →
/// […, n]`. Weight and bias `[n]`.
#[derive(Clone, Debug)]
pub struct LayerNorm {
    eps: f32,
    weight: Param,
    bias: Option<Param>,
}

impl LayerNorm {
    /// Declares `weight`, ones at first, and `bias`, zeros at first. ε is 10⁻⁵.
    #[track_caller]
    pub fn new(at: Scope, n: usize) -> Self {
        let bias = Some(at.param("bias", (n,), Init::Constant(0.0)));
        LayerNorm {
            bias,
            ..LayerNorm::without_bias(at, n)
        }
    }

    /// Declares `weight` only.
    #[track_caller]
    pub fn without_bias(at: Scope, n: usize) -> Self {
        LayerNorm {
            eps: 1e-5,
            weight: at.param("weight", (n,), Init::Constant(1.0)),
            bias: None,
        }
    }

    /// With this ε.
    pub fn eps(mut self, eps: f32) -> Self {
        self.eps = eps;
        self
    }
}

impl Module for LayerNorm {
    #[track_caller]
    fn forward<'t>(&self, x: Tensor<'t>) -> Tensor<'t> {
        let (x, last) = last_axis(x, "layer norm", &self.weight);
        let y = x.normalize(last, self.eps) * &self.weight;
        match &self.bias {
            Some(bias) => y + bias,
            None => y,
        }
    }
}

/// x/√(mean of x² + ε)·weight over the last axis (Zhang & Sennrich 2019): `[…, n] → […, n]`. Weight
/// `[n]`.
#[derive(Clone, Debug)]
pub struct RmsNorm {
    eps: f32,
    weight: Param,
}

impl RmsNorm {
    /// Declares `weight`, ones at first. ε is 10⁻⁶.
    #[track_caller]
    pub fn new(at: Scope, n: usize) -> Self {
        RmsNorm {
            eps: 1e-6,
            weight: at.param("weight", (n,), Init::Constant(1.0)),
        }
    }

    /// With this ε.
    pub fn eps(mut self, eps: f32) -> Self {
        self.eps = eps;
        self
    }
}

impl Module for RmsNorm {
    #[track_caller]
    fn forward<'t>(&self, x: Tensor<'t>) -> Tensor<'t> {
        let (x, last) = last_axis(x, "rms norm", &self.weight);
        x * x.square().mean_keep(last).inverse_deviation(self.eps) * &self.weight
    }
}

/// (x − mean)/√(variance + ε)·weight + bias, mean and variance over the places and channels of a
/// group (Wu & He 2018): `[n, channels, …] → [n, channels, …]`. Weight and bias `[channels]`.
#[derive(Clone, Debug)]
pub struct GroupNorm {
    groups: usize,
    channels: usize,
    eps: f32,
    weight: Param,
    bias: Param,
}

impl GroupNorm {
    /// Declares `weight`, ones at first, and `bias`, zeros at first. ε is 10⁻⁵. The groups are of
    /// equal size.
    #[track_caller]
    pub fn new(at: Scope, groups: usize, channels: usize) -> Self {
        if groups == 0 || !channels.is_multiple_of(groups) {
            at.mistake(format!(
                "group norm: {channels} channels do not divide into {groups} groups"
            ));
        }
        let weight = at.param("weight", (channels,), Init::Constant(1.0));
        let bias = at.param("bias", (channels,), Init::Constant(0.0));
        GroupNorm {
            groups: groups.max(1),
            channels,
            eps: 1e-5,
            weight,
            bias,
        }
    }

    /// With this ε.
    pub fn eps(mut self, eps: f32) -> Self {
        self.eps = eps;
        self
    }
}

impl Module for GroupNorm {
    #[track_caller]
    fn forward<'t>(&self, x: Tensor<'t>) -> Tensor<'t> {
        let x = x.require_len("group norm", 1, self.channels);
        let y = x.group_normalize(self.groups, self.eps);
        // One weight per channel, repeated over the places.
        let lengths: Vec<usize> = [self.channels]
            .into_iter()
            .chain(std::iter::repeat_n(1, x.rank().saturating_sub(2)))
            .collect();
        let [weight, bias] =
            [&self.weight, &self.bias].map(|p| x.trace().param(p).reshape(lengths.as_slice()));
        y * weight + bias
    }
}
