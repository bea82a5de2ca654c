//! Training on several ranks of one process: the same bits in worlds of every size, faults that
//! every rank reports, and ranks that run different programs.

#[path = "ranks/fit.rs"]
mod fit;
#[path = "ranks/mesh.rs"]
mod mesh;
#[path = "ranks/models.rs"]
mod models;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use ndarray::{Array1, Array2, s};
use slabwise::nn::{LayerNorm, Linear};
use slabwise::optim::{AdamW, Sgd};
use slabwise::prelude::*;
use slabwise::settings::NanCheck;
use slabwise::{Error, Strategy, World};
use slabwise_models::noise;

const INPUTS: usize = 12;
const CLASSES: usize = 5;

/// Weights that are sent by themselves, one that worlds of 2, 3, 4 and 6 ranks divide (131 · 132 ·
/// 4 bytes) and one that none does (131 · 131 · 4), and small ones that share a bucket, of which the
/// last has an odd length.
const WIDTH: usize = 132;
const ODD: usize = 131;

struct Net {
    stem: Linear,
    odd: Linear,
    body: Linear,
    norm: LayerNorm,
    head: Linear,
}

impl Net {
    fn new(params: &Params) -> Net {
        let at = &params.root();
        Net {
            stem: Linear::new(at / "stem", INPUTS, ODD),
            odd: Linear::new(at / "odd", ODD, ODD),
            body: Linear::new(at / "body", ODD, WIDTH),
            norm: LayerNorm::new(at / "norm", WIDTH),
            head: Linear::new(at / "head", WIDTH, CLASSES),
        }
    }
}

impl Module for Net {
    fn forward<'t>(&self, x: Tensor<'t>) -> Tensor<'t> {
        let x = x.apply(&self.stem).gelu().apply(&self.odd);
        let x = x.gelu().apply(&self.body);
        x.apply(&self.norm).apply(&self.head)
    }
}

fn batch(n: usize, seed: u64) -> (Array2<f32>, Array1<i32>) {
    let mut draw = noise(seed);
    let x = Array2::from_shape_simple_fn((n, INPUTS), || draw() * 2.0 - 1.0);
    let labels = Array1::from_shape_fn(n, |i| ((i as u64 * 7 + seed) % CLASSES as u64) as i32);
    (x, labels)
}

/// All weights and states of a session, as bits.
fn bits(session: &Session) -> Vec<(String, Vec<u32>)> {
    let names: Vec<String> = session.names().map(str::to_string).collect();
    let value = |name: String| {
        let values = session.value(&name).expect("it is there");
        (name, values.iter().map(|v| v.to_bits()).collect())
    };
    names.into_iter().map(value).collect()
}

/// The data in the file of all weights and states, which rank 0 writes.
fn saved(session: &Session) -> Option<Vec<u8>> {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("all.safetensors");
    session.save(&path).expect("it is saved");
    let is_first = session.world().rank() == 0;
    is_first.then(|| {
        let file = std::fs::read(&path).expect("it is there");
        let header = u64::from_le_bytes(file[..8].try_into().expect("8 bytes"));
        file[8 + header as usize..].to_vec()
    })
}

/// Worlds of these sizes with each strategy.
fn both(worlds: &[usize]) -> impl Iterator<Item = (usize, Strategy)> {
    let strategies = [Strategy::Replicated, Strategy::ShardedState];
    let each = move |&ranks: &usize| strategies.map(|strategy| (ranks, strategy));
    worlds.iter().flat_map(each)
}

/// The results of every rank of a world, each on a thread of its own.
fn on_each<R: Send>(worlds: Vec<World>, run: impl Fn(World) -> R + Sync) -> Vec<R> {
    std::thread::scope(|scope| {
        let run = &run;
        let ranks: Vec<_> = worlds
            .into_iter()
            .map(|w| scope.spawn(move || run(w)))
            .collect();
        ranks
            .into_iter()
            .map(|rank| rank.join().expect("no panic"))
            .collect()
    })
}

