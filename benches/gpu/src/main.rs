//! All measurements and checks on a GPU, as one command.
//!
//! `slabwise-gpu` runs a list of items: training steps, products, convolutions, bandwidths, the
//! tests of kernels and sessions, and the same steps of PyTorch and JAX. Each is a separate process
//! with a time limit, so that a crash, a hang or a peak of memory affects only one item; each
//! result is a line of JSON that is written at once. The target machine needs neither cargo nor a
//! compiler nor a network: `.ci/pack-gpu` makes an archive of it.
#![forbid(unsafe_code)]

mod child;
mod items;
mod measure;
mod model;
mod results;
mod sequence;
mod step;
mod table;
mod warm;

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
    /// Show the items and their commands, and run none
    #[arg(long)]
    list: bool,
    /// Only items whose name contains PATTERN; repeated patterns are alternatives, and * matches
    /// any text
    #[arg(long, value_name = "PATTERN")]
    only: Vec<String>,
    /// Seconds for all items; those that do not fit are left for another run with --resume
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..))]
    budget: Option<u64>,
    /// Leave out the items that are ok in this file of results, which may be the file of --results
    #[arg(long, value_name = "FILE")]
    resume: Option<PathBuf>,
    /// File to which a line is appended for each result
    #[arg(long, value_name = "FILE", default_value = "slabwise-gpu.jsonl")]
    results: PathBuf,
    /// Folder of test binaries [default: `tests` beside this program]
    #[arg(long, value_name = "DIR")]
    tests: Option<PathBuf>,
    /// Tests that run at once; timed items always run alone
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=64))]
    jobs: u32,
    /// A run or two of each item, at a small batch: checks that all of them work, not how fast they
    /// are
    #[arg(long)]
    quick: bool,
    /// Print the modelled times of steps on a described device (h100, a100, sm_90, …), and run
    /// nothing: this needs no GPU
    #[arg(long, value_name = "DEVICE")]
    model: Option<String>,
    /// With --model, show so many of the longest kernels of each step
    #[arg(long, value_name = "N", requires = "model", default_value_t = 0)]
    kernels: usize,
    /// Compile the functions of all steps for the devices of --device into DIR, and run nothing: a
    /// folder `kernels` beside this program is its cache; this needs a compiler and no GPU
    #[arg(long, value_name = "DIR", requires = "device")]
    warm: Option<PathBuf>,
    /// A described device (h100, a100, …) of --warm, or `here`
    #[arg(long, value_name = "DEVICE", requires = "warm")]
    device: Vec<String>,
    /// The most seconds of one item, for any limit of the item
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

/// Prints a line. A reader that has gone away does not end the run, because results are in their
/// file.
fn say(line: &str) {
    let _ = writeln!(std::io::stdout(), "{line}");
}

fn run(args: &Args) -> Result<ExitCode, String> {
    if let Some(device) = &args.model {
        model::print(device, &args.only, args.kernels, &mut std::io::stdout())?;
        return Ok(ExitCode::SUCCESS);
    }
    if let Some(folder) = &args.warm {
        let wanted = warm::Wanted {
            devices: &args.device,
            only: &args.only,
            quick: args.quick,
        };
        warm::fill(folder, &wanted)?;
        return Ok(ExitCode::SUCCESS);
    }
    let mut places = items::Places::find(args.tests.as_deref())?;
    // Functions that cannot be used safely are compiled again.
    if let Some(folder) = &places.kernels
        && let Err(why) = slabwise_cuda::cache::Cache::at(folder)
    {
        eprintln!("{why}");
        places.kernels = None;
    }
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
    // Items that were only tried (quick runs) do not count as measured.
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
    if let Some((said, fit)) =
        (places.kernels.as_deref()).and_then(|folder| warm::fitting(folder, &about))
    {
        say(&said);
        about.insert("warmed".into(), fit.into());
    }
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
