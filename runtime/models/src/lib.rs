//! Built-in models, which the command line plans and measures, under names that other frameworks'
//! benchmarks share.
#![forbid(unsafe_code)]

mod attention;
mod bert;
mod blocks;
mod diffusion;
mod gpt;
mod llama;
mod lstm;
mod mobilenet;
mod ode;
mod resnet;
mod sampling;
mod table;
mod unet;
mod vae;
mod vgg;
mod vit;

pub use bert::{Bert, BertEncoder, Encoded};
pub use diffusion::{Denoiser, Diffusion};
pub use gpt::Gpt;
pub use llama::{CACHED, Decoder, Llama};
pub use lstm::LstmModel;
pub use mobilenet::MobileNetV2;
pub use ode::Ode;
pub use resnet::ResNet;
pub use sampling::Sampling;
pub use table::Sizes;
pub use unet::UNet;
pub use vae::{Autoencoder, Latent, Vae};
pub use vgg::Vgg;
pub use vit::Vit;

use std::fmt;
use std::str::FromStr;

use ndarray::{ArrayD, IxDyn};
use slabwise::data::epoch_seed;
use slabwise::error::{Error, Result};
use slabwise::feed::{Input, Source};
use slabwise::nn::{Conv2d, Flatten, Linear, MaxPool2d, Module, Relu, Sequential};
use slabwise::optim::{
    Adadelta, Adafactor, Adagrad, Adam, AdamW, Adamax, Lamb, Lion, Muon, NAdam, Optimizer, RAdam,
    RmsProp, Sgd,
};
use slabwise::params::{Params, Scope};
use slabwise::shape::{Dim, Shape};
use slabwise::tensor::Tensor;
use slabwise::trace::{LossScale, Precision, Trace};
use slabwise::{Plan, Program, Session};
use slabwise_kernels::dtype::DType::{F32, I32};
use slabwise_kernels::spec::Window;
use table::{Labelled, Layers};

/// A 3×3 window with stride 2 and padding 1.
const POOL_3_2: Window = Window {
    k: [3, 3],
    stride: [2, 2],
    pad: [1, 1],
};

/// A built-in model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Model {
    /// 784-512-256-10 with relu between: 535,818 weights.
    Mlp,
    /// Two 5×5 convolutions (32 and 64 channels), each with relu and 2×2 max pooling, then
    /// 3136-512-10: 1,663,370 weights.
    Cnn,
    /// [`ResNet::resnet20`] on 3×32×32: 272,474 weights.
    ResNet20,
    /// [`ResNet::resnet18`] on 3×64×64: 11,279,112 weights.
    ResNet18,
    /// [`ResNet::resnet50`] on 3×224×224: 25,557,032 weights.
    ResNet50,
    /// [`MobileNetV2::standard`] on 3×224×224: 3,504,872 weights.
    MobileNetV2,
    /// [`UNet::standard`] on 3×128×128: 31,037,698 weights.
    UNet,
    /// [`Vgg::vgg16`] on 3×224×224: 138,357,544 weights.
    Vgg16,
    /// A transformer of any size; [`Gpt::SMALL`] by default.
    Gpt(Gpt),
    /// [`LstmModel::SMALL`]: 444,544 weights.
    Lstm,
    /// One of these in other sizes, or one of the table only ([`Ode`], [`Bert`], [`Llama`],
    /// [`Vit`], [`Diffusion`], [`Vae`]), as [`Model::parse`] reads it.
    Sized(Sizes),
}

/// Examples of a batch.
#[derive(Clone, Debug, PartialEq)]
pub enum Examples {
    /// Numbers in 0..1.
    Images(ArrayD<f32>),
    /// Kinds of tokens.
    Tokens(ArrayD<i32>),
}

impl Examples {
    /// Those of some rows of the batch.
    pub fn rows(&self, rows: std::ops::Range<usize>) -> Examples {
        match self {
            Examples::Images(all) => Examples::Images(rows_of(all, rows)),
            Examples::Tokens(all) => Examples::Tokens(rows_of(all, rows)),
        }
    }
}

