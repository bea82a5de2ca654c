//! Rematerialization: cheap activations are recomputed in the backward pass rather than saved, if
//! they are elementwise functions of tensors that are kept live anyway.
//!
//! The input of a convolution is needed twice: in the forward pass, and for the gradient of the
//! weight. Where it is a norm and an activation of the result of an earlier convolution, which the
//! norm's gradient needs too, recomputing it costs less than keeping it live, which would take half
//! the bytes of a network of convolutions and norms, and a good part of a transformer's. This is
//! the memory-sharing of in-place activated batch norm (Rota Bulò et al. 2018) and of
//! memory-efficient DenseNets (Pleiss et al. 2017), found in the graph instead of written into
//! layers.
//!
//! In a segment under `Tensor::checkpoint` every value that the backward pass needs is recomputed,
//! products and sums included: gradient checkpointing (Griewank and Walther 2000, Chen et al.
//! 2016). Values of a segment that are used outside of it are kept.
//!
//! The pass copies such chains, in [`Phase::Recompute`], in front of their first use in the
//! backward pass; fusion then makes them part of a kernel that reads the same tensors, where there
//! is one.

use rustc_hash::{FxHashMap, FxHashSet};
use smallvec::SmallVec;

use super::error::PassError;
use super::fuse::{Edge, Users, edges, users, wide};
use super::layout::is_computed;
use super::pipeline::Pass;
use crate::graph::{Graph, Origin, Phase};
use crate::ops::{GraphBuilder, NodeId, Op};
use crate::shape::elements;

/// Most tensors that one is recomputed from: each is read once more.
const SOURCES_MAX: usize = 2;
/// Most operations that it takes.
const STEPS_MAX: u32 = 24;
/// Tensors of fewer elements cost few bytes, and are kept.
pub const REMAT_MIN_ELEMENTS: i64 = 1 << 12;

/// The pass; `smallest` as of [`rematerialize`].
pub struct Rematerialize {
    /// The fewest elements of a tensor that is recomputed because that is cheap; none if `None`.
    pub smallest: Option<i64>,
    /// Values that the backward pass reads from memory are stored by the forward pass. Only the
    /// uses of cheap values per element are recomputed then.
    pub stored: bool,
}

impl Pass for Rematerialize {
    const NAME: &'static str = "remat";
    type Input = Graph;
    type Output = Graph;

    fn run(&self, graph: &Graph) -> Result<Graph, PassError> {
        Ok(rematerialize_with(graph, self.smallest, self.stored))
    }
}

/// The graph in which the insides of checkpointed segments are recomputed, and tensors of at least
/// `smallest` elements that are cheap to recompute; none of those if there is no such number.
pub fn rematerialize(graph: &Graph, smallest: Option<i64>) -> Graph {
    rematerialize_with(graph, smallest, false)
}

/// The same, with [`Rematerialize::stored`].
fn rematerialize_with(graph: &Graph, smallest: Option<i64>, stored: bool) -> Graph {
    let inside = inside_of_segments(graph);
    let (choice, again) = choose(graph, &inside, smallest);
    if !again.contains(&true) {
        return graph.clone();
    }
    let out = Graph {
        nodes: Vec::with_capacity(graph.nodes.len()),
        ..graph.clone()
    };
    let map = Vec::with_capacity(graph.nodes.len());
    let mut kept = vec![false; graph.nodes.len()];
    graph.kept.iter().for_each(|id| kept[id.at()] = true);
    let mut copier = Copier {
        choice: &choice,
        stored: stored.then(|| choice.views_in_memory()),
        inside,
        again,
        kept,
        out,
        map,
        back: FxHashMap::default(),
        copies: FxHashMap::default(),
    };
    for id in graph.ids() {
        let node = graph.node(id);
        let returns = graph.origin(id).phase != Phase::Forward;
        let inputs: SmallVec<[NodeId; 3]> = node
            .inputs
            .iter()
            .enumerate()
            .map(|(k, &i)| {
                if returns && !copier.takes_stored(id, k) {
                    copier.on_the_way_back(i)
                } else {
                    copier.map[i.at()]
                }
            })
            .collect();
        copier.out.current_origin = node.origin;
        let new = copier
            .out
            .emit(node.op.clone(), &inputs, node.dtype, node.dims.clone());
        copier.map.push(new);
    }
    let Copier { mut out, map, .. } = copier;
    out.outputs
        .iter_mut()
        .chain(&mut out.kept)
        .for_each(|id| *id = map[id.at()]);
    out.current_origin = graph.current_origin;
    out
}

