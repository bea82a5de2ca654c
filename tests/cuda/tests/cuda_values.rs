//! Values without elements, and values computed in place of a part of their operand, on a driver
//! without a device.

#[path = "../../support/evaluator.rs"]
mod evaluator;
#[path = "../../support/prefixes.rs"]
mod prefixes;
#[path = "../../support/mod.rs"]
mod support;

use evaluator::against_the_evaluator;
use ndarray::{Array2, ArrayD};
use prefixes::prefixes;
use slabwise::CompileOptions;
use slabwise::prelude::*;
use slabwise_cuda::fake::FakeDriver;
use support::arrays::{close, numbers};

#[test]
fn the_first_part_of_a_value_is_computed_in_place_on_a_device() {
    let Some(_driver) = FakeDriver::install() else {
        return;
    };
    prefixes(Device::Cuda(0), &[4, 33]);
}

/// On a device: layers of width 0, empty batches, and reductions, products, indices and views
/// without elements.
#[test]
fn programs_without_elements_run_on_a_device() {
    let Some(_driver) = FakeDriver::install() else {
        return;
    };
    let run = |device: Device| -> Vec<Vec<f64>> {
        let open = || {
            let untuned = CompileOptions {
                tuning: slabwise::Tuning::Off,
                ..CompileOptions::default()
            };
            Session::new(device, Params::seeded(0))
                .expect("a session")
                .with_threads(1)
                .with_options(untuned)
        };
        let trace = Trace::inference();
        let batch = Dim::bounded("batch", 3);
        let (x, none) = (
            trace.input("x", F32, (batch, 4)),
            trace.input("none", F32, (4, 0)),
        );
        let (image, index) = (
            trace.input("image", F32, (batch, 2, 5, 5)),
            trace.input("index", I32, (batch, 2)),
        );
        let weight = trace.full(0.5, F32, (3, 2, 2, 2));
        let image = image.conv2d(weight).relu().max_pool2d(2);
        let outputs = [
            x.matmul(none).matmul(none.t()),
            none.matmul(none.t()).exp(),
            x.softmax(1).sum_over(0),
            none.softmax(1).sum_over(1),
            x.mean_over(0),
            none.exp().flatten(0).sum(),
            image,
            x.gather(1, index).sum_over(0),
            x.sort(true),
            x.gt(0.0).nonzero(),
            x.masked_select(x.gt(0.0)).sum(),
            trace
                .concat(&[x, x.slice(1, 0..0), x.cumsum(1)], 1)
                .pad([(0, 0), (1, 1)], 0.5),
        ];
        let gradients = [x, none].map(|w| {
            trace.gradients(
                (outputs[0].square().sum() + outputs[6].sum()) + outputs[2].sum(),
                [w],
            )[0]
        });
        let mut session = open();
        let program = session.compile(&trace, outputs).expect("it compiles");
        let slopes = session.compile(&trace, gradients).expect("it compiles");
        let mut all = Vec::new();
        for n in [0, 2, 3] {
            let x = Array2::from_shape_fn((n, 4), |(i, j)| (i as f32 * 1.7 + j as f32).sin());
            let image =
                ArrayD::from_shape_fn(vec![n, 2, 5, 5], |at| (at[0] + at[2] * at[3]) as f32 * 0.1);
            let (none, index) = (
                Array2::<f32>::zeros((4, 0)),
                Array2::<i32>::from_elem((n, 2), 3),
            );
            all.extend(
                session
                    .run(&program, (&x, &none, &image, &index))
                    .expect("it runs")
                    .iter()
                    .map(numbers),
            );
            all.extend(
                session
                    .run(&slopes, (&x, &none, &image, &index))
                    .expect("it runs")
                    .iter()
                    .map(numbers),
            );
        }
        all
    };
    let (on_device, on_cpu) = (run(Device::Cuda(0)), run(Device::Cpu));
    for (at, (a, b)) in on_device.iter().zip(&on_cpu).enumerate() {
        let same = a.len() == b.len() && a.iter().zip(b).all(|(&p, &q)| close(p, q));
        assert!(same, "result {at}: {a:?} on the device, {b:?} on the CPU");
    }
}

/// Graphs drawn at random with lengths of 0 and 1 everywhere, on a device and within budgets.
#[test]
fn random_graphs_without_elements_run_on_a_device() {
    let Some(_driver) = FakeDriver::install() else {
        return;
    };
    let open = || {
        let untuned = CompileOptions {
            tuning: slabwise::Tuning::Off,
            ..CompileOptions::default()
        };
        Session::new(Device::Cuda(0), Params::seeded(0))
            .expect("a session")
            .with_threads(1)
            .with_options(untuned)
    };
    for seed in 500..506 {
        against_the_evaluator(seed, 8, &open);
    }
}

/// Shown statistics are those of the CPU, and the search for NaN names the same line, whether runs
/// are replayed or launched.
#[test]
fn values_are_shown_and_nan_is_found_on_a_device() {
    let Some(_driver) = FakeDriver::install() else {
        return;
    };
    let run = |device: Device| {
        let (sender, shown) = std::sync::mpsc::channel();
        let untuned = CompileOptions {
            tuning: slabwise::Tuning::Off,
            ..CompileOptions::default()
        };
        let mut session = Session::new(device, Params::seeded(0))
            .expect("a session")
            .with_threads(1)
            .with_options(untuned)
            .with_debug(move |value| sender.send(value.clone()).expect("the test receives"));
        let trace = Trace::inference();
        let x = trace.input("x", F32, (3, 4));
        let y = x.ln() * 2.0;
        trace.debug("y", y);
        trace.debug("positions", x.cast(I32));
        let program = session
            .compile(&trace, [y.sum_over(1)])
            .expect("it compiles");
        let inputs = |bad: f32| {
            Array2::from_shape_fn((3, 4), |(i, j)| {
                if (i, j) == (1, 2) {
                    bad
                } else {
                    (i + j) as f32
                }
            })
        };
        for bad in [3.0, -1.0, -1.0, 0.5] {
            session.run(&program, inputs(bad)).expect("it runs");
        }
        let mut session = session.with_nan_check(slabwise::settings::NanCheck::Nan);
        session
            .run(&program, inputs(3.0))
            .expect("ln(0) is infinite");
        let Err(slabwise::Error::NotFinite { mistake, .. }) = session.run(&program, inputs(-1.0))
        else {
            panic!("ln(-1) is NaN");
        };
        assert!(mistake.message.contains("element [1, 2]"), "{mistake}");
        drop(session);
        (shown.iter().collect::<Vec<_>>(), mistake.location)
    };
    let ((on_host, line), (on_device, same)) = (run(Device::Cpu), run(Device::Cuda(0)));
    assert_eq!((line, on_host.len()), (same, 10));
    for (a, b) in on_host.iter().zip(&on_device) {
        assert_eq!((&a.shape, a.nan, a.infinite), (&b.shape, b.nan, b.infinite));
        for (a, b) in [
            (a.min, b.min),
            (a.max, b.max),
            (a.mean, b.mean),
            (a.std, b.std),
        ] {
            assert!((a - b).abs() < 1e-5, "{a} and {b}");
        }
    }
}
