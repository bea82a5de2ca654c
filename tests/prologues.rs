//! Prologue fusion under a budget: convolutions compute their image themselves, so that it is never
//! in memory, and no bit of any result depends on it.

mod support;

use ndarray::{Array1, Array2};
use slabwise::nn::{BatchNorm2d, Conv2d, Linear};
use slabwise::optim::Sgd;
use slabwise::prelude::*;
use slabwise::{CompileOptions, Error, Measures};
use support::networks::{Trained, WIDTH, batches, examples, learn, quick, weights};

const BATCH: usize = 256;
const CHANNELS: usize = 8;

/// The parts of the network besides convolutions with a norm and an activation behind each.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Form {
    Plain,
    /// The input of two layers is added to their output.
    Residual,
    /// Dropout masks between an activation and the next convolution.
    Dropout,
    /// A state from which an image is computed; the loss depends on its next value.
    Watched,
    /// A convolution whose image is computed with its own weight.
    Own,
    /// The batch in two parts, and a first image computed from the input.
    Parts,
    /// Two layers inside of a checkpoint.
    Checkpoint,
}

impl Form {
    /// Rows and columns of an image. Small images have several channels.
    fn side(self) -> usize {
        if self == Form::Parts { 4 } else { 8 }
    }
}

struct Network {
    form: Form,
    stem: (Conv2d, BatchNorm2d),
    layers: Vec<(Conv2d, BatchNorm2d)>,
    last: Conv2d,
    head: Linear,
}

impl Network {
    fn new(params: &Params, form: Form) -> Network {
        let at = params.root();
        let layer = |name: &str, inputs| {
            let at = &at / name;
            (
                Conv2d::new(&at / "conv", inputs, CHANNELS, 3)
                    .padding(1)
                    .without_bias(),
                BatchNorm2d::new(&at / "norm", CHANNELS),
            )
        };
        Network {
            form,
            stem: layer("stem", WIDTH / form.side().pow(2)),
            layers: ["a", "b", "c", "d"]
                .map(|name| layer(name, CHANNELS))
                .into(),
            last: Conv2d::new(&at / "last", CHANNELS, 1, 8).without_bias(),
            head: Linear::new(&at / "head", CHANNELS, WIDTH),
        }
    }

    /// The loss of some examples.
    fn loss<'t>(&self, trace: &'t Trace, x: Tensor<'t>, labels: Tensor<'t>) -> Tensor<'t> {
        let scale = (self.form == Form::Watched)
            .then(|| trace.state("scale", F32, (), Init::Constant(1.0)));
        let side = self.form.side();
        let images = x.reshape([-1, (WIDTH / side.pow(2)) as i64, side as i64, side as i64]);
        let images = if self.form == Form::Parts {
            (images - 0.3).relu()
        } else {
            images
        };
        let mut h = images.apply(&self.stem.0).apply(&self.stem.1).relu();
        for (i, pair) in self.layers.chunks(2).enumerate() {
            let [first, second] = pair else {
                unreachable!()
            };
            let inside = |h: Tensor<'t>| {
                let mut made = h.apply(&first.0).apply(&first.1);
                if let Some(scale) = scale.filter(|_| i == 0) {
                    made = made * scale.value();
                }
                made = made.relu();
                made = if self.form == Form::Dropout {
                    made.dropout(0.3)
                } else {
                    made
                };
                made.apply(&second.0).apply(&second.1)
            };
            let out = if self.form == Form::Checkpoint && i == 1 {
                h.checkpoint(inside)
            } else {
                inside(h)
            };
            h = if self.form == Form::Residual {
                (out + h).relu()
            } else {
                out.relu()
            };
        }
        let mut logits = h.avg_pool2d(side).flatten(1).apply(&self.head);
        if self.form == Form::Own {
            let image = (h * trace.param(self.last.weight())).relu();
            logits = logits * (image.apply(&self.last).flatten(1) + 1.0);
        }
        let loss = logits.cross_entropy(labels);
        scale.map_or(loss, |scale| {
            let next = scale.value() * 0.9 + x.mean() * 0.1;
            scale.set(next);
            loss * next
        })
    }
}

/// Trains for three steps.
fn train(budget: Budget, options: CompileOptions, form: Form) -> Result<Trained> {
    let params = Params::seeded(5);
    let network = Network::new(&params, form);
    learn(
        |session| session.with_budget(budget).with_options(options),
        params,
        [
            if form == Form::Parts {
                4 * BATCH
            } else {
                BATCH
            },
            3,
        ],
        |trace, x, labels| {
            let optimizer = Sgd::new(0.1).momentum(0.9);
            if form == Form::Parts {
                let (x, labels) = (x.split(0, 2), labels.split(0, 2));
                return trace.minimize_in_parts(2, optimizer, |part| {
                    network.loss(trace, x[part], labels[part])
                });
            }
            let loss = network.loss(trace, x, labels);
            trace.minimize(loss, optimizer);
            loss
        },
    )
}

