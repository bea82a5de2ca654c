//! Sessions on a CUDA device that time products and take the fastest kernel, on a driver without a
//! device. Its events count the times that a test assigns to kernels.

#[path = "../../support/close.rs"]
mod close;

use ndarray::{Array2, Array4, ArrayD};
use slabwise::memory::MemoryConfig;
use slabwise::optim::Sgd;
use slabwise::prelude::*;
use slabwise::{CompileOptions, Error, Tuning};
use slabwise_cuda::fake::FakeDriver;

use close::assert_close;

/// Inputs, hidden units and classes.
const SIZES: [usize; 3] = [40, 48, 32];
const BATCH: usize = 24;

/// Small products are timed as well.
fn all() -> CompileOptions {
    CompileOptions {
        tuning: Tuning::All,
        ..CompileOptions::default()
    }
}

/// A session that takes memory on demand.
fn session() -> Session {
    let config = MemoryConfig {
        preallocate: Some(false),
        ..MemoryConfig::default()
    };
    let session = Session::new(Device::Cuda(0), Params::seeded(0))
        .and_then(|s| s.with_memory(&config))
        .expect("a session");
    session.with_options(all())
}

/// The driver with a library whose products take so many nanoseconds.
fn installed(library: i64) -> Option<FakeDriver> {
    let driver = FakeDriver::install()?;
    driver.set("library", 1);
    driver.cost("", 1_000_000);
    driver.cost("cublaslt", library);
    Some(driver)
}

/// Results of some steps of training.
struct Trained {
    losses: Vec<f32>,
    weights: Vec<ArrayD<f32>>,
    libraries: Vec<Option<String>>,
    functions: Vec<Vec<String>>,
}

impl Trained {
    fn of(session: &Session, program: &Program<1>, losses: Vec<f32>) -> Result<Trained> {
        let weights = session
            .names()
            .map(|name| session.value(name))
            .collect::<Result<_>>()?;
        let functions = program
            .resources()
            .iter()
            .map(|step| step.iter().map(|used| used.function.clone()).collect())
            .collect();
        Ok(Trained {
            losses,
            weights,
            libraries: program.libraries(),
            functions,
        })
    }
}

/// A perceptron with a batch of up to 24, trained by some steps.
fn train(device: Device, batches: &[usize], options: CompileOptions) -> Result<Trained> {
    let params = Params::seeded(5);
    let [inputs, hidden, classes] = SIZES;
    let normal = Init::Normal {
        mean: 0.0,
        std: 0.1,
    };
    let first = params
        .root()
        .param("first", (inputs as u32, hidden as u32), normal);
    let bias = params.root().param("bias", (hidden as u32,), normal);
    let second = params
        .root()
        .param("second", (hidden as u32, classes as u32), normal);
    let config = MemoryConfig {
        preallocate: Some(false),
        ..MemoryConfig::default()
    };
    let mut session = Session::new(device, params)?
        .with_threads(1)
        .with_options(options)
        .with_memory(&config)?;
    let trace = Trace::training();
    let batch = Dim::bounded("batch", BATCH as u32);
    let (x, labels) = (
        trace.input("x", F32, (batch, inputs as u32)),
        trace.input("labels", I32, (batch,)),
    );
    let hidden = (x.matmul(trace.param(&first)) + trace.param(&bias)).relu();
    let loss = hidden.matmul(trace.param(&second)).cross_entropy(labels);
    trace.minimize(loss, Sgd::new(0.1));
    let program = session.compile(&trace, [loss])?;
    let mut losses = Vec::new();
    for (step, &batch) in batches.iter().enumerate() {
        let x = Array2::from_shape_fn((batch, inputs), |(i, j)| {
            ((i * 31 + j * 17 + step) as f32 * 0.618).sin()
        });
        let labels: Vec<i32> = (0..batch as i32).collect();
        losses.push(session.run(&program, (&x, &labels))?[0].item());
        assert_eq!(
            session.last_run().peak_slab_bytes,
            session.slab_bytes(),
            "kernels receive the planned peak"
        );
    }
    Trained::of(&session, &program, losses)
}

