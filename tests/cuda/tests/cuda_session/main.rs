//! Sessions on a CUDA device, on a driver without one: the same losses as on the CPU, every byte
//! accounted for, nothing allocated by a step, and errors with a remedy.

#[path = "../../../support/close.rs"]
mod close;
mod imported;
mod reports;

use ndarray::{ArrayD, arr1};
use slabwise::memory::MemoryConfig;
use slabwise::nn::Linear;
use slabwise::optim::{Adam, Sgd};
use slabwise::prelude::*;
use slabwise::{CompileOptions, Error, Precision, RunStats, Tuning};
use slabwise_cuda::fake::FakeDriver;
use slabwise_models::{Model, OptimizerKind};

use close::assert_close;

const OUT_OF_MEMORY: i32 = 2;
const ILLEGAL_ADDRESS: i32 = 700;

/// A session that times no products; `cuda_tune` tests timing.
fn session(device: Device, params: Params) -> Session {
    let untuned = CompileOptions {
        tuning: Tuning::Off,
        ..CompileOptions::default()
    };
    Session::new(device, params)
        .expect("a session")
        .with_threads(1)
        .with_options(untuned)
}

/// Losses of some steps of a model, statistics of its last run, and bytes of its slab.
fn losses(
    device: Device,
    model: Model,
    optimizer: OptimizerKind,
    batches: &[usize],
) -> (Vec<f32>, RunStats, u64) {
    let params = Params::seeded(1);
    let network = model.build(&params);
    let mut session = session(device, params);
    let train = network
        .training(&mut session, Dim::bounded("batch", 8), optimizer)
        .expect("it compiles");
    let mut losses = Vec::new();
    for (step, &batch) in batches.iter().enumerate() {
        let (images, labels) = model.batch(batch, step as u64);
        losses.push(session.run(&train, (&images, &labels)).expect("a step")[0].item());
    }
    (losses, session.last_run(), session.slab_bytes())
}

#[test]
fn a_perceptron_trains_as_on_the_cpu() {
    let Some(driver) = FakeDriver::install() else {
        return;
    };
    // Sizes change and recur: a graph is recorded for those that recur.
    let batches = [8, 8, 3, 8, 3, 8, 5, 7];
    let (expected, ..) = losses(Device::Cpu, Model::Mlp, OptimizerKind::Adam, &batches);
    let recorded = driver.get("captures");
    let (got, run, slab) = losses(Device::Cuda(0), Model::Mlp, OptimizerKind::Adam, &batches);
    assert_close(&got, &expected);
    assert_eq!(driver.get("captures") - recorded, 2);
    assert_eq!(
        run.peak_slab_bytes, slab,
        "kernels receive the planned peak"
    );
}

#[test]
fn mixed_precision_trains_as_on_the_cpu() {
    let Some(_driver) = FakeDriver::install() else {
        return;
    };
    let models = [
        ("mlp:inputs=64,hidden1=48,hidden2=32", 8),
        ("cnn:size=8,width=8,hidden=32", 4),
    ];
    // Masters in f32 and weights of halves; the loss is scaled in f16.
    let types = [
        (Precision::Bf16, F32),
        (Precision::F16, F32),
        (Precision::Bf16, BF16),
        (Precision::F32, F16),
    ];
    for ((model, batch), (precision, stored)) in models.iter().flat_map(|m| types.map(|t| (m, t))) {
        let model = Model::parse(model).expect("a model");
        let train = |device: Device| {
            let params = Params::seeded(1).stored_in(stored);
            let network = model.build(&params).with_precision(precision);
            let mut session = session(device, params);
            let program = network
                .training(&mut session, *batch, OptimizerKind::Sgd)
                .expect("it compiles");
            let losses = (0..3).map(|step| {
                let (images, labels) = model.batch(*batch, step);
                session.run(&program, (&images, &labels)).expect("a step")[0].item()
            });
            let losses: Vec<f32> = losses.collect();
            (
                losses,
                program
                    .resources()
                    .into_iter()
                    .flatten()
                    .map(|used| used.function)
                    .collect::<Vec<String>>(),
            )
        };
        let (expected, _) = train(Device::Cpu);
        let (got, functions) = train(Device::Cuda(0));
        // Sums that differ in their last bit may round to different halves.
        for (step, (a, b)) in got.iter().zip(&expected).enumerate() {
            assert!(
                (a - b).abs() <= 1e-3 * b.abs(),
                "{model}, {precision}, {stored}, step {step}: {a} on the device, {b} on the CPU"
            );
        }
        let products: Vec<&String> = functions
            .iter()
            .filter(|name| name.starts_with("gemm_") && !name.starts_with("gemm_parts"))
            .collect();
        let is_of_halves = |name: &String| match precision {
            Precision::F32 => name.contains("f16"),
            half => name.starts_with(&format!("gemm_{half}_")),
        };
        let expected = precision != Precision::F32;
        assert!(
            !products.is_empty() && products.iter().all(|name| is_of_halves(name) == expected),
            "{model}, {precision}, {stored}: {functions:?}"
        );
    }
}

