//! The loops around the micro-kernels, shared by matrix products and convolutions.
//!
//! The result is cut into blocks of MC rows × NC columns. A task computes one such block over the
//! whole contracted axis in the worker's part of the workspace and passes it to the product's
//! epilogue, so that the result is written once, by arbitrary code; without an epilogue, it is
//! summed where it is stored. The left operand of a block of rows is kept packed as long as a
//! worker stays with these rows; the right operand is packed one micro-panel at a time, just before
//! it is multiplied with all left panels or, if it is only to be copied or transposed, by the
//! micro-kernels that multiply the one before. Where the left operand is read in place and the
//! right one has to be transposed, a worker stays with a block of columns instead, whose right
//! operand it packs once. The contracted axis is cut into *k-blocks* of at most KC steps, over
//! which an element is summed from 0 before it is added to the sum of those before, and for small
//! results of long sums into splits of several k-blocks. Both depend on the shape alone, so that
//! every element is summed in the same order for any number of threads. If memory is short, a
//! k-block is computed in several *sub-blocks*; each continues the sums of the one before, which
//! changes no bit.

use std::ops::Range;

pub(in super::super) use super::k_blocks::KBlocks;
use super::micro::{Ahead, Before, Left, LeftLayout, Micro, Right};
use super::workspace::{Resources, Slot};
use crate::cpu::tile::Requests;

/// Multiply-adds that are not worth a second thread: about two microseconds.
pub(in super::super) const SERIAL_WORK: usize = 1 << 16;

/// The operands and results of one kind of product.
///
/// # Safety of the methods
/// Buffers are as large as [`Space`](super::workspace::Space) says; ranges lie inside the product;
/// the buffers are not used otherwise meanwhile.
pub(in super::super) trait Product: Sync {
    /// How the elements of left panels are found.
    fn left_layout(&self) -> LeftLayout;
    /// Independent products.
    fn groups(&self) -> usize;
    /// Groups with equal numbers have the same left operand.
    fn left_group(&self, group: usize) -> usize;
    /// Rows of the result.
    fn rows(&self) -> usize;
    /// Blocks of columns that the result is cut into.
    fn column_blocks(&self) -> usize;
    /// The columns of a block.
    fn columns(&self, column_block: usize) -> Range<usize>;
    /// k-blocks of the contracted axis.
    fn k_blocks(&self) -> usize;
    /// The sub-blocks of a k-block.
    fn blocks(&self, k_block: usize) -> Range<usize> {
        k_block..k_block + 1
    }
    /// The steps of the contracted axis in a sub-block; in a slice, the steps that belong to it,
    /// counted from its start.
    fn depth(&self, block: usize) -> Range<usize>;
    /// Prepares `rows` of the left operand for a sub-block of the contracted axis, in panels of
    /// `panel` rows.
    unsafe fn left(
        &self,
        group: usize,
        rows: Range<usize>,
        panel: usize,
        block: usize,
        to: *mut f32,
    );
    /// The distance between the rows of a left panel in a block of the result. If it is not 1, it
    /// divides the rows of every block, and blocks are prepared in the order of the panels.
    fn pitch(&self) -> usize {
        1
    }
    /// The steps of a sub-block over which panels are summed that start at row `first` below the
    /// pitch: both operands from the first of them on, and their number, given those of all steps.
    unsafe fn steps(
        &self,
        _first: usize,
        _block: usize,
        operands: (Left, Right, usize),
    ) -> (Left, Right, usize) {
        operands
    }
    /// The panel that starts `row` rows into those that [`Product::left`] prepared for `rows`.
    unsafe fn panel(
        &self,
        group: usize,
        rows: &Range<usize>,
        row: usize,
        block: usize,
        left: *const f32,
    ) -> Left;
    /// Prepares the data that the micro-panels of a block of columns share. With
    /// [`Blocking::by_columns`], those of all sub-blocks stay in the same buffer.
    unsafe fn right(&self, group: usize, column_block: usize, block: usize, to: *mut f32);
    /// The columns from `column` on that need the same steps of a sub-block.
    unsafe fn span(
        &self,
        column_block: usize,
        _column: usize,
        block: usize,
        _right: *const f32,
    ) -> Span {
        let end = self.columns(column_block).end;
        Span {
            end,
            next: end,
            steps: 0..self.depth(block).len(),
        }
    }
    /// One micro-panel, `width` wide with zeros after `columns`, packed into `to` or used in place.
    unsafe fn micro_panel(&self, at: MicroPanel, right: *const f32, to: *mut f32) -> Right;
    /// The memory that [`Product::finish`] reads and writes for the points from a row and a column
    /// on.
    fn requests(&self, _group: usize, _row: usize, _column: usize) -> Requests {
        Requests::default()
    }
    /// The steps of a micro-panel that may be copied to `to` while the one before is multiplied.
    unsafe fn ahead(&self, _at: &MicroPanel, _to: *mut f32) -> Ahead {
        Ahead::NOTHING
    }
    /// The address of the results of a block and the elements from row to row, where they are the
    /// sums and may be summed in place, by whole vectors. Such blocks are not finished.
    fn target(
        &self,
        _group: usize,
        _rows: &Range<usize>,
        _column_block: usize,
    ) -> Option<(*mut f32, usize)> {
        None
    }
    /// Consumes a finished block.
    unsafe fn finish(
        &self,
        group: usize,
        rows: Range<usize>,
        column_block: usize,
        acc: *mut f32,
        stride: usize,
        scratch: *mut u8,
    );
}

