//! Sums in the epilogues of products, on a GPU where one is required, else on a driver without a
//! device: the same training as with kernels of their own, up to the rounding of sums.

#[path = "../../support/splitmix.rs"]
mod splitmix;

use ndarray::ArrayD;
use slabwise::nn::{BatchNorm2d, Conv2d, Linear};
use slabwise::optim::Sgd;
use slabwise::params::Scope;
use slabwise::prelude::*;
use slabwise::{ChannelsLast, CompileOptions, EpilogueSums, Fuse, Precision, Tuning};
use slabwise_cuda::fake::TestDevice;
use splitmix::Rng;

const BATCH: usize = 12;
const SIDE: usize = 9;
const CHANNELS: usize = 4;
const CLASSES: usize = 5;
const STEPS: usize = 3;

/// Residual blocks with norms, of 1×1 and 3×3 kernels.
struct Network {
    stem: (Conv2d, BatchNorm2d),
    blocks: Vec<[(Conv2d, BatchNorm2d); 2]>,
    head: Linear,
    activation: Activation,
}

/// An elementwise function of a tensor.
type Activation = for<'t> fn(Tensor<'t>) -> Tensor<'t>;

impl Network {
    fn new(at: &Scope, activation: Activation) -> Network {
        let part = |name: String, from: usize, to: usize, side: usize| {
            let at = at / name.as_str();
            let conv = Conv2d::new(&at / "conv", from, to, side).padding(side / 2);
            // The gradient of a bias would be a sum of its own, of which all others follow.
            let conv = if name == "stem" {
                conv
            } else {
                conv.without_bias()
            };
            (conv, BatchNorm2d::new(&at / "norm", to))
        };
        let block = |i: usize| {
            [
                part(format!("block{i}.a"), 16, 24, 3 - 2 * (i % 2)),
                part(format!("block{i}.b"), 24, 16, 3),
            ]
        };
        Network {
            stem: part("stem".into(), CHANNELS, 16, 3),
            blocks: (0..2).map(block).collect(),
            head: Linear::new(at / "head", 16, CLASSES),
            activation,
        }
    }

    /// The logits; of blocks in segments the backward pass computes them again.
    fn logits<'t>(&self, x: Tensor<'t>, segments: bool) -> Tensor<'t> {
        let normed =
            |x: Tensor<'t>, (conv, norm): &(Conv2d, BatchNorm2d)| x.apply(conv).apply(norm);
        let block = |x: Tensor<'t>, [a, b]: &[(Conv2d, BatchNorm2d); 2]| {
            (self.activation)(normed((self.activation)(normed(x, a)), b) + x)
        };
        let stem = (self.activation)(normed(x, &self.stem));
        let last = self.blocks.iter().fold(stem, |x, parts| match segments {
            true => x.checkpoint(|x| block(x, parts)),
            false => block(x, parts),
        });
        last.mean_over([2, 3]).apply(&self.head)
    }
}

/// Layers of a perceptron, of a row for each pixel, with other activations between them.
struct Perceptron {
    layers: Vec<Linear>,
    head: Linear,
}

impl Perceptron {
    fn new(at: &Scope) -> Perceptron {
        let widths = [CHANNELS, 40, 24, 33, 48, 40, 16];
        let layer = |(i, of): (usize, &[usize])| {
            Linear::new(at / format!("layer{i}").as_str(), of[0], of[1])
        };
        Perceptron {
            layers: widths.windows(2).enumerate().map(layer).collect(),
            head: Linear::new(at / "head", 16, CLASSES),
        }
    }

    fn logits<'t>(&self, x: Tensor<'t>) -> Tensor<'t> {
        let rows = x.flatten(2).transpose(1, 2).reshape([-1, CHANNELS as i64]);
        let layers = self.layers.iter().enumerate();
        let x = layers.fold(rows, |x, (i, layer)| match (x.apply(layer), i % 3) {
            (x, 0) => x.relu(),
            (x, 1) => x.gelu(),
            (x, _) => x.silu(),
        });
        let x = x.unflatten(0, [-1, (SIDE * SIDE) as i64]);
        x.mean_over([1]).apply(&self.head)
    }
}

/// A trained network: its layers, their activation if they have norms, their precision, the number
/// around which pixels are, whether blocks are computed again by the backward pass, whether kernels
/// that read the same become one, and a budget.
#[derive(Clone, Copy)]
struct Task {
    of_images: bool,
    activation: Activation,
    precision: Precision,
    offset: f32,
    segments: bool,
    siblings: bool,
    budget: Option<f64>,
}

