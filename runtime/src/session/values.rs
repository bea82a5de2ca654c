//! Weights and states as arrays, by name.

use half::{bf16, f16};
use slabwise_kernels::dtype::DType;
use slabwise_kernels::size::Env;

use super::{Session, Variable};
use crate::error::{Error, Result};

impl Session {
    /// The elements of a weight or state, by name.
    pub fn value(&self, name: &str) -> Result<ndarray::ArrayD<f32>> {
        let variable = self.find(name)?;
        let lengths: Vec<usize> = variable.info.dims.iter().map(|d| d.usize_at(&Env::default())).collect();
        let values: Vec<f32> = match variable.info.dtype {
            DType::F32 => self.memory.elements::<f32>(&variable.region).to_vec(),
            DType::F16 => self.memory.elements::<f16>(&variable.region).iter().map(|h| h.to_f32()).collect(),
            DType::BF16 => self.memory.elements::<bf16>(&variable.region).iter().map(|h| h.to_f32()).collect(),
            DType::I32 => self.memory.elements::<i32>(&variable.region).iter().map(|&i| i as f32).collect(),
            DType::U8 | DType::Bool => self.memory.bytes(&variable.region).iter().map(|&b| f32::from(b)).collect(),
        };
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
        match dtype {
            DType::F32 => self.memory.elements_mut::<f32>(&region).iter_mut().zip(array).for_each(|(s, v)| *s = *v),
            DType::F16 => self.memory.elements_mut::<f16>(&region).iter_mut().zip(array).for_each(|(s, v)| *s = f16::from_f32(*v)),
            DType::BF16 => self.memory.elements_mut::<bf16>(&region).iter_mut().zip(array).for_each(|(s, v)| *s = bf16::from_f32(*v)),
            DType::I32 => self.memory.elements_mut::<i32>(&region).iter_mut().zip(array).for_each(|(s, v)| *s = *v as i32),
            DType::U8 => self.memory.bytes_mut(&region).iter_mut().zip(array).for_each(|(s, v)| *s = *v as u8),
            DType::Bool => self.memory.bytes_mut(&region).iter_mut().zip(array).for_each(|(s, v)| *s = u8::from(*v != 0.0)),
        }
        Ok(())
    }

    /// Names of all weights and state, in the order they were declared.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.variables.iter().map(|v| &*v.info.name)
    }

    fn find(&self, name: &str) -> Result<&Variable> {
        self.by_name.get(name).map(|&at| &self.variables[at]).ok_or_else(|| {
            let known: Vec<&str> = self.names().take(12).collect();
            Error::Value(format!(
                "there is no weight or state \"{name}\"; there are {} of them: {} …",
                self.variables.len(),
                known.join(", ")
            ))
        })
    }
}
