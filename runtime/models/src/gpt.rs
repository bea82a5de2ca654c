//! A decoder-only transformer with norms before its layers, as GPT-2 (Radford et al. 2019).

use slabwise::nn::{Embedding, LayerNorm, LearnedPositions, Linear, Module};
use slabwise::params::Scope;
use slabwise::tensor::{Mask, Tensor};

use super::attention::{heads_of, length_of};

/// The sizes of a GPT. Its parameters are named as in the usual PyTorch implementations, with fully
/// connected layers: `transformer.wte.weight`, `transformer.h.0.attn.c_attn.weight`,
/// `transformer.h.0.mlp.c_fc.weight`, `lm_head.weight`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gpt {
    /// Blocks.
    pub layers: usize,
    /// The width of a token's vector.
    pub width: usize,
    /// Attention heads in a block; they divide the width equally.
    pub heads: usize,
    /// Tokens in a sequence, at most.
    pub length: usize,
    /// Different tokens.
    pub vocabulary: usize,
    /// The head uses the weight of the embedding.
    pub tied: bool,
}

impl Gpt {
    /// 4 blocks of width 256, 128 tokens of 1024 kinds: 3,716,608 weights.
    pub const SMALL: Gpt = Gpt {
        layers: 4,
        width: 256,
        heads: 4,
        length: 128,
        vocabulary: 1024,
        tied: false,
    };
    /// GPT-2: 12 blocks of width 768, 1024 tokens of 50257 kinds: 124,439,808 weights.
    pub const GPT2: Gpt = Gpt {
        layers: 12,
        width: 768,
        heads: 12,
        length: 1024,
        vocabulary: 50257,
        tied: true,
    };

    /// Declares the weights: tokens `[n, length]` → logits of the next token `[n, length,
    /// vocabulary]`. Texts may be shorter than the length of the sizes.
    #[track_caller]
    pub fn layers(&self, at: &Scope) -> impl Module + use<> {
        let (root, d) = (at / "transformer", self.width);
        let heads = heads_of(at, d, self.heads);
        let block = |i: usize| {
            let at = &root / "h" / &i.to_string();
            Block {
                heads,
                width: d,
                norm1: LayerNorm::new(&at / "ln_1", d),
                qkv: Linear::new(&at / "attn" / "c_attn", d, 3 * d),
                joined: Linear::new(&at / "attn" / "c_proj", d, d),
                norm2: LayerNorm::new(&at / "ln_2", d),
                wide: Linear::new(&at / "mlp" / "c_fc", d, 4 * d),
                narrow: Linear::new(&at / "mlp" / "c_proj", 4 * d, d),
            }
        };
        Layers {
            width: d,
            length: self.length,
            tokens: Embedding::with_std(&root / "wte", self.vocabulary, d, 0.02),
            places: LearnedPositions::with_std(&root / "wpe", self.length, d, 0.02),
            blocks: (0..self.layers).map(block).collect(),
            norm: LayerNorm::new(&root / "ln_f", d),
            head: (!self.tied).then(|| Linear::without_bias(at / "lm_head", d, self.vocabulary)),
        }
    }
}

struct Layers {
    width: usize,
    length: usize,
    tokens: Embedding,
    places: LearnedPositions,
    blocks: Vec<Block>,
    norm: LayerNorm,
    head: Option<Linear>,
}

impl Module for Layers {
    #[track_caller]
    fn forward<'t>(&self, x: Tensor<'t>) -> Tensor<'t> {
        let length = match length_of("gpt", x, ("length", self.length)) {
            Ok(length) => length,
            Err(mistaken) => return mistaken,
        };
        let x = x.apply(&self.tokens).apply(&self.places);
        // Tokens of all sequences in one row, as products have them, so that the operations after a
        // product are fused with it.
        let x = x.reshape([-1, self.width as i64]);
        let x = self
            .blocks
            .iter()
            .fold(x, |x, block| block.over(x, length))
            .apply(&self.norm);
        let logits = match &self.head {
            Some(head) => x.apply(head),
            None => x.matmul(x.trace().param(self.tokens.weight()).t()),
        };
        logits.unflatten(0, [-1, length as i64])
    }
}

struct Block {
    heads: usize,
    width: usize,
    norm1: LayerNorm,
    qkv: Linear,
    joined: Linear,
    norm2: LayerNorm,
    wide: Linear,
    narrow: Linear,
}

impl Block {
    /// The block over texts of this length, their tokens in one row.
    fn over<'t>(&self, x: Tensor<'t>, length: usize) -> Tensor<'t> {
        let qkv = x
            .apply(&self.norm1)
            .apply(&self.qkv)
            .unflatten(0, [-1, length as i64]);
        let attended = qkv
            .self_attention(self.heads, true, Mask::None)
            .reshape([-1, self.width as i64]);
        let x = x + attended.apply(&self.joined);
        x + x
            .apply(&self.norm2)
            .apply(&self.wide)
            .gelu_tanh()
            .apply(&self.narrow)
    }
}
