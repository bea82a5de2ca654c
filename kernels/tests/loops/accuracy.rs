//! Rounding: composite kernels and long sums against double precision, within bounds that follow
//! from the formulas.

use slabwise_kernels::scalar::ScalarOp;
use slabwise_kernels::size::Env;
use slabwise_kernels::spec::ReduceOp;

use crate::builder::Builder;
use crate::support::{Bytes, Choices, run_all};

const EPSILON: f64 = 1.0 / 16_777_216.0; // half the distance from 1 to the next float

/// Runs a kernel whose only output is its last argument, on each instruction set.
fn outputs(b: Builder, inputs: &[Vec<f32>], len: usize) -> Vec<Vec<f32>> {
    let mut bytes = Bytes::new();
    inputs.iter().for_each(|x| bytes.push_f32(x));
    bytes.push_f32(&vec![f32::NAN; len]);
    let env = Env::default();
    run_all(&b.spec, &env, &env, &bytes)
        .iter()
        .map(|(_, run)| run.f32s(inputs.len()))
        .collect()
}

fn random(seed: u32, n: usize, scale: f32) -> Vec<f32> {
    let c = &mut Choices::new(seed);
    (0..n).map(|_| c.unit() * scale).collect()
}

/// The shapes of rows: outer axes, length, inner axes (stride of the row). Short, long, along the
/// last axis or another.
const ROWS: [(usize, usize, usize); 12] = [
    (64, 10, 1),
    (7, 1, 1),
    (33, 16, 1),
    (5, 100, 1),
    (9, 1024, 1),
    (3, 1025, 1),
    (2, 5000, 1),
    (1, 40_000, 1),
    (3, 10, 7),
    (2, 300, 64),
    (1, 3000, 20),
    (2, 5, 300),
];

/// A spec over (outer, inner | row) with x as its first operand, and the rows of `x`.
fn rows(outer: usize, len: usize, inner: usize) -> (Builder, [i64; 3]) {
    let (o, n, i) = (outer as i64, len as i64, inner as i64);
    (Builder::new(&[o, i, n], 1), [n * i, 1, i])
}

fn for_rows(
    x: &[f32],
    (outer, len, inner): (usize, usize, usize),
    mut f: impl FnMut(Vec<f64>, &dyn Fn(usize) -> usize),
) {
    for o in 0..outer {
        for i in 0..inner {
            let at = move |k: usize| (o * len + k) * inner + i;
            f((0..len).map(|k| f64::from(x[at(k)])).collect(), &at);
        }
    }
}

#[test]
fn softmax() {
    for (seed, shape) in ROWS.into_iter().enumerate() {
        let (outer, len, inner) = shape;
        let x = random(seed as u32, outer * len * inner, 8.0);
        let (mut b, strides) = rows(outer, len, inner);
        let v = b.load(&strides);
        let max = b.reduce(ReduceOp::Max, v);
        let shifted = b.op(ScalarOp::Sub, &[v, max]);
        let e = b.op(ScalarOp::Exp, &[shifted]);
        let sum = b.reduce(ReduceOp::Sum, e);
        let y = b.op(ScalarOp::Div, &[e, sum]);
        let out = b.operand(&strides);
        b.store(y, out);
        for y in outputs(b, std::slice::from_ref(&x), x.len()) {
            for_rows(&x, shape, |row, at| {
                let max = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let sum: f64 = row.iter().map(|v| (v - max).exp()).sum();
                for (k, v) in row.iter().enumerate() {
                    let exact = (v - max).exp() / sum;
                    // The difference is at most 16, so its rounding costs 16 ε; exp, the sum and
                    // the division a few more.
                    let error = (f64::from(y[at(k)]) - exact).abs();
                    assert!(
                        error <= 48.0 * EPSILON * exact,
                        "{shape:?}: {} instead of {exact}",
                        y[at(k)]
                    );
                }
            });
        }
    }
}

