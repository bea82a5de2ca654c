//! Layers of transformers (Vaswani et al. 2017), with PyTorch's names.

use std::panic::Location;

use super::{LayerNorm, Linear, Module, MultiHeadAttention};
use crate::params::Scope;
use crate::tensor::{Mask, RopeLayout, Tensor};

/// The two linear layers between which a transformer layer widens its vectors, and the order of its
/// parts.
#[derive(Clone, Debug)]
struct FeedForward {
    first: Linear,
    second: Linear,
    gelu: bool,
    norm_first: bool,
    dropout: f32,
}

impl FeedForward {
    #[track_caller]
    fn new(at: &Scope, width: usize, inner: usize) -> Self {
        FeedForward {
            first: Linear::new(at / "linear1", width, inner),
            second: Linear::new(at / "linear2", inner, width),
            gelu: false,
            norm_first: false,
            dropout: 0.1,
        }
    }

    #[track_caller]
    fn forward<'t>(&self, x: Tensor<'t>) -> Tensor<'t> {
        let inner = x.apply(&self.first);
        let inner = if self.gelu {
            inner.gelu()
        } else {
            inner.relu()
        };
        inner.dropout(self.dropout).apply(&self.second)
    }

    /// A part of the layer with its residual connection and its norm.
    #[track_caller]
    fn residual<'t>(
        &self,
        x: Tensor<'t>,
        norm: &LayerNorm,
        part: impl FnOnce(Tensor<'t>) -> Tensor<'t>,
    ) -> Tensor<'t> {
        if self.norm_first {
            x + part(x.apply(norm)).dropout(self.dropout)
        } else {
            (x + part(x).dropout(self.dropout)).apply(norm)
        }
    }
}

macro_rules! options {
    ($name:ident: $($attention:ident),*) => {
        impl $name {
            /// With each norm before its part instead of after it.
            pub fn norm_first(mut self) -> Self {
                self.forward.norm_first = true;
                self
            }

            /// With [`Tensor::gelu`] in the place of [`Tensor::relu`].
            pub fn gelu(mut self) -> Self {
                self.forward.gelu = true;
                self
            }

            /// With this probability of dropout after each part and inside of the last.
            pub fn dropout(mut self, p: f32) -> Self {
                self.forward.dropout = p;
                self
            }

            /// With this probability of dropout of attention weights; see
            /// [`AttentionOptions::dropout`](crate::tensor::AttentionOptions::dropout).
            pub fn attention_dropout(mut self, p: f32) -> Self {
                $(self.$attention = self.$attention.attention_dropout(p);)*
                self
            }
        }
    };
}

/// A layer of an encoder: self-attention, then two linear layers, each with a residual connection
/// and a norm. `[batch, length, width] → [batch, length, width]`.
///
/// Its parameters are those of `self_attn` (a [`MultiHeadAttention`]), `linear1`, `linear2`, `norm1`
/// and `norm2`. In a training trace, 0.1 of the results of each part are dropped; weights of
/// attention only with [`attention_dropout`](TransformerEncoderLayer::attention_dropout).
#[derive(Clone, Debug)]
pub struct TransformerEncoderLayer {
    at: Scope,
    attention: MultiHeadAttention,
    forward: FeedForward,
    norms: [LayerNorm; 2],
}

options!(TransformerEncoderLayer: attention);

impl TransformerEncoderLayer {
    /// Declares the parameters; `inner` is the width between the linear layers. Norms come after
    /// their parts, and the activation is [`Tensor::relu`].
    #[track_caller]
    pub fn new(at: Scope, width: usize, heads: usize, inner: usize) -> Self {
        TransformerEncoderLayer {
            attention: MultiHeadAttention::new(&at / "self_attn", width, heads),
            forward: FeedForward::new(&at, width, inner),
            norms: [
                LayerNorm::new(&at / "norm1", width),
                LayerNorm::new(&at / "norm2", width),
            ],
            at,
        }
    }

    /// Each position sees itself and the earlier ones only.
    pub fn causal(mut self) -> Self {
        self.attention = self.attention.causal();
        self
    }

