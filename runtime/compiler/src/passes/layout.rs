//! Where values lie: views resolved to the buffer they look at, and copies inserted where no view
//! can do.

use slabwise_kernels::dtype::DType;
use slabwise_kernels::size::{Env, Size};
use slabwise_kernels::spec::Dims;
use smallvec::SmallVec;

use super::error::PassError;
use super::pipeline::Pass;
use crate::graph::{Graph, Node};
use crate::ops::{Emit, NodeId, Op};

/// How a value is found in the buffer of another node: element `offset + Σ coordinateᵢ · stridesᵢ`.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct View {
    /// The node whose buffer it is; not a view itself.
    pub base: NodeId,
    /// Elements before the first.
    pub offset: Size,
    /// Elements between neighbours, per axis of the value.
    pub strides: Dims,
}

/// For each axis of a base node, the axis of the value that runs along it; `None` for axes of
/// length 1.
pub(super) type AxisMap = SmallVec<[Option<u8>; 6]>;

/// Row-major strides of a contiguous buffer, or `None` where one has no form as a size.
pub(super) fn contiguous(dims: &[Size]) -> Option<Dims> {
    let mut strides: Dims = SmallVec::from_elem(Size::ONE, dims.len());
    let mut stride = Size::ONE;
    for (slot, &dim) in strides.iter_mut().zip(dims).rev() {
        *slot = stride;
        stride = stride.checked_mul(dim)?;
    }
    Some(strides)
}

/// The base of each view, derived from that of the view below it.
#[derive(Default)]
pub(super) struct Views {
    /// For each node the place in `seen`, if it is a view.
    at: Vec<u32>,
    seen: Vec<Seen>,
}

struct Seen {
    /// The node below all views.
    source: NodeId,
    /// For each axis of that, the axis of the view along it; `None` if a view on the way does more
    /// than rename, repeat or insert axes.
    axes: Option<AxisMap>,
    /// Where it lies; `None` if a reshape on the way has no strides.
    view: Option<View>,
}

impl Views {
    /// Of all views of a graph.
    pub fn of(graph: &Graph) -> Self {
        let mut views = Views::default();
        views.extend(graph);
        views
    }

    /// Of those too that the graph has got since.
    fn extend(&mut self, graph: &Graph) {
        for node in &graph.nodes[self.at.len()..] {
            self.at.push(self.seen.len() as u32);
            if !node.op.is_view() {
                continue;
            }
            let input = node.inputs[0];
            let from = &graph.node(input).dims;
            let (source, below) = self.axes(graph, input);
            let axes = below.and_then(|below| {
                let through = along(node, from)?;
                Some(
                    below
                        .iter()
                        .map(|a| a.and_then(|a| through[usize::from(a)]))
                        .collect(),
                )
            });
            let view = self
                .view(graph, input)
                .and_then(|v| through(graph, node, from, v));
            self.seen.push(Seen { source, axes, view });
        }
    }

    /// The buffer that a value lies in, and how; `None` if a reshape on the way has no strides.
    pub fn view(&self, graph: &Graph, id: NodeId) -> Option<View> {
        let node = graph.node(id);
        if node.op.is_view() {
            return self.seen[self.at[id.at()] as usize].view.clone();
        }
        let strides = if let Op::Index(strides) = &node.op {
            strides.clone()
        } else {
            contiguous(&node.dims)?
        };
        Some(View {
            base: id,
            offset: Size::ZERO,
            strides,
        })
    }

    /// The node below views that only rename, repeat or insert axes and, for each of its axes, the
    /// axis of `id` along it. `None` for the map if a view on the way does more than that.
    pub fn axes(&self, graph: &Graph, id: NodeId) -> (NodeId, Option<AxisMap>) {
        let node = graph.node(id);
        if node.op.is_view() {
            let Seen { source, axes, .. } = &self.seen[self.at[id.at()] as usize];
            return (*source, axes.clone());
        }
        (
            id,
            Some(
                (0..node.dims.len())
                    .map(|i| (!node.dims[i].is(1)).then_some(i as u8))
                    .collect(),
            ),
        )
    }
}

/// For each value the concatenation or padding that it is a part of. Such a value has no other use:
/// [`legalise`] sees to that.
pub(super) struct Containers(Vec<Option<(NodeId, Size)>>);

impl Containers {
    /// Of every value of a graph.
    pub fn of_all(graph: &Graph) -> Self {
        let mut found: Vec<Option<(NodeId, Size)>> = vec![None; graph.nodes.len()];
        for id in graph.ids() {
            let node = graph.node(id);
            let Op::Concat { axis } = node.op else {
                if let Op::Pad { .. } = node.op {
                    found[node.inputs[0].at()].get_or_insert((id, Size::ZERO));
                }
                continue;
            };
            let mut start = Some(Size::ZERO);
            for part in &node.inputs {
                // Its length has a form, so that all starts have one.
                let Some(at) = start else { break };
                found[part.at()].get_or_insert((id, at));
                start = at.checked_add(graph.node(*part).dims[axis]);
            }
        }
        Containers(found)
    }

