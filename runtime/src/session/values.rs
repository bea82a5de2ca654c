//! What lies on the device between runs, read and written: weights, state, and buffers of the user's.

use half::{bf16, f16};
use slabwise_kernels::dtype::DType;
use slabwise_kernels::memory::Element;
use slabwise_kernels::size::Env;

use super::{Session, Slot};
use crate::buffer::{Buffer, Output, Shown};
use crate::error::{Error, Result};
use crate::feed::Lengths;

impl Session {
    /// Puts an array into memory of its own that stays between runs.
    pub fn upload<T: Element + crate::feed::ToBytes, S, D>(&mut self, name: &str, array: &ndarray::ArrayBase<S, D, T>) -> Result<Buffer>
    where
        S: ndarray::Data<Elem = T>,
        D: ndarray::Dimension,
    {
        let bytes = (array.len() * size_of::<T>()) as u64;
        let region = self.reserve(bytes, name)?;
        self.memory.edit(&region, |memory, region| {
            memory.elements_mut::<T>(region).iter_mut().zip(array).for_each(|(slot, value)| *slot = *value);
        })?;
        self.slots.push(Slot { region, generation: 0 });
        let lengths = Lengths::from_slice(array.shape());
        Ok(Buffer { session: self.id, slot: self.slots.len() - 1, generation: 0, name: name.into(), dtype: T::DTYPE, lengths })
    }

    /// Gives a buffer's bytes back; every handle of it is dead after that.
    pub fn free(&mut self, buffer: Buffer) -> Result<()> {
        let region = self.resident(&buffer)?;
        self.slots[buffer.slot].generation += 1;
        self.memory.release(region.arena);
        Ok(())
    }

    /// The elements of a buffer, row-major.
    pub fn download<T: Element>(&self, buffer: &Buffer) -> Result<ndarray::ArrayD<T>> {
        let region = self.resident(buffer)?;
        let output = Output { shown: Shown::new(&self.memory, region), dtype: buffer.dtype, lengths: buffer.lengths.clone(), buffer: None };
        output.array()
    }

    /// The elements of a weight or state, by name.
    pub fn value(&self, name: &str) -> Result<ndarray::ArrayD<f32>> {
        let variable = self.find(name)?;
        let lengths: Vec<usize> = variable.info.dims.iter().map(|d| d.usize_at(&Env::default())).collect();
        let values = self.memory.look(&variable.region, |memory, region| -> Vec<f32> {
            match variable.info.dtype {
                DType::F32 => memory.elements::<f32>(region).to_vec(),
                DType::F16 => memory.elements::<f16>(region).iter().map(|h| h.to_f32()).collect(),
                DType::BF16 => memory.elements::<bf16>(region).iter().map(|h| h.to_f32()).collect(),
                DType::I32 => memory.elements::<i32>(region).iter().map(|&i| i as f32).collect(),
                DType::U8 | DType::Bool => memory.bytes(region).iter().map(|&b| f32::from(b)).collect(),
            }
        })?;
        ndarray::ArrayD::from_shape_vec(ndarray::IxDyn(&lengths), values).map_err(|e| Error::Internal(e.to_string()))
    }

    /// Changes a weight or state between runs; nothing is compiled anew. The array has the variable's shape.
    pub fn set_value<S, D>(&mut self, name: &str, array: &ndarray::ArrayBase<S, D, f32>) -> Result<()>
    where
        S: ndarray::Data<Elem = f32>,
        D: ndarray::Dimension,
    {
        let variable = self.find(name)?;
        let (region, dtype) = (variable.region, variable.info.dtype);
        let expected: Vec<usize> = variable.info.dims.iter().map(|d| d.usize_at(&Env::default())).collect();
        if array.shape() != expected {
            return Err(Error::Value(format!("\"{name}\" is {expected:?}, the array is {:?}", array.shape())));
        }
        self.memory.edit(&region, |memory, region| match dtype {
            DType::F32 => memory.elements_mut::<f32>(region).iter_mut().zip(array).for_each(|(s, v)| *s = *v),
            DType::F16 => memory.elements_mut::<f16>(region).iter_mut().zip(array).for_each(|(s, v)| *s = f16::from_f32(*v)),
            DType::BF16 => memory.elements_mut::<bf16>(region).iter_mut().zip(array).for_each(|(s, v)| *s = bf16::from_f32(*v)),
            DType::I32 => memory.elements_mut::<i32>(region).iter_mut().zip(array).for_each(|(s, v)| *s = *v as i32),
            DType::U8 => memory.bytes_mut(region).iter_mut().zip(array).for_each(|(s, v)| *s = *v as u8),
            DType::Bool => memory.bytes_mut(region).iter_mut().zip(array).for_each(|(s, v)| *s = u8::from(*v != 0.0)),
        })
    }
}
