//! Values that programs show, arrays as text, summaries by layers, and the search for the first
//! kernel whose result is not finite.

use std::sync::mpsc::{Receiver, channel};

use ndarray::{Array1, Array2, ArrayD};
use slabwise::data::HostArray;
use slabwise::half::{bf16, f16};
use slabwise::nn::{Linear, Sequential};
use slabwise::optim::{Adam, Sgd};
use slabwise::prelude::*;
use slabwise::settings::NanCheck;
use slabwise::{CompileOptions, DebugValue, Error, Fuse};

fn new_session(params: Params) -> Session {
    Session::new(Device::Cpu, params)
        .expect("a session")
        .with_threads(2)
}

/// A session whose shown values can be received.
fn watched(params: Params) -> (Session, Receiver<DebugValue>) {
    let (sender, receiver) = channel();
    let session = new_session(params)
        .with_debug(move |value| sender.send(value.clone()).expect("the test receives"));
    (session, receiver)
}

/// Numbers between -1 and 1.
fn noise(n: usize) -> Vec<f32> {
    let number = |i: usize| (i.wrapping_mul(2_654_435_761) % 10_007) as f32 / 5003.5 - 1.0;
    (0..n).map(number).collect()
}

/// Compares a shown value with statistics computed in double precision.
fn check(shown: &DebugValue, values: &[f64], shape: &[usize]) {
    assert_eq!(&shown.shape[..], shape, "{shown}");
    let finite: Vec<f64> = values.iter().copied().filter(|v| v.is_finite()).collect();
    let n = finite.len() as f64;
    let nan = values.iter().filter(|v| v.is_nan()).count();
    let counts = (shown.nan as usize, shown.infinite as usize);
    assert_eq!(counts, (nan, values.len() - finite.len() - nan), "{shown}");
    if finite.is_empty() {
        let all = [shown.min, shown.max, shown.mean, shown.std];
        return assert!(all.iter().all(|v| v.is_nan()), "{shown}");
    }
    let min = finite.iter().copied().fold(f64::INFINITY, f64::min);
    let max = finite.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    assert_eq!((shown.min, shown.max), (min, max), "{shown}");
    let mean = finite.iter().map(|v| v / n).sum::<f64>();
    let scale = min.abs().max(max.abs());
    let squares = finite
        .iter()
        .map(|v| ((v - mean) / scale.max(1e-300)).powi(2));
    let std = (squares.sum::<f64>() / n).sqrt() * scale;
    let near = |a: f64, b: f64| (a - b).abs() <= 1e-5 * scale;
    assert!(near(shown.mean, mean), "{shown}: mean {mean}");
    assert!(near(shown.std, std), "{shown}: std {std}");
}