/// Some rows of an array.
pub fn rows_of<T: Clone>(all: &ArrayD<T>, rows: std::ops::Range<usize>) -> ArrayD<T> {
    all.slice_axis(ndarray::Axis(0), rows.into()).to_owned()
}

impl Input for Examples {
    fn visit(&self, visit: &mut dyn FnMut(Source<'_>)) {
        match self {
            Examples::Images(images) => images.visit(visit),
            Examples::Tokens(tokens) => tokens.visit(visit),
        }
    }
}

impl Model {
    /// All of them, the transformer in its usual size.
    pub const ALL: &[Model] = &[
        Model::Mlp,
        Model::Cnn,
        Model::ResNet20,
        Model::ResNet18,
        Model::ResNet50,
        Model::MobileNetV2,
        Model::UNet,
        Model::Vgg16,
        Model::Gpt(Gpt::SMALL),
        Model::Lstm,
    ];

    /// The name that [`Model::parse`] reads, without sizes.
    pub fn name(self) -> &'static str {
        match self {
            Model::Mlp => "mlp",
            Model::Cnn => "cnn",
            Model::ResNet20 => "resnet20",
            Model::ResNet18 => "resnet18",
            Model::ResNet50 => "resnet50",
            Model::MobileNetV2 => "mobilenetv2",
            Model::UNet => "unet",
            Model::Vgg16 => "vgg16",
            Model::Gpt(Gpt::GPT2) => "gpt2",
            Model::Gpt(_) => "gpt",
            Model::Lstm => "lstm",
            Model::Sized(sizes) => sizes.row().name,
        }
    }

    /// The model of a name, with default or given sizes: `gpt2`, or `lstm:length=320,layers=2`,
    /// which sets the sizes it names. [`Model::help`] lists all names and sizes.
    ///
    /// # Errors
    /// For an unknown name, with the known ones; for an unknown size, with those of the model; for
    /// one that is given twice, is not a number or outside of its bounds.
    pub fn parse(text: &str) -> Result<Model> {
        let (name, sizes) = text
            .split_once(':')
            .map_or((text, None), |(name, sizes)| (name, Some(sizes)));
        let Some(usual) = Sizes::usual(name) else {
            let known: Vec<&str> = table::names().collect();
            let near = slabwise_compiler::words::meant(name, known.iter().copied());
            return Err(Error::Value(format!(
                "unknown model {name:?}; there are {}{near}",
                known.join(", ")
            )));
        };
        let sizes = sizes.map_or(Ok(usual), |sizes| usual.set(sizes))?;
        if name == "gpt" || name == "gpt2" {
            return Ok(Model::Gpt(table::gpt(sizes.values())));
        }
        let standard = Model::ALL
            .iter()
            .find(|model| sizes == usual && model.name() == name);
        Ok(standard.copied().unwrap_or(Model::Sized(sizes)))
    }

    /// Every model with its default sizes, one in a line, as [`Model::parse`] reads it.
    pub fn help() -> String {
        table::help()
    }

    fn sizes(self) -> Sizes {
        let sizes = match self {
            Model::Sized(sizes) => Some(sizes),
            Model::Gpt(gpt) => Sizes::of_gpt(self.name(), &gpt),
            standard => Sizes::usual(standard.name()),
        };
        sizes.expect("every model has a row")
    }

    /// The shape of one example.
    pub fn example(self) -> Vec<usize> {
        self.sizes().example()
    }

    /// The number of classes, or kinds of tokens.
    pub fn classes(self) -> usize {
        self.sizes().classes()
    }

    /// The shape of one example's labels: none for a class; for one label per pixel or token,
    /// theirs.
    fn label(self) -> Vec<usize> {
        match self.sizes().row().labelled {
            Labelled::Pixel => self.example()[1..].to_vec(),
            Labelled::Token => self.example(),
            Labelled::Example => Vec::new(),
        }
    }

    /// Whether examples are tokens.
    fn reads_tokens(self) -> bool {
        self.sizes().row().labelled == Labelled::Token
    }

    /// The optimizer it is measured with by default.
    pub fn optimizer(self) -> OptimizerKind {
        self.sizes().row().optimizer
    }

