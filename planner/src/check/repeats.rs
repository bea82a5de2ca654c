//! Verifies that a dag with recomputation does the work of the original dag.
//!
//! A run of a task writes correct values if it reads correct values. So it is enough to check three
//! conditions. Where its task reads a buffer, each run reads a buffer that runs of all of that
//! buffer's writers wrote, in order. Tasks that may run only once do so; of a task with a recompute
//! variant, exactly one run is the full one. Each dependent of a task depends on every run of it,
//! because a later run could see data that the dependent changes, such as a weight. This module
//! derives all of this from the two dags alone.

use super::Checked;
use crate::dag::{BufferId, Dag, DagError, MayReuse, TaskId};
use crate::repeat::Repeated;

/// The first difference in work between a dag with recomputation and the original dag.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RepeatViolation {
    /// The dag with recomputation is broken.
    #[error("the dag with recomputation is broken: {0}")]
    Dag(#[from] DagError),
    /// The length of a list is not the number of tasks or buffers, or an entry is out of range.
    #[error("the list of original {what} is incomplete, or names number {index} of {count}")]
    Origin {
        /// `tasks` or `buffers`.
        what: &'static str,
        /// The index that was named.
        index: u32,
        /// The number of originals.
        count: usize,
    },
    /// A run needs other bytes or time than its task, or a buffer has other bytes than its
    /// original or lies in another space.
    #[error("`{name}` differs in {what} from its original")]
    Differs {
        /// The run or buffer.
        name: String,
        /// The property.
        what: &'static str,
    },
    /// A run reads or writes other buffers than its task.
    #[error("the run `{run}` touches other buffers than its task")]
    Touches {
        /// The run.
        run: String,
    },
    /// A task runs too often, or never.
    #[error("task `{task}` runs {runs} times")]
    Runs {
        /// The task.
        task: String,
        /// The number of runs.
        runs: usize,
    },
    /// An input or output does not exist exactly once.
    #[error("{copies} buffers are `{buffer}` {when}")]
    Copies {
        /// The buffer.
        buffer: String,
        /// The number of buffers.
        copies: usize,
        /// At the start, or at the end.
        when: &'static str,
    },
    /// A buffer is not written by one run of each writer, in their order.
    #[error("buffer `{buffer}` is not made by one run of each of its writers in turn")]
    Writers {
        /// The buffer.
        buffer: String,
    },
    /// A run does not depend on a run of a task that its task depends on.
    #[error("the run `{run}` does not depend on `{before}`")]
    Order {
        /// The dependent run.
        run: String,
        /// The run that it must depend on.
        before: String,
    },
    /// A permission to compute in place that the dag does not give.
    #[error("the run `{run}` may compute a pair in place that its task may not")]
    InPlace {
        /// The run.
        run: String,
    },
}

/// Accepts a dag with recomputation if it does the work of `dag`, or returns the first difference.
pub fn check_repeats(dag: &Dag, repeated: Repeated) -> Result<Checked<Repeated>, RepeatViolation> {
    repeated.dag.verify()?;
    let new = &repeated.dag;
    origins(
        "tasks",
        repeated.task_of.iter().map(|t| t.0),
        new.tasks.len(),
        dag.tasks.len(),
    )?;
    origins(
        "buffers",
        repeated.buffer_of.iter().map(|b| b.0),
        new.buffers.len(),
        dag.buffers.len(),
    )?;
    buffers(dag, &repeated)?;
    runs(dag, &repeated)?;
    writers(dag, &repeated)?;
    Ok(Checked(repeated))
}

fn origins(
    what: &'static str,
    named: impl Iterator<Item = u32> + Clone,
    expected: usize,
    count: usize,
) -> Result<(), RepeatViolation> {
    let wrong = named.clone().find(|&index| index as usize >= count);
    if wrong.is_none() && named.count() == expected {
        return Ok(());
    }
    Err(RepeatViolation::Origin {
        what,
        index: wrong.unwrap_or(0),
        count,
    })
}

