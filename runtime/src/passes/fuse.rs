//! Fusion: which nodes run together in one kernel.
//!
//! Nodes are visited from the last to the first. A node joins the kernel of its consumers when all of them are in one
//! kernel and see it point by point; so nothing is computed twice, nothing is kept that only one kernel needs, and the
//! kernels stay free of circles: every path out of the node leads into that kernel. When a node's consumers are in several
//! kernels over the same space that do not depend on each other, these become one first (the loss and its gradient over
//! the rows of the logits).
//!
//! A kernel is one of: a loop over points; a loop with reductions, whose results may be used beside the points again
//! (*rows*); or an *anchor* (matrix product, convolution, pooling, gather) with a loop behind it, its epilogue.

use std::collections::HashSet;
use std::fmt;

use slabwise_kernels::size::Size;
use slabwise_kernels::spec::{Dims, PoolKind};
use smallvec::SmallVec;

use super::layout::{AxisMap, is_computed, trace_axes};
use crate::graph::Graph;
use crate::ops::{NodeId, Op};

/// Which fusions are allowed; each can be switched off.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fuse {
    /// Elementwise nodes join each other.
    pub elementwise: bool,
    /// Reductions join elementwise work before and behind them.
    pub reductions: bool,
    /// Reductions join the work over the points that uses their results: softmax in one kernel.
    pub rows: bool,
    /// Elementwise work joins the matrix product, convolution, pooling or gather before it.
    pub epilogues: bool,
    /// Independent kernels over one space that share an operand become one.
    pub siblings: bool,
}

impl Default for Fuse {
    fn default() -> Self {
        Fuse { elementwise: true, reductions: true, rows: true, epilogues: true, siblings: true }
    }
}

impl Fuse {
    /// Every node in a kernel of its own.
    pub fn none() -> Self {
        Fuse { elementwise: false, reductions: false, rows: false, epilogues: false, siblings: false }
    }
}

/// The longest row, in elements, that a rows kernel keeps at hand; longer ones are read again by a second kernel.
const ROW_MAX: i64 = 1 << 16;
/// Most nodes in a kernel, and most operands: what keeps its registers and its argument list small.
const MEMBERS_MAX: usize = 96;
const OPERANDS_MAX: usize = 15;

/// One kernel: the nodes it computes.
#[derive(Clone, Debug, Default)]
pub struct Cluster {
    /// The points it runs over.
    pub space: Dims,
    /// Which axes of `space` its reductions fold.
    pub reduced: SmallVec<[bool; 6]>,
    /// The operation that is not pointwise, if there is one.
    pub anchor: Option<NodeId>,
    /// The positions that a max pooling stores beside its values.
    pub positions: Option<NodeId>,
    /// What it computes, in topological order; the anchor too.
    pub members: Vec<NodeId>,
}

/// Where a node is in its kernel's space.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Place {
    /// The kernel.
    pub cluster: usize,
    /// For each axis of the node, the axis of the space along it.
    pub axes: AxisMap,
    /// For a reduction: the same for its operand.
    pub operand_axes: Option<AxisMap>,
}

/// An operand of a node, seen through views.
#[derive(Clone, Debug)]
pub(super) struct Edge {
    /// The node whose value it is.
    pub source: NodeId,
    /// For each axis of the source, the axis of the operand along it; `None` if views do more than rename and repeat.
    pub axes: Option<AxisMap>,
}

/// A graph divided into kernels.
#[derive(Clone, Debug)]
pub struct Clusters {
    /// The graph.
    pub graph: Graph,
    /// The kernels; empty ones were merged away.
    pub list: Vec<Cluster>,
    pub(super) places: Vec<Option<Place>>,
    pub(super) edges: Vec<SmallVec<[Edge; 3]>>,
    /// Cheap values without tensor operands (numbers, indices, random bits) that every kernel computes for itself.
    pub(super) inline: Vec<bool>,
    /// Which values are written to memory.
    pub(super) stored: Vec<bool>,
}

