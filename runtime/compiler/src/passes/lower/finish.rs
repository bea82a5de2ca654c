//! The last steps of lowering a kernel: reduced values stored at every point, permissions to compute in place.

use slabwise_kernels::scalar::ScalarOp;
use slabwise_kernels::size::Size;
use slabwise_kernels::spec::{Body, Dims, Inst, Spec, Store, ValueId};
use smallvec::SmallVec;

use super::Arg;
use crate::ops::NodeId;

/// A value that does not vary along the reduced axes is stored once per point of the kept ones.
/// Where it is to be stored at every point all the same, it is chosen there between itself and
/// itself.
pub(super) fn spread(spec: &mut Spec) {
    let (folded, kept) = (spec.per_row(), spec.dims.len() - spec.reduced);
    for at in 0..spec.stores.len() {
        let Store { value, operand } = spec.stores[at];
        if !folded[usize::from(value)]
            || spec.operands[usize::from(operand)].strides[kept..]
                .iter()
                .all(|s| s.is(0))
        {
            continue;
        }
        let mut along: Dims = SmallVec::from_elem(Size::ZERO, spec.dims.len());
        along[kept..].fill(Size::ONE);
        spec.indices.push(along);
        let first = spec.code.len() as ValueId;
        let index = Inst::Index(spec.indices.len() as u16 - 1);
        let everywhere = Inst::Op(ScalarOp::Eq, [first, first, 0]);
        spec.code.extend([
            index,
            everywhere,
            Inst::Op(ScalarOp::Select, [first + 1, value, value]),
        ]);
        spec.stores[at].value = first + 2;
    }
}

/// Buffers that a kernel reads and writes at the same places, so that the written one may take the
/// read one's bytes.
pub(super) fn in_place_pairs(spec: &Spec, args: &[Arg]) -> Vec<(NodeId, NodeId)> {
    let anchors = args.len() - spec.operands.len();
    let mut pairs = Vec::new();
    // A tensor of which a part is replaced may become the result without a copy.
    if let Body::SliceAssign(assign) = &spec.body
        && let [Arg::Buffer(from), rest @ .., Arg::Buffer(to)] = args
        && assign.base.as_ref() == Some(&assign.result)
        && !rest.contains(&args[0])
    {
        pairs.push((*from, *to));
    }
    if let Body::Scan(scan) = &spec.body {
        for &(from, to) in &scan.in_place {
            let (from, to) = (args[usize::from(from)], args[usize::from(to)]);
            let alone = args.iter().filter(|arg| **arg == from).count() == 1;
            if let (Arg::Buffer(a), Arg::Buffer(b), true) = (from, to, alone) {
                pairs.push((a, b));
            }
        }
    }
    for store in &spec.stores {
        let to = usize::from(store.operand);
        for from in 0..spec.operands.len() {
            let (Arg::Buffer(a), Arg::Buffer(b)) = (args[anchors + from], args[anchors + to])
            else {
                continue;
            };
            let loaded = spec.code.contains(&Inst::Load(from as u16));
            // No other argument may be the same buffer, because it may have other strides.
            let alone = args
                .iter()
                .enumerate()
                .all(|(i, arg)| *arg != args[anchors + from] || i == anchors + from);
            if a != b
                && loaded
                && alone
                && spec.operands[from] == spec.operands[to]
                && spec.operands[to].offset.is(0)
            {
                pairs.push((a, b));
            }
        }
    }
    pairs.dedup();
    pairs
}
