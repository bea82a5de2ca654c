//! Element types of ONNX and the types in which the runtime computes them.

use std::fmt;

use slabwise::DType;

/// An element type of ONNX that the importer knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Element {
    /// Single precision.
    F32,
    /// Unsigned bytes.
    U8,
    /// Signed bytes.
    I8,
    /// Unsigned 16-bit integers.
    U16,
    /// Signed 16-bit integers.
    I16,
    /// Signed 32-bit integers.
    I32,
    /// Signed 64-bit integers.
    I64,
    /// Truth values.
    Bool,
    /// IEEE 754 half precision.
    F16,
    /// Double precision.
    F64,
    /// Unsigned 32-bit integers.
    U32,
    /// Unsigned 64-bit integers.
    U64,
    /// The upper half of single precision.
    BF16,
}

impl Element {
    /// The type of a number of `TensorProto.DataType`; `Err` with its name if it is none of these.
    pub fn of(number: i32) -> Result<Element, String> {
        Ok(match number {
            1 => Element::F32,
            2 => Element::U8,
            3 => Element::I8,
            4 => Element::U16,
            5 => Element::I16,
            6 => Element::I32,
            7 => Element::I64,
            9 => Element::Bool,
            10 => Element::F16,
            11 => Element::F64,
            12 => Element::U32,
            13 => Element::U64,
            16 => Element::BF16,
            other => {
                let name = match other {
                    0 => "no type".into(),
                    8 => "strings".into(),
                    14 | 15 => "complex numbers".into(),
                    17..=20 => "8-bit floats".into(),
                    21 | 22 => "4-bit integers".into(),
                    23 => "4-bit floats".into(),
                    24 => "8-bit floats".into(),
                    25 | 26 => "2-bit integers".into(),
                    _ => format!("element type {other}"),
                };
                return Err(name);
            }
        })
    }

    /// The type of the runtime that holds its values: integers narrower or wider than 32 bits are
    /// computed as i32, f64 as f32.
    pub fn dtype(self) -> DType {
        match self {
            Element::F32 | Element::F64 => DType::F32,
            Element::F16 => DType::F16,
            Element::BF16 => DType::BF16,
            Element::U8 => DType::U8,
            Element::Bool => DType::Bool,
            _ => DType::I32,
        }
    }

    /// Whether it is a floating-point type.
    pub fn is_float(self) -> bool {
        matches!(
            self,
            Element::F32 | Element::F16 | Element::F64 | Element::BF16
        )
    }

    /// Bytes of an element in a file.
    pub fn bytes(self) -> usize {
        match self {
            Element::U8 | Element::I8 | Element::Bool => 1,
            Element::U16 | Element::I16 | Element::F16 | Element::BF16 => 2,
            Element::F32 | Element::I32 | Element::U32 => 4,
            Element::I64 | Element::F64 | Element::U64 => 8,
        }
    }

    /// The least and largest integer; of truth values 0 and 1.
    pub fn range(self) -> (i64, i64) {
        match self {
            Element::Bool => (0, 1),
            Element::U8 => (0, 0xFF),
            Element::I8 => (-0x80, 0x7F),
            Element::U16 => (0, 0xFFFF),
            Element::I16 => (-0x8000, 0x7FFF),
            Element::I32 => (i32::MIN.into(), i32::MAX.into()),
            Element::U32 => (0, u32::MAX.into()),
            Element::U64 => (0, i64::MAX),
            _ => (i64::MIN, i64::MAX),
        }
    }

    /// Its name in ONNX.
    pub fn name(self) -> &'static str {
        match self {
            Element::F32 => "float",
            Element::U8 => "uint8",
            Element::I8 => "int8",
            Element::U16 => "uint16",
            Element::I16 => "int16",
            Element::I32 => "int32",
            Element::I64 => "int64",
            Element::Bool => "bool",
            Element::F16 => "float16",
            Element::F64 => "double",
            Element::U32 => "uint32",
            Element::U64 => "uint64",
            Element::BF16 => "bfloat16",
        }
    }
}

impl fmt::Display for Element {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
