//! Training: gradient accumulation, frozen layers, averaged weights, programs that share a session,
//! and the loop that comes with the library.

use ndarray::{Array1, Array2, s};
use slabwise::nn::{BatchNorm1d, LayerNorm, Linear};
use slabwise::optim::{Adam, AdamW, Group, Schedule, Sgd};
use slabwise::prelude::*;
use slabwise_models::noise;

const INPUTS: usize = 12;
const CLASSES: usize = 5;

/// Two layers with a norm between them.
struct Net {
    stem: Linear,
    norm: LayerNorm,
    head: Linear,
}

impl Net {
    fn new(params: &Params, width: usize) -> Net {
        let at = &params.root();
        Net {
            stem: Linear::new(at / "stem", INPUTS, width),
            norm: LayerNorm::new(at / "norm", width),
            head: Linear::new(at / "head", width, CLASSES),
        }
    }
}

impl Module for Net {
    fn forward<'t>(&self, x: Tensor<'t>) -> Tensor<'t> {
        x.apply(&self.stem)
            .apply(&self.norm)
            .gelu()
            .apply(&self.head)
    }
}

fn batch(n: usize, seed: u64) -> (Array2<f32>, Array1<i32>) {
    let mut draw = noise(seed);
    let x = Array2::from_shape_simple_fn((n, INPUTS), || draw() * 2.0 - 1.0);
    // The class is the index of the largest of the first inputs.
    let class = |row: ndarray::ArrayView1<'_, f32>| {
        (0..CLASSES)
            .max_by(|&a, &b| row[a].total_cmp(&row[b]))
            .unwrap_or(0) as i32
    };
    let labels = x.rows().into_iter().map(class).collect();
    (x, labels)
}

/// A session, and a training program that `learn` builds from the trace, the model, its inputs and
/// labels.
fn learner(
    width: usize,
    n: impl Into<Dim>,
    learn: impl for<'t> Fn(&'t Trace, &Net, Tensor<'t>, Tensor<'t>) -> Tensor<'t>,
) -> (Session, Result<Program<1>>) {
    let params = Params::seeded(3);
    let net = Net::new(&params, width);
    let mut session = Session::new(Device::Cpu, params)
        .expect("a session")
        .with_threads(1);
    let trace = Trace::training();
    let n = n.into();
    let (x, labels) = (
        trace.input("x", F32, (n, INPUTS)),
        trace.input("labels", I32, (n,)),
    );
    let loss = learn(&trace, &net, x, labels);
    let program = session.compile(&trace, [loss]);
    (session, program)
}

fn whole(
    optimizer: impl Optimizer + Clone,
) -> impl for<'t> Fn(&'t Trace, &Net, Tensor<'t>, Tensor<'t>) -> Tensor<'t> {
    move |trace, net, x, labels| {
        let loss = x.apply(net).cross_entropy(labels);
        trace.minimize(loss, optimizer.clone());
        loss
    }
}

fn in_parts(
    parts: usize,
    optimizer: impl Optimizer + Clone,
) -> impl for<'t> Fn(&'t Trace, &Net, Tensor<'t>, Tensor<'t>) -> Tensor<'t> {
    move |trace, net, x, labels| {
        let (x, labels) = (x.split(0, parts), labels.split(0, parts));
        trace.minimize_in_parts(parts, optimizer.clone(), |i| {
            x[i].apply(net).cross_entropy(labels[i])
        })
    }
}

fn weights(session: &Session) -> Vec<f32> {
    let names = [
        "stem.weight",
        "stem.bias",
        "norm.weight",
        "norm.bias",
        "head.weight",
        "head.bias",
    ];
    names
        .iter()
        .flat_map(|name| session.value(name).expect("it is there"))
        .collect()
}

fn text<T>(result: Result<T>) -> String {
    result.map(|_| ()).expect_err("a mistake").to_string()
}

