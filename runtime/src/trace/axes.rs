//! The numbers of axes, which also count from the last one.

use std::ops::RangeFull;

use crate::ops::Axes;

/// The number of an axis, from 0, or from the last axis, which is −1.
///
/// ```
/// # use slabwise::prelude::*;
/// # let trace = Trace::inference();
/// let x = trace.input("x", F32, (2, 3, 4));
/// assert_eq!(format!("{:?}", x.sum_over(-1)), "f32 [2, 3]");
/// assert_eq!(format!("{:?}", x.unsqueeze(-1)), "f32 [2, 3, 4, 1]");
/// assert_eq!(format!("{:?}", x.permute([0, -1, 1])), "f32 [2, 4, 3]");
/// ```
pub trait AxisIndex: Copy {
    /// The number from 0 among `rank` axes. If there is no such axis, the result is `rank` or more,
    /// and as an `isize` this number itself.
    fn index(self, rank: usize) -> usize;
}

impl AxisIndex for usize {
    fn index(self, _: usize) -> usize {
        self
    }
}

impl AxisIndex for isize {
    fn index(self, rank: usize) -> usize {
        let from_end = rank.checked_add_signed(self);
        from_end.filter(|_| self < 0).unwrap_or(self as usize)
    }
}

impl AxisIndex for i32 {
    fn index(self, rank: usize) -> usize {
        (self as isize).index(rank)
    }
}

/// A set of axes: one number, an array, slice or vector of numbers, or `..` for all.
pub trait AxisSet {
    /// The numbers from 0, for a tensor of `rank` axes.
    fn axes(&self, rank: usize) -> Axes;
}

impl<A: AxisIndex> AxisSet for A {
    fn axes(&self, rank: usize) -> Axes {
        Axes::from_slice(&[self.index(rank)])
    }
}

impl<A: AxisIndex, const N: usize> AxisSet for [A; N] {
    fn axes(&self, rank: usize) -> Axes {
        self.iter().map(|axis| axis.index(rank)).collect()
    }
}

impl<A: AxisIndex> AxisSet for &[A] {
    fn axes(&self, rank: usize) -> Axes {
        self.iter().map(|axis| axis.index(rank)).collect()
    }
}

impl<A: AxisIndex> AxisSet for &Vec<A> {
    fn axes(&self, rank: usize) -> Axes {
        self.as_slice().axes(rank)
    }
}

impl<A: AxisIndex> AxisSet for Vec<A> {
    fn axes(&self, rank: usize) -> Axes {
        self.as_slice().axes(rank)
    }
}

impl AxisSet for RangeFull {
    fn axes(&self, rank: usize) -> Axes {
        (0..rank).collect()
    }
}
