//! Scaled losses: the same steps where nothing overflows, and steps that are skipped where something
//! does.

use ndarray::{Array1, Array2};
use slabwise::nn::{BatchNorm1d, Linear};
use slabwise::optim::{Adam, Schedule, Sgd};
use slabwise::prelude::*;
use slabwise::{LossScale, Precision, Strategy, World};

const ROWS: usize = 12;

fn data(seed: u64) -> (Array2<f32>, Array1<i32>) {
    let mut draw = slabwise_models::noise(seed);
    let x = Array2::from_shape_simple_fn((ROWS, 6), || draw() * 2.0 - 1.0);
    let labels = Array1::from_shape_simple_fn(ROWS, || (draw() * 4.0) as i32);
    (x, labels)
}

/// A trace, its optimizer, and the parts it takes a step in.
struct Setup<O> {
    trace: Trace,
    optimizer: O,
    parts: usize,
}

/// A classifier with a batch norm, whose loss is multiplied by `boost`, an input.
fn learner(setup: Setup<impl Optimizer>) -> Result<(Session, Program<1>)> {
    let params = Params::seeded(5);
    let root = params.root();
    let (first, norm) = (
        Linear::new(&root / "a", 6, 8),
        BatchNorm1d::new(&root / "n", 8),
    );
    let last = Linear::new(&root / "b", 8, 4);
    let Setup {
        trace,
        optimizer,
        parts,
    } = setup;
    let x = trace.input("x", F32, (ROWS, 6)).split(0, parts);
    let labels = trace.input("labels", I32, (ROWS,)).split(0, parts);
    let boost = trace.input("boost", F32, ());
    let loss = |i: usize| {
        let x = x[i].apply(&first).apply(&norm).relu().apply(&last);
        x.cross_entropy(labels[i]) * boost
    };
    let loss = match parts {
        1 => {
            let loss = loss(0);
            trace.minimize(loss, optimizer);
            loss
        }
        _ => trace.minimize_in_parts(parts, optimizer, loss),
    };
    let mut session = Session::new(Device::Cpu, params)?;
    let step = session.compile(&trace, [loss])?;
    Ok((session, step))
}

fn run(session: &mut Session, step: &Program<1>, seed: u64, boost: f32) -> f32 {
    let (x, labels) = data(seed);
    let ran = session.run(step, (&x, &labels, &ndarray::arr0(boost)));
    ran.expect("a step")[0].item()
}

/// Everything a session holds but for the scale, as bits.
fn bits(session: &Session) -> Vec<(String, Vec<u32>)> {
    let names = session.names().filter(|name| !is_scale(name));
    let of = |name: &str| {
        let value = session.value(name).expect("it is there");
        (
            name.to_string(),
            value.iter().map(|x| x.to_bits()).collect(),
        )
    };
    names.map(of).collect()
}

fn is_scale(name: &str) -> bool {
    name.ends_with("loss_scale") || name.ends_with("finite_steps")
}

fn scale(session: &Session) -> [f32; 2] {
    ["optim.loss_scale", "optim.finite_steps"]
        .map(|name| session.value(name).expect("it is there")[[]])
}

/// A power of two changes no bit of a gradient in f32 that neither overflows nor underflows.
#[test]
fn scaled_steps_have_the_bits_of_plain_ones() {
    for parts in [1, 3] {
        for rule in [LossScale::dynamic(), LossScale::fixed(1024.0)] {
            let setup = |trace: Trace| Setup {
                trace,
                optimizer: Adam::new(Schedule::constant(1e-2).warmup(3)).ema(0.9),
                parts,
            };
            let (mut plain, step) = learner(setup(Trace::training())).expect("it compiles");
            let trace = Trace::training().with_loss_scale(rule);
            let (mut scaled, scaled_step) = learner(setup(trace)).expect("it compiles");
            for seed in 0..6 {
                let expected = run(&mut plain, &step, seed, 1.0);
                let loss = run(&mut scaled, &scaled_step, seed, 1.0);
                assert_eq!(loss.to_bits(), expected.to_bits(), "the loss is not scaled");
            }
            assert!(bits(&scaled) == bits(&plain), "{parts} parts, {rule:?}");
        }
    }
}