    /// Declares the weights.
    pub fn build(self, params: &Params) -> Network {
        let layers = self.sizes().layers(&params.root());
        Network {
            model: self,
            layers,
            precision: Precision::F32,
        }
    }

    /// Bytes of a batch of examples and labels.
    pub fn batch_bytes(self, batch: usize) -> u64 {
        let one: usize = self
            .example()
            .iter()
            .product::<usize>()
            .saturating_add(self.label().iter().product());
        4 * (batch as u64).saturating_mul(one as u64)
    }

    /// A batch of synthetic examples and labels, the same for the same seed. Images are uniform in
    /// 0..1.
    pub fn batch(self, batch: usize, seed: u64) -> (Examples, ArrayD<i32>) {
        let shape = |one: Vec<usize>| IxDyn(&[vec![batch], one].concat());
        let mut draw = noise(seed);
        let classes = self.classes() as f32;
        let class = move |draw: &mut dyn FnMut() -> f32| (draw() * classes) as i32;
        let examples = if self.reads_tokens() {
            Examples::Tokens(ArrayD::from_shape_simple_fn(shape(self.example()), || {
                class(&mut draw)
            }))
        } else {
            Examples::Images(ArrayD::from_shape_simple_fn(
                shape(self.example()),
                &mut draw,
            ))
        };
        (
            examples,
            ArrayD::from_shape_simple_fn(shape(self.label()), || class(&mut draw)),
        )
    }
}

fn mlp(at: &Scope, [inputs, hidden1, hidden2, classes]: [usize; 4]) -> Sequential {
    Sequential::new()
        .then(Linear::new(at / "hidden1", inputs, hidden1))
        .then(Relu)
        .then(Linear::new(at / "hidden2", hidden1, hidden2))
        .then(Relu)
        .then(Linear::new(at / "head", hidden2, classes))
}

/// For images of `size` rows and columns, a multiple of 4.
fn cnn(at: &Scope, [size, width, hidden, classes]: [usize; 4]) -> Sequential {
    let (wide, pooled) = (2 * width, size / 4);
    Sequential::new()
        .then(Conv2d::new(at / "stem", 1, width, 5).padding(2))
        .then(Relu)
        .then(MaxPool2d(2))
        .then(Conv2d::new(at / "body", width, wide, 5).padding(2))
        .then(Relu)
        .then(MaxPool2d(2))
        .then(Flatten(1))
        .then(Linear::new(at / "hidden", wide * pooled * pooled, hidden))
        .then(Relu)
        .then(Linear::new(at / "head", hidden, classes))
}

/// Uniform numbers in 0..1, the same for the same seed.
pub fn noise(seed: u64) -> impl FnMut() -> f32 {
    let mut at = 0;
    move || {
        at += 1;
        // The 24 bits that an f32 holds exactly.
        (epoch_seed(seed, at) >> 40) as f32 / (1u32 << 24) as f32
    }
}

/// A built-in model with its weights declared.
pub struct Network {
    model: Model,
    layers: Layers,
    precision: Precision,
}

/// A model with a loss of its own.
trait Learner: Module {
    /// The loss for examples and the label of each, an f32 scalar.
    fn loss<'t>(&self, x: Tensor<'t>, labels: Tensor<'t>) -> Tensor<'t>;
}

impl Network {
    /// The same with products and convolutions of its programs in this precision; see
    /// [`Trace::with_precision`]. Training in f16 scales the loss, [as it
    /// goes](LossScale::dynamic).
    pub fn with_precision(self, precision: Precision) -> Network {
        Network { precision, ..self }
    }

    fn learning(&self) -> Trace {
        let trace = Trace::training().with_precision(self.precision);
        match self.precision {
            Precision::F16 => trace.with_loss_scale(LossScale::dynamic()),
            Precision::F32 | Precision::Bf16 => trace,
        }
    }

    /// Which model this is.
    pub fn model(&self) -> Model {
        self.model
    }

    /// Compiles a training step "train": examples (f32 images or i32 tokens) and labels (i32, one
    /// for an example, pixel or token) in, the mean cross-entropy out.
    ///
    /// # Errors
    /// Any error of [`Session::compile`].
    pub fn training(
        &self,
        session: &mut Session,
        batch: impl Into<Dim>,
        optimizer: OptimizerKind,
    ) -> Result<Program<1>> {
        let trace = self.learning();
        let loss = self.step(&trace, batch.into(), optimizer);
        session.compile(&trace, [loss])
    }

