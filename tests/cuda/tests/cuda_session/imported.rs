//! Models from ONNX files train on a device as on the CPU.

use std::path::{Path, PathBuf};

use ndarray::ArrayD;
use slabwise::feed::Input;
use slabwise::optim::Adam;
use slabwise::prelude::*;
use slabwise::weights::File;
use slabwise_cuda::fake::FakeDriver;
use slabwise_onnx::OnnxModel;

use super::close::assert_close;
use super::session;

fn path(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../onnx/data")
        .join(name)
}

fn read<T>(file: &File, name: &str, of: fn([u8; 4]) -> T) -> ArrayD<T> {
    let entry = file.get(name).expect("it was recorded");
    let shape: Vec<usize> = entry.shape.iter().map(|&n| n as usize).collect();
    let words = entry.bytes.chunks_exact(4);
    let values = words.map(|word| of(word.try_into().expect("four bytes")));
    ArrayD::from_shape_vec(shape, values.collect()).expect("the file was checked")
}

/// The losses of some steps of an exported classifier.
fn losses(name: &str, device: Device) -> Vec<f32> {
    let model = OnnxModel::load(path(&format!("{name}.onnx"))).expect("a model");
    let file = File::open(path(&format!("{name}.safetensors"))).expect("it was recorded");
    let labels = read(&file, "y", i32::from_le_bytes);
    let x: Box<dyn Input> = match file.get("x").expect("it was recorded").dtype {
        F32 => Box::new(read(&file, "x", f32::from_le_bytes)),
        _ => Box::new(read(&file, "x", i32::from_le_bytes)),
    };
    let (params, trace) = (Params::seeded(0), Trace::training());
    let inputs = model.declare(&trace).expect("all lengths are known");
    let outputs = model.trace(&trace, &params.root(), &inputs);
    let logits = outputs.expect("it is expressed")[0];
    let loss = logits.cross_entropy(trace.input("labels", I32, (labels.len(),)));
    trace.minimize(loss, Adam::new(0.01));
    let mut session = session(device, params);
    let step = session.compile(&trace, [loss]).expect("it compiles");
    model.load_weights(&mut session).expect("they fit");
    let feed: [&dyn Input; 2] = [&*x, &labels];
    let losses = (0..2).map(|_| session.run(&step, &feed[..]).expect("a step")[0].item());
    let losses = losses.collect();
    assert_eq!(
        session.last_run().peak_slab_bytes,
        step.plan().slab_bytes(),
        "{name} on {device}: planned and measured"
    );
    losses
}

#[test]
fn imported_models_train_as_on_the_cpu() {
    let Some(_driver) = FakeDriver::install() else {
        return;
    };
    for name in ["cnn", "transformer"] {
        assert_close(&losses(name, Device::Cuda(0)), &losses(name, Device::Cpu));
    }
}
