//! Losses of class scores: by labels or by the probabilities of classes.

use std::panic::Location;

use slabwise_kernels::dtype::DType;
use slabwise_kernels::scalar::ScalarOp;
use slabwise_kernels::size::Size;
use slabwise_kernels::spec::Dims;
use smallvec::SmallVec;

use super::Reduction;
use crate::graph::Graph;
use crate::ops::{GraphBuilder, NodeId, Op};
use crate::tensor::index::require_index;
use crate::tensor::{Tensor, check_index};
use crate::trace::Line;

/// Options of [`Tensor::cross_entropy_with`] and [`Tensor::nll`].
///
/// ```
/// # use slabwise::prelude::*;
/// # use slabwise::tensor::CrossEntropy;
/// # let trace = Trace::training();
/// # let (logits, labels) = (trace.input("x", F32, (2, 5, 4, 4)), trace.input("y", I32, (2, 4, 4)));
/// let loss = logits.cross_entropy_with(
///     labels,
///     CrossEntropy {
///         class_axis: Some(1),
///         ignore: Some(-100),
///         ..CrossEntropy::default()
///     },
/// );
/// ```
#[derive(Clone, Copy, Debug, Default)]
pub struct CrossEntropy<'t> {
    /// The axis of the classes; the last one if `None`. In PyTorch it is axis 1.
    pub class_axis: Option<usize>,
    /// A label whose elements have no loss and do not count in a mean. Where a mean is one of several
    /// parts of a batch, such as micro-batches and ranks, or of several batches, the mean of all
    /// would need weights by the labels that count, and those of parts and batches are their rows.
    /// Divide a [`Reduction::Sum`] by the number of labels of all parts, as
    /// [`Trace::minimize_in_parts`](crate::Trace::minimize_in_parts) shows, and evaluate by
    /// [`Session::mean_of_sums`](crate::Session::mean_of_sums).
    pub ignore: Option<i32>,
    /// A weight for each class, f32 `[classes]`. A mean divides by the weights of the labels, to
    /// which the same applies as to those that are [ignored](CrossEntropy::ignore).
    pub weights: Option<Tensor<'t>>,
    /// Label smoothing: the share of a label, in 0..=1, that is spread evenly over all classes
    /// (Szegedy et al. 2016).
    pub smoothing: f32,
    /// The reduction of the losses of single elements.
    pub reduction: Reduction,
}

/// Arguments without mistakes.
struct Scores<'t> {
    x: Tensor<'t>,
    axis: usize,
    /// f32 `[1…, classes, 1…]`.
    weights: Option<Tensor<'t>>,
    classes: f32,
}

impl<'t> Tensor<'t> {
    /// The cross entropy −ln softmax(logits) at the labels, with options: logits `[…, classes, …]`
    /// (f32), labels (i32 or u8) of that shape without the axis of the classes. A label outside of
    /// `0..classes` that is not ignored fails the run. A mean over ignored labels alone is NaN.
    #[track_caller]
    pub fn cross_entropy_with(self, labels: Tensor<'t>, options: CrossEntropy<'t>) -> Tensor<'t> {
        let at = Location::caller();
        let Some(scores) = self.scores("cross_entropy", Some(labels), &options, at) else {
            return self.trace.poisoned();
        };
        self.trace.on_behalf(at, || {
            let x = scores.x.log_softmax(scores.axis);
            x.of_labels("cross_entropy", labels, &scores, &options)
        })
    }

    /// The cross entropy −Σ target·ln softmax(logits) against the probabilities of classes, of the
    /// shape of the logits. A mean divides by the number of rows, with class weights too; nothing
    /// is ignored.
    #[track_caller]
    pub fn cross_entropy_soft(self, target: Tensor<'t>, options: CrossEntropy<'t>) -> Tensor<'t> {
        let at = Location::caller();
        let (logits, target) = self.beside_target("cross_entropy", target, at);
        let Some(scores) = logits.scores("cross_entropy", None, &options, at) else {
            return self.trace.poisoned();
        };
        self.trace.on_behalf(at, || {
            let x = scores.x.log_softmax(scores.axis);
            let target = if options.smoothing == 0.0 {
                target
            } else {
                target * (1.0 - options.smoothing) + options.smoothing / scores.classes
            };
            let losses = x * target;
            let losses = scores.weights.map_or(losses, |w| losses * w);
            (-losses.sum_over(scores.axis)).reduced("cross_entropy", options.reduction)
        })
    }

    /// −x at the labels, of logarithms of probabilities x, with the options of
    /// [`Tensor::cross_entropy_with`] (which computes the logarithms as well).
    #[doc(alias = "nll_loss")]
    #[track_caller]
    pub fn nll(self, labels: Tensor<'t>, options: CrossEntropy<'t>) -> Tensor<'t> {
        let at = Location::caller();
        let Some(scores) = self.scores("nll", Some(labels), &options, at) else {
            return self.trace.poisoned();
        };
        self.trace
            .on_behalf(at, || self.of_labels("nll", labels, &scores, &options))
    }

    /// The losses of logarithms of probabilities at labels.
    #[track_caller]
    fn of_labels(
        self,
        what: &str,
        labels: Tensor<'t>,
        scores: &Scores<'t>,
        options: &CrossEntropy<'t>,
    ) -> Tensor<'t> {
        let axis = scores.axis;
        let counted = options.ignore.map(|ignore| labels.not_equal(ignore));
        // An ignored label is out of range, usually.
        let labels = counted.map_or(labels, |counted| counted.select(labels, 0));
        let hit = self
            .trace
            .record(Location::caller(), &[self, labels], |g, ids| {
                let classes = g.dims(ids[0])[axis];
                check_index(g, ids[1], classes);
                Ok(hits(g, ids[0], ids[1], axis))
            });
        let picked = hit.select(self, 0.0).sum_over(axis);
        let weights = scores.weights.map(|w| hit.select(w, 0.0).sum_over(axis));
        let mut losses = -weights.map_or(picked, |w| picked * w);
        if options.smoothing != 0.0 {
            let all = scores.weights.map_or(self, |w| self * w).sum_over(axis);
            losses =
                losses * (1.0 - options.smoothing) - all * (options.smoothing / scores.classes);
        }
        if let Some(counted) = counted {
            losses = counted.select(losses, 0.0);
        }
        if options.reduction != Reduction::Mean || (counted.is_none() && weights.is_none()) {
            return losses.reduced(what, options.reduction);
        }
        let ones = counted.map(|c| c.cast(DType::F32));
        let count = match (ones, weights) {
            (Some(ones), Some(w)) => ones * w,
            (Some(one), None) | (None, Some(one)) => one,
            (None, None) => losses,
        };
        let axes: Vec<usize> = (0..losses.rank())
            .filter(|_| self.trace.is_training())
            .collect();
        let at = Location::caller();
        let losses = losses.with_elements(at, what, &axes, "has a mean to learn from");
        losses.sum() / count.sum()
    }

    /// The arguments of a loss of class scores, if they fit.
    fn scores(
        self,
        what: &str,
        labels: Option<Tensor<'t>>,
        options: &CrossEntropy<'t>,
        at: Line,
    ) -> Option<Scores<'t>> {
        let mut axis = 0;
        let operands: Vec<Tensor<'t>> = [Some(self), labels, options.weights]
            .into_iter()
            .flatten()
            .collect();
        let x = self.trace.record(at, &operands, |g, ids| {
            axis = fit(g, what, ids, labels.is_some(), options)?;
            Ok(ids[0])
        });
        if x.is_poisoned() {
            return None;
        }
        let weights = options.weights.map(|w| {
            self.trace.record(at, &[w, x], |g, ids| {
                let rank = g.dims(ids[1]).len();
                let mut dims: Dims = SmallVec::from_elem(Size::ONE, rank);
                dims[axis] = g.dims(ids[1])[axis];
                Ok(g.reshape(ids[0], &dims))
            })
        });
        Some(Scores {
            x,
            axis,
            weights,
            classes: x.len(axis).unwrap_or(1) as f32,
        })
    }
}

