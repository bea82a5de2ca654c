//! Values offloaded from the slab of a CUDA device come back unchanged, whether the driver makes
//! the copies as late or as early as events allow.

#[path = "../../support/mod.rs"]
mod support;

use slabwise::memory::MemoryConfig;
use slabwise::prelude::*;
use slabwise::{CompileOptions, Error};
use slabwise_cuda::fake::FakeDriver;
use support::networks::{Trained, WIDTH, examples, quick, train_on};

const INVALID_VALUE: i32 = 1;
const OUT_OF_MEMORY: i32 = 2;
const OPERATING_SYSTEM: i32 = 304;
const ILLEGAL_ADDRESS: i32 = 700;
const SIZES: [usize; 3] = [512, 6, 3];

/// A link fast enough that steps hardly wait for copies.
fn fast() -> Offload {
    Offload::new(Bytes(1 << 50))
}

/// Takes memory on demand, each arena by itself, so that the driver counts the session's requests.
fn bare(session: Session) -> Session {
    let config = MemoryConfig {
        preallocate: Some(false),
        ..MemoryConfig::default()
    };
    session
        .with_memory(&config)
        .expect("settings that make sense")
}

fn half(session: Session) -> Session {
    bare(session)
        .with_budget(Budget::Fraction(0.5))
        .with_offload(fast())
}

fn on_device(
    open: impl FnOnce(Session) -> Session,
    sizes: [usize; 3],
    seed: Option<usize>,
) -> Result<Trained> {
    train_on(Device::Cuda(0), open, sizes, seed)
}

#[test]
fn late_and_early_copies_give_the_same_weights() {
    let Some(driver) = FakeDriver::install() else {
        return;
    };
    driver.set("maps_pages", 0);
    let all = on_device(bare, SIZES, None).expect("it compiles");
    let once = all.program.plan().slab_bytes();
    // Late and early copies; recorded as a graph, and kernel by kernel.
    for (eager, check_memory) in [(0, false), (1, false), (0, true), (1, true)] {
        driver.set("eager", eager);
        let forked = driver.get("forked");
        let options = CompileOptions {
            check_memory,
            ..quick()
        };
        let within = on_device(|s| half(s).with_options(options), SIZES, None).expect("it fits");
        let plan = within.program.plan();
        assert!(
            !plan.budget_report().offloaded.is_empty() && plan.budget_report().tasks.is_empty(),
            "{plan}"
        );
        assert_eq!(
            driver.get("forked") > forked,
            !check_memory,
            "copies are branches of the graph"
        );
        assert_eq!(
            within.losses, all.losses,
            "eager {eager}, checked {check_memory}"
        );
        assert!(
            within.weights == all.weights,
            "eager {eager}, checked {check_memory}: weights differ"
        );
        if !check_memory {
            assert!(plan.slab_bytes() <= once / 2, "{plan}");
            assert_eq!(within.session.last_run().peak_slab_bytes, plan.slab_bytes());
        }
        assert_eq!(within.session.host_bytes(), plan.host_bytes());
    }
}

#[test]
fn the_driver_sees_the_planned_bytes_of_device_and_host() {
    let Some(driver) = FakeDriver::install() else {
        return;
    };
    driver.set("maps_pages", 0);
    let counted = |name: &str| driver.get(name);
    // Pinned bytes without offload: staging buffers of inputs.
    let pinned = counted("pinned_bytes");
    let all = on_device(bare, SIZES, None).expect("it compiles");
    let staging = counted("pinned_bytes") - pinned;
    drop(all);
    let (device, pinned) = (counted("live_bytes"), counted("pinned_bytes"));
    let within = on_device(half, SIZES, None).expect("it fits");
    let plan = within.program.plan();
    assert!(plan.host_bytes() > 0);
    assert_eq!(
        (counted("pinned_bytes") - pinned - staging) as u64,
        plan.host_bytes(),
        "{plan}"
    );
    let arenas = [within.session.persistent_bytes(), plan.slab_bytes()]
        .map(|bytes| bytes.next_multiple_of(256));
    // Beside the planned bytes: the sizes of a run, the record of faults, and the counters of blocks
    // of products whose contracted axis is split or whose columns they sum.
    assert_eq!(
        (counted("live_bytes") - device) as u64,
        arenas[0] + arenas[1] + 4 * 256,
        "{plan}"
    );
    drop(within);
    assert_eq!(
        (counted("live_bytes"), counted("pinned_bytes")),
        (device, pinned),
        "all of it is given back"
    );
    // The host's limit is kept as on the CPU, and a budget has a lower bound.
    let limit = Bytes(plan_of_half_host() / 2);
    let some = on_device(
        |s| half(s).with_offload(fast().with_host_bytes(limit)),
        SIZES,
        None,
    )
    .expect("it fits");
    assert!(
        some.program.plan().host_bytes() <= limit.0,
        "{}",
        some.program.plan()
    );
    let none = on_device(|s| half(s).with_budget(Budget::Fraction(0.01)), SIZES, None).map(|_| ());
    assert!(matches!(none, Err(Error::Budget { .. })), "{none:?}");
}

