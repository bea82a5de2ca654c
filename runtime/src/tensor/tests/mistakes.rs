//! Mistakes of users, and the messages for them.

use super::*;
use crate::nn::{Conv2d, Dropout, Linear, Module, Relu, Sequential, TransformerEncoderLayer};
use crate::ops::ConvGeometry;
use crate::optim::{Adam, AdamW, Optimizer, Schedule, Sgd};
use crate::params::Params;
use crate::shape::Dim;
use slabwise_kernels::dtype::DType::{Bool, F32, I32};
use slabwise_kernels::spec::Window;

/// The mistakes of a trace, each without this file's name.
fn said(trace: &Trace) -> Vec<String> {
    let mistakes = trace.finish(&[]).expect_err("there are mistakes");
    let prefix = format!("{}:", file!());
    mistakes
        .iter()
        .map(|m| {
            m.to_string()
                .strip_prefix(&prefix)
                .map_or(m.to_string(), str::to_string)
        })
        .collect()
}

/// Only the texts.
fn texts(trace: &Trace) -> Vec<String> {
    trace
        .finish(&[])
        .expect_err("there are mistakes")
        .into_iter()
        .map(|m| m.message)
        .collect()
}

#[test]
fn every_mistake_is_kept_with_its_line_and_nothing_follows_from_it() {
    let trace = Trace::inference();
    let batch = Dim::bounded("batch", 32);
    let x = trace.input("x", F32, (batch, 784));
    let y = trace.input("y", F32, (512,));
    let line = line!();
    let bad = x + y;
    let worse = bad.relu().matmul(y).sum_over(7);
    let _ = x.matmul(trace.zeros((512, 256)));
    let _ = x.sum_over(2);
    assert!(worse.is_poisoned());
    assert_eq!((worse.dtype(), worse.rank(), worse.len(0)), (F32, 0, None));
    assert_eq!(
        said(&trace),
        [
            format!(
                "{}: add [batch, 784] and [512]: shapes do not broadcast",
                line + 1
            ),
            format!(
                "{}: matmul [batch, 784] × [512, 256]: inner dimensions 784 and 512 differ",
                line + 3
            ),
            format!("{}: sum: [batch, 784] has no axis 2", line + 4),
        ]
    );
}

struct Model {
    hidden: Linear,
    head: Linear,
}

impl Module for Model {
    fn forward<'t>(&self, x: Tensor<'t>) -> Tensor<'t> {
        x.apply(&self.hidden).relu().apply(&self.head)
    }
}
const FORWARD: u32 = line!() - 3;

#[test]
fn layers_report_the_line_of_the_model_and_their_name() {
    let params = Params::seeded(0);
    let at = &params.root() / "mlp";
    let model = Model {
        hidden: Linear::new(&at / "hidden", 784, 256),
        head: Linear::new(&at / "head", 512, 10),
    };
    let trace = Trace::inference();
    let x = trace.input("x", F32, (2, 784));
    let _ = model.forward(x);
    let line = line!() + 1;
    let _ = x.apply(&Linear::new(&at / "other", 10, 10));
    let expected = [
        format!(
            "{FORWARD}: matmul [2, 256] × [512, 10]: inner dimensions 256 and 512 differ (in \"mlp.head\")"
        ),
        format!(
            "{line}: matmul [2, 784] × [10, 10]: inner dimensions 784 and 10 differ (in \"mlp.other\")"
        ),
    ];
    assert_eq!(said(&trace), expected);
}

#[test]
fn methods_of_layers_report_the_line_they_are_called_in() {
    let params = Params::seeded(0);
    let place = &params.root() / "encoder";
    let encoder = TransformerEncoderLayer::new(place, 8, 2, 16);
    let trace = Trace::inference();
    let x = trace.input("x", F32, (2, 5, 8));
    let mask = trace.zeros((3, 3));
    let line = line!() + 1;
    let _ = encoder.masked(x, crate::tensor::Mask::Added(mask));
    let found = said(&trace);
    let [mistake] = &found[..] else {
        panic!("{found:?}")
    };
    assert!(
        mistake.starts_with(&format!("{line}: ")) && mistake.contains("(in \"encoder.self_attn\")"),
        "{mistake}"
    );
}

