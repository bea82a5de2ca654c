//! Composed methods: lengths of runs, no elements, and mistakes. Their values and gradients beside
//! PyTorch's are in `tests/torch/methods.rs`.

use super::*;
use crate::ops::ConvGeometry;
use crate::shape::Dim;
use crate::tensor::{
    Beyond, Coordinates, CrossEntropy, Ctc, Interpolate, Interpolation, PadMode, PoolOptions,
    Reduction, Resize, ResizeAxis, RopeLayout, Rounding, Sampling,
};
use slabwise_kernels::dtype::DType::{Bool, F32, I32, U8};

const NAN: f64 = f64::NAN;

/// The only mistake of a trace.
#[track_caller]
fn only_mistake(build: impl for<'t> Fn(&'t Trace)) -> String {
    let trace = Trace::inference();
    build(&trace);
    let mistakes = trace.finish(&[]).expect_err("there is a mistake");
    assert_eq!(mistakes.len(), 1, "{mistakes:?}");
    assert_eq!(mistakes[0].location.file(), file!(), "{mistakes:?}");
    mistakes[0].message.clone()
}

/// The sums of rows.
fn sums(x: Tensor<'_>) -> Tensor<'_> {
    x.sum_over(1)
}

#[test]
fn bounded_axes_have_the_length_of_the_run() {
    let trace = Trace::inference();
    let x = trace.input("x", F32, (Dim::bounded("n", 5), 2));
    let outputs = [
        sums(x.flip(0)),
        sums(x.tile([2, 1])),
        sums(x.repeat_interleave(0, 2)),
        sums(x.tril(-1)),
        sums(x.pad_with([(2, 1), (0, 0)], PadMode::Reflect)),
        sums(x.pad_with([(1, 4), (0, 0)], PadMode::Circular)),
        sums(x.pad_with([(1, 1), (0, 0)], PadMode::Replicate)),
        x.var_over(0, 1),
        x.norm_over(0, 2.0),
        x.movedim(0, 1).norm_over(0, 1.0),
    ];
    let input = array(&[3, 2], &[1.0, 2.0, 3.0, 5.0, -4.0, 8.0]);
    let got = run(&trace, &outputs, 3, &[input]);
    let expected: [&[f64]; 10] = [
        &[4.0, 8.0, 3.0],
        &[3.0, 8.0, 4.0, 3.0, 8.0, 4.0],
        &[3.0, 3.0, 8.0, 8.0, 4.0, 4.0],
        &[0.0, 3.0, 4.0],
        &[4.0, 8.0, 3.0, 8.0, 4.0, 8.0],
        &[4.0, 3.0, 8.0, 4.0, 3.0, 8.0, 4.0, 3.0],
        &[3.0, 3.0, 8.0, 4.0, 4.0],
        &[13.0, 9.0],
        &[26f64.sqrt(), 93f64.sqrt()],
        &[3.0, 8.0, 12.0],
    ];
    for (got, expected) in got.iter().zip(expected) {
        assert_close(&got.values, expected, 1e-6);
    }
}

#[test]
fn nothing_has_no_elements_in_another_arrangement_either() {
    let trace = Trace::inference();
    let x = trace.input("x", F32, (0, 3));
    let outputs = [
        x.flip([0, 1]),
        x.roll(0, 2),
        x.tile([2, 2]),
        x.repeat_interleave(1, 0),
        x.chunk(0, 3)[2],
        x.tril(0),
        x.diagonal(0),
        x.diag_embed(1),
        x.pad_with([(0, 0), (1, 1)], PadMode::Reflect),
        x.unsqueeze(0).interpolate([5], Interpolate::Nearest),
        x.erfinv(),
        x.elu(1.0),
    ];
    let got = run(&trace, &outputs, 0, &[array(&[0, 3], &[])]);
    let dims: Vec<&[usize]> = got.iter().map(|a| a.dims.as_slice()).collect();
    assert_eq!(
        dims,
        [
            &[0, 3][..],
            &[0, 3],
            &[0, 6],
            &[0, 0],
            &[0, 3],
            &[0, 3],
            &[0],
            &[0, 4, 4],
            &[0, 5],
            &[1, 0, 5],
            &[0, 3],
            &[0, 3]
        ]
    );
    let trace = Trace::inference();
    let x = trace.input("x", F32, (0,));
    let outputs = [x.var_over(.., 1), x.norm_over(.., 2.0), x.dot(x)];
    let got = run(&trace, &outputs, 0, &[array(&[0], &[])]);
    assert_close(&got[0].values, &[NAN], 0.0);
    assert_close(&got[1].values, &[0.0], 0.0);
    assert_close(&got[2].values, &[0.0], 0.0);
}

#[test]
fn types_stay_where_values_only_move() {
    let trace = Trace::inference();
    let x = trace.input("x", U8, (2, 2));
    let y = trace.input("y", Bool, (2, 2));
    for moved in [
        x.flip(0),
        x.tril(0),
        x.roll(1, 1),
        x.tile([2, 2]),
        x.pad_with([(1, 1), (0, 0)], PadMode::Replicate),
        x.diag_embed(0),
        x.resize(
            [ResizeAxis::new(0, 3)],
            Resize::new(
                Interpolation::Nearest(Rounding::Floor),
                Coordinates::Asymmetric,
            ),
        ),
    ] {
        assert_eq!(moved.dtype(), U8);
    }
    assert_eq!(y.triu(1).dtype(), Bool);
    assert_eq!(x.bit_and(7).dtype(), I32);
    finished(&trace, &[]);
}

/// ONNX's examples of `Resize` (its test suite, from opset 19 on).
#[test]
fn coordinates_of_onnx() {
    let trace = Trace::inference();
    let four = trace.input("four", F32, (4,));
    let line = |length, scale, interpolation, coordinates| {
        let to = ResizeAxis {
            scale,
            ..ResizeAxis::new(0, length)
        };
        four.resize([to], Resize::new(interpolation, coordinates))
    };
    let nearest = Interpolation::Nearest;
    let outputs = [
        // x = (i + ½)·⅘ − ½ = −0.1, 0.7, 1.5, 2.3, 3.1
        line(
            5,
            None,
            nearest(Rounding::PreferFloor),
            Coordinates::HalfPixel,
        ),
        line(
            5,
            None,
            nearest(Rounding::PreferCeil),
            Coordinates::HalfPixel,
        ),
        line(5, None, nearest(Rounding::Floor), Coordinates::HalfPixel),
        line(5, None, nearest(Rounding::Ceil), Coordinates::HalfPixel),
        line(5, None, Interpolation::Linear, Coordinates::HalfPixel),
        // x = i/0.6
        line(2, Some(0.6), Interpolation::Linear, Coordinates::Asymmetric),
        // x = (i + ½)/0.6 − ½ = 0.333, 2
        line(2, Some(0.6), Interpolation::Linear, Coordinates::HalfPixel),
        // The same around the middle: the output would be 2.4 long, so x = 0.667, 2.333.
        line(
            2,
            Some(0.6),
            Interpolation::Linear,
            Coordinates::HalfPixelSymmetric,
        ),
        line(
            1,
            None,
            Interpolation::Linear,
            Coordinates::PytorchHalfPixel,
        ),
        line(
            2,
            None,
            nearest(Rounding::Floor),
            Coordinates::TfHalfPixelForNearest,
        ),
        four.resize(
            [ResizeAxis {
                crop: (-0.5, 0.5),
                ..ResizeAxis::new(0, 3)
            }],
            Resize {
                extrapolation: 10.0,
                ..Resize::new(Interpolation::Linear, Coordinates::Crop)
            },
        ),
        four.resize(
            [ResizeAxis::new(0, 8)],
            Resize {
                exclude_outside: true,
                ..Resize::new(Interpolation::Cubic { a: -0.5 }, Coordinates::HalfPixel)
            },
        ),
    ];
    let got = run(&trace, &outputs, 0, &[array(&[4], &[1.0, 2.0, 3.0, 4.0])]);
    // The weights of the elements inside alone, scaled to sum 1.
    let keys = |d: f64| {
        if d <= 1.0 {
            (1.5 * d - 2.5) * d * d + 1.0
        } else {
            -0.5 * (((d - 5.0) * d + 8.0) * d - 4.0)
        }
    };
    let cubic: Vec<f64> = (0..8)
        .map(|i| {
            let x = (f64::from(i) + 0.5) / 2.0 - 0.5;
            let inside = (0..4).filter(|&k| (x - f64::from(k)).abs() < 2.0);
            let (sum, all) = inside.fold((0.0, 0.0), |(sum, all), k| {
                let weight = keys((x - f64::from(k)).abs());
                (sum + weight * f64::from(k + 1), all + weight)
            });
            sum / all
        })
        .collect();
    let expected: [&[f64]; 12] = [
        &[1.0, 2.0, 2.0, 3.0, 4.0],
        &[1.0, 2.0, 3.0, 3.0, 4.0],
        &[1.0, 1.0, 2.0, 3.0, 4.0],
        &[1.0, 2.0, 3.0, 4.0, 4.0],
        &[1.0, 1.7, 2.5, 3.3, 4.0],
        &[1.0, 2.666_667],
        &[1.333_333, 3.0],
        &[1.666_667, 3.333_333],
        &[1.0],
        &[2.0, 4.0],
        &[10.0, 1.0, 2.5],
        &cubic,
    ];
    for (got, expected) in got.iter().zip(expected) {
        assert_close(&got.values, expected, 1e-5);
    }
}

#[test]
fn positions_in_blocks_are_channels_in_two_orders() {
    let trace = Trace::inference();
    let x = trace.input("x", F32, (Dim::bounded("n", 3), 8, 1, 1));
    let outputs = [
        x.depth_to_space(2),
        x.pixel_shuffle(2),
        x.depth_to_space(2).space_to_depth(2),
        x.pixel_shuffle(2).pixel_unshuffle(2),
    ];
    let values: Vec<f64> = (0..8).map(f64::from).collect();
    let got = run(&trace, &outputs, 1, &[array(&[1, 8, 1, 1], &values)]);
    assert_eq!(got[0].values, [0.0, 2.0, 4.0, 6.0, 1.0, 3.0, 5.0, 7.0]);
    assert_eq!(got[0].dims, [1, 2, 2, 2]);
    assert_eq!(got[1].values, values);
    assert_eq!(got[2].values, values);
    assert_eq!(got[3].values, values);
}

#[test]
fn a_mean_over_ignored_labels_alone_is_nan_and_their_sum_0() {
    let trace = Trace::inference();
    let x = trace.input("x", F32, (2, 3));
    let labels = trace.input("labels", I32, (2,));
    let of = |reduction| {
        let options = CrossEntropy {
            ignore: Some(-100),
            reduction,
            ..CrossEntropy::default()
        };
        x.cross_entropy_with(labels, options)
    };
    let outputs = [of(Reduction::Mean), of(Reduction::Sum), of(Reduction::None)];
    let inputs = [array(&[2, 3], &[1.0; 6]), integers(&[2], &[-100, -100])];
    let got = run(&trace, &outputs, 0, &inputs);
    assert_close(&got[0].values, &[NAN], 0.0);
    assert_close(&got[1].values, &[0.0], 0.0);
    assert_close(&got[2].values, &[0.0, 0.0], 0.0);
    // A label that is not ignored is checked.
    let inputs = [array(&[2, 3], &[1.0; 6]), integers(&[2], &[-100, 3])];
    let fault = try_run(&trace, &outputs, 0, &inputs).map(|e| e.outputs);
    assert!(
        matches!(
            fault,
            Err(Fault::Index {
                index: 3,
                limit: 3,
                ..
            })
        ),
        "{fault:?}"
    );
}

#[test]
fn measures_of_predictions() {
    let trace = Trace::inference();
    let scores = trace.input("scores", F32, (Dim::bounded("n", 5), 3));
    let labels = trace.input("labels", I32, (Dim::bounded("n", 5),));
    let outputs = [
        scores.accuracy(labels),
        scores.topk_accuracy(labels, 2),
        scores.topk_accuracy(labels, 3),
        scores.argmax(1).confusion_matrix(labels, 3),
    ];
    let values = [3.0, 2.0, 1.0, 1.0, 3.0, 2.0, 0.5, 0.2, 0.1, 1.0, 2.0, 3.0];
    let inputs = [array(&[4, 3], &values), integers(&[4], &[0, 2, 2, 2])];
    let got = run(&trace, &outputs, 4, &inputs);
    assert_eq!(got[0].values, [0.5]);
    assert_eq!(got[1].values, [0.75]);
    assert_eq!(got[2].values, [1.0]);
    assert_eq!(got[3].values, [1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0]);
}

fn ignore<T>(_: T) {}

#[test]
fn mistakes_name_the_tensor_and_the_number() {
    type Build = for<'t> fn(&'t Trace);
    let cases: [(&str, Build); 26] = [
        ("flip: [2, 3] has no axis 2", |t| {
            ignore(t.zeros((2, 3)).flip(2))
        }),
        ("roll: [2, 3] has no axis 5", |t| {
            ignore(t.zeros((2, 3)).roll(5, 1))
        }),
        ("tile of [2, 3]: 1 number for 2 axes", |t| {
            ignore(t.zeros((2, 3)).tile([2]))
        }),
        ("tile: axis 0 of [2] becomes too long", |t| {
            ignore(t.zeros((2,)).tile([usize::MAX]))
        }),
        ("chunk: into 0 parts", |t| ignore(t.zeros((2,)).chunk(0, 0))),
        (
            "split_lengths: axis 0 of [5] cannot be split into 2 parts; they must add up to its length",
            |t| ignore(t.zeros((5,)).split_lengths(0, [2, 2])),
        ),
        ("unbind: axis 0 of [n] has no fixed length", |t| {
            ignore(t.zeros((Dim::bounded("n", 4),)).unbind(0))
        }),
        ("tril of [3]: two axes are needed", |t| {
            ignore(t.zeros((3,)).tril(0))
        }),
        (
            "pixel_shuffle of [1, 6, 2, 2] by 2: images […, channels, h, w] that divide into blocks of 2×2 are needed",
            |t| ignore(t.zeros((1, 6, 2, 2)).pixel_shuffle(2)),
        ),
        (
            "space_to_depth of [1, 6, 3, 2] by 2: images […, channels, h, w] that divide into blocks of 2×2 are needed",
            |t| ignore(t.zeros((1, 6, 3, 2)).space_to_depth(2)),
        ),
        ("pad_with of [2, 3]: 1 pair for 2 axes", |t| {
            ignore(t.zeros((2, 3)).pad_with([(1, 1)], PadMode::Reflect))
        }),
        (
            "pad_with: axis 0 of [2] does not have 2 and 1 elements to remove at every length",
            |t| ignore(t.zeros((2,)).pad_with([(-2, -1)], PadMode::Constant(0.0))),
        ),
        ("pad_with: axis 0 of [0] has no elements to pad with", |t| {
            ignore(t.zeros((0,)).pad_with([(1, 0)], PadMode::Circular))
        }),
        (
            "interpolate of [1, 2, 3] to [4, 4]: [n, channels, …] with a new length for each axis from 2 on is needed",
            |t| ignore(t.zeros((1, 2, 3)).interpolate([4, 4], Interpolate::Nearest)),
        ),
        (
            "resize: axis 2 of [1, 1, 0] has no elements to become 4",
            |t| ignore(t.zeros((1, 1, 0)).interpolate([4], Interpolate::Nearest)),
        ),
        ("resize does not interpolate i32; convert with cast", |t| {
            let x = t.full(1.0, I32, (1, 1, 3));
            ignore(x.interpolate(
                [4],
                Interpolate::Cubic {
                    align_corners: true,
                },
            ))
        }),
        (
            "grid_sample of f32 [2, 1, 3, 3] by f32 [1, 4, 4, 2]: an image [n, channels, h, w] of fixed height and width and a grid [n, oh, ow, 2], both f32, are needed",
            |t| {
                let grid = t.zeros((1, 4, 4, 2));
                let image = t.zeros((2, 1, 3, 3));
                ignore(image.grid_sample(grid, Sampling::Bilinear, Beyond::Zeros, false))
            },
        ),
        (
            "unfold of [1, 1, 2, 2] into windows of [3, 1]: an image [n, channels, h, w] of fixed height and width with at least one window is needed",
            |t| {
                ignore(
                    t.zeros((1, 1, 2, 2))
                        .unfold([3, 1], ConvGeometry::default()),
                )
            },
        ),
        (
            "dot of [2] and [3]: two vectors are needed of one length",
            |t| ignore(t.zeros((2,)).dot(t.zeros((3,)))),
        ),
        (
            "diagonal of [2]: two last axes of fixed length are needed",
            |t| ignore(t.zeros((2,)).diagonal(0)),
        ),
        ("norm does not take i32; convert with cast", |t| {
            ignore(t.full(1.0, I32, (3,)).norm_over(0, 2.0))
        }),
        ("range from 1 to 4 by 0 has no end", |t| {
            ignore(t.range(1, 4, 0))
        }),
        ("bit_and does not take f32, f32; convert with cast", |t| {
            ignore(t.zeros((2,)).bit_and(1))
        }),
        (
            "cross_entropy of [2, 3, 4] with labels [2, 3]: labels of shape [2, 4] are needed, for classes along axis 1",
            |t| {
                let options = CrossEntropy {
                    class_axis: Some(1),
                    ..CrossEntropy::default()
                };
                let labels = t.full(0.0, I32, (2, 3));
                ignore(t.zeros((2, 3, 4)).cross_entropy_with(labels, options))
            },
        ),
        (
            "cross_entropy of [2, 3]: class weights are f32 [2], not f32 [3]",
            |t| {
                let options = CrossEntropy {
                    weights: Some(t.ones((2,))),
                    ..CrossEntropy::default()
                };
                let labels = t.full(0.0, I32, (2,));
                ignore(t.zeros((2, 3)).cross_entropy_with(labels, options))
            },
        ),
        ("info_nce: 0 is not a temperature above 0", |t| {
            ignore(
                t.zeros((2, 3))
                    .info_nce(t.zeros((2, 3)), 0.0, Reduction::Mean),
            )
        }),
    ];
    for (message, build) in cases {
        assert_eq!(only_mistake(build), message);
    }
}

