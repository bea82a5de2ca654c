//! A zero-padded part of an image, in which every kernel element is a constant offset away from every output position.

use std::ops::Range;

/// Elements of a tile above which a smaller part of the image is taken, if there is one.
pub(super) const TILE: usize = 32 << 10;

/// A four-axis operand: images, channels, rows, columns.
#[derive(Clone, Copy)]
pub(super) struct Source {
    pub at: *const f32,
    pub strides: [isize; 4],
}

/// Rows or columns of a convolution: output position o and kernel element t read position `o·step + offset(t) − pad` of
/// the source spread out so that its element i stands at `i·spread`, zeros elsewhere.
#[derive(Clone, Copy, Debug)]
pub(super) struct Axis {
    pub out: usize,
    pub source: usize,
    pub taps: usize,
    pub dilation: usize,
    pub step: usize,
    pub spread: usize,
    /// Positions before the first element; negative where the first elements are never read.
    pub pad: isize,
    /// Whether kernel elements count from the far end.
    pub turned: bool,
}

impl Axis {
    /// Positions between the first kernel element's and element `tap`'s.
    fn offset(&self, tap: usize) -> usize {
        self.dilation * if self.turned { self.taps - 1 - tap } else { tap }
    }

    /// Positions that `out` output positions read.
    fn extent(&self, out: usize) -> usize {
        (out.saturating_sub(1)).saturating_mul(self.step).saturating_add((self.taps - 1) * self.dilation + 1)
    }

    /// The elements of the source among the positions `from + step·(0..count)` of the spread axis, as (first index of the
    /// range that hits one, its element, indices between hits, elements between hits, hits).
    fn hits(&self, from: isize, step: usize, count: usize) -> Hits {
        let (step, spread) = (step as isize, self.spread as isize);
        // One of `step` and `spread` is 1, so hits are evenly spaced.
        let every = if step == 1 { spread } else { 1 };
        let mut first = (-from).max(0).div_euclid(step) + isize::from((-from).max(0).rem_euclid(step) != 0);
        if step == 1 {
            first += (spread - (from + first).rem_euclid(spread)) % spread;
        }
        let element = (from + first * step) / spread;
        let stride = if step == 1 { 1 } else { step };
        let in_range = (count as isize - first + every - 1).max(0) / every;
        let in_source = (self.source as isize - element + stride - 1).max(0) / stride;
        Hits { first: first as usize, every: every as usize, element, stride, count: in_range.min(in_source) as usize }
    }
}

/// See [`Axis::hits`].
struct Hits {
    first: usize,
    every: usize,
    element: isize,
    stride: isize,
    count: usize,
}

/// Some output positions: whole images, whole rows of one image, or a stretch of one row.
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
}

impl Parts {
    /// Parts of at most `most` positions whose tiles of `channels` channels stay small, if that is possible. `multiple`: what
    /// a stretch of a row should be a multiple of.
    pub fn new(images: usize, axes: &[Axis; 2], channels: usize, most: usize, multiple: usize) -> Parts {
        let out = [axes[0].out, axes[1].out];
        let fits = |size: [usize; 3]| {
            let positions = size[0].saturating_mul(size[1]).saturating_mul(size[2]);
            positions <= most && Shape::new(axes, channels, size[1], size[2]).elements(size[0]) <= TILE
        };
        // The largest n up to `total` for which `fits` holds, or 1.
        let largest = |total: usize, fits: &dyn Fn(usize) -> bool| {
            let (mut yes, mut no) = (1, total + 1);
            while no - yes > 1 {
                let middle = yes + (no - yes) / 2;
                if fits(middle) { yes = middle } else { no = middle }
            }
            yes
        };
        let even = crate::cpu::gemm::even;
        let size = if fits([1, out[0], out[1]]) {
            [even(images, largest(images, &|n| fits([n, out[0], out[1]])), 1), out[0], out[1]]
        } else if fits([1, 1, out[1]]) {
            [1, even(out[0], largest(out[0], &|n| fits([1, n, out[1]])), 1), out[1]]
        } else {
            let columns = largest(out[1], &|n| fits([1, 1, n]));
            [1, 1, even(out[1], (columns / multiple * multiple).max(multiple), multiple).min(out[1].max(1))]
        };
        Parts { images, out, size: size.map(|s| s.max(1)) }
    }

