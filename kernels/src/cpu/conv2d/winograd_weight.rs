//! The weight gradient of 3×3 kernels by Winograd's minimal filtering: with the transforms of
//! [`winograd`](super::winograd), the gradient is `Gᵀ·(Σ (A·y·Aᵀ) ∘ (Bᵀ·d·B))·G`, summed over the
//! tiles d of the image and the 2×2 elements y of the result's gradient that they reach.
//!
//! The sum over tiles is cut into splits of several parts of the batch, which follow from the shape
//! alone. A split is summed in *chunks* of tiles, each of which continues the sums of the one
//! before, so that the size of chunks changes no bit. Parts end where they would end in a larger
//! batch, so that slices of a batch continue each other's sums.

use std::ops::Range;

use super::image::Image;
use super::stretches::stretches;
use super::tile::{Axis, Part, Parts, Shape, Source};
use super::winograd::{self, point};
use super::{Call, Sizes, part_source};
use crate::cpu::MicroBatchLimits;
use crate::cpu::gemm::drive::panel_rows;
use crate::cpu::gemm::micro::{Before, Left, LeftLayout, Micro, Right};
use crate::cpu::gemm::winograd::{Filtering, Gradients, Sums, Tiles};
use crate::cpu::gemm::workspace::{Slot, Space};
use crate::cpu::gemm::{Limits, pack};
use crate::cpu::tile::Bound;

/// Most tiles of a part of the batch.
const PART: usize = 256;
/// Most splits, fewest parts in each, and most elements of the sums of all splits.
const SPLITS: usize = 8;
const SPLIT_PARTS: usize = 2;
const SUMS_MAX: usize = 256 << 10;
/// Source channels whose gradients are finished together.
const FINISHED: usize = 8;
/// Most tiles of a chunk, as a part of the steps of a sub-block, and elements of its transformed
/// image, which stays in the second cache.
const CHUNK_PART: usize = 8;
const TRANSFORMED: usize = 32 << 10;
/// Elements that tables are rounded up to.
const TABLE: usize = 16;

/// The filtering whose transforms are transposed.
const FILTERING: Filtering = Filtering::F2_3;

/// The tiles of the image as positions.
fn axes(sizes: &Sizes) -> [Axis; 2] {
    winograd::axes(sizes, FILTERING)
}

/// The parts of the batch, which depend on no later images.
fn parts(sizes: &Sizes) -> Parts {
    Parts::from_first(sizes.images, &axes(sizes), sizes.source, PART, 1)
}

/// Output channels, rounded up to whole vectors.
fn padded(sizes: &Sizes, micro: &Micro) -> usize {
    sizes.other.next_multiple_of(micro.lanes)
}

/// Elements of the sums of a split.
fn sums(sizes: &Sizes, micro: &Micro) -> usize {
    FILTERING.elements() * sizes.source * padded(sizes, micro)
}

fn splits(sizes: &Sizes, micro: &Micro) -> usize {
    SPLITS
        .min(parts(sizes).count() / SPLIT_PARTS)
        .min(SUMS_MAX / sums(sizes, micro))
        .max(1)
}

/// Most tiles of a chunk, in whole vectors.
fn chunk(sizes: &Sizes, micro: &Micro, limits: &Limits) -> usize {
    let most = (limits.kc / CHUNK_PART).min(TRANSFORMED / (FILTERING.elements() * sizes.source));
    let most = most.min(parts(sizes).most().next_multiple_of(micro.lanes));
    (most / micro.lanes).max(1) * micro.lanes
}

/// Positions of the result's gradient in a row of a chunk's tiles.
fn positions(sizes: &Sizes, micro: &Micro, limits: &Limits) -> usize {
    FILTERING.results * chunk(sizes, micro, limits).min(parts(sizes).size()[2])
}

/// Elements of a vector of transformed tiles of all source channels.
fn vector(sizes: &Sizes, micro: &Micro) -> usize {
    FILTERING.elements() * point(sizes.source * micro.lanes)
}

/// The images, rows and columns of tiles that a chunk of a part may reach.
fn windows(sizes: &Sizes, micro: &Micro, limits: &Limits) -> [[usize; 3]; 2] {
    let [images, rows, columns] = parts(sizes).size();
    let reach = |size: usize, most: usize| ((chunk(sizes, micro, limits) - 1) / size + 2).min(most);
    [
        [1, reach(columns, rows), columns],
        [reach(rows * columns, images), rows, columns],
    ]
}