#[test]
fn ranges_have_the_lengths_of_pytorch() {
    let trace = Trace::inference();
    let length = |start, end, step| trace.range_f32(start, end, step).len(0);
    assert_eq!(length(0.0, 0.3, 0.1), Some(3));
    assert_eq!(length(0.0, 0.6, 0.2), Some(3));
    assert_eq!(length(1.0, 1.3, 0.1), Some(4));
    assert_eq!(length(0.0, 2.1, 0.7), Some(4));
    assert_eq!(length(1.0, 0.0, -0.25), Some(4));
    assert_eq!(length(1.0, 0.0, 0.25), Some(0));
}

#[test]
fn ctc_of_certain_and_of_no_steps() {
    let trace = Trace::inference();
    let x = trace.input("x", F32, (5, 1, 4));
    let labels = trace.input("labels", I32, (1, 3));
    let lengths = ["steps", "count"].map(|name| trace.input(name, I32, (1,)));
    let loss = |zero_infinity| {
        let options = Ctc {
            input_lengths: Some(lengths[0]),
            target_lengths: Some(lengths[1]),
            zero_infinity,
            reduction: Reduction::Sum,
            ..Ctc::default()
        };
        x.ctc(labels, options)
    };
    let losses = [loss(false), loss(true)];
    // The logarithms of a one-hot path 1, 2, 3, 3, 3.
    let path = [1, 2, 3, 3, 3]
        .iter()
        .flat_map(|&class| (0..4).map(move |c| if c == class { 0.0 } else { f64::NEG_INFINITY }));
    let path: Vec<f64> = path.collect();
    let of = |x: &[f64], steps: i32, labels: &[i32], count: i32| {
        let inputs = [
            array(&[5, 1, 4], x),
            integers(&[1, 3], labels),
            integers(&[1], &[steps]),
            integers(&[1], &[count]),
        ];
        let got = run(&trace, &losses, 0, &inputs);
        [got[0].values[0], got[1].values[0]]
    };
    assert_eq!(of(&path, 5, &[1, 2, 3], 3), [0.0, 0.0]);
    assert_eq!(of(&path, 2, &[1, 2, 0], 2), [0.0, 0.0]);
    assert_eq!(of(&path, 5, &[1, 3, 2], 3), [f64::INFINITY, 0.0]);
    assert_eq!(of(&path, 0, &[1, 2, 3], 0), [0.0, 0.0]);
    assert_eq!(of(&path, 0, &[1, 2, 3], 1), [f64::INFINITY, 0.0]);
    let nan = of(&[NAN; 20], 5, &[1, 2, 3], 3);
    assert!(nan.iter().all(|loss| loss.is_nan()), "{nan:?}");
}

