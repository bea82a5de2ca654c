//! Collectives: operations that transfer values between ranks. Every rank runs the same program on
//! its own data; a value of one rank reaches another only by these operations.
//!
//! A sum over ranks is an exchange and a reduction of the received rows, so that the program
//! determines the order of its additions. A reduce-scatter combines both for ranks that read each
//! other's memory: it adds in the order of a tree over the ranks, without a buffer of received
//! rows.

use slabwise_kernels::collective::Group;
use slabwise_kernels::dtype::DType;
use slabwise_kernels::size::Size;
use slabwise_kernels::spec::{CollectiveOp, Dims, ReduceOp};
use smallvec::SmallVec;

use super::rules::{Gradients, Rule, TensorType};
use super::{GraphBuilder, NodeId, Op};
use crate::shape::Symbols;

pub(super) fn infer(
    op: CollectiveOp,
    ranks: u32,
    given: TensorType<'_>,
    symbols: &Symbols,
) -> Rule {
    let rows = Size::fixed(i64::from(ranks));
    match op {
        CollectiveOp::AllToAll if given.dims.first() == Some(&rows) => {
            Ok((given.dtype, Dims::from_slice(given.dims)))
        }
        CollectiveOp::AllToAll => Err(format!(
            "all_to_all of {} {}: the first axis has a row for each of {ranks} ranks",
            given.dtype,
            symbols.show(given.dims)
        )),
        CollectiveOp::AllGather => {
            let gathered = std::iter::once(rows).chain(given.dims.iter().copied());
            Ok((given.dtype, gathered.collect()))
        }
        CollectiveOp::ReduceScatter
            if given.dims.first() == Some(&rows) && given.dtype == DType::F32 =>
        {
            Ok((given.dtype, Dims::from_slice(&given.dims[1..])))
        }
        CollectiveOp::ReduceScatter => Err(format!(
            "reduce_scatter of {} {}: it takes f32, with a row for each of {ranks} ranks in the \
             first axis",
            given.dtype,
            symbols.show(given.dims)
        )),
    }
}

/// The gradient of the sum of the results of all ranks of a group: it is sent back to the rank that
/// a value came from.
pub(super) fn gradient(
    g: &mut dyn GraphBuilder,
    op: CollectiveOp,
    group: Group,
    input: NodeId,
    dy: NodeId,
) -> Gradients {
    if !g.dtype(input).is_float() {
        return SmallVec::from_elem(None, 1);
    }
    if op == CollectiveOp::ReduceScatter {
        let dims = g.dims(input).clone();
        let op = CollectiveOp::AllGather;
        let gather = Op::Collective { op, group };
        return SmallVec::from_iter([Some(g.emit(gather, &[dy], DType::F32, dims))]);
    }
    let dims = g.dims(dy).clone();
    let back = Op::Collective {
        op: CollectiveOp::AllToAll,
        group,
    };
    let received = g.emit(back, &[dy], DType::F32, dims);
    SmallVec::from_iter([Some(match op {
        CollectiveOp::AllToAll | CollectiveOp::ReduceScatter => received,
        CollectiveOp::AllGather => {
            let sum = g.reduce(ReduceOp::Sum, received, &[0]);
            let own = g.dims(input).clone();
            g.reshape(sum, &own)
        }
    })])
}
