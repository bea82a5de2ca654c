//! The test cases of the `onnx` package against the importer: each one gives the recorded results,
//! or is refused for the reason that `cases.txt` lists. A case leaves `pass` only by an edit of
//! that list; `UPDATE_EXPECT=1` rewrites it. `cases.py` makes the files; without Python or the
//! package the test says so and is skipped, except where `CI` is set.
//!
//! `contributed.rs` has models with operators of onnxruntime's domain, `own.rs` models with functions
//! and data files, `open.rs` models with open lengths, `real.rs` models of published wheels,
//! `gradients.rs` models that PyTorch exported, `classify.rs` the example of classification.

mod classify;
mod contributed;
mod gradients;
mod open;
mod own;
mod real;

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, OnceLock};
use std::{env, fs, thread};

use slabwise::optim::Adam;
use slabwise::prelude::*;
use slabwise_onnx::check::{CheckOptions, Verdict, check_case, read_array};
use slabwise_onnx::{Error, OnnxModel};

/// The folder of the cases, which are made if they are missing; `None` where they cannot be.
fn cases() -> Option<PathBuf> {
    static MADE: OnceLock<Option<PathBuf>> = OnceLock::new();
    MADE.get_or_init(|| made("cases.py", "onnx-cases", "onnx 1.23.2 and numpy"))
        .clone()
}

/// The folder of this name that a script makes in the target folder, with Python and these
/// packages; `None` where it cannot.
fn made(script: &str, name: &str, packages: &str) -> Option<PathBuf> {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let target = match env::var_os("CARGO_TARGET_DIR") {
        Some(folder) => PathBuf::from(folder),
        None => here.join("../../target"),
    };
    let folder = target.join(name);
    // Only one test at a time makes the folder, which the script replaces where it is of an older
    // version; the others then find it done.
    fs::create_dir_all(&target).expect("the target folder can be made");
    let lock = fs::File::create(target.join(format!("{name}.lock"))).expect("it can be made");
    lock.lock().expect("it can be locked");
    let python = env::var("SLABWISE_PYTHON").unwrap_or_else(|_| "python3".into());
    let made = Command::new(&python)
        .arg(here.join(script))
        .arg(&folder)
        .output();
    let reason = match made {
        Ok(output) if output.status.success() => return Some(folder),
        Ok(output) => String::from_utf8_lossy(&output.stderr).into_owned(),
        Err(error) => error.to_string(),
    };
    assert!(
        env::var_os("CI").is_none(),
        "{python} cannot run {script}: {reason}"
    );
    eprintln!("skipped: {script} needs {python} with {packages}: {reason}");
    None
}

/// The folders that have a model, by name.
fn all(root: &Path) -> Vec<(String, PathBuf)> {
    let mut found = Vec::new();
    for kind in [
        "node",
        "pytorch-converted",
        "pytorch-operator",
        "simple",
        "light",
    ] {
        let entries = fs::read_dir(root.join(kind)).expect("the folder was made");
        for entry in entries {
            let path = entry.expect("it can be listed").path();
            if path.join("model.onnx").exists() {
                let name = path.file_name().expect("it has a name").to_string_lossy();
                found.push((format!("{kind}/{name}"), path));
            }
        }
    }
    found.sort();
    found
}

/// Calls a function with each case and its number, on all cores.
fn side_by_side<T: Sync>(cases: &[T], of: impl Fn(usize, &T) + Sync) {
    let next = AtomicUsize::new(0);
    let threads = thread::available_parallelism().map_or(1, Into::into);
    thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                loop {
                    let at = next.fetch_add(1, Ordering::Relaxed);
                    let Some(case) = cases.get(at) else { break };
                    of(at, case);
                }
            });
        }
    });
}

/// Cases whose recorded results are sums of bf16 that were rounded at each addition. Ours are
/// rounded once, and differ by two units in the last place.
const ROUNDED: [&str; 3] = [
    "test_attention_4d_causal_bf16_expanded",
    "test_attention_4d_causal_padded_kv_bf16_expanded",
    "test_attention_4d_padded_kv_bf16_expanded",
];

