//! Convolutions of single planes: depthwise convolutions, in which every channel is a group.
//!
//! There is no sum over channels, and therefore no operand to reuse but the few weights of a
//! kernel: a loop over vectors of a row, with several rows in flight at a time.

use super::simd::Simd;

/// Rows in flight at a time.
const ROWS: usize = 4;
/// Kernel elements whose sums are kept in registers.
const TAPS: usize = 9;

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
        let whole = planes.taps / TAPS * TAPS;
        for tap in (0..whole).step_by(TAPS) {
            taps_of::<S, TAPS>(planes, tap);
        }
        for tap in whole..planes.taps {
            taps_of::<S, 1>(planes, tap);
        }
    }
}

#[inline(always)]
unsafe fn taps_of<S: Simd, const T: usize>(planes: &Planes, tap: usize) {
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
}
