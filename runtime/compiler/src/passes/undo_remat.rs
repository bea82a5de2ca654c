//! Undoing rematerialization: uses of a recomputed value become uses of the forward value that it
//! duplicates.
//!
//! Rematerialization writes a second chain of steps for values that are cheap to recompute, which
//! fixes when they are recomputed: for their use in the backward pass. Under a budget a search
//! decides that by recomputing kernels, and two names of one value stand in its way, because it
//! would keep both or compute both. So the second name goes, and its readers read the first. Every
//! bit stays as it was.

use rustc_hash::{FxHashMap, FxHashSet};
use smallvec::SmallVec;

use super::error::PassError;
use super::pipeline::Pass;
use super::prune_outputs::prune_outputs;
use crate::backend::Target;
use crate::graph::{Graph, Phase};
use crate::ir::{CallId, KernelCall, Program, Recompute, Rewriter, ValueId};
use crate::ops::{NodeId, Op};

/// The pass.
pub(crate) struct UndoRemat<'a> {
    /// The device that the kernels are for.
    pub target: &'a Target,
}

impl Pass for UndoRemat<'_> {
    const NAME: &'static str = "undo-remat";
    // A kernel that computes values of both passes may come before and behind another, if that
    // reads its forward value.
    const MAY_CLOSE_CYCLES: bool = true;
    type Input = Program;
    type Output = Program;

    fn run(&self, program: &Program) -> Result<Program, PassError> {
        Ok(undo_remat(program, self.target))
    }
}

/// The program without the values that duplicate one of the forward pass, where calls can do
/// without writing them. The inside of a checkpointed segment is recomputed all the same.
fn undo_remat(program: &Program, target: &Target) -> Program {
    let graph = &program.graph;
    let mut writers = vec![0u32; program.values.len()];
    let stored = program.kernels.iter().flat_map(KernelCall::stored);
    stored.for_each(|value| writers[value.index()] += 1);
    let ids = (0..program.planned() as u32).map(ValueId);
    let value_of: FxHashMap<NodeId, ValueId> = ids
        .filter(|value| writers[value.index()] == 1)
        .filter_map(|value| Some((program.value(value).node?, value)))
        .collect();
    let pinned = graph.pinned();
    let duplicates = |&(again, first): &(NodeId, NodeId)| {
        let of = |id| graph.origin(id);
        of(again).phase == Phase::Recompute
            && of(again).segment == 0
            && of(first).phase == Phase::Forward
            && !pinned[again.at()]
    };
    let mut first: FxHashMap<ValueId, ValueId> = first_of_same(graph)
        .into_iter()
        .filter(duplicates)
        .filter_map(|(again, first)| Some((*value_of.get(&again)?, *value_of.get(&first)?)))
        .collect();
    // A call that cannot do without a store keeps it.
    let mut fewer: Vec<Option<KernelCall>> = Vec::with_capacity(program.kernels.len());
    for call in &program.kernels {
        let others: Vec<_> = call
            .spec
            .stores
            .iter()
            .copied()
            .filter(|s| !first.contains_key(&call.operand(s.operand)))
            .collect();
        let rest = if others.len() == call.spec.stores.len() {
            Some(call.clone())
        } else {
            prune_outputs(program, target, call, &others)
        };
        let stays = rest.is_none() && !others.is_empty();
        if stays {
            call.stored().for_each(|value| _ = first.remove(&value));
        }
        fewer.push(if stays { Some(call.clone()) } else { rest });
    }
    let mut rewriter = Rewriter::new(program);
    for (at, call) in (0..).zip(fewer) {
        if let Some(call) = call {
            rewriter.add_call(CallId(at), renamed(program, call, &first));
        }
    }
    rewriter.finish(None)
}

/// The call with the second names of values replaced by the first.
fn renamed(
    program: &Program,
    mut call: KernelCall,
    first: &FxHashMap<ValueId, ValueId>,
) -> KernelCall {
    let name = |value: ValueId| first.get(&value).copied().unwrap_or(value);
    let before: FxHashSet<ValueId> = call.args.iter().copied().collect();
    let second = call.args.iter().copied().filter(|arg| name(*arg) != *arg);
    let doubled: FxHashSet<ValueId> = second
        .map(name)
        .filter(|arg| before.contains(arg))
        .collect();
    call.args.iter_mut().for_each(|arg| *arg = name(*arg));
    // A value that is read under both names may be read with different strides.
    call.in_place = call
        .in_place
        .iter()
        .map(|&(from, to)| (name(from), to))
        .filter(|(from, to)| !doubled.contains(from) && program.may_reuse(*from, *to))
        .collect();
    (call.kernel, call.recompute) = (None, Recompute::Never);
    call
}

/// For each node that computes the same as an earlier one, the first such.
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
