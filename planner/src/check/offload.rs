//! Verifies that a dag with copies does the work of the dag it was made from.
//!
//! A buffer made by tasks of the dag must be made by runs of just those, and one made by a copy by
//! the two halves of that copy, from a buffer that stands for the same data. If then every run
//! reads buffers that stand for what its task reads, all values are those of the dag: by induction
//! along the order, which exists since a dag has no circles. That a read waits for the end of the
//! copy it reads from, that a copy reads what is whole, and that nothing takes its bytes before it
//! has ended, follows from the rules for tasks and buffers, for the task that ends a copy touches
//! both its sides; so
//! [`check`](super::check()) of the plan tells it.

use super::Checked;
use crate::dag::{BufferId, Dag, DagError, MayReuse, Space, TaskId};
use crate::offload::{BufferCopy, Offloaded, Work};

/// The first way in which a dag with copies does other work than the dag it was made from.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OffloadViolation {
    /// The dag with copies is broken.
    #[error("the dag with copies is broken: {0}")]
    Dag(#[from] DagError),
    /// A list has not one entry per task or buffer, or an entry names none.
    #[error("what {what} stand for is not told for each, or told to be number {index} of {count}")]
    Origin {
        /// `tasks`, `copies` or `buffers`.
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
    /// A run reads or writes what does not stand for what its task touches.
    #[error("the run `{run}` touches other buffers than its task")]
    Touches {
        /// The run.
        run: String,
    },
    /// A task does not run just once.
    #[error("task `{task}` runs {runs} times")]
    Runs {
        /// The task.
        task: String,
        /// How often.
        runs: usize,
    },
    /// A run does not wait for one that its task waits for.
    #[error("the run `{run}` does not wait for `{before}`")]
    Order {
        /// The run that should wait.
        run: String,
        /// The run it should wait for.
        before: String,
    },
    /// A copy does not start once and end once, in this order.
    #[error("copy {copy}, to `{to}`, does not start once and then end once")]
    Halves {
        /// The copy.
        copy: usize,
        /// Where it goes.
        to: String,
    },
    /// Half of a copy touches something else than its two sides, or does more than copy.
    #[error(
        "`{task}` is half of a copy from `{from}` to `{to}` and touches, waits for or needs something else"
    )]
    NotACopy {
        /// The task.
        task: String,
        /// What is copied.
        from: String,
        /// Where to.
        to: String,
    },
    /// The sides of a copy stand for different data, or lie in one space.
    #[error("`{from}` is copied to `{to}`, which {what}")]
    Sides {
        /// What is copied.
        from: String,
        /// Where to.
        to: String,
        /// What is wrong.
        what: &'static str,
    },
    /// A buffer is neither made by the runs of all tasks that make what it stands for, in their
    /// turn, nor by one copy.
    #[error("buffer `{buffer}` is not made as a whole, by tasks or by a copy")]
    Makers {
        /// The buffer.
        buffer: String,
    },
    /// Something that is there at the start or must be there at the end exists not just once, or
    /// not in the slab.
    #[error("{copies} buffers of the slab are `{buffer}` {when}")]
    Copies {
        /// The buffer.
        buffer: String,
        /// How many there are.
        copies: usize,
        /// At the start, or at the end.
        when: &'static str,
    },
    /// Something of the dag lies in the host's space, or a task computes there.
    #[error("`{name}` is computed with in the host's space")]
    OnHost {
        /// The buffer.
        name: String,
    },
    /// Permission to compute in place that nobody gave.
    #[error("the run `{run}` may compute in place what its task may not")]
    InPlace {
        /// The run.
        run: String,
    },
}

use OffloadViolation as V;

/// Accepts a dag with copies if it does the work of `dag`, or says where it does not.
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

    /// Sizes, and what is there at the start and at the end.
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
            // What is on the host at the start or at the end is nowhere that the dag knows of.
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

    /// Each run by itself; returns the run of each task.
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
                    what: "workspace, cost or whether it may run again",
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

    /// Whom runs wait for, and what they may do in place.
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

    /// Each copy by itself: its two halves, and its two sides.
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
            // Writers of one buffer run in the order of the program: the start before the end.
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

    /// Whole values: each buffer is made by runs of all that make what it stands for, in their
    /// turn, or by one copy.
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
            // Tasks make one buffer of each.
            if !by_copy && (!by_tasks || std::mem::replace(&mut made[of.index()], true)) {
                return Err(V::Makers {
                    buffer: buffer.name.clone(),
                });
            }
        }
        Ok(())
    }
}
