//! Budgets are met by recomputation, and no bit of any result depends on them.

mod support;

use ndarray::{ArrayD, IxDyn};
use slabwise::nn::{BatchNorm1d, BatchNorm2d, Conv2d, Linear};
use slabwise::optim::{Adam, Sgd};
use slabwise::prelude::*;
use slabwise::{CompileOptions, Error};
use slabwise_models::{Model, OptimizerKind};
use support::networks::{Trained, WIDTH, behind, learn, train};

/// Layers with an activation and a dropout mask each.
fn masked<'t>(x: Tensor<'t>, layers: &[Linear]) -> Tensor<'t> {
    layers
        .iter()
        .fold(x, |x, dense| x.apply(dense).tanh().dropout(0.2))
}

/// Trains in parts of a batch, with a norm at first, one checkpointed segment, and a state that
/// parts read and change.
fn train_in_parts(budget: impl Into<Budget>, [batch, parts, steps]: [usize; 3]) -> Result<Trained> {
    let params = Params::seeded(5);
    let norm = BatchNorm1d::new(&params.root() / "norm", WIDTH);
    let layers: Vec<Linear> = (0..12)
        .map(|i| Linear::new(&params.root() / format!("l{i}").as_str(), WIDTH, WIDTH))
        .collect();
    learn(
        |s| s.with_budget(budget),
        params,
        [batch, steps],
        |trace, x, labels| {
            let (x, labels) = (x.split(0, parts), labels.split(0, parts));
            let scale = trace.state("scale", F32, (), Init::Constant(1.0));
            trace.minimize_in_parts(parts, Adam::new(1e-2), |part| {
                let mut h = x[part].apply(&norm) * scale.value();
                for (i, pair) in layers.chunks(2).enumerate() {
                    h = if i == 2 {
                        h.checkpoint(|h| masked(h, pair))
                    } else {
                        masked(h, pair)
                    };
                }
                if part == 0 {
                    scale.set(scale.value() * 1.5);
                }
                h.cross_entropy(labels[part])
            })
        },
    )
}

#[test]
fn half_of_the_slab_trains_to_the_same_weights() {
    let train = |budget: Budget, steps| {
        train(budget, [2048, 12, steps], None).unwrap_or_else(|e| panic!("{e}"))
    };
    let all = train(Budget::Unlimited, 3);
    let once = all.program.plan().slab_bytes();
    assert!(
        all.program.plan().budget_report().tasks.is_empty()
            && all.weights.len() > 70
            && all.losses[0] != all.losses[2]
    );
    let half = train(Budget::Fraction(0.5), 3);
    let plan = half.program.plan();
    assert!(
        !plan.recomputed().is_empty() && plan.budget_report().once == once,
        "{plan}"
    );
    assert!(
        plan.slab_bytes() <= once / 2 && half.session.slab_bytes() <= once / 2,
        "{plan}"
    );
    assert_eq!(half.session.last_run().peak_slab_bytes, plan.slab_bytes());
    assert!(
        plan.to_string().contains("recompute")
            && plan.steps().any(|name| name.ends_with(" recomputed")),
        "{plan}"
    );
    assert_eq!(half.losses, all.losses);
    assert!(half.weights == all.weights, "weights differ");
    // The same budget in bytes.
    let bytes = Bytes(half.session.persistent_bytes() + once / 2);
    assert_eq!(
        train(bytes.into(), 0).program.plan().slab_bytes(),
        plan.slab_bytes()
    );
}

/// Recomputation in one part must not read the state of the next part, nor values that a
/// checkpointed segment has dropped.
#[test]
fn parts_of_a_batch_and_checkpoints_train_to_the_same_bits_within_a_budget() {
    let (kept, runs) = same_within(&[90, 80, 70, 60], &|budget| {
        train_in_parts(budget, [4096, 2, 3])
    });
    assert!(
        kept >= 1 && runs >= 1,
        "{runs} kernels again in {kept} programs"
    );
}

