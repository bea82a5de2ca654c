//! Sums over the rows of a product's result in its epilogue: all candidate kernels, emulated,
//! against sums in double precision of the result that they stored.

mod common;
mod products;

use common::{Case, Choices, TARGET, available};
use products::convolution::Shape;
use products::{Pick, contiguous, each, matmul, numbers, strided, typed};
use slabwise_cuda::{Target, candidates};
use slabwise_kernels::dtype::DType;
use slabwise_kernels::scalar::ScalarOp;
use slabwise_kernels::size::{Env, Size};
use slabwise_kernels::spec::{ConvKind, Inst, Operand, ReduceOp, Spec, Store};

/// The columns of a product: the channels of images, else the last axis.
fn columns(spec: &Spec) -> usize {
    (0..spec.dims.len())
        .find(|&axis| !spec.is_reduced(axis))
        .expect("an axis is kept")
}

/// The product with a sum of its elements, one of their products with those of another tensor, and
/// their squared deviations, for each column; `which` tells which of the three.
fn summed(mut spec: Spec, which: [bool; 3]) -> Spec {
    spec.reduced = spec.dims.len() - 1;
    let kept = columns(&spec);
    let column = |axis: usize| Size::fixed(i64::from(axis == kept));
    let sums = Operand {
        dtype: DType::F32,
        offset: Size::fixed(0),
        strides: (0..spec.dims.len()).map(column).collect(),
    };
    spec.operands.push(Operand {
        dtype: DType::F32,
        ..spec.operands[0].clone()
    });
    spec.code.extend([
        Inst::Load(1),
        Inst::Op(ScalarOp::Mul, [0, 1, 0]),
        Inst::Reduce(ReduceOp::Sum, 0),
        Inst::Reduce(ReduceOp::Sum, 2),
        Inst::Reduce(ReduceOp::SquaredDeviations, 0),
    ]);
    for (value, _) in [3, 4, 5]
        .into_iter()
        .zip(which)
        .filter(|(_, wanted)| *wanted)
    {
        spec.stores.push(Store {
            value,
            operand: spec.operands.len() as u16,
        });
        spec.operands.push(sums.clone());
    }
    spec
}

/// The rows of each column: result and other tensor.
fn rows(case: &Case, result: &[f64], other: &[f64]) -> Vec<Vec<[f64; 2]>> {
    let spec = &case.spec;
    let kept = columns(spec);
    let dims: Vec<usize> = spec.dims.iter().map(|d| d.usize_at(&case.env)).collect();
    let strides: Vec<usize> = spec.operands[0]
        .strides
        .iter()
        .map(|s| s.usize_at(&case.env))
        .collect();
    let mut list = vec![Vec::new(); dims[kept]];
    for flat in 0..dims.iter().product() {
        let (mut rest, mut place, mut column) = (flat, 0, 0);
        for axis in (0..dims.len()).rev() {
            let at = rest % dims[axis];
            rest /= dims[axis];
            place += at * strides[axis];
            column = if axis == kept { at } else { column };
        }
        list[column].push([result[place], other[place]]);
    }
    list
}

/// Fails unless every candidate has the sums of the result that it stored.
fn check(cases: &[Case], which: [bool; 3]) {
    each(
        cases,
        Pick::All,
        |_| (),
        |case, (), what, got| {
            let first = got.len() - case.spec.operands.len();
            let of = |k: usize| numbers(case.spec.operands[k].dtype, &got[first + k]);
            let rows = rows(case, &of(0), &of(1));
            let mut operands = 2..;
            for (kind, _) in (0..3).zip(which).filter(|(_, wanted)| *wanted) {
                let sums = of(operands.next().expect("it has no end"));
                for (column, rows) in rows.iter().enumerate() {
                    let count = rows.len() as f64;
                    let mean = rows.iter().map(|r| r[0]).sum::<f64>() / count;
                    let term = |[x, y]: &[f64; 2]| match kind {
                        0 => *x,
                        1 => x * y,
                        _ => (x - mean) * (x - mean),
                    };
                    let sum: f64 = rows.iter().map(term).sum();
                    let scale: f64 = rows.iter().map(|r| term(r).abs()).sum();
                    // Of the deviations, the difference that the mean's rounding makes.
                    let own = if kind == 2 { count * mean * mean } else { 0.0 };
                    let epsilon = f64::from(f32::EPSILON);
                    let bound = (count + 8.0) * epsilon * (scale + own * epsilon) + 1e-30;
                    let (actual, expected) = (sums[column], sum);
                    assert!(
                        (actual - expected).abs() <= bound,
                        "{what}: sum {kind} of column {column} is {actual}, not {expected} ± {bound}"
                    );
                }
            }
        },
    );
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
    for which in [
        [true; 3],
        [true, true, false],
        [false, false, true],
        [true, false, true],
    ] {
        let mut cases = Vec::new();
        for (shape, dtype) in [
            (Shape::simple(3, 16, 24, 11, 3, 1), DType::F32),
            (Shape::simple(5, 32, 64, 17, 1, 0), DType::BF16),
            (Shape::simple(2, 16, 40, 9, 3, 1), DType::F16),
        ] {
            for kind in [ConvKind::Forward, ConvKind::InputGrad] {
                let innermost = |space: [usize; 4], dtype| {
                    let [_, c, h, w] = space;
                    typed(dtype, 0, &[c * h * w, 1, w * c, c])
                };
                let [a, b, out] = shape.spaces(kind);
                let weight = typed(dtype, 0, &contiguous(&b));
                let operands = [innermost(a, dtype), weight, innermost(out, DType::F32)];
                let spec = summed(shape.spec(kind, operands), which);
                let mut case = Case::new(format!("{kind:?} {shape:?} {dtype}"), spec, &mut choices);
                case.target = target(dtype == DType::F32);
                cases.push(case);
            }
        }
        check(&cases, which);
    }
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
fn what_no_kernel_sums_is_refused() {
    let refused = |spec: Spec| {
        let found = candidates(&spec, &Env::default(), &TARGET);
        let error = found.map(|list| list.len()).expect_err("no kernel");
        assert!(error.to_string().contains("sums over a result"), "{error}");
    };
    // A batch of products, and residues of a stride.
    let shape = Shape::simple(2, 8, 16, 9, 3, 1);
    let (a, b) = (strided(0, &[200, 20, 1]), strided(0, &[160, 8, 1]));
    refused(summed(matmul(&[3, 10, 8], 20, a, b), [true; 3]));
    let strided_shape = Shape {
        stride: [2, 2],
        ..shape
    };
    let innermost = |space: [usize; 4]| {
        let [_, c, h, w] = space;
        strided(0, &[c * h * w, 1, w * c, c])
    };
    let operands = strided_shape.spaces(ConvKind::InputGrad).map(innermost);
    refused(summed(
        strided_shape.spec(ConvKind::InputGrad, operands),
        [true; 3],
    ));
}
