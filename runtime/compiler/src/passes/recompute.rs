//! Recompute clones: calls that make the outputs of another a second time, without its side
//! effects.
//!
//! A batch norm updates its running statistics in the kernel that computes those of the batch. When
//! it is recomputed, it must not update them a second time.

use rustc_hash::FxHashSet;
use slabwise_kernels::spec::{Access, Body, Store};
use slabwise_planner::{Offloaded, Overlapped, Repeated};

use super::error::PassError;
use super::layout::Containers;
use super::pipeline::Pass;
use super::prune_outputs::prune_outputs;
use crate::backend::Target;
use crate::graph::Graph;
use crate::ir::{KernelCall, Program, Source, ValueId};
use crate::ops::NodeId;

/// The pass that recomputes calls as the planner decided.
pub(crate) struct RecomputeCalls<'a> {
    pub repeated: &'a Repeated,
}

impl Pass for RecomputeCalls<'_> {
    const NAME: &'static str = "recompute";
    type Input = Program;
    type Output = Program;

    fn run(&self, program: &Program) -> Result<Program, PassError> {
        Ok(program.repeated(self.repeated))
    }
}

/// The pass that sends values to the host and fetches them back, as the planner decided.
pub(crate) struct OffloadValues<'a> {
    pub offloaded: &'a Offloaded,
}

impl Pass for OffloadValues<'_> {
    const NAME: &'static str = "offload";
    type Input = Program;
    type Output = Program;

    fn run(&self, program: &Program) -> Result<Program, PassError> {
        Ok(program.offloaded(self.offloaded))
    }
}

/// The pass that lets collectives run beside other calls, as the planner decided.
pub(crate) struct OverlapCollectives<'a> {
    pub overlapped: &'a Overlapped,
}

impl Pass for OverlapCollectives<'_> {
    const NAME: &'static str = "overlap";
    type Input = Program;
    type Output = Program;

    fn run(&self, program: &Program) -> Result<Program, PassError> {
        Ok(program.overlapped(self.overlapped))
    }
}

/// The recompute clone of a call: the call itself if it assigns no variable, else a smaller one.
/// `None` if it may run only once, as the calls that write one of the `kept` values.
pub(super) fn recompute_clone(
    program: &Program,
    target: &Target,
    call: &KernelCall,
    kept: &FxHashSet<NodeId>,
) -> Option<KernelCall> {
    // Bytes that ranks exchange are exchanged once.
    let once = matches!(call.spec.body, Body::BoundsCheck(_)) || call.is_collective();
    if once || writes_any(program, call, kept) {
        return None;
    }
    let assigned = program.assigned(call);
    if assigned.is_empty() {
        return Some(call.clone());
    }
    let is_variable = |value: ValueId| matches!(program.value(value).source, Source::Variable(_));
    let stores: Vec<Store> = call
        .spec
        .stores
        .iter()
        .copied()
        .filter(|s| !is_variable(call.operand(s.operand)))
        .collect();
    // It cannot read a variable that has been assigned by then.
    prune_outputs(program, target, call, &stores)
        .filter(|clone| !clone.args.iter().any(|arg| assigned.contains(arg)))
}

/// The nodes of the values that are never recomputed: those marked as kept, or the concatenations
/// that they are parts of.
pub(super) fn kept(graph: &Graph) -> FxHashSet<NodeId> {
    if graph.kept.is_empty() {
        return FxHashSet::default();
    }
    let containers = Containers::of_all(graph);
    let node = |&id: &NodeId| containers.of(id).unwrap_or(id);
    graph.kept.iter().map(node).collect()
}

/// Whether a call writes a value of one of these nodes.
pub(super) fn writes_any(program: &Program, call: &KernelCall, nodes: &FxHashSet<NodeId>) -> bool {
    !nodes.is_empty()
        && call.accesses().any(|(value, access)| {
            let node = program.value(value).node;
            access != Access::Read && node.is_some_and(|node| nodes.contains(&node))
        })
}
