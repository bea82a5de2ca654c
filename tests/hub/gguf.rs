//! GGUF files: every type against the values that `tests/data/record_gguf.py` recorded, numbers that
//! quantized weights take over, and models.

mod hostile;

use slabwise::Quantization;
use slabwise::tensor::RopeScaling;
use slabwise::weights::SaveOptions;
use slabwise_models::{Gpt, Llama};

use super::*;

const FOUR_BITS: Quantization = Quantization { bits: 4, block: 32 };
const EIGHT_BITS: Quantization = Quantization { bits: 8, block: 32 };

/// A recorded file.
fn recorded(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/data/gguf")
        .join(name)
}

/// A session of weights with the names and shapes of a file's tensors.
fn session_of(weights: &Weights) -> Session {
    let shape = |shape: &[u64]| shape.iter().map(|&n| n as usize).collect();
    let shapes = weights
        .names()
        .map(|(name, _, of)| (name.to_owned(), shape(of)));
    session(&declare(&shapes.collect::<Vec<_>>()))
}

/// Fails unless all bits are the same.
#[track_caller]
fn assert_bits(got: &[f32], expected: &[f32], of: &str) {
    assert_eq!(got.len(), expected.len(), "{of}");
    for (at, (g, e)) in got.iter().zip(expected).enumerate() {
        assert_eq!(
            g.to_bits(),
            e.to_bits(),
            "{of}: element {at} is {g}, not {e}"
        );
    }
}

/// The types of the recorded file that are read.
const TYPES: [&str; 20] = [
    "BF16", "F16", "F32", "F64", "I16", "I32", "I64", "I8", "IQ4_NL", "IQ4_XS", "Q2_K", "Q3_K",
    "Q4_0", "Q4_1", "Q4_K", "Q5_0", "Q5_1", "Q5_K", "Q6_K", "Q8_0",
];

#[test]
fn every_type_has_the_recorded_values() {
    let weights = Weights::open(recorded("types.gguf")).expect("recorded");
    let expected = File::open(recorded("types.safetensors")).expect("recorded");
    let names: Vec<(&str, String)> = weights.names().map(|(name, of, _)| (name, of)).collect();
    let types: Vec<(&str, String)> = TYPES.iter().map(|&of| (of, of.to_owned())).collect();
    assert_eq!(names[..TYPES.len()], types);
    assert_eq!(names[TYPES.len()..], [("unread", "IQ2_XXS".to_owned())]);
    let mut session = session_of(&weights);
    let rules = Rules::new()
        .cast("{name}")
        .ignore("unread")
        .allow_missing("unread");
    let loaded = session.load_from(&weights, &rules).expect("it fits");
    assert_eq!(loaded.count, TYPES.len());
    for (name, _, shape) in weights.names().take(TYPES.len()) {
        let entry = expected.get(name).expect("recorded");
        assert_eq!(entry.shape, shape, "{name}");
        assert_bits(&value(&session, name), &floats(&expected, name), name);
    }
    // The blocks themselves.
    let blocks = weights
        .read("Q8_0")
        .expect("readable")
        .expect("it is there");
    assert_eq!(blocks.len(), 3 * 2 * 34);
    let sum: u64 = weights.bytes();
    assert!(
        sum < std::fs::metadata(recorded("types.gguf"))
            .expect("a file")
            .len()
    );
}

/// Rules reach into blocks: transposed, and split in the middle of one.
#[test]
fn rules_take_single_elements_of_blocks() {
    let weights = Weights::open(recorded("types.gguf")).expect("recorded");
    let expected = File::open(recorded("types.safetensors")).expect("recorded");
    for name in ["Q4_0", "Q5_1", "Q6_K", "IQ4_XS"] {
        let all = floats(&expected, name);
        let rows = expected.get(name).expect("recorded").shape[0] as usize;
        let columns = all.len() / rows;
        let lengths = [7, columns - 7];
        let shapes = [
            ("a".to_owned(), vec![7, rows]),
            ("b".to_owned(), vec![columns - 7, rows]),
        ];
        let mut session = session(&declare(&shapes));
        let rules = Rules::new()
            .transpose(name)
            .split_lengths(name, &[("a", lengths[0]), ("b", lengths[1])], 0)
            .ignore_extra("{other}");
        session.load_from(&weights, &rules).expect("it fits");
        let turned: Vec<f32> = (0..columns)
            .flat_map(|column| (0..rows).map(move |row| (row, column)))
            .map(|(row, column)| all[row * columns + column])
            .collect();
        let (first, second) = turned.split_at(7 * rows);
        assert_bits(&value(&session, "a"), first, name);
        assert_bits(&value(&session, "b"), second, name);
    }
}