/// A batch of any length up to a bound, cut into parts that may differ by one row, makes the step of
/// the whole batch: its parts weigh as many rows as they have.
#[test]
fn parts_of_a_bounded_batch_train_as_the_whole() {
    let optimizer = || Sgd::new(0.1).momentum(0.9);
    let batch_of = Dim::bounded("batch", 16);
    let (mut one, program) = learner(32, batch_of, whole(optimizer()));
    let program = program.expect("it compiles");
    let (mut session, split) = learner(32, batch_of, |trace, net, x, labels| {
        let (x, labels) = (x.shares(4), labels.shares(4));
        trace.minimize_in_parts(4, optimizer(), |i| x[i].apply(net).cross_entropy(labels[i]))
    });
    let split = split.expect("it compiles");
    assert_eq!(weights(&one), weights(&session));
    for (step, rows) in [16, 5, 4, 10, 7, 13].into_iter().enumerate() {
        let (x, labels) = batch(rows, step as u64);
        let expected = one.run(&program, (&x, &labels)).expect("a step")[0].item();
        let got = session.run(&split, (&x, &labels)).expect("a step")[0].item();
        assert!(
            (got - expected).abs() < 1e-5,
            "{got} instead of {expected}: {rows} rows"
        );
        for (a, b) in weights(&one).iter().zip(weights(&session)) {
            assert!((a - b).abs() < 1e-5, "{b} instead of {a}: {rows} rows");
        }
    }
    // A part without a row has no mean.
    let before = weights(&session);
    let (x, labels) = batch(3, 9);
    let error = text(session.run(&split, (&x, &labels)));
    let expected = "\"batch\" is 3, and each of the 4 parts that shares(4) makes needs a row; leave out batches of fewer than 4 rows";
    assert!(error.contains(expected), "{error}");
    assert_eq!(weights(&session), before);

    let (_, split) = learner(32, batch_of, in_parts(4, optimizer()));
    let error = text(split);
    let expected = "split axis 0 of [batch, 12] into 4 parts: batch does not divide; shares(4) cuts it into parts of nearly equal length";
    assert!(error.contains(expected), "{error}");
}

/// The parts weigh as many rows as they have, whichever input comes first and whether its first axis
/// is the batch.
#[test]
fn parts_of_a_batch_in_any_input_train_as_the_whole() {
    let train = |parts: usize, rows: usize| {
        let params = Params::seeded(3);
        let layer = Linear::new(&params.root() / "layer", 4, 1);
        let mut session = Session::new(Device::Cpu, params)
            .expect("a session")
            .with_threads(1);
        let trace = Trace::training();
        let batch = Dim::bounded("batch", 12);
        let scale = trace.input("scale", F32, ());
        let pairs = trace.input("pairs", F32, (trace.product_of_lengths(2, batch), 2));
        // A pair of rows is an example.
        let x = (pairs * scale).reshape((batch, 4));
        let loss = match parts {
            1 => {
                let loss = x.apply(&layer).square().mean();
                trace.minimize(loss, Sgd::new(0.1));
                loss
            }
            _ => {
                let x = x.shares(parts);
                let loss = |i: usize| x[i].apply(&layer).square().mean();
                trace.minimize_in_parts(parts, Sgd::new(0.1), loss)
            }
        };
        let step = session.compile(&trace, [loss]).expect("it compiles");
        let x = Array2::from_shape_fn((2 * rows, 2), |(i, j)| ((i * 3 + j) % 7) as f32 / 3.0);
        let scale = ndarray::arr0(0.5f32);
        let [loss] = session.run(&step, (&scale, &x)).expect("a step");
        let loss = loss.item();
        let weight = session.value("layer.weight").expect("a weight");
        (loss, weight)
    };
    for rows in [7, 12, 3] {
        let ((loss, weight), (expected, whole)) = (train(3, rows), train(1, rows));
        assert!((loss - expected).abs() < 1e-5, "{loss}, not {expected}");
        for (a, b) in whole.iter().zip(&weight) {
            assert!((a - b).abs() < 1e-5, "{b} instead of {a}: {rows} rows");
        }
    }
}

