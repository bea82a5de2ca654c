//! Decoders as folders of the Hugging Face hub, recorded by `tests/data/record_decoders.py`: their
//! sizes are read from `config.json`, and they give the logits of transformers, for whole texts and
//! token by token. Configurations that are damaged or not supported are refused by key.

use ndarray::{ArrayD, Axis, Ix2, Ix3, arr0};
use serde_json::{Value, json};
use slabwise::tensor::RopeScaling;
use slabwise_models::{CACHED, Llama};

use super::*;

const NAMES: [&str; 4] = ["llama3", "mistral", "qwen2", "qwen3"];

/// The recorded tokens `[n, length]` of a decoder, and the logits `[n, length, vocabulary]`.
fn recorded(name: &str) -> (ArrayD<i32>, ArrayD<f32>) {
    let cases = File::open(folder("decoders.safetensors")).expect("recorded");
    let shape = |name: &str| -> Vec<usize> {
        let entry = cases.get(name).expect("recorded");
        entry.shape.iter().map(|&n| n as usize).collect()
    };
    let (x, logits) = (format!("{name}/x"), format!("{name}/logits"));
    let tokens = cases.get(&x).expect("recorded").bytes.chunks_exact(4);
    let tokens = tokens
        .map(|b| i32::from_le_bytes(b.try_into().expect("four bytes")))
        .collect();
    (
        ArrayD::from_shape_vec(shape(&x), tokens).expect("as recorded"),
        ArrayD::from_shape_vec(shape(&logits), floats(&cases, &logits)).expect("as recorded"),
    )
}

/// The largest difference, in parts of the largest logit.
fn difference(got: &ArrayD<f32>, expected: &ArrayD<f32>) -> f32 {
    assert_eq!(got.shape(), expected.shape());
    assert!(got.iter().all(|x| x.is_finite()));
    let most = |values: &mut dyn Iterator<Item = f32>| values.fold(0.0, f32::max);
    let differences = &mut got.iter().zip(expected).map(|(g, e)| (g - e).abs());
    most(differences) / most(&mut expected.iter().map(|e| e.abs()))
}

/// The logits of whole texts, and those of a prompt of five tokens and then of single ones.
fn logits(sizes: Llama, weights: &Weights, rules: &Rules, x: &ArrayD<i32>) -> [ArrayD<f32>; 2] {
    const PROMPT: usize = 5;
    let (texts, length) = (x.shape()[0], x.shape()[1]);
    let params = Params::seeded(0);
    let model = Llama { length, ..sizes }.layers(&params.root());
    let mut session = session(&params);
    let trace = Trace::inference().named("whole");
    let given = trace.input("x", I32, x.shape());
    let whole = session
        .compile(&trace, [given.apply(&model)])
        .expect("it compiles");
    let [read, write] = [PROMPT, 1].map(|new| {
        let trace = Trace::inference().named("continued");
        let given = trace.input("x", I32, (texts, new));
        let logits = model.continued(given, length);
        session.compile(&trace, [logits]).expect("it compiles")
    });
    session.load_from(weights, rules).expect("it fits");
    let [all] = session.run(&whole, (x,)).expect("it runs");
    let all = all.array::<f32>().expect("f32");
    session.set_value(CACHED, &arr0(0)).expect("a scalar");
    let mut steps = Vec::new();
    let x = x.view().into_dimensionality::<Ix2>().expect("two axes");
    for end in PROMPT..=length {
        let (program, from) = match end {
            PROMPT => (&read, 0),
            _ => (&write, end - 1),
        };
        let new = x.slice(ndarray::s![.., from..end]).to_owned();
        let [step] = session.run(program, (&new,)).expect("it runs");
        steps.push(step.array::<f32>().expect("f32"));
    }
    let views: Vec<_> = steps.iter().map(|step| step.view()).collect();
    let steps = ndarray::stack(Axis(1), &views).expect("equal shapes");
    let last = all
        .clone()
        .into_dimensionality::<Ix3>()
        .expect("three axes");
    let last = last.slice(ndarray::s![.., PROMPT - 1.., ..]).to_owned();
    assert!(
        difference(&steps, &last.into_dyn()) < 1e-5,
        "whole and in steps"
    );
    [all, steps]
}

#[test]
fn folders_give_the_logits_of_transformers() {
    for name in NAMES {
        let sizes = Llama::of_config(folder(name)).expect("supported");
        let weights = Weights::open(folder(name)).expect("recorded");
        assert_eq!(weights.files().len(), if name == "mistral" { 3 } else { 1 });
        let (x, expected) = recorded(name);
        let [got, _] = logits(sizes, &weights, &Rules::llama(), &x);
        let off = difference(&got, &expected);
        assert!(off < 1e-5, "{name} is off by {off}");
        // A head of its own takes the embedding of a tied one.
        if sizes.tied {
            let untied = Llama {
                tied: false,
                ..sizes
            };
            let [got, _] = logits(untied, &weights, &Rules::llama(), &x);
            assert!(difference(&got, &expected) < 1e-5, "{name}");
        }
    }
}

