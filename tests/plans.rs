//! A run uses exactly its plan: planned bytes equal measured bytes, and all plans give the same
//! results.

use std::collections::HashSet;

use ndarray::{Array2, ArrayD, Axis, Slice};
use slabwise::nn::{BatchNorm2d, Conv2d, Linear, Sequential, TransformerEncoderLayer};
use slabwise::optim::Adam;
use slabwise::prelude::*;
use slabwise::{CompileOptions, Fuse, Isa, Plan};
use slabwise_models::{Examples, Model, OptimizerKind};
use slabwise_planner::Kind;

fn session(params: Params) -> Session {
    Session::new(Device::Cpu, params)
        .expect("a session")
        .with_threads(2)
}

fn batch(model: Model, n: usize, seed: u64) -> (ArrayD<f32>, ArrayD<i32>) {
    let (Examples::Images(images), labels) = model.batch(n, seed) else {
        panic!("{model} reads tokens")
    };
    (images, labels)
}

fn bits(array: &ArrayD<f32>) -> Vec<u32> {
    array.iter().map(|v| v.to_bits()).collect()
}

/// All weights and state, bit by bit.
fn state(session: &Session) -> Vec<(String, Vec<u32>)> {
    session
        .names()
        .map(|n| (n.to_string(), bits(&session.value(n).expect("it is there"))))
        .collect()
}

/// One past the last byte of the slab that any buffer needs, without alignment. Kernels write
/// beyond it only into workspaces.
fn used_end(plan: &Plan) -> u64 {
    let buffers = plan
        .dag()
        .buffers
        .iter()
        .zip(&plan.offsets().offsets)
        .map(|(b, at)| at + b.bytes);
    buffers.max().unwrap_or(0)
}

/// One past the last byte of the slab that any workspace needs.
fn workspace_end(plan: &Plan) -> u64 {
    let ends = plan
        .dag()
        .tasks
        .iter()
        .zip(&plan.offsets().workspace_offsets)
        .filter(|(t, _)| t.workspace > 0);
    ends.map(|(t, at)| at + t.workspace).max().unwrap_or(0)
}

#[test]
fn planned_bytes_equal_the_lower_bound_and_measured_bytes() {
    let mut exact = 0;
    for (model, n) in [(Model::Mlp, 256), (Model::Cnn, 64)] {
        let params = Params::seeded(3);
        let network = model.build(&params);
        let mut session = session(params);
        let train = network
            .training(&mut session, n as u32, model.optimizer())
            .expect("it compiles");
        let infer = network
            .inference(&mut session, n as u32)
            .expect("it compiles");
        let (images, labels) = batch(model, n, 5);
        for (program, is_train) in [(&train, true), (&infer, false)] {
            let (plan, what) = (program.plan(), format!("{model} {}", program.plan().name()));
            assert_eq!(
                plan.slab_bytes(),
                plan.lower_bound_bytes(),
                "{what}: planned is the lower bound"
            );
            assert!(plan.slab_bytes() <= plan.without_in_place_bytes(), "{what}");
            assert!(
                plan.without_in_place_bytes() < plan.without_reuse_bytes(),
                "{what}"
            );
            let run = |s: &mut Session, planned: bool| -> Vec<u32> {
                let outputs = match (planned, is_train) {
                    (true, true) => s.run(program, (&images, &labels)),
                    (true, false) => s.run(program, (&images,)),
                    (false, true) => s.run_dynamic(program, (&images, &labels)),
                    (false, false) => s.run_dynamic(program, (&images,)),
                };
                bits(&outputs.expect("it runs")[0].array().expect("f32"))
            };
            session.reset_pool();
            run(&mut session, true);
            assert_eq!(
                session.last_run().peak_slab_bytes,
                plan.slab_bytes(),
                "{what}: measured from addresses"
            );
            run(&mut session, false);
            let dynamic = session.pool_statistics().peak_bytes_in_use;
            assert!(
                plan.slab_bytes() <= dynamic,
                "{what}: planned {}, dynamic {dynamic}",
                plan.slab_bytes()
            );

            // Measured from the bytes that change. A buffer is written to its end; a workspace need
            // not be.
            let touched = match is_train {
                true => session.measure_touched(program, (&images, &labels)),
                false => session.measure_touched(program, (&images,)),
            };
            let touched = touched.expect("it runs");
            assert!(
                touched <= plan.slab_bytes(),
                "{what}: {touched} bytes touched of {}",
                plan.slab_bytes()
            );
            assert!(
                touched >= used_end(plan),
                "{what}: {touched} bytes touched, buffers end at {}",
                used_end(plan)
            );
            if used_end(plan) >= workspace_end(plan) {
                exact += 1;
                assert_eq!(
                    touched.next_multiple_of(slabwise_planner::ALIGN),
                    plan.slab_bytes(),
                    "{what}: touched to the end"
                );
            }
        }
    }
    assert!(exact > 0, "a buffer ends where some slab does");
}

