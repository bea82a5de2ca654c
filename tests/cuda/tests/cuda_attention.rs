//! Attention on a GPU where one is required, else on a driver without a device: kernels of its own
//! where there are some, and products where there are none.

#[path = "../../support/close.rs"]
mod close;

use ndarray::{Array2, Array4};
use slabwise::prelude::*;
use slabwise::tensor::AttentionOptions;
use slabwise::{CompileOptions, Precision, Tuning};
use slabwise_cuda::fake::TestDevice;
use slabwise_models::{Model, OptimizerKind};

use close::assert_close;

/// The losses of some steps of a model, and the functions on the device.
fn train(device: Device, model: &str, precision: Precision, tf32: bool) -> (Vec<f32>, Vec<String>) {
    let model = Model::parse(model).expect("a model");
    let params = Params::seeded(1);
    let network = model.build(&params).with_precision(precision);
    let options = CompileOptions {
        tuning: Tuning::Off,
        tf32,
        ..CompileOptions::default()
    };
    let mut session = Session::new(device, params)
        .expect("a session")
        .with_threads(1)
        .with_options(options);
    let program = network
        .training(&mut session, Dim::bounded("batch", 3), OptimizerKind::AdamW)
        .expect("it compiles");
    let losses = [3, 2, 3].into_iter().enumerate().map(|(step, batch)| {
        let (tokens, labels) = model.batch(batch, step as u64);
        session.run(&program, (&tokens, &labels)).expect("a step")[0].item()
    });
    let losses = losses.collect();
    let used = program.resources().into_iter().flatten();
    (losses, used.map(|used| used.function).collect())
}

/// Losses on the device differ from those on the CPU by at most so much of themselves.
fn assert_within(got: &[f32], expected: &[f32], most: f32) {
    for (a, b) in got.iter().zip(expected) {
        assert!(
            (a - b).abs() <= most * b.abs(),
            "{got:?} on the device, {expected:?} on the CPU"
        );
    }
}

/// There are kernels of attention, forward and of both gradients, and what follows their kind in
/// their names is as chosen.
fn assert_all(functions: &[String], is_chosen: impl Fn(&str) -> bool) {
    for kind in [
        "attention_",
        "attention_query_gradients_",
        "attention_key_gradients_",
    ] {
        let own = functions.iter().filter_map(|name| name.strip_prefix(kind));
        let own: Vec<&str> = own.filter(|rest| !rest.contains("gradients")).collect();
        let as_chosen = own.iter().all(|rest| is_chosen(rest));
        assert!(!own.is_empty() && as_chosen, "{kind}: {functions:?}");
    }
}

#[test]
fn transformers_train_as_on_the_cpu() {
    let Some(_device) = TestDevice::find() else {
        return;
    };
    let model = "gpt:layers=2,width=64,heads=2,length=72,vocabulary=40";
    let (expected, _) = train(Device::Cpu, model, Precision::F32, false);
    for tf32 in [false, true] {
        let (got, functions) = train(Device::Cuda(0), model, Precision::F32, tf32);
        match tf32 {
            false => assert_close(&got, &expected),
            true => assert_within(&got, &expected, 2e-3),
        }
        assert_all(&functions, |rest| rest.starts_with("tf32") == tf32);
    }
}

/// Attention of queries, keys and values in bf16 runs in kernels for halves, forward and backward.
/// Beside the roundings that the CPU makes too, those kernels round weights and gradients of
/// scores; losses differ by 6e-5 of themselves.
#[test]
fn transformers_in_bf16_train_as_on_the_cpu() {
    let Some(_device) = TestDevice::find() else {
        return;
    };
    let model = "gpt:layers=2,width=64,heads=2,length=72,vocabulary=40";
    let (expected, _) = train(Device::Cpu, model, Precision::Bf16, false);
    let (got, functions) = train(Device::Cuda(0), model, Precision::Bf16, false);
    assert_within(&got, &expected, 5e-4);
    assert_all(&functions, |rest| rest.starts_with("bf16_"));
}

/// Heads that no kernel is wide enough for are computed by products.
#[test]
fn wide_heads_are_products() {
    let Some(_device) = TestDevice::find() else {
        return;
    };
    let model = "gpt:layers=1,width=160,heads=1,length=12,vocabulary=20";
    let (expected, _) = train(Device::Cpu, model, Precision::F32, false);
    let (got, functions) = train(Device::Cuda(0), model, Precision::F32, false);
    assert_close(&got, &expected);
    let attends = |name: &String| name.starts_with("attention");
    assert!(!functions.iter().any(attends), "{functions:?}");
}

/// With dropout, attention on the device is computed by products, and drops the weights that the CPU
/// drops: values are an identity matrix, so that results are weights.
#[test]
fn the_same_weights_are_dropped_on_a_device() {
    let Some(_device) = TestDevice::find() else {
        return;
    };
    let (queries, width) = (10, 8);
    let run = |device: Device, tiles: Tiles, p: f32| {
        let trace = Trace::training();
        let [q, k] = [("q", 4), ("k", 2)]
            .map(|(name, heads)| trace.input(name, F32, (2, heads, queries, width)));
        let v = trace.input("v", F32, (queries, queries));
        let options = AttentionOptions::new().causal().tiles(tiles).dropout(p);
        let y = q.attention_with(k, v.unsqueeze(0).expand((2, 2, queries, queries)), options);
        let [dq, dk, dv] = trace.gradients(y.square().sum(), [q, k, v]);
        let options = CompileOptions {
            tuning: Tuning::Off,
            ..CompileOptions::default()
        };
        let mut session = Session::new(device, Params::seeded(6))
            .expect("a session")
            .with_threads(1)
            .with_options(options);
        let program = session
            .compile(&trace, [y, dq, dk, dv])
            .expect("it compiles");
        let own = program.resources().into_iter().flatten();
        let own = own
            .filter(|used| used.function.starts_with("attention_"))
            .count();
        let number = |at: usize, salt: usize| ((at * 7 + salt) % 11) as f32 * 0.2 - 1.0;
        let of = |heads: usize, salt: usize| {
            Array4::from_shape_fn((2, heads, queries, width), |(b, h, i, w)| {
                number(((b * heads + h) * queries + i) * width + w, salt)
            })
        };
        let feed = (&of(4, 1), &of(2, 4), &Array2::<f32>::eye(queries));
        let mut values = Vec::new();
        for _ in 0..2 {
            for output in session.run(&program, feed).expect("it runs") {
                values.push(output.array::<f32>().expect("f32"));
            }
        }
        (values, own)
    };
    for tiles in [Tiles::Auto, Tiles::Queries(4)] {
        let [on_device, on_cpu] =
            [Device::Cuda(0), Device::Cpu].map(|device| run(device, tiles, 0.4));
        assert_eq!(on_device.1, 0, "{tiles:?}");
        for (at, (a, b)) in on_device.0.iter().zip(&on_cpu.0).enumerate() {
            assert_eq!(a.shape(), b.shape());
            for (a, b) in a.iter().zip(b) {
                let same_zero = at % 4 != 0 || (*a == 0.0) == (*b == 0.0);
                let close = (a - b).abs() <= 1e-5 * (1.0 + b.abs());
                assert!(
                    same_zero && close,
                    "{a} on the device, {b} on the CPU, result {at}, {tiles:?}"
                );
            }
        }
        assert!(
            on_device.0[0] != on_device.0[4],
            "each step draws other numbers"
        );
    }
    assert!(run(Device::Cuda(0), Tiles::Auto, 0.0).1 > 0);
}
