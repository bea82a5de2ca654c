//! A perceptron with two hidden layers on MNIST: describe, trace, compile, train.
//!
//! `cargo run --release --example mnist_mlp`
#![forbid(unsafe_code)]

mod common;

use std::process::ExitCode;

use clap::Parser;
use slabwise::data::epoch_seed;
use slabwise::nn::Linear;
use slabwise::optim::{Adam, Schedule};
use slabwise::prelude::*;

struct Mlp {
    hidden1: Linear,
    hidden2: Linear,
    head: Linear,
}

impl Mlp {
    fn new(at: &Scope) -> Self {
        Mlp {
            hidden1: Linear::new(at / "hidden1", 784, 512),
            hidden2: Linear::new(at / "hidden2", 512, 256),
            head: Linear::new(at / "head", 256, 10),
        }
    }
}

impl Module for Mlp {
    /// `[batch, 784] → [batch, 10]`
    fn forward<'t>(&self, images: Tensor<'t>) -> Tensor<'t> {
        images
            .apply(&self.hidden1)
            .relu()
            .apply(&self.hidden2)
            .relu()
            .apply(&self.head)
    }
}

fn main() -> ExitCode {
    common::exit(train(&common::Args::parse()))
}

fn train(args: &common::Args) -> Result<()> {
    let mnist = args.mnist()?;
    let epochs = args.epochs(5);
    let steps = mnist.train.batches(args.batch as usize).len() as u32;

    // Describe: parameters are declared by name, nothing is allocated.
    let params = Params::seeded(args.run.seed);
    let model = Mlp::new(&params.root());
    let mut session = args.run.session(params)?;

    // Trace: the model runs once on symbols; only the bound of the batch is known.
    let batch = Dim::bounded("batch", args.batch);
    let inputs = |trace| {
        (
            Trace::input(trace, "images", F32, (batch, 784)),
            Trace::input(trace, "labels", I32, (batch,)),
        )
    };

    let trace = Trace::training();
    let (images, labels) = inputs(&trace);
    let loss = model.forward(images).cross_entropy(labels);
    trace.minimize(loss, Adam::new(Schedule::cosine(1e-3, epochs * steps)));
    // Compile: gradients, fusion, order of the kernels, one slab.
    let train = session.compile(&trace, [loss])?;

    let trace = Trace::inference();
    let (images, labels) = inputs(&trace);
    let correct = model
        .forward(images)
        .argmax(1)
        .equal(labels)
        .cast(F32)
        .sum();
    let eval = session.compile(&trace, [correct])?; // same weights, same slab

    // Train: a step allocates nothing, and the last, smaller batch of an epoch needs no new plan.
    for number in args.start(&mut session, &train, epochs, steps)? {
        let mut epoch = common::Epoch::new(number);
        let seed = epoch_seed(args.run.seed, number.into());
        for (images, labels) in mnist
            .train
            .shuffled(args.batch as usize, seed)
            .flat()
            .prefetch(4)
        {
            let [loss] = session.run(&train, (&images, &labels))?;
            epoch.step(labels.len(), loss.item());
        }
        let mut correct = 0.0;
        for (images, labels) in mnist.test.batches(args.batch as usize).flat().prefetch(4) {
            let [right] = session.run(&eval, (&images, &labels))?;
            correct += right.item();
        }
        epoch.end(correct, mnist.test.len());
        args.run.checkpoint(&session)?;
    }
    Ok(())
}
