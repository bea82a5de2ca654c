//! Checkpoints of a session, loaded whole and in parts.

use ndarray::ArrayD;

use super::*;
use crate::device::Device;
use crate::nn::Linear;
use crate::optim::Adam;
use crate::params::Params;
use crate::shape::Dim;
use crate::trace::Trace;
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
    pretrained
        .adopt(&crate::graph::Graph::default())
        .expect("room");
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
fn files_keep_their_mode_and_damage_is_told() {
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
