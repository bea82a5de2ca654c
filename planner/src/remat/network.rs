//! The problem of the search: what can be computed, numbered without gaps, with neighbours in flat lists.

use crate::dag::{Dag, Task};
use crate::relations::Relations;
use crate::remat_graph::RematGraph;

/// Lists of numbers, one per key, behind each other.
#[derive(Clone, Debug, Default)]
pub(super) struct Lists {
    ends: Vec<u32>,
    items: Vec<u32>,
}

impl Lists {
    /// Gathers `(key, item)` pairs by key, each item once per key, ascending.
    pub fn gather(keys: usize, pairs: impl Iterator<Item = (u32, u32)>) -> Lists {
        let mut sorted: Vec<(u32, u32)> = pairs.collect();
        sorted.sort_unstable();
        sorted.dedup();
        let mut lists = Lists { ends: Vec::with_capacity(keys), items: Vec::with_capacity(sorted.len()) };
        let mut at = 0;
        for key in 0..keys as u32 {
            while at < sorted.len() && sorted[at].0 == key {
                lists.items.push(sorted[at].1);
                at += 1;
            }
            lists.ends.push(at as u32);
        }
        lists
    }

    /// The items of `key`, ascending.
    #[inline]
    pub fn of(&self, key: u32) -> &[u32] {
        let start = if key == 0 { 0 } else { self.ends[key as usize - 1] };
        &self.items[start as usize..self.ends[key as usize] as usize]
    }
}

/// What a [`Network`] is made from: one computation.
#[derive(Clone, Debug, Default)]
pub(super) struct Computation {
    pub bytes: u64,
    pub workspace: u64,
    pub cost: u64,
    /// May not run twice.
    pub once: bool,
    /// Computations whose result it reads.
    pub inputs: Vec<u32>,
    /// Computations that no run of this one may follow: they change in place what this one reads.
    pub before: Vec<u32>,
}

/// Computations, each making one buffer. The last is the *sink*: it reads every output, costs nothing and runs at the end.
#[derive(Clone, Debug)]
pub(super) struct Network {
    pub bytes: Vec<i64>,
    pub workspace: Vec<i64>,
    pub cost: Vec<u64>,
    pub once: Vec<bool>,
    pub inputs: Lists,
    pub consumers: Lists,
    /// By computation: those that must come after its last run.
    pub before: Lists,
    /// By computation: those of which no run may follow it.
    pub after: Lists,
    /// Cost of running everything once.
    pub base_cost: u128,
}

impl Network {
    /// The computations of a graph, whose bytes must sum to less than 2^62, and the node of each.
    pub fn of(graph: &RematGraph) -> (Network, Vec<u32>) {
        let nodes: Vec<u32> = (0u32..).zip(&graph.nodes).filter(|(_, n)| !n.persistent).map(|(i, _)| i).collect();
        let mut number = vec![None; graph.nodes.len()];
        nodes.iter().zip(0u32..).for_each(|(&i, c)| number[i as usize] = Some(c));
        let own = |list: &[u32]| list.iter().filter_map(|&j| number[j as usize]).collect::<Vec<u32>>();
        let mut computations: Vec<Computation> = Vec::with_capacity(nodes.len() + 1);
        computations.extend(nodes.iter().map(|&i| {
            let node = &graph.nodes[i as usize];
            let once = !node.recompute || !node.mutates.is_empty();
            let (bytes, workspace, cost) = (node.bytes, node.workspace, node.cost);
            Computation { bytes, workspace, cost, once, inputs: own(&node.inputs), before: Vec::new() }
        }));
        for (first, then) in graph.mutation_order() {
            if let (Some(first), Some(then)) = (number[first as usize], number[then as usize]) {
                computations[first as usize].before.push(then);
            }
        }
        (Network::new(computations, own(&graph.outputs)), nodes)
    }

    /// The tasks of a verified dag, whose bytes must sum to less than 2^62; buffers that hold data at the start are left out.
    ///
    /// A computation makes all that its task is the first to write. What several tasks write in turn, and what is handed out,
    /// is made once.
    pub fn of_dag(dag: &Dag) -> Network {
        let relations = Relations::new(dag);
        let task = |task: &Task| Computation {
            once: !task.repeatable,
            // Running it once is part of every schedule; what counts is what another run costs.
            cost: task.rerun.as_ref().map_or(task.cost, |rerun| rerun.cost),
            workspace: task.workspace_occupied().max(task.again().workspace_occupied()),
            ..Computation::default()
        };
        let mut computations: Vec<Computation> = dag.tasks.iter().map(task).collect();
        let mut outputs = Vec::new();
        for (b, buffer) in dag.buffers.iter().enumerate() {
            let writers = relations.writers.row(b);
            let (Some(&first), Some(&last)) = (writers.first(), writers.last()) else { continue };
            let users = relations.users.row(b);
            if !buffer.live_in {
                computations[first as usize].bytes += buffer.occupied();
                users.iter().filter(|&&user| user != first).for_each(|&user| computations[user as usize].inputs.push(first));
            }
            if writers.len() > 1 || buffer.live_in || buffer.live_out {
                writers.iter().for_each(|&writer| computations[writer as usize].once = true);
            }
            if buffer.live_out && !buffer.live_in {
                outputs.push(first);
            }
            // In turn, then those that only read.
            writers.windows(2).for_each(|pair| computations[pair[0] as usize].before.push(pair[1]));
            let readers = users.iter().filter(|user| writers.binary_search(user).is_err());
            computations[last as usize].before.extend(readers.filter(|_| writers.len() > 1 || buffer.live_in));
        }
        for (t, task) in (0u32..).zip(&dag.tasks) {
            task.after.iter().filter(|a| a.0 != t).for_each(|a| computations[a.index()].before.push(t));
        }
        outputs.sort_unstable();
        outputs.dedup();
        Network::new(computations, outputs)
    }

    /// `outputs` are live at the end. Byte counts must sum to less than 2^62.
    pub fn new(mut computations: Vec<Computation>, outputs: Vec<u32>) -> Network {
        computations.push(Computation { once: true, inputs: outputs, ..Computation::default() });
        let count = computations.len();
        let all = || (0u32..).zip(&computations);
        let edges = || all().flat_map(|(i, c)| c.inputs.iter().map(move |&j| (i, j)));
        let waits = || all().flat_map(|(i, c)| c.before.iter().map(move |&m| (i, m)));
        Network {
            bytes: computations.iter().map(|c| c.bytes as i64).collect(),
            workspace: computations.iter().map(|c| c.workspace as i64).collect(),
            cost: computations.iter().map(|c| c.cost).collect(),
            once: computations.iter().map(|c| c.once).collect(),
            inputs: Lists::gather(count, edges()),
            consumers: Lists::gather(count, edges().map(|(i, j)| (j, i))),
            before: Lists::gather(count, waits()),
            after: Lists::gather(count, waits().map(|(i, m)| (m, i))),
            base_cost: computations.iter().map(|c| u128::from(c.cost)).sum(),
        }
    }

    /// How many computations there are, with the sink.
    pub fn len(&self) -> usize {
        self.bytes.len()
    }

    /// The computation that reads the outputs.
    pub fn sink(&self) -> u32 {
        self.len() as u32 - 1
    }
}
