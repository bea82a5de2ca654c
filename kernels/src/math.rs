//! Elementary functions on single floats, without branches or tables, so that loops over them
//! become vector code.
//!
//! Arguments are reduced as Cody and Waite do (*Software Manual for the Elementary Functions*,
//! 1980), those of sine and cosine as Payne and Hanek do (*Radian reduction for trigonometric
//! functions*, SIGNUM 1983); polynomials are minimax fits (Remez) whose coefficients were then
//! rounded to single precision. Each function says its largest error in units in the last place
//! (ULP), with or without fused multiply-adds; the tests measure it against double precision.
//!
//! Comparisons are written so that NaN falls through to the result: `if x > a { a } else { x }`
//! keeps a NaN.

use std::f32::consts::{FRAC_1_SQRT_2, LN_2, LOG2_E};

mod gamma;

pub(crate) use gamma::{lgamma, polygamma};

/// How `a · b + c` is computed: with one rounding where the CPU has an instruction for it, with two
/// elsewhere.
pub(crate) trait Arith: 'static {
    /// Whether there is one rounding.
    const FUSED: bool;
    /// a · b + c
    fn fma(a: f32, b: f32, c: f32) -> f32;
}

/// Multiplication, then addition.
pub(crate) struct Plain;

/// A fused multiply-add.
pub(crate) struct Fused;

impl Arith for Plain {
    const FUSED: bool = false;
    #[inline(always)]
    fn fma(a: f32, b: f32, c: f32) -> f32 {
        a * b + c
    }
}

impl Arith for Fused {
    const FUSED: bool = true;
    #[inline(always)]
    fn fma(a: f32, b: f32, c: f32) -> f32 {
        a.mul_add(b, c)
    }
}

/// Σ cᵢ xⁱ, highest power first in the evaluation (Horner).
#[inline(always)]
fn polynomial<A: Arith, const N: usize>(x: f32, c: [f32; N]) -> f32 {
    let mut sum = c[N - 1];
    for &c in c[..N - 1].iter().rev() {
        sum = A::fma(sum, x, c);
    }
    sum
}

/// The magnitude of `x` with the sign of `sign`.
#[inline(always)]
fn signed(x: f32, sign: f32) -> f32 {
    const SIGN: u32 = 1 << 31;
    f32::from_bits((x.to_bits() & !SIGN) | (sign.to_bits() & SIGN))
}

/// Adding this rounds to an integer, which is then in the low bits of the sum.
const ROUND: f32 = 12_582_912.0; // 1.5 · 2²³

/// ln 2 in two parts; a product of the first with a small integer is exact.
const LN_2_HIGH: f32 = 0.693_359_4;
const LN_2_LOW: f32 = -2.121_944_4e-4;

/// The reduced argument that the exponential functions share: `eˣ = 2ⁿ · (1 + p)`.
struct Reduced {
    /// n and the bias in the low bits.
    n_bits: u32,
    /// eʳ − 1 for the rest r, |r| ≤ ½ ln 2.
    p: f32,
}

impl Reduced {
    /// 2ⁿ⁺ᵏ where the bias is 127 + k, for results that are normal floats.
    #[inline(always)]
    fn scale(&self) -> f32 {
        f32::from_bits(self.n_bits << 23)
    }
}

#[inline(always)]
fn reduce<A: Arith>(x: f32, bias: f32) -> Reduced {
    let shifted = A::fma(x, LOG2_E, ROUND + bias);
    let n = shifted - (ROUND + bias);
    let r = A::fma(n, -LN_2_LOW, A::fma(n, -LN_2_HIGH, x));
    Reduced {
        n_bits: shifted.to_bits(),
        p: expm1_small::<A>(r),
    }
}

/// eʳ − 1 = r + r² q(r) for |r| ≤ ½ ln 2; the fit's relative error is 2⁻²⁶.
const EXPM1: [f32; 5] = [
    0.499_999_97,
    0.166_665_39,
    0.041_667_745,
    0.008_367_058,
    0.001_383_875_6,
];