/// Recomputed dropout masks are the same masks, and assignments to weights and state run once.
#[test]
fn random_networks_train_to_the_same_bits_within_any_budget() {
    let (mut runs, mut kept) = (0, 0);
    for seed in 0..8 {
        let sizes = [512, 4 + seed % 5, 3];
        let all = train(Budget::Unlimited, sizes, Some(seed)).expect("it compiles");
        for fraction in [0.8, 0.55] {
            let within = match train(Budget::Fraction(fraction), sizes, Some(seed)) {
                Ok(within) => within,
                Err(Error::Budget {
                    budget,
                    needed,
                    floor,
                    ..
                }) => {
                    assert!(
                        budget < needed && floor <= needed,
                        "{budget} {floor} {needed}"
                    );
                    continue;
                }
                Err(other) => panic!("{other}"),
            };
            assert_eq!(
                within.losses, all.losses,
                "network {seed} within {fraction}"
            );
            assert!(
                within.weights == all.weights,
                "network {seed} within {fraction}: weights differ"
            );
            kept += 1;
            runs += within.program.plan().budget_report().tasks.len();
        }
    }
    assert!(
        kept >= 3 && runs >= 10,
        "{runs} kernels again in {kept} programs"
    );
}

/// Trains residual blocks of dense layers with norms over the batch, whose running statistics move
/// with every step.
fn train_normed(
    budget: impl Into<Budget>,
    [batch, blocks, steps]: [usize; 3],
    seed: usize,
) -> Result<Trained> {
    let params = Params::seeded(seed as u64);
    let at = |i: usize| &params.root() / format!("b{i}").as_str();
    let layers: Vec<[(Linear, BatchNorm1d); 2]> = (0..blocks)
        .map(|i| {
            ["x", "y"].map(|n| {
                (
                    Linear::new(&at(i) / n, WIDTH, WIDTH),
                    BatchNorm1d::new(&at(i) / &format!("{n}norm"), WIDTH),
                )
            })
        })
        .collect();
    learn(
        |s| s.with_budget(budget),
        params,
        [batch, steps],
        |trace, x, labels| {
            let out = layers
                .iter()
                .enumerate()
                .fold(x, |x, (i, [first, second])| {
                    let h = behind(Some(seed), i, x, x.apply(&first.0).apply(&first.1));
                    (x + h.apply(&second.0).apply(&second.1)).relu()
                });
            let loss = out.cross_entropy(labels);
            trace.minimize(loss, Adam::new(1e-2));
            loss
        },
    )
}

/// Trains layers with a running average of each activation, updated by the kernel that computes the
/// activation.
fn train_watched(budget: impl Into<Budget>, [batch, layers, steps]: [usize; 3]) -> Result<Trained> {
    let params = Params::seeded(5);
    let layers: Vec<Linear> = (0..layers)
        .map(|i| Linear::new(&params.root() / format!("l{i}").as_str(), WIDTH, WIDTH))
        .collect();
    learn(
        |s| s.with_budget(budget),
        params,
        [batch, steps],
        |trace, x, labels| {
            let out = layers.iter().enumerate().fold(x, |x, (i, layer)| {
                let h = x.apply(layer).tanh();
                let seen = trace.state(
                    &format!("seen{i}"),
                    F32,
                    (batch, WIDTH),
                    Init::Constant(0.5),
                );
                seen.set(seen.value() * 0.9 + h * 0.1);
                h
            });
            let loss = out.cross_entropy(labels);
            trace.minimize(loss, Adam::new(1e-2));
            loss
        },
    )
}

