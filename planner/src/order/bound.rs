//! Lower bounds on the peak: for each task, the least memory in which it can run.
//!
//! The live bytes of a state are a cut: a buffer counts if its first user has run and some other
//! has not. Therefore the state with the fewest live bytes among those in which a given task can
//! run is a minimum cut (Picard, "Maximal closure of a graph", 1976), found as a maximum flow by
//! Dinic's algorithm. The largest of these is a lower bound of the peak of every order.

use super::compact::Compact;
use super::expand::Limits;
use crate::dag::relations::count_looks;
use std::collections::VecDeque;

const ENDLESS: i128 = i128::MAX / 4;
const NOWHERE: u32 = u32::MAX;
/// The number of edge visits that count as much as a step of the other searches.
const EDGES_PER_EFFORT: u64 = 16;
/// The number of nodes and edges that are set up for a cut free of charge, and the number of
/// further ones that count as one edge visit.
const SET_UP_FREE: u64 = 1 << 14;
const SET_UP_SHARE: u64 = 8;

struct Edge {
    to: u32,
    capacity: i128,
}

/// The flow network of a problem. The current task only decides the source and sink sides.
pub(super) struct Bounds<'a> {
    problem: &'a Compact,
    /// Edge `e` and its reverse `e ^ 1`.
    edges: Vec<Edge>,
    /// Node → its edges; tasks first, then buffers, source, sink.
    edges_of: Vec<Vec<u32>>,
    /// Buffer → the edge that is cut if it is alive.
    buffer_edge: Vec<u32>,
    /// Buffer → its first user, if it is not alive from the start.
    first: Vec<u32>,
    /// The residual capacities: the flow through each edge is the difference to `edges`.
    residual: Vec<i128>,
    /// Node → its side for the current task.
    side: Vec<Side>,
    level: Vec<u32>,
    next: Vec<u32>,
    /// Tasks whose need has been computed.
    seen: Vec<bool>,
    /// Edges visited but not yet taken off the limit.
    work: u64,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Side {
    /// Not decided by the task.
    Free,
    /// Has run.
    Source,
    /// Has not run.
    Sink,
}

impl<'a> Bounds<'a> {
    pub(super) fn new(problem: &'a Compact) -> Self {
        let (tasks, buffers) = (problem.tasks(), problem.bytes.len());
        let nodes = tasks + buffers + 2;
        let (source, sink) = ((nodes - 2) as u32, (nodes - 1) as u32);
        let mut bounds = Bounds {
            problem,
            edges: Vec::new(),
            edges_of: vec![Vec::new(); nodes],
            buffer_edge: vec![NOWHERE; buffers],
            first: vec![NOWHERE; buffers],
            residual: Vec::new(),
            side: vec![Side::Free; nodes],
            level: vec![0; nodes],
            next: vec![0; nodes],
            seen: vec![false; tasks],
            work: 0,
        };
        let mut position = vec![0u32; tasks];
        for (at, task) in (0u32..).zip(program_order(problem)) {
            position[task as usize] = at;
        }
        for b in 0..buffers {
            let users = problem.users.row(b);
            let Some(&first) = users.iter().min_by_key(|&&t| position[t as usize]) else {
                continue;
            };
            if !problem.at_start[b] {
                bounds.first[b] = first;
            }
            let begins = if problem.at_start[b] { source } else { first };
            let others: Vec<u32> = users.iter().copied().filter(|&t| t != begins).collect();
            let ends = match others[..] {
                _ if problem.at_end[b] => sink,
                [] => continue,
                [only] => only,
                _ => {
                    let all_done = (tasks + b) as u32;
                    for user in others {
                        bounds.edge(all_done, user, ENDLESS);
                    }
                    all_done
                }
            };
            bounds.buffer_edge[b] = bounds.edge(begins, ends, problem.bytes[b]);
        }
        for task in 0..tasks {
            for &before in problem.before.row(task) {
                bounds.edge(task as u32, before, ENDLESS);
            }
        }
        bounds
    }

    fn edge(&mut self, from: u32, to: u32, capacity: i128) -> u32 {
        let edge = self.edges.len() as u32;
        self.edges.push(Edge { to, capacity });
        self.edges.push(Edge {
            to: from,
            capacity: 0,
        });
        self.edges_of[from as usize].push(edge);
        self.edges_of[to as usize].push(edge + 1);
        edge
    }

