//! Pooling and its gradient.
//!
//! Both compute their result in tiles of whole rows. A row is computed window element by window
//! element, so that the inner loop runs along the row for every geometry; windows of 2×2 with
//! stride 2, the common case, have specialized loops, and other f32 windows one or two columns
//! apart are computed in vectors. The gradient gathers: each input element adds up the gradients of
//! the windows over it, in row-major order of the windows, so that no two threads write one element
//! and the sums do not depend on how the work is shared.

mod forward;
mod grad;
#[cfg(target_arch = "x86_64")]
mod lanes;
#[cfg(target_arch = "x86_64")]
mod pairs;
#[cfg(target_arch = "x86_64")]
mod vectors;

pub(crate) use forward::Pool2d;
pub(crate) use grad::Pool2dGrad;

use std::ops::Range;

use super::pointwise::{Space, aligned, product};
use super::tile::{Bound, TileCode};
use super::{Config, Isa, SpecError};
use crate::size::{Env, Size};
use crate::spec::{Spec, Window};

/// Most points of a tile: their values, positions and the epilogue's registers stay in the
/// first-level cache.
const TILE: usize = 2048;

/// Rows that tiles of more rows have a multiple of.
const ROWS: usize = 8;

/// The prepared state that both kernels share.
struct Common {
    code: TileCode,
    isa: Isa,
    threads: usize,
    /// Most points of a tile.
    capacity: usize,
}

impl Common {
    fn new(spec: &Spec, bound: &Env, config: &Config) -> Result<Common, SpecError> {
        let capacity = Space::new(&spec.dims, bound).points().clamp(1, TILE);
        Ok(Common {
            code: TileCode::new(spec, bound, config)?,
            isa: config.isa,
            threads: config.threads,
            capacity,
        })
    }

    /// Bytes of one array of a tile's values.
    fn array_bytes(&self) -> usize {
        aligned(self.capacity * size_of::<u32>())
    }

    /// A worker's scratch: `arrays` arrays of a tile's values, then the epilogue's.
    fn worker_bytes(&self, arrays: usize) -> usize {
        arrays * self.array_bytes() + self.code.scratch_bytes()
    }
}

/// How the result `n, c, h, w` is cut into tiles: some rows of one image, all channels in one
/// sequence of rows; rows longer than a tile are cut as well. The cut depends on the sizes alone.
#[derive(Clone, Copy)]
struct Tiling {
    dims: [usize; 4],
    rows: usize,
    cols: usize,
    row_tiles: usize,
    col_tiles: usize,
}

/// One tile.
struct Tile {
    n: usize,
    /// Rows `c · h + y` of the image.
    rows: Range<usize>,
    cols: Range<usize>,
}

impl Tiling {
    fn new(dims: &[Size], capacity: usize, env: &Env) -> Tiling {
        let space = Space::new(dims, env);
        let &[n, c, h, w] = space.sizes() else {
            unreachable!("four axes")
        };
        let cols = w.clamp(1, capacity);
        // Whole vectors and pairs of rows, where there are several.
        let rows = match (capacity / cols).max(1) {
            rows if rows > ROWS => rows / ROWS * ROWS,
            rows => rows,
        };
        Tiling {
            dims: [n, c, h, w],
            rows,
            cols,
            row_tiles: (c * h).div_ceil(rows),
            col_tiles: w.div_ceil(cols),
        }
    }

    fn tiles(&self) -> usize {
        self.dims[0] * self.row_tiles * self.col_tiles
    }

    fn tile(&self, index: usize) -> Tile {
        let [_, c, h, w] = self.dims;
        let col = index % self.col_tiles * self.cols;
        let row = index / self.col_tiles % self.row_tiles * self.rows;
        let n = index / self.col_tiles / self.row_tiles;
        Tile {
            n,
            rows: row..(row + self.rows).min(c * h),
            cols: col..(col + self.cols).min(w),
        }
    }

    /// The rows of a tile.
    #[inline(always)]
    fn rows(&self, tile: &Tile) -> Rows {
        let h = self.dims[2];
        Rows {
            next: [tile.n, tile.rows.start / h, tile.rows.start % h],
            h,
            left: tile.rows.len(),
        }
    }

