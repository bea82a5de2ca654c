//! `slabwise pack`: offsets for buffers with known lifetimes.

use std::path::PathBuf;
use std::process::ExitCode;
use std::str::FromStr;
use std::time::{Duration, Instant};

use serde_json::json;
use slabwise::{Bytes, Error, Result};
use slabwise_planner::csv::{self, Table};
use slabwise_planner::pack::{Limits, Packing, Proof, Space, Violation, check};
use slabwise_planner::report::packing_svg;
use slabwise_planner::{brief, files};

use crate::arguments::seconds;
use crate::output::{bad_input, complain, line, pairs, save};

#[derive(clap::Args)]
pub struct Args {
    /// A table of buffers, `id,lower,upper,size` and more, gzipped or not
    file: PathBuf,
    /// The bytes available, such as 24MiB: any packing that fits is accepted, and none that fits is
    /// a failure. SPACE=BYTES for one of several memories
    #[arg(long, value_name = "[SPACE=]BYTES")]
    capacity: Vec<Capacity>,
    /// Seconds to search for a lower packing. The result depends on the speed and load of the
    /// machine: use --effort if it has to be reproducible
    #[arg(long, value_name = "S", default_value = "5", value_parser = seconds)]
    time_limit: Duration,
    /// Placements of a buffer to spend on a lower packing, in place of a time. The same effort and
    /// --seed give the same packing on every machine, with any number of threads; 0 runs only the
    /// heuristics, and all orders of up to eight buffers
    #[arg(long, value_name = "N", conflicts_with = "time_limit")]
    effort: Option<u64>,
    /// Number of threads; one for each core unless given
    #[arg(long, value_name = "T", value_parser = clap::value_parser!(u32).range(1..=1024))]
    threads: Option<u32>,
    /// A power of two that every offset is a multiple of
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = power_of_two)]
    align: u64,
    /// Seed of the random choices
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Write the packing as a picture
    #[arg(long, value_name = "FILE")]
    pub svg: Option<PathBuf>,
    /// One JSON object instead of text
    #[arg(long)]
    json: bool,
    /// Write the table with a column of offsets, gzipped if its name ends in .gz
    #[arg(short, value_name = "OUT.csv")]
    pub output: Option<PathBuf>,
}

/// Bytes, of one memory or of each.
#[derive(Clone)]
struct Capacity {
    space: Option<String>,
    bytes: Bytes,
}

impl FromStr for Capacity {
    type Err = slabwise_planner::BytesError;

    fn from_str(text: &str) -> std::result::Result<Self, Self::Err> {
        match text.rsplit_once('=') {
            Some((space, bytes)) => Ok(Capacity {
                space: Some(space.into()),
                bytes: bytes.parse()?,
            }),
            None => Ok(Capacity {
                space: None,
                bytes: text.parse()?,
            }),
        }
    }
}

fn power_of_two(text: &str) -> std::result::Result<u64, String> {
    text.parse()
        .ok()
        .filter(|n: &u64| n.is_power_of_two())
        .ok_or_else(|| format!("`{}` is not a power of two", brief(text)))
}

/// Bad input gives exit code 2, a capacity that is not met 1: the best packing found is shown and
/// written all the same.
pub fn run(args: &Args) -> Result<ExitCode> {
    let mut table = match csv::read_file(&args.file) {
        Ok(table) => table,
        Err(error) => return bad_input(error),
    };
    table
        .problem
        .items
        .iter_mut()
        .for_each(|item| item.align = item.align.max(args.align));
    if let Err(reason) = limit(&mut table, &args.capacity) {
        return bad_input(reason);
    }
    let threads = args.threads.map_or_else(
        || std::thread::available_parallelism().map_or(1, usize::from),
        |threads| threads as usize,
    );
    let time = args.effort.is_none().then_some(args.time_limit);
    let limits = Limits {
        capacity: None,
        time,
        effort: args.effort.unwrap_or(u64::MAX),
        threads,
        seed: args.seed,
    };
    let start = Instant::now();
    let packing = match table.problem.pack_within(&limits) {
        Ok(packing) => packing,
        Err(error) => {
            return bad_input(format!(
                "{}: {error}{}",
                args.file.display(),
                named(&table, &error.items())
            ));
        }
    };
    let seconds = start.elapsed().as_secs_f64();
    let unfit = match check(&table.problem, &packing) {
        Ok(()) => None,
        Err(Violation::Capacity(unfit)) => Some(unfit),
        Err(violation) => {
            return Err(Error::Internal(format!(
                "the packing found is wrong: {violation}"
            )));
        }
    };
    show(args, &table, &packing, seconds)?;
    if let Some(path) = &args.svg {
        let name = args.file.file_name().unwrap_or_default().to_string_lossy();
        let svg = packing_svg(&table, &packing, &name);
        save(path, svg.as_bytes())?;
    }
    if let Some(path) = &args.output {
        table.set_offsets(&packing);
        let bytes = files::packed_for(path, &csv::write(&table)).map_err(|source| Error::Io {
            path: path.clone(),
            source,
        })?;
        save(path, &bytes)?;
    }
    let Some(unfit) = unfit else {
        return Ok(ExitCode::SUCCESS);
    };
    let space = table
        .spaces
        .get(unfit.space)
        .map_or(String::new(), |name| format!(" of space `{}`", brief(name)));
    let (capacity, height, lower_bound) = (unfit.capacity, unfit.height, unfit.lower_bound);
    let hope = if lower_bound > capacity {
        format!("no packing needs less than {lower_bound}")
    } else {
        "a longer search may find a lower one".into()
    };
    complain(format_args!(
        "the capacity of {capacity} bytes{space} is not met: the best packing found needs {height}; {hope}"
    ));
    Ok(ExitCode::FAILURE)
}

