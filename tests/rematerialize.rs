//! Rematerialization in the backward pass: the same values in less memory.

mod support;

use ndarray::ArrayD;
use slabwise::CompileOptions;
use slabwise::nn::{BatchNorm2d, Conv2d, Dropout};
use slabwise::optim::Sgd;
use slabwise::params::Init;
use slabwise::prelude::*;
use slabwise::shape::Dims;
use slabwise_compiler::graph::{Graph, Phase};
use slabwise_compiler::ops::GraphBuilder;
use slabwise_compiler::passes::autodiff::gradients;
use slabwise_compiler::passes::simplify::{Simplify, simplify};
use slabwise_compiler::passes::{Fuse, rematerialize};
use slabwise_compiler::reference::{Precision, evaluate, same_bits};
use slabwise_kernels::scalar::ScalarOp;
use slabwise_kernels::spec::ReduceOp;
use slabwise_models::{Examples, Gpt, Model};
use support::random_graph::RandomGraph;
use support::{Rng, array, dims, graph, input, variable};

/// Products by weights with random elementwise operations, centring, views and branches between
/// them; and the gradients of the weights.
fn random_network(seed: u64) -> (Graph, Vec<Dims>) {
    let (mut rng, mut g, square) = (Rng(seed), graph(), dims(&[4, 4]));
    let mut values = vec![input(&mut g, F32, &square)];
    let mut weights = Vec::new();
    for _ in 0..14 {
        let [x, y] = [0, 0].map(|_| values[values.len() - 1 - rng.below(values.len().min(3))]);
        let new = match rng.below(8) {
            0 | 1 => {
                weights.push(variable(&mut g, F32, &square, Init::Constant(0.0)));
                let weight = *weights.last().expect("just put there");
                g.matmul(x, weight)
            }
            2 => g.add(x, y),
            3 => g.mul(x, y),
            4 => g.scalar(
                rng.pick(&[ScalarOp::Tanh, ScalarOp::Relu, ScalarOp::Neg]),
                &[x],
            ),
            5 => g.permute(x, &[1, 0]),
            _ => {
                let axis = rng.below(2);
                let sum = g.reduce(ReduceOp::Sum, x, &[axis]);
                let wide = g.broadcast(sum, &square);
                g.scalar(ScalarOp::Sub, &[x, wide])
            }
        };
        values.push(new);
    }
    let last = g.scalar(ScalarOp::Tanh, &[values[values.len() - 1]]);
    let found = gradients(&mut g, last, &weights);
    g.outputs = found.into_iter().flatten().chain([last]).collect();
    let shapes = vec![square; weights.len()];
    (g, shapes)
}

#[test]
fn random_networks_keep_their_bits() {
    let mut rematerialized = 0;
    for seed in 0..300 {
        let (network, weights) = random_network(seed);
        let before = simplify(&network, &Simplify::default());
        let after = rematerialize(&before, Some(1));
        assert_eq!(after.verify(), Ok(()), "seed {seed}");
        rematerialized += usize::from(
            after
                .ids()
                .any(|id| after.origin(id).phase == Phase::Recompute),
        );
        let mut rng = Rng(seed);
        let mut draw = || array(&mut rng, F32, &[4, 4], (-1.0, 1.0), 1);
        let (inputs, variables) = ([draw()], weights.iter().map(|_| draw()).collect::<Vec<_>>());
        let run = |g: &Graph| {
            evaluate(
                g,
                &g.symbols.bounds(),
                &inputs,
                &variables,
                Precision::Single,
            )
            .expect("it evaluates")
            .outputs
        };
        let same = run(&before)
            .iter()
            .zip(run(&after))
            .all(|(a, b)| same_bits(a, &b));
        assert!(same, "seed {seed}\nbefore:\n{before}after:\n{after}");
    }
    assert!(
        rematerialized > 60,
        "in {rematerialized} of 300 networks values are recomputed"
    );
}

#[test]
fn random_graphs_keep_their_bits() {
    for seed in 0..100 {
        let random = RandomGraph::new(seed, 50);
        let before = simplify(&random.graph, &Simplify::default());
        let after = rematerialize(&before, Some(1));
        assert_eq!(after.verify(), Ok(()), "seed {seed}");
        let env = random.env(3);
        let (inputs, variables) = random.arguments(&env);
        let [a, b] = [&before, &after].map(|g| {
            evaluate(g, &env, &inputs, &variables, Precision::Single).expect("it evaluates")
        });
        assert!(
            a.outputs
                .iter()
                .zip(&b.outputs)
                .all(|(x, y)| same_bits(x, y)),
            "seed {seed}\nbefore:\n{before}after:\n{after}"
        );
        let put = a.assigned.iter().zip(&b.assigned);
        assert!(
            put.clone().all(|(x, y)| x.is_some() == y.is_some()),
            "seed {seed}"
        );
        assert!(
            put.flat_map(|(x, y)| x.iter().zip(y))
                .all(|(x, y)| same_bits(x, y)),
            "seed {seed}"
        );
    }
}

