//! Matrix products and other sums of products along an axis: convolutions are lowered here too.
//!
//! A [`Problem`] says which axes are rows, columns and contracted, and gives the strides of both
//! operands. Strides, sizes and divisors are words of the launch, so that one function serves many
//! shapes. [`plan`] estimates the time of each kernel of [`tiles`], with the contracted axis whole
//! or split into parts. The last block of a tile adds the sums of the parts in their order, so that the
//! same sizes give the same bits on every run. The CUDA side is in `sides.cuh` (indices to elements),
//! `tiles.cuh` (to shared memory and through it), `registers.cuh` and `tensor.cuh` (the
//! multiplications), `vectors.cuh` (few rows or columns), `quantized.cuh` (few rows, and quantized
//! weights) and `totals.cuh` (sums of the epilogue).

pub(crate) mod emit;
mod epilogue;
pub(crate) mod library;
pub(crate) mod plan;
pub(crate) mod problem;
pub(crate) mod quantized;
pub(crate) mod tiles;
pub(crate) mod totals;
