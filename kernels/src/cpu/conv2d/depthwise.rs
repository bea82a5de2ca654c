//! Depthwise convolutions, in which every channel is a separate group, and their gradients: rows of
//! a tile times single weights.
//!
//! A task computes some channels of a part of the output positions. The forward product and the
//! input gradient pass its block of sums to the epilogue as [`columns`](super::columns) does,
//! phases of an input gradient included. The weight gradient computes channels over all positions,
//! with a vector of sums for each weight. Where results are as large as the image, no tile is
//! needed ([`in_place`](super::in_place)).

use std::ops::Range;

use super::columns::{Columns, columns, is_phased, phases};
use super::in_place::InPlace;
use super::tile::{Axis, Parts, Shape, Source, fill};
use super::{Call, Sizes, source};
use crate::cpu::MicroBatchLimits;
use crate::cpu::gemm::drive::Product;
use crate::cpu::gemm::micro::Micro;
use crate::cpu::gemm::planes::Planes;
use crate::cpu::gemm::workspace::{Slot, Space};
use crate::cpu::gemm::{ACC_ELEMENTS, IMAGE_TILE_ELEMENTS, even, wanted};
use crate::cpu::tile::Bound;
use crate::spec::ConvKind;

/// Most channels of a block: rows that the epilogue processes at a time.
const CHANNELS: usize = 64;
/// Elements that tables are rounded up to, and the lanes of the widest vector.
const LANES: usize = 16;

/// Most channels of a block whose tiles of whole planes stay small, and whose sums do.
fn channels(sizes: &Sizes, sums: usize) -> usize {
    let [rows, columns] = [sizes.axes[0].out, sizes.axes[1].out];
    let plane = Shape::new(&sizes.axes, 1, rows, columns)
        .elements(1)
        .max(rows.saturating_mul(columns));
    (IMAGE_TILE_ELEMENTS / plane.max(1))
        .min(ACC_ELEMENTS / sums.max(1))
        .clamp(1, CHANNELS)
        .min(sizes.groups)
}

/// Sums of the largest plane, or of one channel's kernel.
fn sums(sizes: &Sizes, micro: &Micro, kind: ConvKind) -> usize {
    match kind {
        ConvKind::WeightGrad => sizes.taps().saturating_mul(micro.lanes),
        _ => phases(&sizes.axes).saturating_mul(columns(
            sizes.axes[0].out.saturating_mul(sizes.axes[1].out),
            &sizes.axes,
            micro,
        )),
    }
}

/// The buffers for every blocking of sizes up to these.
pub(super) fn space(
    sizes: &Sizes,
    micro: &Micro,
    kind: ConvKind,
    in_place: Option<&InPlace>,
) -> Space {
    let (width, axes, taps) = (
        micro.nr(),
        &sizes.axes,
        sizes.taps().next_multiple_of(LANES),
    );
    let channels = channels(sizes, sums(sizes, micro, kind));
    let tile =
        IMAGE_TILE_ELEMENTS.max(Shape::new(axes, 1, 1, width.min(axes[1].out.max(1))).elements(1));
    if kind == ConvKind::WeightGrad {
        return Space {
            left: channels.saturating_mul(sizes.taps()),
            // Offsets, and tiles of both operands.
            right: match in_place {
                Some(_) => 0,
                None => taps.saturating_add(2 * tile),
            },
            acc: channels
                .saturating_mul(sizes.taps())
                .saturating_mul(micro.lanes),
            ..Space::default()
        };
    }
    if let Some(in_place) = in_place {
        return in_place.space(sizes);
    }
    let acc = ACC_ELEMENTS.saturating_add(
        channels
            .saturating_mul(phases(axes))
            .saturating_mul(2 * width),
    );
    Space {
        // Offsets of weights, and one channel's weights in the order of the steps.
        left: 2 * taps,
        right: (phases(axes) + 1)
            .next_multiple_of(LANES)
            .saturating_add(taps)
            .saturating_add(tile),
        acc,
        scratch: if is_phased(axes) {
            acc.saturating_mul(4).next_multiple_of(64)
        } else {
            0
        },
        ..Space::default()
    }
}

