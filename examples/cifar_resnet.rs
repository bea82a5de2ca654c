//! A residual network of 20 layers (He et al. 2016) on CIFAR-10, or on MNIST without `--data`.
//!
//! `cargo run --release --example cifar_resnet -- --data cifar-10-batches-bin --epochs 30`
//!
//! Without `--data` it learns the MNIST digits that come with the project, padded to 32×32 and grey
//! in all three colours: above 99.2 % after three epochs.
#![forbid(unsafe_code)]

mod common;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;
use slabwise::data::{Cifar10, Mnist, Split, epoch_seed};
use slabwise::fit::Better;
use slabwise::optim::{Group, Schedule, Sgd};
use slabwise::prelude::*;
use slabwise_models::ResNet;

#[derive(Parser)]
struct Args {
    /// The folder of CIFAR-10's binary version; without it MNIST is learnt, padded to 32×32
    #[arg(long, value_name = "FOLDER")]
    data: Option<PathBuf>,
    /// Passes over the training images
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    epochs: u32,
    /// Images in a step
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    batch: u32,
    /// The largest learning rate
    #[arg(long, default_value_t = 0.1)]
    rate: f64,
    #[command(flatten)]
    images: common::Images,
    #[command(flatten)]
    run: common::Run,
}

fn main() -> ExitCode {
    common::exit(run(&Args::parse()))
}

fn run(args: &Args) -> Result<()> {
    let (train_images, test_images) = images(args)?;
    let batch = args.batch as usize;
    let steps = train_images.batches(batch).len() as u32;

    let params = Params::seeded(args.run.seed);
    let model = ResNet::resnet20().layers(&params.root());
    let mut session = args.run.session(params)?;

    let trace = Trace::training();
    let (images, labels) = inputs(&trace, &train_images, args.batch);
    let loss = images.apply(&model).cross_entropy(labels);
    let rate = Schedule::cosine(args.rate, args.epochs * steps + 1).warmup((steps / 2).max(1));
    // Norms and biases do not decay.
    let optimizer = Sgd::new(rate)
        .momentum(0.9)
        .nesterov()
        .weight_decay(5e-4)
        .group(|w| w.rank() < 2, Group::new().weight_decay(0.0));
    trace.minimize(loss, optimizer);
    let train = session.compile(&trace, [loss])?;

    let trace = Trace::inference();
    let (images, labels) = inputs(&trace, &test_images, args.batch);
    let right = images
        .apply(&model)
        .argmax(1)
        .equal(labels)
        .cast(F32)
        .mean();
    let judge = session.compile(&trace, [right])?;

    let done = args.run.start_epochs(&mut session, &train, steps)?;
    slabwise::Fit::new(&train)
        .from_epoch(done + 1)
        .epochs(args.epochs)
        .validate(&judge, Better::Higher, || test_images.batches(batch).prefetch(4))
        .on_epoch(|session, epoch| {
            let right = epoch.validation.unwrap_or(f64::NAN) * 100.0;
            let (number, loss, tested) = (epoch.number, epoch.loss, test_images.len());
            println!("epoch {number}: mean loss {loss:.4}, {right:.2} % of {tested} test images right, {:.1} s", epoch.seconds);
            args.run.checkpoint(session)
        })
        .run(&mut session, |epoch| train_images.shuffled(batch, epoch_seed(args.run.seed, epoch.into())).prefetch(4))?;
    Ok(())
}

/// Training images and test images.
fn images(args: &Args) -> Result<(Split, Split)> {
    let (train, test) = match &args.data {
        Some(folder) => {
            let cifar = Cifar10::load(folder)?;
            println!("CIFAR-10 of {}", folder.display());
            (cifar.train, cifar.test)
        }
        None => {
            println!(
                "no --data with CIFAR-10: MNIST instead, padded to 32×32 and grey in all three colours"
            );
            let mnist = Mnist::load(Mnist::default_dir())?;
            (mnist.train, mnist.test)
        }
    };
    Ok(args.images.of(train, test))
}

/// Images `[batch, 3, 32, 32]` and labels. Grey and smaller ones are padded with black and repeated
/// for each colour.
fn inputs<'t>(trace: &'t Trace, split: &Split, batch: u32) -> (Tensor<'t>, Tensor<'t>) {
    let (batch, [height, width]) = (Dim::bounded("batch", batch), split.image_shape());
    let images = trace.input("images", F32, (batch, split.channels(), height, width));
    let around = |n: usize| {
        (
            32usize.saturating_sub(n) / 2,
            32usize.saturating_sub(n).div_ceil(2),
        )
    };
    let images = if split.channels() == 1 {
        images
            .pad([(0, 0), (0, 0), around(height), around(width)], 0.0)
            .expand((batch, 3, 32, 32))
    } else {
        images
    };
    (images, trace.input("labels", I32, (batch,)))
}
