//! The budget is kept, whatever has to be computed again for it, and no bit of any result depends on it.

use ndarray::{Array1, Array2, ArrayD, IxDyn};
use slabwise::Error;
use slabwise::models::{Model, OptimizerKind};
use slabwise::nn::Linear;
use slabwise::optim::{Adam, Sgd};
use slabwise::prelude::*;

/// What training a deep perceptron leaves behind.
struct Trained {
    losses: Vec<u32>,
    weights: Vec<(String, Vec<u32>)>,
    session: Session,
    program: Program<1>,
}

fn train(budget: impl Into<Budget>, steps: usize) -> Trained {
    let params = Params::seeded(5);
    let layers: Vec<Linear> = (0..12).map(|i| Linear::new(&params.root() / format!("l{i}").as_str(), 64, 64)).collect();
    let mut session = Session::new(Device::Cpu, params).expect("a session").with_threads(2).with_budget(budget);
    let trace = Trace::training();
    let (x, labels) = (trace.input("x", F32, (2048, 64)), trace.input("labels", I32, (2048,)));
    let loss = layers.iter().fold(x, |x, layer| x.apply(layer).tanh()).cross_entropy(labels);
    trace.minimize(loss, Adam::new(1e-2));
    let program = session.compile(&trace, [loss]).unwrap_or_else(|e| panic!("{e}"));
    let x = Array2::from_shape_fn((2048, 64), |(i, j)| ((i * 37 + j * 11) % 23) as f32 / 23.0);
    let labels = Array1::from_shape_fn(2048, |i| (i % 64) as i32);
    let losses = (0..steps).map(|_| session.run(&program, (&x, &labels)).expect("a step")[0].item().to_bits()).collect();
    let bits = |name: &str| session.value(name).expect("a weight").iter().map(|v| v.to_bits()).collect();
    let weights = session.names().map(|name| (name.to_string(), bits(name))).collect();
    Trained { losses, weights, session, program }
}

#[test]
fn half_of_the_slab_trains_to_the_same_weights() {
    let all = train(Budget::Unlimited, 3);
    let once = all.program.plan().slab_bytes();
    assert!(all.program.plan().again().runs == 0 && all.weights.len() > 70 && all.losses[0] != all.losses[2]);
    let half = train(Budget::Fraction(0.5), 3);
    let plan = half.program.plan();
    assert!(plan.again().runs > 0 && plan.again().once == once, "{plan}");
    assert!(plan.slab_bytes() <= once / 2 && half.session.slab_bytes() <= once / 2, "{plan}");
    assert_eq!(half.session.last_run().peak_slab_bytes, plan.slab_bytes());
    assert!(plan.to_string().contains("recompute") && plan.steps().any(|name| name.ends_with(" again")), "{plan}");
    assert_eq!(half.losses, all.losses);
    assert!(half.weights == all.weights, "weights differ");
    // The same budget in bytes.
    let bytes = Bytes(half.session.persistent_bytes() + once / 2);
    assert_eq!(train(bytes, 0).program.plan().slab_bytes(), plan.slab_bytes());
}

#[test]
fn a_budget_no_schedule_keeps_is_refused_with_the_floor() {
    // The first pooling alone reads and writes more than half of the slab.
    let params = Params::seeded(5);
    let network = Model::Cnn.build(&params);
    let mut session = Session::new(Device::Cpu, params).expect("a session").with_threads(2).with_budget(Budget::Fraction(0.5));
    let error = network.training(&mut session, 64u32, OptimizerKind::Sgd).err().expect("too small");
    let Error::Budget { budget, needed, floor, .. } = error else { panic!("{error}") };
    assert!(budget < floor && floor <= needed, "{budget} {floor} {needed}");
}

/// A deep perceptron with dropout, whose masks are random: the first loss, and that of the step after an update.
fn with_dropout(budget: Budget) -> ([u32; 2], usize) {
    let params = Params::seeded(9);
    let layers: Vec<Linear> = (0..8).map(|i| Linear::new(&params.root() / format!("l{i}").as_str(), 32, 32)).collect();
    let mut session = Session::new(Device::Cpu, params.clone()).expect("a session").with_threads(1).with_budget(budget);
    let trace = Trace::training();
    let (x, labels) = (trace.input("x", F32, (256, 32)), trace.input("labels", I32, (256,)));
    let logits = layers.iter().fold(x, |x, layer| x.apply(layer).tanh().dropout(0.4));
    let loss = logits.cross_entropy(labels);
    trace.minimize(loss, Sgd::new(0.1));
    let program = session.compile(&trace, [loss]).unwrap_or_else(|e| panic!("{e}"));
    let x = Array2::from_shape_fn((256, 32), |(i, j)| ((i * 37 + j * 11) % 19) as f32 / 19.0);
    let labels = Array1::from_shape_fn(256, |i| (i % 32) as i32);
    let mut step = || session.run(&program, (&x, &labels)).expect("a step")[0].item().to_bits();
    ([step(), step()], program.plan().again().runs)
}

#[test]
fn masks_computed_again_are_the_same_masks() {
    let (all, none) = with_dropout(Budget::Unlimited);
    assert!(none == 0 && all[0] != all[1]);
    let (some, runs) = with_dropout(Budget::Fraction(0.7));
    assert!(runs > 0);
    assert_eq!(some, all);
}

#[test]
fn programs_share_what_the_first_one_leaves() {
    let params = Params::seeded(5);
    let network = Model::Mlp.build(&params);
    let mut session = Session::new(Device::Cpu, params).expect("a session").with_budget(Budget::Fraction(1.0));
    let train = network.training(&mut session, 64u32, OptimizerKind::Sgd).expect("it fits");
    let infer = network.inference(&mut session, 64u32).expect("it fits");
    assert!(infer.plan().slab_bytes() <= train.plan().slab_bytes());
    let images = ArrayD::<f32>::zeros(IxDyn(&[64, 784]));
    session.run(&infer, (&images,)).expect("a run");
    let error = network.inference(&mut session, 4096u32).err().expect("too large").to_string();
    assert!(error.contains("no plan needs less than"), "{error}");
}
