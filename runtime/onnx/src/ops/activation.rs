//! Activations.

use slabwise::{DType, Tensor};

use super::Run;
use super::elementwise::float;
use crate::call::{Call, Results, length, shape_of, sizes};
use crate::element::Element;
use crate::value::Value;

pub const OPERATORS: &[(&str, Run)] = &[
    ("Celu", |c| float(c, |x| x.celu(c.f("alpha", 1.0)))),
    ("Dropout", dropout),
    ("Elu", |c| float(c, |x| x.elu(c.f("alpha", 1.0)))),
    ("Gelu", |c| match &*c.text("approximate", "none") {
        "tanh" => float(c, Tensor::gelu_tanh),
        "none" => float(c, Tensor::gelu),
        other => Err(format!("approximate \"{other}\"")),
    }),
    ("HardSigmoid", |c| {
        let (alpha, beta) = (c.f("alpha", 0.2), c.f("beta", 0.5));
        float(c, |x| (x * alpha + beta).clamp(0.0, 1.0))
    }),
    ("HardSwish", |c| {
        float(c, |x| x * (x * (1.0 / 6.0) + 0.5).clamp(0.0, 1.0))
    }),
    ("Hardmax", hardmax),
    ("LeakyRelu", |c| {
        float(c, |x| x.leaky_relu(c.f("alpha", 0.01)))
    }),
    ("LogSoftmax", |c| softmax(c, |x, axis| x.log_softmax(axis))),
    ("Mish", |c| float(c, Tensor::mish)),
    ("PRelu", |c| {
        let mut slope = c.float(1)?;
        // One number for each channel, before opset 7.
        if c.opset < 7 && slope.rank() == 1 {
            for _ in 2..c.rank(0)? {
                slope = slope.unsqueeze(slope.rank());
            }
        }
        float(c, |x| x.gt(0.0).select(x, x * slope))
    }),
    ("Relu", |c| match c.element(0)?.is_float() {
        true => float(c, Tensor::relu),
        false => c.same(super::elementwise::lane(c, 0)?.maximum(0.0)),
    }),
    ("Selu", |c| {
        // The standard's digits, which differ from PyTorch's in the last place.
        let alpha = c.f("alpha", 1.673_263_2);
        let gamma = c.f("gamma", 1.050_701);
        float(c, |x| x.gt(0.0).select(x, x.expm1() * alpha) * gamma)
    }),
    ("Shrink", |c| {
        let x = c.x(0)?.cast(DType::F32);
        c.same(x.shrink(c.f("lambd", 0.5), c.f("bias", 0.0)))
    }),
    ("Sigmoid", |c| float(c, Tensor::sigmoid)),
    ("Silu", |c| float(c, Tensor::silu)),
    ("Softmax", |c| softmax(c, |x, axis| x.softmax(axis))),
    ("Softplus", |c| float(c, Tensor::softplus)),
    ("Softsign", |c| float(c, Tensor::softsign)),
    ("SwiGLU", |c| {
        let alpha = c.f("alpha", 1.0);
        let value = c.float(1)?;
        float(c, |x| x * (x * alpha).sigmoid() * value)
    }),
    ("Swish", |c| {
        let alpha = c.f("alpha", 1.0);
        float(c, |x| x * (x * alpha).sigmoid())
    }),
    ("Tanh", |c| float(c, Tensor::tanh)),
    ("ThresholdedRelu", |c| {
        let alpha = c.f("alpha", 1.0);
        float(c, |x| x.gt(alpha).select(x, 0.0))
    }),
];

/// Along one axis since opset 13; before, along all axes from one on together.
fn softmax<'t>(call: &Call<'_, 't>, f: impl Fn(Tensor<'t>, usize) -> Tensor<'t>) -> Results<'t> {
    let x = call.float(0)?;
    if call.opset >= 13 {
        return call.same(f(x, call.axis("axis", -1)?));
    }
    let axis = call.axis("axis", 1)?;
    call.same(f(x.flatten(axis), axis).reshape(shape_of(&sizes(x))))
}

fn hardmax<'t>(call: &Call<'_, 't>) -> Results<'t> {
    let x = call.float(0)?;
    let shape = shape_of(&sizes(x));
    let (x, axis) = match call.opset >= 13 {
        true => (x, call.axis("axis", -1)?),
        false => {
            let axis = call.axis("axis", 1)?;
            (x.flatten(axis), axis)
        }
    };
    let n = length(x, axis)?;
    let mut place = call.trace.arange(n).cast(DType::I32);
    for _ in axis + 1..x.rank() {
        place = place.unsqueeze(place.rank());
    }
    let first = x.argmax_keep(axis);
    let result = place.equal(first).cast(DType::F32);
    call.same(result.reshape(shape))
}

/// Inference: the input itself, and a mask of ones.
fn dropout<'t>(call: &Call<'_, 't>) -> Results<'t> {
    let x = call.x(0)?;
    let training = match call.opset >= 12 {
        true => call.number(2)?.is_some_and(|t| t != 0.0),
        false => false,
    };
    let ratio = match call.opset >= 12 {
        true => call.number(1)?.unwrap_or(0.5),
        false => 0.0,
    };
    if training && ratio != 0.0 {
        return Err(
            "it is in training mode; random numbers of another generator cannot be repeated".into(),
        );
    }
    let mut all = call.same(x)?;
    if call.outputs > 1 {
        let ones = call.trace.full(1.0, DType::Bool, shape_of(&sizes(x)));
        all.push(Value::tensor(Element::Bool, ones));
    }
    Ok(all)
}
