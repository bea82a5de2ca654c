//! Averages, rounding errors and random numbers after weights are loaded or set, and the advice of
//! errors of loading.

use std::path::PathBuf;

use ndarray::{ArrayD, arr1};
use slabwise::optim::{Adam, Optimizer, Sgd};
use slabwise::params::Param;
use slabwise::prelude::*;
use slabwise::weights::{LoadOptions, Rules, Weights};
use tempfile::TempDir;

/// Two weights of three elements, 1 at first, whose gradients are 1.
fn learner(dtype: DType, optimizer: impl Optimizer) -> (Session, Program<1>) {
    let params = Params::seeded(4).stored_in(dtype);
    let [a, b] = declared(&params);
    let trace = Trace::training();
    let loss = trace.param(&a).sum() + trace.param(&b).sum();
    trace.minimize(loss, optimizer);
    let mut session = Session::new(Device::Cpu, params).expect("a session");
    let step = session.compile(&trace, [loss]).expect("it compiles");
    (session, step)
}

fn declared(params: &Params) -> [Param; 2] {
    ["a", "b"].map(|name| params.root().param(name, (3,), Init::Constant(1.0)))
}

/// A session without programs, all of whose weights are this number.
fn constant(dtype: DType, names: &[&str], value: f32) -> Session {
    let params = Params::seeded(0).stored_in(dtype);
    for name in names {
        params.root().param(name, (3,), Init::Constant(value));
    }
    Session::new(Device::Cpu, params).expect("a session")
}

/// A file that a session without programs saved.
fn file(folder: &TempDir, names: &[&str], value: f32) -> PathBuf {
    let path = folder.path().join("weights.safetensors");
    let mut session = constant(F32, names, value);
    let trace = Trace::inference();
    let one = trace.ones((1,));
    session.compile(&trace, [one]).expect("it compiles");
    session.save(&path).expect("it saves");
    path
}

fn value(session: &Session, name: &str) -> ArrayD<f32> {
    session.value(name).expect("it is there")
}

/// All elements of a value, which are equal.
fn one(session: &Session, name: &str) -> f32 {
    let all = value(session, name);
    assert!(all.iter().all(|x| *x == all[[0]]), "{name}: {all}");
    all[[0]]
}

#[test]
fn rounding_errors_of_weights_end_with_the_weights() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = file(&folder, &["a", "b"], 0.0);
    let only_a = folder.path().join("a.safetensors");
    let mut some = constant(F32, &["a"], 0.0);
    let trace = Trace::inference();
    let ones = trace.ones((1,));
    some.compile(&trace, [ones]).expect("it compiles");
    some.save(&only_a).expect("it saves");
    type Change<'a> = Box<dyn Fn(&mut Session) + 'a>;
    let whole: [Change<'_>; 5] = [
        Box::new(|s| s.load_weights(&path).expect("it loads")),
        Box::new(|s| {
            s.load_with(&path, &LoadOptions::default().allow_missing())
                .map(drop)
                .expect("it loads");
        }),
        Box::new(|s| {
            let weights = Weights::open(&path).expect("it opens");
            s.load_from(&weights, &Rules::new()).expect("it fits");
        }),
        Box::new(|s| {
            for name in ["a", "b"] {
                s.set_value(name, &arr1(&[0.0f32; 3])).expect("it fits");
            }
        }),
        Box::new(|s| {
            s.load_with(&only_a, &LoadOptions::weights().allow_missing())
                .expect("it loads");
            s.copy_values("a", "b").expect("it copies");
        }),
    ];
    for (at, change) in whole.iter().enumerate() {
        for states in [F32, BF16] {
            let optimizer = Sgd::new(1e-4).master_weights().states_in(states);
            let (mut session, step) = learner(BF16, optimizer);
            for _ in 0..10 {
                session.run(&step, ()).expect("a step");
            }
            // Ten steps are below the resolution of the weight.
            assert_eq!(one(&session, "a"), 1.0);
            assert!((one(&session, "remainder.a") + 1e-3).abs() < 1e-5);
            change(&mut session);
            session.run(&step, ()).expect("a step");
            for name in ["a", "b"] {
                let sum = one(&session, name) + one(&session, &format!("remainder.{name}"));
                assert!(
                    (sum + 1e-4).abs() < 1e-6,
                    "{at}, {name}: {sum} is not one step from 0"
                );
            }
        }
    }
    // The rounding error of a weight that is not in the file stays, and so does one in the file.
    let (mut session, step) = learner(BF16, Sgd::new(1e-4).master_weights());
    for _ in 0..10 {
        session.run(&step, ()).expect("a step");
    }
    let kept = one(&session, "remainder.b");
    let some = LoadOptions::weights().allow_missing();
    session.load_with(&only_a, &some).expect("it loads");
    assert_eq!(one(&session, "remainder.a"), 0.0);
    assert_eq!(one(&session, "remainder.b"), kept);
    let whole = folder.path().join("whole.safetensors");
    session.save(&whole).expect("it saves");
    let (mut again, _) = learner(BF16, Sgd::new(1e-4).master_weights());
    again.load(&whole).expect("it loads");
    assert_eq!(one(&again, "remainder.b"), kept);
}

