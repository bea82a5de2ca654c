//! What a kernel is when it runs again to make its buffers a second time: without the variables
//! that it assigns.
//!
//! A norm over a batch moves its running statistics where it computes the batch's; computed again,
//! it may not move them again.

use rustc_hash::FxHashSet;
use slabwise_kernels::spec::{Access, Body, Store};

use super::layout::Containers;
use super::lower::{Arg, Task};
use super::stores::{argument, keep_stores};
use crate::backend::Target;
use crate::graph::Graph;
use crate::ops::NodeId;

/// The task as it runs again: itself if it assigns no variable, less if it does. `None` if it may
/// run only once, as what makes one of the `kept` does.
pub(super) fn rerun(
    graph: &Graph,
    target: &Target,
    task: &Task,
    kept: &FxHashSet<Arg>,
) -> Option<Task> {
    if matches!(task.spec.body, Body::CheckIndex(_)) || makes(task, kept) {
        return None;
    }
    let assigned = assigned(task);
    if assigned.is_empty() {
        return Some(task.clone());
    }
    let stores: Vec<Store> = task
        .spec
        .stores
        .iter()
        .copied()
        .filter(|s| matches!(argument(task, s.operand), Arg::Buffer(_)))
        .collect();
    // What it assigned by then it cannot take as it was.
    keep_stores(graph, target, task, &stores)
        .filter(|lean| !lean.args.iter().any(|arg| assigned.contains(arg)))
}

/// The buffers of values that are never made again.
pub(super) fn kept(graph: &Graph) -> FxHashSet<Arg> {
    if graph.kept.is_empty() {
        return FxHashSet::default();
    }
    let containers = Containers::of_all(graph);
    let buffer = |&id: &NodeId| Arg::Buffer(containers.of(id).unwrap_or(id));
    graph.kept.iter().map(buffer).collect()
}

/// Whether a task writes one of these.
pub(super) fn makes(task: &Task, buffers: &FxHashSet<Arg>) -> bool {
    let arguments = task.spec.arguments();
    !buffers.is_empty()
        && task
            .args
            .iter()
            .zip(&arguments)
            .any(|(arg, (_, _, access))| *access != Access::Read && buffers.contains(arg))
}

/// The variables that a task assigns.
pub(super) fn assigned(task: &Task) -> FxHashSet<Arg> {
    let arguments = task.spec.arguments();
    let written = task
        .args
        .iter()
        .zip(&arguments)
        .filter(|(_, (_, _, access))| *access != Access::Read);
    written
        .map(|(arg, _)| *arg)
        .filter(|arg| matches!(arg, Arg::Variable(_)))
        .collect()
}