/// r + r² q(r), with the terms of q in pairs (Estrin): these functions wait for one result after
/// another, so depth counts.
#[inline(always)]
fn sextic<A: Arith>(r: f32, q: [f32; 5]) -> f32 {
    let square = r * r;
    let high = A::fma(square, q[4], A::fma(r, q[3], q[2]));
    A::fma(square, A::fma(square, high, A::fma(r, q[1], q[0])), r)
}

#[inline(always)]
fn expm1_small<A: Arith>(r: f32) -> f32 {
    sextic::<A>(r, EXPM1)
}

/// The bias for [`rescale`].
const TWICE: f32 = 254.0;

/// 2ⁿ · (1 + p) in two steps of half of n each, so that results may be subnormal or overflow.
#[inline(always)]
fn rescale<A: Arith>(reduced: &Reduced) -> f32 {
    let half = reduced.n_bits >> 1;
    let first = f32::from_bits(half << 23);
    let second = f32::from_bits((reduced.n_bits - half) << 23);
    A::fma(first, reduced.p, first) * second
}

/// `x` no further out than the bounds; NaN stays.
#[inline(always)]
fn clamp(x: f32, low: f32, high: f32) -> f32 {
    let x = if x > high { high } else { x };
    if x < low { low } else { x }
}

/// eˣ, at most 1.05 ULP off.
#[inline(always)]
pub(crate) fn exp<A: Arith>(x: f32) -> f32 {
    // Beyond the bounds the result is infinite or 0 anyway.
    let x = clamp(x, -104.0, 89.0);
    rescale::<A>(&reduce::<A>(x, TWICE))
}

/// 2ˣ, at most 1.05 ULP off.
#[inline(always)]
pub(crate) fn exp2<A: Arith>(x: f32) -> f32 {
    let x = clamp(x, -151.0, 129.0);
    let shifted = x + (ROUND + TWICE);
    let p = expm1_small::<A>((x - (shifted - (ROUND + TWICE))) * LN_2);
    rescale::<A>(&Reduced {
        n_bits: shifted.to_bits(),
        p,
    })
}

/// eˣ − 1, at most 1.65 ULP off.
#[inline(always)]
pub(crate) fn expm1<A: Arith>(x: f32) -> f32 {
    let bounded = clamp(x, -18.0, 89.0);
    // Half of everything, since 2¹²⁸ is no float.
    let reduced = reduce::<A>(bounded, 126.0);
    let half = reduced.scale();
    let result = 2.0 * A::fma(half, reduced.p, half - 0.5);
    // Keeps the sign of zero.
    if x.abs() < 1e-8 { x } else { result }
}

/// Adding this rounds to an integer n, and leaves n + 127 in the low bits of the sum: shifted up by
/// 23 bits they are 2ⁿ for n in −126..=127, and 0 for n = −127.
const ROUND_TO_SCALE: f32 = ROUND + 127.0;

/// 1/(1 + e⁻ˣ), at most 1.9 ULP off; below the smallest normal float it is 0.
#[inline(always)]
pub(crate) fn sigmoid<A: Arith>(x: f32) -> f32 {
    sigmoid_end::<A>(x, sigmoid_begin::<A>(x))
}

/// x within bounds, and n + [`ROUND_TO_SCALE`] for the integer n next to x/ln 2.
#[inline(always)]
fn sigmoid_scale<A: Arith>(x: f32) -> (f32, f32) {
    // On the right the result is 1. On the left, where it is no normal float, n is −127.
    let x = if x > 80.0 { 80.0 } else { x };
    let x = if x < -87.336_54 { -88.0 } else { x };
    (x, A::fma(x, LOG2_E, ROUND_TO_SCALE))
}

/// The first half of [`sigmoid`]: the rest r of x = n ln 2 − r.
#[inline(always)]
pub(crate) fn sigmoid_begin<A: Arith>(x: f32) -> f32 {
    let (x, shifted) = sigmoid_scale::<A>(x);
    let n = shifted - ROUND_TO_SCALE;
    A::fma(n, LN_2_LOW, A::fma(n, LN_2_HIGH, -x))
}

