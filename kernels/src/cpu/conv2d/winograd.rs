//! The forward product and the input gradient of 3×3 and 5×5 kernels by Winograd's minimal
//! filtering, which multiplies 4 or 2.25 and 2.78 times less often than [`columns`](super::columns).
//!
//! The shape decides whether it is used and which, so that a layer has the same bits on every number
//! of threads, in every batch and with every workspace. The weights are transformed once for all
//! workers. A worker transforms some small tiles of the image at a time, which it reads where they
//! lie, and multiplies them with one panel of output channels after another; the products of a panel
//! are still in the cache when they are transformed to results. An image that a prologue computes, or
//! whose columns are no neighbours, is copied first.
//!
//! The error of a result against its exact sum is at most `(c + 14)·2⁻²²`, or by F(4×4, 3×3) and for
//! 5×5 kernels `(c + 30)·2⁻¹⁹`, times the sum, over the c source channels, of the magnitudes of its
//! tile's elements times those of the weights, of which the result itself may read a part. On random
//! data it is that of the other kernels, at most 2⁻²¹ of the sum of the result's own magnitudes, or
//! by F(4×4, 3×3) at most 2⁻¹⁸ (`kernels/tests/conv2d/winograd.rs`).

use std::ops::Range;

use super::columns::weight_strides;
use super::image::Image;
use super::stretches::stretches;
use super::tile::{Axis, Part, Parts, Shape};
use super::{Call, Sizes, source, winograd_weight};
use crate::cpu::gemm::drive::{Slot, Space, panel_rows};
use crate::cpu::gemm::micro::{Before, Left, LeftLayout, Micro, Right};
use crate::cpu::gemm::winograd::{Filtering, Kernels, Products, Run, Tiles};
use crate::cpu::gemm::{Limits, even, wanted};
use crate::cpu::tile::Bound;
use crate::spec::{self, ConvKind};

/// Fewest channels on either side: with fewer, the transforms cost more than they save.
const CHANNELS_MIN: usize = 8;
/// Most elements of the transformed weights, which take 1 MiB, and most output channels.
const WEIGHTS_MAX: usize = 256 << 10;
const ROWS_MAX: usize = 256;
/// Fewest rows and columns of results of an image.
const OUT_MIN: usize = 8;
/// Fewest tiles of 4×4 results of an image, which fill a vector even in a batch of one image, and
/// how many times fewer than those of 2×2 results they have to be.
const TILES_MIN: usize = 16;
const TILES_RATIO: usize = 3;
/// Elements of a cache line.
const LINE: usize = 16;
/// Most runs of tiles in a micro-panel.
const RUNS: usize = 32;

/// The filtering by which a convolution is computed by this module, or [`winograd_weight`].
pub(super) fn of(body: &spec::Conv2d, sizes: &Sizes, micro: &Micro) -> Option<Filtering> {
    let [rows, depth] = [sizes.other, sizes.source];
    let is_weight = body.kind == ConvKind::WeightGrad;
    let fits = |filtering: Filtering| filtering.elements() * rows * depth <= WEIGHTS_MAX;
    let filtering = match body.k {
        [3, 3] if !is_weight && fits(Filtering::F4_3) && is_large(sizes) => Filtering::F4_3,
        [3, 3] => Filtering::F2_3,
        [5, 5] => Filtering::F2_5,
        _ => return None,
    };
    let applies = !body.exact
        && body.stride == [1; 2]
        && body.dilation == [1; 2]
        && sizes.fixed
        && sizes.groups == 1
        && rows.min(depth) >= CHANNELS_MIN
        && rows <= ROWS_MAX
        && fits(filtering)
        && sizes.axes.iter().all(|axis| axis.out >= OUT_MIN)
        && (!is_weight || winograd_weight::fits(sizes, micro));
    applies.then_some(filtering)
}

