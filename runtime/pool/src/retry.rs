//! The retry policy of a request: steps that are tried one after the other until there is memory or
//! the request fails with a reason.
//!
//! The retry policy is a state machine without input or output: it reads the table under the pool's
//! lock and returns the next driver call; the pool makes the call without the lock and reports its
//! outcome. So no lock is ever held across a driver call, and every path can be tested without a
//! driver.

use slabwise_kernels::memory::Region;

use super::block::Block;
use super::config::Policy;
use super::defrag::Move;
use super::event_log::Action;
use super::heap::{Engine, Heap};
use super::policy::chain::{Effort, Return};
use super::source::{MemoryInfo, Range, Refused, Stream};

/// A request for memory while it goes through the retry steps.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Request {
    pub bytes: u64,
    pub rounded: u64,
    pub stream: Stream,
    pub tag: u32,
    pub step: RetryStep,
    /// Whether free memory did not suffice.
    pub missed: bool,
    /// The driver's last report of free memory; only queried where a reserve is kept.
    pub info: Option<MemoryInfo>,
    /// How often new memory was requested; other requests may have taken it.
    pub grown: u32,
    /// How often the driver refused in this step.
    pub refused: u32,
    /// The block, where the driver allocates one for each request.
    pub got: Option<u32>,
    /// There is new memory: it is searched before the next retry step.
    pub look: bool,
}

/// A step of the retry policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum RetryStep {
    Search,
    /// Blocks of other streams whose work is done.
    Poll,
    SearchPolled,
    /// Caches of the program drop their memory.
    Callbacks,
    SearchAll,
    /// Move a few bytes rather than take many more.
    EvictEarly,
    SearchEvicted,
    Grow,
    /// Unused memory goes back to the driver, to leave bytes to grow.
    Trim,
    GrowTrimmed,
    /// Wait for all streams; then search again, and grow again.
    Synchronize,
    SearchSynchronized,
    TrimSynchronized,
    GrowSynchronized,
    /// Move a few blocks, or pages.
    Evict,
    /// Move all blocks.
    Compact,
    SearchMoved,
    Fail,
}

/// A driver call that the retry policy needs.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Call {
    Info,
    Range {
        bytes: u64,
    },
    Reserve {
        bytes: u64,
        stream: Stream,
        ordered: bool,
    },
    Map {
        row: u32,
        pages: Region,
    },
    Return {
        all: Vec<Return>,
        ordered: bool,
    },
    Poll(Vec<Stream>),
    Synchronize(Vec<(Stream, u64)>),
    Callbacks,
    /// Copies in this order, between waiting for one list of streams and waiting for another.
    Copy {
        before: Vec<(Stream, u64)>,
        moves: Vec<Move>,
        after: Vec<(Stream, u64)>,
    },
    /// Memory moves from mapped rows to an unmapped one.
    Remap {
        from: Vec<(u32, Region)>,
        to: (u32, Region),
    },
}

/// The outcome of a driver call.
#[derive(Clone, Debug)]
pub(crate) enum Outcome {
    /// And whether the source is taken whole by default.
    Info(MemoryInfo, bool),
    Range(Option<Range>),
    Reserved(Result<u32, Refused>),
    Mapped(Result<(), Refused>),
    Done,
    Progress(Vec<(Stream, u64)>),
    Moved {
        ns: u64,
    },
    Remapped {
        done: Result<(), Refused>,
        ns: u64,
    },
}

/// Where a request stands.
#[derive(Debug)]
pub(crate) enum Next {
    /// This row is the block.
    Served(u32),
    Call(Call),
    /// Another request's blocks are being moved, or the pool's first memory is being allocated:
    /// retry after that.
    Wait,
    Failed,
}

/// The most allocations for one request: concurrent requests may take the memory first, but not
/// forever.
const GROWN_MOST: u32 = 64;

/// The divisor of the pool's bytes for the smallest request for which blocks are moved before the
/// pool grows.
const EARLY_PART: u64 = 1024;

impl Heap {
    /// Advances a request as far as possible without a driver call.
    pub fn advance(&mut self, r: &mut Request) -> Next {
        if self.moving || self.opening {
            return Next::Wait;
        }
        if let Some(call) = self.begin() {
            self.opening = true;
            return Next::Call(call);
        }
        loop {
            let effort = match r.step {
                _ if std::mem::take(&mut r.look) => Some(Effort::Last),
                RetryStep::Search | RetryStep::SearchPolled => Some(Effort::Quick),
                RetryStep::SearchAll | RetryStep::SearchEvicted | RetryStep::GrowTrimmed => {
                    Some(Effort::Thorough)
                }
                RetryStep::SearchSynchronized | RetryStep::SearchMoved => Some(Effort::Last),
                _ => None,
            };
            if let Some(row) = effort.and_then(|effort| self.search(r, effort)) {
                return Next::Served(row);
            }
            let (next, call) = self.run_step(r);
            if r.step == RetryStep::Fail {
                return Next::Failed;
            }
            if r.step != next {
                (r.step, r.refused) = (next, 0);
            }
            if let Some(call) = call {
                return Next::Call(call);
            }
        }
    }

