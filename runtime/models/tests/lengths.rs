//! Sequences of other lengths than a model declares, and heads that do not divide a width.

use ndarray::{Array2, ArrayD, s};
use slabwise::prelude::*;
use slabwise_models::{Bert, Diffusion, Gpt, Llama, Vae, Vit};

const GPT: Gpt = Gpt {
    layers: 2,
    width: 8,
    heads: 2,
    length: 4,
    vocabulary: 10,
    tied: false,
};
const LLAMA: Llama = Llama {
    layers: 2,
    width: 8,
    heads: 2,
    key_heads: 1,
    inner: 16,
    length: 4,
    vocabulary: 10,
    ..Llama::SMALL
};
const BERT: Bert = Bert {
    layers: 2,
    width: 8,
    heads: 2,
    inner: 16,
    length: 4,
    positions: 6,
    vocabulary: 10,
    kinds: 2,
};

fn tokens(rows: usize, length: usize) -> Array2<i32> {
    Array2::from_shape_fn((rows, length), |(i, j)| ((i * 3 + j * 7 + 1) % 10) as i32)
}

/// The text of the error of compiling a model's result for inputs of a shape.
fn refused<M: Module>(model: impl Fn(&Scope) -> M, shape: impl Into<Shape>) -> (String, u32) {
    let params = Params::seeded(1);
    let model = model(&params.root());
    let trace = Trace::inference();
    let x = trace.input("tokens", I32, shape);
    let (y, line) = (x.apply(&model), line!());
    let mut session = Session::new(Device::Cpu, params).expect("a session");
    let error = session.compile(&trace, [y]).map(|_| ());
    (error.expect_err("a mistake").to_string(), line)
}

/// The results for the first tokens of each row, for several lengths.
fn results<M: Module>(model: impl Fn(&Scope) -> M, lengths: &[usize]) -> Vec<ArrayD<f32>> {
    let params = Params::seeded(1);
    let model = model(&params.root());
    let mut session = Session::new(Device::Cpu, params).expect("a session");
    let all = tokens(4, 6);
    let run = |&length: &usize| {
        let trace = Trace::inference().named(&format!("of {length}"));
        let y = trace.input("tokens", I32, (4, length)).apply(&model);
        let program = session.compile(&trace, [y]).expect("it compiles");
        let part = all.slice(s![.., ..length]).to_owned();
        let out = session.run(&program, (&part,)).expect("a run");
        out[0].array::<f32>().expect("f32")
    };
    lengths.iter().map(run).collect()
}

/// In a model whose tokens see only earlier ones, those of a shorter text give the same logits.
#[track_caller]
fn assert_beginnings(results: &[ArrayD<f32>]) {
    let long = &results[results.len() - 1];
    for short in results {
        let length = short.shape()[1];
        assert_eq!(short.shape(), [4, length, 10]);
        let begin = long.slice(s![.., ..length, ..]);
        let most = (short - &begin).fold(0.0f32, |most, x| most.max(x.abs()));
        assert!(most < 1e-5, "{most} at length {length}");
    }
}

#[test]
fn shorter_texts_are_not_merged() {
    assert_beginnings(&results(|at| GPT.layers(at), &[1, 2, 3, 4]));
    assert_beginnings(&results(|at| LLAMA.layers(at), &[1, 2, 3, 4, 6]));
}

#[test]
fn an_encoder_reads_texts_of_other_lengths() {
    let params = Params::seeded(1);
    let encoder = BERT.encoder(&params.root());
    let mut session = Session::new(Device::Cpu, params).expect("a session");
    let all = tokens(4, 6);
    let mut run = |length: usize, present: usize| {
        let trace = Trace::inference().named(&format!("{length} {present}"));
        let tokens = trace.input("tokens", I32, (4, length));
        let seen = trace.input("present", Bool, (4, length));
        let vectors = encoder.encode(tokens, None, Some(seen)).mean_where(seen);
        let program = session.compile(&trace, [vectors]).expect("it compiles");
        let seen = Array2::from_shape_fn((4, length), |(_, at)| at < present);
        let part = all.slice(s![.., ..length]).to_owned();
        let out = session.run(&program, (&part, &seen)).expect("a run");
        out[0].array::<f32>().expect("f32")
    };
    for present in 1..=3 {
        let long = run(4, present);
        for length in [present, 3, 6] {
            let most = (run(length, present) - &long).fold(0.0f32, |most, x| most.max(x.abs()));
            assert!(most < 1e-5, "{most}: {present} of {length}");
        }
    }
    let shapes: Vec<Vec<usize>> = results(|at| BERT.layers(at), &[1, 2, 4, 6])
        .iter()
        .map(|x| x.shape().to_vec())
        .collect();
    assert_eq!(shapes, [[4, 1, 10], [4, 2, 10], [4, 4, 10], [4, 6, 10]]);
}

/// A row without a text, as fills up the last batch, is zeros, as in the usual mean pooling.
#[test]
fn a_text_of_absent_tokens_has_a_vector_of_zeros() {
    let params = Params::seeded(1);
    let encoder = BERT.encoder(&params.root());
    let mut session = Session::new(Device::Cpu, params).expect("a session");
    let trace = Trace::inference();
    let tokens_in = trace.input("tokens", I32, (2, 4));
    let seen = trace.input("present", Bool, (2, 4));
    let vectors = encoder.encode(tokens_in, None, Some(seen)).mean_where(seen);
    let program = session.compile(&trace, [vectors]).expect("it compiles");
    let mut run = |second: usize| {
        let seen = Array2::from_shape_fn((2, 4), |(row, at)| row == 0 || at < second);
        let out = session.run(&program, (&tokens(2, 4), &seen));
        out.expect("a run")[0].array::<f32>().expect("f32")
    };
    let (without, with) = (run(0), run(3));
    assert_eq!(without.slice(s![0, ..]), with.slice(s![0, ..]));
    assert!(with.iter().all(|x| x.is_finite()));
    assert!(
        without.slice(s![1, ..]).iter().all(|x| *x == 0.0),
        "{without}"
    );
}

