//! The rules of every operation in one place: accepted operands, result, and gradient.

use slabwise_kernels::dtype::DType;
use slabwise_kernels::size::Size;
use slabwise_kernels::spec::{Dims, PoolKind};
use smallvec::SmallVec;

use super::prefix_reduce::PrefixReduce;
use super::{
    GraphBuilder, NodeId, Op, assign, attention, collective, conv, custom, index, matmul, pool,
    prefix_reduce, quantized, reduce, scalar, select, view,
};
use crate::shape::Symbols;

/// The type and shape of an operand.
#[derive(Clone, Copy, Debug)]
pub struct TensorType<'a> {
    /// Its type.
    pub dtype: DType,
    /// Its shape.
    pub dims: &'a [Size],
}

/// The result of an operation: its type and shape; or the mistake, in words that name the shapes.
pub type Rule = Result<(DType, Dims), String>;

/// The gradient of each operand, `None` where there is none.
pub type Gradients = SmallVec<[Option<NodeId>; 3]>;

/// The type and shape of a node, from its operands. Where the shape is part of the node (a reshape,
/// an input) `declared` is that shape and is checked instead.
pub fn infer(
    op: &Op,
    given: &[TensorType<'_>],
    declared: (DType, &Dims),
    symbols: &Symbols,
) -> Rule {
    let (dtype, dims) = declared;
    let as_declared = || Ok((dtype, dims.clone()));
    match op {
        Op::Input(_) | Op::Variable(_) | Op::Placeholder | Op::NoGradient(_) => as_declared(),
        // The graph has the bodies, and checks their operands and results.
        Op::Scan(_) | Op::ScanResult(_) => as_declared(),
        Op::Const(value) if dtype.lane() == value.lane() && dims.is_empty() => as_declared(),
        Op::Const(value) => Err(format!(
            "const {value:?} declared as {dtype} of rank {}",
            dims.len()
        )),
        Op::Size(_) => Ok((DType::I32, Dims::new())),
        Op::Index(strides) if dtype == DType::I32 && strides.len() == dims.len() => as_declared(),
        Op::Index(_) => Err("index: one stride per axis, of type i32".into()),
        Op::Uniform { .. } => Ok((DType::F32, Dims::from_slice(given[1].dims))),
        Op::Scalar(op) => scalar::infer(*op, given, symbols),
        Op::Cast(to) => Ok((*to, Dims::from_slice(given[0].dims))),
        Op::Copy => Ok((given[0].dtype, Dims::from_slice(given[0].dims))),
        Op::Reduce(op, axes) => reduce::infer(*op, axes, given[0]),
        Op::Matmul => matmul::infer(given, symbols),
        Op::Dequantize(format) => quantized::infer(*format, given, symbols),
        Op::QuantizedMatmul(format) => quantized::infer_product(*format, given, symbols),
        Op::Conv2d(geometry) => conv::infer(geometry, given, dims, symbols),
        Op::Conv2dInputGrad(_) | Op::Conv2dWeightGrad(_) | Op::Pool2dGrad(..) => as_declared(),
        Op::Pool2d(kind, window) => pool::infer(*kind, window, given[0], dims, symbols),
        Op::Gather { axis } => index::infer_gather(*axis, given, symbols),
        Op::Scatter { axis, reduce } => index::infer_scatter(*axis, *reduce, given, dims, symbols),
        Op::SliceAssign { start, step, axis } => {
            let axis = *axis;
            assign::infer(&assign::Part { start, step, axis }, given, symbols)
        }
        &Op::PrefixReduce {
            op,
            exclusive,
            reverse,
        } => prefix_reduce::infer(
            PrefixReduce {
                op,
                exclusive,
                reverse,
            },
            given,
            symbols,
        ),
        Op::Attention(_) => attention::infer(given, dtype, symbols),
        Op::AttentionGrad { in_turns, .. } => {
            attention::infer_grad(given, dtype, *in_turns, symbols)
        }
        Op::Reshape => view::infer_reshape(given[0], dims, symbols),
        Op::Permute(axes) => view::infer_permute(axes, given[0]),
        Op::Expand => view::infer_expand(given[0], dims, symbols),
        Op::Slice { .. } | Op::Pad { .. } => Ok((given[0].dtype, dims.clone())),
        Op::Concat { axis } => view::infer_concat(*axis, given, symbols),
        Op::BoundsCheck { .. } | Op::Assign(_) => {
            Ok((given[0].dtype, Dims::from_slice(given[0].dims)))
        }
        Op::Bind { symbol } => select::infer_bind(*symbol, given[0], symbols),
        Op::Nonzero => select::infer_nonzero(given[0], dims),
        Op::Sort { .. } => select::infer_sort(given[0], dims, symbols),
        Op::NonMaxSuppression { threshold } => {
            select::infer_non_max_suppression(*threshold, given[0], symbols)
        }
        Op::Custom(kernel) => custom::infer(kernel, given, dims, symbols),
        Op::Collective { op, group } => collective::infer(*op, group.ranks, given[0], symbols),
    }
}

/// The contributions of the gradient `dy` of a node's value to its operands. `wanted` marks the
/// operands that need one.
pub fn gradient(
    g: &mut dyn GraphBuilder,
    op: &Op,
    node: NodeId,
    inputs: &[NodeId],
    dy: NodeId,
    wanted: &[bool],
) -> Gradients {
    let one = |id: NodeId| SmallVec::from_iter([Some(id)]);
    match op {
        Op::Input(_)
        | Op::Variable(_)
        | Op::Const(_)
        | Op::Size(_)
        | Op::Index(_)
        | Op::Placeholder
        | Op::NoGradient(_)
        | Op::Uniform { .. } => Gradients::new(),
        // Differentiation builds the body of the backward pass (`passes/autodiff/scan.rs`).
        Op::Scan(_) | Op::ScanResult(_) => SmallVec::from_elem(None, inputs.len()),
        // Made after differentiation.
        Op::QuantizedMatmul(_) => SmallVec::from_elem(None, inputs.len()),
        Op::BoundsCheck { .. } | Op::Assign(_) | Op::Pool2d(PoolKind::ArgMax, _) => {
            SmallVec::from_elem(None, inputs.len())
        }
        Op::Bind { .. } | Op::Nonzero | Op::Sort { .. } | Op::NonMaxSuppression { .. } => {
            SmallVec::from_elem(None, inputs.len())
        }
        Op::Custom(kernel) => custom::gradient(g, kernel, inputs),
        Op::Scalar(op) => scalar::gradient(g, *op, node, inputs, dy, wanted),
        // Only casts from float to float carry a gradient, which is f32 for halves too.
        Op::Cast(_) => SmallVec::from_iter([g.dtype(inputs[0]).is_float().then_some(dy)]),
        Op::Copy => one(dy),
        Op::Reduce(op, axes) => reduce::gradient(g, *op, axes, node, inputs[0], dy),
        Op::Matmul => matmul::gradient(g, inputs, dy, wanted),
        Op::Dequantize(format) => quantized::gradient(g, *format, inputs, dy, wanted),
        Op::Conv2d(geometry) => conv::gradient(g, geometry, inputs, dy, wanted),
        Op::Conv2dInputGrad(geometry) => {
            conv::gradient_of_input_grad(g, geometry, inputs, dy, wanted)
        }
        Op::Conv2dWeightGrad(geometry) => {
            conv::gradient_of_weight_grad(g, geometry, inputs, dy, wanted)
        }
        Op::Pool2d(kind, window) => pool::gradient(g, *kind, window, inputs[0], dy),
        Op::Pool2dGrad(kind, window) => pool::gradient_of_grad(g, *kind, window, inputs, dy),
        Op::Gather { axis } => index::gradient_of_gather(g, *axis, inputs, dy),
        Op::Scatter { axis, reduce } => {
            index::gradient_of_scatter(g, (*axis, *reduce), node, inputs, dy)
        }
        Op::SliceAssign { start, step, axis } => {
            let axis = *axis;
            assign::gradient(g, &assign::Part { start, step, axis }, inputs, dy, wanted)
        }
        &Op::PrefixReduce {
            op,
            exclusive,
            reverse,
        } => {
            let reduction = PrefixReduce {
                op,
                exclusive,
                reverse,
            };
            prefix_reduce::gradient(g, reduction, node, inputs, dy)
        }
        Op::Collective { op, group } => collective::gradient(g, *op, *group, inputs[0], dy),
        &Op::Attention(scores) => attention::gradient(g, scores, node, inputs, dy, wanted),
        &Op::AttentionGrad { scores, in_turns } => {
            attention::gradient_of_grad(g, (scores, in_turns), inputs, dy)
        }
        Op::Reshape => one(view::back_through_reshape(g, inputs[0], dy)),
        Op::Permute(axes) => one(view::back_through_permute(g, axes, dy)),
        Op::Expand => one(view::back_through_expand(g, inputs[0], dy)),
        Op::Slice { start, step } => one(view::back_through_slice(g, start, step, inputs[0], dy)),
        Op::Concat { axis } => view::back_through_concat(g, *axis, inputs, dy),
        Op::Pad { start, step, .. } => one(view::back_through_pad(g, start, step, inputs[0], dy)),
    }
}
