//! Elementwise operations in double precision, written a second time on purpose: an oracle for the
//! scalar table.

use std::f64::consts::{FRAC_1_SQRT_2, PI};

use slabwise_kernels::scalar::ScalarOp;

/// The operation on doubles; truth values are 0 and 1.
pub(super) fn scalar(op: ScalarOp, args: &[f64]) -> f64 {
    let x = args[0];
    let y = args.get(1).copied().unwrap_or(f64::NAN);
    let truth = |b: bool| f64::from(u8::from(b));
    match op {
        ScalarOp::Add => x + y,
        ScalarOp::Sub => x - y,
        ScalarOp::Mul => x * y,
        ScalarOp::Div => x / y,
        ScalarOp::Fmod => x - y * (x / y).trunc(),
        ScalarOp::Neg => -x,
        ScalarOp::Abs => x.abs(),
        ScalarOp::Detach | ScalarOp::Near | ScalarOp::WithSlope => x,
        ScalarOp::Clamp if x < y => y,
        ScalarOp::Clamp if x > args[2] => args[2],
        ScalarOp::Clamp => x,
        ScalarOp::Sign if x == 0.0 || x.is_nan() => x,
        ScalarOp::Sign => x.signum(),
        ScalarOp::Min | ScalarOp::Max if x.is_nan() || y.is_nan() => f64::NAN,
        ScalarOp::Min => x.min(y),
        ScalarOp::Max => x.max(y),
        ScalarOp::Pow => x.powf(y),
        ScalarOp::Exp => x.exp(),
        ScalarOp::Exp2 => x.exp2(),
        ScalarOp::Expm1 => x.exp_m1(),
        ScalarOp::Ln => x.ln(),
        ScalarOp::Log2 => x.log2(),
        ScalarOp::Log10 => x.log10(),
        ScalarOp::Log1p => x.ln_1p(),
        ScalarOp::Sqrt => x.sqrt(),
        ScalarOp::Rsqrt => x.sqrt().recip(),
        ScalarOp::Recip => x.recip(),
        ScalarOp::Tanh => x.tanh(),
        // (1 + tanh(x/2)) / 2 is the same function by another way.
        ScalarOp::Sigmoid => 0.5 + 0.5 * (0.5 * x).tanh(),
        ScalarOp::Relu if x.is_nan() => x,
        ScalarOp::Relu => x.max(0.0),
        ScalarOp::Erf => erf(x),
        ScalarOp::Gelu => x * normal(x),
        ScalarOp::GeluSlope => normal(x) + x * density(x),
        ScalarOp::GeluTanh => 0.5 * x * (1.0 + gelu_inner(x).tanh()),
        ScalarOp::GeluTanhSlope => {
            let tanh = gelu_inner(x).tanh();
            let inner = (2.0 / PI).sqrt() * (1.0 + 3.0 * 0.044715 * x * x);
            0.5 * (1.0 + tanh) + 0.5 * x * (1.0 - tanh * tanh) * inner
        }
        ScalarOp::Sin => x.sin(),
        ScalarOp::Cos => x.cos(),
        ScalarOp::Tan => x.tan(),
        ScalarOp::Sinh => x.sinh(),
        ScalarOp::Cosh => x.cosh(),
        ScalarOp::Atan2 => x.atan2(y),
        ScalarOp::Lgamma => lgamma(x),
        ScalarOp::Polygamma => polygamma(x.round_ties_even(), y),
        // Storage is not rounded in double precision.
        ScalarOp::RoundF16 | ScalarOp::RoundBf16 => x,
        ScalarOp::Floor => x.floor(),
        ScalarOp::Ceil => x.ceil(),
        ScalarOp::Round => x.round_ties_even(),
        ScalarOp::Lt => truth(x < y),
        ScalarOp::Le => truth(x <= y),
        ScalarOp::Gt => truth(x > y),
        ScalarOp::Ge => truth(x >= y),
        ScalarOp::Eq => truth(x == y),
        ScalarOp::Ne => truth(x != y),
        ScalarOp::And => truth(x != 0.0 && y != 0.0),
        ScalarOp::Or => truth(x != 0.0 || y != 0.0),
        ScalarOp::Xor => truth((x != 0.0) != (y != 0.0)),
        ScalarOp::Not => truth(x == 0.0),
        ScalarOp::BitAnd => bits(x, y, |x, y| x & y),
        ScalarOp::BitOr => bits(x, y, |x, y| x | y),
        ScalarOp::BitXor => bits(x, y, |x, y| x ^ y),
        ScalarOp::ShiftLeft if (0.0..32.0).contains(&y) => bits(x, y, |x, y| x << y),
        ScalarOp::ShiftLeft => 0.0,
        ScalarOp::ShiftRight if (0.0..32.0).contains(&y) => bits(x, y, |x, y| x >> y),
        ScalarOp::ShiftRight => bits(x, 31.0, |x, y| x >> y),
        ScalarOp::Select => args[if x != 0.0 { 1 } else { 2 }],
    }
}

