//! Convolutions of few output positions, as products of one row per position with the transposed
//! weights: no operand is packed, and the workspace holds the sums and a small tile.
//!
//! With weights as the left operand, as in [`super::columns`], a vector holds output positions, and
//! most of its lanes are empty if there are few. Here a vector holds output channels. The sums are
//! the same: the same k-blocks, each summed in the order of channels and kernel elements.

use super::columns::{positions, weight_strides};
use super::image::Image;
use super::tile::{Axis, Part, Shape, Source};
use super::{Call, Sizes, source};
use crate::cpu::gemm::drive::{KBlocks, SERIAL_WORK};
use crate::cpu::gemm::micro::Micro;
use crate::cpu::gemm::pack;
use crate::cpu::gemm::small::{Block, ROWS_MAX, fits};
use crate::cpu::gemm::workspace::{Slot, Space};
use crate::cpu::gemm::{KC, even};
use crate::cpu::tile::Bound;
use crate::spec::{self, ConvKind};

/// Most output channels of a block of the result, each of which fills its own tiles.
const CHANNELS_MAX: usize = 64;
/// Most positions that are computed here, most if the image is read in place, and most of several
/// positions of an image if the kernel is one element: there packing costs least.
const POSITIONS_MAX: [usize; 2] = [12, ROWS_MAX];
const IMAGE_POSITIONS_MAX: usize = 4;
/// Elements of a tile above which it has fewer channels.
const TILE_ELEMENTS: usize = 256;
/// Output channels that are passed to the epilogue at a time.
const FINISHED: usize = 16;

/// Whether a convolution of sizes up to these is computed here.
pub(super) fn applies(body: &spec::Conv2d, sizes: &Sizes) -> bool {
    let row = body.b.strides[0].as_fixed();
    body.kind == ConvKind::Forward
        && body.prologue.is_none()
        && sizes.fixed
        && positions(sizes) <= most(body, sizes)
        && [row, step(body, sizes)]
            .into_iter()
            .all(|stride| stride.is_some_and(fits))
}

/// Most positions that are computed here.
fn most(body: &spec::Conv2d, sizes: &Sizes) -> usize {
    match sizes.taps() == 1 && sizes.axes[0].out * sizes.axes[1].out > 1 {
        true => IMAGE_POSITIONS_MAX,
        false => POSITIONS_MAX[usize::from(in_place(body, sizes))],
    }
}

/// Elements of the weight between steps of the contracted axis, where channels and kernel elements
/// are one axis. An axis of one element may have any stride.
fn step(body: &spec::Conv2d, sizes: &Sizes) -> Option<i64> {
    let mut flat: Option<(i64, i64)> = None;
    for (count, stride) in [body.k[1], body.k[0], sizes.source]
        .into_iter()
        .zip(body.b.strides.iter().rev())
        .filter(|(count, _)| *count > 1)
    {
        let (count, stride) = (i64::try_from(count).ok()?, stride.as_fixed()?);
        flat = match flat {
            None => Some((stride, stride.checked_mul(count)?)),
            Some((step, whole)) if stride == whole => Some((step, whole.checked_mul(count)?)),
            Some(_) => return None,
        };
    }
    Some(flat.map_or(0, |(step, _)| step))
}

/// Whether the image is read in place: no output position reads padding, and offsets are small.
fn in_place(body: &spec::Conv2d, sizes: &Sizes) -> bool {
    let counts = [
        sizes.images,
        sizes.source,
        sizes.axes[0].source,
        sizes.axes[1].source,
    ];
    let strides = body.a.strides.iter().map(|stride| stride.as_fixed());
    let reach = strides
        .zip(counts)
        .try_fold(0i64, |reach, (stride, count)| {
            reach.checked_add(stride?.checked_abs()?.checked_mul(count as i64)?)
        });
    sizes.axes.iter().all(Axis::is_unpadded)
        && reach.is_some_and(|reach| i32::try_from(reach).is_ok())
}

/// The channels of the source, in k-blocks as in [`super::columns`].
fn k_blocks(sizes: &Sizes) -> KBlocks {
    let channels = even(sizes.source, KC / sizes.taps(), 1);
    KBlocks::new(sizes.source, channels, channels)
}

/// Elements of a tile of one channel.
fn channel(sizes: &Sizes) -> usize {
    let [rows, columns] = [sizes.axes[0].out, sizes.axes[1].out];
    Shape::new(&sizes.axes, 1, rows, columns).elements(sizes.images)
}

