//! Lowest-valley skyline: over the sections lies a skyline of what is stacked so far; its lowest
//! valley gets the best-ranked item whose life lies inside the valley, and where there is none the
//! valley is raised to its lower neighbour. The best-fit heuristic for strip packing (Burke,
//! Kendall and Whitwell, 2004) with fixed horizontal positions. Every item is placed once and every
//! raise merges two stretches, so there are O(n) moves.

use super::lives::{Lives, NONE, Waiting};
use super::sections::{Sections, Span};
use std::time::Instant;

/// How many items are placed between two looks at the clock.
const LOOK: usize = 4096;

/// What one pass needs, kept from one to the next.
pub(super) struct Skyline<'a> {
    sections: &'a Sections,
    lives: &'a Lives,
    waiting: Waiting,
    outline: Outline,
    /// When to give up.
    pub(super) deadline: Option<Instant>,
    /// Where the last pass has put each span.
    pub(super) offsets: Vec<u64>,
}

impl<'a> Skyline<'a> {
    pub(super) fn new(sections: &'a Sections, lives: &'a Lives) -> Self {
        let offsets = vec![0; sections.spans.len()];
        Skyline {
            sections,
            lives,
            waiting: Waiting::default(),
            outline: Outline::default(),
            deadline: None,
            offsets,
        }
    }

