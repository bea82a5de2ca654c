//! The order of updates: a step reads the values that variables held when it began, so each
//! variable is written after its last reader.
//!
//! Most updates can be written where they are computed, in place. Where that would make a kernel
//! depend on its own result (two variables that swap their values, say), the new value goes to a
//! buffer and is copied at the end.

use std::collections::BTreeMap;

use rustc_hash::FxHashMap;
use slabwise_kernels::size::Symbol;

use super::fuse::{Clusters, Links};
use super::layout::{AxisMap, Views};
use super::sequence::{Sequence, Ways};
use super::stages::{Stage, stages, symbols};
use crate::ops::{NodeId, Op};

/// How the assignments of a program are carried out.
pub(super) struct Updates {
    /// Values whose kernel writes them into these variables itself.
    pub direct: FxHashMap<NodeId, Vec<u32>>,
    /// Tensors with a part replaced that lie in the variable whose part it is: only the part is
    /// written.
    pub in_place: FxHashMap<NodeId, u32>,
    /// Values copied into a variable by a separate kernel.
    pub deferred: Vec<Deferred>,
    /// Per kernel: kernels that must run before it although it takes nothing of them.
    pub after: Vec<Vec<usize>>,
    /// Kernels that say the length of a symbol.
    finders: Vec<(Symbol, usize)>,
}

impl Updates {
    /// The kernels that compute the lengths which a stage depends on.
    pub fn finders(&self, stage: Stage) -> impl Iterator<Item = usize> {
        symbols(stage)
            .filter_map(|s| self.finders.iter().find(|f| f.0 == s))
            .map(|f| f.1)
    }
}

pub(super) struct Deferred {
    pub value: NodeId,
    pub variable: u32,
    pub after: Vec<usize>,
}

/// Kernels, concatenations and paddings with all dependencies between them, in a topological
/// order.
struct Graded {
    links: Links,
    order: Sequence,
}

impl Ways for Links {
    fn degree(&self, vertex: u32, backward: bool) -> usize {
        let lists = if backward { &self.before } else { &self.next };
        lists[vertex as usize].len()
    }

    fn each(&self, vertex: u32, backward: bool, visit: &mut dyn FnMut(u32)) {
        let lists = if backward { &self.before } else { &self.next };
        lists[vertex as usize]
            .iter()
            .for_each(|&other| visit(other));
    }
}

impl Graded {
    fn new(clusters: &Clusters) -> Self {
        let links = clusters.links();
        let kernels = clusters.list.len();
        // Kernels are in order already; a concatenation comes after the last kernel that it waits
        // for, and one of its own kind.
        let mut places: Vec<(u32, u32)> = (0..links.next.len() as u32).map(|at| (at, 0)).collect();
        for at in kernels..places.len() {
            let (last, depth) = links.before[at]
                .iter()
                .map(|&b| places[b as usize])
                .max()
                .unwrap_or_default();
            places[at] = (last, depth + 1);
        }
        let mut order: Vec<u32> = (0..places.len() as u32).collect();
        order.sort_by_key(|&at| places[at as usize]);
        Graded {
            links,
            order: Sequence::of(order.into_iter()),
        }
    }

    /// The second comes after the first.
    fn add(&mut self, from: u32, to: u32) {
        self.order.connect(&self.links, from, to);
        self.links.next[from as usize].push(to);
        self.links.before[to as usize].push(from);
    }

    fn leads(&mut self, from: usize, to: usize) -> bool {
        from == to || self.order.leads(&self.links, from as u32, to as u32)
    }
}

