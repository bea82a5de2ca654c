//! Methods composed of other operations, twice differentiated.

use slabwise::prelude::*;
use slabwise::tensor::{
    Beyond, ConvOptions, CrossEntropy, Ctc, Interpolate, PadMode, Reduction, Sampling,
};
use slabwise_compiler::reference::Array;

use super::composites::check;
use super::floats;
use crate::support::{Rng, array};

type Unary = for<'t> fn(Tensor<'t>) -> Tensor<'t>;
type Binary = for<'t> fn(Tensor<'t>, Tensor<'t>) -> Tensor<'t>;

/// Floats in a range.
fn between(rng: &mut Rng, lengths: &[usize], range: (f64, f64)) -> Array {
    array(rng, F32, lengths, range, 0)
}

#[test]
fn functions() {
    let rng = &mut Rng(21);
    let of_share: [(&str, Unary); 7] = [
        ("asin", |x| x.asin()),
        ("acos", |x| x.acos()),
        ("atanh", |x| x.atanh()),
        ("logit", |x| x.logit()),
        ("fract", |x| x.fract()),
        ("threshold", |x| x.square().threshold(0.3, -1.0)),
        ("erfinv", |x| (x * 0.3).erfinv()),
    ];
    let share = between(rng, &[8], (0.2, 0.8));
    for (name, f) in of_share {
        check(name, rng, vec![share.clone()], |_, x| f(x[0]));
    }
    let of_all: [(&str, Unary); 19] = [
        ("atan", |x| x.atan()),
        ("asinh", |x| x.asinh()),
        ("acosh", |x| (x.square() + 1.5).acosh()),
        ("leaky relu", |x| x.square().leaky_relu(0.1)),
        ("elu", |x| x.elu(1.3).square()),
        ("selu", |x| x.selu().square()),
        ("celu", |x| x.celu(0.7).square()),
        ("hardsigmoid", |x| x.hardsigmoid().square()),
        ("hardswish", |x| x.hardswish()),
        ("mish", |x| x.mish()),
        ("quick gelu", |x| x.quick_gelu()),
        ("log sigmoid", |x| x.log_sigmoid()),
        ("softsign", |x| x.softsign()),
        ("tanhshrink", |x| x.tanhshrink()),
        ("softshrink", |x| x.softshrink(0.1).square()),
        ("glu", |x| x.glu(0)),
        ("swiglu", |x| x.swiglu(0)),
        ("geglu", |x| x.geglu(0)),
        ("softmin", |x| x.softmin(0)),
    ];
    let all = floats(rng, &[8]);
    for (name, f) in of_all {
        check(name, rng, vec![all.clone()], |_, x| f(x[0]));
    }
    let of_two: [(&str, Binary); 7] = [
        ("remainder", |x, y| {
            (x * 0.1 + 1.5).remainder(y * 0.05 + 1.0).square()
        }),
        ("clamp between", |x, y| {
            x.clamp_between(y - 1.0, y + 1.0).square()
        }),
        ("lerp", |x, y| x.lerp(y, 0.3).square()),
        ("lerp by a tensor", |x, y| x.square().lerp(y, y)),
        ("hypot", |x, y| x.hypot(y.square() + 0.5)),
        ("logaddexp", |x, y| x.logaddexp(y)),
        ("prelu", |x, y| x.prelu(y).square()),
    ];
    let other = floats(rng, &[8]);
    for (name, f) in of_two {
        let arguments = vec![all.clone(), other.clone()];
        check(name, rng, arguments, |_, x| f(x[0], x[1]));
    }
}

#[test]
fn statistics() {
    let rng = &mut Rng(22);
    let x = floats(rng, &[2, 3, 4]);
    let methods: [(&str, Unary); 14] = [
        ("var", |x| x.var_over([0, 2], 1)),
        ("std", |x| x.std_over(1, 0)),
        ("norm 1", |x| x.norm_over(1, 1.0).square()),
        ("norm 2", |x| x.norm_over(.., 2.0)),
        ("norm 3", |x| x.norm_over([0, 1], 3.0)),
        ("norm ∞", |x| x.norm_over(2, f32::INFINITY).square()),
        ("diagonal", |x| x.diagonal(1).square()),
        ("diagonal below", |x| x.diagonal(-1).square()),
        ("diag embed", |x| x.diag_embed(-2).square()),
        ("trace", |x| x.diagonal_sum().square()),
        ("cosine similarity", |x| {
            x.cosine_similarity(x.square() + 0.3, 1, 1e-8)
        }),
        ("pairwise distance", |x| {
            x.pairwise_distance(x.square() + 0.3, 2.0, 1e-6)
        }),
        ("outer", |x| {
            let x = x.flatten(0);
            x.slice(0, ..3).outer(x.slice(0, 5..9))
        }),
        ("dot", |x| {
            let x = x.flatten(0);
            x.slice(0, ..4).dot(x.slice(0, 5..9))
        }),
    ];
    for (name, f) in methods {
        check(name, rng, vec![x.clone()], |_, x| f(x[0]));
    }
}

