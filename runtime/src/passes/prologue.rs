//! Activations that convolutions make themselves, of what these are made of.
//!
//! A convolution packs its image tile by tile. Where the image is pointwise work over another
//! tensor that is in memory in any case, a norm and an activation behind the convolution before,
//! the tile can be made of that as it is packed: a prologue, the mirror of an epilogue. The image
//! is then nowhere in memory, neither on the way forward nor for the gradient of the weight, and
//! its bytes need not fit into a budget. It is made once for each kernel that takes it rather than
//! once, so nothing is gained where there is room.

use std::collections::BTreeMap;

use rustc_hash::{FxHashMap, FxHashSet};
use slabwise_kernels::spec::{
    Access, Body, Conv2d, ConvKind, Dims, Inst, MAX_ARGUMENTS, Operand, Spec,
};

use super::lower::{Arg, Task};
use super::rerun::{assigned, kept};
use super::stores::argument;
use crate::graph::Graph;
use crate::ops::NodeId;

/// Most tensors as large as the image that it is made of.
const SOURCES_MAX: usize = 1;

/// Tasks that do what these do, where convolutions make images that only they take: each is made by
/// one task, by itself and point by point. `None` if there is no such image. Every bit stays as it
/// was. Only the CPU has kernels for it.
pub(crate) fn prologues(graph: &Graph, tasks: &[Task]) -> Option<Vec<Task>> {
    let makers = makers(graph, tasks);
    if makers.is_empty() {
        return None;
    }
    // For each old task the new ones that do its work: who waits for a maker waits for all that
    // take its image.
    let mut names: Vec<Vec<usize>> = vec![Vec::new(); tasks.len()];
    (0..tasks.len())
        .filter(|at| !makers.contains_key(at))
        .enumerate()
        .for_each(|(new, at)| names[at].push(new));
    for (&maker, takers) in &makers {
        names[maker] = takers.iter().map(|&at| names[at][0]).collect();
    }
    let made_by: FxHashMap<usize, usize> = makers
        .iter()
        .flat_map(|(&maker, takers)| takers.iter().map(move |&at| (at, maker)))
        .collect();
    let mut out: Vec<Task> = Vec::with_capacity(tasks.len() - makers.len());
    for (at, task) in tasks
        .iter()
        .enumerate()
        .filter(|(at, _)| !makers.contains_key(at))
    {
        let mut new = made_by
            .get(&at)
            .map_or_else(|| task.clone(), |&maker| with_prologue(task, &tasks[maker]));
        new.after = new
            .after
            .iter()
            .flat_map(|&old| names[old].iter().copied())
            .filter(|&before| before != out.len())
            .collect();
        new.after.sort_unstable();
        new.after.dedup();
        out.push(new);
    }
    Some(out)
}

/// The number of kernels that make an image themselves.
pub(crate) fn count_prologues(tasks: &[Task]) -> usize {
    tasks
        .iter()
        .filter(|task| matches!(&task.spec.body, Body::Conv2d(conv) if conv.prologue.is_some()))
        .count()
}

/// The tasks that make images which only convolutions take, each with those that do.
fn makers(graph: &Graph, tasks: &[Task]) -> BTreeMap<usize, Vec<usize>> {
    let kept = kept(graph);
    let mut made: BTreeMap<NodeId, usize> = BTreeMap::new();
    let mut takers: FxHashMap<NodeId, Vec<usize>> = FxHashMap::default();
    let mut others: FxHashSet<NodeId> = FxHashSet::default();
    for (at, task) in tasks.iter().enumerate() {
        let own = image_of(task);
        for (k, (arg, (_, _, access))) in task.args.iter().zip(task.spec.arguments()).enumerate() {
            let &Arg::Buffer(node) = arg else { continue };
            let makes = access == Access::Write
                && own == Some(*arg)
                && !kept.contains(arg)
                && !graph.outputs.contains(&node);
            if access == Access::Read && k == 0 && anchor(task).is_some() {
                takers.entry(node).or_default().push(at);
            } else if !(makes && made.insert(node, at).is_none()) {
                others.insert(node);
            }
        }
    }
    let mut next = followers(tasks);
    let mut waits: Vec<Vec<usize>> = vec![Vec::new(); tasks.len()];
    for (at, task) in tasks.iter().enumerate() {
        task.after.iter().for_each(|&before| waits[before].push(at));
    }
    waits.iter_mut().for_each(Vec::dedup);
    let mut makers = BTreeMap::new();
    for (node, maker) in made {
        let Some(takers) = takers.remove(&node).filter(|_| !others.contains(&node)) else {
            continue;
        };
        let part = |at: usize| graph.origin(tasks[at].node).part;
        let possible = takers
            .iter()
            .all(|&at| fits(&tasks[at], &tasks[maker]) && part(at) == part(maker));
        if !possible {
            continue;
        }
        // Who has to wait until the maker has read, a variable's update for one, has to wait for
        // the takers then. None may need it first.
        let waiting: Vec<usize> = waits[maker]
            .iter()
            .copied()
            .filter(|at| !takers.contains(at))
            .collect();
        if reaches(&next, &waiting, &takers) {
            continue;
        }
        takers.iter().for_each(|&at| next[at].extend(&waiting));
        makers.insert(maker, takers);
    }
    makers
}

