//! Operands rearranged into the panels that micro-kernels walk in order.

use super::simd::Simd;

/// A strided matrix: element i of step k at `at + i·stride + k·step`.
#[derive(Clone, Copy)]
pub(in super::super) struct Source {
    pub at: *const f32,
    pub stride: isize,
    pub step: isize,
}

/// `to[k·width + i] = from(i, k)` for i below `count` ≤ `width` and k below `depth`; zeros for the other i.
pub(in super::super) type Pack = unsafe fn(from: Source, count: usize, depth: usize, to: *mut f32, width: usize);

/// Some lanes of a vector, read from one stretch of memory: lane l from `offset + l`.
#[derive(Clone, Copy, Default)]
pub(in super::super) struct Piece {
    pub offset: i32,
    pub lanes: u32,
}

/// For every step k, one vector per entry but the last of `vectors`, put side by side: vector v is joined from the pieces
/// `vectors[v]..vectors[v + 1]`, each read at `base + steps[k]`; lanes of no piece are zeros.
pub(in super::super) type Gather = unsafe fn(base: *const f32, steps: &[i32], pieces: &[Piece], vectors: &[u16], to: *mut f32);

#[inline(always)]
pub(super) unsafe fn pack<S: Simd>(from: Source, count: usize, depth: usize, to: *mut f32, width: usize) {
    // SAFETY: the caller enables S's instruction set; `from` is readable for i below `count` and k below `depth`, `to`
    // writable for `depth · width` elements, and the loops keep to both.
    unsafe {
        let whole = count / S::LANES * S::LANES;
        if from.stride == 1 {
            for k in 0..depth {
                let (from, to) = (from.at.offset(k as isize * from.step), to.add(k * width));
                for i in (0..whole).step_by(S::LANES) {
                    S::store(to.add(i), S::load(from.add(i)));
                }
                if width == count {
                    S::copy(from.add(whole), to.add(whole), count - whole);
                } else {
                    // Panels with zeros at the end are whole vectors wide.
                    S::store(to.add(whole), S::load_mask(from.add(whole), (1 << (count - whole)) - 1));
                    for i in (whole + S::LANES..width).step_by(S::LANES) {
                        S::store(to.add(i), S::zero());
                    }
                }
            }
            return;
        }
        if count < width {
            for k in 0..depth {
                for i in (whole..width).step_by(S::LANES) {
                    S::store(to.add(k * width + i), S::zero());
                }
            }
        }
        // A cache line of each row at a time: rows far apart may push each other out of the cache.
        let blocks = if from.step == 1 { depth / 8 } else { 0 };
        for first in (0..blocks).step_by(2) {
            for i in (0..count).step_by(8) {
                for k in first..(first + 2).min(blocks) {
                    let at = from.at.offset(i as isize * from.stride).add(8 * k);
                    S::transpose(at, from.stride, (count - i).min(8), to.add(8 * k * width + i), width);
                }
            }
        }
        let k = 8 * blocks;
        for k in k..depth {
            for i in 0..count {
                *to.add(k * width + i) = *from.at.offset(i as isize * from.stride + k as isize * from.step);
            }
        }
    }
}

#[inline(always)]
pub(super) unsafe fn gather<S: Simd>(base: *const f32, steps: &[i32], pieces: &[Piece], vectors: &[u16], to: *mut f32) {
    let width = (vectors.len() - 1) * S::LANES;
    // SAFETY: the caller enables S's instruction set, gives pieces whose lanes are readable at every step, and room in `to`
    // for a vector per step and entry of `vectors`. Lanes outside the pieces may lie anywhere, hence the wrapping offsets.
    unsafe {
        for (v, ends) in vectors.windows(2).enumerate() {
            let at = |step: i32, piece: Piece| S::load_mask(base.wrapping_offset(step as isize + piece.offset as isize), piece.lanes);
            let to = to.add(v * S::LANES);
            match pieces[usize::from(ends[0])..usize::from(ends[1])] {
                [one] if one.lanes.count_ones() as usize == S::LANES => {
                    for (k, &step) in steps.iter().enumerate() {
                        S::store(to.add(k * width), S::load(base.wrapping_offset(step as isize + one.offset as isize)));
                    }
                }
                [one] => {
                    for (k, &step) in steps.iter().enumerate() {
                        S::store(to.add(k * width), at(step, one));
                    }
                }
                [one, two] => {
                    for (k, &step) in steps.iter().enumerate() {
                        S::store(to.add(k * width), S::or(at(step, one), at(step, two)));
                    }
                }
                ref many => {
                    for (k, &step) in steps.iter().enumerate() {
                        let mut joined = S::zero();
                        for &piece in many {
                            joined = S::or(joined, at(step, piece));
                        }
                        S::store(to.add(k * width), joined);
                    }
                }
            }
        }
    }
}
