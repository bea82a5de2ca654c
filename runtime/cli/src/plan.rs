//! `slabwise plan`: the memory needs of a training step.

use std::path::PathBuf;
use std::process::ExitCode;

use serde_json::json;
use slabwise::memory::export::{
    ExportError, MemoryProfile, heap_profile, snapshot_json, snapshot_pickle, trace_events_json,
};
use slabwise::shape::Dim;
use slabwise::{
    Budget, Bytes, Device, Error, Offload, Params, Plan, Resources, Result, Run, Session, Strategy,
    World,
};
use slabwise_models::{Model, OptimizerKind};

use crate::arguments::{FileOptions, ModelOrFile, Rounding};
use crate::output::{bad_input, line, save};
use crate::plan_diff::{FORMAT, PlanFile};
use crate::{frontier, largest_batch, onnx};

#[derive(clap::Args)]
#[command(after_long_help = format!("Models, with the defaults of their sizes:\n{}", Model::help()))]
pub struct Args {
    /// A built-in model, such as cnn, resnet50, gpt2 or lstm:length=320,layers=2 (--help lists them
    /// with their sizes), or a file of a model that ends in .onnx
    pub model: ModelOrFile,
    /// Examples in a step of a built-in model; 64 unless given
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    batch: Option<u32>,
    /// The most bytes that weights, state and slab may take, such as 24MiB, or a part of the slab
    /// without recomputation, such as 50%
    #[arg(long)]
    pub budget: Option<Budget>,
    /// Send values to the host as well to keep the budget, over a link of this speed in each
    /// direction, such as 16GB/s
    #[arg(long, value_name = "LINK")]
    pub offload: Option<Offload>,
    #[command(flatten)]
    pub file: FileOptions,
    /// Of an ONNX file: plan a training step with this optimizer, whose loss is the mean of the
    /// squares of the first output; without it, inference
    #[arg(long, value_name = "OPTIMIZER")]
    pub train: Option<OptimizerKind>,
    /// auto, cpu or cuda:N
    #[arg(long, default_value = "auto")]
    pub device: Device,
    /// sgd, adam, adamw, rmsprop, adagrad, adadelta, adamax, nadam, radam, lion, lamb, adafactor or
    /// muon; the model's own unless given
    #[arg(long)]
    pub optimizer: Option<OptimizerKind>,
    #[command(flatten)]
    pub rounding: Rounding,
    /// Write the plan, or with --frontier the budgets, as a picture
    #[arg(long, value_name = "FILE")]
    pub svg: Option<PathBuf>,
    /// Write an interactive HTML timeline of the plan. Runs one step, if there is memory for it,
    /// and overlays its measured memory use; see --no-run
    #[arg(long, value_name = "FILE", conflicts_with = "frontier")]
    pub html: Option<PathBuf>,
    /// With --html: run nothing, show the plan alone
    #[arg(long, requires = "html")]
    no_run: bool,
    /// Run a step and write the contents of the slab as a memory snapshot of PyTorch: JSON if the
    /// name ends in .json, else a pickle
    #[arg(long, value_name = "FILE", conflicts_with_all = ["frontier", "no_run"])]
    snapshot: Option<PathBuf>,
    /// Run a step and write its kernels, buffers and live bytes for Perfetto (JSON)
    #[arg(long, value_name = "FILE", conflicts_with_all = ["frontier", "no_run"])]
    perfetto: Option<PathBuf>,
    /// Run a step and write the holders of the slab's bytes at the peak as a heap profile of pprof
    #[arg(long, value_name = "FILE", conflicts_with_all = ["frontier", "no_run"])]
    pprof: Option<PathBuf>,
    /// Show the time that smaller slabs cost: plans for ten budgets, with the values they recompute
    #[arg(long, conflicts_with_all = ["budget", "kernels"])]
    pub frontier: bool,
    /// Find the largest batch of a step whose weights, state and slab fit so many bytes, such as
    /// 8GiB: with all values kept, and with recomputation and micro-batches, for which it may plan
    /// for minutes
    #[arg(long, value_name = "BYTES", conflicts_with_all = ["batch", "budget", "frontier", "kernels", "svg", "html", "snapshot", "perfetto", "pprof", "dump", "ranks"])]
    largest_batch: Option<Bytes>,
    /// Write the program after each compiler pass into this folder, as text and as a picture in DOT
    #[arg(long, value_name = "DIR")]
    pub dump: Option<PathBuf>,
    /// List the kernels in the order they run
    #[arg(long)]
    pub kernels: bool,
    /// Plan a step of so many ranks, each of which takes its part of the batch
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024), conflicts_with_all = ["frontier", "html", "snapshot", "perfetto", "pprof"])]
    pub ranks: Option<u32>,
    /// The values that each rank holds whole: all (replicated), or all but the optimizer's state
    /// (zero1)
    #[arg(long, value_enum, default_value_t = Strategies::Replicated, requires = "ranks")]
    strategy: Strategies,
    /// One JSON object instead of text
    #[arg(long)]
    pub json: bool,
}

