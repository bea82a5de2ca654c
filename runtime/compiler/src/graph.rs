//! The graph: nodes in topological order, and the tables they refer to.

mod bases;
mod body;
mod display;
mod variables;
mod verify;

use std::panic::Location;
use std::sync::Arc;

use slabwise_kernels::collective::Group;
use slabwise_kernels::dtype::DType;
use slabwise_kernels::size::Size;
use slabwise_kernels::spec::Dims;
use smallvec::SmallVec;

use crate::ops::{GraphBuilder, NodeId, Op};
use crate::shape::{Extent, Symbols};
pub use bases::Bases;
pub use body::{Body, BodyBuilder, Feed, Kept, PlannedBody};
pub use variables::{Counter, QuantizedPart, QuantizedRole, VariableInfo};
pub use verify::GraphError;

/// Which part of a training step a node belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Phase {
    /// Written by the user.
    Forward,
    /// Made by differentiation.
    Backward,
    /// Recomputed for the backward pass.
    Recompute,
    /// Made by an optimizer.
    Update,
}

/// Where a node comes from: the user's line and the layer.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Origin {
    /// The user's line.
    pub location: &'static Location<'static>,
    /// The path of the layer, such as `body.conv2`; empty outside of layers.
    pub layer: Arc<str>,
    /// Which part of the step.
    pub phase: Phase,
    /// Which micro-batch, where a step runs them one after the other: kernels of a micro-batch run
    /// after those of the earlier ones.
    pub part: u32,
    /// The segment whose interior the backward pass recomputes
    /// (`Tensor::checkpoint`), from 1; 0 outside of all.
    pub segment: u32,
}

/// One operation and its value.
#[derive(Clone, Debug)]
pub struct Node {
    /// The operation.
    pub op: Op,
    /// The values it takes.
    pub inputs: SmallVec<[NodeId; 3]>,
    /// The type of its value.
    pub dtype: DType,
    /// The shape of its value.
    pub dims: Dims,
    /// Index into [`Graph::origins`].
    pub origin: u32,
}

/// An input of a program.
#[derive(Clone, Debug)]
pub struct InputInfo {
    /// Its name.
    pub name: Arc<str>,
    /// Its type.
    pub dtype: DType,
    /// Its shape.
    pub dims: Dims,
    /// The position of the output that takes its bytes.
    pub donated_to: Option<u32>,
}

/// A length that must not be 0 in a run.
#[derive(Clone, Debug)]
pub struct Needed {
    /// The length.
    pub length: Size,
    /// Where that is required, an index of [`Graph::origins`].
    pub origin: u32,
    /// The message for a length of 0.
    pub why: String,
}

/// A computation: nodes in topological order.
#[derive(Clone, Debug, Default)]
pub struct Graph {
    /// Every node, after its operands.
    pub nodes: Vec<Node>,
    /// The inputs that [`Op::Input`] refers to.
    pub inputs: Vec<InputInfo>,
    /// The variables that [`Op::Variable`] and [`Op::Assign`] refer to.
    pub variables: Vec<VariableInfo>,
    /// The variables that count training steps.
    pub counters: Vec<Counter>,
    /// The bodies of scans that [`Op::Scan`] refers to.
    pub bodies: Vec<Arc<Body>>,
    /// The bounded dimensions.
    pub symbols: Symbols,
    /// The places that [`Node::origin`] refers to.
    pub origins: Vec<Origin>,
    /// The requested values.
    pub outputs: Vec<NodeId>,
    /// Values that are never recomputed (`Tensor::keep`); none of them is a view.
    pub kept: Vec<NodeId>,
    /// Lengths that must not be 0: a run with such a length fails before it changes anything.
    pub needed: Vec<Needed>,
    /// Whether it is of a training trace, whose products are summed in order (ADR 18).
    pub is_training: bool,
    /// The origin that emitted nodes get.
    pub current_origin: u32,
    /// The micro-batch that is recorded.
    pub current_part: u32,
}

impl Graph {
    /// The node of an id.
    pub fn node(&self, id: NodeId) -> &Node {
        count_a_look();
        &self.nodes[id.at()]
    }

    /// Every id, in topological order.
    pub fn ids(&self) -> impl DoubleEndedIterator<Item = NodeId> + use<> {
        (0..self.nodes.len() as u32).map(NodeId)
    }

    /// Where a node comes from.
    pub fn origin(&self, id: NodeId) -> &Origin {
        &self.origins[self.node(id).origin as usize]
    }

    /// Sets the origin of the next nodes.
    pub fn set_origin(&mut self, origin: Origin) {
        // The last few are the likely ones; a duplicate further back costs a few bytes only.
        let recent = self.origins.len().saturating_sub(8);
        let found = self.origins[recent..]
            .iter()
            .position(|o| *o == origin)
            .map(|at| recent + at);
        let at = found.unwrap_or_else(|| {
            self.origins.push(origin);
            self.origins.len() - 1
        });
        self.current_origin = at as u32;
    }

