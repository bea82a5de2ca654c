//! Operations along the order of an axis: running sums and the largest elements.

use std::panic::Location;

use slabwise_kernels::dtype::DType;
use slabwise_kernels::scalar::ScalarOp;
use slabwise_kernels::size::Size;
use slabwise_kernels::spec::{Dims, ReduceOp};
use smallvec::SmallVec;

use super::{Tensor, checked, no_axis};
use crate::ops::{GraphBuilder, Op};

impl<'t> Tensor<'t> {
    /// The sum of each element and those before it along an axis of fixed length, of f32 or i32.
    /// Sums of 1, 2, 4 … elements are added (Hillis & Steele 1986), so that rounding errors grow
    /// with the logarithm of the length.
    #[track_caller]
    pub fn cumsum(self, axis: usize) -> Tensor<'t> {
        let mut length = 0;
        let x = self.require(Location::caller(), |g, x| {
            let Some(len) = g.dims(x).get(axis) else {
                return Err(no_axis(g, "cumsum", axis, x));
            };
            if !matches!(g.dtype(x), DType::F32 | DType::I32) {
                return Err(format!(
                    "cumsum does not take {}; convert with cast",
                    g.dtype(x)
                ));
            }
            let fixed = len.as_fixed().and_then(|n| usize::try_from(n).ok());
            length = fixed.ok_or_else(|| {
                format!(
                    "cumsum: axis {axis} of {} has no fixed length",
                    g.symbols.show(g.dims(x))
                )
            })?;
            Ok(())
        });
        let rank = x.rank();
        let mut sums = x;
        let mut joined = 1;
        while joined < length && !x.is_poisoned() {
            let mut pads = vec![(0, 0); rank];
            pads[axis].0 = joined;
            sums = sums + sums.slice(axis, ..length - joined).pad(&pads, 0.0);
            joined *= 2;
        }
        sums
    }

    /// The `k` largest elements along an axis of fixed length, the largest first, and their
    /// positions (i32); of equal ones the first comes first, and NaN counts as largest. Both have
    /// length `k`, which may be 0, along the axis. The time is proportional to `k`.
    #[track_caller]
    pub fn topk(self, k: usize, axis: usize) -> (Tensor<'t>, Tensor<'t>) {
        let at = Location::caller();
        let positions = self.trace.record(at, &[self], |g, ids| {
            let x = ids[0];
            let Some(len) = g.dims(x).get(axis) else {
                return Err(no_axis(g, "topk", axis, x));
            };
            if g.dtype(x) != DType::F32 {
                return Err(format!(
                    "topk does not take {}; convert with cast",
                    g.dtype(x)
                ));
            }
            let len = len
                .as_fixed()
                .filter(|&n| i64::try_from(k).is_ok_and(|k| (0..=n).contains(&k)));
            let Some(len) = len.filter(|&n| n <= i64::from(i32::MAX)) else {
                return Err(format!(
                    "topk: axis {axis} of {} does not have {k} elements at every length",
                    g.symbols.show(g.dims(x))
                ));
            };
            let dims = g.dims(x).clone();
            let mut strides: Dims = SmallVec::from_elem(Size::ZERO, dims.len());
            strides[axis] = Size::ONE;
            let place = g.emit(Op::Index(strides), &[], DType::I32, dims.clone());
            let (lowest, none) = (
                g.full(f32::NEG_INFINITY, DType::F32, &dims),
                g.full(len as f32, DType::I32, &dims),
            );
            let is_nan = g.scalar(ScalarOp::Ne, &[x, x]);
            let mut taken = g.full(0.0, DType::Bool, &dims);
            let mut found = Vec::with_capacity(k);
            for _ in 0..k {
                // The first position of the largest remaining value, among the remaining ones.
                let left = g.scalar(ScalarOp::Select, &[taken, lowest, x]);
                let level = g.reduce(ReduceOp::Max, left, &[axis]);
                let level = g.broadcast(level, &dims);
                let (equal, level_is_nan) = (
                    g.scalar(ScalarOp::Eq, &[x, level]),
                    g.scalar(ScalarOp::Ne, &[level, level]),
                );
                let both_nan = g.scalar(ScalarOp::And, &[is_nan, level_is_nan]);
                let largest = g.scalar(ScalarOp::Or, &[equal, both_nan]);
                let free = g.scalar(ScalarOp::Not, &[taken]);
                let here = g.scalar(ScalarOp::And, &[largest, free]);
                let place_here = g.scalar(ScalarOp::Select, &[here, place, none]);
                let first = g.reduce(ReduceOp::Min, place_here, &[axis]);
                found.push(first);
                let first = g.broadcast(first, &dims);
                let now = g.scalar(ScalarOp::Eq, &[place, first]);
                taken = g.scalar(ScalarOp::Or, &[taken, now]);
            }
            if found.is_empty() {
                let mut none = dims;
                none[axis] = Size::ZERO;
                return Ok(g.full(0.0, DType::I32, &none));
            }
            checked(g, Op::Concat { axis }, &found)
        });
        // Positions are in range by construction, so there is no check at run time.
        let values = self.trace.record(at, &[self, positions], |g, ids| {
            checked(g, Op::Gather { axis }, ids)
        });
        (values, positions)
    }
}
