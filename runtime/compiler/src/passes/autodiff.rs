//! Reverse-mode differentiation, as a transformation of the graph: it adds ordinary nodes,
//! so that gradients can be differentiated again, simplified, fused and planned like everything
//! else.

mod scan;

use rustc_hash::{FxHashMap, FxHashSet};
use smallvec::SmallVec;

use crate::graph::{Graph, Origin, Phase};
use crate::ops::{Gradients, GraphBuilder, NodeId, Op, gradient};

/// Adds the gradient of the sum of `loss`'s elements with respect to each of `wrt`, and says where
/// each is: `None` where `loss` does not depend on it, or depends on it only through integers and
/// truth values.
///
/// A gradient has the shape of its node. Several nodes of one variable count as one: each
/// gets the whole of that variable's gradient. Only nodes on a way from `wrt` to `loss` are
/// differentiated, contributions add up from the last consumer to the first (so equal graphs give
/// equal bits), and a new node has the origin of the node it differentiates, in
/// [`Phase::Backward`].
pub fn gradients(graph: &mut Graph, loss: NodeId, wrt: &[NodeId]) -> Vec<Option<NodeId>> {
    gradients_with(graph, loss, wrt, &mut Plain)
}

/// [`gradients`], of which `user` takes over parts.
pub fn gradients_with(
    graph: &mut Graph,
    loss: NodeId,
    wrt: &[NodeId],
    user: &mut dyn UserGradients,
) -> Vec<Option<NodeId>> {
    if loss.at() >= graph.nodes.len() {
        return vec![None; wrt.len()];
    }
    take_back(graph, &[(loss, None)], wrt, user)
}

/// Parts of differentiation that functions of the user take over.
pub trait UserGradients {
    /// The gradient to use in place of the accumulated one of a node.
    fn replaced(&mut self, graph: &mut Graph, node: NodeId, gradient: NodeId) -> NodeId;

    /// The nodes that a node with a custom gradient passes gradients to, in place of its operands;
    /// `None` of other nodes.
    fn inputs(&self, node: NodeId) -> Option<SmallVec<[NodeId; 3]>>;

    /// The gradients of these nodes, from that of the node.
    fn gradients(&mut self, graph: &mut Graph, node: NodeId, gradient: NodeId) -> Gradients;
}

/// No functions of the user.
struct Plain;

impl UserGradients for Plain {
    fn replaced(&mut self, _: &mut Graph, _: NodeId, gradient: NodeId) -> NodeId {
        gradient
    }

    fn inputs(&self, _: NodeId) -> Option<SmallVec<[NodeId; 3]>> {
        None
    }

    fn gradients(&mut self, _: &mut Graph, _: NodeId, _: NodeId) -> Gradients {
        Gradients::new()
    }
}

/// The nodes that a node passes gradients to.
fn inputs_of(graph: &Graph, user: &dyn UserGradients, id: NodeId) -> SmallVec<[NodeId; 3]> {
    user.inputs(id)
        .unwrap_or_else(|| graph.node(id).inputs.clone())
}

/// The gradients with respect to each of `wrt`, from those of these nodes.
fn pull_back(graph: &mut Graph, seeds: &[(NodeId, NodeId)], wrt: &[NodeId]) -> Vec<Option<NodeId>> {
    let seeds: Vec<_> = seeds.iter().map(|&(of, seed)| (of, Some(seed))).collect();
    take_back(graph, &seeds, wrt, &mut Plain)
}

