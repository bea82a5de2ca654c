//! Copies beside kernels and mapped pages on a GPU, where there is one: properties of streams,
//! branches of graphs and mappings that a driver without a device assumes. Without a GPU these
//! print a message and pass.

#[path = "../../support/mod.rs"]
mod support;

use ndarray::{Array1, Array2};
use slabwise::memory::{MemoryConfig, Policy};
use slabwise::nn::Linear;
use slabwise::optim::Adam;
use slabwise::prelude::*;
use support::networks::{WIDTH, examples, train_on};

/// The first device. Without one, prints a message and returns `None`, or panics if a device is
/// required.
fn gpu() -> Option<Device> {
    slabwise_cuda::emulator::gpu_usable().then(|| Device::cuda(0).expect("it is usable"))
}

/// Takes memory on demand, because tests run in parallel.
fn bare(session: Session) -> Session {
    let config = MemoryConfig {
        preallocate: Some(false),
        ..MemoryConfig::default()
    };
    session
        .with_memory(&config)
        .expect("settings that make sense")
}

#[test]
fn offloaded_values_come_back_unchanged() {
    let Some(device) = gpu() else { return };
    for seed in [None, Some(3)] {
        let sizes = [2048, 8, 5];
        let all = train_on(device, bare, sizes, seed).expect("it compiles");
        let half = |s: Session| {
            bare(s)
                .with_budget(Budget::Fraction(0.5))
                .with_offload(Offload::new(Bytes(1 << 50)))
        };
        let within = train_on(device, half, sizes, seed).expect("it fits");
        let plan = within.program.plan();
        assert!(
            !plan.budget_report().offloaded.is_empty()
                && plan.slab_bytes() <= all.program.plan().slab_bytes() / 2,
            "{plan}"
        );
        assert_eq!(within.losses, all.losses);
        assert!(within.weights == all.weights, "weights differ");
        // Many pending steps, then a read.
        let (x, labels) = examples(sizes[0]);
        let losses = [all, within].map(|mut trained| {
            for _ in 0..10 {
                trained
                    .session
                    .run(&trained.program, (&x, &labels))
                    .expect("a step");
            }
            trained
                .session
                .run(&trained.program, (&x, &labels))
                .expect("a step")[0]
                .item()
                .to_bits()
        });
        assert_eq!(losses[0], losses[1]);
    }
}

#[test]
fn prefetched_batches_belong_to_their_steps() {
    let Some(device) = gpu() else { return };
    const BATCH: usize = 4096;
    let open = |slots: usize| {
        let params = Params::seeded(3);
        let layers =
            [0, 1, 2].map(|i| Linear::new(&params.root() / format!("l{i}").as_str(), WIDTH, WIDTH));
        let mut session =
            bare(Session::new(device, params).expect("a session")).with_prefetch(slots);
        let trace = Trace::training();
        let (x, labels) = (
            trace.input("x", F32, (BATCH, WIDTH)),
            trace.input("labels", I32, (BATCH,)),
        );
        let loss = layers
            .iter()
            .fold(x, |x, layer| x.apply(layer).tanh())
            .cross_entropy(labels);
        trace.minimize(loss, Adam::new(1e-2));
        let program = session.compile(&trace, [loss]).expect("it compiles");
        (session, program)
    };
    let (x, labels) = examples(BATCH);
    let batches = || {
        (0..12)
            .map(|step| (x.mapv(|v| v + step as f32 / 12.0), labels.clone()))
            .collect::<Vec<(Array2<f32>, Array1<i32>)>>()
    };
    let (mut session, program) = open(1);
    assert!(
        program.plan().persistent().staging >= (BATCH * WIDTH * 4) as u64,
        "{}",
        program.plan()
    );
    // A synchronization after each step, or after the last only: inputs copied while steps run are
    // those of their own steps.
    let mut expected = 0;
    for batch in batches() {
        expected = session.run(&program, batch).expect("a step")[0]
            .item()
            .to_bits();
    }
    let (mut session, program) = open(1);
    let (mut data, mut last) = (batches().into_iter().peekable(), 0);
    while let Some(batch) = data.next() {
        let [loss] = session.run(&program, batch).expect("a step");
        if data.peek().is_none() {
            last = loss.item().to_bits();
        }
    }
    assert_eq!(last, expected);
    for slots in [2, 4] {
        let (mut session, program) = open(slots);
        let (mut data, mut last) = (batches().into_iter(), 0);
        for step in 0..12 {
            let [loss] = session
                .run_ahead(&program, &mut data)
                .expect("a step")
                .expect("a batch");
            // Most of them are not synchronized.
            if step == 11 {
                last = loss.item().to_bits();
            }
        }
        assert_eq!(last, expected, "{slots} slots");
    }
}

#[test]
fn a_pool_of_mapped_pages_gives_the_same_results() {
    let Some(device) = gpu() else { return };
    let config = |policy| MemoryConfig {
        limit: Some(256 << 20),
        preallocate: Some(false),
        ..MemoryConfig::with_policy(policy)
    };
    for policy in [Policy::Tlsf, Policy::Bfc, Policy::Vmm] {
        let mut session = Session::new(device, Params::seeded(0))
            .expect("a session")
            .with_memory(&config(policy))
            .expect("it maps pages");
        // Sizes that fit badly into the gaps between earlier ones.
        for n in [200u32, 500, 100, 400, 600, 300] {
            let trace = Trace::inference();
            let x = trace.input("x", F32, (n, n));
            let (a, b) = (x.matmul(x), x.exp());
            let program = session
                .compile(&trace, [(a * b + x).sum(), a.sum()])
                .expect("compiles");
            let x = Array2::from_shape_fn((n as usize, n as usize), |(i, j)| {
                ((i * 31 + j * 17) as f32 * 0.618).sin() * 0.1
            });
            let planned = session
                .run(&program, (&x,))
                .expect("a run")
                .map(|output| output.item().to_bits());
            let dynamic = session
                .run_dynamic(&program, (&x,))
                .expect("a run")
                .map(|output| output.item().to_bits());
            assert_eq!(planned, dynamic, "{policy}, {n}");
        }
        let statistics = session.pool_statistics();
        assert!(
            statistics.pool_bytes > 0 && statistics.ooms == 0,
            "{policy}: {statistics:?}"
        );
        session.reset_pool();
        assert_eq!(session.pool_statistics().pool_bytes, 0, "{policy}");
    }
}
