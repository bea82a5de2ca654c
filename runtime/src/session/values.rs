//! Values for the host: outputs of runs, and weights and states by name.

use half::{bf16, f16};
use slabwise_kernels::dtype::DType;
use slabwise_kernels::memory::Region;
use slabwise_kernels::size::Env;

use super::{Session, Variable};
use crate::buffer::{Buffer, Output, Shown};
use crate::error::{Error, Result};
use crate::feed::Feed;
use crate::program::{Compiled, lengths};

impl Session {
    /// The outputs of a run, where they lie.
    pub(super) fn outputs<const N: usize>(
        &mut self,
        inner: &Compiled,
        feed: &dyn Feed,
        env: &Env,
        slab: Region,
    ) -> Result<[Output<'_>; N]> {
        let place = |b: usize| slab.part(inner.buffers[b].place.offset, inner.buffers[b].place.bytes);
        let buffers: [Option<Buffer>; N] = self.give_donated(inner, feed, env, &mut |b| place(b))?;
        let mut regions = [Region::default(); N];
        for (region, &b) in regions.iter_mut().zip(&inner.outputs) {
            *region = if inner.buffers[b].found { self.found_region(b, slab)? } else { place(b) };
        }
        Ok(std::array::from_fn(|i| self.output(inner, i, regions[i], env, buffers[i].clone())))
    }

    pub(crate) fn output(&self, inner: &Compiled, i: usize, region: Region, env: &Env, buffer: Option<Buffer>) -> Output<'_> {
        let planned = &inner.buffers[inner.outputs[i]];
        let lengths = lengths(&planned.dims, env);
        let bytes = lengths.iter().product::<usize>() * planned.dtype.bytes();
        Output { shown: Shown::new(&self.memory, region.part(0, bytes as u64)), dtype: planned.dtype, lengths, buffer }
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
