//! The logarithm of the gamma function and the polygamma functions, in double precision.

use super::log2_of;

/// From here on Stirling's series is used; smaller arguments are moved up to it.
const LARGE: f64 = 10.0;
/// The terms of a sum over the poles of a polygamma function that are left of zero; those further
/// away are too small to count.
const POLES: f64 = 512.0;
/// The largest order of a polygamma function.
const MOST: f32 = 100.0;

fn ln(x: f64) -> f64 {
    log2_of(x) * std::f64::consts::LN_2
}

/// Bernoulli's numbers of even index from 2 on, divided by that index.
const BERNOULLI: [f64; 8] = [
    1.0 / 12.0,
    -1.0 / 120.0,
    1.0 / 252.0,
    -1.0 / 240.0,
    1.0 / 132.0,
    -691.0 / 32760.0,
    1.0 / 12.0,
    -3617.0 / 8160.0,
];

/// sin(πr) and cos(πr) for |r| ≤ ½, by their series.
fn half_turn(r: f64) -> (f64, f64) {
    let square = (r * std::f64::consts::PI) * (r * std::f64::consts::PI);
    let (mut sin, mut cos) = (1.0, 1.0);
    let mut k = 20.0;
    while k > 0.0 {
        sin = 1.0 - sin * square / (k * (k + 1.0));
        cos = 1.0 - cos * square / (k * (k - 1.0));
        k -= 2.0;
    }
    (sin * r * std::f64::consts::PI, cos)
}

/// Whether the gamma function has a pole there.
fn is_pole(x: f32) -> bool {
    x <= 0.0 && x == x.floor()
}

/// ln |Γ(x)|, at most 0.51 ULP off for x > 0, and 2⁻²⁵ of 1 + |ln |Γ(x)|| below; ∞ at the poles.
pub(crate) fn lgamma(x: f32) -> f32 {
    if x.is_nan() {
        return x;
    }
    if is_pole(x) || x.is_infinite() {
        return f32::INFINITY;
    }
    let wide = f64::from(x);
    if x > 0.0 {
        return of_positive(wide) as f32;
    }
    // Γ(x) Γ(1 − x) = π / sin πx
    let (sin, _) = half_turn(wide - wide.round_ties_even());
    (ln(std::f64::consts::PI / sin.abs()) - of_positive(1.0 - wide)) as f32
}

/// ln Γ(x) for x > 0.
fn of_positive(x: f64) -> f64 {
    if x >= LARGE {
        let square = 1.0 / (x * x);
        // Σ B₂ₖ / (2k (2k − 1) x²ᵏ⁻¹)
        let mut sum = 0.0;
        for (k, b) in BERNOULLI.iter().enumerate().rev() {
            sum = sum * square + b / (2 * k + 1) as f64;
        }
        return (x - 0.5) * ln(x) - x + 0.918_938_533_204_672_7 + sum / x;
    }
    // Γ(x) = (x − 1) Γ(x − 1), down or up to 1.5 ≤ y ≤ 2.5.
    let (mut y, mut product) = (x, 1.0);
    while y > 2.5 {
        y -= 1.0;
        product *= y;
    }
    let mut below = 0.0;
    while y < 1.5 {
        below += ln(y);
        y += 1.0;
    }
    // ln Γ(y) / ((y − 1) (y − 2)), a fit at Chebyshev's points.
    let z = y - 2.0;
    let mut sum = 4.503_781_701_029_357_6e-5;
    for c in [
        -9.651_199_115_595_943e-5,
        0.000_180_552_038_835_622_7,
        -0.000_402_242_517_913_743_93,
        0.000_915_640_820_808_623_2,
        -0.002_108_516_008_264_745,
        0.004_998_625_539_609_544,
        -0.012_384_174_829_144_02,
        0.032_965_000_958_286_15,
        -0.100_317_301_892_831_78,
        0.422_784_335_097_291_6,
    ] {
        sum = sum * z + c;
    }
    let fitted = sum * z * (z + 1.0);
    if product == 1.0 {
        fitted - below
    } else {
        fitted + ln(product)
    }
}

