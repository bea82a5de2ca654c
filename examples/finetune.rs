//! Fine-tunes the last layer of a small BERT for sentences of two kinds; all other weights are
//! frozen, so that neither gradients nor optimizer states of them take memory.
//!
//! `cargo run --release --example finetune -- --weights FILE.safetensors`
#![forbid(unsafe_code)]

use std::path::PathBuf;

use clap::Parser;
use ndarray::{Array1, Array2};
use slabwise::nn::Linear;
use slabwise::optim::AdamW;
use slabwise::prelude::*;
use slabwise::weights::{Rules, Weights};
use slabwise_models::{Bert, noise};

#[derive(Parser)]
struct Args {
    /// Weights of an earlier session with this model; random unless given
    #[arg(long, value_name = "FILE")]
    weights: Option<PathBuf>,
    /// Training steps
    #[arg(long, default_value_t = 100)]
    steps: u32,
}

fn main() -> Result<()> {
    let args = Args::parse();
    let sizes = Bert {
        layers: 2,
        width: 64,
        heads: 4,
        inner: 128,
        length: 16,
        vocabulary: 100,
        ..Bert::BASE
    };
    let params = Params::seeded(0);
    let encoder = sizes.encoder(&(&params.root() / "bert"));
    let head = Linear::new(&params.root() / "classifier", sizes.width, 2);
    let mut session = Session::new(Device::Cpu, params)?;
    let trace = Trace::training();
    let tokens = trace.input("tokens", I32, (32, sizes.length));
    let labels = trace.input("labels", I32, (32,));
    let vectors = encoder.encode(tokens, None, None).tokens().mean_over(1);
    let loss = vectors.apply(&head).cross_entropy(labels);
    trace.freeze(|weight| weight.name.starts_with("bert."));
    trace.minimize(loss, AdamW::new(0.01));
    let step = session.compile(&trace, [loss])?;
    if let Some(weights) = &args.weights {
        session.load_from(&Weights::open(weights)?, &Rules::bert())?;
    }
    for at in 0..args.steps {
        // Sentences of the second kind have more of the late tokens.
        let mut draw = noise(at.into());
        let labels = Array1::from_shape_simple_fn(32, || (draw() * 2.0) as i32);
        let tokens = Array2::from_shape_fn((32, sizes.length), |(row, _)| {
            ((draw() * 70.0) as i32) + 30 * labels[row]
        });
        let loss = session.run(&step, (&tokens, &labels))?[0].item();
        if at % 20 == 0 || at + 1 == args.steps {
            println!("step {at}: loss {loss:.4}");
        }
    }
    Ok(())
}