/// Losses of a few steps, the slab's bytes, and the number of kernels that recompute.
fn train(
    options: CompileOptions,
    x: &Examples,
    y: &ArrayD<i32>,
    logits: impl for<'t> Fn(&Scope, Tensor<'t>) -> Tensor<'t>,
) -> (Vec<f32>, u64, usize) {
    let params = Params::seeded(2);
    let trace = Trace::training();
    let x_t = match x {
        Examples::Images(images) => trace.input("x", F32, images.shape()),
        Examples::Tokens(tokens) => trace.input("x", I32, tokens.shape()),
    };
    let loss = logits(&params.root(), x_t).cross_entropy(trace.input("y", I32, y.shape()));
    trace.minimize(loss, Sgd::new(0.05).momentum(0.9));
    let mut session = Session::new(Device::Cpu, params)
        .expect("a session")
        .with_threads(2)
        .with_options(options);
    let program = session.compile(&trace, [loss]).expect("it compiles");
    let losses = (0..4)
        .map(|_| session.run(&program, (x, y)).expect("a step")[0].item())
        .collect();
    let recomputed = program
        .plan()
        .steps()
        .filter(|name| name.contains("recomputed"))
        .count();
    assert_eq!(
        session.last_run().peak_slab_bytes,
        program.plan().slab_bytes()
    );
    (losses, program.plan().slab_bytes(), recomputed)
}

/// Trains with and without; the loss is the same but for the rounding of sums, and the slab at most
/// `share` of its size without.
fn compare(
    what: &str,
    share: f64,
    x: &Examples,
    y: &ArrayD<i32>,
    logits: impl for<'t> Fn(&Scope, Tensor<'t>) -> Tensor<'t>,
) {
    let kept = CompileOptions {
        fuse: Fuse {
            recompute: false,
            ..Fuse::default()
        },
        ..CompileOptions::default()
    };
    let (expected, without, none) = train(kept, x, y, &logits);
    let (losses, with, _) = train(CompileOptions::default(), x, y, &logits);
    assert_eq!(none, 0, "{what}");
    assert!(
        losses
            .iter()
            .zip(&expected)
            .all(|(a, b)| (a - b).abs() <= 2e-5 * b),
        "{what}: {losses:?} instead of {expected:?}"
    );
    assert!(losses[0] != losses[3], "{what}: it trains");
    assert!(
        with as f64 <= share * without as f64,
        "{what}: {with} bytes, without it {without}"
    );
}

#[test]
fn norms_and_activations_are_recomputed() {
    let (x, y) = Model::ResNet20.batch(2, 3);
    compare("blocks", 0.8, &x, &y, |at, x| {
        let mut x = x.apply(&Conv2d::new(at / "stem", 3, 8, 3).padding(1));
        for i in 0..4 {
            let at = at / &i.to_string();
            let inner = x
                .apply(&BatchNorm2d::new(&at / "norm1", 8))
                .relu()
                .apply(&Conv2d::new(&at / "conv1", 8, 8, 3).padding(1));
            x = x + inner
                .apply(&BatchNorm2d::new(&at / "norm2", 8))
                .relu()
                .apply(&Conv2d::new(&at / "conv2", 8, 8, 3).padding(1));
        }
        x.mean_over(3)
            .mean_over(2)
            .apply(&slabwise::nn::Linear::new(at / "head", 8, 10))
    });
    let gpt = Gpt {
        layers: 3,
        width: 64,
        heads: 2,
        length: 32,
        vocabulary: 64,
        tied: false,
    };
    let (x, y) = Model::Gpt(gpt).batch(4, 1);
    compare("transformer", 0.9, &x, &y, |at, x| x.apply(&gpt.layers(at)));
}

/// A recomputed dropout mask is the same mask, because otherwise the gradient would be of another
/// function.
#[test]
fn dropout_repeats_its_mask() {
    let (x, y) = Model::ResNet20.batch(2, 5);
    compare("dropout", 0.95, &x, &y, |at, x| {
        let mut x = x.apply(&Conv2d::new(at / "stem", 3, 8, 3).padding(1));
        for i in 0..3 {
            let at = at / &i.to_string();
            let normed = x
                .apply(&BatchNorm2d::new(&at / "norm", 8))
                .tanh()
                .apply(&Dropout(0.3));
            x = normed.apply(&Conv2d::new(&at / "conv", 8, 8, 3).padding(1));
        }
        x.mean_over(3)
            .mean_over(2)
            .apply(&slabwise::nn::Linear::new(at / "head", 8, 10))
    });
}

fn exp_tanh<'t>(x: Tensor<'t>, kept: &str) -> Tensor<'t> {
    let y = if kept == "exp" {
        x.exp().keep()
    } else {
        x.exp()
    };
    if kept == "tanh" {
        y.tanh().keep()
    } else {
        y.tanh()
    }
}

/// A pinned tensor is recomputed neither in a checkpointed segment nor because it is cheap.
#[test]
fn pinned_values_are_not_recomputed() {
    let again = |kept: &str, segment: bool| {
        let trace = Trace::training();
        let x = trace.input("x", F32, (64, 64));
        let params = Params::seeded(1);
        let [first, last] =
            ["first", "last"].map(|name| slabwise::nn::Linear::new(&params.root() / name, 64, 64));
        let x = x.apply(&first);
        let y = if segment {
            x.checkpoint(|x| exp_tanh(x, kept))
        } else {
            exp_tanh(x, kept)
        };
        let loss = y.apply(&last).square().sum();
        trace.minimize(loss, Sgd::new(0.1));
        let graph = trace.finish(&[loss]).expect("no mistakes");
        let graph = rematerialize(&simplify(&graph, &Simplify::default()), Some(1));
        let made = graph
            .ids()
            .filter(|id| graph.origin(*id).phase == Phase::Recompute)
            .map(|id| graph.node(id).op.name().to_owned());
        made.collect::<Vec<_>>()
    };
    // In a segment all inner values are recomputed; elsewhere only those that are cheap functions
    // of values in memory.
    for (operation, segment) in [("exp", true), ("tanh", false)] {
        let (made, kept) = (again("", segment), again(operation, segment));
        assert!(
            made.iter().any(|op| op == operation) && kept.iter().all(|op| op != operation),
            "{operation}: {made:?}, kept {kept:?}"
        );
    }
}
