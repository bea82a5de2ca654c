//! The search for the first kernel whose result is not finite.

use std::fmt;

use half::{bf16, f16};
use slabwise_kernels::dtype::DType;
use slabwise_kernels::memory::Region;
use slabwise_kernels::size::Env;
use slabwise_kernels::spec::{Access, Dims, Operand};

use super::{Run, Session, fixed};
use crate::backend::Kernel;
use crate::error::{Error, Mistake, Result};
use crate::feed::Lengths;
use crate::program::{Compiled, Place, Step, lengths};
use crate::settings::NanCheck;

/// The state of the search in a run.
pub(super) struct Search {
    check: NanCheck,
    /// The variables that the run has written, by index, with their bytes before it.
    before: Vec<(usize, Vec<u8>)>,
    /// The step and the error of a run that goes on to its end, because other ranks wait for its
    /// exchanges.
    found: Option<(usize, Error)>,
}

/// The elements of an argument that are not finite.
#[derive(Default)]
struct Found {
    nan: u64,
    infinite: u64,
    /// The first, by its place in the argument's region.
    first: Option<(usize, f32)>,
}

impl fmt::Display for Found {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.nan, self.infinite) {
            (nan, 0) => write!(f, "{nan} NaN"),
            (0, infinite) => write!(f, "{infinite} infinite"),
            (nan, infinite) => write!(f, "{nan} NaN and {infinite} infinite"),
        }
    }
}

impl Session {
    /// Stops a run at the first kernel, in the order in which they run, with a result that is NaN
    /// or, with [`NanCheck::NanAndInfinite`], infinite. The error names the kernel, the user's line
    /// and layer, the element, and which operands of the kernel were not finite already. Weights
    /// and state are then as before the run. The default is `SLABWISE_CHECK_NAN`.
    ///
    /// Only elements that a kernel has stored are examined, so that workspaces, padding and
    /// partial sums raise no false alarm. A fused kernel is named by its layer and main operation;
    /// to search inside of it, compile with [`Fuse::none`](crate::Fuse::none), after which each
    /// operation is a kernel. The search copies every result to the host and makes runs several
    /// times slower; a CUDA device then launches kernels one by one.
    ///
    /// ```
    /// # use slabwise::prelude::*;
    /// use slabwise::settings::NanCheck;
    ///
    /// let mut session =
    ///     Session::new(Device::Cpu, Params::seeded(0))?.with_nan_check(NanCheck::Nan);
    /// let trace = Trace::inference();
    /// let x = trace.input("x", F32, (2,));
    /// let program = session.compile(&trace, [x.ln().sum()])?;
    /// let error = session.run(&program, &[1.0f32, -1.0]).err();
    /// assert!(error.is_some_and(|e| e.to_string().contains("is NaN")));
    /// # Ok::<(), slabwise::Error>(())
    /// ```
    #[must_use]
    pub fn with_nan_check(mut self, check: NanCheck) -> Self {
        self.execution.nan_check = check;
        self
    }

    /// The state of the search at the start of a run; `None` if there is none.
    pub(super) fn begin_search(&self) -> Option<Search> {
        (self.execution.nan_check != NanCheck::Off).then(|| Search {
            check: self.execution.nan_check,
            before: Vec::new(),
            found: None,
        })
    }

    /// Writes the variables back that the run has changed.
    fn restore(&mut self, search: &Search) -> Result<()> {
        for (variable, bytes) in &search.before {
            let region = self.variables.list[*variable].region;
            self.memory
                .backend
                .map_write(&region, &mut |memory, region| {
                    memory.bytes_mut(region).copy_from_slice(bytes)
                })?;
        }
        Ok(())
    }
}

impl Search {
    /// Before a step: keeps the variables that it writes.
    pub fn before(&mut self, session: &Session, step: &Step) -> Result<()> {
        let Some(kernel) = step.kernel() else {
            return Ok(());
        };
        let accesses = kernel.spec().accesses();
        for (place, access) in step.places.iter().zip(&accesses) {
            let Place::Variable(variable) = *place else {
                continue;
            };
            if *access == Access::Read || self.before.iter().any(|(v, _)| *v == variable) {
                continue;
            }
            let region = session.variables.list[variable].region;
            let backend = &session.memory.backend;
            let bytes =
                backend.map_read(&region, |memory, region| memory.bytes(region).to_vec())?;
            self.before.push((variable, bytes));
        }
        Ok(())
    }