/// One line about a case.
fn verdict(folder: &Path) -> String {
    let unit = 2f64.powi(-7);
    let is_rounded = ROUNDED.iter().any(|name| folder.ends_with(name));
    let options = CheckOptions {
        narrow: true,
        rtol: if is_rounded { unit } else { 1e-3 },
        ..CheckOptions::default()
    };
    let mut sets: Vec<PathBuf> = fs::read_dir(folder)
        .expect("the folder was listed")
        .map(|entry| entry.expect("it can be listed").path())
        .filter(|path| path.is_dir())
        .collect();
    sets.sort();
    for set in &sets {
        let run = || check_case(&folder.join("model.onnx"), set, &options);
        match catch_unwind(AssertUnwindSafe(run)) {
            Ok(Ok(Verdict::Match)) => {}
            Ok(Ok(Verdict::Differ(lines))) => return format!("WRONG: {}", lines.join("; ")),
            Ok(Err(Error::Refused(refusals))) => {
                let first = &refusals[0];
                return format!(
                    "refused: {}: {}",
                    first.operator,
                    first.reason.replace('\n', " ")
                );
            }
            Ok(Err(error)) => {
                let text = error.to_string().replace(&*set.to_string_lossy(), "…");
                let text = text.replace(&*folder.to_string_lossy(), "…");
                return format!("refused: {}", text.lines().next().unwrap_or_default());
            }
            Err(_) => return "PANIC".into(),
        }
    }
    match sets.is_empty() {
        true => "WRONG: no data".into(),
        false => "pass".into(),
    }
}

#[test]
fn cases_of_the_package() {
    let Some(root) = cases() else { return };
    let filter = env::var("ONNX_CASES").unwrap_or_default();
    let cases: Vec<_> = all(&root)
        .into_iter()
        .filter(|(name, _)| name.contains(&filter))
        .collect();
    let verdicts = Mutex::new(BTreeMap::new());
    side_by_side(&cases, |_, (name, folder)| {
        let line = verdict(folder);
        let mut verdicts = verdicts.lock().expect("no panic");
        verdicts.insert(name.clone(), line);
    });
    let verdicts = verdicts.into_inner().expect("no panic");
    let mut counts: BTreeMap<(&str, &str), usize> = BTreeMap::new();
    let mut text = String::new();
    for (name, line) in &verdicts {
        let kind = name.split('/').next().unwrap_or_default();
        let verdict = line.split(':').next().unwrap_or_default();
        *counts.entry((kind, verdict)).or_default() += 1;
        writeln!(text, "{name}: {line}").expect("to a string");
    }
    for ((kind, verdict), n) in &counts {
        eprintln!("{kind:18} {verdict:8} {n}");
    }
    if !filter.is_empty() {
        eprint!("{text}");
        return;
    }
    let table = Path::new(env!("CARGO_MANIFEST_DIR")).join("cases.txt");
    if env::var_os("UPDATE_EXPECT").is_some() {
        fs::write(&table, &text).expect("the table can be written");
    }
    let bad: Vec<&str> = text
        .lines()
        .filter(|line| line.contains(": WRONG") || line.contains(": PANIC"))
        .collect();
    assert!(
        bad.is_empty(),
        "{} cases fail:\n{}",
        bad.len(),
        bad.join("\n")
    );
    let expected = fs::read_to_string(&table).unwrap_or_default();
    let listed: BTreeMap<&str, &str> = expected
        .lines()
        .filter_map(|line| line.split_once(": "))
        .collect();
    let changed: Vec<String> = verdicts
        .iter()
        .filter(|(name, line)| listed.get(name.as_str()) != Some(&line.as_str()))
        .map(|(name, line)| format!("{name}: {line}"))
        .collect();
    assert!(
        changed.is_empty(),
        "cases.txt says otherwise of:\n{}",
        changed.join("\n")
    );
    assert_eq!(
        listed.len(),
        verdicts.len(),
        "cases.txt lists cases that are gone"
    );
}

/// Numbers of a small generator, from −1 to 1.
fn noise(seed: u64, n: usize) -> Vec<f32> {
    let mut state = seed;
    let mut next = || {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    };
    (0..n).map(|_| next()).collect()
}

#[test]
fn a_model_of_a_file_is_trained_and_saved() {
    let Some(root) = cases() else { return };
    for (name, n) in [("mlp", 8), ("cnn", 64)] {
        let path = root.join(format!("trained/{name}.onnx"));
        let open = OnnxModel::load(&path).expect("a model");
        assert_eq!(open.open_dims(), ["batch"]);
        let error = open
            .declare(&Trace::inference())
            .expect_err("the batch is open");
        assert!(error.to_string().contains("--dim batch=1"), "{error}");

        let model = open.with_dim("batch", 6);
        let params = Params::seeded(0);
        let trace = Trace::training();
        let inputs = model.declare(&trace).expect("all lengths are known");
        let labels = trace.input("labels", I32, (6,));
        let outputs = model
            .trace(&trace, &params.root(), &inputs)
            .expect("it is expressed");
        let loss = outputs[0].cross_entropy(labels);
        trace.minimize(loss, Adam::new(0.01));
        let mut session = Session::new(Device::Cpu, params).expect("a session");
        let step = session.compile(&trace, [loss]).expect("it compiles");
        model.load_weights(&mut session).expect("they fit");
        let before = session.value("w2").expect("a parameter");
        assert!(before.iter().any(|&w| w != 0.0));
        let (x, labels) = (noise(7, 6 * n), vec![0, 1, 2, 2, 1, 0]);
        let mut losses = Vec::new();
        for _ in 0..50 {
            let [loss] = session.run(&step, (&x, &labels)).expect("it runs");
            losses.push(loss.item());
        }
        assert!(losses[49] < 0.5 * losses[0], "{name}: {losses:?}");
        assert_ne!(before, session.value("w2").expect("a parameter"));
        let folder = env::temp_dir().join(format!("slabwise-onnx-{}-{name}", std::process::id()));
        session.save(&folder).expect("it is saved");
        fs::remove_file(&folder).expect("it was written");
    }
}

