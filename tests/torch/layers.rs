//! Layers with all their options, poolings, norms, attention and positions against PyTorch's recorded
//! numbers (`tests/data/record_layers.py`): values, and gradients of arguments and parameters.

use ndarray::ArrayD;
use slabwise::feed::Input;
use slabwise::nn::*;
use slabwise::prelude::*;
use slabwise::tensor::*;
use slabwise::weights::File;

use super::{Case, path};

type Build = for<'t> fn(&Scope, &[Tensor<'t>]) -> Tensor<'t>;

/// An array for the gradients of all arguments and parameters of a case.
const GRADIENTS_MAX: usize = 32;

fn recorded(name: &'static str) -> Case {
    Case {
        name,
        file: File::open(
            path("layers_and_options", "").with_file_name("layers_and_options.safetensors"),
        )
        .expect("recorded"),
    }
}

/// w₀·y₀ + w₁·y₁ + … with the weights of the recording.
fn weighted(y: Tensor<'_>) -> Tensor<'_> {
    let flat = y.reshape([-1i64]);
    let n = flat.len(0).expect("fixed");
    let i = y.trace().arange(n) * 37;
    let rest = i - i / 11 * 11;
    ((rest - 5).cast(F32) / 5.0 * flat).sum()
}

enum Argument {
    Floats(ArrayD<f32>),
    Integers(ArrayD<i32>),
}

fn check(name: &'static str, trace: Trace, build: Build) {
    let case = recorded(name);
    let arguments: Vec<Argument> = (0..)
        .map_while(|i| {
            let key = format!("{name}/x{i}");
            Some(match case.file.get(&key)?.dtype {
                I32 => Argument::Integers(case.integers(&key)),
                _ => Argument::Floats(case.floats(&key)),
            })
        })
        .collect();
    let params = Params::seeded(0);
    let inputs: Vec<Tensor<'_>> = arguments
        .iter()
        .enumerate()
        .map(|(i, x)| match x {
            Argument::Floats(x) => trace.input(&format!("x{i}"), F32, x.shape()),
            Argument::Integers(x) => trace.input(&format!("x{i}"), I32, x.shape()),
        })
        .collect();
    let y = build(&params.root(), &inputs);
    let declared: Vec<Param> = params
        .declared()
        .into_iter()
        .filter(|p| p.is_trained())
        .collect();
    let mut wanted: Vec<(String, Tensor<'_>)> = inputs
        .iter()
        .enumerate()
        .filter(|(_, x)| x.dtype() == F32)
        .map(|(i, x)| (format!("{name}/dx{i}"), *x))
        .collect();
    wanted.extend(
        declared
            .iter()
            .map(|p| (format!("{name}/dp.{}", p.name()), trace.param(p))),
    );
    wanted.retain(|(key, _)| case.file.get(key).is_some());
    assert!(wanted.len() <= GRADIENTS_MAX, "{name}");
    let flat = if wanted.is_empty() {
        y.cast(F32).flatten(0)
    } else {
        let wrt = std::array::from_fn::<_, GRADIENTS_MAX, _>(|i| wanted[i % wanted.len()].1);
        let all = trace.gradients(weighted(y), wrt);
        let flat: Vec<Tensor<'_>> = all[..wanted.len()].iter().map(|g| g.flatten(0)).collect();
        trace.concat(&flat, 0)
    };
    let mut session = Session::new(Device::Cpu, params)
        .expect("a session")
        .with_threads(2);
    let program = session
        .compile(&trace, [y.cast(F32), flat])
        .unwrap_or_else(|e| panic!("{name}: {e}"));
    for param in &declared {
        let values = case.floats(&format!("{name}/p.{}", param.name()));
        session
            .set_value(param.name(), &values)
            .unwrap_or_else(|e| panic!("{name}: {e}"));
    }
    let feed: Vec<&dyn Input> = arguments
        .iter()
        .map(|x| match x {
            Argument::Floats(x) => x as &dyn Input,
            Argument::Integers(x) => x as &dyn Input,
        })
        .collect();
    let [y, flat] = session
        .run(&program, feed.as_slice())
        .unwrap_or_else(|e| panic!("{name}: {e}"));
    case.assert_close(&format!("{name}/y"), &y.array().expect("f32"), 2e-6);
    let flat = flat.array::<f32>().expect("f32");
    let mut rest = flat.as_slice().expect("flat");
    for (key, _) in &wanted {
        let expected = case.floats(key);
        let (own, others) = rest.split_at(expected.len());
        rest = others;
        let own = ArrayD::from_shape_vec(expected.shape(), own.to_vec()).expect("as many");
        case.assert_close(key, &own, 1e-5);
    }
}

fn check_all(cases: &[(&'static str, Build)]) {
    for &(name, build) in cases {
        check(name, Trace::training(), build);
    }
}

fn sides<const N: usize>(sides: [(usize, usize); N]) -> Padding<N> {
    Padding::Sides(sides)
}

#[test]
fn convolutions_and_their_transposes() {
    let two = ConvOptions::<2>::new;
    assert_eq!(two().groups, 1);
    check_all(&[
        ("conv2d_rows", |at, x| {
            let conv = Conv2d::new(at.clone(), 2, 3, [1, 5]);
            x[0].apply(&conv.stride([2, 1]).padding([0, 2]))
        }),
        ("conv2d_rows_grouped", |at, x| {
            let conv = Conv2d::new(at.clone(), 4, 2, [3, 2]);
            x[0].apply(&conv.dilation([1, 2]).groups(2))
        }),
        ("conv2d_same", |at, x| {
            let conv = Conv2d::new(at.clone(), 2, 2, [4, 3]).padding(Padding::Same);
            x[0].apply(&conv.dilation([1, 2]))
        }),
        ("conv2d_same_even", |at, x| {
            let conv = Conv2d::new(at.clone(), 1, 2, 2).padding(Padding::Same);
            x[0].apply(&conv.without_bias())
        }),
        ("conv2d_sides", |at, x| {
            let w = at.param("w", (2, 2, 3, 3), Init::Constant(0.0));
            let options = ConvOptions::new().stride(2).padding([(1, 2), (0, 3)]);
            x[0].conv2d_with(&w, options)
        }),
        ("conv2d_same_strided", |at, x| {
            let w = at.param("w", (2, 2, 3, 3), Init::Constant(0.0));
            x[0].conv2d_with(&w, ConvOptions::new().stride(2).padding(Padding::Same))
        }),
        ("conv2d_same_lower", |at, x| {
            let w = at.param("w", (2, 2, 3, 3), Init::Constant(0.0));
            x[0].conv2d_with(&w, ConvOptions::new().stride(2).padding(Padding::SameLower))
        }),
        ("conv1d", |at, x| {
            x[0].apply(&Conv1d::new(at.clone(), 3, 4, 3).stride(2).padding(1))
        }),
        ("conv1d_grouped", |at, x| {
            let conv = Conv1d::new(at.clone(), 4, 4, 3).dilation(2).groups(4);
            x[0].apply(&conv.without_bias())
        }),
        ("conv1d_causal", |at, x| {
            let w = at.param("w", (3, 2, 3), Init::Constant(0.0));
            x[0].conv1d_with(&w, ConvOptions::new().dilation(3).padding(Padding::Causal))
        }),
        ("conv3d", |at, x| {
            let conv = Conv3d::new(at.clone(), 2, 2, [2, 3, 2]);
            x[0].apply(&conv.stride([2, 1, 1]).padding([1, 1, 0]))
        }),
        ("conv3d_grouped", |at, x| {
            let conv = Conv3d::new(at.clone(), 2, 4, [2, 1, 2]).dilation([2, 1, 1]);
            x[0].apply(&conv.groups(2).without_bias())
        }),
        ("transposed2d", |at, x| {
            let conv = ConvTranspose2d::new(at.clone(), 3, 2, 4);
            x[0].apply(&conv.stride(2).padding(1))
        }),
        ("transposed2d_more", |at, x| {
            let conv = ConvTranspose2d::new(at.clone(), 2, 4, [3, 2]).stride([2, 3]);
            let conv = conv.padding([1, 0]).output_padding([1, 2]).groups(2);
            x[0].apply(&conv.without_bias())
        }),
        ("transposed2d_dilated", |at, x| {
            let conv = ConvTranspose2d::new(at.clone(), 2, 1, 3)
                .stride(2)
                .padding(2);
            x[0].apply(&conv.output_padding(2).dilation(3))
        }),
        ("transposed1d", |at, x| {
            let conv = ConvTranspose1d::new(at.clone(), 2, 3, 5).stride(3);
            x[0].apply(&conv.padding(1).output_padding(2))
        }),
        ("transposed1d_grouped", |at, x| {
            let conv = ConvTranspose1d::new(at.clone(), 4, 4, 2).stride(2);
            x[0].apply(&conv.groups(4).without_bias())
        }),
    ]);
}

#[test]
fn poolings_with_all_their_options() {
    check_all(&[
        ("max_ceil", |_, x| {
            x[0].max_pool2d_with(PoolOptions::new(3).stride(2).ceil())
        }),
        ("max_ceil_padded", |_, x| {
            x[0].max_pool2d_with(PoolOptions::new(3).stride(2).padding(1).ceil())
        }),
        ("max_ceil_beyond", |_, x| {
            x[0].max_pool2d_with(PoolOptions::new(2).stride(3).padding(1).ceil())
        }),
        ("max_ceil_large", |_, x| {
            x[0].max_pool2d_with(PoolOptions::new(4).stride(3).ceil())
        }),
        ("max_dilated", |_, x| {
            let options = PoolOptions::new([2, 3]).stride([1, 2]).padding([1, 0]);
            x[0].max_pool2d_with(options.dilation([3, 2]))
        }),
        ("max_dilated_ceil", |_, x| {
            let options = PoolOptions::new(2).padding(1).dilation(2).ceil();
            x[0].apply(&MaxPool2dWith(options))
        }),
        ("max_sides", |_, x| {
            let options = PoolOptions::new(3).stride(2);
            x[0].max_pool2d_with(options.padding(sides([(1, 2), (0, 1)])))
        }),
        ("max_positions", |_, x| {
            x[0].max_pool2d_positions(PoolOptions::new(3).stride(2).padding(1).ceil())
        }),
        ("max_positions_dilated", |_, x| {
            x[0].max_pool2d_positions(PoolOptions::new(2).stride(1).padding(1).dilation(2))
        }),
        ("unpool", |_, x| x[0].max_unpool2d(x[1], [7, 6])),
        ("max1d", |_, x| {
            x[0].apply(&MaxPool1d(PoolOptions::new(3).stride(2).padding(1).ceil()))
        }),
        ("max1d_dilated", |_, x| {
            x[0].max_pool1d_with(PoolOptions::new(3).stride(1).padding(1).dilation(2))
        }),
        ("max1d_positions", |_, x| {
            x[0].max_pool1d_positions(PoolOptions::new(3).stride(2))
        }),
        ("avg_ceil_0_1", |_, x| {
            x[0].avg_pool2d_with(PoolOptions::new(3).stride(2).ceil())
        }),
        ("avg_ceil_0_0", |_, x| {
            let options = PoolOptions::new(3).stride(2).ceil();
            x[0].avg_pool2d_with(options.without_padding_in_means())
        }),
        ("avg_ceil_1_1", |_, x| {
            x[0].avg_pool2d_with(PoolOptions::new(3).stride(2).padding(1).ceil())
        }),
        ("avg_ceil_1_0", |_, x| {
            let options = PoolOptions::new(3).stride(2).padding(1).ceil();
            x[0].apply(&AvgPool2dWith(options.without_padding_in_means()))
        }),
        ("avg_uncounted", |_, x| {
            let options = PoolOptions::new([3, 2]).stride(1).padding(1);
            x[0].avg_pool2d_with(options.without_padding_in_means())
        }),
        ("avg_ceil_large", |_, x| {
            x[0].avg_pool2d_with(PoolOptions::new(4).stride(3).padding(1).ceil())
        }),
        ("avg_sides", |_, x| {
            let options = PoolOptions::new(3).stride(2);
            x[0].avg_pool2d_with(options.padding([(2, 1), (0, 1)]))
        }),
        ("avg1d", |_, x| {
            x[0].apply(&AvgPool1d(PoolOptions::new(4).stride(3).padding(2).ceil()))
        }),
        ("avg1d_uncounted", |_, x| {
            let options = PoolOptions::new(4).stride(3).padding(2).ceil();
            x[0].avg_pool1d_with(options.without_padding_in_means())
        }),
        ("avg_dilated", |_, x| {
            x[0].avg_pool2d_with(PoolOptions::new(2).padding(1).dilation(2))
        }),
        ("avg_dilated_uncounted", |_, x| {
            let options = PoolOptions::new(2).padding(1).dilation(2);
            x[0].avg_pool2d_with(options.without_padding_in_means())
        }),
        ("adaptive_max", |_, x| {
            x[0].apply(&AdaptiveMaxPool2d([3, 4]))
        }),
        ("adaptive_max1d", |_, x| x[0].apply(&AdaptiveMaxPool1d(3))),
        ("adaptive_avg1d", |_, x| x[0].apply(&AdaptiveAvgPool1d(3))),
        ("global_max", |_, x| x[0].apply(&GlobalMaxPool)),
    ]);
}

#[test]
fn norms_with_all_their_options() {
    check_all(&[
        ("instance", |at, x| {
            x[0].apply(&InstanceNorm::new(at.clone(), 4))
        }),
        ("instance_affine", |at, x| {
            x[0].apply(&InstanceNorm::new(at.clone(), 3).affine().eps(1e-3))
        }),
        ("local_response", |_, x| {
            x[0].apply(&LocalResponseNorm::new(3).alpha(0.5).k(2.0))
        }),
        ("local_response_even", |_, x| {
            x[0].apply(&LocalResponseNorm::new(2).alpha(0.5).beta(0.75))
        }),
        ("batch_plain", |at, x| {
            x[0].apply(&BatchNorm2d::new(at.clone(), 4).without_affine())
        }),
        ("layer_axes", |at, x| {
            x[0].apply(&LayerNorm::over(at.clone(), &[3, 2]))
        }),
        ("layer_plain", |at, x| {
            x[0].apply(&LayerNorm::new(at.clone(), 5).without_affine())
        }),
        ("l2", |_, x| x[0].l2_normalize(1, 1e-12)),
        ("l2_of_zero", |_, x| x[0].l2_normalize(1, 1e-12)),
        ("mean_variance", |_, x| x[0].mean_variance_norm([0, 2, 3])),
    ]);
    check("batch_untracked", Trace::inference(), |at, x| {
        x[0].apply(&BatchNorm1d::new(at.clone(), 4).without_statistics())
    });
}

#[test]
fn attention_with_all_its_options() {
    fn causal<'t>() -> AttentionOptions<'t> {
        AttentionOptions::new().causal()
    }
    check_all(&[
        ("attention_grouped", |_, x| {
            x[0].attention_with(x[1], x[2], causal())
        }),
        ("attention_grouped_one", |_, x| {
            x[0].attention_with(x[1], x[2], causal().past(3))
        }),
        ("attention_multi_query", |_, x| {
            x[0].attention_with(x[1], x[2], AttentionOptions::new())
        }),
        ("attention_grouped_biased", |_, x| {
            x[0].attention_with(x[1], x[2], AttentionOptions::new().mask(Mask::Added(x[3])))
        }),
        ("attention_window", |_, x| {
            x[0].attention_with(x[1], x[2], causal().past(3).window(3))
        }),
        ("attention_both_ways", |_, x| {
            let options = AttentionOptions::new().past(1).window(2);
            x[0].attention_with(x[1], x[2], options.tiles(Tiles::Queries(2)))
        }),
        ("attention_past", |_, x| {
            x[0].attention_with(x[1], x[2], causal().past_of_run(x[3]))
        }),
        ("attention_capped", |_, x| {
            x[0].attention_with(x[1], x[2], AttentionOptions::new().scale(0.7).soft_cap(3.0))
        }),
        ("attention_lengths", |_, x| {
            let seen = x[3].within(5).unsqueeze(1).unsqueeze(1);
            x[0].attention_with(x[1], x[2], AttentionOptions::new().mask(Mask::Seen(seen)))
        }),
        ("cross", |at, x| {
            let layer = MultiHeadAttention::new(at.clone(), 6, 2);
            layer.cross(x[0], x[1], x[2], Mask::None)
        }),
        ("cross_widths", |at, x| {
            let layer = MultiHeadAttention::of_widths(at.clone(), 4, 2, 3, 5);
            layer.cross(x[0], x[1], x[2], Mask::None)
        }),
        ("cross_unbiased", |at, x| {
            let layer = MultiHeadAttention::new(at.clone(), 4, 2).without_bias();
            layer.cross(x[0], x[1], x[2], Mask::None)
        }),
        ("encoder", |at, x| {
            x[0].apply(&TransformerEncoderLayer::new(at.clone(), 4, 2, 6).dropout(0.0))
        }),
        ("encoder_gelu", |at, x| {
            let layer = TransformerEncoderLayer::new(at.clone(), 4, 2, 6).dropout(0.0);
            x[0].apply(&layer.gelu().norm_first())
        }),
        ("decoder", |at, x| {
            let layer = TransformerDecoderLayer::new(at.clone(), 4, 2, 6).dropout(0.0);
            layer.decode(x[0], x[1], Mask::None)
        }),
        ("llama", |at, x| {
            let layer = GroupedQueryAttention::new(at.clone(), 16, 4, 2);
            x[0].apply(&layer.rope(Rope::new(4)))
        }),
    ]);
    // Tiles of an inference trace leave out the keys that no query of them sees.
    for (name, build) in [
        (
            "attention_window",
            (|_, x| {
                let options = causal().past(3).window(3).tiles(Tiles::Queries(2));
                x[0].attention_with(x[1], x[2], options)
            }) as Build,
        ),
        ("attention_both_ways", |_, x| {
            let options = AttentionOptions::new().past(1).window(2);
            x[0].attention_with(x[1], x[2], options.tiles(Tiles::Queries(2)))
        }),
    ] {
        check(name, Trace::inference(), build);
    }
}

#[test]
fn positions_of_sequences() {
    check_all(&[
        ("rope", |_, x| x[0].rope(x[1], &Rope::new(16))),
        ("rope_linear", |_, x| {
            x[0].rope(x[1], &Rope::new(16).scaling(RopeScaling::Linear(4.0)))
        }),
        ("rope_llama3", |_, x| {
            let scaling = RopeScaling::Llama3 {
                factor: 8.0,
                low: 1.0,
                high: 4.0,
                original: 256,
            };
            x[0].rope(x[1], &Rope::new(16).base(5e5).scaling(scaling))
        }),
        ("rope_yarn", |_, x| {
            let scaling = RopeScaling::Yarn {
                factor: 4.0,
                fast: 32.0,
                slow: 1.0,
                original: 256,
            };
            x[0].rope(x[1], &Rope::new(16).scaling(scaling))
        }),
        ("rope_interleaved", |_, x| {
            x[0].rope(x[1], &Rope::new(4).layout(RopeLayout::Interleaved))
        }),
    ]);
    let expect = |name: &'static str, build: for<'t> fn(&'t Trace) -> Tensor<'t>| {
        let trace = Trace::inference();
        let y = build(&trace).cast(F32);
        let mut session = Session::new(Device::Cpu, Params::seeded(0)).expect("a session");
        let program = session.compile(&trace, [y]).expect("it compiles");
        let [y] = session.run(&program, ()).expect("it runs");
        let key = format!("{name}/y");
        recorded(name).assert_close(&key, &y.array().expect("f32"), 1e-6);
    };
    fn buckets(trace: &Trace, both: bool, count: usize, longest: usize) -> Tensor<'_> {
        // One query at 300 and 601 keys: distances of −300 to 300.
        let all = trace.relative_buckets((1, 601), 300, both, count, longest);
        all.squeeze(0)
    }
    expect("buckets_1", |t| buckets(t, true, 32, 128));
    expect("buckets_0", |t| buckets(t, false, 32, 128));
    expect("buckets_few_1", |t| buckets(t, true, 20, 100));
    expect("buckets_few_0", |t| buckets(t, false, 20, 100));
    // The last key of two, from the query before it: the slope.
    fn slopes(trace: &Trace, heads: usize) -> Tensor<'_> {
        -trace.alibi(heads, 1, 2, 0).slice(2, 1..).flatten(0)
    }
    expect("alibi_8", |t| slopes(t, 8));
    expect("alibi_6", |t| slopes(t, 6));
    expect("sinusoids", |t| {
        t.arange(4).sinusoids(6, 1e4, RopeLayout::Interleaved)
    });
}

/// Tensors one behind the other.
fn joined<'t>(parts: &[Tensor<'t>]) -> Tensor<'t> {
    let flat: Vec<Tensor<'t>> = parts.iter().map(|part| part.flatten(0)).collect();
    parts[0].trace().concat(&flat, 0)
}

