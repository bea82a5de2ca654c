//! Products with quantized weights: which have a kernel, and the source of the blocks' scales and zero
//! points.

use slabwise_kernels::dtype::DType;
use slabwise_kernels::spec::{Operand, Quantization, QuantizedMatmul};

use super::emit::{Writer, sized};
use super::plan::SM_MIN;
use crate::abi::{Target, Word};

/// Most rows of a product that reads quantized weights as they are: each eight rows decode them once
/// more, in place of one copy in f32 for all rows.
const ROWS_MAX: i64 = 32;
/// Bytes of a word of packed numbers.
const WORD_BYTES: i64 = 4;
/// Most elements of the left operand that are read at once: 16 bytes.
pub(super) const VECTOR: i64 = 4;

/// Whether there is a kernel for products of up to so many rows with quantized weights of a format.
pub fn has_quantized_matmul(target: &Target, format: Quantization, rows: i64) -> bool {
    target.sm >= SM_MIN && format.has_kernel() && rows <= ROWS_MAX
}

impl Writer<'_> {
    /// Declares the types of the scales and of the zero points.
    pub(super) fn blocks(&mut self, product: &QuantizedMatmul) -> String {
        let bits = product.format.bits;
        let scales = self.block_numbers("float", 2, &product.scales);
        let zeros = match &product.zeros {
            None => format!("MiddleZeros<{bits}>"),
            Some(zeros) if zeros.dtype == DType::U8 => {
                let bytes = self.block_numbers("unsigned char", 3, zeros);
                format!("PackedZeros<{bits}, {bytes}>")
            }
            Some(zeros) => format!("FloatZeros<{}>", self.block_numbers("float", 3, zeros)),
        };
        format!("using Scales = {scales};\nusing Zeros = {zeros};\n")
    }

    /// The type of a number for each block; appends its words.
    fn block_numbers(&mut self, elem: &str, argument: u16, operand: &Operand) -> String {
        let address = self.params.word(Word::Argument(argument));
        let words = [operand.offset, operand.strides[0], operand.strides[1]];
        let at = self.params.block(words.map(sized));
        format!("BlockNumbers<{elem}, idx, {address}, {at}>")
    }
}

/// Whether rows of packed numbers begin at words.
pub(super) fn are_words(numbers: &Operand) -> bool {
    let is_whole = |size: i64| size % WORD_BYTES == 0;
    [numbers.offset, numbers.strides[0]]
        .iter()
        .all(|size| size.as_fixed().is_some_and(is_whole))
}
