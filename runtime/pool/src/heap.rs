//! A pool's state: the data under its lock.

use std::collections::VecDeque;

use slabwise_kernels::memory::Region;

use super::block::{Block, Handle, NONE, State, Table};
use super::config::{Policy, Settings};
use super::defrag::Move;
use super::event_log::{Action, Event, EventLog};
use super::policy::bucket::{Buckets, Rounding};
use super::policy::chain::{Chain, Return};
use super::policy::tlsf::GRANULE;
use super::retry::{Call, Request, RetryStep};
use super::source::{MemoryInfo, Stream};
use super::stats::Statistics;
use super::streams::Streams;
use super::tags::{TagId, Tags};

/// The origin of a pool's blocks.
#[derive(Debug)]
pub(crate) enum Engine {
    Chain(Box<Chain>),
    Buckets(Buckets),
    Direct,
}

/// The memory that a pool may take, fixed at its first use.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Capacity {
    pub limit: u64,
}

/// An arena that is returned once its stream has come so far.
#[derive(Clone, Copy, Debug)]
struct Waiting {
    stream: Stream,
    sequence: u64,
    arena: u32,
    bytes: u64,
}

/// See the module documentation.
#[derive(Debug)]
pub(crate) struct Heap {
    pub settings: Settings,
    pub table: Table,
    pub engine: Engine,
    pub streams: Streams,
    pub statistics: Statistics,
    pub tags: Tags,
    pub capacity: Option<Capacity>,
    pub range_refused: bool,
    /// The whole capacity is still to be taken.
    pub preallocates: bool,
    pub has_callbacks: bool,
    /// Blocks are being moved; no other operation may use the pool until that is done.
    pub moving: bool,
    /// One operation is querying the source for the pool's set-up before its first block: the
    /// others wait for it.
    pub opening: bool,
    /// Bytes requested by calls in progress.
    pub reserving: u64,
    /// Bytes of all requests ever served.
    pub allocated_bytes: u64,
    /// Steps that have ended.
    pub step: u64,
    /// When the current operation began, in nanoseconds; 0 unless events are recorded.
    pub now: u64,
    pub event_log: Option<EventLog>,
    waiting_arenas: VecDeque<Waiting>,
}

impl Heap {
    pub fn new(settings: Settings) -> Heap {
        let engine = match settings.policy {
            Policy::Tlsf | Policy::Vmm => Engine::Chain(Box::new(Chain::tlsf(true))),
            Policy::Bfc => Engine::Chain(Box::new(Chain::bfc())),
            Policy::Naive | Policy::Round => Engine::Buckets(Buckets::new(Rounding::of(&settings))),
            Policy::Unpooled | Policy::Platform | Policy::Async => Engine::Direct,
        };
        Heap {
            settings,
            table: Table::default(),
            engine,
            streams: Streams::default(),
            statistics: Statistics::default(),
            tags: Tags::default(),
            capacity: None,
            range_refused: false,
            preallocates: false,
            has_callbacks: false,
            moving: false,
            opening: false,
            reserving: 0,
            allocated_bytes: 0,
            step: 0,
            now: 0,
            event_log: None,
            waiting_arenas: VecDeque::new(),
        }
    }

    /// A request at its first retry step; `None` if no memory could be so large.
    pub fn request(&self, bytes: u64, stream: Stream, tag: u32) -> Option<Request> {
        let rounded = match &self.engine {
            Engine::Chain(chain) => chain.rounded(bytes),
            Engine::Buckets(buckets) => buckets.rounding.rounded(bytes),
            // The driver's alignment.
            Engine::Direct => bytes.max(1).checked_next_multiple_of(GRANULE),
        };
        Some(Request {
            bytes,
            rounded: rounded?,
            stream,
            tag,
            step: RetryStep::Search,
            missed: false,
            info: None,
            grown: 0,
            refused: 0,
            got: None,
            look: false,
        })
    }

