//! `slabwise plan --largest-batch`: the largest batch whose training step fits some bytes.

use serde_json::{Value, json};
use slabwise::{Budget, Bytes, Error, Plan, Result};

use slabwise_models::Model;
use slabwise_planner::table;

use crate::frontier::plan;
use crate::output::line;
use crate::plan::Args;

/// The largest batch that is tried.
const BATCH_MAX: u32 = 1 << 24;

/// A batch that fits, and the plan of its step.
struct Fit {
    batch: u32,
    plan: Plan,
}

/// The bytes of a step: weights, state and slab.
fn needed(plan: &Plan) -> u64 {
    let persistent = plan.persistent();
    let all = [persistent.weights, persistent.state, plan.slab_bytes()];
    all.into_iter().fold(0, u64::saturating_add)
}

/// The largest batch for which `fits` gives a plan, from `least` on: bytes grow with the batch, so
/// that it is found by doubling, and then by bisection. `None` if `least` does not fit.
fn largest(least: u32, fits: impl Fn(u32) -> Result<Option<Plan>>) -> Result<Option<Fit>> {
    let fit = |batch: u32| Ok::<_, Error>(fits(batch)?.map(|plan| Fit { batch, plan }));
    let Some(mut best) = fit(least)? else {
        return Ok(None);
    };
    let mut beyond = None;
    while beyond.is_none() && best.batch < BATCH_MAX {
        let next = (2 * best.batch).min(BATCH_MAX);
        match fit(next)? {
            Some(larger) => best = larger,
            None => beyond = Some(next),
        }
    }
    let mut beyond = beyond.unwrap_or(best.batch + 1);
    while beyond - best.batch > 1 {
        let middle = best.batch + (beyond - best.batch) / 2;
        match fit(middle)? {
            Some(larger) => best = larger,
            None => beyond = middle,
        }
    }
    Ok(Some(best))
}

pub fn run(args: &Args, model: Model, room: Bytes) -> Result<()> {
    let kept = largest(1, |batch| {
        let plan = plan(args, model, Budget::Unlimited, batch)?;
        Ok((needed(&plan) <= room.0).then_some(plan))
    })?;
    let within = |batch| plan(args, model, Budget::Bytes(room), batch);
    let least = kept.as_ref().map_or(1, |fit| fit.batch);
    let recomputed = largest(least, |batch| match within(batch) {
        Err(Error::Budget { .. }) => Ok(None),
        planned => planned.map(Some),
    })?;
    let Some(recomputed) = recomputed else {
        // The error of one example names the bytes that it needs.
        within(least)?;
        return Err(Error::Internal("a batch fits that did not".into()));
    };
    let all = [
        ("all values kept", kept),
        ("within the budget", Some(recomputed)),
    ];
    let all = all
        .iter()
        .filter_map(|(how, fit)| Some((how, fit.as_ref()?)));
    if args.json {
        let of = |(how, fit): (&&str, &Fit)| {
            let report = json!({
                "batch": fit.batch,
                "slab_bytes": fit.plan.slab_bytes(),
                "persistent_bytes": needed(&fit.plan) - fit.plan.slab_bytes(),
                "overhead_pct": 100.0 * fit.plan.budget_report().overhead,
            });
            (how.replace(' ', "_"), report)
        };
        let fits: serde_json::Map<String, Value> = all.map(of).collect();
        return line(json!({ "model": model.name(), "bytes": room.0, "largest_batch": fits }));
    }
    line(format_args!(
        "{model} · largest batch of a step within {room}"
    ))?;
    let header = ["", "batch", "weights and state", "slab", "time"].map(String::from);
    let row = |(how, fit): (&&str, &Fit)| {
        let slab = fit.plan.slab_bytes();
        vec![
            (*how).to_string(),
            fit.batch.to_string(),
            Bytes(needed(&fit.plan) - slab).to_string(),
            Bytes(slab).to_string(),
            format!("+{:.1} %", 100.0 * fit.plan.budget_report().overhead),
        ]
    };
    let rows: Vec<Vec<String>> = [header.to_vec()].into_iter().chain(all.map(row)).collect();
    line(table(&rows, 1))
}
