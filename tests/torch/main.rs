//! Small versions of the built-in models against recorded results of PyTorch
//! (`tests/data/record.py`): weights load under PyTorch's names, and outputs, gradients, running
//! statistics and ten training steps agree. `full.rs` has the models of the usual benchmarks at
//! full size.

mod full;
mod layers;
mod methods;
mod models;
mod optimizers;
mod points;

use std::path::PathBuf;

use half::f16;
use ndarray::{ArrayD, Axis, IxDyn, Slice};
use slabwise::CompileOptions;
use slabwise::nn::{GroupNorm, Linear, Module, MultiHeadAttention, RmsNorm};
use slabwise::optim::{Adam, AdamW, Sgd};
use slabwise::prelude::*;
use slabwise::weights::File;
use slabwise_models::{Examples, Gpt, LstmModel, MobileNetV2, ResNet, UNet, Vgg};

const STEPS: usize = 10;
/// An array for the gradients of all parameters of a model.
const PARAMS_MAX: usize = 160;

/// Convolutions that add term by term. Winograd's filtering rounds differently (`docs/numerics.md`),
/// and a backward pass through many batch norms over four images amplifies any such difference: it
/// moves a gradient of `resnet18` by 0.2 % of the largest.
fn exact() -> CompileOptions {
    CompileOptions {
        exact_convolutions: true,
        ..CompileOptions::default()
    }
}

fn path(name: &str, part: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
        .join(format!("tests/data/torch/{name}.{part}.safetensors"))
}

/// The recorded case of a model.
struct Case {
    name: &'static str,
    file: File,
}

impl Case {
    fn floats(&self, tensor: &str) -> ArrayD<f32> {
        self.read(tensor, F32, f32::from_le_bytes)
    }

    fn halves(&self, tensor: &str) -> ArrayD<f32> {
        self.read(tensor, F16, |bytes| f16::from_le_bytes(bytes).to_f32())
    }

    fn integers(&self, tensor: &str) -> ArrayD<i32> {
        self.read(tensor, I32, i32::from_le_bytes)
    }

    fn read<T, const BYTES: usize>(
        &self,
        tensor: &str,
        dtype: DType,
        of: fn([u8; BYTES]) -> T,
    ) -> ArrayD<T> {
        let entry = self
            .file
            .get(tensor)
            .unwrap_or_else(|| panic!("{}: no {tensor} was recorded", self.name));
        assert_eq!(entry.dtype, dtype, "{}: {tensor}", self.name);
        let shape: Vec<usize> = entry.shape.iter().map(|&n| n as usize).collect();
        let values = entry
            .bytes
            .chunks_exact(BYTES)
            .map(|b| of(b.try_into().expect("as many bytes")))
            .collect();
        ArrayD::from_shape_vec(IxDyn(&shape), values).expect("the file was checked")
    }

    /// Examples and labels of a step.
    fn step(&self, step: usize) -> (Examples, ArrayD<i32>) {
        fn part<T: Clone>(all: ArrayD<T>, step: usize) -> ArrayD<T> {
            let n = all.shape()[0] / STEPS;
            all.slice_axis(Axis(0), Slice::from(step * n..(step + 1) * n))
                .to_owned()
        }
        let tokens = self.file.get("x").expect("recorded").dtype == I32;
        let x = if tokens {
            Examples::Tokens(part(self.integers("x"), step))
        } else {
            Examples::Images(part(self.halves("x"), step))
        };
        (x, part(self.integers("y"), step))
    }

    /// Fails if the largest difference is more than `tolerance` of the largest finite number.
    #[track_caller]
    fn assert_close(&self, what: &str, got: &ArrayD<f32>, tolerance: f32) {
        let expected = self.floats(what);
        assert_eq!(got.shape(), expected.shape(), "{}: {what}", self.name);
        let finite = expected.iter().filter(|v| v.is_finite());
        let largest = finite.fold(0.0f32, |n, v| n.max(v.abs()));
        for (g, e) in got.iter().zip(&expected) {
            assert!(
                g == e || (g - e).abs() <= tolerance * (largest + 1e-3),
                "{}: {what}: {g} instead of {e}, largest {largest}",
                self.name
            );
        }
    }
}