/// Elements of a tile.
fn tile(sizes: &Sizes, micro: &Micro, limits: &Limits) -> usize {
    let of = |[images, rows, columns]: [usize; 3]| {
        Shape::new(&axes(sizes), sizes.source, rows, columns).elements(images)
    };
    let [rows, images] = windows(sizes, micro, limits);
    of(rows).max(if images[0] > 1 { of(images) } else { 0 })
}

/// The images or rows of a part in which a chunk of its tiles lies, and the chunk's tiles in them.
fn window(part: &Part, tiles: Range<usize>) -> (Part, Range<usize>) {
    let columns = part.columns.len();
    let of_image = part.rows.len() * columns;
    let images = tiles.start / of_image..(tiles.end - 1) / of_image + 1;
    let (before, rows) = if images.len() == 1 {
        let row = |tile: usize| tile % of_image / columns;
        let rows = row(tiles.start)..row(tiles.end - 1) + 1;
        (images.start * of_image + rows.start * columns, rows)
    } else {
        (images.start * of_image, 0..part.rows.len())
    };
    let within =
        |all: &Range<usize>, some: Range<usize>| all.start + some.start..all.start + some.end;
    let window = Part {
        images: within(&part.images, images),
        rows: within(&part.rows, rows),
        columns: part.columns.clone(),
    };
    (window, tiles.start - before..tiles.end - before)
}

/// Elements of both tables of a left panel.
fn tables(sizes: &Sizes, micro: &Micro, limits: &Limits) -> usize {
    sizes.source.next_multiple_of(TABLE) + chunk(sizes, micro, limits).next_multiple_of(TABLE)
}

/// The buffers, `copied` as in [`winograd::space`](super::winograd::space).
pub(super) fn space(sizes: &Sizes, micro: &Micro, limits: &Limits, copied: Option<usize>) -> Space {
    let (tiles, depth) = (chunk(sizes, micro, limits), sizes.source);
    let columns = micro.width(sizes.other);
    let finished = FILTERING.taps.pow(2) * FINISHED.min(depth) * padded(sizes, micro);
    Space {
        left: tables(sizes, micro, limits) + tiles / micro.lanes * vector(sizes, micro),
        right: copied.map_or(0, |more| {
            let tile = tile(sizes, micro, limits).next_multiple_of(TABLE);
            tile.saturating_add(more)
        }),
        micro_panel: FILTERING.elements() * point(tiles * columns),
        k_block: FILTERING.results * positions(sizes, micro, limits) * columns,
        acc: finished,
        // The transposed block, in front of the epilogue's scratch memory.
        scratch: (4 * finished).next_multiple_of(64),
        shared: splits(sizes, micro) * sums(sizes, micro),
    }
}

/// Where slices may end, and the partial sums between them. (More images make no fewer splits.)
pub(super) fn micro_batch_limits(sizes: &Sizes, micro: &Micro) -> MicroBatchLimits {
    MicroBatchLimits {
        unit: parts(sizes).size()[0],
        sums: splits(sizes, micro) * sums(sizes, micro),
    }
}

/// One run.
struct WeightGrad<'a> {
    call: &'a Call<'a>,
    axes: [Axis; 2],
    image: Image<'a>,
    gradient: Source,
    parts: Parts,
    splits: usize,
    /// Most tiles of a chunk, and elements of a vector of transformed ones.
    chunk: usize,
    vector: usize,
    /// The parts of this slice.
    now: Range<usize>,
    /// The sums of all splits: for each point and source channel one for each output channel.
    sums: *mut f32,
    code: Bound<'a>,
}

// SAFETY: operands are only read; sums and blocks of the result are written by one worker each.
unsafe impl Sync for WeightGrad<'_> {}

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
    let (micro, parts, axes) = (kernel.micro, parts(sizes), axes(sizes));
    let resources = call.resources();
    let before = |examples: usize| parts.before(examples * call.per_example());
    let product = WeightGrad {
        call,
        axes,
        image: Image::new(call, &axes, part_source(call, &body.a, 0)),
        gradient: part_source(call, &body.b, body.sources()),
        parts,
        splits: splits(sizes, micro),
        chunk: chunk(sizes, micro, kernel.limits),
        vector: vector(sizes, micro),
        now: launch.part.map_or(0..parts.count(), |part| {
            before(part.examples.start)..before(part.examples.end)
        }),
        sums: launch
            .part
            .map_or(resources.shared(), |part| part.sums.cast()),
        code: kernel.code.bind(spec, launch),
    };
    let panels = sizes.other.div_ceil(micro.nr());
    // Panels of one task share the transformed image.
    let threads = kernel.threads.min(launch.team.threads());
    let tasks = if product.splits >= 2 * threads {
        1
    } else {
        panels
    };
    let blocks = sizes.source.div_ceil(FINISHED);
    // SAFETY: `space` covers sizes up to the bound; operands are valid by the contract of `run`;
    // panels of splits and blocks of the result are one task's each.
    unsafe {
        resources.tasks(product.splits * tasks, false, |task, slot, _| {
            let at = task % tasks;
            let panels = panels * at / tasks..panels * (at + 1) / tasks;
            product.split(task / tasks, panels, slot)
        });
        if launch.part.is_none_or(|part| part.last) {
            resources.tasks(blocks, false, |block, slot, _| product.finish(block, slot));
        }
    }
}

