//! Convolutions by libraries, over a driver without a device.

mod common;
mod products;

use common::{Case, Choices};
use products::convolution::{KINDS, Shape};
use products::library::{algorithm, check, computed, installed, of_library, on_small_integers, op, picks_in, target, tuner, with};
use products::{numbers, typed};
use slabwise_cuda::{Choice, Target, lower_as};
use slabwise_kernels::dtype::DType;
use slabwise_kernels::scalar::ScalarOp;
use slabwise_kernels::size::{Env, Size, Symbol};
use slabwise_kernels::spec::{Body, ConvKind, Inst, Spec};

/// Row-major strides of axes that lie in memory in this order.
fn lying(order: [usize; 4], space: [usize; 4]) -> [usize; 4] {
    let (mut strides, mut stride) = ([0; 4], 1);
    for &axis in order.iter().rev() {
        strides[axis] = stride;
        stride *= space[axis];
    }
    strides
}

/// A convolution of images and results by channels last; its weight lies as ever.
fn channels_last(shape: &Shape, kind: ConvKind) -> Spec {
    let weight = if kind == ConvKind::WeightGrad { 2 } else { 1 };
    let spaces = shape.spaces(kind);
    let operand = |at: usize| {
        let order = if at == weight { [0, 1, 2, 3] } else { [0, 2, 3, 1] };
        typed(if at == 2 { DType::F32 } else { shape.dtype }, 0, &lying(order, spaces[at]))
    };
    shape.spec(kind, [operand(0), operand(1), operand(2)])
}

/// With a number for each channel of the result added, and relu behind it.
fn with_bias_and_relu(spec: Spec) -> Spec {
    let code = vec![Inst::Load(1), op(ScalarOp::Add, 0, 1), op(ScalarOp::Relu, 2, 0)];
    with(spec, vec![typed(DType::F32, 0, &[0, 1, 0, 0])], code)
}

#[test]
fn a_kernel_of_one_element_is_a_product_for_each_image() {
    let Some(driver) = installed() else { return };
    let shape = Shape::simple(3, 6, 10, 5, 1, 0);
    let single = Shape { n: 1, ..shape };
    let mut specs: Vec<(&str, Spec, bool)> = Vec::new();
    for kind in KINDS {
        // Products of images that lie apart are added by a kernel of ours.
        specs.push(("by channels", shape.contiguous(kind), kind != ConvKind::WeightGrad));
        specs.push(("one image", single.contiguous(kind), true));
        specs.push(("by channels last", channels_last(&shape, kind), true));
        specs.push(("with more behind", with_bias_and_relu(shape.contiguous(kind)), false));
        specs.push(("by channels last with more behind", with_bias_and_relu(channels_last(&shape, kind)), false));
    }
    specs.push(("in groups", Shape { groups: 2, ..shape }.contiguous(ConvKind::WeightGrad), false));
    let mut apart = shape.contiguous(ConvKind::Forward);
    let Body::Conv2d(body) = &mut apart.body else { unreachable!() };
    // Every other image, behind others.
    body.a = typed(DType::F32, 8, &[300, 25, 5, 1]);
    specs.push(("images with others between", apart, true));
    let mut cases = on_small_integers(specs, 11);
    let mut guarded = cases[10].clone();
    guarded.0.target = Target { guarded: true, ..target() };
    cases.push(guarded);
    let multiplied = driver.get("products");
    check(&cases, &[algorithm(21, 1 << 20), algorithm(23, 1 << 20)], 1e-6);
    assert_eq!(driver.get("products") - multiplied, 2 * cases.len() as i64);
}

