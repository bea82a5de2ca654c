//! Values and shapes.

use super::*;
use crate::ops::{ConvGeometry, Op};
use crate::shape::Dim;
use slabwise_kernels::dtype::DType::{Bool, F32, I32, U8};
use slabwise_kernels::spec::Window;

const INF: f64 = f64::INFINITY;

/// `f` of a vector input and the gradient of its sum.
fn value_and_slope(xs: &[f64], f: impl for<'t> Fn(Tensor<'t>) -> Tensor<'t>) -> [Vec<f64>; 2] {
    let trace = Trace::inference();
    let x = trace.input("x", F32, (xs.len(),));
    let y = f(x);
    let [slope] = trace.gradients(y.sum(), [x]);
    let out = run(&trace, &[y, slope], 1, &[array(&[xs.len()], xs)]);
    [out[0].values.clone(), out[1].values.clone()]
}

#[test]
fn activations_and_their_slopes() {
    let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
    let xs = [-100.0, -20.5, -3.0, -0.5, 0.0, 0.25, 1.0, 19.5, 20.5, 100.0];
    let map = |f: &dyn Fn(f64) -> f64| xs.map(f).to_vec();

    let [y, dy] = value_and_slope(&xs, |x| x.softplus());
    assert_close(
        &y,
        &map(&|x: f64| if x > 30.0 { x } else { x.exp().ln_1p() }),
        2e-7,
    );
    assert_close(&dy, &map(&sigmoid), 2e-7);

    let [y, dy] = value_and_slope(&xs, |x| x.silu());
    assert_close(&y, &map(&|x| x * sigmoid(x)), 2e-7);
    assert_close(
        &dy,
        &map(&|x| sigmoid(x) * (1.0 + x * (1.0 - sigmoid(x)))),
        1e-6,
    );

    let [y, dy] = value_and_slope(&xs, |x| x.gelu_tanh());
    let inner = |x: f64| (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3));
    assert_close(&y, &map(&|x| 0.5 * x * (1.0 + inner(x).tanh())), 1e-6);
    let inner_slope = |x: f64| (2.0 / std::f64::consts::PI).sqrt() * (1.0 + 3.0 * 0.044715 * x * x);
    assert_close(
        &dy,
        &map(&|x| {
            0.5 * (1.0 + inner(x).tanh())
                + 0.5 * x * (1.0 - inner(x).tanh().powi(2)) * inner_slope(x)
        }),
        1e-5,
    );

    // Φ(1) = 0.841344746…, the normal distribution's table.
    let [y, dy] = value_and_slope(&[1.0, -1.0, 0.0], |x| x.gelu());
    assert_close(&y, &[0.841_344_746, -0.158_655_254, 0.0], 2e-7);
    assert_close(&dy, &[1.083_315_471, -0.083_315_471, 0.5], 3e-7);

    let [y, dy] = value_and_slope(&[-2.0, 0.5, 7.0, f64::NAN], |x| x.clamp(-1.0, 1.0));
    assert_close(&y, &[-1.0, 0.5, 1.0, f64::NAN], 0.0);
    assert_close(&dy[..3], &[0.0, 1.0, 0.0], 0.0);
}

fn log_sum(row: &[f64]) -> f64 {
    let m = row.iter().copied().fold(-INF, f64::max);
    if m.is_infinite() {
        m
    } else {
        m + row.iter().map(|x| (x - m).exp()).sum::<f64>().ln()
    }
}

#[test]
fn softmax_family_is_stable_and_differentiable() {
    let rows = [
        [1.0, -2.0, 0.5],
        [1e4, 1e4 - 1.0, -1e4],
        [-INF, 2.0, -INF],
        [-3e4, -3e4, -3e4],
    ];
    let flat: Vec<f64> = rows.iter().flatten().copied().collect();
    let trace = Trace::inference();
    let x = trace.input("x", F32, (4, 3));
    let weight = trace.input("weight", F32, (3,));
    let (soft, log, lse) = (x.softmax(1), x.log_softmax(1), x.logsumexp(1));
    let [of_lse] = trace.gradients(lse.sum(), [x]);
    let [of_soft] = trace.gradients((soft * weight).sum(), [x]);
    let w = [0.5, -1.0, 2.0];
    let out = run(
        &trace,
        &[soft, log, lse, of_lse, of_soft],
        1,
        &[array(&[4, 3], &flat), array(&[3], &w)],
    );

    let expect = |f: &dyn Fn(&[f64; 3], usize) -> f64| {
        rows.iter()
            .flat_map(|r| (0..3).map(|i| f(r, i)))
            .collect::<Vec<_>>()
    };
    let p = |r: &[f64; 3], i: usize| (r[i] - log_sum(r)).exp();
    assert_close(&out[0].values, &expect(&p), 3e-7);
    assert_close(&out[1].values, &expect(&|r, i| r[i] - log_sum(r)), 3e-7);
    assert_close(&out[2].values, &rows.map(|r| log_sum(&r)), 2e-7);
    assert_close(&out[3].values, &expect(&p), 3e-7);
    let mean = |r: &[f64; 3]| (0..3).map(|j| w[j] * p(r, j)).sum::<f64>();
    assert_close(
        &out[4].values,
        &expect(&|r, i| p(r, i) * (w[i] - mean(r))),
        5e-7,
    );
}

