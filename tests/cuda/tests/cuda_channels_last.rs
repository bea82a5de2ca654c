//! Images with their channels innermost, on a GPU where one is required, else on a driver without a
//! device: the same results as with channels outermost, and a plan that is measured.

#[path = "../../support/splitmix.rs"]
mod splitmix;

use ndarray::ArrayD;
use slabwise::prelude::*;
use slabwise::tensor::ConvOptions;
use slabwise::{ChannelsLast, CompileOptions, Precision, Tuning};
use slabwise_cuda::fake::TestDevice;
use splitmix::Rng;

/// A session that times no products.
fn session(channels_last: ChannelsLast, tf32: bool) -> Session {
    let options = CompileOptions {
        channels_last,
        tf32,
        tuning: Tuning::Off,
        ..CompileOptions::default()
    };
    Session::new(Device::Cuda(0), Params::seeded(0))
        .expect("a session")
        .with_threads(1)
        .with_options(options)
}

/// Small integers, of which sums have no rounding.
fn integers(shape: &[usize], seed: u64) -> ArrayD<f32> {
    let mut rng = Rng(seed);
    ArrayD::from_shape_fn(shape, |_| rng.below(3) as f32 - 1.0)
}

/// The weights of all layers of a network.
const WEIGHTS: usize = 20_000;

/// A network under construction.
struct Network<'t> {
    rng: Rng,
    weights: Tensor<'t>,
    used: usize,
}

impl<'t> Network<'t> {
    /// A weight of this shape, the next of all weights.
    fn weight(&mut self, shape: [usize; 4]) -> Tensor<'t> {
        let start = self.used;
        self.used += shape.iter().product::<usize>();
        self.weights.slice(0, start..self.used).reshape(shape)
    }

    /// A random network of convolutions, poolings and pointwise operations over images, with values
    /// of several layouts: the last value. With `is_exact` nothing is rounded.
    fn random(
        &mut self,
        image: Tensor<'t>,
        [first, side]: [usize; 2],
        is_exact: bool,
    ) -> Tensor<'t> {
        let (mut channels, mut side) = (8 << self.rng.below(2), side);
        let weight = self.weight([channels, first, 3, 3]);
        let same = |k: usize| ConvOptions::default().padding(k / 2);
        // Rounding must not decide between two values where there is any.
        let bound = |x: Tensor<'t>| {
            if is_exact {
                x.clamp(-2.0, 2.0)
            } else {
                (x * 0.1).tanh()
            }
        };
        let mut x = bound(image.conv2d_with(weight, same(3)));
        for _ in 0..6 {
            x = match self.rng.below(if is_exact { 6 } else { 9 }) {
                0 | 1 => {
                    let k = 1 + 2 * self.rng.below(2);
                    let groups = 1 + self.rng.below(2);
                    let out = 8 << self.rng.below(2);
                    let weight = self.weight([out, channels / groups, k, k]);
                    channels = out;
                    bound(x.conv2d_with(weight, same(k).groups(groups)))
                }
                2 if side > 5 => {
                    side = side.div_ceil(2);
                    let weight = self.weight([channels, channels, 3, 3]);
                    bound(x.conv2d_with(weight, same(3).stride(2)))
                }
                3 if side > 4 => {
                    side /= 2;
                    if is_exact {
                        x.max_pool2d(2)
                    } else {
                        x.avg_pool2d(2)
                    }
                }
                4 => bound(x + self.weight([1, channels, 1, 1])),
                5 => x + x.transpose(2, 3),
                6 => {
                    let mean = |x: Tensor<'t>| {
                        let mean = x.mean_over(3).mean_over(2).mean_over(0);
                        mean.reshape([1, channels, 1, 1])
                    };
                    let centred = x - mean(x);
                    centred * (mean(centred.square()) + 0.1).rsqrt()
                }
                7 => x.softmax(1) * x,
                _ if is_exact => x.relu(),
                _ => x.gelu(),
            };
        }
        x
    }
}

