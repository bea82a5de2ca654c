//! Single operations, losses and norms at special numbers (NaN, infinities, zeros, denormals,
//! bounds, ties, saturation, overflow) against PyTorch, values and gradients. Where this library
//! decides otherwise, `docs/numerics.md` says so, and the table at the end has its results.

use slabwise::nn::{BatchNorm1d, Module, RmsNorm};
use slabwise::prelude::*;

use super::Case;

const NAN: f32 = f32::NAN;
const INF: f32 = f32::INFINITY;
const MAX: f32 = 3.4e38;

type Build = for<'t> fn(&Scope, &[Tensor<'t>]) -> Tensor<'t>;

const CASES: &[(&str, Build)] = &[
    ("relu", |_, x| x[0].relu()),
    ("abs", |_, x| x[0].abs()),
    ("exp", |_, x| x[0].exp()),
    ("exp2", |_, x| x[0].exp2()),
    ("expm1", |_, x| x[0].expm1()),
    ("log1p", |_, x| x[0].log1p()),
    ("sqrt", |_, x| x[0].sqrt()),
    ("rsqrt", |_, x| x[0].rsqrt()),
    ("tanh", |_, x| x[0].tanh()),
    ("sigmoid", |_, x| x[0].sigmoid()),
    ("erf", |_, x| x[0].erf()),
    ("sin", |_, x| x[0].sin()),
    ("cos", |_, x| x[0].cos()),
    ("square", |_, x| x[0].square()),
    ("neg", |_, x| -x[0]),
    ("recip", |_, x| x[0].recip()),
    ("ln", |_, x| x[0].ln()),
    ("sign", |_, x| x[0].sign()),
    ("floor", |_, x| x[0].floor()),
    ("ceil", |_, x| x[0].ceil()),
    ("round", |_, x| x[0].round()),
    ("clamp", |_, x| x[0].clamp(-1.0, 1.0)),
    ("relu6", |_, x| x[0].apply(&slabwise::nn::Relu6)),
    ("gelu", |_, x| x[0].gelu()),
    ("gelu_tanh", |_, x| x[0].gelu_tanh()),
    ("silu", |_, x| x[0].silu()),
    ("softplus", |_, x| x[0].softplus()),
    ("plus_zero", |_, x| x[0] + 0.0),
    ("pow_0", |_, x| x[0].pow(0.0)),
    ("pow_half", |_, x| x[0].pow(0.5)),
    ("pow_1", |_, x| x[0].pow(1.0)),
    ("pow_2", |_, x| x[0].pow(2.0)),
    ("pow_3", |_, x| x[0].pow(3.0)),
    ("pow_minus_1", |_, x| x[0].pow(-1.0)),
    ("maximum", |_, x| x[0].maximum(x[1])),
    ("minimum", |_, x| x[0].minimum(x[1])),
    ("add", |_, x| x[0] + x[1]),
    ("sub", |_, x| x[0] - x[1]),
    ("mul", |_, x| x[0] * x[1]),
    ("div", |_, x| x[0] / x[1]),
    ("pow", |_, x| x[0].pow(x[1])),
    ("maximum_of_same", |_, x| x[0].maximum(x[0])),
    ("select", |_, x| x[0].gt(0.0).select(x[0] * x[1], x[1])),
    ("lt", |_, x| x[0].lt(x[1]).cast(F32)),
    ("le", |_, x| x[0].le(x[1]).cast(F32)),
    ("gt", |_, x| x[0].gt(x[1]).cast(F32)),
    ("ge", |_, x| x[0].ge(x[1]).cast(F32)),
    ("eq", |_, x| x[0].equal(x[1]).cast(F32)),
    ("ne", |_, x| x[0].not_equal(x[1]).cast(F32)),
    ("mse", |_, x| x[0].mse(x[1])),
    ("huber", |_, x| x[0].huber(x[1], 0.5)),
    ("bce", |_, x| x[0].binary_cross_entropy(x[1])),
    ("bce_with_logits", |_, x| {
        x[0].binary_cross_entropy_with_logits(x[1])
    }),
    ("sum", |_, x| x[0].sum()),
    ("mean", |_, x| x[0].mean()),
    ("prod", |_, x| x[0].prod()),
    ("max", |_, x| x[0].max()),
    ("min", |_, x| x[0].min()),
    ("cumsum", |_, x| x[0].cumsum(0)),
    ("softmax", |_, x| x[0].softmax(0)),
    ("log_softmax", |_, x| x[0].log_softmax(0)),
    ("logsumexp", |_, x| x[0].logsumexp(0)),
    ("cross_entropy", |_, x| {
        x[0].unsqueeze(0)
            .cross_entropy(x[0].trace().full(1.0, I32, (1,)))
    }),
    ("layer_norm", |_, x| x[0].normalize(0, 1e-5)),
    ("rms_norm", |at, x| {
        x[0].apply(&RmsNorm::new(at / "norm", 4))
    }),
    ("group_norm", |_, x| {
        x[0].reshape((1, 2, 2)).group_normalize(1, 1e-5).flatten(0)
    }),
    ("batch_norm", |at, x| {
        BatchNorm1d::new(at / "norm", 1)
            .forward(x[0].unsqueeze(1))
            .flatten(0)
    }),
];

