//! The memory budget of a session.

use std::str::FromStr;

use slabwise_planner::{Bytes, BytesError, brief};

use crate::error::Error;

/// The memory budget of a session.
#[derive(Clone, Copy, Debug, PartialEq, Default)]
pub enum Budget {
    /// As much as its programs need.
    #[default]
    Unlimited,
    /// This many bytes for weights, state and slab together.
    Bytes(Bytes),
    /// For the slab, this fraction of the bytes that the first program of the session needs without
    /// recomputation; weights and state come on top.
    Fraction(f64),
}

impl Budget {
    /// # Errors
    /// If a fraction is not a number, or negative.
    fn check(self) -> Result<(), Error> {
        match self {
            Budget::Fraction(fraction) if fraction.is_nan() || fraction < 0.0 => {
                Err(Error::Value(format!(
                    "a budget of {fraction} times the slab: a fraction is a number from 0 on, such as 0.5"
                )))
            }
            _ => Ok(()),
        }
    }

    /// The bytes left for the slab beside `persistent` bytes of weights and state; `once` is its
    /// size without recomputation. `None` if there is no limit.
    fn room(self, persistent: u64, once: u64) -> Option<u64> {
        match self {
            Budget::Unlimited => None,
            Budget::Bytes(bytes) => Some(bytes.0.saturating_sub(persistent)),
            Budget::Fraction(fraction) => Some((once as f64 * fraction) as u64),
        }
    }
}

/// A budget, and the bytes that a fraction of the first program's slab amounts to.
#[doc(hidden)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Allowance {
    budget: Budget,
    settled: Option<u64>,
}

impl Allowance {
    /// An allowance before the first program.
    pub fn new(budget: Budget) -> Self {
        Allowance {
            budget,
            settled: None,
        }
    }

    /// # Errors
    /// See [`Budget::check`].
    pub fn check(&self) -> Result<(), Error> {
        self.budget.check()
    }

    /// See [`Budget::room`].
    pub fn room(&self, persistent: u64, once: u64) -> Option<u64> {
        self.settled.or_else(|| self.budget.room(persistent, once))
    }

    /// The first program decides the bytes of a fraction.
    pub fn settle(&mut self, room: Option<u64>) {
        self.settled = room.filter(|_| matches!(self.budget, Budget::Fraction(_)));
    }

    /// The most bytes for everything together, if the budget says so.
    pub fn bytes(&self) -> Option<Bytes> {
        if let Budget::Bytes(bytes) = self.budget {
            Some(bytes)
        } else {
            None
        }
    }
}

impl From<Bytes> for Budget {
    fn from(bytes: Bytes) -> Self {
        Budget::Bytes(bytes)
    }
}

impl<B: Into<Budget>> From<Option<B>> for Budget {
    fn from(budget: Option<B>) -> Self {
        budget.map_or(Budget::Unlimited, Into::into)
    }
}

/// A percentage (`50%`) or bytes (`24MiB`).
impl FromStr for Budget {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let wrong = || {
            Error::Value(format!(
                "`{}` is neither a number of bytes, such as 24MiB, nor a percentage, such as 50%",
                brief(text)
            ))
        };
        let Some(percent) = text.trim().strip_suffix('%') else {
            return text
                .parse()
                .map(Budget::Bytes)
                .map_err(|error| match error {
                    BytesError::Unit { .. } | BytesError::Overflow(_) => {
                        Error::Value(error.to_string())
                    }
                    _ => wrong(),
                });
        };
        let percent: f64 = percent.trim().parse().map_err(|_| wrong())?;
        if percent.is_finite() && percent >= 0.0 {
            Ok(Budget::Fraction(percent / 100.0))
        } else {
            Err(wrong())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn budgets_as_users_write_them() {
        let read = |text: &str| text.parse::<Budget>().ok();
        assert_eq!(read("50%"), Some(Budget::Fraction(0.5)));
        assert_eq!(read(" 12.5 % "), Some(Budget::Fraction(0.125)));
        assert_eq!(read("24MiB"), Some(Budget::Bytes(Bytes(24 << 20))));
        assert!(
            ["-5%", "inf%", "nan%", "%", "", "-3", "3parsecs"]
                .iter()
                .all(|text| read(text).is_none())
        );
    }

    #[test]
    fn the_room_for_the_slab_excludes_the_weights() {
        assert_eq!(Budget::from(None::<Bytes>).room(10, 100), None);
        assert_eq!(Budget::from(Bytes(64)).room(10, 100), Some(54));
        assert_eq!(Budget::from(Bytes(4)).room(10, 100), Some(0));
        assert_eq!(Budget::Fraction(0.25).room(10, 100), Some(25));
    }

    #[test]
    fn a_fraction_is_a_number_from_0_on() {
        let said = |fraction: f64| {
            let error = Budget::Fraction(fraction).check().err();
            error.map(|error| error.to_string())
        };
        assert_eq!([0.0, 0.5, 3.0].map(said), [None, None, None]);
        for (fraction, number) in [(f64::NAN, "NaN"), (-1.0, "-1"), (f64::NEG_INFINITY, "-inf")] {
            let said = said(fraction).expect("an error");
            assert!(
                said.contains(&format!("a budget of {number} times")),
                "{said}"
            );
        }
    }
}