/// The axis of the classes, if logits, labels and weights fit each other.
fn fit(
    g: &Graph,
    what: &str,
    ids: &[NodeId],
    labelled: bool,
    options: &CrossEntropy<'_>,
) -> Result<usize, String> {
    let (x, dims) = (ids[0], g.dims(ids[0]).clone());
    let shown = g.symbols.show(&dims);
    let axis = options.class_axis.or(dims.len().checked_sub(1));
    let Some(axis) = axis.filter(|&axis| axis < dims.len()) else {
        return Err(format!(
            "{what} of {shown}: there is no axis {} of classes",
            axis.unwrap_or(0)
        ));
    };
    if g.dtype(x) != DType::F32 {
        return Err(format!("{what}: logits are {}, not f32", g.dtype(x)));
    }
    if !(0.0..=1.0).contains(&options.smoothing) {
        return Err(format!(
            "{what}: a share of {} cannot be spread",
            options.smoothing
        ));
    }
    if dims[axis].as_fixed().is_none() && options.smoothing != 0.0 {
        return Err(format!(
            "{what} of {shown}: a label is spread over a fixed number of classes only"
        ));
    }
    if labelled {
        let labels = ids[1];
        let mut rows = dims.clone();
        rows.remove(axis);
        if *g.dims(labels) != rows {
            return Err(format!(
                "{what} of {shown} with labels {}: labels of shape {} are needed, for classes along axis {axis}",
                g.symbols.show(g.dims(labels)),
                g.symbols.show(&rows)
            ));
        }
        require_index(g, what, labels)?;
    }
    if options.weights.is_some() {
        let weights = ids[ids.len() - 1];
        if g.dims(weights).as_slice() != [dims[axis]] || g.dtype(weights) != DType::F32 {
            return Err(format!(
                "{what} of {shown}: class weights are {} {}, not f32 {}",
                g.dtype(weights),
                g.symbols.show(g.dims(weights)),
                g.symbols.show(&[dims[axis]])
            ));
        }
    }
    Ok(axis)
}

/// Whether a label equals the position along the axis of classes.
fn hits(g: &mut Graph, x: NodeId, labels: NodeId, axis: usize) -> NodeId {
    let dims = g.dims(x).clone();
    let mut column = dims.clone();
    column[axis] = Size::ONE;
    let labels = g.reshape(labels, &column);
    let labels = g.broadcast(labels, &dims);
    let mut strides: Dims = SmallVec::from_elem(Size::ZERO, dims.len());
    strides[axis] = Size::ONE;
    let position = g.emit(Op::Index(strides), &[], DType::I32, dims);
    g.scalar(ScalarOp::Eq, &[position, labels])
}
