//! Every mistake of a user is an error that names the place and the numbers, and leaves the session
//! usable.

use std::process::Command;

use ndarray::{Array1, Array2, arr1, arr2};
use slabwise::Error;
use slabwise::data::Mnist;
use slabwise::nn::{Bag, Embedding, EmbeddingBag, Gru, Linear, LoraLinear, Lstm};
use slabwise::optim::{Adam, AdamW, Schedule, Sgd};
use slabwise::prelude::*;
use slabwise::tensor::{Ctc, Rope, RopeScaling};

fn session(params: Params) -> Session {
    Session::new(Device::Cpu, params)
        .expect("a session")
        .with_threads(2)
}

/// The text of an error.
#[track_caller]
fn text<T, E: std::fmt::Display>(result: Result<T, E>) -> String {
    match result {
        Ok(_) => panic!("no error"),
        Err(error) => error.to_string(),
    }
}

#[track_caller]
fn assert_has(text: &str, parts: &[&str]) {
    for part in parts {
        assert!(text.contains(part), "{part:?} is not in: {text}");
    }
}

/// A place in this file as errors name it.
fn location(line: u32) -> String {
    format!("{}:{line}: ", file!())
}

/// A layer `[4 → 3]` under "head", trained by SGD, and the line of its loss.
fn classifier(params: &Params, session: &mut Session) -> (Program<1>, u32) {
    let layer = Linear::new(&params.root() / "head", 4, 3);
    let trace = Trace::training();
    let batch = Dim::bounded("batch", 8);
    let (x, labels) = (
        trace.input("x", F32, (batch, 4)),
        trace.input("labels", I32, (batch,)),
    );
    let (loss, line) = (x.apply(&layer).cross_entropy(labels), line!());
    trace.minimize(loss, Sgd::new(0.1).momentum(0.9));
    (session.compile(&trace, [loss]).expect("it compiles"), line)
}

fn values(session: &Session) -> Vec<(String, ndarray::ArrayD<f32>)> {
    session
        .names()
        .map(|n| (n.to_string(), session.value(n).expect("it is there")))
        .collect()
}

#[test]
fn mismatched_shapes_are_all_reported_with_their_lines() {
    let params = Params::seeded(0);
    let (hidden, head) = (
        Linear::new(&params.root() / "hidden", 784, 512),
        Linear::new(&params.root() / "head", 256, 10),
    );
    let trace = Trace::training();
    let x = trace.input("x", F32, (Dim::bounded("batch", 128), 784));
    let first = line!() + 1;
    let _logits = x.apply(&hidden).relu().apply(&head);
    let _sum = trace.ones((3, 4)) + trace.ones((4, 3));
    let _flat = trace.ones((3, 4)).reshape((5, 2));
    let _picture = trace.ones((2, 3, 8, 8)).conv2d(trace.ones((4, 5, 3, 3)));
    let loss = x.mean();
    let said = text(session(params).compile(&trace, [loss]));
    let lines: Vec<&str> = said.lines().collect();
    assert_eq!(lines.len(), 4, "{said}");
    assert_eq!(
        lines[0],
        location(first)
            + "matmul [batch, 512] × [256, 10]: inner dimensions 512 and 256 differ (in \"head\")"
    );
    for (line, (at, parts)) in lines[1..].iter().zip((first + 1..).zip([
        ["[3, 4]", "[4, 3]"],
        ["[3, 4]", "[5, 2]"],
        ["[2, 3, 8, 8]", "[4, 5, 3, 3]"],
    ])) {
        assert!(line.starts_with(&location(at)), "{line}");
        assert_has(line, &parts);
    }
}

