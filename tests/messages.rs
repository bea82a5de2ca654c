//! What users read: each mistake with its place, the thing, the number and the next step, word by word.
//!
//! Places are written from the line that `here!()` stands on: `+1` is the line after it.

use expect_test::{Expect, expect};
use ndarray::{Array1, Array2, arr2};
use slabwise::Error;
use slabwise::models::Model;
use slabwise::nn::{BatchNorm1d, Conv2d, Embedding, Linear};
use slabwise::optim::{Adam, Sgd};
use slabwise::prelude::*;

/// The line it stands on.
macro_rules! here {
    () => {
        line!()
    };
}

fn session(params: &Params) -> Session {
    Session::new(Device::Cpu, params.clone()).expect("a session").with_threads(1)
}

/// Compares the text of an error, places in this file counted from `here`.
#[track_caller]
fn says<T>(here: u32, result: Result<T>, expected: Expect) {
    let Err(error) = result else { panic!("there is no error") };
    let text = error.to_string();
    assert_eq!(format!("{error:?}"), text, "what `fn main() -> Result<()>` prints");
    let mut shown = String::new();
    let mut parts = text.split(concat!(file!(), ":"));
    shown.push_str(parts.next().unwrap_or_default());
    for part in parts {
        let digits = part.find(|c: char| !c.is_ascii_digit()).unwrap_or(part.len());
        let line: i64 = part[..digits].parse().expect("a line");
        shown.push_str(&format!("{:+}{}", line - i64::from(here), &part[digits..]));
    }
    expected.assert_eq(&shown);
}

