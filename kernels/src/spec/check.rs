//! What an anchor must be like, whoever runs it.

use super::{
    Body, Conv2d, ConvKind, Dims, Inst, MAX_ARGUMENTS, Operand, Pool2d, Pool2dGrad, PoolKind,
    ScatterAdd, Spec, Window,
};
use crate::dtype::DType;

/// Why a spec cannot be prepared. A lowering never makes such a spec; the message is for its
/// author.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("invalid kernel: {0}")]
pub struct SpecError(pub String);

/// Types an index may have.
const INDEX_TYPES: [DType; 2] = [DType::U8, DType::I32];

/// The largest side, stride or padding of a pooling window, so that coordinates cannot overflow.
const WINDOW_MAX: usize = 1 << 24;

/// Fails unless an operand has one stride per axis and one of these types.
///
/// # Errors
/// Names the operand as `what`.
pub fn check_operand(
    what: &str,
    operand: &Operand,
    rank: usize,
    types: &[DType],
) -> Result<(), SpecError> {
    if operand.strides.len() != rank {
        return Err(SpecError(format!(
            "{what} has {} strides for {rank} axes",
            operand.strides.len()
        )));
    }
    if !types.contains(&operand.dtype) {
        return Err(SpecError(format!(
            "{what} is {}, which this kernel does not take",
            operand.dtype
        )));
    }
    Ok(())
}

impl Spec {
    /// Fails unless the anchor's operands have the axes and types that every back end takes. Loops
    /// have no anchor; which types a product takes is each back end's own matter.
    ///
    /// # Errors
    /// What is wrong, by name.
    pub fn check_anchor(&self) -> Result<(), SpecError> {
        let rank = self.dims.len();
        let one_axis = |what: &str| match rank {
            1 => Ok(()),
            _ => Err(SpecError(format!("{what} have one axis, not {rank}"))),
        };
        match &self.body {
            Body::Loop | Body::Matmul(_) => Ok(()),
            Body::Conv2d(conv) => conv
                .prologue
                .as_deref()
                .map_or(Ok(()), |prologue| self.check_prologue(conv, prologue)),
            Body::Pool2d(pool) => check_pool(pool, rank),
            Body::Pool2dGrad(pool) => check_pool_grad(pool, rank),
            Body::Gather(gather) => {
                check_operand("the source", &gather.source, rank, &DType::ALL)?;
                check_operand("the index", &gather.index, rank, &INDEX_TYPES)
            }
            Body::ScatterAdd(scatter) => self.check_scatter(scatter),
            Body::CheckIndex(check) => check_operand("the index", &check.index, rank, &INDEX_TYPES),
            Body::Compact(compact) => {
                one_axis("positions")?;
                check_operand(
                    "the mask",
                    &compact.mask,
                    compact.space.len(),
                    &[DType::Bool, DType::U8],
                )?;
                check_operand("the positions", &compact.positions, 1, &[DType::I32])
            }
            Body::Sort(sort) => {
                if rank == 0 {
                    return Err(SpecError("a sort without an axis".into()));
                }
                check_operand(
                    "the source",
                    &sort.source,
                    rank,
                    &[DType::F32, DType::F16, DType::BF16, DType::I32, DType::U8],
                )?;
                check_operand("the positions", &sort.positions, rank, &[DType::I32])
            }
            Body::Suppress(suppress) => {
                one_axis("boxes")?;
                check_operand("the boxes", &suppress.boxes, 2, &[DType::F32])?;
                check_operand("what stays", &suppress.keep, 1, &[DType::Bool])
            }
        }
    }

