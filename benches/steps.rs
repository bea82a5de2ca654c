//! Whole steps of the built-in models: `cargo bench -p slabwise-benches --bench steps`.

use divan::Bencher;
use slabwise::prelude::*;
use slabwise_models::{Model, OptimizerKind};

fn main() {
    divan::main();
}

/// A training step, planned and dynamic: inputs copied from the host, the loss read.
#[divan::bench(args = [("mlp", 64), ("mlp", 256), ("cnn", 64)], consts = [false, true])]
fn train<const DYNAMIC: bool>(bencher: Bencher<'_, '_>, (name, batch): (&str, u32)) {
    let model = Model::parse(name).expect("a built-in model");
    let params = Params::seeded(0);
    let network = model.build(&params);
    let mut session = Session::new(Device::Cpu, params).expect("the CPU is always there");
    let program = network
        .training(&mut session, batch, model.optimizer())
        .expect("compiles");
    let (images, labels) = model.batch(batch as usize, 1);
    bencher.bench_local(|| {
        let feed = (&images, &labels);
        let outputs = if DYNAMIC {
            session.run_dynamic(&program, feed)
        } else {
            session.run(&program, feed)
        };
        outputs.map(|[loss]| loss.item()).expect("runs")
    });
}

/// From trace to program: gradients, fusion, plan and check.
#[divan::bench(args = ["mlp", "cnn"])]
fn compile(bencher: Bencher<'_, '_>, name: &str) {
    let model = Model::parse(name).expect("a built-in model");
    bencher.bench_local(|| {
        let params = Params::seeded(0);
        let network = model.build(&params);
        let mut session = Session::new(Device::Cpu, params).expect("the CPU is always there");
        network
            .training(&mut session, 64, OptimizerKind::Adam)
            .expect("compiles")
            .plan()
            .slab_bytes()
    });
}
