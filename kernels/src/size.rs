//! Sizes known up to a few symbols.
//!
//! When a program is compiled, only the bound of a dimension such as the batch is known. Everything
//! derived from it (a flattened row count, a stride, an offset) is a [`Size`]:
//! `scale · s₁ · s₂ · s₃ + offset` over symbols whose values an [`Env`] supplies at launch.
//! Evaluating one costs a few multiplications and no memory.

use std::fmt;

use smallvec::SmallVec;

/// Most symbols a program may have.
pub const MAX_SYMBOLS: usize = 8;
/// Most symbols multiplied together in one size.
const FACTORS: usize = 3;

/// The index of a named dimension of a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Symbol(pub u8);

/// A size: `scale · s₁ · s₂ · s₃ + offset`.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Size {
    scale: i64,
    offset: i64,
    /// Symbol index + 1, ascending with the zeros last.
    factors: [u8; FACTORS],
}

/// The value of each symbol.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub struct Env(pub [u32; MAX_SYMBOLS]);

impl Size {
    /// The size 0.
    pub const ZERO: Size = Size::fixed(0);
    /// The size 1.
    pub const ONE: Size = Size::fixed(1);

    /// A size known at compile time.
    pub const fn fixed(n: i64) -> Self {
        Size {
            scale: 0,
            offset: n,
            factors: [0; FACTORS],
        }
    }

    /// The size of one symbol.
    pub const fn symbol(s: Symbol) -> Self {
        Size {
            scale: 1,
            offset: 0,
            factors: [s.0 + 1, 0, 0],
        }
    }

    fn normal(mut self) -> Self {
        if self.scale == 0 {
            self.factors = [0; FACTORS];
        }
        self
    }

    /// The number, if no symbol takes part.
    pub const fn as_fixed(self) -> Option<i64> {
        if self.scale == 0 {
            Some(self.offset)
        } else {
            None
        }
    }

    /// True if this is exactly the number `n`.
    pub const fn is(self, n: i64) -> bool {
        self.scale == 0 && self.offset == n
    }

    /// The symbols that take part.
    pub fn symbols(self) -> impl Iterator<Item = Symbol> {
        self.factors
            .into_iter()
            .filter(|&f| f != 0)
            .map(|f| Symbol(f - 1))
    }

    /// The number that the product of the symbols is scaled by, and the number added to it.
    pub const fn parts(self) -> (i64, i64) {
        (self.scale, self.offset)
    }

    /// The value under `env`. Saturates instead of wrapping: a size this large has been refused by
    /// [`Size::checked_at`] before.
    pub fn at(self, env: &Env) -> i64 {
        if self.scale == 0 {
            return self.offset;
        }
        let product = self.symbols().fold(self.scale, |p, s| {
            p.saturating_mul(i64::from(env.0[usize::from(s.0)]))
        });
        product.saturating_add(self.offset)
    }

    /// The value under `env`, or `None` if it does not fit in an `i64`.
    pub fn checked_at(self, env: &Env) -> Option<i64> {
        self.symbols()
            .try_fold(self.scale, |p, s| {
                p.checked_mul(i64::from(env.0[usize::from(s.0)]))
            })?
            .checked_add(self.offset)
    }

    /// The value under `env` as an index; negative sizes count as 0.
    pub fn usize_at(self, env: &Env) -> usize {
        usize::try_from(self.at(env)).unwrap_or(0)
    }

    /// `self · other`, or `None` if the product has no such form or overflows.
    pub fn checked_mul(self, other: Size) -> Option<Size> {
        let (a, b) = if self.scale == 0 {
            (other, self)
        } else {
            (self, other)
        };
        if b.scale == 0 {
            // (scale·S + offset)·c
            let (scale, offset) = (
                a.scale.checked_mul(b.offset)?,
                a.offset.checked_mul(b.offset)?,
            );
            return Some(
                Size {
                    scale,
                    offset,
                    factors: a.factors,
                }
                .normal(),
            );
        }
        if a.offset != 0 || b.offset != 0 {
            return None;
        }
        let mut factors = [0u8; 2 * FACTORS];
        factors[..FACTORS].copy_from_slice(&a.factors);
        factors[FACTORS..].copy_from_slice(&b.factors);
        factors.sort_by_key(|&f| if f == 0 { u8::MAX } else { f });
        if factors[FACTORS] != 0 {
            return None;
        }
        Some(Size {
            scale: a.scale.checked_mul(b.scale)?,
            offset: 0,
            factors: [factors[0], factors[1], factors[2]],
        })
    }

    /// `self + other`, or `None` if the sum has no such form or overflows.
    pub fn checked_add(self, other: Size) -> Option<Size> {
        let offset = self.offset.checked_add(other.offset)?;
        if self.scale == 0 {
            return Some(Size { offset, ..other });
        }
        if other.scale == 0 {
            return Some(Size { offset, ..self });
        }
        if self.factors != other.factors {
            return None;
        }
        Some(
            Size {
                scale: self.scale.checked_add(other.scale)?,
                offset,
                factors: self.factors,
            }
            .normal(),
        )
    }

