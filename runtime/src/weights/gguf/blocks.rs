//! The values of blocks. Each is computed with the roundings of llama.cpp's own decoder (of its
//! Python package, in which no compiler fuses a product and a sum), so that all bits are the same.
//!
//! `d` is the scale of a block and `m` its offset or the scale of its offsets, both halves. Numbers
//! of four bits lie in the low and the high halves of bytes, which belong to neighbouring runs of
//! elements, and not to neighbouring elements.

use half::f16;

/// The most elements of a block.
pub(super) const VALUES_MAX: usize = 256;

/// Decodes the bytes of a block to its values; both have the lengths of the type.
pub(super) type Decode = fn(&[u8], &mut [f32]);

/// The half at a byte.
pub(super) fn half(bytes: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([bytes[at], bytes[at + 1]]).to_f32()
}

/// The four bits at an index of runs of `run` elements, two of which share their bytes.
fn nibble(bytes: &[u8], run: usize, at: usize) -> u8 {
    let byte = bytes[at / (2 * run) * run + at % run];
    byte >> (4 * (at / run % 2)) & 15
}

/// The bit at an index of runs of 32 elements, which share their bytes.
fn bit(bytes: &[u8], at: usize) -> u8 {
    bytes[at % 32] >> (at / 32) & 1
}

/// The two bits at an index of runs of 32 elements, four of which share their bytes.
fn two_bits(bytes: &[u8], at: usize) -> u8 {
    bytes[at / 128 * 32 + at % 32] >> (2 * (at / 32 % 4)) & 3
}

/// The fifth bit of the number at an index of 32.
fn fifth(bytes: &[u8], at: usize) -> u8 {
    (bytes[at / 8] >> (at % 8) & 1) << 4
}

/// The number of four bits at an index of a block of Q4_0.
pub(super) fn q4_0_number(block: &[u8], at: usize) -> u8 {
    nibble(&block[2..], 16, at)
}

/// d (2 bytes), numbers (16).
pub(super) fn q4_0(block: &[u8], values: &mut [f32]) {
    let d = half(block, 0);
    for (at, x) in values.iter_mut().enumerate() {
        *x = d * (f32::from(q4_0_number(block, at)) - 8.0);
    }
}

/// d (2 bytes), m (2), numbers (16).
pub(super) fn q4_1(block: &[u8], values: &mut [f32]) {
    let (d, m) = (half(block, 0), half(block, 2));
    for (at, x) in values.iter_mut().enumerate() {
        *x = d * f32::from(nibble(&block[4..], 16, at)) + m;
    }
}

/// d (2 bytes), fifth bits (4), numbers (16).
pub(super) fn q5_0(block: &[u8], values: &mut [f32]) {
    let d = half(block, 0);
    for (at, x) in values.iter_mut().enumerate() {
        let number = nibble(&block[6..], 16, at) | fifth(&block[2..], at);
        *x = d * (f32::from(number) - 16.0);
    }
}

/// d (2 bytes), m (2), fifth bits (4), numbers (16).
pub(super) fn q5_1(block: &[u8], values: &mut [f32]) {
    let (d, m) = (half(block, 0), half(block, 2));
    for (at, x) in values.iter_mut().enumerate() {
        let number = nibble(&block[8..], 16, at) | fifth(&block[4..], at);
        *x = d * f32::from(number) + m;
    }
}

/// d (2 bytes), signed numbers (32).
pub(super) fn q8_0(block: &[u8], values: &mut [f32]) {
    let d = half(block, 0);
    for (x, &number) in values.iter_mut().zip(&block[2..]) {
        *x = f32::from(number as i8) * d;
    }
}

/// Scales (low halves of 16 bytes) and offsets (high halves), numbers of two bits (64), d (2), m (2).
pub(super) fn q2_k(block: &[u8], values: &mut [f32]) {
    let (scales, numbers) = block.split_at(16);
    let (d, m) = (half(block, 80), half(block, 82));
    for (at, x) in values.iter_mut().enumerate() {
        let both = scales[at / 16];
        let (scale, offset) = (d * f32::from(both & 15), m * f32::from(both >> 4));
        *x = scale * f32::from(two_bits(numbers, at)) - offset;
    }
}

/// Third bits (32 bytes), numbers of two bits (64), scales of six bits (12), d (2).
///
/// The low four bits of the scales are the halves of eight bytes, the high two are in the four bytes
/// after them.
pub(super) fn q3_k(block: &[u8], values: &mut [f32]) {
    let (thirds, rest) = block.split_at(32);
    let (numbers, scales) = rest.split_at(64);
    let d = half(block, 108);
    let scale = |at: usize| {
        let low = scales[at % 8] >> (4 * (at / 8)) & 15;
        let high = scales[8 + at % 4] >> (2 * (at / 4)) & 3;
        d * (f32::from(low | high << 4) - 32.0)
    };
    for (run, values) in values.chunks_mut(16).enumerate() {
        let scale = scale(run);
        for (at, x) in (16 * run..).zip(values) {
            // A third bit that is set takes nothing away.
            let number = two_bits(numbers, at) | bit(thirds, at) << 2;
            *x = scale * (f32::from(number) - 4.0);
        }
    }
}

