//! Several steps of every optimizer against its formulas in f64.

use super::*;
use crate::params::{Init, Params};
use crate::shape::Env;
use crate::tensor::tests::{finished, first_values};
use slabwise_compiler::reference::{Array, Precision, evaluate};
use slabwise_kernels::dtype::DType;

/// Steps of minimising a·w₀² + b·w₁² from w = (1, −2), with (a, b) = (0.5, 3); gives w after each
/// step, and the states' names.
fn descend(optimizer: impl Optimizer, steps: usize) -> (Vec<[f64; 2]>, Vec<String>) {
    descend_with(optimizer, steps, |_, _| {})
}

fn descend_with(
    optimizer: impl Optimizer,
    steps: usize,
    between: impl Fn(usize, &mut Vec<(String, Array)>),
) -> (Vec<[f64; 2]>, Vec<String>) {
    let params = Params::seeded(0);
    let trace = Trace::training();
    let read = |name, first| trace.param(&params.root().param(name, (), Init::Constant(first)));
    let (w0, w1) = (read("w0", 1.0), read("w1", -2.0));
    trace.minimize(w0.square() * 0.5 + w1.square() * 3.0, optimizer);
    let graph = finished(&trace, &[]);
    let names: Vec<String> = graph.variables.iter().map(|v| v.name.to_string()).collect();
    let mut held: Vec<(String, Array)> = names.iter().cloned().zip(first_values(&graph)).collect();
    let mut path = Vec::new();
    for step in 0..steps {
        between(step, &mut held);
        let variables: Vec<Array> = held.iter().map(|(_, a)| a.clone()).collect();
        let ran = evaluate(&graph, &Env::default(), &[], &variables, Precision::Single).unwrap();
        for ((_, slot), new) in held.iter_mut().zip(ran.assigned) {
            if let Some(new) = new {
                *slot = new;
            }
        }
        path.push([held[0].1.values[0], held[1].1.values[0]]);
    }
    (path, names[2..].to_vec())
}

/// The same in f64; `rule` gives the new weight from weight, gradient, step (from 1) and two
/// states.
fn expected(
    steps: usize,
    mut rule: impl FnMut(f64, f64, i32, &mut [f64; 2]) -> f64,
) -> Vec<[f64; 2]> {
    let (mut w, mut states) = ([1.0, -2.0], [[0.0; 2]; 2]);
    (1..=steps as i32)
        .map(|t| {
            for (i, slope) in [1.0, 6.0].into_iter().enumerate() {
                w[i] = rule(w[i], slope * w[i], t, &mut states[i]);
            }
            w
        })
        .collect()
}

#[track_caller]
fn assert_path(got: &[[f64; 2]], expected: &[[f64; 2]]) {
    assert_eq!(got.len(), expected.len());
    for (step, (g, e)) in got.iter().zip(expected).enumerate() {
        for i in 0..2 {
            assert!(
                (g[i] - e[i]).abs() <= 2e-6 * (1.0 + e[i].abs()),
                "step {step}: {g:?} instead of {e:?}"
            );
        }
    }
}

#[test]
fn sgd() {
    let (path, states) = descend(Sgd::new(0.1), 5);
    assert_path(&path, &expected(5, |w, g, _, _| w - 0.1 * g));
    assert!(states.is_empty(), "{states:?}");

    let (path, states) = descend(Sgd::new(0.05).momentum(0.9).weight_decay(0.01), 20);
    let momentum = |w: f64, g: f64, s: &mut [f64; 2]| {
        let g = g + 0.01 * w;
        s[0] = 0.9 * s[0] + g;
        g
    };
    let rule = |w, g, _, s: &mut [f64; 2]| {
        momentum(w, g, s);
        w - 0.05 * s[0]
    };
    assert_path(&path, &expected(20, rule));
    assert_eq!(states, ["sgd.momentum.w0", "sgd.momentum.w1"]);

    let (path, _) = descend(
        Sgd::new(0.05).momentum(0.9).weight_decay(0.01).nesterov(),
        20,
    );
    let rule = |w, g, _, s: &mut [f64; 2]| {
        let g = momentum(w, g, s);
        w - 0.05 * (g + 0.9 * s[0])
    };
    assert_path(&path, &expected(20, rule));
}

fn adam_rule(
    w: f64,
    g: f64,
    t: i32,
    s: &mut [f64; 2],
    [b1, b2]: [f64; 2],
    rate: f64,
    eps: f64,
) -> f64 {
    s[0] = b1 * s[0] + (1.0 - b1) * g;
    s[1] = b2 * s[1] + (1.0 - b2) * g * g;
    w - rate / (1.0 - b1.powi(t)) * s[0] / ((s[1] / (1.0 - b2.powi(t))).sqrt() + eps)
}

#[test]
fn adam() {
    let (path, states) = descend(Adam::new(0.02), 30);
    assert_path(
        &path,
        &expected(30, |w, g, t, s| {
            adam_rule(w, g, t, s, [0.9, 0.999], 0.02, 1e-8)
        }),
    );
    assert_eq!(
        states,
        [
            "optim.step",
            "adam.m.w0",
            "adam.v.w0",
            "adam.m.w1",
            "adam.v.w1"
        ]
    );

    let (path, _) = descend(Adam::new(0.02).betas(0.0, 0.5).eps(0.1), 10);
    assert_path(
        &path,
        &expected(10, |w, g, t, s| {
            adam_rule(w, g, t, s, [0.0, 0.5], 0.02, 0.1)
        }),
    );
}

