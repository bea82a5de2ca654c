//! The table of operations: as kernels and as derivatives.

use slabwise_kernels::cpu::Isa;
use slabwise_kernels::dtype::Lane;
use slabwise_kernels::expr::Expr;
use slabwise_kernels::scalar::{Class, ScalarOp, Value};
use slabwise_kernels::size::Env;

use crate::builder::Builder;
use crate::support::{Bytes, run_all};

/// Numbers of all kinds: special, tiny, huge, and many in between.
fn samples() -> Vec<f32> {
    let special = [
        0.0,
        -0.0,
        1.0,
        -1.0,
        f32::INFINITY,
        f32::NEG_INFINITY,
        f32::NAN,
        f32::MAX,
        f32::MIN_POSITIVE,
        1e-42,
        -1e-42,
        2.5,
        -2.5,
    ];
    let spread = (0..3000u32).map(|i| f32::from_bits(i.wrapping_mul(1_431_655)));
    let near = (0..2000).map(|i| i as f32 * 0.0173 - 17.3);
    special.into_iter().chain(spread).chain(near).collect()
}

fn same(a: f32, b: f32) -> bool {
    a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan())
}

/// How many floats lie between two.
fn distance(a: f32, b: f32) -> u64 {
    let ordered = |x: f32| {
        let bits = x.to_bits() as i32;
        i64::from(bits ^ ((bits >> 31) & i32::MAX))
    };
    if same(a, b) {
        0
    } else if a.is_nan() || b.is_nan() {
        u64::MAX
    } else {
        ordered(a).abs_diff(ordered(b))
    }
}

/// Every operation on floats, as a kernel, against its definition on single values: equal without
/// fused multiply-adds, within both sides' error bounds with them; and the same for the same
/// arguments at any position in a tile.
#[test]
fn kernels_agree_with_the_table() {
    let x = samples();
    let n = x.len();
    for &op in ScalarOp::ALL {
        let lanes = vec![Lane::F32; op.arity()];
        if op.lane(&lanes) != Some(Lane::F32) {
            continue;
        }
        // The arguments, twice over at different distances from whole vectors.
        let arguments: Vec<Vec<f32>> = (0..op.arity())
            .map(|k| {
                (0..2 * n + 7)
                    .map(|i| x[(i % (n + 5)).min(n - 1) * (1 + 16 * k) % n])
                    .collect()
            })
            .collect();
        let len = arguments[0].len();
        let mut b = Builder::new(&[len as i64], 0);
        let mut bytes = Bytes::new();
        let args: Vec<u16> = arguments
            .iter()
            .map(|a| {
                bytes.push_f32(a);
                b.load(&[1])
            })
            .collect();
        let y = b.op(op, &args);
        let out = b.operand(&[1]);
        b.store(y, out);
        bytes.push_f32(&vec![0.0; len]);
        let env = Env::default();
        for (isa, run) in run_all(&b.spec, &env, &env, &bytes) {
            let y = run.f32s(op.arity());
            for i in 0..len {
                let args: Vec<Value> = arguments.iter().map(|a| Value::F32(a[i])).collect();
                let Value::F32(expected) = op.eval(&args) else {
                    panic!("a float")
                };
                // Two results within 2 ULP of the truth are within 4 of each other.
                let allowed = if isa == Isa::Portable { 0 } else { 4 };
                // Near its zero on the left, gelu's error is bounded by its argument instead.
                let bounded = match op {
                    ScalarOp::Gelu | ScalarOp::GeluTanh => arguments[0][i].abs(),
                    ScalarOp::GeluSlope | ScalarOp::GeluTanhSlope => 1.6,
                    _ => 0.0,
                };
                let near =
                    isa != Isa::Portable && (y[i] - expected).abs() <= 2.5 * f32::EPSILON * bounded;
                assert!(
                    near || distance(y[i], expected) <= allowed,
                    "{isa}: {} of {args:?} is {} instead of {expected}",
                    op.name(),
                    y[i]
                );
                if i >= n + 5 {
                    assert!(
                        same(y[i], y[i - n - 5]),
                        "{isa}: {} of {args:?} depends on its position",
                        op.name()
                    );
                }
            }
        }
    }
}