/// The gradients with respect to each of `wrt`, from those of these nodes; a gradient that is not
/// given is 1.
fn take_back(
    graph: &mut Graph,
    seeds: &[(NodeId, Option<NodeId>)],
    wrt: &[NodeId],
    user: &mut dyn UserGradients,
) -> Vec<Option<NodeId>> {
    let nodes = graph.nodes.len();
    let reached = reached(graph, user, seeds.iter().map(|seed| seed.0));
    // The nodes whose value depends on one of `wrt` through floats alone; the others carry no
    // gradient.
    let mut depends: FxHashSet<NodeId> = FxHashSet::default();
    let first = first_nodes(
        graph,
        reached
            .iter()
            .chain(wrt)
            .copied()
            .filter(|id| id.at() < nodes),
    );
    let collector = |graph: &Graph, id: NodeId| match graph.node(id).op {
        Op::Variable(v) => first.get(&v).copied().unwrap_or(id),
        _ => id,
    };
    depends.extend(
        wrt.iter()
            .filter(|w| w.at() < nodes && graph.dtype(**w).is_float())
            .map(|&w| collector(graph, w)),
    );
    for &id in &reached {
        let node = graph.node(id);
        let here = depends.contains(&collector(graph, id))
            || inputs_of(graph, user, id)
                .iter()
                .any(|i| depends.contains(i));
        if here && node.dtype.is_float() {
            depends.insert(id);
        }
    }

    let before = graph.current_origin;
    let mut adjoints: FxHashMap<NodeId, NodeId> = FxHashMap::default();
    // The gradients of the results of scans.
    let mut results: FxHashMap<NodeId, Vec<(u32, NodeId)>> = FxHashMap::default();
    for &(of, seed) in seeds {
        if !depends.contains(&collector(graph, of)) && !depends.contains(&of) {
            continue;
        }
        let seed = seed.unwrap_or_else(|| {
            differentiate(graph, of);
            let dims = graph.dims(of).clone();
            let dtype = graph.dtype(of).lane().stored();
            graph.full(1.0, dtype, &dims)
        });
        let slot = collector(graph, of);
        let sum = adjoints
            .get(&slot)
            .map_or(seed, |&sum| graph.add(sum, seed));
        adjoints.insert(slot, sum);
    }
    for id in reached.into_iter().rev().filter(|id| depends.contains(id)) {
        let node = graph.node(id).clone();
        let of_scan = results.remove(&id);
        let dy = adjoints.get(&id).map(|&dy| user.replaced(graph, id, dy));
        if let Some(dy) = dy {
            adjoints.insert(id, dy);
        }
        if let (&Op::ScanResult(result), Some(dy)) = (&node.op, dy) {
            let of_scan = results.entry(node.inputs[0]).or_default();
            of_scan.push((result, dy));
            continue;
        }
        if dy.is_none() && of_scan.is_none() {
            continue;
        }
        let custom = user.inputs(id);
        let inputs = custom.as_ref().unwrap_or(&node.inputs);
        let wanted: SmallVec<[bool; 4]> = inputs.iter().map(|i| depends.contains(i)).collect();
        if !wanted.contains(&true) {
            continue;
        }
        differentiate(graph, id);
        let parts: Gradients = match (of_scan, dy) {
            (Some(of_scan), _) => scan::gradient(graph, id, &of_scan, &wanted).into(),
            (None, Some(dy)) if custom.is_some() => {
                let parts = user.gradients(graph, id, dy);
                // Sums of contributions belong to this node.
                differentiate(graph, id);
                parts
            }
            (None, Some(dy)) => gradient(graph, &node.op, id, &node.inputs, dy, &wanted),
            (None, None) => continue,
        };
        for ((&input, part), _) in inputs
            .iter()
            .zip(parts)
            .zip(wanted)
            .filter(|(_, wanted)| *wanted)
        {
            let Some(part) = part else { continue };
            let slot = collector(graph, input);
            let sum = adjoints
                .get(&slot)
                .map_or(part, |&sum| graph.add(sum, part));
            adjoints.insert(slot, sum);
        }
    }
    graph.current_origin = before;
    wrt.iter()
        .map(|&w| {
            if w.at() < nodes {
                adjoints.get(&collector(graph, w)).copied()
            } else {
                None
            }
        })
        .collect()
}

/// The nodes that these are computed from, themselves included, in topological order: for one part of a
/// batch those of that part alone, however many parts there are.
fn reached(
    graph: &Graph,
    user: &dyn UserGradients,
    of: impl Iterator<Item = NodeId>,
) -> Vec<NodeId> {
    let mut seen = FxHashSet::default();
    let mut reached: Vec<NodeId> = of.filter(|id| seen.insert(*id)).collect();
    let mut at = 0;
    while let Some(&id) = reached.get(at) {
        at += 1;
        let inputs = inputs_of(graph, user, id).into_iter();
        reached.extend(inputs.filter(|&input| seen.insert(input)));
    }
    reached.sort_unstable();
    reached
}

/// The first of these nodes for each variable, which collects its gradient.
fn first_nodes(graph: &Graph, ids: impl Iterator<Item = NodeId>) -> FxHashMap<u32, NodeId> {
    let mut first = FxHashMap::default();
    for id in ids {
        if let Op::Variable(v) = graph.node(id).op {
            let known = first.entry(v).or_insert(id);
            *known = id.min(*known);
        }
    }
    first
}

/// Emits the nodes of the gradient of a node.
fn differentiate(graph: &mut Graph, id: NodeId) {
    let origin = graph.node(id).origin as usize;
    if let Some(origin) = graph.origins.get(origin) {
        let origin = Origin {
            phase: Phase::Backward,
            part: graph.current_part,
            ..origin.clone()
        };
        graph.set_origin(origin);
    }
}
