//! Mixed precision: the values of a trace that are numbers of a half type.
//!
//! A program in bf16 or f16 computes in f32. It saves bytes: a rounded value is stored in two bytes
//! wherever it is stored. The operands and the results of products are rounded, each once for all
//! its readers, and the gradients of such values. No rounding is part of the graph while it is
//! recorded, since the product that reads a value may be recorded after others that do; [`Rounded`]
//! finds the values, and [`with_roundings`] adds the conversions.

use std::fmt;
use std::str::FromStr;

use slabwise_kernels::dtype::DType;
use slabwise_kernels::scalar::{ScalarOp, Value};
use slabwise_kernels::spec::PoolKind;
use slabwise_planner::brief;
use smallvec::SmallVec;

use crate::error::{Error, Result};
use crate::graph::{Graph, Node, Phase};
use crate::ops::{GraphBuilder, NodeId, Op};

/// The type of operands and results of a trace's matrix products and convolutions: see
/// [`Trace::with_precision`](crate::Trace::with_precision).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum Precision {
    /// As they are.
    #[default]
    F32,
    /// They are rounded to bf16, 8 significant bits, with a relative error of up to 2⁻⁸. The exponent range is that of f32, so gradients need no scaling of the loss.
    Bf16,
    /// They are rounded to f16, 11 significant bits, with a relative error of up to 2⁻¹¹. Numbers above 65,504 become infinite and numbers below 6·10⁻⁸ zero, so that
    /// training needs [`Trace::with_loss_scale`](crate::Trace::with_loss_scale).
    F16,
}

impl Precision {
    /// All of them.
    pub const ALL: [Precision; 3] = [Precision::F32, Precision::Bf16, Precision::F16];

    /// The type of such operands.
    pub const fn dtype(self) -> DType {
        match self {
            Precision::F32 => DType::F32,
            Precision::Bf16 => DType::BF16,
            Precision::F16 => DType::F16,
        }
    }

    /// The half type of such operands, if they are rounded.
    pub(super) fn half(self) -> Option<DType> {
        (self != Precision::F32).then_some(self.dtype())
    }

    /// An operand of a product, rounded to this precision.
    pub(crate) fn round(self, g: &mut Graph, operand: NodeId) -> NodeId {
        match g.dtype(operand) {
            DType::F32 if self != Precision::F32 => g.cast(operand, self.dtype()),
            _ => operand,
        }
    }
}

/// The rounded values of a graph.
pub(super) struct Rounded {
    /// For each node whether all its readers read it rounded.
    values: Vec<bool>,
    /// For each node whether its gradient is rounded.
    gradients: Vec<bool>,
}

impl Rounded {
    /// The f32 values that are rounded to a half type: the operands and the results of products,
    /// convolutions and attention of the forward pass whose operands are rounded. A bias is part of
    /// the result.
    ///
    /// If an operand's elements are those of other values, unchanged or zero (of a view, of `relu`,
    /// of max-pooling, of a concatenation), the gradients of these are rounded as well, and so are
    /// they themselves, unless they are passed on in registers: that gives the same elements.
    /// Inputs and weights are not rounded: a product reads a rounded copy of them.
    pub(super) fn of(graph: &Graph, to: DType) -> Rounded {
        let mut results = vec![false; graph.nodes.len()];
        let mut operands: Vec<(NodeId, bool)> = Vec::new();
        let consumers = graph.consumers();
        for id in graph.ids() {
            let node = graph.node(id);
            let is_product = match node.op {
                Op::Matmul | Op::Conv2d(_) | Op::Conv2dInputGrad(_) | Op::Attention(_) => true,
                // Attention has a result of the half type.
                Op::Cast(DType::F32) => {
                    let operand = graph.node(node.inputs[0]);
                    results[id.at()] =
                        matches!(operand.op, Op::Attention(_)) && operand.dtype == to;
                    false
                }
                _ => false,
            };
            if !is_product || graph.origin(id).phase != Phase::Forward {
                continue;
            }
            let conversions = node.inputs.iter().map(|&input| graph.below_views(input));
            let mut of_halves = true;
            for conversion in conversions.filter(|&id| graph.dtype(id).is_float()) {
                let Node { op, inputs, .. } = graph.node(conversion);
                match op {
                    Op::Cast(half) if *half == to => operands.push((inputs[0], true)),
                    _ => of_halves &= graph.dtype(conversion) == to,
                }
            }
            if of_halves && node.dtype == DType::F32 {
                results[with_bias(graph, &consumers, id).at()] = true;
            }
        }
        let mut rounded = Rounded {
            values: results.clone(),
            gradients: results,
        };
        while let Some((id, is_stored)) = operands.pop() {
            let id = graph.below_views(id);
            let node = graph.node(id);
            if node.dtype != DType::F32 || is_given(graph, id) {
                continue;
            }
            let known = rounded.gradients[id.at()] && rounded.values[id.at()] >= is_stored;
            rounded.gradients[id.at()] = true;
            rounded.values[id.at()] |= is_stored;
            if !known {
                let is_stored = !node.op.is_pointwise();
                operands.extend(selected(node).iter().map(|&id| (id, is_stored)));
            }
        }
        rounded
    }

