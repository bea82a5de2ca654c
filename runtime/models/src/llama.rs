//! A decoder in the manner of Llama (Touvron et al. 2023): grouped queries, rotary positions, gated
//! products, norms without means; and its generation token by token.

use slabwise::DType::I32;
use slabwise::nn::{Embedding, KvCache, Linear, Module, RmsNorm};
use slabwise::params::{Init, Scope};
use slabwise::tensor::{AttentionOptions, Rope, RopeScaling, Tensor};
use slabwise::trace::Key;
use slabwise::weights::{Weights, WeightsError};

/// The sizes of a Llama. Its parameters have the names of published files:
/// `model.embed_tokens.weight`, `model.layers.0.self_attn.q_proj.weight`,
/// `model.layers.0.mlp.gate_proj.weight`, `model.norm.weight`, `lm_head.weight`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Llama {
    /// Blocks.
    pub layers: usize,
    /// The width of a token's vector.
    pub width: usize,
    /// Attention heads of queries in a block; they divide the width equally.
    pub heads: usize,
    /// Heads of keys and values, which divide those of queries equally.
    pub key_heads: usize,
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

/// The tensor of a GGUF file with the factors of rotary frequencies.
const FACTORS: &str = "rope_freqs.weight";

impl Llama {
    /// Six blocks of width 288 as in the models that tell stories: 512 positions of 32000 tokens.
    pub const SMALL: Llama = Llama {
        layers: 6,
        width: 288,
        heads: 6,
        key_heads: 2,
        inner: 768,
        length: 256,
        vocabulary: 32000,
        tied: true,
        base: 1e4,
        scaling: RopeScaling::None,
        eps: 1e-5,
    };

    /// The sizes of a model of the architecture `llama` in a GGUF file, from its metadata.
    ///
    /// ```no_run
    /// # use slabwise::prelude::*;
    /// # use slabwise_models::Llama;
    /// use slabwise::Quantization;
    /// use slabwise::weights::{Rules, Weights};
    ///
    /// let weights = Weights::open("model-Q4_0.gguf")?;
    /// let sizes = Llama::of_gguf(&weights)?;
    /// let params = Params::seeded(0);
    /// let four_bits = params.root().quantized(Quantization { bits: 4, block: 32 });
    /// let decoder = sizes.layers(&four_bits);
    /// let mut session = Session::new(Device::Cpu, params)?;
    /// session.load_from(&weights, &Rules::llama_gguf(sizes.heads, sizes.key_heads))?;
    /// # Ok::<(), slabwise::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`WeightsError::Unsupported`] if a size is missing or the model is one that [`Llama`] does
    /// not compute: of another architecture, with heads that do not divide the width equally, or
    /// with frequencies scaled neither linearly nor as those of Llama 3.1.
    pub fn of_gguf(weights: &Weights) -> Result<Llama, WeightsError> {
        let metadata = weights.metadata();
        let unsupported = |detail: String| WeightsError::Unsupported {
            path: weights.path().to_owned(),
            detail,
        };
        let text = |key: &str| metadata.get(key).map(String::as_str);
        if text("general.architecture") != Some("llama") {
            let found = text("general.architecture").unwrap_or("missing");
            let detail = format!("general.architecture is {found}, not llama");
            return Err(unsupported(detail));
        }
        let number = |key: &str| text(key).and_then(|text| text.parse::<f64>().ok());
        let size = |key: &str| {
            let key = format!("llama.{key}");
            let size = number(&key).filter(|n| n.fract() == 0.0 && (1.0..1e9).contains(n));
            let said = || format!("{key} is {}, not a size", text(&key).unwrap_or("missing"));
            size.map(|n| n as usize).ok_or_else(|| unsupported(said()))
        };
        let named = |wanted: &str| weights.names().find(|(name, ..)| *name == wanted);
        let vocabulary = match named("token_embd.weight") {
            Some((_, _, &[tokens, _])) => tokens as usize,
            _ => return Err(unsupported("token_embd.weight is not a matrix".into())),
        };
        let heads = size("attention.head_count")?;
        let of_keys = "llama.attention.head_count_kv";
        let base = number("llama.rope.freq_base").unwrap_or(1e4);
        let eps = number("llama.attention.layer_norm_rms_epsilon").unwrap_or(1e-5);
        let sizes = Llama {
            layers: size("block_count")?,
            width: size("embedding_length")?,
            heads,
            key_heads: match text(of_keys) {
                Some(_) => size("attention.head_count_kv")?,
                None => heads,
            },
            inner: size("feed_forward_length")?,
            length: size("context_length")?,
            vocabulary,
            tied: named("output.weight").is_none(),
            base: base as f32,
            scaling: RopeScaling::None,
            eps: eps as f32,
        };
        for key in ["llama.attention.key_length", "llama.rope.dimension_count"] {
            let each = text(key).is_none_or(|text| text == sizes.each().to_string());
            if !each || sizes.heads * sizes.each() != sizes.width {
                let (width, found) = (sizes.width, text(key).unwrap_or("missing"));
                let detail =
                    format!("{key} is {found}, and {heads} heads divide the width {width}");
                return Err(unsupported(detail));
            }
        }
        let last = format!("blk.{}.attn_norm.weight", sizes.layers - 1);
        if named(&last).is_none() {
            let detail = format!(
                "llama.block_count is {}, and there is no {last}",
                sizes.layers
            );
            return Err(unsupported(detail));
        }
        // The older key, and the one that a type belongs to. Without a type it is the linear one.
        let (of_type, of_factor) = ("llama.rope.scaling.type", "llama.rope.scaling.factor");
        let factor = number(of_factor).or_else(|| number("llama.rope.scale_linear"));
        let linear = match (text(of_type), factor) {
            (Some("none"), _) | (None | Some("linear"), None) => None,
            (None | Some("linear"), Some(factor)) if factor > 0.0 => {
                Some(factor as f32).filter(|&factor| factor != 1.0)
            }
            (None | Some("linear"), Some(factor)) => {
                return Err(unsupported(format!("{of_factor} is {factor}, not above 0")));
            }
            (Some(scaling), _) => {
                let detail = format!(
                    "{of_type} is {scaling}, and only linear scaling and the factors of Llama 3.1 are read"
                );
                return Err(unsupported(detail));
            }
        };
        let by_factors = match weights.read(FACTORS)? {
            Some(bytes) => sizes.scaling_of(&bytes).ok_or_else(|| {
                let detail = "the factors of rope_freqs.weight are not those of Llama 3.1";
                unsupported(detail.into())
            })?,
            None => RopeScaling::None,
        };
        let scaling = match (by_factors, linear) {
            (scaling, None) => scaling,
            (RopeScaling::None, Some(factor)) => RopeScaling::Linear(factor),
            (_, Some(factor)) => {
                let detail = format!("{of_factor} is {factor}, beside factors of frequencies");
                return Err(unsupported(detail));
            }
        };
        Ok(Llama { scaling, ..sizes })
    }