#[test]
fn programs_of_a_session_share_slab_and_weights() {
    let params = Params::seeded(3);
    let network = Model::Mlp.build(&params);
    let mut session = session(params);
    let train = network
        .training(&mut session, 32u32, OptimizerKind::Sgd)
        .expect("it compiles");
    let persistent = session.persistent_bytes();
    let infer = network
        .inference(&mut session, 400u32)
        .expect("it compiles");
    let small = network.inference(&mut session, 1u32).expect("it compiles");
    let slabs = [train.plan(), infer.plan(), small.plan()].map(Plan::slab_bytes);
    assert_eq!(Some(session.slab_bytes()), slabs.into_iter().max());
    assert_eq!(
        session.persistent_bytes(),
        persistent,
        "inference adds no weights"
    );
    // Twelve weights and moments, each rounded up to a cache line at most.
    let exact = train.plan().persistent().weights + train.plan().persistent().state;
    assert!(
        (exact..exact + 12 * 64).contains(&persistent),
        "{persistent} for {exact}"
    );
    assert_eq!(infer.plan().persistent().state, 0);

    let (images, labels) = batch(Model::Mlp, 32, 5);
    let one = images.slice_axis(Axis(0), Slice::from(..1)).to_owned();
    let logits = |s: &mut Session| {
        bits(
            &s.run(&small, (&one,)).expect("it runs")[0]
                .array()
                .expect("f32"),
        )
    };
    let before = logits(&mut session);
    let loss = session.run(&train, (&images, &labels)).expect("it runs")[0].item();
    assert_ne!(
        logits(&mut session),
        before,
        "inference sees the trained weights"
    );
    // A run of another program in between leaves a program's results unchanged.
    let again = session.run(&train, (&images, &labels)).expect("it runs")[0].item();
    assert!(again < loss, "{again} after {loss}");
}

#[test]
fn memory_checks_pass_and_change_no_bit() {
    for (model, n, steps) in [(Model::Mlp, 16, 4), (Model::Cnn, 3, 2)] {
        let results = [false, true].map(|check_memory| {
            let params = Params::seeded(9);
            let network = model.build(&params);
            let mut session = session(params).with_options(CompileOptions {
                check_memory,
                ..CompileOptions::default()
            });
            let bound = Dim::bounded("batch", n as u32);
            let train = network
                .training(&mut session, bound, OptimizerKind::Adam)
                .expect("it compiles");
            let infer = network.inference(&mut session, bound).expect("it compiles");
            let mut losses = Vec::new();
            for step in 0..steps {
                // The last batch is smaller.
                let (images, labels) = batch(model, n - step % 2, step as u64);
                losses.push(
                    session
                        .run(&train, (&images, &labels))
                        .expect("no check fails")[0]
                        .item()
                        .to_bits(),
                );
                losses.extend(bits(
                    &session.run(&infer, (&images,)).expect("no check fails")[0]
                        .array()
                        .expect("f32"),
                ));
            }
            (losses, state(&session))
        });
        assert!(
            results[0] == results[1],
            "{model}: results with memory checks differ"
        );
    }
}

