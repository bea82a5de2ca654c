//! Self-attention with separate products for queries, keys and values, as BERT and ViT have it.

use slabwise::nn::{Linear, Module};
use slabwise::params::Scope;
use slabwise::tensor::{Mask, Tensor};

/// Self-attention over sequences of one length, their tokens in one row: `[n·length, width]` → the
/// same.
pub(super) struct SelfAttention {
    query: Linear,
    key: Linear,
    value: Linear,
    joined: Linear,
    heads: usize,
    width: usize,
    length: usize,
}

impl SelfAttention {
    /// Declares `query`, `key` and `value` at one place and the last product at another. The heads
    /// divide the width equally.
    #[track_caller]
    pub fn new(at: &Scope, joined: Scope, width: usize, heads: usize, length: usize) -> Self {
        let part = |name: &str| Linear::new(at / name, width, width);
        SelfAttention {
            query: part("query"),
            key: part("key"),
            value: part("value"),
            joined: Linear::new(joined, width, width),
            heads: heads.max(1),
            width,
            length,
        }
    }

    /// The result under a mask that broadcasts to `[n, heads, length, length]`.
    #[track_caller]
    pub fn masked<'t>(&self, x: Tensor<'t>, mask: Mask<'t>) -> Tensor<'t> {
        let each = self.width / self.heads;
        let lengths = [-1, self.length as i64, self.heads as i64, each as i64];
        let [q, k, v] = [&self.query, &self.key, &self.value]
            .map(|part| x.apply(part).reshape(lengths).transpose(1, 2));
        q.attention(k, v, false, mask)
            .transpose(1, 2)
            .reshape([-1, self.width as i64])
            .apply(&self.joined)
    }
}

impl Module for SelfAttention {
    #[track_caller]
    fn forward<'t>(&self, x: Tensor<'t>) -> Tensor<'t> {
        self.masked(x, Mask::None)
    }
}