/// The plans for these budgets that use prologue fusion. All give the bits of `all`, and so do the
/// plans without prologues.
fn same_within(percents: &[u64], form: Form, options: CompileOptions) -> Vec<Trained> {
    let all = train(Budget::Unlimited, options, form).expect("it compiles");
    let once = all.program.plan().slab_bytes();
    assert!(all.losses[0] != all.losses[2] && all.program.plan().budget_report().prologues == 0);
    let mut found = Vec::new();
    for &percent in percents {
        for prologue_fusion in [true, false] {
            let within = match train(
                Budget::Fraction(percent as f64 / 100.0),
                CompileOptions {
                    measures: Measures {
                        prologue_fusion,
                        ..options.measures
                    },
                    ..options
                },
                form,
            ) {
                Ok(within) => within,
                Err(Error::Budget { budget, needed, .. }) => {
                    assert!(budget < needed, "{budget} {needed}");
                    continue;
                }
                Err(other) => panic!("{form:?} within {percent} %: {other}"),
            };
            let plan = within.program.plan();
            assert!(
                options.check_memory || plan.slab_bytes() <= once * percent / 100,
                "{plan}"
            );
            assert_eq!(within.session.last_run().peak_slab_bytes, plan.slab_bytes());
            assert_eq!(
                within.losses, all.losses,
                "{form:?} within {percent} %, prologues: {prologue_fusion}"
            );
            for ((name, within), (_, all)) in within.weights.iter().zip(&all.weights) {
                assert!(
                    within == all,
                    "{form:?} within {percent} %, prologues: {prologue_fusion}: {name}"
                );
            }
            assert!(
                prologue_fusion || plan.budget_report().prologues == 0,
                "{plan}"
            );
            if plan.budget_report().prologues > 0 {
                found.push(within);
            }
        }
    }
    found
}

#[test]
fn images_behind_norms_are_not_stored_and_no_bit_changes() {
    for form in [Form::Plain, Form::Residual] {
        let found = same_within(&[70, 50], form, quick());
        assert!(!found.is_empty(), "{form:?}");
        for within in found {
            let plan = within.program.plan();
            assert!(
                plan.to_string().contains("prologues") && plan.budget_report().prologues >= 4,
                "{plan}"
            );
            // The image of the second convolution of each pair has no bytes.
            let stored = |layer: &str| {
                plan.dag()
                    .buffers
                    .iter()
                    .any(|b| b.name.starts_with(&format!("{layer}.norm.relu")))
            };
            assert!(!stored("a") && !stored("c"), "{}", plan.dag());
        }
    }
}

#[test]
fn guards_between_buffers_stay_as_they_are() {
    assert!(
        !same_within(
            &[70],
            Form::Plain,
            CompileOptions {
                check_memory: true,
                ..quick()
            }
        )
        .is_empty()
    );
}

/// Dropout masks drawn in a prologue equal those of the backward pass. The least share that a plan
/// can meet with prologues depends on the processor.
#[test]
fn recomputed_random_numbers_are_equal() {
    assert!(!same_within(&[75, 70, 50], Form::Dropout, quick()).is_empty());
}

/// Values of a checkpointed segment are recomputed in a prologue too, or stored.
#[test]
fn checkpointed_segments_train_to_the_same_bits() {
    assert!(!same_within(&[75, 60], Form::Checkpoint, quick()).is_empty());
}

/// A convolution that assigns the weight with which its image is computed needs the stored image;
/// the others do not.
#[test]
fn an_image_computed_from_an_updated_weight_is_stored() {
    assert!(!same_within(&[60, 45], Form::Own, quick()).is_empty());
}

/// A state is written after its last reader. An image of the state that is needed after that is
/// stored.
#[test]
fn a_state_that_an_image_is_computed_from_is_written_after_its_last_reader() {
    assert!(!same_within(&[70, 50], Form::Watched, quick()).is_empty());
}

/// Kernels of a part depend on those of the part before, and so do the kernels that they are fused
/// into.
#[test]
fn parts_of_a_batch_follow_one_another() {
    let found = same_within(&[75], Form::Parts, quick());
    assert!(!found.is_empty());
    for within in found {
        let dag = within.program.plan().dag();
        let first = dag
            .tasks
            .iter()
            .filter(|task| task.name.starts_with("stem.conv.conv2d") && task.reads.len() == 1);
        let waiting = first.clone().filter(|task| !task.after.is_empty()).count();
        assert!(first.count() >= 2 && waiting >= 1, "{dag}");
    }
}

