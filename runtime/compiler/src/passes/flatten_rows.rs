//! Moves elementwise operations onto the flattened rows of a product, where a layer over several
//! axes has flattened them.
//!
//! A layer over `[batch, time, width]` is a product over `batch · time` rows, whose result is given its
//! three axes back. Its bias, its activation and a residual are written over three axes; in a
//! separate kernel they would read the product from memory. This pass moves the reshape after them:
//! the operations are then over the rows of the product and can become its epilogue, as if the user
//! had flattened the rows by hand. Sums along all flattened axes, such as a bias's gradient, are
//! along the rows. XLA's `ReshapeMover` moves reshapes through elementwise work in the same way.
//!
//! The pass starts at products: a node is moved if one operand is over rows and the axes of each
//! other operand can be merged without a copy. That holds for numbers and for values repeated along
//! all flattened axes, for inputs and elementwise operations over those, which are moved, too, and
//! for values that are in memory in any case. No node is moved if that would need a copy.

use slabwise_kernels::size::Size;
use slabwise_kernels::spec::Dims;
use smallvec::SmallVec;

use super::error::PassError;
use super::layout::is_computed;
use super::pipeline::Pass;
use crate::graph::{Graph, Node};
use crate::ops::{Axes, GraphBuilder, NodeId, Op};
use crate::shape::elements;

/// The pass.
pub struct FlattenRows;

impl Pass for FlattenRows {
    const NAME: &'static str = "flatten_rows";
    type Input = Graph;
    type Output = Option<Graph>;

    fn run(&self, graph: &Graph) -> Result<Option<Graph>, PassError> {
        Ok(flatten_rows(graph))
    }
}

/// Most axes that are merged; a kernel has fewer.
const MERGED_MAX: usize = 15;

/// The rows of a product that the first axes of a value are.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Rows {
    /// How many axes.
    axes: usize,
    /// Their lengths, multiplied.
    length: Size,
}

impl Rows {
    /// The shape of a value whose first axes are merged.
    fn merged(&self, dims: &Dims) -> Dims {
        let rest = dims[self.axes..].iter().copied();
        [self.length].into_iter().chain(rest).collect()
    }
}

/// The graph with elementwise operations over the rows of products instead of over the axes that
/// the rows were flattened from. A reshape to these axes follows each value, which
/// [`super::simplify()`] merges with the readers' reshapes. `None` if there are no such operations.
pub fn flatten_rows(graph: &Graph) -> Option<Graph> {
    let search = Search::of(graph);
    let joins = |id: &NodeId| search.rows[id.at()].is_some() && !graph.node(*id).op.is_view();
    graph.ids().find(joins)?;
    Some(search.rebuild())
}

/// The nodes that are over rows.
struct Search<'a> {
    graph: &'a Graph,
    consumers: Vec<SmallVec<[NodeId; 4]>>,
    is_output: Vec<bool>,
    /// For each node a bit for each number of first axes that can be merged without a copy and without
    /// taking elementwise work from the kernel of an anchor.
    free: Vec<u16>,
    rows: Vec<Option<Rows>>,
}

impl<'a> Search<'a> {
    fn of(graph: &'a Graph) -> Self {
        let mut is_output = vec![false; graph.nodes.len()];
        graph
            .outputs
            .iter()
            .for_each(|id| is_output[id.at()] = true);
        let mut search = Search {
            graph,
            consumers: graph.consumers(),
            is_output,
            free: free(graph),
            rows: vec![None; graph.nodes.len()],
        };
        let mut open = Vec::new();
        let mut of_product = vec![false; graph.nodes.len()];
        for id in graph.ids() {
            let node = graph.node(id);
            of_product[id.at()] = match node.op {
                Op::Matmul | Op::QuantizedMatmul(_) => true,
                ref op if op.is_pointwise() => node.inputs.iter().any(|i| of_product[i.at()]),
                _ => false,
            };
            if node.op == Op::Reshape && of_product[node.inputs[0].at()] {
                search.rows[id.at()] = unflattened(&graph.node(node.inputs[0]).dims, &node.dims);
                open.extend(search.rows[id.at()].map(|_| id));
            }
        }
        while let Some(id) = open.pop() {
            for at in 0..search.consumers[id.at()].len() {
                let consumer = search.consumers[id.at()][at];
                if let Some(rows) = search.joined(consumer) {
                    search.join(consumer, rows, &mut open);
                }
            }
        }
        search
    }

