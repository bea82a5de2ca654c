//! Classification of the places of sequences: the class is known at a few places of each sequence,
//! and the loss is over those.

use ndarray::{Array2, Array3};
use slabwise::nn::Linear;
use slabwise::prelude::*;

/// Numbers at each place of a sequence.
pub const FEATURES: usize = 8;
/// Sequences in a batch.
pub const BATCH: usize = 4;
/// Classes of places.
pub const CLASSES: usize = 5;

/// Features of each place combined with the mean features of its sequence.
pub struct Detector {
    look: Linear,
    context: Linear,
    /// Maps the features of a place to logits of its class.
    pub head: Linear,
    width: usize,
}

impl Detector {
    /// Declares the weights.
    pub fn new(at: &Scope, width: usize) -> Self {
        Detector {
            look: Linear::new(at / "look", FEATURES, width),
            context: Linear::new(at / "context", width, width),
            head: Linear::new(at / "head", width, CLASSES),
            width,
        }
    }

    /// The features of each place: `[batch, len, features]` and the weight of each place, `[batch,
    /// len]` → `[batch · len, width]`.
    pub fn places<'t>(&self, x: Tensor<'t>, counts: Tensor<'t>) -> Tensor<'t> {
        let seen = x.apply(&self.look).relu();
        let counts = counts.unsqueeze(2);
        // The mean over the places that count, so that padding changes nothing.
        let mean = (seen * counts).sum_keep(1) / counts.sum_keep(1);
        let places = (seen + mean.apply(&self.context)).tanh();
        places.reshape((-1, self.width))
    }

    /// The loss over the places with a known class. Only they go through the head.
    pub fn selected<'t>(&self, trace: &'t Trace, len: Dim) -> Tensor<'t> {
        let x = trace.input("x", F32, (BATCH, len, FEATURES));
        let kind = trace.input("kind", I32, (BATCH, len)).flatten(0);
        let is_known = trace.input("is_known", Bool, (BATCH, len)).flatten(0);
        let chosen = self
            .places(x, trace.ones((BATCH, len)))
            .compress(0, is_known);
        chosen
            .apply(&self.head)
            .cross_entropy(kind.masked_select(is_known))
    }
}

/// A batch of sequences of one length.
pub struct Batch {
    pub x: Array3<f32>,
    pub kind: Array2<i32>,
    pub is_known: Array2<u8>,
}

impl Batch {
    /// The batch of a number. The class of a place is a function of its features and of the mean
    /// over its sequence; one place in four is known, and at least one.
    pub fn new(number: u64, len: usize) -> Batch {
        let mut state = number.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
        let mut next = move || {
            // xorshift64 (Marsaglia 2003).
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
        };
        let x = Array3::from_shape_fn((BATCH, len, FEATURES), |_| next());
        let mean = |b: usize| (0..len).map(|i| x[(b, i, 0)]).sum::<f32>() / len as f32;
        let kind = Array2::from_shape_fn((BATCH, len), |(b, i)| {
            let score = x[(b, i, 0)] + x[(b, i, 1)] - mean(b);
            ((score + 2.0) / 4.0 * CLASSES as f32).clamp(0.0, CLASSES as f32 - 1.0) as i32
        });
        let is_known = Array2::from_shape_fn((BATCH, len), |(b, i)| {
            u8::from(next() > 0.5 || (b, i) == (0, 0))
        });
        Batch { x, kind, is_known }
    }
}

/// The length of the batch of a step, from 1 to `most`.
pub fn length(step: u64, most: usize) -> usize {
    1 + (step.wrapping_mul(0xD134_2543_DE82_EF95) >> 33) as usize % most
}