/// The second half of [`sigmoid`].
#[inline(always)]
pub(crate) fn sigmoid_end<A: Arith>(x: f32, r: f32) -> f32 {
    // 2ⁿ/(2ⁿ + eʳ), where the sum is taken of 1 + 2ⁿ, the part of it that rounding lost, and
    // eʳ − 1.
    let scale = f32::from_bits(sigmoid_scale::<A>(x).1.to_bits() << 23);
    let high = 1.0 + scale;
    let lost = scale - (high - 1.0);
    scale / (high + (lost + expm1_small::<A>(r)))
}

/// tanh x, at most 1.95 ULP off, and 2.01 without fused multiply-adds.
#[inline(always)]
pub(crate) fn tanh<A: Arith>(x: f32) -> f32 {
    tanh_end::<A>(x, tanh_begin::<A>(x))
}

/// The first half of [`tanh`]: t = (e^2|x| − 1)/2.
#[inline(always)]
pub(crate) fn tanh_begin<A: Arith>(x: f32) -> f32 {
    // From 9.02 on the result rounds to 1.
    let a = x.abs();
    let a = if a > 9.02 { 9.02 } else { a };
    // 2a = n ln 2 + 2r. The product with n is exact enough where it is not rounded; n is at most
    // 26.
    let shifted = A::fma(a, 2.0 * LOG2_E, ROUND_TO_SCALE);
    let n = shifted - ROUND_TO_SCALE;
    let r = if A::FUSED {
        A::fma(n, -0.5 * LN_2, a)
    } else {
        (a - n * (0.5 * LN_2_HIGH)) - n * (0.5 * LN_2_LOW)
    };
    // (e²ʳ − 1)/2 by the same fit, and 2ⁿ.
    const Q: [f32; 5] = [
        2.0 * EXPM1[0],
        4.0 * EXPM1[1],
        8.0 * EXPM1[2],
        16.0 * EXPM1[3],
        32.0 * EXPM1[4],
    ];
    let half = sextic::<A>(r, Q);
    let scale = f32::from_bits(shifted.to_bits() << 23);
    A::fma(scale, half, A::fma(scale, 0.5, -0.5))
}

/// The second half of [`tanh`]: t/(t + 1), with the sign of x.
#[inline(always)]
pub(crate) fn tanh_end<A: Arith>(x: f32, t: f32) -> f32 {
    let quotient = t / (t + 1.0);
    // Near 0, t − t · quotient feels less of the quotient's errors.
    let magnitude = if t < 0.5 {
        A::fma(-t, quotient, t)
    } else {
        quotient
    };
    f32::from_bits(magnitude.to_bits() | (x.to_bits() & (1 << 31)))
}

/// The nearest number that an IEEE half can hold, halves to even; NaN stays NaN.
#[inline(always)]
pub(crate) fn round_f16(x: f32) -> f32 {
    /// The smallest normal half, and the least magnitude that rounds to infinity.
    const NORMAL: f32 = 6.103_515_6e-5;
    const INFINITE: f32 = 65_520.0;
    /// Half of the distance of two normal halves, in the last places of an f32, and their mask.
    const HALF: u32 = 1 << 12;
    const DROPPED: u32 = 2 * HALF - 1;
    let magnitude = x.abs();
    let bits = magnitude.to_bits();
    // A carry out of the significand increments the exponent, which is right.
    let odd = (bits / (2 * HALF)) & 1;
    let normal = f32::from_bits((bits + HALF - 1 + odd) & !DROPPED);
    // Numbers around 0.5 are as far apart as subnormal halves.
    let subnormal = (magnitude + 0.5) - 0.5;
    let rounded = if magnitude < NORMAL {
        subnormal
    } else {
        normal
    };
    let rounded = if magnitude >= INFINITE {
        f32::INFINITY
    } else {
        rounded
    };
    let rounded = if x.is_nan() { x } else { rounded };
    signed(rounded, x)
}