pub(super) fn place_updates(clusters: &Clusters, views: &Views) -> Updates {
    let graph = &clusters.graph;
    let count = clusters.list.len();
    let mut readers: FxHashMap<u32, Vec<usize>> = FxHashMap::default();
    let mut graded = Graded::new(clusters);
    let (mut checks, mut finders) = (Vec::new(), Vec::new());
    let mut collectives = Vec::new();
    for (at, cluster) in clusters.list.iter().enumerate() {
        for &m in &cluster.members {
            // Kernels that may fail a run come before those that change weights: checks, and
            // kernels whose results need bytes of the pool.
            let node = graph.node(m);
            if node.op.is_check()
                || (clusters.stored[m.at()] && graph.symbols.any_data_dependent(&node.dims))
            {
                checks.push(at);
            }
            if let Op::Bind { symbol } = node.op {
                finders.push((symbol, at));
            }
            if let Op::Collective { .. } = node.op {
                collectives.push(at);
            }
            clusters.each_source(m, |source| {
                if let Op::Variable(v) = graph.node(source).op {
                    readers.entry(v).or_default().push(at);
                }
            });
        }
    }
    checks.dedup();
    readers.values_mut().for_each(Vec::dedup);
    let mut updates = Updates {
        direct: FxHashMap::default(),
        in_place: FxHashMap::default(),
        deferred: Vec::new(),
        after: vec![Vec::new(); count],
        finders,
    };
    let stages = stages(graph);
    for (at, cluster) in clusters.list.iter().enumerate() {
        let Some(first) = cluster.members.first() else {
            continue;
        };
        for finder in updates.finders(stages[first.at()]).collect::<Vec<_>>() {
            graded.add(finder as u32, at as u32);
            updates.after[at].push(finder);
        }
    }
    for (before, after) in part_orders(clusters) {
        graded.add(before as u32, after as u32);
    }
    for (before, after) in successions(clusters, &graded.links) {
        graded.add(before as u32, after as u32);
        updates.after[after].push(before);
    }
    // A rank whose data is faulty stops before it sends anything, so that no rank changes a weight.
    for &at in &collectives {
        for &check in &checks {
            if !graded.leads(at, check) {
                graded.add(check as u32, at as u32);
                updates.after[at].push(check);
            }
        }
    }
    let mut assigned: FxHashMap<NodeId, u32> = FxHashMap::default();
    for id in graph.ids() {
        if let Op::Assign(_) = graph.node(id).op {
            *assigned.entry(graph.node(id).inputs[0]).or_default() += 1;
        }
    }
    for id in graph.ids() {
        let Op::Assign(variable) = graph.node(id).op else {
            continue;
        };
        let value = graph.node(id).inputs[0];
        let Some(writer) = clusters.places[value.at()].as_ref().map(|p| p.cluster) else {
            continue;
        };
        let mut before: Vec<usize> = readers
            .get(&variable)
            .into_iter()
            .flatten()
            .copied()
            .filter(|&r| r != writer)
            .collect();
        before.extend(checks.iter().copied().filter(|&c| c != writer));
        before.sort_unstable();
        before.dedup();
        let circle = before.iter().any(|&r| graded.leads(writer, r));
        let replaces = matches!(graph.node(value).op, Op::SliceAssign { .. });
        let once = || assigned.get(&value) == Some(&1);
        if replaces && !circle && once() && replaces_part(clusters, value, variable) {
            for &r in &before {
                graded.add(r as u32, writer as u32);
            }
            updates.after[writer].extend(before);
            updates.in_place.insert(value, variable);
            continue;
        }
        if circle || replaces || !same_walk(clusters, views, writer, value, variable) {
            // No kernel depends on a copy at the end.
            before.push(writer);
            updates.deferred.push(Deferred {
                value,
                variable,
                after: before,
            });
            continue;
        }
        for &r in &before {
            graded.add(r as u32, writer as u32);
        }
        updates.after[writer].extend(before);
        updates.direct.entry(value).or_default().push(variable);
    }
    // No buffer tells the readers of such a tensor to wait for it.
    for (at, cluster) in clusters
        .list
        .iter()
        .enumerate()
        .filter(|_| !updates.in_place.is_empty())
    {
        for &m in &cluster.members {
            clusters.each_source(m, |source| {
                let writer = clusters.places[source.at()].as_ref().map(|p| p.cluster);
                let in_place = updates.in_place.contains_key(&source);
                if let Some(writer) = writer.filter(|&writer| in_place && writer != at) {
                    updates.after[at].push(writer);
                }
            });
        }
    }
    for after in &mut updates.after {
        after.sort_unstable();
        after.dedup();
    }
    updates
}

/// Kernels that write parts of one buffer, each with the next one: parts are written in the order
/// of the kernels.
fn part_orders(clusters: &Clusters) -> Vec<(usize, usize)> {
    let mut pairs = Vec::new();
    for id in clusters.graph.ids() {
        let node = clusters.graph.node(id);
        if let Op::Concat { .. } = node.op {
            let mut writers: Vec<usize> = node
                .inputs
                .iter()
                .filter_map(|i| Some(clusters.places[i.at()].as_ref()?.cluster))
                .collect();
            writers.sort_unstable();
            writers.dedup();
            pairs.extend(writers.windows(2).map(|pair| (pair[0], pair[1])));
        }
    }
    pairs
}