    /// The rows that a node can be over, because an operand is.
    fn joined(&self, id: NodeId) -> Option<Rows> {
        if self.rows[id.at()].is_some() || self.is_bound(id) {
            return None;
        }
        let node = self.graph.node(id);
        let values = values(node);
        let rows = values.iter().find_map(|value| self.rows[value.at()])?;
        let fits =
            |&value: &NodeId| self.is_mergeable(value, rows) || self.is_small_step(id, value, rows);
        (keeps_rows(self.graph, node, rows) && values.iter().all(fits)).then_some(rows)
    }

    /// Whether the value of a node must be written where no view of another one can be, or a copy
    /// would be made.
    fn is_bound(&self, id: NodeId) -> bool {
        let binds = |consumer: &NodeId| {
            matches!(
                self.graph.node(*consumer).op,
                Op::Concat { .. }
                    | Op::Pad { .. }
                    | Op::Assign(_)
                    | Op::Collective { .. }
                    | Op::Custom(_)
                    | Op::Scan(_)
            )
        };
        self.is_output[id.at()] || self.consumers[id.at()].iter().any(binds)
    }

    /// Whether a value is over rows, or can be seen so without a copy.
    fn is_mergeable(&self, value: NodeId, rows: Rows) -> bool {
        self.rows[value.at()] == Some(rows)
            || self.free[value.at()] & (1 << rows.axes) != 0
            || self.is_in_memory(value)
    }

    /// Whether a value lies in memory, without gaps, in any case: a value that an anchor computes, or
    /// that has several readers.
    fn is_in_memory(&self, mut value: NodeId) -> bool {
        while self.graph.node(value).op == Op::Reshape {
            value = self.graph.node(value).inputs[0];
        }
        match &self.graph.node(value).op {
            Op::Input(_) | Op::Variable(_) | Op::Concat { .. } | Op::Pad { .. } => true,
            op if is_step(op) && is_computed(op) => {
                let readers = &self.consumers[value.at()];
                readers.iter().any(|reader| *reader != readers[0])
            }
            op => is_computed(op),
        }
    }

    /// Whether a value is an elementwise function of values that can be seen over rows, for this reader
    /// alone.
    fn is_small_step(&self, reader: NodeId, value: NodeId, rows: Rows) -> bool {
        let node = self.graph.node(value);
        node.op.is_pointwise()
            && !self.is_output[value.at()]
            && self.consumers[value.at()].iter().all(|c| *c == reader)
            && node.inputs.iter().all(|&i| self.is_mergeable(i, rows))
    }

    /// Takes a node and the elementwise work that it needs over rows, too; `open` gets all of them.
    fn join(&mut self, id: NodeId, rows: Rows, open: &mut Vec<NodeId>) {
        let mut joining = vec![id];
        while let Some(id) = joining.pop() {
            self.rows[id.at()] = Some(rows);
            open.push(id);
            for &value in &values(self.graph.node(id)) {
                let node = self.graph.node(value);
                let steps = self.rows[value.at()].is_none()
                    && is_step(&node.op)
                    && keeps_rows(self.graph, node, rows)
                    && !self.is_bound(value);
                let free = self.free[value.at()] & (1 << rows.axes) != 0;
                if steps && (free || self.is_small_step(id, value, rows)) {
                    joining.push(value);
                }
            }
        }
    }

