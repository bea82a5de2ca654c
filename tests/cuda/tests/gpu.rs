//! Sessions on a GPU, where there is one: properties that the emulator and a driver without a
//! device cannot show. The tests of `slabwise-cuda` do the same kernel by kernel. Without a GPU
//! these print a message and pass.

use slabwise::prelude::*;
use slabwise_models::{Examples, Model, OptimizerKind, noise};

/// The first device. Without one, prints a message and returns `None`, or panics if a device is
/// required.
fn gpu() -> Option<Device> {
    slabwise_cuda::emulator::gpu_usable().then(|| Device::cuda(0).expect("it is usable"))
}

/// The losses of some steps, on images with each pixel changed by up to so many roundings.
fn losses(device: Device, model: Model, batch: u32, steps: u64, roundings: f32) -> Vec<f32> {
    let params = Params::seeded(1);
    let network = model.build(&params);
    let mut session = Session::new(device, params).expect("a session");
    let train = network
        .training(
            &mut session,
            Dim::bounded("batch", batch),
            OptimizerKind::Adam,
        )
        .expect("it compiles");
    let losses = (0..steps)
        .map(|step| {
            // Some batches are smaller: another graph is recorded, or reused.
            let (images, labels) = model.batch(
                if step % 10 == 9 {
                    batch as usize / 2
                } else {
                    batch as usize
                },
                step,
            );
            let images = match images {
                Examples::Images(images) => {
                    let mut draw = noise(step);
                    Examples::Images(images.mapv(|pixel| {
                        pixel * (1.0 + (2.0 * draw() - 1.0) * roundings * f32::EPSILON)
                    }))
                }
                tokens => tokens,
            };
            session.run(&train, (&images, &labels)).expect("a step")[0].item()
        })
        .collect();
    assert_eq!(
        session.last_run().peak_slab_bytes,
        session.slab_bytes(),
        "kernels receive the planned peak"
    );
    losses
}

/// Losses drift apart as roundings do: the first steps are compared as closely as single kernels
/// are, the others as curves. The amplification of a rounding in a model's first steps is measured
/// on the CPU: Adam divides each gradient by its size, so that the sign of a gradient near 0
/// matters, and norms over few numbers amplify the rest.
fn assert_same_curve(model: Model, batch: u32, steps: u64) {
    let Some(device) = gpu() else { return };
    let (expected, got) = (
        losses(Device::Cpu, model, batch, steps, 0.0),
        losses(device, model, batch, steps, 0.0),
    );
    let nudged = [1.0, 2.0, 4.0].map(|roundings| losses(Device::Cpu, model, batch, 3, roundings));
    for (step, (a, b)) in got.iter().zip(&expected).enumerate() {
        let drift = nudged
            .iter()
            .filter_map(|losses| losses.get(step))
            .map(|nudged| (nudged - b).abs() / b.abs().max(1.0))
            .fold(0.0, f32::max);
        let tolerance = if step < 3 {
            drift.mul_add(2.0, 1e-4)
        } else {
            2e-2
        };
        assert!(
            (a - b).abs() <= tolerance * b.abs().max(1.0),
            "{model}, step {step}: {a} on the GPU, {b} on the CPU"
        );
    }
    assert_eq!(
        got,
        losses(device, model, batch, steps, 0.0),
        "{model}: the same seed gives the same bits"
    );
}

#[test]
fn a_perceptron_learns_as_on_the_cpu() {
    assert_same_curve(Model::Mlp, 64, 100);
}

#[test]
fn a_convolution_network_learns_as_on_the_cpu() {
    assert_same_curve(Model::Cnn, 64, 100);
}

#[test]
fn a_residual_network_learns_as_on_the_cpu() {
    assert_same_curve(Model::ResNet20, 16, 10);
}

#[test]
fn a_transformer_learns_as_on_the_cpu() {
    assert_same_curve(Model::Gpt(slabwise_models::Gpt::SMALL), 2, 5);
}
