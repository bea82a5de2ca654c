//! Errors against double precision, over all orders of magnitude.

use super::*;

/// The error of `got` in units in the last place of the exact result.
fn ulps(got: f32, exact: f64) -> f64 {
    if exact.is_nan() || got.is_nan() {
        return if exact.is_nan() && got.is_nan() {
            0.0
        } else {
            f64::INFINITY
        };
    }
    // Beyond the largest float, infinity stands for the next power of two.
    let wide = |x: f64| {
        if x.abs() > f64::from(f32::MAX) {
            x.signum() * x.abs().min(2f64.powi(128))
        } else {
            x
        }
    };
    let (got, exact) = (wide(f64::from(got)), wide(exact));
    let exponent = ((exact.abs().to_bits() >> 52) as i32 - 1023).clamp(-126, 127);
    (got - exact).abs() / 2f64.powi(exponent - 23)
}

/// The largest error over every `step`th float, and where.
fn worst(step: usize, f: impl Fn(f32) -> f32, exact: impl Fn(f64) -> f64) -> (f64, f32) {
    let all = (0..=u32::MAX).step_by(step).map(f32::from_bits);
    all.map(|x| (ulps(f(x), exact(f64::from(x))), x))
        .fold((0.0, 0.0), |a, b| if b.0 > a.0 { b } else { a })
}

/// erf by its series and continued fraction (Abramowitz & Stegun 7.1.6 and 7.1.14).
fn erf_reference(x: f64) -> f64 {
    let a = x.abs();
    if a.is_nan() || a > 7.0 {
        return if a.is_nan() { a } else { x.signum() };
    }
    let erf = if a < 3.0 {
        // erf x = 2/√π · e^{−x²} · Σ 2ⁿ x^{2n+1} / (1·3·…·(2n+1))
        let (mut term, mut sum, mut n) = (a, a, 0.0);
        while term > sum * 1e-17 {
            n += 1.0;
            term *= 2.0 * a * a / (2.0 * n + 1.0);
            sum += term;
        }
        sum * (-a * a).exp() * std::f64::consts::FRAC_2_SQRT_PI
    } else {
        let f = (1..60).rev().fold(0.0, |f, k| f64::from(k) / 2.0 / (a + f));
        1.0 - (-a * a).exp() / (a + f) / std::f64::consts::PI.sqrt()
    };
    erf.copysign(x)
}

/// 1/(1 + e⁻ˣ), 0 where `sigmoid` says so.
fn sigmoid_reference(x: f64) -> f64 {
    let y = 1.0 / (1.0 + (-x).exp());
    if y < f64::from(f32::MIN_POSITIVE) {
        0.0
    } else {
        y
    }
}

macro_rules! accurate {
    ($($name:ident: $limit:literal, $exact:expr;)+) => {$(
        #[test]
        fn $name() {
            let (error, x) = worst(1009, super::$name::<Plain>, $exact);
            assert!(error <= $limit, "{error} ULP at {x:e}");
            let (error, x) = worst(4099, super::$name::<Fused>, $exact);
            assert!(error <= $limit, "fused: {error} ULP at {x:e}");
        }
    )+};
}

// The limits are those the functions state.
accurate! {
    exp: 1.05, f64::exp;
    exp2: 1.05, f64::exp2;
    expm1: 1.65, f64::exp_m1;
    ln: 0.9, f64::ln;
    log1p: 0.9, f64::ln_1p;
    tanh: 1.95, f64::tanh;
    sigmoid: 1.9, sigmoid_reference;
    erf: 1.3, erf_reference;
    sin: 1.6, f64::sin;
    cos: 1.6, f64::cos;
    sinh: 2.0, f64::sinh;
    cosh: 2.0, f64::cosh;
}

