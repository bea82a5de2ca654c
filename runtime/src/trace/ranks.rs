//! Steps of several ranks: the weight of each rank in the loss, and the sums of their gradients.

use slabwise_kernels::collective::Group;
use slabwise_kernels::dtype::DType;
use slabwise_kernels::scalar::{ScalarOp, Value};
use slabwise_kernels::size::{Size, Symbol};
use slabwise_kernels::spec::{CollectiveOp, Dims};
use smallvec::SmallVec;

use super::handle::Tensor;
use super::{Building, Held, Line, Trace};
use crate::graph::{Graph, Origin, Phase};
use crate::ops::{GraphBuilder, NodeId, Op};
use crate::params::Params;
use crate::shape;
use crate::world::{Distribution, Shard, Strategy, Tree};

/// The bytes from which on the gradient of a weight is sent by itself; smaller ones are joined.
const LARGE: i64 = 64 << 10;

/// The bytes at which a bucket of small gradients is full.
const BUCKET: i64 = 1 << 20;

/// The sum of a gradient over all ranks.
#[derive(Clone, Copy)]
pub(super) enum Summed {
    /// All of it, in the shape of the weight.
    Whole(NodeId),
    /// The part that this rank updates, as one row.
    Shard(NodeId, Shard),
}

/// A gradient to be summed: a variable, its gradient and the number of elements.
struct Sent {
    variable: u32,
    gradient: NodeId,
    elements: i64,
}

impl Trace {
    /// How the step is distributed over ranks, if it is. The caller's recorded operations depend on
    /// it.
    pub(crate) fn distribution(&self) -> Option<Distribution> {
        let building = &mut *self.building.borrow_mut();
        let distribution = building.params.as_ref().and_then(Params::distribution);
        if !building.distributions.contains(&distribution) {
            building.distributions.push(distribution);
        }
        distribution
    }

    /// Whether all operations that depend on the distribution of the step were recorded for this
    /// one.
    pub(crate) fn is_for(&self, distribution: Option<Distribution>) -> bool {
        self.building
            .borrow()
            .distributions
            .iter()
            .all(|d| *d == distribution)
    }

    /// Whether the trace may exchange bytes with other ranks. This follows from its calls, which are
    /// the same on all ranks, because a mistake of one rank may keep exchanges from being recorded;
    /// those of a training step may then not even have been called.
    pub(crate) fn may_exchange(&self, is_mistaken: bool) -> bool {
        let is_called = !self.building.borrow().distributions.is_empty();
        is_called || is_mistaken && self.is_training()
    }

    /// The weight in the whole batch's mean of each of `parts` equal parts of this rank: by the
    /// number of examples on every rank, if that can differ from run to run.
    pub(crate) fn share(&self, at: Line, distribution: Distribution, parts: usize) -> Tensor<'_> {
        self.record(at, &[], |g, _| {
            let examples = g
                .inputs
                .first()
                .and_then(|input| input.dims.first().copied());
            let examples = examples.filter(|n| n.as_fixed().is_none());
            let Some(examples) = examples.filter(|_| distribution.ranks() > 1) else {
                let share = 1.0 / (distribution.ranks() * parts) as f32;
                return Ok(g.emit(Op::Const(Value::F32(share)), &[], DType::F32, Dims::new()));
            };
            let own = g.emit(Op::Size(examples), &[], DType::I32, Dims::new());
            let own = g.cast(own, DType::F32);
            let total = sum_over(g, own, &distribution, distribution.group);
            let number = Op::Const(Value::F32(parts as f32));
            let parts = g.emit(number, &[], DType::F32, Dims::new());
            let total = g.mul(total, parts);
            Ok(g.scalar(ScalarOp::Div, &[own, total]))
        })
    }
}

