//! Best fit with coalescing, as in XLA's `BFCAllocator`: bins of 256·2ᵇ bytes, within each the
//! smallest block that fits, then the lowest address.

use std::collections::BTreeSet;

use super::super::block::{Block, Table};
use super::tlsf::GRANULE;

const BINS: usize = 21;
/// A rest of this many bytes is always split off.
const LARGE_REST: u64 = 128 << 20;

/// Size, arena, address, row.
type Key = (u64, u32, u64, u32);

/// Free blocks by bin, size, arena, address. See the module documentation.
#[derive(Debug, Default)]
pub(crate) struct Bfc {
    bins: Box<[BTreeSet<Key>; BINS]>,
}

fn bin_of(bytes: u64) -> usize {
    ((bytes / GRANULE).max(1).ilog2() as usize).min(BINS - 1)
}

fn key(table: &Table, index: u32) -> Key {
    let block = &table[index];
    (block.bytes, block.arena, block.offset, index)
}

/// Whether the rest that a request leaves of a block is split off: if the block is at least twice
/// the request, or the rest is large.
pub(crate) fn splits(block: u64, bytes: u64) -> bool {
    block / 2 >= bytes || block - bytes >= LARGE_REST
}

impl Bfc {
    pub fn insert(&mut self, table: &mut Table, index: u32) {
        self.bins[bin_of(table[index].bytes)].insert(key(table, index));
    }

    pub fn remove(&mut self, table: &mut Table, index: u32) {
        let was = self.bins[bin_of(table[index].bytes)].remove(&key(table, index));
        debug_assert!(was, "a block that is in no bin");
    }

    /// See [`Bins::find`](super::Bins::find).
    pub fn find(&self, table: &Table, bytes: u64, usable: impl Fn(&Block) -> bool) -> Option<u32> {
        let fitting = |bin: &BTreeSet<Key>| {
            bin.range((bytes, 0, 0, 0)..)
                .map(|&(.., index)| index)
                .find(|&index| usable(&table[index]))
        };
        self.bins[bin_of(bytes)..].iter().find_map(fitting)
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::block::State;
    use super::*;

    #[test]
    fn bins_and_splits_are_xlas() {
        assert_eq!(
            [256, 511, 512, 1024, 256 << 20, 1 << 40].map(bin_of),
            [0, 0, 1, 2, 20, 20]
        );
        assert!(splits(1024, 512) && !splits(1024, 768));
        assert!(
            splits(1 << 30, (1 << 30) - LARGE_REST)
                && !splits(1 << 30, (1 << 30) - LARGE_REST + GRANULE)
        );
    }

    #[test]
    fn the_smallest_that_fits_at_the_lowest_address() {
        let (mut table, mut bins) = (Table::default(), Bfc::default());
        for (offset, bytes) in [(0, 4096), (8192, 2048), (16384, 2048), (32768, 1024)] {
            let index = table.add(Block {
                offset,
                bytes,
                state: State::Free,
                ..Block::default()
            });
            bins.insert(&mut table, index);
        }
        let at = |bytes| {
            bins.find(&table, bytes, |_| true)
                .map(|index| table[index].offset)
        };
        assert_eq!(
            [1024, 1280, 2048, 2304, 4352].map(at),
            [Some(32768), Some(8192), Some(8192), Some(0), None]
        );
    }
}
