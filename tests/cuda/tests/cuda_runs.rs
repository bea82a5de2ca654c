//! Runs on a GPU where one is required, else on a driver without a device: horizontal fusion of
//! small kernels, data-dependent lengths, reports of indices out of range, and errors for missing
//! libraries.

use ndarray::{Array1, Array2, ArrayD, arr0};
use slabwise::feed::Input;
use slabwise::nn::{Conv2d, Embedding, Linear};
use slabwise::optim::{Adam, Optimizer, Sgd};
use slabwise::prelude::*;
use slabwise::{CompileOptions, Error, Fuse, Scan};
use slabwise_cuda::fake::{FakeDriver, TestDevice};

fn session(device: Device, params: Params) -> Session {
    Session::new(device, params)
        .expect("a session")
        .with_threads(1)
}

/// Numbers computed from their position.
fn numbers(dims: &[usize]) -> ArrayD<f32> {
    let count: usize = dims.iter().product();
    let values = (0..count)
        .map(|i| ((i * 7919 + i / 13) % 97) as f32 / 12.0 - 4.0)
        .collect();
    ArrayD::from_shape_vec(dims, values).expect("as many")
}

/// Some layers, each with a bias, trained by Adam on clipped gradients: all updates depend on the
/// norm of all gradients. With `images` a convolution comes first.
fn clipped(session: &mut Session, params: &Params, images: bool) -> Program<1> {
    let root = params.root();
    let stem = Conv2d::new(&root / "stem", 1, 4, 3);
    let widths = [if images { 64 } else { 36 }, 48, 48, 16, 5];
    let layers: Vec<Linear> = (0..4)
        .map(|i| {
            Linear::new(
                &root / format!("layer{i}").as_str(),
                widths[i],
                widths[i + 1],
            )
        })
        .collect();
    let trace = Trace::training();
    let (x, labels) = (
        trace.input("x", F32, (8, 1, 6, 6)),
        trace.input("labels", I32, (8,)),
    );
    let x = if images { x.apply(&stem).relu() } else { x };
    let hidden = layers[..3]
        .iter()
        .fold(x.reshape((8, widths[0])), |x, layer| x.apply(layer).relu());
    let loss = hidden.apply(&layers[3]).cross_entropy(labels);
    trace.minimize(loss, Adam::new(0.01).clip_norm(1.0));
    session
        .compile(&trace, [loss])
        .unwrap_or_else(|e| panic!("{e}"))
}

/// Launches of a step, the bits of all weights and state after two, and the plan's bytes.
fn trained(driver: &FakeDriver, images: bool, horizontal: bool) -> (i64, Vec<u32>, u64) {
    let params = Params::seeded(4);
    let options = CompileOptions {
        fuse: Fuse {
            horizontal,
            ..Fuse::default()
        },
        ..CompileOptions::default()
    };
    let mut session = session(Device::Cuda(0), params.clone()).with_options(options);
    let program = clipped(&mut session, &params, images);
    let mut launched = 0;
    for step in 0..2 {
        let before = driver.get("launches");
        let labels: Vec<i32> = (0..8).map(|i| (i + step) % 5).collect();
        session
            .run(&program, (&numbers(&[8, 1, 6, 6]), &labels))
            .expect("a step");
        session.synchronize().expect("it is done");
        launched = driver.get("launches") - before;
    }
    assert_eq!(
        session.last_run().peak_slab_bytes,
        program.plan().slab_bytes()
    );
    let values = session
        .names()
        .flat_map(|name| {
            session
                .value(name)
                .expect("it is there")
                .into_iter()
                .map(f32::to_bits)
        })
        .collect();
    (launched, values, program.plan().slab_bytes())
}

#[test]
fn updates_of_many_parameters_share_launches() {
    let Some(driver) = FakeDriver::install() else {
        return;
    };
    for images in [false, true] {
        let (alone, expected, apart) = trained(&driver, images, false);
        let (launches, values, slab) = trained(&driver, images, true);
        let what = format!(
            "images {images}: {launches} launches instead of {alone}, {slab} bytes instead of {apart}"
        );
        println!("{what}");
        assert!(launches + 6 <= alone && slab <= apart, "{what}");
        assert!(values == expected, "{what}: other bits");
    }
}

