//! Data-parallel training steps beside PyTorch's, in turns, under one launcher:
//!
//! ```text
//! cargo bench -p slabwise-benches --bench ranks -- [--json] [--rounds 5] [--steps 12] [--model gpt] [--batch 8]
//! ```
//!
//! Each round starts every variant once: slabwise on 2 ranks of 1 thread, with the state replicated
//! and sharded, by shared memory and by messages; slabwise on 1 rank of 2 threads; PyTorch's DDP over
//! Gloo on 2 ranks of 1 thread (for `gpt`; the Python of `SLABWISE_PYTHON`, else `python3`). The
//! MPI is that of `slabwise launch`. Printed are the median and the fastest step of all rounds.

use std::ffi::OsString;
use std::process::{Command, ExitCode, Stdio};
use std::time::Instant;
use std::{env, fs};

use slabwise::prelude::*;
use slabwise::{Strategy, World};
use slabwise_comm::launch::{self, Launch};
use slabwise_models::{Model, rows_of};

/// Steps that are not counted.
const WARM_UP: usize = 3;
/// The words before a result of a rank in its output.
const RESULT: &str = "result: ";

type Failure = Box<dyn std::error::Error>;

/// The options of the command.
struct Options {
    is_json: bool,
    rounds: usize,
    steps: usize,
    model: String,
    batch: usize,
}

/// A program that is measured.
struct Variant {
    name: &'static str,
    ranks: usize,
    threads: usize,
    kind: Kind,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// Ours, with a strategy, and ranks that read each other's memory or not.
    Own {
        strategy: &'static str,
        near: bool,
    },
    Torch,
}

const VARIANTS: &[Variant] = &[
    own("slabwise, replicated", 2, "replicated", true),
    own("slabwise, sharded state", 2, "sharded", true),
    own("slabwise, replicated, by messages", 2, "replicated", false),
    own("slabwise, one process", 1, "replicated", true),
    Variant {
        name: "PyTorch DDP, gloo",
        ranks: 2,
        threads: 1,
        kind: Kind::Torch,
    },
];

/// Two threads in all.
const fn own(name: &'static str, ranks: usize, strategy: &'static str, near: bool) -> Variant {
    Variant {
        name,
        ranks,
        threads: 2 / ranks,
        kind: Kind::Own { strategy, near },
    }
}

/// The measurements of a variant.
#[derive(Default)]
struct Measured {
    milliseconds: Vec<f64>,
    /// Planned bytes of weights, state and slab, bytes sent in a step, and bytes of these sent by
    /// messages; on rank 0.
    bytes: [u64; 3],
    skipped: Option<String>,
}

