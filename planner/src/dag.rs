//! The input of the planner: a graph of tasks and the buffers that they read and write.
//!
//! A [`Dag`] knows no tensors and no devices. A task reads and writes buffers, needs some scratch
//! bytes while it runs (its workspace), and may have to run after other tasks. The reads and writes
//! imply the dependencies:
//!
//! - the writers of a buffer run in program order (their order in [`Dag::tasks`]); several writers
//!   are the parts of a concatenation, or updates in place;
//! - a reader of a buffer runs after every writer of it. A task that reads and writes a buffer
//!   counts as a writer;
//! - [`Task::after`] adds control dependencies.
//!
//! A task that must see the data from before a write reads another buffer, which a [`MayReuse`]
//! pair connects to the written one.

mod display;
mod kind;
pub(crate) mod relations;
mod verify;

pub use kind::Kind;
pub use verify::DagError;

/// The default alignment of a buffer, and the alignment of every workspace, in bytes: a cache line.
pub const ALIGN: u64 = 64;

/// The id of a task: its index in [`Dag::tasks`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TaskId(pub u32);

/// The id of a buffer: its index in [`Dag::buffers`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BufferId(pub u32);

impl TaskId {
    /// The id as an index.
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

impl BufferId {
    /// The id as an index.
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

/// A memory space. The addresses of each space start at 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub enum Space {
    /// The slab: the device memory that tasks compute in and that a budget limits.
    #[default]
    Device,
    /// Host memory: holds buffers that are offloaded while they are idle.
    Host,
}

/// A unit of work. It runs alone, and exactly once unless a plan recomputes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Task {
    /// Shown in reports and errors.
    pub name: String,
    /// The buffers whose data it uses. A duplicate id counts once.
    pub reads: Vec<BufferId>,
    /// The buffers that it writes, wholly or in part. A duplicate id counts once.
    pub writes: Vec<BufferId>,
    /// Control dependencies: tasks that must run before it, besides those that reads and writes
    /// imply.
    pub after: Vec<TaskId>,
    /// Scratch bytes alive only while it runs, aligned to [`ALIGN`].
    pub workspace: u64,
    /// Its time, in any unit: it is only compared with the costs of other tasks.
    pub cost: u64,
    /// Whether the task may be recomputed: its writes must be a function of its reads. Other side
    /// effects are omitted on later runs; see `rerun`.
    pub repeatable: bool,
    /// The variant for all runs but the first, if those do less; `None` if all runs are alike.
    pub rerun: Option<Rerun>,
}

/// A recompute variant of a task: it writes all that the first run writes and has no other effect,
/// as a norm that does not update its running statistics.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Rerun {
    /// The buffers that it reads, a subset of those that its task reads.
    pub reads: Vec<BufferId>,
    /// Like [`Task::workspace`].
    pub workspace: u64,
    /// Like [`Task::cost`].
    pub cost: u64,
}

impl Task {
    /// A task without workspace, cost or control dependencies, which runs once.
    pub fn new(name: impl Into<String>, reads: &[BufferId], writes: &[BufferId]) -> Self {
        let (name, reads, writes) = (name.into(), reads.to_vec(), writes.to_vec());
        Task {
            name,
            reads,
            writes,
            after: Vec::new(),
            workspace: 0,
            cost: 0,
            repeatable: false,
            rerun: None,
        }
    }

    /// The task as it is recomputed.
    pub(crate) fn recomputed(&self) -> Task {
        match self.rerun.clone() {
            Some(Rerun {
                reads,
                workspace,
                cost,
            }) => Task {
                reads,
                workspace,
                cost,
                rerun: None,
                ..self.clone()
            },
            None => self.clone(),
        }
    }
}

/// A range of bytes that holds one value from its first write to its last use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Buffer {
    /// Shown in reports and errors.
    pub name: String,
    /// The part of the program it belongs to, as a path: reports show it and sum by it. May be
    /// empty.
    pub layer: String,
    /// The user's source line that made it (`file:line`): shown in reports. May be empty.
    pub source: String,
    /// Its role.
    pub kind: Kind,
    /// Its size in bytes; may be 0.
    pub bytes: u64,
    /// Its offset is a multiple of this power of two.
    pub align: u64,
    /// The space it lies in.
    pub space: Space,
    /// Whether it holds data before the first task runs.
    pub live_in: bool,
    /// Whether it must hold its data after the last task has run.
    pub live_out: bool,
}

impl Buffer {
    /// A buffer aligned to [`ALIGN`] that lives only between tasks.
    pub fn new(name: impl Into<String>, kind: Kind, bytes: u64) -> Self {
        let (layer, source) = (String::new(), String::new());
        let space = Space::Device;
        Buffer {
            name: name.into(),
            layer,
            source,
            kind,
            bytes,
            align: ALIGN,
            space,
            live_in: false,
            live_out: false,
        }
    }

    /// The bytes it takes up in a slab: whole units of its alignment, so that buffers of one
    /// alignment stack without gaps.
    pub fn occupied(&self) -> u64 {
        occupied(self.bytes, self.align)
    }

    /// The bytes it takes up in the slab: 0 if it lies in another space.
    pub fn occupied_on_device(&self) -> u64 {
        if self.space == Space::Device {
            self.occupied()
        } else {
            0
        }
    }
}

impl Task {
    /// The bytes its workspace takes up in a slab.
    pub fn workspace_occupied(&self) -> u64 {
        occupied(self.workspace, ALIGN)
    }
}

fn occupied(bytes: u64, align: u64) -> u64 {
    bytes.checked_next_multiple_of(align).unwrap_or(u64::MAX)
}

/// Permission to compute in place: `to`, written by `task`, may lie on the bytes of `from`, which
/// `task` reads, in the same space.
///
/// A pair is applied only if no other task touches `from` from then on and `task` is the first to
/// write `to`. Both then have the same offset.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MayReuse {
    /// The task that can run in place.
    pub task: TaskId,
    /// The buffer whose bytes are free to be overwritten.
    pub from: BufferId,
    /// The buffer that may take them, no larger than `from`.
    pub to: BufferId,
}

/// A graph of tasks and buffers, in program order.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Dag {
    /// The tasks. Their order decides which of two writers of a buffer comes first, and breaks ties
    /// elsewhere.
    pub tasks: Vec<Task>,
    /// The buffers.
    pub buffers: Vec<Buffer>,
    /// The pairs that may be computed in place.
    pub may_reuse: Vec<MayReuse>,
}

impl Dag {
    /// An empty dag.
    pub fn new() -> Self {
        Dag::default()
    }

    /// Appends a task.
    pub fn add_task(&mut self, task: Task) -> TaskId {
        self.tasks.push(task);
        TaskId((self.tasks.len() - 1) as u32)
    }

    /// Appends a buffer.
    pub fn add_buffer(&mut self, buffer: Buffer) -> BufferId {
        self.buffers.push(buffer);
        BufferId((self.buffers.len() - 1) as u32)
    }

    /// The number of steps of a run: one for each task, and one even without tasks, because inputs
    /// and outputs still need their bytes.
    pub fn steps(&self) -> usize {
        self.tasks.len().max(1)
    }

    /// The name of a task.
    ///
    /// # Panics
    /// If there is no such task.
    pub fn task_name(&self, task: TaskId) -> &str {
        &self.tasks[task.index()].name
    }

    /// The name of a buffer.
    ///
    /// # Panics
    /// If there is no such buffer.
    pub fn buffer_name(&self, buffer: BufferId) -> &str {
        &self.buffers[buffer.index()].name
    }
}
