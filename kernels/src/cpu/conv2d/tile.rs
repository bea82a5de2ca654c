//! A zero-padded part of an image, in which every kernel element is a constant offset away from
//! every output position.

use std::ops::Range;

use crate::cpu::gemm::{IMAGE_TILE_ELEMENTS, pack};

/// A four-axis operand: images, channels, rows, columns.
#[derive(Clone, Copy)]
pub(super) struct Source {
    pub at: *const f32,
    pub strides: [isize; 4],
}

impl Source {
    /// A copy at `to` of some rows and columns of some channels of the images from `image` on, whole
    /// images one after the other; elements are found by their places in the image.
    pub fn of_copy(
        to: *const f32,
        image: usize,
        channels: &Range<usize>,
        [rows, columns]: &[Range<usize>; 2],
    ) -> Source {
        let plane = rows.len() * columns.len();
        let strides = [channels.len() * plane, plane, columns.len(), 1];
        let first = [image, channels.start, rows.start, columns.start];
        let before: usize = first
            .iter()
            .zip(strides)
            .map(|(at, stride)| at * stride)
            .sum();
        Source {
            at: to.wrapping_sub(before),
            strides: strides.map(|stride| stride as isize),
        }
    }
}

/// Rows or columns of a convolution. Of the forward product and the weight gradient: output
/// position o and kernel element t read element `o·step + offset(t) − pad` of the source.
///
/// In the input gradient, position h of the image is reached by the elements t for which
/// `h + first − t·dilation` is a multiple of the stride, from the source element that this multiple
/// counts. Which elements these are depends on the *phase* of h alone, its remainder by the stride;
/// so the positions of one phase, h = phase + o·stride, are a convolution of stride 1 with some of
/// the kernel's elements, and again o and t read element `o + offset(t) − pad`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Axis {
    /// Output positions; of an input gradient, those of its longest phase.
    pub out: usize,
    pub source: usize,
    pub taps: usize,
    /// Elements of the source between neighbouring output positions.
    pub step: usize,
    /// Phases of output positions.
    pub phases: usize,
    /// Zeros before the first element; negative where the first elements are never read.
    pub pad: isize,
    dilation: usize,
    /// For an input gradient: the forward padding, and the stride.
    backward: Option<(isize, usize)>,
}

impl Axis {
    /// The axis of a forward product or a weight gradient: positions of the image and of the
    /// result.
    pub fn forward(image: usize, result: usize, [taps, stride, dilation, pad]: [usize; 4]) -> Axis {
        Axis {
            out: result,
            source: image,
            taps,
            step: stride,
            phases: 1,
            pad: pad as isize,
            dilation,
            backward: None,
        }
    }

    /// The axis of an input gradient.
    pub fn backward(
        image: usize,
        result: usize,
        [taps, stride, dilation, pad]: [usize; 4],
    ) -> Axis {
        let (out, phases, backward) = (
            image.div_ceil(stride),
            stride.min(image.max(1)),
            Some((pad as isize, stride)),
        );
        let axis = Axis {
            out,
            source: result,
            taps,
            step: 1,
            phases,
            pad: 0,
            dilation,
            backward,
        };
        Axis {
            pad: -axis.reaches(taps - 1),
            ..axis
        }
    }

    /// The axis of a source that is read without shifts.
    pub fn plain(size: usize) -> Axis {
        Axis::forward(size, size, [1, 1, 1, 0])
    }

    /// Whether a position may be out of some kernel elements' reach.
    pub fn is_phased(&self) -> bool {
        self.backward.is_some_and(|(_, stride)| stride > 1)
    }

    /// The source element that a phase's first position reads by kernel element `tap`, which must
    /// be one of its own.
    fn reaches(&self, tap: usize) -> isize {
        let distance = (tap * self.dilation) as isize;
        match self.backward {
            // (first − distance) / stride, rounded up to the first position of the phase.
            Some((first, stride)) => -(distance - first).div_euclid(stride as isize),
            None => distance,
        }
    }

