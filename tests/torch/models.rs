//! Transformers, diffusion models and autoencoders, small, with weights, inputs and noise from the
//! formula of `full.rs`: some numbers of outputs and gradients, and the losses of ten training
//! steps.

use ndarray::ArrayD;
use slabwise::feed::Input;
use slabwise::nn::Module;
use slabwise::optim::{Adam, AdamW};
use slabwise::prelude::*;
use slabwise::weights::File;
use slabwise_models::{Bert, Diffusion, Vae, Vit};

use crate::full::{classes, fill, noise, some};
use crate::{Case, STEPS, gradients, path};

/// An input of a step.
enum Fed {
    Floats(ArrayD<f32>),
    Integers(ArrayD<i32>),
}

impl Fed {
    /// Uniform in ±1.
    fn even(shape: &[usize], seed: usize) -> Fed {
        Fed::Floats(noise(shape, seed).mapv(|x| 2.0 * x - 1.0))
    }

    fn input(&self) -> &dyn Input {
        match self {
            Fed::Floats(values) => values,
            Fed::Integers(values) => values,
        }
    }

    fn declare<'t>(&self, trace: &'t Trace, name: &str) -> Tensor<'t> {
        match self {
            Fed::Floats(values) => trace.input(name, F32, values.shape()),
            Fed::Integers(values) => trace.input(name, I32, values.shape()),
        }
    }
}

fn declared<'t>(trace: &'t Trace, fed: &[Fed]) -> Vec<Tensor<'t>> {
    let names = (0..).map(|i| format!("input{i}"));
    fed.iter()
        .zip(names)
        .map(|(fed, name)| fed.declare(trace, &name))
        .collect()
}

/// Compares a model: `build` declares it, `step` gives the inputs of a step, `run` output and loss
/// of these.
fn check<M, O: Optimizer>(
    name: &str,
    optimizer: O,
    build: impl Fn(&Scope) -> M,
    step: impl Fn(usize) -> Vec<Fed>,
    run: impl for<'t> Fn(&M, &[Tensor<'t>]) -> [Tensor<'t>; 2],
) {
    let case = Case {
        name: "models",
        file: File::open(path("models", "").with_file_name("models.safetensors"))
            .expect("recorded"),
    };
    let open = || {
        let params = Params::seeded(0);
        let model = build(&params.root());
        let declared = params.declared();
        let session = Session::new(Device::Cpu, params)
            .expect("a session")
            .with_threads(2);
        (session, model, declared)
    };
    let (mut session, model, all) = open();
    let trained: Vec<&Param> = all.iter().filter(|p| p.is_trained()).collect();
    let trace = Trace::training();
    let [out, loss] = run(&model, &declared(&trace, &step(0)));
    let flat = gradients(&trace, loss, &trained);
    let program = session
        .compile(&trace, [out, flat])
        .unwrap_or_else(|e| panic!("{name}: {e}"));
    fill(&mut session, &all);
    let fed = step(0);
    let feed: Vec<&dyn Input> = fed.iter().map(Fed::input).collect();
    let [out, flat] = session.run(&program, &feed[..]).expect("it runs");
    let out = out.array::<f32>().expect("f32");
    case.assert_close(
        &format!("{name}/logits"),
        &some(out.as_slice().expect("flat"), 512),
        1e-4,
    );
    let flat = flat.array::<f32>().expect("f32");
    let mut rest = flat.as_slice().expect("flat");
    for param in trained {
        let (gradient, others) = rest.split_at(param.dims().iter().product());
        rest = others;
        case.assert_close(
            &format!("{name}/grad.{}", param.name()),
            &some(gradient, 32),
            1e-3,
        );
    }

    let (mut session, model, _) = open();
    let trace = Trace::training();
    let [_, loss] = run(&model, &declared(&trace, &step(0)));
    trace.minimize(loss, optimizer);
    let train = session.compile(&trace, [loss]).expect("it compiles");
    let plan = train.plan();
    assert_eq!(
        plan.slab_bytes(),
        plan.lower_bound_bytes(),
        "{name}: planned at its bound"
    );
    fill(&mut session, &all);
    for (i, &expected) in case.floats(&format!("{name}/losses")).iter().enumerate() {
        let fed = step(i);
        let feed: Vec<&dyn Input> = fed.iter().map(Fed::input).collect();
        let got = session.run(&train, &feed[..]).expect("it runs")[0].item();
        assert!(
            (got - expected).abs() <= 1e-4 * expected,
            "{name}: step {i} of {STEPS}: loss {got} instead of {expected}"
        );
    }
}

