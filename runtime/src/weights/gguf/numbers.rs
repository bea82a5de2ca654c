//! Quantized weights whose numbers a file has in the format of the model, taken over as they are.

use std::io;

use slabwise_kernels::spec::Quantization;

use super::blocks;
use crate::weights::assembly::Assembly;
use crate::weights::convert::Bytes as _;
use crate::weights::open::{Stored, Weights};
use crate::weights::quantize::{Quantized, pack};

/// The numbers, scales and zero points of a weight that is made of tensors of blocks in the model's
/// format; `None` if one of them is in another format, or a block does not stay whole.
///
/// # Errors
/// The system's, with the tensor.
pub(in crate::weights) fn numbers<'s>(
    weights: &Weights,
    stored: &[(&str, &'s Stored)],
    assembly: &Assembly,
    format: Quantization,
    buffer: &mut Vec<u8>,
) -> Option<Result<Quantized, (&'s Stored, io::Error)>> {
    let [rows, columns] = *assembly.shape else {
        return None;
    };
    let block = u64::from(format.block);
    let whole = assembly.pieces.iter().all(|piece| {
        let kind = stored[piece.source].1.kind;
        let [from, _] = piece.strides[..] else {
            return false;
        };
        let edges = [piece.at, from, piece.start[1], piece.lengths[1]];
        kind.and_then(|kind| kind.quantization()) == Some(format)
            && piece.strides[1] == 1
            && edges.iter().all(|edge| edge.is_multiple_of(block))
    });
    if !whole || !columns.is_multiple_of(block) {
        return None;
    }
    let (per_row, per_byte) = ((columns / block) as usize, u64::from(format.per_byte()));
    let zeros: Vec<u8> = pack(&vec![format.middle() as u8; per_row], format).collect();
    let mut quantized = Quantized {
        numbers: vec![0; (rows * columns / per_byte) as usize],
        scales: vec![0.0; rows as usize * per_row],
        zeros: zeros.repeat(rows as usize),
    };
    let bytes = (block / per_byte) as usize;
    for pieces in assembly.pieces.chunk_by(|a, b| a.source == b.source) {
        let Some(first) = pieces.first() else {
            continue;
        };
        let stored = stored[first.source].1;
        let wide = stored.kind.map_or(0, |kind| kind.bytes);
        let mut window = weights.blocks(stored, buffer);
        for piece in pieces {
            let count = (piece.lengths[1] / block) as usize;
            for row in 0..piece.lengths[0] {
                let from = (piece.at + row * piece.strides[0]) / block;
                let read = match window.read(from * wide as u64, count * wide) {
                    Ok(read) => read,
                    Err(error) => return Some(Err((stored, error))),
                };
                let to = (piece.start[0] + row) as usize * per_row;
                let to = to + (piece.start[1] / block) as usize;
                let numbers = &mut quantized.numbers[to * bytes..][..count * bytes];
                let scales = &mut quantized.scales[to..][..count];
                let parts = numbers.chunks_exact_mut(bytes).zip(scales);
                for (block, (numbers, scale)) in read.chunks_exact(wide).zip(parts) {
                    *scale = blocks::half(block, 0);
                    repack(block, format, numbers);
                }
            }
        }
    }
    Some(Ok(quantized))
}

/// The numbers of a block, in the order of their elements.
fn repack(block: &[u8], format: Quantization, numbers: &mut [u8]) {
    if format.bits == 4 {
        for (at, byte) in numbers.iter_mut().enumerate() {
            let number = |at| blocks::q4_0_number(block, at);
            *byte = number(2 * at) | number(2 * at + 1) << 4;
        }
        return;
    }
    // Signed numbers of eight bits, counted from the zero point 128.
    for (byte, number) in numbers.iter_mut().zip(&block[2..]) {
        *byte = number ^ 0x80;
    }
}
