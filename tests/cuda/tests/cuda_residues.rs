//! Gradients of the images of strided convolutions: one product for each residue of a position, side by
//! side in a recorded step, on a GPU where one is required, else on a driver without a device, which
//! runs the work of a graph in the reverse of its order where no dependency forbids it.

#[path = "../../support/splitmix.rs"]
mod splitmix;

use ndarray::ArrayD;
use slabwise::prelude::*;
use slabwise::tensor::ConvOptions;
use slabwise::{CompileOptions, Precision, Tuning};
use slabwise_cuda::fake::TestDevice;
use splitmix::Rng;

/// Small integers, of which sums have no rounding.
fn integers(shape: &[usize], seed: u64) -> ArrayD<f32> {
    let mut rng = Rng(seed);
    ArrayD::from_shape_fn(shape, |_| rng.below(3) as f32 - 1.0)
}

/// Gradients of an image by strided convolutions of 3×3 and 1×1 elements, and a sum of them, computed
/// behind them, of several runs.
fn gradients(
    device: Device,
    precision: Precision,
    [batch, from, to]: [usize; 3],
) -> Vec<ArrayD<f32>> {
    const SIDE: usize = 9;
    let options = CompileOptions {
        tuning: Tuning::Off,
        ..CompileOptions::default()
    };
    let mut session = Session::new(device, Params::seeded(0))
        .expect("a session")
        .with_threads(1)
        .with_options(options);
    let trace = Trace::inference().with_precision(precision);
    let image = trace.input("image", F32, (batch, from, SIDE, SIDE));
    let wide = trace.input("wide", F32, (to, from, 3, 3));
    let narrow = trace.input("narrow", F32, (to, from, 1, 1));
    let by_two = ConvOptions::default().stride(2);
    let results = image.conv2d_with(wide, by_two.padding(1)) + image.conv2d_with(narrow, by_two);
    let [gradient] = trace.gradients((results * results).sum(), [image]);
    let sums = (gradient * 0.5).sum_over([0, 2, 3]);
    let program = session
        .compile(&trace, [gradient, sums])
        .expect("it compiles");
    let mut all = Vec::new();
    for run in 0..4 {
        let [x, a, b] = [
            integers(&[batch, from, SIDE, SIDE], 3 + run),
            integers(&[to, from, 3, 3], 23),
            integers(&[to, from, 1, 1], 29),
        ];
        let results = session.run(&program, (&x, &a, &b)).expect("a run");
        all.extend(results.map(|value| value.array::<f32>().expect("floats")));
    }
    all
}

#[test]
fn residues_run_side_by_side_with_the_same_bits() {
    let Some(_device) = TestDevice::find() else {
        return;
    };
    // The second has few positions and many channels, so that sums are split.
    for sizes in [[3, 8, 16], [1, 32, 64]] {
        for precision in [Precision::F32, Precision::Bf16] {
            let expected = gradients(Device::Cpu, precision, sizes);
            let got = gradients(Device::Cuda(0), precision, sizes);
            assert_eq!(got, expected, "{sizes:?} {precision:?}");
        }
    }
}
