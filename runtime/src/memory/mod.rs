//! Memory that is not planned: the caching pool.

pub mod pool;
