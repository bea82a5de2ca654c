//! A GPU's figures beside those of its peers, as one table: `cargo bench --bench gpu`.
//!
//! Each figure is taken in a process of its own, so that the peak of one does not count for another, one after the other.
//! Peers are run by `python3` from `benches/peers/`; what is not installed is said to be so.

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use ndarray::Array2;
use slabwise::feed::{Feed, ToBytes};
use slabwise::models::{Model, noise};
use slabwise::prelude::*;
use slabwise_kernels::memory::Element;

/// Runs before the timed ones.
const WARM_UP: u32 = 20;
/// Timed runs: as many as fit into this.
const PATIENCE: Duration = Duration::from_secs(1);

fn main() -> Result<()> {
    let words: Vec<String> = std::env::args().skip(1).filter(|word| word != "--bench").collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    match words[..] {
        [] => table(),
        ["step", model, batch] => step(Model::parse(model)?, number(batch)?),
        ["gemm", n, "f32"] => gemm::<f32>(number(n)?, |x| x),
        ["gemm", n, "bf16"] => gemm::<half::bf16>(number(n)?, half::bf16::from_f32),
        ["copy"] => copy(),
        _ => Err(slabwise::Error::Value("it takes nothing, or step MODEL BATCH, gemm N f32|bf16, or copy".into())),
    }
}

fn number(text: &str) -> Result<u32> {
    text.parse().map_err(|e| slabwise::Error::Value(format!("{text}: {e}")))
}

/// Every figure, each by a child.
fn table() -> Result<()> {
    if let Err(why) = Device::cuda(0) {
        println!("There is no GPU to measure: {why}");
        for (name, about) in Device::survey() {
            println!("  {name}: {about}");
        }
        return Ok(());
    }
    println!("{:<44} {:>12} {:>14}", "", "ms", "peak MiB");
    for model in ["mlp", "cnn"] {
        for batch in ["1", "16", "64", "256"] {
            own(&format!("{model} batch {batch}: slabwise"), &["step", model, batch], &[]);
            own(&format!("{model} batch {batch}: slabwise, no graph"), &["step", model, batch], &[("SLABWISE_CUDA_GRAPHS", "0")]);
            for mode in ["eager", "compile", "reduce-overhead", "graph"] {
                peer(&format!("{model} batch {batch}: torch {mode}"), "torch_step.py", &[mode, model, batch]);
            }
            peer(&format!("{model} batch {batch}: jax jit"), "jax_step.py", &[model, batch]);
        }
    }
    for dtype in ["f32", "bf16"] {
        // A library that is nowhere leaves our own kernels to be timed; without timing the first ranked is taken.
        let ways: [(&str, &[(&str, &str)]); 3] = [
            ("the pick", &[]),
            ("own, timed", &[("SLABWISE_LIBCUBLASLT", "/nowhere/libcublasLt.so")]),
            ("own, ranked first", &[("SLABWISE_AUTOTUNE", "0")]),
        ];
        for (way, variables) in ways {
            own(&format!("gemm 4096 {dtype}: slabwise, {way}"), &["gemm", "4096", dtype], variables);
        }
        peer(&format!("gemm 4096 {dtype}: torch (cuBLAS)"), "torch_step.py", &["gemm", "4096", dtype]);
    }
    own("1 GiB through x + 1: slabwise", &["copy"], &[]);
    peer("1 GiB through x + 1: torch", "torch_step.py", &["copy", "-", "-"]);
    Ok(())
}

fn own(title: &str, words: &[&str], variables: &[(&str, &str)]) {
    let program = std::env::current_exe().unwrap_or_default();
    // What is reserved ahead is no peak.
    let mut command = Command::new(program);
    command.args(words).env("SLABWISE_PREALLOCATE", "0").envs(variables.iter().copied());
    row(title, command.output());
}

fn peer(title: &str, script: &str, words: &[&str]) {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("benches/peers").join(script);
    row(title, Command::new("python3").arg(script).args(words).output());
}

/// A row from what a child printed: milliseconds and bytes, and before that a line of what did it; or why not.
fn row(title: &str, output: std::io::Result<std::process::Output>) {
    let said = match &output {
        Ok(done) => [String::from_utf8_lossy(&done.stdout), String::from_utf8_lossy(&done.stderr)].map(|s| s.trim().to_string()),
        Err(e) => [String::new(), e.to_string()],
    };
    let figures: Vec<f64> = said[0].lines().last().unwrap_or_default().split(' ').filter_map(|word| word.parse().ok()).collect();
    match figures[..] {
        [ms, bytes] => {
            let by = said[0].lines().rev().nth(1).unwrap_or_default();
            println!("{}", format!("{title:<44} {ms:>12.4} {:>14.1}  {by}", bytes / f64::from(1 << 20)).trim_end());
        }
        _ => println!("{title:<44} {}", said[1].lines().last().unwrap_or("said nothing")),
    }
}

/// Prints what a run takes at the median and the bytes that the device gave. Runs are asked for in groups, as training does that
/// looks at its loss now and then.
fn report<const N: usize>(session: &mut Session, program: &Program<N>, feed: impl Feed) -> Result<()> {
    const GROUP: u32 = 10;
    for _ in 0..WARM_UP {
        session.run(program, &feed)?;
    }
    session.synchronize()?;
    let (mut times, began) = (Vec::new(), Instant::now());
    while began.elapsed() < PATIENCE || times.len() < 5 {
        let start = Instant::now();
        for _ in 0..GROUP {
            session.run(program, &feed)?;
        }
        session.synchronize()?;
        times.push(start.elapsed().as_secs_f64() * 1e3 / f64::from(GROUP));
    }
    times.sort_by(f64::total_cmp);
    println!("{} {}", times[times.len() / 2], session.device_bytes());
    Ok(())
}

/// A training step: inputs from the host, weights updated.
fn step(model: Model, batch: u32) -> Result<()> {
    let params = Params::seeded(0);
    let network = model.build(&params);
    let mut session = Session::new(Device::cuda(0)?, params)?;
    let program = network.training(&mut session, batch, model.optimizer())?;
    let (examples, labels) = model.batch(batch as usize, 1);
    report(&mut session, &program, (&examples, &labels))
}

/// C = A·B of matrices that stay on the device.
fn gemm<T: Element + ToBytes>(n: u32, make: impl Fn(f32) -> T) -> Result<()> {
    let mut session = Session::new(Device::cuda(0)?, Params::seeded(0))?;
    let trace = Trace::inference().named("gemm");
    let [a, b] = ["a", "b"].map(|name| trace.input(name, T::DTYPE, (n, n)));
    let program = session.compile(&trace, [a.matmul(b)])?;
    let functions = program.resources().into_iter().flatten().map(|used| used.function);
    println!("{}", program.libraries().into_iter().flatten().chain(functions).collect::<Vec<_>>().join(", "));
    let mut draw = noise(1);
    let mut matrix = || Array2::from_shape_simple_fn((n as usize, n as usize), || make(draw() - 0.5));
    let (a, b) = (session.upload("a", &matrix())?, session.upload("b", &matrix())?);
    report(&mut session, &program, (&a, &b))
}

/// Half a GiB read and half a GiB written.
fn copy() -> Result<()> {
    let n = 1u32 << 27;
    let mut session = Session::new(Device::cuda(0)?, Params::seeded(0))?;
    let trace = Trace::inference().named("copy");
    let x = trace.input("x", F32, (n,));
    let program = session.compile(&trace, [x + 1.0])?;
    let x = session.upload("x", &ndarray::Array1::<f32>::zeros(n as usize))?;
    report(&mut session, &program, (&x,))
}
