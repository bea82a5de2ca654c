//! The forward product and the input gradient of 3×3 kernels of many channels over small images by
//! Winograd's minimal filtering, as in [`winograd`](super::winograd), of weights that no cache holds.
//!
//! A pass computes some tiles, as many as a block of the micro-kernels is wide. A worker transforms
//! the tiles of a pass itself, because handing them from core to core takes longer, and keeps them
//! for all output channels. It transforms the weights of some channels, multiplies them with the
//! tiles while they are in the cache, requests the next ones meanwhile, and continues the sums with
//! these. Vectors hold tiles or, if there are few in the batch, output channels. Sums have the same
//! order either way, and errors the same bound.

use std::ops::{Range, RangeInclusive};

use super::image::Image;
use super::stretches::stretches;
use super::tile::{Axis, Part, Parts};
use super::winograd::{RUNS, Results, Weights, axes, copy_space, panel, point, width};
use super::{Call, Sizes, source};
use crate::cpu::gemm::Limits;
use crate::cpu::gemm::drive::panel_rows;
use crate::cpu::gemm::micro::{Before, Left, LeftLayout, Micro, Right};
use crate::cpu::gemm::winograd::{Filtering, Products, Run, Tiles};
use crate::cpu::gemm::workspace::{Slot, Space};
use crate::cpu::tile::Bound;

/// Most channels of the image, whose transformed tiles stay in the second cache, and fewest output
/// channels.
const DEPTH_MAX: usize = 256;
const ROWS_MIN: usize = 64;
/// Rows and columns of results of an image.
const OUT: RangeInclusive<usize> = 4..=7;
/// Results of an image for each of its tiles, at least, of the four that a tile has.
const RESULTS_MIN: usize = 3;
/// Panels whose weights are transformed at a time.
const PANELS: usize = 2;
/// Channels whose weights are transformed at a time, as a part of the steps of a sub-block.
const CHUNK_PART: usize = 8;
/// The same if vectors hold output channels.
const FEW_CHANNELS: usize = 16;
/// Most lanes of a vector.
const LANES: usize = 16;

/// Whether a convolution is computed by this module, if its weights do not fit.
pub(super) fn applies(sizes: &Sizes, filtering: Filtering) -> bool {
    let outs = sizes.axes.map(|axis| axis.out);
    let tiles: usize = axes(sizes, filtering).iter().map(|axis| axis.out).product();
    filtering == Filtering::F2_3
        && sizes.source <= DEPTH_MAX
        && sizes.other >= ROWS_MIN
        && outs.iter().all(|out| OUT.contains(out))
        && RESULTS_MIN * tiles <= outs.iter().product()
}

/// The sizes of the loops.
#[derive(Clone, Copy)]
struct Blocks {
    /// Most tiles of a pass.
    width: usize,
    /// Output channels of a task, and of a panel.
    rows: usize,
    panel: usize,
    /// Channels whose weights are transformed at a time.
    chunk: usize,
    /// Channels whose tiles are transformed at a time. If they are all, the tiles are kept for the
    /// other tasks of the pass.
    depth: usize,
    /// Most tiles of a pass for which vectors hold output channels.
    few: usize,
}

impl Blocks {
    fn new(sizes: &Sizes, micro: &Micro, limits: &Limits) -> Self {
        let chunk = (limits.kc / CHUNK_PART).min(sizes.source);
        let (depth, few) = match limits.is_fastest() {
            true => (sizes.source, micro.lanes),
            false => (chunk, 0),
        };
        Blocks {
            width: width(micro, limits),
            rows: micro.nr().min(sizes.other),
            panel: panel(sizes, micro),
            chunk,
            depth,
            few,
        }
    }
}

