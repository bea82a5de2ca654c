//! max_pool(relu(x)) → relu(max_pool(x)), with the gradient: relu then runs on the smaller result,
//! and its large result need not be kept for the backward pass.
//!
//! With r = relu(x), differentiation makes
//!
//! ```text
//! y  = max_pool(r)                a = positions(r)
//! dx = select(r > 0, max_pool.grad(dy, a), 0)
//! ```
//!
//! and this is built instead:
//!
//! ```text
//! y  = relu(max_pool(x))          a = positions(x)
//! dx = max_pool.grad(select(y > 0, dy, 0), a)
//! ```
//!
//! *Forward* both give max(0, the largest): relu is monotone and keeps NaN. *Backward*, a window
//! whose maximum is positive has its first maximum at the same place in x and in r, and passes dy
//! on in both. A window whose maximum is not positive, or is NaN, passes dy to a place where r > 0
//! does not hold, and there the old mask, here the new one, makes it 0. Every place adds the same
//! numbers in the same order, except for added zeros. The sign of a zero may differ.

use rustc_hash::FxHashMap;
use slabwise_kernels::dtype::DType;
use slabwise_kernels::scalar::{ScalarOp, Value};
use slabwise_kernels::spec::{PoolKind, Window};
use smallvec::SmallVec;

use super::{Builder, constant};
use crate::graph::Graph;
use crate::ops::{GraphBuilder, NodeId, Op};

/// The replacement of a node of the pattern; ids are those of the old graph.
pub(super) enum Step {
    /// A pooling of relu(x): relu of the pooling of x.
    Pool {
        /// The operand of relu.
        x: NodeId,
    },
    /// The positions in relu(x): the positions in x.
    Positions {
        /// The operand of relu.
        x: NodeId,
    },
    /// The masked gradient: the gradient of the masked.
    Gradient {
        /// The pooling of relu(x).
        pooled: NodeId,
        /// The gradient of the pooling's result.
        dy: NodeId,
        /// The positions.
        positions: NodeId,
        /// The geometry.
        window: Window,
    },
}

impl Step {
    /// The node in the new graph that stands for node `id` of the old one.
    pub(super) fn build(&self, b: &mut Builder, old: &Graph, id: NodeId, map: &[NodeId]) -> NodeId {
        let node = old.node(id);
        match self {
            Step::Pool { x } => {
                let pooled = b.emit(
                    node.op.clone(),
                    &[map[x.at()]],
                    node.dtype,
                    node.dims.clone(),
                );
                b.scalar(ScalarOp::Relu, &[pooled])
            }
            Step::Positions { x } => b.emit(
                node.op.clone(),
                &[map[x.at()]],
                node.dtype,
                node.dims.clone(),
            ),
            Step::Gradient {
                pooled,
                dy,
                positions,
                window,
            } => {
                let dims = old.dims(*pooled).clone();
                let zero = b.full(0.0, DType::F32, &dims);
                let off = b.scalar(ScalarOp::Le, &[map[pooled.at()], zero]);
                let masked = b.scalar(ScalarOp::Select, &[off, zero, map[dy.at()]]);
                let op = Op::Pool2dGrad(PoolKind::Max, *window);
                b.emit(
                    op,
                    &[masked, map[positions.at()]],
                    DType::F32,
                    node.dims.clone(),
                )
            }
        }
    }
}

/// The nodes that change, over all relus of a graph whose every use is part of the pattern.
pub(super) fn find(graph: &Graph, live: &[bool]) -> FxHashMap<NodeId, Step> {
    let mut steps = FxHashMap::default();
    if !graph
        .nodes
        .iter()
        .any(|n| matches!(n.op, Op::Pool2d(PoolKind::Max, _)))
    {
        return steps;
    }
    let mut consumers = graph.consumers();
    consumers
        .iter_mut()
        .for_each(|list| list.retain(|c| live[c.at()]));
    let uses = Uses { graph, consumers };
    for relu in graph
        .ids()
        .filter(|id| live[id.at()] && graph.node(*id).op == Op::Scalar(ScalarOp::Relu))
    {
        steps.extend(uses.of_relu(relu).into_iter().flatten());
    }
    steps
}

struct Uses<'a> {
    graph: &'a Graph,
    /// The live consumers of each node.
    consumers: Vec<SmallVec<[NodeId; 4]>>,
}

impl Uses<'_> {
    /// The consumers of a node, `None` if the caller of the program sees it as well.
    fn of(&self, id: NodeId) -> Option<&[NodeId]> {
        (!self.graph.outputs.contains(&id)).then(|| &self.consumers[id.at()][..])
    }

    fn is_zero(&self, id: NodeId) -> bool {
        matches!(constant(self.graph, id), Some(Value::F32(0.0)))
    }

    /// The replacements of the uses of a relu; `None` if one of them is not part of the pattern.
    fn of_relu(&self, relu: NodeId) -> Option<Vec<(NodeId, Step)>> {
        let x = self.graph.node(relu).inputs[0];
        let (mut pools, mut masks, mut gradients) = (Vec::new(), Vec::new(), Vec::new());
        let mut steps = Vec::new();
        for &user in self.of(relu)? {
            let node = self.graph.node(user);
            match node.op {
                Op::Pool2d(PoolKind::Max, window) => {
                    pools.push((user, window));
                    steps.push((user, Step::Pool { x }));
                }
                Op::Pool2d(PoolKind::ArgMax, window) => {
                    for &gradient in self.of(user)? {
                        gradients.push((gradient, user, window));
                    }
                    steps.push((user, Step::Positions { x }));
                }
                Op::Scalar(ScalarOp::Le)
                    if node.inputs[0] == relu && self.is_zero(node.inputs[1]) =>
                {
                    masks.push(user)
                }
                _ => return None,
            }
        }
        let &(pooled, window) = pools.first()?;
        // A pooling reads f32, which relu may be the conversion to, from halves.
        if self.graph.dtype(x) != DType::F32 {
            return None;
        }
        // A window over nothing would give −∞, which relu changes. Poolings of equal windows may
        // differ in size: by a window more at the end of an axis.
        let empty = self.graph.dims(x)[2..].iter().any(|d| d.is(0));
        let is_other = |id: NodeId| self.graph.dims(id) != self.graph.dims(pooled);
        if empty || pools.iter().any(|&(p, w)| w != window || is_other(p)) {
            return None;
        }
        let mut selects = Vec::new();
        for (gradient, positions, of) in gradients {
            let node = self.graph.node(gradient);
            let [dy, by] = node.inputs[..] else {
                return None;
            };
            let [select] = *self.of(gradient)? else {
                return None;
            };
            let parts = self.graph.node(select);
            let masked = parts.op == Op::Scalar(ScalarOp::Select)
                && masks.contains(&parts.inputs[0])
                && self.is_zero(parts.inputs[1])
                && parts.inputs[2] == gradient;
            if node.op != Op::Pool2dGrad(PoolKind::Max, window)
                || of != window
                || by != positions
                || is_other(positions)
                || !masked
                || pooled > select
            {
                return None;
            }
            selects.push(select);
            steps.push((
                select,
                Step::Gradient {
                    pooled,
                    dy,
                    positions,
                    window,
                },
            ));
        }
        let covered = |mask: &NodeId| {
            self.of(*mask)
                .is_some_and(|users| users.iter().all(|user| selects.contains(user)))
        };
        masks.iter().all(covered).then_some(steps)
    }
}
