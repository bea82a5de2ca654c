//! Micro-batches: where one kernel alone needs more than the budget, kernels run on parts of the
//! batch. This meets budgets that no order and no recomputation can, with the same bits.

mod support;

use ndarray::{Array1, ArrayD, Axis, IxDyn, Slice};
use slabwise::nn::{BatchNorm2d, Conv2d, Linear};
use slabwise::optim::{Adam, Sgd};
use slabwise::prelude::*;
use slabwise::{CompileOptions, Error, Isa, Measures};
use slabwise_models::{Examples, Model, OptimizerKind, noise};
use support::networks::Trained;

fn session(params: Params, budget: Budget, threads: usize) -> Session {
    Session::new(Device::Cpu, params)
        .expect("a session")
        .with_threads(threads)
        .with_budget(budget)
}

const BATCH: u32 = 32;

/// Steps on whole batches and, between them, on smaller ones.
fn cnn(budget: Budget, threads: usize, options: CompileOptions) -> Result<Trained> {
    let params = Params::seeded(5);
    let network = Model::Cnn.build(&params);
    let mut session = session(params, budget, threads).with_options(options);
    let program = network.training(
        &mut session,
        Dim::bounded("batch", BATCH),
        OptimizerKind::Adam,
    )?;
    let feeds: Vec<_> = [BATCH, 19, 1, BATCH]
        .into_iter()
        .map(|n| {
            let (Examples::Images(images), labels) = Model::Cnn.batch(BATCH as usize, u64::from(n))
            else {
                panic!("images")
            };
            let first = |n: u32| Slice::from(..n as usize);
            (
                images.slice_axis(Axis(0), first(n)).to_owned(),
                labels.slice_axis(Axis(0), first(n)).to_owned(),
            )
        })
        .collect();
    Ok(Trained::of(session, program, feeds))
}

#[test]
fn half_of_the_slab_of_a_convolutional_network_trains_to_the_same_weights() {
    let all = cnn(Budget::Unlimited, 2, CompileOptions::default()).expect("it compiles");
    let once = all.program.plan().slab_bytes();
    assert!(
        all.program.plan().budget_report().micro_batched.is_none()
            && all.losses[0] != all.losses[3]
    );
    for threads in [1, 2] {
        let half = cnn(Budget::Fraction(0.5), threads, CompileOptions::default())
            .unwrap_or_else(|e| panic!("{e}"));
        let plan = half.program.plan();
        let slices = plan.budget_report().micro_batched.expect("slices");
        assert!(
            slices.count > 1 && slices.kernels > 4 && slices.examples < BATCH,
            "{plan}"
        );
        assert!(
            plan.to_string().contains(&slices.to_string()) && plan.budget_report().overhead >= 0.0,
            "{plan}"
        );
        // The planned peak equals the measured one and meets the budget.
        assert!(
            plan.slab_bytes() <= once / 2 && half.session.slab_bytes() <= once / 2,
            "{plan}"
        );
        assert_eq!(half.session.last_run().peak_slab_bytes, plan.slab_bytes());
        half.assert_same(&all, &format!("{threads} threads"));
    }
    // Without micro-batches there is no such plan.
    let whole = cnn(
        Budget::Fraction(0.5),
        2,
        CompileOptions {
            measures: Measures {
                micro_batch: false,
                ..Measures::default()
            },
            ..CompileOptions::default()
        },
    );
    let Some(Error::Budget {
        budget,
        needed,
        floor,
        ..
    }) = whole.err()
    else {
        panic!("too small")
    };
    assert!(
        budget < floor && floor <= needed,
        "{budget} {floor} {needed}"
    );
    // No micro-batches fit into almost no memory.
    let Some(Error::Budget {
        budget,
        needed,
        floor,
        ..
    }) = cnn(Budget::Fraction(0.05), 2, CompileOptions::default()).err()
    else {
        panic!("too small")
    };
    assert!(
        budget < floor && floor <= needed,
        "{budget} {floor} {needed}"
    );
}

/// A network that `seed` draws, from images to a dense head.
struct Random {
    seed: usize,
    layers: Vec<Conv2d>,
    norm: BatchNorm2d,
    head: Linear,
}

const SIDE: usize = 16;