#[test]
fn recurrent_layers_and_their_states() {
    check_all(&[
        ("lstm_states", |at, x| {
            let layer = Lstm::new(at.clone(), 3, 4).layers(2).both_ways();
            let (y, [h, c]) = layer.run(x[0], Some([x[1], x[2]]), None);
            joined(&[y, h, c])
        }),
        ("lstm_projected", |at, x| {
            let layer = Lstm::new(at.clone(), 3, 4).layers(2).projection(2);
            let (y, [h, c]) = layer.run(x[0], None, None);
            joined(&[y, h, c])
        }),
        ("gru_states", |at, x| {
            let layer = Gru::new(at.clone(), 3, 4).layers(2).both_ways();
            let (y, h) = layer.run(x[0], Some(x[1]), None);
            joined(&[y, h])
        }),
        ("gru_unbiased", |at, x| {
            let (y, h) = Gru::new(at.clone(), 2, 3)
                .without_bias()
                .run(x[0], None, None);
            joined(&[y, h])
        }),
        ("gru", |at, x| {
            let (y, h) = Gru::new(at.clone(), 2, 3).run(x[0], None, None);
            joined(&[y, h])
        }),
        ("rnn_relu", |at, x| {
            let (y, h) = Rnn::new(at.clone(), 2, 3)
                .relu()
                .run(x[0], Some(x[1]), None);
            joined(&[y, h])
        }),
        ("rnn", |at, x| {
            let (y, h) = Rnn::new(at.clone(), 2, 3).layers(2).run(x[0], None, None);
            joined(&[y, h])
        }),
        ("lstm_lengths", |at, x| {
            let layer = Lstm::new(at.clone(), 2, 3).both_ways();
            let (y, [h, c]) = layer.run(x[0], None, Some(x[1]));
            joined(&[y, h, c])
        }),
        ("gru_lengths", |at, x| {
            let layer = Gru::new(at.clone(), 2, 3).layers(2);
            let (y, h) = layer.run(x[0], None, Some(x[1]));
            joined(&[y, h])
        }),
        ("lstm_cell", |at, x| {
            joined(&LstmCell::new(at.clone(), 3, 2).step(x[0], [x[1], x[2]]))
        }),
        ("gru_cell", |at, x| {
            GruCell::new(at.clone(), 3, 2).step(x[0], x[1])
        }),
        ("rnn_cell", |at, x| {
            RnnCell::new(at.clone(), 3, 2).step(x[0], x[1])
        }),
    ]);
}

