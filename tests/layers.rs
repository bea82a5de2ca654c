//! Layers against formulas written out here in f64, their state between steps, and their errors.

mod support;

use ndarray::ArrayD;
use slabwise::nn::*;
use slabwise::optim::Sgd;
use slabwise::prelude::*;
use support::Rng;

fn random(rng: &mut Rng, lengths: &[usize], (low, high): (f64, f64)) -> ArrayD<f32> {
    ArrayD::from_shape_simple_fn(lengths, || rng.float(low, high) as f32)
}

#[track_caller]
fn assert_close(got: &[f32], expected: &[f64], tolerance: f64) {
    assert_eq!(got.len(), expected.len());
    for (i, (g, e)) in got.iter().zip(expected).enumerate() {
        assert!(
            (f64::from(*g) - e).abs() <= tolerance * (1.0 + e.abs()),
            "element {i}: {g} instead of {e}"
        );
    }
}

fn values(array: &ArrayD<f32>) -> Vec<f64> {
    array.iter().map(|&v| f64::from(v)).collect()
}

/// The output of a model for one input, computed by the kernels with its initial weights.
fn infer(x: &ArrayD<f32>, model: impl for<'t> Fn(&Scope, Tensor<'t>) -> Tensor<'t>) -> Vec<f32> {
    let params = Params::seeded(5);
    let trace = Trace::inference();
    let y = model(&params.root(), trace.input("x", F32, x.shape()));
    let mut session = Session::new(Device::Cpu, params)
        .expect("a session")
        .with_threads(2);
    let program = session.compile(&trace, [y]).expect("it compiles");
    let [y] = session.run(&program, (x,)).expect("it runs");
    y.array::<f32>().expect("f32").into_iter().collect()
}

/// (x − mean)/√(variance + ε) of a group.
fn normalized(group: &[f64], eps: f64) -> Vec<f64> {
    let n = group.len() as f64;
    let mean = group.iter().sum::<f64>() / n;
    let variance = group.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / n;
    group
        .iter()
        .map(|x| (x - mean) / (variance + eps).sqrt())
        .collect()
}

#[test]
fn norms_of_one_example() {
    let rng = &mut Rng(1);
    // Far from 0, where E[x²] − E[x]² would have no digit left.
    let x = random(rng, &[6, 40], (999.0, 1001.0));
    let rows: Vec<f64> = values(&x)
        .chunks(40)
        .flat_map(|row| normalized(row, 1e-5))
        .collect();
    assert_close(
        &infer(&x, |at, x| x.apply(&LayerNorm::new(at / "norm", 40))),
        &rows,
        3e-4,
    );

    let x = random(rng, &[6, 40], (-2.0, 3.0));
    let rms = values(&x);
    let rms = rms.chunks(40).flat_map(|row| {
        let scale = (row.iter().map(|x| x * x).sum::<f64>() / 40.0 + 1e-6).sqrt();
        row.iter().map(move |x| x / scale)
    });
    assert_close(
        &infer(&x, |at, x| x.apply(&RmsNorm::new(at / "norm", 40))),
        &rms.collect::<Vec<f64>>(),
        1e-5,
    );

    let x = random(rng, &[2, 6, 3, 5], (-2.0, 3.0));
    let groups: Vec<f64> = values(&x)
        .chunks(2 * 15)
        .flat_map(|group| normalized(group, 1e-5))
        .collect();
    assert_close(
        &infer(&x, |at, x| x.apply(&GroupNorm::new(at / "norm", 3, 6))),
        &groups,
        1e-5,
    );
}

/// Batch normalization in f64.
struct Expected {
    mean: Vec<f64>,
    var: Vec<f64>,
}

