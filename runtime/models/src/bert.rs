//! BERT (Devlin et al. 2019): an encoder of texts that reads in both directions.

use slabwise::nn::{Embedding, LayerNorm, Linear, Module};
use slabwise::params::{Init, Param, Scope};
use slabwise::tensor::{Mask, Tensor};

use super::attention::{SelfAttention, heads_of, length_of};

/// The sizes of a BERT. Its parameters have the names of the `transformers` library:
/// `embeddings.word_embeddings.weight`, `encoder.layer.0.attention.self.query.weight`; those of
/// the masked language model `bert.embeddings…` and `cls.predictions.transform.dense.weight`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bert {
    /// Blocks.
    pub layers: usize,
    /// The width of a token's vector.
    pub width: usize,
    /// Attention heads in a block; they divide the width equally.
    pub heads: usize,
    /// The width between the two products of a block's second half.
    pub inner: usize,
    /// Tokens in a sequence of training.
    pub length: usize,
    /// Positions that have a vector, at least as many as tokens.
    pub positions: usize,
    /// Different tokens.
    pub vocabulary: usize,
    /// Kinds of segments.
    pub kinds: usize,
}

impl Bert {
    /// BERT-base: 12 blocks of width 768, here on sequences of 128 of its 30522 tokens.
    pub const BASE: Bert = Bert {
        layers: 12,
        width: 768,
        heads: 12,
        inner: 3072,
        length: 128,
        positions: 512,
        vocabulary: 30522,
        kinds: 2,
    };
    /// The encoder of all-MiniLM-L6-v2: 6 blocks of width 384.
    pub const MINI_LM: Bert = Bert {
        layers: 6,
        width: 384,
        heads: 12,
        inner: 1536,
        ..Bert::BASE
    };

    /// Declares the weights of the encoder alone.
    #[track_caller]
    pub fn encoder(&self, at: &Scope) -> BertEncoder {
        let &Bert { width: d, .. } = self;
        let heads = heads_of(at, d, self.heads);
        let (embeddings, layer) = (at / "embeddings", at / "encoder" / "layer");
        let table =
            |name: &str, count: usize| Embedding::with_std(&embeddings / name, count, d, 0.02);
        let block = |i: usize| {
            let at = &layer / &i.to_string();
            let attention = &at / "attention";
            Block {
                attention: SelfAttention::new(
                    &(&attention / "self"),
                    &attention / "output" / "dense",
                    d,
                    heads,
                    self.length,
                ),
                norm1: norm(&attention / "output" / "LayerNorm", d),
                wide: Linear::new(&at / "intermediate" / "dense", d, self.inner),
                narrow: Linear::new(&at / "output" / "dense", self.inner, d),
                norm2: norm(&at / "output" / "LayerNorm", d),
            }
        };
        BertEncoder {
            sizes: *self,
            words: table("word_embeddings", self.vocabulary),
            positions: table("position_embeddings", self.positions),
            kinds: table("token_type_embeddings", self.kinds),
            norm: norm(&embeddings / "LayerNorm", d),
            blocks: (0..self.layers).map(block).collect(),
        }
    }

    /// Declares the weights of the masked language model: tokens `[n, length]` → logits of each
    /// token `[n, length, vocabulary]`. The head uses the weight of the embedding.
    #[track_caller]
    pub fn layers(&self, at: &Scope) -> impl Module + use<> {
        let (cls, d) = (at / "cls" / "predictions", self.width);
        MaskedLm {
            encoder: self.encoder(&(at / "bert")),
            dense: Linear::new(&cls / "transform" / "dense", d, d),
            norm: norm(&cls / "transform" / "LayerNorm", d),
            bias: cls.param("bias", (self.vocabulary,), Init::Constant(0.0)),
        }
    }
}

/// The layer norm of BERT, with ε = 10⁻¹².
#[track_caller]
fn norm(at: Scope, d: usize) -> LayerNorm {
    LayerNorm::new(at, d).eps(1e-12)
}

/// The encoder of a [`Bert`]: tokens `[n, length]` (i32) → a vector for each token `[n, length,
/// width]`, for texts of up to as many tokens as there are positions.
///
/// ```
/// # use slabwise::prelude::*;
/// # use slabwise_models::Bert;
/// # let params = Params::seeded(0);
/// let small = Bert { layers: 1, width: 8, heads: 2, inner: 16, length: 5, ..Bert::MINI_LM };
/// // Published files have the prefix "bert.", or get it by the rules of their layout.
/// let encoder = small.encoder(&(&params.root() / "bert"));
/// let trace = Trace::inference();
/// let tokens = trace.input("tokens", I32, (3, 5));
/// // False where a text has ended.
/// let present = trace.input("present", Bool, (3, 5));
/// let vectors = encoder.encode(tokens, None, Some(present)).mean_where(present);
/// # assert_eq!((vectors.len(0), vectors.len(1)), (Some(3), Some(8)));
/// ```
pub struct BertEncoder {
    sizes: Bert,
    words: Embedding,
    positions: Embedding,
    kinds: Embedding,
    norm: LayerNorm,
    blocks: Vec<Block>,
}

