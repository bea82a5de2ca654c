//! Fission: fused kernels are split, so that fewer values are in memory at once.
//!
//! Fusion has one kernel compute everything that can be computed from the tensors it reads. In the
//! backward pass through a residual network those are the activations of several layers, recomputed
//! for the gradients of their weights beside the sums of one norm. It saves time, and holds all of
//! them in memory until the last is used. Under a budget it is better to compute each of them by a
//! kernel of its own, when it is needed.

use slabwise_kernels::spec::{Body, Inst, Store};
use slabwise_planner::ALIGN;

use super::error::PassError;
use super::pipeline::Pass;
use super::prune_outputs::prune_outputs;
use super::recompute::{kept, writes_any};
use crate::backend::Target;
use crate::graph::Phase;
use crate::ir::{CallId, KernelCall, Program, Recompute, Rewriter};

/// The pass.
pub(crate) struct SplitFusions<'a> {
    /// The device that the kernels are for.
    pub target: &'a Target,
    /// Kernels that touch more bytes than this are split; all if `None`.
    pub larger_than: Option<u64>,
}

impl Pass for SplitFusions<'_> {
    const NAME: &'static str = "split-fusions";
    type Input = Program;
    type Output = Program;

    fn run(&self, program: &Program) -> Result<Program, PassError> {
        let touched = touched(program).into_iter();
        let is_large = |bytes| self.larger_than.is_none_or(|least| bytes > least);
        let chosen: Vec<bool> = touched.map(is_large).collect();
        Ok(split_fusions(program, self.target, &chosen))
    }
}

/// The bytes of the values that each call touches, and of its workspace.
fn touched(program: &Program) -> Vec<u64> {
    let bytes = |call: &KernelCall| {
        let mut values = program.touched(call).concat();
        values.sort_unstable();
        values.dedup();
        let values = values.into_iter().map(|value| program.occupied(value));
        values.sum::<u64>() + call.workspace().next_multiple_of(ALIGN)
    };
    program.kernels.iter().map(bytes).collect()
}

/// The program in which each value that one of the `chosen` kernels without anchor recomputes per
/// element, beside other values, has a kernel of its own. Every bit stays as it was.
fn split_fusions(program: &Program, target: &Target, chosen: &[bool]) -> Program {
    let mut rewriter = Rewriter::new(program);
    let kept = kept(&program.graph);
    for ((at, call), chosen) in (0..).zip(&program.kernels).zip(chosen) {
        // A split kernel may also compute steps of a value twice, for two others.
        let whole = !chosen || writes_any(program, call, &kept) || call.spec.body != Body::Loop;
        let (parts, rest) = if whole {
            (Vec::new(), call.clone())
        } else {
            split(program, target, call)
        };
        // Variables that the rest assigns are read before.
        let assigned = program.assigned(&rest);
        let mut readers = Vec::new();
        for part in parts {
            let reads = part.args.iter().any(|arg| assigned.contains(arg));
            let part = rewriter.add_call(CallId(at), unprepared(part));
            readers.extend(reads.then_some(part));
        }
        let rest = rewriter.add_call(CallId(at), unprepared(rest));
        readers.iter().for_each(|&part| rewriter.depend(rest, part));
    }
    rewriter.finish(None)
}

fn unprepared(call: KernelCall) -> KernelCall {
    KernelCall {
        kernel: None,
        recompute: Recompute::Never,
        ..call
    }
}

/// The calls that compute one value each, and the rest.
fn split(program: &Program, target: &Target, call: &KernelCall) -> (Vec<KernelCall>, KernelCall) {
    let (mut parts, mut rest) = (Vec::new(), call.clone());
    for stored in call.stored() {
        let Some(node) = program.value(stored).node else {
            continue;
        };
        if program.graph.origin(node).phase != Phase::Recompute {
            continue;
        }
        let stores = |call: &KernelCall, own: bool| -> Vec<Store> {
            let all = call.spec.stores.iter().copied();
            all.filter(|s| (call.operand(s.operand) == stored) == own)
                .collect()
        };
        // Values that depend on reductions stay with them.
        let folds = |own: &KernelCall| {
            own.spec
                .code
                .iter()
                .any(|inst| matches!(inst, Inst::Reduce(..)))
                || own.spec.reduced > 0
        };
        let own = prune_outputs(program, target, call, &stores(call, true));
        let Some(own) = own.filter(|own| !folds(own)) else {
            continue;
        };
        let Some(fewer) = prune_outputs(program, target, &rest, &stores(&rest, false)) else {
            continue;
        };
        parts.push(KernelCall {
            name: program.graph.name(node),
            node,
            ..own
        });
        rest = fewer;
    }
    (parts, rest)
}