#[test]
fn logsumexp_of_nothing_but_infinities() {
    let trace = Trace::inference();
    let x = trace.input("x", F32, (2, 2));
    let out = run(
        &trace,
        &[x.logsumexp(1)],
        1,
        &[array(&[2, 2], &[-INF, -INF, INF, 0.0])],
    );
    assert_eq!(out[0].values, [-INF, INF]);
}

#[test]
fn cross_entropy_at_every_length_of_the_batch() {
    let rows = [
        [1.0, -2.0, 0.5, 0.0],
        [300.0, -2.0, 299.0, -400.0],
        [0.0, 0.0, 0.0, 0.0],
    ];
    let labels = [2, 0, 3];
    for dtype in [I32, U8] {
        let trace = Trace::inference();
        let batch = Dim::bounded("batch", 3);
        let (x, y) = (
            trace.input("x", F32, (batch, 4)),
            trace.input("y", dtype, (batch,)),
        );
        let loss = x.cross_entropy(y);
        let [slope] = trace.gradients(loss, [x]);
        assert_eq!((loss.dtype(), loss.rank()), (F32, 0));
        for n in [1, 2, 3usize] {
            let flat: Vec<f64> = rows[..n].iter().flatten().copied().collect();
            let mut y = integers(&[n], &labels[..n]);
            y.dtype = dtype;
            let out = run(
                &trace,
                &[loss, slope],
                n as u32,
                &[array(&[n, 4], &flat), y],
            );
            let each = |i: usize| log_sum(&rows[i]) - rows[i][labels[i] as usize];
            assert_close(
                &out[0].values,
                &[(0..n).map(each).sum::<f64>() / n as f64],
                3e-7,
            );
            let hit = |i: usize, c: usize| f64::from(u8::from(labels[i] as usize == c));
            let expected: Vec<f64> = (0..n)
                .flat_map(|i| {
                    (0..4).map(move |c| {
                        ((rows[i][c] - log_sum(&rows[i])).exp() - hit(i, c)) / n as f64
                    })
                })
                .collect();
            assert_close(&out[1].values, &expected, 3e-7);
        }
    }
}

#[test]
fn indices_out_of_range_fail_the_run() {
    let trace = Trace::inference();
    let (x, y) = (trace.input("x", F32, (2, 4)), trace.input("y", I32, (2,)));
    for result in [
        x.cross_entropy(y),
        y.one_hot(4),
        x.index_select(1, y),
        x.gather(1, y.unsqueeze(1)),
    ] {
        for bad in [4, -1] {
            let ran = try_run(
                &trace,
                &[result],
                1,
                &[array(&[2, 4], &[0.0; 8]), integers(&[2], &[0, bad])],
            );
            assert!(
                matches!(ran, Err(Fault::Index { index, limit: 4, .. }) if index == i64::from(bad)),
                "{ran:?}"
            );
        }
    }
}

#[test]
fn chosen_elements() {
    let trace = Trace::inference();
    let (x, y) = (trace.input("x", F32, (2, 3)), trace.input("y", I32, (2,)));
    let out = run(
        &trace,
        &[
            y.one_hot(3),
            x.index_select(1, y),
            x.gather(1, y.unsqueeze(1)),
            x.index_select(0, y.minimum(1)),
        ],
        1,
        &[
            array(&[2, 3], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]),
            integers(&[2], &[2, 0]),
        ],
    );
    assert_eq!(out[0], array(&[2, 3], &[0.0, 0.0, 1.0, 1.0, 0.0, 0.0]));
    assert_eq!(out[1], array(&[2, 2], &[3.0, 1.0, 6.0, 4.0]));
    assert_eq!(out[2], array(&[2, 1], &[3.0, 4.0]));
    assert_eq!(out[3], array(&[2, 3], &[4.0, 5.0, 6.0, 1.0, 2.0, 3.0]));
}

