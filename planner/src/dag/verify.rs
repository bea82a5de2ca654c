//! The invariants that make a [`Dag`] plannable.

use super::relations::Relations;
use super::{ALIGN, BufferId, Dag, MayReuse, TaskId};
use rustc_hash::FxHashSet;

/// The first broken invariant of a [`Dag`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DagError {
    /// More tasks or buffers than ids can name.
    #[error("{count} {what} are more than 32 bits can name")]
    TooMany {
        /// `tasks` or `buffers`.
        what: &'static str,
        /// How many there are.
        count: usize,
    },
    /// A buffer id is out of range.
    #[error("{place} names buffer {buffer}, but there are {count} buffers")]
    UnknownBuffer {
        /// The task or pair that names it.
        place: String,
        /// The id.
        buffer: u32,
        /// How many buffers there are.
        count: usize,
    },
    /// A task id is out of range.
    #[error("{place} names task {task}, but there are {count} tasks")]
    UnknownTask {
        /// The task or pair that names it.
        place: String,
        /// The id.
        task: u32,
        /// How many tasks there are.
        count: usize,
    },
    /// An alignment is not a power of two.
    #[error("buffer `{buffer}` has alignment {align}, which is no power of two")]
    Alignment {
        /// The buffer.
        buffer: String,
        /// Its alignment.
        align: u64,
    },
    /// All buffers and workspaces together, aligned, exceed 64 bits.
    #[error(
        "buffers and workspaces together are more bytes than 64 bits hold: `{name}` with {bytes} bytes is one too many"
    )]
    TotalBytes {
        /// The buffer or task at which the sum overflows.
        name: String,
        /// The bytes it requires.
        bytes: u64,
    },
    /// A task reads data that no task writes.
    #[error(
        "task `{task}` reads buffer `{buffer}`, which no task writes and which holds nothing at the start"
    )]
    NeverWritten {
        /// The reader.
        task: String,
        /// The buffer.
        buffer: String,
    },
    /// The first writer of a buffer reads it, and it holds nothing before.
    #[error("task `{task}` reads buffer `{buffer}` before anything has been written to it")]
    ReadBeforeWrite {
        /// The first writer.
        task: String,
        /// The buffer.
        buffer: String,
    },
    /// A buffer must hold data at the end, but no task writes it.
    #[error(
        "buffer `{buffer}` is an output, but no task writes it and it holds nothing at the start"
    )]
    OutputNeverWritten {
        /// The buffer.
        buffer: String,
    },
    /// The dependencies form a cycle.
    #[error("tasks depend on each other in a cycle: {}", cycle_text(.tasks))]
    Cycle {
        /// Their names; each depends on the one before it, the first on the last.
        tasks: Vec<String>,
    },
    /// A reuse pair joins a buffer to itself.
    #[error("task `{task}`: buffer `{buffer}` may not reuse itself")]
    ReuseItself {
        /// The task.
        task: String,
        /// The buffer.
        buffer: String,
    },
    /// A task does not write the buffer that is to take over bytes.
    #[error("task `{task}` does not write `{to}`, which may reuse `{from}` there")]
    ReuseNotWritten {
        /// The task.
        task: String,
        /// The buffer whose bytes are offered.
        from: String,
        /// The buffer that may take them.
        to: String,
    },
    /// A task does not read, or also writes, the buffer whose bytes are offered.
    #[error("task `{task}` must read and not write `{from}`, which `{to}` may reuse there")]
    ReuseNotRead {
        /// The task.
        task: String,
        /// The buffer whose bytes are offered.
        from: String,
        /// The buffer that may take them.
        to: String,
    },
    /// The buffer that is to take over bytes holds data from the start.
    #[error("task `{task}`: `{to}` holds data from the start and may not reuse `{from}`")]
    ReuseIntoInput {
        /// The task.
        task: String,
        /// The buffer whose bytes are offered.
        from: String,
        /// The buffer that may take them.
        to: String,
    },
    /// The buffer whose bytes are offered must survive.
    #[error("task `{task}`: `{from}` is an output and may not be reused by `{to}`")]
    ReuseOfOutput {
        /// The task.
        task: String,
        /// The buffer whose bytes are offered.
        from: String,
        /// The buffer that may take them.
        to: String,
    },
    /// The bytes offered lie in another space.
    #[error("task `{task}`: `{to}` may not reuse `{from}`, which lies in another space")]
    ReuseAcross {
        /// The task.
        task: String,
        /// The buffer whose bytes are offered.
        from: String,
        /// The buffer that may take them.
        to: String,
    },
    /// The recompute variant of a task reads a buffer that the task does not.
    #[error("task `{task}` reads `{buffer}` only when it is recomputed")]
    RerunReads {
        /// The task.
        task: String,
        /// The buffer.
        buffer: String,
    },
    /// The bytes offered do not suffice.
    #[error(
        "task `{task}`: `{to}` has {to_bytes} bytes and may not reuse the {from_bytes} bytes of `{from}`"
    )]
    ReuseTooSmall {
        /// The task.
        task: String,
        /// The buffer whose bytes are offered.
        from: String,
        /// Its size.
        from_bytes: u64,
        /// The buffer that may take them.
        to: String,
        /// Its size.
        to_bytes: u64,
    },
}

