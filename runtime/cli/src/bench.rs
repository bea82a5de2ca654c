//! `slabwise bench`: how long a step takes, or a compilation.

use std::str::FromStr;
use std::time::{Duration, Instant};

use ndarray::{Array1, Array2};
use serde_json::{Value, json};
use slabwise::feed::Feed;
use slabwise::prelude::F32;
use slabwise::{
    Budget, Bytes, Device, Error, Offload, Params, Profile, Program, Result, Session, Trace,
};
use slabwise_models::{Model, OptimizerKind, noise};

use crate::arguments::Rounding;
use crate::output::{Times, line, pairs};
use crate::plan::of_batch;

mod compile;
mod kernels;

/// The time for which steps are repeated unless their number is given.
const PATIENCE: Duration = Duration::from_secs(3);
/// The least number of repetitions.
const LEAST_STEPS: usize = 10;

#[derive(clap::Args)]
pub struct Args {
    /// A built-in model, such as cnn or lstm:length=320,layers=2 (`slabwise plan --help` lists
    /// them), gemm, chain, compile, or peak (the arithmetic and the memory of this machine, with
    /// one thread and with all)
    subject: Subject,
    /// compile: the models whose compilation is timed stage by stage, such as lstm:length=80
    /// lstm:length=160
    #[arg(value_name = "MODEL")]
    models: Vec<Model>,
    /// Examples in a training step
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..))]
    batch: u32,
    /// sgd, adam, adamw, rmsprop, adagrad, adadelta, adamax, nadam, radam, lion, lamb, adafactor or
    /// muon; the model's own unless given
    #[arg(long)]
    optimizer: Option<OptimizerKind>,
    #[command(flatten)]
    rounding: Rounding,
    /// Timed steps, as many as fit into three seconds unless given; for compile the number of
    /// compilations, of which each stage's fastest time is shown, one unless given
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    steps: Option<u32>,
    /// Threads kernels use; SLABWISE_THREADS or one for each core unless given
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=1024))]
    threads: Option<u32>,
    /// Models: the most bytes that weights, state and slab may take, such as 24MiB, or a part of
    /// the slab without recomputation, such as 50%
    #[arg(long)]
    budget: Option<Budget>,
    /// Models: send values to the host as well to keep the budget, over a link of this speed in
    /// each direction, such as 16GB/s
    #[arg(long, value_name = "LINK")]
    offload: Option<Offload>,
    /// auto, cpu or cuda:N
    #[arg(long, default_value = "auto")]
    device: Device,
    /// Rows and columns of gemm (1024 unless given), elements of chain (16777216 unless given)
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    n: Option<u32>,
    /// chain: compute the gradient with respect to x instead of the sum
    #[arg(long)]
    grad: bool,
    /// Models: also show each kernel, in execution order: its fastest time, its arithmetic
    /// operations and bytes, the rates it reaches, and its floor: the least time that these
    /// operations and bytes take on this machine, as measured (on a CUDA device by its attributes);
    /// at the end the time lost above the floors by products, convolutions, other kernels, and
    /// between kernels
    #[arg(long)]
    kernels: bool,
    /// One JSON object instead of text
    #[arg(long)]
    json: bool,
}

/// The subject of the measurement.
#[derive(Clone, Copy)]
enum Subject {
    Model(Model),
    Gemm,
    Chain,
    Compile,
    Peak,
}

impl FromStr for Subject {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        match name {
            "gemm" => Ok(Subject::Gemm),
            "chain" => Ok(Subject::Chain),
            "compile" => Ok(Subject::Compile),
            "peak" => Ok(Subject::Peak),
            _ if name.contains(':') => Model::parse(name).map(Subject::Model),
            _ => Model::parse(name)
                .map(Subject::Model)
                .map_err(|e| Error::Value(format!("{e}, and gemm, chain, compile, peak"))),
        }
    }
}

pub fn run(args: &Args) -> Result<()> {
    if args.models.is_empty() == matches!(args.subject, Subject::Compile) {
        let usage = "models follow `bench compile`, at least one, and nothing else, as in `bench compile lstm gpt`\n";
        clap::Error::raw(clap::error::ErrorKind::MissingRequiredArgument, usage).exit();
    }
    let mut profile = None;
    let report = match args.subject {
        Subject::Compile => return compile::run(args),
        Subject::Model(model) => bench_model(model, args, &mut profile)?,
        Subject::Gemm => bench_gemm(args)?,
        Subject::Chain => bench_chain(args)?,
        Subject::Peak => return kernels::peak(args),
    };
    if args.json {
        return line(report);
    }
    if let Some(profile) = profile {
        line(profile)?;
    }
    fields(&report)
}

/// Prints the fields of a report, one a line.
fn fields(report: &Value) -> Result<()> {
    let fields: Vec<(&String, String)> = report
        .as_object()
        .into_iter()
        .flatten()
        .map(|(name, value)| (name, show(name, value)))
        .collect();
    pairs(&fields)
}

/// A value as text; the suffix of the name gives its unit.
fn show(name: &str, value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        Value::Number(n) if name.ends_with("_bytes") => {
            n.as_u64().map_or(n.to_string(), |n| Bytes(n).to_string())
        }
        Value::Number(n) if n.is_f64() => format!("{:.4}", n.as_f64().unwrap_or(f64::NAN)),
        other => other.to_string(),
    }
}

fn open(args: &Args, params: Params) -> Result<Session> {
    let session = Session::new(args.device, params)?
        .with_budget(args.budget)
        .with_offload(args.offload);
    let session = session.with_options(args.rounding.options());
    Ok(match args.threads {
        Some(threads) => session.with_threads(threads as usize),
        None => session,
    })
}

