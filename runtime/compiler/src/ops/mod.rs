//! The operations of the graph and their rules.
//!
//! The elementwise operations are in one table, `slabwise_kernels::scalar`. Every other operation
//! is *structural* and has a file here with its shape rule and its gradient. Operations that are
//! functions of others (softmax, gelu, cross entropy) are not here: they are methods of `Tensor`.
//!
//! Rules are written against [`GraphBuilder`], which the graph implements, so that operations do not depend
//! on the graph.

mod assign;
mod attention;
mod builder;
mod collective;
mod conv;
mod custom;
mod index;
mod matmul;
mod pool;
mod prefix_reduce;
mod quantized;
mod reduce;
mod rules;
mod scalar;
mod select;
mod view;

use slabwise_kernels::collective::Group;
use slabwise_kernels::custom::CustomKernel;
use slabwise_kernels::dtype::DType;
use slabwise_kernels::scalar::{ScalarOp, Value};
use slabwise_kernels::size::{Size, Symbol};
use slabwise_kernels::spec::{
    CollectiveOp, Dims, PoolKind, PrefixOp, Quantization, ReduceOp, Scores, Window,
};
use smallvec::SmallVec;

pub(crate) use attention::{Operands, attention_of_parts, gradients_of_parts, join, split_last};
pub use attention::{attention, rows_last, visible};
pub use builder::{GraphBuilder, NodeId};
pub use conv::{ConvGeometry, convolved, transposed as transposed_conv};
pub use matmul::floats;
pub(crate) use quantized::dequantized;
pub use rules::{Gradients, Rule, TensorType, gradient, infer};

/// Axis numbers, or one small number per axis.
pub type Axes = SmallVec<[usize; 6]>;

/// The meaning of a tensor whose elements are checked to lie in a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Checked {
    /// Indices.
    Index,
    /// Whether elements of another tensor are finite: 0 if one is, 1 if it is NaN, 2 if it is
    /// infinite.
    Finite,
}