/// For each task those that come after it.
fn followers(tasks: &[Task]) -> Vec<Vec<usize>> {
    let mut writers: FxHashMap<NodeId, Vec<usize>> = FxHashMap::default();
    let mut readers: Vec<(NodeId, usize)> = Vec::new();
    for (at, task) in tasks.iter().enumerate() {
        for (arg, (_, _, access)) in task.args.iter().zip(task.spec.arguments()) {
            let &Arg::Buffer(node) = arg else { continue };
            if access == Access::Read {
                readers.push((node, at))
            } else {
                writers.entry(node).or_default().push(at)
            }
        }
    }
    let mut next: Vec<Vec<usize>> = vec![Vec::new(); tasks.len()];
    for (node, reader) in readers {
        writers
            .get(&node)
            .into_iter()
            .flatten()
            .filter(|&&writer| writer != reader)
            .for_each(|&writer| next[writer].push(reader));
    }
    for (at, task) in tasks.iter().enumerate() {
        task.after.iter().for_each(|&before| next[before].push(at));
    }
    next
}

/// Whether one of `to` is one of `from` or comes after one.
fn reaches(next: &[Vec<usize>], from: &[usize], to: &[usize]) -> bool {
    let (mut seen, mut stack) = (vec![false; next.len()], from.to_vec());
    while let Some(at) = stack.pop() {
        if to.contains(&at) {
            return true;
        }
        if !std::mem::replace(&mut seen[at], true) {
            stack.extend(&next[at]);
        }
    }
    false
}

/// The convolution of a task that can make its image itself.
fn anchor(task: &Task) -> Option<&Conv2d> {
    match &task.spec.body {
        Body::Conv2d(conv)
            if conv.kind != ConvKind::InputGrad && conv.groups == 1 && conv.prologue.is_none() =>
        {
            Some(conv)
        }
        _ => None,
    }
}

/// What a task makes, if that is one value, by itself and point by point, of few others.
fn image_of(task: &Task) -> Option<Arg> {
    let spec = &task.spec;
    let [store] = spec.stores[..] else {
        return None;
    };
    let wide = |operand: &&Operand| {
        operand
            .strides
            .iter()
            .zip(&spec.dims)
            .all(|(stride, dim)| !stride.is(0) || dim.is(1))
    };
    let reads = spec
        .code
        .iter()
        .any(|inst| matches!(inst, Inst::Load(k) if *k == store.operand));
    let few = spec.operands.iter().filter(wide).count() <= SOURCES_MAX + 1;
    let possible =
        spec.body == Body::Loop && spec.reduced == 0 && spec.dims.len() == 4 && !reads && few;
    possible.then(|| argument(task, store.operand))
}

/// Whether a convolution can make its image as the maker does.
fn fits(task: &Task, maker: &Task) -> bool {
    let Some(conv) = anchor(task) else {
        return false;
    };
    let Some(made) = maker
        .spec
        .stores
        .first()
        .map(|store| &maker.spec.operands[usize::from(store.operand)])
    else {
        return false;
    };
    let space = Dims::from_slice(&[conv.n, conv.ci, conv.hw[0], conv.hw[1]]);
    // Along an axis of one point there is no step.
    let steps = made
        .strides
        .iter()
        .zip(&conv.a.strides)
        .zip(&space)
        .all(|((made, taken), dim)| made == taken || dim.is(1));
    let same = steps && (made.dtype, made.offset) == (conv.a.dtype, conv.a.offset);
    // A variable that it assigns it writes while it still makes the image.
    let assigned = assigned(task);
    let possible =
        same && maker.spec.dims == space && !maker.args.iter().any(|arg| assigned.contains(arg));
    possible && task.args.len() + maker.args.len() - 2 <= MAX_ARGUMENTS
}

/// The convolution with its image made in a prologue.
fn with_prologue(task: &Task, maker: &Task) -> Task {
    let mut task = task.clone();
    let (prologue, sources) = stored_last(maker);
    task.in_place
        .retain(|(from, _)| !sources.contains(&Arg::Buffer(*from)));
    task.args.splice(..1, sources);
    task.after.extend(&maker.after);
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