/// Of two lengths that are cut alike, either may be the batch.
#[test]
fn two_lengths_in_shares_are_a_mistake() {
    let params = Params::seeded(3);
    let layer = Linear::new(&params.root() / "layer", 2, 1);
    let mut session = Session::new(Device::Cpu, params).expect("a session");
    let trace = Trace::training();
    let rows = |name, most| {
        trace
            .input(name, F32, (Dim::bounded(name, most), 2))
            .shares(2)
    };
    let (sources, targets) = (rows("sources", 8), rows("targets", 9));
    let line = line!() + 1;
    let loss = trace.minimize_in_parts(2, Sgd::new(0.1), |i| {
        sources[i].apply(&layer).square().mean() - targets[i].apply(&layer).mean()
    });
    let error = text(session.compile(&trace, [loss]));
    let expected = "minimize_in_parts(2): \"sources\" and \"targets\" are both cut by shares(2)";
    assert!(error.contains(expected), "{error}");
    assert!(error.contains(&format!("learning.rs:{line}")), "{error}");
}

#[test]
fn parts_of_a_batch_train_as_the_whole() {
    let optimizer = || Sgd::new(0.1).momentum(0.9).clip_norm(0.5);
    let (mut one, program) = learner(32, 24, whole(optimizer()));
    let program = program.expect("it compiles");
    for parts in [1, 2, 3, 8] {
        let (mut session, split) = learner(32, 24, in_parts(parts, optimizer()));
        let split = split.expect("it compiles");
        // Starts again with the whole batch.
        for name in one.names().map(str::to_string).collect::<Vec<_>>() {
            one.set_value(&name, &session.value(&name).expect("it is there"))
                .expect("it fits");
        }
        let start = weights(&one);
        for step in 0..8 {
            let (x, labels) = batch(24, step);
            let a = one.run(&program, (&x, &labels)).expect("a step")[0].item();
            let b = session.run(&split, (&x, &labels)).expect("a step")[0].item();
            assert!(
                (a - b).abs() < 2e-6,
                "{parts} parts, step {step}: {b}, the whole has {a}"
            );
        }
        let far = weights(&one)
            .iter()
            .zip(&start)
            .map(|(a, b)| (a - b).abs())
            .fold(0.0, f32::max);
        assert!(far > 0.05, "they learn: {far}");
        for (a, b) in weights(&one).iter().zip(weights(&session)) {
            assert!(
                (a - b).abs() < 1e-5,
                "{parts} parts: {b}, the whole has {a}"
            );
        }
    }
}

#[test]
fn parts_need_the_memory_of_a_part() {
    // Except for the inputs, which are live from the beginning.
    let slab = |n: usize, parts| {
        let (session, program) = learner(64, n, in_parts(parts, Adam::new(1e-3)));
        let plan = program.expect("it compiles").plan().slab_bytes();
        assert_eq!(plan, session.slab_bytes());
        plan - (n * (INPUTS + 1) * 4) as u64
    };
    let (whole, parts, part) = (slab(4096, 1), slab(4096, 8), slab(512, 1));
    let gradients = ((INPUTS + 1 + 2 + CLASSES) * 64 + CLASSES) as u64 * 4 + 6 * 64;
    // Accumulated gradients are fused differently from those that update at once, so that a little
    // more than the share of a part may be needed.
    assert!(
        parts <= 2 * part + gradients,
        "{parts} bytes in eight parts; a part takes {part}, the gradients {gradients}"
    );
    assert!(
        3 * parts < whole,
        "{parts} bytes in eight parts, {whole} at once"
    );
}

