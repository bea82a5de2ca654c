//! Packing: operands rearranged into the panels that micro-kernels read in order.

use super::simd::Simd;

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
            let row = |k: usize| (from.at.offset(k as isize * from.step), to.add(k * width));
            if width == count && count < S::LANES {
                // Lanes after a step are those of the next ones, stored later, as far as there are
                // any.
                let over = (depth + 1).saturating_sub(S::LANES.div_ceil(width));
                for k in 0..depth {
                    let (from, to) = row(k);
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
/// + Σ index·to_stride`: zeros but for `count` elements after the first `first`, which are read
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
    let at = |index: [usize; 3]| {
        let offsets = (0..3).map(|k| {
            (
                index[k] as isize * lines.from_strides[k],
                index[k] * lines.to_strides[k],
            )
        });
        let (from, to) = offsets.fold((0, 0), |(f, t), (df, dt)| (f + df, t + dt));
        (lines.from.wrapping_offset(from), lines.to.wrapping_add(to))
    };
    for i in 0..lines.counts[0] {
        for j in 0..lines.counts[1] {
            for k in 0..lines.counts[2] {
                let (from, to) = at([i, j, k]);
                // SAFETY: the caller enables S's instruction set and gives lines that may be
                // written and elements that may be read.
                unsafe { line::<S>(lines, from, to) };
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
    // SAFETY: as above. A vector at the end of a line is stored in part, and lanes outside of the
    // elements are not read.
    unsafe {
        if stride == 1 || count == 0 {
            let lanes = |from: isize| {
                if from <= 0 {
                    0
                } else {
                    u32::MAX >> (32 - from.min(32))
                }
            };
            let mut i = 0;
            while i < length {
                let before = first as isize - i as isize;
                let mask = lanes(before + count as isize) & !lanes(before);
                let v = S::load_mask(
                    from.wrapping_offset(-before),
                    mask & lanes(S::LANES as isize),
                );
                if length - i < S::LANES {
                    S::store_first(to.add(i), v, length - i);
                } else {
                    S::store(to.add(i), v);
                }
                i += S::LANES;
            }
            return;
        }
        for i in (0..first).chain(first + count..length) {
            *to.add(i) = 0.0;
        }
        let to = to.add(first);
        if stride == 2 {
            for i in (0..count).step_by(S::LANES) {
                // The elements from this one to the last, and the gaps between them.
                let (from, left) = (from.add(2 * i), 2 * (count - i) - 1);
                let lanes = |left: usize| {
                    let left = left.min(S::LANES) as u32;
                    ((1u64 << left) - 1) as u32
                };
                let low = S::load_mask(from, lanes(left));
                let high = S::load_mask(
                    from.wrapping_add(S::LANES),
                    lanes(left.saturating_sub(S::LANES)),
                );
                let v = S::evens(low, high);
                if count - i < S::LANES {
                    S::store_first(to.add(i), v, count - i);
                } else {
                    S::store(to.add(i), v);
                }
            }
        } else {
            for i in 0..count {
                *to.add(i) = *from.offset(i as isize * stride);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::micro::Micro;
    use super::*;
    use crate::cpu::Isa;

    /// Every layout, tail and width puts the elements and zeros in their places and leaves the
    /// elements around the panel alone.
    #[test]
    fn panels_hold_their_elements_and_nothing_else_changes() {
        const GUARD: usize = 40;
        for isa in Isa::available() {
            let micro = Micro::of(isa);
            let widths = (1..=micro.mr)
                .map(|count| (count, count))
                .chain((1..=micro.nr()).map(|count| (count, micro.width(count))));
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
                        unsafe {
                            (micro.pack)(source, count, depth, to.as_mut_ptr().add(GUARD), width)
                        };
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
