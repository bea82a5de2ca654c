//! Whole steps of the built-in models: `cargo bench -p slabwise-benches --bench steps`.

use divan::Bencher;
use slabwise::Quantization;
use slabwise::prelude::*;
use slabwise_models::{CACHED, Llama, Model, OptimizerKind};

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

/// One token of a Llama with a cache of 64, whose weights have `BITS` bits: floats of 32 and 16, or
/// integers in blocks of 32.
#[divan::bench(consts = [32, 16, 8, 4])]
fn token<const BITS: u32>(bencher: Bencher<'_, '_>) {
    let sizes = Llama {
        layers: 8,
        width: 1024,
        heads: 16,
        key_heads: 4,
        inner: 2816,
        ..Llama::SMALL
    };
    let params = Params::seeded(0);
    let root = match BITS {
        32 => params.root(),
        16 => params.root().stored_in(BF16),
        bits => params.root().quantized(Quantization { bits, block: 32 }),
    };
    let decoder = sizes.layers(&root);
    let trace = Trace::inference();
    let token = trace.input("token", I32, (1, 1));
    let logits = decoder.continued(token, 64);
    let mut session = Session::new(Device::Cpu, params).expect("the CPU is always there");
    let program = session.compile(&trace, [logits]).expect("compiles");
    let token = ndarray::arr2(&[[7]]);
    bencher.bench_local(|| {
        session
            .set_value(CACHED, &ndarray::arr0(32))
            .expect("a state");
        session.run(&program, (&token,)).map(drop).expect("runs")
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