#[track_caller]
fn assert_says((text, line): (String, u32), parts: &[&str]) {
    let place = format!("{}:{line}:", file!());
    for part in [&*place].iter().chain(parts) {
        assert!(text.contains(part), "{part:?} is not in: {text}");
    }
}

#[test]
fn lengths_that_a_model_cannot_read_are_refused() {
    let of_gpt = |shape: Shape| refused(|at| GPT.layers(at), shape);
    let of_llama = |shape: Shape| refused(|at| LLAMA.layers(at), shape);
    let of_bert = |shape: Shape| refused(|at| BERT.layers(at), shape);
    assert_says(
        of_gpt((2, 5).into()),
        &["gpt of i32 [2, 5]", "at most 4 tokens"],
    );
    assert_says(
        of_bert((2, 7).into()),
        &["bert of i32 [2, 7]", "at most 6 tokens"],
    );
    for (said, name) in [
        (of_gpt((4,).into()), "gpt"),
        (of_llama((4,).into()), "llama"),
        (of_bert((4,).into()), "bert"),
    ] {
        assert_says(said, &[&format!("{name} of i32 [4]"), "[n, length]"]);
    }
    let any = || Shape::from((2, Dim::bounded("length", 4)));
    for (said, name) in [
        (of_gpt(any()), "gpt"),
        (of_llama(any()), "llama"),
        (of_bert(any()), "bert"),
    ] {
        assert_says(said, &[&format!("{name} of i32 [2, length]"), "fixed"]);
    }
}

/// The mistakes of declaring a model.
macro_rules! declared {
    ($sizes:expr) => {{
        let params = Params::seeded(1);
        let (_layers, line) = ($sizes.layers(&params.root()), line!());
        let said: Vec<String> = params.mistakes().iter().map(|m| m.to_string()).collect();
        (said.join("\n"), line)
    }};
}

#[test]
fn heads_that_do_not_divide_are_named() {
    let both = |what: &'static str| [what, "12", "5"];
    let gpt = Gpt {
        width: 12,
        heads: 5,
        ..GPT
    };
    assert_says(
        declared!(gpt),
        &both("a width of 12 does not divide into 5 heads"),
    );
    let llama = Llama {
        width: 12,
        heads: 5,
        ..LLAMA
    };
    assert_says(
        declared!(llama),
        &both("a width of 12 does not divide into 5 heads"),
    );
    let bert = Bert {
        width: 12,
        heads: 5,
        ..BERT
    };
    assert_says(
        declared!(bert),
        &both("a width of 12 does not divide into 5 heads"),
    );
    let vit = Vit {
        width: 12,
        heads: 5,
        layers: 1,
        size: 32,
        ..Vit::BASE
    };
    assert_says(
        declared!(vit),
        &both("a width of 12 does not divide into 5 heads"),
    );
    let diffusion = Diffusion {
        heads: 5,
        ..Diffusion::CIFAR
    };
    assert_says(
        declared!(diffusion),
        &["a width of 128 does not divide into 5 heads"],
    );
    let llama = Llama {
        width: 12,
        heads: 6,
        key_heads: 4,
        ..LLAMA
    };
    assert_says(declared!(llama), &["6 heads of queries", "4 of keys"]);
    let llama = Llama {
        width: 12,
        heads: 0,
        ..LLAMA
    };
    assert_says(
        declared!(llama),
        &["a width of 12 does not divide into 0 heads"],
    );
    let llama = Llama {
        width: 12,
        heads: 4,
        ..LLAMA
    };
    assert_says(declared!(llama), &["heads of width 3", "even"]);
    let own = Llama {
        width: 12,
        heads: 5,
        key_heads: 1,
        head_width: Some(4),
        ..LLAMA
    };
    assert_eq!(declared!(own).0, "", "its own width of a head");
}

#[test]
fn patches_that_do_not_fill_an_image_are_named() {
    let vit = Vit {
        size: 30,
        layers: 1,
        ..Vit::BASE
    };
    assert_says(declared!(vit), &["a size of 30", "patches of 16"]);
    let vit = Vit { patch: 0, ..vit };
    assert_says(declared!(vit), &["a size of 30", "patches of 0"]);
}

/// The divergence is divided by the numbers of an image, not by those of the declared size.
#[test]
fn the_bound_of_an_autoencoder_is_per_number_of_its_images() {
    let vae = Vae {
        inputs: 1,
        width: 4,
        levels: 2,
        latent: 2,
        groups: 2,
        size: 8,
        ..Vae::SMALL
    };
    let bound = |size: usize| {
        let params = Params::seeded(1);
        let layers = Vae { size, ..vae }.layers(&params.root());
        let trace = Trace::inference();
        let x = trace.input("x", F32, (2, 1, 16, 16));
        let latent = layers.encode(x);
        let noise = latent.mean * 0.0;
        let mut session = Session::new(Device::Cpu, params).expect("a session");
        let bound = layers.bound(x, latent, noise);
        let program = session.compile(&trace, [bound]).expect("it compiles");
        let x = ArrayD::from_shape_fn(vec![2, 1, 16, 16], |i| ((i[2] * 3 + i[3]) % 5) as f32);
        session.run(&program, (&x,)).expect("a run")[0].item()
    };
    assert_eq!(bound(8), bound(16));
}
