//! The concatenations and paddings that values are parts of.

use slabwise_kernels::size::Size;
use slabwise_kernels::spec::Dims;
use smallvec::SmallVec;

use crate::graph::Graph;
use crate::ops::{NodeId, Op};

/// For each value the concatenation or padding that it is a part of. Such a value has no other use:
/// [`legalize`](super::legalize) sees to that.
pub(in super::super) struct Containers(Vec<Option<(NodeId, Size)>>);

impl Containers {
    /// The containers of all values of a graph.
    pub fn of_all(graph: &Graph) -> Self {
        let mut found: Vec<Option<(NodeId, Size)>> = vec![None; graph.nodes.len()];
        for id in graph.ids() {
            let node = graph.node(id);
            let Op::Concat { axis } = node.op else {
                if let Op::Pad { .. } = node.op {
                    found[node.inputs[0].at()].get_or_insert((id, Size::ZERO));
                }
                continue;
            };
            let mut start = Some(Size::ZERO);
            for part in &node.inputs {
                // Its length has a form, so that all starts have one.
                let Some(at) = start else { break };
                found[part.at()].get_or_insert((id, at));
                start = at.checked_add(graph.node(*part).dims[axis]);
            }
        }
        Containers(found)
    }

    /// The concatenation or padding.
    pub fn of(&self, id: NodeId) -> Option<NodeId> {
        self.0[id.at()].map(|(container, _)| container)
    }

    /// The concatenation or padding with the start and the step of the part along each axis.
    pub fn place(&self, graph: &Graph, id: NodeId) -> Option<(NodeId, Dims, SmallVec<[u32; 6]>)> {
        let (container, at) = self.0[id.at()]?;
        let node = graph.node(container);
        let rank = node.dims.len();
        Some(match &node.op {
            Op::Pad { start, step, .. } => (container, start.clone(), step.clone()),
            op => {
                let mut start: Dims = SmallVec::from_elem(Size::ZERO, rank);
                if let Op::Concat { axis } = op {
                    start[*axis] = at;
                }
                (container, start, SmallVec::from_elem(1, rank))
            }
        })
    }
}
