//! The values that [`Trace::debug`](crate::Trace::debug) shows.

use std::fmt;
use std::panic::Location;
use std::sync::Arc;

use slabwise_kernels::dtype::DType;
use slabwise_kernels::memory::Region;
use slabwise_kernels::size::Env;

use super::Session;
use crate::error::Result;
use crate::feed::Lengths;
use crate::program::{Compiled, lengths};
use crate::trace::{Debugged, SCALARS};

/// Statistics of a value in a run, as [`Trace::debug`](crate::Trace::debug) requests them.
///
/// `Display` gives a line of text.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct DebugValue {
    /// The name given to it.
    pub name: Arc<str>,
    /// The program.
    pub program: Arc<str>,
    /// The user's line that shows it.
    pub location: &'static Location<'static>,
    /// The path of its layer, such as `body.conv2`; empty outside of layers.
    pub layer: Arc<str>,
    /// The part of the step, from 0, in a step of
    /// [several](crate::Trace::minimize_in_parts).
    pub part: Option<usize>,
    /// The element type.
    pub dtype: DType,
    /// The lengths of the axes in this run.
    pub shape: Lengths,
    /// The least of the finite elements; NaN if there are none.
    pub min: f64,
    /// The largest of the finite elements; NaN if there are none.
    pub max: f64,
    /// The mean of the finite elements, to the precision of f32; NaN if there are none.
    pub mean: f64,
    /// The standard deviation of the finite elements, √(Σ(x − mean)²/n), to the precision of f32;
    /// NaN if there are none.
    pub std: f64,
    /// The number of elements that are NaN.
    pub nan: u64,
    /// The number of infinite elements.
    pub infinite: u64,
}

impl fmt::Display for DebugValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let DebugValue {
            name,
            dtype,
            shape,
            location,
            ..
        } = self;
        write!(f, "{name}")?;
        if let Some(part) = self.part {
            write!(f, " of part {part}")?;
        }
        write!(f, ": {dtype} {:?}", &shape[..])?;
        if shape.contains(&0) {
            write!(f, ", empty")?;
        } else if self.min.is_nan() {
            write!(f, ", no finite element")?;
        } else {
            let short = |value: f64| crate::data::short(value);
            let (min, max) = (short(self.min), short(self.max));
            let (mean, std) = (short(self.mean), short(self.std));
            write!(f, ", min {min}, max {max}, mean {mean}, std {std}")?;
        }
        for (count, kind) in [(self.nan, "NaN"), (self.infinite, "infinite")] {
            if count > 0 {
                write!(f, ", {count} {kind}")?;
            }
        }
        write!(f, " ({}:{}", location.file(), location.line())?;
        if !self.layer.is_empty() {
            write!(f, ", in \"{}\"", self.layer)?;
        }
        f.write_str(")")
    }
}

/// The receiver of shown values.
pub(crate) type Sink = Box<dyn FnMut(&DebugValue) + Send>;

impl Session {
    /// Hands the values that programs [show](crate::Trace::debug) to `sink` instead of printing
    /// them.
    ///
    /// ```
    /// # use std::sync::mpsc::channel;
    /// # use slabwise::prelude::*;
    /// let (sender, shown) = channel();
    /// let mut session = Session::new(Device::Cpu, Params::seeded(0))?
    ///     .with_debug(move |value| sender.send(value.clone()).unwrap_or(()));
    /// let trace = Trace::inference();
    /// let x = trace.input("x", F32, (3,));
    /// trace.debug("double", x * 2.0);
    /// let program = session.compile(&trace, [x.sum()])?;
    /// session.run(&program, &[1.0f32, 2.0, 3.0])?;
    /// assert_eq!(shown.recv().map(|double| double.max), Ok(6.0));
    /// # Ok::<(), slabwise::Error>(())
    /// ```
    #[must_use]
    pub fn with_debug(mut self, sink: impl FnMut(&DebugValue) + Send + 'static) -> Self {
        self.execution.sink = Some(Box::new(sink));
        self
    }

    /// Shows the values of a run that has ended. `region` gives the place of an output.
    pub(super) fn show(
        &mut self,
        (inner, shown): (&Compiled, &[Debugged]),
        env: &Env,
        region: impl Fn(usize) -> Region,
    ) -> Result<()> {
        let first = inner.outputs.len();
        let mut at = first - shown.iter().filter(|s| s.scalars.is_some()).count() * SCALARS;
        for value in shown {
            let mut scalars = [0.0; SCALARS];
            if value.scalars.is_some() {
                for (k, scalar) in scalars.iter_mut().enumerate() {
                    let part = region(inner.outputs[at + k]).part(0, 4);
                    // The first four are of the lane's type, the others i32.
                    let is_float = value.dtype.is_float() && k < 2 || k == 2 || k == 3;
                    let backend = &self.memory.backend;
                    *scalar = backend.map_read(&part, |memory, part| match is_float {
                        true => f64::from(memory.elements::<f32>(part)[0]),
                        false if k < 4 => f64::from(memory.elements::<i32>(part)[0]),
                        // Counts of up to 2³² − 1 elements.
                        false => f64::from(memory.elements::<i32>(part)[0] as u32),
                    })?;
                }
                at += SCALARS;
            }
            let shown = described(inner, value, scalars, env);
            match &mut self.execution.sink {
                Some(sink) => sink(&shown),
                None => eprintln!("{shown}"),
            }
        }
        Ok(())
    }
}

/// The statistics that scalars describe.
fn described(inner: &Compiled, value: &Debugged, scalars: [f64; SCALARS], env: &Env) -> DebugValue {
    let [min, max, sum, squares, finite, nan] = scalars;
    let shape = lengths(&value.dims, env);
    let count = shape.iter().product::<usize>() as u64;
    let (finite, nan) = (finite as u64, nan as u64);
    let known = |number: f64| if finite > 0 { number } else { f64::NAN };
    let scale = min.abs().max(max.abs()).max(f64::from(f32::MIN_POSITIVE));
    DebugValue {
        name: value.name.clone(),
        program: inner.name.clone(),
        location: value.location,
        layer: value.layer.clone(),
        part: value.part,
        dtype: value.dtype,
        shape,
        min: known(min),
        max: known(max),
        mean: known(sum / finite as f64 * scale),
        std: known((squares / finite as f64).sqrt() * scale),
        nan,
        infinite: count.saturating_sub(finite).saturating_sub(nan),
    }
}
