//! Runs the candidates of matrix products and convolutions under the emulator, and compares them
//! with sums in double precision.
#![allow(dead_code)] // each test binary uses a part of it

pub mod convolution;
pub mod library;
pub mod sums;

use std::collections::BTreeSet;

use slabwise_cuda::emulator::Order;
use slabwise_cuda::{Candidate, candidates};
use slabwise_kernels::dtype::DType;
use slabwise_kernels::size::{Env, Size};
use slabwise_kernels::spec::{
    Body, Conv2d, ConvKind, Inst, Matmul, Operand, Quantization, QuantizedMatmul, Spec, Store,
};

use super::common::gpu::Gpu;
use super::common::{Case, Choices, NO_FAULT, compare, emulate};

/// An operand with these strides.
pub fn typed(dtype: DType, offset: i64, strides: &[usize]) -> Operand {
    Operand {
        dtype,
        offset: Size::fixed(offset),
        strides: strides.iter().map(|&s| Size::fixed(s as i64)).collect(),
    }
}

/// An f32 operand with these strides.
pub fn strided(offset: i64, strides: &[usize]) -> Operand {
    typed(DType::F32, offset, strides)
}

/// Row-major strides.
pub fn contiguous(dims: &[usize]) -> Vec<usize> {
    let mut strides = vec![1; dims.len()];
    for axis in (1..dims.len()).rev() {
        strides[axis - 1] = strides[axis] * dims[axis].max(1);
    }
    strides
}

/// A product whose result is stored unchanged.
pub fn matmul(dims: &[usize], k: usize, a: Operand, b: Operand) -> Spec {
    plain(
        Body::Matmul(Matmul {
            in_order: true,
            k: Size::fixed(k as i64),
            a,
            b,
        }),
        dims,
        strided(0, &contiguous(dims)),
    )
}

/// The zero points of quantized weights.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Zeros {
    Middle,
    Packed,
    Floats,
}

/// A product with quantized weights, of contiguous operands.
pub fn quantized([m, n, k]: [usize; 3], (bits, block): (u32, u32), zeros: Zeros) -> Spec {
    let format = Quantization { bits, block };
    let (bytes, blocks) = (format.bytes(k as i64) as usize, k / block as usize);
    let points = match zeros {
        Zeros::Middle => None,
        Zeros::Packed => {
            let bytes = format.bytes(blocks as i64) as usize;
            Some(typed(DType::U8, 0, &[bytes, 1]))
        }
        Zeros::Floats => Some(strided(0, &[blocks, 1])),
    };
    let body = QuantizedMatmul {
        k: Size::fixed(k as i64),
        a: strided(0, &[k, 1]),
        format,
        numbers: typed(DType::U8, 0, &[bytes, 1]),
        scales: strided(0, &[blocks, 1]),
        in_order: false,
        zeros: points,
    };
    let body = Body::QuantizedMatmul(Box::new(body));
    plain(body, &[m, n], strided(0, &[n, 1]))
}

/// An anchor whose result is stored unchanged.
pub fn plain(body: Body, dims: &[usize], out: Operand) -> Spec {
    Spec {
        body,
        dims: dims.iter().map(|&d| Size::fixed(d as i64)).collect(),
        reduced: 0,
        operands: vec![out],
        indices: vec![],
        code: vec![Inst::Acc],
        stores: vec![Store {
            value: 0,
            operand: 0,
        }],
    }
}

/// The values of an operand's bytes.
pub fn numbers(dtype: DType, bytes: &[u8]) -> Vec<f64> {
    match dtype {
        DType::F32 => bytes
            .chunks(4)
            .map(|b| f64::from(f32::from_le_bytes(b.try_into().expect("4 bytes"))))
            .collect(),
        DType::F16 => bytes
            .chunks(2)
            .map(|b| half::f16::from_le_bytes(b.try_into().expect("2 bytes")).to_f64())
            .collect(),
        DType::BF16 => bytes
            .chunks(2)
            .map(|b| half::bf16::from_le_bytes(b.try_into().expect("2 bytes")).to_f64())
            .collect(),
        other => panic!("products of {other}"),
    }
}

