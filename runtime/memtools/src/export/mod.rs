//! Contents and history of memory, in the formats of other tools' viewers: PyTorch's memory
//! snapshot, pprof's heap profile, the Chrome and Perfetto trace. They are written from a
//! [`MemoryProfile`], which a pool has (its current blocks, and the events that [`Pool::record`] kept) and
//! a run in a planned slab as well ([`MemoryProfile::of_slab`]).

mod perfetto;
mod pprof;
mod slab;
mod snapshot;

use std::collections::BTreeMap;

use slabwise_kernels::memory::Region;

use slabwise_pool::{Event, Inspected, Policy, Pool, Stream, Tag, TagId};

pub use perfetto::trace_events_json;
pub use pprof::heap_profile;
pub use slab::{Kernel, Life};
pub use snapshot::{ExportError, snapshot_json, snapshot_pickle};

/// The profile to export: contents and history of memory.
#[derive(Clone, Debug)]
pub struct MemoryProfile {
    /// The allocator that manages it.
    manager: String,
    /// Whether its memory is one range that grows.
    expandable: bool,
    /// The most bytes that it may take.
    limit: u64,
    segments: Vec<Segment>,
    events: Vec<Event>,
    tags: Vec<Tag>,
    kernels: Vec<Kernel>,
}

impl MemoryProfile {
    fn tag(&self, id: TagId) -> &Tag {
        self.tags.get(id.index()).unwrap_or(&self.tags[0])
    }
}

impl From<&Pool> for MemoryProfile {
    fn from(pool: &Pool) -> MemoryProfile {
        let policy = pool.policy();
        let (manager, expandable) = (policy.name().to_string(), policy == Policy::Vmm);
        let limit = pool.statistics().bytes_limit;
        MemoryProfile {
            manager,
            expandable,
            limit,
            segments: segments(pool),
            events: pool.events(),
            tags: pool.tags(),
            kernels: Vec::new(),
        }
    }
}

/// A range of memory that was taken from the driver, and its blocks by address.
#[derive(Clone, Debug)]
struct Segment {
    region: Region,
    stream: Stream,
    blocks: Vec<Piece>,
}

/// A block in use, or a free one.
#[derive(Clone, Debug)]
struct Piece {
    region: Region,
    /// The requested bytes; `None` for a free block.
    requested: Option<u64>,
    tag: Tag,
}

/// The pool's memory, without addresses that have none mapped.
fn segments(pool: &Pool) -> Vec<Segment> {
    let mut segments: Vec<Segment> = Vec::new();
    pool.inspect(|block: Inspected, tag: &Tag| {
        let region = block.region;
        let piece = Piece {
            region,
            requested: block.requested,
            tag: tag.clone(),
        };
        match segments.last_mut() {
            Some(s)
                if s.region.arena == region.arena
                    && s.region.offset + s.region.bytes == region.offset =>
            {
                s.region.bytes += region.bytes;
                s.blocks.push(piece);
            }
            _ => segments.push(Segment {
                region,
                stream: block.stream,
                blocks: vec![piece],
            }),
        }
    });
    segments
}

/// One address space for all arenas, as viewers expect it: each arena after the one before.
struct Addresses {
    starts: BTreeMap<u32, u64>,
}

impl Addresses {
    fn new(segments: &[Segment], events: &[Event]) -> Addresses {
        const START: u64 = 1 << 32;
        const ALIGN: u64 = 2 << 20;
        let mut ends: BTreeMap<u32, u64> = BTreeMap::new();
        for region in segments
            .iter()
            .map(|s| s.region)
            .chain(events.iter().map(|e| e.region))
        {
            let end = ends.entry(region.arena).or_default();
            *end = (*end).max(region.offset.saturating_add(region.bytes));
        }
        let mut at = START;
        let mut place = |bytes: u64| {
            let start = at;
            at = at
                .saturating_add(bytes.max(1))
                .checked_next_multiple_of(ALIGN)
                .unwrap_or(u64::MAX);
            start
        };
        Addresses {
            starts: ends
                .into_iter()
                .map(|(arena, bytes)| (arena, place(bytes)))
                .collect(),
        }
    }

    fn of(&self, region: Region) -> u64 {
        self.starts
            .get(&region.arena)
            .copied()
            .unwrap_or(0)
            .saturating_add(region.offset)
    }
}

#[cfg(test)]
mod tests;