/// The strategies by their usual names.
#[derive(Clone, Copy, PartialEq, clap::ValueEnum)]
enum Strategies {
    Replicated,
    Zero1,
}

impl Args {
    /// The first rank of the world that a step is planned for, whose part of a batch is the largest.
    fn world(&self) -> Result<World> {
        let world = World::local(self.ranks.unwrap_or(1) as usize)?.swap_remove(0);
        Ok(world.with_strategy(match self.strategy {
            Strategies::Replicated => Strategy::Replicated,
            Strategies::Zero1 => Strategy::ShardedState,
        }))
    }
}

impl Args {
    /// Examples in a step.
    pub fn batch(&self) -> u32 {
        self.batch.unwrap_or(64)
    }

    /// The options that were given and do not belong to the kind of model.
    pub fn misplaced(&self) -> Vec<&'static str> {
        let of_files = [
            ("--dim", !self.file.dims.is_empty()),
            ("--narrow", self.file.narrow),
            ("--train", self.train.is_some()),
        ];
        let of_built_in = [
            ("--batch (use --dim)", self.batch.is_some()),
            ("--optimizer (use --train)", self.optimizer.is_some()),
            ("--frontier", self.frontier),
            ("--largest-batch", self.largest_batch.is_some()),
            ("--no-run", self.no_run),
            ("--ranks", self.ranks.is_some()),
            ("--snapshot", self.snapshot.is_some()),
            ("--perfetto", self.perfetto.is_some()),
            ("--pprof", self.pprof.is_some()),
        ];
        let given: &[_] = match &self.model {
            ModelOrFile::BuiltIn(_) => &of_files,
            ModelOrFile::File(_) => &of_built_in,
        };
        let given = given.iter().filter(|(_, given)| *given);
        given.map(|(option, _)| *option).collect()
    }

    /// Whether measurements of a run are to be written.
    pub fn exports(&self) -> bool {
        [&self.snapshot, &self.perfetto, &self.pprof]
            .iter()
            .any(|path| path.is_some())
    }

    /// The requested files.
    pub fn outputs(&self) -> [&Option<PathBuf>; 5] {
        [
            &self.svg,
            &self.html,
            &self.snapshot,
            &self.perfetto,
            &self.pprof,
        ]
    }
}

/// Makes a program of a fixed batch, or if a budget refuses it, one of a named batch dimension,
/// which may run in micro-batches.
pub fn of_batch<T>(batch: u32, mut make: impl FnMut(Dim) -> Result<T>) -> Result<T> {
    match make(batch.into()) {
        Err(Error::Budget { .. }) => make(Dim::bounded("batch", batch)),
        made => made,
    }
}

pub fn run(args: &Args) -> Result<ExitCode> {
    if let [first, ..] = args.misplaced()[..] {
        return bad_input(match &args.model {
            ModelOrFile::BuiltIn(model) => {
                format!("{first} is for model files; {model} is built in")
            }
            ModelOrFile::File(_) => format!("{first} is for built-in models, not for a model file"),
        });
    }
    match &args.model {
        ModelOrFile::BuiltIn(model) => built_in(args, *model).map(|()| ExitCode::SUCCESS),
        ModelOrFile::File(path) => onnx::plan(args, path),
    }
}

