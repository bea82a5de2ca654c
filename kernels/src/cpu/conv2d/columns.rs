//! The forward product and the input gradient: weights times columns of the image, packed from a tile.

use std::ops::Range;

use super::tile::{Parts, Shape, Source, TILE, fill};
use super::{Call, Sizes, source};
use crate::cpu::gemm::drive::{Blocking, MicroPanel, Product, Room, Space, drive};
use crate::cpu::gemm::micro::{Left, Micro};
use crate::cpu::gemm::pack::{self, Piece};
use crate::cpu::gemm::{ACC, ACC_WIDE, DEPTH, LEFT, ROWS, even, share_rows, wanted};
use crate::cpu::tile::Bound;
use crate::spec::ConvKind;

/// Most vectors of a micro-panel, and most lanes of a vector.
const VECTORS: usize = 2;
const LANES: usize = 16;

/// Most channels of the source that a block of the contracted axis touches.
fn channels(sizes: &Sizes) -> usize {
    (DEPTH / sizes.taps() + 2).min(sizes.source)
}

/// Room for every blocking of sizes up to these.
pub(super) fn space(sizes: &Sizes, micro: &Micro) -> Space {
    let width = micro.columns();
    let depth = sizes.source.saturating_mul(sizes.taps());
    let rows = sizes.other.min(ROWS);
    let [height, length] = [sizes.axes[0].out, sizes.axes[1].out];
    let positions = sizes.images.saturating_mul(height).saturating_mul(length).saturating_add(width);
    let tile = |rows, columns, images| Shape::new(&sizes.axes, channels(sizes), rows, columns).elements(images);
    let tile = TILE.max(tile(1, width.min(length), 1)).min(tile(height, length, sizes.images));
    Space {
        left: rows.saturating_mul(depth).min(LEFT.max(ROWS * DEPTH)),
        right: depth.min(DEPTH).next_multiple_of(LANES).saturating_add(tile),
        micro_panel: depth.min(DEPTH) * width,
        acc: rows.saturating_mul(positions).min(ACC_WIDE.max(ROWS * width)),
        scratch: 0,
        partial: 0,
    }
}

/// # Safety
/// By the contract of the kernel's `run`.
pub(super) unsafe fn run(call: &Call) {
    let Call { spec, body, launch, sizes, kernel } = *call;
    let micro = kernel.micro;
    let (rows, depth) = (sizes.other, sizes.source * sizes.taps());
    let threads = kernel.threads.min(launch.team.threads());
    let width = micro.columns();
    let mut blocking = Blocking { rows: even(rows, ROWS, 1), columns: 0, resident: true, splits: 1 };
    blocking.resident = depth <= DEPTH || blocking.rows * depth <= LEFT;
    let acc = if blocking.resident { ACC } else { ACC_WIDE };
    let most = (acc / blocking.rows / width * width).max(width);
    let parts = |most| Parts::new(sizes.images, &sizes.axes, channels(sizes), most, width);
    let mut strips = parts(most);
    let others = sizes.groups * rows.div_ceil(blocking.rows);
    if threads > 1 && others * strips.count() < wanted(threads) {
        let positions = sizes.images * sizes.axes[0].out * sizes.axes[1].out;
        strips = parts(even(positions, positions.div_ceil(wanted(threads).div_ceil(others.max(1))), width).min(most));
        blocking.rows = share_rows(rows, blocking.rows, sizes.groups * strips.count(), threads);
    }
    blocking.columns = strips.most();
    let product = Columns {
        call,
        weight: source(&body.b, launch.args[1], launch.env),
        image: source(&body.a, launch.args[0], launch.env),
        strips,
        depth: even(depth, DEPTH, 1),
        code: kernel.code.bind(spec, launch),
    };
    let room = Room { workspace: launch.workspace, space: &kernel.space, threads: kernel.threads, team: launch.team };
    // SAFETY: `space` covers every blocking of sizes up to the bound; operands are valid by the contract of `run`.
    unsafe { drive(&product, micro, &blocking, &room) };
}