#[test]
fn a_broken_plan_is_refused() {
    let params = Params::seeded(3);
    let network = Model::Mlp.build(&params);
    let mut session = session(params);
    let train = network
        .training(&mut session, 8u32, OptimizerKind::Adam)
        .expect("it compiles");
    let dag = train.plan().dag();
    let good = (**train.plan().offsets()).clone();
    assert!(slabwise_planner::check(dag, good.clone()).is_ok());
    // Each buffer is moved onto another that is live at the same step.
    let mut moved = 0;
    for a in 0..dag.buffers.len() {
        for b in 0..a {
            let (x, y) = (&good.lifetimes[a], &good.lifetimes[b]);
            let in_place = good
                .reused
                .iter()
                .any(|r| [(a, b), (b, a)].contains(&(r.from.index(), r.to.index())));
            if x.start < y.end
                && y.start < x.end
                && !in_place
                && dag.buffers[a].bytes > 0
                && dag.buffers[b].bytes > 0
            {
                let mut bad = good.clone();
                bad.offsets[a] = bad.offsets[b];
                let refused = slabwise_planner::check(dag, bad)
                    .err()
                    .map(|v| v.to_string());
                assert!(
                    refused.is_some(),
                    "{} lies on {}",
                    dag.buffers[a].name,
                    dag.buffers[b].name
                );
                moved += 1;
            }
        }
    }
    assert!(moved > 3, "only {moved} pairs to break");
}

#[test]
fn a_smaller_batch_runs_as_if_compiled_for_it() {
    for (model, bound, n) in [
        (Model::Mlp, 64, 37),
        (Model::Cnn, 64, 37),
        (Model::Cnn, 5, 1),
    ] {
        let (images, labels) = batch(model, n, 5);
        let results = [Dim::bounded("batch", bound), Dim::from(n)].map(|dim| {
            let params = Params::seeded(3);
            let network = model.build(&params);
            let mut session = session(params);
            let train = network
                .training(&mut session, dim, OptimizerKind::Adam)
                .expect("it compiles");
            let infer = network.inference(&mut session, dim).expect("it compiles");
            let mut all = Vec::new();
            for _ in 0..2 {
                all.push(
                    session.run(&train, (&images, &labels)).expect("it runs")[0]
                        .item()
                        .to_bits(),
                );
                let [logits] = session.run(&infer, (&images,)).expect("it runs");
                assert_eq!(logits.shape(), [n, 10]);
                all.extend(bits(&logits.array().expect("f32")));
            }
            (all, state(&session))
        });
        assert!(
            results[0] == results[1],
            "{model}: batch {n} of {bound} differs from a program for {n}"
        );
    }
}

#[test]
fn gradients_of_fused_updates_take_no_bytes() {
    let params = Params::seeded(3);
    let network = Model::Cnn.build(&params);
    let weights: usize = params
        .declared()
        .iter()
        .map(|p| p.dims().iter().product::<usize>())
        .sum();
    let mut session = session(params);
    let train = network
        .training(&mut session, 64u32, OptimizerKind::Adam)
        .expect("it compiles");
    let plan = train.plan();
    let total = session.persistent_bytes() + session.slab_bytes();
    println!("{plan}\ncnn, batch 64, Adam: {} in all", Bytes(total));
    // Weights and two moments, each rounded up to 64 bytes, and the step counter.
    let expected = 4 * 3 * weights as u64;
    assert!(
        (expected..expected + 64 * 30).contains(&session.persistent_bytes()),
        "{}",
        session.persistent_bytes()
    );
    let live: u64 = plan
        .dag()
        .buffers
        .iter()
        .filter(|b| b.kind == Kind::Gradient)
        .map(|b| b.bytes)
        .sum();
    assert!(live > 0, "activations have gradients");
    // A gradient is dead after the update of its weight by Adam, so that two large ones are never
    // live at once.
    let largest = 4 * 3136 * 512;
    let offsets = plan.offsets();
    for step in 0..plan.kernels() as u64 {
        let at_once = plan.dag().buffers.iter().zip(&offsets.lifetimes);
        let at_once: Vec<&str> = at_once
            .filter(|(b, l)| b.bytes == largest && l.start <= step && step < l.end)
            .map(|(b, _)| &*b.name)
            .collect();
        assert!(at_once.len() <= 1, "step {step}: {at_once:?}");
    }
}