#[test]
fn statistics_are_those_of_the_values() {
    let special = |mut values: Vec<f32>| {
        values[1] = f32::NAN;
        values[2] = f32::NEG_INFINITY;
        values[4] = f32::INFINITY;
        values[5] = f32::NAN;
        values
    };
    for values in [
        noise(4000),
        special(noise(600)),
        vec![f32::MAX; 7],
        vec![1e-40, -2e-40],
        vec![0.1; 1000],
        vec![0.0],
        vec![f32::NAN, f32::INFINITY],
    ] {
        let (mut session, shown) = watched(Params::seeded(0));
        let trace = Trace::inference();
        let x = trace.input("x", F32, (values.len() as u32,));
        trace.debug("x", x);
        trace.debug("half", x.cast(F16));
        trace.debug("brain", x.cast(BF16));
        let program = session.compile(&trace, [x * 1.0]).expect("it compiles");
        session.run(&program, &values).expect("it runs");
        let of = |convert: fn(f32) -> f64| values.iter().map(|&v| convert(v)).collect::<Vec<_>>();
        let next = || shown.recv().expect("it is shown");
        check(&next(), &of(f64::from), &[values.len()]);
        check(&next(), &of(|v| f16::from_f32(v).into()), &[values.len()]);
        check(&next(), &of(|v| bf16::from_f32(v).into()), &[values.len()]);
    }
    // Integers exactly, truth values as 0 and 1, and scalars.
    let (mut session, shown) = watched(Params::seeded(0));
    let trace = Trace::inference();
    let n = trace.input("n", I32, (2, 3));
    let b = trace.input("b", U8, (4,));
    trace.debug("n", n);
    trace.debug("b", b);
    trace.debug("true", b.gt(1));
    trace.debug("sum", n.sum());
    trace.debug("none", trace.zeros((3, 0)));
    let program = session
        .compile(&trace, [n.sum(), b.cast(I32).sum()])
        .expect("it compiles");
    let numbers = [i32::MIN, 16_777_217, 0, -5, 7, i32::MAX];
    session
        .run(&program, (&numbers, &[0u8, 1, 2, 255]))
        .expect("it runs");
    let next = || shown.recv().expect("it is shown");
    check(&next(), &numbers.map(f64::from), &[2, 3]);
    check(&next(), &[0.0, 1.0, 2.0, 255.0], &[4]);
    check(&next(), &[0.0, 0.0, 1.0, 1.0], &[4]);
    let sum = numbers.iter().fold(0i32, |sum, n| sum.wrapping_add(*n));
    check(&next(), &[f64::from(sum)], &[]);
    let none = next();
    check(&none, &[], &[3, 0]);
    assert!(
        none.to_string()
            .starts_with("none: f32 [3, 0], empty (tests/inspection.rs:")
    );
}

#[test]
fn a_shown_value_is_one_line() {
    let (mut session, shown) = watched(Params::seeded(0));
    let trace = Trace::inference();
    let x = trace.input("x", F32, (4,));
    let y = x.ln();
    trace.debug("y", y);
    let line = line!() - 1;
    let program = session.compile(&trace, [y.exp()]).expect("it compiles");
    session
        .run(&program, [1.0f32, 4.0, 0.0, -1.0])
        .expect("it runs");
    assert_eq!(
        shown.recv().expect("it is shown").to_string(),
        format!(
            "y: f32 [4], min 0, max 1.3863, mean 0.69315, std 0.69315, 1 NaN, 1 infinite (tests/inspection.rs:{line})"
        )
    );
}

#[test]
fn bounded_lengths_are_those_of_the_run() {
    let (mut session, shown) = watched(Params::seeded(0));
    let trace = Trace::inference();
    let x = trace.input("x", F32, (Dim::bounded("batch", 8), 3));
    trace.debug("x", x * 2.0);
    trace.debug("flat", x.flatten(0));
    let program = session.compile(&trace, [x.sum()]).expect("it compiles");
    for n in [0, 1, 5, 8] {
        let values = noise(3 * n);
        session
            .run(
                &program,
                Array2::from_shape_vec((n, 3), values.clone()).expect("it fits"),
            )
            .expect("it runs");
        let doubled: Vec<f64> = values.iter().map(|v| f64::from(v * 2.0)).collect();
        check(&shown.recv().expect("it is shown"), &doubled, &[n, 3]);
        let same: Vec<f64> = values.iter().map(|&v| v.into()).collect();
        check(&shown.recv().expect("it is shown"), &same, &[3 * n]);
    }
}

#[test]
fn data_dependent_lengths_are_those_of_the_run() {
    let (mut session, shown) = watched(Params::seeded(0));
    let trace = Trace::inference();
    let x = trace.input("x", F32, (6,));
    let at = x.gt(0.0).nonzero();
    trace.debug("positions", at);
    let program = session.compile(&trace, [at.sum()]).expect("it compiles");
    for (values, expected) in [
        ([1.0f32, -1.0, 2.0, -1.0, -1.0, 3.0], &[0.0, 2.0, 5.0][..]),
        ([-1.0; 6], &[]),
    ] {
        session.run(&program, values).expect("it runs");
        let value = shown.recv().expect("it is shown");
        assert_eq!(value.shape.iter().product::<usize>(), expected.len());
        check(&value, expected, &value.shape.clone());
    }
}

