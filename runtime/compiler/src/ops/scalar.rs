//! Elementwise operations: the rules common to every row of the table.

use slabwise_kernels::dtype::Lane;
use slabwise_kernels::expr::Expr;
use slabwise_kernels::scalar::{ScalarOp, Value};
use slabwise_kernels::spec::Dims;

use super::rules::{Gradients, Rule, TensorType};
use super::{GraphBuilder, NodeId};
use crate::shape::Symbols;
use slabwise_kernels::dtype::DType;

pub(super) fn infer(op: ScalarOp, given: &[TensorType<'_>], symbols: &Symbols) -> Rule {
    if let Some(other) = given.iter().find(|o| o.dims != given[0].dims) {
        return Err(format!(
            "{} {} and {}: shapes differ",
            op.name(),
            symbols.show(given[0].dims),
            symbols.show(other.dims)
        ));
    }
    let lanes: Vec<Lane> = given.iter().map(|o| o.dtype.lane()).collect();
    match op.lane(&lanes) {
        Some(lane) => Ok((lane.stored(), Dims::from_slice(given[0].dims))),
        None => {
            let types: Vec<&str> = given.iter().map(|o| o.dtype.name()).collect();
            Err(format!(
                "{} does not take {}; convert with cast",
                op.name(),
                types.join(", ")
            ))
        }
    }
}

pub(super) fn gradient(
    g: &mut dyn GraphBuilder,
    op: ScalarOp,
    node: NodeId,
    inputs: &[NodeId],
    dy: NodeId,
    wanted: &[bool],
) -> Gradients {
    let derivatives = op.derivative();
    let slope = |g: &mut dyn GraphBuilder, i: usize| {
        let expr = derivatives[i]
            .as_ref()
            .filter(|expr| **expr != Expr::Const(0.0))?;
        if !wanted[i] || !g.dtype(inputs[i]).is_float() || !g.dtype(dy).is_float() {
            return None;
        }
        Some(times(g, dy, expr, inputs, node))
    };
    (0..inputs.len()).map(|i| slope(g, i)).collect()
}

/// `dy · expr`. A derivative that chooses between 1 and 0 chooses between dy and 0, so that an
/// infinite dy stays out of the branch that was not taken.
fn times(
    g: &mut dyn GraphBuilder,
    dy: NodeId,
    expr: &Expr,
    inputs: &[NodeId],
    node: NodeId,
) -> NodeId {
    match expr {
        Expr::Const(c) if *c == 1.0 => dy,
        Expr::Const(c) if *c == -1.0 => g.scalar(ScalarOp::Neg, &[dy]),
        Expr::Op(ScalarOp::Neg, inner) => {
            let inner = times(g, dy, &inner[0], inputs, node);
            g.scalar(ScalarOp::Neg, &[inner])
        }
        Expr::Op(ScalarOp::Select, parts) => {
            let condition = build(g, &parts[0], inputs, node);
            let dims = g.dims(dy).clone();
            let branches: Vec<NodeId> = parts[1..]
                .iter()
                .map(|part| match part {
                    Expr::Const(0.0) => g.full(0.0, DType::F32, &dims),
                    part => times(g, dy, part, inputs, node),
                })
                .collect();
            g.scalar(ScalarOp::Select, &[condition, branches[0], branches[1]])
        }
        // dy / x rather than dy · (1/x), which saves one rounding.
        Expr::Op(ScalarOp::Div, parts) if parts[0] == Expr::Const(1.0) => {
            let below = build(g, &parts[1], inputs, node);
            g.scalar(ScalarOp::Div, &[dy, below])
        }
        expr => {
            let slope = build(g, expr, inputs, node);
            g.mul(dy, slope)
        }
    }
}

/// The expression as nodes of the graph.
fn build(g: &mut dyn GraphBuilder, expr: &Expr, inputs: &[NodeId], node: NodeId) -> NodeId {
    match expr {
        Expr::X => inputs[0],
        Expr::Y => inputs[1],
        Expr::Z => inputs[2],
        Expr::Out => node,
        Expr::Const(c) => {
            let dims = g.dims(node).clone();
            let one = g.emit(
                super::Op::Const(Value::F32(*c)),
                &[],
                DType::F32,
                Dims::new(),
            );
            g.broadcast(one, &dims)
        }
        Expr::Op(op, operands) => {
            let operands: Vec<NodeId> =
                operands.iter().map(|e| build(g, e, inputs, node)).collect();
            g.scalar(*op, &operands)
        }
    }
}
