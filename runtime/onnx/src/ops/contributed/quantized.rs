//! Operators of models that onnxruntime has quantized: weights of a few bits in blocks, and
//! arithmetic between quantized tensors.

use slabwise::shape::Size;
use slabwise::{DType, Quantization, Tensor};

use super::super::image::average_pool;
use super::super::product::product;
use super::super::quantized::{
    dequantize, dynamic, int_product, quantize, saturated, shifted, spread,
};
use super::Run;
use crate::call::{Call, Results, length, resolve, result, shape_of, size, sizes, to_f32};
use crate::element::Element;

pub const OPERATORS: &[(&str, Run)] = &[
    ("DequantizeLinear", dequantize),
    ("DynamicQuantizeMatMul", |c| {
        let made = dynamic(c)?;
        let [a, scale, zero] = &made[..] else {
            return Err("a quantized input is needed".into());
        };
        let [a, scale, zero] = [a, scale, zero].map(|value| value.traced(c.trace));
        let a = to_f32(a?.cast(DType::I32) - zero?.cast(DType::I32));
        let b = columns(c, 1, 3)?;
        scaled(c, int_product(a, b)?, scale?, 2, 4)
    }),
    ("GatherBlockQuantized", gather),
    ("MatMulIntegerToFloat", |c| {
        let a = shifted(c, 0, 4, Some(c.rank(0)?.saturating_sub(2)))?;
        let b = columns(c, 1, 5)?;
        let scale = c.float(2)?.reshape(());
        scaled(c, int_product(a, b)?, scale, 3, 6)
    }),
    ("MatMulNBits", few_bits),
    ("QGemm", |c| {
        let mut a = shifted(c, 0, 2, None)?;
        let mut b = shifted(c, 3, 5, Some(usize::from(!c.flag("transB"))))?;
        if c.flag("transA") {
            a = a.t();
        }
        if c.flag("transB") {
            b = b.t();
        }
        let mut sums = int_product(a, b)?;
        if let Some(bias) = c.optional(6)? {
            sums = sums + bias;
        }
        let scale = c.float(1)? * c.float(4)? * c.f("alpha", 1.0);
        let y = to_f32(sums) * scale;
        match c.value(7) {
            Some(_) => requantized(c, y, 7, Zero::AfterRounding),
            None => c.typed(Element::F32, y),
        }
    }),
    ("QLinearAdd", |c| {
        requantized(c, real(c, 0)? + real(c, 3)?, 6, Zero::BeforeRounding)
    }),
    ("QLinearAveragePool", |c| {
        if c.flag("channels_last") {
            return Err("channels_last".into());
        }
        let pooled = average_pool(&c.of([real(c, 0)?]))?;
        let [y] = &pooled[..] else {
            return Err("a pooling of one result is needed".into());
        };
        requantized(c, y.traced(c.trace)?, 3, Zero::BeforeRounding)
    }),
    ("QLinearConcat", |c| {
        let parts = (2..c.len()).step_by(3).map(|at| real(c, at));
        let parts = parts.collect::<Result<Vec<_>, _>>()?;
        let rank = parts.first().map_or(0, |x| x.rank());
        let axis = resolve(c.int("axis", 0), rank)?;
        let y = c.trace.concat(&parts, axis);
        requantized_as(c, y, 0, c.element(1)?, Zero::AfterRounding)
    }),
    ("QLinearGlobalAveragePool", |c| {
        let x = real(c, 0)?;
        let axes: Vec<usize> = match c.flag("channels_last") {
            true => (1..x.rank().saturating_sub(1)).collect(),
            false => (2..x.rank()).collect(),
        };
        requantized(c, x.mean_keep(&axes[..]), 3, Zero::AfterRounding)
    }),
    ("QLinearLeakyRelu", |c| {
        let y = real(c, 0)?.leaky_relu(c.f("alpha", 0.01));
        requantized(c, y, 3, Zero::AfterRounding)
    }),
    ("QLinearMul", |c| {
        requantized(c, real(c, 0)? * real(c, 3)?, 6, Zero::BeforeRounding)
    }),
    ("QLinearSigmoid", |c| {
        requantized(c, real(c, 0)?.sigmoid(), 3, Zero::AfterRounding)
    }),
    ("QLinearSoftmax", |c| {
        let x = real(c, 0)?;
        let axis = resolve(c.int("axis", -1), x.rank())?;
        let y = match c.int("opset", 13) >= 13 {
            true => x.softmax(axis),
            false => {
                let to = shape_of(&sizes(x));
                x.flatten(axis).softmax(axis).reshape(to)
            }
        };
        requantized(c, y, 3, Zero::AfterRounding)
    }),
    ("QuantizeLinear", quantize),
];

/// A quantized input as floats, by the scale and the zero point that follow it.
fn real<'t>(call: &Call<'_, 't>, at: usize) -> Result<Tensor<'t>, String> {
    let x = shifted(call, at, at + 2, None)?;
    Ok(x * spread(call.float(at + 1)?, 0, x.rank())?)
}

/// When onnxruntime adds the zero point of a result, which decides between two numbers that are
/// equally near.
#[derive(Clone, Copy)]
enum Zero {
    BeforeRounding,
    AfterRounding,
}