#[test]
fn layers_in_a_row_report_the_line_they_are_applied_in() {
    let params = Params::seeded(0);
    let at = params.root();
    let inner = Sequential::new()
        .then(Relu)
        .then(Linear::new(&at / "b", 9, 2));
    let model = Sequential::new()
        .then(Linear::new(&at / "a", 4, 8))
        .then(inner)
        .then(Dropout(0.5));
    let trace = Trace::inference();
    let x = trace.input("x", F32, (1, 4));
    let line = line!() + 1;
    let _ = x.apply(&model);
    let _ = x.apply(&Sequential::new().then(Dropout(2.0)));
    let texts = [
        format!("{line}: matmul [1, 8] × [9, 2]: inner dimensions 8 and 9 differ (in \"b\")"),
        format!("{}: dropout: 2 is not a probability", line + 1),
    ];
    assert_eq!(said(&trace), texts);
}

#[test]
fn nodes_know_their_line_and_layer() {
    let params = Params::seeded(0);
    let conv = Conv2d::new(&params.root() / "stem", 1, 4, 3);
    let trace = Trace::inference();
    let line = line!() + 1;
    let y = trace.input("x", F32, (2, 1, 8, 8)).apply(&conv).relu();
    let graph = finished(&trace, &[y]);
    let origin = graph.origin(y.id);
    assert_eq!((origin.location.line(), &*origin.layer), (line, "stem"));
    let names: Vec<String> = graph.ids().map(|id| graph.name(id)).collect();
    assert_eq!(
        names,
        [
            "x",
            "stem.weight",
            "stem.conv2d",
            "stem.bias",
            "stem.reshape",
            "stem.reshape",
            "stem.expand",
            "stem.add",
            "stem.relu"
        ]
    );
}

#[test]
fn declarations() {
    let trace = Trace::training();
    let batch = Dim::bounded("batch", 32);
    trace.input("x", F32, (batch, 4));
    trace.input("x", F32, (4,));
    trace.input("y", F32, (Dim::bounded("batch", 16),));
    trace.input("z", F32, (-4, 2));
    trace.input("huge", F32, (i64::MAX, 2));
    trace.input("wide", F32, (1u64 << 61, 4));
    trace.state("s", I32, (2,), Init::Constant(0.5));
    trace.state("s", F32, (batch,), Init::Constant(0.0));
    trace.state("random", I32, (3,), Init::Constant(0.0));
    trace.state(
        "r",
        I32,
        (3,),
        Init::Normal {
            mean: 0.0,
            std: 1.0,
        },
    );
    trace
        .state("a", F32, (2,), Init::Constant(0.0))
        .set(trace.zeros((3,)));
    trace.state("a", F32, (3,), Init::Constant(0.0));
    let twice = trace.state("b", F32, (), Init::Constant(0.0));
    twice.set(trace.zeros(()));
    twice.set(trace.ones(()));
    let params = Params::seeded(0);
    trace.param(&params.root().param("w", (2,), Init::Constant(0.0)));
    trace.param(
        &Params::seeded(0)
            .root()
            .param("v", (2,), Init::Constant(0.0)),
    );
    trace.state("w", F32, (2,), Init::Constant(0.0));
    assert_eq!(
        texts(&trace),
        [
            "input \"x\" is declared a second time",
            "input \"y\": dimension \"batch\" is bounded by 32 and by 16",
            "input \"z\": the length -4 is negative",
            "input [9223372036854775807, 2]: the number of elements overflows, or has too many bounded lengths in it to be planned",
            "input [2305843009213693952, 4]: the number of elements overflows, or has too many bounded lengths in it to be planned",
            "state \"s\": 0.5 is not a value of type i32",
            "state \"s\": its lengths must be fixed",
            "state \"random\": this name belongs to the random state",
            "state \"r\": random values are floats, not i32",
            "\"a\" is f32 [2] and cannot be set to f32 [3]",
            "\"a\" is declared as state f32 [2] and as state f32 [3]",
            "\"b\" is set a second time",
            "parameter \"v\" belongs to other Params than those used before, as \"w\"; one program reads the parameters of one Params",
            "\"w\" is declared as parameter f32 [2] and as state f32 [2]",
        ]
    );
}

