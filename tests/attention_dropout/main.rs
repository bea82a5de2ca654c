//! Dropout of attention weights: values and gradients against formulas written out here in f64, the
//! random numbers of tiles, steps and recomputation, and bytes.

mod case;
mod layers;
#[path = "../support/mod.rs"]
mod support;

use case::{Case, PLAIN, cases};
use ndarray::ArrayD;
use slabwise::Precision;
use slabwise::nn::Linear;
use slabwise::optim::Sgd;
use slabwise::prelude::*;
use slabwise::tensor::AttentionOptions;
use support::Rng;

const BATCH: usize = 2;
const WIDTH: usize = 6;

fn random(rng: &mut Rng, lengths: &[usize]) -> ArrayD<f32> {
    ArrayD::from_shape_simple_fn(lengths, || rng.float(-1.0, 1.0) as f32)
}

fn bits(array: &ArrayD<f32>) -> Vec<u32> {
    array.iter().map(|v| v.to_bits()).collect()
}

#[test]
fn kept_weights_are_those_of_the_softmax_and_gradients_follow_them() {
    for case in cases() {
        let got = case.run(5, 1);
        case.check_weights(&got, 2e-6);
        case.check_gradients(&got, 2e-5);
    }
}

#[test]
fn halves_drop_weights() {
    for (stored, precision, off) in [
        (F16, Precision::F32, 2e-3),
        (BF16, Precision::F32, 1e-2),
        (F32, Precision::F16, 2e-3),
        (F32, Precision::Bf16, 1e-2),
    ] {
        for tiles in [Tiles::Auto, Tiles::Queries(4)] {
            let case = Case {
                causal: true,
                key_heads: 2,
                stored,
                precision,
                tiles,
                ..PLAIN
            };
            let got = case.run(5, 1);
            case.check_weights(&got, off);
            case.check_gradients(&got, 4.0 * off);
        }
    }
}

/// Steps and seeds draw different numbers, and the same seed the same.
#[test]
fn each_step_and_each_seed_drops_other_weights() {
    for tiles in [Tiles::Whole, Tiles::Queries(4)] {
        let case = Case { tiles, ..PLAIN };
        let first = case.run(5, 1);
        assert_eq!(bits(&first.weights), bits(&case.run(5, 1).weights));
        for (seed, steps) in [(5, 2), (6, 1)] {
            let other = case.run(seed, steps);
            let [first, other] = [&first, &other].map(|got| case.check_weights(got, 2e-6));
            let same = first.iter().zip(&other).filter(|(a, b)| a == b).count();
            let (n, p) = (first.len() as f64, f64::from(case.p));
            let alike = p * p + (1.0 - p) * (1.0 - p);
            let deviation = (alike * (1.0 - alike) / n).sqrt();
            assert!(
                (same as f64 / n - alike).abs() < 5.0 * deviation,
                "{same} of {n}"
            );
        }
    }
}

/// Rows, heads, examples and tiles are dropped independently: two different parts agree as often as
/// independent draws do.
#[test]
fn parts_and_tiles_are_independent() {
    let (n, queries, keys) = (2 * 2 * 64, 512, 64);
    for tiles in [Tiles::Auto, Tiles::Whole, Tiles::Queries(64)] {
        let case = Case {
            heads: 2,
            key_heads: 1,
            queries,
            keys,
            tiles,
            ..PLAIN
        };
        let got = case.run(9, 1);
        let kept = case.check_weights(&got, 2e-6);
        let p = f64::from(case.p);
        let alike = p * p + (1.0 - p) * (1.0 - p);
        // Rows one apart, tiles of 64 and of 128, heads, and examples.
        for distance in [
            1,
            keys,
            64 * keys,
            128 * keys,
            queries * keys,
            2 * queries * keys,
        ] {
            let pairs = kept.len() - distance;
            let same = (0..pairs)
                .filter(|&i| kept[i] == kept[i + distance])
                .count();
            let deviation = (alike * (1.0 - alike) / pairs as f64).sqrt();
            let off = same as f64 / pairs as f64 - alike;
            assert!(
                off.abs() < 6.0 * deviation,
                "{same} of {pairs} at {distance}, {tiles:?}"
            );
        }
        assert_eq!(kept.len(), n * queries * keys / 64);
    }
}

