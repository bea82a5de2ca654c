//! The few vector operations that the product kernels are written in, once per instruction set.
//!
//! The functions are always inlined into callers that enable the instruction set, so that they
//! become single instructions there.

use std::sync::atomic::{Ordering, compiler_fence};

use half::{bf16, f16};

/// Vectors of one instruction set.
pub(in super::super) trait Simd: Copy {
    /// A vector of `f32`.
    type V: Copy;
    /// Elements of a vector.
    const LANES: usize;

    unsafe fn zero() -> Self::V;
    /// One element from memory in every lane.
    unsafe fn splat(at: *const f32) -> Self::V;
    unsafe fn load(at: *const f32) -> Self::V;
    unsafe fn load_f16(at: *const f16) -> Self::V;
    unsafe fn load_bf16(at: *const bf16) -> Self::V;
    unsafe fn store(at: *mut f32, v: Self::V);
    unsafe fn add(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn sub(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn mul(a: Self::V, b: Self::V) -> Self::V;
    /// Numbers of a few bits: those bits of each of so many bytes as there are lanes that are set in
    /// `mask` after a shift to the right.
    unsafe fn bits(at: *const u8, shift: u32, mask: i32) -> Self::V;
    /// The lanes of both in turn: `a₀ b₀ a₁ b₁ …`, in two vectors.
    unsafe fn interleave(a: Self::V, b: Self::V) -> [Self::V; 2];
    /// The lanes of even numbers of both, one vector after the other.
    unsafe fn evens(a: Self::V, b: Self::V) -> Self::V;
    /// The lanes of odd numbers of both, one vector after the other.
    unsafe fn odds(a: Self::V, b: Self::V) -> Self::V;
    /// The pairs of lanes of even numbers of both, one vector after the other.
    unsafe fn even_pairs(a: Self::V, b: Self::V) -> Self::V;
    /// The pairs of lanes of odd numbers of both, one vector after the other.
    unsafe fn odd_pairs(a: Self::V, b: Self::V) -> Self::V;
    /// `a·b + c`
    unsafe fn fma(a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// The same vector, as an optimization barrier: the compiler computes it before this point and
    /// keeps loads after it.
    unsafe fn in_order(v: Self::V) -> Self::V;
    /// The lanes whose bit is set, zeros elsewhere; memory behind clear lanes is not touched.
    unsafe fn load_mask(at: *const f32, lanes: u32) -> Self::V;
    /// The same, faster where all bits are rarely set.
    #[inline(always)]
    unsafe fn load_part(at: *const f32, lanes: u32) -> Self::V {
        // SAFETY: the caller's promise.
        unsafe { Self::load_mask(at, lanes) }
    }
    /// Lanewise or: joins vectors whose nonzero lanes differ.
    unsafe fn or(a: Self::V, b: Self::V) -> Self::V;
    /// `to[j·to_stride + i] = from[i·from_stride + j]` for i below `rows` ≤ 8 and j below 8. If
    /// `over`, anything may be stored for the i from `rows` to 8, in the order of j.
    unsafe fn transpose(
        from: *const f32,
        from_stride: isize,
        rows: usize,
        to: *mut f32,
        to_stride: usize,
        over: bool,
    );
    /// Stores the first `count` lanes, fewer than all.
    unsafe fn store_first(to: *mut f32, v: Self::V, count: usize);
    /// Copies `count` elements, at most a vector's.
    unsafe fn copy(from: *const f32, to: *mut f32, count: usize);
}

/// The baseline of the target: arrays that the compiler turns into vectors.
#[derive(Clone, Copy)]
pub(super) struct Portable;

impl Simd for Portable {
    type V = [f32; 4];
    const LANES: usize = 4;

    #[inline(always)]
    unsafe fn zero() -> [f32; 4] {
        [0.0; 4]
    }
    #[inline(always)]
    unsafe fn splat(at: *const f32) -> [f32; 4] {
        // SAFETY: the caller gives a readable element.
        [unsafe { *at }; 4]
    }
    #[inline(always)]
    unsafe fn load(at: *const f32) -> [f32; 4] {
        // SAFETY: the caller gives four readable elements.
        unsafe { at.cast::<[f32; 4]>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn load_f16(at: *const f16) -> [f32; 4] {
        // SAFETY: the caller gives four readable elements.
        unsafe { at.cast::<[f16; 4]>().read_unaligned() }.map(f16::to_f32)
    }
    #[inline(always)]
    unsafe fn load_bf16(at: *const bf16) -> [f32; 4] {
        // SAFETY: the caller gives four readable elements.
        let halves = unsafe { at.cast::<[bf16; 4]>().read_unaligned() };
        halves.map(|x| f32::from_bits(u32::from(x.to_bits()) << 16))
    }
    #[inline(always)]
    unsafe fn store(at: *mut f32, v: [f32; 4]) {
        // SAFETY: the caller gives four writable elements.
        unsafe { at.cast::<[f32; 4]>().write_unaligned(v) }
    }
    #[inline(always)]
    unsafe fn add(a: [f32; 4], b: [f32; 4]) -> [f32; 4] {
        [a[0] + b[0], a[1] + b[1], a[2] + b[2], a[3] + b[3]]
    }
    #[inline(always)]
    unsafe fn sub(a: [f32; 4], b: [f32; 4]) -> [f32; 4] {
        [a[0] - b[0], a[1] - b[1], a[2] - b[2], a[3] - b[3]]
    }
    #[inline(always)]
    unsafe fn mul(a: [f32; 4], b: [f32; 4]) -> [f32; 4] {
        [a[0] * b[0], a[1] * b[1], a[2] * b[2], a[3] * b[3]]
    }
    #[inline(always)]
    unsafe fn bits(at: *const u8, shift: u32, mask: i32) -> [f32; 4] {
        // SAFETY: the caller gives four readable bytes.
        let bytes = unsafe { at.cast::<[u8; 4]>().read() };
        bytes.map(|byte| (i32::from(byte) >> shift & mask) as f32)
    }
    #[inline(always)]
    unsafe fn interleave(a: [f32; 4], b: [f32; 4]) -> [[f32; 4]; 2] {
        [[a[0], b[0], a[1], b[1]], [a[2], b[2], a[3], b[3]]]
    }
    #[inline(always)]
    unsafe fn evens(a: [f32; 4], b: [f32; 4]) -> [f32; 4] {
        [a[0], a[2], b[0], b[2]]
    }
    #[inline(always)]
    unsafe fn odds(a: [f32; 4], b: [f32; 4]) -> [f32; 4] {
        [a[1], a[3], b[1], b[3]]
    }
    #[inline(always)]
    unsafe fn even_pairs(a: [f32; 4], b: [f32; 4]) -> [f32; 4] {
        [a[0], a[1], b[0], b[1]]
    }
    #[inline(always)]
    unsafe fn odd_pairs(a: [f32; 4], b: [f32; 4]) -> [f32; 4] {
        [a[2], a[3], b[2], b[3]]
    }
    #[inline(always)]
    unsafe fn fma(a: [f32; 4], b: [f32; 4], c: [f32; 4]) -> [f32; 4] {
        let one = |i: usize| {
            if cfg!(any(target_arch = "aarch64", target_feature = "fma")) {
                a[i].mul_add(b[i], c[i])
            } else {
                a[i] * b[i] + c[i]
            }
        };
        [one(0), one(1), one(2), one(3)]
    }
    #[inline(always)]
    unsafe fn in_order(v: [f32; 4]) -> [f32; 4] {
        // Sums may follow, but loads do not precede.
        compiler_fence(Ordering::SeqCst);
        v
    }
    #[inline(always)]
    unsafe fn load_mask(at: *const f32, lanes: u32) -> [f32; 4] {
        let mut v = [0.0; 4];
        for (i, x) in v.iter_mut().enumerate() {
            if lanes >> i & 1 != 0 {
                // SAFETY: the caller gives readable elements where a bit is set.
                *x = unsafe { *at.wrapping_add(i) };
            }
        }
        v
    }
    #[inline(always)]
    unsafe fn or(a: [f32; 4], b: [f32; 4]) -> [f32; 4] {
        std::array::from_fn(|i| f32::from_bits(a[i].to_bits() | b[i].to_bits()))
    }
    #[inline(always)]
    unsafe fn transpose(
        from: *const f32,
        from_stride: isize,
        rows: usize,
        to: *mut f32,
        to_stride: usize,
        _over: bool,
    ) {
        for i in 0..rows {
            for j in 0..8 {
                // SAFETY: the caller gives readable and writable blocks of these shapes.
                unsafe {
                    *to.add(j * to_stride + i) = *from.offset(i as isize * from_stride).add(j)
                };
            }
        }
    }
    #[inline(always)]
    unsafe fn store_first(to: *mut f32, v: [f32; 4], count: usize) {
        for (i, x) in v.into_iter().enumerate().take(count) {
            // SAFETY: the caller gives `count` writable elements.
            unsafe { *to.add(i) = x };
        }
    }
    #[inline(always)]
    unsafe fn copy(from: *const f32, to: *mut f32, count: usize) {
        for i in 0..count {
            // SAFETY: the caller gives `count` readable and writable elements.
            unsafe { *to.add(i) = *from.add(i) };
        }
    }
}

#[cfg(target_arch = "x86_64")]
pub(in super::super) use x86::{Avx2, Avx512};

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::{Simd, bf16, f16};
    use std::arch::asm;
    use std::arch::x86_64::*;

    /// AVX2 with FMA and F16C.
    #[derive(Clone, Copy)]
    pub(in super::super::super) struct Avx2;

    /// AVX-512 F, BW, DQ and VL.
    #[derive(Clone, Copy)]
    pub(in super::super::super) struct Avx512;

    /// The methods that are one instruction, on vectors of any length.
    macro_rules! plain {
        ($V:ty, $zero:ident, $splat:ident, $load:ident, $store:ident, $add:ident, $sub:ident, $mul:ident, $fma:ident, $or:ident, $in_order:ident) => {
            #[inline(always)]
            unsafe fn zero() -> $V {
                // SAFETY: callers enable the instruction set.
                unsafe { $zero() }
            }
            #[inline(always)]
            unsafe fn splat(at: *const f32) -> $V {
                // SAFETY: callers enable the instruction set and give a readable element.
                unsafe { $splat(*at) }
            }
            #[inline(always)]
            unsafe fn load(at: *const f32) -> $V {
                // SAFETY: callers enable the instruction set and give a readable vector.
                unsafe { $load(at) }
            }
            #[inline(always)]
            unsafe fn store(at: *mut f32, v: $V) {
                // SAFETY: callers enable the instruction set and give a writable vector.
                unsafe { $store(at, v) }
            }
            #[inline(always)]
            unsafe fn add(a: $V, b: $V) -> $V {
                // SAFETY: callers enable the instruction set.
                unsafe { $add(a, b) }
            }
            #[inline(always)]
            unsafe fn sub(a: $V, b: $V) -> $V {
                // SAFETY: callers enable the instruction set.
                unsafe { $sub(a, b) }
            }
            #[inline(always)]
            unsafe fn mul(a: $V, b: $V) -> $V {
                // SAFETY: callers enable the instruction set.
                unsafe { $mul(a, b) }
            }
            #[inline(always)]
            unsafe fn fma(a: $V, b: $V, c: $V) -> $V {
                // SAFETY: callers enable the instruction set, with FMA.
                unsafe { $fma(a, b, c) }
            }
            #[inline(always)]
            unsafe fn or(a: $V, b: $V) -> $V {
                // SAFETY: callers enable the instruction set.
                unsafe { $or(a, b) }
            }
            #[inline(always)]
            unsafe fn in_order(v: $V) -> $V {
                // SAFETY: callers enable the instruction set.
                unsafe { $in_order(v) }
            }
        };
    }

    /// [`Simd::in_order`]: an empty instruction that takes and returns the vector and may access
    /// memory. (A fence orders loads alone, not the sums between them.)
    macro_rules! in_order {
        ($name:ident, $V:ty, $feature:literal, $class:ident) => {
            #[inline]
            #[target_feature(enable = $feature)]
            unsafe fn $name(mut v: $V) -> $V {
                // SAFETY: there is no instruction.
                unsafe {
                    asm!("/* {0} */", inout($class) v, options(nostack, preserves_flags));
                }
                v
            }
        };
    }

    in_order!(in_order_256, __m256, "avx2,fma", ymm_reg);
    in_order!(in_order_512, __m512, "avx512f", zmm_reg);

    impl Simd for Avx2 {
        type V = __m256;
        const LANES: usize = 8;

        plain!(
            __m256,
            _mm256_setzero_ps,
            _mm256_set1_ps,
            _mm256_loadu_ps,
            _mm256_storeu_ps,
            _mm256_add_ps,
            _mm256_sub_ps,
            _mm256_mul_ps,
            _mm256_fmadd_ps,
            _mm256_or_ps,
            in_order_256
        );
        #[inline(always)]
        unsafe fn load_f16(at: *const f16) -> __m256 {
            // SAFETY: callers enable F16C and give eight readable elements.
            unsafe { _mm256_cvtph_ps(_mm_loadu_si128(at.cast())) }
        }
        #[inline(always)]
        unsafe fn load_bf16(at: *const bf16) -> __m256 {
            // SAFETY: callers enable AVX2 and give eight readable elements.
            unsafe {
                let halves = _mm256_cvtepu16_epi32(_mm_loadu_si128(at.cast()));
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(halves))
            }
        }
        #[inline(always)]
        unsafe fn bits(at: *const u8, shift: u32, mask: i32) -> __m256 {
            // SAFETY: callers enable AVX2 and give eight readable bytes.
            unsafe {
                let bytes = _mm256_cvtepu8_epi32(_mm_loadl_epi64(at.cast()));
                let shifted = _mm256_srl_epi32(bytes, _mm_cvtsi32_si128(shift as i32));
                _mm256_cvtepi32_ps(_mm256_and_si256(shifted, _mm256_set1_epi32(mask)))
            }
        }
        #[inline(always)]
        unsafe fn interleave(a: __m256, b: __m256) -> [__m256; 2] {
            // SAFETY: callers enable AVX2.
            unsafe {
                let (low, high) = (_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
                [
                    _mm256_permute2f128_ps::<0x20>(low, high),
                    _mm256_permute2f128_ps::<0x31>(low, high),
                ]
            }
        }
        #[inline(always)]
        unsafe fn evens(a: __m256, b: __m256) -> __m256 {
            // SAFETY: callers enable AVX2.
            unsafe {
                // The pairs of a and b in turn, in each half.
                let joined = _mm256_shuffle_ps::<0x88>(a, b);
                let pairs = _mm256_permute4x64_pd::<0xd8>(_mm256_castps_pd(joined));
                _mm256_castpd_ps(pairs)
            }
        }
        #[inline(always)]
        unsafe fn odds(a: __m256, b: __m256) -> __m256 {
            // SAFETY: callers enable AVX2.
            unsafe {
                let joined = _mm256_shuffle_ps::<0xdd>(a, b);
                let pairs = _mm256_permute4x64_pd::<0xd8>(_mm256_castps_pd(joined));
                _mm256_castpd_ps(pairs)
            }
        }
        #[inline(always)]
        unsafe fn even_pairs(a: __m256, b: __m256) -> __m256 {
            // SAFETY: callers enable AVX2.
            unsafe {
                // The pairs of a and b in turn.
                let joined = _mm256_unpacklo_pd(_mm256_castps_pd(a), _mm256_castps_pd(b));
                _mm256_castpd_ps(_mm256_permute4x64_pd::<0xd8>(joined))
            }
        }
        #[inline(always)]
        unsafe fn odd_pairs(a: __m256, b: __m256) -> __m256 {
            // SAFETY: callers enable AVX2.
            unsafe {
                let joined = _mm256_unpackhi_pd(_mm256_castps_pd(a), _mm256_castps_pd(b));
                _mm256_castpd_ps(_mm256_permute4x64_pd::<0xd8>(joined))
            }
        }
        #[inline(always)]
        unsafe fn load_mask(at: *const f32, lanes: u32) -> __m256 {
            // SAFETY: callers enable AVX2; lanes whose mask is clear are not read.
            unsafe {
                match lanes {
                    0xff => _mm256_loadu_ps(at),
                    _ => Self::load_part(at, lanes),
                }
            }
        }
        #[inline(always)]
        unsafe fn load_part(at: *const f32, lanes: u32) -> __m256 {
            // SAFETY: as above. Of a mask only the sign bits count.
            unsafe {
                let up = _mm256_setr_epi32(31, 30, 29, 28, 27, 26, 25, 24);
                let mask = _mm256_sllv_epi32(_mm256_set1_epi32(lanes as i32), up);
                _mm256_maskload_ps(at, mask)
            }
        }
        #[inline(always)]
        unsafe fn transpose(
            from: *const f32,
            from_stride: isize,
            rows: usize,
            to: *mut f32,
            to_stride: usize,
            over: bool,
        ) {
            // SAFETY: callers enable AVX2 and give readable and writable blocks of these shapes.
            unsafe {
                let columns = transposed(from, from_stride, rows);
                if over || rows == 8 {
                    for (j, column) in columns.into_iter().enumerate() {
                        _mm256_storeu_ps(to.add(j * to_stride), column);
                    }
                    return;
                }
                for (j, column) in columns.into_iter().enumerate() {
                    store_first(to.add(j * to_stride), column, rows);
                }
            }
        }
        #[inline(always)]
        unsafe fn store_first(to: *mut f32, v: __m256, count: usize) {
            // SAFETY: callers enable AVX2 and give `count` writable elements.
            unsafe { store_first(to, v, count) }
        }
        #[inline(always)]
        unsafe fn copy(from: *const f32, to: *mut f32, count: usize) {
            // SAFETY: callers enable AVX2 and give `count` readable and writable elements.
            unsafe {
                if count == 8 {
                    return _mm256_storeu_ps(to, _mm256_loadu_ps(from));
                }
                for i in 0..count {
                    *to.add(i) = *from.add(i);
                }
            }
        }
    }

    /// Eight columns of `rows` ≤ 8 rows of eight elements; missing rows repeat the first.
    #[inline(always)]
    unsafe fn transposed(from: *const f32, stride: isize, rows: usize) -> [__m256; 8] {
        // SAFETY: callers enable AVX2; only rows below `rows` are read.
        unsafe {
            let ([a, b, c, d], [e, f, g, h]) =
                (four(from, stride, rows), four(from.add(4), stride, rows));
            [a, b, c, d, e, f, g, h]
        }
    }

    /// Four columns of them.
    #[inline(always)]
    unsafe fn four(from: *const f32, stride: isize, rows: usize) -> [__m256; 4] {
        // SAFETY: as for `transposed`.
        unsafe {
            // Rows i and i + 4 side by side: a transpose of 4 × 4 in each half.
            let (r0, r1) = (pair(from, stride, rows, 0), pair(from, stride, rows, 1));
            let (r2, r3) = (pair(from, stride, rows, 2), pair(from, stride, rows, 3));
            let (a, b) = (_mm256_unpacklo_ps(r0, r1), _mm256_unpackhi_ps(r0, r1));
            let (c, d) = (_mm256_unpacklo_ps(r2, r3), _mm256_unpackhi_ps(r2, r3));
            [
                _mm256_shuffle_ps::<0x44>(a, c),
                _mm256_shuffle_ps::<0xee>(a, c),
                _mm256_shuffle_ps::<0x44>(b, d),
                _mm256_shuffle_ps::<0xee>(b, d),
            ]
        }
    }

    #[inline(always)]
    unsafe fn pair(from: *const f32, stride: isize, rows: usize, row: usize) -> __m256 {
        let (low, high) = (
            if row < rows { row } else { 0 },
            if row + 4 < rows { row + 4 } else { 0 },
        );
        // SAFETY: as for `transposed`.
        unsafe {
            let (low, high) = (
                from.offset(low as isize * stride),
                from.offset(high as isize * stride),
            );
            _mm256_insertf128_ps::<1>(
                _mm256_castps128_ps256(_mm_loadu_ps(low)),
                _mm_loadu_ps(high),
            )
        }
    }

    /// Stores the first `count` ≤ 8 lanes. (The masked store is slow on several AVX2 machines.)
    #[inline(always)]
    unsafe fn store_first(to: *mut f32, v: __m256, count: usize) {
        // SAFETY: callers enable AVX2 and give `count` writable elements.
        unsafe {
            if count == 8 {
                return _mm256_storeu_ps(to, v);
            }
            let mut part = _mm256_castps256_ps128(v);
            let mut done = 0;
            if count & 4 != 0 {
                _mm_storeu_ps(to, part);
                part = _mm256_extractf128_ps::<1>(v);
                done = 4;
            }
            if count & 2 != 0 {
                _mm_storel_pd(to.add(done).cast(), _mm_castps_pd(part));
                part = _mm_movehl_ps(part, part);
                done += 2;
            }
            if count & 1 != 0 {
                _mm_store_ss(to.add(done), part);
            }
        }
    }

    impl Simd for Avx512 {
        type V = __m512;
        const LANES: usize = 16;

        plain!(
            __m512,
            _mm512_setzero_ps,
            _mm512_set1_ps,
            _mm512_loadu_ps,
            _mm512_storeu_ps,
            _mm512_add_ps,
            _mm512_sub_ps,
            _mm512_mul_ps,
            _mm512_fmadd_ps,
            _mm512_or_ps,
            in_order_512
        );
        #[inline(always)]
        unsafe fn load_f16(at: *const f16) -> __m512 {
            // SAFETY: callers enable AVX-512 and give 16 readable elements.
            unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(at.cast())) }
        }
        #[inline(always)]
        unsafe fn load_bf16(at: *const bf16) -> __m512 {
            // SAFETY: callers enable AVX-512 and give 16 readable elements.
            unsafe {
                let halves = _mm512_cvtepu16_epi32(_mm256_loadu_si256(at.cast()));
                _mm512_castsi512_ps(_mm512_slli_epi32::<16>(halves))
            }
        }
        #[inline(always)]
        unsafe fn bits(at: *const u8, shift: u32, mask: i32) -> __m512 {
            // SAFETY: callers enable AVX-512 and give 16 readable bytes.
            unsafe {
                let bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128(at.cast()));
                let shifted = _mm512_srl_epi32(bytes, _mm_cvtsi32_si128(shift as i32));
                _mm512_cvtepi32_ps(_mm512_and_si512(shifted, _mm512_set1_epi32(mask)))
            }
        }
        #[inline(always)]
        unsafe fn interleave(a: __m512, b: __m512) -> [__m512; 2] {
            // SAFETY: callers enable AVX-512.
            unsafe {
                let low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
                let high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
                [
                    _mm512_permutex2var_ps(a, low, b),
                    _mm512_permutex2var_ps(a, high, b),
                ]
            }
        }
        #[inline(always)]
        unsafe fn evens(a: __m512, b: __m512) -> __m512 {
            // SAFETY: callers enable AVX-512.
            unsafe {
                let lanes =
                    _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
                _mm512_permutex2var_ps(a, lanes, b)
            }
        }
        #[inline(always)]
        unsafe fn odds(a: __m512, b: __m512) -> __m512 {
            // SAFETY: callers enable AVX-512.
            unsafe {
                let lanes =
                    _mm512_setr_epi32(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
                _mm512_permutex2var_ps(a, lanes, b)
            }
        }
        #[inline(always)]
        unsafe fn even_pairs(a: __m512, b: __m512) -> __m512 {
            // SAFETY: callers enable AVX-512.
            unsafe {
                let pairs = _mm512_setr_epi64(0, 2, 4, 6, 8, 10, 12, 14);
                let (a, b) = (_mm512_castps_pd(a), _mm512_castps_pd(b));
                _mm512_castpd_ps(_mm512_permutex2var_pd(a, pairs, b))
            }
        }
        #[inline(always)]
        unsafe fn odd_pairs(a: __m512, b: __m512) -> __m512 {
            // SAFETY: callers enable AVX-512.
            unsafe {
                let pairs = _mm512_setr_epi64(1, 3, 5, 7, 9, 11, 13, 15);
                let (a, b) = (_mm512_castps_pd(a), _mm512_castps_pd(b));
                _mm512_castpd_ps(_mm512_permutex2var_pd(a, pairs, b))
            }
        }
        #[inline(always)]
        unsafe fn load_mask(at: *const f32, lanes: u32) -> __m512 {
            // SAFETY: callers enable AVX-512; lanes whose bit is clear are not read.
            unsafe { _mm512_maskz_loadu_ps(lanes as u16, at) }
        }
        #[inline(always)]
        unsafe fn transpose(
            from: *const f32,
            from_stride: isize,
            rows: usize,
            to: *mut f32,
            to_stride: usize,
            _over: bool,
        ) {
            // SAFETY: callers enable AVX-512 and give readable and writable blocks of these shapes;
            // the mask keeps to `rows`.
            unsafe {
                let mask = ((1u32 << rows) - 1) as u8;
                for (j, column) in transposed(from, from_stride, rows).into_iter().enumerate() {
                    _mm256_mask_storeu_ps(to.add(j * to_stride), mask, column);
                }
            }
        }
        #[inline(always)]
        unsafe fn store_first(to: *mut f32, v: __m512, count: usize) {
            // SAFETY: callers enable AVX-512 and give `count` writable elements; the mask keeps to
            // them.
            unsafe { _mm512_mask_storeu_ps(to, ((1u32 << count) - 1) as u16, v) }
        }
        #[inline(always)]
        unsafe fn copy(from: *const f32, to: *mut f32, count: usize) {
            // SAFETY: callers enable AVX-512 and give `count` readable and writable elements; the
            // mask keeps to them.
            unsafe {
                let mask = ((1u32 << count) - 1) as u16;
                _mm512_mask_storeu_ps(to, mask, _mm512_maskz_loadu_ps(mask, from));
            }
        }
    }
}
