//! Convolution layers.

use super::Module;
use crate::params::{Init, Param, Scope};
use crate::tensor::{ConvOptions, Padding, PerAxis, Tensor};

/// Weight, bias and options of a convolution over `N` axes.
#[derive(Clone, Debug)]
struct Kernel<const N: usize> {
    at: Scope,
    name: &'static str,
    /// Whether the weight is that of a transposed convolution: `[inputs, outputs/groups, k…]`
    /// instead of `[outputs, inputs/groups, k…]`.
    transposed: bool,
    inputs: usize,
    outputs: usize,
    k: [usize; N],
    options: ConvOptions<N>,
    weight: Param,
    bias: Option<Param>,
}

impl<const N: usize> Kernel<N> {
    #[track_caller]
    fn new(
        at: Scope,
        name: &'static str,
        transposed: bool,
        inputs: usize,
        outputs: usize,
        k: [usize; N],
    ) -> Self {
        let (fan_in, dims) = weight(transposed, inputs, outputs, 1, k);
        let weight = at.param("weight", dims.as_slice(), Init::kaiming_uniform(fan_in));
        let bias = Some(at.param("bias", (outputs,), Init::kaiming_uniform(fan_in)));
        Kernel {
            at,
            name,
            transposed,
            inputs,
            outputs,
            k,
            options: ConvOptions::new(),
            weight,
            bias,
        }
    }

    #[track_caller]
    fn set_groups(&mut self, groups: usize) {
        if groups == 0
            || !self.inputs.is_multiple_of(groups)
            || !self.outputs.is_multiple_of(groups)
        {
            self.at.mistake(format!(
                "{}: {} and {} channels do not divide into {groups} groups",
                self.name, self.inputs, self.outputs
            ));
            return;
        }
        self.options.groups = groups;
        let (fan_in, dims) = weight(self.transposed, self.inputs, self.outputs, groups, self.k);
        let init = Init::kaiming_uniform(fan_in);
        let bias = self.bias.take();
        [Some(&self.weight), bias.as_ref()]
            .into_iter()
            .flatten()
            .for_each(|declared| self.at.retract(declared));
        self.weight = self.at.param("weight", dims.as_slice(), init);
        // Not in a closure, whose line a mistake would name.
        if bias.is_some() {
            self.bias = Some(self.at.param("bias", (self.outputs,), init));
        }
    }

    fn retract_bias(&mut self) {
        if let Some(bias) = self.bias.take() {
            self.at.retract(&bias);
        }
    }

    #[track_caller]
    fn with_bias<'t>(&self, y: Tensor<'t>) -> Tensor<'t> {
        let Some(bias) = &self.bias else {
            return y;
        };
        let mut lengths = vec![1; N + 1];
        lengths[0] = self.outputs;
        y + y.trace().param(bias).reshape(lengths.as_slice())
    }
}

/// The number of inputs that each result sums over, as PyTorch counts it, and the weight's shape.
/// Saturates: an absurd size is refused where it is used.
fn weight<const N: usize>(
    transposed: bool,
    inputs: usize,
    outputs: usize,
    groups: usize,
    k: [usize; N],
) -> (usize, Vec<usize>) {
    let [first, second] = if transposed {
        [inputs, outputs / groups]
    } else {
        [outputs, inputs / groups]
    };
    let fan_in = k.iter().fold(second, |n, &k| n.saturating_mul(k));
    (fan_in, [first, second].into_iter().chain(k).collect())
}

/// The methods that all these layers have.
macro_rules! options {
    ($name:ident, $axes:literal) => {
        impl $name {
            /// With this distance between neighbouring results (of a transposed convolution,
            /// between the positions that neighbours of the input write to): one number, or one per
            /// axis.
            pub fn stride(mut self, stride: impl PerAxis<$axes>) -> Self {
                self.0.options = self.0.options.stride(stride);
                self
            }

            /// With this distance between kernel elements: one number, or one per axis.
            pub fn dilation(mut self, dilation: impl PerAxis<$axes>) -> Self {
                self.0.options = self.0.options.dilation(dilation);
                self
            }

            /// With this padding: a number of zeros on each side, an array with a number or a pair
            /// for each axis, or a [`Padding`].
            pub fn padding(mut self, padding: impl Into<Padding<$axes>>) -> Self {
                self.0.options = self.0.options.padding(padding);
                self
            }

            /// With this number of channel groups, which do not mix, so that the weight is smaller.
            #[track_caller]
            pub fn groups(mut self, groups: usize) -> Self {
                self.0.set_groups(groups);
                self
            }

            /// Without the bias.
            pub fn without_bias(mut self) -> Self {
                self.0.retract_bias();
                self
            }

            /// The weight.
            pub fn weight(&self) -> &Param {
                &self.0.weight
            }

            /// The bias, `[outputs]`.
            pub fn bias(&self) -> Option<&Param> {
                self.0.bias.as_ref()
            }
        }
    };
}