    /// The phase whose positions kernel element `tap` reaches; it may lie past the last.
    pub fn phase(&self, tap: usize) -> usize {
        let distance = (tap * self.dilation) as isize;
        self.backward.map_or(0, |(first, stride)| {
            (distance - first).rem_euclid(stride as isize) as usize
        })
    }

    /// Positions between the first that any kernel element reads and element `tap`'s.
    pub fn offset(&self, tap: usize) -> usize {
        let first = if self.backward.is_some() {
            self.reaches(self.taps - 1)
        } else {
            0
        };
        (self.reaches(tap) - first) as usize
    }

    /// Whether every output position reads elements of the source alone, and no zeros beside them.
    pub fn is_unpadded(&self) -> bool {
        self.pad == 0 && self.extent(self.out) <= self.source
    }

    /// Positions that `out` output positions read.
    fn extent(&self, out: usize) -> usize {
        let last = if self.backward.is_some() {
            0
        } else {
            self.taps - 1
        };
        (out.saturating_sub(1))
            .saturating_mul(self.step)
            .saturating_add(self.offset(last) + 1)
    }

    /// The output positions at which kernel element `tap` reads an element of the source. (Not of
    /// an input gradient.)
    pub fn inside(&self, tap: usize) -> Range<usize> {
        let first = self.offset(tap) as isize - self.pad;
        let up = |distance: isize| distance.max(0).unsigned_abs().div_ceil(self.step);
        let end = up(self.source as isize - first).min(self.out);
        up(-first).min(end)..end
    }

    /// The place in the source of the first element that an output position reads, negative in the
    /// padding.
    pub fn first(&self, position: usize) -> isize {
        (position * self.step) as isize - self.pad
    }

    /// The elements of the source that these output positions read, and those between them.
    pub fn reads_of(&self, positions: &Range<usize>) -> Range<usize> {
        let first = self.first(positions.start);
        let inside = |element: isize| element.clamp(0, self.source as isize) as usize;
        inside(first)..inside(first + self.extent(positions.len()) as isize)
    }

    /// Whether any kernel element reads positions of this remainder by `step`.
    fn reads(&self, remainder: usize) -> bool {
        self.step == 1 || (0..self.taps).any(|tap| self.offset(tap) % self.step == remainder)
    }

    /// The elements of the source among the positions `from + step·(0..count)`.
    fn hits(&self, from: isize, count: usize) -> Hits {
        let up = |distance: isize| distance.max(0).unsigned_abs().div_ceil(self.step);
        let first = up(-from).min(count);
        let element = from + (first * self.step) as isize;
        Hits {
            first,
            element,
            count: up(self.source as isize - element).min(count - first),
        }
    }
}

/// See [`Axis::hits`]: the index of the first, its element, and how many there are.
struct Hits {
    first: usize,
    element: isize,
    count: usize,
}

/// Some output positions: whole images, whole rows of one image, or a part of one row.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Part {
    pub images: Range<usize>,
    pub rows: Range<usize>,
    pub columns: Range<usize>,
}

impl Part {
    pub fn len(&self) -> usize {
        self.images.len() * self.rows.len() * self.columns.len()
    }
}

/// Output positions cut into parts, in row-major order.
#[derive(Clone, Copy, Debug)]
pub(super) struct Parts {
    images: usize,
    out: [usize; 2],
    /// Images, rows and columns of a part but the last; all but one of them are whole or one.
    size: [usize; 3],
    /// Parts along the rows and the columns of an image.
    counts: [usize; 2],
}

impl Parts {
    /// Parts of at most `most` positions whose tiles of `channels` channels have no more than
    /// `tile` elements, if that is possible. The length of a part of a row is a multiple of
    /// `multiple`, if possible.
    pub fn new(
        images: usize,
        axes: &[Axis; 2],
        channels: usize,
        most: usize,
        tile: usize,
        multiple: usize,
    ) -> Parts {
        let even = crate::cpu::gemm::even;
        Parts::cut(
            images,
            axes,
            channels,
            [most, tile],
            multiple,
            |images, most| even(images, most, 1),
        )
    }

