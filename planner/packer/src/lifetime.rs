//! Lifetimes: the steps at which an item needs its bytes.

/// A half-open interval of steps: a buffer needs its bytes at every `step` with `start <= step <
/// end`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Lifetime {
    /// The first step.
    pub start: u64,
    /// The step after the last one.
    pub end: u64,
}

impl Lifetime {
    /// The steps from `start` up to, but not including, `end`.
    pub const fn new(start: u64, end: u64) -> Self {
        Lifetime { start, end }
    }

    /// The number of steps it spans.
    pub const fn steps(self) -> u64 {
        self.end.saturating_sub(self.start)
    }

    /// Whether it spans no step at all.
    pub const fn is_empty(self) -> bool {
        self.end <= self.start
    }

    /// Whether a step lies inside.
    pub const fn contains(self, step: u64) -> bool {
        self.start <= step && step < self.end
    }

    /// Whether two lifetimes have a step in common.
    pub const fn overlaps(self, other: Lifetime) -> bool {
        !self.is_empty() && !other.is_empty() && self.start < other.end && other.start < self.end
    }
}
