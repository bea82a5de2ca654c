//! Attention in double precision, and emulated kernels compared with it and with the CPU's.

use slabwise_cuda::emulator::Order;
use slabwise_cuda::{Function, Lowered, lower};
use slabwise_kernels::dtype::DType;
use slabwise_kernels::size::{Env, Size};
use slabwise_kernels::spec::{Access, Body, Dims, Operand};

use super::super::common::gpu::Gpu;
use super::super::common::{Case, NO_FAULT, available, emulate, float};
use super::Sizes;

/// The elements of an argument, and the operand.
struct Rows {
    values: Vec<f32>,
    operand: Operand,
}

impl Rows {
    fn at(&self, head: [usize; 2], row: usize, column: usize) -> f64 {
        let env = Env::default();
        let at = [head[0], head[1], row, column];
        let steps = self.operand.strides.iter().zip(at);
        let steps = steps.map(|(s, c)| s.usize_at(&env) * c).sum::<usize>();
        f64::from(self.values[self.operand.offset.usize_at(&env) + steps])
    }
}

/// Elements of a type as numbers; truth values as terms of scores.
fn numbers(dtype: DType, bytes: &[u8]) -> Vec<f32> {
    let number = |x: &[u8]| match dtype {
        DType::Bool if x[0] == 0 => f32::NEG_INFINITY,
        DType::Bool => 0.0,
        DType::I32 => i32::from_le_bytes(x.try_into().expect("4 bytes")) as f32,
        _ => float(dtype, x),
    };
    bytes.chunks(dtype.bytes()).map(number).collect()
}

/// The errors of a kernel's numbers.
#[derive(Clone, Copy)]
struct Errors {
    /// Of a weight or a gradient of a score, relative to itself.
    unit: f64,
    /// Of a factor in single precision, relative to `unit`.
    single: f64,
    /// Of the smallest numbers, which the type of the operands holds as multiples of a number.
    tiny: f64,
}

impl Errors {
    /// Those of products of these operands.
    fn of(products: DType, tf32: bool) -> Errors {
        // Weights and gradients of scores are rounded to tf32 or halves, all else is computed in
        // single precision.
        let (unit, tiny) = match products {
            DType::F16 => (2f64.powi(-11), 2f64.powi(-25)),
            DType::BF16 => (2f64.powi(-8), 0.0),
            _ if tf32 => (2f64.powi(-11), 0.0),
            _ => (2f64.powi(-22), 0.0),
        };
        Errors {
            unit,
            single: 2f64.powi(-22) / unit,
            tiny: tiny / unit,
        }
    }
}

/// The error of a stored number, relative to itself.
fn rounding(dtype: DType) -> f64 {
    match dtype {
        DType::F16 => 2f64.powi(-11),
        DType::BF16 => 2f64.powi(-8),
        _ => 0.0,
    }
}

/// The elements of a result, and the sums of the magnitudes that they are sums of.
type Sums = Vec<Vec<[f64; 2]>>;

