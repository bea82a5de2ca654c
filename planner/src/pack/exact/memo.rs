//! Which parts of partial packings are known to have no completion.

/// A set of bounded size. Where it is full, newer keys replace older ones.
///
/// A key is 128 scrambled bits. Two different states with the same key would end in a wrong proof; among 2^32 states
/// that happens with a probability of 2^-65.
pub(super) struct Memo {
    /// Groups of [`WAYS`] keys, the newest first; 0 is no key.
    keys: Vec<u128>,
    used: usize,
    largest: usize,
}

const WAYS: usize = 4;

impl Memo {
    /// A set that grows up to 2^`bits` keys.
    pub(super) fn new(bits: u32) -> Memo {
        Memo { keys: vec![0; 1 << bits.min(10)], used: 0, largest: 1 << bits }
    }

    fn group(&self, key: u128) -> usize {
        key as usize & (self.keys.len() - WAYS)
    }

    pub(super) fn contains(&self, key: u128) -> bool {
        let at = self.group(key);
        self.keys[at..at + WAYS].contains(&key)
    }

    pub(super) fn insert(&mut self, key: u128) {
        if self.used * 2 > self.keys.len() && self.keys.len() < self.largest {
            let larger = vec![0; self.keys.len() * 4];
            let old = std::mem::replace(&mut self.keys, larger);
            self.used = 0;
            // The newest of a group comes first and is to stay first.
            old.chunks(WAYS).flat_map(|group| group.iter().rev()).filter(|&&key| key != 0).for_each(|&key| self.put(key));
        }
        self.put(key);
    }

    fn put(&mut self, key: u128) {
        let at = self.group(key);
        let group = &mut self.keys[at..at + WAYS];
        if !group.contains(&key) {
            group.rotate_right(1);
            self.used += usize::from(group[0] == 0);
            group[0] = key;
        }
    }

    pub(super) fn clear(&mut self) {
        self.keys.fill(0);
        self.used = 0;
    }
}

/// Scrambles a pair into 128 bits: each half is a bijection of either number while the other stays.
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