/// Three layers, their loss, and statistics of values in the middle of fused kernels.
fn training<'t>(
    trace: &'t Trace,
    layers: &[Linear],
    batch: impl Into<Dim>,
    debug: bool,
) -> Tensor<'t> {
    let batch = batch.into();
    let (x, y) = (
        trace.input("x", F32, (batch, 16)),
        trace.input("y", F32, (batch, 4)),
    );
    let mut h = x;
    for (at, layer) in layers.iter().enumerate() {
        h = h.apply(layer);
        if debug {
            trace.debug(&format!("h{at}"), h);
        }
        h = h.tanh() * 2.0;
    }
    let loss = h.mse(y);
    trace.minimize(loss, Adam::new(0.01));
    loss
}

fn layers(params: &Params) -> Vec<Linear> {
    let widths = [16, 64, 64, 4];
    let layer = |at: usize| {
        Linear::new(
            &params.root() / "body" / &*at.to_string(),
            widths[at],
            widths[at + 1],
        )
    };
    (0..3).map(layer).collect()
}

#[test]
fn results_do_not_change_and_every_way_to_run_shows_the_same() {
    let batch = 2048;
    let inputs = || {
        let x = Array2::from_shape_vec((batch, 16), noise(batch * 16)).expect("it fits");
        let y = Array2::from_shape_vec((batch, 4), noise(batch * 4)).expect("it fits");
        (x, y)
    };
    let run = |debug: bool, change: &dyn Fn(Session) -> Session, dynamic: bool| {
        let params = Params::seeded(4);
        let layers = layers(&params);
        let (session, shown) = watched(params);
        let mut session = change(session);
        let trace = Trace::training();
        let loss = training(&trace, &layers, Dim::bounded("batch", batch as u32), debug);
        let program = session.compile(&trace, [loss]).expect("it compiles");
        let mut losses = Vec::new();
        for _ in 0..3 {
            let [loss] = match dynamic {
                true => session.run_dynamic(&program, inputs()),
                false => session.run(&program, inputs()),
            }
            .expect("it runs");
            losses.push(loss.item());
        }
        drop(session);
        let slab = program.plan().slab_bytes();
        (losses, shown.iter().collect::<Vec<_>>(), slab)
    };
    let (losses, none, ..) = run(false, &|s| s, false);
    assert!(none.is_empty());
    let (same, shown, slab) = run(true, &|s| s, false);
    assert_eq!(losses, same);
    let names: Vec<&str> = shown.iter().map(|v| &*v.name).collect();
    assert_eq!(names, ["h0", "h1", "h2"].repeat(3));
    assert_eq!(
        (&*shown[1].layer, &shown[1].shape[..]),
        ("body.1", &[batch, 64][..])
    );
    assert_ne!(shown[0].mean, shown[3].mean, "the weights learn");
    for threads in [1, 3] {
        assert_eq!(run(true, &|s| s.with_threads(threads), false).1, shown);
    }
    assert_eq!(run(true, &|s| s, true).1, shown, "dynamic");
    let persistent = 3 * 4 * (16 * 64 + 64 + 64 * 64 + 64 + 64 * 4 + 4) as u64 + (1 << 12);
    for percent in [90, 80] {
        let budget = Bytes(persistent + slab * percent / 100);
        let (_, budgeted, small) = run(true, &|s| s.with_budget(budget), false);
        assert!(small < slab, "{small} of {slab}");
        assert_eq!(budgeted, shown, "under a budget");
    }
}

