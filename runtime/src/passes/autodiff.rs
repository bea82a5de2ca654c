//! Reverse-mode differentiation, as a transformation of the graph: what it adds are ordinary nodes, so that gradients can be
//! differentiated again, simplified, fused and planned like everything else.

use smallvec::SmallVec;

use crate::graph::{Graph, Origin, Phase};
use crate::ops::{Emit, NodeId, Op, gradient};

/// Adds the gradient of the sum of `loss`'s elements with respect to each of `wrt`, and says where each is: `None` where
/// `loss` does not depend on it, or depends on it only through integers and truth values.
///
/// A gradient has the shape of what it belongs to. Several nodes of one variable count as one: each gets the whole of that
/// variable's gradient. Only nodes on a way from `wrt` to `loss` are differentiated, contributions add up from the last
/// consumer to the first (so equal graphs give equal bits), and a new node has the origin of the node it differentiates, in
/// [`Phase::Backward`].
pub fn gradients(graph: &mut Graph, loss: NodeId, wrt: &[NodeId]) -> Vec<Option<NodeId>> {
    let nodes = graph.nodes.len();
    if loss.at() >= nodes {
        return vec![None; wrt.len()];
    }
    let owner = owners(graph);
    // Whether a node's value depends on one of `wrt` through floats alone; the others carry no gradient.
    let mut depends = vec![false; nodes];
    for w in wrt.iter().filter(|w| w.at() < nodes) {
        depends[owner[w.at()].at()] = graph.dtype(*w).is_float();
    }
    for id in graph.ids().take(loss.at() + 1) {
        let node = graph.node(id);
        let here = depends[owner[id.at()].at()] || node.inputs.iter().any(|i| depends[i.at()]);
        depends[id.at()] = here && node.dtype.is_float();
    }

    let before = graph.current_origin;
    let mut adjoints: Vec<Option<NodeId>> = vec![None; nodes];
    if depends[loss.at()] {
        differentiate(graph, loss);
        let dims = graph.dims(loss).clone();
        let dtype = graph.dtype(loss).lane().stored();
        adjoints[owner[loss.at()].at()] = Some(graph.full(1.0, dtype, &dims));
    }
    for id in (0..=loss.0).rev().map(NodeId).filter(|id| depends[id.at()]) {
        let (Some(dy), node) = (adjoints[id.at()], graph.node(id).clone()) else { continue };
        let wanted: SmallVec<[bool; 4]> = node.inputs.iter().map(|i| depends[i.at()]).collect();
        if !wanted.contains(&true) {
            continue;
        }
        differentiate(graph, id);
        let parts = gradient(graph, &node.op, id, &node.inputs, dy, &wanted);
        for ((&input, part), _) in node.inputs.iter().zip(parts).zip(wanted).filter(|(_, wanted)| *wanted) {
            let Some(part) = part else { continue };
            let slot = owner[input.at()].at();
            adjoints[slot] = Some(adjoints[slot].map_or(part, |sum| graph.add(sum, part)));
        }
    }
    graph.current_origin = before;
    wrt.iter().map(|w| owner.get(w.at()).and_then(|o| adjoints[o.at()])).collect()
}

/// For each node, the node that collects its gradient: itself, or for a variable the first node of that variable.
fn owners(graph: &Graph) -> Vec<NodeId> {
    let mut first = vec![None; graph.variables.len()];
    let collects = |id: NodeId| match graph.node(id).op {
        Op::Variable(v) => first.get_mut(v as usize).map_or(id, |slot| *slot.get_or_insert(id)),
        _ => id,
    };
    graph.ids().map(collects).collect()
}

/// What is emitted next belongs to the gradient of this node.
fn differentiate(graph: &mut Graph, id: NodeId) {
    let origin = graph.node(id).origin as usize;
    if let Some(origin) = graph.origins.get(origin) {
        let origin = Origin { phase: Phase::Backward, part: graph.current_part, ..origin.clone() };
        graph.set_origin(origin);
    }
}
