//! Resident buffers: fed without a copy, donated to an output, invalid after that.

use ndarray::{Array2, arr2};
use slabwise::prelude::*;
use slabwise::{CustomKernel, Error, Program};

fn doubling(session: &mut Session) -> Program<1> {
    let trace = Trace::inference().named("double");
    let x = trace.input("x", F32, (2, 3));
    trace.donate(x, 0);
    session
        .compile(&trace, [x * 2.0 + x.sum()])
        .expect("compiles")
}

fn start() -> (Session, Array2<f32>) {
    (
        Session::new(Device::Cpu, Params::seeded(0)).expect("a session"),
        arr2(&[[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]),
    )
}

#[test]
fn a_resident_buffer_is_read_where_it_is_and_stays() {
    let (mut session, x) = start();
    let program = doubling(&mut session);
    let buffer = session.upload("x", &x).expect("uploads");
    for _ in 0..3 {
        let [y] = session.run(&program, (&buffer,)).expect("runs");
        assert_eq!(y.array::<f32>().expect("f32"), (&x * 2.0 + 21.0).into_dyn());
    }
    assert_eq!(
        session.download::<f32>(&buffer).expect("is alive"),
        x.into_dyn()
    );
}

#[test]
fn a_donated_buffer_becomes_the_output_and_is_dead() {
    let (mut session, x) = start();
    let program = doubling(&mut session);
    let first = session.upload("x", &x).expect("uploads");
    let copy = first.clone();
    let [y] = session.run(&program, (first.donate(),)).expect("runs");
    let second = y.buffer().expect("the output took the buffer over");
    let want = (&x * 2.0 + 21.0).into_dyn();
    assert_eq!(session.download::<f32>(&second).expect("is alive"), want);
    let error = session
        .run(&program, (&copy,))
        .err()
        .expect("the buffer was donated");
    assert!(
        matches!(&error, Error::Donated { name } if name == "x"),
        "{error}"
    );
    assert!(matches!(
        session.download::<f32>(&copy),
        Err(Error::Donated { .. })
    ));
    // The new handle is valid, in dynamic mode too.
    let [z] = session
        .run_dynamic(&program, (second.donate(),))
        .expect("runs");
    let third = z.buffer().expect("the output took the buffer over");
    let sum: f32 = want.sum();
    assert_eq!(
        session.download::<f32>(&third).expect("is alive"),
        want * 2.0 + sum
    );
}

#[test]
fn one_buffer_cannot_be_donated_and_used_in_one_run() {
    let (mut session, x) = start();
    let trace = Trace::inference();
    let [a, b] = ["a", "b"].map(|name| trace.input(name, F32, (2, 3)));
    trace.donate(a, 0);
    let program = session.compile(&trace, [a + b]).expect("compiles");
    let buffer = session.upload("x", &x).expect("uploads");
    let copy = buffer.clone();
    let error = session
        .run(&program, (buffer.donate(), &copy))
        .err()
        .expect("one buffer cannot be both")
        .to_string();
    assert!(
        error.starts_with("input \"b\": the buffer \"x\" is donated, and fed to another input too"),
        "{error}"
    );
    assert_eq!(
        session
            .download::<f32>(&copy)
            .expect("nothing ran, nothing is lost"),
        x.into_dyn()
    );
}

#[test]
fn freed_and_foreign_buffers_are_errors() {
    let (mut session, x) = start();
    let program = doubling(&mut session);
    let buffer = session.upload("x", &x).expect("uploads");
    let (mut other, _) = start();
    let elsewhere = other.upload("y", &x).expect("uploads");
    assert!(matches!(
        session.run(&program, (&elsewhere,)),
        Err(Error::Foreign(_))
    ));
    session.free(buffer.clone()).expect("is alive");
    assert!(matches!(session.run(&program, (&buffer,)), Err(Error::Freed { name }) if name == "x"));
    assert!(matches!(
        session.download::<f32>(&buffer),
        Err(Error::Freed { .. })
    ));
    // Another buffer has the slot now; the old handle does not refer to it.
    let other = session.upload("z", &x).expect("uploads");
    assert!(matches!(session.free(buffer), Err(Error::Freed { .. })));
    assert_eq!(
        session.download::<f32>(&other).expect("is alive"),
        x.into_dyn()
    );
}

#[test]
fn a_donation_that_no_output_takes_is_refused_and_the_buffer_stays() {
    let (mut session, x) = start();
    let trace = Trace::inference().named("sum");
    let input = trace.input("x", F32, (2, 3));
    let program = session.compile(&trace, [input.sum()]).expect("compiles");
    let buffer = session.upload("pixels", &x).expect("uploads");
    let copy = buffer.clone();
    let donated = buffer.donate();
    for dynamic in [false, true] {
        let result = if dynamic {
            session.run_dynamic(&program, (&donated,))
        } else {
            session.run(&program, (&donated,))
        };
        let error = result.err().expect("nothing takes the bytes").to_string();
        let said = "input \"x\": the buffer \"pixels\" is donated to it, but no output of \"sum\" takes its bytes";
        assert!(error.starts_with(said), "{error}");
    }
    assert_eq!(
        session.download::<f32>(&copy).expect("is alive"),
        x.clone().into_dyn()
    );
    assert_eq!(session.run(&program, &copy).expect("runs")[0].item(), 21.0);
}

#[test]
fn outputs_become_buffers_that_feed_other_programs() {
    let (mut session, x) = start();
    let trace = Trace::inference().named("double");
    let input = trace.input("x", F32, (2, 3));
    let double = session
        .compile(&trace, [input * 2.0, input.sum()])
        .expect("compiles");
    let trace = Trace::inference().named("add");
    let (a, b) = (trace.input("a", F32, (2, 3)), trace.input("b", F32, ()));
    let add = session.compile(&trace, [a + b]).expect("compiles");
    let [twice, sum] = session.run_resident(&double, &x).expect("runs");
    // The next run of either program leaves them unchanged.
    session.run(&double, &(&x * 100.0)).expect("runs");
    for _ in 0..2 {
        let [y] = session.run(&add, (&twice, &sum)).expect("runs");
        assert_eq!(y.array::<f32>().expect("f32"), (&x * 2.0 + 21.0).into_dyn());
        assert_eq!(format!("{y:?}"), "f32 [2, 3]");
    }
    session.free(twice).expect("is alive");
    session.free(sum).expect("is alive");
}

#[test]
fn one_input_is_a_feed_by_itself() {
    let (mut session, x) = start();
    let program = doubling(&mut session);
    let want = (&x * 2.0 + 21.0).into_dyn();
    let flat: Vec<f32> = x.iter().copied().collect();
    assert_eq!(
        session.run(&program, &x).expect("an array")[0]
            .array::<f32>()
            .expect("f32"),
        want
    );
    assert_eq!(
        session.run(&program, x.view()).expect("a view")[0]
            .array::<f32>()
            .expect("f32"),
        want
    );
    assert_eq!(
        session.run(&program, &flat).expect("a vector")[0]
            .array::<f32>()
            .expect("f32"),
        want
    );
    assert_eq!(
        session.run(&program, &flat[..]).expect("a slice")[0]
            .array::<f32>()
            .expect("f32"),
        want
    );
    assert_eq!(
        session
            .run(&program, [1.0f32, 2.0, 3.0, 4.0, 5.0, 6.0])
            .expect("numbers")[0]
            .array::<f32>()
            .expect("f32"),
        want
    );
    let buffer = session.upload("x", &x).expect("uploads");
    assert_eq!(
        session.run(&program, &buffer).expect("a buffer")[0]
            .array::<f32>()
            .expect("f32"),
        want
    );
    assert_eq!(
        session
            .run(&program, buffer.donate())
            .expect("a donated one")[0]
            .array::<f32>()
            .expect("f32"),
        want
    );
}

#[test]
fn donations_that_do_not_fit_are_mistakes() {
    let (mut session, _) = start();
    let trace = Trace::inference();
    let x = trace.input("x", F32, (2, 3));
    trace.donate(x, 0);
    let line = line!() - 1;
    trace.donate(x, 1);
    trace.donate(x + 1.0, 0);
    let error = session
        .compile(&trace, [x.sum()])
        .err()
        .expect("three mistakes")
        .to_string();
    assert!(
        error.contains(&format!("buffers.rs:{}", line + 2)),
        "{error}"
    );
    assert!(
        error.contains("donated a second time") && error.contains("only an input"),
        "{error}"
    );
    let trace = Trace::inference();
    let x = trace.input("x", F32, (2, 3));
    trace.donate(x, 0);
    let error = session
        .compile(&trace, [x.sum()])
        .err()
        .expect("another shape")
        .to_string();
    assert!(
        error.contains("input \"x\" is f32 [2, 3], output 0 is f32 []"),
        "{error}"
    );
}

#[test]
fn a_donated_buffer_is_the_resident_output() {
    let (mut session, x) = start();
    let program = doubling(&mut session);
    let mut buffer = session.upload("x", &x).expect("uploads");
    let mut want = x.into_dyn();
    let mut bytes = None;
    for _ in 0..4 {
        let [next] = session
            .run_resident(&program, (buffer.donate(),))
            .expect("runs");
        want = &want * 2.0 + want.sum();
        assert_eq!(session.download::<f32>(&next).expect("is alive"), want);
        assert_eq!(
            *bytes.get_or_insert(session.device_bytes()),
            session.device_bytes()
        );
        buffer = next;
    }
    session.free(buffer).expect("one handle is alive");
}

#[test]
fn a_number_of_outputs_known_at_run_time_takes_donations() {
    let (mut session, x) = start();
    let trace = Trace::inference();
    let input = trace.input("x", F32, (2, 3));
    trace.donate(input, 1);
    let outputs = [input.sum(), input + 1.0];
    let program = session.compile_any(&trace, &outputs).expect("it compiles");
    let buffer = session.upload("x", &x).expect("uploads");
    let copy = buffer.clone();
    let results = session.run_any(&program, (buffer.donate(),)).expect("runs");
    assert!(results[0].buffer().is_none());
    let next = results[1]
        .buffer()
        .expect("the output took the buffer over");
    let gone = session.download::<f32>(&copy);
    assert!(matches!(gone, Err(Error::Donated { .. })));
    assert_eq!(
        session.download::<f32>(&next).expect("is alive"),
        (x + 1.0).into_dyn()
    );
}

#[test]
fn measurements_take_no_donations() {
    let (mut session, x) = start();
    let program = doubling(&mut session);
    let buffer = session.upload("x", &x).expect("uploads");
    let told = |error: Error| {
        let text = error.to_string();
        assert!(
            text.contains("\"x\"") && text.contains("without donating"),
            "{text}"
        );
    };
    let copy = buffer.clone();
    told(
        session
            .record(&program, (copy.donate(),))
            .expect_err("refused"),
    );
    let copy = buffer.clone();
    told(
        session
            .profile(&program, (copy.donate(),), 2)
            .expect_err("refused"),
    );
    let copy = buffer.clone();
    told(
        session
            .measure_touched(&program, (copy.donate(),))
            .expect_err("refused"),
    );
    assert_eq!(
        session.download::<f32>(&buffer).expect("is alive"),
        x.into_dyn()
    );
}

/// Bytes other than 0 and 1, given as truth values, are 1 wherever they come from.
#[test]
fn bytes_of_the_device_are_truth_values() {
    let bytes = CustomKernel::new("bytes", [Bool], F32, |run| {
        let mask = run.input::<u8>(0);
        for (to, &byte) in run.result::<f32>().iter_mut().zip(mask) {
            *to = byte.into();
        }
    });
    let (mut session, _) = start();
    let trace = Trace::inference();
    let mask = trace.input("mask", Bool, (4,));
    let outputs = [trace.custom(&bytes, &[mask], (4,)), mask.cast(F32)];
    let program = session.compile(&trace, outputs).expect("it compiles");
    let given = ndarray::arr1(&[0u8, 2, 255, 1]);
    let buffer = session.upload("mask", &given).expect("uploads");
    let want = ndarray::arr1(&[0.0f32, 1.0, 1.0, 1.0]).into_dyn();
    for dynamic in [false, true] {
        for output in match dynamic {
            false => session.run(&program, (&buffer,)).expect("runs"),
            true => session.run_dynamic(&program, (&buffer,)).expect("runs"),
        } {
            assert_eq!(output.array::<f32>().expect("f32"), want);
        }
        let kept = session.download::<u8>(&buffer).expect("is alive");
        assert_eq!(kept, given.clone().into_dyn());
    }
}