#[test]
fn reports_are_complete() {
    let params = Params::seeded(3);
    let layer = Linear::new(&params.root() / "a<b>&\"c\"", 6, 4);
    let trace = Trace::training().named("tiny \"<&>\"");
    let x = trace.input("x", F32, (Dim::bounded("batch", 8), 6));
    let loss = x.apply(&layer).tanh().square().mean();
    trace.minimize(loss, slabwise::optim::Sgd::new(0.1).momentum(0.9));
    let mut session = session(params);
    let program = session.compile(&trace, [loss]).expect("it compiles");
    let plan = program.plan();
    let text = plan.to_string();
    let first = text.lines().next().unwrap_or_default().to_string();
    assert_eq!(
        first,
        format!(
            "tiny \"<&>\" · cpu · batch ≤ 8 · {} kernels",
            plan.kernels()
        )
    );
    for part in [
        "persistent",
        "weights 112 B",
        "slab",
        "lower bound",
        "without reuse",
        "saved by",
        "in-place",
        "peak",
    ] {
        assert!(text.contains(part), "{part} in\n{text}");
    }
    assert_eq!(plan.steps().count(), plan.kernels());

    for plan in [plan, mlp_plan().plan()] {
        let svg = plan.svg();
        let texts = well_formed(&svg);
        for buffer in &plan.dag().buffers {
            assert!(
                texts.iter().any(|t| t.contains(&buffer.name)),
                "buffer {:?} is not named in the picture",
                buffer.name
            );
        }
    }
    let folder = tempfile::tempdir().expect("a folder");
    plan.write_svg(folder.path().join("plan.svg"))
        .expect("it can be written");
    assert_eq!(
        std::fs::read_to_string(folder.path().join("plan.svg")).expect("it was written"),
        plan.svg()
    );
    let nowhere = plan
        .write_svg(folder.path().join("none/plan.svg"))
        .unwrap_err()
        .to_string();
    assert!(nowhere.contains("none/plan.svg"), "{nowhere}");
}

fn mlp_plan() -> Program<1> {
    let params = Params::seeded(3);
    let network = Model::Mlp.build(&params);
    network
        .training(&mut session(params), 8u32, OptimizerKind::Adam)
        .expect("it compiles")
}

/// Checks that a document is well-formed XML (elements nested and closed, attributes quoted and
/// unique, entities known), and gives its texts.
fn well_formed(xml: &str) -> Vec<String> {
    let (mut open, mut texts, mut rest, mut roots) = (Vec::new(), Vec::new(), xml, 0);
    while let Some(start) = rest.find('<') {
        let text = &rest[..start];
        assert!(
            !open.is_empty() || text.trim().is_empty(),
            "text outside of elements: {text}"
        );
        texts.push(unescaped(text));
        let end = start + rest[start..].find('>').expect("a tag is closed");
        let tag = &rest[start + 1..end];
        rest = &rest[end + 1..];
        if let Some(name) = tag.strip_prefix('/') {
            assert_eq!(open.pop(), Some(name), "elements are nested");
            continue;
        }
        let (body, closed) = tag
            .strip_suffix('/')
            .map_or((tag, false), |body| (body, true));
        let (name, attributes) = body.split_once(char::is_whitespace).unwrap_or((body, ""));
        assert!(
            !name.is_empty() && name.chars().all(|c| c.is_ascii_alphanumeric()),
            "element name {name:?}"
        );
        let (mut left, mut seen) = (attributes.trim_start(), HashSet::new());
        while !left.is_empty() {
            let (key, value) = left.split_once("=\"").expect("an attribute is quoted");
            let (value, after) = value.split_once('"').expect("a quote is closed");
            assert!(
                key.chars().all(|c| c.is_ascii_alphanumeric() || c == '-'),
                "attribute name {key:?} in {tag}"
            );
            assert!(seen.insert(key), "attribute {key} twice in {tag}");
            unescaped(value);
            left = after.trim_start();
        }
        roots += usize::from(open.is_empty());
        if !closed {
            open.push(name);
        }
    }
    assert!(
        open.is_empty() && roots == 1 && rest.trim().is_empty(),
        "{open:?} left open, {roots} roots, then {rest:?}"
    );
    texts
}

fn unescaped(text: &str) -> String {
    for (at, _) in text.match_indices('&') {
        let known = ["&amp;", "&lt;", "&gt;", "&quot;", "&apos;"]
            .iter()
            .any(|e| text[at..].starts_with(e));
        assert!(known, "unknown entity in {text:?}");
    }
    let plain = text
        .replace("&lt;", "<")
        .replace("&gt;", ">")
        .replace("&quot;", "\"")
        .replace("&apos;", "'");
    plain.replace("&amp;", "&")
}

