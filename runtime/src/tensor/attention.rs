//! Scaled dot-product attention (Vaswani et al. 2017).

mod sequences;

use std::panic::Location;

use slabwise_kernels::dtype::{DType, Lane};
use slabwise_kernels::size::Size;
use slabwise_kernels::spec::{Dims, Scores};

use super::Tensor;
use super::elementwise::broadcast_shape;
use crate::graph::Graph;
use crate::ops::{self, GraphBuilder, NodeId};
use crate::trace::Trace;

/// The mask of attention: which keys each query sees.
#[derive(Clone, Copy, Debug)]
pub enum Mask<'t> {
    /// All to all.
    None,
    /// Truth values that broadcast to `[batch…, queries, keys]`: true positions are visible. A
    /// query with no visible key gives NaN.
    Seen(Tensor<'t>),
    /// f32 that broadcasts to `[batch…, queries, keys]`, added to the scores; −∞ hides a key of any
    /// score.
    Added(Tensor<'t>),
}

/// The part of the attention scores that is in memory at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Tiles {
    /// On the CPU, the scores of a few queries at a time, in one kernel, which skips keys that none
    /// of these queries sees; the backward pass recomputes them (Dao et al., "FlashAttention",
    /// 2022). The gradient of a mask is computed from all scores. With
    /// [dropout](AttentionOptions::dropout), and on devices without such a kernel: tiles of 128
    /// queries where there are 512 or more of them, else all scores at once.
    #[default]
    Auto,
    /// All scores `[batch…, queries, keys]`, saved for the backward pass.
    Whole,
    /// The scores of this many queries at a time, and in inference with `causal` only for the keys
    /// visible to them; the backward pass recomputes them, tile by tile. Each tile has separate
    /// kernels in the plan.
    Queries(usize),
}

impl<'t> Mask<'t> {
    fn map(self, change: impl FnOnce(Tensor<'t>) -> Tensor<'t>) -> Mask<'t> {
        match self {
            Mask::None => Mask::None,
            Mask::Seen(seen) => Mask::Seen(change(seen)),
            Mask::Added(bias) => Mask::Added(change(bias)),
        }
    }
}

impl Tiles {
    /// The queries in a tile, if there are to be tiles. A number of queries that is not fixed is
    /// not split.
    fn queries(self, all: Option<usize>) -> Option<usize> {
        let rows = match self {
            Tiles::Auto => all.filter(|&all| all >= 512).map(|_| 128)?,
            Tiles::Whole => return None,
            Tiles::Queries(rows) => rows,
        };
        (all? > rows).then_some(rows)
    }
}

/// The options of attention beyond queries, keys and values.
///
/// ```
/// use slabwise::tensor::AttentionOptions;
/// # use slabwise::prelude::*;
/// # let trace = Trace::inference();
/// # let q = trace.input("q", F32, (1, 8, 16, 64));
/// # let k = trace.input("k", F32, (1, 2, 16, 64));
/// # let v = trace.input("v", F32, (1, 2, 16, 64));
/// // Eight heads of queries share two of keys and values; each query sees four positions.
/// let y = q.attention_with(k, v, AttentionOptions::new().causal().window(4));
/// ```
#[derive(Clone, Copy, Debug)]
pub struct AttentionOptions<'t> {
    mask: Mask<'t>,
    causal: bool,
    past: usize,
    past_of_run: Option<Tensor<'t>>,
    window: Option<usize>,
    scale: Option<f32>,
    soft_cap: Option<f32>,
    dropout: f32,
    tiles: Tiles,
}

impl Default for AttentionOptions<'_> {
    fn default() -> Self {
        AttentionOptions {
            mask: Mask::None,
            causal: false,
            past: 0,
            past_of_run: None,
            window: None,
            scale: None,
            soft_cap: None,
            dropout: 0.0,
            tiles: Tiles::Auto,
        }
    }
}