/// A result or a gradient of a head in double precision. The magnitudes are those of the terms of
/// the last product, and `single` times those that the errors of its factors, computed in single
/// precision, are relative to: a power has a relative error of its score's error.
fn oracle(s: &Sizes, args: &[Rows], head: [usize; 2], is_grad: bool, errors: Errors) -> Sums {
    let Errors { single, tiny, .. } = errors;
    let [queries, keys, width] = [s.queries, s.keys, s.width].map(|n| n as usize);
    let columns = if is_grad { width } else { s.columns as usize };
    let at = |i: usize, row, column| args[i].at(head, row, column);
    let scale = f64::from(s.scores.scale);
    let rows = if is_grad { queries + 2 * keys } else { queries };
    let mut sums = vec![vec![[0.0; 2]; columns]; rows];
    let result = s.first_result();
    let of_head = match s.has_past {
        true => s.scores.after(at(result - 1, 0, 0) as i32),
        false => s.scores,
    };
    // A score, its derivative, and the magnitudes of its terms.
    let score = |query, key| {
        let terms = (0..width).map(|c| at(0, query, c) * at(1, key, c));
        let (sum, all) = terms.fold((0.0, 0.0), |(a, b), x: f64| (a + x, b + x.abs()));
        let (mut score, mut slope, mut all) = (sum * scale, 1.0, all * scale.abs());
        if let Some(cap) = s.scores.soft_cap.map(f64::from) {
            let part = (score / cap).tanh();
            (score, slope) = (part * cap, 1.0 - part * part);
        }
        let mask = s.mask.map_or(0.0, |_| at(3, query, key));
        if mask.abs() < 1e6 {
            (score, all) = (score + mask, all + mask.abs());
        } else {
            // The rest of the score disappears in f32.
            score = mask;
        }
        (score, slope, all)
    };
    for query in 0..queries {
        let seen = of_head.visible(query, keys);
        let (scores, slopes, magnitudes): (Vec<f64>, Vec<f64>, Vec<f64>) =
            seen.clone().map(|key| score(query, key)).collect();
        let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let blind = largest == f64::NEG_INFINITY;
        let relevant = scores
            .iter()
            .zip(magnitudes)
            .filter(|&(s, _)| s - largest > -100.0);
        let powerful = relevant.map(|(_, all)| all).fold(0.0, f64::max);
        let single = single * (1.0 + powerful);
        let powers: Vec<f64> = scores.iter().map(|s| (s - largest).exp()).collect();
        let sum: f64 = powers.iter().sum();
        let mut add = |row: usize, column: usize, term: f64, magnitude: f64, factor: f64| {
            let [sum, all] = &mut sums[row][column];
            *sum += term;
            *all += term.abs() + single * magnitude + tiny * factor.abs();
        };
        if blind && is_grad {
            continue;
        }
        if !is_grad {
            for column in 0..columns {
                if blind {
                    add(query, column, f64::NAN, 0.0, 0.0);
                }
                let seen = seen.clone().filter(|_| !blind);
                for (key, power) in seen.zip(&powers) {
                    let (p, v) = (power / sum, at(2, key, column));
                    add(query, column, p * v, (p * v).abs(), v / sum);
                }
            }
            continue;
        }
        let [y, dy] = [result, result + 1];
        let deltas = (0..width).map(|c| at(y, query, c) * at(dy, query, c));
        let (delta, all) = deltas.fold((0.0, 0.0), |(a, b), x: f64| (a + x, b + x.abs()));
        for ((key, power), derivative) in seen.zip(&powers).zip(slopes) {
            let p = power / sum;
            let slopes = (0..width).map(|c| at(dy, query, c) * at(2, key, c));
            let (slope, more) = slopes.fold((0.0, all), |(a, b), x: f64| (a + x, b + x.abs()));
            let (ds, large) = (
                p * (slope - delta) * scale * derivative,
                p * more * scale.abs(),
            );
            for c in 0..width {
                let (q, k, dy) = (at(0, query, c), at(1, key, c), at(dy, query, c));
                // (The gradients of scores are divided by the sum and multiplied by the scale at the
                // end, for queries, or have the sum as a factor before.)
                add(s.row(0, query), c, ds * k, large * k.abs(), scale * k / sum);
                add(s.row(1, key), c, ds * q, large * q.abs(), scale * q);
                add(s.row(2, key), c, p * dy, p * dy.abs(), dy);
            }
        }
    }
    sums
}

