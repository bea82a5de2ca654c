//! Rematerialization: dags in which some tasks run more than once.
//!
//! Recomputing a buffer instead of keeping it is a rewriting of the dag. Each run of a task is a
//! separate task, and the outputs of each run are separate buffers, so that a read names the run
//! that produces its data. The result is a dag like any other, planned and checked like any other;
//! in addition, [`check_repeats`](crate::check_repeats) verifies that it does the work of the
//! original dag.

use crate::dag::{Buffer, BufferId, Dag, MayReuse, Task, TaskId};
use rustc_hash::FxHashSet;

/// A dag derived from another: each of its tasks is a run of one task of the original, and each of
/// its buffers is written by one run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Repeated {
    /// The runs, in the order they were scheduled, and their buffers.
    pub dag: Dag,
    /// For each run, the task that it runs.
    pub task_of: Vec<TaskId>,
    /// For each buffer, the one whose data it holds.
    pub buffer_of: Vec<BufferId>,
}

impl Repeated {
    /// The dag whose tasks run in the order of `runs`, each at least once, where every read takes
    /// the latest copy. Every task must come after those it depends on. A task that runs twice must
    /// be [`Task::repeatable`]; later runs use its [`Task::rerun`] if there is one.
    pub(crate) fn new(dag: &Dag, runs: &[TaskId]) -> Self {
        let mut repeated = Repeated {
            dag: Dag::new(),
            task_of: Vec::new(),
            buffer_of: Vec::new(),
        };
        let mut first_writer = vec![None; dag.buffers.len()];
        for (t, task) in (0u32..).zip(&dag.tasks) {
            task.writes
                .iter()
                .for_each(|b| _ = first_writer[b.index()].get_or_insert(TaskId(t)));
        }
        let mut left = vec![0u32; dag.tasks.len()];
        runs.iter().for_each(|t| left[t.index()] += 1);
        let mut runs_of: Vec<Vec<TaskId>> = vec![Vec::new(); dag.tasks.len()];
        let mut latest = vec![None; dag.buffers.len()];
        // Buffers that no run makes exist once.
        for (b, buffer) in (0u32..).zip(&dag.buffers) {
            if buffer.live_in || first_writer[b as usize].is_none() {
                latest[b as usize] = Some(repeated.add_buffer(BufferId(b), buffer.clone()));
            }
        }
        let mut pairs = dag.may_reuse.clone();
        pairs.sort_unstable();
        for &run in runs {
            left[run.index()] -= 1;
            let (is_first, is_last) = (runs_of[run.index()].is_empty(), left[run.index()] == 0);
            let task = if is_first {
                dag.tasks[run.index()].clone()
            } else {
                dag.tasks[run.index()].recomputed()
            };
            let name = |name: &str| {
                if is_first {
                    name.to_string()
                } else {
                    format!("{name} recomputed")
                }
            };
            let reads: Vec<BufferId> = task
                .reads
                .iter()
                .filter_map(|b| latest[b.index()])
                .collect();
            let own = pairs.partition_point(|pair| pair.task < run);
            let own = pairs[own..]
                .iter()
                .take_while(|pair| pair.task == run)
                .filter(|pair| task.reads.contains(&pair.from));
            // In place, a run takes over the copies that it reads, not those that it makes.
            let own: Vec<_> = own
                .map(|pair| (latest[pair.from.index()], pair.to))
                .collect();
            for b in &task.writes {
                let buffer = &dag.buffers[b.index()];
                if first_writer[b.index()] == Some(run) && !buffer.live_in {
                    let copy = Buffer {
                        name: name(&buffer.name),
                        live_out: buffer.live_out && is_last,
                        ..buffer.clone()
                    };
                    latest[b.index()] = Some(repeated.add_buffer(*b, copy));
                }
            }
            let of = |latest: &[Option<BufferId>], b: BufferId| latest[b.index()];
            let writes = task.writes.iter().filter_map(|&b| of(&latest, b)).collect();
            let after = task
                .after
                .iter()
                .flat_map(|a| runs_of[a.index()].iter().copied())
                .collect();
            let id = repeated.dag.add_task(Task {
                name: name(&task.name),
                reads,
                writes,
                after,
                rerun: None,
                ..task.clone()
            });
            repeated.task_of.push(run);
            runs_of[run.index()].push(id);
            for (from, to) in own {
                if let (Some(from), Some(to)) = (from, of(&latest, to)) {
                    repeated.dag.may_reuse.push(MayReuse { task: id, from, to });
                }
            }
        }
        repeated
    }

    fn add_buffer(&mut self, of: BufferId, buffer: Buffer) -> BufferId {
        self.buffer_of.push(of);
        self.dag.add_buffer(buffer)
    }

    /// The runs that are not the first of their tasks.
    pub fn recomputed_tasks(&self) -> Vec<TaskId> {
        let mut ran = FxHashSet::default();
        (0u32..)
            .zip(&self.task_of)
            .filter(|&(_, task)| !ran.insert(*task))
            .map(|(run, _)| TaskId(run))
            .collect()
    }

    /// The time of all runs, in the unit of [`Task::cost`].
    pub fn cost(&self) -> u128 {
        self.dag
            .tasks
            .iter()
            .map(|task| u128::from(task.cost))
            .sum()
    }
}