    /// Sets the pool's share of the device, and whether it is taken at once.
    pub fn set_capacity(&mut self, info: MemoryInfo, source_preallocates: bool) {
        // A product of 53 bits of fraction and 64 bits of total, rounded down.
        let share = if self.settings.fraction >= 1.0 {
            info.total
        } else {
            (info.total as f64 * self.settings.fraction).floor() as u64
        };
        let own = if self.settings.policy == Policy::Platform {
            u64::MAX
        } else {
            share.min(info.total)
        };
        let limit = own.min(self.settings.limit.unwrap_or(u64::MAX)) / GRANULE * GRANULE;
        let takes_all = matches!(self.settings.policy, Policy::Tlsf | Policy::Bfc);
        self.preallocates = takes_all && self.settings.preallocate.unwrap_or(source_preallocates);
        self.capacity = Some(Capacity { limit });
        self.statistics.bytes_limit = limit;
    }

    /// Adds a new arena to the pool; gives its row, if it is a block for one request alone.
    pub fn add_arena(&mut self, arena: u32, bytes: u64, stream: Stream) -> Option<u32> {
        match &mut self.engine {
            Engine::Chain(chain) => chain.add_segment(&mut self.table, arena, bytes, stream),
            Engine::Buckets(buckets) => {
                let row = self.table.add(Block {
                    arena,
                    bytes,
                    stream,
                    ..Block::default()
                });
                buckets.give(&mut self.table, row);
            }
            // The block of the request that allocated it, reserved for that request.
            Engine::Direct => {
                return Some(self.table.add(Block {
                    arena,
                    bytes,
                    stream,
                    state: State::Live,
                    ..Block::default()
                }));
            }
        }
        None
    }

    /// Marks the block of a served request; gives its handle.
    pub fn serve(&mut self, row: u32, r: &Request) -> Handle {
        let since = self.statistics.num_allocs + 1;
        let block = &mut self.table[row];
        (block.requested, block.tag, block.stream, block.since) = (r.bytes, r.tag, r.stream, since);
        let bytes = block.bytes;
        let s = &mut self.statistics;
        s.num_allocs = since;
        s.cache_hits += u64::from(!r.missed);
        s.largest_alloc_bytes = s.largest_alloc_bytes.max(r.bytes);
        s.bytes_in_use += bytes;
        s.peak_bytes_in_use = s.peak_bytes_in_use.max(s.bytes_in_use);
        // A request for no bytes has a block as well.
        s.rounding_waste_bytes += bytes.saturating_sub(r.bytes);
        self.allocated_bytes = self.allocated_bytes.saturating_add(bytes);
        self.note(Action::Alloc, row);
        self.table.handle(row)
    }

    /// Takes back a block in use; gives the driver calls that this needs.
    pub fn release(&mut self, row: u32) -> Vec<Call> {
        let block = self.table[row];
        let s = &mut self.statistics;
        s.num_frees += 1;
        s.bytes_in_use -= block.bytes;
        s.rounding_waste_bytes -= block.bytes.saturating_sub(block.requested);
        let sequence = self.streams.submitted(block.stream);
        self.note(Action::Free, row);
        self.unpin(row, u32::MAX);
        let (now, step) = (self.now, self.step);
        let row_of = &mut self.table[row];
        // Handles of the block die with it, independent of the row.
        row_of.generation = row_of.generation.wrapping_add(1);
        (
            row_of.sequence,
            row_of.since,
            row_of.idle_since,
            row_of.requested,
            row_of.tag,
        ) = (sequence, step, now, 0, 0);
        match &mut self.engine {
            Engine::Chain(chain) => {
                chain.give(&mut self.table, &self.streams, row);
                Vec::new()
            }
            Engine::Buckets(buckets) => {
                buckets.give(&mut self.table, row);
                Vec::new()
            }
            Engine::Direct => {
                let Block {
                    arena,
                    bytes,
                    stream,
                    ..
                } = block;
                let done = self.streams.is_done(&self.table[row]);
                self.table.remove(row);
                let back = |ordered| Call::Return {
                    all: vec![Return::Release {
                        arena,
                        bytes,
                        stream,
                    }],
                    ordered,
                };
                match self.settings.policy {
                    Policy::Async => vec![back(true)],
                    Policy::Platform if !done => {
                        vec![Call::Synchronize(self.streams.behind()), back(false)]
                    }
                    Policy::Unpooled if !done => {
                        self.waiting_arenas.push_back(Waiting {
                            stream,
                            sequence,
                            arena,
                            bytes,
                        });
                        Vec::new()
                    }
                    _ => vec![back(false)],
                }
            }
        }
    }

