//! Products by a library, and the choice of kernels, over a driver without a device: its events
//! count the time that a test assigns to kernels.

mod common;
mod products;

use std::sync::Arc;

use common::{Case, Choices, TARGET};
use products::library::{
    LIMITS, algorithm, by, check, computed, installed, of_library, on_device, on_small_integers,
    op, picks_in, target, tuner, with,
};
use products::{matmul, numbers, strided, typed};
use slabwise_cuda::cache::Cache;
use slabwise_cuda::compiler::Compiler;
use slabwise_cuda::fake::FakeDriver;
use slabwise_cuda::libraries::LibraryError;
use slabwise_cuda::{
    Choice, Device, Picks, Target, Tuner, candidates, cublaslt, cudnn, lower, lower_as,
};
use slabwise_kernels::dtype::DType;
use slabwise_kernels::scalar::{ScalarOp, Value};
use slabwise_kernels::size::{Env, Size, Symbol};
use slabwise_kernels::spec::{Body, Inst, Spec};

const NOT_SUPPORTED: i32 = 15;
const INTERNAL_ERROR: i32 = 14;

fn is_of_library(case: &Case) -> bool {
    let lowered = lower_as(
        &case.spec,
        &case.bounds,
        &case.target,
        &Choice::Library(algorithm(21, 0)),
    )
    .expect("it has a source");
    lowered.library().is_some()
}

#[test]
fn the_library_multiplies_every_layout_and_an_epilogue_follows() {
    let Some(driver) = installed() else { return };
    let (m, n, k) = (12, 10, 9);
    let rows = || strided(0, &[k, 1]);
    let columns = || strided(0, &[n, 1]);
    let square = |a, b| matmul(&[m, n], k, a, b);
    let plain = || square(rows(), columns());
    let batched = |a: &[usize], b: &[usize]| matmul(&[3, m, n], k, strided(0, a), strided(0, b));
    let bias = || typed(DType::F32, 0, &[0, 1]);
    let turned_result = || {
        let mut spec = plain();
        spec.operands[0] = strided(0, &[1, m]);
        spec
    };
    let (add, relu) = (ScalarOp::Add, ScalarOp::Relu);
    // With whether the library writes the result itself.
    let specs: Vec<(&str, Spec, bool)> = vec![
        ("rows, rows", plain(), true),
        (
            "columns, rows",
            square(strided(0, &[1, m]), columns()),
            true,
        ),
        ("rows, columns", square(rows(), strided(0, &[1, k])), true),
        (
            "columns, columns",
            square(strided(0, &[1, m]), strided(0, &[1, k])),
            true,
        ),
        (
            "padded and behind others",
            square(strided(5, &[k + 3, 1]), strided(8, &[n + 6, 1])),
            true,
        ),
        ("a result by columns", turned_result(), true),
        ("several", batched(&[m * k, k, 1], &[k * n, n, 1]), true),
        ("several by one", batched(&[m * k, k, 1], &[0, n, 1]), true),
        (
            "scaled",
            with(
                plain(),
                vec![],
                vec![Inst::Const(Value::F32(0.25)), op(ScalarOp::Mul, 1, 0)],
            ),
            true,
        ),
        (
            "with a bias",
            with(plain(), vec![bias()], vec![Inst::Load(1), op(add, 0, 1)]),
            true,
        ),
        (
            "added to another",
            with(
                plain(),
                vec![strided(0, &[n, 1])],
                vec![Inst::Load(1), op(add, 1, 0)],
            ),
            true,
        ),
        (
            "scaled, added to another, with a bias",
            with(
                plain(),
                vec![bias(), strided(0, &[n, 1])],
                vec![
                    Inst::Const(Value::F32(-2.0)),
                    op(ScalarOp::Mul, 0, 1),
                    Inst::Load(1),
                    op(add, 2, 3),
                    Inst::Load(2),
                    op(add, 4, 5),
                ],
            ),
            true,
        ),
        (
            "a bias and relu",
            with(
                plain(),
                vec![bias()],
                vec![Inst::Load(1), op(add, 0, 1), op(relu, 2, 0)],
            ),
            false,
        ),
        (
            "a number for each row",
            with(
                plain(),
                vec![strided(0, &[1, 0])],
                vec![Inst::Load(1), op(add, 0, 1)],
            ),
            false,
        ),
        (
            "a bias that lies askew",
            with(
                plain(),
                vec![strided(1, &[0, 1])],
                vec![Inst::Load(1), op(add, 0, 1)],
            ),
            false,
        ),
        (
            "twice a bias",
            with(
                plain(),
                vec![bias()],
                vec![Inst::Load(1), op(add, 0, 1), op(add, 2, 1)],
            ),
            false,
        ),
        (
            "scaled after a bias",
            with(
                plain(),
                vec![bias()],
                vec![
                    Inst::Load(1),
                    op(add, 0, 1),
                    Inst::Const(Value::F32(3.0)),
                    op(ScalarOp::Mul, 2, 3),
                ],
            ),
            false,
        ),
    ];
    let cases = on_small_integers(specs, 1);
    let multiplied = driver.get("products");
    check(&cases, &[by(21, 1 << 20), by(23, 1 << 20)], 1e-6);
    assert_eq!(driver.get("products") - multiplied, 2 * cases.len() as i64);
}

