//! Memory that no plan has fixed, the limits of a session's memory, and files for other tools.
//!
//! The [pool](Pool) and its parts are the crate `slabwise-pool`.

pub mod budget;
pub mod offload;

#[cfg(feature = "profiles")]
pub use slabwise_memtools::{export, replay};
pub use slabwise_pool::*;
