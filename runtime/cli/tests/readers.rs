//! Foreign files: every reader takes its corpus and anything near it without panic, in time and
//! memory that are a small multiple of the file, and gives a reason for each file that it refuses.
//!
//! The corpus is `fuzz/seeds/NAME`, which the fuzz targets of the same names begin with
//! (`fuzz/Cargo.toml`); of packing problems it is `planner/packer/fuzz`'s, of graphs
//! `planner/fuzz`'s. Findings of fuzzing are added to it.

#[path = "../../../tests/support/allocator.rs"]
mod allocator;
#[path = "../../../tests/support/readers.rs"]
mod readers;

use std::path::{Path, PathBuf};

use arbtest::arbitrary::{Result, Unstructured};
use readers::{READERS, Reader};

/// The files of a corpus, by name. Those whose names begin with `bad` must be refused, the others
/// accepted.
fn corpus(name: &str) -> Vec<(PathBuf, Vec<u8>)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let folder = match name {
        "csv" => root.join("planner/packer/fuzz/seeds"),
        "graph" => root.join("planner/fuzz/graphs"),
        _ => root.join("fuzz/seeds").join(name),
    };
    let files = std::fs::read_dir(&folder).unwrap_or_else(|e| panic!("{}: {e}", folder.display()));
    let mut files: Vec<PathBuf> = files.map(|entry| entry.expect("an entry").path()).collect();
    files.sort();
    assert!(
        files.len() >= 2,
        "{name}: one that is right, one that is wrong"
    );
    files
        .into_iter()
        .map(|path| (path.clone(), std::fs::read(&path).expect("a file")))
        .collect()
}

/// Reads, and checks the time and memory used.
fn read(reader: &Reader, bytes: &[u8]) -> std::result::Result<(), String> {
    let mut result = Ok(());
    let took = allocator::peak_bytes(|| result = (reader.read)(bytes));
    let most = reader.fixed_bytes + reader.bytes_per_byte * bytes.len() as u64;
    assert!(
        took <= most,
        "{}: {took} bytes of memory for a file of {}",
        reader.name,
        bytes.len()
    );
    if let Err(why) = &result {
        assert!(
            !why.trim().is_empty() && why.len() < 4096,
            "{}: {why}",
            reader.name
        );
    }
    result
}

/// A file with some damage: bytes changed, lost, added, doubled, cut off, exchanged with another
/// file's.
fn damaged(u: &mut Unstructured<'_>, file: &[u8], other: &[u8]) -> Result<Vec<u8>> {
    let mut bytes = file.to_vec();
    for _ in 0..u.int_in_range(1..=4)? {
        let at = u.int_in_range(0..=bytes.len())?;
        let length = u.int_in_range(0..=16)?.min(bytes.len() - at);
        match u.int_in_range(0..=6)? {
            0 => bytes[at..at + length]
                .iter_mut()
                .try_for_each(|byte| u.arbitrary().map(|b| *byte = b))?,
            1 => drop(bytes.drain(at..at + length)),
            2 => bytes.insert(at, u.arbitrary()?),
            3 => {
                let part = bytes[at..at + length].to_vec();
                bytes.splice(at..at, part);
            }
            4 => bytes.truncate(at),
            5 => {
                // Numbers at the edges of their types.
                let text = *u.choose(&[
                    "0",
                    "-1",
                    "18446744073709551615",
                    "18446744073709551616",
                    "1e999",
                    "4294967296",
                    "0x",
                    "\"",
                    "[",
                    "{",
                ])?;
                bytes.splice(at..at + length, text.bytes());
            }
            _ => {
                let from = u.int_in_range(0..=other.len())?;
                bytes.splice(at..at + length, other[from..].iter().copied().take(16));
            }
        }
    }
    Ok(bytes)
}

/// One test, because memory is counted for the whole process.
#[test]
fn foreign_files_are_read_or_refused() {
    for reader in READERS {
        let files = corpus(reader.name);
        for (path, bytes) in &files {
            let name = path
                .file_name()
                .map(|n| n.to_string_lossy().into_owned())
                .unwrap_or_default();
            let accepted = read(reader, bytes);
            let bad = name.starts_with("bad");
            // The planner's own tests check its seeds, each for its kind.
            assert!(
                reader.name == "csv" || accepted.is_err() == bad,
                "{}: {accepted:?}",
                path.display()
            );
        }
        assert!(
            read(reader, b"").is_err() || reader.name == "csv",
            "{}: nothing",
            reader.name
        );
        arbtest::arbtest(|u| {
            let (file, other) = (u.choose(&files)?.1.clone(), u.choose(&files)?.1.clone());
            let _ = read(reader, &damaged(u, &file, &other)?);
            Ok(())
        })
        .budget_ms(250);
    }
}