#[test]
fn a_label_out_of_range_changes_nothing() {
    let params = Params::seeded(0);
    let mut session = session(params.clone());
    let (program, line) = classifier(&params, &mut session);
    let x = Array2::from_shape_fn((5, 4), |(i, j)| (i * 4 + j) as f32 / 20.0);
    let good = arr1(&[0, 1, 2, 1, 0]);
    session.run(&program, (&x, &good)).expect("good labels");
    let before = values(&session);
    for (labels, position, value) in [
        ([0, 1, 2, 3, 7], 3, 3),
        ([-1, 0, 0, 0, 0], 0, -1),
        ([0, 0, 0, 0, i32::MIN], 4, i32::MIN),
    ] {
        for dynamic in [false, true] {
            let feed = (&x, &arr1(&labels));
            let said = if dynamic {
                text(session.run_dynamic(&program, feed))
            } else {
                text(session.run(&program, feed))
            };
            let expected = format!("index {value} at position {position} is outside 0..3");
            assert_has(
                &said,
                &[&location(line), &expected, "no weight was changed"],
            );
            assert_eq!(
                values(&session),
                before,
                "weights and state are as they were"
            );
        }
    }
    // Later runs are unaffected.
    let mut other = self::session(params.clone());
    let (same, _) = classifier(&params, &mut other);
    other.run(&same, (&x, &good)).expect("good labels");
    let expected = other.run(&same, (&x, &good)).expect("good labels")[0].item();
    assert_eq!(
        session
            .run(&program, (&x, &good))
            .expect("the session is usable")[0]
            .item()
            .to_bits(),
        expected.to_bits()
    );
    assert_eq!(values(&session), values(&other));
}

#[test]
fn numbers_of_optimizers_are_checked() {
    fn refused(optimizer: impl Optimizer) -> (String, u32) {
        let params = Params::seeded(0);
        let layer = Linear::new(&params.root() / "a", 2, 2);
        let trace = Trace::training();
        let loss = trace.ones((1, 2)).apply(&layer).sum();
        let line = line!() + 1;
        trace.minimize(loss, optimizer);
        (text(session(params).compile(&trace, [loss])), line)
    }
    for ((said, line), parts) in [
        (
            refused(Adam::new(f64::NAN)),
            ["minimize: adam", "learning rate is NaN"],
        ),
        (
            refused(Sgd::new(f32::INFINITY)),
            ["minimize: sgd", "learning rate is inf"],
        ),
        (refused(Sgd::new(-0.5)), ["sgd", "learning rate is -0.5"]),
        (
            refused(Sgd::new(0.1).momentum(f64::NAN)),
            ["momentum", "NaN"],
        ),
        (
            refused(Sgd::new(0.1).weight_decay(-1.0)),
            ["weight decay", "-1"],
        ),
        (refused(Sgd::new(0.1).nesterov()), ["Nesterov", "momentum"]),
        (refused(Adam::new(0.1).betas(0.9, 1.0)), ["β₂", "1"]),
        (refused(AdamW::new(0.1).eps(f64::NAN)), ["ε", "NaN"]),
        (refused(Sgd::new(0.1).clip_norm(0.0)), ["clip_norm", "0"]),
        (
            refused(Sgd::new(Schedule::cosine(0.1, 5).warmup(5))),
            ["cosine over 5", "5 steps"],
        ),
        (
            refused(Sgd::new(Schedule::step(0.1, 0, 0.5))),
            ["learning rate", "every 0 steps"],
        ),
        (
            refused(Sgd::new(Schedule::constant(0.1).floor(0.01))),
            ["floor of 0.01", "cosine"],
        ),
        (
            refused(Sgd::new(Schedule::cosine(0.1, 5).then(5, 0.1).floor(0.01))),
            ["floor of 0.01", "cosine"],
        ),
    ] {
        assert!(said.starts_with(&location(line)), "{said}");
        assert_has(&said, &parts);
    }
}

#[test]
fn data_files_missing_and_cut_short() {
    let folder = tempfile::tempdir().expect("a folder");
    let said = text(Mnist::load(folder.path()));
    assert_has(
        &said,
        &[
            "no training images in",
            &folder.path().display().to_string(),
            "train-images-idx3-ubyte.gz",
        ],
    );
    // Two images of 2 × 2 are declared, one and a half are there.
    let images = [
        &[0, 0, 8, 3, 0, 0, 0, 2, 0, 0, 0, 2, 0, 0, 0, 2][..],
        &[9; 6],
    ]
    .concat();
    std::fs::write(folder.path().join("train-images-idx3-ubyte"), images)
        .expect("it can be written");
    std::fs::write(
        folder.path().join("train-labels-idx1-ubyte"),
        [0, 0, 8, 1, 0, 0, 0, 2, 1, 2],
    )
    .expect("it can be written");
    let said = text(Mnist::load(folder.path()));
    assert_has(&said, &["train-images-idx3-ubyte", "6 of 8 bytes"]);
}

