//! Which parts of partial packings are known to have no completion.

/// A table of bounded size; newer entries replace older ones.
pub(super) struct Memo {
    keys: Vec<u128>,
    mask: usize,
}

/// Scrambles what a part of a state is told apart by.
pub(super) fn mix(a: u64, b: u64) -> u128 {
    let product = u128::from(a ^ 0x9e37_79b9_7f4a_7c15) * 0xd6e8_feb8_6659_fd93_a076_1d64_78bd_642f
        ^ u128::from(b ^ 0xe703_7ed1_a0b4_28db) * 0x8ebc_6af0_9c88_c6e3_5895_80e1_d6d7_66b5;
    let low = (product as u64 ^ (product >> 64) as u64).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let high = ((product >> 64) as u64).rotate_left(29).wrapping_add(product as u64).wrapping_mul(0x94d0_49bb_1331_11eb);
    u128::from(low ^ low >> 31) << 64 | u128::from(high ^ high >> 33)
}

impl Memo {
    pub(super) fn new(bits: u32) -> Memo {
        Memo { keys: vec![0; 1 << bits], mask: (1 << bits) - 1 }
    }

    pub(super) fn contains(&self, key: u128) -> bool {
        let at = key as usize & self.mask & !3;
        self.keys[at..at + 4].contains(&key)
    }

    pub(super) fn insert(&mut self, key: u128) {
        let at = key as usize & self.mask & !3;
        self.keys[at..at + 4].rotate_right(1);
        self.keys[at] = key;
    }
}
