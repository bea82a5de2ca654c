//! A schedule under change: computations in a row, some of them more than once, and what each step needs.
//!
//! A computation that runs several times makes several *copies*; a read takes the latest. A copy lives from its step to its last
//! read. Inserting and removing a copy changes the lifetimes of at most the copies it reads and its predecessor, so needs are
//! kept up to date by adding to ranges, never by simulating again. Everything else (who reads whom) follows from the copies'
//! positions, and is looked up when asked for: computations have few neighbours and few copies.

use super::network::Network;

/// Number of a copy. Numbers of removed copies are used again.
pub(super) type Copy = u32;

#[derive(Clone)]
pub(super) struct Tape<'n> {
    pub net: &'n Network,
    /// Copies in the order they are made; the last is the sink's.
    pub sequence: Vec<Copy>,
    /// By position: live bytes, output and workspace included.
    pub need: Vec<i64>,
    /// By copy: whose it is.
    pub node: Vec<u32>,
    /// By copy: its position.
    pub pos: Vec<u32>,
    /// By copy: the position of its last read, its own if it is never read.
    pub last: Vec<u32>,
    /// By computation: its copies in order.
    pub copies: Vec<Vec<Copy>>,
    unused: Vec<Copy>,
    /// What all the steps cost.
    pub cost: u128,
}

impl<'n> Tape<'n> {
    /// The tape of `order`, which names the sink at its end (see [`Tape::load`]).
    pub fn new(net: &'n Network, order: &[u32]) -> Tape<'n> {
        let mut tape = Tape {
            net,
            sequence: Vec::new(),
            need: Vec::new(),
            node: Vec::new(),
            pos: Vec::new(),
            last: Vec::new(),
            copies: vec![Vec::new(); net.len()],
            unused: Vec::new(),
            cost: 0,
        };
        tape.load(order);
        tape
    }

    /// Forgets everything and takes `order`, a valid schedule with the sink at its end.
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
        self.need.clear();
        self.need.resize(len + 1, 0);
        self.cost = 0;
        for (p, &i) in order.iter().enumerate() {
            for &j in net.inputs.of(i) {
                let &source = self.copies[j as usize].last().expect("a schedule computes before it reads");
                self.last[source as usize] = p as u32;
            }
            self.copies[i as usize].push(p as u32);
            self.cost += u128::from(net.cost[i as usize]);
        }
        for (p, &i) in order.iter().enumerate() {
            let bytes = net.bytes[i as usize];
            self.need[p] += bytes;
            self.need[self.last[p] as usize + 1] -= bytes;
        }
        let mut live = 0;
        for (p, &i) in order.iter().enumerate() {
            live += self.need[p];
            self.need[p] = live + net.workspace[i as usize];
        }
        self.need.truncate(len);
    }