/// The nearest number that a bfloat16 can hold, halves to even; NaN stays NaN.
#[inline(always)]
pub(crate) fn round_bf16(x: f32) -> f32 {
    const HALF: u32 = 1 << 15;
    let bits = x.to_bits();
    let odd = (bits >> 16) & 1;
    let rounded = bits.wrapping_add(HALF - 1 + odd) & 0xFFFF_0000;
    // A NaN must not become another number, and needs a bit that remains.
    let nan = (bits | 0x0040_0000) & 0xFFFF_0000;
    f32::from_bits(if x.is_nan() { nan } else { rounded })
}

/// The exponent k and the argument f of the remaining logarithm: `x = 2ᵏ (1 + f)` with `√½ ≤ 1 + f
/// < √2`, for positive normal floats.
#[inline(always)]
fn split(x: f32) -> (i32, f32) {
    const SQRT_HALF: i32 = 0x3F35_04F3;
    let bits = x.to_bits() as i32;
    let k = bits.wrapping_sub(SQRT_HALF) >> 23;
    (k, f32::from_bits(bits.wrapping_sub(k << 23) as u32) - 1.0)
}

/// k ln 2 + ln(1 + f) + more, the smallest parts first; the fit's relative error is 2⁻²⁷.
#[inline(always)]
fn ln_parts<A: Arith>(k: f32, f: f32, more: f32) -> f32 {
    let p = polynomial::<A, 8>(
        f,
        [
            0.333_333_3,
            -0.250_008_2,
            0.200_012_27,
            -0.166_233_57,
            0.142_017_57,
            -0.131_601_81,
            0.127_615_78,
            -0.076_345_03,
        ],
    );
    let square = f * f;
    let small = A::fma(k, LN_2_LOW, A::fma(f * square, p, more));
    A::fma(k, LN_2_HIGH, f + A::fma(-0.5, square, small))
}

/// ln x, at most 0.9 ULP off.
#[inline(always)]
pub(crate) fn ln<A: Arith>(x: f32) -> f32 {
    // Subnormal numbers are scaled up.
    let (scale, steps) = if x < f32::MIN_POSITIVE {
        (8_388_608.0, 23)
    } else {
        (1.0, 0)
    };
    let (k, f) = split(x * scale);
    positive_only(x, ln_parts::<A>((k - steps) as f32, f, 0.0))
}

/// The logarithm of every x, given its value for positive finite x.
#[inline(always)]
fn positive_only(x: f32, ln: f32) -> f32 {
    let below = if x == 0.0 {
        f32::NEG_INFINITY
    } else {
        f32::NAN
    };
    let finite = if x < f32::INFINITY { ln } else { x };
    if x > 0.0 { finite } else { below }
}

/// ln(1 + x), at most 0.9 ULP off.
#[inline(always)]
pub(crate) fn log1p<A: Arith>(x: f32) -> f32 {
    let u = 1.0 + x;
    let (k, f) = split(u);
    // The part of u that rounding lost, and the reciprocal of 1 + f to a few percent: the
    // correction is at most half an ULP of u.
    let lost = if x < 1.0 {
        x - (u - 1.0)
    } else {
        1.0 - (u - x)
    };
    let scale = f32::from_bits(((127 - k.clamp(-30, 60)) << 23) as u32);
    let correction = lost * scale * A::fma(f, f, 1.0 - f);
    // Around 1 nothing need be lost at all.
    let (f, correction) = if k == 0 { (x, 0.0) } else { (f, correction) };
    let result = positive_only(u, ln_parts::<A>(k as f32, f, correction));
    // Keeps the sign of zero.
    if x.abs() < 1e-8 { x } else { result }
}

/// The error function, at most 1.3 ULP off.
#[inline(always)]
pub(crate) fn erf<A: Arith>(x: f32) -> f32 {
    erf_end::<A>(x, erf_begin::<A>(x))
}

