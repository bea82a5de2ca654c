//! Selection of elements by integer indices (gather), and its gradient.

use slabwise_kernels::dtype::DType;
use slabwise_kernels::scalar::ScalarOp;
use slabwise_kernels::spec::{Dims, ReduceOp};
use smallvec::SmallVec;

use super::rules::{Gradients, Rule, TensorType};
use super::{GraphBuilder, NodeId, Op};
use crate::shape::Symbols;

pub(super) fn infer_gather(axis: usize, given: &[TensorType<'_>], symbols: &Symbols) -> Rule {
    let (source, index) = (given[0], given[1]);
    let say = |why: &str| {
        Err(format!(
            "gather from {} by {} along axis {axis}: {why}",
            symbols.show(source.dims),
            symbols.show(index.dims)
        ))
    };
    if axis >= source.dims.len() || source.dims.len() != index.dims.len() {
        return say("both need equally many axes, and the axis");
    }
    if !matches!(index.dtype, DType::I32 | DType::U8) {
        return say("indices are i32 or u8");
    }
    if source
        .dims
        .iter()
        .zip(index.dims)
        .enumerate()
        .any(|(i, (s, d))| i != axis && s != d)
    {
        return say("the other axes differ");
    }
    Ok((source.dtype, Dims::from_slice(index.dims)))
}

pub(super) fn infer_scatter(
    axis: usize,
    reduce: ReduceOp,
    given: &[TensorType<'_>],
    dims: &Dims,
    symbols: &Symbols,
) -> Rule {
    let (value, index) = (given[0], given[1]);
    let say = |why: &str| {
        Err(format!(
            "scatter {} {} by {} along axis {axis} to {}: {why}",
            value.dtype,
            symbols.show(value.dims),
            symbols.show(index.dims),
            symbols.show(dims)
        ))
    };
    if axis >= dims.len() || value.dims.len() != dims.len() {
        return say("values and result need equally many axes, and the axis");
    }
    if value.dims != index.dims {
        return say("there is one index for each value");
    }
    if !matches!(index.dtype, DType::I32 | DType::U8) {
        return say("indices are i32 or u8");
    }
    if !matches!(value.dtype, DType::F32 | DType::I32) {
        return say("values are f32 or i32; convert with cast");
    }
    if (0..dims.len()).any(|a| a != axis && value.dims[a] != dims[a]) {
        return say("the other axes differ");
    }
    if !matches!(
        reduce,
        ReduceOp::Sum | ReduceOp::Prod | ReduceOp::Max | ReduceOp::Min
    ) {
        return say("by a sum, product, maximum or minimum only");
    }
    Ok((value.dtype, dims.clone()))
}

pub(super) fn gradient_of_gather(
    g: &mut dyn GraphBuilder,
    axis: usize,
    inputs: &[NodeId],
    dy: NodeId,
) -> Gradients {
    if !g.dtype(inputs[0]).is_float() {
        return SmallVec::from_elem(None, 2);
    }
    let dims = g.dims(inputs[0]).clone();
    let dx = g.emit(
        Op::Scatter {
            axis,
            reduce: ReduceOp::Sum,
        },
        &[dy, inputs[1]],
        DType::F32,
        dims,
    );
    SmallVec::from_iter([Some(dx), None])
}

pub(super) fn gradient_of_scatter(
    g: &mut dyn GraphBuilder,
    (axis, reduce): (usize, ReduceOp),
    node: NodeId,
    inputs: &[NodeId],
    dy: NodeId,
) -> Gradients {
    let (x, index) = (inputs[0], inputs[1]);
    if !g.dtype(x).is_float() {
        return SmallVec::from_elem(None, 2);
    }
    let (space, dims) = (g.dims(index).clone(), g.dims(dy).clone());
    let gather = |g: &mut dyn GraphBuilder, from: NodeId| {
        g.emit(
            Op::Gather { axis },
            &[from, index],
            DType::F32,
            space.clone(),
        )
    };
    let scatter = |g: &mut dyn GraphBuilder, reduce: ReduceOp, values: NodeId| {
        let op = Op::Scatter { axis, reduce };
        g.emit(op, &[values, index], DType::F32, dims.clone())
    };
    let back = match reduce {
        ReduceOp::Sum => gather(g, dy),
        // Each value's slope is the product of the others at its place: exact with zeros, as for
        // the product along an axis.
        ReduceOp::Prod => {
            let [zero, one] = [0.0, 1.0].map(|n| g.full(n, DType::F32, &space));
            let is_zero = g.scalar(ScalarOp::Eq, &[x, zero]);
            let nonzero = g.scalar(ScalarOp::Select, &[is_zero, one, x]);
            let here = g.cast(is_zero, DType::F32);
            let product = scatter(g, ReduceOp::Prod, nonzero);
            let zeros = scatter(g, ReduceOp::Sum, here);
            let (product, zeros) = (gather(g, product), gather(g, zeros));
            let others = g.scalar(ScalarOp::Sub, &[zeros, here]);
            let alive = g.scalar(ScalarOp::Eq, &[others, zero]);
            let slope = g.scalar(ScalarOp::Div, &[product, nonzero]);
            let nothing = g.mul(product, zero);
            let slope = g.scalar(ScalarOp::Select, &[alive, slope, nothing]);
            let dy = gather(g, dy);
            g.mul(dy, slope)
        }
        // Equal extremes share the gradient evenly.
        _ => {
            let extreme = gather(g, node);
            let hit = g.scalar(ScalarOp::Eq, &[x, extreme]);
            let hit = g.cast(hit, DType::F32);
            let count = scatter(g, ReduceOp::Sum, hit);
            let one = g.full(1.0, DType::F32, &dims);
            let count = g.scalar(ScalarOp::Max, &[count, one]);
            // A NaN makes all gradients of its place NaN.
            let is_nan = g.scalar(ScalarOp::Ne, &[node, node]);
            let count = g.scalar(ScalarOp::Select, &[is_nan, node, count]);
            let share = g.scalar(ScalarOp::Div, &[dy, count]);
            let share = gather(g, share);
            g.mul(share, hit)
        }
    };
    SmallVec::from_iter([Some(back), None])
}
