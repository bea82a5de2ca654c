//! Adaptive pooling against its definition.

use ndarray::ArrayD;
use slabwise::Output;
use slabwise::nn::{AdaptiveAvgPool1d, AdaptiveAvgPool2d, AdaptiveMaxPool1d, AdaptiveMaxPool2d};
use slabwise::prelude::*;

const IMAGES: [usize; 2] = [2, 3];

fn image([h, w]: [usize; 2]) -> ArrayD<f32> {
    let [n, channels] = IMAGES;
    let mut next = 0usize;
    let mut x = ArrayD::from_shape_simple_fn(vec![n, channels, h, w], || {
        next = (next + 7919) % 2003;
        next as f32 / 1001.0 - 1.0
    });
    // A window without it is finite, in whichever way windows are computed.
    x[[1, 2, h - 1, w - 1]] = f32::INFINITY;
    x
}

/// Windows as PyTorch defines them: i covers the elements ⌊i·n/count⌋ to ⌈(i + 1)·n/count⌉.
fn window(i: usize, n: usize, count: usize) -> std::ops::Range<usize> {
    i * n / count..((i + 1) * n).div_ceil(count)
}

fn expected(x: &ArrayD<f32>, size: [usize; 2], largest: bool) -> ArrayD<f32> {
    let ([n, channels], [h, w]) = (IMAGES, [x.shape()[2], x.shape()[3]]);
    let at = |i: ndarray::IxDyn| {
        let (rows, columns) = (window(i[2], h, size[0]), window(i[3], w, size[1]));
        let of = x.slice(ndarray::s![i[0], i[1], rows, columns]);
        match largest {
            true => of.iter().copied().fold(f32::NEG_INFINITY, f32::max),
            false => of.sum() / of.len() as f32,
        }
    };
    ArrayD::from_shape_fn(vec![n, channels, size[0], size[1]], at)
}

#[track_caller]
fn assert_near(got: &Output<'_>, expected: &ArrayD<f32>, of: &str) {
    let got = got.view::<f32>().expect("f32");
    assert_eq!(got.shape(), expected.shape(), "{of}");
    for (got, expected) in got.iter().zip(expected) {
        let near = got == expected || (got - expected).abs() < 1e-6;
        assert!(near, "{got} instead of {expected}: {of}");
    }
}

#[test]
fn adaptive_pools_have_any_size() {
    let [n, channels] = IMAGES;
    for lengths in [[1, 1], [2, 3], [5, 4], [7, 1], [3, 11]] {
        let x = image(lengths);
        let sizes = [0, 1, 2, 3, 4, 5, 6, 7, 8, 12, 13];
        for (i, &rows) in sizes.iter().enumerate() {
            for columns in [rows, sizes[(i + 3) % sizes.len()]] {
                let (size, [h, w]) = ([rows, columns], lengths);
                let trace = Trace::inference();
                let image = trace.input("x", F32, (n, channels, h, w));
                let first = image.slice(2, ..1).squeeze(2);
                let pools = [
                    image.apply(&AdaptiveAvgPool2d(size)),
                    image.apply(&AdaptiveMaxPool2d(size)),
                    first.apply(&AdaptiveAvgPool1d(columns)).unsqueeze(2),
                    first.apply(&AdaptiveMaxPool1d(columns)).unsqueeze(2),
                ];
                let mut session = Session::new(Device::Cpu, Params::seeded(0)).expect("a session");
                let program = session.compile(&trace, pools).expect("it compiles");
                let results = session.run(&program, (&x,)).expect("a run");
                let first = x.slice_axis(ndarray::Axis(2), (0..1).into()).to_owned();
                for (at, result) in results.iter().enumerate() {
                    let (x, size) = match at {
                        0 | 1 => (&x, size),
                        _ => (&first, [1, columns]),
                    };
                    let of = format!("{:?} to {size:?}, pool {at}", x.shape());
                    assert_near(result, &expected(x, size, at % 2 == 1), &of);
                }
            }
        }
    }
}

#[test]
fn windows_without_positions_are_refused() {
    let said = |size: [usize; 2], w: usize| {
        let trace = Trace::inference();
        let _ = trace
            .input("x", F32, (1, 1, 1, w))
            .adaptive_max_pool2d(size);
        trace
            .mistakes()
            .iter()
            .map(ToString::to_string)
            .collect::<Vec<_>>()
            .join("\n")
    };
    assert_eq!(said([1, 40_001], 40_000), "");
    let error = said([1, 80_001], 80_000);
    let expected = "axis 3 of 80000 elements can have 26843 windows at most";
    assert!(
        error.contains(expected) && error.contains("pools.rs:"),
        "{error}"
    );
}