#[test]
fn halves_are_summed_in_single_precision_and_rounded_as_they_are_stored() {
    let Some(_driver) = installed() else { return };
    let (m, n, k) = (12, 10, 9);
    let half = |dtype, to| {
        let mut spec = matmul(
            &[m, n],
            k,
            typed(dtype, 0, &[k, 1]),
            typed(dtype, 0, &[n, 1]),
        );
        spec.operands[0].dtype = to;
        spec
    };
    let rounded = |spec, op_of| with(spec, vec![], vec![op(op_of, 0, 0)]);
    let specs = [
        ("halves", half(DType::F16, DType::F16), true),
        ("to single precision", half(DType::BF16, DType::F32), true),
        ("to other halves", half(DType::F16, DType::BF16), false),
        (
            "rounded",
            rounded(half(DType::BF16, DType::BF16), ScalarOp::RoundBf16),
            true,
        ),
        (
            "rounded to others",
            rounded(half(DType::BF16, DType::BF16), ScalarOp::RoundF16),
            false,
        ),
    ];
    let cases = on_small_integers(specs, 5);
    for ((case, _), got) in cases.iter().zip(computed(&cases, &[by(21, 0)])) {
        let [a, b, c] = [0, 1, 2].map(|at| numbers(case.spec.arguments()[at].0.dtype, &got[at]));
        for (i, x) in c.iter().enumerate() {
            // Sums of such small numbers are exact in every type.
            let sum: f64 = (0..k).map(|l| a[i / n * k + l] * b[l * n + i % n]).sum();
            assert!(*x == sum, "{}: {x} at {i} instead of {sum}", case.name);
        }
    }
}

/// Products that the library does not support are computed by kernels of slabwise.
#[test]
fn unsupported_products_are_not_given_to_the_library() {
    let Some(_driver) = installed() else { return };
    let mut choices = Choices::new(2);
    let mut mixed = matmul(
        &[8, 8],
        8,
        typed(DType::F16, 0, &[8, 1]),
        strided(0, &[8, 1]),
    );
    mixed.operands[0].dtype = DType::F32;
    for (name, spec) in [
        (
            "one row",
            matmul(&[1, 64], 32, strided(0, &[32, 1]), strided(0, &[64, 1])),
        ),
        (
            "one column",
            matmul(&[64, 1], 32, strided(0, &[32, 1]), strided(0, &[1, 1])),
        ),
        (
            "every other element",
            matmul(&[8, 8], 8, strided(0, &[16, 2]), strided(0, &[8, 1])),
        ),
        (
            "one by several",
            matmul(
                &[3, 8, 8],
                8,
                strided(0, &[0, 8, 1]),
                strided(0, &[64, 8, 1]),
            ),
        ),
        (
            "rows that overlap",
            matmul(&[8, 8], 8, strided(0, &[4, 1]), strided(0, &[8, 1])),
        ),
        (
            "a batch of batches",
            matmul(
                &[2, 3, 8, 8],
                8,
                strided(0, &[64, 200, 8, 1]),
                strided(0, &[192, 64, 8, 1]),
            ),
        ),
        ("two types", mixed),
    ] {
        assert!(
            !is_of_library(&Case::new(name, spec, &mut choices)),
            "{name}"
        );
    }
    // A guarded kernel reads the fault record after the library has run.
    let mut case = Case::new(
        "guarded",
        matmul(&[8, 8], 8, strided(0, &[8, 1]), strided(0, &[8, 1])),
        &mut choices,
    );
    case.target = Target {
        guarded: true,
        ..target()
    };
    check(&[(case, false)], &[by(21, 0)], 1e-6);
}

