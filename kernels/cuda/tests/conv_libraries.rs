//! Convolutions by libraries, over a driver without a device.

mod common;
mod products;

use std::path::Path;
use std::process::Command;

use common::{Case, Choices};
use products::convolution::{KINDS, Shape};
use products::library::{
    LIMITS, algorithm, by, check, computed, installed, of_library, on_device, on_small_integers,
    op, picks_in, target, tuner, with,
};
use products::{numbers, typed};
use slabwise_cuda::cudnn;
use slabwise_cuda::fake::FakeDriver;
use slabwise_cuda::libraries::Library;
use slabwise_cuda::{Choice, Device, Target, Tuner, lower_as};
use slabwise_kernels::dtype::DType;
use slabwise_kernels::scalar::{ScalarOp, Value};
use slabwise_kernels::size::{Env, Size, Symbol};
use slabwise_kernels::spec::{Body, Conv2d, ConvKind, Inst, Spec};

/// Row-major strides of axes in this order in memory.
fn lying(order: [usize; 4], space: [usize; 4]) -> [usize; 4] {
    let (mut strides, mut stride) = ([0; 4], 1);
    for &axis in order.iter().rev() {
        strides[axis] = stride;
        stride *= space[axis];
    }
    strides
}

/// A convolution of channels-last images and results; its weight is row-major.
fn channels_last(shape: &Shape, kind: ConvKind) -> Spec {
    let weight = if kind == ConvKind::WeightGrad { 2 } else { 1 };
    let spaces = shape.spaces(kind);
    let operand = |at: usize| {
        let order = if at == weight {
            [0, 1, 2, 3]
        } else {
            [0, 2, 3, 1]
        };
        typed(
            if at == 2 { DType::F32 } else { shape.dtype },
            0,
            &lying(order, spaces[at]),
        )
    };
    shape.spec(kind, [operand(0), operand(1), operand(2)])
}

/// The convolution with a bias per channel of the result and relu.
fn with_bias_and_relu(spec: Spec) -> Spec {
    let code = vec![
        Inst::Load(1),
        op(ScalarOp::Add, 0, 1),
        op(ScalarOp::Relu, 2, 0),
    ];
    with(spec, vec![typed(DType::F32, 0, &[0, 1, 0, 0])], code)
}

#[test]
fn a_kernel_of_one_element_is_a_product_for_each_image() {
    let Some(driver) = installed() else { return };
    let shape = Shape::simple(3, 6, 10, 5, 1, 0);
    let single = Shape { n: 1, ..shape };
    let mut specs: Vec<(&str, Spec, bool)> = Vec::new();
    for kind in KINDS {
        // The partial products of separate images are added by a kernel of slabwise.
        specs.push((
            "by channels",
            shape.contiguous(kind),
            kind != ConvKind::WeightGrad,
        ));
        specs.push(("one image", single.contiguous(kind), true));
        specs.push(("by channels last", channels_last(&shape, kind), true));
        specs.push((
            "with more behind",
            with_bias_and_relu(shape.contiguous(kind)),
            false,
        ));
        specs.push((
            "by channels last with more behind",
            with_bias_and_relu(channels_last(&shape, kind)),
            false,
        ));
    }
    specs.push((
        "in groups",
        Shape { groups: 2, ..shape }.contiguous(ConvKind::WeightGrad),
        false,
    ));
    let mut apart = shape.contiguous(ConvKind::Forward);
    let Body::Conv2d(body) = &mut apart.body else {
        unreachable!()
    };
    // Every other image, with an offset.
    body.a = typed(DType::F32, 8, &[300, 25, 5, 1]);
    specs.push(("images with others between", apart, true));
    let mut cases = on_small_integers(specs, 11);
    let mut guarded = cases[10].clone();
    guarded.0.target = Target {
        guarded: true,
        ..target()
    };
    cases.push(guarded);
    let multiplied = driver.get("products");
    check(&cases, &[by(21, 1 << 20), by(23, 1 << 20)], 1e-6);
    assert_eq!(driver.get("products") - multiplied, 2 * cases.len() as i64);
}

