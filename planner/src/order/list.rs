//! Orders made in one pass, from which the search starts: greedy list scheduling on memory,
//! forwards and, because the problem is symmetric in time (a buffer is born at its last reader and
//! dies at its first writer), backwards; and a depth-first order that evaluates the operand with
//! the larger need first, after Sethi and Ullman, "The generation of optimal code for arithmetic
//! expressions" (1970), and Liu, "On the storage requirement in the out-of-core multifrontal
//! method" (1986). Each costs about O(E log V).

use super::Schedule;
use super::expand::is_past;
use crate::dag::relations::{Csr, Relations};
use crate::dag::{Dag, TaskId};
use rustc_hash::FxHashSet;
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::time::Instant;

/// The program's order, then those of the three constructions that differ and are complete before
/// the deadline.
pub(super) fn orders(
    dag: &Dag,
    relations: &Relations,
    deadline: Option<Instant>,
) -> Vec<(Schedule, Vec<TaskId>)> {
    let mut orders = vec![(Schedule::Program, relations.program_order())];
    for schedule in [Schedule::Forward, Schedule::Backward, Schedule::DepthFirst] {
        let order = match schedule {
            _ if is_past(deadline) => None,
            Schedule::Forward => Greedy::new(dag, relations, Direction::Forward).run(deadline),
            Schedule::Backward => Greedy::new(dag, relations, Direction::Backward).run(deadline),
            _ => Some(depth_first(dag, relations)),
        };
        orders.extend(
            order
                .filter(|order| orders.iter().all(|(_, known)| known != order))
                .map(|order| (schedule, order)),
        );
    }
    orders
}

/// The number of tasks run between checks of the clock.
const TASKS_PER_CLOCK_CHECK: usize = 64;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Direction {
    Forward,
    Backward,
}

/// The number of ready tasks with the smallest net change that are tried before the one with the
/// smallest need is chosen.
const TRIES: usize = 16;

/// The change of the live bytes when a task runs.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Change {
    /// After the task, compared with before.
    net: i128,
    /// While the task runs, compared with before.
    need: i128,
}

/// Greedy list scheduling: among the ready tasks that fit under the current peak, the one that
/// frees most; if none fits, the one that raises the peak least.
struct Greedy<'a> {
    dag: &'a Dag,
    relations: &'a Relations,
    direction: Direction,
    next: &'a Csr,
    waiting: Vec<u32>,
    /// Buffer → the number of its users that have not run.
    remaining: Vec<u32>,
    alive: Vec<bool>,
    pairs: Csr,
    done: Vec<bool>,
    /// Task → the number of times its change was computed; heap entries with an older number are
    /// stale.
    version: Vec<u32>,
    by_net: BinaryHeap<Reverse<(i128, i128, u32, u32)>>,
    by_need: BinaryHeap<Reverse<(i128, i128, u32, u32)>>,
}

impl<'a> Greedy<'a> {
    fn new(dag: &'a Dag, relations: &'a Relations, direction: Direction) -> Self {
        let (next, previous) = match direction {
            Direction::Forward => (&relations.after, &relations.before),
            Direction::Backward => (&relations.before, &relations.after),
        };
        let tasks = dag.tasks.len();
        let pairs = (0u32..)
            .zip(&dag.may_reuse)
            .map(|(i, pair)| (pair.task.0, i))
            .collect();
        let mut greedy = Greedy {
            dag,
            relations,
            direction,
            next,
            waiting: (0..tasks).map(|t| previous.row(t).len() as u32).collect(),
            remaining: (0..dag.buffers.len())
                .map(|b| relations.users.row(b).len() as u32)
                .collect(),
            alive: Vec::new(),
            pairs: Csr::new(tasks, pairs),
            done: vec![false; tasks],
            version: vec![0; tasks],
            by_net: BinaryHeap::new(),
            by_need: BinaryHeap::new(),
        };
        greedy.alive = (0..dag.buffers.len())
            .map(|b| greedy.is_alive_at_start(b))
            .collect();
        greedy
    }

