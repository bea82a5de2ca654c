//! Sums over the ranks of a world, and exchanges along the axes of a mesh.

use std::panic::Location;

use slabwise_kernels::collective::Group;
use slabwise_kernels::dtype::DType;
use slabwise_kernels::size::Size;
use slabwise_kernels::spec::Dims;

use super::{AxisIndex, Tensor};
use crate::graph::Graph;
use crate::ops::{GraphBuilder, NodeId, Op};
use crate::trace::{Trace, exchanged, gathered_rows, scattered_sum, sum_over};
use crate::world::Distribution;

impl<'t> Tensor<'t> {
    /// The sum of this tensor over the ranks of the [world](crate::Session::on) that the session is
    /// in, the same on every rank: the tensor itself in a world of one. On a [mesh](crate::Mesh) it
    /// is the sum over the ranks that share a batch, along the data axis. Ranks are added in a
    /// fixed tree. Its gradient is taken of the sum of the losses of all ranks.
    ///
    /// Of f32 or i32 numbers, of a shape without bounded dimensions; integers wrap.
    #[track_caller]
    pub fn sum_over_ranks(self) -> Tensor<'t> {
        let (at, distribution) = (Location::caller(), self.trace().distribution());
        self.trace().record(at, &[self], |g, ids| {
            check_sum(g, ids[0], "sum_over_ranks")?;
            Ok(match distribution {
                Some(distribution) => sum_over(g, ids[0], &distribution, distribution.group),
                None => ids[0],
            })
        })
    }

    /// The mean of this loss over the whole batch, on every rank of the
    /// [world](crate::Session::on) that the session is in: a rank's loss, the mean over its own
    /// examples, is weighted by their number, not by that of labels that are not
    /// [ignored](crate::tensor::CrossEntropy::ignore). In a world of one, the loss itself. An f32
    /// scalar.
    #[track_caller]
    pub fn mean_over_ranks(self) -> Tensor<'t> {
        let (at, trace) = (Location::caller(), self.trace());
        let loss = trace.scalar_loss(at, "mean_over_ranks", self);
        match trace.distribution().filter(|_| !loss.is_poisoned()) {
            Some(distribution) => {
                let share = trace.share(at, distribution, 1);
                trace.on_behalf(at, || (loss * share).sum_over_ranks())
            }
            None => loss,
        }
    }

    /// The sum of this tensor over the ranks along an axis of the [mesh](crate::Mesh) that the
    /// session is on, the same on each of them, added in a fixed tree. As for all exchanges along
    /// an axis, its gradient is taken of the sum of the losses of the ranks along the axis.
    ///
    /// Of f32 or i32 numbers, of a shape without bounded dimensions; integers wrap.
    ///
    /// ```
    /// # use slabwise::prelude::*;
    /// # use slabwise::World;
    /// let worlds = World::local(4)?;
    /// let sums = std::thread::scope(|threads| {
    ///     let each = worlds.into_iter().map(|world| {
    ///         threads.spawn(move || -> slabwise::Result<f32> {
    ///             let mesh = world.mesh([("data", 2), ("model", 2)])?;
    ///             let params = Params::seeded(0);
    ///             let scale = params.root().param("scale", (), Init::Constant(10.0));
    ///             let mut session = Session::new(Device::Cpu, params)?.on(mesh)?;
    ///             let trace = Trace::inference();
    ///             let x = trace.param(&scale) * trace.input("x", F32, ());
    ///             let program = session.compile(&trace, [x.sum_across("model")])?;
    ///             let rank = ndarray::arr0(world.rank() as f32);
    ///             Ok(session.run(&program, &rank)?[0].item())
    ///         })
    ///     });
    ///     let each: Vec<_> = each.collect();
    ///     each.into_iter().map(|rank| rank.join().expect("no panic")).collect::<Result<Vec<_>>>()
    /// })?;
    /// assert_eq!(sums, [10.0, 10.0, 50.0, 50.0]);
    /// # Ok::<(), slabwise::Error>(())
    /// ```
    #[track_caller]
    pub fn sum_across(self, axis: &str) -> Tensor<'t> {
        let (at, distribution) = (Location::caller(), self.trace().distribution());
        self.trace().record(at, &[self], |g, ids| {
            let call = format!("sum_across(\"{axis}\")");
            let (distribution, group) = along(distribution, axis, &call)?;
            check_sum(g, ids[0], &call)?;
            Ok(sum_over(g, ids[0], &distribution, group))
        })
    }

    /// The mean of this f32 tensor over the ranks along an axis of the mesh, like
    /// [`Tensor::sum_across`].
    #[track_caller]
    pub fn mean_across(self, axis: &str) -> Tensor<'t> {
        let (at, distribution) = (Location::caller(), self.trace().distribution());
        self.trace().record(at, &[self], |g, ids| {
            let call = format!("mean_across(\"{axis}\")");
            let (distribution, group) = along(distribution, axis, &call)?;
            check_sum(g, ids[0], &call)?;
            if g.dtype(ids[0]) != DType::F32 {
                return Err(format!("{call} does not take i32; convert with cast"));
            }
            let sum = sum_over(g, ids[0], &distribution, group);
            let dims = g.dims(sum).clone();
            let part = g.full(1.0 / group.ranks as f32, DType::F32, &dims);
            Ok(g.mul(sum, part))
        })
    }

    /// The tensors of the ranks along an axis of the mesh, joined along dimension `dim` in the
    /// order of the ranks, on each of them.
    #[track_caller]
    pub fn gather_across(self, axis: &str, dim: impl AxisIndex) -> Tensor<'t> {
        let dim = dim.index(self.rank());
        let (at, distribution) = (Location::caller(), self.trace().distribution());
        self.trace().record(at, &[self], |g, ids| {
            let call = format!("gather_across(\"{axis}\", {dim})");
            let (_, group) = along(distribution, axis, &call)?;
            check_dims(g, ids[0], &[dim], &call)?;
            let rows = gathered_rows(g, ids[0], group);
            Ok(joined(g, rows, dim))
        })
    }

    /// The part at this rank's place of the [sum](Tensor::sum_across) over the ranks along an axis
    /// of the mesh, which is cut along dimension `dim` into as many equal parts (a reduce-scatter).
    #[track_caller]
    pub fn scatter_across(self, axis: &str, dim: impl AxisIndex) -> Tensor<'t> {
        let dim = dim.index(self.rank());
        let (at, distribution) = (Location::caller(), self.trace().distribution());
        self.trace().record(at, &[self], |g, ids| {
            let call = format!("scatter_across(\"{axis}\", {dim})");
            let (distribution, group) = along(distribution, axis, &call)?;
            check_sum(g, ids[0], &call)?;
            check_dims(g, ids[0], &[dim], &call)?;
            let rows = cut(g, ids[0], dim, group, &call)?;
            Ok(scattered_sum(g, rows, &distribution, group))
        })
    }

    /// Exchanges parts with the ranks along an axis of the mesh (an all-to-all): the tensor is cut
    /// along dimension `from` into a part for each rank, and the parts from every rank are joined
    /// along dimension `to`.
    #[track_caller]
    pub fn exchange_across(
        self,
        axis: &str,
        from: impl AxisIndex,
        to: impl AxisIndex,
    ) -> Tensor<'t> {
        let rank = self.rank();
        let (from, to) = (from.index(rank), to.index(rank));
        let (at, distribution) = (Location::caller(), self.trace().distribution());
        self.trace().record(at, &[self], |g, ids| {
            let call = format!("exchange_across(\"{axis}\", {from}, {to})");
            let (_, group) = along(distribution, axis, &call)?;
            check_dims(g, ids[0], &[from, to], &call)?;
            let rows = cut(g, ids[0], from, group, &call)?;
            let rows = exchanged(g, rows, group);
            Ok(joined(g, rows, to))
        })
    }
}

