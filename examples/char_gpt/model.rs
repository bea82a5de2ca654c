//! A small GPT that reads a whole text at once, for training, or one token after the other, for
//! generation.

use slabwise::nn::{Embedding, LayerNorm, Linear};
use slabwise::prelude::*;

/// The sizes of the model.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    /// The number of different tokens.
    pub vocabulary: usize,
    /// The length of the context, in tokens.
    pub length: usize,
    /// The width of a token's vector.
    pub width: usize,
    /// Attention heads in a block.
    pub heads: usize,
    /// Blocks.
    pub layers: usize,
}

/// A decoder-only transformer with norms before its layers and learned positions.
pub struct Gpt {
    sizes: Sizes,
    tokens: Embedding,
    places: Embedding,
    blocks: Vec<Block>,
    norm: LayerNorm,
    head: Linear,
}

impl Gpt {
    /// Declares the weights.
    pub fn new(at: &Scope, sizes: Sizes) -> Self {
        let d = sizes.width;
        Gpt {
            sizes,
            tokens: Embedding::with_std(at / "tokens", sizes.vocabulary, d, 0.02),
            places: Embedding::with_std(at / "places", sizes.length, d, 0.02),
            blocks: (0..sizes.layers)
                .map(|i| Block::new(&(at / "blocks" / &i.to_string()), sizes))
                .collect(),
            norm: LayerNorm::new(at / "norm", d),
            head: Linear::without_bias(at / "head", d, sizes.vocabulary),
        }
    }

    /// Logits of the next token, in steps of one token: token `[1]` at its place `[1]` (i32, from
    /// 0) → logits `[1, vocabulary]`. Keys and values of the tokens before stay in the states
    /// `cache.<block>.keys` and `.values`; they are those of the last token fed at each earlier
    /// place, so that a new text begins at place 0.
    pub fn next<'t>(&self, token: Tensor<'t>, place: Tensor<'t>) -> Tensor<'t> {
        let x = token.apply(&self.tokens) + place.apply(&self.places);
        let x = self
            .blocks
            .iter()
            .enumerate()
            .fold(x, |x, (i, block)| block.next(x, place, i));
        x.apply(&self.norm).apply(&self.head)
    }
}

impl Module for Gpt {
    /// Tokens `[n, length]` → logits of the token that follows each, `[n·length, vocabulary]`.
    fn forward<'t>(&self, tokens: Tensor<'t>) -> Tensor<'t> {
        let places = tokens.trace().param(self.places.weight());
        let x = (tokens.apply(&self.tokens) + places).reshape([-1, self.sizes.width as i64]);
        self.blocks
            .iter()
            .fold(x, |x, block| x.apply(block))
            .apply(&self.norm)
            .apply(&self.head)
    }
}

struct Block {
    sizes: Sizes,
    norm1: LayerNorm,
    qkv: Linear,
    joined: Linear,
    norm2: LayerNorm,
    wide: Linear,
    narrow: Linear,
}

impl Block {
    fn new(at: &Scope, sizes: Sizes) -> Self {
        let d = sizes.width;
        Block {
            sizes,
            norm1: LayerNorm::new(at / "norm1", d),
            qkv: Linear::new(at / "qkv", d, 3 * d),
            joined: Linear::new(at / "joined", d, d),
            norm2: LayerNorm::new(at / "norm2", d),
            wide: Linear::new(at / "wide", d, 4 * d),
            narrow: Linear::new(at / "narrow", 4 * d, d),
        }
    }

    /// One token `[1, width]`, which attends to those before it by their keys and values in the
    /// cache.
    fn next<'t>(&self, x: Tensor<'t>, place: Tensor<'t>, number: usize) -> Tensor<'t> {
        let (
            trace,
            Sizes {
                length,
                width,
                heads,
                ..
            },
        ) = (x.trace(), self.sizes);
        let places = trace.arange(length as i64);
        let here = places.equal(place).unsqueeze(1); // [length, 1]
        let qkv = x.apply(&self.norm1).apply(&self.qkv).split(1, 3);
        let [q, k, v] = [0, 1, 2].map(|i| qkv[i]);
        let remember = |name: &str, new: Tensor<'t>| {
            let cache = trace.state(
                &format!("cache.{number}.{name}"),
                F32,
                (length, width),
                Init::Constant(0.0),
            );
            let all = here.select(new, cache.value());
            cache.set(all);
            all
        };
        let (keys, values) = (remember("keys", k), remember("values", v));
        let per_head = |x: Tensor<'t>| x.unflatten(1, [heads as i64, -1]).transpose(0, 1); // [heads, …, width/heads]
        let seen = Mask::Seen(places.le(place));
        let attended = per_head(q).attention(per_head(keys), per_head(values), false, seen); // [heads, 1, width/heads]
        self.rest(x, attended.reshape([1, width as i64]))
    }

    /// The rest of a block, behind its attention.
    fn rest<'t>(&self, x: Tensor<'t>, attended: Tensor<'t>) -> Tensor<'t> {
        let x = x + attended.apply(&self.joined);
        x + x
            .apply(&self.norm2)
            .apply(&self.wide)
            .gelu_tanh()
            .apply(&self.narrow)
    }
}

impl Module for Block {
    /// One block over the tokens of all texts, in one row: `[n·length, width]` → the same.
    fn forward<'t>(&self, x: Tensor<'t>) -> Tensor<'t> {
        let Sizes {
            length,
            width,
            heads,
            ..
        } = self.sizes;
        let qkv = x
            .apply(&self.norm1)
            .apply(&self.qkv)
            .unflatten(0, [-1, length as i64]);
        self.rest(
            x,
            qkv.self_attention(heads, true, Mask::None)
                .reshape([-1, width as i64]),
        )
    }
}
