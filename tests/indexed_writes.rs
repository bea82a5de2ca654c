//! Operations that write to indexed positions or run along an axis: results and gradients of PyTorch
//! (`tests/data/record_places.py`), states that are written in place, selection, constants.

use ndarray::{Array1, Array2, ArrayD, IxDyn, arr1, arr2, s};
use slabwise::prelude::*;
use slabwise::weights::File;
use slabwise::{Running, Scatter};

fn session() -> Session {
    Session::new(Device::Cpu, Params::seeded(0))
        .expect("a session")
        .with_threads(2)
}

fn array<T>(file: &File, name: &str, dtype: DType, of: fn([u8; 4]) -> T) -> Option<ArrayD<T>> {
    let entry = file.get(name).filter(|entry| entry.dtype == dtype)?;
    let shape: Vec<usize> = entry.shape.iter().map(|&n| n as usize).collect();
    let bytes = entry.bytes.chunks_exact(4);
    let values = bytes
        .map(|b| of(b.try_into().expect("four bytes")))
        .collect();
    Some(ArrayD::from_shape_vec(IxDyn(&shape), values).expect("its shape"))
}

/// The result of a case and, if there are any, positions.
type Build = for<'t> fn(&[Tensor<'t>]) -> (Tensor<'t>, Option<Tensor<'t>>);

macro_rules! plain {
    (|$x:ident| $value:expr) => {
        |$x| ($value, None)
    };
}

fn both<'t>((value, positions): (Tensor<'t>, Tensor<'t>)) -> (Tensor<'t>, Option<Tensor<'t>>) {
    (value, Some(positions))
}

const CASES: &[(&str, Build)] = &[
    ("scatter_add", plain!(|x| x[0].scatter_add(1, x[1], x[2]))),
    (
        "scatter_set",
        plain!(|x| x[0].scatter(1, x[1], x[2], Scatter::Set)),
    ),
    (
        "scatter_set_twice",
        plain!(|x| x[0].scatter(1, x[1], x[2], Scatter::Set)),
    ),
    (
        "scatter_prod",
        plain!(|x| x[0].scatter(1, x[1], x[2], Scatter::Mul)),
    ),
    (
        "scatter_max",
        plain!(|x| x[0].scatter(1, x[1], x[2], Scatter::Max)),
    ),
    (
        "scatter_min",
        plain!(|x| x[0].scatter(1, x[1], x[2], Scatter::Min)),
    ),
    ("index_add", plain!(|x| x[0].index_add(0, x[1], x[2]))),
    ("index_copy", plain!(|x| x[0].index_copy(0, x[1], x[2]))),
    (
        "index_put_add",
        plain!(|x| x[0].index_put(&x[1..3], x[3], Scatter::Add)),
    ),
    ("index", plain!(|x| x[0].index(&x[1..]))),
    ("take_along_axis", plain!(|x| x[0].take_along_axis(0, x[1]))),
    (
        "slice_assign",
        plain!(|x| x[0].slice_step_assign(1, 1..6, 2, x[1])),
    ),
    ("cumsum_0", plain!(|x| x[0].cumsum(0))),
    ("cumsum_1", plain!(|x| x[0].cumsum(1))),
    ("cumprod_0", plain!(|x| x[0].cumprod(0))),
    ("cumprod_1", plain!(|x| x[0].cumprod(1))),
    ("cummax_0", |x| both(x[0].cummax(0))),
    ("cummax_1", |x| both(x[0].cummax(1))),
    ("cummin_0", |x| both(x[0].cummin(0))),
    ("cummin_1", |x| both(x[0].cummin(1))),
    ("logcumsumexp_0", plain!(|x| x[0].logcumsumexp(0))),
    ("logcumsumexp_1", plain!(|x| x[0].logcumsumexp(1))),
    ("sort_0", |x| {
        both((x[0].sort_along(0, true), x[0].argsort_along(0, true)))
    }),
    ("sort_1", |x| {
        both((x[0].sort_along(1, true), x[0].argsort_along(1, true)))
    }),
    ("cummax_odd", |x| both(x[0].cummax(0))),
    ("cummin_odd", |x| both(x[0].cummin(0))),
    ("logcumsumexp_odd", plain!(|x| x[0].logcumsumexp(0))),
    ("topk", |x| both(x[0].topk(3, 0))),
    ("bottomk", |x| both(x[0].bottomk(4, 1))),
];