fn built_in(args: &Args, model: Model) -> Result<()> {
    if args.frontier {
        return frontier::run(args, model);
    }
    if let Some(room) = args.largest_batch {
        return largest_batch::run(args, model, room);
    }
    let params = Params::seeded(0);
    let network = args.rounding.build(model, &params);
    let session = Session::new(args.device, params)?
        .with_budget(args.budget)
        .with_offload(args.offload);
    let world = args.world()?;
    let own = world.share(args.batch() as usize).len().max(1) as u32;
    let mut session = session.with_options(args.rounding.options()).on(world)?;
    if let Some(folder) = &args.dump {
        session = session.with_dump(folder);
    }
    let optimizer = args.optimizer.unwrap_or(model.optimizer());
    let plan = of_batch(own, |batch| {
        network.plan_training(&session, batch, optimizer)
    })?;
    if let Some(path) = &args.svg {
        save(path, plan.svg().as_bytes())?;
    }
    let exports = args.exports();
    if args.html.is_some() || exports {
        let ran = if args.no_run {
            Err("it was asked not to be".into())
        } else {
            one_step(args, model, &plan)
        };
        if let Some(path) = &args.html {
            save(
                path,
                plan.html(ran.as_ref().map(|ran| &ran.run).map_err(String::as_str))
                    .as_bytes(),
            )?;
        }
        if exports {
            export(
                args,
                &ran.map_err(|why| Error::Value(format!("a step cannot be run: {why}")))?,
            )?;
        }
    }
    if !args.json {
        line(format_args!("{model} · batch {}", args.batch()))?;
        line(&plan)?;
        if args.kernels {
            let used = resources(args, model)?;
            for (at, name) in plan.steps().enumerate() {
                let used = used.get(at).map(Vec::as_slice).unwrap_or_default();
                line(format_args!(
                    "{}",
                    format!("{at:>5}  {name}  {}", used.join("; ")).trim_end()
                ))?;
            }
        }
        return Ok(());
    }
    let mut report = report(&plan, model.name(), args.batch());
    if args.offload.is_some() {
        let offloaded = plan.budget_report().offloaded.iter().map(|offloaded| {
            json!({
                "buffer": offloaded.name,
                "bytes": offloaded.bytes.0,
                "after": offloaded.used,
                "before": offloaded.read,
                "steps": offloaded.steps,
                "copying_s": offloaded.copying_s,
                "computing_s": offloaded.computing_s,
            })
        });
        report["offloaded"] = offloaded.collect();
        report["overhead_pct"] = json!(100.0 * plan.budget_report().overhead);
    }
    if plan.channels_last() > 0 {
        report["channels_last"] = json!(plan.channels_last());
    }
    let padding = plan.padding();
    if padding.values > 0 {
        report["padding"] = json!({
            "values": padding.values,
            "bytes": padding.bytes,
            "at_peak_bytes": padding.at_peak,
        });
    }
    if let Some(communication) = plan.communication() {
        report["ranks"] = json!({
            "ranks": communication.ranks,
            "weights_bytes": plan.persistent().weights,
            "state_bytes": plan.persistent().state,
            "slab_bytes": plan.slab_bytes(),
            "sent_bytes": communication.sent,
            "collectives": communication.collectives,
            "overlapped": communication.overlapped,
            "in_flight_at_peak_bytes": communication.at_peak,
            "in_flight_most_bytes": communication.most,
        });
    }
    if args.kernels {
        report["kernel_names"] = plan.steps().collect();
    }
    line(report)
}

/// A plan as JSON.
pub fn report(plan: &Plan, model: &str, batch: u32) -> serde_json::Value {
    let persistent = plan.persistent();
    let PlanFile { peak, buffers, .. } = PlanFile::of(plan);
    json!({
        "format": FORMAT,
        "model": model,
        "batch": batch,
        "slab_bytes": plan.slab_bytes(),
        "lower_bound_bytes": plan.lower_bound_bytes(),
        "without_reuse_bytes": plan.without_reuse_bytes(),
        "persistent_bytes": persistent.weights + persistent.state,
        "host_bytes": plan.host_bytes(),
        "kernels": plan.kernels(),
        "prologues": plan.budget_report().prologues,
        "compile_s": plan.compile_seconds(),
        "peak": peak,
        "buffers": buffers,
    })
}