impl Trace {
    /// The weight in the whole batch's mean of each of `parts` parts of this rank or, without ranks,
    /// of the step: by the rows of the part, if the batch is cut into [shares](Tensor::shares).
    /// `None` if the parts of a step without ranks are equal.
    ///
    /// # Errors
    /// If two lengths are cut into as many shares, because either may be the batch.
    pub(super) fn shares(
        &self,
        at: Line,
        distribution: Option<Distribution>,
        parts: usize,
    ) -> Result<Option<Vec<Tensor<'_>>>, String> {
        let cut = self.with_graph(|g| {
            let cut = g.symbols.cut_into_shares(parts as u32);
            match cut[..] {
                [one, other, ..] => Err(format!(
                    "minimize_in_parts({parts}): \"{}\" and \"{}\" are both cut by shares({parts}), and the parts are weighed by the rows \
                     of one; cut the other by split, or feed it in parts",
                    g.symbols.name(one),
                    g.symbols.name(other)
                )),
                _ => Ok(cut.first().copied()),
            }
        })?;
        let length = |from: u32| {
            let share = shape::Share {
                rows: cut?,
                parts: parts as u32,
                from,
                to: from + 1,
            };
            self.with_graph(|g| g.symbols.find_share(share))
        };
        let lengths: Option<Vec<Symbol>> = (0..parts as u32).map(length).collect();
        let Some((lengths, rows)) = lengths.zip(cut) else {
            return Ok(distribution.map(|d| vec![self.share(at, d, parts); parts]));
        };
        let number = |g: &mut Graph, size| {
            let number = g.emit(Op::Size(size), &[], DType::I32, Dims::new());
            g.cast(number, DType::F32)
        };
        let total = self.record(at, &[], |g, _| {
            let own = number(g, Size::symbol(rows));
            Ok(match distribution {
                Some(distribution) => sum_over(g, own, &distribution, distribution.group),
                None => own,
            })
        });
        let share = |length| {
            self.record(at, &[total], |g, ids| {
                let own = number(g, Size::symbol(length));
                Ok(g.scalar(ScalarOp::Div, &[own, ids[0]]))
            })
        };
        Ok(Some(lengths.into_iter().map(share).collect()))
    }

    /// The part of a weight that this rank updates, as one row.
    pub(super) fn part_of<'t>(&'t self, at: Line, weight: Tensor<'t>, shard: Shard) -> Tensor<'t> {
        self.record(at, &[weight], |g, ids| {
            let rank = Size::symbol(g.symbols.rank(shard.group)?);
            let each = Size::fixed(shard.elements);
            let start = each.checked_mul(rank).ok_or("the weight is too long")?;
            let row = g.reshape(ids[0], &Dims::from_slice(&[Size::fixed(shard.whole)]));
            let (dtype, own) = (g.dtype(row), Dims::from_slice(&[each]));
            if shard.elements * i64::from(shard.group.ranks) == shard.whole {
                let slice = Op::Slice {
                    start: Dims::from_slice(&[start]),
                    step: SmallVec::from_elem(1, 1),
                };
                return Ok(g.emit(slice, &[row], dtype, own));
            }
            // Padding has the value of the last element. Its new value is dropped.
            let last = i32::try_from(shard.whole - 1).map_err(|_| "the weight is too long")?;
            let strides = Dims::from_slice(&[Size::ONE]);
            let mut number = |op| g.emit(op, &[], DType::I32, Dims::new());
            let start = number(Op::Size(start));
            let last = number(Op::Const(Value::I32(last)));
            let place = g.emit(Op::Index(strides), &[], DType::I32, own.clone());
            let (start, last) = (g.broadcast(start, &own), g.broadcast(last, &own));
            let place = g.add(place, start);
            let place = g.scalar(ScalarOp::Min, &[place, last]);
            Ok(g.emit(Op::Gather { axis: 0 }, &[row, place], dtype, own))
        })
    }

    /// A weight from the parts that the ranks have updated.
    pub(crate) fn whole_of<'t>(
        &'t self,
        at: Line,
        variable: u32,
        part: Tensor<'t>,
        shard: Shard,
    ) -> Tensor<'t> {
        let dims = self.info(variable).dims;
        self.record(at, &[part], |g, ids| {
            if g.dims(ids[0])[..] != [Size::fixed(shard.elements)] {
                return Err(format!(
                    "a part of {} elements is set to {}",
                    shard.elements,
                    g.symbols.show(g.dims(ids[0]))
                ));
            }
            let row = gathered(g, ids[0], shard.group);
            let row = narrowed(g, row, 0, shard.whole);
            Ok(g.reshape(row, &dims))
        })
    }
}

