//! Prefetch of batches to a CUDA device while earlier steps run: the same results, in planned
//! memory.

#[path = "../../support/mod.rs"]
mod support;

use ndarray::{Array1, Array2};
use slabwise::memory::MemoryConfig;
use slabwise::prelude::*;
use slabwise_cuda::fake::FakeDriver;
use support::networks::{WIDTH, batches, dense, trained_in_batches, weights};

const BATCH: usize = 64;

/// A session with a prefetch queue, and a program that trains a small network.
fn open(slots: usize, budget: Budget) -> Result<(Session, Program<1>)> {
    let params = Params::seeded(3);
    let layers = dense(&params, 3);
    let mut session = bare(params).with_prefetch(slots).with_budget(budget);
    let program = trained_in_batches(&mut session, &layers, BATCH)?;
    Ok((session, program))
}

/// A session that takes memory on demand.
fn bare(params: Params) -> Session {
    let config = MemoryConfig {
        preallocate: Some(false),
        ..MemoryConfig::default()
    };
    Session::new(Device::Cuda(0), params)
        .expect("it is there")
        .with_memory(&config)
        .expect("settings that make sense")
}

const INPUTS: u64 = (BATCH * WIDTH * 4 + BATCH * 4) as u64;

/// A program whose queue cannot be opened leaves no memory of it behind.
#[test]
fn a_queue_that_is_refused_is_given_back() {
    const INVALID_VALUE: i32 = 1;
    let Some(driver) = FakeDriver::install() else {
        return;
    };
    driver.set("maps_pages", 0);
    let params = Params::seeded(3);
    let layers = dense(&params, 3);
    let mut session = bare(params).with_prefetch(2);
    let live = || driver.get("live_bytes");
    trained_in_batches(&mut session, &layers, BATCH).expect("it compiles");
    let before = live();
    trained_in_batches(&mut session, &layers, BATCH).expect("it compiles");
    let queue = live() - before;
    assert!(queue as u64 >= INPUTS, "{queue} bytes");
    let before = live();
    driver.fail("cuEventRecord", 0, INVALID_VALUE);
    trained_in_batches(&mut session, &layers, BATCH)
        .map(|_| ())
        .expect_err("it was told to fail");
    assert_eq!(live(), before);
}

#[test]
fn prefetched_steps_equal_steps_without_prefetch() {
    let Some(driver) = FakeDriver::install() else {
        return;
    };
    driver.set("maps_pages", 0);
    let lengths = [BATCH, BATCH, 40, BATCH, BATCH, 7, BATCH, BATCH];
    let (mut session, program) = open(1, Budget::Unlimited).expect("it compiles");
    let alone = program.plan().slab_bytes();
    let expected: Vec<u32> = batches(BATCH, &lengths)
        .into_iter()
        .map(|batch| {
            session.run(&program, batch).expect("a step")[0]
                .item()
                .to_bits()
        })
        .collect();
    let trained = weights(&session);
    drop((session, program));
    for (eager, slots) in [(0, 1), (0, 2), (1, 2), (0, 4), (1, 4)] {
        driver.set("eager", eager);
        let [live, pinned] = ["live_bytes", "pinned_bytes"].map(|name| driver.get(name));
        let (mut session, program) = open(slots, Budget::Unlimited).expect("it compiles");
        let ahead = (slots as u64 - 1) * INPUTS;
        assert_eq!(
            (
                program.plan().slab_bytes(),
                program.plan().persistent().prefetch
            ),
            (alone + ahead, ahead),
            "{slots} slots"
        );
        let arenas = [session.persistent_bytes(), session.slab_bytes(), ahead]
            .map(|bytes| bytes.next_multiple_of(256));
        assert_eq!(
            (driver.get("live_bytes") - live) as u64,
            arenas.iter().sum::<u64>() + 2 * 256,
            "{slots} slots"
        );
        // Two staging buffers for inputs that are not prefetched, with the sizes of a run; two
        // words for faults; the prefetch queue.
        let staging = 2 * (INPUTS + 32) + 16;
        assert_eq!(
            (driver.get("pinned_bytes") - pinned) as u64,
            staging + ahead,
            "{slots} slots"
        );
        let mut data = batches(BATCH, &lengths).into_iter();
        // The results of half of the steps are not read: only the last losses are.
        let mut found = Vec::new();
        for step in 0..lengths.len() {
            let made = driver.get("allocations");
            let [loss] = session
                .run_ahead(&program, &mut data)
                .expect("a step")
                .expect("a batch");
            if step >= lengths.len() / 2 {
                found.push(loss.item().to_bits());
            }
            if step > 5 {
                assert_eq!(driver.get("allocations"), made, "step {step}");
            }
        }
        assert!(
            session
                .run_ahead(&program, &mut data)
                .expect("no step")
                .is_none()
        );
        assert_eq!(
            found,
            expected[lengths.len() / 2..],
            "eager {eager}, {slots} slots"
        );
        assert!(
            weights(&session) == trained,
            "eager {eager}, {slots} slots: weights differ"
        );
        assert_eq!(
            session.last_run().peak_slab_bytes,
            program.plan().slab_bytes(),
            "{slots} slots"
        );
    }
}

