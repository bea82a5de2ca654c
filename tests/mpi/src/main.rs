//! A rank of the tests of worlds of processes: it joins the world of its launcher and does what its
//! arguments say.

#![forbid(unsafe_code)]

use std::process::ExitCode;
use std::time::Duration;

use ndarray::s;
use slabwise::nn::{LayerNorm, Linear};
use slabwise::optim::AdamW;
use slabwise::prelude::*;
use slabwise::{Error, Strategy, World};
use slabwise_kernels::collective::Transport;
use slabwise_models::noise;

const INPUTS: usize = 12;
const CLASSES: usize = 5;
/// So that a weight of this many rows and columns is sent by itself.
const WIDTH: usize = 132;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    if let ["guarded", ..] = words[..] {
        let own = std::env::current_exe().expect("this program");
        let rest: Vec<_> = arguments[1..].iter().map(Into::into).collect();
        let code = slabwise_mpi::guard(own.as_os_str(), &rest).expect("it starts");
        return ExitCode::from(u8::try_from(code).unwrap_or(1));
    }
    let done = match words[..] {
        ["exchange"] => exchange(),
        ["train", strategy, grains, steps, file] => train(strategy, grains, steps, file),
        ["endless"] => endless(None),
        ["hang", rank] => endless(rank.parse().ok()),
        _ => Err(Error::Value(
            "exchange | train STRATEGY GRAINS STEPS FILE | endless | hang RANK".into(),
        )),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            println!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Exchanges of many lengths, each byte of which is known.
fn exchange() -> Result<()> {
    let fail = |why: String| Error::Value(why);
    let joined = slabwise_mpi::join().map_err(|e| fail(e.to_string()))?;
    let mpi = joined.ok_or_else(|| fail("no launcher".into()))?;
    let (rank, ranks) = (mpi.rank(), mpi.ranks());
    let byte = |from: usize, to: usize, at: usize| (from * 31 + to * 7 + at * 3 + at / 251) as u8;
    // The last one needs several pieces.
    for part in [0, 1, 3, 64, 1000, 65_537, 5 << 20] {
        let send: Vec<u8> = (0..ranks)
            .flat_map(|to| (0..part).map(move |at| byte(rank, to, at)))
            .collect();
        let mut receive = vec![0; part * ranks];
        mpi.all_to_all(&send, &mut receive)
            .map_err(|e| fail(e.to_string()))?;
        for from in 0..ranks {
            let row = &receive[from * part..(from + 1) * part];
            if let Some(at) = (0..part).find(|&at| row[at] != byte(from, rank, at)) {
                return Err(fail(format!("all_to_all of {part}: byte {at} from {from}")));
            }
        }
        let own: Vec<u8> = (0..part).map(|at| byte(rank, 99, at)).collect();
        mpi.all_gather(&own, &mut receive)
            .map_err(|e| fail(e.to_string()))?;
        for from in 0..ranks {
            let row = &receive[from * part..(from + 1) * part];
            if let Some(at) = (0..part).find(|&at| row[at] != byte(from, 99, at)) {
                return Err(fail(format!("all_gather of {part}: byte {at} from {from}")));
            }
        }
    }
    println!("exchanged as rank {rank} of {ranks}");
    Ok(())
}

struct Net {
    stem: Linear,
    body: Linear,
    norm: LayerNorm,
    head: Linear,
}

impl Module for Net {
    fn forward<'t>(&self, x: Tensor<'t>) -> Tensor<'t> {
        let x = x.apply(&self.stem).gelu().apply(&self.body);
        x.apply(&self.norm).apply(&self.head)
    }
}

/// A session of a world and its step on its rows of a batch of 24.
fn learner(world: &World) -> Result<(Session, Program<1>)> {
    let params = Params::seeded(3);
    let at = &params.root();
    let net = Net {
        stem: Linear::new(at / "stem", INPUTS, WIDTH),
        body: Linear::new(at / "body", WIDTH, WIDTH),
        norm: LayerNorm::new(at / "norm", WIDTH),
        head: Linear::new(at / "head", WIDTH, CLASSES),
    };
    let session = Session::new(Device::Cpu, params)?.with_threads(1);
    let mut session = session.on(world.clone())?;
    let trace = Trace::training();
    let own = world.share(24).len();
    let x = trace.input("x", F32, (own, INPUTS));
    let labels = trace.input("labels", I32, (own,));
    let parts = world.grains_per_rank();
    let (x, labels) = (x.split(0, parts), labels.split(0, parts));
    let loss = trace.minimize_in_parts(parts, AdamW::new(1e-2), |i| {
        x[i].apply(&net).cross_entropy(labels[i])
    });
    let step = session.compile(&trace, [loss])?;
    Ok((session, step))
}

fn run_step(session: &mut Session, step: &Program<1>, seed: u64) -> Result<f32> {
    let mut draw = noise(seed);
    let x = ndarray::Array2::from_shape_simple_fn((24, INPUTS), || draw() * 2.0 - 1.0);
    let labels = ndarray::Array1::from_shape_fn(24, |i| ((i as u64 * 7 + seed) % 5) as i32);
    let own = session.world().share(24);
    let x = x.slice(s![own.clone(), ..]).to_owned();
    let labels = labels.slice(s![own]).to_owned();
    Ok(session.run(step, (&x, &labels))?[0].item())
}

/// Trains, and writes the file of all weights and state.
fn train(strategy: &str, grains: &str, steps: &str, file: &str) -> Result<()> {
    let strategy = match strategy {
        "sharded" => Strategy::ShardedState,
        _ => Strategy::Replicated,
    };
    let number = |text: &str| text.parse().map_err(|_| Error::Value(format!("{text:?}")));
    let world = World::join()?.with_grains(number(grains)?)?;
    let (mut session, step) = learner(&world.with_strategy(strategy))?;
    for seed in 0..number(steps)? as u64 {
        run_step(&mut session, &step, seed)?;
    }
    assert_eq!(session.last_run().peak_slab_bytes, step.plan().slab_bytes());
    session.save(file)
}

/// Steps until something ends them; one rank may stop in the middle of them. Each rank says its
/// process's number first.
fn endless(hangs: Option<usize>) -> Result<()> {
    let world = World::join()?;
    println!("process {} is rank {}", std::process::id(), world.rank());
    let (mut session, step) = learner(&world)?;
    for seed in 0.. {
        if seed == 20 && hangs == Some(world.rank()) {
            std::thread::sleep(Duration::from_secs(3600));
        }
        run_step(&mut session, &step, seed)?;
    }
    Ok(())
}
