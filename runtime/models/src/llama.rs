//! A decoder in the manner of Llama (Touvron et al. 2023): grouped queries, rotary positions, gated
//! products, norms without means; and its generation token by token. Mistral, Qwen2 and Qwen3 differ
//! from it by fields of [`Llama`].

mod config;
mod gguf;

use slabwise::DType::I32;
use slabwise::nn::{Embedding, KvCache, Linear, Module, RmsNorm};
use slabwise::params::{Init, Scope};
use slabwise::tensor::{AttentionOptions, Rope, RopeScaling, Tensor};

use super::attention::{heads_of, length_of};

/// The sizes of a decoder of the family of Llama, Mistral, Qwen2 and Qwen3. Its parameters have the
/// names of published files: `model.embed_tokens.weight`, `model.layers.0.self_attn.q_proj.weight`,
/// `model.layers.0.mlp.gate_proj.weight`, `model.norm.weight`, `lm_head.weight`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Llama {
    /// Blocks.
    pub layers: usize,
    /// The width of a token's vector.
    pub width: usize,
    /// Attention heads of queries in a block; they divide the width equally, unless their own is
    /// given.
    pub heads: usize,
    /// Heads of keys and values, which divide those of queries equally.
    pub key_heads: usize,
    /// The width of a head; that of a token's vector divided by the heads unless given.
    pub head_width: Option<usize>,
    /// The products that make queries, keys and values add biases, as in Qwen2.
    pub biases: bool,
    /// Each head of queries and of keys is normalized before it is rotated, as in Qwen3.
    pub head_norms: bool,
    /// The positions that a token attends to, its own included, as in the first Mistral; all before
    /// it unless given.
    pub window: Option<usize>,
    /// The width between the products of a block's second half.
    pub inner: usize,
    /// Tokens in a sequence of training.
    pub length: usize,
    /// Different tokens.
    pub vocabulary: usize,
    /// The head uses the weight of the embedding.
    pub tied: bool,
    /// The base of the rotary positions.
    pub base: f32,
    /// The change of their frequencies for texts longer than those of the training.
    pub scaling: RopeScaling,
    /// ε of the norms.
    pub eps: f32,
}

impl Llama {
    /// Six blocks of width 288 as in the models that tell stories: 512 positions of 32000 tokens.
    pub const SMALL: Llama = Llama {
        layers: 6,
        width: 288,
        heads: 6,
        key_heads: 2,
        head_width: None,
        biases: false,
        head_norms: false,
        window: None,
        inner: 768,
        length: 256,
        vocabulary: 32000,
        tied: true,
        base: 1e4,
        scaling: RopeScaling::None,
        eps: 1e-5,
    };

    /// The width of a head.
    fn each(&self) -> usize {
        self.head_width
            .unwrap_or_else(|| self.width / self.heads.max(1))
    }

    /// These, if the heads fit; with other heads after a mistake.
    #[track_caller]
    fn with_checked_heads(mut self, at: &Scope) -> Llama {
        if self.head_width.is_none() {
            self.heads = heads_of(at, self.width, self.heads);
        }
        let (heads, keys, each) = (self.heads, self.key_heads, self.each());
        if keys == 0 || !heads.is_multiple_of(keys) {
            at.mistake(format!(
                "attention: {heads} heads of queries cannot share {keys} of keys equally"
            ));
            self.key_heads = heads;
        }
        if each == 0 || each % 2 == 1 {
            at.mistake(format!(
                "attention: {heads} heads of width {each} cannot be rotated, which takes an even width"
            ));
            self.head_width = Some(2);
        }
        self
    }

    /// The attention to at most `all` positions.
    fn attention<'t>(&self, all: usize) -> AttentionOptions<'t> {
        let options = AttentionOptions::new().causal();
        match self.window {
            Some(window) if window < all => options.window(window),
            _ => options,
        }
    }

    /// Declares the weights.
    #[track_caller]
    pub fn layers(&self, at: &Scope) -> Decoder {
        self.with_checked_heads(at).declared(at)
    }