/// The buffers for sizes up to these, as for [`winograd`](super::winograd::space).
pub(super) fn space(
    sizes: &Sizes,
    filtering: Filtering,
    micro: &Micro,
    limits: &Limits,
    copied: Option<usize>,
    is_stored: bool,
) -> Space {
    let blocks = Blocks::new(sizes, micro, limits);
    let Blocks {
        rows,
        panel,
        chunk,
        depth,
        ..
    } = blocks;
    let axes = axes(sizes, filtering);
    let [height, length] = [axes[0].out, axes[1].out];
    let tiles = sizes.images.saturating_mul(height).saturating_mul(length);
    let tiles = tiles.min(blocks.width);
    let (width, few) = (micro.width(tiles), tiles.min(blocks.few));
    let of_few = |elements: usize| if few > 0 { elements } else { 0 };
    let points = filtering.elements();
    let weights = PANELS * panel * chunk;
    let few_weights = FEW_CHANNELS * micro.width(rows);
    let sums = rows.div_ceil(panel) * point(panel * width);
    let few_sums = point(few * micro.width(rows)) + point(rows * micro.lanes);
    Space {
        left: points * weights.max(of_few(few_weights)),
        right: copy_space(sizes, &axes, [chunk, blocks.width], limits, copied),
        micro_panel: points * point(depth * width),
        k_block: points * sums.max(of_few(few_sums)),
        acc: match is_stored {
            true => 0,
            false => filtering.results * filtering.results * rows * tiles,
        },
        ..Space::default()
    }
}

/// One run.
struct Passes<'a> {
    call: &'a Call<'a>,
    filtering: Filtering,
    axes: [Axis; 2],
    blocks: Blocks,
    image: Image<'a>,
    weights: Weights,
    /// Whether vectors hold output channels.
    is_few: bool,
    code: Bound<'a>,
}

// SAFETY: operands are only read; channels of the result are written by one worker each.
unsafe impl Sync for Passes<'_> {}

/// # Safety
/// By the contract of the kernel's `run`.
pub(super) unsafe fn run(call: &Call, filtering: Filtering) {
    let Call {
        spec,
        body,
        launch,
        sizes,
        kernel,
    } = *call;
    let axes = axes(sizes, filtering);
    let blocks = Blocks::new(sizes, kernel.micro, kernel.limits);
    let (width, tile) = (blocks.width, kernel.limits.tile);
    let parts = Parts::new(sizes.images, &axes, blocks.chunk, width, tile, width);
    let product = Passes {
        call,
        filtering,
        axes,
        blocks,
        image: Image::new(call, &axes, source(&body.a, launch.args[0], launch.env)),
        weights: Weights::new(call, filtering),
        is_few: parts.most() <= blocks.few,
        code: kernel.code.bind(spec, launch),
    };
    let tasks = sizes.other.div_ceil(blocks.rows);
    let run = |task: usize, slot: &Slot, resident: &mut usize| {
        let (pass, rows) = (task / tasks, task % tasks * blocks.rows);
        let rows = rows..(rows + blocks.rows).min(sizes.other);
        let is_kept = std::mem::replace(resident, pass) == pass;
        // SAFETY: `space` covers sizes up to the bound; operands are valid by the contract of `run`;
        // blocks of the result are one task's each.
        unsafe { product.task(&parts.get(pass), rows, is_kept, slot) };
    };
    // SAFETY: as above.
    unsafe { call.resources().tasks(parts.count() * tasks, false, run) };
}