/// Whether F(4×4, 3×3) is faster than F(2×2, 3×3): a tile costs 36 products instead of 16, and the
/// last ones of rows and columns may reach beyond the results.
fn is_large(sizes: &Sizes) -> bool {
    let tiles = |filtering: Filtering| -> usize {
        let along = |axis: &Axis| axis.out.div_ceil(filtering.results);
        sizes.axes.iter().map(along).product()
    };
    let larger = tiles(Filtering::F4_3);
    larger >= TILES_MIN && TILES_RATIO * larger <= tiles(Filtering::F2_3)
}

/// The tiles of an axis as the positions of a convolution whose taps are the elements of a tile and
/// whose stride is the number of its results.
pub(super) fn axes(sizes: &Sizes, filtering: Filtering) -> [Axis; 2] {
    sizes.axes.map(|axis| {
        let tiles = axis.out.div_ceil(filtering.results);
        let geometry = [filtering.points(), filtering.results, 1, 0];
        let mut of_tiles = Axis::forward(axis.source, tiles, geometry);
        of_tiles.pad = axis.pad;
        of_tiles
    })
}

/// Most tiles that are transformed at a time, whole vectors of them.
fn width(micro: &Micro, limits: &Limits) -> usize {
    if limits.is_fastest() {
        micro.nr()
    } else {
        micro.lanes
    }
}

/// Most tiles of a block.
fn most(sizes: &Sizes, filtering: Filtering, micro: &Micro, limits: &Limits) -> usize {
    let (width, results) = (width(micro, limits), filtering.results);
    (limits.acc[0] / sizes.other / (results * results) / width * width).max(width)
}

/// The distance of the elements of transformed tiles, so that those that are written or read
/// together are in different sets of the cache: `elements`, and a cache line.
pub(super) fn point(elements: usize) -> usize {
    elements + LINE
}

/// The buffers for sizes up to these; `copied`: those beside a copy of the image, of which there is
/// none unless it is given; `is_stored`: whether results are transformed to the memory where they
/// stay.
pub(super) fn space(
    sizes: &Sizes,
    filtering: Filtering,
    micro: &Micro,
    limits: &Limits,
    copied: Option<usize>,
    is_stored: bool,
) -> Space {
    let axes = axes(sizes, filtering);
    let (width, depth) = (width(micro, limits), sizes.source);
    let (results, points) = (filtering.results, filtering.elements());
    let [height, length] = [axes[0].out, axes[1].out];
    let of = |rows, columns, images| Shape::new(&axes, depth, rows, columns).elements(images);
    let tile = limits
        .tile
        .max(of(1, width.min(length), 1))
        .min(of(height, length, sizes.images));
    let tiles = sizes.images.saturating_mul(height).saturating_mul(length);
    Space {
        right: copied.map_or(0, |more| tile.next_multiple_of(LINE).saturating_add(more)),
        micro_panel: points * point(depth * width),
        k_block: points * point(micro.mr.min(sizes.other) * width),
        acc: match is_stored {
            true => 0,
            false => (sizes.other)
                .saturating_mul(results * results)
                .saturating_mul(tiles.min(most(sizes, filtering, micro, limits))),
        },
        partial: points * depth * sizes.other,
        ..Space::default()
    }
}

/// One run.
struct Winograd<'a> {
    call: &'a Call<'a>,
    filtering: Filtering,
    axes: [Axis; 2],
    image: Image<'a>,
    parts: Parts,
    /// Output channels of a panel.
    panel: usize,
    /// The transformed weights.
    weights: *mut f32,
    code: Bound<'a>,
}

