//! Workspaces within a budget: kernels that pack and sum up less at a time, and how much of that is
//! taken back once a plan is known.
//!
//! How a product is cut into blocks changes no bit of it but a good deal of its time, for small
//! blocks are packed more often. So a program is first planned with the smallest workspaces; then
//! each kernel gets the largest one that fits between the buffers that live at its step.

use std::sync::Arc;

use rustc_hash::FxHashMap;
use slabwise_kernels::size::Env;
use slabwise_planner::{ALIGN, Plan, Space};

use super::schedule::Scheduled;
use crate::backend::{Kernel, Target};
use crate::graph::Graph;

/// Gives kernels of a planned program larger workspaces where there is room for them, and says what
/// time they take with what they get: buffers stay where they are.
pub fn widen(
    graph: &Graph,
    mut scheduled: Scheduled,
    mut plan: Plan,
    target: &Target,
    room: u64,
) -> Result<(Scheduled, Plan), String> {
    // A copy's steps have no workspace, and no kernel; and where kernels have the largest already,
    // there is nothing to give.
    if !target.limits_workspaces() || scheduled.work.is_some() {
        return Ok((scheduled, plan));
    }
    let bounds = graph.symbols.bounds();
    let mut wider: FxHashMap<*const Kernel, Vec<Arc<Kernel>>> = FxHashMap::default();
    let (mut bound, order) = (0, plan.order.clone());
    for (step, &task) in (0..).zip(&order) {
        let busy = busy(&scheduled, &plan, step);
        let gap = gaps(&busy, room)
            .max_by_key(|gap| (gap.1, std::cmp::Reverse(gap.0)))
            .unwrap_or((0, 0));
        let kernel = &scheduled.kernels[task.index()];
        let kernels = match wider.entry(Arc::as_ptr(kernel)) {
            std::collections::hash_map::Entry::Occupied(known) => known.into_mut(),
            std::collections::hash_map::Entry::Vacant(new) => {
                new.insert(variants(kernel, &scheduled, target, &bounds)?)
            }
        };
        let planned = &mut scheduled.dag.tasks[task.index()];
        let before = planned.workspace_occupied();
        if let Some(kernel) = kernels
            .iter()
            .find(|kernel| kernel.workspace() <= gap.1)
            .filter(|kernel| kernel.workspace() > before)
        {
            planned.workspace = kernel.workspace();
            scheduled.kernels[task.index()] = kernel.clone();
            plan.workspace_offsets[task.index()] = gap.0;
            plan.without_reuse += planned.workspace_occupied() - before;
        }
        let slower = scheduled.kernels[task.index()].slower();
        planned.cost = (planned.cost as f64 * slower) as u64;
        bound = bound.max(
            busy.iter().map(|(from, to)| to - from).sum::<u64>() + planned.workspace_occupied(),
        );
    }
    plan.lower_bound = bound;
    let buffers = scheduled
        .dag
        .buffers
        .iter()
        .zip(&plan.offsets)
        .map(|(buffer, offset)| offset + buffer.occupied());
    let workspaces = scheduled
        .dag
        .tasks
        .iter()
        .zip(&plan.workspace_offsets)
        .map(|(task, offset)| offset + task.workspace_occupied());
    plan.height = buffers.chain(workspaces).max().unwrap_or(0);
    Ok((scheduled, plan))
}

/// The stretches of the slab that buffers take at a step, in ascending order, each once.
fn busy(scheduled: &Scheduled, plan: &Plan, step: u64) -> Vec<(u64, u64)> {
    let lives = scheduled
        .dag
        .buffers
        .iter()
        .zip(&plan.lifetimes)
        .zip(&plan.offsets);
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
            // What is computed in place lies in what it takes the place of.
            Some(last) if from < last.1 => last.1 = last.1.max(to),
            _ => joined.push((from, to)),
        }
    }
    joined
}

/// What is free between them: first bytes, aligned, and how many there are.
fn gaps(busy: &[(u64, u64)], room: u64) -> impl Iterator<Item = (u64, u64)> {
    let starts = std::iter::once(0).chain(busy.iter().map(|s| s.1));
    let ends = busy.iter().map(|s| s.0).chain([room]);
    starts.zip(ends).map(|(start, end)| {
        let start = start.next_multiple_of(ALIGN);
        (start, end.saturating_sub(start))
    })
}

/// A kernel with all the workspaces that it can do with, the largest first.
fn variants(
    kernel: &Kernel,
    scheduled: &Scheduled,
    target: &Target,
    bounds: &Env,
) -> Result<Vec<Arc<Kernel>>, String> {
    let examples = scheduled
        .sliced
        .as_ref()
        .map_or(0, |sliced| sliced.examples);
    let mut list: Vec<Arc<Kernel>> = Vec::new();
    let mut most = u64::MAX;
    loop {
        let made = kernel.with_workspace(examples, bounds, target, most);
        let Some(made) = made
            .map_err(|e| e.to_string())?
            .filter(|made| made.workspace() > kernel.workspace() && made.workspace() <= most)
        else {
            return Ok(list);
        };
        most = made.workspace() - 1;
        list.push(Arc::new(made));
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
