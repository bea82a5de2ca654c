//! Memory that no plan has fixed: a caching pool for each device, and its parts.
//!
//! A [`Pool`] allocates blocks from a [`Source`]: the host's memory, a device's, or a
//! [`FakeDevice`] in tests. Its [`Policy`] finds the blocks; its [`MemoryConfig`] says how much it
//! may take and when it gives it back. Blocks are named by [`Handle`]s, not by addresses, so that
//! the pool can move them when free memory is fragmented.
//!
//! The parts, from the bottom: `source` (the interface to a driver), `block` (the table of blocks),
//! `streams` (which stream may use a freed block, and when), `policy` (lists of free blocks),
//! `defrag` (moving blocks), `retry` (the steps tried for a request, in order) with `moves` (its
//! steps that move blocks), `heap` (all that under one lock), `pool` (the lock, and the calls that
//! are made without it).
#![forbid(unsafe_code)]

pub mod available;
mod block;
mod config;
mod deferred;
mod defrag;
mod event_log;
mod fake;
mod heap;
mod moves;
mod oom;
mod policy;
mod pool;
mod retry;
mod source;
mod stats;
mod streams;
/// The synchronization primitives of the queue of deferred frees, so that a model checker can
/// replace them.
mod sync {
    pub(super) use std::sync::Mutex;
    pub(super) use std::sync::atomic::{AtomicBool, Ordering};
}
mod tags;

pub use block::Handle;
pub use config::{ConfigError, MemoryConfig, Policy, variable};
pub use event_log::{Action, Event};
pub use fake::FakeDevice;
pub use oom::{Help, Holder, OutOfMemory};
pub use pool::{Inspected, Lease, NotInUse, Pool};
pub use source::{MemoryInfo, Range, Refused, Source, Stream};
pub use stats::{Fragmentation, Statistics};
pub use tags::{Tag, TagId, Tags};
