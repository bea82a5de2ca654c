//! Fusion: which nodes run together in one kernel.
//!
//! Nodes are visited from the last to the first. A node joins the kernel of its consumers when all
//! of them are in one kernel and read it point by point. Therefore nothing is computed twice, no
//! value is stored that only one kernel needs, and the kernels stay acyclic, because every path out
//! of the node leads into that kernel. When a node's consumers are in several kernels over the same
//! space that do not depend on each other, these kernels are merged first (the loss and its
//! gradient over the rows of the logits).
//!
//! A kernel is one of: a loop over points; a loop with reductions, whose results may be used
//! together with the points again (*rows*); or an *anchor* (matrix product, convolution, pooling,
//! gather) with a loop after it, its epilogue.

mod anchor;
mod clusters;
mod edges;
mod inline;
mod limit;
mod merge;
mod options;
mod positions;
mod rows;
mod sums;

use std::sync::Arc;

use slabwise_kernels::spec::MAX_ARGUMENTS;
use smallvec::SmallVec;

use super::error::PassError;
use super::layout::{AxisMap, Containers, is_computed};
use super::pipeline::Pass;
use super::sequence::Sequence;
use super::stages::{Stage, stages};
use crate::graph::Graph;
use crate::ops::{NodeId, Op};
use clusters::Place;
pub use clusters::{Cluster, Clusters, ClustersError};
pub(super) use clusters::{Edge, Links};
pub(super) use edges::{Users, edges, users};
pub(super) use inline::wide;
use inline::{inline_nodes, recompute_per_use};
pub(crate) use limit::{FuseWithin, Limits};
use merge::Marks;
pub use options::Fuse;
use rows::ROW_MAX;
use sums::added_product;

impl Pass for Fuse {
    const NAME: &'static str = "fuse";
    type Input = Graph;
    type Output = Clusters;

    fn run(&self, graph: &Graph) -> Result<Clusters, PassError> {
        Ok(fuse(graph, self))
    }
}

/// Most nodes in a kernel, and most operands: limits on its registers and its argument list.
/// Beside the operands there are at most four arguments of an anchor.
const MEMBERS_MAX: usize = 96;
const OPERANDS_MAX: usize = MAX_ARGUMENTS - 8;

/// Divides a graph, which [`super::legalize`] has seen, into kernels.
pub fn fuse(graph: &Graph, options: &Fuse) -> Clusters {
    fuse_within(graph, options, &Limits::default())
}

/// The same, with the limit of [`FuseWithin`].
fn fuse_within(graph: &Graph, options: &Fuse, limits: &Limits) -> Clusters {
    let edges = edges(graph);
    let mut inline = inline_nodes(graph, &edges);
    let users = users(graph, &edges);
    if options.recompute {
        recompute_per_use(graph, &edges, &users, &mut inline, limits.per_use);
    }
    let count = graph.nodes.len();
    let mut is_output = vec![false; count];
    graph
        .outputs
        .iter()
        .for_each(|id| is_output[id.at()] = true);
    let mut builder = Builder {
        graph,
        options,
        limits,
        users,
        edges,
        inline,
        is_output,
        containers: Containers::of_all(graph),
        stages: stages(graph),
        list: Vec::new(),
        places: vec![None; count],
        order: Sequence::of(0..count as u32),
        seats: Vec::new(),
        marks: Marks::new(count),
    };
    for id in graph.ids().rev() {
        let op = &graph.node(id).op;
        if (is_computed(op) && !builder.inline[id.at()]) || op.is_check() {
            builder.visit(id);
        }
    }
    builder.pair_positions();
    builder.part_rows();
    builder.finish()
}

/// Kernels, each with the axes that a node has in it, if it can be there.
type Uses = SmallVec<[(usize, Option<AxisMap>); 4]>;

