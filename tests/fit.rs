//! The training loop: its means, callbacks, validation, patience and checkpoints.

use std::cell::RefCell;

use ndarray::{Array1, Array2, arr0, arr1, s};
use slabwise::fit::{Better, End, Fit};
use slabwise::nn::Linear;
use slabwise::optim::{Plateau, Schedule, Sgd};
use slabwise::prelude::*;
use slabwise::tensor::{CrossEntropy, Reduction};

/// One weight w; the loss of a batch x is the mean of (w − x)², whose gradient is 2·(w − mean x).
struct One {
    session: Session,
    train: Program<1>,
    judge: Program<1>,
}

fn one(rate: f64) -> One {
    let params = Params::seeded(1);
    let w = params.root().param("w", (), Init::Constant(0.0));
    let mut session = Session::new(Device::Cpu, params)
        .expect("a session")
        .with_threads(1);
    let loss = |trace| {
        (Trace::input(trace, "x", F32, (Dim::bounded("batch", 8),)) - Trace::param(trace, &w))
            .square()
            .mean()
    };
    let trace = Trace::training();
    let error = loss(&trace);
    trace.minimize(error, Sgd::new(Schedule::manual(rate)));
    let train = session.compile(&trace, [error]).expect("it compiles");
    let trace = Trace::inference();
    let judge = session
        .compile(&trace, [loss(&trace)])
        .expect("it compiles");
    One {
        session,
        train,
        judge,
    }
}

fn weight(session: &Session) -> f32 {
    session.value("w").expect("it is there").sum()
}

/// Batches of these lengths, all of one number.
fn batches(lengths: &[usize], value: f32) -> Vec<(Array1<f32>,)> {
    lengths
        .iter()
        .map(|&n| (Array1::from_elem(n, value),))
        .collect()
}

#[test]
fn epochs_steps_and_means() {
    let One {
        mut session,
        train,
        judge,
    } = one(0.25);
    let (mut w, mut expected) = (0.0f64, Vec::new());
    for _ in 0..3 {
        let (mut sum, mut n) = (0.0, 0.0);
        for length in [8, 3] {
            sum += length as f64 * (w - 1.0) * (w - 1.0);
            n += length as f64;
            w -= 0.5 * (w - 1.0);
        }
        expected.push((sum / n, (w - 1.0) * (w - 1.0)));
    }
    let seen = RefCell::new(Vec::new());
    let fitted = Fit::new(&train)
        .epochs(3)
        .validate(&judge, Better::Lower, || batches(&[2, 2], 1.0))
        .on_step(|_, step| {
            seen.borrow_mut()
                .push((step.epoch, step.number, step.examples));
            Ok(())
        })
        .run(&mut session, |_| batches(&[8, 3], 1.0))
        .expect("it learns");
    assert_eq!(
        seen.into_inner(),
        [
            (1, 1, 8),
            (1, 2, 3),
            (2, 1, 8),
            (2, 2, 3),
            (3, 1, 8),
            (3, 2, 3)
        ]
    );
    assert_eq!((fitted.end, fitted.epochs.len()), (End::Epochs, 3));
    for (epoch, (loss, judged)) in fitted.epochs.iter().zip(expected) {
        assert!((epoch.loss - loss).abs() < 1e-6 && epoch.is_best && epoch.steps == 2);
        assert!((epoch.validation.expect("it was judged") - judged).abs() < 1e-6);
    }
    assert_eq!(fitted.best().map(|e| e.number), Some(3));
    assert!((f64::from(weight(&session)) - w).abs() < 1e-6);
}

