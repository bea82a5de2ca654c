//! Activations that convolutions make themselves, of what these are made of.
//!
//! A convolution packs its image tile by tile. Where the image is pointwise work over another tensor that is in memory in any case, a
//! norm and an activation behind the convolution before, the tile can be made of that as it is packed: a prologue, the mirror of an
//! epilogue. The image is then nowhere in memory, neither on the way forward nor for the gradient of the weight, and its bytes need
//! not fit into a budget. It is made once for each kernel that takes it rather than once, so nothing is gained where there is room.

use std::collections::{HashMap, HashSet};

use slabwise_kernels::spec::{Access, Body, Conv2d, ConvKind, Dims, Inst, MAX_ARGUMENTS, Operand, Spec};

use super::lower::{Arg, Task};
use super::rerun::kept;
use super::stores::argument;
use crate::graph::Graph;
use crate::ops::NodeId;

/// Most tensors as large as the image that it is made of.
const SOURCES_MAX: usize = 1;

/// Tasks that do what these do, where convolutions make images that only they take: each is made by one task, by itself and point by
/// point. `None` if there is no such image. Every bit stays as it was.
pub(crate) fn prologues(graph: &Graph, tasks: &[Task]) -> Option<Vec<Task>> {
    let made = made_for_convolutions(graph, tasks);
    if made.is_empty() {
        return None;
    }
    let mut number: Vec<Vec<usize>> = Vec::with_capacity(tasks.len());
    let mut out: Vec<Task> = Vec::with_capacity(tasks.len() - made.len());
    let makers: HashMap<usize, NodeId> = made.iter().map(|(&node, &maker)| (maker, node)).collect();
    let image = |task: &Task| match task.args.first() {
        Some(Arg::Buffer(node)) if anchor(task).is_some() => made.get(node).copied(),
        _ => None,
    };
    // Who waits for a maker waits for all that do its work.
    let takers = |maker: usize| tasks.iter().enumerate().filter(move |(_, task)| image(task) == Some(maker)).map(|(at, _)| at);
    for (at, task) in tasks.iter().enumerate() {
        if makers.contains_key(&at) {
            number.push(Vec::new());
            continue;
        }
        number.push(vec![out.len()]);
        out.push(match image(task) {
            Some(maker) => with_prologue(task, &tasks[maker]),
            None => task.clone(),
        });
    }
    for &maker in makers.keys() {
        number[maker] = takers(maker).flat_map(|at| number[at].clone()).collect();
    }
    for (at, task) in out.iter_mut().enumerate() {
        let mut after: Vec<usize> = task.after.iter().flat_map(|&old| number[old].iter().copied()).filter(|&new| new != at).collect();
        after.sort_unstable();
        after.dedup();
        task.after = after;
    }
    Some(out)
}

/// Images that only convolutions take, each with the task that makes it.
fn made_for_convolutions(graph: &Graph, tasks: &[Task]) -> HashMap<NodeId, usize> {
    let kept = kept(graph);
    let mut made: HashMap<NodeId, usize> = HashMap::new();
    let mut others: HashSet<NodeId> = HashSet::new();
    for (at, task) in tasks.iter().enumerate() {
        let own = image_of(task);
        for (k, (arg, (_, _, access))) in task.args.iter().zip(task.spec.arguments()).enumerate() {
            let &Arg::Buffer(node) = arg else { continue };
            let taken = access == Access::Read && k == 0 && anchor(task).is_some();
            let makes = access == Access::Write && own == Some(*arg) && !kept.contains(arg) && !graph.outputs.contains(&node);
            if !taken && !(makes && made.insert(node, at).is_none()) {
                others.insert(node);
            }
        }
    }
    made.retain(|node, _| !others.contains(node));
    // All that take it take it as it is made.
    for task in tasks {
        let (Some(Arg::Buffer(node)), Some(conv)) = (task.args.first(), anchor(task)) else { continue };
        if made.get(node).is_some_and(|&maker| !fits(task, conv, &tasks[maker])) {
            made.remove(node);
        }
    }
    made
}

/// The convolution of a task that can make its image itself.
fn anchor(task: &Task) -> Option<&Conv2d> {
    match &task.spec.body {
        Body::Conv2d(conv) if conv.kind != ConvKind::InputGrad && conv.groups == 1 && conv.prologue.is_none() => Some(conv),
        _ => None,
    }
}

/// What a task makes, if that is one value, by itself and point by point, of few others.
fn image_of(task: &Task) -> Option<Arg> {
    let spec = &task.spec;
    let [store] = spec.stores[..] else { return None };
    let wide = |operand: &&Operand| operand.strides.iter().zip(&spec.dims).all(|(stride, dim)| !stride.is(0) || dim.is(1));
    let reads = spec.code.iter().any(|inst| matches!(inst, Inst::Load(k) if *k == store.operand));
    let few = spec.operands.iter().filter(wide).count() <= SOURCES_MAX + 1;
    let possible = spec.body == Body::Loop && spec.reduced == 0 && spec.dims.len() == 4 && !reads && few;
    possible.then(|| argument(task, store.operand))
}

/// Whether a convolution can make its image as the maker does.
fn fits(task: &Task, conv: &Conv2d, maker: &Task) -> bool {
    let stored = maker.spec.stores.first().map(|store| &maker.spec.operands[usize::from(store.operand)]);
    let space = Dims::from_slice(&[conv.n, conv.ci, conv.hw[0], conv.hw[1]]);
    stored == Some(&conv.a) && maker.spec.dims == space && task.args.len() + maker.args.len() < MAX_ARGUMENTS
}

/// The convolution with its image made in a prologue.
fn with_prologue(task: &Task, maker: &Task) -> Task {
    let mut task = task.clone();
    let (prologue, sources) = stored_last(maker);
    task.in_place.retain(|(from, _)| !sources.contains(&Arg::Buffer(*from)));
    task.args.splice(..1, sources);
    if let Body::Conv2d(conv) = &mut task.spec.body {
        conv.prologue = Some(Box::new(prologue));
    }
    task
}

/// A loop with the operand that it stores as its last one, and what the others are.
fn stored_last(maker: &Task) -> (Spec, Vec<Arg>) {
    let (mut spec, mut args) = (maker.spec.clone(), maker.args.clone());
    let (last, stored) = (spec.operands.len() as u16 - 1, spec.stores[0].operand);
    let place = |k: u16| if k > stored { k - 1 } else { k };
    let operand = spec.operands.remove(usize::from(stored));
    spec.operands.push(operand);
    args.remove(usize::from(stored));
    for inst in &mut spec.code {
        match inst {
            Inst::Load(k) => *k = place(*k),
            Inst::Uniform { state, .. } => *state = place(*state),
            _ => {}
        }
    }
    spec.stores[0].operand = last;
    (spec, args)
}
