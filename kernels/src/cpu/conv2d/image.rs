//! The source of tiles: an image in memory, or one that a prologue computes while it is packed.

use std::ops::Range;

use smallvec::SmallVec;

use super::Call;
use super::tile::{Axis, Part, Shape, Source, fill};
use crate::cpu::gemm::pack;
use crate::cpu::tile::{Bound, TileCode};
use crate::cpu::{Config, Launch, SpecError};
use crate::size::Env;
use crate::spec::{self, MAX_ARGUMENTS, Spec};

/// Elements of a cache line, to which the interpreter's memory is aligned.
const LINE: usize = 16;

/// A convolution's prologue, prepared.
pub(super) struct Prologue {
    code: TileCode,
    /// Elements of the buffer for the computed image, and of the image in it.
    buffer: usize,
    elements: usize,
}

impl Prologue {
    /// The prologue of a convolution, if it has one; [`Spec::check_anchor`] has accepted it.
    pub fn new(
        body: &spec::Conv2d,
        bound: &Env,
        config: &Config,
    ) -> Result<Option<Prologue>, SpecError> {
        let code = body
            .prologue
            .as_deref()
            .map(|spec| TileCode::new(spec, bound, config))
            .transpose()?;
        Ok(code.map(|code| Prologue {
            code,
            buffer: 0,
            elements: 0,
        }))
    }

    /// Elements of a worker's buffer for computing `elements` elements of the image at a time, the
    /// interpreter's memory included.
    pub fn buffer(&self, elements: usize) -> usize {
        elements
            .next_multiple_of(LINE)
            .saturating_add(self.code.scratch_bytes().div_ceil(4))
            .next_multiple_of(LINE)
    }

    /// With a buffer of that size.
    pub fn with_buffer(self, elements: usize) -> Prologue {
        Prologue {
            buffer: self.buffer(elements),
            elements: elements.next_multiple_of(LINE),
            ..self
        }
    }
}

/// The image of one run.
pub(super) struct Image<'a> {
    call: &'a Call<'a>,
    axes: [Axis; 2],
    source: Source,
    prologue: Option<(&'a Prologue, Bound<'a>)>,
}

impl<'a> Image<'a> {
    /// The image of a call, as a convolution with these axes reads it; `source` is its first
    /// argument, and is used if there is no prologue.
    pub fn new(call: &'a Call<'a>, axes: &[Axis; 2], source: Source) -> Self {
        let Call {
            body,
            launch,
            kernel,
            ..
        } = *call;
        let prologue = kernel.prologue.as_deref().zip(body.prologue.as_deref());
        let bound = |(prologue, spec): (&'a Prologue, _)| {
            (prologue, bind(&prologue.code, spec, launch, body.sources()))
        };
        Image {
            call,
            axes: *axes,
            source,
            prologue: prologue.map(bound),
        }
    }

    /// [`fill`] from this image. `end`: of the buffer that holds the tile and, in its last
    /// elements, from a cache line on, the buffer of a prologue.
    ///
    /// # Safety
    /// As for [`fill`]; of an image that a prologue computes, the prologue's arguments may be read.
    pub unsafe fn fill(
        &self,
        channels: Range<usize>,
        part: &Part,
        shape: &Shape,
        to: *mut f32,
        end: *mut f32,
    ) {
        let (axes, lines) = (&self.axes, self.call.kernel.micro.fill);
        let Some((prologue, code)) = &self.prologue else {
            // SAFETY: the caller's promise.
            return unsafe { fill(&self.source, axes, channels, part, shape, to, lines) };
        };
        let reads = self.reads(part);
        let plane = reads[0].len() * reads[1].len();
        let at_once = (prologue.elements / plane.max(1)).max(1);
        let buffer = end.wrapping_sub(prologue.buffer);
        let scratch = buffer.wrapping_add(prologue.elements).cast();
        for (i, image) in part.images.clone().enumerate() {
            let one = Part {
                images: image..image + 1,
                ..part.clone()
            };
            for first in channels.clone().step_by(at_once) {
                let some = first..(first + at_once).min(channels.end);
                // SAFETY: the buffer holds the elements of one channel at least, and those that
                // `fill` reads have been computed.
                unsafe {
                    self.compute(code, image, &some, &reads, buffer, scratch);
                    let computed = Source::of_copy(buffer, image, &some, &reads);
                    fill(
                        &computed,
                        axes,
                        some,
                        &one,
                        shape,
                        to.add(i * shape.image + (first - channels.start) * shape.channel),
                        lines,
                    )
                };
            }
        }
    }

