//! Views: the same elements under another shape. Most cost no bytes.

use std::panic::Location;

use slabwise_kernels::size::Size;
use slabwise_kernels::spec::Dims;

use super::{AxisIndex, AxisSet, Tensor, checked, checked_as, no_axis};
use crate::graph::Graph;
use crate::ops::{Axes, GraphBuilder, NodeId, Op};
use crate::shape::{Dim, Shape, elements};
use crate::trace::resolve;

impl<'t> Tensor<'t> {
    /// The same elements in the same order under another shape; one length may be −1: it follows
    /// from the others.
    #[track_caller]
    pub fn reshape(self, shape: impl Into<Shape>) -> Tensor<'t> {
        let mut shape = shape.into();
        self.trace.record(Location::caller(), &[self], |g, ids| {
            let whole = elements(g.dims(ids[0]));
            let dims = lengths_of(g, &mut shape, "reshape", ids[0], whole)?;
            let dtype = g.dtype(ids[0]);
            checked_as(g, Op::Reshape, ids, dtype, &dims)
        })
    }

    /// The axes from `from` on joined into one: `[a, b, c]` from 1 is `[a, b·c]`.
    #[track_caller]
    pub fn flatten(self, from: impl AxisIndex) -> Tensor<'t> {
        let from = from.index(self.rank());
        self.trace.record(Location::caller(), &[self], |g, ids| {
            let dims = g.dims(ids[0]);
            let (kept, joined) = dims
                .split_at_checked(from)
                .filter(|(_, j)| !j.is_empty())
                .ok_or_else(|| no_axis(g, "flatten", from, ids[0]))?;
            let mut dims = Dims::from_slice(kept);
            dims.push(
                elements(joined).ok_or("flatten: the joined length has no form as one size")?,
            );
            Ok(g.reshape(ids[0], &dims))
        })
    }

    /// An axis split into several, in row-major order; one length may be −1. `[a, b·c]` with axis 1
    /// into `(b, c)` is `[a, b, c]`.
    #[track_caller]
    pub fn unflatten(self, axis: impl AxisIndex, lengths: impl Into<Shape>) -> Tensor<'t> {
        let axis = axis.index(self.rank());
        let mut lengths = lengths.into();
        self.trace.record(Location::caller(), &[self], |g, ids| {
            let Some(&whole) = g.dims(ids[0]).get(axis) else {
                return Err(no_axis(g, "unflatten", axis, ids[0]));
            };
            let parts = lengths_of(g, &mut lengths, "unflatten", ids[0], elements(&[whole]))?;
            let mut dims = g.dims(ids[0]).clone();
            dims.remove(axis);
            dims.insert_many(axis, parts);
            let dtype = g.dtype(ids[0]);
            checked_as(g, Op::Reshape, ids, dtype, &dims)
        })
    }

    /// Axis i of the result is axis `axes[i]` of this tensor; each is named once.
    #[track_caller]
    pub fn permute(self, axes: impl AxisSet) -> Tensor<'t> {
        let axes = axes.axes(self.rank());
        self.trace.record(Location::caller(), &[self], |g, ids| {
            if let Some(&axis) = axes.iter().find(|&&axis| axis >= g.dims(ids[0]).len()) {
                return Err(no_axis(g, "permute", axis, ids[0]));
            }
            checked(g, Op::Permute(axes), ids)
        })
    }

    /// Two axes exchanged.
    #[track_caller]
    pub fn transpose(self, a: impl AxisIndex, b: impl AxisIndex) -> Tensor<'t> {
        let rank = self.rank();
        let (a, b) = (a.index(rank), b.index(rank));
        self.trace.record(Location::caller(), &[self], |g, ids| {
            let rank = g.dims(ids[0]).len();
            if let Some(axis) = [a, b].into_iter().find(|&axis| axis >= rank) {
                return Err(no_axis(g, "transpose", axis, ids[0]));
            }
            let mut axes: Axes = (0..rank).collect();
            axes.swap(a, b);
            Ok(g.permute(ids[0], &axes))
        })
    }

    /// The last two axes exchanged.
    #[track_caller]
    pub fn t(self) -> Tensor<'t> {
        self.trace.record(Location::caller(), &[self], |g, ids| {
            if g.dims(ids[0]).len() < 2 {
                return Err(format!(
                    "t of {}: two axes are needed",
                    g.symbols.show(g.dims(ids[0]))
                ));
            }
            Ok(g.transpose(ids[0]))
        })
    }

    /// Repeated to a shape by the broadcasting rule: aligned at the last axis, lengths of 1 repeat;
    /// −1 keeps a length.
    #[track_caller]
    pub fn expand(self, shape: impl Into<Shape>) -> Tensor<'t> {
        let shape = shape.into();
        self.trace.record(Location::caller(), &[self], |g, ids| {
            let from = g.dims(ids[0]).clone();
            let mut dims = Dims::new();
            for (i, &dim) in shape.dims().iter().enumerate() {
                let own = (i + from.len())
                    .checked_sub(shape.dims().len())
                    .map(|i| from[i]);
                match (dim, own) {
                    (Dim::Fixed(-1), Some(own)) => dims.push(own),
                    _ => dims.extend(
                        resolve(&mut g.symbols, &Shape::from((dim,)))
                            .map_err(|why| format!("expand: {why}"))?,
                    ),
                }
            }
            let fits = super::elementwise::broadcast_shape(&from, &dims)
                .is_some_and(|joint| joint == dims);
            if !fits {
                return Err(format!(
                    "expand {} to {}: only axes of length 1 repeat",
                    g.symbols.show(&from),
                    g.symbols.show(&dims)
                ));
            }
            Ok(g.broadcast(ids[0], &dims))
        })
    }

    /// An axis of length 1 removed.
    #[track_caller]
    pub fn squeeze(self, axis: impl AxisIndex) -> Tensor<'t> {
        let axis = axis.index(self.rank());
        self.trace.record(Location::caller(), &[self], |g, ids| {
            let mut dims = g.dims(ids[0]).clone();
            if axis >= dims.len() {
                return Err(no_axis(g, "squeeze", axis, ids[0]));
            }
            if !dims[axis].is(1) {
                return Err(format!(
                    "squeeze: axis {axis} of {} is not of length 1",
                    g.symbols.show(&dims)
                ));
            }
            dims.remove(axis);
            Ok(g.reshape(ids[0], &dims))
        })
    }

    /// An axis of length 1 added, which becomes axis `axis`.
    #[track_caller]
    pub fn unsqueeze(self, axis: impl AxisIndex) -> Tensor<'t> {
        let axis = axis.index(self.rank() + 1);
        self.trace.record(Location::caller(), &[self], |g, ids| {
            unsqueeze(g, ids[0], axis, "unsqueeze")
        })
    }
}

