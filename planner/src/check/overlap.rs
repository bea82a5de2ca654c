//! Verifies a dag with collectives in flight, and the places that a plan gives them.
//!
//! The dag must do the work of the original dag: each task runs once on the same buffers, each
//! collective starts once and ends once, and each task depends on the ends of all it depended on.
//! Three properties of the plan are verified from offsets and steps alone, independent of its
//! lifetimes. Between the start and the end of a collective, no task writes bytes of its sources,
//! because they are read meanwhile, and none reads or writes bytes of its destinations. Its
//! destinations share no bytes with each other or with its sources. And collectives start in one
//! order and end in the same, because ranks that have different orders wait for each other for
//! ever.

use super::Checked;
use super::order::steps;
use crate::dag::{BufferId, Dag, DagError, MayReuse, Space, Task, TaskId};
use crate::offload::Work;
use crate::overlap::Overlapped;
use crate::plan::Plan;

/// The first broken invariant of a dag with collectives in flight, or of its plan.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OverlapViolation {
    /// The dag is broken.
    #[error("the dag with collectives in flight is broken: {0}")]
    Dag(#[from] DagError),
    /// A list has another length, or names something that does not exist.
    #[error("the list of {what} is incomplete, or names what does not exist")]
    Length {
        /// The list.
        what: &'static str,
    },
    /// A task does not run exactly once; a collective does not start and then end exactly once.
    #[error("`{task}` does not run once, or does not start once and end once")]
    Runs {
        /// The task.
        task: String,
    },
    /// A task touches other buffers than the original, or needs other bytes or time.
    #[error("`{task}` touches other buffers than its original, or differs in its needs")]
    Differs {
        /// The task.
        task: String,
    },
    /// A task does not depend on the end of another that it depended on.
    #[error("`{task}` does not wait for the end of `{before}`")]
    Order {
        /// The dependent task.
        task: String,
        /// The other.
        before: String,
    },
    /// A buffer is written by other tasks, or in another order.
    #[error("`{buffer}` is written by other tasks, or in another order")]
    Writers {
        /// The buffer.
        buffer: String,
    },
    /// A permission to compute in place that the dag does not give.
    #[error("`{task}` may compute a pair in place that its original may not")]
    InPlace {
        /// The task.
        task: String,
    },
    /// Collectives start or end in another order than the one that all ranks have.
    #[error("`{late}` does not start and end behind `{early}`")]
    Turns {
        /// The collective that comes first.
        early: String,
        /// The one that comes next.
        late: String,
    },
    /// A buffer of a collective does not live from its start to its end.
    #[error("`{buffer}` does not live as long as `{collective}` is in flight")]
    Dead {
        /// The collective.
        collective: String,
        /// The buffer.
        buffer: String,
    },
    /// A task touches bytes that a collective in flight uses.
    #[error("`{task}` {how} bytes of `{buffer}` at step {step}, while `{collective}` is in flight")]
    Touched {
        /// The collective.
        collective: String,
        /// Its buffer.
        buffer: String,
        /// The task.
        task: String,
        /// `writes` or `reads`.
        how: &'static str,
        /// The step.
        step: usize,
    },
}

use OverlapViolation as V;

/// Accepts a dag with collectives in flight, and a plan for it, if the dag does the work of `dag`,
/// of whose tasks these are collectives, and nothing disturbs a collective in flight.
///
/// # Errors
/// The first broken invariant.
pub fn check_overlap(
    dag: &Dag,
    collectives: &[TaskId],
    overlapped: Overlapped,
    plan: &Plan,
) -> Result<Checked<Overlapped>, OverlapViolation> {
    overlapped.dag.verify()?;
    let checker = Checker {
        dag,
        collectives,
        new: &overlapped,
    };
    let ends = checker.runs()?;
    checker.order(&ends)?;
    checker.writers()?;
    check_in_flight(&overlapped.dag, plan, &overlapped.halves())?;
    Ok(Checked(overlapped))
}

/// The first and the last task of each task of the original dag.
type Ends = Vec<[TaskId; 2]>;

struct Checker<'a> {
    dag: &'a Dag,
    collectives: &'a [TaskId],
    new: &'a Overlapped,
}

