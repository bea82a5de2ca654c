//! Normalisation over the elements of one example; no state is kept between steps.

use super::Module;
use crate::params::{Init, Param, Scope};
use crate::tensor::Tensor;

/// The tensor, if its last axes are as long as those of a weight, and these axes.
#[track_caller]
fn last_axes<'t>(x: Tensor<'t>, what: &str, lengths: &[usize]) -> (Tensor<'t>, Vec<usize>) {
    let first = x.rank().saturating_sub(lengths.len());
    let axes: Vec<usize> = (first..first + lengths.len()).collect();
    let fits = |x: Tensor<'t>, (&axis, &len)| x.require_len(what, axis, len);
    (axes.iter().zip(lengths).fold(x, fits), axes)
}

/// (x − mean)/√(variance + ε)·weight + bias over the last axis or axes (Ba, Kiros & Hinton 2016):
/// `[…, n] → […, n]`. Weight and bias have the lengths of these axes.
#[derive(Clone, Debug)]
pub struct LayerNorm {
    at: Scope,
    eps: f32,
    lengths: Vec<usize>,
    weight: Option<Param>,
    bias: Option<Param>,
}

impl LayerNorm {
    /// Declares `weight`, initially ones, and `bias`, initially zeros. ε is 10⁻⁵.
    #[track_caller]
    pub fn new(at: Scope, n: usize) -> Self {
        LayerNorm::over(at, &[n])
    }

    /// Normalizes over as many last axes as there are lengths. Declares `weight`, initially ones,
    /// and `bias`, initially zeros. ε is 10⁻⁵.
    #[track_caller]
    pub fn over(at: Scope, lengths: &[usize]) -> Self {
        let bias = Some(at.param("bias", lengths, Init::Constant(0.0)));
        LayerNorm {
            bias,
            ..LayerNorm::with_weight(at, lengths)
        }
    }

    /// Declares `weight` only.
    #[track_caller]
    pub fn without_bias(at: Scope, n: usize) -> Self {
        LayerNorm::with_weight(at, &[n])
    }

    #[track_caller]
    fn with_weight(at: Scope, lengths: &[usize]) -> Self {
        LayerNorm {
            eps: 1e-5,
            lengths: lengths.to_vec(),
            weight: Some(at.param("weight", lengths, Init::Constant(1.0))),
            bias: None,
            at,
        }
    }

    /// Without weight and bias.
    pub fn without_affine(mut self) -> Self {
        let declared = self.weight.take().into_iter().chain(self.bias.take());
        declared.for_each(|param| self.at.retract(&param));
        self
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
        let (x, axes) = last_axes(x, "layer norm", &self.lengths);
        let y = x.normalize(axes.as_slice(), self.eps);
        let y = match &self.weight {
            Some(weight) => y * weight,
            None => y,
        };
        match &self.bias {
            Some(bias) => y + bias,
            None => y,
        }
    }

    fn path(&self) -> &str {
        self.weight.as_ref().map_or("", |weight| weight.layer())
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
    /// Declares `weight`, initially ones. ε is 10⁻⁶.
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
        let (x, last) = last_axes(x, "rms norm", &self.weight.dims());
        x * x
            .square()
            .mean_keep(last.as_slice())
            .inverse_deviation(self.eps)
            * &self.weight
    }

    fn path(&self) -> &str {
        self.weight.layer()
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
    /// Declares `weight`, initially ones, and `bias`, initially zeros. ε is 10⁻⁵. The groups are of
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
        let [weight, bias] = [&self.weight, &self.bias].map(|p| per_channel(p, x));
        y * weight + bias
    }

    fn path(&self) -> &str {
        self.weight.layer()
    }
}

/// A parameter `[channels]` as one number per channel of `x`, repeated over the places.
#[track_caller]
pub(super) fn per_channel<'t>(param: &Param, x: Tensor<'t>) -> Tensor<'t> {
    let lengths: Vec<usize> = [param.dims()[0]]
        .into_iter()
        .chain(std::iter::repeat_n(1, x.rank().saturating_sub(2)))
        .collect();
    x.trace().param(param).reshape(lengths.as_slice())
}

/// (x − mean)/√(variance + ε), mean and variance over the places of each channel of each example
/// (Ulyanov, Vedaldi & Lempitsky 2016): `[n, channels, …] → [n, channels, …]`.
#[derive(Clone, Debug)]
pub struct InstanceNorm {
    at: Scope,
    channels: usize,
    eps: f32,
    affine: Option<[Param; 2]>,
}

impl InstanceNorm {
    /// Declares nothing. ε is 10⁻⁵.
    pub fn new(at: Scope, channels: usize) -> Self {
        InstanceNorm {
            at,
            channels,
            eps: 1e-5,
            affine: None,
        }
    }

    /// With `weight` `[channels]`, initially ones, and `bias` `[channels]`, initially zeros.
    #[track_caller]
    pub fn affine(mut self) -> Self {
        self.affine = Some([
            self.at
                .param("weight", (self.channels,), Init::Constant(1.0)),
            self.at.param("bias", (self.channels,), Init::Constant(0.0)),
        ]);
        self
    }

    /// With this ε.
    pub fn eps(mut self, eps: f32) -> Self {
        self.eps = eps;
        self
    }
}

impl Module for InstanceNorm {
    #[track_caller]
    fn forward<'t>(&self, x: Tensor<'t>) -> Tensor<'t> {
        let x = x.require_len("instance norm", 1, self.channels);
        let y = x.group_normalize(self.channels, self.eps);
        match &self.affine {
            Some([weight, bias]) => y * per_channel(weight, x) + per_channel(bias, x),
            None => y,
        }
    }

    fn path(&self) -> &str {
        self.at.path()
    }
}

/// Local response normalization; see [`Tensor::local_response_norm`].
#[derive(Clone, Copy, Debug)]
pub struct LocalResponseNorm {
    size: usize,
    alpha: f32,
    beta: f32,
    k: f32,
}

impl LocalResponseNorm {
    /// Over this number of neighbouring channels, with α = 10⁻⁴, β = ¾ and k = 1.
    pub fn new(size: usize) -> Self {
        LocalResponseNorm {
            size,
            alpha: 1e-4,
            beta: 0.75,
            k: 1.0,
        }
    }

    /// With this factor of the mean square.
    pub fn alpha(mut self, alpha: f32) -> Self {
        self.alpha = alpha;
        self
    }

    /// With this exponent.
    pub fn beta(mut self, beta: f32) -> Self {
        self.beta = beta;
        self
    }

    /// With this number added to the mean square.
    pub fn k(mut self, k: f32) -> Self {
        self.k = k;
        self
    }
}

impl Module for LocalResponseNorm {
    #[track_caller]
    fn forward<'t>(&self, x: Tensor<'t>) -> Tensor<'t> {
        x.local_response_norm(self.size, self.alpha, self.beta, self.k)
    }
}