fn cycle_text(tasks: &[String]) -> String {
    let names: Vec<String> = tasks
        .iter()
        .chain(tasks.first())
        .map(|name| format!("`{name}`"))
        .collect();
    names.join(" → ")
}

impl Dag {
    /// Checks every invariant that planning relies on; the error names the first that is broken.
    pub fn verify(&self) -> Result<(), DagError> {
        self.verify_ids()?;
        self.verify_sizes()?;
        self.verify_data()?;
        self.verify_reuse()?;
        self.verify_order()
    }

    fn verify_ids(&self) -> Result<(), DagError> {
        for (what, count) in [("tasks", self.tasks.len()), ("buffers", self.buffers.len())] {
            if u32::try_from(count).is_err() {
                return Err(DagError::TooMany { what, count });
            }
        }
        let buffer = |id: BufferId, place: &dyn Fn() -> String| match self.buffers.get(id.index()) {
            Some(_) => Ok(()),
            None => Err(DagError::UnknownBuffer {
                place: place(),
                buffer: id.0,
                count: self.buffers.len(),
            }),
        };
        let task = |id: TaskId, place: &dyn Fn() -> String| match self.tasks.get(id.index()) {
            Some(_) => Ok(()),
            None => Err(DagError::UnknownTask {
                place: place(),
                task: id.0,
                count: self.tasks.len(),
            }),
        };
        for t in &self.tasks {
            let place = || format!("task `{}`", t.name);
            t.reads
                .iter()
                .chain(&t.writes)
                .try_for_each(|&id| buffer(id, &place))?;
            t.after.iter().try_for_each(|&id| task(id, &place))?;
            if let Some(rerun) = &t.rerun {
                let reads: FxHashSet<BufferId> = t.reads.iter().copied().collect();
                if let Some(&id) = rerun.reads.iter().find(|id| !reads.contains(id)) {
                    buffer(id, &place)?;
                    return Err(DagError::RerunReads {
                        task: t.name.clone(),
                        buffer: self.buffer_name(id).to_owned(),
                    });
                }
            }
        }
        for (i, pair) in self.may_reuse.iter().enumerate() {
            let place = || format!("reuse pair {i}");
            task(pair.task, &place)?;
            buffer(pair.from, &place)?;
            buffer(pair.to, &place)?;
        }
        Ok(())
    }

    fn verify_sizes(&self) -> Result<(), DagError> {
        if let Some(b) = self.buffers.iter().find(|b| !b.align.is_power_of_two()) {
            return Err(DagError::Alignment {
                buffer: b.name.clone(),
                align: b.align,
            });
        }
        // The sizes, rounded to the coarsest alignment, stack in any order without a gap, so no
        // layout needs more than this sum.
        let coarsest = self.buffers.iter().map(|b| b.align).fold(ALIGN, u64::max);
        let sizes = self
            .buffers
            .iter()
            .map(|b| (&b.name, b.bytes))
            .chain(self.tasks.iter().map(|t| (&t.name, t.workspace)));
        let mut total = 0u64;
        for (name, bytes) in sizes {
            let sum = bytes
                .checked_next_multiple_of(coarsest)
                .and_then(|bytes| total.checked_add(bytes));
            total = sum.ok_or_else(|| DagError::TotalBytes {
                name: name.clone(),
                bytes,
            })?;
        }
        Ok(())
    }

