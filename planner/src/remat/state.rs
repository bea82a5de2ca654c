//! The state of the search: a mutable schedule in which computations may run more than once, and
//! the bytes that each step needs.
//!
//! A computation that runs several times makes several *copies* of its values; a read takes the
//! latest. A copy lives from its step to its last read. Inserting and removing a copy changes the
//! lifetimes of at most the copies it reads and its predecessor, so that needs are updated by
//! adding to ranges, without simulation. All other facts, such as the copy that a read takes,
//! follow from the copies' positions and are computed on demand, because computations have few
//! neighbours and few copies.

use super::needs::Needs;
use super::network::Network;

/// The number of a copy. Numbers of removed copies are reused.
pub(super) type CopyId = u32;

/// Whether a schedule is long: frequent operations must then not visit all of its steps.
pub(super) fn is_long(steps: usize) -> bool {
    steps >= 2048
}

#[derive(Clone)]
pub(super) struct ScheduleState<'n> {
    pub net: &'n Network,
    /// The copies of each computation's first value in the order they are made; the last is the
    /// sink's.
    pub sequence: Vec<CopyId>,
    /// By position, live bytes, output and workspace included.
    pub need: Needs,
    /// By copy, its value. The first value of a computation has the computation's number.
    pub node: Vec<u32>,
    /// By copy, its position.
    pub pos: Vec<u32>,
    /// By copy, the position of its last read, or its own position if it is never read.
    pub last: Vec<u32>,
    /// By value, its copies in order. The values of a computation have equally many, except for
    /// fetches.
    pub copies: Vec<Vec<CopyId>>,
    unused: Vec<CopyId>,
    /// By value of the computation being inserted, its last read.
    ends: Vec<u32>,
    /// The cost of all steps.
    pub cost: u128,
}

impl<'n> ScheduleState<'n> {
    /// The state of `order`, which names the sink at its end (see [`ScheduleState::load`]).
    pub fn new(net: &'n Network, order: &[u32]) -> ScheduleState<'n> {
        let mut state = ScheduleState {
            net,
            sequence: Vec::new(),
            need: Needs::default(),
            node: Vec::new(),
            pos: Vec::new(),
            last: Vec::new(),
            copies: vec![Vec::new(); net.values()],
            unused: Vec::new(),
            ends: Vec::new(),
            cost: 0,
        };
        state.load(order);
        state
    }

    /// Resets the state to `order`, a valid schedule with the sink at its end.
    pub fn load(&mut self, order: &[u32]) {
        let net = self.net;
        let len = order.len();
        self.copies.iter_mut().for_each(Vec::clear);
        self.unused.clear();
        self.sequence.clear();
        self.sequence.extend(0..len as u32);
        self.node.clear();
        self.node.extend_from_slice(order);
        self.pos.clear();
        self.pos.extend(0..len as u32);
        self.last.clear();
        self.last.extend(0..len as u32);
        self.cost = 0;
        for (p, &i) in (0u32..).zip(order) {
            for &j in net.inputs.of(i) {
                let &source = self.copies[j as usize]
                    .last()
                    .expect("a schedule computes before it reads");
                self.last[source as usize] = p;
            }
            self.copies[i as usize].push(p);
            for value in net.makes(i).skip(1) {
                self.copies[value as usize].push(self.node.len() as u32);
                self.node.push(value);
                self.pos.push(p);
                self.last.push(p);
            }
            self.cost += u128::from(net.cost[i as usize]);
        }
        self.need.load(len + 1, |need| {
            for ((&value, &p), &last) in self.node.iter().zip(&self.pos).zip(&self.last) {
                let bytes = net.bytes[value as usize];
                need[p as usize] += bytes;
                need[last as usize + 1] -= bytes;
            }
            let mut live = 0;
            for (p, &i) in order.iter().enumerate() {
                live += need[p];
                need[p] = live + net.workspace[i as usize];
            }
            need.truncate(len);
        });
    }

    /// The computations in order, the sink at the end.
    pub fn order(&self) -> impl Iterator<Item = u32> + '_ {
        self.sequence.iter().map(|&c| self.node[c as usize])
    }