/// Output channels of a block, a multiple of the lanes.
fn block_channels(sizes: &Sizes, micro: &Micro) -> usize {
    CHANNELS_MAX.min(sizes.other.next_multiple_of(micro.lanes))
}

/// Multiply-adds.
pub(super) fn work(sizes: &Sizes) -> usize {
    [sizes.groups, sizes.other, sizes.source, sizes.taps()]
        .into_iter()
        .fold(positions(sizes), usize::saturating_mul)
}

/// The buffers for sizes up to these.
pub(super) fn space(body: &spec::Conv2d, sizes: &Sizes, micro: &Micro) -> Space {
    let plane = sizes.axes[0].out * sizes.axes[1].out;
    let acc = positions(sizes) * block_channels(sizes, micro);
    let (in_place, channel) = (in_place(body, sizes), channel(sizes));
    let tile = channel
        .saturating_mul(sizes.source)
        .min(TILE_ELEMENTS.max(channel));
    Space {
        // Offsets of the kernel's elements.
        left: if in_place { 0 } else { sizes.taps() },
        right: if in_place { 0 } else { tile },
        // Sums of some channels, channel by channel.
        micro_panel: if plane > 1 { FINISHED * plane } else { 0 },
        acc,
        k_block: if k_blocks(sizes).count() > 1 { acc } else { 0 },
        ..Space::default()
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
    let (micro, positions) = (kernel.micro, positions(sizes));
    if positions == 0 || sizes.other == 0 {
        return;
    }
    let (work, threads) = (work(sizes), kernel.threads.min(launch.team.threads()));
    let mut most = block_channels(sizes, micro);
    if threads > 1 && sizes.groups * sizes.other.div_ceil(most) < threads {
        let parts = threads.div_ceil(sizes.groups);
        most = most.min(even(sizes.other, sizes.other.div_ceil(parts), micro.lanes));
    }
    let source = source(&body.a, launch.args[0], launch.env);
    let product = Few {
        call,
        source,
        weight: super::source(&body.b, launch.args[1], launch.env),
        image: Image::new(call, &sizes.axes, source),
        in_place: in_place(body, sizes),
        k_blocks: k_blocks(sizes),
        step: step(body, sizes).map_or(0, |step| step as isize),
        most,
        code: kernel.code.bind(spec, launch),
    };
    let resources = call.resources();
    let blocks = sizes.other.div_ceil(most);
    // SAFETY: `space` suffices for sizes up to the bound; every task has output channels of its
    // own, and operands are valid by the contract of `run`.
    unsafe {
        resources.tasks(
            sizes.groups * blocks,
            work < SERIAL_WORK,
            |task, slot, _| product.block(task / blocks, task % blocks, slot),
        );
    }
}

struct Few<'a> {
    call: &'a Call<'a>,
    source: Source,
    weight: Source,
    image: Image<'a>,
    in_place: bool,
    k_blocks: KBlocks,
    /// See [`step`].
    step: isize,
    /// Output channels of a block.
    most: usize,
    code: Bound<'a>,
}

// SAFETY: operands are only read, and blocks of the result are written by one worker each.
unsafe impl Sync for Few<'_> {}

