//! Verifies that a dag with offload copies does the work of the original dag.
//!
//! A buffer made by tasks must be made by the runs of exactly the tasks that make its original, and
//! a buffer made by a copy must be made by the two halves of that copy, from a buffer with the same
//! original. If each run also reads buffers whose originals its task reads, all values are those of
//! the dag: by induction along the order, which exists because a dag has no cycles. Three further
//! properties follow from the rules for tasks and buffers, because the task that ends a copy
//! touches both its sides: a read depends on the end of the copy it reads from, a copy reads a
//! complete buffer, and the bytes of its sides are not taken before it has ended.
//! [`check`](super::check()) of the plan verifies those.

use super::Checked;
use crate::dag::{BufferId, Dag, DagError, MayReuse, Space, TaskId};
use crate::offload::{BufferCopy, Offloaded, Work};

/// The first difference in work between a dag with offload copies and the original dag.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OffloadViolation {
    /// The dag with copies is broken.
    #[error("the dag with copies is broken: {0}")]
    Dag(#[from] DagError),
    /// The length of a list is not the number of tasks or buffers, or an entry is out of range.
    #[error("the list of original {what} is incomplete, or names number {index} of {count}")]
    Origin {
        /// `tasks`, `copies` or `buffers`.
        what: &'static str,
        /// The index that was named.
        index: u32,
        /// The number of originals.
        count: usize,
    },
    /// A run needs other bytes or time than its task, or a buffer has other bytes than its
    /// original.
    #[error("`{name}` differs in {what} from its original")]
    Differs {
        /// The run or buffer.
        name: String,
        /// The property.
        what: &'static str,
    },
    /// A run reads or writes a buffer whose original its task does not touch.
    #[error("the run `{run}` touches other buffers than its task")]
    Touches {
        /// The run.
        run: String,
    },
    /// A task does not run exactly once.
    #[error("task `{task}` runs {runs} times")]
    Runs {
        /// The task.
        task: String,
        /// The number of runs.
        runs: usize,
    },
    /// A run does not depend on a run that its task depends on.
    #[error("the run `{run}` does not depend on `{before}`")]
    Order {
        /// The dependent run.
        run: String,
        /// The run that it must depend on.
        before: String,
    },
    /// A copy does not start once and end once, in this order.
    #[error("copy {copy}, to `{to}`, does not start once and then end once")]
    Halves {
        /// The copy.
        copy: usize,
        /// Its destination.
        to: String,
    },
    /// Half of a copy touches other buffers than its two sides, or does more than copy.
    #[error(
        "`{task}` is half of a copy from `{from}` to `{to}` but has other buffers, dependencies or a workspace"
    )]
    NotACopy {
        /// The task.
        task: String,
        /// The source.
        from: String,
        /// The destination.
        to: String,
    },
    /// The sides of a copy have different originals, or lie in one space.
    #[error("`{from}` is copied to `{to}`, which {what}")]
    Sides {
        /// The source.
        from: String,
        /// The destination.
        to: String,
        /// The error.
        what: &'static str,
    },
    /// A buffer is neither made by the runs of all tasks that write its original, in order, nor by
    /// one copy.
    #[error("buffer `{buffer}` is not made as a whole, by tasks or by a copy")]
    Makers {
        /// The buffer.
        buffer: String,
    },
    /// An input or output does not exist exactly once, or not in the slab.
    #[error("{copies} buffers of the slab are `{buffer}` {when}")]
    Copies {
        /// The buffer.
        buffer: String,
        /// The number of buffers.
        copies: usize,
        /// At the start, or at the end.
        when: &'static str,
    },
    /// A buffer in the host's space is not a copy, or a task uses it.
    #[error("`{name}` lies in the host's space, but is not only a copy")]
    OnHost {
        /// The buffer.
        name: String,
    },
    /// A permission to compute in place that the dag does not give.
    #[error("the run `{run}` may compute a pair in place that its task may not")]
    InPlace {
        /// The run.
        run: String,
    },
}

use OffloadViolation as V;

/// Accepts a dag with offload copies if it does the work of `dag`, or returns the first difference.
pub fn check_offload(
    dag: &Dag,
    offloaded: Offloaded,
) -> Result<Checked<Offloaded>, OffloadViolation> {
    offloaded.dag.verify()?;
    let checker = Checker {
        dag,
        new: &offloaded.dag,
        offloaded: &offloaded,
    };
    checker.origins()?;
    checker.buffers()?;
    let run_of = checker.runs()?;
    checker.order(&run_of)?;
    checker.copies()?;
    checker.makers()?;
    Ok(Checked(offloaded))
}

struct Checker<'a> {
    dag: &'a Dag,
    new: &'a Dag,
    offloaded: &'a Offloaded,
}

