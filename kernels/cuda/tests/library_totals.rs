//! Sums in the epilogues behind products of libraries, over a driver without a device.

mod common;
mod products;

use common::{Case, Choices};
use products::convolution::Shape;
use products::library::{by, computed, installed, target};
use products::sums::{innermost, judge, judge_columns, with_columns};
use products::{matmul, strided};
use slabwise_cuda::{Choice, cudnn};
use slabwise_kernels::dtype::DType;
use slabwise_kernels::spec::{ConvKind, Spec};

const ALL: [bool; 3] = [true; 3];

/// Fails unless the algorithms leave the sums of their results.
fn check(specs: Vec<(&str, Spec)>, algorithms: &[Choice]) {
    let mut choices = Choices::new(81);
    let case = |(name, spec)| {
        let mut case = Case::new(name, with_columns(spec), &mut choices);
        case.target = target();
        (case, false)
    };
    let cases: Vec<(Case, bool)> = specs.into_iter().map(case).collect();
    let results = computed(&cases, algorithms);
    for ((case, _), results) in cases.iter().zip(results.chunks(algorithms.len())) {
        for (got, algorithm) in results.iter().zip(algorithms) {
            let what = format!("{}, {algorithm:?}", case.name);
            judge(case, ALL, &what, got);
            judge_columns(case, &what, got);
        }
    }
}

#[test]
fn of_products_by_cublaslt() {
    let Some(_driver) = installed() else { return };
    let row_major = |[m, n, k]: [usize; 3]| {
        let (a, b) = (strided(0, &[k, 1]), strided(0, &[n, 1]));
        matmul(&[m, n], k, a, b)
    };
    let shape = Shape {
        dtype: DType::BF16,
        ..Shape::simple(3, 16, 72, 9, 1, 0)
    };
    let specs = vec![
        ("few rows", row_major([40, 70, 12])),
        ("several tiles", row_major([300, 130, 20])),
        // Two levels of blocks.
        ("many tiles", row_major([4500, 8, 4])),
        ("forward", innermost(&shape, ConvKind::Forward)),
        ("gradient", innermost(&shape, ConvKind::InputGrad)),
    ];
    check(specs, &[by(21, 1 << 20), by(23, 1 << 20)]);
}

#[test]
fn of_convolutions_by_cudnn() {
    let Some(driver) = installed() else { return };
    driver.set("cudnn", 1);
    let shape = Shape::simple(3, 8, 12, 9, 3, 1);
    let halved = Shape {
        stride: [2, 2],
        ..shape
    };
    let specs = vec![
        ("forward", innermost(&shape, ConvKind::Forward)),
        ("gradient", innermost(&shape, ConvKind::InputGrad)),
        ("with steps", innermost(&halved, ConvKind::Forward)),
        // Of several products by kernels of slabwise, one by the library.
        (
            "gradient with steps",
            innermost(&halved, ConvKind::InputGrad),
        ),
    ];
    let plain = Choice::Cudnn(cudnn::Algorithm {
        number: 1,
        math: 3,
        workspace: 1 << 20,
    });
    check(specs, &[plain]);
}
