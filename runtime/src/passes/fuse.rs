//! Fusion: which nodes run together in one kernel.
//!
//! Nodes are visited from the last to the first. A node joins the kernel of its consumers when all
//! of them are in one kernel and see it point by point; so nothing is computed twice, nothing is
//! kept that only one kernel needs, and the kernels stay free of cycles: every path out of the
//! node leads into that kernel. When a node's consumers are in several kernels over the same space
//! that do not depend on each other, these become one first (the loss and its gradient over the
//! rows of the logits).
//!
//! A kernel is one of: a loop over points; a loop with reductions, whose results may be used beside
//! the points again (*rows*); or an *anchor* (matrix product, convolution, pooling, gather) with a
//! loop behind it, its epilogue.

mod clusters;
mod inline;
mod limit;
mod merge;

use std::sync::Arc;

use rustc_hash::FxHashMap;
use slabwise_kernels::scalar::ScalarOp;
use slabwise_kernels::spec::{MAX_ARGUMENTS, PoolKind};
use smallvec::SmallVec;

use super::error::PassError;
use super::layout::{AxisMap, Containers, Views, is_computed};
use super::pipeline::Pass;
use super::sequence::Sequence;
use super::stages::{Stage, stages};
use crate::graph::{Graph, Node};
use crate::ops::{NodeId, Op};
use clusters::Place;
pub use clusters::{Cluster, Clusters, ClustersError};
pub(super) use clusters::{Edge, Links};
pub(super) use inline::wide;
use inline::{inline_nodes, recomputed};
pub(crate) use limit::{FuseWithin, Limits};
use merge::Marks;

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
    /// A value that several kernels use is computed and stored by the first of them, rather than by
    /// a kernel before.
    pub stored: bool,
    /// Values that are cheap to compute from tensors in memory are recomputed where they are used:
    /// by each of several kernels, and in the backward pass rather than kept live for it (see
    /// [`fn@super::remake`]).
    pub recompute: bool,
}

impl Default for Fuse {
    fn default() -> Self {
        Fuse {
            elementwise: true,
            reductions: true,
            rows: true,
            epilogues: true,
            siblings: true,
            stored: true,
            recompute: true,
        }
    }
}

impl Fuse {
    /// Every node in a kernel of its own.
    pub fn none() -> Self {
        Fuse {
            elementwise: false,
            reductions: false,
            rows: false,
            epilogues: false,
            siblings: false,
            stored: false,
            recompute: false,
        }
    }
}

impl Pass for Fuse {
    const NAME: &'static str = "fuse";
    type Input = Graph;
    type Output = Clusters;

    fn run(&self, graph: &Graph) -> Result<Clusters, PassError> {
        Ok(fuse(graph, self))
    }
}

/// The longest row, in elements, that a rows kernel keeps at hand; longer ones are read again by a
/// second kernel.
const ROW_MAX: i64 = 1 << 16;
/// Most nodes in a kernel, and most operands: limits on its registers and its argument list.
/// Beside the operands there are at most four arguments of an anchor.
const MEMBERS_MAX: usize = 96;
const OPERANDS_MAX: usize = MAX_ARGUMENTS - 8;

/// Divides a graph, which [`super::legalise`] has seen, into kernels.
pub fn fuse(graph: &Graph, options: &Fuse) -> Clusters {
    fuse_within(graph, options, &Limits::default())
}