/// A session of a world, and its step on its rows of a batch of `rows`, in as many parts as it has
/// grains.
fn learner(world: &World, rows: usize) -> Result<(Session, Program<1>)> {
    let params = Params::seeded(3);
    let net = Net::new(&params);
    let session = Session::new(Device::Cpu, params)?.with_threads(1);
    let mut session = session.on(world.clone())?;
    let trace = Trace::training();
    let own = world.share(rows).len();
    let (x, labels) = (
        trace.input("x", F32, (own, INPUTS)),
        trace.input("labels", I32, (own,)),
    );
    let parts = world.grains_per_rank();
    let (x, labels) = (x.split(0, parts), labels.split(0, parts));
    let loss = trace.minimize_in_parts(parts, AdamW::new(1e-2), |i| {
        // A draw before any parameter is read, and one after.
        let x = x[i].dropout(0.2).apply(&net);
        x.dropout(0.1).cross_entropy(labels[i])
    });
    let step = session.compile(&trace, [loss])?;
    Ok((session, step))
}

/// The loss of a step on a rank's rows of a batch.
fn run_step(session: &mut Session, step: &Program<1>, rows: usize, seed: u64) -> Result<f32> {
    let (x, labels) = batch(rows, seed);
    let own = session.world().share(rows);
    let x = x.slice(s![own.clone(), ..]).to_owned();
    let labels = labels.slice(s![own]).to_owned();
    let loss = session.run(step, (&x, &labels))?[0].item();
    assert_eq!(session.last_run().peak_slab_bytes, step.plan().slab_bytes());
    Ok(loss)
}

/// Trains for some steps.
fn train(world: &World, rows: usize, steps: u64) -> Result<(Session, Vec<f32>)> {
    let (mut session, step) = learner(world, rows)?;
    let losses = (0..steps).map(|seed| run_step(&mut session, &step, rows, seed));
    let losses = losses.collect::<Result<_>>()?;
    Ok((session, losses))
}

#[test]
fn worlds_of_every_size_have_the_same_bits() {
    for (grains, worlds) in [(4, vec![1, 2, 4]), (6, vec![1, 3, 6])] {
        let mut expected = None;
        for (ranks, strategy) in both(&worlds) {
            let worlds = World::local(ranks).expect("a world");
            let ran = on_each(worlds, |world| {
                let world = world.with_grains(grains).expect("they share them");
                let world = world.with_strategy(strategy);
                let (session, losses) = train(&world, 24, 4).expect("it trains");
                let losses: Vec<u32> = losses.iter().map(|l| l.to_bits()).collect();
                (saved(&session), losses)
            });
            for (rank, (file, losses)) in ran.into_iter().enumerate() {
                let (first, expected) =
                    expected.get_or_insert_with(|| (file.clone(), losses.clone()));
                assert_eq!(
                    &losses, expected,
                    "losses of rank {rank} of {ranks}, {strategy:?}"
                );
                assert!(
                    rank > 0 || file == *first,
                    "weights or state of {ranks} ranks and {grains} grains, {strategy:?}"
                );
            }
        }
    }
}