/// The place of the value of a node of the forward pass.
#[derive(Clone, Debug, PartialEq)]
enum Place {
    /// Nowhere: it is a step in the kernel of its one user.
    Passing,
    /// In memory, or so small that it does not count.
    Stored,
    /// Pointwise work over stored tensors.
    Derived {
        sources: SmallVec<[NodeId; 3]>,
        steps: u32,
    },
}

struct Choice<'a> {
    graph: &'a Graph,
    smallest: i64,
    edges: Vec<SmallVec<[Edge; 3]>>,
    users: Vec<Users>,
    places: Vec<Place>,
    pinned: Vec<bool>,
}

/// For each node whether it is part of a checkpointed segment, and no node of the forward pass
/// uses it outside of the segment.
fn inside_of_segments(graph: &Graph) -> Vec<bool> {
    let segment = |id: NodeId| {
        let origin = graph.origin(id);
        if origin.phase == Phase::Forward {
            origin.segment
        } else {
            0
        }
    };
    let mut inside: Vec<bool> = graph
        .ids()
        .map(|id| segment(id) != 0 && !matches!(graph.node(id).op, Op::Variable(_) | Op::Input(_)))
        .collect();
    graph
        .outputs
        .iter()
        .chain(&graph.kept)
        .for_each(|id| inside[id.at()] = false);
    for user in graph
        .ids()
        .rev()
        .filter(|id| graph.origin(*id).phase != Phase::Backward)
    {
        let node = graph.node(user);
        for &input in &node.inputs {
            // A view that is taken out takes the bytes under it along.
            inside[input.at()] &=
                segment(input) == segment(user) && (inside[user.at()] || !node.op.is_view());
        }
    }
    inside
}

/// The places of values, and for each node whether the backward pass recomputes it.
fn choose<'a>(graph: &'a Graph, inside: &[bool], smallest: Option<i64>) -> (Choice<'a>, Vec<bool>) {
    let edges = edges(graph);
    let users = users(graph, &edges);
    let places = vec![Place::Stored; graph.nodes.len()];
    let mut choice = Choice {
        graph,
        smallest: smallest.unwrap_or(i64::MAX),
        edges,
        users,
        places,
        pinned: graph.pinned(),
    };
    let mut again = inside.to_vec();
    if smallest.is_none() {
        return (choice, again);
    }
    // A value that leaves a segment is kept, however cheap, lest one segment be recomputed for the
    // next.
    let forward = |id: &NodeId| {
        let origin = graph.origin(*id);
        origin.phase == Phase::Forward && origin.segment == 0 && !graph.node(*id).op.is_view()
    };
    for id in graph.ids().filter(forward) {
        choice.places[id.at()] = choice.place(id);
    }
    // The backward pass keeps these in any case: tensors that it reads itself, or through steps
    // that it recomputes.
    let mut kept = vec![false; graph.nodes.len()];
    for id in graph.ids().rev().filter(forward) {
        kept[id.at()] = choice.users[id.at()].iter().any(|&(user, _)| {
            let derived = matches!(choice.places[user.at()], Place::Derived { .. });
            graph.origin(user).phase != Phase::Forward
                || (derived && !choice.returns_to_memory(user) && kept[user.at()])
        });
    }
    // A value that is kept after all is a tensor that others are computed from.
    for id in graph.ids().filter(forward) {
        if matches!(choice.places[id.at()], Place::Stored) {
            continue;
        }
        choice.places[id.at()] = choice.place(id);
        if let Place::Derived { sources, .. } = &choice.places[id.at()]
            && choice.returns_to_memory(id)
        {
            again[id.at()] = !sources.is_empty() && sources.iter().all(|s| kept[s.at()]);
            if !again[id.at()] {
                choice.places[id.at()] = Place::Stored;
            }
        }
    }
    (choice, again)
}