struct Columns<'a> {
    call: &'a Call<'a>,
    weight: Source,
    image: Source,
    strips: Parts,
    /// Steps of the contracted axis (channel, kernel row, kernel column) in a block.
    depth: usize,
    code: Bound<'a>,
}

// SAFETY: operands are only read, and blocks of the result are written by one worker each.
unsafe impl Sync for Columns<'_> {}

impl Columns<'_> {
    /// Strides of the weight along the rows of the product, its source channels, and the kernel's rows and columns, and
    /// the address of a group's first element.
    fn weight(&self, group: usize) -> (*const f32, [isize; 4]) {
        let ([co, ci, row, column], sizes) = (self.weight.strides, self.call.sizes);
        let (first, strides) = match self.call.body.kind {
            ConvKind::InputGrad => (group * sizes.source, [ci, co, row, column]),
            _ => (group * sizes.other, [co, ci, row, column]),
        };
        (self.weight.at.wrapping_offset(first as isize * co), strides)
    }

    /// The source channels, counted inside the group, of a block of the contracted axis.
    fn channels(&self, depth: &Range<usize>) -> Range<usize> {
        let taps = self.call.sizes.taps();
        depth.start / taps..depth.end.div_ceil(taps)
    }

    fn shape(&self, depth: &Range<usize>, strip: usize) -> Shape {
        let part = self.strips.get(strip);
        Shape::new(&self.call.sizes.axes, self.channels(depth).len(), part.rows.len(), part.columns.len())
    }
}