#[test]
fn weight_files_that_do_not_fit_name_every_difference() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("w.safetensors");
    let declare = |names: &[(&str, usize)]| {
        let params = Params::seeded(1);
        for (name, n) in names {
            Linear::new(&params.root() / name, *n, 3);
        }
        session(params)
    };
    let mut saved = declare(&[("first", 4), ("second", 5), ("third", 2)]);
    let trace = Trace::inference();
    let one = trace.ones((1,));
    saved.compile(&trace, [one]).expect("it compiles");
    saved.save(&path).expect("it is saved");
    let mut other = declare(&[("first", 4), ("second", 6), ("fourth", 2)]);
    let trace = Trace::inference();
    let one = trace.ones((1,));
    other.compile(&trace, [one]).expect("it compiles");
    let before = values(&other);
    let said = text(other.load(&path));
    assert_has(
        &said,
        &[
            &path.display().to_string(),
            "wrong shape: `second.weight` is [3, 6] in the model, [3, 5] in the file",
            "missing: `fourth.weight` (f32 [3, 2])",
            "missing: `fourth.bias` (f32 [3])",
            "unexpected: `third.weight` (f32 [3, 2])",
            "unexpected: `third.bias` (f32 [3])",
        ],
    );
    assert!(!said.contains("first"), "{said}");
    assert_eq!(values(&other), before, "nothing was loaded");
    let bytes = std::fs::read(&path).expect("it is there");
    std::fs::write(&path, &bytes[..bytes.len() - 7]).expect("it can be written");
    assert_has(
        &text(other.load(&path)),
        &[
            &path.display().to_string(),
            "not a complete safetensors file",
        ],
    );
    let nowhere = folder.path().join("none/w.safetensors");
    assert_has(
        &text(other.load(&nowhere)),
        &["cannot read", &nowhere.display().to_string()],
    );
    assert_has(
        &text(other.save(&nowhere)),
        &["cannot save", &nowhere.display().to_string()],
    );
    assert_eq!(values(&other), before);
}

#[test]
fn inputs_that_do_not_fit_are_named() {
    let params = Params::seeded(0);
    let mut session = session(params.clone());
    let (program, _) = classifier(&params, &mut session);
    let before = values(&session);
    let x = |n, m| Array2::<f32>::zeros((n, m));
    let labels = Array1::<i32>::zeros;
    for (said, parts) in [
        (
            text(session.run(&program, (&x(9, 4), &labels(9)))),
            vec!["input \"x\"", "[9, 4]", "\"batch\" is 9", "bound 8"],
        ),
        (
            text(session.run(&program, (&x(5, 4), &labels(6)))),
            vec!["input \"labels\"", "[6]", "\"batch\" is 6", "5 in another"],
        ),
        (
            text(session.run(&program, (&x(5, 3), &labels(5)))),
            vec!["input \"x\"", "[5, 3]", "[batch, 4]"],
        ),
        (
            text(session.run(&program, (&labels(5), &labels(5)))),
            vec!["input \"x\"", "i32", "f32 is expected"],
        ),
        (
            text(session.run(&program, (&x(5, 4), &arr1(&[0u8; 5])))),
            vec!["input \"labels\"", "u8", "i32 is expected"],
        ),
        (
            text(session.run(&program, (&x(5, 4),))),
            vec!["\"train\" takes 2 inputs, \"x\" and \"labels\"; 1 was given"],
        ),
        (
            text(session.run(&program, (&x(5, 4), &labels(5), &labels(5)))),
            vec!["takes 2 inputs", "3 were given"],
        ),
        (
            text(session.run(&program, ())),
            vec!["takes 2 inputs", "0 were given"],
        ),
        (
            text(session.run(
                &program,
                (
                    &x(5, 4).into_shape_with_order((5, 2, 2)).expect("same"),
                    &labels(5),
                ),
            )),
            vec!["[5, 2, 2]", "[batch, 4]"],
        ),
        (
            text(session.run(&program, ([0.0f32; 7], &labels(5)))),
            vec!["input \"x\"", "7 elements", "[batch, 4]"],
        ),
        (
            text(session.run(&program, ([0.0f32; 36], &labels(9)))),
            vec!["input \"x\"", "\"batch\" is 9", "bound 8"],
        ),
        (
            text(session.run_dynamic(&program, (&x(9, 4), &labels(9)))),
            vec!["input \"x\"", "\"batch\" is 9", "bound 8"],
        ),
    ] {
        assert_has(&said, &parts);
    }
    assert_eq!(values(&session), before);
    session
        .run(&program, (&x(8, 4), &labels(8)))
        .expect("the session is usable");
}

