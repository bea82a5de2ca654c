//! Lowest-valley skyline: a skyline bounds the stack over the sections from above. Its lowest
//! valley gets the best-ranked item whose life lies inside the valley; if there is none, the valley
//! is raised to its lower neighbour. This is the best-fit heuristic for strip packing (Burke,
//! Kendall and Whitwell, 2004) with fixed horizontal positions. Every item is placed once and every
//! raise merges two segments, so there are O(n) moves.

use super::lives::{Lives, NONE, Unplaced};
use super::sections::{Sections, Span};
use std::time::Instant;

/// The number of items placed between two checks of the deadline.
const ITEMS_PER_CHECK: usize = 4096;

/// The state of a pass, whose memory is reused by the next.
pub(super) struct Skyline<'a> {
    sections: &'a Sections,
    lives: &'a Lives,
    unplaced: Unplaced,
    outline: Outline,
    /// The time at which a pass is abandoned.
    pub(super) deadline: Option<Instant>,
    /// The offset of each span in the last pass.
    pub(super) offsets: Vec<u64>,
}

impl<'a> Skyline<'a> {
    pub(super) fn new(sections: &'a Sections, lives: &'a Lives) -> Self {
        let offsets = vec![0; sections.spans.len()];
        Skyline {
            sections,
            lives,
            unplaced: Unplaced::default(),
            outline: Outline::default(),
            deadline: None,
            offsets,
        }
    }

    /// Places the spans, earlier ones in `order` preferred, and returns the height; `None` if it
    /// would not stay below `limit` or the time is over.
    pub(super) fn pack(&mut self, order: &[u32], limit: u64) -> Option<u64> {
        self.unplaced.reset(self.lives, order);
        self.outline.reset(self.sections.count());
        let mut height = 0;
        let mut left = order.len();
        while left > 0 {
            let valley = self.outline.lowest()?;
            let rank = self
                .unplaced
                .best_inside(self.lives, valley.start, valley.end);
            if rank == NONE {
                self.outline.raise(valley);
                continue;
            }
            let i = order[rank as usize];
            self.unplaced.take(self.lives, i);
            let span = &self.sections.spans[i as usize];
            let offset = valley.height.next_multiple_of(span.align);
            self.offsets[i as usize] = offset;
            height = height.max(offset + span.bytes);
            if height >= limit {
                return None;
            }
            self.outline.stack(valley, span, offset + span.size);
            left -= 1;
            if left.is_multiple_of(ITEMS_PER_CHECK)
                && self
                    .deadline
                    .is_some_and(|deadline| Instant::now() >= deadline)
            {
                return None;
            }
        }
        Some(height)
    }
}

/// A range of sections at one height.
#[derive(Clone, Copy, Debug)]
struct Segment {
    start: u32,
    end: u32,
    height: u64,
}

/// The skyline's data at a section.
#[derive(Clone, Copy, Debug, Default)]
struct Cell {
    /// The height of the segment that starts here.
    height: u64,
    /// The end of the segment that starts here; 0 if none does.
    end: u32,
    /// The start of the segment whose last section this is.
    start: u32,
}

/// Neighbouring segments of different heights that together cover all sections.
#[derive(Clone, Debug, Default)]
struct Outline {
    cells: Vec<Cell>,
    /// All segments above the lowest height; entries that no longer describe a segment are skipped.
    queue: Queue,
    /// The segments at the lowest height, the leftmost last.
    lowest: Vec<Segment>,
}

impl Outline {
    fn reset(&mut self, sections: usize) {
        self.cells.clear();
        self.cells.resize(sections, Cell::default());
        self.queue.clear();
        self.lowest.clear();
        if sections > 0 {
            let all = Segment {
                start: 0,
                end: sections as u32,
                height: 0,
            };
            self.write(all);
            self.lowest.push(all);
        }
    }

    /// The lowest segment, the leftmost of several. None of its neighbours is lower or equally
    /// high.
    fn lowest(&mut self) -> Option<Segment> {
        loop {
            while let Some(segment) = self.lowest.pop() {
                let cell = &self.cells[segment.start as usize];
                if cell.end == segment.end && cell.height == segment.height {
                    return Some(segment);
                }
            }
            if !self.queue.pop_lowest(&mut self.lowest) {
                return None;
            }
            self.lowest
                .sort_unstable_by_key(|segment| std::cmp::Reverse(segment.start));
        }
    }