    /// The concatenation or padding.
    pub fn of(&self, id: NodeId) -> Option<NodeId> {
        self.0[id.at()].map(|(container, _)| container)
    }

    /// The concatenation or padding with the start and the step of the part along each axis.
    pub fn place(&self, graph: &Graph, id: NodeId) -> Option<(NodeId, Dims, SmallVec<[u32; 6]>)> {
        let (container, at) = self.0[id.at()]?;
        let node = graph.node(container);
        let rank = node.dims.len();
        Some(match &node.op {
            Op::Pad { start, step, .. } => (container, start.clone(), step.clone()),
            op => {
                let mut start: Dims = SmallVec::from_elem(Size::ZERO, rank);
                if let Op::Concat { axis } = op {
                    start[*axis] = at;
                }
                (container, start, SmallVec::from_elem(1, rank))
            }
        })
    }
}

/// How a view of a value that is found like this is found.
fn through(graph: &Graph, node: &Node, from: &Dims, mut v: View) -> Option<View> {
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
fn along(node: &Node, from: &Dims) -> Option<AxisMap> {
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
fn reshape_strides(graph: &Graph, from: &Dims, strides: &Dims, to: &Dims) -> Option<Dims> {
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

/// The pass.
pub struct Legalize {
    /// Whether matrix products and convolutions of the device take halves.
    pub half_products: bool,
}

impl Pass for Legalize {
    const NAME: &'static str = "legalize";
    type Input = Graph;
    type Output = Graph;

    fn run(&self, graph: &Graph) -> Result<Graph, PassError> {
        Ok(legalise(graph, self.half_products))
    }
}

/// Inserts copies where later stages need a value in a buffer of its own: reshapes that no strides
/// can express, parts of a concatenation or padding that are used elsewhere too, outputs and
/// assigned values that are views or not computed here. Unless `half_products`, matrix products and
/// convolutions of halves get their operands converted to f32, which gives the same sums: a product
/// of two halves is exact in f32.
pub fn legalise(graph: &Graph, half_products: bool) -> Graph {
    let consumers = graph.consumers();
    let mut is_output = vec![false; graph.nodes.len()];
    for output in &graph.outputs {
        is_output[output.at()] = true;
    }
    let mut out = Graph {
        nodes: Vec::with_capacity(graph.nodes.len()),
        ..graph.clone()
    };
    let mut views = Views::default();
    let mut map: Vec<NodeId> = Vec::with_capacity(graph.nodes.len());
    for id in graph.ids() {
        let node = graph.node(id);
        let mut inputs: SmallVec<[NodeId; 3]> = node.inputs.iter().map(|i| map[i.at()]).collect();
        out.current_origin = node.origin;
        for (k, input) in inputs.iter_mut().enumerate() {
            let source = node.inputs[k];
            let needs_own = match &node.op {
                Op::Concat { .. } | Op::Pad { .. } => {
                    let op = &graph.node(source).op;
                    !is_computed(op)
                        || op.stands_alone()
                        || consumers[source.at()].len() > 1
                        || is_output[source.at()]
                }
                // The value must not be changed under the feet of others by being written into a
                // variable.
                Op::Assign(_) => {
                    !is_computed(&graph.node(source).op) || graph.node(source).op.stands_alone()
                }
                Op::Reshape => {
                    views.extend(&out);
                    let strides = |v: View| {
                        reshape_strides(&out, &graph.node(source).dims, &v.strides, &node.dims)
                    };
                    views.view(&out, *input).and_then(strides).is_none()
                }
                _ => false,
            };
            let pointwise = needs_own
                || node.op.is_pointwise()
                || matches!(node.op, Op::Reduce(..) | Op::Uniform { .. });
            if !node.op.is_view() || needs_own {
                *input = readable(&mut out, &mut views, *input, pointwise);
            }
            if needs_own {
                *input = copy(&mut out, *input);
            }
            let product = matches!(
                node.op,
                Op::Matmul | Op::Conv2d(_) | Op::Conv2dInputGrad(_) | Op::Conv2dWeightGrad(_)
            );
            if product && !half_products {
                *input = if out.node(*input).dtype.is_half() {
                    out.cast(*input, DType::F32)
                } else {
                    *input
                };
            }
        }
        map.push(match &node.op {
            Op::Slice { .. } | Op::Pad { .. } => {
                one_axis_at_a_time(&mut out, &mut views, inputs[0], node)
            }
            op => out.emit(op.clone(), &inputs, node.dtype, node.dims.clone()),
        });
    }
    out.kept.iter_mut().for_each(|id| *id = map[id.at()]);
    // A value may have turned out to be a number or an index, which has no buffer to be kept in;
    // inputs and variables are in memory anyway.
    let nodes = &out.nodes;
    out.kept.retain(|id| {
        is_computed(&nodes[id.at()].op)
            || matches!(nodes[id.at()].op, Op::Concat { .. } | Op::Pad { .. })
    });
    let mut taken = vec![false; graph.nodes.len()];
    for (at, id) in graph.outputs.iter().enumerate() {
        let node = graph.node(*id);
        let own = is_computed(&node.op) || matches!(node.op, Op::Concat { .. } | Op::Pad { .. });
        // Two outputs of one value get a buffer each: either may be donated or kept on its own.
        let shared = std::mem::replace(&mut taken[id.at()], true);
        let value = map[id.at()];
        out.outputs[at] = if own && !shared {
            value
        } else {
            out.current_origin = node.origin;
            let value = readable(&mut out, &mut views, value, true);
            copy(&mut out, value)
        };
    }
    out
}

/// A slice or padding. Where the first element lies at a sum that has no form as a size (starts
/// along two axes, with strides of different lengths), it becomes one along each axis, with copies
/// between them.
fn one_axis_at_a_time(out: &mut Graph, views: &mut Views, input: NodeId, node: &Node) -> NodeId {
    let (start, step, pads) = match &node.op {
        Op::Slice { start, step } => (start, step, false),
        Op::Pad { start, step, .. } => (start, step, true),
        op => unreachable!("{} is no slice", op.name()),
    };
    let has_form = |out: &Graph, views: &mut Views, id: NodeId| {
        views.extend(out);
        views.view(out, id).is_some()
    };
    let first_of = |dims: &[Size], start: &[Size]| {
        let strides = contiguous(dims)?;
        start
            .iter()
            .zip(&strides)
            .try_fold(Size::ZERO, |sum, (start, stride)| {
                sum.checked_add(start.checked_mul(*stride)?)
            })
    };
    let whole = if pads {
        first_of(&node.dims, start).is_some()
    } else {
        true
    };
    if whole {
        let made = out.emit(node.op.clone(), &[input], node.dtype, node.dims.clone());
        // A form that is missing below the slice is not missing because of it.
        if pads || has_form(out, views, made) || !has_form(out, views, input) {
            return made;
        }
    }
    let mut value = input;
    for axis in 0..start.len() {
        let mut dims = out.node(value).dims.clone();
        if dims[axis] == node.dims[axis] && start[axis].is(0) && step[axis] == 1 {
            continue;
        }
        dims[axis] = node.dims[axis];
        let mut along: Dims = SmallVec::from_elem(Size::ZERO, start.len());
        let mut by = SmallVec::from_elem(1, start.len());
        (along[axis], by[axis]) = (start[axis], step[axis]);
        let op = match &node.op {
            Op::Pad { value, .. } => Op::Pad {
                start: along,
                step: by,
                value: *value,
            },
            _ => Op::Slice {
                start: along,
                step: by,
            },
        };
        // A padding is of a value of its own.
        let below = if pads && value != input {
            copy(out, value)
        } else {
            value
        };
        value = out.emit(op.clone(), &[below], node.dtype, dims.clone());
        if !pads && !has_form(out, views, value) {
            let below = readable(out, views, below, true);
            let below = copy(out, below);
            value = out.emit(op, &[below], node.dtype, dims);
        }
    }
    value
}

/// A number or an index lies in no buffer: kernels make it themselves. Where a use cannot (operands
/// of anchors, views that do more than rename and repeat), it gets one.
fn readable(out: &mut Graph, views: &mut Views, id: NodeId, pointwise: bool) -> NodeId {
    views.extend(out);
    let (source, axes) = views.axes(out, id);
    let made = matches!(
        out.node(source).op,
        Op::Const(_) | Op::Size(_) | Op::Index(_)
    );
    if made && !(pointwise && axes.is_some()) {
        over_copy(out, id)
    } else {
        id
    }
}

/// The same views over a copy of their base.
fn over_copy(out: &mut Graph, id: NodeId) -> NodeId {
    let node = out.node(id).clone();
    if !node.op.is_view() {
        return copy(out, id);
    }
    let below = over_copy(out, node.inputs[0]);
    out.emit(node.op, &[below], node.dtype, node.dims)
}

fn copy(out: &mut Graph, id: NodeId) -> NodeId {
    let node = out.node(id);
    let (dtype, dims) = (node.dtype, node.dims.clone());
    out.emit(Op::Copy, &[id], dtype, dims)
}

/// Whether a node's value is made by a kernel that can write it anywhere.
pub(super) fn is_computed(op: &Op) -> bool {
    let leaf = matches!(
        op,
        Op::Input(_) | Op::Variable(_) | Op::Const(_) | Op::Size(_) | Op::Index(_)
    );
    !(leaf || op.is_view() || op.is_effect() || matches!(op, Op::Concat { .. } | Op::Pad { .. }))
}
