//! The verifier of graphs.

use std::collections::HashSet;

use smallvec::SmallVec;

use super::Graph;
use crate::ops::{Op, infer};

/// A defect of a graph. A graph made through the API has none.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("node {node} ({op}): {why}")]
pub struct GraphError {
    /// The node.
    pub node: u32,
    /// Its operation.
    pub op: String,
    /// The broken rule.
    pub why: String,
}

impl Graph {
    /// Checks every invariant: operands come before, shapes and types follow the rules, references
    /// exist, each variable is assigned at most once.
    pub fn verify(&self) -> Result<(), GraphError> {
        let mut assigned = HashSet::new();
        for id in self.ids() {
            let node = self.node(id);
            let fail = |why: String| GraphError {
                node: id.0,
                op: node.op.name().into(),
                why,
            };
            if let Some(late) = node.inputs.iter().find(|i| i.0 >= id.0) {
                return Err(fail(format!(
                    "reads node {}, which does not precede it",
                    late.0
                )));
            }
            let reference = match &node.op {
                Op::Input(i) => self.inputs.get(*i as usize).map(|x| (x.dtype, &x.dims)),
                Op::Variable(v) | Op::Assign(v) => {
                    self.variables.get(*v as usize).map(|x| (x.dtype, &x.dims))
                }
                _ => Some((node.dtype, &node.dims)),
            };
            let Some((dtype, dims)) = reference else {
                return Err(fail("refers to a node that does not exist".into()));
            };
            if (dtype, dims) != (node.dtype, &node.dims) {
                return Err(fail(format!(
                    "is {} {:?}, but refers to {dtype} {dims:?}",
                    node.dtype, node.dims
                )));
            }
            if let Op::Scan(_) = node.op {
                let operands: SmallVec<[_; 4]> =
                    node.inputs.iter().map(|&i| self.node(i)).collect();
                let body = self.body(id);
                let body =
                    body.ok_or_else(|| fail("refers to a body that does not exist".into()))?;
                body.check(&operands).map_err(fail)?;
            }
            if let Op::ScanResult(result) = node.op {
                let is = self.body(node.inputs[0]).and_then(|b| b.result(result));
                if is.as_ref().map(|(dtype, dims)| (*dtype, dims)) != Some((node.dtype, &node.dims))
                {
                    return Err(fail("is no result of its scan".into()));
                }
            }
            if let Op::Assign(v) = node.op
                && !assigned.insert(v)
            {
                return Err(fail(format!(
                    "assigns {} a second time",
                    self.variables[v as usize].name
                )));
            }
            let given: SmallVec<[_; 4]> = node
                .inputs
                .iter()
                .map(|&i| crate::ops::TensorType {
                    dtype: self.node(i).dtype,
                    dims: &self.node(i).dims,
                })
                .collect();
            let (dtype, dims) =
                infer(&node.op, &given, (node.dtype, &node.dims), &self.symbols).map_err(fail)?;
            if (dtype, &dims) != (node.dtype, &node.dims) {
                return Err(fail(format!(
                    "is {} {:?}, but the rule gives {dtype} {dims:?}",
                    node.dtype, node.dims
                )));
            }
        }
        match self.outputs.iter().find(|o| o.at() >= self.nodes.len()) {
            Some(o) => Err(GraphError {
                node: o.0,
                op: "output".into(),
                why: "does not exist".into(),
            }),
            None => Ok(()),
        }
    }
}
