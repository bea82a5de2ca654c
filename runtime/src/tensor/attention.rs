//! Scaled dot-product attention (Vaswani et al. 2017).

use std::panic::Location;

use slabwise_kernels::dtype::DType;
use slabwise_kernels::scalar::ScalarOp;
use slabwise_kernels::size::Size;
use slabwise_kernels::spec::Dims;
use smallvec::SmallVec;

use super::Tensor;
use crate::ops::{Emit, Op};

/// Which places of a sequence attend to which.
#[derive(Clone, Copy, Debug)]
pub enum Mask<'t> {
    /// All to all.
    None,
    /// Truth values that broadcast to `[batch…, queries, keys]`: what holds is seen. A query that sees nothing gives NaN.
    Seen(Tensor<'t>),
    /// f32 that broadcasts to `[batch…, queries, keys]`, added to the scores.
    Added(Tensor<'t>),
}

impl<'t> Tensor<'t> {
    /// softmax(Q·Kᵀ/√width + mask)·V for queries `[batch…, queries, width]` (this tensor), keys `[batch…, keys, width]` and
    /// values `[batch…, keys, any]`. If `causal`, query i sees keys 0 to i alone.
    ///
    /// This is the plain form: the scores `[batch…, queries, keys]` are in memory.
    #[track_caller]
    pub fn attention(self, keys: Tensor<'t>, values: Tensor<'t>, causal: bool, mask: Mask<'t>) -> Tensor<'t> {
        let at = Location::caller();
        let mut width = Size::ONE;
        let q = self.trace.record(at, &[self, keys, values], |g, ids| {
            let dims = [0, 1, 2].map(|i| g.dims(ids[i]).as_slice());
            let say = |why: &str| {
                let shown = dims.map(|d| g.symbols.show(d).to_string());
                Err(format!("attention of queries {}, keys {} and values {}: {why}", shown[0], shown[1], shown[2]))
            };
            let [[.., w], [.., of_keys, wk], [.., of_values, _]] = dims else { return say("each needs two axes") };
            if w != wk || of_keys != of_values {
                return say("queries and keys must be equally wide, keys and values equally many");
            }
            width = *w;
            Ok(ids[0])
        });
        let Some(fixed) = width.as_fixed() else {
            return self.require(at, |_, _| Err("attention: queries and keys must be of fixed width".into()));
        };
        let mut scores = q.matmul(keys.t()) * (1.0 / (fixed as f64).sqrt()) as f32;
        match mask {
            Mask::None => {}
            Mask::Seen(seen) => scores = seen.select(scores, f32::NEG_INFINITY),
            Mask::Added(bias) => scores = scores + bias,
        }
        if causal {
            scores = scores.until_diagonal().select(scores, f32::NEG_INFINITY);
        }
        // The weights are divided by their sum behind the product, where there are fewer numbers: so they are in memory once, as
        // exponentials, which are their own derivative.
        let last = scores.rank().saturating_sub(1);
        let weights = scores.exponentials(last);
        weights.matmul(values) / weights.sum_keep(last)
    }

    /// Attention of a sequence to itself, by several heads: queries, keys and values side by side `[batch…, length, 3·width]`,
    /// each with its heads side by side, → `[batch…, length, width]`.
    #[track_caller]
    pub fn self_attention(self, heads: usize, causal: bool, mask: Mask<'t>) -> Tensor<'t> {
        let Some(last) = self.rank().checked_sub(1).filter(|&last| last > 0) else {
            return self.require(Location::caller(), |g, x| {
                Err(format!("self_attention of {}: [batch…, length, 3·width] is needed", g.symbols.show(g.dims(x))))
            });
        };
        let parts = self.split(last, 3);
        // […, length, width] → […, heads, length, width/heads]
        let [q, k, v] = [0, 1, 2].map(|i| parts[i].unflatten(last, [i64::try_from(heads).unwrap_or(0), -1]).transpose(last - 1, last));
        q.attention(k, v, causal, mask).transpose(last - 1, last).flatten(last)
    }

    /// Whether the coordinate along the last axis is at most that along the one before: of this tensor's shape.
    #[track_caller]
    fn until_diagonal(self) -> Tensor<'t> {
        self.trace.record(Location::caller(), &[self], |g, ids| {
            let dims = g.dims(ids[0]).clone();
            let rank = dims.len();
            let mut along = |axis: usize| {
                let mut strides: Dims = SmallVec::from_elem(Size::ZERO, rank);
                strides[axis] = Size::ONE;
                g.emit(Op::Index(strides), &[], DType::I32, dims.clone())
            };
            let (row, column) = (along(rank - 2), along(rank - 1));
            Ok(g.scalar(ScalarOp::Le, &[column, row]))
        })
    }
}