/// Floats as the quantized type of the first input, by the scale and the zero point at `scale`.
fn requantized<'t>(call: &Call<'_, 't>, y: Tensor<'t>, scale: usize, zero: Zero) -> Results<'t> {
    requantized_as(call, y, scale, call.element(0)?, zero)
}

fn requantized_as<'t>(
    call: &Call<'_, 't>,
    y: Tensor<'t>,
    scale: usize,
    to: Element,
    zero: Zero,
) -> Results<'t> {
    let y = y / spread(call.float(scale)?, 0, y.rank())?;
    let point = match call.value(scale + 1) {
        Some(_) => spread(to_f32(call.x(scale + 1)?.cast(DType::I32)), 0, y.rank())?,
        None => call.trace.zeros(()),
    };
    let y = match zero {
        Zero::BeforeRounding => (y + point).round(),
        Zero::AfterRounding => y.round() + point,
    };
    call.typed(to, saturated(y, to)?)
}

/// The right operand of a product less its zero points, one for all or for each column.
fn columns<'t>(call: &Call<'_, 't>, at: usize, zero: usize) -> Result<Tensor<'t>, String> {
    shifted(call, at, zero, Some(call.rank(at)?.saturating_sub(1)))
}

/// Sums of products of integers as floats, by the scale of the left operand and that of the right
/// one at `right`, with the bias at `bias` added.
fn scaled<'t>(
    call: &Call<'_, 't>,
    sums: Tensor<'t>,
    left: Tensor<'t>,
    right: usize,
    bias: usize,
) -> Results<'t> {
    let last = sums.rank().saturating_sub(1);
    let right = spread(call.float(right)?, last, sums.rank())?;
    let y = to_f32(sums) * (left * right);
    let y = call.optional_float(bias)?.map_or(y, |bias| y + bias);
    call.typed(Element::F32, y)
}

/// The format of weights: the attribute `bits`, and blocks of this length.
fn format(call: &Call<'_, '_>, block: i64) -> Result<Quantization, String> {
    let bits = match call.int("bits", 4) {
        bits @ (2 | 4 | 8) => bits as u32,
        bits => return Err(format!("numbers of {bits} bits")),
    };
    let found = u32::try_from(block).ok().filter(|&block| block > 0);
    let block = found.ok_or_else(|| format!("a block_size of {block}"))?;
    Ok(Quantization { bits, block })
}

/// A product with weights `[columns, blocks, bytes of a block]`, transposed.
fn few_bits<'t>(call: &Call<'_, 't>) -> Results<'t> {
    if call.int("weight_prepacked", 0) != 0 {
        return Err("its weights are in the layout of a device".into());
    }
    if call.value(4).is_some() {
        return Err("its input 4, g_idx, is not expressed".into());
    }
    let number = |name: &str| {
        let n = call.int(name, 0);
        let found = usize::try_from(n).ok().filter(|&n| n > 0);
        found.ok_or_else(|| format!("{name} is {n}"))
    };
    let (k, n) = (number("K")?, number("N")?);
    let format = format(call, call.int("block_size", 0))?;
    let padded = k.next_multiple_of(format.block as usize);
    let bytes = call.x(1)?;
    let rows = |x: Tensor<'t>| x.reshape((n, -1i64));
    let numbers = rows(bytes);
    if length(numbers, 1)? != padded / format.per_byte() as usize {
        let Quantization { bits, block } = format;
        return Err(format!(
            "{bytes:?} for blocks of {block} numbers of {bits} bits"
        ));
    }
    let scales = rows(call.float(2)?);
    let zeros = match call.optional(3)? {
        Some(zeros) if zeros.dtype() != DType::U8 => Some(to_f32(zeros)),
        zeros => zeros,
    };
    let weights = numbers.dequantize(format, scales, zeros.map(rows));
    let x = call.float(0)?;
    let x = match padded - k {
        0 => x,
        missing => {
            let mut pads = vec![(0, 0); x.rank()];
            if let Some(last) = pads.last_mut() {
                last.1 = missing;
            }
            x.pad(pads, 0.0)
        }
    };
    let y = product(x, weights.t());
    let y = call.optional_float(5)?.map_or(y, |bias| y + bias);
    call.same(y)
}

/// Rows of a table whose numbers are in blocks along the last axis.
fn gather<'t>(call: &Call<'_, 't>) -> Results<'t> {
    let table = call.x(0)?;
    if call.element(0)? != Element::U8 {
        return Err(format!("a table of {}", call.element(0)?));
    }
    let last = resolve(call.int("quantize_axis", 1), 2)?;
    if table.rank() != 2 || call.int("gather_axis", 0) != 0 || last != 1 {
        return Err("only rows of a matrix with blocks in its rows are expressed".into());
    }
    let format = format(call, call.int("block_size", 128))?;
    let shape = call.dims(1)?;
    let index = super::super::index::positive(call, call.x(1)?, size(table, 0)?)?;
    let index = index.reshape([-1i64]);
    let rows = |x: Tensor<'t>| x.index_select(0, index);
    let zeros = call.optional(3)?.map(rows);
    let y = rows(table).dequantize(format, rows(call.float(2)?), zeros);
    let width = length(y, 1)?;
    let to = [&shape[..], &[Size::fixed(width as i64)]].concat();
    Ok(vec![result(call.element(2)?, y.reshape(shape_of(&to)))])
}
