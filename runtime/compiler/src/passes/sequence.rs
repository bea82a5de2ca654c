//! An order of vertices in which every edge leads forward, kept while edges are added and vertices
//! are joined.
//!
//! Whether a path leads from one vertex to another is answered by the order alone if the other
//! comes first; otherwise by a bidirectional search that stays between the two in the order (Pearce
//! and Kelly 2007; Bender, Fineman, Gilbert and Tarjan 2016 search from both ends). It costs as
//! much as the smaller of the two halves; most queries are about neighbours.
//!
//! Positions are labels with gaps between them, so that a vertex moves without moving others.

/// Vertices and the edges between them.
pub(super) trait Ways {
    /// How much looking at the edges of a vertex costs, of those that lead away from it or,
    /// backward, to it.
    fn degree(&self, vertex: u32, backward: bool) -> usize;

    /// Calls `visit` with the other end of each such edge; an edge may come more than once, and
    /// from a vertex to itself.
    fn each(&self, vertex: u32, backward: bool, visit: &mut dyn FnMut(u32));
}

/// The order.
#[derive(Clone, Debug, Default)]
pub(super) struct Sequence {
    labels: Vec<u64>,
    /// The vertices before and after each, in a ring that a vertex of none closes.
    beside: Vec<[u32; 2]>,
    /// The searches that have seen a vertex last, from each end.
    seen: Vec<[u32; 2]>,
    searches: u32,
    /// Edges that searches have looked at.
    pub steps: u64,
}

/// The result of a search between two vertices.
enum Found {
    /// A way from the first to the second.
    Way,
    /// None; these, all that the first leads to, are before the second.
    Behind(Vec<u32>),
    /// None; these, all that lead to the second, are after the first.
    Before(Vec<u32>),
}

impl Sequence {
    /// All vertices, from 0 on, in an order in which every edge leads forward.
    pub fn of(order: impl Iterator<Item = u32>) -> Self {
        let mut order: Vec<u32> = order.collect();
        let count = order.len();
        // The ring is closed by one more.
        order.push(count as u32);
        let mut beside = vec![[0; 2]; count + 1];
        for (at, &v) in order.iter().enumerate() {
            beside[v as usize] = [
                order[(at + count) % (count + 1)],
                order[(at + 1) % (count + 1)],
            ];
        }
        let mut new = Sequence {
            labels: vec![0; count + 1],
            beside,
            seen: vec![[0; 2]; count],
            ..Sequence::default()
        };
        new.relabel();
        new
    }

    /// Whether a way leads from one vertex to another.
    pub fn leads(&mut self, ways: &impl Ways, from: u32, to: u32) -> bool {
        let later = self.labels[from as usize] >= self.labels[to as usize];
        !later && matches!(self.search(ways, from, to, false), Found::Way)
    }

    /// Joins two vertices between which no way leads except for edges from the one to the other,
    /// and says whose place they have. Afterwards [`Ways`] has to give the edges of both for that
    /// one.
    pub fn join(&mut self, ways: &impl Ways, a: u32, b: u32) -> u32 {
        let (low, high) = if self.labels[a as usize] < self.labels[b as usize] {
            (a, b)
        } else {
            (b, a)
        };
        match self.search(ways, low, high, true) {
            Found::Behind(them) => {
                self.place(them, high);
                high
            }
            Found::Before(them) => {
                self.place(them, self.beside[low as usize][0]);
                low
            }
            Found::Way => {
                debug_assert!(false, "a circle");
                high
            }
        }
    }

    /// Makes the order one for an edge that is about to be added; none if it would close a cycle,
    /// and the order stays as it is.
    pub fn connect(&mut self, ways: &impl Ways, from: u32, to: u32) -> bool {
        if self.labels[from as usize] < self.labels[to as usize] {
            return true;
        }
        if from == to {
            return false;
        }
        match self.search(ways, to, from, false) {
            Found::Behind(mut them) => {
                them.push(to);
                self.place(them, from);
                true
            }
            Found::Before(mut them) => {
                them.push(from);
                self.place(them, self.beside[to as usize][0]);
                true
            }
            Found::Way => false,
        }
    }

    /// Looks from both ends in turns, so that neither costs much more than the other. Of vertices
    /// to be `joined` the edges from one to the other do not count.
    fn search(&mut self, ways: &impl Ways, low: u32, high: u32, joined: bool) -> Found {
        self.searches += 1;
        let number = self.searches;
        let Sequence {
            labels,
            seen,
            steps,
            ..
        } = self;
        let ends = [low, high];
        let between = labels[low as usize]..=labels[high as usize];
        let mut lists = [vec![low], vec![high]];
        let (mut at, mut cost, mut met) = ([0usize; 2], [0usize; 2], false);
        while !met {
            if at[0] == lists[0].len() {
                return Found::Behind(lists[0].split_off(1));
            }
            if at[1] == lists[1].len() {
                return Found::Before(lists[1].split_off(1));
            }
            let vertices = [0, 1].map(|side| lists[side][at[side]]);
            let next =
                [0, 1].map(|side: usize| cost[side] + 1 + ways.degree(vertices[side], side == 1));
            let side = usize::from(next[1] < next[0]);
            (at[side], cost[side]) = (at[side] + 1, next[side]);
            let (vertex, list) = (vertices[side], &mut lists[side]);
            ways.each(vertex, side == 1, &mut |other| {
                *steps += 1;
                crate::graph::count_a_look();
                if other == ends[1 - side] {
                    met |= !(joined && vertex == ends[side]);
                } else if other != ends[side] && between.contains(&labels[other as usize]) {
                    let seen = &mut seen[other as usize];
                    met |= seen[1 - side] == number;
                    if seen[side] != number {
                        seen[side] = number;
                        list.push(other);
                    }
                }
            });
        }
        Found::Way
    }

