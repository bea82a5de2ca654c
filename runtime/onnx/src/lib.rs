//! ONNX models as programs of slabwise: planned, run and trained like models written in Rust.
//!
//! [`OnnxModel::load`] reads a file, [`OnnxModel::trace`] makes it part of a trace. Constants and
//! shape arithmetic are folded while it does, float initializers become parameters under their
//! names, functions are inlined. Short loops are unrolled, the bodies of long ones recorded once,
//! with slices in the place of reads and writes at the number of the step.
//! Nodes that cannot be expressed are refused together, each by name, operator and reason.
//!
//! # Domains
//! Operators are those of the default domain, `ai.onnx`, up to opset [`NEWEST_OPSET`], except those
//! of strings and encoded images, `BitCast`, `DeformConv`, `Det`, `MaxRoiPool`, `RoiAlign` and
//! `SequenceMap`, and of `com.microsoft` those that onnxruntime's optimizers, quantizers and model
//! builders write:
//! - `Attention`, `MultiHeadAttention`, `GroupQueryAttention`, `RotaryEmbedding`;
//! - `SkipLayerNormalization`, `SkipSimplifiedLayerNormalization`, `EmbedLayerNormalization`;
//! - `BiasGelu`, `FastGelu`, `Gelu`, `QuickGelu`, `FusedConv`, `FusedGemm`, `FusedMatMul`,
//!   `TransposeMatMul`;
//! - `MatMulNBits` and `GatherBlockQuantized` of 2, 4 and 8 bits, whose weights stay packed;
//! - `DynamicQuantizeMatMul`, `MatMulIntegerToFloat`, `QGemm`, `QLinearAdd`, `QLinearMul`,
//!   `QLinearAveragePool`, `QLinearGlobalAveragePool`, `QLinearConcat`, `QLinearLeakyRelu`,
//!   `QLinearSigmoid`, `QLinearSoftmax`, `QuantizeLinear`, `DequantizeLinear`.
//!
//! Functions that the model defines may be of any domain. Operators of other domains are refused,
//! such as those of `ai.onnx.ml` (trees, encoders and other classical models).
//!
//! # Open lengths
//! A dimension that [`OnnxModel::with_dim`] bounds has any length up to that bound in a run. Shapes
//! and slices that a model computes from such lengths are computed with symbols: sums and products
//! of a form `a · s₁ · s₂ · s₃ + b`, the smaller of two lengths, parts that count from the end of
//! an axis that may be shorter, divisions that are exact at every length, and comparisons that
//! have one result at every length. Shapes of another form are refused.
//!
//! # Element types
//! The runtime computes f32, f16, bf16, i32, u8 and truth values. Other integers are computed as
//! i32: inputs, constants and results are checked to fit, and arithmetic of narrower types keeps
//! their low bits, as ONNX does. Three things are checked: an element of an int64, uint64 or
//! uint32 input or constant that 32 bits do not hold is an error, and so is a result beyond the
//! range of the type that the model declares. Shape arithmetic and other folded constants are
//! computed in 64 bits. Nothing else is: sums, differences, products, powers and shifts of 64-bit
//! integers that depend on the inputs wrap at 32 bits in the middle of a program, without an
//! error, casts of floats saturate there, and means of integers are computed in f32. f64 is computed
//! in f32 only where [`OnnxModel::with_narrow`] allows it.
//!
//! # How to add an operator
//! A function in the file of its family under `ops/` (`ops/contributed/` for `com.microsoft`), from a
//! `Call` to its results, and a row in that file's table. Operators whose results are known when
//! their inputs are, and which shapes are computed with, have a row in `fold.rs` too.
#![forbid(unsafe_code)]

mod array;
mod call;
pub mod check;
mod element;
mod error;
mod file;
mod fold;
mod import;
mod lengths;
mod model;
mod ops;
mod order;
mod proto;
mod value;

#[cfg(test)]
mod tests;

pub use array::{Array, Data};
pub use element::Element;
pub use error::{Error, Refusal, Result};
pub use model::{Axis, InputInfo, NEWEST_OPSET, OnnxModel};
