//! When variables are written: a step reads what they held when it began, so each is written after its last reader.
//!
//! Most updates can be written where they are computed, in place. Where that would have a kernel wait for its own result
//! (two variables that swap their values, say), the new value goes to a buffer and is copied at the end.

use std::collections::{BTreeMap, HashMap, HashSet};

use slabwise_kernels::size::Symbol;

use super::fuse::Clusters;
use super::layout::view;
use super::stages::{Stage, stages, symbols};
use crate::ops::{NodeId, Op};

/// How the assignments of a program are carried out.
pub(super) struct Updates {
    /// Values whose kernel writes them into these variables itself.
    pub direct: HashMap<NodeId, Vec<u32>>,
    /// Values copied into a variable by a task of their own.
    pub deferred: Vec<Deferred>,
    /// Per kernel: kernels that must run before it although it takes nothing of them.
    pub after: Vec<Vec<usize>>,
    /// Kernels that say the length of a symbol.
    finders: Vec<(Symbol, usize)>,
}

impl Updates {
    /// The kernels that say the lengths which a stage waits for.
    pub fn finders(&self, stage: Stage) -> impl Iterator<Item = usize> {
        symbols(stage).filter_map(|s| self.finders.iter().find(|f| f.0 == s)).map(|f| f.1)
    }
}

pub(super) struct Deferred {
    pub value: NodeId,
    pub variable: u32,
    pub after: Vec<usize>,
}

pub(super) fn place_updates(clusters: &Clusters) -> Updates {
    let graph = &clusters.graph;
    let count = clusters.list.len();
    let mut readers: HashMap<u32, HashSet<usize>> = HashMap::new();
    let mut next: Vec<HashSet<usize>> = vec![HashSet::new(); count];
    let (mut checks, mut finders) = (Vec::new(), Vec::new());
    for (at, cluster) in clusters.list.iter().enumerate() {
        for &m in &cluster.members {
            // What may fail a run comes before what changes weights: checks, and kernels whose results the pool has to have room for.
            let node = graph.node(m);
            if node.op.is_check() || (clusters.stored[m.at()] && graph.symbols.any_found(&node.dims)) {
                checks.push(at);
            }
            if let Op::Bind { symbol } = node.op {
                finders.push((symbol, at));
            }
            for source in clusters.sources(m) {
                if let Op::Variable(v) = graph.node(source).op {
                    readers.entry(v).or_default().insert(at);
                }
                if let Some(place) = clusters.places[source.at()].as_ref().filter(|p| p.cluster != at) {
                    next[place.cluster].insert(at);
                }
            }
        }
    }
    let mut updates = Updates { direct: HashMap::new(), deferred: Vec::new(), after: vec![Vec::new(); count], finders };
    let stages = stages(graph);
    for (at, cluster) in clusters.list.iter().enumerate() {
        let Some(first) = cluster.members.first() else { continue };
        for finder in updates.finders(stages[first.at()]).collect::<Vec<_>>() {
            next[finder].insert(at);
            updates.after[at].push(finder);
        }
    }
    for (before, after) in part_orders(clusters) {
        next[before].insert(after);
    }
    for (before, after) in successions(clusters, &next) {
        next[before].insert(after);
        updates.after[after].push(before);
    }
    for id in graph.ids() {
        let Op::Assign(variable) = graph.node(id).op else { continue };
        let value = graph.node(id).inputs[0];
        let Some(writer) = clusters.places[value.at()].as_ref().map(|p| p.cluster) else { continue };
        let mut before: Vec<usize> = readers.get(&variable).into_iter().flatten().copied().filter(|&r| r != writer).collect();
        before.extend(checks.iter().copied().filter(|&c| c != writer));
        before.sort_unstable();
        before.dedup();
        let circle = before.iter().any(|&r| reaches(&next, writer, r));
        if circle || !same_walk(clusters, writer, value, variable) {
            // Nobody waits for a copy at the end.
            before.push(writer);
            updates.deferred.push(Deferred { value, variable, after: before });
            continue;
        }
        for &r in &before {
            next[r].insert(writer);
        }
        updates.after[writer].extend(before);
        updates.direct.entry(value).or_default().push(variable);
    }
    for after in &mut updates.after {
        after.sort_unstable();
        after.dedup();
    }
    updates
}

