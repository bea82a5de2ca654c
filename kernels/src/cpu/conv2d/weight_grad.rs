//! The weight gradient: for every kernel element, the image shifted by it times the output
//! gradient, summed over all positions. Rows of the product are (input channel, kernel row, kernel
//! column), read from the tile by offsets; columns are output channels. The rows of a panel are
//! neighbours or, where products with padding are left out ([`inside`]), those of one kernel element.

use std::ops::Range;

use super::image::Image;
use super::inside::{self, Inside};
use super::tile::{Part, Parts, Shape, Source};
use super::{Call, Sizes, part_source};
use crate::cpu::MicroBatchLimits;
use crate::cpu::gemm::drive::{Blocking, Carry, MicroPanel, Product, drive_some, sums};
use crate::cpu::gemm::micro::{Left, LeftLayout, Micro, Right};
use crate::cpu::gemm::workspace::Space;
use crate::cpu::gemm::{
    IMAGE_TILE_ELEMENTS, Limits, MC, SPLIT_NC, even, pack, partial_space, share_rows, split_blocks,
    splits, wanted,
};
use crate::cpu::tile::Bound;

/// Most positions in a k-block.
const POSITIONS: usize = 512;
/// Elements of an operand of the epilogue that are requested at a time, ahead of their use.
const REQUESTED: usize = 1 << 10;
/// Elements that tables are rounded up to.
const TABLE: usize = 16;

/// Most channels of the image that a block of `rows` rows reads.
fn channels(sizes: &Sizes, rows: usize) -> usize {
    (rows / sizes.taps() + 2).min(sizes.source)
}

/// The k-blocks of the contracted axis.
fn parts(sizes: &Sizes) -> Parts {
    Parts::from_first(sizes.images, &sizes.axes, channels(sizes, MC), POSITIONS, 1)
}

/// Most rows of a block of the result.
fn most_rows(sizes: &Sizes, micro: &Micro, limits: &Limits) -> usize {
    let rows = inside::channels(sizes, &parts(sizes), micro, limits)
        .map_or(MC, |channels| channels * sizes.taps());
    rows.min(sizes.source.saturating_mul(sizes.taps()))
}

/// Images, rows and columns of a k-block's sub-blocks.
fn block(parts: &Parts, limits: &Limits) -> [usize; 3] {
    let [images, rows, columns] = parts.size();
    let high = (limits.kc / columns).clamp(1, rows);
    [
        if high < rows {
            1
        } else {
            (limits.kc / (rows * columns)).clamp(1, images)
        },
        high,
        columns,
    ]
}

/// Most elements of a channel of a tile.
pub(super) fn most_of_channel(sizes: &Sizes, limits: &Limits) -> usize {
    if sizes.fixed {
        let [_, rows, columns] = block(&parts(sizes), limits);
        return Shape::of_channel(&sizes.axes, rows, columns);
    }
    let least = Shape::of_channel(&sizes.axes, 1, 1);
    Shape::of_channel(&sizes.axes, sizes.axes[0].out, sizes.axes[1].out)
        .min(IMAGE_TILE_ELEMENTS.max(least))
}

/// The buffers for every blocking of sizes up to these, with `prologue_buffer` elements for a
/// prologue.
pub(super) fn space(
    sizes: &Sizes,
    micro: &Micro,
    limits: &Limits,
    prologue_buffer: usize,
) -> Space {
    let width = micro.nr();
    let product = sizes.source.saturating_mul(sizes.taps());
    let columns = sizes.other.next_multiple_of(width).min(SPLIT_NC);
    let [height, length] = [sizes.axes[0].out, sizes.axes[1].out];
    let positions = sizes.images.saturating_mul(height).saturating_mul(length);
    let (fewest, k_blocks) = match sizes.fixed {
        true => (
            split_blocks(sizes.groups, product, sizes.other),
            parts(sizes).count(),
        ),
        // Smaller rows may cut the contracted axis into more k-blocks, but never more than there
        // are positions.
        false => (1, positions),
    };
    let apart = inside::channels(sizes, &parts(sizes), micro, limits);
    let (rows, columns) = match apart {
        Some(channels) => {
            let rows = channels * sizes.taps();
            let most = most_columns(rows, limits, micro);
            (rows, inside::columns(sizes, channels, most, 1, micro))
        }
        None if splits(fewest, k_blocks) > 1 => (MC.min(product), columns),
        None => (limits.mc.min(product), columns),
    };
    let tile = |rows_of: usize, [images, rows, columns]: [usize; 3]| {
        Shape::new(&sizes.axes, channels(sizes, rows_of), rows, columns).elements(images)
    };
    let (tile, steps) = match sizes.fixed {
        true => {
            let block = block(&parts(sizes), limits);
            (tile(rows, block), block.iter().product())
        }
        false => (
            IMAGE_TILE_ELEMENTS
                .max(tile(MC, [1; 3]))
                .min(tile(MC, [sizes.images, height, length])),
            positions.min(POSITIONS),
        ),
    };
    let acc = if splits(fewest, k_blocks) > 1 {
        usize::MAX
    } else {
        limits.acc[0].max(rows * width)
    }
    .min(rows * columns);
    Space {
        left: (most_rows(sizes, micro, limits).next_multiple_of(TABLE)
            + POSITIONS.min(positions).next_multiple_of(TABLE))
        .saturating_add(tile)
        .next_multiple_of(TABLE)
        .saturating_add(prologue_buffer),
        right: 0,
        micro_panel: steps * width,
        acc,
        // The transposed block, in front of the epilogue's scratch memory.
        scratch: (acc * 4).next_multiple_of(64),
        k_block: if limits.kc < POSITIONS && k_blocks > 1 {
            acc
        } else {
            0
        },
        // There are either splits or lists.
        shared: match apart {
            Some(_) => Inside::elements(sizes, parts(sizes).size()[0]),
            None => partial_space(product, sizes.other, fewest, k_blocks, micro),
        },
    }
}