/// The scale and the offset of run `at` of eight, in twelve bytes: six bits of each of the first four
/// runs in a byte, the others in four bits of the last bytes and the free two of the first.
fn six_bits(packed: &[u8], at: usize) -> (u8, u8) {
    if at < 4 {
        return (packed[at] & 63, packed[at + 4] & 63);
    }
    let (low, first, second) = (packed[at + 4], packed[at - 4], packed[at]);
    (low & 15 | (first >> 6) << 4, low >> 4 | (second >> 6) << 4)
}

/// d (2 bytes), m (2), scales and offsets of six bits (12), numbers of four bits (128).
pub(super) fn q4_k(block: &[u8], values: &mut [f32]) {
    let (d, m) = (half(block, 0), half(block, 2));
    for (run, values) in values.chunks_mut(32).enumerate() {
        let (scale, offset) = six_bits(&block[4..], run);
        let (scale, offset) = (d * f32::from(scale), m * f32::from(offset));
        for (at, x) in (32 * run..).zip(values) {
            *x = scale * f32::from(nibble(&block[16..], 32, at)) - offset;
        }
    }
}

/// d (2 bytes), m (2), scales and offsets of six bits (12), fifth bits (32), numbers of four bits
/// (128).
pub(super) fn q5_k(block: &[u8], values: &mut [f32]) {
    let (d, m) = (half(block, 0), half(block, 2));
    for (run, values) in values.chunks_mut(32).enumerate() {
        let (scale, offset) = six_bits(&block[4..], run);
        let (scale, offset) = (d * f32::from(scale), m * f32::from(offset));
        for (at, x) in (32 * run..).zip(values) {
            let number = nibble(&block[48..], 32, at) | bit(&block[16..], at) << 4;
            *x = scale * f32::from(number) - offset;
        }
    }
}

/// Low four bits (128 bytes), high two bits (64), signed scales (16), d (2).
pub(super) fn q6_k(block: &[u8], values: &mut [f32]) {
    let (low, rest) = block.split_at(128);
    let (high, scales) = rest.split_at(64);
    let d = half(block, 208);
    for (run, values) in values.chunks_mut(16).enumerate() {
        let scale = d * f32::from(scales[run] as i8);
        for (at, x) in (16 * run..).zip(values) {
            let number = nibble(low, 64, at) | two_bits(high, at) << 4;
            *x = scale * (f32::from(number) - 32.0);
        }
    }
}

/// The values of the four bits of IQ4_NL and IQ4_XS, denser in the middle.
const UNEVEN: [i8; 16] = [
    -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113,
];

/// d (2 bytes), numbers (16).
pub(super) fn iq4_nl(block: &[u8], values: &mut [f32]) {
    let d = half(block, 0);
    for (at, x) in values.iter_mut().enumerate() {
        *x = d * f32::from(UNEVEN[usize::from(q4_0_number(block, at))]);
    }
}

/// d (2 bytes), high two bits of eight scales (2), their low four bits (4), numbers (128).
pub(super) fn iq4_xs(block: &[u8], values: &mut [f32]) {
    let (d, high) = (half(block, 0), u16::from_le_bytes([block[2], block[3]]));
    for (run, values) in values.chunks_mut(32).enumerate() {
        let low = block[4 + run / 2] >> (4 * (run % 2)) & 15;
        let high = (high >> (2 * run) & 3) as u8;
        let scale = d * (f32::from(low | high << 4) - 32.0);
        for (at, x) in (32 * run..).zip(values) {
            *x = scale * f32::from(UNEVEN[usize::from(nibble(&block[8..], 16, at))]);
        }
    }
}

/// Twice the values of the four bits of a number of MXFP4, of which one is the sign, two are the
/// exponent and one the fraction.
const TWICE: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

/// The exponent of the scale (1 byte), numbers (16): microscaling floats of the Open Compute Project.
pub(super) fn mxfp4(block: &[u8], values: &mut [f32]) {
    // Half of 2^(exponent − 127); the smallest two are subnormal.
    let d = f32::from_bits(match block[0] {
        exponent @ 0..=1 => 0x20_0000 << exponent,
        exponent => u32::from(exponent - 1) << 23,
    });
    for (at, x) in values.iter_mut().enumerate() {
        *x = d * f32::from(TWICE[usize::from(nibble(&block[1..], 16, at))]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The recorded files have none of it.
    #[test]
    fn microscaling_floats_are_those_of_their_standard() {
        let standard = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
        for exponent in [0, 1, 2, 100, 127, 254] {
            let mut block = [0; 17];
            block[0] = exponent;
            for at in 0..16 {
                block[1 + at] = at as u8 | (15 - at as u8) << 4;
            }
            let mut values = [0.0; 32];
            mxfp4(&block, &mut values);
            let scale = 2f64.powi(i32::from(exponent) - 127);
            for (at, x) in values.iter().enumerate() {
                let code = if at < 16 { at } else { 31 - at };
                let sign = if code < 8 { 1.0 } else { -1.0 };
                // The largest values of the largest exponent are infinite in f32.
                let expected = (sign * standard[code % 8] * scale) as f32;
                assert_eq!(*x, expected, "{at}");
            }
        }
    }
}
