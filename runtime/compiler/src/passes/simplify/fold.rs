//! Constant folding.

use slabwise_kernels::dtype::{DType, Lane};
use slabwise_kernels::scalar::Value;
use slabwise_kernels::spec::Dims;
use smallvec::SmallVec;

use super::Builder;
use crate::graph::Graph;
use crate::ops::{GraphBuilder, NodeId, Op};

impl Builder {
    /// The number that every element of a node is, if that is known.
    pub(super) fn known(&mut self, id: NodeId) -> Option<Value> {
        let base = self.bases.of(&self.new, id);
        constant(&self.new, base)
    }

    /// A known number everywhere.
    pub(super) fn full_of(&mut self, value: Value, dtype: DType, dims: &Dims) -> NodeId {
        let one = self.emit(Op::Const(value), &[], dtype, Dims::new());
        self.broadcast(one, dims)
    }

    /// The result of an elementwise operation, or of a conversion, on known numbers.
    pub(super) fn fold(
        &mut self,
        op: &Op,
        inputs: &[NodeId],
        dtype: DType,
        dims: &Dims,
    ) -> Option<NodeId> {
        let value = match op {
            Op::Scalar(op) => {
                let values: SmallVec<[Value; 3]> = inputs
                    .iter()
                    .map(|&i| self.known(i))
                    .collect::<Option<_>>()?;
                let lanes: SmallVec<[Lane; 3]> = values.iter().map(|v| v.lane()).collect();
                op.lane(&lanes)?;
                op.eval(&values)
            }
            // Bytes saturate or wrap by where they come from; a constant byte is too rare to know
            // that here.
            Op::Cast(to) if *to != DType::U8 => to.hold(self.known(inputs[0])?),
            _ => return None,
        };
        Some(self.full_of(value, dtype, dims))
    }
}

/// The number that every element of a node is, seen through views of it.
pub(super) fn constant(graph: &Graph, mut id: NodeId) -> Option<Value> {
    loop {
        let node = graph.node(id);
        match &node.op {
            Op::Const(value) => return Some(*value),
            op if op.is_view() => id = node.inputs[0],
            _ => return None,
        }
    }
}