#[test]
fn parts_share_earlier_values_and_pass_states_on() {
    let params = Params::seeded(3);
    let w = params.root().param(
        "w",
        (INPUTS,),
        Init::Normal {
            mean: 0.0,
            std: 1.0,
        },
    );
    let norm = BatchNorm1d::new(&params.root() / "norm", INPUTS);
    let mut session = Session::new(Device::Cpu, params)
        .expect("a session")
        .with_threads(1);
    let trace = Trace::training();
    let x = trace.input("x", F32, (8, INPUTS)).split(0, 2);
    // Computed once and used by both parts; gradients go through it from both.
    let table = trace.param(&w).tanh();
    let state = trace.state("runs", F32, (), Init::Constant(1.0));
    let loss = trace.minimize_in_parts(2, Sgd::new(0.1), |i| {
        let y = x[i].apply(&norm) * table * state.value();
        if i == 0 {
            // The second part still reads the old value.
            state.set(state.value() * 2.0);
        }
        y.detach().square().mean() + (x[i] * table).square().mean() * state.value()
    });
    let program = session.compile(&trace, [loss]).expect("it compiles");

    let mut mean = [0.0f64; INPUTS];
    for step in 0..4u32 {
        let (x, _) = batch(8, u64::from(step));
        let w: Vec<f64> = session
            .value("w")
            .expect("it is there")
            .iter()
            .map(|&w| f64::from(w))
            .collect();
        let runs = f64::from(1u32 << step);
        assert_eq!(
            f64::from(session.value("runs").expect("it is there").sum()),
            runs
        );
        let got = f64::from(session.run(&program, (&x,)).expect("a step")[0].item());
        let after = session.value("w").expect("it is there");
        let running = session.value("norm.running_mean").expect("it is there");
        let mut expected = 0.0;
        for (i, w) in w.iter().enumerate() {
            let column: Vec<f64> = x.column(i).iter().map(|&x| f64::from(x)).collect();
            let table = w.tanh();
            for part in column.chunks(4) {
                let m = part.iter().sum::<f64>() / 4.0;
                let variance = part.iter().map(|x| (x - m) * (x - m)).sum::<f64>() / 4.0;
                mean[i] = 0.9 * mean[i] + 0.1 * m;
                let normed = part
                    .iter()
                    .map(|x| (x - m) * (x - m) / (variance + 1e-5))
                    .sum::<f64>();
                let squares = part.iter().map(|x| x * x).sum::<f64>();
                expected += (table * table * (normed * runs * runs + squares * runs))
                    / (2.0 * 4.0 * INPUTS as f64);
            }
            assert!(
                (f64::from(running[[i]]) - mean[i]).abs() < 1e-6,
                "the running mean takes both parts, one after the other"
            );
            let squares = column.iter().map(|x| x * x).sum::<f64>();
            let slope =
                2.0 * table * (1.0 - table * table) * squares * runs / (8.0 * INPUTS as f64);
            assert!(
                (f64::from(after[[i]]) - (w - 0.1 * slope)).abs() < 1e-5,
                "step {step}, weight {i}"
            );
        }
        assert!(
            (got - expected).abs() < 1e-4 * expected,
            "step {step}: {got}, not {expected}"
        );
    }
}

#[test]
fn frozen_layers_have_no_gradients_no_state_and_do_not_change() {
    let frozen = |trace: &Trace| trace.freeze(|w| !w.name.starts_with("head."));
    let (free, program) = learner(64, 64, whole(Adam::new(0.01)));
    let free_plan = program.expect("it compiles");
    let (mut session, program) = learner(64, 64, |trace, net, x, labels| {
        frozen(trace);
        whole(Adam::new(0.01))(trace, net, x, labels)
    });
    let program = program.expect("it compiles");

    let names: Vec<&str> = session.names().collect();
    assert!(
        names.contains(&"adam.m.head.weight")
            && !names
                .iter()
                .any(|n| n.starts_with("adam.m.stem") || n.starts_with("adam.v.norm"))
    );
    let state = |plan: &slabwise::Plan| plan.persistent().state;
    let moments = |of: &[usize]| of.iter().map(|n| 2 * 4 * *n as u64).sum::<u64>();
    assert_eq!(
        state(free_plan.plan()) - state(program.plan()),
        moments(&[64 * INPUTS, 64, 64, 64])
    );
    assert!(free.persistent_bytes() > session.persistent_bytes());
    // Nothing of the backward pass below the head is planned.
    let gradient = |plan: &slabwise::Plan, layer: &str| {
        plan.dag().buffers.iter().enumerate().any(|(i, _)| {
            let name = plan.dag().buffer_name(slabwise_planner::BufferId(i as u32));
            name.starts_with(layer) && name.contains("grad")
        })
    };
    assert!(gradient(free_plan.plan(), "stem") || gradient(free_plan.plan(), "norm"));
    assert!(!gradient(program.plan(), "stem") && !gradient(program.plan(), "norm"));
    assert!(program.plan().slab_bytes() < free_plan.plan().slab_bytes());
    assert!(
        program.plan().without_reuse_bytes() + 64 * 64 * 4 < free_plan.plan().without_reuse_bytes()
    );

    let (before, head) = (weights(&session), CLASSES * 64 + CLASSES);
    let losses: Vec<f32> = (0..40)
        .map(|step| {
            let (x, labels) = batch(64, step);
            session.run(&program, (&x, &labels)).expect("a step")[0].item()
        })
        .collect();
    let after = weights(&session);
    let split = before.len() - head;
    assert_eq!(before[..split], after[..split], "bit for bit");
    assert!(
        before[split..]
            .iter()
            .zip(&after[split..])
            .all(|(a, b)| a != b)
    );
    assert!(losses[39] < 0.8 * losses[0], "{losses:?}");
}