/// Divides a graph, which [`super::legalise`] has seen, into kernels.
pub fn fuse(graph: &Graph, options: &Fuse) -> Clusters {
    let edges: Vec<SmallVec<[Edge; 3]>> = graph
        .ids()
        .map(|id| {
            let seen = |&i: &NodeId| {
                let (source, axes) = trace_axes(graph, i);
                Edge { source, axes }
            };
            if graph.node(id).op.is_view() { SmallVec::new() } else { graph.node(id).inputs.iter().map(seen).collect() }
        })
        .collect();
    let inline = inline_nodes(graph, &edges);
    let mut builder =
        Builder { graph, options, users: users(graph, &edges), edges, inline, list: Vec::new(), places: vec![None; graph.nodes.len()] };
    for id in graph.ids().rev() {
        let op = &graph.node(id).op;
        if (is_computed(op) && !builder.inline[id.at()]) || matches!(op, Op::CheckIndex { .. }) {
            builder.visit(id);
        }
    }
    builder.pair_positions();
    builder.finish()
}

/// Operand positions that take each node's value, views skipped.
fn users(graph: &Graph, edges: &[SmallVec<[Edge; 3]>]) -> Vec<SmallVec<[(NodeId, usize); 4]>> {
    let mut users = vec![SmallVec::new(); graph.nodes.len()];
    for id in graph.ids() {
        for (k, edge) in edges[id.at()].iter().enumerate() {
            users[edge.source.at()].push((id, k));
        }
    }
    users
}

/// Values made of numbers, indices and random bits alone, whose every use can make them anew.
fn inline_nodes(graph: &Graph, edges: &[SmallVec<[Edge; 3]>]) -> Vec<bool> {
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

struct Builder<'a> {
    graph: &'a Graph,
    options: &'a Fuse,
    users: Vec<SmallVec<[(NodeId, usize); 4]>>,
    edges: Vec<SmallVec<[Edge; 3]>>,
    inline: Vec<bool>,
    list: Vec<Cluster>,
    places: Vec<Option<Place>>,
}

