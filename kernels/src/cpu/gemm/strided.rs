//! A batch of products of strided matrices, as [`drive`](super::drive) computes it.

use std::ops::Range;

use super::drive::{KBlocks, MicroPanel, Product, panel_rows};
use super::matrix::Matrix;
use super::micro::{Ahead, Left, LeftLayout, Micro, Right};
use super::pack::{self, Source};
use super::quantized::Weights;
use crate::cpu::tile::{Bound, Requests};
use crate::size::Env;
use crate::spec::{MAX_AXES, Spec};

/// Left panels from which on a right micro-panel is transposed beside the sums: with fewer of them,
/// there is less time for it than the packing of a whole panel takes.
const TRANSPOSING_PANELS: usize = 6;

/// A batch of products of strided matrices.
pub(super) struct Strided<'a> {
    pub spec: &'a Spec,
    pub env: &'a Env,
    pub a: Matrix<'a>,
    pub b: Matrix<'a>,
    /// The right operand, if it is quantized weights.
    pub weights: Option<Weights>,
    /// Whether the product is computed transposed.
    pub transposed: bool,
    /// Products, rows, columns, contracted.
    pub sizes: [usize; 4],
    /// Rows and columns of a block.
    pub mc: usize,
    pub nc: usize,
    pub k_blocks: KBlocks,
    /// The steps of the contracted axis in this slice.
    pub slice: Range<usize>,
    /// Whether the workspace has room for two micro-panels.
    pub two_panels: bool,
    /// Whether the left operand is read where it lies.
    pub left_stays: bool,
    /// Whether the right operand of a block of columns stays packed.
    pub keeps_right: bool,
    pub micro: &'static Micro,
    pub code: Bound<'a>,
}

// SAFETY: operands are only read, and blocks of the result are written by one worker each.
unsafe impl Sync for Strided<'_> {}

impl Strided<'_> {
    /// The coordinates of a group along the batch axes, and zeros after them.
    pub fn origin(&self, group: usize) -> [usize; MAX_AXES] {
        let mut at = [0; MAX_AXES];
        let mut rest = group;
        for axis in (0..self.spec.dims.len() - 2).rev() {
            let size = self.spec.dims[axis].usize_at(self.env);
            (at[axis], rest) = (rest % size, rest / size);
        }
        at
    }
}

impl Strided<'_> {
    /// A micro-panel of a sub-block, from column `first` of a block of columns on, in the buffer of
    /// the right operand of that block.
    fn kept<T>(&self, right: *mut T, first: usize, block: usize) -> *mut T {
        let (depth, columns) = (
            self.depth(block),
            self.nc.next_multiple_of(self.micro.lanes),
        );
        right.wrapping_add(depth.start * columns + first * depth.len())
    }

    /// Packs so many columns of a sub-block.
    ///
    /// # Safety
    /// They lie inside the operand, and `to` has room for their steps, a width of a micro-panel each.
    unsafe fn pack_right(&self, group: usize, columns: Range<usize>, block: usize, to: *mut f32) {
        let (depth, [step, stride]) = (self.depth(block), self.b.strides);
        let width = self.micro.width(columns.len());
        if let Some(weights) = &self.weights {
            // SAFETY: the caller's promise.
            return unsafe { weights.pack(self.micro, columns, depth, (to, width)) };
        }
        let origin = self.origin(group);
        let batch = &origin[..self.spec.dims.len() - 2];
        let from = self.b.at(batch, depth.start, columns.start, self.env);
        // SAFETY: the caller's promise.
        unsafe {
            self.b.pack(
                self.micro,
                (from, [stride, step]),
                (columns.len(), depth.len()),
                (to, width),
            )
        };
    }
}