    fn left_of(&self, start: u32) -> Option<Segment> {
        let start = self.cells[start.checked_sub(1)? as usize].start;
        let cell = &self.cells[start as usize];
        Some(Segment {
            start,
            end: cell.end,
            height: cell.height,
        })
    }

    fn right_of(&self, end: u32) -> Option<Segment> {
        self.cells.get(end as usize).map(|cell| Segment {
            start: end,
            end: cell.end,
            height: cell.height,
        })
    }

    fn write(&mut self, segment: Segment) {
        let cell = &mut self.cells[segment.start as usize];
        (cell.end, cell.height) = (segment.end, segment.height);
        self.cells[segment.end as usize - 1].start = segment.start;
    }

    /// Adds a segment to the skyline, merged with neighbours of its height.
    fn put(&mut self, mut segment: Segment) {
        if let Some(left) = self
            .left_of(segment.start)
            .filter(|left| left.height == segment.height)
        {
            self.cells[segment.start as usize].end = 0;
            segment.start = left.start;
        }
        if let Some(right) = self
            .right_of(segment.end)
            .filter(|right| right.height == segment.height)
        {
            self.cells[right.start as usize].end = 0;
            segment.end = right.end;
        }
        self.write(segment);
        self.queue.push(segment);
    }

    /// Stacks a span onto the valley that contains it.
    fn stack(&mut self, valley: Segment, span: &Span, top: u64) {
        self.cells[valley.start as usize].end = 0;
        // The rests of the valley come first, so that the new segment finds its true neighbours.
        let rests = [
            Segment {
                start: span.end,
                ..valley
            },
            Segment {
                end: span.start,
                ..valley
            },
        ];
        for rest in rests.into_iter().filter(|rest| rest.start < rest.end) {
            self.write(rest);
            self.lowest.push(rest);
        }
        self.put(Segment {
            start: span.start,
            end: span.end,
            height: top,
        });
    }

    /// Raises a valley to its lower neighbour. A valley without neighbours covers all sections, and
    /// nothing fits into it any more.
    fn raise(&mut self, valley: Segment) {
        let neighbours = [self.left_of(valley.start), self.right_of(valley.end)];
        if let Some(height) = neighbours.into_iter().flatten().map(|n| n.height).min() {
            self.put(Segment { height, ..valley });
        }
    }
}

/// A priority queue of segments by height, for a caller that never inserts a height below the last
/// one removed: a radix heap (Ahuja, Mehlhorn, Orlin and Tarjan, 1990). Each segment moves to ever
/// smaller buckets, and no two are ever compared.
#[derive(Clone, Debug)]
struct Queue {
    /// The height removed last.
    last: u64,
    /// Segments by the highest bit in which their height differs from `last`; those that do not
    /// differ are in the first bucket.
    buckets: [Vec<Segment>; u64::BITS as usize + 1],
}

impl Default for Queue {
    fn default() -> Self {
        Queue {
            last: 0,
            buckets: std::array::from_fn(|_| Vec::new()),
        }
    }
}

impl Queue {
    fn clear(&mut self) {
        self.last = 0;
        self.buckets.iter_mut().for_each(Vec::clear);
    }

    fn push(&mut self, segment: Segment) {
        let bits = u64::BITS - (segment.height ^ self.last).leading_zeros();
        self.buckets[bits as usize].push(segment);
    }

    /// Moves all segments of the lowest height into `lowest`; false if there are none.
    fn pop_lowest(&mut self, lowest: &mut Vec<Segment>) -> bool {
        if self.buckets[0].is_empty() {
            let Some(first) = self.buckets.iter().position(|bucket| !bucket.is_empty()) else {
                return false;
            };
            let mut bucket = std::mem::take(&mut self.buckets[first]);
            self.last = bucket
                .iter()
                .map(|segment| segment.height)
                .min()
                .unwrap_or(self.last);
            bucket.drain(..).for_each(|segment| self.push(segment));
            // Reuses its memory.
            self.buckets[first] = bucket;
        }
        lowest.append(&mut self.buckets[0]);
        true
    }
}