/// Case, tensor, arguments (one list each), and the result of this library.
type Difference = (
    &'static str,
    &'static str,
    &'static [&'static [f32]],
    &'static [f32],
);

/// The differences of this library from PyTorch.
#[rustfmt::skip]
const OTHERWISE: &[Difference] = &[
    // NaN has no sign.
    ("sign", "value", &[&[NAN]], &[NAN]),
    ("abs", "d0", &[&[NAN]], &[NAN]),
    // NaN passes through, as through relu6.
    ("clamp", "d0", &[&[NAN]], &[1.0]),
    // The slopes far out, also where the cube of x or its product with 0 is no number.
    ("gelu", "d0", &[&[-INF]], &[0.0]),
    ("gelu", "d0", &[&[INF]], &[1.0]),
    ("gelu_tanh", "d0", &[&[-INF]], &[0.0]),
    ("gelu_tanh", "d0", &[&[-3.4e38]], &[0.0]),
    ("gelu_tanh", "d0", &[&[3.4e38]], &[1.0]),
    ("gelu_tanh", "d0", &[&[INF]], &[1.0]),
    // The slope at a pole has the sign of the zero.
    ("rsqrt", "d0", &[&[-0.0]], &[-INF]),
    // IEEE 754's pow, which is not its square root.
    ("pow_half", "value", &[&[-INF]], &[INF]),
    ("pow_half", "d0", &[&[-INF]], &[0.0]),
    ("pow_half", "d0", &[&[-0.0]], &[INF]),
    // The limits.
    ("bce_with_logits", "value", &[&[-INF], &[0.25]], &[INF]),
    ("bce_with_logits", "value", &[&[-INF], &[1.0]], &[INF]),
    // The softmax of the elements: PyTorch subtracts in another order.
    ("logsumexp", "d0", &[&[MAX, MAX, MAX, MAX]], &[0.25; 4]),
    ("logsumexp", "d0", &[&[1e20, -1e20, 1e20, -1e20]], &[0.5, 0.0, 0.5, 0.0]),
    ("logsumexp", "d0", &[&[1e7, 10_000_001.0, 10_000_002.0, 10_000_003.0]], &[0.032_058_6, 0.087_144_315, 0.236_882_8, 0.643_914_2]),
    ("logsumexp", "d0", &[&[1e4, 1e4, -1e4, 0.0]], &[0.5, 0.5, 0.0, 0.0]),
    // A product of pairs, in another order; the gradient separates zeros, and the rest is not
    // finite.
    ("prod", "d0", &[&[MAX, -MAX, 0.0, 0.0]], &[NAN; 4]),
    ("prod", "d0", &[&[NAN, 1.0, 0.0, 2.0]], &[NAN; 4]),
    // Variances that overflow are NaN everywhere.
    ("layer_norm", "value", &[&[1e20, -1e20, 1e20, -1e20]], &[NAN; 4]),
    ("layer_norm", "d0", &[&[1e20, -1e20, 1e20, -1e20]], &[NAN; 4]),
    ("rms_norm", "value", &[&[INF, 1.0, 2.0, 3.0]], &[NAN; 4]),
    ("rms_norm", "value", &[&[-INF, 1.0, 2.0, 3.0]], &[NAN; 4]),
    ("rms_norm", "value", &[&[INF, -INF, 0.0, 1.0]], &[NAN; 4]),
    ("rms_norm", "value", &[&[MAX, MAX, MAX, MAX]], &[NAN; 4]),
    ("rms_norm", "value", &[&[MAX, -MAX, 0.0, 0.0]], &[NAN; 4]),
    ("rms_norm", "value", &[&[1e20, -1e20, 1e20, -1e20]], &[NAN; 4]),
    ("rms_norm", "d0", &[&[1e20, -1e20, 1e20, -1e20]], &[NAN; 4]),
    ("group_norm", "value", &[&[1e20, -1e20, 1e20, -1e20]], &[NAN; 4]),
    ("group_norm", "d0", &[&[1e20, -1e20, 1e20, -1e20]], &[NAN; 4]),
    ("batch_norm", "value", &[&[MAX, -MAX, 0.0, 0.0]], &[NAN; 4]),
    ("batch_norm", "d0", &[&[MAX, -MAX, 0.0, 0.0]], &[NAN; 4]),
    ("batch_norm", "value", &[&[1e20, -1e20, 1e20, -1e20]], &[NAN; 4]),
    ("batch_norm", "d0", &[&[1e20, -1e20, 1e20, -1e20]], &[NAN; 4]),
    // Equal numbers have no variance, however large; ±1.34 and ±0.45 are the normalized last row.
    ("batch_norm", "value", &[&[MAX, MAX, MAX, MAX]], &[0.0; 4]),
    ("batch_norm", "d0", &[&[MAX, MAX, MAX, MAX]], &[-474.341_67, -158.113_89, 158.113_89, 474.341_67]),
    ("layer_norm", "value", &[TEN_MILLIONS], EXACT),
    ("layer_norm", "d0", &[TEN_MILLIONS], &[0.0; 4]),
    ("group_norm", "value", &[TEN_MILLIONS], EXACT),
    ("group_norm", "d0", &[TEN_MILLIONS], &[0.0; 4]),
    ("batch_norm", "value", &[TEN_MILLIONS], EXACT),
    ("batch_norm", "d0", &[TEN_MILLIONS], &[0.0; 4]),
];

