//! The text of a graph, human-readable and for Graphviz.

use std::fmt;

use super::Graph;
use crate::ops::Op;

impl Graph {
    /// The graph in DOT, for Graphviz.
    pub fn to_dot(&self) -> String {
        use petgraph::dot::{Config, Dot};
        let mut dot = petgraph::Graph::<String, ()>::new();
        let ids: Vec<_> = self
            .ids()
            .map(|id| {
                dot.add_node(format!(
                    "{} %{}\n{} {}",
                    self.name(id),
                    id.0,
                    self.node(id).dtype,
                    self.symbols.show(&self.node(id).dims)
                ))
            })
            .collect();
        for id in self.ids() {
            for input in &self.node(id).inputs {
                dot.add_edge(ids[input.at()], ids[id.at()], ());
            }
        }
        format!(
            "{:?}",
            Dot::with_attr_getters(
                &dot,
                &[Config::EdgeNoLabel, Config::NodeNoLabel],
                &|_, _| String::new(),
                &|_, (_, n)| format!("label = {n:?} shape = box")
            )
        )
    }
}

impl fmt::Display for Graph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for id in self.ids() {
            let node = self.node(id);
            let inputs: Vec<String> = node.inputs.iter().map(|i| format!("%{}", i.0)).collect();
            write!(f, "%{} = {}({})", id.0, node.op.name(), inputs.join(", "))?;
            if let Op::Collective { group, .. } = node.op
                && group.stride != 1
            {
                write!(f, " of {group}")?;
            }
            writeln!(
                f,
                " : {} {}  # {}",
                node.dtype,
                self.symbols.show(&node.dims),
                self.name(id)
            )?;
        }
        let outputs: Vec<String> = self.outputs.iter().map(|o| format!("%{}", o.0)).collect();
        writeln!(f, "return {}", outputs.join(", "))
    }
}
