//! The same seed gives the same bits: on any number of threads, planned or dynamic, run again, or
//! resumed from a file.

mod random;

use ndarray::{Array2, ArrayD};
use slabwise::nn::{Dropout, Linear, Relu, Sequential};
use slabwise::optim::{Adam, Schedule};
use slabwise::prelude::*;
use slabwise_kernels::random::{philox, unit};
use slabwise_models::{Model, OptimizerKind};

const BATCH: usize = 12;

/// A small network with dropout, Adam with a schedule and clipping, so that all kinds of state
/// occur.
struct Fixture {
    session: Session,
    train: Program<2>,
    infer: Program<1>,
}

impl Fixture {
    fn new(seed: u64, threads: usize) -> Self {
        let params = Params::seeded(seed);
        let at = params.root();
        let model = Sequential::new()
            .then(Linear::new(&at / "hidden", 20, 33))
            .then(Relu)
            .then(Dropout(0.4))
            .then(Linear::new(&at / "middle", 33, 17))
            .then(Dropout(0.2))
            .then(Linear::new(&at / "head", 17, 5));
        let mut session = Session::new(Device::Cpu, params)
            .expect("a session")
            .with_threads(threads);
        let batch = Dim::bounded("batch", BATCH as u32);
        let trace = Trace::training();
        let (x, labels) = (
            trace.input("x", F32, (batch, 20)),
            trace.input("labels", I32, (batch,)),
        );
        let loss = x.apply(&model).cross_entropy(labels);
        let mask = trace.ones((6, 50)).dropout(0.5);
        trace.minimize(
            loss,
            Adam::new(Schedule::cosine(0.02, 35).warmup(5)).clip_norm(0.5),
        );
        let train = session.compile(&trace, [loss, mask]).expect("it compiles");
        let trace = Trace::inference();
        let logits = trace.input("x", F32, (batch, 20)).apply(&model);
        let infer = session.compile(&trace, [logits]).expect("it compiles");
        Fixture {
            session,
            train,
            infer,
        }
    }

    fn steps(&mut self, steps: std::ops::Range<u64>, dynamic: bool) -> Vec<Vec<u32>> {
        let mut seen = Vec::new();
        for step in steps {
            let mut draw = slabwise_models::noise(step);
            let rows = BATCH - (step % 3) as usize;
            let x = Array2::from_shape_simple_fn((rows, 20), || draw() - 0.5);
            let labels: Vec<i32> = (0..rows).map(|_| (draw() * 5.0) as i32).collect();
            let outputs = match dynamic {
                false => self.session.run(&self.train, (&x, &labels)),
                true => self.session.run_dynamic(&self.train, (&x, &labels)),
            };
            let outputs = outputs.expect("a step");
            seen.extend(outputs.iter().map(|o| bits(&o.array().expect("f32"))));
            let outputs = match dynamic {
                false => self.session.run(&self.infer, (&x,)),
                true => self.session.run_dynamic(&self.infer, (&x,)),
            };
            seen.push(bits(&outputs.expect("a run")[0].array().expect("f32")));
        }
        seen
    }

    fn state(&self) -> Vec<(String, Vec<u32>)> {
        state(&self.session)
    }
}

fn bits(array: &ArrayD<f32>) -> Vec<u32> {
    array.iter().map(|v| v.to_bits()).collect()
}

fn state(session: &Session) -> Vec<(String, Vec<u32>)> {
    session
        .names()
        .map(|n| (n.to_string(), bits(&session.value(n).expect("it is there"))))
        .collect()
}

/// Initial values depend on neither the number of threads nor on the length of the weight.
#[test]
fn initial_values_are_the_same_on_any_number_of_threads() {
    let inits = [
        (
            "normal",
            Init::Normal {
                mean: 0.5,
                std: 2.0,
            },
        ),
        (
            "uniform",
            Init::Uniform {
                low: -1.0,
                high: 3.0,
            },
        ),
        ("constant", Init::Constant(0.7)),
    ];
    let values = |threads: usize, length: usize| -> Vec<Vec<u32>> {
        let params = Params::seeded(11);
        let mut names = Vec::new();
        for dtype in [F32, F16, BF16] {
            let at = (params.root() / &*dtype.to_string()).stored_in(dtype);
            for (name, init) in inits {
                names.push(at.param(name, (length,), init).name().to_string());
            }
        }
        let session = Session::new(Device::Cpu, params).expect("a session");
        let mut session = session.with_threads(threads);
        let trace = Trace::inference();
        let program = session.compile(&trace, [trace.ones((1,))]);
        program.expect("it compiles");
        let value = |name: &String| session.value(name).expect("a weight");
        let bits = |name: &String| value(name).iter().map(|x| x.to_bits()).collect();
        names.iter().map(bits).collect()
    };
    // Several parts, the last of them not of whole blocks of random numbers.
    let alone = values(1, 70_003);
    for threads in [2, 5] {
        assert!(values(threads, 70_003) == alone, "{threads} threads");
    }
    for (long, short) in alone.iter().zip(values(2, 5)) {
        assert_eq!(long[..5], short);
    }
    // Element by element, as the format of initial values says: blocks of four by the seed, the
    // number of the block and the FNV-1a of the name.
    let name = "f32.uniform"
        .bytes()
        .fold(0xCBF2_9CE4_8422_2325u64, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01B3)
        });
    for (at, &bits) in alone[1].iter().enumerate() {
        let counter = [at as u32 / 4, 0, name as u32, (name >> 32) as u32];
        let drawn = unit(philox(counter, [11, 0])[at % 4]);
        assert_eq!(bits, (-1.0 + 4.0 * drawn).to_bits(), "{at}");
    }
    let normal = alone[0].iter().map(|&bits| f32::from_bits(bits));
    let mean = normal.sum::<f32>() / 70_003.0;
    assert!((mean - 0.5).abs() < 0.04, "{mean}");
}

