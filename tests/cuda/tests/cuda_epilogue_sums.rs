//! Sums in the epilogues of convolutions, on a GPU where one is required, else on a driver without a
//! device: the same training as with kernels of their own, up to the rounding of sums.

#[path = "../../support/splitmix.rs"]
mod splitmix;

use ndarray::ArrayD;
use slabwise::nn::{BatchNorm2d, Conv2d, Linear};
use slabwise::optim::Sgd;
use slabwise::params::Scope;
use slabwise::prelude::*;
use slabwise::{ChannelsLast, CompileOptions, EpilogueSums, Precision, Tuning};
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
}

impl Network {
    fn new(at: &Scope) -> Network {
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
        }
    }

    /// The logits; of blocks in segments the backward pass computes them again.
    fn logits<'t>(&self, x: Tensor<'t>, segments: bool) -> Tensor<'t> {
        let normed =
            |x: Tensor<'t>, (conv, norm): &(Conv2d, BatchNorm2d)| x.apply(conv).apply(norm);
        let block = |x: Tensor<'t>, [a, b]: &[(Conv2d, BatchNorm2d); 2]| {
            (normed(normed(x, a).relu(), b) + x).relu()
        };
        let stem = normed(x, &self.stem).relu();
        let last = self.blocks.iter().fold(stem, |x, parts| match segments {
            true => x.checkpoint(|x| block(x, parts)),
            false => block(x, parts),
        });
        last.mean_over([2, 3]).apply(&self.head)
    }
}

/// A training in this way: the losses, all weights and state afterwards, and the kernels of a step.
struct Trained {
    losses: Vec<f32>,
    state: Vec<ArrayD<f32>>,
    kernels: usize,
}

type Step = Program<1>;

/// A training step and its session; `None` if a budget cannot be kept.
fn compiled(
    device: Device,
    sums: EpilogueSums,
    precision: Precision,
    (segments, budget): (bool, Option<f64>),
) -> Option<(Session, Step)> {
    // No activation comes so close to 0 that rounding decides whether its gradient passes.
    let params = Params::seeded(10);
    let network = Network::new(&params.root());
    let trace = Trace::training().with_precision(precision);
    let images = trace.input("images", F32, (BATCH, CHANNELS, SIDE, SIDE));
    let labels = trace.input("labels", I32, (BATCH,));
    let loss = network.logits(images, segments).cross_entropy(labels);
    trace.minimize(loss, Sgd::new(0.05).momentum(0.9));
    let options = CompileOptions {
        channels_last: ChannelsLast::All,
        epilogue_sums: sums,
        tuning: Tuning::Off,
        ..CompileOptions::default()
    };
    let mut session = Session::new(device, params)
        .expect("a session")
        .with_threads(1)
        .with_options(options);
    if let Some(part) = budget {
        session = session.with_budget(Budget::Fraction(part));
    }
    match session.compile(&trace, [loss]) {
        Err(slabwise::Error::Budget { .. }) if budget.is_some() => None,
        compiled => Some((session, compiled.expect("it compiles"))),
    }
}

fn trained(
    device: Device,
    sums: EpilogueSums,
    precision: Precision,
    (offset, segments, budget): (f32, bool, Option<f64>),
) -> Option<Trained> {
    let (mut session, program) = compiled(device, sums, precision, (segments, budget))?;
    let mut rng = Rng(11);
    let mut losses = Vec::new();
    for step in 0..STEPS {
        let shape = [BATCH, CHANNELS, SIDE, SIDE];
        let images = ArrayD::from_shape_fn(&shape[..], |_| {
            offset + rng.below(2000) as f32 / 1000.0 - 1.0
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
    for (precision, offset, segments, most) in [
        (Precision::F32, 0.0, false, 1e-4),
        // Numbers far from zero, whose mean is much larger than their deviation.
        (Precision::F32, 30.0, false, 1e-4),
        (Precision::F32, 0.0, true, 1e-4),
        (Precision::Bf16, 0.0, false, 0.1),
    ] {
        let run = |device, sums| {
            trained(device, sums, precision, (offset, segments, None)).expect("no budget")
        };
        let off = run(Device::Cuda(0), EpilogueSums::Off);
        let all = run(Device::Cuda(0), EpilogueSums::All);
        let cpu = run(Device::Cpu, EpilogueSums::All);
        let what = format!("{precision:?}, offset {offset}, segments {segments}");
        // Each of five norms has two kernels less: those of the number near the mean and of the sums,
        // unless the backward pass computes them again.
        let fewer = if segments { 0 } else { 10 };
        assert!(
            all.kernels + fewer <= off.kernels,
            "{what}: {} kernels instead of {}",
            all.kernels,
            off.kernels
        );
        // Kernels that round otherwise drift apart in as many steps, by as much as other devices do.
        let [drift, by_sums, by_both] =
            [(&off, &cpu), (&all, &off), (&all, &cpu)].map(|(a, b)| apart(a, b));
        let what = format!("{what}: drift {drift}, with sums in epilogues {by_sums} and {by_both}");
        println!("{what}");
        assert!(
            by_sums.max(by_both) <= 4.0 * drift && drift <= most,
            "{what}"
        );
    }
}

#[test]
fn a_budget_changes_no_bit() {
    let Some(_device) = TestDevice::find() else {
        return;
    };
    let run = |budget| {
        trained(
            Device::Cuda(0),
            EpilogueSums::All,
            Precision::F32,
            (0.0, false, budget),
        )
    };
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

/// Updates by the kernel of a convolution wait for the checks of a step, as all others do.
#[test]
fn a_step_that_fails_changes_nothing() {
    let Some(_device) = TestDevice::find() else {
        return;
    };
    let all = EpilogueSums::All;
    let (mut session, program) =
        compiled(Device::Cuda(0), all, Precision::F32, (false, None)).expect("no budget");
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
