//! Convolutions of many small images, with images along the vectors.
//!
//! A vector holds one output position of neighbouring images, so that every position is multiplied
//! with only those kernel elements that read elements of the image there: of a 3×3 kernel on images
//! of 2×2, four of nine. Weights are read in place. [`super::columns`], whose vectors hold neighbouring positions, multiplies
//! the zeros of the padding too. The sums are the same, in the same k-blocks and order of channels
//! and kernel elements, without the products with zeros. (Those give NaN for infinite weights;
//! therefore the sizes of the whole batch decide which of the two computes a convolution.)

use std::ops::{Range, RangeInclusive};

use super::columns::{PACKED_COLUMNS, k_blocks, weight_strides};
use super::image::Image;
use super::tile::{Axis, Part, Shape, Source};
use super::{Call, Sizes, source};
use crate::cpu::gemm::drive::{Blocking, KBlocks, MicroPanel, Product, Span, drive};
use crate::cpu::gemm::micro::{Left, LeftLayout, Micro, Right};
use crate::cpu::gemm::pack::{self, Piece};
use crate::cpu::gemm::workspace::Space;
use crate::cpu::gemm::{KC, Limits, MC, even, wanted};
use crate::cpu::tile::Bound;
use crate::size::Env;
use crate::spec::{self, ConvKind};

/// Elements that tables are rounded up to.
const LANES: usize = 16;
/// Most output positions of an image, and most elements of an image.
const PLANE_ELEMENTS_MAX: [usize; 2] = [16, 64];
/// Most steps of a k-block, those of all positions together.
const K_BLOCK_STEPS_MAX: usize = 8 << 10;
/// Images of a batch that are computed here: fewer leave too many lanes empty.
const IMAGES: RangeInclusive<usize> = 12..=64;
/// Output channels that are passed to the epilogue at a time.
const FINISHED_CHANNELS: usize = 16;
/// Most rows of a block.
const ROWS: usize = MC / 2;

/// Whether a convolution of these shapes may be computed here. Kernels of one element read no
/// padding.
pub(super) fn applies(body: &spec::Conv2d, env: &Env, sizes: &Sizes) -> bool {
    let geometry = Geometry::new(body, env);
    let planes = [geometry.out, geometry.source].map(|[height, width]| height * width);
    let taps = sizes.taps();
    let channels = even(sizes.source, KC / taps, 1);
    body.kind != ConvKind::WeightGrad
        && (0..2).all(|i| (1..=PLANE_ELEMENTS_MAX[i]).contains(&planes[i]))
        && taps > 1
        && channels * taps <= KC
        && channels * geometry.pairs(0..planes[0]).count() <= K_BLOCK_STEPS_MAX
}

/// Whether a run is computed here, if [`applies`]: `columns` packs the weights of more positions.
pub(super) fn has_images(call: &Call) -> bool {
    let images = call.body.n.usize_at(call.launch.whole());
    let plane = Geometry::new(call.body, call.launch.env).plane();
    IMAGES.contains(&images) && images * plane < PACKED_COLUMNS
}

/// The sizes of an image and of its convolution.
#[derive(Clone, Copy)]
struct Geometry {
    backward: bool,
    out: [usize; 2],
    source: [usize; 2],
    k: [usize; 2],
    stride: [usize; 2],
    pad: [usize; 2],
    dilation: [usize; 2],
}

impl Geometry {
    fn new(body: &spec::Conv2d, env: &Env) -> Geometry {
        let backward = body.kind == ConvKind::InputGrad;
        let [image, result] = [body.hw, body.ohw].map(|size| size.map(|s| s.usize_at(env)));
        let (out, source) = match backward {
            true => (image, result),
            false => (result, image),
        };
        Geometry {
            backward,
            out,
            source,
            k: body.k,
            stride: body.stride,
            pad: body.pad,
            dilation: body.dilation,
        }
    }

