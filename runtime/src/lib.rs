//! Modules that stand on their own: host memory pool, data sets, weight files.
#![forbid(unsafe_code)]

pub mod memory;