    /// The scaling that divides the frequencies by factors of f32, if it is that of Llama 3.1, whose
    /// parameters a GGUF file does not have.
    fn scaling_of(&self, factors: &[u8]) -> Option<RopeScaling> {
        let (factors, rest) = factors.as_chunks::<4>();
        let factors: Vec<f32> = factors.iter().map(|&b| f32::from_le_bytes(b)).collect();
        if !rest.is_empty() || factors.len() != self.each() / 2 {
            return None;
        }
        let factor = factors.iter().copied().fold(1.0, f32::max);
        let scaling = match factor > 1.0 {
            // The frequencies that turn least are divided by the whole factor.
            true => RopeScaling::Llama3 {
                factor,
                low: 1.0,
                high: 4.0,
                original: 8192,
            },
            false => RopeScaling::None,
        };
        let rope = Rope::new(self.each()).base(self.base);
        let ((plain, _), (scaled, _)) = (rope.frequencies(), rope.scaling(scaling).frequencies());
        let near = |((&plain, &scaled), &factor): ((&f32, &f32), &f32)| {
            (plain / scaled - factor).abs() <= 1e-4 * factor
        };
        let all = plain.iter().zip(&scaled).zip(&factors).all(near);
        all.then_some(scaling)
    }

    /// The width of a head.
    fn each(&self) -> usize {
        self.width / self.heads.max(1)
    }

