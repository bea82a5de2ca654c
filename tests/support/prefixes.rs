//! Values computed in the first part of a larger one, on any device.

use ndarray::{Array2, ArrayD, s};
use slabwise::CompileOptions;
use slabwise::prelude::*;

pub fn numbers(rows: usize, columns: usize) -> Array2<f32> {
    Array2::from_shape_fn((rows, columns), |(i, j)| {
        ((i * columns + j) as f32 * 0.37).sin()
    })
}

/// The device of a program, and whether memory is checked.
pub fn sessions(device: Device) -> [Session; 2] {
    let checked = CompileOptions {
        check_memory: true,
        ..CompileOptions::default()
    };
    [CompileOptions::default(), checked].map(|options| {
        Session::new(device, Params::seeded(0))
            .expect("a session")
            .with_threads(2)
            .with_options(options)
    })
}

/// Prefixes of an input, of a value and of a sorted one, and both halves of a value, in several
/// sizes.
pub fn prefixes(device: Device, sizes: &[usize]) {
    for (&rows, mut session) in sizes
        .iter()
        .flat_map(|rows| sessions(device).map(|session| (rows, session)))
    {
        let columns = 16;
        for k in [1, rows / 2, rows - 1] {
            let trace = Trace::inference();
            let x = trace.input("x", F32, (rows, columns));
            let program = session
                .compile(&trace, [x.slice(0, 0..k).exp()])
                .expect("it compiles");
            let given = numbers(rows, columns);
            let want = given.slice(s![0..k, ..]).mapv(f32::exp).into_dyn();
            let close = |got: ArrayD<f32>, want: &ArrayD<f32>| {
                assert_eq!(got.shape(), want.shape());
                assert!(
                    got.iter()
                        .zip(want)
                        .all(|(a, b)| (a - b).abs() <= 1e-5 * b.abs()),
                    "{rows} rows, {k}: {got} instead of {want}"
                );
            };
            for _ in 0..2 {
                let [y] = session.run(&program, (&given,)).expect("it runs");
                close(y.array::<f32>().expect("f32"), &want);
            }
            let resident = session.upload("x", &given).expect("it fits");
            for _ in 0..2 {
                let [y] = session.run(&program, (&resident,)).expect("it runs");
                close(y.array::<f32>().expect("f32"), &want);
            }
            let [y] = session.run_dynamic(&program, (&given,)).expect("it runs");
            close(y.array::<f32>().expect("f32"), &want);

            let trace = Trace::inference();
            let x = trace.input("x", F32, (rows, columns));
            // A value written by one kernel, and its first part computed in place by the next.
            let value = x.sum_keep(1) * x;
            let program = session
                .compile(&trace, [value.keep().slice(0, ..k).exp()])
                .expect("it compiles");
            let sums = given
                .sum_axis(ndarray::Axis(1))
                .insert_axis(ndarray::Axis(1));
            let want = (&given * &sums)
                .slice(s![0..k, ..])
                .mapv(f32::exp)
                .into_dyn();
            let [y] = session.run(&program, (&given,)).expect("it runs");
            close(y.array::<f32>().expect("f32"), &want);
        }
        let trace = Trace::inference();
        let x = trace.input("x", F32, (rows, columns));
        let halves = x.slice(0, 0..rows / 2 * 2).split(0, 2);
        let best = x.transpose(0, 1).sort(true).slice(1, 0..2).exp();
        let program = session
            .compile(&trace, [halves[0], halves[1], best])
            .expect("it compiles");
        let given = numbers(rows, columns);
        let [first, second, best] = session.run(&program, (&given,)).expect("it runs");
        assert_eq!(
            first.array::<f32>().expect("f32"),
            given.slice(s![0..rows / 2, ..]).into_dyn()
        );
        assert_eq!(
            second.array::<f32>().expect("f32"),
            given.slice(s![rows / 2..rows / 2 * 2, ..]).into_dyn()
        );
        let largest = given
            .column(0)
            .iter()
            .copied()
            .fold(f32::MIN, f32::max)
            .exp();
        assert!((best.array::<f32>().expect("f32")[[0, 0]] - largest).abs() <= 1e-5 * largest);
    }
}