    fn rebuild(&self) -> Graph {
        let graph = self.graph;
        let mut out = Graph {
            nodes: Vec::with_capacity(graph.nodes.len()),
            kept: Vec::new(),
            ..graph.clone()
        };
        let mut map: Vec<NodeId> = Vec::with_capacity(graph.nodes.len());
        for id in graph.ids() {
            let node = graph.node(id);
            out.current_origin = node.origin;
            let rows = values(node).iter().find_map(|value| self.rows[value.at()]);
            let summed = rows.filter(|rows| reduces_rows(&node.op, *rows));
            let rows = self.rows[id.at()].filter(|_| node.op != Op::Reshape);
            let Some(rows) = rows.or(summed) else {
                let inputs: SmallVec<[NodeId; 3]> =
                    node.inputs.iter().map(|i| map[i.at()]).collect();
                map.push(out.emit(node.op.clone(), &inputs, node.dtype, node.dims.clone()));
                continue;
            };
            let keys = node.inputs.len() - values(node).len();
            let inputs: SmallVec<[NodeId; 3]> = (node.inputs.iter().enumerate())
                .map(|(at, input)| match at < keys {
                    true => map[input.at()],
                    false => self.merged(&mut out, &map, *input, rows),
                })
                .collect();
            let mut dims = rows.merged(&node.dims);
            let op = match &node.op {
                Op::Reduce(op, axes) => {
                    if summed.is_some() {
                        dims[0] = Size::ONE;
                    }
                    let shifted = |&axis: &usize| (axis + 1).saturating_sub(rows.axes);
                    let mut axes: Axes = axes.iter().map(shifted).collect();
                    axes.sort_unstable();
                    axes.dedup();
                    Op::Reduce(*op, axes)
                }
                op => op.clone(),
            };
            let value = out.emit(op, &inputs, node.dtype, dims);
            map.push(out.reshape(value, &node.dims));
        }
        for (output, id) in out.outputs.iter_mut().zip(&graph.outputs) {
            *output = map[id.at()];
        }
        for id in &graph.kept {
            out.keep(map[id.at()]);
        }
        out.current_origin = graph.current_origin;
        out
    }

    /// A value with its first axes merged.
    fn merged(&self, out: &mut Graph, map: &[NodeId], value: NodeId, rows: Rows) -> NodeId {
        let node = self.graph.node(value);
        let dims = rows.merged(&node.dims);
        match &node.op {
            Op::Index(strides) => {
                let kept = strides[rows.axes - 1..].iter().copied().collect();
                out.emit(Op::Index(kept), &[], node.dtype, dims)
            }
            Op::Expand if repeats_rows(self.graph, node, rows.axes) => {
                let from = node.inputs[0];
                let mut one = rows.merged(&self.graph.node(from).dims);
                one[0] = Size::ONE;
                let one = out.reshape(map[from.at()], &one);
                out.broadcast(one, &dims)
            }
            _ => out.reshape(map[value.at()], &dims),
        }
    }
}

/// The values that a node computes with at each point: all operands but the key of random numbers.
fn values(node: &Node) -> SmallVec<[NodeId; 3]> {
    match node.op {
        Op::Uniform { .. } => node.inputs[1..].iter().copied().collect(),
        _ => node.inputs.clone(),
    }
}

/// Whether an operation can be over rows.
fn is_step(op: &Op) -> bool {
    op.is_pointwise() || matches!(op, Op::Uniform { .. } | Op::Reduce(..) | Op::Expand)
}

/// Whether an operation has the same first axes in its value and its operands, and computes nothing
/// along them.
fn keeps_rows(graph: &Graph, node: &Node, rows: Rows) -> bool {
    let same = || {
        values(node).iter().all(|value| {
            let dims = &graph.node(*value).dims;
            dims.len() == node.dims.len() && dims[..rows.axes] == node.dims[..rows.axes]
        })
    };
    match &node.op {
        Op::Reduce(_, axes) => axes.iter().all(|&axis| axis >= rows.axes),
        op => is_step(op) && same(),
    }
}

/// Whether the operand of a repetition has length 1 along all these first axes.
fn repeats_rows(graph: &Graph, node: &Node, axes: usize) -> bool {
    let from = &graph.node(node.inputs[0]).dims;
    from[..axes].iter().all(|dim| dim.is(1))
}

/// Whether an operation reduces along all merged axes.
fn reduces_rows(op: &Op, rows: Rows) -> bool {
    matches!(op, Op::Reduce(_, axes) if (0..rows.axes).all(|axis| axes.contains(&axis)))
}