    /// The same step without memory for weights and slab; see [`Session::plan`].
    ///
    /// # Errors
    /// Any error of [`Session::plan`].
    pub fn plan_training(
        &self,
        session: &Session,
        batch: impl Into<Dim>,
        optimizer: OptimizerKind,
    ) -> Result<Plan> {
        let trace = self.learning();
        let loss = self.step(&trace, batch.into(), optimizer);
        session.plan(&trace, [loss])
    }

    /// Compiles the inference "infer": examples in, logits `[batch, classes]` out; for models with
    /// a label per pixel `[batch, classes, h, w]`, per token `[batch, length, classes]`.
    ///
    /// # Errors
    /// Any error of [`Session::compile`].
    pub fn inference(&self, session: &mut Session, batch: impl Into<Dim>) -> Result<Program<1>> {
        let trace = Trace::inference().with_precision(self.precision);
        let logits = self.examples(&trace, batch.into()).apply(self);
        session.compile(&trace, [logits])
    }

    fn examples<'t>(&self, trace: &'t Trace, batch: Dim) -> Tensor<'t> {
        let (name, dtype) = if self.model.reads_tokens() {
            ("tokens", I32)
        } else {
            ("images", F32)
        };
        trace.input(name, dtype, shape(batch, &self.model.example()))
    }

    /// Declares the examples of a batch and their labels.
    pub fn inputs<'t>(&self, trace: &'t Trace, batch: Dim) -> (Tensor<'t>, Tensor<'t>) {
        let labels = shape(batch, &self.model.label());
        let examples = self.examples(trace, batch);
        (examples, trace.input("labels", I32, labels))
    }

    /// Traces a training step; gives its loss.
    pub fn step<'t>(&self, trace: &'t Trace, batch: Dim, optimizer: OptimizerKind) -> Tensor<'t> {
        let loss = self.loss(trace, batch);
        // Only the last layer of a frozen model learns.
        if let Some(head) = self.model.sizes().head() {
            trace.freeze(move |weight| !weight.name.starts_with(head));
        }
        trace.minimize(loss, optimizer.optimizer());
        loss
    }

    fn loss<'t>(&self, trace: &'t Trace, batch: Dim) -> Tensor<'t> {
        let x = self.examples(trace, batch);
        let labels = || trace.input("labels", I32, shape(batch, &self.model.label()));
        let layers = match &self.layers {
            Layers::Own(layers) => return layers.loss(x, labels()),
            Layers::Labelled(layers) => layers,
        };
        let (logits, labels) = (x.apply(&**layers), labels());
        // Classes last.
        let logits = if self.model.sizes().row().labelled == Labelled::Pixel {
            logits.permute([0, 2, 3, 1])
        } else {
            logits
        };
        logits.cross_entropy(labels)
    }
}

impl Module for Network {
    #[track_caller]
    fn forward<'t>(&self, x: Tensor<'t>) -> Tensor<'t> {
        match &self.layers {
            Layers::Labelled(layers) => x.apply(&**layers),
            Layers::Own(layers) => x.apply(&**layers),
        }
    }
}

/// The shape of a batch of examples.
fn shape(batch: Dim, one: &[usize]) -> Shape {
    let dims: Vec<Dim> = [batch]
        .into_iter()
        .chain(one.iter().map(|&n| n.into()))
        .collect();
    Shape::from(dims.as_slice())
}

/// The optimizers that built-in models are measured with, at fixed rates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OptimizerKind {
    /// Rate 0.01, momentum 0.9.
    Sgd,
    /// Rate 0.001.
    Adam,
    /// Rate 0.0003, weight decay 0.1.
    AdamW,
    /// Rate 0.001.
    RmsProp,
    /// Rate 0.01.
    Adagrad,
    /// Rate 1.
    Adadelta,
    /// Rate 0.002.
    Adamax,
    /// Rate 0.002.
    NAdam,
    /// Rate 0.001.
    RAdam,
    /// Rate 0.0001, weight decay 0.1.
    Lion,
    /// Rate 0.001, weight decay 0.01.
    Lamb,
    /// Rate 0.01.
    Adafactor,
    /// Rate 0.02 for matrices; [`OptimizerKind::AdamW`] for all other weights.
    Muon,
}

