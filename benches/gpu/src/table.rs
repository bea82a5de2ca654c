//! Results for people.

use std::collections::BTreeMap;
use std::fmt::Write;

use serde_json::{Map, Value};

use crate::items::{
    CONVOLUTIONS, MODELS, PRECISIONS, PRODUCTS, ROWS, STORED, TORCH_IMAGE_MODES, TORCH_MODES,
};
use crate::results::latest;

/// The device and the versions, on a line.
pub fn device(about: &Map<String, Value>) -> String {
    let text = |value: &Value| {
        value
            .as_str()
            .map_or_else(|| value.to_string(), String::from)
    };
    let versions = about.get("versions").and_then(Value::as_object);
    let versions = versions
        .into_iter()
        .flatten()
        .map(|(name, value)| format!("{name} {}", text(value)));
    let device = ["device", "driver"].map(|name| about.get(name).map_or_else(String::new, text));
    format!(
        "{}, driver {}, {}",
        device[0],
        device[1],
        versions.collect::<Vec<_>>().join(", ")
    )
}

/// The line of an error that gives the reason. If the status is not `failed`, it is the first line;
/// otherwise the line after the place of a panic, a line that calls itself an error, or the last.
fn gist(line: &Value) -> &str {
    let lines: Vec<&str> = line["error"].as_str().unwrap_or_default().lines().collect();
    if line["status"] != "failed" {
        return lines.first().copied().unwrap_or_default();
    }
    let panic = lines
        .iter()
        .rposition(|line| line.contains("panicked at "))
        .and_then(|at| lines.get(at + 1));
    let named = || {
        lines
            .iter()
            .rfind(|line| line.contains("rror: ") || line.contains(" SUMMARY: "))
    };
    panic
        .or_else(named)
        .or(lines.last())
        .copied()
        .unwrap_or_default()
}

/// A line of progress for a new result.
pub fn progress(result: &Value, at: usize, of: usize) -> String {
    let name = result["item"].as_str().unwrap_or_default();
    let status = result["status"].as_str().unwrap_or_default();
    let told = match result["ms"].as_f64() {
        Some(ms) => format!("{ms:.4} ms"),
        None => gist(result).chars().take(140).collect(),
    };
    format!(
        "[{at}/{of}] {name:<44} {status:<8} {:>6.1} s  {told}",
        result["seconds"].as_f64().unwrap_or(0.0)
    )
}

/// Whether an item failed.
pub fn is_bad(line: &Value) -> bool {
    ["failed", "crashed", "timeout"]
        .iter()
        .any(|bad| line["status"] == *bad)
}

/// The last result of each item, as tables, and the number of items that were not started.
pub fn render(lines: &[Value], left: usize) -> String {
    let results: BTreeMap<&str, &Value> = latest(lines)
        .into_iter()
        .map(|line| (line["item"].as_str().unwrap_or_default(), line))
        .collect();
    let mut text = String::new();
    steps(&mut text, &results);
    pairs(&mut text, &results);
    others(&mut text, &results);
    let count = |status: &str| {
        results
            .values()
            .filter(|line| line["status"] == status)
            .count()
    };
    let counts = ["ok", "failed", "crashed", "timeout", "skipped"]
        .map(|status| format!("{} {status}", count(status)));
    let _ = writeln!(
        text,
        "\n{}{}",
        counts.join(", "),
        if left > 0 {
            format!(", {left} not begun")
        } else {
            String::new()
        }
    );
    for (name, line) in results.iter().filter(|(_, line)| is_bad(line)) {
        let _ = writeln!(
            text,
            "{} {name}: {}",
            line["status"].as_str().unwrap_or_default(),
            gist(line)
        );
    }
    text.trim_end().into()
}

fn ms(results: &BTreeMap<&str, &Value>, name: &str) -> Option<f64> {
    results
        .get(name)
        .filter(|line| line["status"] == "ok")
        .and_then(|line| line["ms"].as_f64())
}

fn mib(results: &BTreeMap<&str, &Value>, name: &str) -> String {
    let bytes = results
        .get(name)
        .filter(|line| line["status"] == "ok")
        .and_then(|line| line["bytes"].as_f64());
    bytes.map_or_else(
        || "-".into(),
        |bytes| format!("{:.0}", bytes / f64::from(1 << 20)),
    )
}

