//! Checks the order of a plan: that it is a permutation of the tasks, and every dependency.

use super::Checker;
use super::violation::Violation;
use crate::dag::Dag;
use crate::plan::Plan;

/// The step of each task, if the plan has the right shape and its order is a permutation.
pub(super) fn steps(dag: &Dag, plan: &Plan) -> Result<Vec<usize>, Violation> {
    let lengths = [
        ("steps", dag.tasks.len(), plan.order.len()),
        ("lifetimes", dag.buffers.len(), plan.lifetimes.len()),
        ("offsets", dag.buffers.len(), plan.offsets.len()),
        (
            "workspace offsets",
            dag.tasks.len(),
            plan.workspace_offsets.len(),
        ),
    ];
    if let Some(&(what, expected, found)) = lengths
        .iter()
        .find(|(_, expected, found)| expected != found)
    {
        return Err(Violation::Length {
            what,
            expected,
            found,
        });
    }
    let mut step_of = vec![None; dag.tasks.len()];
    for (step, task) in plan.order.iter().enumerate() {
        let Some(slot) = step_of.get_mut(task.index()) else {
            return Err(Violation::UnknownTask {
                step,
                task: task.0,
                count: dag.tasks.len(),
            });
        };
        if let Some(first) = slot.replace(step) {
            return Err(Violation::RunsTwice {
                task: dag.task_name(*task).into(),
                first,
                second: step,
            });
        }
    }
    // There are as many steps as tasks and no task has two, so each has one.
    Ok(step_of.into_iter().flatten().collect())
}

impl Checker<'_> {
    fn must_precede(
        &self,
        before: usize,
        after: usize,
        reason: impl Fn() -> String,
    ) -> Result<(), Violation> {
        let (late_step, early_step) = (self.step_of[before], self.step_of[after]);
        if late_step < early_step {
            return Ok(());
        }
        Err(Violation::Dependency {
            late: self.task(before),
            late_step,
            early: self.task(after),
            early_step,
            reason: reason(),
        })
    }

    /// Checks that the writers of a buffer run in program order, its other users after all of them,
    /// and control dependencies.
    pub(super) fn dependencies(&self) -> Result<(), Violation> {
        let mut last_writer = vec![None; self.dag.buffers.len()];
        for (t, task) in self.dag.tasks.iter().enumerate() {
            for before in &task.after {
                self.must_precede(before.index(), t, || "it is a control dependency".into())?;
            }
            for write in &task.writes {
                let previous = last_writer[write.index()].replace(t);
                if let Some(previous) = previous.filter(|&previous| previous != t) {
                    self.must_precede(previous, t, || {
                        format!(
                            "both write `{}`, in this order",
                            self.dag.buffer_name(*write)
                        )
                    })?;
                }
            }
        }
        for (t, task) in self.dag.tasks.iter().enumerate() {
            let mut writes: Vec<u32> = task.writes.iter().map(|w| w.0).collect();
            writes.sort_unstable();
            for read in task
                .reads
                .iter()
                .filter(|read| writes.binary_search(&read.0).is_err())
            {
                if let Some(writer) = last_writer[read.index()] {
                    self.must_precede(writer, t, || {
                        format!(
                            "it writes `{}`, which the other reads",
                            self.dag.buffer_name(*read)
                        )
                    })?;
                }
            }
        }
        Ok(())
    }
}
