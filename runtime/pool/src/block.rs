//! The table of blocks: which bytes are in use, kept on the host's side alone. Nothing is written
//! into the memory itself.
//!
//! A block is a row. Rows name their neighbours by index, in address order within a *chain*: the
//! blocks of one arena, or those inside a page of small blocks. A row without a block is reused for
//! the next one; its generation tells handles of the old block from those of the new.

use slabwise_kernels::memory::Region;

use super::source::Stream;

/// No row: the end of a chain or list.
pub(crate) const NONE: u32 = u32::MAX;

/// A block that was handed out. It stays the same when the block moves, and is dead once the block
/// was freed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Handle {
    pub(crate) index: u32,
    pub(crate) generation: u32,
}

/// The state of a row.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum State {
    /// No block.
    #[default]
    Unused,
    /// Free memory.
    Free,
    /// Memory in use.
    Live,
    /// Memory that is split into small blocks, which form a separate chain.
    Page,
    /// Addresses of a range without memory.
    Gap,
    /// Addresses of a range to which memory is being mapped, or from which it is being unmapped.
    Busy,
}

/// One row of the table.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Block {
    pub arena: u32,
    pub state: State,
    pub offset: u64,
    pub bytes: u64,
    /// The neighbours by address in the same chain.
    pub before: u32,
    pub after: u32,
    /// The neighbours in a list of free blocks.
    pub list_before: u32,
    pub list_after: u32,
    pub generation: u32,
    /// The number of pins; of a page, those of all its blocks.
    pub pins: u32,
    /// The stream that used the block last, and the point it must reach until the block is unused.
    pub stream: Stream,
    pub sequence: u64,
    /// The page a small block lies in, or `NONE`; of a page, the first block in it.
    pub page: u32,
    /// The requested bytes, of a block in use.
    pub requested: u64,
    /// The purpose of a block in use.
    pub tag: u32,
    /// The number of the block's allocation, counted from 1; of a free one, the step at which it
    /// became free.
    pub since: u64,
    /// When the block became free, in nanoseconds; 0 unless idle blocks are released.
    pub idle_since: u64,
}

impl Default for Block {
    fn default() -> Block {
        Block {
            arena: 0,
            state: State::Unused,
            offset: 0,
            bytes: 0,
            before: NONE,
            after: NONE,
            list_before: NONE,
            list_after: NONE,
            generation: 0,
            pins: 0,
            stream: Stream(0),
            sequence: 0,
            page: NONE,
            requested: 0,
            tag: 0,
            since: 0,
            idle_since: 0,
        }
    }
}

impl Block {
    pub fn end(&self) -> u64 {
        self.offset + self.bytes
    }

    pub fn region(&self) -> Region {
        Region {
            arena: self.arena,
            offset: self.offset,
            bytes: self.bytes,
        }
    }

    /// Whether it is the only block of its chain.
    pub fn is_alone(&self) -> bool {
        self.before == NONE && self.after == NONE
    }
}

/// All rows. Indices are made here and stay valid for as long as the row holds the block.
#[derive(Debug, Default)]
pub(crate) struct Table {
    rows: Vec<Block>,
    unused: Vec<u32>,
}

impl std::ops::Index<u32> for Table {
    type Output = Block;

    fn index(&self, index: u32) -> &Block {
        &self.rows[index as usize]
    }
}

impl std::ops::IndexMut<u32> for Table {
    fn index_mut(&mut self, index: u32) -> &mut Block {
        &mut self.rows[index as usize]
    }
}

impl Table {
    /// A row for a block; its generation is the row's.
    pub fn add(&mut self, block: Block) -> u32 {
        match self.unused.pop() {
            Some(index) => {
                let generation = self[index].generation;
                self[index] = Block {
                    generation,
                    ..block
                };
                index
            }
            None => {
                let index = u32::try_from(self.rows.len())
                    .ok()
                    .filter(|i| *i != NONE)
                    .expect("fewer blocks than 2^32 - 1");
                self.rows.push(block);
                // Freeing rows must not allocate: the list has capacity for all of them.
                self.unused.reserve(self.rows.len() - self.unused.len());
                index
            }
        }
    }

    /// The row holds no block any more, and handles of it are dead.
    pub fn remove(&mut self, index: u32) {
        let row = &mut self[index];
        let generation = row.generation.wrapping_add(1);
        *row = Block {
            generation,
            ..Block::default()
        };
        self.unused.push(index);
    }

    /// The row of a handle, if it is alive.
    pub fn live(&self, handle: Handle) -> Option<u32> {
        let row = self.rows.get(handle.index as usize)?;
        (row.generation == handle.generation && row.state == State::Live).then_some(handle.index)
    }

    pub fn handle(&self, index: u32) -> Handle {
        Handle {
            index,
            generation: self[index].generation,
        }
    }

    /// Every row with a block.
    pub fn iter(&self) -> impl Iterator<Item = (u32, &Block)> {
        self.rows
            .iter()
            .enumerate()
            .filter(|(_, b)| b.state != State::Unused)
            .map(|(i, b)| (i as u32, b))
    }