#[test]
fn a_batch_that_a_budget_splits_is_shown_as_a_whole() {
    let run = |budget: Budget| {
        let params = Params::seeded(4);
        let [a, b] = [("a", 16, 256), ("b", 256, 4)]
            .map(|(name, i, o)| Linear::new(&params.root() / name, i, o));
        let (session, shown) = watched(params);
        let mut session = session.with_budget(budget);
        let trace = Trace::inference();
        let x = trace.input("x", F32, (Dim::bounded("batch", 512), 16));
        let y = x.apply(&a).tanh().apply(&b);
        trace.debug("y", y);
        let program = session.compile(&trace, [y]).expect("it compiles");
        let x = Array2::from_shape_vec((500, 16), noise(8000)).expect("it fits");
        session.run(&program, &x).expect("it runs");
        let micro = program.plan().budget_report().micro_batched;
        (shown.recv().expect("it is shown"), micro.is_some())
    };
    let (whole, split) = run(Budget::Unlimited);
    assert!(!split && whole.shape[..] == [500, 4]);
    assert_eq!(run(Budget::Fraction(0.5)), (whole, true));
}

#[test]
fn parts_show_their_numbers() {
    let params = Params::seeded(4);
    let layer = Linear::new(&params.root() / "layer", 4, 2);
    let (mut session, shown) = watched(params);
    let trace = Trace::training();
    let x = trace.input("x", F32, (6, 4)).split(0, 3);
    let loss = trace.minimize_in_parts(3, Sgd::new(0.1), |part| {
        trace.debug("x", x[part]);
        x[part].apply(&layer).square().mean()
    });
    trace.debug("loss", loss);
    let program = session.compile(&trace, [loss]).expect("it compiles");
    let values = noise(24);
    session.run(&program, &values).expect("it runs");
    for part in 0..3 {
        let value = shown.recv().expect("it is shown");
        assert_eq!(value.part, Some(part));
        let expected: Vec<f64> = values[part * 8..][..8].iter().map(|&v| v.into()).collect();
        check(&value, &expected, &[2, 4]);
    }
    assert_eq!(shown.recv().expect("it is shown").part, None);
}

#[test]
fn a_mistaken_value_shows_nothing_more() {
    let trace = Trace::inference();
    let x = trace.input("x", F32, (4,));
    trace.debug("bad", x.reshape((5,)));
    let other = Trace::inference();
    other.debug("foreign", x);
    let mut session = new_session(Params::seeded(0));
    let error = session.compile(&trace, [x]).err().expect("a mistake");
    let Error::Trace(mistakes) = &error else {
        panic!("{error}")
    };
    assert_eq!(mistakes.len(), 1, "{error}");
    let error = session.compile::<0>(&other, []).err().expect("a mistake");
    assert!(
        error.to_string().contains("belong to two traces"),
        "{error}"
    );
}

// The search for NaN.

fn not_finite<T>(result: Result<T>) -> (String, slabwise::error::Mistake) {
    match result.err().expect("a kernel gives NaN") {
        Error::NotFinite { kernel, mistake } => (kernel, mistake),
        other => panic!("{other}"),
    }
}

#[test]
fn the_first_kernel_with_nan_is_named_and_nothing_is_changed() {
    for (fuse, dynamic) in [
        (Fuse::default(), false),
        (Fuse::none(), false),
        (Fuse::default(), true),
    ] {
        let params = Params::seeded(4);
        let layers = layers(&params);
        let options = CompileOptions {
            fuse,
            ..CompileOptions::default()
        };
        let mut session = new_session(params)
            .with_options(options)
            .with_nan_check(NanCheck::Nan);
        let trace = Trace::training();
        let (x, y) = (
            trace.input("x", F32, (8, 16)),
            trace.input("y", F32, (8, 4)),
        );
        let h = x.apply(&layers[0]).tanh().apply(&layers[1]);
        let (root, line) = ((h - 100.0).ln(), line!());
        let loss = root.apply(&layers[2]).mse(y);
        trace.minimize(loss, Adam::new(0.01));
        let program = session.compile(&trace, [loss]).expect("it compiles");
        let before: Vec<ArrayD<f32>> = values(&session);
        let (x, y) = (noise(128), noise(32));
        let (_, mistake) = not_finite(match dynamic {
            true => session.run_dynamic(&program, (&x, &y)).map(|_| ()),
            false => session.run(&program, (&x, &y)).map(|_| ()),
        });
        assert_eq!(mistake.layer, "body.1");
        if !dynamic {
            assert_eq!(mistake.location.line(), line, "{mistake}");
        }
        assert!(mistake.message.contains("element [0, 0]"), "{mistake}");
        assert!(
            mistake.message.contains("the first of 512 NaN"),
            "{mistake}"
        );
        assert!(
            mistake.message.contains("its operands are finite"),
            "{mistake}"
        );
        assert_eq!(values(&session), before);
    }
}

