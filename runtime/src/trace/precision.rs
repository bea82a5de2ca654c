//! The operand types of a trace's matrix products and convolutions.

use std::fmt;
use std::str::FromStr;

use slabwise_kernels::dtype::DType;
use slabwise_planner::brief;

use crate::error::{Error, Result};
use crate::graph::Graph;
use crate::ops::{GraphBuilder, NodeId};

/// The operand type of matrix products and convolutions of a trace: see
/// [`Trace::with_precision`](crate::Trace::with_precision).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum Precision {
    /// As they are.
    #[default]
    F32,
    /// Operands of f32 are rounded to bf16 first, 8 significant bits, with a relative error of up
    /// to 2⁻⁸. The exponent range is that of f32, so gradients need no scaling of the loss.
    Bf16,
    /// Operands of f32 are rounded to f16 first, 11 significant bits, with a relative error of up
    /// to 2⁻¹¹. Numbers above 65,504 become infinite and numbers below 6·10⁻⁸ zero, so that
    /// training needs [`Trace::with_loss_scale`](crate::Trace::with_loss_scale).
    F16,
}

impl Precision {
    /// All of them.
    pub const ALL: [Precision; 3] = [Precision::F32, Precision::Bf16, Precision::F16];

    /// The type of such operands.
    pub const fn dtype(self) -> DType {
        match self {
            Precision::F32 => DType::F32,
            Precision::Bf16 => DType::BF16,
            Precision::F16 => DType::F16,
        }
    }

    /// An operand of a product, rounded to this precision.
    pub(crate) fn round(self, g: &mut Graph, operand: NodeId) -> NodeId {
        match g.dtype(operand) {
            DType::F32 if self != Precision::F32 => g.cast(operand, self.dtype()),
            _ => operand,
        }
    }
}

impl fmt::Display for Precision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.dtype().name())
    }
}

impl FromStr for Precision {
    type Err = Error;

    fn from_str(text: &str) -> Result<Precision> {
        let known = Precision::ALL
            .into_iter()
            .find(|precision| precision.to_string() == text);
        known.ok_or_else(|| {
            Error::Value(format!(
                "unknown precision {:?}; it is f32, bf16 or f16",
                brief(text)
            ))
        })
    }
}
