//! Every optimizer over ten steps of a small model, and every schedule over forty, against recorded
//! numbers; and what all optimizers have in common: saving, budgets, groups, names.

use ndarray::{ArrayD, arr0};
use slabwise::nn::Linear;
use slabwise::optim::{
    Adadelta, Adafactor, Adagrad, Adam, AdamW, Adamax, Cyclic, Group, Lamb, Lion, Muon, NAdam,
    OneCycle, Plateau, RAdam, RmsProp, Schedule, Sgd, WarmRestarts,
};
use slabwise::prelude::*;
use slabwise::weights::File;

use crate::{Case, STEPS, path};

const ROWS: usize = 6;
const WEIGHTS: [&str; 3] = ["first.weight", "first.bias", "last.weight"];

fn case() -> Case {
    let file = path("optimizers", "").with_file_name("optimizers.safetensors");
    Case {
        name: "optimizers",
        file: File::open(file).expect("recorded"),
    }
}

type Rule = Box<dyn Optimizer>;

/// Every optimizer as `record.py` names it.
fn optimizers() -> Vec<(&'static str, Rule)> {
    vec![
        ("rmsprop", Box::new(RmsProp::new(0.01)) as Rule),
        (
            "rmsprop_all",
            Box::new(
                RmsProp::new(0.01)
                    .alpha(0.9)
                    .eps(1e-6)
                    .weight_decay(0.1)
                    .momentum(0.8)
                    .centered(),
            ),
        ),
        ("adagrad", Box::new(Adagrad::new(0.05))),
        (
            "adagrad_all",
            Box::new(
                Adagrad::new(0.05)
                    .rate_decay(0.1)
                    .weight_decay(0.1)
                    .first_sum(0.1)
                    .eps(1e-6),
            ),
        ),
        ("adadelta", Box::new(Adadelta::new(1.0))),
        (
            "adadelta_all",
            Box::new(Adadelta::new(5.0).rho(0.8).eps(1e-4).weight_decay(0.1)),
        ),
        ("adamax", Box::new(Adamax::new(0.02))),
        (
            "adamax_all",
            Box::new(
                Adamax::new(0.02)
                    .betas(0.8, 0.95)
                    .eps(1e-6)
                    .weight_decay(0.1),
            ),
        ),
        ("nadam", Box::new(NAdam::new(0.02))),
        (
            "nadam_all",
            Box::new(
                NAdam::new(0.02)
                    .betas(0.8, 0.95)
                    .eps(1e-6)
                    .weight_decay(0.1)
                    .momentum_decay(0.1),
            ),
        ),
        (
            "nadam_decoupled",
            Box::new(NAdam::new(0.02).weight_decay(0.1).decoupled()),
        ),
        ("radam", Box::new(RAdam::new(0.02))),
        (
            "radam_all",
            Box::new(
                RAdam::new(0.02)
                    .betas(0.8, 0.95)
                    .eps(1e-6)
                    .weight_decay(0.1),
            ),
        ),
        (
            "radam_decoupled",
            Box::new(RAdam::new(0.02).weight_decay(0.1).decoupled()),
        ),
        ("radam_short", Box::new(RAdam::new(0.02).betas(0.8, 0.5))),
        (
            "adam_amsgrad",
            Box::new(Adam::new(0.05).betas(0.9, 0.7).amsgrad()),
        ),
        (
            "adamw_amsgrad",
            Box::new(AdamW::new(0.05).betas(0.9, 0.7).weight_decay(0.1).amsgrad()),
        ),
        (
            "sgd_maximize",
            Box::new(Sgd::new(0.05).momentum(0.9).weight_decay(0.1).maximize()),
        ),
        ("adam_maximize", Box::new(Adam::new(0.05).maximize())),
        ("adafactor", Box::new(Adafactor::new(0.1))),
        (
            "adafactor_all",
            Box::new(
                Adafactor::new(0.5)
                    .exponent(-0.5)
                    .eps(1e-5, 1e-2)
                    .clip(1.5)
                    .weight_decay(0.1),
            ),
        ),
        ("lion", Box::new(Lion::new(0.01))),
        (
            "lion_all",
            Box::new(Lion::new(0.01).betas(0.8, 0.95).weight_decay(0.1)),
        ),
        ("lamb", Box::new(Lamb::new(0.05).weight_decay(0.01))),
        (
            "lamb_all",
            Box::new(Lamb::new(0.05).betas(0.8, 0.95).eps(1e-4).weight_decay(0.0)),
        ),
        (
            "muon",
            Box::new(Muon::new(0.02).using(|w| w.rank() != 2, AdamW::new(0.02))),
        ),
        (
            "muon_all",
            Box::new(
                Muon::new(0.02)
                    .momentum(0.8)
                    .plain_momentum()
                    .weight_decay(0.5)
                    .match_adamw()
                    .using(|w| w.rank() != 2, AdamW::new(0.02)),
            ),
        ),
    ]
}

