//! Small networks to train, and the results of training.

use ndarray::{Array1, Array2, Axis, Slice};
use slabwise::feed::Feed;
use slabwise::nn::Linear;
use slabwise::optim::Adam;
use slabwise::prelude::*;
use slabwise::{CompileOptions, Tuning};

/// A tenth of the usual search effort, and no timed products, so that compared programs round
/// alike.
pub fn quick() -> CompileOptions {
    let mut options = CompileOptions {
        tuning: Tuning::Off,
        ..CompileOptions::default()
    };
    options.planner.effort /= 10;
    options
}

/// The results of training a network.
pub struct Trained {
    pub losses: Vec<u32>,
    pub weights: Vec<(String, Vec<u32>)>,
    pub session: Session,
    pub program: Program<1>,
}

impl Trained {
    /// Runs a program once for each of the inputs.
    pub fn of(
        mut session: Session,
        program: Program<1>,
        feeds: impl IntoIterator<Item = impl Feed>,
    ) -> Trained {
        let step = |feed| {
            session.run(&program, feed).expect("a step")[0]
                .item()
                .to_bits()
        };
        Trained {
            losses: feeds.into_iter().map(step).collect(),
            weights: session
                .names()
                .map(str::to_string)
                .zip(weights(&session))
                .collect(),
            session,
            program,
        }
    }

    /// Checks that two programs computed the same bits.
    pub fn assert_same(&self, other: &Trained, what: &str) {
        assert_eq!(self.losses, other.losses, "{what}: losses");
        for ((name, a), (_, b)) in self.weights.iter().zip(&other.weights) {
            assert!(a == b, "{what}: {name} differs\n{}", self.program.plan());
        }
    }
}

pub const WIDTH: usize = 64;

/// The function behind a layer: tanh, or as a number selects it an activation, a residual, dropout.
pub fn behind<'t>(
    seed: Option<usize>,
    layer: usize,
    before: Tensor<'t>,
    x: Tensor<'t>,
) -> Tensor<'t> {
    match seed.map(|seed| (seed * 31 + layer * layer * 7) % 5) {
        None | Some(0) => x.tanh(),
        Some(1) => x.relu() + before,
        Some(2) => x.sigmoid().dropout(0.4),
        Some(3) => (x * before.tanh()).dropout(0.2) * 0.1,
        Some(_) => x.silu() * 0.5 + before,
    }
}

/// Trains a chain of dense layers within a budget.
pub fn train(budget: impl Into<Budget>, sizes: [usize; 3], seed: Option<usize>) -> Result<Trained> {
    train_with(|session| session.with_budget(budget), sizes, seed)
}

/// Trains a chain of dense layers in a session prepared by `open`.
pub fn train_with(
    open: impl FnOnce(Session) -> Session,
    sizes: [usize; 3],
    seed: Option<usize>,
) -> Result<Trained> {
    train_on(Device::Cpu, open, sizes, seed)
}

/// The same on a device.
pub fn train_on(
    device: Device,
    open: impl FnOnce(Session) -> Session,
    [batch, layers, steps]: [usize; 3],
    seed: Option<usize>,
) -> Result<Trained> {
    let params = Params::seeded(5);
    let layers = dense(&params, layers);
    learn_on(device, open, params, [batch, steps], |trace, x, labels| {
        let logits = layers
            .iter()
            .enumerate()
            .fold(x, |x, (i, layer)| behind(seed, i, x, x.apply(layer)));
        let loss = logits.cross_entropy(labels);
        trace.minimize(loss, Adam::new(1e-2));
        loss
    })
}

/// Trains with the loss that `model` makes of the inputs and labels of a trace.
pub fn learn(
    open: impl FnOnce(Session) -> Session,
    params: Params,
    sizes: [usize; 2],
    model: impl for<'t> Fn(&'t Trace, Tensor<'t>, Tensor<'t>) -> Tensor<'t>,
) -> Result<Trained> {
    learn_on(Device::Cpu, open, params, sizes, model)
}

fn learn_on(
    device: Device,
    open: impl FnOnce(Session) -> Session,
    params: Params,
    [batch, steps]: [usize; 2],
    model: impl for<'t> Fn(&'t Trace, Tensor<'t>, Tensor<'t>) -> Tensor<'t>,
) -> Result<Trained> {
    let mut session = open(
        Session::new(device, params)?
            .with_threads(2)
            .with_options(quick()),
    );
    let trace = Trace::training();
    let (x, labels) = (
        trace.input("x", F32, (batch, WIDTH)),
        trace.input("labels", I32, (batch,)),
    );
    let loss = model(&trace, x, labels);
    let program = session.compile(&trace, [loss])?;
    let (x, labels) = examples(batch);
    let feeds = (0..steps).map(|_| (&x, &labels));
    Ok(Trained::of(session, program, feeds))
}

/// The data that these networks are trained on.
pub fn examples(batch: usize) -> (Array2<f32>, Array1<i32>) {
    let x = Array2::from_shape_fn((batch, WIDTH), |(i, j)| {
        ((i * 37 + j * 11) % 23) as f32 / 23.0
    });
    (x, Array1::from_shape_fn(batch, |i| (i % WIDTH) as i32))
}

/// Inputs and labels.
pub type Batch = (Array2<f32>, Array1<i32>);

/// A program that trains dense layers on batches of at most this length.
pub fn trained_in_batches(
    session: &mut Session,
    layers: &[Linear],
    most: usize,
) -> Result<Program<1>> {
    let trace = Trace::training();
    let batch = Dim::bounded("batch", most as u32);
    let (x, labels) = (
        trace.input("x", F32, (batch, WIDTH)),
        trace.input("labels", I32, (batch,)),
    );
    let loss = layers
        .iter()
        .fold(x, |x, layer| x.apply(layer).tanh())
        .cross_entropy(labels);
    trace.minimize(loss, Adam::new(1e-2));
    session.compile(&trace, [loss])
}

/// A number of dense layers.
pub fn dense(params: &Params, count: usize) -> Vec<Linear> {
    (0..count)
        .map(|i| Linear::new(&params.root() / format!("l{i}").as_str(), WIDTH, WIDTH))
        .collect()
}

/// Batches of these lengths, each at most `most`, no two alike.
pub fn batches(most: usize, lengths: &[usize]) -> Vec<Batch> {
    let (x, labels) = examples(most);
    let part = |(step, &length): (usize, &usize)| {
        let rows = Slice::from(most - length..);
        (
            x.slice_axis(Axis(0), rows).map(|v| v + step as f32 / 8.0),
            labels.slice_axis(Axis(0), rows).to_owned(),
        )
    };
    lengths.iter().enumerate().map(part).collect()
}

/// The bits of all weights.
pub fn weights(session: &Session) -> Vec<Vec<u32>> {
    session
        .names()
        .map(|name| {
            session
                .value(name)
                .expect("a weight")
                .iter()
                .map(|v| v.to_bits())
                .collect()
        })
        .collect()
}