    /// After a step: looks at its results. An error restores weights and state; it waits for the end
    /// of the run if the ranks have synchronized in it.
    pub fn after(
        &mut self,
        session: &mut Session,
        run: &Run<'_>,
        at: usize,
        arguments: &[Region],
        env: &Env,
    ) -> Result<()> {
        let inner = run.inner;
        let step = &inner.steps[at];
        let Some(kernel) = step.kernel().filter(|_| self.found.is_none()) else {
            return Ok(());
        };
        let described = kernel.spec().arguments();
        for (k, (operand, space, access)) in described.iter().enumerate() {
            if *access == Access::Read || !operand.dtype.is_float() {
                continue;
            }
            let Some(sizes) = sizes(step, kernel, k, env) else {
                continue;
            };
            let found = self.look(session, &arguments[k], operand, space, &sizes)?;
            let Some((element, value)) = found.first else {
                continue;
            };
            let error = self.error(
                session,
                run,
                (at, k),
                arguments,
                env,
                (element, value, found),
            );
            if session.synchronized_as(inner).is_some() {
                self.found = Some((at, error?));
                return Ok(());
            }
            session.restore(self)?;
            return Err(error?);
        }
        Ok(())
    }

    /// At the end of a run: an error of one rank restores weights and state on all.
    pub fn end(mut self, session: &mut Session, inner: &Compiled) -> Result<()> {
        let ended = session.end_with_ranks(inner, self.found.take());
        if ended.is_err() {
            session.restore(&self)?;
        }
        ended
    }

    /// The error of an element in the result that is the argument `k` of a step.
    fn error(
        &self,
        session: &Session,
        run: &Run<'_>,
        (at, k): (usize, usize),
        arguments: &[Region],
        env: &Env,
        (element, value, found): (usize, f32, Found),
    ) -> Result<Error> {
        let inner = run.inner;
        let step = &inner.steps[at];
        let (name, shape, stored, whole, origin, dtype) = match step.places[k] {
            Place::Planned(b) | Place::MicroBatch(b, _) => {
                let buffer = &inner.buffers[b];
                let [shape, stored] = [&buffer.dims, &buffer.stored].map(|dims| lengths(dims, env));
                let name = inner.plan.dag().buffers[b].name.clone();
                let whole = session.region_of(run, b)?;
                let origin = buffer.origin.as_ref();
                (name, shape, stored, whole, origin, buffer.dtype)
            }
            Place::Variable(v) => {
                let info = &session.variables.list[v].info;
                let shape: Lengths = fixed(&info.dims).into_iter().map(|n| n as usize).collect();
                let name = info.name.to_string();
                (name, shape.clone(), shape, arguments[k], None, info.dtype)
            }
            Place::Sizes => return Err(Error::Internal("a kernel writes sizes".into())),
        };
        let before = (arguments[k].offset - whole.offset) as usize / dtype.bytes();
        let index = position(before + element, &stored);
        let slice = step.slice.map_or(String::new(), |slice| {
            format!(" on examples {} to {}", slice.from, slice.to - 1)
        });
        let message = format!(
            "kernel {} of {}, \"{}\"{slice}: element {index:?} of \"{name}\", {dtype} {:?}, is {value}, the first of {found}; {}",
            at + 1,
            inner.steps.len(),
            step.name,
            &shape[..],
            self.operands(session, run, at, arguments, env)?
        );
        let origin = origin.unwrap_or(&step.origin);
        Ok(Error::NotFinite {
            kernel: step.name.clone(),
            mistake: Mistake {
                location: origin.location,
                layer: origin.layer.to_string(),
                message,
            },
        })
    }

