//! `random-programs fuzz` and `random-programs replay`; see the library.
#![forbid(unsafe_code)]

use std::process::ExitCode;
use std::time::{Duration, Instant};

use slabwise_random_programs::hunt::{Hunt, drawn, reduced};
use slabwise_random_programs::judge::{Counts, judge};

const USAGE: &str = "\
random-programs fuzz [--seconds S] [--seed N] [--graphs G] [--threads T] [--max-size M] [--trail FILE]
random-programs replay SEED [--max-size M]

fuzz draws and judges programs until the time or the number is reached; it ends with 1 if something was found.
replay judges one program by the seed that a report names, and prints everything about it.";

/// The default of the most statements of a case.
const SIZE: usize = 12;

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match start(&args) {
        Ok(code) => code,
        Err(why) => {
            eprintln!("{why}\n\n{USAGE}");
            ExitCode::from(2)
        }
    }
}

fn start(args: &[String]) -> Result<ExitCode, String> {
    let (command, rest) = args.split_first().ok_or("a command is missing")?;
    let mut hunt = Hunt {
        seed: 0,
        seconds: None,
        graphs: None,
        threads: 1,
        max_size: SIZE,
        trail: None,
        loud: true,
    };
    let mut case = None;
    let mut at = rest.iter();
    while let Some(option) = at.next() {
        if !option.starts_with("--") && command == "replay" && case.is_none() {
            case = Some(number(option, "the seed")?);
            continue;
        }
        let value = at.next().ok_or_else(|| format!("{option} needs a value"))?;
        match option.as_str() {
            "--seconds" => hunt.seconds = Some(number(value, option)?),
            "--seed" => hunt.seed = number(value, option)?,
            "--graphs" => hunt.graphs = Some(number(value, option)?),
            "--threads" => hunt.threads = number(value, option)?,
            "--max-size" => hunt.max_size = number(value, option)?,
            "--trail" => hunt.trail = Some(value.into()),
            other => return Err(format!("there is no option {other}")),
        }
    }
    match (command.as_str(), case) {
        ("fuzz", _) => {
            if hunt.seconds.is_none() && hunt.graphs.is_none() {
                return Err("fuzz needs --seconds or --graphs".into());
            }
            Ok(ExitCode::from(u8::from(!hunt.go().reports.is_empty())))
        }
        ("replay", Some(seed)) => Ok(replay(seed, hunt.max_size)),
        ("replay", None) => Err("replay needs the seed of a case".into()),
        (other, _) => Err(format!("there is no command {other}")),
    }
}

fn number<T: std::str::FromStr>(text: &str, what: &str) -> Result<T, String> {
    text.parse()
        .map_err(|_| format!("{what}: {text} is not a number that fits"))
}

fn replay(seed: u64, max_size: usize) -> ExitCode {
    let (case, setups) = drawn(seed, max_size);
    println!("{case:#?}");
    for setup in &setups {
        println!("and with {}", setup.describe());
    }
    let mut counts = Counts::default();
    let Some(finding) = judge(&case, &setups, &mut counts) else {
        println!("nothing is wrong: {counts:?}");
        return ExitCode::SUCCESS;
    };
    println!("found: {}", finding.text());
    let report = reduced(
        seed,
        case,
        finding,
        Instant::now() + Duration::from_secs(60),
        &|_, _, _| {},
    );
    println!("{}\n{:#?}", report.text(max_size), report.trial);
    ExitCode::FAILURE
}