    fn is_alive_at_start(&self, buffer: usize) -> bool {
        let buffer = &self.dag.buffers[buffer];
        if self.direction == Direction::Forward {
            buffer.live_in
        } else {
            buffer.live_out
        }
    }

    fn is_alive_at_end(&self, buffer: usize) -> bool {
        let buffer = &self.dag.buffers[buffer];
        if self.direction == Direction::Forward {
            buffer.live_out
        } else {
            buffer.live_in
        }
    }

    /// The order of all tasks; `None` if the deadline comes first.
    fn run(mut self, deadline: Option<Instant>) -> Option<Vec<TaskId>> {
        let mut live: i128 = (0..self.alive.len())
            .filter(|&b| self.alive[b])
            .map(|b| self.bytes(b))
            .sum();
        let mut peak = live;
        let mut order = Vec::with_capacity(self.dag.tasks.len());
        for task in 0..self.waiting.len() {
            if self.waiting[task] == 0 {
                self.offer(task as u32);
            }
        }
        while let Some(task) = self.pick(peak - live) {
            let change = self.change(task);
            peak = peak.max(live + change.need);
            live += change.net;
            order.push(TaskId(task));
            self.finish(task);
            if order.len().is_multiple_of(TASKS_PER_CLOCK_CHECK) && is_past(deadline) {
                return None;
            }
        }
        if self.direction == Direction::Backward {
            order.reverse();
        }
        Some(order)
    }

    fn bytes(&self, buffer: usize) -> i128 {
        i128::from(self.dag.buffers[buffer].occupied())
    }

    fn is_born(&self, buffer: usize) -> bool {
        !self.alive[buffer]
    }

    fn dies(&self, buffer: usize) -> bool {
        self.remaining[buffer] == 1 && !self.is_alive_at_end(buffer)
    }

    fn change(&self, task: u32) -> Change {
        let (mut born, mut dying) = (0, 0);
        for &buffer in self.relations.uses.row(task as usize) {
            let buffer = buffer as usize;
            born += if self.is_born(buffer) {
                self.bytes(buffer)
            } else {
                0
            };
            dying += if self.dies(buffer) {
                self.bytes(buffer)
            } else {
                0
            };
        }
        let workspace = i128::from(self.dag.tasks[task as usize].workspace_occupied());
        Change {
            net: born - dying,
            need: born + workspace - self.saved_in_place(task),
        }
    }

    /// The bytes that need not exist twice while a task runs: of each pair, one buffer ends here
    /// and the other begins.
    fn saved_in_place(&self, task: u32) -> i128 {
        let mut taken: FxHashSet<u32> = FxHashSet::default();
        let mut saved = 0;
        for &pair in self.pairs.row(task as usize) {
            let pair = self.dag.may_reuse[pair as usize];
            let (ends, begins) = match self.direction {
                Direction::Forward => (pair.from, pair.to),
                Direction::Backward => (pair.to, pair.from),
            };
            let meets = self.dies(ends.index()) && self.is_born(begins.index());
            if meets && !taken.contains(&ends.0) && !taken.contains(&begins.0) {
                taken.extend([ends.0, begins.0]);
                saved += self.bytes(pair.to.index());
            }
        }
        saved
    }

    /// Adds a ready task to the heaps, with its current change.
    fn offer(&mut self, task: u32) {
        let Change { net, need } = self.change(task);
        self.version[task as usize] += 1;
        let version = self.version[task as usize];
        let rank = if self.direction == Direction::Forward {
            task
        } else {
            u32::MAX - task
        };
        self.by_net.push(Reverse((net, need, rank, version)));
        self.by_need.push(Reverse((need, net, rank, version)));
    }

    fn ranked(&self, rank: u32) -> u32 {
        if self.direction == Direction::Forward {
            rank
        } else {
            u32::MAX - rank
        }
    }

