//! Collectives: transfers of bytes between ranks.

use super::{Dims, Operand};
use crate::group::Group;
use crate::size::Size;

/// Which parts move between ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CollectiveOp {
    /// Row r of the source goes to rank r; row r of the result is from rank r.
    AllToAll,
    /// The source goes to every rank; row r of the result is the source of rank r.
    AllGather,
    /// Row r of every rank's source, added up on rank r [in a tree](crate::tree_sum::add_in_tree),
    /// of f32. For ranks that read each other's memory in place, because nothing is received.
    ReduceScatter,
}

/// See [`Body::Collective`](super::Body::Collective). Source and result are contiguous. Writes its
/// result itself: there is no `code`.
#[derive(Clone, Debug, PartialEq)]
pub struct Collective {
    /// Which parts move.
    pub op: CollectiveOp,
    /// The ranks between which they move, by their places.
    pub group: Group,
    /// The own parts, strides over [its space](Collective::source_space).
    pub source: Operand,
    /// The parts from every rank, strides over `dims`.
    pub result: Operand,
}

impl Collective {
    /// The space of the source for a result of this space.
    pub fn source_space(&self, dims: &Dims) -> Dims {
        match self.op {
            CollectiveOp::AllToAll => dims.clone(),
            CollectiveOp::AllGather => dims.iter().skip(1).copied().collect(),
            CollectiveOp::ReduceScatter => {
                let rows = Size::fixed(i64::from(self.group.ranks));
                std::iter::once(rows).chain(dims.iter().copied()).collect()
            }
        }
    }

    /// The space of the part that comes from each rank, for a result of this space.
    pub fn part_space<'a>(&self, dims: &'a Dims) -> &'a [Size] {
        match self.op {
            CollectiveOp::AllToAll | CollectiveOp::AllGather => dims.get(1..).unwrap_or_default(),
            CollectiveOp::ReduceScatter => dims,
        }
    }
}
