//! Memory that no plan has fixed, the limits of a session's memory, and files for other tools.
//!
//! The [pool](Pool) and its parts are the crate `slabwise-pool`.

pub use slabwise_compiler::memory::{budget, offload};
#[cfg(feature = "profiles")]
pub use slabwise_memtools::{export, replay};
pub use slabwise_pool::{
    Action, ConfigError, Event, FakeDevice, Fragmentation, Handle, Help, Holder, Lease,
    MemoryConfig, MemoryInfo, NotInUse, OutOfMemory, Policy, Pool, Range, Refused, Source,
    Statistics, Stream, Tag, TagId,
};
