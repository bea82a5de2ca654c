//! The memory that loading takes: that of the weights, and hardly more.

use std::fs;
use std::io::{BufWriter, Write};
use std::process::Command;

use super::*;

/// The environment variable that tells the process of its own to load this folder.
const FOLDER: &str = "WEIGHTS_TEST_FOLDER";

const ROWS: usize = 1024;
const COLUMNS: usize = 2048;
const TENSORS: usize = 16;

/// A number of kilobytes in the status of this process, in bytes.
fn status(field: &str) -> u64 {
    let status = fs::read_to_string("/proc/self/status").expect("Linux");
    let line = status.lines().find(|line| line.starts_with(field));
    let number = line
        .and_then(|line| line.split_whitespace().nth(1))
        .expect("a number");
    number.parse::<u64>().expect("a number") * 1024
}

/// 128 MiB of weights: as they are, turned around, cast from bf16, and decoded from Q8_0; and the
/// numbers of Q8_0 as quantized weights.
#[test]
#[cfg(target_os = "linux")]
fn loading_takes_the_memory_of_the_weights() {
    if let Some(path) = std::env::var_os(FOLDER) {
        return measure(Path::new(&path));
    }
    let at = tempfile::tempdir().expect("a folder");
    for (name, dtype, bytes) in [
        ("whole", "F32", 4),
        ("turned", "F32", 4),
        ("cast", "BF16", 2),
        ("decoded", "Q8_0", 0),
        ("quantized", "Q8_0", 0),
    ] {
        let folder = at.path().join(name);
        fs::create_dir(&folder).expect("it is made");
        match dtype {
            "Q8_0" => write_gguf(&folder.join("model.gguf")),
            _ => write(&folder.join("model.safetensors"), dtype, bytes),
        }
        // A process of its own, because the most memory that one had in use counts all its tests.
        let output = Command::new(std::env::current_exe().expect("this program"))
            .args([
                "memory::loading_takes_the_memory_of_the_weights",
                "--exact",
                "--nocapture",
            ])
            .env(FOLDER, &folder)
            .output()
            .expect("it starts");
        let said = String::from_utf8_lossy(&output.stdout);
        assert!(
            output.status.success() && said.contains("of the weights"),
            "{name}: {said}{}",
            String::from_utf8_lossy(&output.stderr)
        );
        print!("{name}: {said}");
    }
}

/// Saving 128 MiB of weights takes hardly more memory: they are written from where they are.
#[test]
#[cfg(target_os = "linux")]
fn saving_takes_no_second_copy() {
    if let Some(path) = std::env::var_os(FOLDER) {
        let shapes: Vec<(String, Vec<usize>)> = (0..TENSORS)
            .map(|i| (format!("w.{i}"), vec![ROWS, COLUMNS]))
            .collect();
        let mut session = session(&declare(&shapes));
        let trace = Trace::inference();
        let y = trace.input("x", F32, ()).relu();
        session.compile(&trace, [y]).expect("it compiles");
        let (before, most) = (status("VmRSS"), status("VmHWM"));
        let weights = (TENSORS * ROWS * COLUMNS * 4) as u64;
        assert!(before >= weights, "{before} of {weights} bytes");
        session
            .save(Path::new(&path).join("saved.safetensors"))
            .expect("room");
        let taken = status("VmHWM").saturating_sub(most.max(before));
        assert!(taken <= 4 << 20, "{taken} bytes for {weights}");
        return;
    }
    let at = tempfile::tempdir().expect("a folder");
    let output = Command::new(std::env::current_exe().expect("this program"))
        .args(["memory::saving_takes_no_second_copy", "--exact"])
        .env(FOLDER, at.path())
        .output()
        .expect("it starts");
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{said}");
    let saved = fs::metadata(at.path().join("saved.safetensors")).expect("a file");
    assert!(saved.len() > (TENSORS * ROWS * COLUMNS * 4) as u64);
}