#[test]
fn random_numbers_follow_from_the_grain() {
    // Of each rank, numbers drawn outside of all parts and in each part, in two steps.
    let drawn = |ranks: usize| {
        let worlds = World::local(ranks).expect("a world");
        on_each(worlds, |world| {
            let world = world.with_grains(4).expect("they share them");
            let params = Params::seeded(3);
            let weight = params.root().param("weight", [3], Init::Constant(1.0));
            let session = Session::new(Device::Cpu, params).expect("a session");
            let mut session = session.on(world.clone()).expect("it joins");
            let trace = Trace::training();
            let outside = trace.uniform((3,));
            let parts = world.grains_per_rank();
            let mut inside = Vec::new();
            trace.minimize_in_parts(parts, Sgd::new(0.1), |_| {
                let both = [trace.uniform((3,)), trace.uniform((3,))];
                inside.extend(both);
                (trace.param(&weight) * both[0] * both[1]).sum()
            });
            let outputs: Vec<Tensor> = std::iter::once(outside).chain(inside).collect();
            let joined = trace.concat(&outputs, 0);
            let step = session.compile(&trace, [joined]).expect("it compiles");
            let run = |_| session.run(&step, ()).expect("it runs")[0].array::<f32>();
            (0..2)
                .map(run)
                .map(|a| a.expect("f32").into_iter().collect())
                .collect::<Vec<Vec<f32>>>()
        })
    };
    let [alone, two, four] = [1, 2, 4].map(drawn);
    for step in 0..2 {
        let grain = |all: &[Vec<Vec<f32>>], ranks: usize, grain: usize| {
            let each = 4 / ranks;
            let at = 3 + 6 * (grain % each);
            all[grain / each][step][at..at + 6].to_vec()
        };
        let numbers: Vec<Vec<f32>> = (0..4).map(|g| grain(&alone, 1, g)).collect();
        for (g, expected) in numbers.iter().enumerate() {
            assert_eq!(&grain(&two, 2, g), expected, "grain {g} on 2 ranks");
            assert_eq!(&grain(&four, 4, g), expected, "grain {g} on 4 ranks");
        }
        // No number is drawn twice: not in two grains, by two draws, or outside and inside.
        let mut all: Vec<u32> = numbers.concat().iter().map(|x| x.to_bits()).collect();
        all.extend(alone[0][step][..3].iter().map(|x| x.to_bits()));
        all.extend(two[1][step][..3].iter().map(|x| x.to_bits()));
        let count = all.len();
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), count);
    }
    assert_ne!(alone[0][0], alone[0][1], "another step draws other numbers");
}

/// Runs steps of a batch whose rows the ranks share unevenly; the weights of rank 0.
fn uneven(worlds: Vec<World>, sizes: &[usize]) -> Vec<f32> {
    let mut all = on_each(worlds, |world| {
        let params = Params::seeded(3);
        let net = Net::new(&params);
        let mut session = Session::new(Device::Cpu, params)?.on(world.clone())?;
        let trace = Trace::training();
        let rows = Dim::bounded("batch", 16);
        let (x, labels) = (
            trace.input("x", F32, (rows, INPUTS)),
            trace.input("labels", I32, (rows,)),
        );
        let loss = x.apply(&net).cross_entropy(labels);
        trace.minimize(loss, Sgd::new(0.1));
        let step = session.compile(&trace, [loss])?;
        for (seed, &rows) in (0..).zip(sizes) {
            let (x, labels) = batch(rows, seed);
            let own = world.share(rows);
            let x = x.slice(s![own.clone(), ..]).to_owned();
            session.run(&step, (&x, &labels.slice(s![own]).to_owned()))?;
        }
        let names: Vec<String> = session.names().map(str::to_string).collect();
        let value = |name: &String| session.value(name).expect("it is there");
        Ok::<_, Error>(names.iter().flat_map(value).collect::<Vec<f32>>())
    });
    all.swap_remove(0).expect("it trains")
}

#[test]
fn uneven_shares_take_the_step_of_the_whole_batch() {
    let sizes = [10, 7, 16, 4];
    let whole = uneven(vec![World::alone()], &sizes);
    for ranks in [2, 3, 4] {
        let shared = uneven(World::local(ranks).expect("a world"), &sizes);
        let far = whole.iter().zip(&shared).map(|(a, b)| (a - b).abs());
        let far = far.fold(0.0, f32::max);
        assert!(far < 2e-6, "{ranks} ranks are off by {far}");
        assert_eq!(whole.len(), shared.len());
    }
}

