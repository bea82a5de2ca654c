//! The offsets at which stacks without slack can have joints.

use super::state::State;

/// The most units of height for which sums are kept as bits.
const UNITS_MAX: u64 = 4096;

/// The most items for which the sums of a higher section are listed: there are two to the power of
/// this many.
const LISTED_MAX: usize = 10;

/// Sums of sizes as bits.
#[derive(Clone, Default)]
pub(super) struct Sums {
    /// Every sum of sizes so far.
    all: Vec<u64>,
    copy: Vec<u64>,
    /// The sums at which items can lie.
    joints: Vec<u64>,
    /// (lowest top, size) of each item.
    tops: Vec<(u64, u64)>,
    list: List,
}

/// Sums of sizes in rising order.
#[derive(Clone, Default)]
struct List {
    all: Vec<u64>,
    copy: Vec<u64>,
    joints: Vec<u64>,
}

impl List {
    fn shift_in(&mut self, size: u64) {
        std::mem::swap(&mut self.all, &mut self.copy);
        self.all.clear();
        let mut shifted = self.copy.iter().map(|sum| sum + size).peekable();
        for &sum in &self.copy {
            while let Some(other) = shifted.next_if(|&other| other <= sum) {
                if other < sum {
                    self.all.push(other);
                }
            }
            self.all.push(sum);
        }
        self.all.extend(shifted);
    }

    fn add_joints(&mut self, from: u64, to: u64) {
        let at = |bound: u64| self.all.partition_point(|&sum| sum < bound);
        self.joints
            .extend_from_slice(&self.all[at(from)..at(to.max(from))]);
    }

    fn next(&self, from: u64) -> Option<u64> {
        self.joints
            .get(self.joints.partition_point(|&joint| joint < from))
            .copied()
    }
}

impl Sums {
    /// Resets to the empty sum, with bits for sums up to `room`.
    fn clear(&mut self, room: u64) {
        let words = (room / 64 + 1) as usize;
        self.all.clear();
        self.all.resize(words, 0);
        self.all[0] = 1;
        self.joints.clear();
        self.joints.resize(words, 0);
        self.list.all.clear();
        self.list.all.push(0);
        self.list.joints.clear();
    }

    /// Adds each sum plus `size` to the sums, none of which is above `highest`.
    fn shift_in(&mut self, size: u64, highest: u64) {
        let (words, bits) = ((size / 64) as usize, size % 64);
        let used = ((highest / 64 + 1) as usize).min(self.all.len());
        self.copy.clear();
        self.copy.push(0);
        self.copy.extend_from_slice(&self.all[..used]);
        self.copy.push(0);
        let shifted = self.all.iter_mut().skip(words).zip(self.copy.windows(2));
        if bits == 0 {
            shifted.for_each(|(sum, pair)| *sum |= pair[1]);
        } else {
            shifted.for_each(|(sum, pair)| *sum |= pair[1] << bits | pair[0] >> (64 - bits));
        }
    }

    /// Adds the sums from `from` up to `to` to the joints.
    fn add_joints(&mut self, from: u64, to: u64) {
        let to = to.min(self.all.len() as u64 * 64);
        if from >= to {
            return;
        }
        for word in from / 64..=(to - 1) / 64 {
            let low = if word == from / 64 {
                u64::MAX << (from % 64)
            } else {
                u64::MAX
            };
            let high = if word == (to - 1) / 64 {
                u64::MAX >> (63 - (to - 1) % 64)
            } else {
                u64::MAX
            };
            self.joints[word as usize] |= self.all[word as usize] & low & high;
        }
    }

    /// The smallest joint from `from` on.
    fn next(&self, from: u64) -> Option<u64> {
        let mut word = (from / 64) as usize;
        let mut bits = self.joints.get(word)? & (u64::MAX << (from % 64));
        while bits == 0 {
            word += 1;
            bits = *self.joints.get(word)?;
        }
        Some(word as u64 * 64 + u64::from(bits.trailing_zeros()))
    }
}

impl State {
    /// Whether every byte of a section above its floor is needed, and the sums are few enough to
    /// list.
    pub(super) fn is_tight(&self, section: usize) -> bool {
        let room = self.limit - self.floor[section];
        self.rest[section] == room
            && (room <= UNITS_MAX || self.unplaced(section).len() <= LISTED_MAX)
            && !self.aligned
    }

    /// Lifts the items of a tight section to sums of the other sizes, so that no byte is wasted
    /// below: below an offset lie only items whose lowest top is not above it. Returns whether all
    /// items find such an offset.
    pub(super) fn lift_to_joints(&mut self, section: usize, sums: &mut Sums) -> bool {
        let floor = self.floor[section];
        let room = self.limit - floor;
        let listed = room > UNITS_MAX;
        sums.clear(if listed { 0 } else { room });
        sums.tops.clear();
        sums.tops.extend(self.unplaced(section).iter().map(|&j| {
            let size = self.items[j as usize].size;
            (self.lowest[j as usize] - floor + size, size)
        }));
        sums.tops.sort_unstable();
        let (mut from, mut highest) = (0, 0);
        for k in 0..sums.tops.len() {
            let (top, size) = sums.tops[k];
            if listed {
                sums.list.add_joints(from, top);
                sums.list.shift_in(size);
            } else {
                sums.add_joints(from, top);
                sums.shift_in(size, highest);
            }
            from = top;
            highest += size;
        }
        if listed {
            sums.list.add_joints(from, room + 1);
        } else {
            sums.add_joints(from, room + 1);
        }
        for k in 0..self.unplaced(section).len() {
            let j = self.unplaced(section)[k];
            let lowest = self.lowest[j as usize] - floor;
            match if listed {
                sums.list.next(lowest)
            } else {
                sums.next(lowest)
            } {
                Some(joint) if joint == lowest => {}
                Some(joint) if joint + self.items[j as usize].size <= room => {
                    self.lift(j, floor + joint)
                }
                _ => return false,
            }
        }
        true
    }
}
