//! Values without elements, and values computed in place of a part of their operand, on a GPU where
//! one is required, else on a driver without a device.

#[path = "../../support/evaluator.rs"]
mod evaluator;
#[path = "../../support/prefixes.rs"]
mod prefixes;
#[path = "../../support/mod.rs"]
mod support;

use evaluator::against_the_evaluator;
use ndarray::{Array2, ArrayD};
use prefixes::prefixes;
use slabwise::nn::{Embedding, Linear};
use slabwise::prelude::*;
use slabwise::tensor::{AttentionOptions, ConvOptions, Interpolate, Padding, PoolOptions, Running};
use slabwise::{CompileOptions, Quantization};
use slabwise_cuda::fake::TestDevice;
use support::arrays::{close, numbers};

#[test]
fn the_first_part_of_a_value_is_computed_in_place_on_a_device() {
    let Some(_device) = TestDevice::find() else {
        return;
    };
    prefixes(Device::Cuda(0), &[4, 33]);
}

/// On a device: layers of width 0, empty batches, and reductions, products, indices and views
/// without elements.
#[test]
fn programs_without_elements_run_on_a_device() {
    let Some(_device) = TestDevice::find() else {
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
    let Some(_device) = TestDevice::find() else {
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

/// Results on a device without tuning, and on the CPU.
fn on_both<const N: usize>(
    build: impl for<'t> Fn(&'t Trace) -> [Tensor<'t>; N],
    inputs: &[&dyn slabwise::feed::Input],
) -> [Vec<Vec<f64>>; 2] {
    [Device::Cuda(0), Device::Cpu].map(|device| {
        let untuned = CompileOptions {
            tuning: slabwise::Tuning::Off,
            ..CompileOptions::default()
        };
        let mut session = Session::new(device, Params::seeded(0))
            .expect("a session")
            .with_threads(1)
            .with_options(untuned);
        let trace = Trace::inference();
        let program = session.compile(&trace, build(&trace)).expect("it compiles");
        let outputs = session.run(&program, inputs).expect("it runs");
        outputs.iter().map(numbers).collect()
    })
}

fn keyed(trace: &Trace) -> [Tensor<'_>; 8] {
    let [a, b] = trace.key(0x1234_5678_9ABC).split::<2>();
    let words = trace.input("words", I32, (3,));
    let step = trace.input("step", I32, ());
    let given = slabwise::Key::of(words).fold_in(step);
    [
        a.uniform((7, 65)),
        a.bernoulli(0.25, (300,)).cast(I32),
        b.randint(-5..1000, (4, 33)),
        b.fold_in(3).permutation(50),
        given.uniform((129,)),
        given.truncated_normal(-1.0..2.0, (40,)),
        b.normal((5, 9)),
        b.categorical(trace.zeros((6, 4)), 1),
    ]
}

/// Keys, and keys made from keys, of constants and of inputs. The functions ln and cos round
/// differently on a device.
#[test]
fn numbers_of_a_key_have_the_bits_of_the_cpu_on_a_device() {
    let Some(_device) = TestDevice::find() else {
        return;
    };
    let words = ndarray::arr1(&[7i32, -9, 11]).into_dyn();
    let step = ndarray::arr0(5i32).into_dyn();
    let [device, cpu] = on_both(keyed, &[&words, &step]);
    for (at, (a, b)) in device.iter().zip(&cpu).enumerate() {
        let alike = |(&p, &q): (&f64, &f64)| if at < 5 { p == q } else { close(p, q) };
        assert!(
            a.len() == b.len() && a.iter().zip(b).all(alike),
            "result {at}: {a:?} on the device, {b:?} on the CPU"
        );
    }
}

fn optional(trace: &Trace) -> [Tensor<'_>; 9] {
    let x = trace.input("x", F32, (2, 4, 6, 5));
    let (row, volume) = (x.flatten(2), x.unflatten(2, (2, 3)));
    let weight =
        trace.full(0.5, F32, (4, 2, 3)) * row.slice(0, ..1).slice(2, ..3).squeeze(0).mean();
    let cube = x
        .slice(2, ..2)
        .slice(3, ..2)
        .slice(0, ..1)
        .reshape([2, 2, 2, 2, 1]);
    let options = AttentionOptions::new().causal().window(2).soft_cap(3.0);
    let by = Running {
        exclusive: false,
        reverse: true,
    };
    [
        x.attention_with(x.slice(1, ..2), x.slice(1, 2..), options),
        row.conv1d_with(
            weight,
            ConvOptions::new().groups(2).padding(Padding::Causal),
        ),
        volume
            .slice(1, ..2)
            .conv_transpose3d(cube, ConvOptions::new().stride([2, 1, 2])),
        x.max_pool2d_with(
            PoolOptions::new([2, 3])
                .stride(2)
                .padding([(1, 0), (0, 1)])
                .ceil(),
        ),
        x.avg_pool2d_with(PoolOptions::new(2).dilation(2).stride(1)),
        x.interpolate([4, 9], Interpolate::AntialiasedCubic),
        x.interpolate(
            [13, 3],
            Interpolate::Linear {
                align_corners: true,
            },
        ),
        row.cumprod(2) + row.linear_recurrence(row.tanh(), 2, by),
        row.logcumsumexp(2) + row.cummax(2).0,
    ]
}

/// Attention, convolutions, poolings, resampling and recurrences with their options.
#[test]
fn options_of_methods_count_on_a_device() {
    let Some(_device) = TestDevice::find() else {
        return;
    };
    let mut rng = support::Rng(31);
    let x = ArrayD::from_shape_fn(vec![2, 4, 6, 5], |_| rng.float(-2.0, 2.0) as f32);
    let [device, cpu] = on_both(optional, &[&x]);
    for (at, (a, b)) in device.iter().zip(&cpu).enumerate() {
        let same = a.len() == b.len() && a.iter().zip(b).all(|(&p, &q)| close(p, q));
        assert!(same, "result {at}: {a:?} on the device, {b:?} on the CPU");
    }
}

/// Shown statistics are those of the CPU, and the search for NaN names the same line, whether runs
/// are replayed or launched.
#[test]
fn values_are_shown_and_nan_is_found_on_a_device() {
    let Some(_device) = TestDevice::find() else {
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

/// Products of few rows decode quantized weights as they read them. Rows of tables, and the weights of
/// products of more rows, are decoded by elementwise kernels.
#[test]
fn quantized_weights_stand_for_the_same_floats_on_a_device() {
    let Some(_device) = TestDevice::find() else {
        return;
    };
    let bounded = |most| Dim::bounded("rows", most);
    for ((bits, block), rows, count, is_few) in [
        ((4, 32), Dim::Fixed(1), 1, true),
        ((4, 32), bounded(8), 6, true),
        ((2, 32), Dim::Fixed(5), 5, true),
        ((8, 32), Dim::Fixed(2), 2, true),
        ((4, 32), Dim::Fixed(20), 20, true),
        ((4, 32), bounded(40), 1, false),
        ((8, 32), Dim::Fixed(33), 33, false),
        ((2, 16), Dim::Fixed(5), 5, false),
    ] {
        let run = |device: Device| -> (Vec<Vec<f64>>, Vec<String>) {
            let params = Params::seeded(3);
            let at = params.root().quantized(Quantization { bits, block });
            let table = Embedding::new(&at / "table", 20, 96);
            let layer = Linear::new(&at / "layer", 96, 24);
            let trace = Trace::inference();
            let tokens = trace.input("tokens", I32, (rows,));
            let x = tokens.apply(&table);
            let outputs = [x, x.apply(&layer).relu()];
            let untuned = CompileOptions {
                tuning: slabwise::Tuning::Off,
                ..CompileOptions::default()
            };
            let mut session = Session::new(device, params)
                .expect("a session")
                .with_threads(1)
                .with_options(untuned);
            let program = session.compile(&trace, outputs).expect("it compiles");
            let tokens: ndarray::Array1<i32> = (0..count).map(|i| i * 7 % 20).collect();
            let results = session.run(&program, (&tokens,)).expect("a run");
            let values = |y: slabwise::Output<'_>| {
                y.view::<f32>()
                    .expect("f32")
                    .iter()
                    .map(|&v| v.into())
                    .collect()
            };
            let values = results.map(values).to_vec();
            let used = program.resources().into_iter().flatten();
            (values, used.map(|kernel| kernel.function).collect())
        };
        let ((got, names), (expected, _)) = (run(Device::Cuda(0)), run(Device::Cpu));
        let kernel = format!("gemv_{bits}bits_");
        let decodes = names.iter().any(|name| name.starts_with(&kernel));
        assert_eq!(decodes, is_few, "{bits} bits, {rows:?}: {names:?}");
        // Rows are decoded by the same operations.
        assert_eq!(got[0], expected[0]);
        for (a, b) in got[1].iter().zip(&expected[1]) {
            assert!((a - b).abs() <= 1e-4, "{a} on the device, {b} on the CPU");
        }
    }
}