/// The forward product or the input gradient.
///
/// # Safety
/// By the contract of the kernel's `run`.
pub(super) unsafe fn run(call: &Call) {
    let Call {
        sizes,
        kernel,
        body,
        launch,
        ..
    } = *call;
    let (micro, axes) = (kernel.micro, &sizes.axes);
    let mut channels = channels(sizes, sums(sizes, micro, body.kind));
    let parts = |channels: usize| {
        Parts::new(
            sizes.images,
            axes,
            channels,
            ACC_ELEMENTS / channels / phases(axes),
            IMAGE_TILE_ELEMENTS,
            micro.nr(),
        )
    };
    let wanted = wanted(kernel.threads.min(launch.team.threads()));
    if sizes.groups.div_ceil(channels) * parts(channels).count() < wanted {
        channels = channels.min(even(sizes.groups, sizes.groups.div_ceil(wanted), 1));
    }
    let product = Columns::new(call, parts(channels));
    let (blocks, column_blocks) = (
        sizes.groups.div_ceil(channels),
        product.column_blocks.count(),
    );
    let stride = phases(axes) * columns(product.column_blocks.most(), axes, micro);
    let task = |task: usize, slot: &Slot, _: &mut usize| {
        let (block, column_block) = (task / column_blocks, task % column_blocks);
        let wanted = block * channels..((block + 1) * channels).min(product.call.sizes.groups);
        // SAFETY: blocks of the result are one task's each, and the slot's buffers have the sizes
        // of `space`.
        unsafe {
            convolve(&product, wanted.clone(), column_block, slot, stride);
            product.finish(0, wanted, column_block, slot.acc, stride, slot.scratch);
        }
    };
    let resources = call.resources();
    // SAFETY: `space` covers every blocking of sizes up to the bound; operands are valid by the
    // contract of `run`.
    unsafe { resources.tasks(blocks * column_blocks, false, task) };
}

/// The sums of some channels in a block of columns, a row of `stride` elements for each channel.
///
/// # Safety
/// As for [`run`]; the slot is the caller's.
unsafe fn convolve(
    product: &Columns,
    channels: Range<usize>,
    column_block: usize,
    slot: &Slot,
    stride: usize,
) {
    let (sizes, micro) = (product.call.sizes, product.call.kernel.micro);
    let (axes, part) = (&sizes.axes, product.column_blocks.get(column_block));
    let shape = Shape::new(axes, channels.len(), part.rows.len(), part.columns.len());
    let taps = sizes.taps().next_multiple_of(LANES);
    let (starts, weight_steps) = (slot.right.cast::<i32>(), slot.left.cast::<i32>());
    // SAFETY: buffers have the sizes of `space`; channels and kernel elements lie inside the
    // operands.
    unsafe {
        let steps = starts.add((phases(axes) + 1).next_multiple_of(LANES));
        let (weights, tile) = (
            slot.left.add(taps),
            slot.right
                .add((phases(axes) + 1).next_multiple_of(LANES) + taps),
        );
        product.table(
            1,
            0,
            |[row, column]| shape.tap(axes, row, column) as isize,
            steps,
            Some(starts),
        );
        // (The kernel element of a step, because its weight's offset may not fit in the table.)
        product.table(
            1,
            0,
            |[row, column]| (row * axes[1].taps + column) as isize,
            weight_steps,
            None,
        );
        product
            .image
            .fill(channels.clone(), &part, &shape, tile, tile);
        let count = *starts.add(phases(axes)) as usize;
        for (c, channel) in channels.enumerate() {
            let (at, [.., row, column]) = product.weight(channel);
            for step in 0..count {
                let tap = *weight_steps.add(step) as usize;
                let offset =
                    (tap / axes[1].taps) as isize * row + (tap % axes[1].taps) as isize * column;
                *weights.add(step) = *at.wrapping_offset(offset);
            }
            for phase in 0..phases(axes) {
                let (first, end) = (*starts.add(phase) as usize, *starts.add(phase + 1) as usize);
                (micro.convolve)(&Planes {
                    source: tile.add(c * shape.channel),
                    image: shape.image,
                    row: shape.row * axes[0].step,
                    images: part.images.len(),
                    rows: part.rows.len(),
                    columns: part.columns.len(),
                    taps: end - first,
                    offsets: steps.add(first),
                    weights: weights.add(first),
                    result: slot
                        .acc
                        .add(c * stride + phase * product.phase_columns(column_block)),
                    result_image: part.rows.len() * part.columns.len(),
                });
            }
        }
    }
}

/// Where slices of a weight gradient may end, and its partial sums: a vector for each weight.
pub(super) fn micro_batch_limits(sizes: &Sizes, micro: &Micro) -> MicroBatchLimits {
    MicroBatchLimits {
        unit: 1,
        sums: sizes
            .groups
            .saturating_mul(sizes.taps())
            .saturating_mul(micro.lanes),
    }
}