#[test]
fn averaged_weights_are_read_by_an_inference_program() {
    let params = Params::seeded(3);
    let net = Net::new(&params, 16);
    let mut session = Session::new(Device::Cpu, params)
        .expect("a session")
        .with_threads(1);
    let infer = |session: &mut Session, trace: Trace| {
        let logits = trace.input("x", F32, (8, INPUTS)).apply(&net);
        session.compile(&trace, [logits]).expect("it compiles")
    };
    // Compiled before any program learns, and by itself.
    let averaged = infer(&mut session, Trace::inference().averaged());
    let plain = infer(&mut session, Trace::inference());
    let (x, labels) = batch(8, 1);
    let logits = |session: &mut Session, program: &Program<1>| {
        session.run(program, (&x,)).expect("a run")[0]
            .array::<f32>()
            .expect("f32")
    };
    assert_eq!(
        logits(&mut session, &averaged),
        logits(&mut session, &plain),
        "nothing has learnt yet"
    );

    let trace = Trace::training();
    let loss = trace
        .input("x", F32, (8, INPUTS))
        .apply(&net)
        .cross_entropy(trace.input("labels", I32, (8,)));
    trace.minimize(loss, Adam::new(0.01).ema(0.9));
    let train = session.compile(&trace, [loss]).expect("it compiles");
    for _ in 0..20 {
        session.run(&train, (&x, &labels)).expect("a step");
    }
    let by_average = logits(&mut session, &averaged);
    assert_ne!(by_average, logits(&mut session, &plain));
    // The averages in the place of the weights give the same results as the averaged program, bit
    // for bit.
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("a.safetensors");
    session.save(&path).expect("saved");
    let names: Vec<String> = session
        .names()
        .filter_map(|name| name.strip_prefix("ema."))
        .map(str::to_string)
        .collect();
    assert_eq!(names.len(), 6);
    for name in &names {
        let average = session.value(&format!("ema.{name}")).expect("it is there");
        session.set_value(name, &average).expect("it fits");
    }
    assert_eq!(logits(&mut session, &plain), by_average);
    // Loading weights alone restarts the averages; loading everything restores them.
    session.load_weights(&path).expect("loaded");
    assert_eq!(
        logits(&mut session, &averaged),
        logits(&mut session, &plain)
    );
    session.load(&path).expect("loaded");
    assert_eq!(logits(&mut session, &averaged), by_average);
}