fn tuned(driver: &FakeDriver, batches: &[usize]) -> Trained {
    driver.forget_picks();
    train(Device::Cuda(0), batches, all()).expect("it trains")
}

#[test]
fn the_library_is_taken_where_it_is_faster_and_trains_as_the_cpu_does() {
    let Some(driver) = installed(10_000) else {
        return;
    };
    // The work left after the library's kernel takes little time.
    driver.cost("gemm_parts", 10_000);
    // Sizes change and recur: a graph is recorded for each.
    let batches = [24, 24, 13, 24, 1];
    let expected = train(Device::Cpu, &batches, all()).expect("it trains");
    assert!(expected.libraries.iter().all(Option::is_none));
    let got = tuned(&driver, &batches);
    assert_close(&got.losses, &expected.losses);
    let multiplied = got.libraries.iter().flatten().count();
    assert!(
        multiplied >= 4,
        "of two products forward and three back: {:?}",
        got.libraries
    );
    assert!(
        got.libraries
            .iter()
            .flatten()
            .all(|name| name == "cuBLASLt algorithm 21"),
        "{:?}",
        got.libraries
    );
    // The same with the library's other algorithm, whose partial sums are in the slab.
    let again = tuned(&driver, &batches);
    assert_eq!(
        (again.losses, again.weights),
        (got.losses, got.weights),
        "the same bits"
    );
    driver.cost("cublaslt_23", 1_000);
    let parts = tuned(&driver, &batches);
    assert!(
        parts
            .libraries
            .iter()
            .flatten()
            .any(|name| name == "cuBLASLt algorithm 23"),
        "{:?}",
        parts.libraries
    );
    assert_close(&parts.losses, &expected.losses);
    let again = tuned(&driver, &batches);
    assert_eq!(
        (again.losses, again.weights),
        (parts.losses, parts.weights),
        "the same bits"
    );
}

#[test]
fn our_own_kernels_are_taken_where_they_are_faster() {
    let Some(driver) = installed(100_000_000) else {
        return;
    };
    let expected = train(Device::Cpu, &[24, 9], all()).expect("it trains");
    let got = tuned(&driver, &[24, 9]);
    assert_close(&got.losses, &expected.losses);
    assert!(
        got.libraries.iter().all(Option::is_none),
        "{:?}",
        got.libraries
    );
    // Later times have no effect in the process: the same program gets the same kernels.
    driver.cost("cublaslt", 1_000);
    let again = train(Device::Cuda(0), &[24, 9], all()).expect("it trains");
    assert_eq!(
        (again.functions, again.weights),
        (got.functions, got.weights)
    );
}

#[test]
fn without_timing_the_first_ranked_kernels_are_used() {
    let Some(driver) = installed(1_000) else {
        return;
    };
    driver.forget_picks();
    let untuned = CompileOptions {
        tuning: Tuning::Off,
        ..CompileOptions::default()
    };
    let events = driver.get("products");
    let first = train(Device::Cuda(0), &[24], untuned).expect("it trains");
    assert!(first.libraries.iter().all(Option::is_none) && driver.get("products") == events);
    // No other condition prevents it: the shape is not known yet, and the library is faster.
    assert!(tuned(&driver, &[24]).libraries.iter().any(Option::is_some));
    let again = train(Device::Cuda(0), &[24], untuned).expect("it trains");
    assert_eq!(
        (again.functions, again.weights),
        (first.functions, first.weights)
    );
}

/// A float rounded to tf32, as `cvt.rna.tf32` does: to the nearest of 11 significant bits, of two
/// the one farther from zero.
fn to_tf32(x: f32) -> f32 {
    f32::from_bits((x.to_bits() + 0x1000) & !0x1fff)
}

