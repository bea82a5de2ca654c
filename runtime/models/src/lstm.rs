//! A language model with a recurrent network.

use slabwise::nn::{Embedding, Linear, Lstm, Module, Sequential};
use slabwise::params::Scope;

/// The sizes of an LSTM that predicts the next token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LstmModel {
    /// Different tokens.
    pub vocabulary: usize,
    /// The width of a token's vector.
    pub width: usize,
    /// The width of the recurrent state.
    pub hidden: usize,
    /// Tokens in a sequence.
    pub length: usize,
    /// Recurrent layers, each over the states of the one before.
    pub layers: usize,
}

impl LstmModel {
    /// 128 kinds of tokens, vectors of 128, a state of 256, sequences of 32, one layer.
    pub const SMALL: LstmModel = LstmModel {
        vocabulary: 128,
        width: 128,
        hidden: 256,
        length: 32,
        layers: 1,
    };

    /// Declares the weights `embedding.weight`, those of `lstm` and of `fc`: tokens `[n, length]` →
    /// logits of the next token `[n, length, vocabulary]`.
    #[track_caller]
    pub fn layers(&self, at: &Scope) -> impl Module + use<> {
        let mut layers = Sequential::new().then(Embedding::new(
            at / "embedding",
            self.vocabulary,
            self.width,
        ));
        for layer in 0..self.layers {
            let inputs = if layer == 0 { self.width } else { self.hidden };
            layers = layers.then(Lstm::numbered(at / "lstm", layer, inputs, self.hidden));
        }
        layers.then(Linear::new(at / "fc", self.hidden, self.vocabulary))
    }
}