#[test]
fn threads_modes_and_reruns_change_no_bit() {
    let mut base = Fixture::new(5, 1);
    let expected = (base.steps(0..12, false), base.state());
    for (threads, dynamic) in [(1, false), (2, false), (3, false), (1, true), (3, true)] {
        let mut other = Fixture::new(5, threads);
        let got = (other.steps(0..12, dynamic), other.state());
        assert!(
            got == expected,
            "{threads} threads, dynamic {dynamic}: other bits"
        );
    }
    let mut mixed = Fixture::new(5, 2);
    let mut seen = mixed.steps(0..5, true);
    seen.extend(mixed.steps(5..12, false));
    assert!(
        (seen, mixed.state()) == expected,
        "modes mixed in one session: other bits"
    );
    // The test is sensitive to a difference.
    let mut other = Fixture::new(6, 1);
    assert!(
        other.steps(0..12, false) != expected.0,
        "another seed gives other bits"
    );
}

#[test]
fn dropout_masks_move_on_with_the_step_and_repeat_with_the_seed() {
    let masks = |seed| {
        let mut fixture = Fixture::new(seed, 2);
        let seen = fixture.steps(0..6, false);
        seen.into_iter().skip(1).step_by(3).collect::<Vec<_>>()
    };
    let first = masks(1);
    assert_eq!(first.len(), 6);
    for (i, mask) in first.iter().enumerate() {
        let kept = mask.iter().filter(|&&v| v == 2.0f32.to_bits()).count();
        let dropped = mask.iter().filter(|&&v| v == 0).count();
        assert_eq!(
            (mask.len(), kept + dropped),
            (300, 300),
            "step {i}: kept elements are doubled, the rest is 0"
        );
        // 300 throws: further from 150 than 70 is eight standard deviations.
        assert!((80..220).contains(&kept), "step {i}: {kept} of 300 kept");
        assert!(
            first[..i].iter().all(|earlier| earlier != mask),
            "step {i} repeats an earlier mask"
        );
    }
    assert_eq!(first, masks(1));
    assert_ne!(first, masks(2));
}

#[test]
fn a_resumed_run_continues_as_if_uninterrupted() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("half.safetensors");
    let mut whole = Fixture::new(5, 2);
    let mut expected = whole.steps(0..40, false);
    let after_first_half = expected.len() / 2;

    let mut first = Fixture::new(5, 2);
    let mut got = first.steps(0..20, false);
    first.session.save(&path).expect("it is saved");
    drop(first);
    // Another seed, because all state comes from the file.
    let mut second = Fixture::new(77, 3);
    assert_ne!(second.state(), whole.state());
    second.session.load(&path).expect("it loads");
    got.extend(second.steps(20..40, false));
    assert_eq!(got.len(), expected.len());
    for (at, (g, e)) in got.drain(..).zip(expected.drain(..)).enumerate() {
        assert!(
            g == e,
            "result {at} differs; the run was resumed at {after_first_half}"
        );
    }
    let names: Vec<&str> = second.session.names().collect();
    for name in [
        "hidden.weight",
        "adam.m.head.bias",
        "adam.v.middle.weight",
        "optim.step",
        "random",
    ] {
        assert!(names.contains(&name), "{name} in {names:?}");
    }
    assert!(
        second.state() == whole.state(),
        "weights and state after 40 steps differ"
    );
    assert_eq!(
        second
            .session
            .value("optim.step")
            .expect("it is there")
            .sum(),
        40.0
    );

    // Weights alone: the optimizer's state stays.
    let mut third = Fixture::new(77, 1);
    let fresh = third.state();
    third.session.load_weights(&path).expect("it loads");
    let file = Fixture::new(5, 1).steps_state(20);
    for (((name, now), (_, before)), (_, saved)) in third.state().into_iter().zip(fresh).zip(file) {
        let is_weight =
            name.starts_with("hidden") || name.starts_with("middle") || name.starts_with("head");
        assert!(
            now == if is_weight { saved } else { before },
            "{name} after loading weights alone"
        );
    }
}

impl Fixture {
    /// The state after so many steps.
    fn steps_state(mut self, steps: u64) -> Vec<(String, Vec<u32>)> {
        self.steps(0..steps, false);
        self.state()
    }
}

#[test]
fn a_convolution_network_trains_to_the_same_bits() {
    let train = |threads: usize, dynamic: bool| {
        let params = Params::seeded(2);
        let network = Model::Cnn.build(&params);
        let mut session = Session::new(Device::Cpu, params)
            .expect("a session")
            .with_threads(threads);
        let program = network
            .training(&mut session, 6u32, OptimizerKind::Sgd)
            .expect("it compiles");
        let mut losses = Vec::new();
        for step in 0..3 {
            let (images, labels) = Model::Cnn.batch(6, step);
            let outputs = match dynamic {
                false => session.run(&program, (&images, &labels)),
                true => session.run_dynamic(&program, (&images, &labels)),
            };
            losses.push(outputs.expect("a step")[0].item().to_bits());
        }
        (losses, state(&session))
    };
    let expected = train(1, false);
    for (threads, dynamic) in [(2, false), (3, false), (2, true)] {
        assert!(
            train(threads, dynamic) == expected,
            "{threads} threads, dynamic {dynamic}: other bits"
        );
    }
}
