//! Orders, recomputation and offload: graphs of a folder in the format `remat-graph-v1`, and the
//! built-in models under budgets. Prints tables for `benches/RESULTS.md`.
//!
//! ```text
//! SLABWISE_GRAPHS=FOLDER cargo bench -p slabwise-benches --bench schedules -- \
//!     [order|remat|combined|models] [--only TEXT] [--time-limit SECONDS]
//! ```
//!
//! Without `--time-limit`, each schedule of `remat` may take 50 ms, and each of `combined` 2 s. The
//! folder's files end in `.json` or `.json.gz`; without it only the models are measured.

use slabwise::{Budget, Device, Error, Params, Session};
use slabwise_models::{Model, OptimizerKind};
use slabwise_planner::Effort;
use slabwise_planner::remat::{self, Limit, RematOptions, remat};
use slabwise_planner::remat_graph::RematGraph;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

/// The variable that names the folder.
const FOLDER: &str = "SLABWISE_GRAPHS";
/// Budgets, as fractions of the memory needed to run everything once.
const FRACTIONS: [f64; 3] = [0.75, 0.5, 0.35];

/// The options of the command line.
struct Args {
    tables: Vec<String>,
    only: String,
    limit: Option<Duration>,
}

impl Args {
    fn limit(&self, otherwise: u64) -> Limit {
        Limit::Time(self.limit.unwrap_or(Duration::from_millis(otherwise)))
    }
}

fn args() -> Result<Args> {
    let mut args = Args {
        tables: Vec::new(),
        only: String::new(),
        limit: None,
    };
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        let mut value = || words.next().ok_or(format!("{word} needs a value"));
        match word.as_str() {
            "--only" => args.only = value()?,
            "--time-limit" => args.limit = Some(Duration::try_from_secs_f64(value()?.parse()?)?),
            // Added by `cargo bench`.
            "--bench" => {}
            table @ ("order" | "remat" | "combined" | "models") => args.tables.push(table.into()),
            other => return Err(format!("unknown argument `{other}`").into()),
        }
    }
    if args.tables.is_empty() {
        args.tables = ["order", "remat", "combined", "models"]
            .map(String::from)
            .into();
    }
    Ok(args)
}

fn main() -> Result<()> {
    let args = args()?;
    let graphs = graphs(&args)?;
    for table in &args.tables {
        match table.as_str() {
            "order" => orders(&graphs),
            "remat" => budgets(&graphs, args.limit(50))?,
            "combined" => combined(&graphs, args.limit(2000))?,
            _ => models(&args)?,
        }
    }
    Ok(())
}

/// The graphs of the folder by name; none, with a message, if there is no folder.
fn graphs(args: &Args) -> Result<Vec<(String, RematGraph)>> {
    if !args.tables.iter().any(|table| table != "models") {
        return Ok(Vec::new());
    }
    let Some(folder) = std::env::var_os(FOLDER) else {
        println!("{FOLDER} names no folder of graphs: their orders and schedules are left out.");
        return Ok(Vec::new());
    };
    // `cargo bench` runs this in the folder of its package.
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("..")
        .join(folder);
    let paths = std::fs::read_dir(&folder).map_err(|e| format!("{}: {e}", folder.display()))?;
    let mut files: Vec<PathBuf> = paths
        .map(|entry| Ok(entry?.path()))
        .collect::<std::result::Result<_, std::io::Error>>()?;
    files.sort();
    let mut graphs = Vec::new();
    for file in files {
        let name = file
            .file_name()
            .unwrap_or_default()
            .to_string_lossy()
            .trim_end_matches(".gz")
            .to_string();
        let Some(name) = name
            .strip_suffix(".json")
            .filter(|name| name.contains(&args.only))
        else {
            continue;
        };
        let graph = RematGraph::read(&std::fs::read(&file)?)
            .map_err(|e| format!("{}: {e}", file.display()))?;
        graphs.push((name.to_string(), graph));
    }
    Ok(graphs)
}

fn operations(graph: &RematGraph) -> usize {
    graph.nodes.iter().filter(|node| !node.persistent).count()
}

/// The smallest peaks without recomputation, with no node in place and with all permitted ones.
fn orders(graphs: &[(String, RematGraph)]) {
    println!(
        "\n| graph | operations | in place | peak | lower bound | gap % | seconds | made by |\n|---|---|---|---|---|---|---|---|"
    );
    for (name, graph) in graphs {
        for in_place in [false, true] {
            let begin = Instant::now();
            let best = graph.minimise_peak(in_place, Effort::Counted);
            let seconds = begin.elapsed().as_secs_f64();
            println!(
                "| {name} | {} | {} | {} | {} | {:.3} | {seconds:.3} | {} |",
                operations(graph),
                if in_place { "yes" } else { "no" },
                best.peak,
                best.lower_bound,
                100.0 * best.gap(),
                best.schedule
            );
        }
    }
}

