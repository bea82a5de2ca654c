//! A rank of the tests of worlds of processes: it joins the world of its launcher and does what its
//! arguments say.

#![forbid(unsafe_code)]

use std::process::ExitCode;

use ndarray::Axis;
use slabwise::nn::{LayerNorm, Linear};
use slabwise::optim::AdamW;
use slabwise::prelude::*;
use slabwise::{Error, Mesh, Strategy, World};
use slabwise_models::{Model, noise, rows_of};

const INPUTS: usize = 12;
const CLASSES: usize = 5;
/// So that a weight of this many rows and columns is sent by itself.
const WIDTH: usize = 132;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let done = match words[..] {
        ["train", strategy, grains, steps, file] => {
            join(strategy, grains).and_then(|world| train(&world, steps, file))
        }
        ["mesh", strategy, grains, steps, file] => mesh([strategy, grains, steps, file]),
        ["model", name, batch, strategy, grains, steps, file] => {
            model(name, batch, [strategy, grains, steps, file])
        }
        ["mistake"] => mistake(),
        _ => Err(Error::Value(
            "train|mesh STRATEGY GRAINS STEPS FILE, model NAME BATCH …, or mistake".into(),
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
    let x = x.slice_axis(Axis(0), own.clone().into()).to_owned();
    let labels = labels.slice_axis(Axis(0), own.into()).to_owned();
    Ok(session.run(step, (&x, &labels))?[0].item())
}

fn number(text: &str) -> Result<usize> {
    text.parse().map_err(|_| Error::Value(format!("{text:?}")))
}

fn join(strategy: &str, grains: &str) -> Result<World> {
    let strategy = match strategy {
        "sharded" => Strategy::ShardedState,
        _ => Strategy::Replicated,
    };
    let world = World::join()?.with_grains(number(grains)?)?;
    Ok(world.with_strategy(strategy))
}

/// Trains a built-in model on its rows of batches, writes the file of all weights and state, and says
/// how many bytes it has sent in its steps by messages and in all.
fn model(name: &str, batch: &str, [strategy, grains, steps, file]: [&str; 4]) -> Result<()> {
    let (world, batch) = (join(strategy, grains)?, number(batch)?);
    let model = Model::parse(name)?;
    let params = Params::seeded(3);
    let network = model.build(&params);
    let session = Session::new(Device::Cpu, params)?.with_threads(1);
    let mut session = session.on(world.clone())?;
    let trace = Trace::training();
    let (rows, parts) = (world.share(batch), world.grains_per_rank());
    let length: Dim = if batch.is_multiple_of(world.grains()) {
        rows.len().into()
    } else {
        let most = parts * batch.div_ceil(world.grains());
        Dim::bounded("batch", most as u32)
    };
    let (x, labels) = network.inputs(&trace, length);
    let (x, labels) = (x.shares(parts), labels.shares(parts));
    let loss = trace.minimize_in_parts(parts, AdamW::new(1e-3), |i| {
        x[i].apply(&network).cross_entropy(labels[i])
    });
    let step = session.compile(&trace, [loss])?;
    let before = [world.message_bytes(), world.sent_bytes()];
    for seed in 0..number(steps)? as u64 {
        let (examples, labels) = model.batch(batch, seed);
        let (examples, labels) = (examples.rows(rows.clone()), rows_of(&labels, rows.clone()));
        let loss = session.run(&step, (&examples, &labels))?[0].item();
        assert!(loss.is_finite(), "{loss}");
    }
    let after = [world.message_bytes(), world.sent_bytes()];
    assert_eq!(session.last_run().peak_slab_bytes, step.plan().slab_bytes());
    println!(
        "messages {} of {}",
        after[0] - before[0],
        after[1] - before[1]
    );
    session.save(file)
}

/// Exchanges values along both axes of a mesh of 2 x 2, trains on it as [`train`] does, and says
/// how many bytes it has sent by messages and in all.
fn mesh([strategy, grains, steps, file]: [&str; 4]) -> Result<()> {
    let world = join(strategy, grains)?;
    let mesh = world.mesh([("data", 2), ("model", 2)])?;
    for axis in ["data", "model"] {
        exchanges(&mesh, axis)?;
    }
    let world = mesh.world();
    let (mut session, step) = learner(world)?;
    let before = [world.message_bytes(), world.sent_bytes()];
    run_steps(&mut session, &step, steps)?;
    let after = [world.message_bytes(), world.sent_bytes()];
    let [messages, all] = [after[0] - before[0], after[1] - before[1]];
    println!("messages {messages} of {all}");
    session.save(file)
}

/// Checks every exchange along an axis. `WIDTH` rows are of 64 KiB and more.
fn exchanges(mesh: &Mesh, axis: &str) -> Result<()> {
    let params = Params::seeded(3);
    let one = params.root().param("one", (), Init::Constant(1.0));
    let mut session = Session::new(Device::Cpu, params)?
        .with_threads(1)
        .on(mesh.clone())?;
    let trace = Trace::inference();
    let x = trace.input("x", F32, (WIDTH, WIDTH)) * trace.param(&one);
    let outputs = [
        x.sum_across(axis),
        x.gather_across(axis, 1),
        x.scatter_across(axis, 0),
        x.exchange_across(axis, 1, 0),
    ];
    let program = session.compile(&trace, outputs)?;
    let of_rank = |rank: usize| {
        ndarray::Array2::from_shape_fn((WIDTH, WIDTH), |(i, j)| ((i * 3 + j) % 7 + 8 * rank) as f32)
    };
    let rank = mesh.world().rank();
    let stride = if axis == "data" { 2 } else { 1 };
    let place = rank / stride % 2;
    assert_eq!(mesh.coordinate(axis)?, place);
    let first = rank - place * stride;
    let pair = [of_rank(first), of_rank(first + stride)];
    let sum = &pair[0] + &pair[1];
    let half = |x: &ndarray::Array2<f32>, dim: usize| {
        let own = place * WIDTH / 2..(place + 1) * WIDTH / 2;
        x.slice_axis(Axis(dim), own.into()).to_owned()
    };
    let join = |parts: [ndarray::Array2<f32>; 2], dim: usize| {
        let views = [parts[0].view(), parts[1].view()];
        ndarray::concatenate(Axis(dim), &views).expect("they fit")
    };
    let wanted = [
        sum.clone(),
        join(pair.clone(), 1),
        half(&sum, 0),
        join([half(&pair[0], 1), half(&pair[1], 1)], 0),
    ];
    let ran = session.run(&program, of_rank(rank))?;
    for (at, (ran, wanted)) in ran.iter().zip(wanted).enumerate() {
        assert_eq!(
            ran.array::<f32>()?,
            wanted.into_dyn(),
            "exchange {at} along {axis}"
        );
    }
    Ok(())
}

/// Compiles a program that has a mistake on rank 1.
fn mistake() -> Result<()> {
    let world = World::join()?;
    let params = Params::seeded(3);
    let layer = Linear::new(&params.root() / "layer", 4, 3);
    let mut session = Session::new(Device::Cpu, params)?.on(world.clone())?;
    let trace = Trace::training();
    let inputs = if world.rank() == 1 { 5 } else { 4 };
    let loss = trace.input("x", F32, (2, inputs));
    let loss = loss.apply(&layer).square().mean();
    trace.minimize(loss, AdamW::new(1e-3));
    session.compile(&trace, [loss]).map(drop)
}

/// Trains, and writes the file of all weights and state.
fn train(world: &World, steps: &str, file: &str) -> Result<()> {
    let (mut session, step) = learner(world)?;
    run_steps(&mut session, &step, steps)?;
    session.save(file)
}

/// Makes so many steps, in the planned bytes.
fn run_steps(session: &mut Session, step: &Program<1>, steps: &str) -> Result<()> {
    for seed in 0..number(steps)? as u64 {
        run_step(session, step, seed)?;
    }
    assert_eq!(session.last_run().peak_slab_bytes, step.plan().slab_bytes());
    Ok(())
}
