//! The retry steps that move blocks, or the pages behind addresses: which moves, within which rate,
//! and which streams wait.

use super::block::{Block, NONE, State};
use super::config::Policy;
use super::defrag::{Ground, Move};
use super::heap::{Engine, Heap};
use super::retry::{Call, Request};
use super::source::Stream;

impl Heap {
    /// Bytes that may be moved now: initially the size of the pool, and more with each allocation.
    fn may_move(&self) -> u64 {
        let limit = self.capacity.map_or(0, |c| c.limit);
        let earned = self.allocated_bytes as f64 * self.settings.defragment_rate;
        limit
            .saturating_add(earned as u64)
            .saturating_sub(self.statistics.defrag_bytes)
    }

    /// The cheapest call that joins free memory for a request.
    pub(super) fn defragment(&mut self, r: &mut Request) -> Option<Call> {
        self.evict(r, u64::MAX).or_else(|| self.compact(r))
    }

    /// A call that moves a few blocks out of a window, or remaps free pages.
    pub(super) fn evict(&mut self, r: &Request, most: u64) -> Option<Call> {
        if !self.settings.defragment {
            return None;
        }
        if self.settings.policy == Policy::Vmm
            && let Some(call) = self.remap(r)
        {
            return Some(call);
        }
        let most = most.min(self.may_move());
        let Heap {
            table,
            streams,
            engine: Engine::Chain(chain),
            ..
        } = self
        else {
            return None;
        };
        let moves = Ground {
            table,
            chain,
            streams,
        }
        .evict(r.rounded, r.stream, most)?;
        // The requester's stream waits for the copies of other streams.
        let mut after: Vec<(Stream, u64)> = Vec::new();
        for m in moves.iter().filter(|m| m.stream != r.stream) {
            if !after.iter().any(|(stream, _)| *stream == m.stream) {
                after.push((m.stream, self.streams.submitted(m.stream)));
            }
        }
        Some(self.copy(Vec::new(), moves, after))
    }

    /// A call that slides blocks down until the request fits.
    pub(super) fn compact(&mut self, r: &Request) -> Option<Call> {
        let most = self.may_move();
        let defragment = self.settings.defragment;
        let Heap {
            table,
            streams,
            engine: Engine::Chain(chain),
            ..
        } = self
        else {
            return None;
        };
        let before = streams.behind();
        let mut ground = Ground {
            table,
            chain,
            streams,
        };
        if !defragment || ground.movable_bytes() > most {
            return None;
        }
        let moves = ground.compact(r.rounded, r.stream);
        if moves.is_empty() {
            return None;
        }
        let alike = before.iter().all(|(stream, _)| *stream == r.stream);
        let before = if alike { Vec::new() } else { before };
        let after = if alike {
            Vec::new()
        } else {
            vec![(r.stream, self.streams.submitted(r.stream))]
        };
        Some(self.copy(before, moves, after))
    }

    /// The call for planned moves; the pool is locked until it is made.
    fn copy(
        &mut self,
        before: Vec<(Stream, u64)>,
        moves: Vec<Move>,
        after: Vec<(Stream, u64)>,
    ) -> Call {
        self.moving = true;
        moves.iter().for_each(|m| self.note_move(m));
        self.statistics.defrags += 1;
        self.statistics.retries += 1;
        self.statistics.defrag_bytes += moves.iter().map(|m| m.from.bytes).sum::<u64>();
        Call::Copy {
            before,
            moves,
            after,
        }
    }

    /// A call that remaps the pages of free blocks, so that they form one block.
    fn remap(&mut self, r: &Request) -> Option<Call> {
        let Heap {
            table,
            streams,
            engine: Engine::Chain(chain),
            ..
        } = self
        else {
            return None;
        };
        let page = chain.range.filter(|range| range.pages_move)?.page;
        let (gap, new) = chain.place_to_grow(table, streams, r.rounded, r.stream)?;
        let before = table[gap].before;
        let whole =
            |b: &Block| (b.end() / page * page).saturating_sub(b.offset.next_multiple_of(page));
        let donor = |index: u32, b: &Block| {
            b.state == State::Free && b.page == NONE && index != before && streams.is_done(b)
        };
        let mut donors: Vec<(u64, u32)> = table
            .iter()
            .filter(|(i, b)| donor(*i, b))
            .map(|(i, b)| (whole(b), i))
            .collect();
        donors.sort_unstable_by(|a, b| b.cmp(a));
        if donors.iter().map(|(bytes, _)| bytes).sum::<u64>() < new {
            return None;
        }
        let to = chain.open(table, gap, new);
        let mut from = Vec::new();
        let mut missing = new;
        for (_, donor) in donors {
            if missing == 0 {
                break;
            }
            if let Some(row) = chain.whole_pages(table, donor, page, missing) {
                missing -= table[row].bytes;
                from.push((row, table[row].region()));
            }
        }
        let to = (to, table[to].region());
        self.moving = true;
        self.statistics.defrags += 1;
        self.statistics.retries += 1;
        self.statistics.remapped_bytes += new;
        Some(Call::Remap { from, to })
    }
}