#[test]
fn other_layers() {
    check_all(&[
        ("embedding_padding", |at, x| {
            x[0].apply(&Embedding::new(at.clone(), 5, 3).padding(1))
        }),
        ("prelu", |at, x| x[0].apply(&Prelu::new(at.clone(), 3))),
        ("upsample", |_, x| {
            let method = Interpolate::Linear {
                align_corners: false,
            };
            x[0].apply(&Upsample::new(2, method))
        }),
    ]);
}

#[test]
fn transposed_volumes() {
    check_all(&[
        ("transposed3d", |at, x| {
            let conv = ConvTranspose3d::new(at.clone(), 2, 3, [3, 2, 2]).stride([2, 1, 2]);
            x[0].apply(&conv.padding([1, 0, 1]).output_padding([1, 0, 1]))
        }),
        ("transposed3d_grouped", |at, x| {
            let conv = ConvTranspose3d::new(at.clone(), 4, 2, [2, 1, 3]).stride([3, 2, 1]);
            let conv = conv.dilation([2, 1, 1]).groups(2);
            x[0].apply(&conv.without_bias())
        }),
        ("transposed3d_cut", |at, x| {
            let conv = ConvTranspose3d::new(at.clone(), 1, 1, [4, 1, 1]);
            x[0].apply(&conv.padding([3, 0, 0]))
        }),
    ]);
}

