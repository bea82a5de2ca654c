//! Arrays of the host as part of a program.

use std::panic::Location;

use ndarray::{ArrayBase, Data, Dimension};
use slabwise_kernels::dtype::DType;

use super::Trace;
use crate::buffer::{Buffer, Donated};
use crate::data::{HostArray, with_array};
use crate::tensor::Tensor;

/// An array as a constant holds it.
pub struct Held {
    dtype: DType,
    lengths: Vec<usize>,
    bytes: Vec<u8>,
}

/// A number of the host that a tensor can hold, perhaps of a narrower type: i64 as i32, f64 as f32.
pub trait HostNumber: Copy + std::fmt::Display {
    /// The type in a tensor.
    const DTYPE: DType;
    /// Appends its native-endian bytes in that type, unless its value is none of that type.
    fn put(self, bytes: &mut Vec<u8>) -> bool;
}

macro_rules! host_numbers {
    ($($own:ty as $to:ident, |$x:ident| $narrow:expr;)*) => {$(
        impl HostNumber for $own {
            const DTYPE: DType = DType::$to;

            fn put(self, bytes: &mut Vec<u8>) -> bool {
                let $x = self;
                let narrow = $narrow;
                if let Some(number) = narrow {
                    bytes.extend_from_slice(&number.to_ne_bytes());
                }
                narrow.is_some()
            }
        }
    )*};
}
host_numbers! {
    f32 as F32, |x| Some(x);
    f64 as F32, |x| Some(x as f32);
    half::f16 as F16, |x| Some(x);
    half::bf16 as BF16, |x| Some(x);
    i32 as I32, |x| Some(x);
    i64 as I32, |x| i32::try_from(x).ok();
    u8 as U8, |x| Some(x);
    bool as Bool, |x| Some(u8::from(x));
}

/// An array, slice or vector of numbers or truth values: what [`Trace::constant`] takes.
pub trait Constant {
    /// The elements in row-major order; or the reason why they cannot be held.
    ///
    /// # Errors
    /// A number that its type in a tensor does not have, or a buffer on a device.
    fn hold(&self) -> Result<Held, String>;
}

fn hold<T: HostNumber>(
    lengths: &[usize],
    values: impl ExactSizeIterator<Item = T>,
) -> Result<Held, String> {
    let mut bytes = Vec::with_capacity(values.len() * T::DTYPE.bytes());
    for (at, value) in values.enumerate() {
        if !value.put(&mut bytes) {
            return Err(format!(
                "constant: element {at} is {value}, which {} does not hold",
                T::DTYPE
            ));
        }
    }
    Ok(Held {
        dtype: T::DTYPE,
        lengths: lengths.to_vec(),
        bytes,
    })
}

impl<T: HostNumber, S: Data<Elem = T>, D: Dimension> Constant for ArrayBase<S, D, T> {
    fn hold(&self) -> Result<Held, String> {
        match self.as_slice() {
            Some(slice) => hold(self.shape(), slice.iter().copied()),
            None => hold(self.shape(), self.iter().copied()),
        }
    }
}

impl<T: HostNumber> Constant for [T] {
    fn hold(&self) -> Result<Held, String> {
        hold(&[self.len()], self.iter().copied())
    }
}

impl<T: HostNumber> Constant for Vec<T> {
    fn hold(&self) -> Result<Held, String> {
        self.as_slice().hold()
    }
}

impl<T: HostNumber, const N: usize> Constant for [T; N] {
    fn hold(&self) -> Result<Held, String> {
        self.as_slice().hold()
    }
}

impl<C: Constant + ?Sized> Constant for &C {
    fn hold(&self) -> Result<Held, String> {
        (**self).hold()
    }
}

impl Constant for HostArray {
    fn hold(&self) -> Result<Held, String> {
        let held = with_array!(self, array => array.hold())?;
        Ok(Held {
            dtype: self.dtype(),
            ..held
        })
    }
}

impl Constant for Buffer {
    fn hold(&self) -> Result<Held, String> {
        Err(format!(
            "constant: the buffer \"{}\" lies on a device; make it an input, or download it",
            self.name
        ))
    }
}

impl Constant for Donated {
    fn hold(&self) -> Result<Held, String> {
        self.0.hold()
    }
}

impl Trace {
    /// An array of the host as part of the program, in the array's shape; a slice or a `Vec` has
    /// one axis. f32, i32, u8, halves and truth values keep their type, i64 becomes i32 (a number
    /// outside of its range is a mistake) and f64 becomes f32. For tables that are no weights, such
    /// as frequencies or masks. The session holds the bytes once for all programs with equal ones,
    /// and no file has them.
    ///
    /// ```
    /// # use slabwise::prelude::*;
    /// let trace = Trace::inference();
    /// let x = trace.input("x", F32, (2, 3));
    /// let scaled = x * trace.constant(&[1.0f32, 10.0, 100.0]);
    /// let columns = x.index_select(1, trace.constant(&[2i64, 0]));
    /// ```
    #[track_caller]
    pub fn constant(&self, values: &(impl Constant + ?Sized)) -> Tensor<'_> {
        let at = Location::caller();
        match values.hold() {
            Ok(Held {
                dtype,
                lengths,
                bytes,
            }) => self.constant_of(at, dtype, &lengths, bytes),
            Err(message) => self.fail(at, "", message),
        }
    }
}
