//! Generates text with a decoder of the family of Llama, token by token from its cache.
//!
//! `cargo run --release -p slabwise-models --example llama_generate -- --model FOLDER --prompt TEXT`
//!
//! The folder is one of the Hugging Face hub, with `config.json`, `tokenizer.json` and
//! `model.safetensors` or its shards, of the architecture `LlamaForCausalLM`, `MistralForCausalLM`,
//! `Qwen2ForCausalLM` or `Qwen3ForCausalLM`. The text comes as it is generated, the speed at the
//! end. `--chat` asks a model that answers in ChatML. A tiny folder comes with the tests:
//! `tests/data/hub/llama3`.
//!
//! `cargo run --release -p slabwise-models --example llama_generate -- --weights FILE --max-tokens 200`
//!
//! prints the numbers of tokens instead, of a GGUF file, which has its own sizes, or of a file with
//! the names of published checkpoints and the sizes of [`Llama::SMALL`]. Without `--weights` the
//! weights are random. `--bits 4` stores weights as integers of 4 bits in blocks of 32, which a
//! file of floats is quantized to as it is loaded, and which a GGUF file in Q4_0 has already.
#![forbid(unsafe_code)]

#[path = "llama_generate/generator.rs"]
mod generator;
#[path = "llama_generate/text.rs"]
mod text;

use std::error::Error;
use std::io::{Write, stdout};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

use clap::Parser;
use generator::Generator;
use slabwise::prelude::*;
use slabwise::weights::{Rules, Weights};
use slabwise::{Bytes, Quantization};
use slabwise_models::{Llama, Sampling};
use text::Texts;

#[derive(Parser)]
struct Args {
    /// A folder of the Hugging Face hub: config.json, tokenizer.json, model.safetensors or shards
    #[arg(
        long,
        value_name = "FOLDER",
        requires = "prompt",
        conflicts_with_all = ["weights", "first"]
    )]
    model: Option<PathBuf>,
    /// The text to continue
    #[arg(long, value_name = "TEXT", requires = "model")]
    prompt: Option<String>,
    /// The prompt is a question, and the model answers in ChatML
    #[arg(long, requires = "model")]
    chat: bool,
    /// Weights in the layout of published Llama checkpoints, or a GGUF file; random unless given
    #[arg(long, value_name = "FILE")]
    weights: Option<PathBuf>,
    /// The most tokens to generate
    #[arg(
        long,
        visible_alias = "tokens",
        default_value_t = 200,
        value_parser = clap::value_parser!(u32).range(1..=1 << 17)
    )]
    max_tokens: u32,
    /// The temperature of sampling; 0 chooses the likeliest token
    #[arg(long, default_value_t = 0.8, value_parser = temperature, allow_negative_numbers = true)]
    temperature: f32,
    /// The number of the likeliest tokens to choose among
    #[arg(long, default_value_t = 40)]
    top_k: usize,
    /// The probability of the likeliest tokens to choose among
    #[arg(long, default_value_t = 1.0, value_parser = probability, allow_negative_numbers = true)]
    top_p: f32,
    /// The first token, without --model
    #[arg(long, default_value_t = 1)]
    first: u16,
    /// The bits of a weight: floats of 32 or 16 (bf16), or integers of 8, 4 or 2 in blocks of 32
    #[arg(long, default_value_t = 32, value_parser = bits)]
    bits: u32,
    /// The seed of weights and samples
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// auto, cpu or cuda:N
    #[arg(long, default_value = "auto")]
    device: Device,
}

fn temperature(text: &str) -> std::result::Result<f32, String> {
    let number = text
        .parse()
        .ok()
        .filter(|t: &f32| t.is_finite() && *t >= 0.0);
    number.ok_or_else(|| format!("{text} is not a number from 0 on"))
}

fn probability(text: &str) -> std::result::Result<f32, String> {
    let number = text.parse().ok().filter(|p: &f32| *p > 0.0 && *p <= 1.0);
    number.ok_or_else(|| format!("{text} is not a number above 0 and at most 1"))
}

fn bits(text: &str) -> std::result::Result<u32, String> {
    match text.parse() {
        Ok(bits @ (32 | 16 | 8 | 4 | 2)) => Ok(bits),
        _ => Err(format!("{text} is none of 32, 16, 8, 4 and 2")),
    }
}

