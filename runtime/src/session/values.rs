//! Access to the values that stay on the device between runs: weights, state, and buffers of the
//! user.

use slabwise_kernels::dtype::DType;
use slabwise_kernels::memory::Element;

use super::{Session, Variable, fixed};
use crate::buffer::{Buffer, Output, Shown};
use crate::error::{Error, Result};
use crate::feed::{Feed, Lengths, Misfit, ToBytes, misfit};
use crate::graph::Graph;
use crate::program::Program;
use crate::words;

impl Session {
    /// Copies an array to a buffer of the device, which stays between runs.
    pub fn upload<T: Element + ToBytes, S, D>(
        &mut self,
        name: &str,
        array: &ndarray::ArrayBase<S, D, T>,
    ) -> Result<Buffer>
    where
        S: ndarray::Data<Elem = T>,
        D: ndarray::Dimension,
    {
        let bytes = (array.len() * size_of::<T>()) as u64;
        let region = self.memory.reserve(bytes, name)?;
        self.memory
            .backend
            .map_write(&region, &mut |memory, region| {
                memory
                    .elements_mut::<T>(region)
                    .iter_mut()
                    .zip(array)
                    .for_each(|(slot, value)| *slot = *value);
            })?;
        Ok(self.memory.buffers.add(
            region,
            name.into(),
            T::DTYPE,
            Lengths::from_slice(array.shape()),
        ))
    }

    /// Runs a program as [`Session::run`] does and copies each output, on the device, to a buffer
    /// that outlives the next run. It can be fed to another program, or to the same one later,
    /// without a copy through the host. [`Session::free`] gives its bytes back. An output that takes
    /// over a [donated](Buffer::donate) input is that buffer.
    ///
    /// ```
    /// # use slabwise::prelude::*;
    /// # let mut session = Session::new(Device::Cpu, Params::seeded(0))?;
    /// let trace = Trace::inference().named("square");
    /// let x = trace.input("x", F32, (2,));
    /// let square = session.compile(&trace, [x * x])?;
    /// let [four] = session.run_resident(&square, &[2.0f32, 3.0])?;
    /// assert_eq!(session.run(&square, &four)?[0].array::<f32>()?.as_slice(), Some(&[16.0, 81.0][..]));
    /// session.free(four)?;
    /// # Ok::<(), slabwise::Error>(())
    /// ```
    ///
    /// # Errors
    /// Those of [`Session::run`], and if there is no memory for the buffers.
    pub fn run_resident<const N: usize>(
        &mut self,
        program: &Program<N>,
        feed: impl Feed,
    ) -> Result<[Buffer; N]> {
        let made = self.run(program, feed)?.map(|output| {
            let region = output.shown.region();
            (region, output.dtype, output.lengths, output.buffer)
        });
        let mut buffers = Vec::with_capacity(N);
        for (at, (from, dtype, lengths, donated)) in made.into_iter().enumerate() {
            if let Some(donated) = donated {
                buffers.push(donated);
                continue;
            }
            let name = format!("output {at} of \"{}\"", program.plan().name());
            let copied = self
                .memory
                .reserve(from.bytes, &name)
                .and_then(|to| self.memory.backend.copy(&from, &to).map(|()| to));
            match copied {
                Ok(to) => buffers.push(self.memory.buffers.add(to, name.into(), dtype, lengths)),
                Err(error) => {
                    for buffer in buffers {
                        self.free(buffer)?;
                    }
                    return Err(error);
                }
            }
        }
        buffers.try_into().map_err(|_| {
            Error::Internal("a program has another number of outputs than its type says".into())
        })
    }

    /// Gives a buffer's bytes back; every handle of it is invalid after that.
    pub fn free(&mut self, buffer: Buffer) -> Result<()> {
        let region = self.memory.buffers.remove(&buffer)?;
        self.memory.backend.release(region.arena);
        Ok(())
    }

