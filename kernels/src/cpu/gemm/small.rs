//! Products of few rows: the left operand is read in place, and the right one in place or some
//! steps at a time from the worker's stack, so that the workspace holds little more than sums.
//!
//! Packing pays where a panel is used several times. In a product of few rows each element of the
//! right operand is used once, and packing the left one takes as long as multiplying it with a few
//! columns. The sums are those of [`super::drive`]: the same k-blocks, over each of which an
//! element is one sequence of multiply-adds, so that no bit depends on which of both runs.

use super::drive::{Product, SERIAL_WORK};
use super::matrix::Matrix;
use super::micro::{Before, Left, LeftLayout, Micro, Right};
use super::pack::Source;
use super::share::SPLIT_K_BLOCKS;
use super::workspace::{Resources, Slot, Space};
use super::{KC, Strided, even, wanted};

/// Most rows of a product that is computed here, and of a block of it.
pub(in super::super) const ROWS_MAX: usize = 40;
/// Most rows of a matrix product that is computed here.
const MATRIX_ROWS_MAX: usize = 16;
/// Most k-blocks: a longer contracted axis may be split.
const K_BLOCKS_MAX: usize = 2 * SPLIT_K_BLOCKS - 1;
/// Most steps of a contracted axis that is packed at once in every product.
const PACKED_STEPS_MAX: usize = 128;
/// Columns of the widest micro-panel of any instruction set.
const PANEL_COLUMNS_MAX: usize = 32;
/// Elements of the right operand that are packed at a time.
const PANEL_ELEMENTS: usize = PACKED_STEPS_MAX * PANEL_COLUMNS_MAX;
/// Most elements of a block of the result, if it has more than one micro-panel.
const ACC_ELEMENTS_MAX: usize = 2 << 10;
/// Elements between neighbours along an axis, of which [`KC`] have offsets in `i32`, are fewer.
const STRIDE_END: i64 = 1 << 21;

/// A stride that offsets are computed from.
pub(in super::super) fn fits(stride: i64) -> bool {
    (0..STRIDE_END).contains(&stride)
}

/// The right operand of a [`Block`], from an element (0, 0) on.
pub(in super::super) trait Columns {
    /// The steps of a micro-panel where they lie, if these are whole vectors of f32.
    fn in_place(&self, column: usize, step: usize) -> Option<Right>;

    /// Packs so many columns and steps from a column and a step on.
    ///
    /// # Safety
    /// They lie inside the operand, and `steps · width` elements of `to` may be written.
    unsafe fn pack(
        &self,
        micro: &Micro,
        from: [usize; 2],
        counts: (usize, usize),
        to: (*mut f32, usize),
    );
}

impl Source {
    fn from(self, column: usize, step: usize) -> Source {
        let offset = column as isize * self.stride + step as isize * self.step;
        Source {
            at: self.at.wrapping_offset(offset),
            ..self
        }
    }
}

/// Element (k, j) is as in [`Source`].
impl Columns for Source {
    fn in_place(&self, column: usize, step: usize) -> Option<Right> {
        let from = Source::from(*self, column, step);
        (self.stride == 1).then(|| Right::packed(from.at, from.step as usize))
    }

    unsafe fn pack(
        &self,
        micro: &Micro,
        [column, step]: [usize; 2],
        (columns, steps): (usize, usize),
        (to, width): (*mut f32, usize),
    ) {
        let from = Source::from(*self, column, step);
        // SAFETY: the caller's promise.
        unsafe { (micro.pack)(from, columns, steps, to, width) };
    }
}

/// The right matrix of a product, from an address on.
struct Part<'a>(&'a Matrix<'a>, *const u8);

impl Part<'_> {
    fn from(&self, column: usize, step: usize) -> *const u8 {
        let [along, across] = self.0.strides;
        let offset = column as isize * across + step as isize * along;
        let bytes = self.0.operand.dtype.bytes() as isize;
        self.1.wrapping_offset(offset * bytes)
    }
}