    /// Places the spans, earlier ones in `order` preferred, and returns the height. Nothing, if it
    /// would not stay below `limit`, or the time is over.
    pub(super) fn pack(&mut self, order: &[u32], limit: u64) -> Option<u64> {
        self.waiting.reset(self.lives, order);
        self.outline.reset(self.sections.count());
        let mut height = 0;
        let mut left = order.len();
        while left > 0 {
            let valley = self.outline.lowest()?;
            let rank = self
                .waiting
                .best_inside(self.lives, valley.start, valley.end);
            if rank == NONE {
                self.outline.raise(valley);
                continue;
            }
            let i = order[rank as usize];
            self.waiting.take(self.lives, i);
            let span = &self.sections.spans[i as usize];
            let offset = valley.height.next_multiple_of(span.align);
            self.offsets[i as usize] = offset;
            height = height.max(offset + span.bytes);
            if height >= limit {
                return None;
            }
            self.outline.stack(valley, span, offset + span.size);
            left -= 1;
            if left.is_multiple_of(LOOK)
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

/// A stretch of sections at one height.
#[derive(Clone, Copy, Debug)]
struct Stretch {
    start: u32,
    end: u32,
    height: u64,
}

/// What is known at a section.
#[derive(Clone, Copy, Debug, Default)]
struct Cell {
    /// The height of the stretch that starts here.
    height: u64,
    /// Where the stretch that starts here ends. 0: none starts here.
    end: u32,
    /// Where the stretch starts whose last section this is.
    start: u32,
}

/// Neighbouring stretches of different heights that together cover all sections.
#[derive(Clone, Debug, Default)]
struct Outline {
    cells: Vec<Cell>,
    /// All stretches above the lowest height; entries that describe no stretch any more are
    /// skipped.
    queue: Queue,
    /// The stretches at the lowest height, the leftmost last.
    lowest: Vec<Stretch>,
}

impl Outline {
    fn reset(&mut self, sections: usize) {
        self.cells.clear();
        self.cells.resize(sections, Cell::default());
        self.queue.clear();
        self.lowest.clear();
        if sections > 0 {
            let all = Stretch {
                start: 0,
                end: sections as u32,
                height: 0,
            };
            self.write(all);
            self.lowest.push(all);
        }
    }

    /// The lowest stretch, the leftmost of several; it is higher than none of its neighbours and
    /// equal to neither.
    fn lowest(&mut self) -> Option<Stretch> {
        loop {
            while let Some(stretch) = self.lowest.pop() {
                let cell = &self.cells[stretch.start as usize];
                if cell.end == stretch.end && cell.height == stretch.height {
                    return Some(stretch);
                }
            }
            if !self.queue.pop_lowest(&mut self.lowest) {
                return None;
            }
            self.lowest
                .sort_unstable_by_key(|stretch| std::cmp::Reverse(stretch.start));
        }
    }

    fn left_of(&self, start: u32) -> Option<Stretch> {
        let start = self.cells[start.checked_sub(1)? as usize].start;
        let cell = &self.cells[start as usize];
        Some(Stretch {
            start,
            end: cell.end,
            height: cell.height,
        })
    }

    fn right_of(&self, end: u32) -> Option<Stretch> {
        self.cells.get(end as usize).map(|cell| Stretch {
            start: end,
            end: cell.end,
            height: cell.height,
        })
    }

    fn write(&mut self, stretch: Stretch) {
        let cell = &mut self.cells[stretch.start as usize];
        (cell.end, cell.height) = (stretch.end, stretch.height);
        self.cells[stretch.end as usize - 1].start = stretch.start;
    }

    /// Makes a stretch part of the outline, joined with neighbours of its height.
    fn put(&mut self, mut stretch: Stretch) {
        if let Some(left) = self
            .left_of(stretch.start)
            .filter(|left| left.height == stretch.height)
        {
            self.cells[stretch.start as usize].end = 0;
            stretch.start = left.start;
        }
        if let Some(right) = self
            .right_of(stretch.end)
            .filter(|right| right.height == stretch.height)
        {
            self.cells[right.start as usize].end = 0;
            stretch.end = right.end;
        }
        self.write(stretch);
        self.queue.push(stretch);
    }

    /// Lays a span onto the valley that contains it.
    fn stack(&mut self, valley: Stretch, span: &Span, top: u64) {
        self.cells[valley.start as usize].end = 0;
        // The rests of the valley come first, so that the new stretch finds its true neighbours.
        let rests = [
            Stretch {
                start: span.end,
                ..valley
            },
            Stretch {
                end: span.start,
                ..valley
            },
        ];
        for rest in rests.into_iter().filter(|rest| rest.start < rest.end) {
            self.write(rest);
            self.lowest.push(rest);
        }
        self.put(Stretch {
            start: span.start,
            end: span.end,
            height: top,
        });
    }

    /// Lifts a valley to its lower neighbour. A valley without neighbours is all there is, and
    /// nothing fits it any more.
    fn raise(&mut self, valley: Stretch) {
        let neighbours = [self.left_of(valley.start), self.right_of(valley.end)];
        if let Some(height) = neighbours.into_iter().flatten().map(|n| n.height).min() {
            self.put(Stretch { height, ..valley });
        }
    }
}

/// Stretches by height, for a caller that never puts in anything lower than what it has taken out:
/// a radix heap (Ahuja, Mehlhorn, Orlin and Tarjan, 1990). Each stretch moves to ever smaller
/// buckets, and no two are ever compared.
#[derive(Clone, Debug)]
struct Queue {
    /// What was taken out last.
    last: u64,
    /// By the highest bit in which the height differs from `last`; in the first those that do not.
    buckets: [Vec<Stretch>; u64::BITS as usize + 1],
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

    fn push(&mut self, stretch: Stretch) {
        let bits = u64::BITS - (stretch.height ^ self.last).leading_zeros();
        self.buckets[bits as usize].push(stretch);
    }

    /// Moves all of the lowest height into `lowest`. False: there are none.
    fn pop_lowest(&mut self, lowest: &mut Vec<Stretch>) -> bool {
        if self.buckets[0].is_empty() {
            let Some(first) = self.buckets.iter().position(|bucket| !bucket.is_empty()) else {
                return false;
            };
            let mut bucket = std::mem::take(&mut self.buckets[first]);
            self.last = bucket
                .iter()
                .map(|stretch| stretch.height)
                .min()
                .unwrap_or(self.last);
            bucket.drain(..).for_each(|stretch| self.push(stretch));
            // Its memory serves again.
            self.buckets[first] = bucket;
        }
        lowest.append(&mut self.buckets[0]);
        true
    }
}