/// The first half of [`erf`]: q(|x|), where erf |x| = 1 − e^q further out. From 4 on the result
/// rounds to 1.
#[inline(always)]
pub(crate) fn erf_begin<A: Arith>(x: f32) -> f32 {
    let a = x.abs();
    let a = if a > 4.0 { 4.0 } else { a };
    polynomial::<A, 7>(
        a,
        [
            -0.000_166_499_06,
            -1.127_797,
            -0.636_976_54,
            -0.104_113_21,
            0.022_314_945,
            -0.003_065_410_3,
            0.000_198_208_67,
        ],
    )
}

/// The second half of [`erf`]: x + x·p(x²) near 0, else from q.
#[inline(always)]
pub(crate) fn erf_end<A: Arith>(x: f32, q: f32) -> f32 {
    let p = polynomial::<A, 6>(
        x * x,
        [
            0.128_379_15,
            -0.376_125_1,
            0.112_82,
            -0.026_773_658,
            0.005_003_959_4,
            -0.000_604_781_44,
        ],
    );
    let near = A::fma(x, p, x);
    let reduced = reduce::<A>(q, 127.0);
    let far = 1.0 - (1.0 + reduced.p) * reduced.scale();
    if x.abs() < 0.9 { near } else { signed(far, x) }
}

/// x·Φ(x) = ½x·(1 + erf(x/√2)), at most 2⁻²³·|x| off.
#[inline(always)]
pub(crate) fn gelu<A: Arith>(x: f32) -> f32 {
    x * 0.5 * (erf::<A>(x * FRAC_1_SQRT_2) + 1.0)
}

/// The derivative of [`gelu`], Φ(x) + x·φ(x) with the normal density φ, at most 2⁻²² off.
#[inline(always)]
pub(crate) fn gelu_slope<A: Arith>(x: f32) -> f32 {
    // From 15 on the density is 0.
    let bounded = clamp(x, -15.0, 15.0);
    let density = exp::<A>(bounded * bounded * -0.5) * INV_SQRT_2_PI;
    A::fma(bounded, density, 0.5 * (erf::<A>(x * FRAC_1_SQRT_2) + 1.0))
}

/// 1/√(2π)
pub(crate) const INV_SQRT_2_PI: f32 = 0.398_942_3;

/// √(8/π) and the factor of x³ in [`gelu_tanh`].
pub(crate) const SQRT_8_OVER_PI: f32 = 1.595_769;
pub(crate) const GELU_CUBIC: f32 = 0.044_715;

/// x·σ(z) with z = √(8/π)·(x + 0.044715·x³), at most 1.25·2⁻²³·|x| off.
#[inline(always)]
pub(crate) fn gelu_tanh<A: Arith>(x: f32) -> f32 {
    let z = x * A::fma(x * x, GELU_CUBIC, 1.0) * SQRT_8_OVER_PI;
    x * sigmoid::<A>(z)
}

/// The derivative of [`gelu_tanh`], σ + x·σ·(1 − σ)·z′, at most 2⁻²² off.
#[inline(always)]
pub(crate) fn gelu_tanh_slope<A: Arith>(x: f32) -> f32 {
    // From 11 on it is 1, and from −11 on 0.
    let x = clamp(x, -11.0, 11.0);
    let square = x * x;
    let z = x * A::fma(square, GELU_CUBIC, 1.0) * SQRT_8_OVER_PI;
    let slope = A::fma(square, 3.0 * GELU_CUBIC, 1.0) * SQRT_8_OVER_PI;
    // σ(|z|) and 1 − σ(|z|), without cancellation.
    let power = exp::<A>(-z.abs());
    let high = 1.0 / (1.0 + power);
    let low = power * high;
    let s = if z < 0.0 { low } else { high };
    A::fma(x * high * low, slope, s)
}

/// 2/π as a binary fraction, after 64 zeros.
const TWO_OVER_PI: [u64; 5] = [
    0,
    0xA2F9_836E_4E44_1529,
    0xFC27_57D1_F534_DDC0,
    0xDB62_9599_3C43_9041,
    0xFE51_63AB_DEBB_C561,
];

