//! Tensors of a trace: symbolic values, computed when the program runs.
//!
//! Methods are grouped by kind in the files below. Every method records a mistake instead of
//! failing: see [`trace`](crate::trace).

mod activation;
mod arrange;
mod assign;
mod attention;
mod conv;
mod custom;
mod dropout;
mod einsum;
mod elementwise;
mod functions;
mod index;
mod join;
mod loss;
mod metrics;
mod norm;
mod order;
mod padding;
mod pool;
mod position;
mod product;
mod quantized;
mod ranks;
mod reduce;
mod resize;
mod sample;
mod scatter;
mod select;
mod statistics;
#[cfg(test)]
pub(crate) mod tests;
mod unfold;
mod view;
mod window;

use std::panic::Location;

use slabwise_kernels::dtype::DType;
use slabwise_kernels::scalar::ScalarOp;
use slabwise_kernels::size::Size;
use slabwise_kernels::spec::Dims;

use crate::graph::Graph;
use crate::ops::{Checked, GraphBuilder, NodeId, Op, TensorType, infer};
use crate::trace::Line;

pub use crate::trace::axes::{AxisIndex, AxisSet};
pub(crate) use crate::trace::handle::POISON;
pub use crate::trace::handle::Tensor;
pub use crate::trace::operand::Operand;
pub(crate) use crate::trace::operand::{Lift, number};
pub use attention::{AttentionOptions, Mask, Tiles};
pub use loss::{CrossEntropy, Ctc, Reduction};
pub use order::Running;
pub use padding::PadMode;
pub use position::{Rope, RopeLayout, RopeScaling};
pub use resize::{Coordinates, Interpolate, Interpolation, Resize, ResizeAxis, Rounding};
pub use sample::{Beyond, Sampling};
pub use scatter::Scatter;
pub use window::{ConvOptions, Padding, PerAxis, PoolOptions};

impl<'t> Tensor<'t> {
    /// The result of a segment of a model whose interior values the backward pass recomputes: no
    /// value between this tensor and the segment's result stays live from the forward to the
    /// backward pass, at the price of computing it twice. Results are bit-identical. Random numbers
    /// are the same on recomputation; assignments of state happen once. Values that leave the
    /// segment in another way, through a captured variable or as an output, are kept; a nested
    /// segment is part of the outer one.
    ///
    /// Gradient checkpointing: Chen et al., "Training Deep Nets with Sublinear Memory Cost" (2016).
    ///
    /// ```
    /// # use slabwise::prelude::*;
    /// # let trace = Trace::training();
    /// # let x = trace.input("x", F32, (2, 3));
    /// let y = x.checkpoint(|x| x.exp().tanh());
    /// ```
    pub fn checkpoint(self, segment: impl FnOnce(Tensor<'t>) -> Tensor<'t>) -> Tensor<'t> {
        self.trace.segment(|| segment(self))
    }

