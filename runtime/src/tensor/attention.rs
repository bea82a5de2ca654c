//! Scaled dot-product attention (Vaswani et al. 2017).

use std::panic::Location;

use slabwise_kernels::dtype::DType;
use slabwise_kernels::scalar::ScalarOp;
use slabwise_kernels::size::Size;
use slabwise_kernels::spec::Dims;
use smallvec::SmallVec;

use super::Tensor;
use crate::ops::{GraphBuilder, Op};

/// Which positions of a sequence attend to which.
#[derive(Clone, Copy, Debug)]
pub enum Mask<'t> {
    /// All to all.
    None,
    /// Truth values that broadcast to `[batch…, queries, keys]`: true positions are visible. A
    /// query with no visible key gives NaN.
    Seen(Tensor<'t>),
    /// f32 that broadcasts to `[batch…, queries, keys]`, added to the scores.
    Added(Tensor<'t>),
}

/// How much of the scores of attention is in memory at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Tiles {
    /// Tiles of 128 queries where there are 512 or more of them, else all at once.
    #[default]
    Auto,
    /// All scores `[batch…, queries, keys]`, saved for the backward pass.
    Whole,
    /// Those of this many queries at a time, and in inference with `causal` only of the keys
    /// visible to them; the backward pass recomputes them, tile by tile. Dao et al.,
    /// "FlashAttention" (2022), do this within a kernel; here it is a matter of the plan.
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

impl<'t> Tensor<'t> {
    /// softmax(Q·Kᵀ/√width + mask)·V for queries `[batch…, queries, width]` (this tensor), keys
    /// `[batch…, keys, width]` and values `[batch…, keys, any]`. If `causal`, query i sees only
    /// keys 0 to i.
    ///
    /// Scores are `queries × keys` numbers, which is large for long sequences: [`Tiles::Auto`]
    /// decides how much of that is in memory at once; [`attention_in`](Tensor::attention_in) leaves
    /// the choice to the caller.
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

    /// [`attention`](Tensor::attention) in tiles of the caller's choice; the results differ in
    /// rounding alone.
    #[track_caller]
    pub fn attention_in(
        self,
        tiles: Tiles,
        keys: Tensor<'t>,
        values: Tensor<'t>,
        causal: bool,
        mask: Mask<'t>,
    ) -> Tensor<'t> {
        let at = Location::caller();
        let mut width = Size::ONE;
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
            if tiles == Tiles::Queries(0) {
                return say("a tile must have one query at least");
            }
            width = *w;
            Ok(ids[0])
        });
        let Some(fixed) = width.as_fixed() else {
            return self.require(at, |_, _| {
                Err("attention: queries and keys must be of fixed width".into())
            });
        };
        // (Products of width 0 are 0, whichever factor scales them.)
        let scale = (1.0 / (fixed.max(1) as f64).sqrt()) as f32;
        let Some(axis) = q.rank().checked_sub(2) else {
            return q;
        };
        let all = q.len(axis);
        let (Some(rows), Some(all)) = (tiles.queries(all), all) else {
            return q.attend(keys, values, scale, causal.then_some(0), mask);
        };
        let tile = |first: usize| {
            let range = first..all.min(first + rows);
            // Only the keys visible to the last query of the tile. With a backward pass, all keys:
            // their gradient is then one sum that each tile adds to.
            let fewer = causal && !self.trace.is_training();
            let seen = keys
                .len(axis_of_keys(keys))
                .filter(|&keys| fewer && range.end < keys)
                .map(|_| range.end);
            let cut = |x: Tensor<'t>| seen.map_or(x, |seen| x.slice(axis_of_keys(x), ..seen));
            let mask = mask.map(|mask| {
                let own = |axis: usize, all: usize| mask.len(axis) == Some(all) && all > 1;
                let queries = mask.rank().checked_sub(2).filter(|&axis| own(axis, all));
                let mask = queries.map_or(mask, |axis| mask.slice(axis, range.clone()));
                let of_keys = mask
                    .rank()
                    .checked_sub(1)
                    .filter(|&axis| mask.len(axis).is_some_and(|keys| keys > 1));
                seen.zip(of_keys)
                    .map_or(mask, |(seen, axis)| mask.slice(axis, ..seen))
            });
            let (q, keys, values) = (q.slice(axis, range.clone()), cut(keys), cut(values));
            q.checkpoint(|q| q.attend(keys, values, scale, causal.then_some(first), mask))
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
        self.trace.concat(&tiles, axis)
    }

    /// Attention of all queries at once; if causal, of queries that begin at this position.
    #[track_caller]
    fn attend(
        self,
        keys: Tensor<'t>,
        values: Tensor<'t>,
        scale: f32,
        causal: Option<usize>,
        mask: Mask<'t>,
    ) -> Tensor<'t> {
        let mut scores = self.matmul(keys.t()) * scale;
        match mask {
            Mask::None => {}
            Mask::Seen(seen) => scores = seen.select(scores, f32::NEG_INFINITY),
            Mask::Added(bias) => scores = scores + bias,
        }
        if let Some(first) = causal {
            scores = scores
                .until_diagonal(first)
                .select(scores, f32::NEG_INFINITY);
        }
        // The exponentials are divided by their sum after the product, where there are fewer
        // numbers; therefore only the exponentials are in memory, which are their own derivative.
        let last = scores.rank().saturating_sub(1);
        let weights = scores.exponentials(last);
        weights.matmul(values) / weights.sum_keep(last)
    }

    /// Attention of a sequence to itself, by several heads: queries, keys and values side by side
    /// `[batch…, length, 3·width]`, each with its heads side by side, → `[batch…, length, width]`.
    #[track_caller]
    pub fn self_attention(self, heads: usize, causal: bool, mask: Mask<'t>) -> Tensor<'t> {
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
        q.attention(k, v, causal, mask)
            .transpose(last - 1, last)
            .flatten(last)
    }

    /// Whether the coordinate along the last axis is at most that along the axis before, counted
    /// from `first`: of this tensor's shape.
    #[track_caller]
    fn until_diagonal(self, first: usize) -> Tensor<'t> {
        self.trace.record(Location::caller(), &[self], |g, ids| {
            let dims = g.dims(ids[0]).clone();
            let rank = dims.len();
            let mut along = |axis: usize| {
                let mut strides: Dims = SmallVec::from_elem(Size::ZERO, rank);
                strides[axis] = Size::ONE;
                g.emit(Op::Index(strides), &[], DType::I32, dims.clone())
            };
            let (row, column) = (along(rank - 2), along(rank - 1));
            // As a float, a position is exact up to 2²⁴; no machine has memory for the scores of
            // more.
            let first = g.full(first as f32, DType::I32, &dims);
            let row = g.scalar(ScalarOp::Add, &[row, first]);
            Ok(g.scalar(ScalarOp::Le, &[column, row]))
        })
    }
}

/// The axis of keys of a tensor `[batch…, keys, width]`.
fn axis_of_keys(keys: Tensor<'_>) -> usize {
    keys.rank().saturating_sub(2)
}