/// The first step, and the steps timed after a warm-up.
struct Steps {
    first_s: f64,
    times: Times,
}

fn repeat(
    session: &mut Session,
    program: &Program<1>,
    feed: impl Feed,
    steps: Option<u32>,
) -> Result<Steps> {
    let mut step = || session.run(program, &feed).map(|[output]| output.item());
    let mut first = Times::default();
    first.time(&mut step)?;
    for _ in 0..3 {
        step()?;
    }
    let (mut times, start) = (Times::default(), Instant::now());
    let enough = |times: &Times| match steps {
        Some(steps) => times.count() >= steps as usize,
        None => times.count() >= LEAST_STEPS && start.elapsed() >= PATIENCE,
    };
    while !enough(&times) {
        times.time(&mut step)?;
    }
    Ok(Steps {
        first_s: first.min() / 1e3,
        times,
    })
}

/// A training step: inputs copied from the host, the loss read.
fn bench_model(model: Model, args: &Args, profile: &mut Option<Profile>) -> Result<Value> {
    let params = Params::seeded(0);
    let network = args.rounding.build(model, &params);
    let optimizer = args.optimizer.unwrap_or(model.optimizer());
    let mut session = open(args, params)?;
    let start = Instant::now();
    let program = of_batch(args.batch, |batch| {
        network.training(&mut session, batch, optimizer)
    })?;
    let compile_s = start.elapsed().as_secs_f64();
    let (images, labels) = model.batch(args.batch as usize, 1);
    let steps = repeat(&mut session, &program, (&images, &labels), args.steps)?;
    if args.kernels {
        let mut kernels = session.profile(&program, (&images, &labels), 20)?;
        // Of a step whose kernels are not timed, with the copies of its inputs.
        kernels.fastest_seconds = steps.times.min() / 1e3;
        *profile = Some(kernels);
    }
    let plan = program.plan();
    let mut report = json!({
        "model": model.name(),
        "batch": args.batch,
        "optimizer": optimizer.name(),
        "device": session.device().to_string(),
        "dtype": args.rounding.dtype.to_string(),
        "tf32": args.rounding.tf32,
        "threads": session.threads(),
        "steps": steps.times.count(),
        "step_ms_median": steps.times.median(),
        "step_ms_min": steps.times.min(),
        "compile_s": compile_s,
        "first_step_s": steps.first_s,
        "params_bytes": plan.persistent().weights,
        "state_bytes": plan.persistent().state,
        "slab_bytes": plan.slab_bytes(),
        "host_bytes": plan.host_bytes(),
        "lower_bound_bytes": plan.lower_bound_bytes(),
        "peak_measured_bytes": session.last_run().peak_slab_bytes,
        "rss_peak_bytes": rss_peak_bytes(),
    });
    if let Some(profile) = profile
        && args.json
    {
        kernels::add(profile, &mut report);
    }
    Ok(report)
}

/// C = A·B of n × n f32 matrices that stay on the device.
fn bench_gemm(args: &Args) -> Result<Value> {
    let n = args.n.unwrap_or(1024);
    let mut session = open(args, Params::seeded(0))?;
    let trace = Trace::inference().named("gemm");
    let [a, b] = ["a", "b"].map(|name| trace.input(name, F32, (n, n)));
    let program = session.compile(&trace, [a.matmul(b)])?;
    let mut draw = noise(1);
    let mut matrix = || Array2::from_shape_simple_fn((n as usize, n as usize), || draw() - 0.5);
    let (a, b) = (
        session.upload("a", &matrix())?,
        session.upload("b", &matrix())?,
    );
    let steps = repeat(&mut session, &program, (&a, &b), args.steps)?;
    let flop = 2.0 * f64::from(n).powi(3);
    Ok(json!({
        "n": n,
        "gflops": flop / steps.times.median() / 1e6,
        "gflops_best": flop / steps.times.min() / 1e6,
        "device": session.device().to_string(),
        "threads": session.threads(),
        "steps": steps.times.count(),
        "step_ms_median": steps.times.median(),
        "step_ms_min": steps.times.min(),
    }))
}

/// The sum of tanh(1.5·x + 0.25)·sigmoid(x) + x, or its gradient, for an x that stays on the
/// device.
fn bench_chain(args: &Args) -> Result<Value> {
    let n = args.n.unwrap_or(1 << 24);
    let mut session = open(args, Params::seeded(0))?;
    let trace = Trace::inference().named("chain");
    let x = trace.input("x", F32, (n,));
    let sum = ((x * 1.5 + 0.25).tanh() * x.sigmoid() + x).sum();
    let output = if args.grad {
        trace.gradients(sum, [x])[0]
    } else {
        sum
    };
    let program = session.compile(&trace, [output])?;
    let mut draw = noise(1);
    let x = session.upload(
        "x",
        &Array1::from_shape_simple_fn(n as usize, || 6.0 * draw() - 3.0),
    )?;
    let steps = repeat(&mut session, &program, (&x,), args.steps)?;
    Ok(json!({
        "n": n,
        "grad": args.grad,
        "device": session.device().to_string(),
        "threads": session.threads(),
        "steps": steps.times.count(),
        "step_ms_median": steps.times.median(),
        "step_ms_min": steps.times.min(),
        "kernels": program.plan().kernels(),
        "slab_bytes": program.plan().slab_bytes(),
    }))
}

/// The peak resident memory of this process, if the system reports it; else 0.
fn rss_peak_bytes() -> u64 {
    let text = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let kib = text.lines().find_map(|l| {
        l.strip_prefix("VmHWM:")?
            .trim()
            .strip_suffix("kB")?
            .trim()
            .parse::<u64>()
            .ok()
    });
    kib.unwrap_or(0) * 1024
}