    /// Executes one step: the next step, and the call that this one needs.
    fn run_step(&mut self, r: &mut Request) -> (RetryStep, Option<Call>) {
        match r.step {
            RetryStep::Search => {
                if !r.missed {
                    r.missed = true;
                    self.statistics.cache_misses += 1;
                }
                (RetryStep::Poll, None)
            }
            RetryStep::Poll => {
                let behind = self.streams.behind();
                let streams: Vec<Stream> = behind.into_iter().map(|(stream, _)| stream).collect();
                if streams.is_empty() {
                    (RetryStep::Callbacks, None)
                } else {
                    (RetryStep::SearchPolled, Some(Call::Poll(streams)))
                }
            }
            RetryStep::SearchPolled => (RetryStep::Callbacks, None),
            RetryStep::Callbacks => (
                RetryStep::SearchAll,
                self.has_callbacks.then_some(Call::Callbacks),
            ),
            RetryStep::SearchAll => (RetryStep::EvictEarly, None),
            RetryStep::EvictEarly => {
                // Enough memory for a large request is free, but in pieces: moving bytes once is
                // cheaper than keeping as many more from then on. For small ones it is not: they
                // make the pool grow by little, and looking for blocks to move takes time for each
                // block.
                let free = self
                    .statistics
                    .pool_bytes
                    .saturating_sub(self.statistics.bytes_in_use);
                let is_large = r.rounded >= self.statistics.pool_bytes / EARLY_PART;
                let early = matches!(self.settings.policy, Policy::Tlsf | Policy::Vmm)
                    && is_large
                    && free >= r.rounded;
                let call = if early {
                    self.evict(r, r.rounded)
                } else {
                    None
                };
                if call.is_some() {
                    (RetryStep::SearchEvicted, call)
                } else {
                    (RetryStep::Grow, None)
                }
            }
            RetryStep::SearchEvicted => (RetryStep::Grow, None),
            RetryStep::Grow => match self.keep_reserve(r) {
                Some(call) => (RetryStep::Grow, Some(call)),
                None => self.grow_or(r, RetryStep::Trim),
            },
            RetryStep::Trim => (RetryStep::GrowTrimmed, self.trim_for_room()),
            RetryStep::GrowTrimmed => self.grow_or(r, RetryStep::Synchronize),
            RetryStep::Synchronize => {
                let behind = self.streams.behind();
                self.statistics.retries += 1;
                (
                    RetryStep::SearchSynchronized,
                    (!behind.is_empty()).then_some(Call::Synchronize(behind)),
                )
            }
            RetryStep::SearchSynchronized => (RetryStep::TrimSynchronized, None),
            RetryStep::TrimSynchronized => (RetryStep::GrowSynchronized, self.trim_for_room()),
            RetryStep::GrowSynchronized => self.grow_or(r, RetryStep::Evict),
            RetryStep::Evict => match self.evict(r, u64::MAX) {
                Some(call) => (RetryStep::SearchMoved, Some(call)),
                None => (RetryStep::Compact, None),
            },
            RetryStep::Compact => (RetryStep::SearchMoved, self.compact(r)),
            RetryStep::SearchMoved | RetryStep::Fail => (RetryStep::Fail, None),
        }
    }

    /// A call for more memory, after which this step is repeated; or the step after it.
    fn grow_or(&mut self, r: &mut Request, next: RetryStep) -> (RetryStep, Option<Call>) {
        // Where arenas are larger than the request, a refused one is requested again in the least
        // size.
        let patience = match &self.engine {
            Engine::Chain(chain) if chain.range.is_none() => 1,
            _ => 0,
        };
        if r.grown >= GROWN_MOST || r.refused > patience {
            return (next, None);
        }
        match self.growth(r) {
            Some(call) => (r.step, Some(call)),
            None => (next, None),
        }
    }

    /// The set-up queries to the source, and the memory taken at the first use.
    fn begin(&mut self) -> Option<Call> {
        let Some(capacity) = self.capacity else {
            return Some(Call::Info);
        };
        let Engine::Chain(chain) = &self.engine else {
            return None;
        };
        if std::mem::take(&mut self.preallocates) {
            self.reserving += capacity.limit;
            return Some(Call::Reserve {
                bytes: capacity.limit,
                stream: Stream(0),
                ordered: false,
            });
        }
        let ask = chain.range.is_none() && !self.range_refused && self.statistics.pool_bytes == 0;
        ask.then_some(Call::Range {
            bytes: capacity.limit,
        })
    }

