//! Positions of a part of an image as pieces of vectors, which are contiguous in its tile.

use super::tile::{Axis, Part, Shape};
use crate::cpu::gemm::micro::Micro;
use crate::cpu::gemm::pack::Piece;

/// Most vectors of a micro-panel, and most lanes of a vector.
const VECTORS: usize = 2;
const LANES: usize = 16;

/// The pieces of a tile that the vectors of a micro-panel consist of.
pub(super) struct Pieces {
    pieces: [Piece; VECTORS * LANES],
    count: usize,
    /// The pieces before each vector, and all of them.
    vectors: [u16; VECTORS + 1],
}

impl Pieces {
    pub fn all(&self) -> &[Piece] {
        &self.pieces[..self.count]
    }

    /// The end of the pieces of each of `vectors` vectors, after a zero.
    pub fn ends(&self, vectors: usize) -> &[u16] {
        &self.vectors[..=vectors]
    }
}

/// The pieces that hold `positions` positions of a part from `first` on.
pub(super) fn pieces(
    shape: &Shape,
    axes: &[Axis; 2],
    part: &Part,
    first: usize,
    positions: usize,
    micro: &Micro,
) -> Pieces {
    let (mut pieces, mut vectors) = ([Piece::default(); VECTORS * LANES], [0u16; VECTORS + 1]);
    let (rows, columns) = (part.rows.len(), part.columns.len());
    let (mut image, mut row, mut column) = (
        first / columns / rows,
        first / columns % rows,
        first % columns,
    );
    let (mut lane, mut count, mut opened) = (0, 0, 0);
    while lane < positions {
        let run = (columns - column)
            .min(micro.lanes - lane % micro.lanes)
            .min(positions - lane);
        let offset = (shape.position(axes, image, row, column) as i32)
            .wrapping_sub((lane % micro.lanes) as i32);
        let lanes = (((1u64 << run) - 1) << (lane % micro.lanes)) as u32;
        // Contiguous rows need no new piece.
        if count > opened && pieces[count - 1].offset == offset {
            pieces[count - 1].lanes |= lanes;
        } else {
            pieces[count] = Piece { offset, lanes };
            count += 1;
        }
        (lane, column) = (lane + run, column + run);
        if column == columns {
            (column, row) = (0, row + 1);
        }
        if row == rows {
            (row, image) = (0, image + 1);
        }
        if lane % micro.lanes == 0 || lane == positions {
            opened = count;
            vectors[lane.div_ceil(micro.lanes)] = count as u16;
        }
    }
    Pieces {
        pieces,
        count,
        vectors,
    }
}