/// Kernels that write parts of one buffer, each with the next one: parts are written in the order of the kernels.
fn part_orders(clusters: &Clusters) -> Vec<(usize, usize)> {
    let mut pairs = Vec::new();
    for id in clusters.graph.ids() {
        let node = clusters.graph.node(id);
        if let Op::Concat { .. } = node.op {
            let mut writers: Vec<usize> = node.inputs.iter().filter_map(|i| Some(clusters.places[i.at()].as_ref()?.cluster)).collect();
            writers.sort_unstable();
            writers.dedup();
            pairs.extend(writers.windows(2).map(|pair| (pair[0], pair[1])));
        }
    }
    pairs
}

/// Kernels of one part of the batch, and those of the next that wait for them: the last ones and the first ones of each.
fn successions(clusters: &Clusters, next: &[HashSet<usize>]) -> Vec<(usize, usize)> {
    let part = |at: usize| clusters.list[at].members.first().map(|m| clusters.graph.origin(*m).part);
    let mut parts: BTreeMap<u32, [Vec<usize>; 2]> = BTreeMap::new();
    let mut follows = vec![false; next.len()];
    for (at, after) in next.iter().enumerate() {
        after.iter().filter(|&&to| part(to) == part(at)).for_each(|&to| follows[to] = true);
    }
    for at in 0..next.len() {
        let Some(number) = part(at) else { continue };
        let [first, last] = parts.entry(number).or_default();
        if !follows[at] {
            first.push(at);
        }
        if next[at].iter().all(|&to| part(to) != part(at)) {
            last.push(at);
        }
    }
    let all: Vec<[Vec<usize>; 2]> = parts.into_values().collect();
    let pairs = |w: &[[Vec<usize>; 2]]| {
        let pair = |&before: &usize| w[1][0].iter().map(move |&after| (before, after)).collect::<Vec<_>>();
        w[0][1].iter().flat_map(pair).collect::<Vec<_>>()
    };
    all.windows(2).flat_map(pairs).collect()
}

fn reaches(next: &[HashSet<usize>], from: usize, to: usize) -> bool {
    let mut seen = HashSet::from([from]);
    let mut stack = vec![from];
    while let Some(at) = stack.pop() {
        if at == to {
            return true;
        }
        stack.extend(next[at].iter().copied().filter(|n| seen.insert(*n)));
    }
    false
}

/// Whether the writer reads the variable only at the places it writes.
fn same_walk(clusters: &Clusters, writer: usize, value: NodeId, variable: u32) -> bool {
    let graph = &clusters.graph;
    let Some(target) = &clusters.places[value.at()] else { return false };
    clusters.list[writer].members.iter().all(|&m| {
        let (node, place) = (graph.node(m), clusters.places[m.at()].as_ref());
        clusters.edges[m.at()].iter().enumerate().all(|(k, edge)| {
            let reads = if clusters.inline[edge.source.at()] {
                clusters.sources(edge.source).iter().any(|s| graph.node(*s).op == Op::Variable(variable))
            } else {
                graph.node(edge.source).op == Op::Variable(variable)
            };
            if !reads {
                return true;
            }
            // The operand must be the whole variable as it lies, seen along the axes on which the new value is written.
            let Some(place) = place.filter(|_| node.op.is_pointwise() || matches!(node.op, Op::Reduce(..))) else { return false };
            let seen = place.operand_axes.as_ref().unwrap_or(&place.axes);
            let Some(axes) = &edge.axes else { return false };
            let composed: super::layout::AxisMap = axes.iter().map(|a| a.and_then(|a| seen[usize::from(a)])).collect();
            let whole = view(graph, node.inputs[k]).is_some_and(|v| v.base == edge.source);
            whole && !clusters.inline[edge.source.at()] && composed == target.axes
        })
    })
}
