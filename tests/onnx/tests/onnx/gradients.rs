//! Models exported from PyTorch (`data/record.py`) are trained as PyTorch trains them: the
//! gradients of all weights, and the losses of the steps.

use std::path::{Path, PathBuf};

use ndarray::{ArrayD, IxDyn};
use slabwise::feed::Input;
use slabwise::optim::Adam;
use slabwise::prelude::*;
use slabwise::weights::File;
use slabwise_onnx::OnnxModel;

/// An array for the gradients of all weights of a model.
const WEIGHTS_MAX: usize = 64;

fn path(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("data")
        .join(name)
}

fn read<T>(file: &File, name: &str, of: fn([u8; 4]) -> T) -> ArrayD<T> {
    let entry = file
        .get(name)
        .unwrap_or_else(|| panic!("no {name} was recorded"));
    let shape: Vec<usize> = entry.shape.iter().map(|&n| n as usize).collect();
    let words = entry.bytes.chunks_exact(4);
    let values = words
        .map(|word| of(word.try_into().expect("four bytes")))
        .collect();
    ArrayD::from_shape_vec(IxDyn(&shape), values).expect("the file was checked")
}

/// A model with its loss, in a trace for training.
fn loss_of<'t>(model: &OnnxModel, params: &Params, trace: &'t Trace, n: usize) -> Tensor<'t> {
    let inputs = model.declare(trace).expect("all lengths are known");
    let outputs = model.trace(trace, &params.root(), &inputs);
    let logits = outputs.expect("it is expressed")[0];
    logits.cross_entropy(trace.input("labels", I32, (n,)))
}

/// The recorded inputs and labels.
fn batch(file: &File) -> (Box<dyn Input>, ArrayD<i32>) {
    let x: Box<dyn Input> = match file.get("x").expect("it was recorded").dtype {
        F32 => Box::new(read(file, "x", f32::from_le_bytes)),
        _ => Box::new(read(file, "x", i32::from_le_bytes)),
    };
    (x, read(file, "y", i32::from_le_bytes))
}

/// Freezes what PyTorch has no gradient of: an exporter writes constants, such as the mask of
/// causal attention, as weights.
fn freeze_constants(trace: &Trace, params: &Params, file: &File) {
    let constant = |weight: &Param| file.get(&format!("grad.{}", weight.name())).is_none();
    let declared = params.declared();
    let trained = declared.iter().filter(|weight| weight.is_trained());
    let constants: Vec<String> = trained
        .filter(|weight| constant(weight))
        .map(|weight| weight.name().to_string())
        .collect();
    if !constants.is_empty() {
        trace.freeze(move |weight| constants.iter().any(|name| **name == *weight.name));
    }
}

