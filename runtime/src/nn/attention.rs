//! Attention over sequences.

use std::panic::Location;

use super::{KvCache, Linear, Module};
use crate::params::{Init, Param, Scope};
use crate::tensor::{AttentionOptions, Mask, Rope, Tensor};

/// Attention with several heads (Vaswani et al. 2017): `[batch, length, width] → [batch, length,
/// width]`, of a sequence to itself ([`masked`](MultiHeadAttention::masked)) or to another
/// ([`cross`](MultiHeadAttention::cross)).
///
/// Its parameters are `in_proj_weight` `[3·width, width]`, `in_proj_bias` `[3·width]` (query, key
/// and value, one after the other), `out_proj.weight` `[width, width]` and `out_proj.bias`
/// `[width]`. If keys or values are made from sequences of another width, `q_proj_weight` `[width,
/// width]`, `k_proj_weight` `[width, of keys]` and `v_proj_weight` `[width, of values]` are in the
/// place of `in_proj_weight`.
#[derive(Clone, Debug)]
pub struct MultiHeadAttention {
    at: Scope,
    width: usize,
    heads: usize,
    causal: bool,
    dropout: f32,
    projections: Projections,
    in_bias: Option<Param>,
    out_weight: Param,
    out_bias: Option<Param>,
}

/// The weights that make queries, keys and values.
#[derive(Clone, Debug)]
enum Projections {
    Joined(Param),
    Apart([Param; 3]),
}

impl MultiHeadAttention {
    /// Declares the parameters. The heads divide the width equally.
    #[track_caller]
    pub fn new(at: Scope, width: usize, heads: usize) -> Self {
        let three = width.saturating_mul(3);
        let weight = at.param(
            "in_proj_weight",
            (three, width),
            Init::xavier_uniform(width, three),
        );
        MultiHeadAttention::with_projections(at, width, heads, Projections::Joined(weight))
    }

    /// Declares the parameters for keys and values that are made from sequences of these widths.
    #[track_caller]
    pub fn of_widths(
        at: Scope,
        width: usize,
        heads: usize,
        of_keys: usize,
        of_values: usize,
    ) -> Self {
        let weights = [
            ("q_proj_weight", width),
            ("k_proj_weight", of_keys),
            ("v_proj_weight", of_values),
        ]
        .map(|(name, from)| at.param(name, (width, from), Init::xavier_uniform(from, width)));
        MultiHeadAttention::with_projections(at, width, heads, Projections::Apart(weights))
    }

    #[track_caller]
    fn with_projections(at: Scope, width: usize, heads: usize, projections: Projections) -> Self {
        if heads == 0 || !width.is_multiple_of(heads) {
            at.mistake(format!(
                "attention: a width of {width} does not divide into {heads} heads"
            ));
        }
        let out = &at / "out_proj";
        MultiHeadAttention {
            width,
            heads: heads.max(1),
            causal: false,
            dropout: 0.0,
            projections,
            in_bias: Some(at.param(
                "in_proj_bias",
                (width.saturating_mul(3),),
                Init::Constant(0.0),
            )),
            out_weight: out.param("weight", (width, width), Init::kaiming_uniform(width)),
            out_bias: Some(out.param("bias", (width,), Init::Constant(0.0))),
            at,
        }
    }

    /// Each position sees itself and the earlier ones only.
    pub fn causal(mut self) -> Self {
        self.causal = true;
        self
    }

    /// With this probability of dropout of attention weights; see [`AttentionOptions::dropout`].
    pub fn attention_dropout(mut self, p: f32) -> Self {
        self.dropout = p;
        self
    }

    /// Without both biases.
    pub fn without_bias(mut self) -> Self {
        if let Some(bias) = self.in_bias.take() {
            self.at.retract(&bias);
        }
        if let Some(bias) = self.out_bias.take() {
            (&self.at / "out_proj").retract(&bias);
        }
        self
    }

