//! Sessions beside running programs: values copied between models, constants, random numbers for
//! sampling, checks of finite losses, times of kernels.

use ndarray::{Array2, Array4, arr1, arr2};
use slabwise::half::f16;
use slabwise::nn::{BatchNorm2d, Linear};
use slabwise::optim::{Adam, Sgd};
use slabwise::prelude::*;
use slabwise::{Error, Program};

fn session(params: Params) -> Session {
    Session::new(Device::Cpu, params)
        .expect("a session")
        .with_threads(2)
}

fn values(session: &Session) -> Vec<(String, ndarray::ArrayD<f32>)> {
    session
        .names()
        .map(|n| (n.to_string(), session.value(n).expect("it is there")))
        .collect()
}

/// Frozen statistics normalize a training batch as they do an inference batch, and stay; the other
/// weights learn.
#[test]
fn frozen_statistics_of_a_norm_stay_while_it_learns() {
    let params = Params::seeded(1);
    let norm = BatchNorm2d::new(&params.root() / "norm", 3).frozen_statistics();
    let mut session = session(params.clone());
    let x = Array4::from_shape_fn((2, 3, 4, 5), |(n, c, y, x)| (n + 2 * c + y * x) as f32);
    let infer = Trace::inference().named("infer");
    let y = infer.input("x", F32, (2, 3, 4, 5)).apply(&norm);
    let infer = session.compile(&infer, [y]).expect("it compiles");
    let train = Trace::training();
    let y = train.input("x", F32, (2, 3, 4, 5)).apply(&norm);
    let loss = y.square().mean();
    train.minimize(loss, Sgd::new(0.1));
    let train = session.compile(&train, [loss, y]).expect("it compiles");
    let (mean, variance) = (arr1(&[1.0f32, -2.0, 3.0]), arr1(&[0.5f32, 4.0, 9.0]));
    for (name, value) in [("running_mean", &mean), ("running_var", &variance)] {
        session
            .set_value(&format!("norm.{name}"), value)
            .expect("it fits");
    }
    let before = session.value("norm.weight").expect("it is there");
    let [inferred] = session.run(&infer, &x).expect("it runs");
    let inferred = inferred.array::<f32>().expect("f32");
    let [_, trained] = session.run(&train, &x).expect("it runs");
    let trained = trained.array::<f32>().expect("f32");
    let far = inferred
        .iter()
        .zip(&trained)
        .any(|(a, b)| (a - b).abs() > 1e-6 * a.abs());
    assert!(!far, "{inferred} {trained}");
    let value = |name| session.value(name).expect("it is there");
    assert_eq!(value("norm.running_mean"), mean.into_dyn());
    assert_eq!(value("norm.running_var"), variance.into_dyn());
    assert_ne!(value("norm.weight"), before);
    assert_ne!(value("norm.bias"), arr1(&[0.0f32; 3]).into_dyn());
}

#[test]
fn gradients_of_any_number_of_parameters_are_those_of_each() {
    let params = Params::seeded(2);
    let layers: Vec<Linear> = (0..5)
        .map(|i| Linear::new(&params.root() / &format!("layer{i}"), 4, 4))
        .collect();
    let trace = Trace::inference();
    let x = trace.input("x", F32, (3, 4));
    let loss = layers
        .iter()
        .fold(x, |x, layer| x.apply(layer).tanh())
        .square()
        .mean();
    let declared = params.declared();
    let many = trace.gradients_many(loss, &declared);
    assert_eq!(many.len(), 10);
    let each: Vec<Tensor> = declared
        .iter()
        .map(|param| trace.gradients(loss, [param])[0])
        .collect();
    let outputs: Vec<Tensor> = many.into_iter().chain(each).collect();
    let mut session = session(params);
    let program = session.compile_any(&trace, &outputs).expect("it compiles");
    let x = Array2::from_shape_fn((3, 4), |(i, j)| (i * 4 + j) as f32 / 7.0);
    let outputs = session.run_any(&program, &x).expect("it runs");
    let arrays: Vec<_> = outputs
        .iter()
        .map(|output| output.array::<f32>().expect("f32"))
        .collect();
    assert_eq!(arrays[..10], arrays[10..]);
}

