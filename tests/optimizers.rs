//! Compiled optimizers against loops in f64: thirty steps of linear regression, whose gradient is
//! written out here.

use ndarray::{Array2, arr0};
use slabwise::nn::Linear;
use slabwise::optim::{Adam, AdamW, Group, Plateau, Schedule, Sgd};
use slabwise::prelude::*;

const STEPS: usize = 30;
const ROWS: usize = 7;
const INPUTS: usize = 3;
const OUTPUTS: usize = 2;
const WEIGHTS: usize = INPUTS * OUTPUTS;

/// Examples and targets of a step.
fn data(step: usize) -> (Array2<f32>, Array2<f32>) {
    let mut draw = slabwise_models::noise(step as u64);
    let x = Array2::from_shape_simple_fn((ROWS, INPUTS), || draw() * 2.0 - 1.0);
    (
        x,
        Array2::from_shape_simple_fn((ROWS, OUTPUTS), || draw() * 4.0 - 2.0),
    )
}

fn model(optimizer: impl Optimizer) -> (Session, Program<1>) {
    let params = Params::seeded(11);
    let layer = Linear::new(&params.root() / "a", INPUTS, OUTPUTS);
    let trace = Trace::training();
    let (x, y) = (
        trace.input("x", F32, (ROWS, INPUTS)),
        trace.input("y", F32, (ROWS, OUTPUTS)),
    );
    let loss = (x.apply(&layer) - y).square().sum();
    trace.minimize(loss, optimizer);
    let mut session = Session::new(Device::Cpu, params)
        .expect("a session")
        .with_threads(2);
    let program = session.compile(&trace, [loss]).expect("it compiles");
    (session, program)
}

/// Weights, then biases.
fn parameters(session: &Session) -> Vec<f64> {
    let values = ["a.weight", "a.bias"].map(|name| session.value(name).expect("it is there"));
    values.iter().flatten().map(|&v| f64::from(v)).collect()
}

/// The gradient of Σ (x·Wᵀ + b − y)².
fn gradient(w: &[f64], step: usize) -> Vec<f64> {
    let (x, y) = data(step);
    let mut g = vec![0.0; w.len()];
    for r in 0..ROWS {
        for o in 0..OUTPUTS {
            let product: f64 = (0..INPUTS)
                .map(|i| w[o * INPUTS + i] * f64::from(x[[r, i]]))
                .sum();
            let error = 2.0 * (product + w[WEIGHTS + o] - f64::from(y[[r, o]]));
            for i in 0..INPUTS {
                g[o * INPUTS + i] += error * f64::from(x[[r, i]]);
            }
            g[WEIGHTS + o] += error;
        }
    }
    g
}

/// Runs an optimizer, and `rule` beside it: (step from 1, weights, gradient, two states) → new
/// weights.
#[track_caller]
fn follows(
    optimizer: impl Optimizer,
    rule: impl FnMut(usize, &mut [f64], &[f64], &mut [Vec<f64>; 2]),
) {
    follows_with(optimizer, |_, _| {}, rule);
}

#[track_caller]
fn follows_with(
    optimizer: impl Optimizer,
    mut between: impl FnMut(usize, &mut Session),
    mut rule: impl FnMut(usize, &mut [f64], &[f64], &mut [Vec<f64>; 2]),
) {
    let (mut session, program) = model(optimizer);
    let mut w = parameters(&session);
    let start = w.clone();
    let mut states = [vec![0.0; w.len()], vec![0.0; w.len()]];
    for step in 1..=STEPS {
        between(step, &mut session);
        let g = gradient(&w, step);
        rule(step, &mut w, &g, &mut states);
        let (x, y) = data(step);
        session.run(&program, (&x, &y)).expect("a step");
        for (i, (got, want)) in parameters(&session).into_iter().zip(&w).enumerate() {
            // Thirty roundings of f32, which the loop contracts.
            assert!(
                (got - want).abs() <= 2e-5 * (1.0 + want.abs()),
                "step {step}, weight {i}: {got}, the formula gives {want}"
            );
        }
    }
    assert!(
        w.iter().zip(&start).all(|(a, b)| (a - b).abs() > 1e-3),
        "the weights moved: {start:?} to {w:?}"
    );
}

#[test]
fn sgd() {
    follows(Sgd::new(0.01), |_, w, g, _| {
        for (w, g) in w.iter_mut().zip(g) {
            *w -= 0.01 * g;
        }
    });
}

