//! A small convolutional network on MNIST, above 99 % after three epochs.
//!
//! `cargo run --release --example mnist_cnn -- --save mnist_cnn.safetensors --plan-svg
//! mnist_cnn.plan.svg`; on two ranks `slabwise launch -n 2 -- target/release/examples/mnist_cnn`
#![forbid(unsafe_code)]

mod common;

use std::process::ExitCode;

use clap::Parser;
use slabwise::data::epoch_seed;
use slabwise::nn::{Conv2d, Linear};
use slabwise::optim::{Adam, Schedule};
use slabwise::prelude::*;

struct Cnn {
    stem: Conv2d,
    body: Conv2d,
    hidden: Linear,
    head: Linear,
}

impl Cnn {
    fn new(at: &Scope) -> Self {
        Cnn {
            stem: Conv2d::new(at / "stem", 1, 32, 5).padding(2),
            body: Conv2d::new(at / "body", 32, 64, 5).padding(2),
            hidden: Linear::new(at / "hidden", 64 * 7 * 7, 512),
            head: Linear::new(at / "head", 512, 10),
        }
    }
}

impl Module for Cnn {
    /// `[batch, 1, 28, 28] → [batch, 10]`
    fn forward<'t>(&self, images: Tensor<'t>) -> Tensor<'t> {
        let stem = images.apply(&self.stem).relu().max_pool2d(2); // [batch, 32, 14, 14]
        let body = stem.apply(&self.body).relu().max_pool2d(2); // [batch, 64, 7, 7]
        body.flatten(1).apply(&self.hidden).relu().apply(&self.head)
    }
}

fn main() -> ExitCode {
    common::exit(train(&common::Args::parse()))
}

fn train(args: &common::Args) -> Result<()> {
    let mnist = args.mnist()?;
    let epochs = args.epochs(3);
    let steps = mnist.train.batches(args.batch as usize).len() as u32;

    let params = Params::seeded(args.run.seed);
    let model = Cnn::new(&params.root());
    let mut session = args.run.session(params)?;
    let world = session.world().clone();
    let own = args.batch.div_ceil(world.ranks() as u32);

    let trace = Trace::training();
    let (images, labels) = inputs(&trace, own);
    let loss = model.forward(images).cross_entropy(labels);
    trace.minimize(loss, Adam::new(Schedule::cosine(1e-3, epochs * steps)));
    // Of the whole batch, where several ranks have a part of it each.
    let train = session.compile(&trace, [loss.mean_over_ranks()])?;

    let trace = Trace::inference();
    let (images, labels) = inputs(&trace, own);
    let correct = model
        .forward(images)
        .argmax(1)
        .equal(labels)
        .cast(F32)
        .sum();
    let eval = session.compile(&trace, [correct.sum_over_ranks()])?; // same weights, same slab

    for number in args.start(&mut session, &train, epochs, steps)? {
        let mut epoch = common::Epoch::new(number);
        for (images, labels) in mnist
            .train
            .shuffled(
                args.batch as usize,
                epoch_seed(args.run.seed, number.into()),
            )
            .share(&world)
            .prefetch(4)
        {
            let [loss] = session.run(&train, (&images, &labels))?;
            epoch.step(labels.len() * world.ranks(), loss.item());
        }
        args.run.checkpoint(&session)?;
        let mut correct = 0.0;
        let batches = mnist.test.batches(args.batch as usize);
        for (images, labels) in batches.share(&world).prefetch(4) {
            let [right] = session.run(&eval, (&images, &labels))?;
            correct += right.item();
        }
        if world.rank() == 0 {
            epoch.end(correct, mnist.test.len());
        }
    }
    Ok(())
}

/// Only the bound of the batch is known. The last, smaller batch of an epoch runs with the same
/// plan.
fn inputs(trace: &Trace, batch: u32) -> (Tensor<'_>, Tensor<'_>) {
    let batch = Dim::bounded("batch", batch);
    (
        trace.input("images", F32, (batch, 1, 28, 28)),
        trace.input("labels", I32, (batch,)),
    )
}
