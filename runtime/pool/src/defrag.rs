//! Moving blocks to join free memory.
//!
//! *Window eviction* first: of all address ranges that are long enough for the request, the one
//! with the fewest bytes in use whose blocks fit into gaps elsewhere is emptied. If there is none,
//! all blocks *slide down* until a gap is long enough. Pinned blocks stay where they are, and so do
//! rows that are just being mapped.
//!
//! This changes the table only; the copies follow, in the order of the list, while the pool is
//! locked against other use.

use std::collections::{BTreeMap, BTreeSet};

use slabwise_kernels::memory::Region;

use super::block::{Block, NONE, State, Table};
use super::policy::chain::Chain;
use super::source::Stream;
use super::streams::Streams;

/// The number of windows tried, those with the fewest bytes in use first.
const WINDOWS: usize = 64;

/// Bytes to copy. The regions may overlap; then `to` lies lower.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Move {
    /// The block, or the page of blocks, that moves.
    pub row: u32,
    pub from: Region,
    pub to: Region,
    pub stream: Stream,
}

/// A piece of a chain's memory, as the eviction of a window sees it.
#[derive(Clone, Copy, Debug)]
struct Piece {
    row: u32,
    bytes: u64,
    /// Bytes that would have to be moved.
    live: u64,
    /// The stream whose work orders the bytes.
    stream: Stream,
}

/// Free blocks by their size: bytes and row.
type Gaps = BTreeSet<(u64, u32)>;

/// The parts of the pool that moving changes.
pub(crate) struct Ground<'a> {
    pub table: &'a mut Table,
    pub chain: &'a mut Chain,
    pub streams: &'a mut Streams,
}

impl Ground<'_> {
    /// The first rows of all arenas, in their order.
    fn heads(&self) -> Vec<u32> {
        let is_head = |b: &Block| b.before == NONE && b.state != State::Unused;
        // Inside a page, rows name their page; a page's row names its first inner row, which names
        // it back.
        let outside = |b: &Block| b.page == NONE || b.state == State::Page;
        let mut heads: Vec<(u32, u32)> = self
            .table
            .iter()
            .filter(|(_, b)| is_head(b) && outside(b))
            .map(|(i, b)| (b.arena, i))
            .collect();
        heads.sort_unstable();
        heads.into_iter().map(|(_, row)| row).collect()
    }

    /// The stream whose copy of a block is ordered after all past uses of the block, and before all
    /// future ones; `None` if the block cannot be moved. A page that several streams use is ordered
    /// by none of them.
    fn owner(&self, block: &Block) -> Option<Stream> {
        if !matches!(block.state, State::Live | State::Page) || block.pins > 0 {
            return None;
        }
        if block.state == State::Live {
            return Some(block.stream);
        }
        let (mut at, mut owner) = (block.page, None);
        while at != NONE {
            let inside = &self.table[at];
            let counts = inside.state == State::Live || !self.streams.is_done(inside);
            if counts && owner.is_some_and(|owner| owner != inside.stream) {
                return None;
            }
            owner = owner.or(counts.then_some(inside.stream));
            at = inside.after;
        }
        owner.or(Some(block.stream))
    }

    /// The pieces of an arena, in runs between the blocks that cannot be moved.
    fn runs(&self, stream: Stream) -> Vec<Vec<Piece>> {
        let mut runs = vec![Vec::new()];
        for head in self.heads() {
            let mut at = head;
            while at != NONE {
                let block = &self.table[at];
                let free = block.state == State::Free && self.streams.may_use(stream, block);
                let owner = if free {
                    Some(block.stream)
                } else {
                    self.owner(block)
                };
                match (owner, runs.last_mut()) {
                    (Some(stream), Some(run)) => {
                        run.push(Piece {
                            row: at,
                            bytes: block.bytes,
                            live: if free { 0 } else { block.bytes },
                            stream,
                        });
                    }
                    _ => runs.push(Vec::new()),
                }
                at = block.after;
            }
            runs.push(Vec::new());
        }
        runs
    }

    /// Empties the cheapest window of at least so many bytes, moving no more than `most`.
    pub fn evict(&mut self, bytes: u64, stream: Stream, most: u64) -> Option<Vec<Move>> {
        let runs = self.runs(stream);
        let mut windows: Vec<(u64, usize, usize, usize)> = Vec::new();
        for (at, run) in runs.iter().enumerate() {
            let (mut end, mut sum, mut live) = (0, 0u64, 0u64);
            for start in 0..run.len() {
                while sum < bytes && end < run.len() {
                    (sum, live, end) = (sum + run[end].bytes, live + run[end].live, end + 1);
                }
                if sum < bytes {
                    break;
                }
                if live <= most {
                    windows.push((live, at, start, end));
                }
                (sum, live) = (sum - run[start].bytes, live - run[start].live);
            }
        }
        windows.sort_unstable();
        windows.truncate(WINDOWS);
        // The free blocks, for windows all of whose blocks are the stream's and for others: a block
        // moves to memory that no stream uses, or that the same stream uses.
        let free = || runs.iter().flatten().filter(|p| p.live == 0);
        let gaps = |alike: bool| -> Gaps {
            let usable = |p: &&Piece| {
                self.streams.is_done(&self.table[p.row]) || (alike && p.stream == stream)
            };
            free().filter(usable).map(|p| (p.bytes, p.row)).collect()
        };
        let mut gaps = [gaps(false), gaps(true)];
        let (window, chosen) = windows.into_iter().find_map(|(_, at, start, end)| {
            let window = &runs[at][start..end];
            let alike = window.iter().all(|p| p.live == 0 || p.stream == stream);
            Some((window, fit(window, &mut gaps[usize::from(alike)])?))
        })?;
        Some(self.empty(window, chosen))
    }

    /// Moves the blocks of a window to the gaps chosen for them, the largest first.
    fn empty(&mut self, window: &[Piece], chosen: Vec<u32>) -> Vec<Move> {
        let blocks = largest_first(window);
        // A gap is filled from its start in the order in which it was chosen, so its rest is the
        // row behind.
        let mut rest_of: BTreeMap<u32, u32> = BTreeMap::new();
        let mut moves = Vec::with_capacity(blocks.len());
        let mut left = Vec::with_capacity(blocks.len());
        for (block, gap) in blocks.iter().zip(chosen) {
            let place = rest_of.get(&gap).copied().unwrap_or(gap);
            self.chain.claim(self.table, place, block.bytes);
            rest_of.insert(gap, self.table[place].after);
            let from = self.table[block.row].region();
            self.table.exchange(block.row, place);
            self.rebase(block.row);
            moves.push(Move {
                row: block.row,
                from,
                to: self.table[block.row].region(),
                stream: block.stream,
            });
            left.push((place, block.stream));
        }
        for (row, owner) in left {
            (self.table[row].stream, self.table[row].sequence) =
                (owner, self.streams.submit(owner));
            self.chain.give(self.table, self.streams, row);
        }
        moves
    }

    /// The blocks inside a page move with it.
    fn rebase(&mut self, row: u32) {
        let page = self.table[row];
        if page.state != State::Page {
            return;
        }
        let (mut at, mut offset) = (page.page, page.offset);
        while at != NONE {
            let inside = &mut self.table[at];
            (inside.arena, inside.offset) = (page.arena, offset);
            offset += inside.bytes;
            at = inside.after;
        }
    }

    /// The most bytes that [`Ground::compact`] would move.
    pub fn movable_bytes(&self) -> u64 {
        let moves = |b: &Block| matches!(b.state, State::Live | State::Page) && b.pins == 0;
        self.table
            .iter()
            .filter(|(_, b)| moves(b) && (b.page == NONE || b.state == State::Page))
            .map(|(_, b)| b.bytes)
            .sum()
    }

    /// Slides blocks down, arena by arena, until a free block has so many bytes. All copies are on
    /// one stream.
    pub fn compact(&mut self, bytes: u64, stream: Stream) -> Vec<Move> {
        let mut moves = Vec::new();
        for head in self.heads() {
            let mut at = head;
            while at != NONE {
                let block = self.table[at];
                if block.state != State::Free || !self.streams.may_use(stream, &block) {
                    at = block.after;
                    continue;
                }
                if block.bytes >= bytes {
                    return moves;
                }
                let after = block.after;
                if after == NONE {
                    break;
                }
                let next = self.table[after];
                if next.state == State::Free && self.streams.may_use(stream, &next) {
                    self.chain.unlist(self.table, at);
                    self.chain.unlist(self.table, after);
                    self.table.join(at);
                    (self.table[at].stream, self.table[at].sequence) =
                        (stream, self.streams.submitted(stream));
                    self.chain.list(self.table, at);
                } else if matches!(next.state, State::Live | State::Page) && next.pins == 0 {
                    self.chain.unlist(self.table, at);
                    self.table.slide_down(after);
                    self.rebase(after);
                    moves.push(Move {
                        row: after,
                        from: next.region(),
                        to: self.table[after].region(),
                        stream,
                    });
                    (self.table[at].stream, self.table[at].sequence) =
                        (stream, self.streams.submit(stream));
                    self.chain.list(self.table, at);
                } else {
                    at = after;
                }
            }
        }
        moves
    }
}