    /// Output positions of an image.
    fn plane(&self) -> usize {
        self.out[0] * self.out[1]
    }

    /// The element of the source that a position reads by a kernel element, along an axis.
    fn element(&self, axis: usize, position: usize, tap: usize) -> Option<usize> {
        let (stride, pad) = (self.stride[axis], self.pad[axis]);
        let distance = tap * self.dilation[axis];
        let element = if self.backward {
            let reached = (position + pad).checked_sub(distance)?;
            reached.is_multiple_of(stride).then_some(reached / stride)
        } else {
            (position * stride + distance).checked_sub(pad)
        };
        element.filter(|&element| element < self.source[axis])
    }

    /// For each of some positions, in order: the kernel elements that read elements of the source,
    /// with these.
    fn pairs(&self, positions: Range<usize>) -> impl Iterator<Item = Pair> {
        let geometry = *self;
        positions.flat_map(move |position| {
            let at = [position / geometry.out[1], position % geometry.out[1]];
            (0..geometry.k[0]).flat_map(move |row| {
                let y = geometry.element(0, at[0], row);
                (0..geometry.k[1]).filter_map(move |column| {
                    let (y, x) = (y?, geometry.element(1, at[1], column)?);
                    Some(Pair {
                        tap: [row, column],
                        element: y * geometry.source[1] + x,
                    })
                })
            })
        })
    }
}

/// A kernel element, and the element of the source that a position reads by it.
#[derive(Clone, Copy)]
struct Pair {
    tap: [usize; 2],
    element: usize,
}

/// Channels of a sub-block, as in `columns`.
fn channels(sizes: &Sizes, limits: &Limits) -> usize {
    k_blocks(sizes, limits).range(0).len()
}

/// Rows of a block.
fn rows(sizes: &Sizes, limits: &Limits) -> usize {
    even(sizes.other, ROWS.min(limits.mc), 1)
}

/// Positions of a block of columns, for so many images.
fn positions(geometry: &Geometry, rows: usize, images: usize, limits: &Limits) -> usize {
    even(
        geometry.plane(),
        (limits.acc[0] / rows.max(1) / images.max(1)).max(1),
        1,
    )
}

/// The buffers for every blocking of sizes up to these, with `prologue_buffer` elements for a
/// prologue.
pub(super) fn space(
    body: &spec::Conv2d,
    env: &Env,
    sizes: &Sizes,
    micro: &Micro,
    limits: &Limits,
    prologue_buffer: usize,
) -> Space {
    let geometry = Geometry::new(body, env);
    let (rows, channels) = (rows(sizes, limits), channels(sizes, limits));
    let images = sizes.images.min(*IMAGES.end());
    let images = images.min(PACKED_COLUMNS / geometry.plane());
    let wide = images.next_multiple_of(micro.lanes);
    let steps = geometry.pairs(0..geometry.plane()).count() * channels;
    let tile = channels * geometry.source[0] * geometry.source[1];
    let blocks = k_blocks(sizes, limits);
    // Fewer images may take more positions at a time.
    let acc = (rows * geometry.plane() * wide)
        .min(limits.acc[0].max(rows * wide))
        .next_multiple_of(LANES);
    let raw = match body.prologue {
        Some(_) => (tile * images).next_multiple_of(LANES) + prologue_buffer,
        None => 0,
    };
    Space {
        left: rows.next_multiple_of(LANES) + steps.next_multiple_of(LANES),
        right: (PLANE_ELEMENTS_MAX[0] + 1).next_multiple_of(LANES)
            + steps.next_multiple_of(LANES)
            + (tile * wide).next_multiple_of(LANES)
            + raw,
        micro_panel: channels * sizes.taps() * micro.width(images),
        acc,
        scratch: (acc * 4).min(FINISHED_CHANNELS * geometry.plane() * wide * 4),
        k_block: if blocks.count() > 1 && blocks.blocks(0).len() > 1 {
            acc
        } else {
            0
        },
        shared: 0,
    }
}