/// A step with gradients that are not finite changes nothing but the scale.
#[test]
fn steps_that_overflow_are_skipped() {
    let rule = LossScale::dynamic().interval(3);
    for parts in [1, 3] {
        let (mut session, step) = learner(Setup {
            trace: Trace::training().with_loss_scale(rule),
            optimizer: Adam::new(1e-2).ema(0.9),
            parts,
        })
        .expect("it compiles");
        run(&mut session, &step, 0, 1.0);
        assert_eq!(scale(&session), [65_536.0, 1.0]);
        let before = bits(&session);
        for (nth, boost) in [f32::MAX, f32::INFINITY, f32::NAN].into_iter().enumerate() {
            run(&mut session, &step, 1, boost);
            assert!(bits(&session) == before, "{parts} parts: {boost}");
            let expected = 65_536.0 / 2f32.powi(nth as i32 + 1);
            assert_eq!(scale(&session), [expected, 0.0]);
        }
        // It grows after three steps in a row, and counts anew.
        let mut seen = Vec::new();
        for seed in 0..4 {
            run(&mut session, &step, seed, 1.0);
            seen.push(scale(&session));
        }
        assert_eq!(
            seen,
            [
                [8192.0, 1.0],
                [8192.0, 2.0],
                [16_384.0, 0.0],
                [16_384.0, 1.0]
            ]
        );
        assert!(bits(&session) != before);
    }
}

/// A skipped step is not counted, whoever reads the count and before or after the update.
#[test]
fn skipped_steps_are_not_counted() {
    for read_first in [true, false] {
        let params = Params::seeded(5);
        let w = params.root().param("w", (), Init::Constant(1.0));
        let trace = Trace::training().with_loss_scale(LossScale::dynamic());
        let boost = trace.input("boost", F32, ());
        let loss = trace.param(&w) * boost;
        let before = read_first.then(|| trace.completed_steps());
        trace.minimize(loss, Sgd::new(0.1));
        let count = before.unwrap_or_else(|| trace.completed_steps());
        let mut session = Session::new(Device::Cpu, params).expect("a session");
        let step = session.compile(&trace, [count]).expect("it compiles");
        for (boost, expected) in [
            (1.0, 1.0),
            (f32::INFINITY, 1.0),
            (1.0, 2.0),
            (f32::NAN, 2.0),
        ] {
            session.run(&step, ndarray::arr0(boost)).expect("a step");
            let count = session.value("optim.step").expect("a counter")[[]];
            assert_eq!(count, expected, "after a step of {boost}, {read_first}");
        }
    }
}

/// Skipped steps leave a resumed session on the way of an uninterrupted one.
#[test]
fn a_resumed_session_goes_on_with_the_same_bits() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("state.safetensors");
    let new = || {
        learner(Setup {
            trace: Trace::training()
                .with_precision(Precision::F16)
                .with_loss_scale(LossScale::dynamic().initial(2f32.powi(30)).interval(2)),
            optimizer: Adam::new(1e-2),
            parts: 1,
        })
        .expect("it compiles")
    };
    let steps = |session: &mut Session, step: &Program<1>, seeds: std::ops::Range<u64>| {
        let losses = seeds.map(|seed| run(session, step, seed, 1.0).to_bits());
        losses.collect::<Vec<u32>>()
    };
    let (mut whole, step) = new();
    let expected = steps(&mut whole, &step, 0..20);
    // Gradients of 2³⁰ times the loss overflow f16 many times.
    assert!(scale(&whole)[0] < 2f32.powi(24), "{:?}", scale(&whole));
    assert!(whole.value("optim.step").expect("a counter")[[]] < 20.0);
    let (mut first, first_step) = new();
    let mut got = steps(&mut first, &first_step, 0..7);
    first.save(&path).expect("it saves");
    let (mut second, second_step) = new();
    second.load(&path).expect("it loads");
    got.extend(steps(&mut second, &second_step, 7..20));
    assert_eq!(got, expected);
    assert!(bits(&second) == bits(&whole) && scale(&second) == scale(&whole));
}

