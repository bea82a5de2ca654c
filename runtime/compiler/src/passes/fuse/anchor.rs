//! Anchors: elementwise kernels that become the epilogue of a product or a convolution.

use slabwise_kernels::spec::PoolKind;
use smallvec::SmallVec;

use super::super::layout::AxisMap;
use super::{Builder, covers};
use crate::ops::{NodeId, Op};

impl Builder<'_> {
    /// Whether a kernel can become the epilogue of another product.
    pub(super) fn can_be_epilogue(&self, cluster: usize) -> bool {
        let c = &self.list[cluster];
        c.anchor.is_none() && !c.reduced.contains(&true)
    }

    pub(super) fn join_anchor(&mut self, id: NodeId, cluster: usize, axes: AxisMap) -> bool {
        let node = self.graph.node(id);
        let c = &self.list[cluster];
        let bodied = has_body(&node.op);
        let mapped: SmallVec<[u8; 6]> = axes.iter().flatten().copied().collect();
        let in_order = mapped.windows(2).all(|w| w[0] < w[1]);
        if !bodied
            || !self.options.epilogues
            || !self.can_be_epilogue(cluster)
            || !in_order
            || !covers(c, &axes, |_| true)
        {
            return false;
        }
        // The anchor's own axes, those of length 1 included, become the space.
        let mut renamed: SmallVec<[Option<u8>; 6]> = SmallVec::from_elem(None, c.space.len());
        for (i, axis) in axes.iter().enumerate() {
            if let Some(s) = axis {
                renamed[usize::from(*s)] = Some(i as u8);
            }
        }
        let dims = node.dims.clone();
        let c = &mut self.list[cluster];
        c.reduced = SmallVec::from_elem(false, dims.len());
        c.space = dims;
        c.anchor = Some(id);
        for m in c.members.clone() {
            let place = self.places[m.at()].as_mut().expect("members are placed");
            // A reduction over axes of length 1 has operand axes, although nothing is reduced.
            let operand_axes = place.operand_axes.iter_mut().flatten();
            for axis in place.axes.iter_mut().chain(operand_axes) {
                *axis = axis.and_then(|a| renamed[usize::from(a)]);
            }
        }
        let axes = (0..node.dims.len())
            .map(|i| (!node.dims[i].is(1)).then_some(i as u8))
            .collect();
        self.put(id, cluster, axes, None);
        true
    }
}

/// Operations with a kernel of their own that may have an epilogue.
pub(super) fn has_body(op: &Op) -> bool {
    matches!(
        op,
        Op::Matmul
            | Op::QuantizedMatmul(_)
            | Op::Conv2d(_)
            | Op::Conv2dInputGrad(_)
            | Op::Conv2dWeightGrad(_)
            | Op::Pool2d(PoolKind::Max | PoolKind::Avg { .. }, _)
            | Op::Pool2dGrad(..)
            | Op::Gather { .. }
            | Op::Scatter { .. }
    )
}
