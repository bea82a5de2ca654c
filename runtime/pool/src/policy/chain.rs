//! Memory that is split: arenas as chains of blocks that are split for a request and joined again
//! when freed.
//!
//! Where the source has address ranges, all memory is one chain: mapped memory at the start, and a
//! gap of addresses after it (or, once pages were unmapped, in between), so that growing makes the
//! last free block longer instead of adding an arena that could be too small for the next request.
//! Elsewhere each growth adds an arena.
//!
//! Small blocks lie in pages, so that long-lived ones are together and do not split the memory for
//! large requests. A page is a block of the chain that contains a chain.

use slabwise_kernels::memory::Region;

use super::super::block::{Block, NONE, State, Table};
use super::super::source::{Range, Stream};
use super::super::streams::Streams;
use super::Bins;
use super::tlsf::{GRANULE, Tlsf};

/// Requests up to this many bytes lie in pages, where there are pages.
pub(crate) const SMALL_LARGEST: u64 = 1 << 10;
/// Bytes of a page of small blocks.
pub(crate) const PAGE: u64 = 64 << 10;
/// Where there are no ranges, arenas are multiples of this many bytes.
pub(crate) const SEGMENT_GRANULE: u64 = 2 << 20;

/// The effort of a search.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Effort {
    /// A search in bounded time.
    Quick,
    /// Everything there is.
    Thorough,
    /// Includes places reserved for other sizes.
    Last,
}

/// Memory that may go back to the driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Return {
    /// A whole arena, whose row is already removed.
    Release {
        arena: u32,
        bytes: u64,
        stream: Stream,
    },
    /// Pages of a range; the row is busy until they are unmapped.
    Unmap { row: u32, pages: Region },
}

impl Return {
    /// The region to return.
    pub fn region(&self) -> Region {
        match *self {
            Return::Release { arena, bytes, .. } => Region {
                arena,
                offset: 0,
                bytes,
            },
            Return::Unmap { pages, .. } => pages,
        }
    }

    /// Bytes that go back.
    pub fn bytes(&self) -> u64 {
        self.region().bytes
    }
}

/// See the module documentation.
#[derive(Debug)]
pub(crate) struct Chain {
    bins: Bins,
    /// Free blocks inside pages; `None`: this policy has no pages.
    small: Option<Tlsf>,
    pub range: Option<Range>,
    gaps: Vec<u32>,
    /// Bytes of the next arena, where there are no ranges, at least.
    segment: u64,
    /// Whether the arenas of this policy double.
    doubles: bool,
}

impl Chain {
    pub fn tlsf(pages: bool) -> Chain {
        Chain {
            bins: Bins::Tlsf(Tlsf::default()),
            small: pages.then(Tlsf::default),
            range: None,
            gaps: Vec::new(),
            segment: SEGMENT_GRANULE,
            doubles: false,
        }
    }

    pub fn bfc() -> Chain {
        Chain {
            bins: Bins::Bfc(super::bfc::Bfc::default()),
            small: None,
            doubles: true,
            ..Chain::tlsf(false)
        }
    }

    /// The rounded size of a request.
    pub fn rounded(&self, bytes: u64) -> Option<u64> {
        bytes.max(1).checked_next_multiple_of(GRANULE)
    }

    fn is_small(&self, bytes: u64) -> bool {
        self.small.is_some() && bytes <= SMALL_LARGEST
    }

