//! The limits of a session's memory; the [pool](Pool) and its parts are the crate `slabwise-pool`.

pub mod budget;
pub mod offload;

pub use slabwise_pool::*;

use budget::Allowance;
use offload::Offload;

/// The memory that is in use beside a new program, and the limits of both together.
#[derive(Clone, Copy, Debug, Default)]
pub struct MemoryUse {
    /// The limit of weights, state and slab together.
    pub budget: Allowance,
    /// Whether values may be offloaded to the host, and over which link.
    pub offload: Option<Offload>,
    /// Bytes of weights and state, those of the new program among them.
    pub persistent: u64,
    /// Bytes of the slab that earlier programs need.
    pub slab: u64,
    /// Bytes of the prefetch queues of earlier programs.
    pub queues: u64,
    /// Slots of the new program's prefetch queue.
    pub prefetch_slots: usize,
}
