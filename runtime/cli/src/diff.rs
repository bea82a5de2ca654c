//! `slabwise diff`: the reasons why a plan grew.

use std::path::PathBuf;
use std::process::ExitCode;

use serde_json::{Value, json};
use slabwise::{Bytes, Result};
use slabwise_planner::{shortened, table};

use crate::output::{bad_input, line};
use crate::plan_diff::{Both, Diff, Holding, PlanFile};

#[derive(clap::Args)]
pub struct Args {
    /// A plan, as `slabwise plan --json` writes it; gzipped or not
    a: PathBuf,
    /// The plan to compare with it
    b: PathBuf,
    /// One JSON object instead of text
    #[arg(long)]
    json: bool,
}

/// Rows of each list that are shown.
const SHOWN: usize = 12;
/// Most characters of a cell: names come from a file, so their length is not under control.
const CELL_MAX: usize = 100;

/// A file that cannot be read or is malformed gives exit code 2.
pub fn run(args: &Args) -> Result<ExitCode> {
    let mut plans = Vec::new();
    for path in [&args.a, &args.b] {
        match PlanFile::read_file(path) {
            Ok(plan) => plans.push(plan),
            Err(error) => return bad_input(error),
        }
    }
    let [a, b] = [&plans[0], &plans[1]];
    let diff = Diff::of(a, b);
    if args.json {
        line(report(a, b, &diff))?
    } else {
        show(a, b, &diff)?
    }
    Ok(ExitCode::SUCCESS)
}

/// A difference of bytes, with its sign.
fn signed(bytes: i128) -> String {
    let magnitude = Bytes(u64::try_from(bytes.unsigned_abs()).unwrap_or(u64::MAX));
    match bytes {
        0 => "0 B".into(),
        1.. => format!("+{magnitude}"),
        _ => format!("−{magnitude}"),
    }
}

fn change(a: u64, b: u64) -> String {
    signed(i128::from(b) - i128::from(a))
}

fn show(a: &PlanFile, b: &PlanFile, diff: &Diff) -> Result<()> {
    let totals = |name: &str, a: u64, b: u64| {
        vec![
            name.to_string(),
            Bytes(a).to_string(),
            Bytes(b).to_string(),
            change(a, b),
        ]
    };
    let rows = [
        ["", "a", "b", "change"].map(String::from).to_vec(),
        totals("slab", a.slab_bytes, b.slab_bytes),
        totals("lower bound", a.lower_bound_bytes, b.lower_bound_bytes),
        totals(
            "without reuse",
            a.without_reuse_bytes,
            b.without_reuse_bytes,
        ),
        totals("live at the peak", a.peak.bytes, b.peak.bytes),
    ];
    line(table(&rows, 1))?;
    let kernel = |plan: &PlanFile| {
        format!(
            "step {} {}",
            plan.peak.step,
            shortened(&plan.peak.kernel, CELL_MAX)
        )
    };
    line(format_args!("peak: {} in a, {} in b", kernel(a), kernel(b)))?;
    if diff.is_empty() {
        return line("no buffer differs");
    }
    let c = &diff.causes;
    let causes = [
        ("new buffers", c.new),
        ("buffers that are gone", c.gone),
        ("other sizes", c.resized),
        ("alive there now", c.kept),
        ("alive there no more", c.dropped),
    ];
    let causes: Vec<String> = causes
        .iter()
        .filter(|(_, bytes)| *bytes != 0)
        .map(|(name, bytes)| format!("{name} {}", signed(*bytes)))
        .collect();
    line(format_args!(
        "the peak's change: {}",
        if causes.is_empty() {
            "none".into()
        } else {
            causes.join(", ")
        }
    ))?;
    let held = |of: &[Holding]| -> Vec<[String; 4]> {
        of.iter()
            .map(|h| {
                [
                    shown_name(&h.name),
                    Bytes(h.a).to_string(),
                    Bytes(h.b).to_string(),
                    change(h.a, h.b),
                ]
            })
            .collect()
    };
    list(
        "at the peaks",
        ["", "a", "b", "change"],
        held(&diff.holders),
    )?;
    list(
        "at the peaks, by layer",
        ["", "a", "b", "change"],
        held(&diff.layers),
    )?;
    let single = |file: &PlanFile, of: &[usize]| -> Vec<[String; 4]> {
        let row = |&at: &usize| {
            let row = &file.buffers[at];
            [
                row.name.clone(),
                Bytes(row.bytes).to_string(),
                format!("steps {} to {}", row.start, row.end.saturating_sub(1)),
                row.source.clone(),
            ]
        };
        of.iter().map(row).collect()
    };
    list(
        "new in b",
        ["", "bytes", "alive", "line"],
        single(b, &diff.new),
    )?;
    list(
        "gone",
        ["", "bytes", "alive", "line"],
        single(a, &diff.gone),
    )?;
    let pair = |of: &Both| (&a.buffers[of.a], &b.buffers[of.b]);
    let resized = diff.resized.iter().map(|of| {
        let (old, now) = pair(of);
        [
            now.name.clone(),
            Bytes(old.bytes).to_string(),
            Bytes(now.bytes).to_string(),
            change(old.bytes, now.bytes),
        ]
    });
    list("other sizes", ["", "a", "b", "change"], resized.collect())?;
    let longer = diff.longer.iter().map(|of| {
        let (old, now) = pair(of);
        let until = format!("to step {} {}", now.end.saturating_sub(1), now.last);
        [
            now.name.clone(),
            Bytes(now.bytes).to_string(),
            format!("{} → {} steps", old.steps(), now.steps()),
            until,
        ]
    });
    list(
        "alive for longer",
        ["", "bytes", "steps", "until"],
        longer.collect(),
    )
}

