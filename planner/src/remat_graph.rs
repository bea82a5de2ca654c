//! Computation graphs as files: the format `remat-graph-v1`, and schedules of them.
//!
//! One JSON object `{"format", "name", "nodes": [...], "outputs": [index, ...]}`, plain or gzip. A
//! node makes exactly one buffer, and nodes stand in an order that respects what they read. Keys of
//! a node:
//!
//! | key | meaning |
//! | --- | --- |
//! | `name` | shown in reports and errors |
//! | `inputs` | indices of the nodes whose buffers it reads |
//! | `bytes` | size of its buffer |
//! | `flops`, `cost` | arithmetic, and what recomputation minimises; 0 unless given |
//! | `workspace` | scratch bytes alive only while it runs; 0 unless given |
//! | `persistent` | always resident, never computed, counted apart as the *fixed* part; false unless given |
//! | `inplace` | inputs of the same size whose bytes its buffer may take over if they die here |
//! | `mutates` | persistent buffers that it changes: it runs once, and no other reader of them runs after it |
//! | `recompute` | false: it runs once |
//!
//! Other keys are labels and are ignored. Memory is counted in bytes as they stand, without
//! alignment. While a node runs it holds all live buffers, its own and its workspace.

use crate::dag::{Buffer, BufferId, Dag, DagError, Kind, MayReuse, Task, TaskId};
use crate::order::{BestOrder, Effort, Sizes, best_order};
use crate::shorten::{brief, shortened};
use std::time::Instant;

mod read;
mod schedule;

pub use read::TEXT_MAX;
pub use schedule::{Place, Step, order_json, placed_steps_json, steps_in_place, steps_json};

/// One operation and the buffer it makes.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Node {
    /// What the file calls it.
    pub name: String,
    /// The nodes whose buffers it reads, ascending, each once.
    pub inputs: Vec<u32>,
    /// The size of its buffer.
    pub bytes: u64,
    /// Its arithmetic.
    pub flops: u64,
    /// What running it once costs, in the file's unit.
    pub cost: u64,
    /// Scratch bytes alive only while it runs.
    pub workspace: u64,
    /// Always resident and never computed.
    pub persistent: bool,
    /// Inputs whose bytes its buffer may take over where they die: none persistent, none an output,
    /// all of its own size.
    pub inplace: Vec<u32>,
    /// Persistent nodes whose buffers it changes.
    pub mutates: Vec<u32>,
    /// May run more than once.
    pub recompute: bool,
}

/// A graph that was read and verified: indices are in range, each node stands after those it reads,
/// an order exists that respects every `mutates`, and the sums of bytes (with workspaces), of costs
/// and of flops fit 64 bits.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct RematGraph {
    /// What the file calls it.
    pub name: String,
    /// The nodes, each after those it reads.
    pub nodes: Vec<Node>,
    /// The nodes whose buffers are there at the end, ascending, each once.
    pub outputs: Vec<u32>,
}

/// Why bytes are no graph.
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
    /// The text is no JSON; the message names line and column.
    #[error("not JSON: {}", shortened(&.0.to_string(), 160))]
    Json(#[from] serde_json::Error),
    /// The object as a whole is not what the format asks for.
    #[error("{0}")]
    Format(String),
    /// A node is not what the format asks for.
    #[error("node {index} `{}`: {what}", brief(name))]
    Node {
        /// Its index.
        index: usize,
        /// Its name.
        name: String,
        /// What is wrong with it.
        what: String,
    },
    /// Nodes wait for each other, or together are too large.
    #[error("{}", shortened(&.0.to_string(), 300))]
    Dag(#[from] DagError),
}

/// A graph as the planner's problem: a task for each node that is computed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GraphDag {
    /// Tasks in the order of nodes; task `t` writes buffer `t` and nothing else. Buffers are not
    /// aligned.
    pub dag: Dag,
    /// For each task its node.
    pub node_of_task: Vec<u32>,
    /// For each node its task; none for a persistent one.
    pub task_of_node: Vec<Option<u32>>,
}

impl RematGraph {
    /// Reads a graph from the content of a file, gzip or plain text (told by content).
    ///
    /// # Errors
    /// A [`GraphError`] that names the node, for all that the type rules out.
    pub fn read(content: &[u8]) -> Result<RematGraph, GraphError> {
        read::read(content)
    }

    /// The bytes of all persistent nodes: resident whatever the order, and not part of any peak.
    pub fn fixed_bytes(&self) -> u64 {
        self.nodes
            .iter()
            .filter(|node| node.persistent)
            .map(|node| node.bytes)
            .sum()
    }

    /// What running each node once costs.
    pub fn base_cost(&self) -> u64 {
        self.nodes
            .iter()
            .filter(|node| !node.persistent)
            .map(|node| node.cost)
            .sum()
    }

    /// For each node those that read it, ascending.
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

    /// Pairs of nodes of which the first must have run for good before the second runs, because the
    /// second changes what the first reads. Of several that change a buffer, the one that reads it
    /// comes first, the others follow as they stand.
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
            // Two that read what the other changes wait for each other.
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

    /// The planner's problem, with the permissions to compute in place or without.
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

    /// Looks for the order of all nodes that are computed with the smallest peak above the fixed
    /// part, each run once, and for a lower bound on all peaks. In place, it is the peak of
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
