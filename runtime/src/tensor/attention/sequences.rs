//! Sequences: their heads and positions, and the checks of layers that take them.

use std::panic::Location;

use slabwise_kernels::dtype::DType;
use slabwise_kernels::size::Size;
use slabwise_kernels::spec::Dims;

use crate::ops::{GraphBuilder, Op};
use crate::tensor::Tensor;

impl<'t> Tensor<'t> {
    /// `[…, length, heads·width]` → `[…, heads, length, width]`.
    #[track_caller]
    pub(crate) fn split_heads(self, heads: usize) -> Tensor<'t> {
        let Some(last) = self.rank().checked_sub(1).filter(|&last| last > 0) else {
            return self;
        };
        let heads = i64::try_from(heads).unwrap_or(i64::MAX);
        self.unflatten(last, [heads, -1]).transpose(last - 1, last)
    }

    /// The inverse of [`split_heads`](Tensor::split_heads).
    #[track_caller]
    pub(crate) fn join_heads(self) -> Tensor<'t> {
        match self.rank().checked_sub(2) {
            Some(axis) if axis > 0 => self.transpose(axis - 1, axis).flatten(axis),
            _ => self,
        }
    }

    /// This tensor if it has so many axes; `what` is the layer that needs it.
    #[track_caller]
    pub(crate) fn require_rank(self, what: &str, rank: usize) -> Tensor<'t> {
        self.require(Location::caller(), |g, x| match g.dims(x).len() {
            is if is == rank => Ok(()),
            is => Err(format!(
                "{what} of {}: {rank} axes are needed, not {is}",
                g.symbols.show(g.dims(x))
            )),
        })
    }

    /// This tensor if an axis has a fixed length; `what` is the layer that needs it.
    #[track_caller]
    pub(crate) fn require_fixed_axis(self, what: &str, axis: usize) -> Tensor<'t> {
        self.require(Location::caller(), |g, x| match g.dims(x).get(axis) {
            Some(len) if len.as_fixed().is_some() => Ok(()),
            _ => Err(format!(
                "{what} of {}: axis {axis} must have a fixed length",
                g.symbols.show(g.dims(x))
            )),
        })
    }

    /// This tensor `[count, 1, width]` repeated to the batch of `like`, `[n, …]`.
    #[track_caller]
    pub(crate) fn expand_batch(self, like: Tensor<'t>) -> Tensor<'t> {
        self.trace
            .record(Location::caller(), &[self, like], |g, ids| {
                let mut dims = g.dims(ids[0]).clone();
                dims[1] = *g.dims(ids[1]).first().ok_or("a batch is needed")?;
                Ok(g.broadcast(ids[0], &dims))
            })
    }

    /// This tensor if it is a sequence `[…, length, width]` of a fixed width; `what` is the layer
    /// that needs it.
    #[track_caller]
    pub(crate) fn require_sequence(self, what: &str) -> Tensor<'t> {
        self.require(Location::caller(), |g, x| match *g.dims(x).as_slice() {
            [.., _, width] if width.as_fixed().is_some() => Ok(()),
            _ => Err(format!(
                "{what} of {}: […, length, width] of a fixed width is needed",
                g.symbols.show(g.dims(x))
            )),
        })
    }

    /// 0, 1, … along an axis: i32 of one axis; `None` after a mistake.
    #[track_caller]
    pub(crate) fn positions_along(self, axis: usize) -> Option<Tensor<'t>> {
        let positions = self.trace.record(Location::caller(), &[self], |g, ids| {
            let dims = g.dims(ids[0]);
            let length = *dims.get(axis).ok_or("a sequence is needed")?;
            let strides = Dims::from_slice(&[Size::ONE]);
            Ok(g.emit(
                Op::Index(strides),
                &[],
                DType::I32,
                Dims::from_slice(&[length]),
            ))
        });
        (!positions.is_poisoned()).then_some(positions)
    }
}
