//! Depthwise convolutions whose results are as large as the image, and their gradients, which read
//! images in place: no tile is copied.
//!
//! Kernel element (y, x) is then a constant distance in memory away from every output position, and
//! vectors run on from row to row. Masks leave out the lanes whose element is in the padding. They
//! depend on the sizes alone, and are made when the kernel is.

use super::columns::weight_strides;
use super::tile::{Axis, Source};
use super::{Call, Sizes, source};
use crate::cpu::gemm::micro::Micro;
use crate::cpu::gemm::planes::WholePlanes;
use crate::cpu::gemm::workspace::{Slot, Space};
use crate::cpu::gemm::{ACC_ELEMENTS, IMAGE_TILE_ELEMENTS, even, wanted};
use crate::cpu::tile::{Bound, TileCode};
use crate::spec::{self, ConvKind, Operand, Spec};
use std::ops::Range;

/// Most channels of a block.
const CHANNELS: usize = 64;
/// Images for which a block has fewer channels: they share a kernel.
const IMAGES: usize = 4;

/// How the elements of a kernel read an image that is as large as the result.
pub(super) struct InPlace {
    /// The distance from an output position to the element that a kernel element reads.
    offsets: Vec<i32>,
    /// See [`WholePlanes::inside`].
    inside: Vec<u32>,
    /// Elements of a plane.
    positions: usize,
    /// Whether sums are the result, in contiguous planes.
    is_stored: bool,
}

/// Whether the planes of an operand are contiguous.
fn is_plane(operand: &Operand, axes: &[Axis; 2]) -> bool {
    operand.strides[2].is(axes[1].out as i64) && operand.strides[3].is(1)
}

impl InPlace {
    /// The offsets and masks of a depthwise convolution; `None` where the result is not as large as
    /// the image, planes are not contiguous, or masks would be large.
    pub fn new(
        spec: &Spec,
        body: &spec::Conv2d,
        sizes: &Sizes,
        code: &TileCode,
        micro: &Micro,
    ) -> Option<InPlace> {
        let axes = &sizes.axes;
        let is_same = |axis: &Axis| axis.step == 1 && !axis.is_phased() && axis.out == axis.source;
        let operands = [&body.a, &body.b];
        let read = match body.kind {
            ConvKind::WeightGrad => &operands[..],
            _ => &operands[..1],
        };
        let [rows, columns] = [axes[0].out, axes[1].out];
        let (positions, taps) = (rows.checked_mul(columns)?, sizes.taps());
        let vectors = positions.div_ceil(micro.lanes);
        let is_small = vectors
            .checked_mul(taps)
            .is_some_and(|masks| masks <= IMAGE_TILE_ELEMENTS);
        if !axes.iter().all(is_same)
            || !read.iter().all(|operand| is_plane(operand, axes))
            || !is_small
            || positions == 0
        {
            return None;
        }
        let (mut offsets, mut inside) = (Vec::with_capacity(taps), vec![0u32; vectors * taps]);
        for tap in 0..taps {
            let [down, over] = [(0, tap / axes[1].taps), (1, tap % axes[1].taps)]
                .map(|(axis, tap)| axes[axis].offset(tap) as isize - axes[axis].pad);
            offsets.push(i32::try_from(down * columns as isize + over).ok()?);
            let reading = |distance: isize, size: usize| -> Range<usize> {
                let clamped = |at: isize| at.clamp(0, size as isize) as usize;
                clamped(-distance)..clamped(size as isize - distance)
            };
            for row in reading(down, rows) {
                for column in reading(over, columns) {
                    let position = row * columns + column;
                    inside[position / micro.lanes * taps + tap] |= 1 << (position % micro.lanes);
                }
            }
        }
        Some(InPlace {
            offsets,
            inside,
            positions,
            is_stored: code.only_stores() && is_plane(&spec.operands[0], axes),
        })
    }

    /// Most channels of a block of so many images.
    fn channels(&self, sizes: &Sizes, images: usize) -> usize {
        (ACC_ELEMENTS / self.positions / images.max(1))
            .clamp(1, CHANNELS)
            .min(sizes.groups)
    }

    /// The buffers of the forward product or the input gradient.
    pub fn space(&self, sizes: &Sizes) -> Space {
        let channels = self.channels(sizes, 1);
        Space {
            // The weights of a block.
            left: channels * self.offsets.len(),
            acc: match self.is_stored {
                true => 0,
                false => ACC_ELEMENTS.max(channels * self.positions),
            },
            ..Space::default()
        }
    }