    #[track_caller]
    fn declared(&self, at: &Scope) -> Decoder {
        let (root, d) = (at / "model", self.width);
        let norm_of = |at: Scope, width: usize| RmsNorm::new(at, width).eps(self.eps);
        let norm = |at: Scope| norm_of(at, d);
        let projection = |at: Scope, heads: usize| match self.biases {
            true => Linear::new(at, d, heads * self.each()),
            false => Linear::without_bias(at, d, heads * self.each()),
        };
        let block = |i: usize| {
            let at = &root / "layers" / &i.to_string();
            let attention = &at / "self_attn";
            let mlp = &at / "mlp";
            Block {
                sizes: *self,
                norm1: norm(&at / "input_layernorm"),
                query: projection(&attention / "q_proj", self.heads),
                key: projection(&attention / "k_proj", self.key_heads),
                value: projection(&attention / "v_proj", self.key_heads),
                head_norms: self.head_norms.then(|| {
                    ["q_norm", "k_norm"].map(|name| norm_of(&attention / name, self.each()))
                }),
                joined: Linear::without_bias(&attention / "o_proj", self.heads * self.each(), d),
                norm2: norm(&at / "post_attention_layernorm"),
                gate: Linear::without_bias(&mlp / "gate_proj", d, self.inner),
                up: Linear::without_bias(&mlp / "up_proj", d, self.inner),
                down: Linear::without_bias(&mlp / "down_proj", self.inner, d),
            }
        };
        Decoder {
            sizes: *self,
            tokens: Embedding::with_std(&root / "embed_tokens", self.vocabulary, d, 0.02),
            blocks: (0..self.layers).map(block).collect(),
            norm: norm(&root / "norm"),
            head: (!self.tied).then(|| Linear::without_bias(at / "lm_head", d, self.vocabulary)),
        }
    }
}

/// The layers of a [`Llama`]: tokens `[n, length]` (i32) → logits of the next token `[n, length,
/// vocabulary]`, of any fixed length.
///
/// ```
/// # use slabwise::prelude::*;
/// # use slabwise_models::{Llama, Sampling};
/// # let params = Params::seeded(0);
/// let sizes = Llama { layers: 1, width: 16, heads: 4, vocabulary: 30, ..Llama::SMALL };
/// let decoder = sizes.layers(&params.root());
/// // A program that reads one token of a text and gives the next, with room for 200.
/// let trace = Trace::inference().sampling();
/// let token = trace.input("token", I32, (1, 1));
/// let logits = decoder.continued(token, 200);
/// let next = Sampling::new().temperature(0.8).top_k(20).top_p(0.95).of(logits);
/// # let mut session = Session::new(Device::Cpu, params)?;
/// let program = session.compile(&trace, [next])?;
/// # Ok::<(), slabwise::Error>(())
/// ```
pub struct Decoder {
    sizes: Llama,
    tokens: Embedding,
    blocks: Vec<Block>,
    norm: RmsNorm,
    head: Option<Linear>,
}

/// The number of tokens that the caches hold: an i32 scalar, a state of the session. Setting it to 0
/// begins a new text.
pub const CACHED: &str = "cache.length";

