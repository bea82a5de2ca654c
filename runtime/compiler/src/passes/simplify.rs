//! Simplification: the same outputs, assignments and checks from fewer and cheaper nodes.
//!
//! The graph is rebuilt node by node, in order, until a round changes nothing; a node is matched
//! together with its operands, which are simplified already.
//!
//! **Exactness**: a rule may change the bits of a NaN, and nothing else (x + 0 stays, for −0 + 0 is
//! 0), with two exceptions that are at least as accurate: a folded constant is the scalar table's
//! value, and x² is a product, rounded once, where a kernel's function would be within its
//! tolerance. Rules that would lose an infinity or a NaN (x · 0 → 0) or sum in another order (a sum
//! of sums) are not here.

mod cse;
mod fold;
mod pairs;
mod pool;
mod scalar;
mod view;

use rustc_hash::{FxHashMap, FxHashSet};
use slabwise_kernels::dtype::DType;
use slabwise_kernels::size::Size;
use slabwise_kernels::spec::Dims;
use smallvec::SmallVec;

use super::error::PassError;
use super::pipeline::Pass;
use crate::graph::{Bases, Graph};
use crate::ops::{GraphBuilder, NodeId, Op};
use cse::same_op;
use fold::constant;
use pairs::{nested_reduce, transposed_product};

/// Which simplifications are made; nodes that nothing needs are dropped in any case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Simplify {
    /// One node for equal computations (hash-consing).
    pub cse: bool,
    /// Computing with constants now.
    pub fold: bool,
    /// Identities of operations, such as x · 1 = x or a slice of a slice.
    pub algebra: bool,
}

impl Default for Simplify {
    fn default() -> Self {
        Simplify {
            cse: true,
            fold: true,
            algebra: true,
        }
    }
}

impl Pass for Simplify {
    const NAME: &'static str = "simplify";
    type Input = Graph;
    type Output = Graph;

    fn run(&self, graph: &Graph) -> Result<Graph, PassError> {
        Ok(simplify(graph, self))
    }
}

/// Most rounds; each rule shrinks the graph or moves it towards a normal form, so that a few are
/// enough.
const ROUNDS: usize = 16;

/// The simplified graph: of the same inputs, variables, symbols and origins, with the outputs in
/// the same order.
pub fn simplify(graph: &Graph, options: &Simplify) -> Graph {
    let mut graph = round(graph, options);
    for _ in 1..ROUNDS {
        let next = round(&graph, options);
        let settled = same_nodes(&graph, &next);
        graph = next;
        if settled {
            break;
        }
    }
    debug_assert_eq!(graph.verify(), Ok(()), "simplify broke the graph:\n{graph}");
    graph
}

fn same_nodes(a: &Graph, b: &Graph) -> bool {
    let same = |(a, b): (&crate::graph::Node, &crate::graph::Node)| {
        same_op(&a.op, &b.op) && a.inputs == b.inputs && a.dtype == b.dtype && a.dims == b.dims
    };
    a.nodes.len() == b.nodes.len() && a.nodes.iter().zip(&b.nodes).all(same)
}