#[test]
fn matrix_products_follow_numpy() {
    // Every pair of shapes, against the product written as a broadcast sum.
    let shapes: [&[usize]; 7] = [
        &[3],
        &[3, 3],
        &[2, 3],
        &[4, 3, 3],
        &[1, 3, 3],
        &[2, 1, 2, 3],
        &[4, 3, 2],
    ];
    let numbers = |dims: &[usize], seed: usize| {
        let n = dims.iter().product();
        array(
            dims,
            &(0..n)
                .map(|i| ((i * 7 + seed) % 11) as f64 - 5.0)
                .collect::<Vec<_>>(),
        )
    };
    let mut tried = 0;
    for (a, b) in shapes
        .iter()
        .flat_map(|a| shapes.iter().map(move |b| (*a, *b)))
    {
        let trace = Trace::inference();
        let (x, y) = (trace.input("x", F32, a), trace.input("y", F32, b));
        let product = x.matmul(y);
        if product.is_poisoned() {
            continue;
        }
        tried += 1;
        let row = if a.len() == 1 { x.unsqueeze(0) } else { x };
        let column = if b.len() == 1 { y.unsqueeze(1) } else { y };
        let (wide, tall) = (
            row.unsqueeze(row.rank()),
            column.unsqueeze(column.rank() - 2),
        );
        let mut sum = (wide * tall).sum_over(wide.rank().max(tall.rank()) - 2);
        if b.len() == 1 {
            sum = sum.squeeze(sum.rank() - 1);
        }
        if a.len() == 1 {
            sum = sum.squeeze(if b.len() == 1 {
                sum.rank() - 1
            } else {
                sum.rank() - 2
            });
        }
        let [dx, dy] = trace.gradients((product * product).sum(), [x, y]);
        let [ex, ey] = trace.gradients((sum * sum).sum(), [x, y]);
        let out = run(
            &trace,
            &[product, dx, dy, sum, ex, ey],
            1,
            &[numbers(a, 1), numbers(b, 4)],
        );
        assert_eq!(out[..3], out[3..], "{a:?} × {b:?}");
    }
    // The inner dimension is 3 on six left and five right sides, and 2 on one left and two right
    // sides.
    assert_eq!(tried, 6 * 5 + 2);
}

#[test]
fn reductions_of_every_form() {
    let trace = Trace::inference();
    let x = trace.input("x", F32, (2, 3));
    let values = array(&[2, 3], &[3.0, -1.0, 2.0, 0.5, 4.0, 4.0]);
    let one = |t: Tensor<'_>| run(&trace, &[t], 1, std::slice::from_ref(&values)).remove(0);
    assert_eq!(one(x.sum()), array(&[], &[12.5]));
    assert_eq!(one(x.sum_over(..)), array(&[], &[12.5]));
    assert_eq!(one(x.sum_over(1)), array(&[2], &[4.0, 8.5]));
    assert_eq!(one(x.max_keep([1])), array(&[2, 1], &[3.0, 4.0]));
    assert_eq!(one(x.min_over([1, 0])), array(&[], &[-1.0]));
    assert_eq!(one(x.prod_over(0)), array(&[3], &[1.5, -4.0, 8.0]));
    assert_eq!(
        one(x.mean_keep(..)),
        array(
            &[1, 1],
            &[12.5f32 as f64 / 6.0].map(|v| f64::from(v as f32))
        )
    );
    assert_eq!(one(x.argmax(1)), integers(&[2], &[0, 1]));
    assert_eq!(one(x.argmin(..)), integers(&[], &[1]));
    assert_eq!(one(x.argmax_keep(0)), integers(&[1, 3], &[0, 1, 1]));
    assert_eq!(
        one(x.gt(3.5).mean()),
        array(&[], &[f64::from(2.0f32 / 6.0)])
    );
    assert_eq!(
        one(x.gt(3.5).any_over(1).cast(I32)),
        integers(&[2], &[0, 1])
    );
    assert_eq!(one((!x.gt(3.5)).all().cast(I32)), integers(&[], &[0]));
    assert_eq!(one(x.sum_over([0; 0])), values);
}

#[test]
fn means_count_the_batch_as_it_is() {
    let trace = Trace::inference();
    let x = trace.input("x", F32, (Dim::bounded("batch", 9), 2));
    for n in [1, 4, 9usize] {
        let values: Vec<f64> = (0..2 * n).map(|i| i as f64).collect();
        let out = run(
            &trace,
            &[x.mean(), x.mean_over(0)],
            n as u32,
            &[array(&[n, 2], &values)],
        );
        assert_eq!(out[0].values, [(2 * n - 1) as f64 / 2.0]);
        assert_eq!(out[1].values, [(n - 1) as f64, n as f64]);
    }
}