/// |x| as a multiple of π/2, modulo 4, and the remainder, between −π/4 and π/4: off by at most 2⁻⁶⁰.
#[inline(always)]
fn turns(x: f32) -> (u32, f64) {
    let bits = x.to_bits();
    let exponent = (bits >> 23) & 0xFF;
    // |x| = m · 2^(exponent − 150). Of the bits of 2/π, those above 2^(150 − exponent + 2) would
    // only give multiples of 4; the 96 bits from there on, times m, give |x| · 2/π mod 4 in units
    // of 2⁻⁶².
    let m = u64::from((bits & 0x007F_FFFF) | 0x0080_0000);
    let start = u64::from(exponent.saturating_sub(88));
    let (word, shift) = (start >> 6, start & 63);
    let choose = |k: usize| {
        if word == 0 {
            TWO_OVER_PI[k]
        } else if word == 1 {
            TWO_OVER_PI[k + 1]
        } else {
            TWO_OVER_PI[k + 2]
        }
    };
    let (a, b, c) = (choose(0), choose(1), choose(2));
    let high = (a << shift) | ((b >> 1) >> (63 - shift));
    let low = (b << shift) | ((c >> 1) >> (63 - shift));
    let turns = m.wrapping_mul(high).wrapping_add((m * (low >> 32)) >> 32);
    let n = turns.wrapping_add(1 << 61) >> 62;
    let rest = turns.wrapping_sub(n << 62) as i64;
    let r = rest as f64 * (std::f64::consts::FRAC_PI_2 / (1u64 << 62) as f64);
    (n as u32, r)
}

/// |x| as a multiple of π/2, modulo 4, and the remainder, between −π/4 and π/4; exact to single
/// precision for every x.
#[inline(always)]
fn quadrant(x: f32) -> (u32, f32) {
    let (n, r) = turns(x);
    let a = x.abs();
    if a < std::f32::consts::FRAC_PI_4 {
        (0, a)
    } else {
        (n, r as f32)
    }
}

/// Sine of the angle `n` quarter turns and `r`, |r| ≤ π/4; the fits' relative errors are 2⁻²⁸ and
/// 2⁻³³.
#[inline(always)]
fn sine<A: Arith>(n: u32, r: f32) -> f32 {
    let square = r * r;
    let s = polynomial::<A, 3>(square, [-0.166_666_55, 0.008_332_189, -0.000_195_182_85]);
    let c = polynomial::<A, 3>(square, [0.041_666_645, -0.001_388_731, 0.000_024_432_327]);
    let sin = A::fma(r * square, s, r);
    let cos = A::fma(square * square, c, A::fma(square, -0.5, 1.0));
    let value = if n & 1 == 0 { sin } else { cos };
    f32::from_bits(value.to_bits() ^ ((n & 2) << 30))
}

/// sin x, at most 1.6 ULP off for every x.
#[inline(always)]
pub(crate) fn sin<A: Arith>(x: f32) -> f32 {
    let (n, r) = quadrant(x);
    let value = sine::<A>(n, r);
    let value = f32::from_bits(value.to_bits() ^ (x.to_bits() & (1 << 31)));
    if x.abs() < f32::INFINITY {
        value
    } else {
        f32::NAN
    }
}

/// cos x, at most 1.6 ULP off for every x.
#[inline(always)]
pub(crate) fn cos<A: Arith>(x: f32) -> f32 {
    let (n, r) = quadrant(x);
    let value = sine::<A>(n.wrapping_add(1), r);
    if x.abs() < f32::INFINITY {
        value
    } else {
        f32::NAN
    }
}

