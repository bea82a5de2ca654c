//! The ordering problem as flat arrays, and walks through its states.
//!
//! A state is the set of tasks that have run. The set alone determines the live buffers, and so the
//! live bytes: a buffer is alive once one of its users has run, until all have. The live bytes are
//! a submodular function of the set (a cut), and the problem is symmetric in time: backwards, a
//! buffer is born at its last user.

use crate::dag::Dag;
use crate::dag::relations::{Csr, Relations};

/// The measure of a buffer's bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sizes {
    /// As occupied in a slab: in whole units of the alignment.
    Occupied,
    /// The exact sizes.
    Exact,
}

/// A permission to compute in place: if one buffer ends where the other begins, the latter's bytes
/// are not needed twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Pair {
    /// The buffer that gives its bytes, to at most one other.
    pub(super) from: u32,
    /// The buffer that takes them over, from at most one other.
    pub(super) to: u32,
    /// The bytes of `to`.
    pub(super) saves: i128,
}

/// Tasks and buffers of a dag, reduced to the data that the order depends on.
#[derive(Clone, Debug)]
pub(super) struct Compact {
    /// Task → buffers it touches, except for those whose bytes do not depend on the order.
    pub(super) uses: Csr,
    /// Buffer → tasks that touch it.
    pub(super) users: Csr,
    /// Task → tasks that depend on it.
    pub(super) after: Csr,
    /// Task → tasks it depends on.
    pub(super) before: Csr,
    /// Buffer → its bytes.
    pub(super) bytes: Vec<i128>,
    /// Buffer → alive before the first task.
    pub(super) at_start: Vec<bool>,
    /// Buffer → alive after the last task.
    pub(super) at_end: Vec<bool>,
    /// Task → bytes needed only while it runs.
    pub(super) workspace: Vec<i128>,
    /// Task → its pairs, as a range of `pairs`.
    pub(super) pairs_of: Vec<(u32, u32)>,
    /// The pairs of each task by decreasing savings, then by `to`.
    pub(super) pairs: Vec<Pair>,
    /// Bytes that are always alive.
    pub(super) base: i128,
    /// Whether time is reversed, so that buffers end at their writers.
    backwards: bool,
}

impl Compact {
    pub(super) fn new(dag: &Dag, relations: &Relations, in_place: bool, sizes: Sizes) -> Self {
        let tasks = dag.tasks.len();
        let size = |exact: u64, occupied: u64| {
            i128::from(if sizes == Sizes::Exact {
                exact
            } else {
                occupied
            })
        };
        let bytes: Vec<i128> = dag
            .buffers
            .iter()
            .map(|b| size(b.bytes, b.occupied()))
            .collect();
        let mut base = 0;
        let mut touches = Vec::new();
        for (b, buffer) in dag.buffers.iter().enumerate() {
            if buffer.live_in && buffer.live_out {
                base += bytes[b];
            } else if bytes[b] > 0 {
                touches.extend(relations.users.row(b).iter().map(|&t| (b as u32, t)));
            }
        }
        let users = Csr::new(dag.buffers.len(), touches);
        let mut given: Vec<(u32, Pair)> = Vec::new();
        for pair in dag.may_reuse.iter().filter(|_| in_place) {
            let (from, to) = (
                &dag.buffers[pair.from.index()],
                &dag.buffers[pair.to.index()],
            );
            let saves = bytes[pair.to.index()];
            let is_first = relations.writers.row(pair.to.index()).first() == Some(&pair.task.0);
            if saves == 0 || !is_first || to.align > from.align {
                continue;
            }
            given.push((
                pair.task.0,
                Pair {
                    from: pair.from.0,
                    to: pair.to.0,
                    saves,
                },
            ));
        }
        given
            .sort_by_key(|&(task, pair)| (task, std::cmp::Reverse(pair.saves), pair.to, pair.from));
        let starts = |t: usize| given.partition_point(|&(task, _)| (task as usize) < t) as u32;
        Compact {
            uses: users.transposed(tasks),
            users,
            after: relations.after.clone(),
            before: relations.before.clone(),
            at_start: dag.buffers.iter().map(|b| b.live_in).collect(),
            at_end: dag.buffers.iter().map(|b| b.live_out).collect(),
            workspace: dag
                .tasks
                .iter()
                .map(|t| size(t.workspace, t.workspace_occupied()))
                .collect(),
            pairs_of: (0..tasks).map(|t| (starts(t), starts(t + 1))).collect(),
            pairs: given.into_iter().map(|(_, pair)| pair).collect(),
            bytes,
            base,
            backwards: false,
        }
    }

