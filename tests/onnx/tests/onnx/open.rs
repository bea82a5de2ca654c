//! Models with lengths that a run decides, which `open.py` makes: planned once for a bound, run at
//! several lengths, against onnxruntime.

use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};

use slabwise::data::HostArray;
use slabwise::feed::Input;
use slabwise::prelude::*;
use slabwise_onnx::check::{CheckOptions, Verdict, check_model, difference};
use slabwise_onnx::{Array, OnnxModel};

use crate::real::{arrays, sets};
use crate::{damaged, damages, made, noise};

const BATCH: u32 = 4;
const LENGTH: u32 = 32;
const PAST: u32 = 8;

fn models() -> Option<PathBuf> {
    let packages = "the packages onnx 1.23.2, onnxruntime 1.32.0 and numpy";
    made("open.py", "onnx-open", packages)
}

/// The model of a folder, open in all lengths.
fn open(folder: &Path) -> OnnxModel {
    OnnxModel::load(folder.join("model.onnx"))
        .expect("a model")
        .with_dim("batch", Dim::bounded("batch", BATCH))
        .with_dim("length", Dim::bounded("length", LENGTH))
        .with_dim("past", Dim::bounded("past", PAST))
}

/// One program for all lengths gives onnxruntime's numbers at each of them. At the bounds it uses
/// the bytes of its plan, and at smaller lengths no more.
#[test]
fn one_program_runs_at_every_length() {
    let Some(root) = models() else { return };
    let options = CheckOptions {
        rtol: 1e-4,
        atol: 1e-5,
        ..CheckOptions::default()
    };
    for name in [
        "cached",
        "cnn",
        "decoder",
        "encoder",
        "ended",
        "gru",
        "lstm",
        "quantized",
        "scan",
        "shifted",
    ] {
        let model = open(&root.join(name));
        let (params, trace) = (Params::seeded(0), Trace::inference());
        let tensors = model.declare(&trace).expect("all lengths have bounds");
        let values = model.values(&trace, &params.root(), &tensors);
        let values = values.unwrap_or_else(|error| panic!("{name}: {error}"));
        let (elements, outputs): (Vec<_>, Vec<_>) = values.into_iter().unzip();
        let mut session = Session::new(Device::Cpu, params).expect("a session");
        let program = session.compile_any(&trace, &outputs);
        let program = program.unwrap_or_else(|error| panic!("{name}: {error}"));
        model.load_weights(&mut session).expect("they fit");
        let sets = sets(&root.join(name));
        assert_eq!(sets.len(), 4, "{name}");
        let mut at_bounds = 0;
        for set in sets {
            let (inputs, expected) = (arrays(&set, "input"), arrays(&set, "output"));
            let hosts: Vec<HostArray> = inputs
                .iter()
                .map(|array| array.to_host().expect("it is held"))
                .collect();
            let feed: Vec<&dyn Input> = hosts.iter().map(|host| host as &dyn Input).collect();
            let results = session.run_any(&program, &feed[..]);
            let results = results.unwrap_or_else(|error| panic!("{}: {error}", set.display()));
            for ((result, element), expected) in results.iter().zip(&elements).zip(&expected) {
                let host = result.to_host().expect("it is read");
                let array = Array::of_host(&host, *element).expect("of this type");
                if let Some(text) = difference(&array, expected, &options) {
                    panic!("{}: {text}", set.display());
                }
            }
            drop(results);
            let (peak, planned) = (
                session.last_run().peak_slab_bytes,
                program.plan().slab_bytes(),
            );
            let (batch, length) = (BATCH as usize, LENGTH as usize);
            let bounds = match name {
                "cnn" => [batch, 3],
                "quantized" => [batch, 40],
                "scan" => [3, length],
                _ => [batch, length],
            };
            let whole = inputs[0].shape[..2] == bounds;
            at_bounds += usize::from(whole);
            match whole {
                true => assert_eq!(peak, planned, "{}", set.display()),
                false => assert!(peak <= planned, "{}", set.display()),
            }
        }
        assert_eq!(at_bounds, 1, "{name} runs at its bounds");
    }
}

