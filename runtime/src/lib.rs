//! A JIT tensor runtime with static memory planning.
#![forbid(unsafe_code)]

pub mod data;
pub mod weights;