/// Kernels of one part of the batch, and those of the next that depend on them: the last ones and
/// the first ones of each.
fn successions(clusters: &Clusters, links: &Links) -> Vec<(usize, usize)> {
    let count = clusters.list.len();
    let part = |at: usize| {
        clusters.list[at]
            .members
            .first()
            .map(|m| clusters.graph.origin(*m).part)
    };
    let mut parts: BTreeMap<u32, [Vec<usize>; 2]> = BTreeMap::new();
    // Whether another kernel of the part is beside a vertex on this side, past concatenations too.
    let beside = |lists: &[Vec<u32>], at: usize| {
        let mut stack: Vec<u32> = lists[at].clone();
        let mut found = false;
        while let Some(other) = stack.pop().map(|other| other as usize).filter(|_| !found) {
            if other < count {
                found = part(other) == part(at);
            } else {
                stack.extend(&lists[other]);
            }
        }
        found
    };
    // There is nothing to put in order where there is one part.
    if (1..count).all(|at| part(at) == part(0)) {
        return Vec::new();
    }
    for at in 0..count {
        let Some(number) = part(at) else { continue };
        let [first, last] = parts.entry(number).or_default();
        if !beside(&links.before, at) {
            first.push(at);
        }
        if !beside(&links.next, at) {
            last.push(at);
        }
    }
    let all: Vec<[Vec<usize>; 2]> = parts.into_values().collect();
    let pairs = |w: &[[Vec<usize>; 2]]| {
        let pair = |&before: &usize| {
            w[1][0]
                .iter()
                .map(move |&after| (before, after))
                .collect::<Vec<_>>()
        };
        w[0][1].iter().flat_map(pair).collect::<Vec<_>>()
    };
    all.windows(2).flat_map(pairs).collect()
}

/// Whether a value is a variable with a part replaced and may lie in the variable: nothing else
/// needs it in a buffer.
fn replaces_part(clusters: &Clusters, value: NodeId, variable: u32) -> bool {
    let graph = &clusters.graph;
    let is_own = graph.node(graph.node(value).inputs[0]).op == Op::Variable(variable);
    let mut reads = 0;
    clusters.each_source(value, |source| {
        reads += usize::from(graph.node(source).op == Op::Variable(variable));
    });
    is_own && reads == 1 && !graph.outputs.contains(&value)
}

/// Whether the writer reads the variable only at the places it writes.
fn same_walk(
    clusters: &Clusters,
    views: &Views,
    writer: usize,
    value: NodeId,
    variable: u32,
) -> bool {
    let Some(target) = &clusters.places[value.at()] else {
        return false;
    };
    clusters.list[writer].members.iter().all(|&m| {
        let place = clusters.places[m.at()].as_ref();
        let seen = place.map(|place| place.operand_axes.as_ref().unwrap_or(&place.axes));
        reads_there(clusters, views, m, seen, (variable, &target.axes))
    })
}

/// Whether a node, and every value that its kernel computes for it, reads a variable only along
/// these axes of the kernel; `seen`: the kernel's axes along those of the node.
fn reads_there(
    clusters: &Clusters,
    views: &Views,
    id: NodeId,
    seen: Option<&AxisMap>,
    (variable, target): (u32, &AxisMap),
) -> bool {
    let graph = &clusters.graph;
    let node = graph.node(id);
    clusters.edges[id.at()].iter().enumerate().all(|(k, edge)| {
        let inline = clusters.inline[edge.source.at()];
        let mut reads = graph.node(edge.source).op == Op::Variable(variable);
        if inline {
            clusters.each_source(edge.source, |s| {
                reads |= graph.node(s).op == Op::Variable(variable)
            });
        }
        if !reads {
            return true;
        }
        // The operand must be the whole variable as it lies, seen along the axes on which the new
        // value is written.
        let per_element = node.op.is_pointwise() || matches!(node.op, Op::Reduce(..));
        let (Some(seen), Some(axes), true) = (seen, &edge.axes, per_element) else {
            return false;
        };
        let composed: AxisMap = axes
            .iter()
            .map(|a| a.and_then(|a| seen[usize::from(a)]))
            .collect();
        if inline {
            let of = (variable, target);
            return reads_there(clusters, views, edge.source, Some(&composed), of);
        }
        let view = views.view(graph, node.inputs[k]);
        view.is_some_and(|v| v.base == edge.source) && composed == *target
    })
}