    /// Runs the epilogue over a tile's values.
    ///
    /// # Safety
    /// `acc` holds the tile's values, `scratch` the epilogue's bytes for this worker.
    unsafe fn finish(&self, code: &Bound<'_>, tile: &Tile, acc: *const u32, scratch: *mut u8) {
        let h = self.dims[2];
        let origin = [
            tile.n,
            tile.rows.start / h,
            tile.rows.start % h,
            tile.cols.start,
        ];
        let points = tile.rows.len() * tile.cols.len();
        // SAFETY: the points of a tile are neighbours in row-major order: whole rows, or a part of
        // one.
        unsafe { code.block(&origin, 0, 1, points, acc, points, scratch) };
    }
}

/// The rows `n, c, y` of a tile. An iterator rather than a closure called for each row: a closure
/// would be compiled once, for the least instruction set, instead of into each of its callers.
struct Rows {
    next: [usize; 3],
    h: usize,
    left: usize,
}

impl Iterator for Rows {
    type Item = [usize; 3];

    #[inline(always)]
    fn next(&mut self) -> Option<[usize; 3]> {
        self.left = self.left.checked_sub(1)?;
        let row = self.next;
        self.next[2] += 1;
        if self.next[2] == self.h {
            self.next[1] += 1;
            self.next[2] = 0;
        }
        Some(row)
    }
}

/// The sizes that windows are laid over.
#[derive(Clone, Copy)]
struct Geometry {
    /// Image height and width.
    hw: [usize; 2],
    /// Result height and width.
    ohw: [usize; 2],
    window: Window,
}

impl Geometry {
    /// The elements of window `i` along an axis that lie inside the image.
    #[inline(always)]
    fn inside(&self, axis: usize, i: usize) -> Range<usize> {
        let (start, pad) = (i * self.window.stride[axis], self.window.pad[axis]);
        let from = pad.saturating_sub(start);
        from..(self.hw[axis] + pad)
            .saturating_sub(start)
            .clamp(from, self.window.k[axis].max(from))
    }

    /// The windows along an axis whose element `k` lies at a place in `places` of the image.
    #[inline(always)]
    fn windows(&self, axis: usize, k: usize, places: Range<usize>) -> Range<usize> {
        let (stride, pad) = (self.window.stride[axis], self.window.pad[axis]);
        let from = (places.start + pad).saturating_sub(k).div_ceil(stride);
        let to = (places.end + pad)
            .saturating_sub(k)
            .div_ceil(stride)
            .min(self.ohw[axis]);
        from.min(to)..to
    }

    /// The windows along an axis over a place of the image.
    #[inline(always)]
    fn reaching(&self, axis: usize, place: usize) -> Range<usize> {
        let (stride, end) = (self.window.stride[axis], place + self.window.pad[axis] + 1);
        let first = end.saturating_sub(self.window.k[axis]).div_ceil(stride);
        first..end.div_ceil(stride).min(self.ohw[axis])
    }

    #[inline(always)]
    fn is_2x2(&self) -> bool {
        self.window
            == Window {
                k: [2, 2],
                stride: [2, 2],
                pad: [0, 0],
            }
    }

    /// The divisor of a mean over window (i, j); 1 for an empty window.
    #[inline(always)]
    fn divisor(&self, count_pad: bool, rows: usize, j: usize) -> f32 {
        let count = if count_pad {
            product(&self.window.k)
        } else {
            rows * self.inside(1, j).len()
        };
        count.max(1) as f32
    }
}

/// Runs `$four` at places `$k` that together cover `0..$count` in steps of four, the last moved
/// back to end at `$count`, so that a row which is no multiple of four has no remainder; a row of
/// less than four runs `$one` at every place.
macro_rules! in_fours {
    ($count:expr, |$k:ident| $four:expr, $one:expr) => {{
        let (count, mut next): (usize, usize) = ($count, 0);
        while next < count {
            if count >= 4 {
                let $k = next.min(count - 4);
                $four;
                next += 4;
            } else {
                let $k = next;
                $one;
                next += 1;
            }
        }
    }};
}
use in_fours;