#[test]
fn types_that_are_not_read_are_named_when_they_are_loaded() {
    let weights = Weights::open(recorded("types.gguf")).expect("recorded");
    let mut session = session(&declare(&[("unread".to_owned(), vec![1, 256])]));
    let error = session
        .load_from(&weights, &Rules::new().ignore_extra("{other}"))
        .expect_err("its type is not read")
        .to_string();
    for part in [
        "`unread`",
        "is IQ2_XXS in",
        "types.gguf",
        "Q4_0, Q4_1, Q5_0",
    ] {
        assert!(error.contains(part), "{error}\n  does not say\n{part}");
    }
    assert!(
        value(&session, "unread").iter().all(|&x| x == 0.5),
        "as it was"
    );
}

#[test]
fn metadata_is_text() {
    let weights = Weights::open(recorded("types.gguf")).expect("recorded");
    let metadata = weights.metadata();
    for (key, text) in [
        ("general.architecture", "none"),
        ("general.name", "types"),
        ("general.alignment", "64"),
        ("test.float", "0.5"),
        ("test.negative", "-3"),
        ("test.bool", "true"),
        ("test.tokens", "[string; 3]"),
        ("test.scores", "[f32; 2]"),
    ] {
        assert_eq!(metadata.get(key).map(|s| &**s), Some(text), "{key}");
    }
}

/// The floats that the parts of a quantized weight stand for.
fn dequantized(session: &Session, name: &str, format: Quantization) -> Vec<f32> {
    let part = |end: &str| value(session, &format!("{name}.{end}"));
    let (numbers, scales, zeros) = (part("numbers"), part("scales"), part("zeros"));
    let shape = |end: &str| {
        let value = session.value(&format!("{name}.{end}")).expect("a part");
        value.shape().to_vec()
    };
    let (per_row, zero_bytes) = (shape("scales")[1], shape("zeros")[1]);
    let number = |packed: &[f32], at: usize| {
        let per_byte = 8 / format.bits as usize;
        let byte = packed[at / per_byte] as u8;
        let shift = format.bits as usize * (at % per_byte);
        f32::from(byte >> shift & ((1u16 << format.bits) - 1) as u8)
    };
    let columns = per_row * format.block as usize;
    let element = |at: usize| {
        let (row, block) = (at / columns, at % columns / format.block as usize);
        let zero = number(&zeros[row * zero_bytes..], block);
        (number(&numbers, at) - zero) * scales[row * per_row + block]
    };
    (0..shape("numbers")[0] * columns).map(element).collect()
}

