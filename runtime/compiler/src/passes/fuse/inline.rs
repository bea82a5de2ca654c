//! Inlining: values that every kernel computes for itself rather than reads.
//!
//! Inlining is recomputation without memory traffic, so it is not left to the planner. Whether it
//! pays for a value depends on which of its uses are per element and which tensors are in memory
//! anyway, and both are known before the kernels are.

use slabwise_kernels::dtype::DType;
use slabwise_kernels::scalar::ScalarOp;
use smallvec::SmallVec;

use super::added_product;
use super::clusters::Edge;
use crate::graph::{Graph, Node, Phase};
use crate::ops::{NodeId, Op};
use crate::passes::layout::{AxisMap, is_computed};
use crate::passes::remat::REMAT_MIN_ELEMENTS;
use crate::shape::elements;

/// Values that every use can recompute: those computed from numbers, indices and random bits alone,
/// and halves converted to f32, which are read as halves.
pub(super) fn inline_nodes(graph: &Graph, edges: &[SmallVec<[Edge; 3]>]) -> Vec<bool> {
    let mut inline = vec![false; graph.nodes.len()];
    // The operations of each, counted for every use.
    let mut work = vec![0u32; graph.nodes.len()];
    for id in graph.ids() {
        let sources = &edges[id.at()];
        work[id.at()] = sources
            .iter()
            .fold(1, |n, e| n.saturating_add(work[e.source.at()]));
        let made = |e: &Edge| inline[e.source.at()] && e.axes.is_some();
        inline[id.at()] = match &graph.node(id).op {
            Op::Const(_) | Op::Size(_) | Op::Index(_) => true,
            Op::Uniform { .. } => {
                matches!(graph.node(sources[0].source).op, Op::Variable(_)) && made(&sources[1])
            }
            Op::Scalar(_) | Op::Cast(_) => sources.iter().all(made) && work[id.at()] <= INLINED_MAX,
            _ => false,
        };
        if !inline[id.at()] {
            work[id.at()] = 0;
        }
    }
    for id in graph.ids() {
        inline[id.at()] |= is_conversion(graph, edges, id);
    }
    // A use that needs the value in memory makes it a node like any other, and so everything
    // computed from it there.
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
    for pinned in graph.outputs.iter().chain(&graph.kept) {
        inline[pinned.at()] = false;
    }
    inline
}

/// Most operations of a value made from numbers, indices and random bits that every use makes; a
/// longer one is computed once.
const INLINED_MAX: u32 = 64;

/// Most operations of a value that is recomputed per use.
const RECOMPUTED_MAX: u32 = 24;