fn assert_close(got: &ArrayD<f32>, expected: &ArrayD<f32>, what: &str) {
    assert_eq!(got.shape(), expected.shape(), "{what}");
    let close = |g: f32, e: f32| {
        g == e || (g.is_nan() && e.is_nan()) || (g - e).abs() <= 2e-6 * e.abs().max(1.0)
    };
    let all = got.iter().zip(expected).all(|(&g, &e)| close(g, e));
    assert!(all, "{what}: {got}\ninstead of {expected}");
}

#[test]
fn results_and_gradients_are_those_of_pytorch() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/torch");
    let file = File::open(format!("{folder}/places.safetensors")).expect("it is recorded");
    for (name, build) in CASES {
        let trace = Trace::inference();
        let (mut inputs, mut floats): (Vec<Tensor<'_>>, Vec<usize>) = (vec![], vec![]);
        let mut fed: Vec<Box<dyn slabwise::feed::Input>> = vec![];
        for at in 0.. {
            let key = format!("{name}/x{at}");
            let (dtype, shape) = if let Some(x) = array(&file, &key, F32, f32::from_le_bytes) {
                let shape = x.shape().to_vec();
                fed.push(Box::new(x));
                floats.push(at);
                (F32, shape)
            } else if let Some(x) = array(&file, &key, I32, i32::from_le_bytes) {
                let shape = x.shape().to_vec();
                fed.push(Box::new(x));
                (I32, shape)
            } else {
                break;
            };
            inputs.push(trace.input(&format!("x{at}"), dtype, shape.as_slice()));
        }
        let (value, positions) = build(&inputs);
        // As many outputs as a case may have.
        let mut outputs = vec![value];
        outputs.extend(positions);
        let expected = array(&file, &format!("{name}/value"), F32, f32::from_le_bytes);
        let expected = expected.expect("a value");
        let slopes = file.get(&format!("{name}/d0")).is_some();
        if slopes {
            let count = expected.len();
            let weights = Array1::from_iter((1..=count).map(|i| i as f32));
            let loss = (value.reshape((count,)) * trace.constant(&weights)).sum();
            for &at in &floats {
                outputs.extend(trace.gradients(loss, [inputs[at]]));
            }
        }
        let mut session = session();
        let program = session
            .compile(
                &trace,
                std::array::from_fn::<_, 5, _>(|k| outputs[k.min(outputs.len() - 1)]),
            )
            .unwrap_or_else(|e| panic!("{name}: {e}"));
        let feed: Vec<&dyn slabwise::feed::Input> = fed.iter().map(|x| &**x).collect();
        let out = session
            .run(&program, feed.as_slice())
            .unwrap_or_else(|e| panic!("{name}: {e}"));
        let mut out = out.iter();
        let mut next = || out.next().expect("as many as compiled");
        assert_close(&next().array::<f32>().expect("f32"), &expected, name);
        if positions.is_some() {
            let expected = array(&file, &format!("{name}/positions"), I32, i32::from_le_bytes);
            let got = next().array::<i32>().expect("i32");
            assert_eq!(got, expected.expect("positions"), "{name}");
        }
        for &at in floats.iter().filter(|_| slopes) {
            let key = format!("{name}/d{at}");
            let expected = array(&file, &key, F32, f32::from_le_bytes).expect("a gradient");
            assert_close(&next().array::<f32>().expect("f32"), &expected, &key);
        }
    }
}

/// The values of a program without inputs but these.
fn evaluate<const N: usize>(
    build: impl for<'t> Fn(&'t Trace) -> [Tensor<'t>; N],
) -> [ArrayD<f32>; N] {
    let trace = Trace::inference();
    let outputs = build(&trace);
    let mut session = session();
    let program = session.compile(&trace, outputs).expect("it compiles");
    let out = session.run(&program, ()).expect("it runs");
    out.map(|o| o.array::<f32>().expect("f32"))
}

