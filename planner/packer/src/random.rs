//! Pseudo-random numbers for searches, perturbations and generated inputs: a seed determines every
//! number, so that plans are the same on every machine.

use std::f64::consts::{LN_2, LOG2_E, SQRT_2};

/// The public-domain generator SplitMix64 (Steele, Lea and Flood, 2014), which is small and
/// independent of the platform. Its state is one number; any number is a good seed.
#[derive(Clone, Debug)]
pub struct Random(pub u64);

impl Random {
    /// The next 64 random bits.
    #[inline]
    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number less than `n`, which must not be 0.
    #[inline]
    pub fn below(&mut self, n: u64) -> u64 {
        ((u128::from(self.next_u64()) * u128::from(n)) >> 64) as u64
    }

    /// A number in `0.0..1.0`.
    #[inline]
    pub fn unit(&mut self) -> f64 {
        (self.next_u64() >> 11) as f64 / (1u64 << 53) as f64
    }
}

/// 2 to the power of `x`, which must lie in `-1022.0..=1023.0`.
///
/// Its bits are the same on every platform, because sums, products and quotients are; those of the
/// platform's mathematical library are not.
pub fn exp2(x: f64) -> f64 {
    let whole = x.round();
    // The series of the exponential function, of at most half the logarithm of 2.
    let t = (x - whole) * LN_2;
    let series = (1..=14u32).rev();
    let part = series.fold(1.0, |sum, k| 1.0 + sum * t / f64::from(k));
    part * f64::from_bits(((1023 + whole as i64) as u64) << 52)
}

/// The exponential function of `x`, as portable as [`exp2`].
pub fn exp(x: f64) -> f64 {
    exp2(x * LOG2_E)
}

/// The natural logarithm of `x`, which must be a positive normal number, as portable as [`exp2`].
pub fn ln(x: f64) -> f64 {
    let exponent = (x.to_bits() >> 52) as i32 - 1023;
    let fraction = f64::from_bits(x.to_bits() & ((1 << 52) - 1) | 1023 << 52);
    let (exponent, fraction) = if fraction > SQRT_2 {
        (exponent + 1, fraction / 2.0)
    } else {
        (exponent, fraction)
    };
    // The series of the inverse hyperbolic tangent.
    let s = (fraction - 1.0) / (fraction + 1.0);
    let series = (0..=11u32).rev();
    let part = series.fold(0.0, |sum, k| sum * s * s + 1.0 / f64::from(2 * k + 1));
    f64::from(exponent) * LN_2 + 2.0 * s * part
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn functions_are_those_of_the_platform_up_to_rounding() {
        let mut random = Random(1);
        let near = |found: f64, expected: f64| {
            let error = (found - expected).abs();
            assert!(
                error <= 1e-14 * expected.abs() + 1e-16,
                "{found} {expected}"
            );
        };
        for _ in 0..10_000 {
            let x = 40.0 * random.unit() - 20.0;
            #[expect(clippy::disallowed_methods, reason = "to compare")]
            let expected = [x.exp2(), x.exp(), (x.abs() + 1e-12).ln()];
            near(exp2(x), expected[0]);
            near(exp(x), expected[1]);
            near(ln(x.abs() + 1e-12), expected[2]);
        }
        assert_eq!((exp2(-3.0), exp(0.0), ln(1.0)), (0.125, 1.0, 0.0));
        near(ln(1e-12), -27.631021115928547);
    }

    #[test]
    fn functions_have_the_same_bits_everywhere() {
        let mut random = Random(2);
        let mut sum = 0u64;
        for _ in 0..1000 {
            let x = random.unit();
            for y in [exp2(-12.0 * x), exp(x - 0.5), ln(x + 1e-12)] {
                sum = sum.rotate_left(7) ^ y.to_bits();
            }
        }
        assert_eq!(sum, 17_058_593_048_859_524_980);
    }
}
