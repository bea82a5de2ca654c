//! A decoder-only transformer with norms before its layers, as GPT-2 (Radford et al. 2019).

use crate::error::{Error, Result};
use crate::nn::{Embedding, LayerNorm, LearnedPositions, Linear, Module};
use crate::params::Scope;
use crate::tensor::{Mask, Tensor};

/// The largest of any size, so that products of a few of them are numbers.
const SIZE_MAX: usize = 1_000_000;

/// The sizes of a GPT. Its parameters are named as in the usual PyTorch implementations, with fully connected layers:
/// `transformer.wte.weight`, `transformer.h.0.attn.c_attn.weight`, `transformer.h.0.mlp.c_fc.weight`, `lm_head.weight`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gpt {
    /// Blocks.
    pub layers: usize,
    /// The width of a token's vector.
    pub width: usize,
    /// Attention heads in a block; they divide the width equally.
    pub heads: usize,
    /// Tokens in a sequence.
    pub length: usize,
    /// Different tokens.
    pub vocabulary: usize,
    /// The head uses the weight of the embedding.
    pub tied: bool,
}

impl Gpt {
    /// 4 blocks of width 256, 128 tokens of 1024 kinds: 3,716,608 weights.
    pub const SMALL: Gpt = Gpt { layers: 4, width: 256, heads: 4, length: 128, vocabulary: 1024, tied: false };
    /// GPT-2: 12 blocks of width 768, 1024 tokens of 50257 kinds: 124,439,808 weights.
    pub const GPT2: Gpt = Gpt { layers: 12, width: 768, heads: 12, length: 1024, vocabulary: 50257, tied: true };

    /// The usual size, but for what `text` sets: `layers=6,width=384,heads=6,length=256,vocabulary=65,tied=true`, in any choice.
    ///
    /// # Errors
    /// For an unknown size, or one that is no number or too large.
    pub fn parse(text: &str) -> Result<Gpt> {
        let mut gpt = Gpt::SMALL;
        for setting in text.split(',').filter(|s| !s.trim().is_empty()) {
            let (name, value) = setting.split_once('=').unwrap_or((setting, ""));
            let (name, value) = (name.trim(), value.trim());
            let slot = match name {
                "layers" => &mut gpt.layers,
                "width" => &mut gpt.width,
                "heads" => &mut gpt.heads,
                "length" => &mut gpt.length,
                "vocabulary" => &mut gpt.vocabulary,
                "tied" => {
                    gpt.tied = value.parse().map_err(|_| Error::Value(format!("tied of gpt is \"{value}\", not true or false")))?;
                    continue;
                }
                _ => {
                    let known = "layers, width, heads, length, vocabulary, tied";
                    return Err(Error::Value(format!("gpt has no size \"{name}\"; there are {known}")));
                }
            };
            let number = value.parse().ok().filter(|n| (1..=SIZE_MAX).contains(n));
            *slot = number.ok_or_else(|| Error::Value(format!("the {name} of gpt are \"{value}\", not a number from 1 to {SIZE_MAX}")))?;
        }
        if !gpt.width.is_multiple_of(gpt.heads) {
            return Err(Error::Value(format!("the width of gpt, {}, does not divide into {} heads", gpt.width, gpt.heads)));
        }
        Ok(gpt)
    }

    /// Declares the weights: tokens `[n, length]` → logits of the next token `[n, length, vocabulary]`.
    #[track_caller]
    pub fn layers(&self, at: &Scope) -> impl Module + use<> {
        let (root, d) = (at / "transformer", self.width);
        let block = |i: usize| {
            let at = &root / "h" / &i.to_string();
            Block {
                heads: self.heads,
                width: d,
                length: self.length,
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
        let x = x.apply(&self.tokens).apply(&self.places);
        // Tokens of all sequences in one row, as products have them, so that what follows a product is fused with it.
        let x = x.reshape([-1, self.width as i64]);
        let x = self.blocks.iter().fold(x, |x, block| x.apply(block)).apply(&self.norm);
        let logits = match &self.head {
            Some(head) => x.apply(head),
            None => x.matmul(x.trace().param(self.tokens.weight()).t()),
        };
        logits.unflatten(0, [-1, self.length as i64])
    }
}

struct Block {
    heads: usize,
    width: usize,
    length: usize,
    norm1: LayerNorm,
    qkv: Linear,
    joined: Linear,
    norm2: LayerNorm,
    wide: Linear,
    narrow: Linear,
}

impl Module for Block {
    #[track_caller]
    fn forward<'t>(&self, x: Tensor<'t>) -> Tensor<'t> {
        let qkv = x.apply(&self.norm1).apply(&self.qkv).unflatten(0, [-1, self.length as i64]);
        let attended = qkv.self_attention(self.heads, true, Mask::None).reshape([-1, self.width as i64]);
        let x = x + attended.apply(&self.joined);
        x + x.apply(&self.norm2).apply(&self.wide).gelu_tanh().apply(&self.narrow)
    }
}
