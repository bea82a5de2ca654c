//! The forward product and the input gradient of 3×3 and 5×5 kernels by Winograd's minimal
//! filtering, which multiplies 4 or 2.25 and 2.78 times less often than
//! [`columns`](super::columns).
//!
//! The shape decides whether it is used and which, so that a layer has the same bits on every
//! number of threads, in every batch and with every workspace. The weights are transformed once for
//! all workers. A worker transforms some small tiles of the image at a time, which it reads in
//! place, and multiplies them with one panel of output channels after another; the products of a
//! panel are still in the cache when they are transformed to results. An image that a prologue
//! computes, or whose columns are no neighbours, is copied first.
//!
//! The error of a result against its exact sum is at most `(c + 14)·2⁻²²`, or by F(4×4, 3×3) and
//! for 5×5 kernels `(c + 30)·2⁻¹⁹`, times the sum, over the c source channels, of the magnitudes of
//! its tile's elements times those of the weights, of which the result itself may read a part. On
//! random data it is that of the other kernels, at most 2⁻²¹ of the sum of the result's own
//! magnitudes, or by F(4×4, 3×3) at most 2⁻¹⁸ (`kernels/tests/conv2d/winograd.rs`).

use std::ops::Range;

use super::columns::weight_strides;
use super::image::Image;
use super::stretches::stretches;
use super::tile::{Axis, Part, Parts, Shape};
use super::{Call, Sizes, source, winograd_panels, winograd_weight};
use crate::cpu::gemm::drive::panel_rows;
use crate::cpu::gemm::micro::{Before, Left, LeftLayout, Micro, Right};
use crate::cpu::gemm::winograd::{
    Filtering, Kernels, Products, Run, TAPS_MAX, Tiles, TransformKernels,
};
use crate::cpu::gemm::workspace::{Slot, Space};
use crate::cpu::gemm::{Limits, even, wanted};
use crate::cpu::tile::{Bound, prefetch};
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
/// Most output channels of a panel: the sums of 36 elements of a tile stay in the first cache, and
/// the weights of two channels of the image fill the widest vector.
const PANEL: usize = 8;
/// Elements of a cache line.
const LINE: usize = 16;
/// Most runs of tiles in a micro-panel.
pub(super) const RUNS: usize = 32;

/// The filtering by which a convolution is computed by this module, or [`winograd_weight`].
pub(super) fn of(body: &spec::Conv2d, sizes: &Sizes, micro: &Micro) -> Option<Filtering> {
    let [rows, depth] = [sizes.other, sizes.source];
    let is_weight = body.kind == ConvKind::WeightGrad;
    let filtering = match body.k {
        [3, 3] if !is_weight && fits(sizes, Filtering::F4_3) && is_large(sizes) => Filtering::F4_3,
        [3, 3] => Filtering::F2_3,
        [5, 5] => Filtering::F2_5,
        _ => return None,
    };
    let applies = !body.exact
        && body.stride == [1; 2]
        && body.dilation == [1; 2]
        && sizes.fixed
        && sizes.groups == 1
        && match fits(sizes, filtering) {
            true => {
                rows.min(depth) >= CHANNELS_MIN
                    && rows <= ROWS_MAX
                    && sizes.axes.iter().all(|axis| axis.out >= OUT_MIN)
                    && (!is_weight || winograd_weight::fits(sizes, micro))
            }
            false => !is_weight && winograd_panels::applies(sizes, filtering),
        };
    applies.then_some(filtering)
}

