//! Modelled times of training steps on a described device, without the device.
//!
//! The model of a kernel: the larger of its arithmetic at the rate of its units and of its bytes at
//! the bandwidth that its blocks can use, and no less than the time between two kernels of a graph.
//! Products take as many cycles as the model says that ranks them, or the time of a library at its
//! usual share of the peak, if that is less. Kernels run one after the other.

use std::io::Write;

use serde_json::{Value, json};
use slabwise::{Dim, Params, Precision, Trace};
use slabwise_compiler::backend::{self, HalfProducts};
use slabwise_compiler::passes::{
    ChannelsLast, EpilogueSums, Expand, Fuse, HasAttention, PadRows, Pass, REMAT_MIN_ELEMENTS,
    RowPadding, ShareReads, Simplify, StoreChannelsLast, SumInEpilogues, fuse, legalize, lower,
    moved, operations, rematerialize, round_gradients, simplify,
};
use slabwise_cuda::{Description, Dispatch, Target, candidates};
use slabwise_kernels::size::Env;
use slabwise_kernels::spec::{Attention, Body, Spec};
use slabwise_models::Model;

use crate::items::{MODELS, PRECISIONS, matches};

/// The share of a memory's bandwidth that long copies reach.
const MEMORY_SHARE: f64 = 0.84;
/// The part of the rate of products that attention is assumed to reach: the least that Dao,
/// "FlashAttention-2" (2023) reports of an A100, there in halves.
const ATTENTION_SHARE: f64 = 0.5;
/// Bytes per cycle that one multiprocessor moves at most.
const BYTES_PER_CYCLE: f64 = 64.0;
/// Threads of a multiprocessor that use its bandwidth.
const BUSY_THREADS: f64 = 512.0;
/// Microseconds that a kernel takes besides its work, if it is not hidden by that of the launch.
const START_US: f64 = 1.0;

/// The modelled step of a model.
struct Step {
    launches: usize,
    /// Multiplications and additions of products, and operations of all other code.
    flops: [u64; 2],
    bytes: u64,
    /// Seconds of products, of convolutions, and of all other kernels.
    seconds: [f64; 3],
    kernels: Vec<Kernel>,
}

/// A kernel of a step.
struct Kernel {
    modelled: Modelled,
    bytes: u64,
    /// Its line in the text of the program.
    line: String,
}

/// Prints the modelled times of steps on a device of this name, a table and lines of JSON: of all
/// steps, or of those that are named like one of the patterns, as `step/gpt/bf16`. Of each step
/// follow so many kernels, the longest first.
///
/// # Errors
/// If the name is unknown, or a step cannot be compiled.
pub fn print(
    name: &str,
    only: &[String],
    kernels: usize,
    output: &mut impl Write,
) -> Result<(), String> {
    let device = Description::named(name).ok_or_else(|| unknown(name))?;
    let failed = |e: std::io::Error| e.to_string();
    let (mut lines, mut longest) = (Vec::new(), Vec::new());
    writeln!(
        output,
        "{}, modelled: milliseconds of a training step, by products, convolutions and other kernels\n\n\
         | model | precision | launches | GFLOP | GB | products | convolutions | others | step |\n\
         |---|---|---|---|---|---|---|---|---|",
        device.name
    )
    .map_err(failed)?;
    for (label, model, batch) in MODELS {
        for precision in PRECISIONS {
            let item = format!("step/{label}/{precision}");
            if !only.is_empty() && !only.iter().any(|pattern| matches(pattern, &item)) {
                continue;
            }
            let mut step = step(model, batch, precision, device)?;
            let [products, convolutions, others] = step.seconds.map(|s| 1e3 * s);
            let ms = products + convolutions + others;
            let (flops, bytes) = (step.flops[0] + step.flops[1], step.bytes);
            writeln!(
                output,
                "| {label} | {precision} | {} | {:.1} | {:.2} | {products:.3} | {convolutions:.3} | {others:.3} | **{ms:.3}** |",
                step.launches,
                flops as f64 / 1e9,
                bytes as f64 / 1e9
            )
            .map_err(failed)?;
            step.kernels
                .sort_by(|a, b| b.modelled.seconds.total_cmp(&a.modelled.seconds));
            step.kernels.truncate(kernels);
            longest.push((item, step.kernels));
            lines.push(json!({
                "modelled": label,
                "batch": batch,
                "precision": precision,
                "device": device.name,
                "ms": ms,
                "products_ms": products,
                "convolutions_ms": convolutions,
                "others_ms": others,
                "launches": step.launches,
                "flops": flops,
                "bytes": bytes,
            }));
        }
    }
    for (item, kernels) in longest.iter().filter(|(_, kernels)| !kernels.is_empty()) {
        writeln!(
            output,
            "\n{item}: microseconds, launches, MB of its longest kernels, and candidates of products"
        )
        .map_err(failed)?;
        for kernel in kernels {
            let of = &kernel.modelled;
            let (us, mb) = (1e6 * of.seconds, kernel.bytes as f64 / 1e6);
            writeln!(
                output,
                "{us:9.2} {:2} {mb:9.2}  {:30}  {}",
                of.launches, of.candidate, kernel.line
            )
            .map_err(failed)?;
        }
    }
    writeln!(output).map_err(failed)?;
    let line = |line: &Value| writeln!(output, "{line}");
    lines.iter().try_for_each(line).map_err(failed)
}

