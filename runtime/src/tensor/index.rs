//! Selection by integer indices. An index out of range fails the run, naming the user's line.

use std::panic::Location;

use slabwise_kernels::dtype::DType;
use slabwise_kernels::scalar::ScalarOp;
use slabwise_kernels::size::Size;
use slabwise_kernels::spec::Dims;
use smallvec::SmallVec;

use super::{Tensor, check_index, checked, no_axis};
use crate::graph::Graph;
use crate::ops::{GraphBuilder, NodeId, Op};
use crate::shape::elements;

/// Refuses a tensor that is not an index.
pub(super) fn require_index(g: &Graph, what: &str, index: NodeId) -> Result<(), String> {
    match g.dtype(index) {
        DType::I32 | DType::U8 => Ok(()),
        other => Err(format!("{what}: indices are i32 or u8, not {other}")),
    }
}

/// Whether an integer equals the position along the last axis: `[…] → […, n]`, truth values.
pub(super) fn matches_position(g: &mut Graph, index: NodeId, n: Size) -> NodeId {
    let mut dims = g.dims(index).clone();
    dims.push(Size::ONE);
    let index = g.reshape(index, &dims);
    let last = dims.len() - 1;
    dims[last] = n;
    let index = g.broadcast(index, &dims);
    let mut strides: Dims = SmallVec::from_elem(Size::ZERO, dims.len());
    strides[last] = Size::ONE;
    let position = g.emit(Op::Index(strides), &[], DType::I32, dims);
    g.scalar(ScalarOp::Eq, &[position, index])
}

impl<'t> Tensor<'t> {
    /// `result[… i …] = self[… index[… i …] …]` along an axis: index and result have this tensor's
    /// shape, except for any length along the axis.
    #[track_caller]
    pub fn gather(self, axis: usize, index: Tensor<'t>) -> Tensor<'t> {
        self.trace
            .record(Location::caller(), &[self, index], |g, ids| {
                let result = checked(g, Op::Gather { axis }, ids)?;
                let limit = g.dims(ids[0])[axis];
                check_index(g, ids[1], limit);
                Ok(result)
            })
    }

    /// The slices of an axis that an index `[n]` names, in its order: the axis gets length n.
    #[track_caller]
    pub fn index_select(self, axis: usize, index: Tensor<'t>) -> Tensor<'t> {
        self.trace
            .record(Location::caller(), &[self, index], |g, ids| {
                let mut dims = g.dims(ids[0]).clone();
                if axis >= dims.len() {
                    return Err(no_axis(g, "index_select", axis, ids[0]));
                }
                let &[n] = g.dims(ids[1]).as_slice() else {
                    return Err(format!(
                        "index_select by {}: an index of one axis is needed",
                        g.symbols.show(g.dims(ids[1]))
                    ));
                };
                require_index(g, "index_select", ids[1])?;
                check_index(g, ids[1], dims[axis]);
                let mut column: Dims = SmallVec::from_elem(Size::ONE, dims.len());
                column[axis] = n;
                dims[axis] = n;
                let index = g.reshape(ids[1], &column);
                let index = g.broadcast(index, &dims);
                checked(g, Op::Gather { axis }, &[ids[0], index])
            })
    }

    /// The rows of this table `[count, width]` that an index `[…]` names: `[…, width]`.
    #[track_caller]
    pub fn embed(self, index: Tensor<'t>) -> Tensor<'t> {
        let at = Location::caller();
        let table = self.require(at, |g, x| match g.dims(x).len() {
            2 => Ok(()),
            _ => Err(format!(
                "embed by rows of {}: a table [count, width] is needed",
                g.symbols.show(g.dims(x))
            )),
        });
        let flat = self.trace.record(at, &[index], |g, ids| {
            let n = elements(g.dims(ids[0]))
                .ok_or("embed: the number of indices has no form as one size")?;
            Ok(g.reshape(ids[0], &Dims::from_slice(&[n])))
        });
        let rows = table.index_select(0, flat);
        self.trace.record(at, &[rows, index], |g, ids| {
            let mut dims = g.dims(ids[1]).clone();
            dims.push(g.dims(ids[0])[1]);
            Ok(g.reshape(ids[0], &dims))
        })
    }

    /// 1 at the position that each integer names, else 0: `[…] → […, n]`, f32; n is at least 1.
    #[track_caller]
    pub fn one_hot(self, n: usize) -> Tensor<'t> {
        self.trace.record(Location::caller(), &[self], |g, ids| {
            require_index(g, "one_hot", ids[0])?;
            if n == 0 {
                return Err(format!(
                    "one_hot of {} among 0 positions: no index names any",
                    g.symbols.show(g.dims(ids[0]))
                ));
            }
            let n = i32::try_from(n)
                .map_err(|_| format!("one_hot: {n} positions are more than an i32 can number"))?;
            let n = Size::fixed(i64::from(n));
            check_index(g, ids[0], n);
            let hit = matches_position(g, ids[0], n);
            Ok(g.cast(hit, DType::F32))
        })
    }
}