impl Expected {
    /// A training step over `x`, `[n, channels, places]`.
    fn step(&mut self, x: &ArrayD<f32>) -> Vec<f64> {
        let (n, channels) = (x.shape()[0], x.shape()[1]);
        let places: usize = x.shape()[2..].iter().product();
        let all = values(x);
        let mut y = vec![0.0; all.len()];
        for c in 0..channels {
            let at: Vec<usize> = (0..n * places)
                .map(|i| (i / places * channels + c) * places + i % places)
                .collect();
            let channel: Vec<f64> = at.iter().map(|&i| all[i]).collect();
            let count = channel.len() as f64;
            let mean = channel.iter().sum::<f64>() / count;
            let unbiased = channel.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / (count - 1.0);
            at.iter()
                .zip(normalized(&channel, 1e-5))
                .for_each(|(&i, v)| y[i] = v);
            self.mean[c] = 0.9 * self.mean[c] + 0.1 * mean;
            self.var[c] = 0.9 * self.var[c] + 0.1 * unbiased;
        }
        y
    }
}

#[test]
fn batch_norm_keeps_running_statistics() {
    let rng = &mut Rng(2);
    for (lengths, offset) in [
        (&[4, 3, 5, 5][..], 0.0),
        (&[4, 3, 5, 5], 3000.0),
        (&[7, 3], 0.0),
        (&[3, 3, 9], -2.0),
    ] {
        let params = Params::seeded(5);
        let (images, rows) = (
            BatchNorm2d::new(&params.root() / "norm", 3),
            BatchNorm1d::new(&params.root() / "norm", 3),
        );
        let layer: &dyn Module = if lengths.len() == 4 { &images } else { &rows };
        let bound: Vec<Dim> = [Dim::bounded("batch", 9)]
            .into_iter()
            .chain(lengths[1..].iter().map(|&n| n.into()))
            .collect();
        let compiled = |trace: Trace, session: &mut Session| {
            let y = layer.forward(trace.input("x", F32, bound.as_slice()));
            session.compile(&trace, [y]).expect("it compiles")
        };
        let mut session = Session::new(Device::Cpu, params)
            .expect("a session")
            .with_threads(2);
        let train = compiled(Trace::training(), &mut session);
        let eval = compiled(Trace::inference(), &mut session);
        let mut expected = Expected {
            mean: vec![0.0; 3],
            var: vec![1.0; 3],
        };
        for _ in 0..3 {
            let x = random(rng, lengths, (offset - 1.0, offset + 2.0));
            let y = expected.step(&x);
            let [got] = session.run(&train, (&x,)).expect("it runs");
            // The rounding of x itself shows in its deviation from the mean.
            assert_close(
                got.view::<f32>()
                    .expect("f32")
                    .as_slice()
                    .expect("contiguous"),
                &y,
                2e-5 + offset.abs() * 1e-6,
            );
            drop(got);
            assert_close(
                session
                    .value("norm.running_mean")
                    .expect("there")
                    .as_slice()
                    .expect("contiguous"),
                &expected.mean,
                1e-6,
            );
            assert_close(
                session
                    .value("norm.running_var")
                    .expect("there")
                    .as_slice()
                    .expect("contiguous"),
                &expected.var,
                1e-5 + offset.abs() * 1e-7,
            );
        }
        let none = ArrayD::<f32>::zeros([&[0], &lengths[1..]].concat());
        assert_eq!(
            session.run(&eval, (&none,)).expect("it runs")[0].shape()[0],
            0
        );
        let x = random(rng, lengths, (offset - 1.0, offset + 2.0));
        let places: usize = lengths[2..].iter().product();
        let y: Vec<f64> = values(&x)
            .iter()
            .enumerate()
            .map(|(i, x)| {
                (x - expected.mean[i / places % 3]) / (expected.var[i / places % 3] + 1e-5).sqrt()
            })
            .collect();
        let [got] = session.run(&eval, (&x,)).expect("it runs");
        assert_close(
            got.view::<f32>()
                .expect("f32")
                .as_slice()
                .expect("contiguous"),
            &y,
            1e-5 + offset.abs() * 1e-6,
        );
        drop(got);
        // A step without examples has no statistics; it is refused before the running statistics
        // change.
        let running = session.value("norm.running_mean").expect("there");
        let error = session
            .run(&train, (&none,))
            .map(|_| ())
            .expect_err("no statistics")
            .to_string();
        assert!(error.contains("batch norm: axis 0 of [batch, 3"), "{error}");
        assert_eq!(session.value("norm.running_mean").expect("there"), running);
    }
}

