//! Rows: reductions in one kernel with the work over the points that they reduce.

use smallvec::SmallVec;

use super::super::layout::AxisMap;
use super::clusters::Cluster;
use super::{Builder, covers};
use crate::graph::Phase;
use crate::ops::{NodeId, Op};

/// The longest row, in elements, that a rows kernel keeps on chip; longer ones are read again by a
/// second kernel.
pub(super) const ROW_MAX: i64 = 1 << 16;

/// Most nodes that are searched for the rows that one stays with.
const SEARCHED_MAX: usize = 48;

impl Builder<'_> {
    /// Whether a node that is uniform along trailing axes of a kernel over points comes, pointwise,
    /// from a reduction along them that could join that kernel: the mean after a sum. If the
    /// reduction stays out in the end, [`Builder::part_rows`] undoes it.
    pub(super) fn makes_rows(&mut self, id: NodeId, cluster: usize, axes: &AxisMap) -> bool {
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
        folds.iter().map(|&i| over[i]).eq(folded.iter().copied()) && self.rows_allowed(at, cluster)
    }

    /// Whether a reduction may join work over the points it reduces: always if none of that work
    /// needs it; else rows must be short and contiguous in the way the tensor is written, for they
    /// are passed over again.
    pub(super) fn rows_allowed(&mut self, id: NodeId, cluster: usize) -> bool {
        if !self.points_follow(id, cluster) {
            return true;
        }
        self.options.rows && self.reduces_short_rows(id)
    }

    /// Whether a node of the backward pass is to be computed in the kernel of rows that it depends on,
    /// though a kernel that reduces it along other axes could: it combines a reduction of the forward
    /// pass along rows with values that are reduced there, and nothing else of the backward pass, as
    /// the gradient of a softmax's logits does. The kernel of the rows would otherwise store these
    /// values for the other one, beside the node itself.
    pub(super) fn stays_with_rows(&self, id: NodeId, cluster: usize, axes: &AxisMap) -> bool {
        let c = &self.list[cluster];
        let along = axes
            .iter()
            .flatten()
            .map(|&axis| c.reduced[usize::from(axis)]);
        if c.anchor.is_some()
            || along.is_sorted()
            || !self.options.rows
            || !self.options.reductions
            || self.graph.origin(id).phase != Phase::Backward
        {
            return false;
        }
        let Some((values, reductions)) = self.computed_from(id) else {
            return false;
        };
        reductions.iter().any(|&reduction| {
            let reduced = self.edges[reduction.at()][0].source;
            let below = self.computed_from(reduced).map_or(vec![], |below| below.0);
            let own = |value: &NodeId| *value == reduced || below.contains(value);
            self.reduces_short_rows(reduction) && values.iter().any(own)
        })
    }

    /// The values of the forward pass that are stored, of a node's shape, and the reductions there that
    /// elementwise work computes the node from; `None` if it takes more of the backward pass, or more
    /// nodes than are searched.
    fn computed_from(&self, id: NodeId) -> Option<(Vec<NodeId>, Vec<NodeId>)> {
        let (mut open, mut seen) = (vec![id], vec![id]);
        let (mut values, mut reductions) = (Vec::new(), Vec::new());
        while let Some(at) = open.pop() {
            for edge in &self.edges[at.at()] {
                let (source, node) = (edge.source, self.graph.node(edge.source));
                let is_forward = self.graph.origin(source).phase == Phase::Forward;
                if node.op.is_pointwise() && !seen.contains(&source) {
                    let stored = node.dims == self.graph.node(id).dims && is_forward;
                    values.extend((stored && !self.inline[source.at()]).then_some(source));
                    seen.push(source);
                    open.push(source);
                } else if is_forward && matches!(node.op, Op::Reduce(..)) {
                    reductions.push(source);
                } else if !(node.op.is_pointwise() || is_forward || self.inline[source.at()]) {
                    return None;
                }
            }
            if seen.len() > SEARCHED_MAX {
                return None;
            }
        }
        Some((values, reductions))
    }

    /// Whether a reduction is along the last axes of its operand, and of few elements.
    fn reduces_short_rows(&self, reduction: NodeId) -> bool {
        let node = self.graph.node(reduction);
        let Op::Reduce(_, folds) = &node.op else {
            return false;
        };
        let dims = &self.graph.node(node.inputs[0]).dims;
        let long = |i: &usize| !dims[*i].is(1);
        let trailing = (0..dims.len()).filter(long).map(|i| folds.contains(&i));
        let bounds = self.graph.symbols.bounds();
        let row = folds
            .iter()
            .fold(1i64, |n, &i| n.saturating_mul(dims[i].at(&bounds)));
        trailing.is_sorted() && row <= ROW_MAX
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

    /// Gives work that is uniform along the rows of a kernel a kernel of its own, where no
    /// reduction came into the kernel that was to become rows.
    pub(super) fn part_rows(&mut self) {
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
}