fn values(session: &Session) -> Vec<ArrayD<f32>> {
    session
        .names()
        .filter_map(|name| session.value(name).ok())
        .collect()
}

#[test]
fn weights_written_before_the_nan_are_restored() {
    // Two models learn in one program: the first is updated before the second gives NaN, or after.
    for first in [true, false] {
        let params = Params::seeded(1);
        let good = Linear::new(&params.root() / "good", 4, 1);
        let bad = Linear::new(&params.root() / "bad", 4, 1);
        let mut session = new_session(params).with_nan_check(NanCheck::Nan);
        let trace = Trace::training();
        let (x, z) = (trace.input("x", F32, (8, 4)), trace.input("z", F32, (8, 4)));
        let state = trace.state("calls", F32, (), Init::Constant(0.0));
        state.set(state.value() + 1.0);
        let losses = [
            x.apply(&good).square().mean(),
            z.apply(&bad).square().mean(),
        ];
        let [a, b] = if first {
            losses
        } else {
            [losses[1], losses[0]]
        };
        trace.minimize(a + b, Sgd::new(0.5));
        let program = session.compile(&trace, [a + b]).expect("it compiles");
        let (x, mut z) = (noise(32), noise(32));
        session.run(&program, (&x, &z)).expect("all is finite");
        let before = values(&session);
        z[5] = f32::NAN;
        let (_, mistake) = not_finite(session.run(&program, (&x, &z)).map(|_| ()));
        assert!(
            mistake
                .message
                .contains("its operand \"z\" has 1 NaN already"),
            "{mistake}"
        );
        assert_eq!(values(&session), before);
        z[5] = 0.0;
        session.run(&program, (&x, &z)).expect("it goes on");
        assert_ne!(values(&session), before);
    }
}

#[test]
fn healthy_programs_raise_no_alarm() {
    // Masks of -inf, random numbers, joined parts, halves, gathers and scatters, lengths below
    // their bounds, under budgets that split the batch or not.
    for check in [NanCheck::Nan, NanCheck::NanAndInfinite] {
        let mut splits = 0;
        for share in [100u64, 75] {
            let params = Params::seeded(2);
            let layers = layers(&params);
            let table = params.root().param(
                "table",
                (10, 16),
                Init::Normal {
                    mean: 0.0,
                    std: 1.0,
                },
            );
            let trace = Trace::training();
            let batch = Dim::bounded("batch", 512);
            let x = trace.input("x", F32, (batch, 16));
            let index = trace.input("index", I32, (batch,));
            let h = x.dropout(0.1) + trace.param(&table).embed(index);
            let h = h.apply(&layers[0]).relu();
            let h = h.cast(F16).cast(F32).apply(&layers[1]);
            let joined = trace.concat(&[h, h.exp().sqrt()], 1);
            let scores = match check {
                // A mask of -inf is by intent.
                NanCheck::Nan => joined.gt(0.0).select(joined, f32::NEG_INFINITY),
                _ => joined,
            };
            let loss =
                scores.softmax(1).square().sum_over(1).mean() + h.apply(&layers[2]).square().mean();
            trace.minimize(loss, Adam::new(0.01));
            let plan = new_session(params.clone())
                .plan(&trace, [loss])
                .expect("it is planned");
            let persistent = plan.persistent().weights + plan.persistent().state + (1 << 11);
            let budget = Bytes(persistent + plan.slab_bytes() * share / 100);
            let mut session = new_session(params)
                .with_budget(budget)
                .with_nan_check(check);
            let program = session.compile(&trace, [loss]).expect("it compiles");
            splits += u32::from(program.plan().budget_report().micro_batched.is_some());
            for n in [512, 1, 7] {
                let x = Array2::from_shape_vec((n, 16), noise(16 * n)).expect("it fits");
                let index = Array1::from_shape_fn(n, |i| (i % 10) as i32);
                let [loss] = session.run(&program, (&x, &index)).expect("all is finite");
                assert!(loss.item().is_finite());
            }
        }
        assert!(splits > 0, "one of the budgets splits the batch");
    }
}

