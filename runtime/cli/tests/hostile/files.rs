//! A hundred damaged files of each kind.

#[path = "../../../../examples/char_gpt/text.rs"]
#[allow(dead_code, reason = "of a text only its reader is called")]
mod text;

use std::fs;
use std::path::{Path, PathBuf};

use slabwise::data::{Cifar10, Mnist};
use slabwise_cuda::cache::entry;
use text::Text;

use super::damage::{self, FILES, gzip};
use super::readers::{self, small_session};
use super::{faults, refused, slabwise};

/// A file of the corpora that the readers are fuzzed from.
fn seed(path: &str) -> Vec<u8> {
    fs::read(
        Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("../..")
            .join(path),
    )
    .unwrap_or_else(|e| panic!("{path}: {e}"))
}

/// Runs a command on a hundred damaged files: each is refused by name, or read as a sound value.
fn read_by_command(
    name: &str,
    reader: &str,
    whole: &[u8],
    damaged: fn(&[u8], u64) -> Vec<u8>,
    arguments: &[&str],
) {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join(name);
    let (mut accepted, mut codes) = (0, [0; 3]);
    for n in 0..FILES {
        let bytes = damaged(whole, n);
        fs::write(&path, &bytes).expect("it is written");
        let mut command = slabwise();
        command.args(arguments.iter().map(|argument| {
            if *argument == "FILE" {
                path.as_os_str()
            } else {
                argument.as_ref()
            }
        }));
        let (code, message) = refused(command, name);
        codes[code as usize] += 1;
        if code < 2 {
            assert!(code == 1 || message.is_empty(), "{name} {n}: {message}");
            let unpacked =
                slabwise_planner::csv::read_packed(&path, 1 << 26).expect("a command has read it");
            // It panics if an accepted file is unsound.
            readers::read(reader, &unpacked)
                .unwrap_or_else(|why| panic!("{name} {n} was accepted: {why}"));
            accepted += 1;
        }
    }
    // The damage is chosen so that most files are refused, and some are not.
    assert!(
        accepted < FILES * 3 / 4 && codes[2] > FILES / 4,
        "{name}: {accepted} accepted, {codes:?}"
    );
    fs::write(
        &path,
        if name.ends_with(".gz") {
            gzip(whole)
        } else {
            whole.into()
        },
    )
    .expect("it is written");
    let mut command = slabwise();
    command.args(arguments.iter().map(|argument| {
        if *argument == "FILE" {
            path.as_os_str()
        } else {
            argument.as_ref()
        }
    }));
    let (code, message) = refused(command, name);
    assert_eq!(code, 0, "{name} as it was: {message}");
}

#[test]
fn packing_problems() {
    let arguments = ["pack", "FILE", "--time-limit", "0.02"];
    let whole = seed("planner/packer/fuzz/seeds/rules.csv");
    read_by_command("table.csv", "csv", &whole, damage::text, &arguments);
    read_by_command("table.csv.gz", "csv", &whole, damage::packed, &arguments);
}

#[test]
fn names_that_fill_a_file() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("table.csv");
    let table = format!(
        "id,lower,upper,size,space\na,0,2,6,{}\nb,1,3,6,\x1b[31m\n",
        "x".repeat(300_000)
    );
    fs::write(&path, table).expect("it is written");
    let mut command = slabwise();
    command.arg("pack").arg(&path);
    let output = super::ended(command);
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let shown = String::from_utf8(output.stdout).expect("text");
    assert!(
        shown.len() < 2_000 && !shown.chars().any(|c| c.is_control() && c != '\n'),
        "{shown}"
    );
}

#[test]
fn graphs() {
    let whole = seed("planner/fuzz/graphs/chain.json");
    read_by_command(
        "graph.json",
        "graph",
        &whole,
        damage::text,
        &["order", "FILE"],
    );
    let arguments = ["remat", "FILE", "--budget", "100%", "--time-limit", "0.02"];
    read_by_command("graph.json.gz", "graph", &whole, damage::packed, &arguments);
}

