//! The result of fusion: which nodes each kernel computes.

use std::collections::BinaryHeap;
use std::fmt;
use std::sync::Arc;

use slabwise_kernels::size::{Size, Symbol};
use slabwise_kernels::spec::Dims;
use smallvec::SmallVec;

use crate::graph::{Graph, Phase};
use crate::ops::{NodeId, Op};
use crate::passes::layout::AxisMap;
use crate::passes::stages::{stages, symbols};

/// One kernel: the nodes it computes.
#[derive(Clone, Debug, Default)]
pub struct Cluster {
    /// The points it runs over.
    pub space: Dims,
    /// Which axes of `space` are reduced.
    pub reduced: SmallVec<[bool; 6]>,
    /// The operation that is not pointwise, if there is one.
    pub anchor: Option<NodeId>,
    /// The positions that a max pooling stores beside its values.
    pub positions: Option<NodeId>,
    /// The nodes that it computes, in topological order; the anchor too.
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
    /// For each axis of the source, the axis of the operand along it; `None` if views do more than
    /// rename and repeat.
    pub axes: Option<AxisMap>,
}

/// A graph divided into kernels.
#[derive(Clone, Debug)]
pub struct Clusters {
    /// The graph.
    pub graph: Arc<Graph>,
    /// The kernels; empty ones were merged away.
    pub list: Vec<Cluster>,
    pub(in crate::passes) places: Vec<Option<Place>>,
    pub(in crate::passes) edges: Vec<SmallVec<[Edge; 3]>>,
    /// Cheap values without tensor operands (numbers, indices, random bits) that every kernel
    /// computes for itself.
    pub(in crate::passes) inline: Vec<bool>,
    /// Which values are written to memory.
    pub(in crate::passes) stored: Vec<bool>,
    /// Edges that were visited to keep kernels free of cycles.
    pub searched: u64,
}

/// Which kernels take values of which. Behind the kernels come the concatenations and paddings, as
/// vertices of their own: a program may have many readers of many parts.
pub(in crate::passes) struct Links {
    /// For each vertex those that take its values, each once.
    pub next: Vec<Vec<u32>>,
    /// For each vertex those whose values it takes, each once.
    pub before: Vec<Vec<u32>>,
}

/// The first broken invariant of [`Clusters`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ClustersError {
    /// A node is in several kernels, or its place says otherwise.
    #[error("{node} is in {count} kernels")]
    Count {
        /// The node.
        node: String,
        /// The number of kernels that it is in.
        count: usize,
    },
    /// A kernel depends on its own result.
    #[error("kernel {kernel} needs its own result")]
    Cycle {
        /// The kernel.
        kernel: usize,
    },
}

impl Clusters {
    /// Checks that every computed node that is used has one kernel, and that the kernels are free
    /// of cycles.
    ///
    /// # Errors
    /// The first broken invariant.
    pub fn verify(&self) -> Result<(), ClustersError> {
        let mut count = vec![0; self.graph.nodes.len()];
        self.list
            .iter()
            .flat_map(|cluster| &cluster.members)
            .for_each(|m| count[m.at()] += 1);
        if let Some(id) = self.graph.ids().find(|id| {
            count[id.at()] > 1 || (count[id.at()] == 1) != self.places[id.at()].is_some()
        }) {
            return Err(ClustersError::Count {
                node: self.graph.name(id),
                count: count[id.at()],
            });
        }
        let Links { next, before } = self.links();
        let mut waits: Vec<usize> = before.iter().map(Vec::len).collect();
        let mut ready: Vec<u32> = (0..next.len() as u32)
            .filter(|&at| waits[at as usize] == 0)
            .collect();
        let mut done = 0;
        while let Some(at) = ready.pop() {
            done += 1;
            for &user in &next[at as usize] {
                waits[user as usize] -= 1;
                ready.extend((waits[user as usize] == 0).then_some(user));
            }
        }
        match waits
            .iter()
            .position(|&waits| waits > 0)
            .filter(|_| done < next.len())
        {
            Some(kernel) => Err(ClustersError::Cycle { kernel }),
            None => Ok(()),
        }
    }

    /// Which kernels take values of which.
    pub(in crate::passes) fn links(&self) -> Links {
        let is_container =
            |id: NodeId| matches!(self.graph.node(id).op, Op::Concat { .. } | Op::Pad { .. });
        let mut number = vec![u32::MAX; self.graph.nodes.len()];
        let mut count = self.list.len() as u32;
        for id in self.graph.ids().filter(|id| is_container(*id)) {
            number[id.at()] = count;
            count += 1;
        }
        let mut links = Links {
            next: vec![Vec::new(); count as usize],
            before: vec![Vec::new(); count as usize],
        };
        let vertex = |source: NodeId| match &self.places[source.at()] {
            Some(place) => Some(place.cluster as u32),
            None => Some(number[source.at()]).filter(|&number| number != u32::MAX),
        };
        let mut take = |user: u32, id: NodeId| {
            let before = &mut links.before[user as usize];
            self.each_source(id, |source| {
                before.extend(vertex(source).filter(|&v| v != user))
            });
        };
        for (at, cluster) in self.list.iter().enumerate() {
            cluster.members.iter().for_each(|&m| take(at as u32, m));
        }
        self.graph
            .ids()
            .filter(|id| is_container(*id))
            .for_each(|id| take(number[id.at()], id));
        for (user, before) in links.before.iter_mut().enumerate() {
            before.sort_unstable();
            before.dedup();
            before
                .iter()
                .for_each(|&b| links.next[b as usize].push(user as u32));
        }
        links
    }

