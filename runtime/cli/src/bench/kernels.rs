//! The speed of the machine, and of each kernel of a step against it.

use serde_json::{Value, json};
use slabwise::{KernelFamily, KernelTime, Params, Result, Roofline, Session};
use slabwise_planner::shortened;

use super::{Args, fields};
use crate::output::{line, table};

/// Most characters of a kernel's name in the table.
const NAME_MAX: usize = 56;

/// The kernels of a training step, measured.
pub(super) struct Kernels {
    pub times: Vec<KernelTime>,
    pub roofline: Option<Roofline>,
    /// Seconds of the fastest step.
    pub step_seconds: f64,
}

/// Seconds of kernels of one family: the sum of their times, and of their floors.
struct Loss {
    name: &'static str,
    seconds: f64,
    floor: f64,
}

impl Loss {
    fn lost(&self) -> f64 {
        self.seconds - self.floor
    }
}

impl Kernels {
    /// The time of each family and between the kernels, which is the part of the fastest step that
    /// the fastest times of the kernels leave: the copies of inputs, launches, and the waits of
    /// threads for each other. A kernel that is faster than its floor, because caches hold its
    /// operands, loses nothing.
    fn losses(&self) -> Vec<Loss> {
        let families = [
            ("products", KernelFamily::Product),
            ("convolutions", KernelFamily::Convolution),
            ("memory-bound kernels", KernelFamily::Other),
        ];
        let all: f64 = self.times.iter().map(|kernel| kernel.seconds).sum();
        let of = |(name, family)| {
            let kernels = self.times.iter().filter(|kernel| kernel.family == family);
            let sum = |sum: Loss, kernel: &KernelTime| Loss {
                seconds: sum.seconds + kernel.seconds,
                floor: sum.floor + kernel.least_seconds.unwrap_or(0.0).min(kernel.seconds),
                ..sum
            };
            let none = Loss {
                name,
                seconds: 0.0,
                floor: 0.0,
            };
            kernels.fold(none, sum)
        };
        let between = Loss {
            name: "between kernels",
            seconds: (self.step_seconds - all).max(0.0),
            floor: 0.0,
        };
        families.into_iter().map(of).chain([between]).collect()
    }

    /// Adds these kernels to a report.
    pub fn add_to(&self, report: &mut Value) {
        let list = self.times.iter().map(|kernel| {
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
        if let Some(roofline) = &self.roofline {
            report["roofline"] = json!(roofline.source);
            let losses = self.losses();
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

    /// A row for each kernel, and one for each family.
    pub fn table(&self) -> String {
        let head = [
            "kernel",
            "µs",
            "MFLOP",
            "MB",
            "GFLOP/s",
            "GB/s",
            "floor µs",
            "of floor",
        ];
        let mut rows = vec![head.map(String::from).to_vec()];
        for kernel in &self.times {
            let (seconds, flops, bytes) =
                (kernel.seconds, kernel.flops as f64, kernel.bytes as f64);
            let mut row = vec![shortened(&kernel.name, NAME_MAX).to_string()];
            row.extend([1e6 * seconds, flops / 1e6, bytes / 1e6].map(|x| format!("{x:.1}")));
            row.extend([flops, bytes].map(|x| format!("{:.1}", x / seconds / 1e9)));
            if let Some(least) = kernel.least_seconds {
                row.push(format!("{:.1}", 1e6 * least));
                row.push(format!("{:.0} %", 100.0 * least / seconds));
            }
            rows.push(row);
        }
        let mut text = table(&rows);
        if let Some(roofline) = &self.roofline {
            let losses = self.losses().into_iter().map(|loss| {
                format!(
                    "{} {:.1} of {:.1}",
                    loss.name,
                    1e6 * loss.lost(),
                    1e6 * loss.seconds
                )
            });
            let losses: Vec<String> = losses.collect();
            text += &format!("\n\nfloors: {}\n", roofline.source);
            text += &format!("lost above the floors, µs: {}\n", losses.join(" · "));
        }
        text
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