    /// Like [`Parts::new`] with small tiles, but parts of several images are as large as possible
    /// rather than of equal size, so that the end of a part does not depend on later images.
    pub fn from_first(
        images: usize,
        axes: &[Axis; 2],
        channels: usize,
        most: usize,
        multiple: usize,
    ) -> Parts {
        Parts::cut(
            images,
            axes,
            channels,
            [most, IMAGE_TILE_ELEMENTS],
            multiple,
            |_, most| most,
        )
    }

    fn cut(
        images: usize,
        axes: &[Axis; 2],
        channels: usize,
        [most, tile]: [usize; 2],
        multiple: usize,
        share: impl Fn(usize, usize) -> usize,
    ) -> Parts {
        let out = [axes[0].out, axes[1].out];
        let fits = |size: [usize; 3]| {
            let positions = size[0].saturating_mul(size[1]).saturating_mul(size[2]);
            positions <= most
                && Shape::new(axes, channels, size[1], size[2]).elements(size[0]) <= tile
        };
        // The largest n up to `total` for which `fits` holds, or 1.
        let largest = |total: usize, fits: &dyn Fn(usize) -> bool| {
            let (mut yes, mut no) = (1, total + 1);
            while no - yes > 1 {
                let middle = yes + (no - yes) / 2;
                if fits(middle) {
                    yes = middle
                } else {
                    no = middle
                }
            }
            yes
        };
        let even = crate::cpu::gemm::even;
        let size = if fits([1, out[0], out[1]]) {
            [
                share(images, largest(images, &|n| fits([n, out[0], out[1]]))),
                out[0],
                out[1],
            ]
        } else if fits([1, 1, out[1]]) {
            [
                1,
                even(out[0], largest(out[0], &|n| fits([1, n, out[1]])), 1),
                out[1],
            ]
        } else {
            let columns = largest(out[1], &|n| fits([1, 1, n]));
            [
                1,
                1,
                even(
                    out[1],
                    (columns / multiple * multiple).max(multiple),
                    multiple,
                )
                .min(out[1].max(1)),
            ]
        };
        let size = size.map(|s| s.max(1));
        Parts {
            images,
            out,
            size,
            counts: [0, 1].map(|axis| out[axis].div_ceil(size[axis + 1])),
        }
    }

    /// Images, rows and columns of a part but the last.
    pub fn size(&self) -> [usize; 3] {
        self.size
    }

    /// Parts of the images before this one, which must be the first of a part or past the last.
    pub fn before(&self, image: usize) -> usize {
        Parts {
            images: image,
            ..*self
        }
        .count()
    }

    pub fn count(&self) -> usize {
        self.images.div_ceil(self.size[0]) * self.counts[0] * self.counts[1]
    }

    /// Positions of the largest part.
    pub fn most(&self) -> usize {
        self.size.iter().product()
    }

    pub fn get(&self, part: usize) -> Part {
        let [rows, columns] = self.counts;
        let range = |index: usize, axis: usize, total: usize| {
            index * self.size[axis]..((index + 1) * self.size[axis]).min(total)
        };
        Part {
            images: range(part / columns / rows, 0, self.images),
            rows: range(part / columns % rows, 1, self.out[0]),
            columns: range(part % columns, 2, self.out[1]),
        }
    }

    /// The part's positions, counted through all images.
    pub fn range(&self, part: usize) -> Range<usize> {
        self.positions(&self.get(part))
    }

    /// Like [`Parts::range`] of a part's number.
    pub fn positions(&self, part: &Part) -> Range<usize> {
        let first =
            (part.images.start * self.out[0] + part.rows.start) * self.out[1] + part.columns.start;
        first..first + part.len()
    }
}

