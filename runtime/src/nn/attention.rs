//! Attention over sequences.

use super::Module;
use crate::params::{Init, Param, Scope};
use crate::tensor::{Mask, Tensor};

/// Self-attention with several heads (Vaswani et al. 2017): `[batch, length, width] → [batch,
/// length, width]`.
///
/// Its parameters are `in_proj_weight` `[3·width, width]`, `in_proj_bias` `[3·width]` (query, key
/// and value, one behind the other), `out_proj.weight` `[width, width]` and `out_proj.bias`
/// `[width]`.
#[derive(Clone, Debug)]
pub struct MultiHeadAttention {
    heads: usize,
    causal: bool,
    in_weight: Param,
    in_bias: Param,
    out_weight: Param,
    out_bias: Param,
}

impl MultiHeadAttention {
    /// Declares the parameters. The heads divide the width equally.
    #[track_caller]
    pub fn new(at: Scope, width: usize, heads: usize) -> Self {
        if heads == 0 || !width.is_multiple_of(heads) {
            at.mistake(format!(
                "attention: a width of {width} does not divide into {heads} heads"
            ));
        }
        let out = &at / "out_proj";
        MultiHeadAttention {
            heads: heads.max(1),
            causal: false,
            in_weight: at.param(
                "in_proj_weight",
                (width.saturating_mul(3), width),
                Init::xavier_uniform(width, width.saturating_mul(3)),
            ),
            in_bias: at.param(
                "in_proj_bias",
                (width.saturating_mul(3),),
                Init::Constant(0.0),
            ),
            out_weight: out.param("weight", (width, width), Init::kaiming_uniform(width)),
            out_bias: out.param("bias", (width,), Init::Constant(0.0)),
        }
    }

    /// Each position sees itself and the earlier ones only.
    pub fn causal(mut self) -> Self {
        self.causal = true;
        self
    }

    /// The result under a mask, on top of which a causal layer hides later positions.
    #[track_caller]
    pub fn masked<'t>(&self, x: Tensor<'t>, mask: Mask<'t>) -> Tensor<'t> {
        let trace = x.trace();
        let qkv = x.matmul(trace.param(&self.in_weight).t()) + &self.in_bias;
        let joined = qkv.self_attention(self.heads, self.causal, mask);
        joined.matmul(trace.param(&self.out_weight).t()) + &self.out_bias
    }
}

impl Module for MultiHeadAttention {
    #[track_caller]
    fn forward<'t>(&self, x: Tensor<'t>) -> Tensor<'t> {
        self.masked(x, Mask::None)
    }
}
