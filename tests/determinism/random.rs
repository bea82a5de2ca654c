//! Random numbers: those of a key are the same wherever it is used, and every distribution has its
//! shape.

use ndarray::{Array2, arr1};
use slabwise::feed::Input;
use slabwise::prelude::*;
use slabwise::{CompileOptions, Fuse, Key};
use slabwise_kernels::random;

use crate::bits;

const MANY: usize = 200_000;

/// The stream of the first numbers of a key, as documented in `trace/random.rs`.
const KEYED: u32 = 1 << 31;

fn session(threads: usize, options: CompileOptions) -> Session {
    Session::new(Device::Cpu, Params::seeded(3))
        .expect("a session")
        .with_threads(threads)
        .with_options(options)
}

/// The values of a tensor of a trace, f32 or i32.
fn drawn(build: impl for<'t> Fn(&'t Trace) -> Tensor<'t>) -> Vec<f32> {
    let trace = Trace::inference();
    let out = build(&trace).cast(F32);
    let mut session = session(2, CompileOptions::default());
    let program = session.compile(&trace, [out]).expect("it compiles");
    let [out] = session.run(&program, ()).expect("it runs");
    out.array::<f32>().expect("f32").iter().copied().collect()
}

/// Everything that can be done with keys, in one program.
fn keyed<'t>(trace: &'t Trace, words: Tensor<'t>, logits: Tensor<'t>) -> [Tensor<'t>; 4] {
    let [a, b] = trace.key(0x1234_5678_9ABC_DEF0).split::<2>();
    let row = Key::of(words.slice(0, 1..2).reshape([3]));
    let nested = row.fold_in(3).fold_in(trace.arange(5).max()).split::<2>()[1];
    let column = Key::of(words.t().slice(1, 2..3).reshape([-1i64]).slice(0, ..3));
    let x = a.normal((40, 7)) * b.bernoulli(0.7, (40, 7)).cast(F32) + row.uniform((7,));
    let y =
        nested.exponential((33,)) + column.gumbel((33,)) * nested.words().slice(0, ..1).cast(F32);
    let classes = a.fold_in(9).categorical(logits, 1);
    let order = b.fold_in(-1).permutation(1000u32);
    [x, y, classes, order]
}

/// The bits of the numbers that one run draws.
type Drawn = (Vec<u32>, Vec<u32>, Vec<i32>, Vec<i32>);

#[test]
fn keys_give_the_same_bits_on_any_number_of_threads_and_however_compiled() {
    let words = Array2::from_shape_fn((4, 3), |(i, j)| (i * 1_000_003 + j * 77_777) as i32 - 5);
    let logits = Array2::from_shape_fn((12, 6), |(i, j)| ((i * 7 + j * 5) % 11) as f32 * 0.3);
    let run = |threads: usize, options: CompileOptions, dynamic: bool, training: bool| {
        let trace = match training {
            true => Trace::training(),
            false => Trace::inference(),
        };
        let outputs = keyed(
            &trace,
            trace.input("words", I32, (4, 3)),
            trace.input("logits", F32, (12, 6)),
        );
        let mut session = session(threads, options);
        let program = session.compile(&trace, outputs).expect("it compiles");
        let feed: [&dyn Input; 2] = [&words, &logits];
        let runs = (0..2).map(|_| {
            let outputs = match dynamic {
                true => session.run_dynamic(&program, &feed[..]),
                false => session.run(&program, &feed[..]),
            };
            let outputs = outputs.expect("it runs");
            let floats = |i: usize| bits(&outputs[i].array().expect("f32"));
            let ints = |i: usize| {
                outputs[i]
                    .array::<i32>()
                    .expect("i32")
                    .iter()
                    .copied()
                    .collect()
            };
            (floats(0), floats(1), ints(2), ints(3))
        });
        let runs: Vec<Drawn> = runs.collect();
        assert!(runs[0] == runs[1], "the next step has the same numbers");
        runs.into_iter().next().expect("two runs")
    };
    let usual = CompileOptions::default;
    let expected = run(1, usual(), false, false);
    let unfused = CompileOptions {
        fuse: Fuse::none(),
        ..usual()
    };
    for (threads, options, dynamic, training) in [
        (2, usual(), false, false),
        (5, usual(), false, true),
        (2, usual(), true, false),
        (1, unfused, false, false),
        (3, unfused, true, true),
    ] {
        let got = run(threads, options, dynamic, training);
        let how = format!("{threads} threads, dynamic {dynamic}, training {training}");
        assert_eq!(got.2, expected.2, "{how}: other classes");
        assert!(got.3 == expected.3, "{how}: another permutation");
        assert_eq!(got.0, expected.0, "{how}: other bits of x");
        assert_eq!(got.1, expected.1, "{how}: other bits");
    }
}