const IMAGES: Task = Task {
    of_images: true,
    activation: |x| x.relu(),
    precision: Precision::F32,
    offset: 0.0,
    segments: false,
    siblings: true,
    budget: None,
};

const ROWS: Task = Task {
    of_images: false,
    ..IMAGES
};

/// A training in this way: the losses, all weights and state afterwards, and the kernels of a step.
struct Trained {
    losses: Vec<f32>,
    state: Vec<ArrayD<f32>>,
    kernels: usize,
}

type Step = Program<1>;

/// A training step and its session; `None` if a budget cannot be kept.
fn compiled(device: Device, sums: EpilogueSums, task: Task) -> Option<(Session, Step)> {
    // No activation comes so close to 0 that rounding decides whether its gradient passes.
    let params = Params::seeded(10);
    let trace = Trace::training().with_precision(task.precision);
    let images = trace.input("images", F32, (BATCH, CHANNELS, SIDE, SIDE));
    let labels = trace.input("labels", I32, (BATCH,));
    let logits = match task.of_images {
        true => Network::new(&params.root(), task.activation).logits(images, task.segments),
        false => Perceptron::new(&params.root()).logits(images),
    };
    let loss = logits.cross_entropy(labels);
    trace.minimize(loss, Sgd::new(0.05).momentum(0.9));
    let options = CompileOptions {
        channels_last: ChannelsLast::All,
        epilogue_sums: sums,
        tuning: Tuning::Off,
        fuse: Fuse {
            siblings: task.siblings,
            ..Fuse::default()
        },
        ..CompileOptions::default()
    };
    let mut session = Session::new(device, params)
        .expect("a session")
        .with_threads(1)
        .with_options(options);
    if let Some(part) = task.budget {
        session = session.with_budget(Budget::Fraction(part));
    }
    match session.compile(&trace, [loss]) {
        Err(e @ slabwise::Error::Budget { .. }) if task.budget.is_some() => {
            println!("{e}");
            None
        }
        compiled => Some((session, compiled.expect("it compiles"))),
    }
}

fn trained(device: Device, sums: EpilogueSums, task: Task) -> Option<Trained> {
    let (mut session, program) = compiled(device, sums, task)?;
    let mut rng = Rng(11);
    let mut losses = Vec::new();
    for step in 0..STEPS {
        let shape = [BATCH, CHANNELS, SIDE, SIDE];
        let images = ArrayD::from_shape_fn(&shape[..], |_| {
            task.offset + rng.below(2000) as f32 / 1000.0 - 1.0
        });
        let labels: Vec<i32> = (0..BATCH).map(|i| ((i + step) % CLASSES) as i32).collect();
        let [loss] = session.run(&program, (&images, &labels)).expect("a step");
        losses.push(loss.item());
    }
    assert_eq!(
        session.last_run().peak_slab_bytes,
        program.plan().slab_bytes(),
        "measured is planned"
    );
    Some(Trained {
        losses,
        state: state(&session),
        kernels: program.plan().kernels(),
    })
}

/// All weights and state.
fn state(session: &Session) -> Vec<ArrayD<f32>> {
    let names: Vec<String> = session.names().map(String::from).collect();
    let value = |name: &String| session.value(name).expect("it is there");
    names.iter().map(value).collect()
}

/// The largest difference of losses and of weights and state, these as parts of the largest number of
/// each.
fn apart(a: &Trained, b: &Trained) -> f32 {
    let losses = a.losses.iter().zip(&b.losses).map(|(a, b)| (a - b).abs());
    let values = a.state.iter().zip(&b.state).map(|(a, b)| {
        // Momentum of a bias before a norm, whose gradient is 0, is rounding alone.
        let scale = a.iter().fold(1e-2f32, |most, x| most.max(x.abs()));
        let apart = a.iter().zip(b).map(|(a, b)| (a - b).abs());
        apart.fold(0f32, f32::max) / scale
    });
    losses.chain(values).fold(0f32, f32::max)
}

