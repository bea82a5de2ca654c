//! Packs the problems under `data/packing`, jigsaw puzzles of known optimum, and problems of
//! growing size, and prints tables for `benches/RESULTS.md`.
//!
//! ```text
//! cargo bench -p slabwise-packer --bench packing -- [real|puzzles|scaling] \
//!     [--only TEXT] [--time-limit SECONDS] [--threads N]
//! ```

use slabwise_packer::generate::{Cuts, tiling, with_holes};
use slabwise_packer::{Item, Limits, Packing, Problem};
use slabwise_packer::{Lifetime, csv};
use std::error::Error;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// The options of the command line.
struct Args {
    tables: Vec<String>,
    only: String,
    limit: Option<Duration>,
    threads: usize,
}

fn args() -> Result<Args, Box<dyn Error>> {
    let threads = std::thread::available_parallelism()
        .map_or(1, usize::from)
        .min(2);
    let mut args = Args {
        tables: Vec::new(),
        only: String::new(),
        limit: None,
        threads,
    };
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        let mut value = || words.next().ok_or(format!("{word} needs a value"));
        match word.as_str() {
            "--only" => args.only = value()?,
            "--time-limit" => args.limit = Some(Duration::try_from_secs_f64(value()?.parse()?)?),
            "--threads" => args.threads = value()?.parse()?,
            // Added by `cargo bench`.
            "--bench" => {}
            table @ ("real" | "puzzles" | "scaling") => args.tables.push(table.into()),
            other => return Err(format!("unknown argument `{other}`").into()),
        }
    }
    if args.tables.is_empty() {
        args.tables = ["real", "puzzles", "scaling"].map(String::from).into();
    }
    Ok(args)
}

fn main() -> Result<(), Box<dyn Error>> {
    let args = args()?;
    for table in &args.tables {
        match table.as_str() {
            "real" => real(&args)?,
            "puzzles" => puzzles(&args)?,
            _ => scaling(&args)?,
        }
    }
    Ok(())
}

/// Packs once, and returns the time.
fn timed(problem: &Problem, limits: &Limits) -> Result<(Packing, f64), Box<dyn Error>> {
    let begin = Instant::now();
    let packing = problem.pack_within(limits)?;
    Ok((packing, begin.elapsed().as_secs_f64()))
}

fn row(name: &str, items: usize, (packing, seconds): &(Packing, f64)) {
    let (height, bound) = (packing.height, packing.lower_bound);
    let ratio = if bound == 0 {
        1.0
    } else {
        height as f64 / bound as f64
    };
    let proved = if packing.proof.is_some() {
        "optimal"
    } else {
        ""
    };
    println!(
        "| {name} | {items} | {bound} | {height} | {ratio:.8} | {seconds:.3} | {proved} | {} |",
        packing.method
    );
}

const HEAD: &str = "| problem | items | lower bound | height | ratio | seconds | proved | method |\n|---|---|---|---|---|---|---|---|";

fn real(args: &Args) -> Result<(), Box<dyn Error>> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../data/packing");
    for folder in ["minimalloc", "xla", "idealloc"] {
        let mut files: Vec<PathBuf> = std::fs::read_dir(root.join(folder))?
            .map(|entry| Ok(entry?.path()))
            .collect::<Result<_, std::io::Error>>()?;
        files.sort();
        println!("\n{HEAD}");
        let mut total = 0.0;
        for file in files {
            let name = file
                .file_name()
                .unwrap_or_default()
                .to_string_lossy()
                .replace(".csv.gz", "");
            if !name.contains(&args.only) {
                continue;
            }
            let problem = csv::read_file(&file)?.problem;
            // MiniMalloc's instances carry the capacity to meet in their names.
            let capacity = name
                .split('.')
                .nth(1)
                .filter(|_| folder == "minimalloc")
                .and_then(|text| text.parse().ok());
            let limits = Limits {
                capacity,
                time: args.limit.or(Some(Duration::from_secs(5))),
                effort: u64::MAX,
                threads: args.threads,
                ..Limits::default()
            };
            let result = timed(&problem, &limits)?;
            total += result.1;
            row(&name, problem.items.len(), &result);
        }
        println!("\nTogether {total:.3} s.");
    }
    Ok(())
}

fn puzzles(args: &Args) -> Result<(), Box<dyn Error>> {
    println!("\n{HEAD}");
    for items in [80, 150] {
        for cuts in [Cuts::Straight, Cuts::Mixed, Cuts::Spiral] {
            for seed in 1..=4 {
                let name = format!("{cuts:?} {items}, seed {seed}");
                if !name.contains(&args.only) {
                    continue;
                }
                let known = tiling(seed, items, 1 << 20, 1 << 20, cuts);
                let limits = Limits {
                    time: args.limit.or(Some(Duration::from_secs(10))),
                    effort: u64::MAX,
                    threads: args.threads,
                    ..Limits::default()
                };
                row(
                    &name,
                    known.problem.items.len(),
                    &timed(&known.problem, &limits)?,
                );
            }
        }
    }
    Ok(())
}

/// Fast heuristics only, as a compiler uses them.
fn scaling(args: &Args) -> Result<(), Box<dyn Error>> {
    println!("\n{HEAD}");
    for exponent in 3..=6u32 {
        let items = 10usize.pow(exponent);
        let holes = with_holes(7, tiling(7, items, 1 << 32, 1 << 40, Cuts::Mixed), 10).problem;
        // Random lives and sizes: the bound is out of reach, so that every method runs.
        let mut state = 7u64;
        let mut random = |n: u64| {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) % n
        };
        let span = items as u64;
        let uniform = (0..items).map(|_| {
            let start = random(span);
            Item {
                life: Lifetime::new(start, start + 1 + random(1000)),
                size: 64 * (1 + random(4096)),
                align: 64,
            }
        });
        let uniform = Problem::new(uniform.collect());
        for (name, problem) in [("jigsaw with holes", holes), ("uniform", uniform)] {
            let limits = Limits {
                threads: args.threads,
                ..Limits::default()
            };
            row(name, problem.items.len(), &timed(&problem, &limits)?);
        }
    }
    Ok(())
}