#[test]
fn lengths_that_never_recur_are_not_recorded() {
    let Some(driver) = FakeDriver::install() else {
        return;
    };
    let trace = Trace::inference();
    let x = trace.input("x", F32, (Dim::bounded("rows", 40), 3));
    let mut session = session(Device::Cuda(0), Params::seeded(0));
    let program = session.compile(&trace, [x * 2.0]).expect("it compiles");
    let mut run = |rows: usize| {
        let [y] = session
            .run(&program, (&ArrayD::<f32>::ones(vec![rows, 3]),))
            .expect("a run");
        assert!(
            y.shape() == [rows, 3] && y.view::<f32>().expect("f32").iter().all(|y| *y == 2.0),
            "{rows} rows"
        );
    };
    let counts = || (driver.get("captures"), driver.get("replays"));
    let (captures, replays) = counts();
    // More lengths than are remembered, in turns: only the first, of no rows, is known from then
    // on.
    (0..3).for_each(|_| (0..12).for_each(&mut run));
    assert_eq!(counts(), (captures + 1, replays + 3));
    (0..4).for_each(|_| run(40));
    assert_eq!(counts(), (captures + 2, replays + 6));
}

/// Launching the kernels of a run one by one needs no memory, a graph does.
#[test]
fn runs_without_memory_for_their_graphs_are_launched() {
    let Some(driver) = FakeDriver::install() else {
        return;
    };
    let batches = [8, 8, 3, 3, 8, 3, 8, 8];
    let (expected, ..) = losses(Device::Cpu, Model::Mlp, OptimizerKind::Adam, &batches);
    // The calls for graphs: the first fails alone, or there is room for so many graphs.
    for (fails, room, captures, replays) in [(true, 9, 3, 7), (false, 1, 5, 6), (false, 0, 4, 0)] {
        driver.set("graph_room", room);
        if fails {
            driver.fail("cuGraphInstantiateWithFlags", 0, OUT_OF_MEMORY);
        }
        let counts = || (driver.get("captures"), driver.get("replays"));
        let before = counts();
        let (got, ..) = losses(Device::Cuda(0), Model::Mlp, OptimizerKind::Adam, &batches);
        assert_close(&got, &expected);
        let after = counts();
        let made = (after.0 - before.0, after.1 - before.1);
        assert_eq!(made, (captures, replays), "room for {room} graphs");
    }
    assert_eq!(driver.get("live_graphs"), 0);
}

#[test]
fn a_convolution_network_trains_as_on_the_cpu() {
    let Some(_driver) = FakeDriver::install() else {
        return;
    };
    let batches = [4, 4, 2];
    let (expected, ..) = losses(Device::Cpu, Model::Cnn, OptimizerKind::Adam, &batches);
    let (got, run, slab) = losses(Device::Cuda(0), Model::Cnn, OptimizerKind::Adam, &batches);
    assert_close(&got, &expected);
    assert_eq!(run.peak_slab_bytes, slab);
}