/// The live pieces of a window, the largest first.
fn largest_first(window: &[Piece]) -> Vec<Piece> {
    let mut blocks: Vec<Piece> = window.iter().copied().filter(|p| p.live > 0).collect();
    blocks.sort_by_key(|p| (std::cmp::Reverse(p.bytes), p.row));
    blocks
}

/// The gaps outside of a window that its blocks move to, if they all fit; the largest first, each
/// into the smallest. Leaves `gaps` as they were.
fn fit(window: &[Piece], gaps: &mut Gaps) -> Option<Vec<u32>> {
    // The changes of `gaps`: entries and whether they were added.
    let mut changes: Vec<((u64, u32), bool)> = Vec::new();
    for piece in window.iter().filter(|p| p.live == 0) {
        let gap = (piece.bytes, piece.row);
        if gaps.remove(&gap) {
            changes.push((gap, false));
        }
    }
    let mut choose = |block: Piece| {
        let &(bytes, gap) = gaps.range((block.bytes, 0)..).next()?;
        gaps.remove(&(bytes, gap));
        changes.push(((bytes, gap), false));
        let rest = (bytes - block.bytes, gap);
        if rest.0 > 0 {
            gaps.insert(rest);
            changes.push((rest, true));
        }
        Some(gap)
    };
    let chosen = largest_first(window).into_iter().map(&mut choose).collect();
    for (gap, is_added) in changes.into_iter().rev() {
        if is_added {
            gaps.remove(&gap);
        } else {
            gaps.insert(gap);
        }
    }
    chosen
}

/// Calls `copy` for pieces of a move that do not overlap.
pub(crate) fn in_pieces(Move { from, to, .. }: Move, mut copy: impl FnMut(Region, Region)) {
    let step = if from.overlaps(&to) {
        from.offset.abs_diff(to.offset)
    } else {
        from.bytes
    };
    let mut at = 0;
    while at < from.bytes {
        let bytes = step.min(from.bytes - at);
        copy(from.part(at, bytes), to.part(at, bytes));
        at += bytes;
    }
}