/// The budgets of `percents` that are met, each with the same bits as without, and the number of
/// recomputed kernels.
fn same_within(percents: &[u64], train: &dyn Fn(Budget) -> Result<Trained>) -> (usize, usize) {
    let all = train(Budget::Unlimited).expect("it compiles");
    let once = all.program.plan().slab_bytes();
    assert!(all.losses[0] != all.losses[2]);
    let (mut kept, mut runs) = (0, 0);
    for &percent in percents {
        let within = match train(Budget::Fraction(percent as f64 / 100.0)) {
            Ok(within) => within,
            Err(Error::Budget {
                budget,
                needed,
                floor,
                ..
            }) => {
                assert!(
                    budget < needed && floor <= needed,
                    "{budget} {floor} {needed}"
                );
                continue;
            }
            Err(other) => panic!("{other}"),
        };
        let plan = within.program.plan();
        assert!(plan.slab_bytes() <= once * percent / 100, "{plan}");
        assert_eq!(within.losses, all.losses, "within {percent} %");
        assert!(
            within.weights == all.weights,
            "within {percent} %: weights or state differ"
        );
        kept += 1;
        runs += plan.budget_report().tasks.len();
    }
    (kept, runs)
}

#[test]
fn running_statistics_move_once_within_any_budget() {
    let (mut kept, mut runs) = (0, 0);
    for seed in 0..5 {
        let found = same_within(&[85, 70, 55], &|budget| {
            train_normed(budget, [1024, 3 + seed % 3, 3], seed)
        });
        (kept, runs) = (kept + found.0, runs + found.1);
    }
    assert!(
        kept >= 8 && runs >= 20,
        "{runs} kernels again in {kept} programs"
    );
}

#[test]
fn recomputed_activations_assign_once() {
    let (kept, runs) = same_within(&[80, 60], &|budget| train_watched(budget, [2048, 10, 3]));
    assert!(
        kept >= 2 && runs >= 4,
        "{runs} kernels again in {kept} programs"
    );
}

/// Pins every second activation, which is then not recomputed under any budget; the others are.
#[test]
fn pinned_values_are_recomputed_under_no_budget() {
    let train = |budget: Budget| {
        let params = Params::seeded(5);
        let layers: Vec<Linear> = (0..12)
            .map(|i| Linear::new(&params.root() / format!("l{i}").as_str(), WIDTH, WIDTH))
            .collect();
        learn(
            |s| s.with_budget(budget),
            params,
            [2048, 3],
            |trace, x, labels| {
                let out = layers.iter().enumerate().fold(x, |x, (i, layer)| {
                    let h = x.apply(layer).tanh();
                    if i % 2 == 0 { h.keep() } else { h }
                });
                let loss = out.cross_entropy(labels);
                trace.minimize(loss, Adam::new(1e-2));
                loss
            },
        )
    };
    assert!(same_within(&[75], &train).1 > 0);
    let within = train(Budget::Fraction(0.75)).expect("it fits");
    let dag = within.program.plan().dag();
    let copies = |layer: usize| {
        dag.buffers
            .iter()
            .filter(|b| b.name.starts_with(&format!("l{layer}.tanh")))
            .count()
    };
    // That of the last layer is in the kernel of the loss alone, which makes its gradient.
    assert!(
        (0..11).all(|layer| copies(layer) >= 1)
            && (0..12).step_by(2).all(|layer| copies(layer) == 1),
        "{dag}"
    );
    assert!((1..12).step_by(2).any(|layer| copies(layer) > 1), "{dag}");
}

/// A convolution and the norm behind it.
fn normed<'t>(x: Tensor<'t>, (conv, norm): &(Conv2d, BatchNorm2d)) -> Tensor<'t> {
    x.apply(conv).apply(norm)
}

/// Trains convolutions with norms in residual blocks, as residual networks have them; `pool`
/// reduces each image to one point.
fn train_residual(budget: Budget, pool: for<'t> fn(Tensor<'t>) -> Tensor<'t>) -> Result<Trained> {
    train_residual_on(|s| s.with_budget(budget), 8, pool)
}