#[test]
fn infinite_results_count_on_request() {
    let run = |check| {
        let mut session = new_session(Params::seeded(0)).with_nan_check(check);
        let trace = Trace::inference();
        let x = trace.input("x", F32, (3,));
        let program = session
            .compile(&trace, [(1.0 / x).sum()])
            .expect("it compiles");
        session
            .run(&program, [1.0f32, 0.0, 2.0])
            .map(|[sum]| sum.item())
    };
    assert_eq!(run(NanCheck::Off).expect("no check"), f32::INFINITY);
    assert_eq!(run(NanCheck::Nan).expect("it is no NaN"), f32::INFINITY);
    let (_, mistake) = not_finite(run(NanCheck::NanAndInfinite));
    assert!(mistake.message.contains("1 infinite"), "{mistake}");
}

// Arrays as text.

fn text(array: impl Into<HostArray>) -> String {
    array.into().to_string()
}

#[test]
fn arrays_are_written_as_in_numpy() {
    use ndarray::{arr0, arr1, arr2, array};
    assert_eq!(text(arr0(2.5f32)), "2.5 f32 []");
    assert_eq!(text(arr1(&[1.0f32, -2.0, 3.0])), "[ 1., -2.,  3.] f32 [3]");
    assert_eq!(
        text(arr1(&[0.1f32, 0.25, 1.0 / 3.0])),
        "[0.1000, 0.2500, 0.3333] f32 [3]"
    );
    assert_eq!(
        text(arr1(&[1e-8f32, 1.5])),
        "[1.0000e-8,  1.5000e0] f32 [2]"
    );
    assert_eq!(
        text(arr1(&[f32::NAN, f32::NEG_INFINITY, 0.5])),
        "[ NaN, -inf,  0.5] f32 [3]"
    );
    assert_eq!(
        text(arr2(&[[1, -20], [300, 4]])),
        "[[  1, -20],\n [300,   4]] i32 [2, 2]"
    );
    assert_eq!(text(arr1(&[true, false])), "[ true, false] bool [2]");
    assert_eq!(text(arr1(&[7u8, 255])), "[  7, 255] u8 [2]");
    assert_eq!(text(arr1(&[f16::from_f32(0.5)])), "[0.5] f16 [1]");
    assert_eq!(text(arr1(&[bf16::from_f32(-4.0)])), "[-4.] bf16 [1]");
    assert_eq!(
        text(ndarray::Array3::<f32>::zeros((2, 0, 3))),
        "[] f32 [2, 0, 3]"
    );
    assert_eq!(
        text(array![[[1, 2], [3, 4]], [[5, 6], [7, 8]]]),
        "[[[1, 2],\n  [3, 4]],\n\n [[5, 6],\n  [7, 8]]] i32 [2, 2, 2]"
    );
    let long = Array1::from_shape_fn(2000, |i| i as i32);
    assert_eq!(
        text(long),
        "[   0,    1,    2, ..., 1997, 1998, 1999] i32 [2000]"
    );
    let wide = Array2::from_shape_fn((100, 100), |(i, j)| (100 * i + j) as i32);
    assert_eq!(
        text(wide),
        "[[   0,    1,    2, ...,   97,   98,   99],\n [ 100,  101,  102, ...,  197,  198,  199],\n [ 200,  201,  202, ...,  297,  298,  299],\n ...,\n [9700, 9701, 9702, ..., 9797, 9798, 9799],\n [9800, 9801, 9802, ..., 9897, 9898, 9899],\n [9900, 9901, 9902, ..., 9997, 9998, 9999]] i32 [100, 100]"
    );
    // Long rows are broken at 80 columns.
    let broken = text(Array1::from_shape_fn(100, |i| i as f32 + 0.5));
    assert!(
        broken.lines().count() > 1 && broken.lines().all(|line| line.len() <= 80),
        "{broken}"
    );
    // A view in another order is written in its own.
    let turned = array![[1, 2], [3, 4]].reversed_axes();
    assert_eq!(text(turned), "[[1, 3],\n [2, 4]] i32 [2, 2]");
}

