//! Sums of several products, each added by the kernel of a product.

use slabwise_kernels::scalar::ScalarOp;
use smallvec::SmallVec;

use super::clusters::Edge;
use super::inline::wide;
use super::{Builder, Users};
use crate::graph::Graph;
use crate::ops::{NodeId, Op};

/// The product that a node adds to another tensor, if no other node reads that product. The
/// product's kernel can do so as its epilogue, often in the place of the other term, so that one
/// tensor is in memory where two would be: so gradients of branches are summed up.
pub(super) fn added_product(
    graph: &Graph,
    edges: &[SmallVec<[Edge; 3]>],
    users: &[Users],
    sum: NodeId,
) -> Option<NodeId> {
    let wide = |edge: &&Edge| wide(graph, graph.node(sum), edge);
    let own = |edge: &&Edge| {
        let product = matches!(
            graph.node(edge.source).op,
            Op::Matmul | Op::Conv2dInputGrad(_) | Op::Conv2dWeightGrad(_)
        );
        let in_order = edge
            .axes
            .as_ref()
            .is_some_and(|axes| axes.iter().flatten().is_sorted());
        product && in_order && users[edge.source.at()].len() == 1
    };
    let all = graph.node(sum).op == Op::Scalar(ScalarOp::Add)
        && edges[sum.at()].iter().all(|edge| wide(&edge));
    edges[sum.at()]
        .iter()
        .filter(|_| all)
        .find(own)
        .map(|edge| edge.source)
}

impl Builder<'_> {
    /// Whether a sum gets one more product, and then the next sum another: then each product is
    /// added to the sum so far by its own kernel, so that one sum is in memory rather than all
    /// products at once.
    pub(super) fn is_partial_sum(&self, id: NodeId) -> bool {
        let [(user, _)] = self.users[id.at()][..] else {
            return false;
        };
        self.adds_product(id) && self.adds_product(user)
    }

    pub(super) fn adds_product(&self, sum: NodeId) -> bool {
        self.options.epilogues && added_product(self.graph, &self.edges, &self.users, sum).is_some()
    }
}
