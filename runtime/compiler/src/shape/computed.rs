//! Lengths computed from several others, which have no form as one [`Size`] and are symbols of
//! their own.

use super::{Dim, Env, Extent, Size, Symbol, Symbols};

/// The formula of a symbol's length. None of its parts falls where a length grows, so that a program
/// is planned for all of them at their bounds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Computed {
    /// The sum of two lengths.
    Sum(Size, Size),
    /// The product of two lengths.
    Product(Size, Size),
    /// A number that may be negative, as a length: then 0.
    Rest(Size),
    /// The smaller of two lengths.
    Least(Size, Size),
}

impl Computed {
    /// The length, at most `u32::MAX`.
    pub fn at(self, env: &Env) -> u32 {
        let length = match self {
            Computed::Sum(a, b) => a.at(env).saturating_add(b.at(env)),
            Computed::Product(a, b) => a.at(env).saturating_mul(b.at(env)),
            Computed::Rest(a) => a.at(env),
            Computed::Least(a, b) => a.at(env).min(b.at(env)),
        };
        u32::try_from(length.max(0)).unwrap_or(u32::MAX)
    }

    fn parts(self) -> impl Iterator<Item = Size> {
        let (first, second) = match self {
            Computed::Sum(a, b) | Computed::Product(a, b) | Computed::Least(a, b) => (a, Some(b)),
            Computed::Rest(a) => (a, None),
        };
        [Some(first), second].into_iter().flatten()
    }
}

impl Symbols {
    /// The length of a formula, as a symbol if it has no other form.
    pub fn computed(&mut self, formula: Computed) -> Result<Size, String> {
        if let Some(known) = self.find_computed(formula) {
            return Ok(known);
        }
        let show = |size: Size| size.show(|s| self.name(s));
        let may_be_negative = matches!(formula, Computed::Rest(_));
        for part in formula.parts() {
            let (scale, _) = part.parts();
            if scale < 0 || (!may_be_negative && self.range_of(part).0 < 0) {
                return Err(format!(
                    "{} is no length at every length in it, or falls where one grows",
                    show(part)
                ));
            }
            if self.any_data_dependent(&[part]) {
                return Err(format!(
                    "{} is known in the run alone, and no other length is computed from it",
                    show(part)
                ));
            }
        }
        let name = match formula {
            Computed::Sum(a, b) => format!("({}+{})", show(a), show(b)),
            Computed::Product(a, b) => format!("({}×{})", show(a), show(b)),
            Computed::Rest(a) => format!("max({}, 0)", show(a)),
            Computed::Least(a, b) => format!("min({}, {})", show(a), show(b)),
        };
        let most = formula.parts().map(|part| self.range_of(part).1);
        let most = match formula {
            Computed::Product(..) => most.fold(1, i64::saturating_mul),
            Computed::Least(..) => most.fold(i64::MAX, i64::min),
            _ => most.fold(0, i64::saturating_add),
        };
        let is_bounded = self.unbounded().next().is_none();
        if is_bounded && u32::try_from(most).is_err() {
            return Err(format!(
                "the length {name} may be {most}, which is too long"
            ));
        }
        let symbol = self.add(Dim::name(&name), Extent::Computed(formula))?;
        Ok(Size::symbol(symbol))
    }

    /// The length of a formula that has a form as one size, or is a symbol already.
    fn find_computed(&self, formula: Computed) -> Option<Size> {
        let plain = match formula {
            Computed::Sum(a, b) => a.checked_add(b).or_else(|| self.whole(a, b)),
            Computed::Product(a, b) => a.checked_mul(b),
            Computed::Least(a, b) if self.is_at_most(a, b) => Some(a),
            Computed::Least(a, b) if self.is_at_most(b, a) => Some(b),
            Computed::Least(..) => None,
            Computed::Rest(a) if self.range_of(a).0 >= 0 => Some(a),
            Computed::Rest(a) if self.range_of(a).1 <= 0 => Some(Size::ZERO),
            Computed::Rest(_) => None,
        };
        plain.or_else(|| {
            let swapped = match formula {
                Computed::Sum(a, b) => Computed::Sum(b, a),
                Computed::Product(a, b) => Computed::Product(b, a),
                Computed::Least(a, b) => Computed::Least(b, a),
                rest => rest,
            };
            let is_same = |known| known == formula || known == swapped;
            let mut all = self.iter();
            all.find(|(.., extent)| matches!(*extent, Extent::Computed(c) if is_same(c)))
                .map(|(symbol, ..)| Size::symbol(symbol))
        })
    }

