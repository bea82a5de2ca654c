//! Two-level segregated fit, after M. Masmano, I. Ripoll, A. Crespo and J. Real, "TLSF: a new
//! dynamic memory allocator for real-time systems" (2004).
//!
//! Free blocks of similar size form a list: 32 lists of equal width for each power of two. Bitmaps
//! say which lists have blocks, so that a list that certainly serves a request is found without a
//! loop. Its first block may be far from the best, and the request's own list may hold a better
//! fit; therefore the best of the first [`SCAN`] blocks of each of the two is taken. Measured on
//! traces of training steps, that comes within a thousandth of best fit.

use super::super::block::{Block, NONE, Table};

/// Lists for each power of two, as a power of two.
const SUB_BITS: u32 = 5;
const SUBS: usize = 1 << SUB_BITS;
/// Powers of two from `SUBS` granules on, and one row of lists for smaller sizes.
const ROWS: usize = 64;
/// Most blocks of a list that are examined.
const SCAN: usize = 16;

/// Sizes are multiples of this many bytes, as is every address: XLA and RMM round to it, and
/// devices read it efficiently.
pub(crate) const GRANULE: u64 = 256;

/// Lists of free blocks. See the module documentation.
#[derive(Debug)]
pub(crate) struct Tlsf {
    rows: u64,
    subs: Box<[u32; ROWS]>,
    heads: Box<[[u32; SUBS]; ROWS]>,
}

impl Default for Tlsf {
    fn default() -> Tlsf {
        Tlsf {
            rows: 0,
            subs: Box::new([0; ROWS]),
            heads: Box::new([[NONE; SUBS]; ROWS]),
        }
    }
}

/// The list of a size: its row and its place in it.
fn list_of(bytes: u64) -> (usize, usize) {
    let granules = bytes / GRANULE;
    if granules < SUBS as u64 {
        return (0, granules as usize);
    }
    let power = granules.ilog2();
    let sub = (granules >> (power - SUB_BITS)) as usize - SUBS;
    ((power - SUB_BITS + 1) as usize, sub)
}

impl Tlsf {
    pub fn insert(&mut self, table: &mut Table, index: u32) {
        let (row, sub) = list_of(table[index].bytes);
        let head = self.heads[row][sub];
        (table[index].list_before, table[index].list_after) = (NONE, head);
        if head != NONE {
            table[head].list_before = index;
        }
        self.heads[row][sub] = index;
        self.rows |= 1 << row;
        self.subs[row] |= 1 << sub;
    }

    pub fn remove(&mut self, table: &mut Table, index: u32) {
        let Block {
            bytes,
            list_before,
            list_after,
            ..
        } = table[index];
        if list_after != NONE {
            table[list_after].list_before = list_before;
        }
        if list_before != NONE {
            table[list_before].list_after = list_after;
            return;
        }
        let (row, sub) = list_of(bytes);
        debug_assert_eq!(self.heads[row][sub], index, "a block that is in no list");
        self.heads[row][sub] = list_after;
        if list_after == NONE {
            self.subs[row] &= !(1 << sub);
            if self.subs[row] == 0 {
                self.rows &= !(1 << row);
            }
        }
    }

    /// See [`Bins::find`](super::Bins::find).
    pub fn find(
        &self,
        table: &Table,
        bytes: u64,
        thorough: bool,
        usable: impl Fn(&Block) -> bool,
    ) -> Option<u32> {
        let own = list_of(bytes);
        let most = if thorough { usize::MAX } else { SCAN };
        let mut next = Some(own)
            .filter(|(row, sub)| self.subs[*row] & 1 << sub != 0)
            .or_else(|| self.next(own));
        while let Some(list) = next {
            if let Some(found) = self.scan(table, list, bytes, most, &usable) {
                return Some(found);
            }
            next = self.next(list);
        }
        None
    }

    /// The smallest block of a list that fits, among the first few.
    fn scan(
        &self,
        table: &Table,
        (row, sub): (usize, usize),
        bytes: u64,
        most: usize,
        usable: &impl Fn(&Block) -> bool,
    ) -> Option<u32> {
        let (mut best, mut least) = (None, u64::MAX);
        let (mut at, mut seen) = (self.heads[row][sub], 0);
        while at != NONE && seen < most {
            let block = &table[at];
            if block.bytes >= bytes && block.bytes < least && usable(block) {
                (best, least) = (Some(at), block.bytes);
                if least == bytes {
                    break;
                }
            }
            (at, seen) = (block.list_after, seen + 1);
        }
        best
    }

    /// The next list with blocks.
    fn next(&self, (row, sub): (usize, usize)) -> Option<(usize, usize)> {
        let rest = if sub + 1 < SUBS {
            self.subs[row] >> (sub + 1) << (sub + 1)
        } else {
            0
        };
        if rest != 0 {
            return Some((row, rest.trailing_zeros() as usize));
        }
        let rows = if row + 1 < ROWS {
            self.rows >> (row + 1) << (row + 1)
        } else {
            0
        };
        (rows != 0).then(|| {
            let row = rows.trailing_zeros() as usize;
            (row, self.subs[row].trailing_zeros() as usize)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::block::State;
    use super::*;

    #[test]
    fn lists_hold_sizes_in_order_without_gaps() {
        assert_eq!(list_of(0), (0, 0));
        assert_eq!(list_of(31 * GRANULE), (0, 31));
        assert_eq!(list_of(32 * GRANULE), (1, 0));
        assert_eq!(list_of(63 * GRANULE), (1, 31));
        assert_eq!(list_of(64 * GRANULE), (2, 0));
        assert_eq!(list_of(65 * GRANULE), (2, 0));
        assert_eq!(list_of(66 * GRANULE), (2, 1));
        let (row, sub) = list_of(u64::MAX);
        assert!(row < ROWS && sub == SUBS - 1);
        let mut before = (0, 0);
        for granules in 1..20_000u64 {
            let list = list_of(granules * GRANULE);
            assert!(
                list == before || list.0 * SUBS + list.1 == before.0 * SUBS + before.1 + 1,
                "{granules}"
            );
            before = list;
        }
    }

    #[test]
    fn the_best_of_the_first_few_is_found_and_any_if_asked_to() {
        let mut table = Table::default();
        let mut bins = Tlsf::default();
        let mut add = |bins: &mut Tlsf, granules: u64| {
            let index = table.add(Block {
                bytes: granules * GRANULE,
                state: State::Free,
                ..Block::default()
            });
            bins.insert(&mut table, index);
            index
        };
        // One list: 1024 to 1055 granules. The fitting one comes after too many that do not fit.
        let fits = add(&mut bins, 1055);
        let small: Vec<u32> = (0..20).map(|_| add(&mut bins, 1030)).collect();
        let far = add(&mut bins, 4000);
        let found = |bins: &Tlsf, table: &Table, thorough| {
            bins.find(table, 1040 * GRANULE, thorough, |_| true)
        };
        assert_eq!(found(&bins, &table, false), Some(far));
        assert_eq!(found(&bins, &table, true), Some(fits));
        assert_eq!(
            bins.find(&table, 1040 * GRANULE, true, |b| b.bytes > 1055 * GRANULE),
            Some(far)
        );
        for index in small {
            bins.remove(&mut table, index);
        }
        assert_eq!(found(&bins, &table, false), Some(fits));
        bins.remove(&mut table, fits);
        bins.remove(&mut table, far);
        assert_eq!((found(&bins, &table, true), bins.rows), (None, 0));
    }
}