/// Attention without dropout is the same graph and gives the same bits.
#[test]
fn nothing_changes_in_inference_or_without_dropout() {
    let run = |trace: &Trace, case: &Case, p: Option<f32>| {
        let q = trace.input("q", F32, (BATCH, case.heads, case.queries, WIDTH));
        let k = trace.input("k", F32, (BATCH, case.key_heads, case.keys, WIDTH));
        let options = case.options(trace);
        let options = p.map_or(options, |p| options.dropout(p));
        let y = q.attention_with(k, k, options);
        let gradients = trace.gradients(y.square().sum(), [q, k]);
        // Later numbers of the trace stay, too.
        let outputs = [&[y, y.dropout(0.5)][..], &gradients].concat();
        let graph = trace.finish(&outputs).expect("a graph").to_string();
        let mut session = Session::new(Device::Cpu, Params::seeded(1)).expect("a session");
        let program = session.compile_any(trace, &outputs).expect("it compiles");
        let outputs = session
            .run_any(&program, (&case.queries(), &case.keys()))
            .expect("it runs");
        let all = outputs
            .iter()
            .map(|o| bits(&o.array::<f32>().expect("f32")));
        (graph, all.collect::<Vec<_>>())
    };
    for case in cases() {
        let plain = run(&Trace::inference(), &case, None);
        assert!(
            plain == run(&Trace::inference(), &case, Some(0.5)),
            "{case:?}"
        );
        assert!(
            plain == run(&Trace::inference(), &case, Some(1.0)),
            "{case:?}"
        );
        let plain = run(&Trace::training(), &case, None);
        assert!(
            plain == run(&Trace::training(), &case, Some(0.0)),
            "{case:?}"
        );
        // The comparison sees a dropout.
        let dropped = run(&Trace::training(), &case, Some(0.5));
        assert!(plain.0 != dropped.0 && plain.1 != dropped.1, "{case:?}");
    }
}

#[test]
fn with_probability_one_nothing_is_kept() {
    for case in cases() {
        let case = Case { p: 1.0, ..case };
        let got = case.run(3, 1);
        let zeros = |x: &ArrayD<f32>| x.iter().all(|&x| x == 0.0);
        assert!(zeros(&got.weights), "{case:?}: {}", got.weights);
        assert!(got.gradients.iter().all(zeros), "{case:?}");
    }
}

/// The largest buffer of a training step.
fn largest(tiles: Tiles, n: usize) -> u64 {
    let trace = Trace::training();
    let [q, k, v] = ["q", "k", "v"].map(|name| trace.input(name, F32, (BATCH, 3, n, 8)));
    let options = AttentionOptions::new().causal().tiles(tiles).dropout(0.2);
    let loss = q.attention_with(k, v, options).square().sum();
    let gradients = trace.gradients(loss, [q, k, v]);
    let mut session = Session::new(Device::Cpu, Params::seeded(0)).expect("a session");
    let program = session
        .compile_any(&trace, &gradients)
        .expect("it compiles");
    let buffers = &program.plan().dag().buffers;
    buffers.iter().map(|buffer| buffer.bytes).max().unwrap_or(0)
}

#[test]
fn tiles_with_dropout_never_hold_all_scores() {
    let scores = |n: usize| (BATCH * 3 * n * n * 4) as u64;
    assert!(largest(Tiles::Whole, 256) >= scores(256));
    for (tiles, n, share) in [(Tiles::Queries(32), 256, 8), (Tiles::Auto, 1024, 8)] {
        let largest = largest(tiles, n);
        assert!(
            largest <= scores(n) / share,
            "the largest buffer has {largest} of {} bytes, {tiles:?}",
            scores(n)
        );
    }
}

/// Losses and weights after three steps of residual layers of attention.
fn train(budget: Budget, tiles: Tiles, checkpointed: bool) -> Result<(Vec<u32>, Vec<u32>, usize)> {
    let (length, width, layers) = (48, 32, 4);
    let params = Params::seeded(7);
    let trace = Trace::training();
    let mut x = trace.input("x", F32, (4, length, width));
    let target = trace.input("target", F32, (4, length, width));
    for i in 0..layers {
        let at = &params.root() / &format!("layer{i}");
        let joined = Linear::new(&at / "joined", width, 3 * width);
        let options = AttentionOptions::new().causal().tiles(tiles).dropout(0.3);
        let attended = match checkpointed {
            true => x.checkpoint(|x| x.apply(&joined).self_attention_with(4, options)),
            false => x.apply(&joined).self_attention_with(4, options),
        };
        x = x + attended;
    }
    let loss = x.mse(target);
    trace.minimize(loss, Sgd::new(0.5));
    let mut session = Session::new(Device::Cpu, params.clone())?
        .with_threads(2)
        .with_budget(budget);
    let program = session.compile(&trace, [loss])?;
    let again = program.plan().budget_report().tasks.len();
    let rng = &mut Rng(8);
    let [x, target] = [0, 1].map(|_| random(rng, &[4, length, width]));
    let mut losses = Vec::new();
    for _ in 0..3 {
        let [loss] = session.run(&program, (&x, &target))?;
        losses.extend(bits(&loss.array::<f32>().expect("f32")));
    }
    let mut weights = Vec::new();
    for i in 0..layers {
        weights.extend(bits(&session.value(&format!("layer{i}.joined.weight"))?));
    }
    Ok((losses, weights, again))
}