    /// The index of a variable of this name, if there is one.
    pub fn variable(&self, name: &str) -> Option<u32> {
        self.variables
            .iter()
            .position(|v| &*v.name == name)
            .map(|at| at as u32)
    }

    /// Excludes a value from recomputation; for a view, the value it shows.
    pub fn keep(&mut self, id: NodeId) {
        self.kept.push(self.below_views(id));
    }

    /// The node whose elements a view shows; any other node itself.
    pub fn below_views(&self, mut id: NodeId) -> NodeId {
        while self.node(id).op.is_view() {
            id = self.node(id).inputs[0];
        }
        id
    }

    /// Whether a view shows every element of the node below it, once.
    pub fn shows_all(&self, mut id: NodeId) -> bool {
        while matches!(self.node(id).op, Op::Reshape | Op::Permute(_)) {
            id = self.node(id).inputs[0];
        }
        !self.node(id).op.is_view()
    }

    /// Refuses a length of 0, at once if it is fixed, else in each run that has it.
    pub fn need(&mut self, length: Size, why: impl FnOnce() -> String) -> Result<(), String> {
        match length.as_fixed() {
            Some(0) => Err(why()),
            Some(_) => Ok(()),
            None => {
                self.needed.push(Needed {
                    length,
                    origin: self.current_origin,
                    why: why(),
                });
                Ok(())
            }
        }
    }

    /// Whether it exchanges bytes with other ranks.
    pub fn has_collectives(&self) -> bool {
        let is_collective = |node: &Node| matches!(node.op, Op::Collective { .. });
        self.nodes.iter().any(is_collective)
    }

    /// Whether its values may differ along the ranks of such groups though the inputs do not: it
    /// exchanges bytes between them, or knows the rank's place.
    pub fn exchanges_along(&self, group: Group) -> bool {
        let exchanges = |node: &Node| match node.op {
            Op::Collective { group: other, .. } => other == group,
            _ => false,
        };
        let known = |(_, _, extent)| extent == Extent::Rank(group);
        self.nodes.iter().any(exchanges) || self.symbols.iter().any(known)
    }

    /// For each node whether its value is requested or excluded from recomputation.
    pub fn pinned(&self) -> Vec<bool> {
        let mut pinned = vec![false; self.nodes.len()];
        self.outputs
            .iter()
            .chain(&self.kept)
            .for_each(|id| pinned[id.at()] = true);
        pinned
    }

    /// The nodes that must run: outputs, effects and their operands.
    pub fn live(&self) -> Vec<bool> {
        let mut live = vec![false; self.nodes.len()];
        for &id in &self.outputs {
            live[id.at()] = true;
        }
        for id in self.ids().rev() {
            let node = self.node(id);
            if live[id.at()] || node.op.is_effect() {
                live[id.at()] = true;
                for input in &node.inputs {
                    live[input.at()] = true;
                }
            }
        }
        live
    }

    /// The consumers of each node's value, in order; a consumer that reads it twice is there twice.
    pub fn consumers(&self) -> Vec<SmallVec<[NodeId; 4]>> {
        let mut consumers = vec![SmallVec::new(); self.nodes.len()];
        for id in self.ids() {
            for input in &self.node(id).inputs {
                consumers[input.at()].push(id);
            }
        }
        consumers
    }

    /// A name for a node's value: layer and operation, as in `stem.conv2d`.
    pub fn name(&self, id: NodeId) -> String {
        let node = self.node(id);
        let origin = &self.origins[node.origin as usize];
        let mut name = match &node.op {
            Op::Input(i) => self.inputs[*i as usize].name.to_string(),
            Op::Variable(v) => self.variables[*v as usize].name.to_string(),
            Op::Assign(v) => format!("{}.update", self.variables[*v as usize].name),
            op if origin.layer.is_empty() => op.name().to_string(),
            op => format!("{}.{}", origin.layer, op.name()),
        };
        match origin.phase {
            Phase::Backward if !name.contains("grad") => name.push_str(".grad"),
            Phase::Recompute => name.push_str(".recomputed"),
            _ => {}
        }
        name
    }
}

thread_local! {
    static LOOKS: std::cell::Cell<u64> = const { std::cell::Cell::new(0) };
}

/// How often this thread has looked at nodes and edges: the measure of the compiler's work in
/// tests. Release builds do not count.
#[doc(hidden)]
pub fn looks() -> u64 {
    LOOKS.get()
}

pub(crate) fn count_a_look() {
    if cfg!(debug_assertions) {
        LOOKS.set(LOOKS.get() + 1);
    }
}

impl GraphBuilder for Graph {
    fn emit(&mut self, op: Op, inputs: &[NodeId], dtype: DType, dims: Dims) -> NodeId {
        let id = NodeId(self.nodes.len() as u32);
        self.nodes.push(Node {
            op,
            inputs: SmallVec::from_slice(inputs),
            dtype,
            dims,
            origin: self.current_origin,
        });
        id
    }

    fn dims(&self, node: NodeId) -> &Dims {
        &self.node(node).dims
    }

    fn dtype(&self, node: NodeId) -> DType {
        self.node(node).dtype
    }
}
