//! Attention on a GPU where one is required, else on a driver without a device: kernels of its own
//! where there are some, and products where there are none.

#[path = "../../support/close.rs"]
mod close;

use slabwise::prelude::*;
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