/// On images of `side` rows and columns, of which the inner 8 are not zero.
fn train_residual_on(
    open: impl FnOnce(Session) -> Session,
    side: usize,
    pool: for<'t> fn(Tensor<'t>) -> Tensor<'t>,
) -> Result<Trained> {
    const BATCH: usize = 256;
    const CHANNELS: usize = 8;
    let params = Params::seeded(5);
    let layer = |name: &str, inputs| {
        let at = &params.root() / name;
        (
            Conv2d::new(&at / "conv", inputs, CHANNELS, 3)
                .padding(1)
                .without_bias(),
            BatchNorm2d::new(&at / "norm", CHANNELS),
        )
    };
    let stem = layer("stem", 1);
    let blocks =
        ["a", "b", "c", "d"].map(|name| ["1", "2"].map(|n| layer(&format!("{name}{n}"), CHANNELS)));
    let head = Linear::new(&params.root() / "head", CHANNELS, WIDTH);
    learn(open, params, [BATCH, 3], |trace, x, labels| {
        let around = ((side - 8) / 2, (side - 8) / 2);
        let x = x.reshape((BATCH, 1, 8, 8));
        let x = x.pad([(0, 0), (0, 0), around, around], 0.0);
        let x = normed(x, &stem).relu();
        let out = blocks.iter().fold(x, |x, [first, second]| {
            (normed(normed(x, first).relu(), second) + x).relu()
        });
        let loss = pool(out).apply(&head).cross_entropy(labels);
        trace.minimize(loss, Sgd::new(0.1).momentum(0.9));
        loss
    })
}

/// Convolutions by Winograd's filtering train as exact ones, to other bits, which are the same on
/// every number of threads.
#[test]
fn exact_convolutions_are_a_choice() {
    // In tiles of 2×2 and of 4×4 results.
    for side in [8, 16] {
        exact_convolutions_are_a_choice_on(side);
    }
}

fn exact_convolutions_are_a_choice_on(side: usize) {
    let train = |exact_convolutions: bool, threads: usize| {
        let open = |session: Session| {
            let options = CompileOptions {
                exact_convolutions,
                ..CompileOptions::default()
            };
            session.with_threads(threads).with_options(options)
        };
        train_residual_on(open, side, |x| x.global_avg_pool()).expect("it fits")
    };
    let [filtered, exact] = [false, true].map(|exact| {
        let [one, two, four] = [1, 2, 4].map(|threads| train(exact, threads));
        for other in [&two, &four] {
            assert!(one.losses == other.losses && one.weights == other.weights);
        }
        let slab = one.program.plan().slab_bytes();
        assert_eq!(one.session.last_run().peak_slab_bytes, slab);
        one
    });
    assert_ne!(filtered.weights, exact.weights);
    for (a, b) in filtered.losses.iter().zip(&exact.losses) {
        let [a, b] = [a, b].map(|bits| f32::from_bits(*bits));
        assert!((a - b).abs() <= 1e-5 * b.abs(), "{a} is not {b}");
    }
}

/// Fission and late fusion keep all bits: the backward pass of a residual network recomputes
/// activations of several layers in one kernel, and a recomputed convolution is followed by values
/// that a norm separated from it. At the start of the backward pass the gradient is uniform over an
/// image, if the images' means are taken; kernels that sum it are split all the same.
#[test]
fn a_residual_network_trains_to_the_same_weights_within_a_budget() {
    let pools: [for<'t> fn(Tensor<'t>) -> Tensor<'t>; 2] =
        [|x| x.avg_pool2d(8).flatten(1), |x| x.global_avg_pool()];
    for pool in pools {
        let train = |budget| train_residual(budget, pool);
        let (kept, runs) = same_within(&[80, 65, 50], &train);
        assert!(
            kept == 3 && runs >= 12,
            "{runs} kernels again in {kept} programs"
        );
        let mut fused = 0;
        for percent in [60, 55, 50, 45, 40] {
            let Ok(within) = train(Budget::Fraction(f64::from(percent) / 100.0)) else {
                assert!(percent < 50, "{percent} % fits");
                continue;
            };
            let (plan, dag) = (within.program.plan(), within.program.plan().dag());
            let peak = within.session.last_run().peak_slab_bytes;
            assert_eq!(peak, plan.slab_bytes());
            // An activation is one value in both passes.
            assert!(
                !dag.buffers
                    .iter()
                    .any(|b| b.name.ends_with("relu.recomputed")),
                "{dag}"
            );
            let joins = |name: &str| name.contains("conv2d recomputed & ");
            fused += usize::from(plan.steps().any(joins));
        }
        // A convolution is fused with its norm and activation; within which budgets depends on the
        // workspaces of the instruction set.
        assert!(fused > 0);
    }
}

