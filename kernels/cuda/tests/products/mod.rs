//! Runs every candidate of matrix products and convolutions under the emulator.
#![allow(dead_code)] // each test binary uses a part of it

use slabwise_cuda::emulator::{Check, Emulator, Order};
use slabwise_cuda::{Candidate, candidates};
use slabwise_kernels::dtype::DType;
use slabwise_kernels::size::{Env, Size};
use slabwise_kernels::spec::{Body, Inst, Matmul, Operand, Spec, Store};

use super::common::{Case, NO_FAULT};

/// An f32 operand with these strides.
pub fn strided(offset: i64, strides: &[usize]) -> Operand {
    Operand { dtype: DType::F32, offset: Size::fixed(offset), strides: strides.iter().map(|&s| Size::fixed(s as i64)).collect() }
}

/// Row-major strides.
pub fn contiguous(dims: &[usize]) -> Vec<usize> {
    let mut strides = vec![1; dims.len()];
    for axis in (1..dims.len()).rev() {
        strides[axis - 1] = strides[axis] * dims[axis].max(1);
    }
    strides
}

/// A product whose result is stored as it is.
pub fn matmul(dims: &[usize], k: usize, a: Operand, b: Operand) -> Spec {
    plain(Body::Matmul(Matmul { k: Size::fixed(k as i64), a, b }), dims, strided(0, &contiguous(dims)))
}

/// An anchor whose result is stored as it is.
pub fn plain(body: Body, dims: &[usize], out: Operand) -> Spec {
    Spec {
        body,
        dims: dims.iter().map(|&d| Size::fixed(d as i64)).collect(),
        reduced: 0,
        operands: vec![out],
        indices: vec![],
        code: vec![Inst::Acc],
        stores: vec![Store { value: 0, operand: 0 }],
    }
}

pub fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks(4).map(|b| f32::from_le_bytes(b.try_into().expect("4 bytes"))).collect()
}

/// One element of the result in double precision: the sum, the sum of magnitudes, the number of terms, and where it is stored.
pub struct Expected {
    pub sum: f64,
    pub scale: f64,
    pub terms: usize,
    pub at: usize,
}

/// All coordinates of a space, row-major.
pub fn points(dims: &[usize]) -> impl Iterator<Item = Vec<usize>> + '_ {
    (0..dims.iter().product()).map(|mut flat| {
        let mut at = vec![0; dims.len()];
        for axis in (0..dims.len()).rev() {
            (at[axis], flat) = (flat % dims[axis], flat / dims[axis]);
        }
        at
    })
}

/// Where an operand's element at these coordinates lies.
pub fn address(operand: &Operand, at: &[usize], env: &Env) -> usize {
    (operand.offset.at(env) + at.iter().zip(&operand.strides).map(|(&c, s)| c as i64 * s.at(env)).sum::<i64>()) as usize
}

/// The sums of a matrix product, straight from the definition.
fn expected(case: &Case) -> Vec<Expected> {
    let env = &case.env;
    let Body::Matmul(body) = &case.spec.body else { panic!("not a matrix product") };
    let dims: Vec<usize> = case.spec.dims.iter().map(|d| d.usize_at(env)).collect();
    let (a, b) = (floats(&case.args[0]), floats(&case.args[1]));
    let rank = dims.len();
    points(&dims)
        .map(|at| {
            let mut result = Expected { sum: 0.0, scale: 0.0, terms: body.k.usize_at(env), at: address(&case.spec.operands[0], &at, env) };
            for k in 0..result.terms {
                let (mut left, mut right) = (at.clone(), at.clone());
                left[rank - 1] = k;
                right[rank - 2] = k;
                let term = f64::from(a[address(&body.a, &left, env)]) * f64::from(b[address(&body.b, &right, env)]);
                result.sum += term;
                result.scale += term.abs();
            }
            result
        })
        .collect()
}

/// Every candidate of every case, compiled together: all that could be taken for some size must be right for this one.
fn each(cases: &[Case], mut judge: impl FnMut(&Case, &str, &[Vec<u8>])) {
    let all: Vec<Vec<Candidate>> =
        cases.iter().map(|c| candidates(&c.spec, &c.bounds, &c.target).unwrap_or_else(|e| panic!("{}: {e}", c.name))).collect();
    let functions: Vec<_> = all.iter().flatten().flat_map(|c| c.lowered.functions.clone()).collect();
    let emulator = Emulator::new(&functions, Check::Nothing).unwrap_or_else(|e| panic!("{e}"));
    for (case, candidates) in cases.iter().zip(&all) {
        assert!(candidates.windows(2).all(|pair| pair[0].cycles <= pair[1].cycles), "{}: {candidates:?}", case.name);
        for candidate in candidates {
            let mut first: Option<Vec<Vec<u8>>> = None;
            for order in Order::ALL {
                let what = format!("{}: {} ({order:?})", case.name, candidate.name);
                let run = case.emulated(&candidate.lowered, &emulator, order, NO_FAULT);
                let (got, _) = run.unwrap_or_else(|e| panic!("{what}: {e}\n{:?}", case.spec));
                match &first {
                    Some(first) => assert!(*first == got, "{what}: other bits than forward"),
                    None => judge(case, &what, &got),
                }
                first.get_or_insert(got);
            }
        }
    }
}

/// Fails unless all candidates give the sums, within the bound of any order of summation in single precision (Higham, *Accuracy and
/// Stability*, §3.1).
pub fn check(cases: &[Case]) {
    each(cases, |case, what, got| {
        let stored = case.spec.arguments().len() - case.spec.operands.len();
        let result = floats(&got[stored]);
        for e in expected(case) {
            let bound = (e.terms as f64 + 4.0) * f64::from(f32::EPSILON) / 2.0 * e.scale;
            let actual = result[e.at];
            assert!((f64::from(actual) - e.sum).abs() <= bound, "{what}: {actual} at {} is not {} ± {bound}\n{:?}", e.at, e.sum, case.spec);
        }
    });
}

pub fn check_epilogue() {}