impl Checker<'_> {
    fn original(&self, work: Work) -> Option<TaskId> {
        match work {
            Work::Run(task) => Some(task),
            Work::Start(k) | Work::Finish(k) => self.new.collectives.get(k as usize).copied(),
        }
    }

    fn runs(&self) -> Result<Ends, V> {
        let new = &self.new.dag;
        if self.new.work.len() != new.tasks.len() {
            return Err(V::Length { what: "work" });
        }
        if new.buffers != self.dag.buffers {
            return Err(V::Length { what: "buffers" });
        }
        let mut given = self.collectives.to_vec();
        let mut split = self.new.collectives.clone();
        given.sort_unstable();
        split.sort_unstable();
        if given != split {
            return Err(V::Length {
                what: "collectives",
            });
        }
        // For each original, its runs as the number of the task and the expected role.
        let mut runs: Vec<Vec<(TaskId, Work)>> = vec![Vec::new(); self.dag.tasks.len()];
        for ((t, task), &work) in (0..).zip(&new.tasks).zip(&self.new.work) {
            let original = self.original(work).filter(|o| o.index() < runs.len());
            let Some(original) = original else {
                return Err(V::Length { what: "work" });
            };
            let old = &self.dag.tasks[original.index()];
            let same = task.reads == old.reads && task.writes == old.writes;
            let needs = match work {
                Work::Run(_) => {
                    (task.workspace, task.cost, task.repeatable)
                        == (old.workspace, old.cost, old.repeatable)
                }
                // A workspace would have to live from the start to the end.
                Work::Start(_) => {
                    (task.workspace, old.workspace, task.cost) == (0, 0, old.cost)
                        && !task.repeatable
                }
                Work::Finish(_) => (task.workspace, task.cost) == (0, 0) && !task.repeatable,
            };
            if !same || !needs {
                return Err(V::Differs {
                    task: task.name.clone(),
                });
            }
            runs[original.index()].push((TaskId(t), work));
        }
        let ends = |(t, runs): (usize, &Vec<(TaskId, Work)>)| {
            let is_collective = given.binary_search(&TaskId(t as u32)).is_ok();
            match runs[..] {
                [(run, Work::Run(_))] if !is_collective => Ok([run, run]),
                [(start, Work::Start(a)), (end, Work::Finish(b))] if a == b => {
                    if new.tasks[end.index()].after.contains(&start) {
                        Ok([start, end])
                    } else {
                        Err(V::Order {
                            task: new.task_name(end).into(),
                            before: new.task_name(start).into(),
                        })
                    }
                }
                _ => Err(V::Runs {
                    task: self.dag.tasks[t].name.clone(),
                }),
            }
        };
        runs.iter().enumerate().map(ends).collect()
    }

    fn order(&self, ends: &Ends) -> Result<(), V> {
        for (task, [first, _]) in self.dag.tasks.iter().zip(ends) {
            let mut waits = self.new.dag.tasks[first.index()].after.clone();
            waits.sort_unstable();
            for before in &task.after {
                let [_, last] = ends[before.index()];
                if waits.binary_search(&last).is_err() {
                    return Err(V::Order {
                        task: self.new.dag.task_name(*first).into(),
                        before: self.new.dag.task_name(last).into(),
                    });
                }
            }
        }
        let mut declared = self.dag.may_reuse.clone();
        declared.sort_unstable();
        for pair in &self.new.dag.may_reuse {
            let is_declared = match self.new.work[pair.task.index()] {
                Work::Run(task) => declared.binary_search(&MayReuse { task, ..*pair }).is_ok(),
                Work::Start(_) | Work::Finish(_) => false,
            };
            if !is_declared {
                return Err(V::InPlace {
                    task: self.new.dag.task_name(pair.task).into(),
                });
            }
        }
        Ok(())
    }

    /// Checks that each buffer is written by the same tasks in the same order, and by no other
    /// between the halves of a collective.
    fn writers(&self) -> Result<(), V> {
        let mut old: Vec<Vec<TaskId>> = vec![Vec::new(); self.dag.buffers.len()];
        let mut new = old.clone();
        for (t, task) in (0..).zip(&self.dag.tasks) {
            for write in &task.writes {
                old[write.index()].push(TaskId(t));
            }
        }
        for (task, &work) in self.new.dag.tasks.iter().zip(&self.new.work) {
            for write in &task.writes {
                new[write.index()].extend(self.original(work));
            }
        }
        let wrong = old.iter_mut().zip(&mut new).position(|(old, new)| {
            old.dedup();
            new.dedup();
            old != new
        });
        match wrong {
            None => Ok(()),
            Some(buffer) => Err(V::Writers {
                buffer: self.dag.buffers[buffer].name.clone(),
            }),
        }
    }
}

/// The bytes of a buffer in its space.
type Bytes = (Space, u64, u64);