fn input<'t>(trace: &'t Trace, x: &Examples) -> Tensor<'t> {
    match x {
        Examples::Images(images) => trace.input("x", F32, images.shape()),
        Examples::Tokens(tokens) => trace.input("x", I32, tokens.shape()),
    }
}

/// The loss of logits with a label for each example, token or pixel.
fn loss<'t>(logits: Tensor<'t>, y: &ArrayD<i32>) -> Tensor<'t> {
    let labels = logits.trace().input("y", I32, y.shape());
    let by_class = if logits.rank() == 4 {
        logits.permute([0, 2, 3, 1])
    } else {
        logits
    };
    by_class.cross_entropy(labels)
}

/// The gradients of all parameters, concatenated.
fn gradients<'t>(trace: &'t Trace, loss: Tensor<'t>, params: &[&Param]) -> Tensor<'t> {
    assert!(params.len() <= PARAMS_MAX, "{} parameters", params.len());
    let all = trace.gradients(
        loss,
        std::array::from_fn::<_, PARAMS_MAX, _>(|i| params[i % params.len()]),
    );
    let flat: Vec<Tensor<'_>> = all[..params.len()]
        .iter()
        .map(|g| g.reshape([-1i64]))
        .collect();
    trace.concat(&flat, 0)
}

fn check(
    name: &'static str,
    optimizer: impl Optimizer,
    layers: impl Fn(&Scope) -> Box<dyn Module>,
) {
    let case = Case {
        name,
        file: File::open(path(name, "case")).expect("recorded"),
    };
    let (x, y) = case.step(0);
    let open = || {
        let params = Params::seeded(0);
        let model = layers(&params.root());
        let declared = params.declared();
        let mut session = Session::new(Device::Cpu, params)
            .expect("a session")
            .with_threads(2);
        session
            .load_weights(path(name, "weights"))
            .unwrap_or_else(|e| panic!("{name}: {e}"));
        (session, model, declared)
    };

    // Logits and gradients of the first step.
    let (mut session, model, declared) = open();
    let trained: Vec<&Param> = declared.iter().filter(|p| p.is_trained()).collect();
    let trace = Trace::training();
    let logits = input(&trace, &x).apply(&*model);
    let flat = gradients(&trace, loss(logits, &y), &trained);
    let program = session
        .compile(&trace, [logits, flat])
        .unwrap_or_else(|e| panic!("{name}: {e}"));
    let [logits, flat] = session.run(&program, (&x, &y)).expect("it runs");
    case.assert_close("logits", &logits.array().expect("f32"), 1e-4);
    let flat = flat.array::<f32>().expect("f32");
    let mut at = 0;
    for param in trained {
        let n: usize = param.dims().iter().product();
        let gradient = flat.slice_axis(Axis(0), Slice::from(at..at + n)).to_owned();
        at += n;
        let gradient = gradient
            .into_shape_with_order(param.dims())
            .expect("as many elements");
        case.assert_close(&format!("grad.{}", param.name()), &gradient, 1e-3);
    }

    // Ten steps, and the variables after them.
    let (mut session, model, declared) = open();
    let trace = Trace::training();
    let loss = loss(input(&trace, &x).apply(&*model), &y);
    trace.minimize(loss, optimizer);
    let train = session
        .compile(&trace, [loss])
        .unwrap_or_else(|e| panic!("{name}: {e}"));
    let losses: Vec<f32> = (0..STEPS)
        .map(|step| {
            let (x, y) = case.step(step);
            session.run(&train, (&x, &y)).expect("it runs")[0].item()
        })
        .collect();
    for (step, (got, expected)) in losses.iter().zip(case.floats("losses")).enumerate() {
        assert!(
            (got - expected).abs() <= 1e-4 * expected,
            "{name}: step {step}: loss {got} instead of {expected}"
        );
    }
    for statistic in declared.iter().filter(|p| !p.is_trained()) {
        case.assert_close(
            &format!("end.{}", statistic.name()),
            &session.value(statistic.name()).expect("there"),
            1e-3,
        );
    }
    let trace = Trace::inference();
    let program = session
        .compile(&trace, [input(&trace, &x).apply(&*model)])
        .expect("it compiles");
    let [eval] = session.run(&program, (&x,)).expect("it runs");
    case.assert_close("eval", &eval.array().expect("f32"), 1e-3);
}

