//! Workspaces within a budget: programs are planned with the smallest, then kernels get larger ones
//! where the plan leaves bytes free.
//!
//! The block sizes of a product change no bit of it but a good deal of its time, because small
//! blocks are packed more often. So a program is first planned with the smallest workspaces; then
//! each kernel gets the largest one that fits between the buffers that are live at its step.

use std::collections::hash_map::Entry;
use std::sync::Arc;

use rustc_hash::FxHashMap;
use slabwise_kernels::size::Env;
use slabwise_kernels::spec::SpecError;
use slabwise_planner::{ALIGN, Dag, Plan, Space};

use super::error::PassError;
use super::pipeline::Pass;
use crate::backend::{Kernel, KernelCache, Target};
use crate::ir::Program;

/// The pass; its fields as the arguments of [`grow_workspaces`].
pub(crate) struct GrowWorkspaces<'a> {
    pub plan: &'a Plan,
    pub target: &'a Target,
    pub room: u64,
    pub kernels: &'a KernelCache,
}

impl Pass for GrowWorkspaces<'_> {
    const NAME: &'static str = "grow-workspaces";
    type Input = Program;
    type Output = (Program, Plan);

    fn run(&self, program: &Program) -> Result<Self::Output, PassError> {
        let (program, plan) = (program.clone(), self.plan.clone());
        grow_workspaces(program, plan, self.target, self.room, self.kernels)
    }
}

/// The program with larger workspaces for kernels where its plan has headroom, and with the
/// modelled times that the kernels take with them; and its plan. Buffers keep their offsets.
///
/// # Errors
/// If the device has no kernel for a call.
pub(super) fn grow_workspaces(
    mut program: Program,
    mut plan: Plan,
    target: &Target,
    room: u64,
    known: &KernelCache,
) -> Result<(Program, Plan), PassError> {
    // Steps of copies have neither workspace nor kernel. Without a limit, kernels have the largest
    // workspaces already.
    if !target.limits_workspaces() || !program.transfer_steps.is_empty() {
        return Ok((program, plan));
    }
    let bounds = program.graph.symbols.bounds();
    let dag = program.to_dag();
    let mut larger: FxHashMap<*const Kernel, Vec<Arc<Kernel>>> = FxHashMap::default();
    let (mut bound, order) = (0, plan.order.clone());
    let occupied = |bytes: u64| bytes.next_multiple_of(ALIGN);
    let examples = program.micro_batches.map_or(0, |micro| micro.examples);
    for (step, &task) in (0..).zip(&order) {
        let busy = busy(&dag, &plan, step);
        let gap = gaps(&busy, room)
            .max_by_key(|gap| (gap.1, std::cmp::Reverse(gap.0)))
            .unwrap_or((0, 0));
        let call = &mut program.kernels[task.index()];
        let Some(kernel) = &call.kernel else { continue };
        let kernels = match larger.entry(Arc::as_ptr(kernel)) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(new) => {
                new.insert(variants(kernel, known, examples, target, &bounds).map_err(
                    |source| PassError::Prepare {
                        kernel: call.name.clone(),
                        source,
                    },
                )?)
            }
        };
        let before = occupied(call.workspace());
        if let Some(kernel) = kernels
            .iter()
            .find(|kernel| kernel.workspace() <= gap.1)
            .filter(|kernel| kernel.workspace() > before)
        {
            call.kernel = Some(kernel.clone());
            plan.workspace_offsets[task.index()] = gap.0;
        }
        let slower = call.kernel.as_ref().map_or(1.0, |kernel| kernel.slower());
        call.cost = (call.cost as f64 * slower) as u64;
        let after = occupied(call.workspace());
        plan.without_reuse += after - before;
        bound = bound.max(busy.iter().map(|(from, to)| to - from).sum::<u64>() + after);
    }
    plan.lower_bound = bound;
    let buffers = dag
        .buffers
        .iter()
        .zip(&plan.offsets)
        .map(|(buffer, offset)| offset + buffer.occupied());
    let workspaces = program
        .kernels
        .iter()
        .zip(&plan.workspace_offsets)
        .map(|(call, offset)| offset + occupied(call.workspace()));
    plan.height = buffers.chain(workspaces).max().unwrap_or(0);
    Ok((program, plan))
}

/// The ranges of the slab that live buffers take at a step, ascending and disjoint.
fn busy(dag: &Dag, plan: &Plan, step: u64) -> Vec<(u64, u64)> {
    let lives = dag.buffers.iter().zip(&plan.lifetimes).zip(&plan.offsets);
    let here =
        lives.filter(|((buffer, life), _)| life.contains(step) && buffer.space == Space::Device);
    let mut all: Vec<(u64, u64)> = here
        .map(|((buffer, _), &offset)| (offset, offset + buffer.occupied()))
        .filter(|s| s.0 < s.1)
        .collect();
    all.sort_unstable();
    let mut joined: Vec<(u64, u64)> = Vec::with_capacity(all.len());
    for (from, to) in all {
        match joined.last_mut() {
            // A buffer that is computed in place lies inside of the other.
            Some(last) if from < last.1 => last.1 = last.1.max(to),
            _ => joined.push((from, to)),
        }
    }
    joined
}

/// The gaps between these ranges: the first byte, aligned, and the number of bytes.
fn gaps(busy: &[(u64, u64)], room: u64) -> impl Iterator<Item = (u64, u64)> {
    let starts = std::iter::once(0).chain(busy.iter().map(|s| s.1));
    let ends = busy.iter().map(|s| s.0).chain([room]);
    starts.zip(ends).map(|(start, end)| {
        let start = start.next_multiple_of(ALIGN);
        (start, end.saturating_sub(start))
    })
}

/// A kernel with all larger workspaces that it can use, the largest first.
fn variants(
    kernel: &Kernel,
    known: &KernelCache,
    examples: u32,
    target: &Target,
    bounds: &Env,
) -> Result<Vec<Arc<Kernel>>, SpecError> {
    let mut list: Vec<Arc<Kernel>> = Vec::new();
    let mut most = u64::MAX;
    loop {
        let made = kernel.with_workspace(known, examples, bounds, target, most)?;
        let Some(made) =
            made.filter(|made| made.workspace() > kernel.workspace() && made.workspace() <= most)
        else {
            return Ok(list);
        };
        most = made.workspace() - 1;
        list.push(made);
    }
}

#[cfg(test)]
mod tests {
    use super::gaps;

    #[test]
    fn gaps_are_aligned_and_inside_the_room() {
        let of = |busy: &[(u64, u64)], room| gaps(busy, room).collect::<Vec<_>>();
        assert_eq!(of(&[], 100), [(0, 100)]);
        assert_eq!(
            of(&[(0, 70), (192, 256)], 500),
            [(0, 0), (128, 64), (256, 244)]
        );
        assert_eq!(of(&[(64, 600)], 500), [(0, 64), (640, 0)]);
    }
}
