//! Which kernels may become one, and how they do.

use std::collections::HashSet;

use smallvec::SmallVec;

use super::{Builder, Cluster, MEMBERS_MAX, OPERANDS_MAX, ROW_MAX};
use crate::graph::Phase;
use crate::ops::{NodeId, Op};
use crate::passes::layout::AxisMap;

impl Builder<'_> {
    /// Makes the kernels that use one value into fewer, where that is possible; whether any were. A single number is no reason to:
    /// the updates of all weights use the rate, but each belongs to its gradient.
    pub(super) fn merge_all(&mut self, uses: &[(usize, Option<AxisMap>)]) -> bool {
        let mut merged = false;
        for (i, (a, axes)) in uses.iter().enumerate() {
            for (b, other) in &uses[i + 1..] {
                let alive = |at: usize| !self.list[at].members.is_empty();
                let ranges = axes.as_ref().is_some_and(|axes| axes.iter().any(Option::is_some));
                if ranges && other.is_some() && alive(*a) && alive(*b) {
                    merged |= (axes == other && self.merge_siblings(*a, *b)) || self.merge_tail(*a, *b) || self.merge_tail(*b, *a);
                }
            }
        }
        merged
    }

    /// Makes two loops over one space into one, if neither needs the other's results.
    pub(super) fn merge_siblings(&mut self, a: usize, b: usize) -> bool {
        let (x, y) = (&self.list[a], &self.list[b]);
        let loops = x.anchor.is_none() && y.anchor.is_none();
        let alike = x.space == y.space && (x.reduced == y.reduced || self.one_is_rows(a, b));
        if !(self.options.siblings && loops && alike && self.may_merge(a, b)) {
            return false;
        }
        self.absorb(a, b);
        true
    }

    /// Makes a loop over what another kernel's reductions keep a part of that kernel, if neither needs the other's results.
    pub(super) fn merge_tail(&mut self, rows: usize, tail: usize) -> bool {
        let (x, y) = (&self.list[rows], &self.list[tail]);
        let kept: SmallVec<[u8; 6]> = (0..x.space.len()).filter(|&s| !x.reduced[s] && !x.space[s].is(1)).map(|s| s as u8).collect();
        let own: SmallVec<[usize; 6]> = (0..y.space.len()).filter(|&s| !y.space[s].is(1)).collect();
        let loops = x.anchor.is_none() && y.anchor.is_none() && x.reduced.contains(&true) && !y.reduced.contains(&true);
        let same = kept.iter().map(|&s| x.space[usize::from(s)]).eq(own.iter().map(|&s| y.space[s]));
        if !(self.options.siblings && self.options.reductions && loops && same && self.may_merge(rows, tail)) {
            return false;
        }
        let mut renamed: SmallVec<[Option<u8>; 6]> = SmallVec::from_elem(None, y.space.len());
        own.iter().zip(&kept).for_each(|(&s, &to)| renamed[s] = Some(to));
        for m in y.members.clone() {
            for axis in &mut self.places[m.at()].as_mut().expect("members are placed").axes {
                *axis = axis.and_then(|a| renamed[usize::from(a)]);
            }
        }
        self.list[tail].reduced = SmallVec::new();
        self.absorb(rows, tail);
        true
    }

    /// Whether two kernels may become one: it is not too large, neither needs the other's results, and both belong to one time.
    pub(super) fn may_merge(&self, a: usize, b: usize) -> bool {
        let (x, y) = (&self.list[a], &self.list[b]);
        let small = x.members.len() + y.members.len() <= MEMBERS_MAX && self.operands(a).union(&self.operands(b)).count() <= OPERANDS_MAX;
        // What is made again must not be made early, for then it would be kept.
        let phase = |m: &NodeId| self.graph.origin(*m).phase;
        let early = |a: &Cluster, b: &Cluster| {
            a.members.iter().any(|m| phase(m) == Phase::Again) && b.members.iter().all(|m| phase(m) == Phase::Forward)
        };
        let in_time = !early(x, y) && !early(y, x);
        let alike = self.belong_together(&x.members, &y.members) && in_time;
        small && alike && !self.shares_container(&x.members, &y.members) && !self.reaches(a, b) && !self.reaches(b, a)
    }

    /// Moves all members of `b` into `a`.
    pub(super) fn absorb(&mut self, a: usize, b: usize) {
        let moved = std::mem::take(&mut self.list[b]);
        let into = &mut self.list[a];
        for (r, m) in into.reduced.iter_mut().zip(&moved.reduced) {
            *r |= m;
        }
        into.members.extend(&moved.members);
        for m in moved.members {
            self.places[m.at()].as_mut().expect("members are placed").cluster = a;
        }
    }

    /// Whether two kernels belong to one part of the batch and to one stage, as the members of each do.
    pub(super) fn belong_together(&self, a: &[NodeId], b: &[NodeId]) -> bool {
        let of = |members: &[NodeId]| members.first().map(|m| (self.graph.origin(*m).part, self.stages[m.at()]));
        of(a) == of(b)
    }

    /// Whether parts of one concatenation or padding are among both: one kernel may write only one part of a buffer.
    pub(super) fn shares_container(&self, a: &[NodeId], b: &[NodeId]) -> bool {
        let container = |m: &NodeId| {
            self.users[m.at()].iter().map(|u| u.0).find(|u| matches!(self.graph.node(*u).op, Op::Concat { .. } | Op::Pad { .. }))
        };
        a.iter().filter_map(container).any(|c| b.iter().filter_map(container).any(|d| c == d))
    }

    /// One kernel folds, the other does not, and the first's folds may stand beside the second's points.
    pub(super) fn one_is_rows(&self, a: usize, b: usize) -> bool {
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
    pub(super) fn reaches(&self, from: usize, to: usize) -> bool {
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
    pub(super) fn operands(&self, cluster: usize) -> HashSet<(NodeId, bool)> {
        let mut set = HashSet::new();
        for &m in &self.list[cluster].members {
            self.add_operands(m, cluster, &mut set);
        }
        set
    }

    pub(super) fn operands_with(&self, cluster: usize, id: NodeId) -> usize {
        let mut set = self.operands(cluster);
        self.add_operands(id, cluster, &mut set);
        set.remove(&(id, false));
        set.len()
    }

    pub(super) fn add_operands(&self, id: NodeId, cluster: usize, set: &mut HashSet<(NodeId, bool)>) {
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
}