/// Where results change fast or cancel, every order of magnitude is too coarse a sample.
#[test]
fn accurate_between_bounds() {
    let check = |name: &str,
                 range: std::ops::Range<f64>,
                 limit: f64,
                 f: &dyn Fn(f32) -> f32,
                 exact: &dyn Fn(f64) -> f64| {
        let n = 400_000;
        for i in 0..n {
            let x = (range.start + (range.end - range.start) * f64::from(i) / f64::from(n)) as f32;
            let error = ulps(f(x), exact(f64::from(x)));
            assert!(error <= limit, "{name}: {error} ULP at {x:e}");
        }
    };
    check("exp", -104.0..89.0, 1.05, &super::exp::<Plain>, &f64::exp);
    check(
        "exp2",
        -151.0..129.0,
        1.05,
        &super::exp2::<Plain>,
        &f64::exp2,
    );
    check(
        "expm1",
        -20.0..5.0,
        1.65,
        &super::expm1::<Plain>,
        &f64::exp_m1,
    );
    check("ln", 0.5..2.0, 0.9, &super::ln::<Plain>, &f64::ln);
    check("log1p", -0.9..3.0, 0.9, &super::log1p::<Plain>, &f64::ln_1p);
    check("tanh", -10.0..10.0, 1.95, &super::tanh::<Plain>, &f64::tanh);
    check(
        "sigmoid",
        -88.0..20.0,
        1.9,
        &super::sigmoid::<Plain>,
        &sigmoid_reference,
    );
    check(
        "fused sigmoid",
        -88.0..20.0,
        1.9,
        &super::sigmoid::<Fused>,
        &sigmoid_reference,
    );
    check("erf", -4.5..4.5, 1.3, &super::erf::<Plain>, &erf_reference);
    check("sin", -100.0..100.0, 1.6, &super::sin::<Plain>, &f64::sin);
    check("cos", -100.0..100.0, 1.6, &super::cos::<Plain>, &f64::cos);
    check("sinh", -90.0..90.0, 2.0, &super::sinh::<Plain>, &f64::sinh);
    check("sinh", -1.0..1.0, 2.0, &super::sinh::<Plain>, &f64::sinh);
    check("cosh", -90.0..90.0, 2.0, &super::cosh::<Plain>, &f64::cosh);
}

/// x·Φ(x), its derivative, and the same of the approximation by tanh, in double precision.
fn gelu_references(x: f64) -> [f64; 4] {
    use std::f64::consts::{FRAC_1_SQRT_2, PI};
    let normal = 0.5 * (1.0 + erf_reference(x * FRAC_1_SQRT_2));
    let density = (-0.5 * x * x).exp() / (2.0 * PI).sqrt();
    let scale = (8.0 / PI).sqrt();
    let s = 1.0 / (1.0 + (-scale * (x + 0.044_715 * x * x * x)).exp());
    let slope = scale * (1.0 + 3.0 * 0.044_715 * x * x);
    let bent = if s == 0.0 {
        0.0
    } else {
        x * s * (1.0 - s) * slope
    };
    [x * normal, normal + x * density, x * s, s + bent]
}

#[test]
fn gelu_and_its_derivative_are_within_their_bounds() {
    fn check<A: Arith>() {
        let step = 2f64.powi(-24);
        for i in -400_000..400_000 {
            let x = f64::from(i) as f32 * 4e-5;
            let wide = f64::from(x);
            let got = [
                gelu::<A>(x),
                gelu_slope::<A>(x),
                gelu_tanh::<A>(x),
                gelu_tanh_slope::<A>(x),
            ];
            let bounds = [2.0 * wide.abs(), 4.0, 2.5 * wide.abs(), 4.0].map(|b| b * step);
            let all = got.into_iter().zip(gelu_references(wide)).zip(bounds);
            for (k, ((got, exact), bound)) in all.enumerate() {
                let error = (f64::from(got) - exact).abs();
                assert!(
                    error <= bound,
                    "{k} of {x:e}: {got:e} is {} · 2⁻²⁴ off",
                    error / step
                );
            }
        }
    }
    check::<Plain>();
    check::<Fused>();
    for x in [0.0, 1e9, f32::MAX, f32::INFINITY] {
        let all = [
            (gelu::<Plain>(x), x),
            (gelu_tanh::<Plain>(x), x),
            (gelu_slope::<Plain>(x), if x == 0.0 { 0.5 } else { 1.0 }),
            (
                gelu_tanh_slope::<Plain>(x),
                if x == 0.0 { 0.5 } else { 1.0 },
            ),
        ];
        assert!(all.iter().all(|(got, exact)| got == exact), "{x}: {all:?}");
    }
    for x in [-1e9, f32::MIN, f32::NEG_INFINITY] {
        assert_eq!(gelu_slope::<Plain>(x), 0.0);
        assert!(gelu_tanh_slope::<Plain>(x).abs() < 1e-30);
    }
}

