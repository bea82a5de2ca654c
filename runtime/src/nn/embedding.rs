//! Embeddings of integers and of positions.

use slabwise_kernels::dtype::DType;

use super::Module;
use crate::params::{Init, Param, Scope};
use crate::tensor::Tensor;

/// `x`, if its padding is one of the integers that have a vector.
#[track_caller]
fn with_padding<'t>(x: Tensor<'t>, padding: Option<i32>, weight: &Param) -> Tensor<'t> {
    let count = weight.dims()[0];
    let outside = padding.filter(|&n| usize::try_from(n).is_ok_and(|n| n >= count) || n < 0);
    outside.map_or(x, |n| {
        x.mistake(format!(
            "an embedding with padding {n}: it is outside 0..{count}, the integers that have a vector"
        ))
    })
}

/// An embedding, a vector for each integer: `[…]` (i32 or u8) → `[…, width]`. Weight
/// `[count, width]`.
///
/// The gradient is added in a fixed order, so that equal runs give equal bits.
#[derive(Clone, Debug)]
pub struct Embedding {
    weight: Param,
    padding: Option<i32>,
}

impl Embedding {
    /// Declares `weight`, initially normal with mean 0 and variance 1.
    #[track_caller]
    pub fn new(at: Scope, count: usize, width: usize) -> Self {
        Embedding::with_std(at, count, width, 1.0)
    }

    /// Declares `weight`, initially normal with mean 0 and this standard deviation.
    #[track_caller]
    pub fn with_std(at: Scope, count: usize, width: usize, std: f32) -> Self {
        Embedding {
            weight: at.param("weight", (count, width), Init::Normal { mean: 0.0, std }),
            padding: None,
        }
    }

    /// With an integer for padding: its vector gets no gradient. Its row of the weight is not
    /// zeroed, so that the row of a weight file stays; set it to 0 if zeros are needed.
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
        let x = with_padding(x, self.padding, &self.weight);
        let y = x.trace().param_rows(&self.weight, x);
        match self.padding {
            Some(padding) => x.equal(padding).unsqueeze(x.rank()).select(y.detach(), y),
            None => y,
        }
    }
}

/// The reduction of the vectors of a bag to one: see [`EmbeddingBag`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bag {
    /// Their sum.
    Sum,
    /// Their mean.
    Mean,
    /// Their elementwise maximum.
    Max,
}

/// An embedding of bags of integers: one vector for each row of integers, `[n, count]` (i32 or u8)
/// → `[n, width]`. Weight `[count, width]`. A bag of padding alone gives zeros.
///
/// ```
/// use slabwise::nn::{Bag, EmbeddingBag};
/// # use slabwise::prelude::*;
/// # let params = Params::seeded(0);
/// # let trace = Trace::training();
/// # let genres = trace.input("genres", I32, (32, 6));
/// let layer = EmbeddingBag::new(&params.root() / "genres", 1000, 16, Bag::Mean).padding(0);
/// let y = genres.apply(&layer);
/// ```
#[derive(Clone, Debug)]
pub struct EmbeddingBag {
    weight: Param,
    bag: Bag,
    padding: Option<i32>,
}

impl EmbeddingBag {
    /// Declares `weight`, initially normal with mean 0 and variance 1.
    #[track_caller]
    pub fn new(at: Scope, count: usize, width: usize, bag: Bag) -> Self {
        EmbeddingBag {
            weight: at.param(
                "weight",
                (count, width),
                Init::Normal {
                    mean: 0.0,
                    std: 1.0,
                },
            ),
            bag,
            padding: None,
        }
    }

    /// With a padding integer that is not part of a bag, so that bags of different sizes fit into
    /// rows.
    pub fn padding(mut self, integer: i32) -> Self {
        self.padding = Some(integer);
        self
    }

    /// The weight, `[count, width]`.
    pub fn weight(&self) -> &Param {
        &self.weight
    }

    /// The sum of the vectors, each times a weight `[n, count]` (f32), whatever the layer makes of
    /// a bag (`per_sample_weights` of PyTorch).
    #[track_caller]
    pub fn weighted<'t>(&self, x: Tensor<'t>, weights: Tensor<'t>) -> Tensor<'t> {
        let x = with_padding(x, self.padding, &self.weight).require_rank("an embedding bag", 2);
        let y = x.trace().param(&self.weight).embed(x) * weights.unsqueeze(2);
        self.filled(x, y, 0.0).sum_over(1)
    }

    /// Vectors `[n, count, width]` with a number in the place of padding.
    #[track_caller]
    fn filled<'t>(&self, x: Tensor<'t>, y: Tensor<'t>, number: f32) -> Tensor<'t> {
        match self.padding {
            Some(padding) => x.not_equal(padding).unsqueeze(2).select(y, number),
            None => y,
        }
    }
}

impl Module for EmbeddingBag {
    #[track_caller]
    fn forward<'t>(&self, x: Tensor<'t>) -> Tensor<'t> {
        let x = with_padding(x, self.padding, &self.weight).require_rank("an embedding bag", 2);
        let y = x.trace().param(&self.weight).embed(x);
        let counts = self
            .padding
            .map(|padding| x.not_equal(padding).cast(DType::F32).sum_keep(1));
        match (self.bag, counts) {
            (Bag::Sum, _) => self.filled(x, y, 0.0).sum_over(1),
            (Bag::Mean, Some(counts)) => self.filled(x, y, 0.0).sum_over(1) / counts.maximum(1.0),
            (Bag::Mean, None) => y.mean_over(1),
            (Bag::Max, Some(counts)) => {
                let most = self.filled(x, y, f32::NEG_INFINITY).max_over(1);
                counts.gt(0.0).select(most, 0.0)
            }
            (Bag::Max, None) => y.max_over(1),
        }
    }
}

/// A learned vector added at each position of a sequence: `[…, length, width] → […, length,
/// width]`, for lengths up to `longest`. Weight `[longest, width]`. A longer sequence fails: where
/// the length is fixed, when the program is compiled, else when it runs.
#[derive(Clone, Debug)]
pub struct LearnedPositions {
    weight: Param,
}

impl LearnedPositions {
    /// Declares `weight`, initially normal with mean 0 and variance 1.
    #[track_caller]
    pub fn new(at: Scope, longest: usize, width: usize) -> Self {
        LearnedPositions::with_std(at, longest, width, 1.0)
    }

    /// Declares `weight`, initially normal with mean 0 and this standard deviation.
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
        let x = x.require_sequence("learned positions");
        let Some(axis) = x.rank().checked_sub(2) else {
            return x;
        };
        match x.len(axis) {
            Some(length) => x + x.trace().param(&self.weight).slice(0, ..length),
            None => {
                let positions = x.trace().arange(x.dim(axis));
                x + x.trace().param_rows(&self.weight, positions)
            }
        }
    }
}
