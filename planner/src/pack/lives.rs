//! The lives of all spans as points (start, end) in a plane, divided into boxes once and queried
//! often: a k-d tree (Bentley, 1975). Both queries of the packers are rectangles in that plane: the
//! lives inside an interval of time, and the lives that overlap it. A tree over starts alone would
//! answer neither in bounded time, because long lives that begin inside the interval and end beyond
//! it hide the short ones.

use super::sections::Sections;
use crate::dag::relations::count_looks;

/// The number of spans per leaf: few enough to be scanned, and enough to keep the inner nodes in
/// the nearest cache.
const LEAF: usize = 8;

/// The most spans starting in an interval that are scanned rather than searched for in the tree.
const SCAN_MAX: usize = 128;

/// The index of no span: no unplaced span here, or none found.
pub(super) const NONE: u32 = u32::MAX;

/// The smallest rectangle around the lives below a node.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bounds {
    first_start: u32,
    last_start: u32,
    first_end: u32,
    last_end: u32,
}

impl Bounds {
    const EMPTY: Bounds = Bounds {
        first_start: u32::MAX,
        last_start: 0,
        first_end: u32::MAX,
        last_end: 0,
    };

    fn with(self, other: Bounds) -> Bounds {
        Bounds {
            first_start: self.first_start.min(other.first_start),
            last_start: self.last_start.max(other.last_start),
            first_end: self.first_end.min(other.first_end),
            last_end: self.last_end.max(other.last_end),
        }
    }

    /// Whether each life below lies in `start..end`.
    fn all_inside(&self, start: u32, end: u32) -> bool {
        self.first_start >= start && self.last_end <= end
    }

    /// Whether a life below may lie in `start..end`.
    fn any_inside(&self, start: u32, end: u32) -> bool {
        self.last_start >= start && self.first_end <= end
    }

    /// Whether a life below may have a section in common with `start..end`.
    fn any_across(&self, start: u32, end: u32) -> bool {
        self.first_start < end && self.last_end > start
    }
}

/// A life at its place in the tree.
#[derive(Clone, Copy, Debug)]
pub(super) struct Life {
    pub(super) start: u32,
    pub(super) end: u32,
    pub(super) span: u32,
}

/// The tree: nodes numbered as in a heap, the root is 1. It holds only the shape, which never
/// changes.
#[derive(Clone, Debug)]
pub(super) struct Lives {
    /// The number of leaves, as a power of two.
    depth: u32,
    bounds: Vec<Bounds>,
    /// The lives, leaf after leaf.
    lives: Vec<Life>,
    /// Span → its index in `lives`.
    slots: Vec<u32>,
    /// Section → the number of spans that start before it: the index of its own first one in
    /// `ends`.
    first: Vec<u32>,
    /// The ends of the spans, by start.
    ends: Vec<u32>,
    /// Span → its index in `ends`.
    places: Vec<u32>,
}

impl Lives {
    pub(super) fn new(sections: &Sections) -> Self {
        let spans = &sections.spans;
        let first = sections.starts_before();
        let (mut next, mut ends, mut places) = (
            first.clone(),
            vec![0; spans.len()],
            Vec::with_capacity(spans.len()),
        );
        for span in spans {
            let next = &mut next[span.start as usize];
            places.push(*next);
            ends[*next as usize] = span.end;
            *next += 1;
        }
        let depth = spans
            .len()
            .div_ceil(LEAF)
            .next_power_of_two()
            .trailing_zeros();
        let lives = (0u32..).zip(spans).map(|(span, it)| Life {
            start: it.start,
            end: it.end,
            span,
        });
        let (bounds, slots) = (vec![Bounds::EMPTY; 2 << depth], vec![0; spans.len()]);
        let mut tree = Lives {
            depth,
            bounds,
            lives: lives.collect(),
            slots,
            first,
            ends,
            places,
        };
        tree.split(1);
        for (slot, life) in (0u32..).zip(&tree.lives) {
            tree.slots[life.span as usize] = slot;
        }
        tree
    }

    /// Sorts the lives below a node into its halves, across the longer side of its bounds.
    fn split(&mut self, node: usize) {
        let below = self.below(node);
        let point = |life: &Life| Bounds {
            first_start: life.start,
            last_start: life.start,
            first_end: life.end,
            last_end: life.end,
        };
        let bounds = self.lives[below.clone()]
            .iter()
            .map(point)
            .fold(Bounds::EMPTY, Bounds::with);
        self.bounds[node] = bounds;
        if self.is_leaf(node) {
            return;
        }
        let middle = self.below(2 * node).len();
        let lives = &mut self.lives[below];
        if bounds.last_start - bounds.first_start >= bounds.last_end - bounds.first_end {
            lives.select_nth_unstable_by_key(middle, |life| (life.start, life.end, life.span));
        } else {
            lives.select_nth_unstable_by_key(middle, |life| (life.end, life.start, life.span));
        }
        self.split(2 * node);
        self.split(2 * node + 1);
    }

    fn is_leaf(&self, node: usize) -> bool {
        node >> self.depth != 0
    }

    /// The slots below a node: those of the whole tree in equal shares at each level.
    fn below(&self, node: usize) -> std::ops::Range<usize> {
        let level = node.ilog2();
        let at = node - (1 << level);
        let share = |at: usize| ((at as u128 * self.lives.len() as u128) >> level) as usize;
        share(at)..share(at + 1)
    }