impl Random {
    fn new(seed: usize, params: &Params) -> Random {
        let (at, channels) = (params.root(), 4 + seed % 3 * 2);
        let mut layers = vec![Conv2d::new(&at / "c0", 2, channels, 3).padding(1)];
        layers.extend((1..3 + seed % 2).map(|i| {
            let layer =
                Conv2d::new(&at / format!("c{i}").as_str(), channels, channels, 3).padding(1);
            // Some with groups, some with a group for each channel.
            match (seed + i) % 3 {
                0 => layer.groups(channels),
                1 => layer.groups(2),
                _ => layer,
            }
        }));
        let pools = (0..layers.len())
            .filter(|&i| Random::behind(seed, i).is_multiple_of(4))
            .count();
        let head = Linear::new(&at / "head", channels * (SIDE >> pools).pow(2), 7);
        Random {
            seed,
            layers,
            norm: BatchNorm2d::new(&at / "norm", channels),
            head,
        }
    }

    fn behind(seed: usize, layer: usize) -> usize {
        (seed * 31 + layer * layer * 7 + layer) % 6
    }

    fn logits<'t>(&self, x: Tensor<'t>) -> Tensor<'t> {
        let mut h = x;
        for (i, layer) in self.layers.iter().enumerate() {
            let before = h;
            h = h.apply(layer);
            h = match Random::behind(self.seed, i) {
                0 => h.relu().max_pool2d(2),
                1 => h.tanh().dropout(0.3),
                2 if i > 0 => h.relu() + before,
                3 => h.apply(&self.norm).relu(),
                4 => h.silu().avg_pool2d(2),
                _ => h.relu(),
            };
        }
        h.flatten(1).dropout(0.1).apply(&self.head)
    }
}

fn train(seed: usize, budget: Budget, check_memory: bool) -> Result<Trained> {
    let params = Params::seeded(seed as u64);
    let network = Random::new(seed, &params);
    let options = CompileOptions {
        check_memory,
        ..CompileOptions::default()
    };
    let mut session = session(params, budget, 1 + seed % 2).with_options(options);
    let trace = Trace::training();
    let (batch, most) = (Dim::bounded("batch", 64), 64);
    let (x, labels) = (
        trace.input("x", F32, (batch, 2, SIDE, SIDE)),
        trace.input("labels", I32, (batch,)),
    );
    let loss = network.logits(x).cross_entropy(labels);
    if seed.is_multiple_of(2) {
        trace.minimize(loss, Adam::new(1e-2))
    } else {
        trace.minimize(loss, Sgd::new(0.1).momentum(0.9))
    }
    let program = session.compile(&trace, [loss])?;
    let mut noise = noise(seed as u64);
    let feeds: Vec<_> = [most, 37, 1]
        .into_iter()
        .map(|n| {
            let x = ArrayD::from_shape_simple_fn(IxDyn(&[n, 2, SIDE, SIDE]), &mut noise);
            (x, Array1::from_shape_fn(n, |i| (i % 7) as i32).into_dyn())
        })
        .collect();
    Ok(Trained::of(session, program, feeds))
}

/// The trained network; `None` if its budget was refused with more bytes needed than it has.
fn unless_refused(trained: Result<Trained>) -> Option<Trained> {
    match trained {
        Ok(trained) => Some(trained),
        Err(Error::Budget { budget, needed, .. }) => {
            assert!(budget < needed, "{budget} {needed}");
            None
        }
        Err(other) => panic!("{other}"),
    }
}

/// Masks are drawn by position in the batch, statistics are of the whole batch, and every sum has
/// one order.
#[test]
fn random_networks_train_to_the_same_bits_in_micro_batches() {
    let (mut sliced, mut again) = (0, 0);
    for (seed, percent, check_memory) in [
        (0, 40, false),
        (1, 60, false),
        (2, 60, true),
        (2, 40, false),
        (4, 60, false),
        (5, 60, true),
    ] {
        let all = train(seed, Budget::Unlimited, false).expect("it compiles");
        let Some(within) = unless_refused(train(
            seed,
            Budget::Fraction(percent as f64 / 100.0),
            check_memory,
        )) else {
            continue;
        };
        let plan = within.program.plan();
        // Guards behind buffers count towards the bytes to halve, too.
        assert!(
            check_memory || plan.slab_bytes() * 100 <= all.program.plan().slab_bytes() * percent,
            "{plan}"
        );
        assert_eq!(within.session.last_run().peak_slab_bytes, plan.slab_bytes());
        within.assert_same(&all, &format!("network {seed} within {percent} %"));
        sliced += usize::from(plan.budget_report().micro_batched.is_some());
        again += usize::from(
            plan.budget_report().micro_batched.is_some() && !plan.budget_report().tasks.is_empty(),
        );
    }
    assert!(
        sliced >= 4 && again >= 2,
        "{sliced} programs in slices, {again} of them with slices that run again"
    );
}