#[test]
fn a_layer_applied_twice_moves_its_statistics_twice() {
    let params = Params::seeded(5);
    let norm = BatchNorm1d::new(&params.root() / "norm", 2).momentum(0.5);
    let trace = Trace::training();
    let x = trace.input("x", F32, (4, 2));
    let y = x.apply(&norm) + (x + 4.0).apply(&norm);
    let mut session = Session::new(Device::Cpu, params).expect("a session");
    let program = session.compile(&trace, [y]).expect("it compiles");
    let x = ndarray::array![[1.0f32, 2.0], [1.0, 2.0], [3.0, 6.0], [3.0, 6.0]];
    session.run(&program, (&x,)).expect("it runs");
    // Means 2 and 4, then 6 and 8: half of each, and half of the previous average.
    assert_close(
        session
            .value("norm.running_mean")
            .expect("there")
            .as_slice()
            .expect("contiguous"),
        &[3.5, 5.0],
        1e-6,
    );
}

#[test]
fn attention_and_embedding_values() {
    let rng = &mut Rng(3);
    let (length, heads, width) = (5, 2, 6);
    let qkv = random(rng, &[2, length, 3 * width], (-1.0, 1.0));
    let got = infer(&qkv, |_, x| x.self_attention(heads, true, Mask::None));
    let at = |b: usize, t: usize, part: usize, h: usize, i: usize| {
        f64::from(qkv[[b, t, part * width + h * (width / heads) + i]])
    };
    let each = width / heads;
    let mut expected = vec![0.0; 2 * length * width];
    for (b, t, h) in
        (0..2).flat_map(|b| (0..length).flat_map(move |t| (0..heads).map(move |h| (b, t, h))))
    {
        let score = |s: usize| {
            (0..each)
                .map(|i| at(b, t, 0, h, i) * at(b, s, 1, h, i))
                .sum::<f64>()
                / (each as f64).sqrt()
        };
        let weights: Vec<f64> = (0..=t).map(|s| score(s).exp()).collect();
        for i in 0..each {
            let mixed: f64 = weights
                .iter()
                .enumerate()
                .map(|(s, w)| w * at(b, s, 2, h, i))
                .sum();
            expected[(b * length + t) * width + h * each + i] = mixed / weights.iter().sum::<f64>();
        }
    }
    assert_close(&got, &expected, 1e-5);

    let params = Params::seeded(5);
    let layer = Embedding::new(&params.root() / "tokens", 4, 3);
    let trace = Trace::inference();
    let y = trace.input("x", I32, (2, 2)).apply(&layer);
    let mut session = Session::new(Device::Cpu, params).expect("a session");
    let program = session.compile(&trace, [y]).expect("it compiles");
    let table = session.value("tokens.weight").expect("there");
    let [y] = session
        .run(&program, (&ndarray::array![[3, 0], [1, 3]],))
        .expect("it runs");
    assert_eq!(y.shape(), [2, 2, 3]);
    let expected: Vec<f64> = [3, 0, 1, 3]
        .iter()
        .flat_map(|&row| (0..3).map(move |i| (row, i)))
        .map(|i| f64::from(table[[i.0, i.1]]))
        .collect();
    assert_close(
        y.view::<f32>()
            .expect("f32")
            .as_slice()
            .expect("contiguous"),
        &expected,
        0.0,
    );
    drop(y);
    let outside = session
        .run(&program, (&ndarray::array![[3, 4], [1, 3]],))
        .map(|_| ())
        .unwrap_err()
        .to_string();
    assert!(outside.contains('4'), "{outside}");
}