/// Marks values that are recomputed by each kernel that uses them per element, rather than written
/// and read:
///
/// - sums, differences and products of one tensor that is in memory anyway, or that is of halves,
///   and of values uniform along axes, if several loops use them: `x − mean` beside x;
/// - elementwise work of the forward pass on large tensors that the backward pass needs, if the
///   tensors that it is computed from are in memory then anyway: all the steps of gelu, of its
///   argument. So a chain of operations keeps one tensor for its gradient, not one for each;
/// - if `per_use`, large values that rematerialization recomputes for several uses per element,
///   lest they be stored by the first of them for the others.
pub(super) fn recompute_per_use(
    graph: &Graph,
    edges: &[SmallVec<[Edge; 3]>],
    users: &[SmallVec<[(NodeId, usize); 4]>],
    inline: &mut [bool],
    per_use: bool,
) {
    let phase = |id: NodeId| graph.origin(id).phase;
    // Halves are read by their conversions.
    let converted = |id: NodeId| is_conversion(graph, edges, id) && inline[id.at()];
    let read_by = |id: NodeId| {
        let mut all: SmallVec<[(NodeId, usize, bool); 4]> = SmallVec::new();
        for &(user, k) in &users[id.at()] {
            let along = edges[user.at()][k].axes.is_some();
            match converted(user) {
                true => all.extend(
                    users[user.at()]
                        .iter()
                        .map(|&(user, k)| (user, k, along && edges[user.at()][k].axes.is_some())),
                ),
                false => all.push((user, k, along)),
            }
        }
        all
    };
    let returns = |id: NodeId| {
        phase(id) == Phase::Forward
            && read_by(id)
                .iter()
                .any(|(user, ..)| phase(*user) != Phase::Forward)
    };
    let pinned = graph.pinned();
    let memory = |id: NodeId| {
        let needed = |&(user, _, along): &(NodeId, usize, bool)| {
            let op = &graph.node(user).op;
            let added =
                || added_product(graph, edges, users, user).is_some_and(|product| product != id);
            !along
                || !(op.is_pointwise() || matches!(op, Op::Reduce(..) | Op::Assign(_)))
                || added()
        };
        !is_computed(&graph.node(id).op) || pinned[id.at()] || read_by(id).iter().any(needed)
    };
    let in_memory: Vec<bool> = graph.ids().map(memory).collect();
    let returning: Vec<bool> = graph.ids().map(returns).collect();
    let bounds = graph.symbols.bounds();
    let large = |id: NodeId| {
        elements(&graph.node(id).dims).is_some_and(|n| n.at(&bounds) >= REMAT_MIN_ELEMENTS)
    };
    // Clones of rematerialization outside of checkpointed segments. Small ones cost few bytes.
    let is_clone =
        |id: NodeId| per_use && phase(id) == Phase::Recompute && graph.origin(id).segment == 0;
    // The operations that it takes to compute a value from tensors in memory, if that is possible.
    let mut work: Vec<Option<u32>> = vec![None; graph.nodes.len()];
    for id in graph.ids() {
        let node = graph.node(id);
        let pointwise =
            matches!(node.op, Op::Scalar(_) | Op::Cast(_)) && !inline[id.at()] && !pinned[id.at()];
        let looped = |&(user, k): &(NodeId, usize)| {
            let op = &graph.node(user).op;
            (op.is_pointwise() || matches!(op, Op::Reduce(..)))
                && edges[user.at()][k].axes.is_some()
        };
        if !pointwise
            || !users[id.at()].iter().all(looped)
            || edges[id.at()].iter().any(|e| e.axes.is_none())
        {
            continue;
        }
        let wide: SmallVec<[NodeId; 3]> = edges[id.at()]
            .iter()
            .filter(|e| wide(graph, node, e))
            .map(
                |e| match is_conversion(graph, edges, e.source) && inline[e.source.at()] {
                    true => edges[e.source.at()][0].source,
                    false => e.source,
                },
            )
            .collect();
        let kept =
            |s: &NodeId| in_memory[s.at()] || returning[s.at()] || is_clone(*s) && !large(*s);
        let steps = wide.iter().map(|s| {
            if inline[s.at()] || !kept(s) {
                // Random numbers are recomputed by every kernel.
                work[s.at()].or((per_use && inline[s.at()]).then_some(1))
            } else {
                Some(0)
            }
        });
        let cheap = matches!(
            node.op,
            Op::Scalar(ScalarOp::Add | ScalarOp::Sub | ScalarOp::Mul)
        );
        let beside = cheap && wide.len() == 1 && users[id.at()].len() > 1;
        // Halves that are stored for several readers take fewer bytes than this value would.
        let of_halves = beside && graph.node(wide[0]).dtype.is_half();
        let steps = steps.sum::<Option<u32>>().or(of_halves.then_some(0));
        let Some(steps) = steps.map(|n| n + 1).filter(|&n| n <= RECOMPUTED_MAX) else {
            continue;
        };
        work[id.at()] = Some(steps);
        let beside = beside && (of_halves || inline[wide[0].at()] || in_memory[wide[0].at()]);
        let again = is_clone(id) && large(id) && users[id.at()].len() > 1;
        if beside || ((returning[id.at()] && large(id) || again) && !wide.is_empty()) {
            let mut made = vec![id];
            while let Some(at) = made.pop() {
                inline[at.at()] = true;
                let sources = edges[at.at()].iter().map(|e| e.source);
                made.extend(
                    sources.filter(|s| work[s.at()].is_some() && !inline[s.at()] && !kept(s)),
                );
            }
        }
    }
}

/// Whether a value is one of halves converted to f32.
fn is_conversion(graph: &Graph, edges: &[SmallVec<[Edge; 3]>], id: NodeId) -> bool {
    let widens = |e: &Edge| graph.node(e.source).dtype.is_half();
    graph.node(id).op == Op::Cast(DType::F32) && edges[id.at()].iter().all(widens)
}

/// Whether an operand is a tensor that has all axes of the node that are longer than 1, or a part
/// of one.
pub(in crate::passes) fn wide(graph: &Graph, node: &Node, edge: &Edge) -> bool {
    let all = |axes: &AxisMap| {
        (0..node.dims.len())
            .filter(|&i| !node.dims[i].is(1))
            .all(|i| axes.contains(&Some(i as u8)))
    };
    !is_leaf(graph, edge.source) && edge.axes.as_ref().is_none_or(all)
}

/// A number, an index or the like, which is no tensor.
fn is_leaf(graph: &Graph, id: NodeId) -> bool {
    matches!(graph.node(id).op, Op::Const(_) | Op::Size(_) | Op::Index(_))
}
