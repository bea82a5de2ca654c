//! Layouts: views resolved to the buffer below them, and copies inserted where a view does not
//! suffice.

mod containers;
mod copies;
mod halves;
mod strides;

use rustc_hash::FxHashMap;
use slabwise_kernels::size::Size;
use slabwise_kernels::spec::Dims;
use smallvec::SmallVec;

use super::error::PassError;
use super::pipeline::Pass;
use crate::backend::HalfProducts;
use crate::graph::{Graph, Kept};
use crate::ops::{GraphBuilder, NodeId, Op};
pub(super) use containers::Containers;
use copies::{copy, one_axis_at_a_time, readable, with_whole_rows};
use halves::{Conversions, operand};
use strides::{along, is_dense, reshape_strides, through};

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
    /// The views of all nodes of a graph.
    pub fn of(graph: &Graph) -> Self {
        let mut views = Views::default();
        views.extend(graph);
        views
    }

    /// Adds the views of nodes that were added to the graph since.
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

/// The pass.
pub struct Legalize {
    /// The products of the device that take operands in halves.
    pub half_products: HalfProducts,
}

impl Pass for Legalize {
    const NAME: &'static str = "legalize";
    type Input = Graph;
    type Output = Graph;

    fn run(&self, graph: &Graph) -> Result<Graph, PassError> {
        Ok(legalize(graph, self.half_products))
    }
}

/// Inserts copies where later stages need a value in a buffer of its own: reshapes that no strides
/// can express, parts of a concatenation or padding that are used elsewhere too, outputs and
/// assigned values that are views or not computed here. Products that take no halves get their
/// operands converted to f32, which gives the same sums: a product of two halves is exact in f32.
/// Conversely, an operand that was converted from halves to f32 is read as it was before, where the
/// kernel can, and else is converted for each use, so that no weight is kept in both types.
pub fn legalize(graph: &Graph, half_products: HalfProducts) -> Graph {
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
    let mut results: FxHashMap<(NodeId, u32), NodeId> = FxHashMap::default();
    let mut conversions = Conversions::default();
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
                        || op.is_opaque()
                        || consumers[source.at()].len() > 1
                        || is_output[source.at()]
                }
                // The value must not be changed under the feet of others by being written into a
                // variable.
                Op::Assign(_) => {
                    let op = &graph.node(source).op;
                    let in_place = matches!(op, Op::SliceAssign { .. });
                    !is_computed(op) || (op.is_opaque() && !in_place)
                }
                Op::Reshape => {
                    views.extend(&out);
                    let strides = |v: View| {
                        reshape_strides(&out, &graph.node(source).dims, &v.strides, &node.dims)
                    };
                    views.view(&out, *input).and_then(strides).is_none()
                }
                Op::Collective { .. } | Op::Custom(_) => {
                    views.extend(&out);
                    let dims = &out.node(*input).dims;
                    let own = contiguous(dims);
                    let whole = |v: View| own.is_some_and(|own| own == v.strides);
                    !views.view(&out, *input).is_some_and(whole)
                }
                // The three words of a key are read by their address.
                Op::Uniform { .. } => k == 0 && graph.node(source).op.is_view(),
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
            *input = operand(
                &mut out,
                &node.op,
                k,
                *input,
                half_products,
                &mut conversions,
            );
            if k == 1 && matches!(node.op, Op::QuantizedMatmul(_)) {
                *input = with_whole_rows(&mut out, &mut views, *input);
            }
            if let Op::Scan(_) = node.op {
                views.extend(&out);
                let outer = usize::from(graph.body(id).is_some_and(|body| body.reads_parts(k)));
                if !is_dense(&out, &views, *input, outer) {
                    *input = copy(&mut out, *input);
                }
            }
        }
        map.push(match &node.op {
            Op::Slice { .. } | Op::Pad { .. } => {
                one_axis_at_a_time(&mut out, &mut views, inputs[0], node)
            }
            Op::ScanResult(result) if results.contains_key(&(inputs[0], *result)) => {
                results[&(inputs[0], *result)]
            }
            // Elements of halves are converted after they are gathered.
            op @ Op::Gather { .. } if out.node(inputs[0]).dtype != node.dtype => {
                let stored = out.node(inputs[0]).dtype;
                let gathered = out.emit(op.clone(), &inputs, stored, node.dims.clone());
                out.cast(gathered, node.dtype)
            }
            op => out.emit(op.clone(), &inputs, node.dtype, node.dims.clone()),
        });
        if let (Op::Scan(_), Some(scan)) = (&node.op, map.last().copied()) {
            // The kernel of a loop writes all results that any loop of its body has.
            for result in 0..graph.body(id).map_or(0, |b| b.graph.outputs.len()) as u32 {
                let body = graph.body(id).and_then(|body| body.planned.as_ref());
                let kept = body.map_or(Kept::All, |body| body.kept[result as usize]);
                if kept != Kept::None
                    && let Some(made) = out.scan_result(scan, result)
                {
                    results.insert((scan, result), made);
                }
            }
        }
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

/// Whether a node's value is made by a kernel that can write it anywhere.
pub(super) fn is_computed(op: &Op) -> bool {
    let leaf = matches!(
        op,
        Op::Input(_) | Op::Variable(_) | Op::Const(_) | Op::Size(_) | Op::Index(_)
    );
    !(leaf || op.is_view() || op.is_effect() || matches!(op, Op::Concat { .. } | Op::Pad { .. }))
}