/// The norms of a training step take few passes: the normalized tensor goes through one kernel over
/// rows, or is read once for its statistics and once to be used.
#[test]
fn norms_are_fused() {
    let kernels = |lengths: &[usize], model: for<'t> fn(&Scope, Tensor<'t>) -> Tensor<'t>| {
        let params = Params::seeded(1);
        let trace = Trace::training();
        let x = trace.input("x", F32, lengths);
        let first = trace.param(&params.root().param("first", lengths, Init::Constant(1.0)));
        // The loss is behind a product, which separates the forward pass from the backward pass.
        let y = model(&params.root(), x * first).flatten(0);
        let loss = y
            .matmul(trace.param(&params.root().param(
                "last",
                (y.len(0).expect("fixed"), 1),
                Init::Constant(0.1),
            )))
            .sum();
        trace.minimize(loss, Sgd::new(0.1));
        let mut session = Session::new(Device::Cpu, params).expect("a session");
        let program = session.compile(&trace, [loss]).expect("it compiles");
        program
            .plan()
            .steps()
            .map(String::from)
            .collect::<Vec<String>>()
    };
    // The number of kernels of the same step without the norm.
    let bare = kernels(&[64, 256], |_, x| x.tanh()).len();
    let rows = kernels(&[64, 256], |at, x| {
        x.apply(&LayerNorm::new(at / "norm", 256)).tanh()
    });
    // One more for the gradients of weight and bias.
    assert!(rows.len() <= bare + 2, "{bare} kernels become {rows:#?}");
    let images = kernels(&[8, 16, 6, 6], |at, x| {
        x.apply(&BatchNorm2d::new(at / "norm", 16)).tanh()
    });
    // The first example's mean, the statistics, the normalization; sums of the gradient, the
    // gradient. The product's operand is recomputed with those sums, of weight and bias, so that
    // the new values of both are copied into them.
    assert!(
        images.len() <= bare + 6,
        "{bare} kernels become {images:#?}"
    );
}

#[test]
fn mistakes_of_layers() {
    let params = Params::seeded(5);
    let root = params.root();
    let said = |build: &dyn for<'t> Fn(&'t Trace) -> Tensor<'t>| {
        let trace = Trace::training();
        build(&trace);
        let mistakes = trace.finish(&[]).err().unwrap_or_default();
        assert!(
            mistakes.iter().all(|m| m.location.file() == file!()),
            "{mistakes:?}"
        );
        mistakes
            .into_iter()
            .map(|m| m.message)
            .collect::<Vec<String>>()
    };
    let norm = BatchNorm2d::new(&root / "norm", 3);
    let layer = LayerNorm::new(&root / "layer", 4);
    let said = [
        said(&|t| t.input("x", F32, (2, 1, 4, 4)).apply(&norm)),
        said(&|t| t.input("x", F32, (2, 3)).apply(&norm)),
        said(&|t| t.input("x", F32, (2, 1)).apply(&layer)),
        said(&|t| {
            t.input("x", F32, (2, 3, 4)).attention(
                t.zeros((2, 3, 5)),
                t.zeros((2, 3, 4)),
                false,
                Mask::None,
            )
        }),
        said(&|t| {
            t.input("x", F32, (2, 3, 21))
                .self_attention(2, true, Mask::None)
        }),
        said(&|t| {
            t.input("x", F32, (8, 4)).attention_in(
                Tiles::Queries(0),
                t.zeros((8, 4)),
                t.zeros((8, 4)),
                true,
                Mask::None,
            )
        }),
        said(&|t| {
            let x = t.input("x", F32, (8, 4));
            x.attention_in(Tiles::Queries(3), x, x, true, Mask::Added(t.zeros((5, 5))))
        }),
        said(&|t| t.input("x", F32, (2, 3, 8)).unflatten(2, (3, -1))),
        said(&|t| t.statistic(norm.weight()).value()),
        said(&|t| t.input("x", F32, (2, 3, 0, 4)).adaptive_avg_pool2d([5, 1])),
    ];
    let expected = [
        "batch norm of [2, 1, 4, 4]: axis 1 must have length 3",
        "batch norm in 2d of f32 [2, 3]: the number of axes does not fit",
        "layer norm of [2, 1]: axis 1 must have length 4",
        "attention of queries [2, 3, 4], keys [2, 3, 5] and values [2, 3, 4]: queries and keys must be equally wide, keys and values equally many",
        "self_attention of [2, 3, 21] by 2 heads: [batch…, length, 3·width] of a fixed width that the heads divide equally is needed",
        "attention of queries [8, 4], keys [8, 4] and values [8, 4]: a tile must have one query at least",
        "add [3, 8] and [5, 5]: shapes do not broadcast",
        "unflatten [2, 3, 8] to [3, -1]: no length for -1 fits",
        "\"norm.weight\" is a parameter: an optimizer changes it",
        "adaptive_avg_pool2d of [2, 3, 0, 4] to 5×1: an image [n, channels, h, w] of fixed height and width above 0 is needed",
    ];
    for (said, expected) in said.iter().zip(expected) {
        assert_eq!(said, &[expected.to_string()]);
    }
    GroupNorm::new(&root / "group", 4, 6);
    MultiHeadAttention::new(&root / "heads", 6, 4);
    root.param("either", (2,), Init::Constant(0.0));
    root.statistic("either", (2,), Init::Constant(0.0));
    assert_eq!(params.mistakes().len(), 3, "{:?}", params.mistakes());
}

