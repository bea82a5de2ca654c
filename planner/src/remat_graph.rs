//! Computation graphs as files (the format `remat-graph-v1`) and schedules of these graphs.
//!
//! One JSON object `{"format", "name", "nodes": [...], "outputs": [index, ...]}`, plain or gzip. A
//! node produces exactly one buffer, and every node comes after its inputs. Keys of a node:
//!
//! | key | meaning |
//! | --- | --- |
//! | `name` | shown in reports and errors |
//! | `inputs` | indices of the nodes whose buffers it reads |
//! | `bytes` | size of its buffer |
//! | `flops`, `cost` | arithmetic, and the cost that recomputation minimises; 0 unless given |
//! | `workspace` | scratch bytes alive only while it runs; 0 unless given |
//! | `persistent` | always resident, never computed, counted apart as the *fixed* part; false unless given |
//! | `inplace` | inputs of the same size whose bytes its buffer may take over if they die here |
//! | `mutates` | persistent buffers that it changes: it runs once, and no other reader of them runs after it |
//! | `recompute` | false: it runs once |
//!
//! Other keys are labels and are ignored. A graph has at most 1,000,000 nodes. Memory is counted in
//! bytes as given, without alignment. While a node runs, memory holds all live buffers, its own
//! buffer and its workspace.

use crate::dag::{Buffer, BufferId, Dag, DagError, Kind, MayReuse, Task, TaskId};
use crate::order::{BestOrder, Effort, Sizes, best_order};
use slabwise_packer::{brief, shortened};
use std::time::Instant;

mod read;
mod schedule;

pub use read::TEXT_MAX;
pub use schedule::{Place, Step, order_json, placed_steps_json, steps_in_place, steps_json};

/// One operation and the buffer that it produces.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Node {
    /// Its name in the file.
    pub name: String,
    /// The nodes whose buffers it reads, ascending, each once.
    pub inputs: Vec<u32>,
    /// The size of its buffer.
    pub bytes: u64,
    /// Its arithmetic.
    pub flops: u64,
    /// The cost of running it once, in the file's unit.
    pub cost: u64,
    /// Scratch bytes alive only while it runs.
    pub workspace: u64,
    /// Always resident and never computed.
    pub persistent: bool,
    /// Inputs whose bytes its buffer may take over if they die here. They are neither persistent
    /// nor outputs, and have its own size.
    pub inplace: Vec<u32>,
    /// Persistent nodes whose buffers it changes.
    pub mutates: Vec<u32>,
    /// Whether it may be recomputed.
    pub recompute: bool,
}

/// A verified graph: indices are in range, each node comes after its inputs, an order exists that
/// respects every `mutates`, and the sums of bytes (with workspaces), of costs and of flops fit 64
/// bits.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct RematGraph {
    /// Its name in the file.
    pub name: String,
    /// The nodes, each after its inputs.
    pub nodes: Vec<Node>,
    /// The nodes whose buffers are live at the end, ascending, each once.
    pub outputs: Vec<u32>,
}

