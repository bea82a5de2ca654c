//! Results of data-dependent length: against naive oracles and the reference, in gaps of the slab
//! and in the pool.

mod support;

use ndarray::{Array1, Array2, ArrayD};
use slabwise::memory::MemoryConfig;
use slabwise::prelude::*;
use slabwise::{CompileOptions, DynamicShapes, Error, RunStats};
use slabwise_compiler::graph::Graph;
use slabwise_compiler::reference::{Array, Precision, evaluate};
use support::Rng;

fn session(use_gaps: bool, threads: usize) -> Session {
    let shapes = DynamicShapes {
        use_gaps,
        ..DynamicShapes::default()
    };
    let options = CompileOptions {
        shapes,
        ..CompileOptions::default()
    };
    Session::new(Device::Cpu, Params::seeded(0))
        .expect("a session")
        .with_threads(threads)
        .with_options(options)
}

/// The outputs, the same from one thread and from three, sub-allocated in the slab or not, planned
/// or dynamic.
fn run<const N: usize>(
    trace: &Trace,
    outputs: [Tensor<'_>; N],
    feed: &[&dyn slabwise::feed::Input],
) -> [ArrayD<f32>; N] {
    let mut all: Vec<[ArrayD<f32>; N]> = Vec::new();
    for (use_gaps, threads, dynamic) in [
        (true, 1, false),
        (true, 3, false),
        (false, 2, false),
        (true, 2, true),
    ] {
        let mut session = session(use_gaps, threads);
        let program = session
            .compile(trace, outputs)
            .unwrap_or_else(|e| panic!("{e}"));
        let found = if dynamic {
            session.run_dynamic(&program, feed)
        } else {
            session.run(&program, feed)
        };
        let found = found.unwrap_or_else(|e| panic!("{e}"));
        all.push(found.map(|o| match o.dtype() {
            F32 => o.array::<f32>().expect("f32"),
            I32 => o.array::<i32>().expect("i32").mapv(|v| v as f32),
            _ => o.array::<u8>().expect("bytes").mapv(f32::from),
        }));
    }
    let first = all.swap_remove(0);
    let bits = |a: &[ArrayD<f32>; N]| {
        a.iter()
            .map(|a| {
                (
                    a.shape().to_vec(),
                    a.iter().map(|v| v.to_bits()).collect::<Vec<_>>(),
                )
            })
            .collect::<Vec<_>>()
    };
    assert!(
        all.iter().all(|other| bits(other) == bits(&first)),
        "neither threads nor places change a bit"
    );
    first
}

/// Multiples of a quarter with zeros among them, and many equal.
fn numbers(rng: &mut Rng, count: usize) -> Vec<f32> {
    (0..count)
        .map(|_| {
            if rng.one_in(3) {
                0.0
            } else {
                rng.below(41) as f32 / 4.0 - 5.0
            }
        })
        .collect()
}

#[test]
fn lengths_follow_the_values() {
    let trace = Trace::inference();
    let x = trace.input("x", F32, (Dim::bounded("rows", 40), 700));
    let mask = x.gt(1.0);
    let outputs = [
        x.nonzero(),
        x.masked_select(mask),
        x.unique(),
        x.masked_select(mask).exp().sum(),
    ];
    let mut rng = Rng(5);
    for rows in [40usize, 1, 13] {
        let values = Array2::from_shape_vec((rows, 700), numbers(&mut rng, rows * 700))
            .expect("as many numbers");
        let [nonzero, selected, unique, sum] = run(&trace, outputs, &[&values]);
        let places: Vec<f32> = values
            .indexed_iter()
            .filter(|(_, v)| **v != 0.0)
            .flat_map(|((i, j), _)| [i as f32, j as f32])
            .collect();
        assert_eq!(nonzero.shape(), [places.len() / 2, 2]);
        assert!(nonzero.iter().eq(&places));
        let above: Vec<f32> = values.iter().copied().filter(|v| *v > 1.0).collect();
        assert!(selected.iter().eq(&above) && selected.ndim() == 1);
        let mut different = values.iter().copied().collect::<Vec<f32>>();
        different.sort_by(f32::total_cmp);
        different.dedup();
        assert!(unique.iter().eq(&different));
        let expected: f64 = above.iter().map(|v| f64::from(*v).exp()).sum();
        assert!((f64::from(sum[[]]) - expected).abs() <= 1e-5 * expected);
    }
}

#[test]
fn an_empty_selection_has_no_elements() {
    let trace = Trace::inference();
    let x = trace.input("x", F32, (3, 5));
    let none = x.masked_select(x.gt(100.0));
    let outputs = [x.nonzero(), none, (none * 2.0).sum(), x.unique()];
    let [nonzero, none, sum, unique] = run(&trace, outputs, &[&Array2::<f32>::zeros((3, 5))]);
    assert_eq!(
        (nonzero.shape(), none.shape(), sum[[]], unique.len()),
        (&[0, 2][..], &[0][..], 0.0, 1)
    );
}

#[test]
fn orders_are_stable_and_put_nan_last() {
    let trace = Trace::inference();
    let x = trace.input("x", F32, (4, 6));
    let [up, down, sorted] = run(
        &trace,
        [x.argsort(false), x.argsort(true), x.sort(false)],
        &[&ndarray::arr2(&[
            [3.0, 1.0, 2.0, 1.0, 3.0, 0.0],
            [f32::NAN, -1.0, f32::INFINITY, 0.0, -0.0, f32::NEG_INFINITY],
            [5.0; 6],
            [-1.0, -2.0, -3.0, -4.0, -5.0, -6.0],
        ])],
    );
    let expect = [
        [5, 1, 3, 2, 0, 4],
        [5, 1, 3, 4, 2, 0],
        [0, 1, 2, 3, 4, 5],
        [5, 4, 3, 2, 1, 0],
    ];
    assert!(
        up.iter().eq(expect
            .iter()
            .flatten()
            .map(|&i| i as f32)
            .collect::<Vec<_>>()
            .iter())
    );
    let expect = [
        [0, 4, 2, 1, 3, 5],
        [0, 2, 3, 4, 1, 5],
        [0, 1, 2, 3, 4, 5],
        [0, 1, 2, 3, 4, 5],
    ];
    assert!(
        down.iter().eq(expect
            .iter()
            .flatten()
            .map(|&i| i as f32)
            .collect::<Vec<_>>()
            .iter())
    );
    assert_eq!(
        sorted.rows().into_iter().next().expect("a row").to_vec(),
        [0.0, 1.0, 1.0, 2.0, 3.0, 3.0]
    );
}

/// Suppression by its definition, box by box.
fn suppressed(boxes: &Array2<f32>, scores: &Array1<f32>, threshold: f32) -> Vec<f32> {
    let mut order: Vec<usize> = (0..scores.len()).collect();
    order.sort_by(|&a, &b| scores[b].total_cmp(&scores[a]).then(a.cmp(&b)));
    let share = |a: usize, b: usize| {
        let side = |k: usize| {
            (boxes[(a, k + 2)].min(boxes[(b, k + 2)]) - boxes[(a, k)].max(boxes[(b, k)])).max(0.0)
        };
        let area = |i: usize| (boxes[(i, 2)] - boxes[(i, 0)]) * (boxes[(i, 3)] - boxes[(i, 1)]);
        side(0) * side(1) / (area(a) + area(b) - side(0) * side(1))
    };
    let mut kept: Vec<usize> = Vec::new();
    for i in order {
        if kept.iter().all(|&k| share(k, i) <= threshold) {
            kept.push(i);
        }
    }
    kept.into_iter().map(|i| i as f32).collect()
}

#[test]
fn suppression_equals_its_definition() {
    let mut rng = Rng(11);
    for (count, threshold) in [(1usize, 0.5), (64, 0.3), (65, 0.0), (300, 0.5), (2500, 0.7)] {
        let trace = Trace::inference();
        let (boxes, scores) = (
            trace.input("boxes", F32, (count, 4)),
            trace.input("scores", F32, (count,)),
        );
        let corners = Array2::from_shape_fn((count, 2), |_| rng.below(60) as f32);
        let sides = Array2::from_shape_fn((count, 2), |_| 1.0 + rng.below(16) as f32);
        let given = ndarray::concatenate(
            ndarray::Axis(1),
            &[corners.view(), (&corners + &sides).view()],
        )
        .expect("two columns each");
        let ranks = Array1::from_shape_fn(count, |_| rng.below(200) as f32 / 8.0);
        let [kept] = run(&trace, [boxes.nms(scores, threshold)], &[&given, &ranks]);
        assert!(
            kept.iter().eq(&suppressed(&given, &ranks, threshold)),
            "{count} boxes, {threshold}"
        );
    }
}

#[test]
fn dynamic_slices_are_parts_and_check_their_ends() {
    let trace = Trace::inference();
    let x = trace.input("x", F32, (7, 3));
    let (start, length) = (
        trace.input("start", I32, ()),
        trace.input("length", I32, ()),
    );
    let mut session = session(true, 2);
    let outputs = [
        x.dynamic_slice(0, start, length) * 2.0,
        x.slice_from(0, start, 2),
    ];
    let program = session.compile(&trace, outputs).expect("compiles");
    let values = Array2::from_shape_fn((7, 3), |(i, j)| (3 * i + j) as f32);
    let mut part = |start: i32, length: i32| {
        let feed = (&values, ndarray::arr0(start), ndarray::arr0(length));
        let found = session.run(&program, feed).map_err(|e| e.to_string())?;
        Ok::<_, String>((
            found[0].array::<f32>().expect("f32"),
            found[1].array::<f32>().expect("f32"),
        ))
    };
    for (start, length) in [(0, 7), (2, 3), (5, 0), (5, 2)] {
        let (slice, two) = part(start, length).expect("inside");
        let (start, length) = (start as usize, length as usize);
        assert_eq!(
            slice.into_dimensionality().expect("two axes"),
            values
                .slice(ndarray::s![start..start + length, ..])
                .mapv(|v| v * 2.0)
        );
        assert_eq!(
            two.into_dimensionality().expect("two axes"),
            values.slice(ndarray::s![start..start + 2, ..])
        );
    }
    for (start, length, said) in [
        (3, 5, "8"),
        (-1, 2, "-1"),
        (0, -1, "-1"),
        (0, 8, "8"),
        (6, 1, "6"),
    ] {
        let error = part(start, length).expect_err("outside");
        assert!(
            error.contains(said) && error.contains("data_dependent.rs"),
            "{start}, {length}: {error}"
        );
    }
    part(1, 1).expect("the session stays usable");
}

#[test]
fn gradients_go_back_to_where_elements_came_from() {
    let trace = Trace::inference();
    let x = trace.input("x", F32, (6, 5));
    let start = trace.input("start", I32, ());
    let selected = x.masked_select(x.gt(0.5));
    let sliced = x.dynamic_slice(1, start, 2);
    let [of_selected] = trace.gradients((selected * selected * selected).sum(), [x]);
    let [of_slice] = trace.gradients((sliced * sliced).sum(), [x]);
    let [of_sorted] = trace.gradients((x.sort(true).slice(1, ..2)).square().sum(), [x]);
    let [of_unique] = trace.gradients((x.unique().sum() + x.sum()) * 1.0, [x]);
    let values = Array2::from_shape_fn((6, 5), |(i, j)| ((i * 5 + j) * 7 % 30) as f32 / 10.0 - 1.0);
    let outputs = [of_selected, of_slice, of_sorted, of_unique];
    let [a, b, c, d] = run(&trace, outputs, &[&values, &ndarray::arr0(2i32)]);
    for ((i, j), &v) in values.indexed_iter() {
        let close = |found: f32, want: f32| (found - want).abs() <= 1e-5 * want.abs().max(1.0);
        assert!(close(a[[i, j]], if v > 0.5 { 3.0 * v * v } else { 0.0 }));
        assert!(close(
            b[[i, j]],
            if (2..4).contains(&j) { 2.0 * v } else { 0.0 }
        ));
        let above = values.row(i).iter().filter(|other| **other > v).count();
        assert!(close(c[[i, j]], if above < 2 { 2.0 * v } else { 0.0 }));
        assert_eq!(d[[i, j]], 1.0, "unique has no gradient");
    }
}

/// A small detector: a score for each of many places, and a loss over those that a mask selects.
fn detector(session: &mut Session, params: &Params, padded: bool) -> Program<1> {
    let root = params.root();
    let first = slabwise::nn::Linear::new(&root / "first", 4, 32);
    let second = slabwise::nn::Linear::new(&root / "second", 32, 32);
    let head = slabwise::nn::Linear::new(&root / "head", 32, 1);
    let trace = Trace::training().named(if padded { "padded" } else { "selected" });
    let x = trace.input("x", F32, (Dim::bounded("places", 200), 4));
    let target = trace.input("target", F32, (Dim::bounded("places", 200),));
    let is_real = trace.input("is_real", Bool, (Dim::bounded("places", 200),));
    let hidden = x.apply(&first).tanh().apply(&second).tanh();
    let score = hidden.apply(&head).squeeze(1);
    let weight = is_real.cast(F32);
    let count = weight.sum();
    let loss = if padded {
        ((score - target).square() * weight).sum() / count
    } else {
        (score.masked_select(is_real) - target.masked_select(is_real))
            .square()
            .sum()
            / count
    };
    trace.minimize(loss, slabwise::optim::Sgd::new(0.05));
    session
        .compile(&trace, [loss])
        .unwrap_or_else(|e| panic!("{e}"))
}

#[test]
fn a_masked_loss_trains_as_a_padded_one() {
    let losses = |padded: bool, use_gaps: bool| {
        let params = Params::seeded(1);
        let shapes = DynamicShapes {
            use_gaps,
            ..DynamicShapes::default()
        };
        let options = CompileOptions {
            shapes,
            ..CompileOptions::default()
        };
        let mut session = Session::new(Device::Cpu, params.clone())
            .expect("a session")
            .with_threads(2)
            .with_options(options);
        let program = detector(&mut session, &params, padded);
        assert_eq!(program.plan().data_dependent().is_empty(), padded);
        let (mut rng, mut losses, mut stats) = (Rng(9), Vec::new(), RunStats::default());
        for step in 0..30 {
            let places = 40 + step * 37 % 150;
            let x = Array2::from_shape_fn((places, 4), |_| rng.float(-1.0, 1.0) as f32);
            let target = Array1::from_shape_fn(places, |i| x[(i, 0)] * x[(i, 1)] + 1.0);
            let is_real = Array1::from_shape_fn(places, |_| u8::from(rng.one_in(3)));
            let [loss] = session.run(&program, (x, target, is_real)).expect("runs");
            losses.push(loss.item());
            let now = session.last_run();
            assert_eq!(now.peak_slab_bytes, program.plan().slab_bytes());
            stats.lent_bytes = stats.lent_bytes.max(now.lent_bytes);
            stats.pool_bytes = stats.pool_bytes.max(now.pool_bytes);
        }
        (losses, stats)
    };
    let ((padded, none), (selected, pooled), (lent, gaps)) = (
        losses(true, true),
        losses(false, false),
        losses(false, true),
    );
    assert!(
        padded
            .iter()
            .zip(&selected)
            .all(|(a, b)| (a - b).abs() <= 1e-4 * a.abs().max(0.1)),
        "{padded:?} {selected:?}"
    );
    let mean = |l: &[f32]| l.iter().sum::<f32>() / l.len() as f32;
    assert!(mean(&padded[25..]) < mean(&padded[..5]), "{padded:?}");
    assert_eq!((none.lent_bytes, none.pool_bytes), (0, 0));
    let bits = |l: &[f32]| l.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
    assert_eq!(
        bits(&selected),
        bits(&lent),
        "where values lie changes no bit"
    );
    assert!(
        pooled.lent_bytes == 0 && pooled.pool_bytes > 0,
        "{pooled:?}"
    );
    assert!(
        gaps.lent_bytes > 0 && gaps.pool_bytes < pooled.pool_bytes,
        "{gaps:?}"
    );
}

#[test]
fn the_report_lists_data_dependent_buffers_with_reasons() {
    let trace = Trace::inference().named("report");
    let x = trace.input("x", F32, (32,));
    let y = x.masked_select(x.gt(0.0)).exp();
    let mut session = session(true, 1);
    let program = session.compile(&trace, [y, x.tanh()]).expect("compiles");
    let report = program.plan().to_string();
    assert!(report.contains("found1 found, ≤ 32"), "{report}");
    let line = report
        .lines()
        .find(|l| l.contains("f32 [found1]"))
        .unwrap_or_else(|| panic!("{report}"));
    assert!(
        line.contains("found1 is found at") && line.contains("data_dependent.rs"),
        "{report}"
    );
    assert!(
        program
            .plan()
            .data_dependent()
            .iter()
            .all(|b| b.shape.contains("found1"))
    );
}

#[test]
fn a_pool_without_room_leaves_weights_as_they_were() {
    let params = Params::seeded(1);
    let memory = MemoryConfig {
        limit: Some(1 << 12),
        ..MemoryConfig::with_policy(slabwise::memory::Policy::Unpooled)
    };
    let options = CompileOptions {
        shapes: DynamicShapes {
            use_gaps: false,
            ..DynamicShapes::default()
        },
        ..CompileOptions::default()
    };
    let session = Session::new(Device::Cpu, params.clone())
        .expect("a session")
        .with_threads(1)
        .with_options(options);
    let mut session = session.with_memory(&memory).expect("makes sense");
    let trace = Trace::training();
    let x = trace.input("x", F32, (4096,));
    let w = &params.root().param("w", (4096,), Init::Constant(1.0));
    let chosen = (x * trace.param(w)).masked_select(x.gt(0.0));
    let loss = (chosen * chosen).mean() + trace.param(w).mean();
    trace.minimize(loss, slabwise::optim::Sgd::new(0.1));
    let program = session
        .compile(&trace, [loss])
        .unwrap_or_else(|e| panic!("{e}"));
    let Err(Error::Memory { report, .. }) = session
        .run(&program, (Array1::<f32>::ones(4096),))
        .map(|_| ())
    else {
        panic!("4096 floats do not fit in 4096 bytes")
    };
    assert!(report.holders.iter().all(|h| !h.tag.name.is_empty()));
    assert!(
        session
            .value("w")
            .expect("a weight")
            .iter()
            .all(|v| *v == 1.0),
        "no weight was changed"
    );
    let mut few = Array1::<f32>::from_elem(4096, -1.0);
    few[7] = 1.0;
    session.run(&program, (few,)).expect("one element fits");
    assert!(
        session
            .value("w")
            .expect("a weight")
            .iter()
            .any(|v| *v != 1.0)
    );
}

#[test]
fn slab_and_pool_share_one_budget() {
    let run = |budget: u64, chosen: usize| {
        let options = CompileOptions {
            shapes: DynamicShapes {
                use_gaps: false,
                ..DynamicShapes::default()
            },
            ..CompileOptions::default()
        };
        let session = Session::new(Device::Cpu, Params::seeded(0))
            .expect("a session")
            .with_threads(1)
            .with_options(options);
        let mut session = session.with_budget(Bytes(budget));
        let trace = Trace::inference();
        let x = trace.input("x", F32, (1024,));
        let program = session
            .compile(&trace, [x.masked_select(x.gt(0.0))])
            .expect("the plan is within the budget");
        let x = Array1::from_shape_fn(1024, |i| if i < chosen { 1.0f32 } else { -1.0 });
        let result = session.run(&program, (x,)).map(|[y]| y.shape()[0]);
        (result, session.slab_bytes())
    };
    let (whole, slab) = run(1 << 20, 1024);
    assert_eq!(whole.expect("there is room"), 1024);
    // Positions and elements of 100 are 800 bytes; of 1024 they are 8 KiB.
    let budget = slab + 1024;
    assert_eq!(run(budget, 100).0.expect("there is room"), 100);
    let Err(Error::Room {
        bytes,
        budget: named,
        planned,
        ..
    }) = run(budget, 1024).0
    else {
        panic!("beyond the budget")
    };
    assert_eq!((bytes.0, named.0, planned.0), (4096, budget, slab));
}

fn mistakes(build: impl Fn(&Trace)) -> String {
    let trace = Trace::inference();
    build(&trace);
    let one = trace.ones(());
    session(true, 1)
        .compile(&trace, [one])
        .err()
        .expect("refused")
        .to_string()
}

#[test]
fn invalid_operands_are_refused_by_name() {
    let said = mistakes(|t| {
        t.input("x", F32, (3,))
            .masked_select(t.input("m", F32, (3,)));
    });
    assert!(said.contains("masked_select by f32"), "{said}");
    let said = mistakes(|t| {
        t.input("b", F32, (3, 5)).nms(t.input("s", F32, (3,)), 0.5);
    });
    assert!(said.contains("f32 boxes [count, 4]"), "{said}");
    let said = mistakes(|t| {
        t.input("b", F32, (3, 4)).nms(t.input("s", F32, (2,)), 0.5);
    });
    assert!(
        said.contains("nms of boxes [3, 4] with scores f32 [2]"),
        "{said}"
    );
    let said = mistakes(|t| {
        t.input("b", F32, (3, 4))
            .nms(t.input("s", F32, (3,)), f32::NAN);
    });
    assert!(said.contains("NaN"), "{said}");
    let said = mistakes(|t| {
        t.input("x", F32, (3,)).dynamic_slice(1, 0, 1);
    });
    assert!(said.contains("no axis 1"), "{said}");
    let said = mistakes(|t| {
        t.input("x", F32, (3,)).slice_from(0, 0, 4);
    });
    assert!(said.contains("does not have 4 elements"), "{said}");
    let said = mistakes(|t| {
        let x = t.input("x", F32, (3,));
        (0..9).for_each(|i| {
            x.gt(i as f32).nonzero();
        });
    });
    assert!(said.contains("at most 8"), "{said}");
}

/// The graph of a trace, against the reference, with values of known length that are fused with
/// others.
#[test]
fn programs_of_several_dependency_levels_agree_with_the_reference() {
    let trace = Trace::inference();
    let x = trace.input("x", F32, (Dim::bounded("rows", 9), 8));
    let scaled = x * 0.5 + 1.0;
    let chosen = scaled.masked_select(x.gt(0.0));
    let average = chosen.mean();
    let centred = (scaled - average).relu();
    let again = centred.masked_select(centred.gt(0.1));
    let outputs = [
        again.sum(),
        centred.mean(),
        chosen * 2.0 + again.mean(),
        scaled.sum_over(0),
        again,
    ];
    let graph: Graph = trace.finish(&outputs).expect("no mistakes");
    let mut rng = Rng(3);
    for rows in [9usize, 2, 5] {
        let values = Array2::from_shape_fn((rows, 8), |_| rng.float(-2.0, 2.0) as f32);
        let mut env = graph.symbols.bounds();
        env.0[0] = rows as u32;
        let array = Array::from_fn(F32, values.shape(), |c| f64::from(values[(c[0], c[1])]));
        let want = evaluate(&graph, &env, &[array], &[], Precision::Single)
            .expect("the graph evaluates")
            .outputs;
        for (found, want) in run(&trace, outputs, &[&values]).iter().zip(&want) {
            assert_eq!(found.shape(), want.dims);
            assert!(
                found
                    .iter()
                    .zip(&want.values)
                    .all(|(&a, &b)| (f64::from(a) - b).abs() < 1e-4),
                "{found} and {want}"
            );
        }
    }
}

#[test]
fn another_pool_after_a_run() {
    let mut session = session(false, 1);
    let trace = Trace::inference();
    let x = trace.input("x", F32, (64,));
    let program = session
        .compile(&trace, [x.masked_select(x.gt(0.0)) * 2.0])
        .expect("it compiles");
    let given = Array1::<f32>::ones(64);
    session.run(&program, (&given,)).expect("it runs");
    let mut session = session
        .with_memory(&MemoryConfig::default())
        .expect("valid settings");
    let [y] = session.run(&program, (&given,)).expect("it runs");
    assert_eq!(y.array::<f32>().expect("f32"), (&given * 2.0).into_dyn());
}