/// The recorded logits depend on each field that a configuration sets.
#[test]
fn fields_of_the_configuration_change_the_logits() {
    let of = |name: &str| Llama::of_config(folder(name)).expect("supported");
    let plain = Llama {
        scaling: RopeScaling::None,
        ..of("llama3")
    };
    let wide = Llama {
        window: None,
        ..of("mistral")
    };
    let slow = Llama {
        base: 1e4,
        ..of("qwen3")
    };
    for (name, sizes) in [("llama3", plain), ("mistral", wide), ("qwen3", slow)] {
        let weights = Weights::open(folder(name)).expect("recorded");
        let (x, expected) = recorded(name);
        let [got, _] = logits(sizes, &weights, &Rules::llama(), &x);
        let off = difference(&got, &expected);
        assert!(off > 1e-3, "{name} is off by {off} only");
    }
}

#[test]
fn gguf_files_of_qwen_give_the_logits_of_transformers() {
    for name in ["qwen2", "qwen3"] {
        let path = folder("../gguf").join(format!("{name}.gguf"));
        let weights = Weights::open(path).expect("recorded");
        let sizes = Llama::of_gguf(&weights).expect("supported");
        assert_eq!(sizes, Llama::of_config(folder(name)).expect("supported"));
        let (x, expected) = recorded(name);
        let [got, _] = logits(sizes, &weights, &sizes.gguf_rules(&weights), &x);
        let off = difference(&got, &expected);
        assert!(off < 1e-5, "{name} is off by {off}");
    }
}

/// The configuration of a recorded folder.
fn config(name: &str) -> Value {
    let text = std::fs::read(folder(name).join("config.json")).expect("recorded");
    serde_json::from_slice(&text).expect("JSON")
}

/// The sizes that a text of `config.json` has, or the error, which names the file.
fn sizes_of(text: &str) -> Result<Llama, String> {
    let at = tempfile::tempdir().expect("a folder");
    std::fs::write(at.path().join("config.json"), text).expect("it is written");
    Llama::of_config(at.path()).map_err(|error| {
        let error = error.to_string();
        assert!(error.contains("config.json"), "{error}");
        assert!(error.len() < 1000, "{error}");
        error
    })
}

/// The sizes of a recorded folder with values replaced; without the keys of those that are `None`.
fn changed(name: &str, changes: &[(&str, Option<Value>)]) -> Result<Llama, String> {
    let mut config = config(name);
    for (key, value) in changes {
        let values = config.as_object_mut().expect("an object");
        match value {
            Some(value) => drop(values.insert((*key).into(), value.clone())),
            None => drop(values.remove(*key)),
        }
    }
    sizes_of(&config.to_string())
}