#[test]
fn a_batch_of_no_rows_is_no_panic() {
    let trace = Trace::inference();
    let x = trace.input("x", F32, (Dim::bounded("batch", 8), 4));
    let (rows, total) = (x.softmax(1) + x.sum_keep(0), x.sum());
    let mut session = session(Params::seeded(0));
    let program = session.compile(&trace, [rows, total]).expect("it compiles");
    let none = Array2::<f32>::zeros((0, 4));
    let [rows, total] = session
        .run(&program, (&none,))
        .expect("no rows are a batch too");
    assert_eq!((rows.shape(), total.item()), (&[0, 4][..], 0.0));
    assert!(rows.view::<f32>().expect("f32").is_empty() && rows.item().is_nan());
    session
        .run_dynamic(&program, (&none,))
        .expect("no rows are a batch too");

    // In training the mean over no elements would be NaN, and so would the weights; such a step is
    // refused.
    let params = Params::seeded(0);
    let mut session = self::session(params.clone());
    let (program, line) = classifier(&params, &mut session);
    let before = values(&session);
    let error = text(session.run(&program, (&none, &Array1::<i32>::zeros(0))));
    assert_has(
        &error,
        &[
            &location(line),
            "cross_entropy: axis 0 of [batch, 1] has no elements",
        ],
    );
    assert_eq!(values(&session), before);
}

#[test]
fn a_budget_below_the_lower_bound_is_refused_with_the_bytes_needed() {
    let params = Params::seeded(0);
    let layer = Linear::new(&params.root() / "wide", 1000, 1000);
    let trace = Trace::inference().named("forward");
    let y = trace.input("x", F32, (64, 1000)).apply(&layer).relu();
    let weights = 4 * (1_000_000u64 + 1000);
    let mut tight = session(params.clone()).with_budget(Bytes(weights + 100_000));
    let error = tight.compile(&trace, [y]).err().expect("too small");
    assert_has(
        &error.to_string(),
        &[
            "\"forward\"",
            "needs",
            "no plan needs less than",
            "largest at the peak",
            "x 250",
            "KiB",
        ],
    );
    let Error::Budget {
        budget,
        needed,
        persistent,
        slab,
        floor,
        ..
    } = error
    else {
        panic!("{error}")
    };
    assert_eq!(
        (budget, needed),
        (Bytes(weights + 100_000), Bytes(persistent.0 + slab.0))
    );
    assert!(
        floor <= needed && floor > budget && slab.0 >= 4 * 64 * 1000,
        "{floor} {needed} {slab}"
    );
    // The bias's 4000 bytes are rounded up to whole cache lines.
    assert_eq!(persistent, Bytes(4_000_000 + 4032));
    // A budget of the bytes that the error names suffices.
    let mut enough = session(params.clone()).with_budget(needed);
    enough.compile(&trace, [y]).expect("it fits exactly");
    let mut weights_alone = session(params).with_budget(Bytes(1000));
    assert_has(
        &text(weights_alone.compile(&trace, [y])),
        &["1000 B", "weights and state"],
    );
}