const TEN_MILLIONS: &[f32] = &[1e7, 10_000_001.0, 10_000_002.0, 10_000_003.0];
const EXACT: &[f32] = &[-1.341_635_5, -0.447_211_83, 0.447_211_83, 1.341_635_5];

/// Whether two numbers are the same but for rounding: a few hundred units in the last place,
/// because gradients of norms cancel.
fn close(a: f32, b: f32) -> bool {
    a == b || (a.is_nan() && b.is_nan()) || b.is_finite() && (a - b).abs() <= 2e-5 * (1.0 + b.abs())
}

fn same_bits(a: &[f32], b: &[f32]) -> bool {
    a.len() == b.len()
        && a.iter()
            .zip(b)
            .all(|(a, b)| a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan()))
}

#[test]
fn special_numbers_are_as_in_pytorch() {
    let file = slabwise::weights::File::open(format!(
        "{}/tests/data/torch/points.safetensors",
        env!("CARGO_MANIFEST_DIR")
    ));
    let recorded = Case {
        name: "points",
        file: file.expect("recorded"),
    };
    let (mut wrong, mut used) = (Vec::new(), vec![false; OTHERWISE.len()]);
    for (name, build) in CASES {
        let tensors = |kind: &str| -> Vec<ndarray::ArrayD<f32>> {
            (0..2)
                .map(|i| format!("{name}/{kind}{i}"))
                .filter(|n| recorded.file.get(n).is_some())
                .map(|n| recorded.floats(&n))
                .collect()
        };
        let (arguments, slopes, values) = (
            tensors("x"),
            tensors("d"),
            recorded.floats(&format!("{name}/value")),
        );
        let params = Params::seeded(0);
        let trace = Trace::training();
        let names = ["x0", "x1"];
        let xs: Vec<Tensor<'_>> = arguments
            .iter()
            .zip(names)
            .map(|(a, name)| trace.input(name, F32, (a.shape()[1],)))
            .collect();
        let value = build(&params.root(), &xs).reshape([-1i64]);
        let weights = trace.arange(values.shape()[1]).cast(F32) + 1.0;
        let of = if xs.len() == 1 {
            [xs[0], xs[0]]
        } else {
            [xs[0], xs[1]]
        };
        let gradients = trace.gradients((value * weights).sum(), of);
        let mut session = Session::new(Device::Cpu, params)
            .expect("a session")
            .with_threads(1);
        let program = session
            .compile(&trace, [value, gradients[0], gradients[1]])
            .unwrap_or_else(|e| panic!("{name}: {e}"));
        for row in 0..values.shape()[0] {
            let args: Vec<_> = arguments
                .iter()
                .map(|a| a.index_axis(ndarray::Axis(0), row).to_owned())
                .collect();
            let run = if let [x] = &args[..] {
                session.run(&program, (x,))
            } else {
                session.run(&program, (&args[0], &args[1]))
            };
            let outputs = run
                .unwrap_or_else(|e| panic!("{name}: {e}"))
                .map(|y| y.array::<f32>().expect("f32"));
            let expected = std::iter::once(&values).chain(&slopes);
            for (k, (got, expected)) in outputs.iter().zip(expected).enumerate() {
                let (got, expected) = (
                    got.as_slice().expect("contiguous"),
                    expected.index_axis(ndarray::Axis(0), row).to_owned(),
                );
                let expected = expected.as_slice().expect("contiguous");
                let part = ["value", "d0", "d1"][k];
                let args: Vec<&[f32]> = args
                    .iter()
                    .map(|a| a.as_slice().expect("contiguous"))
                    .collect();
                let at = OTHERWISE.iter().position(|(n, p, a, _)| {
                    n == name
                        && *p == part
                        && a.len() == args.len()
                        && a.iter().zip(&args).all(|(a, b)| same_bits(a, b))
                });
                let wanted = at.map_or(expected, |at| OTHERWISE[at].3);
                // The sign of zero is compared only where the sign is the result.
                let signs = *name != "plus_zero" || same_bits(got, wanted);
                let agrees = |wanted: &[f32]| got.iter().zip(wanted).all(|(g, w)| close(*g, *w));
                if !agrees(wanted) || !signs {
                    wrong.push(format!(
                        "(\"{name}\", \"{part}\", &{args:?}, &{got:?}), // {expected:?}"
                    ));
                }
                if let Some(at) = at {
                    assert!(
                        !agrees(expected),
                        "{name} {part} of {args:?} is as in PyTorch"
                    );
                    used[at] = true;
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    let unused: Vec<_> = OTHERWISE
        .iter()
        .zip(used)
        .filter(|(_, used)| !used)
        .map(|(o, _)| o)
        .collect();
    assert!(unused.is_empty(), "never met, or as in PyTorch: {unused:?}");
}
