//! What kernels compute for themselves rather than read.

use slabwise_kernels::scalar::ScalarOp;
use smallvec::SmallVec;

use super::clusters::Edge;
use crate::graph::Graph;
use crate::ops::{NodeId, Op};
use crate::passes::layout::is_computed;

/// Values made of numbers, indices and random bits alone, whose every use can make them anew.
pub(super) fn inline_nodes(graph: &Graph, edges: &[SmallVec<[Edge; 3]>]) -> Vec<bool> {
    let mut inline = vec![false; graph.nodes.len()];
    for id in graph.ids() {
        let sources = &edges[id.at()];
        let made = |e: &Edge| inline[e.source.at()] && e.axes.is_some();
        inline[id.at()] = match &graph.node(id).op {
            Op::Const(_) | Op::Size(_) | Op::Index(_) => true,
            Op::Uniform { .. } => matches!(graph.node(sources[0].source).op, Op::Variable(_)) && made(&sources[1]),
            Op::Scalar(_) | Op::Cast(_) => sources.iter().all(made),
            _ => false,
        };
    }
    // A use that needs the value in memory makes it a node like any other, and so everything computed from it there.
    for id in graph.ids().rev() {
        let op = &graph.node(id).op;
        let needs_memory = !op.is_pointwise() && !matches!(op, Op::Reduce(..) | Op::Uniform { .. });
        for edge in &edges[id.at()] {
            let leaf = matches!(graph.node(edge.source).op, Op::Const(_) | Op::Size(_));
            if !leaf && (needs_memory || edge.axes.is_none()) {
                inline[edge.source.at()] = false;
            }
        }
    }
    for output in &graph.outputs {
        inline[output.at()] = false;
    }
    inline
}

/// Sums, differences and products of what is in memory anyway and of values that are flat along axes, and that several loops
/// use: to make them anew in each takes less than to write and read them. `x − mean` beside x is one.
pub(super) fn recomputed(graph: &Graph, edges: &[SmallVec<[Edge; 3]>], users: &[SmallVec<[(NodeId, usize); 4]>], inline: &mut [bool]) {
    let in_memory = |id: NodeId| {
        let needed = |&(user, k): &(NodeId, usize)| {
            let op = &graph.node(user).op;
            edges[user.at()][k].axes.is_none() || !(op.is_pointwise() || matches!(op, Op::Reduce(..) | Op::Assign(_)))
        };
        !is_computed(&graph.node(id).op) || graph.outputs.contains(&id) || users[id.at()].iter().any(needed)
    };
    for id in graph.ids() {
        let node = graph.node(id);
        if !matches!(node.op, Op::Scalar(ScalarOp::Add | ScalarOp::Sub | ScalarOp::Mul)) || graph.outputs.contains(&id) {
            continue;
        }
        // All axes of the node that are longer than 1 are axes of the operand.
        let whole = |e: &&Edge| {
            e.axes.as_ref().is_some_and(|axes| (0..node.dims.len()).filter(|&i| !node.dims[i].is(1)).all(|i| axes.contains(&Some(i as u8))))
        };
        let apart = |e: &Edge| !inline[e.source.at()];
        let (wide, flat): (Vec<&Edge>, Vec<&Edge>) = edges[id.at()].iter().filter(|e| apart(e)).partition(whole);
        let looped = |&(user, k): &(NodeId, usize)| {
            let op = &graph.node(user).op;
            (op.is_pointwise() || matches!(op, Op::Reduce(..))) && edges[user.at()][k].axes.is_some()
        };
        let shared = users[id.at()].len() > 1 && users[id.at()].iter().all(looped);
        if shared && wide.len() == 1 && flat.iter().all(|e| e.axes.is_some()) && in_memory(wide[0].source) {
            inline[id.at()] = true;
        }
    }
}