/// Replaces both operands by small integers, whose products and sums every format holds exactly.
pub fn small_integers(case: &mut Case, choices: &mut Choices) {
    for (arg, (operand, ..)) in case.spec.arguments().iter().enumerate().take(2) {
        let count = case.args[arg].len() / operand.dtype.bytes();
        let numbers = (0..count).map(|_| choices.below(9) as f32 - 4.0);
        case.args[arg] = match operand.dtype {
            DType::F32 => numbers.flat_map(f32::to_le_bytes).collect(),
            DType::F16 => numbers
                .flat_map(|x| half::f16::from_f32(x).to_le_bytes())
                .collect(),
            DType::BF16 => numbers
                .flat_map(|x| half::bf16::from_f32(x).to_le_bytes())
                .collect(),
            other => panic!("products of {other}"),
        };
    }
}

/// An element of the result: the sum, the sum of magnitudes, the number of terms, and its offset.
#[derive(Clone, Copy, Default)]
struct Expected {
    sum: f64,
    scale: f64,
    terms: usize,
    at: usize,
}

impl Expected {
    fn add(&mut self, term: f64) {
        self.sum += term;
        self.scale += term.abs();
        self.terms += 1;
    }
}

/// All coordinates of a space, row-major.
fn points(dims: &[usize]) -> impl Iterator<Item = Vec<usize>> + '_ {
    (0..dims.iter().product()).map(|mut flat| {
        let mut at = vec![0; dims.len()];
        for axis in (0..dims.len()).rev() {
            (at[axis], flat) = (flat % dims[axis], flat / dims[axis]);
        }
        at
    })
}

/// An operand's elements by their coordinates.
struct Values<'a> {
    numbers: Vec<f64>,
    operand: &'a Operand,
    env: Env,
}

