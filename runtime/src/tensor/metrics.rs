//! Measures of predictions beside labels, for evaluation: no gradient flows through them.

use std::panic::Location;

use slabwise_kernels::dtype::DType::F32;

use super::Tensor;
use crate::ops::GraphBuilder;
use crate::trace::Line;

impl<'t> Tensor<'t> {
    /// The share of rows whose largest score is at the label: scores `[batch…, classes]`, labels
    /// `[batch…]` (i32 or u8). NaN of no rows.
    ///
    /// ```
    /// # use slabwise::prelude::*;
    /// # let trace = Trace::inference();
    /// # let (logits, labels) = (trace.input("x", F32, (8, 10)), trace.input("y", I32, (8,)));
    /// let share = logits.accuracy(labels);
    /// ```
    #[track_caller]
    pub fn accuracy(self, labels: Tensor<'t>) -> Tensor<'t> {
        let scores = self.beside_labels("accuracy", labels, Location::caller());
        match scores.rank().checked_sub(1) {
            Some(classes) => scores.argmax(classes).equal(labels).mean(),
            None => scores,
        }
    }

    /// The share of rows in which fewer than `k` scores are above that of the label, as of
    /// [`Tensor::accuracy`]. A label outside of the classes is never among them.
    #[track_caller]
    pub fn topk_accuracy(self, labels: Tensor<'t>, k: usize) -> Tensor<'t> {
        let at = Location::caller();
        let scores = self.beside_labels("topk_accuracy", labels, at);
        let Some(classes) = scores.rank().checked_sub(1) else {
            return scores;
        };
        let hit = self.trace.record(at, &[scores, labels], |g, ids| {
            let count = g.dims(ids[0])[classes];
            Ok(super::index::matches_position(g, ids[1], count))
        });
        self.trace.on_behalf(at, || {
            let of_label = hit.select(scores, 0.0).sum_keep(classes);
            let above = scores.gt(of_label).cast(F32).sum_over(classes);
            let found = above.lt(k as f32).and(hit.any_over(classes));
            found.mean()
        })
    }

    /// How often each label (row) was predicted as each class (column): predictions and labels of
    /// one shape (i32 or u8) give f32 `[classes, classes]`. A class outside of `0..classes` fails
    /// the run.
    #[track_caller]
    pub fn confusion_matrix(self, labels: Tensor<'t>, classes: usize) -> Tensor<'t> {
        let at = Location::caller();
        let predicted = self.trace.record(at, &[self, labels], |g, ids| {
            let (a, b) = (g.dims(ids[0]), g.dims(ids[1]));
            if a != b {
                return Err(format!(
                    "confusion_matrix of {} with labels {}: shapes differ",
                    g.symbols.show(a),
                    g.symbols.show(b)
                ));
            }
            Ok(ids[0])
        });
        if predicted.is_poisoned() {
            return predicted;
        }
        self.trace.on_behalf(at, || {
            let flat = |x: Tensor<'t>| {
                let x = x.one_hot(classes);
                x.reshape([-1, i64::try_from(classes).unwrap_or(i64::MAX)])
            };
            flat(labels).t().matmul(flat(predicted))
        })
    }

    /// These scores, if labels fit them.
    fn beside_labels(self, what: &str, labels: Tensor<'t>, at: Line) -> Tensor<'t> {
        self.trace.record(at, &[self, labels], |g, ids| {
            let (scores, of_labels) = (g.dims(ids[0]), g.dims(ids[1]));
            if scores.split_last().map(|(_, batch)| batch) != Some(of_labels.as_slice()) {
                return Err(format!(
                    "{what} of {} with labels {}: scores [batch…, classes] and labels [batch…] are needed",
                    g.symbols.show(scores),
                    g.symbols.show(of_labels)
                ));
            }
            super::index::require_index(g, what, ids[1])?;
            Ok(ids[0])
        })
    }
}