impl Building {
    /// The gradients of the whole batch on every rank, or of its part of a weight, from those of
    /// each rank's part of the batch.
    ///
    /// Along an axis of a mesh other than the data axis all ranks have the same loss. Where values
    /// are exchanged along it, a rank's gradient is that of the sum of these losses with respect to
    /// the rank's copy of the weight, so that the mean over the ranks is the gradient of the loss
    /// with respect to the weight.
    pub(super) fn gradients_of_all_ranks(
        &mut self,
        at: Line,
        gradients: Vec<(u32, NodeId)>,
        distribution: Distribution,
    ) -> Vec<(u32, Summed)> {
        let others = distribution.axes.iter().flat_map(|axes| axes.others());
        let used = others.filter(|group| group.ranks > 1 && self.graph.exchanges_along(*group));
        let used: Vec<Group> = used.collect();
        let mut gradients = gradients;
        for group in used {
            let replicated = Distribution {
                group,
                strategy: Strategy::Replicated,
                ..distribution
            };
            let sums = self.sums_of_gradients(at, gradients, &replicated);
            gradients = sums
                .into_iter()
                .map(|(variable, sum)| {
                    let (Summed::Whole(sum) | Summed::Shard(sum, _)) = sum;
                    self.origin_of(at, variable);
                    let mean = 1.0 / group.ranks as f32;
                    let g = &mut self.graph;
                    let dims = g.dims(sum).clone();
                    let mean = g.full(mean, DType::F32, &dims);
                    (variable, g.mul(sum, mean))
                })
                .collect();
        }
        if distribution.ranks() == 1 {
            let whole = gradients.into_iter();
            return whole.map(|(v, g)| (v, Summed::Whole(g))).collect();
        }
        self.sums_of_gradients(at, gradients, &distribution)
    }

    /// The sums of gradients over the ranks of a group.
    fn sums_of_gradients(
        &mut self,
        at: Line,
        gradients: Vec<(u32, NodeId)>,
        distribution: &Distribution,
    ) -> Vec<(u32, Summed)> {
        let (group, ranks) = (distribution.group, distribution.ranks());
        let mut summed: Vec<(u32, Summed)> = Vec::with_capacity(gradients.len());
        let mut bucket: Vec<Sent> = Vec::new();
        let mut bytes = 0;
        // The backward pass computes the gradients of the last layers first.
        for (variable, gradient) in gradients.into_iter().rev() {
            let elements = self.graph.dims(gradient).iter();
            let elements = elements.map(|d| d.as_fixed().unwrap_or(0)).product();
            let sent = Sent {
                variable,
                gradient,
                elements,
            };
            let is_sharded = distribution.strategy == Strategy::ShardedState;
            if elements * 4 >= LARGE && (is_sharded || elements % ranks as i64 == 0) {
                self.origin_of(at, variable);
                let g = &mut self.graph;
                let row = row_of(g, &sent);
                let row = joined(g, SmallVec::from_slice(&[row]), elements, ranks);
                let own = sum_of_part(g, row, distribution, group);
                let sum = if is_sharded {
                    let shard = Shard {
                        group,
                        elements: (elements as u64).div_ceil(ranks as u64) as i64,
                        whole: elements,
                    };
                    Summed::Shard(own, shard)
                } else {
                    let sum = gathered(g, own, group);
                    Summed::Whole(part(g, sum, 0, &sent))
                };
                summed.push((variable, sum));
                continue;
            }
            bytes += elements * 4;
            bucket.push(sent);
            if bytes >= BUCKET {
                self.send(at, std::mem::take(&mut bucket), distribution, &mut summed);
                bytes = 0;
            }
        }
        self.send(at, bucket, distribution, &mut summed);
        summed.sort_unstable_by_key(|(variable, _)| *variable);
        summed
    }

