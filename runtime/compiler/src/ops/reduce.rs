//! Reductions over any axes.

use slabwise_kernels::dtype::DType;
use slabwise_kernels::scalar::ScalarOp;
use slabwise_kernels::size::Size;
use slabwise_kernels::spec::{Dims, ReduceOp};
use smallvec::SmallVec;

use super::rules::{Gradients, Rule, TensorType};
use super::{Axes, GraphBuilder, NodeId};

pub(super) fn infer(op: ReduceOp, axes: &Axes, given: TensorType<'_>) -> Rule {
    let logic = matches!(op, ReduceOp::Any | ReduceOp::All);
    let reduce = super::Op::Reduce(op, Axes::new());
    let name = reduce.name();
    if logic != (given.dtype == DType::Bool) || given.dtype == DType::U8 {
        return Err(format!(
            "{name} does not take {}; convert with cast",
            given.dtype
        ));
    }
    let mut dims = Dims::from_slice(given.dims);
    for &axis in axes {
        let rank = dims.len();
        *dims.get_mut(axis).ok_or_else(|| {
            format!(
                "{name}: axis {axis} of a tensor with {}",
                crate::words::count(rank, "axis")
            )
        })? = Size::ONE;
    }
    let dtype = if matches!(op, ReduceOp::ArgMax | ReduceOp::ArgMin) {
        DType::I32
    } else {
        given.dtype.lane().stored()
    };
    Ok((dtype, dims))
}

pub(super) fn gradient(
    g: &mut dyn GraphBuilder,
    op: ReduceOp,
    axes: &Axes,
    node: NodeId,
    x: NodeId,
    dy: NodeId,
) -> Gradients {
    let dims = g.dims(x).clone();
    let dx = match op {
        ReduceOp::Sum => Some(g.broadcast(dy, &dims)),
        // Equal maxima share the gradient evenly: the limit of every smooth maximum.
        ReduceOp::Max | ReduceOp::Min => {
            let extreme = g.broadcast(node, &dims);
            let hit = g.scalar(ScalarOp::Eq, &[x, extreme]);
            let hit = g.cast(hit, DType::F32);
            let count = g.reduce(ReduceOp::Sum, hit, axes);
            let share = g.scalar(ScalarOp::Div, &[dy, count]);
            let share = g.broadcast(share, &dims);
            Some(g.mul(share, hit))
        }
        ReduceOp::Prod => Some(through_product(g, axes, x, dy, &dims)),
        // Only late passes make it.
        ReduceOp::SquaredDeviations
        | ReduceOp::Any
        | ReduceOp::All
        | ReduceOp::ArgMax
        | ReduceOp::ArgMin => None,
    };
    SmallVec::from_iter([dx.filter(|_| g.dtype(x).is_float())])
}

/// d(Πx)/dxᵢ = Π of the others. Exact with zeros: with one zero only its gradient is nonzero, with
/// two none is. If the other factors overflow, a gradient that a zero should cancel is NaN.
fn through_product(
    g: &mut dyn GraphBuilder,
    axes: &Axes,
    x: NodeId,
    dy: NodeId,
    dims: &Dims,
) -> NodeId {
    let zero = g.full(0.0, DType::F32, dims);
    let one = g.full(1.0, DType::F32, dims);
    let is_zero = g.scalar(ScalarOp::Eq, &[x, zero]);
    let nonzero = g.scalar(ScalarOp::Select, &[is_zero, one, x]);
    let product = g.reduce(ReduceOp::Prod, nonzero, axes);
    let product = g.broadcast(product, dims);
    let zeros = g.cast(is_zero, DType::F32);
    let zeros = g.reduce(ReduceOp::Sum, zeros, axes);
    let zeros = g.broadcast(zeros, dims);
    // The number of zeros among the others: all, less this one if it is zero.
    let here = g.cast(is_zero, DType::F32);
    let others = g.scalar(ScalarOp::Sub, &[zeros, here]);
    let alive = g.scalar(ScalarOp::Eq, &[others, zero]);
    let slope = g.scalar(ScalarOp::Div, &[product, nonzero]);
    let nothing = g.mul(product, zero);
    let slope = g.scalar(ScalarOp::Select, &[alive, slope, nothing]);
    let dy = g.broadcast(dy, dims);
    g.mul(dy, slope)
}
