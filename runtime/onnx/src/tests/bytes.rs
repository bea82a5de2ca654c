//! Constants of int8.

use super::*;

const BYTE: i32 = 3;

/// A constant of int8, of these lengths.
fn int8(name: &str, shape: &[i64], values: impl Iterator<Item = i8>) -> TensorProto {
    TensorProto {
        data_type: BYTE,
        dims: shape.to_vec(),
        raw_data: Some(values.map(|v| v as u8).collect()),
        name: name.into(),
        ..TensorProto::default()
    }
}

/// `y` is x plus all numbers of int8, 16 times, as floats: (w − 3) / 2.
fn dequantized() -> GraphProto {
    let weights = (0..16).flat_map(|_| i8::MIN..=i8::MAX);
    let nodes = vec![
        node("DequantizeLinear", &["w", "scale", "zero"], &["f"]),
        node("Add", &["x", "f"], &["y"]),
    ];
    GraphProto {
        initializer: vec![
            int8("w", &[16, 256], weights),
            weight("scale", &[], &[0.5]),
            int8("zero", &[], [3].into_iter()),
        ],
        ..graph(&["1"], nodes)
    }
}

#[test]
fn all_numbers_are_dequantized() {
    let x = counted(&[1]);
    let Data::Float(offset) = &x.data else {
        panic!("floats")
    };
    let offset = offset[0];
    let y = &results(model(dequantized(), 13), &[x])[0];
    assert_eq!(y.shape, [16, 256]);
    let numbers = (0..16).flat_map(|_| i8::MIN..=i8::MAX);
    let expected: Vec<f64> = numbers
        .map(|w| offset + (f64::from(w) - 3.0) / 2.0)
        .collect();
    assert_eq!(y.data, Data::Float(expected));
}

#[test]
fn a_constant_takes_a_byte_for_each_number() {
    let model = model(dequantized(), 13);
    let params = slabwise::Params::seeded(0);
    let trace = slabwise::Trace::inference();
    let inputs = model.declare(&trace).expect("one input");
    let values = model
        .values(&trace, &params.root(), &inputs)
        .expect("it is expressed");
    let outputs: Vec<_> = values.into_iter().map(|(_, y)| y).collect();
    let mut session = slabwise::Session::new(slabwise::Device::Cpu, params).expect("a session");
    session.compile_any(&trace, &outputs).expect("it compiles");
    let bytes = session.persistent_bytes();
    assert!((4096..4096 + 1024).contains(&bytes), "{bytes}");
}
