//! The memo of partial packings that are known to have no completion.

use std::ops::Range;

/// A map of bounded size from the key of a state to the sections because of which the state has no
/// completion. When it is full, newer entries replace older ones.
///
/// A key is 128 scrambled bits. Two different states with the same key would end in a wrong proof;
/// among 2^32 states that happens with a probability of 2^-65.
pub(super) struct Memo {
    /// Groups of [`WAYS`] entries, the newest first.
    entries: Vec<Entry>,
    used: usize,
    largest: usize,
}

/// The entry of one state. An empty range marks an empty slot.
#[derive(Clone, Debug, Default)]
pub(super) struct Entry {
    key: [u64; 2],
    why: Range<u32>,
}

const WAYS: usize = 4;

impl Entry {
    pub(super) fn new(key: u128, why: Range<u32>) -> Entry {
        Entry {
            key: [key as u64, (key >> 64) as u64],
            why,
        }
    }
}

impl Memo {
    /// A map that grows up to 2^`bits` entries.
    pub(super) fn new(bits: u32) -> Memo {
        Memo {
            entries: vec![Entry::default(); 1 << bits.min(10)],
            used: 0,
            largest: 1 << bits,
        }
    }

    fn group(&self, key: u64) -> usize {
        key as usize & (self.entries.len() - WAYS)
    }

    /// The sections because of which a state has no completion, if it is known to have none.
    pub(super) fn get(&self, key: u128) -> Option<Range<u32>> {
        let at = self.group(key as u64);
        let wanted = [key as u64, (key >> 64) as u64];
        let entry = self.entries[at..at + WAYS]
            .iter()
            .find(|entry| entry.key == wanted)?;
        (!entry.why.is_empty()).then(|| entry.why.clone())
    }

    pub(super) fn insert(&mut self, entry: Entry) {
        if self.used * 2 > self.entries.len() && self.entries.len() < self.largest {
            let larger = vec![Entry::default(); self.entries.len() * 4];
            let old = std::mem::replace(&mut self.entries, larger);
            self.used = 0;
            // The newest entry of a group comes first and stays first.
            let kept = old
                .chunks(WAYS)
                .flat_map(|group| group.iter().rev())
                .filter(|entry| !entry.why.is_empty());
            kept.for_each(|entry| self.put(entry.clone()));
        }
        self.put(entry);
    }

    fn put(&mut self, entry: Entry) {
        let at = self.group(entry.key[0]);
        let group = &mut self.entries[at..at + WAYS];
        if group
            .iter()
            .all(|other| other.key != entry.key || other.why.is_empty())
        {
            group.rotate_right(1);
            self.used += usize::from(group[0].why.is_empty());
            group[0] = entry;
        }
    }

    pub(super) fn clear(&mut self) {
        if self.used > 0 {
            self.entries.fill(Entry::default());
            self.used = 0;
        }
    }
}

/// Scrambles a pair into 128 bits: each half is a bijection of either number while the other is
/// fixed.
pub(super) fn mix(a: u64, b: u64) -> u128 {
    let low = scramble(scramble(a).wrapping_add(b));
    let high = scramble(scramble(b ^ 0xe703_7ed1_a0b4_28db).wrapping_add(a));
    u128::from(high) << 64 | u128::from(low)
}

/// The finish of SplitMix64 (Steele, Lea and Flood, 2014).
fn scramble(z: u64) -> u64 {
    let z = z.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