    /// The same, every kernel after those it needs; as far as that leaves a choice, the kernel
    /// listed last comes first, and recomputation comes when nothing else can be done. Empty
    /// kernels go.
    pub(super) fn in_order(mut self) -> Self {
        let count = self.list.len();
        let Links {
            mut next,
            mut before,
        } = self.links();
        for (finder, user) in self.finders() {
            if !before[user].contains(&(finder as u32)) {
                before[user].push(finder as u32);
                next[finder].push(user as u32);
            }
        }
        let mut waits: Vec<usize> = before.iter().map(Vec::len).collect();
        let phase = |m: &NodeId| self.graph.origin(*m).phase;
        let in_time: Vec<bool> = self
            .list
            .iter()
            .map(|c| c.members.iter().any(|m| phase(m) != Phase::Recompute))
            .collect();
        let mut ready: BinaryHeap<(bool, usize)> = (0..count)
            .filter(|&at| waits[at] == 0)
            .map(|at| (in_time[at], at))
            .collect();
        // A concatenation of values that no kernel computes has no dependencies.
        let mut whole: Vec<usize> = (count..next.len()).filter(|&at| waits[at] == 0).collect();
        let (mut renamed, mut kept) = (vec![usize::MAX; count], Vec::with_capacity(count));
        while let Some(at) = whole.pop().or_else(|| ready.pop().map(|(_, at)| at)) {
            if at < count && !self.list[at].members.is_empty() {
                renamed[at] = kept.len();
                kept.push(std::mem::take(&mut self.list[at]));
            }
            for user in next[at].iter().map(|&user| user as usize) {
                waits[user] -= 1;
                if waits[user] == 0 && user < count {
                    ready.push((in_time[user], user));
                } else if waits[user] == 0 {
                    whole.push(user);
                }
            }
        }
        debug_assert!(
            waits.iter().all(|&w| w == 0),
            "kernels need each other's results"
        );
        self.list = kept;
        self.places
            .iter_mut()
            .flatten()
            .for_each(|place| place.cluster = renamed[place.cluster]);
        self
    }

    /// Kernels that compute a length, each with those that depend on it.
    fn finders(&self) -> Vec<(usize, usize)> {
        let mut finders: Vec<(Symbol, usize)> = Vec::new();
        for (at, cluster) in self.list.iter().enumerate() {
            let found = |m: &NodeId| {
                if let Op::Bind { symbol } = self.graph.node(*m).op {
                    Some((symbol, at))
                } else {
                    None
                }
            };
            finders.extend(cluster.members.iter().filter_map(found));
        }
        if finders.is_empty() {
            return Vec::new();
        }
        let stages = stages(&self.graph);
        let mut pairs = Vec::new();
        for (at, cluster) in self.list.iter().enumerate() {
            let stage = cluster.members.first().map_or(0, |m| stages[m.at()]);
            let of = |s: Symbol| finders.iter().find(|f| f.0 == s).map(|f| (f.1, at));
            pairs.extend(
                symbols(stage)
                    .filter_map(of)
                    .filter(|(finder, at)| finder != at),
            );
        }
        pairs
    }

    /// Calls `visit` with the computed nodes, leaves, concatenations and paddings that a node
    /// takes, through inlined values.
    pub(in crate::passes) fn each_source(&self, id: NodeId, mut visit: impl FnMut(NodeId)) {
        let mut stack: SmallVec<[NodeId; 8]> =
            self.edges[id.at()].iter().map(|e| e.source).collect();
        while let Some(source) = stack.pop() {
            if self.inline[source.at()] {
                stack.extend(self.edges[source.at()].iter().map(|e| e.source));
            } else {
                visit(source);
            }
        }
    }

    /// A name for a kernel: its anchor's, or its last member's, and how many further nodes it does.
    pub(in crate::passes) fn name(&self, cluster: usize) -> String {
        let c = &self.list[cluster];
        let lead = c
            .anchor
            .or_else(|| {
                c.members
                    .iter()
                    .copied()
                    .find(|m| matches!(self.graph.node(*m).op, Op::Reduce(..)))
            })
            .unwrap_or(*c.members.last().expect("kernels have members"));
        let extra = c.members.len() - 1;
        let updates = c
            .members
            .iter()
            .any(|m| self.graph.origin(*m).phase == Phase::Update);
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
            let axis = |(d, r): (&Size, &bool)| {
                format!(
                    "{}{}",
                    d.show(|s| self.graph.symbols.name(s)),
                    if *r { "↓" } else { "" }
                )
            };
            let space: Vec<String> = c.space.iter().zip(&c.reduced).map(axis).collect();
            let members: Vec<String> = c
                .members
                .iter()
                .map(|m| {
                    format!(
                        "%{} {}{}",
                        m.0,
                        self.graph.node(*m).op.name(),
                        if self.stored[m.at()] { "*" } else { "" }
                    )
                })
                .collect();
            writeln!(
                f,
                "kernel {at} [{}] {}: {}",
                space.join(", "),
                self.name(at),
                members.join(", ")
            )?;
        }
        Ok(())
    }
}