/// Convolution with bias: `[n, inputs, h, w] → [n, outputs, oh, ow]`. Weight `[outputs,
/// inputs/groups, kh, kw]`, bias `[outputs]`.
///
/// ```
/// use slabwise::nn::Conv2d;
/// use slabwise::tensor::Padding;
/// # use slabwise::prelude::*;
/// # let params = Params::seeded(0);
/// # let trace = Trace::inference();
/// # let x = trace.input("x", F32, (1, 8, 20, 30));
/// let conv = Conv2d::new(&params.root() / "conv", 8, 16, [1, 7])
///     .stride([1, 2])
///     .padding(Padding::Same);
/// assert_eq!(x.apply(&conv).len(3), Some(15));
/// ```
#[derive(Clone, Debug)]
pub struct Conv2d(Kernel<2>);

impl Conv2d {
    /// Declares `weight` and `bias`, both initially uniform in ±1/√(inputs·kh·kw), for a kernel of
    /// `k` rows and columns or of `[kh, kw]`. Stride 1, no padding.
    #[track_caller]
    pub fn new(at: Scope, inputs: usize, outputs: usize, k: impl PerAxis<2>) -> Self {
        Conv2d(Kernel::new(
            at,
            "conv2d",
            false,
            inputs,
            outputs,
            k.per_axis(),
        ))
    }
}

options!(Conv2d, 2);

impl Module for Conv2d {
    #[track_caller]
    fn forward<'t>(&self, x: Tensor<'t>) -> Tensor<'t> {
        self.0
            .with_bias(x.conv2d_with(&self.0.weight, self.0.options))
    }
}

/// Convolution of sequences with bias: `[n, inputs, length] → [n, outputs, …]`. Weight `[outputs,
/// inputs/groups, k]`, bias `[outputs]`. Causal with [`Padding::Causal`].
#[derive(Clone, Debug)]
pub struct Conv1d(Kernel<1>);

impl Conv1d {
    /// Declares `weight` and `bias`, both initially uniform in ±1/√(inputs·k). Stride 1, no
    /// padding.
    #[track_caller]
    pub fn new(at: Scope, inputs: usize, outputs: usize, k: usize) -> Self {
        Conv1d(Kernel::new(at, "conv1d", false, inputs, outputs, [k]))
    }
}

options!(Conv1d, 1);

impl Module for Conv1d {
    #[track_caller]
    fn forward<'t>(&self, x: Tensor<'t>) -> Tensor<'t> {
        self.0
            .with_bias(x.conv1d_with(&self.0.weight, self.0.options))
    }
}

/// Convolution of volumes with bias: `[n, inputs, depth, h, w] → [n, outputs, …]`. Weight
/// `[outputs, inputs/groups, kd, kh, kw]`, bias `[outputs]`. See [`Tensor::conv3d_with`] for its
/// cost.
#[derive(Clone, Debug)]
pub struct Conv3d(Kernel<3>);

impl Conv3d {
    /// Declares `weight` and `bias`, both initially uniform in ±1/√(inputs·kd·kh·kw). Stride 1, no
    /// padding.
    #[track_caller]
    pub fn new(at: Scope, inputs: usize, outputs: usize, k: impl PerAxis<3>) -> Self {
        Conv3d(Kernel::new(
            at,
            "conv3d",
            false,
            inputs,
            outputs,
            k.per_axis(),
        ))
    }
}

options!(Conv3d, 3);