impl Trace {
    /// The place of the rank that runs the program along an axis of the mesh that the session is
    /// on, an i32 scalar. A parameter must have been read before.
    #[track_caller]
    pub fn coordinate(&self, axis: &str) -> Tensor<'_> {
        let (at, distribution) = (Location::caller(), self.distribution());
        self.record(at, &[], |g, _| {
            let (_, group) = along(distribution, axis, &format!("coordinate(\"{axis}\")"))?;
            let place = match group.ranks {
                1 => Size::ZERO,
                _ => Size::symbol(g.symbols.rank(group)?),
            };
            Ok(g.emit(Op::Size(place), &[], DType::I32, Dims::new()))
        })
    }
}

/// The ranks along an axis.
fn along(
    distribution: Option<Distribution>,
    axis: &str,
    call: &str,
) -> Result<(Distribution, Group), String> {
    let distribution = distribution.ok_or_else(|| {
        format!(
            "{call}: no mesh is known; put the session on a World::mesh, and read a parameter \
             before"
        )
    })?;
    let group = distribution
        .along(axis)
        .map_err(|why| format!("{call}: {why}"))?;
    Ok((distribution, group))
}

/// Refuses tensors that cannot be summed over ranks.
fn check_sum(g: &Graph, x: NodeId, call: &str) -> Result<(), String> {
    let dtype = g.dtype(x);
    if !matches!(dtype, DType::F32 | DType::I32) {
        return Err(format!("{call} does not take {dtype}; convert with cast"));
    }
    check_dims(g, x, &[], call)
}