#[test]
fn gradients_of_ctc_are_finite_beside_impossible_steps() {
    let trace = Trace::training();
    let x = trace.input("x", F32, (3, 1, 3));
    let labels = trace.input("labels", I32, (1, 2));
    let gradient = trace.gradients(x.ctc(labels, Ctc::default()), [x])[0];
    let half = 0.5f64.ln();
    let none = f64::NEG_INFINITY;
    let values = [none, half, half, none, half, half, none, half, half];
    let inputs = [array(&[3, 1, 3], &values), integers(&[1, 2], &[1, 2])];
    let got = run(&trace, &[gradient], 0, &inputs);
    // The paths 1, 1, 2 and 1, 2, 2 are equally likely; the mean is over two labels.
    let expected = [0.0, -0.5, 0.0, 0.0, -0.25, -0.25, 0.0, 0.0, -0.5];
    assert_close(&got[0].values, &expected, 1e-6);
}

#[test]
fn equal_scores_and_nan_are_ordered_as_by_topk() {
    let trace = Trace::inference();
    let scores = trace.input("scores", F32, (4, 3));
    let labels = trace.input("labels", I32, (4,));
    let outputs = [1, 2, 3].map(|k| scores.topk_accuracy(labels, k));
    let share = |scores: &[f64], labels: &[i32]| {
        let inputs = [array(&[4, 3], scores), integers(&[4], labels)];
        let got = run(&trace, &outputs, 4, &inputs);
        [0, 1, 2].map(|i| got[i].values[0])
    };
    assert_eq!(share(&[7.0; 12], &[0, 1, 2, 2]), [0.25, 0.5, 1.0]);
    assert_eq!(share(&[NAN; 12], &[0, 1, 2, 2]), [0.25, 0.5, 1.0]);
    let mixed = [1.0, NAN, 2.0, 1.0, NAN, 2.0, 1.0, NAN, 2.0, NAN, 1.0, NAN];
    assert_eq!(share(&mixed, &[0, 1, 2, 2]), [0.25, 0.75, 1.0]);
}