/// Queries, keys and values of so many positions, drawn from a sequence of 12.
fn generated(first: usize, count: usize) -> ArrayD<f32> {
    let all = random(&mut Rng(9), &[1, 12, 16], (-1.0, 1.0));
    all.slice_axis(ndarray::Axis(1), (first..first + count).into())
        .to_owned()
}

#[test]
fn a_cache_gives_the_attention_of_the_whole_sequence() {
    let params = Params::seeded(3);
    let layer = GroupedQueryAttention::new(&params.root() / "attn", 16, 4, 2)
        .rope(slabwise::tensor::Rope::new(4))
        .window(5);
    let mut session = Session::new(Device::Cpu, params)
        .expect("a session")
        .with_threads(2);
    let trace = Trace::inference();
    let x = trace.input("x", F32, (1, 12, 16));
    let whole = session
        .compile(&trace, [x.apply(&layer)])
        .expect("it compiles");
    let cached = |session: &mut Session, count: usize, clear: bool| {
        let trace = Trace::inference();
        let cache = KvCache::new(&trace, "attn", 1, 2, 13, 4);
        if clear {
            cache.clear();
        }
        let x = trace.input("x", F32, (1, count, 16));
        let y = layer.cached(x, &cache);
        session.compile(&trace, [y]).expect("it compiles")
    };
    let prompt = cached(&mut session, 4, true);
    let token = cached(&mut session, 1, false);
    let [expected] = session.run(&whole, (&generated(0, 12),)).expect("it runs");
    let expected: Vec<f64> = values(&expected.array::<f32>().expect("f32"));
    // The second prompt begins anew.
    for _ in 0..2 {
        let [y] = session.run(&prompt, (&generated(0, 4),)).expect("it runs");
        let mut got: Vec<f32> = y.array::<f32>().expect("f32").into_iter().collect();
        for at in 4..12 {
            let [y] = session.run(&token, (&generated(at, 1),)).expect("it runs");
            got.extend(y.array::<f32>().expect("f32"));
        }
        assert_close(&got, &expected, 1e-5);
    }
    // 12 of 13 positions are taken; four more do not fit, and a prompt begins anew.
    session.run(&token, (&generated(0, 1),)).expect("it fits");
    let full = session.run(&token, (&generated(0, 1),)).map(|_| ());
    assert!(full.is_err(), "the cache is full");
}

#[test]
fn heads_of_equal_number_are_cached_too() {
    let params = Params::seeded(3);
    let layer = MultiHeadAttention::new(&params.root() / "attn", 16, 4).causal();
    let mut session = Session::new(Device::Cpu, params).expect("a session");
    let trace = Trace::inference();
    let x = trace.input("x", F32, (1, 12, 16));
    let cache = KvCache::new(&trace, "attn", 1, 4, 12, 4);
    let y = trace.concat(
        &[
            layer.cached(x.slice(1, ..7), &cache),
            layer.cached(x.slice(1, 7..), &cache),
        ],
        1,
    );
    let program = session
        .compile(&trace, [x.apply(&layer), y])
        .expect("it compiles");
    let [whole, parts] = session
        .run(&program, (&generated(0, 12),))
        .expect("it runs");
    let whole = values(&whole.array::<f32>().expect("f32"));
    let parts: Vec<f32> = parts.array::<f32>().expect("f32").into_iter().collect();
    assert_close(&parts, &whole, 1e-5);
}