impl Choice<'_> {
    fn place(&self, id: NodeId) -> Place {
        let (graph, node) = (self.graph, self.graph.node(id));
        let large =
            elements(&node.dims).is_some_and(|n| n.at(&graph.symbols.bounds()) >= self.smallest);
        if !large || !is_computed(&node.op) || self.pinned[id.at()] {
            return Place::Stored;
        }
        // The step after a product is computed with it, as long as it is the only one.
        let alone = matches!(self.users[id.at()][..], [(user, k)] if !self.needs_memory(user, k) && graph.node(user).op.is_pointwise());
        let behind_another = if alone { Place::Passing } else { Place::Stored };
        if !is_step(&node.op) {
            return behind_another;
        }
        let (mut sources, mut steps) = (SmallVec::<[NodeId; 3]>::new(), 1);
        for edge in self.edges[id.at()].iter().filter(|e| wide(graph, node, e)) {
            let below = match &self.places[edge.source.at()] {
                Place::Passing => return behind_another,
                Place::Stored => std::slice::from_ref(&edge.source),
                Place::Derived { .. } if edge.axes.is_none() => std::slice::from_ref(&edge.source),
                Place::Derived {
                    sources,
                    steps: below,
                } => {
                    steps += below;
                    sources
                }
            };
            sources.extend(
                below
                    .iter()
                    .copied()
                    .filter(|s| !matches!(graph.node(*s).op, Op::Variable(_))),
            );
        }
        sources.sort_unstable();
        sources.dedup();
        if sources.len() > SOURCES_MAX || steps > STEPS_MAX {
            Place::Stored
        } else {
            Place::Derived { sources, steps }
        }
    }

    /// Whether a user reads an operand from memory, rather than per element.
    fn needs_memory(&self, user: NodeId, operand: usize) -> bool {
        let op = &self.graph.node(user).op;
        self.edges[user.at()][operand].axes.is_none()
            || !(is_step(op) || matches!(op, Op::Reduce(..)))
    }

    /// Whether each view is read from memory.
    fn views_in_memory(&self) -> Vec<bool> {
        let mut read = vec![false; self.graph.nodes.len()];
        for user in self.graph.ids().rev() {
            let node = self.graph.node(user);
            for (k, input) in node.inputs.iter().enumerate() {
                read[input.at()] |= if node.op.is_view() {
                    read[user.at()]
                } else {
                    self.needs_memory(user, k)
                };
            }
        }
        read
    }

    /// Whether the backward pass reads a node's value from memory.
    fn returns_to_memory(&self, id: NodeId) -> bool {
        let back = |&(user, k): &(NodeId, usize)| {
            self.graph.origin(user).phase != Phase::Forward && self.needs_memory(user, k)
        };
        self.users[id.at()].iter().any(back)
    }
}

/// Whether it is computed per element. Random numbers are, and come out the same when recomputed.
fn is_step(op: &Op) -> bool {
    op.is_pointwise() && *op != Op::Copy || matches!(op, Op::Uniform { .. })
}

struct Copier<'a> {
    choice: &'a Choice<'a>,
    /// If values are stored for reads from memory: for each view whether it is read so.
    stored: Option<Vec<bool>>,
    inside: Vec<bool>,
    again: Vec<bool>,
    kept: Vec<bool>,
    out: Graph,
    /// The new node of each old one.
    map: Vec<NodeId>,
    /// The node that stands for an old one in the backward pass.
    back: FxHashMap<NodeId, NodeId>,
    /// The copies of steps that values are recomputed from.
    copies: FxHashMap<NodeId, NodeId>,
}