impl Checker<'_> {
    fn name(&self, buffer: BufferId) -> String {
        self.new.buffer_name(buffer).into()
    }

    fn of(&self, buffer: &BufferId) -> BufferId {
        self.offloaded.buffer_of[buffer.index()]
    }

    fn origins(&self) -> Result<(), V> {
        let Offloaded {
            work,
            buffer_of,
            copies,
            ..
        } = self.offloaded;
        let within = |what, list: Vec<u32>, complete: bool, count: usize| {
            let wrong = list.into_iter().find(|&index| index as usize >= count);
            if complete && wrong.is_none() {
                Ok(())
            } else {
                Err(V::Origin {
                    what,
                    index: wrong.unwrap_or(0),
                    count,
                })
            }
        };
        let runs = work.iter().filter_map(|w| {
            if let Work::Run(task) = w {
                Some(task.0)
            } else {
                None
            }
        });
        let halves = work.iter().filter_map(|w| {
            if let Work::Start(k) | Work::Finish(k) = w {
                Some(*k)
            } else {
                None
            }
        });
        let sides = copies.iter().flat_map(|copy| [copy.from.0, copy.to.0]);
        within(
            "tasks",
            runs.collect(),
            work.len() == self.new.tasks.len(),
            self.dag.tasks.len(),
        )?;
        within("copies", halves.collect(), true, copies.len())?;
        within("copies", sides.collect(), true, self.new.buffers.len())?;
        let stand_for = buffer_of.iter().map(|b| b.0).collect();
        within(
            "buffers",
            stand_for,
            buffer_of.len() == self.new.buffers.len(),
            self.dag.buffers.len(),
        )
    }

    /// Checks sizes, and the buffers that are live at the start and at the end.
    fn buffers(&self) -> Result<(), V> {
        let (mut at_start, mut at_end) = (
            vec![0; self.dag.buffers.len()],
            vec![0; self.dag.buffers.len()],
        );
        for (buffer, of) in self.new.buffers.iter().zip(&self.offloaded.buffer_of) {
            let original = &self.dag.buffers[of.index()];
            if (buffer.bytes, buffer.align) != (original.bytes, original.align) {
                return Err(V::Differs {
                    name: buffer.name.clone(),
                    what: "bytes or alignment",
                });
            }
            // The original dag does not know buffers on the host, so none may be live at the start
            // or at the end.
            let on_device = usize::from(buffer.space == Space::Device);
            for (counts, there) in [
                (&mut at_start, buffer.live_in),
                (&mut at_end, buffer.live_out),
            ] {
                counts[of.index()] += if there && on_device == 0 {
                    2
                } else {
                    usize::from(there)
                };
            }
        }
        for (b, buffer) in self.dag.buffers.iter().enumerate() {
            let counts = [
                (at_start[b], buffer.live_in, "at the start"),
                (at_end[b], buffer.live_out, "at the end"),
            ];
            if let Some(&(copies, _, when)) = counts
                .iter()
                .find(|(count, there, _)| *count != usize::from(*there))
            {
                return Err(V::Copies {
                    buffer: buffer.name.clone(),
                    copies,
                    when,
                });
            }
        }
        Ok(())
    }

    /// Checks each run by itself; returns the run of each task.
    fn runs(&self) -> Result<Vec<TaskId>, V> {
        let mut runs_of = vec![Vec::new(); self.dag.tasks.len()];
        for (r, (run, work)) in (0u32..).zip(self.new.tasks.iter().zip(&self.offloaded.work)) {
            let Work::Run(of) = work else { continue };
            let task = &self.dag.tasks[of.index()];
            if (run.workspace, run.cost, run.repeatable)
                != (task.workspace, task.cost, task.repeatable)
            {
                return Err(V::Differs {
                    name: run.name.clone(),
                    what: "workspace, cost or the permission to be recomputed",
                });
            }
            let same = |new: &[BufferId], old: &[BufferId]| {
                new.iter().map(|b| self.of(b)).eq(old.iter().copied())
            };
            if !same(&run.reads, &task.reads) || !same(&run.writes, &task.writes) {
                return Err(V::Touches {
                    run: run.name.clone(),
                });
            }
            let on_host = run
                .reads
                .iter()
                .chain(&run.writes)
                .find(|b| self.new.buffers[b.index()].space == Space::Host);
            if let Some(&buffer) = on_host {
                return Err(V::OnHost {
                    name: self.name(buffer),
                });
            }
            runs_of[of.index()].push(TaskId(r));
        }
        let single = |(task, runs): (&crate::dag::Task, &Vec<TaskId>)| match runs[..] {
            [run] => Ok(run),
            _ => Err(V::Runs {
                task: task.name.clone(),
                runs: runs.len(),
            }),
        };
        self.dag.tasks.iter().zip(&runs_of).map(single).collect()
    }

    /// Checks control dependencies and in-place pairs.
    fn order(&self, run_of: &[TaskId]) -> Result<(), V> {
        for (task, run) in self.dag.tasks.iter().zip(run_of) {
            let mut waits = self.new.tasks[run.index()].after.clone();
            waits.sort_unstable();
            let mut before = task.after.iter().map(|before| run_of[before.index()]);
            if let Some(before) = before.find(|before| waits.binary_search(before).is_err()) {
                let (run, before) = (
                    self.new.task_name(*run).into(),
                    self.new.task_name(before).into(),
                );
                return Err(V::Order { run, before });
            }
        }
        let mut declared = self.dag.may_reuse.clone();
        declared.sort_unstable();
        for pair in &self.new.may_reuse {
            let is_declared = match self.offloaded.work[pair.task.index()] {
                Work::Run(task) => declared
                    .binary_search(&MayReuse {
                        task,
                        from: self.of(&pair.from),
                        to: self.of(&pair.to),
                    })
                    .is_ok(),
                Work::Start(_) | Work::Finish(_) => false,
            };
            if !is_declared {
                return Err(V::InPlace {
                    run: self.new.task_name(pair.task).into(),
                });
            }
        }
        Ok(())
    }

    /// Checks each copy by itself: its two halves, and its two sides.
    fn copies(&self) -> Result<(), V> {
        let mut halves = vec![Vec::new(); self.offloaded.copies.len()];
        for (t, (task, work)) in self.new.tasks.iter().zip(&self.offloaded.work).enumerate() {
            let (Work::Start(k) | Work::Finish(k)) = *work else {
                continue;
            };
            let BufferCopy { from, to } = self.offloaded.copies[k as usize];
            let only = task.reads[..] == [from] && task.writes[..] == [to] && task.after.is_empty();
            if !only || task.workspace > 0 || task.repeatable {
                return Err(V::NotACopy {
                    task: task.name.clone(),
                    from: self.name(from),
                    to: self.name(to),
                });
            }
            halves[k as usize].push((t, matches!(work, Work::Start(_))));
        }
        for (k, (halves, &BufferCopy { from, to })) in
            halves.iter().zip(&self.offloaded.copies).enumerate()
        {
            // Writers of one buffer run in program order, so the start precedes the end.
            if !matches!(halves[..], [(_, true), (_, false)]) {
                return Err(V::Halves {
                    copy: k,
                    to: self.name(to),
                });
            }
            let wrong = |what| {
                Err(V::Sides {
                    from: self.name(from),
                    to: self.name(to),
                    what,
                })
            };
            if self.of(&from) != self.of(&to) {
                return wrong("stands for other data");
            }
            if self.new.buffers[from.index()].space == self.new.buffers[to.index()].space {
                return wrong("lies in the same space");
            }
        }
        Ok(())
    }

    /// Checks that values are complete: each buffer is made by the runs of all writers of its
    /// original, in order, or by one copy.
    fn makers(&self) -> Result<(), V> {
        let mut expected: Vec<Vec<Work>> = vec![Vec::new(); self.dag.buffers.len()];
        for (t, task) in (0u32..).zip(&self.dag.tasks) {
            for write in &task.writes {
                let list = &mut expected[write.index()];
                if list.last() != Some(&Work::Run(TaskId(t))) {
                    list.push(Work::Run(TaskId(t)));
                }
            }
        }
        let mut makers: Vec<Vec<Work>> = vec![Vec::new(); self.new.buffers.len()];
        for (task, work) in self.new.tasks.iter().zip(&self.offloaded.work) {
            for write in &task.writes {
                let list = &mut makers[write.index()];
                if list.last() != Some(work) {
                    list.push(*work);
                }
            }
        }
        let mut made = vec![false; self.dag.buffers.len()];
        for (b, (buffer, makers)) in (0u32..).zip(self.new.buffers.iter().zip(&makers)) {
            let of = self.of(&BufferId(b));
            let by_copy = matches!(makers[..], [Work::Start(start), Work::Finish(finish)] if start == finish)
                && !buffer.live_in;
            let by_tasks = *makers == expected[of.index()]
                && buffer.live_in == self.dag.buffers[of.index()].live_in;
            if buffer.space == Space::Host && !by_copy {
                return Err(V::OnHost {
                    name: buffer.name.clone(),
                });
            }
            // Only one buffer of each original is made by tasks.
            if !by_copy && (!by_tasks || std::mem::replace(&mut made[of.index()], true)) {
                return Err(V::Makers {
                    buffer: buffer.name.clone(),
                });
            }
        }
        Ok(())
    }
}