#[test]
fn outputs_are_written_with_their_type_and_shape() {
    let mut session = new_session(Params::seeded(0));
    let trace = Trace::inference();
    let x = trace.input("x", F32, (2, 2));
    let outputs = [
        x.sum(),
        x.cast(F16),
        x.cast(BF16),
        x.cast(I32),
        x.cast(U8),
        x.gt(1.0),
    ];
    let program = session.compile(&trace, outputs).expect("it compiles");
    let shown = session
        .run(&program, [0.5f32, 1.0, 2.0, 4.0])
        .expect("it runs")
        .map(|output| {
            assert_eq!(
                output.to_string(),
                output.to_host().expect("it is there").to_string()
            );
            output.to_string()
        });
    assert_eq!(shown[0], "7.5 f32 []");
    assert_eq!(shown[1], "[[0.5, 1.0],\n [2.0, 4.0]] f16 [2, 2]");
    assert_eq!(shown[2], "[[0.5, 1.0],\n [2.0, 4.0]] bf16 [2, 2]");
    assert_eq!(shown[3], "[[0, 1],\n [2, 4]] i32 [2, 2]");
    assert_eq!(shown[4], "[[0, 1],\n [2, 4]] u8 [2, 2]");
    assert_eq!(shown[5], "[[false, false],\n [ true,  true]] bool [2, 2]");
}

// Summaries.