/// Recomputed weights are dropped as in the forward pass.
#[test]
fn recomputation_drops_the_same_weights() {
    for tiles in [Tiles::Auto, Tiles::Queries(16)] {
        let all = train(Budget::Unlimited, tiles, false).expect("it compiles");
        assert!(all.0[0] != all.0[1]);
        let checkpointed = train(Budget::Unlimited, tiles, true).expect("it compiles");
        assert!(
            (&all.0, &all.1) == (&checkpointed.0, &checkpointed.1),
            "{tiles:?}"
        );
        let (mut kept, mut again) = (0, 0);
        for share in [0.9, 0.75, 0.6] {
            match train(Budget::Fraction(share), tiles, false) {
                Ok(within) => {
                    assert_eq!(within.0, all.0, "losses within {share}, {tiles:?}");
                    assert!(within.1 == all.1, "weights within {share}, {tiles:?}");
                    (kept, again) = (kept + 1, again + within.2);
                }
                Err(slabwise::Error::Budget { .. }) => {}
                Err(other) => panic!("{other}"),
            }
        }
        assert!(
            kept >= 1 && again >= 1,
            "{again} kernels again in {kept} programs, {tiles:?}"
        );
    }
}

/// Lengths that runs decide.
#[test]
fn batches_of_any_length_drop_weights() {
    for (batch, queries) in [
        (Dim::bounded("batch", 5), Dim::Fixed(16)),
        (Dim::Fixed(3), Dim::bounded("queries", 20)),
        (Dim::unbounded("batch"), Dim::Fixed(16)),
    ] {
        let trace = Trace::training();
        let q = trace.input("q", F32, (batch, 2, queries, 4));
        let k = trace.input("k", F32, (batch, 1, queries, 4));
        // Values that are 1 everywhere: each result is the sum of the kept weights.
        let options = AttentionOptions::new().dropout(0.5);
        let y = q.attention_with(k, k * 0.0 + 1.0, options);
        let mut session = Session::new(Device::Cpu, Params::seeded(1)).expect("a session");
        let program = session.compile(&trace, [y]).expect("it compiles");
        let (q, k) = (
            random(&mut Rng(1), &[3, 2, 16, 4]),
            random(&mut Rng(2), &[3, 1, 16, 4]),
        );
        let [y] = session.run(&program, (&q, &k)).expect("it runs");
        let y = y.array::<f32>().expect("f32");
        assert_eq!(y.shape(), [3, 2, 16, 4]);
        let mean = y.mean().expect("elements");
        assert!((mean - 1.0).abs() < 0.15 && y.std(0.0) > 0.1, "{mean}");
    }
}

/// Without queries or examples nothing is drawn; without keys results are NaN, as without dropout.
#[test]
fn lengths_of_zero_have_nothing_to_drop() {
    for [batch, queries, keys] in [[0, 3, 4], [2, 0, 4], [2, 3, 0]] {
        let [plain, dropped] = [0.0, 0.5].map(|p| {
            let trace = Trace::training();
            let q = trace.input("q", F32, (batch, 4, queries, WIDTH));
            let k = trace.input("k", F32, (batch, 2, keys, WIDTH));
            let options = AttentionOptions::new().tiles(Tiles::Whole).dropout(p);
            let y = q.attention_with(k, k, options);
            let [dq, dk] = trace.gradients(y.sum(), [q, k]);
            let mut session = Session::new(Device::Cpu, Params::seeded(0)).expect("a session");
            let program = session.compile(&trace, [y, dq, dk]).expect("it compiles");
            let (q, k) = (
                ArrayD::<f32>::ones(vec![batch, 4, queries, WIDTH]),
                ArrayD::<f32>::ones(vec![batch, 2, keys, WIDTH]),
            );
            let outputs = session.run(&program, (&q, &k)).expect("it runs");
            outputs.map(|output| output.array::<f32>().expect("f32"))
        });
        for (plain, dropped) in plain.iter().zip(&dropped) {
            let same = |(a, b): (&f32, &f32)| a == b || a.is_nan() && b.is_nan();
            assert_eq!(plain.shape(), dropped.shape());
            assert!(plain.iter().zip(dropped).all(same), "{plain} {dropped}");
        }
    }
}
