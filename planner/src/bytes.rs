//! Human-readable byte counts: text to number and back.

use slabwise_packer::brief;
use std::fmt;
use std::str::FromStr;

/// A number of bytes that prints with a binary unit (`2.1 MiB`) and parses with any (`24MiB`, `1.5
/// GB`, `4096`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Bytes(pub u64);

/// The reason why a text is not a byte count.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BytesError {
    /// The text is empty.
    #[error("a byte count is empty")]
    Empty,
    /// A byte count has a sign.
    #[error("byte count `{}` is negative", brief(.0))]
    Negative(String),
    /// The part before the unit is not a decimal number.
    #[error("byte count `{}` does not start with a decimal number; write it as 4096, 24MiB or 1.5GB", brief(.0))]
    Number(String),
    /// The part after the number is not a unit.
    #[error(
        "byte count `{}` has the unknown unit `{}`; the units are B, KiB, MiB, GiB, TiB, PiB, EiB, KB, MB, GB, TB, PB and EB",
        brief(text),
        brief(unit)
    )]
    Unit {
        /// The whole text.
        text: String,
        /// The text in place of the unit.
        unit: String,
    },
    /// The count does not fit 64 bits.
    #[error("byte count `{}` is more than 64 bits hold, which is below 16EiB", brief(.0))]
    Overflow(String),
}

const UNITS: [(&str, u64); 14] = [
    ("", 1),
    ("B", 1),
    ("KiB", 1 << 10),
    ("MiB", 1 << 20),
    ("GiB", 1 << 30),
    ("TiB", 1 << 40),
    ("PiB", 1 << 50),
    ("EiB", 1 << 60),
    ("KB", 1_000),
    ("MB", 1_000_000),
    ("GB", 1_000_000_000),
    ("TB", 1_000_000_000_000),
    ("PB", 1_000_000_000_000_000),
    ("EB", 1_000_000_000_000_000_000),
];

/// The number of digits read after the point. The largest unit times ten to this power still fits
/// 128 bits.
const FRACTION_DIGITS: usize = 18;

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0 < 1024 {
            return f.pad(&format!("{} B", self.0));
        }
        let (mut value, mut unit) = (self.0 as f64 / 1024.0, "KiB");
        for larger in ["MiB", "GiB", "TiB", "PiB", "EiB"] {
            // 1023.95 and more would print as 1024.0 and are shown in the next unit instead.
            if value >= 1023.95 {
                (value, unit) = (value / 1024.0, larger);
            }
        }
        f.pad(&format!("{value:.1} {unit}"))
    }
}

impl FromStr for Bytes {
    type Err = BytesError;

    /// Reads a decimal number with an optional fraction and unit (any letter case). Parts of a byte
    /// are dropped.
    fn from_str(text: &str) -> Result<Self, BytesError> {
        let trimmed = text.trim();
        if trimmed.is_empty() {
            return Err(BytesError::Empty);
        }
        if trimmed.starts_with('-') {
            return Err(BytesError::Negative(trimmed.into()));
        }
        let number_end = trimmed
            .find(|c: char| !(c.is_ascii_digit() || c == '.'))
            .unwrap_or(trimmed.len());
        let (number, unit) = (&trimmed[..number_end], trimmed[number_end..].trim_start());
        let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
        if (whole.is_empty() && fraction.is_empty()) || fraction.contains('.') {
            return Err(BytesError::Number(trimmed.into()));
        }
        let &(_, scale) = UNITS
            .iter()
            .find(|(name, _)| name.eq_ignore_ascii_case(unit))
            .ok_or_else(|| BytesError::Unit {
                text: trimmed.into(),
                unit: unit.into(),
            })?;

        let overflow = || BytesError::Overflow(trimmed.into());
        let digits = |digits: &str| {
            digits.bytes().try_fold(0u64, |n, d| {
                n.checked_mul(10)?.checked_add(u64::from(d - b'0'))
            })
        };
        let fraction = &fraction[..fraction.len().min(FRACTION_DIGITS)];
        let part = u128::from(digits(fraction).ok_or_else(overflow)?) * u128::from(scale)
            / 10u128.pow(fraction.len() as u32);
        let whole = digits(whole)
            .and_then(|n| n.checked_mul(scale))
            .ok_or_else(overflow)?;
        whole
            .checked_add(part as u64)
            .map(Bytes)
            .ok_or_else(overflow)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prints_with_one_decimal() {
        let shown = |n| Bytes(n).to_string();
        assert_eq!(shown(0), "0 B");
        assert_eq!(shown(1023), "1023 B");
        assert_eq!(shown(1024), "1.0 KiB");
        assert_eq!(shown(1_048_524), "1023.9 KiB");
        assert_eq!(shown(1_048_525), "1.0 MiB");
        assert_eq!(shown((1 << 30) - 1), "1.0 GiB");
        assert_eq!(shown(u64::MAX), "16.0 EiB");
        for unit in [10, 20, 30, 40, 50, 60] {
            for below in [1, 1 << (unit - 6), 1 << (unit - 5)] {
                assert!(
                    !shown((1 << unit) - below).starts_with("1024"),
                    "{}",
                    shown((1 << unit) - below)
                );
            }
        }
        assert_eq!(format!("[{:>10}]", Bytes(2048)), "[   2.0 KiB]");
    }

    #[test]
    fn parses_units() {
        let parsed = |s: &str| s.parse::<Bytes>().map(|b| b.0);
        assert_eq!(parsed("4096"), Ok(4096));
        assert_eq!(parsed("24MiB"), Ok(24 << 20));
        assert_eq!(parsed(" 1.5 kib "), Ok(1536));
        assert_eq!(parsed("2GB"), Ok(2_000_000_000));
        assert_eq!(parsed(".5KB"), Ok(500));
        assert_eq!(parsed("18446744073709551615B"), Ok(u64::MAX));
        assert_eq!(
            (parsed("1PiB"), parsed("1.5 eib"), parsed("18EB")),
            (Ok(1 << 50), Ok(3 << 59), Ok(18_000_000_000_000_000_000))
        );
        assert_eq!(parsed("15.999999999999999999EiB"), Ok(u64::MAX - 1));
        assert_eq!(parsed("0.0000000000000000009999TiB"), Ok(0));
    }

    #[test]
    fn invalid_counts_are_rejected() {
        let error = |s: &str| s.parse::<Bytes>().expect_err(s);
        assert_eq!(error(" "), BytesError::Empty);
        assert_eq!(error("-1MiB"), BytesError::Negative("-1MiB".into()));
        for text in ["NaN", "inf", "MiB", "1.2.3", ".", "+5"] {
            assert_eq!(error(text), BytesError::Number(text.into()));
        }
        for text in ["1e9", "5 parsecs", "5 M"] {
            assert!(matches!(error(text), BytesError::Unit { .. }), "{text}");
        }
        for text in [
            "18446744073709551616",
            "17179869184GiB",
            "16EiB",
            "99999999999999999999TB",
        ] {
            assert_eq!(error(text), BytesError::Overflow(text.into()));
        }
    }
}