    /// The call that returns arenas whose streams have come far enough since they were freed.
    pub fn returned_arenas(&mut self) -> Option<Call> {
        if self.waiting_arenas.is_empty() {
            return None;
        }
        let mut all = Vec::new();
        let streams = &self.streams;
        self.waiting_arenas.retain(|w| {
            let done = streams.is_done(&Block {
                stream: w.stream,
                sequence: w.sequence,
                ..Block::default()
            });
            if done {
                all.push(Return::Release {
                    arena: w.arena,
                    bytes: w.bytes,
                    stream: w.stream,
                });
            }
            !done
        });
        (!all.is_empty()).then_some(Call::Return {
            all,
            ordered: false,
        })
    }

    /// Whether arenas wait for their streams to finish.
    pub fn has_waiting_arenas(&self) -> bool {
        !self.waiting_arenas.is_empty()
    }

    /// Adds `by` pins to a block.
    pub fn pin(&mut self, row: u32, by: u32) {
        self.table[row].pins += by;
        let page = self.table[row].page;
        if page != NONE {
            self.table[page].pins += by;
        }
    }

    pub fn unpin(&mut self, row: u32, by: u32) {
        let by = by.min(self.table[row].pins);
        self.table[row].pins -= by;
        let page = self.table[row].page;
        if page != NONE {
            self.table[page].pins -= by;
        }
    }

    /// Records an event of a block, if events are recorded.
    pub fn note(&mut self, action: Action, row: u32) {
        if self.event_log.is_some() {
            let block = self.table[row];
            self.note_at(
                action,
                Region {
                    bytes: block.requested,
                    ..block.region()
                },
                &block,
            );
        }
    }

    /// Like [`Heap::note`], of memory that goes to or comes from the driver.
    pub fn note_segment(&mut self, action: Action, region: Region) {
        self.note_at(action, region, &Block::default());
    }

    /// Like [`Heap::note`], of blocks that move: one, or those inside a page.
    pub fn note_move(&mut self, m: &Move) {
        if self.event_log.is_none() {
            return;
        }
        let outer = self.table[m.row];
        let mut at = if outer.state == State::Page {
            outer.page
        } else {
            m.row
        };
        while at != NONE {
            let block = self.table[at];
            if block.state == State::Live {
                let inside = block.offset - outer.offset;
                let place = |all: Region| Region {
                    arena: all.arena,
                    offset: all.offset + inside,
                    bytes: block.requested,
                };
                self.note_at(Action::MoveFrom, place(m.from), &block);
                self.note_at(Action::MoveTo, place(m.to), &block);
            }
            at = if outer.state == State::Page {
                block.after
            } else {
                NONE
            };
        }
    }

    /// Like [`Heap::note`], for a place other than the block's.
    pub fn note_at(&mut self, action: Action, region: Region, block: &Block) {
        let Statistics {
            bytes_in_use,
            pool_bytes,
            ..
        } = self.statistics;
        let Block {
            stream,
            tag,
            since: allocation,
            ..
        } = *block;
        if let Some(event_log) = &mut self.event_log {
            event_log.push(Event {
                action,
                region,
                stream,
                tag: TagId(tag),
                allocation,
                time_ns: self.now,
                bytes_in_use,
                pool_bytes,
            });
        }
    }
}