#[test]
fn convolutions_of_halves_are_summed_in_single_precision() {
    let Some(_driver) = installed() else { return };
    let mut specs = Vec::new();
    for dtype in [DType::F16, DType::BF16] {
        let shape = Shape { dtype, ..Shape::simple(2, 6, 8, 4, 1, 0) };
        for kind in KINDS {
            specs.push(("halves", shape.contiguous(kind), kind != ConvKind::WeightGrad));
        }
    }
    let cases = on_small_integers(specs, 12);
    let results = computed(&cases, &[algorithm(21, 0)]);
    for ((case, _), got) in cases.iter().zip(results) {
        // The same numbers in single precision, on the CPU, without rounding.
        let mut wide = case.clone();
        let Body::Conv2d(body) = &mut wide.spec.body else { unreachable!() };
        for (at, operand) in [&mut body.a, &mut body.b].into_iter().enumerate() {
            wide.args[at] = numbers(operand.dtype, &case.args[at]).iter().flat_map(|&x| (x as f32).to_le_bytes()).collect();
            operand.dtype = DType::F32;
        }
        assert_eq!(got[2], wide.on_cpu().0[2], "{:?}", case.spec);
    }
}

#[test]
fn a_kernel_of_one_element_with_steps_borders_or_groups_is_no_product() {
    let Some(_driver) = installed() else { return };
    let mut choices = Choices::new(13);
    let one = Shape::simple(2, 6, 8, 4, 1, 0);
    for shape in [
        Shape { stride: [2, 1], ..one },
        Shape { pad: [0, 1], ..one },
        Shape { k: [1, 2], ..one },
        Shape { groups: 2, ..one },
        Shape { cut: [1, 0], ..one },
    ] {
        // Products of groups and images are so many steps apart from one another; but weights are not, which all images share.
        for kind in KINDS.into_iter().filter(|kind| shape.groups == 1 || *kind != ConvKind::WeightGrad) {
            let case = shape.case(kind, &mut choices);
            let lowered = lower_as(&case.spec, &case.bounds, &case.target, &Choice::Library(algorithm(21, 0))).expect("it has a source");
            assert!(lowered.library().is_none() && !lowered.functions.is_empty(), "{}", case.name);
        }
    }
}

/// A batch of up to 4 images, of which there may be none: then the gradient of a weight is 0.
#[test]
fn batches_may_be_smaller_than_at_the_bounds() {
    let Some(_driver) = installed() else { return };
    let (shape, env) = (Shape::simple(4, 6, 8, 4, 1, 0), |n| Env([n, 0, 0, 0, 0, 0, 0, 0]));
    let mut choices = Choices::new(14);
    let mut cases = Vec::new();
    for (kind, n) in KINDS.into_iter().flat_map(|kind| [4, 3, 1, 0].map(|n| (kind, n))) {
        let mut spec = shape.contiguous(kind);
        let batch = Size::symbol(Symbol(0));
        let Body::Conv2d(body) = &mut spec.body else { unreachable!() };
        body.n = batch;
        if kind != ConvKind::WeightGrad {
            spec.dims[0] = batch;
        }
        let mut case = Case::bounded(format!("{kind:?} of {n}"), spec.clone(), env(4), env(n), &mut choices);
        case.args = Case::bounded("", spec, env(4), env(4), &mut choices).args;
        case.target = target();
        cases.push((case, kind != ConvKind::WeightGrad));
    }
    check(&cases, &[algorithm(21, 1 << 20), algorithm(23, 1 << 20)], 1e-5);
}

#[test]
fn the_tuner_offers_products_of_images() {
    let Some(driver) = installed() else { return };
    let shape = Shape::simple(3, 24, 32, 8, 1, 0);
    for kind in KINDS {
        let spec = shape.contiguous(kind);
        driver.cost("", 1_000_000);
        driver.cost("cublaslt_21", 10_000);
        driver.cost("gemm_parts", 10_000);
        let folder = tempfile::tempdir().expect("a folder");
        let choice = tuner(picks_in(&folder)).choose(&[(&spec, target())], &Env::default()).remove(0);
        assert_eq!(choice, Choice::Library(algorithm(21, 0)), "{kind:?}");
        driver.cost("", 1_000_000);
        driver.cost("gemm_", 10_000);
        let folder = tempfile::tempdir().expect("a folder");
        let choice = tuner(picks_in(&folder)).choose(&[(&spec, target())], &Env::default()).remove(0);
        assert!(matches!(choice, Choice::Own(_)), "{kind:?}: {choice:?}");
    }
    let lowered = of_library(&shape.case(ConvKind::Forward, &mut Choices::new(1)), algorithm(21, 0));
    assert_eq!(lowered.library().as_deref(), Some("cuBLASLt algorithm 21"));
}
