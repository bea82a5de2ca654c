//! Quantized weights.

use slabwise_compiler::ops::{GraphBuilder, Op};
use slabwise_kernels::dtype::DType;
use slabwise_kernels::spec::Quantization;

use super::support::{Rng, array, dims};
use super::{Case, floats};

/// Scales and zero points of quantized weights.
pub fn quantized(rng: &mut Rng, cases: &mut Vec<Case>) {
    for (bits, block) in [(2, 4), (4, 6), (8, 3)] {
        let format = Quantization { bits, block };
        let per_byte = format.per_byte() as usize;
        // Three blocks, whose packed zero points leave bits of a byte unused.
        let columns = 3 * block as usize;
        let numbers = array(rng, DType::U8, &[2, columns / per_byte], (0.0, 0.0), 256);
        let scales = floats(rng, &[2, 3]);
        let packed = array(
            rng,
            DType::U8,
            &[2, 3usize.div_ceil(per_byte)],
            (0.0, 0.0),
            256,
        );
        for zeros in [None, Some(packed), Some(floats(rng, &[2, 3]))] {
            let arguments = [numbers.clone(), scales.clone()].into_iter().chain(zeros);
            let name = format!("weights in {format:?}");
            cases.push(Case::new(name, arguments.collect(), move |g, x| {
                let dims = dims(&[2, columns]);
                let weights = g.emit(Op::Dequantize(format), x, DType::F32, dims);
                g.mul(weights, weights)
            }));
        }
    }
}
