//! Models whose weights lie in files beside them, and models with functions, which `own.py` makes.

use std::fs;
use std::path::PathBuf;

use slabwise_onnx::OnnxModel;
use slabwise_onnx::check::{CheckOptions, Verdict, check_case};

use crate::made;

fn models(kind: &str) -> Option<PathBuf> {
    Some(made("own.py", "onnx-own", "onnx 1.23.2 and numpy")?.join(kind))
}

/// The message of a model that is refused; `None` for one that gives its results.
fn refusal(folder: &std::path::Path) -> Option<String> {
    let set = folder.join("test_data_set_0");
    let options = CheckOptions {
        rtol: 1e-5,
        ..CheckOptions::default()
    };
    match check_case(&folder.join("model.onnx"), &set, &options) {
        Ok(Verdict::Match) => None,
        Ok(Verdict::Differ(lines)) => panic!("{}: {}", folder.display(), lines.join("; ")),
        Err(error) => Some(error.to_string()),
    }
}

/// Compares each model of a folder with the parts of its refusal that a list has, none for those
/// that must give their results.
fn check(kind: &str, expected: &[(&str, &[&str])]) {
    let Some(root) = models(kind) else { return };
    let folders = fs::read_dir(&root).expect("it was made");
    let all = folders.filter(|entry| entry.as_ref().is_ok_and(|e| e.path().is_dir()));
    assert_eq!(all.count(), expected.len(), "each model is listed");
    for (name, parts) in expected {
        let refused = refusal(&root.join(name));
        match (refused, parts.is_empty()) {
            (None, true) => {}
            (None, false) => panic!("{name} is not refused"),
            (Some(message), true) => panic!("{name}: {message}"),
            (Some(message), false) => {
                for part in *parts {
                    assert!(
                        message.contains(part),
                        "{name}: {part} is not in: {message}"
                    );
                }
            }
        }
    }
}

#[test]
fn weights_are_read_from_files_beside_the_model() {
    let outside = "outside of the model's folder";
    check(
        "external",
        &[
            ("one_file", &[]),
            ("several_files", &[]),
            ("places", &[]),
            ("bad_missing", &["\"w\"", "gone.bin", "No such file"]),
            ("bad_lengths", &["\"lengths\"", "gone.bin", "No such file"]),
            (
                "bad_short",
                &["\"w\"", "288 bytes from 8 on", "w.bin", "which has 288"],
            ),
            ("bad_behind", &["\"w\"", "1000000", "288"]),
            ("bad_less", &["\"w\"", "284"]),
            ("bad_more", &["\"w\"", "292"]),
            ("bad_above", &["\"w\"", "../beside.bin", outside]),
            ("bad_around", &["\"w\"", "parts/../../beside.bin", outside]),
            ("bad_absolute", &["\"w\"", "/beside.bin", outside]),
            ("bad_no_number", &["\"w\"", "offset", "many", "no number"]),
            ("bad_negative", &["\"w\"", "offset", "-1", "no number"]),
            ("bad_no_place", &["\"w\"", "names no file"]),
        ],
    );
}

#[test]
fn a_model_without_folder_has_no_files() {
    let Some(root) = models("external") else {
        return;
    };
    let bytes = fs::read(root.join("one_file/model.onnx")).expect("it was made");
    let model = OnnxModel::of_bytes(&bytes).expect("a model");
    let trace = slabwise::Trace::inference();
    let params = slabwise::Params::seeded(0);
    let inputs = model.declare(&trace).expect("all lengths are known");
    let error = model
        .trace(&trace, &params.root(), &inputs)
        .expect_err("its lengths are in a file");
    assert!(error.to_string().contains("has no folder"), "{error}");
}

#[test]
fn functions_of_a_model_are_inlined() {
    check(
        "functions",
        &[
            ("default_attribute", &[]),
            ("nested", &[]),
            ("overloads", &[]),
            ("opsets", &[]),
            ("absent_inputs", &[]),
            ("inner_graphs", &[]),
            ("bad_recursion", &["own.Again", "more than 64 graphs deep"]),
            ("bad_overload", &["own.Both", "not known"]),
            ("bad_attribute", &["Constant"]),
            ("bad_name", &["own.Scald", "not known"]),
        ],
    );
}