/// The bytes of the host that a budget of half the slab takes.
fn plan_of_half_host() -> u64 {
    on_device(half, [SIZES[0], SIZES[1], 0], None)
        .expect("it fits")
        .program
        .plan()
        .host_bytes()
}

#[test]
fn pending_steps_wait_for_copies_and_allocate_nothing() {
    let Some(driver) = FakeDriver::install() else {
        return;
    };
    driver.set("maps_pages", 0);
    let expected = on_device(bare, [SIZES[0], SIZES[1], 6], None).expect("it compiles");
    let (x, labels) = examples(SIZES[0]);
    for eager in [0, 1] {
        driver.set("eager", eager);
        let Trained {
            mut session,
            program,
            ..
        } = on_device(half, [SIZES[0], SIZES[1], 1], None).expect("it fits");
        assert!(!program.plan().budget_report().offloaded.is_empty());
        session.run(&program, (&x, &labels)).expect("a step");
        let made = driver.get("allocations");
        // Their results are not read.
        for _ in 0..3 {
            session.run(&program, (&x, &labels)).expect("a step");
        }
        let loss = session.run(&program, (&x, &labels)).expect("a step")[0].item();
        assert_eq!(driver.get("allocations"), made);
        assert_eq!(
            Some(&loss.to_bits()),
            expected.losses.last(),
            "eager {eager}"
        );
        for (name, bits) in &expected.weights {
            let found: Vec<u32> = session
                .value(name)
                .expect("a weight")
                .iter()
                .map(|v| v.to_bits())
                .collect();
            assert!(found == *bits, "eager {eager}: {name} differs");
        }
    }
}

#[test]
fn random_networks_train_to_the_same_bits_within_any_budget() {
    let Some(driver) = FakeDriver::install() else {
        return;
    };
    let mut sent = 0;
    for seed in 0..4 {
        let sizes = [256, 4 + seed % 2, 2];
        let all = on_device(bare, sizes, Some(seed)).expect("it compiles");
        let fraction = [0.5, 0.65, 0.5, 0.8][seed];
        driver.set("eager", (seed % 2) as i64);
        let open = |s: Session| {
            bare(s)
                .with_budget(Budget::Fraction(fraction))
                .with_offload(Offload::new(Bytes(1 << [50, 36][seed % 2])))
        };
        let within = match on_device(open, sizes, Some(seed)) {
            Ok(within) => within,
            Err(Error::Budget { .. }) => continue,
            Err(other) => panic!("{other}"),
        };
        assert_eq!(within.losses, all.losses, "network {seed}");
        assert!(
            within.weights == all.weights,
            "network {seed}: weights differ"
        );
        sent += within.program.plan().budget_report().offloaded.len();
    }
    assert!(sent >= 4, "{sent} sent");
}

#[test]
fn a_program_that_offloads_more_moves_the_hosts_memory_and_others_still_run() {
    let Some(_driver) = FakeDriver::install() else {
        return;
    };
    let open = |layers: usize| on_device(half, [SIZES[0], layers, 2], None).expect("it fits");
    let alone = [open(6).losses, open(9).losses];
    // Both in one session, each with weights of its own; the second needs more of the host.
    let params = Params::seeded(5);
    let mut session = half(
        Session::new(Device::Cuda(0), params.clone())
            .expect("a session")
            .with_options(quick()),
    );
    let mut compile = |layers: usize| {
        let layers: Vec<_> = (0..layers)
            .map(|i| {
                slabwise::nn::Linear::new(&params.root() / format!("l{i}").as_str(), WIDTH, WIDTH)
            })
            .collect();
        let trace = Trace::inference().named(if layers.len() == 6 { "six" } else { "nine" });
        let (x, labels) = (
            trace.input("x", F32, (SIZES[0], WIDTH)),
            trace.input("labels", I32, (SIZES[0],)),
        );
        let loss = layers
            .iter()
            .fold(x, |x, layer| x.apply(layer).tanh())
            .cross_entropy(labels);
        let weights: Vec<_> = layers
            .iter()
            .map(|layer| trace.param(layer.weight()))
            .collect();
        let [first] = trace.gradients(loss, [weights[0]]);
        session
            .compile(&trace, [loss, first.square().sum()])
            .expect("it fits")
    };
    let programs = [compile(6), compile(9)];
    let (x, labels) = examples(SIZES[0]);
    for _ in 0..2 {
        for (program, alone) in programs.iter().zip(&alone) {
            let [loss, _] = session.run(program, (&x, &labels)).expect("a run");
            assert_eq!(loss.item().to_bits(), alone[0]);
        }
    }
    assert_eq!(
        session.host_bytes(),
        programs
            .iter()
            .map(|p| p.plan().host_bytes())
            .max()
            .unwrap_or(0)
    );
}

