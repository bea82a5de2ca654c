//! ONNX files of open lengths: planned for a bound, run, and compared with recorded results.

use std::fs;
use std::path::{Path, PathBuf};

use ndarray::ArrayD;
use slabwise::data::{HostArray, npy};
use tempfile::TempDir;

use crate::{failure, json, text};

/// A field of a protobuf message: of bytes, or of a number.
fn bytes(number: u8, content: &[u8]) -> Vec<u8> {
    let length = u8::try_from(content.len()).expect("a short field");
    assert!(length < 128, "a length of one byte");
    [&[number << 3 | 2, length], content].concat()
}

fn varint(number: u8, value: u8) -> Vec<u8> {
    assert!(value < 128, "a number of one byte");
    vec![number << 3, value]
}

/// The declaration of an f32 tensor `[N, 3]`.
fn declaration(name: &str) -> Vec<u8> {
    let lengths = [bytes(1, &bytes(2, b"N")), bytes(1, &varint(1, 3))];
    let tensor = [varint(1, 1), bytes(2, &lengths.concat())].concat();
    [bytes(1, name.as_bytes()), bytes(2, &bytes(1, &tensor))].concat()
}

/// The array `[rows, 3]` of these numbers.
fn array(name: &str, rows: u8, values: impl Iterator<Item = f32>) -> Vec<u8> {
    let raw: Vec<u8> = values.flat_map(f32::to_le_bytes).collect();
    let fields = [
        varint(1, rows),
        varint(1, 3),
        varint(2, 1),
        bytes(8, name.as_bytes()),
        bytes(9, &raw),
    ];
    fields.concat()
}

/// The model y = x + x of `[N, 3]`, and inputs and results of 5 rows.
struct Files {
    folder: TempDir,
}

