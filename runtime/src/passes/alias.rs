//! What the way back makes again, taken from the way forward where that makes the same value.
//!
//! Remaking writes a second chain of steps for what is cheap to make again, which says when: for
//! its use on the way back. Under a budget a search decides that, by running kernels again, and two
//! names of one value stand in its way: it would keep both, or make both. So the second name goes,
//! and whoever used it reads the first. Every bit stays as it was.

use rustc_hash::{FxHashMap, FxHashSet};
use smallvec::SmallVec;

use super::lower::{Arg, Task};
use super::stores::{argument, keep_stores};
use crate::backend::Target;
use crate::graph::{Graph, Phase};
use crate::ops::{NodeId, Op};

/// Tasks that do what these do, in an order in which they can run, where no task makes again what
/// another one makes on the way forward, if it can do without. What is inside of a checkpointed
/// segment is made again all the same.
pub(crate) fn alias(graph: &Graph, target: &Target, tasks: &[Task]) -> Vec<Task> {
    let written = |task: &Task| {
        task.spec
            .stores
            .iter()
            .map(|s| argument(task, s.operand))
            .collect::<Vec<_>>()
    };
    let mut writers: FxHashMap<Arg, u32> = FxHashMap::default();
    tasks
        .iter()
        .flat_map(written)
        .for_each(|arg| *writers.entry(arg).or_default() += 1);
    let once = |node: &NodeId| writers.get(&Arg::Buffer(*node)) == Some(&1);
    let mut first = first_of_same(graph);
    let pinned = graph.pinned();
    first.retain(|again, first| {
        let of = |id| graph.origin(id);
        let names = of(*again).phase == Phase::Again
            && of(*again).segment == 0
            && of(*first).phase == Phase::Forward;
        names && once(again) && once(first) && !pinned[again.at()]
    });
    // A task that cannot do without a store keeps it.
    let second = |first: &FxHashMap<NodeId, NodeId>, arg: Arg| matches!(arg, Arg::Buffer(node) if first.contains_key(&node));
    let mut fewer: Vec<Option<Task>> = Vec::with_capacity(tasks.len());
    for task in tasks {
        let others: Vec<_> = task
            .spec
            .stores
            .iter()
            .copied()
            .filter(|s| !second(&first, argument(task, s.operand)))
            .collect();
        let rest = if others.len() == task.spec.stores.len() {
            Some(task.clone())
        } else {
            keep_stores(graph, target, task, &others)
        };
        let stays = rest.is_none() && !others.is_empty();
        if stays {
            first.retain(|again, _| !written(task).contains(&Arg::Buffer(*again)));
        }
        fewer.push(if stays { Some(task.clone()) } else { rest });
    }
    let mut number = Vec::with_capacity(tasks.len());
    let mut out: Vec<Task> = Vec::with_capacity(tasks.len());
    for task in fewer {
        number.push(task.is_some().then_some(out.len()));
        out.extend(task.map(|task| renamed(task, &first)));
    }
    for task in &mut out {
        task.after = task
            .after
            .iter()
            .filter_map(|&before| number[before])
            .collect();
    }
    out
}

/// The task with the second names of values replaced by the first.
fn renamed(mut task: Task, first: &FxHashMap<NodeId, NodeId>) -> Task {
    let name = |node: NodeId| first.get(&node).copied().unwrap_or(node);
    let before: FxHashSet<Arg> = task.args.iter().copied().collect();
    let mut doubled: FxHashSet<NodeId> = FxHashSet::default();
    for arg in &mut task.args {
        if let Arg::Buffer(node) = arg
            && name(*node) != *node
        {
            *node = name(*node);
            doubled.extend(before.contains(&Arg::Buffer(*node)).then_some(*node));
        }
    }
    // What is read under both names may be walked in two ways.
    task.in_place = task
        .in_place
        .iter()
        .map(|&(from, to)| (name(from), to))
        .filter(|(from, _)| !doubled.contains(from))
        .collect();
    task
}

/// For each node that computes what one before it does, that one.
fn first_of_same(graph: &Graph) -> FxHashMap<NodeId, NodeId> {
    let mut first: FxHashMap<NodeId, NodeId> = FxHashMap::default();
    let mut known: FxHashMap<SmallVec<[NodeId; 3]>, Vec<NodeId>> = FxHashMap::default();
    for id in graph.ids() {
        let node = graph.node(id);
        if matches!(node.op, Op::Assign(_) | Op::Bind { .. }) || node.op.is_check() {
            continue;
        }
        let inputs: SmallVec<[NodeId; 3]> = node
            .inputs
            .iter()
            .map(|i| first.get(i).copied().unwrap_or(*i))
            .collect();
        let alike = known.entry(inputs).or_default();
        let same = |other: &&NodeId| {
            let o = graph.node(**other);
            o.op == node.op
                && o.dtype == node.dtype
                && o.dims == node.dims
                && graph.origin(**other).part == graph.origin(id).part
        };
        match alike.iter().find(same) {
            Some(&other) => _ = first.insert(id, other),
            None => alike.push(id),
        }
    }
    first
}
