//! Rules one by one: the elements they move, and the mistakes they report.

use slabwise::weights::{self, Entry, SaveOptions};

use super::*;

/// A tensor of a file: its name, its type in the format, its shape and its bytes.
pub type Raw<'a> = (&'a str, &'a str, &'a [u64], Vec<u8>);

/// The bytes of a file with these tensors, whose names are written as they are.
pub fn file(tensors: &[Raw<'_>]) -> Vec<u8> {
    let (mut header, mut data) = (Vec::new(), Vec::new());
    for (name, dtype, shape, bytes) in tensors {
        let (from, to) = (data.len(), data.len() + bytes.len());
        header.push(format!(
            "\"{name}\":{{\"dtype\":\"{dtype}\",\"shape\":{shape:?},\"data_offsets\":[{from},{to}]}}"
        ));
        data.extend_from_slice(bytes);
    }
    let header = format!("{{{}}}", header.join(","));
    [
        &(header.len() as u64).to_le_bytes(),
        header.as_bytes(),
        &data,
    ]
    .concat()
}

fn bytes(values: impl IntoIterator<Item = f32>) -> Vec<u8> {
    values.into_iter().flat_map(f32::to_le_bytes).collect()
}

/// A tensor of ascending numbers from `first` on.
fn counted<'a>(name: &'a str, shape: &'a [u64], first: usize) -> Raw<'a> {
    let n: u64 = shape.iter().product();
    (
        name,
        "F32",
        shape,
        bytes((0..n as usize).map(|i| (first + i) as f32)),
    )
}

/// A session with these weights, loaded from a file with these tensors.
fn loaded(
    model: &[(&str, &[usize])],
    tensors: &[Raw<'_>],
    rules: &Rules,
) -> Result<Session, String> {
    let at = tempfile::tempdir().expect("a folder");
    let path = at.path().join("a.safetensors");
    std::fs::write(&path, file(tensors)).expect("it is written");
    let shapes: Vec<(String, Vec<usize>)> = model
        .iter()
        .map(|(name, shape)| ((*name).to_owned(), shape.to_vec()))
        .collect();
    let mut session = session(&declare(&shapes));
    let before = load(&mut session, &path, rules);
    if before.is_err() {
        // Nothing changes unless all of it fits.
        for (name, _) in model {
            assert!(value(&session, name).iter().all(|&x| x == 0.5), "{name}");
        }
    }
    before.map(|_| session)
}

#[track_caller]
fn says(result: Result<Session, String>, expected: &[&str]) {
    let text = result.err().expect("it does not fit");
    for part in expected {
        assert!(text.contains(part), "{text}\n  does not say\n{part}");
    }
}

#[test]
fn axes_are_permuted_and_parts_joined_and_split() {
    let rules = Rules::new()
        .rename("old.{*rest}", "{*rest}")
        .transpose("a.{i}.w")
        .permute("conv", &[3, 2, 0, 1])
        .join(["q", "k"], "qk", 1)
        .split_lengths("kv", &[("k2", 1), ("v2", 3)], 0)
        .split("halves", ["left", "right"], 1)
        // Parts of a tensor that was turned around.
        .transpose("halves2")
        .split("halves2", ["up", "down"], 0)
        .join(["up", "down"], "again", 1);
    let tensors = [
        counted("old.a.0.w", &[2, 3], 0),
        counted("old.conv", &[1, 2, 3, 4], 0),
        counted("q", &[2, 1], 0),
        counted("k", &[2, 1], 10),
        counted("kv", &[4, 1], 0),
        counted("halves", &[2, 4], 0),
        counted("halves2", &[2, 4], 0),
    ];
    let model: &[(&str, &[usize])] = &[
        ("a.0.w", &[3, 2]),
        ("conv", &[4, 3, 1, 2]),
        ("qk", &[2, 2]),
        ("k2", &[1, 1]),
        ("v2", &[3, 1]),
        ("left", &[2, 2]),
        ("right", &[2, 2]),
        ("again", &[2, 4]),
    ];
    let session = loaded(model, &tensors, &rules).expect("it fits");
    let of = |name| value(&session, name);
    assert_eq!(of("a.0.w"), [0.0, 3.0, 1.0, 4.0, 2.0, 5.0]);
    let conv = |o, i, y, x| ((y * 2 + x) * 3 + i) as f32 * 4.0 + o as f32;
    let all = (0..24).map(|n| conv(n / 6, n / 2 % 3, 0, n % 2));
    assert_eq!(of("conv"), all.collect::<Vec<f32>>());
    assert_eq!(of("qk"), [0.0, 10.0, 1.0, 11.0]);
    assert_eq!((of("k2"), of("v2")), (vec![0.0], vec![1.0, 2.0, 3.0]));
    assert_eq!(
        (of("left"), of("right")),
        (vec![0.0, 1.0, 4.0, 5.0], vec![2.0, 3.0, 6.0, 7.0])
    );
    // [4, 2] cut into two of [2, 2], side by side.
    assert_eq!(of("again"), [0.0, 4.0, 2.0, 6.0, 1.0, 5.0, 3.0, 7.0]);
    // And back, to the same bytes.
    let at = tempfile::tempdir().expect("a folder");
    let path = at.path().join("b.safetensors");
    session
        .save_as(&path, &rules, &SaveOptions::new())
        .expect("it is saved");
    let saved = File::open(&path).expect("it is there");
    assert_eq!(
        saved.metadata().get("format").map(String::as_str),
        Some("pt")
    );
    assert_eq!(saved.tensors().count(), tensors.len());
    for (name, _, shape, bytes) in &tensors {
        // A rename of all names below a prefix takes the others along.
        let entry = saved.get(&format!("old.{}", name.trim_start_matches("old.")));
        let entry = entry.unwrap_or_else(|| panic!("no {name}"));
        assert_eq!((&*entry.shape, entry.bytes), (*shape, &**bytes), "{name}");
    }
}

#[test]
fn large_tensors_are_turned_in_parts() {
    // Several windows of reading, with a short last one.
    let (rows, columns) = (700, 1001);
    let shape = [rows as u64, columns as u64];
    let tensors = [counted("w", &shape, 0), counted("v", &shape, 0)];
    let model: &[(&str, &[usize])] = &[
        ("w", &[columns, rows]),
        ("left", &[rows, 500]),
        ("right", &[rows, 501]),
    ];
    let rules = Rules::new()
        .transpose("w")
        .split_lengths("v", &[("left", 500), ("right", 501)], 1);
    let session = loaded(model, &tensors, &rules).expect("it fits");
    let at = |r: usize, c: usize| (r * columns + c) as f32;
    let (w, left, right) = (
        value(&session, "w"),
        value(&session, "left"),
        value(&session, "right"),
    );
    for r in 0..rows {
        for c in 0..columns {
            assert_eq!(w[c * rows + r], at(r, c));
            let part = if c < 500 {
                left[r * 500 + c]
            } else {
                right[r * 501 + c - 500]
            };
            assert_eq!(part, at(r, c));
        }
    }
}

#[test]
fn every_mismatch_is_reported_at_once() {
    let rules = Rules::new()
        .rename("net.{*rest}", "{*rest}")
        .transpose("w.{i}")
        .rename("never.{i}", "there.{i}")
        .join(["q", "k"], "qk", 0);
    let tensors = [
        counted("net.w.0", &[2, 3], 0),
        counted("net.b", &[4], 0),
        counted("q", &[1, 2], 0),
        ("count", "I64", &[1], 7i64.to_le_bytes().to_vec()),
        counted("net.other", &[1], 0),
    ];
    let model: &[(&str, &[usize])] = &[
        ("w.0", &[2, 3]),
        ("b", &[5]),
        ("count", &[1]),
        ("gone", &[2]),
    ];
    says(
        loaded(model, &tensors, &rules),
        &[
            "a.safetensors does not fit this model:",
            "\n  cannot join([\"q\", \"k\"], \"qk\", 0): `qk` needs `k`, which is not there",
            "\n  wrong shape: `w.0` is [2, 3] in the model, [3, 2] in the file (from `net.w.0` F32 [2, 3] of a.safetensors, by rename(\"net.{*rest}\", \"{*rest}\"), transpose(\"w.{i}\"))",
            "\n  wrong shape: `b` is [5] in the model, [4] in the file (from `net.b` F32 [4] of a.safetensors",
            "\n  wrong dtype: `count` is f32 in the model, I64 in the file (from `count` I64 [1] of a.safetensors)",
            "\n  missing: `gone` (f32 [2])",
            "\n  unexpected: `other` ([1]) in the file (from `net.other`",
            "rules that no tensor matched: rename(\"never.{i}\", \"there.{i}\")",
        ],
    );
    // A prefix is recognised.
    says(
        loaded(
            &[("w", &[1])],
            &[counted("module.w", &[1], 0)],
            &Rules::new(),
        ),
        &["Rules::rename(\"module.{*rest}\", \"{*rest}\") removes it"],
    );
    says(
        loaded(&[("body.w", &[1])], &[counted("w", &[1], 0)], &Rules::new()),
        &["Rules::rename(\"{*rest}\", \"body.{*rest}\") adds it"],
    );
    let many: Vec<(String, Vec<usize>)> =
        (0..1000).map(|i| (format!("layer{i}"), vec![1])).collect();
    let model: Vec<(&str, &[usize])> = many.iter().map(|(n, s)| (&**n, &**s)).collect();
    says(loaded(&model, &[], &Rules::new()), &["and 936 more"]);
}

#[test]
fn parts_of_a_model_are_loaded_if_the_rules_say_so() {
    let tensors = [
        counted("body", &[2], 1),
        counted("head", &[3], 1),
        counted("mask", &[4], 1),
    ];
    let model: &[(&str, &[usize])] = &[("body", &[2]), ("head", &[5]), ("new", &[1])];
    let rules = Rules::new()
        .ignore("head")
        .ignore_extra("mask")
        .allow_missing("head")
        .allow_missing("n{rest}");
    let session = loaded(model, &tensors, &rules).expect("it fits");
    assert_eq!(value(&session, "body"), [1.0, 2.0]);
    assert_eq!(
        (value(&session, "head"), value(&session, "new")),
        (vec![0.5; 5], vec![0.5])
    );
    says(
        loaded(model, &tensors, &Rules::new()),
        &["wrong shape: `head`", "unexpected: `mask`"],
    );
    let all = Rules::new().ignore_extra("{*all}").allow_missing("{*all}");
    assert!(loaded(&[("x", &[1])], &tensors, &all).is_ok());
}

#[test]
fn types_are_cast_only_where_no_value_is_lost() {
    let longs = |values: &[i64]| {
        values
            .iter()
            .flat_map(|x| x.to_le_bytes())
            .collect::<Vec<u8>>()
    };
    let doubles = |values: &[f64]| {
        values
            .iter()
            .flat_map(|x| x.to_le_bytes())
            .collect::<Vec<u8>>()
    };
    let wide = ("w", "F64", &[2u64][..], doubles(&[0.1, f64::NEG_INFINITY]));
    let session = loaded(&[("w", &[2])], &[wide], &Rules::new()).expect("floats are cast");
    assert_eq!(value(&session, "w"), [0.1, f32::NEG_INFINITY]);
    let huge = ("w", "F64", &[1, 2][..], doubles(&[0.0, 1e300]));
    says(
        loaded(&[("w", &[1, 2])], &[huge], &Rules::new()),
        &[
            "lost value: element [0, 1] of `w` (F64) in",
            "a.safetensors is 1e300, which `w` (f32) cannot hold",
        ],
    );
    let permitted = Rules::new().cast("{*any}");
    let whole = ("w", "I64", &[2][..], longs(&[-3, 1 << 24]));
    let session =
        loaded(&[("w", &[2])], std::slice::from_ref(&whole), &permitted).expect("they are floats");
    assert_eq!(value(&session, "w"), [-3.0, 16_777_216.0]);
    says(
        loaded(&[("w", &[2])], &[whole], &Rules::new()),
        &["wrong dtype", "Rules::cast"],
    );
    let between = ("w", "I64", &[2][..], longs(&[0, (1 << 24) + 1]));
    says(
        loaded(&[("w", &[2])], &[between], &permitted),
        &["element [1]", "16777217"],
    );
    let bits = ("w", "BOOL", &[2][..], vec![0, 1]);
    let session = loaded(&[("w", &[2])], &[bits], &permitted).expect("0 and 1");
    assert_eq!(value(&session, "w"), [0.0, 1.0]);
    let eight = ("w", "F8_E4M3", &[2][..], vec![0, 1]);
    says(
        loaded(&[("w", &[2])], &[eight], &permitted),
        &["wrong dtype", "F8_E4M3"],
    );
}

#[test]
fn a_tied_weight_is_one_weight() {
    let rules = Rules::new().tied("head", "words");
    let words = || counted("words", &[2], 1);
    let session = loaded(&[("head", &[2])], &[words()], &rules).expect("the other name");
    assert_eq!(value(&session, "head"), [1.0, 2.0]);
    let both = [words(), counted("head", &[2], 1)];
    assert!(loaded(&[("words", &[2])], &both, &rules).is_ok());
    says(
        loaded(&[("words", &[2])], &both, &Rules::new()),
        &["unexpected: `head`"],
    );
    let differ = [words(), counted("head", &[2], 7)];
    says(
        loaded(&[("words", &[2])], &differ, &rules),
        &["tied: `head` and `words` have other values"],
    );
    // A model with both weights has what the file says.
    let session = loaded(&[("words", &[2]), ("head", &[2])], &differ, &rules).expect("two");
    assert_eq!(value(&session, "head"), [7.0, 8.0]);
}

/// Names may be swapped by way of a third, and a tensor ignored by two sets of rules.
#[test]
fn names_are_swapped_in_the_order_of_rules() {
    let rules = Rules::new()
        .rename("a", "t")
        .rename("b", "a")
        .rename("t", "b")
        .ignore("mask.{i}")
        .then(Rules::new().ignore("mask.{n}"));
    let tensors = [
        counted("a", &[2], 1),
        counted("b", &[2], 5),
        counted("mask.0", &[1], 0),
    ];
    let session = loaded(&[("a", &[2]), ("b", &[2])], &tensors, &rules).expect("it loads");
    assert_eq!(value(&session, "a"), [5.0, 6.0]);
    assert_eq!(value(&session, "b"), [1.0, 2.0]);
}

#[test]
fn mistaken_rules_are_refused_together() {
    let rules = Rules::new()
        .rename("a.{i}", "b.{j}")
        .rename("x.{", "y")
        .rename("one", "two")
        .rename("two", "three")
        .rename("three", "one")
        .transpose("w.{i}")
        .transpose("w.{n}")
        .rename("m", "n")
        .ignore("m")
        .permute("p", &[0, 0])
        .join(["q", "q"], "qq", 0)
        .tied("t", "t");
    let tensors = [counted("w", &[1], 0)];
    says(
        loaded(&[("w", &[1])], &tensors, &rules),
        &[
            "these rules for weights cannot be used:",
            "\"a.{i}\" and \"b.{j}\" have different captures",
            "the pattern \"x.{\" has a `{` without its `}`",
            "renames go in a circle: one → two → three → one",
            "transpose(\"w.{i}\") and transpose(\"w.{n}\") contradict each other",
            "rename(\"m\", \"n\") and ignore(\"m\") contradict each other",
            "permute(\"p\", [0, 0]): [0, 0] does not name each axis once",
            "join([\"q\", \"q\"], \"qq\", 0): the same part twice",
            "tied(\"t\", \"t\"): both names are the same",
        ],
    );
    // Mistakes that the names of a file show.
    let alike = Rules::new().rename("{i}.w", "w.{i}");
    says(
        loaded(
            &[("w.a", &[1])],
            &[counted("a.w", &[1], 0), counted("w.a", &[1], 0)],
            &alike,
        ),
        &["`w.a` is there already: two tensors would have one name"],
    );
    says(
        loaded(&[("w", &[1])], &tensors, &Rules::new().transpose("w")),
        &["cannot transpose(\"w\"): `w` has the shape [1]"],
    );
    says(
        loaded(
            &[("a", &[1])],
            &[counted("w", &[3], 0)],
            &Rules::new().split("w", ["a", "b"], 0),
        ),
        &["`w` has length 3 along axis 0, which is not that of 2 parts"],
    );
    let apart = [counted("q", &[1, 2], 0), counted("k", &[1, 3], 0)];
    says(
        loaded(
            &[("qk", &[2, 2])],
            &apart,
            &Rules::new().join(["q", "k"], "qk", 0),
        ),
        &["`qk` cannot be made of [[1, 2], [1, 3]]"],
    );
}

/// Shapes without elements may have lengths whose product cannot be counted.
#[test]
fn tensors_without_elements_are_moved_as_others() {
    let huge = 1u64 << 40;
    let empty = |name, shape| -> Raw<'_> { (name, "F32", shape, Vec::new()) };
    let long = &[0, huge, huge][..];
    let tensors = [
        empty("w", &[3, 0]),
        empty("v", &[0, 2]),
        empty("long", long),
        empty("q", &[1 << 63, 0]),
        empty("k", &[1 << 63, 0]),
    ];
    let rules = Rules::new()
        .transpose("w")
        .split("v", ["a", "b"], 1)
        .transpose("long")
        .split("long", ["left", "right"], 1)
        .ignore_extra("{*rest}");
    let model: &[(&str, &[usize])] = &[("w", &[0, 3]), ("a", &[0, 1]), ("b", &[0, 1])];
    assert!(loaded(model, &tensors, &rules).is_ok());
    says(
        loaded(model, &tensors, &rules.join(["q", "k"], "qk", 0)),
        &["`qk` cannot be made of"],
    );
}

#[test]
fn a_file_of_the_library_itself_is_checked_for_damage() {
    let at = tempfile::tempdir().expect("a folder");
    let path = at.path().join("own.safetensors");
    let data = bytes([1.0, 2.0]);
    let entry = Entry {
        name: "w",
        dtype: F32,
        shape: vec![2],
        bytes: &data,
    };
    weights::save(&path, &[entry], &Default::default()).expect("it is saved");
    let mut session = session(&declare(&[("w".to_owned(), vec![2])]));
    load(&mut session, &path, &Rules::new()).expect("it fits");
    assert_eq!(value(&session, "w"), [1.0, 2.0]);
    let mut file = std::fs::read(&path).expect("it is there");
    *file.last_mut().expect("it has bytes") ^= 1;
    std::fs::write(&path, file).expect("it is written");
    let error = load(&mut session, &path, &Rules::new()).expect_err("a bit is another");
    assert!(
        error.contains("`w`") && error.contains("is damaged"),
        "{error}"
    );
}

#[test]
fn saving_loses_no_value_and_hides_no_file() {
    let model: &[(&str, &[usize])] = &[("a", &[4]), ("b", &[2])];
    let tensors = [
        ("a", "F32", &[4u64][..], bytes([1.0, 1e-3, 70000.0, 0.0])),
        counted("b", &[2], 1),
    ];
    let session = loaded(model, &tensors, &Rules::new()).expect("it fits");
    let at = tempfile::tempdir().expect("a folder");
    let save = |options: SaveOptions| {
        let saved = session.save_as(at.path(), &Rules::new(), &options);
        saved.map_err(|e| e.to_string())
    };
    let files = || {
        let entries = std::fs::read_dir(at.path()).expect("a folder");
        let mut names: Vec<String> = entries
            .map(|e| {
                e.expect("an entry")
                    .file_name()
                    .to_string_lossy()
                    .into_owned()
            })
            .collect();
        names.sort();
        names
    };
    let error = save(SaveOptions::new().floats(F16)).expect_err("f16 ends at 65504");
    assert!(error.contains("`a`") && error.contains("70000"), "{error}");
    let error = save(SaveOptions::new().floats(I32)).expect_err("no floats");
    assert!(error.contains("f32, f16 or bf16"), "{error}");
    assert!(files().is_empty());
    save(SaveOptions::new().shard_bytes(16)).expect("two shards");
    let shards = [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    ];
    assert_eq!(files(), shards);
    let error = save(SaveOptions::new()).expect_err("the index would list other weights");
    assert!(error.contains("model.safetensors.index.json"), "{error}");
    save(SaveOptions::new().shard_bytes(16)).expect("again");
    let weights = Weights::open(at.path()).expect("shards");
    assert_eq!((weights.files().len(), weights.bytes()), (2, 24));
    // Without a value there is nothing to save.
    let unborn = super::session(&declare(&[("w".to_owned(), vec![1])]));
    let error = unborn
        .save_as(
            at.path().join("x.safetensors"),
            &Rules::new(),
            &SaveOptions::new(),
        )
        .expect_err("no value");
    assert!(error.to_string().contains("has no value yet"), "{error}");
}