    fn options<'t>(&self, mask: Mask<'t>) -> AttentionOptions<'t> {
        let options = AttentionOptions::new().mask(mask).dropout(self.dropout);
        match self.causal {
            true => options.causal(),
            false => options,
        }
    }

    /// The result under a mask, on top of which a causal layer hides later positions.
    #[track_caller]
    pub fn masked<'t>(&self, x: Tensor<'t>, mask: Mask<'t>) -> Tensor<'t> {
        let Projections::Joined(weight) = &self.projections else {
            return self.cross(x, x, x, mask);
        };
        self.called(x, || {
            let qkv = x.matmul(x.trace().param(weight).t());
            let qkv = match &self.in_bias {
                Some(bias) => qkv + bias,
                None => qkv,
            };
            self.out(qkv.self_attention_with(self.heads, self.options(mask)))
        })
    }

    /// The result for queries made from `x`, `[batch, length, width]`, keys and values made from
    /// `keys` and `values`, `[batch, other length, …]`, under a mask that broadcasts to `[batch,
    /// heads, length, other length]`.
    #[track_caller]
    pub fn cross<'t>(
        &self,
        x: Tensor<'t>,
        keys: Tensor<'t>,
        values: Tensor<'t>,
        mask: Mask<'t>,
    ) -> Tensor<'t> {
        self.called(x, || {
            let made = self.made(x, keys, values);
            let joined = made[0].attention_with(made[1], made[2], self.options(mask));
            self.out(joined.join_heads())
        })
    }

    /// Queries, keys and values by heads.
    #[track_caller]
    fn made<'t>(&self, x: Tensor<'t>, keys: Tensor<'t>, values: Tensor<'t>) -> Vec<Tensor<'t>> {
        let trace = x.trace();
        let weights: Vec<Tensor<'t>> = match &self.projections {
            Projections::Joined(weight) => trace.param(weight).split(0, 3),
            Projections::Apart(weights) => weights.iter().map(|w| trace.param(w)).collect(),
        };
        let biases = self
            .in_bias
            .as_ref()
            .map(|bias| trace.param(bias).split(0, 3));
        [x, keys, values]
            .into_iter()
            .enumerate()
            .map(|(i, x)| {
                let x = x.require_rank("attention", 3);
                let y = x.matmul(weights[i].t());
                let y = biases.as_ref().map_or(y, |biases| y + biases[i]);
                y.split_heads(self.heads)
            })
            .collect()
    }

    /// The result for the tokens that follow those of a cache, `[batch, new tokens, width]` → the
    /// same shape. Appends their keys and values. Each token sees itself and the earlier ones.
    #[track_caller]
    pub fn cached<'t>(&self, x: Tensor<'t>, cache: &KvCache<'t>) -> Tensor<'t> {
        self.called(x, || {
            let made = self.made(x, x, x);
            let joined = cache.attend(made[0], made[1], made[2], self.options(Mask::None));
            self.out(joined.join_heads())
        })
    }

    /// Records `work` as that of this layer.
    #[track_caller]
    fn called<'t>(&self, x: Tensor<'t>, work: impl FnOnce() -> Tensor<'t>) -> Tensor<'t> {
        let (path, at) = (self.at.path(), Location::caller());
        x.trace().call_layer(path, at, work)
    }

    #[track_caller]
    fn out<'t>(&self, joined: Tensor<'t>) -> Tensor<'t> {
        let y = joined.matmul(joined.trace().param(&self.out_weight).t());
        match &self.out_bias {
            Some(bias) => y + bias,
            None => y,
        }
    }

    /// The width of its sequences.
    pub fn width(&self) -> usize {
        self.width
    }
}

impl Module for MultiHeadAttention {
    #[track_caller]
    fn forward<'t>(&self, x: Tensor<'t>) -> Tensor<'t> {
        self.masked(x, Mask::None)
    }

    fn path(&self) -> &str {
        self.at.path()
    }
}