// SAFETY: operands are only read; panels of the weights and blocks of the result are written by one
// worker each.
unsafe impl Sync for Winograd<'_> {}

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
    let (micro, axes) = (kernel.micro, axes(sizes, filtering));
    let width = width(micro, kernel.limits);
    let threads = kernel.threads.min(launch.team.threads());
    let tiles = sizes.images * axes[0].out * axes[1].out;
    let parts = |most| {
        let channels = sizes.source;
        Parts::new(
            sizes.images,
            &axes,
            channels,
            most,
            kernel.limits.tile,
            width,
        )
    };
    let most = most(sizes, filtering, micro, kernel.limits);
    let mut blocks = parts(most);
    if threads > 1 && blocks.count() < wanted(threads) {
        blocks = parts(even(tiles, tiles.div_ceil(wanted(threads)), width).min(most));
    }
    let resources = call.resources();
    let product = Winograd {
        call,
        filtering,
        axes,
        image: Image::new(call, &axes, source(&body.a, launch.args[0], launch.env)),
        parts: blocks,
        panel: panel_rows(sizes.other, micro.mr),
        weights: resources.partial(),
        code: kernel.code.bind(spec, launch),
    };
    let panels = sizes.other.div_ceil(product.panel);
    // SAFETY: `space` covers sizes up to the bound; operands are valid by the contract of `run`;
    // panels and blocks are one task's each.
    unsafe {
        resources.tasks(panels, false, |panel, _, _| {
            product.transform_weights(panel)
        });
        resources.tasks(blocks.count(), false, |block, slot, _| {
            product.block(block, slot)
        });
    }
}