#[test]
fn operations() {
    let trace = Trace::inference();
    let batch = Dim::bounded("batch", 32);
    let (x, n) = (
        trace.input("x", F32, (batch, 6)),
        trace.input("n", I32, (batch,)),
    );
    let (c, image) = (
        trace.input("c", Bool, (6,)),
        trace.input("image", F32, (batch, 4, 8, 8)),
    );
    let weight = trace.zeros((4, 4, 3, 3));
    let groups = |groups| ConvGeometry {
        groups,
        ..ConvGeometry::default()
    };
    let _ = [
        n.exp(),
        n + 0.5,
        c.equal(2.0),
        x + n,
        c + c,
        x.select(x, x),
        x.reshape((batch, 5)),
        x.reshape((-1, -1)),
        x.reshape((-1, 5)),
        x.reshape((-1, 0)),
        x.flatten(2),
        x.transpose(0, 2),
        n.t(),
        x.permute([0, 0]),
        x.squeeze(1),
        x.squeeze(4),
        x.unsqueeze(3),
        x.expand((2, -1, 7)),
        x.slice(0, 1..),
        x.slice(1, 4..9),
        x.slice_step(1, .., 0),
        x.split(1, 4)[3],
        x.pad([(1, 1)], 0.0),
        x.pad([(usize::MAX, 1), (0, 0)], 0.0),
        trace.concat(&[], 0),
        trace.concat(&[x, n], 0),
        trace.stack(&[x, n], 0),
        trace.concat(&[x, x.slice(1, ..2).reshape((-1, 1))], 1),
    ];
    let _ = [
        image.conv2d_with(weight, groups(3)),
        image.conv2d_with(weight, groups(0)),
        image.conv2d_with(weight, groups(usize::MAX)),
        image.max_pool2d(0),
        image.max_pool2d(9),
        image.avg_pool2d_with(Window {
            k: [2, 2],
            stride: [1, 1],
            pad: [usize::MAX, 0],
        }),
        x.global_avg_pool(),
        x.matmul(2.0),
        n.matmul(x),
        trace.zeros((2, 3, 4)).matmul(trace.zeros((3, 4, 5))),
        x.softmax(2),
        n.log_softmax(0),
        x.cross_entropy(x),
        x.cross_entropy(n.cast(F32)),
        x.mse(n),
        x.dropout(f32::NAN),
        x.clamp(1.0, f32::NAN),
        x.sum_over([1, 1]),
        c.sum(),
        x.any(),
        x.one_hot(3),
        n.one_hot(usize::MAX),
        x.gather(3, n),
        x.index_select(0, x),
        trace.arange(3_000_000_000u32),
        trace.uniform((1 << 20, 1 << 20)),
        trace.full(-1.0, DType::U8, (2,)),
    ];
    assert_eq!(
        texts(&trace),
        [
            "exp does not take i32; convert with cast",
            "0.5 is not a value of type i32",
            "2 is not a value of type bool",
            "add [batch, 6] and [batch]: shapes do not broadcast",
            "add does not take bool, bool; convert with cast",
            "select does not take f32, f32, f32; convert with cast",
            "reshape [batch, 6] to [batch, 5]: 6·batch elements become 5·batch",
            "reshape: 2 lengths are -1; one can be",
            "reshape [batch, 6] to [-1, 5]: no length for -1 fits",
            "reshape [batch, 6] to [-1, 0]: no length for -1 fits",
            "flatten: [batch, 6] has no axis 2",
            "transpose: [batch, 6] has no axis 2",
            "t of [batch]: two axes are needed",
            "permute by [0, 0]: each of the 2 axes is named once",
            "squeeze: axis 1 of [batch, 6] is not of length 1",
            "squeeze: [batch, 6] has no axis 4",
            "unsqueeze: [batch, 6] has no axis 3",
            "expand [batch, 6] to [2, batch, 7]: only axes of length 1 repeat",
            "slice 1.. of axis 0 of [batch, 6]: its length is batch",
            "slice 4..9 of axis 1 of [batch, 6]: its length is 6",
            "slice .. by 0 of axis 1 of [batch, 6]: its length is 6",
            "split axis 1 of [batch, 6] into 4 parts: 6 does not divide",
            "pad of [batch, 6]: 1 pair for 2 axes",
            "pad: 18446744073709551615 and 1 are too many",
            "concat of no tensors",
            "concat f32 [batch, 6] and i32 [batch] along axis 0: the other axes and the types must agree",
            "stack f32 [batch, 6] and i32 [batch]: types and shapes must agree",
            "concat f32 [batch, 6] and f32 [2·batch, 1] along axis 1: the other axes and the types must agree",
            "conv2d [batch, 4, 8, 8] with weight [4, 4, 3, 3]: 4 channels in 3 groups do not match a weight for 4 channels a group and 4 results",
            "conv2d [batch, 4, 8, 8] with weight [4, 4, 3, 3]: groups, stride and dilation are at least 1",
            "conv2d [batch, 4, 8, 8] with weight [4, 4, 3, 3]: 4 channels in 18446744073709551615 groups do not match a weight for 4 channels a group and 4 results",
            "max_pool2d of [batch, 4, 8, 8]: a 0×0 window with stride 0×0 does not fit",
            "max_pool2d of [batch, 4, 8, 8]: a 9×9 window with stride 9×9 does not fit",
            "avg_pool2d of [batch, 4, 8, 8]: 18446744073709551615 is more than the side, stride and padding of a window can be, which is 16777216",
            "global_avg_pool of [batch, 6]: an image [n, channels, h, w] is needed",
            "matmul [batch, 6] × []: both need an axis",
            "matmul [batch] × [batch, 6]: types are i32 and f32, not floats; convert with cast",
            "matmul [2, 3, 4] × [3, 4, 5]: batch dimensions do not broadcast",
            "softmax: [batch, 6] has no axis 2",
            "log_softmax does not take i32; convert with cast",
            "cross_entropy of [batch, 6] with labels [batch, 6]: the labels have another shape than the batch",
            "cross_entropy: indices are i32 or u8, not f32",
            "mse of f32 [batch, 6] with a target i32 [batch]: both are to be f32; convert with cast(F32)",
            "dropout: NaN is not a probability",
            "clamp between 1 and NaN: no number lies there",
            "sum: axis 1 is named twice",
            "sum does not take bool; convert with cast",
            "any does not take f32; convert with cast",
            "one_hot: indices are i32 or u8, not f32",
            "one_hot: 18446744073709551615 positions are more than an i32 can number",
            "gather: [batch, 6] has no axis 3",
            "index_select by [batch, 6]: an index of one axis is needed",
            "arange [3000000000]: more than 2³¹ elements cannot be numbered",
            "uniform [1048576, 1048576]: more than 2³¹ elements cannot be numbered",
            "-1 is not a value of type u8",
        ]
    );
}