/// Causal self-attention whose keys and values may have fewer heads than the queries (Ainslie et
/// al. 2023), with rotary positions: the attention of Llama, Mistral, Qwen and Gemma. `[batch,
/// length, width] → [batch, length, width]`.
///
/// Its parameters are `q_proj.weight` `[heads·head width, width]`, `k_proj.weight` and
/// `v_proj.weight` `[key heads·head width, width]` and `o_proj.weight` `[width, heads·head width]`.
///
/// ```
/// use slabwise::nn::GroupedQueryAttention;
/// use slabwise::tensor::Rope;
/// # use slabwise::prelude::*;
/// # let params = Params::seeded(0);
/// # let trace = Trace::inference();
/// # let x = trace.input("x", F32, (2, 16, 64));
/// let place = &params.root() / "self_attn";
/// let attention = GroupedQueryAttention::new(place, 64, 8, 2).rope(Rope::new(8).base(5e5));
/// let y = x.apply(&attention);
/// ```
#[derive(Clone, Debug)]
pub struct GroupedQueryAttention {
    at: Scope,
    width: usize,
    heads: usize,
    key_heads: usize,
    head_width: usize,
    causal: bool,
    rope: Option<Rope>,
    window: Option<usize>,
    scale: Option<f32>,
    soft_cap: Option<f32>,
    dropout: f32,
    query: Linear,
    key: Linear,
    value: Linear,
    out: Linear,
}

impl GroupedQueryAttention {
    /// Declares the parameters, without biases. The heads divide the width equally, and the heads
    /// of keys those of queries.
    #[track_caller]
    pub fn new(at: Scope, width: usize, heads: usize, key_heads: usize) -> Self {
        if heads == 0 || !width.is_multiple_of(heads) {
            at.mistake(format!(
                "attention: a width of {width} does not divide into {heads} heads"
            ));
        }
        let head_width = width / heads.max(1);
        GroupedQueryAttention::with_head_width(at, width, heads, key_heads, head_width)
    }

    /// Declares the parameters, without biases, for heads of this width.
    #[track_caller]
    pub fn with_head_width(
        at: Scope,
        width: usize,
        heads: usize,
        key_heads: usize,
        head_width: usize,
    ) -> Self {
        if key_heads == 0 || !heads.is_multiple_of(key_heads) {
            at.mistake(format!(
                "attention: {heads} heads of queries cannot share {key_heads} of keys equally"
            ));
        }
        let [all, shared] = [heads, key_heads].map(|n| n.saturating_mul(head_width));
        GroupedQueryAttention {
            width,
            heads: heads.max(1),
            key_heads: key_heads.max(1),
            head_width,
            causal: true,
            rope: None,
            window: None,
            scale: None,
            soft_cap: None,
            dropout: 0.0,
            query: Linear::without_bias(&at / "q_proj", width, all),
            key: Linear::without_bias(&at / "k_proj", width, shared),
            value: Linear::without_bias(&at / "v_proj", width, shared),
            out: Linear::without_bias(&at / "o_proj", all, width),
            at,
        }
    }

    /// With biases of queries, keys and values, initially uniform in ±1/√width.
    #[track_caller]
    pub fn with_bias(mut self) -> Self {
        let [all, shared] = [self.heads, self.key_heads].map(|n| n.saturating_mul(self.head_width));
        self.query = Linear::new(&self.at / "q_proj", self.width, all);
        self.key = Linear::new(&self.at / "k_proj", self.width, shared);
        self.value = Linear::new(&self.at / "v_proj", self.width, shared);
        self
    }

    /// With rotary positions of queries and keys.
    pub fn rope(mut self, rope: Rope) -> Self {
        self.rope = Some(rope);
        self
    }

    /// Each position sees only those less than `positions` away.
    pub fn window(mut self, positions: usize) -> Self {
        self.window = Some(positions);
        self
    }