#[test]
fn sgd_with_momentum_nesterov_and_weight_decay() {
    for (nesterov, decay) in [(false, 0.0), (true, 0.0), (false, 0.05), (true, 0.05)] {
        let optimizer = Sgd::new(0.005).momentum(0.8).weight_decay(decay);
        let optimizer = if nesterov {
            optimizer.nesterov()
        } else {
            optimizer
        };
        follows(optimizer, |_, w, g, [v, _]| {
            for i in 0..w.len() {
                let g = g[i] + decay * w[i];
                v[i] = 0.8 * v[i] + g;
                w[i] -= 0.005 * if nesterov { g + 0.8 * v[i] } else { v[i] };
            }
        });
    }
}

/// The step of Adam without its weight decay.
fn adam(
    t: usize,
    rate: f64,
    [b1, b2]: [f64; 2],
    eps: f64,
    w: &mut [f64],
    g: &[f64],
    [m, v]: &mut [Vec<f64>; 2],
) {
    for i in 0..w.len() {
        m[i] = b1 * m[i] + (1.0 - b1) * g[i];
        v[i] = b2 * v[i] + (1.0 - b2) * g[i] * g[i];
        let (m, v) = (
            m[i] / (1.0 - b1.powi(t as i32)),
            v[i] / (1.0 - b2.powi(t as i32)),
        );
        w[i] -= rate * m / (v.sqrt() + eps);
    }
}

#[test]
fn adam_and_adamw() {
    follows(Adam::new(0.02), |t, w, g, s| {
        adam(t, 0.02, [0.9, 0.999], 1e-8, w, g, s)
    });
    follows(Adam::new(0.02).betas(0.5, 0.9).eps(0.1), |t, w, g, s| {
        adam(t, 0.02, [0.5, 0.9], 0.1, w, g, s)
    });
    follows(AdamW::new(0.02).weight_decay(0.1), |t, w, g, s| {
        w.iter_mut().for_each(|w| *w -= 0.02 * 0.1 * *w);
        adam(t, 0.02, [0.9, 0.999], 1e-8, w, g, s);
    });
}

#[test]
fn clipping_by_the_global_norm() {
    let mut clipped = 0;
    for max in [3.0, 12.0] {
        follows(
            Sgd::new(0.01).momentum(0.5).clip_norm(max),
            |_, w, g, [v, _]| {
                let norm = g.iter().map(|g| g * g).sum::<f64>().sqrt();
                let factor = (max / (norm + 1e-6)).min(1.0);
                clipped += usize::from(factor < 1.0);
                for i in 0..w.len() {
                    v[i] = 0.5 * v[i] + factor * g[i];
                    w[i] -= 0.01 * v[i];
                }
            },
        );
    }
    assert!(
        (5..2 * STEPS - 5).contains(&clipped),
        "some gradients are clipped, others are not: {clipped}"
    );
}

#[test]
fn clipping_by_value() {
    let mut clipped = 0;
    follows(
        Sgd::new(0.01).momentum(0.5).clip_value(1.5),
        |_, w, g, [v, _]| {
            for i in 0..w.len() {
                clipped += usize::from(g[i].abs() > 1.5);
                v[i] = 0.5 * v[i] + g[i].clamp(-1.5, 1.5);
                w[i] -= 0.01 * v[i];
            }
        },
    );
    assert!(
        (20..STEPS * (WEIGHTS + OUTPUTS) - 20).contains(&clipped),
        "some numbers are clipped, others are not: {clipped}"
    );
}

/// Rate and decay of weight i: biases, which are of rank 1, are a group.
fn of_bias<T>(i: usize, bias: T, weight: T) -> T {
    if i < WEIGHTS { weight } else { bias }
}