/// The request for a micro-panel of the right operand.
pub(in super::super) struct MicroPanel {
    pub group: usize,
    pub block: usize,
    pub columns: Range<usize>,
    /// Its steps of the sub-block.
    pub steps: Range<usize>,
    /// The block of columns they are part of.
    pub column_block: usize,
    pub width: usize,
    /// The number of left panels that it is multiplied with.
    pub panels: usize,
}

/// Columns that need the same steps of a sub-block.
pub(in super::super) struct Span {
    pub end: usize,
    /// The start of the next ones: columns between them are padding.
    pub next: usize,
    pub steps: Range<usize>,
}

/// The partition of the result into blocks.
#[derive(Clone, Copy, Debug)]
pub(in super::super) struct Blocking {
    /// Rows of a block.
    pub mc: usize,
    /// Columns of the widest block.
    pub nc: usize,
    /// Whether the left operand is kept packed for the whole contracted axis.
    pub resident: bool,
    /// Whether blocks of the same columns follow one another, so that their right operand is
    /// prepared once; the left one needs no preparation then.
    pub by_columns: bool,
    /// Parts of the contracted axis that are summed separately.
    pub splits: usize,
}

impl Blocking {
    /// With blocks of at most `acc` elements, if that leaves a vector of columns.
    pub fn within(self, acc: usize, micro: &Micro) -> Self {
        let width = micro.nr();
        let nc = self.nc.min((acc / self.mc / width * width).max(width));
        Blocking { nc, ..self }
    }
}

/// A slice of the contracted axis, which continues the partial sums of the slices before.
pub(in super::super) struct Carry {
    /// The k-blocks that it intersects.
    pub k_blocks: Range<usize>,
    /// Whether an earlier slice has started the first of them.
    pub begun: bool,
    /// Whether a later slice continues the last of them.
    pub open: bool,
    /// The sums, [`sums`] elements.
    pub sums: *mut f32,
    /// Whether this is the last slice, which finishes the results.
    pub last: bool,
}

// SAFETY: workers use disjoint parts of the sums, those of the block of the result and the split
// that each computes.
unsafe impl Sync for Carry {}

/// Elements of the partial sums of a product of `groups` times `rows` by `columns` between slices;
/// `parts`: its splits, and as many again if slices may end inside a k-block that is not the first.
pub(in super::super) fn sums(
    groups: usize,
    rows: usize,
    columns: usize,
    parts: usize,
    micro: &Micro,
) -> usize {
    groups
        .saturating_mul(parts)
        .saturating_mul(rows)
        .saturating_mul(columns.next_multiple_of(micro.lanes))
}

/// Computes a product.
///
/// # Safety
/// The workspace has the bytes of its [`Space`](super::workspace::Space), which suffices for
/// `product` under `blocking`; the product's operands may be read and its results written.
pub(in super::super) unsafe fn drive<P: Product>(
    product: &P,
    micro: &Micro,
    blocking: &Blocking,
    resources: &Resources,
) {
    // SAFETY: the caller's promise.
    unsafe { drive_some(product, micro, blocking, resources, None) }
}