#[test]
fn learning() {
    fn loss<'t>(trace: &'t Trace, params: &Params) -> Tensor<'t> {
        trace
            .param(&params.root().param("w", (2,), Init::Constant(1.0)))
            .square()
            .sum()
    }
    let params = Params::seeded(0);
    let trace = Trace::inference();
    trace.minimize(loss(&trace, &params), Sgd::new(0.1));
    assert_eq!(
        texts(&trace),
        ["minimize: this trace is for inference; a model learns in Trace::training()"]
    );

    let trace = Trace::training();
    let x = trace.input("x", F32, (2,));
    let w = loss(&trace, &params);
    trace.minimize(w, Adam::new(f64::NAN));
    trace.minimize(w, Adam::new(1e-3).betas(0.9, 1.0));
    trace.minimize(w, Adam::new(1e-3).eps(-1.0));
    trace.minimize(w, AdamW::new(1e-3).weight_decay(f64::INFINITY));
    trace.minimize(w, Sgd::new(-0.5));
    trace.minimize(w, Sgd::new(0.1).momentum(-0.9));
    trace.minimize(w, Sgd::new(0.1).nesterov());
    trace.minimize(w, Sgd::new(0.1).clip_norm(0.0));
    trace.minimize(w, Sgd::new(Schedule::step(0.1, 0, 0.5)));
    trace.minimize(w, Sgd::new(Schedule::cosine(0.1, 100).warmup(100)));
    trace.minimize(x, Sgd::new(0.1));
    trace.minimize(x.sum(), Sgd::new(0.1));
    trace.minimize(x.argmax(0), Sgd::new(0.1));
    trace.minimize(w, Sgd::new(0.1));
    let line = line!() + 1;
    trace.minimize(w, Sgd::new(0.1));
    let [_] = trace.gradients(w, [x.cast(I32)]);
    let [_] = trace.gradients(x, [x]);
    assert_eq!(
        texts(&trace),
        [
            "minimize: adam: the learning rate is NaN, not a finite number of at least 0",
            "minimize: adam: β₂ is 1, not in 0..1",
            "minimize: adam: ε is -1, not a finite number of at least 0",
            "minimize: adamw: the weight decay is inf, not a finite number of at least 0",
            "minimize: sgd: the learning rate is -0.5, not a finite number of at least 0",
            "minimize: sgd: the momentum is -0.9, not a finite number of at least 0",
            "minimize: sgd: Nesterov's form needs a momentum",
            "minimize: clip_norm: the largest norm is 0, not a finite number above 0",
            "minimize: sgd: the learning rate changes every 0 steps",
            "minimize: sgd: a cosine over 100 steps ends before its warm-up of 100 steps",
            "minimize: the loss is f32 [2], not an f32 scalar; mean() makes one",
            "minimize: the loss has no gradient with respect to any parameter",
            "minimize: the loss is i32 [], not an f32 scalar; mean() makes one",
            "minimize: parameter \"w\" is updated a second time",
            "gradients: there is no gradient with respect to a tensor of type i32",
            "gradients: the loss is f32 [2], not an f32 scalar; mean() makes one",
        ]
    );
    assert!(said(&trace)[13].starts_with(&format!("{line}: ")));
}

#[test]
fn two_traces_do_not_mix() {
    let (one, two) = (Trace::inference(), Trace::inference());
    let (a, b) = (one.input("a", F32, (2,)), two.input("b", F32, (2,)));
    let _ = a + b;
    assert_eq!(texts(&one), ["the operands belong to two traces"]);
    assert_eq!(
        two.finish(&[a]).unwrap_err()[0].message,
        "output 0 belongs to another trace"
    );
}

#[test]
fn grouped_channels_that_do_not_divide() {
    let params = Params::seeded(0);
    let at = params.root();
    let conv = Conv2d::new(&at / "a", 6, 4, 3).groups(2).without_bias();
    assert_eq!(conv.weight().dims(), [4, 3, 3, 3]);
    let names: Vec<String> = params.declared().iter().map(|p| format!("{p:?}")).collect();
    assert_eq!(names, ["a.weight [4, 3, 3, 3]"]);
    Conv2d::new(&at / "b", 6, 4, 3).groups(4);
    assert_eq!(
        params.mistakes()[0].message,
        "conv2d: 6 and 4 channels do not divide into 4 groups"
    );
}