/// Arrays in another order than row-major are fed with the elements that their indices name.
#[test]
fn strided_arrays_are_read_in_their_order() {
    let trace = Trace::inference();
    let x = trace.input("x", F32, (2, 3));
    let y = x * 2.0;
    let mut session = session(Params::seeded(0));
    let program = session.compile(&trace, [y]).expect("it compiles");
    let columns = Array2::from_shape_fn((3, 2), |(i, j)| (10 * i + j) as f32);
    let [y] = session.run(&program, (&columns.t(),)).expect("it runs");
    assert_eq!(
        y.view::<f32>().expect("f32"),
        columns.t().mapv(|v| 2.0 * v).into_dyn()
    );
}

/// Large models are planned without being allocated, at sizes that are no multiples of anything. The
/// portable kernels have the same workspaces on every machine.
#[test]
fn every_built_in_model_is_planned_at_the_lower_bound() {
    for &model in Model::ALL {
        let params = Params::seeded(1);
        let network = model.build(&params);
        let session = session(params).with_options(CompileOptions {
            isa: Some(Isa::Portable),
            ..CompileOptions::default()
        });
        let plan = network
            .plan_training(&session, 5u32, model.optimizer())
            .expect("it is planned");
        assert_eq!(plan.slab_bytes(), plan.lower_bound_bytes(), "{model}");
        assert!(
            4 * plan.slab_bytes() < 3 * plan.without_reuse_bytes(),
            "{model}: {plan}"
        );
        if model == Model::Lstm {
            // The gradient of a weight that every token uses is summed product by product.
            assert!(plan.slab_bytes() < 2 * 4 * 444_544, "{plan}");
        }
    }
}

#[derive(Debug, PartialEq)]
struct Trained {
    kernels: usize,
    slab: u64,
    losses: Vec<f32>,
    state: Vec<(String, Vec<u32>)>,
}

/// Three steps of a model of examples `[8, 32, 64]`.
fn trained(flatten_rows: bool, model: impl Fn(&Scope) -> Box<dyn Module>) -> Trained {
    let params = Params::seeded(3);
    let model = model(&params.root());
    let fuse = Fuse {
        flatten_rows,
        ..Fuse::default()
    };
    let mut session = session(params).with_options(CompileOptions {
        fuse,
        ..CompileOptions::default()
    });
    let trace = Trace::training();
    let x = trace.input("x", F32, (8, 32, 64));
    let y = x.apply(&*model);
    let loss = (y * y).mean();
    trace.minimize(loss, Adam::new(1e-2));
    let train = session.compile(&trace, [loss]).expect("a program");
    let data: Vec<f32> = (0..8 * 32 * 64)
        .map(|i| (i * 37 % 101) as f32 / 50.0 - 1.0)
        .collect();
    let mut step = || {
        let [loss] = session.run(&train, &data[..]).expect("a step");
        loss.item()
    };
    let losses = (0..3).map(|_| step()).collect();
    Trained {
        kernels: train.plan().kernels(),
        slab: train.plan().slab_bytes(),
        losses,
        state: state(&session),
    }
}

/// Two linear layers with an activation between them and a residual connection, whose rows are
/// flattened by hand or not.
struct Residual {
    layers: [Linear; 2],
    by_hand: bool,
}

impl Module for Residual {
    fn forward<'t>(&self, x: Tensor<'t>) -> Tensor<'t> {
        let rows = if self.by_hand { x.reshape([-1, 64]) } else { x };
        let inner = rows.apply(&self.layers[0]).gelu();
        let y = (rows + inner.apply(&self.layers[1])).gelu();
        if self.by_hand {
            y.unflatten(0, [8, 32])
        } else {
            y
        }
    }
}

#[test]
fn layers_over_three_axes_are_planned_like_layers_over_rows() {
    let of = |flatten_rows, by_hand| {
        trained(flatten_rows, |root| {
            let layers = [
                Linear::new(root / "wide", 64, 256),
                Linear::new(root / "narrow", 256, 64),
            ];
            Box::new(Residual { layers, by_hand })
        })
    };
    let (natural, by_hand, apart) = (of(true, false), of(true, true), of(false, false));
    assert_eq!(natural, by_hand);
    assert_takes_less(&natural, &apart);
}