/// Prompts of 3 and 7 tokens, padded to 7, then five tokens of each: as each text alone, in a cache
/// of each type.
#[test]
fn texts_of_different_lengths_grow_side_by_side() {
    let params = Params::seeded(3);
    let layer = GroupedQueryAttention::new(&params.root() / "attn", 16, 4, 2)
        .rope(slabwise::tensor::Rope::new(4))
        .window(5);
    for (dtype, tolerance) in [(F32, 1e-5), (F16, 2e-3), (BF16, 2e-2)] {
        let mut session = Session::new(Device::Cpu, params.clone()).expect("a session");
        let trace = Trace::inference();
        let x = trace.input("x", F32, (1, 12, 16));
        let whole = session
            .compile(&trace, [x.apply(&layer)])
            .expect("it compiles");
        let all = generated(0, 12);
        let [expected] = session.run(&whole, (&all,)).expect("it runs");
        let expected: Vec<f64> = values(&expected.array::<f32>().expect("f32"));

        let trace = Trace::inference();
        let cache = KvCache::new(&trace, "attn", 2, 2, 13, 4)
            .of_type(dtype)
            .by_example();
        cache.clear();
        let x = trace.input("x", F32, (2, 7, 16));
        let padding = trace.input("padding", I32, (2,));
        let y = layer.cached(x, &cache);
        cache.forget(padding);
        let prompts = session
            .compile(&trace, [y, cache.length()])
            .expect("it compiles");
        let trace = Trace::inference();
        let cache = KvCache::new(&trace, "attn", 2, 2, 13, 4)
            .of_type(dtype)
            .by_example();
        let x = trace.input("x", F32, (2, 1, 16));
        let y = layer.cached(x, &cache);
        let tokens = session.compile(&trace, [y]).expect("it compiles");

        let lengths = [3, 7];
        let part = |first: usize, count: usize| {
            all.slice_axis(ndarray::Axis(1), (first..first + count).into())
        };
        let row = |parts: &[ndarray::ArrayViewD<'_, f32>], axis: usize| {
            ndarray::concatenate(ndarray::Axis(axis), parts).expect("shapes that fit")
        };
        let short = row(&[part(0, 3), part(8, 4)], 1);
        let given = row(&[short.view(), part(0, 7)], 0);
        let padding = ndarray::arr1(&[4i32, 0]).into_dyn();
        let [y, held] = session.run(&prompts, (&given, &padding)).expect("it runs");
        let held: Vec<i32> = held.array::<i32>().expect("i32").into_iter().collect();
        assert_eq!(held, [3, 7]);
        let y = y.array::<f32>().expect("f32");
        let near = |got: &[f32], at: usize| {
            assert_close(got, &expected[at * 16..(at + 1) * 16], tolerance);
        };
        for (text, &length) in lengths.iter().enumerate() {
            for at in 0..length {
                let got: Vec<f32> = y.slice(ndarray::s![text, at, ..]).to_vec();
                near(&got, at);
            }
        }
        for step in 0..5 {
            let places = lengths.map(|n| n + step);
            let given = row(&[part(places[0], 1), part(places[1], 1)], 0);
            let [y] = session.run(&tokens, (&given,)).expect("it runs");
            let y = y.array::<f32>().expect("f32");
            for (text, &at) in places.iter().enumerate() {
                let got: Vec<f32> = y.slice(ndarray::s![text, 0, ..]).to_vec();
                near(&got, at);
            }
        }
    }
}

#[test]
fn a_cache_holds_floats() {
    let trace = Trace::inference();
    let cache = KvCache::new(&trace, "layer", 1, 2, 8, 4).of_type(I32);
    let k = trace.input("k", F32, (1, 2, 1, 4));
    cache.append(k, k);
    let mut session = Session::new(Device::Cpu, Params::seeded(0)).expect("a session");
    let said = session
        .compile(&trace, [k])
        .map(|_| ())
        .expect_err("a mistake");
    assert!(said.to_string().contains("a cache of i32"), "{said}");
}

