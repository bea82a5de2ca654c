//! Shared reads: a loop that may write in place of a value is fused into the last other kernel that
//! reads that value.
//!
//! The backward pass recomputes an activation from a value that the kernel of its gradient reads, too:
//! that kernel can store both, and the value is read once. No bytes are live for longer than
//! before, because the result takes over the bytes of the value earlier. The kernel gets no new
//! dependencies, because all operands of the loop must exist when it starts.

use slabwise_kernels::spec::{Access, Body, MAX_ARGUMENTS, Spec};

use super::epilogue_sums::channels;
use super::error::PassError;
use super::merge_calls::{CallMerger, LoopMerge, axes_along, cycles};
use super::pipeline::Pass;
use crate::backend::Target;
use crate::ir::{KernelCall, Program};

/// The pass.
pub struct ShareReads<'a> {
    /// The device.
    target: &'a Target,
}

impl<'a> ShareReads<'a> {
    /// The pass for a device; `None` on the CPU, whose kernels have no modelled time.
    pub fn on(target: &'a Target) -> Option<ShareReads<'a>> {
        target.sectors().map(|_| ShareReads { target })
    }
}

impl Pass for ShareReads<'_> {
    const NAME: &'static str = "share_reads";
    type Input = Program;
    type Output = Program;

    fn run(&self, program: &Program) -> Result<Program, PassError> {
        let bounds = program.graph.symbols.bounds();
        let mut merger = CallMerger::of(program);
        for at in 0..merger.calls().len() {
            let Some((other, call)) = joined(&merger, at) else {
                continue;
            };
            let [before, alone] = [other, at].map(|at| &merger.calls()[at]);
            let [before, alone, after] =
                [before, alone, &call].map(|call| cycles(self.target, call, &bounds));
            if after >= before + alone || !self.target.has_kernel(&call.spec, &bounds) {
                continue;
            }
            merger.set(other, call);
            merger.moved_to[at] = Some(other);
        }
        Ok(merger.finish())
    }
}

/// The call that does the work of a loop beside its own, and its number; `None` if there is none.
fn joined(merger: &CallMerger, at: usize) -> Option<(usize, KernelCall)> {
    let (calls, call) = (merger.calls(), &merger.calls()[at]);
    let spec = &call.spec;
    let is_plain = spec.body == Body::Loop && spec.reduced == 0 && spec.indices.is_empty();
    if !is_plain || !call.after.is_empty() {
        return None;
    }
    let (from, other) = call.in_place.iter().find_map(|&(from, _)| {
        let reads = |reader: &usize| {
            let is_read = |&(value, access): &(_, _)| value == from && access != Access::Write;
            *reader != at
                && merger.moved_to[*reader].is_none()
                && merger.accesses(*reader).iter().any(is_read)
        };
        let last = (0..calls.len()).filter(reads).max()?;
        let has_points = |spec: &Spec| spec.body == Body::Loop || channels(spec).is_some();
        (last < at && has_points(&calls[last].spec)).then_some((from, last))
    })?;
    let strides = |call: &KernelCall| {
        let mut all = (0u16..).zip(&call.spec.operands);
        let found = all.find(|(k, _)| call.operand(*k) == from && call.spec.reads(*k));
        found.map(|(_, operand)| operand.strides.clone())
    };
    let [there, here] = [strides(&calls[other])?, strides(call)?];
    let axes = axes_along([&calls[other].spec.dims, &spec.dims], [&there, &here])?;
    let mut merge = LoopMerge::new(merger, [other, at], axes);
    for store in &spec.stores {
        merge.store(store)?;
    }
    let mut new = merge.new;
    new.name = format!("{} & {}", new.name, call.name);
    (new.args.len() <= MAX_ARGUMENTS).then_some((other, new))
}