impl Builder<'_> {
    fn visit(&mut self, id: NodeId) {
        if let Some((cluster, axes)) = self.joinable(id)
            && self.join(id, cluster, axes)
        {
            return;
        }
        self.open(id);
    }

    /// The one kernel in which all uses of the node see it point by point, and its axes there.
    fn joinable(&mut self, id: NodeId) -> Option<(usize, AxisMap)> {
        let mut found: Option<AxisMap> = None;
        let mut clusters: SmallVec<[usize; 4]> = SmallVec::new();
        for k in 0..self.users[id.at()].len() {
            let (user, operand) = self.users[id.at()][k];
            if matches!(self.graph.node(user).op, Op::Assign(_)) {
                continue;
            }
            let (cluster, axes) = self.seen_from(user, operand)?;
            if found.as_ref().is_some_and(|f| *f != axes) {
                return None;
            }
            found = Some(axes);
            if !clusters.contains(&cluster) {
                clusters.push(cluster);
            }
        }
        let axes = found?;
        clusters.sort_unstable();
        let first = clusters[0];
        for &other in &clusters[1..] {
            if !self.merge_siblings(first, other) {
                return None;
            }
        }
        Some((first, axes))
    }

    /// The kernel of a use and the axes the operand has there, if the use is pointwise.
    fn seen_from(&self, user: NodeId, operand: usize) -> Option<(usize, AxisMap)> {
        let place = self.places[user.at()].as_ref()?;
        let op = &self.graph.node(user).op;
        let axes = match op {
            Op::Reduce(..) => place.operand_axes.as_ref()?,
            op if op.is_pointwise() => &place.axes,
            _ => return None,
        };
        let edge = &self.edges[user.at()][operand];
        let through = edge.axes.as_ref()?;
        Some((place.cluster, through.iter().map(|a| a.and_then(|a| axes[usize::from(a)])).collect()))
    }

    /// Adds the node to a kernel if the kernel's form allows it.
    fn join(&mut self, id: NodeId, cluster: usize, axes: AxisMap) -> bool {
        let c = &self.list[cluster];
        if self.shares_container(&[id], &c.members) || c.members.len() >= MEMBERS_MAX || self.operands_with(cluster, id) > OPERANDS_MAX {
            return false;
        }
        match &self.graph.node(id).op {
            Op::Reduce(..) => self.join_reduction(id, cluster, axes),
            op if op.is_pointwise() || matches!(op, Op::Uniform { .. }) => {
                let full = covers(c, &axes, |_| true);
                let folded = c.reduced.contains(&true) && covers(c, &axes, |r| !r);
                let allowed = if c.anchor.is_some() { self.options.epilogues } else { self.options.elementwise };
                // Points beside reductions make a rows kernel when they use a folded value; they do not make one by being reduced.
                let ok = allowed && (full || folded) && (c.anchor.is_some() || !c.reduced.contains(&true) || self.options.reductions);
                if ok {
                    self.put(id, cluster, axes, None);
                }
                ok
            }
            _ => self.join_anchor(id, cluster, axes),
        }
    }

    fn join_reduction(&mut self, id: NodeId, cluster: usize, axes: AxisMap) -> bool {
        let c = &self.list[cluster];
        if c.anchor.is_some() || !self.options.reductions {
            return false;
        }
        let Op::Reduce(_, folded_axes) = &self.graph.node(id).op else { return false };
        let operand_dims = &self.graph.node(self.graph.node(id).inputs[0]).dims;
        let folds: SmallVec<[usize; 6]> = (0..operand_dims.len()).filter(|i| folded_axes.contains(i) && !operand_dims[*i].is(1)).collect();
        let mut operand_axes = axes.clone();
        let has_reduction = c.reduced.contains(&true);
        if !has_reduction && covers(c, &axes, |_| true) {
            // What stands behind the reduction is computed once per kept point: the space gains the folded axes.
            let c = &mut self.list[cluster];
            for &i in &folds {
                operand_axes[i] = Some(c.space.len() as u8);
                c.space.push(operand_dims[i]);
                c.reduced.push(true);
            }
            self.put(id, cluster, axes, Some(operand_axes));
            return true;
        }
        // The kernel runs over the points that are folded here: its axes that the result lacks are the folded ones.
        let missing: SmallVec<[usize; 6]> = (0..c.space.len()).filter(|&s| !c.space[s].is(1) && !axes.contains(&Some(s as u8))).collect();
        let same = missing.len() == folds.len() && missing.iter().zip(&folds).all(|(&s, &i)| c.space[s] == operand_dims[i]);
        let agrees = !has_reduction || (0..c.space.len()).all(|s| c.reduced[s] == missing.contains(&s) || c.space[s].is(1));
        if !same || !agrees || !self.rows_allowed(id, cluster, &folds) {
            return false;
        }
        let c = &mut self.list[cluster];
        for (&s, &i) in missing.iter().zip(&folds) {
            operand_axes[i] = Some(s as u8);
            c.reduced[s] = true;
        }
        self.put(id, cluster, axes, Some(operand_axes));
        true
    }

    /// Whether a reduction may join work over the points it folds: always if only folded values use it; else rows must be
    /// short and contiguous in the way the tensor is written.
    fn rows_allowed(&self, id: NodeId, cluster: usize, folds: &[usize]) -> bool {
        let c = &self.list[cluster];
        let has_points = c.members.iter().any(|&m| {
            let place = self.places[m.at()].as_ref().expect("members are placed");
            !matches!(self.graph.node(m).op, Op::Reduce(..)) && covers(c, &place.axes, |_| true)
        });
        if !has_points {
            return true;
        }
        let dims = &self.graph.node(self.graph.node(id).inputs[0]).dims;
        let trailing = folds.first().is_none_or(|&first| (first..dims.len()).all(|i| folds.contains(&i) || dims[i].is(1)));
        let bounds = self.graph.symbols.bounds();
        let row = folds.iter().fold(1i64, |n, &i| n.saturating_mul(dims[i].at(&bounds)));
        self.options.rows && trailing && row <= ROW_MAX
    }

    fn join_anchor(&mut self, id: NodeId, cluster: usize, axes: AxisMap) -> bool {
        let node = self.graph.node(id);
        let c = &self.list[cluster];
        let bodied = matches!(
            node.op,
            Op::Matmul
                | Op::Conv2d(_)
                | Op::Conv2dInputGrad(_)
                | Op::Conv2dWeightGrad(_)
                | Op::Pool2d(PoolKind::Max | PoolKind::Avg { .. }, _)
                | Op::Pool2dGrad(..)
                | Op::Gather { .. }
                | Op::ScatterAdd { .. }
        );
        let mapped: SmallVec<[u8; 6]> = axes.iter().flatten().copied().collect();
        let in_order = mapped.windows(2).all(|w| w[0] < w[1]);
        if !bodied || !self.options.epilogues || c.anchor.is_some() || c.reduced.contains(&true) || !in_order || !covers(c, &axes, |_| true)
        {
            return false;
        }
        // The anchor's own axes, those of length 1 included, become the space.
        let mut renamed: SmallVec<[Option<u8>; 6]> = SmallVec::from_elem(None, c.space.len());
        for (i, axis) in axes.iter().enumerate() {
            if let Some(s) = axis {
                renamed[usize::from(*s)] = Some(i as u8);
            }
        }
        let dims = node.dims.clone();
        let c = &mut self.list[cluster];
        c.reduced = SmallVec::from_elem(false, dims.len());
        c.space = dims;
        c.anchor = Some(id);
        for m in c.members.clone() {
            let place = self.places[m.at()].as_mut().expect("members are placed");
            for axis in &mut place.axes {
                *axis = axis.and_then(|a| renamed[usize::from(a)]);
            }
        }
        let axes = (0..node.dims.len()).map(|i| (!node.dims[i].is(1)).then_some(i as u8)).collect();
        self.put(id, cluster, axes, None);
        true
    }

    fn put(&mut self, id: NodeId, cluster: usize, axes: AxisMap, operand_axes: Option<AxisMap>) {
        self.list[cluster].members.push(id);
        self.places[id.at()] = Some(Place { cluster, axes, operand_axes });
    }

    /// A kernel for the node alone, until others join.
    fn open(&mut self, id: NodeId) {
        let node = self.graph.node(id);
        let mut cluster = Cluster::default();
        let mut axes: AxisMap = SmallVec::new();
        let mut operand_axes = None;
        let is_loop = node.op.is_pointwise() || matches!(node.op, Op::Reduce(..) | Op::Uniform { .. });
        if is_loop {
            let folded = |i: usize| matches!(&node.op, Op::Reduce(_, folds) if folds.contains(&i));
            let over = if matches!(node.op, Op::Reduce(..)) { &self.graph.node(node.inputs[0]).dims } else { &node.dims };
            let mut all: AxisMap = SmallVec::new();
            for (i, &dim) in over.iter().enumerate() {
                all.push((!dim.is(1)).then_some(cluster.space.len() as u8));
                if !dim.is(1) {
                    cluster.space.push(dim);
                    cluster.reduced.push(folded(i));
                }
            }
            axes = (0..over.len()).map(|i| if folded(i) { None } else { all[i] }).collect();
            if matches!(node.op, Op::Reduce(..)) {
                operand_axes = Some(all);
            }
        } else {
            cluster.space = node.dims.clone();
            cluster.reduced = SmallVec::from_elem(false, node.dims.len());
            cluster.anchor = Some(id);
            axes.extend((0..node.dims.len()).map(|i| (!node.dims[i].is(1)).then_some(i as u8)));
        }
        self.list.push(cluster);
        self.put(id, self.list.len() - 1, axes, operand_axes);
    }

    /// Makes two loops over one space into one, if neither needs the other's results.
    fn merge_siblings(&mut self, a: usize, b: usize) -> bool {
        let (x, y) = (&self.list[a], &self.list[b]);
        let loops = x.anchor.is_none() && y.anchor.is_none();
        let small = x.members.len() + y.members.len() <= MEMBERS_MAX && self.operands(a).union(&self.operands(b)).count() <= OPERANDS_MAX;
        if !self.options.siblings || !loops || !small || x.space != y.space || x.reduced != y.reduced && !self.one_is_rows(a, b) {
            return false;
        }
        if self.shares_container(&x.members, &y.members) || self.reaches(a, b) || self.reaches(b, a) {
            return false;
        }
        let moved = std::mem::take(&mut self.list[b]);
        let into = &mut self.list[a];
        for (r, m) in into.reduced.iter_mut().zip(&moved.reduced) {
            *r |= m;
        }
        into.members.extend(&moved.members);
        for m in moved.members {
            self.places[m.at()].as_mut().expect("members are placed").cluster = a;
        }
        true
    }

    /// Whether parts of one concatenation or padding are among both: one kernel may write only one part of a buffer.
    fn shares_container(&self, a: &[NodeId], b: &[NodeId]) -> bool {
        let container = |m: &NodeId| {
            self.users[m.at()].iter().map(|u| u.0).find(|u| matches!(self.graph.node(*u).op, Op::Concat { .. } | Op::Pad { .. }))
        };
        a.iter().filter_map(container).any(|c| b.iter().filter_map(container).any(|d| c == d))
    }

    /// One kernel folds, the other does not, and the first's folds may stand beside the second's points.
    fn one_is_rows(&self, a: usize, b: usize) -> bool {
        let (plain, folding) = if self.list[a].reduced.contains(&true) { (b, a) } else { (a, b) };
        if self.list[plain].reduced.contains(&true) || !self.options.rows {
            return false;
        }
        let c = &self.list[folding];
        let bounds = self.graph.symbols.bounds();
        let trailing = c.reduced.windows(2).all(|w| !w[0] || w[1]);
        let row = c.space.iter().zip(&c.reduced).filter(|(_, r)| **r).fold(1i64, |n, (d, _)| n.saturating_mul(d.at(&bounds)));
        trailing && row <= ROW_MAX
    }

    /// Whether a kernel's results are needed, directly or not, by another.
    fn reaches(&self, from: usize, to: usize) -> bool {
        let mut seen = HashSet::from([from]);
        let mut stack = vec![from];
        while let Some(at) = stack.pop() {
            for &m in &self.list[at].members {
                let mut nodes: SmallVec<[NodeId; 8]> = self.users[m.at()].iter().map(|u| u.0).collect();
                while let Some(user) = nodes.pop() {
                    match &self.places[user.at()] {
                        Some(place) if place.cluster == to && at != to => return true,
                        Some(place) => {
                            if seen.insert(place.cluster) {
                                stack.push(place.cluster);
                            }
                        }
                        // Concatenations and paddings lead on to whoever reads them.
                        None => nodes.extend(self.users[user.at()].iter().map(|u| u.0)),
                    }
                }
            }
        }
        false
    }

    /// What a kernel reads and writes beside its members' values, as (node, is it stored here).
    fn operands(&self, cluster: usize) -> HashSet<(NodeId, bool)> {
        let mut set = HashSet::new();
        for &m in &self.list[cluster].members {
            self.add_operands(m, cluster, &mut set);
        }
        set
    }

    fn operands_with(&self, cluster: usize, id: NodeId) -> usize {
        let mut set = self.operands(cluster);
        self.add_operands(id, cluster, &mut set);
        set.remove(&(id, false));
        set.len()
    }

    fn add_operands(&self, id: NodeId, cluster: usize, set: &mut HashSet<(NodeId, bool)>) {
        let outside = |n: NodeId| self.places[n.at()].as_ref().is_none_or(|p| p.cluster != cluster);
        let mut sources: SmallVec<[NodeId; 8]> = self.edges[id.at()].iter().map(|e| e.source).collect();
        while let Some(source) = sources.pop() {
            if self.inline[source.at()] {
                sources.extend(self.edges[source.at()].iter().map(|e| e.source));
            } else if outside(source) {
                set.insert((source, false));
            }
        }
        let users = &self.users[id.at()];
        let stored = self.graph.outputs.contains(&id) || users.iter().any(|(u, _)| outside(*u));
        if stored {
            set.insert((id, true));
        }
    }

    /// A max pooling and the positions of its maxima read the same windows: one kernel writes both.
    fn pair_positions(&mut self) {
        for id in self.graph.ids() {
            let Op::Pool2d(PoolKind::ArgMax, window) = self.graph.node(id).op else { continue };
            let Some(place) = self.places[id.at()].clone() else { continue };
            let twin = self.graph.ids().find(|&t| {
                let node = self.graph.node(t);
                matches!(node.op, Op::Pool2d(PoolKind::Max, w) if w == window)
                    && node.inputs == self.graph.node(id).inputs
                    && self.places[t.at()].is_some()
            });
            let Some(twin) = twin else { continue };
            let into = self.places[twin.at()].as_ref().expect("just found").cluster;
            if self.list[place.cluster].members.len() > 1
                || self.list[into].anchor != Some(twin)
                || self.list[into].positions.is_some()
                || !self.options.epilogues
            {
                continue;
            }
            self.list[place.cluster] = Cluster::default();
            self.list[into].positions = Some(id);
            self.list[into].members.push(id);
            self.places[id.at()] = Some(Place { cluster: into, ..place });
        }
    }

    fn finish(self) -> Clusters {
        let Builder { graph, users, edges, inline, mut list, mut places, .. } = self;
        // Emptied kernels go; the others keep their order, which runs from the last to the first: turn it.
        let mut renamed = vec![usize::MAX; list.len()];
        let mut kept = Vec::new();
        for (at, cluster) in list.iter_mut().enumerate().rev() {
            if !cluster.members.is_empty() {
                cluster.members.sort_unstable();
                renamed[at] = kept.len();
                kept.push(std::mem::take(cluster));
            }
        }
        for place in places.iter_mut().flatten() {
            place.cluster = renamed[place.cluster];
        }
        let mut stored = vec![false; graph.nodes.len()];
        for id in graph.ids() {
            let Some(place) = &places[id.at()] else { continue };
            let elsewhere = |&(user, _): &(NodeId, usize)| places[user.at()].as_ref().is_none_or(|p| p.cluster != place.cluster);
            let plain = |u: &(NodeId, usize)| !matches!(graph.node(u.0).op, Op::Assign(_));
            stored[id.at()] = graph.outputs.contains(&id) || users[id.at()].iter().filter(|u| plain(u)).any(elsewhere);
        }
        Clusters { graph: graph.clone(), list: kept, places, edges, inline, stored }
    }
}

