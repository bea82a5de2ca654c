//! Regions of contents: the elements that a store writes or a load reads.

use std::fmt;

use slabwise_kernels::size::{Env, Size};
use slabwise_kernels::spec::Operand;
use smallvec::SmallVec;

/// The elements `offset + Σ coordinateₐ · strideₐ` of a slot, over the axes that matter: those of
/// more than one point, along which the element moves.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Region {
    pub(super) offset: Size,
    /// Each axis with its length and stride, ascending.
    pub(super) axes: SmallVec<[(Axis, Size, Size); 4]>,
}

/// A coordinate of the points that an expression is evaluated at: an axis of the iteration space,
/// or, from [`BOUND`] on, one that a reduction around it binds.
pub(super) type Axis = u8;

/// The first axis that a reduction binds, whichever axis of its kernel it reduces.
pub(super) const BOUND: Axis = 64;

/// The name of all axes of one point.
const UNMOVED: Axis = Axis::MAX;

/// Axes and their new names.
pub(super) type Renaming = SmallVec<[(Axis, Axis); 6]>;

impl Region {
    /// The elements of an operand over a space.
    pub(super) fn of(operand: &Operand, dims: &[Size]) -> Region {
        let axis = |(axis, (&n, &stride)): (Axis, (&Size, &Size))| {
            (!n.is(1) && !stride.is(0)).then_some((axis, n, stride))
        };
        Region {
            offset: operand.offset,
            axes: (0..)
                .zip(dims.iter().zip(&operand.strides))
                .filter_map(axis)
                .collect(),
        }
    }

    /// The region with its axes numbered from the largest stride to the smallest, and the renaming
    /// that does so.
    pub(super) fn canonical(&self, env: &Env) -> (Region, Renaming) {
        let mut axes = self.axes.clone();
        axes.sort_by_key(|&(axis, n, stride)| {
            (
                std::cmp::Reverse(stride.at(env)),
                std::cmp::Reverse(n.at(env)),
                axis,
            )
        });
        let renaming = (0..)
            .zip(&axes)
            .map(|(new, &(old, ..))| (old, new))
            .collect();
        (0..).zip(&mut axes).for_each(|(new, axis)| axis.0 = new);
        let region = Region {
            offset: self.offset,
            axes,
        };
        (region, renaming)
    }

    /// The renaming from the axes of this region to those of another one with the same elements.
    pub(super) fn same_elements(&self, other: &Region) -> Option<Renaming> {
        let same = self.offset == other.offset && self.axes.len() == other.axes.len();
        let alike = |&(axis, n, stride): &(Axis, Size, Size)| {
            let found = other.axes.iter().find(|(_, m, t)| (*m, *t) == (n, stride));
            found.map(|&(to, ..)| (axis, to))
        };
        same.then(|| self.axes.iter().map(alike).collect())
            .flatten()
    }

    /// The region with other names for its axes.
    pub(super) fn renamed(&self, renaming: &Renaming) -> Region {
        let mut axes = self.axes.clone();
        axes.iter_mut()
            .for_each(|(axis, ..)| *axis = rename(*axis, renaming));
        axes.sort_unstable_by_key(|&(axis, ..)| axis);
        Region {
            offset: self.offset,
            axes,
        }
    }

    /// The first and the last element.
    pub(super) fn bounds(&self, env: &Env) -> (i64, i64) {
        let start = self.offset.at(env);
        self.axes
            .iter()
            .fold((start, start), |(low, high), (_, n, stride)| {
                let span = (n.at(env) - 1).max(0).saturating_mul(stride.at(env));
                (low + span.min(0), high + span.max(0))
            })
    }
}

/// The renaming of the axes of one point, whichever kernel has them: nothing moves along them.
pub(super) fn unmoved(dims: &[Size]) -> Renaming {
    let single = (0..).zip(dims).filter(|(_, n)| n.is(1));
    single.map(|(axis, _)| (axis, UNMOVED)).collect()
}

/// The new name of an axis; axes that are not mentioned keep their names.
pub(super) fn rename(axis: Axis, renaming: &Renaming) -> Axis {
    let found = renaming.iter().find(|(from, _)| *from == axis);
    found.map_or(axis, |&(_, to)| to)
}

impl fmt::Display for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "[{:?}", self.offset)?;
        self.axes
            .iter()
            .try_for_each(|(axis, n, stride)| write!(f, " + {axis}<{n:?}·{stride:?}"))?;
        f.write_str("]")
    }
}