/// Most columns of a block of `rows` rows.
fn most_columns(rows: usize, limits: &Limits, micro: &Micro) -> usize {
    let width = micro.nr();
    (limits.acc[0] / rows.max(1) / width * width).clamp(width, SPLIT_NC)
}

/// Parts of the contracted axis that are summed separately.
fn splits_of(sizes: &Sizes) -> usize {
    splits(
        split_blocks(sizes.groups, sizes.source * sizes.taps(), sizes.other),
        parts(sizes).count(),
    )
}

/// The blocking of the product. Only the splits and the k-blocks decide in which order an element
/// is summed.
fn blocking(sizes: &Sizes, micro: &Micro, limits: &Limits) -> Blocking {
    let (rows, splits) = (sizes.source * sizes.taps(), splits_of(sizes));
    let mc = even(rows, if splits > 1 { MC } else { limits.mc }, 1);
    let most = if splits > 1 {
        SPLIT_NC
    } else {
        most_columns(mc, limits, micro)
    };
    Blocking {
        mc,
        nc: even(sizes.other, most, micro.nr()),
        resident: false,
        by_columns: false,
        splits,
    }
}

/// Where slices may end, and the partial sums between them. (More images make no fewer splits.)
pub(super) fn micro_batch_limits(sizes: &Sizes, micro: &Micro) -> MicroBatchLimits {
    let sums = sums(
        sizes.groups,
        sizes.source * sizes.taps(),
        sizes.other,
        splits_of(sizes),
        micro,
    );
    MicroBatchLimits {
        unit: parts(sizes).size()[0],
        sums,
    }
}

/// # Safety
/// By the contract of the kernel's `run`.
pub(super) unsafe fn run(call: &Call) {
    let Call {
        spec,
        body,
        launch,
        sizes,
        kernel,
    } = *call;
    let (rows, parts, mut blocking) = (
        sizes.source * sizes.taps(),
        parts(sizes),
        blocking(sizes, kernel.micro, kernel.limits),
    );
    let splits = blocking.splits;
    let threads = kernel.threads.min(launch.team.threads());
    let others = sizes.groups * sizes.other.div_ceil(blocking.nc);
    let apart = inside::channels(sizes, &parts, kernel.micro, kernel.limits);
    if let Some(channels) = apart {
        blocking.mc = channels * sizes.taps();
        let most = most_columns(blocking.mc, kernel.limits, kernel.micro);
        blocking.nc = inside::columns(sizes, channels, most, threads, kernel.micro);
    } else if splits == 1 && threads > 1 && others * rows.div_ceil(blocking.mc) < wanted(threads) {
        blocking.mc = share_rows(rows, blocking.mc, others, wanted(threads));
    }
    let resources = call.resources();
    // SAFETY: `space` has room for the lists, and nothing else is there, because there are no splits.
    let inside =
        apart.map(|_| unsafe { Inside::new(sizes, parts.size()[0], resources.shared().cast()) });
    let block = block(&parts, kernel.limits);
    let product = WeightGrad {
        call,
        image: Image::new(call, &sizes.axes, part_source(call, &body.a, 0)),
        gradient: part_source(call, &body.b, body.sources()),
        parts,
        block,
        blocks: [0, 1].map(|i| parts.size()[i].div_ceil(block[i])),
        nc: blocking.nc,
        code: kernel.code.bind(spec, launch),
        inside,
        table: most_rows(sizes, kernel.micro, kernel.limits).next_multiple_of(TABLE),
    };
    let carry = launch.part.map(|part| Carry {
        k_blocks: parts.before(part.examples.start * call.per_example())
            ..parts.before(part.examples.end * call.per_example()),
        begun: false,
        open: false,
        sums: part.sums.cast(),
        last: part.last,
    });
    // SAFETY: `space` covers every blocking of sizes up to the bound; operands are valid by the
    // contract of `run`.
    unsafe { drive_some(&product, kernel.micro, &blocking, &resources, carry) };
}

