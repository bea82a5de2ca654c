//! Packing: operands rearranged into the panels that micro-kernels read in order.

use super::simd::Simd;
use crate::cpu::tile::prefetch;

/// A strided matrix: element i of step k at `at + i·stride + k·step`.
#[derive(Clone, Copy)]
pub(in super::super) struct Source {
    pub at: *const f32,
    pub stride: isize,
    pub step: isize,
}

/// `to[k·width + i] = from(i, k)` for i below `count` ≤ `width` and k below `depth`; zeros for the
/// other i.
pub(in super::super) type Pack =
    unsafe fn(from: Source, count: usize, depth: usize, to: *mut f32, width: usize);

/// Some lanes of a vector, read from contiguous memory: lane l from `offset + l`.
#[derive(Clone, Copy, Default)]
pub(in super::super) struct Piece {
    pub offset: i32,
    pub lanes: u32,
}

/// For every step k, one vector per entry but the last of `vectors`, side by side: vector v
/// consists of the pieces `vectors[v]..vectors[v + 1]`, each read at `base + steps[k]`; lanes of no
/// piece are zeros.
pub(in super::super) type Gather =
    unsafe fn(base: *const f32, steps: &[i32], pieces: &[Piece], vectors: &[u16], to: *mut f32);

/// Elements of a row between those that are packed and those that are requested.
const AHEAD: usize = 64;
/// Steps of neighbouring rows that are packed at a time for all left panels; the ones after them
/// are requested meanwhile.
pub(super) const STEPS: usize = 8;

