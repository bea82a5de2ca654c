//! The invariants of a plan: one variant for each, with the names and numbers of the violation.

use crate::dag::DagError;
use slabwise_packer::Lifetime;

/// The first broken invariant of a plan.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Violation {
    /// The dag itself is broken.
    #[error("the dag is broken: {0}")]
    Dag(#[from] DagError),
    /// The length of a list is not the number of tasks or buffers.
    #[error("the plan has {found} {what}, the dag needs {expected}")]
    Length {
        /// The entries of the list.
        what: &'static str,
        /// The required length.
        expected: usize,
        /// The actual length.
        found: usize,
    },
    /// A step runs a task that does not exist.
    #[error("step {step} runs task {task}, but there are {count} tasks")]
    UnknownTask {
        /// The step.
        step: usize,
        /// The id.
        task: u32,
        /// The number of tasks.
        count: usize,
    },
    /// A task runs twice (and therefore another never).
    #[error("task `{task}` runs at step {first} and at step {second}")]
    RunsTwice {
        /// The task.
        task: String,
        /// Its first step.
        first: usize,
        /// Its second step.
        second: usize,
    },
    /// A task runs before one it depends on.
    #[error(
        "task `{late}` runs at step {late_step} and must run before `{early}` at step {early_step}: {reason}"
    )]
    Dependency {
        /// The task that must run first.
        late: String,
        /// Its step.
        late_step: usize,
        /// The task that depends on it.
        early: String,
        /// Its step.
        early_step: usize,
        /// The cause: a shared buffer or a control dependency.
        reason: String,
    },
    /// A lifetime differs from the one that the order implies.
    #[error("buffer `{buffer}` is live from step {} to {}, the plan says {} to {}", .expected.start, .expected.end, .found.start, .found.end)]
    WrongLifetime {
        /// The buffer.
        buffer: String,
        /// The lifetime that follows from the dag and the order.
        expected: Lifetime,
        /// The lifetime in the plan.
        found: Lifetime,
    },
    /// An offset is not a multiple of the alignment.
    #[error("`{name}` lies at {offset}, which is not a multiple of its alignment {align}")]
    Misaligned {
        /// The buffer, or the task whose workspace it is.
        name: String,
        /// Its offset.
        offset: u64,
        /// Its alignment.
        align: u64,
    },
    /// A buffer or workspace reaches beyond the slab, or beyond the host's space.
    #[error("`{name}` lies at {offset} with {bytes} bytes, beyond the slab of {height}")]
    OutOfSlab {
        /// The buffer, or the task whose workspace it is.
        name: String,
        /// Its offset.
        offset: u64,
        /// The bytes it occupies.
        bytes: u64,
        /// The height of its space.
        height: u64,
    },
    /// Two buffers share bytes while both are alive.
    #[error("at step {step} buffer `{first}` (bytes {} to {}) and buffer `{second}` ({} to {}) overlap", .first_bytes.0, .first_bytes.1, .second_bytes.0, .second_bytes.1)]
    Overlap {
        /// The buffer that was live first.
        first: String,
        /// Its first byte and the one after its last.
        first_bytes: (u64, u64),
        /// The buffer that became live later.
        second: String,
        /// Its first byte and the one after its last.
        second_bytes: (u64, u64),
        /// The first step at which both are alive.
        step: usize,
    },
    /// A workspace shares bytes with a buffer that is alive.
    #[error("at step {step} the workspace of `{task}` (bytes {} to {}) and buffer `{buffer}` ({} to {}) overlap", .workspace_bytes.0, .workspace_bytes.1, .buffer_bytes.0, .buffer_bytes.1)]
    WorkspaceOverlap {
        /// The task.
        task: String,
        /// The first byte of its workspace and the one after its last.
        workspace_bytes: (u64, u64),
        /// The buffer.
        buffer: String,
        /// Its first byte and the one after its last.
        buffer_bytes: (u64, u64),
        /// The step of the task.
        step: usize,
    },
    /// A pair that the dag did not declare is computed in place.
    #[error(
        "reuse pair {index} (task {task}, from buffer {from}, to buffer {to}) is not declared by the dag"
    )]
    ReuseUndeclared {
        /// Its index in [`Plan::reused`](crate::Plan::reused).
        index: usize,
        /// The task id.
        task: u32,
        /// The id of the buffer whose bytes are taken.
        from: u32,
        /// The id of the buffer that takes them.
        to: u32,
    },
    /// A buffer takes part in two pairs on the same side.
    #[error("buffer `{buffer}` takes part twice in reuse, at `{first}` and `{second}`")]
    ReusedTwice {
        /// The buffer.
        buffer: String,
        /// One task.
        first: String,
        /// The other task.
        second: String,
    },
    /// The buffer whose bytes are taken is used later on.
    #[error(
        "task `{task}` at step {step} overwrites `{from}` with `{to}`, but `{from}` is live to step {end}"
    )]
    ReuseOfLive {
        /// The task.
        task: String,
        /// Its step.
        step: usize,
        /// The buffer whose bytes are taken.
        from: String,
        /// The buffer that takes them.
        to: String,
        /// The step after the last one of `from`.
        end: u64,
    },
    /// The buffer that takes bytes holds data earlier.
    #[error(
        "task `{task}` at step {step} puts `{to}` onto `{from}`, but `{to}` is live from step {start}"
    )]
    ReuseByLive {
        /// The task.
        task: String,
        /// Its step.
        step: usize,
        /// The buffer whose bytes are taken.
        from: String,
        /// The buffer that takes them.
        to: String,
        /// The first step of `to`.
        start: u64,
    },
    /// The two buffers of a pair lie at different offsets.
    #[error("task `{task}` computes `{to}` at {to_offset} in place of `{from}` at {from_offset}")]
    ReuseMoved {
        /// The task.
        task: String,
        /// The buffer whose bytes are taken.
        from: String,
        /// Its offset.
        from_offset: u64,
        /// The buffer that takes them.
        to: String,
        /// Its offset.
        to_offset: u64,
    },
    /// The buffer that takes bytes occupies more than are offered.
    #[error(
        "task `{task}` computes `{to}` ({to_bytes} bytes) in place of `{from}` ({from_bytes} bytes)"
    )]
    ReuseTooSmall {
        /// The task.
        task: String,
        /// The buffer whose bytes are taken.
        from: String,
        /// The bytes it occupies.
        from_bytes: u64,
        /// The buffer that takes them.
        to: String,
        /// The bytes it occupies.
        to_bytes: u64,
    },
    /// The height of the slab, or of the host's space, is not the end of its highest occupant.
    #[error(
        "the plan claims a height of {found}, but the highest buffer or workspace ends at {expected}"
    )]
    Height {
        /// The end of the highest occupant.
        expected: u64,
        /// The height in the plan.
        found: u64,
    },
    /// The lower bound is not the largest number of live bytes.
    #[error(
        "the plan claims a lower bound of {found}, but at most {expected} bytes are live at once"
    )]
    LowerBound {
        /// The largest number of live bytes.
        expected: u64,
        /// The lower bound in the plan.
        found: u64,
    },
    /// The size without reuse is not the sum of all sizes.
    #[error(
        "the plan claims {found} bytes without reuse, but all buffers and workspaces are {expected}"
    )]
    WithoutReuse {
        /// The sum.
        expected: u64,
        /// The size in the plan.
        found: u64,
    },
}
