//! `slabwise plan --frontier`: the time that a smaller slab costs.

use std::fmt::Write;

use serde_json::{Value, json};
use slabwise::{Budget, Bytes, Error, MicroBatched, OffloadedValue, Params, Plan, Result, Session};

use slabwise_models::Model;
use slabwise_planner::table;

use crate::output::{line, save};
use crate::plan::{Args, of_batch};

/// The number of budgets, between the size without recomputation and the least found to suffice.
const BUDGETS: u64 = 10;
/// Recomputed kernels that are named.
const NAMED: usize = 6;

/// A plan under a budget.
struct Point {
    budget: u64,
    slab: u64,
    /// Kernels that recompute values.
    recomputed: usize,
    /// Values that are sent to the host.
    offloaded: usize,
    overhead: f64,
    /// Micro-batches, if kernels run on some.
    micro_batched: Option<MicroBatched>,
    /// The largest of the values that are not kept.
    named: String,
}

pub fn run(args: &Args, model: Model) -> Result<()> {
    let points = points(args, model)?;
    if let Some(path) = &args.svg {
        save(path, svg(args, model, &points).as_bytes())?;
    }
    if args.json {
        let point = |p: &Point| {
            json!({
                "budget_bytes": p.budget,
                "slab_bytes": p.slab,
                "recomputed": p.recomputed,
                "micro_batches": p.micro_batched.map_or(1, |m| m.count),
                "offloaded": p.offloaded,
                "overhead_pct": 100.0 * p.overhead,
            })
        };
        let report = json!({ "model": model.name(), "batch": args.batch(), "frontier": points.iter().map(point).collect::<Value>() });
        return line(report);
    }
    line(format_args!(
        "{} · batch {} · slab against time, as modelled",
        model,
        args.batch()
    ))?;
    let mut rows = vec![
        [
            "",
            "slab",
            "of all",
            "recomputed",
            "micro-batches",
            "offloaded",
            "time",
        ]
        .map(String::from)
        .to_vec(),
    ];
    let all = points.first().map_or(1, |largest| largest.slab.max(1)) as f64;
    for (at, p) in points.iter().enumerate() {
        let share = format!("{:.0} %", 100.0 * p.slab as f64 / all);
        rows.push(vec![
            (at + 1).to_string(),
            Bytes(p.slab).to_string(),
            share,
            p.recomputed.to_string(),
            p.micro_batched
                .map_or(String::new(), |m| format!("{} × {}", m.count, m.examples)),
            p.offloaded.to_string(),
            format!("+{:.1} %", 100.0 * p.overhead),
        ]);
    }
    line(table(&rows, 1))?;
    let named = points
        .iter()
        .enumerate()
        .filter(|(_, p)| !p.named.is_empty());
    named
        .map(|(at, p)| (at + 1, &p.named))
        .try_for_each(|(at, named)| line(format_args!("{at}: {named}")))
}

/// The plan of a training step of so many examples under a budget.
pub fn plan(args: &Args, model: Model, budget: Budget, batch: u32) -> Result<Plan> {
    let params = Params::seeded(0);
    let network = args.rounding.build(model, &params);
    let session = Session::new(args.device, params)?
        .with_budget(budget)
        .with_offload(args.offload);
    let session = session.with_options(args.rounding.options());
    let optimizer = args.optimizer.unwrap_or(model.optimizer());
    of_batch(batch, |batch| {
        network.plan_training(&session, batch, optimizer)
    })
}

/// The plans from the largest slab to the smallest; budgets without a plan are left out.
fn points(args: &Args, model: Model) -> Result<Vec<Point>> {
    let batch = args.batch();
    let all = plan(args, model, Budget::Unlimited, batch)?.slab_bytes();
    let least = match plan(args, model, Budget::Fraction(0.0), batch) {
        Err(Error::Budget { slab, .. }) => slab.0,
        other => other?.slab_bytes(),
    };
    let mut points: Vec<Point> = Vec::new();
    for at in 0..BUDGETS {
        let budget = all - (all - least.min(all)) * at / (BUDGETS - 1);
        let point = |plan: Plan| Point {
            budget,
            slab: plan.slab_bytes(),
            recomputed: plan.budget_report().tasks.len(),
            offloaded: plan.budget_report().offloaded.len(),
            overhead: plan.budget_report().overhead,
            micro_batched: plan.budget_report().micro_batched,
            named: named(&plan),
        };
        match plan(
            args,
            model,
            Budget::Fraction(budget as f64 / all.max(1) as f64),
            batch,
        )
        .map(point)
        {
            Ok(point) if points.last().is_some_and(|last| last.slab == point.slab) => {}
            Ok(point) => points.push(point),
            Err(Error::Budget { .. }) => {}
            Err(other) => return Err(other),
        }
    }
    Ok(points)
}

