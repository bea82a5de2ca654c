//! Error texts, word by word: each mistake with its place, the thing, the number and the next step.
//!
//! Places are relative to the line of `here!()`: `+1` is the line after it.

use expect_test::{Expect, expect};
use ndarray::{Array1, Array2, arr2};
use slabwise::Error;
use slabwise::nn::{BatchNorm1d, Conv2d, Embedding, Linear};
use slabwise::optim::{Adam, Sgd};
use slabwise::prelude::*;
use slabwise::tensor::AttentionOptions;
use slabwise_models::Model;

/// The line of the call.
macro_rules! here {
    () => {
        line!()
    };
}

fn session(params: &Params) -> Session {
    Session::new(Device::Cpu, params.clone())
        .expect("a session")
        .with_threads(1)
}

/// Compares the text of an error, places in this file counted from `here`.
#[track_caller]
fn says<T>(here: u32, result: Result<T>, expected: Expect) {
    let Err(error) = result else {
        panic!("there is no error")
    };
    let text = error.to_string();
    assert_eq!(
        format!("{error:?}"),
        text,
        "the text that `fn main() -> Result<()>` prints"
    );
    let mut shown = String::new();
    let mut parts = text.split(concat!(file!(), ":"));
    shown.push_str(parts.next().unwrap_or_default());
    for part in parts {
        let digits = part
            .find(|c: char| !c.is_ascii_digit())
            .unwrap_or(part.len());
        let line: i64 = part[..digits].parse().expect("a line");
        shown.push_str(&format!("{:+}{}", line - i64::from(here), &part[digits..]));
    }
    expected.assert_eq(&shown);
}

