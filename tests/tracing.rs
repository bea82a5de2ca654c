//! Models as users write them, in a crate of their own: the nodes of their traces, and the lines
//! that mistakes name.

use slabwise::nn::{
    Conv2d, Dropout, Flatten, GroupNorm, LearnedPositions, Linear, Lstm, MaxPool2d, Relu,
    Sequential,
};
use slabwise::optim::{Adam, Schedule, Sgd, Weight};
use slabwise::prelude::*;
use slabwise_compiler::graph::{Graph, Phase};
use slabwise_compiler::ops::Op;
use slabwise_models::{MobileNetV2, UNet};

struct Mlp {
    hidden: Linear,
    head: Linear,
}

impl Mlp {
    fn new(at: &Scope, width: usize) -> Self {
        Mlp {
            hidden: Linear::new(at / "hidden", 784, width),
            head: Linear::new(at / "head", 256, 10),
        }
    }
}

const FORWARD: u32 = line!() + 4;
impl Module for Mlp {
    fn forward<'t>(&self, images: Tensor<'t>) -> Tensor<'t> {
        let hidden = images.apply(&self.hidden).relu();
        hidden.apply(&self.head)
    }
}

fn inputs(trace: &Trace) -> (Tensor<'_>, Tensor<'_>) {
    let batch = Dim::bounded("batch", 128);
    (
        trace.input("images", F32, (batch, 784)),
        trace.input("labels", I32, (batch,)),
    )
}

fn count(graph: &Graph, kind: impl Fn(&Op) -> bool) -> usize {
    graph.nodes.iter().filter(|n| kind(&n.op)).count()
}

#[test]
fn a_perceptron_trains_and_infers_with_one_set_of_names() {
    let params = Params::seeded(42);
    let model = Mlp::new(&params.root(), 256);
    let names: Vec<String> = params.declared().iter().map(|p| format!("{p:?}")).collect();
    assert_eq!(
        names,
        [
            "hidden.weight [256, 784]",
            "hidden.bias [256]",
            "head.weight [10, 256]",
            "head.bias [10]"
        ]
    );

    let trace = Trace::training();
    let (images, labels) = inputs(&trace);
    let loss = model.forward(images).cross_entropy(labels);
    trace.minimize(loss, Adam::new(1e-3));
    let train = trace.finish(&[loss]).unwrap();
    assert_eq!(train.verify(), Ok(()));
    // Forward 2; backward one per weight, and one for the hidden activations. The images' gradient
    // is not requested.
    assert_eq!(count(&train, |op| matches!(op, Op::Matmul)), 5);
    assert_eq!(count(&train, |op| matches!(op, Op::Assign(_))), 4 * 3 + 1);
    assert_eq!(count(&train, |op| matches!(op, Op::BoundsCheck { .. })), 1);
    assert_eq!(
        count(&train, |op| matches!(
            op,
            Op::Gather { .. } | Op::Scatter { .. }
        )),
        0
    );

    let trace = Trace::inference();
    let (images, labels) = inputs(&trace);
    let accuracy = model.forward(images).argmax(1).equal(labels).mean();
    let eval = trace.finish(&[accuracy]).unwrap();
    assert_eq!(eval.verify(), Ok(()));
    assert!(
        eval.variables
            .iter()
            .all(|v| v.is_param && train.variable(&v.name).is_some())
    );
    assert!(eval.ids().all(|id| eval.origin(id).phase == Phase::Forward));
}

