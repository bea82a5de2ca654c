//! Arrays of the host: initializers, constants, and what shape arithmetic is folded in.

use half::{bf16, f16};
use ndarray::{ArrayD, IxDyn};
use prost::bytes::Bytes;
use slabwise::DType;
use slabwise::data::HostArray;

use crate::element::Element;
use crate::proto::TensorProto;

/// Elements in row-major order: integers and truth values as i64, floats as f64, which hold every
/// value of the element types.
#[derive(Clone, Debug, PartialEq)]
pub enum Data {
    /// Of integers and truth values.
    Int(Vec<i64>),
    /// Of floats.
    Float(Vec<f64>),
}

/// An array with its element type in ONNX.
#[derive(Clone, Debug, PartialEq)]
pub struct Array {
    /// The element type.
    pub element: Element,
    /// The lengths of the axes.
    pub shape: Vec<usize>,
    /// The elements.
    pub data: Data,
}

/// The number of elements, unless it is beyond any memory.
pub fn count(shape: &[usize]) -> Option<usize> {
    shape
        .iter()
        .try_fold(1usize, |n, &length| n.checked_mul(length))
}

impl Array {
    /// An array of i64.
    pub fn ints(shape: Vec<usize>, values: Vec<i64>) -> Array {
        Array {
            element: Element::I64,
            shape,
            data: Data::Int(values),
        }
    }