    /// The end `e` of the part max(e − n, 0) … e, which has min(e, n) elements: the sum of the two.
    fn whole(&self, a: Size, b: Size) -> Option<Size> {
        let own = |size: Size| match self.formula(size) {
            Some((symbol, formula)) if size == Size::symbol(symbol) => Some(formula),
            _ => None,
        };
        let (start, end, n) = match (own(a)?, own(b)?) {
            (Computed::Rest(start), Computed::Least(end, n))
            | (Computed::Least(end, n), Computed::Rest(start)) => (start, end, n),
            _ => return None,
        };
        let is_part = |end: Size, n: Size| {
            let open = match own(end) {
                Some(Computed::Rest(open)) => open,
                _ => end,
            };
            open.checked_sub(n) == Some(start)
        };
        (is_part(end, n).then_some(end)).or(is_part(n, end).then_some(n))
    }

    /// The formula of a size that is `scale` times a computed symbol, with the number added to it.
    fn formula(&self, size: Size) -> Option<(Symbol, Computed)> {
        let mut symbols = size.symbols();
        let symbol = symbols.next().filter(|_| symbols.next().is_none())?;
        match self.extent(symbol) {
            Extent::Computed(formula) => Some((symbol, formula)),
            _ => None,
        }
    }

    /// a + b, if it has a form as one size or is a symbol.
    pub fn sum(&self, a: Size, b: Size) -> Option<Size> {
        self.find_computed(Computed::Sum(a, b))
    }

    /// a − b, where that has a form: the rest of a sum without one of its parts, too.
    pub fn difference(&self, a: Size, b: Size) -> Option<Size> {
        a.checked_sub(b).or_else(|| {
            let (symbol, Computed::Sum(x, y)) = self.formula(a)? else {
                return None;
            };
            let beside = a.checked_sub(Size::symbol(symbol))?;
            let other = |part: Size, other: Size| {
                part.checked_sub(b)?.checked_add(other)?.checked_add(beside)
            };
            other(x, y).or_else(|| other(y, x))
        })
    }

    /// a / b where that is exact: a product without one of its factors, too.
    pub fn quotient(&self, a: Size, b: Size) -> Option<Size> {
        a.checked_div_size(b).or_else(|| {
            let (symbol, Computed::Product(x, y)) = self.formula(a)? else {
                return None;
            };
            let other = |factor: Size, other: Size| {
                let scale = a.checked_div_size(Size::symbol(symbol))?;
                factor
                    .checked_div_size(b)?
                    .checked_mul(other)?
                    .checked_mul(scale)
            };
            other(x, y).or_else(|| other(y, x))
        })
    }

    /// The number of elements, if it has a form as one size or is a multiple of a symbol.
    pub fn elements(&self, dims: &[Size]) -> Option<Size> {
        let (fixed, open): (Vec<Size>, Vec<Size>) =
            dims.iter().copied().partition(|n| n.as_fixed().is_some());
        let times = |n: Size, m: &Size| self.find_computed(Computed::Product(n, *m));
        fixed
            .iter()
            .try_fold(open.iter().try_fold(Size::ONE, times)?, times)
    }

    /// Whether one size is at most the other in every run.
    pub fn is_at_most(&self, a: Size, b: Size) -> bool {
        let rest = self.difference(b, a);
        rest.is_some_and(|rest| self.range_of(rest).0 >= 0)
            || self.range_of(a).1 <= self.range_of(b).0
            || match self
                .formula(a)
                .filter(|(symbol, _)| a == Size::symbol(*symbol))
            {
                Some((_, Computed::Rest(own))) => {
                    self.range_of(b).0 >= 0 && self.is_at_most(own, b)
                }
                Some((_, Computed::Least(x, y))) => self.is_at_most(x, b) || self.is_at_most(y, b),
                _ => false,
            }
    }