/// The operation of a node. A node makes exactly one value.
#[derive(Clone, Debug, PartialEq)]
pub enum Op {
    /// The program's input of this index.
    Input(u32),
    /// The value of a variable (weight or state) when the step began.
    Variable(u32),
    /// One number, of shape `[]`.
    Const(Value),
    /// A size in this run (i32, of shape `[]`), such as the divisor of a mean over a bounded axis.
    Size(Size),
    /// The integer `Σ coordinateᵢ · strideᵢ`; its shape is part of the node.
    Index(Dims),
    /// Uniform in [0, 1), keyed by the random state (operand 0: i32 `[3]`), by `stream` and by an
    /// index (operand 1: i32).
    Uniform {
        /// Which random operation of the trace this is.
        stream: u32,
    },
    /// An elementwise operation; operands have the shape of the result.
    Scalar(ScalarOp),
    /// Conversion to another type.
    Cast(DType),
    /// The same values in a separate, contiguous buffer.
    Copy,
    /// Reduces along axes, which stay with length 1.
    Reduce(ReduceOp, Axes),
    /// `[batch…, m, k] × [batch…, k, n] → [batch…, m, n]`.
    Matmul,
    /// Packed numbers `[n, bytes]` (u8), scales `[n, blocks]` and, if there are any, zero points,
    /// `[n, blocks]` or packed as well → the weights that they stand for, `[n, k]`.
    Dequantize(Quantization),
    /// `[m, k]` and the operands of [`Op::Dequantize`] → the product with its transposed result,
    /// `[m, n]`. No trace has it: [`Expand`](crate::passes::Expand) makes it where a device has a
    /// kernel for it.
    QuantizedMatmul(Quantization),
    /// Image `[n, ci, h, w]`, weight `[co, ci/groups, kh, kw]` → `[n, co, oh, ow]`; the padding after
    /// the last row and column follows from oh and ow.
    Conv2d(ConvGeometry),
    /// Gradient of the result, weight → gradient of the image, whose shape is part of the node.
    Conv2dInputGrad(ConvGeometry),
    /// Image, gradient of the result → gradient of the weight, whose shape is part of the node.
    Conv2dWeightGrad(ConvGeometry),
    /// `[n, c, h, w] → [n, c, oh, ow]`; how far windows reach past the image follows from oh and ow.
    Pool2d(PoolKind, Window),
    /// Gradient of the result (and, for `Max`, the positions of `Pool2d(ArgMax)`) → gradient of the
    /// image.
    Pool2dGrad(PoolKind, Window),
    /// Operands source and index; index and result have one shape, that of the source but along the
    /// axis.
    Gather {
        /// The axis along which the index chooses.
        axis: usize,
    },
    /// Operands value and index of one shape → a tensor that holds at each place the reduction of
    /// the values whose index names it, of none where there are none (0, 1, the lowest or the
    /// highest number); the shape is part of the node.
    Scatter {
        /// The axis along which the index chooses.
        axis: usize,
        /// A sum, product, maximum or minimum.
        reduce: ReduceOp,
    },
    /// Operands base and value → the base with a part replaced:
    /// `result[start + c · step] = value[c]`, where a third operand (i32, of the value's shape or
    /// of length 1 along any axis) is added along one axis.
    SliceAssign {
        /// The first place, per axis.
        start: Dims,
        /// Distance between places, per axis; at least 1.
        step: SmallVec<[u32; 6]>,
        /// The axis along which a third operand moves the part.
        axis: Option<usize>,
    },
    /// A prefix reduction: for each element along the last axis a result from those up to it.
    PrefixReduce {
        /// The reduction; a linear recurrence takes its factors as a second operand.
        op: PrefixOp,
        /// From the elements before it only.
        exclusive: bool,
        /// From the last to the first.
        reverse: bool,
    },
    /// Attention of queries `[b, …, q, width]` to keys `[b, …, k, width]` and values `[b, …, k,
    /// columns]`, by the terms or truth values of a mask `[b, …, q, k]`, and with a past `[b, …]`,
    /// if there are any → `[b, q, …, columns]`.
    Attention(Scores),
    /// The operands of [`Op::Attention`], with values as wide as keys, its result and the gradient
    /// of that → the gradients `[b, q + 2k, …, width]`: rows of queries, of keys, and of values.
    AttentionGrad {
        /// As of the attention.
        scores: Scores,
        /// A row of a query, one of a key and one of a value take turns; there are as many keys as
        /// queries. The gradients of one row of a joint projection of all three are then side by
        /// side.
        in_turns: bool,
    },
    /// The same elements in the same order under another shape.
    Reshape,
    /// Axis i of the result is axis `p[i]` of the operand.
    Permute(Axes),
    /// Axes of length 1 repeated.
    Expand,
    /// `result[c] = operand[start + c · step]`, per axis.
    Slice {
        /// First coordinate taken, per axis.
        start: Dims,
        /// Distance between coordinates taken, per axis; at least 1.
        step: SmallVec<[u32; 6]>,
    },
    /// Operands one after the other along an axis.
    Concat {
        /// The axis.
        axis: usize,
    },
    /// A canvas of `value` with the operand placed on it: `result[start + c · step] = operand[c]`;
    /// the inverse of [`Op::Slice`].
    Pad {
        /// Where the operand's first element goes, per axis.
        start: Dims,
        /// Distance between placed elements, per axis; at least 1.
        step: SmallVec<[u32; 6]>,
        /// The value everywhere else.
        value: Value,
    },
    /// Fails the run if an element of the operand lies outside `0..limit`; its value is never read.
    BoundsCheck {
        /// One more than the largest index.
        limit: Size,
        /// The meaning of the operand.
        of: Checked,
    },
    /// Binds a symbol to the operand (i32, of shape `[]`) as its length, for the rest of the run;
    /// fails the run if it is negative or above the symbol's bound. Its value is never read.
    Bind {
        /// The symbol.
        symbol: Symbol,
    },
    /// The row-major positions (i32) of a mask's true elements; the length, a symbol, is part of
    /// the node.
    Nonzero,
    /// The positions (i32) of the elements along the last axis in their order; of equal ones the
    /// first comes first, and NaN counts as largest. The shape is part of the node: along the last
    /// axis the first few of them, or all.
    Sort {
        /// The largest first.
        descending: bool,
    },
    /// Selects the boxes of `[n, 4]`, the best first, that share no more than this part of their
    /// union with a better selected one.
    NonMaxSuppression {
        /// The part.
        threshold: f32,
    },
    /// A kernel of the user; the shape is part of the node.
    Custom(CustomKernel),
    /// The gradient of an input of [`Op::Custom`], which there is none of. No graph that is compiled
    /// needs it.
    NoGradient(CustomKernel),
    /// A loop whose body is the graph's of this index; its value is never read, but through
    /// [`Op::ScanResult`].
    Scan(u32),
    /// The result of this index of the loop that the operand is, of all steps.
    ScanResult(u32),
    /// A value of a step, while the body of a loop is recorded. No graph that is compiled needs it.
    Placeholder,
    /// Moves parts of the operand between ranks that run this program, each on its own data: those
    /// of a group, by their places in it.
    /// `AllToAll`: `[ranks, …] → [ranks, …]`. `AllGather`: `[…] → [ranks, …]`. `ReduceScatter`:
    /// `[ranks, …] → […]`.
    Collective {
        /// Which parts move.
        op: CollectiveOp,
        /// The ranks between which they move.
        group: Group,
    },
    /// Assigns the operand to a variable at the end of the step; its value is never read.
    Assign(u32),
}

