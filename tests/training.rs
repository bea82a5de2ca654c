//! Training on real digits; a process killed while it saves leaves a loadable file.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};

use ndarray::{ArrayD, Axis, Slice};
use slabwise::data::{Mnist, epoch_seed};
use slabwise::prelude::*;
use slabwise_models::{Model, Network, OptimizerKind};

fn mnist() -> Mnist {
    Mnist::load(Path::new(env!("CARGO_MANIFEST_DIR")).join("data/mnist"))
        .expect("the digits are in the repository")
}

/// Trains for so many steps and returns the accuracy on the first test images.
fn accuracy(
    model: Model,
    optimizer: OptimizerKind,
    batch: usize,
    steps: usize,
    tests: usize,
) -> f32 {
    let digits = mnist();
    let params = Params::seeded(1);
    let network: Network = model.build(&params);
    let mut session = Session::new(Device::Cpu, params)
        .expect("a session")
        .with_threads(2);
    let bound = Dim::bounded("batch", batch as u32);
    let train = network
        .training(&mut session, bound, optimizer)
        .expect("it compiles");
    let infer = network.inference(&mut session, bound).expect("it compiles");
    let shaped = |n: usize, pixels: ArrayD<f32>| {
        let lengths: Vec<usize> = [n].into_iter().chain(model.example()).collect();
        pixels
            .into_shape_with_order(lengths)
            .expect("as many pixels")
    };
    for (images, labels) in digits.train.shuffled(batch, epoch_seed(3, 0)).take(steps) {
        let images = shaped(labels.len(), images.into_dyn());
        let loss = session.run(&train, (&images, &labels)).expect("a step")[0].item();
        assert!(loss.is_finite(), "{model}: the loss is {loss}");
    }
    let (mut right, mut seen) = (0, 0);
    for (images, labels) in digits.test.batches(batch) {
        // The last part is smaller than the bound.
        let n = labels.len().min(tests - seen);
        let images = shaped(labels.len(), images.into_dyn());
        let images = images.slice_axis(Axis(0), Slice::from(..n));
        let [logits] = session.run(&infer, (&images,)).expect("a run");
        for (row, &label) in logits.view::<f32>().expect("f32").outer_iter().zip(&labels) {
            let best = row
                .iter()
                .enumerate()
                .max_by(|a, b| a.1.total_cmp(b.1))
                .map(|(class, _)| class as i32);
            right += usize::from(best == Some(label));
        }
        seen += n;
        if seen == tests {
            break;
        }
    }
    assert_eq!(seen, tests);
    right as f32 / tests as f32
}

#[test]
fn a_perceptron_learns_digits() {
    let reached = accuracy(Model::Mlp, OptimizerKind::Adam, 64, 300, 1000);
    assert!(reached > 0.9, "{reached} of 1000 test images");
}

#[test]
fn a_convolution_network_learns_digits() {
    let reached = accuracy(Model::Cnn, OptimizerKind::Adam, 32, 120, 300);
    assert!(reached > 0.9, "{reached} of 300 test images");
}

/// Set, to the folder to save in, for the process that
/// [`a_killed_process_leaves_a_whole_checkpoint`] starts.
const CHILD: &str = "SLABWISE_TEST_CHECKPOINTS";
const CHECKPOINT: &str = "last.safetensors";

fn small() -> (Session, Program<1>) {
    let params = Params::seeded(4);
    let network = Model::Mlp.build(&params);
    let mut session = Session::new(Device::Cpu, params)
        .expect("a session")
        .with_threads(1);
    let program = network
        .training(&mut session, 4u32, OptimizerKind::Adam)
        .expect("it compiles");
    (session, program)
}

/// Trains and saves after every step until it is killed.
fn save_for_ever(folder: &str) -> ! {
    let (mut session, program) = small();
    let (images, labels) = Model::Mlp.batch(4, 1);
    for step in 1u64.. {
        session.run(&program, (&images, &labels)).expect("a step");
        session
            .save(Path::new(folder).join(CHECKPOINT))
            .expect("it is saved");
        println!("\nsaved {step}");
    }
    unreachable!("there is always another step");
}

#[test]
fn a_killed_process_leaves_a_whole_checkpoint() {
    if let Ok(folder) = std::env::var(CHILD) {
        save_for_ever(&folder);
    }
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join(CHECKPOINT);
    let (mut session, program) = small();
    let (images, labels) = Model::Mlp.batch(4, 1);
    for round in 0..6u64 {
        let mut child = Command::new(std::env::current_exe().expect("this program"))
            .args([
                "--exact",
                "a_killed_process_leaves_a_whole_checkpoint",
                "--nocapture",
            ])
            .env(CHILD, folder.path())
            .stdout(Stdio::piped())
            .spawn()
            .expect("it starts");
        let lines = BufReader::new(child.stdout.take().expect("piped")).lines();
        let saved = lines
            .map_while(Result::ok)
            .find(|line| line.starts_with("saved"));
        assert_eq!(saved.as_deref(), Some("saved 1"), "round {round}");
        // Kills at a different moment of a later save each time.
        std::thread::sleep(std::time::Duration::from_micros(300 + 1700 * round));
        child.kill().expect("it was running");
        let status = child.wait().expect("it ended");
        assert!(!status.success(), "round {round}: killed, not ended");
        session
            .load(&path)
            .unwrap_or_else(|e| panic!("round {round}: {e}"));
        // Weights and moments are of one step, because training from the same start gives the same.
        let steps = session.value("optim.step").expect("it is there").sum();
        assert!(steps >= 1.0);
        let (mut again, same) = small();
        for _ in 0..steps as usize {
            again.run(&same, (&images, &labels)).expect("a step");
        }
        for name in session.names() {
            assert_eq!(
                session.value(name).expect("it is there"),
                again.value(name).expect("it is there"),
                "round {round}: {name}"
            );
        }
        session
            .run(&program, (&images, &labels))
            .expect("training goes on");
    }
}