/// tan x, at most 0.51 ULP off: computed in double precision.
#[inline(always)]
pub(crate) fn tan(x: f32) -> f32 {
    let (n, r) = turns(x);
    let small = x.abs() < std::f32::consts::FRAC_PI_4;
    let r = if small { f64::from(x.abs()) } else { r };
    let odd = !small && n & 1 != 0;
    // The series of sine and cosine, |r| ≤ π/4.
    let square = r * r;
    let (mut sin, mut cos) = (1.0, 1.0);
    for k in [14.0, 12.0, 10.0, 8.0, 6.0, 4.0, 2.0] {
        sin = 1.0 - sin * square * (1.0 / (k * (k + 1.0)));
        cos = 1.0 - cos * square * (1.0 / (k * (k - 1.0)));
    }
    let sin = sin * r;
    let value = (if odd { -cos } else { sin } / if odd { sin } else { cos }) as f32;
    let value = f32::from_bits(value.to_bits() ^ (x.to_bits() & (1 << 31)));
    if x.abs() < f32::INFINITY {
        value
    } else {
        f32::NAN
    }
}

/// eᵃ/4 for a ≥ 0, at most 1.05 ULP off; from 89.5 on, where the hyperbolic functions are infinite,
/// it is constant.
#[inline(always)]
fn quarter_exp<A: Arith>(a: f32) -> f32 {
    let reduced = reduce::<A>(if a > 89.5 { 89.5 } else { a }, 125.0);
    let quarter = reduced.scale();
    A::fma(quarter, reduced.p, quarter)
}

/// sinh x, at most 2 ULP off.
#[inline(always)]
pub(crate) fn sinh<A: Arith>(x: f32) -> f32 {
    // The series near 0; (eˣ − e⁻ˣ)/2 further out.
    let square = x * x;
    let p = polynomial::<A, 5>(
        square,
        [
            1.0 / 6.0,
            1.0 / 120.0,
            1.0 / 5040.0,
            1.0 / 362_880.0,
            1.0 / 39_916_800.0,
        ],
    );
    let near = A::fma(x * square, p, x);
    let quarter = quarter_exp::<A>(x.abs());
    let far = 2.0 * (quarter - 0.0625 / quarter);
    if x.abs() < 1.0 { near } else { signed(far, x) }
}

/// cosh x, at most 2 ULP off.
#[inline(always)]
pub(crate) fn cosh<A: Arith>(x: f32) -> f32 {
    let quarter = quarter_exp::<A>(x.abs());
    2.0 * (quarter + 0.0625 / quarter)
}

/// The angle of the point (x, y), with the special cases of IEEE 754, at most 0.51 ULP off:
/// computed in double precision.
#[inline(always)]
pub(crate) fn atan2(y: f32, x: f32) -> f32 {
    let (a, b) = (y.abs(), x.abs());
    let steep = a > b;
    let (small, large) = if steep { (b, a) } else { (a, b) };
    // Equal numbers need no quotient, which would not exist of zeros or infinities.
    let known = if large == 0.0 { 0.0 } else { 1.0 };
    let quotient = f64::from(small) / f64::from(large);
    let t = if small == large { known } else { quotient };
    let square = t * t;
    let mut sum = -0.000_663_395_350_178_082_5;
    for c in [
        0.004_732_483_163_631_211,
        -0.015_828_319_131_590_74,
        0.033_826_212_304_726_75,
        -0.053_956_673_284_119_46,
        0.072_282_778_424_020_45,
        -0.089_741_717_367_436_04,
        0.110_919_229_024_269_75,
        -0.142_838_132_456_719_3,
        0.199_999_011_012_901_16,
        -0.333_333_312_908_577_7,
        0.999_999_999_929_301_4,
    ] {
        sum = sum * square + c;
    }
    let angle = sum * t;
    let angle = if steep {
        std::f64::consts::FRAC_PI_2 - angle
    } else {
        angle
    };
    let angle = if x.is_sign_negative() {
        std::f64::consts::PI - angle
    } else {
        angle
    };
    let value = signed(angle as f32, y);
    if x.is_nan() || y.is_nan() {
        f32::NAN
    } else {
        value
    }
}

/// log₂ x, at most 0.51 ULP off: computed in double precision.
#[inline(always)]
pub(crate) fn log2(x: f32) -> f32 {
    let value = log2_wide(x.abs()) as f32;
    if x < 0.0 { f32::NAN } else { value }
}