    fn search(&mut self, r: &mut Request, effort: Effort) -> Option<u32> {
        let Heap {
            table,
            streams,
            engine,
            ..
        } = self;
        match engine {
            Engine::Chain(chain) => chain.take(table, streams, r.rounded, r.stream, effort),
            Engine::Buckets(buckets) => buckets.take(table, streams, r.rounded, r.stream),
            Engine::Direct => r.got.take(),
        }
    }

    /// Bytes that the pool may still take.
    fn room(&self) -> u64 {
        let limit = self.capacity.map_or(0, |c| c.limit);
        limit
            .saturating_sub(self.statistics.pool_bytes)
            .saturating_sub(self.reserving)
    }

    /// The call that gets memory for a request, if the limit permits it.
    fn growth(&mut self, r: &mut Request) -> Option<Call> {
        let room = self.room();
        let Heap {
            table,
            streams,
            engine,
            settings,
            ..
        } = self;
        let call = match engine {
            Engine::Chain(chain) if chain.range.is_some() => {
                let (gap, new) = chain
                    .place_to_grow(table, streams, r.rounded, r.stream)
                    .filter(|(_, new)| *new <= room)?;
                let row = chain.open(table, gap, new);
                Call::Map {
                    row,
                    pages: table[row].region(),
                }
            }
            Engine::Chain(chain) => {
                // A failed call is retried with the least size that suffices.
                let wanted = if r.refused == 0 {
                    chain.segment(r.rounded)
                } else {
                    r.rounded
                };
                let bytes = if wanted <= room { wanted } else { r.rounded };
                Call::Reserve {
                    bytes,
                    stream: r.stream,
                    ordered: false,
                }
            }
            Engine::Buckets(_) => Call::Reserve {
                bytes: r.rounded,
                stream: r.stream,
                ordered: false,
            },
            Engine::Direct => Call::Reserve {
                bytes: r.rounded,
                stream: r.stream,
                ordered: settings.policy == Policy::Async,
            },
        };
        let bytes = match &call {
            Call::Map { pages, .. } => pages.bytes,
            Call::Reserve { bytes, .. } => *bytes,
            _ => 0,
        };
        if bytes > room {
            return None;
        }
        r.grown += 1;
        self.reserving += bytes;
        Some(call)
    }

    /// `naive` and `round` leave a part of the device free: before they take more, they query the
    /// free bytes, and release unused memory if these are too few.
    fn keep_reserve(&mut self, r: &mut Request) -> Option<Call> {
        let Engine::Buckets(_) = &self.engine else {
            return None;
        };
        let Some(info) = r.info else {
            return Some(Call::Info);
        };
        let reserve = (u128::from(info.total) * u128::from(self.settings.reserve) / 100) as u64;
        if info.free.saturating_sub(r.rounded) >= reserve && info.free >= r.rounded {
            return None;
        }
        // Once is enough: memory that could not be released will not be the second time.
        r.info = Some(MemoryInfo {
            free: u64::MAX,
            ..info
        });
        self.trim(|_| true)
    }

    /// Releases unused memory. Returning the mapped memory of a range would free no addresses, so
    /// it keeps its memory.
    fn trim_for_room(&mut self) -> Option<Call> {
        let in_range = matches!(&self.engine, Engine::Chain(chain) if chain.range.is_some());
        if in_range {
            return None;
        }
        let call = self.trim(|_| true);
        self.statistics.retries += u64::from(call.is_some());
        call
    }

    /// The call that returns free memory that no stream uses and that `may_go` permits.
    pub fn trim(&mut self, may_go: impl Fn(&Block) -> bool) -> Option<Call> {
        let Heap {
            table,
            streams,
            engine,
            ..
        } = self;
        let may_go = |b: &Block| streams.is_done(b) && may_go(b);
        let all = match engine {
            Engine::Chain(chain) => chain.trim(table, may_go),
            Engine::Buckets(buckets) => buckets.trim(table, may_go),
            Engine::Direct => Vec::new(),
        };
        (!all.is_empty()).then_some(Call::Return {
            all,
            ordered: false,
        })
    }

