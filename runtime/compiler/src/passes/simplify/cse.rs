//! Common subexpression elimination: nodes that compute the same value are merged.

use std::hash::{Hash, Hasher};

use rustc_hash::FxHasher;
use slabwise_kernels::dtype::DType;
use slabwise_kernels::scalar::ScalarOp;
use slabwise_kernels::spec::Dims;
use smallvec::SmallVec;

use super::Builder;
use crate::ops::{NodeId, Op};

impl Builder {
    /// A node that computes the same already.
    pub(super) fn find(
        &mut self,
        op: &Op,
        inputs: &[NodeId],
        dtype: DType,
        dims: &Dims,
    ) -> Option<NodeId> {
        // Effects happen once each, and a copy is there to be a buffer of its own.
        if !self.options.cse || op.is_effect() || *op == Op::Copy {
            return None;
        }
        let mut key: SmallVec<[NodeId; 3]> = SmallVec::from_slice(inputs);
        if commutes(op, dtype) {
            key.sort_unstable();
        }
        let mut hasher = FxHasher::default();
        (op.name(), bits(op), &key, dtype, dims).hash(&mut hasher);
        // A tensor may have many slices.
        if let Op::Slice { start, step } = op {
            (start, step).hash(&mut hasher);
        }
        let next = NodeId(self.new.nodes.len() as u32);
        let bucket = self.seen.entry(hasher.finish()).or_default();
        let found = bucket.iter().copied().find(|&id| {
            let node = self.new.node(id);
            let mut other = node.inputs.clone();
            if commutes(op, dtype) {
                other.sort_unstable();
            }
            same_op(&node.op, op) && other == key && node.dtype == dtype && node.dims == *dims
        });
        if found.is_none() {
            // The caller is about to add it.
            bucket.push(next);
        }
        found
    }
}

/// Whether the order of two operands does not matter, bit for bit. Floats' minimum and maximum are
/// not here: of zeros of different sign they give the second.
fn commutes(op: &Op, dtype: DType) -> bool {
    use ScalarOp as S;
    match op {
        Op::Scalar(S::Add | S::Mul | S::And | S::Or | S::Xor | S::Eq | S::Ne) => true,
        Op::Scalar(S::Min | S::Max) => dtype != DType::F32,
        _ => false,
    }
}

/// The bits of the number in an operation: 0 and −0 compare equal, but are two constants.
fn bits(op: &Op) -> Option<u32> {
    match op {
        Op::Const(value) | Op::Pad { value, .. } => Some(value.bits()),
        _ => None,
    }
}

pub(super) fn same_op(a: &Op, b: &Op) -> bool {
    match (a, b) {
        // A NaN is not equal to itself, but its bits are.
        (Op::Const(x), Op::Const(y)) => x.lane() == y.lane() && bits(a) == bits(b),
        (
            Op::Pad { start, step, value },
            Op::Pad {
                start: s,
                step: t,
                value: v,
            },
        ) => start == s && step == t && value.lane() == v.lane() && bits(a) == bits(b),
        _ => a == b,
    }
}