/// Weights of a few bits are the file's own numbers where the formats are equal: whole, joined, and
/// in parts whose edges are those of blocks.
#[test]
fn equal_formats_are_taken_over_exactly() {
    let weights = Weights::open(recorded("types.gguf")).expect("recorded");
    let expected = File::open(recorded("types.safetensors")).expect("recorded");
    for (name, format, other) in [("Q4_0", FOUR_BITS, "Q8_0"), ("Q8_0", EIGHT_BITS, "Q4_0")] {
        let rules = |rules: Rules| rules.ignore_extra("{other}");
        let load = |shapes: &[(&str, [usize; 2])], by: Rules| {
            let params = Params::seeded(0);
            let root = params.root().quantized(format);
            for (name, shape) in shapes {
                root.param(name, *shape, Init::Constant(0.5));
            }
            let mut session = session(&params);
            session.load_from(&weights, &rules(by)).expect("it fits");
            session
        };
        let all = floats(&expected, name);
        let whole = load(&[(name, [3, 64])], Rules::new());
        assert_bits(&dequantized(&whole, name, format), &all, name);
        // The right halves of the rows, and the left ones.
        let halves = load(
            &[("left", [3, 32]), ("right", [3, 32])],
            Rules::new().split(name, ["left", "right"], 1),
        );
        for (at, half) in ["left", "right"].into_iter().enumerate() {
            let part: Vec<f32> = all
                .chunks(32)
                .skip(at)
                .step_by(2)
                .flatten()
                .copied()
                .collect();
            assert_bits(&dequantized(&halves, half, format), &part, half);
        }
        // Another format is quantized by its floats.
        let differs = load(&[(other, [3, 64])], Rules::new());
        let near = dequantized(&differs, other, format);
        let all = floats(&expected, other);
        let largest = all.iter().fold(0f32, |most, x| most.max(x.abs()));
        let step = 2.0 * largest / ((1 << format.bits) - 1) as f32;
        for (x, y) in all.iter().zip(&near) {
            assert!((x - y).abs() <= step, "{other}: {x} as {y}");
        }
    }
}

/// An infinite scale is named, and nothing is changed.
#[test]
fn infinite_scales_are_refused() {
    let at = tempfile::tempdir().expect("a folder");
    let path = at.path().join("a.gguf");
    let mut block = vec![0x11; 18 * 4];
    block[36..38].copy_from_slice(&[0, 0x7c]);
    let file = file(3, &[], &[("w", &[64, 2], 2, 0)], &block);
    std::fs::write(&path, file).expect("it is written");
    let params = Params::seeded(0);
    let root = params.root().quantized(FOUR_BITS);
    root.param("w", [2, 64], Init::Constant(0.5));
    let mut session = session(&params);
    let error = load(&mut session, &path, &Rules::new()).expect_err("it is infinite");
    assert!(
        error.contains("`w`") && error.contains("[1, 0] is inf"),
        "{error}"
    );
}

const LLAMA: Llama = Llama {
    layers: 2,
    width: 32,
    heads: 4,
    key_heads: 2,
    inner: 96,
    length: 6,
    vocabulary: 23,
    tied: true,
    ..Llama::SMALL
};

/// The logits of a session's Llama for the recorded tokens.
fn logits(session: &mut Session, model: &impl Module) -> Vec<f32> {
    let expected = File::open(recorded("llama.safetensors")).expect("recorded");
    let entry = expected.get("x").expect("recorded");
    let (bytes, _) = entry.bytes.as_chunks::<4>();
    let tokens = bytes.iter().map(|&b| i32::from_le_bytes(b)).collect();
    let tokens = ndarray::Array2::from_shape_vec((2, 6), tokens).expect("as recorded");
    let trace = Trace::inference();
    let x = trace.input("x", I32, (2, 6));
    let program = session
        .compile(&trace, [x.apply(model)])
        .expect("it compiles");
    let [y] = session.run(&program, &tokens).expect("it runs");
    y.array::<f32>().expect("f32").into_raw_vec_and_offset().0
}

#[track_caller]
fn assert_near(got: &[f32], expected: &[f32], tolerance: f32) {
    assert_eq!(got.len(), expected.len());
    let largest = expected.iter().fold(0f32, |n, x| n.max(x.abs()));
    for (at, (g, e)) in got.iter().zip(expected).enumerate() {
        assert!(
            (g - e).abs() <= tolerance * largest,
            "{at} is {g}, recorded {e}"
        );
    }
}