/// Products of halves: on the device as they are, on the CPU widened first. Gradients are products
/// of halves as well.
#[test]
fn products_of_halves_train_as_on_the_cpu() {
    let Some(_driver) = FakeDriver::install() else {
        return;
    };
    for dtype in [F16, BF16] {
        let train = |device: Device| {
            let params = Params::seeded(3);
            let first = params.root().param(
                "first",
                (32, 48),
                Init::Normal {
                    mean: 0.0,
                    std: 0.2,
                },
            );
            let second = params.root().param(
                "second",
                (48, 16),
                Init::Normal {
                    mean: 0.0,
                    std: 0.2,
                },
            );
            let mut session = session(device, params);
            let trace = Trace::training();
            let (x, labels) = (
                trace.input("x", F32, (16, 32)),
                trace.input("labels", I32, (16,)),
            );
            let hidden = x.cast(dtype).matmul(trace.param(&first).cast(dtype)).relu();
            let loss = hidden
                .cast(dtype)
                .matmul(trace.param(&second).cast(dtype))
                .cross_entropy(labels);
            trace.minimize(loss, Sgd::new(0.1));
            let program = session.compile(&trace, [loss]).expect("it compiles");
            let x = ArrayD::from_shape_fn(vec![16, 32], |at| {
                ((at[0] * 31 + at[1] * 17) as f32 * 0.618).sin()
            });
            let labels: Vec<i32> = (0..16).collect();
            let losses =
                [0; 4].map(|_| session.run(&program, (&x, &labels)).expect("a step")[0].item());
            (
                losses,
                program.plan().slab_bytes(),
                program.plan().to_string(),
            )
        };
        let ((expected, wide, _), (got, narrow, plan)) =
            (train(Device::Cpu), train(Device::Cuda(0)));
        for (step, (a, b)) in got.iter().zip(expected).enumerate() {
            assert!(
                (a - b).abs() <= 1e-2 * b.abs(),
                "{dtype}, step {step}: {a} on the device, {b} on the CPU"
            );
        }
        assert!(got[3] < got[0], "{dtype}: {got:?}");
        assert!(
            narrow < wide,
            "{dtype}: operands are halves on the device: {narrow} bytes, {wide} on the CPU\n{plan}"
        );
    }
}

/// A training program of one layer `[4 → 3]`, small enough to be compiled in every test.
fn classifier(session: &mut Session, params: &Params) -> (Program<1>, u32) {
    let layer = Linear::new(&params.root() / "head", 4, 3);
    let trace = Trace::training();
    let batch = Dim::bounded("batch", 8);
    let (x, labels) = (
        trace.input("x", F32, (batch, 4)),
        trace.input("labels", I32, (batch,)),
    );
    let (loss, line) = (x.apply(&layer).cross_entropy(labels), line!());
    trace.minimize(loss, Adam::new(0.1));
    (session.compile(&trace, [loss]).expect("it compiles"), line)
}

fn examples(n: usize) -> (ArrayD<f32>, Vec<i32>) {
    let x = (0..4 * n).map(|i| (i % 7) as f32 * 0.25 - 0.5).collect();
    (
        ArrayD::from_shape_vec(vec![n, 4], x).expect("as many"),
        (0..n).map(|i| (i % 3) as i32).collect(),
    )
}

fn values(session: &Session) -> Vec<ArrayD<f32>> {
    session
        .names()
        .map(|name| session.value(name).expect("it is there"))
        .collect()
}