#[test]
fn batches_may_be_given_by_hand_and_steps_run_between() {
    let Some(driver) = FakeDriver::install() else {
        return;
    };
    let all = batches(BATCH, &[BATCH, 9, BATCH, 30]);
    let (mut plain, program) = open(1, Budget::Unlimited).expect("it compiles");
    let mut expected = Vec::new();
    for batch in &all {
        expected.push(
            plain.run(&program, (&batch.0, &batch.1)).expect("a step")[0]
                .item()
                .to_bits(),
        );
    }
    for eager in [0, 1] {
        driver.set("eager", eager);
        let recorded = driver.get("captures");
        let (mut session, program) = open(3, Budget::Unlimited).expect("it compiles");
        session
            .prefetch(&program, all[1].clone())
            .expect("a free slot");
        session
            .prefetch(&program, all[3].clone())
            .expect("a free slot");
        let full = session
            .prefetch(&program, all[0].clone())
            .expect_err("no free slot")
            .to_string();
        assert!(full.contains("all slots"), "{full}");
        // Every other step is fed as usual.
        let mut found = Vec::new();
        for at in [0, 2] {
            found.push(
                session
                    .run(&program, (&all[at].0, &all[at].1))
                    .expect("a step")[0]
                    .item()
                    .to_bits(),
            );
            found.push(
                session.run_prefetched(&program).expect("a step")[0]
                    .item()
                    .to_bits(),
            );
        }
        assert_eq!(found, expected, "eager {eager}");
        assert_eq!(
            driver.get("captures") - recorded,
            1,
            "one length came twice, however its batches came"
        );
        let none = session
            .run_prefetched(&program)
            .err()
            .expect("nothing there")
            .to_string();
        assert!(none.contains("no batch was prefetched"), "{none}");
        // A session that is dropped waits for pending work.
        session
            .prefetch(&program, all[0].clone())
            .expect("a free slot");
    }
    assert_eq!(weights(&plain).len(), 3 * 2 * 3 + 1);
}

