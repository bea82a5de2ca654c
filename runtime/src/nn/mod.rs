//! Layers: plain structs that hold parameters and apply them to a tensor. Names, shapes and initial
//! values of weights are those of PyTorch, so that weight files fit.
//!
//! The layers here are `#[track_caller]`, so that a mistake names the line of the model, not a line
//! of this library.

mod attention;
mod batch_norm;
mod cache;
mod children;
mod conv;
mod embedding;
mod linear;
mod lora;
mod norm;
mod plain;
mod pool;
mod recurrent;
mod sequential;
mod transformer;

pub use attention::{GroupedQueryAttention, MultiHeadAttention};
pub use batch_norm::{BatchNorm, BatchNorm1d, BatchNorm2d, BatchNorm3d};
pub use cache::KvCache;
pub use children::{BackwardHooked, Hooked, ModuleDict, ModuleList};
pub use conv::{Conv1d, Conv2d, Conv3d, ConvTranspose1d, ConvTranspose2d, ConvTranspose3d};
pub use embedding::{Bag, Embedding, EmbeddingBag, LearnedPositions};
pub use linear::Linear;
pub use lora::LoraLinear;
pub use norm::{GroupNorm, InstanceNorm, LayerNorm, LocalResponseNorm, RmsNorm};
pub use plain::{
    AlphaDropout, DropPath, Dropout, DropoutChannels, Elu, Flatten, Gelu, GeluTanh, GlobalAvgPool,
    GlobalMaxPool, Hardsigmoid, Hardswish, LeakyRelu, Mish, PixelShuffle, Prelu, QuickGelu, Relu,
    Relu6, Selu, Sigmoid, Silu, Softplus, Tanh, Upsample,
};
pub use pool::{
    AdaptiveAvgPool1d, AdaptiveAvgPool2d, AdaptiveMaxPool1d, AdaptiveMaxPool2d, AvgPool1d,
    AvgPool2d, AvgPool2dWith, MaxPool1d, MaxPool2d, MaxPool2dWith,
};
pub use recurrent::{Gru, GruCell, Lstm, LstmCell, Rnn, RnnCell};
pub use sequential::Sequential;
pub use transformer::{SinusoidalPositions, TransformerDecoderLayer, TransformerEncoderLayer};

use std::panic::Location;

use crate::tensor::Tensor;

/// Something a tensor can be [applied](Tensor::apply) to.
pub trait Module {
    /// The result for `x`.
    fn forward<'t>(&self, x: Tensor<'t>) -> Tensor<'t>;

    /// The path of the layer, as [`Scope::path`](crate::Scope::path): errors, plans and summaries
    /// attribute the operations that it records without a parameter to this layer. If it is empty
    /// (the default), they belong to the enclosing layer, or to that of an operand.
    fn path(&self) -> &str {
        ""
    }
}

impl<'t> Tensor<'t> {
    /// The result of a layer.
    #[track_caller]
    pub fn apply<M: Module + ?Sized>(self, layer: &M) -> Tensor<'t> {
        // A call through `dyn` loses the caller's line.
        self.trace
            .call_layer(layer.path(), Location::caller(), || layer.forward(self))
    }
}
