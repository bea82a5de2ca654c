//! The layers that operations belong to.

use std::sync::Arc;

use super::{Building, Line, Trace};
use crate::ops::{NodeId, Op};

impl Trace {
    /// Records the operations of `work` as those of a layer of this name, except where they read a
    /// parameter, whose layer they belong to. Errors, plans and summaries name it.
    pub fn in_layer<R>(&self, name: &str, work: impl FnOnce() -> R) -> R {
        let before = self.building.borrow_mut().layer.replace(name.into());
        let result = work();
        self.building.borrow_mut().layer = before;
        result
    }

    /// Records `work` as that of a layer which the user calls at this line, under its path if it has
    /// one.
    pub(crate) fn call_layer<R>(&self, path: &str, at: Line, work: impl FnOnce() -> R) -> R {
        self.on_behalf(at, || match path {
            "" => work(),
            path => self.in_layer(path, work),
        })
    }
}

impl Building {
    /// The layer of an operation: that of a parameter among its operands, else the one that is
    /// being recorded, else that of the operand that was recorded last and has one. A residual sum is
    /// part of the layer that it closes, whichever side its stream is on.
    pub(super) fn layer(&mut self, operands: &[NodeId]) -> Arc<str> {
        let Building {
            graph,
            bases,
            layer: current,
            ..
        } = self;
        // A transposed or converted weight counts as the weight.
        let mut weight = |id: &&NodeId| {
            let mut base = graph.node(bases.of(graph, **id));
            if let Op::Cast(_) = base.op {
                base = graph.node(bases.of(graph, base.inputs[0]));
            }
            matches!(base.op, Op::Variable(v) if graph.variables[v as usize].is_param)
        };
        let layer = |id: &NodeId| &graph.origin(*id).layer;
        let has_layer = |id: &&NodeId| !layer(id).is_empty();
        let latest = operands.iter().filter(has_layer).max();
        let found = operands
            .iter()
            .filter(&mut weight)
            .map(layer)
            .chain(&*current)
            .chain(latest.map(layer))
            .find(|layer| !layer.is_empty());
        found.map_or_else(|| Arc::from(""), Arc::clone)
    }
}