/// A batch of up to 12 rows, forward (`b × 8 · 8 × 6`) or the gradient of its weight (`8 × b · b ×
/// 6`), where the contracted side may be empty.
#[test]
fn sizes_of_a_run_may_be_smaller_or_zero() {
    let Some(driver) = installed() else { return };
    let batch = Size::symbol(Symbol(0));
    let env = |n| Env([n, 0, 0, 0, 0, 0, 0, 0]);
    let mut forward = matmul(&[12, 6], 8, strided(0, &[8, 1]), strided(0, &[6, 1]));
    forward.dims[0] = batch;
    let mut gradient = matmul(&[8, 6], 12, strided(0, &[1, 8]), strided(0, &[6, 1]));
    let Body::Matmul(body) = &mut gradient.body else {
        unreachable!()
    };
    body.k = batch;
    let relu = with(gradient.clone(), vec![], vec![op(ScalarOp::Relu, 0, 0)]);
    let biased = with(
        gradient.clone(),
        vec![typed(DType::F32, 0, &[0, 1])],
        vec![Inst::Load(1), op(ScalarOp::Add, 0, 1)],
    );
    let cases = [
        ("forward", forward, true),
        ("gradient", gradient, true),
        ("relu", relu, false),
        ("biased", biased, false),
    ];
    let mut choices = Choices::new(3);
    let mut list = Vec::new();
    for (name, spec, direct) in cases {
        for n in [12, 7, 1, 0] {
            let mut case = Case::bounded(
                format!("{name} of {n}"),
                spec.clone(),
                env(12),
                env(n),
                &mut choices,
            );
            // As many bytes as at the bound, because regions are planned for it.
            case.args = Case::bounded("", spec.clone(), env(12), env(12), &mut choices).args;
            case.target = target();
            list.push((case, direct));
        }
    }
    check(&list, &[by(21, 1 << 20), by(23, 1 << 20)], 1e-5);
    // A library's refusal of the sizes of a run is known before the run begins.
    let lowered = of_library(&list[1].0, &by(23, 0));
    let device = Device::open(0, LIMITS).expect("it is there");
    let done = driver.get("products");
    driver.fail("cublasLtMatmulAlgoGetHeuristic", 0, INTERNAL_ERROR);
    let refused = device
        .foresee([&lowered].into_iter(), &list[1].0.env)
        .expect_err("it was told to fail")
        .to_string();
    assert!(
        refused.contains("cublasLtMatmulAlgoGetHeuristic answered"),
        "{refused}"
    );
    assert_eq!(
        (
            device.foresee([&lowered].into_iter(), &list[1].0.env),
            driver.get("products")
        ),
        (Ok(()), done)
    );
    // The library is asked once for the sizes of recent runs.
    let lowered = of_library(&list[1].0, &by(21, 0));
    for (rows, asked) in [(7, 1), (7, 0), (6, 1), (7, 0)] {
        let before = driver.get("checks");
        let foreseen = device.foresee([&lowered].into_iter(), &env(rows));
        assert_eq!(foreseen, Ok(()));
        assert_eq!(driver.get("checks") - before, asked, "{rows} rows");
    }
    drop(device);
    // An algorithm that does not support smaller sizes is replaced by one that does.
    let asked = driver.get("heuristics");
    driver.fail("cublasLtMatmulAlgoCheck", 0, NOT_SUPPORTED);
    check(&list[1..2], &[by(23, 1 << 20)], 1e-5);
    assert_eq!(driver.get("heuristics"), asked + 1);
}