#[test]
fn running_results_are_exclusive_and_reverse() {
    let by = |exclusive, reverse| Running { exclusive, reverse };
    let [sum, product, log, states] = evaluate(|trace| {
        let x = trace.constant(&[2.0f32, 3.0, 5.0]);
        [
            x.cumsum_by(0, by(true, false)),
            x.cumprod_by(0, by(true, true)),
            x.logcumsumexp_by(0, by(true, false)),
            x.linear_recurrence(trace.full(0.5, F32, (3,)), 0, by(false, true)),
        ]
    });
    assert_eq!(sum, arr1(&[0.0, 2.0, 5.0]).into_dyn());
    assert_eq!(product, arr1(&[15.0, 5.0, 1.0]).into_dyn());
    let expected = [f32::NEG_INFINITY, 2.0, (2f32.exp() + 3f32.exp()).ln()];
    assert_close(&log, &arr1(&expected).into_dyn(), "logcumsumexp");
    assert_eq!(states, arr1(&[4.75, 5.5, 5.0]).into_dyn());
}

#[test]
fn running_sums_take_axes_of_any_length() {
    let trace = Trace::inference();
    let x = trace.input("x", F32, (2, Dim::bounded("n", 700)));
    let mut session = session();
    let program = session.compile(&trace, [x.cumsum(1)]).expect("it compiles");
    for n in [0, 1, 700] {
        let x = Array2::from_shape_fn((2, n), |(i, j)| (i + j) as f32);
        let [sums] = session.run(&program, &x).expect("it runs");
        let mut expected = x.clone();
        for mut row in expected.rows_mut() {
            row.iter_mut().fold(0.0, |sum, v| {
                *v += sum;
                *v
            });
        }
        assert_eq!(sums.array::<f32>().expect("f32"), expected.into_dyn());
    }
}

#[test]
fn segments_and_coordinates() {
    let [sum, max, nd, picked, batched] = evaluate(|trace| {
        let x = trace.constant(&arr2(&[[1.0f32, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0]]));
        let segments = trace.constant(&[2i32, 0, 2, 2]);
        let places = trace.constant(&arr2(&[[3i32, 1], [0, 0], [3, 1]]));
        let values = trace.constant(&[10.0f32, 20.0, 30.0]);
        [
            x.segment_sum(segments, 3),
            x.segment_max(segments, 3),
            x.scatter_nd(places, values, Scatter::Set),
            x.gather_nd(places, 0),
            x.gather_nd(trace.constant(&arr2(&[[1i64], [0], [0], [1]])), 1),
        ]
    });
    assert_eq!(
        sum,
        arr2(&[[3.0, 4.0], [0.0, 0.0], [13.0, 16.0]]).into_dyn()
    );
    let none = f32::NEG_INFINITY;
    assert_eq!(
        max,
        arr2(&[[3.0, 4.0], [none, none], [7.0, 8.0]]).into_dyn()
    );
    // Of two values for one place, the last.
    let expected = [[20.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 30.0]];
    assert_eq!(nd, arr2(&expected).into_dyn());
    assert_eq!(picked, arr1(&[8.0, 1.0, 8.0]).into_dyn());
    assert_eq!(batched, arr1(&[2.0, 3.0, 5.0, 8.0]).into_dyn());
}

#[test]
fn results_are_the_same_for_any_number_of_threads() {
    let run = |threads: usize| {
        let trace = Trace::inference();
        let x = trace.input("x", F32, (5000, 3));
        let rows = trace.input("rows", I32, (5000,));
        let zeros = trace.zeros((70, 3));
        let all = [
            Scatter::Set,
            Scatter::Add,
            Scatter::Mul,
            Scatter::Min,
            Scatter::Max,
        ];
        let outputs = all.map(|how| zeros.index_scatter(0, rows, x * 0.01 + 1.0, how));
        let mut session = Session::new(Device::Cpu, Params::seeded(0))
            .expect("a session")
            .with_threads(threads);
        let program = session.compile(&trace, outputs).expect("it compiles");
        let x = Array2::from_shape_fn((5000, 3), |(i, j)| ((i * 37 + j * 11) % 101) as f32 - 50.0);
        let rows = Array1::from_iter((0..5000).map(|i| i * i % 70));
        let out = session.run(&program, (&x, &rows)).expect("it runs");
        out.map(|o| {
            let bits = o.array::<f32>().expect("f32").mapv(f32::to_bits);
            bits.into_iter().collect::<Vec<u32>>()
        })
    };
    let one = run(1);
    assert_eq!(one, run(2));
    assert_eq!(one, run(3));
}

