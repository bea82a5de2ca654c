//! placeholder
#![forbid(unsafe_code)]

pub mod weights;
