//! Models, devices, budgets and files with tensors without elements; errors of runs that need an
//! element.

use ndarray::{Array2, ArrayD, arr1};
use slabwise::nn::{BatchNorm1d, Embedding, LayerNorm, Linear};
use slabwise::optim::{Adam, Sgd};
use slabwise::prelude::*;
use slabwise::{CompileOptions, Error};
use slabwise_compiler::reference::{Precision, evaluate};

use crate::support::arrays::{close, numbers};
use crate::support::random_graph::{BATCH, RandomGraph};
use crate::{any_results, session};

/// The maximum along an axis that is empty in a run is an error of that run, which changes nothing.
#[test]
fn a_run_in_which_an_axis_has_no_largest_element_changes_nothing() {
    let params = Params::seeded(0);
    let w = params.root().param("w", (3,), Init::Constant(1.0));
    let trace = Trace::training();
    let x = trace.input("x", F32, (Dim::bounded("batch", 4), 3));
    let (loss, line) = ((x * &w).max_over(0).sum(), line!());
    trace.minimize(loss, Sgd::new(0.1));
    let found = trace.input("mask", Bool, (3,));
    let least = x.compress(1, found).min_over(1).sum();
    let mut session = Session::new(Device::Cpu, params).expect("a session");
    let program = session.compile(&trace, [loss, least]).expect("it compiles");
    let before = session.value("w").expect("it is there");
    let all = arr1(&[1u8, 1, 1]);
    let error = session
        .run(&program, (&Array2::<f32>::zeros((0, 3)), &all))
        .map(|_| ())
        .expect_err("no largest element")
        .to_string();
    assert!(error.contains(&format!("models.rs:{line}: ")), "{error}");
    assert!(
        error.contains(
            "max: axis 0 of [batch, 3] has no elements, and nothing without elements has a largest"
        ),
        "{error}"
    );
    let error = session
        .run(
            &program,
            (&Array2::<f32>::ones((2, 3)), &arr1(&[0u8, 0, 0])),
        )
        .map(|_| ())
        .expect_err("no smallest element")
        .to_string();
    assert!(
        error.contains("min: axis 1 of [batch, found1] has no elements"),
        "{error}"
    );
    assert_eq!(session.value("w").expect("it is there"), before);
    session
        .run(&program, (&Array2::<f32>::ones((2, 3)), &all))
        .expect("there is a largest one");
    assert_ne!(session.value("w").expect("it is there"), before);
    let trace = Trace::inference();
    let x = trace.input("x", F32, (2, 0));
    let error = session
        .compile(&trace, [x.argmax(1)])
        .map(|_| ())
        .expect_err("no largest element")
        .to_string();
    assert!(
        error.contains(
            "argmax: axis 1 of [2, 0] has no elements, and nothing without elements has a largest"
        ),
        "{error}"
    );
    let ids = trace.input("ids", I32, (2,));
    let error = session
        .compile(&trace, [ids.one_hot(0)])
        .map(|_| ())
        .expect_err("no position")
        .to_string();
    assert!(
        error.contains("one_hot of [2] among 0 positions"),
        "{error}"
    );
}