/// Fails unless emulated kernels give the results of double precision and of the CPU's kernels
/// within the errors of their products, and the same bits in every order of threads; and a GPU,
/// where there is one.
pub fn check(list: &[Sizes], mut cases: Vec<Case>) {
    if !available() {
        return;
    }
    let products: Vec<DType> = list.iter().flat_map(|s| [s.products(); 2]).collect();
    for (case, products) in cases.iter_mut().zip(&products) {
        let is_exact = *products == DType::F32 && !case.target.tf32;
        for (bytes, (operand, ..)) in case.args.iter_mut().zip(case.spec.arguments()) {
            if operand.dtype == DType::F32 && !is_exact {
                // Numbers that the operands of products hold exactly.
                let exact = numbers(DType::F32, bytes).into_iter();
                let exact = exact.map(|x| (8.0 * x).round() / 8.0);
                *bytes = exact.flat_map(f32::to_le_bytes).collect();
            }
        }
    }
    let lowered: Vec<Lowered> = cases
        .iter()
        .map(|c| lower(&c.spec, &c.bounds, &c.target).expect("source"))
        .collect();
    for (lowered, (case, products)) in lowered.iter().zip(cases.iter().zip(&products)) {
        let tile = match products {
            DType::F32 if case.target.tf32 => "AttentionMma<float",
            DType::F32 => "AttentionFma<",
            DType::F16 => "AttentionMma<f16",
            _ => "AttentionMma<bf16",
        };
        assert!(lowered.functions.iter().all(|f| f.source.contains(tile)));
    }
    let functions: Vec<Function> = lowered.iter().flat_map(|l| l.functions.clone()).collect();
    let emulator = emulate(&functions);
    let mut gpu = Gpu::load(&lowered.iter().collect::<Vec<_>>());
    for (at, (case, lowered)) in cases.iter().zip(&lowered).enumerate() {
        let errors = Errors::of(products[at], case.target.tf32);
        let emulated: Vec<_> = emulator
            .iter()
            .flat_map(|emulator| {
                Order::ALL.map(|order| case.emulated(lowered, emulator, order, NO_FAULT))
            })
            .map(|got| got.unwrap_or_else(|e| panic!("{}: {e}", case.name)).0)
            .collect();
        for got in emulated.windows(2) {
            assert!(
                got[0] == got[1],
                "{}: other bits in another order",
                case.name
            );
        }
        let on_gpu = gpu.iter_mut().map(|gpu| gpu.run(at, case, lowered));
        let on_gpu = on_gpu.map(|got| got.unwrap_or_else(|e| panic!("{}: {e}", case.name)).0);
        for got in emulated.into_iter().take(1).chain(on_gpu) {
            compare(&list[at / 2], case, &got, errors);
        }
    }
}

fn compare(s: &Sizes, case: &Case, got: &[Vec<u8>], errors: Errors) {
    let arguments = case.spec.arguments();
    let rows = |(bytes, (operand, ..)): (&Vec<u8>, &(Operand, Dims, Access))| Rows {
        values: numbers(operand.dtype, bytes),
        operand: Operand {
            dtype: operand.dtype,
            offset: Size::fixed(operand.offset.at(&case.env)),
            strides: operand
                .strides
                .iter()
                .map(|s| Size::fixed(s.at(&case.env)))
                .collect(),
        },
    };
    let args: Vec<Rows> = case.args.iter().zip(&arguments).map(rows).collect();
    let result = args.len() - 1;
    assert!(got[..result] == case.args[..result], "{}", case.name);
    let cpu = case.on_cpu().0;
    let [got, cpu] = [&got[result], &cpu[result]].map(|bytes| rows((bytes, &arguments[result])));
    let stored = rounding(got.operand.dtype);
    let is_grad = matches!(case.spec.body, Body::AttentionGrad(_));
    let heads = (0..s.batch as usize).flat_map(|b| (0..s.heads as usize).map(move |h| [b, h]));
    for head in heads {
        for (row, sums) in oracle(s, &args, head, is_grad, errors).iter().enumerate() {
            for (column, [sum, all]) in sums.iter().enumerate() {
                let [x, cpu] = [&got, &cpu].map(|rows| rows.at(head, row, column));
                let unit = errors.unit + errors.unit * stored;
                let off = unit * all + stored * sum.abs();
                // The CPU rounds nothing but its result, to the same type.
                for (of, off) in [(*sum, off), (cpu, off + stored * sum.abs())] {
                    assert!(
                        (x - of).abs() <= off || x.is_nan() && of.is_nan(),
                        "{} {head:?}: {row}, {column} is {x} instead of {of} ± {off}",
                        case.name
                    );
                }
            }
        }
    }
}
