//! Operators of `com.microsoft`, onnxruntime's own domain, which its optimizers and quantizers write
//! in the place of several operators of `ai.onnx`.

mod attention;
mod fused;
mod norm;
mod quantized;

use super::Run;

/// The operators, by family.
pub const TABLES: &[&[(&str, Run)]] = &[
    attention::OPERATORS,
    fused::OPERATORS,
    norm::OPERATORS,
    quantized::OPERATORS,
];