fn check(name: &str) {
    let model = OnnxModel::load(path(&format!("{name}.onnx"))).expect("a model");
    let file = File::open(path(&format!("{name}.safetensors"))).expect("it was recorded");
    let (x, labels) = batch(&file);
    let n = labels.len();
    let feed: [&dyn Input; 2] = [&*x, &labels];
    let losses = read(&file, "loss", f32::from_le_bytes);

    let (params, trace) = (Params::seeded(0), Trace::training());
    let loss = loss_of(&model, &params, &trace, n);
    let recorded = |name: &str| file.get(&format!("grad.{name}")).is_some();
    let declared = params.declared();
    let weights: Vec<&Param> = declared.iter().filter(|p| recorded(p.name())).collect();
    let all = file
        .tensors()
        .filter(|tensor| tensor.name.starts_with("grad."))
        .count();
    assert_eq!(weights.len(), all, "{name}: every weight is a parameter");
    assert!(weights.len() <= WEIGHTS_MAX);
    let gradients: [&Param; WEIGHTS_MAX] = std::array::from_fn(|at| weights[at % weights.len()]);
    let gradients = trace.gradients(loss, gradients);
    let outputs: Vec<Tensor<'_>> = [loss]
        .into_iter()
        .chain(gradients[..weights.len()].iter().copied())
        .collect();
    let mut session = Session::new(Device::Cpu, params).expect("a session");
    let program = session.compile_any(&trace, &outputs).expect("it compiles");
    model.load_weights(&mut session).expect("they fit");
    let results = session.run_any(&program, &feed[..]).expect("it runs");
    let first = results[0].item();
    assert!(
        (first - losses[0]).abs() <= 1e-5 * losses[0],
        "{name}: {first}, not {}",
        losses[0]
    );
    for (weight, result) in weights.iter().zip(&results[1..]) {
        let expected = read(
            &file,
            &format!("grad.{}", weight.name()),
            f32::from_le_bytes,
        );
        let got = result.array::<f32>().expect("of f32");
        assert_eq!(got.shape(), expected.shape(), "{name}: {}", weight.name());
        let largest = expected.iter().fold(0f32, |most, e| most.max(e.abs()));
        for (g, e) in got.iter().zip(&expected) {
            assert!(
                (g - e).abs() <= 1e-3 * e.abs() + 1e-5 * largest,
                "{name}: gradient of {}: {g}, not {e}; the largest is {largest}",
                weight.name()
            );
        }
    }

    let (params, trace) = (Params::seeded(0), Trace::training());
    let loss = loss_of(&model, &params, &trace, n);
    freeze_constants(&trace, &params, &file);
    trace.minimize(loss, Adam::new(0.01));
    let mut session = Session::new(Device::Cpu, params).expect("a session");
    let step = session.compile(&trace, [loss]).expect("it compiles");
    model.load_weights(&mut session).expect("they fit");
    let mut got = Vec::new();
    for _ in 0..losses.len() {
        let [loss] = session.run(&step, &feed[..]).expect("it runs");
        got.push(loss.item());
    }
    // Differences of rounding grow from step to step.
    for (at, (g, e)) in got.iter().zip(&losses).take(10).enumerate() {
        assert!((g - e).abs() <= 1e-3 * e, "{name}: step {at}: {g}, not {e}");
    }
    assert!(got[got.len() - 1] < 0.05 * got[0], "{name}: {got:?}");
    assert_eq!(
        session.last_run().peak_slab_bytes,
        step.plan().slab_bytes(),
        "{name}: planned and measured"
    );
}

#[test]
fn an_exported_cnn_is_trained_as_in_pytorch() {
    check("cnn");
}

#[test]
fn an_exported_transformer_is_trained_as_in_pytorch() {
    check("transformer");
}

/// The losses of three steps as bits, the bytes of the slab, and those of weights and state.
///
/// # Errors
/// No plan fits into the budget.
fn train(name: &str, limit: Option<Bytes>) -> Result<(Vec<u32>, u64, u64)> {
    let model = OnnxModel::load(path(&format!("{name}.onnx"))).expect("a model");
    let file = File::open(path(&format!("{name}.safetensors"))).expect("it was recorded");
    let (x, labels) = batch(&file);
    let feed: [&dyn Input; 2] = [&*x, &labels];
    let (params, trace) = (Params::seeded(0), Trace::training());
    let loss = loss_of(&model, &params, &trace, labels.len());
    freeze_constants(&trace, &params, &file);
    trace.minimize(loss, Adam::new(0.01));
    let mut session = Session::new(Device::Cpu, params).expect("a session");
    if let Some(limit) = limit {
        session = session.with_budget(limit);
    }
    let step = session.compile(&trace, [loss])?;
    model.load_weights(&mut session).expect("they fit");
    let losses = (0..3).map(|_| session.run(&step, &feed[..]).expect("it runs")[0].item());
    let losses = losses.map(f32::to_bits).collect();
    let slab = step.plan().slab_bytes();
    assert_eq!(session.last_run().peak_slab_bytes, slab);
    Ok((losses, slab, session.persistent_bytes()))
}

/// The same bits in fewer bytes.
#[test]
fn an_exported_transformer_is_trained_within_a_budget() {
    let (expected, slab, persistent) = train("transformer", None).expect("it fits");
    let limit = Bytes(persistent + slab * 9 / 10);
    let (losses, tight, _) = train("transformer", Some(limit)).expect("it fits");
    assert_eq!(losses, expected);
    assert!(tight <= slab * 9 / 10, "{tight} of {slab} bytes");
}

/// The slab of the convolutional network has the bytes of its largest kernel already. The search
/// below it recomputes maxima of windows apart from their positions.
#[test]
fn a_budget_that_an_exported_cnn_cannot_meet_is_refused() {
    let (_, slab, persistent) = train("cnn", None).expect("it fits");
    let refused = train("cnn", Some(Bytes(persistent + slab * 9 / 10)));
    let message = refused.expect_err("no kernel fits").to_string();
    assert!(message.contains("is too small for"), "{message}");
}
