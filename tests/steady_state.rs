//! After `compile`, a step allocates nothing: a global allocator counts the requests of all threads
//! of this program.

#[path = "support/allocator.rs"]
mod allocator;

use std::sync::Barrier;
use std::thread;

use allocator::counted;
use ndarray::{ArrayD, Axis, Slice};
use slabwise::nn::{Linear, Lstm};
use slabwise::optim::Sgd;
use slabwise::prelude::*;
use slabwise::{Strategy, World};
use slabwise_models::{Examples, Gpt, Model, OptimizerKind};

/// The first rows of a batch.
fn first<T: Clone>(array: &ArrayD<T>, rows: usize) -> ArrayD<T> {
    array.slice_axis(Axis(0), Slice::from(..rows)).to_owned()
}

const STEPS: usize = 10;
/// Steps for each further kind of input.
const FEW: usize = 3;

fn steps_of(model: Model, optimizer: OptimizerKind, batch: usize, last: usize, steps: usize) {
    steps_within(model, optimizer, [batch, last, steps], Budget::Unlimited);
}

fn steps_within(
    model: Model,
    optimizer: OptimizerKind,
    [batch, last, steps]: [usize; 3],
    budget: Budget,
) {
    let what = format!("{model} {optimizer} {budget:?}");
    let params = Params::seeded(1);
    let network = model.build(&params);
    let mut session = Session::new(Device::Cpu, params)
        .expect("a session")
        .with_threads(2)
        .with_budget(budget);
    let bound = Dim::bounded("batch", batch as u32);
    let train = network
        .training(&mut session, bound, optimizer)
        .expect("the model compiles");
    let infer = network
        .inference(&mut session, bound)
        .expect("the model compiles");
    let (examples, labels) = model.batch(batch, 7);
    let few_labels = first(&labels, last);
    let few_examples = match &examples {
        Examples::Images(images) => Examples::Images(first(images, last)),
        Examples::Tokens(tokens) => Examples::Tokens(first(tokens, last)),
    };

    // One step of each starts threads and initializes everything that is initialized at its first
    // use.
    let mut sum = session.run(&train, (&examples, &labels)).expect("a step")[0].item();
    sum += session.run(&infer, (&examples,)).expect("a step")[0].item();

    let train_steps = counted(|| {
        for _ in 0..steps {
            sum += session.run(&train, (&examples, &labels)).expect("a step")[0].item();
        }
    });
    let smaller_steps = counted(|| {
        for _ in 0..steps {
            sum += session
                .run(&train, (&few_examples, &few_labels))
                .expect("a step")[0]
                .item();
        }
    });
    let slice_steps = counted(|| {
        // Slices and views are other kinds of inputs.
        let classes = labels.view();
        for _ in 0..FEW {
            let loss = match &examples {
                Examples::Images(images) => {
                    session.run(&train, (images.as_slice().expect("in order"), &classes))
                }
                Examples::Tokens(tokens) => {
                    session.run(&train, (tokens.as_slice().expect("in order"), &classes))
                }
            };
            sum += loss.expect("a step")[0].item();
        }
    });
    let infer_steps = counted(|| {
        for _ in 0..steps {
            let [logits] = session.run(&infer, (&examples,)).expect("a step");
            sum += logits.view::<f32>().expect("logits are f32").sum();
            let [logits] = session.run(&infer, (&few_examples,)).expect("a step");
            sum += logits.item();
        }
    });
    assert!(sum.is_finite(), "{what}: {sum}");
    let nothing = (0, 0);
    assert_eq!(
        train_steps, nothing,
        "{what}: allocations and deallocations in {steps} training steps"
    );
    assert_eq!(
        smaller_steps, nothing,
        "{what}: in {steps} steps of a smaller batch"
    );
    assert_eq!(
        slice_steps, nothing,
        "{what}: in {FEW} steps fed with slices"
    );
    assert_eq!(infer_steps, nothing, "{what}: in {steps} inferences");

    // Resident buffers are fed without an allocation too.
    let examples = match &examples {
        Examples::Images(images) => session.upload("images", images),
        Examples::Tokens(tokens) => session.upload("tokens", tokens),
    };
    let (examples, labels) = (
        examples.expect("room"),
        session.upload("labels", &labels).expect("room"),
    );
    let resident_steps = counted(|| {
        for _ in 0..FEW {
            sum += session.run(&train, (&examples, &labels)).expect("a step")[0].item();
        }
    });
    assert_eq!(
        resident_steps, nothing,
        "{what}: in {FEW} steps on resident inputs"
    );
}

/// Lengths seen before need no new plan, and a run with an existing plan allocates nothing.
fn seen_lengths() {
    let params = Params::seeded(1);
    let network = Model::Mlp.build(&params);
    let mut session = Session::new(Device::Cpu, params)
        .expect("a session")
        .with_threads(2);
    let train = network
        .training(&mut session, Dim::unbounded("batch"), OptimizerKind::Sgd)
        .expect("the model compiles");
    let batches = [5usize, 37, 70].map(|length| {
        let (examples, labels) = Model::Mlp.batch(length, 7);
        let Examples::Images(images) = examples else {
            panic!("an MLP sees images")
        };
        (images, labels)
    });
    let mut sum = 0.0;
    let mut pass = |sum: &mut f32| {
        for (images, labels) in &batches {
            *sum += session.run(&train, (images, labels)).expect("a step")[0].item();
        }
    };
    pass(&mut sum);
    let again = counted(|| pass(&mut sum));
    assert!(sum.is_finite() && train.plan_counts().hits >= 3);
    assert_eq!(
        again,
        (0, 0),
        "allocations and deallocations in steps of lengths that were seen"
    );
}

