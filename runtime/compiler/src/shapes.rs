//! How lengths that are unknown at compile time are planned.

use crate::error::{Error, Result};

/// The ranges of lengths that share a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LengthRanges {
    /// Each length has a plan, without an unused byte.
    Exact,
    /// The upper end of each range is this many percent, but at least 1, above that of the range
    /// before: 1 to 1000 percent. A plan has at most that much memory to spare, and the number of
    /// plans grows with the logarithm of the longest length. 100 rounds up to powers of two.
    Growth(u32),
}

impl LengthRanges {
    /// The least and the largest length planned together with this one.
    pub fn around(self, length: u32) -> (u32, u32) {
        let LengthRanges::Growth(percent) = self else {
            return (length, length);
        };
        if length == 0 {
            return (0, 0);
        }
        let (mut low, mut step) = (1u64, 1u64);
        while step < u64::from(length) {
            low = step + 1;
            step = low.max(step + step * u64::from(percent) / 100);
        }
        (low as u32, u32::try_from(step).unwrap_or(u32::MAX))
    }
}

/// How values without a size at compile time are planned and allocated. The default: ranges that
/// grow by 25 percent, at most 64 plans a program, and allocation in gaps of the slab.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DynamicShapes {
    /// Which lengths of [unbounded](crate::shape::Dim::unbounded) dimensions share a plan.
    pub ranges: LengthRanges,
    /// The most plans that a program keeps, at least 1; the least recently used one is dropped.
    pub plans_max: u32,
    /// Whether values of data-dependent size may lie in bytes of the slab that the plan leaves
    /// unused for as long as they live.
    pub use_gaps: bool,
}

impl Default for DynamicShapes {
    fn default() -> Self {
        DynamicShapes {
            ranges: LengthRanges::Growth(25),
            plans_max: 64,
            use_gaps: true,
        }
    }
}

impl DynamicShapes {
    /// Whether the settings make sense.
    ///
    /// # Errors
    /// If one does not; the error names it.
    #[doc(hidden)]
    pub fn check(&self) -> Result<()> {
        if self.plans_max == 0 {
            return Err(Error::Value(
                "DynamicShapes::plans_max is 0; a program needs one plan at least".into(),
            ));
        }
        match self.ranges {
            LengthRanges::Growth(percent) if !(1..=1000).contains(&percent) => {
                Err(Error::Value(format!(
                    "DynamicShapes::ranges is Growth({percent}); ranges grow by 1 to 1000 percent, or are Exact"
                )))
            }
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_cover_every_length_in_small_number_with_little_to_spare() {
        for (percent, rungs_max) in [(1, 1300), (25, 80), (100, 24), (1000, 12)] {
            let ranges = LengthRanges::Growth(percent);
            let (mut length, mut rungs) = (1u32, 0);
            while length < 1 << 23 {
                let (low, high) = ranges.around(length);
                assert_eq!(low, length, "ranges follow each other");
                assert!(
                    u64::from(high) * 100 <= u64::from(low - 1).max(1) * u64::from(100 + percent)
                        || high == low,
                    "{low}..={high}"
                );
                for inside in [low, low + (high - low) / 2, high] {
                    assert_eq!(ranges.around(inside), (low, high));
                }
                (length, rungs) = (high + 1, rungs + 1);
            }
            assert!(rungs <= rungs_max, "{rungs} rungs of {percent} percent");
        }
        assert_eq!(LengthRanges::Exact.around(77), (77, 77));
        assert_eq!(LengthRanges::Growth(100).around(65), (65, 128));
        assert_eq!(LengthRanges::Growth(100).around(u32::MAX).1, u32::MAX);
    }

    #[test]
    fn errors_name_the_invalid_setting() {
        let message = |shapes: DynamicShapes| {
            shapes
                .check()
                .map_err(|e| e.to_string())
                .expect_err("nonsense")
        };
        assert!(
            message(DynamicShapes {
                plans_max: 0,
                ..DynamicShapes::default()
            })
            .contains("plans_max")
        );
        assert!(
            message(DynamicShapes {
                ranges: LengthRanges::Growth(0),
                ..DynamicShapes::default()
            })
            .contains("Growth(0)")
        );
        assert!(
            message(DynamicShapes {
                ranges: LengthRanges::Growth(1001),
                ..DynamicShapes::default()
            })
            .contains("1001")
        );
    }
}
