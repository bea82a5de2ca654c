//! Reductions. Each comes in three forms: over all axes, over some axes, which are removed
//! (`_over`), and over some axes, which stay with length 1 (`_keep`).
//!
//! Over no elements the sum is 0, the product 1, [`any`](Tensor::any) false, [`all`](Tensor::all)
//! true and the mean NaN. A maximum, a minimum or its position does not exist: along an axis of
//! fixed length 0 that is a mistake; along another axis, a run in which it has no elements fails.
//! Other axes may be empty; then so is the result. NumPy and PyTorch do the same.

use std::panic::Location;

use slabwise_kernels::dtype::DType;
use slabwise_kernels::scalar::ScalarOp;
use slabwise_kernels::size::Size;
use slabwise_kernels::spec::{Dims, ReduceOp};

use super::{AxisSet, Tensor, checked, no_axis};
use crate::graph::Graph;
use crate::ops::{Axes, GraphBuilder, NodeId, Op};
use crate::shape::elements;

impl<'t> Tensor<'t> {
    #[track_caller]
    fn fold(self, op: ReduceOp, axes: impl AxisSet, keep: bool) -> Tensor<'t> {
        self.trace.record(Location::caller(), &[self], |g, ids| {
            reduce(g, op, ids[0], axes.axes(g.dims(ids[0]).len()), keep)
        })
    }

    /// This tensor, if the axes have elements; `what` is the operation, and `has` completes the
    /// message "nothing without elements …".
    pub(super) fn with_elements(
        self,
        at: &'static Location<'static>,
        what: &str,
        axes: &[usize],
        has: &str,
    ) -> Tensor<'t> {
        self.trace.record(at, &[self], |g, ids| {
            need_elements(g, what, ids[0], axes, has).map(|()| ids[0])
        })
    }

    #[track_caller]
    fn average(self, axes: impl AxisSet, keep: bool) -> Tensor<'t> {
        self.trace.record(Location::caller(), &[self], |g, ids| {
            let axes = axes.axes(g.dims(ids[0]).len());
            let x = g.cast(ids[0], DType::F32);
            let sum = reduce(g, ReduceOp::Sum, x, axes.clone(), keep)?;
            let count = count(g, x, &axes)?;
            let dims = g.dims(sum).clone();
            let count = g.broadcast(count, &dims);
            Ok(g.scalar(ScalarOp::Div, &[sum, count]))
        })
    }
}

fn reduce(
    g: &mut Graph,
    op: ReduceOp,
    x: NodeId,
    mut axes: Axes,
    keep: bool,
) -> Result<NodeId, String> {
    axes.sort_unstable();
    if let ReduceOp::Max | ReduceOp::Min | ReduceOp::ArgMax | ReduceOp::ArgMin = op {
        need_elements(
            g,
            Op::Reduce(op, axes.clone()).name(),
            x,
            &axes,
            "has a largest or smallest element",
        )?;
    }
    fold(g, op, x, axes, keep)
}

/// Refuses axes without elements, for which the operation is undefined: fixed ones at once, others
/// in the runs in which they are empty.
fn need_elements(
    g: &mut Graph,
    what: &str,
    x: NodeId,
    axes: &[usize],
    has: &str,
) -> Result<(), String> {
    for &axis in axes {
        let Some(&length) = g.dims(x).get(axis) else {
            return Err(no_axis(g, what, axis, x));
        };
        let shown = g.symbols.show(g.dims(x)).to_string();
        g.need(length, || {
            format!(
                "{what}: axis {axis} of {shown} has no elements, and nothing without elements {has}"
            )
        })?;
    }
    Ok(())
}

/// A reduction that gives its identity over no elements.
fn fold(
    g: &mut Graph,
    op: ReduceOp,
    x: NodeId,
    mut axes: Axes,
    keep: bool,
) -> Result<NodeId, String> {
    axes.sort_unstable();
    let reduction = Op::Reduce(op, axes.clone());
    if let Some(&axis) = axes.iter().find(|&&axis| axis >= g.dims(x).len()) {
        return Err(no_axis(g, reduction.name(), axis, x));
    }
    if let Some(twice) = axes.windows(2).find(|w| w[0] == w[1]) {
        let name = reduction.name();
        return Err(format!("{name}: axis {} is named twice", twice[0]));
    }
    let folded = checked(g, reduction, &[x])?;
    if keep {
        return Ok(folded);
    }
    let dims: Dims = g
        .dims(folded)
        .iter()
        .enumerate()
        .filter(|(i, _)| !axes.contains(i))
        .map(|(_, d)| *d)
        .collect();
    Ok(g.reshape(folded, &dims))
}

