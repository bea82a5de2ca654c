//! Offsets for buffers with known lifetimes: the offset-assignment problem (dynamic storage
//! allocation).
//!
//! A [`Problem`] is a list of items, each a half-open lifetime, a size and an alignment. A solution
//! assigns each an offset such that items alive at once share no byte; the *height*, the largest
//! `offset + size`, is to be small. No solution is lower than the *lower bound*, the largest sum of
//! sizes alive at one instant; it is not always reachable, and finding the optimum is NP-hard.
//! Offsets may be given, and items may have gaps in their lives, be aliases of each other, lie one
//! after the other, be computed in the place of others and live in different memories: see
//! [`Problem`].
//!
//! ```
//! use slabwise_planner::Lifetime;
//! use slabwise_planner::pack::{InPlace, Item, Problem, check};
//!
//! let item = |start, end, size| Item { life: Lifetime::new(start, end), size, align: 64 };
//! let mut problem = Problem::new(vec![item(0, 3, 4096), item(2, 5, 4096), item(0, 5, 1024)]);
//! assert_eq!(problem.pack()?.height, 4096 + 4096 + 1024);
//! // The second one may be computed in the place of the first.
//! problem.in_place = vec![InPlace { from: 0, to: 1 }];
//! let packing = problem.pack()?;
//! assert_eq!((packing.height, packing.in_place.len()), (4096 + 1024, 1));
//! check(&problem, &packing)?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! [`Problem::pack`] runs fast heuristics of two families until one meets the bound, and returns
//! the best packing:
//!
//! - greedy: one item after the other at the lowest free offset or in the tightest gap;
//! - skyline: the lowest valley of the current stack gets the best item that fits into it.
//!
//! Where these heuristics miss the bound, up to eight items between two instants that no life spans
//! are packed in every order.
//!
//! Items tied together become rigid blocks first; where blocks are not simple rectangles, a greedy
//! packer for any shape takes over. [`check`] verifies any packing and shares no code with the
//! packers.

use std::fmt;

mod blocks;
mod bound;
mod check;
mod constrained;
mod error;
mod exact;
mod general;
mod greedy;
mod improve;
mod lives;
mod orders;
mod portfolio;
mod problem;
mod rank;
mod rects;
mod refine;
mod sections;
mod skyline;

pub use check::{Violation, check};
pub use error::ProblemError;
pub use portfolio::Limits;
pub use problem::{Gap, InPlace, Item, Placement, Problem, Space, Window};
pub use rank::Rank;

/// The method that made a packing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Method {
    /// Every item on its own bytes.
    Apart,
    /// Each item at the lowest offset free for its whole life.
    FirstFit(Rank),
    /// Each item in the smallest gap free for its whole life.
    BestFit(Rank),
    /// The lowest valley gets the best item inside it.
    Skyline(Rank),
    /// From the offsets in [`Problem::start`].
    Start,
    /// Each rigid block at its lowest free offset, or in the place of another.
    Blocks(Rank),
    /// Rigid blocks or a skyline, in an order improved step by step.
    SqueakyWheel,
    /// The exact search.
    Search,
}

impl fmt::Display for Method {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Method::Apart => f.write_str("without reuse"),
            Method::FirstFit(rank) => write!(f, "first fit by {rank}"),
            Method::BestFit(rank) => write!(f, "best fit by {rank}"),
            Method::Skyline(rank) => write!(f, "skyline by {rank}"),
            Method::Start => f.write_str("given start"),
            Method::Blocks(rank) => write!(f, "blocks by {rank}"),
            Method::SqueakyWheel => f.write_str("squeaky wheel"),
            Method::Search => f.write_str("exact search"),
        }
    }
}

/// Why no packing can be lower.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Proof {
    /// The height is the lower bound.
    Bound,
    /// The search for a lower packing was exhausted.
    Search,
}

/// A solution of a [`Problem`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Packing {
    /// The offset of each item.
    pub offsets: Vec<u64>,
    /// The largest `offset + size` of the items that ever need bytes; with several spaces, the sum
    /// of theirs.
    pub height: u64,
    /// The proved lower bound of the height; see [`Problem::lower_bound`].
    pub lower_bound: u64,
    /// Why the height is the smallest possible, if that is known.
    pub proof: Option<Proof>,
    /// Its method; the method of the highest part, if parts were packed by different methods.
    pub method: Method,
    /// The pairs computed in place, in the order of [`Problem::in_place`].
    pub in_place: Vec<InPlace>,
    /// The extent of each space; one, if the problem names none.
    pub spaces: Vec<Extent>,
}

/// The extent of one space.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Extent {
    /// The largest `offset + size` of its items.
    pub height: u64,
    /// The lower bound of this space.
    pub lower_bound: u64,
}

/// A space is smaller than the packing found for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub struct DoesNotFit {
    /// The index of the space.
    pub space: usize,
    /// The bytes it has.
    pub capacity: u64,
    /// The bytes that the packing needs.
    pub height: u64,
    /// The bytes that every packing needs.
    pub lower_bound: u64,
}

impl fmt::Display for DoesNotFit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let DoesNotFit {
            space,
            capacity,
            height,
            lower_bound,
        } = self;
        write!(
            f,
            "space {space} has {capacity} bytes; the best packing found needs {height}"
        )?;
        if lower_bound > capacity {
            write!(f, ", and none needs less than {lower_bound}")
        } else {
            Ok(())
        }
    }
}

impl Packing {
    /// Checks that every space stays within its capacity; returns the numbers of the first that
    /// does not.
    pub fn fits(&self, problem: &Problem) -> Result<(), DoesNotFit> {
        for (space, (extent, capacity)) in self.spaces.iter().zip(problem.capacities()).enumerate()
        {
            if let Some(capacity) = capacity.filter(|&capacity| extent.height > capacity) {
                return Err(DoesNotFit {
                    space,
                    capacity,
                    height: extent.height,
                    lower_bound: extent.lower_bound,
                });
            }
        }
        Ok(())
    }
}

/// The result of a heuristic: the offset of each span and the height.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Found {
    offsets: Vec<u64>,
    height: u64,
}

/// Number `k`, from 1, of the sequence 1, 1, 2, 1, 1, 2, 4, … of Luby, Sinclair and Zuckerman
/// (1993), by which searches of unknown length are best restarted.
fn luby(mut k: u64) -> u64 {
    loop {
        let above = (k + 1).next_power_of_two();
        if above == k + 1 {
            return above / 2;
        }
        k -= above / 2 - 1;
    }
}

#[cfg(test)]
mod tests;
