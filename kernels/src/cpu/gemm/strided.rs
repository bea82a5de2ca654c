//! A batch of products of strided matrices, as [`drive`](super::drive) computes it.

use std::ops::Range;

use super::drive::{KBlocks, MicroPanel, Product, Resources, Slot, panel_rows};
use super::matrix::Matrix;
use super::micro::{Ahead, Left, LeftLayout, Micro, ROWS, Right};
use super::pack::{self, Source};
use crate::cpu::tile::{Bound, Requests};
use crate::size::Env;
use crate::spec::{MAX_AXES, Spec};

/// Left panels from which on a right micro-panel is transposed beside the sums: with fewer of them,
/// there is less time for it than the packing of a whole panel takes.
const TRANSPOSING_PANELS: usize = 6;
/// Elements that one thread packs sooner than two.
const SERIAL_ELEMENTS: usize = 8 << 10;

/// A batch of products of strided matrices.
pub(super) struct Strided<'a> {
    pub spec: &'a Spec,
    pub env: &'a Env,
    pub a: Matrix<'a>,
    pub b: Matrix<'a>,
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
    /// Offsets of the rows of a left panel that is read where it lies.
    pub left_rows: Option<[i32; ROWS]>,
    /// The right operand as [`Strided::pack_right`] packs it, if workers share it.
    pub shared: Option<*mut f32>,
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
    /// The columns from `column` on of the right operand that workers share, for steps from `step`
    /// on: whole micro-panels, one after another, of all steps.
    fn shared(&self, to: *mut f32, column: usize, step: usize) -> *mut f32 {
        to.wrapping_add(column * self.sizes[3] + step * self.micro.width(self.sizes[2] - column))
    }

    /// Packs the right operand of the one group for all workers.
    ///
    /// # Safety
    /// The operand may be read, and there is room for whole vectors of its columns in `shared`.
    pub unsafe fn pack_right(&self, resources: &Resources) {
        let (Some(to), [_, _, columns, depth]) = (self.shared.map(Shared), self.sizes) else {
            return;
        };
        let nr = self.micro.nr();
        let blocks = self.k_blocks.count();
        let panel = |number: usize, _: &Slot, _: &mut usize| {
            let (column, k_block) = (number / blocks * nr, number % blocks);
            let steps = self.depth(self.blocks(k_block).start);
            let count = nr.min(columns - column);
            let [step, stride] = self.b.strides;
            let from = self.b.at(&[], steps.start, column, self.env);
            let to = self.shared(to.get(), column, steps.start);
            // SAFETY: the columns and steps lie inside the operand, and each micro-panel has room
            // of its own.
            unsafe {
                self.b.pack(
                    self.micro,
                    (from, [stride, step]),
                    (count, steps.len()),
                    (to, self.micro.width(count)),
                );
            }
        };
        let panels = columns.div_ceil(nr) * blocks;
        let serial = columns * depth < SERIAL_ELEMENTS;
        // SAFETY: panels do not overlap.
        unsafe { resources.tasks(panels, serial, panel) };
    }
}

/// The address of panels that threads write one by one.
struct Shared(*mut f32);

// SAFETY: see `Strided::pack_right`.
unsafe impl Sync for Shared {}

impl Shared {
    fn get(&self) -> *mut f32 {
        self.0
    }
}

impl Product for Strided<'_> {
    fn left_layout(&self) -> LeftLayout {
        match self.left_rows {
            Some(_) => LeftLayout::Rows,
            None => LeftLayout::Packed,
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
        if self.left_rows.is_some() {
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
        if let Some(offsets) = &self.left_rows {
            // There is one group only.
            let base = self
                .a
                .at(&[], rows.start + row, depth.start, self.env)
                .cast();
            let panel = panel_rows(rows.len(), self.micro.mr) as isize;
            return Left {
                base,
                rows: offsets.as_ptr(),
                steps: std::ptr::null(),
                next: base.wrapping_offset(panel * self.a.strides[0]),
            };
        }
        // SAFETY: `row` rows are packed before it.
        Left::packed(unsafe { left.add(row * depth.len()) })
    }

    unsafe fn right(&self, _group: usize, _column_block: usize, _block: usize, _to: *mut f32) {}

    unsafe fn micro_panel(&self, at: MicroPanel, _right: *const f32, to: *mut f32) -> Right {
        let depth = self.depth(at.block);
        if let Some(shared) = self.shared {
            let panel = self.shared(shared, at.columns.start, depth.start);
            return Right::packed(panel, at.width);
        }
        let [step, stride] = self.b.strides;
        let origin = self.origin(at.group);
        let from = self.b.at(
            &origin[..self.spec.dims.len() - 2],
            depth.start,
            at.columns.start,
            self.env,
        );
        // The operand is read once and in whole vectors, so packing would only be another pass.
        let is_whole = at.panels == 1 && at.columns.len() == at.width;
        if stride == 1 && step >= 0 && is_whole && self.b.is_wide() {
            return Right::packed(from.cast(), step as usize);
        }
        // SAFETY: the columns and steps lie inside the operand, and the buffer takes `depth ·
        // width` elements.
        unsafe {
            self.b.pack(
                self.micro,
                (from, [stride, step]),
                (at.columns.len(), depth.len()),
                (to, at.width),
            )
        };
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
        if self.shared.is_some()
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
                // SAFETY: the workspace has room for as many sums behind the scratch memory of the
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
