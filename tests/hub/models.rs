//! Recorded models: loaded in one line, run, and saved in the layout they came in.

use std::collections::BTreeMap;

use slabwise::weights::SaveOptions;
use slabwise_models::{Bert, Gpt, Llama, ResNet, Vit};

use super::*;

fn cases() -> File {
    File::open(folder("cases.safetensors")).expect("recorded")
}

/// The recorded input of a case: its elements and shape.
fn input<T>(name: &str, of: fn([u8; 4]) -> T) -> ndarray::ArrayD<T> {
    let cases = cases();
    let entry = cases.get(&format!("{name}/x")).expect("recorded");
    let shape: Vec<usize> = entry.shape.iter().map(|&n| n as usize).collect();
    let values = entry.bytes.chunks_exact(4);
    let values = values
        .map(|b| of(b.try_into().expect("four bytes")))
        .collect();
    ndarray::ArrayD::from_shape_vec(shape, values).expect("as recorded")
}

/// Fails unless the numbers are within a tolerance of the recorded ones.
#[track_caller]
fn assert_close(name: &str, output: &str, got: &[f32], tolerance: f32) {
    let expected = floats(&cases(), &format!("{name}/{output}"));
    assert_eq!(got.len(), expected.len(), "{name}");
    let largest = expected.iter().fold(0f32, |n, x| n.max(x.abs()));
    for (at, (g, e)) in got.iter().zip(&expected).enumerate() {
        assert!(
            (g - e).abs() <= tolerance * largest,
            "{name}: {output} {at} is {g}, recorded {e}"
        );
    }
}

/// Loads a recorded folder, runs a model on the recorded input and compares its output.
fn run<M: Module>(
    name: &str,
    case: &str,
    output: &str,
    params: &Params,
    model: &M,
    rules: &Rules,
) -> Session {
    let mut session = session(params);
    session
        .load_from(&Weights::open(folder(name)).expect("recorded"), rules)
        .unwrap_or_else(|e| panic!("{name}: {e}"));
    let trace = Trace::inference();
    let is_tokens = cases().get(&format!("{case}/x")).expect("recorded").dtype == I32;
    let got = if is_tokens {
        let x = input(case, i32::from_le_bytes);
        let given = trace.input("x", I32, x.shape());
        let program = session
            .compile(&trace, [given.apply(model)])
            .expect("it compiles");
        let [y] = session.run(&program, &x).expect("it runs");
        y.array::<f32>().expect("f32")
    } else {
        let x = input(case, f32::from_le_bytes);
        let given = trace.input("x", F32, x.shape());
        let program = session
            .compile(&trace, [given.apply(model)])
            .expect("it compiles");
        let [y] = session.run(&program, &x).expect("it runs");
        y.array::<f32>().expect("f32")
    };
    assert_close(case, output, &got.into_raw_vec_and_offset().0, 1e-4);
    session
}

type Tensors = BTreeMap<String, (String, Vec<u64>, Vec<u8>)>;

/// All tensors of a file or a folder.
fn tensors(path: &Path) -> Tensors {
    let weights = Weights::open(path).expect("a file");
    let tensor = |(name, dtype, shape): (&str, String, &[u64])| {
        let bytes = weights.read(name).expect("readable").expect("it is there");
        (name.to_owned(), (dtype, shape.to_vec(), bytes))
    };
    weights.names().map(tensor).collect()
}

/// Saves a session in the layout of a recorded folder, and compares all but the tensors that no
/// weight is saved to.
fn saved_as_it_was(
    session: &Session,
    name: &str,
    rules: &Rules,
    options: &SaveOptions,
    left_out: &[&str],
) {
    let at = tempfile::tempdir().expect("a folder");
    session
        .save_as(at.path(), rules, options)
        .unwrap_or_else(|e| panic!("{name}: {e}"));
    let mut recorded = tensors(&folder(name));
    recorded.retain(|name, _| !left_out.iter().any(|end| name.ends_with(end)));
    let saved = tensors(at.path());
    assert!(
        saved.keys().eq(recorded.keys()),
        "{name}: {:?}",
        saved.keys()
    );
    for (tensor, value) in &saved {
        assert_eq!(value, &recorded[tensor], "{name}: {tensor}");
    }
}