/// A shape for `whole` elements of `x` as lengths; one of −1 follows from the others.
fn lengths_of(
    g: &mut Graph,
    shape: &mut Shape,
    what: &str,
    x: NodeId,
    whole: Option<Size>,
) -> Result<Dims, String> {
    let open: Vec<usize> = (0..shape.0.len())
        .filter(|&i| shape.0[i] == Dim::Fixed(-1))
        .collect();
    open.iter().for_each(|&i| shape.0[i] = Dim::Fixed(1));
    let mut dims = resolve(&mut g.symbols, shape).map_err(|why| format!("{what}: {why}"))?;
    match open[..] {
        [] => {}
        [at] => {
            let missing = whole
                .zip(elements(&dims))
                .and_then(|(n, known)| n.checked_div_size(known));
            dims[at] = missing.ok_or_else(|| {
                let mut wanted: Vec<String> =
                    dims.iter().map(|d| d.show(|s| g.symbols.name(s))).collect();
                wanted[at] = "-1".into();
                format!(
                    "{what} {} to [{}]: no length for -1 fits",
                    g.symbols.show(g.dims(x)),
                    wanted.join(", ")
                )
            })?;
        }
        _ => return Err(format!("{what}: {} lengths are -1; one can be", open.len())),
    }
    Ok(dims)
}

pub(super) fn unsqueeze(
    g: &mut Graph,
    x: NodeId,
    axis: usize,
    what: &str,
) -> Result<NodeId, String> {
    let mut dims = g.dims(x).clone();
    if axis > dims.len() {
        return Err(no_axis(g, what, axis, x));
    }
    dims.insert(axis, Size::ONE);
    Ok(g.reshape(x, &dims))
}
