//! The branching rule: the section with the fewest possibilities comes next.

use super::state::State;
use std::ops::Range;

/// A decision about a section.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Child {
    /// This item lies on the section's floor.
    Place(u32),
    /// No item lies on the floor, nor anywhere below this offset.
    Raise(u64),
}

/// A section of a valley.
pub(super) struct Valley {
    pub(super) section: usize,
    /// The valley and its walls.
    pub(super) why: Range<u32>,
}

impl State {
    /// Whether an item at its lowest offset has something to rest on. In a packing in which nothing
    /// can be moved down, everything rests on something.
    pub(super) fn is_supported(&self, i: u32) -> bool {
        let item = &self.items[i as usize];
        self.aligned || (item.start as usize..item.end as usize).any(|s| self.real[s])
    }

    /// The items that can lie on the floor of a section in a valley.
    pub(super) fn candidates(&self, section: usize) -> impl Iterator<Item = u32> {
        let floor = self.floor[section];
        self.unplaced(section)
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

    /// The offset below which nothing lies in a section of a valley if nothing lies on its floor:
    /// the lowest item of the section then rests on an item that is not in this section. `None` if
    /// there is no such item.
    pub(super) fn raised(&self, section: usize) -> Option<u64> {
        let floor = self.floor[section];
        let mut next: Option<u64> = None;
        for &i in self.unplaced(section) {
            let item = self.items[i as usize];
            let lowest = self.lowest[i as usize];
            if lowest > floor {
                next = Some(next.map_or(lowest, |next| next.min(lowest)));
                continue;
            }
            for s in (item.start as usize..item.end as usize).filter(|&s| s != section) {
                for &j in self.unplaced(s) {
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