#[test]
fn convolutions_of_halves_are_summed_in_single_precision() {
    let Some(_driver) = installed() else { return };
    let mut specs = Vec::new();
    for dtype in [DType::F16, DType::BF16] {
        let shape = Shape {
            dtype,
            ..Shape::simple(2, 6, 8, 4, 1, 0)
        };
        for kind in KINDS {
            specs.push((
                "halves",
                shape.contiguous(kind),
                kind != ConvKind::WeightGrad,
            ));
        }
    }
    let cases = on_small_integers(specs, 12);
    for ((case, _), got) in cases.iter().zip(computed(&cases, &[by(21, 0)])) {
        assert_eq!(
            numbers(DType::F32, &got[2]),
            of_wide(case),
            "{:?}",
            case.spec
        );
    }
}

/// The CPU's result of a convolution of halves with its numbers in single precision.
fn of_wide(case: &Case) -> Vec<f64> {
    let mut wide = case.clone();
    let Body::Conv2d(body) = &mut wide.spec.body else {
        unreachable!()
    };
    for (at, operand) in [&mut body.a, &mut body.b].into_iter().enumerate() {
        wide.args[at] = numbers(operand.dtype, &case.args[at])
            .iter()
            .flat_map(|&x| (x as f32).to_le_bytes())
            .collect();
        operand.dtype = DType::F32;
    }
    wide.args[2] = vec![0; case.args[2].len() / case.spec.operands[0].dtype.bytes() * 4];
    wide.spec.operands[0].dtype = DType::F32;
    wide.spec.code.truncate(1);
    wide.spec.stores[0].value = 0;
    numbers(DType::F32, &wide.on_cpu().0[2])
}

#[test]
fn a_kernel_of_one_element_with_steps_borders_or_groups_is_no_product() {
    let Some(_driver) = installed() else { return };
    let mut choices = Choices::new(13);
    let one = Shape::simple(2, 6, 8, 4, 1, 0);
    for shape in [
        Shape {
            stride: [2, 1],
            ..one
        },
        Shape { pad: [0, 1], ..one },
        Shape { k: [1, 2], ..one },
        Shape { groups: 2, ..one },
        Shape { cut: [1, 0], ..one },
    ] {
        // Products of groups and images have a constant distance, but not products of weights,
        // which all images share.
        for kind in KINDS
            .into_iter()
            .filter(|kind| shape.groups == 1 || *kind != ConvKind::WeightGrad)
        {
            let case = shape.case(kind, &mut choices);
            let lowered = lower_as(
                &case.spec,
                &case.bounds,
                &case.target,
                &Choice::Library(algorithm(21, 0)),
            )
            .expect("it has a source");
            assert!(
                lowered.library().is_none() && !lowered.functions.is_empty(),
                "{}",
                case.name
            );
        }
    }
}

/// Convolutions of batches of up to 4 images.
fn of_batches(
    shape: &Shape,
    kind: ConvKind,
    batches: &[u32],
    behind: impl Fn(Spec) -> Spec,
) -> Vec<Case> {
    let (mut choices, env) = (Choices::new(14), |n| Env([n, 0, 0, 0, 0, 0, 0, 0]));
    let batch = Size::symbol(Symbol(0));
    let mut spec = behind(shape.contiguous(kind));
    let Body::Conv2d(body) = &mut spec.body else {
        unreachable!()
    };
    body.n = batch;
    if kind != ConvKind::WeightGrad {
        spec.dims[0] = batch;
    }
    let case = |&n: &u32| {
        let mut case = Case::bounded(
            format!("{kind:?} of {n}"),
            spec.clone(),
            env(4),
            env(n),
            &mut choices,
        );
        // As many bytes as at the bound, because regions are planned for it.
        case.args = Case::bounded("", spec.clone(), env(4), env(4), &mut choices).args;
        case.target = target();
        case
    };
    batches.iter().map(case).collect()
}