/// The comparison of a folder keeps the bounds that a model has been given.
#[test]
fn a_folder_is_compared_at_open_lengths() {
    let Some(root) = models() else { return };
    let folder = root.join("decoder");
    for set in sets(&folder) {
        let verdict = check_model(open(&folder), &set, &CheckOptions::default());
        assert_eq!(verdict.expect("it runs"), Verdict::Match);
    }
    let narrow = open(&folder).with_dim("batch", Dim::bounded("batch", 3));
    let set = folder.join("test_data_set_2");
    let error = check_model(narrow, &set, &CheckOptions::default());
    let error = error.expect_err("it has a batch of 4").to_string();
    assert!(error.contains('4') && error.contains("batch"), "{error}");
}

/// Loops and layers of many steps are imported, compiled and planned once: there are few kernels.
#[test]
fn long_loops_are_planned_once() {
    let Some(root) = models() else { return };
    for name in [
        "long_gru",
        "long_loop",
        "long_lstm",
        "long_places",
        "long_rnn",
    ] {
        let folder = root.join(name);
        let model = OnnxModel::load(folder.join("model.onnx")).expect("a model");
        let (params, trace) = (Params::seeded(0), Trace::inference());
        let tensors = model.declare(&trace).expect("all lengths are fixed");
        let outputs = model.trace(&trace, &params.root(), &tensors);
        let outputs = outputs.unwrap_or_else(|error| panic!("{name}: {error}"));
        let session = Session::new(Device::Cpu, params).expect("a session");
        let plan = session.plan_any(&trace, &outputs).expect("a plan");
        assert!(plan.steps().count() < 40, "{name}: {plan}");
        let set = folder.join("test_data_set_0");
        let verdict = check_model(model, &set, &CheckOptions::default());
        let verdict = verdict.unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_eq!(verdict, Verdict::Match, "{name}");
    }
}

/// Shapes that have no form at every length are refused with the node, the reason and the option
/// that helps; with a fixed length they are expressed.
#[test]
fn lengths_without_form_are_refused() {
    let Some(root) = models() else { return };
    for (name, parts) in [
        (
            "halves",
            &[
                "Reshape",
                "length / 2 is not exact at every length",
                "--dim length=",
            ][..],
        ),
        ("doubled", &["Expand", "must be known", "--input"]),
        (
            "lengthened",
            &["Concat", "too many bounded lengths", "--dim batch="],
        ),
    ] {
        let refusal = |model: OnnxModel| {
            let (params, trace) = (Params::seeded(0), Trace::inference());
            let tensors = model.declare(&trace).expect("all lengths have bounds");
            model.trace(&trace, &params.root(), &tensors).err()
        };
        let error = refusal(open(&root.join(name))).expect("it is refused");
        let error = error.to_string();
        let missing: Vec<_> = parts.iter().filter(|part| !error.contains(*part)).collect();
        assert!(missing.is_empty(), "{name}: {missing:?} not in {error}");
        if name == "halves" {
            let fixed = open(&root.join(name)).with_dim("length", 6);
            assert!(refusal(fixed).is_none(), "{name} of a fixed length");
        }
    }
}

/// Files with bytes lost or changed are refused, or read as another model, where their lengths are
/// open too.
#[test]
fn damaged_models_with_open_lengths_are_refused() {
    let Some(root) = models() else { return };
    let mut panics = Vec::new();
    for (at, name) in [
        "cached",
        "decoder",
        "encoder",
        "ended",
        "gru",
        "quantized",
        "scan",
        "shifted",
    ]
    .iter()
    .enumerate()
    {
        let whole = fs::read(root.join(name).join("model.onnx")).expect("a model");
        for (turn, place) in noise(at as u64, 50 * damages()).iter().enumerate() {
            let (bytes, spot) = damaged(&whole, turn, *place);
            let trace_it = || {
                let Ok(mut model) = OnnxModel::of_bytes(&bytes) else {
                    return;
                };
                let names: Vec<String> = model.open_dims().iter().map(|n| n.to_string()).collect();
                for name in &names {
                    model = model.with_dim(name, Dim::bounded(Dim::name(name), LENGTH));
                }
                let (params, trace) = (Params::seeded(0), Trace::inference());
                if let Ok(inputs) = model.declare(&trace) {
                    // Either result is right; a changed model may be another one.
                    let _ = model.trace(&trace, &params.root(), &inputs);
                }
            };
            if catch_unwind(AssertUnwindSafe(trace_it)).is_err() {
                panics.push(format!("{name}: damage {turn} at byte {spot}"));
            }
        }
    }
    assert!(panics.is_empty(), "panics:\n{}", panics.join("\n"));
}
