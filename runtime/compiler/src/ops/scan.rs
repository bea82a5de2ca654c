//! Prefix reductions (running sums and others) along the last axis, and their gradients, which are
//! prefix reductions again.

use slabwise_kernels::dtype::DType;
use slabwise_kernels::scalar::ScalarOp;
use slabwise_kernels::spec::{Dims, ScanOp};
use smallvec::SmallVec;

use super::rules::{Gradients, Rule, TensorType};
use super::{GraphBuilder, NodeId, Op};
use crate::shape::Symbols;

/// The options of a scan.
#[derive(Clone, Copy)]
pub(super) struct Scan {
    pub op: ScanOp,
    pub exclusive: bool,
    pub reverse: bool,
}

pub(super) fn infer(scan: Scan, given: &[TensorType<'_>], symbols: &Symbols) -> Rule {
    let source = given[0];
    let finds = matches!(scan.op, ScanOp::ArgMax | ScanOp::ArgMin);
    let say = |why: &str| {
        Err(format!(
            "a scan of {} {}: {why}",
            source.dtype,
            symbols.show(source.dims)
        ))
    };
    if source.dims.is_empty() {
        return say("an axis is needed");
    }
    let fits = match scan.op {
        ScanOp::Sum | ScanOp::Linear => matches!(source.dtype, DType::F32 | DType::I32),
        ScanOp::LogSumExp => source.dtype == DType::F32,
        ScanOp::ArgMax | ScanOp::ArgMin => source.dtype != DType::Bool && !scan.exclusive,
    };
    if !fits {
        return say("convert with cast");
    }
    if let Some(factor) = given.get(1).filter(|_| scan.op == ScanOp::Linear)
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
    scan: Scan,
    node: NodeId,
    inputs: &[NodeId],
    dy: NodeId,
) -> Gradients {
    let finds = matches!(scan.op, ScanOp::ArgMax | ScanOp::ArgMin);
    if finds || !g.dtype(inputs[0]).is_float() {
        return SmallVec::from_elem(None, inputs.len());
    }
    let back = Scan {
        reverse: !scan.reverse,
        ..scan
    };
    match scan.op {
        ScanOp::Sum => SmallVec::from_iter([Some(emit(g, back, &[dy]))]),
        // For y = log Σ exp(x): dxᵢ = Σⱼ dyⱼ · exp(xᵢ − yⱼ), the positive and the negative dyⱼ
        // apart as sums of exponentials, so that nothing overflows.
        ScanOp::LogSumExp => {
            let dims = g.dims(dy).clone();
            let [zero, one, lowest] = [0.0, 1.0, -1e38].map(|x| g.full(x, DType::F32, &dims));
            let negative = g.scalar(ScalarOp::Neg, &[dy]);
            let [above, below] = [dy, negative].map(|dy| {
                let counts = g.scalar(ScalarOp::Gt, &[dy, zero]);
                let some = g.scalar(ScalarOp::Select, &[counts, dy, one]);
                let log = g.scalar(ScalarOp::Ln, &[some]);
                let exponent = g.scalar(ScalarOp::Sub, &[log, node]);
                let exponent = g.scalar(ScalarOp::Select, &[counts, exponent, lowest]);
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
            let exclusive = |scan: Scan| Scan {
                exclusive: true,
                ..scan
            };
            let (dx, before) = if scan.exclusive {
                (emit(g, back, &[dy, factor]), node)
            } else {
                let scaled = g.mul(factor, dy);
                let later = emit(g, exclusive(back), &[scaled, factor]);
                (g.add(dy, later), emit(g, exclusive(scan), &[x, factor]))
            };
            SmallVec::from_iter([Some(dx), Some(g.mul(dx, before))])
        }
    }
}

fn emit(g: &mut dyn GraphBuilder, scan: Scan, inputs: &[NodeId]) -> NodeId {
    let (dtype, dims) = (g.dtype(inputs[0]), g.dims(inputs[0]).clone());
    let Scan {
        op,
        exclusive,
        reverse,
    } = scan;
    g.emit(
        Op::Scan {
            op,
            exclusive,
            reverse,
        },
        inputs,
        dtype,
        dims,
    )
}
