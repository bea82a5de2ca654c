//! Operations on vectors of AVX2 and AVX-512 that only pooling needs.

use std::arch::x86_64::*;

use crate::cpu::gemm::simd::{Avx2, Avx512, Simd};

/// The operations that pooling needs beside those of products. Integers are vectors' bits.
pub(super) trait Lanes: Simd {
    type Mask: Copy;
    /// The lanes of `lanes` in which [`Source::beats`](super::forward::Source::beats) holds.
    unsafe fn beats(value: Self::V, best: Self::V, lanes: u32) -> Self::Mask;
    /// The lanes of `a` where the mask is set, those of `b` elsewhere.
    unsafe fn select(mask: Self::Mask, a: Self::V, b: Self::V) -> Self::V;
    /// `value` where an integer equals `position`, zeros elsewhere.
    unsafe fn where_at(positions: Self::V, position: i32, value: Self::V) -> Self::V;
    unsafe fn div(a: Self::V, b: Self::V) -> Self::V;
    /// Bytes as integers, in the lanes whose bit is set; memory behind clear lanes is not touched.
    unsafe fn load_bytes(at: *const u8, lanes: u32) -> Self::V;
}

impl Lanes for Avx512 {
    type Mask = __mmask16;

    #[inline(always)]
    unsafe fn beats(value: __m512, best: __m512, lanes: u32) -> __mmask16 {
        // SAFETY: callers enable AVX-512.
        unsafe {
            // "Not less or equal" also holds beside a NaN, of which only the first counts.
            let ordered = _mm512_mask_cmp_ps_mask::<_CMP_ORD_Q>(lanes as u16, best, best);
            _mm512_mask_cmp_ps_mask::<_CMP_NLE_UQ>(ordered, value, best)
        }
    }
    #[inline(always)]
    unsafe fn select(mask: __mmask16, a: __m512, b: __m512) -> __m512 {
        // SAFETY: callers enable AVX-512.
        unsafe { _mm512_mask_blend_ps(mask, b, a) }
    }
    #[inline(always)]
    unsafe fn where_at(positions: __m512, position: i32, value: __m512) -> __m512 {
        // SAFETY: callers enable AVX-512.
        unsafe {
            let positions = _mm512_castps_si512(positions);
            let mask = _mm512_cmpeq_epi32_mask(positions, _mm512_set1_epi32(position));
            _mm512_maskz_mov_ps(mask, value)
        }
    }
    #[inline(always)]
    unsafe fn div(a: __m512, b: __m512) -> __m512 {
        // SAFETY: callers enable AVX-512.
        unsafe { _mm512_div_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn load_bytes(at: *const u8, lanes: u32) -> __m512 {
        // SAFETY: callers enable AVX-512; lanes whose bit is clear are not read.
        unsafe {
            let bytes = _mm_maskz_loadu_epi8(lanes as u16, at.cast());
            _mm512_castsi512_ps(_mm512_cvtepu8_epi32(bytes))
        }
    }
}

impl Lanes for Avx2 {
    type Mask = __m256;

    #[inline(always)]
    unsafe fn beats(value: __m256, best: __m256, lanes: u32) -> __m256 {
        // SAFETY: callers enable AVX2.
        unsafe {
            let bit = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
            let set = _mm256_and_si256(_mm256_set1_epi32(lanes as i32), bit);
            let lanes = _mm256_castsi256_ps(_mm256_cmpeq_epi32(set, bit));
            let beats = _mm256_and_ps(
                _mm256_cmp_ps::<_CMP_NLE_UQ>(value, best),
                _mm256_cmp_ps::<_CMP_ORD_Q>(best, best),
            );
            _mm256_and_ps(beats, lanes)
        }
    }
    #[inline(always)]
    unsafe fn select(mask: __m256, a: __m256, b: __m256) -> __m256 {
        // SAFETY: callers enable AVX2.
        unsafe { _mm256_blendv_ps(b, a, mask) }
    }
    #[inline(always)]
    unsafe fn where_at(positions: __m256, position: i32, value: __m256) -> __m256 {
        // SAFETY: callers enable AVX2.
        unsafe {
            let positions = _mm256_castps_si256(positions);
            let mask = _mm256_cmpeq_epi32(positions, _mm256_set1_epi32(position));
            _mm256_and_ps(_mm256_castsi256_ps(mask), value)
        }
    }
    #[inline(always)]
    unsafe fn div(a: __m256, b: __m256) -> __m256 {
        // SAFETY: callers enable AVX2.
        unsafe { _mm256_div_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn load_bytes(at: *const u8, lanes: u32) -> __m256 {
        let mut bytes = [0u8; 8];
        if lanes == 0xff {
            // SAFETY: the caller gives eight readable bytes.
            bytes = unsafe { at.cast::<[u8; 8]>().read() };
        } else {
            for (i, byte) in bytes.iter_mut().enumerate() {
                if lanes >> i & 1 != 0 {
                    // SAFETY: the caller gives readable bytes where a bit is set.
                    *byte = unsafe { at.wrapping_add(i).read() };
                }
            }
        }
        // SAFETY: callers enable AVX2.
        unsafe {
            let bytes = _mm_cvtsi64_si128(i64::from_le_bytes(bytes));
            _mm256_castsi256_ps(_mm256_cvtepu8_epi32(bytes))
        }
    }
}
