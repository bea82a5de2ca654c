//! Numbers of the choice of a token: those that mean nothing are refused.

use slabwise::prelude::*;
use slabwise_models::Sampling;

#[track_caller]
fn assert_says((text, line): (String, u32), parts: &[&str]) {
    let place = format!("{}:{line}:", file!());
    for part in [&*place].iter().chain(parts) {
        assert!(text.contains(part), "{part:?} is not in: {text}");
    }
}

#[test]
fn sampling_refuses_numbers_that_mean_nothing() {
    let compiled = |sampling: Sampling, by_key: bool| {
        let trace = Trace::inference().sampling();
        let logits = trace.input("logits", F32, (2, 10));
        let (next, line) = match by_key {
            true => (sampling.by(trace.key(1), logits), line!()),
            false => (sampling.of(logits), line!()),
        };
        let mut session = Session::new(Device::Cpu, Params::seeded(0)).expect("a session");
        let compiled = session.compile(&trace, [next]).map(|_| ());
        (compiled.map_err(|e| e.to_string()), line)
    };
    let new = Sampling::new;
    for (sampling, parts) in [
        (new().temperature(-1.0), ["temperature", "-1"]),
        (new().temperature(f32::NAN), ["temperature", "NaN"]),
        (new().temperature(f32::INFINITY), ["temperature", "inf"]),
        (new().top_k(0), ["top_k", "0"]),
        (new().top_p(0.0), ["top_p", "0"]),
        (new().top_p(-0.5), ["top_p", "-0.5"]),
        (new().top_p(1.5), ["top_p", "1.5"]),
        (new().top_p(f32::NAN), ["top_p", "NaN"]),
        (new().temperature(0.0).top_k(0), ["top_k", "0"]),
        (new().top_k(1).temperature(-1.0), ["temperature", "-1"]),
    ] {
        for by_key in [false, true] {
            let (result, line) = compiled(sampling, by_key);
            assert_says((result.expect_err("a mistake"), line), &parts);
        }
    }
    for sampling in [
        new().temperature(0.0),
        new().temperature(1e-40),
        new().top_k(10),
        new().top_k(11),
        new().top_p(1.0),
        new().top_p(1e-9).top_k(3),
    ] {
        compiled(sampling, false).0.expect("it samples");
    }
}

/// A tiny temperature is that of the likeliest token, with finite logits.
#[test]
fn a_tiny_temperature_chooses_the_likeliest() {
    let trace = Trace::inference().sampling();
    let logits = trace.input("logits", F32, (1, 4));
    let next = Sampling::new().temperature(1e-40).of(logits);
    let mut session = Session::new(Device::Cpu, Params::seeded(0)).expect("a session");
    let program = session.compile(&trace, [next]).expect("it compiles");
    let logits = ndarray::arr2(&[[-2.0f32, 3.0, 2.5, 0.0]]);
    for _ in 0..20 {
        let out = session.run(&program, (&logits,)).expect("a run");
        assert_eq!(out[0].view::<i32>().expect("i32")[[0]], 1);
    }
}