/// Gives the memories their capacities.
fn limit(table: &mut Table, capacities: &[Capacity]) -> std::result::Result<(), String> {
    if table.problem.spaces.is_empty() && !capacities.is_empty() {
        table.problem.spaces.push(Space::default());
    }
    for capacity in capacities {
        let only = match &capacity.space {
            Some(name) => match table.spaces.iter().position(|space| space == name) {
                Some(only) => Some(only),
                None => {
                    return Err(format!(
                        "--capacity names the space `{}`; the file has {}",
                        brief(name),
                        list(&table.spaces)
                    ));
                }
            },
            None => None,
        };
        for (index, space) in table.problem.spaces.iter_mut().enumerate() {
            if only.is_none_or(|only| only == index) {
                space.capacity = Some(capacity.bytes.0);
            }
        }
    }
    Ok(())
}

fn list(names: &[String]) -> String {
    const SHOWN: usize = 6;
    let shown: Vec<String> = names
        .iter()
        .take(SHOWN)
        .map(|name| format!("`{}`", brief(name)))
        .collect();
    match names.len() {
        0 => "no column `space`".into(),
        1..=SHOWN => shown.join(", "),
        more => format!("{} and {} more", shown.join(", "), more - SHOWN),
    }
}

/// The ids of items that an error knows by number.
fn named(table: &Table, items: &[usize]) -> String {
    let known = items
        .iter()
        .filter(|&&item| item < table.problem.items.len());
    let names: Vec<String> = known
        .map(|&item| format!("item {item} is `{}`", brief(table.id(item))))
        .collect();
    if names.is_empty() {
        String::new()
    } else {
        format!(" ({})", names.join(", "))
    }
}

fn show(args: &Args, table: &Table, packing: &Packing, seconds: f64) -> Result<()> {
    let (height, bound) = (packing.height, packing.lower_bound);
    let ratio = if bound == 0 {
        1.0
    } else {
        height as f64 / bound as f64
    };
    let optimal = packing.proof.is_some();
    let space_name = |space: usize| table.spaces.get(space).cloned().unwrap_or_default();
    let spaces = || packing.spaces.iter().enumerate();
    if args.json {
        let mut report = json!({
            "buffers": table.problem.items.len(),
            "lower_bound": bound,
            "height": height,
            "ratio": ratio,
            "optimal": optimal,
            "method": packing.method.to_string(),
            "seconds": seconds,
        });
        if !table.spaces.is_empty() {
            let space = |(space, extent): (usize, &slabwise_planner::pack::Extent)| json!({ "space": space_name(space), "lower_bound": extent.lower_bound, "height": extent.height });
            report["spaces"] = spaces().map(space).collect();
        }
        return line(report);
    }
    let amount = |bytes: u64| format!("{bytes} ({})", Bytes(bytes));
    let verdict = match packing.proof {
        Some(Proof::Bound) => "yes: the height is the lower bound".to_string(),
        Some(Proof::Search) => "yes: nothing lower is left to try".to_string(),
        None => format!(
            "not proved: gap {} ({:.4} %)",
            height - bound,
            100.0 * (ratio - 1.0)
        ),
    };
    let mut rows = vec![
        ("buffers".to_string(), table.problem.items.len().to_string()),
        ("lower bound".to_string(), amount(bound)),
        ("height".to_string(), amount(height)),
        ("ratio".to_string(), format!("{ratio:.8}")),
        ("optimal".to_string(), verdict),
        ("method".to_string(), packing.method.to_string()),
        ("seconds".to_string(), format!("{seconds:.3}")),
    ];
    if !table.spaces.is_empty() {
        let row = |(space, extent): (usize, &slabwise_planner::pack::Extent)| {
            (
                format!("  {}", brief(&space_name(space))),
                format!(
                    "{}, lower bound {}",
                    amount(extent.height),
                    amount(extent.lower_bound)
                ),
            )
        };
        rows.extend(spaces().map(row));
    }
    if !table.problem.in_place.is_empty() {
        rows.push((
            "in place".into(),
            format!(
                "{} of {} pairs",
                packing.in_place.len(),
                table.problem.in_place.len()
            ),
        ));
    }
    pairs(&rows)
}