/// A token's step writes its own position alone: beside the cache itself the plan holds the scores,
/// and no second cache.
#[test]
fn a_cache_is_written_in_place() {
    let (capacity, width) = (4096, 64);
    let trace = Trace::inference();
    let cache = KvCache::new(&trace, "layer", 1, 2, capacity, width);
    let [q, k, v] = [("q", 8), ("k", 2), ("v", 2)]
        .map(|(name, heads)| trace.input(name, F32, (1, heads, 1, width)));
    let y = cache.attend(q, k, v, slabwise::tensor::AttentionOptions::new());
    let mut session = Session::new(Device::Cpu, Params::seeded(0)).expect("a session");
    let program = session.compile(&trace, [y]).expect("it compiles");
    let slab = program.plan().slab_bytes();
    let (scores, one) = (8 * capacity * 4, 2 * capacity * width * 4);
    assert!(
        slab < (3 * scores + one / 4) as u64,
        "a slab of {slab} bytes; scores have {scores}, keys {one}"
    );
}

#[test]
fn whole_channels_and_examples_are_dropped() {
    let trace = Trace::training();
    let x = trace.ones((64, 8, 5));
    let (channels, examples) = (x.dropout_channels(0.25), x.drop_path(0.5));
    let mut session = Session::new(Device::Cpu, Params::seeded(4)).expect("a session");
    let program = session
        .compile(&trace, [channels, examples])
        .expect("it compiles");
    let [channels, examples] = session.run(&program, ()).expect("it runs");
    for (got, places, p) in [(channels, 5, 0.25f32), (examples, 40, 0.5)] {
        let got: Vec<f32> = got.array::<f32>().expect("f32").into_iter().collect();
        let parts: Vec<&[f32]> = got.chunks(places).collect();
        assert!(parts.iter().all(|part| part.iter().all(|&v| v == part[0])));
        assert!(got.iter().all(|&v| v == 0.0 || v == 1.0 / (1.0 - p)));
        let dropped = parts.iter().filter(|part| part[0] == 0.0).count();
        let share = dropped as f32 / parts.len() as f32;
        assert!((share - p).abs() < 0.2, "{share} of {p}");
        assert_ne!(dropped, 0);
    }
}

/// Elements become one number with probability `p`, and the mean and variance of standard normal
/// inputs stay: the numbers are those of PyTorch's formula, a·(x or −λα) + b.
#[test]
fn alpha_dropout_keeps_mean_and_variance() {
    const N: usize = 1 << 18;
    let limit = -1.758_099_340_847_376_6_f64;
    for p in [0.1f32, 0.5] {
        let run = |seed: u64, step: usize| {
            let trace = Trace::training();
            let x = trace.input("x", F32, (N,));
            let y = x.alpha_dropout(p);
            let [gradient] = trace.gradients(y.sum(), [x]);
            let mut session = Session::new(Device::Cpu, Params::seeded(seed)).expect("a session");
            let program = session.compile(&trace, [y, gradient]).expect("it compiles");
            // Sums of twelve even numbers: mean 0, variance 1.
            let mut state = 1u64;
            let mut even = || {
                state = state
                    .wrapping_mul(6_364_136_223_846_793_005)
                    .wrapping_add(1_442_695_040_888_963_407);
                (state >> 40) as f32 / (1u64 << 24) as f32
            };
            let numbers: Vec<f32> = (0..N)
                .map(|_| (0..12).map(|_| even()).sum::<f32>() - 6.0)
                .collect();
            let mut got = Vec::new();
            for _ in 0..=step {
                let [y, gradient] = session.run(&program, (&numbers,)).expect("it runs");
                let of = |v: slabwise::Output<'_>| {
                    v.array::<f32>().expect("f32").into_raw_vec_and_offset().0
                };
                got = vec![of(y), of(gradient)];
            }
            (numbers, got)
        };
        let (x, got) = run(3, 0);
        assert_eq!(got, run(3, 0).1, "the same seed gives the same numbers");
        assert_ne!(got, run(3, 1).1, "each step draws its own");
        assert_ne!(got, run(4, 0).1, "each seed draws its own");
        let p = f64::from(p);
        let scale = 1.0 / ((1.0 - p) * (1.0 + p * limit * limit)).sqrt();
        let (dropped, moved) = (scale * limit * (1.0 - p), -scale * limit * p);
        let mut count = 0usize;
        for ((&x, &y), &d) in x.iter().zip(&got[0]).zip(&got[1]) {
            let is_dropped = d == 0.0;
            count += usize::from(is_dropped);
            let right = match is_dropped {
                true => dropped,
                false => scale * f64::from(x) + moved,
            };
            assert!(
                (f64::from(y) - right).abs() < 1e-5,
                "{y} of {x}, not {right}"
            );
            assert!(is_dropped || (f64::from(d) - scale).abs() < 1e-6, "{d}");
        }
        let n = N as f64;
        let mean = got[0].iter().map(|&y| f64::from(y)).sum::<f64>() / n;
        let squares = got[0].iter().map(|&y| (f64::from(y) - mean).powi(2));
        let variance = squares.sum::<f64>() / n;
        // Five deviations of a share and of means of so many numbers.
        assert!((count as f64 / n - p).abs() < 5.0 * (p * (1.0 - p) / n).sqrt());
        assert!(mean.abs() < 0.012, "{mean}");
        assert!((variance - 1.0).abs() < 0.02, "{variance}");
    }
    let trace = Trace::inference();
    let x = trace.input("x", F32, (4,));
    let y = x.alpha_dropout(0.5);
    let mut session = Session::new(Device::Cpu, Params::seeded(0)).expect("a session");
    let program = session.compile(&trace, [y]).expect("it compiles");
    let x = vec![1.0f32, -2.0, 0.0, 5.0];
    let [y] = session.run(&program, (&x,)).expect("it runs");
    assert_eq!(
        y.array::<f32>()
            .expect("f32")
            .into_iter()
            .collect::<Vec<_>>(),
        x
    );
}

