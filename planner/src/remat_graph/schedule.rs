//! Schedules of a graph: the order of its nodes, and the buffer that each of them takes over.

use super::RematGraph;
use serde_json::{Value, json};

/// One step of an explicit schedule.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Step {
    /// A node runs.
    Compute {
        /// The node.
        node: u32,
        /// The node whose buffer it takes over; that buffer is gone afterwards.
        reuse: Option<u32>,
    },
    /// The buffer of a node is freed.
    Free(u32),
    /// The copy of a node's buffer to the host begins.
    Offload(u32),
    /// The copy to the host completes, and the buffer on the device is freed.
    Offloaded(u32),
    /// A buffer for a node is allocated, and the copy from the host into it begins.
    Prefetch(u32),
    /// The copy from the host completes.
    Prefetched(u32),
}

impl Step {
    /// The node of the step.
    pub fn node(self) -> u32 {
        match self {
            Step::Compute { node, .. } => node,
            Step::Free(node)
            | Step::Offload(node)
            | Step::Offloaded(node)
            | Step::Prefetch(node)
            | Step::Prefetched(node) => node,
        }
    }

    fn json(self) -> Value {
        match self {
            Step::Compute { node, reuse: None } => json!({ "c": node }),
            Step::Compute {
                node,
                reuse: Some(from),
            } => json!({ "c": node, "reuse": from }),
            Step::Free(node) => json!({ "f": node }),
            Step::Offload(node) => json!({ "o": node }),
            Step::Offloaded(node) => json!({ "od": node }),
            Step::Prefetch(node) => json!({ "p": node }),
            Step::Prefetched(node) => json!({ "pd": node }),
        }
    }
}

/// The offsets of a step's bytes in the slab.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Place {
    /// The offset of the buffer that is computed or prefetched.
    pub offset: u64,
    /// The offset of the workspace; 0 if there is none.
    pub workspace: u64,
}

/// The steps of an order in which each node runs at most once. They compute in place wherever
/// [`Node::inplace`](super::Node::inplace) permits it, and free each buffer after its last use. The
/// order may omit persistent nodes only.
pub fn steps_in_place(graph: &RematGraph, order: &[u32]) -> Vec<Step> {
    let mut readers: Vec<usize> = graph.readers().iter().map(Vec::len).collect();
    let mut steps = Vec::with_capacity(2 * order.len());
    for &i in order {
        let node = &graph.nodes[i as usize];
        node.inputs.iter().for_each(|&j| readers[j as usize] -= 1);
        let reuse = node
            .inplace
            .iter()
            .copied()
            .find(|&j| readers[j as usize] == 0);
        steps.push(Step::Compute { node: i, reuse });
        let dies = |&j: &u32| {
            let (read, kept) = (
                readers[j as usize] > 0,
                graph.nodes[j as usize].persistent || graph.outputs.binary_search(&j).is_ok(),
            );
            !read && !kept && reuse != Some(j)
        };
        steps.extend(
            node.inputs
                .iter()
                .copied()
                .chain([i])
                .filter(dies)
                .map(Step::Free),
        );
    }
    steps
}

/// A schedule that consists only of the order of nodes, as JSON: `{"order": [i, ...]}`.
pub fn order_json(order: &[u32]) -> String {
    json!({ "order": order }).to_string()
}

/// An explicit schedule as JSON: `{"steps": [{"c": i}, {"c": i, "reuse": j}, {"f": i}, ...]}`.
pub fn steps_json(steps: &[Step]) -> String {
    json!({ "steps": steps.iter().map(|step| step.json()).collect::<Vec<Value>>() }).to_string()
}

/// An explicit schedule with offsets as JSON: `{"steps": [{"c": i, "off": bytes, "woff": bytes},
/// {"p": i, "off": bytes}, ...]}`.
pub fn placed_steps_json(graph: &RematGraph, steps: &[(Step, Option<Place>)]) -> String {
    let step = |&(step, place): &(Step, Option<Place>)| {
        let mut value = step.json();
        if let Some(place) = place {
            value["off"] = place.offset.into();
            if matches!(step, Step::Compute { node, .. } if graph.nodes[node as usize].workspace > 0)
            {
                value["woff"] = place.workspace.into();
            }
        }
        value
    };
    json!({ "steps": steps.iter().map(step).collect::<Vec<Value>>() }).to_string()
}
