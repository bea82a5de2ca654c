//! The base nodes of views.

use super::Graph;
use crate::ops::NodeId;

/// For each node of a growing graph, the node that lies below its views: itself if it is not a
/// view.
#[derive(Debug, Default)]
pub struct Bases(Vec<NodeId>);

impl Bases {
    /// The node below a node's views, for nodes that stay in the graph.
    pub fn of(&mut self, graph: &Graph, id: NodeId) -> NodeId {
        for at in self.0.len()..=id.at() {
            let node = &graph.nodes[at];
            let base = if node.op.is_view() {
                self.0[node.inputs[0].at()]
            } else {
                NodeId(at as u32)
            };
            self.0.push(base);
        }
        self.0[id.at()]
    }
}