/// There may be no images: then the gradient of a weight is 0.
#[test]
fn batches_may_be_smaller_than_at_the_bounds() {
    let Some(_driver) = installed() else { return };
    let shape = Shape::simple(4, 6, 8, 4, 1, 0);
    let of = |kind| {
        of_batches(&shape, kind, &[4, 3, 1, 0], |spec| spec)
            .into_iter()
            .map(move |case| (case, kind != ConvKind::WeightGrad))
    };
    let cases: Vec<(Case, bool)> = KINDS.into_iter().flat_map(of).collect();
    check(&cases, &[by(21, 1 << 20), by(23, 1 << 20)], 1e-5);
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
        let choice = tuner(picks_in(&folder))
            .choose(&[(&spec, target())], &Env::default())
            .remove(0);
        assert_eq!(choice, Choice::Library(algorithm(21, 0)), "{kind:?}");
        driver.cost("", 1_000_000);
        driver.cost("gemm_", 10_000);
        let folder = tempfile::tempdir().expect("a folder");
        let choice = tuner(picks_in(&folder))
            .choose(&[(&spec, target())], &Env::default())
            .remove(0);
        assert!(matches!(choice, Choice::Own(_)), "{kind:?}: {choice:?}");
    }
    let lowered = of_library(
        &shape.case(ConvKind::Forward, &mut Choices::new(1)),
        &by(21, 0),
    );
    assert_eq!(lowered.library().as_deref(), Some("cuBLASLt algorithm 21"));
}

const NOT_SUPPORTED: i32 = 3000;
const EXECUTION_FAILED: i32 = 5000;
/// How products are rounded, by cuDNN's numbers.
const TENSOR_CORES: i32 = 1;
const PLAIN: i32 = 3;

/// An algorithm of cuDNN that adds products of f32 without rounding them.
fn dnn(number: i32, workspace: u64) -> Choice {
    Choice::Cudnn(cudnn::Algorithm {
        number,
        math: PLAIN,
        workspace,
    })
}

/// The driver with cuDNN.
fn with_cudnn() -> Option<FakeDriver> {
    let driver = FakeDriver::install()?;
    driver.set("cudnn", 1);
    driver.cost("", 1_000_000);
    Some(driver)
}

/// The target of a device that may round f32 to tf32.
fn rounding() -> Target {
    Target {
        tf32: true,
        ..target()
    }
}

#[test]
fn cudnn_computes_every_kind_with_steps_borders_gaps_and_groups() {
    let Some(driver) = with_cudnn() else { return };
    let one = Shape::simple;
    let shapes = [
        one(2, 3, 4, 6, 3, 1),
        Shape {
            stride: [2, 1],
            ..one(1, 4, 5, 7, 3, 0)
        },
        Shape {
            k: [2, 3],
            pad: [0, 2],
            dilation: [2, 1],
            ..one(2, 3, 2, 5, 1, 0)
        },
        Shape {
            groups: 2,
            stride: [1, 2],
            ..one(2, 4, 6, 6, 3, 1)
        },
        Shape {
            groups: 5,
            ..one(2, 5, 10, 5, 3, 1)
        },
        // The last row and column are left over.
        Shape {
            stride: [2, 2],
            ..one(2, 3, 4, 6, 1, 0)
        },
        Shape {
            hw: [1, 9],
            k: [1, 4],
            ..one(3, 2, 3, 1, 1, 0)
        },
    ];
    let mut specs: Vec<(&str, Spec, bool)> = Vec::new();
    for (shape, kind) in shapes
        .iter()
        .flat_map(|shape| KINDS.map(|kind| (shape, kind)))
    {
        let halved = vec![Inst::Const(Value::F32(0.5)), op(ScalarOp::Mul, 0, 1)];
        specs.push(("plain", shape.contiguous(kind), true));
        specs.push(("scaled", with(shape.contiguous(kind), vec![], halved), true));
        specs.push(("by channels last", channels_last(shape, kind), true));
        specs.push((
            "with more behind",
            with_bias_and_relu(shape.contiguous(kind)),
            false,
        ));
        specs.push((
            "by channels last with more behind",
            with_bias_and_relu(channels_last(shape, kind)),
            false,
        ));
    }
    let mut guarded = on_small_integers(specs[..1].to_vec(), 31).remove(0);
    guarded.0.target = Target {
        guarded: true,
        ..target()
    };
    guarded.1 = false;
    let mut cases = on_small_integers(specs, 30);
    cases.push(guarded);
    let convolved = driver.get("products");
    check(&cases, &[dnn(1, 1 << 16)], 1e-6);
    assert_eq!(driver.get("products") - convolved, cases.len() as i64);
}