/// Compares what compiling a trace says.
#[track_caller]
fn compiling<const N: usize>(here: u32, params: &Params, trace: &Trace, outputs: [Tensor<'_>; N], expected: Expect) {
    says(here, session(params).compile(trace, outputs), expected);
}

#[test]
fn several_mistakes_are_one_line_each() {
    let (params, trace, here) = (Params::seeded(0), Trace::inference(), here!());
    let x = trace.input("x", F32, (4, 3));
    let sum = x + trace.ones((4, 4));
    let product = x.matmul(trace.ones((4, 3)));
    let flat = x.reshape((5, 2));
    compiling(here, &params, &trace, [sum, product, flat], expect![[""]]);
}

#[test]
fn losses_of_shapes_that_differ() {
    let (params, trace, here) = (Params::seeded(0), Trace::inference(), here!());
    let (x, y) = (trace.input("x", F32, (Dim::bounded("batch", 8), 1)), trace.input("y", F32, (Dim::bounded("batch", 8),)));
    let a = x.mse(y);
    let b = y.l1(x);
    let c = x.huber(trace.ones((1, 1)), 1.0);
    let d = x.sigmoid().binary_cross_entropy(y.cast(I32));
    let e = trace.ones((2, 3)).binary_cross_entropy_with_logits(trace.ones((3, 2)));
    compiling(here, &params, &trace, [a, b, c, d, e, x.mse(0.5), y.huber(y, 1.0)], expect![[""]]);
}

#[test]
fn a_parameter_declared_in_two_shapes_is_one_mistake() {
    let (params, here) = (Params::seeded(0), here!());
    let first = Linear::new(&params.root() / "head", 4, 3);
    let second = Linear::without_bias(&params.root() / "head", 3, 3);
    let trace = Trace::inference();
    let y = trace.ones((2, 4)).apply(&first).apply(&second);
    compiling(here, &params, &trace, [y], expect![[""]]);
}

#[test]
fn two_layers_of_one_name() {
    let (params, here) = (Params::seeded(0), here!());
    let first = Linear::without_bias(&params.root() / "body", 3, 3);
    let second = Linear::without_bias(&params.root() / "body", 3, 3);
    let trace = Trace::inference();
    let y = trace.ones((2, 3)).apply(&first).apply(&second).apply(&first).apply(&second);
    compiling(here, &params, &trace, [y], expect![[""]]);
    // A layer applied twice, a model declared anew for another program, and a place that is shared on purpose are none.
    let shared = Linear::without_bias((&params.root() / "body").shared(), 3, 3);
    for layers in [[&first, &first], [&second, &second], [&first, &shared], [&shared, &first]] {
        let trace = Trace::inference();
        let y = trace.ones((2, 3)).apply(layers[0]).apply(layers[1]);
        session(&params).compile(&trace, [y]).expect("shared on purpose");
    }
}

#[test]
fn statistics_and_parameters() {
    let (params, here) = (Params::seeded(0), here!());
    let scale = params.root().param("scale", (3,), Init::Constant(1.0));
    params.root().statistic("scale", (3,), Init::Constant(1.0));
    params.root().param("a\nb", (3,), Init::Constant(1.0));
    params.root().param("", (3,), Init::Constant(1.0));
    params.root().param("low", (-3,), Init::Uniform { low: 1.0, high: 0.0 });
    let trace = Trace::inference();
    trace.statistic(&scale).value();
    compiling(here, &params, &trace, [trace.param(&scale)], expect![[""]]);
}

#[test]
fn parameters_of_another_model() {
    let (params, other) = (Params::seeded(0), Params::seeded(1));
    let here = here!();
    let (ours, theirs) = (Linear::new(&params.root() / "ours", 3, 3), Linear::new(&other.root() / "theirs", 3, 3));
    let trace = Trace::inference().named("mixed");
    let y = trace.ones((1, 3)).apply(&ours).apply(&theirs);
    compiling(here, &params, &trace, [y], expect![[""]]);
    let trace = Trace::inference().named("stray");
    let y = trace.ones((1, 3)).apply(&theirs);
    compiling(here, &params, &trace, [y], expect![[""]]);
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
    compiling(here, &params, &trace, [trace.ones(())], expect![[""]]);
}

#[test]
fn inputs_that_do_not_fit() {
    let params = Params::seeded(0);
    let layer = Linear::new(&params.root() / "head", 4, 3);
    let trace = Trace::inference();
    let batch = Dim::bounded("batch", 8);
    let (x, labels) = (trace.input("x", F32, (batch, 4)), trace.input("labels", I32, (batch,)));
    let weights = trace.input("weights", F32, (batch,));
    let y = (x.apply(&layer).cross_entropy(labels) * weights).sum();
    let mut session = session(&params);
    let program = session.compile(&trace, [y]).expect("compiles");
    let (x, labels, weights) = (Array2::<f32>::zeros((5, 4)), Array1::<i32>::zeros(5), Array1::<f32>::zeros(5));
    let mut feed = |feed: &dyn slabwise::feed::Feed, expected| says(0, session.run(&program, feed).map(|_| ()), expected);
    feed(&(&labels, &x, &weights), expect![[""]]);
    feed(&(&labels, &weights, &x), expect![[""]]);
    feed(&(&x, &labels), expect![[""]]);
    feed(&&x, expect![[""]]);
    feed(&(), expect![[""]]);
    feed(&(&Array2::<f32>::zeros((9, 4)), &labels, &weights), expect![[""]]);
    feed(&(&x, &labels, &Array1::<f32>::zeros(4)), expect![[""]]);
    feed(&(&x, &labels, &Array2::<f32>::zeros((5, 1))), expect![[""]]);
    feed(&(&[1.0f32; 7], &labels, &weights), expect![[""]]);
}

#[test]
fn data_that_a_run_refuses() {
    let params = Params::seeded(0);
    let mut session = session(&params);
    let here = here!();
    let embedding = Embedding::new(&params.root() / "tokens", 10, 4);
    let trace = Trace::inference();
    let x = trace.input("x", I32, (3,));
    let y = x.apply(&embedding).ln().sum().require_finite();
    let program = session.compile(&trace, [y]).expect("compiles");
    says(here, session.run(&program, &[1, 12, 3]).map(|_| ()), expect![[""]]);
    says(here, session.run(&program, &[1, 2, 3]).map(|_| ()), expect![[""]]);
}

#[test]
fn names_of_values() {
    let params = Params::seeded(0);
    Linear::new(&params.root() / "head", 2, 2);
    BatchNorm1d::new(&params.root() / "norm", 2);
    let mut session = session(&params);
    says(0, session.value("head.weight"), expect![[""]]);
    says(0, session.value("heed.weight"), expect![[""]]);
    let trace = Trace::inference();
    session.compile(&trace, [trace.ones(())]).expect("compiles");
    says(0, session.value("heed.weight"), expect![[""]]);
    says(0, session.value("bias"), expect![[""]]);
    says(0, session.set_value("momentum", &arr2(&[[0.0]])), expect![[""]]);
    says(0, session.set_value("head.weight", &arr2(&[[0.0]])), expect![[""]]);
    says(0, session.copy_values("haed", "norm"), expect![[""]]);
    says(0, session.copy_values("head", "norm"), expect![[""]]);
    says(0, session.copy_values("norm", "head"), expect![[""]]);
    says(0, session.copy_values("norm", "norm.copy"), expect![[""]]);
    says(0, Model::parse("resnet19"), expect![[""]]);
    says(0, "cpu0".parse::<Device>().map_err(Error::Value), expect![[""]]);
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
    says(0, session.run(&sum, (&freed, &numbers)).map(|_| ()), expect![[""]]);
    let donated = session.upload("donated", &numbers).expect("room");
    session.run(&double, donated.clone().donate()).expect("runs");
    says(0, session.run(&sum, (&donated, &numbers)).map(|_| ()), expect![[""]]);
    let kept = session.upload("kept", &numbers).expect("room");
    says(0, session.run(&sum, (kept.clone().donate(), &numbers)).map(|_| ()), expect![[""]]);
    says(0, session.run(&sum, (kept.clone().donate(), &kept)).map(|_| ()), expect![[""]]);
    says(0, session.download::<i32>(&kept), expect![[""]]);
    let other = self::session(&params);
    says(0, other.download::<f32>(&kept), expect![[""]]);
    let mut session = session.with_threads(64);
    says(0, session.run(&sum, (&kept, &kept)).map(|_| ()), expect![[""]]);
}

#[test]
fn learning() {
    let params = Params::seeded(0);
    let layer = Linear::new(&params.root() / "head", 2, 2);
    let here = here!();
    let trace = Trace::inference();
    let y = trace.ones((1, 2)).apply(&layer);
    trace.minimize(y.sum(), Sgd::new(0.1));
    compiling(here, &params, &trace, [y], expect![[""]]);
    let here = here!();
    let trace = Trace::training();
    let y = trace.ones((1, 2)).apply(&layer);
    trace.minimize(y, Sgd::new(0.1));
    trace.minimize(trace.ones(()), Sgd::new(0.1));
    trace.minimize(y.sum(), Adam::new(f64::NAN));
    trace.minimize(y.sum(), Sgd::new(0.1).named("a\nb"));
    trace.minimize(y.sum(), Sgd::new(0.1));
    trace.minimize(y.sum(), Sgd::new(0.1));
    compiling(here, &params, &trace, [y], expect![[""]]);
    let here = here!();
    let trace = Trace::training();
    let y = trace.ones((1, 2)).apply(&layer).sum();
    trace.freeze(|weight| weight.name.starts_with("haed"));
    trace.minimize(y, Sgd::new(0.1));
    compiling(here, &params, &trace, [y], expect![[""]]);
}

#[test]
fn images() {
    let (params, trace) = (Params::seeded(0), Trace::inference());
    let wide = ConvGeometry { stride: [(1 << 31) - 1, 1], ..ConvGeometry::default() };
    let padded = ConvGeometry { pad: [4, 4], ..ConvGeometry::default() };
    let grouped = ConvGeometry { groups: 3, ..ConvGeometry::default() };
    let conv = Conv2d::new(&params.root() / "stem", 5, 8, 3);
    let (x, here) = (trace.input("x", F32, (Dim::bounded("batch", 8), 4, 8, 8)), here!());
    let a = x.apply(&conv);
    let b = x.conv2d_with(trace.ones((4, 4, 3, 3)), wide);
    let c = x.max_pool2d_with(Window { k: [2, 2], stride: [(1 << 31) - 1, 1], pad: [0, 0] });
    let d = x.conv_transpose2d(trace.ones((5, 4, 3, 3)), ConvGeometry::default());
    let e = x.conv_transpose2d(trace.ones((4, 4, 3, 3)), wide);
    let f = trace.ones((1, 4, 1, 1)).conv_transpose2d(trace.ones((4, 4, 3, 3)), padded);
    let g = x.conv_transpose2d(trace.ones((4, 4, 3, 3)), grouped);
    let h = x.conv_transpose2d(trace.ones((4, 4, 3)), grouped);
    let i = x.conv_transpose2d(trace.ones((4, 4, 3, 3)).cast(I32), grouped);
    compiling(here, &params, &trace, [a, b, c, d, e, f, g, h, i], expect![[""]]);
}

#[test]
fn sizes() {
    let (params, trace, here) = (Params::seeded(0), Trace::inference(), here!());
    let x = trace.input("x", F32, [2usize; 12]);
    let y = x.permute([11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0]).exp().sum_over([0, 3, 5]);
    compiling(here, &params, &trace, [y], expect![[""]]);
    let (trace, here) = (Trace::inference(), here!());
    let x = trace.input("x", F32, (1i64 << 40, 1i64 << 40));
    compiling(here, &params, &trace, [x], expect![[""]]);
    let (trace, here) = (Trace::inference(), here!());
    let x = trace.input("x", F32, (Dim::bounded("batch", 8), 2));
    let y = trace.input("y", F32, (Dim::bounded("batch", 16), 2));
    let z = trace.input("x", F32, (2,));
    compiling(here, &params, &trace, [x, y, z], expect![[""]]);
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
    compiling(here, &params, &trace, [y, other.ones(())], expect![[""]]);
    let (trace, here) = (Trace::inference(), here!());
    let x = trace.input("x", F32, (2,));
    trace.donate(x, 0);
    compiling(here, &params, &trace, [x.sum()], expect![[""]]);
    let trace = Trace::inference().named("sum");
    let graph = trace.finish(&[trace.ones(()).exp()]).expect("a graph");
    says(0, session(&params).compile_graph::<2>("sum", &graph).map(|_| ()), expect![[""]]);
}