/// Steps of the built-in perceptron on whole batches and on smaller ones.
fn perceptron(budget: Budget, threads: usize, options: CompileOptions) -> Result<Trained> {
    let params = Params::seeded(6);
    let network = Model::Mlp.build(&params);
    let mut session = session(params, budget, threads).with_options(options);
    let program = network.training(&mut session, Dim::Fixed(64), OptimizerKind::Sgd)?;
    let feeds: Vec<_> = [1, 2, 3]
        .into_iter()
        .map(|seed| {
            let (Examples::Images(images), labels) = Model::Mlp.batch(64, seed) else {
                panic!("images")
            };
            (images, labels)
        })
        .collect();
    Ok(Trained::of(session, program, feeds))
}

/// Its largest workspaces are larger than all that its kernels touch.
#[test]
fn workspaces_grow_into_the_available_bytes() {
    let isas = Isa::available();
    for (isa, threads) in isas.into_iter().flat_map(|isa| [(isa, 1), (isa, 2)]) {
        let all = CompileOptions {
            isa: Some(isa),
            ..CompileOptions::default()
        };
        let roomy = CompileOptions {
            measures: Measures {
                small_workspaces: false,
                ..Measures::default()
            },
            ..all
        };
        let case = format!("{isa}, {threads} threads");
        let whole = perceptron(Budget::Unlimited, threads, all).expect("it compiles");
        let once = whole.program.plan().slab_bytes();
        let mut workspaces = vec![];
        for percent in [70, 80, 85, 90, 95] {
            let within = perceptron(Budget::Fraction(percent as f64 / 100.0), threads, all);
            // What the kernels touch, and the smallest workspaces, take more than half of the slab;
            // how much depends on the vectors and on the threads.
            let within = match within {
                Err(Error::Budget { budget, needed, .. }) if percent < 85 => {
                    assert!(budget < needed, "{case}: {budget} {needed}");
                    continue;
                }
                within => within.unwrap_or_else(|e| panic!("{case}, {percent} %: {e}")),
            };
            let plan = within.program.plan();
            assert!(
                plan.slab_bytes() * 100 <= once * percent && plan.budget_report().tasks.is_empty(),
                "{case}: {plan}"
            );
            assert_eq!(within.session.last_run().peak_slab_bytes, plan.slab_bytes());
            within.assert_same(&whole, &format!("{case} within {percent} %"));
            let tasks = plan.dag().tasks.iter();
            workspaces.push(tasks.map(|task| task.workspace).sum::<u64>());
        }
        // Additional memory is used, where the next size of a workspace fits into it.
        assert!(
            workspaces.is_sorted() && workspaces[0] < workspaces[workspaces.len() - 1],
            "{case}: {workspaces:?}"
        );
        let Some(Error::Budget { budget, needed, .. }) =
            perceptron(Budget::Fraction(0.5), threads, roomy).err()
        else {
            panic!("{case}: too small")
        };
        assert!(budget < needed, "{case}: {budget} {needed}");
    }
}

/// Layers with weights that are small beside a batch of their inputs: their gradients are
/// accumulated over micro-batches, in batches of one k-block and of several.
#[test]
fn dense_layers_accumulate_gradients_over_micro_batches() {
    let train = |budget: Budget, threads: usize| {
        let params = Params::seeded(3);
        let at = params.root();
        let sizes = [24, 40, 33, 6];
        let layers: Vec<Linear> = sizes
            .windows(2)
            .enumerate()
            .map(|(i, s)| Linear::new(&at / format!("l{i}").as_str(), s[0], s[1]))
            .collect();
        let mut session = session(params, budget, threads);
        let trace = Trace::training();
        let batch = Dim::bounded("batch", 1400);
        let (x, labels) = (
            trace.input("x", F32, (batch, 24)),
            trace.input("labels", I32, (batch,)),
        );
        let logits = layers.iter().enumerate().fold(x, |h, (i, layer)| {
            if i == 0 {
                h.apply(layer)
            } else {
                h.tanh().apply(layer)
            }
        });
        let loss = logits.cross_entropy(labels);
        trace.minimize(loss, Adam::new(1e-2));
        let program = session.compile(&trace, [loss])?;
        let mut noise = noise(9);
        let feeds: Vec<_> = [1400, 1025, 512, 3, 1400]
            .into_iter()
            .map(|n| {
                let x = ArrayD::from_shape_simple_fn(IxDyn(&[n, 24]), &mut noise);
                (x, Array1::from_shape_fn(n, |i| (i % 6) as i32).into_dyn())
            })
            .collect();
        Result::Ok(Trained::of(session, program, feeds))
    };
    let all = train(Budget::Unlimited, 2).expect("it compiles");
    let mut summed = 0;
    for (percent, threads) in [(60, 1), (60, 2), (45, 2), (35, 2)] {
        let Some(within) = unless_refused(train(Budget::Fraction(percent as f64 / 100.0), threads))
        else {
            continue;
        };
        let plan = within.program.plan();
        assert_eq!(within.session.last_run().peak_slab_bytes, plan.slab_bytes());
        within.assert_same(&all, &format!("{threads} threads within {percent} %"));
        let is_sum = |name: &str| name.starts_with("sums of") && name.contains("matmul.grad");
        summed += usize::from(plan.dag().buffers.iter().any(|buffer| is_sum(&buffer.name)));
    }
    assert!(summed >= 2, "{summed} plans with sums of products");
}

