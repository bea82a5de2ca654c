//! The reader and verifier of graph files.
//!
//! Values stay text until they are needed: as parsed JSON, objects take up to a hundred times the
//! bytes of their text.

use super::{GraphError, Node, RematGraph};
use crate::dag::DagError;
use serde_json::Deserializer;
use serde_json::value::RawValue;
use slabwise_packer::brief;
use slabwise_packer::files::Gunzip;
use std::collections::BTreeMap;
use std::io::Read;

/// The largest permitted text, decompressed: some hundred thousand nodes, and small enough to be
/// read in memory.
pub const TEXT_MAX: u64 = 64 << 20;
/// The most nodes of a graph.
const NODES_MAX: usize = 1_000_000;
/// The format's name in the file.
const FORMAT: &str = "remat-graph-v1";

/// The fields of a JSON object, as text.
type Fields<'a> = BTreeMap<String, &'a RawValue>;

/// The items of a JSON list that has been found valid: the rest of its text.
struct Items<'a>(&'a str);

impl<'a> Items<'a> {
    /// The items of a value, if it is a list.
    fn of(value: &'a RawValue) -> Option<Items<'a>> {
        value.get().starts_with('[').then_some(Items(value.get()))
    }
}

impl<'a> Iterator for Items<'a> {
    type Item = &'a RawValue;

    fn next(&mut self) -> Option<&'a RawValue> {
        let rest = self.0.trim_ascii_start().strip_prefix(['[', ','])?;
        let mut values = Deserializer::from_str(rest).into_iter();
        let item = values.next()?.ok();
        self.0 = &rest[values.byte_offset()..];
        item
    }
}

pub(super) fn read(content: &[u8]) -> Result<RematGraph, GraphError> {
    // Both bytes of gzip's magic number; JSON begins with neither.
    if !content.starts_with(&[0x1f, 0x8b]) {
        return parse(content);
    }
    let mut text = Vec::new();
    Gunzip::new(content)
        .take(TEXT_MAX + 1)
        .read_to_end(&mut text)
        .map_err(GraphError::Gzip)?;
    parse(&text)
}

fn parse(text: &[u8]) -> Result<RematGraph, GraphError> {
    if text.len() as u64 > TEXT_MAX {
        return Err(GraphError::TooLarge { most: TEXT_MAX });
    }
    let text = text.strip_prefix("\u{feff}".as_bytes()).unwrap_or(text);
    let format = |what: &str| GraphError::Format(what.into());
    let value: &RawValue = serde_json::from_slice(text)?;
    let object = fields(value)?.ok_or_else(|| format("a graph is a JSON object"))?;
    match object.get("format") {
        Some(name) if string(name).as_deref() == Some(FORMAT) => {}
        Some(other) => {
            return Err(GraphError::Format(format!(
                "the format is {}, not \"{FORMAT}\"",
                brief(other.get())
            )));
        }
        None => {
            return Err(GraphError::Format(format!(
                "there is no \"format\", which must be \"{FORMAT}\""
            )));
        }
    }
    let list = |key| object.get(key).and_then(|value| Items::of(value));
    let nodes = list("nodes").ok_or_else(|| format("there is no list \"nodes\""))?;
    let outputs = list("outputs").ok_or_else(|| format("there is no list \"outputs\""))?;
    let nodes: Vec<&RawValue> = nodes.take(NODES_MAX + 1).collect();
    if nodes.len() > NODES_MAX {
        return Err(GraphError::Format(format!(
            "there are more than {NODES_MAX} nodes, which is the most a graph may have"
        )));
    }
    let mut graph = RematGraph {
        name: label(&object, "name"),
        ..RematGraph::default()
    };
    for (index, value) in nodes.iter().enumerate() {
        graph.nodes.push(node(index, value, nodes.len())?);
    }
    for value in outputs {
        let output = number(value).filter(|&o| o < nodes.len() as u64);
        let output = output.ok_or_else(|| {
            GraphError::Format(format!(
                "output {} is none of the {} nodes",
                brief(value.get()),
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

/// The fields of a value, if it is an object.
fn fields(value: &RawValue) -> Result<Option<Fields<'_>>, GraphError> {
    let is_object = value.get().starts_with('{');
    Ok(is_object
        .then(|| serde_json::from_str(value.get()))
        .transpose()?)
}

fn string(value: &RawValue) -> Option<String> {
    serde_json::from_str(value.get()).ok()
}

/// A number in digits.
fn number(value: &RawValue) -> Option<u64> {
    serde_json::from_str(value.get()).ok()
}

/// A label; empty if it is missing.
fn label(object: &Fields, key: &str) -> String {
    object
        .get(key)
        .and_then(|value| string(value))
        .unwrap_or_default()
}

fn node(index: usize, value: &RawValue, count: usize) -> Result<Node, GraphError> {
    let object = fields(value)?
        .ok_or_else(|| GraphError::Format(format!("node {index} is not a JSON object")))?;
    let name = label(&object, "name");
    let error = |what: String| GraphError::Node {
        index,
        name: name.clone(),
        what,
    };
    let amount = |key: &str, default: Option<u64>| match object.get(key) {
        None => default.ok_or_else(|| error(format!("there is no \"{key}\""))),
        Some(value) => {
            let real = || serde_json::from_str(value.get()).ok().and_then(whole);
            number(value).or_else(real).ok_or_else(|| {
                error(format!(
                    "\"{key}\" is {}, not a whole number from 0 to 2^64-1",
                    brief(value.get())
                ))
            })
        }
    };
    let flag = |key: &str, default: bool| match object.get(key) {
        None => Ok(default),
        Some(value) => serde_json::from_str(value.get()).map_err(|_| {
            error(format!(
                "\"{key}\" is {}, neither true nor false",
                brief(value.get())
            ))
        }),
    };
    let indices = |key: &str| -> Result<Vec<u32>, GraphError> {
        let Some(list) = object.get(key) else {
            return Ok(Vec::new());
        };
        let list = Items::of(list).ok_or_else(|| error(format!("\"{key}\" is not a list")))?;
        let known = |value: &RawValue| match number(value).filter(|&j| j < count as u64) {
            Some(j) => Ok(j as u32),
            None => Err(error(format!(
                "\"{key}\" names {}, which is none of the {count} nodes",
                brief(value.get())
            ))),
        };
        let mut list = list.map(known).collect::<Result<Vec<u32>, _>>()?;
        list.sort_unstable();
        list.dedup();
        Ok(list)
    };
    Ok(Node {
        inputs: indices("inputs")?,
        bytes: amount("bytes", None)?,
        flops: amount("flops", Some(0))?,
        cost: amount("cost", Some(0))?,
        workspace: amount("workspace", Some(0))?,
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