/// Checks collectives in flight by the steps and offsets of a plan: `halves` are the tasks that
/// start and end each, in their order.
fn check_in_flight(dag: &Dag, plan: &Plan, halves: &[[TaskId; 2]]) -> Result<(), V> {
    let step_of = steps(dag, plan).map_err(|_| V::Length { what: "the plan" })?;
    let name = |task: TaskId| dag.task_name(task).to_string();
    for pair in halves.windows(2) {
        let [early, late] = [pair[0], pair[1]].map(|halves| halves.map(|t| step_of[t.index()]));
        if early[0] >= late[0] || early[1] >= late[1] {
            return Err(V::Turns {
                early: name(pair[0][0]),
                late: name(pair[1][0]),
            });
        }
    }
    let bytes_of = |b: &BufferId| -> Bytes {
        let (buffer, offset) = (&dag.buffers[b.index()], plan.offsets[b.index()]);
        (buffer.space, offset, offset.saturating_add(buffer.bytes))
    };
    // Those without bytes overlap with none.
    let overlaps = |a: Bytes, b: Bytes| a.0 == b.0 && a.1.max(b.1) < a.2.min(b.2);
    for &[start, finish] in halves {
        let collective = &dag.tasks[start.index()];
        let (from, to) = (step_of[start.index()], step_of[finish.index()]);
        let touched = || {
            let reads = collective.reads.iter().map(|b| (b, false));
            reads.chain(collective.writes.iter().map(|b| (b, true)))
        };
        for (buffer, _) in touched() {
            let life = plan.lifetimes[buffer.index()];
            if life.start > from as u64 || life.end <= to as u64 {
                return Err(V::Dead {
                    collective: name(start),
                    buffer: dag.buffer_name(*buffer).into(),
                });
            }
        }
        if let Some(buffer) = shared_with_destination(collective, &bytes_of) {
            return Err(V::Touched {
                collective: name(start),
                buffer: dag.buffer_name(buffer).into(),
                task: name(start),
                how: "writes",
                step: from,
            });
        }
        for (step, other) in plan.order.iter().enumerate().take(to).skip(from + 1) {
            let task = &dag.tasks[other.index()];
            let workspace = plan.workspace_offsets[other.index()];
            let workspace = (
                Space::Device,
                workspace,
                workspace.saturating_add(task.workspace),
            );
            let writes = task.writes.iter().map(bytes_of).chain([workspace]);
            let writes: Vec<Bytes> = writes.collect();
            for (buffer, is_written) in touched() {
                let own = bytes_of(buffer);
                let wrong = |how| V::Touched {
                    collective: name(start),
                    buffer: dag.buffer_name(*buffer).into(),
                    task: name(*other),
                    how,
                    step,
                };
                if writes.iter().any(|written| overlaps(*written, own)) {
                    return Err(wrong("writes"));
                }
                let reads = || task.reads.iter().map(bytes_of);
                if is_written && reads().any(|read| overlaps(read, own)) {
                    return Err(wrong("reads"));
                }
            }
        }
    }
    Ok(())
}

/// A buffer of a collective, other than the destination itself, that has bytes of a destination.
fn shared_with_destination(
    collective: &Task,
    bytes_of: &impl Fn(&BufferId) -> Bytes,
) -> Option<BufferId> {
    let writes = collective.writes.iter().map(|b| (*b, true));
    let mut buffers: Vec<(BufferId, bool)> = writes
        .chain(collective.reads.iter().map(|b| (*b, false)))
        .collect();
    buffers.sort_unstable_by_key(|&(b, is_written)| (b, !is_written));
    buffers.dedup_by_key(|&mut (b, _)| b);
    let ranges = buffers
        .into_iter()
        .map(|(b, is_written)| (bytes_of(&b), is_written, b));
    let mut ranges: Vec<(Bytes, bool, BufferId)> = ranges.filter(|(r, ..)| r.1 < r.2).collect();
    ranges.sort_unstable();
    // Of the sources and of the destinations before, the one that ends last.
    let mut last: [Option<(Bytes, BufferId)>; 2] = [None; 2];
    for (own, is_written, buffer) in ranges {
        let meets = |side: Option<(Bytes, BufferId)>| {
            side.filter(|(other, _)| other.0 == own.0 && own.1 < other.2)
        };
        if let Some((_, other)) = meets(last[1]) {
            return Some(if is_written { other } else { buffer });
        }
        if let Some((_, other)) = meets(last[0]).filter(|_| is_written) {
            return Some(other);
        }
        let side = &mut last[usize::from(is_written)];
        if side.is_none_or(|(other, _)| (other.0, other.2) < (own.0, own.2)) {
            *side = Some((own, buffer));
        }
    }
    None
}