#[test]
fn cudnn_takes_strided_images_and_a_channels_last_weight() {
    let Some(_driver) = with_cudnn() else { return };
    let shape = Shape::simple(3, 4, 5, 6, 3, 1);
    let mut specs = Vec::new();
    for kind in KINDS {
        let [_, b, out] = shape.spaces(kind);
        let weight = |space| typed(DType::F32, 0, &lying([0, 2, 3, 1], space));
        // Rows of 8 elements of which 6 are used, with gaps between images.
        let images = |offset| typed(DType::F32, offset, &[400, 64, 8, 1]);
        let operands = match kind {
            ConvKind::WeightGrad => [images(4), images(0), weight(out)],
            ConvKind::Forward | ConvKind::InputGrad => [images(4), weight(b), images(8)],
        };
        specs.push(("gaps", shape.spec(kind, operands), true));
    }
    check(&on_small_integers(specs, 32), &[dnn(1, 1 << 20)], 1e-6);
}

#[test]
fn cudnn_results_of_halves_are_halves() {
    let Some(_driver) = with_cudnn() else { return };
    let of = |dtype, round, kind| {
        let shape = Shape {
            dtype,
            groups: 2,
            stride: [2, 1],
            ..Shape::simple(2, 4, 6, 5, 3, 1)
        };
        let mut spec = with(shape.contiguous(kind), vec![], vec![op(round, 0, 0)]);
        spec.operands[0].dtype = dtype;
        spec
    };
    let mut specs = Vec::new();
    for (dtype, round) in [
        (DType::F16, ScalarOp::RoundF16),
        (DType::BF16, ScalarOp::RoundBf16),
    ] {
        specs.extend(KINDS.map(|kind| ("halves", of(dtype, round, kind), true)));
    }
    let cases = on_small_integers(specs, 33);
    let choice = Choice::Cudnn(cudnn::Algorithm {
        number: 1,
        math: TENSOR_CORES,
        workspace: 1 << 20,
    });
    for ((case, _), got) in cases
        .iter()
        .zip(computed(&cases, std::slice::from_ref(&choice)))
    {
        let dtype = case.spec.operands[0].dtype;
        let rounded = of_wide(case).into_iter().map(|x| match dtype {
            DType::F16 => half::f16::from_f64(x).to_f64(),
            _ => half::bf16::from_f64(x).to_f64(),
        });
        assert_eq!(
            numbers(dtype, &got[2]),
            rounded.collect::<Vec<_>>(),
            "{:?}",
            case.spec
        );
    }
    // Sums that stay in f32, or are used in f32 before they are rounded.
    let mut choices = Choices::new(34);
    let mut wide = of(DType::F16, ScalarOp::RoundF16, ConvKind::Forward);
    wide.operands[0].dtype = DType::F32;
    let mut relu = of(DType::F16, ScalarOp::RoundF16, ConvKind::Forward);
    relu.code.insert(1, op(ScalarOp::Relu, 0, 0));
    relu.code[2] = op(ScalarOp::RoundF16, 1, 0);
    relu.stores[0].value = 2;
    for spec in [wide, relu] {
        let case = Case::new("in f32", spec, &mut choices);
        let lowered =
            lower_as(&case.spec, &case.bounds, &case.target, &choice).expect("it has a source");
        assert!(
            lowered.library().is_none() && !lowered.functions.is_empty(),
            "{:?}",
            case.spec
        );
    }
}

