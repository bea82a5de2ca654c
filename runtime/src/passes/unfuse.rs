//! Kernels taken apart, so that less has to be in memory at once.
//!
//! Fusion has one kernel make all that can be made of the tensors it reads anyway. On the way back
//! through a residual network that is the activations of several layers, made again for their
//! weights' gradients beside the sums of one norm. It saves time, and has all of them in memory
//! until the last is used. Under a budget they are better made one by one, each when it is needed.

use slabwise_kernels::spec::{Body, Inst, Store};

use super::lower::{Arg, Task};
use super::rerun::{assigned, kept, makes};
use super::stores::{argument, keep_stores};
use crate::backend::Target;
use crate::graph::{Graph, Phase};

/// Tasks that do what these do, in an order in which they can run: each value that one of the
/// `chosen` kernels without anchor makes again point by point, beside something else, has a kernel
/// of its own. Every bit stays as it was.
pub(crate) fn unfuse(graph: &Graph, target: &Target, tasks: &[Task], chosen: &[bool]) -> Vec<Task> {
    let mut parted: Vec<Task> = Vec::with_capacity(tasks.len());
    // For each old task the new ones that do its work; for each new one the new ones it waits for
    // besides.
    let (mut names, mut waits) = (Vec::with_capacity(tasks.len()), Vec::new());
    let kept = kept(graph);
    for (task, chosen) in tasks.iter().zip(chosen) {
        // Taken apart, steps to one value may be made for another as well.
        let whole = !chosen || makes(task, &kept) || task.spec.body != Body::Loop;
        let (apart, rest) = if whole {
            (Vec::new(), task.clone())
        } else {
            take_apart(graph, target, task)
        };
        let first = parted.len();
        names.push(first..=first + apart.len());
        waits.resize(first + apart.len(), Vec::new());
        // What the rest assigns is read before.
        let changed = assigned(&rest);
        let reads = |own: &Task| own.args.iter().any(|arg| changed.contains(arg));
        waits.push(
            (first..)
                .zip(&apart)
                .filter(|(_, own)| reads(own))
                .map(|(at, _)| at)
                .collect(),
        );
        parted.extend(apart);
        parted.push(rest);
    }
    for (task, waits) in parted.iter_mut().zip(waits) {
        task.after = task
            .after
            .iter()
            .flat_map(|&old| names[old].clone())
            .chain(waits)
            .collect();
    }
    parted
}

/// Values in kernels of their own, and the rest.
fn take_apart(graph: &Graph, target: &Target, task: &Task) -> (Vec<Task>, Task) {
    let (mut apart, mut rest) = (Vec::new(), task.clone());
    for stored in task.spec.stores.iter().map(|s| argument(task, s.operand)) {
        let Arg::Buffer(node) = stored else { continue };
        if graph.origin(node).phase != Phase::Again {
            continue;
        }
        let writes = |task: &Task, s: &Store| argument(task, s.operand) == stored;
        let (own, others): (Vec<Store>, Vec<Store>) = (
            task.spec
                .stores
                .iter()
                .copied()
                .filter(|s| writes(task, s))
                .collect(),
            rest.spec
                .stores
                .iter()
                .copied()
                .filter(|s| !writes(&rest, s))
                .collect(),
        );
        // What follows from folds stays with them.
        let folds = |own: &Task| {
            own.spec
                .code
                .iter()
                .any(|inst| matches!(inst, Inst::Reduce(..)))
                || own.spec.reduced > 0
        };
        let Some(own) = keep_stores(graph, target, task, &own).filter(|own| !folds(own)) else {
            continue;
        };
        let Some(fewer) = keep_stores(graph, target, &rest, &others) else {
            continue;
        };
        apart.push(Task {
            name: graph.name(node),
            node,
            ..own
        });
        rest = fewer;
    }
    (apart, rest)
}