#[test]
fn errors_of_cublaslt_say_how_to_disable_it() {
    let Some(driver) = installed() else { return };
    let mut choices = Choices::new(4);
    let mut case = Case::new(
        "product",
        matmul(&[8, 8], 8, strided(0, &[8, 1]), strided(0, &[8, 1])),
        &mut choices,
    );
    case.target = target();
    let lowered = of_library(&case, &by(21, 0));
    let run = || on_device(&[(&case, &lowered)]).remove(0);
    driver.fail("cublasLtMatmul", 0, 13);
    let error = run().expect_err("it was told to fail").to_string();
    assert_eq!(
        error,
        "cublasLtMatmul answered CUBLAS_STATUS_EXECUTION_FAILED; SLABWISE_AUTOTUNE=0 leaves cuBLASLt out"
    );
    // A newer library may answer with a status that is not known yet.
    driver.fail("cublasLtMatmul", 0, 12_345);
    let error = run().expect_err("it was told to fail").to_string();
    assert!(
        error.starts_with("cublasLtMatmul answered status 12345;"),
        "{error}"
    );
    driver.set("library", 0);
    let error = run().expect_err("there is none now").to_string();
    assert!(
        error.contains("cublasLtCreate answered CUBLAS_STATUS_NOT_INITIALIZED"),
        "{error}"
    );
}

/// A product that is timed.
fn product() -> Spec {
    matmul(&[48, 40], 64, strided(0, &[64, 1]), strided(0, &[40, 1]))
}

/// Another, for the same kernels.
fn other_product() -> Spec {
    matmul(&[48, 48], 64, strided(0, &[64, 1]), strided(0, &[48, 1]))
}

/// The choice for one spec.
fn choose(picks: Arc<Picks>, spec: &Spec) -> Choice {
    tuner(picks)
        .choose(&[(spec, target())], &Env::default())
        .remove(0)
}

/// The names of slabwise's candidates.
fn own(spec: &Spec) -> Vec<String> {
    candidates(spec, &Env::default(), &target())
        .expect("it has sources")
        .into_iter()
        .map(|c| c.name)
        .collect()
}

#[test]
fn timed_candidates_are_not_compiled_again() {
    let Some(_driver) = installed() else { return };
    let folder = tempfile::tempdir().expect("a folder");
    let products = [product(), other_product()];
    let wanted: Vec<(&Spec, Target)> = products.iter().map(|spec| (spec, target())).collect();
    let choices = tuner(picks_in(&folder)).choose(&wanted, &Env::default());
    // Functions are compiled once in a process: the candidates of both products have been,
    // whichever was chosen.
    let made = || Compiler::of_process().compiled() + Compiler::of_process().read();
    let before = made();
    assert!(before > 0);
    let device = Device::open(0, LIMITS).expect("it is there");
    for (spec, choice) in products.iter().zip(&choices) {
        let own = candidates(spec, &Env::default(), &target()).expect("it has sources");
        assert!(own.len() > 1);
        let picked = lower_as(spec, &Env::default(), &target(), choice).expect("it has a source");
        let timed = own
            .iter()
            .take(4)
            .map(|candidate| &candidate.lowered)
            .chain([&picked]);
        device
            .load(&timed.collect::<Vec<_>>())
            .expect("the kernels are fine");
    }
    assert_eq!(made(), before);
}

