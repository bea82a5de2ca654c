//! Assembling lowered kernels into a program: the nodes that they name become values.

use std::collections::hash_map::Entry;
use std::sync::Arc;

use rustc_hash::{FxHashMap, FxHashSet};

use super::{Arg, Lowered};
use crate::graph::Graph;
use crate::ir::{CallId, KernelCall, Program, ValueId};
use crate::ops::NodeId;
use crate::passes::error::PassError;

/// The program of these kernels.
pub(super) fn assemble(graph: &Arc<Graph>, kernels: Vec<Lowered>) -> Result<Program, PassError> {
    let mut program = Program::new(graph.clone());
    let outputs: FxHashSet<NodeId> = graph.outputs.iter().copied().collect();
    let mut value_of: FxHashMap<Arg, ValueId> = FxHashMap::default();
    for arg in kernels.iter().flat_map(|kernel| &kernel.args) {
        let Entry::Vacant(vacant) = value_of.entry(*arg) else {
            continue;
        };
        let value = match *arg {
            Arg::Buffer(node) => {
                let value = Program::value_of_node(graph, node, outputs.contains(&node));
                value.ok_or_else(|| PassError::Overflow {
                    value: graph.name(node),
                    shape: graph.symbols.show(&graph.node(node).dims).to_string(),
                })?
            }
            Arg::Variable(variable) => Program::variable(graph, variable),
            Arg::Sizes => Program::sizes(graph),
        };
        vacant.insert(ValueId(program.values.len() as u32));
        program.values.push(value);
    }
    for kernel in kernels {
        let pair = |(from, to)| (value_of[&Arg::Buffer(from)], value_of[&Arg::Buffer(to)]);
        let in_place = kernel.in_place.into_iter().map(pair);
        let in_place = in_place
            .filter(|&(from, to)| program.may_reuse(from, to))
            .collect();
        let args = kernel.args.iter().map(|arg| value_of[arg]).collect();
        program.kernels.push(KernelCall {
            after: kernel.after.iter().map(|&a| CallId(a as u32)).collect(),
            in_place,
            ..KernelCall::new(kernel.name, kernel.spec, args, kernel.node)
        });
    }
    program.renumber_by_use();
    Ok(program)
}
