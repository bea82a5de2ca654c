//! Convolutions of single planes: depthwise convolutions, in which every channel is a group.
//!
//! There is no sum over channels, and therefore no operand to reuse but the few weights of a
//! kernel: a loop over vectors of a row, with several rows in flight at a time. Where results are as
//! large as the image, a vector may run on from row to row, with several channels in flight.

use super::simd::Simd;

/// Rows, or channels, in flight at a time.
const ROWS: usize = 4;
/// Kernel elements whose sums are kept in registers.
const TAPS: usize = 9;
/// The same where fewer kernel elements are left.
const FEW_TAPS: usize = 3;

/// One channel of some images: output row (i, r), `columns` long, at `result + i·result_image +
/// r·columns` beside the source, from which it reads, for kernel element t, the row at `source +
/// i·image + r·row + offsets[t]`.
pub(in super::super) struct Planes {
    pub source: *const f32,
    /// Elements between images and between rows.
    pub image: usize,
    pub row: usize,
    pub images: usize,
    pub rows: usize,
    pub columns: usize,
    pub taps: usize,
    pub offsets: *const i32,
    /// The kernel, or for its gradient a vector of sums for each of its elements.
    pub weights: *mut f32,
    /// Written, or for the gradient read.
    pub result: *mut f32,
    pub result_image: usize,
}

/// Computes the rows.
pub(in super::super) type Convolve = unsafe fn(planes: &Planes);

/// Adds `Σ source · result`, by lanes, to the sums of each kernel element.
pub(in super::super) type Correlate = unsafe fn(planes: &Planes);

#[inline(always)]
pub(super) unsafe fn convolve<S: Simd>(planes: &Planes) {
    for image in 0..planes.images {
        // SAFETY: the caller enables S's instruction set and gives planes that may be read and
        // written.
        unsafe {
            let whole = planes.rows / ROWS * ROWS;
            for row in (0..whole).step_by(ROWS) {
                rows::<S, ROWS>(planes, image, row);
            }
            for row in whole..planes.rows {
                rows::<S, 1>(planes, image, row);
            }
        }
    }
}

#[inline(always)]
unsafe fn rows<S: Simd, const R: usize>(planes: &Planes, image: usize, row: usize) {
    // SAFETY: as above; lanes past the end of a row are neither read nor written.
    unsafe {
        let from = planes.source.add(image * planes.image + row * planes.row);
        let to = planes
            .result
            .add(image * planes.result_image + row * planes.columns);
        let whole = planes.columns / S::LANES * S::LANES;
        for column in (0..whole).step_by(S::LANES) {
            let sums = sums::<S, R>(planes, from.add(column), |at| S::load(at));
            for (r, sum) in sums.into_iter().enumerate() {
                S::store(to.add(r * planes.columns + column), sum);
            }
        }
        let left = planes.columns - whole;
        if left > 0 {
            let mask = (1u32 << left) - 1;
            let sums = sums::<S, R>(planes, from.add(whole), |at| S::load_mask(at, mask));
            for (r, sum) in sums.into_iter().enumerate() {
                S::store_first(to.add(r * planes.columns + whole), sum, left);
            }
        }
    }
}

/// A vector of each of some rows.
#[inline(always)]
unsafe fn sums<S: Simd, const R: usize>(
    planes: &Planes,
    from: *const f32,
    load: impl Fn(*const f32) -> S::V,
) -> [S::V; R] {
    // SAFETY: as above.
    unsafe {
        let mut sums = [S::zero(); R];
        for tap in 0..planes.taps {
            let (weight, from) = (
                S::splat(planes.weights.add(tap)),
                from.add(*planes.offsets.add(tap) as usize),
            );
            for (r, sum) in sums.iter_mut().enumerate() {
                *sum = S::fma(weight, load(from.add(r * planes.row)), *sum);
            }
        }
        sums
    }
}

#[inline(always)]
pub(super) unsafe fn correlate<S: Simd>(planes: &Planes) {
    // SAFETY: as for `convolve`.
    unsafe {
        let mut tap = 0;
        while tap < planes.taps {
            tap = match planes.taps - tap {
                TAPS.. => taps_of::<S, TAPS>(planes, tap),
                FEW_TAPS.. => taps_of::<S, FEW_TAPS>(planes, tap),
                _ => taps_of::<S, 1>(planes, tap),
            };
        }
    }
}