#[test]
fn mistakes_of_options_name_their_numbers() {
    use slabwise::tensor::{AttentionOptions, ConvOptions, Padding, PoolOptions, Rope};
    let said = |build: &dyn for<'t> Fn(&'t Trace) -> Tensor<'t>| -> Vec<String> {
        let trace = Trace::inference();
        let y = build(&trace);
        let mistakes = trace.finish(&[y]).expect_err("a mistake");
        mistakes.into_iter().map(|m| m.message).collect()
    };
    let check = |build: &dyn for<'t> Fn(&'t Trace) -> Tensor<'t>, part: &str| {
        let all = said(build);
        assert_eq!(all.len(), 1, "{all:?}");
        assert!(all[0].contains(part), "{}", all[0]);
    };
    check(
        &|t| t.ones((1, 2, 4)).conv1d(t.ones((3, 2, 5))),
        "the 1×5 kernel does not fit in 1×4",
    );
    check(
        &|t| t.ones((1, 2, 4, 4)).conv1d(t.ones((3, 2, 5))),
        "conv1d of [1, 2, 4, 4]",
    );
    check(
        &|t| {
            let options = ConvOptions::<2>::new().stride(2).output_padding(2);
            t.ones((1, 2, 4, 4))
                .conv_transpose2d(t.ones((2, 3, 3, 3)), options)
        },
        "output padding 2×2 is not less than the stride",
    );
    check(
        &|t| {
            let options = ConvOptions::<2>::new().padding(Padding::Same);
            t.ones((1, 2, 4, 4))
                .conv_transpose2d(t.ones((2, 3, 3, 3)), options)
        },
        "Same padding is that of a convolution",
    );
    check(
        &|t| {
            t.ones((1, 2, 4, 4))
                .max_pool2d_with(PoolOptions::new(7).stride(2).ceil())
        },
        "a 7×7 window with stride 2×2 does not fit",
    );
    check(
        &|t| {
            let options = PoolOptions::new(2).padding([(0, 2), (0, 0)]);
            t.ones((1, 2, 4, 4)).max_pool2d_with(options)
        },
        "is not less than the window",
    );
    check(
        &|t| {
            let (q, k) = (t.ones((1, 6, 3, 4)), t.ones((1, 4, 3, 4)));
            q.attention_with(k, k, AttentionOptions::new())
        },
        "4 heads of keys and 4 of values cannot be shared by 6 heads of queries",
    );
    check(
        &|t| t.ones((1, 3, 7)).rope(t.arange(3), &Rope::new(7)),
        "7 elements do not form pairs",
    );
    check(
        &|t| t.relative_buckets((2, 2), 0, true, 2, 8),
        "2 buckets for distances up to 8",
    );
}