    /// Whether the gradient of a node is rounded.
    pub(super) fn has_gradient(&self, id: NodeId) -> bool {
        self.gradients[id.at()]
    }
}

/// The sum of a product and a bias that is added to it, a weight, or else the product.
fn with_bias(graph: &Graph, consumers: &[SmallVec<[NodeId; 4]>], product: NodeId) -> NodeId {
    let is_forward = |id: &&NodeId| graph.origin(**id).phase == Phase::Forward;
    let mut at = product;
    loop {
        let mut readers = consumers[at.at()].iter().filter(is_forward);
        let (Some(&only), None) = (readers.next(), readers.next()) else {
            return product;
        };
        let node = graph.node(only);
        if node.op.is_view() {
            at = only;
            continue;
        }
        let is_bias = |id: NodeId| matches!(below_conversions(graph, id), Op::Variable(_));
        let is_term = |&id: &NodeId| id == at || is_bias(id);
        let is_sum = node.op == Op::Scalar(ScalarOp::Add) && node.inputs.iter().all(is_term);
        return if is_sum { only } else { product };
    }
}

/// Whether a value exists before the step: an input, a weight, a constant, or its conversion.
fn is_given(graph: &Graph, id: NodeId) -> bool {
    matches!(
        below_conversions(graph, id),
        Op::Input(_) | Op::Variable(_) | Op::Const(_) | Op::Placeholder
    )
}

/// The operation below a value's views and conversions.
fn below_conversions(graph: &Graph, mut id: NodeId) -> &Op {
    loop {
        let node = graph.node(graph.below_views(id));
        match node.op {
            Op::Cast(_) => id = node.inputs[0],
            _ => return &node.op,
        }
    }
}

/// The operands of which every element of a node's value is one, or zero.
fn selected(node: &Node) -> SmallVec<[NodeId; 3]> {
    match &node.op {
        Op::Scalar(ScalarOp::Relu)
        | Op::Copy
        | Op::Pool2d(PoolKind::Max, _)
        | Op::Concat { .. } => node.inputs.clone(),
        Op::Pad { value, .. } if *value == Value::F32(0.0) => node.inputs.clone(),
        _ => SmallVec::new(),
    }
}

/// The graph in which all readers of a rounded value read its conversion to the half type and back.
pub(super) fn with_roundings(graph: &Graph, to: DType) -> Graph {
    let rounded = Rounded::of(graph, to).values;
    if !rounded.contains(&true) {
        return graph.clone();
    }
    let mut new = Graph {
        nodes: Vec::with_capacity(graph.nodes.len()),
        ..graph.clone()
    };
    // For each node the node that its readers read, and the node that is stored.
    let mut read: Vec<NodeId> = Vec::with_capacity(graph.nodes.len());
    let mut stored: Vec<NodeId> = Vec::with_capacity(graph.nodes.len());
    for (node, rounded) in graph.nodes.iter().zip(rounded) {
        new.current_origin = node.origin;
        let inputs: SmallVec<[NodeId; 3]> = node.inputs.iter().map(|i| read[i.at()]).collect();
        let made = new.emit(node.op.clone(), &inputs, node.dtype, node.dims.clone());
        let half = if rounded { new.cast(made, to) } else { made };
        stored.push(half);
        read.push(if rounded {
            new.cast(half, node.dtype)
        } else {
            made
        });
    }
    new.current_origin = graph.current_origin;
    new.outputs = graph.outputs.iter().map(|id| read[id.at()]).collect();
    new.kept = graph.kept.iter().map(|id| stored[id.at()]).collect();
    new
}

impl fmt::Display for Precision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.dtype().name())
    }
}

impl FromStr for Precision {
    type Err = Error;

    fn from_str(text: &str) -> Result<Precision> {
        let known = Precision::ALL
            .into_iter()
            .find(|precision| precision.to_string() == text);
        known.ok_or_else(|| {
            Error::Value(format!(
                "unknown precision {:?}; it is f32, bf16 or f16",
                brief(text)
            ))
        })
    }
}
