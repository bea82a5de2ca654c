//! Lowest-valley skyline: over the sections lies a skyline of what is stacked so far; its lowest valley gets the
//! best-ranked item whose life lies inside the valley, and where there is none the valley is raised to its lower
//! neighbour. The best-fit heuristic for strip packing (Burke, Kendall and Whitwell, 2004) with fixed horizontal
//! positions. Every item is placed once and every raise merges two stretches, so there are O(n) moves.

use super::Found;
use super::sections::{Sections, Span};
use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// Places the spans, earlier ones in `order` preferred. Nothing, if the height would not stay below `limit`.
pub(super) fn pack(sections: &Sections, order: &[u32], limit: u64) -> Option<Found> {
    let spans = &sections.spans;
    let mut waiting = Waiting::new(spans, order);
    let mut skyline = Skyline::new(sections.count());
    let mut found = Found { offsets: vec![0; spans.len()], height: 0 };
    let mut left = spans.len();
    while left > 0 {
        let valley = skyline.lowest()?;
        match waiting.take_inside(valley.start, valley.end) {
            Some(i) => {
                let span = &spans[i as usize];
                let offset = valley.height.next_multiple_of(span.align);
                let top = offset + span.size;
                found.offsets[i as usize] = offset;
                found.height = found.height.max(top);
                if found.height >= limit {
                    return None;
                }
                skyline.stack(valley, span, top);
                left -= 1;
            }
            None => skyline.raise(valley),
        }
    }
    Some(found)
}

/// A stretch of sections at one height.
#[derive(Clone, Copy)]
struct Stretch {
    start: u32,
    end: u32,
    height: u64,
}

/// Neighbouring stretches of different heights that together cover all sections.
struct Skyline {
    sections: u32,
    /// For each section that starts a stretch: where it ends, and its height.
    end: Vec<u32>,
    height: Vec<u64>,
    /// For each section that ends a stretch (the last one in it): where the stretch starts.
    start: Vec<u32>,
    /// Whether a stretch starts here.
    starts: Vec<bool>,
    /// (height, start, end); entries that describe no stretch any more are skipped.
    lowest: BinaryHeap<Reverse<(u64, u32, u32)>>,
}

impl Skyline {
    fn new(sections: usize) -> Self {
        let mut skyline = Skyline {
            sections: sections as u32,
            end: vec![0; sections],
            height: vec![0; sections],
            start: vec![0; sections],
            starts: vec![false; sections],
            lowest: BinaryHeap::new(),
        };
        if sections > 0 {
            skyline.put(Stretch { start: 0, end: sections as u32, height: 0 });
        }
        skyline
    }

    /// The lowest stretch, the leftmost of several; it is higher than none of its neighbours and equal to neither.
    fn lowest(&mut self) -> Option<Stretch> {
        while let Some(Reverse((height, start, end))) = self.lowest.pop() {
            let at = start as usize;
            if self.starts[at] && self.end[at] == end && self.height[at] == height {
                return Some(Stretch { start, end, height });
            }
        }
        None
    }

    fn left_of(&self, start: u32) -> Option<Stretch> {
        let start = self.start[start.checked_sub(1)? as usize];
        Some(Stretch { start, end: self.end[start as usize], height: self.height[start as usize] })
    }

    fn right_of(&self, end: u32) -> Option<Stretch> {
        let start = end as usize;
        (end < self.sections).then(|| Stretch { start: end, end: self.end[start], height: self.height[start] })
    }

    /// Makes a stretch part of the skyline, joined with neighbours of its height.
    fn put(&mut self, mut stretch: Stretch) {
        if let Some(left) = self.left_of(stretch.start).filter(|left| left.height == stretch.height) {
            self.starts[stretch.start as usize] = false;
            stretch.start = left.start;
        }
        if let Some(right) = self.right_of(stretch.end).filter(|right| right.height == stretch.height) {
            self.starts[right.start as usize] = false;
            stretch.end = right.end;
        }
        let Stretch { start, end, height } = stretch;
        self.starts[start as usize] = true;
        self.end[start as usize] = end;
        self.height[start as usize] = height;
        self.start[end as usize - 1] = start;
        self.lowest.push(Reverse((height, start, end)));
    }

