//! The profile of a run in a planned slab: buffers are its blocks, the slab is its one segment.

use std::collections::BTreeMap;

use slabwise_kernels::memory::Region;

use super::{MemoryProfile, Piece, Segment};
use slabwise_pool::Stream;
use slabwise_pool::TagId;
use slabwise_pool::{Action, Event};
use slabwise_pool::{Tag, Tags};

/// Bytes of a slab that hold one value.
#[derive(Clone, Debug)]
pub struct Life {
    /// Their purpose.
    pub tag: Tag,
    /// The offset in the slab.
    pub offset: u64,
    /// How many.
    pub bytes: u64,
    /// When the value begins, in nanoseconds of the run.
    pub from_ns: u64,
    /// When it ends; `None` if it lives beyond the end.
    pub to_ns: Option<u64>,
}

/// A kernel that ran.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Kernel {
    /// Its name.
    pub name: String,
    /// When it began, in nanoseconds of the run.
    pub start_ns: u64,
    /// How long it took.
    pub ns: u64,
}

impl MemoryProfile {
    /// The profile of a slab of so many bytes with these lives in it, no two of which may share
    /// bytes at a time: the blocks live at the end, and the events before.
    pub fn of_slab(
        manager: &str,
        bytes: u64,
        lives: &[Life],
        kernels: Vec<Kernel>,
    ) -> MemoryProfile {
        let mut tags = Tags::default();
        let ids: Vec<TagId> = lives.iter().map(|life| tags.id(life.tag.clone())).collect();
        // At one instant, blocks that end are freed before those that begin.
        let mut changes: Vec<(u64, bool, usize)> = Vec::new();
        for (at, life) in lives.iter().enumerate() {
            changes.push((life.from_ns, true, at));
            changes.extend(life.to_ns.map(|end| (end, false, at)));
        }
        changes.sort_unstable();
        let slab = Region {
            arena: 0,
            offset: 0,
            bytes,
        };
        let event = |action, region, tag, allocation, time_ns, bytes_in_use| Event {
            action,
            region,
            stream: Stream(0),
            tag,
            allocation,
            time_ns,
            bytes_in_use,
            pool_bytes: bytes,
        };
        let mut events = vec![event(Action::SegmentAlloc, slab, TagId::default(), 0, 0, 0)];
        let mut in_use = 0u64;
        for (time, begins, at) in changes {
            let life = &lives[at];
            in_use = if begins {
                in_use.saturating_add(life.bytes)
            } else {
                in_use.saturating_sub(life.bytes)
            };
            let action = if begins { Action::Alloc } else { Action::Free };
            events.push(event(
                action,
                slab.part(life.offset, life.bytes),
                ids[at],
                at as u64 + 1,
                time,
                in_use,
            ));
        }
        let held: BTreeMap<u64, &Life> = lives
            .iter()
            .filter(|l| l.to_ns.is_none() && l.bytes > 0)
            .map(|l| (l.offset, l))
            .collect();
        let (mut blocks, mut next) = (Vec::new(), 0);
        let free = |from: u64, to: u64| Piece {
            region: slab.part(from, to - from),
            requested: None,
            tag: Tag::default(),
        };
        for (&offset, life) in &held {
            if offset > next {
                blocks.push(free(next, offset));
            }
            blocks.push(Piece {
                region: slab.part(offset, life.bytes),
                requested: Some(life.bytes),
                tag: life.tag.clone(),
            });
            next = offset + life.bytes;
        }
        if bytes > next {
            blocks.push(free(next, bytes));
        }
        let segments = vec![Segment {
            region: slab,
            stream: Stream(0),
            blocks,
        }];
        MemoryProfile {
            manager: manager.into(),
            expandable: false,
            limit: bytes,
            segments,
            events,
            tags: tags.all().to_vec(),
            kernels,
        }
    }
}