#[test]
fn a_fault_on_one_rank_fails_the_step_on_all_and_changes_nothing() {
    let worlds = World::local(3).expect("a world");
    let ran = on_each(worlds, |world| {
        let params = Params::seeded(3);
        let net = Net::new(&params);
        let mut session = Session::new(Device::Cpu, params)?.on(world.clone())?;
        let trace = Trace::training();
        let (x, labels) = (
            trace.input("x", F32, (4, INPUTS)),
            trace.input("labels", I32, (4,)),
        );
        let loss = x.apply(&net).cross_entropy(labels);
        trace.minimize(loss, Sgd::new(0.1));
        let step = session.compile(&trace, [loss])?;
        let (x, mut labels) = batch(4, 1);
        let start = bits(&session);
        let mut faults = Vec::new();
        // A label out of range on rank 1; then an input of a wrong shape on rank 2.
        labels[2] = if world.rank() == 1 { 99 } else { 0 };
        faults.push(
            session
                .run(&step, (&x, &labels))
                .map(drop)
                .expect_err("a fault")
                .to_string(),
        );
        labels[2] = 0;
        let wrong = Array2::<f32>::zeros((3, INPUTS));
        let fed = if world.rank() == 2 { &wrong } else { &x };
        faults.push(
            session
                .run(&step, (fed, &labels))
                .map(drop)
                .expect_err("a fault")
                .to_string(),
        );
        assert!(bits(&session) == start, "a weight changed");
        session.run(&step, (&x, &labels))?;
        assert!(bits(&session) != start, "no weight changed");
        Ok::<_, Error>(faults)
    });
    for (rank, faults) in ran.into_iter().enumerate() {
        let faults = faults.expect("the next step is made");
        assert!(faults[0].contains("index 99"), "rank {rank}: {}", faults[0]);
        assert!(
            faults[1].contains("shape [3, 12]"),
            "rank {rank}: {}",
            faults[1]
        );
        assert_eq!(
            faults[0].contains("rank 1 of 3 has failed"),
            rank != 1,
            "{}",
            faults[0]
        );
    }
}

#[test]
fn a_nan_of_one_rank_ends_the_run_on_all_and_changes_nothing() {
    let worlds = World::local(2).expect("a world");
    let ran = on_each(worlds, |world| {
        let params = Params::seeded(3);
        let layer = Linear::without_bias(&params.root() / "layer", 4, 3);
        let session = Session::new(Device::Cpu, params)?.with_nan_check(NanCheck::Nan);
        let mut session = session.on(world.clone())?;
        let trace = Trace::training();
        let x = trace.input("x", F32, (2, 4));
        let y = x.apply(&layer);
        // The ranks have exchanged values before the gradient of the root is computed.
        let all = x.sum().sum_over_ranks();
        let loss = (y.square().sum() * all).sqrt();
        trace.minimize(loss, Sgd::new(0.1));
        let step = session.compile(&trace, [loss])?;
        let start = bits(&session);
        // On rank 1 the gradient of the root of 0 is infinite, and 0 times that is NaN.
        let rank = world.rank() as f32;
        let x = Array2::<f32>::from_elem((2, 4), 1.0 - rank);
        let error = session.run(&step, &x).map(drop).expect_err("NaN");
        assert!(bits(&session) == start, "a weight changed");
        session.run(&step, Array2::<f32>::ones((2, 4)))?;
        assert!(bits(&session) != start, "no weight changed");
        Ok::<_, Error>(error.to_string())
    });
    for (rank, error) in ran.into_iter().enumerate() {
        let error = error.expect("the next step is made");
        assert!(
            error.contains("is NaN, the first of"),
            "rank {rank}: {error}"
        );
        let shared = "rank 1 of 2 has failed in this run";
        assert_eq!(error.contains(shared), rank == 0, "rank {rank}: {error}");
    }
}