    /// Lays a span onto the valley that contains it.
    fn stack(&mut self, valley: Stretch, span: &Span, top: u64) {
        self.starts[valley.start as usize] = false;
        // The rests of the valley come first, so that the new stretch finds its true neighbours.
        let rests = [Stretch { end: span.start, ..valley }, Stretch { start: span.end, ..valley }];
        for rest in rests.into_iter().filter(|rest| rest.start < rest.end) {
            self.starts[rest.start as usize] = true;
            self.end[rest.start as usize] = rest.end;
            self.height[rest.start as usize] = rest.height;
            self.start[rest.end as usize - 1] = rest.start;
            self.lowest.push(Reverse((rest.height, rest.start, rest.end)));
        }
        self.put(Stretch { start: span.start, end: span.end, height: top });
    }

    /// Lifts a valley to its lower neighbour. A valley without neighbours is all there is, and nothing fits it any more.
    fn raise(&mut self, valley: Stretch) {
        let neighbours = [self.left_of(valley.start), self.right_of(valley.end)];
        if let Some(height) = neighbours.into_iter().flatten().map(|n| n.height).min() {
            self.put(Stretch { height, ..valley });
        }
    }
}

/// The items not yet placed: a tree over their starts whose nodes know the earliest end and the best rank below, so that
/// the best item inside a stretch is found by looking into few nodes.
struct Waiting {
    leaves: usize,
    /// For each section: the first leaf whose item starts there or later.
    first: Vec<u32>,
    earliest_end: Vec<u32>,
    best_rank: Vec<u32>,
    /// Leaf → span.
    span: Vec<u32>,
}

const NONE: u32 = u32::MAX;

impl Waiting {
    fn new(spans: &[Span], order: &[u32]) -> Self {
        let mut by_start: Vec<u32> = (0..spans.len() as u32).collect();
        by_start.sort_by_key(|&i| (spans[i as usize].start, spans[i as usize].end));
        let sections = spans.iter().map(|span| span.end).max().unwrap_or(0);
        let leaves = spans.len().next_power_of_two();
        let mut rank = vec![NONE; spans.len()];
        (0u32..).zip(order).for_each(|(place, &i)| rank[i as usize] = place);
        let mut waiting = Waiting {
            leaves,
            first: Vec::with_capacity(sections as usize + 1),
            earliest_end: vec![NONE; 2 * leaves],
            best_rank: vec![NONE; 2 * leaves],
            span: by_start,
        };
        let mut leaf = 0;
        for section in 0..=sections {
            while waiting.span.get(leaf).is_some_and(|&i| spans[i as usize].start < section) {
                leaf += 1;
            }
            waiting.first.push(leaf as u32);
        }
        for (leaf, &i) in waiting.span.iter().enumerate() {
            waiting.earliest_end[leaves + leaf] = spans[i as usize].end;
            waiting.best_rank[leaves + leaf] = rank[i as usize];
        }
        (1..leaves).rev().for_each(|node| waiting.refresh(node));
        waiting
    }

    fn refresh(&mut self, node: usize) {
        self.earliest_end[node] = self.earliest_end[2 * node].min(self.earliest_end[2 * node + 1]);
        self.best_rank[node] = self.best_rank[2 * node].min(self.best_rank[2 * node + 1]);
    }

    /// Removes and returns the best-ranked item whose life lies in the sections `start..end`.
    fn take_inside(&mut self, start: u32, end: u32) -> Option<u32> {
        let leaves = self.first[start as usize] as usize..self.first[end as usize] as usize;
        let mut best = (NONE, 0);
        self.search(1, 0..self.leaves, &leaves, end, &mut best);
        let (rank, leaf) = best;
        if rank == NONE {
            return None;
        }
        let mut node = self.leaves + leaf;
        self.earliest_end[node] = NONE;
        self.best_rank[node] = NONE;
        while node > 1 {
            node /= 2;
            self.refresh(node);
        }
        Some(self.span[leaf])
    }

    fn search(&self, node: usize, below: std::ops::Range<usize>, leaves: &std::ops::Range<usize>, end: u32, best: &mut (u32, usize)) {
        let apart = below.end <= leaves.start || leaves.end <= below.start;
        if apart || self.earliest_end[node] > end || self.best_rank[node] >= best.0 {
            return;
        }
        if node >= self.leaves {
            *best = (self.best_rank[node], below.start);
            return;
        }
        let middle = below.start.midpoint(below.end);
        let mut halves = [(2 * node, below.start..middle), (2 * node + 1, middle..below.end)];
        // The half with the better item first: it may spare the other.
        if self.best_rank[2 * node + 1] < self.best_rank[2 * node] {
            halves.swap(0, 1);
        }
        for (child, below) in halves {
            self.search(child, below, leaves, end, best);
        }
    }
}