#[test]
fn gpt2_gives_the_logits_of_pytorch_with_and_without_a_prefix() {
    let gpt = Gpt {
        layers: 2,
        width: 8,
        heads: 2,
        length: 6,
        vocabulary: 17,
        tied: true,
    };
    for (name, rules, left_out) in [
        ("gpt2", Rules::gpt2(), &[][..]),
        (
            "gpt2_bare",
            Rules::gpt2_bare(),
            &[".attn.bias", "masked_bias"][..],
        ),
    ] {
        let params = Params::seeded(0);
        let model = gpt.layers(&params.root());
        let session = run(name, "gpt2", "logits", &params, &model, &rules);
        saved_as_it_was(&session, name, &rules, &SaveOptions::new(), left_out);
        // Either file by either rules, and with a head of its own that is a copy.
        for other in [Rules::gpt2(), Rules::gpt2_bare()] {
            let params = Params::seeded(0);
            let model = Gpt { tied: false, ..gpt }.layers(&params.root());
            run(name, "gpt2", "logits", &params, &model, &other);
        }
    }
}

#[test]
fn residual_networks_give_the_logits_of_torchvision_and_transformers() {
    let narrow = ResNet {
        large_stem: true,
        bottleneck: false,
        depths: vec![1; 4],
        width: 4,
        classes: 5,
    };
    let two_stages = ResNet {
        depths: vec![2, 1],
        ..narrow.clone()
    };
    for (name, sizes, rules) in [
        ("resnet_torchvision", narrow, Rules::resnet()),
        (
            "resnet_transformers",
            two_stages,
            Rules::resnet_transformers(),
        ),
    ] {
        let params = Params::seeded(0);
        let model = sizes.layers(&params.root());
        let session = run(name, name, "logits", &params, &model, &rules);
        saved_as_it_was(
            &session,
            name,
            &rules,
            &SaveOptions::new(),
            &["num_batches_tracked"],
        );
    }
}

#[test]
fn a_llama_gives_its_logits_from_shards_of_bf16_and_with_a_tied_head() {
    for (name, tied) in [("llama", false), ("llama_tied", true)] {
        let sizes = Llama {
            layers: 2,
            width: 16,
            heads: 4,
            key_heads: 2,
            inner: 20,
            length: 6,
            vocabulary: 23,
            tied,
            eps: 1e-6,
            ..Llama::SMALL
        };
        let params = Params::seeded(0);
        let model = sizes.layers(&params.root());
        run(name, name, "logits", &params, &model, &Rules::llama());
    }
}

/// A session whose weights are all tensors of a recorded folder under names of a model.
fn as_named(name: &str, rename: impl Fn(&str) -> Option<String>) -> Session {
    let weights = Weights::open(folder(name)).expect("recorded");
    let shapes: Vec<(String, Vec<usize>)> = weights
        .names()
        .filter_map(|(name, _, shape)| {
            Some((rename(name)?, shape.iter().map(|&n| n as usize).collect()))
        })
        .collect();
    session(&declare(&shapes))
}

const BERT: Bert = Bert {
    layers: 2,
    width: 8,
    heads: 2,
    inner: 12,
    length: 6,
    positions: 10,
    vocabulary: 19,
    kinds: 2,
};