#[test]
fn the_fastest_is_picked_and_ties_go_to_the_first() {
    let Some(driver) = installed() else { return };
    let before = driver.get("live_bytes");
    driver.set("without_context", 0);
    let spec = product();
    let names = own(&spec);
    let pick = |costs: &[(&str, i64)]| {
        driver.cost("", 1_000_000);
        costs
            .iter()
            .for_each(|(begins, cost)| driver.cost(begins, *cost));
        let folder = tempfile::tempdir().expect("a folder");
        choose(picks_in(&folder), &spec)
    };
    // If all launches take the same time, the candidates with the fewest launches are fastest, and
    // the first of them wins.
    let single = names
        .iter()
        .take(4)
        .find(|name| !name.contains("parts"))
        .expect("one of the first has no parts");
    assert_eq!(pick(&[]), Choice::Own(single.clone()));
    let kinds: Vec<&str> = names
        .iter()
        .take(4)
        .map(|name| name.split(' ').next().expect("a name"))
        .collect();
    assert!(kinds.iter().any(|kind| *kind != kinds[0]), "{names:?}");
    for kind in kinds {
        let Choice::Own(name) = pick(&[(kind, 10_000), ("gemm_parts", 1)]) else {
            panic!("{kind} is the fastest")
        };
        assert!(name.starts_with(kind), "{name} instead of {kind}");
    }
    assert_eq!(
        pick(&[("cublaslt_21", 500_000)]),
        Choice::Library(algorithm(21, 0))
    );
    assert_eq!(
        pick(&[("cublaslt_21", 990_000)]),
        Choice::Own(single.clone()),
        "that is not clearly faster"
    );
    // Two kernels of the library: the faster one needs a workspace no larger than the memory that
    // the product touches.
    let wide = 48 * 40 * 3 * 4;
    assert_eq!(
        pick(&[("cublaslt_21", 500_000), ("cublaslt_23", 400_000)]),
        Choice::Library(algorithm(23, wide))
    );
    // All of the tuner's memory is freed, and all else before the context.
    assert_eq!(driver.get("live_bytes"), before);
    assert_eq!(driver.get("without_context"), 0);
}

/// A launch leaves an idle device without work for longer than a kernel takes. That time is in no
/// candidate's time, and all candidates run equally often.
#[test]
fn the_submission_of_work_is_not_timed() {
    let Some(driver) = installed() else { return };
    let spec = product();
    let names = own(&spec);
    let single = names
        .iter()
        .take(4)
        .find(|name| !name.contains("parts"))
        .expect("one of the first has no parts");
    let kind = single.split(' ').next().expect("a name");
    driver.set("idle", 40_000);
    let timed = |library: i64| {
        driver.cost("", 1_000_000);
        driver.cost(kind, 10_100);
        driver.cost("cublaslt_21", library);
        let (folder, before) = (
            tempfile::tempdir().expect("a folder"),
            driver.get("products"),
        );
        (
            choose(picks_in(&folder), &spec),
            driver.get("products") - before,
        )
    };
    // The first run, two single ones and five samples of 0.2 ms, each after one that is not timed.
    // Other kernels of the library are only run singly.
    let others = 2 * (1 + 2 * 2);
    let runs = |of_sample: i64| others + 1 + 2 * 2 + 5 * 2 * of_sample;
    let (choice, run) = timed(9_950);
    assert!(matches!(choice, Choice::Own(_)), "{choice:?} by 1 %");
    assert_eq!(run, runs(21));
    let (choice, run) = timed(12_000);
    assert!(matches!(choice, Choice::Own(_)), "{choice:?}");
    assert_eq!(run, runs(20));
    let (choice, _) = timed(9_700);
    assert_eq!(choice, Choice::Library(algorithm(21, 0)));
}