/// A training run of no examples fails before it changes anything; a trace for inference gives NaN,
/// as PyTorch does.
#[test]
fn an_empty_batch_does_not_reach_the_weights() {
    for statistics in [false, true] {
        let params = Params::seeded(0);
        let (layer, norm) = (
            Linear::new(&params.root() / "layer", 4, 3),
            BatchNorm1d::new(&params.root() / "norm", 3),
        );
        let trace = Trace::training();
        let batch = Dim::bounded("batch", 4);
        let (x, labels) = (
            trace.input("x", F32, (batch, 4)),
            trace.input("labels", I32, (batch,)),
        );
        let logits = x.apply(&layer);
        let loss = if statistics {
            logits.apply(&norm).square().sum() + 0.0 * labels.cast(F32).sum()
        } else {
            logits.cross_entropy(labels)
        };
        trace.minimize(loss, Adam::new(0.1));
        let mut session = Session::new(Device::Cpu, params).expect("a session");
        let program = session.compile(&trace, [loss]).expect("it compiles");
        let values = |session: &Session| {
            session
                .names()
                .map(|n| session.value(n).expect("it is there"))
                .collect::<Vec<_>>()
        };
        let before = values(&session);
        let none = (Array2::<f32>::zeros((0, 4)), Vec::<i32>::new());
        for _ in 0..2 {
            let error = session
                .run(&program, (&none.0, &none.1))
                .map(|_| ())
                .expect_err("no examples")
                .to_string();
            let what = if statistics {
                "batch norm: axis 0 of [batch, 3]"
            } else {
                "cross_entropy: axis 0 of [batch, 1] has no elements"
            };
            assert!(error.contains(what), "{error}");
        }
        assert_eq!(values(&session), before);
    }
    let trace = Trace::inference();
    let (x, y) = (
        trace.input("x", F32, (Dim::bounded("batch", 4), 3)),
        trace.input("y", F32, (Dim::bounded("batch", 4), 3)),
    );
    let mut session = session();
    let program = session.compile(&trace, [x.mse(y)]).expect("it compiles");
    let none = Array2::<f32>::zeros((0, 3));
    assert!(
        session.run(&program, (&none, &none)).expect("it runs")[0]
            .item()
            .is_nan()
    );
}

/// Layers with a length of 0, and one without.
struct Model {
    first: Linear,
    narrow: Linear,
    wide: Linear,
    norm: LayerNorm,
    table: Embedding,
}

impl Model {
    fn loss<'t>(&self, x: Tensor<'t>, words: Tensor<'t>, y: Tensor<'t>) -> Tensor<'t> {
        let hidden = x.apply(&self.first).tanh().apply(&self.narrow) + words.apply(&self.table);
        hidden
            .apply(&self.norm)
            .relu()
            .dropout(0.5)
            .apply(&self.wide)
            .mse(y)
    }
}

/// Examples in a batch of such a model.
const ROWS: usize = 512;

/// The variables after some steps of such a model.
fn train(open: impl Fn(Session) -> Session, parts: bool) -> Result<Vec<(String, ArrayD<f32>)>> {
    let params = Params::seeded(3);
    let at = params.root();
    let none = at.param("none", (0, 5), Init::Constant(1.0));
    let (first, narrow, wide) = (
        Linear::new(&at / "first", 4, 64),
        Linear::new(&at / "narrow", 64, 0),
        Linear::new(&at / "wide", 0, 3),
    );
    let (norm, table) = (
        LayerNorm::new(&at / "norm", 0),
        Embedding::new(&at / "table", 6, 0),
    );
    let trace = Trace::training();
    let (x, y, words) = (
        trace.input("x", F32, (ROWS, 4)),
        trace.input("y", F32, (ROWS, 3)),
        trace.input("words", I32, (ROWS,)),
    );
    let model = Model {
        first,
        narrow,
        wide,
        norm,
        table,
    };
    let loss = if parts {
        let [x, y, words] = [x, y, words].map(|t| t.split(0, 2));
        trace.minimize_in_parts(2, Adam::new(0.1), |i| {
            model.loss(x[i], words[i], y[i]) + trace.param(&none).sum()
        })
    } else {
        let loss = model.loss(x, words, y) + trace.param(&none).sum();
        trace.minimize(loss, Adam::new(0.1).clip_norm(1.0));
        loss
    };
    let mut session = open(
        Session::new(Device::Cpu, params)
            .expect("a session")
            .with_threads(2),
    );
    let program = session.compile(&trace, [loss])?;
    let x = Array2::from_shape_fn((ROWS, 4), |(i, j)| ((i * 5 + j) as f32).sin());
    let y = Array2::from_shape_fn((ROWS, 3), |(i, j)| ((i + 7 * j) as f32).cos());
    let words: Vec<i32> = (0..ROWS as i32).map(|i| i % 6).collect();
    for _ in 0..3 {
        session.run(&program, (&x, &y, &words)).expect("a step");
    }
    session
        .run_dynamic(&program, (&x, &y, &words))
        .expect("a step");
    let folder =
        std::env::temp_dir().join(format!("slabwise-empties-{}-{parts}", std::process::id()));
    session.save(&folder).expect("it is saved");
    let held: Vec<_> = session
        .names()
        .map(|n| (n.to_string(), session.value(n).expect("it is there")))
        .collect();
    session.load(&folder).expect("it is loaded");
    std::fs::remove_file(&folder).expect("it was there");
    let again: Vec<_> = session
        .names()
        .map(|n| (n.to_string(), session.value(n).expect("it is there")))
        .collect();
    assert_eq!(held, again);
    Ok(held)
}

