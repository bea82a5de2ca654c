//! Quantized weights, and products with them.

use slabwise_kernels::dtype::DType;
use slabwise_kernels::scalar::ScalarOp;
use slabwise_kernels::size::Size;
use slabwise_kernels::spec::{Dims, Quantization, ReduceOp};
use smallvec::SmallVec;

use super::rules::{Gradients, Rule, TensorType};
use super::{GraphBuilder, NodeId, Op};
use crate::shape::Symbols;

/// The rule of [`Op::Dequantize`]: operands numbers, scales and, if there are any, zero points.
pub(super) fn infer(format: Quantization, given: &[TensorType<'_>], symbols: &Symbols) -> Rule {
    let say = |why: String| {
        let Quantization { bits, block } = format;
        Err(format!(
            "weights of {bits} bits in blocks of {block}: {why}"
        ))
    };
    if !format.is_valid() {
        return say("numbers have 2, 4 or 8 bits, and blocks have numbers".into());
    }
    let [numbers, scales, ..] = given else {
        return say("numbers and scales are needed".into());
    };
    let lengths = |x: &TensorType<'_>| match *x.dims {
        [rows, columns] => Some((rows, columns.as_fixed()?)),
        _ => None,
    };
    let (Some((rows, bytes)), DType::U8) = (lengths(numbers), numbers.dtype) else {
        let (dtype, shape) = (numbers.dtype, symbols.show(numbers.dims));
        return say(format!(
            "numbers are {dtype} {shape}, not u8 [rows, bytes] with known bytes"
        ));
    };
    let Some(columns) = bytes.checked_mul(i64::from(format.per_byte())) else {
        return say(format!("{bytes} bytes are beyond any memory"));
    };
    let Some(blocks) = format.blocks(Size::fixed(columns)) else {
        return say(format!(
            "rows of {bytes} bytes, {columns} numbers, are not whole blocks"
        ));
    };
    let expect = |name: &str, x: &TensorType<'_>, dtype: DType, columns: i64| {
        if x.dtype == dtype && lengths(x) == Some((rows, columns)) {
            return Ok(());
        }
        let shape = [rows, Size::fixed(columns)];
        Err(format!(
            "{name} are {} {}, not {dtype} {}",
            x.dtype,
            symbols.show(x.dims),
            symbols.show(&shape)
        ))
    };
    let fits = expect("scales", scales, DType::F32, blocks).and_then(|()| match given.get(2) {
        None => Ok(()),
        Some(zeros) if zeros.dtype == DType::U8 => {
            expect("packed zero points", zeros, DType::U8, format.bytes(blocks))
        }
        Some(zeros) => expect("zero points", zeros, DType::F32, blocks),
    });
    if let Err(why) = fits {
        return say(why);
    }
    Ok((DType::F32, Dims::from_slice(&[rows, Size::fixed(columns)])))
}

