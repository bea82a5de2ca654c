//! Modelled times of training steps on a described device, without the device.
//!
//! The model of a kernel: the larger of its arithmetic at the rate of its units and of its bytes at
//! the bandwidth that its blocks can use, and no less than the time between two kernels of a graph.
//! Products take as many cycles as the model says that ranks them, or the time of a library at its
//! usual share of the peak, if that is less. Kernels run one after the other, as a recorded step has
//! them: independent small loops by one launch.

use std::io::Write;
use std::slice;

use serde_json::{Value, json};
use slabwise_compiler::compile::{RecordedKernel, recorded_kernels};
use slabwise_compiler::passes::{moved, operations};
use slabwise_cuda::{Description, Dispatch, Target, candidates};
use slabwise_kernels::size::Env;
use slabwise_kernels::spec::{Attention, Body, Spec, SpecError};

use crate::items::{MODELS, PRECISIONS, matches};
use crate::step;

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
    let (compiled, target) =
        step::compiled(model, batch, precision, device).map_err(|e| said(&e))?;
    let program = compiled.program();
    let bounds = program.graph.symbols.bounds();
    let mut all = Step {
        launches: 0,
        flops: [0; 2],
        bytes: 0,
        seconds: [0.0; 3],
        kernels: Vec::with_capacity(program.kernels.len()),
    };
    // A heading, then a line for each kernel.
    let text = program.to_string();
    let lines: Vec<&str> = text.lines().skip(1).map(str::trim_start).collect();
    let recorded = recorded_kernels(&compiled, &target).map_err(|e| said(&e))?;
    for recorded in recorded {
        let (calls, fused) = match &recorded {
            RecordedKernel::Call(call) => (slice::from_ref(call), None),
            RecordedKernel::Fused(calls, kernel) => (&calls[..], Some(kernel)),
        };
        let specs: Vec<&Spec> = calls.iter().map(|&call| &program.call(call).spec).collect();
        let mut work = Load::default();
        specs.iter().for_each(|spec| work.add(spec, &bounds));
        let modelled = match fused {
            Some(kernel) => loops(&work, &kernel.launches(&bounds), device.rates.f32, device),
            None => kernel(specs[0], &bounds, &target, device).map_err(|e| said(&e))?,
        };
        all.launches += modelled.launches;
        all.flops[0] += work.product;
        all.flops[1] += work.code;
        all.bytes += work.bytes;
        all.seconds[modelled.family] += modelled.seconds;
        let beside = match calls.len() {
            1 => String::new(),
            n => format!(" & {} more", n - 1),
        };
        all.kernels.push(Kernel {
            modelled,
            bytes: work.bytes,
            line: format!("{}{beside}", lines[calls[0].index()]),
        });
    }
    Ok(all)
}

/// The work of one kernel or several.
#[derive(Default)]
struct Load {
    /// Multiplications and additions of products.
    product: u64,
    /// Operations of all other code.
    code: u64,
    bytes: u64,
}

impl Load {
    fn add(&mut self, spec: &Spec, bounds: &Env) {
        let [product, code] = operations(spec, bounds);
        self.product += product;
        self.code += code;
        self.bytes += moved(spec, bounds);
    }
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

/// A call of its own.
fn kernel(
    spec: &Spec,
    bounds: &Env,
    target: &Target,
    device: &Description,
) -> Result<Modelled, SpecError> {
    let mut work = Load::default();
    work.add(spec, bounds);
    let family = match &spec.body {
        Body::Matmul(_) | Body::QuantizedMatmul(_) => 0,
        Body::Conv2d(_) => 1,
        _ => {
            // Attention; other kernels of this family have no products.
            let rate = match &spec.body {
                Body::Attention(of) if of_halves(of) => device.rates.half,
                Body::AttentionGrad(grad) if of_halves(&grad.of) => device.rates.half,
                _ if target.tf32 => device.rates.tf32,
                _ => device.rates.f32,
            };
            let lowered = slabwise_cuda::lower(spec, bounds, target)?;
            return Ok(loops(&work, &lowered.launches(bounds), rate, device));
        }
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
    let memory = work.bytes as f64 / (1e9 * MEMORY_SHARE * device.bandwidth.memory);
    // The cycles of the ranking include the start of a kernel.
    let start = 1e-6 * START_US;
    let seconds = (cycles / hertz(device))
        .max(memory + start)
        .max(arithmetic(&work, device) + start);
    Ok(Modelled {
        family,
        candidate: first.name.clone(),
        launches,
        seconds: seconds.max(1e-6 * device.launch_us * turns as f64),
    })
}

/// The cycles of a multiprocessor in a second.
fn hertz(device: &Description) -> f64 {
    1e6 * device.sustained_mhz
}

/// The seconds of all arithmetic beside products.
fn arithmetic(work: &Load, device: &Description) -> f64 {
    let multiprocessors = f64::from(device.multiprocessors);
    work.code as f64 / (2.0 * device.rates.f32 * multiprocessors * hertz(device))
}

/// A kernel without tiles of products, by its launches; `rate`: multiply-adds of a multiprocessor
/// per cycle in attention.
fn loops(work: &Load, launches: &[Dispatch], rate: f64, device: &Description) -> Modelled {
    let multiprocessors = f64::from(device.multiprocessors);
    let bytes = work.bytes as f64;
    let products =
        work.product as f64 / (2.0 * rate * multiprocessors * hertz(device) * ATTENTION_SHARE);
    let arithmetic = arithmetic(work, device) + products / launches.len().max(1) as f64;
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
        let bandwidth = (1e9 * memory).min(busy.max(0.5) * BYTES_PER_CYCLE * hertz(device));
        bytes * threads / all / bandwidth
    });
    let [floor, start] = [device.launch_us, START_US].map(|us| 1e-6 * us);
    Modelled {
        family: 2,
        candidate: String::new(),
        launches: launches.len(),
        seconds: each.map(|s| (s.max(arithmetic) + start).max(floor)).sum(),
    }
}
