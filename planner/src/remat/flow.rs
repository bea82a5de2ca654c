//! Minimum cuts: maximum flow by Dinic's algorithm (1970), shortest augmenting paths level by
//! level.

use super::clock::Clock;

/// The number of edges visited between checks of the clock.
const EDGES_PER_CLOCK_CHECK: u32 = 4096;

/// The capacity of an edge that is never cut.
pub(super) const ENDLESS: i64 = i64::MAX / 8;

struct Edge {
    to: u32,
    capacity: i64,
}

/// A flow network whose capacities are set for each cut.
pub(super) struct Flow {
    /// Edge `e` and its reverse `e ^ 1`.
    edges: Vec<Edge>,
    edges_of: Vec<Vec<u32>>,
    level: Vec<u32>,
    next: Vec<u32>,
}

impl Flow {
    pub fn new(nodes: usize) -> Flow {
        Flow {
            edges: Vec::new(),
            edges_of: vec![Vec::new(); nodes],
            level: vec![0; nodes],
            next: vec![0; nodes],
        }
    }

    /// An edge, for [`Flow::set`].
    pub fn edge(&mut self, from: u32, to: u32) -> u32 {
        let edge = self.edges.len() as u32;
        self.edges.push(Edge { to, capacity: 0 });
        self.edges.push(Edge {
            to: from,
            capacity: 0,
        });
        self.edges_of[from as usize].push(edge);
        self.edges_of[to as usize].push(edge + 1);
        edge
    }

    /// Sets the capacity of an edge and resets its flow.
    pub fn set(&mut self, edge: u32, capacity: i64) {
        self.edges[edge as usize].capacity = capacity;
        self.edges[edge as usize ^ 1].capacity = 0;
    }

    /// The least capacity that separates `source` from `sink`; [`ENDLESS`] or more if they cannot
    /// be separated. Afterwards [`Flow::is_source_side`] tells the sides. `None` if the time was
    /// over before.
    pub fn cut(&mut self, source: u32, sink: u32, clock: &Clock) -> Option<i64> {
        let mut total = 0;
        while total < ENDLESS && self.find_levels(source, sink) {
            clock.prove(self.edges.len() as u64);
            if clock.is_over() {
                return None;
            }
            self.next.fill(0);
            total += self.push(source, sink, ENDLESS - total, clock)?;
        }
        Some(total)
    }

    /// Whether a node was on the source's side of the last cut.
    pub fn is_source_side(&self, node: u32) -> bool {
        self.level[node as usize] != u32::MAX
    }

    fn find_levels(&mut self, source: u32, sink: u32) -> bool {
        self.level.fill(u32::MAX);
        self.level[source as usize] = 0;
        let mut queue = vec![source];
        let mut at = 0;
        while let Some(&node) = queue.get(at) {
            at += 1;
            for &e in &self.edges_of[node as usize] {
                let Edge { to, capacity } = self.edges[e as usize];
                if capacity > 0 && self.level[to as usize] == u32::MAX {
                    self.level[to as usize] = self.level[node as usize] + 1;
                    queue.push(to);
                }
            }
        }
        self.level[sink as usize] != u32::MAX
    }

    /// Pushes up to `most` along edges that lead to the next level; `None` if the time was over
    /// before. Not recursive, because a graph may be deep and therefore have many levels.
    fn push(&mut self, source: u32, sink: u32, most: i64, clock: &Clock) -> Option<i64> {
        let mut pushed = 0;
        let mut path: Vec<u32> = Vec::new();
        let mut moves = 0u32;
        while pushed < most {
            moves = moves.wrapping_add(1);
            if moves.is_multiple_of(EDGES_PER_CLOCK_CHECK) {
                clock.prove(u64::from(EDGES_PER_CLOCK_CHECK));
                if clock.is_over() {
                    return None;
                }
            }
            let at = path.last().map_or(source, |&e| self.edges[e as usize].to);
            if at == sink {
                let amount = path
                    .iter()
                    .map(|&e| self.edges[e as usize].capacity)
                    .fold(most - pushed, i64::min);
                let mut blocked = path.len();
                for (depth, &e) in path.iter().enumerate().rev() {
                    self.edges[e as usize].capacity -= amount;
                    self.edges[e as usize ^ 1].capacity += amount;
                    if self.edges[e as usize].capacity == 0 {
                        blocked = depth;
                    }
                }
                pushed += amount;
                path.truncate(blocked);
                continue;
            }
            let mut found = None;
            while let Some(&e) = self.edges_of[at as usize].get(self.next[at as usize] as usize) {
                let Edge { to, capacity } = self.edges[e as usize];
                if capacity > 0 && self.level[to as usize] == self.level[at as usize] + 1 {
                    found = Some(e);
                    break;
                }
                self.next[at as usize] += 1;
            }
            match found {
                Some(e) => path.push(e),
                None => match path.pop() {
                    // A dead end: the edge into it leads nowhere.
                    Some(e) => self.next[self.edges[e as usize ^ 1].to as usize] += 1,
                    None => break,
                },
            }
        }
        Some(pushed)
    }
}
