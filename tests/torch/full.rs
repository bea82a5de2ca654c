//! The models of the usual benchmarks at full size, with weights from one formula, here and in
//! `record.py`. Compares some numbers of logits and gradients, and the losses of ten training
//! steps.

use ndarray::{ArrayD, IxDyn};
use slabwise::optim::{Adam, AdamW, Sgd};
use slabwise::prelude::*;
use slabwise::weights::File;
use slabwise_models::{Examples, Model};

use crate::{Case, STEPS, exact, gradients, input, loss, path};

/// Numbers in 0..1 on a grid of 2⁻²⁴, from the mixing of MurmurHash3.
pub(super) fn noise(shape: &[usize], seed: usize) -> ArrayD<f32> {
    let mut at = 0u32;
    ArrayD::from_shape_simple_fn(IxDyn(shape), || {
        let mut h = at.wrapping_add((seed as u32).wrapping_mul(0x9E37_79B9));
        at += 1;
        h = (h ^ (h >> 16)).wrapping_mul(0x85EB_CA6B);
        h = (h ^ (h >> 13)).wrapping_mul(0xC2B2_AE35);
        h ^= h >> 16;
        (h >> 8) as f32 / (1 << 24) as f32
    })
}

pub(super) fn classes(shape: &[usize], seed: usize, kinds: usize) -> ArrayD<i32> {
    noise(shape, seed).mapv(|x| (x * kinds as f32) as i32)
}

/// Examples and labels of a step.
fn batch(model: Model, batch: usize, step: usize) -> (Examples, ArrayD<i32>) {
    let shape: Vec<usize> = [batch].into_iter().chain(model.example()).collect();
    if let Model::Gpt(gpt) = model {
        (
            Examples::Tokens(classes(&shape, 1000 + step, gpt.vocabulary)),
            classes(&shape, 2000 + step, gpt.vocabulary),
        )
    } else {
        (
            Examples::Images(noise(&shape, 1000 + step)),
            classes(&[batch], 2000 + step, model.classes()),
        )
    }
}

/// Sets the weights of a compiled model by the formula.
pub(super) fn fill(session: &mut Session, declared: &[Param]) {
    let mut trained: Vec<&Param> = declared.iter().filter(|p| p.is_trained()).collect();
    trained.sort_by(|a, b| a.name().cmp(b.name()));
    for (seed, param) in trained.iter().enumerate() {
        let dims: Vec<usize> = param.dims().to_vec();
        let even = noise(&dims, seed).mapv(|x| 2.0 * x - 1.0);
        let values = if dims.len() > 1 {
            let inputs: usize = dims[1..].iter().product();
            even * (1.0 / (inputs as f64).sqrt()) as f32
        } else if param.name().ends_with("weight") {
            ArrayD::ones(IxDyn(&dims))
        } else {
            even * 0.1f32
        };
        session
            .set_value(param.name(), &values)
            .expect("it is declared");
    }
}

/// Elements at equal distances, at most `most`.
pub(super) fn some(all: &[f32], most: usize) -> ArrayD<f32> {
    let few: Vec<f32> = all
        .iter()
        .step_by(all.len().div_ceil(most))
        .copied()
        .collect();
    ArrayD::from_shape_vec(IxDyn(&[few.len()]), few).expect("flat")
}

fn check(name: &'static str, n: usize, optimizer: impl Optimizer) {
    let case = Case {
        name,
        file: File::open(path("full", "").with_file_name("full.safetensors")).expect("recorded"),
    };
    let model = Model::parse(name).expect("built in");

    let params = Params::seeded(0);
    let network = model.build(&params);
    let declared = params.declared();
    let trained: Vec<&Param> = declared.iter().filter(|p| p.is_trained()).collect();
    let mut session = Session::new(Device::Cpu, params)
        .expect("a session")
        .with_threads(2)
        .with_options(exact());
    let trace = Trace::training();
    let (x, y) = batch(model, n, 0);
    let logits = input(&trace, &x).apply(&network);
    let flat = gradients(&trace, loss(logits, &y), &trained);
    let program = session
        .compile(&trace, [logits, flat])
        .expect("it compiles");
    fill(&mut session, &declared);
    let [logits, flat] = session.run(&program, (&x, &y)).expect("it runs");
    case.assert_close(
        &format!("{name}/logits"),
        &some(
            logits
                .array::<f32>()
                .expect("f32")
                .as_slice()
                .expect("flat"),
            1024,
        ),
        1e-4,
    );
    let flat = flat.array::<f32>().expect("f32");
    let mut rest = flat.as_slice().expect("flat");
    for param in trained {
        let (gradient, others) = rest.split_at(param.dims().iter().product());
        rest = others;
        case.assert_close(
            &format!("{name}/grad.{}", param.name()),
            &some(gradient, 64),
            1e-3,
        );
    }

    let params = Params::seeded(0);
    let network = model.build(&params);
    let mut session = Session::new(Device::Cpu, params)
        .expect("a session")
        .with_threads(2)
        .with_options(exact());
    let trace = Trace::training();
    let loss = loss(input(&trace, &x).apply(&network), &y);
    trace.minimize(loss, optimizer);
    let train = session.compile(&trace, [loss]).expect("it compiles");
    fill(&mut session, &declared);
    for (step, &expected) in case.floats(&format!("{name}/losses")).iter().enumerate() {
        let (x, y) = batch(model, n, step);
        let got = session.run(&train, (&x, &y)).expect("it runs")[0].item();
        assert!(
            (got - expected).abs() <= 1e-4 * expected,
            "{name}: step {step} of {STEPS}: loss {got} instead of {expected}"
        );
    }
}

#[test]
fn perceptron_and_small_convolutions() {
    check("mlp", 8, Sgd::new(0.01).momentum(0.9));
    check("cnn", 4, Adam::new(1e-3));
}

#[test]
fn residual_networks_in_full() {
    check("resnet20", 4, Sgd::new(1e-4).momentum(0.9));
    check("resnet18", 4, Sgd::new(2e-5).momentum(0.9));
}

#[test]
fn transformer_in_full() {
    check("gpt", 1, AdamW::new(3e-4).weight_decay(0.1));
}