fn round(old: &Graph, options: &Simplify) -> Graph {
    let live = old.live();
    let pools = if options.algebra {
        pool::find(old, &live)
    } else {
        FxHashMap::default()
    };
    let mut uses = vec![0u32; old.nodes.len()];
    for id in old.ids().filter(|id| live[id.at()]) {
        old.node(id).inputs.iter().for_each(|i| uses[i.at()] += 1);
    }
    old.outputs.iter().for_each(|o| uses[o.at()] += 1);

    let new = Graph {
        nodes: Vec::with_capacity(old.nodes.len()),
        outputs: Vec::new(),
        ..shell(old)
    };
    let mut builder = Builder {
        new,
        bases: Bases::default(),
        starts: FxHashMap::default(),
        shared: FxHashSet::default(),
        seen: FxHashMap::default(),
        options: *options,
    };
    let mut map = vec![NodeId(0); old.nodes.len()];
    for id in old.ids().filter(|id| live[id.at()]) {
        let node = old.node(id);
        builder.new.current_origin = node.origin;
        let mut inputs: SmallVec<[NodeId; 3]> = node.inputs.iter().map(|i| map[i.at()]).collect();
        let mut op = node.op.clone();
        if let Some(step) = pools.get(&id) {
            map[id.at()] = step.build(&mut builder, old, id, &map);
            continue;
        }
        // Two reductions by one exact operation are one, along both sets of axes; if other nodes
        // need the inner one as well, it would be computed twice.
        if options.algebra
            && let [inner] = node.inputs[..]
            && uses[inner.at()] == 1
            && let Some(axes) = nested_reduce(&builder.new, &op, inputs[0])
        {
            inputs[0] = builder.new.node(inputs[0]).inputs[0];
            op = axes;
        }
        // (A·B)ᵀ = Bᵀ·Aᵀ: the same products in the same sums, so the same bits. It lets the
        // work after it, such as the update of a transposed weight, run in the product's kernel.
        if options.algebra
            && let [inner] = node.inputs[..]
            && uses[inner.at()] == 1
            && let Some([a, b]) = transposed_product(&builder.new, &op, inputs[0])
        {
            builder.new.current_origin = builder.new.node(inputs[0]).origin;
            let factors = [builder.transpose(b), builder.transpose(a)];
            map[id.at()] = builder.emit(Op::Matmul, &factors, node.dtype, node.dims.clone());
            continue;
        }
        let is_shared = uses[id.at()] > 1 && matches!(op, Op::Concat { .. });
        map[id.at()] = builder.emit(op, &inputs, node.dtype, node.dims.clone());
        if is_shared {
            builder.shared.insert(map[id.at()]);
        }
    }
    let mut new = builder.new;
    new.outputs = old.outputs.iter().map(|o| map[o.at()]).collect();
    for kept in old.kept.iter().filter(|kept| live[kept.at()]) {
        new.keep(map[kept.at()]);
    }
    new.current_origin = old.current_origin;
    new
}

/// A graph without its nodes.
fn shell(graph: &Graph) -> Graph {
    Graph {
        nodes: Vec::new(),
        inputs: graph.inputs.clone(),
        variables: graph.variables.clone(),
        counters: graph.counters.clone(),
        bodies: graph.bodies.clone(),
        symbols: graph.symbols.clone(),
        origins: graph.origins.clone(),
        outputs: Vec::new(),
        kept: Vec::new(),
        needed: graph.needed.clone(),
        is_training: graph.is_training,
        current_origin: graph.current_origin,
        current_part: graph.current_part,
    }
}

/// A graph under construction whose nodes are simplified as they are emitted.
struct Builder {
    new: Graph,
    /// Nodes by a hash of their computation.
    seen: FxHashMap<u64, SmallVec<[NodeId; 2]>>,
    bases: Bases,
    /// Where the parts of concatenations begin, of those that were sliced.
    starts: FxHashMap<NodeId, Vec<Size>>,
    /// Concatenations with several uses.
    shared: FxHashSet<NodeId>,
    options: Simplify,
}

impl Builder {
    fn op(&self, id: NodeId) -> &Op {
        &self.new.node(id).op
    }

    fn operand(&self, id: NodeId) -> NodeId {
        self.new.node(id).inputs[0]
    }

    fn rewrite(&mut self, op: &Op, inputs: &[NodeId], dtype: DType, dims: &Dims) -> Option<NodeId> {
        let simpler = match op {
            Op::Scalar(op) => scalar::rewrite(self, *op, inputs, dims),
            Op::Cast(to) => scalar::rewrite_cast(self, *to, inputs[0]),
            Op::Reduce(op, axes) => view::rewrite_reduce(self, *op, axes, inputs[0], dims),
            _ => view::rewrite(self, op, inputs, dims),
        };
        // An operand in place of the result: bytes compute as integers, halves as f32.
        simpler.map(|id| self.cast(id, dtype))
    }
}

impl GraphBuilder for Builder {
    fn emit(&mut self, op: Op, inputs: &[NodeId], dtype: DType, dims: Dims) -> NodeId {
        let folded = if self.options.fold {
            self.fold(&op, inputs, dtype, &dims)
        } else {
            None
        };
        let simple = folded.or_else(|| {
            if self.options.algebra {
                self.rewrite(&op, inputs, dtype, &dims)
            } else {
                None
            }
        });
        simple
            .or_else(|| self.find(&op, inputs, dtype, &dims))
            .unwrap_or_else(|| self.new.emit(op, inputs, dtype, dims))
    }

    fn dims(&self, node: NodeId) -> &Dims {
        self.new.dims(node)
    }

    fn dtype(&self, node: NodeId) -> DType {
        self.new.dtype(node)
    }
}
