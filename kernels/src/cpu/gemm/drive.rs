//! The loops around the micro-kernels, shared by matrix products and convolutions.
//!
//! The result is cut into blocks of rows × *strips* of columns. A task computes one such block over the whole contracted axis
//! in the worker's own part of the workspace and hands it to the product's epilogue, so the result itself is written
//! once, by code that may do anything with it. The left operand of a block of rows is kept packed as long as a worker
//! stays with these rows; the right operand is packed one micro-panel at a time, just before all left panels
//! meet it. The contracted axis is cut into blocks, and for small results of long sums into splits, by the shape alone:
//! every element is summed in the same order whatever the number of threads.

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::micro::{Left, Micro, Right};
use crate::cpu::Team;

/// Alignment of every buffer in a workspace, in bytes.
const ALIGN: usize = 64;

/// Multiply-adds that are not worth a second thread: about two microseconds.
const SERIAL_WORK: usize = 1 << 16;

/// What distinguishes one kind of product from another: where operands come from and where results go.
///
/// # Safety of the methods
/// Buffers are as large as [`Space`] says; ranges lie inside the product; nothing else uses the buffers meanwhile.
pub(in super::super) trait Product: Sync {
    /// Whether left panels are walked by tables instead of packed.
    fn indirect(&self) -> bool;
    /// Independent products.
    fn groups(&self) -> usize;
    /// Groups with equal numbers have the same left operand.
    fn left_group(&self, group: usize) -> usize;
    /// Rows of the result.
    fn rows(&self) -> usize;
    /// Strips of columns that the result is cut into.
    fn strips(&self) -> usize;
    /// The columns of a strip.
    fn strip(&self, strip: usize) -> Range<usize>;
    /// The stretch of the contracted axis that makes a block.
    fn depth(&self, block: usize) -> Range<usize>;
    /// Blocks of the contracted axis.
    fn depth_blocks(&self) -> usize;
    /// Prepares `rows` of the left operand for a block of the contracted axis, in panels of `panel` rows.
    unsafe fn left(&self, group: usize, rows: Range<usize>, panel: usize, block: usize, to: *mut f32);
    /// The panel that starts `row` rows into what [`Product::left`] prepared for `rows`.
    unsafe fn panel(&self, group: usize, rows: &Range<usize>, row: usize, block: usize, left: *const f32) -> Left;
    /// Prepares what the micro-panels of a strip have in common.
    unsafe fn right(&self, group: usize, strip: usize, block: usize, to: *mut f32);
    /// The columns from `column` on that take the same steps of a block.
    unsafe fn stretch(&self, strip: usize, _column: usize, block: usize, _right: *const f32) -> Stretch {
        let end = self.strip(strip).end;
        Stretch { end, next: end, steps: 0..self.depth(block).len() }
    }
    /// One micro-panel, `width` wide with zeros after `columns`, packed into `to` or found where it is.
    unsafe fn micro_panel(&self, at: MicroPanel, right: *const f32, to: *mut f32) -> Right;
    /// Takes a finished block.
    unsafe fn finish(&self, group: usize, rows: Range<usize>, strip: usize, acc: *mut f32, stride: usize, scratch: *mut u8);
}

/// Which micro-panel of the right operand is wanted.
pub(in super::super) struct MicroPanel {
    pub group: usize,
    pub block: usize,
    pub columns: Range<usize>,
    /// Its steps of the block.
    pub steps: Range<usize>,
    /// The strip they are part of.
    pub strip: usize,
    pub width: usize,
    /// How many left panels will meet it.
    pub panels: usize,
}

/// Columns that take the same steps of a block.
pub(in super::super) struct Stretch {
    pub end: usize,
    /// Where the next ones start: there may be columns between them that mean nothing.
    pub next: usize,
    pub steps: Range<usize>,
}

/// How the result is cut.
#[derive(Clone, Copy, Debug)]
pub(in super::super) struct Blocking {
    /// Rows of a block.
    pub rows: usize,
    /// Columns of the widest strip.
    pub columns: usize,
    /// Whether the left operand is kept packed for all of the contracted axis.
    pub resident: bool,
    /// Parts of the contracted axis that are summed apart.
    pub splits: usize,
}