/// A network's results, and the number of its images with innermost channels; `None` where the budget
/// is too small.
fn results(
    seed: u64,
    is_exact: bool,
    channels_last: ChannelsLast,
    (images, budget): (usize, Option<f64>),
) -> Option<([ArrayD<f32>; 4], usize)> {
    let precision = match is_exact {
        true => Precision::ALL[seed as usize % Precision::ALL.len()],
        false => Precision::F32,
    };
    let trace = Trace::training().with_precision(precision);
    let mut rng = Rng(seed);
    let [batch, channels, side] = [images, 1 + rng.below(4), 8 + rng.below(5)];
    let shape = [batch, channels, side, side];
    let image = trace.input("image", F32, shape);
    let weights = trace.input("weights", F32, (WEIGHTS,));
    let mut network = Network {
        rng,
        weights,
        used: 0,
    };
    let last = network.random(image, [channels, side], is_exact);
    let loss = if is_exact {
        last.sum()
    } else {
        last.square().mean()
    };
    let [of_image, of_weights] = trace.gradients(loss, [image, weights]);
    let mut session = session(channels_last, is_exact && seed.is_multiple_of(2));
    if let Some(part) = budget {
        session = session.with_budget(Budget::Fraction(part));
    }
    let outputs = [loss, last, of_image, of_weights];
    let program = match session.compile(&trace, outputs) {
        Err(slabwise::Error::Budget { .. }) if budget.is_some() => return None,
        compiled => compiled.expect("it compiles"),
    };
    let feed = (
        &integers(&shape, 2 * seed),
        &integers(&[WEIGHTS], 2 * seed + 1),
    );
    let results = session.run(&program, feed).expect("a run");
    let results = results.map(|result| result.array::<f32>().expect("floats"));
    assert_eq!(
        session.last_run().peak_slab_bytes,
        program.plan().slab_bytes(),
        "measured is planned\n{}",
        program.plan()
    );
    Some((results, program.plan().channels_last()))
}

#[test]
fn exact_results_do_not_depend_on_layouts() {
    let Some(_device) = TestDevice::find() else {
        return;
    };
    let mut stored = 0;
    for seed in 0..5 {
        let (off, none) = results(seed, true, ChannelsLast::Off, (2, None)).expect("no budget");
        let (all, images) = results(seed, true, ChannelsLast::All, (2, None)).expect("no budget");
        assert_eq!(none, 0);
        assert!(
            off == all,
            "seed {seed}: other results with {images} images"
        );
        stored += images;
    }
    assert!(stored > 30, "{stored} images with innermost channels");
}

#[test]
fn norms_differ_in_rounding_alone() {
    let Some(_device) = TestDevice::find() else {
        return;
    };
    let mut stored = 0;
    for seed in 100..103 {
        let (off, _) = results(seed, false, ChannelsLast::Off, (2, None)).expect("no budget");
        let (all, images) = results(seed, false, ChannelsLast::All, (2, None)).expect("no budget");
        for (a, b) in off.iter().zip(&all) {
            let scale = a.iter().fold(0f32, |most, x| most.max(x.abs()));
            let apart = a.iter().zip(b).map(|(a, b)| (a - b).abs());
            let apart = apart.fold(0f32, f32::max);
            assert!(apart <= 1e-4 * scale, "seed {seed}: {apart} of {scale}");
        }
        stored += images;
    }
    assert!(stored > 10, "{stored} images with innermost channels");
}

#[test]
fn a_budget_changes_no_layout() {
    let Some(_device) = TestDevice::find() else {
        return;
    };
    let mut compared = 0;
    for seed in 100..103 {
        let all = results(seed, false, ChannelsLast::All, (24, None));
        for part in [0.95, 0.85] {
            let within = results(seed, false, ChannelsLast::All, (24, Some(part)));
            if within.is_some() {
                compared += 1;
                let [within, all] = [&within, &all].map(|r| r.as_ref().map(|(bits, _)| bits));
                assert!(within == all, "seed {seed}, {part} of the slab: other bits");
            }
        }
    }
    assert!(compared > 2, "{compared} budgets were kept");
}