#[test]
fn adamw() {
    let (path, states) = descend(AdamW::new(0.02).weight_decay(0.1), 30);
    let rule = |w: f64, g, t, s: &mut [f64; 2]| {
        adam_rule(w * (1.0 - 0.02 * 0.1), g, t, s, [0.9, 0.999], 0.02, 1e-8)
    };
    assert_path(&path, &expected(30, rule));
    assert_eq!(
        states[1..],
        ["adamw.m.w0", "adamw.v.w0", "adamw.m.w1", "adamw.v.w1"]
    );
}

#[test]
fn clipping_scales_all_gradients_together() {
    let (path, _) = descend(Sgd::new(0.1).clip_norm(2.0), 20);
    let mut w = [1.0f64, -2.0];
    let expected: Vec<[f64; 2]> = (0..20)
        .map(|_| {
            let g = [w[0], 6.0 * w[1]];
            let factor = (2.0 / ((g[0] * g[0] + g[1] * g[1]).sqrt() + 1e-6)).min(1.0);
            w = [w[0] - 0.1 * factor * g[0], w[1] - 0.1 * factor * g[1]];
            w
        })
        .collect();
    assert_path(&path, &expected);
}

/// The rate of each step, observed as the change that plain descent makes to a weight of slope 1.
fn rates(schedule: Schedule, steps: usize) -> Vec<f64> {
    let (path, _) = descend(Sgd::new(schedule), steps);
    let before = std::iter::once(1.0).chain(path.iter().map(|w| w[0]));
    before
        .zip(&path)
        .map(|(before, after)| 1.0 - after[0] / before)
        .collect()
}

#[track_caller]
fn assert_rates(schedule: Schedule, expected: &[f64]) {
    for (step, (got, expected)) in rates(schedule, expected.len())
        .iter()
        .zip(expected)
        .enumerate()
    {
        assert!(
            (got - expected).abs() < 3e-7,
            "step {step}: {got} instead of {expected}"
        );
    }
}

#[test]
fn schedules() {
    let cosine = |part: f64| 0.02 + 0.08 * 0.5 * (1.0 + (std::f64::consts::PI * part).cos());
    assert_rates(Schedule::constant(0.1), &[0.1; 3]);
    assert_rates(0.1f32.into(), &[0.1; 3]);
    assert_rates(
        Schedule::step(0.1, 2, 0.5),
        &[0.1, 0.1, 0.05, 0.05, 0.025, 0.025, 0.0125],
    );
    assert_rates(
        Schedule::cosine(0.1, 4).floor(0.02),
        &[0.1, cosine(0.25), cosine(0.5), cosine(0.75), 0.02, 0.02],
    );
    assert_rates(
        Schedule::constant(0.1).warmup(4),
        &[0.025, 0.05, 0.075, 0.1, 0.1],
    );
    assert_rates(
        Schedule::cosine(0.1, 6).floor(0.02).warmup(2),
        &[
            0.05,
            0.1,
            0.1,
            cosine(0.25),
            cosine(0.5),
            cosine(0.75),
            0.02,
            0.02,
        ],
    );
}

#[test]
fn a_manual_rate_is_a_state() {
    let (path, states) = descend_with(Sgd::new(Schedule::manual(0.1)), 4, |step, held| {
        if step == 2 {
            held.iter_mut()
                .filter(|(name, _)| name == "optim.lr")
                .for_each(|(_, rate)| rate.values[0] = 0.5);
        }
    });
    assert_path(
        &path,
        &expected(4, |w, g, t, _| w - if t <= 2 { 0.1 } else { 0.5 } * g),
    );
    assert_eq!(states, ["optim.lr"]);
}

#[test]
fn optimizers_share_one_step_counter() {
    let params = Params::seeded(0);
    let trace = Trace::training();
    let read = |name| trace.param(&params.root().param(name, (), Init::Constant(1.0)));
    trace.minimize(read("a").square(), Adam::new(0.1));
    trace.minimize(read("b").square(), AdamW::new(0.1));
    let graph = finished(&trace, &[]);
    let ran = evaluate(
        &graph,
        &Env::default(),
        &[],
        &first_values(&graph),
        Precision::Single,
    )
    .unwrap();
    let steps = graph.variable("optim.step").unwrap() as usize;
    assert_eq!(
        ran.assigned[steps],
        Some(Array {
            dtype: DType::I32,
            dims: vec![],
            values: vec![1.0]
        })
    );
}

#[test]
fn updates_are_nodes_of_their_own_phase_at_the_users_line() {
    use crate::graph::Phase;
    use crate::ops::Op;
    let params = Params::seeded(0);
    let layer = crate::nn::Linear::new(&params.root() / "head", 3, 2);
    let trace = Trace::training();
    let loss = trace
        .input("x", DType::F32, (4, 3))
        .apply(&layer)
        .square()
        .mean();
    let line = line!() + 1;
    trace.minimize(loss, Adam::new(1e-3));
    let graph = finished(&trace, &[loss]);
    let updates: Vec<_> = graph
        .ids()
        .filter(|&id| matches!(graph.node(id).op, Op::Assign(_)))
        .map(|id| graph.origin(id))
        .collect();
    assert_eq!(updates.len(), 7);
    assert!(updates.iter().all(|o| o.phase == Phase::Update
        && o.location.line() == line
        && o.location.file() == file!()));
    let of_weights = updates.iter().filter(|o| &*o.layer == "head").count();
    assert_eq!(of_weights, 6, "weight and bias, each with two averages");
    let backward = graph
        .ids()
        .filter(|&id| graph.origin(id).phase == Phase::Backward)
        .count();
    assert!(backward > 0);
}
