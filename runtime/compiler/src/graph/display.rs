//! The text of a graph, human-readable and for Graphviz.

use std::fmt;
use std::hash::{DefaultHasher, Hash, Hasher};

use super::{Graph, VariableInfo};
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

    /// The graph with all that its results depend on: dimensions, variables with their initial
    /// values, the bodies of scans, and each operation with its constants, axes and the like. Equal
    /// programs of two processes have the same text.
    pub fn in_full(&self) -> String {
        let mut lines: Vec<String> = self
            .symbols
            .iter()
            .map(|(_, name, extent)| format!("dimension {name} {extent:?}"))
            .collect();
        lines.extend(self.variables.iter().map(|v| self.variable_in_full(v)));
        for id in self.ids() {
            let node = self.node(id);
            lines.push(format!(
                "%{} = {:?} of {:?} : {} {}  # {}",
                id.0,
                node.op,
                node.inputs.iter().map(|i| i.0).collect::<Vec<_>>(),
                node.dtype,
                self.symbols.show(&node.dims),
                self.name(id)
            ));
        }
        for (at, body) in self.bodies.iter().enumerate() {
            let (steps, reverse, feeds) = (body.steps, body.reverse, &body.feeds);
            lines.push(format!(
                "body {at}: {steps} steps, reverse: {reverse}, {feeds:?}"
            ));
            lines.push(body.graph.in_full());
        }
        lines.push(format!("return {:?}", self.outputs));
        lines.join("\n")
    }

    fn variable_in_full(&self, v: &VariableInfo) -> String {
        let mut line = format!(
            "variable {} : {} {}, {:?}",
            v.name,
            v.dtype,
            self.symbols.show(&v.dims),
            v.init
        );
        if let Some(part) = &v.part {
            line += &format!(", {part:?}");
        }
        if let Some(data) = &v.data {
            let mut hasher = DefaultHasher::new();
            data.hash(&mut hasher);
            line += &format!(", values with hash {:016x}", hasher.finish());
        }
        line
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