impl Decoder {
    /// Logits `[n, vocabulary]` of the token that follows `tokens` `[n, new]` (i32), which follow
    /// those that earlier runs of this or another program of the session were given. Their keys and
    /// values stay in the states `cache.<block>.keys` and `.values`, `[n, key heads, capacity, head
    /// width]`, of which a run writes the new positions alone; their number is the state [`CACHED`].
    /// A run beyond the capacity fails before it has changed anything.
    #[track_caller]
    pub fn continued<'t>(&self, tokens: Tensor<'t>, capacity: usize) -> Tensor<'t> {
        let (trace, d) = (tokens.trace(), self.sizes.width as i64);
        let new = match length_of("llama", tokens, ("capacity", capacity)) {
            Ok(new) => new,
            Err(mistaken) => return mistaken,
        };
        let Some(batch) = tokens.len(0) else {
            return tokens.mistake(format!(
                "llama of {tokens:?}: a cache is of a fixed number of texts"
            ));
        };
        let lengths = [batch, self.sizes.key_heads, capacity, self.sizes.each()];
        let caches = KvCache::stack(trace, "cache", self.blocks.len(), lengths);
        let past = trace.state(CACHED, I32, (), Init::Constant(0.0)).last();
        let positions = trace.arange(new) + past;
        let x = tokens.apply(&self.tokens).reshape([-1, d]);
        let rows = self
            .blocks
            .iter()
            .zip(&caches)
            .fold(x, |x, (block, cache)| {
                let options = self.sizes.attention(capacity).past_of_run(past);
                block.over(x, new, positions, options, |[keys, values]| {
                    let (keys, values) = cache.append(keys, values);
                    [keys, values]
                })
            });
        // Only the last token's.
        let last = rows.unflatten(0, [-1, new as i64]).slice(1, new - 1..new);
        self.logits(last.squeeze(1))
    }

    /// Logits of rows `[…, width]`.
    #[track_caller]
    fn logits<'t>(&self, rows: Tensor<'t>) -> Tensor<'t> {
        let x = rows.apply(&self.norm);
        match &self.head {
            Some(head) => x.apply(head),
            None => x.matmul(x.trace().param(self.tokens.weight()).t()),
        }
    }
}

impl Module for Decoder {
    #[track_caller]
    fn forward<'t>(&self, x: Tensor<'t>) -> Tensor<'t> {
        let length = match length_of("llama", x, ("length", usize::MAX)) {
            Ok(length) => length,
            Err(mistaken) => return mistaken,
        };
        let positions = x.trace().arange(length);
        // Tokens of all sequences in one row, as products have them, so that the operations after a
        // product are fused with it.
        let x = x.apply(&self.tokens).reshape([-1, self.sizes.width as i64]);
        let rows = self.blocks.iter().fold(x, |x, block| {
            let options = self.sizes.attention(length);
            block.over(x, length, positions, options, |parts| parts)
        });
        self.logits(rows).unflatten(0, [-1, length as i64])
    }
}

struct Block {
    sizes: Llama,
    norm1: RmsNorm,
    query: Linear,
    key: Linear,
    value: Linear,
    /// Of queries and of keys.
    head_norms: Option<[RmsNorm; 2]>,
    joined: Linear,
    norm2: RmsNorm,
    gate: Linear,
    up: Linear,
    down: Linear,
}

impl Block {
    /// The block over rows of `length` tokens of each sequence at these positions; `all` makes all
    /// keys and values of the new ones.
    #[track_caller]
    fn over<'t>(
        &self,
        x: Tensor<'t>,
        length: usize,
        positions: Tensor<'t>,
        options: AttentionOptions<'t>,
        all: impl FnOnce([Tensor<'t>; 2]) -> [Tensor<'t>; 2],
    ) -> Tensor<'t> {
        let Llama {
            heads, key_heads, ..
        } = self.sizes;
        let each = self.sizes.each();
        let rope = Rope::new(each)
            .base(self.sizes.base)
            .scaling(self.sizes.scaling);
        let y = x.apply(&self.norm1);
        let split = |part: &Linear, heads: usize| {
            y.apply(part)
                .reshape([-1, length as i64, heads as i64, each as i64])
        };
        let (q, k) = (split(&self.query, heads), split(&self.key, key_heads));
        let [q, k] = match &self.head_norms {
            Some([of_queries, of_keys]) => [q.apply(of_queries), k.apply(of_keys)],
            None => [q, k],
        }
        .map(|x| x.transpose(1, 2).rope(positions, &rope));
        let [k, v] = all([k, split(&self.value, key_heads).transpose(1, 2)]);
        let attended = q
            .attention_with(k, v, options)
            .transpose(1, 2)
            .reshape([-1, (heads * each) as i64]);
        let x = x + attended.apply(&self.joined);
        let y = x.apply(&self.norm2);
        let inner = y.apply(&self.gate).silu() * y.apply(&self.up);
        x + inner.apply(&self.down)
    }
}