/// Whether every axis of the space that is longer than 1 and satisfies `which` (of being reduced) is among `axes`, and none else.
fn covers(c: &Cluster, axes: &AxisMap, which: impl Fn(bool) -> bool) -> bool {
    (0..c.space.len()).all(|s| {
        let named = axes.iter().filter(|a| **a == Some(s as u8)).count();
        let wanted = usize::from(which(c.reduced[s]) && !c.space[s].is(1));
        named == wanted || (c.space[s].is(1) && named <= 1)
    })
}

impl Clusters {
    /// Checks that every computed node that is used has one kernel, and that the kernels are free of circles.
    pub fn verify(&self) -> Result<(), String> {
        let mut quotient = petgraph::graph::DiGraph::<(), ()>::new();
        let nodes: Vec<_> = self.list.iter().map(|_| quotient.add_node(())).collect();
        let mut count = vec![0; self.graph.nodes.len()];
        for (at, cluster) in self.list.iter().enumerate() {
            for &m in &cluster.members {
                count[m.at()] += 1;
                for source in self.sources(m) {
                    match &self.places[source.at()] {
                        Some(p) if p.cluster != at => {
                            quotient.update_edge(nodes[p.cluster], nodes[at], ());
                        }
                        _ => {}
                    }
                }
            }
        }
        if let Some(id) = self.graph.ids().find(|id| count[id.at()] > 1 || (count[id.at()] == 1) != self.places[id.at()].is_some()) {
            return Err(format!("{} is in {} kernels", self.graph.name(id), count[id.at()]));
        }
        petgraph::algo::toposort(&quotient, None).map(|_| ()).map_err(|c| format!("kernel {} needs its own result", c.node_id().index()))
    }

