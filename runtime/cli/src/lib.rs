//! The command line: memory needs of a model, savings of the plan, time of a step.
//!
//! Exit codes: 0 on success, 1 when the request cannot be fulfilled (the reason goes to stderr), 2
//! on wrong usage: an invalid argument or environment variable, an input file that cannot be read
//! or is damaged.
#![forbid(unsafe_code)]

mod arguments;
mod bench;
mod compare;
mod diff;
mod frontier;
mod graph_file;
mod info;
mod largest_batch;
mod launch;
mod onnx;
mod order;
mod output;
mod pack;
mod plan;
pub mod plan_diff;
mod remat;
mod replay;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use slabwise::{Error, settings};

#[derive(Parser)]
#[command(name = "slabwise", version, about = "A tensor runtime that knows every byte of a step before it runs", after_help = EXIT_CODES)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

const EXIT_CODES: &str = "An output named - goes to stdout, and the report to stderr then.\n\n\
    Exit codes: 0 done; 1 the request cannot be fulfilled; 2 an argument or an environment variable is invalid, \
    or an input file cannot be read or is damaged.";

#[derive(Subcommand)]
enum Command {
    /// Plan the training step of a built-in model, or an ONNX model, and show its memory needs; runs
    /// nothing except for --html and the exports of a run
    Plan(plan::Args),
    /// Run an ONNX model once, or compare it with recorded results
    Run(onnx::Args),
    /// Measure peak memory and time of planned against dynamic allocation
    Compare(compare::Args),
    /// Time a training step, a matrix product, an elementwise chain, or each stage of compiling
    /// models
    Bench(bench::Args),
    /// Assign offsets to buffers with known lifetimes, so that as few bytes as possible are needed
    Pack(pack::Args),
    /// Order the operations of a graph so that as few bytes as possible live at once
    Order(order::Args),
    /// Find the cheapest schedule of a graph file within a memory budget, by recomputing buffers or
    /// sending them to the host
    Remat(remat::Args),
    /// Replay a trace of allocations through a pool's policies
    Replay(replay::Args),
    /// Compare two plans that `slabwise plan --json` has written, and show why the second one is
    /// larger
    Diff(diff::Args),
    /// Run a program on several ranks that MPI connects; its output is forwarded with the rank of
    /// each line
    Launch(launch::Args),
    /// Run one rank's program under a guard, for `launch`
    #[command(hide = true)]
    Guard(launch::GuardArgs),
    /// Show versions, instruction sets, threads and the settings read
    Info,
}

impl Command {
    /// The requested output files.
    fn outputs(&self) -> Vec<&Path> {
        let all: &[&Option<PathBuf>] = match self {
            Command::Plan(args) => &args.outputs(),
            Command::Pack(args) => &[&args.svg, &args.output],
            Command::Order(args) => &[&args.output],
            Command::Remat(args) => &[&args.output],
            Command::Replay(args) => &[&args.snapshot, &args.perfetto],
            Command::Run(_)
            | Command::Compare(_)
            | Command::Bench(_)
            | Command::Diff(_)
            | Command::Launch(_)
            | Command::Guard(_)
            | Command::Info => &[],
        };
        all.iter().filter_map(|path| path.as_deref()).collect()
    }

    /// The invalid ones among the environment variables that it reads.
    fn mistakes(&self) -> Vec<Error> {
        match self {
            Command::Plan(_) | Command::Run(_) | Command::Compare(_) | Command::Bench(_) => {
                settings::mistakes()
            }
            // A trace is replayed under the requested policy, which reads the other variables it
            // needs; the other commands read none.
            _ => Vec::new(),
        }
    }
}

/// Parses the arguments of the process and runs their command.
pub fn main() -> ExitCode {
    let success = |()| ExitCode::SUCCESS;
    let command = match Cli::try_parse() {
        Ok(Cli { command }) => command,
        Err(told) => return output::told(told),
    };
    let mistakes = command.mistakes();
    mistakes.iter().for_each(output::complain);
    if !mistakes.is_empty() {
        return output::WRONG_USAGE.into();
    }
    if let Err(reason) = output::to_stdout(&command.outputs()) {
        output::complain(reason);
        return output::WRONG_USAGE.into();
    }
    let done = match command {
        Command::Plan(args) => plan::run(&args),
        Command::Run(args) => onnx::run(&args),
        Command::Compare(args) => compare::run(&args).map(success),
        Command::Bench(args) => bench::run(&args).map(success),
        Command::Pack(args) => pack::run(&args),
        Command::Order(args) => order::run(&args),
        Command::Remat(args) => remat::run(&args),
        Command::Replay(args) => replay::run(&args),
        Command::Diff(args) => diff::run(&args),
        // Their exit code is that of the ranks, and their errors are not those of a program.
        Command::Launch(args) => return launch::run(&args),
        Command::Guard(args) => return launch::guard(&args),
        Command::Info => info::run().map(success),
    };
    match done {
        Ok(code) => code,
        // The reader of the text has seen enough. That of a file has not.
        Err(Error::Io { path, source })
            if output::is_standard(&path) && source.kind() == std::io::ErrorKind::BrokenPipe =>
        {
            ExitCode::SUCCESS
        }
        Err(error) => {
            output::complain(error);
            ExitCode::FAILURE
        }
    }
}
