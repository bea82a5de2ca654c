//! Embeddings of integers and of positions.

use super::Module;
use crate::params::{Init, Param, Scope};
use crate::tensor::Tensor;

/// An embedding: a vector for each integer: `[…]` (i32 or u8) → `[…, width]`. Weight `[count,
/// width]`.
///
/// The gradient adds up in a fixed order, so that equal runs give equal bits.
#[derive(Clone, Debug)]
pub struct Embedding {
    weight: Param,
    padding: Option<i32>,
}

impl Embedding {
    /// Declares `weight`, normal with mean 0 and variance 1 at first.
    #[track_caller]
    pub fn new(at: Scope, count: usize, width: usize) -> Self {
        Embedding::with_std(at, count, width, 1.0)
    }

    /// Declares `weight`, normal with mean 0 and this standard deviation at first.
    #[track_caller]
    pub fn with_std(at: Scope, count: usize, width: usize, std: f32) -> Self {
        Embedding {
            weight: at.param("weight", (count, width), Init::Normal { mean: 0.0, std }),
            padding: None,
        }
    }

    /// With an integer for padding: its vector gets no gradient. The weight is unchanged, so that
    /// that of a file counts; for zeros set its row.
    pub fn padding(mut self, integer: i32) -> Self {
        self.padding = Some(integer);
        self
    }

    /// The weight, `[count, width]`.
    pub fn weight(&self) -> &Param {
        &self.weight
    }
}

impl Module for Embedding {
    #[track_caller]
    fn forward<'t>(&self, x: Tensor<'t>) -> Tensor<'t> {
        let y = x.trace().param(&self.weight).embed(x);
        match self.padding {
            Some(padding) => x.equal(padding).unsqueeze(x.rank()).select(y.detach(), y),
            None => y,
        }
    }
}

/// A learned vector added at each position of a sequence: `[…, length, width] → […, length,
/// width]`, for lengths up to `longest`. Weight `[longest, width]`.
#[derive(Clone, Debug)]
pub struct LearnedPositions {
    weight: Param,
}

impl LearnedPositions {
    /// Declares `weight`, normal with mean 0 and variance 1 at first.
    #[track_caller]
    pub fn new(at: Scope, longest: usize, width: usize) -> Self {
        LearnedPositions::with_std(at, longest, width, 1.0)
    }

    /// Declares `weight`, normal with mean 0 and this standard deviation at first.
    #[track_caller]
    pub fn with_std(at: Scope, longest: usize, width: usize, std: f32) -> Self {
        LearnedPositions {
            weight: at.param("weight", (longest, width), Init::Normal { mean: 0.0, std }),
        }
    }
}

impl Module for LearnedPositions {
    #[track_caller]
    fn forward<'t>(&self, x: Tensor<'t>) -> Tensor<'t> {
        let x = x.require_len(
            "learned positions",
            x.rank().saturating_sub(1),
            self.weight.dims()[1],
        );
        let weight = x.trace().param(&self.weight);
        match x.rank().checked_sub(2).and_then(|axis| x.len(axis)) {
            Some(length) => x + weight.slice(0, ..length),
            // A bounded sequence does not fit, unless it is the whole.
            None => x + weight,
        }
    }
}
