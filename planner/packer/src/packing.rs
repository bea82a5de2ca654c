//! A packing: the solution of a problem.

use crate::method::Method;
use crate::problem::{InPlace, Problem};
use std::fmt;

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
