//! Maximum flows and minimum cuts by Dinic's algorithm (1970): shortest augmenting paths, level by
//! level.

use crate::dag::relations::count_looks;
use std::collections::VecDeque;
use std::ops::{AddAssign, Sub, SubAssign};

/// The level of a node that no source reaches.
const UNREACHED: u32 = u32::MAX;

/// Counts the work of a flow. Where a method returns false, a limit is reached and the flow ends.
pub(crate) trait Meter {
    /// Edges were looked at.
    fn visit(&mut self, _edges: usize) {}

    /// Paths of the next length are searched, in a network with this many edges.
    fn begin_phase(&mut self, _edges: usize) -> bool {
        true
    }

    /// A path was extended, shortened or filled.
    fn step(&mut self) -> bool {
        true
    }

    /// No path of that length is left.
    fn end_phase(&mut self) -> bool {
        true
    }
}

struct Edge<C> {
    to: u32,
    /// The residual capacity.
    residual: C,
}

/// A flow network whose capacities are set for each flow.
pub(crate) struct FlowNetwork<C> {
    /// Edge `e` and its reverse `e ^ 1`.
    edges: Vec<Edge<C>>,
    edges_of: Vec<Vec<u32>>,
    level: Vec<u32>,
    next: Vec<u32>,
}

impl<C: Copy + Ord + Default + AddAssign + SubAssign + Sub<Output = C>> FlowNetwork<C> {
    pub(crate) fn new(nodes: usize) -> Self {
        FlowNetwork {
            edges: Vec::new(),
            edges_of: vec![Vec::new(); nodes],
            level: vec![0; nodes],
            next: vec![0; nodes],
        }
    }

    /// Adds an edge without capacity; returns its index.
    pub(crate) fn add_edge(&mut self, from: u32, to: u32) -> u32 {
        let edge = self.edges.len() as u32;
        let residual = C::default();
        self.edges.push(Edge { to, residual });
        self.edges.push(Edge { to: from, residual });
        self.edges_of[from as usize].push(edge);
        self.edges_of[to as usize].push(edge + 1);
        edge
    }

    /// Sets the capacity of an edge and resets its flow.
    pub(crate) fn set_capacity(&mut self, edge: u32, capacity: C) {
        self.edges[edge as usize].residual = capacity;
        self.edges[edge as usize ^ 1].residual = C::default();
    }

    /// The number of edges, reverse ones included.
    pub(crate) fn edges(&self) -> usize {
        self.edges.len()
    }

    /// The node that an edge leads to.
    pub(crate) fn head(&self, edge: u32) -> u32 {
        self.edges[edge as usize].to
    }

    /// The edges that leave a node, reverse ones included.
    pub(crate) fn edges_of(&self, node: u32) -> &[u32] {
        &self.edges_of[node as usize]
    }

    /// The value of a maximum flow from the sources to the sinks, which is also the capacity of a
    /// minimum cut; `most` if it would be larger. `None` if the meter ended it before.
    pub(crate) fn max_flow(
        &mut self,
        sources: &[u32],
        is_sink: impl Fn(u32) -> bool,
        most: C,
        meter: &mut impl Meter,
    ) -> Option<C> {
        let mut total = C::default();
        while total < most && self.find_levels(sources, &is_sink, meter) {
            if !meter.begin_phase(self.edges.len()) {
                return None;
            }
            self.next.fill(0);
            for &source in sources {
                total += self.push(source, &is_sink, most - total, meter)?;
            }
            if !meter.end_phase() {
                return None;
            }
        }
        Some(total)
    }

    /// Whether a node was on the sources' side of the last cut.
    pub(crate) fn is_source_side(&self, node: u32) -> bool {
        self.level[node as usize] != UNREACHED
    }

    /// Computes distances from the sources; returns whether a sink is reached.
    fn find_levels(
        &mut self,
        sources: &[u32],
        is_sink: &impl Fn(u32) -> bool,
        meter: &mut impl Meter,
    ) -> bool {
        self.level.fill(UNREACHED);
        let mut queue: VecDeque<u32> = sources.iter().copied().collect();
        sources.iter().for_each(|&s| self.level[s as usize] = 0);
        let mut reached = false;
        while let Some(at) = queue.pop_front() {
            let edges = &self.edges_of[at as usize];
            meter.visit(edges.len());
            count_looks(edges.len() as u64);
            for &edge in edges {
                let Edge { to, residual } = self.edges[edge as usize];
                if residual > C::default() && self.level[to as usize] == UNREACHED {
                    self.level[to as usize] = self.level[at as usize] + 1;
                    if is_sink(to) {
                        reached = true;
                    } else {
                        queue.push_back(to);
                    }
                }
            }
        }
        reached
    }

    /// Pushes up to `most` from a source along edges that lead to the next level, to the sinks. Not
    /// recursive, because a graph may be deep and therefore have many levels.
    fn push(
        &mut self,
        source: u32,
        is_sink: &impl Fn(u32) -> bool,
        most: C,
        meter: &mut impl Meter,
    ) -> Option<C> {
        let mut pushed = C::default();
        let mut path: Vec<u32> = Vec::new();
        while pushed < most {
            if !meter.step() {
                return None;
            }
            let at = path.last().map_or(source, |&edge| self.head(edge));
            if is_sink(at) {
                let amount = path
                    .iter()
                    .map(|&edge| self.edges[edge as usize].residual)
                    .fold(most - pushed, C::min);
                let mut cut_at = path.len();
                for (depth, &edge) in path.iter().enumerate().rev() {
                    self.edges[edge as usize].residual -= amount;
                    self.edges[edge as usize ^ 1].residual += amount;
                    if self.edges[edge as usize].residual == C::default() {
                        cut_at = depth;
                    }
                }
                meter.visit(path.len());
                pushed += amount;
                path.truncate(cut_at);
                continue;
            }
            let (edges, first) = (&self.edges_of[at as usize], self.next[at as usize] as usize);
            let below = self.level[at as usize] + 1;
            let leads_on = |&&edge: &&u32| {
                let Edge { to, residual } = self.edges[edge as usize];
                residual > C::default() && self.level[to as usize] == below
            };
            let skipped = edges[first..]
                .iter()
                .take_while(|edge| !leads_on(edge))
                .count();
            meter.visit(skipped);
            self.next[at as usize] += skipped as u32;
            match edges.get(first + skipped) {
                Some(&edge) => path.push(edge),
                None => match path.pop() {
                    // A dead end: the edge into it leads nowhere.
                    Some(edge) => {
                        let from = self.head(edge ^ 1);
                        self.next[from as usize] += 1;
                    }
                    None => break,
                },
            }
        }
        Some(pushed)
    }
}
