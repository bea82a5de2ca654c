//! Layers with dropout of attention weights, and errors.

use ndarray::{ArrayD, Axis};
use slabwise::nn::{
    GroupedQueryAttention, KvCache, MultiHeadAttention, TransformerDecoderLayer,
    TransformerEncoderLayer,
};
use slabwise::prelude::*;
use slabwise::tensor::AttentionOptions;

use super::support::Rng;
use super::{bits, random};

/// The results of all layers with attention for `x`, or for `x` and `memory`; without `p` the option
/// is not set.
fn layers<'t>(at: &Scope, p: Option<f32>, x: Tensor<'t>, memory: Tensor<'t>) -> [Tensor<'t>; 7] {
    let trace = x.trace();
    let (mut joined, mut apart, mut grouped) = (
        MultiHeadAttention::new(at / "joined", 8, 2),
        MultiHeadAttention::of_widths(at / "apart", 8, 2, 8, 8),
        GroupedQueryAttention::new(at / "grouped", 8, 4, 2),
    );
    let mut encoder = TransformerEncoderLayer::new(at / "encoder", 8, 2, 16).dropout(0.0);
    let mut decoder = TransformerDecoderLayer::new(at / "decoder", 8, 2, 16).dropout(0.0);
    if let Some(p) = p {
        (joined, apart) = (joined.attention_dropout(p), apart.attention_dropout(p));
        grouped = grouped.attention_dropout(p);
        (encoder, decoder) = (encoder.attention_dropout(p), decoder.attention_dropout(p));
    }
    let [first, second] = [("first", 2), ("second", 2)].map(|(name, heads)| {
        KvCache::new(
            trace,
            name,
            2,
            heads,
            8,
            if name == "first" { 4 } else { 2 },
        )
    });
    [
        x.apply(&joined),
        apart.cross(x, memory, memory, Mask::None),
        joined.cached(x, &first),
        x.apply(&grouped),
        grouped.cached(x, &second),
        x.apply(&encoder),
        decoder.decode(x, memory, Mask::None),
    ]
}

/// The results of all layers for two sequences whose last token alone is the same.
fn of_layers(trace: impl Fn() -> Trace, p: Option<f32>) -> [Vec<ArrayD<f32>>; 2] {
    [0, 1].map(|run| {
        let params = Params::seeded(4);
        let trace = trace();
        let [x, memory] = ["x", "memory"].map(|name| trace.input(name, F32, (2, 5, 8)));
        let outputs = layers(&params.root(), p, x, memory);
        let mut session = Session::new(Device::Cpu, params.clone()).expect("a session");
        let program = session.compile_any(&trace, &outputs).expect("it compiles");
        let (mut x, mut other) = (
            random(&mut Rng(1), &[2, 5, 8]),
            random(&mut Rng(2), &[2, 5, 8]),
        );
        if run == 1 {
            x.slice_axis_mut(Axis(1), (..4).into()).mapv_inplace(|x| -x);
            other.mapv_inplace(|x| -x);
        }
        let outputs = session.run_any(&program, (&x, &other)).expect("it runs");
        outputs
            .iter()
            .map(|o| o.array::<f32>().expect("f32"))
            .collect()
    })
}

/// With p = 1 results do not depend on other tokens. Those of attention are 0, because biases are 0
/// at first.
#[test]
fn layers_pass_dropout_to_their_attention() {
    let [first, second] = of_layers(Trace::training, Some(1.0));
    let [plain, plain_second] = of_layers(Trace::training, None);
    let [some, _] = of_layers(Trace::training, Some(0.5));
    let of_last_token = |x: &ArrayD<f32>| bits(&x.index_axis(Axis(1), 4).to_owned());
    for layer in 0..first.len() {
        if layer < 5 {
            let zeros = first[layer].iter().all(|&x| x == 0.0);
            assert!(zeros, "{layer}: {}", first[layer]);
        }
        let [a, b] = [&first, &second].map(|all| of_last_token(&all[layer]));
        assert_eq!(a, b, "{layer}");
        // Without dropout they do.
        let [a, b] = [&plain, &plain_second].map(|all| of_last_token(&all[layer]));
        assert!(a != b, "{layer}");
        assert!(bits(&plain[layer]) != bits(&some[layer]), "{layer}");
    }
    let [plain, _] = of_layers(Trace::inference, None);
    let [with, _] = of_layers(Trace::inference, Some(0.5));
    for (layer, (plain, with)) in plain.iter().zip(&with).enumerate() {
        assert_eq!(bits(plain), bits(with), "{layer}");
    }
    let [none, _] = of_layers(Trace::training, Some(0.0));
    let [plain, _] = of_layers(Trace::training, None);
    for (layer, (plain, none)) in plain.iter().zip(&none).enumerate() {
        assert_eq!(bits(plain), bits(none), "{layer}");
    }
}

#[test]
fn a_dropout_that_is_no_probability_is_a_mistake_of_its_line() {
    for (p, shown) in [
        (-0.1, "-0.1"),
        (1.5, "1.5"),
        (f32::NAN, "NaN"),
        (f32::INFINITY, "inf"),
    ] {
        let trace = Trace::inference();
        let x = trace.input("x", F32, (2, 3, 8));
        let options = AttentionOptions::new().dropout(p);
        let (y, line) = (x.attention_with(x, x, options), line!());
        let said = trace.finish(&[y]).expect_err("a mistake");
        assert_eq!(said.len(), 1, "{said:?}");
        assert_eq!(
            said[0].message,
            format!(
                "attention of queries [2, 3, 8], keys [2, 3, 8] and values [2, 3, 8]: a dropout of \
                 {shown} is not a probability"
            )
        );
        assert_eq!(
            (said[0].location.line(), said[0].location.file()),
            (line, file!())
        );

        let params = Params::seeded(0);
        let trace = Trace::training();
        let [x, memory] = ["x", "memory"].map(|name| trace.input(name, F32, (2, 5, 8)));
        let outputs = layers(&params.root(), Some(p), x, memory);
        let said = trace.finish(&outputs).expect_err("mistakes");
        // A decoder has two.
        assert!(said.len() >= outputs.len(), "{said:?}");
        for mistake in &said {
            let part = format!("a dropout of {shown} is not a probability");
            assert!(mistake.message.ends_with(&part), "{mistake}");
            assert_eq!(mistake.location.file(), file!(), "{mistake}");
        }
    }
}
