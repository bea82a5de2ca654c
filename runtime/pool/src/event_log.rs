//! The event log of a pool's blocks, for later inspection.

use std::collections::VecDeque;

use slabwise_kernels::memory::Region;

use super::source::Stream;

/// The kind of an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Action {
    /// A block was handed out.
    Alloc,
    /// A block came back.
    Free,
    /// A block left its place, for the one in the next event.
    MoveFrom,
    /// A block was moved here.
    MoveTo,
    /// Memory was taken from the driver.
    SegmentAlloc,
    /// Memory was given back to the driver.
    SegmentFree,
    /// A request failed.
    Oom,
}

/// One entry of the event log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event {
    /// The kind of event.
    pub action: Action,
    /// The region; its bytes are the requested ones.
    pub region: Region,
    /// For which stream.
    pub stream: Stream,
    /// The block's tag.
    pub tag: super::TagId,
    /// The number of the block's allocation in the pool, counted from 1; 0 for events without a
    /// block.
    pub allocation: u64,
    /// When, in nanoseconds of the source's clock.
    pub time_ns: u64,
    /// Bytes in use after it.
    pub bytes_in_use: u64,
    /// Bytes taken from the driver after it.
    pub pool_bytes: u64,
}

/// The last events of a pool, at most so many.
#[derive(Debug)]
pub(crate) struct EventLog {
    pub events: VecDeque<Event>,
    pub most: usize,
}

impl EventLog {
    pub fn push(&mut self, event: Event) {
        if self.events.len() >= self.most {
            self.events.pop_front();
        }
        if self.most > 0 {
            self.events.push_back(event);
        }
    }
}