    /// The result under a mask, which broadcasts to `[batch, heads, length, length]`.
    #[track_caller]
    pub fn masked<'t>(&self, x: Tensor<'t>, mask: Mask<'t>) -> Tensor<'t> {
        let forward = &self.forward;
        let called = Location::caller();
        x.trace().call_layer(self.at.path(), called, || {
            let x = forward.residual(x, &self.norms[0], |x| self.attention.masked(x, mask));
            forward.residual(x, &self.norms[1], |x| forward.forward(x))
        })
    }
}

impl Module for TransformerEncoderLayer {
    #[track_caller]
    fn forward<'t>(&self, x: Tensor<'t>) -> Tensor<'t> {
        self.masked(x, Mask::None)
    }
}

/// A layer of a decoder: causal self-attention, attention to an encoder's result, then two linear
/// layers, each with a residual connection and a norm.
///
/// Its parameters are those of `self_attn` and `multihead_attn` (each a [`MultiHeadAttention`]),
/// `linear1`, `linear2` and `norm1` to `norm3`. In a training trace, 0.1 of the results of each part
/// are dropped; weights of attention only with
/// [`attention_dropout`](TransformerDecoderLayer::attention_dropout).
#[derive(Clone, Debug)]
pub struct TransformerDecoderLayer {
    at: Scope,
    attention: MultiHeadAttention,
    cross: MultiHeadAttention,
    forward: FeedForward,
    norms: [LayerNorm; 3],
}

options!(TransformerDecoderLayer: attention, cross);

impl TransformerDecoderLayer {
    /// Declares the parameters; `inner` is the width between the linear layers. Norms come after
    /// their parts, and the activation is [`Tensor::relu`].
    #[track_caller]
    pub fn new(at: Scope, width: usize, heads: usize, inner: usize) -> Self {
        TransformerDecoderLayer {
            attention: MultiHeadAttention::new(&at / "self_attn", width, heads).causal(),
            cross: MultiHeadAttention::new(&at / "multihead_attn", width, heads),
            forward: FeedForward::new(&at, width, inner),
            norms: ["norm1", "norm2", "norm3"].map(|name| LayerNorm::new(&at / name, width)),
            at,
        }
    }

    /// The result for `x` `[batch, length, width]` and an encoder's result `memory` `[batch, other
    /// length, width]`, of which `mask` (it broadcasts to `[batch, heads, length, other length]`)
    /// shows a part.
    #[track_caller]
    pub fn decode<'t>(&self, x: Tensor<'t>, memory: Tensor<'t>, mask: Mask<'t>) -> Tensor<'t> {
        let forward = &self.forward;
        let called = Location::caller();
        x.trace().call_layer(self.at.path(), called, || {
            let x = forward.residual(x, &self.norms[0], |x| x.apply(&self.attention));
            let x = forward.residual(x, &self.norms[1], |x| {
                self.cross.cross(x, memory, memory, mask)
            });
            forward.residual(x, &self.norms[2], |x| forward.forward(x))
        })
    }
}

/// Sines and cosines of each position, added to a sequence `[…, length, width]`; see
/// [`Tensor::sinusoids`]. Nothing is learned.
#[derive(Clone, Copy, Debug)]
pub struct SinusoidalPositions {
    base: f32,
    layout: RopeLayout,
}

impl Default for SinusoidalPositions {
    fn default() -> Self {
        SinusoidalPositions {
            base: 10_000.0,
            layout: RopeLayout::Interleaved,
        }
    }
}

impl SinusoidalPositions {
    /// With the base 10,000, each sine before its cosine.
    pub fn new() -> Self {
        SinusoidalPositions::default()
    }

    /// With this base.
    pub fn base(mut self, base: f32) -> Self {
        self.base = base;
        self
    }

    /// With this layout.
    pub fn layout(mut self, layout: RopeLayout) -> Self {
        self.layout = layout;
        self
    }
}

impl Module for SinusoidalPositions {
    #[track_caller]
    fn forward<'t>(&self, x: Tensor<'t>) -> Tensor<'t> {
        let x = x.require_sequence("sinusoidal positions");
        let Some(axis) = x.rank().checked_sub(2) else {
            return x;
        };
        match (x.positions_along(axis), x.len(axis + 1)) {
            (Some(positions), Some(width)) => {
                x + positions.sinusoids(width, self.base, self.layout)
            }
            _ => x,
        }
    }
}
