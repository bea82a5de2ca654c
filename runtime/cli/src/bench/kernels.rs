//! The speed of the machine, and of each kernel of a step against it.

use serde_json::{Value, json};
use slabwise::{KernelFamily, Params, Profile, Result, Session};

use super::{Args, fields};
use crate::output::line;

/// Adds the kernels of a step to a report.
pub(super) fn add(profile: &Profile, report: &mut Value) {
    let list = profile.kernels.iter().map(|kernel| {
        let mut one = json!({
            "name": kernel.name,
            "family": name(kernel.family),
            "us": kernel.seconds * 1e6,
            "flops": kernel.flops,
            "bytes": kernel.bytes,
            "gflops": kernel.flops as f64 / kernel.seconds / 1e9,
            "gbytes": kernel.bytes as f64 / kernel.seconds / 1e9,
        });
        if let Some(least) = kernel.least_seconds {
            one["floor_us"] = json!(least * 1e6);
            one["roofline_pct"] = json!(100.0 * least / kernel.seconds);
        }
        one
    });
    report["kernels"] = Value::Array(list.collect());
    if let Some(roofline) = &profile.roofline {
        report["roofline"] = json!(roofline.source);
        let losses = profile.losses();
        let losses = losses.iter().map(|loss| {
            json!({
                "of": loss.name,
                "us": loss.seconds * 1e6,
                "floor_us": loss.floor * 1e6,
                "lost_us": loss.lost() * 1e6,
            })
        });
        report["losses"] = Value::Array(losses.collect());
    }
}

fn name(family: KernelFamily) -> &'static str {
    match family {
        KernelFamily::Product => "product",
        KernelFamily::Convolution => "convolution",
        KernelFamily::Other => "other",
    }
}

/// The speed of this machine: with one thread and with all, or with so many as are asked for.
pub(super) fn peak(args: &Args) -> Result<()> {
    let all = match args.threads {
        Some(threads) => threads as usize,
        None => Session::new(args.device, Params::seeded(0))?.threads(),
    };
    let mut reports = Vec::new();
    for threads in [1, all] {
        if reports.len() == 1 && all == 1 {
            break;
        }
        let session = Session::new(args.device, Params::seeded(0))?.with_threads(threads);
        let Some(roofline) = session.roofline() else {
            continue;
        };
        reports.push(json!({
            "device": session.device().to_string(),
            "threads": threads,
            "gflops": roofline.flops[0] / 1e9,
            "gbytes": roofline.bytes / 1e9,
            "source": roofline.source,
        }));
    }
    if args.json {
        return line(Value::Array(reports));
    }
    for report in &reports {
        fields(report)?;
    }
    Ok(())
}