/// Whether the transformed weights of all output channels are few enough to be kept.
fn fits(sizes: &Sizes, filtering: Filtering) -> bool {
    filtering.elements() * sizes.other * sizes.source <= WEIGHTS_MAX
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
pub(super) fn width(micro: &Micro, limits: &Limits) -> usize {
    if limits.is_fastest() {
        micro.nr()
    } else {
        micro.lanes
    }
}

/// Output channels of a panel.
pub(super) fn panel(sizes: &Sizes, micro: &Micro) -> usize {
    panel_rows(sizes.other, micro.mr.min(PANEL))
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

/// Elements of the copy of some channels of a tile of the image, and of `copied` beside it; none if
/// there is no copy.
pub(super) fn copy_space(
    sizes: &Sizes,
    axes: &[Axis; 2],
    [channels, width]: [usize; 2],
    limits: &Limits,
    copied: Option<usize>,
) -> usize {
    let [height, length] = [axes[0].out, axes[1].out];
    let of = |rows, columns, images| Shape::new(axes, channels, rows, columns).elements(images);
    let tile = limits
        .tile
        .max(of(1, width.min(length), 1))
        .min(of(height, length, sizes.images));
    copied.map_or(0, |more| tile.next_multiple_of(LINE).saturating_add(more))
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
    if !fits(sizes, filtering) {
        return winograd_panels::space(sizes, filtering, micro, limits, copied, is_stored);
    }
    let axes = axes(sizes, filtering);
    let (width, depth) = (width(micro, limits), sizes.source);
    let (results, points) = (filtering.results, filtering.elements());
    let [height, length] = [axes[0].out, axes[1].out];
    let tiles = sizes.images.saturating_mul(height).saturating_mul(length);
    Space {
        right: copy_space(sizes, &axes, [depth, width], limits, copied),
        micro_panel: points * point(depth * width),
        k_block: points * point(panel(sizes, micro) * width),
        acc: match is_stored {
            true => 0,
            false => (sizes.other)
                .saturating_mul(results * results)
                .saturating_mul(tiles.min(most(sizes, filtering, micro, limits))),
        },
        shared: points * depth * sizes.other,
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
    weights: Weights,
    transformed: *mut f32,
    code: Bound<'a>,
}

// SAFETY: operands are only read; panels of the weights and blocks of the result are written by one
// worker each.
unsafe impl Sync for Winograd<'_> {}

/// # Safety
/// By the contract of the kernel's `run`.
pub(super) unsafe fn run(call: &Call, filtering: Filtering) {
    if !fits(call.sizes, filtering) {
        // SAFETY: the caller's promise.
        return unsafe { winograd_panels::run(call, filtering) };
    }
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
        panel: panel(sizes, micro),
        weights: Weights::new(call, filtering),
        transformed: resources.shared(),
        code: kernel.code.bind(spec, launch),
    };
    let panels = sizes.other.div_ceil(product.panel);
    // SAFETY: `space` covers sizes up to the bound; operands are valid by the contract of `run`;
    // panels and blocks are one task's each.
    unsafe {
        resources.tasks(panels, false, |panel, _, _| {
            let (rows, to) = (product.rows(panel), product.transformed(panel));
            let width = rows.len();
            (product.weights).transform(rows, 0..sizes.source, to, width)
        });
        resources.tasks(blocks.count(), false, |block, slot, _| {
            product.block(block, slot)
        });
    }
}

/// The weights of one run.
pub(super) struct Weights {
    at: *const f32,
    row: isize,
    channel: isize,
    /// See [`Kernels::taps`].
    taps: [isize; TAPS_MAX * TAPS_MAX],
    transform: TransformKernels,
    lanes: usize,
}

impl Weights {
    pub fn new(call: &Call, filtering: Filtering) -> Self {
        let weight = source(
            &call.body.b,
            call.launch.args[call.body.sources()],
            call.launch.env,
        );
        let (at, [row, channel, kernel_row, kernel_column]) = weight_strides(call, &weight, 0);
        // By their distance from the first element of the image that a result reads.
        let (mut taps, size) = (<[isize; _]>::default(), filtering.taps);
        for tap in 0..size * size {
            let [i, j] = [tap / size, tap % size];
            let [down, right] = [call.sizes.axes[0].offset(i), call.sizes.axes[1].offset(j)];
            taps[size * down + right] = i as isize * kernel_row + j as isize * kernel_column;
        }
        let micro = call.kernel.micro;
        Weights {
            at,
            row,
            channel,
            taps,
            transform: micro.transforms(filtering).kernels,
            lanes: micro.lanes,
        }
    }

    /// Requests the cache lines of one of `parts` parts of the weights of some output channels for
    /// some channels of the image.
    pub fn request(&self, rows: &Range<usize>, channels: &Range<usize>, part: usize, parts: usize) {
        let [outer, inner] = match self.row.abs() < self.channel.abs() {
            true => [(channels, self.channel), (rows, self.row)],
            false => [(rows, self.row), (channels, self.channel)],
        };
        let (indices, stride) = outer;
        let share = indices.len().div_ceil(parts);
        let first = (indices.start + part * share).min(indices.end);
        let step = inner.1.unsigned_abs().max(LINE);
        let steps = (inner.0.len() * inner.1.unsigned_abs()).div_ceil(step);
        for index in first..(first + share).min(indices.end) {
            let before = index as isize * stride + inner.0.start as isize * inner.1;
            let at = self.at.wrapping_offset(before);
            for i in 0..steps {
                prefetch(
                    at.wrapping_offset(inner.1.signum() * (i * step) as isize)
                        .cast(),
                );
            }
        }
    }

    /// Transforms the weights of some output channels for some channels of the image, `width`
    /// elements from channel to channel.
    ///
    /// # Safety
    /// The weights may be read, and `to` has room for the transformed ones.
    pub unsafe fn transform(
        &self,
        rows: Range<usize>,
        channels: Range<usize>,
        to: *mut f32,
        width: usize,
    ) {
        let before = channels.start as isize * self.channel;
        for first in rows.clone().step_by(self.lanes) {
            let kernels = Kernels {
                at: self.at.wrapping_offset(first as isize * self.row + before),
                rows: self.lanes.min(rows.end - first),
                row: self.row,
                channels: channels.len(),
                channel: self.channel,
                taps: self.taps,
                to: to.wrapping_add(first - rows.start),
                width,
            };
            // SAFETY: the caller's promise.
            unsafe { (self.transform)(&kernels) };
        }
    }
}

impl Winograd<'_> {
    fn rows(&self, panel: usize) -> Range<usize> {
        let first = panel * self.panel;
        first..(first + self.panel).min(self.call.sizes.other)
    }

    /// The transformed weights of a panel.
    fn transformed(&self, panel: usize) -> *mut f32 {
        let before = self.filtering.elements() * self.call.sizes.source * self.rows(panel).start;
        self.transformed.wrapping_add(before)
    }

    /// Computes the results of a part of the tiles.
    unsafe fn block(&self, block: usize, slot: &Slot) {
        let Call { sizes, kernel, .. } = *self.call;
        let (micro, depth) = (kernel.micro, sizes.source);
        let width = width(micro, kernel.limits);
        let (transforms, filtering) = (micro.transforms(self.filtering), self.filtering);
        let elements = filtering.elements();
        let part = self.parts.get(block);
        let results = Results::new(
            self.call,
            &self.code,
            filtering,
            &part,
            0..sizes.other,
            slot,
        );
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
                let runs = results.runs(chunk, micro.lanes, &mut runs);
                for panel in 0..sizes.other.div_ceil(self.panel) {
                    let rows = self.rows(panel);
                    for e in 0..elements {
                        let left =
                            Left::packed(self.transformed(panel).add(e * depth * rows.len()));
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
                        to: results.row(rows.start),
                        row: results.strides[1],
                        pitch: results.strides[2],
                    };
                    (transforms.products)(&products);
                }
            }
            results.finish(slot.scratch);
        }
    }
}