    fn is_current(&self, rank: u32, version: u32) -> bool {
        let task = self.ranked(rank) as usize;
        !self.done[task] && self.version[task] == version
    }

    /// The next task, if `room` bytes are free under the peak.
    fn pick(&mut self, room: i128) -> Option<u32> {
        let mut too_large = Vec::new();
        let mut fitting = None;
        while fitting.is_none() && too_large.len() < TRIES {
            let Some(entry) = self.by_net.pop() else {
                break;
            };
            let Reverse((_, need, rank, version)) = entry;
            if !self.is_current(rank, version) {
                continue;
            }
            if need <= room {
                fitting = Some(self.ranked(rank));
            } else {
                too_large.push(entry);
            }
        }
        self.by_net.extend(too_large);
        if fitting.is_some() {
            return fitting;
        }
        while let Some(Reverse((_, _, rank, version))) = self.by_need.pop() {
            if self.is_current(rank, version) {
                return Some(self.ranked(rank));
            }
        }
        None
    }

    /// Marks a task as run, makes its dependents ready, and updates the changes of the affected
    /// tasks.
    fn finish(&mut self, task: u32) {
        self.done[task as usize] = true;
        let relations = self.relations;
        for &buffer in relations.uses.row(task as usize) {
            let b = buffer as usize;
            let was_born = self.is_born(b);
            self.alive[b] = true;
            self.remaining[b] -= 1;
            if self.remaining[b] == 0 {
                self.alive[b] = self.is_alive_at_end(b);
            } else if was_born || self.remaining[b] == 1 {
                for &user in relations.users.row(b) {
                    if !self.done[user as usize] && self.waiting[user as usize] == 0 {
                        self.offer(user);
                    }
                }
            }
        }
        for &next in self.next.row(task as usize) {
            self.waiting[next as usize] -= 1;
            if self.waiting[next as usize] == 0 {
                self.offer(next);
            }
        }
    }
}

/// Each task after its operands, the operand with the larger need beyond its result first.
fn depth_first(dag: &Dag, relations: &Relations) -> Vec<TaskId> {
    let tasks = dag.tasks.len();
    // The bytes that a task leaves behind, and the bytes needed to compute it, as if no operand
    // were shared.
    let mut result = vec![0u64; tasks];
    for (buffer, b) in dag.buffers.iter().enumerate() {
        if let Some(&first) = relations.writers.row(buffer).first().filter(|_| !b.live_in) {
            result[first as usize] += b.occupied();
        }
    }
    let mut need = vec![0u64; tasks];
    let mut operands: Vec<Vec<u32>> = vec![Vec::new(); tasks];
    for task in relations.program_order().into_iter().map(TaskId::index) {
        let mut before = relations.before.row(task).to_vec();
        before.sort_by_key(|&t| (Reverse(need[t as usize] - result[t as usize]), t));
        let mut held = 0u64;
        for &operand in &before {
            need[task] = need[task].max(held.saturating_add(need[operand as usize]));
            held = held.saturating_add(result[operand as usize]);
        }
        let running = held
            .saturating_add(result[task])
            .saturating_add(dag.tasks[task].workspace_occupied());
        need[task] = need[task].max(running);
        operands[task] = before;
    }

    let mut order = Vec::with_capacity(tasks);
    let mut entered = vec![false; tasks];
    for sink in (0..tasks).filter(|&t| relations.after.row(t).is_empty()) {
        let mut path = vec![(sink, 0)];
        entered[sink] = true;
        while let Some((task, operand)) = path.last_mut() {
            let task = *task;
            match operands[task].get(*operand) {
                Some(&before) => {
                    *operand += 1;
                    if !std::mem::replace(&mut entered[before as usize], true) {
                        path.push((before as usize, 0));
                    }
                }
                None => {
                    order.push(TaskId(task as u32));
                    path.pop();
                }
            }
        }
    }
    order
}
