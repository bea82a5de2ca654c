//! Tiles one after another over a block that nothing is reduced in.

use super::exec::{Machine, Tile};
use super::{MAX_ROWS, TILE, VECTOR};

impl Machine<'_> {
    /// Computes and stores `rows × cols` points at the cursors, in tiles of at most `wide` columns. What is the same along the columns
    /// (a norm's mean and scale) is computed once for all tiles of some rows.
    ///
    /// # Safety
    /// The points must be part of the space, and no other thread may touch them.
    pub unsafe fn sweep(&self, rows: usize, cols: usize, wide: usize) {
        let wide = wide.min(cols);
        let high = (TILE / wide.next_multiple_of(VECTOR)).clamp(1, MAX_ROWS).min(rows);
        let hoisted = self.flat_along_columns();
        let strip = if hoisted { MAX_ROWS / high * high } else { rows };
        for first in (0..rows).step_by(strip) {
            let end = (first + strip).min(rows);
            // SAFETY: the caller's promise; what is flat is computed before what uses it.
            unsafe {
                if hoisted {
                    self.flat(&Tile::new(end - first, 1).at(first, 0));
                    self.keep_flat();
                }
                for row in (first..end).step_by(high) {
                    if hoisted {
                        self.find_flat(row - first);
                    }
                    for col in (0..cols).step_by(wide) {
                        let tile = Tile::new(high.min(end - row), wide.min(cols - col)).at(row, col);
                        if !hoisted {
                            self.flat(&tile);
                        }
                        self.full(0, &tile);
                        self.store_full(0, &tile);
                    }
                }
            }
        }
    }
}
