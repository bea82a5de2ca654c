//! A small GPT that learns a text character by character and then generates text.
//!
//! `cargo run --release --example char_gpt -- --data FILE --sample 1000`
//!
//! Without `--data` it learns Shakespeare; on two ranks by `slabwise launch -n 2 --
//! target/release/examples/char_gpt`. The generating program takes one character per call. It
//! shares the weights of the training program, and keeps keys and values of earlier characters as
//! states of the session.
#![forbid(unsafe_code)]

mod common;
#[path = "char_gpt/model.rs"]
mod model;
#[path = "char_gpt/text.rs"]
mod text;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;
use model::{Gpt, Sizes};
use ndarray::arr1;
use slabwise::data::epoch_seed;
use slabwise::fit::Better;
use slabwise::optim::{AdamW, Group, Schedule};
use slabwise::prelude::*;
use slabwise_models::noise;
use text::Text;

#[derive(Parser)]
struct Args {
    /// The text to learn: UTF-8, plain or gzip-compressed; Shakespeare unless given
    #[arg(long, value_name = "FILE")]
    data: Option<PathBuf>,
    /// Training steps
    #[arg(long, default_value_t = 2500, value_parser = clap::value_parser!(u32).range(1..=10_000_000))]
    steps: u32,
    /// Windows of the text in a step
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    batch: u32,
    /// Characters in a window
    #[arg(long, default_value_t = 96, value_parser = clap::value_parser!(u32).range(2..=4096))]
    length: u32,
    /// The width of a character's vector, which the heads divide
    #[arg(long, default_value_t = 128, value_parser = clap::value_parser!(u32).range(1..=4096))]
    width: u32,
    /// Attention heads in a block
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=64))]
    heads: u32,
    /// Blocks
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=64))]
    layers: u32,
    /// The largest learning rate
    #[arg(long, default_value_t = 2e-3)]
    rate: f64,
    /// Characters to generate at the end
    #[arg(long, default_value_t = 500, value_parser = clap::value_parser!(u32).range(0..=1_000_000))]
    sample: u32,
    /// The beginning of the generated text
    #[arg(long, default_value = "\n")]
    prompt: String,
    /// The temperature of sampling: below 1 likely characters become likelier, above 1 less likely
    #[arg(long, default_value_t = 0.8)]
    temperature: f32,
    #[command(flatten)]
    run: common::Run,
}

/// Steps between two evaluations of the loss on validation text.
const LOOK: u32 = 250;
/// The state that holds the characters of the text.
const CHARACTERS: &str = "text.characters";
/// Windows in each evaluation.
const WINDOWS: usize = 256;

fn main() -> ExitCode {
    common::exit(run(&Args::parse()))
}