/// The vectors of the tokens of a batch of texts, in one row: `[n·length, width]`.
#[derive(Clone, Copy, Debug)]
pub struct Encoded<'t> {
    rows: Tensor<'t>,
    length: usize,
}

impl<'t> Encoded<'t> {
    /// A vector for each token: `[n, length, width]`.
    pub fn tokens(self) -> Tensor<'t> {
        self.rows.unflatten(0, [-1, self.length as i64])
    }

    /// The mean of the vectors of the tokens that are present (truth values `[n, length]`):
    /// `[n, width]`, as sentence embeddings are made; zeros of a text without any.
    #[track_caller]
    pub fn mean_where(self, present: Tensor<'t>) -> Tensor<'t> {
        if present.len(1) != Some(self.length) {
            return present.mistake(format!(
                "mean_where {present:?}: truth values [n, {}], one for each token, are needed",
                self.length
            ));
        }
        let weights = present.cast(slabwise::DType::F32).unsqueeze(2);
        // Vectors of a text without a present token are NaN.
        let counted = weights.gt(0.0).select(self.tokens() * weights, 0.0);
        let sum = counted.sum_over(1);
        sum / weights.sum_over(1).maximum(1e-9)
    }
}

impl BertEncoder {
    /// The vectors of tokens `[n, length]`, given the kind of the segment of each (i32 `[n,
    /// length]`, 0 unless given), and whether it is present (truth values `[n, length]`): absent
    /// tokens are seen by none.
    #[track_caller]
    pub fn encode<'t>(
        &self,
        tokens: Tensor<'t>,
        kinds: Option<Tensor<'t>>,
        present: Option<Tensor<'t>>,
    ) -> Encoded<'t> {
        let Bert {
            positions, width, ..
        } = self.sizes;
        let length = match length_of("bert", tokens, ("positions", positions)) {
            Ok(length) => length,
            Err(rows) => return Encoded { rows, length: 1 },
        };
        let trace = tokens.trace();
        let places = trace.param(self.positions.weight()).slice(0, ..length);
        let kinds = match kinds {
            Some(kinds) => kinds.apply(&self.kinds),
            None => trace.param(self.kinds.weight()).slice(0, ..1),
        };
        let x = tokens.apply(&self.words) + kinds + places;
        // Tokens of all texts in one row, as products have them, so that the operations after a
        // product are fused with it.
        let x = x.reshape([-1, width as i64]).apply(&self.norm);
        // [n, 1, 1, length]: alike for heads and queries.
        let mask = present.map_or(Mask::None, |seen| {
            Mask::Seen(seen.unsqueeze(1).unsqueeze(1))
        });
        let over = |x, block: &Block| block.over(x, length, mask);
        let rows = self.blocks.iter().fold(x, over);
        Encoded { rows, length }
    }
}

impl Module for BertEncoder {
    #[track_caller]
    fn forward<'t>(&self, x: Tensor<'t>) -> Tensor<'t> {
        self.encode(x, None, None).tokens()
    }
}

struct MaskedLm {
    encoder: BertEncoder,
    dense: Linear,
    norm: LayerNorm,
    bias: Param,
}

impl Module for MaskedLm {
    #[track_caller]
    fn forward<'t>(&self, x: Tensor<'t>) -> Tensor<'t> {
        let Encoded { rows, length } = self.encoder.encode(x, None, None);
        let x = rows.apply(&self.dense).gelu().apply(&self.norm);
        let words = x.trace().param(self.encoder.words.weight());
        (x.matmul(words.t()) + &self.bias).unflatten(0, [-1, length as i64])
    }
}

/// Norms stand after the additions.
struct Block {
    attention: SelfAttention,
    norm1: LayerNorm,
    wide: Linear,
    narrow: Linear,
    norm2: LayerNorm,
}

impl Block {
    fn over<'t>(&self, x: Tensor<'t>, length: usize, mask: Mask<'t>) -> Tensor<'t> {
        let x = (self.attention.masked(x, length, mask) + x).apply(&self.norm1);
        let wide = x.apply(&self.wide).gelu();
        (wide.apply(&self.narrow) + x).apply(&self.norm2)
    }
}
