//! Layers without weights.

use super::Module;
use crate::tensor::Tensor;

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
    /// See [`Tensor::silu`].
    Silu |x| x.silu();
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
    /// Drops whole channels with the given probability; see [`Tensor::dropout_channels`].
    DropoutChannels(f32) |x, p| x.dropout_channels(p);
    /// Drops whole examples with the given probability; see [`Tensor::drop_path`].
    DropPath(f32) |x, p| x.drop_path(p);
}
