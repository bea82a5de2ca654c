//! Batched matrix products.

use smallvec::SmallVec;

use super::rules::{Gradients, Rule, TensorType};
use super::{GraphBuilder, NodeId};
use crate::shape::Symbols;
use slabwise_kernels::dtype::DType;
use slabwise_kernels::spec::Dims;

pub(super) fn infer(given: &[TensorType<'_>], symbols: &Symbols) -> Rule {
    let (a, b) = (given[0], given[1]);
    let say = |why: String| {
        Err(format!(
            "matmul {} × {}: {why}",
            symbols.show(a.dims),
            symbols.show(b.dims)
        ))
    };
    let rank = a.dims.len();
    if rank < 2 || b.dims.len() != rank {
        return say("both need at least two axes, and equally many".into());
    }
    // Users convert one of two types; legalized graphs may have both.
    if !(a.dtype.is_float() && b.dtype.is_float()) {
        return say(format!("types are {} and {}, not floats", a.dtype, b.dtype));
    }
    let (k, l) = (a.dims[rank - 1], b.dims[rank - 2]);
    if k != l {
        return say(format!(
            "inner dimensions {} and {} differ",
            k.show(|s| symbols.name(s)),
            l.show(|s| symbols.name(s))
        ));
    }
    if a.dims[..rank - 2] != b.dims[..rank - 2] {
        return say("batch dimensions differ".into());
    }
    let mut dims = Dims::from_slice(a.dims);
    dims[rank - 1] = b.dims[rank - 1];
    Ok((DType::F32, dims))
}

/// Products have two operands of one float type and an f32 result: halves are multiplied exactly
/// and summed in f32.
pub fn floats(a: DType, b: DType) -> Result<(), String> {
    match (a.is_float(), b.is_float()) {
        (true, true) if a == b => Ok(()),
        (true, true) => Err(format!("types {a} and {b} differ; convert one with cast")),
        _ => Err(format!(
            "types are {a} and {b}, not floats; convert with cast"
        )),
    }
}

/// The gradient of a product, cast to the type of its operands: products of halves have gradients
/// of halves.
pub(super) fn like_operand(g: &mut dyn GraphBuilder, dy: NodeId, operand: NodeId) -> NodeId {
    let dtype = g.dtype(operand);
    g.cast(dy, dtype)
}

/// dA = dY·Bᵀ, dB = Aᵀ·dY.
pub(super) fn gradient(
    g: &mut dyn GraphBuilder,
    inputs: &[NodeId],
    dy: NodeId,
    wanted: &[bool],
) -> Gradients {
    let (a, b) = (inputs[0], inputs[1]);
    let dy = like_operand(g, dy, a);
    let da = wanted[0].then(|| {
        let bt = g.transpose(b);
        g.matmul(dy, bt)
    });
    let db = wanted[1].then(|| {
        let at = g.transpose(a);
        g.matmul(at, dy)
    });
    SmallVec::from_iter([da, db])
}
