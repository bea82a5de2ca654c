//! The layers of a graph and their outputs.

use std::collections::HashMap;
use std::sync::Arc;

use slabwise_kernels::dtype::DType;
use slabwise_kernels::spec::Dims;

use crate::graph::{Graph, Phase};
use crate::ops::{NodeId, Op};

/// The value that a layer gives: its type and shape.
pub(crate) type LayerOutput = (DType, Dims);

/// The layers of a graph in the order of their first operations, each with its output: the last
/// value computed directly from one of the layer's parameters, else its last value.
pub(crate) fn layer_outputs(graph: &Graph) -> Vec<(Arc<str>, LayerOutput)> {
    let mut at: HashMap<&str, usize> = HashMap::new();
    let mut found: Vec<(Arc<str>, NodeId, bool)> = Vec::new();
    let variable = |mut id: NodeId| loop {
        let node = graph.node(id);
        match node.op {
            Op::Variable(v) => return graph.variables[v as usize].is_param,
            Op::Cast(_) => id = node.inputs[0],
            ref op if op.is_view() => id = node.inputs[0],
            _ => return false,
        }
    };
    for id in graph.ids() {
        let (node, origin) = (graph.node(id), graph.origin(id));
        let hidden = matches!(node.op, Op::Variable(_) | Op::Input(_) | Op::Const(_))
            || node.op.is_effect()
            || origin.phase != Phase::Forward
            || origin.layer.is_empty()
            || variable(id);
        if hidden {
            continue;
        }
        let direct = node.inputs.iter().any(|&input| variable(input));
        match at.get(&*origin.layer) {
            None => {
                at.insert(&origin.layer, found.len());
                found.push((origin.layer.clone(), id, direct));
            }
            Some(&row) if direct || !found[row].2 => {
                (found[row].1, found[row].2) = (id, direct);
            }
            Some(_) => {}
        }
    }
    let output = |(layer, id, _): (Arc<str>, NodeId, bool)| {
        let node = graph.node(id);
        (layer, (node.dtype, node.dims.clone()))
    };
    found.into_iter().map(output).collect()
}