/// Layer names are empty outside of layers.
fn shown_name(name: &str) -> String {
    if name.is_empty() {
        "(no layer)".into()
    } else {
        name.into()
    }
}

/// A list under its name; nothing if it is empty, and truncated if it is long.
fn list(name: &str, head: [&str; 4], all: Vec<[String; 4]>) -> Result<()> {
    if all.is_empty() {
        return Ok(());
    }
    let more = all.len().saturating_sub(SHOWN);
    let mut rows = vec![head.map(String::from).to_vec()];
    rows[0][0] = format!("{name} ({})", all.len());
    rows.extend(
        all.into_iter()
            .take(SHOWN)
            .map(|row| row.iter().map(|cell| shortened(cell, CELL_MAX)).collect()),
    );
    line(format_args!("\n{}", table(&rows, 1)))?;
    if more > 0 {
        line(format_args!("and {more} more"))
    } else {
        Ok(())
    }
}

fn report(a: &PlanFile, b: &PlanFile, diff: &Diff) -> Value {
    let held = |of: &[Holding]| {
        of.iter()
            .map(|h| json!({ "name": h.name, "a_bytes": h.a, "b_bytes": h.b }))
            .collect::<Value>()
    };
    let both = |of: &[Both]| {
        of.iter()
            .map(|of| json!({ "a": a.buffers[of.a], "b": b.buffers[of.b] }))
            .collect::<Value>()
    };
    let rows = |file: &PlanFile, of: &[usize]| {
        of.iter()
            .map(|&at| json!(file.buffers[at]))
            .collect::<Value>()
    };
    let signed = |bytes: i128| {
        json!(i64::try_from(bytes).unwrap_or(if bytes < 0 { i64::MIN } else { i64::MAX }))
    };
    let c = &diff.causes;
    let totals = |f: &PlanFile| {
        json!({
            "slab_bytes": f.slab_bytes, "lower_bound_bytes": f.lower_bound_bytes, "without_reuse_bytes": f.without_reuse_bytes, "peak": f.peak,
        })
    };
    json!({
        "a": totals(a),
        "b": totals(b),
        "slab_change_bytes": signed(i128::from(b.slab_bytes) - i128::from(a.slab_bytes)),
        "peak_change_bytes": signed(c.sum()),
        "causes": {
            "new_bytes": signed(c.new),
            "gone_bytes": signed(c.gone),
            "resized_bytes": signed(c.resized),
            "kept_bytes": signed(c.kept),
            "dropped_bytes": signed(c.dropped),
        },
        "holders": held(&diff.holders),
        "layers": held(&diff.layers),
        "new": rows(b, &diff.new),
        "gone": rows(a, &diff.gone),
        "resized": both(&diff.resized),
        "longer": both(&diff.longer),
    })
}