    /// Whether the part of an axis of length `whole` that begins at `start` and has `count` elements
    /// exists in every run; a part that ends where the axis does may be empty beyond it.
    pub fn has_part(&self, whole: Size, start: Size, count: Size) -> bool {
        let ends = self
            .sum(start, count)
            .is_some_and(|end| self.is_at_most(end, whole));
        let most = |size: Size| self.range_of(size).1;
        let apart = most(start).checked_add(most(count));
        // A rest is empty, or as long as its formula says.
        let fits = match self.formula(count) {
            Some((symbol, Computed::Rest(own))) if count == Size::symbol(symbol) => {
                let end = self.sum(start, own);
                end.is_some_and(|end| self.is_at_most(end, whole))
            }
            _ => false,
        };
        ends || fits || apart.is_some_and(|end| end <= self.range_of(whole).0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formulas_are_symbols_once_and_undone_by_their_parts() {
        let mut symbols = Symbols::default();
        let mut bounded =
            |name, most| Size::symbol(symbols.intern(name, Extent::Bounded(most)).unwrap());
        let (past, length) = (bounded("past", 6), bounded("length", 4));
        let sum = symbols.computed(Computed::Sum(past, length)).unwrap();
        assert_eq!(symbols.computed(Computed::Sum(length, past)), Ok(sum));
        assert_eq!(sum.show(|s| symbols.name(s)), "(past+length)");
        assert_eq!(symbols.difference(sum, past), Some(length));
        assert_eq!(symbols.difference(sum, length), Some(past));
        let more = sum.checked_add(Size::ONE).unwrap();
        assert_eq!(
            symbols.difference(more, past),
            length.checked_add(Size::ONE)
        );
        let product = symbols.computed(Computed::Product(more, length)).unwrap();
        assert_eq!(symbols.quotient(product, length), Some(more));
        let shorter = length.checked_sub(Size::ONE).unwrap();
        let rest = symbols.computed(Computed::Rest(shorter)).unwrap();
        assert!(symbols.is_at_most(rest, length) && !symbols.is_at_most(length, rest));
        assert!(
            symbols.has_part(length, Size::ZERO, rest) && symbols.has_part(length, Size::ONE, rest)
        );
        assert!(!symbols.has_part(length, Size::fixed(2), rest));
        assert!(symbols.has_part(sum, past, length) && !symbols.has_part(length, past, length));
        assert_eq!(symbols.range_of(product), (0, 44));
        let three = Size::fixed(3);
        let start = symbols.computed(Computed::Rest(length.checked_sub(three).unwrap()));
        let last = symbols.computed(Computed::Least(length, three));
        let (start, last) = (start.unwrap(), last.unwrap());
        assert_eq!(symbols.sum(start, last), Some(length));
        assert!(symbols.is_at_most(last, length) && symbols.is_at_most(last, three));
        assert_eq!(symbols.computed(Computed::Least(three, length)), Ok(last));
        assert!(symbols.has_part(length, start, last) && symbols.range_of(last) == (0, 3));
        let longest = symbols.computed(Computed::Least(length, Size::fixed(9)));
        assert_eq!(longest, Ok(length));
        let env = symbols.bounds();
        assert_eq!([sum, product, rest].map(|n| n.at(&env)), [10, 44, 3]);
        let below = past.checked_mul(Size::fixed(-1)).unwrap();
        assert_eq!(symbols.computed(Computed::Rest(below)), Ok(Size::ZERO));
        let falling = below.checked_add(Size::fixed(3)).unwrap();
        assert!(symbols.computed(Computed::Rest(falling)).is_err());
        let long = Size::fixed(i64::from(u32::MAX));
        assert!(
            symbols
                .computed(Computed::Product(more, long.checked_add(length).unwrap()))
                .is_err()
        );
    }
}
