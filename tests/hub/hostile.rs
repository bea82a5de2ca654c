//! Damaged and hostile files: each is refused with its defect, soon and without much memory.

use std::time::{Duration, Instant};

use super::rules::file;
use super::*;

/// Opens a file with these bytes; the error, which comes within a second.
#[track_caller]
fn refused(name: &str, bytes: &[u8], says: &str) {
    let at = tempfile::tempdir().expect("a folder");
    let path = at.path().join(name);
    std::fs::write(&path, bytes).expect("it is written");
    refused_at(&path, says);
}

#[track_caller]
fn refused_at(path: &Path, says: &str) {
    let start = Instant::now();
    let error = Weights::open(path).expect_err("it is hostile").to_string();
    assert!(start.elapsed() < Duration::from_secs(1), "{error}");
    assert!(error.contains(says), "{error}\n  does not say\n{says}");
    assert!(error.len() < 2000, "{error}");
}

fn raw(header: &str, data: &[u8]) -> Vec<u8> {
    [
        &(header.len() as u64).to_le_bytes(),
        header.as_bytes(),
        data,
    ]
    .concat()
}

#[test]
fn hostile_headers_are_refused() {
    refused("a.safetensors", b"", "fewer than the length of a header");
    refused(
        "a.safetensors",
        b"1234567",
        "fewer than the length of a header",
    );
    refused("a.safetensors", &u64::MAX.to_le_bytes(), "only 0 follow");
    refused("a.safetensors", &[0xff; 64], "only 56 follow");
    refused(
        "a.safetensors",
        &raw("not json", &[]),
        "not a complete safetensors file",
    );
    refused(
        "a.safetensors",
        &raw("[]", &[]),
        "not a complete safetensors file",
    );
    let deep = format!("{}{}", "[".repeat(100_000), "]".repeat(100_000));
    refused(
        "a.safetensors",
        &raw(&deep, &[]),
        "not a complete safetensors file",
    );
    let deep = format!(r#"{{"a":{deep}}}"#);
    refused(
        "a.safetensors",
        &raw(&deep, &[]),
        "not a complete safetensors file",
    );
    let tensor = |name: &str, shape: &str, from: u64, to: u64| {
        format!(r#""{name}":{{"dtype":"F32","shape":[{shape}],"data_offsets":[{from},{to}]}}"#)
    };
    for (tensors, data, says) in [
        // Overlapping, with a gap, backwards, too short, too long, too large to count.
        (vec![tensor("a", "1", 0, 4), tensor("b", "1", 2, 6)], 6, ""),
        (
            vec![tensor("a", "1", 0, 4), tensor("b", "1", 8, 12)],
            12,
            "",
        ),
        (vec![tensor("a", "1", 4, 0)], 4, ""),
        (
            vec![tensor("a", "1", 0, 4)],
            3,
            "its tensors take 4 bytes, but 3 follow",
        ),
        (
            vec![tensor("a", "1", 0, 4)],
            9,
            "its tensors take 4 bytes, but 9 follow",
        ),
        (vec![tensor("a", "18446744073709551615,4", 0, 4)], 4, ""),
        (vec![tensor("a", "4611686018427387904", 0, u64::MAX)], 4, ""),
        (vec![tensor("a", "-1", 0, 4)], 4, ""),
        (
            vec![tensor("a", "1", 0, 4), tensor("a", "1", 0, 4)],
            4,
            "`a` twice",
        ),
        (
            vec![tensor("a", "1", 0, 4), tensor("\\u0061", "1", 4, 8)],
            8,
            "`a` twice",
        ),
    ] {
        let header = format!("{{{}}}", tensors.join(","));
        let says = if says.is_empty() {
            "not a complete safetensors file"
        } else {
            says
        };
        refused("a.safetensors", &raw(&header, &vec![0; data]), says);
    }
}

#[test]
fn a_large_file_of_nothing_is_refused_by_its_header() {
    let at = tempfile::tempdir().expect("a folder");
    let path = at.path().join("a.safetensors");
    // Sparse: it takes no space. Its header would have 2 GiB.
    let file = std::fs::File::create(&path).expect("it is made");
    file.set_len(1 << 33).expect("sparse");
    std::os::unix::fs::FileExt::write_all_at(&file, &(1u64 << 31).to_le_bytes(), 0)
        .expect("it is written");
    refused_at(&path, "more than the 100000000 of the format");
    file.set_len(1 << 39).expect("sparse");
    refused_at(&path, "that are read at most");
}

#[test]
fn truncated_at_every_length_is_an_error() {
    let whole = file(&[
        ("a", "F32", &[2], vec![0; 8]),
        ("b", "I64", &[1], vec![0; 8]),
    ]);
    let at = tempfile::tempdir().expect("a folder");
    let path = at.path().join("a.safetensors");
    for length in 0..whole.len() {
        std::fs::write(&path, &whole[..length]).expect("it is written");
        refused_at(&path, "not a complete safetensors file");
    }
    // Cut short after it was opened.
    std::fs::write(&path, &whole).expect("it is written");
    let weights = Weights::open(&path).expect("whole");
    let shorter = std::fs::OpenOptions::new()
        .write(true)
        .open(&path)
        .expect("it is mine");
    shorter.set_len(whole.len() as u64 - 3).expect("it is cut");
    assert!(weights.read("a").is_ok());
    let error = weights.read("b").expect_err("it is cut").to_string();
    assert!(error.contains("cannot read weights from"), "{error}");
}

#[test]
fn hostile_indices_are_refused() {
    let at = tempfile::tempdir().expect("a folder");
    let path = at.path().join("model.safetensors.index.json");
    let one = file(&[("a", "U8", &[1], vec![7])]);
    let two = file(&[("a", "U8", &[1], vec![8]), ("b", "U8", &[1], vec![9])]);
    for (name, bytes) in [("one.safetensors", &one), ("two.safetensors", &two)] {
        std::fs::write(at.path().join(name), bytes).expect("it is written");
    }
    let outside = at
        .path()
        .parent()
        .expect("a folder")
        .join("outside.safetensors");
    let absolute = outside.to_string_lossy().into_owned();
    let map = |entries: &str| format!(r#"{{"metadata":{{}},"weight_map":{{{entries}}}}}"#);
    for (text, says) in [
        ("".to_owned(), "not an index of shards"),
        ("{".to_owned(), "not an index of shards"),
        ("[1, 2]".to_owned(), "not an index of shards"),
        ("{}".to_owned(), "has no \"weight_map\""),
        (r#"{"weight_map": 3}"#.to_owned(), "not an index of shards"),
        (map(r#""a": 3"#), "the file of `a` is no text"),
        (
            map(r#""a": "../outside.safetensors""#),
            "not a file of the index's own folder",
        ),
        (map(r#""a": "..""#), "not a file of the index's own folder"),
        (
            map(r#""a": "sub/one.safetensors""#),
            "not a file of the index's own folder",
        ),
        (
            map(r#""a": "sub\\one.safetensors""#),
            "not a file of the index's own folder",
        ),
        (map(r#""a": """#), "not a file of the index's own folder"),
        (
            map(&format!(r#""a": "{absolute}""#)),
            "not a file of the index's own folder",
        ),
        (
            map(r#""a": "one.safetensors", "a": "two.safetensors""#),
            "`a` twice",
        ),
        (map(r#""a": "none.safetensors""#), "none.safetensors"),
        (map(r#""c": "one.safetensors""#), "`c` in one.safetensors"),
        (
            map(r#""b": "one.safetensors", "a": "two.safetensors""#),
            "it has the same tensors: `a`",
        ),
    ] {
        std::fs::write(&path, &text).expect("it is written");
        refused_at(&path, says);
        refused_at(at.path(), says);
    }
    let file = std::fs::File::create(&path).expect("it is made");
    file.set_len(1 << 40).expect("sparse");
    refused_at(&path, "it has 1099511627776 bytes");
}

#[test]
fn folders_without_weights_say_what_they_have() {
    let at = tempfile::tempdir().expect("a folder");
    refused_at(
        at.path(),
        "neither model.safetensors nor model.safetensors.index.json",
    );
    std::fs::write(at.path().join("pytorch_model.bin"), "").expect("it is written");
    refused_at(at.path(), "save them again as safetensors");
    let one = file(&[("a", "U8", &[1], vec![7])]);
    std::fs::write(at.path().join("x.safetensors"), &one).expect("it is written");
    assert!(Weights::open(at.path()).is_ok(), "the only one");
    std::fs::write(at.path().join("y.safetensors"), &one).expect("it is written");
    refused_at(at.path(), "has 2 files of weights");
    refused_at(&at.path().join("none"), "cannot read weights from");
}

/// Any flipped bit of a header or an index gives an error or files that can be read through.
#[test]
fn flipped_bits_give_errors_or_readable_files() {
    let at = tempfile::tempdir().expect("a folder");
    for name in [
        "model.safetensors.index.json",
        "model-00003-of-00003.safetensors",
    ] {
        for entry in std::fs::read_dir(folder("llama")).expect("recorded") {
            let entry = entry.expect("recorded");
            std::fs::copy(entry.path(), at.path().join(entry.file_name())).expect("room");
        }
        let path = at.path().join(name);
        let whole = std::fs::read(&path).expect("recorded");
        let head = whole.len().min(700);
        for bit in (0..head * 8).step_by(3) {
            let mut bytes = whole.clone();
            bytes[bit / 8] ^= 1 << (bit % 8);
            std::fs::write(&path, &bytes).expect("it is written");
            if let Ok(weights) = Weights::open(at.path()) {
                for (name, ..) in weights.names() {
                    assert!(weights.read(name).is_ok());
                }
            }
        }
    }
}