    /// With this factor of the scores instead of 1/√(head width).
    pub fn scale(mut self, scale: f32) -> Self {
        self.scale = Some(scale);
        self
    }

    /// With scores limited to ±`cap`.
    pub fn soft_cap(mut self, cap: f32) -> Self {
        self.soft_cap = Some(cap);
        self
    }

    /// With this probability of dropout of attention weights; see [`AttentionOptions::dropout`].
    pub fn attention_dropout(mut self, p: f32) -> Self {
        self.dropout = p;
        self
    }

    /// Each position sees the later ones, too.
    pub fn both_ways(mut self) -> Self {
        self.causal = false;
        self
    }

    fn options<'t>(&self, mask: Mask<'t>) -> AttentionOptions<'t> {
        let mut options = AttentionOptions::new().mask(mask).dropout(self.dropout);
        if self.causal {
            options = options.causal();
        }
        if let Some(window) = self.window {
            options = options.window(window);
        }
        if let Some(scale) = self.scale {
            options = options.scale(scale);
        }
        match self.soft_cap {
            Some(cap) => options.soft_cap(cap),
            None => options,
        }
    }

    /// Queries, keys and values of `x` at `positions` (i32 `[length]` or `[batch, 1, length]`), by
    /// heads.
    #[track_caller]
    fn made<'t>(&self, x: Tensor<'t>, positions: Option<Tensor<'t>>) -> [Tensor<'t>; 3] {
        let x = x.require_rank("attention", 3);
        let [q, k, v] = [
            (&self.query, self.heads),
            (&self.key, self.key_heads),
            (&self.value, self.key_heads),
        ]
        .map(|(layer, heads)| x.apply(layer).split_heads(heads));
        match (&self.rope, positions) {
            (Some(rope), Some(positions)) => [q.rope(positions, rope), k.rope(positions, rope), v],
            _ => [q, k, v],
        }
    }

    /// The result under a mask that broadcasts to `[batch, heads, length, length]`. `positions`
    /// (i32 `[length]` or `[batch, 1, length]`) are those of the rotary embedding.
    #[track_caller]
    pub fn masked<'t>(&self, x: Tensor<'t>, positions: Tensor<'t>, mask: Mask<'t>) -> Tensor<'t> {
        self.called(x, || {
            let [q, k, v] = self.made(x, Some(positions));
            q.attention_with(k, v, self.options(mask))
                .join_heads()
                .apply(&self.out)
        })
    }

    /// The result for the tokens that follow those of a cache, whose states have the heads of keys:
    /// `[batch, new tokens, width]` → the same shape. Appends their keys and values.
    #[track_caller]
    pub fn cached<'t>(&self, x: Tensor<'t>, cache: &KvCache<'t>) -> Tensor<'t> {
        self.called(x, || {
            let x = x
                .require_rank("attention", 3)
                .require_fixed_axis("attention", 1);
            let positions = x.len(1).map(|count| cache.positions(count));
            let [q, k, v] = self.made(x, positions);
            cache
                .attend(q, k, v, self.options(Mask::None))
                .join_heads()
                .apply(&self.out)
        })
    }

    /// Records `work` as that of this layer.
    #[track_caller]
    fn called<'t>(&self, x: Tensor<'t>, work: impl FnOnce() -> Tensor<'t>) -> Tensor<'t> {
        let (path, at) = (self.at.path(), Location::caller());
        x.trace().call_layer(path, at, work)
    }
}

impl Module for GroupedQueryAttention {
    #[track_caller]
    fn forward<'t>(&self, x: Tensor<'t>) -> Tensor<'t> {
        let x = x.require_rank("attention", 3);
        let positions = self.rope.and_then(|_| x.positions_along(1));
        let [q, k, v] = self.made(x, positions);
        q.attention_with(k, v, self.options(Mask::None))
            .join_heads()
            .apply(&self.out)
    }

    fn path(&self) -> &str {
        self.at.path()
    }
}
