//! Running sums, largest elements, einsum and losses.

use super::*;
use crate::shape::Dim;
use crate::tensor::Running;
use slabwise_kernels::dtype::DType::{F32, I32};

#[test]
fn running_sums() {
    let trace = Trace::inference();
    let (x, n) = (trace.input("x", F32, (2, 5)), trace.input("n", I32, (3,)));
    let outputs = [x.cumsum(1), x.cumsum(0), n.cumsum(0)];
    let values: Vec<f64> = (1..=10).map(f64::from).collect();
    let got = run(
        &trace,
        &outputs,
        1,
        &[array(&[2, 5], &values), integers(&[3], &[4, -1, 7])],
    );
    assert_eq!(
        got[0].values,
        [1.0, 3.0, 6.0, 10.0, 15.0, 6.0, 13.0, 21.0, 30.0, 40.0]
    );
    assert_eq!(
        got[1].values,
        [1.0, 2.0, 3.0, 4.0, 5.0, 7.0, 9.0, 11.0, 13.0, 15.0]
    );
    assert_eq!(got[2].values, [4.0, 3.0, 10.0]);
}

/// An infinite first element is no factor of the state before it, which is none.
#[test]
fn running_products_of_infinities() {
    let trace = Trace::inference();
    let x = trace.input("x", F32, (2, 3));
    let back = Running {
        exclusive: false,
        reverse: true,
    };
    let outputs = [x.cumprod(1), x.cumprod_by(1, back)];
    let inf = f64::INFINITY;
    let given = array(&[2, 3], &[inf, 2.0, -1.0, 3.0, 0.5, -inf]);
    let got = run(&trace, &outputs, 1, &[given]);
    assert_eq!(got[0].values, [inf, inf, -inf, 3.0, 1.5, -inf]);
    assert_eq!(got[1].values, [-inf, -2.0, -1.0, -inf, -inf, -inf]);
}

#[test]
fn largest_elements() {
    let trace = Trace::inference();
    let x = trace.input("x", F32, (2, 5));
    let (values, positions) = x.topk(4, 1);
    let low = f64::NEG_INFINITY;
    let rows = [3.0, 7.0, 3.0, -1.0, 7.0, low, f64::NAN, low, 2.0, f64::NAN];
    let got = run(&trace, &[values, positions], 1, &[array(&[2, 5], &rows)]);
    assert_close(
        &got[0].values,
        &[7.0, 7.0, 3.0, 3.0, f64::NAN, f64::NAN, 2.0, low],
        0.0,
    );
    assert_eq!(got[1].values, [1.0, 4.0, 0.0, 2.0, 1.0, 4.0, 3.0, 0.0]);

    let trace = Trace::inference();
    let x = trace.input("x", F32, (3, 2));
    let (values, positions) = x.topk(2, 0);
    let got = run(
        &trace,
        &[values, positions],
        1,
        &[array(&[3, 2], &[1.0, 6.0, 2.0, 5.0, 3.0, 4.0])],
    );
    assert_eq!(
        (&got[0].values[..], &got[1].values[..]),
        (&[3.0, 6.0, 2.0, 5.0][..], &[2.0, 0.0, 1.0, 1.0][..])
    );
}

#[test]
fn sums_of_products() {
    let trace = Trace::inference();
    let (a, b, v) = (
        trace.input("a", F32, (2, 3)),
        trace.input("b", F32, (2, 3)),
        trace.input("v", F32, (3,)),
    );
    let outputs = [
        trace.einsum("ij,kj->ik", &[a, b]),
        trace.einsum("ij,ij->j", &[a, b]),
        trace.einsum("ij->ji", &[a]),
        trace.einsum("ij,j", &[a, v]),
        trace.einsum("ij,kj,j->ki", &[a, b, v]),
        trace.einsum("ij,k j , j -> ", &[a, b, v]),
    ];
    let (x, y, z) = (
        [1.0, 2.0, 3.0, 4.0, 5.0, 6.0],
        [1.0, 0.0, -1.0, 2.0, 1.0, 0.5],
        [1.0, 10.0, 100.0],
    );
    let got = run(
        &trace,
        &outputs,
        1,
        &[array(&[2, 3], &x), array(&[2, 3], &y), array(&[3], &z)],
    );
    let (at, bt) = (
        |i: usize, j: usize| x[3 * i + j],
        |i: usize, j: usize| y[3 * i + j],
    );
    let each =
        |f: &dyn Fn(usize, usize) -> f64| (0..4).map(|n| f(n / 2, n % 2)).collect::<Vec<f64>>();
    let sum = |f: &dyn Fn(usize) -> f64| (0..3).map(f).sum::<f64>();
    assert_close(
        &got[0].values,
        &each(&|i, k| sum(&|j| at(i, j) * bt(k, j))),
        1e-6,
    );
    assert_close(
        &got[1].values,
        &(0..3)
            .map(|j| at(0, j) * bt(0, j) + at(1, j) * bt(1, j))
            .collect::<Vec<f64>>(),
        1e-6,
    );
    assert_eq!(
        (&got[2].dims[..], &got[2].values[..]),
        (&[3, 2][..], &[1.0, 4.0, 2.0, 5.0, 3.0, 6.0][..])
    );
    assert_close(&got[3].values, &[321.0, 654.0], 1e-6);
    assert_close(
        &got[4].values,
        &each(&|k, i| sum(&|j| at(i, j) * bt(k, j) * z[j])),
        1e-6,
    );
    assert_close(
        &got[5].values,
        &[each(&|k, i| sum(&|j| at(i, j) * bt(k, j) * z[j]))
            .iter()
            .sum()],
        1e-6,
    );
}