    /// Raises the valid `bound` by the needs of tasks, until it reaches `peak`, no other task could
    /// raise it, or the limit is reached. `needs` holds for each task the bytes in which some order
    /// runs it.
    pub(super) fn raise(
        &mut self,
        bound: i128,
        needs: &[i128],
        peak: i128,
        limits: &mut Limits,
    ) -> i128 {
        let mut bound = bound;
        let mut tasks: Vec<u32> = (0..self.problem.tasks() as u32)
            .filter(|&t| !self.seen[t as usize])
            .collect();
        tasks.sort_by_key(|&t| (std::cmp::Reverse(needs[t as usize]), t));
        for task in tasks {
            if needs[task as usize] <= bound || bound >= peak || limits.is_over() {
                break;
            }
            if let Some(need) = self.need(task as usize, limits) {
                bound = bound.max(need);
                self.seen[task as usize] = true;
            }
        }
        bound
    }

    /// The least memory in which a task can run. In place it can take over one of several buffers,
    /// whose other users must then have run: each alternative is a separate cut. `None` if the
    /// limit is reached before.
    pub(super) fn need(&mut self, task: usize, limits: &mut Limits) -> Option<i128> {
        let problem = self.problem;
        let born = problem
            .uses
            .row(task)
            .iter()
            .filter(|&&b| self.first[b as usize] as usize == task);
        let own = born.map(|&b| problem.bytes[b as usize]).sum::<i128>()
            + problem.workspace[task]
            + problem.base;
        let pairs = problem.pairs(task);
        let one_takes = pairs.windows(2).all(|two| two[0].to == two[1].to);
        if pairs.is_empty() || !one_takes {
            // With several buffers that may take over bytes, the bound assumes that all savings
            // apply.
            let mut saved: Vec<(u32, i128)> =
                pairs.iter().map(|pair| (pair.to, pair.saves)).collect();
            saved.sort_unstable();
            saved.dedup();
            let saved: i128 = saved.iter().map(|&(_, saves)| saves).sum();
            return Some(self.cut(task, None, limits)? + own - saved);
        }
        let mut least = None;
        for pair in pairs {
            let cut =
                self.cut(task, Some((pair.from as usize, pair.saves)), limits)? + own - pair.saves;
            least = Some(least.map_or(cut, |least: i128| least.min(cut)));
        }
        least
    }

    /// The fewest live bytes of a state in which a task can run. With a buffer to take over,
    /// `saves` are added if other users of it have not run.
    fn cut(
        &mut self,
        task: usize,
        taken_over: Option<(usize, i128)>,
        limits: &mut Limits,
    ) -> Option<i128> {
        // Setting up costs little compared with edge visits, except in large dags of which only a
        // small part matters for the task.
        let elements = (self.edges.len() + self.side.len()) as u64;
        self.work += elements.saturating_sub(SET_UP_FREE) / SET_UP_SHARE;
        count_looks(elements);
        self.residual.clear();
        self.residual
            .extend(self.edges.iter().map(|edge| edge.capacity));
        self.side.fill(Side::Free);
        let nodes = self.side.len();
        (self.side[nodes - 2], self.side[nodes - 1], self.side[task]) =
            (Side::Source, Side::Sink, Side::Sink);
        for (rows, side) in [
            (&self.problem.before, Side::Source),
            (&self.problem.after, Side::Sink),
        ] {
            let mut reached = vec![task as u32];
            while let Some(at) = reached.pop() {
                for &next in rows.row(at as usize) {
                    if self.side[next as usize] == Side::Free {
                        self.side[next as usize] = side;
                        reached.push(next);
                    }
                }
            }
        }
        let mut known = 0;
        if let Some((buffer, saves)) = taken_over {
            // The buffer counts in any case, because this task reads it. The rest of its edge
            // stands for its other users alone.
            let edge = self.buffer_edge[buffer] as usize;
            known = self.problem.bytes[buffer];
            self.residual[edge] = saves;
            if self.edges[edge].to as usize == task {
                self.residual[edge] = 0;
            } else {
                let all_done = self.edges[edge].to as usize;
                let to_task = self.edges_of[all_done]
                    .iter()
                    .find(|&&e| self.edges[e as usize].to as usize == task);
                if let Some(&to_task) = to_task {
                    self.residual[to_task as usize] = 0;
                }
            }
        }
        Some(known + self.flow(limits)?)
    }