struct Builder<'a> {
    graph: &'a Graph,
    options: &'a Fuse,
    limits: &'a Limits,
    users: Vec<Users>,
    edges: Vec<SmallVec<[Edge; 3]>>,
    inline: Vec<bool>,
    is_output: Vec<bool>,
    containers: Containers,
    stages: Vec<Stage>,
    list: Vec<Cluster>,
    places: Vec<Option<Place>>,
    /// A topological order of the kernels, and of the nodes in none.
    order: Sequence,
    /// The member of each kernel whose place in the order it has.
    seats: Vec<u32>,
    marks: Marks,
}

impl Builder<'_> {
    fn visit(&mut self, id: NodeId) {
        // The results of a loop over steps are written by its kernel.
        match self.graph.node(id).op {
            Op::Scan(_) if self.places[id.at()].is_some() => return,
            Op::ScanResult(_) => {
                let scan = self.graph.node(id).inputs[0];
                if self.places[scan.at()].is_none() {
                    self.open(scan);
                }
                if let Some(cluster) = self.places[scan.at()].as_ref().map(|p| p.cluster) {
                    self.put(id, cluster, AxisMap::new(), None);
                }
                return;
            }
            _ => {}
        }
        if !self.is_partial_sum(id)
            && let Some((cluster, axes)) = self.joinable(id)
            && (!self.stays_with_product(id) || self.can_be_epilogue(cluster))
            && !self.stays_with_rows(id, cluster, &axes)
            && self.join(id, cluster, axes)
        {
            return;
        }
        self.open(id);
    }

    /// The kernel that the node may join, and its axes there: the one that has all its uses, made
    /// of several if need be; else the largest of those that no other use comes before, which then
    /// stores it for the others. `None` if there is none, or a use is in no kernel.
    fn joinable(&mut self, id: NodeId) -> Option<(usize, AxisMap)> {
        let mut uses = self.uses(id)?;
        if self.merge_all(&uses) {
            uses = self.uses(id)?;
        }
        if let [(only, axes)] = &uses[..] {
            return Some((*only, axes.clone()?));
        }
        if !self.options.stored {
            return None;
        }
        let bounds = self.graph.symbols.bounds();
        let points = |at: usize| {
            self.list[at]
                .space
                .iter()
                .fold(1i64, |n, d| n.saturating_mul(d.at(&bounds)))
        };
        // The largest comes first, of equal ones the last.
        let mut candidates: SmallVec<[(i64, usize); 4]> = (0..uses.len())
            .filter(|&k| uses[k].1.is_some())
            .map(|k| (points(uses[k].0), k))
            .collect();
        candidates.sort_unstable_by(|a, b| b.cmp(a));
        let first = candidates
            .into_iter()
            .map(|(_, k)| k)
            .find(|&k| self.before_all(uses[k].0, &uses))?;
        let (at, axes) = uses.swap_remove(first);
        let apart = self.is_recomputed(id) && !self.may_touch(&[at], Some(id));
        if apart {
            return None;
        }
        Some((at, axes?))
    }

    /// Whether no other use of a value comes before this one.
    fn before_all(&mut self, at: usize, uses: &Uses) -> bool {
        uses.iter()
            .all(|&(other, _)| other == at || !self.reaches(other, at))
    }

    /// The kernels that use a node, with the axes it has there; none where it is needed in memory.
    fn uses(&self, id: NodeId) -> Option<Uses> {
        let mut uses = Uses::new();
        for &(user, operand) in &self.users[id.at()] {
            let through = &self.edges[user.at()][operand].axes;
            let seen = |axes: &AxisMap| -> Option<AxisMap> {
                Some(
                    through
                        .as_ref()?
                        .iter()
                        .map(|a| a.and_then(|a| axes[usize::from(a)]))
                        .collect(),
                )
            };
            match &self.graph.node(user).op {
                Op::Assign(_) => {}
                _ if self.inline[user.at()] => {
                    uses.extend(
                        self.uses(user)?
                            .into_iter()
                            .map(|(cluster, axes)| (cluster, axes.as_ref().and_then(seen))),
                    );
                }
                op => {
                    let place = self.places[user.at()].as_ref()?;
                    let axes = match op {
                        Op::Reduce(..) => place.operand_axes.as_ref(),
                        op if op.is_pointwise() => Some(&place.axes),
                        _ => None,
                    };
                    uses.push((place.cluster, axes.and_then(seen)));
                }
            }
        }
        uses.sort_by_key(|(cluster, _)| *cluster);
        // A kernel that sees the node along different axes cannot have it.
        uses.dedup_by(|(c, axes), (cluster, known)| {
            let same = c == cluster;
            if same && known != axes {
                *known = None;
            }
            same
        });
        Some(uses)
    }

    /// Adds the node to a kernel if the kernel's form allows it.
    fn join(&mut self, id: NodeId, cluster: usize, axes: AxisMap) -> bool {
        let c = &self.list[cluster];
        if c.members.len() >= MEMBERS_MAX
            || !self.belong_together(&[id], &c.members)
            || self.shares_container(&[id], &c.members)
            || self.operands_with(cluster, id) > OPERANDS_MAX
        {
            return false;
        }
        let c = &self.list[cluster];
        match &self.graph.node(id).op {
            Op::Reduce(..) => self.join_reduction(id, cluster, axes),
            op if op.is_pointwise() || matches!(op, Op::Uniform { .. }) => {
                let full = covers(c, &axes, |_| true);
                let folded = c.reduced.contains(&true) && covers(c, &axes, |r| !r);
                let allowed = if c.anchor.is_some() {
                    self.options.epilogues
                } else {
                    self.options.elementwise
                };
                // Points beside reductions make a rows kernel when they use a reduced value; they
                // do not make one by being reduced.
                let ok = allowed
                    && (full || folded)
                    && (c.anchor.is_some()
                        || !c.reduced.contains(&true)
                        || self.options.reductions);
                let rows = !ok && !full && self.makes_rows(id, cluster, &axes);
                if rows {
                    let c = &mut self.list[cluster];
                    (0..c.space.len()).for_each(|s| {
                        c.reduced[s] = !c.space[s].is(1) && !axes.contains(&Some(s as u8))
                    });
                }
                if ok || rows {
                    self.put(id, cluster, axes, None);
                }
                ok || rows
            }
            _ => self.join_anchor(id, cluster, axes),
        }
    }

    fn join_reduction(&mut self, id: NodeId, cluster: usize, axes: AxisMap) -> bool {
        let c = &self.list[cluster];
        if c.anchor.is_some() || !self.options.reductions {
            return false;
        }
        let Op::Reduce(_, folded_axes) = &self.graph.node(id).op else {
            return false;
        };
        let operand_dims = &self.graph.node(self.graph.node(id).inputs[0]).dims;
        let folds: SmallVec<[usize; 6]> = (0..operand_dims.len())
            .filter(|i| folded_axes.contains(i) && !operand_dims[*i].is(1))
            .collect();
        let mut operand_axes = axes.clone();
        let has_reduction = c.reduced.contains(&true);
        if !has_reduction && covers(c, &axes, |_| true) {
            // Work after the reduction is computed once per kept point: the space gains the
            // reduced axes.
            let c = &mut self.list[cluster];
            for &i in &folds {
                operand_axes[i] = Some(c.space.len() as u8);
                c.space.push(operand_dims[i]);
                c.reduced.push(true);
            }
            self.put(id, cluster, axes, Some(operand_axes));
            return true;
        }
        // The kernel runs over the points that are reduced here: its axes that the result lacks are
        // the reduced ones.
        let missing: SmallVec<[usize; 6]> = (0..c.space.len())
            .filter(|&s| !c.space[s].is(1) && !axes.contains(&Some(s as u8)))
            .collect();
        let same = missing.len() == folds.len()
            && missing
                .iter()
                .zip(&folds)
                .all(|(&s, &i)| c.space[s] == operand_dims[i]);
        let agrees = !has_reduction
            || (0..c.space.len()).all(|s| c.reduced[s] == missing.contains(&s) || c.space[s].is(1));
        if !same || !agrees || !self.rows_allowed(id, cluster) {
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

    fn put(&mut self, id: NodeId, cluster: usize, axes: AxisMap, operand_axes: Option<AxisMap>) {
        self.join_in_order(id.0, cluster);
        self.list[cluster].members.push(id);
        self.places[id.at()] = Some(Place {
            cluster,
            axes,
            operand_axes,
        });
    }

    /// A kernel for the node alone, until others join.
    fn open(&mut self, id: NodeId) {
        let node = self.graph.node(id);
        let mut cluster = Cluster::default();
        let mut axes: AxisMap = SmallVec::new();
        let mut operand_axes = None;
        let is_loop =
            node.op.is_pointwise() || matches!(node.op, Op::Reduce(..) | Op::Uniform { .. });
        if is_loop {
            let folded = |i: usize| matches!(&node.op, Op::Reduce(_, folds) if folds.contains(&i));
            let over = if matches!(node.op, Op::Reduce(..)) {
                &self.graph.node(node.inputs[0]).dims
            } else {
                &node.dims
            };
            let mut all: AxisMap = SmallVec::new();
            for (i, &dim) in over.iter().enumerate() {
                all.push((!dim.is(1)).then_some(cluster.space.len() as u8));
                if !dim.is(1) {
                    cluster.space.push(dim);
                    cluster.reduced.push(folded(i));
                }
            }
            axes = (0..over.len())
                .map(|i| if folded(i) { None } else { all[i] })
                .collect();
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
        self.seats.push(id.0);
        self.put(id, self.list.len() - 1, axes, operand_axes);
    }

    fn finish(self) -> Clusters {
        let Builder {
            graph,
            users,
            edges,
            inline,
            is_output,
            mut list,
            places,
            order,
            ..
        } = self;
        list.iter_mut()
            .for_each(|cluster| cluster.members.sort_unstable());
        let mut stored = vec![false; graph.nodes.len()];
        // The kernels that read each value, or others that they compute from it for themselves.
        let mut readers = vec![Readers::None; graph.nodes.len()];
        for id in graph.ids().rev() {
            let read_by = |&(user, _): &(NodeId, usize)| match &places[user.at()] {
                Some(place) => Readers::One(place.cluster),
                None if inline[user.at()] => readers[user.at()],
                None => Readers::Several,
            };
            let plain = |u: &&(NodeId, usize)| !matches!(graph.node(u.0).op, Op::Assign(_));
            let all = users[id.at()].iter().filter(plain).map(read_by);
            readers[id.at()] = all.fold(Readers::None, Readers::and);
            stored[id.at()] = places[id.at()].as_ref().is_some_and(|place| {
                let own = Readers::One(place.cluster);
                is_output[id.at()] || readers[id.at()].and(own) != own
            });
        }
        Clusters {
            graph: Arc::new(graph.clone()),
            list,
            places,
            edges,
            inline,
            stored,
            searched: order.steps,
        }
        .in_order()
    }
}

/// The kernels that read a value.
#[derive(Clone, Copy, PartialEq)]
enum Readers {
    None,
    One(usize),
    Several,
}

impl Readers {
    fn and(self, other: Readers) -> Readers {
        match (self, other) {
            (readers, Readers::None) | (Readers::None, readers) => readers,
            (one, other) if one == other => one,
            _ => Readers::Several,
        }
    }
}

/// Whether every axis of the space that is longer than 1 and satisfies `which` (of being reduced)
/// is among `axes`, and none else.
fn covers(c: &Cluster, axes: &AxisMap, which: impl Fn(bool) -> bool) -> bool {
    (0..c.space.len()).all(|s| {
        let named = axes.iter().filter(|a| **a == Some(s as u8)).count();
        let wanted = usize::from(which(c.reduced[s]) && !c.space[s].is(1));
        named == wanted || (c.space[s].is(1) && named <= 1)
    })
}