    /// Applies the outcome of a call.
    pub fn conclude(&mut self, r: Option<&mut Request>, call: Call, outcome: Outcome) {
        match (call, outcome) {
            (Call::Info, Outcome::Info(info, preallocates)) => {
                if self.capacity.is_none() {
                    self.opening = false;
                    self.set_capacity(info, preallocates);
                } else if let Some(r) = r {
                    r.info = Some(info);
                }
            }
            (Call::Range { bytes }, Outcome::Range(range)) => {
                self.opening = false;
                match (&mut self.engine, range) {
                    (Engine::Chain(chain), Some(range)) => {
                        chain.add_range(
                            &mut self.table,
                            range,
                            Range::addresses(bytes, range.page, range.pages_move),
                        );
                    }
                    _ => self.range_refused = true,
                }
            }
            (Call::Reserve { bytes, stream, .. }, Outcome::Reserved(reserved)) => {
                // Other requests wait while the pool opens, so a call for memory that ends then is
                // the opening one.
                self.opening = false;
                self.reserving -= bytes;
                let got = reserved.ok().map(|arena| {
                    self.took(Region {
                        arena,
                        offset: 0,
                        bytes,
                    });
                    self.add_arena(arena, bytes, stream)
                });
                if let Some(r) = r {
                    match got {
                        Some(got) => (r.got, r.look) = (got, true),
                        None => r.refused += 1,
                    }
                }
            }
            (Call::Map { row, pages }, Outcome::Mapped(mapped)) => {
                self.reserving -= pages.bytes;
                let taken = mapped.is_ok();
                if taken {
                    self.took(pages);
                }
                // New memory belongs to the requester first.
                let stream = r.as_ref().map_or(Stream(0), |r| r.stream);
                if let Some(r) = r {
                    (r.look, r.refused) = (taken, r.refused + u32::from(!taken));
                }
                let Heap {
                    table,
                    streams,
                    engine: Engine::Chain(chain),
                    ..
                } = self
                else {
                    return;
                };
                if taken {
                    chain.mapped(table, streams, row, stream)
                } else {
                    chain.unmapped(table, row)
                }
            }
            (Call::Return { all, .. }, _) => {
                for one in all {
                    if let (Return::Unmap { row, .. }, Engine::Chain(chain)) =
                        (one, &mut self.engine)
                    {
                        chain.unmapped(&mut self.table, row);
                    }
                    self.statistics.pool_bytes -= one.bytes();
                    self.statistics.driver_frees += 1;
                    self.note_segment(Action::SegmentFree, one.region());
                }
            }
            (Call::Poll(_), Outcome::Progress(progress)) => self.progress(&progress),
            (Call::Synchronize(all), _) => self.progress(&all),
            (Call::Copy { before, after, .. }, Outcome::Moved { ns }) => {
                self.moving = false;
                self.statistics.defrag_ns += ns;
                self.progress(&before);
                self.progress(&after);
                if let Engine::Chain(chain) = &mut self.engine {
                    chain.join_all(&mut self.table, &self.streams);
                }
            }
            (Call::Remap { from, to }, Outcome::Remapped { done: Err(_), ns }) => {
                // Nothing has moved: the pages are free, and their destination is a gap.
                self.moving = false;
                self.statistics.defrag_ns += ns;
                self.statistics.defrags -= 1;
                self.statistics.remapped_bytes -= to.1.bytes;
                let Heap {
                    table,
                    streams,
                    engine: Engine::Chain(chain),
                    ..
                } = self
                else {
                    return;
                };
                chain.unmapped(table, to.0);
                from.iter()
                    .for_each(|&(row, _)| chain.give(table, streams, row));
            }
            (Call::Remap { from, to }, Outcome::Remapped { done: Ok(()), ns }) => {
                self.moving = false;
                self.statistics.defrag_ns += ns;
                from.iter()
                    .for_each(|(_, pages)| self.note_segment(Action::SegmentFree, *pages));
                self.note_segment(Action::SegmentAlloc, to.1);
                let stream = r.map_or(Stream(0), |r| r.stream);
                let Heap {
                    table,
                    streams,
                    engine: Engine::Chain(chain),
                    ..
                } = self
                else {
                    return;
                };
                from.iter().for_each(|(row, _)| chain.unmapped(table, *row));
                chain.mapped(table, streams, to.0, stream);
            }
            _ => {}
        }
    }

    /// Counts memory that the driver gave.
    fn took(&mut self, region: Region) {
        let s = &mut self.statistics;
        s.driver_allocs += 1;
        s.pool_bytes += region.bytes;
        s.peak_pool_bytes = s.peak_pool_bytes.max(s.pool_bytes);
        self.note_segment(Action::SegmentAlloc, region);
    }

    /// Applies the driver's report on its streams.
    fn progress(&mut self, all: &[(Stream, u64)]) {
        let mut news = false;
        for &(stream, sequence) in all {
            news |= self.streams.complete(stream, sequence);
        }
        if news && let Engine::Chain(chain) = &mut self.engine {
            chain.join_all(&mut self.table, &self.streams);
        }
    }
}