#[test]
fn layer_norm() {
    for (seed, shape) in ROWS.into_iter().enumerate() {
        let (outer, len, inner) = shape;
        let x = random(100 + seed as u32, outer * len * inner, 2.0);
        let (mut b, strides) = rows(outer, len, inner);
        let v = b.load(&strides);
        let n = b.number(len as f32);
        let sum = b.reduce(ReduceOp::Sum, v);
        let mean = b.op(ScalarOp::Div, &[sum, n]);
        let centred = b.op(ScalarOp::Sub, &[v, mean]);
        let square = b.op(ScalarOp::Mul, &[centred, centred]);
        let squares = b.reduce(ReduceOp::Sum, square);
        let variance = b.op(ScalarOp::Div, &[squares, n]);
        let small = b.number(1e-3);
        let shifted = b.op(ScalarOp::Add, &[variance, small]);
        let scale = b.op(ScalarOp::Rsqrt, &[shifted]);
        let y = b.op(ScalarOp::Mul, &[centred, scale]);
        let out = b.operand(&strides);
        b.store(y, out);
        for y in outputs(b, std::slice::from_ref(&x), x.len()) {
            for_rows(&x, shape, |row, at| {
                let n = row.len() as f64;
                let mean = row.iter().sum::<f64>() / n;
                let variance = row.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / n;
                let scale = (variance + 1e-3).sqrt().recip();
                for (k, v) in row.iter().enumerate() {
                    let exact = (v - mean) * scale;
                    // The mean is off by some ε of the values (at most 2), which the scale
                    // magnifies.
                    let error = (f64::from(y[at(k)]) - exact).abs();
                    assert!(
                        error <= 64.0 * EPSILON * (2.0 * scale + exact.abs()),
                        "{shape:?}: {} instead of {exact}",
                        y[at(k)]
                    );
                }
            });
        }
    }
}

/// −log softmax at integer labels, as loss kernels compute it: the label compared with the position
/// in the row.
#[test]
fn cross_entropy() {
    let shape = (50, 10, 1);
    let x = random(7, 500, 6.0);
    let labels: Vec<f32> = (0..50).map(|i| (i * 7 % 10) as f32).collect();
    let (mut b, strides) = rows(50, 10, 1);
    let v = b.load(&strides);
    let label = b.load(&[1, 0, 0]);
    b.spec.indices.push(
        [0, 0, 1]
            .map(slabwise_kernels::size::Size::fixed)
            .into_iter()
            .collect(),
    );
    let position = b.inst(slabwise_kernels::spec::Inst::Index(0));
    let position = b.inst(slabwise_kernels::spec::Inst::Cast(
        position,
        slabwise_kernels::dtype::Lane::F32,
    ));
    let here = b.op(ScalarOp::Eq, &[position, label]);
    let zero = b.number(0.0);
    let picked = b.op(ScalarOp::Select, &[here, v, zero]);
    let picked = b.reduce(ReduceOp::Sum, picked);
    let max = b.reduce(ReduceOp::Max, v);
    let shifted = b.op(ScalarOp::Sub, &[v, max]);
    let e = b.op(ScalarOp::Exp, &[shifted]);
    let sum = b.reduce(ReduceOp::Sum, e);
    let log = b.op(ScalarOp::Ln, &[sum]);
    let total = b.op(ScalarOp::Add, &[log, max]);
    let loss = b.op(ScalarOp::Sub, &[total, picked]);
    let out = b.operand(&[1, 1, 0]);
    b.store(loss, out);
    for y in outputs(b, &[x.clone(), labels.clone()], 50) {
        let mut o = 0;
        for_rows(&x, shape, |row, _| {
            let exact = row.iter().map(|v| v.exp()).sum::<f64>().ln() - row[labels[o] as usize];
            assert!(
                (f64::from(y[o]) - exact).abs() <= 64.0 * EPSILON * 12.0,
                "{} instead of {exact}",
                y[o]
            );
            o += 1;
        });
    }
}

/// Sums of random numbers: no more roundings lie between a number and the result than the tiles,
/// parts and lanes account for, far fewer than there are numbers.
#[test]
fn long_sums() {
    // (kept, reduced): few rows are split; many are not; columns run along the kept axis.
    for (kept, reduced) in [
        (1, 1_000_003),
        (3, 100_000),
        (40, 9_999),
        (1, 65_536),
        (500, 300),
        (1, 70_001),
    ] {
        for along_rows in [false, true] {
            let x = random(kept as u32, kept * reduced, 1.0);
            let (k, r) = (kept as i64, reduced as i64);
            let mut b = Builder::new(&[k, r], 1);
            let strides = if along_rows { [r, 1] } else { [1, k] };
            let v = b.load(&strides);
            let sum = b.reduce(ReduceOp::Sum, v);
            let out = b.operand(&[1, 0]);
            b.store(sum, out);
            for y in outputs(b, std::slice::from_ref(&x), kept) {
                for (o, y) in y.iter().enumerate() {
                    let at = |i: usize| {
                        f64::from(
                            x[if along_rows {
                                o * reduced + i
                            } else {
                                i * kept + o
                            }],
                        )
                    };
                    let exact: f64 = (0..reduced).map(at).sum();
                    let size: f64 = (0..reduced).map(|i| at(i).abs()).sum();
                    let error = (f64::from(*y) - exact).abs();
                    assert!(
                        error <= 160.0 * EPSILON * size,
                        "{kept} × {reduced}: {y} instead of {exact}"
                    );
                }
            }
        }
    }
}