impl Winograd<'_> {
    fn rows(&self, panel: usize) -> Range<usize> {
        let first = panel * self.panel;
        first..(first + self.panel).min(self.call.sizes.other)
    }

    /// The transformed weights of a panel.
    fn weights(&self, panel: usize) -> *mut f32 {
        let before = self.filtering.elements() * self.call.sizes.source * self.rows(panel).start;
        self.weights.wrapping_add(before)
    }

    unsafe fn transform_weights(&self, panel: usize) {
        let (call, rows) = (self.call, self.rows(panel));
        let weight = source(
            &call.body.b,
            call.launch.args[call.body.sources()],
            call.launch.env,
        );
        let (at, [row, channel, kernel_row, kernel_column]) = weight_strides(call, &weight, 0);
        // By their distance from the first element of the image that a result reads.
        let (mut taps, size) = (<[isize; _]>::default(), self.filtering.taps);
        for tap in 0..size * size {
            let [i, j] = [tap / size, tap % size];
            let [down, right] = [call.sizes.axes[0].offset(i), call.sizes.axes[1].offset(j)];
            taps[size * down + right] = i as isize * kernel_row + j as isize * kernel_column;
        }
        let kernels = Kernels {
            at: at.wrapping_offset(rows.start as isize * row),
            rows: rows.len(),
            row,
            channels: call.sizes.source,
            channel,
            taps,
            to: self.weights(panel),
        };
        // SAFETY: these are elements of the weight, and the panel is this worker's.
        unsafe { (call.kernel.micro.transforms(self.filtering).kernels)(&kernels) };
    }

    /// Computes the results of a part of the tiles.
    unsafe fn block(&self, block: usize, slot: &Slot) {
        let Call { sizes, kernel, .. } = *self.call;
        let (micro, depth) = (kernel.micro, sizes.source);
        let width = width(micro, kernel.limits);
        let (transforms, filtering) = (micro.transforms(self.filtering), self.filtering);
        let elements = filtering.elements();
        let part = self.parts.get(block);
        let results = [(&part.rows, 0), (&part.columns, 1)].map(|(range, axis)| {
            let end = (filtering.results * range.end).min(sizes.axes[axis].out);
            filtering.results * range.start..end
        });
        let [high, wide] = [results[0].len(), results[1].len()];
        let origin = [part.images.start, 0, results[0].start, results[1].start];
        let stored = self.code.stored(&origin);
        let stored = stored.filter(|(_, strides)| strides[3] == 1);
        let stride = part.images.len() * high * wide;
        // The results of the block, and the distances of images, channels and rows.
        let (to, [image_stride, row_stride, pitch]) = match stored {
            Some((at, strides)) => (at, [strides[0], strides[1], strides[2]]),
            None => (slot.acc, [high * wide, stride, wide].map(|n| n as isize)),
        };
        // SAFETY: buffers have the sizes of `space`.
        unsafe {
            let end = slot.right.add(kernel.space.right);
            let image = self.image.dense(0..depth, &part, slot.right, end);
            for first in (0..part.len()).step_by(width) {
                let count = (part.len() - first).min(width);
                let width = micro.width(count);
                let chunk = first..first + count;
                let stretches =
                    stretches(&image, &self.axes, &part, chunk.clone(), filtering, micro);
                let tiles = Tiles {
                    at: image.at,
                    channels: depth,
                    channel: image.strides[1],
                    row: image.strides[2],
                    stretches: stretches.all(),
                    ends: stretches.ends(width / micro.lanes),
                    to: slot.micro_panel,
                    point: point(depth * width),
                };
                (transforms.tiles)(&tiles);
                let mut runs = [Run::default(); RUNS];
                let strides = [image_stride, pitch];
                let runs = self.runs(&part, chunk, [high, wide], strides, &mut runs);
                for panel in 0..sizes.other.div_ceil(self.panel) {
                    let rows = self.rows(panel);
                    for e in 0..elements {
                        let left = Left::packed(self.weights(panel).add(e * depth * rows.len()));
                        let right =
                            Right::packed(slot.micro_panel.add(e * point(depth * width)), width);
                        let sums = slot.k_block.add(e * point(rows.len() * width));
                        micro.kernel(LeftLayout::Packed, rows.len(), &right, width)(
                            depth,
                            left,
                            right,
                            sums,
                            width,
                            Before::Nothing,
                        );
                    }
                    let products = Products {
                        at: slot.k_block,
                        point: point(rows.len() * width),
                        rows: rows.len(),
                        width,
                        runs,
                        to: to.wrapping_offset(rows.start as isize * row_stride),
                        row: row_stride,
                        pitch,
                    };
                    (transforms.products)(&products);
                }
            }
            if stored.is_some() {
                return;
            }
            let positions = high * wide;
            // A part of a row of tiles is a part of each of its rows.
            let (runs, columns) = if wide == sizes.axes[1].out {
                (1, positions)
            } else {
                (high, wide)
            };
            for (i, image) in part.images.clone().enumerate() {
                for run in 0..runs {
                    let origin = [image, 0, results[0].start + run, results[1].start];
                    self.code.block(
                        &origin,
                        1,
                        sizes.other,
                        columns,
                        slot.acc.add(i * positions + run * columns).cast(),
                        stride,
                        slot.scratch,
                    );
                }
            }
        }
    }

    /// The runs of some tiles of a part, whose results are `high` rows and `wide` columns, with the
    /// distances of images and rows.
    fn runs<'a>(
        &self,
        part: &Part,
        tiles: Range<usize>,
        [high, wide]: [usize; 2],
        [image_stride, pitch]: [isize; 2],
        to: &'a mut [Run; RUNS],
    ) -> &'a [Run] {
        let (results, lanes, columns, rows) = (
            self.filtering.results,
            self.call.kernel.micro.lanes,
            part.columns.len(),
            part.rows.len(),
        );
        let (mut tile, mut count) = (tiles.start, 0);
        while tile < tiles.end {
            let (image, row, column) =
                (tile / columns / rows, tile / columns % rows, tile % columns);
            let at = tile - tiles.start;
            let length = (columns - column)
                .min(lanes - at % lanes)
                .min(tiles.end - tile);
            to[count] = Run {
                vector: at / lanes,
                lane: at % lanes,
                offset: image as isize * image_stride
                    + (results * row) as isize * pitch
                    + (results * column) as isize,
                columns: (results * length).min(wide - results * column),
                rows: results.min(high - results * row),
            };
            (tile, count) = (tile + length, count + 1);
        }
        &to[..count]
    }
}