    /// The computed nodes and leaves a node takes, through inlined values, concatenations and paddings.
    pub(super) fn sources(&self, id: NodeId) -> Vec<NodeId> {
        let mut found = Vec::new();
        let mut stack: Vec<NodeId> = self.edges[id.at()].iter().map(|e| e.source).collect();
        while let Some(source) = stack.pop() {
            let container = matches!(self.graph.node(source).op, Op::Concat { .. } | Op::Pad { .. });
            if self.inline[source.at()] || container {
                stack.extend(self.edges[source.at()].iter().map(|e| e.source));
            } else {
                found.push(source);
            }
        }
        found
    }

    /// A name for a kernel: its anchor's, or its last member's, and how many further nodes it does.
    pub(super) fn name(&self, cluster: usize) -> String {
        let c = &self.list[cluster];
        let lead = c
            .anchor
            .or_else(|| c.members.iter().copied().find(|m| matches!(self.graph.node(*m).op, Op::Reduce(..))))
            .unwrap_or(*c.members.last().expect("kernels have members"));
        let extra = c.members.len() - 1;
        let updates = c.members.iter().any(|m| self.graph.origin(*m).phase == crate::graph::Phase::Update);
        let mut name = self.graph.name(lead);
        if extra > 0 {
            name += &format!(" +{extra}");
        }
        if updates && self.graph.origin(lead).phase != crate::graph::Phase::Update {
            name += " & update";
        }
        name
    }
}

impl fmt::Display for Clusters {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, c) in self.list.iter().enumerate() {
            let axis = |(d, r): (&Size, &bool)| format!("{}{}", d.show(|s| self.graph.symbols.name(s)), if *r { "↓" } else { "" });
            let space: Vec<String> = c.space.iter().zip(&c.reduced).map(axis).collect();
            let members: Vec<String> = c
                .members
                .iter()
                .map(|m| format!("%{} {}{}", m.0, self.graph.node(*m).op.name(), if self.stored[m.at()] { "*" } else { "" }))
                .collect();
            writeln!(f, "kernel {at} [{}] {}: {}", space.join(", "), self.name(at), members.join(", "))?;
        }
        Ok(())
    }
}
