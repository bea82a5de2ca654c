//! Static memory planning: every byte of a run is placed before it runs.
//!
//! The input is a [`Dag`] of tasks and buffers. The output is a [`Plan`]: an order of the tasks,
//! the lifetime of each buffer, the buffers to compute in place, and an offset for every buffer and
//! workspace inside one slab. [`check()`] then verifies the plan from the dag alone; only a plan
//! that it accepts becomes a [`Checked`] plan.
//!
//! ```
//! use slabwise_planner::{Buffer, Dag, Kind, Options, Task, check, plan};
//!
//! let mut dag = Dag::new();
//! let x = dag.add_buffer(Buffer { live_in: true, ..Buffer::new("x", Kind::Input, 4096) });
//! let h = dag.add_buffer(Buffer::new("h", Kind::Activation, 8192));
//! let y = dag.add_buffer(Buffer { live_out: true, ..Buffer::new("y", Kind::Output, 4096) });
//! dag.add_task(Task::new("expand", &[x], &[h]));
//! dag.add_task(Task::new("reduce", &[h], &[y]));
//! let plan = check(&dag, plan(&dag, &Options::default())?)?;
//! assert_eq!(plan.height, 4096 + 8192); // y lies where x was
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! The crate knows bytes, steps and names, but no tensors and no devices. Time is counted in
//! *steps* (the task at index `s` of the order runs at step `s`), space in bytes; lifetimes are
//! half-open.

#![forbid(unsafe_code)]

mod budget;
mod bytes;
mod check;
pub mod csv;
mod dag;
mod flow;
pub mod generate;
mod liveness;
mod offload;
mod order;
mod overlap;
mod plan;
pub mod remat;
pub mod remat_graph;
mod repeat;
pub mod report;
mod reuse;

pub use budget::{OffloadInterval, WithLink, Within, plan_for, plan_with_link, plan_within};
pub use bytes::{Bytes, BytesError};
pub use check::{
    Checked, OffloadViolation, OverlapViolation, RepeatViolation, Violation, check, check_offload,
    check_overlap, check_repeats, check_within,
};
pub use dag::{ALIGN, Buffer, BufferId, Dag, DagError, Kind, MayReuse, Rerun, Space, Task, TaskId};
pub use offload::{BufferCopy, Link, Offloaded, Work};
pub use order::{BestOrder, Effort, OrderPolicy, Schedule, minimise_peak};
pub use overlap::{Overlapped, plan_overlapped};
pub use plan::{
    Holder, Options, Plan, PlanError, holders_at_peak, live_bytes, peak, plan, saved_in_place,
};
pub use repeat::Repeated;
pub use slabwise_packer::{self as pack, Lifetime, brief, files, shortened, table, widest};