#[test]
fn a_bert_loads_with_positions_heads_and_old_names() {
    // The masked language model has no pooler and no second head.
    let params = Params::seeded(0);
    let model = BERT.layers(&params.root());
    run("bert", "bert", "logits", &params, &model, &Rules::bert());
    // The encoder alone, without the prefix.
    let params = Params::seeded(0);
    let _ = BERT.encoder(&params.root());
    let mut encoder = session(&params);
    load(&mut encoder, &folder("bert"), &Rules::minilm()).expect("it fits");
    let file = File::open(folder("bert/model.safetensors")).expect("recorded");
    assert_eq!(
        value(&encoder, "encoder.layer.1.output.LayerNorm.weight"),
        floats(&file, "bert.encoder.layer.1.output.LayerNorm.gamma")
    );
    // A sentence encoder with i64 positions.
    let params = Params::seeded(0);
    let model = BERT.encoder(&params.root());
    let mut mini = run(
        "minilm",
        "minilm",
        "hidden",
        &params,
        &model,
        &Rules::minilm(),
    );
    let weights = Weights::open(folder("minilm")).expect("recorded");
    let loaded = mini.load_from(&weights, &Rules::minilm()).expect("it fits");
    let pooler = [
        "embeddings.position_ids",
        "pooler.dense.bias",
        "pooler.dense.weight",
    ];
    assert_eq!(
        (loaded.count, &*loaded.extra),
        (37, &pooler.map(str::to_owned)[..])
    );
    let left_out = ["position_ids", "pooler.dense.bias", "pooler.dense.weight"];
    saved_as_it_was(
        &mini,
        "minilm",
        &Rules::minilm(),
        &SaveOptions::new(),
        &left_out,
    );
}

#[test]
fn a_llama_loads_from_shards_of_bf16_and_with_a_tied_head() {
    let mut session = as_named("llama", |name| Some(name.to_owned()));
    let weights = Weights::open(folder("llama")).expect("recorded");
    assert_eq!(weights.files().len(), 3);
    let loaded = session
        .load_from(&weights, &Rules::llama())
        .expect("it fits");
    assert_eq!((loaded.count, loaded.cast.len()), (21, 21));
    // A bf16 is the upper half of a float.
    let bytes = weights
        .read("model.norm.weight")
        .expect("readable")
        .expect("there");
    let upper: Vec<u32> = bytes
        .chunks_exact(2)
        .map(|b| u32::from(u16::from_le_bytes([b[0], b[1]])) << 16)
        .collect();
    let bits: Vec<u32> = value(&session, "model.norm.weight")
        .iter()
        .map(|x| x.to_bits())
        .collect();
    assert_eq!(bits, upper);
    let options = SaveOptions::new().floats(BF16).shard_bytes(4096);
    saved_as_it_was(&session, "llama", &Rules::llama(), &options, &[]);
    // A model with a head of its own takes the embedding; one without is as the file.
    for head in [true, false] {
        let mut session = as_named("llama_tied", |name| Some(name.to_owned()));
        if head {
            let mut shapes = vec![("lm_head.weight".to_owned(), vec![23, 16])];
            let weights = Weights::open(folder("llama_tied")).expect("recorded");
            shapes.extend(weights.names().map(|(name, _, shape)| {
                (name.to_owned(), shape.iter().map(|&n| n as usize).collect())
            }));
            session = super::session(&declare(&shapes));
        }
        load(&mut session, &folder("llama_tied"), &Rules::llama()).expect("it fits");
        if head {
            let embedding = value(&session, "model.embed_tokens.weight");
            assert_eq!(value(&session, "lm_head.weight"), embedding);
        } else {
            let options = SaveOptions::new().floats(F16);
            saved_as_it_was(&session, "llama_tied", &Rules::llama(), &options, &[]);
        }
    }
}

#[test]
fn a_vision_transformer_is_the_same_in_both_layouts() {
    let sizes = Vit {
        size: 16,
        inputs: 3,
        patch: 4,
        layers: 2,
        width: 8,
        heads: 2,
        inner: 16,
        classes: 5,
    };
    let [one, other] =
        [("vit", Rules::vit()), ("vit_timm", Rules::vit_timm())].map(|(name, rules)| {
            let params = Params::seeded(0);
            let model = sizes.layers(&params.root());
            run(name, "vit", "logits", &params, &model, &rules)
        });
    let names: Vec<String> = one.names().map(str::to_owned).collect();
    assert_eq!(names.len(), 40);
    for name in &names {
        assert_eq!(value(&one, name), value(&other, name), "{name}");
    }
    saved_as_it_was(&one, "vit", &Rules::vit(), &SaveOptions::new(), &[]);
    // Query, key and value joined again.
    saved_as_it_was(
        &one,
        "vit_timm",
        &Rules::vit_timm(),
        &SaveOptions::new(),
        &[],
    );
}
