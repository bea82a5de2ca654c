//! Scaled dot-product attention whose scores are never in memory as a whole.

use std::ops::Range;

use smallvec::SmallVec;

use super::{Access, Dims, Operand, Spec, SpecError, check_operand};
use crate::dtype::DType;
use crate::size::Size;

/// The scores of attention before their softmax: a factor of the products of queries and keys, a
/// limit, and the keys that each query sees.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Scores {
    /// The factor.
    pub scale: f32,
    /// Scores s are limited to ±cap, as cap·tanh(s/cap).
    pub soft_cap: Option<f32>,
    /// A query sees no key after its own position.
    pub causal: bool,
    /// A query sees only keys fewer than so many positions away.
    pub window: Option<u32>,
    /// The position of the first query among the keys.
    pub past: i32,
    /// Positions from a query to the next: 1, or 0 where the queries are heads of one position.
    pub step: u32,
}

impl Scores {
    /// The keys that the query of a row sees, of so many keys.
    pub fn visible(&self, row: usize, keys: usize) -> Range<usize> {
        let row = i64::try_from(row).unwrap_or(i64::MAX);
        let position = row
            .saturating_mul(i64::from(self.step))
            .saturating_add(i64::from(self.past));
        let window = self.window.map_or(i64::MAX, i64::from);
        let from = match self.window {
            Some(_) => position.saturating_add(1).saturating_sub(window),
            None => 0,
        };
        let to = match self.causal {
            true => position.saturating_add(1),
            false => match self.window {
                Some(_) => position.saturating_add(window),
                None => i64::MAX,
            },
        };
        let [from, to] = [from, to].map(|key| usize::try_from(key.max(0)).unwrap_or(usize::MAX));
        let to = to.min(keys);
        from.min(to)..to
    }

    /// These scores for a past that is so much longer.
    pub fn after(&self, keys: i32) -> Scores {
        Scores {
            past: self.past.saturating_add(keys),
            ..*self
        }
    }

    /// Whether there is no limit, and queries follow each other.
    pub fn is_plain(&self) -> bool {
        self.soft_cap.is_none() && self.step == 1
    }

    /// The keys that some query of these rows sees.
    pub fn visible_to(&self, rows: Range<usize>, keys: usize) -> Range<usize> {
        if rows.is_empty() {
            return 0..0;
        }
        let from = self.visible(rows.start, keys).start;
        from..self.visible(rows.end - 1, keys).end.max(from)
    }

    /// Pairs of a query and a key that it sees.
    pub fn pairs(&self, queries: usize, keys: usize) -> u64 {
        if self.step == 0 {
            return (queries as u64).saturating_mul(self.visible(0, keys).len() as u64);
        }
        let (past, keys) = (i128::from(self.past), keys as i128);
        // Σ (row + past + more), each within 0 and the number of keys.
        let ends = |more: i128| {
            let (first, count) = (past + more, queries as i128);
            let none = (-first).clamp(0, count);
            let first = first + none;
            let rising = (keys - first).clamp(0, count - none);
            let all = count - none - rising;
            rising * first + rising * (rising - 1) / 2 + all * keys
        };
        let window = self.window.map(i128::from);
        let end = match (self.causal, window) {
            (true, _) => ends(1),
            (false, Some(window)) => ends(window),
            (false, None) => queries as i128 * keys,
        };
        let before = window.map_or(0, |window| ends(1 - window));
        u64::try_from(end - before).unwrap_or(u64::MAX)
    }
}

/// softmax(scores + mask)·V for `dims = batch…, queries, columns`; see [`Body::Attention`]. All is
/// computed in f32: operands of halves are converted to it, and a result of halves at the end.
/// Writes its result itself: there is no `code`.
///
/// [`Body::Attention`]: super::Body::Attention
#[derive(Clone, Debug, PartialEq)]
pub struct Attention {
    /// The scores.
    pub scores: Scores,
    /// Length of the axis along which queries and keys are multiplied.
    pub width: Size,
    /// Keys.
    pub keys: Size,
    /// Queries: strides over `batch…, queries, width`.
    pub q: Operand,
    /// Keys: strides over `batch…, keys, width`.
    pub k: Operand,
    /// Values: strides over `batch…, keys, columns`.
    pub v: Operand,
    /// Added to the scores, where −∞ hides a key of any score; or truth values, of which those that
    /// are false hide a key: strides over `batch…, queries, keys`.
    pub mask: Option<Operand>,
    /// More keys before the first query, i32: strides over `batch…`.
    pub past: Option<Operand>,
    /// The result: strides over `dims`.
    pub result: Operand,
}

/// The gradients of queries, keys and values of an [`Attention`], whose values are as wide as its
/// keys; see [`Body::AttentionGrad`]. `dims = batch…, rows, width`: the rows are those of the
/// queries, then those of the keys, then those of the values, or take turns. Writes its result
/// itself: there is no `code`.
///
/// [`Body::AttentionGrad`]: super::Body::AttentionGrad
#[derive(Clone, Debug, PartialEq)]
pub struct AttentionGrad {
    /// The attention; its result is read.
    pub of: Attention,
    /// Queries.
    pub queries: Size,
    /// The gradient of its result: strides over `batch…, queries, width`.
    pub dy: Operand,
    /// A row of a query, one of a key and one of a value take turns; there are as many keys as
    /// queries.
    pub in_turns: bool,
    /// The result: strides over `dims`.
    pub gradients: Operand,
}

