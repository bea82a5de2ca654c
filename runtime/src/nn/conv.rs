//! The convolution layer.

use super::Module;
use crate::ops::ConvGeometry;
use crate::params::{Init, Param, Scope};
use crate::tensor::Tensor;

/// Convolution with bias: `[n, inputs, h, w] → [n, outputs, oh, ow]`. Weight `[outputs,
/// inputs/groups, k, k]`, bias `[outputs]`.
#[derive(Clone, Debug)]
pub struct Conv2d {
    at: Scope,
    inputs: usize,
    outputs: usize,
    k: usize,
    geometry: ConvGeometry,
    weight: Param,
    bias: Option<Param>,
}

impl Conv2d {
    /// Declares `weight` and `bias`, both uniform in ±1/√(inputs·k²) at first. Stride 1, no
    /// padding.
    #[track_caller]
    pub fn new(at: Scope, inputs: usize, outputs: usize, k: usize) -> Self {
        let (fan_in, dims) = weight(inputs, outputs, k);
        let weight = at.param("weight", dims, Init::kaiming_uniform(fan_in));
        let bias = Some(at.param("bias", (outputs,), Init::kaiming_uniform(fan_in)));
        Conv2d {
            at,
            inputs,
            outputs,
            k,
            geometry: ConvGeometry::default(),
            weight,
            bias,
        }
    }

    /// With so many zeros as padding on each side.
    pub fn padding(mut self, pad: usize) -> Self {
        self.geometry.pad = [pad, pad];
        self
    }

    /// With this distance between results.
    pub fn stride(mut self, stride: usize) -> Self {
        self.geometry.stride = [stride, stride];
        self
    }

    /// With this distance between kernel elements.
    pub fn dilation(mut self, dilation: usize) -> Self {
        self.geometry.dilation = [dilation, dilation];
        self
    }

    /// With channels in so many groups that do not mix: the weight becomes `[outputs,
    /// inputs/groups, k, k]`.
    #[track_caller]
    pub fn groups(mut self, groups: usize) -> Self {
        if groups == 0
            || !self.inputs.is_multiple_of(groups)
            || !self.outputs.is_multiple_of(groups)
        {
            self.at.mistake(format!(
                "conv2d: {} and {} channels do not divide into {groups} groups",
                self.inputs, self.outputs
            ));
            return self;
        }
        self.geometry.groups = groups;
        let (fan_in, dims) = weight(self.inputs / groups, self.outputs, self.k);
        self.weight = self
            .at
            .redeclare("weight", dims, Init::kaiming_uniform(fan_in));
        if self.bias.is_some() {
            self.bias = Some(self.at.redeclare(
                "bias",
                (self.outputs,),
                Init::kaiming_uniform(fan_in),
            ));
        }
        self
    }

    /// Without the bias.
    pub fn without_bias(mut self) -> Self {
        if let Some(bias) = self.bias.take() {
            self.at.retract(&bias);
        }
        self
    }

    /// The weight, `[outputs, inputs/groups, k, k]`.
    pub fn weight(&self) -> &Param {
        &self.weight
    }

    /// The bias, `[outputs]`.
    pub fn bias(&self) -> Option<&Param> {
        self.bias.as_ref()
    }
}

/// The number of inputs that each result sums over, and the weight's shape. Saturates: an absurd
/// size is refused where it is used.
fn weight(per_group: usize, outputs: usize, k: usize) -> (usize, [usize; 4]) {
    (
        per_group.saturating_mul(k).saturating_mul(k),
        [outputs, per_group, k, k],
    )
}

impl Module for Conv2d {
    #[track_caller]
    fn forward<'t>(&self, x: Tensor<'t>) -> Tensor<'t> {
        let result = x.conv2d_with(&self.weight, self.geometry);
        match &self.bias {
            Some(bias) => result + x.trace().param(bias).reshape((self.outputs, 1, 1)),
            None => result,
        }
    }
}

/// The transpose of a convolution, which enlarges images: `[n, inputs, h, w] → [n, outputs, (h −
/// 1)·stride + k, …]`. Weight `[inputs, outputs, k, k]`, bias `[outputs]`.
#[derive(Clone, Debug)]
pub struct ConvTranspose2d {
    geometry: ConvGeometry,
    weight: Param,
    bias: Param,
}

impl ConvTranspose2d {
    /// Declares `weight` and `bias`, both uniform in ±1/√(outputs·k²) at first. Stride 1, no
    /// padding.
    #[track_caller]
    pub fn new(at: Scope, inputs: usize, outputs: usize, k: usize) -> Self {
        let (fan_in, dims) = weight(outputs, inputs, k);
        let weight = at.param("weight", dims, Init::kaiming_uniform(fan_in));
        let bias = at.param("bias", (outputs,), Init::kaiming_uniform(fan_in));
        ConvTranspose2d {
            geometry: ConvGeometry::default(),
            weight,
            bias,
        }
    }

    /// With this distance between the positions that neighbours of the input write to.
    pub fn stride(mut self, stride: usize) -> Self {
        self.geometry.stride = [stride, stride];
        self
    }
}

impl Module for ConvTranspose2d {
    #[track_caller]
    fn forward<'t>(&self, x: Tensor<'t>) -> Tensor<'t> {
        let bias = x.trace().param(&self.bias);
        x.conv_transpose2d(&self.weight, self.geometry) + bias.reshape((self.bias.dims()[0], 1, 1))
    }
}