/// Trains on one world, saves, and goes on with the file on another; the file at the end.
fn resumed(first: (usize, Strategy), second: (usize, Strategy)) -> Vec<u8> {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("between.safetensors");
    let run = |(ranks, strategy): (usize, Strategy), resumes: bool| {
        let worlds = World::local(ranks).expect("a world");
        let mut files = on_each(worlds, |world| {
            let world = world.with_grains(4).expect("they share them");
            let (mut session, step) = learner(&world.with_strategy(strategy), 24)?;
            if resumes {
                session.load(&path)?;
            }
            for seed in 0..3 {
                run_step(&mut session, &step, 24, seed + 3 * u64::from(resumes))?;
            }
            if !resumes {
                session.save(&path)?;
            }
            Ok::<_, Error>(saved(&session))
        });
        files
            .swap_remove(0)
            .expect("it trains")
            .expect("the file of rank 0")
    };
    run(first, false);
    run(second, true)
}

#[test]
fn each_rank_holds_a_padded_part_of_the_state_of_any_large_weight() {
    let states = |ranks: usize, strategy: Strategy| {
        let worlds = World::local(ranks).expect("a world");
        let ran = on_each(worlds, |world| {
            let (session, step) = learner(&world.with_strategy(strategy), 24)?;
            let lengths = [
                "adamw.m.odd.weight",
                "adamw.v.body.weight",
                "adamw.m.stem.weight",
            ];
            let lengths = lengths.map(|name| session.value(name).map(|state| state.len()));
            let planned = step.plan().persistent();
            let planned = planned.weights + planned.state;
            // Each variable is rounded up to its alignment.
            let most = planned + 128 * session.names().count() as u64;
            assert!((planned..most).contains(&session.persistent_bytes()));
            let [odd, body, stem] = lengths;
            Ok::<_, Error>(([odd?, body?, stem?], planned))
        });
        let mut ran = ran.into_iter().map(|ran| ran.expect("it compiles"));
        let first = ran.next().expect("a rank");
        assert!(ran.all(|other| other == first), "ranks hold as much");
        first
    };
    let (odd, body, stem) = (ODD * ODD, ODD * WIDTH, INPUTS * ODD);
    let (whole, replicated) = states(2, Strategy::Replicated);
    assert_eq!(whole, [odd, body, stem]);
    for ranks in [2, 4] {
        let (parts, bytes) = states(ranks, Strategy::ShardedState);
        assert_eq!(parts, [odd.div_ceil(ranks), body / ranks, stem]);
        // Two numbers of state for each element.
        let saved = 8 * (odd + body - parts[0] - parts[1]) as u64;
        assert_eq!(bytes + saved, replicated);
    }
}

#[test]
fn a_world_goes_on_with_the_file_of_another() {
    let [all, parts] = [Strategy::Replicated, Strategy::ShardedState];
    let expected = resumed((1, all), (1, all));
    for (first, second) in [
        ((4, parts), (2, parts)),
        ((2, all), (4, parts)),
        ((4, parts), (1, all)),
    ] {
        let file = resumed(first, second);
        assert!(file == expected, "{first:?}, then {second:?}");
    }
}

#[test]
fn different_programs_are_refused() {
    let worlds = World::local(2).expect("a world");
    let ran = on_each(worlds, |world| {
        let params = Params::seeded(3);
        let layer = Linear::new(&params.root() / "layer", 4, 3 + world.rank());
        let mut session = Session::new(Device::Cpu, params)?.on(world)?;
        let trace = Trace::training();
        let loss = trace.input("x", F32, (2, 4)).apply(&layer).square().mean();
        trace.minimize(loss, Sgd::new(0.1));
        session.compile(&trace, [loss]).map(drop)
    });
    for ran in ran {
        let error = ran.expect_err("they differ").to_string();
        assert!(
            error.contains("does not run the program of the others")
                && error.contains("[3, 4]")
                && error.contains("[4, 4]"),
            "{error}"
        );
    }
}