/// Averages that no program keeps are refused where their weights change, and otherwise the weights.
#[test]
fn averages_without_a_keeper() {
    let averaged = |session: &mut Session, net: &Net| {
        let trace = Trace::inference().averaged();
        let logits = trace.input("x", F32, (8, INPUTS)).apply(net);
        session.compile(&trace, [logits])
    };
    let says = "\"infer\" reads the average of \"head.bias\", which \"train\" changes, and no program keeps this average: \
                add ema(decay) to the optimizer of that weight";
    let (params, head) = (
        Params::seeded(3),
        |w: &slabwise_compiler::graph::VariableInfo| w.name.starts_with("head."),
    );
    let net = Net::new(&params, 16);
    let train = |session: &mut Session, optimizer: &dyn Fn(&Trace, Tensor<'_>)| {
        let trace = Trace::training();
        let x = trace.input("x", F32, (8, INPUTS)).apply(&net);
        let loss = x.cross_entropy(trace.input("labels", I32, (8,)));
        optimizer(&trace, loss);
        session.compile(&trace, [loss])
    };
    let new = || {
        Session::new(Device::Cpu, params.clone())
            .expect("a session")
            .with_threads(1)
    };
    let partly = |trace: &Trace, loss: Tensor<'_>| {
        trace.minimize(loss, Sgd::new(0.1).ema(0.9).using(head, Sgd::new(0.1)))
    };
    // Whichever of both is compiled first.
    let mut session = new();
    train(&mut session, &partly).expect("it compiles");
    let error = text(averaged(&mut session, &net));
    assert!(error.contains(says), "{error}");
    let mut session = new();
    averaged(&mut session, &net).expect("nothing changes");
    let error = text(train(&mut session, &partly));
    assert!(error.contains(says), "{error}");

    // Frozen weights are read as they are, also after they are set.
    let mut session = new();
    let kept = train(&mut session, &|trace, loss| {
        trace.freeze(|w| !w.name.starts_with("head."));
        trace.minimize(loss, Sgd::new(0.1).ema(0.9));
    });
    let kept = kept.expect("it compiles");
    let judge = averaged(&mut session, &net).expect("frozen weights do not change");
    let value = |session: &Session, name: &str| session.value(name).expect("it is there");
    let bias = value(&session, "stem.bias") + 1.0;
    session.set_value("stem.bias", &bias).expect("it fits");
    assert_eq!(value(&session, "ema.stem.bias"), bias);
    let (x, labels) = batch(8, 1);
    session.run(&kept, (&x, &labels)).expect("a step");
    session.run(&judge, &x).expect("a run");
    // The average of a weight that learns stays.
    let average = value(&session, "ema.head.bias");
    assert_ne!(average, value(&session, "head.bias"));
    let bias = value(&session, "head.bias") + 1.0;
    session.set_value("head.bias", &bias).expect("it fits");
    assert_eq!(value(&session, "ema.head.bias"), average);
}

/// Two programs of one session, each with its own set of trained weights.
fn two(
    first: impl for<'t> Fn(&'t Trace, &Net, Tensor<'t>, Tensor<'t>) -> Tensor<'t>,
    second: impl for<'t> Fn(&'t Trace, &Net, Tensor<'t>, Tensor<'t>) -> Tensor<'t>,
) -> (Session, Result<[Program<1>; 2]>) {
    let params = Params::seeded(3);
    let net = Net::new(&params, 8);
    let mut session = Session::new(Device::Cpu, params)
        .expect("a session")
        .with_threads(1);
    let mut program =
        |name: &str,
         n: usize,
         learn: &dyn for<'t> Fn(&'t Trace, &Net, Tensor<'t>, Tensor<'t>) -> Tensor<'t>| {
            let trace = Trace::training().named(name);
            let (x, labels) = (
                trace.input("x", F32, (n, INPUTS)),
                trace.input("labels", I32, (n,)),
            );
            let loss = learn(&trace, &net, x, labels);
            session.compile(&trace, [loss])
        };
    let programs =
        program("first", 8, &first).and_then(|a| Ok([a, program("second", 4, &second)?]));
    (session, programs)
}

/// Learns with a part of the weights frozen.
fn without(
    layer: &'static str,
    optimizer: impl Optimizer + Clone,
) -> impl for<'t> Fn(&'t Trace, &Net, Tensor<'t>, Tensor<'t>) -> Tensor<'t> {
    move |trace, net, x, labels| {
        trace.freeze(move |w| w.name.starts_with(layer));
        whole(optimizer.clone())(trace, net, x, labels)
    }
}