    fn verify_data(&self) -> Result<(), DagError> {
        let mut first_writer = vec![None; self.buffers.len()];
        for (i, task) in self.tasks.iter().enumerate() {
            for write in &task.writes {
                first_writer[write.index()].get_or_insert(i);
            }
        }
        for (i, task) in self.tasks.iter().enumerate() {
            for &read in task
                .reads
                .iter()
                .filter(|read| !self.buffers[read.index()].live_in)
            {
                let names = || (task.name.clone(), self.buffer_name(read).to_owned());
                match first_writer[read.index()] {
                    None => {
                        let (task, buffer) = names();
                        return Err(DagError::NeverWritten { task, buffer });
                    }
                    Some(first) if first == i => {
                        let (task, buffer) = names();
                        return Err(DagError::ReadBeforeWrite { task, buffer });
                    }
                    Some(_) => {}
                }
            }
        }
        let silent = self
            .buffers
            .iter()
            .zip(&first_writer)
            .find(|(b, first)| b.live_out && !b.live_in && first.is_none());
        match silent {
            Some((buffer, _)) => Err(DagError::OutputNeverWritten {
                buffer: buffer.name.clone(),
            }),
            None => Ok(()),
        }
    }

    fn verify_reuse(&self) -> Result<(), DagError> {
        let mut reads: FxHashSet<(TaskId, BufferId)> = FxHashSet::default();
        let mut writes = reads.clone();
        let tasks: FxHashSet<TaskId> = self.may_reuse.iter().map(|pair| pair.task).collect();
        for id in tasks {
            let task = &self.tasks[id.index()];
            reads.extend(task.reads.iter().map(|&buffer| (id, buffer)));
            writes.extend(task.writes.iter().map(|&buffer| (id, buffer)));
        }
        self.may_reuse
            .iter()
            .try_for_each(|pair| self.verify_pair(pair, &reads, &writes))
    }

    /// Checks a pair, given the buffers that tasks with pairs read and write.
    fn verify_pair(
        &self,
        pair: &MayReuse,
        reads: &FxHashSet<(TaskId, BufferId)>,
        writes: &FxHashSet<(TaskId, BufferId)>,
    ) -> Result<(), DagError> {
        let (source, target) = (
            &self.buffers[pair.from.index()],
            &self.buffers[pair.to.index()],
        );
        let task = || self.task_name(pair.task).to_owned();
        let (from, to) = (|| source.name.clone(), || target.name.clone());
        if pair.from == pair.to {
            return Err(DagError::ReuseItself {
                task: task(),
                buffer: from(),
            });
        }
        if !writes.contains(&(pair.task, pair.to)) {
            return Err(DagError::ReuseNotWritten {
                task: task(),
                from: from(),
                to: to(),
            });
        }
        if !reads.contains(&(pair.task, pair.from)) || writes.contains(&(pair.task, pair.from)) {
            return Err(DagError::ReuseNotRead {
                task: task(),
                from: from(),
                to: to(),
            });
        }
        if target.live_in {
            return Err(DagError::ReuseIntoInput {
                task: task(),
                from: from(),
                to: to(),
            });
        }
        if source.live_out {
            return Err(DagError::ReuseOfOutput {
                task: task(),
                from: from(),
                to: to(),
            });
        }
        if source.space != target.space {
            return Err(DagError::ReuseAcross {
                task: task(),
                from: from(),
                to: to(),
            });
        }
        if target.bytes > source.bytes {
            return Err(DagError::ReuseTooSmall {
                task: task(),
                from: from(),
                from_bytes: source.bytes,
                to: to(),
                to_bytes: target.bytes,
            });
        }
        Ok(())
    }

    fn verify_order(&self) -> Result<(), DagError> {
        match Relations::new(self).find_cycle() {
            Some(tasks) => Err(DagError::Cycle {
                tasks: tasks
                    .into_iter()
                    .map(|t| self.task_name(t).to_owned())
                    .collect(),
            }),
            None => Ok(()),
        }
    }
}