impl Module for Conv3d {
    #[track_caller]
    fn forward<'t>(&self, x: Tensor<'t>) -> Tensor<'t> {
        self.0
            .with_bias(x.conv3d_with(&self.0.weight, self.0.options))
    }
}

/// The transpose of a convolution, which enlarges images: `[n, inputs, h, w] → [n, outputs, …]`, as
/// large as [`Tensor::conv_transpose2d`] says. Weight `[inputs, outputs/groups, kh, kw]`, bias
/// `[outputs]`.
#[derive(Clone, Debug)]
pub struct ConvTranspose2d(Kernel<2>);

impl ConvTranspose2d {
    /// Declares `weight` and `bias`, both initially uniform in ±1/√(outputs·kh·kw), for a kernel of
    /// `k` rows and columns or of `[kh, kw]`. Stride 1, no padding.
    #[track_caller]
    pub fn new(at: Scope, inputs: usize, outputs: usize, k: impl PerAxis<2>) -> Self {
        let name = "conv_transpose2d";
        ConvTranspose2d(Kernel::new(at, name, true, inputs, outputs, k.per_axis()))
    }

    /// With this number of extra rows and columns at the end: see [`ConvOptions::output_padding`].
    pub fn output_padding(mut self, more: impl PerAxis<2>) -> Self {
        self.0.options = self.0.options.output_padding(more);
        self
    }
}

options!(ConvTranspose2d, 2);

impl Module for ConvTranspose2d {
    #[track_caller]
    fn forward<'t>(&self, x: Tensor<'t>) -> Tensor<'t> {
        self.0
            .with_bias(x.conv_transpose2d(&self.0.weight, self.0.options))
    }
}

/// The transpose of a convolution of sequences: `[n, inputs, length] → [n, outputs, …]`. Weight
/// `[inputs, outputs/groups, k]`, bias `[outputs]`.
#[derive(Clone, Debug)]
pub struct ConvTranspose1d(Kernel<1>);

impl ConvTranspose1d {
    /// Declares `weight` and `bias`, both initially uniform in ±1/√(outputs·k). Stride 1, no
    /// padding.
    #[track_caller]
    pub fn new(at: Scope, inputs: usize, outputs: usize, k: usize) -> Self {
        let name = "conv_transpose1d";
        ConvTranspose1d(Kernel::new(at, name, true, inputs, outputs, [k]))
    }

    /// With this number of extra elements at the end: see [`ConvOptions::output_padding`].
    pub fn output_padding(mut self, more: usize) -> Self {
        self.0.options = self.0.options.output_padding(more);
        self
    }
}

options!(ConvTranspose1d, 1);

impl Module for ConvTranspose1d {
    #[track_caller]
    fn forward<'t>(&self, x: Tensor<'t>) -> Tensor<'t> {
        self.0
            .with_bias(x.conv_transpose1d(&self.0.weight, self.0.options))
    }
}

/// The transpose of a convolution of volumes: `[n, inputs, depth, h, w] → [n, outputs, …]`. Weight
/// `[inputs, outputs/groups, kd, kh, kw]`, bias `[outputs]`. See [`Tensor::conv_transpose3d`] for
/// its cost.
#[derive(Clone, Debug)]
pub struct ConvTranspose3d(Kernel<3>);

impl ConvTranspose3d {
    /// Declares `weight` and `bias`, both initially uniform in ±1/√(outputs·kd·kh·kw). Stride 1, no
    /// padding.
    #[track_caller]
    pub fn new(at: Scope, inputs: usize, outputs: usize, k: impl PerAxis<3>) -> Self {
        let name = "conv_transpose3d";
        ConvTranspose3d(Kernel::new(at, name, true, inputs, outputs, k.per_axis()))
    }

    /// With this number of extra elements at the end of each axis: see
    /// [`ConvOptions::output_padding`].
    pub fn output_padding(mut self, more: impl PerAxis<3>) -> Self {
        self.0.options = self.0.options.output_padding(more);
        self
    }
}

options!(ConvTranspose3d, 3);

impl Module for ConvTranspose3d {
    #[track_caller]
    fn forward<'t>(&self, x: Tensor<'t>) -> Tensor<'t> {
        self.0
            .with_bias(x.conv_transpose3d(&self.0.weight, self.0.options))
    }
}
