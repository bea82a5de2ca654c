//! The types of GGUF's tensors.

use safetensors::tensor::Dtype;
use slabwise_kernels::spec::Quantization;

use super::blocks::{self, Decode};

/// A type of tensors: blocks of neighbours in a row, or single elements.
#[derive(Debug)]
pub(in crate::weights) struct TensorType {
    /// Its number in files.
    id: u32,
    pub(in crate::weights) name: &'static str,
    /// The elements of a block, and its bytes.
    pub(in crate::weights) values: usize,
    pub(in crate::weights) bytes: usize,
    pub(in crate::weights) elements: Elements,
}

/// How the elements of a type are read.
#[derive(Debug)]
pub(in crate::weights) enum Elements {
    /// As elements of this type.
    Plain(Dtype),
    /// Decoded to f32, a block at a time.
    Blocks(Decode),
    /// Not at all.
    Unread,
}

const fn plain(id: u32, name: &'static str, dtype: Dtype, bytes: usize) -> TensorType {
    TensorType {
        id,
        name,
        values: 1,
        bytes,
        elements: Elements::Plain(dtype),
    }
}

const fn coded(
    id: u32,
    name: &'static str,
    values: usize,
    bytes: usize,
    decode: Decode,
) -> TensorType {
    TensorType {
        id,
        name,
        values,
        bytes,
        elements: Elements::Blocks(decode),
    }
}

const fn unread(id: u32, name: &'static str, values: usize, bytes: usize) -> TensorType {
    TensorType {
        id,
        name,
        values,
        bytes,
        elements: Elements::Unread,
    }
}

/// All of them. Numbers that are missing here are of types that GGUF no longer has.
const TYPES: &[TensorType] = &[
    plain(0, "F32", Dtype::F32, 4),
    plain(1, "F16", Dtype::F16, 2),
    coded(2, "Q4_0", 32, 18, blocks::q4_0),
    coded(3, "Q4_1", 32, 20, blocks::q4_1),
    coded(6, "Q5_0", 32, 22, blocks::q5_0),
    coded(7, "Q5_1", 32, 24, blocks::q5_1),
    coded(8, "Q8_0", 32, 34, blocks::q8_0),
    unread(9, "Q8_1", 32, 36),
    coded(10, "Q2_K", 256, 84, blocks::q2_k),
    coded(11, "Q3_K", 256, 110, blocks::q3_k),
    coded(12, "Q4_K", 256, 144, blocks::q4_k),
    coded(13, "Q5_K", 256, 176, blocks::q5_k),
    coded(14, "Q6_K", 256, 210, blocks::q6_k),
    unread(15, "Q8_K", 256, 292),
    unread(16, "IQ2_XXS", 256, 66),
    unread(17, "IQ2_XS", 256, 74),
    unread(18, "IQ3_XXS", 256, 98),
    unread(19, "IQ1_S", 256, 50),
    coded(20, "IQ4_NL", 32, 18, blocks::iq4_nl),
    unread(21, "IQ3_S", 256, 110),
    unread(22, "IQ2_S", 256, 82),
    coded(23, "IQ4_XS", 256, 136, blocks::iq4_xs),
    plain(24, "I8", Dtype::I8, 1),
    plain(25, "I16", Dtype::I16, 2),
    plain(26, "I32", Dtype::I32, 4),
    plain(27, "I64", Dtype::I64, 8),
    plain(28, "F64", Dtype::F64, 8),
    unread(29, "IQ1_M", 256, 56),
    plain(30, "BF16", Dtype::BF16, 2),
    unread(34, "TQ1_0", 256, 54),
    unread(35, "TQ2_0", 256, 66),
    coded(39, "MXFP4", 32, 17, blocks::mxfp4),
];

/// The names of the types that are read.
pub(in crate::weights) fn readable() -> String {
    let read = TYPES
        .iter()
        .filter(|kind| !matches!(kind.elements, Elements::Unread));
    let names: Vec<&str> = read.map(|kind| kind.name).collect();
    names.join(", ")
}

impl TensorType {
    /// The type of a number in a file.
    pub(super) fn of(id: u32) -> Option<&'static TensorType> {
        TYPES.iter().find(|kind| kind.id == id)
    }

    /// The type of the elements that are read.
    pub(in crate::weights) fn dtype(&self) -> Dtype {
        match self.elements {
            Elements::Plain(dtype) => dtype,
            Elements::Blocks(_) | Elements::Unread => Dtype::F32,
        }
    }

    /// Decodes whole blocks to little-endian f32.
    pub(in crate::weights) fn decode(&self, bytes: &[u8], floats: &mut [u8]) {
        let Elements::Blocks(decode) = self.elements else {
            return;
        };
        let mut values = [0f32; blocks::VALUES_MAX];
        let values = &mut values[..self.values];
        let targets = floats.chunks_exact_mut(4 * self.values);
        for (block, floats) in bytes.chunks_exact(self.bytes).zip(targets) {
            decode(block, values);
            for (to, x) in floats.chunks_exact_mut(4).zip(&*values) {
                to.copy_from_slice(&x.to_le_bytes());
            }
        }
    }

    /// The format of quantized weights whose numbers stand for exactly the values of this type.
    pub(super) fn quantization(&self) -> Option<Quantization> {
        let bits = match self.name {
            "Q4_0" => 4,
            "Q8_0" => 8,
            _ => return None,
        };
        let block = self.values as u32;
        Some(Quantization { bits, block })
    }
}
