//! Random graphs: the compiled program equals the reference evaluator, with every optimization on
//! or off, planned or dynamic, on one thread or several.
//!
//! Bit-equal: planned and dynamic mode, thread counts, memory checks, every fusion and every
//! planner option. Within rounding (of sums, and of functions such as exp): against the reference
//! evaluator, and where simplification changes the operations.

mod support;

use ndarray::{ArrayD, IxDyn};
use slabwise::feed::Input;
use slabwise::shape::Env;
use slabwise::{
    CompileOptions, Device, DynamicShapes, LengthRanges, Session, Trace, params::Params,
};
use slabwise_compiler::passes::{Fuse, Simplify};
use slabwise_compiler::reference::{Precision, evaluate};
use slabwise_kernels::dtype::DType;
use support::arrays::{close, host, numbers};
use support::random_graph::{BATCH, RandomGraph};

/// Outputs, then the variables after the step.
type Results = Vec<Vec<f64>>;

#[derive(Clone, Copy, PartialEq)]
enum Mode {
    Planned,
    Dynamic,
}

fn run<const N: usize>(
    case: &RandomGraph,
    env: &Env,
    options: CompileOptions,
    threads: usize,
    mode: Mode,
) -> Results {
    let (inputs, variables) = case.arguments(env);
    let mut session = Session::new(Device::Cpu, Params::seeded(0))
        .expect("a session")
        .with_threads(threads)
        .with_options(options);
    let program = session
        .compile_graph::<N>("random", &case.graph)
        .unwrap_or_else(|e| panic!("{e}\n{}", case.graph));
    for (info, array) in case.graph.variables.iter().zip(&variables) {
        let values = array.values.iter().map(|&v| v as f32).collect();
        let values = ArrayD::from_shape_vec(IxDyn(&array.dims), values)
            .expect("the array has its shape's elements");
        session
            .set_value(&info.name, &values)
            .expect("the variable exists");
    }
    let owned: Vec<Box<dyn Input>> = inputs.iter().map(host).collect();
    let feed: Vec<&dyn Input> = owned.iter().map(|b| &**b).collect();
    let outputs = match mode {
        Mode::Planned => session.run(&program, &feed[..]),
        Mode::Dynamic => session.run_dynamic(&program, &feed[..]),
    };
    let outputs = outputs.unwrap_or_else(|e| panic!("{e}\n{}", case.graph));
    let mut results: Results = outputs.iter().map(numbers).collect();
    for info in &case.graph.variables {
        results.push(
            session
                .value(&info.name)
                .expect("the variable exists")
                .iter()
                .map(|&v| f64::from(v))
                .collect(),
        );
    }
    if mode == Mode::Planned && case.graph.symbols.unbounded().next().is_none() {
        assert_eq!(
            session.last_run().peak_slab_bytes,
            program.plan().slab_bytes(),
            "measured is planned\n{}",
            program.plan()
        );
    }
    results
}

/// [`run`] for as many outputs as the graph has.
fn run_any(
    case: &RandomGraph,
    env: &Env,
    options: CompileOptions,
    threads: usize,
    mode: Mode,
) -> Results {
    macro_rules! by_count {
        ($($n:literal)*) => { match case.graph.outputs.len() { $($n => run::<$n>(case, env, options, threads, mode),)* n => panic!("{n} outputs") } };
    }
    by_count!(0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31 32)
}

fn compare(seed: u64, what: &str, a: &Results, b: &Results, exact: bool, case: &RandomGraph) {
    assert_eq!(a.len(), b.len());
    for (at, (x, y)) in a.iter().zip(b).enumerate() {
        assert_eq!(x.len(), y.len(), "seed {seed}, {what}, result {at}");
        for (i, (&p, &q)) in x.iter().zip(y).enumerate() {
            let same = if exact {
                p.to_bits() == q.to_bits() || (p.is_nan() && q.is_nan())
            } else {
                close(p, q)
            };
            assert!(
                same,
                "seed {seed}, {what}, result {at}, element {i}: {p} and {q}\n{}",
                case.graph
            );
        }
    }
}

fn expected(case: &RandomGraph, env: &Env) -> Results {
    let (inputs, variables) = case.arguments(env);
    let result = evaluate(&case.graph, env, &inputs, &variables, Precision::Single)
        .expect("the graph evaluates");
    let mut all: Results = result.outputs.into_iter().map(|o| o.values).collect();
    for (new, old) in result.assigned.into_iter().zip(&variables) {
        all.push(new.unwrap_or_else(|| old.clone()).values);
    }
    all
}