impl Copier<'_> {
    /// Whether a node reads an operand as the forward pass has stored it.
    fn takes_stored(&self, user: NodeId, operand: usize) -> bool {
        let Some(views) = &self.stored else {
            return false;
        };
        let node = self.choice.graph.node(user);
        let reads = if node.op.is_view() {
            views[user.at()]
        } else {
            self.choice.needs_memory(user, operand)
        };
        reads && !self.inside[node.inputs[operand].at()]
    }

    /// The new node that the backward pass reads for an old one: another one if that, or a step
    /// that it is computed from, is recomputed.
    fn on_the_way_back(&mut self, id: NodeId) -> NodeId {
        // Operands first, one after the other: chains of steps may be as long as the program.
        let mut stack = vec![id];
        while let Some(&last) = stack.last() {
            let node = self.choice.graph.node(last);
            let missing = |i: &&NodeId| !self.back.contains_key(*i);
            if missing(&&last)
                && self.passes_on(last)
                && let Some(&operand) = node.inputs.iter().find(missing)
            {
                stack.push(operand);
                continue;
            }
            self.made_on_the_way_back(last);
            stack.pop();
        }
        self.back[&id]
    }

    /// Whether the backward pass recomputes a node's step if it recomputes an operand.
    fn passes_on(&self, id: NodeId) -> bool {
        let (op, origin) = (&self.choice.graph.node(id).op, self.choice.graph.origin(id));
        let stays = self.inside[id.at()] || self.again[id.at()] || self.kept[id.at()];
        !stays
            && origin.phase == Phase::Forward
            && origin.segment == 0
            && (is_step(op) || op.is_view())
    }

    /// [`Copier::on_the_way_back`] of a node whose operands were looked at, where it passes them
    /// on.
    fn made_on_the_way_back(&mut self, id: NodeId) -> NodeId {
        if let Some(&made) = self.back.get(&id) {
            return made;
        }
        if self.inside[id.at()] {
            // One after the other, since segments may be long.
            for step in self.missing(id) {
                let made = self.emit_copy(step, true);
                self.back.insert(step, made);
            }
        }
        let made = if let Some(&made) = self.back.get(&id) {
            made
        } else if self.again[id.at()] {
            self.emit_copy(id, true)
        } else if self.passes_on(id) {
            self.emit_copy(id, false)
        } else {
            self.map[id.at()]
        };
        self.back.insert(id, made);
        made
    }

    /// The nodes of a segment to recompute for a node of it, in order.
    fn missing(&self, id: NodeId) -> Vec<NodeId> {
        let (mut found, mut at) = (vec![id], 0);
        let mut seen: FxHashSet<NodeId> = [id].into_iter().collect();
        while let Some(&step) = found.get(at) {
            at += 1;
            let inputs = self.choice.graph.node(step).inputs.iter().copied();
            for input in inputs.filter(|i| self.inside[i.at()] && !self.back.contains_key(i)) {
                if seen.insert(input) {
                    found.push(input);
                }
            }
        }
        found.sort_unstable();
        found
    }

    /// A copy of a step that a value is recomputed from; values in memory stay.
    fn copy(&mut self, id: NodeId) -> NodeId {
        if self.again[id.at()] {
            return self.on_the_way_back(id);
        }
        if let Some(&made) = self.copies.get(&id) {
            return made;
        }
        let derived = matches!(self.choice.places[id.at()], Place::Derived { .. });
        let view = self.choice.graph.node(id).op.is_view();
        let made = if derived || view {
            self.emit_copy(id, true)
        } else {
            self.map[id.at()]
        };
        self.copies.insert(id, made);
        made
    }

    /// A node's operation on its operands in the backward pass: if `deep`, on copies of them, else
    /// as they are. If no operand differs, only a deep copy makes another node.
    fn emit_copy(&mut self, id: NodeId, deep: bool) -> NodeId {
        let node = self.choice.graph.node(id);
        let inputs: SmallVec<[NodeId; 3]> = node
            .inputs
            .iter()
            .enumerate()
            .map(|(k, &i)| {
                if self.takes_stored(id, k) {
                    self.map[i.at()]
                } else if deep {
                    self.copy(i)
                } else {
                    self.on_the_way_back(i)
                }
            })
            .collect();
        let same = node
            .inputs
            .iter()
            .zip(&inputs)
            .all(|(old, new)| self.map[old.at()] == *new);
        if same && !(deep && (is_step(&node.op) || self.inside[id.at()] && !node.op.is_view())) {
            return self.map[id.at()];
        }
        self.out.set_origin(Origin {
            phase: Phase::Recompute,
            ..self.choice.graph.origin(id).clone()
        });
        self.out
            .emit(node.op.clone(), &inputs, node.dtype, node.dims.clone())
    }
}
