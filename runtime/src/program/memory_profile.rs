//! A run in the slab as a memory profile, so that planned and dynamic runs are exported by the same code in
//! the same formats.

use slabwise_planner::report::Run;

use super::Program;
use crate::memory::export::{Kernel, Life, MemoryProfile};

impl<const N: usize> Program<N> {
    /// The contents of the slab while a recorded run was at step `until`, with their history; with
    /// the number of steps, those of the whole run. Buffers and workspaces are blocks from the
    /// beginning of their first step to the end of their last; one that is computed in place is a
    /// block once that step has ended, for until then the other one stands for both.
    pub fn memory_profile(&self, run: &Run, until: usize) -> MemoryProfile {
        let inner = &self.inner;
        let (dag, offsets) = (inner.plan.dag(), inner.plan.offsets());
        let steps = inner.steps.len();
        // When each step begins, each later than the one before, and when the last one ends.
        let mut begins: Vec<u64> = Vec::with_capacity(steps + 1);
        for at in 0..=steps {
            let seen = match run.steps.get(at) {
                Some(step) => step.start_ns,
                None => run
                    .steps
                    .last()
                    .map_or(0, |last| last.start_ns.saturating_add(last.ns)),
            };
            begins.push(begins.last().map_or(seen, |before| seen.max(before + 1)));
        }
        let mut in_place = vec![false; dag.buffers.len()];
        offsets
            .reused
            .iter()
            .for_each(|pair| in_place[pair.to.index()] = true);
        let buffers = dag.buffers.iter().enumerate().map(|(b, buffer)| {
            let life = offsets.lifetimes[b];
            (
                b,
                offsets.offsets[b],
                buffer.occupied_on_device(),
                life.start as usize + usize::from(in_place[b]),
                life.end as usize,
            )
        });
        let workspaces = offsets.order.iter().enumerate().map(|(at, task)| {
            let task = task.index();
            (
                dag.buffers.len() + at,
                offsets.workspace_offsets[task],
                dag.tasks[task].workspace_occupied(),
                at,
                at + 1,
            )
        });
        let all = buffers
            .chain(workspaces)
            .filter(|&(_, _, bytes, start, end)| bytes > 0 && start < end && start <= until);
        let lives: Vec<Life> = all
            .map(|(tag, offset, bytes, start, end)| Life {
                tag: inner.tags[tag].clone(),
                offset,
                bytes,
                from_ns: begins[start],
                to_ns: (end <= until).then(|| begins[end.min(steps)]),
            })
            .collect();
        let ran = run
            .steps
            .iter()
            .zip(&inner.steps)
            .take(until.saturating_add(1));
        let kernels = ran.map(|(seen, step)| Kernel {
            name: step.name.clone(),
            start_ns: seen.start_ns,
            ns: seen.ns,
        });
        MemoryProfile::of_slab("plan", offsets.height, &lives, kernels.collect())
    }
}