    /// Computations in order, the sink at the end.
    pub fn order(&self) -> impl Iterator<Item = u32> + '_ {
        self.sequence.iter().map(|&c| self.node[c as usize])
    }

    pub fn len(&self) -> u32 {
        self.sequence.len() as u32
    }

    pub fn node_at(&self, p: u32) -> u32 {
        self.node[self.sequence[p as usize] as usize]
    }

    pub fn peak(&self) -> i64 {
        self.need.iter().copied().max().unwrap_or(0)
    }

    /// The most that any step in `from..to` needs; nothing for an empty range.
    #[inline]
    pub fn peak_in(&self, from: u32, to: u32) -> i64 {
        if from >= to { i64::MIN / 2 } else { self.need[from as usize..to as usize].iter().copied().max().unwrap_or(i64::MIN / 2) }
    }

    #[inline]
    fn add(&mut self, from: u32, to: u32, bytes: i64) {
        if from < to && bytes != 0 {
            self.need[from as usize..to as usize].iter_mut().for_each(|n| *n += bytes);
        }
    }

    /// The copy of `node` that a read at `p` takes.
    #[inline]
    pub fn source(&self, node: u32, p: u32) -> Option<Copy> {
        self.copies[node as usize].iter().rev().copied().find(|&c| self.pos[c as usize] < p)
    }

    /// The copy of the same computation made before `c`.
    pub fn previous(&self, c: Copy) -> Option<Copy> {
        self.source(self.node[c as usize], self.pos[c as usize])
    }

    /// The last and the first read of `node` in `from..to`.
    #[inline]
    pub fn last_read(&self, node: u32, from: u32, to: u32) -> Option<u32> {
        let mut found = None;
        for &k in self.net.consumers.of(node) {
            for &c in &self.copies[k as usize] {
                let p = self.pos[c as usize];
                if p >= from && p < to && found.is_none_or(|f| f < p) {
                    found = Some(p);
                }
            }
        }
        found
    }

    #[inline]
    pub fn first_read(&self, node: u32, from: u32, to: u32) -> Option<u32> {
        let mut found = None;
        for &k in self.net.consumers.of(node) {
            for &c in &self.copies[k as usize] {
                let p = self.pos[c as usize];
                if p >= from && p < to && found.is_none_or(|f| f > p) {
                    found = Some(p);
                }
            }
        }
        found
    }

    /// Whether `node` may run (again) just before what is now at `p`: inputs exist, and nothing it reads has been changed.
    pub fn may_insert(&self, node: u32, p: u32) -> bool {
        (!self.net.once[node as usize] || self.copies[node as usize].is_empty()) && self.may_stand(node, p)
    }

    fn may_stand(&self, node: u32, p: u32) -> bool {
        self.net.inputs.of(node).iter().all(|&j| self.copies[j as usize].first().is_some_and(|&c| self.pos[c as usize] < p))
            && self.net.before.of(node).iter().all(|&m| self.copies[m as usize].iter().all(|&c| self.pos[c as usize] >= p))
    }

    /// Whether a copy of `node` may be moved across `from..to`: nothing there makes or changes what it reads, reads what it
    /// makes, makes it again or has to come on the same side of it.
    pub fn is_quiet(&self, node: u32, from: u32, to: u32) -> bool {
        let none = |n: u32| {
            self.copies[n as usize].iter().all(|&d| {
                let q = self.pos[d as usize];
                q < from || q >= to
            })
        };
        let net = self.net;
        let others = [net.inputs.of(node), net.before.of(node), net.after.of(node)];
        none(node) && others.iter().all(|list| list.iter().all(|&n| none(n))) && self.last_read(node, from, to).is_none()
    }

    /// Computes `node` just before what is now at `p`. Later reads, up to the next copy, take the new one.
    pub fn insert(&mut self, node: u32, p: u32) -> Copy {
        let net = self.net;
        let at = p as usize;
        let old = self.node_at(p) as usize;
        let (bytes, workspace) = (net.bytes[node as usize], net.workspace[node as usize]);
        let mut slot = self.need[at] - net.workspace[old] - net.bytes[old] + bytes + workspace;
        let previous = self.source(node, p);
        let mut last = p;
        if let Some(c) = previous {
            let end = self.last[c as usize];
            if end >= p {
                let cut = self.last_read(node, self.pos[c as usize] + 1, p).unwrap_or(self.pos[c as usize]);
                self.add(cut + 1, p, -bytes);
                slot -= bytes;
                self.last[c as usize] = cut;
                last = end + 1;
            }
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
        let c = match self.unused.pop() {
            Some(c) => {
                self.node[c as usize] = node;
                self.pos[c as usize] = p;
                self.last[c as usize] = last;
                c
            }
            None => {
                self.node.push(node);
                self.pos.push(p);
                self.last.push(last);
                self.node.len() as u32 - 1
            }
        };
        self.sequence.insert(at, c);
        self.need.insert(at, slot);
        let before = self.copies[node as usize].iter().take_while(|&&d| self.pos[d as usize] < p).count();
        self.copies[node as usize].insert(before, c);
        self.cost += u128::from(net.cost[node as usize]);
        c
    }

    /// Whether `c` can go: another copy is there for whoever reads it.
    pub fn may_remove(&self, c: Copy) -> bool {
        let node = self.node[c as usize] as usize;
        self.copies[node].len() > 1 && (self.copies[node][0] != c || self.last[c as usize] == self.pos[c as usize])
    }

    /// Takes `c` out (see [`Tape::may_remove`]); its reads go to the copy before it, which lives longer.
    pub fn remove(&mut self, c: Copy) {
        let net = self.net;
        let node = self.node[c as usize];
        let p = self.pos[c as usize];
        let end = self.last[c as usize];
        if end > p {
            let previous = self.previous(c).expect("another copy serves the reads");
            let from = self.last[previous as usize] + 1;
            self.add(from, p, net.bytes[node as usize]);
            self.last[previous as usize] = end;
        }
        for &j in net.inputs.of(node) {
            let s = self.source(j, p).expect("inputs are computed first");
            if self.last[s as usize] == p {
                let end = self.last_read(j, self.pos[s as usize] + 1, p).unwrap_or(self.pos[s as usize]);
                self.add(end + 1, p, -net.bytes[j as usize]);
                self.last[s as usize] = end;
            }
        }
        self.sequence.remove(p as usize);
        self.need.remove(p as usize);
        self.copies[node as usize].retain(|&d| d != c);
        self.unused.push(c);
        self.pos[c as usize] = 0;
        self.last[c as usize] = 0;
        self.pos.iter_mut().for_each(|q| *q -= u32::from(*q > p));
        self.last.iter_mut().for_each(|q| *q -= u32::from(*q > p));
        self.cost -= u128::from(net.cost[node as usize]);
    }

    /// Moves `c` to just before what is now at `to`; the steps it crosses must be quiet (see [`Tape::is_quiet`]).
    pub fn relocate(&mut self, c: Copy, to: u32) {
        self.insert(self.node[c as usize], to);
        self.remove(c);
    }

    /// What the worst of the steps would need that removing `c` makes dearer.
    pub fn peak_without(&self, c: Copy) -> i64 {
        let p = self.pos[c as usize];
        if self.last[c as usize] == p {
            return i64::MIN / 2;
        }
        let node = self.node[c as usize];
        let Some(previous) = self.previous(c) else { return i64::MAX };
        let from = self.last[previous as usize] + 1;
        let bytes = self.net.bytes[node as usize];
        let mut freed: [(u32, i64); 16] = [(0, 0); 16];
        let mut count = 0;
        for &j in self.net.inputs.of(node) {
            let Some(s) = self.source(j, p) else { continue };
            if self.last[s as usize] == p && count < freed.len() {
                let end = self.last_read(j, self.pos[s as usize] + 1, p).unwrap_or(self.pos[s as usize]);
                freed[count] = (end + 1, self.net.bytes[j as usize]);
                count += 1;
            }
        }
        let freed = &mut freed[..count];
        freed.sort_unstable();
        let (mut at, mut less, mut worst) = (from, 0, i64::MIN / 2);
        for &mut (start, size) in freed {
            if start > at {
                worst = worst.max(self.peak_in(at, start.min(p)) + bytes - less);
                at = start;
            }
            less += size;
        }
        worst.max(self.peak_in(at, p) + bytes - less)
    }
}
