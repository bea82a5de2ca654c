//! Slices and paddings in unusual places: those whose start is not expressible as one size, because
//! the offset of the first element is a sum of different products of lengths, and more slices of one
//! tensor than a kernel has operands.

use ndarray::{ArrayD, IxDyn, Slice};
use slabwise::CompileOptions;
use slabwise::prelude::*;

fn input(b: usize) -> ArrayD<f32> {
    let mut next = 0.0;
    ArrayD::from_shape_simple_fn(IxDyn(&[3, b, 3, b]), || {
        next += 0.01;
        next
    })
}

fn run(make: impl for<'t> Fn(Tensor<'t>) -> Tensor<'t>, b: usize) -> ArrayD<f32> {
    let mut session = Session::new(Device::Cpu, Params::seeded(0)).expect("a session");
    let trace = Trace::inference();
    let b_dim = Dim::bounded("b", 4);
    let x = trace.input("x", F32, [Dim::Fixed(3), b_dim, Dim::Fixed(3), b_dim]);
    let program = session.compile(&trace, [make(x)]).expect("it compiles");
    let [y] = session.run(&program, (&input(b),)).expect("a run");
    y.view::<f32>().expect("f32").to_owned()
}

#[test]
fn a_padding_before_two_axes() {
    for b in [1, 2, 4] {
        let got = run(|x| x.pad([(1, 0), (0, 0), (2, 1), (0, 0)], 0.5), b);
        let mut expected = ArrayD::from_elem(IxDyn(&[4, b, 6, b]), 0.5);
        let mut inner = expected.view_mut();
        inner.slice_axis_inplace(ndarray::Axis(0), Slice::from(1..));
        inner.slice_axis_inplace(ndarray::Axis(2), Slice::from(2..5));
        inner.assign(&input(b));
        assert_eq!(got, expected, "{b}");
    }
}

#[test]
fn a_slice_of_two_axes() {
    for b in [1, 2, 4] {
        let got = run(|x| x.slice(0, 1..).slice(2, 1..).exp(), b);
        let mut expected = input(b);
        expected.slice_axis_inplace(ndarray::Axis(0), Slice::from(1..));
        expected.slice_axis_inplace(ndarray::Axis(2), Slice::from(1..));
        let expected = expected.mapv(f32::exp);
        assert!(
            got.iter()
                .zip(&expected)
                .all(|(a, b)| (a - b).abs() <= 1e-5 * b.abs()),
            "{b}"
        );
    }
}

/// A sum over an axis of length 1 reduces nothing, yet its operand has axes of its own, which must
/// be those of the product that it becomes an epilogue of. Only without algebraic simplification is
/// such a sum still there.
#[test]
fn a_sum_of_one_element_behind_a_product() -> Result<()> {
    let run = |algebra: bool| -> Result<Vec<f32>> {
        let trace = Trace::inference();
        let x = trace.input("x", F32, (1, 2, 1, 1));
        let y = trace.input("y", F32, (1, 2, 1, 1));
        let scaled = x.exp();
        let divided = scaled.matmul(y) / scaled.sum_keep(3);
        let mut options = CompileOptions::default();
        options.simplify.algebra = algebra;
        let mut session = Session::new(Device::Cpu, Params::seeded(0))?.with_options(options);
        let program = session.compile(&trace, [divided])?;
        let [x, y] = [[1.0f32, 2.0], [3.0, 5.0]].map(|v| {
            ndarray::Array::from_shape_vec((1, 2, 1, 1), v.to_vec()).expect("two elements")
        });
        Ok(session.run(&program, (&x, &y))?[0]
            .view::<f32>()?
            .iter()
            .copied()
            .collect())
    };
    let [with, without] = [run(true)?, run(false)?];
    for got in [with, without] {
        assert!(
            got.iter()
                .zip([3.0, 5.0])
                .all(|(a, b)| (a - b).abs() < 1e-5),
            "{got:?}"
        );
    }
    Ok(())
}

#[test]
fn more_slices_of_a_tensor_than_a_kernel_has_operands() {
    let x = ArrayD::from_shape_fn(IxDyn(&[60, 4]), |at| (at[0] * 4 + at[1]) as f32);
    let expected = x.sum_axis(ndarray::Axis(0));
    for reversed in [false, true] {
        let mut session = Session::new(Device::Cpu, Params::seeded(0)).expect("a session");
        let trace = Trace::inference();
        let rows = trace.input("x", F32, [60, 4]);
        let row = |at: usize| rows.slice(0, at..at + 1).squeeze(0);
        let sum = match reversed {
            false => (1..60).fold(row(0), |sum, at| sum + row(at)),
            true => (0..59).rev().fold(row(59), |sum, at| row(at) + sum),
        };
        let program = session.compile(&trace, [sum]).expect("it compiles");
        let [y] = session.run(&program, (&x,)).expect("a run");
        assert_eq!(y.view::<f32>().expect("f32"), expected, "{reversed}");
    }
}