impl Passes<'_> {
    /// Computes the results of some output channels of a part of the tiles; `is_kept`: whether the
    /// task before had the same part.
    unsafe fn task(&self, part: &Part, rows: Range<usize>, is_kept: bool, slot: &Slot) {
        let Call { sizes, kernel, .. } = *self.call;
        let (micro, filtering, depth) = (kernel.micro, self.filtering, sizes.source);
        let width = micro.width(part.len());
        let results = Results::new(self.call, &self.code, filtering, part, rows.clone(), slot);
        let mut runs = [Run::default(); RUNS];
        let runs = results.runs(0..part.len(), micro.lanes, &mut runs);
        // SAFETY: buffers have the sizes of `space`.
        unsafe {
            for first in (0..depth).step_by(self.blocks.depth) {
                let channels = first..(first + self.blocks.depth).min(depth);
                if !is_kept || channels.len() < depth {
                    self.transform_tiles(part, channels.clone(), slot);
                }
                match self.is_few {
                    true => self.multiply_few(part.len(), &rows, slot),
                    false => self.multiply(&rows, channels, width, slot),
                }
            }
            let products = |rows: Range<usize>, at: *const f32| {
                let products = Products {
                    at,
                    point: point(rows.len() * width),
                    rows: rows.len(),
                    width,
                    runs,
                    to: results.row(rows.start),
                    row: results.strides[1],
                    pitch: results.strides[2],
                };
                (micro.transforms(filtering).products)(&products);
            };
            match self.is_few {
                true => products(
                    rows.clone(),
                    self.transpose_few(part.len(), rows.len(), slot),
                ),
                false => (self.panels(&rows))
                    .for_each(|(i, rows)| products(rows, self.sums(i, width, slot))),
            }
            results.finish(slot.scratch);
        }
    }

    /// Transforms the tiles of some channels.
    unsafe fn transform_tiles(&self, part: &Part, channels: Range<usize>, slot: &Slot) {
        let Call { kernel, .. } = *self.call;
        let (micro, filtering) = (kernel.micro, self.filtering);
        let width = micro.width(part.len());
        for first in channels.clone().step_by(self.blocks.chunk) {
            let some = first..(first + self.blocks.chunk).min(channels.end);
            // SAFETY: buffers have the sizes of `space`.
            unsafe {
                let end = slot.right.add(kernel.space.right);
                let image = self.image.dense(some.clone(), part, slot.right, end);
                let tiles = 0..part.len();
                let stretches = stretches(&image, &self.axes, part, tiles, filtering, micro);
                let tiles = Tiles {
                    at: image.at.wrapping_offset(first as isize * image.strides[1]),
                    channels: some.len(),
                    channel: image.strides[1],
                    row: image.strides[2],
                    stretches: stretches.all(),
                    ends: stretches.ends(width / micro.lanes),
                    to: slot.micro_panel.add((first - channels.start) * width),
                    point: point(channels.len() * width),
                };
                (micro.transforms(filtering).tiles)(&tiles);
            }
        }
    }

    /// The panels of a task, with their numbers.
    fn panels(&self, rows: &Range<usize>) -> impl Iterator<Item = (usize, Range<usize>)> {
        let (panel, end) = (self.blocks.panel, rows.end);
        let of = move |(i, first): (usize, usize)| (i, first..(first + panel).min(end));
        rows.clone().step_by(panel).enumerate().map(of)
    }

    /// The sums of a panel.
    fn sums(&self, panel: usize, width: usize, slot: &Slot) -> *mut f32 {
        let of_panel = self.filtering.elements() * point(self.blocks.panel * width);
        slot.k_block.wrapping_add(panel * of_panel)
    }

    /// Adds the products of some channels to the sums.
    unsafe fn multiply(
        &self,
        rows: &Range<usize>,
        channels: Range<usize>,
        width: usize,
        slot: &Slot,
    ) {
        let Call { sizes, kernel, .. } = *self.call;
        let (micro, elements) = (kernel.micro, self.filtering.elements());
        let Blocks { panel, chunk, .. } = self.blocks;
        let groups = rows.len().div_ceil(PANELS * panel);
        // The weights that are transformed at a time; after the last, those of the next task.
        let block = |number: usize| {
            let (rows, number) = match channels.start + number / groups * chunk < channels.end {
                true => (rows.clone(), number),
                false => (rows.end..sizes.other, 0),
            };
            let first = channels.start + number / groups * chunk;
            let row = rows.start + number % groups * PANELS * panel;
            let some = first..(first + chunk).min(channels.end);
            (
                row.min(rows.end)..(row + PANELS * panel).min(rows.end),
                some,
            )
        };
        for number in 0..channels.len().div_ceil(chunk) * groups {
            let (some_rows, some) = block(number);
            let next = block(number + 1);
            let before = match some.start {
                0 => Before::Nothing,
                _ => Before::Sums,
            };
            let first = (some_rows.start - rows.start) / panel;
            let tiles = (slot.micro_panel).wrapping_add((some.start - channels.start) * width);
            let weights = |i: usize| slot.left.wrapping_add(i * elements * panel * chunk);
            // SAFETY: buffers have the sizes of `space`.
            unsafe {
                for (i, rows) in self.panels(&some_rows) {
                    let width = rows.len();
                    (self.weights).transform(rows, some.clone(), weights(i), width);
                }
                for e in 0..elements {
                    // The next weights come from memory meanwhile.
                    self.weights.request(&next.0, &next.1, e, elements);
                    for (i, rows) in self.panels(&some_rows) {
                        let left = Left::packed(weights(i).add(e * some.len() * rows.len()));
                        let right = tiles.add(e * point(channels.len() * width));
                        let right = Right::packed(right, width);
                        let sums = self.sums(first + i, width, slot);
                        micro.kernel(LeftLayout::Packed, rows.len(), &right, width)(
                            some.len(),
                            left,
                            right,
                            sums.add(e * point(rows.len() * width)),
                            width,
                            before,
                        );
                    }
                }
            }
        }
    }

    /// Multiplies a vector of tiles, of which `count` are used, with output channels along vectors.
    unsafe fn multiply_few(&self, count: usize, rows: &Range<usize>, slot: &Slot) {
        let Call { sizes, kernel, .. } = *self.call;
        let (micro, depth, elements) = (kernel.micro, sizes.source, self.filtering.elements());
        let (lanes, width) = (micro.lanes, micro.width(rows.len()));
        let panel = panel_rows(count, micro.mr);
        let columns: [i32; LANES] = std::array::from_fn(|i| i as i32);
        let steps: [i32; FEW_CHANNELS] = std::array::from_fn(|k| (k * lanes) as i32);
        for first in (0..depth).step_by(FEW_CHANNELS) {
            let channels = first..(first + FEW_CHANNELS).min(depth);
            let before = match first {
                0 => Before::Nothing,
                _ => Before::Sums,
            };
            // SAFETY: buffers have the sizes of `space`.
            unsafe {
                self.weights
                    .transform(rows.clone(), channels.clone(), slot.left, width);
                let next = match channels.end < depth {
                    true => (rows.clone(), channels.end),
                    false => (rows.end..(rows.end + rows.len()).min(sizes.other), 0),
                };
                let next = (next.0, next.1..(next.1 + FEW_CHANNELS).min(depth));
                for e in 0..elements {
                    self.weights.request(&next.0, &next.1, e, elements);
                    let right = Right::packed(slot.left.add(e * channels.len() * width), width);
                    let tiles = slot
                        .micro_panel
                        .add(e * point(depth * lanes) + first * lanes);
                    for tile in (0..count).step_by(panel) {
                        let left =
                            Left::indirect(tiles.add(tile), columns.as_ptr(), steps.as_ptr());
                        let rows = panel.min(count - tile);
                        let sums = slot.k_block.add(e * point(count * width) + tile * width);
                        micro.kernel(LeftLayout::Indirect, rows, &right, width)(
                            channels.len(),
                            left,
                            right,
                            sums,
                            width,
                            before,
                        );
                    }
                }
            }
        }
    }

    /// Transposes the sums of [`Self::multiply_few`] to those of `rows` output channels, each a vector
    /// of tiles.
    unsafe fn transpose_few(&self, count: usize, rows: usize, slot: &Slot) -> *const f32 {
        let Call { kernel, .. } = *self.call;
        let (lanes, width) = (kernel.micro.lanes, kernel.micro.width(rows));
        let elements = self.filtering.elements();
        let transposed = slot.k_block.wrapping_add(elements * point(count * width));
        for e in 0..elements {
            let sums = slot.k_block.wrapping_add(e * point(count * width));
            let to = transposed.wrapping_add(e * point(rows * lanes));
            for (row, tile) in (0..rows).flat_map(|row| (0..count).map(move |tile| (row, tile))) {
                // SAFETY: buffers have the sizes of `space`.
                unsafe { *to.add(row * lanes + tile) = *sums.add(tile * width + row) };
            }
        }
        transposed
    }
}