#[test]
fn older_and_newer_keys_of_rotary_positions_say_the_same() {
    let sizes = Llama::of_config(folder("llama3")).expect("supported");
    let scaling = RopeScaling::Llama3 {
        factor: 8.0,
        low: 1.0,
        high: 4.0,
        original: 64,
    };
    assert_eq!((sizes.scaling, sizes.base), (scaling, 500.0));
    let with = |theta: Value, parameters: Value, scaling: Value| {
        let keys = [("rope_theta", theta), ("rope_parameters", parameters)];
        let keys = keys.into_iter().chain([("rope_scaling", scaling)]);
        let keys: Vec<_> = keys.map(|(key, value)| (key, Some(value))).collect();
        changed("llama3", &keys).map(|sizes| (sizes.scaling, sizes.base))
    };
    let llama3 = |key: &str| {
        let mut values = config("llama3")["rope_parameters"].clone();
        let values = values.as_object_mut().expect("an object");
        values.remove("rope_theta");
        values.remove("rope_type");
        values.insert(key.into(), json!("llama3"));
        json!(values)
    };
    let (none, linear) = (RopeScaling::None, RopeScaling::Linear(4.0));
    let of_type = |key: &str| json!({key: "linear", "factor": 4});
    for (theta, parameters, older, expected) in [
        (json!(500), json!(null), llama3("type"), (scaling, 500.0)),
        (
            json!(500.0),
            json!(null),
            llama3("rope_type"),
            (scaling, 500.0),
        ),
        (
            json!(500),
            llama3("rope_type"),
            llama3("type"),
            (scaling, 500.0),
        ),
        (json!(null), json!(null), of_type("type"), (linear, 1e4)),
        (
            json!(null),
            of_type("rope_type"),
            json!(null),
            (linear, 1e4),
        ),
        (json!(1e6), json!(null), json!(null), (none, 1e6)),
        (
            json!(null),
            json!({"rope_type": "default", "rope_theta": 7}),
            json!(null),
            (none, 7.0),
        ),
    ] {
        assert_eq!(with(theta, parameters, older), Ok(expected));
    }
    for (theta, parameters, older, says) in [
        (
            json!(600),
            config("llama3")["rope_parameters"].clone(),
            json!(null),
            "rope_parameters.rope_theta is 500.0; supported is that of the other",
        ),
        (
            json!(600),
            of_type("rope_type"),
            json!({"rope_type": "linear", "factor": 2}),
            "rope_scaling is {",
        ),
        (
            json!(0),
            json!(null),
            json!(null),
            "rope_theta is 0; supported is a number from 2",
        ),
        (json!("1"), json!(null), json!(null), "rope_theta is \"1\""),
        (
            json!(null),
            json!({"full_attention": {"rope_type": "default"}}),
            json!(null),
            "rope_parameters.rope_type is missing",
        ),
    ] {
        let error = with(theta, parameters, older).expect_err(says);
        assert!(error.contains(says), "{error}\n  does not say\n{says}");
    }
    let of_llama3 = |key: &str, value: Value| {
        let mut values = llama3("type");
        values[key] = value;
        values
    };
    for (older, says) in [
        (
            json!("linear"),
            " is \"linear\"; supported is an object, or null",
        ),
        (
            json!({"type": "yarn", "factor": 4}),
            ".type is \"yarn\"; supported is \"default\", \"linear\" or \"llama3\"",
        ),
        (
            json!({"rope_type": "dynamic", "type": "linear", "factor": 4}),
            ".rope_type is \"dynamic\"",
        ),
        (json!({"rope_type": 3}), ".rope_type is 3"),
        (json!({"type": "linear"}), ".factor is missing"),
        (json!({"type": "linear", "factor": 1e30}), ".factor is 1e"),
        (
            json!({"type": "linear", "factor": 2, "partial_rotary_factor": 0.5}),
            ".partial_rotary_factor is 0.5; supported is 1",
        ),
        (
            of_llama3("high_freq_factor", json!(1)),
            ".high_freq_factor is 1; supported is a number above low_freq_factor (1)",
        ),
        (
            of_llama3("original_max_position_embeddings", json!(0.5)),
            ".original_max_position_embeddings is 0.5",
        ),
    ] {
        let error = with(json!(null), json!(null), older).expect_err(says);
        let says = format!("rope_scaling{says}");
        assert!(error.contains(&says), "{error}\n  does not say\n{says}");
    }
}

#[test]
fn unsupported_configurations_are_refused_by_key() {
    for (name, key, value, says) in [
        (
            "llama3",
            "architectures",
            json!(["GPT2LMHeadModel"]),
            "[\"GPT2LMHeadModel\"]; supported is one of [\"LlamaForCausalLM\"]",
        ),
        (
            "llama3",
            "architectures",
            json!("LlamaForCausalLM"),
            "architectures is \"Llama",
        ),
        ("llama3", "architectures", json!([]), "architectures is []"),
        (
            "llama3",
            "architectures",
            json!(null),
            "architectures is null",
        ),
        (
            "llama3",
            "hidden_act",
            json!("gelu"),
            "hidden_act is \"gelu\"; supported is \"silu\"",
        ),
        (
            "llama3",
            "attention_bias",
            json!(true),
            "attention_bias is true; supported is false",
        ),
        (
            "qwen3",
            "attention_bias",
            json!(true),
            "attention_bias is true",
        ),
        ("llama3", "mlp_bias", json!(true), "mlp_bias is true"),
        (
            "llama3",
            "quantization_config",
            json!({"bits": 4}),
            "quantization_config is {\"bits\":4}",
        ),
        (
            "llama3",
            "tie_word_embeddings",
            json!("no"),
            "tie_word_embeddings is \"no\"",
        ),
        (
            "llama3",
            "partial_rotary_factor",
            json!(0.5),
            "partial_rotary_factor is 0.5",
        ),
        (
            "llama3",
            "head_dim",
            json!(7),
            "head_dim is 7; supported is an even number",
        ),
        (
            "llama3",
            "num_key_value_heads",
            json!(3),
            "num_key_value_heads is 3; supported is a divisor of num_attention_heads (4)",
        ),
        (
            "qwen2",
            "use_sliding_window",
            json!(true),
            "use_sliding_window is true",
        ),
        (
            "qwen2",
            "layer_types",
            json!(["full_attention", "sliding_attention"]),
            "layer_types is [\"full",
        ),
        (
            "qwen2",
            "num_attention_heads",
            json!(6),
            "num_attention_heads is 6; supported is a number that divides hidden_size (16)",
        ),
        ("qwen3", "head_dim", json!(null), "head_dim is null"),
        ("mistral", "sliding_window", json!(0), "sliding_window is 0"),
        (
            "llama3",
            "max_position_embeddings",
            json!("x".repeat(100_000)),
            "xxx…; supported is a whole number",
        ),
    ] {
        let error = changed(name, &[(key, Some(value))]).expect_err(says);
        assert!(error.contains(says), "{error}\n  does not say\n{says}");
    }
    for (name, changes, window) in [
        ("mistral", &[][..], Some(4)),
        ("mistral", &[("sliding_window", Some(json!(null)))], None),
        ("mistral", &[("sliding_window", Some(json!(64)))], None),
        // The default of transformers, in a model of more positions.
        (
            "mistral",
            &[
                ("sliding_window", None),
                ("max_position_embeddings", Some(json!(8192))),
            ],
            Some(4096),
        ),
        ("qwen2", &[("sliding_window", Some(json!(4)))], None),
    ] {
        let sizes = changed(name, changes).expect("supported");
        assert_eq!(sizes.window, window, "{name} {changes:?}");
    }
    // Keys that older files do not have.
    let keys = [
        "head_dim",
        "num_key_value_heads",
        "attention_bias",
        "mlp_bias",
        "tie_word_embeddings",
    ];
    let older = changed("llama3", &keys.map(|key| (key, None))).expect("supported");
    let sizes = Llama::of_config(folder("llama3")).expect("supported");
    let expected = Llama {
        key_heads: 4,
        tied: false,
        ..sizes
    };
    assert_eq!(older, expected);
}