    /// Which operands of a step were not finite before it, as text.
    fn operands(
        &self,
        session: &Session,
        run: &Run<'_>,
        at: usize,
        arguments: &[Region],
        env: &Env,
    ) -> Result<String> {
        let step = &run.inner.steps[at];
        let Some(kernel) = step.kernel() else {
            return Ok(String::new());
        };
        let described = kernel.spec().arguments();
        let written: Vec<&Region> = (described.iter().zip(arguments))
            .filter(|((.., access), _)| *access != Access::Read)
            .map(|(_, region)| region)
            .collect();
        let (mut bad, mut unknown) = (Vec::new(), false);
        for (k, (operand, space, access)) in described.iter().enumerate() {
            if !operand.dtype.is_float() || *access == Access::Write {
                continue;
            }
            let name = match step.places[k] {
                Place::Planned(b) | Place::MicroBatch(b, _) => {
                    run.inner.plan.dag().buffers[b].name.clone()
                }
                Place::Variable(v) => session.variables.list[v].info.name.to_string(),
                Place::Sizes => continue,
            };
            // Its bytes are the result's by now.
            if written.iter().any(|region| region.overlaps(&arguments[k])) {
                unknown = true;
                continue;
            }
            let Some(sizes) = sizes(step, kernel, k, env) else {
                continue;
            };
            let found = self.look(session, &arguments[k], operand, space, &sizes)?;
            if found.first.is_some() {
                bad.push(format!("its operand \"{name}\" has {found} already"));
            }
        }
        Ok(match (bad.is_empty(), unknown) {
            (false, _) => bad.join(", "),
            (true, false) => "its operands are finite".into(),
            (true, true) => "its operands are finite, but for those it has overwritten".into(),
        })
    }

    /// Looks at the elements of an argument.
    fn look(
        &self,
        session: &Session,
        region: &Region,
        operand: &Operand,
        space: &Dims,
        sizes: &Env,
    ) -> Result<Found> {
        let lengths: Vec<usize> = space.iter().map(|d| d.usize_at(sizes)).collect();
        if lengths.contains(&0) {
            return Ok(Found::default());
        }
        let strides: Vec<i64> = operand.strides.iter().map(|s| s.at(sizes)).collect();
        let offset = operand.offset.at(sizes);
        let backend = &session.memory.backend;
        backend.map_read(region, |memory, region| {
            let mut found = Found::default();
            let (bytes, each) = (memory.bytes(region), operand.dtype.bytes());
            let read = |at: i64| {
                let at = usize::try_from(at).ok()?;
                let element = bytes.get(at.checked_mul(each)?..)?.get(..each)?;
                Some((at, number(operand.dtype, element)))
            };
            let mut index = vec![0usize; lengths.len()];
            loop {
                let steps = index.iter().zip(&strides);
                let at = offset + steps.map(|(&i, s)| i as i64 * s).sum::<i64>();
                if let Some((at, value)) = read(at).filter(|(_, value)| self.counts(*value)) {
                    match value.is_nan() {
                        true => found.nan += 1,
                        false => found.infinite += 1,
                    }
                    found.first.get_or_insert((at, value));
                }
                let Some(axis) = (0..index.len()).rev().find(|&a| index[a] + 1 < lengths[a]) else {
                    return found;
                };
                index[axis] += 1;
                index[axis + 1..].fill(0);
            }
        })
    }

    fn counts(&self, value: f32) -> bool {
        value.is_nan() || self.check == NanCheck::NanAndInfinite && value.is_infinite()
    }
}

/// The sizes under which a step accesses its argument `k`; `None` if it does not, because it stores
/// sums over micro-batches at the last of them.
fn sizes(step: &Step, kernel: &Kernel, k: usize, env: &Env) -> Option<Env> {
    let Some(slice) = step.slice else {
        return Some(*env);
    };
    let split = kernel.micro_batching()?;
    let of_all = split.steps.get(k).copied().flatten().is_none();
    (!(split.folds && of_all) || slice.last).then(|| slice.sizes(env, split.batch))
}

/// The position of an element in row-major order.
fn position(mut at: usize, shape: &[usize]) -> Vec<usize> {
    let mut index: Vec<usize> = vec![0; shape.len()];
    for (position, &length) in index.iter_mut().zip(shape).rev() {
        *position = at % length.max(1);
        at /= length.max(1);
    }
    index
}

/// The value of a float's bytes.
fn number(dtype: DType, bytes: &[u8]) -> f32 {
    match (dtype, bytes) {
        (DType::F32, &[a, b, c, d]) => f32::from_ne_bytes([a, b, c, d]),
        (DType::F16, &[a, b]) => f16::from_ne_bytes([a, b]).to_f32(),
        (DType::BF16, &[a, b]) => bf16::from_ne_bytes([a, b]).to_f32(),
        _ => 0.0,
    }
}