#[test]
fn plans() {
    let whole = seed("fuzz/seeds/plan/plan.json");
    let folder = tempfile::tempdir().expect("a folder");
    let sound = folder.path().join("sound.json");
    fs::write(&sound, &whole).expect("it is written");
    let sound = sound.to_str().expect("a path of text");
    read_by_command(
        "other.json",
        "plan",
        &whole,
        damage::text,
        &["diff", sound, "FILE"],
    );
    read_by_command(
        "other.json.gz",
        "plan",
        &whole,
        damage::packed,
        &["diff", "FILE", sound],
    );
}

#[test]
fn traces() {
    let all = [
        ("lifetimes.csv", "lifetimes.csv"),
        ("rmm.csv", "rmm.csv"),
        ("snapshot.json", "snapshot.json"),
    ];
    for (name, file) in all {
        read_by_command(
            name,
            "trace",
            &seed(&format!("fuzz/seeds/trace/{file}")),
            damage::text,
            &["replay", "FILE"],
        );
    }
    read_by_command(
        "snapshot.pickle",
        "trace",
        &seed("fuzz/seeds/trace/snapshot.4.pickle"),
        damage::binary,
        &["replay", "FILE", "--all"],
    );
}

/// Checks the errors for a hundred damaged files that programs read through the library.
fn read_by_library(
    file: &Path,
    whole: &[u8],
    damaged: fn(&[u8], u64) -> Vec<u8>,
    mut read: impl FnMut() -> Result<(), String>,
) {
    let name = file
        .file_name()
        .expect("a file")
        .to_str()
        .expect("a name of text");
    let mut accepted = 0;
    for n in 0..FILES {
        fs::write(file, damaged(whole, n)).expect("it is written");
        match read() {
            Ok(()) => accepted += 1,
            Err(message) => {
                let faults = faults(&message, name);
                assert!(
                    faults.is_empty(),
                    "{name} {n}: the message {}:\n{message}",
                    faults.join(", ")
                );
            }
        }
    }
    assert!(accepted < FILES * 3 / 4, "{name}: {accepted} accepted");
    fs::write(file, whole).expect("it is written");
    read().unwrap_or_else(|why| panic!("{name} as it was: {why}"));
}

#[test]
fn images() {
    let idx = |dims: &[u32], data: &[u8]| -> Vec<u8> {
        [
            vec![0, 0, 8, dims.len() as u8],
            dims.iter().flat_map(|dim| dim.to_be_bytes()).collect(),
            data.to_vec(),
        ]
        .concat()
    };
    let folder = tempfile::tempdir().expect("a folder");
    let at = |name: &str| folder.path().join(name);
    let pixels: Vec<u8> = (0..=255).cycle().take(40 * 12).collect();
    let files = [
        ("train-images-idx3-ubyte", idx(&[40, 4, 3], &pixels)),
        (
            "train-labels-idx1-ubyte",
            idx(
                &[40],
                &pixels[..40].iter().map(|p| p % 10).collect::<Vec<u8>>(),
            ),
        ),
        ("t10k-images-idx3-ubyte", idx(&[2, 4, 3], &pixels[..24])),
        ("t10k-labels-idx1-ubyte", idx(&[2], &[9, 0])),
    ];
    files
        .iter()
        .for_each(|(name, bytes)| fs::write(at(name), bytes).expect("it is written"));
    let read = || {
        Mnist::load(folder.path())
            .map(drop)
            .map_err(|e| e.to_string())
    };
    // Any pixel is valid, so that damage is mostly to the header.
    let head = |bytes: &[u8], n: u64| {
        let (head, rest) = bytes.split_at(16.min(bytes.len()));
        if n.is_multiple_of(3) {
            damage::binary(bytes, n)
        } else {
            [damage::binary(head, n), rest.to_vec()].concat()
        }
    };
    let labels = |bytes: &[u8], n: u64| {
        if n.is_multiple_of(2) {
            gzip(&damage::binary(bytes, n))
        } else {
            damage::binary(&gzip(bytes), n)
        }
    };
    read_by_library(&at(files[0].0), &files[0].1, head, read);
    read_by_library(&at(files[1].0), &files[1].1, labels, read);

    let record = |i: u8| [vec![i % 10], (0..3072).map(|p| (p % 251) as u8).collect()].concat();
    let whole: Vec<u8> = (0..3).flat_map(record).collect();
    let names = [
        "data_batch_1",
        "data_batch_2",
        "data_batch_3",
        "data_batch_4",
        "data_batch_5",
        "test_batch",
    ];
    names
        .iter()
        .for_each(|name| fs::write(at(&format!("{name}.bin")), &whole).expect("it is written"));
    let read = || {
        Cifar10::load(folder.path())
            .map(drop)
            .map_err(|e| e.to_string())
    };
    read_by_library(&at("data_batch_4.bin"), &whole, damage::binary, read);
}