/// # Safety
/// By the contract of the kernel's `run`.
pub(super) unsafe fn run(call: &Call) {
    let Call {
        body,
        launch,
        sizes,
        kernel,
        spec,
    } = *call;
    let (micro, limits) = (kernel.micro, kernel.limits);
    let geometry = Geometry::new(body, launch.env);
    let threads = kernel.threads.min(launch.team.threads());
    let images = sizes.images.next_multiple_of(micro.lanes);
    let mut mc = rows(sizes, limits);
    let positions = positions(&geometry, mc, images, limits);
    let others = sizes.groups * geometry.plane().div_ceil(positions);
    if threads > 1 && others * sizes.other.div_ceil(mc) < wanted(threads) {
        let blocks = wanted(threads).div_ceil(others.max(1));
        mc = mc.min(even(sizes.other, sizes.other.div_ceil(blocks), 1));
    }
    let source = source(&body.a, launch.args[0], launch.env);
    let product = Vertical {
        call,
        geometry,
        source,
        weight: super::source(&body.b, launch.args[body.sources()], launch.env),
        image: Image::new(call, &geometry.source.map(Axis::plain), source),
        k_blocks: k_blocks(sizes, limits),
        images,
        positions,
        steps: geometry.pairs(0..geometry.plane()).count(),
        code: kernel.code.bind(spec, launch),
    };
    let blocking = Blocking {
        mc,
        nc: positions * images,
        resident: false,
        by_columns: false,
        splits: 1,
    };
    // SAFETY: `space` covers every blocking of sizes up to the bound; operands are valid by the
    // contract of `run`.
    unsafe { drive(&product, micro, &blocking, &call.resources()) };
}

struct Vertical<'a> {
    call: &'a Call<'a>,
    geometry: Geometry,
    source: Source,
    weight: Source,
    image: Image<'a>,
    k_blocks: KBlocks,
    /// Images, rounded up to whole vectors.
    images: usize,
    /// Positions of a block of columns.
    positions: usize,
    /// Pairs of all positions.
    steps: usize,
    code: Bound<'a>,
}

// SAFETY: operands are only read, and blocks of the result are written by one worker each.
unsafe impl Sync for Vertical<'_> {}

impl Vertical<'_> {
    /// The positions of a block of columns.
    fn part(&self, column_block: usize) -> Range<usize> {
        let first = column_block * self.positions;
        first..(first + self.positions).min(self.geometry.plane())
    }

    /// Elements of an image's channel.
    fn elements(&self) -> usize {
        self.geometry.source[0] * self.geometry.source[1]
    }

    /// Writes the offsets of all steps of a sub-block: position, channel, kernel element. `starts`
    /// receives the first step of every position and the end.
    ///
    /// # Safety
    /// The tables have an entry for each.
    unsafe fn table(
        &self,
        channels: usize,
        channel: isize,
        offset: impl Fn(&Pair) -> isize,
        to: *mut i32,
        starts: Option<*mut i32>,
    ) {
        let mut step = 0;
        for position in 0..self.geometry.plane() {
            let first = step;
            // SAFETY: the caller's promise.
            unsafe {
                for pair in self.geometry.pairs(position..position + 1) {
                    *to.add(step) = offset(&pair) as i32;
                    step += 1;
                }
                let count = step - first;
                for _ in count..count * channels {
                    *to.add(step) = *to.add(step - count) + channel as i32;
                    step += 1;
                }
                if let Some(starts) = starts {
                    *starts.add(position) = first as i32;
                    *starts.add(position + 1) = step as i32;
                }
            }
        }
    }

    /// The tables of offsets and the tile after the starts of positions.
    fn tables(&self, right: *const f32, block: usize) -> (*const i32, *const f32) {
        let steps = right
            .cast::<i32>()
            .wrapping_add((PLANE_ELEMENTS_MAX[0] + 1).next_multiple_of(LANES));
        let count = self.steps * self.k_blocks.range(block).len();
        let tile = steps.wrapping_add(count.next_multiple_of(LANES));
        (steps, tile.cast())
    }
}