/// The weight gradient.
///
/// # Safety
/// By the contract of the kernel's `run`.
pub(super) unsafe fn weight_grad(call: &Call) {
    let Call {
        spec,
        sizes,
        kernel,
        body,
        launch,
    } = *call;
    let (micro, axes) = (kernel.micro, &sizes.axes);
    let most = channels(sizes, sums(sizes, micro, body.kind));
    let images = launch.part.map_or(sizes.images, |part| {
        part.examples.len() * call.per_example()
    });
    let wanted = wanted(kernel.threads.min(launch.team.threads()));
    let size = most.min(even(sizes.groups, sizes.groups.div_ceil(wanted), 1));
    // Vectors of a row begin at the same places for every partition.
    let parts = Parts::new(
        images,
        axes,
        size,
        IMAGE_TILE_ELEMENTS / size,
        IMAGE_TILE_ELEMENTS,
        micro.lanes,
    );
    let [image, gradient] = [(&body.a, 0), (&body.b, 1)]
        .map(|(operand, at)| source(operand, launch.args[at], launch.env));
    let product = WeightGrad {
        call,
        image,
        gradient,
        images,
        parts,
        size,
        code: kernel.code.bind(spec, launch),
    };
    let resources = call.resources();
    // SAFETY: `space` covers every blocking of sizes up to the bound; operands are valid by the
    // contract of `run`.
    unsafe {
        resources.tasks(sizes.groups.div_ceil(size), false, |block, slot, _| {
            product.block(block, slot)
        })
    };
}

struct WeightGrad<'a> {
    call: &'a Call<'a>,
    image: Source,
    gradient: Source,
    images: usize,
    parts: Parts,
    /// Channels of a block.
    size: usize,
    code: Bound<'a>,
}

// SAFETY: operands are only read, and channels of the result are written by one worker each.
unsafe impl Sync for WeightGrad<'_> {}

impl WeightGrad<'_> {
    /// # Safety
    /// As for [`weight_grad`]; the slot is the caller's, and no other thread computes the block.
    unsafe fn block(&self, block: usize, slot: &Slot) {
        let (sizes, micro) = (self.call.sizes, self.call.kernel.micro);
        let taps = sizes.taps();
        let channels = block * self.size..((block + 1) * self.size).min(sizes.groups);
        let part = self.call.launch.part;
        // SAFETY: channels are one block's each, the slot's buffers have the sizes of `space`, and
        // the sums those of `micro_batch_limits`.
        unsafe {
            let acc = part.map_or(slot.acc, |part| {
                part.sums
                    .cast::<f32>()
                    .add(channels.start * taps * micro.lanes)
            });
            if part.is_none_or(|part| part.examples.start == 0) {
                acc.write_bytes(0, channels.len() * taps * micro.lanes);
            }
            match &self.call.kernel.in_place {
                Some(in_place) => in_place.add_weight_gradient(
                    micro,
                    [&self.image, &self.gradient],
                    self.images,
                    channels.clone(),
                    acc,
                ),
                None => self.add_tiles(channels.clone(), slot, acc),
            }
            if part.is_some_and(|part| !part.last) {
                return;
            }
            for weight in 0..channels.len() * taps {
                let lanes = std::slice::from_raw_parts(acc.add(weight * micro.lanes), micro.lanes);
                *slot.left.add(weight) = lanes.iter().sum();
            }
            self.code.block(
                &[channels.start, 0, 0, 0],
                0,
                channels.len(),
                taps,
                slot.left.cast(),
                taps,
                slot.scratch,
            );
        }
    }

    /// Adds the products of all parts to the sums of the weights of some channels, vectors at `acc`,
    /// from tiles of both operands.
    ///
    /// # Safety
    /// As for [`WeightGrad::block`]; the sums are the caller's.
    unsafe fn add_tiles(&self, channels: Range<usize>, slot: &Slot, acc: *mut f32) {
        let (sizes, micro) = (self.call.sizes, self.call.kernel.micro);
        let (axes, taps) = (&sizes.axes, sizes.taps());
        let plain = [Axis::plain(axes[0].out), Axis::plain(axes[1].out)];
        // SAFETY: the slot's buffers have the sizes of `space`, and the operands these channels.
        unsafe {
            for part in (0..self.parts.count()).map(|part| self.parts.get(part)) {
                let [shape, other] = [axes, &plain].map(|axes| {
                    Shape::new(axes, channels.len(), part.rows.len(), part.columns.len())
                });
                let offsets = slot.right.cast::<i32>();
                for tap in 0..taps {
                    *offsets.add(tap) =
                        shape.tap(axes, tap / axes[1].taps, tap % axes[1].taps) as i32;
                }
                let tile = slot.right.add(taps.next_multiple_of(LANES));
                let result = tile.add(shape.elements(part.images.len()));
                fill(
                    &self.image,
                    axes,
                    channels.clone(),
                    &part,
                    &shape,
                    tile,
                    micro.fill,
                );
                fill(
                    &self.gradient,
                    &plain,
                    channels.clone(),
                    &part,
                    &other,
                    result,
                    micro.fill,
                );
                for c in 0..channels.len() {
                    (micro.correlate)(&Planes {
                        source: tile.add(c * shape.channel),
                        image: shape.image,
                        row: shape.row * axes[0].step,
                        images: part.images.len(),
                        rows: part.rows.len(),
                        columns: part.columns.len(),
                        taps,
                        offsets,
                        weights: acc.add(c * taps * micro.lanes),
                        result: result.add(c * other.channel),
                        result_image: other.image,
                    });
                }
            }
        }
    }
}