#[test]
fn averages_follow_the_weights_that_a_file_has() {
    let folder = tempfile::tempdir().expect("a folder");
    let trained = || {
        let (mut session, step) = learner(F32, Sgd::new(0.25).ema(0.5));
        for _ in 0..2 {
            session.run(&step, ()).expect("a step");
        }
        assert_eq!((one(&session, "b"), one(&session, "ema.b")), (0.5, 0.6875));
        session
    };
    let both = file(&folder, &["a", "b"], 7.0);
    let mut session = trained();
    let options = LoadOptions::default().allow_missing();
    let loaded = session.load_with(&both, &options).expect("it loads");
    assert!(loaded.missing.contains(&"ema.a".to_string()), "{loaded:?}");
    assert_eq!((one(&session, "a"), one(&session, "ema.a")), (7.0, 7.0));

    let first = file(&folder, &["a"], 7.0);
    for options in [LoadOptions::default(), LoadOptions::weights()] {
        let mut session = trained();
        let options = options.allow_missing();
        session.load_with(&first, &options).expect("it loads");
        assert_eq!((one(&session, "a"), one(&session, "ema.a")), (7.0, 7.0));
        assert_eq!(
            (one(&session, "b"), one(&session, "ema.b")),
            (0.5, 0.6875),
            "the file does not have it"
        );
    }
    let mut session = trained();
    let weights = Weights::open(&first).expect("it opens");
    let error = session.load_from(&weights, &Rules::new());
    assert!(error.is_err());
    assert_eq!(one(&session, "ema.b"), 0.6875);
}

#[test]
fn advice_for_files_whose_states_differ() {
    let folder = tempfile::tempdir().expect("a folder");
    let said = |session: &mut Session, path: &PathBuf| {
        let error = session.load(path).map(|_| ()).expect_err("it differs");
        error.to_string()
    };
    // Weights alone, for a session that trains.
    let path = file(&folder, &["a", "b"], 7.0);
    let (mut session, _) = learner(F32, Adam::new(0.1));
    let text = said(&mut session, &path);
    assert!(text.contains("missing: `adam.m.a`"), "{text}");
    assert!(text.contains("Session::load_weights"), "{text}");
    assert!(!text.contains("architecture"), "{text}");
    // The states of another optimizer.
    let (by_sgd, _) = learner(F32, Sgd::new(0.1).momentum(0.9));
    let path = folder.path().join("sgd.safetensors");
    by_sgd.save(&path).expect("it saves");
    let text = said(&mut session, &path);
    assert!(text.contains("Session::load_weights"), "{text}");
    assert!(!text.contains("architecture"), "{text}");
    // A weight that is missing as well.
    let path = file(&folder, &["a"], 7.0);
    let text = said(&mut session, &path);
    assert!(text.contains("architecture"), "{text}");
}

#[test]
fn advice_to_rename_is_given_if_that_would_help() {
    let folder = tempfile::tempdir().expect("a folder");
    let load = |there: &[&str], here: &[&str]| {
        let path = file(&folder, there, 1.0);
        let mut session = constant(F32, here, 0.0);
        let error = session
            .load_weights(&path)
            .map(|_| ())
            .expect_err("it differs");
        error.to_string()
    };
    let text = load(&["module.x.w", "module.b"], &["x.w", "b"]);
    assert!(text.contains("prefix(\"module.\", \"\")"), "{text}");
    let text = load(&["x.w", "b"], &["encoder.x.w", "encoder.b"]);
    assert!(text.contains("prefix(\"\", \"encoder.\")"), "{text}");
    // Only a part of a name agrees.
    let text = load(&["unweight"], &["weight"]);
    assert!(!text.contains("prefix("), "{text}");
    // The rest of the names would not fit.
    let text = load(&["old.w", "same.b"], &["w", "same.b"]);
    assert!(text.contains("prefix(\"old.\", \"\")"), "{text}");
    let text = load(&["same.w", "same.b"], &["w", "same.b"]);
    assert!(!text.contains("prefix("), "{text}");
}

#[test]
fn training_does_not_change_the_random_numbers_of_inference() {
    let params = Params::seeded(7);
    let weight = params.root().param("w", (8,), Init::Constant(1.0));
    let mut session = Session::new(Device::Cpu, params).expect("a session");
    let trace = Trace::inference();
    let noise = trace.normal((4,));
    let draw = session.compile(&trace, [noise]).expect("it compiles");
    let trace = Trace::training();
    let loss = trace.param(&weight).dropout(0.5).sum();
    trace.minimize(loss, Sgd::new(0.1));
    let step = session.compile(&trace, [loss]).expect("it compiles");
    let numbers = |session: &mut Session| {
        let drawn = session.run(&draw, ()).expect("a run");
        drawn[0].array::<f32>().expect("f32")
    };
    let before = numbers(&mut session);
    session.run(&step, ()).expect("a step");
    assert_eq!(numbers(&mut session), before);
}