impl Product for Vertical<'_> {
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
        self.call.sizes.other
    }

    fn column_blocks(&self) -> usize {
        self.geometry.plane().div_ceil(self.positions)
    }

    fn columns(&self, column_block: usize) -> Range<usize> {
        let part = self.part(column_block);
        part.start * self.images..part.end * self.images
    }

    fn k_blocks(&self) -> usize {
        self.k_blocks.count()
    }

    fn blocks(&self, k_block: usize) -> Range<usize> {
        self.k_blocks.blocks(k_block)
    }

    fn depth(&self, block: usize) -> Range<usize> {
        let (channels, taps) = (self.k_blocks.range(block), self.call.sizes.taps());
        channels.start * taps..channels.end * taps
    }

    unsafe fn left(
        &self,
        group: usize,
        rows: Range<usize>,
        _panel: usize,
        block: usize,
        to: *mut f32,
    ) {
        let (_, [row_stride, channel, y, x]) = weight_strides(self.call, &self.weight, group);
        let table = to.cast::<i32>();
        // SAFETY: the tables have an entry for each row and step.
        unsafe {
            for row in 0..rows.len() {
                *table.add(row) = (row as isize * row_stride) as i32;
            }
            self.table(
                self.k_blocks.range(block).len(),
                channel,
                |pair| pair.tap[0] as isize * y + pair.tap[1] as isize * x,
                table.add(rows.len().next_multiple_of(LANES)),
                None,
            );
        }
    }

    unsafe fn panel(
        &self,
        group: usize,
        rows: &Range<usize>,
        row: usize,
        block: usize,
        left: *const f32,
    ) -> Left {
        let (at, [row_stride, channel, ..]) = weight_strides(self.call, &self.weight, group);
        let first =
            rows.start as isize * row_stride + self.k_blocks.range(block).start as isize * channel;
        let table = left.cast::<i32>();
        // SAFETY: as laid out by `left`.
        unsafe {
            Left::indirect(
                at.wrapping_offset(first),
                table.add(row),
                table.add(rows.len().next_multiple_of(LANES)),
            )
        }
    }

    /// The first step of every position, the offset of every step, then the tile: for each vector
    /// of images, each element of each channel.
    unsafe fn right(&self, group: usize, _column_block: usize, block: usize, to: *mut f32) {
        let (sizes, lanes) = (self.call.sizes, self.call.kernel.micro.lanes);
        let (channels, elements) = (self.k_blocks.range(block), self.elements());
        let (steps, tile) = self.tables(to, block);
        let first = group * sizes.source;
        let wanted = first + channels.start..first + channels.end;
        let [height, width] = self.geometry.source;
        let depth = channels.len() * elements;
        // SAFETY: one entry for each position and step of the block; these channels exist, and the
        // tile has room after the tables.
        unsafe {
            self.table(
                channels.len(),
                (elements * lanes) as isize,
                |pair| (pair.element * lanes) as isize,
                steps.cast_mut(),
                Some(to.cast()),
            );
            let mut source = Source {
                at: self
                    .source
                    .at
                    .wrapping_offset(wanted.start as isize * self.source.strides[1]),
                ..self.source
            };
            if self.call.body.prologue.is_some() {
                let raw = tile
                    .cast_mut()
                    .add((depth * self.images).next_multiple_of(LANES));
                let shape = Shape::new(
                    &self.geometry.source.map(Axis::plain),
                    channels.len(),
                    height,
                    width,
                );
                let part = Part {
                    images: 0..sizes.images,
                    rows: 0..height,
                    columns: 0..width,
                };
                let end = to.add(self.call.kernel.space.right);
                self.image.fill(wanted, &part, &shape, raw, end);
                source = Source {
                    at: raw,
                    strides: [shape.image, shape.channel, shape.row, 1].map(|s| s as isize),
                };
            }
            let [image, channel, row, step] = source.strides;
            // Parts of the tile that are evenly spaced in memory are packed at once.
            let flat = row == step * width as isize && channel == step * elements as isize;
            let (runs, length) = match flat {
                true => (1, depth),
                false => (channels.len() * height, width),
            };
            for vector in (0..sizes.images).step_by(lanes) {
                for run in 0..runs {
                    let (c, y) = ((run / height) as isize, (run % height) as isize);
                    let from = pack::Source {
                        at: source
                            .at
                            .wrapping_offset(vector as isize * image + c * channel + y * row),
                        stride: image,
                        step,
                    };
                    let to = tile.cast_mut().add(vector * depth + run * length * lanes);
                    let count = lanes.min(sizes.images - vector);
                    (self.call.kernel.micro.pack)(from, count, length, to, lanes);
                }
            }
        }
    }

    unsafe fn span(
        &self,
        _column_block: usize,
        column: usize,
        _block: usize,
        right: *const f32,
    ) -> Span {
        let position = column / self.images;
        let starts = right.cast::<i32>();
        // SAFETY: `right` wrote them.
        let steps = unsafe { *starts.add(position) as usize..*starts.add(position + 1) as usize };
        Span {
            end: position * self.images + self.call.sizes.images,
            next: (position + 1) * self.images,
            steps,
        }
    }

    unsafe fn micro_panel(&self, at: MicroPanel, right: *const f32, to: *mut f32) -> Right {
        let micro = self.call.kernel.micro;
        let (steps, tile) = self.tables(right, at.block);
        let depth = self.k_blocks.range(at.block).len() * self.elements();
        let first = at.columns.start % self.images * depth;
        let whole = u32::MAX >> (32 - micro.lanes);
        let pieces = [0, 1].map(|vector| Piece {
            offset: (first + vector * depth * micro.lanes) as i32,
            lanes: whole,
        });
        let used = at.width / micro.lanes;
        // SAFETY: `right` made the table and the tile, in which every vector lies at every step; a
        // second vector has images, because a micro-panel of fewer columns has one.
        unsafe {
            let steps = std::slice::from_raw_parts(steps.add(at.steps.start), at.steps.len());
            (micro.gather)(tile, steps, &pieces[..used], &[0, 1, 2][..=used], to);
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
        let (sizes, kernel) = (self.call.sizes, self.call.kernel);
        let part = self.part(column_block);
        let [joined, plane] = [sizes.images * part.len(), part.len()];
        let first = group * sizes.other + rows.start;
        let (row, column) = (
            part.start / self.geometry.out[1],
            part.start % self.geometry.out[1],
        );
        let sums = scratch.cast::<f32>();
        // SAFETY: the block is this worker's, and so is the scratch memory, which begins with room
        // for some channels of a block.
        unsafe {
            let scratch = scratch.add(kernel.space.scratch - kernel.code.scratch_bytes());
            for some in (0..rows.len()).step_by(FINISHED_CHANNELS) {
                let channels = FINISHED_CHANNELS.min(rows.len() - some);
                // Positions of an image are neighbours again.
                for channel in 0..channels {
                    let from = pack::Source {
                        at: acc.add((some + channel) * stride),
                        stride: self.images as isize,
                        step: 1,
                    };
                    let to = sums.add(channel * joined);
                    (kernel.micro.pack)(from, plane, sizes.images, to, plane);
                }
                for image in 0..sizes.images {
                    self.code.block(
                        &[image, first + some, row, column],
                        1,
                        channels,
                        plane,
                        sums.add(image * plane).cast_const().cast(),
                        joined,
                        scratch,
                    );
                }
            }
        }
    }
}
