//! Operands of products, poolings, gathers and loops in the type that they are stored in.

use rustc_hash::FxHashMap;
use slabwise_kernels::dtype::DType;
use slabwise_kernels::spec::PoolKind;

use crate::backend::HalfProducts;
use crate::graph::{Graph, Phase};
use crate::ops::{GraphBuilder, NodeId, Op};

/// The conversions to f32 of halves for products that take none. Those of the forward pass are not
/// kept for the backward pass.
pub(super) type Conversions = FxHashMap<(NodeId, Phase), NodeId>;

/// Operand `k` of an operation, of which `id` is the value: of a type that its kernel takes.
pub(super) fn operand(
    out: &mut Graph,
    op: &Op,
    k: usize,
    id: NodeId,
    half_products: HalfProducts,
    conversions: &mut Conversions,
) -> NodeId {
    let (takes_halves, mixes) = match op {
        Op::Gather { .. } if k == 0 => (true, true),
        Op::Pool2d(PoolKind::Max | PoolKind::ArgMax, _) => (true, true),
        Op::Matmul => (true, half_products == HalfProducts::Matrices),
        Op::Conv2d(_) | Op::Conv2dInputGrad(_) | Op::Conv2dWeightGrad(_) => {
            (half_products == HalfProducts::OfOneType, false)
        }
        op if op.is_pointwise() || matches!(op, Op::Reduce(..)) => {
            return match widened(out, id) {
                Some(stored) if out.node(id).op.is_view() => {
                    let viewed = over(out, id, stored, false);
                    out.cast(viewed, DType::F32)
                }
                _ => id,
            };
        }
        _ => return id,
    };
    if out.node(id).dtype.is_half() && !takes_halves {
        let phase = out.origins[out.current_origin as usize].phase;
        return *conversions
            .entry((id, phase))
            .or_insert_with(|| out.cast(id, DType::F32));
    }
    match widened(out, id) {
        Some(stored) if mixes => over(out, id, stored, false),
        Some(stored) if matches!(out.node(stored).op, Op::Variable(_)) => {
            over(out, id, stored, true)
        }
        _ => id,
    }
}

/// The value of halves that `id` is a view of, converted to f32. It lies in memory as its conversion
/// does, so that both have the same views.
fn widened(out: &Graph, id: NodeId) -> Option<NodeId> {
    let node = out.node(out.below_views(id));
    let below = *node.inputs.first()?;
    let stored = out.node(below);
    let widens = node.op == Op::Cast(DType::F32) && stored.dtype.is_half();
    (widens && !stored.op.is_view()).then_some(below)
}

/// The views of `id`, moved to the operand of its conversion, or to another conversion of that
/// operand that has no other reader.
fn over(out: &mut Graph, id: NodeId, stored: NodeId, converts: bool) -> NodeId {
    let node = out.node(id).clone();
    if node.op.is_view() {
        let below = over(out, node.inputs[0], stored, converts);
        let dtype = out.node(below).dtype;
        return out.emit(node.op, &[below], dtype, node.dims);
    }
    match converts {
        true => out.cast(stored, DType::F32),
        false => stored,
    }
}
