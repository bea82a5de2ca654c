//! Tools around a [pool](slabwise_pool): traces of other allocators, replayed through pools, and
//! memory profiles in the formats of other tools' viewers.
#![forbid(unsafe_code)]

pub mod export;
pub mod replay;