#[test]
fn programs_that_train_the_same_weights_share_a_step_count() {
    let (mut session, programs) = two(whole(Adam::new(0.01)), whole(Adam::new(0.01)));
    let [a, b] = programs.expect("they compile");
    // The mean over a batch of 4 repeated twice is the mean over that batch: both programs make the
    // same step, and alternate like one program.
    let (mut alone, program) = learner(8, 4, whole(Adam::new(0.01)));
    let program = program.expect("it compiles");
    for step in 0..12 {
        let (x, labels) = batch(4, step);
        if step % 3 == 0 {
            let x = ndarray::concatenate![ndarray::Axis(0), x, x];
            let labels = ndarray::concatenate![ndarray::Axis(0), labels, labels];
            session.run(&a, (&x, &labels)).expect("a step");
        } else {
            session.run(&b, (&x, &labels)).expect("a step");
        }
        alone.run(&program, (&x, &labels)).expect("a step");
        for (one, other) in weights(&session).iter().zip(weights(&alone)) {
            assert!(
                (one - other).abs() < 1e-4,
                "step {step}: {one}, alone {other}"
            );
        }
    }
    assert_eq!(
        session.value("optim.step").expect("it is there").sum(),
        12.0
    );
}

#[test]
fn programs_that_train_other_weights_have_separate_step_counts() {
    let adam = || Adam::new(0.01);
    let (_, programs) = two(without("stem", adam()), without("head", adam()));
    let said = text(programs);
    let expected = "\"first\" and \"second\" both count their steps in \"optim.step\" but do not update the same: \
         the first also \"adam.m.head.bias\", \"adam.m.head.weight\", \"adam.v.head.bias\" and 3 more, \
         the second also \"adam.m.stem.bias\", \"adam.m.stem.weight\", \"adam.v.stem.bias\" and 3 more; \
         a count that both move on is wrong for either: give one optimizer a name of its own, as in Adam::new(1e-3).named(\"second\")";
    assert_eq!(said, expected);
    // Another rule for the same weights has another step count; a rule without a count shares none.
    assert!(text(two(whole(adam()), whole(AdamW::new(0.01))).1).contains("both count their steps"));
    two(
        without("stem", Sgd::new(0.1)),
        without("head", Sgd::new(0.1)),
    )
    .1
    .expect("plain descent counts nothing");

    // With a name each has its own count: each program learns as if alone.
    let (mut session, programs) = two(
        without("stem", adam()),
        without("head", Adam::new(Schedule::cosine(0.02, 30)).named("other")),
    );
    let [a, b] = programs.expect("they compile");
    for step in 0..9 {
        let (x, labels) = batch(8, step);
        session.run(&a, (&x, &labels)).expect("a step");
        if step % 3 == 0 {
            session
                .run(&b, (&x.slice(s![..4, ..]), &labels.slice(s![..4])))
                .expect("a step");
        }
    }
    let count = |name: &str| session.value(name).expect("it is there").sum();
    assert_eq!((count("optim.step"), count("other.optim.step")), (9.0, 3.0));
    assert!(count("other.adam.v.stem.weight") > 0.0);
}

#[test]
fn a_name_changes_nothing_but_names() {
    let (mut plain, program) =
        learner(8, 8, whole(AdamW::new(Schedule::cosine(0.02, 9).warmup(3))));
    let (mut named, same) = learner(
        8,
        8,
        whole(AdamW::new(Schedule::cosine(0.02, 9).warmup(3)).named("d")),
    );
    let (program, same) = (program.expect("it compiles"), same.expect("it compiles"));
    for step in 0..6 {
        let (x, labels) = batch(8, step);
        plain.run(&program, (&x, &labels)).expect("a step");
        named.run(&same, (&x, &labels)).expect("a step");
    }
    assert_eq!(weights(&plain), weights(&named));
    let state = |session: &Session| -> Vec<String> {
        session
            .names()
            .filter(|n| n.contains("optim") || n.contains("adamw"))
            .map(str::to_string)
            .collect()
    };
    let expected: Vec<String> = state(&plain)
        .iter()
        .map(|name| format!("d.{name}"))
        .collect();
    assert_eq!(state(&named), expected);
}

/// The error of compiling a mistake, with its line behind `learning.rs:`.
fn mistake(
    learn: impl for<'t> Fn(&'t Trace, &Net, Tensor<'t>, Tensor<'t>) -> Tensor<'t>,
) -> String {
    let said = text(learner(4, 6, learn).1);
    said.split_once("learning.rs:")
        .unwrap_or_else(|| panic!("no line of this file: {said}"))
        .1
        .to_string()
}