    /// This tensor, excluded from recomputation: it is live from its computation until its last
    /// use; neither a budget nor a checkpointed segment recomputes it, nor does the backward pass
    /// where recomputing would be cheap. Use it for a value that costs more than its operations
    /// indicate.
    ///
    /// ```
    /// # use slabwise::prelude::*;
    /// # let trace = Trace::training();
    /// # let x = trace.input("x", F32, (2, 3));
    /// let y = x.exp().keep().tanh();
    /// ```
    pub fn keep(self) -> Tensor<'t> {
        if !self.is_poisoned() {
            self.trace.keep(self.id);
        }
        self
    }

    /// This tensor, checked to be finite: a run in which an element is NaN or infinite fails before
    /// it has changed any weight or state, and the error names this line. Without the check a NaN
    /// loss makes every weight that it depends on NaN, as in other frameworks. It costs one kernel
    /// over the tensor, negligible for a loss.
    ///
    /// ```
    /// # use slabwise::prelude::*;
    /// # use slabwise::optim::Sgd;
    /// # let params = Params::seeded(0);
    /// let w = params.root().param("w", (), Init::Constant(-1.0));
    /// let trace = Trace::training();
    /// let loss = trace.param(&w).ln().require_finite();
    /// trace.minimize(loss, Sgd::new(0.1));
    /// # let mut session = Session::new(Device::Cpu, params.clone())?;
    /// let step = session.compile(&trace, [loss])?;
    /// assert!(session.run(&step, ()).is_err());
    /// assert_eq!(session.value("w")?.sum(), -1.0);
    /// # Ok::<(), slabwise::Error>(())
    /// ```
    #[track_caller]
    pub fn require_finite(self) -> Tensor<'t> {
        self.trace.record(Location::caller(), &[self], |g, ids| {
            let (x, dims) = (ids[0], g.dims(ids[0]).clone());
            if !g.dtype(x).is_float() {
                return Err(format!(
                    "require_finite of {}: every value of this type is finite",
                    g.dtype(x)
                ));
            }
            // (|x| ≤ ∞) − (|x| < ∞) is 1 for infinite values, and |x| ≤ ∞ is false for NaN alone.
            let x = g.cast(x, DType::F32);
            let size = g.scalar(ScalarOp::Abs, &[x]);
            let infinity = g.full(f32::INFINITY, DType::F32, &dims);
            let [number, finite] = [ScalarOp::Le, ScalarOp::Lt].map(|op| {
                let holds = g.scalar(op, &[size, infinity]);
                g.cast(holds, DType::I32)
            });
            let infinite = g.scalar(ScalarOp::Sub, &[number, finite]);
            let twice = g.add(infinite, infinite);
            let one = g.full(1.0, DType::I32, &dims);
            let nan = g.scalar(ScalarOp::Sub, &[one, number]);
            let code = g.add(twice, nan);
            g.emit(
                Op::BoundsCheck {
                    limit: Size::ONE,
                    of: Checked::Finite,
                },
                &[code],
                DType::I32,
                dims,
            );
            Ok(ids[0])
        })
    }

    /// Records a mistake in the use of this tensor, and gives a tensor that stands for the result of
    /// the mistaken call. [`Session::compile`](crate::Session::compile) returns the mistake, with
    /// the caller's line. Of a tensor that stands for such a result, nothing is recorded.
    ///
    /// ```
    /// # use slabwise::prelude::*;
    /// /// The first half of each row.
    /// #[track_caller]
    /// fn first_half(x: Tensor<'_>) -> Tensor<'_> {
    ///     match x.len(1) {
    ///         Some(n) if n % 2 == 0 => x.slice(1, ..n / 2),
    ///         _ => x.mistake(format!("first_half of {x:?}: an even length is needed")),
    ///     }
    /// }
    /// # let trace = Trace::inference();
    /// # first_half(trace.input("x", F32, (2, 3)));
    /// # assert_eq!(trace.mistakes()[0].message, "first_half of f32 [2, 3]: an even length is needed");
    /// ```
    #[track_caller]
    pub fn mistake(self, message: String) -> Tensor<'t> {
        self.require(Location::caller(), |_, _| Err(message))
    }

    /// This tensor if `check` finds no mistake.
    fn require(
        self,
        at: Line,
        check: impl FnOnce(&Graph, NodeId) -> Result<(), String>,
    ) -> Tensor<'t> {
        self.trace
            .record(at, &[self], |g, ids| check(g, ids[0]).map(|()| ids[0]))
    }

    /// This tensor if it is f32 and has the axis; `what` is the operation that needs it.
    fn require_float_axis(self, at: Line, what: &str, axis: usize) -> Tensor<'t> {
        self.require(at, |g, x| {
            if axis >= g.dims(x).len() {
                return Err(no_axis(g, what, axis, x));
            }
            if g.dtype(x) != DType::F32 {
                return Err(format!(
                    "{what} does not take {}; convert with cast",
                    g.dtype(x)
                ));
            }
            Ok(())
        })
    }
}

/// Adds a node and applies its shape rule; for operations whose shape follows from their operands.
fn checked(g: &mut Graph, op: Op, inputs: &[NodeId]) -> Result<NodeId, String> {
    checked_as(g, op, inputs, DType::F32, &Dims::new())
}

/// Adds a node and checks its shape rule; for operations whose type or shape is part of the node.
fn checked_as(
    g: &mut Graph,
    op: Op,
    inputs: &[NodeId],
    dtype: DType,
    dims: &Dims,
) -> Result<NodeId, String> {
    let given: Vec<TensorType<'_>> = inputs
        .iter()
        .map(|&i| TensorType {
            dtype: g.dtype(i),
            dims: g.dims(i),
        })
        .collect();
    let (dtype, dims) = infer(&op, &given, (dtype, dims), &g.symbols)?;
    Ok(g.emit(op, inputs, dtype, dims))
}

/// The message for an axis that does not exist.
fn no_axis(g: &Graph, what: &str, axis: usize, x: NodeId) -> String {
    let axis = axis.cast_signed();
    format!("{what}: {} has no axis {axis}", g.symbols.show(g.dims(x)))
}

/// Fails the run if an element of `index` lies outside `0..limit`.
fn check_index(g: &mut Graph, index: NodeId, limit: Size) {
    let (dtype, dims) = (g.dtype(index), g.dims(index).clone());
    g.emit(
        Op::BoundsCheck {
            limit,
            of: Checked::Index,
        },
        &[index],
        dtype,
        dims,
    );
}