    pub fn count(&self) -> usize {
        self.images.div_ceil(self.size[0]) * self.out[0].div_ceil(self.size[1]) * self.out[1].div_ceil(self.size[2])
    }

    /// Positions of the largest part.
    pub fn most(&self) -> usize {
        self.size.iter().product()
    }

    pub fn get(&self, part: usize) -> Part {
        let (rows, columns) = (self.out[0].div_ceil(self.size[1]), self.out[1].div_ceil(self.size[2]));
        let range = |index: usize, axis: usize, total: usize| index * self.size[axis]..((index + 1) * self.size[axis]).min(total);
        Part {
            images: range(part / columns / rows, 0, self.images),
            rows: range(part / columns % rows, 1, self.out[0]),
            columns: range(part % columns, 2, self.out[1]),
        }
    }

    /// The part's positions, counted through all images.
    pub fn range(&self, part: usize) -> Range<usize> {
        let part = self.get(part);
        let first = (part.images.start * self.out[0] + part.rows.start) * self.out[1] + part.columns.start;
        first..first + part.len()
    }
}

/// Where things are in a tile: `image · image + channel · channel + row · row + column`, columns first by their remainder by
/// `step`, so that neighbouring output positions read neighbours.
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
        Shape { image: channel.saturating_mul(channels), channel, row, segment }
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

/// Copies the part of `channels` that `part` reads, with its padding, to a tile of this shape.
///
/// # Safety
/// The source has these images and channels, and `to` room for the shape's elements.
pub(super) unsafe fn fill(from: &Source, axes: &[Axis; 2], channels: Range<usize>, part: &Part, shape: &Shape, to: *mut f32) {
    let [image_stride, channel_stride, row_stride, column_stride] = from.strides;
    let origin = |axis: usize, first: usize| (first * axes[axis].step) as isize - axes[axis].pad;
    let (rows, step) = (axes[0].extent(part.rows.len()), axes[1].step);
    let row_hits = axes[0].hits(origin(0, part.rows.start), 1, rows);
    for (i, image) in part.images.clone().enumerate() {
        for (c, channel) in channels.clone().enumerate() {
            let from = from.at.wrapping_offset(image as isize * image_stride + channel as isize * channel_stride);
            // SAFETY: the tile has this channel of this image; hits are rows and columns of the tile and of the source.
            unsafe {
                let to = to.add(i * shape.image + c * shape.channel);
                let mut next = 0;
                for hit in 0..row_hits.count {
                    let row = row_hits.first + hit * row_hits.every;
                    to.add(next * shape.row).write_bytes(0, (row - next) * shape.row);
                    let from = from.wrapping_offset((row_hits.element + hit as isize * row_hits.stride) * row_stride);
                    for remainder in 0..step {
                        let to = to.add(row * shape.row + remainder * shape.segment);
                        let first = origin(1, part.columns.start) + remainder as isize;
                        fill_row(from, column_stride, &axes[1].hits(first, step, shape.segment), shape.segment, to);
                    }
                    next = row + 1;
                }
                to.add(next * shape.row).write_bytes(0, (rows - next) * shape.row);
            }
        }
    }
}

/// # Safety
/// Hits lie inside the source row and the `count` elements at `to`.
unsafe fn fill_row(from: *const f32, stride: isize, hits: &Hits, count: usize, to: *mut f32) {
    // SAFETY: as above.
    unsafe {
        if hits.count == 0 || hits.every > 1 {
            to.write_bytes(0, count);
        } else {
            to.write_bytes(0, hits.first);
            to.add(hits.first + hits.count).write_bytes(0, count - hits.first - hits.count);
        }
        let (from, to) = (from.wrapping_offset(hits.element * stride), to.add(hits.first.min(count)));
        let stride = stride * hits.stride;
        if hits.every == 1 && stride == 1 {
            to.copy_from_nonoverlapping(from, hits.count);
        } else {
            for i in 0..hits.count {
                *to.add(i * hits.every) = *from.wrapping_offset(i as isize * stride);
            }
        }
    }
}