impl<'t> AttentionOptions<'t> {
    /// Every query sees every key; scores are scaled by 1/√width.
    pub fn new() -> Self {
        AttentionOptions::default()
    }

    /// With a mask, in addition to the other conditions.
    pub fn mask(mut self, mask: Mask<'t>) -> Self {
        self.mask = mask;
        self
    }

    /// The query at position i sees only keys 0 to i.
    pub fn causal(mut self) -> Self {
        self.causal = true;
        self
    }

    /// The first query is at position `keys`: that many keys precede the first new one.
    pub fn past(mut self, keys: usize) -> Self {
        self.past = keys;
        self
    }

    /// [`past`](AttentionOptions::past) as an input of each run: an i32 scalar, or one that
    /// broadcasts to `[batch…, queries, keys]`.
    pub fn past_of_run(mut self, keys: Tensor<'t>) -> Self {
        self.past_of_run = Some(keys);
        self
    }

    /// Each query sees only keys less than `positions` away, itself included.
    pub fn window(mut self, positions: usize) -> Self {
        self.window = Some(positions);
        self
    }

    /// With scores scaled by this factor instead of 1/√width.
    pub fn scale(mut self, scale: f32) -> Self {
        self.scale = Some(scale);
        self
    }

    /// With scores s limited to ±`cap`, as cap·tanh(s/cap), before the mask.
    pub fn soft_cap(mut self, cap: f32) -> Self {
        self.soft_cap = Some(cap);
        self
    }

    /// With dropout of weights: in a training trace each weight after the softmax becomes 0 with
    /// probability `p`, and the others are scaled by 1/(1 − p) (Srivastava et al. 2014); otherwise
    /// nothing changes. With `p` = 1 all weights are 0.
    ///
    /// Such attention is computed by products, in [`Tiles`]: it is not one kernel. Each tile draws
    /// its own numbers, so that the choice of tiles decides which weights are dropped.
    pub fn dropout(mut self, p: f32) -> Self {
        self.dropout = p;
        self
    }

    /// With tiles of the caller's choice.
    pub fn tiles(mut self, tiles: Tiles) -> Self {
        self.tiles = tiles;
        self
    }

    /// The rows of all queries, `step` positions apart.
    fn rows(&self, step: u32) -> Rows {
        let first = self.past;
        Rows { first, step }
    }

    /// The scores of rows, if the numbers fit.
    fn scores(&self, rows: Rows) -> Option<Scores> {
        Some(Scores {
            scale: self.scale.unwrap_or(1.0),
            soft_cap: self.soft_cap,
            causal: self.causal,
            window: match self.window {
                Some(window) => Some(u32::try_from(window).ok()?),
                None => None,
            },
            past: i32::try_from(rows.first).ok()?,
            step: rows.step,
        })
    }

    /// Whether a program of this trace drops weights.
    fn drops(&self, trace: &Trace) -> bool {
        trace.is_training() && self.dropout > 0.0
    }

    /// With mask and past changed in the same way.
    fn map(self, change: impl Fn(Tensor<'t>) -> Tensor<'t>) -> Self {
        AttentionOptions {
            mask: self.mask.map(&change),
            past_of_run: self.past_of_run.map(&change),
            ..self
        }
    }
}

/// Where the rows of scores are among the keys.
#[derive(Clone, Copy)]
struct Rows {
    /// The position of the first row, counted from the first column.
    first: usize,
    /// Positions from row to row: 1, or 0 where the rows are heads.
    step: u32,
}

impl<'t> Tensor<'t> {
    /// softmax(Q·Kᵀ/√width + mask)·V for queries `[batch…, queries, width]` (this tensor), keys
    /// `[batch…, keys, width]` and values `[batch…, keys, any]`. If `causal`, query i sees only
    /// keys 0 to i.
    ///
    /// Scores are `queries × keys` numbers, which is large for long sequences: [`Tiles::Auto`]
    /// decides how many of them are in memory at once; [`attention_in`](Tensor::attention_in)
    /// leaves the choice to the caller. For other options see
    /// [`attention_with`](Tensor::attention_with).
    #[track_caller]
    pub fn attention(
        self,
        keys: Tensor<'t>,
        values: Tensor<'t>,
        causal: bool,
        mask: Mask<'t>,
    ) -> Tensor<'t> {
        self.attention_in(Tiles::Auto, keys, values, causal, mask)
    }

