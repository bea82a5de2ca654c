//! Offsets for buffers with known lifetimes: the offset-assignment problem (dynamic storage allocation).
//!
//! A [`Problem`] is a list of items, each a half-open lifetime and a size. Wanted is an offset for each so that items alive
//! at once share no byte and the *height*, the largest `offset + size`, is small. No solution is lower than the *lower
//! bound*, the largest sum of sizes alive at one instant; it is not always reachable, and finding the optimum is NP-hard.
//!
//! [`Problem::pack`] runs fast heuristics of two families until one meets the bound and returns the best:
//!
//! - greedy: one item after the other at the lowest free offset or in the tightest gap;
//! - skyline: the lowest valley of what is already stacked gets the best item that fits into it.

use std::fmt;

mod greedy;
mod portfolio;
mod problem;
mod rank;
mod sections;
mod skyline;

pub use portfolio::Limits;
pub use problem::{Item, Problem, ProblemError};
pub use rank::Rank;

/// How a packing was made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Method {
    /// Every item on bytes of its own.
    Apart,
    /// Each item at the lowest offset free for its whole life.
    FirstFit(Rank),
    /// Each item in the smallest gap free for its whole life.
    BestFit(Rank),
    /// The lowest valley gets the best item inside it.
    Skyline(Rank),
}

impl fmt::Display for Method {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Method::Apart => f.write_str("without reuse"),
            Method::FirstFit(rank) => write!(f, "first fit by {rank}"),
            Method::BestFit(rank) => write!(f, "best fit by {rank}"),
            Method::Skyline(rank) => write!(f, "skyline by {rank}"),
        }
    }
}

/// A solution of a [`Problem`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Packing {
    /// The offset of each item.
    pub offsets: Vec<u64>,
    /// The largest `offset + size`, sizes in whole units of alignment.
    pub height: u64,
    /// No packing is lower than this.
    pub lower_bound: u64,
    /// How it was made.
    pub method: Method,
}

/// What a heuristic found: the offset of each span and the height.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Found {
    offsets: Vec<u64>,
    height: u64,
}

#[cfg(test)]
mod tests;
