//! Single methods against recorded results of PyTorch (`tests/data/record_methods.py`), values and
//! gradients, at ordinary and at special numbers.

use std::collections::BTreeSet;

use slabwise::prelude::*;
use slabwise::tensor::{Beyond, CrossEntropy, Interpolate, PadMode, Reduction, Sampling};

use super::Case;

const INF: f32 = f32::INFINITY;
const NAN: f32 = f32::NAN;

type Build = Box<dyn for<'t> Fn(&'t Trace, &[Tensor<'t>]) -> Tensor<'t>>;

type Loss = for<'t> fn(&[Tensor<'t>], Reduction) -> Tensor<'t>;

struct Methods(Vec<(String, Vec<&'static str>, Build)>);

impl Methods {
    fn add(
        &mut self,
        name: impl Into<String>,
        inputs: &[&'static str],
        build: impl for<'t> Fn(&'t Trace, &[Tensor<'t>]) -> Tensor<'t> + 'static,
    ) {
        self.0.push((name.into(), inputs.to_vec(), Box::new(build)));
    }
}

fn functions(m: &mut Methods) {
    type Unary = for<'t> fn(Tensor<'t>) -> Tensor<'t>;
    let unary: [(&str, Unary); 34] = [
        ("atan", |x| x.atan()),
        ("asin", |x| x.asin()),
        ("acos", |x| x.acos()),
        ("asinh", |x| x.asinh()),
        ("acosh", |x| x.acosh()),
        ("atanh", |x| x.atanh()),
        ("tan", |x| x.tan()),
        ("sinh", |x| x.sinh()),
        ("cosh", |x| x.cosh()),
        ("log2", |x| x.log2()),
        ("log10", |x| x.log10()),
        ("trunc", |x| x.trunc()),
        ("fract", |x| x.fract()),
        ("erfinv", |x| x.erfinv()),
        ("logit", |x| x.logit()),
        ("is_nan", |x| x.is_nan()),
        ("is_infinite", |x| x.is_infinite()),
        ("is_finite", |x| x.is_finite()),
        ("nan_to_num", |x| x.nan_to_num(0.5, 2.0, -3.0)),
        ("leaky_relu", |x| x.leaky_relu(0.1)),
        ("elu", |x| x.elu(1.3)),
        ("selu", |x| x.selu()),
        ("celu", |x| x.celu(0.7)),
        ("hardsigmoid", |x| x.hardsigmoid()),
        ("hardswish", |x| x.hardswish()),
        ("hardtanh", |x| x.hardtanh()),
        ("mish", |x| x.mish()),
        ("quick_gelu", |x| x.quick_gelu()),
        ("log_sigmoid", |x| x.log_sigmoid()),
        ("softsign", |x| x.softsign()),
        ("tanhshrink", |x| x.tanhshrink()),
        ("hardshrink", |x| x.hardshrink(0.5)),
        ("softshrink", |x| x.softshrink(0.5)),
        ("threshold", |x| x.threshold(0.5, -2.0)),
    ];
    for (name, f) in unary {
        m.add(name, &["s"], move |_, x| f(x[0]));
    }
    m.add("atan2", &["s", "r"], |_, x| x[0].atan2(x[1]));
    m.add("fmod", &["s", "r"], |_, x| x[0].fmod(x[1]));
    m.add("remainder", &["s", "r"], |_, x| x[0].remainder(x[1]));
    m.add("div_floor", &["s", "r"], |_, x| x[0].div_floor(x[1]));
    m.add("hypot", &["s", "r"], |_, x| x[0].hypot(x[1]));
    m.add("logaddexp", &["s", "r"], |_, x| x[0].logaddexp(x[1]));
    m.add("lerp", &["s", "r"], |_, x| x[0].lerp(x[1], 0.3));
    m.add("lerp_far", &["s", "r"], |_, x| x[0].lerp(x[1], 0.75));
    m.add("prelu", &["s", "r"], |_, x| x[0].prelu(x[1]));
    m.add("addcmul", &["s", "r"], |_, x| x[0].addcmul(x[0], x[1], 0.5));
    m.add("clamp_between", &["v", "w", "u"], |_, x| {
        x[0].clamp_between(x[1], x[2])
    });
    m.add("i_fmod", &["i", "j"], |_, x| x[0].fmod(x[1]));
    m.add("i_remainder", &["i", "j"], |_, x| x[0].remainder(x[1]));
    m.add("i_div", &["i", "j"], |_, x| x[0] / x[1]);
    m.add("i_div_floor", &["i", "j"], |_, x| x[0].div_floor(x[1]));
    m.add("i_and", &["i", "j"], |_, x| x[0].bit_and(x[1]));
    m.add("i_or", &["i", "j"], |_, x| x[0].bit_or(x[1]));
    m.add("i_xor", &["i", "j"], |_, x| x[0].bit_xor(x[1]));
    m.add("i_not", &["i"], |_, x| x[0].bit_not());
    m.add("i_pow", &["i", "k"], |_, x| x[0].pow(x[1]));
    m.add("i_shift_left", &["i", "k"], |_, x| x[0].shift_left(x[1]));
    m.add("i_shift_right", &["i", "k"], |_, x| x[0].shift_right(x[1]));
}

fn gamma_and_products(m: &mut Methods) {
    m.add("lgamma", &["s"], |_, x| x[0].lgamma());
    m.add("digamma", &["v"], |_, x| x[0].digamma());
    for n in [1, 2, 4] {
        m.add(format!("polygamma_{n}"), &["v"], move |_, x| {
            x[0].polygamma(n)
        });
    }
    m.add("kron", &["v", "m"], |_, x| x[0].kron(x[1]));
    m.add("tensordot", &["v", "w"], |_, x| {
        x[0].tensordot(x[1], [(2, 2), (0, 0)])
    });
    m.add("tensordot_0", &["a", "m"], |_, x| x[0].tensordot(x[1], []));
    m.add("einsum_further", &["v", "w"], |t, x| {
        t.einsum("...i,...i->...", x)
    });
    m.add("einsum_broadcast", &["v", "w"], |t, x| {
        t.einsum("...ij,...kj", &[x[0], x[1].slice(0, ..1)])
    });
    m.add("einsum_within", &["v", "w"], |t, x| {
        t.einsum("i...k,k...j->...ij", &[x[0], x[1].permute([2, 1, 0])])
    });
    m.add("einsum_summed", &["v"], |t, x| t.einsum("...j->j", x));
    m.add("einsum_diagonal", &["m"], move |t, x| {
        t.einsum("ii->i", &[x[0].slice(1, ..4)])
    });
    m.add("einsum_trace", &["m", "a"], |t, x| {
        t.einsum("ii,j->j", &[x[0].slice(1, ..4), x[1]])
    });
    m.add("einsum_batch_diagonal", &["v"], |t, x| {
        t.einsum("...ii->...i", &[x[0].slice(2, ..3)])
    });
}

fn metrics(m: &mut Methods) {
    m.add("class_precision", &["labels", "guesses"], |_, x| {
        x[1].class_precision(x[0], 5)
    });
    m.add("class_recall", &["labels", "guesses"], |_, x| {
        x[1].class_recall(x[0], 5)
    });
    m.add("class_f1", &["labels", "guesses"], |_, x| {
        x[1].class_f1(x[0], 5)
    });
    m.add("auroc", &["scores", "i"], |_, x| {
        x[0].detach().auroc(x[1].gt(0))
    });
    m.add("perplexity", &["v", "labels"], |_, x| x[0].perplexity(x[1]));
    m.add("psnr", &["u", "v"], |_, x| x[0].psnr(x[1], 2.0));
    m.add("ssim", &["photo", "print"], |_, x| x[0].ssim(x[1], 1.0));
}

fn arrangements(m: &mut Methods) {
    type Unary = for<'t> fn(Tensor<'t>) -> Tensor<'t>;
    let of_v: [(&str, Unary); 42] = [
        ("var", |x| x.var_over(.., 1)),
        ("var_0", |x| x.var_over([0, 2], 0)),
        ("std", |x| x.std_over(1, 1)),
        ("std_keep", |x| x.std_keep([1, 2], 0)),
        ("norm_0", |x| x.norm_over(1, 0.0)),
        ("norm_1", |x| x.norm_over(1, 1.0)),
        ("norm_2", |x| x.norm_over(.., 2.0)),
        ("norm_3", |x| x.norm_over([0, 1], 3.0)),
        ("norm_half", |x| x.norm_over(2, 0.5)),
        ("norm_inf", |x| x.norm_over(2, INF)),
        ("norm_minus_inf", |x| x.norm_over(2, -INF)),
        ("flip", |x| x.flip([0, 2])),
        ("roll", |x| x.roll(2, 1)),
        ("roll_back", |x| x.roll(1, -5)),
        ("tile", |x| x.tile([2, 1, 1, 3])),
        ("repeat_interleave", |x| x.repeat_interleave(1, 3)),
        ("chunk", |x| x.chunk(2, 3)[1]),
        ("split_lengths", |x| x.split_lengths(2, [1, 3])[1]),
        ("unbind", |x| x.unbind(1)[2]),
        ("narrow", |x| x.narrow(2, 1, 2)),
        ("movedim", |x| x.movedim(0, 2)),
        ("movedim_back", |x| x.movedim(2, 0)),
        ("tril", |x| x.tril(0)),
        ("tril_1", |x| x.tril(1)),
        ("triu_1", |x| x.triu(1)),
        ("triu_minus_1", |x| x.triu(-1)),
        ("diagonal", |x| x.diagonal(0)),
        ("diagonal_2", |x| x.diagonal(2)),
        ("diagonal_minus_1", |x| x.diagonal(-1)),
        ("diagonal_far", |x| x.diagonal(9)),
        ("diag_embed", |x| x.diag_embed(0)),
        ("diag_embed_2", |x| x.diag_embed(2)),
        ("diag_embed_minus_1", |x| x.diag_embed(-1)),
        ("softmin", |x| x.softmin(1)),
        ("softmax_at", |x| x.softmax_at(2, 0.3)),
        ("glu", |x| x.glu(2)),
        ("swiglu", |x| x.swiglu(2)),
        ("geglu", |x| x.geglu(2)),
        ("var", |x| x.var_keep(.., 1)),
        ("std", |x| x.std_keep(1, 1)),
        ("norm_2", |x| x.norm_keep([0, 1, 2], 2.0)),
        ("norm_1", |x| x.norm_keep(1, 1.0)),
    ];
    for (name, f) in of_v {
        m.add(name, &["v"], move |_, x| f(x[0]));
    }
    m.add("zero_std", &["zero"], |_, x| x[0].std_over(1, 1));
    m.add("zero_norm", &["zero"], |_, x| x[0].norm_over(1, 2.0));
    m.add("zero_norm_3", &["zero"], |_, x| x[0].norm_over(1, 3.0));
    m.add("outer", &["a", "b"], |_, x| x[0].outer(x[1]));
    m.add("dot", &["a", "b"], |_, x| x[0].dot(x[1]));
    m.add("diagonal_sum", &["m"], |_, x| x[0].diagonal_sum());
    m.add("cosine_similarity", &["v", "w"], |_, x| {
        x[0].cosine_similarity(x[1], 1, 1e-8)
    });
    m.add("pairwise_distance", &["v", "w"], |_, x| {
        x[0].pairwise_distance(x[1], 2.0, 1e-6)
    });
    m.add("pairwise_distance_1", &["v", "w"], |_, x| {
        x[0].pairwise_distance(x[1], 1.0, 1e-6)
    });
    m.add("linspace", &[], |t, _| t.linspace(-1.3, 2.9, 8));
    m.add("range", &[], |t, _| t.range(10, 3, -2));
    m.add("range_f32", &[], |t, _| t.range_f32(0.5, 2.0, 0.3));
    m.add("eye", &[], |t, _| t.eye(3, 5));
    m.add("meshgrid", &["a", "b"], |t, x| t.stack(&t.meshgrid(x), 0));
}

fn images(m: &mut Methods) {
    for (name, padding) in [
        ("reflect", PadMode::Reflect),
        ("replicate", PadMode::Replicate),
        ("circular", PadMode::Circular),
    ] {
        m.add(format!("pad_{name}"), &["img"], move |_, x| {
            x[0].pad_with([(0, 0), (0, 0), (3, 4), (2, 1)], padding)
        });
        m.add(format!("pad_{name}_seq"), &["seq"], move |_, x| {
            x[0].pad_with([(0, 0), (0, 0), (3, 2)], padding)
        });
    }
    m.add("pad_crop", &["img"], |_, x| {
        x[0].pad_with([(0, 0), (0, 0), (1, -2), (-1, 2)], PadMode::Constant(0.5))
    });
    m.add("pad_crop_replicate", &["img"], |_, x| {
        x[0].pad_with([(0, 0), (0, 0), (1, -2), (-1, 2)], PadMode::Replicate)
    });
    m.add("pixel_shuffle", &["img"], |_, x| x[0].pixel_shuffle(2));
    m.add("pixel_unshuffle", &["img"], |_, x| {
        x[0].slice(2, ..4).pixel_unshuffle(2)
    });
    m.add("unfold", &["img"], |_, x| {
        x[0].unfold([2, 3], ConvGeometry::default())
    });
    m.add("unfold_all", &["img"], |_, x| {
        let geometry = ConvGeometry {
            stride: [1, 2],
            pad: [1, 2],
            dilation: [2, 1],
            groups: 1,
        };
        x[0].unfold([2, 3], geometry)
    });
    m.add("adaptive_max_pool", &["img"], |_, x| {
        x[0].adaptive_max_pool2d([2, 4])
    });
    m.add("adaptive_max_pool_1", &["img"], |_, x| {
        x[0].adaptive_max_pool2d([1, 1])
    });
    m.add("lp_pool", &["img"], |_, x| {
        let window = Window {
            k: [2, 3],
            stride: [1, 2],
            pad: [0, 0],
        };
        x[0].lp_pool2d(2.0, window)
    });
    let sizes: [(&str, &[&[usize]]); 3] = [
        ("img", &[&[10, 12], &[7, 9], &[3, 4], &[1, 1], &[5, 11]]),
        ("seq", &[&[14], &[4], &[1]]),
        ("vol", &[&[5, 2, 4]]),
    ];
    for (source, sizes) in sizes {
        for (n, &size) in sizes.iter().enumerate() {
            let mut add = |name: String, method: Interpolate| {
                m.add(format!("{name}_{source}_{n}"), &[source], move |_, x| {
                    x[0].interpolate(size, method)
                });
            };
            add("nearest".into(), Interpolate::Nearest);
            add("nearest_exact".into(), Interpolate::NearestExact);
            for align_corners in [false, true] {
                let corners = u8::from(align_corners);
                add(
                    format!("linear_{corners}"),
                    Interpolate::Linear { align_corners },
                );
                if source == "img" {
                    add(
                        format!("cubic_{corners}"),
                        Interpolate::Cubic { align_corners },
                    );
                }
            }
        }
    }
    for (sampling, how) in [
        ("nearest", Sampling::Nearest),
        ("bilinear", Sampling::Bilinear),
        ("bicubic", Sampling::Bicubic),
    ] {
        for (beyond, edge) in [
            ("zeros", Beyond::Zeros),
            ("border", Beyond::Border),
            ("reflection", Beyond::Reflection),
        ] {
            for corners in [false, true] {
                let name = format!("grid_{sampling}_{beyond}_{}", u8::from(corners));
                m.add(name, &["img", "grid"], move |_, x| {
                    x[0].grid_sample(x[1], how, edge, corners)
                });
            }
        }
    }
    for corners in [false, true] {
        m.add(
            format!("affine_grid_{}", u8::from(corners)),
            &["theta"],
            move |_, x| x[0].affine_grid([3, 4], corners),
        );
    }
}

fn losses(m: &mut Methods) {
    let reductions = [
        ("none", Reduction::None),
        ("mean", Reduction::Mean),
        ("sum", Reduction::Sum),
    ];
    for (r, reduction) in reductions {
        for smoothing in [0.0, 0.2] {
            let mut add = |name: &str, inputs: &[&'static str], ignore, soft, class_axis| {
                let name = format!("cross_entropy_{name}{r}_{smoothing:?}");
                m.add(name, inputs, move |_, x| {
                    let options = CrossEntropy {
                        class_axis,
                        ignore,
                        weights: x.get(2).copied(),
                        smoothing,
                        reduction,
                    };
                    if soft {
                        x[0].cross_entropy_soft(x[1], options)
                    } else {
                        x[0].cross_entropy_with(x[1], options)
                    }
                });
            };
            let hundred = Some(-100);
            add("", &["v", "labels"], None, false, None);
            add("all_", &["v", "ignored", "classes"], hundred, false, None);
            add("ignored_", &["v", "ignored"], hundred, false, Some(2));
            add("weights_", &["v", "labels", "classes"], None, false, None);
            add("axis_", &["v", "places", "three"], hundred, false, Some(1));
            add("soft_", &["v", "u"], None, true, None);
            add("soft_weights_", &["v", "u", "classes"], None, true, None);
        }
        let mut add = |name: &str, inputs: &[&'static str], f: Loss| {
            m.add(format!("{name}_{r}"), inputs, move |_, x| f(x, reduction));
        };
        add("nll", &["v", "ignored", "classes"], |x, reduction| {
            let options = CrossEntropy {
                ignore: Some(-100),
                weights: Some(x[2]),
                reduction,
                ..CrossEntropy::default()
            };
            x[0].nll(x[1], options)
        });
        add("mse", &["v", "w"], |x, r| x[0].mse_by(x[1], r));
        add("l1", &["v", "w"], |x, r| x[0].l1_by(x[1], r));
        add("huber", &["v", "w"], |x, r| x[0].huber_by(x[1], 0.8, r));
        add("smooth_l1", &["v", "w"], |x, r| {
            x[0].smooth_l1(x[1], 0.8, r)
        });
        add("bce", &["u"], |x, r| {
            x[0].binary_cross_entropy_by(1.0 - x[0].detach(), r)
        });
        add("bce_logits", &["v", "u"], |x, r| {
            x[0].binary_cross_entropy_with_logits_by(x[1], r)
        });
        add("bce_weighted", &["v", "u", "classes"], |x, r| {
            x[0].weighted_binary_cross_entropy_with_logits(x[1], x[2], r)
        });
        add("kl", &["v", "u"], |x, r| x[0].kl_divergence(x[1], r));
        add("kl_logs", &["v", "w"], |x, r| {
            x[0].kl_divergence_of_logs(x[1], r)
        });
        add("poisson", &["v", "u"], |x, r| x[0].poisson_nll(x[1], r));
        add("gaussian", &["v", "w", "u"], |x, r| {
            x[0].gaussian_nll(x[1], x[2], 1e-6, r)
        });
        add("hinge_embedding", &["v", "t"], |x, r| {
            x[0].hinge_embedding(x[1], 0.7, r)
        });
        add("soft_margin", &["v", "t"], |x, r| x[0].soft_margin(x[1], r));
        add("margin_ranking", &["v", "w", "t"], |x, r| {
            x[0].margin_ranking(x[1], x[2], 0.3, r)
        });
        add("triplet", &["v", "w", "u"], |x, r| {
            x[0].triplet(x[1], x[2], 0.5, 2.0, r)
        });
        add("cosine_embedding", &["v", "w", "sign"], |x, r| {
            x[0].cosine_embedding(x[1], x[2], 0.1, r)
        });
    }
    let mean = Reduction::Mean;
    m.add("kl_batch", &["v", "u"], |_, x| {
        x[0].kl_divergence(x[1], Reduction::BatchMean)
    });
    m.add("kl_zero", &["sign", "zero"], move |_, x| {
        x[0].kl_divergence(x[1], mean)
    });
    m.add("smooth_l1_0", &["v", "w"], move |_, x| {
        x[0].smooth_l1(x[1], 0.0, mean)
    });
    m.add("focal", &["v", "u"], move |_, x| {
        x[0].focal(x[1], 0.25, 2.0, mean)
    });
    m.add("focal_plain", &["v", "u"], move |_, x| {
        x[0].focal(x[1], -1.0, 1.5, mean)
    });
    m.add("dice", &["u", "t"], move |_, x| {
        x[0].dice((x[1] + 1.0) / 2.0, 1.0, mean)
    });
    m.add("hinge", &["v", "t"], move |_, x| x[0].hinge(x[1], mean));
    m.add("info_nce", &["m"], move |_, x| {
        x[0].info_nce(x[0].exp().detach(), 0.2, mean)
    });
}

/// Differences from PyTorch: case, part, position, and the result of this library.
#[rustfmt::skip]
const OTHERWISE: &[(&str, &str, usize, f32)] = &[
    // Below 1 there is no value, and no slope.
    ("acosh", "0", 2, NAN),
    ("acosh", "0", 6, NAN),
    ("acosh", "0", 8, NAN),
    ("acosh", "0", 12, NAN),
    ("acosh", "0", 14, NAN),
    ("acosh", "0", 17, NAN),
    ("acosh", "0", 19, NAN),
    ("acosh", "0", 21, NAN),
    ("acosh", "0", 25, NAN),
    ("acosh", "0", 27, NAN),
    ("acosh", "0", 35, NAN),
    ("acosh", "0", 38, NAN),
    // NaN passes through.
    ("hardsigmoid", "0", 0, -0.208_333_33),
    ("hardtanh", "0", 0, -1.25),
    ("hardshrink", "0", 0, -1.25),
    ("softshrink", "0", 0, -1.25),
    // The square of a distance of 10⁻²⁰ has a reciprocal that overflows; the quotient does not.
    ("atan2", "0", 15, 1.250_006_7e19),
    ("atan2", "1", 15, -1.250_006_7e19),
    // ⌊∞/2⌋
    ("remainder", "1", 1, -INF),
];

fn close(a: f32, b: f32) -> bool {
    a == b || (a.is_nan() && b.is_nan()) || b.is_finite() && (a - b).abs() <= 2e-5 * (1.0 + b.abs())
}

#[test]
fn methods_are_as_in_pytorch() {
    let file = slabwise::weights::File::open(format!(
        "{}/tests/data/torch/methods.safetensors",
        env!("CARGO_MANIFEST_DIR")
    ));
    let recorded = Case {
        name: "methods",
        file: file.expect("recorded"),
    };
    let mut methods = Methods(Vec::new());
    functions(&mut methods);
    arrangements(&mut methods);
    images(&mut methods);
    losses(&mut methods);
    gamma_and_products(&mut methods);
    metrics(&mut methods);
    let (mut wrong, mut used, mut met) = (Vec::new(), BTreeSet::new(), BTreeSet::new());
    for (name, inputs, build) in &methods.0 {
        let trace = Trace::training();
        let mut arguments: Vec<Box<dyn slabwise::feed::Input>> = Vec::new();
        let mut xs = Vec::new();
        for &input in inputs {
            let stored = format!("in/{input}");
            let dtype = recorded.file.get(&stored).expect("recorded").dtype;
            if dtype == I32 {
                let x = recorded.integers(&stored);
                xs.push(trace.input(input, I32, x.shape()));
                arguments.push(Box::new(x));
            } else {
                let x = recorded.floats(&stored);
                xs.push(trace.input(input, F32, x.shape()));
                arguments.push(Box::new(x));
            }
        }
        let value = build(&trace, &xs).cast(F32).reshape([-1i64]);
        let expected = recorded.floats(&format!("{name}/value"));
        let i = trace.arange(expected.len());
        let weights = ((i * 7).fmod(11) - 5).cast(F32) / 4.0;
        let loss = (value * weights).sum();
        let mut outputs = vec![("value", value)];
        for (x, part) in xs.iter().zip(["0", "1", "2"]) {
            if recorded.file.get(&format!("{name}/{part}")).is_some() {
                outputs.push((part, trace.gradients(loss, [*x])[0]));
            }
        }
        let mut session = Session::new(Device::Cpu, Params::seeded(0))
            .expect("a session")
            .with_threads(1);
        let tensors: Vec<Tensor<'_>> = outputs.iter().map(|(_, t)| t.reshape([-1i64])).collect();
        let sizes: Vec<usize> = tensors.iter().map(|t| t.len(0).expect("fixed")).collect();
        let all = trace.concat(&tensors, 0);
        let program = session
            .compile(&trace, [all])
            .unwrap_or_else(|e| panic!("{name}: {e}"));
        let feed: Vec<&dyn slabwise::feed::Input> = arguments.iter().map(|a| &**a).collect();
        let [all] = session
            .run(&program, feed.as_slice())
            .unwrap_or_else(|e| panic!("{name}: {e}"));
        let all = all.array::<f32>().expect("f32");
        let mut rest = all.as_slice().expect("contiguous");
        for ((part, _), size) in outputs.iter().zip(sizes) {
            let (got, after) = rest.split_at(size);
            rest = after;
            let expected = recorded.floats(&format!("{name}/{part}"));
            used.insert(format!("{name}/{part}"));
            assert_eq!(got.len(), expected.len(), "{name}: elements of {part}");
            for (at, (&got, &expected)) in got.iter().zip(&expected).enumerate() {
                let otherwise = OTHERWISE
                    .iter()
                    .position(|(n, p, i, _)| n == name && p == part && *i == at);
                let wanted = otherwise.map_or(expected, |k| OTHERWISE[k].3);
                if !close(got, wanted) {
                    wrong.push(format!(
                        "(\"{name}\", \"{part}\", {at}, {got:?}), // {expected:?}"
                    ));
                }
                if let Some(k) = otherwise {
                    assert!(!close(got, expected), "{name} {part} {at} is as in PyTorch");
                    met.insert(k);
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert_eq!(met.len(), OTHERWISE.len(), "some differences were not met");
    let unused: Vec<&str> = recorded
        .file
        .names()
        .map(|(name, ..)| name)
        .filter(|n| !n.starts_with("in/") && !used.contains(*n))
        .collect();
    assert!(unused.is_empty(), "recorded, but not compared: {unused:?}");
}

/// Functions that move no element are one kernel, however many rows of the scalar table they have.
#[test]
fn functions_fuse_into_one_kernel() {
    let mut methods = Methods(Vec::new());
    functions(&mut methods);
    for (name, inputs, build) in &methods.0 {
        let trace = Trace::inference();
        let dtype = if name.starts_with("i_") { I32 } else { F32 };
        let xs: Vec<Tensor<'_>> = ["x", "y", "z"][..inputs.len()]
            .iter()
            .map(|input| trace.input(input, dtype, (64, 32)))
            .collect();
        let mut session = Session::new(Device::Cpu, Params::seeded(0)).expect("a session");
        let program = session
            .compile(&trace, [build(&trace, &xs)])
            .unwrap_or_else(|e| panic!("{name}: {e}"));
        assert_eq!(program.plan().kernels(), 1, "{name}");
    }
}
