//! The input of the search: computations, numbered without gaps, with neighbours in flat lists.

use rustc_hash::{FxHashMap, FxHashSet};
use std::cmp::Reverse;
use std::collections::BinaryHeap;

use crate::dag::relations::Relations;
use crate::dag::{BufferId, Dag, Task, TaskId};
use crate::remat_graph::RematGraph;

/// Lists of numbers, one per key, stored contiguously.
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
        let mut lists = Lists {
            ends: Vec::with_capacity(keys),
            items: Vec::with_capacity(sorted.len()),
        };
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

    /// Extends the keys to `keys`; the new lists are empty.
    fn grow(&mut self, keys: usize) {
        self.ends.resize(keys, self.items.len() as u32);
    }

    /// All `(key, item)` pairs.
    fn pairs(&self) -> impl Iterator<Item = (u32, u32)> + '_ {
        (0..self.ends.len() as u32)
            .flat_map(|key| self.of(key).iter().map(move |&item| (key, item)))
    }

    /// The items of `key`, ascending.
    #[inline]
    pub fn of(&self, key: u32) -> &[u32] {
        let start = if key == 0 {
            0
        } else {
            self.ends[key as usize - 1]
        };
        &self.items[start as usize..self.ends[key as usize] as usize]
    }
}

/// One computation of a [`Network`], with its first value.
#[derive(Clone, Debug, Default)]
pub(super) struct Computation {
    pub bytes: u64,
    pub workspace: u64,
    /// The part of its bytes that it writes over operands of which it is the only reader.
    pub in_place: u64,
    pub cost: u64,
    /// Whether it must run exactly once.
    pub once: bool,
    /// The values it reads.
    pub inputs: Vec<u32>,
    /// Computations that all of its runs must precede, because they change its operands in place.
    pub before: Vec<u32>,
}

/// Computations, and the *values* they make. The first value of a computation has the computation's
/// number; further values are numbered after all computations. The last computation is the *sink*:
/// it reads every output, costs nothing and runs at the end.
#[derive(Clone, Debug)]
pub(super) struct Network {
    /// By value.
    pub bytes: Vec<i64>,
    /// The bytes that its step needs besides values; negative if values share bytes in place.
    pub workspace: Vec<i64>,
    pub cost: Vec<u64>,
    pub once: Vec<bool>,
    /// By computation, the values that it reads.
    pub inputs: Lists,
    /// By value, the computations that read it.
    pub consumers: Lists,
    /// By computation, its values after the first.
    more: Lists,
    /// For each value numbered after the computations, its computation.
    makers: Vec<u32>,
    /// By computation, those that must come after its last run.
    pub before: Lists,
    /// By computation, those of which no run may follow it.
    pub after: Lists,
    /// The fetches, if there are any, are numbered after it.
    sink: u32,
    /// By fetch, the value that it fetches.
    fetches: Vec<u32>,
    /// By value, its fetch, or the sink if it has none; empty if there are no fetches.
    fetch_of: Vec<u32>,
    /// The cost of running every computation once.
    pub base_cost: u128,
}

impl Network {
    /// The computations of a graph, whose bytes must sum to less than 2^62, and the node of each.
    pub fn of(graph: &RematGraph) -> (Network, Vec<u32>) {
        let nodes: Vec<u32> = (0u32..)
            .zip(&graph.nodes)
            .filter(|(_, n)| !n.persistent)
            .map(|(i, _)| i)
            .collect();
        let mut number = vec![None; graph.nodes.len()];
        nodes
            .iter()
            .zip(0u32..)
            .for_each(|(&i, c)| number[i as usize] = Some(c));
        let own = |list: &[u32]| {
            list.iter()
                .filter_map(|&j| number[j as usize])
                .collect::<Vec<u32>>()
        };
        let mut computations: Vec<Computation> = Vec::with_capacity(nodes.len() + 1);
        computations.extend(nodes.iter().map(|&i| {
            let node = &graph.nodes[i as usize];
            let once = !node.recompute || !node.mutates.is_empty();
            let (bytes, workspace, cost) = (node.bytes, node.workspace, node.cost);
            Computation {
                bytes,
                workspace,
                cost,
                once,
                inputs: own(&node.inputs),
                ..Computation::default()
            }
        }));
        for (first, then) in graph.mutation_order() {
            if let (Some(first), Some(then)) = (number[first as usize], number[then as usize]) {
                computations[first as usize].before.push(then);
            }
        }
        (
            Network::new(computations, Vec::new(), own(&graph.outputs)),
            nodes,
        )
    }

