//! Measures of predictions beside labels, for evaluation: no gradient flows through them.

use std::panic::Location;

use slabwise_kernels::dtype::DType::{Bool, F32, I32};

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

    /// The share of rows whose label is among the positions of the `k` largest scores, as
    /// [`Tensor::topk`] orders them: of equal scores the first, and NaN as the largest. Scores and
    /// labels are those of [`Tensor::accuracy`]. A label outside of the classes is never among them.
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
            let place = self.trace.arange(scores.dim(classes));
            let label = labels.cast(I32).unsqueeze(classes);
            let [is_nan, of_nan] = [scores.is_nan(), of_label.is_nan()];
            let above = scores.gt(of_label).or(is_nan.and(!of_nan));
            let equal = scores.equal(of_label).or(is_nan.and(of_nan));
            let before = above.or(equal.and(place.lt(label)));
            let before = before.cast(F32).sum_over(classes);
            let found = before.lt(k as f32).and(hit.any_over(classes));
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

    /// The share of the predictions of each class that are right: predictions and labels as of
    /// [`Tensor::confusion_matrix`] give `[classes]`; 0 of a class that is never predicted.
    #[track_caller]
    pub fn class_precision(self, labels: Tensor<'t>, classes: usize) -> Tensor<'t> {
        self.class_shares(labels, classes, 1.0, 0.0)
    }

    /// The share of the labels of each class that are predicted; 0 of a class without labels.
    #[track_caller]
    pub fn class_recall(self, labels: Tensor<'t>, classes: usize) -> Tensor<'t> {
        self.class_shares(labels, classes, 0.0, 1.0)
    }

    /// F₁ of each class, the harmonic mean of precision and recall; 0 of a class that is neither
    /// predicted nor a label. Its mean is the macro average; the micro average is the accuracy.
    #[track_caller]
    pub fn class_f1(self, labels: Tensor<'t>, classes: usize) -> Tensor<'t> {
        self.class_shares(labels, classes, 0.5, 0.5)
    }

    /// Right predictions of each class by so much of its predictions and of its labels.
    #[track_caller]
    fn class_shares(self, labels: Tensor<'t>, classes: usize, of: f32, by: f32) -> Tensor<'t> {
        let matrix = self.confusion_matrix(labels, classes);
        if matrix.is_poisoned() {
            return matrix;
        }
        let all = matrix.sum_over(0) * of + matrix.sum_over(1) * by;
        all.gt(0.0)
            .select(matrix.diagonal(0) / all.maximum(0.5), 0.0)
    }

    /// The area under the receiver operating characteristic of scores `[n]` beside labels `[n]`
    /// (positive where they are true, or not 0): the share of pairs of a positive and a negative example in
    /// which the positive one has the higher score, equal scores as half. NaN without such pairs.
    #[track_caller]
    pub fn auroc(self, labels: Tensor<'t>) -> Tensor<'t> {
        let at = Location::caller();
        let scores = self.trace.record(at, &[self, labels], |g, ids| {
            let (a, b) = (g.dims(ids[0]), g.dims(ids[1]));
            if a.len() != 1 || a != b {
                return Err(format!(
                    "auroc of {} with labels {}: two vectors of one length are needed",
                    g.symbols.show(a),
                    g.symbols.show(b)
                ));
            }
            Ok(ids[0])
        });
        if scores.is_poisoned() {
            return scores;
        }
        self.trace.on_behalf(at, || {
            let is_true = labels.dtype() == Bool;
            let positive = if is_true { labels } else { labels.not_equal(0) };
            let scores = scores.cast(F32);
            let (row, column) = (scores.unsqueeze(1), scores.unsqueeze(0));
            let won = row.gt(column).cast(F32) + row.equal(column).cast(F32) * 0.5;
            // Counts along one axis stay exact.
            let won = positive.unsqueeze(0).select(0.0, won).sum_over(1);
            let negatives = (!positive).cast(F32).sum();
            let shares = positive.select(won / negatives, 0.0);
            shares.sum() / positive.cast(F32).sum()
        })
    }

    /// e to the [cross entropy](Tensor::cross_entropy): the number of equally likely tokens among
    /// which the model is as undecided.
    #[track_caller]
    pub fn perplexity(self, labels: Tensor<'t>) -> Tensor<'t> {
        self.cross_entropy(labels).exp()
    }

    /// The peak signal-to-noise ratio in decibels of an image beside another one, whose elements
    /// are from 0 to `peak`; ∞ of equal images.
    #[track_caller]
    pub fn psnr(self, target: Tensor<'t>, peak: f32) -> Tensor<'t> {
        (self.mse(target).recip() * (peak * peak)).log10() * 10.0
    }

    /// The mean structural similarity of images `[n, channels, h, w]` whose elements are from 0 to
    /// `peak` (Wang et al. 2004): in Gaussian windows of 11 × 11 and deviation 1.5 that lie within
    /// the image.
    #[track_caller]
    pub fn ssim(self, target: Tensor<'t>, peak: f32) -> Tensor<'t> {
        let at = Location::caller();
        let images = self.trace.record(at, &[self, target], |g, ids| {
            let (a, b) = (g.dims(ids[0]), g.dims(ids[1]));
            let is_image = a.len() == 4 && a[1..].iter().all(|n| n.as_fixed().is_some());
            let is_large = is_image && a[2..].iter().all(|n| n.as_fixed() >= Some(11));
            if a != b || !is_large || [g.dtype(ids[0]), g.dtype(ids[1])] != [F32; 2] {
                return Err(format!(
                    "ssim of {} with {}: two images [n, channels, h, w] of one shape, f32 and at \
                     least 11 × 11, are needed",
                    g.symbols.show(a),
                    g.symbols.show(b)
                ));
            }
            Ok(ids[0])
        });
        if images.is_poisoned() {
            return images;
        }
        self.trace.on_behalf(at, || {
            let channels = images.len(1).unwrap_or(1);
            let along = self.trace.range_f32(-5.0, 6.0, 1.0);
            let bell = (along.square() / -(2.0 * 1.5 * 1.5)).exp();
            let bell = bell / bell.sum();
            let smooth = |x: Tensor<'t>| {
                let across = |x: Tensor<'t>, lengths: [usize; 2]| {
                    let one = bell.reshape([1, 1, lengths[0], lengths[1]]);
                    let weight = one.expand([channels, 1, lengths[0], lengths[1]]);
                    x.conv2d_with(weight, super::ConvOptions::new().groups(channels))
                };
                across(across(x, [11, 1]), [1, 11])
            };
            let (a, b) = (smooth(images), smooth(target));
            let variances =
                smooth(images.square()) + smooth(target.square()) - a.square() - b.square();
            let covariance = smooth(images * target) - a * b;
            let (c1, c2) = ((0.01 * peak).powi(2), (0.03 * peak).powi(2));
            let above = (a * b * 2.0 + c1) * (covariance * 2.0 + c2);
            let below = (a.square() + b.square() + c1) * (variances + c2);
            (above / below).mean()
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
