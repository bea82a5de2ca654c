//! Measurements, each in its own process, selected by words; the result is a line of JSON.

mod memory;
mod products;
mod steps;

use std::process::ExitCode;
use std::time::{Duration, Instant};

use serde_json::{Map, Value, json};
use slabwise::feed::Feed;
use slabwise::{DType, Device, Error, Program, Result, Session};
use slabwise_cuda::compiler::Compiler;

use crate::items::QUICK;

/// Runs before the timed ones, unless they take longer than [`PATIENCE`].
const WARM_UP: u32 = 20;
/// The fewest warm-up runs: a graph is recorded at the second.
const WARM_UP_LEAST: u32 = 3;
/// Timed runs: as many as fit into this, and at least [`SAMPLES_LEAST`] groups.
const PATIENCE: Duration = Duration::from_secs(1);
const SAMPLES_LEAST: usize = 5;
/// Runs are requested in groups, like training that reads its loss now and then.
const GROUP: u32 = 10;

/// Runs the measurement that the words select and prints the result.
pub fn child(words: &[String]) -> ExitCode {
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let measured = match words[..] {
        ["device"] => device(),
        ["step", model, batch, precision] => steps::step(model, batch, precision),
        ["step", model, batch, precision, way] => steps::step_with(model, batch, precision, way),
        ["bytes", model, batch] => steps::bytes(model, batch),
        ["budget", model, batch, way] => steps::budget(model, batch, way),
        ["product", n, precision] => products::square(n, precision),
        ["row", n, stored] => products::row(n, stored),
        ["conv", sizes, precision] => products::convolution(sizes, precision),
        ["copy", which] => memory::copy(which),
        ["launches"] => memory::launches(),
        _ => Err(Error::Value(format!(
            "there is no measurement {:?}; --list shows them",
            words.join(" ")
        ))),
    };
    match measured {
        Ok(value) => {
            println!("{value}");
            ExitCode::SUCCESS
        }
        Err(e) => {
            eprintln!("error: {e}");
            ExitCode::FAILURE
        }
    }
}

fn number(text: &str) -> Result<u32> {
    text.parse()
        .map_err(|e| Error::Value(format!("{text:?} is no number: {e}")))
}

/// The type that the operands of products are stored in.
fn dtype(precision: &str) -> Result<DType> {
    match precision {
        "f32" | "tf32" => Ok(DType::F32),
        "bf16" => Ok(DType::BF16),
        _ => Err(Error::Value(format!(
            "{precision:?} is no precision; there are f32, tf32 and bf16"
        ))),
    }
}

/// The first device, with the versions of its software.
fn device() -> Result<Value> {
    Device::cuda(0)?;
    let text = |e: slabwise_cuda::driver::DriverError| Error::Value(e.to_string());
    let about = slabwise_cuda::driver::properties(0).map_err(text)?;
    let (major, minor) = slabwise_cuda::driver::start().map_err(text)?;
    let nvrtc = slabwise_cuda::nvrtc::version().map_or_else(
        |e| e.to_string(),
        |(major, minor)| format!("{major}.{minor}"),
    );
    let cublaslt = slabwise_cuda::cublaslt::version()
        .map_or_else(|_| "none".into(), |version| version.to_string());
    let cudnn = slabwise_cuda::cudnn::version()
        .map_or_else(|_| "none".into(), |version| version.to_string());
    // The version of the kernel's module, if the system reports it, because the library's call
    // gives the version of CUDA.
    let module = std::fs::read_to_string("/proc/driver/nvidia/version").unwrap_or_default();
    let module = module
        .split_whitespace()
        .find(|word| word.contains('.') && word.starts_with(|c: char| c.is_ascii_digit()));
    Ok(json!({
        "device": about.description.name,
        "driver": module.unwrap_or("unknown"),
        "versions": {
            "slabwise": env!("CARGO_PKG_VERSION"),
            "cuda": format!("{major}.{minor}"),
            "sm": about.target.sm,
            "multiprocessors": about.target.multiprocessors,
            "nvrtc": nvrtc,
            "cublaslt": cublaslt,
            "cudnn": cudnn,
        },
    }))
}

/// Times of runs, milliseconds.
struct Times(Vec<f64>);

impl Times {
    fn at(&self, part: f64) -> f64 {
        self.0[((self.0.len() - 1) as f64 * part).round() as usize]
    }

    fn median(&self) -> f64 {
        self.at(0.5)
    }

    /// The median, and the range of eight of ten groups.
    fn fields(&self) -> Map<String, Value> {
        Map::from_iter([
            ("ms".into(), json!(self.median())),
            ("ms_low".into(), json!(self.at(0.1))),
            ("ms_high".into(), json!(self.at(0.9))),
            ("samples".into(), json!(self.0.len())),
        ])
    }
}

/// Whether only to check that the measurement works.
fn is_quick() -> bool {
    std::env::var_os(QUICK).is_some()
}

/// The time of a group of runs, divided by their number. `work` starts the given number of runs and
/// waits until they are done.
fn timed(group: u32, mut work: impl FnMut(u32) -> Result<()>) -> Result<Times> {
    let (group, patience, least) = if is_quick() {
        (1, Duration::ZERO, 2)
    } else {
        (group, PATIENCE, SAMPLES_LEAST)
    };
    let began = Instant::now();
    for run in 0..WARM_UP {
        if run >= WARM_UP_LEAST && began.elapsed() >= patience {
            break;
        }
        work(1)?;
    }
    let (mut times, began) = (Vec::new(), Instant::now());
    while began.elapsed() < patience || times.len() < least {
        let start = Instant::now();
        work(group)?;
        times.push(start.elapsed().as_secs_f64() * 1e3 / f64::from(group));
    }
    times.sort_by(f64::total_cmp);
    Ok(Times(times))
}

/// Times runs of a program.
fn runs<const N: usize>(
    session: &mut Session,
    program: &Program<N>,
    feed: &(impl Feed + ?Sized),
) -> Result<Times> {
    timed(GROUP, |count| {
        for _ in 0..count {
            session.run(program, feed)?;
        }
        session.synchronize()
    })
}

/// Bytes allocated by the driver and bytes planned, and the libraries and functions that compute
/// the program.
fn about<const N: usize>(session: &Session, program: &Program<N>) -> Map<String, Value> {
    let mut libraries: Vec<String> = program.libraries().into_iter().flatten().collect();
    libraries.sort();
    let uses: Vec<Value> = libraries
        .chunk_by(|a, b| a == b)
        .map(|same| json!([same[0], same.len()]))
        .collect();
    let resources: Vec<_> = program.resources().into_iter().flatten().collect();
    let mut functions: Vec<&str> = resources
        .iter()
        .map(|used| used.function.as_str())
        .collect();
    functions.sort();
    functions.dedup();
    let spilled = resources.iter().filter(|used| used.spill_bytes > 0).count();
    // A step has hundreds of functions; those of a single product are the ones that were chosen for
    // it.
    let picks = if functions.len() <= 8 {
        json!(functions)
    } else {
        json!(functions.len())
    };
    Map::from_iter([
        ("bytes".into(), json!(session.device_bytes())),
        (
            "planned_bytes".into(),
            json!(session.persistent_bytes() + program.plan().slab_bytes()),
        ),
        ("kernels".into(), json!(program.plan().kernels())),
        // Functions that this process compiled, and those that it read from the cache.
        ("compiled".into(), json!(Compiler::of_process().compiled())),
        ("read".into(), json!(Compiler::of_process().read())),
        (
            "picks".into(),
            json!({ "libraries": uses, "functions": picks, "spilling": spilled }),
        ),
    ])
}