fn sgd() -> Sgd {
    Sgd::new(0.05).momentum(0.9)
}

#[test]
fn residual_networks() {
    let net = |large_stem: bool, bottleneck: bool, depths: &[usize]| {
        let net = ResNet {
            large_stem,
            bottleneck,
            depths: depths.to_vec(),
            width: 4,
            classes: 5,
        };
        move |at: &Scope| -> Box<dyn Module> { Box::new(net.layers(at)) }
    };
    check("resnet20", sgd(), net(false, false, &[2, 2]));
    check("resnet18", sgd(), net(true, false, &[1, 2]));
    check("resnet50", sgd(), net(true, true, &[1, 1]));
}

#[test]
fn other_networks_of_images() {
    let mobile = MobileNetV2 {
        stem: 4,
        stages: vec![[1, 4, 1, 1], [3, 6, 2, 2]],
        last: 12,
        classes: 5,
        dropout: 0.0,
    };
    check("mobilenetv2", sgd(), |at| Box::new(mobile.layers(at)));
    let vgg = Vgg {
        stages: vec![[4, 1], [8, 2]],
        places: 2,
        hidden: 16,
        classes: 5,
        dropout: 0.0,
    };
    check("vgg16", sgd(), |at| Box::new(vgg.layers(at)));
    let unet = UNet {
        inputs: 3,
        width: 4,
        levels: 2,
        classes: 2,
    };
    check("unet", Adam::new(1e-2), |at| Box::new(unet.layers(at)));
}

#[test]
fn language_models() {
    let gpt = Gpt {
        layers: 2,
        width: 16,
        heads: 2,
        length: 8,
        vocabulary: 32,
        tied: false,
    };
    check("gpt", AdamW::new(3e-3).weight_decay(0.1), |at| {
        Box::new(gpt.layers(at))
    });
    let lstm = LstmModel {
        vocabulary: 16,
        width: 8,
        hidden: 12,
        length: 6,
        layers: 1,
    };
    check("lstm", Adam::new(1e-2), |at| Box::new(lstm.layers(at)));
}

/// Norms and attention that no built-in model uses.
struct Layers {
    group: GroupNorm,
    rms: RmsNorm,
    attention: MultiHeadAttention,
    fc: Linear,
}

impl Module for Layers {
    fn forward<'t>(&self, x: Tensor<'t>) -> Tensor<'t> {
        x.apply(&self.group)
            .apply(&self.rms)
            .apply(&self.attention)
            .mean_over(1)
            .apply(&self.fc)
    }
}

#[test]
fn single_layers() {
    check("layers", sgd(), |at| {
        Box::new(Layers {
            group: GroupNorm::new(at / "group", 2, 6),
            rms: RmsNorm::new(at / "rms", 10),
            attention: MultiHeadAttention::new(at / "attention", 10, 2).causal(),
            fc: Linear::new(at / "fc", 10, 4),
        })
    });
}

/// All tensors with other names or shapes in PyTorch are reported at once, and nothing changes.
#[test]
fn weights_of_another_model_are_refused() {
    let params = Params::seeded(0);
    ResNet {
        large_stem: false,
        bottleneck: false,
        depths: vec![2, 1],
        width: 4,
        classes: 6,
    }
    .layers(&params.root());
    let mut session = Session::new(Device::Cpu, params).expect("a session");
    let said = session
        .load_weights(path("resnet20", "weights"))
        .unwrap_err()
        .to_string();
    for part in [
        "fc.weight",
        "[6, 8]",
        "[5, 8]",
        "unexpected: `layer2.1.bn1.running_mean`",
        "unexpected: `layer2.1.conv2.weight`",
    ] {
        assert!(said.contains(part), "{part} in\n{said}");
    }
    assert!(!said.contains("num_batches_tracked"), "{said}");
}