#[test]
fn texts() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("letters.txt.gz");
    let whole = gzip(
        "Ein Text, der für ein paar Fenster reicht.\n"
            .repeat(20)
            .as_bytes(),
    );
    read_by_library(&path, &whole, damage::binary, || {
        Text::read(Some(&path), 8)
            .map(drop)
            .map_err(|e| e.to_string())
    });
}

#[test]
fn checkpoints() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("last.safetensors");
    let mut session = small_session();
    let names: Vec<String> = session.names().map(String::from).collect();
    session.save(&path).expect("it is saved");
    let whole = fs::read(&path).expect("it is there");
    let read = |session: &mut slabwise::Session| {
        let bits = |session: &slabwise::Session| -> Vec<Vec<u32>> {
            names
                .iter()
                .map(|name| {
                    session
                        .value(name)
                        .expect("it is there")
                        .iter()
                        .map(|x| x.to_bits())
                        .collect()
                })
                .collect()
        };
        let before = bits(session);
        let result = session.load(&path).map_err(|e| e.to_string());
        // With checksums only the saved values are ever loaded.
        assert_eq!(bits(session), before);
        result
    };
    // The header is text behind its length.
    let header = |bytes: &[u8], n: u64| {
        let end = 8 + u64::from_le_bytes(*bytes.first_chunk().expect("a length")) as usize;
        let header = damage::text(&bytes[8..end], n);
        [
            &(header.len() as u64).to_le_bytes(),
            &header[..],
            &bytes[end..],
        ]
        .concat()
    };
    read_by_library(&path, &whole, header, || read(&mut session));
    read_by_library(&path, &whole, damage::binary, || read(&mut session));
    // A file of another program, without checksums.
    let plain = seed("fuzz/seeds/checkpoint/adam.safetensors");
    let mut session = small_session();
    read_by_library(&path, &plain, header, || {
        session.load(&path).map_err(|e| e.to_string())
    });
}

#[test]
fn compiled_kernels() {
    let folder = tempfile::tempdir().expect("a folder");
    let path: PathBuf = folder.path().join("kernel.cubin");
    let (whole, key) = (seed("fuzz/seeds/cubin/two"), "5eed".repeat(16));
    // The lookup of an entry adds the name of its file to the error.
    let read = || {
        entry::read(&path, &key, entry::BYTES_MAX)
            .map(drop)
            .map_err(|e| format!("kernel.cubin: {e}"))
    };
    read_by_library(&path, &whole, damage::binary, read);
    // Damage behind a valid checksum.
    let sealed = |bytes: &[u8], n: u64| {
        entry::seal(
            &damage::binary(&bytes[entry::HEAD_BYTES..], n),
            &"5eed".repeat(16),
        )
    };
    for n in 0..FILES {
        fs::write(&path, sealed(&whole, n)).expect("it is written");
        let said = read()
            .err()
            .unwrap_or_else(|| "kernel.cubin: harmless".into());
        assert!(faults(&said, "kernel.cubin").is_empty(), "{n}: {said}");
    }
}