/// The same, with the limit of [`FuseWithin`].
fn fuse_within(graph: &Graph, options: &Fuse, limits: &Limits) -> Clusters {
    let edges = edges(graph);
    let mut inline = inline_nodes(graph, &edges);
    let users = users(graph, &edges);
    if options.recompute {
        recomputed(graph, &edges, &users, &mut inline, limits.per_use);
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

/// The operands of each node, views skipped; views have none.
pub(super) fn edges(graph: &Graph) -> Vec<SmallVec<[Edge; 3]>> {
    let views = Views::of(graph);
    let seen = |&i: &NodeId| {
        let (source, axes) = views.axes(graph, i);
        Edge { source, axes }
    };
    let of = |node: &Node| {
        if node.op.is_view() {
            SmallVec::new()
        } else {
            node.inputs.iter().map(seen).collect()
        }
    };
    graph.nodes.iter().map(of).collect()
}

/// Nodes that take a node's value, each with the position among its operands.
pub(super) type Users = SmallVec<[(NodeId, usize); 4]>;

/// Operand positions that take each node's value, views skipped.
pub(super) fn users(graph: &Graph, edges: &[SmallVec<[Edge; 3]>]) -> Vec<Users> {
    let mut users = vec![SmallVec::new(); graph.nodes.len()];
    for id in graph.ids() {
        for (k, edge) in edges[id.at()].iter().enumerate() {
            users[edge.source.at()].push((id, k));
        }
    }
    users
}

/// The product that a node adds to another tensor, if no other node reads that product. The
/// product's kernel can do so as its epilogue, often in the place of the other term, so that one
/// tensor is in memory where two would be: so gradients of branches are summed up.
fn added_product(
    graph: &Graph,
    edges: &[SmallVec<[Edge; 3]>],
    users: &[Users],
    sum: NodeId,
) -> Option<NodeId> {
    let wide = |edge: &&Edge| wide(graph, graph.node(sum), edge);
    let own = |edge: &&Edge| {
        let product = matches!(
            graph.node(edge.source).op,
            Op::Matmul | Op::Conv2dInputGrad(_) | Op::Conv2dWeightGrad(_)
        );
        let in_order = edge
            .axes
            .as_ref()
            .is_some_and(|axes| axes.iter().flatten().is_sorted());
        product && in_order && users[edge.source.at()].len() == 1
    };
    let all = graph.node(sum).op == Op::Scalar(ScalarOp::Add)
        && edges[sum.at()].iter().all(|edge| wide(&edge));
    edges[sum.at()]
        .iter()
        .filter(|_| all)
        .find(own)
        .map(|edge| edge.source)
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
        if !self.is_partial_sum(id)
            && let Some((cluster, axes)) = self.joinable(id)
            && (!self.adds_product(id) || self.can_be_epilogue(cluster))
            && self.join(id, cluster, axes)
        {
            return;
        }
        self.open(id);
    }

    /// Whether a sum gets one more product, and then the next sum another: then each product is
    /// added to the sum so far by its own kernel, so that one sum is in memory rather than all
    /// products at once.
    fn is_partial_sum(&self, id: NodeId) -> bool {
        let [(user, _)] = self.users[id.at()][..] else {
            return false;
        };
        self.adds_product(id) && self.adds_product(user)
    }

    fn adds_product(&self, sum: NodeId) -> bool {
        self.options.epilogues && added_product(self.graph, &self.edges, &self.users, sum).is_some()
    }

    /// Whether a kernel can become the epilogue of another product.
    fn can_be_epilogue(&self, cluster: usize) -> bool {
        let c = &self.list[cluster];
        c.anchor.is_none() && !c.reduced.contains(&true)
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
                // Points beside reductions make a rows kernel when they use a reduced value; they do
                // not make one by being reduced.
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
            // Work behind the reduction is computed once per kept point: the space gains the
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

    /// Whether a node that is uniform along trailing axes of a kernel over points comes, pointwise,
    /// from a reduction along them that could join that kernel: the mean behind a sum. If the
    /// reduction stays out in the end, [`Builder::part_rows`] undoes it.
    fn makes_rows(&mut self, id: NodeId, cluster: usize, axes: &AxisMap) -> bool {
        let c = &self.list[cluster];
        let kept: SmallVec<[usize; 6]> = axes.iter().flatten().map(|a| usize::from(*a)).collect();
        let leading = kept.iter().copied().eq(0..kept.len());
        if c.anchor.is_some()
            || c.reduced.contains(&true)
            || !self.options.reductions
            || kept.is_empty()
            || !leading
        {
            return false;
        }
        let folded = &c.space[kept.len()..];
        let mut at = id;
        // A chain of nodes of one shape: the reduction, and work on it with numbers and
        // parameters.
        while self.graph.node(at).op.is_pointwise() {
            let above = self.edges[at.at()].iter().map(|e| e.source).find(|s| {
                let node = self.graph.node(*s);
                (node.op.is_pointwise() || matches!(node.op, Op::Reduce(..)))
                    && !self.inline[s.at()]
                    && node.dims == self.graph.node(id).dims
            });
            let Some(above) = above else { return false };
            at = above;
        }
        let Op::Reduce(_, folds) = &self.graph.node(at).op else {
            return false;
        };
        let over = &self.graph.node(self.graph.node(at).inputs[0]).dims;
        let folds: SmallVec<[usize; 6]> = (0..over.len())
            .filter(|i| folds.contains(i) && !over[*i].is(1))
            .collect();
        folds.iter().map(|&i| over[i]).eq(folded.iter().copied())
            && self.rows_allowed(at, cluster, &folds)
    }

    /// Whether a reduction may join work over the points it reduces: always if none of that work
    /// needs it; else rows must be short and contiguous in the way the tensor is written, for they
    /// are passed over again.
    fn rows_allowed(&mut self, id: NodeId, cluster: usize, folds: &[usize]) -> bool {
        if !self.points_follow(id, cluster) {
            return true;
        }
        let dims = &self.graph.node(self.graph.node(id).inputs[0]).dims;
        let trailing = folds
            .first()
            .is_none_or(|&first| (first..dims.len()).all(|i| folds.contains(&i) || dims[i].is(1)));
        let bounds = self.graph.symbols.bounds();
        let row = folds
            .iter()
            .fold(1i64, |n, &i| n.saturating_mul(dims[i].at(&bounds)));
        self.options.rows && trailing && row <= ROW_MAX
    }

    /// Whether work over the points of a kernel depends on a node.
    fn points_follow(&mut self, id: NodeId, cluster: usize) -> bool {
        let mut stack: Vec<NodeId> = vec![id];
        self.marks.clear();
        self.marks.set(id, false);
        while let Some(at) = stack.pop() {
            for &(user, _) in &self.users[at.at()] {
                let inside = self.places[user.at()]
                    .as_ref()
                    .filter(|p| p.cluster == cluster);
                let folds = matches!(self.graph.node(user).op, Op::Reduce(..));
                if inside.is_some_and(|place| {
                    !folds && covers(&self.list[cluster], &place.axes, |_| true)
                }) {
                    return true;
                }
                if (inside.is_some() || self.inline[user.at()]) && self.marks.set(user, false) {
                    stack.push(user);
                }
            }
        }
        false
    }

    fn join_anchor(&mut self, id: NodeId, cluster: usize, axes: AxisMap) -> bool {
        let node = self.graph.node(id);
        let c = &self.list[cluster];
        let bodied = has_body(&node.op);
        let mapped: SmallVec<[u8; 6]> = axes.iter().flatten().copied().collect();
        let in_order = mapped.windows(2).all(|w| w[0] < w[1]);
        if !bodied
            || !self.options.epilogues
            || !self.can_be_epilogue(cluster)
            || !in_order
            || !covers(c, &axes, |_| true)
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
            // A reduction over axes of length 1 has operand axes, although nothing is reduced.
            let operand_axes = place.operand_axes.iter_mut().flatten();
            for axis in place.axes.iter_mut().chain(operand_axes) {
                *axis = axis.and_then(|a| renamed[usize::from(a)]);
            }
        }
        let axes = (0..node.dims.len())
            .map(|i| (!node.dims[i].is(1)).then_some(i as u8))
            .collect();
        self.put(id, cluster, axes, None);
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

    /// A max pooling and the positions of its maxima read the same windows: one kernel writes both.
    fn pair_positions(&mut self) {
        let mut largest: FxHashMap<NodeId, Vec<NodeId>> = FxHashMap::default();
        for id in self.graph.ids().filter(|id| self.places[id.at()].is_some()) {
            if let Op::Pool2d(PoolKind::Max, _) = self.graph.node(id).op {
                largest
                    .entry(self.graph.node(id).inputs[0])
                    .or_default()
                    .push(id);
            }
        }
        for id in self.graph.ids() {
            let Op::Pool2d(PoolKind::ArgMax, window) = self.graph.node(id).op else {
                continue;
            };
            let Some(place) = self.places[id.at()].clone() else {
                continue;
            };
            // Positions are written by the pooling itself, into a buffer.
            if self.users[id.at()]
                .iter()
                .any(|(user, _)| matches!(self.graph.node(*user).op, Op::Assign(_)))
            {
                continue;
            }
            let of_same = largest
                .get(&self.graph.node(id).inputs[0])
                .into_iter()
                .flatten()
                .copied();
            let twin = of_same
                .into_iter()
                .find(|t| self.graph.node(*t).op == Op::Pool2d(PoolKind::Max, window));
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
            self.places[id.at()] = Some(Place {
                cluster: into,
                ..place
            });
        }
    }

    /// Gives work that is uniform along the rows of a kernel a kernel of its own, where no
    /// reduction came into the kernel that was to become rows.
    fn part_rows(&mut self) {
        for at in 0..self.list.len() {
            let c = &mut self.list[at];
            let folds = |m: &NodeId| matches!(self.graph.node(*m).op, Op::Reduce(..));
            if c.anchor.is_some() || !c.reduced.contains(&true) || c.members.iter().any(folds) {
                continue;
            }
            let kept: SmallVec<[usize; 6]> =
                (0..c.space.len()).filter(|&s| !c.reduced[s]).collect();
            c.reduced.fill(false);
            let covering = |m: &NodeId| {
                covers(
                    c,
                    &self.places[m.at()]
                        .as_ref()
                        .expect("members are placed")
                        .axes,
                    |_| true,
                )
            };
            let (full, flat): (Vec<NodeId>, Vec<NodeId>) =
                c.members.iter().partition(|m| covering(m));
            let space = kept.iter().map(|&s| c.space[s]).collect();
            c.members = full;
            let apart = Cluster {
                space,
                reduced: SmallVec::from_elem(false, kept.len()),
                members: flat.clone(),
                ..Cluster::default()
            };
            self.list.push(apart);
            for m in flat {
                // The kept axes lead, so that they keep their numbers.
                self.places[m.at()]
                    .as_mut()
                    .expect("members are placed")
                    .cluster = self.list.len() - 1;
            }
        }
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
        for id in graph.ids() {
            let Some(place) = &places[id.at()] else {
                continue;
            };
            let elsewhere = |&(user, _): &(NodeId, usize)| {
                places[user.at()]
                    .as_ref()
                    .is_none_or(|p| p.cluster != place.cluster)
            };
            let plain = |u: &(NodeId, usize)| !matches!(graph.node(u.0).op, Op::Assign(_));
            stored[id.at()] =
                is_output[id.at()] || users[id.at()].iter().filter(|u| plain(u)).any(elsewhere);
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

/// Operations with a kernel of their own that may have an epilogue.
fn has_body(op: &Op) -> bool {
    matches!(
        op,
        Op::Matmul
            | Op::Conv2d(_)
            | Op::Conv2dInputGrad(_)
            | Op::Conv2dWeightGrad(_)
            | Op::Pool2d(PoolKind::Max | PoolKind::Avg { .. }, _)
            | Op::Pool2dGrad(..)
            | Op::Gather { .. }
            | Op::ScatterAdd { .. }
    )
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
