//! Values that a program shows while it runs.

use std::panic::Location;
use std::sync::Arc;

use slabwise_kernels::dtype::DType;
use slabwise_kernels::scalar::ScalarOp;
use slabwise_kernels::spec::{Dims, ReduceOp};

use super::handle::Tensor;
use super::{Line, Trace};
use crate::graph::Graph;
use crate::ops::{Axes, GraphBuilder, NodeId};
use crate::shape::elements;

/// The number of scalars that a program computes for a shown value.
pub(crate) const SCALARS: usize = 6;

/// A value that a program shows: its description, and the scalars that are computed of it.
#[derive(Clone, Debug)]
pub(crate) struct Debugged {
    pub name: Arc<str>,
    pub location: Line,
    pub layer: Arc<str>,
    /// The part of a step in parts.
    pub part: Option<usize>,
    pub dtype: DType,
    pub dims: Dims,
    /// The smallest and largest finite element (f32 or i32), the sum of the finite elements and of
    /// the squares of their deviations, both relative to the largest absolute value (f32), the
    /// number of finite elements and of NaN (i32). None if it has no elements at all.
    pub scalars: Option<[NodeId; SCALARS]>,
}

impl Trace {
    /// Shows statistics of a value in every run: shape, type, least and largest element, mean,
    /// standard deviation, and how many elements are NaN or infinite. They are printed to standard
    /// error when the run ends, or go to the sink that the session
    /// [has](crate::Session::with_debug), in the order of these calls.
    ///
    /// The statistics are computed by kernels of the program and describe the whole value: with any
    /// number of threads, on any device, under a budget, in recomputed segments and where a budget
    /// splits the batch. In [`Trace::minimize_in_parts`] each part shows its own, with its number.
    /// A value that would otherwise exist only in the registers of a fused kernel may have to be
    /// stored. On a CUDA device the host waits for the run. A run that fails shows nothing. No
    /// gradient flows through it, and results do not change.
    ///
    /// ```
    /// # use slabwise::prelude::*;
    /// # let mut session = Session::new(Device::Cpu, Params::seeded(0))?;
    /// let trace = Trace::inference();
    /// let x = trace.input("x", F32, (4,));
    /// let y = x.ln();
    /// trace.debug("y", y);
    /// let program = session.compile(&trace, [y.exp()])?;
    /// // y: f32 [4], min 0, max 1.3863, mean 0.69315, std 0.69315, 1 NaN, 1 infinite (…, line 5)
    /// session.run(&program, &[1.0f32, 4.0, 0.0, -1.0])?;
    /// # Ok::<(), slabwise::Error>(())
    /// ```
    #[track_caller]
    pub fn debug<'t>(&'t self, name: &str, x: Tensor<'t>) {
        let at = Location::caller();
        let mut shown = None;
        self.record(at, &[x], |g, ids| {
            let dims = g.dims(ids[0]).clone();
            shown = Some((g.dtype(ids[0]), dims, statistics(g, ids[0])?));
            Ok(ids[0])
        });
        let Some((dtype, dims, scalars)) = shown else {
            return;
        };
        let building = &mut *self.building.borrow_mut();
        let location = building.user_line(at);
        let layer = building.graph.origin(x.id).layer.clone();
        building.debugged.push(Debugged {
            name: name.into(),
            location,
            layer,
            part: building.parts.last().copied().flatten(),
            dtype,
            dims,
            scalars,
        });
    }

    /// The values that the program shows.
    pub(crate) fn debugged(&self) -> Vec<Debugged> {
        self.building.borrow().debugged.clone()
    }
}

/// Emits the scalars that statistics are computed of; none for a value that is always empty.
fn statistics(g: &mut Graph, x: NodeId) -> Result<Option<[NodeId; SCALARS]>, String> {
    let count = elements(g.dims(x)).ok_or("debug: too many bounded lengths are multiplied")?;
    if count.is(0) {
        return Ok(None);
    }
    let is_float = g.dtype(x).is_float();
    let x = g.cast(x, if is_float { DType::F32 } else { DType::I32 });
    let dims = g.dims(x).clone();
    let axes: Axes = (0..dims.len()).collect();
    let all = |g: &mut Graph, op, x| {
        // A scalar is reduced as well, so that it is no view of a value that lives on.
        let (x, axes) = match axes.is_empty() {
            true => (g.reshape(x, &Dims::from_slice(&[1.into()])), &[0][..]),
            false => (x, &axes[..]),
        };
        let reduced = g.reduce(op, x, axes);
        g.reshape(reduced, &Dims::new())
    };
    let zero = g.full(0.0, DType::F32, &dims);
    let (finite, nan, [low, high]) = if is_float {
        let size = g.scalar(ScalarOp::Abs, &[x]);
        let infinity = g.full(f32::INFINITY, DType::F32, &dims);
        let finite = g.scalar(ScalarOp::Lt, &[size, infinity]);
        let nan = g.scalar(ScalarOp::Ne, &[x, x]);
        let nan = g.cast(nan, DType::I32);
        let ends = [f32::INFINITY, f32::NEG_INFINITY].map(|other| {
            let other = g.full(other, DType::F32, &dims);
            g.scalar(ScalarOp::Select, &[finite, x, other])
        });
        (Some(finite), nan, ends)
    } else {
        (None, g.full(0.0, DType::I32, &dims), [x, x])
    };
    let (low, high) = (all(g, ReduceOp::Min, low), all(g, ReduceOp::Max, high));
    let ones = match finite {
        Some(finite) => g.cast(finite, DType::I32),
        None => g.full(1.0, DType::I32, &dims),
    };
    let (number, nan) = (all(g, ReduceOp::Sum, ones), all(g, ReduceOp::Sum, nan));
    // Relative to the largest absolute value neither a sum nor a square overflows.
    let [least, largest] = [low, high].map(|end| {
        let end = g.cast(end, DType::F32);
        g.scalar(ScalarOp::Abs, &[end])
    });
    let tiny = g.constant(f32::MIN_POSITIVE, DType::F32);
    let scale = g.scalar(ScalarOp::Max, &[least, largest]);
    let scale = g.scalar(ScalarOp::Max, &[scale, tiny]);
    let one = g.constant(1.0, DType::F32);
    let divisor = g.cast(number, DType::F32);
    let divisor = g.scalar(ScalarOp::Max, &[divisor, one]);
    let value = g.cast(x, DType::F32);
    let value = match finite {
        Some(finite) => g.scalar(ScalarOp::Select, &[finite, value, zero]),
        None => value,
    };
    let scale = g.broadcast(scale, &dims);
    let relative = g.scalar(ScalarOp::Div, &[value, scale]);
    let sum = all(g, ReduceOp::Sum, relative);
    let mean = g.scalar(ScalarOp::Div, &[sum, divisor]);
    let mean = g.broadcast(mean, &dims);
    let deviation = g.scalar(ScalarOp::Sub, &[relative, mean]);
    let square = g.mul(deviation, deviation);
    let square = match finite {
        Some(finite) => g.scalar(ScalarOp::Select, &[finite, square, zero]),
        None => square,
    };
    let squares = all(g, ReduceOp::Sum, square);
    Ok(Some([low, high, sum, squares, number, nan]))
}