#[test]
fn programs_agree_with_the_reference_evaluator() {
    for seed in 0..60 {
        let case = RandomGraph::new(seed, 12);
        for batch in [BATCH, 1] {
            let env = case.env(batch);
            let want = expected(&case, &env);
            compare(
                seed,
                "planned",
                &run_any(&case, &env, CompileOptions::default(), 2, Mode::Planned),
                &want,
                false,
                &case,
            );
        }
    }
}

#[test]
fn neither_mode_nor_threads_change_a_bit() {
    for seed in 100..140 {
        let case = RandomGraph::new(seed, 14);
        let env = case.env(BATCH - 1);
        let options = CompileOptions::default();
        let base = run_any(&case, &env, options, 1, Mode::Planned);
        compare(
            seed,
            "two threads",
            &run_any(&case, &env, options, 2, Mode::Planned),
            &base,
            true,
            &case,
        );
        compare(
            seed,
            "three threads",
            &run_any(&case, &env, options, 3, Mode::Planned),
            &base,
            true,
            &case,
        );
        compare(
            seed,
            "dynamic",
            &run_any(&case, &env, options, 2, Mode::Dynamic),
            &base,
            true,
            &case,
        );
        let checked = CompileOptions {
            check_memory: true,
            ..options
        };
        compare(
            seed,
            "memory checks",
            &run_any(&case, &env, checked, 2, Mode::Planned),
            &base,
            true,
            &case,
        );
    }
}

#[test]
fn optimizations_can_be_switched_off() {
    let on = CompileOptions::default();
    let planner = slabwise_planner::Options::default();
    for seed in 200..240 {
        let case = RandomGraph::new(seed, 14);
        let env = case.env(BATCH);
        let base = run_any(&case, &env, on, 2, Mode::Planned);
        for (what, fuse) in [
            ("no fusion", Fuse::none()),
            (
                "no elementwise fusion",
                Fuse {
                    elementwise: false,
                    ..Fuse::default()
                },
            ),
            (
                "no reduction fusion",
                Fuse {
                    reductions: false,
                    ..Fuse::default()
                },
            ),
            (
                "no rows",
                Fuse {
                    rows: false,
                    ..Fuse::default()
                },
            ),
            (
                "no epilogues",
                Fuse {
                    epilogues: false,
                    ..Fuse::default()
                },
            ),
            (
                "no flattened rows",
                Fuse {
                    flatten_rows: false,
                    ..Fuse::default()
                },
            ),
            (
                "no siblings",
                Fuse {
                    siblings: false,
                    ..Fuse::default()
                },
            ),
            (
                "nothing stored for others",
                Fuse {
                    stored: false,
                    ..Fuse::default()
                },
            ),
            (
                "nothing computed twice",
                Fuse {
                    recompute: false,
                    ..Fuse::default()
                },
            ),
        ] {
            // A reduction may sum in another order in another kernel.
            compare(
                seed,
                what,
                &run_any(&case, &env, CompileOptions { fuse, ..on }, 2, Mode::Planned),
                &base,
                false,
                &case,
            );
        }
        for (what, planner) in [
            (
                "not in place",
                slabwise_planner::Options {
                    in_place: false,
                    ..planner
                },
            ),
            (
                "no reuse",
                slabwise_planner::Options {
                    reuse: false,
                    ..planner
                },
            ),
            (
                "program order",
                slabwise_planner::Options {
                    order: slabwise_planner::OrderPolicy::Program,
                    ..planner
                },
            ),
        ] {
            compare(
                seed,
                what,
                &run_any(
                    &case,
                    &env,
                    CompileOptions { planner, ..on },
                    2,
                    Mode::Planned,
                ),
                &base,
                true,
                &case,
            );
        }
        let kept = CompileOptions {
            shapes: DynamicShapes {
                use_gaps: false,
                ..DynamicShapes::default()
            },
            ..on
        };
        compare(
            seed,
            "no gaps used",
            &run_any(&case, &env, kept, 2, Mode::Planned),
            &base,
            true,
            &case,
        );
        for (what, simplify) in [
            (
                "no simplification",
                Simplify {
                    cse: false,
                    fold: false,
                    algebra: false,
                },
            ),
            (
                "no common subexpressions",
                Simplify {
                    cse: false,
                    ..Simplify::default()
                },
            ),
            (
                "no folding",
                Simplify {
                    fold: false,
                    ..Simplify::default()
                },
            ),
            (
                "no algebra",
                Simplify {
                    algebra: false,
                    ..Simplify::default()
                },
            ),
        ] {
            compare(
                seed,
                what,
                &run_any(
                    &case,
                    &env,
                    CompileOptions { simplify, ..on },
                    2,
                    Mode::Planned,
                ),
                &base,
                false,
                &case,
            );
        }
    }
}