#[test]
fn training_is_the_same_up_to_rounding() {
    let Some(_device) = TestDevice::find() else {
        return;
    };
    let far = 30.0;
    for (name, task, fewer, most) in [
        // Each of five norms has two kernels less: those of the number near the mean and of the sums.
        ("images", IMAGES, 10, 1e-4),
        // Numbers far from zero, whose mean is much larger than their deviation. They round so much that
        // an activation whose gradient jumps at 0 would be on its other side.
        (
            "far",
            Task {
                offset: far,
                activation: |x| x.silu(),
                ..IMAGES
            },
            10,
            1e-4,
        ),
        // The backward pass computes the numbers near the means again.
        (
            "segments",
            Task {
                segments: true,
                ..IMAGES
            },
            0,
            1e-4,
        ),
        (
            "halves",
            Task {
                precision: Precision::Bf16,
                ..IMAGES
            },
            10,
            0.1,
        ),
        // Five layers have one kernel less: that of an activation's gradient with the bias's.
        ("rows", ROWS, 5, 1e-4),
        (
            "rows of halves",
            Task {
                precision: Precision::Bf16,
                ..ROWS
            },
            5,
            0.1,
        ),
    ] {
        let run = |device, sums| trained(device, sums, task).expect("no budget");
        let off = run(Device::Cuda(0), EpilogueSums::Off);
        let all = run(Device::Cuda(0), EpilogueSums::All);
        let cpu = run(Device::Cpu, EpilogueSums::All);
        assert!(
            all.kernels + fewer <= off.kernels,
            "{name}: {} kernels instead of {}",
            all.kernels,
            off.kernels
        );
        // Kernels that round otherwise drift apart in as many steps, by as much as other devices do.
        let [drift, by_sums, by_both] =
            [(&off, &cpu), (&all, &off), (&all, &cpu)].map(|(a, b)| apart(a, b));
        let name = format!("{name}: drift {drift}, with sums in epilogues {by_sums} and {by_both}");
        println!("{name}");
        assert!(
            by_sums.max(by_both) <= 4.0 * drift && drift <= most,
            "{name}"
        );
    }
}

/// The kernels of products and of norms compute activations again that they read the argument of.
#[test]
fn kernels_that_read_the_same_are_one() {
    let Some(_device) = TestDevice::find() else {
        return;
    };
    for task in [IMAGES, ROWS] {
        let run = |siblings| {
            let task = Task { siblings, ..task };
            trained(Device::Cuda(0), EpilogueSums::All, task).expect("no budget")
        };
        let (one, apiece) = (run(true), run(false));
        assert!(
            one.kernels + 3 <= apiece.kernels,
            "{} kernels instead of {}",
            one.kernels,
            apiece.kernels
        );
        let apart = apart(&one, &apiece);
        assert!(apart <= 1e-5, "{apart}");
    }
}

#[test]
fn a_budget_changes_no_bit() {
    let Some(_device) = TestDevice::find() else {
        return;
    };
    for task in [IMAGES, ROWS] {
        let run = |budget| trained(Device::Cuda(0), EpilogueSums::All, Task { budget, ..task });
        let all = run(None).expect("no budget");
        let mut compared = 0;
        for part in [0.95, 0.85, 0.75] {
            if let Some(within) = run(Some(part)) {
                compared += 1;
                assert!(
                    within.losses == all.losses,
                    "{part} of the slab: other losses"
                );
                assert!(
                    within.state == all.state,
                    "{part} of the slab: other weights"
                );
            }
        }
        assert!(compared > 0, "no budget was kept");
    }
}

/// Updates by the kernel of a product wait for the checks of a step, as all others do.
#[test]
fn a_step_that_fails_changes_nothing() {
    let Some(_device) = TestDevice::find() else {
        return;
    };
    for task in [IMAGES, ROWS] {
        fails_without_changes(task);
    }
}

fn fails_without_changes(task: Task) {
    let (mut session, program) =
        compiled(Device::Cuda(0), EpilogueSums::All, task).expect("no budget");
    let images = ArrayD::from_elem(&[BATCH, CHANNELS, SIDE, SIDE][..], 0.5f32);
    let good = vec![1; BATCH];
    session.run(&program, (&images, &good)).expect("a step");
    let before = state(&session);
    // The first run of a kind, and those that are replayed.
    for _ in 0..3 {
        let mut bad = good.clone();
        bad[BATCH - 1] = CLASSES as i32;
        let run = session.run(&program, (&images, &bad)).map(|_| ());
        let error = run
            .and_then(|()| session.synchronize())
            .expect_err("a label of no class");
        assert!(error.to_string().contains("labels"), "{error}");
        assert!(state(&session) == before, "a failed step changed a value");
    }
    session.run(&program, (&images, &good)).expect("a step");
    assert!(state(&session) != before);
}