    /// A block for a request of rounded size, in use.
    pub fn take(
        &mut self,
        table: &mut Table,
        streams: &Streams,
        bytes: u64,
        stream: Stream,
        effort: Effort,
    ) -> Option<u32> {
        let thorough = effort != Effort::Quick;
        let usable = |block: &Block| streams.may_use(stream, block);
        if !self.is_small(bytes) {
            let found = self.find(table, bytes, thorough, usable)?;
            return Some(self.cut(table, found, bytes));
        }
        let small = self.small.as_mut()?;
        if let Some(found) = small.find(table, bytes, thorough, usable) {
            small.remove(table, found);
            if table[found].bytes > bytes {
                let rest = table.split(found, bytes);
                small.insert(table, rest);
            }
            table[found].state = State::Live;
            return Some(found);
        }
        if let Some(found) = self.find(table, PAGE, thorough, usable) {
            let page = self.cut(table, found, PAGE);
            let Block {
                arena,
                offset,
                stream,
                sequence,
                ..
            } = table[page];
            let inside = Block {
                arena,
                offset,
                bytes: PAGE,
                state: State::Live,
                stream,
                sequence,
                page,
                ..Block::default()
            };
            let inside = table.add(inside);
            (table[page].state, table[page].page) = (State::Page, inside);
            let rest = table.split(inside, bytes);
            table[rest].state = State::Free;
            self.small.as_mut()?.insert(table, rest);
            return Some(inside);
        }
        // Not enough memory for a page: the block is allocated outside of pages.
        (effort == Effort::Last)
            .then(|| self.find(table, bytes, true, usable))?
            .map(|found| self.cut(table, found, bytes))
    }

    /// A free block that fits. Those at the border of a gap come last: a request that is larger
    /// than all of them extends one of these, at the less cost the longer it is. (Wilson et al.,
    /// "Dynamic storage allocation: a survey and critical review", 1995, call it preserving the
    /// wilderness.)
    fn find(
        &self,
        table: &Table,
        bytes: u64,
        thorough: bool,
        usable: impl Fn(&Block) -> bool,
    ) -> Option<u32> {
        if self.gaps.is_empty() {
            return self.bins.find(table, bytes, thorough, usable);
        }
        let inner = |b: &Block| b.after == NONE || table[b.after].state != State::Gap;
        self.bins
            .find(table, bytes, thorough, |b| inner(b) && usable(b))
            .or_else(|| {
                let borders = self
                    .gaps
                    .iter()
                    .map(|&gap| table[gap].before)
                    .filter(|&row| row != NONE);
                let fitting = borders.filter(|&row| {
                    table[row].state == State::Free
                        && table[row].bytes >= bytes
                        && usable(&table[row])
                });
                fitting.min_by_key(|&row| (table[row].bytes, row))
            })
    }

    /// Takes a free block out of its list and splits off the unneeded rest.
    fn cut(&mut self, table: &mut Table, found: u32, bytes: u64) -> u32 {
        self.bins.remove(table, found);
        if self.bins.splits(table[found].bytes, bytes) {
            self.cut_exactly(table, found, bytes);
        }
        table[found].state = State::Live;
        found
    }

    /// Cuts a block that is in no list down to so many bytes, independent of the policy.
    fn cut_exactly(&mut self, table: &mut Table, found: u32, bytes: u64) {
        if table[found].bytes > bytes {
            let rest = table.split(found, bytes);
            table[rest].state = State::Free;
            self.bins.insert(table, rest);
        }
    }

    /// Takes the free block `found` out of its list, cut down to so many bytes, and marks it in
    /// use.
    pub fn claim(&mut self, table: &mut Table, found: u32, bytes: u64) {
        self.bins.remove(table, found);
        self.cut_exactly(table, found, bytes);
        table[found].state = State::Live;
    }

    /// Takes a block back. Its stream and sequence say which stream may use it.
    pub fn give(&mut self, table: &mut Table, streams: &Streams, index: u32) {
        let page = table[index].page;
        table[index].state = State::Free;
        let index = self.join(table, streams, index);
        if page == NONE {
            self.bins.insert(table, index);
            return;
        }
        if !table[index].is_alone() {
            // A page has been made only where there are lists for its blocks.
            if let Some(small) = self.small.as_mut() {
                small.insert(table, index);
            }
            return;
        }
        let Block {
            stream,
            sequence,
            since,
            idle_since,
            ..
        } = table[index];
        table.remove(index);
        let row = &mut table[page];
        (
            row.page,
            row.stream,
            row.sequence,
            row.since,
            row.idle_since,
        ) = (NONE, stream, sequence, since, idle_since);
        self.give(table, streams, page);
    }

