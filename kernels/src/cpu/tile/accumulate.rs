//! Accumulators of one caller: filling, finishing and exchanging them.

use super::VECTOR;
use super::exec::{Along, Machine, Tile};
use super::ops::View;
use super::reduce::{NOWHERE, ReduceCall, ReduceCode};

impl Machine<'_> {
    /// # Safety
    /// See [`Machine::compute_per_row`].
    pub(super) unsafe fn reduce(&self, k: u16, tile: &Tile) {
        let program = &self.bound.code.program;
        let reduction = &program.reductions[usize::from(k)];
        let mut args = reduction.args.map(|arg| self.view(arg));
        if !reduction.code.joined && args[0].is_invariant() {
            // SAFETY: the spare register holds a tile, and no value that is used again.
            args[0] = unsafe { self.spread(args[0], self.spare(), tile) };
        }
        let which = usize::from(args[0].is_invariant())
            | usize::from(args[1].is_invariant()) << 1
            | usize::from(args[2].is_invariant()) << 2;
        let call = ReduceCall {
            args,
            rows: tile.rows,
            cols: tile.cols,
            position: tile.position as u32,
            ..self.reduce_call(k)
        };
        // SAFETY: the views hold whole vectors of every row, and the accumulators a tile.
        unsafe {
            match self.along {
                Along::Columns => reduction.code.columns[which](&call),
                Along::Rows => reduction.code.rows[which](&call),
            }
        }
    }

    /// The accumulators of a reduction, to be finished in place.
    fn reduce_call(&self, k: u16) -> ReduceCall {
        let program = &self.bound.code.program;
        let reduction = &program.reductions[usize::from(k)];
        // SAFETY: the accumulators lie inside the scratch memory.
        let acc = unsafe { self.lanes.add(reduction.accumulator) };
        let value = View {
            ptr: std::ptr::dangling(),
            rs: 0,
            cs: 0,
        };
        ReduceCall {
            args: [value; 3],
            rows: 0,
            cols: 0,
            acc,
            out: acc,
            stride: program.register,
            identity: reduction.code.identity,
            position: 0,
        }
    }

    fn reductions(&self, level: usize) -> impl Iterator<Item = (u16, &ReduceCode)> {
        let program = &self.bound.code.program;
        program.levels[level]
            .reductions
            .iter()
            .map(|&k| (k, &program.reductions[usize::from(k)].code))
    }

    /// Lanes of a finished reduction.
    fn result_lanes(&self, tile: &Tile) -> usize {
        match self.along {
            Along::Columns => tile.rows,
            Along::Rows => tile.pad,
        }
    }

    /// Empties the accumulators of a level.
    ///
    /// # Safety
    /// See [`Machine::compute_per_element`].
    pub unsafe fn clear(&self, level: usize, tile: &Tile) {
        let lanes = if self.along == Along::Columns {
            tile.rows * VECTOR
        } else {
            tile.pad
        };
        for (k, code) in self.reductions(level) {
            // SAFETY: the accumulators hold a tile.
            unsafe { code.clear(self.reduce_call(k).acc, lanes, self.bound.code.register()) };
        }
    }

    /// Combines each row's accumulators of a level into one value.
    ///
    /// # Safety
    /// See [`Machine::compute_per_element`].
    pub unsafe fn finish(&self, level: usize, tile: &Tile) {
        for (k, code) in self
            .reductions(level)
            .filter(|_| self.along == Along::Columns)
        {
            // SAFETY: the accumulators hold a tile.
            unsafe {
                (code.finish)(&ReduceCall {
                    rows: tile.rows,
                    ..self.reduce_call(k)
                })
            };
        }
    }

    /// Makes the finished reductions of a level visible as values.
    ///
    /// # Safety
    /// See [`Machine::compute_per_element`].
    pub unsafe fn publish(&self, level: usize, tile: &Tile) {
        for (k, code) in self.reductions(level) {
            let ptr = self
                .reduce_call(k)
                .acc
                .wrapping_add((code.words - 1) * self.bound.code.register());
            if code.words > 1 {
                let lanes = self.result_lanes(tile);
                // SAFETY: the accumulators hold a tile.
                let positions = unsafe { std::slice::from_raw_parts_mut(ptr, lanes) };
                for position in positions {
                    // The best position among no elements is 0 by definition.
                    *position = if *position == NOWHERE { 0 } else { *position };
                }
            }
            let invariant = self.along == Along::Columns;
            self.set_view(
                self.bound.code.program.reductions[usize::from(k)].value,
                View {
                    ptr,
                    rs: isize::from(invariant),
                    cs: usize::from(!invariant),
                },
            );
        }
    }

    /// Copies the finished reductions of a level out to `to`, or back in: `stride` lanes for each
    /// word of each reduction.
    ///
    /// # Safety
    /// As for [`Machine::compute_per_element`]; `partial` must hold that many lanes.
    pub unsafe fn exchange(
        &self,
        level: usize,
        tile: &Tile,
        partial: *mut u32,
        stride: usize,
        out: bool,
    ) {
        let mut at = partial;
        for (k, code) in self.reductions(level) {
            for word in 0..code.words {
                // SAFETY: the accumulators hold a tile for each word; the caller's promise for the
                // other side.
                unsafe {
                    let acc = self
                        .reduce_call(k)
                        .acc
                        .add(word * self.bound.code.register());
                    let (from, to) = if out { (acc, at) } else { (at, acc) };
                    std::ptr::copy_nonoverlapping(from, to, self.result_lanes(tile));
                    at = at.add(stride);
                }
            }
        }
    }

    /// Copies the accumulators of a level, not finished yet, out to `sums`, or back in: `stride`
    /// lanes for each reduction.
    ///
    /// # Safety
    /// As for [`Machine::compute_per_element`]; `sums` must hold that many lanes, as many as the
    /// accumulators of a tile at least.
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
        for (at, (k, _)) in self.reductions(level).enumerate() {
            let (acc, sums) = (self.reduce_call(k).acc, sums.wrapping_add(at * stride));
            let (from, to) = if out { (acc, sums) } else { (sums, acc) };
            // SAFETY: the accumulators hold a tile; the caller's promise for the other side.
            unsafe { std::ptr::copy_nonoverlapping(from, to, lanes) };
        }
    }

    /// Combines the results that [`Machine::exchange`] copied out to `from` with those in `into`.
    ///
    /// # Safety
    /// As for [`Machine::exchange`]; the two do not overlap.
    pub unsafe fn merge(
        &self,
        level: usize,
        tile: &Tile,
        into: *mut u32,
        from: *mut u32,
        stride: usize,
    ) {
        let mut at = 0;
        for (k, code) in self.reductions(level) {
            // SAFETY: the caller's promise.
            unsafe {
                let call = ReduceCall {
                    acc: from.add(at),
                    out: into.add(at),
                    cols: self.result_lanes(tile),
                    stride,
                    ..self.reduce_call(k)
                };
                (code.merge)(&call);
            }
            at += code.words * stride;
        }
    }
}