/// The error of a name that no description has.
pub fn unknown(name: &str) -> String {
    let known = Description::all().iter();
    let known: Vec<String> = known
        .map(|(file, device)| format!("{file} (sm_{})", device.capability))
        .collect();
    format!(
        "no device is described as \"{name}\"; described are {}",
        known.join(", ")
    )
}

fn step(model: &str, batch: u32, precision: &str, device: &Description) -> Result<Step, String> {
    let said = |e: &dyn std::fmt::Display| format!("{model}, {precision}: {e}");
    let model = Model::parse(model).map_err(|e| said(&e))?;
    let of_products = match precision {
        "bf16" => Precision::Bf16,
        _ => Precision::F32,
    };
    let network = model.build(&Params::seeded(0));
    let trace = Trace::training().with_precision(of_products);
    let loss = network.step(&trace, Dim::from(batch), model.optimizer());
    let graph = trace
        .finish(&[loss])
        .map_err(|mistakes| said(&format!("{mistakes:?}")))?;
    let target = Target {
        tf32: precision != "f32",
        ..device.target()
    };
    let has_attention: &HasAttention =
        &|scores, operands| slabwise_cuda::has_attention(&target, scores, operands);
    let expand = Expand {
        has_attention,
        has_epilogue_sums: true,
    };
    let simple = simplify(&expand.expand(&graph), &Simplify::default());
    let simple = match round_gradients(&simple) {
        Some(rounded) => simplify(&rounded, &Simplify::default()),
        None => simple,
    };
    let graph = legalize(
        &rematerialize(&simple, Some(REMAT_MIN_ELEMENTS)),
        HalfProducts::OfOneType,
    );
    let bounds = graph.symbols.bounds();
    let program = lower(&fuse(&graph, &Fuse::default()), false).map_err(|e| said(&e))?;
    let described = backend::Target::described(target);
    let sums = EpilogueSums::default();
    let program = match StoreChannelsLast::on(&described, ChannelsLast::default(), sums) {
        Some(pass) => pass.run(&program).map_err(|e| said(&e))?,
        None => program,
    };
    let program = match SumInEpilogues::on(&described, sums) {
        Some(pass) => pass.run(&program).map_err(|e| said(&e))?,
        None => program,
    };
    let program = match ShareReads::on(&described) {
        Some(pass) => pass.run(&program).map_err(|e| said(&e))?,
        None => program,
    };
    let program = match PadRows::on(&described, RowPadding::default()) {
        Some(pass) => pass.run(&program).map_err(|e| said(&e))?,
        None => program,
    };
    let mut all = Step {
        launches: 0,
        flops: [0; 2],
        bytes: 0,
        seconds: [0.0; 3],
        kernels: Vec::with_capacity(program.kernels.len()),
    };
    // A heading, then a line for each kernel.
    let text = program.to_string();
    for (task, line) in program.kernels.iter().zip(text.lines().skip(1)) {
        let modelled = kernel(&task.spec, &bounds, &target, device).map_err(|e| said(&e))?;
        let [product, code] = operations(&task.spec, &bounds);
        all.launches += modelled.launches;
        all.flops[0] += product;
        all.flops[1] += code;
        let bytes = moved(&task.spec, &bounds);
        all.bytes += bytes;
        all.seconds[modelled.family] += modelled.seconds;
        all.kernels.push(Kernel {
            modelled,
            bytes,
            line: line.trim_start().into(),
        });
    }
    Ok(all)
}