    /// [`attention`](Tensor::attention) in tiles of the caller's choice; results differ only in
    /// rounding.
    #[track_caller]
    pub fn attention_in(
        self,
        tiles: Tiles,
        keys: Tensor<'t>,
        values: Tensor<'t>,
        causal: bool,
        mask: Mask<'t>,
    ) -> Tensor<'t> {
        let options = AttentionOptions::new().tiles(tiles).mask(mask);
        self.attention_with(keys, values, AttentionOptions { causal, ..options })
    }

    /// [`attention`](Tensor::attention) with other [options](AttentionOptions).
    ///
    /// For queries `[batch…, heads, queries, width]`, the keys and values may have a smaller number
    /// of heads that divides `heads`: neighbouring heads of the queries then share one of them,
    /// without a copy (grouped-query attention, Ainslie et al. 2023; with one head multi-query
    /// attention, Shazeer 2019).
    ///
    /// Keys and values of f16 or bf16 are read without conversion. The CPU's kernel computes
    /// everything in f32. Where attention is computed by products, these round queries and weights
    /// to that type; sums and results are f32. With a [precision](crate::Trace::with_precision) of
    /// halves, queries, keys, values and results are rounded to it.
    #[track_caller]
    pub fn attention_with(
        self,
        keys: Tensor<'t>,
        values: Tensor<'t>,
        options: AttentionOptions<'t>,
    ) -> Tensor<'t> {
        let at = Location::caller();
        let mut width = Size::ONE;
        let mut shared = None;
        let q = self.trace.record(at, &[self, keys, values], |g, ids| {
            let dims = [0, 1, 2].map(|i| g.dims(ids[i]).as_slice());
            let say = |why: &str| {
                let shown = dims.map(|d| g.symbols.show(d).to_string());
                Err(format!(
                    "attention of queries {}, keys {} and values {}: {why}",
                    shown[0], shown[1], shown[2]
                ))
            };
            let [[.., w], [.., of_keys, wk], [.., of_values, _]] = dims else {
                return say("each needs two axes");
            };
            if w != wk || of_keys != of_values {
                return say("queries and keys must be equally wide, keys and values equally many");
            }
            if options.tiles == Tiles::Queries(0) {
                return say("a tile must have one query at least");
            }
            if options.window == Some(0) {
                return say("a window of 0 positions shows no key");
            }
            if let Some(cap) = options.soft_cap.filter(|&cap| cap <= 0.0 || !cap.is_finite()) {
                return say(&format!("scores cannot be limited to ±{cap}"));
            }
            if !(0.0..=1.0).contains(&options.dropout) {
                return say(&format!("a dropout of {} is not a probability", options.dropout));
            }
            width = *w;
            let heads = |d: &[Size]| {
                let axis = d.len().checked_sub(3)?;
                usize::try_from(d[axis].as_fixed()?).ok()
            };
            if let [Some(q), Some(k), Some(v)] = dims.map(heads)
                && q != k
                && k > 1
            {
                if k != v || !q.is_multiple_of(k) || dims[0].len() != dims[1].len() {
                    return say(&format!(
                        "{k} heads of keys and {v} of values cannot be shared by {q} heads of queries"
                    ));
                }
                shared = Some((k, q / k));
            }
            Ok(ids[0])
        });
        if q.is_poisoned() {
            return q;
        }
        let Some(fixed) = width.as_fixed().or(options.scale.map(|_| 1)) else {
            return self.require(at, |_, _| {
                Err("attention: queries and keys must be of fixed width".into())
            });
        };
        // (Products of width 0 are 0, whichever factor scales them.)
        let scale = options
            .scale
            .unwrap_or((1.0 / (fixed.max(1) as f64).sqrt()) as f32);
        let options = AttentionOptions {
            scale: Some(scale),
            ..options
        };
        match shared {
            Some(heads) => self
                .trace
                .on_behalf(at, || q.grouped(heads, keys, values, options)),
            None => q.tiled(at, keys, values, options),
        }
    }

    /// Attention of `heads · each` heads of queries to `heads` of keys and values.
    #[track_caller]
    fn grouped(
        self,
        (heads, each): (usize, usize),
        keys: Tensor<'t>,
        values: Tensor<'t>,
        options: AttentionOptions<'t>,
    ) -> Tensor<'t> {
        let axis = self.rank() - 3;
        let q = self.unflatten(axis, (heads, each));
        let of_heads = |x: Tensor<'t>| match x.rank().checked_sub(3) {
            Some(axis) if x.len(axis) == Some(heads * each) => x.unflatten(axis, (heads, each)),
            Some(axis) => x.unsqueeze(axis + 1),
            None => x,
        };
        let options = options.map(of_heads);
        if self.len(axis + 1) != Some(1) {
            return q
                .tiled(
                    Location::caller(),
                    keys.unsqueeze(axis + 1),
                    values.unsqueeze(axis + 1),
                    options,
                )
                .unite(axis);
        }
        // One query for each head: the heads of a group are the rows of one product, which reads
        // the keys once.
        let options = options.map(|x| match x.rank().checked_sub(2) {
            Some(rows) if rows > 0 => x.squeeze(rows),
            _ => x,
        });
        let (at, rows) = (Location::caller(), options.rows(0));
        let q = q.squeeze(axis + 2);
        q.as_one(at, keys, values, &options, rows)
            .unwrap_or_else(|| q.attend(keys, values, options, rows))
            .unsqueeze(axis + 2)
            .unite(axis)
    }

    /// Two neighbouring axes as one.
    #[track_caller]
    fn unite(self, axis: usize) -> Tensor<'t> {
        self.trace.record(Location::caller(), &[self], |g, ids| {
            let mut dims = g.dims(ids[0]).clone();
            let next = dims.remove(axis + 1);
            dims[axis] = dims[axis]
                .checked_mul(next)
                .ok_or("attention: the number of heads has no form as one size")?;
            Ok(g.reshape(ids[0], &dims))
        })
    }

    /// Attention as one operation; `None` if it is none with these options.
    fn as_one(
        self,
        at: &'static Location<'static>,
        keys: Tensor<'t>,
        values: Tensor<'t>,
        options: &AttentionOptions<'t>,
        rows: Rows,
    ) -> Option<Tensor<'t>> {
        let mask = match options.mask {
            Mask::None => None,
            Mask::Seen(mask) => Some((mask, DType::Bool)),
            Mask::Added(mask) => Some((mask, DType::F32)),
        };
        let past = options.past_of_run.map(|past| (past, DType::I32));
        let more = || mask.into_iter().chain(past);
        let fits = options.tiles == Tiles::Auto
            && !options.drops(self.trace)
            && [self, keys, values]
                .iter()
                .all(|x| x.dtype().is_float() && x.rank() >= 2)
            && more().all(|(x, dtype)| x.dtype() == dtype)
            // A past of each head.
            && past.is_none_or(|(x, _)| x.rank() == 0 || x.lens_of_last_two() == Some([1, 1]));
        // One query reads each key once, as products do; but they read keys that it does not see.
        let single = rows.step == 0 || self.len(self.rank().saturating_sub(2)) == Some(1);
        if !fits || single && past.is_none() {
            return None;
        }
        let scores = options.scores(rows)?;
        let precision = self.trace.precision();
        let all: Vec<Tensor<'t>> = [self, keys, values]
            .into_iter()
            .chain(more().map(|(x, _)| x))
            .collect();
        let mut joins = true;
        let made = self.trace.record(at, &all, |g, ids| {
            let batch = |g: &Graph, id| {
                let dims = g.dims(id);
                Dims::from_slice(&dims[..dims.len().saturating_sub(2)])
            };
            let [q, k, v] = [ids[0], ids[1], ids[2]];
            let of_sources = [v, q]
                .iter()
                .try_fold(batch(g, k), |sum, &id| broadcast_shape(&batch(g, id), &sum));
            let mut batches = of_sources.ok_or("attention: batch dimensions do not broadcast")?;
            let [queries, keys] = [q, k].map(|id| g.dims(id)[g.dims(id).len() - 2]);
            for &id in &ids[3..] {
                let pairs: Dims = batches.iter().copied().chain([queries, keys]).collect();
                match broadcast_shape(g.dims(id), &pairs) {
                    Some(sum) if sum.ends_with(&[queries, keys]) => {
                        batches.clone_from(&sum);
                        batches.truncate(sum.len() - 2);
                    }
                    // The parts say which operation does not fit.
                    _ => joins = false,
                }
            }
            if !joins {
                return Ok(q);
            }
            let single = batches.is_empty();
            if single {
                batches.push(Size::ONE);
            }
            let mut operands: Vec<NodeId> = [q, k, v]
                .into_iter()
                .map(|x| {
                    let dims = g.dims(x);
                    let last = &dims[dims.len() - 2..];
                    let dims: Dims = batches.iter().chain(last).copied().collect();
                    let x = precision.round(g, x);
                    g.broadcast(x, &dims)
                })
                .collect();
            for &id in &ids[3..] {
                operands.push(if g.dtype(id) == DType::I32 {
                    let of_heads = batch(g, id);
                    let id = g.reshape(id, &of_heads);
                    g.broadcast(id, &batches)
                } else {
                    let pairs: Dims = batches.iter().copied().chain([queries, keys]).collect();
                    g.broadcast(id, &pairs)
                });
            }
            let y = ops::attention(g, scores, &operands, precision.dtype());
            let y = g.cast(y, DType::F32);
            let y = g.permute(y, &ops::rows_last(batches.len() + 2));
            let mut dims = g.dims(y).clone();
            if single {
                dims.remove(0);
            }
            Ok(g.reshape(y, &dims))
        });
        joins.then_some(made)
    }

    /// The lengths of the last two axes that are fixed.
    fn lens_of_last_two(self) -> Option<[usize; 2]> {
        let rows = self.rank().checked_sub(2)?;
        Some([self.len(rows)?, self.len(rows + 1)?])
    }

    /// Attention as one operation, in tiles, or of all queries at once.
    fn tiled(
        self,
        at: &'static Location<'static>,
        keys: Tensor<'t>,
        values: Tensor<'t>,
        options: AttentionOptions<'t>,
    ) -> Tensor<'t> {
        let q = self;
        let Some(axis) = q.rank().checked_sub(2) else {
            return q;
        };
        if let Some(y) = q.as_one(at, keys, values, &options, options.rows(1)) {
            return y;
        }
        let all = q.len(axis);
        let (Some(rows), Some(all)) = (options.tiles.queries(all), all) else {
            return self
                .trace
                .on_behalf(at, || q.attend(keys, values, options, options.rows(1)));
        };
        let tile = |first: usize| {
            let range = first..all.min(first + rows);
            // Only the keys visible to a query of the tile. With a backward pass, all keys: their
            // gradient is then one sum that each tile adds to.
            let of_keys = keys.len(axis_of_keys(keys));
            let known = !self.trace.is_training() && options.past_of_run.is_none();
            let seen = of_keys.filter(|_| known).map(|all| {
                let past = options.past;
                let window = options.window.unwrap_or(usize::MAX);
                let from = (range.start + past + 1).saturating_sub(window).min(all);
                let to = match options.causal {
                    true => range.end + past,
                    false => (range.end - 1 + past).saturating_add(window),
                };
                from..to.min(all).max(from)
            });
            let seen = seen.filter(|seen| Some(seen.len()) != of_keys && !seen.is_empty());
            let cut = |x: Tensor<'t>| {
                seen.clone()
                    .map_or(x, |seen| x.slice(axis_of_keys(x), seen))
            };
            let options = options.map(|mask| {
                let own = |axis: usize, all: usize| mask.len(axis) == Some(all) && all > 1;
                let queries = mask.rank().checked_sub(2).filter(|&axis| own(axis, all));
                let mask = queries.map_or(mask, |axis| mask.slice(axis, range.clone()));
                let of_keys = mask
                    .rank()
                    .checked_sub(1)
                    .filter(|&axis| mask.len(axis).is_some_and(|keys| keys > 1));
                seen.clone()
                    .zip(of_keys)
                    .map_or(mask, |(seen, axis)| mask.slice(axis, seen))
            });
            let rows = Rows {
                first: first + options.past - seen.as_ref().map_or(0, |seen| seen.start),
                step: 1,
            };
            let (q, keys, values) = (q.slice(axis, range.clone()), cut(keys), cut(values));
            q.checkpoint(|q| q.attend(keys, values, options, rows))
        };
        let mut tiles: Vec<Tensor<'t>> = Vec::new();
        for first in (0..all).step_by(rows) {
            let tile = self.trace.on_behalf(at, || tile(first));
            // A mistake in one tile is in all.
            if tile.is_poisoned() {
                return tile;
            }
            tiles.push(tile);
        }
        self.trace.on_behalf(at, || self.trace.concat(&tiles, axis))
    }

    /// Attention of all queries at once.
    #[track_caller]
    fn attend(
        self,
        keys: Tensor<'t>,
        values: Tensor<'t>,
        options: AttentionOptions<'t>,
        rows: Rows,
    ) -> Tensor<'t> {
        // Products of halves have sums in f32; queries and weights follow the type of the keys and
        // values in memory.
        let like = |x: Tensor<'t>, stored: Tensor<'t>| match stored.dtype() {
            DType::F16 | DType::BF16 => x.cast(stored.dtype()),
            _ => x,
        };
        let mut scores = like(self, keys).matmul(keys.t()) * options.scale.unwrap_or(1.0);
        if let Some(cap) = options.soft_cap {
            scores = (scores / cap).tanh() * cap;
        }
        match options.mask {
            Mask::None => {}
            Mask::Seen(seen) => scores = seen.select(scores, f32::NEG_INFINITY),
            // It hides a key of any score.
            Mask::Added(bias) => {
                let hides = bias.equal(f32::NEG_INFINITY);
                scores = hides.select(f32::NEG_INFINITY, scores + bias);
            }
        }
        if options.causal || options.window.is_some() {
            scores = scores
                .visible(rows, &options)
                .select(scores, f32::NEG_INFINITY);
        }
        // The exponentials are divided by their sum after the product, where there are fewer
        // numbers; therefore only the exponentials are in memory, which are their own derivative.
        let last = scores.rank().saturating_sub(1);
        let hides = !matches!(options.mask, Mask::None) || options.window.is_some();
        let sees_none = hides.then(|| scores.level(last).equal(f32::NEG_INFINITY));
        if let Some(none) = sees_none {
            scores = none.select(0.0, scores);
        }
        let weights = scores.exponentials(last);
        let mut sum = weights.sum_keep(last);
        let mut kept = weights;
        if options.drops(self.trace) {
            let p = options.dropout;
            kept = weights.uniform_like().ge(p).select(weights, 0.0);
            // The kept weights are scaled where there are fewer numbers, too. With p = 1 none is
            // kept, and 0 must not be divided by 0.
            sum = if p < 1.0 { sum * (1.0 - p) } else { sum };
        }
        let result = like(kept, values).matmul(values) / sum;
        // NaN of a query that sees no key, which adds nothing to gradients.
        sees_none.map_or(result, |none| none.select(f32::NAN, result))
    }

    /// Multi-head self-attention: queries, keys and values side by side
    /// `[batch…, length, 3·width]`, each with its heads side by side, → `[batch…, length, width]`.
    #[track_caller]
    pub fn self_attention(self, heads: usize, causal: bool, mask: Mask<'t>) -> Tensor<'t> {
        let options = AttentionOptions::new().mask(mask);
        self.self_attention_with(heads, AttentionOptions { causal, ..options })
    }

    /// [`self_attention`](Tensor::self_attention) with other [options](AttentionOptions).
    #[track_caller]
    pub fn self_attention_with(self, heads: usize, options: AttentionOptions<'t>) -> Tensor<'t> {
        let each = heads
            .checked_mul(3)
            .and_then(|parts| i64::try_from(parts).ok())
            .filter(|&parts| parts > 0);
        let qkv = self.require(Location::caller(), |g, x| {
            let dims = g.dims(x);
            let width = dims.last().filter(|_| dims.len() > 1).and_then(|width| width.as_fixed());
            let divided = width.zip(each).is_some_and(|(width, each)| width > 0 && width % each == 0);
            let needed = "[batch…, length, 3·width] of a fixed width that the heads divide equally is needed";
            divided.then_some(()).ok_or_else(|| format!("self_attention of {} by {heads} heads: {needed}", g.symbols.show(dims)))
        });
        let (Some(last), Some(each)) = (qkv.rank().checked_sub(1), each) else {
            return qkv;
        };
        let parts = qkv.split(last, 3);
        // […, length, width] → […, heads, length, width/heads]
        let [q, k, v] = [0, 1, 2].map(|i| {
            parts[i]
                .unflatten(last, [each / 3, -1])
                .transpose(last - 1, last)
        });
        q.attention_with(k, v, options)
            .transpose(last - 1, last)
            .flatten(last)
    }

    /// Whether the key of a column is visible to the query of a row: of this tensor's shape.
    #[track_caller]
    fn visible(self, rows: Rows, options: &AttentionOptions<'t>) -> Tensor<'t> {
        let small = |n: usize| i32::try_from(n).unwrap_or(i32::MAX);
        let scores = Scores {
            scale: 1.0,
            soft_cap: None,
            causal: options.causal,
            window: options.window.map(|n| small(n) as u32),
            past: small(rows.first),
            step: rows.step,
        };
        let operands: Vec<Tensor<'t>> = [self].into_iter().chain(options.past_of_run).collect();
        self.trace.record(Location::caller(), &operands, |g, ids| {
            let dims = g.dims(ids[0]).clone();
            let past = match ids.get(1) {
                Some(&past) if g.dtype(past).lane() != Lane::I32 => {
                    return Err(format!(
                        "attention: the number of past keys is {}; i32 is needed",
                        g.dtype(past)
                    ));
                }
                Some(&past) if broadcast_shape(g.dims(past), &dims).as_ref() != Some(&dims) => {
                    return Err(format!(
                        "attention: past keys of shape {} do not broadcast to the scores {}",
                        g.symbols.show(g.dims(past)),
                        g.symbols.show(&dims)
                    ));
                }
                past => past.copied(),
            };
            let seen = ops::visible(g, &scores, past, &dims);
            Ok(seen.unwrap_or(ids[0]))
        })
    }
}

/// The axis of keys of a tensor `[batch…, keys, width]`.
fn axis_of_keys(keys: Tensor<'_>) -> usize {
    keys.rank().saturating_sub(2)
}