/// Refuses dimensions that are not there, and shapes that may differ between ranks.
fn check_dims(g: &Graph, x: NodeId, dims: &[usize], call: &str) -> Result<(), String> {
    let shown = || format!("{} {}", g.dtype(x), g.symbols.show(g.dims(x)));
    let rank = g.dims(x).len();
    if let Some(dim) = dims.iter().find(|dim| **dim >= rank) {
        return Err(format!("{call} of {}: it has no dimension {dim}", shown()));
    }
    if g.dims(x).iter().any(|d| d.as_fixed().is_none()) {
        return Err(format!(
            "{call} of {}: its length may differ between ranks",
            shown()
        ));
    }
    Ok(())
}

/// A part for each rank, along a new first axis: `[…, d, …] → [ranks, …, d / ranks, …]`.
fn cut(g: &mut Graph, x: NodeId, dim: usize, group: Group, call: &str) -> Result<NodeId, String> {
    let ranks = i64::from(group.ranks);
    let dims = g.dims(x).clone();
    let each = dims[dim]
        .checked_div(ranks)
        .filter(|each| each.checked_mul(Size::fixed(ranks)) == Some(dims[dim]));
    let Some(each) = each else {
        let shown = g.symbols.show(&dims);
        return Err(format!(
            "{call} of {} {shown}: {ranks} ranks share dimension {dim} in equal \
             parts; it must be a multiple of {ranks}",
            g.dtype(x)
        ));
    };
    let mut parts = dims;
    parts[dim] = each;
    parts.insert(dim, Size::fixed(ranks));
    let parts = g.reshape(x, &parts);
    let mut axes: Vec<usize> = (0..g.dims(parts).len()).collect();
    axes.remove(dim);
    axes.insert(0, dim);
    Ok(g.permute(parts, &axes))
}

/// The parts of the ranks along the first axis, joined along a dimension: `[ranks, …, d, …] → […,
/// ranks · d, …]`.
fn joined(g: &mut Graph, rows: NodeId, dim: usize) -> NodeId {
    let mut axes: Vec<usize> = (1..g.dims(rows).len()).collect();
    axes.insert(dim, 0);
    let parts = g.permute(rows, &axes);
    let mut whole = g.dims(parts).clone();
    let ranks = whole.remove(dim);
    whole[dim] = whole[dim].checked_mul(ranks).unwrap_or(Size::ZERO);
    g.reshape(parts, &whole)
}
