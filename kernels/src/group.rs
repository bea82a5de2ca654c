//! Groups of ranks that exchange bytes with each other.

use std::fmt;

/// The ranks of a world that take part in a collective with one of them, which are at equal
/// distances. The groups of all ranks divide the world: ranks that are in order along the axes of a
/// mesh have a group along each of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Group {
    /// The number of ranks of a group.
    pub ranks: u32,
    /// The distance of two neighbours.
    pub stride: u32,
}

impl Group {
    /// The group of all ranks of a world.
    pub const fn all(ranks: u32) -> Group {
        Group { ranks, stride: 1 }
    }

    /// The number of ranks of a group.
    pub fn size(self) -> usize {
        self.ranks as usize
    }

    /// The place of a rank in its group, from 0.
    pub fn place_of(self, rank: usize) -> usize {
        rank / self.stride as usize % self.size()
    }

    /// The rank at a place of the group of a rank.
    pub fn member(self, rank: usize, place: usize) -> usize {
        let stride = self.stride as usize;
        rank - self.place_of(rank) * stride + place * stride
    }

    /// The ranks of the group of a rank, by place.
    pub fn members(self, rank: usize) -> impl Iterator<Item = usize> {
        (0..self.size()).map(move |place| self.member(rank, place))
    }

    /// Whether every rank of a world of so many is in a group.
    pub fn divides(self, world: usize) -> bool {
        let of_one = self.size().checked_mul(self.stride as usize);
        of_one.is_some_and(|of_one| of_one > 0 && world.is_multiple_of(of_one))
    }
}

impl fmt::Display for Group {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ranks", self.ranks)?;
        match self.stride {
            1 => Ok(()),
            stride => write!(f, " at a distance of {stride}"),
        }
    }
}