    /// `self − other`, under the same rules as [`Size::checked_add`].
    pub fn checked_sub(self, other: Size) -> Option<Size> {
        self.checked_add(other.checked_mul(Size::fixed(-1))?)
    }

    /// `self / n` if that is exact for every value of the symbols.
    pub fn checked_div(self, n: i64) -> Option<Size> {
        if n == 0 || self.scale % n != 0 || self.offset % n != 0 {
            return None;
        }
        Some(Size {
            scale: self.scale / n,
            offset: self.offset / n,
            factors: self.factors,
        })
    }

    /// `self / other` if the quotient is a number or has the same form, exactly, for every value of
    /// the symbols.
    pub fn checked_div_size(self, other: Size) -> Option<Size> {
        if let Some(n) = other.as_fixed() {
            return self.checked_div(n);
        }
        if other.offset == 0 {
            // Cancel monomials: (c·S·T) / (d·S) = (c/d)·T.
            if self.offset != 0 || self.scale == 0 || self.scale % other.scale != 0 {
                return None;
            }
            let mut rest: SmallVec<[u8; FACTORS]> =
                self.factors.iter().copied().filter(|&f| f != 0).collect();
            for f in other.factors.iter().filter(|&&f| f != 0) {
                let at = rest.iter().position(|r| r == f)?;
                rest.remove(at);
            }
            let mut factors = [0; FACTORS];
            factors[..rest.len()].copy_from_slice(&rest);
            let scale = self.scale / other.scale;
            return Some(if rest.is_empty() {
                Size::fixed(scale)
            } else {
                Size {
                    scale,
                    offset: 0,
                    factors,
                }
            });
        }
        let ratio = if other.scale != 0 && self.scale % other.scale == 0 {
            self.scale / other.scale
        } else {
            return None;
        };
        (other.checked_mul(Size::fixed(ratio)) == Some(self)).then(|| Size::fixed(ratio))
    }

    /// The size as text, with `name` giving each symbol's name.
    pub fn show<'a>(self, mut name: impl FnMut(Symbol) -> &'a str) -> String {
        if self.scale == 0 {
            return self.offset.to_string();
        }
        let mut out = if self.scale == 1 {
            String::new()
        } else {
            format!("{}·", self.scale)
        };
        let parts: Vec<&str> = self.symbols().map(&mut name).collect();
        out += &parts.join("·");
        if self.offset != 0 {
            out += &format!("{:+}", self.offset);
        }
        out
    }
}

impl From<u32> for Size {
    fn from(n: u32) -> Self {
        Size::fixed(i64::from(n))
    }
}

impl fmt::Debug for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const NAMES: [&str; MAX_SYMBOLS] = ["s0", "s1", "s2", "s3", "s4", "s5", "s6", "s7"];
        f.write_str(&self.show(|s| NAMES[usize::from(s.0)]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const B: Size = Size::symbol(Symbol(0));
    const L: Size = Size::symbol(Symbol(1));

    #[test]
    fn arithmetic_follows_the_numbers() {
        let env = Env([7, 5, 0, 0, 0, 0, 0, 0]);
        let n = |k| Size::fixed(k);
        let sizes = [
            n(0),
            n(3),
            B,
            L,
            B.checked_mul(n(4)).unwrap(),
            B.checked_add(n(2)).unwrap(),
            B.checked_mul(L).unwrap(),
        ];
        for a in sizes {
            for b in sizes {
                if let Some(c) = a.checked_mul(b) {
                    assert_eq!(c.at(&env), a.at(&env) * b.at(&env), "{a:?} · {b:?} = {c:?}");
                }
                if let Some(c) = a.checked_add(b) {
                    assert_eq!(c.at(&env), a.at(&env) + b.at(&env), "{a:?} + {b:?} = {c:?}");
                }
                if let Some(c) = a.checked_div_size(b) {
                    assert_eq!(c.at(&env) * b.at(&env), a.at(&env), "{a:?} / {b:?} = {c:?}");
                }
            }
        }
    }

    #[test]
    fn equal_sizes_are_equal_values() {
        assert_eq!(B.checked_mul(L), L.checked_mul(B));
        assert_eq!(B.checked_sub(B), Some(Size::ZERO));
        assert_eq!(B.checked_mul(L).unwrap().checked_div_size(B), Some(L));
        assert_eq!(
            format!(
                "{:?}",
                B.checked_mul(Size::fixed(3))
                    .unwrap()
                    .checked_add(Size::ONE)
                    .unwrap()
            ),
            "3·s0+1"
        );
    }

    #[test]
    fn overflow_is_none() {
        assert_eq!(Size::fixed(i64::MAX).checked_mul(Size::fixed(2)), None);
        assert_eq!(
            B.checked_mul(Size::fixed(i64::MAX))
                .unwrap()
                .checked_at(&Env([2; 8])),
            None
        );
    }
}
