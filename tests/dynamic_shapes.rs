//! The model of the example `dynamic_shapes`: on batches of many lengths it learns the same as on
//! padded ones, with few plans and in bounded memory.

#[path = "../examples/dynamic_shapes/model.rs"]
mod model;

use model::{BATCH, Batch, CLASSES, Detector, FEATURES, length};
use ndarray::{Array2, Array3};
use slabwise::optim::Adam;
use slabwise::prelude::*;

const LONGEST: usize = 40;

/// The loss of the example, on sequences padded to one length: with a weight of 0 where the class
/// is not known.
fn padded_loss<'t>(detector: &Detector, trace: &'t Trace) -> Tensor<'t> {
    let x = trace.input("x", F32, (BATCH, LONGEST, FEATURES));
    let kind = trace.input("kind", I32, (BATCH, LONGEST)).flatten(0);
    let weight = trace
        .input("is_known", Bool, (BATCH, LONGEST))
        .flatten(0)
        .cast(F32);
    let is_there = trace.input("is_there", F32, (BATCH, LONGEST));
    let logits = detector.places(x, is_there).apply(&detector.head);
    let each = (logits.log_softmax(1) * kind.one_hot(CLASSES)).sum_over(1);
    -(each * weight).sum() / weight.sum()
}

/// A padded batch, and the mask of its real places.
fn padded(batch: &Batch) -> (Batch, Array2<f32>) {
    let own = batch.kind.ncols();
    let x = Array3::from_shape_fn((BATCH, LONGEST, FEATURES), |(b, i, f)| {
        if i < own { batch.x[(b, i, f)] } else { 0.0 }
    });
    let kind = Array2::from_shape_fn((BATCH, LONGEST), |(b, i)| {
        if i < own { batch.kind[(b, i)] } else { 0 }
    });
    let is_known = Array2::from_shape_fn((BATCH, LONGEST), |(b, i)| {
        if i < own { batch.is_known[(b, i)] } else { 0 }
    });
    let is_there =
        Array2::from_shape_fn((BATCH, LONGEST), |(_, i)| if i < own { 1.0 } else { 0.0 });
    (Batch { x, kind, is_known }, is_there)
}

#[test]
fn a_thousand_lengths_need_few_plans_and_learn_as_padded_batches_do() {
    let params = Params::seeded(4);
    let detector = Detector::new(&params.root(), 12);
    let mut session = Session::new(Device::Cpu, params)
        .expect("a session")
        .with_threads(2);
    let trace = Trace::training();
    let loss = detector.selected(&trace, Dim::unbounded("len"));
    trace.minimize(loss, Adam::new(1e-2));
    let train = session
        .compile(&trace, [loss])
        .unwrap_or_else(|e| panic!("{e}"));

    let params = Params::seeded(4);
    let reference = Detector::new(&params.root(), 12);
    let mut other = Session::new(Device::Cpu, params)
        .expect("a session")
        .with_threads(2);
    let trace = Trace::training();
    let loss = padded_loss(&reference, &trace);
    trace.minimize(loss, Adam::new(1e-2));
    let other_train = other
        .compile(&trace, [loss])
        .unwrap_or_else(|e| panic!("{e}"));

    let (mut first, mut last, mut warm, mut slab) = (0.0, 0.0, 0, 0);
    for step in 0..1000u64 {
        let batch = Batch::new(step, length(step, LONGEST));
        let [loss] = session
            .run(&train, (&batch.x, &batch.kind, &batch.is_known))
            .expect("runs");
        let loss = loss.item();
        if step < 100 {
            let (long, is_there) = padded(&batch);
            let [want] = other
                .run(
                    &other_train,
                    (&long.x, &long.kind, &long.is_known, &is_there),
                )
                .expect("runs");
            // Sums of other lengths round differently, and Adam divides by small numbers.
            assert!(
                (loss - want.item()).abs() <= 2e-3 * want.item(),
                "step {step}: {loss} and {}",
                want.item()
            );
        }
        let average = if step < 100 { &mut first } else { &mut last };
        *average += if (100..900).contains(&step) {
            0.0
        } else {
            loss / 100.0
        };
        if step == 500 {
            (warm, slab) = (train.plan_counts().made, session.slab_bytes());
        }
    }
    let plans = train.plan_counts();
    assert_eq!(
        (plans.made, session.slab_bytes(), plans.dropped),
        (warm, slab, 0),
        "all lengths were seen in 500 steps"
    );
    assert!(
        plans.made <= 20 && plans.made + plans.hits == 1001,
        "{plans:?}"
    );
    let pool = session.pool_statistics();
    assert!(pool.peak_bytes_in_use <= 4 << 10 << 10, "{pool:?}");
    assert!(last < 0.8 * first, "it learns: {first} and {last}");
}