    /// A source whose columns are neighbours, with all elements of `channels` that a part reads:
    /// the image itself or, at `to`, a copy of them. `end` as for [`Image::fill`], of a prologue
    /// whose buffer has no elements.
    ///
    /// # Safety
    /// The image has these channels, and its prologue's arguments may be read. `to` has room for the
    /// elements that the part reads, if there is a prologue or columns are no neighbours.
    pub unsafe fn dense(
        &self,
        channels: Range<usize>,
        part: &Part,
        to: *mut f32,
        end: *mut f32,
    ) -> Source {
        let reads = self.reads(part);
        let [rows, columns] = [reads[0].len(), reads[1].len()];
        let image = channels.len() * rows * columns;
        let copy = Source::of_copy(to, part.images.start, &channels, &reads);
        if let Some((prologue, code)) = &self.prologue {
            let scratch = end.wrapping_sub(prologue.buffer).cast();
            for (i, number) in part.images.clone().enumerate() {
                // SAFETY: the caller gives room for the elements.
                unsafe {
                    self.compute(code, number, &channels, &reads, to.add(i * image), scratch);
                }
            }
            return copy;
        }
        let [of_image, of_channel, of_row, of_column] = self.source.strides;
        if of_column == 1 {
            return self.source;
        }
        let first = self.source.at.wrapping_offset(
            part.images.start as isize * of_image
                + channels.start as isize * of_channel
                + reads[0].start as isize * of_row
                + reads[1].start as isize * of_column,
        );
        let lines = pack::Lines {
            from: first,
            to,
            counts: [part.images.len(), channels.len(), rows],
            from_strides: [of_image, of_channel, of_row],
            to_strides: [image, rows * columns, columns],
            stride: of_column,
            first: 0,
            count: columns,
            length: columns,
        };
        // SAFETY: the part reads these elements of the image, and the caller gives room for them.
        unsafe { (self.call.kernel.micro.fill)(&lines) };
        copy
    }

    /// Rows and columns that a part reads.
    fn reads(&self, part: &Part) -> [Range<usize>; 2] {
        [
            self.axes[0].reads_of(&part.rows),
            self.axes[1].reads_of(&part.columns),
        ]
    }

    /// Computes some rows and columns of some channels of an image by the prologue's code.
    ///
    /// # Safety
    /// These points lie inside the image, `to` has room for them, and `scratch` for the code.
    unsafe fn compute(
        &self,
        code: &Bound,
        image: usize,
        channels: &Range<usize>,
        reads: &[Range<usize>; 2],
        to: *mut f32,
        scratch: *mut u8,
    ) {
        let [rows, columns] = reads;
        let plane = rows.len() * columns.len();
        // Rows that are computed whole are contiguous.
        let whole = columns.len() == self.axes[1].source;
        let (runs, length) = if whole {
            (1, plane)
        } else {
            (rows.len(), columns.len())
        };
        for run in (0..runs).filter(|_| plane > 0) {
            let origin = [image, channels.start, rows.start + run, columns.start];
            // SAFETY: the caller's promise.
            unsafe {
                code.make(
                    &origin,
                    1,
                    [channels.len(), length],
                    to.add(run * length),
                    plane,
                    scratch,
                )
            };
        }
    }
}

/// The prologue's code with the sizes and addresses of a run: its operands are the first arguments,
/// and its result has no address.
fn bind<'a>(code: &'a TileCode, spec: &Spec, launch: &Launch, sources: usize) -> Bound<'a> {
    let mut args: SmallVec<[*mut u8; MAX_ARGUMENTS]> =
        SmallVec::from_slice(&launch.args[..sources]);
    args.push(std::ptr::null_mut());
    let mut bound = Bound::new(code);
    bound.resolve(
        spec,
        &Launch {
            args: &args,
            ..*launch
        },
        &[0, 1, 2, 3],
    );
    bound
}