/// The rows of a value that are the first axes of a reshape, if the others are the same.
fn unflattened(from: &Dims, to: &Dims) -> Option<Rows> {
    let axes = (to.len() + 1).checked_sub(from.len())?;
    let rows = Rows {
        axes,
        length: *from.first()?,
    };
    let several = || to[..axes].iter().filter(|dim| !dim.is(1)).count() > 1;
    let whole = || elements(&to[..axes]) == Some(rows.length);
    let merged = (2..=MERGED_MAX).contains(&axes) && from.len() > 1 && to[axes..] == from[1..];
    (merged && several() && whole()).then_some(rows)
}

/// See [`Search::free`].
fn free(graph: &Graph) -> Vec<u16> {
    let mut free: Vec<u16> = Vec::with_capacity(graph.nodes.len());
    for id in graph.ids() {
        let node = graph.node(id);
        let of = |value: &NodeId| free[value.at()];
        let each = |is: &dyn Fn(usize) -> bool| {
            let mergeable = (2..=node.dims.len().min(MERGED_MAX)).filter(|&axes| is(axes));
            mergeable.fold(0, |bits, axes| bits | 1 << axes)
        };
        let bits = match &node.op {
            Op::Const(_) | Op::Size(_) | Op::Input(_) | Op::Variable(_) => each(&|_| true),
            Op::Index(strides) => each(&|axes| {
                (1..axes).all(|axis| {
                    let inner = strides[axis].checked_mul(node.dims[axis]);
                    inner == Some(strides[axis - 1])
                })
            }),
            Op::Reshape => {
                let from = graph.node(node.inputs[0]);
                let whole = matches!(from.op, Op::Const(_) | Op::Input(_) | Op::Variable(_));
                each(&|_| whole)
            }
            Op::Expand => {
                let from = &graph.node(node.inputs[0]).dims;
                each(&|axes| {
                    repeats_rows(graph, node, axes)
                        || from[..axes] == node.dims[..axes]
                            && of(&node.inputs[0]) & (1 << axes) != 0
                })
            }
            Op::Reduce(_, axes) => {
                let first = axes.iter().copied().min().unwrap_or(node.dims.len());
                each(&|axes| axes <= first) & of(&node.inputs[0])
            }
            op if is_step(op) => values(node)
                .iter()
                .fold(each(&|_| true), |bits, value| bits & of(value)),
            _ => 0,
        };
        free.push(bits);
    }
    free
}

#[cfg(test)]
mod tests {
    use slabwise_kernels::dtype::DType;
    use slabwise_kernels::scalar::ScalarOp;
    use slabwise_kernels::spec::ReduceOp;

    use super::*;
    use crate::graph::InputInfo;
    use crate::passes::{Simplify, simplify};

    fn dims(lengths: &[i64]) -> Dims {
        lengths.iter().map(|&n| Size::fixed(n)).collect()
    }

    fn input(graph: &mut Graph, lengths: &[i64]) -> NodeId {
        let dims = dims(lengths);
        graph.inputs.push(InputInfo {
            name: "x".into(),
            dtype: DType::F32,
            dims: dims.clone(),
            donated_to: None,
        });
        let at = graph.inputs.len() as u32 - 1;
        graph.emit(Op::Input(at), &[], DType::F32, dims)
    }

    /// `x · w`, of `[2, 3, 4]` and `[4, 5]`, over six rows, as `[2, 3, 5]`.
    fn product(graph: &mut Graph) -> NodeId {
        let x = input(graph, &[2, 3, 4]);
        let w = input(graph, &[4, 5]);
        let rows = graph.reshape(x, &dims(&[6, 4]));
        let product = graph.matmul(rows, w);
        graph.reshape(product, &dims(&[2, 3, 5]))
    }

    /// The graph after the pass, simplified, with these outputs; `None` if the pass leaves it.
    fn flattened(graph: &mut Graph, outputs: &[NodeId]) -> Option<Graph> {
        graph.outputs = outputs.to_vec();
        assert_eq!(graph.verify(), Ok(()));
        let flat = flatten_rows(graph)?;
        assert_eq!(flat.verify(), Ok(()), "{flat}");
        Some(simplify(&flat, &Simplify::default()))
    }