/// Gradients below f16's smallest number are zeros, unless the loss is scaled.
#[test]
fn small_gradients_reach_weights_in_f16() {
    let change = |rule: Option<LossScale>| {
        let trace = Trace::training().with_precision(Precision::F16);
        let (mut session, step) = learner(Setup {
            trace: match rule {
                Some(rule) => trace.with_loss_scale(rule),
                None => trace,
            },
            optimizer: Sgd::new(1e7),
            parts: 1,
        })
        .expect("it compiles");
        let before = session.value("a.weight").expect("a weight");
        run(&mut session, &step, 0, 1e-8);
        (session.value("a.weight").expect("a weight") - before)
            .iter()
            .fold(0.0f32, |most, x| most.max(x.abs()))
    };
    assert_eq!(change(None), 0.0);
    assert!(change(Some(LossScale::dynamic())) > 1e-3);
}

/// A number that is not finite on one rank is seen on all.
#[test]
fn ranks_skip_together() {
    let worlds = World::local(2).expect("a world");
    for strategy in [Strategy::Replicated, Strategy::ShardedState] {
        let ran: Vec<Vec<Vec<u32>>> = std::thread::scope(|scope| {
            let rank = |world: World| {
                let params = Params::seeded(3);
                // Large enough that ranks update a part each.
                let weight = params.root().param("w", (256, 128), Init::Constant(1.0));
                let session = Session::new(Device::Cpu, params).expect("a session");
                let session = session.with_threads(1);
                let world = world.with_strategy(strategy);
                let mut session = session.on(world.clone()).expect("it joins");
                let trace = Trace::training().with_loss_scale(LossScale::dynamic());
                let x = trace.input("x", F32, (1, 256));
                let loss = x.matmul(trace.param(&weight)).square().mean();
                trace.minimize(loss, Adam::new(1e-2));
                let step = session.compile(&trace, [loss]).expect("it compiles");
                let mut seen = Vec::new();
                for nth in 0..3 {
                    // In the second step, one element of the last rank's row.
                    let mut x = Array2::from_elem((1, 256), 0.5f32);
                    if (nth, world.rank()) == (1, 1) {
                        x[[0, 255]] = f32::INFINITY;
                    }
                    session.run(&step, (&x,)).expect("a step");
                    let bits = |name: &str| -> Vec<u32> {
                        let value = session.value(name).expect("it is there");
                        value.iter().map(|x| x.to_bits()).collect()
                    };
                    let all = ["w", "optim.loss_scale", "optim.step"].map(bits);
                    seen.push(all.concat());
                }
                seen
            };
            let ranks: Vec<_> = worlds
                .iter()
                .map(|world| {
                    let world = world.clone();
                    scope.spawn(move || rank(world))
                })
                .collect();
            let results = ranks.into_iter().map(|rank| rank.join().expect("no panic"));
            results.collect()
        });
        assert!(ran[0] == ran[1], "{strategy:?}");
        let elements = 256 * 128;
        let [first, second, third] = [0, 1, 2].map(|step| &ran[0][step]);
        assert!(first[..elements] == second[..elements], "{strategy:?}");
        assert!(third[..elements] != second[..elements], "{strategy:?}");
        let tail = |step: &[u32]| [step[elements], step[elements + 1]].map(f32::from_bits);
        assert_eq!(tail(second), [32_768.0, 1.0]);
        assert_eq!(tail(third), [32_768.0, 2.0]);
    }
}

#[test]
fn mistakes_in_scales_are_reported() {
    for (rule, said) in [
        (
            LossScale::fixed(0.0),
            "minimize: the loss scale is 0, not a finite number above 0",
        ),
        (
            LossScale::dynamic().growth(0.5),
            "minimize: the loss scale grows by 0.5, not a finite factor of at least 1",
        ),
        (
            LossScale::dynamic().backoff(1.0),
            "minimize: the loss scale falls by 1, not a factor above 0 and below 1",
        ),
        (
            LossScale::dynamic().interval(0),
            "minimize: the loss scale grows after 0 steps, not at least 1",
        ),
    ] {
        let fault = learner(Setup {
            trace: Trace::training().with_loss_scale(rule),
            optimizer: Sgd::new(0.1),
            parts: 1,
        });
        let fault = fault.err().expect("a mistake").to_string();
        assert!(
            fault.contains(said) && fault.contains("loss_scale.rs"),
            "{fault}"
        );
    }
}
