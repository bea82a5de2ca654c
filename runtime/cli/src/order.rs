//! `slabwise order`: the order of a graph's operations with the smallest peak.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use serde_json::json;
use slabwise::{Bytes, Result};
use slabwise_planner::remat_graph::{order_json, steps_in_place, steps_json};
use slabwise_planner::{Effort, brief};

use crate::arguments::seconds;
use crate::graph_file;
use crate::output::{bad_input, line, pairs};

#[derive(clap::Args)]
pub struct Args {
    /// A graph in the format remat-graph-v1, plain JSON or gzip
    graph: PathBuf,
    /// Let results take over the bytes of inputs that end there, where the graph permits it
    #[arg(long)]
    in_place: bool,
    /// Search until the peak is proved minimal or for so many seconds; unless given, stop where
    /// more search rarely helps: always at the same order, after some ten milliseconds for a
    /// thousand operations
    #[arg(long, value_name = "S", value_parser = seconds)]
    time_limit: Option<Duration>,
    /// One JSON object instead of text
    #[arg(long)]
    json: bool,
    /// Write the schedule: {"order": [...]}, or with --in-place {"steps": [...]}; gzipped if its
    /// name ends in .gz
    #[arg(short, value_name = "OUT.json")]
    pub output: Option<PathBuf>,
}

/// Bad input gives exit code 2.
pub fn run(args: &Args) -> Result<ExitCode> {
    let graph = match graph_file::read(&args.graph) {
        Ok(graph) => graph,
        Err(reason) => return bad_input(reason),
    };
    let start = Instant::now();
    let best = graph.minimise_peak(
        args.in_place,
        args.time_limit.map_or(Effort::Counted, Effort::Within),
    );
    let seconds = start.elapsed().as_secs_f64();
    if let Some(path) = &args.output {
        let schedule = if args.in_place {
            steps_json(&steps_in_place(&graph, &best.order))
        } else {
            order_json(&best.order)
        };
        graph_file::write(path, &schedule)?;
    }
    if args.json {
        line(json!({
            "graph": graph.name,
            "ops": best.order.len(),
            "in_place": args.in_place,
            "fixed": graph.fixed_bytes(),
            "peak": best.peak,
            "lower_bound": best.lower_bound,
            "optimal": best.is_proved(),
            "gap_pct": 100.0 * best.gap(),
            "method": best.schedule.to_string(),
            "seconds": seconds,
        }))?;
        return Ok(ExitCode::SUCCESS);
    }
    let both = |bytes: u64| format!("{bytes} bytes ({})", Bytes(bytes));
    let verdict = if best.is_proved() {
        "no order is better".into()
    } else {
        format!("at most {:.3} % could be saved", 100.0 * best.gap())
    };
    pairs(&[
        (
            "graph",
            format!("{} · {} operations", brief(&graph.name), best.order.len()),
        ),
        (
            "peak",
            format!(
                "{} above the fixed {}",
                both(best.peak),
                Bytes(graph.fixed_bytes())
            ),
        ),
        ("lower bound", both(best.lower_bound)),
        ("proved", verdict),
        ("made by", best.schedule.to_string()),
        ("seconds", format!("{seconds:.4}")),
    ])?;
    Ok(ExitCode::SUCCESS)
}
