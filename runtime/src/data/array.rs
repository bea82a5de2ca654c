//! Arrays of the host whose element type is known at run time.

use std::any::Any;

use half::{bf16, f16};
use ndarray::{Array, ArrayD, ArrayViewD, Dimension};
use slabwise_kernels::dtype::DType;
use slabwise_kernels::memory::Element;

use crate::error::{Error, Result};

/// An array in the host's memory whose element type is known at run time, as a file or a program's
/// output has it. It can be fed to a run as any other array.
///
/// ```
/// use slabwise::data::HostArray;
/// use ndarray::array;
///
/// let array = HostArray::from(array![[1.0f32, 2.0], [3.0, 4.0]]);
/// assert_eq!((array.dtype().name(), array.shape()), ("f32", &[2, 2][..]));
/// assert_eq!(array.view::<f32>()?[[1, 0]], 3.0);
/// # Ok::<(), slabwise::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub enum HostArray {
    /// Single precision.
    F32(ArrayD<f32>),
    /// IEEE 754 half precision.
    F16(ArrayD<f16>),
    /// The upper half of an `f32`.
    BF16(ArrayD<bf16>),
    /// Signed 32-bit integers.
    I32(ArrayD<i32>),
    /// Unsigned bytes.
    U8(ArrayD<u8>),
    /// Truth values: 0 or 1.
    Bool(ArrayD<u8>),
}

/// Evaluates an expression with the array of any element type.
macro_rules! with_array {
    ($value:expr, $array:ident => $result:expr) => {
        match $value {
            $crate::data::HostArray::F32($array) => $result,
            $crate::data::HostArray::F16($array) => $result,
            $crate::data::HostArray::BF16($array) => $result,
            $crate::data::HostArray::I32($array) => $result,
            $crate::data::HostArray::U8($array) | $crate::data::HostArray::Bool($array) => $result,
        }
    };
}
pub(crate) use with_array;

impl HostArray {
    /// The element type.
    pub fn dtype(&self) -> DType {
        match self {
            HostArray::F32(_) => DType::F32,
            HostArray::F16(_) => DType::F16,
            HostArray::BF16(_) => DType::BF16,
            HostArray::I32(_) => DType::I32,
            HostArray::U8(_) => DType::U8,
            HostArray::Bool(_) => DType::Bool,
        }
    }

    /// The lengths of the axes.
    pub fn shape(&self) -> &[usize] {
        with_array!(self, array => array.shape())
    }

    /// The number of elements.
    pub fn len(&self) -> usize {
        with_array!(self, array => array.len())
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The elements, in place. Truth values are read as `u8`.
    ///
    /// # Errors
    /// If the elements are of another type.
    pub fn view<T: Element + 'static>(&self) -> Result<ArrayViewD<'_, T>> {
        let array = with_array!(self, array => (array as &dyn Any).downcast_ref::<ArrayD<T>>());
        array.map(|array| array.view()).ok_or_else(|| {
            Error::Value(format!("the values are {}, not {}", self.dtype(), T::DTYPE))
        })
    }

    /// The number of bytes that the elements take.
    pub fn bytes(&self) -> u64 {
        self.len() as u64 * self.dtype().bytes() as u64
    }

    /// The elements as `f32`, rounded where an integer has more than 24 bits.
    pub fn to_f32(&self) -> ArrayD<f32> {
        match self {
            HostArray::F32(array) => array.clone(),
            HostArray::F16(array) => array.mapv(f16::to_f32),
            HostArray::BF16(array) => array.mapv(bf16::to_f32),
            HostArray::I32(array) => array.mapv(|value| value as f32),
            HostArray::U8(array) | HostArray::Bool(array) => array.mapv(f32::from),
        }
    }
}

macro_rules! from_array {
    ($($element:ty => $variant:ident),*) => {$(
        impl<D: Dimension> From<Array<$element, D>> for HostArray {
            fn from(array: Array<$element, D>) -> HostArray {
                HostArray::$variant(array.into_dyn())
            }
        }
    )*};
}
from_array!(f32 => F32, f16 => F16, bf16 => BF16, i32 => I32, u8 => U8);

impl<D: Dimension> From<Array<bool, D>> for HostArray {
    fn from(array: Array<bool, D>) -> HostArray {
        HostArray::Bool(array.mapv(u8::from).into_dyn())
    }
}
