//! Half precision: stored in 16 bits, computed in f32.

use half::{bf16, f16};
use ndarray::{Array1, Array2};
use slabwise::optim::Sgd;
use slabwise::params::{Init, Params};
use slabwise::prelude::*;
use slabwise::weights;

fn rounded(x: &Array2<f32>) -> Array2<f32> {
    x.mapv(|v| bf16::from_f32(v).to_f32())
}

/// Some numbers that no half holds exactly.
fn numbers(rows: usize, cols: usize, scale: f32) -> Array2<f32> {
    Array2::from_shape_fn((rows, cols), |(r, c)| scale * ((r * 31 + c * 17) as f32 * 0.618).sin())
}

#[test]
fn products_of_halves_are_summed_in_single_precision() {
    let (a, b) = (numbers(5, 7, 1.5), numbers(7, 3, 0.7));
    let trace = Trace::inference();
    let (x, y) = (trace.input("a", F32, (5, 7)), trace.input("b", F32, (7, 3)));
    let z = x.cast(BF16).matmul(y.cast(BF16));
    assert_eq!(z.dtype(), F32);
    let mut session = Session::new(Device::Cpu, Params::seeded(1)).unwrap();
    let program = session.compile(&trace, [z]).unwrap();
    let [z] = session.run(&program, (&a, &b)).unwrap();
    let expected = rounded(&a).dot(&rounded(&b));
    for (got, expected) in z.view::<f32>().unwrap().iter().zip(&expected) {
        assert!((got - expected).abs() <= 1e-6, "{got} and {expected}");
    }
}

#[test]
fn values_round_whether_they_are_stored_or_not() {
    let x = Array1::from_iter((0..1000).map(|i| (i as f32 * 0.37).sin() * 100.0));
    let trace = Trace::inference();
    let input = trace.input("x", F32, (1000,));
    let half = input.cast(F16);
    // Fused, the half is never in memory; as an output it is.
    let mut session = Session::new(Device::Cpu, Params::seeded(1)).unwrap();
    let program = session.compile(&trace, [half.cast(F32) * 2.0, half, half + input]).unwrap();
    let [double, half, sum] = session.run(&program, (&x,)).unwrap();
    assert_eq!((half.dtype(), sum.dtype()), (F16, F32));
    let halves = half.array::<f16>().unwrap();
    for (i, &x) in x.iter().enumerate() {
        let expected = f16::from_f32(x);
        assert_eq!(halves[i], expected);
        assert_eq!(double.view::<f32>().unwrap()[i], expected.to_f32() * 2.0);
        assert_eq!(sum.view::<f32>().unwrap()[i], expected.to_f32() + x);
    }
    assert_eq!(half.item(), 0.0);
    let error = half.view::<f32>().unwrap_err().to_string();
    assert_eq!(error, "the values are f16, not f32; ask for them as what they are, or cast in the program");
}

/// Weights in single precision, products in halves: the gradient goes back through the conversions.
#[test]
fn a_model_learns_with_products_of_halves() {
    let (x, target) = (numbers(64, 8, 1.0), numbers(8, 1, 1.0));
    let y = x.dot(&target);
    for dtype in [F32, F16, BF16] {
        let params = Params::seeded(3);
        let weight = params.root().param("weight", (8, 1), Init::Constant(0.0));
        let trace = Trace::training();
        let (images, wanted) = (trace.input("x", F32, (64, 8)), trace.input("y", F32, (64, 1)));
        let product = images.cast(dtype).matmul(trace.param(&weight).cast(dtype));
        let loss = (product - wanted).square().mean();
        trace.minimize(loss, Sgd::new(0.05));
        let mut session = Session::new(Device::Cpu, params).unwrap();
        let program = session.compile(&trace, [loss]).unwrap();
        let mut losses = Vec::new();
        for _ in 0..60 {
            let [loss] = session.run(&program, (&x, &y)).unwrap();
            losses.push(loss.item());
        }
        assert!(losses[59] < losses[0] * 1e-2, "{dtype}: {losses:?}");
    }
}

#[test]
fn halves_go_in_and_out() {
    let x = Array1::from_iter((0..6).map(|i| bf16::from_f32(i as f32 * 0.5)));
    let trace = Trace::inference();
    let input = trace.input("x", BF16, (6,));
    let kept = trace.state("kept", F16, (6,), Init::Constant(1.5));
    let sum = kept.value() + input;
    kept.set(sum.cast(F16));
    let mut session = Session::new(Device::Cpu, Params::seeded(1)).unwrap();
    let program = session.compile(&trace, [sum]).unwrap();
    for step in 1..=3 {
        let [sum] = session.run(&program, (&x,)).unwrap();
        assert_eq!(sum.view::<f32>().unwrap()[5], 1.5 + step as f32 * 2.5);
    }
    assert_eq!(session.value("kept").unwrap()[5], 9.0);
    session.set_value("kept", &Array1::from_elem(6, 0.1)).unwrap();
    assert_eq!(session.value("kept").unwrap()[0], f16::from_f32(0.1).to_f32());
    let resident = session.upload("resident", &x).unwrap();
    assert_eq!(session.download::<bf16>(&resident).unwrap()[1], bf16::from_f32(0.5));

    let bytes: Vec<u8> = x.iter().flat_map(|h| h.to_le_bytes()).collect();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("halves.safetensors");
    let entry = weights::Entry { name: "x", dtype: BF16, shape: vec![6], bytes: &bytes };
    weights::save(&path, &[entry], &Default::default()).unwrap();
    let file = weights::File::open(&path).unwrap();
    let back = file.tensors().next().unwrap();
    assert_eq!((back.dtype, back.bytes), (BF16, &bytes[..]));
}

#[test]
fn mixed_types_are_a_mistake() {
    let trace = Trace::inference();
    let (x, y) = (trace.input("x", BF16, (2, 3)), trace.input("y", F32, (3, 2)));
    let z = x.matmul(y);
    let mut session = Session::new(Device::Cpu, Params::seeded(1)).unwrap();
    let error = session.compile(&trace, [z]).err().unwrap().to_string();
    assert!(error.contains("matmul [2, 3] × [3, 2]: types bf16 and f32 differ; convert one with cast"), "{error}");
}