#[test]
fn a_choice_is_made_once_and_stored_for_other_processes() {
    let Some(driver) = installed() else { return };
    let folder = tempfile::tempdir().expect("a folder");
    for (spec, faster) in [(product(), Some("cublaslt_24")), (other_product(), None)] {
        let file = || {
            let files = std::fs::read_dir(folder.path().join("cache"))
                .expect("a folder")
                .flatten()
                .map(|entry| entry.path());
            let mut picks: Vec<_> = files
                .filter(|path| path.extension().is_some_and(|e| e == "pick"))
                .collect();
            picks.sort_by_key(|path| {
                std::fs::metadata(path)
                    .and_then(|m| m.modified())
                    .expect("a time")
            });
            picks.pop().expect("it is kept")
        };
        driver.cost("", 1_000_000);
        faster
            .into_iter()
            .for_each(|name| driver.cost(name, 10_000));
        let picks = picks_in(&folder);
        let first = choose(picks.clone(), &spec);
        assert_eq!(
            matches!(first, Choice::Library(_)),
            faster.is_some(),
            "{first:?}"
        );
        let run = |driver: &FakeDriver| driver.get("launches") + driver.get("products");
        let timed = run(&driver);
        // Other times have no effect any more.
        driver.cost("", 1_000_000);
        driver.cost("cublaslt_21", 1_000);
        assert_eq!(choose(picks, &spec), first);
        assert_eq!(run(&driver), timed, "it is known");
        assert_eq!(choose(picks_in(&folder), &spec), first);
        // A library's kernel is run before it is trusted: once plainly, and once captured.
        assert_eq!(run(&driver) - timed, if faster.is_some() { 2 } else { 0 });
        // A choice that cannot be read is timed again.
        let whole = std::fs::read(file()).expect("an entry");
        std::fs::write(file(), &whole[..whole.len() - 1]).expect("own folder");
        assert_eq!(
            choose(picks_in(&folder), &spec),
            Choice::Library(algorithm(21, 0))
        );
        assert_ne!(std::fs::read(file()).expect("an entry"), whole, "and kept");
    }
}

#[test]
fn missing_or_failing_libraries_are_not_used() {
    let Some(driver) = installed() else { return };
    let spec = product();
    let kept = |folder: &tempfile::TempDir| {
        let files = std::fs::read_dir(folder.path().join("cache"))
            .expect("a folder")
            .flatten();
        files
            .filter(|entry| entry.path().extension().is_some_and(|e| e == "pick"))
            .count()
    };
    for (call, code, stays) in [
        // Stored for processes in which that fails, too.
        ("cublasLtCreate", 1, true),
        ("cublasLtMatmulAlgoGetHeuristic", INTERNAL_ERROR, false),
        // It has no kernel for the product, and never will.
        ("cublasLtMatmulAlgoGetHeuristic", NOT_SUPPORTED, true),
        // One of its kernels is refused at its call: the others stay.
        ("cublasLtMatmul", 13, true),
    ] {
        driver.cost("", 1_000_000);
        driver.cost("cublaslt_21", 10_000);
        let folder = tempfile::tempdir().expect("a folder");
        driver.fail(call, 0, code);
        let choice = choose(picks_in(&folder), &spec);
        assert!(matches!(choice, Choice::Own(_)), "{call}: {choice:?}");
        assert_eq!(
            kept(&folder),
            usize::from(stays),
            "{call}: a temporary failure is not stored"
        );
    }
    // A stored choice that is refused now is timed again.
    let folder = tempfile::tempdir().expect("a folder");
    assert_eq!(
        choose(picks_in(&folder), &spec),
        Choice::Library(algorithm(21, 0))
    );
    driver.fail("cublasLtMatmulAlgoCheck", 0, NOT_SUPPORTED);
    let launched = driver.get("launches");
    assert_eq!(
        choose(picks_in(&folder), &spec),
        Choice::Library(algorithm(21, 0))
    );
    assert!(driver.get("launches") > launched, "our own were run again");
}

/// The message names both versions; the driver is asked each time, because a test may change it.
#[test]
fn a_library_of_a_newer_cuda_than_the_driver_is_missing() {
    let Some(driver) = installed() else { return };
    assert_eq!(cublaslt::version(), Ok(130_002));
    assert_eq!(cudnn::version(), Ok(92_801));
    driver.set("version", 12_080);
    let refused = [cublaslt::version(), cudnn::version()];
    for error in refused {
        let error = error.expect_err("the driver is older");
        let text = error.to_string();
        assert!(
            matches!(error, LibraryError::Missing(_))
                && text.contains("is of CUDA 13, newer than the driver's 12")
                && text.contains("-cu12"),
            "{text}"
        );
    }
}