#[test]
fn a_key_is_a_seed_of_philox_and_its_words_can_be_passed() {
    let seed = 0xFEDC_BA98_7654_3210_u64;
    let got = drawn(|trace| trace.key(seed).uniform((9,)));
    let expected: Vec<f32> = (0..9).map(|i| random::uniform(seed, 0, KEYED, i)).collect();
    assert_eq!(got, expected);
    // The same key as an input, whole and as a part of a larger tensor.
    let trace = Trace::inference();
    let words = trace.input("words", I32, (3,));
    let joined = trace.concat(&[trace.zeros((2,)).cast(I32), words, words], 0);
    let outputs = [
        Key::of(words).uniform((9,)),
        Key::of(joined.slice(0, 2..5)).uniform((9,)),
        Key::of(words).fold_in(2).uniform((9,)),
        Key::of(Key::of(words).fold_in(2).words()).uniform((9,)),
    ];
    let mut session = session(1, CompileOptions::default());
    let program = session.compile(&trace, outputs).expect("it compiles");
    let words = arr1(&[seed as u32 as i32, (seed >> 32) as u32 as i32, 0]);
    let outputs = session.run(&program, (&words,)).expect("it runs");
    let floats: Vec<Vec<f32>> = outputs
        .iter()
        .map(|o| o.array::<f32>().expect("f32").iter().copied().collect())
        .collect();
    assert_eq!((&floats[0], &floats[1]), (&expected, &expected));
    assert_eq!(floats[2], floats[3]);
    assert_ne!(floats[0], floats[2]);
}

#[test]
fn keys_made_of_one_key_differ() {
    let all = drawn(|trace| {
        let key = trace.key(7);
        let words: Vec<Tensor<'_>> = (0..40)
            .map(|i| key.fold_in([i, -i - 1][i as usize % 2]).words())
            .chain(key.split::<2>()[1].split::<8>().map(Key::words))
            .collect();
        trace.stack(&words, 0)
    });
    let mut keys: Vec<[u32; 3]> = all
        .chunks_exact(3)
        .map(|words| [words[0], words[1], words[2]].map(f32::to_bits))
        .collect();
    // split::<8>() of fold_in(1) is none of the forty.
    keys.sort_unstable();
    keys.dedup();
    assert_eq!(keys.len(), 48);
}

/// Mean, variance, skewness.
fn moments(x: &[f32]) -> [f64; 3] {
    let n = x.len() as f64;
    let mean = x.iter().map(|&v| f64::from(v)).sum::<f64>() / n;
    let central = |p: i32| {
        x.iter()
            .map(|&v| (f64::from(v) - mean).powi(p))
            .sum::<f64>()
            / n
    };
    let variance = central(2);
    [mean, variance, central(3) / variance.powf(1.5)]
}

#[track_caller]
fn assert_moments(what: &str, x: &[f32], expected: [f64; 3]) {
    // Five standard errors of a mean of as many numbers, more for higher moments.
    let got = moments(x);
    let allowed = 5.0 / (x.len() as f64).sqrt();
    for (k, (got, want)) in got.iter().zip(expected).enumerate() {
        assert!(
            (got - want).abs() <= allowed * (1.0 + want.abs()) * (k * k + 1) as f64,
            "{what}: moment {k} is {got}, not {want}"
        );
    }
}

/// Fails if counts are farther from the expected ones than chance explains: χ² beyond its mean by
/// six standard deviations.
#[track_caller]
fn assert_counts(what: &str, counts: &[usize], shares: &[f64]) {
    let n: usize = counts.iter().sum();
    let chi: f64 = counts
        .iter()
        .zip(shares)
        .map(|(&c, &share)| {
            let expected = share * n as f64;
            (c as f64 - expected).powi(2) / expected
        })
        .sum();
    let freedom = (counts.len() - 1) as f64;
    assert!(
        chi < freedom + 6.0 * (2.0 * freedom).sqrt() + 6.0,
        "{what}: χ² is {chi} of {freedom} degrees of freedom: {counts:?}"
    );
}

fn counts(x: &[f32], kinds: usize) -> Vec<usize> {
    let mut counts = vec![0; kinds];
    x.iter().for_each(|&v| counts[v as usize] += 1);
    counts
}

