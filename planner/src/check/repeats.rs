//! Verifies that a dag with repeats does the work of the dag it was made from.
//!
//! A run of a task gives what it should if it is given what it should. So it is enough that each
//! run reads, where its task reads a buffer, a buffer that runs of all that buffer's writers made,
//! in their turn; that what may happen once happens once (of a task that does more at first than
//! when it runs again, one run does all); and that whoever must wait for a task waits for every run
//! of it, since a run after that could see what has been changed (a weight, say). Everything is
//! derived from both dags here, whatever made the second.

use super::Checked;
use crate::dag::{BufferId, Dag, DagError, MayReuse, TaskId};
use crate::repeat::Repeated;

/// The first way in which a dag with repeats does other work than the dag it was made from.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RepeatViolation {
    /// The dag with repeats is broken.
    #[error("the dag with repeats is broken: {0}")]
    Dag(#[from] DagError),
    /// A list has not one entry per task or buffer, or an entry names none.
    #[error(
        "which {what} its {what} are is not told for each, or one is told to be {what} {index} of {count}"
    )]
    Origin {
        /// `tasks` or `buffers`.
        what: &'static str,
        /// What was named.
        index: u32,
        /// How many there are.
        count: usize,
    },
    /// A run needs other bytes or time than its task, or a buffer has other bytes than the one
    /// whose data it holds.
    #[error("`{name}` differs in {what} from what it stands for")]
    Differs {
        /// The run or buffer.
        name: String,
        /// In what.
        what: &'static str,
    },
    /// A run reads or writes something else than its task.
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
        /// How often.
        runs: usize,
    },
    /// Something that is there at the start or must be there at the end exists not just once.
    #[error("{copies} buffers are `{buffer}` {when}")]
    Copies {
        /// The buffer.
        buffer: String,
        /// How many there are.
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
    /// A run does not wait for a run of a task that its task waits for.
    #[error("the run `{run}` does not wait for `{before}`")]
    Order {
        /// The run that should wait.
        run: String,
        /// The run it should wait for.
        before: String,
    },
    /// Permission to compute in place that nobody gave.
    #[error("the run `{run}` may compute in place what its task may not")]
    InPlace {
        /// The run.
        run: String,
    },
}

/// Accepts a dag with repeats if it does the work of `dag`, or says where it does not.
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

/// Sizes, and what is there at the start and at the end.
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

/// Each run by itself, how often tasks run, and whom runs wait for.
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

/// Whole values: each buffer is what one run of each writer made of it, in their turn.
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