#[test]
fn sizes_beyond_any_memory_are_refused() {
    let huge = u32::MAX as usize;
    let params = Params::seeded(0);
    let layer = Linear::without_bias(&params.root() / "a", huge, huge);
    let trace = Trace::inference();
    let line = line!() + 1;
    let y = trace.input("x", F32, (1, huge)).apply(&layer);
    let said = text(session(params).compile(&trace, [y]));
    assert_has(
        &said,
        &[&location(line), "[4294967295, 4294967295]", "overflows"],
    );

    for dims in [
        (1i64 << 40, 1i64 << 40),
        (1 << 31, 1 << 31),
        (i64::MAX, 1),
        (1 << 48, 1 << 2),
    ] {
        let trace = Trace::inference();
        let line = line!() + 1;
        let x = trace.input("x", F32, dims);
        let said = text(session(Params::seeded(0)).compile(&trace, [x + 1.0]));
        assert_has(&said, &[&location(line), &dims.0.to_string(), "overflows"]);
    }
    // A negative length.
    let trace = Trace::inference();
    let line = line!() + 1;
    let x = trace.input("x", F32, (-1, 3));
    assert_has(
        &text(session(Params::seeded(0)).compile(&trace, [x])),
        &[&location(line), "\"x\"", "-1"],
    );
    // A plausible count beyond this machine's memory is an error, no abort.
    let trace = Trace::inference();
    let y = trace.full(1.0, F32, (1i64 << 47,)) * trace.input("x", F32, ());
    assert_has(
        &text(session(Params::seeded(0)).compile(&trace, [y])),
        &["TiB"],
    );
    // Weights beyond all memory, although no program reads them.
    let params = Params::seeded(0);
    Linear::without_bias(&params.root() / "b", huge, huge);
    let trace = Trace::inference();
    let one = trace.ones(());
    assert_has(
        &text(session(params).compile(&trace, [one])),
        &["\"b.weight\"", "4294967295"],
    );
}

#[test]
fn missing_devices() {
    for name in ["gpu", "", "cuda", "cuda:", "cuda:x", "cuda:-1", "CPU"] {
        let said = text(name.parse::<Device>());
        assert_has(&said, &[&format!("{name:?}"), "auto, cpu or cuda:N"]);
    }
    assert_eq!("cpu".parse(), Ok(Device::Cpu));
    // No machine has so many devices; the error names the missing library or device.
    let cuda = "cuda:999".parse::<Device>().expect("a device's name");
    let why = text(Session::new(cuda, Params::seeded(0)));
    assert_has(&why, &["device cuda:999: "]);
    assert_eq!(text(Device::cuda(999)), why);
}

/// Set for the process that [`invalid_environment_variables_are_errors`] starts.
const CHILD: &str = "SLABWISE_TEST_CHILD";