impl Args {
    /// A generator for a prompt of this many tokens and `more` after it, with the weights of a file
    /// or a folder.
    fn generator(
        &self,
        sizes: Llama,
        weights: Option<(&Weights, Rules)>,
        prompt: usize,
        more: usize,
    ) -> Result<Generator> {
        let params = Params::seeded(self.seed);
        let root = match self.bits {
            32 => params.root(),
            16 => params.root().stored_in(BF16),
            bits => params.root().quantized(Quantization { bits, block: 32 }),
        };
        let decoder = sizes.layers(&root);
        let session = Session::new(self.device, params)?;
        let sampling = Sampling::new()
            .temperature(self.temperature)
            .top_k(self.top_k);
        let sampling = match self.top_p < 1.0 {
            true => sampling.top_p(self.top_p),
            false => sampling,
        };
        let mut generator = Generator::new(session, &decoder, sampling, prompt, more)?;
        if let Some((weights, rules)) = weights {
            generator.session().load_from(weights, &rules)?;
        }
        Ok(generator)
    }

    /// Continues a prompt with the model of a folder.
    fn text(&self, folder: &Path, prompt: &str) -> std::result::Result<(), Box<dyn Error>> {
        let sizes = Llama::of_config(folder)?;
        let mut ends = Llama::end_tokens(folder)?;
        let texts = Texts::open(folder)?;
        let tokens = match self.chat {
            true => {
                let (prompt, end) = texts.chat(prompt)?;
                ends.push(end);
                texts.tokens(&prompt, sizes.vocabulary)?
            }
            false => texts.tokens(prompt, sizes.vocabulary)?,
        };
        let room = sizes.length.saturating_sub(tokens.len());
        if room == 0 {
            let (given, all) = (tokens.len(), sizes.length);
            let why = format!("the prompt has {given} tokens, but the model has {all} positions");
            return Err(why.into());
        }
        let more = room.min(self.max_tokens as usize);
        let weights = Weights::open(folder)?;
        let read = Some((&weights, Rules::llama()));
        let mut generator = self.generator(sizes, read, tokens.len(), more)?;
        let (mut out, mut stream) = (stdout().lock(), texts.stream(&tokens));
        let started = Instant::now();
        let mut token = generator.prompt(&tokens)?;
        let (of_prompt, started) = (started.elapsed(), Instant::now());
        let mut generated = 1;
        while !ends.contains(&token) {
            write!(out, "{}", stream.push(token)?)?;
            out.flush()?;
            if generated == more {
                break;
            }
            token = generator.next(token)?;
            generated += 1;
        }
        writeln!(out, "{}", stream.finish()?)?;
        let each_second = |tokens: usize, time: std::time::Duration| {
            tokens as f64 / time.as_secs_f64().max(f64::MIN_POSITIVE)
        };
        eprintln!(
            "prompt of {} tokens: {:.1} tokens/s; {generated} generated: {:.1} tokens/s; weights and cache of {}",
            tokens.len(),
            each_second(tokens.len(), of_prompt),
            // The first one came with the prompt.
            each_second(generated - 1, started.elapsed()),
            Bytes(generator.session().persistent_bytes())
        );
        Ok(())
    }

    /// Prints the numbers of tokens.
    fn numbers(&self) -> std::result::Result<(), Box<dyn Error>> {
        let weights = self.weights.as_ref().map(Weights::open).transpose()?;
        let (sizes, rules) = match &weights {
            Some(weights) if weights.metadata().contains_key("general.architecture") => {
                let sizes = Llama::of_gguf(weights)?;
                (sizes, sizes.gguf_rules(weights))
            }
            _ => (Llama::SMALL, Rules::llama()),
        };
        let weights = weights.as_ref().map(|weights| (weights, rules));
        let mut generator = self.generator(sizes, weights, 1, self.max_tokens as usize)?;
        let mut token = i32::from(self.first);
        let (mut text, mut times) = (Vec::new(), Vec::new());
        for _ in 0..self.max_tokens {
            let started = Instant::now();
            token = generator.next(token)?;
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
            Bytes(generator.session().persistent_bytes())
        );
        Ok(())
    }
}

fn main() -> ExitCode {
    let args = Args::parse();
    let result = match (&args.model, &args.prompt) {
        (Some(folder), Some(prompt)) => args.text(folder, prompt),
        _ => args.numbers(),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::from(2)
        }
    }
}