/// The steps of a program, in order.
fn kernel_names<const N: usize>(program: &Program<N>) -> Vec<String> {
    program.plan().steps().map(str::to_string).collect()
}

/// A cache of keys is written in place: no value in the slab is as large as the cache, however
/// long that is, and old values stay.
#[test]
fn a_cache_is_written_in_place() {
    const WIDTH: usize = 8;
    let planned = |length: usize| {
        let trace = Trace::inference();
        let cache = trace.state("cache", F32, (length, WIDTH), Init::Constant(0.0));
        let position = trace.input("position", I32, ());
        let keys = trace.input("keys", F32, (2, WIDTH));
        let all = cache.value().dynamic_update_slice(0, position, keys * 2.0);
        cache.set(all);
        // Reads the new value where it is.
        let sums = all.sum_over(1).max();
        let mut session = session();
        let program = session.compile(&trace, [sums]).expect("it compiles");
        let slab = program.plan().slab_bytes();
        for step in 0..5 {
            let keys = Array2::from_elem((2, WIDTH), step as f32);
            let position = ndarray::arr0(2 * step);
            let [largest] = session.run(&program, (&position, &keys)).expect("it runs");
            assert_eq!(largest.item(), (2 * step) as f32 * WIDTH as f32);
        }
        let cache = session.value("cache").expect("it is there");
        for row in 0..length {
            let expected = if row < 10 { (row / 2 * 2) as f32 } else { 0.0 };
            assert!(
                cache.slice(s![row, ..]).iter().all(|&v| v == expected),
                "row {row}"
            );
        }
        // A place outside is a fault of the run, which changes nothing.
        let keys = Array2::from_elem((2, WIDTH), 9.0f32);
        let outside = ndarray::arr0(length as i32 - 1);
        let error = session
            .run(&program, (&outside, &keys))
            .err()
            .expect("outside");
        assert!(error.to_string().contains("indexed_writes.rs"), "{error}");
        assert_eq!(session.value("cache").expect("it is there"), cache);
        (slab, kernel_names(&program))
    };
    let (short, kernels) = planned(16);
    let (long, same) = planned(4096);
    assert_eq!(kernels, same);
    // The row sums alone grow with the cache.
    assert!(
        long - short <= 4 * (4096 - 16) + 256,
        "a slab of {short} bytes becomes one of {long}: {kernels:?}"
    );
    assert!(
        kernels.iter().all(|name| !name.contains("cache.update")),
        "{kernels:?}"
    );
}

/// Where the old value is needed behind the new one, or the new one is returned, the state is
/// copied, and results are the same.
#[test]
fn a_cache_whose_old_value_is_needed_is_copied() {
    let trace = Trace::inference();
    let cache = trace.state("cache", F32, (4,), Init::Constant(1.0));
    let x = trace.input("x", F32, (1,));
    let all = cache.value().dynamic_update_slice(0, 2, x);
    cache.set(all);
    let change = (all - cache.value()).abs().sum();
    let mut session = session();
    let program = session.compile(&trace, [change, all]).expect("it compiles");
    for (given, expected) in [(3.0, 2.0), (7.0, 4.0), (7.0, 0.0)] {
        let [change, all] = session.run(&program, [given]).expect("it runs");
        assert_eq!(change.item(), expected);
        let expected = arr1(&[1.0, 1.0, given, 1.0]).into_dyn();
        assert_eq!(all.array::<f32>().expect("f32"), expected);
        assert_eq!(session.value("cache").expect("it is there"), expected);
    }
}

