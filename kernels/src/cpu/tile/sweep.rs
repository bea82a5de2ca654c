//! The loop over the tiles of a block without reductions.

use super::VECTOR;
use super::exec::{Machine, Tile};

impl Machine<'_> {
    /// Computes and stores `rows × cols` points at the cursors, in tiles of at most `wide` columns.
    /// Values that are invariant along the columns (a norm's mean and scale) are computed once for
    /// all tiles of some rows.
    ///
    /// # Safety
    /// The points must be part of the space, and no other thread may touch them.
    pub unsafe fn sweep(&self, rows: usize, cols: usize, wide: usize) {
        let lanes = self.bound.code.register();
        let wide = wide.min(cols).min(lanes);
        let high = (lanes / wide.next_multiple_of(VECTOR)).min(rows);
        let hoisted = self.hoisted();
        let strip = if hoisted.is_some() {
            lanes / VECTOR / high * high
        } else {
            rows
        };
        for first in (0..rows).step_by(strip) {
            let end = (first + strip).min(rows);
            if let Some(hoisted) = hoisted {
                // SAFETY: the caller's promise.
                unsafe { self.compute_invariant(hoisted, first..end) };
            }
            for row in (first..end).step_by(high) {
                for col in (0..cols).step_by(wide) {
                    let tile = Tile::new(high.min(end - row), wide.min(cols - col)).at(row, col);
                    // SAFETY: the caller's promise.
                    unsafe {
                        match hoisted {
                            Some(hoisted) => self.compute_varying(hoisted, row - first, &tile),
                            None => self.compute_per_element(0, &tile),
                        }
                        self.store_per_element(0, &tile);
                    }
                }
            }
        }
    }
}