/// Why bytes are not a valid graph.
#[derive(Debug, thiserror::Error)]
pub enum GraphError {
    /// The gzip data is damaged or cut short.
    #[error("damaged gzip data: {0}")]
    Gzip(#[source] std::io::Error),
    /// More text than a graph may have.
    #[error("more than {most} bytes of text, which is the most a graph may have")]
    TooLarge {
        /// The limit.
        most: u64,
    },
    /// The text is not JSON; the message names line and column.
    #[error("not JSON: {}", shortened(&.0.to_string(), 160))]
    Json(#[from] serde_json::Error),
    /// The object as a whole breaks the format.
    #[error("{0}")]
    Format(String),
    /// A node breaks the format.
    #[error("node {index} `{}`: {what}", brief(name))]
    Node {
        /// Its index.
        index: usize,
        /// Its name.
        name: String,
        /// The reason.
        what: String,
    },
    /// The nodes depend on each other in a cycle, or are too large together.
    #[error("{}", shortened(&.0.to_string(), 300))]
    Dag(#[from] DagError),
}

/// A graph as the planner's problem: one task per computed node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GraphDag {
    /// Tasks in the order of nodes; task `t` writes buffer `t` and nothing else. Buffers are not
    /// aligned.
    pub dag: Dag,
    /// The node of each task.
    pub node_of_task: Vec<u32>,
    /// The task of each node; none for a persistent one.
    pub task_of_node: Vec<Option<u32>>,
}

impl RematGraph {
    /// Reads a graph from the content of a file, gzip or plain text (detected from the content).
    ///
    /// # Errors
    /// A [`GraphError`], which names the offending node, if the content breaks a rule of the
    /// format.
    pub fn read(content: &[u8]) -> Result<RematGraph, GraphError> {
        read::read(content)
    }

    /// The bytes of all persistent nodes: resident in every order, and not part of any peak.
    pub fn fixed_bytes(&self) -> u64 {
        self.nodes
            .iter()
            .filter(|node| node.persistent)
            .map(|node| node.bytes)
            .sum()
    }

    /// The cost of running each node once.
    pub fn base_cost(&self) -> u64 {
        self.nodes
            .iter()
            .filter(|node| !node.persistent)
            .map(|node| node.cost)
            .sum()
    }

    /// The readers of each node, ascending.
    pub fn readers(&self) -> Vec<Vec<u32>> {
        let mut readers = vec![Vec::new(); self.nodes.len()];
        for (i, node) in (0u32..)
            .zip(&self.nodes)
            .filter(|(_, node)| !node.persistent)
        {
            node.inputs
                .iter()
                .for_each(|&j| readers[j as usize].push(i));
        }
        readers
    }

    /// Pairs of nodes of which the first must have its last run before the second runs, because the
    /// second changes an input of the first. Among several nodes that change a buffer, one that
    /// also reads it comes first; the others follow in index order.
    pub fn mutation_order(&self) -> Vec<(u32, u32)> {
        let mut mutators = vec![Vec::new(); self.nodes.len()];
        for (i, node) in (0u32..).zip(&self.nodes) {
            node.mutates
                .iter()
                .for_each(|&p| mutators[p as usize].push(i));
        }
        if mutators.iter().all(Vec::is_empty) {
            return Vec::new();
        }
        let readers = self.readers();
        let mut pairs = Vec::new();
        for (mutators, readers) in mutators.iter_mut().zip(&readers) {
            mutators.sort_by_key(|m| (readers.binary_search(m).is_err(), *m));
            let Some(&first) = mutators.first() else {
                continue;
            };
            let reading = mutators.partition_point(|m| readers.binary_search(m).is_ok());
            pairs.extend(
                readers
                    .iter()
                    .filter(|r| mutators[..reading].binary_search(r).is_err())
                    .map(|&reader| (reader, first)),
            );
            pairs.extend(mutators.windows(2).map(|pair| (pair[0], pair[1])));
            // Two nodes that each read a buffer that the other one changes depend on each other.
            pairs.extend(
                mutators[..reading]
                    .iter()
                    .skip(1)
                    .map(|&reader| (reader, first)),
            );
        }
        pairs.sort_unstable();
        pairs.dedup();
        pairs
    }

    /// The planner's problem, with or without permission to compute in place.
    pub fn to_dag(&self, in_place: bool) -> GraphDag {
        let mut dag = Dag::new();
        let mut task_of_node = vec![None; self.nodes.len()];
        let mut node_of_task = Vec::new();
        for (i, node) in self
            .nodes
            .iter()
            .enumerate()
            .filter(|(_, node)| !node.persistent)
        {
            task_of_node[i] = Some(node_of_task.len() as u32);
            node_of_task.push(i as u32);
            dag.add_buffer(Buffer {
                align: 1,
                ..Buffer::new(node.name.clone(), Kind::Other, node.bytes)
            });
        }
        for &output in &self.outputs {
            if let Some(task) = task_of_node[output as usize] {
                dag.buffers[task as usize].live_out = true;
            }
        }
        let computed = |nodes: &[u32]| {
            nodes
                .iter()
                .filter_map(|&j| task_of_node[j as usize])
                .collect::<Vec<u32>>()
        };
        for (t, &i) in (0u32..).zip(&node_of_task) {
            let node = &self.nodes[i as usize];
            let reads: Vec<_> = computed(&node.inputs).into_iter().map(BufferId).collect();
            let own = BufferId(t);
            let task = dag.add_task(Task {
                workspace: node.workspace,
                cost: node.cost,
                ..Task::new(node.name.clone(), &reads, &[own])
            });
            if in_place {
                let from = computed(&node.inplace).into_iter().map(BufferId);
                dag.may_reuse.extend(from.map(|from| MayReuse {
                    task,
                    from,
                    to: own,
                }));
            }
        }
        for (before, after) in self.mutation_order() {
            if let (Some(before), Some(after)) =
                (task_of_node[before as usize], task_of_node[after as usize])
            {
                dag.tasks[after as usize].after.push(TaskId(before));
            }
        }
        GraphDag {
            dag,
            node_of_task,
            task_of_node,
        }
    }

    /// Searches for the order of all computed nodes with the smallest peak above the fixed part,
    /// each run once, and for a lower bound on all peaks. With `in_place`, the peak is that of
    /// [`steps_in_place`].
    pub fn minimise_peak(&self, in_place: bool, effort: Effort) -> BestOrder<u32> {
        let start = Instant::now();
        let GraphDag {
            dag, node_of_task, ..
        } = self.to_dag(in_place);
        best_order(&dag, in_place, effort.after(start.elapsed()), Sizes::Exact)
            .renamed(|task| node_of_task[task.index()])
    }
}