    /// Joins a free block that is in no list with its free neighbours; the resulting block is in no
    /// list either.
    fn join(&mut self, table: &mut Table, streams: &Streams, mut index: u32) -> u32 {
        // Once streams are done, there can be more than one on each side.
        while let Some((stream, sequence)) = self.joined(table, streams, index, table[index].after)
        {
            self.unlist(table, table[index].after);
            self.merge(table, index, stream, sequence);
        }
        while let Some((stream, sequence)) = self.joined(table, streams, table[index].before, index)
        {
            let before = table[index].before;
            self.unlist(table, before);
            self.merge(table, before, stream, sequence);
            index = before;
        }
        index
    }

    /// Joins a block with its follower; the joined block is idle since the later of both.
    fn merge(&mut self, table: &mut Table, index: u32, stream: Stream, sequence: u64) {
        let after = table[table[index].after];
        let row = &mut table[index];
        (row.stream, row.sequence) = (stream, sequence);
        (row.since, row.idle_since) = (
            row.since.max(after.since),
            row.idle_since.max(after.idle_since),
        );
        table.join(index);
    }

    /// The stream that may use two neighbours if they are joined; `None` if they cannot be.
    fn joined(&self, table: &Table, streams: &Streams, a: u32, b: u32) -> Option<(Stream, u64)> {
        if a == NONE || b == NONE || table[a].state != State::Free || table[b].state != State::Free
        {
            return None;
        }
        streams.joined(&table[a], &table[b])
    }

    /// Puts a free block that is in no list into its list, without joining it to its neighbours.
    pub fn list(&mut self, table: &mut Table, index: u32) {
        self.bins.insert(table, index);
    }

    /// Takes a free block out of the list it is in.
    pub fn unlist(&mut self, table: &mut Table, index: u32) {
        match &mut self.small {
            Some(small) if table[index].page != NONE => small.remove(table, index),
            _ => self.bins.remove(table, index),
        }
    }

    /// Joins neighbours that could not be joined while streams were behind.
    pub fn join_all(&mut self, table: &mut Table, streams: &Streams) {
        let free: Vec<u32> = table
            .iter()
            .filter(|(_, b)| b.state == State::Free)
            .map(|(index, _)| index)
            .collect();
        for index in free {
            let Block { state, after, .. } = table[index];
            if state == State::Free && self.joined(table, streams, index, after).is_some() {
                self.unlist(table, index);
                self.give(table, streams, index);
            }
        }
    }

    /// The size of the arena requested from a source without ranges, for a request of rounded size.
    pub fn segment(&self, bytes: u64) -> u64 {
        let bytes = if self.is_small(bytes) { PAGE } else { bytes };
        let least = if self.doubles {
            self.segment
        } else {
            SEGMENT_GRANULE
        };
        bytes
            .max(least)
            .checked_next_multiple_of(SEGMENT_GRANULE)
            .unwrap_or(bytes)
    }

    /// Adds the memory of a new arena to the pool.
    pub fn add_segment(&mut self, table: &mut Table, arena: u32, bytes: u64, stream: Stream) {
        self.segment = self.segment.saturating_mul(2).min(1 << 40);
        let row = table.add(Block {
            arena,
            bytes,
            stream,
            state: State::Free,
            ..Block::default()
        });
        self.bins.insert(table, row);
    }

    /// Adds addresses without memory to the pool.
    pub fn add_range(&mut self, table: &mut Table, range: Range, bytes: u64) {
        let row = table.add(Block {
            arena: range.arena,
            bytes,
            state: State::Gap,
            ..Block::default()
        });
        self.range = Some(range);
        self.gaps.push(row);
    }

    /// Where a range grows for a request of rounded size: the gap that needs the fewest new bytes,
    /// and how many. The free block before the gap becomes part of the new block if the stream may
    /// use it.
    pub fn place_to_grow(
        &self,
        table: &Table,
        streams: &Streams,
        bytes: u64,
        stream: Stream,
    ) -> Option<(u32, u64)> {
        let page = self.range?.page;
        let bytes = if self.is_small(bytes) { PAGE } else { bytes };
        let gaps = self.gaps.iter().filter_map(|&gap| {
            let before = table[gap].before;
            let joins = before != NONE
                && table[before].state == State::Free
                && streams.may_use(stream, &table[before]);
            let there = if joins { table[before].bytes } else { 0 };
            let new = bytes
                .saturating_sub(there)
                .max(1)
                .checked_next_multiple_of(page)?;
            (new <= table[gap].bytes).then_some((new, table[gap].offset, gap))
        });
        gaps.min().map(|(new, _, gap)| (gap, new))
    }