#[test]
fn a_convolution_network_in_a_row_of_layers() {
    let params = Params::seeded(42);
    let at = &params.root();
    let model = Sequential::new()
        .then(Conv2d::new(at / "stem", 1, 32, 5).padding(2))
        .then(Relu)
        .then(MaxPool2d(2))
        .then(Conv2d::new(at / "body", 32, 64, 5).padding(2))
        .then(Relu)
        .then(MaxPool2d(2))
        .then(Flatten(1))
        .then(Dropout(0.5))
        .then(Linear::new(at / "head", 3136, 10));
    let trace = Trace::training();
    let batch = Dim::bounded("batch", 64);
    let logits = trace.input("images", F32, (batch, 1, 28, 28)).apply(&model);
    assert_eq!(format!("{logits:?}"), "f32 [batch, 10]");
    let loss = logits.cross_entropy(trace.input("labels", I32, (batch,)));
    trace.minimize(
        loss,
        Sgd::new(Schedule::cosine(0.1, 1000).warmup(10))
            .momentum(0.9)
            .clip_norm(1.0),
    );
    let graph = trace.finish(&[loss]).unwrap();
    assert_eq!(graph.verify(), Ok(()));
    assert_eq!(
        count(&graph, |op| matches!(op, Op::Conv2dInputGrad(_))),
        1,
        "the images need no gradient"
    );
    assert_eq!(count(&graph, |op| matches!(op, Op::Uniform { .. })), 1);
    // Six weights and their momenta, the step counter, the random state.
    assert_eq!(count(&graph, |op| matches!(op, Op::Assign(_))), 6 * 2 + 2);
}

#[test]
fn mistakes_name_the_line_of_the_model() {
    let params = Params::seeded(42);
    let model = Mlp::new(&params.root(), 512);
    let trace = Trace::training();
    let (images, labels) = inputs(&trace);
    let loss = model.forward(images).cross_entropy(labels);
    trace.minimize(loss, Adam::new(1e-3));
    let expected = format!(
        "{}:{FORWARD}: matmul [batch, 512] × [256, 10]: inner dimensions 512 and 256 differ (in \"head\")",
        file!()
    );
    let said: Vec<String> = trace
        .finish(&[loss])
        .unwrap_err()
        .iter()
        .map(ToString::to_string)
        .collect();
    assert_eq!(said, [expected.as_str()]);

    // The same through a row of layers, whose calls go through `dyn`.
    let trace = Trace::training();
    let _ = inputs(&trace).0.apply(&Sequential::new().then(model));
    let said: Vec<String> = trace
        .finish(&[])
        .unwrap_err()
        .iter()
        .map(ToString::to_string)
        .collect();
    assert_eq!(said, [expected]);
}

/// A user-defined optimizer: the sign of the gradient (Bernstein et al. 2018).
struct SignSgd(f32);

impl Optimizer for SignSgd {
    fn check(&self) -> Result<(), String> {
        if self.0 > 0.0 {
            Ok(())
        } else {
            Err(format!("sign: the rate is {}", self.0))
        }
    }

    fn update<'t>(&self, _: &'t Trace, weights: &[Weight<'t>]) {
        for weight in weights {
            let total = weight.state("sign.total");
            total.set(total.value() + weight.gradient().sign());
            weight.set(weight.value() - weight.gradient().sign() * self.0);
        }
    }
}

#[test]
fn optimizers_can_be_written_outside() {
    let params = Params::seeded(0);
    let layer = Linear::without_bias(&params.root() / "a", 2, 3);
    let finish = |rate| {
        let trace = Trace::training();
        let loss = trace.ones((1, 2)).apply(&layer).square().sum();
        trace.minimize(loss, SignSgd(rate));
        trace.finish(&[loss])
    };
    let graph = finish(0.1).unwrap();
    assert_eq!(graph.verify(), Ok(()));
    assert!(graph.variable("sign.total.a.weight").is_some());
    assert_eq!(
        finish(0.0).unwrap_err()[0].message,
        "minimize: sign: the rate is 0"
    );
}

