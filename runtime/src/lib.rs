//! slabwise compiles a tensor program once, knows every byte before it runs, and runs it inside one slab.
#![forbid(unsafe_code)]

pub mod error;
pub mod graph;
pub mod ops;
pub mod params;
pub mod passes;
pub mod reference;
pub mod shape;

pub use error::{Error, Result};