/// Derivatives against central differences, extrapolated to a step of 0 (Richardson).
#[test]
fn derivatives_match_differences() {
    // Points inside every operation's domain and away from where it is not smooth.
    let points = [0.3f32, 0.7, 0.9, 1.3];
    let mut checked = 0;
    for &op in ScalarOp::ALL {
        let derivatives = op.derivative();
        assert!(
            derivatives.len() == op.arity()
                || derivatives.is_empty()
                || op.derivative().iter().all(Option::is_none),
            "{}",
            op.name()
        );
        if matches!(op.class(), Class::Compare | Class::Int | Class::Logic) {
            assert!(
                derivatives.iter().all(Option::is_none),
                "{} is flat",
                op.name()
            );
            continue;
        }
        // Its derivative is defined as this, not by the function.
        if matches!(op, ScalarOp::Detach | ScalarOp::Near) {
            assert!(derivatives.iter().all(Option::is_none));
            continue;
        }
        if op == ScalarOp::WithSlope {
            assert_eq!(
                derivatives,
                [Some(Expr::from(1.0)), Some(Expr::Z), Some(Expr::from(0.0))]
            );
            continue;
        }
        // The steps of a half are no smaller than those of the differences.
        if matches!(op, ScalarOp::RoundF16 | ScalarOp::RoundBf16) {
            assert_eq!(derivatives, [Some(Expr::from(1.0))]);
            continue;
        }
        for (i, &p) in points.iter().enumerate() {
            // No quotient of these is near an integer, where a remainder jumps.
            let apart = if op == ScalarOp::Fmod { 1.155 } else { 1.1 };
            let floats = [p, points[(i + 2) % 4] * apart, points[(i + 1) % 4]];
            for flag in [true, false] {
                let args: Vec<Value> = (0..op.arity())
                    .map(|k| {
                        if op.class() == Class::Select && k == 0 {
                            Value::Bool(flag)
                        } else {
                            Value::F32(floats[k])
                        }
                    })
                    .collect();
                let at = |k: usize, h: f32| {
                    let mut args = args.clone();
                    let Value::F32(x) = args[k] else {
                        panic!("a float")
                    };
                    args[k] = Value::F32(x + h);
                    let Value::F32(y) = op.eval(&args) else {
                        panic!("a float")
                    };
                    f64::from(y)
                };
                let difference = |k: usize, h: f32| (at(k, h) - at(k, -h)) / f64::from(2.0 * h);
                for k in (0..op.arity()).filter(|&k| matches!(args[k], Value::F32(_))) {
                    let h = 1.0 / 64.0;
                    let numeric = (4.0 * difference(k, h) - difference(k, 2.0 * h)) / 3.0;
                    let stated = match derivatives.get(k) {
                        Some(Some(expr)) => match expr.eval(&args, op.eval(&args)) {
                            Value::F32(d) => f64::from(d),
                            other => panic!("{} has the derivative {other:?}", op.name()),
                        },
                        _ => 0.0,
                    };
                    // Rounding: 2⁻²⁴ of values around 1 over the step; truncation: h⁴ times a fifth
                    // derivative below 500.
                    assert!(
                        (stated - numeric).abs() <= 1e-4 * stated.abs().max(1.0),
                        "{} by argument {k} at {args:?}: {stated}, not {numeric}",
                        op.name()
                    );
                    checked += 1;
                }
            }
        }
    }
    assert!(checked > 200);
}

#[test]
fn integers_wrap_and_divide_by_zero() {
    let both = |op: ScalarOp, x: i32, y: i32| op.eval(&[Value::I32(x), Value::I32(y)]);
    assert_eq!(both(ScalarOp::Add, i32::MAX, 1), Value::I32(i32::MIN));
    assert_eq!(both(ScalarOp::Div, 7, 0), Value::I32(0));
    assert_eq!(both(ScalarOp::Div, i32::MIN, -1), Value::I32(i32::MIN));
    assert_eq!(both(ScalarOp::Div, -7, 2), Value::I32(-3));
    assert_eq!(both(ScalarOp::Lt, -1, 1), Value::Bool(true));
    assert_eq!(both(ScalarOp::Fmod, 7, 0), Value::I32(0));
    assert_eq!(both(ScalarOp::Fmod, i32::MIN, -1), Value::I32(0));
    assert_eq!(both(ScalarOp::Fmod, -7, 2), Value::I32(-1));
    assert_eq!(both(ScalarOp::Pow, -3, 3), Value::I32(-27));
    assert_eq!(both(ScalarOp::BitAnd, -7, 12), Value::I32(8));
    assert_eq!(both(ScalarOp::BitXor, -7, -1), Value::I32(6));
    for (y, left, right) in [
        (1, 10, -3),
        (31, i32::MIN, -1),
        (32, 0, -1),
        (-1, 0, -1),
        (i32::MIN, 0, -1),
    ] {
        assert_eq!(both(ScalarOp::ShiftLeft, 5, y), Value::I32(left));
        assert_eq!(both(ScalarOp::ShiftRight, -5, y), Value::I32(right));
    }
    assert_eq!(
        ScalarOp::Lt.eval(&[Value::Bool(false), Value::Bool(true)]),
        Value::Bool(true)
    );
    assert_eq!(Value::F32(f32::NAN).cast(Lane::I32), Value::I32(0));
    assert_eq!(Value::F32(3e9).cast(Lane::I32), Value::I32(i32::MAX));
    assert_eq!(Value::F32(f32::NAN).cast(Lane::Bool), Value::Bool(true));
}
