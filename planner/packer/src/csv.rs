//! Packing problems and their solutions as CSV text: `id,lower,upper,size` and optional columns.
//!
//! One header line names the columns, in any order; then one line per item, in any order. Lifetimes
//! are half-open, from `lower` up to, but not including, `upper`. Ids are opaque and unique; a
//! field that contains a comma, a quote or a line break is quoted as in RFC 4180. These columns are
//! optional, and so are their fields:
//!
//! | column | meaning |
//! |---|---|
//! | `alignment` | a power of two of which the offset is a multiple; 1 |
//! | `fixed` | the offset that the item must have |
//! | `gaps` | `lower-upper`, separated by spaces: times at which its bytes are not needed; `lower-upper@low:high`: except these bytes |
//! | `alias` | a name: items with the same one have the same offset and may share bytes |
//! | `follows` | the id of the item at whose end this one begins |
//! | `in_place` | ids, separated by spaces, of items in whose place this one may be computed; a backslash escapes a space |
//! | `space` | the name of the memory that the item is in |
//! | `offset` | a solution, and the offset to start from |
//!
//! The first four columns and `alignment`, `gaps` and `offset` are those of the public benchmark
//! and the tool of MiniMalloc.

use crate::packing::Packing;
use crate::problem::{Placement, Problem};

mod error;
mod file;
mod read;
mod write;

pub use error::{CsvError, FileError};
pub use file::{TEXT_MAX, read_file, read_packed, write_file};
pub use read::read;
pub use write::write;

const COLUMNS: [&str; 12] = [
    "id",
    "lower",
    "upper",
    "size",
    "alignment",
    "fixed",
    "gaps",
    "alias",
    "follows",
    "in_place",
    "space",
    "offset",
];
const ID: usize = 0;
const LOWER: usize = 1;
const UPPER: usize = 2;
const SIZE: usize = 3;
/// The number of required columns: the first ones.
const REQUIRED: usize = 4;
const ALIGNMENT: usize = 4;
const FIXED: usize = 5;
const GAPS: usize = 6;
const ALIAS: usize = 7;
const FOLLOWS: usize = 8;
const IN_PLACE: usize = 9;
const SPACE: usize = 10;
const OFFSET: usize = 11;

/// A packing problem whose items and spaces have names.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Table {
    /// The problem; the column `offset` is its start.
    pub problem: Problem,
    /// The names of its spaces.
    pub spaces: Vec<String>,
    ids: Ids,
}

impl Table {
    /// A table from a problem and the ids of its items.
    ///
    /// # Panics
    /// If there is not one id for each item.
    pub fn new<'a>(problem: Problem, ids: impl IntoIterator<Item = &'a str>) -> Self {
        let mut list = Ids::default();
        ids.into_iter().for_each(|id| list.push(id));
        assert_eq!(list.ends.len(), problem.items.len(), "one id for each item");
        Table {
            problem,
            spaces: Vec::new(),
            ids: list,
        }
    }

    /// The id of an item.
    ///
    /// # Panics
    /// If there is no such item.
    pub fn id(&self, item: usize) -> &str {
        self.ids.get(item)
    }

    /// Sets the column `offset` to the offsets of a packing.
    ///
    /// # Panics
    /// If the packing is not one of this problem.
    pub fn set_offsets(&mut self, packing: &Packing) {
        assert_eq!(
            self.problem.items.len(),
            packing.offsets.len(),
            "a packing of this problem"
        );
        self.problem.start = packing
            .offsets
            .iter()
            .enumerate()
            .map(|(item, &offset)| Placement { item, offset })
            .collect();
    }
}

/// Many short texts in one.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
struct Ids {
    text: String,
    ends: Vec<usize>,
}

impl Ids {
    fn push(&mut self, id: &str) {
        self.text.push_str(id);
        self.ends.push(self.text.len());
    }

    fn get(&self, index: usize) -> &str {
        let start = index.checked_sub(1).map_or(0, |before| self.ends[before]);
        &self.text[start..self.ends[index]]
    }
}

#[cfg(test)]
mod tests;