    /// The tasks of a verified dag, whose bytes must sum to less than 2^62; buffers that hold data
    /// at the start are left out.
    ///
    /// The values of a computation are the buffers that its task is the first to write; buffers
    /// with the same users form one value. A computation runs only once if it writes a buffer with
    /// several writers, an output or a buffer with data at the start. `order` runs every task once:
    /// a task may overwrite a buffer of which it is the last user. With recomputation another task
    /// may be the last; whether a schedule meets a budget is decided by its plan.
    ///
    /// Also returns the buffers of each value.
    pub fn of_dag(dag: &Dag, order: &[TaskId]) -> (Network, Vec<Vec<BufferId>>) {
        let relations = Relations::new(dag);
        let task = |task: &Task| Computation {
            once: !task.repeatable,
            // Every schedule includes the first run, so only the cost of further runs matters.
            cost: task.rerun.as_ref().map_or(task.cost, |rerun| rerun.cost),
            workspace: task
                .workspace_occupied()
                .max(task.recomputed().workspace_occupied()),
            ..Computation::default()
        };
        let mut computations: Vec<Computation> = dag.tasks.iter().map(task).collect();
        let (mut outputs, mut more) = (Vec::new(), Vec::new());
        // By the task that makes it, its users, and whether it is an output.
        let mut values: FxHashMap<(u32, &[u32], bool), u32> = FxHashMap::default();
        let mut makes = vec![false; dag.tasks.len()];
        let mut buffers: Vec<(u32, BufferId)> = Vec::new();
        for (b, buffer) in dag.buffers.iter().enumerate() {
            let writers = relations.writers.row(b);
            let (Some(&first), Some(&last)) = (writers.first(), writers.last()) else {
                continue;
            };
            let users = relations.users.row(b);
            if !buffer.live_in {
                let bytes = buffer.occupied();
                let key = (first, users, buffer.live_out);
                let value = *values.entry(key).or_insert_with(|| {
                    if !std::mem::replace(&mut makes[first as usize], true) {
                        return first;
                    }
                    more.push((first, 0));
                    (dag.tasks.len() + more.len()) as u32
                });
                match (value as usize).checked_sub(dag.tasks.len() + 1) {
                    Some(at) => more[at].1 += bytes,
                    None => computations[first as usize].bytes += bytes,
                }
                buffers.push((value, BufferId(b as u32)));
                users
                    .iter()
                    .filter(|&&user| user != first)
                    .for_each(|&user| computations[user as usize].inputs.push(value));
                outputs.extend(buffer.live_out.then_some(value));
            }
            if writers.len() > 1 || buffer.live_in || buffer.live_out {
                writers
                    .iter()
                    .for_each(|&writer| computations[writer as usize].once = true);
            }
            // Writers in order, then the readers.
            writers
                .windows(2)
                .for_each(|pair| computations[pair[0] as usize].before.push(pair[1]));
            let readers = users
                .iter()
                .filter(|user| writers.binary_search(user).is_err());
            computations[last as usize]
                .before
                .extend(readers.filter(|_| writers.len() > 1 || buffer.live_in));
        }
        let mut pairs = dag.may_reuse.clone();
        pairs.sort_unstable_by_key(|pair| {
            (
                pair.task,
                Reverse(dag.buffers[pair.to.index()].occupied()),
                *pair,
            )
        });
        let mut taken = FxHashSet::default();
        let mut place = vec![0; dag.tasks.len()];
        (0u32..)
            .zip(order)
            .for_each(|(at, task)| place[task.index()] = at);
        for pair in pairs {
            let users = relations.users.row(pair.from.index());
            let last = users.iter().max_by_key(|&&user| place[user as usize]) == Some(&pair.task.0);
            // An overwritten value is gone: a later reader would need it recomputed first.
            let first = relations.writers.row(pair.to.index()).first() == Some(&pair.task.0);
            let free =
                !taken.contains(&(pair.task, pair.from)) && !taken.contains(&(pair.task, pair.to));
            if last && first && free && !dag.buffers[pair.from.index()].live_in {
                taken.extend([(pair.task, pair.from), (pair.task, pair.to)]);
                computations[pair.task.index()].in_place += dag.buffers[pair.to.index()].occupied();
            }
        }
        for (t, task) in (0u32..).zip(&dag.tasks) {
            task.after
                .iter()
                .filter(|a| a.0 != t)
                .for_each(|a| computations[a.index()].before.push(t));
        }
        outputs.sort_unstable();
        outputs.dedup();
        let net = Network::new(computations, more, outputs);
        let mut buffers_of = vec![Vec::new(); net.values()];
        buffers
            .into_iter()
            .for_each(|(value, buffer)| buffers_of[value as usize].push(buffer));
        (net, buffers_of)
    }

    /// `more` holds the makers and bytes of the values after the first of a computation, numbered
    /// from the number of computations plus one; `outputs` are live at the end. Byte counts must
    /// sum to less than 2^62.
    pub fn new(
        mut computations: Vec<Computation>,
        more: Vec<(u32, u64)>,
        outputs: Vec<u32>,
    ) -> Network {
        computations.push(Computation {
            once: true,
            inputs: outputs,
            ..Computation::default()
        });
        let count = computations.len();
        let all = || (0u32..).zip(&computations);
        let edges = || all().flat_map(|(i, c)| c.inputs.iter().map(move |&j| (i, j)));
        let waits = || all().flat_map(|(i, c)| c.before.iter().map(move |&m| (i, m)));
        Network {
            bytes: computations
                .iter()
                .map(|c| c.bytes)
                .chain(more.iter().map(|m| m.1))
                .map(|bytes| bytes as i64)
                .collect(),
            workspace: computations
                .iter()
                .map(|c| c.workspace as i64 - c.in_place as i64)
                .collect(),
            cost: computations.iter().map(|c| c.cost).collect(),
            once: computations.iter().map(|c| c.once).collect(),
            inputs: Lists::gather(count, edges()),
            consumers: Lists::gather(count + more.len(), edges().map(|(i, j)| (j, i))),
            more: Lists::gather(
                count,
                (count as u32..).zip(&more).map(|(value, m)| (m.0, value)),
            ),
            makers: more.iter().map(|m| m.0).collect(),
            before: Lists::gather(count, waits()),
            after: Lists::gather(count, waits().map(|(i, m)| (m, i))),
            sink: count as u32 - 1,
            fetches: Vec::new(),
            fetch_of: Vec::new(),
            base_cost: computations.iter().map(|c| u128::from(c.cost)).sum(),
        }
    }