/// log₁₀ x, at most 0.51 ULP off: computed in double precision.
#[inline(always)]
pub(crate) fn log10(x: f32) -> f32 {
    let value = (log2_wide(x.abs()) * std::f64::consts::LOG10_2) as f32;
    if x < 0.0 { f32::NAN } else { value }
}

/// xʸ of integers, which wraps; for y < 0 the integer part of the fraction, and 0 for 0ʸ.
#[inline(always)]
pub(crate) fn integer_pow(x: i32, y: i32) -> i32 {
    let (mut base, mut rest, mut power) = (x, y as u32, 1i32);
    while y > 0 && rest != 0 {
        if rest & 1 != 0 {
            power = power.wrapping_mul(base);
        }
        base = base.wrapping_mul(base);
        rest >>= 1;
    }
    let even = y & 1 == 0;
    match x {
        1 => 1,
        -1 => {
            if even {
                1
            } else {
                -1
            }
        }
        _ if y < 0 => 0,
        _ => power,
    }
}

/// xʸ with the special cases of IEEE 754, at most 0.51 ULP off: computed in double precision.
#[inline(always)]
pub(crate) fn pow(x: f32, y: f32) -> f32 {
    let magnitude = exp2_wide(f64::from(y) * log2_wide(x.abs()));
    // Floats from 2²³ on are integers; from 2²⁴ on they are even.
    let integer = y.abs() >= 8_388_608.0 || (y as i32) as f32 == y;
    let odd = integer && y.abs() < 16_777_216.0 && (y as i32) & 1 != 0;
    let result = if odd { signed(magnitude, x) } else { magnitude };
    let undefined = x < 0.0 && x > f32::NEG_INFINITY && !integer;
    let result = if undefined { f32::NAN } else { result };
    // 1 to any power; anything to the power 0; −1 to an infinite power.
    let one = x == 1.0 || y == 0.0 || (x == -1.0 && y.abs() == f32::INFINITY);
    if one { 1.0 } else { result }
}

/// log₂ x for x ≥ 0 in double precision, good to 2⁻⁴⁴.
#[inline(always)]
fn log2_wide(x: f32) -> f64 {
    let log = log2_of(f64::from(x));
    let finite = if x < f32::INFINITY { log } else { f64::from(x) };
    if x == 0.0 { f64::NEG_INFINITY } else { finite }
}

/// log₂ x of a normal positive number, good to 2⁻⁴⁴.
#[inline(always)]
fn log2_of(x: f64) -> f64 {
    const SQRT_HALF: i64 = 0x3FE6_A09E_667F_3BCD;
    let bits = x.to_bits() as i64;
    let k = (bits - SQRT_HALF) >> 52;
    let m = f64::from_bits((bits - (k << 52)) as u64);
    // ln m = 2 artanh s = 2 (s + s³/3 + s⁵/5 + …), |s| ≤ 0.172.
    let s = (m - 1.0) / (m + 1.0);
    let square = s * s;
    let mut sum = 1.0 / 17.0;
    for odd in [15.0, 13.0, 11.0, 9.0, 7.0, 5.0, 3.0, 1.0] {
        sum = sum * square + 1.0 / odd;
    }
    k as i32 as f64 + s * sum * (2.0 * std::f64::consts::LOG2_E)
}

/// 2ᵗ from double precision, rounded once.
#[inline(always)]
fn exp2_wide(t: f64) -> f32 {
    const ROUND: f64 = 6_755_399_441_055_744.0; // 1.5 · 2⁵²
    let t = if t > 200.0 { 200.0 } else { t };
    let t = if t < -200.0 { -200.0 } else { t };
    let shifted = t + ROUND;
    // eʳ by its series, |r| ≤ ½ ln 2.
    let r = (t - (shifted - ROUND)) * std::f64::consts::LN_2;
    let mut sum = 1.0;
    for n in [11.0, 10.0, 9.0, 8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0] {
        sum = sum * r * (1.0 / n) + 1.0;
    }
    (sum * f64::from_bits(shifted.to_bits().wrapping_add(1023) << 52)) as f32
}

#[cfg(test)]
mod tests;