#[test]
fn errors_about_wrong_names_list_the_declared_ones_before_a_program_is_compiled() {
    let params = Params::seeded(0);
    Linear::new(&params.root() / "head", 4, 2);
    let session = session(params);
    let error = session.value("head.weigth").expect_err("it is misspelt");
    assert!(
        error.to_string().contains(r#"did you mean "head.weight"?"#),
        "{error}"
    );
}

/// States of integers have more numbers than f32 holds: they are read and set in their own type, and
/// an f32 that an integer cannot hold is refused.
#[test]
fn integer_states_are_read_and_set_exactly() {
    let mut session = session(Params::seeded(0xDEAD_BEEF_1234_5678));
    let trace = Trace::inference().sampling();
    let counts = trace.state("counts", I32, (2,), Init::Constant(0.0));
    let read = counts.value();
    let truth = trace.state("truth", Bool, (2,), Init::Constant(0.0));
    truth.set(truth.value());
    let program = session
        .compile(&trace, [trace.uniform((2,)), read])
        .expect("it compiles");
    let state = session.value_as::<i32>("sampling").expect("it is i32");
    let mut drawn = || {
        session
            .set_value("sampling", &state)
            .expect("it is its own value");
        let [numbers, _] = session.run(&program, ()).expect("it runs");
        numbers.array::<f32>().expect("f32")
    };
    assert_eq!(drawn(), drawn(), "the same state draws the same numbers");

    let large = arr1(&[1 << 24, (1 << 24) + 1]);
    session.set_value("counts", &large).expect("it fits");
    let counts = session.value_as::<i32>("counts").expect("it is i32");
    assert_eq!(counts, large.into_dyn());
    let refused = |result: Result<()>| result.expect_err("it does not fit").to_string();
    assert_eq!(
        refused(session.value("counts").map(drop)),
        r#""counts": element [1] is 16777217, which f32 cannot hold; read it by value_as::<i32>"#
    );
    session
        .set_value("counts", &arr1(&[-7.0f32, 2147483520.0]))
        .expect("both are integers");
    for (numbers, said) in [
        ([1.0f32, 2.7], "element [1] is 2.7, which i32 cannot hold"),
        (
            [2147483648.0, 0.0],
            "element [0] is 2147483600, which i32 cannot hold",
        ),
        ([f32::NAN, 0.0], "element [0] is NaN, which i32 cannot hold"),
    ] {
        let message = refused(session.set_value("counts", &arr1(&numbers)));
        assert_eq!(message, format!(r#""counts": {said}"#));
    }
    assert_eq!(
        refused(session.set_value("counts", &arr1(&[1i64 << 40, 0]))),
        r#""counts": element [0] is 1099511627776, which i32 cannot hold"#
    );
    assert_eq!(
        refused(session.set_value("counts", &arr1(&[true, false]))),
        r#""counts" is i32, the array is bool; cast it first"#
    );
    let counts = session.value_as::<i32>("counts").expect("it is i32");
    assert_eq!(
        counts,
        arr1(&[-7, 2147483520]).into_dyn(),
        "it keeps its value"
    );
    session
        .value_as::<f32>("counts")
        .expect_err("it is of another type");

    let truth = session.value_as::<u8>("truth").expect("as bytes");
    assert_eq!(truth, arr1(&[0u8, 0]).into_dyn());
    session
        .set_value("truth", &arr1(&[1u8, 0]))
        .expect("truth values");
    let truth = session.value_as::<u8>("truth").expect("as bytes");
    assert_eq!(truth, arr1(&[1u8, 0]).into_dyn());
    assert_eq!(
        refused(session.set_value("truth", &arr1(&[1u8, 2]))),
        r#""truth": element [1] is 2, which bool cannot hold"#
    );
}

#[test]
fn values_are_copied_from_one_model_to_another() {
    let params = Params::seeded(3);
    for name in ["online", "target", "targets"] {
        Linear::new(&params.root() / name / "head", 4, 2);
        BatchNorm2d::new(&params.root() / name / "norm", 4);
    }
    let mut session = session(params);
    session
        .copy_values("online.head", "online.head.copy")
        .expect_err("one lies in the other");
    let others = session.value("targets.head.weight").expect("it is there");
    assert_ne!(
        session.value("online.head.weight").expect("it is there"),
        session.value("target.head.weight").expect("it is there")
    );
    session
        .set_value("online.norm.running_mean", &arr1(&[1.0, 2.0, 3.0, 4.0]))
        .expect("it fits");
    assert_eq!(
        session
            .copy_values("online", "target")
            .expect("they are alike"),
        6,
        "weights and statistics"
    );
    for name in [
        "head.weight",
        "head.bias",
        "norm.weight",
        "norm.running_mean",
    ] {
        let [a, b] = ["online", "target"]
            .map(|of| session.value(&format!("{of}.{name}")).expect("it is there"));
        assert_eq!(a, b, "{name}");
    }
    assert_eq!(
        session.value("targets.head.weight").expect("it is there"),
        others,
        "a path is not a prefix of letters"
    );
    assert_eq!(
        session
            .copy_values("target.head.bias", "targets.head.bias")
            .expect("one tensor"),
        1
    );
    let before = values(&session);
    for (from, to) in [
        ("online", "target.head"),
        ("nothing", "target"),
        ("online.head.weight", "target.head.bias"),
        ("", "target"),
    ] {
        session.copy_values(from, to).expect_err("no counterparts");
    }
    assert_eq!(values(&session), before);
}

#[test]
fn constants_are_part_of_a_program_and_of_no_file() {
    let params = Params::seeded(3);
    let layer = Linear::new(&params.root() / "head", 3, 2);
    let mut session = session(params.clone());
    let table = arr2(&[[1.0f32, 10.0, 100.0], [0.5, 0.25, 0.125]]);
    let trace = Trace::training();
    let x = trace.input("x", F32, (2, 3));
    let scaled = x * trace.constant(&table);
    let again = trace.constant(&table.t().to_owned().t());
    let indices = trace.constant(&[2i32, 0]);
    let picked = scaled.index_select(1, indices);
    let loss = scaled.apply(&layer).square().mean();
    trace.minimize(loss, Sgd::new(0.01));
    let program = session
        .compile(&trace, [scaled, again, picked])
        .expect("compiles");
    let x = arr2(&[[1.0f32, 2.0, 3.0], [4.0, 5.0, 6.0]]);
    for _ in 0..2 {
        let [scaled, again, picked] = session.run(&program, &x).expect("runs");
        assert_eq!(
            scaled.array::<f32>().expect("f32"),
            (&x * &table).into_dyn()
        );
        assert_eq!(again.array::<f32>().expect("f32"), table.clone().into_dyn());
        assert_eq!(
            picked.array::<f32>().expect("f32"),
            arr2(&[[300.0f32, 1.0], [0.75, 2.0]]).into_dyn()
        );
    }
    assert_eq!(
        session.names().collect::<Vec<_>>(),
        ["head.weight", "head.bias"],
        "a constant is no weight and no state"
    );
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("a.safetensors");
    session.save(&path).expect("it is saved");
    // A session without that program has no such constant, and loads without it.
    let mut other = self::session(params);
    other
        .load(&path)
        .expect("nothing is missing, nothing is left over");
    assert_eq!(
        other.value("head.weight").expect("it is there"),
        session.value("head.weight").expect("it is there")
    );
    session
        .load(&path)
        .expect("nothing is missing, nothing is left over");
    assert_eq!(
        session.run(&program, &x).expect("runs")[1]
            .array::<f32>()
            .expect("f32"),
        table.into_dyn()
    );
}

/// A program that draws twelve numbers, and a training step with dropout.
fn drawing(params: &Params, session: &mut Session) -> (Program<1>, Program<1>) {
    let trace = Trace::inference().sampling().named("sample");
    let sample = session
        .compile(&trace, [trace.normal((3, 4))])
        .expect("compiles");
    let layer = Linear::new(&params.root() / "head", 4, 2);
    let trace = Trace::training();
    let loss = trace
        .ones((8, 4))
        .dropout(0.5)
        .apply(&layer)
        .square()
        .mean();
    trace.minimize(loss, Adam::new(0.1));
    (sample, session.compile(&trace, [loss]).expect("compiles"))
}

#[test]
fn sampling_draws_anew_in_each_run_and_leaves_training_alone() {
    let params = Params::seeded(5);
    let mut session = session(params.clone());
    let (sample, train) = drawing(&params, &mut session);
    let draw = |session: &mut Session| {
        session.run(&sample, ()).expect("runs")[0]
            .array::<f32>()
            .expect("f32")
    };
    let first: Vec<_> = (0..3).map(|_| draw(&mut session)).collect();
    assert!(
        first[0] != first[1] && first[1] != first[2] && first[0] != first[2],
        "{first:?}"
    );
    let losses: Vec<u32> = (0..3)
        .map(|_| session.run(&train, ()).expect("runs")[0].item().to_bits())
        .collect();

    // The same seed gives the same numbers, however sampling and training alternate.
    let mut same = self::session(params.clone());
    let (sample_too, train_too) = drawing(&params, &mut same);
    for at in 0..3 {
        assert_eq!(
            same.run(&train_too, ()).expect("runs")[0].item().to_bits(),
            losses[at]
        );
        assert_eq!(
            same.run(&sample_too, ()).expect("runs")[0]
                .array::<f32>()
                .expect("f32"),
            first[at]
        );
    }

    // A session that continues from a file draws the same next numbers as this one.
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("a.safetensors");
    session.save(&path).expect("it is saved");
    let next = draw(&mut session);
    same.load(&path).expect("it is loaded");
    assert_eq!(
        same.run(&sample_too, ()).expect("runs")[0]
            .array::<f32>()
            .expect("f32"),
        next
    );
    // The state can be set by hand; another seed gives other numbers.
    session
        .set_value("sampling", &arr1(&[5.0, 1.0, 0.0]))
        .expect("three numbers");
    let other = draw(&mut session);
    assert!(!first.contains(&other));
    session
        .set_value("sampling", &arr1(&[5.0, 1.0, 0.0]))
        .expect("three numbers");
    assert_eq!(draw(&mut session), other);

    // Without it an inference trace draws the same numbers in every run.
    let trace = Trace::inference();
    let fixed = session
        .compile(&trace, [trace.normal((3, 4))])
        .expect("compiles");
    let [a, b] = [(); 2].map(|()| {
        session.run(&fixed, ()).expect("runs")[0]
            .array::<f32>()
            .expect("f32")
    });
    assert_eq!(a, b);
}

#[test]
fn a_loss_that_is_required_to_be_finite_changes_nothing_when_it_is_not() {
    let params = Params::seeded(0);
    let layer = Linear::new(&params.root() / "head", 2, 1);
    let trace = Trace::training();
    let x = trace.input("x", F32, (Dim::bounded("batch", 4), 2));
    let seen = trace.state("seen", F32, (), Init::Constant(0.0));
    seen.set(seen.value() + 1.0);
    let (loss, line) = (x.apply(&layer).square().mean().require_finite(), line!());
    trace.minimize(loss, Adam::new(0.1));
    let mut session = session(params);
    let program = session.compile(&trace, [loss]).expect("compiles");
    let good = arr2(&[[1.0f32, 2.0], [3.0, 4.0]]);
    session.run(&program, &good).expect("it is finite");
    let before = values(&session);
    for (bad, said) in [
        (f32::NAN, "NaN"),
        (f32::INFINITY, "infinite"),
        (1e30, "infinite"),
    ] {
        for dynamic in [false, true] {
            let x = arr2(&[[1.0f32, 2.0], [3.0, bad]]);
            let result = if dynamic {
                session.run_dynamic(&program, &x)
            } else {
                session.run(&program, &x)
            };
            let error = result.err().expect("it is not finite");
            assert!(matches!(error, Error::Data { .. }), "{error}");
            let place = format!("{}:{line}: ", file!());
            let text = error.to_string();
            assert!(
                text.starts_with(&format!(
                    "{place}require_finite: the element at position 0 is {said}"
                )),
                "{text}"
            );
            assert!(text.ends_with("no weight was changed"), "{text}");
            assert_eq!(values(&session), before);
        }
    }
    session.run(&program, &good).expect("the session is usable");
    assert_ne!(values(&session), before);
    // Whole tensors, halves too.
    let trace = Trace::inference();
    let x = trace.input("x", F16, (3,));
    let program = session
        .compile(&trace, [x.require_finite().cast(F32).sum()])
        .expect("compiles");
    let half = f16::from_f32;
    assert_eq!(
        session
            .run(&program, [half(1.0), half(-2.0), half(4.0)])
            .expect("finite")[0]
            .item(),
        3.0
    );
    let error = session
        .run(&program, [half(1.0), half(2.0), half(f32::NEG_INFINITY)])
        .err()
        .expect("not finite")
        .to_string();
    assert!(
        error.contains("the element at position 2 is infinite"),
        "{error}"
    );
}

#[test]
fn kernels_are_timed_by_name_and_line() {
    let params = Params::seeded(0);
    let layer = Linear::new(&params.root() / "head", 16, 8);
    let trace = Trace::inference();
    let line = line!() + 1;
    let y = trace.input("x", F32, (4, 16)).apply(&layer).relu();
    let mut session = session(params);
    let program = session.compile(&trace, [y]).expect("compiles");
    let times = session
        .profile(&program, Array2::<f32>::ones((4, 16)), 2)
        .expect("runs");
    assert_eq!(
        times.kernels.iter().map(|k| &*k.name).collect::<Vec<_>>(),
        program.plan().steps().collect::<Vec<_>>()
    );
    assert!(
        times.kernels.iter().all(|k| k.seconds.is_finite()
            && k.location.file() == file!()
            && k.location.line() == line),
        "{times:?}"
    );
}

#[test]
fn names_of_inputs_and_dimensions_can_be_made_while_a_program_runs() {
    let mut session = session(Params::seeded(0));
    let trace = Trace::inference();
    let all: Vec<Tensor<'_>> = (0..3)
        .map(|i| {
            trace.input(
                &format!("x{i}"),
                F32,
                (Dim::bounded(Dim::name(&format!("n{}", i % 2)), 4), 2),
            )
        })
        .collect();
    assert_eq!(
        Dim::name("n1").as_ptr(),
        Dim::name(&String::from("n1")).as_ptr(),
        "a name is kept once"
    );
    let program = session
        .compile(&trace, [all[0].sum() + all[1].sum() + all[2].sum()])
        .expect("compiles");
    let ones = |n| Array2::<f32>::ones((n, 2));
    assert_eq!(
        session
            .run(&program, (&ones(1), &ones(3), &ones(1)))
            .expect("runs")[0]
            .item(),
        10.0
    );
    let error = session
        .run(&program, (&ones(1), &ones(3), &ones(2)))
        .err()
        .expect("n0 is 1 and 2")
        .to_string();
    assert!(
        error.contains("input \"x2\"") && error.contains("\"n0\" is 2, but 1"),
        "{error}"
    );
}

#[test]
fn slices_by_one_length_tensor_have_one_length() {
    let trace = Trace::inference();
    let (x, y) = (trace.input("x", F32, (8, 4)), trace.input("y", F32, (6, 4)));
    let (start, length) = (
        trace.input("start", I32, ()),
        trace.input("length", I32, ()),
    );
    let same = x.dynamic_slice(0, start, length) + x.dynamic_slice(0, start, length);
    let shifted = x.dynamic_slice(0, start + 1, length) * y.dynamic_slice(0, 0, length);
    let mut session = session(Params::seeded(0));
    let program = session
        .compile(&trace, [same.sum(), shifted.sum()])
        .expect("their lengths are one");
    let (ones, table) = (
        Array2::<f32>::ones((6, 4)),
        Array2::from_shape_fn((8, 4), |(i, _)| i as f32),
    );
    for (start, length) in [(0, 0), (0, 1), (2, 3), (1, 6)] {
        let [a, b] = session
            .run(&program, (&table, &ones, [start], [length]))
            .expect("inside of both");
        let sum = |from: i32| (from..from + length).map(|i| 4.0 * i as f32).sum::<f32>();
        assert_eq!(
            (a.item(), b.item()),
            (2.0 * sum(start), sum(start + 1)),
            "{start}, {length}"
        );
    }
    // A length that only the first axis has is refused for the second.
    let error = session
        .run(&program, (&table, &ones, [0], [7]))
        .err()
        .expect("y has 6 rows")
        .to_string();
    assert!(error.contains("outside 0..7"), "{error}");
}

/// A wider array gives the results of the narrower one; a value out of range is named, and nothing
/// has run then.
#[test]
fn wide_arrays_are_narrowed_and_values_out_of_range_are_named() {
    let trace = Trace::inference().named("wide");
    let x = trace.input("x", F32, (2, 3));
    let y = trace.input("y", I32, (2,));
    let total = trace.state("total", F32, (1,), Init::Constant(0.0));
    let sum = x.sum_over(1) * trace.constant(&[0.5f64, 2.0]) + y.cast(F32);
    total.set(total.last() + sum.sum());
    let mut session = session(Params::seeded(0));
    let program = session.compile(&trace, [sum]).expect("it compiles");
    let narrow = (arr2(&[[1.0f32, 2.0, 0.1], [4.0, 5.0, 6.0]]), arr1(&[7, -8]));
    let wide = (arr2(&[[1.0, 2.0, 0.1], [4.0, 5.0, 6.0]]), arr1(&[7i64, -8]));
    let mut run = |x: &dyn slabwise::feed::Input, y: &dyn slabwise::feed::Input| {
        let result = session.run(&program, &[x, y][..]);
        let result = result.map(|[sum]| sum.array::<f32>().expect("f32"));
        let result = result.map_err(|e| e.to_string());
        (result, session.value("total").expect("it is there")[[0]])
    };
    let (expected, first) = run(&narrow.0, &narrow.1);
    let (found, second) = run(&wide.0, &wide.1);
    assert_eq!(found, expected);
    assert_eq!(second, 2.0 * first);
    // Turned around in memory, the element is still named by its place.
    let mut huge = Array2::<f64>::zeros((3, 2)).reversed_axes();
    huge[[1, 2]] = -1e39;
    let (error, third) = run(&huge, &narrow.1);
    let error = error.expect_err("f32 ends at 3.4e38");
    for part in ["\"x\"", "element [1, 2] is -1e39, which f32 cannot hold"] {
        assert!(error.contains(part), "{error}");
    }
    let (error, fourth) = run(&narrow.0, &vec![1i64, i64::from(i32::MAX) + 1]);
    let error = error.expect_err("i32 ends at 2147483647");
    for part in ["\"y\"", "element [1] is 2147483648, which i32 cannot hold"] {
        assert!(error.contains(part), "{error}");
    }
    assert_eq!((third, fourth), (second, second), "nothing has run");
    // What f32 has too is no mistake.
    huge[[1, 2]] = f64::NEG_INFINITY;
    assert!(run(&huge, &narrow.1).0.is_ok());
    // A wrong kind of type is named as before.
    let (error, _) = run(&narrow.1, &narrow.1);
    assert!(error.is_err_and(|e| e.contains("i32")));
    let trace = Trace::inference();
    let constant = trace.constant(&[i64::MAX]);
    let error = session.compile(&trace, [constant]).err();
    let error = error.expect("too large").to_string();
    assert!(
        error.contains("tests/sessions.rs") && error.contains("element [0] is 9223372036854775807"),
        "{error}"
    );
}

/// A batch that is prefetched is looked at before it is copied on another thread.
#[test]
fn prefetched_batches_are_narrowed_too() {
    let params = Params::seeded(0);
    let mut session = session(params).with_prefetch(2);
    let trace = Trace::inference();
    let sum = trace.input("x", F32, (2,)).sum();
    let program = session.compile(&trace, [sum]).expect("it compiles");
    session
        .prefetch(&program, vec![1.0f64, 2.5])
        .expect("a free slot");
    let error = session
        .prefetch(&program, vec![1.0, 1e300])
        .expect_err("f32 ends at 3.4e38");
    assert!(
        error.to_string().contains("element [1] is 1e300"),
        "{error}"
    );
    let [sum] = session.run_prefetched(&program).expect("it runs");
    assert_eq!(sum.item(), 3.5);
}

#[test]
fn a_state_of_another_program_is_no_parameter() {
    let params = Params::seeded(0);
    params.root().param("count", (4,), Init::Constant(1.0));
    let mut session = session(params);
    let trace = Trace::inference();
    let count = trace.state("count", F32, (4,), Init::Constant(0.0));
    count.set(count.value() + 1.0);
    let text = match session.compile(&trace, [count.value().sum()]) {
        Ok(_) => panic!("the state is the weight"),
        Err(error) => error.to_string(),
    };
    let told = "\"count\" is a parameter in this session and a state in this program";
    assert!(text.contains(told), "{text}");
}

/// The work of kernels whose lengths a run finds, and of those that run on parts of a batch.
#[test]
fn the_work_of_kernels_is_that_of_the_run() {
    let trace = Trace::inference();
    let x = trace.input("x", F32, (1 << 12,));
    let y = x.masked_select(x.gt(0.0)).exp();
    let mut session = session(Params::seeded(0));
    let program = session.compile(&trace, [y]).expect("it compiles");
    let x = ndarray::Array1::<f32>::ones(1 << 12);
    let profile = session.profile(&program, (&x,), 2).expect("it runs");
    let exp = profile.kernels.iter().find(|k| k.name.contains("gather"));
    let exp = exp.unwrap_or_else(|| panic!("{profile}"));
    assert!(exp.flops >= 1 << 12 && exp.bytes >= 8 << 12, "{exp:?}");

    let params = Params::seeded(0);
    let layers: Vec<Linear> = (0..3)
        .map(|k| Linear::new(&params.root() / &format!("layer{k}"), 64, 64))
        .collect();
    let trace = Trace::inference();
    let x = trace.input("x", F32, (Dim::bounded("batch", 1024), 64));
    let y = layers
        .iter()
        .fold(x, |x, layer| x.apply(layer).tanh())
        .sum();
    let work = |budget: Budget| {
        let mut session = Session::new(Device::Cpu, params.clone())
            .expect("a session")
            .with_budget(budget);
        let program = session.compile(&trace, [y]).expect("it fits");
        let x = Array2::<f32>::ones((1024, 64));
        let profile = session.profile(&program, (&x,), 1).expect("it runs");
        let flops: u64 = profile.kernels.iter().map(|k| k.flops).sum();
        (profile.kernels.len(), flops)
    };
    let (all, within) = (work(Budget::Unlimited), work(Budget::Fraction(0.6)));
    assert!(within.0 > all.0, "{within:?} beside {all:?}");
    assert!(within.1 < all.1 * 3 / 2, "{within:?} beside {all:?}");
}