#[inline(always)]
pub(super) unsafe fn pack<S: Simd>(
    from: Source,
    count: usize,
    depth: usize,
    to: *mut f32,
    width: usize,
) {
    // SAFETY: the caller enables S's instruction set; `from` is readable for i below `count` and k
    // below `depth`, `to` writable for `depth · width` elements, and the loops keep to both.
    unsafe {
        let whole = count / S::LANES * S::LANES;
        if from.stride == 1 {
            let step = from.step;
            let row = |k: usize| (from.at.offset(k as isize * step), to.add(k * width));
            if width == count && count < S::LANES {
                // Lanes after a step are those of the next ones, stored later, as far as there are
                // any.
                let over = (depth + 1).saturating_sub(S::LANES.div_ceil(width));
                for k in 0..depth {
                    let (from, to) = row(k);
                    prefetch(from.wrapping_offset(STEPS as isize * step).cast());
                    let v = S::load_mask(from, (1 << count) - 1);
                    if k < over {
                        S::store(to, v);
                    } else {
                        S::store_first(to, v, count);
                    }
                }
                return;
            }
            if width == whole && width == 2 * S::LANES {
                for k in 0..depth {
                    let (from, to) = row(k);
                    let (low, high) = (S::load(from), S::load(from.add(S::LANES)));
                    S::store(to, low);
                    S::store(to.add(S::LANES), high);
                }
                return;
            }
            for k in 0..depth {
                let (from, to) = row(k);
                for i in (0..whole).step_by(S::LANES) {
                    S::store(to.add(i), S::load(from.add(i)));
                }
                if width == count {
                    S::copy(from.add(whole), to.add(whole), count - whole);
                } else {
                    // Panels with zeros at the end are whole vectors wide.
                    S::store(
                        to.add(whole),
                        S::load_mask(from.add(whole), (1 << (count - whole)) - 1),
                    );
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
        // Steps of a narrow panel after which a vector's lanes are those of later steps.
        let over = match width == count && count < 8 {
            true => (depth + 1).saturating_sub(8usize.div_ceil(width)),
            false => 0,
        };
        for first in (0..blocks).step_by(2) {
            for i in 0..count {
                // Prefetchers of CPUs follow fewer rows, or lose them at the end of a page.
                let at = from.at.wrapping_offset(i as isize * from.stride);
                prefetch(at.wrapping_add(8 * first + AHEAD).cast());
            }
            for i in (0..count).step_by(8) {
                for k in first..(first + 2).min(blocks) {
                    let at = from.at.offset(i as isize * from.stride).add(8 * k);
                    S::transpose(
                        at,
                        from.stride,
                        (count - i).min(8),
                        to.add(8 * k * width + i),
                        width,
                        8 * (k + 1) <= over,
                    );
                }
            }
        }
        let k = 8 * blocks;
        for k in k..depth {
            for i in 0..count {
                *to.add(k * width + i) = *from
                    .at
                    .offset(i as isize * from.stride + k as isize * from.step);
            }
        }
    }
}

#[inline(always)]
pub(super) unsafe fn gather<S: Simd>(
    base: *const f32,
    steps: &[i32],
    pieces: &[Piece],
    vectors: &[u16],
    to: *mut f32,
) {
    let width = (vectors.len() - 1) * S::LANES;
    // SAFETY: the caller enables S's instruction set, gives pieces whose lanes are readable at
    // every step, and room in `to` for a vector per step and entry of `vectors`. Lanes outside the
    // pieces may lie anywhere, hence the wrapping offsets.
    unsafe {
        for (v, ends) in vectors.windows(2).enumerate() {
            let at = |step: i32, piece: Piece| {
                S::load_mask(
                    base.wrapping_offset(step as isize + piece.offset as isize),
                    piece.lanes,
                )
            };
            let to = to.add(v * S::LANES);
            match pieces[usize::from(ends[0])..usize::from(ends[1])] {
                [one] if one.lanes.count_ones() as usize == S::LANES => {
                    for (k, &step) in steps.iter().enumerate() {
                        S::store(
                            to.add(k * width),
                            S::load(base.wrapping_offset(step as isize + one.offset as isize)),
                        );
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

/// Lines of a padded copy: line (i, j, k), for indices below `counts`, is `length` elements at `to
/// + Σ index·to_stride`: zeros except for `count` elements after the first `first`, which are read
/// `stride` apart from `from + Σ index·from_stride`.
pub(in super::super) struct Lines {
    pub from: *const f32,
    pub to: *mut f32,
    pub counts: [usize; 3],
    pub from_strides: [isize; 3],
    pub to_strides: [usize; 3],
    pub stride: isize,
    pub first: usize,
    pub count: usize,
    pub length: usize,
}

/// Writes [`Lines`].
pub(in super::super) type Fill = unsafe fn(lines: &Lines);

#[inline(always)]
pub(super) unsafe fn fill<S: Simd>(lines: &Lines) {
    let [from_i, from_j, from_k] = lines.from_strides;
    let [to_i, to_j, to_k] = lines.to_strides;
    for i in 0..lines.counts[0] {
        let (from, to) = (
            lines.from.wrapping_offset(i as isize * from_i),
            lines.to.wrapping_add(i * to_i),
        );
        for j in 0..lines.counts[1] {
            let (mut from, mut to) = (
                from.wrapping_offset(j as isize * from_j),
                to.wrapping_add(j * to_j),
            );
            for _ in 0..lines.counts[2] {
                // SAFETY: the caller enables S's instruction set and gives lines that may be
                // written and elements that may be read.
                unsafe { line::<S>(lines, from, to) };
                (from, to) = (from.wrapping_offset(from_k), to.wrapping_add(to_k));
            }
        }
    }
}

#[inline(always)]
unsafe fn line<S: Simd>(lines: &Lines, from: *const f32, to: *mut f32) {
    let Lines {
        stride,
        first,
        count,
        length,
        ..
    } = *lines;
    // SAFETY: as above.
    unsafe {
        zeros::<S>(to, first);
        zeros::<S>(to.add(first + count), length - first - count);
        let to = to.add(first);
        match stride {
            1 => vectors::<S>(count, |i, lanes| match lanes {
                Some(lanes) => S::store_first(
                    to.add(i),
                    S::load_mask(from.add(i), (1 << lanes) - 1),
                    lanes,
                ),
                None => S::store(to.add(i), S::load(from.add(i))),
            }),
            2 => vectors::<S>(count, |i, lanes| {
                let count = lanes.unwrap_or(S::LANES);
                // The elements and the gaps between them; after the last may be the end of memory.
                let (from, read) = (from.add(2 * i), 2 * count - 1);
                let high = from.wrapping_add(S::LANES);
                if lanes.is_none() {
                    let high = S::load_mask(high, (1 << (S::LANES - 1)) - 1);
                    return S::store(to.add(i), S::evens(S::load(from), high));
                }
                let mask = |lanes: usize| ((1u64 << lanes.min(S::LANES)) - 1) as u32;
                let low = S::load_mask(from, mask(read));
                let high = S::load_mask(high, mask(read.saturating_sub(S::LANES)));
                S::store_first(to.add(i), S::evens(low, high), count);
            }),
            _ => {
                for i in 0..count {
                    *to.add(i) = *from.offset(i as isize * stride);
                }
            }
        }
    }
}

/// Visits `count` elements by whole vectors, of which the last may reach back into the one before,
/// or, if they are fewer than a vector's, by their number.
#[inline(always)]
unsafe fn vectors<S: Simd>(count: usize, mut visit: impl FnMut(usize, Option<usize>)) {
    if count < S::LANES {
        if count > 0 {
            visit(0, Some(count));
        }
        return;
    }
    let mut i = 0;
    while i + S::LANES < count {
        visit(i, None);
        i += S::LANES;
    }
    visit(count - S::LANES, None);
}

/// Writes `count` zeros.
#[inline(always)]
unsafe fn zeros<S: Simd>(to: *mut f32, count: usize) {
    // SAFETY: the caller enables S's instruction set and gives elements that may be written.
    unsafe {
        vectors::<S>(count, |i, lanes| match lanes {
            Some(lanes) => S::store_first(to.add(i), S::zero(), lanes),
            None => S::store(to.add(i), S::zero()),
        });
    }
}

#[cfg(test)]
mod tests {
    use super::super::simd::Portable;
    #[cfg(target_arch = "x86_64")]
    use super::super::simd::{Avx2, Avx512};
    use super::*;
    use crate::cpu::Isa;

    // Through `Micro`, this test would be linked with all micro-kernels, a third of the time that
    // the unit tests of this crate would take to compile.
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
    unsafe fn avx512(from: Source, count: usize, depth: usize, to: *mut f32, width: usize) {
        // SAFETY: this function's caller keeps the same promises.
        unsafe { pack::<Avx512>(from, count, depth, to, width) }
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn avx2(from: Source, count: usize, depth: usize, to: *mut f32, width: usize) {
        // SAFETY: as above.
        unsafe { pack::<Avx2>(from, count, depth, to, width) }
    }

    /// The packing of an instruction set, and the elements of its vectors.
    fn packing(isa: Isa) -> (Pack, usize) {
        match isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => (avx512, Avx512::LANES),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => (avx2, Avx2::LANES),
            _ => (pack::<Portable>, Portable::LANES),
        }
    }

    /// Every layout, tail and width puts the elements and zeros in their places and leaves the
    /// elements around the panel alone.
    #[test]
    fn panels_hold_their_elements_and_nothing_else_changes() {
        const GUARD: usize = 40;
        for isa in Isa::available() {
            let (pack, lanes) = packing(isa);
            // Panels of rows, then ones of columns.
            let widths = (1..=14)
                .map(|count| (count, count))
                .chain((1..=2 * lanes).map(|count| (count, count.next_multiple_of(lanes))));
            for (count, width) in widths {
                for depth in [0, 1, 2, 7, 8, 9, 16, 23, 40] {
                    let (count_step, depth_step) = (count as isize, depth.max(1) as isize);
                    for (stride, step) in [
                        (1, count_step),
                        (1, count_step + 3),
                        (1, 0),
                        (depth_step, 1),
                        (depth_step + 5, 1),
                        (0, 1),
                        (2 * depth_step + 1, 2),
                    ] {
                        let last = (count as isize - 1) * stride + (depth_step - 1) * step;
                        let from: Vec<f32> = (1..=last + 1).map(|x| x as f32).collect();
                        let mut to = vec![-1.0; depth * width + 2 * GUARD];
                        let source = Source {
                            at: from.as_ptr(),
                            stride,
                            step,
                        };
                        // SAFETY: the last element is the source's last one, and the buffer takes
                        // the panel between its guards.
                        unsafe { pack(source, count, depth, to.as_mut_ptr().add(GUARD), width) };
                        for (at, &x) in to.iter().enumerate() {
                            let panel = at.checked_sub(GUARD).filter(|&at| at < depth * width);
                            let expected = panel.map_or(-1.0, |at| {
                                let (k, i) = (at / width, at % width);
                                let element = i as isize * stride + k as isize * step;
                                if i < count {
                                    from[element as usize]
                                } else {
                                    0.0
                                }
                            });
                            assert!(
                                x == expected,
                                "{isa}: {count} of {width}, depth {depth}, strides {stride} and \
                                 {step}: {x} at {at} in place of {expected}"
                            );
                        }
                    }
                }
            }
        }
    }
}
