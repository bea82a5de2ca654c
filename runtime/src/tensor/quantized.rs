//! Quantized weights.

use std::panic::Location;

use slabwise_kernels::spec::Quantization;

use super::{Tensor, checked};
use crate::ops::Op;

impl<'t> Tensor<'t> {
    /// The weights `[rows, columns]` (f32) that packed numbers `[rows, bytes]` (u8) stand for: each
    /// number q of a block is (q − zero)·scale, with the scale and the zero point of the block. The
    /// format says how many bits a number has and how many neighbours in a row a block; the first
    /// number of a byte is in its lowest bits.
    ///
    /// Scales are f32, `[rows, blocks]`. Zero points are the same, or packed like the numbers (u8,
    /// `[rows, bytes]`); without them, they are the middle of the range: 2, 8 or 128.
    ///
    /// A [product](Tensor::matmul) with the transposed result reads the packed numbers on the CPU,
    /// if a block is a multiple of 8 bytes: no f32 weights are in memory then. Numbers have no
    /// gradient; scales and f32 zero points have one.
    ///
    /// [`Scope::quantized`](crate::Scope::quantized) stores the weights of a model in this way.
    ///
    /// ```
    /// # use slabwise::prelude::*;
    /// use slabwise::Quantization;
    ///
    /// let trace = Trace::inference();
    /// let x = trace.input("x", F32, (4, 64));
    /// // 100 rows of 64 numbers of 4 bits, in blocks of 32.
    /// let numbers = trace.input("numbers", U8, (100, 32));
    /// let scales = trace.input("scales", F32, (100, 2));
    /// let weight = numbers.dequantize(Quantization { bits: 4, block: 32 }, scales, None);
    /// let y = x.matmul(weight.t());
    /// assert_eq!(y.len(1), Some(100));
    /// ```
    #[track_caller]
    pub fn dequantize(
        self,
        format: Quantization,
        scales: Tensor<'t>,
        zeros: impl Into<Option<Tensor<'t>>>,
    ) -> Tensor<'t> {
        let inputs: Vec<Tensor<'t>> = [self, scales].into_iter().chain(zeros.into()).collect();
        let at = Location::caller();
        self.trace.record(at, &inputs, |g, ids| {
            checked(g, Op::Dequantize(format), ids)
        })
    }
}