#[test]
fn parts_and_wholes() {
    let trace = Trace::inference();
    let x = trace.input("x", I32, (2, 6));
    let values = integers(&[2, 6], &(0..12).collect::<Vec<_>>());
    let one = |t: Tensor<'_>| run(&trace, &[t], 1, std::slice::from_ref(&values)).remove(0);
    assert_eq!(one(x.slice(1, 1..3)), integers(&[2, 2], &[1, 2, 7, 8]));
    assert_eq!(one(x.slice(1, 4..)), integers(&[2, 2], &[4, 5, 10, 11]));
    assert_eq!(
        one(x.slice_step(1, ..=4, 2)),
        integers(&[2, 3], &[0, 2, 4, 6, 8, 10])
    );
    assert_eq!(
        one(x.slice_step(1, 1..6, 4)),
        integers(&[2, 2], &[1, 5, 7, 11])
    );
    let parts = x.split(1, 3);
    assert_eq!(one(parts[1]), integers(&[2, 2], &[2, 3, 8, 9]));
    assert_eq!(one(trace.concat(&parts, 1)), values);
    assert_eq!(
        one(trace.stack(&parts[..2], 0).sum_over([1, 2])),
        integers(&[2], &[14, 22])
    );
    assert_eq!(
        one(parts[0].pad([(1, 0), (0, 1)], -1.0)),
        integers(&[3, 3], &[-1, -1, -1, 0, 1, -1, 6, 7, -1])
    );
    assert_eq!(
        one(x.slice(1, ..2).t().reshape((4, -1))),
        integers(&[4, 1], &[0, 6, 1, 7])
    );
    assert_eq!(
        one(x.slice(1, ..1).expand((3, -1, 2)).sum_over([0, 2])),
        integers(&[2], &[0, 36])
    );
    assert_eq!(one(trace.arange(3) + 1), integers(&[3], &[1, 2, 3]));
}

#[test]
fn shapes_with_a_bounded_batch() {
    let trace = Trace::inference();
    let batch = Dim::bounded("batch", 8);
    let x = trace.input("x", F32, (batch, 3, 8, 8));
    let w = trace.input("w", F32, (6, 3, 3, 3));
    let same = ConvGeometry {
        pad: [1, 1],
        ..ConvGeometry::default()
    };
    let cases = [
        (x.flatten(1), "f32 [batch, 192]"),
        (x.flatten(0), "f32 [192·batch]"),
        (x.reshape((-1, 16)), "f32 [12·batch, 16]"),
        (x.reshape((batch, -1)), "f32 [batch, 192]"),
        (x.conv2d(w), "f32 [batch, 6, 6, 6]"),
        (x.conv2d_with(w, same), "f32 [batch, 6, 8, 8]"),
        (x.max_pool2d(2), "f32 [batch, 3, 4, 4]"),
        (
            x.avg_pool2d_with(Window {
                k: [3, 3],
                stride: [2, 2],
                pad: [1, 1],
            }),
            "f32 [batch, 3, 4, 4]",
        ),
        (x.global_avg_pool(), "f32 [batch, 3]"),
        (x.slice(0, ..), "f32 [batch, 3, 8, 8]"),
        (trace.concat(&[x, x], 0), "f32 [2·batch, 3, 8, 8]"),
        (
            trace.concat(&[x, x], 0).split(0, 2)[1],
            "f32 [batch, 3, 8, 8]",
        ),
        (
            x.pad([(1, 1), (0, 0), (0, 0), (0, 0)], 0.0).slice(0, 2..),
            "f32 [batch, 3, 8, 8]",
        ),
        (x.transpose(0, 3), "f32 [8, 3, 8, batch]"),
        (x.permute([1, 0, 3, 2]), "f32 [3, batch, 8, 8]"),
        (x.expand((2, -1, -1, -1, -1)), "f32 [2, batch, 3, 8, 8]"),
        (x.uniform_like(), "f32 [batch, 3, 8, 8]"),
        (x.sum_over([2, 3]).lt(0.0), "bool [batch, 3]"),
        (x.cast(U8) + 300, "i32 [batch, 3, 8, 8]"),
    ];
    for (tensor, shape) in &cases {
        assert_eq!(format!("{tensor:?}"), *shape);
    }
    finished(&trace, &cases.map(|(tensor, _)| tensor));
}