    /// The same problem with time running backwards.
    pub(super) fn reversed(&self) -> Self {
        Compact {
            after: self.before.clone(),
            before: self.after.clone(),
            at_start: self.at_end.clone(),
            at_end: self.at_start.clone(),
            backwards: !self.backwards,
            ..self.clone()
        }
    }

    pub(super) fn tasks(&self) -> usize {
        self.workspace.len()
    }

    pub(super) fn pairs(&self, task: usize) -> &[Pair] {
        let (start, end) = self.pairs_of[task];
        &self.pairs[start as usize..end as usize]
    }

    /// The live bytes while each task runs, by task, and the largest of all, for an order of all
    /// tasks.
    pub(super) fn needs(&self, order: &[u32]) -> (Vec<i128>, i128) {
        let mut walk = Walk::new(self);
        let mut needs = vec![0; self.tasks()];
        for &task in order {
            needs[task as usize] = walk.live + walk.change(task).need;
            walk.apply(task);
        }
        (needs, walk.peak)
    }
}

/// The change of the live bytes when a task runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Change {
    /// After the task, compared with before.
    pub(super) net: i128,
    /// While the task runs, compared with before.
    pub(super) need: i128,
}

/// A state, with the peak of the path to it.
#[derive(Clone)]
pub(super) struct Walk<'a> {
    pub(super) problem: &'a Compact,
    /// Buffer → the number of its users that have not run.
    remaining: Vec<u32>,
    /// Task → the number of its dependencies that have not run.
    waiting: Vec<u32>,
    done: Vec<bool>,
    pub(super) live: i128,
    pub(super) peak: i128,
    /// The key of the state: the exclusive or of a random number for each task that has run.
    pub(super) key: u128,
    /// The tasks in the order in which they ran.
    pub(super) log: Vec<u32>,
    /// Tasks that became ready, or whose change may have become smaller, since the list was
    /// emptied.
    pub(super) touched: Vec<u32>,
    /// The ready tasks among these that were checked and did not run.
    pub(super) affected: Vec<u32>,
    /// Task → the number of tasks that had run when it became ready, if it is.
    pub(super) ready_since: Vec<usize>,
}

/// A position of a walk.
#[derive(Clone, Copy)]
pub(super) struct Mark {
    pub(super) live: i128,
    peak: i128,
    pub(super) key: u128,
    pub(super) len: usize,
}

impl<'a> Walk<'a> {
    pub(super) fn new(problem: &'a Compact) -> Self {
        let buffers = problem.bytes.len();
        let is_alive = |&b: &usize| problem.at_start[b] && !problem.users.row(b).is_empty();
        let live = problem.base
            + (0..buffers)
                .filter(is_alive)
                .map(|b| problem.bytes[b])
                .sum::<i128>();
        Walk {
            problem,
            remaining: (0..buffers)
                .map(|b| problem.users.row(b).len() as u32)
                .collect(),
            waiting: (0..problem.tasks())
                .map(|t| problem.before.row(t).len() as u32)
                .collect(),
            done: vec![false; problem.tasks()],
            live,
            peak: live,
            key: 0,
            log: Vec::with_capacity(problem.tasks()),
            touched: Vec::new(),
            affected: Vec::new(),
            ready_since: vec![0; problem.tasks()],
        }
    }

    /// Whether a task may run.
    pub(super) fn is_ready(&self, task: u32) -> bool {
        self.waiting[task as usize] == 0 && !self.done[task as usize]
    }

    /// Whether running a ready task makes another one ready.
    pub(super) fn enables(&self, task: u32) -> bool {
        self.problem
            .after
            .row(task as usize)
            .iter()
            .any(|&next| self.waiting[next as usize] == 1)
    }

    fn is_born(&self, buffer: usize) -> bool {
        !self.problem.at_start[buffer]
            && self.remaining[buffer] as usize == self.problem.users.row(buffer).len()
    }

    fn dies(&self, buffer: usize) -> bool {
        self.remaining[buffer] == 1 && !self.problem.at_end[buffer]
    }

    /// The change that a ready task would cause.
    pub(super) fn change(&self, task: u32) -> Change {
        let problem = self.problem;
        let (mut born, mut dying) = (0, 0);
        for &buffer in problem.uses.row(task as usize) {
            let buffer = buffer as usize;
            if self.is_born(buffer) {
                born += problem.bytes[buffer];
            }
            if self.dies(buffer) {
                dying += problem.bytes[buffer];
            }
        }
        let pairs = problem.pairs(task as usize);
        let saved = if pairs.is_empty() {
            0
        } else {
            self.saved(pairs)
        };
        Change {
            net: born - dying,
            need: born + problem.workspace[task as usize] - saved,
        }
    }