/// Computes a product, or a slice of the contracted axis of it.
///
/// # Safety
/// As for [`drive`]; the sums are the caller's.
pub(in super::super) unsafe fn drive_some<P: Product>(
    product: &P,
    micro: &Micro,
    blocking: &Blocking,
    resources: &Resources,
    carry: Option<Carry>,
) {
    let (groups, rows, column_blocks) = (product.groups(), product.rows(), product.column_blocks());
    if groups == 0 || rows == 0 || column_blocks == 0 {
        return;
    }
    let row_blocks = rows.div_ceil(blocking.mc);
    let job = Job {
        product,
        micro,
        blocking,
        resources,
        row_blocks,
        column_blocks,
        carry,
    };
    let depth = product
        .k_blocks()
        .checked_sub(1)
        .map_or(0, |last| product.depth(product.blocks(last).end - 1).end);
    let work = groups
        .saturating_mul(rows)
        .saturating_mul(product.columns(column_blocks - 1).end)
        .saturating_mul(depth);
    let blocks = groups * row_blocks * column_blocks;
    // SAFETY: tasks write blocks of the result, or sums of splits, that are theirs alone.
    unsafe {
        resources.tasks(
            blocks * blocking.splits,
            work < SERIAL_WORK,
            |task, slot, resident| {
                job.block(
                    task / blocking.splits,
                    task % blocking.splits,
                    slot,
                    resident,
                );
            },
        );
        if job
            .carry
            .as_ref()
            .map_or(blocking.splits > 1, |carry| carry.last)
        {
            resources.tasks(blocks, false, |number, slot, _| job.combine(number, slot));
        }
    }
}

/// A product in progress.
struct Job<'a, P> {
    product: &'a P,
    micro: &'a Micro,
    blocking: &'a Blocking,
    resources: &'a Resources<'a>,
    row_blocks: usize,
    column_blocks: usize,
    carry: Option<Carry>,
}

