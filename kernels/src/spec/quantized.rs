//! Products with weights that are stored as integers of a few bits, a scale for each block of them.

use smallvec::{SmallVec, smallvec};

use super::{Access, Dims, Operand, Spec, SpecError, check_operand};
use crate::dtype::DType;
use crate::size::Size;

/// Block-wise quantization of the rows of a matrix: each number q of a block stands for
/// `(q − zero) · scale`, with the scale and the zero point of its block.
///
/// The numbers of a row are packed without gaps, the first in the lowest bits of a byte: the format
/// of ONNX's `MatMulNBits`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Quantization {
    /// Bits of a number: 2, 4 or 8.
    pub bits: u32,
    /// Numbers of a block.
    pub block: u32,
}

/// Bytes of which the numbers of a block must be a multiple for a kernel: a vector of every
/// instruction set but the widest takes so many bytes at a time.
const BLOCK_BYTES: u64 = 8;

impl Quantization {
    /// Numbers in a byte.
    pub fn per_byte(self) -> u32 {
        8 / self.bits.clamp(1, 8)
    }

    /// The zero point of weights that have none of their own: the middle of the range.
    pub fn middle(self) -> u32 {
        1 << self.bits.clamp(1, 8).saturating_sub(1)
    }

    /// The bits of one number.
    pub fn mask(self) -> u32 {
        (1 << self.bits.clamp(1, 8)) - 1
    }

    /// Whether the bits are 2, 4 or 8, and blocks have numbers.
    pub fn is_valid(self) -> bool {
        matches!(self.bits, 2 | 4 | 8) && self.block > 0
    }

    /// Whether products on the CPU read such weights as they are.
    pub fn has_kernel(self) -> bool {
        let bits = u64::from(self.block) * u64::from(self.bits);
        self.is_valid() && bits.is_multiple_of(8 * BLOCK_BYTES)
    }

    /// Bytes of so many packed numbers, the last of which may be in part unused.
    pub fn bytes(self, numbers: i64) -> i64 {
        let per_byte = i64::from(self.per_byte());
        (numbers / per_byte).saturating_add(i64::from(numbers % per_byte > 0))
    }

    /// The blocks of a row of so many numbers, if it is whole blocks and whole bytes.
    pub fn blocks(self, numbers: Size) -> Option<i64> {
        let (numbers, block) = (numbers.as_fixed()?, i64::from(self.block));
        let fills = block > 0 && numbers % block == 0 && numbers % i64::from(self.per_byte()) == 0;
        fills.then_some(numbers / block)
    }
}

/// See [`Body::QuantizedMatmul`](super::Body::QuantizedMatmul).
#[derive(Clone, Debug, PartialEq)]
pub struct QuantizedMatmul {
    /// Length of the contracted axis, whole blocks.
    pub k: Size,
    /// The left operand, strides over `m, k`, f32.
    pub a: Operand,
    /// The format of the weights.
    pub format: Quantization,
    /// The packed numbers of the weights, strides over `n, bytes of a row`; the bytes of a row are
    /// neighbours.
    pub numbers: Operand,
    /// The scales, strides over `n, blocks of a row`, f32.
    pub scales: Operand,
    /// See [`Matmul::in_order`](super::Matmul::in_order).
    pub in_order: bool,
    /// The zero points: f32 with strides over `n, blocks of a row`, or u8, packed like the numbers,
    /// with strides over `n, bytes`. [`Quantization::middle`] if there are none.
    pub zeros: Option<Operand>,
}

impl QuantizedMatmul {
    /// The operands with their spaces, in the order of the arguments.
    pub(super) fn operands(&self, dims: &Dims) -> SmallVec<[(Operand, Dims, Access); 3]> {
        let (rows, columns) = match dims[..] {
            [m, n] => (m, n),
            _ => (Size::ZERO, Size::ZERO),
        };
        let of = |operand: &Operand, rows: Size, length: Size| {
            let space = Dims::from_slice(&[rows, length]);
            (operand.clone(), space, Access::Read)
        };
        let blocks = self.format.blocks(self.k).unwrap_or(0);
        let bytes = self.format.bytes(self.k.as_fixed().unwrap_or(0));
        let mut list = smallvec![
            of(&self.a, rows, self.k),
            of(&self.numbers, columns, Size::fixed(bytes)),
            of(&self.scales, columns, Size::fixed(blocks)),
        ];
        list.extend(self.zeros.iter().map(|zeros| {
            let length = match zeros.dtype {
                DType::U8 => self.format.bytes(blocks),
                _ => blocks,
            };
            of(zeros, columns, Size::fixed(length))
        }));
        list
    }

    pub(super) fn check(&self, spec: &Spec) -> Result<(), SpecError> {
        check_operand("the left operand", &self.a, 2, &[DType::F32])?;
        check_operand("the weights", &self.numbers, 2, &[DType::U8])?;
        check_operand("the scales", &self.scales, 2, &[DType::F32])?;
        if let Some(zeros) = &self.zeros {
            check_operand("the zero points", zeros, 2, &[DType::F32, DType::U8])?;
        }
        let whole = self.format.is_valid() && self.format.blocks(self.k).is_some();
        let fixed = spec.dims.len() == 2 && spec.dims[1].as_fixed().is_some();
        if whole && fixed && self.numbers.strides[1].is(1) {
            Ok(())
        } else {
            Err(SpecError::Quantized {
                format: self.format,
                k: self.k,
                dims: spec.dims.to_vec(),
            })
        }
    }
}