    /// Makes the first bytes of a gap a separate row, busy until memory is mapped there.
    pub fn open(&mut self, table: &mut Table, gap: u32, bytes: u64) -> u32 {
        if table[gap].bytes > bytes {
            let rest = table.split(gap, bytes);
            table[rest].state = State::Gap;
            self.gaps.push(rest);
        }
        self.gaps.retain(|&h| h != gap);
        table[gap].state = State::Busy;
        gap
    }

    /// A busy row has memory now, initially for one stream.
    pub fn mapped(&mut self, table: &mut Table, streams: &Streams, row: u32, stream: Stream) {
        (table[row].stream, table[row].sequence) = (stream, 0);
        self.give(table, streams, row);
    }

    /// A busy row has no memory (any more): it joins the gaps beside it.
    pub fn unmapped(&mut self, table: &mut Table, mut row: u32) {
        table[row].state = State::Gap;
        let is_hole = |table: &Table, other: u32| other != NONE && table[other].state == State::Gap;
        let Block { before, after, .. } = table[row];
        if is_hole(table, after) {
            self.gaps.retain(|&h| h != after);
            table.join(row);
        }
        if is_hole(table, before) {
            self.gaps.retain(|&h| h != before);
            table.join(before);
            row = before;
        }
        self.gaps.push(row);
    }

    /// Free memory that may go back to the driver, as `may_go` says of each block: whole arenas,
    /// and whole pages of a range.
    pub fn trim(&mut self, table: &mut Table, may_go: impl Fn(&Block) -> bool) -> Vec<Return> {
        let free = |(index, b): (u32, &Block)| {
            (b.state == State::Free && b.page == NONE && may_go(b)).then_some(index)
        };
        let rows: Vec<u32> = table.iter().filter_map(free).collect();
        let mut returns = Vec::new();
        for row in rows {
            let block = table[row];
            match self.range.filter(|r| r.arena == block.arena) {
                Some(range) if range.pages_move => {
                    if let Some(row) = self.whole_pages(table, row, range.page, u64::MAX) {
                        returns.push(Return::Unmap {
                            row,
                            pages: table[row].region(),
                        });
                    }
                }
                Some(_) => {
                    // Such a range goes back whole: one free block, and the gap after it.
                    let rest = block.after;
                    if block.before == NONE
                        && (rest == NONE
                            || (table[rest].state == State::Gap && table[rest].after == NONE))
                    {
                        self.bins.remove(table, row);
                        table.remove(row);
                        if rest != NONE {
                            table.remove(rest);
                        }
                        self.gaps.clear();
                        self.range = None;
                        returns.push(Return::Release {
                            arena: block.arena,
                            bytes: block.bytes,
                            stream: block.stream,
                        });
                    }
                }
                None if block.is_alone() => {
                    self.bins.remove(table, row);
                    table.remove(row);
                    returns.push(Return::Release {
                        arena: block.arena,
                        bytes: block.bytes,
                        stream: block.stream,
                    });
                }
                None => {}
            }
        }
        returns
    }

    /// Makes the whole pages inside a free block, so many bytes at most, a separate busy row;
    /// `None` if it has none.
    pub fn whole_pages(
        &mut self,
        table: &mut Table,
        row: u32,
        page: u64,
        most: u64,
    ) -> Option<u32> {
        let block = table[row];
        let from = block.offset.next_multiple_of(page);
        let to = (block.end() / page * page).min(from.saturating_add(most / page * page));
        if to <= from {
            return None;
        }
        self.bins.remove(table, row);
        let mut pages = row;
        if from > block.offset {
            pages = table.split(row, from - block.offset);
            self.bins.insert(table, row);
        }
        if block.end() > to {
            let rest = table.split(pages, to - from);
            table[rest].state = State::Free;
            self.bins.insert(table, rest);
        }
        table[pages].state = State::Busy;
        Some(pages)
    }
}
