//! Everything that is to be measured and checked on a GPU, as one command.
//!
//! `slabwise-gpu` goes through a list of items: training steps, products, convolutions, bandwidths,
//! the tests of kernels and sessions, and the same steps of PyTorch and JAX. Each is a process of
//! its own with a limit of time, so that a crash, a hang or a peak of memory concerns one item
//! alone; each result is a line of JSON that is written at once. Neither cargo nor a compiler nor a
//! network is needed where it runs: `.ci/pack-gpu` makes an archive of it.
#![forbid(unsafe_code)]

mod child;
mod items;
mod measure;
mod results;
mod sequence;
mod table;

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;

/// The exit code of wrong usage.
const WRONG_USAGE: u8 = 2;

/// Measures and checks slabwise on a GPU, item by item, beside PyTorch and JAX.
#[derive(Parser)]
#[command(
    version,
    after_help = "A measurement alone is `slabwise-gpu measure WORDS`, with the words that --list shows."
)]
struct Args {
    /// Show the items and how each is run, and run none
    #[arg(long)]
    list: bool,
    /// Only items whose name contains this; several are alternatives, and * stands for anything
    #[arg(long, value_name = "PATTERN")]
    only: Vec<String>,
    /// Seconds for all of it; what does not fit is left for another run with --resume
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..))]
    budget: Option<u64>,
    /// Leave out the items that are ok in this file of results, which may be the one that is
    /// written
    #[arg(long, value_name = "FILE")]
    resume: Option<PathBuf>,
    /// Where a line is appended for each result
    #[arg(long, value_name = "FILE", default_value = "slabwise-gpu.jsonl")]
    results: PathBuf,
    /// The folder of test binaries; `tests` beside this program unless given
    #[arg(long, value_name = "DIR")]
    tests: Option<PathBuf>,
    /// Tests that run at once; what is timed always runs alone
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=64))]
    jobs: u32,
    /// A run or two of each item, at a small batch: to see that all of them work, and not how fast
    #[arg(long)]
    quick: bool,
    /// The most seconds of one item, whatever its own limit is
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..))]
    limit: Option<u64>,
}

fn main() -> ExitCode {
    let mut words = std::env::args().skip(1);
    if words.next().as_deref() == Some("measure") {
        return measure::child(&words.collect::<Vec<_>>());
    }
    let args = Args::parse();
    match run(&args) {
        Ok(done) => done,
        Err(why) => {
            eprintln!("error: {why}");
            WRONG_USAGE.into()
        }
    }
}

/// Prints a line. Results are in their file: a reader that has gone away ends nothing.
fn say(line: &str) {
    let _ = writeln!(std::io::stdout(), "{line}");
}

fn run(args: &Args) -> Result<ExitCode, String> {
    let places = items::Places::find(args.tests.as_deref())?;
    let mut items = items::all(&places, args.quick)?;
    items.retain(|item| {
        args.only.is_empty()
            || args
                .only
                .iter()
                .any(|pattern| items::matches(pattern, &item.name))
    });
    if items.is_empty() {
        return Err(format!(
            "no item is named like {}; --list shows them all",
            args.only.join(" or ")
        ));
    }
    if args.list {
        for item in &items {
            say(&format!(
                "{:<44} {:>4} s  {}",
                item.name,
                item.limit.as_secs(),
                item.shown()
            ));
        }
        return Ok(ExitCode::SUCCESS);
    }
    let before = args
        .resume
        .as_deref()
        .map_or(Ok(Vec::new()), results::read)?;
    let mut output = results::Output::append(&args.results)?;
    // What was only tried is not measured.
    let passed = |name: &str| {
        let enough = |line: &serde_json::Value| {
            line["status"] == "ok" && (args.quick || line["quick"] != true)
        };
        before
            .iter()
            .any(|line| line["item"] == name && enough(line))
    };
    items.retain(|item| !passed(&item.name));
    let mut about = match sequence::device(&places) {
        Ok(about) => about,
        Err(why) => {
            eprintln!("There is no GPU to measure: {why}");
            return Ok(ExitCode::FAILURE);
        }
    };
    say(&table::device(&about));
    if args.quick {
        about.insert("quick".into(), true.into());
    }
    let limits = sequence::Limits {
        all: args.budget.map(Duration::from_secs),
        one: args.limit.map(Duration::from_secs),
        jobs: args.jobs as usize,
    };
    let done = sequence::run(&items, &about, &limits, &mut output)?;
    let left = items.len() - done.len();
    let bad = done.iter().any(table::is_bad);
    let lines: Vec<_> = before.into_iter().chain(done).collect();
    say(&table::render(&lines, left));
    Ok(if bad {
        ExitCode::FAILURE
    } else {
        ExitCode::SUCCESS
    })
}