#[test]
fn operands_are_rounded_only_with_tf32() {
    let Some(driver) = installed(1_000) else {
        return;
    };
    driver.forget_picks();
    let [m, n, k] = [24, 32, 40];
    let a = Array2::from_shape_fn((m, k), |(i, j)| ((i * 31 + j * 17) as f32 * 0.618).sin());
    let b = Array2::from_shape_fn((k, n), |(i, j)| ((i * 13 + j * 29) as f32 * 0.414).cos());
    let product = |device: Device, options: CompileOptions, a: &Array2<f32>, b: &Array2<f32>| {
        let config = MemoryConfig {
            preallocate: Some(false),
            ..MemoryConfig::default()
        };
        let session = Session::new(device, Params::seeded(0))
            .and_then(|s| s.with_memory(&config))
            .expect("a session");
        let mut session = session.with_options(options);
        let trace = Trace::inference();
        let (left, right) = (
            trace.input("a", F32, (m as u32, k as u32)),
            trace.input("b", F32, (k as u32, n as u32)),
        );
        let program = session
            .compile(&trace, [left.matmul(right)])
            .expect("it compiles");
        let functions: Vec<String> = program
            .resources()
            .into_iter()
            .flatten()
            .map(|used| used.function)
            .collect();
        let [c] = session.run(&program, (a, b)).expect("a run");
        (
            c.view::<f32>()
                .expect("f32")
                .iter()
                .copied()
                .collect::<Vec<f32>>(),
            functions,
        )
    };
    let off = |expected: &[f32], got: &[f32]| {
        expected
            .iter()
            .zip(got)
            .map(|(x, y)| (x - y).abs())
            .fold(0f32, f32::max)
    };
    let untuned = CompileOptions {
        tuning: Tuning::Off,
        ..CompileOptions::default()
    };
    let tf32 = CompileOptions {
        tf32: true,
        ..untuned
    };
    let (rounded_a, rounded_b) = (a.mapv(to_tf32), b.mapv(to_tf32));
    let (exact, _) = product(Device::Cpu, tf32, &a, &b);
    assert_eq!(
        exact,
        product(Device::Cpu, untuned, &a, &b).0,
        "the CPU rounds no operand"
    );
    let (rounded, _) = product(Device::Cpu, untuned, &rounded_a, &rounded_b);
    let (got, functions) = product(Device::Cuda(0), tf32, &a, &b);
    assert!(
        functions.iter().any(|name| name.starts_with("gemm_tf32_")),
        "{functions:?}"
    );
    // 40 products of numbers up to 1, each of whose operands is off by 2^-11 of itself at most.
    let error = off(&exact, &got);
    assert!(
        off(&rounded, &got) < 2e-5 && error > 1e-4 && error < 40.0 * 2f32.powi(-10),
        "{error}"
    );
    let (got, functions) = product(Device::Cuda(0), untuned, &a, &b);
    assert!(
        !functions.iter().any(|name| name.contains("tf32")),
        "{functions:?}"
    );
    assert!(off(&exact, &got) < 2e-5);
}

#[test]
fn choices_for_tf32_are_not_used_for_f32() {
    let Some(driver) = installed(100_000_000) else {
        return;
    };
    // The library is fast with tf32 alone.
    driver.cost("cublaslt_21_tf32", 1_000);
    driver.forget_picks();
    let tf32 = CompileOptions {
        tf32: true,
        ..all()
    };
    let expected = train(Device::Cpu, &[24, 9], all()).expect("it trains");
    let exact = train(Device::Cuda(0), &[24, 9], all()).expect("it trains");
    assert_close(&exact.losses, &expected.losses);
    assert!(
        exact.libraries.iter().all(Option::is_none),
        "{:?}",
        exact.libraries
    );
    let rounded = train(Device::Cuda(0), &[24, 9], tf32).expect("it trains");
    assert!(
        rounded
            .libraries
            .iter()
            .flatten()
            .any(|name| name == "cuBLASLt algorithm 21"),
        "{:?}",
        rounded.libraries
    );
    assert!(
        rounded
            .losses
            .iter()
            .zip(&expected.losses)
            .all(|(a, b)| (a - b).abs() < 5e-3 * b),
        "{:?}",
        rounded.losses
    );
    // Both choices are known now, and each is used by its own programs.
    for (options, first) in [(all(), &exact), (tf32, &rounded)] {
        let again = train(Device::Cuda(0), &[24, 9], options).expect("it trains");
        assert_eq!(
            (&again.libraries, &again.functions, &again.weights),
            (&first.libraries, &first.functions, &first.weights)
        );
    }
}

