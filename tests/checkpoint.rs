//! Checkpointed segments: recomputation gives the same bits in fewer bytes; attention in tiles.

mod support;

use ndarray::{ArrayD, IxDyn};
use slabwise::nn::{BatchNorm1d, Dropout, LayerNorm, Linear};
use slabwise::optim::Adam;
use slabwise::prelude::*;
use support::Rng;

const WIDTH: usize = 24;
const BATCH: usize = 200;

fn random(rng: &mut Rng, lengths: &[usize]) -> ArrayD<f32> {
    ArrayD::from_shape_simple_fn(lengths, || rng.float(-1.0, 1.0) as f32)
}

fn bits(array: &ArrayD<f32>) -> Vec<u32> {
    array.iter().map(|v| v.to_bits()).collect()
}

/// Blocks with everything that recomputation could break: products, a dropout mask, running
/// statistics, a skip.
struct Blocks {
    layers: Vec<(BatchNorm1d, Linear, Dropout, Linear)>,
    checkpointed: bool,
}

impl Blocks {
    fn new(at: &Scope, blocks: usize, checkpointed: bool) -> Self {
        let block = |i: usize| {
            let at = at / &format!("block{i}");
            let wide = Linear::new(&at / "wide", WIDTH, 4 * WIDTH);
            (
                BatchNorm1d::new(&at / "norm", WIDTH),
                wide,
                Dropout(0.25),
                Linear::new(&at / "narrow", 4 * WIDTH, WIDTH),
            )
        };
        Blocks {
            layers: (0..blocks).map(block).collect(),
            checkpointed,
        }
    }
}

impl Module for Blocks {
    fn forward<'t>(&self, x: Tensor<'t>) -> Tensor<'t> {
        self.layers
            .iter()
            .fold(x, |x, (norm, wide, dropout, narrow)| {
                let block = |x: Tensor<'t>| {
                    x + x
                        .apply(norm)
                        .apply(wide)
                        .tanh()
                        .apply(dropout)
                        .apply(narrow)
                };
                in_segment(self.checkpointed, x, block)
            })
    }
}

/// Bytes of the slab, and the bits of losses and variables after some steps.
fn trained(checkpointed: bool, threads: usize) -> (u64, Vec<u32>, Vec<Vec<u32>>) {
    let params = Params::seeded(9);
    let model = Blocks::new(&params.root(), 6, checkpointed);
    let trace = Trace::training();
    let x = trace.input("x", F32, (BATCH, WIDTH));
    let y = trace.input("y", F32, (BATCH, WIDTH));
    let loss = x.apply(&model).mse(y);
    trace.minimize(loss, Adam::new(1e-2));
    let mut session = Session::new(Device::Cpu, params)
        .expect("a session")
        .with_threads(threads);
    let program = session.compile(&trace, [loss]).expect("it compiles");
    let rng = &mut Rng(4);
    let (x, y) = (random(rng, &[BATCH, WIDTH]), random(rng, &[BATCH, WIDTH]));
    let losses = (0..5)
        .map(|_| {
            session.run(&program, (&x, &y)).expect("it runs")[0]
                .item()
                .to_bits()
        })
        .collect();
    let state = session
        .names()
        .map(|name| bits(&session.value(name).expect("there")))
        .collect();
    (program.plan().slab_bytes(), losses, state)
}

#[test]
fn segments_cost_no_bit_and_save_bytes() {
    let (_, losses, state) = trained(false, 1);
    for threads in [1, 2] {
        // Kernels need some bytes for each thread.
        let (kept, ..) = trained(false, threads);
        let (again, same_losses, same_state) = trained(true, threads);
        assert_eq!(losses, same_losses);
        assert_eq!(state, same_state, "weights, moments and running statistics");
        assert!(
            again * 3 < kept * 2,
            "{again} bytes with segments, {kept} without"
        );
    }
}

fn in_segment<'t>(
    checkpointed: bool,
    x: Tensor<'t>,
    segment: impl FnOnce(Tensor<'t>) -> Tensor<'t>,
) -> Tensor<'t> {
    if checkpointed {
        x.checkpoint(segment)
    } else {
        segment(x)
    }
}

#[test]
fn values_of_a_segment_used_elsewhere_are_saved() {
    let gradient = |checkpointed: bool| {
        let trace = Trace::training();
        let x = trace.input("x", F32, (3, 4));
        let aside = std::cell::Cell::new(x);
        let y = in_segment(checkpointed, x, |x| {
            let inner = x.exp().tanh();
            aside.set(inner.t());
            // A segment inside of another.
            in_segment(checkpointed, inner, |x| (x * x).sin()) * x
        });
        let loss = (y.sum() + aside.get().square().sum()) * 0.5;
        let [slope] = trace.gradients(loss, [x]);
        let mut session = Session::new(Device::Cpu, Params::seeded(1)).expect("a session");
        let program = session
            .compile(&trace, [loss, slope, aside.get()])
            .expect("it compiles");
        let x = random(&mut Rng(8), &[3, 4]);
        let outputs = session.run(&program, (&x,)).expect("it runs");
        outputs
            .iter()
            .map(|output| bits(&output.array().expect("f32")))
            .collect::<Vec<_>>()
    };
    assert_eq!(gradient(true), gradient(false));
}

