//! The example `llama_generate`: the folder of a tiny model, recorded by
//! `tests/data/record_decoders.py`, gives the text that transformers generates, and text comes
//! character by character.

#[path = "../examples/llama_generate/generator.rs"]
mod generator;
#[path = "../examples/llama_generate/text.rs"]
mod text;

use std::path::{Path, PathBuf};

use generator::Generator;
use slabwise::weights::{File, Rules, Weights};
use slabwise::{Device, Params, Session};
use slabwise_models::{Llama, Sampling};
use text::Texts;

const PROMPT: &str = "Once upon a time there was a naïve cat.";

fn hub() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/data/hub")
}

fn recorded(name: &str) -> Vec<i32> {
    let cases = File::open(hub().join("decoders.safetensors")).expect("recorded");
    let bytes = cases.get(name).expect("recorded").bytes.chunks_exact(4);
    bytes
        .map(|b| i32::from_le_bytes(b.try_into().expect("four bytes")))
        .collect()
}

/// A generator of the likeliest tokens with the weights of the folder.
fn generator(prompt: usize, more: usize) -> Generator {
    let folder = hub().join("llama3");
    let sizes = Llama::of_config(&folder).expect("supported");
    let params = Params::seeded(0);
    let decoder = sizes.layers(&params.root());
    let session = Session::new(Device::Cpu, params).expect("a session");
    let likeliest = Sampling::new().temperature(0.0);
    let mut generator =
        Generator::new(session, &decoder, likeliest, prompt, more).expect("it compiles");
    let weights = Weights::open(folder).expect("recorded");
    let loaded = generator.session().load_from(&weights, &Rules::llama());
    loaded.expect("it fits");
    generator
}

#[test]
fn a_folder_continues_a_prompt_as_transformers_does() {
    let folder = hub().join("llama3");
    let texts = Texts::open(&folder).expect("recorded");
    let tokens = texts.tokens(PROMPT, 304).expect("a prompt");
    assert_eq!(tokens, recorded("generated/prompt"));
    let expected = recorded("generated/tokens");
    let ends = Llama::end_tokens(&folder).expect("recorded");
    let mut generator = generator(tokens.len(), expected.len() + 1);
    // A second text begins with an empty cache.
    for _ in 0..2 {
        let (mut generated, mut stream) = (Vec::new(), texts.stream(&tokens));
        let mut text = String::new();
        let mut token = generator.prompt(&tokens).expect("it runs");
        while !ends.contains(&token) {
            generated.push(token);
            text += &stream.push(token).expect("a text");
            token = generator.next(token).expect("it runs");
        }
        text += &stream.finish().expect("a text");
        assert_eq!(generated, expected);
        assert!(text.starts_with("8ve)the"), "{text}");
    }
}

/// Chunks of the prompt, the last of which is padded, give the tokens that single ones give.
#[test]
fn long_prompts_are_read_in_chunks() {
    let prompt: Vec<i32> = (0..180).map(|i| 4 + i * i % 290).collect();
    let continued = |generator: &mut Generator, first: i32| {
        let mut tokens = vec![first];
        for _ in 0..20 {
            let last = *tokens.last().expect("one");
            tokens.push(generator.next(last).expect("it runs"));
        }
        tokens
    };
    let mut in_chunks = generator(prompt.len(), 21);
    let first = in_chunks.prompt(&prompt).expect("it runs");
    let found = continued(&mut in_chunks, first);
    let mut one_by_one = generator(1, 200);
    let mut next = one_by_one.prompt(&prompt[..1]).expect("it runs");
    for &token in &prompt[1..] {
        next = one_by_one.next(token).expect("it runs");
    }
    assert_eq!(found, continued(&mut one_by_one, next));
    // There is room for the tokens that were asked for, and for no more.
    let last = in_chunks.next(4);
    assert!(last.is_err(), "{last:?}");
}

#[test]
fn characters_of_several_tokens_come_whole() {
    let texts = Texts::open(&hub().join("llama3")).expect("recorded");
    let text = "a naïve 猫 and 🙂🙃, ∑ё\u{fffd}.";
    let tokens = texts.tokens(text, 304).expect("a prompt");
    assert!(tokens.len() > text.chars().count());
    let mut stream = texts.stream(&tokens[..1]);
    let mut all = String::new();
    for &token in &tokens[1..] {
        let part = stream.push(token).expect("a text");
        assert!(
            text[all.len()..].starts_with(&part),
            "{part:?} after {all:?}"
        );
        all += &part;
    }
    assert_eq!(all + &stream.finish().expect("a text"), text);
    // The first bytes of a character that never ends come at the end.
    let cat = texts.tokens("猫", 304).expect("a prompt");
    let mut stream = texts.stream(&[]);
    for &token in &cat[1..3] {
        assert_eq!(stream.push(token).expect("a text"), "");
    }
    assert_eq!(stream.finish().expect("a text"), "\u{fffd}");
}

#[test]
fn prompts_that_do_not_fit_the_model_are_refused() {
    let texts = Texts::open(&hub().join("llama3")).expect("recorded");
    let error = texts.tokens(PROMPT, 100).expect_err("few tokens");
    assert!(error.to_string().contains("the model has 100"), "{error}");
    let error = Texts::open(&hub().join("qwen2")).err().expect("none there");
    assert!(error.to_string().contains("tokenizer.json"), "{error}");
    let (chat, end) = texts.chat("Who?").expect("ChatML");
    let tokens = texts.tokens(&chat, 304).expect("a prompt");
    assert_eq!(tokens.iter().filter(|&&token| token == end).count(), 1);
    assert_eq!((tokens[1], end), (2, 3));
}