/// The normal distribution function.
fn normal(x: f64) -> f64 {
    0.5 * (1.0 + erf(x * FRAC_1_SQRT_2))
}

/// The normal density.
fn density(x: f64) -> f64 {
    (-0.5 * x * x).exp() / (2.0 * PI).sqrt()
}

/// The argument of tanh in the approximation of gelu.
fn gelu_inner(x: f64) -> f64 {
    (2.0 / PI).sqrt() * (x + 0.044715 * x.powi(3))
}

/// An operation on the bits of integers.
fn bits(x: f64, y: f64, op: impl Fn(i32, i32) -> i32) -> f64 {
    f64::from(op(x as i32, y as i32))
}

/// The large argument at which the sums below start.
fn far(x: f64) -> f64 {
    x + (400.0 - x).max(0.0).ceil()
}

/// ln |Γ(x)|: Γ(x) = Γ(x + n) / (x … (x + n − 1)), and three terms of Stirling's series there.
fn lgamma(x: f64) -> f64 {
    let end = far(x);
    let steps = (end - x) as u32;
    let below: f64 = (0..steps).map(|i| (x + f64::from(i)).abs().ln()).sum();
    let half_log = (2.0 * PI).ln() / 2.0;
    (end - 0.5) * end.ln() - end + half_log + 1.0 / (12.0 * end)
        - 1.0 / (360.0 * end.powi(3))
        - below
}

/// The derivative of order `n` of ψ: the sum over the poles up to far away, and the integral of the
/// rest by the midpoint rule with one correction.
fn polygamma(n: f64, x: f64) -> f64 {
    let end = far(x);
    let steps = (end - x) as u32;
    let poles = |s: f64| -> f64 { (0..steps).map(|i| (x + f64::from(i)).powf(-s)).sum() };
    let middle = end - 0.5;
    if n == 0.0 {
        return middle.ln() + 1.0 / (24.0 * middle * middle) - poles(1.0);
    }
    let rest = middle.powf(-n) / n - (n + 1.0) / 24.0 * middle.powf(-n - 2.0);
    let factorial: f64 = (1..=n as u32).map(f64::from).product();
    let sign = if n % 2.0 == 0.0 { -1.0 } else { 1.0 };
    sign * factorial * (poles(n + 1.0) + rest)
}

/// erf by Simpson's rule on its defining integral: 4,000 intervals leave an error near that of the
/// doubles themselves.
fn erf(x: f64) -> f64 {
    const INTERVALS: u32 = 4000;
    // Beyond 6, erf differs from ±1 by less than a double shows.
    let end = x.clamp(-6.0, 6.0);
    let width = end / f64::from(INTERVALS);
    let sum: f64 = (0..=INTERVALS)
        .map(|i| {
            let t = f64::from(i) * width;
            let weight = if i == 0 || i == INTERVALS {
                1.0
            } else {
                f64::from(2 + 2 * (i % 2))
            };
            weight * (-t * t).exp()
        })
        .sum();
    sum * width / 3.0 * std::f64::consts::FRAC_2_SQRT_PI
}