#[test]
fn products_are_not_timed_without_memory_or_work() {
    let Some(driver) = installed() else { return };
    driver.set("maps_pages", 0);
    let (spec, folder) = (product(), tempfile::tempdir().expect("a folder"));
    let picks = picks_in(&folder);
    let needed = 4 * (48 * 40 + 40 * 64 + 48 * 64);
    for (total, room) in [(needed, None), (64 << 20, Some(needed as u64 - 4))] {
        driver.set("total", total);
        let before = driver.get("live_bytes");
        let tuner = Tuner {
            room,
            ..tuner(picks.clone())
        };
        assert_eq!(
            tuner.choose(&[(&spec, target())], &Env::default()),
            [Choice::Ranked]
        );
        assert_eq!(driver.get("live_bytes"), before);
    }
    driver.set("total", 64 << 20);
    let launched = driver.get("launches");
    let small = matmul(&[48, 40], 63, strided(0, &[63, 1]), strided(0, &[40, 1]));
    assert_eq!(choose(picks.clone(), &small), Choice::Ranked);
    assert_eq!(driver.get("launches"), launched, "it is not worth it");
    // A product that did not fit in memory is timed once it does.
    assert!(matches!(choose(picks, &spec), Choice::Own(_)));
}

#[test]
fn specs_of_one_product_are_computed_the_same_way() {
    let Some(driver) = installed() else { return };
    driver.cost("cublaslt_21", 10_000);
    let plain = product();
    let relu = with(plain.clone(), vec![], vec![op(ScalarOp::Relu, 0, 0)]);
    let guarded = Target {
        guarded: true,
        ..target()
    };
    let other = other_product();
    let picks = Picks::at(
        Cache::at(tempfile::tempdir().expect("a folder").path().join("cache"))
            .expect("a private folder"),
    );
    let wanted = [
        (&plain, target()),
        (&other, target()),
        (&relu, target()),
        (&plain, guarded),
    ];
    let choices = tuner(picks).choose(&wanted, &Env::default());
    assert!(
        choices
            .iter()
            .all(|choice| *choice == Choice::Library(algorithm(21, 0))),
        "{choices:?}"
    );
    // A column-major operand leads to another kernel of slabwise for one of them: they share the
    // candidates that both have.
    driver.set("library", 0);
    let mut turned = plain.clone();
    turned.operands[0] = strided(0, &[1, 48]);
    driver.cost("", 1_000_000);
    let folder = tempfile::tempdir().expect("a folder");
    let choices = tuner(picks_in(&folder))
        .choose(&[(&plain, target()), (&turned, target())], &Env::default());
    let Choice::Own(name) = &choices[0] else {
        panic!("{choices:?}")
    };
    assert_eq!(choices[0], choices[1]);
    assert!(own(&plain).contains(name) && own(&turned).contains(name));
}

/// `TARGET` has fewer multiprocessors than the device of the other tests in this file, and
/// therefore another ranking.
#[test]
fn a_choice_that_does_not_fit_is_the_first() {
    let spec = product();
    let first = lower(&spec, &Env::default(), &TARGET).expect("it has a source");
    for choice in [Choice::Ranked, Choice::Own("no such kernel".into())] {
        let lowered = lower_as(&spec, &Env::default(), &TARGET, &choice).expect("it has a source");
        assert_eq!(lowered.functions, first.functions, "{choice:?}");
    }
    let vector = matmul(&[1, 64], 32, strided(0, &[32, 1]), strided(0, &[64, 1]));
    let lowered = lower_as(
        &vector,
        &Env::default(),
        &TARGET,
        &Choice::Library(algorithm(21, 0)),
    )
    .expect("it has a source");
    assert!(lowered.library().is_none() && !lowered.functions.is_empty());
}