/// A session that trains the small model, with the recorded first weights.
fn model(case: &Case, optimizer: impl Optimizer) -> (Session, Program<1>) {
    let params = Params::seeded(0);
    let first = Linear::new(&params.root() / "first", 4, 5);
    let last = Linear::without_bias(&params.root() / "last", 5, 2);
    let trace = Trace::training();
    let x = trace.input("x", F32, (ROWS, 4));
    let y = trace.input("y", F32, (ROWS, 2));
    let loss = x.apply(&first).tanh().apply(&last).mse(y);
    trace.minimize(loss, optimizer);
    let mut session = Session::new(Device::Cpu, params)
        .expect("a session")
        .with_threads(2);
    let program = session.compile(&trace, [loss]).expect("it compiles");
    for name in WEIGHTS {
        session
            .set_value(name, &case.floats(&format!("start.{name}")))
            .expect("it is declared");
    }
    (session, program)
}

fn step(case: &Case, session: &mut Session, program: &Program<1>, step: usize) {
    let rows = |name| {
        let all = case.floats(name);
        all.slice_axis(
            ndarray::Axis(0),
            ndarray::Slice::from(step * ROWS..(step + 1) * ROWS),
        )
        .to_owned()
    };
    session
        .run(program, (&rows("x"), &rows("y")))
        .expect("a step");
}

fn weights(session: &Session) -> Vec<f32> {
    let values = WEIGHTS.map(|name| session.value(name).expect("it is there"));
    values.iter().flatten().copied().collect()
}

#[test]
fn optimizers_follow_the_recorded_steps() {
    let case = case();
    for (name, optimizer) in optimizers() {
        let (mut session, program) = model(&case, optimizer);
        let expected = case.floats(&format!("optimizer.{name}"));
        for (i, expected) in expected.outer_iter().enumerate() {
            step(&case, &mut session, &program, i);
            for (k, (got, want)) in weights(&session).iter().zip(expected).enumerate() {
                assert!(
                    (got - want).abs() <= 1e-5 * (1.0 + want.abs()),
                    "{name}: step {i}, weight {k}: {got} instead of {want}"
                );
            }
        }
    }
}

/// All numbers of a session by name, as bits.
fn everything(session: &Session, names: &[&str]) -> Vec<(String, Vec<u32>)> {
    names
        .iter()
        .map(|name| {
            let value = session.value(name).expect("it is there");
            (
                name.to_string(),
                value.iter().map(|v| v.to_bits()).collect(),
            )
        })
        .collect()
}

