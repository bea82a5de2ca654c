//! `slabwise bench compile`: how long each stage of a compilation takes.

use std::time::Instant;

use serde_json::{Value, json};
use slabwise::{CompileStage, Params, Result};
use slabwise_models::Model;
use slabwise_planner::table;

use super::{Args, open};
use crate::output::line;
use crate::plan::of_batch;

/// The cost of compiling a model's training step.
struct Compiled {
    model: Model,
    /// The first is the trace, in which the model is recorded as a graph and differentiated.
    stages: Vec<CompileStage>,
}

pub fn run(args: &Args) -> Result<()> {
    let all = args
        .models
        .iter()
        .map(|&model| compiled(model, args))
        .collect::<Result<Vec<_>>>()?;
    if args.json {
        return all.iter().try_for_each(|one| line(one.json(args)));
    }
    line(show(&all))
}

fn compiled(model: Model, args: &Args) -> Result<Compiled> {
    let mut stages = once(model, args)?;
    for _ in 1..args.steps.unwrap_or(1) {
        for (least, budget_report) in stages.iter_mut().zip(once(model, args)?) {
            least.seconds = least.seconds.min(budget_report.seconds);
        }
    }
    Ok(Compiled { model, stages })
}

fn once(model: Model, args: &Args) -> Result<Vec<CompileStage>> {
    let params = Params::seeded(0);
    let network = args.rounding.build(model, &params);
    let mut session = open(args, params)?;
    let optimizer = args.optimizer.unwrap_or(model.optimizer());
    let (mut started, mut program) = (Instant::now(), None);
    of_batch(args.batch, |batch| {
        started = Instant::now();
        program = Some(network.training(&mut session, batch, optimizer)?);
        Ok(())
    })?;
    let all = started.elapsed().as_secs_f64();
    let plan = program.as_ref().map(|program| program.plan());
    let (compiling, stages) = plan.map_or((0.0, Default::default()), |plan| {
        (plan.compile_seconds(), plan.compile_stages())
    });
    let count = stages.first().map_or(0, |stage| stage.count);
    let trace = CompileStage {
        name: "trace",
        seconds: all - compiling,
        count,
    };
    Ok([&[trace], stages].concat())
}

impl Compiled {
    fn seconds(&self) -> f64 {
        self.stages.iter().map(|stage| stage.seconds).sum()
    }

    /// The number of nodes or kernels that the stage of this name produced.
    fn count(&self, stage: &str) -> usize {
        self.stages
            .iter()
            .find(|one| one.name == stage)
            .map_or(0, |one| one.count)
    }

    fn json(&self, args: &Args) -> Value {
        let stage = |stage: &CompileStage| json!({ "name": stage.name, "s": stage.seconds, "count": stage.count });
        json!({
            "model": self.model.to_string(),
            "batch": args.batch,
            "nodes": self.count("legalize"),
            "kernels": self.count("schedule"),
            "all_s": self.seconds(),
            "stages": self.stages.iter().map(stage).collect::<Vec<_>>(),
        })
    }
}

/// A row for each stage, and for each model the milliseconds and the result: nodes, and kernels
/// from fusion on.
fn show(all: &[Compiled]) -> String {
    let mut names: Vec<&str> = Vec::new();
    for stage in all.iter().flat_map(|one| &one.stages) {
        if !names.contains(&stage.name) {
            names.push(stage.name);
        }
    }
    let mut rows = vec![vec![String::new()], vec!["all".into()]];
    rows.extend(names.iter().map(|&name| vec![name.to_string()]));
    for one in all {
        rows[0].extend([format!("{} ms", one.model), "count".into()]);
        rows[1].extend([format!("{:.1}", 1e3 * one.seconds()), String::new()]);
        for (row, name) in rows[2..].iter_mut().zip(&names) {
            let stage = one.stages.iter().find(|stage| stage.name == *name);
            row.extend(stage.map_or(Default::default(), |s| {
                [format!("{:.1}", 1e3 * s.seconds), s.count.to_string()]
            }));
        }
    }
    table(&rows, 1)
}