fn main() -> ExitCode {
    let words: Vec<String> = env::args().skip(1).collect();
    let ended = match words.first().map(String::as_str) {
        Some("rank") => rank(&words[1..]).map(|()| 0),
        Some("guard") => {
            let program: Vec<OsString> = env::args_os().skip(2).collect();
            launch::guard(&program).map_err(Failure::from)
        }
        Some("launch") => start(&words[1..]),
        _ => compare(&words).map(|()| 0),
    };
    match ended {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

/// `rank MODEL BATCH STEPS THREADS STRATEGY`: a rank of ours.
fn rank(words: &[String]) -> Result<(), Failure> {
    let [model, batch, steps, threads, strategy] = words else {
        return Err("rank MODEL BATCH STEPS THREADS STRATEGY".into());
    };
    let (batch, steps): (usize, usize) = (batch.parse()?, steps.parse()?);
    let strategy = match strategy.as_str() {
        "sharded" => Strategy::ShardedState,
        _ => Strategy::Replicated,
    };
    let world = World::join()?.with_strategy(strategy);
    let model = Model::parse(model)?;
    let params = Params::seeded(0);
    let network = model.build(&params);
    let session = Session::new(Device::Cpu, params)?.with_threads(threads.parse()?);
    let mut session = session.on(world.clone())?;
    let rows = world.share(batch);
    let own = u32::try_from(rows.len())?;
    let step = network.training(&mut session, own, model.optimizer())?;
    let (examples, labels) = model.batch(batch, 1);
    let feed = (examples.rows(rows.clone()), rows_of(&labels, rows));
    let mut run = |count: usize| -> Result<Vec<f64>, Failure> {
        let step = |_| {
            let begun = Instant::now();
            session.run(&step, (&feed.0, &feed.1))?[0].item::<f32>();
            Ok(begun.elapsed().as_secs_f64() * 1e3)
        };
        (0..count).map(step).collect()
    };
    run(WARM_UP)?;
    let before = [world.sent_bytes(), world.message_bytes()];
    let times = run(steps)?;
    let sent = [world.sent_bytes(), world.message_bytes()];
    let each = |at: usize| (sent[at] - before[at]) / steps as u64;
    if world.rank() == 0 {
        let persistent = step.plan().persistent();
        let planned = persistent.weights + persistent.state + step.plan().slab_bytes();
        let times: Vec<String> = times.iter().map(|t| format!("{t:.3}")).collect();
        let times = times.join(" ");
        println!("{RESULT}{planned} {} {} {times}", each(0), each(1));
    }
    Ok(())
}

/// `launch RANKS PROGRAM …`: starts a program as `slabwise launch` does.
fn start(words: &[String]) -> Result<u8, Failure> {
    let [ranks, program @ ..] = words else {
        return Err("launch RANKS PROGRAM …".into());
    };
    let launch = Launch {
        ranks: ranks.parse()?,
        restarts: 0,
        program: program.iter().map(OsString::from).collect(),
        guard: vec![env::current_exe()?.into_os_string(), "guard".into()],
        library: None,
    };
    Ok(launch.run()?)
}

/// Measures all variants in turns, and prints the results.
fn compare(words: &[String]) -> Result<(), Failure> {
    let options = options(words)?;
    let mut all: Vec<Measured> = VARIANTS.iter().map(|_| Measured::default()).collect();
    for round in 0..options.rounds {
        for (variant, measured) in VARIANTS.iter().zip(&mut all) {
            if measured.skipped.is_none() {
                eprintln!(
                    "round {} of {}: {}",
                    round + 1,
                    options.rounds,
                    variant.name
                );
                measure(variant, &options, round, measured)?;
            }
        }
    }
    let load = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let load = load.split(' ').next().unwrap_or("?").to_string();
    if options.is_json {
        print_json(&options, &all, &load);
    } else {
        print_table(&options, &all, &load);
    }
    Ok(())
}

fn options(words: &[String]) -> Result<Options, Failure> {
    let mut options = Options {
        is_json: false,
        rounds: 5,
        steps: 12,
        model: "gpt".into(),
        batch: 8,
    };
    let mut words = words.iter();
    while let Some(word) = words.next() {
        let mut value = || words.next().ok_or(format!("{word} needs a value"));
        match word.as_str() {
            "--json" => options.is_json = true,
            "--rounds" => options.rounds = value()?.parse()?,
            "--steps" => options.steps = value()?.parse()?,
            "--model" => options.model = value()?.clone(),
            "--batch" => options.batch = value()?.parse()?,
            // Cargo says so.
            "--bench" => {}
            _ => return Err(format!("unknown option {word}").into()),
        }
    }
    if options.rounds == 0 || options.steps == 0 {
        return Err("at least one round of one step".into());
    }
    Ok(options)
}

/// Runs a variant once.
fn measure(
    variant: &Variant,
    options: &Options,
    round: usize,
    measured: &mut Measured,
) -> Result<(), Failure> {
    let this = env::current_exe()?;
    let mut program: Vec<OsString> = Vec::new();
    let mut command = Command::new(&this);
    match variant.kind {
        Kind::Own { strategy, near } => {
            program.extend([this.into_os_string(), "rank".into()]);
            program.extend([
                options.model.clone().into(),
                options.batch.to_string().into(),
            ]);
            program.extend([
                options.steps.to_string().into(),
                variant.threads.to_string().into(),
            ]);
            program.push(strategy.into());
            command.env("SLABWISE_NEAR", if near { "1" } else { "0" });
        }
        Kind::Torch if options.model != "gpt" => {
            measured.skipped = Some("its program is for gpt".into());
            return Ok(());
        }
        Kind::Torch => {
            let python = env::var_os("SLABWISE_PYTHON").unwrap_or("python3".into());
            let script = concat!(env!("CARGO_MANIFEST_DIR"), "/peers/torch_ranks.py");
            program.extend([python, script.into(), options.batch.to_string().into()]);
            program.extend([
                options.steps.to_string().into(),
                variant.threads.to_string().into(),
            ]);
            program.push((29_500 + round).to_string().into());
        }
    }
    if variant.ranks > 1 {
        command
            .args(["launch", &variant.ranks.to_string()])
            .args(program);
    } else {
        // `rank` and the words after it.
        command.args(&program[1..]);
    }
    let output = command
        .stdin(Stdio::null())
        .stderr(Stdio::piped())
        .output()?;
    let text = String::from_utf8_lossy(&output.stdout);
    if let Some((_, why)) = text.split_once("\"skipped\": \"") {
        measured.skipped = Some(why.split('"').next().unwrap_or_default().into());
        return Ok(());
    }
    if !read(&text, measured) {
        let errors = String::from_utf8_lossy(&output.stderr);
        return Err(format!("{} gave no result:\n{text}{errors}", variant.name).into());
    }
    Ok(())
}

/// Reads the result of a rank 0; false if there is none.
fn read(text: &str, measured: &mut Measured) -> bool {
    if let Some((_, rest)) = text.split_once(RESULT) {
        let line = rest.lines().next().unwrap_or_default();
        let mut words = line.split(' ');
        let mut number = || words.next().and_then(|word| word.parse().ok());
        measured.bytes = std::array::from_fn(|_| number().unwrap_or(0));
        measured
            .milliseconds
            .extend(words.filter_map(|word| word.parse::<f64>().ok()));
        return true;
    }
    let Some((_, rest)) = text.split_once("\"ms\": [") else {
        return false;
    };
    let list = rest.split(']').next().unwrap_or_default();
    let times = list.split(", ").filter_map(|word| word.parse::<f64>().ok());
    measured.milliseconds.extend(times);
    true
}

/// The median and the fastest time.
fn figures(measured: &Measured) -> Option<(f64, f64)> {
    let mut times = measured.milliseconds.clone();
    times.sort_by(f64::total_cmp);
    Some((*times.get(times.len() / 2)?, *times.first()?))
}

fn print_table(options: &Options, all: &[Measured], load: &str) {
    println!(
        "{} at a batch of {}, {} rounds of {} steps, load {load}",
        options.model, options.batch, options.rounds, options.steps
    );
    println!(
        "{:34} {:>7} {:>10} {:>10} {:>7} {:>7} {:>10} {:>12} {:>12}",
        "",
        "ranks",
        "median ms",
        "fastest",
        "ratio",
        "ratio",
        "planned MB",
        "sent bytes",
        "by messages"
    );
    let first = figures(&all[0]).unwrap_or((f64::NAN, f64::NAN));
    for (variant, measured) in VARIANTS.iter().zip(all) {
        let Some((median, fastest)) = figures(measured) else {
            let why = measured.skipped.as_deref().unwrap_or("no steps");
            println!("{:34} skipped: {why}", variant.name);
            continue;
        };
        let place = format!("{}x{}", variant.ranks, variant.threads);
        let [planned, sent, messages] = measured.bytes;
        println!(
            "{:34} {place:>7} {median:>10.1} {fastest:>10.1} {:>7.3} {:>7.3} {:>10.1} {sent:>12} {messages:>12}",
            variant.name,
            first.0 / median,
            first.1 / fastest,
            planned as f64 / 1e6,
        );
    }
    println!("ratios are those of the first variant's median and fastest step to this one's");
}

fn print_json(options: &Options, all: &[Measured], load: &str) {
    let variants = VARIANTS.iter().zip(all).map(|(variant, measured)| {
        let name = variant.name;
        let (ranks, threads) = (variant.ranks, variant.threads);
        match figures(measured) {
            None => {
                let why = measured.skipped.as_deref().unwrap_or("no steps");
                format!("{{\"name\": \"{name}\", \"skipped\": \"{why}\"}}")
            }
            Some((median, fastest)) => {
                let [planned, sent, messages] = measured.bytes;
                format!(
                    "{{\"name\": \"{name}\", \"ranks\": {ranks}, \"threads\": {threads}, \
                     \"median_ms\": {median:.3}, \"fastest_ms\": {fastest:.3}, \
                     \"planned_bytes\": {planned}, \"sent_bytes\": {sent}, \
                     \"message_bytes\": {messages}}}"
                )
            }
        }
    });
    let variants: Vec<String> = variants.collect();
    println!(
        "{{\"model\": \"{}\", \"batch\": {}, \"rounds\": {}, \"steps\": {}, \"load\": \"{load}\", \
         \"variants\": [\n  {}\n]}}",
        options.model,
        options.batch,
        options.rounds,
        options.steps,
        variants.join(",\n  ")
    );
}
