//! Memory that no plan has fixed, the limits of a session's memory, and files for other tools.
//!
//! The [pool](Pool) and its parts are the crate `slabwise-pool`.

pub use slabwise_compiler::memory::*;
#[cfg(feature = "profiles")]
pub use slabwise_memtools::{export, replay};