/// The kernels that run on micro-batches, and the largest of the values that are recomputed or sent
/// to the host, with their consumers.
fn named(plan: &Plan) -> String {
    let mut recomputed = plan.recomputed();
    recomputed.sort_by_key(|&(_, bytes, _)| std::cmp::Reverse(bytes));
    let named = recomputed
        .iter()
        .take(NAMED)
        .map(|(name, bytes, reader)| format!("{name}, {bytes} not kept for {reader}"));
    let mut text: Vec<String> = plan
        .budget_report()
        .micro_batched
        .map(|micro_batched| micro_batched.to_string())
        .into_iter()
        .chain(named)
        .collect();
    let mut sent: Vec<&OffloadedValue> = plan.budget_report().offloaded.iter().collect();
    sent.sort_by_key(|sent| std::cmp::Reverse(sent.bytes));
    text.extend(sent.iter().take(NAMED).map(ToString::to_string));
    let left = recomputed.len().saturating_sub(NAMED) + sent.len().saturating_sub(NAMED);
    if left > 0 {
        text.push(format!("{left} more"));
    }
    text.join("; ")
}

/// Slab to the right, time upwards, a dot for each plan.
fn svg(args: &Args, model: Model, points: &[Point]) -> String {
    let (width, height, margin) = (640.0, 400.0, 60.0);
    let right = points.iter().map(|p| p.slab).max().unwrap_or(1).max(1) as f64;
    let top = points.iter().map(|p| p.overhead).fold(0.01, f64::max);
    let x = |slab: u64| margin + (width - 1.5 * margin) * slab as f64 / right;
    let y = |overhead: f64| height - margin - (height - 2.0 * margin) * overhead / top;
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" font-family=\"sans-serif\" font-size=\"12\">\n\
         <rect width=\"{width}\" height=\"{height}\" fill=\"#ffffff\"/>\n\
         <text x=\"{margin}\" y=\"26\" font-size=\"15\">{} · batch {} · slab against time, as modelled</text>\n",
        model,
        args.batch()
    );
    // Writing to a string cannot fail.
    for quarter in 0..=4 {
        let (slab, overhead) = (
            (right * f64::from(quarter) / 4.0) as u64,
            top * f64::from(quarter) / 4.0,
        );
        let (at, up, bottom) = (x(slab), y(overhead), height - margin);
        let _ = writeln!(
            out,
            "<path d=\"M{at:.1} {margin}V{bottom}M{margin} {up:.1}H{:.1}\" stroke=\"#e5e7eb\"/>",
            x(right as u64)
        );
        let _ = writeln!(
            out,
            "<text x=\"{at:.1}\" y=\"{}\" text-anchor=\"middle\">{}</text>",
            bottom + 18.0,
            Bytes(slab)
        );
        let _ = writeln!(
            out,
            "<text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">+{:.1} %</text>",
            margin - 6.0,
            up + 4.0,
            100.0 * overhead
        );
    }
    let path: Vec<String> = points
        .iter()
        .map(|p| format!("{:.1},{:.1}", x(p.slab), y(p.overhead)))
        .collect();
    let _ = writeln!(
        out,
        "<polyline points=\"{}\" fill=\"none\" stroke=\"#5b93bf\" stroke-width=\"2\"/>",
        path.join(" ")
    );
    for p in points {
        let micro_batched = p
            .micro_batched
            .map_or(String::new(), |micro_batched| format!(" · {micro_batched}"));
        let tip = format!(
            "{} · {} kernels recomputed{micro_batched} · {} values offloaded · +{:.1} % time",
            Bytes(p.slab),
            p.recomputed,
            p.offloaded,
            100.0 * p.overhead
        );
        let _ = writeln!(
            out,
            "<circle cx=\"{:.1}\" cy=\"{:.1}\" r=\"4\" fill=\"#5b93bf\"><title>{tip}</title></circle>",
            x(p.slab),
            y(p.overhead)
        );
    }
    out + "</svg>\n"
}