/// The derivative of order `n` of [`digamma`], for a whole number 0 ≤ n ≤ 100, else NaN; at the
/// poles as PyTorch has it. Of x > 0 at most 0.6 ULP off.
pub(crate) fn polygamma(n: f32, x: f32) -> f32 {
    let n = n.round_ties_even();
    if !(0.0..=MOST).contains(&n) || x.is_nan() {
        return f32::NAN;
    }
    if n == 0.0 {
        return digamma(x);
    }
    if x == f32::INFINITY {
        return 0.0;
    }
    let (wide, n) = (f64::from(x), f64::from(n));
    let value = if n == 1.0 && x < 0.0 && !is_pole(x) {
        // ψ₁(x) + ψ₁(1 − x) = (π / sin πx)²
        let (sin, _) = half_turn(wide - wide.round_ties_even());
        let ratio = std::f64::consts::PI / sin;
        ratio * ratio - zeta(2.0, 1.0 - wide)
    } else {
        let (mut factorial, mut k) = (1.0, 1.0);
        while k <= n {
            factorial *= k;
            k += 1.0;
        }
        let sign = if n % 2.0 == 0.0 { -1.0 } else { 1.0 };
        sign * factorial
            * if is_pole(x) {
                f64::INFINITY
            } else {
                zeta(n + 1.0, wide)
            }
    };
    value as f32
}

/// The derivative of ln Γ; ∓∞ at ±0, NaN at the other poles.
fn digamma(x: f32) -> f32 {
    if x == 0.0 {
        return f32::INFINITY.copysign(-x);
    }
    if is_pole(x) || x == f32::NEG_INFINITY {
        return f32::NAN;
    }
    if x == f32::INFINITY {
        return x;
    }
    let wide = f64::from(x);
    // ψ(1 − x) − ψ(x) = π cot πx
    let (mut y, mut value) = (wide, 0.0);
    if x < 0.0 {
        let (sin, cos) = half_turn(wide - wide.round_ties_even());
        (y, value) = (1.0 - wide, -std::f64::consts::PI * cos / sin);
    }
    while y < LARGE {
        value -= 1.0 / y;
        y += 1.0;
    }
    let square = 1.0 / (y * y);
    let mut sum = 0.0;
    for b in BERNOULLI.iter().rev() {
        sum = (sum + b) * square;
    }
    (value + ln(y) - 0.5 / y - sum) as f32
}

/// Σ (x + i)⁻ˢ for i ≥ 0 (Hurwitz's zeta function), by Euler and Maclaurin's formula.
fn zeta(s: f64, x: f64) -> f64 {
    let power = |base: f64| {
        let (mut factor, mut rest, mut all) = (1.0 / base, s as u32, 1.0);
        while rest != 0 {
            if rest & 1 != 0 {
                all *= factor;
            }
            factor *= factor;
            rest >>= 1;
        }
        all
    };
    let mut y = if x < -POLES {
        x + (-POLES - x).floor()
    } else {
        x
    };
    let mut sum = 0.0;
    while y < LARGE + s {
        sum += power(y);
        y += 1.0;
    }
    let term = power(y);
    sum += term * (y / (s - 1.0) + 0.5);
    // Σ B₂ₖ/(2k)! · s (s + 1) … (s + 2k − 2) y^(−s − 2k + 1)
    let (square, mut factor) = (1.0 / (y * y), s * term / y);
    for (k, b) in BERNOULLI.iter().enumerate() {
        sum += b * factor;
        let m = 2.0 * (k + 1) as f64;
        // From (2k − 1)! to (2k + 1)!.
        factor *= (s + m - 1.0) * (s + m) * square / (m * (m + 1.0));
    }
    sum
}
