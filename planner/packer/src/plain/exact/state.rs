//! The state of a partial packing (floors and lowest offsets), and a trail to undo changes.

use super::super::Found;
use super::super::sections::Sections;
use super::memo::mix;
use super::sums::Sums;
use std::ops::Range;

/// The unit of sizes and offsets, and whether alignments coarser than it remain.
pub(super) struct Units {
    /// Every size and offset is a multiple of this.
    pub(super) bytes: u64,
    /// Whether some items need coarser alignments than that.
    pub(super) aligned: bool,
}

impl Units {
    pub(super) fn of(sections: &Sections) -> Units {
        let sizes = sections
            .spans
            .iter()
            .fold(0, |all, span| gcd(all, span.size))
            .max(1);
        // Stacked on the ground, everything lies on multiples of the sizes' divisor anyway.
        if sections
            .spans
            .iter()
            .all(|span| sizes.is_multiple_of(span.align))
        {
            return Units {
                bytes: sizes,
                aligned: false,
            };
        }
        let bytes = sections
            .spans
            .iter()
            .fold(sizes, |all, span| gcd(all, span.align));
        Units {
            bytes,
            aligned: true,
        }
    }
}

fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// An undo record of one change.
#[derive(Clone)]
enum UndoRecord {
    Floor { section: u32, real: bool, old: u64 },
    Lowest { item: u32, old: u64 },
    Placed { item: u32 },
}

/// An item in the search, in units.
#[derive(Clone, Copy)]
pub(super) struct Item {
    pub(super) start: u32,
    pub(super) end: u32,
    pub(super) size: u64,
    pub(super) align: u64,
    /// The index of its first entry in `place_in_list`.
    entries: u32,
}

/// A partial packing under a limit. Units, not bytes.
#[derive(Clone)]
pub(super) struct State {
    pub(super) limit: u64,
    pub(super) aligned: bool,
    pub(super) items: Vec<Item>,
    pub(super) offsets: Vec<u64>,
    /// For each unplaced item: the lowest offset that any completion can give it.
    pub(super) lowest: Vec<u64>,
    /// For each section: no further item can lie below.
    pub(super) floor: Vec<u64>,
    /// Whether the floor is the top of a placed item (or the ground), so that items can rest on it.
    pub(super) real: Vec<bool>,
    /// For each section the sum of the unplaced sizes.
    pub(super) rest: Vec<u64>,
    /// For each section, the keys of the unplaced items that begin there.
    pub(super) keys: Vec<u128>,
    item_keys: Vec<u128>,
    /// For each section but the last, the number of unplaced items that live in it and in the next.
    pub(super) crossing: Vec<u32>,
    /// For each section, the start of its list; unplaced items come first.
    lists: Vec<u32>,
    unplaced: Vec<u32>,
    list: Vec<u32>,
    place_in_list: Vec<u32>,
    trail: Vec<UndoRecord>,
    /// Sections to propagate again, as bits.
    dirty: Vec<u64>,
    /// Sections without slack, which get the stronger check, as bits.
    tight: Vec<u64>,
    scratch: Vec<(u64, u64)>,
    sums: Sums,
    /// Whether the consequences of the last change had further consequences.
    pub(super) chained: bool,
    /// The sections in which the last change changed anything.
    pub(super) touched: Range<u32>,
}

impl State {
    /// The empty packing. `limit` in units.
    pub(super) fn new(sections: &Sections, units: &Units, limit: u64) -> State {
        let count = sections.count();
        let mut items = Vec::with_capacity(sections.spans.len());
        let mut entries = 0u32;
        let mut unplaced = vec![0u32; count];
        let (mut rest, mut crossing) = (vec![0u64; count], vec![0; count]);
        for span in &sections.spans {
            let size = span.size / units.bytes;
            let align = if units.aligned {
                (span.align / units.bytes).max(1)
            } else {
                1
            };
            items.push(Item {
                start: span.start,
                end: span.end,
                size,
                align,
                entries,
            });
            entries += span.end - span.start;
            for s in span.start as usize..span.end as usize {
                unplaced[s] += 1;
                rest[s] = rest[s].saturating_add(size);
                crossing[s] += u32::from(s + 1 < span.end as usize);
            }
        }
        let mut lists = Vec::with_capacity(count + 1);
        let mut total = 0;
        for &length in &unplaced {
            lists.push(total);
            total += length;
        }
        let mut next = lists.clone();
        let (mut list, mut place_in_list) = (vec![0; total as usize], vec![0; total as usize]);
        for (i, item) in (0u32..).zip(&items) {
            for s in item.start..item.end {
                let at = &mut next[s as usize];
                list[*at as usize] = i;
                place_in_list[(item.entries + s - item.start) as usize] = *at;
                *at += 1;
            }
        }
        let n = items.len();
        let item_keys: Vec<u128> = (0..n as u64).map(|i| mix(i, 0)).collect();
        let mut keys = vec![0; count];
        items
            .iter()
            .zip(&item_keys)
            .for_each(|(item, key)| keys[item.start as usize] ^= key);
        State {
            limit,
            aligned: units.aligned,
            items,
            offsets: vec![0; n],
            lowest: vec![0; n],
            floor: vec![0; count],
            real: vec![true; count],
            rest,
            keys,
            item_keys,
            crossing,
            lists,
            unplaced,
            list,
            place_in_list,
            trail: Vec::new(),
            dirty: vec![0; count.div_ceil(64)],
            tight: vec![0; count.div_ceil(64)],
            scratch: Vec::new(),
            sums: Sums::default(),
            chained: false,
            touched: 0..0,
        }
    }

