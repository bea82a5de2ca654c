//! Element types, as stored in memory.

use std::fmt;

use crate::scalar::{ScalarOp, Value};

/// How one element is stored. Arithmetic happens in [`Lane`]s, so a storage type such as `u8` needs
/// no separate kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum DType {
    /// IEEE 754 single precision.
    F32,
    /// IEEE 754 half precision: storage alone, computed in `f32`.
    F16,
    /// The upper half of an `f32`: storage alone, computed in `f32`.
    BF16,
    /// Signed 32-bit integer, wrapping.
    I32,
    /// Unsigned byte.
    U8,
    /// One byte, 0 or 1.
    Bool,
}

/// The type of a value while it is being computed: 32 bits wide, for every storage type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Lane {
    /// `f32`.
    F32,
    /// `i32`; `u8` widens to it too.
    I32,
    /// 0 or 1 in an `i32`.
    Bool,
}

impl DType {
    /// Every storage type.
    pub const ALL: [DType; 6] = [
        DType::F32,
        DType::F16,
        DType::BF16,
        DType::I32,
        DType::U8,
        DType::Bool,
    ];

    /// Bytes of one element.
    pub const fn bytes(self) -> usize {
        match self {
            DType::F32 | DType::I32 => 4,
            DType::F16 | DType::BF16 => 2,
            DType::U8 | DType::Bool => 1,
        }
    }

    /// The type arithmetic happens in after a load.
    pub const fn lane(self) -> Lane {
        match self {
            DType::F32 | DType::F16 | DType::BF16 => Lane::F32,
            DType::I32 | DType::U8 => Lane::I32,
            DType::Bool => Lane::Bool,
        }
    }

    /// Lower-case name, as in `f32`.
    pub const fn name(self) -> &'static str {
        match self {
            DType::F32 => "f32",
            DType::F16 => "f16",
            DType::BF16 => "bf16",
            DType::I32 => "i32",
            DType::U8 => "u8",
            DType::Bool => "bool",
        }
    }

    /// True for types with a fraction; only these carry gradients.
    pub const fn is_float(self) -> bool {
        matches!(self, DType::F32 | DType::F16 | DType::BF16)
    }

    /// True for types of 16 bits with a fraction.
    pub const fn is_half(self) -> bool {
        matches!(self, DType::F16 | DType::BF16)
    }

    /// The operation that rounds an `f32` to a value of this type, if the type is narrower.
    pub const fn rounding(self) -> Option<ScalarOp> {
        match self {
            DType::F16 => Some(ScalarOp::RoundF16),
            DType::BF16 => Some(ScalarOp::RoundBf16),
            DType::F32 | DType::I32 | DType::U8 | DType::Bool => None,
        }
    }

    /// A number as this type would hold it: converted to its lane, and rounded.
    pub fn hold(self, value: Value) -> Value {
        let value = value.cast(self.lane());
        self.rounding().map_or(value, |round| round.eval(&[value]))
    }
}

impl Lane {
    /// The storage type that keeps a computed value as it is.
    pub const fn stored(self) -> DType {
        match self {
            Lane::F32 => DType::F32,
            Lane::I32 => DType::I32,
            Lane::Bool => DType::Bool,
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