/// The results of some output channels of a part of the tiles, where they are stored or in a
/// buffer.
pub(super) struct Results<'a> {
    code: &'a Bound<'a>,
    filtering: Filtering,
    part: &'a Part,
    channels: Range<usize>,
    /// Rows and columns of results.
    ranges: [Range<usize>; 2],
    /// Columns of an image.
    columns: usize,
    is_stored: bool,
    pub to: *mut f32,
    /// The distances of images, channels and rows.
    pub strides: [isize; 3],
}

impl<'a> Results<'a> {
    pub fn new(
        call: &Call,
        code: &'a Bound<'a>,
        filtering: Filtering,
        part: &'a Part,
        channels: Range<usize>,
        slot: &Slot,
    ) -> Self {
        let axes = &call.sizes.axes;
        let ranges = [(&part.rows, 0), (&part.columns, 1)].map(|(range, axis)| {
            let end = (filtering.results * range.end).min(axes[axis].out);
            filtering.results * range.start..end
        });
        let [high, wide] = [ranges[0].len(), ranges[1].len()];
        let origin = [
            part.images.start,
            channels.start,
            ranges[0].start,
            ranges[1].start,
        ];
        let stored = code.stored(&origin);
        let stored = stored.filter(|(_, strides)| strides[3] == 1);
        let stride = part.images.len() * high * wide;
        let (to, strides) = match stored {
            Some((at, strides)) => (at, [strides[0], strides[1], strides[2]]),
            None => (slot.acc, [high * wide, stride, wide].map(|n| n as isize)),
        };
        Results {
            code,
            filtering,
            part,
            channels,
            ranges,
            columns: axes[1].out,
            is_stored: stored.is_some(),
            to,
            strides,
        }
    }

    /// The first result of one of the channels.
    pub fn row(&self, channel: usize) -> *mut f32 {
        let row = channel - self.channels.start;
        self.to.wrapping_offset(row as isize * self.strides[1])
    }

    /// Passes the results to the epilogue, unless they are stored.
    ///
    /// # Safety
    /// They are computed, no other thread touches these points, and `scratch` has room for the
    /// code.
    pub unsafe fn finish(&self, scratch: *mut u8) {
        if self.is_stored {
            return;
        }
        let [high, wide] = [self.ranges[0].len(), self.ranges[1].len()];
        let positions = high * wide;
        // A part of a row of tiles is a part of each of its rows.
        let (runs, columns) = if wide == self.columns {
            (1, positions)
        } else {
            (high, wide)
        };
        for (i, image) in self.part.images.clone().enumerate() {
            for run in 0..runs {
                let [row, column] = [self.ranges[0].start + run, self.ranges[1].start];
                let at = self.to.wrapping_add(i * positions + run * columns);
                // SAFETY: the caller's promise.
                unsafe {
                    self.code.block(
                        &[image, self.channels.start, row, column],
                        1,
                        self.channels.len(),
                        columns,
                        at.cast(),
                        self.part.images.len() * positions,
                        scratch,
                    )
                };
            }
        }
    }

    /// The runs of some tiles of the part.
    pub fn runs<'r>(
        &self,
        tiles: Range<usize>,
        lanes: usize,
        to: &'r mut [Run; RUNS],
    ) -> &'r [Run] {
        let ([image_stride, _, pitch], results) = (self.strides, self.filtering.results);
        let [high, wide] = [self.ranges[0].len(), self.ranges[1].len()];
        let (columns, rows) = (self.part.columns.len(), self.part.rows.len());
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
