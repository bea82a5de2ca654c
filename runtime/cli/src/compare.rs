//! `slabwise compare`: the same program run in planned and in dynamic mode, measured; and the same
//! allocations replayed under each policy of the pool.

use serde_json::{Value, json};
use slabwise::feed::Feed;
use slabwise::memory::replay::{Replay, Trace};
use slabwise::memory::{MemoryConfig, Policy};
use slabwise::{Bytes, Device, Error, Params, Program, Result, Session};
use slabwise_models::Model;
use slabwise_planner::table;

use crate::output::{Times, line};

#[derive(clap::Args)]
pub struct Args {
    /// A built-in model, such as cnn, resnet20 or gpt:layers=2; `slabwise plan --help` lists them
    /// with their sizes
    #[arg(required_unless_present = "all", conflicts_with = "all")]
    model: Option<Model>,
    /// Every built-in model
    #[arg(long)]
    all: bool,
    /// Examples in a step
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..))]
    batch: u32,
    /// Timed steps of each mode
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..))]
    steps: u32,
    /// One JSON object instead of a table (with --all, an array of them)
    #[arg(long)]
    json: bool,
}

/// Steps whose allocations are replayed: the first fills a pool, the others show its steady state.
const RECORDED_STEPS: usize = 3;

/// The measurements of one program.
struct Measured {
    no_reuse: u64,
    dynamic: u64,
    policies: Vec<Replay>,
    without_in_place: u64,
    planned: u64,
    measured: u64,
    lower_bound: u64,
    step_ms_dynamic: f64,
    step_ms_planned: f64,
}

pub fn run(args: &Args) -> Result<()> {
    let models = args.model.as_ref().map_or(Model::ALL, std::slice::from_ref);
    let mut reports = Vec::new();
    for (at, &model) in models.iter().enumerate() {
        let [train, infer] = compare(model, args.batch, args.steps)?;
        if args.json {
            reports.push(json!({"model": model.name(), "batch": args.batch, "train": train.json(), "infer": infer.json()}));
            continue;
        }
        if at > 0 {
            line("")?;
        }
        line(format_args!(
            "{model} · batch {} · {} steps of each mode, interleaved",
            args.batch, args.steps
        ))?;
        line(table(&rows(&train, &infer), 1))?;
    }
    match (args.json, args.all) {
        (false, _) => Ok(()),
        (true, true) => line(Value::Array(reports)),
        (true, false) => reports.into_iter().try_for_each(line),
    }
}

/// The training step with the model's own optimizer, and the inference, each in a separate session.
fn compare(model: Model, batch: u32, steps: u32) -> Result<[Measured; 2]> {
    let open = || {
        let params = Params::seeded(0);
        let network = model.build(&params);
        Session::new(Device::Cpu, params).map(|session| (network, session))
    };
    let (network, mut session) = open()?;
    let train = network.training(&mut session, batch, model.optimizer())?;
    // Built once a step of this batch is known to fit.
    let (images, labels) = model.batch(batch as usize, 1);
    let train = measure(&mut session, &train, (&images, &labels), steps)?;
    let (network, mut session) = open()?;
    let infer = network.inference(&mut session, batch)?;
    let infer = measure(&mut session, &infer, (&images,), steps)?;
    Ok([train, infer])
}

fn measure(
    session: &mut Session,
    program: &Program<1>,
    feed: impl Feed,
    steps: u32,
) -> Result<Measured> {
    let (mut dynamic, mut planned) = (Times::default(), Times::default());
    let item = |output: Result<[slabwise::Output<'_>; 1]>| output.map(|[output]| output.item());
    // Each mode runs once before, so that neither is timed while its memory is new.
    item(session.run_dynamic(program, &feed))?;
    item(session.run(program, &feed))?;
    // The steps' requests to the pool are the same under any policy, so they are recorded once and
    // replayed.
    session.pool().record(usize::MAX);
    for _ in 0..RECORDED_STEPS {
        item(session.run_dynamic(program, &feed))?;
    }
    let trace = Trace::of_events(&session.pool().events()).map_err(Error::Internal)?;
    session.pool().record(0);
    let replay = |policy| {
        trace
            .run(&MemoryConfig::with_policy(policy), None)
            .map_err(|e| Error::Value(e.to_string()))
    };
    let policies = Policy::ALL.into_iter().map(replay).collect::<Result<_>>()?;
    for _ in 0..steps {
        dynamic.time(|| item(session.run_dynamic(program, &feed)))?;
        planned.time(|| item(session.run(program, &feed)))?;
    }
    let (plan, pool) = (program.plan(), session.pool_statistics());
    Ok(Measured {
        no_reuse: plan.without_reuse_bytes(),
        dynamic: pool.peak_bytes_in_use,
        policies,
        without_in_place: plan.without_in_place_bytes(),
        planned: plan.slab_bytes(),
        measured: session.last_run().peak_slab_bytes,
        lower_bound: plan.lower_bound_bytes(),
        step_ms_dynamic: dynamic.median(),
        step_ms_planned: planned.median(),
    })
}

impl Measured {
    fn json(&self) -> Value {
        let policy = |r: &Replay| {
            let (s, calls) = (r.statistics, r.driver_calls);
            let report = json!({ "reserved_bytes": s.peak_pool_bytes, "in_use_bytes": s.peak_bytes_in_use, "driver_calls": calls, "defrags": s.defrags });
            (r.policy.name().to_string(), report)
        };
        json!({
            "no_reuse_bytes": self.no_reuse,
            "dynamic_bytes": self.dynamic,
            "planned_without_inplace_bytes": self.without_in_place,
            "planned_bytes": self.planned,
            "measured_bytes": self.measured,
            "lower_bound_bytes": self.lower_bound,
            "policies": self.policies.iter().map(policy).collect::<serde_json::Map<_, _>>(),
            "step_ms_dynamic": self.step_ms_dynamic,
            "step_ms_planned": self.step_ms_planned,
        })
    }
}

fn rows(train: &Measured, infer: &Measured) -> Vec<Vec<String>> {
    let both = [train, infer];
    let row = |name: &str, cells: [[String; 2]; 2]| {
        [name.to_string()]
            .into_iter()
            .chain(cells.into_iter().flatten())
            .collect()
    };
    let bytes = |name: &str, of: &dyn Fn(&Measured) -> u64| {
        let share =
            |m: &Measured| format!("{:.0} %", of(m) as f64 / m.planned.max(1) as f64 * 100.0);
        row(name, both.map(|m| [Bytes(of(m)).to_string(), share(m)]))
    };
    let time = |name: &str, of: fn(&Measured) -> f64| {
        row(
            name,
            both.map(|m| [format!("{:.3} ms", of(m)), String::new()]),
        )
    };
    let reserved = |at: usize| {
        bytes(&format!("dynamic, reserved by {}", Policy::ALL[at]), &|m| {
            m.policies[at].statistics.peak_pool_bytes
        })
    };
    let mut rows = vec![
        row(
            "peak of a step",
            ["train", "infer"].map(|head| [head.into(), String::new()]),
        ),
        bytes("without reuse", &|m| m.no_reuse),
        bytes("dynamic, in use", &|m| m.dynamic),
    ];
    rows.extend((0..Policy::ALL.len()).map(reserved));
    rows.extend([
        bytes("planned without in-place", &|m| m.without_in_place),
        bytes("planned", &|m| m.planned),
        bytes("planned, measured", &|m| m.measured),
        bytes("lower bound", &|m| m.lower_bound),
        time("time, dynamic", |m| m.step_ms_dynamic),
        time("time, planned", |m| m.step_ms_planned),
    ]);
    rows
}