    /// The number of elements.
    pub fn len(&self) -> usize {
        match &self.data {
            Data::Int(values) => values.len(),
            Data::Float(values) => values.len(),
        }
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The integers; `Err` if they are floats.
    pub fn as_ints(&self) -> Result<&[i64], String> {
        match &self.data {
            Data::Int(values) => Ok(values),
            Data::Float(_) => Err(format!("integers are expected, not {}", self.element)),
        }
    }

    /// The elements as f64.
    pub fn to_floats(&self) -> Vec<f64> {
        match &self.data {
            Data::Int(values) => values.iter().map(|&v| v as f64).collect(),
            Data::Float(values) => values.clone(),
        }
    }

    /// The same elements as another type, by the rules of ONNX's Cast: floats are truncated to
    /// integers, integers keep their low bits.
    pub fn cast(&self, to: Element) -> Array {
        let data = match (&self.data, to) {
            (Data::Int(values), Element::Bool) => {
                Data::Int(values.iter().map(|&v| i64::from(v != 0)).collect())
            }
            (Data::Float(values), Element::Bool) => {
                Data::Int(values.iter().map(|&v| i64::from(v != 0.0)).collect())
            }
            (Data::Int(values), to) if to.is_float() => {
                Data::Float(values.iter().map(|&v| round(v as f64, to)).collect())
            }
            (Data::Float(values), to) if to.is_float() => {
                Data::Float(values.iter().map(|&v| round(v, to)).collect())
            }
            (Data::Int(values), to) => Data::Int(values.iter().map(|&v| wrap(v, to)).collect()),
            (Data::Float(values), to) => {
                Data::Int(values.iter().map(|&v| wrap(v as i64, to)).collect())
            }
        };
        Array {
            element: to,
            shape: self.shape.clone(),
            data,
        }
    }

    /// The array that a message of a file describes. `external` reads the bytes that lie in another
    /// file.
    ///
    /// # Errors
    /// An element type that the importer does not know, and a number of bytes or elements that is
    /// not that of the shape.
    pub fn of_proto(tensor: &TensorProto, external: &External<'_>) -> Result<Array, String> {
        Stored::of_proto(tensor, external).map(Stored::into_array)
    }

    /// The array as the runtime holds it.
    ///
    /// # Errors
    /// A number that does not fit 32 bits.
    pub fn to_host(&self) -> Result<HostArray, String> {
        let shape = IxDyn(&self.shape);
        let made = |e: ndarray::ShapeError| e.to_string();
        let floats = || self.to_floats();
        Ok(match self.element.dtype() {
            DType::F32 => {
                let far = |v: &f64| v.is_finite() && (*v as f32).is_infinite();
                let values = floats();
                if let Some(v) = values.iter().find(|v| far(v)) {
                    return Err(format!(
                        "{} holds {v:e}, which float does not",
                        self.element
                    ));
                }
                let values = values.into_iter().map(|v| v as f32).collect();
                HostArray::F32(ArrayD::from_shape_vec(shape, values).map_err(made)?)
            }
            DType::F16 => {
                let values = floats().into_iter().map(f16::from_f64).collect();
                HostArray::F16(ArrayD::from_shape_vec(shape, values).map_err(made)?)
            }
            DType::BF16 => {
                let values = floats().into_iter().map(bf16::from_f64).collect();
                HostArray::BF16(ArrayD::from_shape_vec(shape, values).map_err(made)?)
            }
            DType::I32 => {
                let values = self.as_ints()?.iter().map(|&v| {
                    i32::try_from(v)
                        .map_err(|_| format!("{} holds {v}, which 32 bits do not", self.element))
                });
                let values = values.collect::<Result<_, _>>()?;
                HostArray::I32(ArrayD::from_shape_vec(shape, values).map_err(made)?)
            }
            DType::U8 | DType::Bool => {
                let values = self.as_ints()?.iter().map(|&v| v as u8).collect();
                let array = ArrayD::from_shape_vec(shape, values).map_err(made)?;
                match self.element {
                    Element::Bool => HostArray::Bool(array),
                    _ => HostArray::U8(array),
                }
            }
        })
    }

    /// The bytes of an `.npy` file (version 1.0) of 64-bit elements: integers as int64, floats as
    /// float64.
    pub fn to_npy64(&self) -> Vec<u8> {
        let kind = match &self.data {
            Data::Int(_) if self.element == Element::U64 => "<u8",
            Data::Int(_) => "<i8",
            Data::Float(_) => "<f8",
        };
        let lengths: String = self.shape.iter().map(|n| format!("{n},")).collect();
        let mut header =
            format!("{{'descr': '{kind}', 'fortran_order': False, 'shape': ({lengths}), }}");
        // Elements begin at a multiple of 64 bytes; the magic, version and length are 10.
        let padded = (10 + header.len() + 1).next_multiple_of(64) - 10;
        header.extend(std::iter::repeat_n(' ', padded - 1 - header.len()));
        header.push('\n');
        let mut bytes = b"\x93NUMPY\x01\x00".to_vec();
        bytes.extend((padded as u16).to_le_bytes());
        bytes.extend(header.bytes());
        match &self.data {
            Data::Int(values) => values.iter().for_each(|v| bytes.extend(v.to_le_bytes())),
            Data::Float(values) => values.iter().for_each(|v| bytes.extend(v.to_le_bytes())),
        }
        bytes
    }

    /// A result of the runtime as the type that the model declares.
    ///
    /// # Errors
    /// An integer beyond the range of that type.
    pub fn of_host(host: &HostArray, element: Element) -> Result<Array, String> {
        let shape = host.shape().to_vec();
        let data = match host {
            HostArray::I32(values) => Data::Int(values.iter().map(|&v| v.into()).collect()),
            HostArray::U8(values) | HostArray::Bool(values) => {
                Data::Int(values.iter().map(|&v| v.into()).collect())
            }
            floats => Data::Float(floats.to_f32().iter().map(|&v| v.into()).collect()),
        };
        if let Data::Int(values) = &data {
            let (low, high) = element.range();
            if let Some(v) = values.iter().find(|v| !(low..=high).contains(v)) {
                return Err(format!("a result of {element} is {v}, beyond its range"));
            }
        }
        Ok(Array {
            element,
            shape,
            data,
        })
    }
}

/// Reads the bytes of a tensor that lie in another file.
pub type External<'a> = dyn Fn(&TensorProto) -> Result<Bytes, String> + 'a;

/// An array of a file, whose bytes become numbers of 64 bits only where an operator asks for them.
#[derive(Clone, Debug)]
pub enum Stored {
    /// The elements in row-major order, each of [`Element::bytes`] bytes, little-endian.
    Bytes {
        /// The element type.
        element: Element,
        /// The lengths of the axes.
        shape: Vec<usize>,
        /// A part of the file that the model was read from, or a file beside it.
        bytes: Bytes,
    },
    /// Elements that the file holds as numbers, or that were computed.
    Array(Array),
}

impl Stored {
    /// The array that a message of a file describes, as [`Array::of_proto`].
    pub fn of_proto(tensor: &TensorProto, external: &External<'_>) -> Result<Stored, String> {
        let element = Element::of(tensor.data_type)
            .map_err(|name| format!("tensor \"{}\" holds {name}", tensor.name))?;
        let shape = lengths(&tensor.dims)
            .ok_or_else(|| format!("tensor \"{}\" has shape {:?}", tensor.name, tensor.dims))?;
        let elements = check_elements(tensor, element, &shape)?;
        let raw = match (&tensor.raw_data, tensor.data_location) {
            (_, 1) => Some(external(tensor)?),
            (raw, _) => raw.clone().filter(|raw| !raw.is_empty() || elements == 0),
        };
        let wrong = |has: usize, of: &str| {
            format!(
                "tensor \"{}\" of {element} {shape:?} has {has} {of}",
                tensor.name
            )
        };
        if element == Element::U64 {
            let largest = match &raw {
                Some(bytes) => read(bytes, u64::from_le_bytes).into_iter().max(),
                None => tensor.uint64_data.iter().copied().max(),
            };
            if let Some(largest) = largest.filter(|&v| i64::try_from(v).is_err()) {
                return Err(format!(
                    "tensor \"{}\" of {element} {shape:?} has the value {largest}, beyond the largest i64",
                    tensor.name
                ));
            }
        }
        if let Some(bytes) = raw {
            return match bytes.len() == elements * element.bytes() {
                true => Ok(Stored::Bytes {
                    element,
                    shape,
                    bytes,
                }),
                false => Err(wrong(bytes.len(), "bytes")),
            };
        }
        let array = Array {
            element,
            data: of_fields(element, tensor),
            shape: shape.clone(),
        };
        match array.len() == elements {
            true => Ok(Stored::Array(array)),
            false => Err(wrong(array.len(), "elements")),
        }
    }