/// Some blocks of the contracted axis, whose sums go on from those of the blocks before.
pub(in super::super) struct Carry {
    pub blocks: Range<usize>,
    /// The sums, [`Blocking::sums`] elements.
    pub sums: *mut f32,
    /// Whether these are the last blocks: the product takes its results.
    pub last: bool,
}

// SAFETY: workers use disjoint parts of the sums, those of the block of the result and the split that each computes.
unsafe impl Sync for Carry {}

impl Blocking {
    /// Elements of the sums of a product of `groups` times `rows` rows in so many strips, kept apart from the workspace.
    pub fn sums(&self, groups: usize, rows: usize, strips: usize, micro: &Micro) -> usize {
        let row = strips.saturating_mul(self.columns.next_multiple_of(micro.lanes));
        groups.saturating_mul(self.splits).saturating_mul(rows).saturating_mul(row)
    }
}

/// Elements (and bytes of epilogue scratch) of each buffer of a workspace.
#[derive(Clone, Copy, Debug, Default)]
pub(in super::super) struct Space {
    pub left: usize,
    pub right: usize,
    pub micro_panel: usize,
    pub acc: usize,
    /// Bytes.
    pub scratch: usize,
    /// Sums of splits; one for all workers.
    pub partial: usize,
}

impl Space {
    /// Room for either.
    pub fn max(&self, other: &Space) -> Space {
        Space {
            left: self.left.max(other.left),
            right: self.right.max(other.right),
            micro_panel: self.micro_panel.max(other.micro_panel),
            acc: self.acc.max(other.acc),
            scratch: self.scratch.max(other.scratch),
            partial: self.partial.max(other.partial),
        }
    }

    /// Byte offsets of left, right, micro-panel, block and scratch in a worker's part, and the part's size.
    fn offsets(&self) -> [usize; 6] {
        let mut at = 0;
        [self.left * 4, self.right * 4, self.micro_panel * 4, self.acc * 4, self.scratch, 0].map(|bytes| {
            let here = at;
            at += bytes.next_multiple_of(ALIGN);
            here
        })
    }

    /// Bytes of the workspace for `threads` workers.
    pub fn bytes(&self, threads: usize) -> u64 {
        let part = self.offsets()[5] as u64;
        part.saturating_mul(threads as u64).saturating_add((self.partial as u64).saturating_mul(4)).next_multiple_of(ALIGN as u64)
    }
}

/// The memory and threads of one run.
pub(in super::super) struct Room<'a> {
    pub workspace: *mut u8,
    pub space: &'a Space,
    /// Workers that the workspace has room for.
    pub threads: usize,
    pub team: &'a Team,
}

// SAFETY: workers use disjoint parts of the workspace, told apart by the slot each task loop runs in.
unsafe impl Sync for Room<'_> {}

/// One worker's part of the workspace.
pub(in super::super) struct Slot {
    pub left: *mut f32,
    pub right: *mut f32,
    pub micro_panel: *mut f32,
    pub acc: *mut f32,
    pub scratch: *mut u8,
}

impl Room<'_> {
    /// # Safety
    /// `slot` is below `threads`, and nobody else uses it now.
    unsafe fn slot(&self, slot: usize) -> Slot {
        let at = self.space.offsets();
        // SAFETY: the workspace has room for `threads` parts of this size.
        let part = |k: usize| unsafe { self.workspace.add(slot * at[5] + at[k]) };
        Slot { left: part(0).cast(), right: part(1).cast(), micro_panel: part(2).cast(), acc: part(3).cast(), scratch: part(4) }
    }

    /// The sums of splits, after the workers' parts.
    fn partial(&self) -> *mut f32 {
        // SAFETY: the workspace holds them behind the parts.
        unsafe { self.workspace.add(self.threads * self.space.offsets()[5]).cast() }
    }

    /// Runs `task(number, slot)` for every task, in ascending order on each of several workers. (`serial`: on one.)
    ///
    /// # Safety
    /// The workspace has the bytes of the space, and nobody else uses it.
    pub unsafe fn tasks(&self, tasks: usize, serial: bool, task: impl Fn(usize, &Slot, &mut usize) + Sync) {
        let workers = if serial { 1 } else { self.threads.min(self.team.threads()).min(tasks) };
        let next = AtomicUsize::new(0);
        self.team.run(workers, &|slot, _| {
            // SAFETY: each number below `workers` is run once, so it is a worker's own.
            let slot = unsafe { self.slot(slot) };
            let mut resident = usize::MAX;
            loop {
                let number = next.fetch_add(1, Ordering::Relaxed);
                if number >= tasks {
                    break;
                }
                task(number, &slot, &mut resident);
            }
        });
    }
}

