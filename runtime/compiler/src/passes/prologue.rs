//! Prologue fusion: convolutions compute the activations that they read.
//!
//! A convolution packs its image tile by tile. Where the image is an elementwise function of
//! another tensor that is in memory in any case, such as a norm and an activation of the result of
//! an earlier convolution, the tile can be computed from that tensor while it is packed: a
//! prologue, the counterpart of an epilogue. The image is then never in memory, neither in the
//! forward pass nor for the gradient of the weight, and takes no bytes of a budget. Because it is
//! computed in each kernel that reads it, nothing is gained where memory suffices.

use std::collections::BTreeMap;

use rustc_hash::{FxHashMap, FxHashSet};
use slabwise_kernels::spec::{
    Access, Body, Conv2d, ConvKind, Dims, Inst, MAX_ARGUMENTS, Operand, Spec,
};

use super::error::PassError;
use super::pipeline::Pass;
use super::recompute::kept;
use crate::ir::{CallId, KernelCall, Program, Recompute, Rewriter, ValueId};

/// Most tensors as large as the image that a prologue reads.
const SOURCES_MAX: usize = 1;

/// The pass.
pub(crate) struct FusePrologues;

impl Pass for FusePrologues {
    const NAME: &'static str = "fuse-prologues";
    type Input = Program;
    type Output = Option<Program>;

    fn run(&self, program: &Program) -> Result<Option<Program>, PassError> {
        Ok(fuse_prologues(program))
    }
}

/// The program in which convolutions compute their images, where each is written by one call alone,
/// per element, and read by convolutions only. `None` if there is no such image. Every bit stays as
/// it was. Only the CPU has kernels for it.
fn fuse_prologues(program: &Program) -> Option<Program> {
    let producers = producers(program);
    if producers.is_empty() {
        return None;
    }
    let producer_of: FxHashMap<usize, usize> = producers
        .iter()
        .flat_map(|(&producer, readers)| readers.iter().map(move |&at| (at, producer)))
        .collect();
    let mut rewriter = Rewriter::new(program);
    for (at, call) in program.kernels.iter().enumerate() {
        if producers.contains_key(&at) {
            continue;
        }
        let mut new = match producer_of.get(&at) {
            Some(&producer) => with_prologue(call, &program.kernels[producer]),
            None => call.clone(),
        };
        (new.kernel, new.recompute) = (None, Recompute::Never);
        rewriter.add_call(CallId(at as u32), new);
    }
    // A dependency on a producer becomes one on all the convolutions that compute its image.
    for (&producer, readers) in &producers {
        let by: Vec<CallId> = readers
            .iter()
            .flat_map(|&at| rewriter.done_by(CallId(at as u32)).to_vec())
            .collect();
        rewriter.replace(CallId(producer as u32), by);
    }
    Some(rewriter.finish(None))
}

/// The number of convolutions with a prologue.
pub fn count_prologues(program: &Program) -> usize {
    let has_prologue = |call: &&KernelCall| matches!(&call.spec.body, Body::Conv2d(conv) if conv.prologue.is_some());
    program.kernels.iter().filter(has_prologue).count()
}

/// The calls that write images which only convolutions read, each with those convolutions.
fn producers(program: &Program) -> BTreeMap<usize, Vec<usize>> {
    let (graph, calls) = (&program.graph, &program.kernels);
    let kept = kept(graph);
    let mut written: BTreeMap<ValueId, usize> = BTreeMap::new();
    let mut readers: FxHashMap<ValueId, Vec<usize>> = FxHashMap::default();
    let mut others: FxHashSet<ValueId> = FxHashSet::default();
    for (at, call) in calls.iter().enumerate() {
        let own = image_of(call);
        for (k, (value, access)) in call.accesses().enumerate() {
            let Some(node) = program.value(value).node else {
                continue;
            };
            let produces = access == Access::Write
                && own == Some(value)
                && !kept.contains(&node)
                && !program.value(value).output;
            if access == Access::Read && k == 0 && anchor(call).is_some() {
                readers.entry(value).or_default().push(at);
            } else if !(produces && written.insert(value, at).is_none()) {
                others.insert(value);
            }
        }
    }
    let mut next = followers(program);
    let mut dependents: Vec<Vec<usize>> = vec![Vec::new(); calls.len()];
    for (at, call) in calls.iter().enumerate() {
        call.after
            .iter()
            .for_each(|before| dependents[before.index()].push(at));
    }
    dependents.iter_mut().for_each(Vec::dedup);
    // Producers are considered in the order of the nodes whose values they write.
    let mut written: Vec<(ValueId, usize)> = written.into_iter().collect();
    written.sort_by_key(|(value, _)| program.value(*value).node);
    let mut producers = BTreeMap::new();
    for (value, producer) in written {
        let Some(readers) = readers.remove(&value).filter(|_| !others.contains(&value)) else {
            continue;
        };
        let part = |at: usize| program.origin(&calls[at]).part;
        let possible = readers
            .iter()
            .all(|&at| fits(program, &calls[at], &calls[producer]) && part(at) == part(producer));
        if !possible {
            continue;
        }
        // Calls that depend on the producer's reads, such as the update of a variable, depend on
        // those of the convolutions then. None of these may depend on such a call.
        let waiting: Vec<usize> = dependents[producer]
            .iter()
            .copied()
            .filter(|at| !readers.contains(at))
            .collect();
        if reaches(&next, &waiting, &readers) {
            continue;
        }
        readers.iter().for_each(|&at| next[at].extend(&waiting));
        producers.insert(producer, readers);
    }
    producers
}