#[test]
fn workspaces_of_the_library_are_planned_and_a_step_allocates_nothing() {
    let Some(driver) = installed(1_000_000_000) else {
        return;
    };
    driver.set("maps_pages", 0);
    driver.cost("cublaslt_23", 1_000);
    driver.forget_picks();
    let before = driver.get("live_bytes");
    let mut session = session();
    let trace = Trace::inference();
    let (a, b) = (
        trace.input("a", F32, (24, 64)),
        trace.input("b", F32, (64, 20)),
    );
    let program = session.compile(&trace, [a.matmul(b)]).expect("it compiles");
    assert_eq!(
        program.libraries(),
        [Some("cuBLASLt algorithm 23".to_string())]
    );
    let workspace = 3 * 4 * 24 * 20;
    let slab = session.slab_bytes();
    assert!(
        slab >= 4 * (24 * 64 + 64 * 20 + 24 * 20) + workspace,
        "{slab} bytes"
    );
    // The slab, the sizes of a run and the record of faults; memory used for timing was released.
    assert_eq!(
        driver.get("live_bytes") - before,
        slab.next_multiple_of(256) as i64 + 2 * 256
    );
    let (a, b) = (
        Array2::<f32>::ones((24, 64)),
        Array2::<f32>::from_elem((64, 20), 0.5),
    );
    let mut allocated = 0;
    for step in 0..5 {
        let products = driver.get("products");
        let [c] = session.run(&program, (&a, &b)).expect("a run");
        assert!(c.view::<f32>().expect("f32").iter().all(|x| *x == 32.0));
        assert_eq!(driver.get("products") - products, 1);
        assert!(
            step < 2 || driver.get("allocations") == allocated,
            "step {step}"
        );
        allocated = driver.get("allocations");
    }
    assert_eq!(session.last_run().peak_slab_bytes, slab);
}

/// A small network of convolutions with a batch of up to 6, trained by some steps.
fn train_convolutions(device: Device, batches: &[usize]) -> Result<Trained> {
    let params = Params::seeded(7);
    let normal = Init::Normal {
        mean: 0.0,
        std: 0.2,
    };
    let weight = |name: &str, dims: [u32; 4]| {
        params
            .root()
            .param(name, (dims[0], dims[1], dims[2], dims[3]), normal)
    };
    let (first, apart) = (weight("first", [8, 3, 3, 3]), weight("apart", [8, 1, 3, 3]));
    let (mixed, last) = (
        weight("mixed", [12, 8, 1, 1]),
        params.root().param("last", (12 * 16, 5), normal),
    );
    let config = MemoryConfig {
        preallocate: Some(false),
        ..MemoryConfig::default()
    };
    let mut session = Session::new(device, params)?
        .with_threads(1)
        .with_options(all())
        .with_memory(&config)?;
    let trace = Trace::training();
    let batch = Dim::bounded("batch", 6);
    let (x, labels) = (
        trace.input("x", F32, (batch, 3, 8, 8)),
        trace.input("labels", I32, (batch,)),
    );
    let geometry = ConvGeometry {
        pad: [1, 1],
        ..ConvGeometry::default()
    };
    let hidden = x.conv2d_with(trace.param(&first), geometry).relu();
    let hidden = hidden.conv2d_with(
        trace.param(&apart),
        ConvGeometry {
            groups: 8,
            stride: [2, 2],
            ..geometry
        },
    );
    let hidden = hidden.conv2d(trace.param(&mixed)).relu().flatten(1);
    let loss = hidden.matmul(trace.param(&last)).cross_entropy(labels);
    trace.minimize(loss, Sgd::new(0.1));
    let program = session.compile(&trace, [loss])?;
    let mut losses = Vec::new();
    for (step, &batch) in batches.iter().enumerate() {
        let x = Array4::from_shape_fn((batch, 3, 8, 8), |(n, c, i, j)| {
            ((n * 31 + c * 17 + i * 7 + j + step) as f32 * 0.618).sin()
        });
        let labels: Vec<i32> = (0..batch as i32).map(|n| n % 5).collect();
        losses.push(session.run(&program, (&x, &labels))?[0].item());
        assert_eq!(
            session.last_run().peak_slab_bytes,
            session.slab_bytes(),
            "kernels receive the planned peak"
        );
    }
    Trained::of(&session, &program, losses)
}