/// Computes a product.
///
/// # Safety
/// The room's workspace has the bytes of its [`Space`], which covers what `blocking` makes of `product`; the product's
/// operands may be read and its results written.
pub(in super::super) unsafe fn drive<P: Product>(product: &P, micro: &Micro, blocking: &Blocking, room: &Room) {
    // SAFETY: the caller's promise.
    unsafe { drive_some(product, micro, blocking, room, None) }
}

/// Computes a product, or some blocks of the contracted axis of it.
///
/// # Safety
/// As [`drive`]; the sums are the caller's.
pub(in super::super) unsafe fn drive_some<P: Product>(product: &P, micro: &Micro, blocking: &Blocking, room: &Room, carry: Option<Carry>) {
    let (groups, rows, strips) = (product.groups(), product.rows(), product.strips());
    if groups == 0 || rows == 0 || strips == 0 {
        return;
    }
    let row_blocks = rows.div_ceil(blocking.rows);
    let job = Job { product, micro, blocking, room, row_blocks, strips, carry };
    let depth = product.depth_blocks().checked_sub(1).map_or(0, |last| product.depth(last).end);
    let work = groups.saturating_mul(rows).saturating_mul(product.strip(strips - 1).end).saturating_mul(depth);
    let blocks = groups * row_blocks * strips;
    // SAFETY: tasks write blocks of the result, or sums of splits, that are theirs alone.
    unsafe {
        room.tasks(blocks * blocking.splits, work < SERIAL_WORK, |task, slot, resident| {
            job.block(task / blocking.splits, task % blocking.splits, slot, resident);
        });
        if job.carry.as_ref().map_or(blocking.splits > 1, |carry| carry.last) {
            room.tasks(blocks, false, |number, slot, _| job.combine(number, slot));
        }
    }
}

/// A product under way.
struct Job<'a, P> {
    product: &'a P,
    micro: &'a Micro,
    blocking: &'a Blocking,
    room: &'a Room<'a>,
    row_blocks: usize,
    strips: usize,
    carry: Option<Carry>,
}