impl WeightGrad<'_> {
    /// The sums of a split.
    fn sums(&self, split: usize) -> *mut f32 {
        let (sizes, micro) = (self.call.sizes, self.call.kernel.micro);
        self.sums.wrapping_add(split * sums(sizes, micro))
    }

    /// Adds the parts of this slice to a split's sums of some panels of output channels.
    unsafe fn split(&self, split: usize, panels: Range<usize>, slot: &Slot) {
        let Call { sizes, kernel, .. } = *self.call;
        let micro = kernel.micro;
        let (depth, padded, chunk) = (sizes.source, padded(sizes, micro), self.chunk);
        let count = self.parts.count();
        let span = count * split / self.splits..count * (split + 1) / self.splits;
        // SAFETY: buffers have the sizes of `space`, and these sums are this task's.
        unsafe {
            if span.is_empty() && panels.start == 0 {
                let all = sums(sizes, micro);
                std::slice::from_raw_parts_mut(self.sums(split), all).fill(0.0);
            }
            let (rows, steps) = self.tables(slot);
            let height = panel_rows(depth, micro.mr);
            let mut before = Before::Sums;
            for part in span.start.max(self.now.start)..span.end.min(self.now.end) {
                if part == span.start {
                    before = Before::Nothing;
                }
                let part = self.parts.get(part);
                for first in (0..part.len()).step_by(chunk) {
                    let tiles = first..(first + chunk).min(part.len());
                    let (part, tiles) = window(&part, tiles);
                    let end = slot.right.add(kernel.space.right);
                    let image = self.image.dense(0..depth, &part, slot.right, end);
                    self.transform_image(&image, &part, tiles.clone(), slot);
                    for panel in panels.clone() {
                        let channels =
                            panel * micro.nr()..((panel + 1) * micro.nr()).min(sizes.other);
                        let width = micro.width(channels.len());
                        let sums = self.sums(split).add(channels.start);
                        self.transform_gradient(&part, tiles.clone(), channels, slot);
                        for e in 0..FILTERING.elements() {
                            let gradient = slot.micro_panel.add(e * point(tiles.len() * width));
                            let right = Right::packed(gradient, width);
                            for row in (0..depth).step_by(height) {
                                let height = height.min(depth - row);
                                let left = Left::indirect(
                                    slot.left
                                        .add(self.transformed() + e * point(depth * micro.lanes)),
                                    rows.add(row),
                                    steps,
                                );
                                micro.kernel(LeftLayout::Indirect, height, &right, width)(
                                    tiles.len(),
                                    left,
                                    right,
                                    sums.add((e * depth + row) * padded),
                                    padded,
                                    before,
                                );
                            }
                        }
                    }
                    before = Before::Sums;
                }
            }
        }
    }

    /// The tables of the rows and of the steps of left panels.
    unsafe fn tables(&self, slot: &Slot) -> (*const i32, *const i32) {
        let (sizes, micro) = (self.call.sizes, self.call.kernel.micro);
        let rows = slot.left.cast::<i32>();
        let steps = rows.wrapping_add(sizes.source.next_multiple_of(TABLE));
        // SAFETY: `space` has room for both.
        unsafe {
            for row in 0..sizes.source {
                *rows.add(row) = (row * micro.lanes) as i32;
            }
            for step in 0..self.chunk {
                let (v, lane) = (step / micro.lanes, step % micro.lanes);
                *steps.add(step) = (v * self.vector + lane) as i32;
            }
        }
        (rows, steps)
    }

    /// Elements before the transformed image.
    fn transformed(&self) -> usize {
        self.call.sizes.source.next_multiple_of(TABLE) + self.chunk.next_multiple_of(TABLE)
    }

    /// Transforms some tiles of the image.
    unsafe fn transform_image(
        &self,
        image: &Source,
        part: &Part,
        tiles: Range<usize>,
        slot: &Slot,
    ) {
        let (sizes, micro) = (self.call.sizes, self.call.kernel.micro);
        for (v, first) in tiles.clone().step_by(micro.lanes).enumerate() {
            let some = first..tiles.end.min(first + micro.lanes);
            let stretches = stretches(image, &self.axes, part, some, FILTERING, micro);
            let before = self.transformed() + v * self.vector;
            let tiles = Tiles {
                at: image.at,
                channels: sizes.source,
                channel: image.strides[1],
                row: image.strides[2],
                stretches: stretches.all(),
                ends: stretches.ends(1),
                to: slot.left.wrapping_add(before),
                point: point(sizes.source * micro.lanes),
            };
            // SAFETY: the image has these elements, and `space` has room for the transformed ones.
            unsafe { (micro.transforms(FILTERING).tiles)(&tiles) };
        }
    }

    /// Transforms the result's gradient of some tiles and output channels.
    unsafe fn transform_gradient(
        &self,
        part: &Part,
        tiles: Range<usize>,
        channels: Range<usize>,
        slot: &Slot,
    ) {
        let Call { sizes, kernel, .. } = *self.call;
        let (micro, [image, channel, row, step]) = (kernel.micro, self.gradient.strides);
        let (width, results) = (micro.width(channels.len()), FILTERING.results);
        let (rows, columns) = (part.rows.len(), part.columns.len());
        let out = [sizes.axes[0].out, sizes.axes[1].out];
        let pitch = results * self.chunk.min(columns) * width;
        let mut tile = tiles.start;
        while tile < tiles.end {
            let at = [
                part.images.start + tile / columns / rows,
                part.rows.start + tile / columns % rows,
                part.columns.start + tile % columns,
            ];
            let count = (columns - tile % columns).min(tiles.end - tile);
            let [down, right] = [results * at[1], results * at[2]];
            let length = (results * count).min(out[1] - right);
            // SAFETY: these channels and positions lie inside the gradient, and `space` has room
            // for two rows of them and for the transformed tiles.
            unsafe {
                for i in 0..results {
                    let to = slot.k_block.add(i * pitch);
                    let length = if down + i < out[0] { length } else { 0 };
                    let offset = at[0] as isize * image
                        + channels.start as isize * channel
                        + (down + i) as isize * row
                        + right as isize * step;
                    let from = pack::Source {
                        at: self.gradient.at.wrapping_offset(offset),
                        stride: channel,
                        step,
                    };
                    (micro.pack)(from, channels.len(), length, to, width);
                    let rest = (results * count - length) * width;
                    std::slice::from_raw_parts_mut(to.add(length * width), rest).fill(0.0);
                }
                (micro.transform_gradients)(&Gradients {
                    at: slot.k_block,
                    pitch,
                    tiles: count,
                    width,
                    to: slot.micro_panel.add((tile - tiles.start) * width),
                    point: point(tiles.len() * width),
                });
            }
            tile += count;
        }
    }

    /// Adds the splits' sums of some source channels in their order, and finishes their gradients.
    unsafe fn finish(&self, block: usize, slot: &Slot) {
        let Call { sizes, kernel, .. } = *self.call;
        let (micro, padded) = (kernel.micro, padded(sizes, kernel.micro));
        let channels = block * FINISHED..((block + 1) * FINISHED).min(sizes.source);
        let taps = FILTERING.taps.pow(2);
        let (rows, columns) = (taps * channels.len(), sizes.other);
        let from = pack::Source {
            at: slot.acc,
            stride: padded as isize,
            step: 1,
        };
        let transposed = slot.scratch.cast::<f32>();
        // SAFETY: all splits have been summed; the block is this worker's, and so is the scratch
        // memory, which begins with room for a block.
        unsafe {
            for (i, channel) in channels.clone().enumerate() {
                (micro.transform_sums)(&Sums {
                    at: self.sums(0).add(channel * padded),
                    splits: self.splits,
                    split: sums(sizes, micro),
                    point: sizes.source * padded,
                    columns: padded,
                    to: slot.acc.add(taps * i * padded),
                });
            }
            (micro.pack)(from, rows, columns, transposed, rows);
            let own = kernel.code.scratch_bytes();
            self.code.block(
                &[0, channels.start, 0, 0],
                0,
                columns,
                rows,
                transposed.cast(),
                rows,
                slot.scratch.add(kernel.space.scratch - own),
            );
        }
    }
}

/// Whether the kernels have three taps an axis (the sums of larger ones take more memory than budgets
/// spare), and the sums are small enough.
pub(super) fn fits(sizes: &Sizes, micro: &Micro) -> bool {
    sizes.axes.iter().all(|axis| axis.taps == FILTERING.taps) && sums(sizes, micro) <= SUMS_MAX
}
