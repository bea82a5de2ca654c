//! The reader and verifier of graph files.

use super::{GraphError, Node, RematGraph};
use crate::dag::DagError;
use serde_json::{Map, Value};
use slabwise_packer::brief;
use slabwise_packer::files::Gunzip;
use std::io::Read;

/// The largest permitted text, decompressed: some hundred thousand nodes, and small enough to be
/// parsed in memory.
pub const TEXT_MAX: u64 = 64 << 20;
/// The format's name in the file.
const FORMAT: &str = "remat-graph-v1";

pub(super) fn read(content: &[u8]) -> Result<RematGraph, GraphError> {
    // Both bytes of gzip's magic number; JSON begins with neither.
    let value: Value = if content.starts_with(&[0x1f, 0x8b]) {
        let mut text = Vec::new();
        Gunzip::new(content)
            .take(TEXT_MAX + 1)
            .read_to_end(&mut text)
            .map_err(GraphError::Gzip)?;
        parse(&text)?
    } else {
        parse(content)?
    };
    let format = |what: &str| GraphError::Format(what.into());
    let object = value
        .as_object()
        .ok_or_else(|| format("a graph is a JSON object"))?;
    match object.get("format") {
        Some(Value::String(name)) if name == FORMAT => {}
        Some(other) => {
            return Err(GraphError::Format(format!(
                "the format is {}, not \"{FORMAT}\"",
                brief(&other.to_string())
            )));
        }
        None => {
            return Err(GraphError::Format(format!(
                "there is no \"format\", which must be \"{FORMAT}\""
            )));
        }
    }
    let nodes = object
        .get("nodes")
        .and_then(Value::as_array)
        .ok_or_else(|| format("there is no list \"nodes\""))?;
    let outputs = object
        .get("outputs")
        .and_then(Value::as_array)
        .ok_or_else(|| format("there is no list \"outputs\""))?;
    let mut graph = RematGraph {
        name: text(object, "name"),
        ..RematGraph::default()
    };
    for (index, value) in nodes.iter().enumerate() {
        graph.nodes.push(node(index, value, nodes.len())?);
    }
    for value in outputs {
        let output = value.as_u64().filter(|&o| o < nodes.len() as u64);
        let output = output.ok_or_else(|| {
            GraphError::Format(format!(
                "output {} is none of the {} nodes",
                brief(&value.to_string()),
                nodes.len()
            ))
        })?;
        graph.outputs.push(output as u32);
    }
    graph.outputs.sort_unstable();
    graph.outputs.dedup();
    verify(&mut graph)?;
    Ok(graph)
}

fn parse(text: &[u8]) -> Result<Value, GraphError> {
    if text.len() as u64 > TEXT_MAX {
        return Err(GraphError::TooLarge { most: TEXT_MAX });
    }
    Ok(serde_json::from_slice(
        text.strip_prefix("\u{feff}".as_bytes()).unwrap_or(text),
    )?)
}

/// A label; empty if it is missing.
fn text(object: &Map<String, Value>, key: &str) -> String {
    object
        .get(key)
        .and_then(Value::as_str)
        .unwrap_or_default()
        .to_string()
}