/// The errors of two ranks that compile a step with these seeds, initial values, learning rates and
/// axes.
fn compiled_with(
    seeds: [u64; 2],
    inits: [f32; 2],
    rates: [f32; 2],
    axes: [usize; 2],
) -> Vec<Error> {
    let worlds = World::local(2).expect("a world");
    let ran = on_each(worlds, |world| {
        let at = world.rank();
        let params = Params::seeded(seeds[at]);
        let init = Init::Constant(inits[at]);
        let weight = params.root().param("weight", [4, 4, 4], init);
        let mut session = Session::new(Device::Cpu, params)?.on(world)?;
        let trace = Trace::training();
        let x = trace.input("x", F32, (4, 4, 4));
        let y = x * trace.param(&weight).transpose(axes[at], axes[at] + 1);
        let loss = (y * x).square().mean();
        trace.minimize(loss, Sgd::new(rates[at]));
        session.compile(&trace, [loss]).map(drop)
    });
    let ran = ran.into_iter();
    ran.map(|ran| ran.expect_err("they differ")).collect()
}

#[test]
fn ranks_with_other_constants_or_seeds_are_refused() {
    for (errors, parts) in [
        (
            compiled_with([3, 4], [1.0; 2], [0.1; 2], [0; 2]),
            ["seed 4 on rank 1 and 3 on rank 0", "Params::seeded"],
        ),
        (
            compiled_with([3; 2], [1.0, 1.5], [0.1; 2], [0; 2]),
            ["Constant(1.0)", "Constant(1.5)"],
        ),
        (
            compiled_with([3; 2], [1.0; 2], [0.003, 0.021], [0; 2]),
            ["0.003", "0.021"],
        ),
        (
            compiled_with([3; 2], [1.0; 2], [0.1; 2], [0, 1]),
            ["Permute", "on rank 1"],
        ),
    ] {
        for error in errors {
            let error = error.to_string();
            assert!(parts.iter().all(|part| error.contains(part)), "{error}");
        }
    }
}

#[test]
fn an_error_of_one_rank_in_a_compilation_is_reported_on_all() {
    for mistaken in [true, false] {
        let worlds = World::local(3).expect("a world");
        let ran = on_each(worlds, |world| {
            let is_last = world.rank() == 2;
            let world = world.with_patience(Duration::from_secs(60));
            let params = Params::seeded(3);
            let layer = Linear::new(&params.root() / "layer", 4, 3);
            let mut session = Session::new(Device::Cpu, params)?.on(world)?;
            if is_last && !mistaken {
                session = session.with_budget(Bytes(16));
            }
            let mut compile = |inputs| {
                let trace = Trace::training();
                let x = trace.input("x", F32, (2, inputs));
                let loss = x.apply(&layer).square().mean();
                trace.minimize(loss, Sgd::new(0.1));
                session.compile(&trace, [loss])
            };
            let begun = Instant::now();
            let wrong = if is_last && mistaken { 5 } else { 4 };
            let error = compile(wrong).map(drop).expect_err("an error of rank 2");
            assert!(begun.elapsed() < Duration::from_secs(30));
            // The next program is compiled, and runs.
            if mistaken {
                let step = compile(4)?;
                session.run(&step, Array2::<f32>::ones((2, 4)))?;
            }
            Ok::<_, Error>(error.to_string())
        });
        let cause = if mistaken { "[2, 5]" } else { "budget" };
        for (rank, ran) in ran.into_iter().enumerate() {
            let error = ran.expect("the next step is made");
            assert!(error.contains(cause), "rank {rank}: {error}");
            assert_eq!(
                error.contains("rank 2 of 3 has failed to compile \"train\""),
                rank != 2,
                "{error}"
            );
        }
    }
}