#[test]
fn functions_in_double_precision_are_correct() {
    type Case = (&'static str, fn(f32) -> f32, fn(f64) -> f64);
    let functions: [Case; 3] = [
        ("tan", tan, f64::tan),
        ("log2", log2, f64::log2),
        ("log10", log10, f64::log10),
    ];
    for (name, f, exact) in functions {
        let (error, x) = worst(1009, f, exact);
        assert!(error <= 0.51, "{name}: {error} ULP at {x:e}");
    }
    for i in 0..400_000u32 {
        let x = i as f32 * 5e-4 - 100.0;
        let error = ulps(tan(x), f64::from(x).tan());
        assert!(error <= 0.51, "tan: {error} ULP at {x:e}");
    }
    assert_eq!([8.0, 0.125].map(log2), [3.0, -3.0]);
    assert_eq!([1e3, 1e-3].map(log10), [3.0, -3.0]);
}

#[test]
fn atan2_is_correct() {
    let values = || (0..=u32::MAX).step_by(1_800_023).map(f32::from_bits);
    let special = [
        0.0,
        -0.0,
        1.0,
        -1.0,
        f32::INFINITY,
        f32::NEG_INFINITY,
        f32::NAN,
    ];
    for y in values().chain(special) {
        for x in values().chain(special) {
            let (got, exact) = (atan2(y, x), f64::from(y).atan2(f64::from(x)));
            let error = ulps(got, exact);
            assert!(error <= 0.51, "of {y:e} and {x:e}: {error} ULP");
            assert!(got.is_nan() || got.is_sign_negative() == exact.is_sign_negative());
        }
    }
}

#[test]
fn powers_of_integers_wrap() {
    for x in [-3i32, -2, -1, 0, 1, 2, 3, 10, 46_341] {
        for y in 0..70u32 {
            assert_eq!(
                integer_pow(x, y as i32),
                x.wrapping_pow(y),
                "{x} to the {y}"
            );
        }
    }
    assert_eq!(
        [-2, -1, 0, 1, 2].map(|x| integer_pow(x, -3)),
        [0, -1, 0, 1, 0]
    );
    assert_eq!(integer_pow(-1, i32::MIN), 1);
}

#[test]
fn pow_is_correct() {
    let values = || (0..=u32::MAX).step_by(1_800_023).map(f32::from_bits);
    for x in values() {
        for y in values().chain([-3.0, -2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 2.0, 3.0, 7.0]) {
            let error = ulps(pow(x, y), f64::from(x).powf(f64::from(y)));
            assert!(error <= 0.51, "{x:e} to the {y:e}: {error} ULP");
        }
    }
    for i in 0..200_000u32 {
        let (x, y) = (0.01 + i as f32 * 1.7e-4, (i % 977) as f32 * 0.041 - 20.0);
        let error = ulps(pow(x, y), f64::from(x).powf(f64::from(y)));
        assert!(error <= 0.51, "{x:e} to the {y:e}: {error} ULP");
    }
}

/// Zeros with their signs, infinities and NaN are where IEEE 754 puts them.
#[test]
fn special_values() {
    let bits = |x: f32| if x.is_nan() { 0x7FC0_0000 } else { x.to_bits() };
    let specials = [
        0.0,
        -0.0,
        1.0,
        -1.0,
        2.0,
        3.0,
        0.5,
        -0.5,
        f32::INFINITY,
        f32::NEG_INFINITY,
        f32::NAN,
        1e-40,
        -1e-40,
        f32::MAX,
    ];
    for x in specials {
        let wide = f64::from(x);
        let zero_or_special = |f: f64| f == 0.0 || !f.is_finite();
        let pairs: [(&str, f32, f64); 14] = [
            ("exp", super::exp::<Plain>(x), wide.exp()),
            ("exp2", super::exp2::<Plain>(x), wide.exp2()),
            ("expm1", super::expm1::<Plain>(x), wide.exp_m1()),
            ("ln", super::ln::<Plain>(x), wide.ln()),
            ("log1p", super::log1p::<Plain>(x), wide.ln_1p()),
            ("tanh", super::tanh::<Plain>(x), wide.tanh()),
            ("sin", super::sin::<Plain>(x), wide.sin()),
            ("cos", super::cos::<Plain>(x), wide.cos()),
            ("erf", super::erf::<Plain>(x), erf_reference(wide)),
            ("tan", tan(x), wide.tan()),
            ("sinh", super::sinh::<Plain>(x), wide.sinh()),
            ("cosh", super::cosh::<Plain>(x), wide.cosh()),
            ("log2", log2(x), wide.log2()),
            ("log10", log10(x), wide.log10()),
        ];
        for (name, got, exact) in pairs {
            if zero_or_special(exact) {
                assert_eq!(bits(got), bits(exact as f32), "{name}({x})");
            }
        }
        for y in specials {
            let exact = wide.powf(f64::from(y)) as f32;
            if zero_or_special(f64::from(exact)) || exact.abs() == 1.0 {
                assert_eq!(bits(pow(x, y)), bits(exact), "{x} to the {y}");
            }
        }
    }
    assert_eq!(
        [
            super::sigmoid::<Plain>(f32::NEG_INFINITY),
            super::sigmoid::<Plain>(f32::INFINITY)
        ],
        [0.0, 1.0]
    );
    assert!(super::sigmoid::<Plain>(f32::NAN).is_nan());
}

/// ln |Γ(x)| from far to the right, where Stirling's series has two terms.
fn lgamma_reference(x: f64) -> f64 {
    let steps = (2000.0 - x).max(0.0).ceil();
    let end = x + steps;
    let below: f64 = (0..steps as u32)
        .map(|i| (x + f64::from(i)).abs().ln())
        .sum();
    let half_log = (2.0 * std::f64::consts::PI).ln() / 2.0;
    (end - 0.5) * end.ln() - end + half_log + 1.0 / (12.0 * end) - below
}

/// Σ (x + i)⁻ˢ, the same way.
fn zeta_reference(s: f64, x: f64) -> f64 {
    let steps = (2000.0 - x).max(0.0).ceil();
    let poles: f64 = (0..steps as u32).map(|i| (x + f64::from(i)).powf(-s)).sum();
    let middle = x + steps - 0.5;
    let rest = match s == 1.0 {
        true => -middle.ln() - 1.0 / (24.0 * middle * middle),
        false => middle.powf(1.0 - s) / (s - 1.0) - s / 24.0 * middle.powf(-s - 1.0),
    };
    poles + rest
}

#[test]
fn the_gamma_function_and_its_derivatives_are_correct() {
    for i in 1..4000u32 {
        let x = (f64::from(i) * 0.0071) as f32;
        let wide = f64::from(x);
        // The reference is good to about 10⁻¹¹, and ln Γ is 0 at 1 and 2.
        let exact = lgamma_reference(wide);
        let error = f64::from(lgamma(x)) - exact;
        assert!(
            error.abs() <= 6.0e-8 * exact.abs() + 2e-11,
            "lgamma: {error} at {x}"
        );
        for n in 0..6u32 {
            let factorial: f64 = (1..=n).map(f64::from).product();
            let sign = if n % 2 == 0 { -1.0 } else { 1.0 };
            let exact = sign * factorial * zeta_reference(f64::from(n) + 1.0, wide);
            let error = f64::from(polygamma(n as f32, x)) - exact;
            assert!(
                error.abs() <= 6.5e-8 * exact.abs() + 1e-10,
                "polygamma {n}: {error} at {x}, {exact}"
            );
        }
    }
    for i in 1..3000u32 {
        let x = -(f64::from(i) * 0.0173) as f32;
        if x == x.floor() {
            continue;
        }
        let wide = f64::from(x);
        let exact = lgamma_reference(wide);
        let error = f64::from(lgamma(x)) - exact;
        assert!(
            error.abs() <= 6.0e-8 * (1.0 + exact.abs()),
            "lgamma: {error} at {x}"
        );
        for n in 0..4u32 {
            let factorial: f64 = (1..=n).map(f64::from).product();
            let sign = if n % 2 == 0 { -1.0 } else { 1.0 };
            let exact = sign * factorial * zeta_reference(f64::from(n) + 1.0, wide);
            let error = f64::from(polygamma(n as f32, x)) - exact;
            assert!(
                error.abs() <= 6.5e-8 * (1.0 + exact.abs()) + 1e-6 * f64::from(n.saturating_sub(1)),
                "polygamma {n}: {error} at {x}, {exact}"
            );
        }
    }
    assert_eq!([1.0, 2.0].map(lgamma), [0.0, 0.0]);
    assert_eq!(
        [0.0, -0.0, -3.0, f32::INFINITY, -1e30].map(lgamma),
        [f32::INFINITY; 5]
    );
    assert_eq!(lgamma(1e30), (1e30f64 * (1e30f64.ln() - 1.0)) as f32);
    assert_eq!(
        [0.0, -0.0].map(|x| polygamma(0.0, x)),
        [f32::NEG_INFINITY, f32::INFINITY]
    );
    assert_eq!(
        [1.0, 2.0].map(|n| polygamma(n, -4.0)),
        [f32::INFINITY, f32::NEG_INFINITY]
    );
    assert_eq!([1.0, 7.0].map(|n| polygamma(n, f32::INFINITY)), [0.0; 2]);
    let nan = [
        polygamma(0.0, -1.0),
        polygamma(-1.0, 1.0),
        polygamma(101.0, 1.0),
        polygamma(1.0, f32::NAN),
    ];
    assert!(nan.iter().all(|x| x.is_nan()) && lgamma(f32::NAN).is_nan());
}

#[test]
fn halves_are_rounded_as_their_types_round() {
    let ties = (0..=u32::MAX).step_by(1 << 12);
    let beside_ties = ties.flat_map(|x| [x.saturating_sub(1), x, x | 1]);
    for x in beside_ties
        .chain((0..=u32::MAX).step_by(4_099))
        .map(f32::from_bits)
    {
        let (f16, bf16) = (
            half::f16::from_f32(x).to_f32(),
            half::bf16::from_f32(x).to_f32(),
        );
        for (name, got, expected) in [("f16", round_f16(x), f16), ("bf16", round_bf16(x), bf16)] {
            let same = got.to_bits() == expected.to_bits() || got.is_nan() && expected.is_nan();
            assert!(same, "{name} of {x:e}: {got:e}, not {expected:e}");
        }
    }
}