#[test]
fn convolutions_by_libraries_train_as_the_cpu_does() {
    let Some(driver) = installed(1_000_000) else {
        return;
    };
    driver.set("cudnn", 1);
    driver.cost("cudnn", 1_000);
    driver.cost("gemm_parts", 1_000);
    // Sizes change and recur: a graph is recorded for each.
    let batches = [6, 6, 3, 6, 1];
    let train = |driver: &FakeDriver| {
        driver.forget_picks();
        train_convolutions(Device::Cuda(0), &batches).expect("it trains")
    };
    let expected = train_convolutions(Device::Cpu, &batches)
        .expect("it trains")
        .losses;
    let Trained {
        losses,
        weights,
        libraries,
        ..
    } = train(&driver);
    assert_close(&losses, &expected);
    let by_cudnn = libraries
        .iter()
        .flatten()
        .filter(|name| name.starts_with("cuDNN algorithm"))
        .count();
    assert_eq!(
        by_cudnn,
        3 + 2 + 3,
        "three forward, of the first no gradient of its image: {libraries:?}"
    );
    let again = train(&driver);
    assert_eq!(
        (again.losses, again.weights),
        (losses, weights),
        "the same bits"
    );
    // Kernels of one element are products.
    driver.cost("", 1_000_000);
    driver.cost("cublaslt", 1_000);
    driver.cost("gemm_parts", 1_000);
    let Trained {
        losses, libraries, ..
    } = train(&driver);
    assert_close(&losses, &expected);
    let products = libraries
        .iter()
        .flatten()
        .filter(|name| name.starts_with("cuBLASLt"))
        .count();
    assert_eq!(
        products,
        3 + 3,
        "of the last convolution and the last product: {libraries:?}"
    );
}

#[test]
fn a_budget_holds_for_timing_too() {
    let Some(driver) = installed(1_000) else {
        return;
    };
    driver.set("maps_pages", 0);
    driver.forget_picks();
    let compile = |budget: u64| {
        let mut session = session().with_budget(Bytes(budget));
        let trace = Trace::inference();
        let (a, b) = (
            trace.input("a", F32, (24, 64)),
            trace.input("b", F32, (64, 28)),
        );
        session
            .compile(&trace, [a.matmul(b)])
            .expect("it compiles")
            .libraries()
    };
    let touched = 4 * (24 * 64 + 64 * 28 + 24 * 28);
    // Enough for the product with two partial sums, but not for the workspaces of all timed
    // kernels.
    assert_eq!(compile(touched + 6144), [None]);
    assert!(compile(16 * touched)[0].is_some());
}