fn adamw() -> AdamW {
    AdamW::new(1e-3).weight_decay(0.1)
}

/// Tokens and the token to be told at each place.
fn texts(length: usize, vocabulary: usize) -> impl Fn(usize) -> Vec<Fed> {
    move |step| {
        [1000, 2000]
            .map(|seed| Fed::Integers(classes(&[3, length], seed + step, vocabulary)))
            .into()
    }
}

fn classified<'t>(layers: &impl Module, inputs: &[Tensor<'t>]) -> [Tensor<'t>; 2] {
    let logits = inputs[0].apply(layers);
    [logits, logits.cross_entropy(inputs[1])]
}

#[test]
fn bert() {
    let bert = Bert {
        layers: 2,
        width: 24,
        heads: 3,
        inner: 36,
        length: 9,
        positions: 16,
        vocabulary: 40,
        kinds: 2,
    };
    check(
        "bert",
        adamw(),
        |at| bert.layers(at),
        texts(9, 40),
        |layers, inputs| classified(layers, inputs),
    );
}

#[test]
fn vision_transformer() {
    let vit = Vit {
        size: 12,
        inputs: 3,
        patch: 4,
        layers: 2,
        width: 24,
        heads: 3,
        inner: 36,
        classes: 7,
    };
    check(
        "vit",
        adamw(),
        |at| vit.layers(at),
        |step| {
            let labels = Fed::Integers(classes(&[3], 2000 + step, 7));
            vec![Fed::Floats(noise(&[3, 3, 12, 12], 1000 + step)), labels]
        },
        |layers, inputs| classified(layers, inputs),
    );
}

#[test]
fn diffusion() {
    let sizes = Diffusion {
        inputs: 3,
        width: 8,
        levels: 2,
        blocks: 1,
        attention: 1,
        heads: 2,
        groups: 4,
        size: 8,
        classes: 5,
        steps: 1000,
    };
    check(
        "diffusion",
        Adam::new(1e-3),
        |at| sizes.layers(at),
        |step| {
            let times = classes(&[3], 3000 + step, 1000).mapv(|t| t as f32);
            vec![
                Fed::Floats(noise(&[3, 3, 8, 8], 1000 + step)),
                Fed::Integers(classes(&[3], 2000 + step, 5)),
                Fed::Floats(times),
                Fed::even(&[3, 3, 8, 8], 4000 + step),
            ]
        },
        |layers, inputs| {
            let &[x, class, time, noise] = inputs else {
                panic!("four inputs")
            };
            let signal = layers.signal(time).reshape([3, 1, 1, 1]);
            let noisy = x * signal.sqrt() + noise * (1.0 - signal).sqrt();
            let found = layers.noise(noisy, time, class);
            [found, layers.error(x, class, time, noise)]
        },
    );
}

#[test]
fn autoencoder() {
    let vae = Vae {
        inputs: 3,
        width: 8,
        levels: 2,
        blocks: 1,
        latent: 2,
        groups: 4,
        size: 8,
    };
    check(
        "vae",
        Adam::new(1e-3),
        |at| vae.layers(at),
        |step| {
            vec![
                Fed::Floats(noise(&[3, 3, 8, 8], 1000 + step)),
                Fed::even(&[3, 2, 4, 4], 4000 + step),
            ]
        },
        |layers, inputs| {
            let latent = layers.encode(inputs[0]);
            let out = layers.decode(latent.sample(inputs[1]));
            [out, layers.bound(inputs[0], latent, inputs[1])]
        },
    );
}
