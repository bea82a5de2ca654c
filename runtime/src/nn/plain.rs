//! Layers without weights.

use super::Module;
use crate::params::{Init, Param, Scope};
use crate::tensor::{Interpolate, Tensor};

macro_rules! plain {
    ($($(#[$doc:meta])* $name:ident $(($field:ty))? |$x:ident $(, $value:ident)?| $body:expr;)*) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy, Debug)]
        pub struct $name $((pub $field))?;

        impl Module for $name {
            #[track_caller]
            fn forward<'t>(&self, $x: Tensor<'t>) -> Tensor<'t> {
                $(let $name($value) = *self;)?
                $body
            }
        }
    )*};
}

plain! {
    /// See [`Tensor::relu`].
    Relu |x| x.relu();
    /// Between 0 and 6; see [`Tensor::clamp`].
    Relu6 |x| x.clamp(0.0, 6.0);
    /// See [`Tensor::gelu`].
    Gelu |x| x.gelu();
    /// See [`Tensor::gelu_tanh`].
    GeluTanh |x| x.gelu_tanh();
    /// See [`Tensor::quick_gelu`].
    QuickGelu |x| x.quick_gelu();
    /// See [`Tensor::silu`].
    Silu |x| x.silu();
    /// See [`Tensor::mish`].
    Mish |x| x.mish();
    /// With the given slope below 0; see [`Tensor::leaky_relu`].
    LeakyRelu(f32) |x, slope| x.leaky_relu(slope);
    /// With the given alpha; see [`Tensor::elu`].
    Elu(f32) |x, alpha| x.elu(alpha);
    /// See [`Tensor::selu`].
    Selu |x| x.selu();
    /// See [`Tensor::softplus`].
    Softplus |x| x.softplus();
    /// See [`Tensor::hardswish`].
    Hardswish |x| x.hardswish();
    /// See [`Tensor::hardsigmoid`].
    Hardsigmoid |x| x.hardsigmoid();
    /// By the given factor; see [`Tensor::pixel_shuffle`].
    PixelShuffle(usize) |x, factor| x.pixel_shuffle(factor);
    /// See [`Tensor::tanh`].
    Tanh |x| x.tanh();
    /// See [`Tensor::sigmoid`].
    Sigmoid |x| x.sigmoid();
    /// See [`Tensor::global_avg_pool`].
    GlobalAvgPool |x| x.global_avg_pool();
    /// See [`Tensor::global_max_pool`].
    GlobalMaxPool |x| x.global_max_pool();
    /// Joins the axes from the given one on; see [`Tensor::flatten`].
    Flatten(usize) |x, from| x.flatten(from);
    /// Drops with the given probability; see [`Tensor::dropout`].
    Dropout(f32) |x, p| x.dropout(p);
    /// Drops with the given probability; see [`Tensor::alpha_dropout`].
    AlphaDropout(f32) |x, p| x.alpha_dropout(p);
    /// Drops whole channels with the given probability; see [`Tensor::dropout_channels`].
    DropoutChannels(f32) |x, p| x.dropout_channels(p);
    /// Drops whole examples with the given probability; see [`Tensor::drop_path`].
    DropPath(f32) |x, p| x.drop_path(p);
}

/// [`Tensor::prelu`] with a slope for each channel of `[n, channels, …]`, or one for all. Weight
/// `[channels]` or `[1]`.
#[derive(Clone, Debug)]
pub struct Prelu {
    weight: Param,
}

impl Prelu {
    /// Declares `weight`, initially ¼: a slope for each channel, or with 1 channel one slope for
    /// all.
    #[track_caller]
    pub fn new(at: Scope, channels: usize) -> Self {
        Prelu {
            weight: at.param("weight", (channels,), Init::Constant(0.25)),
        }
    }
}

impl Module for Prelu {
    #[track_caller]
    fn forward<'t>(&self, x: Tensor<'t>) -> Tensor<'t> {
        x.prelu(super::norm::per_channel(&self.weight, x))
    }
}

/// An image or sequence `[n, channels, …]` of fixed lengths, enlarged by a factor along each axis
/// after the channels; see [`Tensor::interpolate`].
#[derive(Clone, Copy, Debug)]
pub struct Upsample {
    factor: usize,
    method: Interpolate,
}

impl Upsample {
    /// By this factor.
    pub fn new(factor: usize, method: Interpolate) -> Self {
        Upsample { factor, method }
    }
}

impl Module for Upsample {
    #[track_caller]
    fn forward<'t>(&self, x: Tensor<'t>) -> Tensor<'t> {
        let x = (2..x.rank()).fold(x, |x, axis| x.require_fixed_axis("upsample", axis));
        let size: Vec<usize> = (2..x.rank())
            .filter_map(|axis| x.len(axis)?.checked_mul(self.factor))
            .collect();
        x.interpolate(size, self.method)
    }
}