    /// Copies the weights and statistics under one path to those of the same names under another,
    /// on the device: all of `online.…` to `target.…`, to update a target network for instance. A
    /// path is that of a [scope](crate::Scope), or the full name of one weight. Both models are
    /// declared in this session's parameters. Gives the number of tensors copied. Averages stay and
    /// remainders end, as by [`Session::set_value`].
    ///
    /// ```
    /// # use slabwise::{nn::Linear, prelude::*};
    /// let params = Params::seeded(0);
    /// for name in ["online", "target"] {
    ///     Linear::new(&params.root() / name / "head", 4, 2);
    /// }
    /// let mut session = Session::new(Device::Cpu, params)?;
    /// assert_eq!(session.copy_values("online", "target")?, 2);
    /// assert_eq!(session.value("online.head.weight")?, session.value("target.head.weight")?);
    /// # Ok::<(), slabwise::Error>(())
    /// ```
    ///
    /// # Errors
    /// If nothing has the first path, if one of its tensors has no counterpart of its shape and
    /// type under the second, or if one path lies in the other. Nothing is changed then.
    pub fn copy_values(&mut self, from: &str, to: &str) -> Result<usize> {
        self.adopt(&Graph::default())?;
        let below = |path: &str, name: &str| match name.strip_prefix(path) {
            _ if path.is_empty() => false,
            Some(rest) => rest.is_empty() || rest.starts_with('.'),
            None => false,
        };
        if below(from, to) || below(to, from) {
            return Err(Error::Value(format!(
                "copy_values from \"{from}\" to \"{to}\": one lies in the other"
            )));
        }
        let fail = |why: String| {
            Err(Error::Value(format!(
                "copy_values from \"{from}\" to \"{to}\", of which nothing was copied: {why}"
            )))
        };
        let mut pairs = Vec::new();
        for source in self
            .variables
            .list
            .iter()
            .filter(|v| v.info.is_param && below(from, &v.info.name))
        {
            let name = format!("{to}{}", &source.info.name[from.len()..]);
            let Some(&at) = self.variables.by_name.get(&*name) else {
                let params = self
                    .variables
                    .list
                    .iter()
                    .filter(|v| v.info.is_param)
                    .map(|v| &*v.info.name);
                return fail(format!(
                    "there is no \"{name}\"{}",
                    words::instead(&name, "weights", params)
                ));
            };
            let target = &self.variables.list[at];
            if (source.info.dtype, &source.info.dims) != (target.info.dtype, &target.info.dims) {
                let show = |v: &Variable| format!("{} {:?}", v.info.dtype, fixed(&v.info.dims));
                return fail(format!(
                    "\"{}\" is {} and \"{name}\" is {}",
                    source.info.name,
                    show(source),
                    show(target)
                ));
            }
            pairs.push((source.region, target.region));
        }
        if pairs.is_empty() {
            let mut paths: Vec<&str> = self
                .variables
                .list
                .iter()
                .filter_map(|v| v.info.name.split('.').next())
                .collect();
            paths.dedup();
            return fail(format!(
                "no weight has the path \"{from}\"{}",
                words::instead(from, "first parts of names", paths)
            ));
        }
        for (from, to) in &pairs {
            self.memory.backend.copy(from, to)?;
        }
        let backend = &mut *self.memory.backend;
        self.variables
            .restart_idle(|weight| below(to, weight), backend)?;
        Ok(pairs.len())
    }

    /// The elements of a buffer, row-major.
    pub fn download<T: Element>(&self, buffer: &Buffer) -> Result<ndarray::ArrayD<T>> {
        let region = self.memory.buffers.region(buffer)?;
        let output = Output {
            shown: Shown::new(&*self.memory.backend, region),
            dtype: buffer.dtype,
            lengths: buffer.lengths.clone(),
            buffer: None,
        };
        output.array()
    }

    /// The elements of a weight or state, by name, as f32.
    ///
    /// # Errors
    /// If nothing has the name, or f32 does not hold an element exactly: integers from 2²⁴ on are
    /// read by [`Session::value_as`].
    pub fn value(&self, name: &str) -> Result<ndarray::ArrayD<f32>> {
        let variable = self.variables.find(name)?;
        let lengths = variable.lengths();
        if variable.info.dtype == DType::I32 {
            let inexact = |&i: &i32| f64::from(i as f32) != f64::from(i);
            let exact = self.value_as::<i32>(name)?;
            if let Some((at, number)) = exact.iter().enumerate().find(|(_, i)| inexact(i)) {
                let value = number.to_string();
                return Err(Error::Value(format!(
                    "\"{name}\": {}; read it by value_as::<i32>",
                    Misfit { at, value }.of(DType::F32, &lengths)
                )));
            }
        }
        let values = variable.read_f32(&*self.memory.backend)?;
        ndarray::ArrayD::from_shape_vec(ndarray::IxDyn(&lengths), values)
            .map_err(|e| Error::Internal(e.to_string()))
    }

    /// The elements of a weight or state, by name, in its own type. Truth values are read as `u8`.
    ///
    /// ```
    /// # use slabwise::prelude::*;
    /// # let mut session = Session::new(Device::Cpu, Params::seeded(0))?;
    /// let trace = Trace::inference().sampling();
    /// let program = session.compile(&trace, [trace.uniform((2,))])?;
    /// let state = session.value_as::<i32>("sampling")?;
    /// let first = session.run(&program, ())?[0].array::<f32>()?;
    /// session.set_value("sampling", &state)?;
    /// assert_eq!(session.run(&program, ())?[0].array::<f32>()?, first);
    /// # Ok::<(), slabwise::Error>(())
    /// ```
    ///
    /// # Errors
    /// If nothing has the name, or it is of another type.
    pub fn value_as<T: Element>(&self, name: &str) -> Result<ndarray::ArrayD<T>> {
        let variable = self.variables.find(name)?;
        let output = Output {
            shown: Shown::new(&*self.memory.backend, variable.region),
            dtype: variable.info.dtype,
            lengths: Lengths::from_vec(variable.lengths()),
            buffer: None,
        };
        output.array()
    }