#[test]
fn groups_have_rates_and_decays_of_their_own() {
    let biases = Group::new().weight_decay(0.0).rate_scale(3.0);
    follows(
        AdamW::new(0.02)
            .weight_decay(0.1)
            .group(|w| w.rank() < 2, biases),
        |t, w, g, s| {
            for (i, w) in w.iter_mut().enumerate() {
                *w *= 1.0 - 0.02 * of_bias(i, 0.0, 0.1);
            }
            let before = w.to_vec();
            adam(t, 0.02, [0.9, 0.999], 1e-8, w, g, s);
            for i in WEIGHTS..w.len() {
                w[i] = before[i] + 3.0 * (w[i] - before[i]);
            }
        },
    );
    // The last group that has a weight decides, rule by rule; a rule that it does not set comes
    // from the group before.
    let sgd = Sgd::new(Schedule::step(0.01, 7, 0.5)).weight_decay(0.05);
    let sgd = sgd
        .group(|_| true, Group::new().rate_scale(0.5).weight_decay(0.02))
        .group(|w| &*w.name == "a.bias", Group::new().rate_scale(2.0));
    follows(sgd.clip_norm(8.0), |t, w, g, _| {
        let norm = g.iter().map(|g| g * g).sum::<f64>().sqrt();
        let factor = (8.0 / (norm + 1e-6)).min(1.0);
        let rate = 0.01 * 0.5f64.powi((t as i32 - 1) / 7);
        for i in 0..w.len() {
            w[i] -= rate * of_bias(i, 2.0, 0.5) * (factor * g[i] + 0.02 * w[i]);
        }
    });
}

#[test]
fn averages_follow_the_weights() {
    let (mut session, program) = model(Adam::new(0.05).ema(0.8));
    let averages = |session: &Session| -> Vec<f64> {
        let values =
            ["ema.a.weight", "ema.a.bias"].map(|name| session.value(name).expect("it is there"));
        values.iter().flatten().map(|&v| f64::from(v)).collect()
    };
    let mut expected = parameters(&session);
    assert_eq!(
        averages(&session),
        expected,
        "an average starts as its weight"
    );
    for step in 1..=STEPS {
        let (x, y) = data(step);
        session.run(&program, (&x, &y)).expect("a step");
        let now = parameters(&session);
        expected
            .iter_mut()
            .zip(&now)
            .for_each(|(e, w)| *e = 0.8 * *e + 0.2 * w);
        for (got, want) in averages(&session).iter().zip(&expected) {
            assert!((got - want).abs() < 1e-5, "step {step}: {got}, not {want}");
        }
    }
    assert!(
        averages(&session)
            .iter()
            .zip(parameters(&session))
            .all(|(a, w)| (a - w).abs() > 1e-5)
    );
}

#[test]
fn schedules() {
    let half_cosine = |part: f64| (1.0 + (std::f64::consts::PI * part).cos()) / 2.0;
    let plain = |schedule: Schedule, rate: &dyn Fn(usize) -> f64| {
        follows(Sgd::new(schedule), |t, w, g, _| {
            // Steps completed before this one.
            let rate = rate(t - 1);
            w.iter_mut().zip(g).for_each(|(w, g)| *w -= rate * g);
        });
    };
    plain(Schedule::constant(0.01), &|_| 0.01);
    plain(Schedule::constant(0.01).warmup(8), &|done| {
        0.01 * ((done + 1) as f64 / 8.0).min(1.0)
    });
    plain(Schedule::step(0.02, 7, 0.5), &|done| {
        0.02 * 0.5f64.powi(done as i32 / 7)
    });
    plain(Schedule::cosine(0.02, 24), &|done| {
        0.02 * half_cosine((done as f64 / 24.0).min(1.0))
    });
    plain(Schedule::cosine(0.02, 24).warmup(4).floor(0.001), &|done| {
        let risen = ((done + 1) as f64 / 4.0).min(1.0);
        let part = (done.saturating_sub(4) as f64 / 20.0).min(1.0);
        risen * (0.001 + (0.02 - 0.001) * half_cosine(part))
    });
    follows(Adam::new(Schedule::step(0.05, 10, 0.1)), |t, w, g, s| {
        adam(
            t,
            0.05 * 0.1f64.powi((t as i32 - 1) / 10),
            [0.9, 0.999],
            1e-8,
            w,
            g,
            s,
        );
    });
}

#[test]
fn the_rate_is_set_by_hand_between_steps() {
    let rate = |step: usize| [0.01, 0.0, 0.02, 0.005][step % 4];
    let set = |step: usize, session: &mut Session| {
        if step == 1 {
            assert_eq!(
                session.value("optim.lr").expect("it is there"),
                arr0(0.3).into_dyn(),
                "the first value"
            );
        }
        session
            .set_value("optim.lr", &arr0(rate(step) as f32))
            .expect("a scalar");
    };
    follows_with(Sgd::new(Schedule::manual(0.3)), set, |t, w, g, _| {
        w.iter_mut().zip(g).for_each(|(w, g)| *w -= rate(t) * g);
    });
    // A rate of 0 leaves the weights alone, bit for bit.
    let (mut session, program) = model(Sgd::new(Schedule::manual(0.0)));
    let before = parameters(&session);
    let (x, y) = data(0);
    session.run(&program, (&x, &y)).expect("a step");
    assert_eq!(parameters(&session), before);
}