/// Milliseconds, and their ratio to those of slabwise.
fn beside(time: Option<f64>, own: Option<f64>) -> String {
    match (time, own) {
        (Some(time), Some(own)) => format!("{time:.3} ({:.2}×)", time / own),
        (Some(time), None) => format!("{time:.3}"),
        (None, _) => "-".into(),
    }
}

/// Steps: a row for each model and precision, a column for each framework; then their bytes.
fn steps(text: &mut String, results: &BTreeMap<&str, &Value>) {
    let torch = TORCH_MODES.iter().chain(&TORCH_IMAGE_MODES);
    // The name of each, and the width of its column.
    let peers: Vec<(String, usize)> = torch
        .map(|mode| format!("torch-{mode}"))
        .chain(["jax".into()])
        .map(|peer| {
            let width = peer.len().max(22) + 2;
            (peer, width)
        })
        .collect();
    let mut head = format!("\n{:<18}{:>12}{:>12}", "step, ms", "slabwise", "no graph");
    head.extend(peers.iter().map(|(peer, width)| format!("{peer:>width$}")));
    let _ = write!(head, "{:>36}", "MiB: own / planned / least peer");
    let mut rows = String::new();
    for (model, _, _) in MODELS {
        for precision in PRECISIONS {
            let name = |framework: &str| format!("step/{model}/{precision}/{framework}");
            let own = ms(results, &name("slabwise"));
            let times: Vec<Option<f64>> = peers
                .iter()
                .map(|(peer, _)| ms(results, &name(peer)))
                .collect();
            let bare = ms(results, &name("slabwise-no-graph"));
            if own.or(bare).is_none() && times.iter().flatten().next().is_none() {
                continue;
            }
            let own_text = own.map_or_else(|| "-".into(), |ms| format!("{ms:.3}"));
            let bare_text = bare.map_or_else(|| "-".into(), |ms| format!("{ms:.3}"));
            let _ = write!(
                rows,
                "{:<18}{own_text:>12}{bare_text:>12}",
                format!("{model} {precision}")
            );
            rows.extend(
                times
                    .iter()
                    .zip(&peers)
                    .map(|(&time, (_, width))| format!("{:>width$}", beside(time, own))),
            );
            let planned = results
                .get(name("slabwise").as_str())
                .and_then(|line| line["planned_bytes"].as_f64());
            let planned = planned.map_or_else(
                || "-".into(),
                |bytes| format!("{:.0}", bytes / f64::from(1 << 20)),
            );
            let least = peers
                .iter()
                .filter_map(|(peer, _)| mib(results, &name(peer)).parse::<f64>().ok())
                .fold(f64::INFINITY, f64::min);
            let least = if least.is_finite() {
                least.to_string()
            } else {
                "-".into()
            };
            let _ = writeln!(
                rows,
                "{:>36}",
                format!("{} / {planned} / {least}", mib(results, &name("slabwise")))
            );
        }
    }
    if !rows.is_empty() {
        let _ = writeln!(text, "{head}\n{}", rows.trim_end());
    }
}

/// Products and convolutions: slabwise beside PyTorch.
fn pairs(text: &mut String, results: &BTreeMap<&str, &Value>) {
    let products = PRODUCTS.iter().map(|n| format!("product/{n}"));
    let convolutions = CONVOLUTIONS.iter().map(|(name, _)| format!("conv/{name}"));
    let rows_of = ROWS.iter().map(|n| format!("row/{n}"));
    let of = |precisions: &'static [&str]| move |name: String| (name, precisions);
    let all = products.map(of(&PRECISIONS));
    let all = all.chain(rows_of.map(of(&STORED)));
    let mut rows = String::new();
    for (name, precisions) in all.chain(convolutions.map(of(&PRECISIONS))) {
        for precision in precisions {
            let [own, torch] = ["slabwise", "torch"]
                .map(|framework| ms(results, &format!("{name}/{precision}/{framework}")));
            if own.or(torch).is_some() {
                let own_text = own.map_or_else(|| "-".into(), |ms| format!("{ms:.4}"));
                let line = results.get(format!("{name}/{precision}/slabwise").as_str());
                let figure = |name: &str| line.and_then(|line| line[name].as_f64());
                let rate = match (figure("tflops"), figure("gb_per_s")) {
                    (Some(rate), _) => format!("{rate:.1} Tflop/s"),
                    (None, Some(rate)) => format!("{rate:.0} GB/s"),
                    (None, None) => String::new(),
                };
                let _ = writeln!(
                    rows,
                    "{:<36}{own_text:>12}{rate:>16}{:>24}",
                    format!("{name} {precision}"),
                    beside(torch, own)
                );
            }
        }
    }
    if !rows.is_empty() {
        let _ = write!(
            text,
            "\n{:<36}{:>12}{:>16}{:>24}\n{rows}",
            "product, ms", "slabwise", "rate", "torch"
        );
    }
}

