//! Self-attention with separate products for queries, keys and values, as BERT and ViT have it.

use slabwise::nn::{Linear, Module};
use slabwise::params::Scope;
use slabwise::tensor::{Mask, Tensor};

/// The number of heads, which divide the width equally; 1 after a mistake.
#[track_caller]
pub(super) fn heads_of(at: &Scope, width: usize, heads: usize) -> usize {
    if heads == 0 || !width.is_multiple_of(heads) {
        at.mistake(format!(
            "attention: a width of {width} does not divide into {heads} heads"
        ));
        return 1;
    }
    heads
}

/// The number of tokens of each text of `tokens`, if it is fixed and the model reads as many: at
/// most that of its size of this name.
#[track_caller]
pub(super) fn length_of<'t>(
    what: &str,
    tokens: Tensor<'t>,
    (name, most): (&str, usize),
) -> Result<usize, Tensor<'t>> {
    let why = match (tokens.rank(), tokens.len(1)) {
        (2, Some(length)) if (1..=most).contains(&length) => return Ok(length),
        (2, Some(0)) => "texts of a token or more are needed".into(),
        (2, Some(_)) => format!("texts have at most {most} tokens, the model's {name}"),
        (2, None) => "the length must be fixed; compile a program for each length".into(),
        _ => "tokens [n, length] are needed".into(),
    };
    Err(tokens.mistake(format!("{what} of {tokens:?}: {why}")))
}

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
    /// divide the width equally. `length` is that of the sequences of [`Module::forward`].
    #[track_caller]
    pub fn new(at: &Scope, joined: Scope, width: usize, heads: usize, length: usize) -> Self {
        let part = |name: &str| Linear::new(at / name, width, width);
        SelfAttention {
            query: part("query"),
            key: part("key"),
            value: part("value"),
            joined: Linear::new(joined, width, width),
            heads,
            width,
            length,
        }
    }

    /// The result for sequences of this length under a mask that broadcasts to `[n, heads, length,
    /// length]`.
    #[track_caller]
    pub fn masked<'t>(&self, x: Tensor<'t>, length: usize, mask: Mask<'t>) -> Tensor<'t> {
        let each = self.width / self.heads;
        let lengths = [-1, length as i64, self.heads as i64, each as i64];
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
        self.masked(x, self.length, Mask::None)
    }
}