#[test]
fn a_llama_has_the_weights_and_logits_of_its_hub_layout() {
    let weights = Weights::open(recorded("llama.gguf")).expect("recorded");
    let expected = File::open(recorded("llama.safetensors")).expect("recorded");
    let rules = Rules::llama_gguf(LLAMA.heads, LLAMA.key_heads);
    for tied in [true, false] {
        let params = Params::seeded(0);
        let model = Llama { tied, ..LLAMA }.layers(&params.root());
        let mut session = session(&params);
        session.load_from(&weights, &rules).expect("it fits");
        for param in params.declared() {
            let stored = match param.name() {
                "lm_head.weight" => "model.embed_tokens.weight",
                name => name,
            };
            let stored = floats(&expected, stored);
            assert_bits(&value(&session, param.name()), &stored, param.name());
        }
        let recorded = floats(&expected, "logits");
        assert_near(&logits(&mut session, &model), &recorded, 1e-5);
    }
    assert_eq!(weights.metadata()["llama.rope.freq_base"], "10000");
}

#[test]
fn a_gpt2_has_the_weights_of_its_hub_layout() {
    let weights = Weights::open(recorded("gpt2.gguf")).expect("recorded");
    let hub = Weights::open(folder("gpt2")).expect("recorded");
    for tied in [true, false] {
        let load = |weights: &Weights, rules: &Rules| {
            let params = Params::seeded(0);
            let gpt = Gpt {
                layers: 2,
                width: 8,
                heads: 2,
                length: 6,
                vocabulary: 17,
                tied,
            };
            let _model = gpt.layers(&params.root());
            let mut session = session(&params);
            session.load_from(weights, rules).expect("it fits");
            (session, params)
        };
        let (from_hub, params) = load(&hub, &Rules::gpt2());
        let (session, _) = load(&weights, &Rules::gpt2_gguf());
        for param in params.declared() {
            let values = [&session, &from_hub].map(|session| value(session, param.name()));
            assert_bits(&values[0], &values[1], param.name());
        }
    }
}

#[test]
fn a_qwen_has_biases_and_norms_of_heads_and_no_interleaved_rows() {
    let at = tempfile::tempdir().expect("a folder");
    let path = at.path().join("a.gguf");
    let names = [
        ("blk.3.attn_q.weight", "q_proj.weight", &[1, 4][..]),
        ("blk.3.attn_k.bias", "k_proj.bias", &[4]),
        ("blk.3.attn_k_norm.weight", "k_norm.weight", &[4]),
    ];
    let tensors: Vec<Described<'_>> = names
        .iter()
        .zip([0, 32, 64])
        .map(|(&(name, _, shape), offset)| (name, shape, 0, offset))
        .collect();
    let numbers: Vec<f32> = (0..20u8).map(f32::from).collect();
    let data: Vec<u8> = numbers.iter().flat_map(|x| x.to_le_bytes()).collect();
    std::fs::write(&path, file(3, &[], &tensors, &data)).expect("it is written");
    let own = |name: &str| format!("model.layers.3.self_attn.{name}");
    let shapes = names.map(|(_, name, shape)| {
        let shape = shape.iter().rev().map(|&n| n as usize);
        (own(name), shape.collect())
    });
    let mut session = session(&declare(&shapes));
    assert_eq!(load(&mut session, &path, &Rules::qwen_gguf()), Ok(3));
    for ((_, name, _), first) in names.into_iter().zip([0, 8, 16]) {
        assert_bits(
            &value(&session, &own(name)),
            &numbers[first..first + 4],
            name,
        );
    }
}

/// A head and an embedding in different types are two weights, which a tied model does not have.
#[test]
fn a_tied_head_of_another_type_is_refused() {
    let at = tempfile::tempdir().expect("a folder");
    let path = at.path().join("a.gguf");
    let tensors = [
        ("token_embd.weight", &[2, 2][..], 0, 0),
        ("output.weight", &[2, 2], 0, 32),
    ];
    for (last, fits) in [(0, true), (1, false)] {
        let mut data = [0; 48];
        data[47] = last;
        std::fs::write(&path, file(3, &[], &tensors, &data)).expect("it is written");
        let mut session = session(&declare(&[("transformer.wte.weight".into(), vec![2, 2])]));
        let loaded = load(&mut session, &path, &Rules::gpt2_gguf());
        assert_eq!(loaded.is_ok(), fits, "{loaded:?}");
        let error = loaded.err().unwrap_or_default();
        assert!(fits || error.contains("have other values"), "{error}");
    }
}