impl Columns for Part<'_> {
    fn in_place(&self, column: usize, step: usize) -> Option<Right> {
        let [along, across] = self.0.strides;
        let from = self.from(column, step);
        (across == 1 && self.0.is_wide()).then(|| Right::packed(from.cast(), along as usize))
    }

    unsafe fn pack(
        &self,
        micro: &Micro,
        [column, step]: [usize; 2],
        counts: (usize, usize),
        to: (*mut f32, usize),
    ) {
        let [along, across] = self.0.strides;
        // SAFETY: the caller's promise.
        unsafe {
            self.0.pack(
                micro,
                (self.from(column, step), [across, along]),
                counts,
                to,
            )
        };
    }
}

/// A block of the result in progress.
pub(in super::super) struct Block<'a> {
    pub micro: &'static Micro,
    /// Offsets of the rows of the left operand.
    pub rows: &'a [i32],
    pub columns: usize,
    /// Elements between two rows of the sums, a multiple of the vector's lanes.
    pub stride: usize,
}

impl Block<'_> {
    /// `acc[i·stride + j] = Σₖ left(i, k) · right(k, j)` for k below `depth`, after the previous
    /// values if `begun`. `left(first, steps)` writes offsets of the steps of the contracted axis
    /// from `first` on and returns an address: element (i, first + s) of the left operand is
    /// `rows[i] + steps[s]` after it.
    ///
    /// # Safety
    /// The operands may be read at these places, and `acc` has room for the rows.
    pub unsafe fn add(
        &self,
        mut left: impl FnMut(usize, &mut [i32]) -> *const f32,
        right: &impl Columns,
        depth: usize,
        acc: *mut f32,
        begun: bool,
    ) {
        let mut panel = [const { std::mem::MaybeUninit::<f32>::uninit() }; PANEL_ELEMENTS];
        let (to, height) = (panel.as_mut_ptr().cast::<f32>(), self.micro.mr);
        let mut offsets = [0; KC];
        for first in (0..depth).step_by(KC) {
            let count = KC.min(depth - first);
            let base = left(first, &mut offsets[..count]);
            let mut column = 0;
            while column < self.columns {
                let width = self.micro.width(self.columns - column);
                let columns = width.min(self.columns - column);
                let whole = columns == width && self.rows.len() <= height;
                let in_place = |step| right.in_place(column, step).filter(|_| whole);
                let most = match in_place(first) {
                    Some(_) => count,
                    None => PANEL_ELEMENTS / width,
                };
                for step in (0..count).step_by(most) {
                    let steps = most.min(count - step);
                    let before = match begun || first + step > 0 {
                        true => Before::Sums,
                        false => Before::Nothing,
                    };
                    let from = [column, first + step];
                    // SAFETY: the columns and steps lie inside the operands, the panel has room for
                    // them, and the sums for whole vectors.
                    unsafe {
                        let right = match in_place(first + step) {
                            Some(right) => right,
                            None => {
                                right.pack(self.micro, from, (columns, steps), (to, width));
                                Right::packed(to, width)
                            }
                        };
                        for row in (0..self.rows.len()).step_by(height) {
                            let rows = height.min(self.rows.len() - row);
                            let left = Left::indirect(
                                base,
                                self.rows.as_ptr().add(row),
                                offsets.as_ptr().add(step),
                            );
                            self.micro.kernel(LeftLayout::Indirect, rows, &right, width)(
                                steps,
                                left,
                                right,
                                acc.add(row * self.stride + column),
                                self.stride,
                                before,
                            );
                        }
                    }
                }
                column += columns;
            }
        }
        if depth == 0 && !begun {
            // SAFETY: the sums are the caller's.
            unsafe { acc.write_bytes(0, self.rows.len() * self.stride) };
        }
    }

    /// Adds the sums of a k-block to those of the k-blocks before.
    ///
    /// # Safety
    /// Both have room for the rows.
    pub unsafe fn join(&self, total: *mut f32, k_block: *const f32) {
        for row in 0..self.rows.len() {
            for at in (0..self.columns).map(|column| row * self.stride + column) {
                // SAFETY: the caller's promise.
                unsafe { *total.add(at) += *k_block.add(at) };
            }
        }
    }
}

/// Whether a product of up to `[m, n, k]` with these strides of both operands along their last two
/// axes can be computed here.
pub(super) fn applies([m, _, k]: [usize; 3], strides: [i64; 4]) -> bool {
    m <= MATRIX_ROWS_MAX && k.div_ceil(KC) <= K_BLOCKS_MAX && strides.into_iter().all(fits)
}