/// Checks sizes and spaces, and the buffers that are live at the start and at the end.
fn buffers(dag: &Dag, repeated: &Repeated) -> Result<(), RepeatViolation> {
    let (mut at_start, mut at_end) = (vec![0; dag.buffers.len()], vec![0; dag.buffers.len()]);
    let mut copies = vec![0; dag.buffers.len()];
    for (buffer, of) in repeated.dag.buffers.iter().zip(&repeated.buffer_of) {
        let original = &dag.buffers[of.index()];
        if (buffer.bytes, buffer.align) != (original.bytes, original.align) {
            return Err(RepeatViolation::Differs {
                name: buffer.name.clone(),
                what: "bytes or alignment",
            });
        }
        if buffer.space != original.space {
            return Err(RepeatViolation::Differs {
                name: buffer.name.clone(),
                what: "its space",
            });
        }
        copies[of.index()] += 1;
        at_start[of.index()] += usize::from(buffer.live_in);
        at_end[of.index()] += usize::from(buffer.live_out);
    }
    for (b, buffer) in dag.buffers.iter().enumerate() {
        let wrong = |copies, when| {
            Err(RepeatViolation::Copies {
                buffer: buffer.name.clone(),
                copies,
                when,
            })
        };
        if at_start[b] != usize::from(buffer.live_in) {
            return wrong(at_start[b], "at the start");
        }
        if buffer.live_in && copies[b] != 1 {
            return wrong(copies[b], "at the start");
        }
        if at_end[b] != usize::from(buffer.live_out) {
            return wrong(at_end[b], "at the end");
        }
    }
    Ok(())
}

/// Checks each run by itself, the number of runs of each task, control dependencies and in-place
/// pairs.
fn runs(dag: &Dag, repeated: &Repeated) -> Result<(), RepeatViolation> {
    let new = &repeated.dag;
    let mut runs_of: Vec<Vec<TaskId>> = vec![Vec::new(); dag.tasks.len()];
    for (r, (run, of)) in (0u32..).zip(new.tasks.iter().zip(&repeated.task_of)) {
        let task = &dag.tasks[of.index()];
        let (mut reads, mut workspace, mut cost) = (&task.reads, task.workspace, task.cost);
        if let Some(rerun) = task
            .rerun
            .as_ref()
            .filter(|_| !runs_of[of.index()].is_empty())
        {
            (reads, workspace, cost) = (&rerun.reads, rerun.workspace, rerun.cost);
        }
        if (run.workspace, run.cost) != (workspace, cost) {
            return Err(RepeatViolation::Differs {
                name: run.name.clone(),
                what: "workspace or cost",
            });
        }
        let same = |copies: &[BufferId], originals: &[BufferId]| {
            copies
                .iter()
                .map(|b| repeated.buffer_of[b.index()])
                .eq(originals.iter().copied())
        };
        if !same(&run.reads, reads) || !same(&run.writes, &task.writes) {
            return Err(RepeatViolation::Touches {
                run: run.name.clone(),
            });
        }
        runs_of[of.index()].push(TaskId(r));
    }
    for (task, runs) in dag.tasks.iter().zip(&runs_of) {
        if runs.is_empty() || runs.len() > 1 && !task.repeatable {
            return Err(RepeatViolation::Runs {
                task: task.name.clone(),
                runs: runs.len(),
            });
        }
        for run in runs {
            let mut waits = new.tasks[run.index()].after.clone();
            waits.sort_unstable();
            let forgotten = task
                .after
                .iter()
                .flat_map(|before| &runs_of[before.index()])
                .find(|before| waits.binary_search(before).is_err());
            if let Some(before) = forgotten {
                let (run, before) = (new.task_name(*run).into(), new.task_name(*before).into());
                return Err(RepeatViolation::Order { run, before });
            }
        }
    }
    let mut declared = dag.may_reuse.clone();
    declared.sort_unstable();
    for pair in &new.may_reuse {
        let original = MayReuse {
            task: repeated.task_of[pair.task.index()],
            from: repeated.buffer_of[pair.from.index()],
            to: repeated.buffer_of[pair.to.index()],
        };
        if declared.binary_search(&original).is_err() {
            return Err(RepeatViolation::InPlace {
                run: new.task_name(pair.task).into(),
            });
        }
    }
    Ok(())
}

/// Checks that values are complete: each buffer is written by one run of each writer, in order.
fn writers(dag: &Dag, repeated: &Repeated) -> Result<(), RepeatViolation> {
    let of_dag = |dag: &Dag| {
        let mut writers: Vec<Vec<TaskId>> = vec![Vec::new(); dag.buffers.len()];
        for (t, task) in (0u32..).zip(&dag.tasks) {
            for write in &task.writes {
                let list = &mut writers[write.index()];
                if list.last() != Some(&TaskId(t)) {
                    list.push(TaskId(t));
                }
            }
        }
        writers
    };
    let expected = of_dag(dag);
    for (b, runs) in of_dag(&repeated.dag).into_iter().enumerate() {
        let tasks = runs.iter().map(|run| repeated.task_of[run.index()]);
        if !tasks.eq(expected[repeated.buffer_of[b].index()].iter().copied()) {
            return Err(RepeatViolation::Writers {
                buffer: repeated.dag.buffers[b].name.clone(),
            });
        }
    }
    Ok(())
}