impl Product for Strided<'_> {
    fn left_layout(&self) -> LeftLayout {
        match self.left_stays {
            true => LeftLayout::Strided,
            false => LeftLayout::Packed,
        }
    }

    fn groups(&self) -> usize {
        self.sizes[0]
    }

    fn left_group(&self, group: usize) -> usize {
        let shared = self.a.operand.strides[..self.spec.dims.len() - 2]
            .iter()
            .all(|s| s.at(self.env) == 0);
        if shared { 0 } else { group }
    }

    fn rows(&self) -> usize {
        self.sizes[1]
    }

    fn column_blocks(&self) -> usize {
        self.sizes[2].div_ceil(self.nc)
    }

    fn columns(&self, column_block: usize) -> Range<usize> {
        column_block * self.nc..((column_block + 1) * self.nc).min(self.sizes[2])
    }

    fn k_blocks(&self) -> usize {
        self.k_blocks.count()
    }

    fn blocks(&self, k_block: usize) -> Range<usize> {
        self.k_blocks.blocks(k_block)
    }

    fn depth(&self, block: usize) -> Range<usize> {
        let (Range { start, end }, steps) = (self.slice.clone(), self.k_blocks.range(block));
        steps.start.clamp(start, end) - start..steps.end.clamp(start, end) - start
    }

    unsafe fn left(
        &self,
        group: usize,
        rows: Range<usize>,
        panel: usize,
        block: usize,
        to: *mut f32,
    ) {
        if self.left_stays {
            return;
        }
        let depth = self.depth(block);
        let [stride, step] = self.a.strides;
        let origin = self.origin(group);
        let batch = &origin[..self.spec.dims.len() - 2];
        // Rows that are neighbours in memory are read a few steps at a time through all panels: the
        // cache lines that two panels share are still in the cache then, even if the distance of
        // steps maps all of them to few sets.
        let chunk = match stride {
            1 => pack::STEPS,
            _ => depth.len().max(1),
        };
        for step_at in depth.clone().step_by(chunk) {
            let steps = chunk.min(depth.end - step_at);
            for row in rows.clone().step_by(panel) {
                let at = self.a.at(batch, row, step_at, self.env);
                let count = panel.min(rows.end - row);
                let ahead = (row - rows.start) * depth.len() + (step_at - depth.start) * count;
                // SAFETY: the rows and steps lie inside the operand, and panels fill the buffer
                // one after another.
                unsafe {
                    self.a.pack(
                        self.micro,
                        (at, [stride, step]),
                        (count, steps),
                        (to.add(ahead), count),
                    )
                };
            }
        }
    }

    unsafe fn panel(
        &self,
        _group: usize,
        rows: &Range<usize>,
        row: usize,
        block: usize,
        left: *const f32,
    ) -> Left {
        let depth = self.depth(block);
        if self.left_stays {
            // There is one group only.
            let stride = self.a.strides[0];
            let base: *const f32 = self
                .a
                .at(&[], rows.start + row, depth.start, self.env)
                .cast();
            let panel = panel_rows(rows.len(), self.micro.mr) as isize;
            return Left::strided(base, stride, base.wrapping_offset(panel * stride));
        }
        // SAFETY: `row` rows are packed before it.
        Left::packed(unsafe { left.add(row * depth.len()) })
    }

    unsafe fn right(&self, group: usize, column_block: usize, block: usize, to: *mut f32) {
        if !self.keeps_right {
            return;
        }
        let columns = self.columns(column_block);
        for column in columns.clone().step_by(self.micro.nr()) {
            let end = (column + self.micro.nr()).min(columns.end);
            let to = self.kept(to, column - columns.start, block);
            // SAFETY: the workspace has room for whole vectors of all columns of the block.
            unsafe { self.pack_right(group, column..end, block, to) };
        }
    }

    unsafe fn micro_panel(&self, at: MicroPanel, right: *const f32, to: *mut f32) -> Right {
        if self.keeps_right {
            let first = at.columns.start - self.columns(at.column_block).start;
            return Right::packed(self.kept(right.cast_mut(), first, at.block), at.width);
        }
        let [step, stride] = self.b.strides;
        // The operand is read once and in whole vectors, so packing would only be another pass.
        let is_whole = at.panels == 1 && at.columns.len() == at.width;
        if stride == 1 && step >= 0 && is_whole && self.b.is_wide() {
            let origin = self.origin(at.group);
            let batch = &origin[..self.spec.dims.len() - 2];
            let first = self.depth(at.block).start;
            let from = self.b.at(batch, first, at.columns.start, self.env);
            return Right::packed(from.cast(), step as usize);
        }
        // SAFETY: the columns and steps lie inside the operand, and the buffer takes `depth ·
        // width` elements.
        unsafe { self.pack_right(at.group, at.columns, at.block, to) };
        Right::packed(to, at.width)
    }

    fn requests(&self, group: usize, row: usize, column: usize) -> Requests {
        if self.transposed {
            return Requests::default();
        }
        let rank = self.spec.dims.len();
        let mut origin = self.origin(group);
        (origin[rank - 2], origin[rank - 1]) = (row, column);
        self.code.requests(&origin[..rank], rank - 2)
    }

    unsafe fn ahead(&self, at: &MicroPanel, to: *mut f32) -> Ahead {
        let depth = self.depth(at.block);
        let [step, stride] = self.b.strides;
        let whole = at.columns.len() == self.micro.nr();
        let copies = stride == 1 && step >= 0 && at.panels > 1;
        let transposes = step == 1 && stride > 1 && at.panels >= TRANSPOSING_PANELS;
        if self.keeps_right
            || !(self.two_panels && whole && (copies || transposes) && self.b.is_wide())
        {
            return Ahead::NOTHING;
        }
        let origin = self.origin(at.group);
        let batch = &origin[..self.spec.dims.len() - 2];
        Ahead {
            from: (self.b.at(batch, depth.start, at.columns.start, self.env)).cast(),
            stride: step as usize,
            across: stride as usize,
            to,
            steps: depth.len(),
        }
    }

    fn target(
        &self,
        group: usize,
        rows: &Range<usize>,
        column_block: usize,
    ) -> Option<(*mut f32, usize)> {
        if self.transposed || !self.sizes[2].is_multiple_of(self.micro.lanes) {
            return None;
        }
        let rank = self.spec.dims.len();
        let mut origin = self.origin(group);
        let columns = self.columns(column_block);
        (origin[rank - 2], origin[rank - 1]) = (rows.start, columns.start);
        self.code.target(&origin[..rank])
    }

    unsafe fn finish(
        &self,
        group: usize,
        rows: Range<usize>,
        column_block: usize,
        acc: *mut f32,
        stride: usize,
        scratch: *mut u8,
    ) {
        let (rank, columns) = (self.spec.dims.len(), self.columns(column_block));
        let (rows, columns, acc, stride) = match self.transposed {
            // The one row is a column.
            true if rows.len() == 1 => (columns, rows, acc, 1),
            true => {
                let width = rows.len().next_multiple_of(self.micro.lanes).min(self.mc);
                let from = Source {
                    at: acc,
                    stride: stride as isize,
                    step: 1,
                };
                // SAFETY: the workspace has room for as many sums after the scratch memory of the
                // code.
                let to = unsafe {
                    let to = scratch.add(self.code.scratch_bytes()).cast();
                    (self.micro.pack)(from, rows.len(), columns.len(), to, width);
                    to
                };
                (columns, rows, to, width)
            }
            false => (rows, columns, acc, stride),
        };
        let mut origin = self.origin(group);
        (origin[rank - 2], origin[rank - 1]) = (rows.start, columns.start);
        // SAFETY: the block is this worker's, and so is the scratch memory.
        unsafe {
            self.code.block(
                &origin[..rank],
                rank - 2,
                rows.len(),
                columns.len(),
                acc.cast(),
                stride,
                scratch,
            )
        };
    }
}