impl<P: Product> Job<'_, P> {
    /// A block of the result, by number.
    fn cut(&self, number: usize) -> Cut {
        let (row_block, strip) = (number / self.strips, number % self.strips);
        let (group, row_block) = (row_block / self.row_blocks, row_block % self.row_blocks);
        let first = row_block * self.blocking.rows;
        let rows = first..(first + self.blocking.rows).min(self.product.rows());
        Cut { group, row_block, rows, strip, columns: self.product.strip(strip) }
    }

    /// Elements between two rows of a block's sums.
    fn stride(&self) -> usize {
        self.blocking.columns.next_multiple_of(self.micro.lanes)
    }

    /// Where a split of a block keeps its sums, and the elements between two rows of them.
    fn part(&self, number: usize, split: usize) -> (*mut f32, usize) {
        let (splits, stride) = (self.blocking.splits, self.stride());
        let Some(carry) = &self.carry else {
            let block = (number * splits + split) * self.blocking.rows * stride;
            // SAFETY: the workspace has room for every split of every block.
            return (unsafe { self.room.partial().add(block) }, stride);
        };
        let (cut, row) = (self.cut(number), self.strips * stride);
        let first = ((cut.group * splits + split) * self.product.rows() + cut.rows.start) * row;
        // SAFETY: the sums have room for every split of every element.
        (unsafe { carry.sums.add(first + cut.strip * stride) }, row)
    }

    /// Computes a block of the result over one split of the contracted axis.
    unsafe fn block(&self, number: usize, split: usize, slot: &Slot, resident: &mut usize) {
        let Job { product, blocking, .. } = self;
        let cut = self.cut(number);
        let apart = blocking.splits > 1 || self.carry.is_some();
        let (acc, stride) = if apart { self.part(number, split) } else { (slot.acc, self.stride()) };
        let key = product.left_group(cut.group) * self.row_blocks + cut.row_block;
        let pack = !blocking.resident || *resident != key;
        *resident = key;
        let blocks = product.depth_blocks();
        let span = blocks * split / blocking.splits..blocks * (split + 1) / blocking.splits;
        // SAFETY: buffers have the sizes of `Space`; see `drive`.
        unsafe {
            if span.is_empty() {
                for row in 0..cut.rows.len() {
                    acc.add(row * stride).write_bytes(0, cut.columns.len());
                }
            }
            let now = self.carry.as_ref().map_or(span.clone(), |carry| span.start.max(carry.blocks.start)..span.end.min(carry.blocks.end));
            for block in now {
                let left = slot.left.add(if blocking.resident { cut.rows.len() * product.depth(block).start } else { 0 });
                if pack {
                    product.left(cut.group, cut.rows.clone(), panel_rows(cut.rows.len(), self.micro.rows), block, left);
                }
                product.right(cut.group, cut.strip, block, slot.right);
                self.sweep(&cut, block, left, slot, (acc, stride), block > span.start);
            }
            if !apart {
                product.finish(cut.group, cut.rows, cut.strip, acc, stride, slot.scratch);
            }
        }
    }

    /// Adds one block of the contracted axis to the sums of a block of the result.
    unsafe fn sweep(&self, cut: &Cut, block: usize, left: *const f32, slot: &Slot, (acc, stride): (*mut f32, usize), add: bool) {
        let Job { product, micro, .. } = self;
        let panel = panel_rows(cut.rows.len(), micro.rows);
        let panels = cut.rows.len().div_ceil(panel);
        let mut from = cut.columns.start;
        while from < cut.columns.end {
            // SAFETY: as for `block`; a micro-panel is at most `depth · width` elements, and blocks have room for whole vectors.
            unsafe {
                let Stretch { end, next, steps } = product.stretch(cut.strip, from, block, slot.right);
                let width = micro.width(end - from);
                let to = (from + width).min(end);
                let (first, depth) = (steps.start, steps.len());
                let at = MicroPanel { group: cut.group, block, columns: from..to, steps, strip: cut.strip, width, panels };
                let right = product.micro_panel(at, slot.right, slot.micro_panel);
                for row in (0..cut.rows.len()).step_by(panel) {
                    let height = panel.min(cut.rows.len() - row);
                    let left = product.panel(cut.group, &cut.rows, row, block, left);
                    let acc = acc.add(row * stride + from - cut.columns.start);
                    let left = left.from(first, height, product.indirect());
                    micro.kernel(product.indirect(), height, &right, width)(depth, left, right, acc, stride, add);
                }
                from = if to == end { next } else { to };
            }
        }
    }

    /// Adds the splits of a block in their order and finishes it.
    unsafe fn combine(&self, number: usize, slot: &Slot) {
        let Cut { group, rows, strip, columns, .. } = self.cut(number);
        let stride = self.stride();
        // SAFETY: every split of this block has been computed, and the block is this task's alone.
        unsafe {
            for row in 0..rows.len() {
                let total = slot.acc.add(row * stride);
                let part = |split: usize| {
                    let (first, stride) = self.part(number, split);
                    first.add(row * stride)
                };
                total.copy_from_nonoverlapping(part(0), columns.len());
                let total = std::slice::from_raw_parts_mut(total, columns.len());
                for split in 1..self.blocking.splits {
                    let part = std::slice::from_raw_parts(part(split), columns.len());
                    total.iter_mut().zip(part).for_each(|(t, p)| *t += p);
                }
            }
            self.product.finish(group, rows, strip, slot.acc, stride, slot.scratch);
        }
    }
}

/// A block of the result.
struct Cut {
    group: usize,
    row_block: usize,
    rows: Range<usize>,
    strip: usize,
    columns: Range<usize>,
}

/// Rows of each panel but the last when `rows` rows are cut evenly into as few panels as possible.
fn panel_rows(rows: usize, most: usize) -> usize {
    rows.div_ceil(rows.div_ceil(most))
}
