//! Nodes that are computed in the kernel of a product although other kernels could compute them:
//! sums of several products, and conversions of products to halves.

use slabwise_kernels::scalar::ScalarOp;
use smallvec::SmallVec;

use super::anchor::has_body;
use super::clusters::Edge;
use super::inline::wide;
use super::{Builder, Users};
use crate::graph::Graph;
use crate::ops::{NodeId, Op};
use crate::passes::layout::AxisMap;

/// Most nodes that are searched for the product that one converts.
const NARROWED_MAX: usize = 16;

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

    /// Whether a node is to be computed in the epilogue of a product: it adds the product to
    /// another tensor, or converts it to halves.
    pub(super) fn stays_with_product(&self, id: NodeId) -> bool {
        self.adds_product(id) || self.options.epilogues && self.narrows_product(id)
    }

    /// Whether a node converts to halves the elements of a product, which nothing else reads, or of
    /// pointwise work on it. The kernel of the product then writes halves, where it would write f32
    /// for the kernel of a consumer.
    fn narrows_product(&self, id: NodeId) -> bool {
        let node = self.graph.node(id);
        let narrows = matches!(node.op, Op::Cast(to) if to.is_half())
            && !self.graph.node(node.inputs[0]).dtype.is_half();
        if !narrows {
            return false;
        }
        let (mut open, mut steps) = (vec![id], 0);
        while let Some(id) = open.pop().filter(|_| steps < NARROWED_MAX) {
            steps += 1;
            for edge in &self.edges[id.at()] {
                let (source, below) = (edge.source, self.graph.node(edge.source));
                let in_order = |axes: &AxisMap| axes.iter().flatten().is_sorted();
                let own = self.users[source.at()].len() == 1
                    && edge.axes.as_ref().is_some_and(in_order)
                    && wide(self.graph, self.graph.node(id), edge);
                if own && has_body(&below.op) {
                    return true;
                }
                if own && below.op.is_pointwise() {
                    open.push(source);
                }
            }
        }
        false
    }

    fn adds_product(&self, sum: NodeId) -> bool {
        self.options.epilogues && added_product(self.graph, &self.edges, &self.users, sum).is_some()
    }
}