    pub fn len(&self) -> u32 {
        self.sequence.len() as u32
    }

    pub fn is_long(&self) -> bool {
        is_long(self.sequence.len())
    }

    pub fn node_at(&self, p: u32) -> u32 {
        self.node[self.sequence[p as usize] as usize]
    }

    /// Whether the step at `p` is a fetch.
    #[inline]
    pub fn is_fetch(&self, p: u32) -> bool {
        self.net.fetched(self.node_at(p)).is_some()
    }

    pub fn peak(&self) -> i64 {
        self.need.most()
    }

    /// The most that any step in `from..to` needs; very small for an empty range.
    #[inline]
    pub fn peak_in(&self, from: u32, to: u32) -> i64 {
        self.need.most_in(from as usize, to as usize)
    }

    #[inline]
    fn add(&mut self, from: u32, to: u32, bytes: i64) {
        self.need.add(from as usize, to as usize, bytes);
    }

    /// The copies made at one step, that of the computation's first value first.
    #[inline]
    pub fn made_at(&self, p: u32) -> impl Iterator<Item = CopyId> + '_ {
        let first = self.sequence[p as usize];
        let others = self.net.makes(self.node[first as usize]).skip(1);
        std::iter::once(first).chain(others.filter_map(move |value| self.source(value, p + 1)))
    }

    /// Whether no copy made at `p` is read.
    pub fn is_unread(&self, p: u32) -> bool {
        self.made_at(p).all(|c| self.last[c as usize] == p)
    }

    /// The bytes of all values of a computation.
    pub fn makes_bytes(&self, node: u32) -> i64 {
        self.net
            .makes(node)
            .map(|value| self.net.bytes[value as usize])
            .sum()
    }

    /// The copy of a value that a read at `p` takes.
    #[inline]
    pub fn source(&self, node: u32, p: u32) -> Option<CopyId> {
        self.copies[node as usize]
            .iter()
            .rev()
            .copied()
            .find(|&c| self.pos[c as usize] < p)
    }

    /// The copy of the same value made before `c`.
    pub fn previous(&self, c: CopyId) -> Option<CopyId> {
        self.source(self.node[c as usize], self.pos[c as usize])
    }

    /// The reads of a value in `from..to`.
    #[inline]
    fn reads(&self, node: u32, from: u32, to: u32) -> impl Iterator<Item = u32> {
        let readers = self.net.consumers.of(node).iter();
        readers
            .flat_map(|&k| &self.copies[k as usize])
            .filter_map(move |&c| {
                let p = self.pos[c as usize];
                // A copy made by a fetch reads no values.
                (p >= from && p < to && self.sequence[p as usize] == c).then_some(p)
            })
    }

    /// The last read of a value in `from..to`.
    #[inline]
    pub fn last_read(&self, node: u32, from: u32, to: u32) -> Option<u32> {
        self.reads(node, from, to).max()
    }

    /// The first read of a value in `from..to`.
    #[inline]
    pub fn first_read(&self, node: u32, from: u32, to: u32) -> Option<u32> {
        self.reads(node, from, to).min()
    }

    /// Whether `node` may be inserted before position `p`: its inputs exist, and none of them has
    /// been changed.
    pub fn may_insert(&self, node: u32, p: u32) -> bool {
        (!self.net.once[node as usize] || self.copies[node as usize].is_empty())
            && self.may_stand(node, p)
    }

    fn may_stand(&self, node: u32, p: u32) -> bool {
        self.net.inputs.of(node).iter().all(|&j| {
            self.copies[j as usize]
                .first()
                .is_some_and(|&c| self.pos[c as usize] < p)
        }) && self.net.before.of(node).iter().all(|&m| {
            self.copies[m as usize]
                .iter()
                .all(|&c| self.pos[c as usize] >= p)
        }) && self
            .net
            .fetched(node)
            .is_none_or(|value| self.source(value, p).is_some())
    }

    /// Whether a copy of `node` may be moved across `from..to`: no step there makes or changes its
    /// operands, reads or makes its values, or has a control dependency with it.
    pub fn is_quiet(&self, node: u32, from: u32, to: u32) -> bool {
        let none = |n: u32| {
            self.copies[n as usize].iter().all(|&d| {
                let q = self.pos[d as usize];
                q < from || q >= to
            })
        };
        let net = self.net;
        let others = [net.inputs.of(node), net.before.of(node), net.after.of(node)];
        let unread = || {
            net.makes(node)
                .all(|value| self.last_read(value, from, to).is_none())
        };
        net.makes(node).all(none)
            && others.iter().all(|list| list.iter().all(|&n| none(n)))
            && unread()
    }

    /// Inserts `node` before position `p`. Later reads, up to the next copies, take the new ones.
    pub fn insert(&mut self, node: u32, p: u32) {
        let net = self.net;
        let at = p as usize;
        let old = self.node_at(p);
        let mut slot = self.need[at] - net.workspace[old as usize] - self.makes_bytes(old)
            + net.workspace[node as usize];
        for value in net.makes(node) {
            let bytes = net.bytes[value as usize];
            slot += bytes;
            if let Some(c) = self.source(value, p) {
                let end = self.last[c as usize];
                if end >= p {
                    let cut = self
                        .last_read(value, self.pos[c as usize] + 1, p)
                        .unwrap_or(self.pos[c as usize]);
                    self.add(cut + 1, p, -bytes);
                    slot -= bytes;
                    self.last[c as usize] = cut;
                    self.ends.push(end + 1);
                    continue;
                }
            }
            self.ends.push(p);
        }
        for &j in net.inputs.of(node) {
            let s = self.source(j, p).expect("inputs are computed first");
            let end = self.last[s as usize];
            if end < p {
                self.add(end + 1, p, net.bytes[j as usize]);
                slot += net.bytes[j as usize];
                // Shifted to `p`, the new reader, below.
                self.last[s as usize] = p - 1;
            }
        }
        self.pos.iter_mut().for_each(|q| *q += u32::from(*q >= p));
        self.last.iter_mut().for_each(|q| *q += u32::from(*q >= p));
        for &j in net.inputs.of(node) {
            let s = self.source(j, p).expect("inputs are computed first");
            self.last[s as usize] = self.last[s as usize].max(p);
        }
        for (k, value) in net.makes(node).enumerate() {
            let last = self.ends[k];
            let c = match self.unused.pop() {
                Some(c) => {
                    self.node[c as usize] = value;
                    self.pos[c as usize] = p;
                    self.last[c as usize] = last;
                    c
                }
                None => {
                    self.node.push(value);
                    self.pos.push(p);
                    self.last.push(last);
                    self.node.len() as u32 - 1
                }
            };
            if k == 0 {
                self.sequence.insert(at, c);
            }
            let before = self.copies[value as usize]
                .iter()
                .take_while(|&&d| self.pos[d as usize] < p)
                .count();
            self.copies[value as usize].insert(before, c);
        }
        self.ends.clear();
        self.need.insert(at, slot);
        self.cost += u128::from(net.cost[node as usize]);
    }

    /// Whether the step that made `c`, a copy of a computation's first value, can be removed:
    /// another copy serves each of its reads.
    pub fn may_remove(&self, c: CopyId) -> bool {
        let node = self.node[c as usize];
        if self.net.fetched(node).is_some() {
            return true;
        }
        match self.copies[node as usize][..] {
            [first, _, ..] if first == c => {
                self.is_unread(self.pos[c as usize])
                    && self.net.makes(node).all(|v| self.is_recomputed(v))
            }
            [_, _, ..] => true,
            _ => false,
        }
    }

    /// Whether the second copy of a value is computed, not fetched: a fetch needs an earlier copy.
    fn is_recomputed(&self, value: u32) -> bool {
        self.copies[value as usize]
            .get(1)
            .is_some_and(|&next| !self.is_fetch(self.pos[next as usize]))
    }

    /// Removes the step that made `c` (see [`ScheduleState::may_remove`]). Its reads take the
    /// previous copies, whose lifetimes grow.
    pub fn remove(&mut self, c: CopyId) {
        let net = self.net;
        let node = self.node[c as usize];
        let p = self.pos[c as usize];
        for value in net.makes(node) {
            let c = self
                .source(value, p + 1)
                .expect("each run makes all values");
            let end = self.last[c as usize];
            if end > p {
                let previous = self.previous(c).expect("another copy serves the reads");
                let from = self.last[previous as usize] + 1;
                self.add(from, p, net.bytes[value as usize]);
                self.last[previous as usize] = end;
            }
        }
        for &j in net.inputs.of(node) {
            let s = self.source(j, p).expect("inputs are computed first");
            if self.last[s as usize] == p {
                let end = self
                    .last_read(j, self.pos[s as usize] + 1, p)
                    .unwrap_or(self.pos[s as usize]);
                self.add(end + 1, p, -net.bytes[j as usize]);
                self.last[s as usize] = end;
            }
        }
        self.sequence.remove(p as usize);
        self.need.remove(p as usize);
        for value in net.makes(node) {
            let copies = &mut self.copies[value as usize];
            if let Some(at) = copies.iter().position(|&d| self.pos[d as usize] == p) {
                let c = copies.remove(at);
                self.unused.push(c);
                // Position 0 lies below all positions that shift.
                self.pos[c as usize] = 0;
                self.last[c as usize] = 0;
            }
        }
        self.pos.iter_mut().for_each(|q| *q -= u32::from(*q > p));
        self.last.iter_mut().for_each(|q| *q -= u32::from(*q > p));
        self.cost -= u128::from(net.cost[node as usize]);
    }

    /// Moves `c` before position `to`; the steps in between must be quiet (see
    /// [`ScheduleState::is_quiet`]).
    pub fn relocate(&mut self, c: CopyId, to: u32) {
        self.insert(self.node[c as usize], to);
        self.remove(c);
    }

    /// The largest need among the steps whose need grows if the step of `c` is removed.
    pub fn peak_without(&self, c: CopyId) -> i64 {
        let p = self.pos[c as usize];
        // Changes of the live bytes: from a step on, more or fewer bytes are live up to `p`.
        let mut events: [(u32, i64); 24] = [(0, 0); 24];
        let mut count = 0;
        for c in self.made_at(p).filter(|&c| self.last[c as usize] > p) {
            let Some(previous) = self.previous(c) else {
                return i64::MAX;
            };
            if count == events.len() {
                return i64::MAX;
            }
            events[count] = (
                self.last[previous as usize] + 1,
                self.net.bytes[self.node[c as usize] as usize],
            );
            count += 1;
        }
        if count == 0 {
            return i64::MIN / 2;
        }
        for &j in self.net.inputs.of(self.node[c as usize]) {
            let Some(s) = self.source(j, p) else { continue };
            if self.last[s as usize] == p && count < events.len() {
                let end = self
                    .last_read(j, self.pos[s as usize] + 1, p)
                    .unwrap_or(self.pos[s as usize]);
                events[count] = (end + 1, -self.net.bytes[j as usize]);
                count += 1;
            }
        }
        let events = &mut events[..count];
        events.sort_unstable();
        let (mut at, mut more, mut worst) = (p, 0, i64::MIN / 2);
        for &mut (start, bytes) in events {
            if start > at && more > 0 {
                worst = worst.max(self.peak_in(at, start.min(p)) + more);
            }
            more += bytes;
            at = start;
        }
        worst.max(self.peak_in(at, p) + more)
    }
}
