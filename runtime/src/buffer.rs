//! Values that stay on the device between runs, and what a run gives back.

use std::sync::Arc;

use ndarray::{ArrayD, ArrayViewD, IxDyn};
use slabwise_kernels::dtype::DType;
use slabwise_kernels::memory::{Element, Memory, Region};

use crate::error::{Error, Result};
use crate::feed::Lengths;

/// A value that stays on the device until it is dropped by the session or donated. Handles are small; copies of a handle
/// name the same value.
#[derive(Clone, Debug)]
pub struct Buffer {
    pub(crate) session: u64,
    pub(crate) slot: usize,
    pub(crate) generation: u64,
    pub(crate) name: Arc<str>,
    pub(crate) dtype: DType,
    pub(crate) lengths: Lengths,
}

impl Buffer {
    /// Gives the bytes away to the run this is fed to; every handle of the buffer is dead after it.
    pub fn donate(self) -> Donated {
        Donated(self)
    }

    /// The lengths of the axes.
    pub fn shape(&self) -> &[usize] {
        &self.lengths
    }

    /// The element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }
}

/// A [`Buffer`] that a run may overwrite.
#[derive(Debug)]
pub struct Donated(pub(crate) Buffer);

/// One output of a run, where it lies in the session's memory: it can be looked at until the next run.
pub struct Output<'s> {
    pub(crate) memory: &'s Memory,
    pub(crate) region: Region,
    pub(crate) dtype: DType,
    pub(crate) lengths: Lengths,
    pub(crate) buffer: Option<Buffer>,
}

impl Output<'_> {
    /// The first element as a number: what a loss or an accuracy is. NaN if there is no element.
    pub fn item(&self) -> f32 {
        if self.lengths.contains(&0) {
            return f32::NAN;
        }
        let first = self.region.part(0, self.dtype.bytes() as u64);
        match self.dtype {
            DType::F32 => self.memory.elements::<f32>(&first)[0],
            DType::F16 => self.memory.elements::<half::f16>(&first)[0].to_f32(),
            DType::BF16 => self.memory.elements::<half::bf16>(&first)[0].to_f32(),
            DType::I32 => self.memory.elements::<i32>(&first)[0] as f32,
            DType::U8 | DType::Bool => f32::from(self.memory.bytes(&first)[0]),
        }
    }

    /// The number that a scalar is, as a loss must be; an error if the output is not an f32 scalar.
    pub(crate) fn scalar(&self) -> Result<f32> {
        if self.dtype != DType::F32 || !self.lengths.is_empty() {
            return Err(Error::Value(format!("the first output is {} {:?}, not an f32 scalar", self.dtype, self.lengths)));
        }
        Ok(self.item())
    }

    /// The lengths of the axes.
    pub fn shape(&self) -> &[usize] {
        &self.lengths
    }

    /// The element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The bytes, row-major.
    pub fn bytes(&self) -> &[u8] {
        self.memory.bytes(&self.region)
    }

    /// The elements, where they lie. Truth values are read as `u8`. An error if the output is of another type.
    pub fn view<T: Element>(&self) -> Result<ArrayViewD<'_, T>> {
        let bool_as_byte = self.dtype == DType::Bool && T::DTYPE == DType::U8;
        if T::DTYPE != self.dtype && !bool_as_byte {
            return Err(Error::Value(format!("the output is {}, not {}", self.dtype, T::DTYPE)));
        }
        let elements = self.memory.elements::<T>(&self.region);
        ArrayViewD::from_shape(IxDyn(&self.lengths), elements).map_err(|e| Error::Internal(e.to_string()))
    }

    /// The elements in an array of their own.
    pub fn array<T: Element>(&self) -> Result<ArrayD<T>> {
        Ok(self.view::<T>()?.to_owned())
    }

    /// The buffer this output took over, if its input was donated.
    pub fn buffer(&self) -> Option<Buffer> {
        self.buffer.clone()
    }
}