#[test]
fn a_mistake_of_one_rank_in_an_inference_program_is_reported_on_all() {
    let worlds = World::local(2).expect("a world");
    let ran = on_each(worlds, |world| {
        let world = world.with_patience(Duration::from_secs(60));
        let is_last = world.rank() == 1;
        let params = Params::seeded(3);
        let layer = Linear::new(&params.root() / "layer", 4, 3);
        let mut session = Session::new(Device::Cpu, params)?.on(world)?;
        let mut compile = |inputs| {
            let trace = Trace::inference();
            let y = trace.input("x", F32, (2, inputs)).apply(&layer);
            session.compile(&trace, [y.sum_over_ranks()])
        };
        let error = compile(if is_last { 5 } else { 4 }).map(drop);
        let error = error.expect_err("a mistake of rank 1").to_string();
        let program = compile(4)?;
        session.run(&program, Array2::<f32>::ones((2, 4)))?;
        Ok::<_, Error>(error)
    });
    for (rank, ran) in ran.into_iter().enumerate() {
        let error = ran.expect("the next program runs");
        let shared = "rank 1 of 2 has failed to compile \"infer\"";
        assert_eq!(error.contains(shared), rank == 0, "{error}");
        assert!(error.contains("[2, 5]"), "{error}");
    }
}

#[test]
fn unbounded_lengths_are_refused_on_all_ranks() {
    let worlds = World::local(2).expect("a world");
    let ran = on_each(worlds, |world| {
        let params = Params::seeded(3);
        let layer = Linear::new(&params.root() / "layer", 4, 3);
        let mut session = Session::new(Device::Cpu, params)?.on(world.clone())?;
        let trace = Trace::inference();
        let x = trace.input("x", F32, (Dim::unbounded("batch"), 4));
        let alone = session.compile(&trace, [x.apply(&layer)])?;
        // Without exchanges each rank plans its own lengths.
        let rows = if world.rank() == 1 { 200 } else { 3 };
        session.run(&alone, Array2::<f32>::ones((rows, 4)))?;
        let trace = Trace::training();
        let x = trace.input("x", F32, (Dim::unbounded("batch"), 4));
        let loss = x.apply(&layer).square().mean();
        trace.minimize(loss, Sgd::new(0.1));
        let step = session.compile(&trace, [loss]);
        Ok::<_, Error>(step.map(drop).expect_err("a mistake").to_string())
    });
    for ran in ran {
        let error = ran.expect("other programs run");
        assert!(error.contains("Dim::bounded(\"batch\", …)"), "{error}");
    }
}

#[test]
fn a_batch_with_fewer_rows_than_ranks_is_refused_on_all() {
    let worlds = World::local(4).expect("a world");
    let ran = on_each(worlds, |world| {
        let params = Params::seeded(3);
        let net = Net::new(&params);
        let mut session = Session::new(Device::Cpu, params)?.on(world.clone())?;
        let trace = Trace::training();
        let rows = Dim::bounded("batch", 4);
        let x = trace.input("x", F32, (rows, INPUTS));
        let labels = trace.input("labels", I32, (rows,));
        let loss = x.apply(&net).cross_entropy(labels);
        trace.minimize(loss, Sgd::new(0.1));
        let step = session.compile(&trace, [loss])?;
        let mut run = |rows: usize| {
            let (x, labels) = batch(rows, 1);
            let own = session.world().share(rows);
            let x = x.slice(s![own.clone(), ..]).to_owned();
            let labels = labels.slice(s![own]).to_owned();
            session.run(&step, (&x, &labels)).map(drop)
        };
        let error = run(3).expect_err("rank 3 has no row").to_string();
        run(4)?;
        Ok::<_, Error>(error)
    });
    for (rank, error) in ran.into_iter().enumerate() {
        let error = error.expect("the next step is made");
        for part in ["rank 3 of 4 has no row", "\"x\" is 0 long", "leave out"] {
            assert!(error.contains(part), "rank {rank}: {error}");
        }
    }
}