#[test]
fn more_losses() {
    let trace = Trace::inference();
    let (x, t) = (trace.input("x", F32, (4,)), trace.input("t", F32, (4,)));
    let labels = trace.input("labels", I32, (1,));
    let logits = x.reshape((1, 4));
    let outputs = [
        x.binary_cross_entropy_with_logits(t),
        x.sigmoid().binary_cross_entropy(t),
        x.huber(t, 1.5),
        logits.cross_entropy_smoothed(labels, 0.2),
        trace.zeros((4,)).binary_cross_entropy(t),
    ];
    let (xs, ts) = ([-3.0, 0.0, 0.5, 4.0f64], [0.0, 1.0, 0.25, 1.0]);
    let got = run(
        &trace,
        &outputs,
        1,
        &[array(&[4], &xs), array(&[4], &ts), integers(&[1], &[2])],
    );
    let mean =
        |f: &dyn Fn(f64, f64) -> f64| xs.iter().zip(ts).map(|(&x, t)| f(x, t)).sum::<f64>() / 4.0;
    let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
    let cross = mean(&|x, t| -(t * sigmoid(x).ln() + (1.0 - t) * (1.0 - sigmoid(x)).ln()));
    let huber = mean(&|x, t| {
        if (x - t).abs() <= 1.5 {
            (x - t).powi(2) / 2.0
        } else {
            1.5 * ((x - t).abs() - 0.75)
        }
    });
    let all = xs.iter().map(|x| x.exp()).sum::<f64>().ln();
    let smoothed = xs
        .iter()
        .enumerate()
        .map(|(i, x)| (all - x) * if i == 2 { 0.85 } else { 0.05 })
        .sum::<f64>();
    for (got, expected) in got.iter().zip([cross, cross, huber, smoothed]) {
        assert_close(&got.values, &[expected], 1e-6);
    }
    // Targets of 0 and 1 with impossible probabilities give a finite loss.
    assert!(got[4].values[0].is_finite() && got[4].values[0] > 40.0);
}

#[test]
fn their_mistakes() {
    let trace = Trace::inference();
    let (x, n) = (
        trace.input("x", F32, (Dim::bounded("batch", 8), 3)),
        trace.input("n", I32, (3,)),
    );
    let _ = (
        x.cast(DType::F16).cumsum(0),
        x.cumsum(2),
        x.topk(4, 1),
        x.topk(1, 0),
        n.gt(0).topk(1, 0),
        x.huber(0.0, 0.0),
    );
    for (equation, operands) in [
        ("ij,jk", &[x][..]),
        ("ijk", &[x]),
        ("ij,kj->ii", &[x, x]),
        ("ij->k", &[x]),
        ("i1", &[x]),
        ("ij,ji->", &[x, x]),
        ("ii", &[x]),
        ("i.j", &[x]),
        ("...i...", &[x]),
        ("ij->...", &[x]),
        ("n", &[n]),
    ] {
        trace.einsum(equation, operands);
    }
    let labels = trace.input("labels", I32, (Dim::bounded("batch", 8),));
    x.cross_entropy_smoothed(labels, 1.5);
    let said: Vec<String> = trace
        .finish(&[])
        .expect_err("mistakes")
        .into_iter()
        .map(|m| m.message)
        .collect();
    let expected = [
        "cumsum does not take f16; convert with cast",
        "cumsum: [batch, 3] has no axis 2",
        "topk: axis 1 of [batch, 3] does not have 4 elements at every length",
        "topk: axis 0 of [batch, 3] does not have 1 elements at every length",
        "topk does not take bool; convert with cast",
        "huber: the loss cannot become a line at 0",
        "einsum \"ij,jk\": 2 operands are named, 1 given",
        "einsum \"ijk\": operand 0 is [batch, 3] and has 3 letters",
        "einsum \"ij,kj->ii\": i occurs twice in \"ii\"",
        "einsum \"ij->k\": k is in no operand",
        "einsum \"i1\": '1' is not a letter",
        "einsum \"ij,ji->\": j is 3 and batch",
        "einsum \"ii\": i is batch and 3",
        "einsum \"i.j\": '.' is not a letter",
        "einsum \"...i...\": ... occurs twice in \"...i...\"",
        "einsum \"ij->...\": ... is in no operand",
        "einsum \"n\": operand 0 is i32, not f32",
        "cross_entropy: a share of 1.5 cannot be spread",
    ];
    assert_eq!(said, expected);
}
