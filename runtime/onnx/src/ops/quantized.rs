//! Operators of quantized models. The integers are exact: products are computed in float over parts
//! of the contracted axis whose sums float holds exactly, and these are added as integers.

use slabwise::{DType, Tensor};

use super::Run;
use super::elementwise::lane;
use super::product::{along_channels, conv, product};
use crate::call::{Call, Results, resolve, result, to_f32};
use crate::element::Element;

pub const OPERATORS: &[(&str, Run)] = &[
    ("ConvInteger", |c| {
        let x = shifted(c, 0, 2, None)?;
        let w = shifted(c, 1, 3, Some(0))?;
        c.typed(Element::I32, int_conv(c, x, w)?)
    }),
    ("DequantizeLinear", dequantize),
    ("DynamicQuantizeLinear", dynamic),
    ("MatMulInteger", |c| {
        let a = shifted(c, 0, 2, Some(c.rank(0)?.saturating_sub(2)))?;
        let b = shifted(c, 1, 3, Some(c.rank(1)?.saturating_sub(1)))?;
        c.typed(Element::I32, int_product(a, b)?)
    }),
    ("QLinearConv", |c| {
        let x = shifted(c, 0, 2, None)?;
        let w = shifted(c, 3, 5, Some(0))?;
        let mut sums = int_conv(c, x, w)?;
        if let Some(bias) = c.optional(8)? {
            sums = sums + along_channels(bias, sums.rank());
        }
        let factor = c.float(4)? * c.float(1)? / c.float(6)?;
        let factor = match c.dims(4)?.len() {
            1 => along_channels(factor, sums.rank()),
            _ => factor,
        };
        requantized(c, to_f32(sums) * factor, 7)
    }),
    ("QLinearMatMul", |c| {
        let a = shifted(c, 0, 2, Some(c.rank(0)?.saturating_sub(2)))?;
        let b = shifted(c, 3, 5, Some(c.rank(3)?.saturating_sub(1)))?;
        let sums = to_f32(int_product(a, b)?);
        let scale = |at: usize, axis: usize| -> Result<Tensor<'_>, String> {
            spread(c.float(at)?, axis, sums.rank())
        };
        let rows = scale(1, sums.rank().saturating_sub(2))?;
        let columns = scale(4, sums.rank().saturating_sub(1))?;
        let to = c.float(6)?;
        requantized(c, sums * (rows * columns / to), 7)
    }),
    ("QuantizeLinear", quantize),
];

/// The largest part of the contracted axis whose sum float holds exactly: of products of two numbers
/// from −255 to 255.
const EXACT: usize = (1 << 24) / (255 * 255);

/// A number for each index of an axis, as a tensor of `rank` axes; or one for all.
pub fn spread(v: Tensor<'_>, axis: usize, rank: usize) -> Result<Tensor<'_>, String> {
    match v.rank() {
        0 => Ok(v),
        1 if v.len(0) == Some(1) => Ok(v.squeeze(0)),
        1 if axis < rank => Ok((axis + 1..rank).fold(v, |v, _| v.unsqueeze(v.rank()))),
        given if given == rank => Ok(v),
        given => Err(format!("scales or zero points of {given} axes")),
    }
}

/// An input of integers less its zero point, as floats.
pub fn shifted<'t>(
    call: &Call<'_, 't>,
    at: usize,
    zero: usize,
    axis: Option<usize>,
) -> Result<Tensor<'t>, String> {
    let x = lane(call, at)?.cast(DType::I32);
    if call.value(zero).is_none() {
        return Ok(to_f32(x));
    }
    let zero = lane(call, zero)?.cast(DType::I32);
    let zero = spread(zero, axis.unwrap_or(0), x.rank())?;
    Ok(to_f32(x - zero))
}

/// An exact product of floats that are small integers.
pub fn int_product<'t>(a: Tensor<'t>, b: Tensor<'t>) -> Result<Tensor<'t>, String> {
    let depth = a.len(a.rank().saturating_sub(1));
    let depth = depth.ok_or("its contracted axis is not fixed")?;
    let axis = [a.rank().saturating_sub(1), b.rank().saturating_sub(2)];
    let mut sums: Option<Tensor<'t>> = None;
    for start in (0..depth.max(1)).step_by(EXACT) {
        let part = start..(start + EXACT).min(depth);
        let part = match part.len() == depth {
            true => product(a, b),
            false => product(a.slice(axis[0], part.clone()), b.slice(axis[1], part)),
        };
        let part = part.cast(DType::I32);
        sums = Some(sums.map_or(part, |sums| sums + part));
    }
    sums.ok_or_else(|| "an empty product".into())
}

