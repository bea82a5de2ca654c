//! Memory that cannot be had is an error, and what ran before it runs after it.

#![cfg(target_os = "linux")]

use ndarray::{Array1, arr0, arr2};
use slabwise::nn::Linear;
use slabwise::optim::Adam;
use slabwise::prelude::*;
use slabwise::{Error, Program};

fn session(params: Params) -> Session {
    Session::new(Device::Cpu, params)
        .expect("a session")
        .with_threads(2)
}

/// More bytes than Linux has, swap included.
fn absent_bytes() -> usize {
    let text = std::fs::read_to_string("/proc/meminfo").expect("Linux reports its memory");
    let kib = |key: &str| -> usize {
        let line = text.lines().find_map(|line| line.strip_prefix(key));
        line.unwrap_or(":0 kB")
            .trim_matches(|c: char| !c.is_ascii_digit())
            .parse()
            .expect("a number")
    };
    (kib("MemTotal") + kib("SwapTotal")) * 1024 + (1 << 30)
}

#[track_caller]
fn assert_short<T>(result: Result<T>) -> String {
    match result {
        Ok(_) => panic!("there is no such memory"),
        Err(error) => {
            assert!(matches!(error, Error::OutOfMemory { .. }), "{error}");
            error.to_string()
        }
    }
}

/// Linux would grant it, and kill the process when it is touched.
#[test]
fn a_slab_beyond_the_free_memory_is_refused_before_it_is_taken() {
    let trace = Trace::inference().named("large");
    let y = trace.full(1.0, F32, (absent_bytes() / 4,)) * trace.input("x", F32, ());
    let said = assert_short(session(Params::seeded(0)).compile(&trace, [y]));
    for part in [
        "the slab of \"large\"",
        "are free, swap and the limit of the control group counted",
        "a smaller batch",
    ] {
        assert!(said.contains(part), "{part:?} is not in: {said}");
    }
}

/// A program of a session whose slab has `rows` rows of 64 KiB.
fn rows(session: &mut Session, name: &str, rows: Dim) -> Result<Program<1>> {
    let trace = Trace::inference().named(name);
    let x = trace.input("x", F32, (rows,));
    let wide = x.reshape((rows, 1)) * trace.full(2.0, F32, (1, 1 << 14));
    session.compile(&trace, [wide])
}

/// Runs [`rows`] on numbers from 0.
fn run(session: &mut Session, program: &Program<1>, length: usize) -> Result<()> {
    let x = Array1::from_shape_fn(length, |i| i as f32);
    let [wide] = session.run(program, (&x,))?;
    let wide = wide.array::<f32>().expect("f32");
    assert_eq!(wide.shape(), [length, 1 << 14]);
    for (i, row) in wide.rows().into_iter().enumerate() {
        assert!(row.iter().all(|&y| y == 2.0 * i as f32), "row {i}");
    }
    Ok(())
}

#[test]
fn a_length_without_memory_leaves_the_others() {
    let mut session = session(Params::seeded(0));
    let free = Dim::unbounded("length");
    let program = rows(&mut session, "free", free).expect("it compiles");
    let other = rows(&mut session, "fixed", 3.into()).expect("it compiles");
    let too_long = absent_bytes() >> 16;
    run(&mut session, &program, 10).expect("a short run");
    let before = session.slab_bytes();
    for _ in 0..2 {
        assert_short(run(&mut session, &program, too_long));
        assert_eq!(session.slab_bytes(), before);
        run(&mut session, &program, 10).expect("a short run");
        run(&mut session, &other, 3).expect("another program");
    }
    // A slab that grows in between has no room for the plan that failed either.
    run(&mut session, &program, 1000).expect("a longer run");
    assert!(session.slab_bytes() > before);
    assert_short(run(&mut session, &program, too_long));
    run(&mut session, &program, 1000).expect("a longer run");
}

/// A training step of two layers by Adam, whose slab has a tensor of `beside` floats.
fn step(params: &Params, session: &mut Session, frozen: bool, beside: usize) -> Result<Program<2>> {
    let root = params.root();
    let (first, second) = (
        Linear::new(&root / "first", 2, 2),
        Linear::new(&root / "second", 2, 1),
    );
    let trace = Trace::training().named("train");
    let y = trace.input("x", F32, (3, 2)).apply(&first).apply(&second);
    let beside = trace.full(1.0, F32, (beside,)) * trace.input("scale", F32, ());
    let loss = y.square().mean();
    if frozen {
        trace.freeze(|info| info.name.starts_with("first"));
    }
    trace.minimize(loss, Adam::new(0.1));
    session.compile(&trace, [loss, beside])
}

/// Nothing of a program that failed stays: no step counter that the next one would have to share, no
/// optimizer state, no weight.
#[test]
fn a_program_without_memory_leaves_no_state() {
    let params = Params::seeded(0);
    let mut session = session(params.clone());
    let infer = rows(&mut session, "infer", 3.into()).expect("it compiles");
    let names = |session: &Session| session.names().map(String::from).collect::<Vec<_>>();
    let before = (names(&session), session.persistent_bytes());
    assert_short(step(&params, &mut session, false, absent_bytes() / 4));
    assert_eq!((names(&session), session.persistent_bytes()), before);
    run(&mut session, &infer, 3).expect("an earlier program");
    let program = step(&params, &mut session, true, 8).expect("a step that trains one layer");
    assert!(
        !names(&session)
            .iter()
            .any(|name| name.contains("first.weight."))
    );
    let x = arr2(&[[1.0f32, 2.0], [3.0, -1.0], [0.5, 0.5]]);
    let scale = arr0(0.0f32);
    let losses = [(); 3].map(|()| {
        let [loss, _] = session.run(&program, (&x, &scale)).expect("a step");
        loss.item()
    });
    assert!(losses[2] < losses[0], "{losses:?}");
}
