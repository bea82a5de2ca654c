//! Transformers, diffusion models and autoencoders, small, with weights, inputs and noise from the
//! formula of `full.rs`: some numbers of outputs and gradients, and the losses of ten training
//! steps.

use ndarray::{Array2, ArrayD, arr0};
use slabwise::feed::Input;
use slabwise::nn::Module;
use slabwise::optim::{Adam, AdamW};
use slabwise::prelude::*;
use slabwise::tensor::RopeScaling;
use slabwise::weights::File;
use slabwise_models::{Bert, CACHED, Diffusion, Llama, Sampling, Vae, Vit};

use crate::full::{classes, fill, noise, some};
use crate::{Case, STEPS, exact, gradients, path};

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
    // The default effort of the planner leaves 640 bytes above the bound of the diffusion model.
    let mut options = exact();
    options.planner.effort = 10_000_000;
    let open = || {
        let params = Params::seeded(0);
        let model = build(&params.root());
        let declared = params.declared();
        let session = Session::new(Device::Cpu, params)
            .expect("a session")
            .with_threads(2)
            .with_options(options);
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
        classified,
    );
}

const LLAMA: Llama = Llama {
    layers: 2,
    width: 24,
    heads: 6,
    key_heads: 2,
    inner: 32,
    length: 11,
    vocabulary: 40,
    tied: false,
    base: 500.0,
    scaling: RopeScaling::None,
    eps: 1e-5,
    ..Llama::SMALL
};

#[test]
fn llama() {
    check(
        "llama",
        adamw(),
        |at| LLAMA.layers(at),
        texts(11, 40),
        classified,
    );
}

/// Two hundred tokens one by one, after a prompt that is read at once: the logits are those of the
/// whole text, and each token runs the same kernels.
#[test]
fn llama_continues_texts_from_its_cache() {
    const PROMPT: usize = 5;
    const ALL: usize = PROMPT + 200;
    let params = Params::seeded(5);
    let decoder = Llama {
        length: ALL,
        ..LLAMA
    }
    .layers(&params.root());
    let mut session = Session::new(Device::Cpu, params)
        .expect("a session")
        .with_threads(2);
    let mut program = |name: &str, new: usize| {
        let trace = Trace::inference().named(name);
        let logits = decoder.continued(trace.input("tokens", I32, (2, new)), ALL);
        let next = Sampling::new().temperature(0.0).of(logits);
        session
            .compile(&trace, [logits, next])
            .expect("it compiles")
    };
    let (read, write) = (program("read", PROMPT), program("write", 1));
    let trace = Trace::inference().named("whole");
    let logits = trace.input("tokens", I32, (2, ALL)).apply(&decoder);
    let whole = session.compile(&trace, [logits]).expect("it compiles");

    let mut texts = Array2::<i32>::zeros((2, ALL));
    let prompt = classes(&[2, PROMPT], 7, 40);
    let mut logits: Vec<ArrayD<f32>> = Vec::new();
    for text in 0..2 {
        session.set_value(CACHED, &arr0(0.0f32)).expect("a scalar");
        logits.clear();
        for at in PROMPT..ALL {
            let out = match at {
                PROMPT => session.run(&read, (&prompt,)),
                _ => {
                    let last = texts.slice(ndarray::s![.., at - 1..at]).to_owned();
                    session.run(&write, (&last,))
                }
            };
            let [given, next] = out.expect("it runs");
            logits.push(given.array().expect("f32"));
            if at == PROMPT {
                let mut begin = texts.slice_mut(ndarray::s![.., ..PROMPT]);
                begin.assign(
                    &prompt
                        .clone()
                        .into_dimensionality::<ndarray::Ix2>()
                        .expect("two axes"),
                );
            }
            let next = next.array::<i32>().expect("i32");
            (0..2).for_each(|row| texts[[row, at]] = next[[row]]);
        }
        // A second text from the same caches is the same.
        assert_eq!(logits.len(), 200, "text {text}");
    }
    let [expected] = session.run(&whole, (&texts,)).expect("it runs");
    let expected = expected.array::<f32>().expect("f32");
    for (i, got) in logits.iter().enumerate() {
        let expected = expected.slice(ndarray::s![.., PROMPT - 1 + i, ..]);
        let largest = expected.iter().fold(0.0f32, |n, v| n.max(v.abs()));
        for (g, e) in got.iter().zip(&expected) {
            assert!(
                (g - e).abs() <= 1e-4 * largest,
                "token {i}: {g} instead of {e}, largest {largest}"
            );
        }
    }
    // The cache is full: one more token fails, and nothing has changed.
    let last = Array2::<i32>::zeros((2, 1));
    let before = session.value(CACHED).expect("a state");
    assert_eq!(before.sum(), (ALL - 1) as f32);
    session.run(&write, (&last,)).expect("the last place");
    assert!(session.run(&write, (&last,)).is_err());
    assert_eq!(session.value(CACHED).expect("a state").sum(), ALL as f32);
}

#[test]
fn sampling_keeps_to_the_likeliest_tokens() {
    let trace = Trace::inference().sampling();
    let rows = trace.input("logits", F32, (4000, 5));
    let all = [
        Sampling::new(),
        Sampling::new().top_k(2),
        Sampling::new().top_p(0.75),
        Sampling::new().temperature(0.25),
        Sampling::new().top_k(3).top_p(0.01),
        Sampling::new().temperature(0.0),
    ]
    .map(|sampling| sampling.of(rows));
    let mut session = Session::new(Device::Cpu, Params::seeded(1)).expect("a session");
    let program = session.compile(&trace, all).expect("it compiles");
    let shares = [0.1f32, 0.5, 0.05, 0.3, 0.05];
    let logits = Array2::from_shape_fn((4000, 5), |(_, i)| shares[i].ln());
    let out = session.run(&program, (&logits,)).expect("it runs");
    let counts = |i: usize| {
        let tokens = out[i].array::<i32>().expect("i32");
        let mut counts = [0usize; 5];
        tokens.iter().for_each(|&t| counts[t as usize] += 1);
        counts
    };
    let near = |got: usize, share: f64| (got as f64 / 4000.0 - share).abs() < 0.04;
    let any = counts(0);
    assert!(
        (0..5).all(|i| near(any[i], f64::from(shares[i]))),
        "{any:?}"
    );
    for i in [1, 2] {
        // 0.5 alone is less than 0.75, with 0.3 it is more.
        let two = counts(i);
        assert_eq!([two[0], two[2], two[4]], [0; 3]);
        assert!(near(two[1], 0.625) && near(two[3], 0.375), "{two:?}");
    }
    let sharp = counts(3);
    let total: f64 = shares.iter().map(|s| f64::from(*s).powi(4)).sum();
    assert!(near(sharp[1], 0.0625 / total), "{sharp:?}");
    for i in [4, 5] {
        assert_eq!(counts(i), [0, 4000, 0, 0, 0]);
    }
}

#[test]
fn sampling_of_a_vocabulary_that_may_be_smaller_is_refused() {
    let trace = Trace::inference().sampling();
    let rows = trace.input("logits", F32, (2, Dim::bounded("vocabulary", 100)));
    let token = Sampling::new().top_k(3).of(rows);
    let mut session = Session::new(Device::Cpu, Params::seeded(1)).expect("a session");
    let error = session.compile(&trace, [token]).map(drop);
    let error = error.expect_err("there may be one token").to_string();
    for part in ["topk", "vocabulary", "does not have 3 elements"] {
        assert!(error.contains(part), "{error}");
    }
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
        classified,
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