impl Op {
    /// A view shares its operand's bytes.
    pub fn is_view(&self) -> bool {
        matches!(
            self,
            Op::Reshape | Op::Permute(_) | Op::Expand | Op::Slice { .. }
        )
    }

    /// Executed for its effect, not for its value.
    pub fn is_effect(&self) -> bool {
        self.is_check() || matches!(self, Op::Assign(_))
    }

    /// May fail the run, and therefore runs before anything is changed.
    pub fn is_check(&self) -> bool {
        matches!(self, Op::BoundsCheck { .. } | Op::Bind { .. })
    }

    /// Opaque: has a kernel that only writes its result, in a buffer that no other task writes.
    pub fn is_opaque(&self) -> bool {
        matches!(
            self,
            Op::Nonzero
                | Op::Sort { .. }
                | Op::NonMaxSuppression { .. }
                | Op::Custom(_)
                | Op::PrefixReduce { .. }
                | Op::Attention(_)
                | Op::AttentionGrad { .. }
                | Op::SliceAssign { .. }
                | Op::Scan(_)
                | Op::ScanResult(_)
                | Op::Collective { .. }
        )
    }

    /// One value per point from the operands' values at the same point.
    pub fn is_pointwise(&self) -> bool {
        matches!(self, Op::Scalar(_) | Op::Cast(_) | Op::Copy)
    }

    /// The name shown in plans and errors.
    pub fn name(&self) -> &str {
        match self {
            Op::Input(_) => "input",
            Op::Variable(_) => "variable",
            Op::Const(_) => "const",
            Op::Size(_) => "size",
            Op::Index(_) => "index",
            Op::Uniform { .. } => "uniform",
            Op::Scalar(op) => op.name(),
            Op::Cast(_) => "cast",
            Op::Copy => "copy",
            Op::Reduce(op, _) => match op {
                ReduceOp::Sum => "sum",
                ReduceOp::Prod => "prod",
                ReduceOp::Max => "max",
                ReduceOp::Min => "min",
                ReduceOp::Any => "any",
                ReduceOp::All => "all",
                ReduceOp::ArgMax => "argmax",
                ReduceOp::ArgMin => "argmin",
                ReduceOp::SquaredDeviations => "squared_deviations",
            },
            Op::Matmul => "matmul",
            Op::Dequantize(_) => "dequantize",
            Op::QuantizedMatmul(_) => "quantized_matmul",
            Op::Conv2d(_) => "conv2d",
            Op::Conv2dInputGrad(_) => "conv2d.input_grad",
            Op::Conv2dWeightGrad(_) => "conv2d.weight_grad",
            Op::Pool2d(PoolKind::Max, _) => "max_pool2d",
            Op::Pool2d(PoolKind::ArgMax, _) => "max_pool2d.positions",
            Op::Pool2d(PoolKind::Avg { .. }, _) => "avg_pool2d",
            Op::Pool2dGrad(PoolKind::Avg { .. }, _) => "avg_pool2d.grad",
            Op::Pool2dGrad(..) => "max_pool2d.grad",
            Op::Gather { .. } => "gather",
            Op::Scatter { reduce, .. } => match reduce {
                ReduceOp::Prod => "scatter_mul",
                ReduceOp::Max => "scatter_max",
                ReduceOp::Min => "scatter_min",
                _ => "scatter_add",
            },
            Op::SliceAssign { .. } => "slice_assign",
            Op::PrefixReduce { op, .. } => match op {
                PrefixOp::Sum => "cumsum",
                PrefixOp::Linear => "recurrence",
                PrefixOp::LogSumExp => "logcumsumexp",
                PrefixOp::ArgMax => "cummax.positions",
                PrefixOp::ArgMin => "cummin.positions",
            },
            Op::Attention(_) => "attention",
            Op::AttentionGrad { .. } => "attention.grad",
            Op::Reshape => "reshape",
            Op::Permute(_) => "permute",
            Op::Expand => "expand",
            Op::Slice { .. } => "slice",
            Op::Concat { .. } => "concat",
            Op::Pad { .. } => "pad",
            Op::BoundsCheck { .. } => "bounds_check",
            Op::Bind { .. } => "bind_length",
            Op::Nonzero => "positions",
            Op::Sort { .. } => "argsort",
            Op::NonMaxSuppression { .. } => "nms",
            Op::Custom(kernel) | Op::NoGradient(kernel) => kernel.name(),
            Op::Scan(_) => "scan",
            Op::ScanResult(_) => "scan.result",
            Op::Placeholder => "scan.step",
            Op::Collective { op, .. } => match op {
                CollectiveOp::AllToAll => "all_to_all",
                CollectiveOp::AllGather => "all_gather",
                CollectiveOp::ReduceScatter => "reduce_scatter",
            },
            Op::Assign(_) => "assign",
        }
    }
}
