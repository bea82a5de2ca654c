//! Conversions between arrays of the reference evaluator and inputs and outputs of sessions.

use half::{bf16, f16};
use ndarray::{ArrayD, IxDyn};
use slabwise::feed::Input;
use slabwise_compiler::reference::Array;
use slabwise_kernels::dtype::DType;

/// An array as an input of a session.
pub fn host(array: &Array) -> Box<dyn Input> {
    let shape = IxDyn(&array.dims);
    let ok = "the array has its shape's elements";
    match array.dtype {
        DType::F32 => Box::new(
            ArrayD::from_shape_vec(shape, array.values.iter().map(|&v| v as f32).collect())
                .expect(ok),
        ),
        DType::F16 => Box::new(
            ArrayD::from_shape_vec(
                shape,
                array.values.iter().map(|&v| f16::from_f64(v)).collect(),
            )
            .expect(ok),
        ),
        DType::BF16 => Box::new(
            ArrayD::from_shape_vec(
                shape,
                array.values.iter().map(|&v| bf16::from_f64(v)).collect(),
            )
            .expect(ok),
        ),
        DType::I32 => Box::new(
            ArrayD::from_shape_vec(shape, array.values.iter().map(|&v| v as i32).collect())
                .expect(ok),
        ),
        _ => Box::new(
            ArrayD::from_shape_vec(shape, array.values.iter().map(|&v| v as u8).collect())
                .expect(ok),
        ),
    }
}

/// The elements of an output.
pub fn numbers(o: &slabwise::Output<'_>) -> Vec<f64> {
    match o.dtype() {
        DType::F32 => o
            .view::<f32>()
            .expect("f32")
            .iter()
            .map(|&v| f64::from(v))
            .collect(),
        DType::F16 => o
            .view::<f16>()
            .expect("f16")
            .iter()
            .map(|v| v.to_f64())
            .collect(),
        DType::BF16 => o
            .view::<bf16>()
            .expect("bf16")
            .iter()
            .map(|v| v.to_f64())
            .collect(),
        DType::I32 => o
            .view::<i32>()
            .expect("i32")
            .iter()
            .map(|&v| f64::from(v))
            .collect(),
        _ => o
            .view::<u8>()
            .expect("bytes")
            .iter()
            .map(|&v| f64::from(v))
            .collect(),
    }
}

/// Whether two numbers differ only by rounding.
pub fn close(a: f64, b: f64) -> bool {
    (a.is_nan() && b.is_nan()) || a == b || (a - b).abs() <= 2e-4 * (1.0 + a.abs().max(b.abs()))
}
