//! The live bytes of a plan: at each step, at the peak, and the buffers that occupy them there.

use super::Plan;
use crate::dag::{BufferId, Dag, MayReuse, TaskId};
use slabwise_packer::Lifetime;

/// The sum of all items that ever live, each on separate bytes.
pub(super) fn without_reuse(dag: &Dag, lives: &[Lifetime]) -> u64 {
    let buffers = dag
        .buffers
        .iter()
        .zip(lives)
        .filter(|(_, life)| !life.is_empty())
        .map(|(buffer, _)| buffer.occupied_on_device());
    buffers
        .chain(dag.tasks.iter().map(|task| task.workspace_occupied()))
        .sum()
}

/// The bytes of the slab occupied at each step, workspaces included. A buffer that is computed in
/// place counts from the step after its task on, because until then the buffer it overwrites stands
/// for both. The largest is [`Plan::lower_bound`].
///
/// # Panics
/// If the plan is not one of this dag.
pub fn live_bytes(dag: &Dag, plan: &Plan) -> Vec<u64> {
    live_bytes_with(dag, plan, &plan.reused)
}

fn live_bytes_with(dag: &Dag, plan: &Plan, reused: &[MayReuse]) -> Vec<u64> {
    let mut changes = vec![0i128; dag.steps() + 1];
    let mut in_place = vec![false; dag.buffers.len()];
    reused
        .iter()
        .for_each(|pair| in_place[pair.to.index()] = true);
    for (i, (buffer, live)) in dag.buffers.iter().zip(&plan.lifetimes).enumerate() {
        changes[live.start as usize + usize::from(in_place[i])] +=
            i128::from(buffer.occupied_on_device());
        changes[live.end as usize] -= i128::from(buffer.occupied_on_device());
    }
    for (step, task) in plan.order.iter().enumerate() {
        let bytes = i128::from(dag.tasks[task.index()].workspace_occupied());
        changes[step] += bytes;
        changes[step + 1] -= bytes;
    }
    let sums = changes.iter().scan(0i128, |live, change| {
        *live += change;
        Some(*live as u64)
    });
    sums.take(dag.steps()).collect()
}

/// The bytes saved by computing in place: the largest need of a step without it, less the height of
/// the slab.
///
/// # Panics
/// If the plan is not one of this dag.
pub fn saved_in_place(dag: &Dag, plan: &Plan) -> u64 {
    if plan.reused.is_empty() {
        return 0;
    }
    live_bytes_with(dag, plan, &[])
        .into_iter()
        .max()
        .unwrap_or(0)
        .saturating_sub(plan.height)
}

impl Plan {
    /// The part of the slab lost to packing: `(height - lower_bound) / height`, 0 for an empty
    /// slab.
    pub fn fragmentation(&self) -> f64 {
        if self.height == 0 {
            0.0
        } else {
            self.height.saturating_sub(self.lower_bound) as f64 / self.height as f64
        }
    }
}

/// An occupant of bytes of a slab.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Holder {
    /// A buffer.
    Buffer(BufferId),
    /// The workspace of a task.
    Workspace(TaskId),
}

/// The step with the most live bytes (the first of several), and those bytes.
///
/// # Panics
/// If the plan is not one of this dag.
pub fn peak(dag: &Dag, plan: &Plan) -> (usize, u64) {
    let live = live_bytes(dag, plan);
    let peak = live.iter().copied().max().unwrap_or(0);
    (
        live.iter().position(|&bytes| bytes == peak).unwrap_or(0),
        peak,
    )
}

/// The occupants of bytes at the step with the most live bytes, the largest first. The sum is that
/// step's live bytes: of a pair that is being computed in place, only the buffer that is
/// overwritten is listed.
///
/// # Panics
/// If the plan is not one of this dag.
pub fn holders_at_peak(dag: &Dag, plan: &Plan) -> Vec<(Holder, u64)> {
    let (step, _) = peak(dag, plan);
    let mut in_place = vec![false; dag.buffers.len()];
    plan.reused
        .iter()
        .for_each(|pair| in_place[pair.to.index()] = true);
    let begins_in_place = |i: usize| plan.lifetimes[i].start == step as u64 && in_place[i];
    let mut holders: Vec<(Holder, u64)> = (0..dag.buffers.len())
        .filter(|&i| plan.lifetimes[i].contains(step as u64) && !begins_in_place(i))
        .map(|i| {
            (
                Holder::Buffer(BufferId(i as u32)),
                dag.buffers[i].occupied_on_device(),
            )
        })
        .collect();
    let workspace = plan.order.get(step).map(|&task| {
        (
            Holder::Workspace(task),
            dag.tasks[task.index()].workspace_occupied(),
        )
    });
    holders.extend(workspace);
    holders.retain(|&(_, bytes)| bytes > 0);
    holders.sort_by_key(|&(holder, bytes)| (std::cmp::Reverse(bytes), holder));
    holders
}