impl Few<'_> {
    /// Computes some output channels of a group, at all positions.
    unsafe fn block(&self, group: usize, block: usize, slot: &Slot) {
        let sizes = self.call.sizes;
        let (axes, taps) = (&sizes.axes, [sizes.axes[0].taps, sizes.axes[1].taps]);
        let [image, channel, row, column] = self.source.strides;
        let part = Part {
            images: 0..sizes.images,
            rows: 0..axes[0].out,
            columns: 0..axes[1].out,
        };
        let channels = match self.in_place {
            true => sizes.source.max(1),
            false => (TILE_ELEMENTS / self::channel(sizes).max(1)).clamp(1, sizes.source.max(1)),
        };
        let shape = Shape::new(axes, channels, axes[0].out, axes[1].out);
        let mut rows = [0; ROWS_MAX];
        let mut count = 0;
        for i in part.images.clone() {
            for (y, x) in part
                .rows
                .clone()
                .flat_map(|y| part.columns.clone().map(move |x| (y, x)))
            {
                rows[count] = match self.in_place {
                    true => {
                        let (y, x) = ((y * axes[0].step) as isize, (x * axes[1].step) as isize);
                        (i as isize * image + y * row + x * column) as i32
                    }
                    false => shape.position(axes, i, y, x) as i32,
                };
                count += 1;
            }
        }
        let tap = |[y, x]: [usize; 2]| match self.in_place {
            true => {
                let (y, x) = (axes[0].offset(y) as isize, axes[1].offset(x) as isize);
                (y * row + x * column) as i32
            }
            false => shape.tap(axes, y, x) as i32,
        };
        let from_channel = if self.in_place {
            channel as i32
        } else {
            shape.channel as i32
        };
        let first = block * self.most;
        let block = Block {
            micro: self.call.kernel.micro,
            rows: &rows[..count],
            columns: self.most.min(sizes.other - first),
            stride: self.most,
        };
        let (weight, [out, per_channel, ..]) = weight_strides(self.call, &self.weight, group);
        let table = slot.left.cast::<i32>();
        // SAFETY: the buffers have the sizes of `space`, and the channels and kernel elements are
        // those of the operands.
        unsafe {
            if !self.in_place {
                for y in 0..taps[0] {
                    for x in 0..taps[1] {
                        *table.add(y * taps[1] + x) = tap([y, x]);
                    }
                }
            }
            for k_block in 0..self.k_blocks.count().max(1) {
                let (range, mut begun) = (self.k_blocks.range(k_block), false);
                let sums = if k_block == 0 { slot.acc } else { slot.k_block };
                for from in range.clone().step_by(channels) {
                    let some = from..(from + channels).min(range.end);
                    let source = group * sizes.source + some.start;
                    let base = match self.in_place {
                        true => self.source.at.wrapping_offset(source as isize * channel),
                        false => slot.right,
                    };
                    if !self.in_place {
                        let wanted = source..source + some.len();
                        self.image
                            .fill(wanted, &part, &shape, slot.right, slot.right);
                    }
                    // Channel, row and column of the kernel, and the channel's offset.
                    let (mut y, mut x, mut before) = (0, 0, 0i32);
                    block.add(
                        |_, steps| {
                            for offset in steps {
                                *offset = before
                                    + match self.in_place {
                                        true => tap([y, x]),
                                        false => *table.add(y * taps[1] + x),
                                    };
                                x += 1;
                                if x == taps[1] {
                                    (x, y) = (0, y + 1);
                                }
                                if y == taps[0] {
                                    (y, before) = (0, before + from_channel);
                                }
                            }
                            base
                        },
                        &pack::Source {
                            at: weight.wrapping_offset(
                                first as isize * out + some.start as isize * per_channel,
                            ),
                            stride: out,
                            step: self.step,
                        },
                        some.len() * taps[0] * taps[1],
                        sums,
                        begun,
                    );
                    begun = true;
                }
                if range.is_empty() {
                    sums.write_bytes(0, count * block.stride);
                }
                if k_block > 0 {
                    block.join(slot.acc, sums);
                }
            }
            self.finish(group * sizes.other + first, &block, slot);
        }
    }

    /// Passes the sums to the epilogue.
    unsafe fn finish(&self, first: usize, block: &Block, slot: &Slot) {
        let sizes = self.call.sizes;
        let plane = sizes.axes[0].out * sizes.axes[1].out;
        // SAFETY: the block is this worker's, and so are the buffers.
        unsafe {
            if plane == 1 {
                // Output channels are neighbours.
                let acc = slot.acc.cast_const().cast();
                let (images, columns) = (sizes.images, block.columns);
                let origin = [0, first, 0, 0];
                return self.code.block(
                    &origin,
                    0,
                    images,
                    columns,
                    acc,
                    block.stride,
                    slot.scratch,
                );
            }
            for image in 0..sizes.images {
                for from in (0..block.columns).step_by(FINISHED) {
                    let channels = FINISHED.min(block.columns - from);
                    for position in 0..plane {
                        let sums = slot
                            .acc
                            .add((image * plane + position) * block.stride + from);
                        for channel in 0..channels {
                            *slot.micro_panel.add(channel * plane + position) = *sums.add(channel);
                        }
                    }
                    self.code.block(
                        &[image, first + from, 0, 0],
                        1,
                        channels,
                        plane,
                        slot.micro_panel.cast_const().cast(),
                        plane,
                        slot.scratch,
                    );
                }
            }
        }
    }
}