#[test]
fn callbacks_reach_the_session_and_stop_the_loop() {
    let One {
        mut session, train, ..
    } = one(0.25);
    let fitted = Fit::new(&train)
        .epochs(10)
        .on_epoch(|session, epoch| {
            // With a rate of 0, weights do not change from the second epoch on.
            session.set_value("optim.lr", &arr0(0.0))?;
            if epoch.number == 4 {
                epoch.stop();
            }
            Ok(())
        })
        .run(&mut session, |_| batches(&[8], 2.0))
        .expect("it learns");
    assert_eq!(
        (fitted.end, fitted.epochs.len(), weight(&session)),
        (End::Stopped, 4, 1.0)
    );
    assert!(fitted.best().is_none());

    let fitted = Fit::new(&train)
        .epochs(10)
        .from_epoch(3)
        .on_step(|_, step| {
            if (step.epoch, step.number) == (4, 2) {
                step.stop();
            }
            Ok(())
        })
        .run(&mut session, |_| batches(&[1, 1, 1], 2.0))
        .expect("it runs");
    let made: Vec<(u32, u64)> = fitted.epochs.iter().map(|e| (e.number, e.steps)).collect();
    assert_eq!((fitted.end, made), (End::Stopped, vec![(3, 3), (4, 2)]));

    let failed = Fit::new(&train)
        .on_step(|_, _| Err(slabwise::Error::Value("enough".into())))
        .run(&mut session, |_| batches(&[1], 2.0));
    assert_eq!(failed.expect_err("it fails").to_string(), "enough");
}

#[test]
fn patience_ends_and_the_best_is_kept() {
    let folder = tempfile::tempdir().expect("a folder");
    let (best, last) = (
        folder.path().join("best.safetensors"),
        folder.path().join("last.safetensors"),
    );
    for (better, values) in [
        (Better::Lower, [3.0, f64::NAN, 2.0, 2.0, 2.5, 1.0]),
        (Better::Higher, [0.1, f64::NAN, 0.5, 0.5, 0.4, 0.9]),
    ] {
        let One {
            mut session, train, ..
        } = one(0.25);
        let mut judged = values.into_iter();
        let weights = RefCell::new(Vec::new());
        let fitted = Fit::new(&train)
            .epochs(6)
            .validate_by(better, |_| Ok(judged.next().unwrap_or(f64::NAN)))
            .patience(2)
            .checkpoint(&last)
            .checkpoint_best(&best)
            .on_epoch(|session, _| {
                weights.borrow_mut().push(weight(session));
                Ok(())
            })
            .run(&mut session, |_| batches(&[4], 1.0))
            .expect("it learns");
        // The loop stops before the sixth, which would be the best.
        assert_eq!(
            (
                fitted.end,
                fitted.epochs.len(),
                fitted.best().map(|e| e.number)
            ),
            (End::Patience, 5, Some(3))
        );
        let weights = weights.into_inner();
        for (path, at) in [(&best, 2), (&last, 4)] {
            session.load(path).expect("it was saved");
            assert_eq!(weight(&session), weights[at]);
        }
    }
}