    /// The most bytes that need not exist twice: a matching of buffers that end with buffers that
    /// begin, each of which has a fixed saving. Therefore those with the largest savings are
    /// matched first and stay matched (Edmonds, "Matroids and the greedy algorithm", 1971).
    fn saved(&self, pairs: &[Pair]) -> i128 {
        let meets = |pair: &&Pair| {
            let (ends, begins) = if self.problem.backwards {
                (pair.to, pair.from)
            } else {
                (pair.from, pair.to)
            };
            self.dies(ends as usize) && self.is_born(begins as usize)
        };
        let mut meeting = pairs.iter().filter(meets);
        let Some(first) = meeting.next() else {
            return 0;
        };
        let rest: Vec<Pair> = meeting.copied().collect();
        if rest.iter().all(|pair| pair.to == first.to) {
            return first.saves;
        }
        let meeting: Vec<Pair> = std::iter::once(*first).chain(rest).collect();
        let mut given: Vec<(u32, u32)> = Vec::new();
        let mut saved = 0;
        for (at, pair) in meeting.iter().enumerate() {
            let is_new = meeting[..at].iter().all(|other| other.to != pair.to);
            if is_new && give(&meeting, pair.to, &mut given, &mut Vec::new()) {
                saved += pair.saves;
            }
        }
        saved
    }

    /// Runs a ready task.
    pub(super) fn apply(&mut self, task: u32) {
        let change = self.change(task);
        self.peak = self.peak.max(self.live + change.need);
        self.live += change.net;
        self.key ^= key(task);
        self.done[task as usize] = true;
        self.log.push(task);
        let problem = self.problem;
        for &buffer in problem.uses.row(task as usize) {
            let b = buffer as usize;
            let born = self.is_born(b);
            self.remaining[b] -= 1;
            if born || self.remaining[b] == 1 {
                for &user in problem.users.row(b) {
                    if self.is_ready(user) {
                        self.touched.push(user);
                    }
                }
            }
        }
        for &next in problem.after.row(task as usize) {
            self.waiting[next as usize] -= 1;
            if self.waiting[next as usize] == 0 {
                self.ready_since[next as usize] = self.log.len();
                self.touched.push(next);
            }
        }
    }

    pub(super) fn mark(&self) -> Mark {
        Mark {
            live: self.live,
            peak: self.peak,
            key: self.key,
            len: self.log.len(),
        }
    }

    /// Undoes all tasks that ran since a mark.
    pub(super) fn undo(&mut self, mark: Mark) {
        let problem = self.problem;
        while self.log.len() > mark.len {
            let Some(task) = self.log.pop() else { break };
            let task = task as usize;
            self.done[task] = false;
            problem
                .uses
                .row(task)
                .iter()
                .for_each(|&b| self.remaining[b as usize] += 1);
            problem
                .after
                .row(task)
                .iter()
                .for_each(|&next| self.waiting[next as usize] += 1);
        }
        Mark {
            live: self.live,
            peak: self.peak,
            key: self.key,
            ..
        } = mark;
    }

    /// The tasks that have run since a mark.
    pub(super) fn since(&self, mark: Mark) -> &[u32] {
        &self.log[mark.len..]
    }
}

/// Finds a buffer whose bytes `to` can take over, if necessary by moving the buffers that have
/// taken some to others (an augmenting path).
fn give(pairs: &[Pair], to: u32, given: &mut Vec<(u32, u32)>, tried: &mut Vec<u32>) -> bool {
    for pair in pairs.iter().filter(|pair| pair.to == to) {
        if tried.contains(&pair.from) {
            continue;
        }
        tried.push(pair.from);
        let holder = given.iter().position(|&(from, _)| from == pair.from);
        match holder {
            None => given.push((pair.from, to)),
            Some(at) if give(pairs, given[at].1, given, tried) => {
                // The other buffer has moved, so its old entry is replaced.
                given[at] = (pair.from, to);
            }
            Some(_) => continue,
        }
        return true;
    }
    false
}

/// A random number for each task, by the finaliser of SplitMix64 (Steele, Lea, Flood, 2014) on two
/// halves.
pub(super) fn key(task: u32) -> u128 {
    let mix = |mut x: u64| {
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    };
    let seed = u64::from(task).wrapping_add(1);
    let (high, low) = (
        mix(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15)),
        mix(seed.wrapping_mul(0xd1b5_4a32_d192_ed03)),
    );
    u128::from(high) << 64 | u128::from(low)
}