/// Whether that takes no longer than with packed operands: for one row, and for few columns; with
/// wide vectors, whose packed micro-panels are larger than the result, also for one left panel and
/// few steps, unless the right operand needs no packing.
pub(super) fn is_fast([m, n, k]: [usize; 3], packs: bool, micro: &Micro) -> bool {
    let is_wide = micro.nr() == PANEL_COLUMNS_MAX;
    m == 1 || n <= micro.nr() || (is_wide && packs && m <= micro.mr && k <= PACKED_STEPS_MAX)
}

/// The buffers for sizes up to these.
pub(super) fn space([m, n, k]: [usize; 3], micro: &Micro) -> Space {
    let acc = m
        .saturating_mul(n.next_multiple_of(micro.lanes))
        .min(ACC_ELEMENTS_MAX.max(m * micro.nr()));
    Space {
        acc,
        k_block: if k > KC { acc } else { 0 },
        ..Space::default()
    }
}

/// NC: no more than the space has room for, and little enough that every thread has a block.
pub(super) fn columns([groups, m, n, k]: [usize; 4], threads: usize, micro: &Micro) -> usize {
    let width = micro.nr();
    let columns = even(
        n,
        (ACC_ELEMENTS_MAX / m.max(1) / width * width).max(width),
        width,
    )
    .min(n.next_multiple_of(micro.lanes));
    let work = groups.saturating_mul(m).saturating_mul(n).saturating_mul(k);
    if threads > 1 && work >= SERIAL_WORK && groups * n.div_ceil(columns) < wanted(threads) {
        let parts = wanted(threads).div_ceil(groups.max(1));
        columns.min(even(n, n.div_ceil(parts), width))
    } else {
        columns
    }
}

/// Computes a product of few rows.
///
/// # Safety
/// The workspace has the bytes of [`space`]; the product's operands may be read and its results
/// written.
pub(super) unsafe fn run(product: &Strided, resources: &Resources) {
    let [groups, m, n, k] = product.sizes;
    if groups == 0 || m == 0 || n == 0 {
        return;
    }
    let column_blocks = n.div_ceil(product.nc);
    let work = groups.saturating_mul(m).saturating_mul(n).saturating_mul(k);
    let (rank, micro) = (product.spec.dims.len(), product.micro);
    let mut rows = [0; MATRIX_ROWS_MAX];
    for (i, row) in rows[..m].iter_mut().enumerate() {
        *row = (i as isize * product.a.strides[0]) as i32;
    }
    let step = product.a.strides[1];
    let task = |number: usize, slot: &Slot, _: &mut usize| {
        let (group, column_block) = (number / column_blocks, number % column_blocks);
        let origin = product.origin(group);
        let (batch, columns) = (&origin[..rank - 2], product.columns(column_block));
        let block = Block {
            micro,
            rows: &rows[..m],
            columns: columns.len(),
            stride: product.nc.next_multiple_of(micro.lanes),
        };
        // SAFETY: this block of the result is the task's own; operands are valid by the contract of
        // `run`, and the space has room for `m` rows of `nc` columns.
        unsafe {
            for k_block in 0..product.k_blocks.count().max(1) {
                let depth = product.k_blocks.range(k_block);
                let sums = if k_block == 0 { slot.acc } else { slot.k_block };
                let at = product.b.at(batch, depth.start, columns.start, product.env);
                let right = Part(&product.b, at);
                block.add(
                    |first, steps| {
                        for (i, offset) in steps.iter_mut().enumerate() {
                            *offset = (i as isize * step) as i32;
                        }
                        let from = depth.start + first;
                        product.a.at(batch, 0, from, product.env).cast()
                    },
                    &right,
                    depth.len(),
                    sums,
                    false,
                );
                if k_block > 0 {
                    block.join(slot.acc, sums);
                }
            }
            product.finish(
                group,
                0..m,
                column_block,
                slot.acc,
                block.stride,
                slot.scratch,
            );
        }
    };
    // SAFETY: the caller's promise.
    unsafe { resources.tasks(groups * column_blocks, work < SERIAL_WORK, task) };
}