#[test]
fn absurd_values_are_refused_by_key() {
    let absurd = [
        json!(null),
        json!(-1),
        json!(0),
        json!(1e30),
        json!(2.5),
        json!(u64::MAX),
        json!("4"),
        json!(true),
        json!([4]),
        json!({"4": 4}),
    ];
    let sizes = [
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "vocab_size",
        "max_position_embeddings",
        "rms_norm_eps",
    ];
    for name in NAMES {
        for key in sizes {
            let values = absurd.iter().map(|value| Some(value.clone()));
            for value in values.chain([None]) {
                let shown = value.as_ref().map_or("missing".into(), Value::to_string);
                let error = changed(name, &[(key, value)]).expect_err(key);
                let says = format!("{key} is {shown}; supported is ");
                assert!(error.contains(&says), "{error}\n  does not say\n{says}");
            }
        }
        // Any value of any key gives sizes or an error.
        let config = config(name);
        for key in config.as_object().expect("an object").keys() {
            for value in &absurd {
                let _ = changed(name, &[(key, Some(value.clone()))]);
            }
        }
    }
}

#[test]
fn damaged_configurations_are_refused() {
    let text = config("qwen3").to_string();
    for end in 0..text.len() {
        let error = sizes_of(&text[..end]).expect_err("cut short");
        assert!(error.contains("is not a complete JSON file"), "{error}");
    }
    let deep = format!("{{\"hidden_size\":{}", "[".repeat(100_000));
    for (text, says) in [
        (&*deep, "recursion limit"),
        ("[]", "it is not an object"),
        ("{\"hidden_size\": NaN}", "expected value"),
    ] {
        let error = sizes_of(text).expect_err(says);
        assert!(error.contains(says), "{error}");
    }
    let at = tempfile::tempdir().expect("a folder");
    let error = Llama::of_config(at.path()).expect_err("empty").to_string();
    assert!(error.contains("config.json"), "{error}");
}

#[test]
fn texts_end_with_the_tokens_of_both_files() {
    let ends = |name: &str| Llama::end_tokens(folder(name)).expect("recorded");
    let llama = ends("llama3");
    assert_eq!((llama.len(), llama[0]), (2, 1));
    assert_eq!(ends("mistral"), [2]);
    assert_eq!(ends("qwen2"), [0; 0]);
    let at = tempfile::tempdir().expect("a folder");
    let write = |name: &str, text: &str| {
        std::fs::write(at.path().join(name), text).expect("it is written");
    };
    write("config.json", "{\"eos_token_id\": [7, 8]}");
    assert_eq!(Llama::end_tokens(at.path()).expect("sound"), [7, 8]);
    write("generation_config.json", "{\"eos_token_id\": 8}");
    assert_eq!(Llama::end_tokens(at.path()).expect("sound"), [8, 7]);
    for value in ["-1", "[1, 2.5]", "\"2\"", "4294967296"] {
        write(
            "generation_config.json",
            &format!("{{\"eos_token_id\": {value}}}"),
        );
        let error = Llama::end_tokens(at.path()).expect_err(value).to_string();
        let says = ["generation_config.json", "eos_token_id is ", "supported is"];
        assert!(says.iter().all(|part| error.contains(part)), "{error}");
    }
}
