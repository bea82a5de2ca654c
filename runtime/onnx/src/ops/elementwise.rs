//! Operators that treat each element by itself, with broadcasting.

use slabwise::{DType, Tensor};

use super::Run;
use crate::call::{Call, Results, to_f32};
use crate::element::Element;

pub const OPERATORS: &[(&str, Run)] = &[
    ("Abs", |c| unary(c, Tensor::abs)),
    ("Acos", |c| float(c, Tensor::acos)),
    ("Acosh", |c| float(c, Tensor::acosh)),
    ("Add", |c| arithmetic(c, |a, b| a + b)),
    ("And", |c| logic(c, |a, b| a.and(b))),
    ("Asin", |c| float(c, Tensor::asin)),
    ("Asinh", |c| float(c, Tensor::asinh)),
    ("Atan", |c| float(c, Tensor::atan)),
    ("Atanh", |c| float(c, Tensor::atanh)),
    ("BitShift", shift),
    ("BitwiseAnd", |c| arithmetic(c, |a, b| a.bit_and(b))),
    ("BitwiseNot", |c| unary(c, Tensor::bit_not)),
    ("BitwiseOr", |c| arithmetic(c, |a, b| a.bit_or(b))),
    ("BitwiseXor", |c| arithmetic(c, |a, b| a.bit_xor(b))),
    ("Cast", |c| {
        if !c.text("to", "").is_empty() {
            return Err(
                "its type is a name, as in Cast before opset 6; convert the model to a later opset"
                    .into(),
            );
        }
        let to = i32::try_from(c.int("to", 0)).unwrap_or(0);
        cast(c, Element::of(to)?)
    }),
    ("CastLike", |c| cast(c, c.element(1)?)),
    ("Ceil", |c| float(c, Tensor::ceil)),
    ("Clip", clip),
    ("Cos", |c| float(c, Tensor::cos)),
    ("Cosh", |c| float(c, Tensor::cosh)),
    ("Div", |c| arithmetic(c, |a, b| a / b)),
    ("Equal", |c| compare(c, |a, b| a.equal(b))),
    ("Erf", |c| float(c, Tensor::erf)),
    ("Exp", |c| float(c, Tensor::exp)),
    ("Floor", |c| float(c, Tensor::floor)),
    ("Greater", |c| compare(c, |a, b| a.gt(b))),
    ("GreaterOrEqual", |c| compare(c, |a, b| a.ge(b))),
    ("Identity", |c| match c.required(0)? {
        value if value.sequence().is_some() => Ok(vec![value.clone()]),
        _ => c.same(c.x(0)?),
    }),
    ("IsInf", is_infinite),
    ("IsNaN", |c| c.typed(Element::Bool, c.float(0)?.is_nan())),
    ("Less", |c| compare(c, |a, b| a.lt(b))),
    ("LessOrEqual", |c| compare(c, |a, b| a.le(b))),
    ("Log", |c| float(c, Tensor::ln)),
    ("Max", |c| many(c, |a, b| a.maximum(b))),
    ("Mean", |c| {
        let n = c.len() as f32;
        let [sum] = &many(c, |a, b| a + b)?[..] else {
            return Err("it has no input".into());
        };
        c.same(to_f32(sum.traced(c.trace)?) / n)
    }),
    ("Min", |c| many(c, |a, b| a.minimum(b))),
    ("Mod", |c| match c.flag("fmod") {
        true => arithmetic(c, |a, b| a.fmod(b)),
        false => arithmetic(c, |a, b| a.remainder(b)),
    }),
    ("Mul", |c| arithmetic(c, |a, b| a * b)),
    ("Neg", |c| unary(c, |x| -x)),
    ("Not", |c| c.typed(Element::Bool, !c.x(0)?)),
    ("Or", |c| logic(c, |a, b| a.or(b))),
    ("Pow", power),
    ("Reciprocal", |c| float(c, Tensor::recip)),
    ("Round", |c| float(c, Tensor::round)),
    ("Sign", |c| unary(c, Tensor::sign)),
    ("Sin", |c| float(c, Tensor::sin)),
    ("Sinh", |c| float(c, Tensor::sinh)),
    ("Sqrt", |c| float(c, Tensor::sqrt)),
    ("Sub", |c| arithmetic(c, |a, b| a - b)),
    ("Sum", |c| many(c, |a, b| a + b)),
    ("Tan", |c| float(c, Tensor::tan)),
    ("Where", |c| {
        let (a, b) = (c.x(1)?, c.x(2)?);
        c.typed(c.element(1)?, c.x(0)?.select(a, b))
    }),
    ("Xor", |c| logic(c, |a, b| a.xor(b))),
];

/// An input as the type in which it is computed: f32, i32 or truth values.
pub fn lane<'t>(call: &Call<'_, 't>, at: usize) -> Result<Tensor<'t>, String> {
    let x = call.x(at)?;
    Ok(match x.dtype() {
        DType::F16 | DType::BF16 => x.cast(DType::F32),
        DType::U8 => x.cast(DType::I32),
        _ => x,
    })
}

/// The low bits of an i32 that an integer type keeps.
pub fn low_bits(x: Tensor<'_>, element: Element) -> Tensor<'_> {
    match element {
        Element::U8 => x.bit_and(255.0),
        Element::U16 => x.bit_and(65535.0),
        Element::I8 => signed_bits(x, 128.0),
        Element::I16 => signed_bits(x, 32768.0),
        _ => x,
    }
}

fn signed_bits(x: Tensor<'_>, half: f32) -> Tensor<'_> {
    (x + half).bit_and(2.0 * half - 1.0) - half
}

/// A result in the element type of an input.
fn kept<'t>(call: &Call<'_, 't>, x: Tensor<'t>) -> Results<'t> {
    let element = call.element(0)?;
    call.typed(element, low_bits(x, element))
}