#[test]
fn layers_of_width_0_train_within_budgets_and_beside_a_link() {
    for parts in [false, true] {
        let base = train(|s| s, parts).expect("it trains");
        assert!(
            base.iter()
                .all(|(_, values)| values.iter().all(|v| v.is_finite())),
            "{base:?}"
        );
        assert!(
            base.iter()
                .any(|(name, values)| name == "none" && values.is_empty())
        );
        let checked = CompileOptions {
            check_memory: true,
            ..CompileOptions::default()
        };
        assert_eq!(
            train(|s| s.with_options(checked), parts).expect("it trains"),
            base
        );
        let mut kept = 0;
        for fraction in [0.9, 0.8, 0.6] {
            let within = |s: Session| s.with_budget(Budget::Fraction(fraction));
            let beside = |s: Session| within(s).with_offload(Offload::new(Bytes(1 << 40)));
            for trained in [train(within, parts), train(beside, parts)] {
                match trained {
                    Ok(held) => {
                        assert_eq!(held, base, "{fraction}");
                        kept += 1;
                    }
                    Err(Error::Budget { .. }) => {}
                    Err(other) => panic!("{fraction}: {other}"),
                }
            }
        }
        assert!(kept > 0, "no budget was kept");
    }
}

/// A model whose only parameter has no elements: it compiles, is saved, and is loaded, also before
/// it is compiled.
#[test]
fn a_model_may_have_only_parameters_without_elements() {
    let path = std::env::temp_dir().join(format!("slabwise-nothing-{}", std::process::id()));
    let open = || {
        let params = Params::seeded(0);
        let w = params.root().param(
            "w",
            (0, 5),
            Init::Normal {
                mean: 0.0,
                std: 1.0,
            },
        );
        (w, Session::new(Device::Cpu, params).expect("a session"))
    };
    let compile = |w: &Param, session: &mut Session| {
        let trace = Trace::training();
        let loss = trace.input("x", F32, (2, 0)).matmul(w).square().sum();
        trace.minimize(loss, Sgd::new(0.1).momentum(0.9).weight_decay(0.1));
        session.compile(&trace, [loss])
    };
    let (w, mut session) = open();
    let program = compile(&w, &mut session).expect("it compiles");
    assert_eq!(
        session
            .run(&program, (&Array2::<f32>::zeros((2, 0)),))
            .expect("it runs")[0]
            .item(),
        0.0
    );
    assert_eq!(session.value("w").expect("it is there").shape(), [0, 5]);
    session.save(&path).expect("it is saved");
    let (w, mut session) = open();
    session.load_weights(&path).expect("it is loaded");
    compile(&w, &mut session).expect("it compiles");
    session.load(&path).expect("it is loaded");
    std::fs::remove_file(&path).expect("it was there");
}