#[test]
fn a_summary_counts_by_layers() {
    let params = Params::seeded(4);
    let layers = layers(&params);
    let model = Sequential::new()
        .then(layers[0].clone())
        .then(layers[1].clone())
        .then(layers[2].clone());
    let mut session = new_session(params.clone());
    let trace = Trace::inference();
    let x = trace.input("x", F32, (32, 16));
    let program = session
        .compile(&trace, [x.apply(&model)])
        .expect("it compiles");
    let summary = session.summary(&program).expect("it is ours");
    assert_eq!(summary.total.kept_bytes + summary.total.backward_flops, 0);

    let trace = Trace::training();
    let loss = training(&trace, &layers, 32, false);
    let program = session.compile(&trace, [loss]).expect("it compiles");
    let summary = session.summary(&program).expect("it is ours");
    let names: Vec<&str> = summary.layers.iter().map(|layer| &*layer.name).collect();
    assert_eq!(names[..3], ["body.0", "body.1", "body.2"], "{summary}");
    for (layer, [i, o]) in summary.layers.iter().zip([[16, 64], [64, 64], [64, 4]]) {
        assert_eq!(layer.output, format!("f32 [32, {o}]"), "{summary}");
        assert_eq!(layer.parameters, i * o + o, "{summary}");
        assert_eq!(layer.parameter_bytes, 4 * (i * o + o), "{summary}");
        assert!(layer.forward_flops >= 2 * 32 * i * o, "{summary}");
        assert!(
            layer.forward_flops < 4 * 32 * i * o + 32 * o * 40,
            "{summary}"
        );
        // One product for the gradient of the weight, another for that of the input.
        assert!(layer.backward_flops >= 2 * 32 * i * o, "{summary}");
    }
    // The backward pass needs the inputs of the products, x and two activations, and each tanh.
    let kept: u64 = summary.layers.iter().map(|layer| layer.kept_bytes).sum();
    assert_eq!(kept, summary.total.kept_bytes);
    let activations = 2 * 32 * 64 * 4;
    assert_eq!(summary.layers[0].kept_bytes, activations, "{summary}");
    assert_eq!(summary.layers[1].kept_bytes, activations, "{summary}");
    let outside = summary.layers.last().expect("there are inputs");
    assert_eq!(outside.name, "", "{summary}");
    assert!(outside.kept_bytes >= 32 * 16 * 4, "{summary}");
    assert_eq!(summary.slab_bytes, program.plan().slab_bytes());
    let text = summary.to_string();
    let widths: Vec<usize> = text.lines().skip(1).take(6).map(str::len).collect();
    assert!(widths.iter().all(|w| *w == widths[0]), "{text}");
    assert!(
        text.contains("(outside of layers)") && text.contains("4,160"),
        "{text}"
    );
    let other = new_session(params);
    other
        .summary(&program)
        .expect_err("another session's program");
}

#[test]
fn bounded_lengths_of_a_summary_are_named() {
    let params = Params::seeded(4);
    let layers = layers(&params);
    let mut session = new_session(params);
    let trace = Trace::training();
    let loss = training(&trace, &layers, Dim::bounded("batch", 32), false);
    let program = session.compile(&trace, [loss]).expect("it compiles");
    let summary = session.summary(&program).expect("it is ours");
    assert_eq!(summary.layers[0].output, "f32 [batch, 64]", "{summary}");
}

// Datasets in training.

#[test]
fn a_loader_feeds_the_training_loop() {
    use slabwise::Fit;
    use slabwise::data::{DataError, Dataset, Items};
    let train = |workers: usize, broken: Option<usize>| {
        let params = Params::seeded(4);
        let layer = Linear::new(&params.root() / "layer", 3, 1);
        let mut session = new_session(params);
        let trace = Trace::training();
        let batch = Dim::bounded("batch", 8);
        let (x, y) = (
            trace.input("x", F32, (batch, 3)),
            trace.input("y", F32, (batch,)),
        );
        let loss = x.apply(&layer).flatten(0).mse(y);
        trace.minimize(loss, Adam::new(0.05));
        let program = session.compile(&trace, [loss]).expect("it compiles");
        let loader = Items((0..50usize).collect::<Vec<_>>())
            .try_map(move |at| match broken {
                Some(bad) if bad == at => Err(DataError::Other("it is broken".into())),
                _ => Ok(Array1::from_vec(noise(3 * at + 3)[3 * at..].to_vec())),
            })
            .augment(3, |x, random| x * random.uniform(0.9, 1.1))
            .map(|x| (x.sum(), x))
            .map(|(sum, x)| (x, sum))
            .batch(8)
            .shuffle(1)
            .workers(workers);
        Fit::new(&program)
            .epochs(8)
            .run_loader(&mut session, &loader)
    };
    let losses = |workers| -> Vec<f64> {
        let fitted = train(workers, None).expect("it trains");
        fitted.epochs.iter().map(|epoch| epoch.loss).collect()
    };
    let one = losses(1);
    assert!(one[7] < one[0] / 4.0, "{one:?}");
    assert_eq!((losses(0), losses(3)), (one.clone(), one));
    let error = train(2, Some(33)).expect_err("an item is broken");
    assert_eq!(error.to_string(), "item 33: it is broken");
}