/// The cheapest schedules within budgets.
fn budgets(graphs: &[(String, RematGraph)], limit: Limit) -> Result<()> {
    println!(
        "\n| graph | operations | budget | peak | floor | overhead % | at least % | seconds |\n|---|---|---|---|---|---|---|---|"
    );
    for (name, graph) in graphs {
        for fraction in FRACTIONS {
            let options = RematOptions {
                budget: remat::Budget::Fraction(fraction),
                link: None,
                limit,
                seed: 0,
            };
            let begin = Instant::now();
            let found = remat(graph, &options)?;
            let seconds = begin.elapsed().as_secs_f64();
            let base = graph.base_cost().max(1) as f64;
            let over = |cost: u128| 100.0 * (cost as f64 / base - 1.0);
            let overhead = if found.is_met() {
                format!("{:.3}", over(found.cost))
            } else {
                "not met".into()
            };
            println!(
                "| {name} | {} | {} | {} | {} | {overhead} | {:.3} | {seconds:.3} |",
                operations(graph),
                found.budget,
                found.peak,
                found.peak_bound,
                over(found.time_bound)
            );
        }
    }
    Ok(())
}

/// Times to copy a byte, in units of cost: 19.5 TFLOP/s against 25 GB/s, and a link 2.6 times
/// faster.
const LINKS: [f64; 2] = [780.0, 300.0];

/// The fastest schedules within budgets, by recomputation alone and with a link to the host in
/// addition.
fn combined(graphs: &[(String, RematGraph)], limit: Limit) -> Result<()> {
    println!(
        "\n| graph | budget | link | without link % | with link % | of that recomputed % | bytes sent | seconds |\n|---|---|---|---|---|---|---|---|"
    );
    let mut worse = Vec::new();
    for (name, graph) in graphs {
        for fraction in FRACTIONS {
            let options = RematOptions {
                budget: remat::Budget::Fraction(fraction),
                link: None,
                limit,
                seed: 0,
            };
            let alone = remat(graph, &options)?;
            let base = graph.base_cost().max(1) as f64;
            let over = |met: bool, time: u128| match met {
                true => format!("{:.3}", 100.0 * (time as f64 / base - 1.0)),
                false => "not met".into(),
            };
            for link in LINKS {
                let begin = Instant::now();
                let found = remat(
                    graph,
                    &RematOptions {
                        link: Some(link),
                        ..options
                    },
                )?;
                let seconds = begin.elapsed().as_secs_f64();
                println!(
                    "| {name} | {} | {link} | {} | {} | {:.3} | {} | {seconds:.3} |",
                    found.budget,
                    over(alone.is_met(), alone.time),
                    over(found.is_met(), found.time),
                    100.0 * (found.cost as f64 / base - 1.0),
                    found.offloaded_bytes(graph)
                );
                if alone.is_met() && !(found.is_met() && found.time <= alone.time) {
                    worse.push(format!("{name} at {} over {link}", found.budget));
                }
            }
        }
    }
    println!(
        "\nWorse with a link than without: {}",
        if worse.is_empty() {
            "none".into()
        } else {
            worse.join(", ")
        }
    );
    Ok(())
}

/// Training steps of the built-in models within fractions of their slabs; times are modelled.
fn models(args: &Args) -> Result<()> {
    println!(
        "\n| model | budget | slab | bound of the order | kernels again | overhead % | seconds to compile |\n|---|---|---|---|---|---|---|"
    );
    for model in [
        "mlp",
        "cnn",
        "resnet20",
        "resnet18",
        "mobilenetv2",
        "unet",
        "gpt",
        "lstm",
    ]
    .iter()
    .filter(|m| m.contains(&args.only))
    {
        let model = Model::parse(model)?;
        for fraction in [1.0].into_iter().chain(FRACTIONS) {
            let params = Params::seeded(0);
            let network = model.build(&params);
            let session = Session::new(Device::Cpu, params)?
                .with_threads(2)
                .with_budget(Budget::Fraction(fraction));
            let begin = Instant::now();
            let plan = network.plan_training(&session, 64u32, OptimizerKind::Sgd);
            let seconds = begin.elapsed().as_secs_f64();
            print!("| {model} | {:.0} % | ", 100.0 * fraction);
            match plan {
                Ok(plan) => println!(
                    "{} | {} | {} | {:.2} | {seconds:.3} |",
                    plan.slab_bytes(),
                    plan.lower_bound_bytes(),
                    plan.budget_report().tasks.len(),
                    100.0 * plan.budget_report().overhead
                ),
                Err(Error::Budget { slab, .. }) => {
                    println!("{} | | | not met | {seconds:.3} |", slab.0)
                }
                Err(other) => return Err(other.into()),
            }
        }
    }
    Ok(())
}