    /// Sums the gradients of a bucket over ranks.
    fn send(
        &mut self,
        at: Line,
        bucket: Vec<Sent>,
        distribution: &Distribution,
        summed: &mut Vec<(u32, Summed)>,
    ) {
        let Some(first) = bucket.first() else { return };
        let (group, ranks) = (distribution.group, distribution.ranks());
        self.origin_of(at, first.variable);
        let g = &mut self.graph;
        let rows = bucket.iter().map(|sent| row_of(g, sent)).collect();
        let elements = bucket.iter().map(|sent| sent.elements).sum();
        let whole = joined(g, rows, elements, ranks);
        let own = sum_of_part(g, whole, distribution, group);
        let sum = gathered(g, own, group);
        let mut start = 0;
        for sent in bucket {
            summed.push((sent.variable, Summed::Whole(part(g, sum, start, &sent))));
            start += sent.elements;
        }
    }

    /// Makes the next nodes part of the backward pass, in the layer of a variable.
    pub(super) fn origin_of(&mut self, at: Line, variable: u32) {
        let Held { node, .. } = self.variables[variable as usize];
        let layer = self.graph.origin(node).layer.clone();
        let location = self.user_line(at);
        self.graph.set_origin(Origin {
            location,
            layer,
            phase: Phase::Backward,
            segment: 0,
            part: self.graph.current_part,
        });
    }
}

/// A gradient as one row.
fn row_of(g: &mut Graph, sent: &Sent) -> NodeId {
    let row = Dims::from_slice(&[Size::fixed(sent.elements)]);
    g.reshape(sent.gradient, &row)
}

/// Rows of `elements` elements as one, padded with zeros to a length that the ranks divide.
fn joined(g: &mut Graph, mut rows: SmallVec<[NodeId; 8]>, elements: i64, ranks: usize) -> NodeId {
    let length = (elements as u64).next_multiple_of(ranks as u64) as i64;
    if length > elements {
        let padding = Dims::from_slice(&[Size::fixed(length - elements)]);
        rows.push(g.full(0.0, DType::F32, &padding));
    }
    let dims = Dims::from_slice(&[Size::fixed(length)]);
    match rows[..] {
        [one] => one,
        _ => g.emit(Op::Concat { axis: 0 }, &rows, DType::F32, dims),
    }
}

/// The gradient that begins at a place of a row, in its own shape.
fn part(g: &mut Graph, row: NodeId, start: i64, sent: &Sent) -> NodeId {
    let dims = g.dims(sent.gradient).clone();
    let part = narrowed(g, row, start, sent.elements);
    g.reshape(part, &dims)
}

/// The elements of a row from a place on.
fn narrowed(g: &mut Graph, row: NodeId, start: i64, elements: i64) -> NodeId {
    let own = Dims::from_slice(&[Size::fixed(elements)]);
    if g.dims(row) == &own {
        return row;
    }
    let slice = Op::Slice {
        start: Dims::from_slice(&[Size::fixed(start)]),
        step: SmallVec::from_elem(1, 1),
    };
    let dtype = g.dtype(row);
    g.emit(slice, &[row], dtype, own)
}

/// The sum over the ranks of a group of this rank's part of a row: each rank adds up one part of
/// all rows.
fn sum_of_part(g: &mut Graph, row: NodeId, distribution: &Distribution, group: Group) -> NodeId {
    let each = g.dims(row)[0].checked_div(i64::from(group.ranks));
    let rows = Size::fixed(i64::from(group.ranks));
    let parts = Dims::from_slice(&[rows, each.unwrap_or(Size::ZERO)]);
    let parts = g.reshape(row, &parts);
    scattered_sum(g, parts, distribution, group)
}