/// A file of matrices of zeros and ones.
fn write(path: &Path, dtype: &str, bytes: usize) {
    let size = ROWS * COLUMNS * bytes;
    let tensors: Vec<String> = (0..TENSORS)
        .map(|i| {
            format!(
                "\"w.{i}\":{{\"dtype\":\"{dtype}\",\"shape\":[{ROWS},{COLUMNS}],\"data_offsets\":[{},{}]}}",
                i * size,
                (i + 1) * size
            )
        })
        .collect();
    let header = format!("{{{}}}", tensors.join(","));
    let mut file = BufWriter::new(fs::File::create(path).expect("it is made"));
    file.write_all(&(header.len() as u64).to_le_bytes())
        .expect("room");
    file.write_all(header.as_bytes()).expect("room");
    let one: &[u8] = if bytes == 4 {
        &[0, 0, 0x80, 0x3f]
    } else {
        &[0x80, 0x3f]
    };
    let row: Vec<u8> = one.repeat(COLUMNS);
    for _ in 0..TENSORS * ROWS {
        file.write_all(&row).expect("room");
    }
    file.flush().expect("room");
}

/// A GGUF file of matrices of ones.
fn write_gguf(path: &Path) {
    let shape = [COLUMNS as u64, ROWS as u64];
    let row: Vec<u8> = [&[0, 0x3c][..], &[1; 32]].concat().repeat(COLUMNS / 32);
    let names: Vec<String> = (0..TENSORS).map(|i| format!("w.{i}")).collect();
    let tensors = names.iter().zip(0..).map(|(name, i)| {
        let offset = i * (ROWS * row.len()) as u64;
        (&**name, &shape[..], 8, offset)
    });
    let header = gguf::file(3, &[], &tensors.collect::<Vec<_>>(), &[]);
    let mut file = BufWriter::new(fs::File::create(path).expect("it is made"));
    file.write_all(&header).expect("room");
    for _ in 0..TENSORS * ROWS {
        file.write_all(&row).expect("room");
    }
    file.flush().expect("room");
}

fn measure(folder: &Path) {
    if folder.ends_with("quantized") {
        return measure_quantized(folder);
    }
    let turned = folder.ends_with("turned");
    let shape = if turned {
        vec![COLUMNS, ROWS]
    } else {
        vec![ROWS, COLUMNS]
    };
    let shapes: Vec<(String, Vec<usize>)> = (0..TENSORS)
        .map(|i| (format!("w.{i}"), shape.clone()))
        .collect();
    let rules = if turned {
        Rules::new().transpose("w.{i}")
    } else {
        Rules::new()
    };
    let mut session = session(&declare(&shapes));
    let before = status("VmRSS");
    let loaded = load(&mut session, folder, &rules).expect("it fits");
    assert_eq!(loaded, TENSORS);
    let taken = status("VmHWM").saturating_sub(before);
    let weights = (TENSORS * ROWS * COLUMNS * 4) as u64;
    assert!(value(&session, "w.3").iter().all(|&x| x == 1.0));
    assert!(
        taken >= weights,
        "{taken} of {weights} bytes: it was not measured"
    );
    assert!(
        taken <= weights / 10 * 11,
        "{taken} bytes at most in use for {weights} bytes of weights"
    );
    println!("{:.3} of the weights", taken as f64 / weights as f64);
}

/// Numbers of eight bits, and for each block of 32 a scale of four bytes and a zero point.
fn measure_quantized(folder: &Path) {
    let params = Params::seeded(1);
    let format = slabwise::Quantization { bits: 8, block: 32 };
    let root = params.root().quantized(format);
    for i in 0..TENSORS {
        (&root / "w").param(&i.to_string(), [ROWS, COLUMNS], Init::Constant(0.5));
    }
    let mut session = session(&params);
    let before = status("VmRSS");
    let loaded = load(&mut session, folder, &Rules::new()).expect("it fits");
    assert_eq!(loaded, TENSORS);
    let taken = status("VmHWM").saturating_sub(before);
    let one = (ROWS * COLUMNS * (32 + 4 + 1) / 32) as u64;
    let weights = TENSORS as u64 * one;
    assert!(value(&session, "w.3.numbers").iter().all(|&x| x == 129.0));
    assert!(
        taken >= weights,
        "{taken} of {weights} bytes: it was not measured"
    );
    // One of them is in memory beside its place, and a window of the file.
    assert!(
        taken <= weights + one + (4 << 20),
        "{taken} bytes at most in use for {weights} bytes of weights"
    );
    println!("{:.3} of the weights", taken as f64 / weights as f64);
}
