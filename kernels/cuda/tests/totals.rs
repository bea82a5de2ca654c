//! Sums over the rows of a product's result in its epilogue: candidate kernels, emulated, against
//! sums in double precision of the result that they stored.

mod common;
mod products;

use common::{Case, Choices, TARGET, available};
use products::convolution::Shape;
use products::sums::{innermost, judge, judge_columns, summed, with_columns};
use products::{Pick, each, matmul, strided};
use slabwise_cuda::{Target, candidates};
use slabwise_kernels::dtype::DType;
use slabwise_kernels::size::{Env, Size, Symbol};
use slabwise_kernels::spec::{ConvKind, Spec};

/// Fails unless candidates have the sums of the result that they stored: all of them where there
/// are sums of every kind, two of them otherwise.
fn check(cases: &[Case], which: [bool; 3]) {
    let pick = if which == [true; 3] {
        Pick::All
    } else {
        Pick::Two
    };
    let judge = |case: &Case, (): &(), what: &str, got: &[Vec<u8>]| judge(case, which, what, got);
    each(cases, pick, |_| (), judge);
}

/// Few multiprocessors, tensor cores of one type.
fn target(tf32: bool) -> Target {
    Target {
        tf32,
        multiprocessors: 4,
        ..TARGET
    }
}

#[test]
fn of_matrices() {
    if !available() {
        return;
    }
    let mut choices = Choices::new(71);
    let mut cases = Vec::new();
    for (m, n, k, tf32) in [
        (300, 70, 40, false),
        (1500, 24, 16, false),
        (40, 140, 300, true),
        (1, 33, 20, false),
        (2600, 64, 32, true),
    ] {
        let (a, b) = (strided(0, &[k, 1]), strided(0, &[n, 1]));
        let spec = summed(matmul(&[m, n], k, a, b), [true; 3]);
        let mut case = Case::new(format!("{m}×{n}×{k}, tf32 {tf32}"), spec, &mut choices);
        case.target = target(tf32);
        cases.push(case);
    }
    // A batch with one weight is one product.
    let (a, b) = (strided(0, &[90 * 20, 20, 1]), strided(0, &[0, 48, 1]));
    let spec = summed(matmul(&[7, 90, 48], 20, a, b), [true; 3]);
    cases.push(Case::new("batch", spec, &mut choices));
    check(&cases, [true; 3]);
}

#[test]
fn of_images_whose_channels_are_innermost() {
    if !available() {
        return;
    }
    let mut choices = Choices::new(72);
    for (number, which) in [
        [true; 3],
        [true, true, false],
        [false, false, true],
        [true, false, true],
    ]
    .into_iter()
    .enumerate()
    {
        let mut cases = Vec::new();
        for (shape, dtype) in [
            (Shape::simple(3, 16, 24, 11, 3, 1), DType::F32),
            (Shape::simple(5, 32, 64, 17, 1, 0), DType::BF16),
            (Shape::simple(2, 16, 40, 9, 3, 1), DType::F16),
        ] {
            for (at, kind) in [ConvKind::Forward, ConvKind::InputGrad]
                .into_iter()
                .enumerate()
            {
                // Of sums of some kinds, those of one of both.
                if number > 0 && (number + cases.len()) % 2 != at {
                    continue;
                }
                let shape = Shape { dtype, ..shape };
                let spec = summed(innermost(&shape, kind), which);
                let mut case = Case::new(format!("{kind:?} {shape:?} {dtype}"), spec, &mut choices);
                case.target = target(dtype == DType::F32);
                cases.push(case);
            }
        }
        check(&cases, which);
    }
}

#[test]
fn the_last_block_of_a_column_does_its_work() {
    if !available() {
        return;
    }
    let mut choices = Choices::new(74);
    let mut cases = Vec::new();
    for (m, n, k, tf32) in [
        (300, 70, 40, false),
        (2600, 64, 32, true),
        (1, 33, 20, false),
    ] {
        let (a, b) = (strided(0, &[k, 1]), strided(0, &[n, 1]));
        let spec = with_columns(matmul(&[m, n], k, a, b));
        let mut case = Case::new(format!("{m}×{n}×{k}, tf32 {tf32}"), spec, &mut choices);
        case.target = target(tf32);
        cases.push(case);
    }
    for kind in [ConvKind::Forward, ConvKind::InputGrad] {
        let shape = Shape {
            dtype: DType::BF16,
            ..Shape::simple(3, 16, 24, 11, 3, 1)
        };
        let spec = with_columns(innermost(&shape, kind));
        let mut case = Case::new(format!("{kind:?}"), spec, &mut choices);
        case.target = target(false);
        cases.push(case);
    }
    let judge = |case: &Case, (): &(), what: &str, got: &[Vec<u8>]| {
        judge(case, [true; 3], what, got);
        judge_columns(case, what, got);
    };
    each(&cases, Pick::All, |_| (), judge);
}

/// Sums of a column that has the same number in every row, far from 0: they deviate by rounding only.
#[test]
fn of_numbers_far_from_zero() {
    if !available() {
        return;
    }
    let mut choices = Choices::new(73);
    let (m, n, k) = (1400, 32, 16);
    let spec = summed(
        matmul(&[m, n], k, strided(0, &[k, 1]), strided(0, &[n, 1])),
        [false, false, true],
    );
    let mut case = Case::new("far from zero", spec, &mut choices);
    // Rows of A are alike up to small integers, times a large column of B.
    let row = |i: usize, j: usize| if j == 0 { 4096.0 + (i % 3) as f32 } else { 0.0 };
    let a = (0..m * k).map(|at| row(at / k, at % k));
    case.args[0] = a.flat_map(f32::to_le_bytes).collect();
    case.args[1] = (0..k * n).flat_map(|_| 1.0f32.to_le_bytes()).collect();
    check(&[case], [false, false, true]);
}

#[test]
fn sums_without_a_kernel_are_refused() {
    let refused = |spec: Spec| {
        let found = candidates(&spec, &Env::default(), &TARGET);
        let error = found.map(|list| list.len()).expect_err("no kernel");
        assert!(error.to_string().contains("sums over"), "{error}");
    };
    // A batch of products, and residues of a stride.
    let shape = Shape::simple(2, 8, 16, 9, 3, 1);
    let (a, b) = (strided(0, &[200, 20, 1]), strided(0, &[160, 8, 1]));
    refused(summed(matmul(&[3, 10, 8], 20, a, b), [true; 3]));
    // A batch that a run may not have.
    let (a, b) = (strided(0, &[20, 1]), strided(0, &[8, 1]));
    let mut unknown = summed(matmul(&[10, 8], 20, a, b), [true; 3]);
    unknown.dims[0] = Size::symbol(Symbol(0));
    refused(unknown);
    let strided_shape = Shape {
        stride: [2, 2],
        ..shape
    };
    refused(summed(
        innermost(&strided_shape, ConvKind::InputGrad),
        [true; 3],
    ));
}