#[test]
fn bags_and_normed_weights() {
    fn bag(at: &Scope, bag: Bag) -> EmbeddingBag {
        EmbeddingBag::new(at.clone(), 5, 3, bag)
    }
    check_all(&[
        ("bag_sum", |at, x| x[0].apply(&bag(at, Bag::Sum))),
        ("bag_mean", |at, x| x[0].apply(&bag(at, Bag::Mean))),
        ("bag_max", |at, x| x[0].apply(&bag(at, Bag::Max))),
        ("bag_sum_padding", |at, x| {
            x[0].apply(&bag(at, Bag::Sum).padding(1))
        }),
        ("bag_mean_padding", |at, x| {
            x[0].apply(&bag(at, Bag::Mean).padding(1))
        }),
        ("bag_max_padding", |at, x| {
            x[0].apply(&bag(at, Bag::Max).padding(1))
        }),
        ("bag_weighted", |at, x| {
            bag(at, Bag::Sum).padding(1).weighted(x[0], x[1])
        }),
        ("weight_norm", |at, x| {
            let trace = x[0].trace();
            let v = trace.param(&at.param("v", (3, 2, 3), Init::Constant(0.0)));
            let g = trace.param(&at.param("g", (3, 1, 1), Init::Constant(0.0)));
            x[0].conv1d_with(v.weight_norm(g, 0), ConvOptions::new().padding(1))
        }),
    ]);
}