    fn shapes(graph: &Graph, is: impl Fn(&Op) -> bool) -> Vec<Dims> {
        let nodes = graph.nodes.iter().filter(|node| is(&node.op));
        nodes.map(|node| node.dims.clone()).collect()
    }

    #[test]
    fn a_layer_with_its_activation_norm_and_gradients_of_parameters_is_over_rows() {
        let mut graph = Graph::default();
        let y = product(&mut graph);
        let bias = input(&mut graph, &[5]);
        let whole = dims(&[2, 3, 5]);
        let bias = graph.broadcast(bias, &whole);
        let y = graph.add(y, bias);
        let y = graph.scalar(ScalarOp::Tanh, &[y]);
        let largest = graph.reduce(ReduceOp::Max, y, &[2]);
        let largest = graph.broadcast(largest, &whole);
        let y = graph.scalar(ScalarOp::Sub, &[y, largest]);
        let sum = graph.reduce(ReduceOp::Sum, y, &[0, 1]);
        let first = graph.reduce(ReduceOp::ArgMax, y, &[0, 1, 2]);
        let next = graph.reshape(y, &dims(&[6, 5]));
        let w = input(&mut graph, &[5, 7]);
        let next = graph.matmul(next, w);
        let flat = flattened(&mut graph, &[sum, first, next]).expect("work over rows");
        let over_three = shapes(&flat, |op| op.is_pointwise() || *op == Op::Expand);
        assert!(over_three.iter().all(|dims| dims.len() < 3), "{flat}");
        let sums = shapes(&flat, |op| matches!(op, Op::Reduce(..)));
        let expected = [&[6, 1][..], &[1, 5], &[1, 1]].map(dims);
        assert_eq!(sums, expected, "{flat}");
        let outputs: Vec<&Dims> = flat.outputs.iter().map(|o| &flat.node(*o).dims).collect();
        let expected = [&[1, 1, 5][..], &[1, 1, 1], &[6, 7]].map(dims);
        assert_eq!(outputs, expected.iter().collect::<Vec<_>>());
    }

    #[test]
    fn random_numbers_and_values_computed_from_inputs_are_flattened_too() {
        let mut graph = Graph::default();
        let y = product(&mut graph);
        let whole = dims(&[2, 3, 5]);
        let key = input(&mut graph, &[3]);
        let key = graph.cast(key, DType::I32);
        let strides = dims(&[15, 5, 1]);
        let index = graph.emit(Op::Index(strides), &[], DType::I32, whole.clone());
        let uniform = Op::Uniform { stream: 0 };
        let uniform = graph.emit(uniform, &[key, index], DType::F32, whole.clone());
        let x = input(&mut graph, &[2, 3, 5]);
        let x = graph.scalar(ScalarOp::Tanh, &[x]);
        let mask = graph.scalar(ScalarOp::Mul, &[uniform, x]);
        let y = graph.mul(y, mask);
        let sum = graph.reduce(ReduceOp::Sum, y, &[2]);
        let sum = graph.reduce(ReduceOp::Sum, sum, &[0]);
        let flat = flattened(&mut graph, &[sum]).expect("work over rows");
        let uniform = shapes(&flat, |op| matches!(op, Op::Uniform { .. }));
        assert_eq!(uniform, [dims(&[6, 5])], "{flat}");
        let index = flat.nodes.iter().find_map(|node| match &node.op {
            Op::Index(strides) => Some(strides.clone()),
            _ => None,
        });
        assert_eq!(index, Some(dims(&[5, 1])), "{flat}");
        let sums = shapes(&flat, |op| matches!(op, Op::Reduce(..)));
        assert_eq!(sums, [dims(&[6, 1]), dims(&[1, 3, 1])], "{flat}");
    }

