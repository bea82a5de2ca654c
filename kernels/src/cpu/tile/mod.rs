//! The tile interpreter: runs the `code` of a spec, tile by tile.
//!
//! A tile is at most [`TILE`] points, as rows of columns. One step of the program runs over the
//! whole tile before the next one begins, so that the cost of dispatch is shared by hundreds of
//! points, while values stay in registers of one tile each that live in the first-level cache.
//! Operands that are stored as lanes are read in place, and the last operation writes directly to
//! the stored operand. A value never depends on the position of its point in a tile.

mod accumulate;
mod bind;
mod chain;
mod compile;
mod copy;
mod exec;
mod ops;
mod reduce;
mod sweep;
#[cfg(test)]
mod tests;

pub(crate) use bind::{Bound, Requests, prefetch};
pub(crate) use exec::{Along, Machine, Tile};

use super::{Config, Launch, SpecError};
use crate::dtype::DType;
use crate::size::{Env, Size};
use crate::spec::{Inst, MAX_AXES, Spec};
use compile::Program;

/// Most points of a tile, and most lanes of a register.
pub(crate) const TILE: usize = 1024;
/// Lanes that operations work on together on every instruction set: rows in registers are padded to
/// a multiple of it.
pub(crate) const VECTOR: usize = 16;
/// Most rows of a tile, and of tiles that share invariant values.
pub(crate) const MAX_ROWS: usize = TILE / VECTOR;
/// Axes of a launch: one more than of a spec, for spaces without rows or columns.
pub(crate) const AXES: usize = MAX_AXES + 1;

/// Lanes of a register for loops without reductions over `points` points: those of a whole tile, or
/// fewer if the registers would take more memory than the operands. Then the loop has several tiles.
fn lanes(points: usize) -> usize {
    (points / 4).next_multiple_of(VECTOR).clamp(TILE / 8, TILE)
}

/// The compiled `code` of a spec.
pub(crate) struct TileCode {
    program: Program,
    /// Stored types of the operands.
    dtypes: Vec<DType>,
    /// Which operands are read, by bit.
    read: u64,
    /// Whether the code only stores the anchor's values unchanged.
    only_stores: bool,
    /// Values of the program.
    values: usize,
    /// Lanes of the buffer of each value that is kept for a whole row.
    kept_lanes: usize,
    /// Byte offsets inside the scratch memory, and its size.
    views_at: usize,
    lanes_at: usize,
    scratch: usize,
}

impl TileCode {
    /// Checks and compiles the code of a spec, to run with sizes up to `bound`: registers are no
    /// larger than a tile of all points.
    pub fn new(spec: &Spec, bound: &Env, config: &Config) -> Result<TileCode, SpecError> {
        // (A size that falls as a symbol grows is not largest at the bound. Sums over no elements
        // have accumulators all the same.)
        let largest = |dim: &Size| {
            if dim.parts().0 < 0 {
                usize::MAX
            } else {
                dim.usize_at(bound).max(1)
            }
        };
        let points = spec
            .dims
            .iter()
            .fold(1usize, |points, dim| points.saturating_mul(largest(dim)));
        let most = if spec.reduced > 0 {
            TILE
        } else {
            lanes(points)
        };
        let program = compile::compile(spec, config, most.min(points.clamp(1, MAX_ROWS) * VECTOR))?;
        let accesses = spec.operands.len() + spec.indices.len();
        let read = (0..spec.operands.len())
            .filter(|&k| spec.reads(k as u16))
            .fold(0, |bits, k| bits | 1 << k);
        let views_at = (accesses * size_of::<exec::Cursor>()).next_multiple_of(64);
        let views = spec.code.len()
            + program
                .hoisted
                .as_ref()
                .map_or(0, |hoisted| hoisted.values.len());
        let lanes_at = (views_at + views * size_of::<ops::View>()).next_multiple_of(64);
        let scratch = lanes_at + program.lanes * 4;
        let dtypes: Vec<DType> = spec.operands.iter().map(|o| o.dtype).collect();
        Ok(TileCode {
            program,
            only_stores: matches!(spec.code[..], [Inst::Acc])
                && spec.reduced == 0
                && dtypes == [DType::F32],
            dtypes,
            read,
            values: spec.code.len(),
            kept_lanes: 0,
            views_at,
            lanes_at,
            scratch,
        })
    }

    /// Reserves `lanes` lanes of each value that is kept from one pass over a row to the next.
    pub fn keep(&mut self, lanes: usize) {
        self.kept_lanes = lanes.next_multiple_of(VECTOR);
        self.scratch =
            self.lanes_at + (self.program.lanes + self.program.kept * self.kept_lanes) * 4;
    }

    /// Whether the code only stores the anchor's values unchanged.
    pub fn only_stores(&self) -> bool {
        self.only_stores
    }

    /// Bytes of scratch memory that each concurrent caller of [`Bound::block`] needs, a multiple of
    /// 64.
    pub fn scratch_bytes(&self) -> usize {
        self.scratch.next_multiple_of(64)
    }

    /// Resolves the code's strides for one launch. The code's operands are the last ones of
    /// `launch.args`.
    pub fn bind<'a>(&'a self, spec: &'a Spec, launch: &Launch<'a>) -> Bound<'a> {
        let order: [usize; MAX_AXES] = std::array::from_fn(|i| i);
        let mut bound = Bound::new(self);
        bound.resolve(spec, launch, &order[..spec.dims.len()]);
        bound
    }

    /// Lanes of a register: those of the largest tile, with rows padded to whole vectors.
    pub fn register(&self) -> usize {
        self.program.register
    }

    /// For each level of the program whether it has work for every tile.
    pub fn levels(&self) -> impl ExactSizeIterator<Item = bool> {
        self.program
            .levels
            .iter()
            .map(|level| !level.per_element.is_empty())
    }

    /// Values that are kept from one pass over a row to the next.
    pub fn kept_values(&self) -> usize {
        self.program.kept
    }

    /// Whether all reductions are of values, without positions, and none needs the result of
    /// another.
    pub fn reduces_independently(&self) -> bool {
        let first = self
            .program
            .levels
            .first()
            .map_or(0, |level| level.reductions.len());
        first == self.program.reductions.len()
            && self.program.reductions.iter().all(|f| f.code.words == 1)
    }

    /// Words of the accumulators of all reductions, per point.
    pub fn reduction_words(&self) -> usize {
        self.program.reductions.iter().map(|f| f.code.words).sum()
    }
}