    /// Moves vertices after another in the order they have.
    fn place(&mut self, mut vertices: Vec<u32>, mut behind: u32) {
        vertices.sort_unstable_by_key(|&v| self.labels[v as usize]);
        for &v in &vertices {
            let [before, after] = self.beside[v as usize];
            self.beside[before as usize][1] = after;
            self.beside[after as usize][0] = before;
        }
        for v in vertices {
            let after = self.beside[behind as usize][1];
            self.beside[v as usize] = [behind, after];
            self.beside[behind as usize][1] = v;
            self.beside[after as usize][0] = v;
            let (low, high) = (self.labels[behind as usize], self.upper(after));
            if high - low > 1 {
                self.labels[v as usize] = low + (high - low) / 2;
            } else {
                self.relabel();
            }
            behind = v;
        }
    }

    /// The label of the vertex that comes next, which at the end is the largest there can be.
    fn upper(&self, vertex: u32) -> u64 {
        if vertex as usize + 1 == self.labels.len() {
            u64::MAX
        } else {
            self.labels[vertex as usize]
        }
    }

    /// Gives all vertices labels with equal gaps.
    fn relabel(&mut self) {
        let end = self.beside.len() as u32 - 1;
        let gap = u64::MAX / self.labels.len() as u64;
        let (mut at, mut label) = (end, 0);
        loop {
            self.labels[at as usize] = label;
            label += gap;
            at = self.beside[at as usize][1];
            if at == end {
                break;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Edges as they were added, and for each vertex the one that it was joined to.
    #[derive(Default)]
    struct Edges {
        of: Vec<Vec<u32>>,
        to: Vec<u32>,
    }

    impl Edges {
        fn root(&self, mut v: u32) -> u32 {
            while self.to[v as usize] != v {
                v = self.to[v as usize];
            }
            v
        }

        fn leads(&self, from: u32, to: u32, direct: bool) -> bool {
            let mut seen = vec![false; self.of.len()];
            let mut stack = vec![from];
            while let Some(v) = stack.pop() {
                let mut others = Vec::new();
                self.each(v, false, &mut |other| others.push(other));
                for other in others
                    .into_iter()
                    .filter(|other| *other != v && (direct || (v, *other) != (from, to)))
                {
                    if other == to {
                        return true;
                    }
                    if !std::mem::replace(&mut seen[other as usize], true) {
                        stack.push(other);
                    }
                }
            }
            false
        }
    }

    impl Ways for Edges {
        fn degree(&self, _: u32, _: bool) -> usize {
            1
        }

        fn each(&self, vertex: u32, backward: bool, visit: &mut dyn FnMut(u32)) {
            for (from, list) in self.of.iter().enumerate() {
                for &to in list {
                    let (own, other) = if backward {
                        (to, from as u32)
                    } else {
                        (from as u32, to)
                    };
                    if self.root(own) == vertex {
                        visit(self.root(other));
                    }
                }
            }
        }
    }

    #[test]
    fn reachability_and_order_match_a_traversal_over_random_edges_and_merges() {
        let mut state = 1u64;
        let mut draw = |n: u32| {
            state = state
                .wrapping_mul(6364136223846793005)
                .wrapping_add(1442695040888963407);
            ((state >> 33) % u64::from(n)) as u32
        };
        for _ in 0..200 {
            let n = 3 + draw(12);
            let mut edges = Edges {
                of: vec![Vec::new(); n as usize],
                to: (0..n).collect(),
            };
            let mut order = Sequence::of(0..n);
            for _ in 0..40 {
                let (a, b) = (edges.root(draw(n)), edges.root(draw(n)));
                assert_eq!(order.leads(&edges, a, b), a != b && edges.leads(a, b, true));
                if a == b {
                    continue;
                }
                if draw(4) == 0 && !edges.leads(a, b, false) && !edges.leads(b, a, false) {
                    let kept = order.join(&edges, a, b);
                    edges.to[(a + b - kept) as usize] = kept;
                } else {
                    let circle = edges.leads(b, a, true);
                    assert_eq!(order.connect(&edges, a, b), !circle);
                    if !circle {
                        edges.of[a as usize].push(b);
                    }
                }
                for (from, list) in edges.of.iter().enumerate() {
                    for &to in list {
                        let (from, to) = (edges.root(from as u32), edges.root(to));
                        assert!(
                            from == to || order.labels[from as usize] < order.labels[to as usize]
                        );
                    }
                }
            }
        }
    }

    /// Always between the same two: the gap is used up again and again.
    #[test]
    fn positions_are_found_where_no_gap_is_left() {
        let n = 300;
        let mut edges = Edges {
            of: vec![Vec::new(); n as usize],
            to: (0..n).collect(),
        };
        let mut order = Sequence::of(0..n);
        for at in (1..n).rev().step_by(2) {
            assert!(order.connect(&edges, at, 0));
            edges.of[at as usize].push(0);
            assert!(order.labels[at as usize] < order.labels[0]);
        }
    }
}