/// The types of queries, keys, values and results.
const FLOATS: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

impl Attention {
    /// The operands except for the result, each with its space.
    fn sources(
        &self,
        batch: &[Size],
        queries: Size,
        columns: Size,
    ) -> SmallVec<[(Operand, Dims, Access); 3]> {
        let space = |last: &[Size]| batch.iter().chain(last).copied().collect::<Dims>();
        let mask = self
            .mask
            .as_ref()
            .map(|mask| (mask, space(&[queries, self.keys])));
        let past = self.past.as_ref().map(|past| (past, space(&[])));
        let all = [
            (&self.q, space(&[queries, self.width])),
            (&self.k, space(&[self.keys, self.width])),
            (&self.v, space(&[self.keys, columns])),
        ];
        let all = all.into_iter().chain(mask).chain(past);
        all.map(|(operand, space)| (operand.clone(), space, Access::Read))
            .collect()
    }

    pub(super) fn operands(&self, dims: &Dims) -> SmallVec<[(Operand, Dims, Access); 3]> {
        let (batch, last) = dims.split_at(dims.len() - 2);
        let mut all = self.sources(batch, last[0], last[1]);
        all.push((self.result.clone(), dims.clone(), Access::Write));
        all
    }

    /// Fails unless each operand has a type of its own and the axes of its space.
    pub(super) fn check(&self, spec: &Spec) -> Result<(), SpecError> {
        self.check_operands(spec, "the result")
    }

    fn check_operands(&self, spec: &Spec, result: &'static str) -> Result<(), SpecError> {
        let rank = spec.dims.len();
        if rank < 2 {
            return Err(SpecError::AttentionRank { axes: rank });
        }
        for (name, operand) in [
            ("the queries", &self.q),
            ("the keys", &self.k),
            ("the values", &self.v),
            (result, &self.result),
        ] {
            check_operand(name, operand, rank, &FLOATS)?;
        }
        if let Some(mask) = &self.mask {
            let [a, b, c] = FLOATS;
            check_operand("the mask", mask, rank, &[a, b, c, DType::Bool])?;
        }
        if let Some(past) = &self.past {
            check_operand("the past", past, rank - 2, &[DType::I32])?;
        }
        Ok(())
    }
}

impl AttentionGrad {
    pub(super) fn operands(&self, dims: &Dims) -> SmallVec<[(Operand, Dims, Access); 3]> {
        let batch = &dims[..dims.len() - 2];
        let width = self.of.width;
        let rows: Dims = batch.iter().copied().chain([self.queries, width]).collect();
        let mut all = self.of.sources(batch, self.queries, width);
        all.extend([
            (self.of.result.clone(), rows.clone(), Access::Read),
            (self.dy.clone(), rows, Access::Read),
            (self.gradients.clone(), dims.clone(), Access::Write),
        ]);
        all
    }

    /// Fails unless each operand has a type of its own and the axes of its space.
    pub(super) fn check(&self, spec: &Spec) -> Result<(), SpecError> {
        self.of.check_operands(spec, "the attention")?;
        let rank = spec.dims.len();
        check_operand("the gradient", &self.dy, rank, &FLOATS)?;
        check_operand("the result", &self.gradients, rank, &FLOATS)?;
        if self.in_turns && self.queries != self.of.keys {
            return Err(SpecError::AttentionTurns);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The visible keys of every row against the conditions that define them.
    #[test]
    fn visible_keys_are_those_of_the_conditions() {
        for causal in [false, true] {
            for window in [None, Some(1), Some(3), Some(9)] {
                for (past, step) in [(0, 1), (2, 1), (7, 1), (-2, 1), (2, 0), (-3, 0)] {
                    let scores = Scores {
                        scale: 1.0,
                        soft_cap: None,
                        causal,
                        window,
                        past,
                        step,
                    };
                    for (queries, keys) in [(1, 1), (5, 5), (4, 9), (9, 4), (3, 0)] {
                        for row in 0..queries {
                            let position = row as i64 * i64::from(step) + i64::from(past);
                            let sees = |key: &usize| {
                                let key = *key as i64;
                                let near = window.is_none_or(|window| {
                                    (key - position).abs() < i64::from(window)
                                });
                                near && !(causal && key > position)
                            };
                            let expected: Vec<usize> = (0..keys).filter(sees).collect();
                            let range = scores.visible(row, keys);
                            assert_eq!(
                                range.collect::<Vec<_>>(),
                                expected,
                                "{scores:?} {row} {keys}"
                            );
                        }
                        let all = scores.visible_to(0..queries, keys);
                        let rows = (0..queries).map(|row| scores.visible(row, keys));
                        let within = |row: Range<usize>| {
                            row.is_empty() || (all.start <= row.start && row.end <= all.end)
                        };
                        assert!(rows.clone().all(within), "{scores:?} {queries} {keys}");
                        let pairs: usize = rows.map(|row| row.len()).sum();
                        assert_eq!(scores.pairs(queries, keys), pairs as u64);
                    }
                }
            }
        }
    }
}