/// Each example of a batch has its own place.
#[test]
fn examples_are_written_at_positions_of_their_own() {
    let trace = Trace::inference();
    let cache = trace.state("cache", F16, (2, 3, 4), Init::Constant(0.0));
    let places = trace.input("places", I32, (2,));
    let keys = trace.input("keys", F16, (2, 3, 1));
    let all = cache
        .value()
        .dynamic_update_slice(2, places.reshape((2, 1)).expand((2, 3)), keys);
    cache.set(all);
    let part = all.cast(F32).slice_from(2, 1, 2);
    let mut session = session();
    let program = session.compile(&trace, [part.sum()]).expect("it compiles");
    let keys = ndarray::Array3::from_shape_fn((2, 3, 1), |(i, j, _)| {
        half::f16::from_f32((1 + 3 * i + j) as f32)
    });
    let [sum] = session
        .run(&program, (&arr1(&[1, 3]), &keys))
        .expect("it runs");
    assert_eq!(sum.item(), 6.0);
    let cache = session.value("cache").expect("it is there");
    assert_eq!(cache.slice(s![0, .., 1]), arr1(&[1.0, 2.0, 3.0]));
    assert_eq!(cache.slice(s![1, .., 3]), arr1(&[4.0, 5.0, 6.0]));
    assert_eq!(cache.sum(), 21.0);
}

#[test]
fn many_largest_elements_take_few_kernels() {
    let trace = Trace::inference();
    let x = trace.input("x", F32, (3, 10_000));
    let (values, positions) = x.topk(1000, 1);
    let mut session = session();
    let program = session
        .compile(&trace, [values, positions])
        .expect("it compiles");
    assert!(
        program.plan().kernels() <= 3,
        "{:?}",
        kernel_names(&program)
    );
    let x = Array2::from_shape_fn((3, 10_000), |(i, j)| ((j * 7919 + i) % 10_007) as f32);
    let [values, positions] = session.run(&program, &x).expect("it runs");
    let (values, positions) = (
        values.array::<f32>().expect("f32"),
        positions.array::<i32>().expect("i32"),
    );
    for row in 0..3 {
        let mut order: Vec<usize> = (0..10_000).collect();
        order.sort_by(|&a, &b| x[[row, b]].total_cmp(&x[[row, a]]));
        for k in 0..1000 {
            assert_eq!(positions[[row, k]] as usize, order[k]);
            assert_eq!(values[[row, k]], x[[row, order[k]]]);
        }
    }
}

#[test]
fn slices_go_backwards() {
    let [back, part, far, first, last] = evaluate(|trace| {
        let x = trace.constant(&arr2(&[
            [0.0f32, 1.0, 2.0, 3.0, 4.0],
            [5.0, 6.0, 7.0, 8.0, 9.0],
        ]));
        [
            x.slice_by(1, None, None, -1),
            x.slice_by(1, Some(-2), Some(0), -2),
            x.slice_by(1, Some(100), Some(-100), -3),
            x.slice_by(0, Some(-1), None, 1),
            x.slice_by(1, Some(3), Some(1), 1),
        ]
    });
    let rows = [[4.0, 3.0, 2.0, 1.0, 0.0], [9.0, 8.0, 7.0, 6.0, 5.0]];
    assert_eq!(back, arr2(&rows).into_dyn());
    assert_eq!(part, arr2(&[[3.0, 1.0], [8.0, 6.0]]).into_dyn());
    assert_eq!(far, arr2(&[[4.0, 1.0], [9.0, 6.0]]).into_dyn());
    assert_eq!(first, arr2(&[[5.0, 6.0, 7.0, 8.0, 9.0]]).into_dyn());
    assert_eq!(last.shape(), [2, 0]);
}

#[test]
fn constants_narrow_what_tensors_do_not_hold() {
    let [i64s, f64s, bools, halves] = evaluate(|trace| {
        [
            trace.constant(&[-3i64, 7]).cast(F32),
            trace.constant(&arr1(&[0.5f64, 1e-3])),
            trace.constant(&[true, false, true]).cast(F32),
            trace.constant(&[half::bf16::from_f32(1.5)]).cast(F32),
        ]
    });
    assert_eq!(i64s, arr1(&[-3.0, 7.0]).into_dyn());
    assert_eq!(f64s, arr1(&[0.5, 1e-3]).into_dyn());
    assert_eq!(bools, arr1(&[1.0, 0.0, 1.0]).into_dyn());
    assert_eq!(halves, arr1(&[1.5]).into_dyn());
    let trace = Trace::inference();
    let x = trace.constant(&[1i64, 1 << 40]);
    let error = session().compile(&trace, [x]).err().expect("too large");
    let text = error.to_string();
    assert!(text.contains("element [1] is 1099511627776"), "{text}");
}

