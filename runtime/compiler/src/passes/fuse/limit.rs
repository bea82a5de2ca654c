//! A limit on the bytes touched by kernels that compute recomputed values.

use rustc_hash::FxHashSet;

use super::{Builder, Clusters, Fuse, fuse_within};
use crate::graph::{Graph, Phase};
use crate::ops::{NodeId, Op};
use crate::passes::error::PassError;
use crate::passes::pipeline::Pass;
use crate::passes::remat::REMAT_MIN_ELEMENTS;
use crate::shape::elements;

/// Fusion with a limit on kernels that compute recomputed values.
///
/// A kernel computes everything that can be computed from the tensors it reads. In the backward
/// pass through a residual network those are the activations of several layers, recomputed for the
/// gradients of their weights beside the sums of one norm. It saves time, and holds all of them in
/// memory until the last is used.
pub(crate) struct FuseWithin {
    /// Which fusions are allowed.
    pub options: Fuse,
    /// The limits.
    pub limits: Limits,
}

/// Limits on kernels that compute recomputed values; the default is none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Limits {
    /// The most bytes that a kernel touches which computes recomputed values beside others.
    pub bytes: u64,
    /// Recomputed values that are used per element alone are computed by each kernel that uses them
    /// rather than stored by the first.
    pub per_use: bool,
}

impl Default for Limits {
    fn default() -> Self {
        Limits {
            bytes: u64::MAX,
            per_use: false,
        }
    }
}

impl Pass for FuseWithin {
    const NAME: &'static str = Fuse::NAME;
    type Input = Graph;
    type Output = Clusters;

    fn run(&self, graph: &Graph) -> Result<Clusters, PassError> {
        Ok(fuse_within(graph, &self.options, &self.limits))
    }
}

impl Builder<'_> {
    /// Whether a node is recomputed by a kernel that must not touch too many bytes; small ones do
    /// not matter.
    pub(super) fn is_recomputed(&self, id: NodeId) -> bool {
        if self.limits.bytes == u64::MAX || self.graph.origin(id).phase != Phase::Recompute {
            return false;
        }
        let bounds = self.graph.symbols.bounds();
        let dims = &self.graph.node(id).dims;
        elements(dims).is_some_and(|n| n.at(&bounds) >= REMAT_MIN_ELEMENTS)
    }

    /// Whether one kernel of these, and of a node, touches few enough bytes to compute recomputed
    /// values beside others.
    pub(super) fn may_touch(&self, clusters: &[usize], id: Option<NodeId>) -> bool {
        let members = clusters.iter().flat_map(|&at| &self.list[at].members);
        let members: FxHashSet<NodeId> = members.copied().chain(id).collect();
        let mut touched: FxHashSet<NodeId> = FxHashSet::default();
        for &member in &members {
            let mut sources: Vec<NodeId> =
                self.edges[member.at()].iter().map(|e| e.source).collect();
            while let Some(source) = sources.pop() {
                if self.inline[source.at()] {
                    sources.extend(self.edges[source.at()].iter().map(|e| e.source));
                } else if !members.contains(&source) {
                    touched.insert(source);
                }
            }
            let elsewhere = |u: &(NodeId, usize)| !members.contains(&u.0);
            if self.is_output[member.at()] || self.users[member.at()].iter().any(elsewhere) {
                touched.insert(member);
            }
        }
        let bounds = self.graph.symbols.bounds();
        let bytes = |id: &NodeId| {
            let node = self.graph.node(*id);
            let count = elements(&node.dims).map_or(0, |n| n.at(&bounds).max(0));
            let computed = !matches!(node.op, Op::Variable(_));
            if computed {
                count as u64 * node.dtype.bytes() as u64
            } else {
                0
            }
        };
        touched.iter().map(bytes).sum::<u64>() <= self.limits.bytes
    }
}