    /// The element type.
    pub fn element(&self) -> Element {
        match self {
            Stored::Bytes { element, .. } => *element,
            Stored::Array(array) => array.element,
        }
    }

    /// The lengths of the axes.
    pub fn shape(&self) -> &[usize] {
        match self {
            Stored::Bytes { shape, .. } => shape,
            Stored::Array(array) => &array.shape,
        }
    }

    /// The array with its elements as numbers of 64 bits.
    pub fn into_array(self) -> Array {
        match self {
            Stored::Bytes {
                element,
                shape,
                bytes,
            } => Array {
                element,
                shape,
                data: of_bytes(element, &bytes),
            },
            Stored::Array(array) => array,
        }
    }

    /// The elements of an array of int8 plus 128; `None` if it is of another type.
    pub fn offset_bytes(&self) -> Option<Vec<u8>> {
        match self {
            Stored::Bytes {
                element: Element::I8,
                bytes,
                ..
            } => Some(bytes.iter().map(|&v| v ^ 0x80).collect()),
            Stored::Array(array) if array.element == Element::I8 => {
                let values = array.as_ints().ok()?.iter();
                Some(values.map(|&v| (v + 128) as u8).collect())
            }
            _ => None,
        }
    }

    /// The array as the runtime holds it.
    ///
    /// # Errors
    /// A number that does not fit 32 bits.
    pub fn to_host(&self) -> Result<HostArray, String> {
        let made = |e: ndarray::ShapeError| e.to_string();
        let (element, shape, bytes) = match self {
            Stored::Array(array) => return array.to_host(),
            Stored::Bytes {
                element,
                shape,
                bytes,
            } => (element, IxDyn(shape), bytes),
        };
        macro_rules! held {
            ($kind:ident, $type:ty) => {
                HostArray::$kind(
                    ArrayD::from_shape_vec(shape, read(bytes, <$type>::from_le_bytes))
                        .map_err(made)?,
                )
            };
        }
        Ok(match element {
            Element::F32 => held!(F32, f32),
            Element::F16 => held!(F16, f16),
            Element::BF16 => held!(BF16, bf16),
            Element::I32 => held!(I32, i32),
            Element::U8 => held!(U8, u8),
            _ => return self.clone().into_array().to_host(),
        })
    }