/// The sums of some kernel elements, and the element after them.
#[inline(always)]
unsafe fn taps_of<S: Simd, const T: usize>(planes: &Planes, tap: usize) -> usize {
    // SAFETY: as for `convolve`; lanes past the end of a row are zeros on both sides.
    unsafe {
        let at = |t: usize| planes.weights.add((tap + t) * S::LANES);
        let mut sums: [S::V; T] = std::array::from_fn(|t| S::load(at(t)));
        let offsets: [usize; T] = std::array::from_fn(|t| *planes.offsets.add(tap + t) as usize);
        for image in 0..planes.images {
            for row in 0..planes.rows {
                let from = planes.source.add(image * planes.image + row * planes.row);
                let other = planes
                    .result
                    .add(image * planes.result_image + row * planes.columns);
                let whole = planes.columns / S::LANES * S::LANES;
                for column in (0..whole).step_by(S::LANES) {
                    let y = S::load(other.add(column));
                    for (sum, offset) in sums.iter_mut().zip(offsets) {
                        *sum = S::fma(S::load(from.add(offset + column)), y, *sum);
                    }
                }
                if whole < planes.columns {
                    let mask = (1u32 << (planes.columns - whole)) - 1;
                    let y = S::load_mask(other.add(whole), mask);
                    for (sum, offset) in sums.iter_mut().zip(offsets) {
                        *sum = S::fma(S::load_mask(from.add(offset + whole), mask), y, *sum);
                    }
                }
            }
        }
        for (t, sum) in sums.into_iter().enumerate() {
            S::store(at(t), sum);
        }
    }
    tap + T
}

/// Channels of some images, whose planes are read where they are: element p of the result's plane
/// reads, for kernel element t, the image's element `p + offsets[t]` if that is inside the image.
/// Planes are `positions` contiguous elements; image i and channel c of either operand is at
/// `i·strides[0] + c·strides[1]`.
pub(in super::super) struct WholePlanes<'a> {
    pub source: *const f32,
    pub source_strides: [isize; 2],
    pub images: usize,
    pub channels: usize,
    pub positions: usize,
    pub offsets: &'a [i32],
    /// The lanes that are inside the image: a mask for each vector of positions and, of each, for
    /// each kernel element.
    pub inside: &'a [u32],
    /// The kernel of each channel, or for its gradient a vector of sums for each of its elements.
    pub weights: *mut f32,
    /// Written, or for the gradient read.
    pub result: *mut f32,
    pub result_strides: [isize; 2],
}

/// Computes the planes.
pub(in super::super) type ConvolveWhole = unsafe fn(planes: &WholePlanes);

/// Adds `Σ source · result`, by lanes, to the sums of each kernel element.
pub(in super::super) type CorrelateWhole = unsafe fn(planes: &WholePlanes);

impl WholePlanes<'_> {
    fn source(&self, image: usize, channel: usize) -> *const f32 {
        let [of_image, of_channel] = self.source_strides;
        self.source
            .wrapping_offset(image as isize * of_image + channel as isize * of_channel)
    }

    fn result(&self, image: usize, channel: usize) -> *mut f32 {
        let [of_image, of_channel] = self.result_strides;
        self.result
            .wrapping_offset(image as isize * of_image + channel as isize * of_channel)
    }
}

/// All lanes of a vector.
const fn all<S: Simd>() -> u32 {
    ((1u64 << S::LANES) - 1) as u32
}

#[inline(always)]
pub(super) unsafe fn convolve_whole<S: Simd>(planes: &WholePlanes) {
    let taps = planes.offsets.len();
    // Images share the kernel and the masks, channels the masks alone.
    let images = planes.images / ROWS * ROWS;
    // SAFETY: the caller enables S's instruction set and gives planes that may be read and written.
    unsafe {
        for channel in 0..planes.channels {
            let weights = planes.weights.add(channel * taps);
            for image in (0..images).step_by(ROWS) {
                let at = std::array::from_fn(|r| [image + r, channel]);
                vectors::<S, ROWS>(planes, at, [weights; ROWS], true);
            }
        }
        let channels = planes.channels / ROWS * ROWS;
        for image in images..planes.images {
            for channel in (0..channels).step_by(ROWS) {
                let at = std::array::from_fn(|r| [image, channel + r]);
                let weights = at.map(|[_, channel]| planes.weights.add(channel * taps));
                vectors::<S, ROWS>(planes, at, weights, false);
            }
            for channel in channels..planes.channels {
                let weights = planes.weights.add(channel * taps);
                vectors::<S, 1>(planes, [[image, channel]], [weights], true);
            }
        }
    }
}

