//! The training loop on several ranks: all of them end after the same step, because of whichever
//! rank.

use std::time::{Duration, Instant};

use ndarray::{Array1, Array2, s};
use slabwise::fit::{Better, End, Fit, Fitted};
use slabwise::{Error, Result, Session, Strategy, World};

use super::{batch, learner, on_each};

/// This rank's rows of a batch of eight.
fn own_batch(world: &World, seed: u64) -> (Array2<f32>, Array1<i32>) {
    let (x, labels) = batch(8, seed);
    let own = world.share(8);
    let x = x.slice(s![own.clone(), ..]).to_owned();
    (x, labels.slice(s![own]).to_owned())
}

/// The result of training on each of two ranks for at most four epochs of five steps, with the
/// callbacks that `with` adds.
fn fitted(
    with: impl for<'a> Fn(&World, Fit<'a, 1>) -> Fit<'a, 1> + Sync,
    steps: impl Fn(&World, u32) -> u64 + Sync,
) -> Vec<Result<Fitted>> {
    on_each(World::local(2).expect("a world"), |world| {
        let world = world.with_patience(Duration::from_secs(100));
        let (mut session, step) = learner(&world, 8)?;
        let fit = with(&world, Fit::new(&step).epochs(4));
        fit.run(&mut session, |epoch| {
            let seeds = 0..steps(&world, epoch);
            let world = &world;
            seeds.map(move |seed| own_batch(world, u64::from(epoch) * 10 + seed))
        })
    })
}

/// The errors of both ranks, which are found without waiting for one that is lost.
fn errors(
    with: impl for<'a> Fn(&World, Fit<'a, 1>) -> Fit<'a, 1> + Sync,
    steps: impl Fn(&World, u32) -> u64 + Sync,
) -> Vec<String> {
    let began = Instant::now();
    let all = fitted(with, steps);
    assert!(began.elapsed() < Duration::from_secs(60));
    let error = |result: Result<Fitted>| result.expect_err("a mistake").to_string();
    all.into_iter().map(error).collect()
}

/// Each rank validates its own rows, and all of them stop and save the best after the same epoch.
#[test]
fn ranks_decide_alike_about_epochs() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("best.safetensors");
    let ran = on_each(World::local(2).expect("a world"), |world| {
        let world = world.with_strategy(Strategy::ShardedState);
        let (mut session, step) = learner(&world, 8).expect("it compiles");
        // Alone, rank 0 would stop after the third epoch, and rank 1 never.
        let own = match world.rank() {
            0 => [1.0, 2.0, 3.0, 4.0, 5.0, 6.0],
            _ => [9.0, 6.0, 4.0, 4.0, 3.0, 0.0],
        };
        let mut values = own.into_iter();
        let fit = Fit::new(&step).epochs(6).patience(2).checkpoint_best(&path);
        let fitted = fit
            .validate_by(Better::Lower, |_| Ok(values.next().unwrap_or(f64::NAN)))
            .run(&mut session, |epoch| [own_batch(&world, u64::from(epoch))])
            .expect("it learns");
        let means: Vec<Option<f64>> = fitted.epochs.iter().map(|e| e.validation).collect();
        (fitted.end, means, fitted.best().map(|e| e.number))
    });
    let means = [5.0, 4.0, 3.5, 4.0, 4.0].map(Some).to_vec();
    assert_eq!(ran[0], (End::Patience, means, Some(3)));
    assert_eq!(ran[0], ran[1]);
    assert!(path.exists());
}

/// Only one rank has a callback, as one that prints or watches a clock.
#[test]
fn a_rank_that_stops_training_stops_it_on_all() {
    for rank in [0, 1] {
        let stopped = fitted(
            |world, fit| match world.rank() == rank {
                false => fit,
                true => fit.on_step(|_, step| {
                    if (step.epoch, step.number) == (2, 3) {
                        step.stop();
                    }
                    Ok(())
                }),
            },
            |_, _| 5,
        );
        for fitted in stopped {
            let fitted = fitted.expect("it learns");
            let steps: Vec<u64> = fitted.epochs.iter().map(|epoch| epoch.steps).collect();
            assert_eq!((fitted.end, steps), (End::Stopped, vec![5, 3]), "{rank}");
        }
        let stopped = fitted(
            |world, fit| match world.rank() == rank {
                false => fit,
                true => fit.on_epoch(|_, epoch| {
                    if epoch.number == 2 {
                        epoch.stop();
                    }
                    Ok(())
                }),
            },
            |_, _| 5,
        );
        for fitted in stopped {
            let fitted = fitted.expect("it learns");
            assert_eq!((fitted.end, fitted.epochs.len()), (End::Stopped, 2));
        }
    }
}

#[test]
fn an_error_of_one_rank_ends_training_on_all() {
    fn failing(_: &mut Session) -> Result<()> {
        Err(Error::Value("the log is full".into()))
    }
    type Add = for<'a> fn(Fit<'a, 1>) -> Fit<'a, 1>;
    // The place, and the callbacks of rank 0 and of rank 1: both validate, or neither.
    let cases: [(&str, Add, Add); 4] = [
        (
            "step 2 of epoch 1",
            |fit| fit.on_step(|s, _| failing(s)),
            |fit| fit,
        ),
        ("epoch 1", |fit| fit.on_epoch(|s, _| failing(s)), |fit| fit),
        (
            "epoch 1",
            |fit| fit.validate_by(Better::Lower, |s| failing(s).map(|()| 0.0)),
            |fit| fit.validate_by(Better::Lower, |_| Ok(1.0)),
        ),
        (
            "epoch 1",
            |fit| fit.checkpoint("/no such folder/a"),
            |fit| fit.checkpoint("/no such folder/a"),
        ),
    ];
    for (place, first, second) in cases {
        let all = errors(
            |world, fit| match world.rank() {
                0 => first(fit),
                _ => second(fit),
            },
            |_, _| 5,
        );
        let of_rank_0 = format!("fit: rank 0 of 2 has failed in {place}: {}", all[0]);
        assert_eq!(all[1], of_rank_0);
    }
}

#[test]
fn ranks_with_unequal_numbers_of_batches_are_an_error() {
    let steps = |world: &World, epoch| match (world.rank(), epoch) {
        (1, 2) => 3,
        _ => 5,
    };
    for error in errors(|_, fit| fit, steps) {
        assert!(
            error.contains("rank 1 of 2 has no batch for step 4 of epoch 2, and rank 0 has one"),
            "{error}"
        );
    }
}