#[test]
fn a_copy_that_fails_says_so() {
    let Some(driver) = FakeDriver::install() else {
        return;
    };
    let (x, labels) = examples(SIZES[0]);
    let expected = on_device(bare, SIZES, None).expect("it compiles");
    // The driver refuses the call: the step does nothing, and the next one runs.
    for call in [
        "cuMemcpyDtoHAsync_v2",
        "cuMemcpyHtoDAsync_v2",
        "cuStreamWaitEvent",
        "cuEventRecord",
    ] {
        let Trained {
            mut session,
            program,
            ..
        } = on_device(half, [SIZES[0], SIZES[1], 0], None).expect("it fits");
        // Inputs are copied and events recorded before the run, so that those calls succeed.
        driver.fail(call, 4, INVALID_VALUE);
        if call.contains("DtoH") {
            driver.fail(call, 0, INVALID_VALUE);
        }
        let error = session
            .run(&program, (&x, &labels))
            .map(|_| ())
            .expect_err("it was told to fail")
            .to_string();
        let name = call.trim_end_matches("_v2");
        assert!(
            error.contains("device cuda:0")
                && error.contains(name)
                && error.contains("was told to fail"),
            "{call}: {error}"
        );
        let losses = [(); 3].map(|()| {
            session.run(&program, (&x, &labels)).expect("a step")[0]
                .item()
                .to_bits()
        });
        assert_eq!(losses[..], expected.losses, "{call}");
    }
    // The copy itself fails: the device is lost for all sessions.
    drop(expected);
    let Trained {
        mut session,
        program,
        ..
    } = on_device(half, [SIZES[0], SIZES[1], 1], None).expect("it fits");
    driver.fail("copy", 5, ILLEGAL_ADDRESS);
    let run = |session: &mut Session| {
        session
            .run(&program, (&x, &labels))
            .and_then(|[loss]| loss.array::<f32>())
            .map(|_| ())
    };
    for _ in 0..2 {
        let error = run(&mut session)
            .expect_err("it was told to fail")
            .to_string();
        assert!(
            error.contains("cuda:0 is lost") && error.contains("CUDA_ERROR_ILLEGAL_ADDRESS"),
            "{error}"
        );
    }
    drop((session, program));
    driver.restart();
    on_device(half, SIZES, None).expect("the device goes on");
}

/// A driver refuses to pin memory for want of it, or because the operating system does. Pageable
/// memory is no substitute, because its copies may be synchronous.
#[test]
fn host_memory_that_is_not_pinned_is_an_error_that_says_what_helps() {
    let Some(driver) = FakeDriver::install() else {
        return;
    };
    let within = on_device(half, SIZES, None).expect("it fits");
    let bytes = Bytes(within.program.plan().host_bytes());
    drop(within);
    let pinned = driver.get("live_pinned");
    for (code, why) in [
        (OUT_OF_MEMORY, "which its system refuses to pin;"),
        (
            OPERATING_SYSTEM,
            "which its system refuses to pin: cuMemHostAlloc failed: CUDA_ERROR",
        ),
    ] {
        driver.fail("cuMemHostAlloc", 5, code);
        let error = on_device(half, [SIZES[0], SIZES[1], 0], None)
            .map(|_| ())
            .expect_err("it was told to fail");
        assert!(matches!(error, Error::OutOfMemory { .. }), "{error:?}");
        let error = error.to_string();
        for part in [
            "offloads to the host",
            &format!("needs {bytes}"),
            why,
            "ulimit -l",
            "Offload::with_host_bytes",
        ] {
            assert!(error.contains(part), "{part}: {error}");
        }
        assert_eq!(driver.get("live_pinned"), pinned, "{code}");
    }
    // With less memory of the host the same program fits.
    let less = Offload::with_host_bytes(fast(), Bytes(bytes.0 / 2));
    let within = on_device(|s| half(s).with_offload(less), SIZES, None).expect("it fits");
    assert!(within.session.host_bytes() <= bytes.0 / 2);
}
