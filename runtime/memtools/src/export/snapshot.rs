//! PyTorch's memory snapshot, which its viewer (`memory_viz`) opens: pickled, or as JSON.

use serde::Serialize;

use super::{Addresses, MemoryProfile, Segment};
use slabwise_pool::Tag;
use slabwise_pool::{Action, Event};

/// A snapshot could not be written.
#[derive(Debug, thiserror::Error)]
#[error("the snapshot cannot be written: {0}")]
pub struct ExportError(String);

#[derive(Serialize)]
struct Snapshot {
    segments: Vec<SegmentRow>,
    device_traces: Vec<Vec<EventRow>>,
    allocator_settings: Settings,
    external_annotations: Vec<()>,
}

#[derive(Serialize)]
struct Settings {
    backend: String,
}

#[derive(Serialize)]
struct SegmentRow {
    device: u32,
    address: u64,
    total_size: u64,
    allocated_size: u64,
    active_size: u64,
    requested_size: u64,
    stream: u16,
    segment_type: &'static str,
    segment_pool_id: (u32, u32),
    is_expandable: bool,
    frames: Vec<Frame>,
    blocks: Vec<BlockRow>,
}

#[derive(Serialize)]
struct BlockRow {
    address: u64,
    size: u64,
    requested_size: u64,
    state: &'static str,
    frames: Vec<Frame>,
}

#[derive(Serialize)]
struct EventRow {
    action: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    addr: Option<u64>,
    /// The free bytes of the device, which a failed request has instead of an address.
    #[serde(skip_serializing_if = "Option::is_none")]
    device_free: Option<u64>,
    size: u64,
    stream: u16,
    time_us: u64,
    frames: Vec<Frame>,
}

#[derive(Serialize)]
struct Frame {
    name: String,
    filename: String,
    line: u32,
}

/// The tensor, then the layer it is in, then the user's line.
fn frames(tag: &Tag) -> Vec<Frame> {
    let (filename, line) = tag
        .location
        .map_or((String::new(), 0), |at| (at.file().to_string(), at.line()));
    let names = [&tag.name, &tag.layer]
        .into_iter()
        .filter(|name| !name.is_empty());
    names
        .map(|name| Frame {
            name: name.to_string(),
            filename: filename.clone(),
            line,
        })
        .collect()
}

fn snapshot(memory: &MemoryProfile) -> Snapshot {
    let MemoryProfile {
        segments,
        events,
        expandable,
        ..
    } = memory;
    let addresses = Addresses::new(segments, events);
    let row = |s: &Segment| {
        let in_use = || s.blocks.iter().filter(|b| b.requested.is_some());
        let allocated = in_use().map(|b| b.region.bytes).sum();
        let blocks = s.blocks.iter().map(|b| BlockRow {
            address: addresses.of(b.region),
            size: b.region.bytes,
            requested_size: b.requested.unwrap_or(0),
            state: if b.requested.is_some() {
                "active_allocated"
            } else {
                "inactive"
            },
            frames: if b.requested.is_some() {
                frames(&b.tag)
            } else {
                Vec::new()
            },
        });
        SegmentRow {
            device: 0,
            address: addresses.of(s.region),
            total_size: s.region.bytes,
            allocated_size: allocated,
            active_size: allocated,
            requested_size: in_use().filter_map(|b| b.requested).sum(),
            stream: s.stream.0,
            segment_type: if s.region.bytes > 2 << 20 {
                "large"
            } else {
                "small"
            },
            segment_pool_id: (0, 0),
            is_expandable: *expandable,
            frames: Vec::new(),
            blocks: blocks.collect(),
        }
    };
    let event = |e: &Event, action| EventRow {
        action,
        addr: (e.action != Action::Oom).then(|| addresses.of(e.region)),
        device_free: (e.action == Action::Oom).then(|| memory.limit.saturating_sub(e.pool_bytes)),
        size: e.region.bytes,
        stream: e.stream.0,
        time_us: e.time_ns / 1000,
        frames: frames(memory.tag(e.tag)),
    };
    // A move is a free and an allocation, because the format has no moves.
    let actions = |action| -> &'static [&'static str] {
        match action {
            Action::Alloc | Action::MoveTo => &["alloc"],
            Action::Free | Action::MoveFrom => &["free_requested", "free_completed"],
            Action::SegmentAlloc => &["segment_alloc"],
            Action::SegmentFree => &["segment_free"],
            Action::Oom => &["oom"],
        }
    };
    let trace = events
        .iter()
        .flat_map(|e| actions(e.action).iter().map(move |action| event(e, action)))
        .collect();
    Snapshot {
        segments: segments.iter().map(row).collect(),
        device_traces: vec![trace],
        allocator_settings: Settings {
            backend: memory.manager.clone(),
        },
        external_annotations: Vec::new(),
    }
}

/// Memory as PyTorch's `torch.cuda.memory._snapshot()` would be in JSON.
///
/// # Errors
/// Never for consistent memory; an error of the JSON writer.
pub fn snapshot_json(memory: impl Into<MemoryProfile>) -> Result<String, ExportError> {
    serde_json::to_string(&snapshot(&memory.into())).map_err(|e| ExportError(e.to_string()))
}

/// Memory as a file that PyTorch's `torch.cuda.memory._dump_snapshot()` would write.
///
/// # Errors
/// Never for consistent memory; an error of the pickle writer.
pub fn snapshot_pickle(memory: impl Into<MemoryProfile>) -> Result<Vec<u8>, ExportError> {
    serde_pickle::to_vec(&snapshot(&memory.into()), serde_pickle::SerOptions::new())
        .map_err(|e| ExportError(e.to_string()))
}
