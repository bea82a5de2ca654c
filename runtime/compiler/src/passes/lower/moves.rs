//! Kernels that only move data: the fill of a canvas, the copy to a variable.

use slabwise_kernels::scalar::Value;
use slabwise_kernels::spec::{Body, Inst, Operand, Spec, Store};

use super::{Arg, Lowered};
use crate::graph::Graph;
use crate::ops::NodeId;

pub(super) fn fill(graph: &Graph, id: NodeId, value: Value) -> Option<Lowered> {
    let node = graph.node(id);
    let spec = Spec {
        body: Body::Loop,
        dims: node.dims.clone(),
        reduced: 0,
        operands: vec![Operand::contiguous(node.dtype, &node.dims)?],
        indices: vec![],
        code: vec![Inst::Const(value)],
        stores: vec![Store {
            value: 0,
            operand: 0,
        }],
    };
    Some(Lowered {
        name: format!("{}.fill", graph.name(id)),
        spec,
        args: vec![Arg::Buffer(id)],
        after: vec![],
        in_place: vec![],
        node: id,
    })
}

pub(super) fn copy_to_variable(
    graph: &Graph,
    id: NodeId,
    variable: u32,
    after: Vec<usize>,
) -> Option<Lowered> {
    let node = graph.node(id);
    let operand = Operand::contiguous(node.dtype, &node.dims)?;
    let spec = Spec {
        body: Body::Loop,
        dims: node.dims.clone(),
        reduced: 0,
        operands: vec![operand.clone(), operand],
        indices: vec![],
        code: vec![Inst::Load(0)],
        stores: vec![Store {
            value: 0,
            operand: 1,
        }],
    };
    let args = vec![Arg::Buffer(id), Arg::Variable(variable)];
    Some(Lowered {
        name: format!("{}.update", graph.variables[variable as usize].name),
        spec,
        args,
        after,
        in_place: vec![],
        node: id,
    })
}