#[test]
fn distributions_have_their_moments() {
    let shape = (MANY,);
    let uniform = drawn(|t| t.uniform(shape));
    assert_moments("uniform", &uniform, [0.5, 1.0 / 12.0, 0.0]);
    assert_moments(
        "normal",
        &drawn(|t| t.key(1).normal(shape)),
        [0.0, 1.0, 0.0],
    );
    let exponential = drawn(|t| t.key(2).exponential(shape));
    assert_moments("exponential", &exponential, [1.0, 1.0, 2.0]);
    assert!(exponential.iter().all(|&x| x >= 0.0 && x.is_finite()));
    let gumbel = drawn(|t| t.key(3).gumbel(shape));
    assert_moments("gumbel", &gumbel, [0.577_216, 1.644_934, 1.139_547]);
    assert!(gumbel.iter().all(|x| x.is_finite()));
    let of = drawn(|t| {
        let mean = t.full(3.0, F32, (MANY / 2, 1));
        t.key(4).normal_of(mean, t.full(0.5, F32, (1, 2)))
    });
    assert_moments("normal_of", &of, [3.0, 0.25, 0.0]);
    let scaled: Vec<f32> = drawn(|t| t.key(5).bernoulli(0.3, shape));
    assert_moments("bernoulli", &scaled, [0.3, 0.21, 0.4 / 0.21f64.sqrt()]);
    let by_row = drawn(|t| {
        let p = t.arange(5).cast(F32) * 0.25;
        t.key(6).bernoulli(p, (MANY / 5, 5)).cast(F32).mean_over(0)
    });
    for (i, share) in by_row.iter().enumerate() {
        assert!((share - 0.25 * i as f32).abs() < 0.01, "{by_row:?}");
    }
}

#[test]
fn a_truncated_normal_stays_in_its_range() {
    // Mean and variance by the densities and distribution function at the bounds.
    for (range, expected) in [
        (-2.0..2.0, [0.0, 0.773_741, 0.0]),
        (0.5..3.0, [1.119_9, 0.246_5, f64::NAN]),
        (-40.0..40.0, [0.0, 1.0, 0.0]),
    ] {
        let x = drawn(|t| t.key(8).truncated_normal(range.clone(), (MANY,)));
        assert!(x.iter().all(|v| range.contains(v) || *v == range.end));
        let got = moments(&x);
        for (got, want) in got.iter().zip(expected).filter(|(_, want)| !want.is_nan()) {
            assert!((got - want).abs() < 0.02, "{range:?}: {got}, not {want}");
        }
    }
}

#[test]
fn integers_and_classes_come_as_often_as_they_are_likely() {
    let dice = drawn(|t| t.key(10).randint(-3..4, (MANY,)) + 3);
    assert_counts("randint", &counts(&dice, 7), &[1.0 / 7.0; 7]);
    let wide = drawn(|t| t.key(11).randint(0..i32::MAX, (MANY,)) / (1 << 28));
    assert_counts("randint to the end", &counts(&wide, 8), &[0.125; 8]);
    let odd = drawn(|t| {
        let x = t.key(11).randint(i32::MIN..-1, (MANY,));
        x - x / 2 * 2 + 1
    });
    assert_counts("the lowest bit", &counts(&odd, 2), &[0.5; 2]);
    let weights = [0.1f32, 0.4, 0.0, 0.2, 0.3];
    let shares = weights.map(f64::from);
    let drawn_by = |axis: usize| {
        drawn(move |t| {
            let logits = t.arange(5);
            let at = |k: i32, w: f32| logits.equal(k).cast(F32) * w;
            let weights = (0..).zip(weights).map(|(k, w)| at(k, w));
            let logits = weights.reduce(|a, b| a + b).expect("five").ln();
            let rows = match axis {
                1 => logits.reshape([1, 5]).expand([20_000, 5]),
                _ => logits.reshape([5, 1]).expand([5, 20_000]),
            };
            t.key(12).categorical(rows, axis)
        })
    };
    for axis in [0, 1] {
        let got = counts(&drawn_by(axis), 5);
        assert_eq!(got[2], 0, "a class of weight 0 is never drawn");
        let some = |x: &[usize]| [x[0], x[1], x[3], x[4]];
        assert_counts(
            "categorical",
            &some(&got),
            &[shares[0], shares[1], shares[3], shares[4]],
        );
    }
    // Without replacement: all different, and the first as often as it is likely.
    let chosen = drawn(|t| {
        let logits = (t.arange(4) + 1).cast(F32).ln().reshape([1, 4]);
        t.key(13).choices(logits.expand([20_000, 4]), 3, 1)
    });
    let mut first = [0; 4];
    for row in chosen.chunks_exact(3) {
        assert!(
            row[0] != row[1] && row[1] != row[2] && row[0] != row[2],
            "{row:?}"
        );
        first[row[0] as usize] += 1;
    }
    assert_counts("choices", &first, &[0.1, 0.2, 0.3, 0.4]);
}

