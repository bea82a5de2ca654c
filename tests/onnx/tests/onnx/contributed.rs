//! Models with operators of `com.microsoft`, which `contributed.py` makes: one for each operator,
//! those that onnxruntime's optimizers and quantizers write, and two of the form that builders of
//! models with weights of four bits write, against onnxruntime.

use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::Mutex;

use slabwise::prelude::*;
use slabwise_onnx::OnnxModel;
use slabwise_onnx::check::{CheckOptions, Verdict, check_case, check_model};

use crate::real::sets;
use crate::{damaged, damages, made, noise, side_by_side, trace_of};

fn models(kind: &str) -> Option<Vec<PathBuf>> {
    let packages = "the packages onnx 1.23.2, onnxruntime 1.32.0 and numpy";
    let root = made("contributed.py", "onnx-contributed", packages)?;
    let entries = fs::read_dir(root.join(kind)).expect("the folder was made");
    let mut all: Vec<PathBuf> = entries
        .map(|entry| entry.expect("it can be listed").path())
        .collect();
    all.sort();
    Some(all)
}

fn options() -> CheckOptions {
    CheckOptions {
        rtol: 1e-4,
        atol: 1e-5,
        ..CheckOptions::default()
    }
}

#[test]
fn operators_of_onnxruntime_give_its_results() {
    let Some(all) = models("node") else { return };
    assert!(all.len() > 100, "{} models", all.len());
    let wrong = all.iter().filter_map(|folder| {
        let set = folder.join("test_data_set_0");
        match check_case(&folder.join("model.onnx"), &set, &options()) {
            Ok(Verdict::Match) => None,
            Ok(Verdict::Differ(lines)) => Some(format!("{}: {lines:?}", folder.display())),
            Err(error) => Some(format!("{}: {error}", folder.display())),
        }
    });
    let wrong: Vec<String> = wrong.collect();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Files with bytes lost or changed are refused, or read as another model.
#[test]
fn damaged_operators_are_refused() {
    let Some(all) = models("node") else { return };
    let panics = Mutex::new(Vec::new());
    side_by_side(&all, |at, folder| {
        let whole = fs::read(folder.join("model.onnx")).expect("a model");
        let data = folder.join("test_data_set_0");
        for (turn, place) in noise(at as u64, 10 * damages()).iter().enumerate() {
            let (bytes, spot) = damaged(&whole, turn, *place);
            if catch_unwind(AssertUnwindSafe(|| trace_of(&bytes, &data))).is_err() {
                let mut panics = panics.lock().expect("no panic");
                panics.push(format!(
                    "{}: damage {turn} at byte {spot}",
                    folder.display()
                ));
            }
        }
    });
    let panics = panics.into_inner().expect("no panic");
    assert!(panics.is_empty(), "panics:\n{}", panics.join("\n"));
}

/// Models that were optimized and quantized are planned once for all lengths.
#[test]
fn rewritten_models_run_at_every_length() {
    let Some(all) = models("whole") else { return };
    assert_eq!(all.len(), 9);
    for folder in all {
        for set in sets(&folder) {
            let model = OnnxModel::load(folder.join("model.onnx"))
                .expect("a model")
                .with_dim("batch", Dim::bounded("batch", 4))
                .with_dim("length", Dim::bounded("length", 32))
                .with_dim("past", Dim::bounded("past", 8));
            let verdict = check_model(model, &set, &options());
            let verdict = verdict.unwrap_or_else(|error| panic!("{}: {error}", set.display()));
            assert_eq!(verdict, Verdict::Match, "{}", set.display());
        }
    }
}