/// Compares the error of compiling a trace.
#[track_caller]
fn compiling<const N: usize>(
    here: u32,
    params: &Params,
    trace: &Trace,
    outputs: [Tensor<'_>; N],
    expected: Expect,
) {
    says(here, session(params).compile(trace, outputs), expected);
}

#[test]
fn several_mistakes_are_one_line_each() {
    let (params, trace, here) = (Params::seeded(0), Trace::inference(), here!());
    let x = trace.input("x", F32, (4, 3));
    let sum = x + trace.ones((4, 4));
    let product = x.matmul(trace.ones((4, 3)));
    let flat = x.reshape((5, 2));
    compiling(
        here,
        &params,
        &trace,
        [sum, product, flat],
        expect![[r#"
        +2: add [4, 3] and [4, 4]: shapes do not broadcast
        +3: matmul [4, 3] × [4, 3]: inner dimensions 3 and 4 differ
        +4: reshape [4, 3] to [5, 2]: 12 elements become 10"#]],
    );
}

#[test]
fn losses_of_shapes_that_differ() {
    let (params, trace, here) = (Params::seeded(0), Trace::inference(), here!());
    let (x, y) = (
        trace.input("x", F32, (Dim::bounded("batch", 8), 1)),
        trace.input("y", F32, (Dim::bounded("batch", 8),)),
    );
    let a = x.mse(y);
    let b = y.l1(x);
    let c = x.huber(trace.ones((1, 1)), 1.0);
    let d = x.sigmoid().binary_cross_entropy(y.cast(I32));
    let e = trace
        .ones((2, 3))
        .binary_cross_entropy_with_logits(trace.ones((3, 2)));
    compiling(
        here,
        &params,
        &trace,
        [a, b, c, d, e, x.mse(0.5), y.huber(y, 1.0)],
        expect![[r#"
        +5: mse of f32 [batch, 1] with a target f32 [batch]: a loss compares equal shapes; squeeze(1) on the prediction makes them so
        +6: l1 of f32 [batch] with a target f32 [batch, 1]: a loss compares equal shapes; squeeze(1) on the target makes them so
        +7: huber of f32 [batch, 1] with a target f32 [1, 1]: a loss compares equal shapes; if the target is to be repeated, say so with expand
        +8: binary_cross_entropy of f32 [batch, 1] with a target i32 [batch]: both are to be f32; convert with cast(F32)
        +11: binary_cross_entropy_with_logits of f32 [2, 3] with a target f32 [3, 2]: a loss compares equal shapes; reshape one to the shape of the other"#]],
    );
}

#[test]
fn a_parameter_declared_in_two_shapes_is_one_mistake() {
    let (params, here) = (Params::seeded(0), here!());
    let first = Linear::new(&params.root() / "head", 4, 3);
    let second = Linear::without_bias(&params.root() / "head", 3, 3);
    let trace = Trace::inference();
    let y = trace.ones((2, 4)).apply(&first).apply(&second);
    compiling(
        here,
        &params,
        &trace,
        [y],
        expect![[r#"+2: "head.weight" is declared as [3, 3], and as [3, 4] at +1 (in "head")"#]],
    );
}

#[test]
fn two_layers_of_one_name() {
    let (params, here) = (Params::seeded(0), here!());
    let first = Linear::without_bias(&params.root() / "body", 3, 3);
    let second = Linear::without_bias(&params.root() / "body", 3, 3);
    let trace = Trace::inference();
    let y = trace
        .ones((2, 3))
        .apply(&first)
        .apply(&second)
        .apply(&first)
        .apply(&second);
    compiling(
        here,
        &params,
        &trace,
        [y],
        expect![[
            r#"+7: "body.weight" is declared at +1 and again at +2: two layers have one name and would share weights; give the second another name, or its place as Scope::shared() if they are to (in "body")"#
        ]],
    );
    // A layer applied twice, a model declared again for another program, and a parameter shared on
    // purpose are no mistakes.
    let shared = Linear::without_bias((&params.root() / "body").shared(), 3, 3);
    for layers in [
        [&first, &first],
        [&second, &second],
        [&first, &shared],
        [&shared, &first],
    ] {
        let trace = Trace::inference();
        let y = trace.ones((2, 3)).apply(layers[0]).apply(layers[1]);
        session(&params)
            .compile(&trace, [y])
            .expect("shared on purpose");
    }
}

#[test]
fn statistics_and_parameters() {
    let (params, here) = (Params::seeded(0), here!());
    let scale = params.root().param("scale", (3,), Init::Constant(1.0));
    params.root().statistic("scale", (3,), Init::Constant(1.0));
    params.root().param("a\nb", (3,), Init::Constant(1.0));
    params.root().param("", (3,), Init::Constant(1.0));
    params.root().param(
        "low",
        (-3,),
        Init::Uniform {
            low: 1.0,
            high: 0.0,
        },
    );
    let trace = Trace::inference();
    trace.statistic(&scale).value();
    compiling(
        here,
        &params,
        &trace,
        [trace.param(&scale)],
        expect![[r#"
            +2: "scale" is declared as a statistic [3], and as a parameter [3] at +1
            +3: parameter "a\nb": a name has no line breaks and no other control characters
            +4: a parameter needs a name
            +5: parameter "low" cannot be uniform between 1 and 0
            +5: parameter "low" has the negative length -3
            +14: "scale" is a parameter: an optimizer changes it"#]],
    );
}

#[test]
fn parameters_of_another_model() {
    let (params, other) = (Params::seeded(0), Params::seeded(1));
    let here = here!();
    let (ours, theirs) = (
        Linear::new(&params.root() / "ours", 3, 3),
        Linear::new(&other.root() / "theirs", 3, 3),
    );
    let trace = Trace::inference().named("mixed");
    let y = trace.ones((1, 3)).apply(&ours).apply(&theirs);
    compiling(
        here,
        &params,
        &trace,
        [y],
        expect![[r#"
        +6: parameter "theirs.weight" belongs to other Params than those used before, as "ours.weight"; one program reads the parameters of one Params (in "theirs")
        +6: parameter "theirs.bias" belongs to other Params than those used before, as "ours.weight"; one program reads the parameters of one Params (in "theirs")"#]],
    );
    let trace = Trace::inference().named("stray");
    let y = trace.ones((1, 3)).apply(&theirs);
    compiling(
        here,
        &params,
        &trace,
        [y],
        expect![[
            r#""stray" reads "theirs.weight" and "theirs.bias", declared in other Params than this session's; make the session with the Params of the model, of which clones are as good"#
        ]],
    );
}

#[test]
fn states() {
    let (params, trace, here) = (Params::seeded(0), Trace::training(), here!());
    trace.state("a\nb", F32, (), Init::Constant(0.0));
    trace.state("sampling", F32, (), Init::Constant(0.0));
    let count = trace.state("count", I32, (), Init::Constant(0.0));
    count.set(trace.ones((2,)));
    count.set(count.value() + 1);
    count.set(count.value() + 2);
    trace.state("count", F32, (2,), Init::Constant(0.0));
    compiling(
        here,
        &params,
        &trace,
        [trace.ones(())],
        expect![[r#"
        +1: state "a\nb": a name has no line breaks and no other control characters
        +2: state "sampling": this name belongs to the random state
        +4: "count" is i32 [] and cannot be set to f32 [2]
        +6: "count" is set a second time
        +7: "count" is declared as state i32 [] and as state f32 [2]"#]],
    );
}

#[test]
fn parts_of_nothing_and_mistakes_made_again() {
    let params = Params::seeded(0);
    let trace = Trace::inference();
    let x = trace.input("x", F32, (4,));
    let here = here!();
    let parts: Vec<Tensor> = (0..3).map(|_| x.split(0, 0)[0]).collect();
    compiling(
        here,
        &params,
        &trace,
        [parts[2]],
        expect!["+1: split axis 0 of [4] into 0 parts: 4 does not divide"],
    );
}

#[test]
fn inputs_that_do_not_fit() {
    let params = Params::seeded(0);
    let layer = Linear::new(&params.root() / "head", 4, 3);
    let trace = Trace::inference();
    let batch = Dim::bounded("batch", 8);
    let (x, labels) = (
        trace.input("x", F32, (batch, 4)),
        trace.input("labels", I32, (batch,)),
    );
    let weights = trace.input("weights", F32, (batch,));
    let y = (x.apply(&layer).cross_entropy(labels) * weights).sum();
    let mut session = session(&params);
    let program = session.compile(&trace, [y]).expect("compiles");
    let (x, labels, weights) = (
        Array2::<f32>::zeros((5, 4)),
        Array1::<i32>::zeros(5),
        Array1::<f32>::zeros(5),
    );
    let mut feed = |feed: &dyn slabwise::feed::Feed, expected| {
        says(0, session.run(&program, feed).map(|_| ()), expected)
    };
    feed(
        &(&labels, &x, &weights),
        expect![[
            r#"input "x": i32 was given, f32 is expected; the inputs seem to be in the order labels, x, weights, "infer" takes them as x, labels, weights"#
        ]],
    );
    feed(
        &(&labels, &weights, &x),
        expect![[
            r#"input "x": i32 was given, f32 is expected; the inputs seem to be in the order labels, weights, x, "infer" takes them as x, labels, weights"#
        ]],
    );
    feed(
        &(&x, &Array1::from_elem(5, 3_000_000_000i64), &weights),
        expect![[
            r#"input "labels": element [0] is 3000000000, which i32 cannot hold; programs compute with 32 bits, so shift or scale such values first"#
        ]],
    );
    feed(
        &(&x, &labels),
        expect![[r#""infer" takes 3 inputs, "x", "labels" and "weights"; 2 were given"#]],
    );
    feed(
        &&x,
        expect![[r#""infer" takes 3 inputs, "x", "labels" and "weights"; 1 was given"#]],
    );
    feed(
        &(),
        expect![[r#""infer" takes 3 inputs, "x", "labels" and "weights"; 0 were given"#]],
    );
    feed(
        &(&Array2::<f32>::zeros((9, 4)), &labels, &weights),
        expect![[
            r#"input "x": shape [9, 4] was given: "batch" is 9, more than its bound 8; compile with a larger bound or feed smaller parts"#
        ]],
    );
    feed(
        &(&x, &labels, &Array1::<f32>::zeros(4)),
        expect![[r#"input "weights": shape [4] was given: "batch" is 4, but 5 in another input"#]],
    );
    feed(
        &(&x, &labels, &Array2::<f32>::zeros((5, 1))),
        expect![[r#"input "weights": shape [5, 1] was given, [batch] is expected"#]],
    );
    feed(
        &(&[1.0f32; 7], &labels, &weights),
        expect![[r#"input "x": 7 elements were given, [batch, 4] is expected"#]],
    );
}

#[test]
fn invalid_data() {
    let params = Params::seeded(0);
    let mut session = session(&params);
    let here = here!();
    let embedding = Embedding::new(&params.root() / "tokens", 10, 4);
    let trace = Trace::inference();
    let x = trace.input("x", I32, (3,));
    let y = x.apply(&embedding).ln().sum().require_finite();
    let program = session.compile(&trace, [y]).expect("compiles");
    says(
        here,
        session.run(&program, [1, 12, 3]).map(|_| ()),
        expect![[
            r#"+4: index 12 at position 1 is outside 0..10, in x (in "tokens"); no weight was changed"#
        ]],
    );
    says(
        here,
        session.run(&program, [1, 2, 3]).map(|_| ()),
        expect![[
            r#"+4: require_finite: the element at position 0 is NaN (in "tokens"); no weight was changed"#
        ]],
    );
}

#[test]
fn names_of_values() {
    let params = Params::seeded(0);
    Linear::new(&params.root() / "head", 2, 2);
    BatchNorm1d::new(&params.root() / "norm", 2);
    let mut session = session(&params);
    says(
        0,
        session.value("head.weight"),
        expect![[
            r#""head.weight" is declared but has no value yet: compile a program first, or load a file with Session::load"#
        ]],
    );
    says(
        0,
        session.value("heed.weight"),
        expect![[
            r#"there is no weight or state "heed.weight"; did you mean "head.weight" or "norm.weight"?"#
        ]],
    );
    let trace = Trace::inference();
    session.compile(&trace, [trace.ones(())]).expect("compiles");
    says(
        0,
        session.value("heed.weight"),
        expect![[
            r#"there is no weight or state "heed.weight"; did you mean "head.weight" or "norm.weight"?"#
        ]],
    );
    says(
        0,
        session.value("bias"),
        expect![[
            r#"there is no weight or state "bias"; did you mean "head.bias" or "norm.bias"?"#
        ]],
    );
    says(
        0,
        session.set_value("momentum", &arr2(&[[0.0]])),
        expect![[
            r#"there is no weight or state "momentum"; the weights and states are "head.weight", "head.bias", "norm.weight", "norm.bias", "norm.running_mean" and "norm.running_var""#
        ]],
    );
    says(
        0,
        session.set_value("head.weight", &arr2(&[[0.0]])),
        expect![[r#""head.weight" is [2, 2], the array is [1, 1]"#]],
    );
    says(
        0,
        session.copy_values("haed", "norm"),
        expect![[
            r#"copy_values from "haed" to "norm", of which nothing was copied: no weight has the path "haed"; did you mean "head"?"#
        ]],
    );
    says(
        0,
        session.copy_values("head", "norm"),
        expect![[
            r#"copy_values from "head" to "norm", of which nothing was copied: "head.weight" is f32 [2, 2] and "norm.weight" is f32 [2]"#
        ]],
    );
    says(
        0,
        session.copy_values("norm", "head"),
        expect![[
            r#"copy_values from "norm" to "head", of which nothing was copied: "norm.weight" is f32 [2] and "head.weight" is f32 [2, 2]"#
        ]],
    );
    says(
        0,
        session.copy_values("norm", "norm.copy"),
        expect![[r#"copy_values from "norm" to "norm.copy": one lies in the other"#]],
    );
    says(
        0,
        Model::parse("resnet19"),
        expect![[
            r#"unknown model "resnet19"; there are mlp, cnn, resnet20, resnet18, resnet50, mobilenetv2, unet, vgg16, gpt, gpt2, lstm, ode, bert, minilm, llama, vit, diffusion, vae; did you mean "resnet18" or "resnet20" or "resnet50"?"#
        ]],
    );
    says(
        0,
        "cpu0".parse::<Device>().map_err(Error::Value),
        expect![[r#"unknown device "cpu0"; it is auto, cpu or cuda:N"#]],
    );
}

#[test]
fn buffers() {
    let params = Params::seeded(0);
    let mut session = session(&params);
    let trace = Trace::inference().named("double");
    let x = trace.input("x", F32, (2,));
    trace.donate(x, 0);
    let double = session.compile(&trace, [x * 2.0]).expect("compiles");
    let trace = Trace::inference().named("sum");
    let (a, b) = (trace.input("a", F32, (2,)), trace.input("b", F32, (2,)));
    let sum = session.compile(&trace, [(a + b).sum()]).expect("compiles");
    let numbers = Array1::<f32>::ones(2);
    let freed = session.upload("freed", &numbers).expect("room");
    session.free(freed.clone()).expect("is alive");
    says(
        0,
        session.run(&sum, (&freed, &numbers)).map(|_| ()),
        expect![[r#"the buffer "freed" was freed and holds nothing any more; upload it again"#]],
    );
    let donated = session.upload("donated", &numbers).expect("room");
    session
        .run(&double, donated.clone().donate())
        .expect("runs");
    says(
        0,
        session.run(&sum, (&donated, &numbers)).map(|_| ()),
        expect![[
            r#"the buffer "donated" was donated to a run and holds nothing any more; Output::buffer gives the new value"#
        ]],
    );
    let kept = session.upload("kept", &numbers).expect("room");
    says(
        0,
        session
            .run(&sum, (kept.clone().donate(), &numbers))
            .map(|_| ()),
        expect![[
            r#"input "a": the buffer "kept" is donated to it, but no output of "sum" takes its bytes; say Trace::donate of the input before compiling, or feed the buffer without donating it"#
        ]],
    );
    says(
        0,
        session
            .run(&sum, (kept.clone().donate(), &kept))
            .map(|_| ()),
        expect![[
            r#"input "a": the buffer "kept" is donated to it, but no output of "sum" takes its bytes; say Trace::donate of the input before compiling, or feed the buffer without donating it"#
        ]],
    );
    says(
        0,
        session.download::<i32>(&kept),
        expect!["the values are f32, not i32; request them in their type, or cast in the program"],
    );
    let other = self::session(&params);
    says(
        0,
        other.download::<f32>(&kept),
        expect![[r#"buffer "kept" belongs to another session; upload its values to this one"#]],
    );
    let mut session = session.with_threads(64);
    says(
        0,
        session.run(&sum, (&kept, &kept)).map(|_| ()),
        expect![[
            r#""sum" was compiled for 1 thread and the session now has 64; set the threads before compiling"#
        ]],
    );
}

#[test]
fn learning() {
    let params = Params::seeded(0);
    let layer = Linear::new(&params.root() / "head", 2, 2);
    let here = here!();
    let trace = Trace::inference();
    let y = trace.ones((1, 2)).apply(&layer);
    trace.minimize(y.sum(), Sgd::new(0.1));
    compiling(
        here,
        &params,
        &trace,
        [y],
        expect!["+3: minimize: this trace is for inference; a model learns in Trace::training()"],
    );
    let here = here!();
    let trace = Trace::training();
    let y = trace.ones((1, 2)).apply(&layer);
    trace.minimize(y, Sgd::new(0.1));
    trace.minimize(trace.ones(()), Sgd::new(0.1));
    trace.minimize(y.sum(), Adam::new(f64::NAN));
    trace.minimize(y.sum(), Sgd::new(0.1).named("a\nb"));
    trace.minimize(y.sum(), Sgd::new(0.1));
    trace.minimize(y.sum(), Sgd::new(0.1));
    compiling(
        here,
        &params,
        &trace,
        [y],
        expect![[r#"
        +3: minimize: the loss is f32 [1, 2], not an f32 scalar; mean() makes one (in "head")
        +4: minimize: the loss has no gradient with respect to any parameter
        +5: minimize: adam: the learning rate is NaN, not a finite number of at least 0
        +6: minimize: the optimizer's name is "a\nb"; a name has no line breaks and no other control characters
        +8: minimize: parameter "head.weight" is updated a second time
        +8: minimize: parameter "head.bias" is updated a second time"#]],
    );
    let here = here!();
    let trace = Trace::training();
    let y = trace.ones((1, 2)).apply(&layer).sum();
    trace.freeze(|weight| weight.name.starts_with("haed"));
    trace.minimize(y, Sgd::new(0.1));
    compiling(
        here,
        &params,
        &trace,
        [y],
        expect![[
            r#"+3: freeze: none of the parameters of this trace is chosen; they are "head.weight", "head.bias""#
        ]],
    );
}

#[test]
fn images() {
    let (params, trace) = (Params::seeded(0), Trace::inference());
    let wide = ConvGeometry {
        stride: [(1 << 31) - 1, 1],
        ..ConvGeometry::default()
    };
    let padded = ConvGeometry {
        pad: [4, 4],
        ..ConvGeometry::default()
    };
    let grouped = ConvGeometry {
        groups: 3,
        ..ConvGeometry::default()
    };
    let conv = Conv2d::new(&params.root() / "stem", 5, 8, 3);
    let (x, here) = (
        trace.input("x", F32, (Dim::bounded("batch", 8), 4, 8, 8)),
        here!(),
    );
    let a = x.apply(&conv);
    let b = x.conv2d_with(trace.ones((4, 4, 3, 3)), wide);
    let c = x.max_pool2d_with(Window {
        k: [2, 2],
        stride: [(1 << 31) - 1, 1],
        pad: [0, 0],
    });
    let d = x.conv_transpose2d(trace.ones((5, 4, 3, 3)), ConvGeometry::default());
    let e = x.conv_transpose2d(trace.ones((4, 4, 3, 3)), wide);
    let f = trace
        .ones((1, 4, 1, 1))
        .conv_transpose2d(trace.ones((4, 4, 3, 3)), padded);
    let g = x.conv_transpose2d(trace.ones((4, 4, 3, 3)), grouped);
    let h = x.conv_transpose2d(trace.ones((4, 4, 3)), grouped);
    let i = x.conv_transpose2d(trace.ones((4, 4, 3, 3)).cast(I32), grouped);
    compiling(
        here,
        &params,
        &trace,
        [a, b, c, d, e, f, g, h, i],
        expect![[r#"
            +2: conv2d [batch, 4, 8, 8] with weight [8, 5, 3, 3]: 4 channels in 1 group do not match a weight for 5 channels a group and 8 results (in "stem")
            +3: conv2d [batch, 4, 8, 8] with weight [4, 4, 3, 3]: 2147483647 is more than stride, padding and dilation can be, which is 16777216
            +4: max_pool2d of [batch, 4, 8, 8]: 2147483647 is more than the side, stride and padding of a window can be, which is 16777216
            +9: conv_transpose2d [batch, 4, 8, 8] with weight [5, 4, 3, 3]: the image has 4 channels, the weight is for 5
            +10: conv_transpose2d [batch, 4, 8, 8] with weight [4, 4, 3, 3]: 2147483647 is more than stride, padding and dilation can be, which is 16777216
            +13: conv_transpose2d [1, 4, 1, 1] with weight [4, 4, 3, 3]: padding 4×4 leaves no pixel of the result, which has -5×-5 pixels with it
            +14: conv_transpose2d [batch, 4, 8, 8] with weight [4, 4, 3, 3]: 4 channels do not divide into 3 groups
            +15: conv_transpose2d [batch, 4, 8, 8] with weight [4, 4, 3]: image [n, in, h, w] and weight [in, out/groups, kh, kw] are needed
            +16: conv_transpose2d [batch, 4, 8, 8] with weight [4, 4, 3, 3]: types are f32 and i32, not floats; convert with cast"#]],
    );
}

#[test]
fn sizes() {
    let (params, trace, here) = (Params::seeded(0), Trace::inference(), here!());
    let x = trace.input("x", F32, [2usize; 12]);
    let y = x
        .permute([11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0])
        .exp()
        .sum_over([0, 3, 5]);
    compiling(
        here,
        &params,
        &trace,
        [y],
        expect![
            "+5: rearranging [2, 2, 2, 2, 2, 2, 2, 2, 2]: it runs over 12 axes, of which a kernel can have 8; reshape so that axes that stay together are one"
        ],
    );
    let (trace, here) = (Trace::inference(), here!());
    let x = trace.input("x", F32, (1i64 << 40, 1i64 << 40));
    compiling(
        here,
        &params,
        &trace,
        [x],
        expect![
            "+1: input [1099511627776, 1099511627776]: the number of elements overflows, or has too many bounded lengths in it to be planned"
        ],
    );
    let (trace, here) = (Trace::inference(), here!());
    let x = trace.input("x", F32, (Dim::bounded("batch", 8), 2));
    let y = trace.input("y", F32, (Dim::bounded("batch", 16), 2));
    let z = trace.input("x", F32, (2,));
    compiling(
        here,
        &params,
        &trace,
        [x, y, z],
        expect![[r#"
        +2: input "y": dimension "batch" is bounded by 8 and by 16
        +3: input "x" is declared a second time"#]],
    );
}

#[test]
fn outputs_and_traces() {
    let params = Params::seeded(0);
    let (trace, other) = (Trace::inference(), Trace::inference());
    let here = here!();
    let x = trace.input("x", F32, (2,));
    let y = x + other.ones((2,));
    trace.donate(y.exp(), 0);
    trace.donate(x.exp(), 0);
    trace.donate(x, 1);
    trace.donate(x, 1);
    compiling(
        here,
        &params,
        &trace,
        [y, other.ones(())],
        expect![[r#"
        +2: the operands belong to two traces
        +4: donate: only an input of this trace can be donated
        +6: donate: input "x" or output 1 is donated a second time
        +7: output 1 belongs to another trace"#]],
    );
    let (trace, here) = (Trace::inference(), here!());
    let x = trace.input("x", F32, (2,));
    trace.donate(x, 0);
    compiling(
        here,
        &params,
        &trace,
        [x.sum()],
        expect![[r#"+3: donate: input "x" is f32 [2], output 0 is f32 []"#]],
    );
    let trace = Trace::inference().named("sum");
    let graph = trace.finish(&[trace.ones(()).exp()]).expect("a graph");
    says(
        0,
        session(&params)
            .compile_graph::<2>("sum", &graph)
            .map(|_| ()),
        expect![[r#""sum" has 1 output, 2 outputs are expected"#]],
    );
}

#[test]
fn a_number_of_past_keys_that_is_none() {
    let (params, trace, here) = (Params::seeded(0), Trace::inference(), here!());
    let x = trace.input("x", F32, (2, 6, 8));
    let attend = |past| {
        let options = AttentionOptions::new().causal().past_of_run(past);
        x.attention_with(x, x, options)
    };
    let half = attend(trace.ones(()));
    let far = attend(trace.input("past", I32, (3, 1, 1)));
    compiling(
        here,
        &params,
        &trace,
        [half, far],
        expect![[r#"
        +4: attention: the number of past keys is f32; i32 is needed
        +4: attention: past keys of shape [3, 1, 1] do not broadcast to the scores [2, 6, 6]"#]],
    );
}
