//! The result of fusion: which nodes each kernel computes.

use std::collections::BinaryHeap;
use std::fmt;

use slabwise_kernels::size::Size;
use slabwise_kernels::spec::Dims;
use smallvec::SmallVec;

use crate::graph::{Graph, Phase};
use crate::ops::{NodeId, Op};
use crate::passes::layout::AxisMap;

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
pub(in crate::passes) struct Place {
    /// The kernel.
    pub cluster: usize,
    /// For each axis of the node, the axis of the space along it.
    pub axes: AxisMap,
    /// For a reduction: the same for its operand.
    pub operand_axes: Option<AxisMap>,
}

/// An operand of a node, seen through views.
#[derive(Clone, Debug)]
pub(in crate::passes) struct Edge {
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
    pub(in crate::passes) places: Vec<Option<Place>>,
    pub(in crate::passes) edges: Vec<SmallVec<[Edge; 3]>>,
    /// Cheap values without tensor operands (numbers, indices, random bits) that every kernel computes for itself.
    pub(in crate::passes) inline: Vec<bool>,
    /// Which values are written to memory.
    pub(in crate::passes) stored: Vec<bool>,
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

    /// The same, every kernel behind those it needs; as far as that leaves a choice, the kernel listed last comes first, and what
    /// is made again waits until nothing else can be done. Empty kernels go.
    pub(super) fn in_order(mut self) -> Self {
        let count = self.list.len();
        let mut users: Vec<Vec<usize>> = vec![Vec::new(); count];
        let mut waits = vec![0usize; count];
        for (at, wait) in waits.iter_mut().enumerate() {
            let mut before: Vec<usize> = Vec::new();
            for &m in &self.list[at].members {
                let sources = self.sources(m).into_iter().filter_map(|s| self.places[s.at()].as_ref());
                before.extend(sources.map(|place| place.cluster).filter(|&c| c != at));
            }
            before.sort_unstable();
            before.dedup();
            *wait = before.len();
            before.into_iter().for_each(|b| users[b].push(at));
        }
        let phase = |m: &NodeId| self.graph.origin(*m).phase;
        let in_time: Vec<bool> = self.list.iter().map(|c| c.members.iter().any(|m| phase(m) != Phase::Again)).collect();
        let mut ready: BinaryHeap<(bool, usize)> = (0..count).filter(|&at| waits[at] == 0).map(|at| (in_time[at], at)).collect();
        let (mut renamed, mut kept) = (vec![usize::MAX; count], Vec::with_capacity(count));
        while let Some((_, at)) = ready.pop() {
            if !self.list[at].members.is_empty() {
                renamed[at] = kept.len();
                kept.push(std::mem::take(&mut self.list[at]));
            }
            for &user in &users[at] {
                waits[user] -= 1;
                if waits[user] == 0 {
                    ready.push((in_time[user], user));
                }
            }
        }
        debug_assert!(waits.iter().all(|&w| w == 0), "kernels need each other's results");
        self.list = kept;
        self.places.iter_mut().flatten().for_each(|place| place.cluster = renamed[place.cluster]);
        self
    }

    /// The computed nodes and leaves a node takes, through inlined values, concatenations and paddings.
    pub(in crate::passes) fn sources(&self, id: NodeId) -> Vec<NodeId> {
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
    pub(in crate::passes) fn name(&self, cluster: usize) -> String {
        let c = &self.list[cluster];
        let lead = c
            .anchor
            .or_else(|| c.members.iter().copied().find(|m| matches!(self.graph.node(*m).op, Op::Reduce(..))))
            .unwrap_or(*c.members.last().expect("kernels have members"));
        let extra = c.members.len() - 1;
        let updates = c.members.iter().any(|m| self.graph.origin(*m).phase == Phase::Update);
        let mut name = self.graph.name(lead);
        if extra > 0 {
            name += &format!(" +{extra}");
        }
        if updates && self.graph.origin(lead).phase != Phase::Update {
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