/// `[ranks, …] → […]`: the row at this rank's place, added up over the ranks of a group.
pub(crate) fn scattered_sum(
    g: &mut Graph,
    rows: NodeId,
    distribution: &Distribution,
    group: Group,
) -> NodeId {
    let (dtype, dims) = (g.dtype(rows), Dims::from_slice(&g.dims(rows)[1..]));
    if group.ranks == 1 {
        return g.reshape(rows, &dims);
    }
    if distribution.sums_in_place && dtype == DType::F32 {
        let op = CollectiveOp::ReduceScatter;
        return g.emit(Op::Collective { op, group }, &[rows], dtype, dims);
    }
    let received = exchanged(g, rows, group);
    sum_of_rows(g, received, group.size())
}

/// `[ranks, …] → [ranks, …]`: the row for this rank of every rank of a group.
pub(crate) fn exchanged(g: &mut Graph, rows: NodeId, group: Group) -> NodeId {
    if group.ranks == 1 {
        return rows;
    }
    let (dtype, dims) = (g.dtype(rows), g.dims(rows).clone());
    let op = CollectiveOp::AllToAll;
    g.emit(Op::Collective { op, group }, &[rows], dtype, dims)
}

/// `[…] → [ranks, …]`: the values of every rank of a group.
pub(crate) fn gathered_rows(g: &mut Graph, own: NodeId, group: Group) -> NodeId {
    let (dtype, rows) = (g.dtype(own), Size::fixed(i64::from(group.ranks)));
    let dims = g.dims(own).iter().copied();
    let all: Dims = std::iter::once(rows).chain(dims).collect();
    if group.ranks == 1 {
        return g.reshape(own, &all);
    }
    let op = CollectiveOp::AllGather;
    g.emit(Op::Collective { op, group }, &[own], dtype, all)
}

/// The parts of every rank as one row. With [`sum_of_part`] a rank sends 2(ranks − 1)/ranks of the
/// row's bytes.
fn gathered(g: &mut Graph, part: NodeId, group: Group) -> NodeId {
    let all = gathered_rows(g, part, group);
    let length = g.dims(all)[0].checked_mul(g.dims(all)[1]);
    g.reshape(all, &Dims::from_slice(&[length.unwrap_or(Size::ZERO)]))
}

/// The sum of a value of fixed shape over the ranks of a group, on each of them. Small values go to
/// every rank; of large ones each rank adds up a part, with the same bits.
pub(crate) fn sum_over(
    g: &mut Graph,
    own: NodeId,
    distribution: &Distribution,
    group: Group,
) -> NodeId {
    if group.ranks == 1 {
        return own;
    }
    let dims = g.dims(own).clone();
    let elements: i64 = dims.iter().map(|d| d.as_fixed().unwrap_or(0)).product();
    if elements * 4 >= LARGE && elements % i64::from(group.ranks) == 0 {
        let row = g.reshape(own, &Dims::from_slice(&[Size::fixed(elements)]));
        let part = sum_of_part(g, row, distribution, group);
        let sum = gathered(g, part, group);
        return g.reshape(sum, &dims);
    }
    let all = gathered_rows(g, own, group);
    sum_of_rows(g, all, group.size())
}

/// `[ranks, …] → […]`: the rows, added in the tree of that many ranks.
fn sum_of_rows(g: &mut Graph, rows: NodeId, ranks: usize) -> NodeId {
    let (dtype, dims) = (g.dtype(rows), g.dims(rows).clone());
    let mut row = dims.clone();
    row[0] = Size::ONE;
    let tree = Tree::of(ranks);
    let mut sum = tree.sum();
    for rank in 0..ranks {
        let mut start: Dims = SmallVec::from_elem(Size::ZERO, dims.len());
        start[0] = Size::fixed(rank as i64);
        let slice = Op::Slice {
            start,
            step: SmallVec::from_elem(1, dims.len()),
        };
        let one = g.emit(slice, &[rows], dtype, row.clone());
        sum.push(one, &mut |a, b| g.add(a, b));
    }
    let own = Dims::from_slice(&dims[1..]);
    let sum = sum.finish().unwrap_or(rows);
    g.reshape(sum, &own)
}