#[test]
fn smaller_images_without_aliases() {
    const LINEAR: Interpolate = Interpolate::AntialiasedLinear;
    const CUBIC: Interpolate = Interpolate::AntialiasedCubic;
    check_all(&[
        ("antialias_bilinear_0", |_, x| {
            x[0].interpolate([3, 2], LINEAR)
        }),
        ("antialias_bilinear_1", |_, x| {
            x[0].interpolate([4, 12], LINEAR)
        }),
        ("antialias_bilinear_2", |_, x| {
            x[0].interpolate([1, 1], LINEAR)
        }),
        ("antialias_bilinear_3", |_, x| {
            x[0].interpolate([7, 9], LINEAR)
        }),
        ("antialias_bicubic_0", |_, x| {
            x[0].interpolate([3, 2], CUBIC)
        }),
        ("antialias_bicubic_1", |_, x| {
            x[0].interpolate([4, 12], CUBIC)
        }),
        ("antialias_bicubic_2", |_, x| {
            x[0].interpolate([1, 1], CUBIC)
        }),
        ("antialias_bicubic_3", |_, x| {
            x[0].interpolate([7, 9], CUBIC)
        }),
    ]);
}

#[test]
fn alignments_of_labels() {
    fn all<'t>(x: &[Tensor<'t>], reduction: Reduction) -> Tensor<'t> {
        let options = Ctc {
            blank: 4,
            reduction,
            ..Ctc::default()
        };
        x[0].log_softmax(2).ctc(x[1], options)
    }
    fn some<'t>(x: &[Tensor<'t>], reduction: Reduction, zero_infinity: bool) -> Tensor<'t> {
        let options = Ctc {
            input_lengths: Some(x[2]),
            target_lengths: Some(x[3]),
            zero_infinity,
            reduction,
            ..Ctc::default()
        };
        x[0].log_softmax(2).ctc(x[1], options)
    }
    check_all(&[
        ("ctc_all_none", |_, x| all(x, Reduction::None)),
        ("ctc_all_mean", |_, x| all(x, Reduction::Mean)),
        ("ctc_all_sum", |_, x| all(x, Reduction::Sum)),
        ("ctc_none", |_, x| some(x, Reduction::None, true)),
        ("ctc_mean", |_, x| some(x, Reduction::Mean, true)),
        ("ctc_sum", |_, x| some(x, Reduction::Sum, true)),
        ("ctc_infinite", |_, x| some(x, Reduction::None, false)),
        ("ctc_empty", |_, x| some(x, Reduction::Sum, false)),
    ]);
}
