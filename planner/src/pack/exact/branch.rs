//! Where to go on: the section with the fewest possibilities.

use super::state::State;
use std::ops::Range;

/// What can be done about a section.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Child {
    /// This item lies on the section's floor.
    Place(u32),
    /// Nothing does, and nothing below this offset.
    Raise(u64),
}

/// A section of a valley.
pub(super) struct Valley {
    pub(super) section: usize,
    /// The valley and its walls.
    pub(super) why: Range<u32>,
}

impl State {
    /// Whether there is something under an item at its lowest offset that it can rest upon. In a
    /// packing that nothing can be moved down in, everything rests on something.
    pub(super) fn is_supported(&self, i: u32) -> bool {
        let item = &self.items[i as usize];
        self.aligned || (item.start as usize..item.end as usize).any(|s| self.real[s])
    }

    /// The items that can lie on the floor of a section in a valley.
    pub(super) fn candidates(&self, section: usize) -> impl Iterator<Item = u32> {
        let floor = self.floor[section];
        self.waiting(section)
            .iter()
            .copied()
            .filter(move |&i| self.lowest[i as usize] == floor && self.is_supported(i))
    }

    /// The section of a valley between `from` and `to` with the fewest possibilities.
    pub(super) fn choose(&self, from: usize, to: usize) -> Valley {
        let mut best = Valley {
            section: from,
            why: 0..0,
        };
        let mut best_key = (u64::MAX, u64::MAX);
        let mut left = from;
        while left < to {
            let floor = self.floor[left];
            let mut right = left + 1;
            while right < to && self.floor[right] == floor {
                right += 1;
            }
            let valley = (left == from || self.floor[left - 1] > floor)
                && (right == to || self.floor[right] > floor);
            if valley {
                for s in left..right {
                    let count = self.candidates(s).count() as u64;
                    let slack = self.limit - floor - self.rest[s];
                    let key = (count + u64::from(slack > 0), floor);
                    if key < best_key {
                        best_key = key;
                        best = Valley {
                            section: s,
                            why: left.saturating_sub(1).max(from) as u32
                                ..(right + 1).min(to) as u32,
                        };
                    }
                }
            }
            left = right;
        }
        best
    }

    /// If nothing lies on the floor of a section in a valley, how far up nothing does: the lowest
    /// item of the section rests on another one, which is not of this section. Nothing, if there is
    /// none.
    pub(super) fn raised(&self, section: usize) -> Option<u64> {
        let floor = self.floor[section];
        let mut next: Option<u64> = None;
        for &i in self.waiting(section) {
            let item = self.items[i as usize];
            let lowest = self.lowest[i as usize];
            if lowest > floor {
                next = Some(next.map_or(lowest, |next| next.min(lowest)));
                continue;
            }
            for s in (item.start as usize..item.end as usize).filter(|&s| s != section) {
                for &j in self.waiting(s) {
                    let other = self.items[j as usize];
                    if (other.start as usize..other.end as usize).contains(&section) {
                        continue;
                    }
                    let top = (self.lowest[j as usize] + other.size).next_multiple_of(item.align);
                    next = Some(next.map_or(top, |next| next.min(top)));
                }
            }
        }
        next
    }
}
