//! Axes counted from the last one.

use super::{Tensor, finished};
use crate::shape::Dim;
use crate::tensor::{AxisIndex, Running, Scatter};
use crate::trace::Trace;
use slabwise_kernels::dtype::DType::{F32, I32};

/// An operation along an axis of a tensor `[4, 4, 4]`, given as a number of either sign.
type Build = for<'t> fn(Tensor<'t>, isize) -> Tensor<'t>;

const ALONG_AN_AXIS: [(&str, Build); 54] = [
    ("argmax_last", |x, a| x.argmax_last(a)),
    ("argmin_last", |x, a| x.argmin_last(a)),
    ("argsort_along", |x, a| x.argsort_along(a, true)),
    ("assign_slice", |x, a| x.slice_assign(a, 1..3, 0.0)),
    ("bottomk", |x, a| x.bottomk(2, a).0),
    ("categorical", |x, a| x.trace().categorical(x, a)),
    ("choices", |x, a| x.trace().choices(x, 2, a)),
    ("chunk", |x, a| x.chunk(a, 2)[1]),
    ("concat", |x, a| x.trace().concat(&[x, x], a)),
    ("cosine_similarity", |x, a| x.cosine_similarity(x, a, 1e-6)),
    ("cummax", |x, a| x.cummax(a).0),
    ("cummin", |x, a| x.cummin(a).1),
    ("cumprod", |x, a| x.cumprod(a)),
    ("cumprod_by", |x, a| x.cumprod_by(a, Running::default())),
    ("cumsum", |x, a| x.cumsum(a)),
    ("cumsum_by", |x, a| x.cumsum_by(a, Running::default())),
    ("dim", |x, a| x.sum().expand((x.dim(a), 2))),
    ("flatten", |x, a| x.flatten(a)),
    ("flip", |x, a| x.flip(a)),
    ("gather", |x, a| x.gather(a, index(x))),
    ("geglu", |x, a| x.geglu(a)),
    ("glu", |x, a| x.glu(a)),
    ("index_add", |x, a| x.index_add(a, places(x), x)),
    ("index_select", |x, a| x.index_select(a, places(x))),
    ("l2_normalize", |x, a| x.l2_normalize(a, 1e-6)),
    ("len", |x, a| x * x.len(a).unwrap_or(0) as f32),
    ("linear_recurrence", |x, a| {
        x.linear_recurrence(x, a, Running::default())
    }),
    ("log_softmax", |x, a| x.log_softmax(a)),
    ("logcumsumexp", |x, a| x.logcumsumexp(a)),
    ("logsumexp", |x, a| x.logsumexp(a)),
    ("max_keep", |x, a| x.max_keep(a)),
    ("mean_over", |x, a| x.mean_over(&[a][..])),
    ("movedim", |x, a| x.movedim(a, -2) + x.movedim(1, a)),
    ("narrow", |x, a| x.narrow(a, 1, 2)),
    ("normalize", |x, a| x.normalize([a], 1e-6)),
    ("pad_to", |x, a| x.pad_to(a, 6, 0.0)),
    ("repeat_interleave", |x, a| x.repeat_interleave(a, 2)),
    ("roll", |x, a| x.roll(a, 1)),
    ("scatter", |x, a| x.scatter(a, index(x), x, Scatter::Add)),
    ("slice", |x, a| x.slice(a, 1..3)),
    ("slice_clamped", |x, a| {
        x.slice_clamped(a, places(x).sum(), 2)
    }),
    ("slice_from", |x, a| x.slice_from(a, places(x).max(), 1)),
    ("slice_step", |x, a| x.slice_step(a, .., 2)),
    ("softmax", |x, a| x.softmax(a)),
    ("softmax_at", |x, a| x.softmax_at(a, 2.0)),
    ("softmin", |x, a| x.softmin(a)),
    ("sort_along", |x, a| x.sort_along(a, false)),
    ("split", |x, a| x.split(a, 2)[1]),
    ("split_lengths", |x, a| x.split_lengths(a, [1, 3])[1]),
    ("sum_over", |x, a| x.sum_over(vec![a])),
    ("topk", |x, a| x.topk(2, a).1),
    ("transpose", |x, a| x.transpose(a, 0) + x.transpose(-1, a)),
    ("unbind", |x, a| *x.unbind(a).last().unwrap_or(&x)),
    ("unflatten", |x, a| x.unflatten(a, (2, 2))),
];

/// Places in any axis of a tensor of its shape.
fn index(x: Tensor<'_>) -> Tensor<'_> {
    x.trace().zeros(x.shape()).cast(I32)
}

fn places(x: Tensor<'_>) -> Tensor<'_> {
    x.trace().arange(4).cast(I32)
}

fn graph(build: impl for<'t> Fn(Tensor<'t>) -> Tensor<'t>) -> String {
    let trace = Trace::inference();
    let y = build(trace.input("x", F32, (4, 4, 4)));
    finished(&trace, &[y]).in_full()
}

#[test]
fn axes_also_count_from_the_last_one() {
    for (name, build) in ALONG_AN_AXIS {
        for axis in 0..3 {
            let (from_first, from_last) =
                (graph(|x| build(x, axis)), graph(|x| build(x, axis - 3)));
            assert_eq!(from_first, from_last, "{name} along axis {axis}");
        }
    }
    // A new axis may be the last.
    for axis in 0..4 {
        assert_eq!(
            graph(|x| x.unsqueeze(axis).squeeze(axis).unsqueeze(axis)),
            graph(|x| {
                let wide = x.unsqueeze(axis - 4);
                wide.squeeze(axis - 4).unsqueeze(axis - 4)
            })
        );
        assert_eq!(
            graph(|x| x.trace().stack(&[x, x], axis)),
            graph(|x| x.trace().stack(&[x, x], axis - 4))
        );
    }
    assert_eq!(
        graph(|x| x.permute([2, 0, 1])),
        graph(|x| x.permute([-1, 0, -2]))
    );
}

/// An axis that does not exist is named as the user has named it.
#[test]
fn axes_before_the_first_are_mistakes() {
    let message = |build: Build| {
        let trace = Trace::inference();
        let y = build(trace.input("x", F32, (4, 4, 4)), -4);
        let mistakes = trace.finish(&[y]).expect_err("no such axis");
        mistakes[0].message.clone()
    };
    let of_lengths = ["dim", "len"];
    let others: Vec<(&str, String)> = ALONG_AN_AXIS
        .into_iter()
        .filter(|(name, _)| !of_lengths.contains(name))
        .map(|(name, build)| (name, message(build)))
        .filter(|(_, message)| !message.contains("[4, 4, 4] has no axis -4"))
        .collect();
    assert_eq!(others, []);
    let trace = Trace::inference();
    let x = trace.input("x", F32, (Dim::bounded("n", 8), 3));
    let _ = (x.permute([0, -3]), x.unsqueeze(-4), x.sum_over([0, -2]));
    let mistakes = trace.finish(&[]).expect_err("three mistakes");
    let messages: Vec<&str> = mistakes.iter().map(|m| m.message.as_str()).collect();
    assert_eq!(
        messages,
        [
            "permute: [n, 3] has no axis -3",
            "unsqueeze: [n, 3] has no axis -4",
            "sum: axis 0 is named twice",
        ]
    );
    assert_eq!(AxisIndex::index(isize::MIN, 2).cast_signed(), isize::MIN);
    assert_eq!(
        AxisIndex::index(i32::MIN, 2).cast_signed(),
        i32::MIN as isize
    );
}