struct WeightGrad<'a> {
    call: &'a Call<'a>,
    image: Image<'a>,
    gradient: Source,
    /// k-blocks of the contracted axis (image, result row, result column).
    parts: Parts,
    /// Images, rows and columns of a sub-block, and the sub-blocks of a k-block along its images
    /// and along its rows.
    block: [usize; 3],
    blocks: [usize; 2],
    /// Output channels of a block of columns.
    nc: usize,
    code: Bound<'a>,
    /// The lists of positions, if panels belong to one kernel element each.
    inside: Option<Inside>,
    /// Elements of the table of rows.
    table: usize,
}

// SAFETY: operands are only read, and blocks of the result are written by one worker each.
unsafe impl Sync for WeightGrad<'_> {}

impl Product for WeightGrad<'_> {
    fn left_layout(&self) -> LeftLayout {
        LeftLayout::Indirect
    }

    fn groups(&self) -> usize {
        self.call.sizes.groups
    }

    fn left_group(&self, group: usize) -> usize {
        group
    }

    fn rows(&self) -> usize {
        self.call.sizes.source * self.call.sizes.taps()
    }

    fn column_blocks(&self) -> usize {
        self.call.sizes.other.div_ceil(self.nc)
    }

    fn columns(&self, column_block: usize) -> Range<usize> {
        column_block * self.nc..((column_block + 1) * self.nc).min(self.call.sizes.other)
    }

    fn pitch(&self) -> usize {
        self.inside.as_ref().map_or(1, |_| self.call.sizes.taps())
    }

    unsafe fn steps(
        &self,
        first: usize,
        block: usize,
        (left, right, depth): (Left, Right, usize),
    ) -> (Left, Right, usize) {
        let Some(inside) = &self.inside else {
            return (left, right, depth);
        };
        let k_block = self.parts.range(block / self.blocks(0).len()).start;
        let steps = self.depth(block);
        let start = steps.start - k_block;
        let list = inside.between(first, start..steps.end - k_block);
        // Positions are counted from the start of the k-block.
        let left = Left {
            steps: left.steps.wrapping_sub(start),
            ..left
        };
        let right = Right {
            at: right.at.wrapping_sub(start * right.stride),
            steps: list.as_ptr(),
            ..right
        };
        (left, right, list.len())
    }

    fn depth(&self, block: usize) -> Range<usize> {
        let first = self.parts.range(block / self.blocks(0).len()).start;
        first..first + self.part(block).len()
    }

    fn k_blocks(&self) -> usize {
        self.parts.count()
    }

    fn blocks(&self, k_block: usize) -> Range<usize> {
        let blocks = self.blocks[0] * self.blocks[1];
        k_block * blocks..(k_block + 1) * blocks
    }

    /// The offset of every row, the offset of every position, then the tile.
    unsafe fn left(
        &self,
        group: usize,
        rows: Range<usize>,
        _panel: usize,
        block: usize,
        to: *mut f32,
    ) {
        let (sizes, part) = (self.call.sizes, self.part(block));
        let (taps, columns) = (sizes.taps(), sizes.axes[1].taps);
        let channels = rows.start / taps..rows.end.div_ceil(taps);
        let shape = Shape::new(
            &sizes.axes,
            channels.len(),
            part.rows.len(),
            part.columns.len(),
        );
        // SAFETY: the tables have an entry per row and position, and the tile has room after them.
        unsafe {
            let row_table = to.cast::<i32>();
            for (i, row) in rows.clone().enumerate() {
                let (channel, tap) = match self.inside {
                    Some(_) => (i % channels.len(), i / channels.len()),
                    None => (row / taps - channels.start, row % taps),
                };
                let offset =
                    channel * shape.channel + shape.tap(&sizes.axes, tap / columns, tap % columns);
                *row_table.add(i) = offset as i32;
            }
            let mut step = row_table.add(self.table);
            for image in 0..part.images.len() {
                for row in 0..part.rows.len() {
                    for column in 0..part.columns.len() {
                        *step = shape.position(&sizes.axes, image, row, column) as i32;
                        step = step.add(1);
                    }
                }
            }
            let first = group * sizes.source;
            let tile = to.add(self.tables());
            let (channels, end) = (
                first + channels.start..first + channels.end,
                to.add(self.call.kernel.space.left),
            );
            self.image.fill(channels, &part, &shape, tile, end);
        }
    }

    unsafe fn panel(
        &self,
        _group: usize,
        _rows: &Range<usize>,
        row: usize,
        _block: usize,
        left: *const f32,
    ) -> Left {
        // SAFETY: as laid out by `left`.
        unsafe {
            let table = left.cast::<i32>();
            let steps = table.add(self.table);
            Left::indirect(left.add(self.tables()), table.add(row), steps)
        }
    }

    unsafe fn right(&self, _group: usize, _column_block: usize, _block: usize, _to: *mut f32) {}

    unsafe fn micro_panel(&self, at: MicroPanel, _right: *const f32, to: *mut f32) -> Right {
        let [image, stride, row, step] = self.gradient.strides;
        let part = self.part(at.block);
        let channel = (at.group * self.call.sizes.other + at.columns.start) as isize;
        // Contiguous rows are packed at once.
        let whole = row == step * part.columns.len() as isize;
        let (runs, length) = if whole {
            (1, part.rows.len() * part.columns.len())
        } else {
            (part.rows.len(), part.columns.len())
        };
        let mut packed = 0;
        for i in part.images.clone() {
            for run in 0..runs {
                let position = i as isize * image
                    + (part.rows.start + run) as isize * row
                    + part.columns.start as isize * step;
                let from = pack::Source {
                    at: self
                        .gradient
                        .at
                        .wrapping_offset(channel * stride + position),
                    stride,
                    step,
                };
                // SAFETY: these channels and positions lie inside the gradient, and the buffer
                // takes a block of positions.
                unsafe {
                    (self.call.kernel.micro.pack)(
                        from,
                        at.columns.len(),
                        length,
                        to.add(packed * at.width),
                        at.width,
                    )
                };
                packed += length;
            }
        }
        Right::packed(to, at.width)
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
        let (sizes, columns) = (self.call.sizes, self.columns(column_block));
        let (taps, width) = (sizes.taps(), sizes.axes[1].taps);
        let tap = rows.start % taps;
        let origin = [
            group * sizes.other + columns.start,
            rows.start / taps,
            tap / width,
            tap % width,
        ];
        let from = pack::Source {
            at: acc,
            stride: stride as isize,
            step: 1,
        };
        let transposed = scratch.cast::<f32>();
        // The epilogue's operands lie far apart from channel to channel, where no prefetcher
        // foresees them.
        let requests = self.code.requests(&origin, 0);
        let at_once = (REQUESTED / rows.len()).max(1);
        let request = |first: usize| {
            requests.send(first..columns.len().min(first + at_once), 0..rows.len());
        };
        request(0);
        // SAFETY: the block is this worker's, and so is the scratch memory, which begins with room
        // for a block.
        unsafe {
            (self.call.kernel.micro.pack)(from, rows.len(), columns.len(), transposed, rows.len());
            let scratch = scratch.add(self.call.kernel.space.scratch - self.code_scratch());
            for first in (0..columns.len()).step_by(at_once) {
                request(first + at_once);
                let [channel, source, row, column] = origin;
                self.code.block(
                    &[channel + first, source, row, column],
                    0,
                    at_once.min(columns.len() - first),
                    rows.len(),
                    transposed.add(first * rows.len()).cast(),
                    rows.len(),
                    scratch,
                );
            }
        }
    }
}

impl WeightGrad<'_> {
    /// The positions of a sub-block.
    fn part(&self, block: usize) -> Part {
        let [images, rows] = self.blocks;
        let part = self.parts.get(block / (images * rows));
        let cut = |range: Range<usize>, at: usize, size: usize| {
            let [from, to] = [at, at + 1].map(|at| (range.start + at * size).min(range.end));
            from..to
        };
        let (image, row) = (block % (images * rows) / rows, block % rows);
        Part {
            images: cut(part.images, image, self.block[0]),
            rows: cut(part.rows, row, self.block[1]),
            columns: part.columns,
        }
    }

    /// Elements of both tables.
    fn tables(&self) -> usize {
        self.table + self.parts.most().next_multiple_of(TABLE)
    }

    /// Bytes of the epilogue's scratch memory.
    fn code_scratch(&self) -> usize {
        self.call.kernel.code.scratch_bytes()
    }
}