    /// Cuts a block after `bytes` bytes; the rest is a new row, with the same state.
    pub fn split(&mut self, index: u32, bytes: u64) -> u32 {
        let block = self[index];
        debug_assert!(bytes > 0 && bytes < block.bytes);
        let rest = Block {
            offset: block.offset + bytes,
            bytes: block.bytes - bytes,
            before: index,
            pins: 0,
            ..block
        };
        let rest = self.add(rest);
        if block.after != NONE {
            self[block.after].before = rest;
        }
        let first = &mut self[index];
        (first.bytes, first.after) = (bytes, rest);
        rest
    }

    /// Joins a block with the one after it, whose row is given up.
    pub fn join(&mut self, index: u32) {
        let after = self[index].after;
        let gone = self[after];
        debug_assert_eq!(
            (self[index].arena, self[index].end()),
            (gone.arena, gone.offset)
        );
        let block = &mut self[index];
        block.bytes += gone.bytes;
        block.after = gone.after;
        if gone.after != NONE {
            self[gone.after].before = index;
        }
        self.remove(after);
    }

    /// Exchanges the places of two blocks of equal size: each gets the other's address and
    /// neighbours.
    pub fn exchange(&mut self, a: u32, b: u32) {
        let (x, y) = (self[a], self[b]);
        debug_assert_eq!(x.bytes, y.bytes);
        // Two neighbours stay neighbours, in the other order.
        let other = |link: u32| match link {
            l if l == a => b,
            l if l == b => a,
            l => l,
        };
        let row = &mut self[a];
        (row.arena, row.offset, row.before, row.after) =
            (y.arena, y.offset, other(y.before), other(y.after));
        let row = &mut self[b];
        (row.arena, row.offset, row.before, row.after) =
            (x.arena, x.offset, other(x.before), other(x.after));
        for row in [a, b] {
            let (before, after) = (self[row].before, self[row].after);
            if before != NONE {
                self[before].after = row;
            }
            if after != NONE {
                self[after].before = row;
            }
        }
    }

    /// A block and the free block before it change places: the block moves down, the free bytes
    /// come after it.
    pub fn slide_down(&mut self, block: u32) {
        let free = self[block].before;
        let (f, b) = (self[free], self[block]);
        debug_assert_eq!(f.state, State::Free);
        (self[block].offset, self[free].offset) = (f.offset, f.offset + b.bytes);
        (self[block].before, self[block].after) = (f.before, free);
        (self[free].before, self[free].after) = (block, b.after);
        if f.before != NONE {
            self[f.before].after = block;
        }
        if b.after != NONE {
            self[b.after].before = free;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A chain of three blocks of 10 bytes.
    fn three() -> (Table, [u32; 3]) {
        let mut table = Table::default();
        let a = table.add(Block {
            bytes: 30,
            state: State::Free,
            ..Block::default()
        });
        let b = table.split(a, 10);
        let c = table.split(b, 10);
        (table, [a, b, c])
    }

    fn chain(table: &Table, from: u32) -> Vec<(u32, u64)> {
        let mut found = Vec::new();
        let (mut at, mut before) = (from, NONE);
        while at != NONE {
            assert_eq!(table[at].before, before);
            found.push((at, table[at].offset));
            (before, at) = (at, table[at].after);
        }
        found
    }

    #[test]
    fn near_and_distant_blocks_are_exchanged() {
        for (x, y) in [(0, 1), (1, 0), (1, 2), (0, 2), (2, 0)] {
            let (mut table, rows) = three();
            table.exchange(rows[x], rows[y]);
            let mut expected = rows;
            expected.swap(x, y);
            let expected: Vec<(u32, u64)> = expected.into_iter().zip([0, 10, 20]).collect();
            assert_eq!(chain(&table, expected[0].0), expected, "{x} and {y}");
        }
    }

    #[test]
    fn a_block_slides_over_free_bytes() {
        let (mut table, [a, b, c]) = three();
        table[b].state = State::Live;
        table.slide_down(b);
        assert_eq!(chain(&table, b), [(b, 0), (a, 10), (c, 20)]);
        table.join(a);
        assert_eq!(
            (chain(&table, b), table[a].bytes),
            (vec![(b, 0), (a, 10)], 20)
        );
    }

    #[test]
    fn handles_die_with_their_block() {
        let (mut table, [a, ..]) = three();
        table[a].state = State::Live;
        let handle = table.handle(a);
        assert_eq!(table.live(handle), Some(a));
        table.remove(a);
        assert_eq!(table.live(handle), None);
        let again = table.add(Block {
            state: State::Live,
            ..Block::default()
        });
        assert_eq!(again, a, "rows are used again");
        assert_eq!(table.live(handle), None);
        assert_eq!(
            table.live(Handle {
                index: 99,
                generation: 0
            }),
            None
        );
    }
}