    /// Planes of some channels; `images` and their addresses are the caller's to say.
    fn planes(&self, channels: usize, weights: *mut f32) -> WholePlanes<'_> {
        WholePlanes {
            source: std::ptr::null(),
            source_strides: [0; 2],
            images: 0,
            channels,
            positions: self.positions,
            offsets: &self.offsets,
            inside: &self.inside,
            weights,
            result: std::ptr::null_mut(),
            result_strides: [0; 2],
        }
    }

    /// The forward product or the input gradient.
    ///
    /// # Safety
    /// By the contract of the kernel's `run`.
    pub unsafe fn run(&self, call: &Call) {
        let Call {
            spec,
            sizes,
            kernel,
            body,
            launch,
        } = *call;
        let wanted = wanted(kernel.threads.min(launch.team.threads()));
        let mut channels = self.channels(sizes, sizes.images.min(IMAGES));
        let most = (ACC_ELEMENTS / (channels * self.positions)).max(1);
        let images = even(sizes.images, most, 1);
        let image_blocks = sizes.images.div_ceil(images);
        if sizes.groups.div_ceil(channels) * image_blocks < wanted {
            channels = channels.min(even(sizes.groups, sizes.groups.div_ceil(wanted), 1));
        }
        let [image, weight] = [(&body.a, 0), (&body.b, 1)]
            .map(|(operand, at)| source(operand, launch.args[at], launch.env));
        let run = Run {
            call,
            in_place: self,
            image,
            weight,
            code: kernel.code.bind(spec, launch),
        };
        let task = |task: usize, slot: &Slot, _: &mut usize| {
            let (block, first) = (task / image_blocks, task % image_blocks * images);
            let block = block * channels..((block + 1) * channels).min(sizes.groups);
            let images = first..(first + images).min(sizes.images);
            // SAFETY: blocks are one task's each, and the slot's buffers have the sizes of `space`.
            unsafe { run.block(block, images, slot) };
        };
        let resources = call.resources();
        // SAFETY: `space` covers every blocking; operands are valid by the contract of `run`.
        unsafe { resources.tasks(sizes.groups.div_ceil(channels) * image_blocks, false, task) };
    }

    /// Adds the products of some images to the sums of the weights of some channels, vectors at
    /// `sums`.
    ///
    /// # Safety
    /// The operands have these images and channels, and the sums are the caller's.
    pub unsafe fn add_weight_gradient(
        &self,
        micro: &Micro,
        [image, gradient]: [&Source; 2],
        images: usize,
        channels: Range<usize>,
        sums: *mut f32,
    ) {
        let mut planes = self.planes(channels.len(), sums);
        planes.images = images;
        (planes.source, planes.source_strides) = at(image, 0, channels.start);
        let (result, strides) = at(gradient, 0, channels.start);
        (planes.result, planes.result_strides) = (result.cast_mut(), strides);
        // SAFETY: the caller's promise; the gradient is only read.
        unsafe { (micro.correlate_whole)(&planes) };
    }
}

/// A run of the forward product or the input gradient.
struct Run<'a> {
    call: &'a Call<'a>,
    in_place: &'a InPlace,
    image: Source,
    weight: Source,
    code: Bound<'a>,
}

// SAFETY: operands are only read, and blocks of the result are written by one worker each.
unsafe impl Sync for Run<'_> {}

impl Run<'_> {
    /// # Safety
    /// As for [`InPlace::run`]; the slot is the caller's, and no other thread computes the block.
    unsafe fn block(&self, channels: Range<usize>, images: Range<usize>, slot: &Slot) {
        let (micro, taps) = (self.call.kernel.micro, self.in_place.offsets.len());
        let positions = self.in_place.positions;
        let mut planes = self.in_place.planes(channels.len(), slot.left);
        (planes.source, planes.source_strides) = at(&self.image, images.start, channels.start);
        planes.images = images.len();
        let stride = images.len() * positions;
        let stored = self.code.stored(&[images.start, channels.start, 0, 0]);
        let stored = stored.filter(|_| self.in_place.is_stored);
        (planes.result, planes.result_strides) = match stored {
            Some((to, strides)) => (to, [strides[0], strides[1]]),
            None => (slot.acc, [positions as isize, stride as isize]),
        };
        // SAFETY: these channels and images exist in the operands, and are the caller's in the
        // result; the slot's buffers have the sizes of `space`.
        unsafe {
            for (c, channel) in channels.clone().enumerate() {
                let (at, [.., row, column]) = weight_strides(self.call, &self.weight, channel);
                let columns = self.call.sizes.axes[1].taps;
                for tap in 0..taps {
                    let offset = (tap / columns) as isize * row + (tap % columns) as isize * column;
                    *slot.left.add(c * taps + tap) = *at.wrapping_offset(offset);
                }
            }
            (micro.convolve_whole)(&planes);
            if stored.is_some() {
                return;
            }
            for (i, image) in images.enumerate() {
                self.code.block(
                    &[image, channels.start, 0, 0],
                    1,
                    channels.len(),
                    positions,
                    slot.acc.add(i * positions).cast(),
                    stride,
                    slot.scratch,
                );
            }
        }
    }
}

/// The first of some images and channels of an operand, and the distances to the next of each.
fn at(source: &Source, image: usize, channel: usize) -> (*const f32, [isize; 2]) {
    let [images, channels, ..] = source.strides;
    let offset = image as isize * images + channel as isize * channels;
    (source.at.wrapping_offset(offset), [images, channels])
}