    /// The same problem with a *fetch* for each value that may be offloaded: a computation that
    /// makes the value from its copy on the host. It reads no values and takes no time, because the
    /// time of the copy engines is modelled elsewhere; it only needs an earlier copy to offload.
    /// The values after the first of a computation get other numbers (see
    /// [`Network::without_fetches`]).
    pub fn with_fetches(&self, may_be_offloaded: impl Fn(u32) -> bool) -> Network {
        let count = self.len();
        let sent: Vec<u32> = (0..self.values() as u32)
            .filter(|&value| value != self.sink && may_be_offloaded(value))
            .collect();
        let all = count + sent.len();
        let number = |value: u32| {
            if (value as usize) < count {
                value
            } else {
                value + sent.len() as u32
            }
        };
        let mut net = self.clone();
        net.bytes.splice(count..count, sent.iter().map(|_| 0));
        net.workspace.resize(all, 0);
        net.cost.resize(all, 0);
        net.once.resize(all, false);
        net.fetches = sent.iter().map(|&value| number(value)).collect();
        net.fetch_of = vec![self.sink; net.bytes.len()];
        (count as u32..)
            .zip(&net.fetches)
            .for_each(|(fetch, &value)| net.fetch_of[value as usize] = fetch);
        net.inputs = Lists::gather(
            all,
            self.inputs.pairs().map(|(i, value)| (i, number(value))),
        );
        net.consumers = Lists::gather(
            net.bytes.len(),
            self.consumers.pairs().map(|(value, i)| (number(value), i)),
        );
        net.before.grow(all);
        net.after.grow(all);
        let made = self.more.pairs().map(|(i, value)| (i, number(value)));
        net.more = Lists::gather(
            all,
            made.chain((count as u32..).zip(net.fetches.iter().copied())),
        );
        net
    }

    /// The number of a value in the network without fetches.
    pub fn without_fetches(&self, value: u32) -> u32 {
        if (value as usize) < self.len() {
            value
        } else {
            value - self.fetches.len() as u32
        }
    }

    /// The value that a computation fetches, if it is a fetch.
    #[inline]
    pub fn fetched(&self, node: u32) -> Option<u32> {
        node.checked_sub(self.sink + 1)
            .map(|fetch| self.fetches[fetch as usize])
    }

    /// The fetch of a value, if it may be offloaded.
    #[inline]
    pub fn fetch_of(&self, value: u32) -> Option<u32> {
        self.fetch_of
            .get(value as usize)
            .copied()
            .filter(|&fetch| fetch != self.sink)
    }

    /// The number of computations, including the sink and fetches.
    pub fn len(&self) -> usize {
        self.cost.len()
    }

    /// The number of values.
    pub fn values(&self) -> usize {
        self.bytes.len()
    }

    /// The values that a computation makes, the first one first.
    #[inline]
    pub fn makes(&self, node: u32) -> impl Iterator<Item = u32> + '_ {
        std::iter::once(node).chain(self.more.of(node).iter().copied())
    }

    /// The computation that makes a value.
    #[inline]
    pub fn maker(&self, value: u32) -> u32 {
        (value as usize)
            .checked_sub(self.len())
            .map_or(value, |at| self.makers[at])
    }

    /// All computations once, the sink at the end, as close to the order of numbers as dependencies
    /// allow.
    pub fn program_order(&self) -> Vec<u32> {
        let count = self.sink + 1;
        let mut waiting: Vec<usize> = (0..count)
            .map(|i| self.inputs.of(i).len() + self.after.of(i).len())
            .collect();
        let mut ready: BinaryHeap<Reverse<u32>> = (0..count)
            .filter(|&i| waiting[i as usize] == 0)
            .map(Reverse)
            .collect();
        let mut order = Vec::with_capacity(count as usize);
        while let Some(Reverse(i)) = ready.pop() {
            if i != self.sink {
                order.push(i);
            }
            let readers = self.makes(i).flat_map(|value| self.consumers.of(value));
            for &next in readers.chain(self.before.of(i)) {
                waiting[next as usize] -= 1;
                if waiting[next as usize] == 0 {
                    ready.push(Reverse(next));
                }
            }
        }
        order.push(self.sink);
        order
    }

    /// The computation that reads the outputs.
    pub fn sink(&self) -> u32 {
        self.sink
    }
}