    /// Declares the weights.
    #[track_caller]
    pub fn layers(&self, at: &Scope) -> Decoder {
        let (root, d) = (at / "model", self.width);
        let norm = |at: Scope| RmsNorm::new(at, d).eps(self.eps);
        let shared = self.key_heads * self.each();
        let block = |i: usize| {
            let at = &root / "layers" / &i.to_string();
            let attention = &at / "self_attn";
            let mlp = &at / "mlp";
            Block {
                sizes: *self,
                norm1: norm(&at / "input_layernorm"),
                query: Linear::without_bias(&attention / "q_proj", d, self.heads * self.each()),
                key: Linear::without_bias(&attention / "k_proj", d, shared),
                value: Linear::without_bias(&attention / "v_proj", d, shared),
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
/// vocabulary]`. The length is that of the sizes.
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
        let (Some(batch), Some(new)) = (tokens.len(0), tokens.len(1)) else {
            // No fixed number of tokens; the reshape names the shape.
            return tokens.reshape([-1, -1]);
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
                let options = AttentionOptions::new().causal().past_of_run(past);
                block.over(x, new, positions, options, |[keys, values]| {
                    let (keys, values) = cache.append(keys, values);
                    [keys, values]
                })
            });
        // Only the last token's.
        let last = rows
            .unflatten(0, [-1, new as i64])
            .slice(1, new.max(1) - 1..new);
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
        let Llama { width, length, .. } = self.sizes;
        let positions = x.trace().arange(length);
        // Tokens of all sequences in one row, as products have them, so that the operations after a
        // product are fused with it.
        let x = x.apply(&self.tokens).reshape([-1, width as i64]);
        let rows = self.blocks.iter().fold(x, |x, block| {
            let options = AttentionOptions::new().causal();
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
                .transpose(1, 2)
        };
        let q = split(&self.query, heads).rope(positions, &rope);
        let k = split(&self.key, key_heads).rope(positions, &rope);
        let [k, v] = all([k, split(&self.value, key_heads)]);
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

/// The choice of a token by its logits.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    temperature: f32,
    top_k: Option<usize>,
    top_p: Option<f32>,
}

impl Default for Sampling {
    fn default() -> Self {
        Sampling::new()
    }
}

impl Sampling {
    /// Any token, with the probability that the logits give it.
    pub fn new() -> Self {
        Sampling {
            temperature: 1.0,
            top_k: None,
            top_p: None,
        }
    }

    /// With logits divided by this: below 1 likely tokens become likelier. 0 chooses the likeliest.
    pub fn temperature(mut self, temperature: f32) -> Self {
        self.temperature = temperature;
        self
    }

    /// Among the `k` likeliest tokens.
    pub fn top_k(mut self, k: usize) -> Self {
        self.top_k = Some(k);
        self
    }

    /// Among the likeliest tokens that have this probability together (Holtzman et al. 2020), at
    /// the temperature and among those of [`Sampling::top_k`].
    pub fn top_p(mut self, p: f32) -> Self {
        self.top_p = Some(p);
        self
    }

    /// A token (i32) for each row of logits `[n, vocabulary]`. In a trace for
    /// [sampling](slabwise::Trace::sampling) it is another one in each run.
    #[track_caller]
    pub fn of<'t>(self, logits: Tensor<'t>) -> Tensor<'t> {
        match self.allowed(logits) {
            Some(logits) => logits.trace().categorical(logits, 1),
            None => logits.argmax(1),
        }
    }

    /// [`Sampling::of`] by the numbers of a key.
    #[track_caller]
    pub fn by<'t>(self, key: Key<'t>, logits: Tensor<'t>) -> Tensor<'t> {
        match self.allowed(logits) {
            Some(logits) => key.categorical(logits, 1),
            None => logits.argmax(1),
        }
    }

    /// The logits at the temperature, −∞ where a token is excluded; none if the likeliest token is
    /// chosen.
    #[track_caller]
    fn allowed<'t>(self, logits: Tensor<'t>) -> Option<Tensor<'t>> {
        if self.temperature == 0.0 || self.top_k == Some(1) {
            return None;
        }
        let logits = logits * (1.0 / self.temperature);
        if self.top_k.is_none() && self.top_p.is_none() {
            return Some(logits);
        }
        let all = logits.len(1);
        let k = self.top_k.or(all).unwrap_or(1);
        let k = k.clamp(1, all.unwrap_or(usize::MAX).max(1));
        // The likeliest first; a token less likely than the last one allowed is excluded.
        let (mut sorted, _) = logits.topk(k, 1);
        if let Some(p) = self.top_p {
            let shares = sorted.softmax(1);
            // The first is always allowed.
            let before = shares.cumsum(1) - shares;
            let first = sorted.trace().arange(k).equal(0);
            sorted = before.lt(p).or(first).select(sorted, f32::INFINITY);
        }
        let least = sorted.min_keep(1);
        Some(logits.ge(least).select(logits, f32::NEG_INFINITY))
    }
}