#[test]
fn invalid_environment_variables_are_errors() {
    if std::env::var_os(CHILD).is_some() {
        match Session::new(Device::Cpu, Params::seeded(0)) {
            Ok(session) => println!("threads: {}", session.threads()),
            Err(error) => println!("error: {error}"),
        }
        return;
    }
    let said = |threads: &str| {
        let mut child = Command::new(std::env::current_exe().expect("this program"));
        child
            .args([
                "--exact",
                "invalid_environment_variables_are_errors",
                "--nocapture",
            ])
            .env(CHILD, "1");
        let output = child
            .env("SLABWISE_THREADS", threads)
            .output()
            .expect("it runs");
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    for nonsense in ["many", "0", "-2", "1.5", "99999999999999999999", "100000"] {
        assert_has(
            &said(nonsense),
            &[
                &format!("error: SLABWISE_THREADS is {nonsense:?}"),
                "from 1 to 1024",
            ],
        );
    }
    assert_has(&said(" 3 "), &["threads: 3"]);
    // An empty variable counts as not set.
    assert_has(&said(""), &["threads: "]);
}

#[test]
fn handles_of_another_session_are_refused() {
    let params = Params::seeded(0);
    let (mut here, mut there) = (session(params.clone()), session(params.clone()));
    let (program, _) = classifier(&params, &mut there);
    let (x, labels) = (Array2::<f32>::zeros((2, 4)), Array1::<i32>::zeros(2));
    assert_has(
        &text(here.run(&program, (&x, &labels))),
        &["\"train\"", "another session"],
    );
    assert_has(
        &text(here.run_dynamic(&program, (&x, &labels))),
        &["\"train\"", "another session"],
    );
    let buffer = here.upload("pixels", &x).expect("room");
    assert_has(
        &text(there.run(&program, (&buffer, &labels))),
        &["\"pixels\"", "another session"],
    );
    assert_has(
        &text(there.download::<f32>(&buffer)),
        &["\"pixels\"", "another session"],
    );
    assert_has(&text(here.download::<i32>(&buffer)), &["f32", "i32"]);
    there.run(&program, (&x, &labels)).expect("at home it runs");

    let foreign = Linear::new(&Params::seeded(1).root() / "other", 4, 3);
    let trace = Trace::inference().named("stray");
    let y = trace.ones((1, 4)).apply(&foreign);
    assert_has(
        &text(here.compile(&trace, [y])),
        &["\"stray\"", "other Params"],
    );
    let (one, two) = (Trace::inference(), Trace::inference());
    let mixed = one.ones((2,)) + two.ones((2,));
    let line = line!() - 1;
    assert_has(
        &text(here.compile(&one, [mixed])),
        &[&location(line), "two traces"],
    );
}

#[test]
fn donated_and_freed_buffers_are_dead() {
    let trace = Trace::inference();
    let x = trace.input("x", F32, (2, 2));
    trace.donate(x, 0);
    let mut session = session(Params::seeded(0));
    let program = session.compile(&trace, [x + 1.0]).expect("it compiles");
    let buffer = session
        .upload("pixels", &arr2(&[[1.0f32, 2.0], [3.0, 4.0]]))
        .expect("room");
    let copy = buffer.clone();
    session.run(&program, (buffer.donate(),)).expect("it runs");
    for said in [
        text(session.run(&program, (&copy,))),
        text(session.run_dynamic(&program, (&copy,))),
        text(session.free(copy.clone())),
    ] {
        assert_has(&said, &["\"pixels\"", "was donated"]);
    }
}

#[test]
fn values_set_by_hand_are_checked() {
    let params = Params::seeded(0);
    let mut session = session(params.clone());
    classifier(&params, &mut session);
    let before = values(&session);
    let said = text(session.set_value("head.weight", &Array2::<f32>::zeros((4, 3))));
    assert_has(&said, &["\"head.weight\"", "[3, 4]", "[4, 3]"]);
    let said = text(session.set_value("head.wieght", &Array2::<f32>::zeros((3, 4))));
    assert_has(&said, &["\"head.wieght\"", "head.weight"]);
    assert_has(&text(session.value("nothing")), &["\"nothing\""]);
    assert_eq!(values(&session), before);
    session
        .set_value("head.weight", &Array2::<f32>::ones((3, 4)))
        .expect("it fits");
    assert_eq!(
        session.value("head.weight").expect("it is there"),
        Array2::<f32>::ones((3, 4)).into_dyn()
    );
}

#[test]
fn a_program_does_not_run_on_more_threads_than_it_was_compiled_for() {
    let mut session = Session::new(Device::Cpu, Params::seeded(0))
        .expect("a session")
        .with_threads(1);
    let trace = Trace::inference().named("sum");
    let x = trace.input("x", F32, (4,));
    let program = session.compile(&trace, [x.sum()]).expect("compiles");
    let mut session = session.with_threads(2);
    let error = session
        .run(&program, (&[1.0f32; 4],))
        .err()
        .expect("its workspaces have no room")
        .to_string();
    assert!(
        error.contains("\"sum\" was compiled for 1 thread and the session now has 2"),
        "{error}"
    );
    let mut session = session.with_threads(1);
    let [sum] = session.run(&program, (&[1.0f32; 4],)).expect("runs");
    assert_eq!(sum.item(), 4.0);
}

/// Lengths that steps and labels do not have fail the run, as in PyTorch, instead of counting as
/// others or as a loss of infinity.
#[test]
fn lengths_of_sequences_are_checked() {
    let trace = Trace::inference();
    let logits = trace.input("logits", F32, (3, 2, 4));
    let labels = trace.input("labels", I32, (2, 2));
    let [steps, counts] = ["steps", "counts"].map(|name| trace.input(name, I32, (2,)));
    let options = Ctc {
        input_lengths: Some(steps),
        target_lengths: Some(counts),
        zero_infinity: true,
        ..Ctc::default()
    };
    let (loss, line) = (logits.log_softmax(2).ctc(labels, options), line!());
    let mut session = session(Params::seeded(0));
    let program = session.compile(&trace, [loss]).expect("it compiles");
    let logits = ndarray::Array3::from_shape_fn((3, 2, 4), |(t, n, c)| ((t + n * c) % 3) as f32);
    let labels = arr2(&[[1, 2], [3, 9]]);
    let mut run = |steps: [i32; 2], counts: [i32; 2]| {
        let feed = (&logits, &labels, &arr1(&steps), &arr1(&counts));
        let result = session.run(&program, feed);
        result.map(|[loss]| loss.item()).map_err(|e| e.to_string())
    };
    assert!(run([3, 2], [2, 1]).expect("they fit").is_finite());
    assert!(run([3, 0], [2, 0]).expect("they fit").is_finite());
    for (steps, counts, named) in [
        ([4, 2], [2, 1], "4 at position 0 is outside 0..4"),
        ([3, -1], [2, 1], "-1 at position 1 is outside 0..4"),
        ([3, 2], [2, 3], "3 at position 1 is outside 0..3"),
        ([3, 2], [-1, 1], "-1 at position 0 is outside 0..3"),
    ] {
        let said = run(steps, counts).expect_err("a mistake");
        assert_has(&said, &[&location(line), named]);
    }
}

/// Options of layers that mean nothing are mistakes at the line that sets or uses them.
#[test]
fn options_of_layers_are_checked() {
    type Layer = Box<dyn Module>;
    let refused = |layer: &dyn Fn(Scope) -> Layer, dtype: DType, lengths: (usize, usize)| {
        let params = Params::seeded(0);
        let layer = layer(&params.root() / "a");
        let trace = Trace::training();
        let x = trace.input("x", dtype, (2, lengths.0, lengths.1));
        let y = x.apply(&*layer);
        text(session(params).compile(&trace, [y]))
    };
    for count in [-1, 5] {
        let embedding: &dyn Fn(Scope) -> Layer =
            &|at| Box::new(Embedding::new(at, 5, 4).padding(count));
        let said = refused(embedding, I32, (3, 2));
        assert_has(&said, &[file!(), &format!("padding {count}"), "0..5"]);
        let bag: &dyn Fn(Scope) -> Layer =
            &|at| Box::new(EmbeddingBag::new(at, 5, 4, Bag::Mean).padding(count));
        let said = refused(bag, I32, (3, 2));
        assert_has(&said, &[file!(), &format!("padding {count}"), "0..5"]);
    }
    for share in [-0.5, f32::NAN, 1.5] {
        let lora: &dyn Fn(Scope) -> Layer =
            &|at| Box::new(LoraLinear::new(at, 4, 4, 2).dropout(share));
        let said = refused(lora, F32, (3, 4));
        assert_has(&said, &[file!(), &format!("{share} is not a probability")]);
    }
    let lstm: &dyn Fn(Scope) -> Layer = &|at| Box::new(Lstm::new(at, 4, 4).layers(0));
    let said = refused(lstm, F32, (3, 4));
    assert_has(&said, &[file!(), "lstm", "0 layers"]);
}

/// Bases and scalings whose frequencies are no numbers gave NaN for every token.
#[test]
fn frequencies_of_rotary_positions_are_finite() {
    for rope in [
        Rope::new(4).base(0.0),
        Rope::new(4).base(-2.0),
        Rope::new(4).base(f32::NAN),
        Rope::new(4).scaling(RopeScaling::Linear(0.0)),
    ] {
        let trace = Trace::inference();
        let x = trace.input("x", F32, (2, 3, 4));
        let (y, line) = (x.rope(trace.arange(3), &rope), line!());
        let said = text(session(Params::seeded(0)).compile(&trace, [y]));
        assert_has(&said, &[&location(line), "rope of [2, 3, 4]", "not finite"]);
    }
}

/// Numbers of steps beyond those of a sequence fail the run, as in PyTorch.
#[test]
fn lengths_of_recurrent_layers_are_checked() {
    let params = Params::seeded(0);
    let gru = Gru::new(&params.root() / "a", 2, 3);
    let trace = Trace::inference();
    let x = trace.input("x", F32, (2, 4, 2));
    let lengths = trace.input("lengths", I32, (2,));
    let ((_, last), line) = (gru.run(x, None, Some(lengths)), line!());
    let mut session = session(params);
    let program = session.compile(&trace, [last]).expect("it compiles");
    let x = ndarray::Array3::<f32>::ones((2, 4, 2));
    let mut run = |lengths: [i32; 2]| session.run(&program, (&x, &arr1(&lengths))).map(|_| ());
    run([4, 0]).expect("they fit");
    for (lengths, named) in [
        ([5, 1], "5 at position 0 is outside 0..5"),
        ([4, -1], "-1 at position 1 is outside 0..5"),
    ] {
        assert_has(&text(run(lengths)), &[&location(line), named]);
    }
}
