//! Gradients of attention in halves, where all that reads them rounds them.
//!
//! In mixed precision a gradient is rounded once all contributions to it are added. A kernel that
//! computes the gradients of attention writes them rounded if there is no other contribution, instead of
//! leaving that to a kernel that reads them in f32. They are the same numbers.

use slabwise_kernels::dtype::DType;
use smallvec::SmallVec;

use super::error::PassError;
use super::pipeline::Pass;
use crate::graph::Graph;
use crate::ops::{GraphBuilder, NodeId, Op};

/// The pass, for devices whose kernels can write them so.
pub struct RoundGradients;

impl Pass for RoundGradients {
    const NAME: &'static str = "round_gradients";
    type Input = Graph;
    type Output = Option<Graph>;

    fn run(&self, graph: &Graph) -> Result<Option<Graph>, PassError> {
        Ok(round_gradients(graph))
    }
}

/// The graph with gradients of attention in halves, each behind a conversion back to f32, which
/// [`super::simplify()`] joins with the conversions of the readers. `None` if there are none.
pub fn round_gradients(graph: &Graph) -> Option<Graph> {
    let is_gradient = |id: &NodeId| matches!(graph.node(*id).op, Op::AttentionGrad { .. });
    graph.ids().find(is_gradient)?;
    let consumers = graph.consumers();
    let mut out = Graph {
        nodes: Vec::with_capacity(graph.nodes.len()),
        ..graph.clone()
    };
    let mut map: Vec<NodeId> = Vec::with_capacity(graph.nodes.len());
    let mut changes = false;
    for id in graph.ids() {
        let node = graph.node(id);
        let inputs: SmallVec<[NodeId; 3]> = node.inputs.iter().map(|i| map[i.at()]).collect();
        out.current_origin = node.origin;
        let half = is_gradient(&id)
            .then(|| narrowed(graph, &consumers, id))
            .flatten();
        changes |= half.is_some();
        let dtype = half.unwrap_or(node.dtype);
        let new = out.emit(node.op.clone(), &inputs, dtype, node.dims.clone());
        map.push(match half {
            Some(_) => out.cast(new, node.dtype),
            None => new,
        });
    }
    for list in [&mut out.kept, &mut out.outputs] {
        list.iter_mut().for_each(|id| *id = map[id.at()]);
    }
    out.current_origin = graph.current_origin;
    changes.then_some(out)
}

/// The type of halves to which all readers of a value, and of views of it, convert it.
fn narrowed(graph: &Graph, consumers: &[SmallVec<[NodeId; 4]>], id: NodeId) -> Option<DType> {
    let (mut open, mut found) = (vec![id], None);
    while let Some(at) = open.pop() {
        if graph.outputs.contains(&at) || graph.kept.contains(&at) {
            return None;
        }
        for &user in &consumers[at.at()] {
            match graph.node(user).op {
                Op::Cast(to) if to.is_half() && found.is_none_or(|known| known == to) => {
                    found = Some(to);
                }
                ref op if op.is_view() => open.push(user),
                _ => return None,
            }
        }
    }
    found
}