#[test]
fn a_library_that_fails_in_a_run_is_an_error_with_a_remedy() {
    let Some(driver) = installed(1_000) else {
        return;
    };
    driver.forget_picks();
    let mut session = session();
    let trace = Trace::inference();
    let (a, b) = (
        trace.input("a", F32, (24, 64)),
        trace.input("b", F32, (64, 32)),
    );
    let program = session.compile(&trace, [a.matmul(b)]).expect("it compiles");
    let (a, b) = (Array2::<f32>::ones((24, 64)), Array2::<f32>::ones((64, 32)));
    driver.fail("cublasLtMatmul", 0, 13);
    let error = session
        .run(&program, (&a, &b))
        .map(|_| ())
        .expect_err("it was told to fail");
    assert!(matches!(error, Error::Device { .. }), "{error}");
    for part in [
        "cuda:0",
        "cublasLtMatmul answered CUBLAS_STATUS_EXECUTION_FAILED",
        "SLABWISE_AUTOTUNE=0",
    ] {
        assert!(
            error.to_string().contains(part),
            "{part:?} is not in: {error}"
        );
    }
    let [c] = session.run(&program, (&a, &b)).expect("it failed once");
    assert!(c.view::<f32>().expect("f32").iter().all(|x| *x == 64.0));
}

#[test]
fn the_command_line_lists_the_library_of_each_kernel() {
    let Some(_driver) = installed(1_000) else {
        return;
    };
    let (driver, functions) = slabwise_cuda::fake::build().expect("it was built before");
    let said_with = |more: &str, autotune: &str, library: &str| {
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_slabwise-cuda-tests"));
        command
            .args("plan mlp --batch 4 --device cuda:0 --kernels".split(' '))
            .args(more.split_whitespace());
        command
            .env("SLABWISE_LIBCUDA", &driver)
            .env("SLABWISE_EMULATED", &functions)
            .env("SLABWISE_PREALLOCATE", "0");
        let output = command
            .env("SLABWISE_AUTOTUNE", autotune)
            .env("SLABWISE_LIBCUBLASLT", library)
            .output()
            .expect("it starts");
        let [text, errors] = [&output.stdout, &output.stderr]
            .map(|bytes| String::from_utf8_lossy(bytes).into_owned());
        if output.status.success() {
            Ok(text)
        } else {
            Err(errors)
        }
    };
    let said = |autotune: &str, library: &str| said_with("", autotune, library);
    let library = slabwise_cuda::fake::build_cublaslt().expect("it was built before");
    for (autotune, library) in [
        ("0", library.to_str().expect("a path of text")),
        ("1", "/nowhere/libcublasLt.so"),
    ] {
        let kernels = said(autotune, library).unwrap_or_else(|e| panic!("{e}"));
        assert!(
            kernels.contains(" gemm_") && kernels.contains(" registers, 0 bytes spilled, "),
            "{kernels}"
        );
    }
    let rounded = said_with("--tf32", "0", "/nowhere").unwrap_or_else(|e| panic!("{e}"));
    assert!(rounded.contains(" gemm_tf32_"), "{rounded}");
    let halves = said_with("--dtype bf16", "0", "/nowhere").unwrap_or_else(|e| panic!("{e}"));
    assert!(
        halves.contains(" gemm_bf16_") && !halves.contains(" gemm_tf32_"),
        "{halves}"
    );
    let error = said("yes", "/nowhere").expect_err("it is no number");
    assert!(
        error.contains("SLABWISE_AUTOTUNE is \"yes\"; it is 0 or 1"),
        "{error}"
    );
}

/// The loop of a scan is one kernel, made of the kernels that are ranked first, so that no time of
/// another one is of use.
#[test]
fn products_of_scans_are_not_timed() {
    let Some(driver) = installed(1_000) else {
        return;
    };
    driver.forget_picks();
    let trace = Trace::inference();
    let x = trace.input("x", F32, (2, 8, 16));
    let h = trace.input("h", F32, (8, 16));
    let w = trace.input("w", F32, (16, 16));
    let ([last], []) = trace.scan([h], [x], |[h], [x]| ([(x + h.matmul(w)).tanh()], []));
    let products = driver.get("products");
    let program = session().compile(&trace, [last]).expect("it compiles");
    assert_eq!(driver.get("products"), products);
    assert!(program.libraries().iter().all(Option::is_none));
}