/// Lengths of 0 and 1 everywhere, and batches of no examples: planned, dynamic, within budgets and
/// without optimizations.
#[test]
fn programs_without_elements_agree_with_the_reference_evaluator() {
    let on = CompileOptions::default();
    let simplify = Simplify {
        cse: false,
        fold: false,
        algebra: false,
    };
    for seed in 400..440 {
        let case = RandomGraph::short(seed, 14);
        for batch in [BATCH, 1, 0] {
            let env = case.env(batch);
            let want = expected(&case, &env);
            let base = run_any(&case, &env, on, 2, Mode::Planned);
            compare(seed, "planned", &base, &want, false, &case);
            compare(
                seed,
                "dynamic",
                &run_any(&case, &env, on, 3, Mode::Dynamic),
                &base,
                true,
                &case,
            );
            let checked = CompileOptions {
                check_memory: true,
                ..on
            };
            compare(
                seed,
                "memory checks",
                &run_any(&case, &env, checked, 1, Mode::Planned),
                &base,
                true,
                &case,
            );
            let alone = CompileOptions {
                fuse: Fuse::none(),
                ..on
            };
            compare(
                seed,
                "no fusion",
                &run_any(&case, &env, alone, 2, Mode::Planned),
                &base,
                false,
                &case,
            );
            let plain = CompileOptions { simplify, ..on };
            compare(
                seed,
                "no simplification",
                &run_any(&case, &env, plain, 2, Mode::Planned),
                &base,
                false,
                &case,
            );
        }
    }
}

/// A plan for a range of lengths gives the same results as a plan for one length, in any graph.
#[test]
fn free_dimensions_agree_with_the_reference_evaluator() {
    for seed in 300..310 {
        let mut case = if seed % 2 == 0 {
            RandomGraph::new(seed, 12)
        } else {
            RandomGraph::short(seed, 12)
        };
        case.free_batch();
        for batch in [BATCH, 1, 0] {
            let env = case.env(batch);
            let want = expected(&case, &env);
            for ranges in [LengthRanges::Exact, LengthRanges::Growth(100)] {
                let shapes = DynamicShapes {
                    ranges,
                    ..DynamicShapes::default()
                };
                let options = CompileOptions {
                    shapes,
                    ..CompileOptions::default()
                };
                let found = run_any(&case, &env, options, 2, Mode::Planned);
                compare(seed, "planned for a range", &found, &want, false, &case);
                let other = run_any(&case, &env, options, 3, Mode::Dynamic);
                compare(seed, "dynamic", &other, &found, true, &case);
            }
        }
    }
}

/// The outputs of a program over inputs of f32 or f16, with all optimizations and with few.
fn outputs_of(
    build: impl for<'t> Fn(&'t Trace) -> Vec<slabwise::Tensor<'t>>,
    feed: &[&dyn Input],
) -> [Vec<Vec<f64>>; 2] {
    let few = CompileOptions {
        simplify: Simplify {
            cse: false,
            fold: false,
            algebra: false,
        },
        fuse: Fuse::none(),
        ..CompileOptions::default()
    };
    [CompileOptions::default(), few].map(|options| {
        let mut session = Session::new(Device::Cpu, Params::seeded(0))
            .expect("a session")
            .with_options(options);
        let trace = Trace::inference();
        let outputs = build(&trace);
        let program = session
            .compile_any(&trace, &outputs)
            .unwrap_or_else(|e| panic!("{e}"));
        let outputs = session.run_any(&program, feed).expect("it runs");
        outputs.iter().map(numbers).collect()
    })
}

