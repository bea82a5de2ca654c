//! The command line: what a model needs, what the plan saves, how fast a step is.
//!
//! Exit codes: 0 on success, 1 when what was asked for cannot be done (the reason goes to stderr), 2 on wrong usage or
//! an input file that makes no sense.
#![forbid(unsafe_code)]

mod arguments;
mod bench;
mod compare;
mod diff;
mod frontier;
mod graph_file;
mod info;
mod order;
mod output;
mod pack;
mod plan;
mod remat;
mod replay;

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use slabwise::Error;

#[derive(Parser)]
#[command(version, about = "A tensor runtime that knows every byte of a step before it runs")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Plan the training step of a built-in model and show what it needs; nothing is run but for --html
    Plan(plan::Args),
    /// Measure peak memory and time of planned against dynamic allocation
    Compare(compare::Args),
    /// Time a training step, a matrix product, an elementwise chain, or each stage of compiling models
    Bench(bench::Args),
    /// Give offsets to buffers with known lifetimes, so that as few bytes as possible are needed
    Pack(pack::Args),
    /// Order the operations of a graph so that as few bytes as possible live at once
    Order(order::Args),
    /// Find the cheapest schedule of a graph file within a memory budget, by computing buffers again or sending them to the host
    Remat(remat::Args),
    /// Replay a trace of allocations through a pool's policies
    Replay(replay::Args),
    /// Compare two plans that `slabwise plan --json` has written: what made the second one grow
    Diff(diff::Args),
    /// Show versions, instruction sets, threads and the settings read
    Info,
}

fn main() -> ExitCode {
    let success = |()| ExitCode::SUCCESS;
    let done = match Cli::parse().command {
        Command::Plan(args) => plan::run(&args).map(success),
        Command::Compare(args) => compare::run(&args).map(success),
        Command::Bench(args) => bench::run(&args).map(success),
        Command::Pack(args) => pack::run(&args),
        Command::Order(args) => order::run(&args),
        Command::Remat(args) => remat::run(&args),
        Command::Replay(args) => replay::run(&args),
        Command::Diff(args) => diff::run(&args),
        Command::Info => info::run().map(success),
    };
    match done {
        Ok(code) => code,
        Err(Error::Io { source, .. }) if source.kind() == std::io::ErrorKind::BrokenPipe => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}