/// A wrong batch is reported when its step runs, and changes nothing.
#[test]
fn a_wrong_batch_fails_when_its_step_runs() {
    let Some(driver) = FakeDriver::install() else {
        return;
    };
    let mut wrong = batches(BATCH, &[BATCH, 32, BATCH, BATCH, 16]);
    // One has a shape that does not fit, one a label out of range.
    wrong[1].0 = Array2::zeros((32, WIDTH + 1));
    wrong[3].1[5] = WIDTH as i32;
    let (mut plain, program) = open(1, Budget::Unlimited).expect("it compiles");
    let tell = |result: Result<u32>| result.map_err(|e| e.to_string());
    let mut expected = Vec::new();
    for batch in &wrong {
        expected.push(tell(
            plain
                .run(&program, (&batch.0, &batch.1))
                .map(|[loss]| loss.item().to_bits()),
        ));
    }
    assert!(
        expected[1].is_err()
            && expected[3]
                .as_ref()
                .is_err_and(|e| e.contains("no weight was changed")),
        "{expected:?}"
    );
    for (eager, slots) in [(0, 2), (1, 3)] {
        driver.set("eager", eager);
        let (mut session, program) = open(slots, Budget::Unlimited).expect("it compiles");
        let mut data = wrong.clone().into_iter();
        let mut found = Vec::new();
        loop {
            match session.run_ahead(&program, &mut data) {
                Ok(None) => break,
                Ok(Some([loss])) => found.push(Ok(loss.item().to_bits())),
                Err(error) => found.push(Err(error.to_string())),
            }
        }
        assert_eq!(found, expected, "{slots} slots");
        assert!(
            weights(&session) == weights(&plain),
            "{slots} slots: weights differ"
        );
    }
}

/// A program that sums an input of more than a mebibyte, scaled by a weight.
fn large(budget: Budget) -> (Session, Program<1>) {
    let params = Params::seeded(1);
    let scale = params.root().param("scale", (1,), Init::Constant(2.0));
    let mut session = bare(params).with_budget(budget);
    let trace = Trace::inference();
    let x = trace.input("x", F32, (Dim::bounded("rows", 1100), 256));
    let small = trace.input("small", F32, (256,));
    let sum = (x * trace.param(&scale) + small).sum();
    let program = session.compile(&trace, [sum]).expect("it fits");
    (session, program)
}

/// Bytes of a session beside those that it plans, and of the counters of each of its programs, whose
/// sums are in parts.
const FIXED: u64 = 2 * 256;
const COUNTERS: u64 = 256;

/// The bytes of the large input in its staging buffer.
const LARGE: u64 = 1100 * 256 * 4;

#[test]
fn staging_buffers_of_large_inputs_are_planned_bytes() {
    let Some(driver) = FakeDriver::install() else {
        return;
    };
    driver.set("maps_pages", 0);
    let before = driver.get("live_bytes");
    let held = |session: &Session, program: &Program<1>| {
        let planned = [session.persistent_bytes(), program.plan().slab_bytes()]
            .map(|bytes| bytes.next_multiple_of(256));
        assert_eq!(
            (driver.get("live_bytes") - before) as u64,
            planned[0] + planned[1] + FIXED + COUNTERS,
            "{}",
            program.plan()
        );
        session.persistent_bytes() + program.plan().slab_bytes()
    };
    let feed = |rows: usize, add: f32| {
        (
            Array2::from_elem((rows, 256), add),
            Array1::<f32>::from_elem(256, 0.5),
        )
    };
    for eager in [0, 1] {
        driver.set("eager", eager);
        let (mut session, program) = large(Budget::Unlimited);
        assert_eq!(program.plan().persistent().staging, LARGE);
        assert!(
            program
                .plan()
                .to_string()
                .contains("on their way to the next run"),
            "{}",
            program.plan()
        );
        let whole = held(&session, &program);
        // Pending runs read their own inputs, large or not.
        for (rows, add) in [
            (1100, 1.0),
            (1100, 2.0),
            (1, 3.0),
            (1100, 4.0),
            (1100, 0.25),
        ] {
            session.run(&program, feed(rows, add)).expect("a run");
        }
        assert_eq!(
            session.run(&program, feed(1100, 0.25)).expect("a run")[0].item(),
            1100.0 * 256.0
        );
        assert_eq!(
            session.last_run().peak_slab_bytes,
            program.plan().slab_bytes(),
            "measured is planned"
        );
        drop((session, program));
        // A budget counts staging buffers, and is met by releasing them first.
        let (session, program) = large(Bytes(whole).into());
        assert_eq!(
            (
                program.plan().persistent().staging,
                held(&session, &program)
            ),
            (LARGE, whole)
        );
        drop((session, program));
        let (mut session, program) = large(Bytes(whole - 1).into());
        assert_eq!(
            (
                program.plan().persistent().staging,
                held(&session, &program)
            ),
            (0, whole - LARGE)
        );
        for add in [1.0, 2.0] {
            session.run(&program, feed(1100, add)).expect("a run");
        }
        assert_eq!(
            session.run(&program, feed(1100, 0.25)).expect("a run")[0].item(),
            1100.0 * 256.0
        );
        assert_eq!(
            session.last_run().peak_slab_bytes,
            program.plan().slab_bytes()
        );
    }
}

