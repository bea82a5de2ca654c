//! The order of a graph's nodes, and the definitions of its names.

use std::collections::{HashMap, HashSet};

use crate::import::{domain, name_of};
use crate::proto::{GraphProto, ModelProto, NodeProto};

/// The names that a graph has defined so far, each with its definition in words.
struct Scope<'o> {
    own: HashMap<String, String>,
    /// That of the graph around this one, whose names its nodes see.
    outer: Option<&'o Scope<'o>>,
}

impl Scope<'_> {
    fn definition(&self, name: &str) -> Option<&String> {
        let outer = || self.outer.and_then(|outer| outer.definition(name));
        self.own.get(name).or_else(outer)
    }
}

/// Sorts the nodes of all graphs and functions of a model, so that each node follows those whose
/// results it reads. An order of the file that is valid is kept.
///
/// # Errors
/// A name that has two definitions, and nodes that form a cycle.
pub fn sort_model(model: &mut ModelProto) -> Result<(), String> {
    if let Some(graph) = &mut model.graph {
        sort_graph(graph, None)?;
    }
    for function in &mut model.functions {
        let inputs = function.input.iter();
        let own = inputs.map(|name| (name.clone(), "the function's inputs".into()));
        let scope = Scope {
            own: own.collect(),
            outer: None,
        };
        sort_nodes(&mut function.node, scope)
            .map_err(|reason| format!("function \"{}\": {reason}", function.name))?;
    }
    Ok(())
}

fn sort_graph(graph: &mut GraphProto, outer: Option<&Scope<'_>>) -> Result<(), String> {
    let mut own = HashMap::new();
    for input in &graph.input {
        if own
            .insert(input.name.clone(), "the graph's inputs".into())
            .is_some()
        {
            return Err(format!("two inputs have the name \"{}\"", input.name));
        }
    }
    // An initializer may give an input its value.
    let weights = graph.initializer.iter();
    own.extend(weights.map(|tensor| (tensor.name.clone(), "an initializer".into())));
    sort_nodes(&mut graph.node, Scope { own, outer })
}

fn sort_nodes(nodes: &mut Vec<NodeProto>, mut scope: Scope<'_>) -> Result<(), String> {
    let order = order(nodes, &scope)?;
    let mut unsorted = std::mem::take(nodes);
    nodes.extend(order.iter().map(|&at| std::mem::take(&mut unsorted[at])));
    for node in nodes {
        for graph in node.attribute.iter_mut().filter_map(|a| a.g.as_mut()) {
            sort_graph(graph, Some(&scope))?;
        }
        let shown = shown(node);
        let outputs = node.output.iter();
        scope
            .own
            .extend(outputs.map(|name| (name.clone(), shown.clone())));
    }
    Ok(())
}

/// The places of nodes in an order in which each follows those whose results it reads: a search in
/// depth from each node in the order of the file.
fn order(nodes: &[NodeProto], scope: &Scope<'_>) -> Result<Vec<usize>, String> {
    let mut producers: HashMap<&str, usize> = HashMap::new();
    for (at, node) in nodes.iter().enumerate() {
        for name in node.output.iter().filter(|name| !name.is_empty()) {
            let before = producers.insert(name, at).map(|other| shown(&nodes[other]));
            if let Some(before) = before.or_else(|| scope.definition(name).cloned()) {
                let node = shown(node);
                return Err(format!(
                    "\"{name}\" is defined by {before} and by {node}: each needs a name of its own"
                ));
            }
        }
    }
    let reads: Vec<Vec<(&str, usize)>> = nodes
        .iter()
        .map(|node| {
            let names = reads(node).into_iter();
            names
                .filter_map(|name| Some((name, *producers.get(name)?)))
                .collect()
        })
        .collect();
    let mut order = Vec::with_capacity(nodes.len());
    let (mut reached, mut done) = (vec![false; nodes.len()], vec![false; nodes.len()]);
    for root in 0..nodes.len() {
        // Nodes, each with the number of its reads that have been followed.
        let mut path = match std::mem::replace(&mut reached[root], true) {
            true => continue,
            false => vec![(root, 0)],
        };
        while let Some((at, next)) = path.pop() {
            let Some(&(name, producer)) = reads[at].get(next) else {
                done[at] = true;
                order.push(at);
                continue;
            };
            path.push((at, next + 1));
            match std::mem::replace(&mut reached[producer], true) {
                false => path.push((producer, 0)),
                true if done[producer] => {}
                true => {
                    return Err(format!(
                        "{} reads \"{name}\", which is computed from its own results: nodes may \
                         not form a cycle; Loop and Scan express repetition",
                        shown(&nodes[at])
                    ));
                }
            }
        }
    }
    Ok(order)
}

/// The names that a node reads, those of graphs inside of it among them.
fn reads(node: &NodeProto) -> Vec<&str> {
    let mut names: Vec<&str> = node.input.iter().map(String::as_str).collect();
    for graph in node.attribute.iter().filter_map(|a| a.g.as_ref()) {
        let mut inner: Vec<&str> = graph.node.iter().flat_map(reads).collect();
        inner.extend(graph.output.iter().map(|output| &*output.name));
        let inputs = graph.input.iter().map(|input| &*input.name);
        let weights = graph.initializer.iter().map(|tensor| &*tensor.name);
        let results = graph.node.iter().flat_map(|node| &node.output);
        let own: HashSet<&str> = inputs
            .chain(weights)
            .chain(results.map(String::as_str))
            .collect();
        names.extend(inner.into_iter().filter(|name| !own.contains(name)));
    }
    names
}

/// A node in words.
fn shown(node: &NodeProto) -> String {
    let domain = match domain(&node.domain) {
        "" => String::new(),
        domain => format!("{domain}."),
    };
    format!("{domain}{} \"{}\"", node.op_type, name_of(node))
}
