//! Prefetch of batches while a step runs: the same results, in planned memory.

mod support;

use ndarray::Array2;
use slabwise::Error;
use slabwise::prelude::*;
use support::networks::{WIDTH, batches, dense, trained_in_batches, weights};

const BATCH: usize = 256;

/// A session with a prefetch queue, and a program that trains a small network.
fn open(slots: usize, budget: Budget) -> Result<(Session, Program<1>)> {
    let params = Params::seeded(3);
    let layers = dense(&params, 6);
    let mut session = Session::new(Device::Cpu, params)?
        .with_threads(2)
        .with_prefetch(slots)
        .with_budget(budget);
    let program = trained_in_batches(&mut session, &layers, BATCH)?;
    Ok((session, program))
}

const INPUTS: u64 = (BATCH * WIDTH * 4 + BATCH * 4) as u64;

#[test]
fn prefetched_steps_equal_steps_without_prefetch() {
    // The last batch is smaller, and so is one in the middle.
    let lengths = [BATCH, BATCH, 40, BATCH, BATCH, 7];
    let (mut session, program) = open(1, Budget::Unlimited).expect("it compiles");
    let alone = program.plan().slab_bytes();
    let mut expected = Vec::new();
    for batch in batches(BATCH, &lengths) {
        expected.push(
            session.run(&program, batch).expect("a step")[0]
                .item()
                .to_bits(),
        );
    }
    let trained = weights(&session);
    for slots in [0, 1, 2, 3, 5] {
        let (mut session, program) = open(slots, Budget::Unlimited).expect("it compiles");
        let ahead = slots.max(1) as u64 - 1;
        assert_eq!(
            program.plan().slab_bytes(),
            alone + ahead * INPUTS,
            "{slots} slots"
        );
        assert_eq!(program.plan().persistent().prefetch, ahead * INPUTS);
        let mut found = Vec::new();
        let mut data = batches(BATCH, &lengths).into_iter();
        while let Some([loss]) = session.run_ahead(&program, &mut data).expect("a step") {
            found.push(loss.item().to_bits());
        }
        assert_eq!(found, expected, "{slots} slots");
        assert!(
            weights(&session) == trained,
            "{slots} slots: weights differ"
        );
        assert_eq!(
            session.last_run().peak_slab_bytes,
            program.plan().slab_bytes(),
            "{slots} slots"
        );
        assert!(
            session
                .run_ahead(&program, &mut data)
                .expect("no step")
                .is_none()
        );
    }
}

#[test]
fn batches_may_be_given_by_hand_and_other_programs_run_between() {
    let all = batches(BATCH, &[BATCH, 9, BATCH, 100]);
    let (mut plain, program) = open(1, Budget::Unlimited).expect("it compiles");
    let expected: Vec<u32> = all
        .iter()
        .map(|batch| {
            plain.run(&program, (&batch.0, &batch.1)).expect("a step")[0]
                .item()
                .to_bits()
        })
        .collect();
    let (mut session, program) = open(3, Budget::Unlimited).expect("it compiles");
    // A program that uses the same slab and has its own prefetch queue.
    let trace = Trace::inference();
    let x = trace.input("x", F32, (BATCH, WIDTH));
    let sum = session
        .compile(&trace, [(x * 2.0).sum()])
        .expect("it compiles");
    let mut given = all.clone().into_iter();
    let mut found = Vec::new();
    for batch in given.by_ref().take(2) {
        session.prefetch(&program, batch).expect("a free slot");
    }
    let full = session
        .prefetch(&program, all[0].clone())
        .expect_err("no free slot")
        .to_string();
    assert!(full.contains("all slots"), "{full}");
    for _ in 0..4 {
        let twice = session.run(&sum, (&all[0].0,)).expect("a run")[0].item();
        assert!(twice > 0.0);
        found.push(
            session.run_prefetched(&program).expect("a step")[0]
                .item()
                .to_bits(),
        );
        if let Some(batch) = given.next() {
            session.prefetch(&program, batch).expect("a free slot");
        }
    }
    assert_eq!(found, expected);
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
    drop(session);
    let unprepared = plain
        .prefetch(&program, all[0].clone())
        .expect_err("of another session");
    assert!(matches!(unprepared, Error::Foreign(_)));
}

/// A wrong batch is reported when its step runs, and changes nothing.
#[test]
fn a_wrong_batch_fails_when_its_step_runs() {
    let mut wrong = batches(BATCH, &[BATCH, 64, BATCH, BATCH, 32]);
    // One has a shape that does not fit, one a label out of range.
    wrong[1].0 = Array2::zeros((64, WIDTH + 1));
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
        expected[1].as_ref().is_err_and(|e| e.contains("64"))
            && expected[3]
                .as_ref()
                .is_err_and(|e| e.contains("no weight was changed"))
    );
    for slots in [2, 3, 4] {
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
        let resident = session.upload("x", &wrong[0].0).expect("room");
        let error = session
            .prefetch(&program, (resident, wrong[0].1.clone()))
            .expect_err("no array")
            .to_string();
        assert!(
            error.contains("input \"x\"") && error.contains("device"),
            "{error}"
        );
    }
}

#[test]
fn a_budget_includes_prefetch_queues() {
    let (session, program) = open(1, Budget::Unlimited).expect("it compiles");
    let bytes = session.persistent_bytes() + program.plan().slab_bytes();
    assert_eq!(
        open(3, Bytes(bytes + 2 * INPUTS).into())
            .expect("it fits")
            .1
            .plan()
            .budget_report()
            .tasks
            .len(),
        0
    );
    // With fewer bytes, values are recomputed, or the budget is refused.
    match open(3, Bytes(bytes + INPUTS).into()) {
        Ok((session, program)) => {
            assert!(session.persistent_bytes() + program.plan().slab_bytes() <= bytes + INPUTS);
            assert!(!program.plan().budget_report().tasks.is_empty());
        }
        Err(Error::Budget {
            budget,
            needed,
            floor,
            ..
        }) => assert!(budget < needed && floor <= needed),
        Err(other) => panic!("{other}"),
    }
}

#[test]
fn values_of_data_dependent_size_do_not_prevent_a_queue() {
    let mut session = Session::new(Device::Cpu, Params::seeded(0))
        .expect("a session")
        .with_prefetch(2);
    let trace = Trace::inference();
    let x = trace.input("x", F32, (64,));
    let program = session
        .compile(&trace, [x.masked_select(x.gt(0.0)).sum()])
        .expect("it compiles");
    for k in 1..4 {
        let x = ndarray::Array1::from_shape_fn(64, |i| if i < k { 2.0f32 } else { -1.0 });
        session.prefetch(&program, (x,)).expect("a slot");
        let [sum] = session.run_prefetched(&program).expect("it runs");
        assert_eq!(sum.item(), 2.0 * k as f32);
    }
}
