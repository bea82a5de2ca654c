//! Accumulators of one caller: filling, finishing and exchanging them.

use super::VECTOR;
use super::exec::{Along, Machine, Tile};
use super::fold::{FoldCall, FoldCode, NOWHERE};
use super::ops::View;

impl Machine<'_> {
    /// # Safety
    /// As [`Machine::folded`].
    pub(super) unsafe fn fold(&self, k: u16, tile: &Tile) {
        let program = &self.bound.code.program;
        let fold = &program.folds[usize::from(k)];
        let mut value = self.view(fold.arg);
        if value.flat {
            // SAFETY: the spare tile holds a tile; nothing that is used again is kept there.
            value = unsafe { self.spread(value, self.spare(), tile) };
        }
        let call = FoldCall {
            value,
            rows: tile.rows,
            cols: tile.cols,
            position: tile.position as u32,
            ..self.fold_call(k)
        };
        // SAFETY: the view holds whole vectors of every row, and the accumulators a tile.
        unsafe {
            match self.along {
                Along::Columns => (fold.code.columns)(&call),
                Along::Rows => (fold.code.rows)(&call),
            }
        }
    }

    /// The accumulators of a fold, to be finished in place.
    fn fold_call(&self, k: u16) -> FoldCall {
        let program = &self.bound.code.program;
        let fold = &program.folds[usize::from(k)];
        // SAFETY: the accumulators lie inside the scratch memory.
        let acc = unsafe { self.lanes.add(fold.accumulator) };
        let value = View {
            ptr: std::ptr::dangling(),
            rs: 0,
            flat: true,
        };
        FoldCall {
            value,
            rows: 0,
            cols: 0,
            acc,
            out: acc,
            stride: program.register,
            identity: fold.code.identity,
            position: 0,
        }
    }

    fn folds(&self, level: usize) -> impl Iterator<Item = (u16, &FoldCode)> {
        let program = &self.bound.code.program;
        program.levels[level]
            .folds
            .iter()
            .map(|&k| (k, &program.folds[usize::from(k)].code))
    }

    /// Lanes of a finished fold.
    fn folded_lanes(&self, tile: &Tile) -> usize {
        match self.along {
            Along::Columns => tile.rows,
            Along::Rows => tile.pad,
        }
    }

    /// Empties the accumulators of a level.
    ///
    /// # Safety
    /// As [`Machine::full`].
    pub unsafe fn clear(&self, level: usize, tile: &Tile) {
        let lanes = if self.along == Along::Columns {
            tile.rows * VECTOR
        } else {
            tile.pad
        };
        for (k, code) in self.folds(level) {
            // SAFETY: the accumulators hold a tile.
            unsafe { code.clear(self.fold_call(k).acc, lanes, self.bound.code.register()) };
        }
    }

    /// Combines each row's accumulators of a level into one value.
    ///
    /// # Safety
    /// As [`Machine::full`].
    pub unsafe fn finish(&self, level: usize, tile: &Tile) {
        for (k, code) in self.folds(level).filter(|_| self.along == Along::Columns) {
            // SAFETY: the accumulators hold a tile.
            unsafe {
                (code.finish)(&FoldCall {
                    rows: tile.rows,
                    ..self.fold_call(k)
                })
            };
        }
    }

    /// Makes the finished folds of a level visible as values.
    ///
    /// # Safety
    /// As [`Machine::full`].
    pub unsafe fn publish(&self, level: usize, tile: &Tile) {
        for (k, code) in self.folds(level) {
            let ptr = self
                .fold_call(k)
                .acc
                .wrapping_add((code.words - 1) * self.bound.code.register());
            if code.words > 1 {
                // SAFETY: the accumulators hold a tile.
                for position in
                    unsafe { std::slice::from_raw_parts_mut(ptr, self.folded_lanes(tile)) }
                {
                    // The best of no elements is said to be the first.
                    *position = if *position == NOWHERE { 0 } else { *position };
                }
            }
            let flat = self.along == Along::Columns;
            self.set_view(
                self.bound.code.program.folds[usize::from(k)].value,
                View {
                    ptr,
                    rs: isize::from(flat),
                    flat,
                },
            );
        }
    }

    /// Copies the finished folds of a level out to `to`, or back in: `stride` lanes for each word
    /// of each fold.
    ///
    /// # Safety
    /// As [`Machine::full`]; `partial` must hold that many lanes.
    pub unsafe fn exchange(
        &self,
        level: usize,
        tile: &Tile,
        partial: *mut u32,
        stride: usize,
        out: bool,
    ) {
        let mut at = partial;
        for (k, code) in self.folds(level) {
            for word in 0..code.words {
                // SAFETY: the accumulators hold a tile for each word; the caller's promise for the
                // other side.
                unsafe {
                    let acc = self.fold_call(k).acc.add(word * self.bound.code.register());
                    let (from, to) = if out { (acc, at) } else { (at, acc) };
                    std::ptr::copy_nonoverlapping(from, to, self.folded_lanes(tile));
                    at = at.add(stride);
                }
            }
        }
    }

    /// Copies the accumulators of a level, not finished yet, out to `sums`, or back in: `stride`
    /// lanes for each fold.
    ///
    /// # Safety
    /// As [`Machine::full`]; `sums` must hold that many lanes, as many as the accumulators of a
    /// tile at least.
    pub unsafe fn carry(
        &self,
        level: usize,
        tile: &Tile,
        sums: *mut u32,
        stride: usize,
        out: bool,
    ) {
        let lanes = if self.along == Along::Columns {
            tile.rows * VECTOR
        } else {
            tile.pad
        };
        for (at, (k, _)) in self.folds(level).enumerate() {
            let (acc, sums) = (self.fold_call(k).acc, sums.wrapping_add(at * stride));
            let (from, to) = if out { (acc, sums) } else { (sums, acc) };
            // SAFETY: the accumulators hold a tile; the caller's promise for the other side.
            unsafe { std::ptr::copy_nonoverlapping(from, to, lanes) };
        }
    }

    /// Folds what [`Machine::exchange`] copied out to `from` into what it copied out to `into`.
    ///
    /// # Safety
    /// As [`Machine::exchange`]; the two do not overlap.
    pub unsafe fn merge(
        &self,
        level: usize,
        tile: &Tile,
        into: *mut u32,
        from: *mut u32,
        stride: usize,
    ) {
        let mut at = 0;
        for (k, code) in self.folds(level) {
            // SAFETY: the caller's promise.
            unsafe {
                let call = FoldCall {
                    acc: from.add(at),
                    out: into.add(at),
                    cols: self.folded_lanes(tile),
                    stride,
                    ..self.fold_call(k)
                };
                (code.merge)(&call);
            }
            at += code.words * stride;
        }
    }
}