    /// Fails unless a prologue makes its image point by point, and nothing else.
    fn check_prologue(&self, conv: &Conv2d, prologue: &Spec) -> Result<(), SpecError> {
        let fail = |what: String| Err(SpecError(format!("a prologue {what}")));
        if conv.kind == ConvKind::InputGrad {
            return fail("of an input gradient, which takes no image".into());
        }
        if prologue.body != Body::Loop {
            return fail("with an anchor of its own".into());
        }
        let space = Dims::from_slice(&[conv.n, conv.ci, conv.hw[0], conv.hw[1]]);
        if prologue.dims != space {
            return fail(format!(
                "over {:?} for an image of {space:?}",
                prologue.dims
            ));
        }
        if prologue.reduced > 0 {
            return fail(format!("that reduces {} axes", prologue.reduced));
        }
        let ([store], Some((made, sources))) =
            (&prologue.stores[..], prologue.operands.split_last())
        else {
            return fail(format!(
                "with {} stores and {} operands",
                prologue.stores.len(),
                prologue.operands.len()
            ));
        };
        if usize::from(store.operand) != sources.len() {
            return fail(format!(
                "that makes operand {} of {}, not the last",
                store.operand,
                prologue.operands.len()
            ));
        }
        check_operand(
            "the image that a prologue makes",
            made,
            space.len(),
            &[DType::F32],
        )?;
        let reads = |inst: &Inst| matches!(inst, Inst::Load(k) | Inst::Uniform { state: k, .. } if *k == store.operand);
        if prologue.code.iter().any(reads) {
            return fail("that reads what it makes".into());
        }
        // The other operand of the convolution is one more.
        let count = sources.len() + 1 + self.operands.len();
        if count > MAX_ARGUMENTS {
            return fail(format!(
                "of a kernel of {count} arguments, of which there may be {MAX_ARGUMENTS}"
            ));
        }
        Ok(())
    }

    fn check_scatter(&self, scatter: &ScatterAdd) -> Result<(), SpecError> {
        let (rank, dims, space, axis) = (self.dims.len(), &self.dims, &scatter.space, scatter.axis);
        check_operand("the value", &scatter.value, rank, &[DType::F32])?;
        check_operand("the index", &scatter.index, rank, &INDEX_TYPES)?;
        let axes_match = space.len() == rank
            && axis < rank
            && (0..rank).all(|a| a == axis || dims[a] == space[a]);
        if axes_match {
            Ok(())
        } else {
            Err(SpecError(format!(
                "values over {space:?} scattered along axis {axis} of {dims:?}"
            )))
        }
    }
}

fn check_pool(pool: &Pool2d, rank: usize) -> Result<(), SpecError> {
    check_window(&pool.window, rank)?;
    let averages = matches!(pool.kind, PoolKind::Avg { .. });
    let types = if averages {
        &[DType::F32][..]
    } else {
        &[DType::F32, DType::I32, DType::U8, DType::Bool]
    };
    check_operand("the image", &pool.x, 4, types)?;
    match (&pool.arg, pool.kind) {
        (None, _) => Ok(()),
        (Some(arg), PoolKind::Max) => check_positions(arg, &pool.window),
        (Some(_), kind) => Err(SpecError(format!("{kind:?} pooling stores no positions"))),
    }
}

fn check_pool_grad(pool: &Pool2dGrad, rank: usize) -> Result<(), SpecError> {
    check_window(&pool.window, rank)?;
    check_operand("the gradient", &pool.dy, 4, &[DType::F32])?;
    match (pool.kind, &pool.arg) {
        (PoolKind::Max, Some(arg)) => check_positions(arg, &pool.window),
        (PoolKind::Avg { .. }, None) => Ok(()),
        (kind, arg) => {
            let with = if arg.is_some() { "with" } else { "without" };
            Err(SpecError(format!(
                "the gradient of {kind:?} pooling {with} positions"
            )))
        }
    }
}

fn check_window(window: &Window, rank: usize) -> Result<(), SpecError> {
    if rank != 4 {
        return Err(SpecError(format!("pooling over {rank} axes instead of 4")));
    }
    let nonzero = window.k.iter().chain(&window.stride).all(|&n| n > 0);
    let small = window
        .k
        .iter()
        .chain(&window.stride)
        .chain(&window.pad)
        .all(|&n| n <= WINDOW_MAX);
    if nonzero && small {
        Ok(())
    } else {
        Err(SpecError(format!("pooling with {window:?}")))
    }
}

/// Fails unless stored positions can name every element of a window.
fn check_positions(arg: &Operand, window: &Window) -> Result<(), SpecError> {
    check_operand("the positions", arg, 4, &[DType::U8, DType::I32])?;
    if arg.dtype == DType::U8 && window.k[0].saturating_mul(window.k[1]) > 256 {
        return Err(SpecError(format!(
            "positions in a window of {}×{} do not fit in u8",
            window.k[0], window.k[1]
        )));
    }
    Ok(())
}