/// The number of elements reduced into one, as an f32 scalar. With bounded lengths it is computed
/// in each run.
pub(super) fn count(g: &mut Graph, x: NodeId, axes: &Axes) -> Result<NodeId, String> {
    let lengths: Vec<Size> = axes.iter().map(|&a| g.dims(x)[a]).collect();
    let fixed = lengths
        .iter()
        .filter_map(|d| d.as_fixed())
        .map(|n| n as f64)
        .product::<f64>();
    let bounded: Dims = lengths
        .into_iter()
        .filter(|d| d.as_fixed().is_none())
        .collect();
    let factor = g.constant(fixed as f32, DType::F32);
    if bounded.is_empty() {
        return Ok(factor);
    }
    let product = elements(&bounded).ok_or("mean: too many bounded lengths are multiplied")?;
    let n = g.emit(Op::Size(product), &[], DType::I32, Dims::new());
    let n = g.cast(n, DType::F32);
    Ok(if fixed == 1.0 { n } else { g.mul(n, factor) })
}

macro_rules! reductions {
    ($($(#[$doc:meta])* $call:ident($($op:expr)?) $all:ident $over:ident $keep:ident;)*) => {
        impl<'t> Tensor<'t> {
            $($(#[$doc])*
            ///
            /// Over all axes, to a scalar.
            #[track_caller]
            pub fn $all(self) -> Tensor<'t> {
                self.$call($($op,)? .., false)
            }

            $(#[$doc])*
            ///
            /// Over the given axes, which are removed.
            #[track_caller]
            pub fn $over(self, axes: impl AxisSet) -> Tensor<'t> {
                self.$call($($op,)? axes, false)
            }

            $(#[$doc])*
            ///
            /// Over the given axes, which stay with length 1.
            #[track_caller]
            pub fn $keep(self, axes: impl AxisSet) -> Tensor<'t> {
                self.$call($($op,)? axes, true)
            })*
        }
    };
}

reductions! {
    /// The sum of f32 or i32 elements (i32 wraps); 0 over no elements. Floats are summed in parts
    /// whose order depends on the shape alone.
    fold(ReduceOp::Sum) sum sum_over sum_keep;
    /// The product of f32 or i32 elements (i32 wraps); 1 over no elements.
    fold(ReduceOp::Prod) prod prod_over prod_keep;
    /// The largest element, of f32 or i32; NaN if any is. Equals share the gradient. Over no
    /// elements: an error.
    fold(ReduceOp::Max) max max_over max_keep;
    /// The smallest element, of f32 or i32; NaN if any is. Equals share the gradient. Over no
    /// elements: an error.
    fold(ReduceOp::Min) min min_over min_keep;
    /// Whether any truth value is true; false over no elements.
    fold(ReduceOp::Any) any any_over any_keep;
    /// Whether all truth values are true; true over no elements.
    fold(ReduceOp::All) all all_over all_keep;
    /// The mean, f32; for truth values the fraction that is true; NaN over no elements.
    average() mean mean_over mean_keep;
}

impl<'t> Tensor<'t> {
    /// The first position (i32) of the largest element along an axis, which is removed; along
    /// several axes the position is the row-major index over them. NaN counts as largest. Over no
    /// elements: an error.
    #[track_caller]
    pub fn argmax(self, axes: impl AxisSet) -> Tensor<'t> {
        self.fold(ReduceOp::ArgMax, axes, false)
    }

    /// [`Tensor::argmax`], but the axes stay with length 1.
    #[track_caller]
    pub fn argmax_keep(self, axes: impl AxisSet) -> Tensor<'t> {
        self.fold(ReduceOp::ArgMax, axes, true)
    }

    /// The first position (i32) of the smallest element along an axis, which is removed; along
    /// several axes the position is the row-major index over them. NaN counts as smallest. Over no
    /// elements: an error.
    #[track_caller]
    pub fn argmin(self, axes: impl AxisSet) -> Tensor<'t> {
        self.fold(ReduceOp::ArgMin, axes, false)
    }

    /// [`Tensor::argmin`], but the axes stay with length 1.
    #[track_caller]
    pub fn argmin_keep(self, axes: impl AxisSet) -> Tensor<'t> {
        self.fold(ReduceOp::ArgMin, axes, true)
    }
}
