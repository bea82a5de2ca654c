//! slabwise compiles a tensor program once, knows every byte before it runs, and runs it inside one slab.
#![forbid(unsafe_code)]

mod buffer;
mod checks;
mod compile;
mod device;
mod dynamic;
pub mod error;
pub mod feed;
pub mod graph;
mod init;
pub mod memory;
pub mod ops;
pub mod params;
pub mod passes;
mod plan;
mod program;
pub mod reference;
mod session;
pub mod shape;

pub use buffer::{Buffer, Donated, Output};
pub use compile::CompileOptions;
pub use device::Device;
pub use error::{Error, Result};
pub use plan::{Persistent, Plan};
pub use program::Program;
pub use session::{RunStats, Session};
pub use slabwise_planner::Bytes;
