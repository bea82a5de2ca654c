//! Floats as integers of a few bits.

use slabwise_kernels::spec::Quantization;

/// Rows of weights as numbers of a few bits, packed as [`Quantization`] says, with a scale and a zero
/// point for each block.
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

/// Quantizes rows of `columns` floats, whole blocks, to the nearest numbers.
///
/// The range of a block reaches from its smallest to its largest value and contains 0, for which the
/// zero point stands exactly; the scale divides it into as many steps as there are numbers after the
/// first (affine quantization, as in Jacob et al., "Quantization and Training of Neural Networks for
/// Efficient Integer-Arithmetic-Only Inference", 2018).
pub(crate) fn quantize(
    floats: &[f32],
    columns: usize,
    format: Quantization,
) -> Result<Quantized, NotFinite> {
    let (bits, per_byte) = (format.bits as usize, format.per_byte() as usize);
    let block = (format.block as usize).max(1);
    let mut quantized = Quantized {
        numbers: Vec::with_capacity(floats.len() / per_byte),
        scales: Vec::with_capacity(floats.len() / block),
        zeros: Vec::new(),
    };
    let pack = |numbers: &[u8], to: &mut Vec<u8>| {
        to.extend(numbers.chunks(per_byte).map(|numbers| {
            let shifted = numbers.iter().zip((0..8).step_by(bits));
            shifted.fold(0, |byte, (number, shift)| byte | number << shift)
        }));
    };
    let (mut numbers, mut zeros) = (Vec::with_capacity(columns), Vec::new());
    for (row, floats) in floats.chunks(columns.max(1)).enumerate() {
        if let Some(column) = floats.iter().position(|x| !x.is_finite()) {
            let value = floats[column];
            return Err(NotFinite { row, column, value });
        }
        numbers.clear();
        zeros.clear();
        for floats in floats.chunks(block) {
            let (scale, zero) = range(floats, format.mask());
            let number = |x: &f32| match scale > 0.0 {
                true => (f64::from(*x) / f64::from(scale)).round() + f64::from(zero),
                false => f64::from(zero),
            };
            // The rounding of the zero point may leave an end of the range outside.
            let within = |number: f64| number.clamp(0.0, f64::from(format.mask())) as u8;
            numbers.extend(floats.iter().map(number).map(within));
            quantized.scales.push(scale);
            zeros.push(zero);
        }
        pack(&numbers, &mut quantized.numbers);
        pack(&zeros, &mut quantized.zeros);
    }
    Ok(quantized)
}

/// The scale of a block, and the number that stands for 0.
fn range(floats: &[f32], largest: u32) -> (f32, u8) {
    let (low, high) = floats.iter().fold((0.0f64, 0.0f64), |(low, high), &x| {
        (low.min(x.into()), high.max(x.into()))
    });
    let scale = ((high - low) / f64::from(largest)) as f32;
    let zero = match scale > 0.0 {
        true => (-low / f64::from(scale)).round(),
        false => 0.0,
    };
    (scale, zero.clamp(0.0, f64::from(largest)) as u8)
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
            let quantized = quantize(&floats, columns, format).expect("finite numbers");
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
        let format = Quantization { bits: 4, block: 2 };
        let mut floats = [1.0; 12];
        floats[9] = f32::INFINITY;
        let error = quantize(&floats, 6, format).err();
        let (row, column, value) = (1, 3, f32::INFINITY);
        assert_eq!(error, Some(NotFinite { row, column, value }));
    }

    #[test]
    fn nothing_is_quantized_to_nothing() {
        let format = Quantization { bits: 4, block: 32 };
        let quantized = quantize(&[], 0, format).expect("no numbers");
        assert!(quantized.numbers.is_empty() && quantized.zeros.is_empty());
    }
}