/// The readers of safetensors files say which method reads a GGUF file.
#[test]
fn checkpoints_are_not_gguf_files() {
    let weights = Weights::open(recorded("gpt2.gguf")).expect("recorded");
    let mut session = session_of(&weights);
    let error = session
        .load(recorded("gpt2.gguf"))
        .expect_err("another format");
    assert!(
        error
            .to_string()
            .contains("it is a GGUF file; Weights::open"),
        "{error}"
    );
}

#[test]
fn the_sizes_of_a_llama_are_those_of_its_metadata() {
    let weights = Weights::open(recorded("llama.gguf")).expect("recorded");
    // Its factors are 1.
    assert_eq!(Llama::of_gguf(&weights).expect("recorded"), LLAMA);
    let at = tempfile::tempdir().expect("a folder");
    let path = at.path().join("a.gguf");
    let whole = std::fs::read(recorded("llama.gguf")).expect("recorded");
    let replaced = |from: &str, to: &str| {
        let mut bytes = whole.clone();
        let found = bytes.windows(from.len()).position(|w| w == from.as_bytes());
        let found = found.expect("it is there");
        bytes[found..found + to.len()].copy_from_slice(to.as_bytes());
        std::fs::write(&path, bytes).expect("it is written");
        Llama::of_gguf(&Weights::open(&path).expect("sound")).map_err(|e| e.to_string())
    };
    assert_eq!(
        replaced("rope_freqs.weight", "rope_other.weight"),
        Ok(LLAMA)
    );
    for (from, to, says) in [
        (
            "llama.block_count",
            "llama.clock_count",
            "llama.block_count is missing, not a size",
        ),
        (
            "token_embd.weight",
            "token_abcd.weight",
            "token_embd.weight is not a matrix",
        ),
    ] {
        let error = replaced(from, to).expect_err("it is missing");
        assert!(error.contains(says), "{error}");
    }
    // More entries of metadata, of a multiple of 32 bytes in all.
    let with = |entries: &[(&str, Entry)]| {
        let mut bytes = whole.clone();
        bytes[16] += 1 + entries.len() as u8;
        let string = |text: &str| [&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat();
        let mut more = Vec::new();
        for (key, value) in entries {
            more.extend(string(key));
            match value {
                Entry::Text(text) => {
                    more.extend([8u32.to_le_bytes().to_vec(), string(text)].concat())
                }
                Entry::Float(x) => more.extend([6u32.to_le_bytes(), x.to_le_bytes()].concat()),
            }
        }
        let filled = more.len() + string("filler").len() + 4 + 8;
        let filler = "x".repeat(filled.next_multiple_of(32) - filled);
        more.extend(
            [
                string("filler"),
                8u32.to_le_bytes().to_vec(),
                string(&filler),
            ]
            .concat(),
        );
        bytes.splice(24..24, more);
        std::fs::write(&path, bytes).expect("it is written");
        let sizes = Llama::of_gguf(&Weights::open(&path).expect("sound"));
        sizes.map(|sizes| sizes.scaling).map_err(|e| e.to_string())
    };
    let (scaling, factor) = ("llama.rope.scaling.type", "llama.rope.scaling.factor");
    let old = "llama.rope.scale_linear";
    for (entries, scaling) in [
        (vec![], RopeScaling::None),
        (vec![(factor, Entry::Float(4.0))], RopeScaling::Linear(4.0)),
        (vec![(old, Entry::Float(2.5))], RopeScaling::Linear(2.5)),
        (vec![(factor, Entry::Float(1.0))], RopeScaling::None),
        (
            vec![(scaling, Entry::Text("none")), (factor, Entry::Float(4.0))],
            RopeScaling::None,
        ),
        (
            vec![
                (scaling, Entry::Text("linear")),
                (factor, Entry::Float(4.0)),
            ],
            RopeScaling::Linear(4.0),
        ),
    ] {
        assert_eq!(with(&entries), Ok(scaling));
    }
    for (entry, says) in [
        (
            (scaling, Entry::Text("yarn of other lengths")),
            "llama.rope.scaling.type is yarn of other lengths, and only linear scaling and the factors of Llama 3.1 are read",
        ),
        (
            (factor, Entry::Float(0.0)),
            "llama.rope.scaling.factor is 0, not above 0",
        ),
        (
            (factor, Entry::Float(f32::NAN)),
            "llama.rope.scaling.factor is NaN, not above 0",
        ),
    ] {
        let error = with(&[entry]).expect_err("scaled");
        assert!(error.contains(says), "{error}");
    }
    let other = Weights::open(recorded("types.gguf")).expect("recorded");
    let error = Llama::of_gguf(&other).expect_err("another").to_string();
    assert!(
        error.contains("general.architecture is none, not llama"),
        "{error}"
    );
}

/// A value of metadata.
enum Entry {
    Text(&'static str),
    Float(f32),
}

/// A file has the factors of its rotary frequencies, from which those of Llama 3.1 and 3.2 are known.
#[test]
fn the_scaling_of_a_llama_is_found_by_its_factors() {
    let at = tempfile::tempdir().expect("a folder");
    let path = at.path().join("a.gguf");
    let of = |base: f32, factors: [f32; 4]| {
        let mut bytes = std::fs::read(recorded("llama.gguf")).expect("recorded");
        let mut write = |after: &[u8], skipped: usize, new: &[f32]| {
            let found = bytes.windows(after.len()).position(|w| w == after);
            let at = found.expect("it is there") + skipped;
            let new: Vec<u8> = new.iter().flat_map(|x| x.to_le_bytes()).collect();
            bytes[at..at + new.len()].copy_from_slice(&new);
        };
        let key = b"llama.rope.freq_base";
        write(key, key.len() + 4, &[base]);
        write(&[1f32; 4].map(f32::to_le_bytes).concat(), 0, &factors);
        std::fs::write(&path, bytes).expect("it is written");
        let weights = Weights::open(&path).expect("sound");
        let read = weights.read("rope_freqs.weight").expect("readable");
        assert_eq!(read, Some(factors.map(f32::to_le_bytes).concat()));
        Llama::of_gguf(&weights).map_err(|e| e.to_string())
    };
    // Waves of 6, 167, 4443 and 118,143 positions, of which the third is between 8192 / 4 and 8192.
    let between = |factor: f32| {
        let wave = std::f32::consts::TAU * 5e5f32.powf(0.5);
        let share = (8192.0 / wave - 1.0) / 3.0;
        1.0 / ((1.0 - share) / factor + share)
    };
    for factor in [8.0, 32.0] {
        let found = of(5e5, [1.0, 1.0, between(factor), factor]).expect("known");
        let scaling = RopeScaling::Llama3 {
            factor,
            low: 1.0,
            high: 4.0,
            original: 8192,
        };
        let expected = Llama {
            base: 5e5,
            scaling,
            ..LLAMA
        };
        assert_eq!(found, expected);
    }
    for (base, factors) in [
        (5e5, [1.0, 1.0, 2.0, 8.0]),
        (1e4, [1.0, 1.0, 1.0, 8.0]),
        (1e4, [1.0, 1.0, 0.5, 1.0]),
        (1e4, [f32::NAN, 1.0, 1.0, 1.0]),
    ] {
        let error = of(base, factors).expect_err("unknown");
        assert!(error.contains("not those of Llama 3.1"), "{error}");
    }
}

/// The scaling changes the frequencies of the model.
#[test]
fn a_scaled_llama_rotates_by_other_angles() {
    let weights = Weights::open(recorded("llama.gguf")).expect("recorded");
    let rules = Rules::llama_gguf(LLAMA.heads, LLAMA.key_heads);
    let of = |scaling: RopeScaling| {
        let params = Params::seeded(0);
        let model = Llama { scaling, ..LLAMA }.layers(&params.root());
        let mut session = session(&params);
        session.load_from(&weights, &rules).expect("it fits");
        logits(&mut session, &model)
    };
    let plain = of(RopeScaling::None);
    assert_eq!(of(RopeScaling::Linear(1.0)), plain);
    let scaled = of(RopeScaling::Linear(4.0));
    // The first token is not rotated.
    let (first, all) = (LLAMA.vocabulary, LLAMA.length * LLAMA.vocabulary);
    assert_eq!(scaled[..first], plain[..first]);
    assert_ne!(scaled[first..all], plain[first..all]);
}

#[test]
fn models_in_several_files_are_opened_by_any_of_them() {
    let at = tempfile::tempdir().expect("a folder");
    let path = |number: usize| at.path().join(format!("m-0000{number}-of-00003.gguf"));
    let count = ("split.count", 2, &3u16.to_le_bytes()[..]);
    for (number, name) in ["u", "v", "w"].into_iter().enumerate() {
        let file = file(3, &[count], &[(name, &[2], 0, 0)], &[number as u8; 8]);
        std::fs::write(path(number + 1), file).expect("it is written");
    }
    for number in 1..=3 {
        let weights = Weights::open(path(number)).expect("whole");
        let names: Vec<&str> = weights.names().map(|(name, ..)| name).collect();
        assert_eq!(names, ["u", "v", "w"]);
        assert_eq!(weights.files().len(), 3);
        assert_eq!(weights.read("w").expect("readable"), Some(vec![2; 8]));
    }
    let error = Weights::open(at.path()).expect_err("three").to_string();
    assert!(error.contains("the folder has 3 GGUF files"), "{error}");
    let other = at.path().join("other.gguf");
    std::fs::copy(path(1), &other).expect("room");
    let error = Weights::open(&other).expect_err("which one").to_string();
    assert!(error.contains("one of 3 files (split.count)"), "{error}");
    std::fs::remove_file(path(2)).expect("mine");
    let error = Weights::open(path(1))
        .expect_err("one is missing")
        .to_string();
    assert!(error.contains("m-00002-of-00003.gguf"), "{error}");
}

/// Queries and keys move their rows whole, so that their numbers stay those of the file.
/// Only GGUF files are split so: metadata of a safetensors file may have any keys.
#[test]
fn metadata_of_safetensors_files_splits_nothing() {
    let at = tempfile::tempdir().expect("a folder");
    let path = at.path().join("a.safetensors");
    let entry = slabwise::weights::Entry {
        name: "w",
        dtype: F32,
        shape: vec![2],
        bytes: &[0; 8],
    };
    let metadata = [("split.count".to_string(), "3".to_string())];
    slabwise::weights::save(&path, &[entry], &metadata.into()).expect("it is written");
    let weights = Weights::open(&path).expect("one file");
    assert_eq!(weights.names().len(), 1);
}

#[test]
fn a_quantized_llama_has_the_numbers_of_the_file() {
    let weights = Weights::open(recorded("llama.gguf")).expect("recorded");
    let expected = File::open(recorded("llama.safetensors")).expect("recorded");
    let types: std::collections::BTreeMap<&str, String> =
        weights.names().map(|(name, of, _)| (name, of)).collect();
    for (format, of) in [(FOUR_BITS, "Q4_0"), (EIGHT_BITS, "Q8_0")] {
        let params = Params::seeded(0);
        let model = LLAMA.layers(&params.root().quantized(format));
        let mut session = session(&params);
        let rules = Rules::llama_gguf(LLAMA.heads, LLAMA.key_heads);
        session.load_from(&weights, &rules).expect("it fits");
        let mut exact = 0;
        for (file, hub) in [
            ("attn_q", "self_attn.q_proj"),
            ("attn_k", "self_attn.k_proj"),
            ("attn_output", "self_attn.o_proj"),
            ("ffn_gate", "mlp.gate_proj"),
            ("ffn_up", "mlp.up_proj"),
            ("ffn_down", "mlp.down_proj"),
        ] {
            for layer in 0..2 {
                let hub = format!("model.layers.{layer}.{hub}.weight");
                if types[&*format!("blk.{layer}.{file}.weight")] == of {
                    let near = dequantized(&session, &hub, format);
                    assert_bits(&near, &floats(&expected, &hub), &hub);
                    exact += 1;
                }
            }
        }
        assert_eq!(exact, if of == "Q4_0" { 9 } else { 3 });
        // Of four bits, weights that the file has in eight are rounded.
        let recorded = floats(&expected, "logits");
        let tolerance = if of == "Q4_0" { 0.3 } else { 0.03 };
        assert_near(&logits(&mut session, &model), &recorded, tolerance);
    }
}

/// Saving by the same rules gives the names and the order of rows of the GGUF file.
#[test]
fn rules_of_gguf_run_backwards() {
    let weights = Weights::open(recorded("llama.gguf")).expect("recorded");
    let rules = Rules::llama_gguf(LLAMA.heads, LLAMA.key_heads);
    let params = Params::seeded(0);
    LLAMA.layers(&params.root());
    let mut first = session(&params);
    first.load_from(&weights, &rules).expect("it fits");
    let at = tempfile::tempdir().expect("a folder");
    let path = at.path().join("saved.safetensors");
    first
        .save_as(&path, &rules, &SaveOptions::new())
        .expect("room");
    let saved = Weights::open(&path).expect("saved");
    let names = |weights: &Weights| -> Vec<(String, Vec<u64>)> {
        let names = weights
            .names()
            .filter(|(name, ..)| *name != "rope_freqs.weight");
        names
            .map(|(name, _, shape)| (name.to_owned(), shape.to_vec()))
            .collect()
    };
    assert_eq!(names(&saved), names(&weights));
    let plain = |weights: &Weights| {
        let mut session = session_of(weights);
        session.load_from(weights, &Rules::new()).expect("it fits");
        session
    };
    let (saved, original) = (plain(&saved), plain(&weights));
    for (name, _) in names(&weights) {
        assert_bits(&value(&saved, &name), &value(&original, &name), &name);
    }
}

#[test]
fn mistaken_heads_name_the_rule_and_the_shape() {
    let weights = Weights::open(recorded("llama.gguf")).expect("recorded");
    let params = Params::seeded(0);
    LLAMA.layers(&params.root());
    let mut session = session(&params);
    for (heads, says) in [
        (
            3,
            "(\"blk.{i}.attn_q.weight\", 3): `blk.0.attn_q.weight` has the shape [32, 32], whose rows",
        ),
        (0, "it has no heads"),
    ] {
        let error = session.load_from(&weights, &Rules::llama_gguf(heads, 2));
        let error = error.expect_err("it does not divide").to_string();
        assert!(error.contains(says), "{error}");
    }
}

/// A tensor of a file: its name, axes (the fastest first), type and offset.
type Described<'a> = (&'a str, &'a [u64], u32, u64);

/// A GGUF file with entries of metadata (their types and bytes), tensors and data.
pub(super) fn file(
    version: u32,
    entries: &[(&str, u32, &[u8])],
    tensors: &[Described<'_>],
    data: &[u8],
) -> Vec<u8> {
    let mut bytes = b"GGUF".to_vec();
    let string = |text: &str| [&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat();
    bytes.extend(version.to_le_bytes());
    bytes.extend((tensors.len() as u64).to_le_bytes());
    bytes.extend((entries.len() as u64).to_le_bytes());
    for (name, kind, value) in entries {
        bytes.extend(string(name));
        bytes.extend(kind.to_le_bytes());
        bytes.extend(*value);
    }
    for (name, axes, kind, offset) in tensors {
        bytes.extend(string(name));
        bytes.extend((axes.len() as u32).to_le_bytes());
        axes.iter().for_each(|n| bytes.extend(n.to_le_bytes()));
        bytes.extend(kind.to_le_bytes());
        bytes.extend(offset.to_le_bytes());
    }
    bytes.resize(bytes.len().next_multiple_of(32), 0);
    bytes.extend(data);
    bytes
}
