//! The strides and the axes of a view, from those of the value below it.

use slabwise_kernels::size::{Env, Size};
use slabwise_kernels::spec::Dims;
use smallvec::SmallVec;

use super::{AxisMap, View, Views, contiguous};
use crate::graph::{Graph, Node};
use crate::ops::{NodeId, Op};

/// How a view of a value that is found like this is found.
pub(super) fn through(graph: &Graph, node: &Node, from: &Dims, mut v: View) -> Option<View> {
    match &node.op {
        Op::Permute(axes) => v.strides = axes.iter().map(|&a| v.strides[a]).collect(),
        Op::Expand => {
            for (stride, (a, b)) in v.strides.iter_mut().zip(from.iter().zip(&node.dims)) {
                if a != b {
                    *stride = Size::ZERO;
                }
            }
        }
        Op::Slice { start, step } => {
            for (i, stride) in v.strides.iter_mut().enumerate() {
                v.offset = v.offset.checked_add(start[i].checked_mul(*stride)?)?;
                *stride = stride.checked_mul(Size::from(step[i]))?;
            }
        }
        _ => v.strides = reshape_strides(graph, from, &v.strides, &node.dims)?,
    }
    Some(v)
}

/// For each axis of the base of a view, the axis of the view along it; `None` if the view does more
/// than rename, repeat or insert axes.
pub(super) fn along(node: &Node, from: &Dims) -> Option<AxisMap> {
    let mut map: AxisMap = SmallVec::from_elem(None, from.len());
    match &node.op {
        Op::Permute(axes) => axes
            .iter()
            .enumerate()
            .filter(|(i, _)| !node.dims[*i].is(1))
            .for_each(|(i, &a)| map[a] = Some(i as u8)),
        Op::Expand => (0..from.len())
            .filter(|&i| !from[i].is(1))
            .for_each(|i| map[i] = Some(i as u8)),
        Op::Reshape => {
            let wide = |dims: &Dims| {
                (0..dims.len())
                    .filter(|&i| !dims[i].is(1))
                    .collect::<SmallVec<[usize; 6]>>()
            };
            let (old, new) = (wide(from), wide(&node.dims));
            let same = old.len() == new.len()
                && old.iter().zip(&new).all(|(&a, &b)| from[a] == node.dims[b]);
            if !same {
                return None;
            }
            old.iter()
                .zip(&new)
                .for_each(|(&a, &b)| map[a] = Some(b as u8));
        }
        _ => return None,
    }
    Some(map)
}

/// The strides of a strided buffer under another shape of as many elements, if there are
/// any: groups of axes with equal products must be contiguous within themselves.
pub(super) fn reshape_strides(
    graph: &Graph,
    from: &Dims,
    strides: &Dims,
    to: &Dims,
) -> Option<Dims> {
    // Strides do not matter where there are no elements. (A stride of 0 would mean that the value is
    // uniform along the axis.)
    if from.iter().chain(to).any(|d| d.is(0)) {
        return Some(contiguous(to).unwrap_or_else(|| SmallVec::from_elem(Size::ONE, to.len())));
    }
    // Lengths at which a product is larger than its factors.
    let lengths = Env(graph.symbols.bounds().0.map(|n| n.max(2)));
    let mut result: Dims = SmallVec::from_elem(Size::ZERO, to.len());
    let old: SmallVec<[usize; 6]> = (0..from.len()).filter(|&i| !from[i].is(1)).collect();
    let new: SmallVec<[usize; 6]> = (0..to.len()).filter(|&i| !to[i].is(1)).collect();
    let (mut i, mut j) = (0, 0);
    while i < old.len() && j < new.len() {
        let (first_old, first_new) = (i, j);
        let (mut a, mut b) = (from[old[i]], to[new[j]]);
        (i, j) = (i + 1, j + 1);
        while a != b {
            if a.at(&lengths) <= b.at(&lengths) && i < old.len() {
                // Neighbouring old axes merge only if they are contiguous with each other.
                let (outer, inner) = (old[i - 1], old[i]);
                if strides[outer] != strides[inner].checked_mul(from[inner])? {
                    return None;
                }
                a = a.checked_mul(from[old[i]])?;
                i += 1;
            } else if j < new.len() {
                b = b.checked_mul(to[new[j]])?;
                j += 1;
            } else {
                return None;
            }
        }
        let mut stride = strides[old[i - 1]];
        for &axis in new[first_new..j].iter().rev() {
            result[axis] = stride;
            stride = stride.checked_mul(to[axis])?;
        }
        debug_assert!(first_old < i);
    }
    // The remaining axes have length 1 on both sides.
    (i == old.len() && j == new.len()).then_some(result)
}

/// Whether all axes of a value but so many outer ones are contiguous, so that its parts along these
/// are.
pub(super) fn is_dense(graph: &Graph, views: &Views, id: NodeId, outer: usize) -> bool {
    let dims = &graph.node(id).dims;
    let (Some(view), Some(own)) = (views.view(graph, id), contiguous(dims)) else {
        return false;
    };
    let mut axes = view.strides.iter().zip(&own).zip(dims).enumerate();
    axes.all(|(axis, ((is, own), dim))| dim.is(1) || is == own || axis < outer && !is.is(0))
}
