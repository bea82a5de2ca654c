//! What a kernel is when it runs again to make its buffers a second time: without the variables that it assigns.
//!
//! A norm over a batch moves its running statistics where it computes the batch's; computed again, it may not move them again.

use std::collections::HashSet;

use slabwise_kernels::spec::{Access, Body, Store};

use super::lower::{Arg, Task};
use super::stores::{argument, keep_stores};

/// The task as it runs again: itself if it assigns no variable, less if it does. `None` if it may run only once.
pub(super) fn rerun(task: &Task) -> Option<Task> {
    if matches!(task.spec.body, Body::CheckIndex(_)) {
        return None;
    }
    let assigned = assigned(task);
    if assigned.is_empty() {
        return Some(task.clone());
    }
    let stores: Vec<Store> =
        task.spec.stores.iter().copied().filter(|s| matches!(argument(task, s.operand), Arg::Buffer(_))).collect();
    // What it assigned by then it cannot take as it was.
    keep_stores(task, &stores).filter(|lean| !lean.args.iter().any(|arg| assigned.contains(arg)))
}

/// The variables that a task assigns.
pub(super) fn assigned(task: &Task) -> HashSet<Arg> {
    let arguments = task.spec.arguments();
    let written = task.args.iter().zip(&arguments).filter(|(_, (_, _, access))| *access != Access::Read);
    written.map(|(arg, _)| *arg).filter(|arg| matches!(arg, Arg::Variable(_))).collect()
}