fn run(args: &Args) -> Result<()> {
    let [length, width, heads, layers, batch] =
        [args.length, args.width, args.heads, args.layers, args.batch].map(|n| n as usize);
    if !(args.temperature.is_finite() && args.temperature > 0.0) {
        return Err(slabwise::Error::Value(format!(
            "--temperature {} is not a number above 0",
            args.temperature
        )));
    }
    if !width.is_multiple_of(heads) {
        return Err(slabwise::Error::Value(format!(
            "--width {width} does not divide into --heads {heads}"
        )));
    }
    let text = Text::read(args.data.as_deref(), length)?;
    let sizes = Sizes {
        vocabulary: text.characters.len(),
        length,
        width,
        heads,
        layers,
    };

    let params = Params::seeded(args.run.seed);
    let model = Gpt::new(&params.root(), sizes);
    let mut session = args.run.session(params)?;
    let world = session.world().clone();
    if world.rank() == 0 {
        println!(
            "{} characters, {} different",
            text.tokens.len(),
            text.characters.len()
        );
    }
    let own = args.batch.div_ceil(world.ranks() as u32);

    let trace = Trace::training();
    let loss = loss(&trace, &model, sizes, own);
    let rate = Schedule::cosine(args.rate, args.steps + 1)
        .warmup(args.steps.min(100))
        .floor(args.rate / 10.0);
    // Norms and biases do not decay.
    let optimizer = AdamW::new(rate)
        .betas(0.9, 0.99)
        .weight_decay(0.1)
        .group(|w| w.rank() < 2, Group::new().weight_decay(0.0));
    trace.minimize(loss, optimizer.clip_norm(1.0));
    // A checkpoint has the characters of its text, because the weights are of their numbers.
    let codes = text.codes();
    trace.state(CHARACTERS, I32, (codes.len(),), Init::Constant(0.0));
    // Of the whole batch, where several ranks have a part of it each.
    let train = session.compile(&trace, [loss.mean_over_ranks()])?;

    let trace = Trace::inference();
    let judged = self::loss(&trace, &model, sizes, own);
    let judge = session.compile(&trace, [judged.mean_over_ranks()])?;

    let trace = Trace::inference().named("write");
    let logits = model.next(
        trace.input("token", I32, (1,)),
        trace.input("place", I32, (1,)),
    );
    let write = session.compile(&trace, [logits])?;

    session.set_value(CHARACTERS, &arr1(&codes))?;
    let done = args.run.start(&mut session, &train)?;
    text.check_codes(&session.value_as::<i32>(CHARACTERS)?)?;
    // An epoch is the steps from one evaluation to the next. The last one of a checkpoint may be cut
    // short by its --steps, and is then continued.
    let steps_before = |epoch: u32| (epoch - 1) * LOOK;
    let windows = |epoch: u32| {
        let before = steps_before(epoch);
        let steps = (args.steps - before).min(LOOK);
        let all = text.windows(
            length,
            batch,
            steps as usize,
            epoch_seed(args.run.seed, epoch.into()),
            &world,
        );
        all.skip(done.saturating_sub(before) as usize)
    };
    let fit = slabwise::Fit::new(&train)
        .from_epoch(done / LOOK + 1)
        .epochs(args.steps.div_ceil(LOOK))
        .validate(&judge, Better::Lower, || {
            text.validation(length, batch, WINDOWS, &world)
        })
        .on_epoch(|session, epoch| {
            args.run.checkpoint(session)?;
            // Every rank has the same numbers.
            if world.rank() > 0 {
                return Ok(());
            }
            let before = steps_before(epoch.number).max(done);
            let step = (before + epoch.steps as u32, args.steps);
            let judged = epoch.validation.unwrap_or(f64::NAN);
            println!(
                "step {} of {}: loss {:.4}, validation {judged:.4} nats per character, {:.1} s",
                step.0, step.1, epoch.loss, epoch.seconds
            );
            Ok(())
        });
    if done < args.steps {
        fit.run(&mut session, windows)?;
    }

    if world.rank() > 0 {
        return Ok(());
    }
    let written = sample(&mut session, &write, &text, length, args)?;
    println!("{written}");
    Ok(())
}

/// The mean cross-entropy of the next character, in nats.
fn loss<'t>(trace: &'t Trace, model: &Gpt, sizes: Sizes, batch: u32) -> Tensor<'t> {
    let shape = (Dim::bounded("batch", batch), sizes.length);
    let (tokens, next) = (
        trace.input("tokens", I32, shape),
        trace.input("next", I32, shape),
    );
    model.forward(tokens).cross_entropy(next.flatten(0))
}

/// Continues the prompt. When the window is full, its last half is read again from place 0.
fn sample(
    session: &mut Session,
    write: &Program<1>,
    text: &Text,
    length: usize,
    args: &Args,
) -> Result<String> {
    let mut tokens = text.encode(&args.prompt);
    if tokens.is_empty() {
        tokens.push(0);
    }
    let (mut draw, mut fed, mut place) = (noise(args.run.seed), 0, 0);
    let end = tokens.len() + args.sample as usize;
    while tokens.len() < end {
        if place == length {
            (fed, place) = (fed - length / 2, 0);
        }
        let [logits] = session.run(write, (&arr1(&[tokens[fed]]), &arr1(&[place as i32])))?;
        (fed, place) = (fed + 1, place + 1);
        if fed == tokens.len() {
            tokens.push(choose(
                logits.view::<f32>()?.iter().map(|x| x / args.temperature),
                draw(),
            ));
        }
    }
    Ok(tokens
        .iter()
        .map(|&token| text.characters[token as usize])
        .collect())
}

/// Samples from the softmax of these logits with a uniform number in 0..1.
fn choose(logits: impl Iterator<Item = f32> + Clone, uniform: f32) -> i32 {
    let most = logits.clone().fold(f32::NEG_INFINITY, f32::max);
    let weights = logits.map(|x| f64::from((x - most).exp()));
    let mut left = weights.clone().sum::<f64>() * f64::from(uniform);
    let found = weights.clone().position(|w| {
        left -= w;
        left < 0.0
    });
    // Rounding may leave a remainder after the last.
    found.unwrap_or_else(|| weights.count() - 1) as i32
}
