//! Memory that no plan has fixed: a caching pool for each device, and what it is made of.
//!
//! A [`Pool`] hands out blocks of what a [`Source`] offers: the host's memory, a device's, or a
//! [`FakeDevice`] in tests. How it finds them is its [`Policy`]; what it may take and when it gives
//! it back is its [`MemoryConfig`]. Blocks are named by [`Handle`]s, not by addresses, so that the
//! pool can move them when free memory is there but in pieces.
//!
//! The parts, from the bottom: `source` (what is needed of a driver), `block` (the table of
//! blocks), `streams` (who may use a freed block, and when), `policy` (lists of free blocks),
//! `defrag` (moving blocks), `ladder` (what is tried for a request, in which order) with `relief`
//! (its rungs that move blocks), `heap` (all that under one lock), `pool` (the lock, and the calls
//! that are made without it). `replay` sends traces through pools, `export` writes what others'
//! viewers open.

pub(crate) mod available;
mod block;
pub mod budget;
mod config;
mod deferred;
mod defrag;
#[cfg(feature = "profiles")]
pub mod export;
mod fake;
mod heap;
mod journal;
mod ladder;
pub mod offload;
mod oom;
mod policy;
mod pool;
mod relief;
#[cfg(feature = "profiles")]
pub mod replay;
mod source;
mod stats;
mod streams;
/// What the queue of deferred frees is written against, so that a model check can put its own in
/// place of it.
mod sync {
    pub(super) use std::sync::Mutex;
    pub(super) use std::sync::atomic::{AtomicBool, Ordering};
}
mod tags;

pub use block::Handle;
pub use config::{ConfigError, MemoryConfig, Policy};
pub use fake::FakeDevice;
pub use journal::{Action, Event};
pub use oom::{Help, Holder, OutOfMemory};
pub use pool::{Lease, NotInUse, Pool};
pub use source::{MemoryInfo, Range, Refused, Source, Stream};
pub use stats::{Fragmentation, Statistics};
pub use tags::{Tag, TagId};