fn unary<'t>(call: &Call<'_, 't>, f: impl Fn(Tensor<'t>) -> Tensor<'t>) -> Results<'t> {
    kept(call, f(lane(call, 0)?))
}

pub fn float<'t>(call: &Call<'_, 't>, f: impl Fn(Tensor<'t>) -> Tensor<'t>) -> Results<'t> {
    call.same(f(call.float(0)?))
}

fn arithmetic<'t>(
    call: &Call<'_, 't>,
    f: impl Fn(Tensor<'t>, Tensor<'t>) -> Tensor<'t>,
) -> Results<'t> {
    let (a, b) = operands(call)?;
    kept(call, f(a, b))
}

/// Both operands; before opset 7 the second one is broadcast from an axis on.
fn operands<'t>(call: &Call<'_, 't>) -> Result<(Tensor<'t>, Tensor<'t>), String> {
    let (a, mut b) = (lane(call, 0)?, lane(call, 1)?);
    if call.opset < 7 && call.flag("broadcast") && call.has("axis") {
        let axis = call.axis("axis", 0)?;
        for _ in axis + b.rank()..a.rank() {
            b = b.unsqueeze(b.rank());
        }
    }
    Ok((a, b))
}

fn compare<'t>(
    call: &Call<'_, 't>,
    f: impl Fn(Tensor<'t>, Tensor<'t>) -> Tensor<'t>,
) -> Results<'t> {
    let (mut a, mut b) = operands(call)?;
    if a.dtype() == DType::Bool {
        (a, b) = (a.cast(DType::I32), b.cast(DType::I32));
    }
    call.typed(Element::Bool, f(a, b))
}

fn logic<'t>(call: &Call<'_, 't>, f: impl Fn(Tensor<'t>, Tensor<'t>) -> Tensor<'t>) -> Results<'t> {
    let (a, b) = operands(call)?;
    call.typed(Element::Bool, f(a, b))
}

fn many<'t>(call: &Call<'_, 't>, f: impl Fn(Tensor<'t>, Tensor<'t>) -> Tensor<'t>) -> Results<'t> {
    let mut result = lane(call, 0)?;
    for at in 1..call.len() {
        result = f(result, lane(call, at)?);
    }
    kept(call, result)
}

fn cast<'t>(call: &Call<'_, 't>, to: Element) -> Results<'t> {
    let from = call.element(0)?;
    let x = call.x(0)?;
    if to == Element::F64 && !call.narrow {
        return Err("computes in double; allow float instead (--narrow)".into());
    }
    if to == Element::Bool || to.is_float() {
        return call.typed(to, x.cast(to.dtype()));
    }
    let x = x.cast(DType::I32);
    let x = match from.is_float() && matches!(to, Element::I32 | Element::I64) {
        true => x,
        false => low_bits(x, to),
    };
    call.typed(to, x)
}

fn clip<'t>(call: &Call<'_, 't>) -> Results<'t> {
    let mut x = lane(call, 0)?;
    if call.opset < 11 {
        // Since opset 6 the defaults are the extremes of f32, which infinities are beyond.
        if call.has("min") || call.opset >= 6 {
            x = x.maximum(call.f("min", f32::MIN));
        }
        if call.has("max") || call.opset >= 6 {
            x = x.minimum(call.f("max", f32::MAX));
        }
        return call.same(x);
    }
    if call.value(1).is_some() {
        x = x.maximum(lane(call, 1)?);
    }
    if call.value(2).is_some() {
        x = x.minimum(lane(call, 2)?);
    }
    call.same(x)
}

fn is_infinite<'t>(call: &Call<'_, 't>) -> Results<'t> {
    let x = call.float(0)?;
    let (up, down) = (
        call.int("detect_positive", 1) != 0,
        call.int("detect_negative", 1) != 0,
    );
    let found = match (up, down) {
        (true, true) => x.is_infinite(),
        (true, false) => x.equal(f32::INFINITY),
        (false, true) => x.equal(f32::NEG_INFINITY),
        (false, false) => x.not_equal(x).and(x.equal(x)),
    };
    call.typed(Element::Bool, found)
}

fn power<'t>(call: &Call<'_, 't>) -> Results<'t> {
    let element = call.element(0)?;
    let (a, b) = operands(call)?;
    if element.is_float() {
        return call.same(a.pow(to_f32(b)));
    }
    if let Some((_, exponent)) = call.required(1)?.known()
        && let &[n] = &exponent.to_floats()[..]
        && (0.0..=64.0).contains(&n)
        && n.fract() == 0.0
    {
        let product = (0..n as usize).fold(a * 0.0 + 1.0, |product, _| product * a);
        return kept(call, product);
    }
    // Exact where the power is below 2²⁴, as all of small integers are; larger ones saturate.
    let power = to_f32(a).pow(to_f32(b));
    let near = power.round();
    let power = match call.element(1)?.is_float() {
        // Rounded toward zero, unless it is a whole number but for the rounding of f32.
        true => (power - near)
            .abs()
            .le(near.abs() * 1e-6)
            .select(near, power),
        false => near,
    };
    kept(call, power.cast(DType::I32))
}

fn shift<'t>(call: &Call<'_, 't>) -> Results<'t> {
    match &*call.text("direction", "") {
        "LEFT" => arithmetic(call, |a, b| a.shift_left(b)),
        "RIGHT" => arithmetic(call, |a, b| a.shift_right(b)),
        other => Err(format!("direction \"{other}\"")),
    }
}