/// A training step of a layer of attention: slab bytes, the largest buffer, and the loss and
/// gradient of one run.
fn attended(
    tiles: Tiles,
    queries: usize,
    keys: usize,
    causal: bool,
    mask: &str,
) -> (u64, u64, Vec<f32>) {
    let trace = Trace::training();
    let (batch, heads, width) = (2, 3, 8);
    let params = Params::seeded(2);
    let [q, k, v] = [("q", queries), ("k", keys), ("v", keys)]
        .map(|(name, n)| trace.input(name, F32, (batch, heads, n, width)));
    let weight = trace.param(&(params.root() / "mask").param(
        "weight",
        (queries, keys),
        Init::Uniform {
            low: -1.0,
            high: 1.0,
        },
    ));
    let mask = match mask {
        "added" => Mask::Added(weight),
        // The first key is never masked, because a query without keys has no mean.
        "seen" => {
            Mask::Seen((weight + trace.arange(keys).cast(F32).lt(0.5).cast(F32) * 2.0).gt(0.0))
        }
        _ => Mask::None,
    };
    let normed = q.apply(&LayerNorm::new(params.root() / "norm", width));
    let loss = normed
        .attention_in(tiles, k, v, causal, mask)
        .square()
        .sum();
    let [dq, dk, dv] = trace.gradients(loss, [q, k, v]);
    let mut session = Session::new(Device::Cpu, params)
        .expect("a session")
        .with_threads(2);
    let program = session
        .compile(&trace, [loss, dq, dk, dv])
        .expect("it compiles");
    let rng = &mut Rng(6);
    let [q, k, v] = [queries, keys, keys].map(|n| random(rng, &[batch, heads, n, width]));
    let outputs = session.run(&program, (&q, &k, &v)).expect("it runs");
    let values = outputs
        .iter()
        .flat_map(|output| {
            output
                .array::<f32>()
                .expect("f32")
                .into_iter()
                .collect::<Vec<_>>()
        })
        .collect();
    let largest = program
        .plan()
        .dag()
        .buffers
        .iter()
        .map(|buffer| buffer.bytes)
        .max()
        .unwrap_or(0);
    (program.plan().slab_bytes(), largest, values)
}

#[test]
fn attention_in_tiles_is_attention() {
    for (queries, keys, causal, mask) in [
        (7, 7, true, ""),
        (9, 5, true, "added"),
        (5, 9, true, "seen"),
        (8, 8, false, ""),
        (6, 11, false, "added"),
        (10, 4, false, "seen"),
    ] {
        let (.., whole) = attended(Tiles::Whole, queries, keys, causal, mask);
        let rows = [1, 3, 4, 100].map(Tiles::Queries);
        for tiles in rows.into_iter().chain([Tiles::Auto]) {
            let (.., tiled) = attended(tiles, queries, keys, causal, mask);
            assert_eq!(whole.len(), tiled.len());
            for (i, (a, b)) in whole.iter().zip(&tiled).enumerate() {
                assert!(
                    (a - b).abs() <= 2e-5 * (1.0 + a.abs()),
                    "{i}: {b} by {tiles:?}, {a} at once ({mask} {queries} {keys})"
                );
            }
        }
    }
}

#[test]
fn tiles_never_hold_all_scores() {
    let (n, scores) = (256, 2 * 3 * 256 * 256 * 4);
    let (whole, largest, _) = attended(Tiles::Whole, n, n, true, "");
    assert!(whole > scores && largest >= scores);
    let (tiled, largest, _) = attended(Tiles::Queries(32), n, n, true, "");
    assert!(
        largest <= scores / 8,
        "the largest buffer has {largest} of {scores} bytes"
    );
    assert!(tiled < scores, "{tiled} bytes in tiles, {whole} at once");
    // In one kernel, with a mask for all heads too: a sixth of the scores.
    for mask in ["", "seen", "added"] {
        let (whole, ..) = attended(Tiles::Whole, n, n, false, mask);
        let (one, largest, _) = attended(Tiles::Auto, n, n, false, mask);
        assert!(
            largest <= scores / 6 && one < whole / 5 * 3,
            "{one} bytes in one kernel, {whole} at once; the largest buffer has {largest}"
        );
    }
}