    /// The maximum flow from the source side to the sink side.
    fn flow(&mut self, limits: &mut Limits) -> Option<i128> {
        let sources: Vec<u32> = (0..self.side.len() as u32)
            .filter(|&n| self.side[n as usize] == Side::Source)
            .collect();
        let mut total = 0;
        while self.find_levels(&sources) {
            self.next.fill(0);
            for &source in &sources {
                total += self.push(source, ENDLESS);
            }
            if !limits.spend(std::mem::take(&mut self.work) / EDGES_PER_EFFORT + 1) {
                return None;
            }
        }
        Some(total)
    }

    /// Computes distances from the source side; returns whether the sink side is reached.
    fn find_levels(&mut self, sources: &[u32]) -> bool {
        self.level.fill(u32::MAX);
        let mut queue: VecDeque<u32> = sources.iter().copied().collect();
        sources.iter().for_each(|&s| self.level[s as usize] = 0);
        let mut reached = false;
        while let Some(at) = queue.pop_front() {
            self.work += self.edges_of[at as usize].len() as u64;
            count_looks(self.edges_of[at as usize].len() as u64);
            for &edge in &self.edges_of[at as usize] {
                let to = self.edges[edge as usize].to as usize;
                if self.residual[edge as usize] > 0 && self.level[to] == u32::MAX {
                    self.level[to] = self.level[at as usize] + 1;
                    if self.side[to] == Side::Sink {
                        reached = true;
                    } else {
                        queue.push_back(to as u32);
                    }
                }
            }
        }
        reached
    }

    /// Pushes up to `most` from a node along edges that lead to the next level, to the sink side.
    /// Not recursive, because a graph may be deep and therefore have many levels.
    fn push(&mut self, start: u32, most: i128) -> i128 {
        let mut pushed = 0;
        let mut path: Vec<u32> = Vec::new();
        loop {
            let at = path
                .last()
                .map_or(start, |&edge| self.edges[edge as usize].to);
            if self.side[at as usize] == Side::Sink {
                let amount = path
                    .iter()
                    .map(|&e| self.residual[e as usize])
                    .fold(most - pushed, i128::min);
                let mut cut_at = 0;
                for (depth, &e) in path.iter().enumerate().rev() {
                    self.residual[e as usize] -= amount;
                    self.residual[e as usize ^ 1] += amount;
                    if self.residual[e as usize] == 0 {
                        cut_at = depth;
                    }
                }
                self.work += path.len() as u64;
                pushed += amount;
                path.truncate(cut_at);
                continue;
            }
            let edges = &self.edges_of[at as usize];
            let mut found = None;
            while let Some(&edge) = edges.get(self.next[at as usize] as usize) {
                let to = self.edges[edge as usize].to as usize;
                if self.residual[edge as usize] > 0 && self.level[to] == self.level[at as usize] + 1
                {
                    found = Some(edge);
                    break;
                }
                self.next[at as usize] += 1;
                self.work += 1;
            }
            match found {
                Some(edge) => path.push(edge),
                None => match path.pop() {
                    // A dead end: the edge into it leads nowhere.
                    Some(edge) => self.next[self.edges[edge as usize ^ 1].to as usize] += 1,
                    None => return pushed,
                },
            }
        }
    }
}

/// An order that respects the dependencies.
fn program_order(problem: &Compact) -> Vec<u32> {
    let tasks = problem.tasks();
    let mut waiting: Vec<usize> = (0..tasks).map(|t| problem.before.row(t).len()).collect();
    let mut order: Vec<u32> = (0..tasks as u32)
        .filter(|&t| waiting[t as usize] == 0)
        .collect();
    let mut at = 0;
    while let Some(&task) = order.get(at) {
        at += 1;
        for &next in problem.after.row(task as usize) {
            waiting[next as usize] -= 1;
            if waiting[next as usize] == 0 {
                order.push(next);
            }
        }
    }
    order
}