/// For each call those that depend on it.
fn followers(program: &Program) -> Vec<Vec<usize>> {
    let mut writers: FxHashMap<ValueId, Vec<usize>> = FxHashMap::default();
    let mut readers: Vec<(ValueId, usize)> = Vec::new();
    for (at, call) in program.kernels.iter().enumerate() {
        for (value, access) in call.accesses() {
            if !program.value(value).is_planned() {
                continue;
            }
            if access == Access::Read {
                readers.push((value, at))
            } else {
                writers.entry(value).or_default().push(at)
            }
        }
    }
    let mut next: Vec<Vec<usize>> = vec![Vec::new(); program.kernels.len()];
    for (value, reader) in readers {
        writers
            .get(&value)
            .into_iter()
            .flatten()
            .filter(|&&writer| writer != reader)
            .for_each(|&writer| next[writer].push(reader));
    }
    for (at, call) in program.kernels.iter().enumerate() {
        call.after
            .iter()
            .for_each(|before| next[before.index()].push(at));
    }
    next
}

/// Whether one of `to` is one of `from` or depends on one.
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

/// The convolution of a call that can compute its image.
fn anchor(call: &KernelCall) -> Option<&Conv2d> {
    match &call.spec.body {
        Body::Conv2d(conv)
            if conv.kind != ConvKind::InputGrad && conv.groups == 1 && conv.prologue.is_none() =>
        {
            Some(conv)
        }
        _ => None,
    }
}

/// The value that a call writes, if it writes one value alone, per element, from few others.
fn image_of(call: &KernelCall) -> Option<ValueId> {
    let spec = &call.spec;
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
    possible.then(|| call.operand(store.operand))
}

/// Whether a convolution can compute its image as the producer does.
fn fits(program: &Program, call: &KernelCall, producer: &KernelCall) -> bool {
    let Some(conv) = anchor(call) else {
        return false;
    };
    let Some(written) = producer
        .spec
        .stores
        .first()
        .map(|store| &producer.spec.operands[usize::from(store.operand)])
    else {
        return false;
    };
    let space = Dims::from_slice(&[conv.n, conv.ci, conv.hw[0], conv.hw[1]]);
    // The stride along an axis of length 1 does not matter.
    let steps = written
        .strides
        .iter()
        .zip(&conv.a.strides)
        .zip(&space)
        .all(|((written, read), dim)| written == read || dim.is(1));
    let same = steps && (written.dtype, written.offset) == (conv.a.dtype, conv.a.offset);
    // A convolution writes the variables that it assigns while it still computes the image.
    let assigned = program.assigned(call);
    let possible = same
        && producer.spec.dims == space
        && !producer.args.iter().any(|arg| assigned.contains(arg));
    possible && call.args.len() + producer.args.len() - 2 <= MAX_ARGUMENTS
}

/// The convolution with its image computed in a prologue.
fn with_prologue(call: &KernelCall, producer: &KernelCall) -> KernelCall {
    let mut call = call.clone();
    let (prologue, sources) = stored_last(producer);
    call.in_place.retain(|(from, _)| !sources.contains(from));
    call.args.splice(..1, sources);
    call.after.extend(&producer.after);
    if let Body::Conv2d(conv) = &mut call.spec.body {
        conv.prologue = Some(Box::new(prologue));
    }
    call
}

/// A loop with the operand that it stores as its last one, and the values of the others.
fn stored_last(producer: &KernelCall) -> (Spec, Vec<ValueId>) {
    let (mut spec, mut args) = (producer.spec.clone(), producer.args.clone());
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