/// An exact convolution of floats that are small integers.
fn int_conv<'t>(call: &Call<'_, 't>, x: Tensor<'t>, w: Tensor<'t>) -> Result<Tensor<'t>, String> {
    let shape = crate::call::lengths(w)?;
    let taps: usize = shape.iter().skip(2).product();
    let channels = shape.get(1).copied().unwrap_or(0);
    if taps > EXACT || (taps * channels > EXACT && call.int("group", 1) != 1) {
        return Err(format!(
            "a sum of {} products of integers, which float does not hold exactly",
            taps * channels
        ));
    }
    let each = (EXACT / taps.max(1)).max(1);
    let mut sums: Option<Tensor<'t>> = None;
    for start in (0..channels.max(1)).step_by(each) {
        let part = start..(start + each).min(channels);
        let (x, w) = match part.len() == channels {
            true => (x, w),
            false => (x.slice(1, part.clone()), w.slice(1, part)),
        };
        let part = conv(&call.of([x, w]))?;
        let part = part[0].traced(call.trace)?.cast(DType::I32);
        sums = Some(sums.map_or(part, |sums| sums + part));
    }
    sums.ok_or_else(|| "an empty convolution".into())
}

/// The nearest integer of a quantized type.
pub fn saturated<'t>(x: Tensor<'t>, to: Element) -> Result<Tensor<'t>, String> {
    let (low, high) = match to {
        Element::U8 | Element::I8 | Element::U16 | Element::I16 => to.range(),
        other => return Err(format!("quantization to {other}")),
    };
    Ok(x.clamp(low as f32, high as f32).cast(DType::I32))
}

/// A result in the type of a zero point, which is added to it.
fn requantized<'t>(call: &Call<'_, 't>, x: Tensor<'t>, zero: usize) -> Results<'t> {
    let to = call.element(zero)?;
    let zero = to_f32(lane(call, zero)?);
    let zero = spread(zero, x.rank().saturating_sub(2), x.rank())?;
    call.typed(to, saturated(x.round() + zero, to)?)
}

/// Scales or zero points for the elements of a tensor: one for all, for each index of an axis, or
/// for each block along it.
fn scales<'t>(call: &Call<'_, 't>, v: Tensor<'t>, rank: usize) -> Result<Tensor<'t>, String> {
    let axis = call.int("axis", 1);
    let block = usize::try_from(call.int("block_size", 0)).unwrap_or(0);
    if block > 0 {
        let axis = resolve(axis, rank)?;
        let n = call.shape(0)?[axis];
        return Ok(v.repeat_interleave(axis, block).slice(axis, 0..n));
    }
    match v.rank() == 1 && v.len(0) != Some(1) {
        true => spread(v, resolve(axis, rank)?, rank),
        false => spread(v, 0, rank),
    }
}

pub fn dequantize<'t>(call: &Call<'_, 't>) -> Results<'t> {
    let element = match call.int("output_dtype", 0) {
        0 => call.element(1)?,
        number => Element::of(i32::try_from(number).unwrap_or(0))?,
    };
    let mut x = lane(call, 0)?.cast(DType::I32);
    if call.value(2).is_some() {
        let zero = lane(call, 2)?.cast(DType::I32);
        x = x - scales(call, zero, x.rank())?;
    }
    let scale = scales(call, call.float(1)?, x.rank())?;
    call.typed(element, to_f32(x) * scale)
}

pub fn quantize<'t>(call: &Call<'_, 't>) -> Results<'t> {
    let element = match (call.value(2), call.int("output_dtype", 0)) {
        (Some(zero), _) => zero.element(),
        (None, 0) => Element::U8,
        (None, number) => Element::of(i32::try_from(number).unwrap_or(0))?,
    };
    let x = to_f32(lane(call, 0)?);
    let scale = scales(call, call.float(1)?, x.rank())?;
    let mut y = (x / scale).round();
    if call.value(2).is_some() {
        y = y + scales(call, to_f32(lane(call, 2)?), x.rank())?;
    }
    call.typed(element, saturated(y, element)?)
}

pub fn dynamic<'t>(call: &Call<'_, 't>) -> Results<'t> {
    let x = call.float(0)?;
    let (low, high) = (x.min().minimum(0.0), x.max().maximum(0.0));
    // Zeros alone have no range: onnxruntime scales them by 1.
    let width = high - low;
    let scale = width.gt(0.0).select(width / 255.0, 1.0);
    let zero = (0.0 - low / scale).clamp(0.0, 255.0).round();
    let y = saturated((x / scale).round() + zero, Element::U8)?;
    Ok(vec![
        result(Element::U8, y),
        result(Element::F32, scale),
        result(Element::U8, zero.cast(DType::I32)),
    ])
}