/// The layout of a tile: an element is at `image · image + channel · channel + row · row + column`,
/// columns first by their remainder by `step`, so that neighbouring output positions read
/// neighbours.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shape {
    pub image: usize,
    pub channel: usize,
    pub row: usize,
    /// Columns of one remainder.
    segment: usize,
}

impl Shape {
    pub fn new(axes: &[Axis; 2], channels: usize, rows: usize, columns: usize) -> Shape {
        let segment = axes[1].extent(columns).div_ceil(axes[1].step);
        let row = segment.saturating_mul(axes[1].step);
        let channel = row.saturating_mul(axes[0].extent(rows));
        Shape {
            image: channel.saturating_mul(channels),
            channel,
            row,
            segment,
        }
    }

    /// Elements of a channel of a tile for so many rows and columns.
    pub fn of_channel(axes: &[Axis; 2], rows: usize, columns: usize) -> usize {
        Shape::new(axes, 1, rows, columns).channel
    }

    pub fn elements(&self, images: usize) -> usize {
        self.image.saturating_mul(images)
    }

    /// The offset of kernel element (row, column) from the first.
    pub fn tap(&self, axes: &[Axis; 2], row: usize, column: usize) -> usize {
        let x = axes[1].offset(column);
        axes[0].offset(row) * self.row + x % axes[1].step * self.segment + x / axes[1].step
    }

    /// The offset of an output position of the part from the part's first.
    pub fn position(&self, axes: &[Axis; 2], image: usize, row: usize, column: usize) -> usize {
        image * self.image + row * axes[0].step * self.row + column
    }
}

/// Copies the part of `channels` that `part` reads, with its padding, to a tile of this shape. Rows
/// and remainders of columns that no kernel element reads are left as they are.
///
/// # Safety
/// The source has these images and channels, and `to` room for the shape's elements.
pub(super) unsafe fn fill(
    from: &Source,
    axes: &[Axis; 2],
    channels: Range<usize>,
    part: &Part,
    shape: &Shape,
    to: *mut f32,
    lines: pack::Fill,
) {
    let [image_stride, channel_stride, row_stride, column_stride] = from.strides;
    let origin = |axis: usize, first: usize| (first * axes[axis].step) as isize - axes[axis].pad;
    let (rows, steps) = (axes[0].extent(part.rows.len()), axes.map(|axis| axis.step));
    let first = from.at.wrapping_offset(
        part.images.start as isize * image_stride + channels.start as isize * channel_stride,
    );
    for row in (0..steps[0].min(rows)).filter(|&r| axes[0].reads(r)) {
        let count = (rows - row).div_ceil(steps[0]);
        let row_hits = axes[0].hits(origin(0, part.rows.start) + row as isize, count);
        for column in (0..steps[1]).filter(|&c| axes[1].reads(c)) {
            let hits = axes[1].hits(
                origin(1, part.columns.start) + column as isize,
                shape.segment,
            );
            let span = |rows: Range<usize>, filled: usize| pack::Lines {
                from: first
                    .wrapping_offset(row_hits.element * row_stride + hits.element * column_stride),
                to: to.wrapping_add(
                    (row + rows.start * steps[0]) * shape.row + column * shape.segment,
                ),
                counts: [part.images.len(), channels.len(), rows.len()],
                from_strides: [image_stride, channel_stride, row_stride * steps[0] as isize],
                to_strides: [shape.image, shape.channel, shape.row * steps[0]],
                stride: column_stride * steps[1] as isize,
                first: hits.first,
                count: filled,
                length: shape.segment,
            };
            // SAFETY: these are lines of the tile, and hits are rows and columns of the source.
            unsafe {
                let end = row_hits.first + row_hits.count;
                lines(&span(0..row_hits.first, 0));
                lines(&span(row_hits.first..end, hits.count));
                lines(&span(end..count, 0));
            }
        }
    }
}