    /// The elements of a float array as f32, which are those of a parameter.
    ///
    /// # Errors
    /// A number that f32 does not hold.
    pub fn to_f32(&self) -> Result<ArrayD<f32>, String> {
        match self.to_host()? {
            HostArray::F32(array) => Ok(array),
            host => Ok(host.to_f32()),
        }
    }
}

/// The numbers in these bytes.
fn read<T, const N: usize>(bytes: &[u8], one: impl Fn([u8; N]) -> T) -> Vec<T> {
    bytes
        .as_chunks()
        .0
        .iter()
        .map(|&bytes| one(bytes))
        .collect()
}

/// The number of elements of a tensor of this shape, none of which is read.
///
/// # Errors
/// More elements than any memory holds, and than the file has.
pub fn check_elements(
    tensor: &TensorProto,
    element: Element,
    shape: &[usize],
) -> Result<usize, String> {
    let name = &tensor.name;
    let elements = count(shape)
        .filter(|n| n.checked_mul(8).is_some_and(|b| b < isize::MAX as usize))
        .ok_or_else(|| {
            format!("tensor \"{name}\" has the shape {shape:?}: no memory holds so many elements")
        })?;
    let raw = tensor.raw_data.as_ref().map_or(0, Bytes::len);
    let fields = [
        tensor.float_data.len(),
        tensor.double_data.len(),
        tensor.int32_data.len(),
        tensor.int64_data.len(),
        tensor.uint64_data.len(),
    ];
    let fields: usize = fields.iter().sum();
    let (has, of, wanted) = match raw {
        0 => (fields, "elements", elements),
        raw => (raw, "bytes", elements * element.bytes()),
    };
    match tensor.data_location == 0 && has != wanted {
        true => Err(format!(
            "tensor \"{name}\" of {element} {shape:?} has {has} {of}"
        )),
        false => Ok(elements),
    }
}

/// A shape of a file; `None` if a length is negative.
pub fn lengths(dims: &[i64]) -> Option<Vec<usize>> {
    dims.iter().map(|&n| usize::try_from(n).ok()).collect()
}

/// The low bits of an integer that its type keeps.
pub fn wrap(v: i64, to: Element) -> i64 {
    match to {
        Element::U8 => (v as u8).into(),
        Element::I8 => (v as i8).into(),
        Element::U16 => (v as u16).into(),
        Element::I16 => (v as i16).into(),
        Element::I32 => (v as i32).into(),
        Element::U32 => (v as u32).into(),
        Element::Bool => (v != 0).into(),
        _ => v,
    }
}

/// The nearest value of a float type.
pub fn round(v: f64, to: Element) -> f64 {
    match to {
        Element::F32 => (v as f32).into(),
        Element::F16 => f16::from_f64(v).to_f64(),
        Element::BF16 => bf16::from_f64(v).to_f64(),
        _ => v,
    }
}

fn of_bytes(element: Element, raw: &[u8]) -> Data {
    macro_rules! numbers {
        ($kind:ident, $type:ty, $each:expr) => {
            Data::$kind(read(raw, |bytes| $each(<$type>::from_le_bytes(bytes))))
        };
    }
    match element {
        Element::F32 => numbers!(Float, f32, f64::from),
        Element::F64 => numbers!(Float, f64, f64::from),
        Element::F16 => numbers!(Float, f16, f16::to_f64),
        Element::BF16 => numbers!(Float, bf16, bf16::to_f64),
        Element::U8 => numbers!(Int, u8, i64::from),
        Element::Bool => numbers!(Int, u8, |v| i64::from(v != 0)),
        Element::I8 => numbers!(Int, i8, i64::from),
        Element::U16 => numbers!(Int, u16, i64::from),
        Element::I16 => numbers!(Int, i16, i64::from),
        Element::I32 => numbers!(Int, i32, i64::from),
        Element::U32 => numbers!(Int, u32, i64::from),
        Element::I64 => numbers!(Int, i64, i64::from),
        Element::U64 => numbers!(Int, u64, |v: u64| v.min(i64::MAX as u64) as i64),
    }
}

fn of_fields(element: Element, tensor: &TensorProto) -> Data {
    let ints = || tensor.int32_data.iter();
    match element {
        Element::F32 => Data::Float(tensor.float_data.iter().map(|&v| v.into()).collect()),
        Element::F64 => Data::Float(tensor.double_data.clone()),
        Element::F16 => Data::Float(ints().map(|&v| f16::from_bits(v as u16).to_f64()).collect()),
        Element::BF16 => Data::Float(
            ints()
                .map(|&v| bf16::from_bits(v as u16).to_f64())
                .collect(),
        ),
        Element::I64 => Data::Int(tensor.int64_data.clone()),
        Element::U32 | Element::U64 => {
            let values = tensor.uint64_data.iter();
            Data::Int(values.map(|&v| v.min(i64::MAX as u64) as i64).collect())
        }
        other => Data::Int(ints().map(|&v| wrap(v.into(), other)).collect()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shapes_without_their_elements_are_refused() {
        let tensor = |dims: Vec<i64>, raw: usize| TensorProto {
            name: "w".into(),
            data_type: 1,
            dims,
            raw_data: Some(vec![0; raw].into()),
            ..TensorProto::default()
        };
        let of = |tensor: &TensorProto| {
            let shape = lengths(&tensor.dims).expect("no length is negative");
            check_elements(tensor, Element::F32, &shape)
        };
        assert_eq!(of(&tensor(vec![2, 3], 24)), Ok(6));
        let error = of(&tensor(vec![1 << 62, 3], 12)).expect_err("of 2⁶² rows");
        assert!(
            error.contains("4611686018427387904") && error.contains("no memory"),
            "{error}"
        );
        let error = of(&tensor(vec![1 << 40], 12)).expect_err("of 2⁴⁰ rows");
        assert!(error.contains("12 bytes"), "{error}");
        let error = of(&tensor(vec![7], 0)).expect_err("without elements");
        assert!(error.contains("0 elements"), "{error}");
    }

    #[test]
    fn arrays_of_64_bits_are_written_as_numpy_does() {
        let bytes = Array::ints(vec![2], vec![-1, 1 << 40]).to_npy64();
        assert_eq!(bytes.len(), 128 + 16);
        assert_eq!(&bytes[..10], b"\x93NUMPY\x01\x00\x76\x00");
        assert!(
            bytes[10..].starts_with(b"{'descr': '<i8', 'fortran_order': False, 'shape': (2,), }")
        );
        assert_eq!(bytes[127], b'\n');
        assert_eq!(&bytes[128..136], &[0xFF; 8]);
        assert_eq!(&bytes[136..], &[0, 0, 0, 0, 0, 1, 0, 0]);
        let float = Array::ints(Vec::new(), vec![3])
            .cast(Element::F64)
            .to_npy64();
        assert!(
            float[10..].starts_with(b"{'descr': '<f8', 'fortran_order': False, 'shape': (), }")
        );
        assert_eq!(&float[float.len() - 8..], &3.0f64.to_le_bytes());
    }
}
