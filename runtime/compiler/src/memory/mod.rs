//! The limits of a session's memory; the [pool](Pool) and its parts are the crate `slabwise-pool`.

pub mod budget;
pub mod offload;

pub use slabwise_pool::*;