/// Steps on whole batches and on smaller ones, then an inference with the weights under a budget.
fn in_batches(
    budget: Budget,
    batch: Dim,
    options: CompileOptions,
) -> Result<(Vec<u32>, Vec<Vec<u32>>, usize)> {
    let params = Params::seeded(5);
    let network = Network::new(&params, Form::Plain);
    let mut session = Session::new(Device::Cpu, params)?
        .with_threads(2)
        .with_options(options)
        .with_budget(budget);
    let trace = Trace::training();
    let (x, labels) = (
        trace.input("x", F32, (batch, WIDTH)),
        trace.input("labels", I32, (batch,)),
    );
    let loss = network.loss(&trace, x, labels);
    trace.minimize(loss, Sgd::new(0.1));
    let program = session.compile(&trace, [loss])?;
    let mut losses = Vec::new();
    for (x, labels) in batches(BATCH, &[BATCH, 100, 1, BATCH]) {
        losses.push(session.run(&program, (&x, &labels))?[0].item().to_bits());
    }
    Ok((
        losses,
        weights(&session),
        program.plan().budget_report().prologues,
    ))
}

#[test]
fn batches_below_their_bound_train_to_the_same_bits() {
    let whole = CompileOptions {
        measures: Measures {
            micro_batch: false,
            ..Measures::default()
        },
        ..quick()
    };
    let batch = Dim::bounded("batch", BATCH as u32);
    let all = in_batches(Budget::Unlimited, batch, whole).expect("it compiles");
    let mut made = 0;
    for percent in [70, 55] {
        let Ok(within) = in_batches(Budget::Fraction(f64::from(percent) / 100.0), batch, whole)
        else {
            continue;
        };
        assert!(within.0 == all.0 && within.1 == all.1, "within {percent} %");
        made += within.2;
    }
    assert!(made > 0);
}

/// Unbounded lengths have a plan each, or share one.
#[test]
fn unbounded_lengths_train_to_the_same_bits() {
    let all = in_batches(Budget::Unlimited, Dim::unbounded("batch"), quick()).expect("it compiles");
    let within = in_batches(
        Budget::Bytes(Bytes(9 << 20)),
        Dim::unbounded("batch"),
        quick(),
    )
    .unwrap_or_else(|e| panic!("{e}"));
    assert!(within.0 == all.0 && within.1 == all.1);
}

/// The first image of an inference is a norm by running statistics, computed from variables and the
/// input.
#[test]
fn inference_computes_images_from_running_statistics() {
    let infer = |budget: Budget, prologue_fusion: bool| -> Result<(Vec<u32>, usize)> {
        let params = Params::seeded(6);
        let (norm, conv) = (
            BatchNorm2d::new(&params.root() / "norm", 4),
            Conv2d::new(&params.root() / "conv", 4, 1, 3).padding(1),
        );
        let options = CompileOptions {
            measures: Measures {
                prologue_fusion,
                ..Measures::default()
            },
            ..quick()
        };
        let mut session = Session::new(Device::Cpu, params)?
            .with_threads(2)
            .with_options(options)
            .with_budget(budget);
        let trace = Trace::inference();
        let x = trace.input("x", F32, (4096, WIDTH));
        // The input is read after the convolution, so that the image cannot be computed in its
        // place.
        let images = x.reshape((4096, 4, 4, 4));
        let seen = images.apply(&norm).tanh().apply(&conv).relu();
        let program = session.compile(&trace, [(images * seen).sum_over(1)])?;
        session.set_value(
            "norm.running_mean",
            &Array1::from_elem(4, 0.4f32).into_dyn(),
        )?;
        session.set_value("norm.running_var", &Array1::from_elem(4, 0.3f32).into_dyn())?;
        let (x, _): (Array2<f32>, _) = examples(4096);
        let out = session.run(&program, (&x,))?[0]
            .array::<f32>()?
            .iter()
            .map(|v| v.to_bits())
            .collect();
        Ok((out, program.plan().budget_report().prologues))
    };
    let all = infer(Budget::Unlimited, true).expect("it compiles");
    let within = infer(Budget::Fraction(0.8), true).unwrap_or_else(|e| panic!("{e}"));
    assert!(within.0 == all.0 && (all.1, within.1) == (0, 1));
    assert!(matches!(
        infer(Budget::Fraction(0.8), false),
        Err(Error::Budget { .. })
    ));
}