/// The errors of three ranks of which the last ends, or does nothing until the others have ended,
/// instead of making a second step.
fn without_rank_2(ends: bool) -> Vec<String> {
    let worlds = World::local(3).expect("a world");
    let others = AtomicUsize::new(0);
    on_each(worlds, |world| {
        let world = world.with_patience(Duration::from_secs(4));
        let params = Params::seeded(3);
        let layer = Linear::new(&params.root() / "layer", 4, 3);
        let last = world.rank() == 2;
        let mut session = Session::new(Device::Cpu, params)
            .and_then(|s| s.on(world))
            .expect("a session");
        let trace = Trace::training();
        let loss = trace.input("x", F32, (2, 4)).apply(&layer).square().mean();
        trace.minimize(loss, Sgd::new(0.1));
        let step = session.compile(&trace, [loss]).expect("it compiles");
        let x = Array2::<f32>::ones((2, 4));
        session.run(&step, &x).expect("a step");
        if last {
            while !ends && others.load(Ordering::SeqCst) < 2 {
                std::thread::sleep(Duration::from_millis(10));
            }
            return String::new();
        }
        let error = session.run(&step, &x).map(drop);
        others.fetch_add(1, Ordering::SeqCst);
        error.expect_err("rank 2 is missing").to_string()
    })
}

#[test]
fn a_rank_that_ends_or_hangs_is_named() {
    for error in &without_rank_2(true)[..2] {
        assert!(error.contains("rank 2 of 3 has left the world"), "{error}");
    }
    for error in &without_rank_2(false)[..2] {
        let (_, waited) = error
            .split_once("rank 2 of 3 has not arrived after ")
            .expect(error);
        let (seconds, _) = waited.split_once(" s").expect(error);
        assert!(seconds.parse::<f64>().expect(error) >= 4.0, "{error}");
    }
}

#[test]
fn mistakes_name_the_numbers() {
    let world = World::local(4).expect("a world").swap_remove(0);
    let error = world
        .clone()
        .with_grains(6)
        .expect_err("6 over 4")
        .to_string();
    assert!(
        error.contains("6 grains over 4 ranks: worlds of 1, 3, 6 ranks"),
        "{error}"
    );
    let params = Params::seeded(3);
    let layer = Linear::new(&params.root() / "layer", 4, 3);
    let world = world.with_grains(8).expect("8 over 4");
    let mut session = Session::new(Device::Cpu, params)
        .and_then(|s| s.on(world))
        .expect("a session");
    let trace = Trace::training();
    let loss = trace.input("x", F32, (2, 4)).apply(&layer).square().mean();
    trace.minimize(loss, Sgd::new(0.1));
    let error = session
        .compile(&trace, [loss])
        .map(drop)
        .expect_err("a mistake")
        .to_string();
    assert!(
        error.contains("each of 4 ranks runs 2 of 8 grains"),
        "{error}"
    );
}

#[test]
fn a_trace_from_before_the_world_is_refused() {
    let world = World::local(2).expect("a world").swap_remove(0);
    let params = Params::seeded(3);
    let layer = Linear::new(&params.root() / "layer", 4, 3);
    let trace = Trace::training();
    let loss = trace.input("x", F32, (2, 4)).apply(&layer).square().mean();
    trace.minimize(loss, Sgd::new(0.1));
    let session = Session::new(Device::Cpu, params).expect("a session");
    let mut session = session.on(world).expect("it joins");
    let error = session.compile(&trace, [loss]).map(drop);
    let error = error.expect_err("a mistake").to_string();
    assert!(
        error.contains("was not traced for the 2 ranks") && error.contains("Session::on"),
        "{error}"
    );
    // No parameter says that there are ranks.
    let trace = Trace::inference();
    let sum = trace.input("x", F32, (2,)).sum_over_ranks();
    let error = session.compile(&trace, [sum]).map(drop);
    let error = error.expect_err("a mistake").to_string();
    assert!(error.contains("read a parameter"), "{error}");
}