/// Dynamic mode takes the buffers of micro-batches from the pool, and resident inputs are read one
/// micro-batch at a time.
#[test]
fn micro_batches_run_from_the_pool_and_on_resident_inputs() {
    let (images, labels) = Model::Cnn.batch(9, 3);
    let Examples::Images(images) = images else {
        panic!("images")
    };
    let mut losses = Vec::new();
    for (budget, dynamic) in [
        (Budget::Unlimited, false),
        (Budget::Fraction(0.5), true),
        (Budget::Fraction(0.5), false),
    ] {
        let params = Params::seeded(5);
        let network = Model::Cnn.build(&params);
        let mut session = session(params, budget, 2);
        let program = network
            .training(&mut session, Dim::bounded("batch", 16), OptimizerKind::Sgd)
            .expect("it fits");
        assert_eq!(
            program.plan().budget_report().micro_batched.is_some(),
            budget != Budget::Unlimited
        );
        let (x, y) = (
            session.upload("images", &images).expect("room"),
            session.upload("labels", &labels).expect("room"),
        );
        let run = |session: &mut Session| {
            let loss = if dynamic {
                session.run_dynamic(&program, (&x, &y))
            } else {
                session.run(&program, (&x, &y))
            };
            loss.expect("a step")[0].item().to_bits()
        };
        losses.push([run(&mut session), run(&mut session)]);
    }
    assert!(
        losses[0][0] != losses[0][1] && losses.iter().all(|l| *l == losses[0]),
        "{losses:?}"
    );
}

/// Sums of a batch of texts whose length varies too: in micro-batches they have the same bits at
/// every length below the bound.
#[test]
fn lengths_below_the_bound_beside_a_batch() {
    let train = |budget: Budget| {
        let params = Params::seeded(4);
        let at = params.root();
        let layers = [(24, 32), (32, 32), (32, 8)];
        let layers: Vec<Linear> = layers
            .into_iter()
            .enumerate()
            .map(|(i, (from, to))| Linear::new(&at / &format!("layer{i}"), from, to))
            .collect();
        let trace = Trace::training();
        let (batch, length) = (Dim::bounded("batch", 32), Dim::bounded("length", 64));
        let x = trace.input("x", F32, (batch, length, 24));
        let y = layers.iter().fold(x, |x, layer| x.apply(layer).tanh());
        let loss = y.square().mean();
        trace.minimize(loss, Sgd::new(0.1));
        let mut session = session(params, budget, 2);
        let program = session.compile(&trace, [loss])?;
        let mut noise = noise(5);
        let feeds = [(32, 64), (32, 10), (9, 33), (32, 1), (1, 7)];
        let feeds: Vec<_> = feeds
            .into_iter()
            .map(|(n, length)| {
                (ArrayD::from_shape_simple_fn(
                    IxDyn(&[n, length, 24]),
                    &mut noise,
                ),)
            })
            .collect();
        Ok::<_, Error>(Trained::of(session, program, feeds))
    };
    let whole = train(Budget::Unlimited).expect("it compiles");
    let mut smaller = 0;
    for percent in [90, 80, 70, 60, 50] {
        let Some(within) = unless_refused(train(Budget::Fraction(f64::from(percent) / 100.0)))
        else {
            continue;
        };
        smaller += 1;
        within.assert_same(&whole, &format!("within {percent} %"));
    }
    assert!(smaller >= 2, "{smaller} budgets");
}