#[test]
fn every_byte_is_accounted_for_and_a_step_allocates_nothing() {
    let Some(driver) = FakeDriver::install() else {
        return;
    };
    driver.set("maps_pages", 0);
    let before = driver.get("live_bytes");
    let params = Params::seeded(1);
    let network = Model::Mlp.build(&params);
    let config = MemoryConfig {
        preallocate: Some(false),
        ..MemoryConfig::default()
    };
    let mut session = session(Device::Cuda(0), params)
        .with_memory(&config)
        .expect("it makes sense");
    assert_eq!(
        driver.get("live_bytes"),
        before,
        "a session alone takes nothing"
    );
    let train = network
        .training(&mut session, 8u32, OptimizerKind::Sgd)
        .expect("it compiles");
    let (images, labels) = Model::Mlp.batch(8, 0);
    let mut last = 0.0;
    for step in 0..6 {
        let made = driver.get("allocations");
        // Several steps are pending before a result is read.
        let [loss] = session.run(&train, (&images, &labels)).expect("a step");
        if step > 1 {
            assert_eq!(driver.get("allocations"), made, "step {step}");
        }
        if step % 3 == 2 {
            last = loss.item();
        }
    }
    assert!(last.is_finite() && last > 0.0);
    drop(train);
    let planned = session.persistent_bytes().next_multiple_of(256)
        + session.slab_bytes().next_multiple_of(256);
    // Beside the planned bytes: the sizes of a run and the record of faults.
    assert_eq!(driver.get("live_bytes") - before, planned as i64 + 2 * 256);
    drop(session);
    assert_eq!(driver.get("live_bytes"), before);
}

#[test]
fn preallocation_takes_the_fraction_at_the_first_use() {
    let Some(driver) = FakeDriver::install() else {
        return;
    };
    let before = driver.get("live_bytes");
    let params = Params::seeded(1);
    let mut session = session(Device::Cuda(0), params.clone());
    classifier(&mut session, &params);
    assert_eq!(
        driver.get("live_bytes") - before,
        driver.get("total") / 4 * 3
    );
}

#[test]
fn labels_out_of_range_fail_the_run_and_change_no_weight() {
    let Some(_driver) = FakeDriver::install() else {
        return;
    };
    let params = Params::seeded(1);
    let mut session = session(Device::Cuda(0), params.clone());
    let (train, line) = classifier(&mut session, &params);
    let (x, labels) = examples(8);
    session.run(&train, (&x, &labels)).expect("a step");
    let kept = values(&session);
    let mut wrong = labels.clone();
    wrong[5] = 3;
    // From the host: the run itself fails.
    let error = session
        .run(&train, (&x, &wrong))
        .map(|_| ())
        .expect_err("3 is no class")
        .to_string();
    for part in [
        &format!("{}:{line}", file!()),
        "index 3 at position 5 is outside 0..3",
        "no weight was changed",
    ] {
        assert!(error.contains(part), "{part:?} is not in: {error}");
    }
    assert_eq!(values(&session), kept);
    // From the device: the next read reports the error, and runs in between do nothing.
    let resident = session
        .upload("labels", &arr1(&wrong))
        .expect("there is room");
    let [loss] = session
        .run(&train, (&x, &resident))
        .expect("the error is pending");
    let error = loss
        .array::<f32>()
        .expect_err("the read reports the error")
        .to_string();
    assert!(
        error.contains("index 3 at position 5 is outside 0..3")
            && error.contains(&format!("{}:{line}", file!())),
        "{error}"
    );
    assert_eq!(values(&session), kept);
    session
        .run(&train, (&x, &resident))
        .expect("the error is pending");
    let [loss] = session
        .run(&train, (&x, &labels))
        .expect("the error is pending");
    assert!(loss.item().is_nan(), "a number cannot say why");
    let told = session
        .run(&train, (&x, &labels))
        .map(|_| ())
        .expect_err("the next run does");
    assert!(matches!(told, Error::Data { .. }), "{told}");
    session
        .run(&train, (&x, &labels))
        .expect("it is forgotten then");
    assert_ne!(values(&session), kept);
}