    /// The packing, when all items are placed.
    pub(super) fn found(&self, units: &Units) -> Found {
        let tops = self
            .items
            .iter()
            .zip(&self.offsets)
            .map(|(item, offset)| offset + item.size);
        let height = tops.max().unwrap_or(0) * units.bytes;
        Found {
            offsets: self
                .offsets
                .iter()
                .map(|offset| offset * units.bytes)
                .collect(),
            height,
        }
    }

    pub(super) fn sections(&self) -> usize {
        self.floor.len()
    }

    /// The unplaced items of a section.
    pub(super) fn unplaced(&self, section: usize) -> &[u32] {
        let at = self.lists[section] as usize;
        &self.list[at..at + self.unplaced[section] as usize]
    }

    pub(super) fn is_closed(&self, section: usize) -> bool {
        self.unplaced[section] == 0
    }

    /// The trail position that `undo` restores.
    pub(super) fn mark(&self) -> usize {
        self.trail.len()
    }

    pub(super) fn undo(&mut self, mark: usize) {
        while self.trail.len() > mark {
            match self.trail.pop() {
                Some(UndoRecord::Floor { section, real, old }) => {
                    self.floor[section as usize] = old;
                    self.real[section as usize] = real;
                }
                Some(UndoRecord::Lowest { item, old }) => self.lowest[item as usize] = old,
                Some(UndoRecord::Placed { item }) => {
                    let it = self.items[item as usize];
                    self.keys[it.start as usize] ^= self.item_keys[item as usize];
                    for s in it.start as usize..it.end as usize {
                        self.rest[s] += it.size;
                        self.unplaced[s] += 1;
                        self.crossing[s] += u32::from(s + 1 < it.end as usize);
                    }
                }
                None => return,
            }
        }
    }

    fn set_floor(&mut self, section: usize, floor: u64, real: bool) {
        self.trail.push(UndoRecord::Floor {
            section: section as u32,
            real: self.real[section],
            old: self.floor[section],
        });
        self.floor[section] = floor;
        self.real[section] = real;
    }

    /// Places an item at its lowest offset, which must be the floor of every section of its life.
    /// Returns the section of a contradiction, if one is found.
    pub(super) fn place(&mut self, i: u32) -> Option<u32> {
        let item = self.items[i as usize];
        self.touched = item.start..item.end;
        let top = self.lowest[i as usize] + item.size;
        self.offsets[i as usize] = self.lowest[i as usize];
        for s in item.start as usize..item.end as usize {
            self.rest[s] -= item.size;
            self.crossing[s] -= u32::from(s + 1 < item.end as usize);
            self.take_from_list(i, item, s);
            self.set_floor(s, top, true);
        }
        self.keys[item.start as usize] ^= self.item_keys[i as usize];
        self.trail.push(UndoRecord::Placed { item: i });
        for s in item.start as usize..item.end as usize {
            self.mark_dirty(s, s + 1);
            self.lift_items(s, top);
        }
        self.propagate()
    }

    fn take_from_list(&mut self, i: u32, item: Item, s: usize) {
        self.unplaced[s] -= 1;
        let (mine, last) = (
            self.place_in_list[item.entries as usize + s - item.start as usize],
            self.lists[s] + self.unplaced[s],
        );
        let other = self.list[last as usize];
        self.list.swap(mine as usize, last as usize);
        self.place_in_list[item.entries as usize + s - item.start as usize] = last;
        let it = self.items[other as usize];
        if other != i {
            self.place_in_list[it.entries as usize + s - it.start as usize] = mine;
        }
    }