#[test]
fn cudnn_is_not_used_for_unsupported_layouts() {
    let Some(_driver) = with_cudnn() else { return };
    let shape = Shape::simple(2, 4, 4, 6, 3, 1);
    let changed = |change: &dyn Fn(&mut Conv2d)| {
        let mut spec = shape.contiguous(ConvKind::Forward);
        let Body::Conv2d(body) = &mut spec.body else {
            unreachable!()
        };
        change(body);
        spec
    };
    let specs = [
        (
            "a row less than there would be",
            Shape {
                cut: [1, 0],
                ..shape
            }
            .contiguous(ConvKind::Forward),
        ),
        ("two types", changed(&|body| body.a.dtype = DType::F16)),
        (
            "a weight with gaps",
            changed(&|body| body.b = typed(DType::F32, 0, &[40, 9, 3, 1])),
        ),
        (
            "a weight behind others",
            changed(&|body| body.b.offset = Size::fixed(1)),
        ),
        (
            "one image for all",
            changed(&|body| body.a.strides[0] = Size::ZERO),
        ),
    ];
    let mut choices = Choices::new(35);
    for (name, spec) in specs {
        let case = Case::new(name, spec, &mut choices);
        let lowered = lower_as(&case.spec, &case.bounds, &case.target, &dnn(1, 1 << 20))
            .expect("it has a source");
        assert!(
            lowered.library().is_none() && !lowered.functions.is_empty(),
            "{name}"
        );
    }
}

/// A batch of up to 4 images, of which there may be none: then the gradient of a weight is 0.
#[test]
fn cudnn_convolves_smaller_batches_in_the_planned_workspace() {
    let Some(driver) = with_cudnn() else { return };
    let shape = Shape::simple(4, 3, 5, 6, 3, 1);
    let mut cases = Vec::new();
    for relu in [false, true] {
        let behind = |spec| {
            if relu {
                with(spec, vec![], vec![op(ScalarOp::Relu, 0, 0)])
            } else {
                spec
            }
        };
        cases.extend(
            KINDS
                .into_iter()
                .flat_map(|kind| of_batches(&shape, kind, &[4, 3, 0], behind))
                .map(|case| (case, !relu)),
        );
    }
    // It keeps the library's handle, but not the streams of devices that are closed.
    let device = Device::open(0, LIMITS).expect("it is there");
    check(&cases, &[dnn(1, 1 << 20)], 1e-5);
    // If an algorithm refuses the batch of a run, another one is used; if there is none, the run
    // does not begin.
    let forward = &cases[1..2];
    driver.fail("cudnnGetConvolutionForwardWorkspaceSize", 0, NOT_SUPPORTED);
    check(forward, &[dnn(1, 1 << 20)], 1e-5);
    let (lowered, env) = (of_library(&forward[0].0, &dnn(1, 0)), forward[0].0.env);
    driver.fail("cudnnGetConvolutionForwardAlgorithm_v7", 0, NOT_SUPPORTED);
    let refused = device
        .foresee([&lowered].into_iter(), &env)
        .expect_err("it was told to fail")
        .to_string();
    assert!(
        refused.contains("no way to convolve 3 images within 0 bytes"),
        "{refused}"
    );
    // One algorithm needs no workspace.
    assert_eq!(device.foresee([&lowered].into_iter(), &env), Ok(()));
}

#[test]
fn errors_of_cudnn_say_how_to_disable_it() {
    let Some(driver) = with_cudnn() else { return };
    let mut case = Shape::simple(2, 3, 4, 6, 3, 1).case(ConvKind::InputGrad, &mut Choices::new(37));
    case.target = target();
    let lowered = of_library(&case, &dnn(1, 1 << 20));
    let run = || on_device(&[(&case, &lowered)]).remove(0);
    driver.fail("cudnnConvolutionBackwardData", 0, EXECUTION_FAILED);
    let error = run().expect_err("it was told to fail").to_string();
    assert_eq!(
        error,
        "cudnnConvolutionBackwardData answered CUDNN_STATUS_EXECUTION_FAILED; SLABWISE_CUDNN=0 leaves cuDNN out"
    );
    let few = of_library(&case, &dnn(1, 8));
    let error = on_device(&[(&case, &few)])
        .remove(0)
        .expect_err("that is too little")
        .to_string();
    assert!(
        error.contains("SIZE_INSUFFICIENT (too little workspace)"),
        "{error}"
    );
    driver.set("cudnn", 0);
    let error = run().expect_err("there is none now").to_string();
    assert!(
        error.contains(
            "cudnnCreate answered CUDNN_STATUS_NOT_INITIALIZED (there is no such library now)"
        ),
        "{error}"
    );
}