#[test]
fn allocations_that_do_not_fit_are_reported() {
    let Some(driver) = FakeDriver::install() else {
        return;
    };
    driver.set("total", 1 << 20);
    let params = Params::seeded(1);
    let network = Model::Mlp.build(&params);
    let mut session = session(Device::Cuda(0), params);
    let error = network
        .training(&mut session, 8u32, OptimizerKind::Adam)
        .map(|_| ())
        .expect_err("it is too large");
    assert!(matches!(error, Error::OutOfMemory { .. }), "{error}");
    for part in [
        "weights and state needs",
        "on cuda:0: of its 1.0 MiB",
        "SLABWISE_MEM_FRACTION",
    ] {
        assert!(
            error.to_string().contains(part),
            "{part:?} is not in: {error}"
        );
    }
    drop(session);
    // The driver refuses although the limit does not.
    driver.set("total", 64 << 20);
    driver.set("maps_pages", 0);
    driver.fail("cuMemAlloc_v2", 0, OUT_OF_MEMORY);
    let params = Params::seeded(1);
    let network = Model::Mlp.build(&params);
    let config = MemoryConfig {
        preallocate: Some(false),
        ..MemoryConfig::default()
    };
    let mut session = self::session(Device::Cuda(0), params)
        .with_memory(&config)
        .expect("it makes sense");
    let error = network
        .training(&mut session, 8u32, OptimizerKind::Adam)
        .map(|_| ())
        .expect_err("it was told to fail");
    assert!(matches!(error, Error::OutOfMemory { .. }), "{error}");
    network
        .training(&mut session, 8u32, OptimizerKind::Adam)
        .expect("the session is usable");
}

#[test]
fn a_lost_device_is_an_error_with_a_remedy() {
    let Some(driver) = FakeDriver::install() else {
        return;
    };
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("last.safetensors");
    let params = Params::seeded(1);
    let mut session = session(Device::Cuda(0), params.clone());
    let (train, _) = classifier(&mut session, &params);
    let (x, labels) = examples(8);
    session.run(&train, (&x, &labels)).expect("a step");
    session.save(&file).expect("it is saved");
    let kept = values(&session);
    driver.fail("cuGraphLaunch", 0, ILLEGAL_ADDRESS);
    for _ in 0..2 {
        let error = session
            .run(&train, (&x, &labels))
            .map(|_| ())
            .expect_err("the device is lost")
            .to_string();
        for part in [
            "cuda:0 is lost",
            "CUDA_ERROR_ILLEGAL_ADDRESS",
            "start a new process",
            "Session::load",
            "last.safetensors",
        ] {
            assert!(error.contains(part), "{part:?} is not in: {error}");
        }
    }
    assert!(session.value("head.weight").is_err());
    drop((session, train));
    let error = Session::new(Device::Cuda(0), Params::seeded(2))
        .map(|_| ())
        .expect_err("it is lost to the process")
        .to_string();
    for part in [
        "device cuda:0: the device is lost: cuGraphLaunch answered",
        "CUDA_ERROR_ILLEGAL_ADDRESS",
        "start a new process",
    ] {
        assert!(error.contains(part), "{part:?} is not in: {error}");
    }
    driver.restart();
    let params = Params::seeded(2);
    let mut session = self::session(Device::Cuda(0), params.clone());
    let (train, _) = classifier(&mut session, &params);
    session.load(&file).expect("as the message says");
    assert_eq!(values(&session), kept);
    session.run(&train, (&x, &labels)).expect("it goes on");
}