#[test]
fn arrangements() {
    let rng = &mut Rng(23);
    let x = floats(rng, &[2, 4, 4]);
    let methods: [(&str, Unary); 18] = [
        ("flip", |x| x.flip([0, 2])),
        ("roll", |x| x.roll(1, -1)),
        ("tile", |x| x.tile([2, 1, 2, 1])),
        ("repeat interleave", |x| x.repeat_interleave(1, 2)),
        ("chunk", |x| x.chunk(2, 3)[0]),
        ("unbind", |x| x.unbind(1)[3]),
        ("movedim", |x| x.movedim(0, 2)),
        ("tril", |x| x.tril(0)),
        ("triu", |x| x.triu(1)),
        ("pixel shuffle", |x| x.reshape((4, 2, 4)).pixel_shuffle(2)),
        ("space to depth", |x| x.space_to_depth(2)),
        ("pad by reflection", |x| {
            x.pad_with([(0, 0), (1, 2), (3, -1)], PadMode::Reflect)
        }),
        ("pad by edges", |x| {
            x.pad_with([(1, 0), (1, 2), (0, 0)], PadMode::Replicate)
        }),
        ("pad in a circle", |x| {
            x.pad_with([(0, 0), (5, 0), (0, 2)], PadMode::Circular)
        }),
        ("unfold", |x| {
            let geometry = ConvGeometry {
                pad: [1, 0],
                dilation: [2, 1],
                ..ConvGeometry::default()
            };
            x.unsqueeze(0).unfold([2, 3], geometry)
        }),
        ("adaptive max pool", |x| {
            x.unsqueeze(0).adaptive_max_pool2d([3, 2])
        }),
        ("lp pool", |x| {
            let window = Window {
                k: [2, 2],
                stride: [2, 1],
                pad: [0, 0],
            };
            x.unsqueeze(0).lp_pool2d(3.0, window)
        }),
        ("meshgrid", |x| {
            let x = x.flatten(0).slice(0, ..3);
            x.trace().meshgrid(&[x, x])[1]
        }),
    ];
    for (name, f) in methods {
        check(name, rng, vec![x.clone()], |_, x| f(x[0]).square());
    }
}

#[test]
fn resampling() {
    let rng = &mut Rng(24);
    let x = floats(rng, &[1, 2, 3, 4]);
    for method in [
        Interpolate::Nearest,
        Interpolate::Linear {
            align_corners: false,
        },
        Interpolate::Cubic {
            align_corners: true,
        },
        Interpolate::AntialiasedLinear,
        Interpolate::AntialiasedCubic,
    ] {
        check("interpolate", rng, vec![x.clone()], |_, x| {
            x[0].interpolate([5, 3], method).square()
        });
    }
    // Places away from the edges between elements, where slopes jump.
    let grid = between(rng, &[1, 2, 3, 2], (-0.2, 0.2));
    for sampling in [Sampling::Bilinear, Sampling::Bicubic] {
        for beyond in [Beyond::Zeros, Beyond::Border, Beyond::Reflection] {
            let arguments = vec![x.clone(), grid.clone()];
            check("grid sample", rng, arguments, |_, x| {
                x[0].grid_sample(x[1], sampling, beyond, true)
            });
        }
    }
    let theta = floats(rng, &[2, 2, 3]);
    check("affine grid", rng, vec![theta], |_, x| {
        x[0].affine_grid([2, 3], false).square()
    });
}