/// A training that is resumed from its latest checkpoint decides as one that was not interrupted.
#[test]
fn a_resumed_training_goes_on_as_an_uninterrupted_one() {
    let plateau = || Plateau::new(0.25).patience(0).factor(0.5);
    let new = || {
        let params = Params::seeded(1);
        let w = params.root().param("w", (), Init::Constant(0.0));
        let mut session = Session::new(Device::Cpu, params).expect("a session");
        let trace = Trace::training();
        let x = trace.input("x", F32, (Dim::bounded("batch", 8),));
        let error = (x - trace.param(&w)).square().mean();
        trace.minimize(error, Sgd::new(plateau()));
        let train = session.compile(&trace, [error]).expect("it compiles");
        (session, train)
    };
    let folder = tempfile::tempdir().expect("a folder");
    let path = |name: &str| folder.path().join(format!("{name}.safetensors"));
    // The third is the best; two epochs after it are worse.
    let values = [4.0, 3.0, 1.0, 2.0, 1.5, 1.25, 0.5];
    let run = |session: &mut Session, train: &Program<1>, first: u32, last: u32, name: &str| {
        Fit::new(train)
            .from_epoch(first)
            .epochs(last)
            .on_epoch(|session, epoch| {
                let measure = values[epoch.number as usize - 1];
                session.observe(&plateau(), measure as f32).map(drop)
            })
            .checkpoint(path(name))
            .run(session, |_| batches(&[4], 1.0))
    };
    // What callbacks set is in the checkpoint of their epoch.
    let (mut whole, train) = new();
    run(&mut whole, &train, 1, 6, "whole").expect("it learns");
    let (mut part, train) = new();
    run(&mut part, &train, 1, 4, "part").expect("it learns");
    let (mut rest, train) = new();
    rest.load(path("part")).expect("it loads");
    run(&mut rest, &train, 5, 6, "rest").expect("it learns");
    for name in ["w", "optim.lr", "optim.plateau"] {
        let [a, b] = [&whole, &rest].map(|session| session.value(name).expect("it is there"));
        assert_eq!(a, b, "{name}");
    }

    // The best epoch and the patience are, too.
    let judged = |session: &mut Session, train: &Program<1>, first: u32, last: u32, name: &str| {
        let mut number = first as usize - 1;
        let fit = Fit::new(train).from_epoch(first).epochs(last).patience(3);
        fit.validate_by(Better::Lower, |_| {
            number += 1;
            Ok(values[number - 1])
        })
        .checkpoint(path(name))
        .checkpoint_best(path("best"))
        .run(session, |_| batches(&[4], 1.0))
        .expect("it learns")
    };
    let (mut part, train) = new();
    let fitted = judged(&mut part, &train, 1, 4, "part");
    assert_eq!(fitted.best().map(|e| e.number), Some(3));
    let best = std::fs::read(path("best")).expect("it is there");
    let (mut rest, train) = new();
    rest.load(path("part")).expect("it loads");
    let fitted = judged(&mut rest, &train, 5, 7, "part");
    assert_eq!((fitted.end, fitted.epochs.len()), (End::Patience, 2));
    assert!(fitted.best().is_none(), "the third stays the best");
    assert_eq!(std::fs::read(path("best")).expect("it is there"), best);
    // A training from the beginning forgets it.
    let fitted = judged(&mut rest, &train, 1, 1, "part");
    assert!(fitted.best().is_some());
}

#[test]
fn errors_of_fit() {
    let One {
        mut session,
        train,
        judge,
    } = one(0.25);
    let said = |result: Result<slabwise::fit::Fitted>| result.expect_err("a mistake").to_string();
    let none = "fit: the best epoch is decided by a validation, and none is given";
    assert_eq!(
        said(
            Fit::new(&train)
                .patience(3)
                .run(&mut session, |_| batches(&[1], 1.0))
        ),
        none
    );
    assert_eq!(
        said(Fit::new(&train).run(&mut session, |_| batches(&[], 1.0))),
        "fit: epoch 1 has no batches"
    );
    let nothing = Fit::new(&train).validate(&judge, Better::Lower, Vec::<(Array1<f32>,)>::new);
    assert_eq!(
        said(nothing.run(&mut session, |_| batches(&[1], 1.0))),
        "\"infer\" was given no batches to take the mean of"
    );
    assert!(
        said(Fit::new(&train).run(&mut session, |_| [(Array2::<f32>::zeros((2, 2)),)]))
            .contains("input \"x\"")
    );
    // An unreasonable rate; the error comes before a checkpoint is overwritten.
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("last.safetensors");
    let One {
        mut session, train, ..
    } = one(1e20);
    let wild = said(
        Fit::new(&train)
            .checkpoint(&path)
            .run(&mut session, |_| batches(&[4; 6], 1.0)),
    );
    assert!(
        wild.starts_with("fit: the loss of step 2 in epoch 1 is inf")
            || wild.starts_with("fit: the loss of step 3 in epoch 1 is"),
        "{wild}"
    );
    assert!(!path.exists());
    // An output that is no scalar has no mean.
    let trace = Trace::inference();
    let x = trace.input("x", F32, (4,));
    let wide = session.compile(&trace, [x * 2.0]).expect("it compiles");
    let text = session
        .mean(&wide, batches(&[4], 1.0))
        .expect_err("no scalar")
        .to_string();
    assert_eq!(text, "the first output is f32 [4], not an f32 scalar");
}