impl Product for Columns<'_> {
    const INDIRECT: bool = false;

    fn groups(&self) -> usize {
        self.call.sizes.groups
    }

    fn left_group(&self, group: usize) -> usize {
        group
    }

    fn rows(&self) -> usize {
        self.call.sizes.other
    }

    fn strips(&self) -> usize {
        self.strips.count()
    }

    fn strip(&self, strip: usize) -> Range<usize> {
        self.strips.range(strip)
    }

    fn depth(&self, block: usize) -> Range<usize> {
        block * self.depth..((block + 1) * self.depth).min(self.call.sizes.source * self.call.sizes.taps())
    }

    fn depth_blocks(&self) -> usize {
        (self.call.sizes.source * self.call.sizes.taps()).div_ceil(DEPTH)
    }

    unsafe fn left(&self, group: usize, rows: Range<usize>, panel: usize, block: usize, to: *mut f32) {
        let (depth, axes) = (self.depth(block), &self.call.sizes.axes);
        let (at, [row_stride, channel, kernel_row, step]) = self.weight(group);
        // Axes of the contracted one that lie behind one another in memory are packed in one go.
        let mut run = axes[1].taps;
        if kernel_row == step * run as isize {
            run *= axes[0].taps;
            if channel == step * run as isize {
                run = usize::MAX;
            }
        }
        for row in rows.clone().step_by(panel) {
            let count = panel.min(rows.end - row);
            // SAFETY: panels fill the buffer one after another.
            let to = unsafe { to.add((row - rows.start) * depth.len()) };
            let mut k = depth.start;
            while k < depth.end {
                let next = if run == usize::MAX { depth.end } else { ((k / run + 1) * run).min(depth.end) };
                let (tap, c) = (k % self.call.sizes.taps(), k / self.call.sizes.taps());
                let offset = c as isize * channel + (tap / axes[1].taps) as isize * kernel_row + (tap % axes[1].taps) as isize * step;
                let from = pack::Source { at: at.wrapping_offset(row as isize * row_stride + offset), stride: row_stride, step };
                // SAFETY: these rows and steps lie inside the weight.
                unsafe { (self.call.kernel.micro.pack)(from, count, next - k, to.add((k - depth.start) * count), count) };
                k = next;
            }
        }
    }

    unsafe fn panel(&self, row: usize, block: usize, left: *const f32) -> Left {
        // SAFETY: `row` rows are packed before it.
        Left { base: unsafe { left.add(row * self.depth(block).len()) }, rows: std::ptr::null(), steps: std::ptr::null() }
    }

    /// The offset of every step, then the tile.
    unsafe fn right(&self, group: usize, strip: usize, block: usize, to: *mut f32) {
        let (depth, sizes) = (self.depth(block), self.call.sizes);
        let (channels, shape, part) = (self.channels(&depth), self.shape(&depth, strip), self.strips.get(strip));
        let steps = to.cast::<i32>();
        let mut k = 0;
        let [rows, columns] = [sizes.axes[0].taps, sizes.axes[1].taps];
        for c in 0..channels.len() {
            for tap in 0..rows * columns {
                let at = (channels.start + c) * rows * columns + tap;
                if depth.contains(&at) {
                    let offset = c * shape.channel + shape.tap(&sizes.axes, tap / columns, tap % columns);
                    // SAFETY: one entry for each step of the block.
                    unsafe { *steps.add(k) = offset as i32 };
                    k += 1;
                }
            }
        }
        let first = group * sizes.source;
        let channels = first + channels.start..first + channels.end;
        // SAFETY: these channels exist, and the tile has room behind the table.
        unsafe { fill(&self.image, &sizes.axes, channels, &part, &shape, to.add(depth.len().next_multiple_of(LANES))) };
    }

    unsafe fn micro_panel(&self, at: MicroPanel, right: *const f32, to: *mut f32) -> (*const f32, usize) {
        let (depth, axes, micro) = (self.depth(at.block), &self.call.sizes.axes, self.call.kernel.micro);
        let (shape, part) = (self.shape(&depth, at.strip), self.strips.get(at.strip));
        let first = at.columns.start - self.strips.range(at.strip).start;
        let (mut pieces, mut vectors) = ([Piece::default(); VECTORS * LANES], [0u16; VECTORS + 1]);
        let (rows, columns) = (part.rows.len(), part.columns.len());
        let (mut image, mut row, mut column) = (first / columns / rows, first / columns % rows, first % columns);
        let (mut lane, mut count, mut opened) = (0, 0, 0);
        while lane < at.columns.len() {
            let run = (columns - column).min(micro.lanes - lane % micro.lanes).min(at.columns.len() - lane);
            let offset = (shape.position(axes, image, row, column) as i32).wrapping_sub((lane % micro.lanes) as i32);
            let lanes = (((1u64 << run) - 1) << (lane % micro.lanes)) as u32;
            // Rows that lie behind one another need no new piece.
            if count > opened && pieces[count - 1].offset == offset {
                pieces[count - 1].lanes |= lanes;
            } else {
                pieces[count] = Piece { offset, lanes };
                count += 1;
            }
            (lane, column) = (lane + run, column + run);
            if column == columns {
                (column, row) = (0, row + 1);
            }
            if row == rows {
                (row, image) = (0, image + 1);
            }
            if lane % micro.lanes == 0 || lane == at.columns.len() {
                opened = count;
                vectors[lane.div_ceil(micro.lanes)] = count as u16;
            }
        }
        let used = at.width / micro.lanes;
        // SAFETY: `right` made the table and the tile, in which every piece lies at every step.
        unsafe {
            let steps = std::slice::from_raw_parts(right.cast::<i32>(), depth.len());
            let tile = right.add(depth.len().next_multiple_of(LANES));
            (micro.gather)(tile, steps, &pieces[..count], &vectors[..=used], to);
        }
        (to, at.width)
    }

    unsafe fn finish(&self, group: usize, rows: Range<usize>, strip: usize, acc: *mut f32, stride: usize, scratch: *mut u8) {
        let part = self.strips.get(strip);
        let positions = part.rows.len() * part.columns.len();
        for (i, image) in part.images.clone().enumerate() {
            let origin = [image, group * self.call.sizes.other + rows.start, part.rows.start, part.columns.start];
            // SAFETY: the block is this worker's, and so is the scratch memory.
            unsafe { self.code.block(&origin, 1, rows.len(), positions, acc.add(i * positions).cast(), stride, scratch) };
        }
    }
}
