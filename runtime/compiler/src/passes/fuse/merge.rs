//! Which kernels may become one, and how they do.

use smallvec::SmallVec;

use super::{Builder, Cluster, MEMBERS_MAX, OPERANDS_MAX, ROW_MAX};
use crate::graph::Phase;
use crate::ops::NodeId;
use crate::passes::layout::AxisMap;
use crate::passes::sequence::Ways;

/// Marks on nodes that are taken off all at once.
pub(super) struct Marks {
    set: Vec<[u32; 2]>,
    now: u32,
}

impl Marks {
    pub(super) fn new(count: usize) -> Self {
        Marks {
            set: vec![[0; 2]; count],
            now: 0,
        }
    }

    pub(super) fn clear(&mut self) {
        self.now += 1;
    }

    /// Sets one of a node's two marks; whether it was not there.
    pub(super) fn set(&mut self, id: NodeId, which: bool) -> bool {
        std::mem::replace(&mut self.set[id.at()][usize::from(which)], self.now) != self.now
    }
}

impl Builder<'_> {
    /// Makes the kernels that use one value into fewer, where that is possible; whether any were. A
    /// single number is no reason to: the updates of all weights use the rate, but each belongs to
    /// its gradient.
    pub(super) fn merge_all(&mut self, uses: &[(usize, Option<AxisMap>)]) -> bool {
        let ranging = |(_, axes): &&(usize, Option<AxisMap>)| {
            axes.as_ref()
                .is_some_and(|axes| axes.iter().any(Option::is_some))
        };
        let of_points: SmallVec<[&(usize, Option<AxisMap>); 4]> =
            uses.iter().filter(|(_, axes)| axes.is_some()).collect();
        let mut merged = false;
        for (i, one) in of_points.iter().enumerate().filter(|(_, one)| ranging(one)) {
            let (a, axes) = one;
            for (b, other) in &of_points[i + 1..] {
                let alive = |at: usize| !self.list[at].members.is_empty();
                if alive(*a) && alive(*b) {
                    merged |= (axes == other && self.merge_siblings(*a, *b))
                        || self.merge_tail(*a, *b)
                        || self.merge_tail(*b, *a);
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

    /// Fuses a loop over the kept axes of another kernel's reductions into that kernel, if neither
    /// needs the other's results.
    pub(super) fn merge_tail(&mut self, rows: usize, tail: usize) -> bool {
        let (x, y) = (&self.list[rows], &self.list[tail]);
        let kept: SmallVec<[u8; 6]> = (0..x.space.len())
            .filter(|&s| !x.reduced[s] && !x.space[s].is(1))
            .map(|s| s as u8)
            .collect();
        let own: SmallVec<[usize; 6]> = (0..y.space.len()).filter(|&s| !y.space[s].is(1)).collect();
        let loops = x.anchor.is_none()
            && y.anchor.is_none()
            && x.reduced.contains(&true)
            && !y.reduced.contains(&true);
        let same = kept
            .iter()
            .map(|&s| x.space[usize::from(s)])
            .eq(own.iter().map(|&s| y.space[s]));
        if !(self.options.siblings
            && self.options.reductions
            && loops
            && same
            && self.may_merge(rows, tail))
        {
            return false;
        }
        let mut renamed: SmallVec<[Option<u8>; 6]> =
            SmallVec::from_elem(None, self.list[tail].space.len());
        own.iter()
            .zip(&kept)
            .for_each(|(&s, &to)| renamed[s] = Some(to));
        for m in self.list[tail].members.clone() {
            for axis in &mut self.places[m.at()]
                .as_mut()
                .expect("members are placed")
                .axes
            {
                *axis = axis.and_then(|a| renamed[usize::from(a)]);
            }
        }
        self.list[tail].reduced = SmallVec::new();
        self.absorb(rows, tail);
        true
    }

    /// Whether two kernels may become one: it is not too large, neither needs the other's results,
    /// and both belong to one time.
    pub(super) fn may_merge(&mut self, a: usize, b: usize) -> bool {
        let (x, y) = (&self.list[a], &self.list[b]);
        if x.members.len() + y.members.len() > MEMBERS_MAX {
            return false;
        }
        // A recomputed value must not be computed early, because then it would be kept live.
        let phase = |m: &NodeId| self.graph.origin(*m).phase;
        let early = |a: &Cluster, b: &Cluster| {
            a.members.iter().any(|m| phase(m) == Phase::Recompute)
                && b.members.iter().all(|m| phase(m) == Phase::Forward)
        };
        let in_time = !early(x, y) && !early(y, x);
        let alike = self.belong_together(&x.members, &y.members) && in_time;
        let apart = alike && !self.shares_container(&x.members, &y.members);
        let recomputes = [x, y].map(|c| c.members.iter().any(|m| self.is_recomputed(*m)));
        apart
            && (recomputes == [false; 2] || self.may_touch(&[a, b], None))
            && self.operands_of(&[a, b]) <= OPERANDS_MAX
            && !self.reaches(a, b)
            && !self.reaches(b, a)
    }

    /// Moves all members of `b` into `a`.
    pub(super) fn absorb(&mut self, a: usize, b: usize) {
        self.join_in_order(self.seats[b], a);
        let moved = std::mem::take(&mut self.list[b]);
        let into = &mut self.list[a];
        for (r, m) in into.reduced.iter_mut().zip(&moved.reduced) {
            *r |= m;
        }
        into.members.extend(&moved.members);
        for m in moved.members {
            self.places[m.at()]
                .as_mut()
                .expect("members are placed")
                .cluster = a;
        }
    }

    /// Whether two kernels belong to one part of the batch and to one stage, as the members of each
    /// do.
    pub(super) fn belong_together(&self, a: &[NodeId], b: &[NodeId]) -> bool {
        let of = |members: &[NodeId]| {
            members
                .first()
                .map(|m| (self.graph.origin(*m).part, self.stages[m.at()]))
        };
        of(a) == of(b)
    }

    /// Whether parts of one concatenation or padding are among both: one kernel may write only one
    /// part of a buffer.
    pub(super) fn shares_container(&self, a: &[NodeId], b: &[NodeId]) -> bool {
        let container = |m: &NodeId| self.containers.of(*m);
        a.iter()
            .filter_map(container)
            .any(|c| b.iter().filter_map(container).any(|d| c == d))
    }

    /// Whether one kernel reduces, the other does not, and the reductions of the first may join the
    /// points of the second.
    pub(super) fn one_is_rows(&self, a: usize, b: usize) -> bool {
        let (plain, folding) = if self.list[a].reduced.contains(&true) {
            (b, a)
        } else {
            (a, b)
        };
        if self.list[plain].reduced.contains(&true) || !self.options.rows {
            return false;
        }
        let c = &self.list[folding];
        let bounds = self.graph.symbols.bounds();
        let trailing = c.reduced.windows(2).all(|w| !w[0] || w[1]);
        let row = c
            .space
            .iter()
            .zip(&c.reduced)
            .filter(|(_, r)| **r)
            .fold(1i64, |n, (d, _)| n.saturating_mul(d.at(&bounds)));
        trailing && row <= ROW_MAX
    }

    /// Whether a kernel's results are needed, directly or not, by another.
    pub(super) fn reaches(&mut self, from: usize, to: usize) -> bool {
        let mut order = std::mem::take(&mut self.order);
        let leads = order.leads(self, self.seats[from], self.seats[to]);
        self.order = order;
        leads
    }

    /// Gives a kernel the place in the order that it can have together with a node or the seat of
    /// another kernel.
    pub(super) fn join_in_order(&mut self, seat: u32, cluster: usize) {
        if self.seats[cluster] != seat {
            let mut order = std::mem::take(&mut self.order);
            self.seats[cluster] = order.join(self, seat, self.seats[cluster]);
            self.order = order;
        }
    }

    /// The number of operands that kernels read and write: a node counts once for each view that it
    /// is read through, and once as stored.
    fn operands_of(&mut self, clusters: &[usize]) -> usize {
        let mut marks = self.begin_marks();
        let count = |at: &usize| {
            self.list[*at]
                .members
                .iter()
                .map(|&m| self.mark_operands(m, *at, &mut marks))
                .sum::<usize>()
        };
        let count = clusters.iter().map(count).sum();
        self.marks = marks;
        count
    }

    /// The same of a kernel that a node joins.
    pub(super) fn operands_with(&mut self, cluster: usize, id: NodeId) -> usize {
        let mut marks = self.begin_marks();
        let members = self.list[cluster].members.iter().chain([&id]);
        let count = members
            .map(|&m| self.mark_operands(m, cluster, &mut marks))
            .sum::<usize>();
        // The node itself is read from where it is computed.
        let read = !marks.set(id, false);
        self.marks = marks;
        count - usize::from(read)
    }

    fn begin_marks(&mut self) -> Marks {
        let mut marks = std::mem::replace(&mut self.marks, Marks::new(0));
        marks.clear();
        marks
    }

    /// Marks the operands that a member of a kernel reads and writes there; the number of new marks.
    fn mark_operands(&self, id: NodeId, cluster: usize, marks: &mut Marks) -> usize {
        let outside = |n: NodeId| {
            self.places[n.at()]
                .as_ref()
                .is_none_or(|p| p.cluster != cluster)
        };
        let mut readers: SmallVec<[NodeId; 8]> = SmallVec::from_elem(id, 1);
        let mut count = 0;
        while let Some(reader) = readers.pop() {
            let views = &self.graph.node(reader).inputs;
            for (edge, &view) in self.edges[reader.at()].iter().zip(views) {
                if self.inline[edge.source.at()] {
                    readers.push(edge.source);
                } else if outside(edge.source) {
                    count += usize::from(marks.set(view, false));
                }
            }
        }
        let stored =
            self.is_output[id.at()] || self.users[id.at()].iter().any(|(u, _)| outside(*u));
        count + usize::from(stored && marks.set(id, true))
    }
}

/// Kernels by their seats, and nodes that are in none: concatenations, paddings and nodes that are
/// not visited yet.
impl Ways for Builder<'_> {
    fn degree(&self, vertex: u32, backward: bool) -> usize {
        let of = |m: &NodeId| {
            if backward {
                self.edges[m.at()].len()
            } else {
                self.users[m.at()].len()
            }
        };
        self.members_of(NodeId(vertex), |members| members.iter().map(of).sum())
    }

    fn each(&self, vertex: u32, backward: bool, visit: &mut dyn FnMut(u32)) {
        let mut stack: SmallVec<[NodeId; 16]> = SmallVec::new();
        let beside = |stack: &mut SmallVec<[NodeId; 16]>, m: NodeId| match backward {
            true => stack.extend(self.edges[m.at()].iter().map(|e| e.source)),
            false => stack.extend(self.users[m.at()].iter().map(|u| u.0)),
        };
        self.members_of(NodeId(vertex), |members| {
            for &m in members {
                beside(&mut stack, m);
                while let Some(other) = stack.pop() {
                    // Inlined values lead on to their consumers.
                    match &self.places[other.at()] {
                        Some(place) => visit(self.seats[place.cluster]),
                        None if self.inline[other.at()] => beside(&mut stack, other),
                        None => visit(other.0),
                    }
                }
            }
        });
    }
}

impl Builder<'_> {
    /// The members of the kernel that has this seat, or the node by itself.
    fn members_of<R>(&self, seat: NodeId, look: impl FnOnce(&[NodeId]) -> R) -> R {
        match &self.places[seat.at()] {
            Some(place) => look(&self.list[place.cluster].members),
            None => look(&[seat]),
        }
    }
}
