//! Where buffers live that have no place in a plan.

pub mod budget;
pub mod pool;