/// A call through `dyn` loses its line; [`Tensor::apply`] keeps it. Without it, the error names the
/// last line of the model before.
#[test]
fn layers_behind_dyn_have_mistakes_in_the_lines_of_the_model() {
    let params = Params::seeded(42);
    let linear = Linear::new(&params.root() / "head", 256, 10);
    let layers: [(&dyn Module, &str); 2] = [
        (&linear, "matmul"),
        (&Sequential::new().then(MaxPool2d(2)), "max_pool2d"),
    ];
    for (layer, says) in layers {
        for applied in [true, false] {
            let trace = Trace::inference();
            let line = line!() + 1;
            let x = trace.input("x", F32, (4, 7));
            let _ = if applied {
                x.apply(layer)
            } else {
                layer.forward(x)
            };
            let line = if applied { line + 2 } else { line };
            let said: Vec<String> = trace
                .finish(&[])
                .unwrap_err()
                .iter()
                .map(ToString::to_string)
                .collect();
            assert!(
                said.len() == 1 && said[0].starts_with(&format!("{}:{line}: {says}", file!())),
                "{said:?}"
            );
        }
    }
}

/// A rule given to `freeze` may use the trace that calls it.
#[test]
fn rules_of_freeze_may_use_the_trace() {
    let params = Params::seeded(42);
    let linear = Linear::new(&params.root() / "head", 7, 1);
    let trace = std::rc::Rc::new(Trace::training());
    let own = trace.clone();
    trace.freeze(move |weight| {
        let _ = own.input(
            if weight.name.ends_with("bias") {
                "a"
            } else {
                "b"
            },
            F32,
            (),
        );
        weight.name.ends_with("bias")
    });
    let x = trace.input("x", F32, (4, 7));
    trace.minimize(x.apply(&linear).mean(), Sgd::new(0.1));
    // Mistakes in nodes that it adds to the trace are reported like any other.
    let said = trace
        .finish(&[])
        .expect_err("the same inputs, several times");
    assert!(
        said.iter()
            .all(|mistake| mistake.to_string().contains("\"a\"")
                || mistake.to_string().contains("\"b\"")),
        "{said:?}"
    );
}

/// A model is declared once for each program; options that change a layer's parameters change what
/// its constructor declared.
#[test]
fn layers_with_options_are_declared_again() {
    let params = Params::seeded(0);
    let declare = |scope: &Scope| {
        Conv2d::new(scope / "conv", 8, 16, 3).groups(2);
        Conv2d::new(scope / "bare", 8, 16, 3)
            .groups(2)
            .without_bias();
        Lstm::new(scope / "projected", 4, 8).projection(3);
        Lstm::new(scope / "stacked", 4, 8).layers(2).both_ways();
    };
    for scope in [params.root(), params.root(), params.root().shared()] {
        declare(&scope);
        let _ = MobileNetV2::standard().layers(&(&scope / "net"));
    }
    assert_eq!(params.mistakes(), []);
    let declared = params.declared();
    let shape = |name: &str| {
        let found = declared.iter().find(|p| p.name() == name);
        found.map(|p| p.dims())
    };
    assert_eq!(shape("conv.weight"), Some(vec![16, 4, 3, 3]));
    assert_eq!(shape("bare.bias"), None);
    assert_eq!(shape("projected.weight_hr_l0"), Some(vec![3, 8]));
    assert_eq!(shape("stacked.weight_ih_l1_reverse"), Some(vec![32, 16]));
    let names = params.declared().len();
    declare(&params.root());
    assert_eq!(params.declared().len(), names);
}

/// An option takes nothing from another layer of the name, and a shape that differs in the end is a
/// mistake at the option's line.
#[test]
fn options_leave_the_declarations_of_other_layers() {
    let params = Params::seeded(0);
    let first = Conv2d::new(&params.root() / "conv", 8, 16, 3);
    let line = line!() + 1;
    let grouped = Conv2d::new((&params.root() / "conv").shared(), 8, 16, 3).groups(2);
    let bare = Conv2d::new((&params.root() / "conv").shared(), 8, 16, 3).without_bias();
    let names: Vec<String> = params.declared().iter().map(|p| format!("{p:?}")).collect();
    assert_eq!(names, ["conv.weight [16, 8, 3, 3]", "conv.bias [16]"]);
    let said: Vec<String> = params.mistakes().iter().map(ToString::to_string).collect();
    let expected = format!(
        "{0}:{line}: \"conv.weight\" is declared as [16, 4, 3, 3], and as [16, 8, 3, 3] at {0}:{1} (in \"conv\")",
        file!(),
        line - 2
    );
    assert_eq!(said, [expected]);
    let widths = [first.weight(), bare.weight(), grouped.weight()].map(|w| w.dims()[1]);
    assert_eq!(widths, [8, 8, 4]);
}

