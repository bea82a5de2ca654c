//! Checkpoints of a session, loaded whole and in parts.

use ndarray::ArrayD;

use super::*;
use crate::device::Device;
use crate::nn::Linear;
use crate::optim::Adam;
use crate::params::Params;
use crate::shape::Dim;
use crate::trace::Trace;
use crate::weights::{Rules, SaveOptions, Weights};
use slabwise_kernels::dtype::DType::F32;

/// A layer in a scope, and a session that has it.
fn open(scope: &str, classes: usize, seed: u64) -> (Linear, Session) {
    let params = Params::seeded(seed);
    let layer = Linear::new(params.root() / scope, 3, classes);
    (
        layer,
        Session::new(Device::Cpu, params)
            .expect("a session")
            .with_threads(1),
    )
}

/// With a program that trains it.
fn training(seed: u64) -> Session {
    let (layer, mut session) = open("layer", 2, seed);
    let trace = Trace::training();
    let loss = trace
        .input("x", F32, (Dim::from(4), 3))
        .apply(&layer)
        .square()
        .mean();
    trace.minimize(loss, Adam::new(1e-3));
    session.compile(&trace, [loss]).expect("a program");
    session
}

fn values(session: &Session) -> Vec<ArrayD<f32>> {
    session
        .names()
        .map(|name| session.value(name).expect("it is there"))
        .collect()
}

#[test]
fn names_of_states_are_lines() {
    assert_eq!(
        note(["a", "b.c"].into_iter()).expect("plain names"),
        "a\nb.c"
    );
    for name in ["a\nb", "\r", "c\r\n"] {
        assert!(note(["a", name].into_iter()).is_err_and(|e| e.to_string().contains("line break")));
    }
}

#[test]
fn weights_are_loaded_before_anything_is_compiled() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("a.safetensors");
    let trained = training(1);
    trained.save(&path).expect("it is saved");
    let (_, mut session) = open("layer", 2, 9);
    // The error of a checkpoint of a training whose state this session lacks names the remedy.
    let said = session.load(&path).expect_err("there is state").to_string();
    assert!(
        said.contains("Session::load_weights")
            && said.contains("compile the training program first"),
        "{said}"
    );
    assert!(said.contains("unexpected: `optim.step`"), "{said}");
    session.load_weights(&path).expect("the weights fit");
    assert_eq!(
        values(&session)[..],
        values(&trained)[..session.names().count()]
    );
}

#[test]
fn a_new_head_keeps_its_first_values_and_a_body_is_found_under_its_prefix() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("a.safetensors");
    let (_, pretrained) = open("module", 2, 1);
    let mut pretrained = pretrained;
    pretrained
        .load_with(&path, &LoadOptions::default())
        .expect_err("there is no such file");
    let (_, mut other) = open("model", 2, 5);
    // Declared weights are in a session once something is loaded or compiled.
    let names = |session: &Session| session.names().map(str::to_owned).collect::<Vec<_>>();
    pretrained.adopt(&Graph::default()).expect("room");
    pretrained.save(&path).expect("it is saved");
    let loaded = other
        .load_with(&path, &LoadOptions::weights().prefix("module.", "model."))
        .expect("it fits");
    assert_eq!(
        (loaded.count, names(&other)),
        (2, vec!["model.weight".to_owned(), "model.bias".to_owned()])
    );
    assert_eq!(values(&other), values(&pretrained));
    // Another number of classes: nothing of the file fits, all keeps its value.
    let (_, mut wider) = open("module", 7, 3);
    let said = wider
        .load_weights(&path)
        .expect_err("shapes differ")
        .to_string();
    assert!(
        said.contains("wrong shape: `module.weight` is [7, 3] in the model, [2, 3] in the file")
            && said.contains("module.bias"),
        "{said}"
    );
    let before = values(&wider);
    let loaded = wider
        .load_with(
            &path,
            &LoadOptions::weights().rename(|_| None).allow_missing(),
        )
        .expect("nothing is asked for");
    assert_eq!(
        (loaded.count, loaded.missing.len(), values(&wider)),
        (0, 2, before)
    );
}

#[test]
fn files_keep_their_mode_and_damage_is_reported() {
    use std::os::unix::fs::PermissionsExt;
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("a.safetensors");
    let mut session = training(1);
    session.save(&path).expect("it is saved");
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).expect("it is mine");
    session.save(&path).expect("it is saved");
    assert_eq!(
        std::fs::metadata(&path)
            .expect("it is there")
            .permissions()
            .mode()
            & 0o777,
        0o600
    );
    let before = values(&session);
    let mut bytes = std::fs::read(&path).expect("it is there");
    let last = bytes.len() - 1;
    bytes[last] ^= 0x10;
    std::fs::write(&path, bytes).expect("it is mine");
    let said = session
        .load(&path)
        .expect_err("a bit is another")
        .to_string();
    assert!(
        said.contains("is damaged") && said.contains("a.safetensors"),
        "{said}"
    );
    assert_eq!(values(&session), before);
}

/// Weights of two layers, initialised or not yet.
fn two_layers(seed: u64, has_values: bool) -> Session {
    let params = Params::seeded(seed);
    for scope in ["body", "head"] {
        Linear::new(params.root() / scope, 3, 2);
    }
    let mut session = Session::new(Device::Cpu, params).expect("a session");
    if has_values {
        session.adopt(&Graph::default()).expect("room");
    }
    session
}

#[test]
fn values_that_are_not_read_are_the_initial_ones() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("a.safetensors");
    let (other, initial) = (two_layers(1, true), two_layers(2, true));
    let of_the_file = values(&other);
    let initial = values(&initial);
    other.save(&path).expect("it is saved");
    // One of two layers is read.
    let mut half = two_layers(2, false);
    let keep = |name: &str| name.starts_with("body").then(|| name.to_owned());
    let options = LoadOptions::weights().rename(keep).allow_missing();
    let loaded = half.load_with(&path, &options).expect("it fits");
    assert_eq!(loaded.count, 2);
    let expected = [&of_the_file[..2], &initial[2..]].concat();
    assert_eq!(values(&half), expected);
    // None is read from a file that does not fit.
    let (_, mut wider) = open("body", 7, 1);
    let wide = folder.path().join("wide.safetensors");
    wider.adopt(&Graph::default()).expect("room");
    wider.save(&wide).expect("it is saved");
    let mut refused = two_layers(2, false);
    refused.load_weights(&wide).expect_err("shapes differ");
    assert_eq!(values(&refused), initial);
    // Some are read from a file without checksums whose end is cut off after it was opened.
    other
        .save_as(&path, &Rules::new(), &SaveOptions::new())
        .expect("it is saved");
    let weights = Weights::open(&path).expect("it is whole");
    let bytes = std::fs::metadata(&path).expect("it is there").len();
    let file = std::fs::OpenOptions::new().write(true).open(&path);
    file.and_then(|file| file.set_len(bytes - 1))
        .expect("it is mine");
    let mut cut = two_layers(2, false);
    cut.load_from(&weights, &Rules::new())
        .expect_err("the last byte is gone");
    let cut = values(&cut);
    let is_initial: Vec<bool> = cut.iter().zip(&initial).map(|(a, b)| a == b).collect();
    let is_read: Vec<bool> = cut.iter().zip(&of_the_file).map(|(a, b)| a == b).collect();
    assert!(
        is_initial.contains(&true) && is_read.contains(&true),
        "{is_initial:?}, {is_read:?}"
    );
    assert!(
        is_initial.iter().zip(&is_read).all(|(a, b)| a != b),
        "{is_initial:?}, {is_read:?}"
    );
}