impl<'a> Values<'a> {
    fn new(case: &Case, argument: usize, operand: &'a Operand) -> Values<'a> {
        Values {
            numbers: numbers(operand.dtype, &case.args[argument]),
            operand,
            env: case.env,
        }
    }

    fn place(&self, at: &[usize]) -> usize {
        let strides = at.iter().zip(&self.operand.strides);
        (self.operand.offset.at(&self.env)
            + strides
                .map(|(&c, s)| c as i64 * s.at(&self.env))
                .sum::<i64>()) as usize
    }

    fn at(&self, at: &[usize]) -> f64 {
        self.numbers[self.place(at)]
    }
}

/// The sums, directly by the definition.
fn expected(case: &Case) -> Vec<Expected> {
    let env = &case.env;
    let dims: Vec<usize> = case.spec.dims.iter().map(|d| d.usize_at(env)).collect();
    let stored = Values {
        numbers: vec![],
        operand: &case.spec.operands[0],
        env: *env,
    };
    let mut results: Vec<Expected> = points(&dims)
        .map(|at| Expected {
            at: stored.place(&at),
            ..Expected::default()
        })
        .collect();
    match &case.spec.body {
        Body::Matmul(body) => {
            let (a, b, rank) = (
                Values::new(case, 0, &body.a),
                Values::new(case, 1, &body.b),
                dims.len(),
            );
            for (result, at) in results.iter_mut().zip(points(&dims)) {
                let (mut left, mut right) = (at.clone(), at);
                for k in 0..body.k.usize_at(env) {
                    left[rank - 1] = k;
                    right[rank - 2] = k;
                    result.add(a.at(&left) * b.at(&right));
                }
            }
        }
        Body::Conv2d(conv) => add_convolution(case, conv, &dims, &mut results),
        Body::QuantizedMatmul(product) => add_quantized(case, product, &dims, &mut results),
        _ => panic!("not a product"),
    }
    results
}

fn add_quantized(case: &Case, product: &QuantizedMatmul, dims: &[usize], results: &mut [Expected]) {
    let format = product.format;
    let a = Values::new(case, 0, &product.a);
    let scales = Values::new(case, 2, &product.scales);
    let packed = |argument: usize, operand: &Operand, row: usize, at: usize| {
        let bit = at * format.bits as usize;
        let of = Values {
            numbers: vec![],
            operand,
            env: case.env,
        };
        let byte = case.args[argument][of.place(&[row, bit / 8])];
        f64::from(u32::from(byte) >> (bit % 8) & format.mask())
    };
    for (result, at) in results.iter_mut().zip(points(dims)) {
        for k in 0..product.k.usize_at(&case.env) {
            let block = k / format.block as usize;
            let zero = match &product.zeros {
                None => f64::from(1 << (format.bits - 1)),
                Some(zeros) if zeros.dtype == DType::U8 => packed(3, zeros, at[1], block),
                Some(zeros) => Values::new(case, 3, zeros).at(&[at[1], block]),
            };
            let number = packed(1, &product.numbers, at[1], k);
            let weight = (number - zero) * scales.at(&[at[1], block]);
            result.add(a.at(&[at[0], k]) * weight);
        }
    }
}

fn add_convolution(case: &Case, conv: &Conv2d, dims: &[usize], results: &mut [Expected]) {
    let size = |s: Size| s.usize_at(&case.env);
    let (a, b) = (Values::new(case, 0, &conv.a), Values::new(case, 1, &conv.b));
    let (per_in, per_out) = (size(conv.ci) / conv.groups, size(conv.co) / conv.groups);
    let space = [
        size(conv.n),
        size(conv.co),
        size(conv.ohw[0]),
        size(conv.ohw[1]),
    ];
    for at in points(&space) {
        for tap in points(&[per_in, conv.k[0], conv.k[1]]) {
            let [n, co, oh, ow] = at[..] else {
                unreachable!()
            };
            let [c, kh, kw] = tap[..] else { unreachable!() };
            let h = (oh * conv.stride[0] + kh * conv.dilation[0]).wrapping_sub(conv.pad[0]);
            let w = (ow * conv.stride[1] + kw * conv.dilation[1]).wrapping_sub(conv.pad[1]);
            if h >= size(conv.hw[0]) || w >= size(conv.hw[1]) {
                continue;
            }
            let (x, k) = ([n, co / per_out * per_in + c, h, w], [co, c, kh, kw]);
            let (to, term) = match conv.kind {
                ConvKind::Forward => (&at[..], a.at(&x) * b.at(&k)),
                ConvKind::InputGrad => (&x[..], a.at(&at) * b.at(&k)),
                ConvKind::WeightGrad => (&k[..], a.at(&x) * b.at(&at)),
            };
            results[to.iter().zip(dims).fold(0, |flat, (c, d)| flat * d + c)].add(term);
        }
    }
}

/// The candidates of a case that are run.
#[derive(Clone, Copy, PartialEq)]
pub enum Pick {
    /// Every one.
    All,
    /// The first, and one of the others.
    Two,
    /// The kernels for few rows or columns.
    Vectors,
}

/// Runs candidates of the cases, compiled together. Kernels that have not run before are run in
/// every order of threads and their bits compared; others in one order. Where there is a GPU they
/// also run there. `right` computes the expected result of a case, and `judge` compares.
pub fn each<R>(
    cases: &[Case],
    pick: Pick,
    right: impl Fn(&Case) -> R,
    judge: impl Fn(&Case, &R, &str, &[Vec<u8>]),
) -> BTreeSet<String> {
    let picked = |(i, case): (usize, &Case)| {
        let mut list = candidates(&case.spec, &case.bounds, &case.target)
            .unwrap_or_else(|e| panic!("{}: {e}", case.name));
        let ordered = list.windows(2).all(|pair| pair[0].cycles <= pair[1].cycles);
        assert!(ordered && !list.is_empty(), "{}: {list:?}", case.name);
        // The tuner keeps a choice by its name.
        let names: BTreeSet<_> = list.iter().map(|c| &c.name).collect();
        assert_eq!(names.len(), list.len(), "{}: {list:?}", case.name);
        if pick == Pick::Two && list.len() > 2 {
            let other = 1 + i * 5 % (list.len() - 1);
            list.swap(1, other);
            list.truncate(2);
        }
        if pick == Pick::Vectors {
            list.retain(|c| c.name.starts_with("gemv"));
        }
        list
    };
    let all: Vec<Vec<Candidate>> = cases.iter().enumerate().map(picked).collect();
    let functions: Vec<_> = all
        .iter()
        .flatten()
        .flat_map(|c| c.lowered.functions.clone())
        .collect();
    let emulator = emulate(&functions);
    let mut gpu = Gpu::load(&all.iter().flatten().map(|c| &c.lowered).collect::<Vec<_>>());
    let mut steps = 0..;
    let mut seen = BTreeSet::new();
    let mut names = BTreeSet::new();
    for (i, (case, candidates)) in cases.iter().zip(&all).enumerate() {
        let right = right(case);
        for candidate in candidates {
            names.insert(candidate.name.clone());
            let step = steps.next().expect("it has no end");
            if let Some(gpu) = &mut gpu {
                let what = format!("{}: {} on the GPU", case.name, candidate.name);
                let (got, _) = gpu
                    .run(step, case, &candidate.lowered)
                    .unwrap_or_else(|e| panic!("{what}: {e}\n{:?}", case.spec));
                judge(case, &right, &what, &got);
            }
            let Some(emulator) = &emulator else { continue };
            let new = candidate
                .lowered
                .functions
                .iter()
                .filter(|f| seen.insert(f.name.clone()))
                .count()
                > 0;
            let orders = if new {
                &Order::ALL[..]
            } else {
                &Order::ALL[i % 3..][..1]
            };
            let mut first: Option<Vec<Vec<u8>>> = None;
            for &order in orders {
                let what = format!("{}: {} ({order:?})", case.name, candidate.name);
                let run = case.emulated(&candidate.lowered, emulator, order, NO_FAULT);
                let (got, _) = run.unwrap_or_else(|e| panic!("{what}: {e}\n{:?}", case.spec));
                match &first {
                    Some(first) => assert!(*first == got, "{what}: other bits than before"),
                    None => judge(case, &right, &what, &got),
                }
                first.get_or_insert(got);
            }
        }
    }
    names
}

/// Fails unless the candidates give the sums, within the bound of any order of summation in single
/// precision (Higham, *Accuracy and Stability*, §3.1). Returns the names of those that ran.
pub fn check(cases: &[Case], pick: Pick) -> BTreeSet<String> {
    check_within(cases, pick, |terms| {
        (terms + 4.0) * f64::from(f32::EPSILON) / 2.0
    })
}

/// Fails unless the candidates give the sums up to this error, relative to the sum of magnitudes,
/// for so many terms.
pub fn check_within(cases: &[Case], pick: Pick, error: impl Fn(f64) -> f64) -> BTreeSet<String> {
    each(cases, pick, expected, |case, right, what, got| {
        let stored = case.spec.arguments().len() - case.spec.operands.len();
        let result = numbers(case.spec.operands[0].dtype, &got[stored]);
        for e in right {
            let bound = error(e.terms as f64) * e.scale;
            let actual = result[e.at];
            assert!(
                (actual - e.sum).abs() <= bound,
                "{what}: {actual} at {} is not {} ± {bound}\n{:?}",
                e.at,
                e.sum,
                case.spec
            );
        }
    })
}

/// Fails unless the candidates give the sums exactly: for operands whose sums have no rounding.
pub fn check_exact(cases: &[Case], pick: Pick) -> BTreeSet<String> {
    each(cases, pick, expected, |case, right, what, got| {
        let stored = case.spec.arguments().len() - case.spec.operands.len();
        let result = numbers(case.spec.operands[0].dtype, &got[stored]);
        for e in right {
            assert!(
                result[e.at] == e.sum,
                "{what}: {} at {} is not {}\n{:?}",
                result[e.at],
                e.at,
                e.sum,
                case.spec
            );
        }
    })
}

/// Fails unless the candidates leave every argument as the CPU's kernel does, within the tolerance.
pub fn check_like_cpu(cases: &[Case], pick: Pick, tolerance: f32) -> BTreeSet<String> {
    let judge = |case: &Case, cpu: &(Vec<Vec<u8>>, u64), what: &str, got: &[Vec<u8>]| {
        compare(case, what, got, &cpu.0, tolerance)
    };
    each(cases, pick, Case::on_cpu, judge)
}