impl Files {
    fn new() -> Files {
        let folder = tempfile::tempdir().expect("a folder");
        let node = [
            bytes(1, b"x"),
            bytes(1, b"x"),
            bytes(2, b"y"),
            bytes(4, b"Add"),
        ];
        let graph = [
            bytes(1, &node.concat()),
            bytes(2, b"doubled"),
            bytes(11, &declaration("x")),
            bytes(12, &declaration("y")),
        ];
        let model = [
            varint(1, 8),
            bytes(7, &graph.concat()),
            bytes(8, &varint(2, 17)),
        ];
        fs::write(folder.path().join("model.onnx"), model.concat()).expect("written");
        let files = Files { folder };
        files.set("good", |x| 2.0 * x);
        files.set("bad", |x| if x == 7.0 { 14.5 } else { 2.0 * x });
        files
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn set(&self, name: &str, result: impl Fn(f32) -> f32) {
        let folder = self.path(name);
        fs::create_dir(&folder).expect("made");
        let numbers = || (0..15u8).map(f32::from);
        let write = |file: &str, content: Vec<u8>| {
            fs::write(folder.join(file), content).expect("written");
        };
        write("input_0.pb", array("x", 5, numbers()));
        write("output_0.pb", array("y", 5, numbers().map(result)));
    }

    /// A command about the model.
    fn command(&self, verb: &str, rest: &str) -> String {
        format!("{verb} {} {rest}", self.path("model.onnx").display())
    }

    fn check(&self, set: &str, dims: &str) -> String {
        let set = format!("--check {} {dims}", self.path(set).display());
        self.command("run", &set)
    }
}

fn contains(text: &str, parts: &[&str]) {
    for part in parts {
        assert!(text.contains(part), "{part} is not in: {text}");
    }
}

#[test]
fn open_lengths_are_planned_for_a_bound() {
    let files = Files::new();
    let open = failure(&files.command("plan", ""), 1);
    contains(&open, &["N", "--dim N=1"]);
    let planned = |dims: &str| {
        let plan = json(&files.command("plan", dims));
        plan["slab_bytes"].as_u64().expect("a number")
    };
    assert_eq!(planned("--dim N=..100"), planned("--dim N=100"));
    assert!(planned("--dim N=..100") > planned("--dim N=..10"));
    let other = failure(&files.command("plan", "--dim M=..8"), 1);
    contains(&other, &["M=..8", "no dimension of that name", "N"]);
    failure(&files.command("plan", "--dim N"), 2);
    let empty = failure(&files.command("plan", "--dim N=..0"), 2);
    contains(
        &empty,
        &["`N=..0`", "the largest length is 0; it must be 1 or more"],
    );
    let twice = failure(&files.command("plan", "--dim N=2 --dim N=3"), 1);
    contains(&twice, &["--dim N: the dimension is given twice"]);
}

#[test]
fn recorded_results_are_compared_at_their_lengths() {
    let files = Files::new();
    for dims in ["", "--dim N=5", "--dim N=..5", "--dim N=..8"] {
        contains(&text(&files.check("good", dims)), &["all outputs match"]);
    }
    let differs = crate::slabwise(&files.check("bad", "--dim N=..8"));
    assert_eq!(differs.status.code(), Some(1));
    let said = [differs.stdout, differs.stderr].concat();
    contains(&String::from_utf8_lossy(&said), &["y", "14.5", "14"]);
    let longer = failure(&files.check("good", "--dim N=..3"), 1);
    contains(&longer, &["[5, 3]", "bound 3"]);
    let fixed = failure(&files.check("good", "--dim N=4"), 1);
    contains(&fixed, &["[5, 3]", "[4, 3]"]);
}

#[test]
fn outputs_are_written_as_arrays() {
    let files = Files::new();
    let out = files.path("out");
    let options = format!("--dim N=..6 --random-inputs 1 -o {}", out.display());
    let report = json(&files.command("run", &options));
    assert_eq!(report["outputs"][0]["shape"], serde_json::json!([6, 3]));
    assert_eq!(report["peak_bytes"], report["slab_bytes"]);
    let array = fs::read(Path::new(&out).join("y.npy")).expect("written");
    assert!(array.starts_with(b"\x93NUMPY") && array.len() >= 6 * 3 * 4);
}

/// Several runs give the same outputs as one.
#[test]
fn a_model_is_run_as_often_as_asked() {
    let files = Files::new();
    let of = |runs: u32| {
        let out = files.path(&format!("out{runs}"));
        let options = format!(
            "--dim N=6 --random-inputs 1 --runs {runs} -o {}",
            out.display()
        );
        let report = json(&files.command("run", &options));
        assert_eq!(report["runs"], runs);
        assert!(report["run_s"].as_f64().is_some_and(|s| s > 0.0));
        fs::read(Path::new(&out).join("y.npy")).expect("written")
    };
    assert_eq!(of(1), of(4));
    let none = failure(
        &files.command("run", "--dim N=6 --random-inputs 1 --runs 0"),
        2,
    );
    contains(&none, &["--runs"]);
}

#[test]
fn arrays_that_do_not_fit_are_refused() {
    let files = Files::new();
    let save = |name: &str, rows: usize, columns: &[usize]| {
        let shape: Vec<usize> = [&[rows], columns].concat();
        let array = HostArray::from(ArrayD::<f32>::zeros(shape));
        let path = files.path(name);
        fs::write(&path, npy::to_bytes(&array)).expect("written");
        path
    };
    let (flat, wide) = (save("flat.npy", 6, &[]), save("wide.npy", 5, &[4]));
    let (five, integers) = (save("five.npy", 5, &[3]), files.path("integers.npy"));
    let array = HostArray::from(ArrayD::<i32>::zeros(vec![5, 3]));
    fs::write(&integers, npy::to_bytes(&array)).expect("written");
    let run = |path: &Path, rest: &str| {
        files.command("run", &format!("--input x={} {rest}", path.display()))
    };
    text(&run(&five, ""));
    text(&run(&five, "--dim N=..5"));
    for (path, rest, parts) in [
        (&flat, "", ["has the shape [6]", "expects [N, 3]"]),
        (&wide, "", ["has the shape [5, 4]", "expects [N, 3]"]),
        (
            &five,
            "--dim N=4",
            ["has the shape [5, 3]", "expects [4, 3]"],
        ),
        (
            &five,
            "--dim N=..4",
            ["has the shape [5, 3]", "expects [..4, 3]"],
        ),
        (&integers, "", ["holds i32", "expects float"]),
    ] {
        contains(&failure(&run(path, rest), 2), &parts);
    }
    let twice = run(&five, &format!("--input x={}", five.display()));
    contains(&failure(&twice, 2), &["x is given twice"]);
    let none = failure(&files.command("run", "--dim N=2"), 2);
    contains(&none, &["\"x\" has no values", "--random-inputs"]);
}

#[test]
fn files_that_are_no_models_or_results_are_named() {
    let files = Files::new();
    let missing = failure(&files.check("missing", ""), 2);
    contains(&missing, &["missing", "No such file"]);
    fs::create_dir(files.path("empty")).expect("made");
    let empty = failure(&files.check("empty", ""), 2);
    contains(&empty, &["empty", "no output_0.pb"]);
    for tolerance in ["--rtol nan", "--atol -1", "--rtol x"] {
        contains(
            &failure(&files.check("good", tolerance), 2),
            &["not a number from 0 on"],
        );
    }
    for (name, reason) in [
        ("model.bin", "does not end in .onnx"),
        ("none.bin", "unknown model"),
    ] {
        if name == "model.bin" {
            fs::copy(files.path("model.onnx"), files.path(name)).expect("copied");
        }
        let plan = format!("plan {}", files.path(name).display());
        contains(&failure(&plan, 2), &[reason]);
    }
    fs::copy(files.path("model.onnx"), files.path("MODEL.ONNX")).expect("copied");
    text(&format!(
        "plan {} --dim N=2",
        files.path("MODEL.ONNX").display()
    ));
}

/// A run for which there is no memory is an error.
#[cfg(target_os = "linux")]
#[test]
fn lengths_beyond_the_memory_are_refused() {
    let files = Files::new();
    for rows in [50_000_000u32, u32::MAX] {
        let run = files.command("run", &format!("--dim N={rows} --random-inputs 1"));
        let output = std::process::Command::new("sh")
            .args(["-c", "ulimit -v 2000000; exec \"$@\"", "sh"])
            .arg(env!("CARGO_BIN_EXE_slabwise"))
            .args(run.split_whitespace())
            .env("SLABWISE_LIBCUDA", "no driver")
            .output()
            .expect("it starts");
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{rows}: {said}");
        assert!(said.starts_with("error: "), "{rows}: {said}");
    }
}
