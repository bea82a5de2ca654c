//! Rules for a node and its only operand: transposed products, reductions of reductions.

use slabwise_kernels::dtype::DType;
use slabwise_kernels::spec::ReduceOp;

use crate::graph::Graph;
use crate::ops::{Axes, NodeId, Op};

/// The factors of a matrix product that `op` transposes.
pub(super) fn transposed_product(graph: &Graph, op: &Op, operand: NodeId) -> Option<[NodeId; 2]> {
    let (Op::Permute(axes), Op::Matmul) = (op, &graph.node(operand).op) else {
        return None;
    };
    let rank = axes.len();
    let swaps = axes[..rank - 2].iter().copied().eq(0..rank - 2)
        && axes[rank - 2..] == [rank - 1, rank - 2];
    swaps.then(|| [graph.node(operand).inputs[0], graph.node(operand).inputs[1]])
}

/// The reduction along the axes of `outer` and of its operand, if their order does not matter.
pub(super) fn nested_reduce(graph: &Graph, outer: &Op, operand: NodeId) -> Option<Op> {
    let inner = graph.node(operand);
    let (Op::Reduce(op, axes), Op::Reduce(below, more)) = (outer, &inner.op) else {
        return None;
    };
    let exact = match op {
        ReduceOp::Max | ReduceOp::Min | ReduceOp::Any | ReduceOp::All => true,
        // Integers wrap, which is associative; floats round.
        ReduceOp::Sum | ReduceOp::Prod => inner.dtype == DType::I32,
        ReduceOp::ArgMax | ReduceOp::ArgMin | ReduceOp::SquaredDeviations => false,
    };
    let mut both: Axes = axes.iter().chain(more).copied().collect();
    both.sort_unstable();
    both.dedup();
    (op == below && exact).then(|| Op::Reduce(*op, both))
}
