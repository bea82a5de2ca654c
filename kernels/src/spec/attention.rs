//! Scaled dot-product attention whose scores are never in memory as a whole.

use std::ops::Range;

use smallvec::SmallVec;

use super::{Access, Dims, Operand, Spec, SpecError, check_operand};
use crate::dtype::DType;
use crate::size::Size;

/// The scores of attention before their softmax: a factor of the products of queries and keys, and
/// the keys that each query sees.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Scores {
    /// The factor.
    pub scale: f32,
    /// A query sees no key behind its own position.
    pub causal: bool,
    /// A query sees only keys fewer than so many positions away.
    pub window: Option<u32>,
    /// The position of the first query among the keys.
    pub past: u32,
}

impl Scores {
    /// The keys that the query of a row sees, of so many keys.
    pub fn visible(&self, row: usize, keys: usize) -> Range<usize> {
        let position = row.saturating_add(self.past as usize);
        let window = self.window.map_or(usize::MAX, |window| window as usize);
        let from = position.saturating_add(1).saturating_sub(window);
        let to = match self.causal {
            true => position.saturating_add(1),
            false => position.saturating_add(window),
        };
        let to = to.min(keys);
        from.min(to)..to
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

/// softmax(scores)·V for `dims = batch…, queries, columns`, f32; see [`Body::Attention`]. Writes its
/// result itself: there is no `code`.
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
    /// The result: strides over `dims`.
    pub result: Operand,
}

/// The gradients of queries, keys and values of an [`Attention`], whose values are as wide as its
/// keys; see [`Body::AttentionGrad`]. `dims = batch…, rows, width`: the rows are those of the
/// queries, then those of the keys, then those of the values. Writes its result itself: there is no
/// `code`.
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
    /// The result: strides over `dims`.
    pub result: Operand,
}

impl Attention {
    /// The operands but for the result, each with its space.
    fn sources(
        &self,
        batch: &[Size],
        queries: Size,
        columns: Size,
    ) -> [(Operand, Dims, Access); 3] {
        let space = |rows, columns| batch.iter().copied().chain([rows, columns]).collect();
        [
            (self.q.clone(), space(queries, self.width), Access::Read),
            (self.k.clone(), space(self.keys, self.width), Access::Read),
            (self.v.clone(), space(self.keys, columns), Access::Read),
        ]
    }

    pub(super) fn operands(&self, dims: &Dims) -> SmallVec<[(Operand, Dims, Access); 3]> {
        let (batch, last) = dims.split_at(dims.len() - 2);
        let sources = self.sources(batch, last[0], last[1]);
        let result = (self.result.clone(), dims.clone(), Access::Write);
        sources.into_iter().chain([result]).collect()
    }

    /// Fails unless each operand is of f32 and has the axes of its space.
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
            check_operand(name, operand, rank, &[DType::F32])?;
        }
        Ok(())
    }
}

impl AttentionGrad {
    pub(super) fn operands(&self, dims: &Dims) -> SmallVec<[(Operand, Dims, Access); 3]> {
        let batch = &dims[..dims.len() - 2];
        let width = self.of.width;
        let rows: Dims = batch.iter().copied().chain([self.queries, width]).collect();
        let sources = self.of.sources(batch, self.queries, width);
        let rest = [
            (self.of.result.clone(), rows.clone(), Access::Read),
            (self.dy.clone(), rows, Access::Read),
            (self.result.clone(), dims.clone(), Access::Write),
        ];
        sources.into_iter().chain(rest).collect()
    }

    /// Fails unless each operand is of f32 and has the axes of its space.
    pub(super) fn check(&self, spec: &Spec) -> Result<(), SpecError> {
        self.of.check_operands(spec, "the attention")?;
        let rank = spec.dims.len();
        check_operand("the gradient", &self.dy, rank, &[DType::F32])?;
        check_operand("the result", &self.result, rank, &[DType::F32])
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
                for past in [0, 2, 7] {
                    let scores = Scores {
                        scale: 1.0,
                        causal,
                        window,
                        past,
                    };
                    for (queries, keys) in [(1, 1), (5, 5), (4, 9), (9, 4), (3, 0)] {
                        for row in 0..queries {
                            let position = row as i64 + i64::from(past);
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