#[test]
fn permutations_are_permutations_and_all_are_likely() {
    for n in [0usize, 1, 2, 100, 40_000] {
        let mut order = drawn(|t| t.key(14).permutation(n));
        if n > 50 {
            let fixed = order.iter().zip(0..).filter(|(a, b)| **a == *b as f32);
            assert!(fixed.count() < 8, "of length {n}");
        }
        order.sort_by(f32::total_cmp);
        assert!(order.iter().zip(0..).all(|(a, b)| *a == b as f32));
        assert_eq!(order.len(), n);
    }
    let ranks = drawn(|t| {
        let all: Vec<Tensor<'_>> = (0..600)
            .map(|i| t.key(15).fold_in(i).permutation(3u32))
            .collect();
        let digits = t.stack(&all, 0);
        let column = |k: usize| digits.slice(1, k..k + 1).reshape([-1i64]);
        column(0) * 2 + column(1).gt(column(2)).cast(I32)
    });
    assert_counts("permutation", &counts(&ranks, 6), &[1.0 / 6.0; 6]);
}

#[test]
fn steps_differ_unless_a_key_is_used_and_gradients_reach_means() {
    let params = Params::seeded(0);
    let mean = params.root().param("mean", (3,), Init::Constant(0.5));
    let trace = Trace::training();
    let x = trace.randint(0..1000, (50,)).cast(F32).sum();
    let step = trace.completed_steps();
    let y = trace
        .key(1)
        .fold_in(step)
        .randint(0..1000, (50,))
        .cast(F32)
        .sum();
    let z = trace.key(1).randint(0..1000, (50,)).cast(F32).sum();
    let noisy = trace.normal_of(trace.param(&mean), trace.ones((100, 3)));
    let [gradient] = trace.gradients(noisy.sum(), [&mean]);
    let mut session = Session::new(Device::Cpu, params).expect("a session");
    let program = session
        .compile(&trace, [x, y, z, gradient.max()])
        .expect("it compiles");
    let mut steps: Vec<[f32; 4]> = Vec::new();
    for _ in 0..3 {
        let out = session.run(&program, ()).expect("it runs");
        steps.push([0, 1, 2, 3].map(|i: usize| out[i].item()));
    }
    assert!(
        steps[0][0] != steps[1][0] && steps[1][0] != steps[2][0],
        "{steps:?}"
    );
    assert!(
        steps[0][1] != steps[1][1] && steps[1][1] != steps[2][1],
        "{steps:?}"
    );
    assert!(
        steps[0][2] == steps[1][2] && steps[1][2] == steps[2][2],
        "{steps:?}"
    );
    assert!(steps.iter().all(|s| s[3] == 100.0), "{steps:?}");
}

#[test]
fn mistakes_name_the_numbers() {
    let trace = Trace::inference();
    let key = trace.key(0);
    let _ = key.randint(3..3, (2,));
    let _ = trace.randint(i32::MIN..i32::MAX, (2,));
    let _ = key.truncated_normal(2.0..1.0, (2,));
    let _ = key.truncated_normal(f32::NAN..1.0, (2,));
    let _ = Key::of(trace.zeros((3,))).uniform((2,));
    let _ = Key::of(trace.arange(4)).uniform((2,));
    let _ = key.fold_in(trace.arange(2));
    let _ = key.categorical(trace.zeros((2, 3)), 2);
    let _ = key.choices(trace.zeros((2, 3)), 4, 1);
    let messages: Vec<String> = trace
        .finish(&[])
        .expect_err("mistakes")
        .into_iter()
        .map(|m| m.message)
        .collect();
    assert_eq!(
        messages,
        [
            "randint: 3..3 has no length from 1 to 2147483647",
            "randint: -2147483648..2147483647 has no length from 1 to 2147483647",
            "truncated_normal: no number lies between 2 and 1",
            "truncated_normal: no number lies between NaN and 1",
            "a key of f32 [3]: i32 [3] is needed",
            "a key of i32 [4]: i32 [3] is needed",
            "fold_in of i32 [2]: an i32 scalar is needed",
            "argmax: [2, 3] has no axis 2",
            "topk: axis 1 of [2, 3] does not have 4 elements at every length",
        ]
    );
}

/// The last dimension of an empty draw has no numbers.
#[test]
fn empty_draws_are_empty() {
    let none: Vec<f32> = drawn(|t| t.key(0).normal((0, 3)));
    assert!(none.is_empty());
    let classes: Vec<f32> = drawn(|t| t.key(0).categorical(t.zeros((0, 3)), 1));
    assert!(classes.is_empty());
}