/// In a process whose `SLABWISE_LIBCUDNN` is no cuDNN.
#[test]
#[ignore = "needs a variable: run by the test below"]
fn without_a_usable_library() {
    let found = Library::Cudnn.open().map_err(ToString::to_string);
    let Some(driver) = with_cudnn() else { return };
    driver.cost("cudnn", 1);
    let refused = cudnn::version().expect_err("it is none").to_string();
    assert!(
        refused.starts_with("cuDNN (libcudnn) was not found: "),
        "{refused}"
    );
    match found {
        Ok(_) => assert!(refused.contains("lacks cudnnGetVersion"), "{refused}"),
        Err(missing) => assert!(
            refused == missing && refused.contains("SLABWISE_LIBCUDNN"),
            "{refused}"
        ),
    }
    let folder = tempfile::tempdir().expect("a folder");
    let choice = tuner(picks_in(&folder))
        .choose(
            &[(&timed().contiguous(ConvKind::Forward), target())],
            &Env::default(),
        )
        .remove(0);
    assert!(matches!(choice, Choice::Own(_)), "{choice:?}");
    assert_eq!(kept(&folder), 1, "nothing will be different another time");
    let mut case = timed().case(ConvKind::Forward, &mut Choices::new(38));
    case.target = target();
    let error = on_device(&[(&case, &of_library(&case, &dnn(1, 1 << 16)))])
        .remove(0)
        .expect_err("it cannot be loaded");
    assert_eq!(error.to_string(), refused);
}

#[test]
fn cudnn_is_not_used_if_missing_or_incomplete() {
    if with_cudnn().is_none() {
        return;
    }
    let other = slabwise_cuda::fake::build_cublaslt().expect("it was built before");
    for file in [Path::new("/nowhere/libcudnn.so.9"), &other] {
        let mut child = Command::new(std::env::current_exe().expect("a path"));
        child
            .args([
                "--exact",
                "without_a_usable_library",
                "--ignored",
                "--nocapture",
            ])
            .env("SLABWISE_LIBCUDNN", file);
        let output = child.output().expect("it starts");
        let text = String::from_utf8_lossy(&output.stdout).into_owned()
            + &String::from_utf8_lossy(&output.stderr);
        assert!(
            output.status.success() && text.contains("1 passed"),
            "{}: {text}",
            file.display()
        );
    }
}

/// How many picks a folder keeps.
fn kept(folder: &tempfile::TempDir) -> usize {
    let files = std::fs::read_dir(folder.path().join("cache"))
        .expect("a folder")
        .flatten();
    files
        .filter(|entry| entry.path().extension().is_some_and(|e| e == "pick"))
        .count()
}

/// The choice for a spec, with nothing known from before.
fn chosen(spec: &Spec, target: Target) -> Choice {
    let folder = tempfile::tempdir().expect("a folder");
    tuner(picks_in(&folder))
        .choose(&[(spec, target)], &Env::default())
        .remove(0)
}

fn timed() -> Shape {
    Shape::simple(2, 16, 16, 8, 3, 1)
}