#[test]
fn a_small_variance_has_the_gradient_at_the_smallest_that_counts() {
    let trace = Trace::training();
    let inputs = ["x", "target", "variance"].map(|name| trace.input(name, F32, (3,)));
    let [x, target, variance] = inputs;
    let loss = x.gaussian_nll(target, variance, 0.5, Reduction::None);
    let gradient = trace.gradients(loss.sum(), [variance])[0];
    let arrays = [
        array(&[3], &[1.0, 1.0, 3.0]),
        array(&[3], &[1.0, 2.0, 1.0]),
        array(&[3], &[0.1, -4.0, 2.0]),
    ];
    let got = run(&trace, &[loss, gradient], 0, &arrays);
    // ½·(1/v − d²/v²) at v = 0.5, 0.5 and 2.
    assert_close(&got[1].values, &[1.0, -1.0, -0.25], 1e-6);
    let of = |v: f64, d: f64| ((v * std::f64::consts::TAU).ln() + d * d / v) * 0.5;
    assert_close(
        &got[0].values,
        &[of(0.5, 0.0), of(0.5, 1.0), of(2.0, 2.0)],
        1e-6,
    );
}

#[test]
fn divergence_is_0_where_the_target_is() {
    let trace = Trace::inference();
    let [x, target] = ["x", "target"].map(|name| trace.input(name, F32, (2,)));
    let loss = x.kl_divergence(target, Reduction::None);
    let arrays = [
        array(&[2], &[f64::NEG_INFINITY, 0.5f64.ln()]),
        array(&[2], &[0.0, 1.0]),
    ];
    let got = run(&trace, &[loss], 0, &arrays);
    assert_close(&got[0].values, &[0.0, 2f64.ln()], 1e-6);
}

#[test]
fn windows_and_widths_beyond_any_memory_are_mistakes() {
    let huge = PoolOptions::new(1usize << 40);
    let said = only_mistake(|t| ignore(t.zeros((1, 1, 4, 4)).lp_pool2d(2.0, huge)));
    assert!(said.contains("pool"), "{said}");
    let said = only_mistake(|t| ignore(t.arange(4).sinusoids(1 << 50, 1e4, RopeLayout::Halves)));
    assert_eq!(
        said,
        "sinusoids: a width of 1125899906842624 is more than 16777216"
    );
}