    /// Work that would need a copy stays over three axes: a value repeated along one of the two
    /// flattened axes, a transposed one, an output, a part of a concatenation.
    #[test]
    fn work_that_would_need_a_copy_stays() {
        let stays = |of: &dyn Fn(&mut Graph, NodeId) -> NodeId| {
            let mut graph = Graph::default();
            let y = product(&mut graph);
            let y = of(&mut graph, y);
            let flat = flattened(&mut graph, &[y]);
            assert!(flat.is_none(), "{}", flat.expect("just found"));
        };
        let whole = || dims(&[2, 3, 5]);
        stays(&|g, y| {
            let places = input(g, &[3, 5]);
            let places = g.broadcast(places, &whole());
            let y = g.add(y, places);
            g.reduce(ReduceOp::Sum, y, &[2])
        });
        stays(&|g, y| {
            let other = input(g, &[3, 2, 5]);
            let other = g.permute(other, &[1, 0, 2]);
            let y = g.add(y, other);
            g.reduce(ReduceOp::Sum, y, &[2])
        });
        stays(&|g, y| g.scalar(ScalarOp::Tanh, &[y]));
        stays(&|g, y| {
            let y = g.scalar(ScalarOp::Tanh, &[y]);
            let x = input(g, &[2, 3, 5]);
            let both = dims(&[4, 3, 5]);
            g.emit(Op::Concat { axis: 0 }, &[y, x], DType::F32, both)
        });
    }

    /// A residual that several nodes read is in memory; one that is computed after a gather for the
    /// sum alone is not taken from there.
    #[test]
    fn residuals_are_read_as_they_lie() {
        let gathered = |graph: &mut Graph| {
            let table = input(graph, &[9, 3, 5]);
            let index = input(graph, &[2, 3, 5]);
            let index = graph.cast(index, DType::I32);
            let gather = Op::Gather { axis: 0 };
            let x = graph.emit(gather, &[table, index], DType::F32, dims(&[2, 3, 5]));
            let x = graph.scalar(ScalarOp::Tanh, &[x]);
            graph.scalar(ScalarOp::Exp, &[x])
        };
        for several in [false, true] {
            let mut graph = Graph::default();
            let y = product(&mut graph);
            let x = gathered(&mut graph);
            let sum = graph.add(y, x);
            let sum = graph.reduce(ReduceOp::Sum, sum, &[2]);
            let mut outputs = vec![sum];
            if several {
                outputs.push(graph.reduce(ReduceOp::Max, x, &[1]));
            }
            let flat = flattened(&mut graph, &outputs);
            assert_eq!(flat.is_some(), several);
            if let Some(flat) = flat {
                let is_exp = |op: &Op| *op == Op::Scalar(ScalarOp::Exp);
                assert_eq!(shapes(&flat, is_exp), [dims(&[2, 3, 5])], "{flat}");
                let is_sum = |op: &Op| *op == Op::Scalar(ScalarOp::Add);
                assert_eq!(shapes(&flat, is_sum), [dims(&[6, 5])], "{flat}");
            }
        }
    }

    /// Kernels have fewer axes, so that the compiler refuses the program later, with an error.
    #[test]
    fn more_axes_than_a_kernel_has_stay() {
        let mut graph = Graph::default();
        let x = input(&mut graph, &[1 << 17, 4]);
        let w = input(&mut graph, &[4, 5]);
        let y = graph.matmul(x, w);
        let y = graph.reshape(y, &dims(&[[2; 17].as_slice(), &[5]].concat()));
        let y = graph.scalar(ScalarOp::Tanh, &[y]);
        let sum = graph.reduce(ReduceOp::Sum, y, &[17]);
        assert!(flattened(&mut graph, &[sum]).is_none());
    }

    #[test]
    fn an_axis_of_length_1_is_no_reason() {
        let mut graph = Graph::default();
        let x = input(&mut graph, &[3, 4]);
        let w = input(&mut graph, &[4, 5]);
        let y = graph.matmul(x, w);
        let y = graph.reshape(y, &dims(&[1, 3, 5]));
        let y = graph.scalar(ScalarOp::Tanh, &[y]);
        let sum = graph.reduce(ReduceOp::Sum, y, &[2]);
        assert!(flattened(&mut graph, &[sum]).is_none());
    }
}