/// Outputs as numbers with their shapes: floats, integers and booleans.
type Seen = Vec<(Vec<usize>, Vec<f32>)>;

fn seen<const N: usize>(outputs: [slabwise::Output<'_>; N]) -> Result<Seen, Error> {
    let of = |o: slabwise::Output<'_>| {
        let values = match o.dtype() {
            F32 => o.array::<f32>()?.into_iter().collect(),
            I32 => o.array::<i32>()?.into_iter().map(|v| v as f32).collect(),
            _ => o.array::<u8>()?.into_iter().map(f32::from).collect(),
        };
        Ok((o.shape().to_vec(), values))
    };
    outputs.into_iter().map(of).collect()
}

/// Runs of one program with each of these feeds, planned and dynamic.
fn runs<const N: usize>(
    device: Device,
    trace: &Trace,
    outputs: [Tensor<'_>; N],
    feeds: &[Vec<&dyn Input>],
) -> Vec<Seen> {
    let mut session = session(device, Params::seeded(0));
    let program = session
        .compile(trace, outputs)
        .unwrap_or_else(|e| panic!("{e}"));
    let mut all = Vec::new();
    for feed in feeds {
        all.push(
            session
                .run(&program, &feed[..])
                .and_then(seen)
                .unwrap_or_else(|e| panic!("{e}")),
        );
    }
    all.push(
        session
            .run_dynamic(&program, &feeds[0][..])
            .and_then(seen)
            .unwrap_or_else(|e| panic!("{e}")),
    );
    all
}

fn assert_same(got: &[Seen], expected: &[Seen], tolerance: f32) {
    assert_eq!(got.len(), expected.len());
    for (run, (got, expected)) in got.iter().zip(expected).enumerate() {
        for (output, ((shape, values), (wanted, numbers))) in got.iter().zip(expected).enumerate() {
            assert_eq!(shape, wanted, "output {output} of run {run}");
            let near = values.iter().zip(numbers).all(|(a, b)| {
                (a.is_nan() && b.is_nan()) || (a - b).abs() <= tolerance * b.abs().max(1.0)
            });
            assert!(
                near,
                "output {output} of run {run}: {values:?} on the device, {numbers:?} on the CPU"
            );
        }
    }
}

#[test]
fn data_dependent_lengths_equal_those_of_the_cpu() {
    let Some(_device) = TestDevice::find() else {
        return;
    };
    let trace = Trace::inference();
    let x = trace.input("x", F32, (Dim::bounded("rows", 40), 60));
    let mask = x.gt(1.0);
    let outputs = [
        x.nonzero(),
        x.masked_select(mask),
        x.unique(),
        x.sort(true),
        x.argsort(false),
        x.masked_select(mask).exp().sum(),
    ];
    let inputs = [40, 1, 13].map(|rows| numbers(&[rows, 60]));
    // The last length is 0.
    let none = ArrayD::zeros(vec![5, 60]);
    let feeds: Vec<Vec<&dyn Input>> = inputs
        .iter()
        .chain([&none])
        .map(|x| vec![x as &dyn Input])
        .collect();
    let (got, expected) = (
        runs(Device::Cuda(0), &trace, outputs, &feeds),
        runs(Device::Cpu, &trace, outputs, &feeds),
    );
    assert_same(&got, &expected, 1e-5);

    let trace = Trace::inference();
    let (boxes, scores) = (
        trace.input("boxes", F32, (1500, 4)),
        trace.input("scores", F32, (1500,)),
    );
    let corners = Array2::from_shape_fn((1500, 2), |(i, k)| ((i * 37 + k * 11) % 101) as f32);
    let sides = Array2::from_shape_fn((1500, 2), |(i, k)| 1.0 + ((i * 13 + k) % 19) as f32);
    let boxed = ndarray::concatenate(
        ndarray::Axis(1),
        &[corners.view(), (&corners + &sides).view()],
    )
    .expect("two columns each");
    let ranks = Array1::from_shape_fn(1500, |i| ((i * 53) % 211) as f32);
    let feeds: Vec<Vec<&dyn Input>> = vec![vec![&boxed, &ranks]];
    let outputs = [boxes.nms(scores, 0.4)];
    let (got, expected) = (
        runs(Device::Cuda(0), &trace, outputs, &feeds),
        runs(Device::Cpu, &trace, outputs, &feeds),
    );
    assert_same(&got, &expected, 0.0);
    assert!(
        expected[0][0].0[0] > 10 && expected[0][0].0[0] < 1500,
        "{:?}",
        expected[0][0].0
    );
}

#[test]
fn a_masked_loss_trains_as_on_the_cpu() {
    let Some(_device) = TestDevice::find() else {
        return;
    };
    let train = |device: Device| {
        let params = Params::seeded(1);
        let mut session = session(device, params.clone());
        let (hidden, head) = (
            Linear::new(&params.root() / "hidden", 4, 8),
            Linear::new(&params.root() / "head", 8, 1),
        );
        let trace = Trace::training();
        let places = Dim::bounded("places", 60);
        let (x, target) = (
            trace.input("x", F32, (places, 4)),
            trace.input("target", F32, (places,)),
        );
        let is_real = trace.input("is_real", Bool, (places,));
        let score = x.apply(&hidden).tanh().apply(&head).squeeze(1);
        let loss = (score.masked_select(is_real) - target.masked_select(is_real))
            .square()
            .mean();
        trace.minimize(loss, Sgd::new(0.05));
        let program = session
            .compile(&trace, [loss])
            .unwrap_or_else(|e| panic!("{e}"));
        let mut losses = Vec::new();
        for step in 0..6usize {
            let n = 20 + step * 17 % 40;
            let is_real: Vec<u8> = (0..n).map(|i| u8::from((i + step) % 3 == 0)).collect();
            losses.push(
                session
                    .run(&program, (&numbers(&[n, 4]), &numbers(&[n]), &is_real))
                    .expect("a step")[0]
                    .item(),
            );
        }
        let weights: Vec<f32> = session
            .names()
            .flat_map(|name| session.value(name).expect("it is there").into_iter())
            .collect();
        (losses, weights)
    };
    let ((losses, weights), (expected, wanted)) = (train(Device::Cuda(0)), train(Device::Cpu));
    let near = |a: &[f32], b: &[f32]| {
        a.len() == b.len()
            && a.iter()
                .zip(b)
                .all(|(a, b)| (a - b).abs() <= 1e-4 * b.abs().max(1.0))
    };
    assert!(
        near(&losses, &expected),
        "{losses:?} on the device, {expected:?} on the CPU"
    );
    assert!(
        near(&weights, &wanted) && losses[5] < losses[0],
        "{losses:?}"
    );
}

#[test]
fn unbounded_lengths_are_planned_and_loaded_on_demand() {
    let Some(_device) = TestDevice::find() else {
        return;
    };
    let trace = Trace::inference();
    let x = trace.input("x", F32, (Dim::unbounded("len"), 6));
    let seen = x.matmul(x.t()).softmax(1).matmul(x);
    let outputs = [seen, (seen * seen + x.tanh()).mean()];
    let inputs = [3, 40, 1, 17, 40].map(|n| numbers(&[n, 6]) / 4.0);
    let feeds: Vec<Vec<&dyn Input>> = inputs.iter().map(|x| vec![x as &dyn Input]).collect();
    assert_same(
        &runs(Device::Cuda(0), &trace, outputs, &feeds),
        &runs(Device::Cpu, &trace, outputs, &feeds),
        1e-4,
    );
}

#[test]
fn ends_of_dynamic_slices_are_checked() {
    let Some(_device) = TestDevice::find() else {
        return;
    };
    let trace = Trace::inference();
    let x = trace.input("x", F32, (7, 3));
    let (start, length) = (
        trace.input("start", I32, ()),
        trace.input("length", I32, ()),
    );
    let mut session = session(Device::Cuda(0), Params::seeded(0));
    // The ends depend on values that the device computes, so that the host does not know them.
    let line = line!() + 1;
    let outputs = [x.dynamic_slice(0, start * 1, length * 1) * 2.0];
    let program = session.compile(&trace, outputs).expect("compiles");
    let values = numbers(&[7, 3]);
    let mut part = |dynamic: bool, start: i32, length: i32| {
        let feed = (&values, arr0(start), arr0(length));
        let run = if dynamic {
            session.run_dynamic(&program, feed)
        } else {
            session.run(&program, feed)
        };
        run.and_then(seen).map_err(|e| e.to_string())
    };
    for (start, length) in [(0, 7), (2, 3), (5, 0), (5, 2)] {
        let (shape, got) = part(length == 3, start, length).expect("inside").remove(0);
        let (start, length) = (start as usize, length as usize);
        assert_eq!(shape, [length, 3]);
        assert!(
            got.iter()
                .zip(values.iter().skip(3 * start))
                .all(|(a, b)| *a == 2.0 * b)
                && got.len() == 3 * length
        );
    }
    for (start, length, said) in [
        (-1, 2, "index -1 at position 0 is outside 0..8"),
        (3, 5, "index 8 at position 0 is outside 0..8"),
        (0, -1, "a length of -1 is requested; 0 to 7 are possible"),
        (0, 8, "a length of 8 is requested; 0 to 7 are possible"),
    ] {
        for dynamic in [true, false] {
            let error = part(dynamic, start, length).expect_err("outside");
            assert!(
                error.contains(said) && error.contains(&format!("cuda_runs.rs:{line}")),
                "{start}, {length}: {error}"
            );
            part(dynamic, 1, 1).expect("the session stays usable");
        }
    }
}

#[test]
fn errors_of_indices_name_the_tensor_as_on_the_cpu() {
    let Some(_device) = TestDevice::find() else {
        return;
    };
    let said = |device: Device, tokens: &[i32], places: &[i32], resident: bool| {
        let params = Params::seeded(2);
        let (words, rows) = (
            Embedding::new(&params.root() / "words", 9, 4),
            Embedding::new(&params.root() / "rows", 5, 4),
        );
        let mut session = session(device, params.clone());
        let trace = Trace::training();
        let (a, b) = (
            trace.input("tokens", I32, (6,)),
            trace.input("places", I32, (6,)),
        );
        // One source line has both.
        let loss = (a.apply(&words) + b.apply(&rows)).square().mean();
        trace.minimize(loss, Sgd::new(0.5));
        let program = session.compile(&trace, [loss]).expect("compiles");
        let before: Vec<_> = session
            .names()
            .map(|name| session.value(name).expect("it is there"))
            .collect();
        let (tokens, places) = (
            Array1::from_vec(tokens.to_vec()),
            Array1::from_vec(places.to_vec()),
        );
        let error = if resident {
            // The device detects it, and the next read reports it.
            let (tokens, places) = (
                session.upload("tokens", &tokens).expect("room"),
                session.upload("places", &places).expect("room"),
            );
            session
                .run(&program, (&tokens, &places))
                .and_then(|[loss]| loss.array::<f32>().map(|_| ()))
                .expect_err("it is out of range")
        } else {
            session
                .run(&program, (&tokens, &places))
                .map(|_| ())
                .expect_err("it is out of range")
        };
        let after: Vec<_> = session
            .names()
            .map(|name| session.value(name).expect("it is there"))
            .collect();
        assert_eq!(before, after, "{error}");
        let right = Array1::from_vec(vec![0; 6]);
        session
            .run(&program, (&right, &right))
            .expect("the session stays usable");
        assert_ne!(
            after[0],
            session.value("words.weight").expect("it is there"),
            "it learns again"
        );
        error.to_string()
    };
    let (good, bad_tokens, bad_places) =
        ([0, 1, 2, 3, 4, 0], [0, 1, 9, 3, -7, 0], [0, 1, 2, 3, 5, 9]);
    for (tokens, places, part) in [
        (
            bad_tokens,
            good,
            "index 9 at position 2 is outside 0..9, in tokens",
        ),
        (
            good,
            bad_places,
            "index 5 at position 4 is outside 0..5, in places",
        ),
        (bad_tokens, bad_places, "index "),
    ] {
        let expected = said(Device::Cpu, &tokens, &places, false);
        assert!(
            expected.contains(part) && expected.contains("cuda_runs.rs"),
            "{expected}"
        );
        assert_eq!(said(Device::Cuda(0), &tokens, &places, false), expected);
        assert_eq!(said(Device::Cuda(0), &tokens, &places, true), expected);
    }
}

/// On the device halves are multiplied as they are, on the CPU widened first.
#[test]
fn products_of_halves_equal_those_of_the_cpu() {
    let Some(_device) = TestDevice::find() else {
        return;
    };
    for dtype in [F16, BF16] {
        let trace = Trace::inference();
        let (a, b) = (
            trace.input("a", F32, (40, 33)),
            trace.input("b", F32, (33, 24)),
        );
        let (image, weight) = (
            trace.input("image", F32, (2, 5, 9, 8)),
            trace.input("weight", F32, (6, 5, 3, 3)),
        );
        let product = a.cast(dtype).matmul(b.cast(dtype));
        let convolved = image.cast(dtype).conv2d(weight.cast(dtype));
        let [of_a, of_b] = trace.gradients(product.tanh().sum(), [a, b]);
        let [of_image, of_weight] = trace.gradients(convolved.tanh().mean(), [image, weight]);
        let outputs = [product, convolved, of_a, of_b, of_image, of_weight];
        let inputs = [&[40, 33][..], &[33, 24], &[2, 5, 9, 8], &[6, 5, 3, 3]]
            .map(|dims| numbers(dims) / 16.0);
        let feeds: Vec<Vec<&dyn Input>> = vec![inputs.iter().map(|x| x as &dyn Input).collect()];
        assert_same(
            &runs(Device::Cuda(0), &trace, outputs, &feeds),
            &runs(Device::Cpu, &trace, outputs, &feeds),
            1e-2,
        );
    }
}

#[test]
fn scans_equal_those_of_the_cpu() {
    let Some(_device) = TestDevice::find() else {
        return;
    };
    for options in [
        Scan::default(),
        Scan::default().reverse(),
        Scan::default().checkpoint_every(3),
    ] {
        let trace = Trace::inference();
        let x = trace.input("x", F32, (8, 4, 12));
        let h = trace.input("h", F32, (4, 12));
        let w = trace.input("w", F32, (12, 12));
        let ([last], [all]) = trace.scan_with(options, [h], [x], |[h], [x]| {
            let next = (x + h.matmul(w)).tanh();
            ([next], [next * h])
        });
        let loss = (all * all).sum() + last.sum();
        let [of_x, of_h, of_w] = trace.gradients(loss, [x, h, w]);
        let outputs = [last, all, of_x, of_h, of_w];
        let inputs = [&[8, 4, 12][..], &[4, 12], &[12, 12]].map(|dims| numbers(dims) / 16.0);
        let feeds: Vec<Vec<&dyn Input>> = vec![inputs.iter().map(|x| x as &dyn Input).collect()];
        assert_same(
            &runs(Device::Cuda(0), &trace, outputs, &feeds),
            &runs(Device::Cpu, &trace, outputs, &feeds),
            1e-5,
        );
    }
}

#[test]
fn a_scan_of_odd_parts_is_refused_with_the_reason() {
    let Some(_device) = TestDevice::find() else {
        return;
    };
    let trace = Trace::inference();
    let x = trace.input("x", F32, (8, 3));
    let ([last], []) = trace.scan([trace.zeros((3,))], [x], |[c], [x]| ([c + x], []));
    let mut session = session(Device::Cuda(0), Params::seeded(0));
    let error = session.compile(&trace, [last]).err().map(|e| e.to_string());
    let error = error.expect("parts of 12 bytes");
    assert!(error.contains("multiple of 16"), "{error}");
}

#[test]
fn runs_without_elements_equal_those_of_the_cpu() {
    let Some(_device) = TestDevice::find() else {
        return;
    };
    let trace = Trace::inference();
    let x = trace.input("x", F32, (Dim::bounded("rows", 12), 6));
    let picked = trace.input("picked", I32, (Dim::bounded("places", 9),));
    let weight = trace.input("weight", F32, (6, 5));
    let product = x.matmul(weight);
    let outputs = [
        x * 2.0 + 1.0,
        x.sum(),
        product,
        product.softmax(1),
        weight.index_select(0, picked),
        x.t().matmul(x),
        x.sort(true),
        x.gt(0.5).nonzero(),
    ];
    let weights = numbers(&[6, 5]);
    let rows = [12, 0, 1, 0, 0, 7].map(|n| numbers(&[n, 6]));
    let places = [9, 9, 0, 0, 0, 3].map(|n| Array1::from_shape_fn(n, |i| (i % 6) as i32));
    let feeds: Vec<Vec<&dyn Input>> = rows
        .iter()
        .zip(&places)
        .map(|(x, places)| {
            vec![
                x as &dyn Input,
                places as &dyn Input,
                &weights as &dyn Input,
            ]
        })
        .collect();
    assert_same(
        &runs(Device::Cuda(0), &trace, outputs, &feeds),
        &runs(Device::Cpu, &trace, outputs, &feeds),
        1e-5,
    );
}

#[test]
fn variables_of_cuda_sessions_are_checked_on_every_device() {
    for (name, value) in [
        ("SLABWISE_AUTOTUNE", "abc"),
        ("SLABWISE_CUDA_GRAPHS", "x"),
        ("SLABWISE_CUDNN", "2"),
    ] {
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_slabwise-cuda-tests"));
        let output = command
            .args(["plan", "mlp", "--batch", "4", "--device", "cpu"])
            .env(name, value)
            .output()
            .expect("it starts");
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(
            !output.status.success()
                && error.contains(&format!("{name} is {value:?}; it is 0 or 1")),
            "{error}"
        );
    }
}

#[test]
fn a_driver_that_is_too_old_is_an_error_with_a_remedy() {
    let Some(driver) = FakeDriver::install() else {
        return;
    };
    driver.set("version", 12040);
    let error = Device::cuda(0)
        .expect_err("its code would not be taken")
        .to_string();
    for part in [
        "device cuda:0",
        "CUDA 12.4",
        "13.0",
        "driver 580 or newer",
        "nvidia-cuda-nvrtc-cu12",
    ] {
        assert!(error.contains(part), "{part:?} is not in: {error}");
    }
    assert_eq!(Device::auto(), Device::Cpu);
    let refused = Session::new(Device::Cuda(0), Params::seeded(0))
        .map(|_| ())
        .expect_err("the same")
        .to_string();
    assert_eq!(refused, error);
}

/// Replaces NVRTC by a compiler that accepts no source.
const REFUSES: &str = r#"
#include <string.h>
static const char log_text[] = "slabwise.cu(7): error: this compiler takes nothing";
int nvrtcVersion(int* major, int* minor) { *major = 13; *minor = 0; return 0; }
int nvrtcCreateProgram(void** p, const char* s, const char* n, int h, const char* const* t, const char* const* i) { *p = p; return 0; }
int nvrtcCompileProgram(void* p, int n, const char* const* options) { return 6; }
int nvrtcGetProgramLogSize(void* p, size_t* bytes) { *bytes = sizeof log_text; return 0; }
int nvrtcGetProgramLog(void* p, char* to) { memcpy(to, log_text, sizeof log_text); return 0; }
int nvrtcGetCUBINSize(void* p, size_t* bytes) { *bytes = 0; return 0; }
int nvrtcGetCUBIN(void* p, char* to) { return 0; }
int nvrtcGetPTXSize(void* p, size_t* bytes) { *bytes = 0; return 0; }
int nvrtcGetPTX(void* p, char* to) { return 0; }
int nvrtcDestroyProgram(void** p) { return 0; }
const char* nvrtcGetErrorString(int status) { return "NVRTC_ERROR"; }
int nvrtcGetNumSupportedArchs(int* count) { *count = 1; return 0; }
int nvrtcGetSupportedArchs(int* to) { *to = 90; return 0; }
"#;

#[test]
fn missing_libraries_are_errors_with_a_remedy() {
    let Some(_driver) = FakeDriver::install() else {
        return;
    };
    let (driver, functions) = slabwise_cuda::fake::build().expect("it was built before");
    let folder = tempfile::tempdir().expect("a folder");
    let (source, compiler) = (
        folder.path().join("refuses.c"),
        folder.path().join("librefuses.so"),
    );
    std::fs::write(&source, REFUSES).expect("it is written");
    let mut gcc = std::process::Command::new("gcc");
    gcc.args(["-shared", "-fPIC", "-w", "-Wl,-soname,libnvrtc.so"])
        .arg(&source)
        .arg("-o")
        .arg(&compiler);
    assert!(gcc.status().expect("it starts").success());
    let nowhere = folder.path().join("nothing.so");
    let said = |driver: &std::path::Path, compiler: Option<&std::path::Path>| {
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_slabwise-cuda-tests"));
        command.args([
            "bench", "mlp", "--batch", "4", "--steps", "1", "--device", "cuda:0",
        ]);
        command
            .env("SLABWISE_LIBCUDA", driver)
            .env("SLABWISE_EMULATED", &functions)
            .env("TMPDIR", folder.path());
        command
            .env("SLABWISE_CACHE_DIR", folder.path().join("cubins"))
            .env("SLABWISE_PREALLOCATE", "0");
        if let Some(compiler) = compiler {
            command.env("SLABWISE_LIBNVRTC", compiler);
        }
        let output = command.output().expect("it starts");
        assert!(!output.status.success());
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    let cases = [
        (
            &nowhere,
            None,
            &[
                "device cuda:0",
                "SLABWISE_LIBCUDA is",
                "nothing.so",
                "install NVIDIA's driver",
            ][..],
        ),
        (
            &driver,
            Some(&*nowhere),
            &[
                "device cuda:0",
                "SLABWISE_LIBNVRTC is",
                "nothing.so",
                "pip install nvidia-cuda-nvrtc",
            ],
        ),
        (
            &driver,
            Some(&*compiler),
            &[
                "device cuda:0",
                "refused the generated kernel ",
                " for sm_90",
                "slabwise-refused-",
                "slabwise.cu(7): error",
            ],
        ),
    ];
    for (driver, compiler, parts) in cases {
        let error = said(driver, compiler);
        for part in parts {
            assert!(error.contains(part), "{part:?} is not in: {error}");
        }
    }
    let kept = std::fs::read_dir(folder.path())
        .expect("a folder")
        .flatten()
        .map(|e| e.path())
        .find(|p| p.extension().is_some_and(|e| e == "cu"));
    let text = std::fs::read_to_string(kept.expect("the source was saved")).expect("it is text");
    assert!(
        text.starts_with("    1  ") && text.contains("__global__"),
        "numbered lines"
    );
}

/// Calls go to the driver that was found, never to another that has its name, as a toolkit's
/// `stubs/libcuda.so` on the loader's path does.
#[test]
fn another_driver_of_the_same_name_is_refused() {
    if FakeDriver::install().is_none() {
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let source = folder.path().join("stub.c");
    // CUDA_ERROR_STUB_LIBRARY
    let stub = "int cuInit(unsigned flags) { return 34; }
        int cuDriverGetVersion(int* version) { return 34; }
        int cuGetErrorName(int code, const char** text) { *text = \"STUB\"; return 0; }
        int cuGetErrorString(int code, const char** text) { *text = \"a stub\"; return 0; }";
    std::fs::write(&source, stub).expect("it is written");
    let stubs = folder.path().join("stubs");
    std::fs::create_dir(&stubs).expect("a folder");
    let build = |file: &std::path::Path, soname: &str| {
        let mut gcc = std::process::Command::new("gcc");
        gcc.args(["-shared", "-fPIC", &format!("-Wl,-soname,{soname}")]);
        gcc.arg(&source).arg("-o").arg(file);
        assert!(gcc.status().expect("it starts").success());
    };
    let (driver, unnamed) = (
        folder.path().join("libcuda.so.1"),
        folder.path().join("libother.so"),
    );
    build(&driver, "libcuda.so.1");
    build(&unnamed, "libother.so");
    build(&stubs.join("libcuda.so"), "libcuda.so.1");
    let (empty, nothing) = (
        folder.path().join("libempty.so"),
        folder.path().join("nothing.c"),
    );
    std::fs::write(&nothing, "").expect("it is written");
    let mut gcc = std::process::Command::new("gcc");
    gcc.args(["-shared", "-fPIC"])
        .arg(&nothing)
        .arg("-o")
        .arg(&empty);
    assert!(gcc.status().expect("it starts").success());
    let said = |driver: &std::path::Path, path: &std::path::Path| {
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_slabwise-cuda-tests"));
        command.args(["bench", "mlp", "--batch", "4", "--device", "cuda:0"]);
        command.env("SLABWISE_LIBCUDA", driver);
        command.env("LD_LIBRARY_PATH", path);
        let output = command.output().expect("it starts");
        assert!(!output.status.success());
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    let none = folder.path().join("nothing");
    for (driver, path, why) in [
        (&driver, &stubs, "finds another library than"),
        (&unnamed, &none, "does not find it by its name"),
        (&empty, &none, "lacks a call"),
        // This is the driver, which does not start.
        (&driver, &none, "cuInit failed: STUB (a stub)"),
    ] {
        let error = said(driver, path);
        assert!(error.contains(why), "{why:?} is not in: {error}");
    }
}