/// Some planes, each an image and a channel, at the same time.
#[inline(always)]
unsafe fn vectors<S: Simd, const R: usize>(
    planes: &WholePlanes,
    at: [[usize; 2]; R],
    weights: [*mut f32; R],
    is_one_kernel: bool,
) {
    let taps = planes.offsets.len();
    let from = at.map(|[image, channel]| planes.source(image, channel));
    let to = at.map(|[image, channel]| planes.result(image, channel));
    for (v, inside) in planes.inside.chunks_exact(taps).enumerate() {
        let first = v * S::LANES;
        // SAFETY: as for `convolve_whole`; lanes outside of the image are not read, and those past
        // the end of a plane not written.
        unsafe {
            let mut sums = [S::zero(); R];
            for (tap, (&inside, &offset)) in inside.iter().zip(planes.offsets).enumerate() {
                let at = from.map(|from| from.wrapping_offset(first as isize + offset as isize));
                let weights = match is_one_kernel {
                    true => [S::splat(weights[0].add(tap)); R],
                    false => weights.map(|weights| S::splat(weights.add(tap))),
                };
                match inside == all::<S>() {
                    true => add::<S, R>(&mut sums, weights, at, |at| S::load(at)),
                    false => add::<S, R>(&mut sums, weights, at, |at| S::load_part(at, inside)),
                }
            }
            let left = planes.positions - first;
            for (to, sum) in to.into_iter().zip(sums) {
                let to = to.wrapping_add(first);
                match left >= S::LANES {
                    true => S::store(to, sum),
                    false => S::store_first(to, sum, left),
                }
            }
        }
    }
}

/// Adds a weight times a vector to each sum.
#[inline(always)]
unsafe fn add<S: Simd, const R: usize>(
    sums: &mut [S::V; R],
    weights: [S::V; R],
    at: [*const f32; R],
    load: impl Fn(*const f32) -> S::V,
) {
    for ((sum, weight), at) in sums.iter_mut().zip(weights).zip(at) {
        // SAFETY: the caller enables S's instruction set.
        *sum = unsafe { S::fma(weight, load(at), *sum) };
    }
}

#[inline(always)]
pub(super) unsafe fn correlate_whole<S: Simd>(planes: &WholePlanes) {
    let taps = planes.offsets.len();
    for channel in 0..planes.channels {
        let mut tap = 0;
        while tap < taps {
            // SAFETY: as for `convolve_whole`.
            tap = unsafe {
                match taps - tap {
                    TAPS.. => taps_of_channel::<S, TAPS>(planes, channel, tap),
                    FEW_TAPS.. => taps_of_channel::<S, FEW_TAPS>(planes, channel, tap),
                    _ => taps_of_channel::<S, 1>(planes, channel, tap),
                }
            };
        }
    }
}

/// The sums of some kernel elements of a channel, and the element after them.
#[inline(always)]
unsafe fn taps_of_channel<S: Simd, const T: usize>(
    planes: &WholePlanes,
    channel: usize,
    tap: usize,
) -> usize {
    let taps = planes.offsets.len();
    let offsets: [isize; T] = std::array::from_fn(|t| planes.offsets[tap + t] as isize);
    // SAFETY: as for `convolve_whole`; lanes past the end of a plane are not read.
    unsafe {
        let at = |t: usize| planes.weights.add((channel * taps + tap + t) * S::LANES);
        let mut sums: [S::V; T] = std::array::from_fn(|t| S::load(at(t)));
        for image in 0..planes.images {
            let (from, other) = (planes.source(image, channel), planes.result(image, channel));
            for (v, inside) in planes.inside.chunks_exact(taps).enumerate() {
                let (first, inside) = (v * S::LANES, &inside[tap..tap + T]);
                let read = offsets.map(|offset| from.wrapping_offset(first as isize + offset));
                let other = other.add(first);
                if inside.iter().all(|&inside| inside == all::<S>()) {
                    let y = S::load(other);
                    for (sum, at) in sums.iter_mut().zip(read) {
                        *sum = S::fma(S::load(at), y, *sum);
                    }
                    continue;
                }
                let y = match planes.positions - first {
                    left if left < S::LANES => S::load_part(other, (1 << left) - 1),
                    _ => S::load(other),
                };
                for ((sum, at), &inside) in sums.iter_mut().zip(read).zip(inside) {
                    *sum = S::fma(S::load_part(at, inside), y, *sum);
                }
            }
        }
        for (t, sum) in sums.into_iter().enumerate() {
            S::store(at(t), sum);
        }
    }
    tap + T
}
