//! Built-in models: what the command line plans and measures, under names that other frameworks' benchmarks share.

use std::fmt;
use std::str::FromStr;

use ndarray::{Array1, ArrayD, IxDyn};
use slabwise_kernels::dtype::DType::{F32, I32};

use crate::data::epoch_seed;
use crate::error::{Error, Result};
use crate::nn::{Conv2d, Flatten, Linear, MaxPool2d, Relu, Sequential};
use crate::optim::{Adam, AdamW, Sgd};
use crate::params::{Params, Scope};
use crate::program::Program;
use crate::session::Session;
use crate::shape::{Dim, Shape};
use crate::tensor::Tensor;
use crate::trace::Trace;

/// A built-in model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Model {
    /// 784-512-256-10 with relu between: 535,818 weights. Usually trained by SGD.
    Mlp,
    /// Two 5×5 convolutions (32 and 64 channels), each with relu and 2×2 max pooling, then 3136-512-10: 1,663,370 weights.
    /// Usually trained by Adam.
    Cnn,
}

impl Model {
    /// All of them.
    pub const ALL: &[Model] = &[Model::Mlp, Model::Cnn];

    /// The name that [`Model::parse`] reads.
    pub fn name(self) -> &'static str {
        match self {
            Model::Mlp => "mlp",
            Model::Cnn => "cnn",
        }
    }

    /// The model of a name.
    ///
    /// # Errors
    /// For an unknown name, with those that are known.
    pub fn parse(name: &str) -> Result<Model> {
        named("model", Model::ALL, Model::name, name)
    }

    /// The shape of one example.
    pub fn example(self) -> &'static [usize] {
        match self {
            Model::Mlp => &[784],
            Model::Cnn => &[1, 28, 28],
        }
    }

    /// How many classes it tells apart.
    pub fn classes(self) -> usize {
        10
    }

    /// The optimizer it is measured with unless another is asked for.
    pub fn optimizer(self) -> OptimizerKind {
        match self {
            Model::Mlp => OptimizerKind::Sgd,
            Model::Cnn => OptimizerKind::Adam,
        }
    }

    /// Declares the weights.
    pub fn build(self, params: &Params) -> Network {
        let at = params.root();
        let layers = match self {
            Model::Mlp => mlp(&at),
            Model::Cnn => cnn(&at),
        };
        Network { model: self, layers }
    }

    /// A batch of made-up examples and labels, the same for the same seed. Examples are uniform in 0..1.
    pub fn batch(self, batch: usize, seed: u64) -> (ArrayD<f32>, Array1<i32>) {
        let lengths: Vec<usize> = [batch].iter().chain(self.example()).copied().collect();
        let mut draw = noise(seed);
        let images = ArrayD::from_shape_simple_fn(IxDyn(&lengths), &mut draw);
        let classes = self.classes() as f32;
        (images, Array1::from_shape_simple_fn(batch, || (draw() * classes) as i32))
    }
}

fn mlp(at: &Scope) -> Sequential {
    Sequential::new()
        .then(Linear::new(at / "hidden1", 784, 512))
        .then(Relu)
        .then(Linear::new(at / "hidden2", 512, 256))
        .then(Relu)
        .then(Linear::new(at / "head", 256, 10))
}

fn cnn(at: &Scope) -> Sequential {
    Sequential::new()
        .then(Conv2d::new(at / "stem", 1, 32, 5).padding(2))
        .then(Relu)
        .then(MaxPool2d(2))
        .then(Conv2d::new(at / "body", 32, 64, 5).padding(2))
        .then(Relu)
        .then(MaxPool2d(2))
        .then(Flatten(1))
        .then(Linear::new(at / "hidden", 64 * 7 * 7, 512))
        .then(Relu)
        .then(Linear::new(at / "head", 512, 10))
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
    layers: Sequential,
}

impl Network {
    /// Which model this is.
    pub fn model(&self) -> Model {
        self.model
    }

    /// Compiles a training step "train": examples f32 and labels i32 `[batch]` in, the mean cross-entropy out.
    ///
    /// # Errors
    /// What [`Session::compile`] refuses.
    pub fn training(&self, session: &mut Session, batch: impl Into<Dim>, optimizer: OptimizerKind) -> Result<Program<1>> {
        let batch = batch.into();
        let trace = Trace::training();
        let images = self.images(&trace, batch);
        let labels = trace.input("labels", I32, (batch,));
        let loss = images.apply(&self.layers).cross_entropy(labels);
        optimizer.minimize(&trace, loss);
        session.compile(&trace, [loss])
    }