/// Rates that are set by hand and differ are not one state: neither in one program nor in two of one
/// session.
#[test]
fn rates_set_by_hand_are_named() {
    let compile =
        |session: &mut Session, params: &Params, optimizer: &dyn Fn(&Trace, Tensor<'_>)| {
            let layer = Linear::new(&params.root() / "a", INPUTS, OUTPUTS);
            let trace = Trace::training();
            let loss = trace
                .input("x", F32, (ROWS, INPUTS))
                .apply(&layer)
                .square()
                .sum();
            optimizer(&trace, loss);
            let program = session.compile(&trace, [loss]);
            program.map_err(|error| error.to_string())
        };
    let new = || {
        let params = Params::seeded(11);
        (
            Session::new(Device::Cpu, params.clone()).expect("a session"),
            params,
        )
    };
    let bias = |w: &slabwise_compiler::graph::VariableInfo| w.name.ends_with("bias");
    let starts = |one: f32, other: f32| format!("\"optim.lr\" starts as {one} and as {other} in");
    let help = "as in Adam::new(rate).named(\"head\")";

    let (mut session, params) = new();
    let line = line!() + 3;
    let error = compile(&mut session, &params, &|trace, loss| {
        let head = Adam::new(Schedule::manual(1e-3));
        trace.minimize(loss, Sgd::new(Schedule::manual(0.1)).using(bias, head));
    });
    let error = error.map(drop).expect_err("two rates");
    assert!(
        error.contains(&starts(1e-3, 0.1)) && error.contains(help),
        "{error}"
    );
    assert!(error.contains(&format!("optimizers.rs:{line}")), "{error}");

    for schedule in [
        Schedule::manual(0.1).then(100, Schedule::manual(0.01)),
        Schedule::manual(0.1).times(Schedule::manual(0.01)),
        Schedule::from(Plateau::new(0.1)).then(100, Plateau::new(0.01)),
    ] {
        let error = compile(&mut session, &params, &|trace, loss| {
            trace.minimize(loss, Sgd::new(schedule.clone()))
        });
        let error = error.map(drop).expect_err("two rates");
        assert!(
            error.contains("\"optim.lr\" starts as 0.1 and as 0.01 in"),
            "{error}"
        );
    }

    // With names each has its own; one rate may be shared.
    compile(&mut session, &params, &|trace, loss| {
        let head = Adam::new(Schedule::manual(1e-3)).named("head");
        trace.minimize(loss, Sgd::new(Schedule::manual(0.1)).using(bias, head));
    })
    .expect("two names");
    let rate = |session: &Session, name: &str| session.value(name).expect("a rate").sum();
    assert_eq!(rate(&session, "optim.lr"), 0.1);
    assert_eq!(rate(&session, "head.optim.lr"), 1e-3);
    let (mut session, params) = new();
    let shared = Schedule::manual(0.1);
    let program = compile(&mut session, &params, &|trace, loss| {
        let head = Sgd::new(shared.clone()).momentum(0.9);
        trace.minimize(loss, Sgd::new(shared.clone()).using(bias, head));
    });
    program.expect("one rate");
    session
        .set_value("optim.lr", &arr0(0.05))
        .expect("a scalar");

    // Programs of a session.
    let of = |rate: f64| {
        move |trace: &Trace, loss: Tensor<'_>| trace.minimize(loss, Sgd::new(Plateau::new(rate)))
    };
    compile(&mut session, &params, &of(0.1)).expect("the same rate");
    let error = compile(&mut session, &params, &of(0.2)).map(drop);
    let error = error.expect_err("another rate");
    assert!(
        error.contains(&starts(0.1, 0.2)) && error.contains(help),
        "{error}"
    );
    assert!(
        error.contains("the second of which is \"train\""),
        "{error}"
    );
    compile(&mut session, &params, &|trace, loss| {
        trace.minimize(loss, Sgd::new(Schedule::manual(0.2)).named("second"))
    })
    .expect("a name of its own");
}