fn node(index: usize, value: &Value, count: usize) -> Result<Node, GraphError> {
    let object = value
        .as_object()
        .ok_or_else(|| GraphError::Format(format!("node {index} is not a JSON object")))?;
    let name = text(object, "name");
    let error = |what: String| GraphError::Node {
        index,
        name: name.clone(),
        what,
    };
    let number = |key: &str, default: Option<u64>| match object.get(key) {
        None => default.ok_or_else(|| error(format!("there is no \"{key}\""))),
        Some(value) => {
            let whole = value.as_u64().or_else(|| value.as_f64().and_then(whole));
            whole.ok_or_else(|| {
                error(format!(
                    "\"{key}\" is {}, not a whole number from 0 to 2^64-1",
                    brief(&value.to_string())
                ))
            })
        }
    };
    let flag = |key: &str, default: bool| match object.get(key) {
        None => Ok(default),
        Some(value) => value.as_bool().ok_or_else(|| {
            error(format!(
                "\"{key}\" is {}, neither true nor false",
                brief(&value.to_string())
            ))
        }),
    };
    let indices = |key: &str| -> Result<Vec<u32>, GraphError> {
        let list = match object.get(key) {
            None => return Ok(Vec::new()),
            Some(value) => value
                .as_array()
                .ok_or_else(|| error(format!("\"{key}\" is not a list")))?,
        };
        let known = |value: &Value| match value.as_u64().filter(|&j| j < count as u64) {
            Some(j) => Ok(j as u32),
            None => Err(error(format!(
                "\"{key}\" names {}, which is none of the {count} nodes",
                brief(&value.to_string())
            ))),
        };
        let mut list = list.iter().map(known).collect::<Result<Vec<u32>, _>>()?;
        list.sort_unstable();
        list.dedup();
        Ok(list)
    };
    Ok(Node {
        inputs: indices("inputs")?,
        bytes: number("bytes", None)?,
        flops: number("flops", Some(0))?,
        cost: number("cost", Some(0))?,
        workspace: number("workspace", Some(0))?,
        persistent: flag("persistent", false)?,
        inplace: indices("inplace")?,
        mutates: indices("mutates")?,
        recompute: flag("recompute", true)?,
        name,
    })
}

/// A number written with a point or an exponent, if it is still whole and exact.
fn whole(number: f64) -> Option<u64> {
    const EXACT: f64 = (1u64 << 53) as f64;
    (number.fract() == 0.0 && (0.0..=EXACT).contains(&number)).then_some(number as u64)
}

fn verify(graph: &mut RematGraph) -> Result<(), GraphError> {
    if graph.nodes.len() > u32::MAX as usize {
        return Err(DagError::TooMany {
            what: "nodes",
            count: graph.nodes.len(),
        }
        .into());
    }
    let mut sums = [("bytes and workspaces", 0u64), ("costs", 0), ("flops", 0)];
    let mut forward = None;
    for (index, node) in graph.nodes.iter().enumerate() {
        let error = |what: String| GraphError::Node {
            index,
            name: node.name.clone(),
            what,
        };
        for (sum, amount) in [
            (0, node.bytes),
            (0, node.workspace),
            (1, node.cost),
            (2, node.flops),
        ] {
            let (what, sum) = &mut sums[sum];
            *sum = sum.checked_add(amount).ok_or_else(|| {
                error(format!(
                    "with its {amount}, the sum of {what} exceeds 64 bits"
                ))
            })?;
        }
        if node.persistent && !node.mutates.is_empty() {
            return Err(error(
                "it is persistent and never runs, so it cannot change others".into(),
            ));
        }
        if let Some(&p) = node
            .mutates
            .iter()
            .find(|&&p| !graph.nodes[p as usize].persistent)
        {
            return Err(error(format!(
                "it changes node {p} `{}`, which is not persistent",
                brief(&graph.nodes[p as usize].name)
            )));
        }
        if node.persistent {
            continue;
        }
        if node.inputs.binary_search(&(index as u32)).is_ok() {
            return Err(error("it reads its own result".into()));
        }
        if let Some(&j) = node.inputs.iter().find(|&&j| j as usize > index) {
            forward.get_or_insert(error(format!(
                "it reads node {j} `{}`, which stands after it",
                brief(&graph.nodes[j as usize].name)
            )));
        }
    }
    // Drops permissions that no checker would accept.
    let sizes: Vec<Option<u64>> = (0u32..)
        .zip(&graph.nodes)
        .map(|(i, node)| {
            (!node.persistent && graph.outputs.binary_search(&i).is_err()).then_some(node.bytes)
        })
        .collect();
    for node in &mut graph.nodes {
        let (inputs, bytes) = (&node.inputs, node.bytes);
        node.inplace.retain(|&j| {
            bytes > 0 && inputs.binary_search(&j).is_ok() && sizes[j as usize] == Some(bytes)
        });
    }
    // A cycle is reported first; only then a wrong order.
    graph.to_dag(true).dag.verify()?;
    forward.map_or(Ok(()), Err)
}