    /// Compiles the inference "infer": examples f32 in, logits `[batch, classes]` out.
    ///
    /// # Errors
    /// What [`Session::compile`] refuses.
    pub fn inference(&self, session: &mut Session, batch: impl Into<Dim>) -> Result<Program<1>> {
        let trace = Trace::inference();
        let logits = self.images(&trace, batch.into()).apply(&self.layers);
        session.compile(&trace, [logits])
    }

    fn images<'t>(&self, trace: &'t Trace, batch: Dim) -> Tensor<'t> {
        let dims: Vec<Dim> = [batch].into_iter().chain(self.model.example().iter().map(|&n| n.into())).collect();
        trace.input("images", F32, Shape::from(dims.as_slice()))
    }
}

/// The optimizers that built-in models are measured with, at fixed rates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OptimizerKind {
    /// Rate 0.01, momentum 0.9.
    Sgd,
    /// Rate 0.001.
    Adam,
    /// Rate 0.001, weight decay 0.01.
    AdamW,
}

impl OptimizerKind {
    /// All of them.
    pub const ALL: &[OptimizerKind] = &[OptimizerKind::Sgd, OptimizerKind::Adam, OptimizerKind::AdamW];

    /// The name that [`OptimizerKind::parse`] reads.
    pub fn name(self) -> &'static str {
        match self {
            OptimizerKind::Sgd => "sgd",
            OptimizerKind::Adam => "adam",
            OptimizerKind::AdamW => "adamw",
        }
    }

    /// The optimizer of a name.
    ///
    /// # Errors
    /// For an unknown name, with those that are known.
    pub fn parse(name: &str) -> Result<OptimizerKind> {
        named("optimizer", OptimizerKind::ALL, OptimizerKind::name, name)
    }

    fn minimize<'t>(self, trace: &'t Trace, loss: Tensor<'t>) {
        match self {
            OptimizerKind::Sgd => trace.minimize(loss, Sgd::new(0.01).momentum(0.9)),
            OptimizerKind::Adam => trace.minimize(loss, Adam::new(1e-3)),
            OptimizerKind::AdamW => trace.minimize(loss, AdamW::new(1e-3)),
        }
    }
}

fn named<T: Copy>(what: &str, all: &[T], name_of: fn(T) -> &'static str, name: &str) -> Result<T> {
    all.iter().copied().find(|&one| name_of(one) == name).ok_or_else(|| {
        let known: Vec<&str> = all.iter().map(|&one| name_of(one)).collect();
        Error::Value(format!("unknown {what} \"{name}\"; there are {}", known.join(", ")))
    })
}

macro_rules! text {
    ($($name:ident),*) => {$(
        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.pad(self.name())
            }
        }

        impl FromStr for $name {
            type Err = Error;

            fn from_str(name: &str) -> Result<Self> {
                $name::parse(name)
            }
        }
    )*};
}
text!(Model, OptimizerKind);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn models_have_as_many_weights_as_their_descriptions_say() {
        for (model, weights) in [(Model::Mlp, 535_818), (Model::Cnn, 1_663_370)] {
            let params = Params::seeded(0);
            model.build(&params);
            let counted: usize = params.declared().iter().map(|p| p.dims().iter().product::<usize>()).sum();
            assert_eq!(counted, weights, "{model}");
        }
    }

    #[test]
    fn names_are_read_and_unknown_ones_are_told_from_known_ones() {
        assert!(Model::ALL.iter().all(|&m| Model::parse(m.name()).is_ok_and(|read| read == m)));
        assert!(OptimizerKind::ALL.iter().all(|&o| OptimizerKind::parse(o.name()).is_ok_and(|read| read == o)));
        let text = Model::parse("resnet99").unwrap_err().to_string();
        assert_eq!(text, "unknown model \"resnet99\"; there are mlp, cnn");
    }

    #[test]
    fn made_up_batches_fit_and_repeat() {
        let (images, labels) = Model::Cnn.batch(7, 3);
        assert_eq!((images.shape(), labels.len()), (&[7, 1, 28, 28][..], 7));
        assert!(images.iter().all(|x| (0.0..1.0).contains(x)) && labels.iter().all(|l| (0..10).contains(l)));
        assert_eq!((images, labels), Model::Cnn.batch(7, 3));
        assert_ne!(Model::Cnn.batch(7, 3), Model::Cnn.batch(7, 4));
    }
}