#[test]
fn programs_share_the_bytes_left_by_the_first() {
    let params = Params::seeded(5);
    let network = Model::Mlp.build(&params);
    let mut session = Session::new(Device::Cpu, params)
        .expect("a session")
        .with_budget(Budget::Fraction(1.0));
    let train = network
        .training(&mut session, 64u32, OptimizerKind::Sgd)
        .expect("it fits");
    let infer = network.inference(&mut session, 64u32).expect("it fits");
    assert!(infer.plan().slab_bytes() <= train.plan().slab_bytes());
    let images = ArrayD::<f32>::zeros(IxDyn(&[64, 784]));
    session.run(&infer, (&images,)).expect("a run");
    let error = network
        .inference(&mut session, 4096u32)
        .err()
        .expect("too large")
        .to_string();
    assert!(error.contains("no plan needs less than"), "{error}");
}

#[test]
fn a_program_beside_a_slab_that_is_too_large_is_refused() {
    let bytes = |session: &Session| session.persistent_bytes() + session.slab_bytes();
    let params = Params::seeded(5);
    let network = Model::Mlp.build(&params);
    let mut session = Session::new(Device::Cpu, params).expect("a session");
    // Inference of a large batch, then training of a small one, which has state.
    network
        .inference(&mut session, 2048u32)
        .expect("it compiles");
    let first = bytes(&session);
    let small = |session: &mut Session| network.training(session, 8u32, OptimizerKind::Adam);
    let own = small(&mut session)
        .expect("it compiles")
        .plan()
        .slab_bytes();
    let both = bytes(&session);
    assert!(own < session.slab_bytes() && both > first);
    for (budget, fits) in [(both, true), (both - 1, false)] {
        let params = Params::seeded(5);
        let network = Model::Mlp.build(&params);
        let mut session = Session::new(Device::Cpu, params)
            .expect("a session")
            .with_budget(Bytes(budget));
        network.inference(&mut session, 2048u32).expect("it fits");
        match network.training(&mut session, 8u32, OptimizerKind::Adam) {
            Ok(_) => assert!(fits, "{} of {budget} bytes", bytes(&session)),
            Err(Error::Budget { needed, .. }) => assert!(!fits && needed == Bytes(both)),
            Err(other) => panic!("{other}"),
        }
        assert!(bytes(&session) <= budget);
    }
}

/// A program that has no memory does not set the limit of those after it.
#[test]
fn a_fraction_is_that_of_the_first_program_that_compiles() {
    let params = Params::seeded(5);
    let network = Model::Mlp.build(&params);
    let mut session = Session::new(Device::Cpu, params)
        .expect("a session")
        .with_budget(Budget::Fraction(1.0));
    let mut train = |batch| network.training(&mut session, batch, OptimizerKind::Sgd);
    match train(1u32 << 29) {
        Err(Error::OutOfMemory { .. }) => {}
        other => panic!("{:?}", other.map(|_| ())),
    }
    train(64).expect("it fits");
    let error = train(4096).err().expect("too large");
    assert!(matches!(error, Error::Budget { .. }), "{error}");
}
