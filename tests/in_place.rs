//! Values computed in place of a larger one: in its first part, or in all of it.

#[path = "support/prefixes.rs"]
mod prefixes;

use ndarray::{Array1, ArrayD, s};
use prefixes::{numbers, prefixes, sessions};
use slabwise::CompileOptions;
use slabwise::prelude::*;

#[test]
fn the_first_part_of_a_value_is_computed_in_place() {
    prefixes(Device::Cpu, &[4, 5, 7, 16, 33, 100]);
}

/// The optimization applies: only the input is in the slab. Without it the bits are the same.
#[test]
fn in_place_saves_the_bytes_of_the_part() {
    let bytes = |in_place: bool| {
        let planner = slabwise_planner::Options {
            in_place,
            ..slabwise_planner::Options::default()
        };
        let options = CompileOptions {
            planner,
            ..CompileOptions::default()
        };
        let mut session = Session::new(Device::Cpu, Params::seeded(0))
            .expect("a session")
            .with_options(options);
        let trace = Trace::inference();
        let x = trace.input("x", F32, (64, 16));
        let program = session
            .compile(&trace, [x.slice(0, 0..32).exp()])
            .expect("it compiles");
        let out = session.run(&program, (&numbers(64, 16),)).expect("it runs")[0]
            .array::<f32>()
            .expect("f32");
        (program.plan().slab_bytes(), out)
    };
    let ((with, a), (without, b)) = (bytes(true), bytes(false));
    assert_eq!(without - with, 32 * 16 * 4);
    assert_eq!(a, b);
}

/// A part of each row also begins at the first byte, but has other strides: it gets its own bytes,
/// or is correct in these.
#[test]
fn parts_of_rows_and_parts_that_begin_later_are_right() {
    for mut session in sessions(Device::Cpu) {
        let trace = Trace::inference();
        let x = trace.input("x", F32, (9, 16));
        let v = trace.input("v", F32, (100,));
        let parts = [
            x.slice(1, 0..5).exp(),
            x.slice_step(0, 0..8, 2) * 2.0,
            x.slice(0, 3..9).exp(),
            x.slice(0, 0..1).relu(),
        ];
        let more = [v.slice(0, 0..37).exp(), -v.slice_step(0, .., 3)];
        let program = session
            .compile(
                &trace,
                [parts[0], parts[1], parts[2], parts[3], more[0], more[1]],
            )
            .expect("it compiles");
        let (x, v) = (
            numbers(9, 16),
            Array1::from_iter((0..100).map(|i| (i as f32).cos())),
        );
        let out = session
            .run(&program, (&x, &v))
            .expect("it runs")
            .map(|o| o.array::<f32>().expect("f32"));
        let close = |a: &ArrayD<f32>, b: ArrayD<f32>| {
            assert!(a.shape() == b.shape() && a.iter().zip(&b).all(|(a, b)| (a - b).abs() < 1e-5))
        };
        close(&out[0], x.slice(s![.., 0..5]).mapv(f32::exp).into_dyn());
        close(
            &out[1],
            x.slice(s![0..8;2, ..]).mapv(|v| v * 2.0).into_dyn(),
        );
        close(&out[2], x.slice(s![3..9, ..]).mapv(f32::exp).into_dyn());
        close(
            &out[3],
            x.slice(s![0..1, ..]).mapv(|v| v.max(0.0)).into_dyn(),
        );
        close(&out[4], v.slice(s![0..37]).mapv(f32::exp).into_dyn());
        close(&out[5], v.slice(s![..;3]).mapv(|v| -v).into_dyn());
    }
}

/// A prefix of a value with a batch below its bound, and of a donated input.
#[test]
fn prefixes_of_bounded_batches_and_donated_inputs() {
    for mut session in sessions(Device::Cpu) {
        let trace = Trace::inference();
        let x = trace.input("x", F32, (Dim::bounded("batch", 8), 6, 4));
        let y = x.transpose(0, 1).keep() * 1.0;
        let program = session
            .compile(
                &trace,
                [x.slice(1, 0..3).exp().sum_over(1), y.slice(0, 0..2).exp()],
            )
            .expect("it compiles");
        for batch in [8, 3, 1, 0] {
            let given = numbers(batch * 6, 4)
                .into_shape_with_order((batch, 6, 4))
                .expect("as many");
            let [sums, first] = session
                .run(&program, (&given,))
                .expect("it runs")
                .map(|o| o.array::<f32>().expect("f32"));
            let want = given
                .slice(s![.., 0..3, ..])
                .mapv(f32::exp)
                .sum_axis(ndarray::Axis(1));
            assert!(
                sums.iter().zip(&want).all(|(a, b)| (a - b).abs() < 1e-5)
                    && sums.len() == want.len()
            );
            let turned = given.view().permuted_axes([1, 0, 2]);
            let want = turned.slice(s![0..2, .., ..]).mapv(f32::exp);
            assert!(
                first.iter().zip(&want).all(|(a, b)| (a - b).abs() < 1e-5)
                    && first.len() == want.len()
            );
        }
        let trace = Trace::inference();
        let x = trace.input("x", F32, (8, 4));
        let (next, part) = (x * 2.0, x.slice(0, 0..3).exp());
        trace.donate(x, 0);
        let program = session.compile(&trace, [next, part]).expect("it compiles");
        let given = numbers(8, 4);
        let buffer = session.upload("x", &given).expect("it fits");
        let [doubled, first] = session
            .run(&program, (buffer.donate(),))
            .expect("it runs")
            .map(|o| o.array::<f32>().expect("f32"));
        assert_eq!(doubled, given.mapv(|v| v * 2.0).into_dyn());
        let want = given.slice(s![0..3, ..]).mapv(f32::exp);
        assert!(first.iter().zip(&want).all(|(a, b)| (a - b).abs() < 1e-5));
    }
}