/// Reports, pictures, pages and prefetched runs of a program in which no value has elements.
#[test]
fn a_program_without_elements_is_planned_shown_and_fed() {
    let mut session = session().with_prefetch(3);
    let trace = Trace::inference();
    let x = trace.input("x", F32, (4, 0));
    let program = session
        .compile(&trace, [x.exp(), x.softmax(1)])
        .expect("it compiles");
    assert_eq!(program.plan().to_string(), program.plan().to_string());
    assert!(program.plan().svg().contains("<svg"));
    let none = Array2::<f32>::zeros((4, 0));
    let mut batches = vec![none.clone(), none.clone()].into_iter().map(|x| (x,));
    let mut runs = 0;
    while let Some([y, z]) = session.run_ahead(&program, &mut batches).expect("it runs") {
        assert_eq!(
            (
                y.array::<f32>().expect("f32").shape(),
                z.array::<f32>().expect("f32").len()
            ),
            (&[4, 0][..], 0)
        );
        runs += 1;
    }
    assert_eq!(runs, 2);
    let run = session.record(&program, (&none,)).expect("it runs");
    assert!(program.plan().html(Ok(&run)).contains("<html"));
    session.profile(&program, (&none,), 2).expect("it runs");
    let kept = session.upload("x", &none).expect("it fits");
    let [y, _] = session.run(&program, (&kept,)).expect("it runs");
    assert!(y.array::<f32>().expect("f32").is_empty());
    assert!(
        session
            .download::<f32>(&kept)
            .expect("it is there")
            .is_empty()
    );
    session.free(kept).expect("it is there");
}

/// Micro-batches are tried where a sum over the batch keeps no axis.
#[test]
fn micro_batches_are_tried_for_an_empty_sum_over_the_batch() {
    let trace = Trace::inference();
    let x = trace.input("x", F32, (Dim::bounded("batch", 8), 0, 0));
    let y = x.maximum(x.sum_keep(0)).tanh();
    let wide = y.pad([(0, 0), (1, 1), (1, 1)], 0.0);
    let mut session = session().with_budget(Budget::Fraction(0.3));
    match session.compile(&trace, [y, wide, y + x]) {
        Ok(_) | Err(Error::Budget { .. }) => {}
        Err(other) => panic!("{other}"),
    }
}

/// On a device: layers of width 0, empty batches, and reductions, products, indices and views
/// without elements.
#[cfg(feature = "cuda")]
#[test]
fn programs_without_elements_run_on_a_device() {
    let Some(_driver) = slabwise_cuda::fake::FakeDriver::install() else {
        return;
    };
    let run = |device: Device| -> Vec<Vec<f64>> {
        let open = || {
            let untuned = CompileOptions {
                tuning: slabwise::Tuning::Off,
                ..CompileOptions::default()
            };
            Session::new(device, Params::seeded(0))
                .expect("a session")
                .with_threads(1)
                .with_options(untuned)
        };
        let trace = Trace::inference();
        let batch = Dim::bounded("batch", 3);
        let (x, none) = (
            trace.input("x", F32, (batch, 4)),
            trace.input("none", F32, (4, 0)),
        );
        let (image, index) = (
            trace.input("image", F32, (batch, 2, 5, 5)),
            trace.input("index", I32, (batch, 2)),
        );
        let weight = trace.full(0.5, F32, (3, 2, 2, 2));
        let image = image.conv2d(weight).relu().max_pool2d(2);
        let outputs = [
            x.matmul(none).matmul(none.t()),
            none.matmul(none.t()).exp(),
            x.softmax(1).sum_over(0),
            none.softmax(1).sum_over(1),
            x.mean_over(0),
            none.exp().flatten(0).sum(),
            image,
            x.gather(1, index).sum_over(0),
            x.sort(true),
            x.gt(0.0).nonzero(),
            x.masked_select(x.gt(0.0)).sum(),
            trace
                .concat(&[x, x.slice(1, 0..0), x.cumsum(1)], 1)
                .pad([(0, 0), (1, 1)], 0.5),
        ];
        let gradients = [x, none].map(|w| {
            trace.gradients(
                (outputs[0].square().sum() + outputs[6].sum()) + outputs[2].sum(),
                [w],
            )[0]
        });
        let mut session = open();
        let program = session.compile(&trace, outputs).expect("it compiles");
        let slopes = session.compile(&trace, gradients).expect("it compiles");
        let mut all = Vec::new();
        for n in [0, 2, 3] {
            let x = Array2::from_shape_fn((n, 4), |(i, j)| (i as f32 * 1.7 + j as f32).sin());
            let image =
                ArrayD::from_shape_fn(vec![n, 2, 5, 5], |at| (at[0] + at[2] * at[3]) as f32 * 0.1);
            let (none, index) = (
                Array2::<f32>::zeros((4, 0)),
                Array2::<i32>::from_elem((n, 2), 3),
            );
            all.extend(
                session
                    .run(&program, (&x, &none, &image, &index))
                    .expect("it runs")
                    .iter()
                    .map(numbers),
            );
            all.extend(
                session
                    .run(&slopes, (&x, &none, &image, &index))
                    .expect("it runs")
                    .iter()
                    .map(numbers),
            );
        }
        all
    };
    let (on_device, on_cpu) = (run(Device::Cuda(0)), run(Device::Cpu));
    for (at, (a, b)) in on_device.iter().zip(&on_cpu).enumerate() {
        let same = a.len() == b.len() && a.iter().zip(b).all(|(&p, &q)| close(p, q));
        assert!(same, "result {at}: {a:?} on the device, {b:?} on the CPU");
    }
}