#[test]
fn learned_positions_fit_every_length_up_to_the_longest() {
    let params = Params::seeded(0);
    let places = LearnedPositions::new(&params.root() / "places", 6, 3);
    let mut session = Session::new(Device::Cpu, params).expect("a session");
    for length in [Dim::bounded("length", 10), Dim::unbounded("length")] {
        let trace = Trace::inference();
        let y = trace.input("x", F32, (2, length, 3)).apply(&places);
        let program = session.compile(&trace, [y]).expect("it compiles");
        let weight = session.value("places.weight").expect("a weight");
        for n in [1, 4, 6] {
            let x = ndarray::Array3::<f32>::ones((2, n, 3));
            let [y] = session.run(&program, &x).expect("it runs");
            let y = y.array::<f32>().expect("f32");
            let expected = |at: [usize; 3]| 1.0 + weight[[at[1], at[2]]];
            assert!(
                y.indexed_iter()
                    .all(|(at, y)| *y == expected([at[0], at[1], at[2]]))
            );
        }
        let x = ndarray::Array3::<f32>::ones((2, 7, 3));
        let error = session.run(&program, &x).map(drop).expect_err("too long");
        let error = error.to_string();
        assert!(
            error.contains("index 6 at position 6 is outside 0..6"),
            "{error}"
        );
        assert!(error.contains("tracing.rs:"), "{error}");
    }
    let trace = Trace::inference();
    let y = trace.input("x", F32, (3,)).apply(&places);
    let error = session
        .compile(&trace, [y])
        .map(drop)
        .expect_err("no sequence");
    assert!(
        error.to_string().contains("learned positions of [3]"),
        "{error}"
    );
}

#[test]
fn group_norm_of_vectors_normalizes_groups_of_channels() {
    let params = Params::seeded(0);
    let norm = GroupNorm::new(&params.root() / "norm", 2, 4);
    let mut session = Session::new(Device::Cpu, params).expect("a session");
    let trace = Trace::inference();
    let y = trace.input("x", F32, (1, 4)).apply(&norm);
    let program = session.compile(&trace, [y]).expect("it compiles");
    let [y] = session
        .run(&program, [1.0f32, 3.0, -5.0, 5.0])
        .expect("it runs");
    let y = y.array::<f32>().expect("f32");
    for (y, expected) in y.iter().zip([-1.0, 1.0, -1.0, 1.0]) {
        assert!((y - expected).abs() < 1e-4, "{y} instead of {expected}");
    }
    let trace = Trace::inference();
    let y = trace.input("x", F32, (1, 4, 2)).group_normalize(3, 1e-5);
    let error = session
        .compile(&trace, [y])
        .map(drop)
        .expect_err("3 groups of 4");
    let expected = "group_normalize of [1, 4, 2]: 4 channels do not divide into 3 groups";
    assert!(error.to_string().contains(expected), "{error}");
}

/// Sizes beyond any memory are errors.
#[test]
fn a_model_of_too_many_levels_is_refused() {
    let params = Params::seeded(0);
    let levels = 70;
    let model = UNet {
        levels,
        ..UNet::standard()
    }
    .layers(&params.root());
    let trace = Trace::inference();
    let y = trace.input("x", F32, (1, 3, 8, 8)).apply(&model);
    let mut session = Session::new(Device::Cpu, params).expect("a session");
    session
        .compile(&trace, [y])
        .map(drop)
        .expect_err("too wide");
}