#[test]
fn the_tuner_chooses_cudnn_where_it_is_fastest_and_allowed() {
    let Some(driver) = with_cudnn() else { return };
    let results = [
        ("cudnn_forward", 2 * 16 * 8 * 8),
        ("cudnn_data", 2 * 16 * 8 * 8),
        ("cudnn_filter", 16 * 16 * 9),
    ];
    for (kind, (name, elements)) in KINDS.into_iter().zip(results) {
        let spec = timed().contiguous(kind);
        driver.cost("", 1_000_000);
        // Algorithms that are not deterministic, that use transforms, or that need more memory than
        // allowed are not used, however fast they are.
        [0, 2, 3, 4, 5, 6]
            .iter()
            .for_each(|n| driver.cost(&format!("{name}_{n}"), 1));
        if kind == ConvKind::Forward {
            assert_eq!(chosen(&spec, target()), dnn(0, 0));
            driver.cost("cudnn_forward_0", 1_000_000_000);
        }
        driver.cost(&format!("{name}_1"), 10_000);
        assert_eq!(chosen(&spec, target()), dnn(1, 4 * elements), "{kind:?}");
        let with_tensor_cores = cudnn::Algorithm {
            number: 1,
            math: TENSOR_CORES,
            workspace: 4 * elements,
        };
        assert_eq!(
            chosen(&spec, rounding()),
            Choice::Cudnn(with_tensor_cores),
            "{kind:?}"
        );
        driver.cost(&format!("{name}_1_plain"), 1_000_000_000);
        assert_eq!(
            chosen(&spec, rounding()),
            Choice::Cudnn(with_tensor_cores),
            "{kind:?}"
        );
        assert!(
            matches!(chosen(&spec, target()), Choice::Own(_)),
            "{kind:?}: products of f32 are not rounded"
        );
        let folder = tempfile::tempdir().expect("a folder");
        let without = Tuner {
            cudnn: false,
            ..tuner(picks_in(&folder))
        };
        assert!(
            matches!(
                without.choose(&[(&spec, rounding())], &Env::default())[0],
                Choice::Own(_)
            ),
            "it is switched off"
        );
    }
    // Kernels with one convolution are computed alike, whatever their epilogues.
    driver.cost("", 1_000_000);
    driver.cost("cudnn_forward_0", 10_000);
    driver.cost("gemm_parts", 10_000);
    let (plain, relu) = (
        timed().contiguous(ConvKind::Forward),
        with_bias_and_relu(timed().contiguous(ConvKind::Forward)),
    );
    let folder = tempfile::tempdir().expect("a folder");
    let choices =
        tuner(picks_in(&folder)).choose(&[(&plain, target()), (&relu, target())], &Env::default());
    assert_eq!(choices, [dnn(0, 0), dnn(0, 0)]);
    let lowered =
        lower_as(&relu, &Env::default(), &target(), &choices[1]).expect("it has a source");
    assert_eq!(
        (lowered.library().as_deref(), lowered.workspace),
        (Some("cuDNN algorithm 0"), 4 * 2 * 16 * 8 * 8)
    );
}

#[test]
fn slabwise_kernels_replace_a_failing_or_missing_cudnn() {
    let Some(driver) = with_cudnn() else { return };
    let spec = timed().contiguous(ConvKind::Forward);
    let pick = |folder: &tempfile::TempDir| {
        tuner(picks_in(folder))
            .choose(&[(&spec, target())], &Env::default())
            .remove(0)
    };
    for (call, code, stays) in [
        // Stored for processes in which that fails, too.
        ("cudnnCreate", 4000, true),
        (
            "cudnnGetConvolutionForwardAlgorithm_v7",
            EXECUTION_FAILED,
            false,
        ),
        // It has no algorithm for the convolution, and will have none.
        (
            "cudnnGetConvolutionForwardAlgorithm_v7",
            NOT_SUPPORTED,
            true,
        ),
    ] {
        driver.cost("", 1_000_000);
        driver.cost("cudnn_forward_1", 10_000);
        let folder = tempfile::tempdir().expect("a folder");
        driver.fail(call, 0, code);
        let choice = pick(&folder);
        assert!(matches!(choice, Choice::Own(_)), "{call}: {choice:?}");
        assert_eq!(
            kept(&folder),
            usize::from(stays),
            "{call}: a temporary failure is not stored"
        );
    }
    // The algorithm that fails at its call is left out, another stays.
    let folder = tempfile::tempdir().expect("a folder");
    driver.cost("cudnn_forward_0", 20_000);
    driver.fail("cudnnConvolutionForward", 0, EXECUTION_FAILED);
    assert_eq!(pick(&folder), dnn(0, 0));
    // A stored choice is reused, after one plain and one captured run.
    let ran = driver.get("products");
    assert_eq!(
        (pick(&folder), driver.get("products") - ran),
        (dnn(0, 0), 2)
    );
    // A choice that the library no longer supports is timed again.
    driver.cost("", 1_000_000);
    driver.cost("cudnn_forward_1", 10_000);
    driver.fail("cudnnGetConvolutionForwardWorkspaceSize", 0, NOT_SUPPORTED);
    assert!(matches!(
        pick(&folder),
        Choice::Cudnn(cudnn::Algorithm { number: 1, .. })
    ));
    driver.set("cudnn", 0);
    assert!(matches!(pick(&folder), Choice::Own(_)), "it is gone");
}
