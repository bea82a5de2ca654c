//! What happened to a pool's blocks, for those who want to see it afterwards.

use std::collections::VecDeque;

use slabwise_kernels::memory::Region;

use super::source::Stream;

/// What happened.
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

/// One line of a journal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event {
    /// What happened.
    pub action: Action,
    /// Where; the bytes are those that were asked for.
    pub region: Region,
    /// For which stream.
    pub stream: Stream,
    /// The block's tag.
    pub tag: super::TagId,
    /// Which allocation of the pool the block is, counted from 1; 0 for what is no block.
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
pub(crate) struct Journal {
    pub events: VecDeque<Event>,
    pub most: usize,
}

impl Journal {
    pub fn push(&mut self, event: Event) {
        if self.events.len() >= self.most {
            self.events.pop_front();
        }
        if self.most > 0 {
            self.events.push_back(event);
        }
    }
}
