//! Lengths that a run decides, as lengths of other tensors and as numbers.

use ndarray::{Array1, Array2};
use slabwise::prelude::*;

#[test]
fn lengths_of_a_run_are_lengths_of_other_tensors() {
    let trace = Trace::inference();
    let x = trace.input("x", F32, (Dim::bounded("n", 5), 2));
    let n = x.dim(0);
    let outputs = [
        trace.ones((2, n)).sum_over(0),
        trace.arange(7).cast(F32).narrow(0, 1, n),
        x.reshape([-1i64]).narrow(0, n, n),
        x.pad_to(0, 6, 1.0).sum_over(1),
        trace.length(n).cast(F32).reshape([1]) * 3.0,
        trace.arange(n).cast(F32),
    ];
    let mut session = Session::new(Device::Cpu, Params::seeded(0)).expect("a session");
    let program = session.compile(&trace, outputs).expect("it compiles");
    for n in [3usize, 5, 0] {
        let x = Array2::from_shape_fn((n, 2), |(i, j)| (10 * i + j) as f32);
        let results = session.run(&program, (&x,)).expect("a run");
        let flat: Vec<f32> = x.iter().copied().collect();
        let mut padded: Vec<f32> = x.rows().into_iter().map(|row| row.sum()).collect();
        padded.resize(6, 2.0);
        let numbers = |from: usize| (from..from + n).map(|i| i as f32).collect::<Vec<_>>();
        let expected = [
            vec![2.0; n],
            numbers(1),
            flat[n..].to_vec(),
            padded,
            vec![3.0 * n as f32],
            numbers(0),
        ];
        for (result, expected) in results.iter().zip(expected) {
            let result = result.view::<f32>().expect("f32");
            assert_eq!(result.iter().copied().collect::<Vec<_>>(), expected);
        }
    }
}

/// Lengths of inputs that follow from those of others are checked against them, in either order.
#[test]
fn inputs_have_lengths_computed_from_those_of_others() {
    let compile = |session: &mut Session, derived_first: bool| {
        let trace = Trace::inference();
        let (n, m) = (Dim::bounded("n", 5), Dim::bounded("m", 4));
        let twice = trace.ones((n, 2)).reshape([-1i64]).dim(0);
        let product = trace.ones((n, m)).reshape([-1i64]).dim(0);
        let given = |derived: bool| match derived {
            false => trace.input("x", F32, (n, m)).sum(),
            true => trace.input("pairs", F32, (twice,)).sum(),
        };
        let (first, second) = (given(derived_first), given(!derived_first));
        let all = trace.input("all", F32, (product,)).sum();
        session
            .compile(&trace, [first, second, all])
            .expect("it compiles")
    };
    let mut session = Session::new(Device::Cpu, Params::seeded(0)).expect("a session");
    let ones = |n: usize| Array1::<f32>::ones(n);
    let x = Array2::<f32>::ones((3, 4));
    for derived_first in [false, true] {
        let program = compile(&mut session, derived_first);
        let mut run = |pairs: usize, all: usize| {
            let (pairs, all) = (ones(pairs), ones(all));
            let results = match derived_first {
                false => session.run(&program, (&x, &pairs, &all)),
                true => session.run(&program, (&pairs, &x, &all)),
            };
            let sums = results?.map(|sum| sum.item());
            Ok::<_, slabwise::Error>(sums)
        };
        let expected = if derived_first {
            [6.0, 12.0, 12.0]
        } else {
            [12.0, 6.0, 12.0]
        };
        assert_eq!(run(6, 12).expect("a run"), expected);
        for (pairs, all, say) in [
            (3, 12, "no length of \"n\""),
            (4, 12, "in another input"),
            (12, 12, "more than its bound"),
            (6, 11, "12"),
            (6, 3, "12"),
        ] {
            let error = run(pairs, all).expect_err("another length").to_string();
            assert!(error.contains(say), "{pairs} and {all}: {error}");
        }
    }
}

/// Gradients of parts and of paddings are paddings and parts.
#[test]
fn parts_of_a_length_have_gradients() {
    let params = Params::seeded(0);
    let table = params.root().param("table", (4, 2), Init::Constant(1.0));
    let trace = Trace::training();
    let x = trace.input("x", F32, (Dim::bounded("n", 3), 2));
    let rows = trace.param(&table).narrow(0, 1, x.dim(0));
    let loss = ((x + rows).pad_to(0, 5, 7.0) * 2.0).sum();
    let [gradient] = trace.gradients(loss, [trace.param(&table)]);
    let mut session = Session::new(Device::Cpu, params).expect("a session");
    let program = session.compile(&trace, [gradient]).expect("it compiles");
    let [gradient] = session
        .run(&program, (&Array2::<f32>::zeros((2, 2)),))
        .expect("a run");
    let gradient: Vec<f32> = gradient
        .view::<f32>()
        .expect("f32")
        .iter()
        .copied()
        .collect();
    assert_eq!(gradient, [0.0, 0.0, 2.0, 2.0, 2.0, 2.0, 0.0, 0.0]);
}