/// Steps with offload to the host.
fn steps_with_copies() {
    const BATCH: usize = 512;
    const WIDTH: usize = 64;
    let params = Params::seeded(1);
    let layers: Vec<Linear> = (0..8)
        .map(|i| Linear::new(&params.root() / format!("l{i}").as_str(), WIDTH, WIDTH))
        .collect();
    let session = Session::new(Device::Cpu, params)
        .expect("a session")
        .with_threads(2);
    let mut session = session
        .with_budget(Budget::Fraction(0.6))
        .with_offload(Offload::new(Bytes(1 << 50)));
    let trace = Trace::training();
    let (x, labels) = (
        trace.input("x", F32, (BATCH, WIDTH)),
        trace.input("labels", I32, (BATCH,)),
    );
    let loss = layers
        .iter()
        .fold(x, |x, layer| x.apply(layer).tanh())
        .cross_entropy(labels);
    trace.minimize(loss, Sgd::new(0.1));
    let program = session.compile(&trace, [loss]).expect("it fits");
    assert!(
        !program.plan().budget_report().offloaded.is_empty(),
        "{}",
        program.plan()
    );
    let (x, labels) = (
        ArrayD::<f32>::ones(vec![BATCH, WIDTH]),
        ArrayD::<i32>::zeros(vec![BATCH]),
    );
    let mut sum = session.run(&program, (&x, &labels)).expect("a step")[0].item();
    let steps = counted(|| {
        for _ in 0..STEPS {
            sum += session.run(&program, (&x, &labels)).expect("a step")[0].item();
        }
    });
    assert!(sum.is_finite());
    assert_eq!(
        steps,
        (0, 0),
        "allocations and deallocations in {STEPS} steps with copies"
    );
}

/// Steps of two ranks, whose threads both count, with bytes in flight between them.
fn steps_of_ranks(strategy: Strategy) {
    let meet = Barrier::new(3);
    thread::scope(|scope| {
        for world in World::local(2).expect("a world") {
            let meet = &meet;
            scope.spawn(move || {
                let params = Params::seeded(1);
                let network = Model::Mlp.build(&params);
                let session = Session::new(Device::Cpu, params).map(|s| s.with_threads(1));
                let world = world.with_strategy(strategy);
                let mut session = session.and_then(|s| s.on(world)).expect("a session");
                let train = network.training(&mut session, 32, OptimizerKind::Adam);
                let train = train.expect("the model compiles");
                let communication = train.plan().communication();
                assert!(communication.is_some_and(|c| c.overlapped > 0));
                let (examples, labels) = Model::Mlp.batch(32, 7);
                let mut steps = |steps| {
                    for _ in 0..steps {
                        let run = session.run(&train, (&examples, &labels));
                        assert!(run.expect("a step")[0].item().is_finite());
                    }
                };
                steps(2);
                meet.wait();
                meet.wait();
                steps(STEPS);
                meet.wait();
                meet.wait();
            });
        }
        meet.wait();
        let counts = counted(|| {
            meet.wait();
            meet.wait();
        });
        meet.wait();
        assert_eq!(counts, (0, 0), "{STEPS} steps of 2 ranks, {strategy:?}");
    });
}

/// One test, because requests are counted for the whole process.
/// A recurrent layer whose steps are a scan, and its gradient a scan of scans.
fn scanned_steps() {
    let params = Params::seeded(1);
    let layer = Lstm::new(&params.root() / "lstm", 4, 6).unrolled_up_to(0);
    let layer = layer.checkpoint_every(4);
    let trace = Trace::training();
    let x = trace.input("x", F32, (2, 11, 4));
    let loss = x.apply(&layer).square().mean();
    trace.minimize(loss, Sgd::new(0.1));
    let mut session = Session::new(Device::Cpu, params)
        .expect("a session")
        .with_threads(2);
    let train = session.compile(&trace, [loss]).expect("it compiles");
    let x = ArrayD::from_elem(vec![2, 11, 4], 0.5f32);
    let mut sum = session.run(&train, (&x,)).expect("a step")[0].item();
    let counts = counted(|| {
        for _ in 0..FEW {
            sum += session.run(&train, (&x,)).expect("a step")[0].item();
        }
    });
    assert_eq!(counts, (0, 0), "scans: {sum}");
}

#[test]
fn a_step_allocates_nothing() {
    let noticed = counted(|| drop(std::hint::black_box(vec![0u8; 100])));
    assert!(noticed.0 >= 1 && noticed.1 >= 1, "the allocator counts");

    steps_of(Model::Mlp, OptimizerKind::Sgd, 64, 37, STEPS);
    // Kernels in micro-batches.
    steps_within(
        Model::Cnn,
        OptimizerKind::Adam,
        [32, 9, FEW],
        Budget::Fraction(0.6),
    );
    steps_of(Model::Mlp, OptimizerKind::Adam, 64, 37, STEPS);
    // Small batches, because allocations of a convolution do not depend on the batch.
    steps_of(Model::Cnn, OptimizerKind::Sgd, 4, 3, STEPS);
    steps_of(Model::Cnn, OptimizerKind::Adam, 4, 3, STEPS);
    // Norms with running statistics, strided convolutions; embeddings, attention.
    steps_of(Model::ResNet20, OptimizerKind::Sgd, 2, 1, FEW);
    let gpt = Gpt {
        layers: 2,
        width: 32,
        heads: 2,
        length: 16,
        vocabulary: 64,
        tied: false,
    };
    steps_of(Model::Gpt(gpt), OptimizerKind::AdamW, 3, 2, FEW);
    steps_of(Model::Lstm, OptimizerKind::Adam, 2, 1, FEW);
    scanned_steps();
    seen_lengths();
    steps_with_copies();
    steps_of_ranks(Strategy::Replicated);
    steps_of_ranks(Strategy::ShardedState);
}