impl OptimizerKind {
    /// All of them.
    pub const ALL: &[OptimizerKind] = &[
        OptimizerKind::Sgd,
        OptimizerKind::Adam,
        OptimizerKind::AdamW,
        OptimizerKind::RmsProp,
        OptimizerKind::Adagrad,
        OptimizerKind::Adadelta,
        OptimizerKind::Adamax,
        OptimizerKind::NAdam,
        OptimizerKind::RAdam,
        OptimizerKind::Lion,
        OptimizerKind::Lamb,
        OptimizerKind::Adafactor,
        OptimizerKind::Muon,
    ];

    /// The name that [`OptimizerKind::parse`] reads.
    pub fn name(self) -> &'static str {
        match self {
            OptimizerKind::Sgd => "sgd",
            OptimizerKind::Adam => "adam",
            OptimizerKind::AdamW => "adamw",
            OptimizerKind::RmsProp => "rmsprop",
            OptimizerKind::Adagrad => "adagrad",
            OptimizerKind::Adadelta => "adadelta",
            OptimizerKind::Adamax => "adamax",
            OptimizerKind::NAdam => "nadam",
            OptimizerKind::RAdam => "radam",
            OptimizerKind::Lion => "lion",
            OptimizerKind::Lamb => "lamb",
            OptimizerKind::Adafactor => "adafactor",
            OptimizerKind::Muon => "muon",
        }
    }

    /// The optimizer, at its rate.
    pub fn optimizer(self) -> Box<dyn Optimizer> {
        let adamw = || AdamW::new(3e-4).weight_decay(0.1);
        match self {
            OptimizerKind::Sgd => Box::new(Sgd::new(0.01).momentum(0.9)),
            OptimizerKind::Adam => Box::new(Adam::new(1e-3)),
            OptimizerKind::AdamW => Box::new(adamw()),
            OptimizerKind::RmsProp => Box::new(RmsProp::new(1e-3)),
            OptimizerKind::Adagrad => Box::new(Adagrad::new(0.01)),
            OptimizerKind::Adadelta => Box::new(Adadelta::new(1.0)),
            OptimizerKind::Adamax => Box::new(Adamax::new(2e-3)),
            OptimizerKind::NAdam => Box::new(NAdam::new(2e-3)),
            OptimizerKind::RAdam => Box::new(RAdam::new(1e-3)),
            OptimizerKind::Lion => Box::new(Lion::new(1e-4).weight_decay(0.1)),
            OptimizerKind::Lamb => Box::new(Lamb::new(1e-3).weight_decay(0.01)),
            OptimizerKind::Adafactor => Box::new(Adafactor::new(0.01)),
            OptimizerKind::Muon => Box::new(Muon::new(0.02).using(|w| w.rank() != 2, adamw())),
        }
    }

    /// The optimizer of a name.
    ///
    /// # Errors
    /// For an unknown name, with the known ones.
    pub fn parse(name: &str) -> Result<OptimizerKind> {
        OptimizerKind::ALL
            .iter()
            .copied()
            .find(|one| one.name() == name)
            .ok_or_else(|| {
                let known: Vec<&str> = OptimizerKind::ALL.iter().map(|one| one.name()).collect();
                let near = slabwise_compiler::words::meant(name, known.iter().copied());
                Error::Value(format!(
                    "unknown optimizer {name:?}; there are {}{near}",
                    known.join(", ")
                ))
            })
    }
}

/// The name, and the sizes that differ from the defaults.
impl fmt::Display for Model {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.sizes().to_string())
    }
}

impl fmt::Display for OptimizerKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

macro_rules! text {
    ($($name:ident),*) => {$(
        impl FromStr for $name {
            type Err = Error;

            fn from_str(name: &str) -> Result<Self> {
                $name::parse(name)
            }
        }
    )*};
}
text!(Model, OptimizerKind);
