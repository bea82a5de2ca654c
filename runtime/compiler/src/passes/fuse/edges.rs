//! The operands and the users of each node, views skipped.

use smallvec::SmallVec;

use super::super::layout::Views;
use super::clusters::Edge;
use crate::graph::{Graph, Node};
use crate::ops::{NodeId, Op};

/// The operands of each node, views skipped; views have none.
pub(in super::super) fn edges(graph: &Graph) -> Vec<SmallVec<[Edge; 3]>> {
    let views = Views::of(graph);
    let seen = |&i: &NodeId| {
        let (source, axes) = views.axes(graph, i);
        Edge { source, axes }
    };
    let of = |node: &Node| {
        if node.op.is_view() {
            SmallVec::new()
        } else {
            let mut edges: SmallVec<[Edge; 3]> = node.inputs.iter().map(seen).collect();
            // A computed key of random numbers is read whole, from memory.
            if matches!(node.op, Op::Uniform { .. })
                && !matches!(
                    graph.node(edges[0].source).op,
                    Op::Input(_) | Op::Variable(_)
                )
            {
                edges[0].axes = None;
            }
            edges
        }
    };
    graph.nodes.iter().map(of).collect()
}

/// Nodes that take a node's value, each with the position among its operands.
pub(in super::super) type Users = SmallVec<[(NodeId, usize); 4]>;

/// Operand positions that take each node's value, views skipped.
pub(in super::super) fn users(graph: &Graph, edges: &[SmallVec<[Edge; 3]>]) -> Vec<Users> {
    let mut users = vec![SmallVec::new(); graph.nodes.len()];
    for id in graph.ids() {
        for (k, edge) in edges[id.at()].iter().enumerate() {
            users[edge.source.at()].push((id, k));
        }
    }
    users
}