/// Two poolings of one image with equal windows, of which one has a window more at the ends; and
/// positions that a kernel needs which the pooling's own kernel comes after.
#[test]
fn poolings_of_equal_windows() {
    use slabwise::tensor::PoolOptions;
    let image: Vec<f32> = (0..50).map(|i| ((i * 37) % 50) as f32 - 20.0).collect();
    let image = ArrayD::from_shape_vec(IxDyn(&[1, 2, 5, 5]), image).expect("50 elements");
    for (with_relu, ceil_first) in [(false, false), (false, true), (true, false), (true, true)] {
        let [optimized, plain] = outputs_of(
            |trace| {
                let x = trace.input("x", DType::F32, (1, 2, 5, 5));
                let y = if with_relu { x.relu() } else { x };
                let ceil = || y.max_pool2d_with(PoolOptions::new(2).ceil());
                let (small, large) = match ceil_first {
                    true => {
                        let large = ceil();
                        (y.max_pool2d(2), large)
                    }
                    false => (y.max_pool2d(2), ceil()),
                };
                let [dx] = trace.gradients(large.square().sum(), [x]);
                vec![small, large, dx]
            },
            &[&image],
        );
        assert_eq!(
            optimized, plain,
            "relu {with_relu}, ceil first {ceil_first}"
        );
    }
    let [optimized, plain] = outputs_of(
        |trace| {
            let x = trace.input("x", DType::F32, (1, 2, 5, 5));
            let y = x.max_pool2d(2);
            let [dx] = trace.gradients(y.sum(), [x]);
            vec![y * dx.sum()]
        },
        &[&image],
    );
    assert_eq!(optimized, plain);
}

/// A sum of paddings side by side, of halves and of floats.
#[test]
fn neighbours_of_unlike_types() {
    use half::f16;
    let a = ArrayD::from_shape_vec(IxDyn(&[2]), vec![f16::ONE, f16::from_f32(2.5)]).expect("2");
    let b = ArrayD::from_shape_vec(IxDyn(&[3]), vec![3.0f32, 4.1, 5.0]).expect("3");
    let results = outputs_of(
        |trace| {
            let a = trace.input("a", DType::F16, (2,));
            let b = trace.input("b", DType::F32, (3,));
            vec![
                a.pad([(0, 3)], 0.0) + b.pad([(2, 0)], 0.0),
                b.pad([(0, 2)], 0.0) + a.pad([(3, 0)], 0.0),
            ]
        },
        &[&a, &b],
    );
    let expected = [[1.0, 2.5, 3.0, 4.1, 5.0], [3.0, 4.1, 5.0, 1.0, 2.5]];
    let expected = expected.map(|row| row.map(|x: f64| f64::from(x as f32)).to_vec());
    for result in results {
        assert_eq!(result, expected);
    }
}

/// Values made of indices alone, each from the one before twice, or from very many: computed once,
/// since a kernel that made them for itself would do so 2⁴⁰ times.
#[test]
fn long_values_of_indices() {
    let x = ArrayD::from_elem(IxDyn(&[64]), 0.5f32);
    let [optimized, plain] = outputs_of(
        |trace| {
            let x = trace.input("x", DType::F32, (64,));
            let squares = (0..40).fold(trace.arange(64), |h, _| h * h + 1);
            let flips = (0..20_000).fold(trace.arange(64), |h, _| h.bit_not());
            vec![x + squares.cast(DType::F32), x * flips.cast(DType::F32)]
        },
        &[&x],
    );
    assert_eq!(optimized, plain);
    let squares = |i: u32| (0..40).fold(i, |h, _| h.wrapping_mul(h).wrapping_add(1)) as i32;
    let expected: Vec<f64> = (0..64)
        .map(|i| f64::from(0.5 + squares(i) as f32))
        .collect();
    assert_eq!(optimized[0], expected);
}

/// A number that does not equal itself.
#[test]
fn constants_that_are_not_numbers() {
    let x = ArrayD::from_shape_vec(IxDyn(&[3]), vec![-1.0f32, 0.5, 2.0]).expect("3");
    for result in outputs_of(
        |trace| {
            let x = trace.input("x", DType::F32, (3,));
            vec![x.gt(0.0).select(x, f32::NAN).square()]
        },
        &[&x],
    ) {
        assert!(
            result[0][0].is_nan() && result[0][1..] == [0.25, 4.0],
            "{result:?}"
        );
    }
}