/// The implementation of each kernel on a GPU, and its resources: for that it is compiled and
/// loaded. Nothing on the CPU.
fn resources(args: &Args, model: Model) -> Result<Vec<Vec<String>>> {
    if args.device == Device::Cpu {
        return Ok(Vec::new());
    }
    let params = Params::seeded(0);
    let network = args.rounding.build(model, &params);
    let mut session = Session::new(args.device, params)?
        .with_budget(args.budget)
        .with_options(args.rounding.options());
    let program = network.training(
        &mut session,
        args.batch(),
        args.optimizer.unwrap_or(model.optimizer()),
    )?;
    let all = program.libraries().into_iter().zip(program.resources());
    Ok(all
        .map(|(library, functions)| {
            library
                .into_iter()
                .chain(functions.iter().map(shown))
                .collect()
        })
        .collect())
}

fn shown(used: &Resources) -> String {
    // Without the hash of its source.
    let kind = used
        .function
        .rsplit_once('_')
        .map_or(used.function.as_str(), |(kind, _)| kind);
    format!(
        "{kind}: {} registers, {} bytes spilled, {} shared",
        used.registers, used.spill_bytes, used.shared_bytes
    )
}

/// A step that was run.
struct Ran {
    run: Run,
    /// The holders of the slab at the peak, and in the whole step.
    peak: MemoryProfile,
    whole: MemoryProfile,
}

/// The measurements of one step, or why none was run.
fn one_step(args: &Args, model: Model, plan: &Plan) -> std::result::Result<Ran, String> {
    let batch = model.batch_bytes(args.batch() as usize);
    let needed = [
        plan.slab_bytes(),
        plan.persistent().weights,
        plan.persistent().state,
        batch,
    ]
    .into_iter()
    .fold(0, u64::saturating_add);
    if let Some(free) = available_bytes().filter(|free| *free < needed) {
        return Err(format!(
            "a step needs {}, of which {} are available",
            Bytes(needed),
            Bytes(free)
        ));
    }
    let run = || {
        let params = Params::seeded(0);
        let network = args.rounding.build(model, &params);
        let mut session = Session::new(args.device, params)?
            .with_budget(args.budget)
            .with_options(args.rounding.options());
        let optimizer = args.optimizer.unwrap_or(model.optimizer());
        let program = of_batch(args.batch(), |batch| {
            network.training(&mut session, batch, optimizer)
        })?;
        let (examples, labels) = model.batch(args.batch() as usize, 1);
        let run = session.record(&program, (&examples, &labels))?;
        let peak = slabwise_planner::peak(program.plan().dag(), program.plan().offsets()).0;
        let (peak, whole) = (
            program.memory_profile(&run, peak),
            program.memory_profile(&run, run.steps.len()),
        );
        Ok(Ran { run, peak, whole })
    };
    run().map_err(|error: Error| error.to_string())
}

/// Writes the requested files.
fn export(args: &Args, ran: &Ran) -> Result<()> {
    let internal = |e: ExportError| Error::Internal(e.to_string());
    if let Some(path) = &args.snapshot {
        let json = path
            .extension()
            .is_some_and(|extension| extension == "json");
        let whole = ran.whole.clone();
        let bytes = if json {
            snapshot_json(whole).map(String::into_bytes)
        } else {
            snapshot_pickle(whole)
        };
        save(path, &bytes.map_err(internal)?)?;
    }
    if let Some(path) = &args.perfetto {
        save(path, trace_events_json(ran.whole.clone()).as_bytes())?;
    }
    if let Some(path) = &args.pprof {
        let now = std::time::SystemTime::now()
            .duration_since(std::time::UNIX_EPOCH)
            .unwrap_or_default();
        let bytes = heap_profile(ran.peak.clone(), now).map_err(|source| Error::Io {
            path: path.clone(),
            source,
        })?;
        save(path, &bytes)?;
    }
    Ok(())
}

/// Bytes that can be allocated without taking them from other processes, if the system reports it.
fn available_bytes() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let kib: u64 = text.lines().find_map(|l| {
        l.strip_prefix("MemAvailable:")?
            .trim()
            .strip_suffix("kB")?
            .trim()
            .parse()
            .ok()
    })?;
    kib.checked_mul(1024)
}
