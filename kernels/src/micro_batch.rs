//! Kernels on micro-batches: slices of a batch.
//!
//! A kernel whose operands have an example's elements together can run on a few examples at a time
//! (strip-mining: Allen and Kennedy, *Optimizing Compilers*, §9), so that a tensor between two such
//! kernels needs only a slice's bytes. For a kernel whose results each belong to one example, only
//! the number of examples changes. A kernel that sums over the batch keeps its partial sums
//! (*sums*) from slice to slice and finishes them in the last one. In both cases a slice performs
//! exactly the additions of the whole batch, in the same order, and therefore the results have the
//! same bits.

use smallvec::SmallVec;

use crate::size::{Env, Size, Symbol};
use crate::spec::{Body, ConvKind, Spec};

/// How a kernel runs on slices: the batch axis of its arguments and iteration space.
#[derive(Clone, Debug, PartialEq)]
pub struct MicroBatching {
    /// The number of examples.
    pub batch: Symbol,
    /// For each argument in the order of [`Spec::arguments`], the elements between two examples;
    /// `None` if all slices read the same elements.
    pub steps: Vec<Option<Size>>,
    /// Whether it sums over the batch, so that partial sums pass from slice to slice.
    pub folds: bool,
    /// The axis of [`Spec::dims`] that examples lie along, if one of them does, and its points for
    /// each example.
    pub(crate) axis: Option<(usize, Size)>,
}

/// One slice of a run: the examples `from..to`, or as many of them as there are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MicroBatch {
    /// Examples before it.
    pub from: u32,
    /// Examples before the next one.
    pub to: u32,
    /// Whether it is the last of the run: sums are finished and stored.
    pub last: bool,
}

impl MicroBatch {
    /// The sizes of this slice in a run of these.
    pub fn sizes(&self, whole: &Env, batch: Symbol) -> Env {
        let mut env = *whole;
        let examples = &mut env.0[usize::from(batch.0)];
        *examples = (*examples).min(self.to).saturating_sub(self.from);
        env
    }
}

impl MicroBatching {
    /// How a spec runs on slices along `batch`, or `None` if it cannot: examples must lie along one
    /// axis of each operand that differs between them, and along none that is indexed, scattered
    /// to, or reduced to positions.
    pub fn of(spec: &Spec, batch: Symbol) -> Option<MicroBatching> {
        let varies = |size: &Size| size.symbols().any(|s| s == batch);
        let per_example = |size: &Size| size.checked_div_size(Size::symbol(batch));
        let mut axes = spec
            .dims
            .iter()
            .enumerate()
            .filter(|(_, size)| varies(size));
        let axis = match axes.next() {
            Some((axis, size)) => Some((axis, per_example(size)?)),
            None => None,
        };
        if axes.next().is_some() || spec.indices.iter().flatten().any(varies) {
            return None;
        }
        let folds = match &spec.body {
            // Sums in the epilogue are not kept from slice to slice.
            Body::Matmul(_) | Body::Conv2d(_) if spec.reduced > 0 => return None,
            Body::Loop => axis?.0 >= spec.dims.len() - spec.reduced,
            Body::Matmul(product) if varies(&product.k) => {
                per_example(&product.k).filter(|_| axis.is_none())?;
                true
            }
            Body::Matmul(_) => {
                axis?;
                false
            }
            Body::Conv2d(conv) if conv.prologue.is_some() => return None,
            Body::Conv2d(conv) if conv.kind == ConvKind::WeightGrad => {
                if axis.is_some() || !varies(&conv.n) {
                    return None;
                }
                true
            }
            Body::Conv2d(_) | Body::Pool2d(_) | Body::Pool2dGrad(_) if axis?.0 == 0 => false,
            Body::Gather(gather) if !varies(&gather.axis_len) && !varies(&gather.axis_stride) => {
                axis?;
                false
            }
            Body::Attention(attention) if !varies(&attention.keys) && !varies(&attention.width) => {
                axis.filter(|(axis, _)| axis + 2 < spec.dims.len())?;
                false
            }
            Body::AttentionGrad(grad) if !varies(&grad.of.keys) && !varies(&grad.queries) => {
                axis.filter(|(axis, _)| axis + 2 < spec.dims.len())?;
                false
            }
            _ => return None,
        };
        let mut steps = Vec::new();
        for (operand, space, _) in spec.arguments() {
            if varies(&operand.offset) || operand.strides.iter().any(varies) {
                return None;
            }
            let mut along = space
                .iter()
                .zip(&operand.strides)
                .filter(|(size, _)| varies(size));
            steps.push(match along.next() {
                Some((size, stride)) if !stride.is(0) => {
                    Some(stride.checked_mul(per_example(size)?)?)
                }
                _ => None,
            });
            if along.next().is_some() {
                return None;
            }
        }
        Some(MicroBatching {
            batch,
            steps,
            folds,
            axis,
        })
    }
}

/// The slice that a launch runs, and the sizes of the whole run.
pub(crate) struct Part<'a> {
    /// The sizes of the whole run.
    pub whole: &'a Env,
    /// The examples of the slice.
    pub examples: std::ops::Range<usize>,
    pub last: bool,
    pub micro_batching: &'a MicroBatching,
    /// The sums, for a kernel that has any.
    pub sums: *mut u8,
}

impl Part<'_> {
    /// For each axis of the spec 0, except for the one along which examples lie the points before
    /// this slice.
    pub fn first(&self, axes: usize) -> SmallVec<[isize; 8]> {
        let mut first = SmallVec::from_elem(0, axes);
        if let Some((axis, points)) = self.micro_batching.axis {
            first[axis] = self.examples.start as isize * points.at(self.whole) as isize;
        }
        first
    }
}
