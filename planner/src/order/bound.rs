//! Lower bounds on the peak: for each task, the least memory in which it can run.
//!
//! The live bytes of a state are a cut: a buffer counts if its first user has run and some other
//! has not. Therefore the state with the fewest live bytes among those in which a given task can
//! run is a minimum cut (Picard, "Maximal closure of a graph", 1976), found as a maximum flow. The
//! largest of these is a lower bound of the peak of every order.

use super::compact::Compact;
use super::expand::SearchLimits;
use crate::dag::relations::count_looks;
use crate::flow::{FlowNetwork, Meter};

const ENDLESS: i128 = i128::MAX / 4;
const NOWHERE: u32 = u32::MAX;
/// The number of edge visits that count as much as a step of the other searches.
const EDGES_PER_EFFORT: u64 = 16;
/// The number of nodes and edges that are set up for a cut free of charge, and the number of
/// further ones that count as one edge visit.
const SET_UP_FREE: u64 = 1 << 14;
const SET_UP_SHARE: u64 = 8;

/// The flow network of a problem. The current task only decides the source and sink sides.
pub(super) struct Bounds<'a> {
    problem: &'a Compact,
    /// Nodes are tasks, then buffers, source, sink.
    network: FlowNetwork<i128>,
    /// The edges with their capacities, before the current task is taken into account.
    edges: Vec<(u32, i128)>,
    /// Buffer → the edge that is cut if it is alive.
    buffer_edge: Vec<u32>,
    /// Buffer → its first user, if it is not alive from the start.
    first: Vec<u32>,
    /// Node → its side for the current task.
    side: Vec<Side>,
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
            network: FlowNetwork::new(nodes),
            edges: Vec::new(),
            buffer_edge: vec![NOWHERE; buffers],
            first: vec![NOWHERE; buffers],
            side: vec![Side::Free; nodes],
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
        let edge = self.network.add_edge(from, to);
        self.edges.push((edge, capacity));
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
        limits: &mut SearchLimits,
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
    pub(super) fn need(&mut self, task: usize, limits: &mut SearchLimits) -> Option<i128> {
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
        limits: &mut SearchLimits,
    ) -> Option<i128> {
        // Setting up costs little compared with edge visits, except in large dags of which only a
        // small part matters for the task.
        let elements = (self.network.edges() + self.side.len()) as u64;
        self.work += elements.saturating_sub(SET_UP_FREE) / SET_UP_SHARE;
        count_looks(elements);
        for &(edge, capacity) in &self.edges {
            self.network.set_capacity(edge, capacity);
        }
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
            let edge = self.buffer_edge[buffer];
            known = self.problem.bytes[buffer];
            let all_done = self.network.head(edge);
            if all_done as usize == task {
                self.network.set_capacity(edge, 0);
            } else {
                self.network.set_capacity(edge, saves);
                let mut edges = self.network.edges_of(all_done).iter().copied();
                let to_task = edges.find(|&edge| self.network.head(edge) as usize == task);
                // A reverse edge has no capacity yet.
                if let Some(to_task) = to_task.filter(|edge| edge.is_multiple_of(2)) {
                    self.network.set_capacity(to_task, 0);
                }
            }
        }
        Some(known + self.flow(limits)?)
    }

    /// The maximum flow from the source side to the sink side.
    fn flow(&mut self, limits: &mut SearchLimits) -> Option<i128> {
        let sources: Vec<u32> = (0..self.side.len() as u32)
            .filter(|&n| self.side[n as usize] == Side::Source)
            .collect();
        let is_sink = |node: u32| self.side[node as usize] == Side::Sink;
        let work = &mut self.work;
        let mut meter = LimitsMeter { work, limits };
        self.network
            .max_flow(&sources, is_sink, ENDLESS, &mut meter)
    }
}

/// Takes edge visits off the limits of a search.
struct LimitsMeter<'a> {
    work: &'a mut u64,
    limits: &'a mut SearchLimits,
}

impl Meter for LimitsMeter<'_> {
    fn visit(&mut self, edges: usize) {
        *self.work += edges as u64;
    }

    fn end_phase(&mut self) -> bool {
        let work = std::mem::take(self.work);
        self.limits.spend(work / EDGES_PER_EFFORT + 1)
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