/// The rule of [`Op::QuantizedMatmul`]: the left operand, and those of [`Op::Dequantize`].
pub(super) fn infer_product(
    format: Quantization,
    given: &[TensorType<'_>],
    symbols: &Symbols,
) -> Rule {
    let (a, weights) = given.split_first().ok_or("a left operand is needed")?;
    let (_, dims) = infer(format, weights, symbols)?;
    match *a.dims {
        [m, k] if k == dims[1] && a.dtype == DType::F32 => {
            Ok((DType::F32, Dims::from_slice(&[m, dims[0]])))
        }
        _ => Err(format!(
            "{} {} times quantized weights {}",
            a.dtype,
            symbols.show(a.dims),
            symbols.show(&dims)
        )),
    }
}

/// Packed numbers `[rows, bytes]` as integers `[rows, numbers]`.
fn unpack(g: &mut dyn GraphBuilder, format: Quantization, packed: NodeId) -> NodeId {
    let (rows, bytes) = (g.dims(packed)[0], g.dims(packed)[1]);
    let per_byte = i64::from(format.per_byte());
    let all = Dims::from_slice(&[rows, bytes, Size::fixed(per_byte)]);
    let numbers = Size::fixed(bytes.as_fixed().unwrap_or(0) * per_byte);
    let packed = g.reshape(packed, &Dims::from_slice(&[rows, bytes, Size::ONE]));
    let packed = g.broadcast(packed, &all);
    let packed = g.cast(packed, DType::I32);
    let bits = Size::fixed(i64::from(format.bits));
    let strides = Dims::from_slice(&[Size::ZERO, Size::ZERO, bits]);
    let shift = g.emit(Op::Index(strides), &[], DType::I32, all.clone());
    let mask = g.full(format.mask() as f32, DType::I32, &all);
    let shifted = g.scalar(ScalarOp::ShiftRight, &[packed, shift]);
    let unpacked = g.scalar(ScalarOp::BitAnd, &[shifted, mask]);
    g.reshape(unpacked, &Dims::from_slice(&[rows, numbers]))
}

/// The differences of numbers and zero points, and the scales, over `[rows, blocks, block]`.
fn parts(g: &mut dyn GraphBuilder, format: Quantization, inputs: &[NodeId]) -> [NodeId; 2] {
    let blocks = g.dims(inputs[1]).clone();
    let with = |length: Size| blocks.iter().copied().chain([length]).collect::<Dims>();
    let (all, each) = (with(Size::fixed(i64::from(format.block))), with(Size::ONE));
    let numbers = unpack(g, format, inputs[0]);
    let numbers = g.cast(numbers, DType::F32);
    let numbers = g.reshape(numbers, &all);
    let zeros = match inputs.get(2) {
        None => g.full(format.middle() as f32, DType::F32, &all),
        Some(&zeros) => {
            let zeros = match g.dtype(zeros) {
                DType::U8 => {
                    let unpacked = unpack(g, format, zeros);
                    let used = match g.dims(unpacked) == &blocks {
                        true => unpacked,
                        false => {
                            let start = Dims::from_slice(&[Size::ZERO; 2]);
                            let step = SmallVec::from_elem(1, 2);
                            let slice = Op::Slice { start, step };
                            g.emit(slice, &[unpacked], DType::I32, blocks.clone())
                        }
                    };
                    g.cast(used, DType::F32)
                }
                _ => zeros,
            };
            let zeros = g.reshape(zeros, &each);
            g.broadcast(zeros, &all)
        }
    };
    let differences = g.scalar(ScalarOp::Sub, &[numbers, zeros]);
    let scales = g.reshape(inputs[1], &each);
    [differences, g.broadcast(scales, &all)]
}

/// The weights of [`Op::Dequantize`] by elementwise operations.
pub(crate) fn dequantized(
    g: &mut dyn GraphBuilder,
    format: Quantization,
    inputs: &[NodeId],
    dims: &Dims,
) -> NodeId {
    let [differences, scales] = parts(g, format, inputs);
    let weights = g.mul(differences, scales);
    g.reshape(weights, dims)
}

/// Of W = (q − z)·s, over each block: ds = Σ (q − z)·dW, dz = −Σ s·dW. Numbers have none.
pub(super) fn gradient(
    g: &mut dyn GraphBuilder,
    format: Quantization,
    inputs: &[NodeId],
    dy: NodeId,
    wanted: &[bool],
) -> Gradients {
    let mut gradients: Gradients = SmallVec::from_elem(None, inputs.len());
    let of_zeros = wanted.get(2) == Some(&true) && g.dtype(inputs[2]) == DType::F32;
    if wanted[1] || of_zeros {
        let [differences, scales] = parts(g, format, inputs);
        let dy = g.reshape(dy, &g.dims(differences).clone());
        let blocks = g.dims(inputs[1]).clone();
        let mut sums = |factor: NodeId| {
            let product = g.mul(dy, factor);
            let sums = g.reduce(ReduceOp::Sum, product, &[2]);
            g.reshape(sums, &blocks)
        };
        gradients[1] = wanted[1].then(|| sums(differences));
        if of_zeros {
            let sums = sums(scales);
            gradients[2] = Some(g.scalar(ScalarOp::Neg, &[sums]));
        }
    }
    gradients
}