/// A batch that is bounded gives, at every length up to the bound, the results of one that is fixed.
#[test]
fn a_bounded_batch_gives_the_same() {
    let Some(root) = cases() else { return };
    let run = |dim: Dim, x: &[f32]| {
        let path = root.join("trained/cnn.onnx");
        let model = OnnxModel::load(path)
            .expect("a model")
            .with_dim("batch", dim);
        let (params, trace) = (Params::seeded(0), Trace::inference());
        let inputs = model.declare(&trace).expect("all lengths are known");
        let outputs = model
            .trace(&trace, &params.root(), &inputs)
            .expect("it is expressed");
        let mut session = Session::new(Device::Cpu, params).expect("a session");
        let program = session.compile_any(&trace, &outputs).expect("it compiles");
        model.load_weights(&mut session).expect("they fit");
        let x = ndarray::ArrayView::from_shape((x.len() / 64, 1, 8, 8), x).expect("images");
        let results = session.run_any(&program, x).expect("it runs");
        results[0].array::<f32>().expect("logits")
    };
    for n in [1usize, 3, 7] {
        let x = noise(n as u64, 64 * n);
        assert_eq!(run(Dim::bounded("batch", 7), &x), run(n.into(), &x));
    }
}

/// Files with bytes lost or changed are refused, or read as another model; they never panic.
/// `ONNX_DAMAGES` says how often each is damaged.
#[test]
fn damaged_models_are_refused() {
    let Some(root) = cases() else { return };
    let times = damages();
    let small = |(_, folder): &(String, PathBuf)| {
        let path = folder.join("model.onnx");
        fs::metadata(path).is_ok_and(|file| file.len() < 1 << 16)
    };
    let cases: Vec<_> = all(&root).into_iter().filter(small).collect();
    assert!(cases.len() > 1900);
    let panics = Mutex::new(Vec::new());
    side_by_side(&cases, |at, (name, folder)| {
        let whole = fs::read(folder.join("model.onnx")).expect("a model");
        let places = noise(at as u64, times);
        for (turn, place) in places.iter().enumerate() {
            let (bytes, spot) = damaged(&whole, turn, *place);
            let data = folder.join("test_data_set_0");
            if catch_unwind(AssertUnwindSafe(|| trace_of(&bytes, &data))).is_err() {
                let mut panics = panics.lock().expect("no panic");
                panics.push(format!("{name}: damage {turn} at byte {spot}"));
            }
        }
    });
    let panics = panics.into_inner().expect("no panic");
    assert!(panics.is_empty(), "panics:\n{}", panics.join("\n"));
}

/// How often each file is damaged.
fn damages() -> usize {
    env::var("ONNX_DAMAGES").map_or(4, |n| n.parse().expect("a number"))
}

/// A file with bytes lost or changed at a place from −1 to 1, and the number of the first of them.
fn damaged(whole: &[u8], turn: usize, place: f32) -> (Vec<u8>, usize) {
    let spot = ((place + 1.0) / 2.0 * whole.len() as f32) as usize % whole.len();
    let mut bytes = whole.to_vec();
    match turn % 4 {
        0 => bytes.truncate(spot),
        1 => bytes[spot] ^= 1 << ((turn / 4) % 8),
        2 => bytes[spot] = 0xFF,
        _ => bytes[spot] = 0,
    }
    (bytes, spot)
}

/// Traces a model with the values that a folder has of its inputs, if it can be read.
fn trace_of(bytes: &[u8], data: &Path) {
    let Ok(mut model) = OnnxModel::of_bytes(bytes) else {
        return;
    };
    let names: Vec<String> = model.inputs().iter().map(|i| i.name.clone()).collect();
    for (at, name) in names.iter().enumerate() {
        if let Ok(array) = read_array(&data.join(format!("input_{at}.pb"))) {
            model = match array.len() <= 16 {
                true => model.with_value(name, array),
                false => model.with_shape(name, &array.shape),
            };
        }
    }
    let (trace, params) = (Trace::inference(), Params::seeded(0));
    let model = model.with_narrow(true);
    if let Ok(inputs) = model.declare(&trace) {
        // Either result is right; a changed model may be another one.
        let _ = model.trace(&trace, &params.root(), &inputs);
    }
}