#[test]
fn buffers_values_and_the_dynamic_mode_work_as_on_the_cpu() {
    let Some(_driver) = FakeDriver::install() else {
        return;
    };
    let run = |device: Device| {
        let params = Params::seeded(3);
        let mut session = session(device, params.clone());
        let layer = Linear::new(&params.root() / "head", 4, 3);
        let trace = Trace::training();
        let x = trace.input("x", F32, (8, 4));
        let y = x.apply(&layer).relu();
        let loss = y.mean();
        trace.minimize(loss, Sgd::new(0.5));
        let program = session.compile(&trace, [loss, y]).expect("it compiles");
        let (x, _) = examples(8);
        let resident = session.upload("x", &x).expect("there is room");
        assert_eq!(session.download::<f32>(&resident).expect("it is read"), x);
        session
            .set_value("head.bias", &arr1(&[0.25, 0.5, 0.75]))
            .expect("three numbers");
        let mut seen = Vec::new();
        for dynamic in [false, true, false] {
            let outputs = if dynamic {
                session.run_dynamic(&program, (&resident,))
            } else {
                session.run(&program, (&resident,))
            };
            let [loss, y] = outputs.expect("a run");
            seen.push(loss.item());
            seen.extend(y.view::<f32>().expect("f32"));
            assert_eq!(y.bytes().expect("it is read").len(), 8 * 3 * 4);
        }
        seen.extend(session.value("head.bias").expect("it is there"));
        let profile = session.profile(&program, (&resident,), 1).expect("a run");
        assert_eq!(profile.kernels.len(), program.plan().kernels());
        session.free(resident).expect("it was there");
        seen
    };
    assert_close(&run(Device::Cuda(0)), &run(Device::Cpu));
}

#[test]
fn constants_copies_kept_outputs_and_finite_losses_work_as_on_the_cpu() {
    let Some(_driver) = FakeDriver::install() else {
        return;
    };
    let run = |device: Device| {
        let params = Params::seeded(3);
        let mut session = session(device, params.clone());
        let [online, _target] =
            ["online", "target"].map(|name| Linear::new(&params.root() / name, 4, 3));
        let trace = Trace::training();
        let x = trace.input("x", F32, (8, 4));
        let y = (x * trace.constant(&[1.0f32, 2.0, 0.5, 4.0])).apply(&online);
        let loss = y.square().mean().require_finite();
        trace.minimize(loss, Sgd::new(0.5));
        let program = session.compile(&trace, [loss, y]).expect("it compiles");
        let trace = Trace::inference().named("sum");
        let sum = session
            .compile(&trace, [trace.input("y", F32, (8, 3)).sum()])
            .expect("it compiles");
        let (x, _) = examples(8);
        let mut seen = Vec::new();
        for _ in 0..2 {
            let [loss, y] = session.run_resident(&program, &x).expect("a run");
            seen.push(session.run(&sum, &y).expect("a run")[0].item());
            seen.extend(session.download::<f32>(&loss).expect("it is there"));
            session.free(y).expect("it is there");
        }
        let before = values(&session);
        let error = session
            .run(&program, &(x * f32::NAN))
            .and_then(|[loss, _]| loss.bytes().map(|_| ()))
            .expect_err("NaN")
            .to_string();
        assert!(error.contains("require_finite: the element at position 0 is NaN (in \"online\"); no weight was changed"), "{error}");
        assert_eq!(values(&session), before);
        assert_eq!(
            session
                .copy_values("online", "target")
                .expect("they are alike"),
            2
        );
        assert_eq!(
            session.value("online.weight").expect("it is there"),
            session.value("target.weight").expect("it is there")
        );
        seen.extend(session.value("target.weight").expect("it is there"));
        seen
    };
    assert_close(&run(Device::Cuda(0)), &run(Device::Cpu));
}

#[test]
fn errors_of_missing_devices_name_the_reason() {
    let Some(driver) = FakeDriver::install() else {
        return;
    };
    assert_eq!(Device::auto(), Device::Cuda(0));
    assert_eq!(Device::cuda(0).expect("it is there"), Device::Cuda(0));
    let error = Device::cuda(3).expect_err("there is one").to_string();
    assert_eq!(error, "device cuda:3: there is one CUDA device, cuda:0");
    driver.set("devices", 0);
    assert_eq!(Device::auto(), Device::Cpu);
    let error = Session::new(Device::Cuda(0), Params::seeded(0))
        .map(|_| ())
        .expect_err("there is none")
        .to_string();
    assert_eq!(error, "device cuda:0: there is no CUDA device");
}