/// Graphs drawn at random with lengths of 0 and 1 everywhere, on a device and within budgets.
#[cfg(feature = "cuda")]
#[test]
fn random_graphs_without_elements_run_on_a_device() {
    let Some(_driver) = slabwise_cuda::fake::FakeDriver::install() else {
        return;
    };
    let open = || {
        let untuned = CompileOptions {
            tuning: slabwise::Tuning::Off,
            ..CompileOptions::default()
        };
        Session::new(Device::Cuda(0), Params::seeded(0))
            .expect("a session")
            .with_threads(1)
            .with_options(untuned)
    };
    for seed in 500..506 {
        against_the_evaluator(seed, 8, &open);
    }
}

/// A random graph with lengths of 0 and 1 everywhere, with a batch, of one example and of none.
fn against_the_evaluator(seed: u64, size: usize, open: &dyn Fn() -> Session) {
    let case = RandomGraph::short(seed, size);
    for batch in [BATCH, 1, 0] {
        let env = case.env(batch);
        let (inputs, variables) = case.arguments(&env);
        let want = evaluate(&case.graph, &env, &inputs, &variables, Precision::Single)
            .expect("the graph evaluates");
        if case.graph.outputs.is_empty() || case.graph.outputs.len() > 12 {
            return;
        }
        let first = case.graph.outputs.len();
        match any_results(&case.graph, open, &inputs, &variables) {
            Ok([planned, _]) => {
                for (at, (a, b)) in planned.iter().zip(&want.outputs).enumerate().take(first) {
                    let same = a.len() == b.values.len()
                        && a.iter().zip(&b.values).all(|(&p, &q)| close(p, q));
                    assert!(
                        same,
                        "seed {seed}, batch {batch}, output {at}: {a:?} instead of {b}\n{}",
                        case.graph
                    );
                }
            }
            Err(Error::Budget { .. }) => return,
            Err(other) => panic!("seed {seed}, batch {batch}: {other}\n{}", case.graph),
        }
    }
}

#[test]
fn random_graphs_without_elements_run_within_budgets_and_beside_a_link() {
    for seed in 600..640 {
        for fraction in [0.8, 0.4] {
            let within = || session().with_budget(Budget::Fraction(fraction));
            against_the_evaluator(seed, 14, &within);
            against_the_evaluator(seed, 14, &|| {
                within().with_offload(Offload::new(Bytes(1 << 40)))
            });
        }
    }
}