#[test]
fn numbers_take_the_type_beside_them() {
    let trace = Trace::inference();
    let (x, n, c) = (
        trace.input("x", F32, (2,)),
        trace.input("n", I32, (2,)),
        trace.input("c", Bool, (2,)),
    );
    let mut condition = integers(&[2], &[1, 0]);
    condition.dtype = Bool;
    let outputs = [
        2 / (x - 1),
        7 - n * 2.0,
        c.select(x, 9),
        c.select(n, 9.0),
        c.select(1, 0),
        n.equal(i32::MAX).cast(I32),
    ];
    let out = run(
        &trace,
        &outputs,
        1,
        &[
            array(&[2], &[2.0, 5.0]),
            integers(&[2], &[3, i32::MAX]),
            condition,
        ],
    );
    assert_eq!(out[0], array(&[2], &[2.0, 0.5]));
    assert_eq!(out[1], integers(&[2], &[1, 9]));
    assert_eq!(out[2], array(&[2], &[2.0, 9.0]));
    assert_eq!(out[3], integers(&[2], &[3, 9]));
    assert_eq!(out[4], array(&[2], &[1.0, 0.0]));
    assert_eq!(out[5], integers(&[2], &[0, 1]));
}

#[test]
fn dropout_drops_in_training_only() {
    let trace = Trace::inference();
    let x = trace.input("x", F32, (8,));
    assert_eq!(x.dropout(0.5).id, x.id);

    let trace = Trace::training();
    let x = trace.input("x", F32, (4000,));
    let (half, all, none) = (x.dropout(0.25), x.dropout(1.0), x.dropout(0.0));
    let again = x.dropout(0.25);
    let [slope] = trace.gradients(half.sum() + all.sum(), [x]);
    let ran = try_run(
        &trace,
        &[half, again, all, slope],
        1,
        &[array(&[4000], &[3.0; 4000])],
    )
    .unwrap();
    assert_eq!(none.id, x.id);
    let out = &ran.outputs;
    assert!(out[0].values.iter().all(|&v| v == 0.0 || v == 4.0));
    let dropped = out[0].values.iter().filter(|&&v| v == 0.0).count();
    assert!(
        (880..1120).contains(&dropped),
        "{dropped} of 4000 dropped with p = 0.25"
    );
    assert_ne!(out[0], out[1], "each dropout draws different numbers");
    assert!(out[2].values.iter().all(|&v| v == 0.0));
    for (slope, kept) in out[3].values.iter().zip(&out[0].values) {
        assert_close(&[*slope], &[kept / 3.0], 1e-7);
    }
    // The step counts up, once.
    assert_eq!(ran.assigned, [Some(integers(&[3], &[0, 0, 1]))]);
}

#[test]
fn normal_numbers_are_normal() {
    let trace = Trace::inference();
    let out = run(&trace, &[trace.normal((100, 100))], 1, &[]);
    let (x, n) = (&out[0].values, 1e4);
    let moment = |k: i32| x.iter().map(|v| v.powi(k)).sum::<f64>() / n;
    // Five standard errors of each moment.
    assert!(moment(1).abs() < 0.05, "{}", moment(1));
    assert!((moment(2) - 1.0).abs() < 0.071, "{}", moment(2));
    assert!(moment(3).abs() < 0.194, "{}", moment(3));
    assert!((moment(4) - 3.0).abs() < 0.49, "{}", moment(4));
}

#[test]
fn state_is_read_before_and_set_after() {
    let trace = Trace::training();
    let count = trace.state("count", I32, (2,), Init::Constant(5.0));
    let x = trace.input("x", I32, (2,));
    count.set(count.value() + x);
    let after = count.value();
    let ran = try_run(&trace, &[after], 1, &[integers(&[2], &[1, 2])]).unwrap();
    assert_eq!(ran.outputs, [integers(&[2], &[5, 5])]);
    assert_eq!(ran.assigned, [Some(integers(&[2], &[6, 7]))]);
}

#[test]
fn gradients_of_unused_values_are_zero() {
    let trace = Trace::inference();
    let (x, y) = (trace.input("x", F32, (2,)), trace.input("y", F32, (3,)));
    let [dx, dy] = trace.gradients((x * x).sum(), [x, y]);
    let out = run(
        &trace,
        &[dx, dy],
        1,
        &[array(&[2], &[1.0, -3.0]), array(&[3], &[1.0; 3])],
    );
    assert_eq!(out, [array(&[2], &[2.0, -6.0]), array(&[3], &[0.0; 3])]);
}

#[test]
fn one_right_matrix_is_never_repeated() {
    let trace = Trace::inference();
    let (x, w) = (
        trace.input("x", F32, (Dim::bounded("batch", 4), 5, 3)),
        trace.input("w", F32, (3, 2)),
    );
    let graph = finished(&trace, &[x.matmul(w)]);
    assert!(graph.nodes.iter().all(|n| n.op != Op::Expand), "{graph}");
}