#[test]
fn transposed_volumes_and_normed_weights() {
    let rng = &mut Rng(26);
    let volume = floats(rng, &[1, 2, 2, 2, 3]);
    let weight = floats(rng, &[2, 1, 3, 2, 1]);
    check("conv_transpose3d", rng, vec![volume, weight], |_, x| {
        let options = ConvOptions::new().stride([2, 1, 1]).padding([1, 0, 0]);
        x[0].conv_transpose3d(x[1], options.groups(2)).square()
    });
    let (v, gain) = (floats(rng, &[3, 4]), floats(rng, &[3, 1]));
    check("weight_norm", rng, vec![v, gain], |_, x| {
        x[0].weight_norm(x[1], 0).square()
    });
}

#[test]
fn alignments() {
    let rng = &mut Rng(27);
    let scores = floats(rng, &[4, 2, 3]);
    check("ctc", rng, vec![scores], |_, x| {
        let trace = x[0].trace();
        let labels = trace.arange(2).unsqueeze(1).expand([2, 2]) + 1;
        let options = Ctc {
            input_lengths: Some(trace.arange(2) + 3),
            ..Ctc::default()
        };
        x[0].log_softmax(2).ctc(labels, options)
    });
}

#[test]
fn losses() {
    let rng = &mut Rng(25);
    let x = floats(rng, &[2, 3, 4]);
    let share = between(rng, &[2, 3, 4], (0.2, 0.8));
    let labels = array(rng, I32, &[2, 4], (0.0, 0.0), 3);
    let weights = between(rng, &[3], (0.5, 2.0));
    for reduction in [Reduction::None, Reduction::Mean] {
        for ignore in [None, Some(1)] {
            let arguments = vec![x.clone(), labels.clone(), weights.clone()];
            check("cross entropy", rng, arguments, |_, x| {
                let options = CrossEntropy {
                    class_axis: Some(1),
                    ignore,
                    weights: Some(x[2]),
                    smoothing: 0.1,
                    reduction,
                };
                x[0].cross_entropy_with(x[1], options)
            });
        }
    }
    let of_two: [(&str, Binary); 9] = [
        ("soft labels", |x, t| {
            x.cross_entropy_soft(t, CrossEntropy::default())
        }),
        ("kl", |x, t| x.kl_divergence(t, Reduction::BatchMean)),
        ("kl of logs", |x, t| {
            x.kl_divergence_of_logs(t.ln(), Reduction::Sum)
        }),
        ("poisson", |x, t| x.poisson_nll(t, Reduction::Mean)),
        ("smooth l1", |x, t| x.smooth_l1(t, 0.7, Reduction::None)),
        ("gaussian", |x, t| {
            x.gaussian_nll(t * 0.5, t, 1e-6, Reduction::Mean)
        }),
        ("focal", |x, t| x.focal(t, 0.25, 2.0, Reduction::Mean)),
        ("dice", |x, t| {
            x.sigmoid().dice(t, 1.0, Reduction::Mean).square()
        }),
        ("weighted", |x, t| {
            x.weighted_binary_cross_entropy_with_logits(t, 3.0, Reduction::Mean)
        }),
    ];
    for (name, f) in of_two {
        let arguments = vec![x.clone(), share.clone()];
        check(name, rng, arguments, |_, x| f(x[0], x[1]));
    }
    let pairs: Vec<Array> = (0..3).map(|_| floats(rng, &[3, 4])).collect();
    check("triplet", rng, pairs.clone(), |_, x| {
        x[0].triplet(x[1], x[2], 5.0, 2.0, Reduction::Mean)
    });
    check("info nce", rng, pairs[..2].to_vec(), |_, x| {
        x[0].info_nce(x[1], 0.5, Reduction::Mean)
    });
    check("cosine embedding", rng, pairs[..2].to_vec(), |_, x| {
        let target = x[0].trace().full(1.0, F32, (3,));
        x[0].cosine_embedding(x[1], target, 0.1, Reduction::Mean)
    });
}

#[test]
fn parts_at_clamped_starts() {
    let rng = &mut Rng(27);
    let all = vec![floats(rng, &[5, 2]), floats(rng, &[2, 2])];
    for start in [-3, 1, 9] {
        check("a part", rng, all.clone(), |_, x| {
            x[0].slice_clamped(0, start, 2).square() * x[1]
        });
        check("a written part", rng, all.clone(), |_, x| {
            x[0].square()
                .update_clamped(0, start, x[1].square())
                .square()
        });
    }
}