#[test]
fn mistakes_name_the_line_and_the_tensor() {
    let lines = include_str!("learning.rs").lines().count() as u32;
    let said = [
        mistake(|trace, net, x, labels| {
            trace.minimize_in_parts(0, Sgd::new(0.1), |_| x.apply(net).cross_entropy(labels))
        }),
        mistake(|trace, net, x, labels| {
            trace.minimize_in_parts(4, Sgd::new(0.1), |i| {
                x.split(0, 4)[i].apply(net).cross_entropy(labels)
            })
        }),
        mistake(|trace, net, x, _| {
            trace.minimize_in_parts(2, Sgd::new(0.1), |i| x.split(0, 2)[i].apply(net))
        }),
        mistake(|trace, net, x, labels| without("steem", Sgd::new(0.1))(trace, net, x, labels)),
        mistake(|trace, net, x, labels| without("", Sgd::new(0.1))(trace, net, x, labels)),
        mistake(|trace, net, x, labels| {
            whole(Sgd::new(0.1).group(|w| w.rank() > 2, Group::new()))(trace, net, x, labels)
        }),
        mistake(|trace, net, x, labels| {
            whole(Adam::new(0.1).group(|w| w.rank() < 2, Group::new().weight_decay(0.1)))(
                trace, net, x, labels,
            )
        }),
        mistake(|trace, net, x, labels| {
            whole(Adam::new(0.1).group(|_| true, Group::new().rate_scale(-1.0)))(
                trace, net, x, labels,
            )
        }),
        mistake(|trace, net, x, labels| whole(Adam::new(0.1).ema(1.0))(trace, net, x, labels)),
        mistake(|trace, net, x, labels| {
            whole(Adam::new(0.1).clip_value(0.0))(trace, net, x, labels)
        }),
        mistake(|trace, net, x, labels| whole(Adam::new(0.1).named(""))(trace, net, x, labels)),
        mistake(|trace, net, x, labels| {
            let loss = whole(Adam::new(0.1))(trace, net, x, labels);
            trace.freeze(|_| true);
            loss
        }),
    ];
    let weights = "\"stem.weight\", \"stem.bias\", \"norm.weight\", \"norm.bias\", \"head.weight\", \"head.bias\"";
    let expected = [
        "minimize_in_parts: a batch of 0 parts has no loss".to_string(),
        "split axis 0 of [6, 12] into 4 parts: 6 does not divide".into(),
        "minimize_in_parts: the loss is f32 [3, 5], not an f32 scalar; mean() makes one".into(),
        format!("freeze: none of the parameters of this trace is chosen; they are {weights}"),
        "minimize: the loss has no gradient with respect to any parameter that is not frozen"
            .into(),
        format!("minimize: a group chooses none of the parameters that learn; they are {weights}"),
        "minimize: adam has no weight decay, which a group sets; AdamW has".into(),
        "minimize: group: the scale of the learning rate is -1, not a finite number of at least 0"
            .into(),
        "minimize: ema: the decay is 1, not in 0..1".into(),
        "minimize: clip_value: the largest size is 0, not a finite number above 0".into(),
        "minimize: an optimizer's name is not empty".into(),
        "freeze: the weights are updated already; freeze them before minimize".into(),
    ];
    for (said, expected) in said.iter().zip(&expected) {
        assert!(
            said.contains(expected.as_str()),
            "{said}\nwhere it should say\n{expected}"
        );
        let at: u32 = said
            .split(':')
            .next()
            .and_then(|n| n.parse().ok())
            .expect("a line");
        assert!((1..=lines).contains(&at), "line {at} of this file");
    }
    let trace = Trace::training().averaged();
    let params = Params::seeded(0);
    let loss = trace
        .input("x", F32, (2, INPUTS))
        .apply(&Net::new(&params, 4))
        .square()
        .mean();
    trace.minimize(loss, Sgd::new(0.1));
    let said = text(
        Session::new(Device::Cpu, params)
            .expect("a session")
            .compile(&trace, [loss]),
    );
    assert!(said.contains("this trace reads averaged weights"), "{said}");
}
