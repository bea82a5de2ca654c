//! Floats as integers of a few bits.

use slabwise_kernels::spec::Quantization;

/// Rows of weights as numbers of a few bits, packed as [`Quantization`] says, with a scale and a zero
/// point for each block.
#[derive(Default)]
pub(crate) struct Quantized {
    /// Packed, rows one after another.
    pub numbers: Vec<u8>,
    /// One for each block.
    pub scales: Vec<f32>,
    /// Packed, each row from a byte of its own on.
    pub zeros: Vec<u8>,
}

/// A number that cannot be quantized.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct NotFinite {
    pub row: usize,
    pub column: usize,
    pub value: f32,
}

impl Quantized {
    /// Fails if one of the scales of rows of `columns` numbers is not finite; it is at the first
    /// number of its block.
    pub(crate) fn check(&self, columns: usize, format: Quantization) -> Result<(), NotFinite> {
        let block = (format.block as usize).max(1);
        let per_row = columns / block;
        check(&self.scales, per_row).map_err(|NotFinite { row, column, value }| NotFinite {
            row,
            column: column * block,
            value,
        })
    }
}

/// Fails if one of the floats of rows of `columns` cannot be quantized.
pub(crate) fn check(floats: &[f32], columns: usize) -> Result<(), NotFinite> {
    let Some(at) = floats.iter().position(|x| !x.is_finite()) else {
        return Ok(());
    };
    let columns = columns.max(1);
    let (row, column, value) = (at / columns, at % columns, floats[at]);
    Err(NotFinite { row, column, value })
}

/// Quantizes rows of `columns` finite floats, whole blocks, to the nearest numbers.
///
/// The range of a block reaches from its smallest to its largest value and contains 0, for which the
/// zero point stands exactly; the scale divides it into as many steps as there are numbers after the
/// first (affine quantization, as in Jacob et al., "Quantization and Training of Neural Networks for
/// Efficient Integer-Arithmetic-Only Inference", 2018).
pub(crate) fn quantize(floats: &[f32], columns: usize, format: Quantization) -> Quantized {
    let per_byte = format.per_byte() as usize;
    let (block, largest) = ((format.block as usize).max(1), format.mask() as i32);
    let mut quantized = Quantized {
        numbers: Vec::with_capacity(floats.len() / per_byte),
        scales: Vec::with_capacity(floats.len() / block),
        zeros: Vec::new(),
    };
    let (mut numbers, mut zeros) = (Vec::with_capacity(columns), Vec::new());
    for floats in floats.chunks(columns.max(1)) {
        numbers.clear();
        zeros.clear();
        for floats in floats.chunks(block) {
            let (scale, zero) = range(floats, largest);
            // Numbers are not negative, so that a conversion of one half more rounds to the nearest.
            // (A call for rounding takes ten times as long.) The rounding of the zero point may leave
            // an end of the range outside.
            let middle = f32::from(zero) + 0.5;
            let number = |x: &f32| ((x / scale + middle) as i32).clamp(0, largest) as u8;
            match scale > 0.0 {
                true => numbers.extend(floats.iter().map(number)),
                false => numbers.extend(floats.iter().map(|_| zero)),
            }
            quantized.scales.push(scale);
            zeros.push(zero);
        }
        quantized.numbers.extend(pack(&numbers, format));
        quantized.zeros.extend(pack(&zeros, format));
    }
    quantized
}

/// Packs numbers, the first in the lowest bits of a byte.
pub(super) fn pack(numbers: &[u8], format: Quantization) -> impl Iterator<Item = u8> {
    let bits = format.bits as usize;
    numbers
        .chunks(format.per_byte() as usize)
        .map(move |numbers| {
            let shifted = numbers.iter().zip((0..8).step_by(bits));
            shifted.fold(0, |byte, (number, shift)| byte | number << shift)
        })
}

/// The scale of a block, and the number that stands for 0.
fn range(floats: &[f32], largest: i32) -> (f32, u8) {
    let (low, high) = floats.iter().fold((0.0f32, 0.0f32), |(low, high), &x| {
        (low.min(x), high.max(x))
    });
    let (low, high) = (f64::from(low), f64::from(high));
    let scale = ((high - low) / f64::from(largest)) as f32;
    let zero = match scale > 0.0 {
        true => (-low / f64::from(scale) + 0.5) as i32,
        false => 0,
    };
    (scale, zero.clamp(0, largest) as u8)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn number(packed: &[u8], at: usize, bits: usize) -> f32 {
        f32::from(packed[at * bits / 8] >> (at * bits % 8) & ((1u16 << bits) - 1) as u8)
    }

    #[test]
    fn numbers_are_within_a_step_and_zeros_exact() {
        let mut seed = 1u32;
        let mut random = || {
            seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (seed >> 8) as f32 / (1 << 23) as f32 - 0.8
        };
        for (bits, block) in [(2, 32), (4, 16), (4, 32), (8, 8)] {
            let format = Quantization { bits, block };
            let (rows, columns) = (3, 3 * block as usize);
            let mut floats: Vec<f32> = (0..rows * columns).map(|_| random()).collect();
            floats[5] = 0.0;
            // A block of zeros, one of a single value, one of tiny values.
            floats[columns..][..block as usize].fill(0.0);
            floats[columns + block as usize..][..block as usize].fill(-2.5);
            floats[2 * columns..][..block as usize].fill(1e-42);
            let quantized = quantize(&floats, columns, format);
            let row_zeros = (columns / block as usize).div_ceil(format.per_byte() as usize);
            assert_eq!(quantized.zeros.len(), rows * row_zeros);
            for (at, &x) in floats.iter().enumerate() {
                let (row, block) = (at / columns, at % columns / block as usize);
                let zeros = &quantized.zeros[row * row_zeros..];
                let zero = number(zeros, block, bits as usize);
                let scale = quantized.scales[row * 3 + block];
                let q = number(&quantized.numbers, at, bits as usize);
                let y = (q - zero) * scale;
                // Half a step, and as much again at the ends where the zero point is rounded.
                assert!((x - y).abs() <= scale * 1.001, "{x} as {y}, {scale}");
                assert!(x != 0.0 || y == 0.0);
                assert!(x != -2.5 || (x - y).abs() < 1e-6);
            }
        }
    }

    #[test]
    fn numbers_that_are_not_finite_are_refused() {
        let mut floats = [1.0; 12];
        assert_eq!(check(&floats, 6), Ok(()));
        floats[9] = f32::INFINITY;
        let (row, column, value) = (1, 3, f32::INFINITY);
        assert_eq!(check(&floats, 6), Err(NotFinite { row, column, value }));
    }

    #[test]
    fn nothing_is_quantized_to_nothing() {
        let format = Quantization { bits: 4, block: 32 };
        let quantized = quantize(&[], 0, format);
        assert!(quantized.numbers.is_empty() && quantized.zeros.is_empty());
    }
}