/// Whether the operands of attention's products are halves.
fn of_halves(of: &Attention) -> bool {
    [&of.q, &of.k, &of.v].iter().all(|x| x.dtype.is_half())
}

/// The modelled execution of a kernel.
struct Modelled {
    family: usize,
    /// The name of the first candidate for a product, else nothing.
    candidate: String,
    launches: usize,
    seconds: f64,
}

fn kernel(
    spec: &Spec,
    bounds: &Env,
    target: &Target,
    device: &Description,
) -> Result<Modelled, slabwise_kernels::spec::SpecError> {
    let hertz = 1e6 * device.sustained_mhz;
    let multiprocessors = f64::from(device.multiprocessors);
    let [product, code] = operations(spec, bounds);
    let bytes = moved(spec, bounds) as f64;
    let arithmetic = code as f64 / (2.0 * device.rates.f32 * multiprocessors * hertz);
    let family = match &spec.body {
        Body::Matmul(_) => Some(0),
        Body::Conv2d(_) => Some(1),
        _ => None,
    };
    let [floor, start] = [device.launch_us, START_US].map(|us| 1e-6 * us);
    let Some(family) = family else {
        let lowered = slabwise_cuda::lower(spec, bounds, target)?;
        let launches = lowered.launches(bounds);
        let rate = match &spec.body {
            Body::Attention(of) if of_halves(of) => device.rates.half,
            Body::AttentionGrad(grad) if of_halves(&grad.of) => device.rates.half,
            _ if target.tf32 => device.rates.tf32,
            _ => device.rates.f32,
        };
        // Attention; other kernels of this family have no products.
        let products = product as f64 / (2.0 * rate * multiprocessors * hertz * ATTENTION_SHARE);
        let arithmetic = arithmetic + products / launches.len().max(1) as f64;
        let blocks = |n: [u32; 3]| n.iter().map(|&n| f64::from(n)).product::<f64>();
        // A launch that combines the results of another has few threads, and few bytes.
        let threads = |launch: &Dispatch| blocks(launch.grid) * blocks(launch.block);
        let all: f64 = launches.iter().map(threads).sum();
        let each = launches.iter().map(|launch| {
            let threads = threads(launch);
            // Blocks of all multiprocessors, or of as many as there are.
            let busy = (threads / BUSY_THREADS)
                .min(blocks(launch.grid))
                .min(multiprocessors);
            let memory = match 2.0 * bytes < device.bandwidth.cache_bytes as f64 {
                true => device.bandwidth.cache,
                false => MEMORY_SHARE * device.bandwidth.memory,
            };
            let bandwidth = (1e9 * memory).min(busy.max(0.5) * BYTES_PER_CYCLE * hertz);
            bytes * threads / all / bandwidth
        });
        let seconds: f64 = each.map(|s| (s.max(arithmetic) + start).max(floor)).sum();
        return Ok(Modelled {
            family: 2,
            candidate: String::new(),
            launches: launches.len(),
            seconds,
        });
    };
    let ranked = candidates(spec, bounds, target)?;
    let Some(first) = ranked.first() else {
        return Ok(Modelled {
            family,
            candidate: String::new(),
            launches: 0,
            seconds: 0.0,
        });
    };
    let launches = first.lowered.launches(bounds).len();
    let turns = if first.lowered.side_by_side {
        1
    } else {
        launches
    };
    let cycles = slabwise_cuda::library_cycles(spec, bounds, target)
        .map_or(first.cycles, |library| first.cycles.min(library));
    let seconds = cycles / hertz;
    let memory = bytes / (1e9 * MEMORY_SHARE * device.bandwidth.memory);
    // The cycles of the ranking include the start of a kernel.
    let seconds = seconds.max(memory + start).max(arithmetic + start);
    Ok(Modelled {
        family,
        candidate: first.name.clone(),
        launches,
        seconds: seconds.max(floor * turns as f64),
    })
}
