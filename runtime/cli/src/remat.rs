//! `slabwise remat`: the cheapest schedule of a graph within a memory budget.

use std::path::PathBuf;
use std::process::ExitCode;
use std::str::FromStr;
use std::time::{Duration, Instant};

use serde_json::json;
use slabwise::{Bytes, Error, Result};
use slabwise_planner::brief;
use slabwise_planner::remat::{Budget, Limit, Placed, Remat, RematOptions, remat, remat_in_slab};
use slabwise_planner::remat_graph::{RematGraph, order_json, placed_steps_json, steps_json};

use crate::arguments::seconds;
use crate::graph_file;
use crate::output::{bad_input, complain, line, pairs};

#[derive(clap::Args)]
pub struct Args {
    /// A graph in the format remat-graph-v1, plain or gzip
    graph: PathBuf,
    /// Bytes above the fixed part (such as 24MiB), or a part of the best peak without recomputation
    /// (such as 50%)
    #[arg(long, value_parser = budget)]
    budget: Budget,
    /// Also send buffers to the host and back; a byte takes LINK units of cost
    #[arg(long, value_name = "LINK", value_parser = link)]
    offload: Option<f64>,
    /// Pack everything into one slab, which has to meet the budget, and write its offsets
    #[arg(long)]
    slab: bool,
    /// Search for so many seconds, reading the graph included
    #[arg(long, value_name = "S", default_value = "2", value_parser = seconds)]
    time_limit: Duration,
    /// One JSON object instead of text
    #[arg(long)]
    json: bool,
    /// Write the schedule: {"order": [...]}, or with --offload or --slab {"steps": [...]}; gzipped
    /// if its name ends in .gz
    #[arg(short, value_name = "OUT.json")]
    pub output: Option<PathBuf>,
}

/// Bytes, or a percentage.
fn budget(text: &str) -> std::result::Result<Budget, String> {
    let Some(percent) = text.trim().strip_suffix('%') else {
        return Bytes::from_str(text)
            .map(|b| Budget::Bytes(b.0))
            .map_err(|e| e.to_string());
    };
    match percent.trim().parse::<f64>() {
        Ok(percent) if percent.is_finite() && percent >= 0.0 => {
            Ok(Budget::Fraction(percent / 100.0))
        }
        _ => Err(format!("`{}` is not a percentage", brief(text))),
    }
}

/// The slowest link: beyond it, times of copies become indistinguishable; any graph ends before its
/// first byte has been sent.
const SLOWEST_LINK: f64 = 1e15;

fn link(text: &str) -> std::result::Result<f64, String> {
    let number = text
        .parse::<f64>()
        .ok()
        .filter(|n| n.is_finite() && *n >= 0.0);
    let number = number
        .ok_or_else(|| format!("`{}` is not a number of cost units per byte", brief(text)))?;
    if number > SLOWEST_LINK {
        return Err(format!(
            "a byte takes {number:e} units of cost; the most is {SLOWEST_LINK:e}. The unit is that of the graph's costs"
        ));
    }
    Ok(number)
}

/// Bad input gives exit code 2, a budget that is not met 1: the best schedule found is shown and
/// written all the same.
pub fn run(args: &Args) -> Result<ExitCode> {
    let start = Instant::now();
    let graph = match graph_file::read(&args.graph) {
        Ok(graph) => graph,
        Err(reason) => return bad_input(reason),
    };
    let Some(why) = solve(args, &graph, start)? else {
        return Ok(ExitCode::SUCCESS);
    };
    complain(why);
    Ok(ExitCode::FAILURE)
}

/// Solves, reports and writes; says why if the budget is not met.
fn solve(args: &Args, graph: &RematGraph, start: Instant) -> Result<Option<String>> {
    let limit = args.time_limit.saturating_sub(start.elapsed());
    let options = RematOptions {
        budget: args.budget,
        link: args.offload,
        limit: Limit::Time(limit),
        seed: 0,
    };
    let value = |e: slabwise_planner::remat::RematError| {
        Error::Value(format!("{}: {e}", args.graph.display()))
    };
    let (found, placed) = if args.slab {
        let (found, placed) = remat_in_slab(graph, &options).map_err(value)?;
        (found, Some(placed))
    } else {
        (remat(graph, &options).map_err(value)?, None)
    };
    let seconds = start.elapsed().as_secs_f64();
    if let Some(path) = &args.output {
        let text = match &placed {
            Some(placed) => placed_steps_json(graph, &placed.steps),
            None if found.transfers.is_empty() => order_json(&found.schedule),
            None => steps_json(&found.steps(graph)),
        };
        graph_file::write(path, &text)?;
    }
    report(args, graph, &found, placed.as_ref(), seconds)?;
    let (what, reached) = match &placed {
        Some(placed) => ("slab", placed.height),
        None => ("peak", found.peak),
    };
    Ok((reached > found.budget).then(|| {
        format!(
            "the budget of {} bytes is not met: the smallest {what} found is {reached} bytes, and no schedule needs less than {} bytes",
            found.budget, found.peak_bound
        )
    }))
}

fn report(
    args: &Args,
    graph: &RematGraph,
    found: &Remat,
    placed: Option<&Placed>,
    seconds: f64,
) -> Result<()> {
    let base = u128::from(graph.base_cost());
    let percent = |cost: u128| {
        if base > 0 {
            100.0 * (cost as f64 - base as f64) / base as f64
        } else {
            0.0
        }
    };
    let offloaded: u64 = found.offloaded_bytes(graph);
    let met = placed.map_or(found.peak, |p| p.height) <= found.budget;
    if args.json {
        let mut report = json!({
            "graph": graph.name,
            "fixed_bytes": graph.fixed_bytes(),
            "budget_bytes": found.budget,
            "met": met,
            "peak_bytes": found.peak,
            "no_remat_peak_bytes": found.ordered_peak,
            "floor_bytes": found.peak_bound,
            "computes": found.schedule.len(),
            "base_cost": base as f64,
            "cost": found.cost as f64,
            "overhead_pct": percent(found.cost),
            "lower_bound_pct": percent(found.time_bound),
            "seconds": seconds,
        });
        if args.offload.is_some() {
            report["time"] = json!(found.time as f64);
            report["time_overhead_pct"] = json!(percent(found.time));
            report["offloaded_bytes"] = json!(offloaded);
        }
        if let Some(placed) = placed {
            report["slab_bytes"] = json!(placed.height);
        }
        return line(report);
    }
    let bytes = |b: u64| format!("{b} ({})", Bytes(b));
    let mut rows = vec![
        ("peak", bytes(found.peak)),
        (
            "budget",
            format!(
                "{}{}",
                bytes(found.budget),
                if met { "" } else { ", not met" }
            ),
        ),
        ("without recomputation", bytes(found.ordered_peak)),
        ("floor proved", bytes(found.peak_bound)),
        (
            "cost",
            format!(
                "{} ({} runs of {} operations)",
                found.cost,
                found.schedule.len(),
                graph.nodes.iter().filter(|n| !n.persistent).count()
            ),
        ),
        ("overhead", format!("{:.4} %", percent(found.cost))),
        ("lower bound", format!("{:.4} %", percent(found.time_bound))),
    ];
    if args.offload.is_some() {
        rows.push((
            "time",
            format!("{} ({:.4} % over)", found.time, percent(found.time)),
        ));
        rows.push(("offloaded", bytes(offloaded)));
    }
    if let Some(placed) = placed {
        rows.push(("slab", bytes(placed.height)));
    }
    rows.push(("seconds", format!("{seconds:.3}")));
    pairs(&rows)
}