/// The text of the only mistake of a trace.
fn mistake(build: impl for<'t> Fn(&'t Trace)) -> String {
    let trace = Trace::inference();
    build(&trace);
    let mistakes = trace.mistakes();
    assert_eq!(mistakes.len(), 1, "{mistakes:?}");
    mistakes[0].message.clone()
}

#[test]
fn parts_that_may_not_exist_are_mistakes() {
    let text = mistake(|trace| {
        let x = trace.input("x", F32, (Dim::bounded("n", 5), 2));
        trace.arange(5).narrow(0, 1, x.dim(0));
    });
    assert!(text.contains("does not exist at every length"), "{text}");
    let text = mistake(|trace| {
        let x = trace.input("x", F32, (Dim::unbounded("n"), 2));
        trace.arange(5).narrow(0, 0, x.dim(0));
    });
    assert!(text.contains("does not exist at every length"), "{text}");
    let text = mistake(|trace| {
        let x = trace.input("x", F32, (Dim::bounded("n", 5), 2));
        x.pad_to(0, 4, 0.0);
    });
    assert!(text.contains("may be longer than 4"), "{text}");
    let text = mistake(|trace| {
        let other = Trace::inference();
        let x = other.input("x", F32, (Dim::bounded("n", 5), 2));
        trace.ones((x.dim(0),));
    });
    assert!(text.contains("another trace"), "{text}");
}

/// The slope of a sum in which each row counts as often as its number says.
fn weighted_slope<'t>(trace: &'t Trace, x: Tensor<'t>, of: Tensor<'t>) -> Tensor<'t> {
    let weights = trace.arange(x.dim(0)).cast(F32).unsqueeze(1);
    trace.gradients((x * weights).sum(), [of])[0]
}

/// Lengths that are sums and products of others, and parts that may be shorter than a number.
#[test]
fn lengths_are_sums_and_products_of_others() {
    let trace = Trace::training();
    let (past, new) = (Dim::bounded("past", 6), Dim::bounded("new", 4));
    let (a, b) = (
        trace.input("a", F32, (past, 3)),
        trace.input("b", F32, (new, 3)),
    );
    let mask = trace.input("mask", F32, (trace.sum_of_lengths(past, new),));
    let all = trace.concat(&[a, b], 0);
    let twice = trace.concat(&[all, b, a], 0);
    let outputs = [
        all * mask.unsqueeze(1),
        all.narrow(0, a.dim(0), b.dim(0)) - b,
        twice.sum_over(1),
        trace
            .ones((trace.product_of_lengths(all.dim(0), b.pad([(0, 1), (0, 0)], 0.0).dim(0)),))
            .sum()
            .reshape([1]),
        weighted_slope(&trace, all, b),
        weighted_slope(&trace, twice, a),
    ];
    let mut session = Session::new(Device::Cpu, Params::seeded(0)).expect("a session");
    let program = session.compile(&trace, outputs).expect("it compiles");
    for (past, new) in [(6, 4), (0, 3), (5, 0), (2, 4), (0, 0)] {
        let rows =
            |n: usize, from: f32| Array2::from_shape_fn((n, 3), |(i, j)| from + (3 * i + j) as f32);
        let (a, b) = (rows(past, 100.0), rows(new, 0.0));
        let mask = Array1::from_shape_fn(past + new, |i| (i % 3) as f32);
        let results = session.run(&program, (&a, &b, &mask)).expect("a run");
        let stacked = |parts: &[&Array2<f32>]| {
            let views: Vec<_> = parts.iter().map(|part| part.view()).collect();
            ndarray::concatenate(ndarray::Axis(0), &views).expect("they fit")
        };
        let all = stacked(&[&a, &b]);
        let masked: Vec<f32> = (0..past + new)
            .flat_map(|i| all.row(i).map(|x| x * mask[i]).to_vec())
            .collect();
        let sums = stacked(&[&all, &b, &a]).sum_axis(ndarray::Axis(1)).to_vec();
        // In `twice` each row of `a` is at i and at past + 2 new + i.
        let of_a = (0..past).flat_map(|i| [(2 * i + past + 2 * new) as f32; 3]);
        let expected = [
            masked,
            vec![0.0; 3 * new],
            sums,
            vec![((past + new) * (new + 1)) as f32],
            (past..past + new).flat_map(|i| [i as f32; 3]).collect(),
            of_a.collect(),
        ];
        for (at, (result, expected)) in results.iter().zip(expected).enumerate() {
            let result = result.view::<f32>().expect("f32");
            let found: Vec<f32> = result.iter().copied().collect();
            assert_eq!(found, expected, "output {at} of {past} and {new}");
        }
    }
    let (a, b) = (Array2::<f32>::ones((2, 3)), Array2::<f32>::ones((1, 3)));
    let wrong = session.run(&program, (&a, &b, &Array1::<f32>::ones(4)));
    let wrong = wrong.err().expect("the mask has one element too many");
    let wrong = wrong.to_string();
    assert!(
        wrong.contains("\"mask\"") && wrong.contains("(past+new)"),
        "{wrong}"
    );
}
