//! Generates tokens with a Llama-style decoder, token by token from its cache.
//!
//! `cargo run --release --example llama_generate -- --weights FILE.safetensors --tokens 200`
//!
//! Without `--weights` the weights are random. Sizes are those of [`Llama::SMALL`], and a file has
//! the names of published checkpoints; a GGUF file of a Llama has its own sizes. `--bits 4` stores
//! weights as integers of 4 bits in blocks of 32, which a file of floats is quantized to as it is
//! loaded, and which a GGUF file in Q4_0 has already.
#![forbid(unsafe_code)]

use std::path::PathBuf;
use std::time::Instant;

use clap::Parser;
use ndarray::Array2;
use slabwise::prelude::*;
use slabwise::weights::{Rules, Weights};
use slabwise::{Bytes, Quantization};
use slabwise_models::{Llama, Sampling};

#[derive(Parser)]
struct Args {
    /// Weights in the layout of published Llama checkpoints, or a GGUF file; random unless given
    #[arg(long, value_name = "FILE")]
    weights: Option<PathBuf>,
    /// Tokens to generate
    #[arg(long, default_value_t = 200, value_parser = clap::value_parser!(u32).range(1..=4096))]
    tokens: u32,
    /// The temperature of sampling; 0 chooses the likeliest token
    #[arg(long, default_value_t = 0.8, value_parser = temperature, allow_negative_numbers = true)]
    temperature: f32,
    /// The number of the likeliest tokens to choose among
    #[arg(long, default_value_t = 40)]
    top_k: usize,
    /// The first token
    #[arg(long, default_value_t = 1)]
    first: u16,
    /// The bits of a weight: floats of 32 or 16 bits (bf16), or integers of 8, 4 or 2 in blocks of 32
    #[arg(long, default_value_t = 32, value_parser = bits)]
    bits: u32,
    /// The seed of weights and samples
    #[arg(long, default_value_t = 0)]
    seed: u64,
}

fn temperature(text: &str) -> std::result::Result<f32, String> {
    let number = text
        .parse()
        .ok()
        .filter(|t: &f32| t.is_finite() && *t >= 0.0);
    number.ok_or_else(|| format!("{text} is not a number from 0 on"))
}

fn bits(text: &str) -> std::result::Result<u32, String> {
    match text.parse() {
        Ok(bits @ (32 | 16 | 8 | 4 | 2)) => Ok(bits),
        _ => Err(format!("{text} is none of 32, 16, 8, 4 and 2")),
    }
}

fn main() -> Result<()> {
    let args = Args::parse();
    let params = Params::seeded(args.seed);
    let root = match args.bits {
        32 => params.root(),
        16 => params.root().stored_in(BF16),
        bits => params.root().quantized(Quantization { bits, block: 32 }),
    };
    let weights = args.weights.as_ref().map(Weights::open).transpose()?;
    let gguf = weights
        .as_ref()
        .filter(|weights| weights.metadata().contains_key("general.architecture"));
    let (sizes, rules) = match gguf {
        Some(weights) => {
            let sizes = Llama::of_gguf(weights)?;
            (sizes, Rules::llama_gguf(sizes.heads, sizes.key_heads))
        }
        None => (Llama::SMALL, Rules::llama()),
    };
    let decoder = sizes.layers(&root);
    let mut session = Session::new(Device::Cpu, params)?;
    let trace = Trace::inference().sampling().named("write");
    let token = trace.input("token", I32, (1, 1));
    let logits = decoder.continued(token, args.tokens as usize);
    let sampling = Sampling::new()
        .temperature(args.temperature)
        .top_k(args.top_k);
    let write = session.compile(&trace, [sampling.of(logits)])?;
    if let Some(weights) = &weights {
        session.load_from(weights, &rules)?;
    }
    let mut token = i32::from(args.first);
    let (mut text, mut times) = (Vec::new(), Vec::new());
    for _ in 0..args.tokens {
        let started = Instant::now();
        let [next] = session.run(&write, (&Array2::from_elem((1, 1), token),))?;
        token = next.view::<i32>()?[[0]];
        times.push(started.elapsed().as_secs_f64() * 1e3);
        text.push(token.to_string());
    }
    println!("{}", text.join(" "));
    let part = times.len().div_ceil(4);
    let mean = |times: &[f64]| times.iter().sum::<f64>() / times.len() as f64;
    println!(
        "{:.2} ms for each of the first {part} tokens, {:.2} ms for each of the last; weights and cache of {}",
        mean(&times[..part]),
        mean(&times[times.len() - part..]),
        Bytes(session.persistent_bytes())
    );
    Ok(())
}