    /// Changes a weight or state between runs; nothing is recompiled. The array has the variable's
    /// shape, and its type, or that of a wider number; f32 is rounded to f16 and bf16, and truth
    /// values may be `u8`.
    ///
    /// The average that an optimizer keeps of a weight stays, so that a weight can be replaced for a
    /// while; set the state `ema.<name>` too to begin it anew. The average of a weight that no
    /// program trains becomes the new value. The remainder of a
    /// [master weight](crate::optim::Optimizer::master_weights) becomes 0, so that the next step
    /// starts from the new value.
    ///
    /// # Errors
    /// If nothing has the name, the array has another shape or type, or the variable's type cannot
    /// hold an element. The variable keeps its value then.
    pub fn set_value<T: ToBytes, S, D>(
        &mut self,
        name: &str,
        array: &ndarray::ArrayBase<S, D, T>,
    ) -> Result<()>
    where
        S: ndarray::Data<Elem = T>,
        D: ndarray::Dimension,
    {
        self.write_value(name, array)?;
        let backend = &mut *self.memory.backend;
        self.variables
            .restart_idle(|weight| weight == name, backend)
    }

    /// Writes the elements of a weight or state.
    fn write_value<T: ToBytes, S, D>(
        &mut self,
        name: &str,
        array: &ndarray::ArrayBase<S, D, T>,
    ) -> Result<()>
    where
        S: ndarray::Data<Elem = T>,
        D: ndarray::Dimension,
    {
        let variable = self.variables.find(name)?;
        let (expected, dtype) = (variable.lengths(), variable.info.dtype);
        if array.shape() != expected {
            return Err(Error::Value(format!(
                "\"{name}\" is {expected:?}, the array is {:?}",
                array.shape()
            )));
        }
        let refused = |misfit: Misfit, dtype| {
            Error::Value(format!("\"{name}\": {}", misfit.of(dtype, &expected)))
        };
        if let Some(misfit) = misfit(array.iter().copied()) {
            return Err(refused(misfit, T::STORED));
        }
        let mut bytes = vec![0; array.len() * T::STORED.bytes()];
        for (slot, &element) in bytes.chunks_exact_mut(T::STORED.bytes()).zip(array) {
            element.put(slot);
        }
        let backend = &mut *self.memory.backend;
        let truth = T::STORED == DType::U8 && dtype == DType::Bool;
        if truth && let Some(at) = bytes.iter().position(|&byte| byte > 1) {
            let value = bytes[at].to_string();
            return Err(refused(Misfit { at, value }, dtype));
        }
        if T::STORED == dtype || truth {
            return backend.map_write(&variable.region, &mut |memory, region| {
                memory.bytes_mut(region).copy_from_slice(&bytes);
            });
        }
        if T::STORED != DType::F32 {
            return Err(Error::Value(format!(
                "\"{name}\" is {dtype}, the array is {}; cast it first",
                T::STORED
            )));
        }
        let numbers = || {
            let each = bytes.as_chunks::<4>().0.iter();
            each.map(|&bytes| f32::from_ne_bytes(bytes))
        };
        if let Some((at, number)) = numbers().enumerate().find(|&(_, n)| !holds(dtype, n)) {
            let value = number.to_string();
            return Err(refused(Misfit { at, value }, dtype));
        }
        variable.write_f32(backend, numbers)
    }
}

/// Whether a type holds a number, rounded if it is a type of floats.
fn holds(dtype: DType, number: f32) -> bool {
    let range = match dtype {
        DType::F32 | DType::F16 | DType::BF16 => return true,
        DType::I32 => -2147483648.0..2147483648.0,
        DType::U8 => 0.0..256.0,
        DType::Bool => 0.0..2.0,
    };
    range.contains(&number) && number.fract() == 0.0
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Device, Params};

    #[test]
    fn a_freed_buffer_leaves_its_slot_to_the_next() {
        let mut session = Session::new(Device::Cpu, Params::seeded(0)).expect("a session");
        let array = ndarray::Array1::<f32>::zeros(4);
        let mut old = Vec::new();
        for _ in 0..100 {
            let (a, b) = (
                session.upload("a", &array).expect("room"),
                session.upload("b", &array).expect("room"),
            );
            old.extend([a.clone(), b.clone()]);
            session.free(a).expect("is alive");
            session.free(b).expect("is alive");
        }
        assert_eq!(session.memory.buffers.slots.len(), 2);
        let last = session.upload("last", &(array + 1.0)).expect("room");
        for buffer in &old {
            assert!(
                matches!(session.download::<f32>(buffer), Err(Error::Freed { .. })),
                "a handle of a freed buffer reads nothing"
            );
        }
        assert_eq!(session.download::<f32>(&last).expect("is alive").sum(), 4.0);
    }
}
