//! `slabwise plan`: what a training step needs.

use std::path::PathBuf;

use serde_json::json;
use slabwise::models::{Model, OptimizerKind};
use slabwise::{Budget, Device, Offload, Params, Result, Session};

use crate::frontier;
use crate::output::line;

#[derive(clap::Args)]
pub struct Args {
    /// A built-in model, such as cnn, resnet50, gpt2 or gpt:layers=6,width=384
    pub model: Model,
    /// Examples in a step
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..))]
    pub batch: u32,
    /// The most bytes that weights, state and slab may take, such as 24MiB, or a part of the slab that computing nothing
    /// twice needs, such as 50%
    #[arg(long)]
    budget: Option<Budget>,
    /// Send values to the host as well to keep the budget, over a link of this speed in each direction, such as 16GB/s
    #[arg(long, value_name = "LINK")]
    pub offload: Option<Offload>,
    /// auto, cpu or cuda:N
    #[arg(long, default_value = "auto")]
    pub device: Device,
    /// sgd, adam or adamw; the model's own unless given
    #[arg(long)]
    pub optimizer: Option<OptimizerKind>,
    /// Write the plan, or with --frontier the budgets, as a picture
    #[arg(long, value_name = "FILE")]
    pub svg: Option<PathBuf>,
    /// What smaller slabs cost in time: plans for ten budgets, and what they compute again
    #[arg(long, conflicts_with_all = ["budget", "kernels"])]
    frontier: bool,
    /// List the kernels in the order they run
    #[arg(long)]
    kernels: bool,
    /// One JSON object instead of text
    #[arg(long)]
    pub json: bool,
}

pub fn run(args: &Args) -> Result<()> {
    if args.frontier {
        return frontier::run(args);
    }
    let params = Params::seeded(0);
    let network = args.model.build(&params);
    let session = Session::new(args.device, params)?.with_budget(args.budget).with_offload(args.offload);
    let plan = network.plan_training(&session, args.batch, args.optimizer.unwrap_or(args.model.optimizer()))?;
    if let Some(path) = &args.svg {
        plan.write_svg(path)?;
    }
    if !args.json {
        line(format_args!("{} · batch {}", args.model, args.batch))?;
        line(&plan)?;
        if args.kernels {
            for (at, name) in plan.steps().enumerate() {
                line(format_args!("{at:>5}  {name}"))?;
            }
        }
        return Ok(());
    }
    let persistent = plan.persistent();
    let mut report = json!({
        "model": args.model.name(),
        "batch": args.batch,
        "slab_bytes": plan.slab_bytes(),
        "lower_bound_bytes": plan.lower_bound_bytes(),
        "without_reuse_bytes": plan.without_reuse_bytes(),
        "persistent_bytes": persistent.weights + persistent.state,
        "host_bytes": plan.host_bytes(),
        "kernels": plan.kernels(),
        "compile_s": plan.compile_seconds(),
    });
    if args.offload.is_some() {
        let sent = plan.again().sent.iter().map(|sent| {
            json!({
                "buffer": sent.name,
                "bytes": sent.bytes.0,
                "after": sent.used,
                "before": sent.read,
                "steps": sent.steps,
                "copying_s": sent.copying_s,
                "computing_s": sent.computing_s,
            })
        });
        report["offloaded"] = sent.collect();
        report["overhead_pct"] = json!(100.0 * plan.again().overhead);
    }
    if args.kernels {
        report["kernel_names"] = plan.steps().collect();
    }
    line(report)
}