#[test]
fn a_resumed_run_of_every_optimizer_goes_on_bit_for_bit() {
    let case = case();
    let folder = std::env::temp_dir().join(format!("slabwise-optim-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a folder");
    let dressed = |optimizer: Rule| {
        optimizer
            .group(|w| w.rank() == 2, Group::new().rate_scale(0.5))
            .clip_norm(0.5)
            .ema(0.9)
            .named("run")
    };
    for ((name, one), (_, two)) in optimizers().into_iter().zip(optimizers()) {
        let (mut whole, program) = model(&case, dressed(one));
        let file = folder.join(format!("{name}.safetensors"));
        for i in 0..STEPS {
            if i == STEPS / 2 {
                whole.save(&file).expect("saved");
            }
            step(&case, &mut whole, &program, i);
        }
        let (mut resumed, program) = model(&case, dressed(two));
        resumed.load(&file).expect("loaded");
        for i in STEPS / 2..STEPS {
            step(&case, &mut resumed, &program, i);
        }
        let names = [
            "first.weight",
            "first.bias",
            "last.weight",
            "ema.first.bias",
        ];
        assert_eq!(
            everything(&resumed, &names),
            everything(&whole, &names),
            "{name}"
        );
    }
    std::fs::remove_dir_all(folder).expect("removed");
}

#[test]
fn the_rate_survives_a_resumed_run() {
    let case = case();
    let file =
        std::env::temp_dir().join(format!("slabwise-rate-{}.safetensors", std::process::id()));
    let chain = || {
        Schedule::linear(0.0, 0.1, 4)
            .then(4, OneCycle::new(0.1, 6))
            .times(Schedule::of(|clock| {
                clock.completed().cast(F32) * 0.1 + 1.0
            }))
    };
    let (mut whole, program) = model(&case, RAdam::new(chain()));
    for i in 0..STEPS {
        if i == 5 {
            whole.save(&file).expect("saved");
        }
        step(&case, &mut whole, &program, i);
    }
    let (mut resumed, program) = model(&case, RAdam::new(chain()));
    resumed.load(&file).expect("loaded");
    (5..STEPS).for_each(|i| step(&case, &mut resumed, &program, i));
    std::fs::remove_file(file).expect("removed");
    assert_eq!(everything(&resumed, &WEIGHTS), everything(&whole, &WEIGHTS));
}

#[test]
fn budgets_change_no_bit_of_an_update() {
    let run = |rule: Rule, budget: Option<f64>| -> (u64, Vec<Vec<u32>>) {
        let params = Params::seeded(0);
        let layers: Vec<Linear> = (0..6)
            .map(|i| Linear::new(&params.root() / &format!("layer{i}"), 32, 32))
            .collect();
        let trace = Trace::training();
        let x = trace.key(1).normal((512, 32));
        let y = layers.iter().fold(x, |x, layer| x.apply(layer).sin());
        let loss = y.square().mean();
        trace.minimize(loss, rule);
        let names: Vec<String> = params
            .declared()
            .iter()
            .map(|p| p.name().to_string())
            .collect();
        let mut session = Session::new(Device::Cpu, params)
            .expect("a session")
            .with_threads(2);
        if let Some(fraction) = budget {
            session = session.with_budget(Budget::Fraction(fraction));
        }
        let program = session.compile(&trace, [loss]).expect("it compiles");
        for _ in 0..3 {
            session.run(&program, ()).expect("a step");
        }
        let bits = |name: &String| {
            let value = session.value(name).expect("it is there");
            value.iter().map(|v| v.to_bits()).collect()
        };
        (
            program.plan().slab_bytes(),
            names.iter().map(bits).collect(),
        )
    };
    for name in ["nadam", "adafactor", "lamb", "muon"] {
        let rule = || {
            let all = optimizers().into_iter().find(|(known, _)| *known == name);
            all.expect("listed").1
        };
        let (all, expected) = run(rule(), None);
        let (fewer, got) = run(rule(), Some(0.8));
        assert!(fewer < all, "{name}: {fewer} of {all} bytes");
        assert_eq!(got, expected, "{name}");
    }
}

/// Bytes of state of a model with one matrix of 512 × 256.
fn state_bytes(optimizer: impl Optimizer) -> u64 {
    let params = Params::seeded(0);
    let layer = Linear::without_bias(&params.root() / "layer", 256, 512);
    let trace = Trace::training();
    let x = trace.input("x", F32, (8, 256));
    let loss = x.apply(&layer).square().mean();
    trace.minimize(loss, optimizer);
    let session = Session::new(Device::Cpu, params).expect("a session");
    let plan = session.plan(&trace, [loss]).expect("it plans");
    plan.persistent().state
}

#[test]
fn adafactor_saves_all_but_a_row_and_a_column_of_state() {
    let (adam, lion) = (state_bytes(Adam::new(0.01)), state_bytes(Lion::new(0.01)));
    let adafactor = state_bytes(Adafactor::new(0.01));
    let matrix = 4 * 512 * 256;
    // Beside averages there is the counter, in a place of its own.
    assert!((2 * matrix..2 * matrix + 256).contains(&adam), "{adam}");
    assert!((matrix..matrix + 256).contains(&lion), "{lion}");
    let sums = 4 * (512 + 256);
    assert!((sums..sums + 256).contains(&adafactor), "{adafactor}");
    assert_eq!(adam - adafactor, 2 * matrix - sums, "bytes saved");
}

/// The rates of the first `steps` steps, as the change of a weight of slope −1 that is set to 0
/// before each.
fn rates(
    schedule: Schedule,
    steps: usize,
    mut between: impl FnMut(&mut Session, usize),
) -> Vec<f32> {
    let params = Params::seeded(0);
    let w = params.root().param("w", (), Init::Constant(0.0));
    let trace = Trace::training();
    let loss = -trace.param(&w);
    trace.minimize(loss, Sgd::new(schedule));
    let mut session = Session::new(Device::Cpu, params).expect("a session");
    let program = session.compile(&trace, [loss]).expect("it compiles");
    (0..steps)
        .map(|step| {
            session.set_value("w", &arr0(0.0f32)).expect("a scalar");
            session.run(&program, ()).expect("a step");
            let rate = session.value("w").expect("it is there").sum();
            between(&mut session, step);
            rate
        })
        .collect()
}

#[track_caller]
fn assert_rates(what: &str, got: &[f32], expected: &ArrayD<f32>) {
    assert_eq!(got.len(), expected.len());
    for (step, (got, want)) in got.iter().zip(expected).enumerate() {
        assert!(
            (got - want).abs() <= 1e-6 * want.abs() + 2e-8,
            "{what}: step {step}: {got} instead of {want}"
        );
    }
}

#[test]
fn schedules_follow_the_recorded_rates() {
    let case = case();
    let all: Vec<(&str, Schedule)> = vec![
        ("multistep", Schedule::steps(0.1, &[3, 10, 11], 0.5)),
        ("exponential", Schedule::exponential(0.1, 0.9)),
        ("linear", Schedule::linear(0.025, 0.08, 12)),
        ("polynomial", Schedule::polynomial(0.1, 25, 1.5)),
        ("one_cycle", OneCycle::new(0.1, 40).into()),
        (
            "one_cycle_all",
            OneCycle::new(0.1, 40)
                .rise(0.35)
                .ends(0.1, 0.01)
                .linear()
                .symmetric()
                .into(),
        ),
        ("restarts", WarmRestarts::new(0.1, 7).into()),
        (
            "restarts_all",
            WarmRestarts::new(0.1, 4).factor(2).floor(0.01).into(),
        ),
        ("cyclic", Cyclic::new(0.01, 0.1, 5).down(8).into()),
        ("cyclic_halving", Cyclic::new(0.01, 0.1, 5).halving().into()),
        (
            "cyclic_shrinking",
            Cyclic::new(0.01, 0.1, 5).down(3).shrinking(0.95).into(),
        ),
        (
            "chain",
            Schedule::constant(0.05)
                .then(6, Schedule::exponential(0.1, 0.9))
                .then(20, Schedule::step(0.1, 4, 0.5)),
        ),
        ("noam", Schedule::noam(2.0, 64, 9)),
    ];
    for (name, schedule) in all {
        let got = rates(schedule, 40, |_, _| {});
        assert_rates(name, &got, &case.floats(&format!("schedule.{name}")));
    }
}

#[test]
fn a_plateau_lowers_the_rate_and_is_saved_with_the_weights() {
    let case = case();
    let measures = case.floats("measures");
    let small = Plateau::new(0.1)
        .factor(0.5)
        .patience(2)
        .threshold(0.01)
        .cooldown(1)
        .floor(0.01);
    let large = Plateau::new(0.1).patience(1).larger_is_better();
    for (name, plateau) in [("plateau", small), ("plateau_larger", large)] {
        let observed = |session: &mut Session, step: usize| {
            // What a file would keep of the rule: all of it is in the session.
            let state = session.value("optim.plateau").expect("a state");
            session
                .set_value("optim.plateau", &state)
                .expect("the same");
            session
                .observe(&plateau, measures[[step]])
                .expect("it trains by this schedule");
        };
        let got = rates(plateau.clone().into(), 40, observed);
        assert_rates(name, &got, &case.floats(&format!("schedule.{name}")));
    }
}

#[test]
fn mistaken_schedules_and_optimizers_are_refused() {
    let refused = |optimizer: Rule| optimizer.check().expect_err("it is mistaken");
    assert_eq!(
        refused(Box::new(Adam::new(OneCycle::new(0.1, 3)))),
        "adam: one cycle of 3 steps with a rise over 0.3 of them has an empty phase"
    );
    assert_eq!(
        refused(Box::new(Sgd::new(
            Schedule::constant(0.1).then(5, WarmRestarts::new(0.1, 0))
        ))),
        "sgd: the learning rate restarts after 0 steps"
    );
    assert_eq!(
        refused(Box::new(Adafactor::new(0.1).clip(0.5))),
        "adafactor: the clipping threshold is 0.5, not a finite number of at least 1"
    );
    assert_eq!(
        refused(Box::new(RmsProp::new(f64::NAN))),
        "rmsprop: the learning rate is NaN, not a finite number of at least 0"
    );
    let params = Params::seeded(0);
    let layer = Linear::new(&params.root() / "layer", 3, 2);
    let said = |optimizer: Rule| {
        let trace = Trace::training();
        let loss = trace.input("x", F32, (4, 3)).apply(&layer).square().mean();
        trace.minimize(loss, optimizer);
        let session = Session::new(Device::Cpu, params.clone()).expect("a session");
        session
            .plan(&trace, [loss])
            .err()
            .expect("refused")
            .to_string()
    };
    let text = said(Box::new(Muon::new(0.1)));
    assert!(
        text.contains(
            "muon changes matrices, and \"layer.bias\" has 1 axes; .using(|w| w.rank() != 2"
        ),
        "{text}"
    );
    let text = said(Box::new(
        Sgd::new(0.1).using(|w| w.rank() == 3, AdamW::new(0.1)),
    ));
    assert!(
        text.contains(
            "using: none of the parameters that learn is chosen; they are \"layer.weight\", \"layer.bias\""
        ),
        "{text}"
    );
}
