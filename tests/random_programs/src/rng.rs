//! Random numbers, the same for a seed on every machine.

/// SplitMix64 (Steele, Lea & Flood 2014).
#[derive(Clone, Debug)]
pub struct Rng(u64);

/// One output of SplitMix64: an even mixture of the bits of a number.
pub fn mixed(x: u64) -> u64 {
    let mut z = x.wrapping_add(0x9E37_79B9_7F4A_7C15);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

impl Rng {
    /// The numbers of a seed.
    pub fn new(seed: u64) -> Rng {
        Rng(mixed(seed))
    }

    /// 64 equally likely bits.
    pub fn bits(&mut self) -> u64 {
        let drawn = mixed(self.0);
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        drawn
    }

    /// In `0..n`; 0 if `n` is 0.
    pub fn below(&mut self, n: usize) -> usize {
        (self.bits() >> 16) as usize % n.max(1)
    }

    /// True once in `n` draws.
    pub fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }

    /// In `low..high`, a multiple of 1/64, so that text holds it exactly.
    pub fn float(&mut self, low: f64, high: f64) -> f64 {
        let steps = ((high - low) * 64.0) as usize;
        low + self.below(steps) as f64 / 64.0
    }

    /// An element of a list that is not empty.
    pub fn pick<T: Clone>(&mut self, list: &[T]) -> T {
        list[self.below(list.len())].clone()
    }

    /// The position of a weight, with a probability proportional to the weight.
    pub fn weighted(&mut self, weights: &[u32]) -> usize {
        let mut at = self.below(weights.iter().sum::<u32>() as usize) as u32;
        weights
            .iter()
            .position(|&w| at.checked_sub(w).map(|rest| at = rest).is_none())
            .unwrap_or(0)
    }
}