/// Bandwidths, launches and budgets.
fn others(text: &mut String, results: &BTreeMap<&str, &Value>) {
    let ways = ["bandwidth/", "launches/", "budget/", "bytes/"];
    for (name, line) in results.iter().filter(|(name, line)| {
        line["status"] == "ok" && ways.iter().any(|way| name.starts_with(way))
    }) {
        let figures = [
            "ms",
            "gb_per_s",
            "us_per_launch",
            "bytes",
            "planned_bytes",
            "slab_bytes",
            "slab_without_bytes",
            "same_bits",
        ];
        let told = figures.iter().filter_map(|figure| match &line[*figure] {
            Value::Number(n) if n.is_f64() => Some(format!("{figure} {:.3}", n.as_f64()?)),
            Value::Null => None,
            other => Some(format!("{figure} {other}")),
        });
        let _ = writeln!(text, "{name}: {}", told.collect::<Vec<_>>().join(", "));
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn times_stand_beside_those_of_slabwise() {
        let ok = |item: &str, ms: f64, mib: u64| json!({ "item": item, "status": "ok", "ms": ms, "bytes": mib << 20 });
        let mut lines = vec![
            ok("step/gpt/f32/slabwise", 9.0, 90),
            ok("step/gpt/f32/torch-graph", 30.0, 120),
            ok("step/gpt/f32/jax", 15.0, 100),
            ok("step/cnn/tf32/slabwise", 0.5, 30),
            ok("step/cnn/tf32/torch-graph-channels-last", 0.4, 200),
            json!({ "item": "step/gpt/f32/torch-eager", "status": "crashed", "error": "signal 9" }),
            ok("product/4096/bf16/slabwise", 0.25, 96),
            ok("product/4096/bf16/torch", 0.2, 96),
            json!({ "item": "row/2048/4bits/slabwise", "status": "ok", "ms": 0.01, "gb_per_s": 250.4 }),
        ];
        // A later result of an item replaces an earlier one.
        lines.push(ok("step/gpt/f32/slabwise", 10.0, 80));
        let text = render(&lines, 3);
        let row = |name: &str| {
            text.lines()
                .find(|line| line.starts_with(name))
                .unwrap_or_else(|| panic!("{name}: {text}"))
                .to_string()
        };
        let words = |name: &str| {
            row(name)
                .split_whitespace()
                .map(String::from)
                .collect::<Vec<_>>()
                .join(" ")
        };
        assert_eq!(
            words("gpt f32"),
            "gpt f32 10.000 - - - - 30.000 (3.00×) - - - 15.000 (1.50×) 80 / - / 100"
        );
        assert_eq!(
            words("cnn tf32"),
            "cnn tf32 0.500 - - - - - - - 0.400 (0.80×) - 30 / - / 200"
        );
        assert_eq!(
            words("product/4096 bf16"),
            "product/4096 bf16 0.2500 0.200 (0.80×)"
        );
        assert_eq!(words("row/2048 4bits"), "row/2048 4bits 0.0100 250 GB/s -");
        assert!(
            text.contains("8 ok, 0 failed, 1 crashed, 0 timeout, 0 skipped, 3 not begun"),
            "{text}"
        );
        assert!(
            text.ends_with("crashed step/gpt/f32/torch-eager: signal 9"),
            "{text}"
        );
    }

    #[test]
    fn errors_are_shown_by_the_line_of_their_reason() {
        let failed = |error: &str| gist(&json!({ "status": "failed", "error": error })).to_string();
        assert_eq!(
            failed(
                "runs on the GPU\nthread 'a' panicked at a.rs:1:1:\nleft is not right\nnote: run with"
            ),
            "left is not right"
        );
        assert_eq!(
            failed("Traceback\n  a\nValueError: no\n----\nFor simplicity, frames are left out."),
            "ValueError: no"
        );
        assert_eq!(failed("one\ntwo"), "two");
    }
}