    /// The leaf that a slot belongs to.
    fn leaf(&self, slot: usize) -> usize {
        // The last leaf that begins at the slot or before.
        let at =
            (((slot as u128 + 1) << self.depth).div_ceil(self.lives.len() as u128) - 1) as usize;
        (1 << self.depth) + at
    }
}

/// The unplaced spans, each with a rank: finds the best rank inside an interval.
#[derive(Clone, Debug, Default)]
pub(super) struct Unplaced {
    /// Slot → rank, [`NONE`] once it has been placed.
    ranks: Vec<u32>,
    /// Node → the best rank below.
    best: Vec<u32>,
    /// The ranks by start, as in [`Lives::ends`].
    by_start: Vec<u32>,
    todo: Vec<u32>,
}

impl Unplaced {
    /// Makes all spans in `order` unplaced; the first has the best rank.
    pub(super) fn reset(&mut self, lives: &Lives, order: &[u32]) {
        self.ranks.clear();
        self.ranks.resize(lives.lives.len(), NONE);
        self.by_start.clear();
        self.by_start.resize(lives.lives.len(), NONE);
        for (rank, &span) in (0u32..).zip(order) {
            self.ranks[lives.slots[span as usize] as usize] = rank;
            self.by_start[lives.places[span as usize] as usize] = rank;
        }
        self.best.clear();
        self.best.resize(2 << lives.depth, NONE);
        for node in (1..2 << lives.depth).rev() {
            self.best[node] = self.best_below(lives, node);
        }
    }

    fn best_below(&self, lives: &Lives, node: usize) -> u32 {
        if lives.is_leaf(node) {
            self.ranks[lives.below(node)]
                .iter()
                .copied()
                .min()
                .unwrap_or(NONE)
        } else {
            self.best[2 * node].min(self.best[2 * node + 1])
        }
    }

    /// The best rank of the spans whose life lies in `start..end`; [`NONE`] if there is none.
    pub(super) fn best_inside(&mut self, lives: &Lives, start: u32, end: u32) -> u32 {
        let mut best = NONE;
        let starts = lives.first[start as usize] as usize..lives.first[end as usize] as usize;
        count_looks(1);
        if starts.len() <= SCAN_MAX {
            for (&rank, &its_end) in self.by_start[starts.clone()]
                .iter()
                .zip(&lives.ends[starts])
            {
                best = best.min(if its_end <= end { rank } else { NONE });
            }
            return best;
        }
        self.todo.clear();
        self.todo.push(1);
        while let Some(node) = self.todo.pop() {
            let node = node as usize;
            let bounds = &lives.bounds[node];
            count_looks(1);
            if self.best[node] >= best || !bounds.any_inside(start, end) {
                continue;
            }
            if bounds.all_inside(start, end) {
                best = self.best[node];
            } else if lives.is_leaf(node) {
                for slot in lives.below(node) {
                    let life = &lives.lives[slot];
                    if self.ranks[slot] < best && life.start >= start && life.end <= end {
                        best = self.ranks[slot];
                    }
                }
            } else {
                // The better half first, because the other may then be skipped.
                let left = 2 * node as u32;
                let better = left + u32::from(self.best[2 * node + 1] < self.best[2 * node]);
                self.todo.extend([better ^ 1, better]);
            }
        }
        best
    }

    /// Marks a span as placed.
    pub(super) fn take(&mut self, lives: &Lives, span: u32) {
        let slot = lives.slots[span as usize] as usize;
        self.ranks[slot] = NONE;
        self.by_start[lives.places[span as usize] as usize] = NONE;
        let mut node = lives.leaf(slot);
        while node > 0 {
            let best = self.best_below(lives, node);
            if self.best[node] == best {
                break;
            }
            self.best[node] = best;
            node /= 2;
        }
    }
}

/// The placed spans: finds those that overlap an interval.
#[derive(Clone, Debug)]
pub(super) struct Index {
    /// Node → the number of placed spans below.
    count: Vec<u32>,
    /// Slot → whether it is placed.
    placed: Vec<bool>,
    todo: Vec<u32>,
}

impl Index {
    /// No span is placed.
    pub(super) fn new(lives: &Lives) -> Self {
        Index {
            count: vec![0; 2 << lives.depth],
            placed: vec![false; lives.lives.len()],
            todo: Vec::new(),
        }
    }

    pub(super) fn insert(&mut self, lives: &Lives, span: u32) {
        let slot = lives.slots[span as usize] as usize;
        self.placed[slot] = true;
        let mut node = lives.leaf(slot);
        while node > 0 {
            self.count[node] += 1;
            node /= 2;
        }
    }

    /// Calls `each` with all placed spans that have a section in common with `start..end`.
    pub(super) fn across(
        &mut self,
        lives: &Lives,
        start: u32,
        end: u32,
        mut each: impl FnMut(u32),
    ) {
        self.todo.clear();
        self.todo.push(1);
        while let Some(node) = self.todo.pop() {
            let at = node as usize;
            count_looks(1);
            if self.count[at] == 0 || !lives.bounds[at].any_across(start, end) {
                continue;
            }
            if lives.is_leaf(at) {
                for slot in lives.below(at) {
                    let life = &lives.lives[slot];
                    if self.placed[slot] && life.start < end && life.end > start {
                        each(life.span);
                    }
                }
            } else {
                self.todo.extend([2 * node + 1, 2 * node]);
            }
        }
    }
}
