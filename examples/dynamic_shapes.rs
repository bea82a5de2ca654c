//! Batches of unbounded length, and a loss over the elements that a mask selects: planned for
//! ranges of lengths, in bounded memory, and planned once for each range.
//!
//! `cargo run --release --example dynamic_shapes`
#![forbid(unsafe_code)]

mod common;
#[path = "dynamic_shapes/model.rs"]
mod model;

use std::process::ExitCode;

use clap::Parser;
use model::{Batch, Detector, length};
use slabwise::optim::Adam;
use slabwise::prelude::*;
use slabwise::{CompileOptions, DynamicShapes, LengthRanges, RunStats};

#[derive(Parser)]
struct Args {
    /// Training steps, each on a batch of another length
    #[arg(long, default_value_t = 1000, value_parser = clap::value_parser!(u32).range(1..=10_000_000))]
    steps: u32,
    /// The longest sequence
    #[arg(long, default_value_t = 512, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    longest: u32,
    /// The width of a place's vector
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=4096))]
    width: u32,
    /// A plan for each length, rather than for ranges that grow by 25 %
    #[arg(long)]
    exact: bool,
    #[command(flatten)]
    run: common::Run,
}

/// Steps between two reports.
const LOOK: u32 = 100;

fn main() -> ExitCode {
    common::exit(run(&Args::parse()))
}

fn run(args: &Args) -> Result<()> {
    let params = Params::seeded(args.run.seed);
    let detector = Detector::new(&params.root(), args.width as usize);
    let ranges = if args.exact {
        LengthRanges::Exact
    } else {
        DynamicShapes::default().ranges
    };
    let shapes = DynamicShapes {
        ranges,
        ..DynamicShapes::default()
    };
    let mut session = args.run.session(params)?.with_options(CompileOptions {
        shapes,
        ..CompileOptions::default()
    });
    let trace = Trace::training();
    let loss = detector.selected(&trace, Dim::unbounded("len"));
    trace.minimize(loss, Adam::new(3e-3));
    let train = session.compile(&trace, [loss])?;
    let done = args.run.start(&mut session, &train)?;
    let (mut sum, mut steps, mut most) = (0.0, 0, RunStats::default());
    for step in done..args.steps {
        let batch = Batch::new(
            args.run.seed ^ u64::from(step),
            length(u64::from(step), args.longest as usize),
        );
        let [loss] = session.run(&train, (&batch.x, &batch.kind, &batch.is_known))?;
        (sum, steps) = (sum + f64::from(loss.item()), steps + 1);
        let now = session.last_run();
        (most.lent_bytes, most.pool_bytes) = (
            most.lent_bytes.max(now.lent_bytes),
            most.pool_bytes.max(now.pool_bytes),
        );
        if steps == LOOK || step + 1 == args.steps {
            let plans = train.plan_counts();
            println!(
                "step {}: mean loss {:.4} · {} plans made, {} runs found one · slab {} · lent {} · pool {}",
                step + 1,
                sum / f64::from(steps),
                plans.made,
                plans.hits,
                Bytes(session.slab_bytes()),
                Bytes(most.lent_bytes),
                Bytes(most.pool_bytes),
            );
            (sum, steps) = (0.0, 0);
            args.run.checkpoint(&session)?;
        }
    }
    Ok(())
}