#[test]
fn transformer_layers_over_three_axes_take_fewer_kernels_and_bytes() {
    let of = |flatten_rows| {
        trained(flatten_rows, |root| {
            let layer = TransformerEncoderLayer::new(root / "layer", 64, 4, 256);
            Box::new(layer.gelu().norm_first())
        })
    };
    let (rows, axes) = (of(true), of(false));
    // Dropout draws the same numbers.
    assert_takes_less(&rows, &axes);
}

/// Fewer kernels and bytes for losses that differ in rounding alone.
fn assert_takes_less(a: &Trained, b: &Trained) {
    assert!(a.kernels < b.kernels, "{} of {}", a.kernels, b.kernels);
    assert!(a.slab < b.slab, "{} of {} bytes", a.slab, b.slab);
    for (a, b) in a.losses.iter().zip(&b.losses) {
        assert!((a - b).abs() <= 1e-5 * a.abs(), "{a} and {b}");
    }
}

/// The gradient of logits is made where their softmax is, in its place; the sum that is the bias's
/// gradient reads it.
#[test]
fn logits_with_a_bias_are_in_memory_once() {
    let (rows, classes) = (512, 4096);
    let params = Params::seeded(5);
    let head = Linear::new(params.root() / "head", 16, classes);
    let mut session = session(params);
    let trace = Trace::training();
    let x = trace.input("x", F32, (rows, 16));
    let labels = trace.input("labels", I32, (rows,));
    let loss = x.apply(&head).cross_entropy(labels);
    trace.minimize(loss, Adam::new(1e-3));
    let train = session.compile(&trace, [loss]).expect("a program");
    let plan = train.plan();
    let logits = (rows * classes * 4) as u64;
    let large = plan.dag().buffers.iter().filter(|b| b.bytes >= logits / 8);
    let large: Vec<u64> = large.map(|b| b.bytes).collect();
    assert_eq!(large, [logits; 2], "logits and their gradient");
    assert!(plan.slab_bytes() < logits * 3 / 2);
}

/// Operations without a parameter are named after the layer that records them: a norm's statistics
/// after the norm, and not after the convolution before it; a residual sum after the layer that it
/// closes, and not after the one in which its stream began.
#[test]
fn operations_without_parameters_belong_to_the_layer_that_records_them() {
    let params = Params::seeded(2);
    let root = params.root();
    let images = Sequential::new()
        .then(Conv2d::new(&root / "conv", 3, 8, 3).padding(1))
        .then(BatchNorm2d::new(&root / "norm", 8));
    let encoders = ["e0", "e1"].map(|name| TransformerEncoderLayer::new(&root / name, 32, 2, 64));
    let blocks = ["b0", "b1"].map(|name| Linear::new(&root / name, 32, 32));
    let session = Session::new(Device::Cpu, params.clone()).expect("a session");
    let steps = |trace: Trace, output: &dyn for<'t> Fn(&'t Trace) -> Tensor<'t>| -> Vec<String> {
        let output = output(&trace);
        let plan = session.plan(&trace, [output]).expect("a plan");
        plan.steps().map(str::to_string).collect()
    };
    let of_images = steps(Trace::training(), &|trace| {
        trace.input("x", F32, (4, 3, 8, 8)).apply(&images)
    });
    assert!(
        of_images.len() > 1 && of_images[0].starts_with("conv."),
        "{of_images:?}"
    );
    assert!(
        of_images[1..].iter().all(|step| step.starts_with("norm.")),
        "{of_images:?}"
    );
    let of_encoders = steps(Trace::inference(), &|trace| {
        let x = trace.input("x", F32, (2, 5, 32));
        encoders.iter().fold(x, |x, encoder| x.apply(encoder))
    });
    let second = of_encoders.iter().position(|step| step.starts_with("e1."));
    let (first, second) = of_encoders.split_at(second.expect("a second layer"));
    assert!(
        first.iter().all(|step| step.starts_with("e0.")),
        "{first:?}"
    );
    assert!(
        second.iter().all(|step| step.starts_with("e1.")),
        "{second:?}"
    );
    let of_blocks = steps(Trace::inference(), &|trace| {
        let x = trace.input("x", F32, (2, 32));
        let stream = blocks.iter().fold(x, |x, block| x + x.apply(block));
        stream.softmax(1)
    });
    assert_eq!(of_blocks.len(), 3, "{of_blocks:?}");
    assert!(of_blocks[2].starts_with("b1."), "{of_blocks:?}");
}