    /// Decides that nothing lies below `floor` in a section. Returns the section of a
    /// contradiction, if one is found.
    pub(super) fn raise(&mut self, section: usize, floor: u64) -> Option<u32> {
        self.touched = section as u32..section as u32 + 1;
        self.set_floor(section, floor, false);
        self.mark_dirty(section, section + 1);
        self.lift_items(section, floor);
        self.propagate()
    }

    fn mark_dirty(&mut self, from: usize, to: usize) {
        self.touched = self.touched.start.min(from as u32)..self.touched.end.max(to as u32);
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
            self.dirty[word] |= low & high;
        }
    }

    fn lift_items(&mut self, section: usize, floor: u64) {
        let at = self.lists[section] as usize;
        for k in at..at + self.unplaced[section] as usize {
            let j = self.list[k] as usize;
            if self.lowest[j] < floor {
                self.lift(j as u32, floor.next_multiple_of(self.items[j].align));
            }
        }
    }

    /// Decides that an item lies no lower than `offset`.
    pub(super) fn lift(&mut self, i: u32, offset: u64) {
        let item = self.items[i as usize];
        self.trail.push(UndoRecord::Lowest {
            item: i,
            old: self.lowest[i as usize],
        });
        self.lowest[i as usize] = offset;
        self.mark_dirty(item.start as usize, item.end as usize);
    }

    /// Lifts the floors of dirty sections to the lowest item, and checks that their items fit under
    /// the limit, stacked one above the other, none below its lowest offset.
    fn propagate(&mut self) -> Option<u32> {
        self.chained = false;
        // Cheap checks come first, on all sections.
        loop {
            for word in 0..self.dirty.len() {
                while self.dirty[word] != 0 {
                    let s = word * 64 + self.dirty[word].trailing_zeros() as usize;
                    self.dirty[word] &= self.dirty[word] - 1;
                    if self.unplaced[s] > 0 && !self.propagate_section(s) {
                        return self.conflict(s);
                    }
                }
            }
            let word = self.tight.iter().position(|&bits| bits != 0)?;
            let s = word * 64 + self.tight[word].trailing_zeros() as usize;
            self.tight[word] &= self.tight[word] - 1;
            let mut sums = std::mem::take(&mut self.sums);
            let before = self.trail.len();
            let fits = self.lift_to_joints(s, &mut sums);
            self.chained |= self.trail.len() > before;
            self.sums = sums;
            if !fits {
                return self.conflict(s);
            }
        }
    }

    fn conflict(&mut self, section: usize) -> Option<u32> {
        self.dirty.fill(0);
        self.tight.fill(0);
        Some(section as u32)
    }

    fn propagate_section(&mut self, s: usize) -> bool {
        let (mut low, mut high) = (u64::MAX, 0);
        for &j in self.unplaced(s) {
            low = low.min(self.lowest[j as usize]);
            high = high.max(self.lowest[j as usize]);
        }
        if low > self.floor[s] {
            self.set_floor(s, low, false);
        }
        let rest = self.rest[s];
        if high + rest <= self.limit {
            return true;
        }
        if low + rest > self.limit {
            return false;
        }
        if self.is_tight(s) {
            self.tight[s / 64] |= 1 << (s % 64);
        }
        let mut scratch = std::mem::take(&mut self.scratch);
        scratch.clear();
        scratch.extend(
            self.unplaced(s)
                .iter()
                .map(|&j| (self.lowest[j as usize], self.items[j as usize].size)),
        );
        let time = finished(&mut scratch, low, rest);
        self.scratch = scratch;
        time <= self.limit
    }
}

/// The time at which a machine has finished all jobs, each given by its release and its length. The
/// lengths sum to `rest`; the first job is released at `time`.
fn finished(jobs: &mut Vec<(u64, u64)>, mut time: u64, mut rest: u64) -> u64 {
    loop {
        let before = time;
        let (mut next, mut last) = (u64::MAX, 0);
        jobs.retain(|&(release, length)| {
            let done = release <= time;
            if done {
                time += length;
            } else {
                next = next.min(release);
                last = last.max(release);
            }
            !done
        });
        rest -= time - before;
        if last <= time {
            return time + rest;
        }
        if next > time {
            time = next;
        }
    }
}