impl<P: Product> Job<'_, P> {
    /// A block of the result, by number.
    fn cut(&self, number: usize) -> Cut {
        let (row_blocks, column_blocks) = (self.row_blocks, self.column_blocks);
        let (group, rest) = (
            number / (row_blocks * column_blocks),
            number % (row_blocks * column_blocks),
        );
        let (row_block, column_block) = match self.blocking.by_columns {
            true => (rest % row_blocks, rest / row_blocks),
            false => (rest / column_blocks, rest % column_blocks),
        };
        let first = row_block * self.blocking.mc;
        let rows = first..(first + self.blocking.mc).min(self.product.rows());
        Cut {
            group,
            row_block,
            rows,
            column_block,
            columns: self.product.columns(column_block),
        }
    }

    /// Elements between two rows of a block's sums.
    fn stride(&self) -> usize {
        self.blocking.nc.next_multiple_of(self.micro.lanes)
    }

    /// The sums of a split of a block, and the elements between two rows of them.
    fn part(&self, cut: &Cut, split: usize) -> (*mut f32, usize) {
        let (splits, stride) = (self.blocking.splits, self.stride());
        if let Some(carry) = &self.carry {
            return self.kept(carry, cut, cut.group * splits + split);
        }
        let number =
            (cut.group * self.row_blocks + cut.row_block) * self.column_blocks + cut.column_block;
        // SAFETY: the workspace has room for every split of every block.
        (
            unsafe {
                self.resources
                    .shared()
                    .add((number * splits + split) * self.blocking.mc * stride)
            },
            stride,
        )
    }

    /// The sums of a block over a k-block until they are added to the others; they are among those
    /// that pass between slices if the k-block spans several slices.
    fn k_block_sums(
        &self,
        cut: &Cut,
        split: usize,
        slot: &Slot,
        through: bool,
    ) -> (*mut f32, usize) {
        let splits = self.blocking.splits;
        match self.carry.as_ref().filter(|_| through) {
            // Each split has its own: a slice may go on with an open k-block of one split while
            // another worker opens one of the next split.
            Some(carry) => self.kept(
                carry,
                cut,
                (self.product.groups() + cut.group) * splits + split,
            ),
            None => (slot.k_block, self.stride()),
        }
    }

    /// The address of a block in the part `part` of the sums between slices.
    fn kept(&self, carry: &Carry, cut: &Cut, part: usize) -> (*mut f32, usize) {
        let (rows, columns) = (
            self.product.rows(),
            self.product
                .columns(self.column_blocks - 1)
                .end
                .next_multiple_of(self.micro.lanes),
        );
        // SAFETY: the sums have room for every part of every element.
        (
            unsafe {
                carry
                    .sums
                    .add((part * rows + cut.rows.start) * columns + cut.columns.start)
            },
            columns,
        )
    }

    /// Computes a block of the result over one split of the contracted axis.
    unsafe fn block(&self, number: usize, split: usize, slot: &Slot, resident: &mut usize) {
        let Job {
            product, blocking, ..
        } = self;
        let cut = self.cut(number);
        let apart = blocking.splits > 1 || self.carry.is_some();
        let target = match apart {
            true => None,
            false => product.target(cut.group, &cut.rows, cut.column_block),
        };
        let total = match target {
            Some(target) => target,
            None if apart => self.part(&cut, split),
            None => (slot.acc, self.stride()),
        };
        let key = match blocking.by_columns {
            true => cut.group * self.column_blocks + cut.column_block,
            false => product.left_group(cut.group) * self.row_blocks + cut.row_block,
        };
        let pack = !blocking.resident || *resident != key;
        *resident = key;
        let k_blocks = product.k_blocks();
        let span = k_blocks * split / blocking.splits..k_blocks * (split + 1) / blocking.splits;
        let now = self.carry.as_ref().map_or(span.clone(), |carry| {
            span.start.max(carry.k_blocks.start)..span.end.min(carry.k_blocks.end)
        });
        // SAFETY: buffers have the sizes of `Space`; see `drive`.
        unsafe {
            if span.is_empty() {
                rows(total, &cut).for_each(|row| row.fill(0.0));
            }
            for k_block in now {
                let (first, blocks) = (k_block == span.start, product.blocks(k_block));
                let begun = self
                    .carry
                    .as_ref()
                    .is_some_and(|carry| carry.begun && k_block == carry.k_blocks.start);
                let open = self
                    .carry
                    .as_ref()
                    .is_some_and(|carry| carry.open && k_block + 1 == carry.k_blocks.end);
                let alone = !first && (begun || open || blocks.len() > 1);
                let sums = if alone {
                    self.k_block_sums(&cut, split, slot, begun || open)
                } else {
                    total
                };
                let mut before = match begun {
                    true => Before::Sums,
                    false if first || alone => Before::Nothing,
                    false => Before::Term,
                };
                for block in blocks.filter(|&block| !product.depth(block).is_empty()) {
                    let left = slot.left.wrapping_add(if blocking.resident {
                        cut.rows.len() * product.depth(block).start
                    } else {
                        0
                    });
                    if pack {
                        product.left(
                            cut.group,
                            cut.rows.clone(),
                            panel_rows(cut.rows.len(), self.micro.mr),
                            block,
                            left,
                        );
                    }
                    if pack || !blocking.by_columns {
                        product.right(cut.group, cut.column_block, block, slot.right);
                    }
                    self.sweep(&cut, block, left, slot, sums, before);
                    before = Before::Sums;
                }
                if alone && !open {
                    rows(total, &cut)
                        .zip(rows(sums, &cut))
                        .for_each(|(total, sums)| add(total, sums));
                }
            }
            if !apart && target.is_none() {
                product.finish(
                    cut.group,
                    cut.rows,
                    cut.column_block,
                    total.0,
                    total.1,
                    slot.scratch,
                );
            }
        }
    }

    /// Whether a block of the result is finished right after this sub-block.
    fn finishes(&self, block: usize) -> bool {
        let last = self.product.k_blocks().checked_sub(1);
        let apart = self.blocking.splits > 1 || self.carry.is_some();
        !apart && last.is_some_and(|last| block + 1 == self.product.blocks(last).end)
    }

    /// Adds one sub-block of the contracted axis to the sums of a block of the result.
    unsafe fn sweep(
        &self,
        cut: &Cut,
        block: usize,
        left: *const f32,
        slot: &Slot,
        (acc, stride): (*mut f32, usize),
        before: Before,
    ) {
        let Job { product, micro, .. } = self;
        let pitch = product.pitch();
        let rows = cut.rows.len() / pitch;
        let panel = panel_rows(rows, micro.mr);
        let panels = pitch * rows.div_ceil(panel);
        let requests = match self.finishes(block) && pitch == 1 {
            true => product.requests(cut.group, cut.rows.start, cut.columns.start),
            false => Requests::default(),
        };
        let mut from = cut.columns.start;
        // Buffers of this micro-panel and of the next one, if that is copied meanwhile.
        let mut buffers = [slot.micro_panel; 2];
        let mut copied = false;
        while from < cut.columns.end {
            // SAFETY: as for `block`; a micro-panel is at most `depth · width` elements, and blocks
            // have room for whole vectors.
            unsafe {
                let Span { end, next, steps } =
                    product.span(cut.column_block, from, block, slot.right);
                let width = micro.width(end - from);
                let to = (from + width).min(end);
                let (first, depth) = (steps.start, steps.len());
                let at = |columns: Range<usize>| MicroPanel {
                    group: cut.group,
                    block,
                    width: micro.width(columns.len()),
                    columns,
                    steps: steps.clone(),
                    column_block: cut.column_block,
                    panels,
                };
                let mut right = if copied {
                    Right::packed(buffers[0], width)
                } else {
                    product.micro_panel(at(from..to), slot.right, buffers[0])
                };
                let mut ahead = Ahead::NOTHING;
                if to < end && width == micro.nr() {
                    let after = slot.micro_panel.add(if buffers[0] == slot.micro_panel {
                        depth * width
                    } else {
                        0
                    });
                    ahead = product.ahead(&at(to..(to + width).min(end)), after);
                    buffers[1] = after;
                }
                copied = ahead.steps > 0;
                let share = ahead.share(panels);
                for at in 0..panels {
                    let (start, row) = (at * pitch / panels, at % (panels / pitch) * panel);
                    let height = panel.min(rows - row);
                    requests.send(
                        row..row + height,
                        from - cut.columns.start..to - cut.columns.start,
                    );
                    let left = product.panel(cut.group, &cut.rows, start * rows + row, block, left);
                    let acc = acc.add((row * pitch + start) * stride + from - cut.columns.start);
                    let left = left.from(first, height, product.left_layout());
                    right.ahead = ahead.take(share, width);
                    let (left, right, depth) = product.steps(start, block, (left, right, depth));
                    micro.kernel(product.left_layout(), height, &right, width)(
                        depth,
                        left,
                        right,
                        acc,
                        stride * pitch,
                        before,
                    );
                }
                if copied {
                    buffers.swap(0, 1);
                }
                from = if to == end { next } else { to };
            }
        }
    }

    /// Adds the splits of a block in their order and finishes it.
    unsafe fn combine(&self, number: usize, slot: &Slot) {
        let (cut, stride) = (self.cut(number), self.stride());
        // SAFETY: every split of this block has been computed, and the block is this task's alone.
        unsafe {
            let total = || rows((slot.acc, stride), &cut);
            total()
                .zip(rows(self.part(&cut, 0), &cut))
                .for_each(|(total, part)| total.copy_from_slice(part));
            for split in 1..self.blocking.splits {
                total()
                    .zip(rows(self.part(&cut, split), &cut))
                    .for_each(|(total, part)| add(total, part));
            }
            self.product.finish(
                cut.group,
                cut.rows,
                cut.column_block,
                slot.acc,
                stride,
                slot.scratch,
            );
        }
    }
}

/// The rows of a block of sums.
///
/// # Safety
/// The sums are the caller's while the rows are.
unsafe fn rows<'a>(
    (sums, stride): (*mut f32, usize),
    cut: &Cut,
) -> impl Iterator<Item = &'a mut [f32]> + use<'a> {
    let columns = cut.columns.len();
    // SAFETY: the caller's promise; rows do not overlap.
    (0..cut.rows.len())
        .map(move |row| unsafe { std::slice::from_raw_parts_mut(sums.add(row * stride), columns) })
}

fn add(total: &mut [f32], terms: &[f32]) {
    total
        .iter_mut()
        .zip(terms)
        .for_each(|(total, term)| *total += term);
}

/// A block of the result.
struct Cut {
    group: usize,
    row_block: usize,
    rows: Range<usize>,
    column_block: usize,
    columns: Range<usize>,
}

/// Rows of each panel but the last when `rows` rows are cut evenly into as few panels as possible.
pub(in super::super) fn panel_rows(rows: usize, most: usize) -> usize {
    rows.div_ceil(rows.div_ceil(most))
}