#[test]
fn mistakes_are_named() {
    type Mistake = for<'t> fn(&'t Trace, Tensor<'t>) -> Tensor<'t>;
    let mistakes: [(Mistake, &str); 9] = [
        (|t, x| x.scatter_add(2, t.arange(3), 1.0), "no axis 2"),
        (
            |t, x| x.scatter(1, t.full(0.0, I32, (3, 2)), 1.0, Scatter::Set),
            "one shape",
        ),
        (
            |t, x| x.index_add(0, t.arange(2), t.zeros((2, 4))),
            "[2, 5] is needed",
        ),
        (
            |t, x| {
                x.cast(F16)
                    .index_scatter(0, t.arange(2), t.zeros((2, 5)).cast(F16), Scatter::Add)
            },
            "does not take f16",
        ),
        (
            |t, x| x.slice_assign(1, 3..9, t.zeros((1, 1))),
            "its length is 5",
        ),
        (
            |t, x| x.dynamic_update_slice(0, t.arange(1), t.zeros((1, 5))),
            "i32 scalar",
        ),
        (
            |t, x| x.dynamic_update_slice(1, 0, t.zeros((2, 6))),
            "does not have the elements",
        ),
        (
            |t, x| x.gather_nd(t.full(0.0, I32, (1, 3)), 0),
            "one to 2 coordinates",
        ),
        (|_, x| x.topk(6, 1).0, "does not have 6 elements"),
    ];
    for (mistake, text) in mistakes {
        let trace = Trace::inference();
        let x = trace.input("x", F32, (2, 5));
        let y = mistake(&trace, x);
        let error = session().compile(&trace, [y]).err().expect("a mistake");
        let error = error.to_string();
        assert!(
            error.contains(text) && error.contains("indexed_writes.rs"),
            "{error}"
        );
    }
}

#[test]
fn indices_outside_fail_the_run() {
    let trace = Trace::inference();
    let x = trace.input("x", F32, (4, 2));
    let rows = trace.input("rows", I32, (2,));
    let y = x.index_copy(0, rows, trace.ones((2, 2)));
    let mut session = session();
    let program = session.compile(&trace, [y]).expect("it compiles");
    let x = Array2::from_elem((4, 2), 5.0f32);
    let [y] = session
        .run(&program, (&x, &arr1(&[3, 3])))
        .expect("it runs");
    assert_eq!(y.array::<f32>().expect("f32").sum(), 32.0);
    let error = session
        .run(&program, (&x, &arr1(&[0, 4])))
        .err()
        .expect("outside");
    assert!(error.to_string().contains("indexed_writes.rs"), "{error}");
}

/// A NaN stays a NaN in gradients, and large exponents do not overflow in them.
#[test]
fn gradients_beside_special_numbers() {
    let gradient = |x: &[f32], loss: for<'t> fn(Tensor<'t>) -> Tensor<'t>| -> Vec<f32> {
        let trace = Trace::inference();
        let variable = trace.input("x", F32, (x.len(),));
        let [dx] = trace.gradients(loss(variable), [variable]);
        let mut session = session();
        let program = session.compile(&trace, [dx]).expect("it compiles");
        let [dx] = session
            .run(&program, (&Array1::from(x.to_vec()),))
            .expect("it runs");
        dx.view::<f32>().expect("f32").iter().copied().collect()
    };
    let all_nan = |dx: &[f32]| dx.iter().all(|x| x.is_nan());
    let of_most = gradient(&[f32::NAN, 1.0], |x| {
        x.segment_max(x.trace().full(0.0, I32, (2,)), 1).sum()
    });
    assert!(all_nan(&of_most), "{of_most:?}");
    let of_log = gradient(&[-5.0, -5.0], |x| x.logcumsumexp(0).sqrt().sum());
    assert!(all_nan(&of_log), "{of_log:?}");
    assert_eq!(gradient(&[2e38], |x| x.logcumsumexp(0).sum()), [1.0]);
}