/// A value that simplifies to a constant or a position is always available, so that pinning it
/// costs nothing.
#[test]
fn values_that_simplify_to_constants_can_be_pinned() {
    let trace = Trace::inference();
    let x = trace.input("x", F32, (1, 3));
    let number = trace.full(2.0, F32, (3,)).keep() + x;
    let zeros = trace.zeros((3,)).exp().keep() * x;
    let places = trace.arange(3).keep().cast(F32) + x;
    let mut session = Session::new(Device::Cpu, Params::seeded(0)).expect("a session");
    let kept = [
        number,
        zeros,
        places,
        x.argmax(0).keep(),
        x.keep(),
        trace.arange(3).keep(),
    ];
    let program = session.compile(&trace, kept).expect("it compiles");
    let x = ndarray::arr2(&[[1.0f32, -2.0, 3.0]]);
    let outputs = session.run(&program, (&x,)).expect("it runs");
    let of = |at: usize| {
        outputs[at]
            .array::<f32>()
            .expect("f32")
            .into_raw_vec_and_offset()
            .0
    };
    assert_eq!(
        (of(0), of(1), of(2)),
        (
            vec![3.0, 0.0, 5.0],
            vec![1.0, -2.0, 3.0],
            vec![1.0, -1.0, 5.0]
        )
    );
    assert_eq!(
        outputs[3]
            .array::<i32>()
            .expect("i32")
            .into_raw_vec_and_offset()
            .0,
        [0, 0, 0]
    );
    assert_eq!(
        outputs[5]
            .array::<i32>()
            .expect("i32")
            .into_raw_vec_and_offset()
            .0,
        [0, 1, 2]
    );
}

/// Queries that see no key, and a key of an infinite score that a mask hides: by products as in one
/// kernel.
#[test]
fn hidden_keys_add_nothing() {
    let run = |tiles: Tiles, added: bool| {
        let trace = Trace::inference();
        let [q, k, v] = ["q", "k", "v"].map(|name| trace.input(name, F32, (1, 2, 2)));
        let seen = trace.input("seen", Bool, (2, 2));
        let mask = match added {
            true => Mask::Added(seen.select(0.0, f32::NEG_INFINITY)),
            false => Mask::Seen(seen),
        };
        let options = slabwise::tensor::AttentionOptions::new()
            .mask(mask)
            .tiles(tiles);
        let y = q.attention_with(k, v, options);
        // Of the first query alone.
        let gradients = trace.gradients(y.slice(1, ..1).square().sum(), [q, k, v]);
        let outputs = [&[y][..], &gradients].concat();
        let mut session = Session::new(Device::Cpu, Params::seeded(0)).expect("a session");
        let program = session.compile_any(&trace, &outputs).expect("it compiles");
        let of = |values: [f32; 4]| {
            ArrayD::from_shape_vec(IxDyn(&[1, 2, 2]), values.to_vec()).expect("four")
        };
        let seen = ndarray::arr2(&[[true, true], [false, false]]);
        let feed = (
            &of([1.0, 0.5, 2.0, 1.0]),
            &of([0.3, -0.2, 0.1, 0.7]),
            &of([1.0, 2.0, 3.0, 4.0]),
            &seen,
        );
        let outputs = session.run_any(&program, feed).expect("it runs");
        let all = outputs.iter().map(|o| o.array::<f32>().expect("f32"));
        all.map(|o| o.into_iter().collect::<Vec<f32>>())
            .collect::<Vec<_>>()
    };
    for added in [false, true] {
        let [whole, one] = [Tiles::Whole, Tiles::Auto].map(|tiles| run(tiles, added));
        for (whole, one) in whole.iter().zip(&one) {
            for (a, b) in whole.iter().zip(one) {
                let same = a.is_nan() && b.is_nan() || (a - b).abs() <= 1e-6;
                assert!(same, "{a} by products, {b} in one kernel, added: {added}");
            }
        }
        assert!(whole[0][2..].iter().all(|y| y.is_nan()), "{whole:?}");
        assert!(
            whole[1..].iter().flatten().all(|x| x.is_finite()),
            "{whole:?}"
        );
    }
    let trace = Trace::inference();
    let q = trace.input("q", F32, (1, 1));
    let k = trace.input("k", F32, (2, 1));
    let bias = trace.input("bias", F32, (1, 2));
    let v = trace.input("v", F32, (2, 1));
    let y = q.attention(k, v, false, Mask::Added(bias));
    let mut session = Session::new(Device::Cpu, Params::seeded(0)).expect("a session");
    let program = session.compile(&trace, [y]).expect("it compiles");
    let feed = (
        &ndarray::arr2(&[[1.0f32]]),
        &ndarray::arr2(&[[1.0f32], [f32::INFINITY]]),
        &ndarray::arr2(&[[0.0, f32::NEG_INFINITY]]),
        &ndarray::arr2(&[[3.0f32], [7.0]]),
    );
    let [y] = session.run(&program, feed).expect("it runs");
    assert_eq!(y.view::<f32>().expect("f32")[[0, 0]], 3.0);
}
