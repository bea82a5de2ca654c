//! Prefix reductions (running sums and others) along the last axis, and their gradients, which are
//! prefix reductions again.

use slabwise_kernels::dtype::DType;
use slabwise_kernels::scalar::ScalarOp;
use slabwise_kernels::spec::{Dims, PrefixOp};
use smallvec::SmallVec;

use super::rules::{Gradients, Rule, TensorType};
use super::{GraphBuilder, NodeId, Op};
use crate::shape::Symbols;

/// The options of a prefix reduction.
#[derive(Clone, Copy)]
pub(super) struct PrefixReduce {
    pub op: PrefixOp,
    pub exclusive: bool,
    pub reverse: bool,
}

pub(super) fn infer(reduction: PrefixReduce, given: &[TensorType<'_>], symbols: &Symbols) -> Rule {
    let source = given[0];
    let finds = matches!(reduction.op, PrefixOp::ArgMax | PrefixOp::ArgMin);
    let say = |why: &str| {
        Err(format!(
            "a prefix reduction of {} {}: {why}",
            source.dtype,
            symbols.show(source.dims)
        ))
    };
    if source.dims.is_empty() {
        return say("an axis is needed");
    }
    let fits = match reduction.op {
        PrefixOp::Sum | PrefixOp::Linear => matches!(source.dtype, DType::F32 | DType::I32),
        PrefixOp::LogSumExp => source.dtype == DType::F32,
        PrefixOp::ArgMax | PrefixOp::ArgMin => source.dtype != DType::Bool && !reduction.exclusive,
    };
    if !fits {
        return say("convert with cast");
    }
    if let Some(factor) = given.get(1).filter(|_| reduction.op == PrefixOp::Linear)
        && (factor.dtype != source.dtype || factor.dims != source.dims)
    {
        return say(&format!(
            "factors {} {}; they need its type and shape",
            factor.dtype,
            symbols.show(factor.dims)
        ));
    }
    let dtype = if finds { DType::I32 } else { source.dtype };
    Ok((dtype, Dims::from_slice(source.dims)))
}

pub(super) fn gradient(
    g: &mut dyn GraphBuilder,
    reduction: PrefixReduce,
    node: NodeId,
    inputs: &[NodeId],
    dy: NodeId,
) -> Gradients {
    let finds = matches!(reduction.op, PrefixOp::ArgMax | PrefixOp::ArgMin);
    if finds || !g.dtype(inputs[0]).is_float() {
        return SmallVec::from_elem(None, inputs.len());
    }
    let back = PrefixReduce {
        reverse: !reduction.reverse,
        ..reduction
    };
    match reduction.op {
        PrefixOp::Sum => SmallVec::from_iter([Some(emit(g, back, &[dy]))]),
        // For y = log Σ exp(x): dxᵢ = Σⱼ dyⱼ · exp(xᵢ − yⱼ), the positive and the negative dyⱼ
        // apart as sums of exponentials, so that nothing overflows.
        PrefixOp::LogSumExp => {
            let dims = g.dims(dy).clone();
            let numbers = [0.0, 1.0, f32::NEG_INFINITY];
            let [zero, one, lowest] = numbers.map(|x| g.full(x, DType::F32, &dims));
            let negative = g.scalar(ScalarOp::Neg, &[dy]);
            let [above, below] = [dy, negative].map(|dy| {
                // A NaN counts in both.
                let is_none = g.scalar(ScalarOp::Le, &[dy, zero]);
                let some = g.scalar(ScalarOp::Select, &[is_none, one, dy]);
                let log = g.scalar(ScalarOp::Ln, &[some]);
                let exponent = g.scalar(ScalarOp::Sub, &[log, node]);
                let exponent = g.scalar(ScalarOp::Select, &[is_none, lowest, exponent]);
                let sums = emit(g, back, &[exponent]);
                let exponent = g.add(sums, inputs[0]);
                g.scalar(ScalarOp::Exp, &[exponent])
            });
            SmallVec::from_iter([Some(g.scalar(ScalarOp::Sub, &[above, below]))])
        }
        // For sₜ = aₜ · sₜ₋₁ + xₜ the gradient g of the states is a linear recurrence backwards,
        // gₜ = dsₜ + aₜ₊₁ · gₜ₊₁; then dx = g and daₜ = gₜ · sₜ₋₁.
        _ => {
            let (x, factor) = (inputs[0], inputs[1]);
            let exclusive = |reduction: PrefixReduce| PrefixReduce {
                exclusive: true,
                ..reduction
            };
            let (dx, before) = if reduction.exclusive {
                (emit(g, back, &[dy, factor]), node)
            } else {
                let scaled = g.mul(factor, dy);
                let later = emit(g, exclusive(back), &[scaled, factor]);
                (
                    g.add(dy, later),
                    emit(g, exclusive(reduction), &[x, factor]),
                )
            };
            SmallVec::from_iter([Some(dx), Some(g.mul(dx, before))])
        }
    }
}

fn emit(g: &mut dyn GraphBuilder, reduction: PrefixReduce, inputs: &[NodeId]) -> NodeId {
    let (dtype, dims) = (g.dtype(inputs[0]), g.dims(inputs[0]).clone());
    let PrefixReduce {
        op,
        exclusive,
        reverse,
    } = reduction;
    g.emit(
        Op::PrefixReduce {
            op,
            exclusive,
            reverse,
        },
        inputs,
        dtype,
        dims,
    )
}