/// Batches and parts of batches with other numbers of labels that count have the mean of all labels.
#[test]
fn means_over_labels_that_are_not_ignored() {
    let options = |reduction| CrossEntropy {
        ignore: Some(-100),
        reduction,
        ..CrossEntropy::default()
    };
    fn count(labels: Tensor<'_>) -> Tensor<'_> {
        labels.not_equal(-100).cast(F32).sum()
    }
    let x = Array2::from_shape_fn((8, 3), |(i, j)| ((i * 5 + j * 3) % 7) as f32 / 7.0);
    // Three labels in the first half, one in the second.
    let labels = arr1(&[0, 1, -100, 2, -100, -100, 1, -100]);
    // The loss of a step in `parts`, and the weight after it.
    let trained = |parts: usize, of_all: bool| {
        let params = Params::seeded(1);
        let layer = Linear::new(&params.root() / "a", 3, 3);
        let trace = Trace::training();
        let x_all = trace.input("x", F32, (8, 3));
        let labels_all = trace.input("labels", I32, (8,));
        let each = count(labels_all) / parts as f32;
        let (xs, all) = (x_all.split(0, parts), labels_all.split(0, parts));
        let loss = trace.minimize_in_parts(parts, Sgd::new(1.0), |i| {
            let logits = xs[i].apply(&layer);
            match of_all {
                true => logits.cross_entropy_with(all[i], options(Reduction::Sum)) / each,
                false => logits.cross_entropy_with(all[i], options(Reduction::Mean)),
            }
        });
        let mut session = Session::new(Device::Cpu, params).expect("a session");
        let step = session.compile(&trace, [loss]).expect("it compiles");
        let loss = session.run(&step, (&x, &labels)).expect("a step")[0].item();
        (loss, session.value("a.weight").expect("a weight"))
    };
    let off = |(loss, weight): &(f32, ndarray::ArrayD<f32>),
               other: &(f32, ndarray::ArrayD<f32>)| {
        let most = (weight - &other.1).fold(0.0f32, |most, x| most.max(x.abs()));
        most.max((loss - other.0).abs())
    };
    let whole = trained(1, false);
    for parts in [1, 2] {
        let found = off(&trained(parts, true), &whole);
        assert!(found < 1e-6, "{found} in {parts} parts");
    }
    let of_means = off(&trained(2, false), &whole);
    assert!(
        of_means > 1e-2,
        "the mean of the means of parts: {of_means}"
    );

    let mut session = Session::new(Device::Cpu, Params::seeded(0)).expect("a session");
    let trace = Trace::inference();
    let (logits, y) = (
        trace.input("x", F32, (4, 3)),
        trace.input("labels", I32, (4,)),
    );
    let loss = logits.cross_entropy_with(y, options(Reduction::Sum));
    let judge = session
        .compile(&trace, [loss, count(y)])
        .expect("it compiles");
    let trace = Trace::inference();
    let (logits, y) = (
        trace.input("x", F32, (8, 3)),
        trace.input("labels", I32, (8,)),
    );
    let loss = logits.cross_entropy_with(y, options(Reduction::Mean));
    let at_once = session.compile(&trace, [loss]).expect("it compiles");
    let at_once = f64::from(session.run(&at_once, (&x, &labels)).expect("a run")[0].item());
    let half = |from: usize| {
        let rows = from..from + 4;
        (
            x.slice(s![rows.clone(), ..]).to_owned(),
            labels.slice(s![rows]).to_owned(),
        )
    };
    let mean = session.mean_of_sums(&judge, [half(0), half(4)]);
    assert!((mean.expect("labels") - at_once).abs() < 1e-6);
    let none = (x.slice(s![..4, ..]).to_owned(), arr1(&[-100; 4]));
    let said = session.mean_of_sums(&judge, [none]).expect_err("no labels");
    assert!(said.to_string().contains("no elements"), "{said}");
}