/// Programs of a session share the staging buffer; a later program takes its bytes if its slab
/// needs them.
#[test]
fn programs_of_a_session_share_one_budget() {
    let Some(driver) = FakeDriver::install() else {
        return;
    };
    driver.set("maps_pages", 0);
    let before = driver.get("live_bytes");
    let (session, program) = large(Budget::Unlimited);
    let whole = session.persistent_bytes() + program.plan().slab_bytes();
    drop((session, program));
    // The headroom is half of the inputs' bytes, so that a slab that is so much larger does not fit
    // beside the prefetched inputs.
    let budget = whole + LARGE / 2;
    let (mut session, first) = large(Bytes(budget).into());
    assert_eq!(first.plan().persistent().staging, LARGE);
    let trace = Trace::inference().named("larger");
    let x = trace.input("x", F32, (2000, 256));
    let second = session.compile(&trace, [x.exp().sum()]).expect("it fits");
    assert_eq!(second.plan().persistent().staging, 0);
    let bytes = session.persistent_bytes() + session.slab_bytes();
    assert!(
        session.slab_bytes() > first.plan().slab_bytes() - LARGE
            && bytes + LARGE > budget
            && bytes <= budget
    );
    let arenas =
        [session.persistent_bytes(), session.slab_bytes()].map(|bytes| bytes.next_multiple_of(256));
    assert_eq!(
        (driver.get("live_bytes") - before) as u64,
        arenas[0] + arenas[1] + FIXED + 2 * COUNTERS
    );
    // Both run, without a staging buffer now.
    let [sum] = session
        .run(
            &first,
            (
                Array2::<f32>::from_elem((1100, 256), 0.25),
                Array1::<f32>::from_elem(256, 0.5),
            ),
        )
        .expect("a run");
    assert_eq!(sum.item(), 1100.0 * 256.0);
    assert_eq!(
        session
            .run(&second, (Array2::<f32>::zeros((2000, 256)),))
            .expect("a run")[0]
            .item(),
        2000.0 * 256.0
    );
}

#[test]
fn without_memory_for_staging_inputs_are_copied_when_their_step_runs() {
    let Some(driver) = FakeDriver::install() else {
        return;
    };
    driver.set("maps_pages", 0);
    let (session, program) = large(Budget::Unlimited);
    let needed = session.persistent_bytes() + program.plan().slab_bytes();
    drop((session, program));
    // Neither without enough memory for them, nor once the slab needs the memory.
    for room in [needed - LARGE - 300, needed - LARGE / 2] {
        driver.set("total", (room + 2048) as i64 * 4 / 3);
        let (mut session, program) = large(Budget::Unlimited);
        let rows = Array2::<f32>::from_elem((1100, 256), 0.5);
        let [sum] = session
            .run(&program, (rows, Array1::<f32>::zeros(256)))
            .expect("a run");
        assert_eq!(sum.item(), 1100.0 * 256.0);
        assert!(session.device_bytes() <= room + 2048);
        assert!(session.last_run().peak_slab_bytes < needed);
    }
}
