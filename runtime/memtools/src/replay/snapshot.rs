//! Memory snapshots of PyTorch, as `torch.cuda.memory._snapshot()` returns them: pickled, or as
//! JSON.

use std::collections::HashSet;

use serde::Deserialize;
use slabwise_planner::shortened;

use super::Trace;
use super::events::{Before, Logged, trace};
use super::pickle::to_json;

/// Most characters of a parser's message.
const MESSAGE_MAX: usize = 160;

/// The keys of the parts of a snapshot that are read.
const KEYS: [&str; 11] = [
    "segments",
    "device",
    "blocks",
    "state",
    "address",
    "size",
    "requested_size",
    "device_traces",
    "action",
    "addr",
    "stream",
];

/// The parts of a snapshot that are read.
#[derive(Debug, Deserialize)]
struct Snapshot {
    #[serde(default)]
    segments: Vec<Segment>,
    device_traces: Vec<Vec<Event>>,
}

#[derive(Debug, Deserialize)]
struct Segment {
    #[serde(default)]
    device: usize,
    #[serde(default)]
    blocks: Vec<Block>,
}

#[derive(Debug, Deserialize)]
struct Block {
    state: String,
    #[serde(default)]
    address: Option<u64>,
    size: u64,
    #[serde(default)]
    requested_size: Option<u64>,
}

#[derive(Debug, Deserialize)]
struct Event {
    action: String,
    // Missing in events that are not about memory, such as running out of it.
    #[serde(default)]
    addr: u64,
    #[serde(default)]
    size: u64,
    #[serde(default)]
    stream: u64,
}

impl Trace {
    /// The trace of a snapshot in JSON: the events of the device that has most of them. Blocks that
    /// were live before the events begin, and at their end, are allocated first.
    ///
    /// # Errors
    /// The place of the defect, and its kind.
    pub fn of_snapshot_json(text: &str) -> Result<Trace, String> {
        let snapshot: Snapshot = serde_json::from_str(text).map_err(|e| {
            format!(
                "no memory snapshot: {}",
                shortened(&e.to_string(), MESSAGE_MAX)
            )
        })?;
        snapshot.trace()
    }

    /// Like [`Trace::of_snapshot_json`], of a pickle.
    ///
    /// # Errors
    /// The place of the defect, and its kind.
    pub fn of_snapshot_pickle(bytes: &[u8]) -> Result<Trace, String> {
        Trace::of_snapshot_json(&to_json(bytes, &KEYS)?).map_err(|error| {
            // A place in the JSON says nothing about the pickle.
            let message = error.split(" at line ").next();
            message.unwrap_or_default().to_string()
        })
    }
}

impl Snapshot {
    fn trace(&self) -> Result<Trace, String> {
        let most = self
            .device_traces
            .iter()
            .enumerate()
            .max_by_key(|(device, events)| (events.len(), std::cmp::Reverse(*device)));
        let Some((device, events)) = most.filter(|(_, events)| !events.is_empty()) else {
            return Err("the snapshot has no events: its history was not recorded".into());
        };
        let mut log = Vec::new();
        let mut place = Vec::new();
        let mut seen = HashSet::new();
        for (at, event) in events.iter().enumerate() {
            let Event {
                addr: address,
                size: bytes,
                stream,
                ..
            } = *event;
            log.push(match &*event.action {
                "alloc" => Logged::Alloc {
                    address,
                    bytes,
                    stream,
                },
                // Between its request and its completion, streams may still be at work on it.
                "free_completed" => Logged::Free { address, bytes },
                _ => continue,
            });
            place.push(at);
            seen.insert(address);
        }
        // Blocks in use that no event mentions were live the whole time.
        let blocks = self
            .segments
            .iter()
            .filter(|s| s.device == device)
            .flat_map(|s| &s.blocks);
        let there = blocks.filter(|b| {
            b.state == "active_allocated"
                && b.address.is_some_and(|address| !seen.contains(&address))
        });
        let there: Vec<u64> = there.map(|b| b.requested_size.unwrap_or(b.size)).collect();
        trace(&log, Before::Something, &there).map_err(|(at, what)| match place.get(at) {
            Some(at) => format!("event {at} of device {device}: {what}"),
            None => what,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::super::Op;
    use super::*;
    use slabwise_pool::Stream;

    const SNAPSHOT: &str = r#"{
        "segments": [{"device": 1, "address": 1048576, "total_size": 2097152, "blocks": [
            {"address": 1048576, "size": 512, "requested_size": 100, "state": "active_allocated", "frames": []},
            {"address": 1049088, "size": 512, "requested_size": 400, "state": "active_allocated", "frames": []},
            {"address": 1049600, "size": 2096128, "requested_size": 0, "state": "inactive", "frames": []}]}],
        "device_traces": [[], [
            {"action": "segment_alloc", "addr": 1048576, "size": 2097152, "stream": 0, "frames": []},
            {"action": "alloc", "addr": 1049088, "size": 400, "stream": 7, "time_us": 1, "frames": [{"name": "f", "filename": "a.py", "line": 3}]},
            {"action": "free_requested", "addr": 1050000, "size": 30, "stream": 0},
            {"action": "free_completed", "addr": 1050000, "size": 30, "stream": 0},
            {"action": "oom", "size": 99, "device_free": 3}]],
        "allocator_settings": {}, "external_annotations": []}"#;

    #[test]
    fn events_and_earlier_allocations_make_the_trace() {
        let trace = Trace::of_snapshot_json(SNAPSHOT).expect("a snapshot");
        let on = |bytes| Op::Alloc {
            bytes,
            stream: Stream(0),
        };
        assert_eq!(trace.ops(), [on(100), on(30), on(400), Op::Free(1)]);
    }

    #[test]
    fn a_pickle_says_the_same() {
        let value: serde_json::Value = serde_json::from_str(SNAPSHOT).expect("JSON");
        for proto in [
            serde_pickle::SerOptions::new(),
            serde_pickle::SerOptions::new().proto_v2(),
        ] {
            let pickle = serde_pickle::to_vec(&value, proto).expect("plain data");
            assert_eq!(
                Trace::of_snapshot_pickle(&pickle),
                Trace::of_snapshot_json(SNAPSHOT)
            );
        }
    }

    #[test]
    fn wrong_snapshots_say_where() {
        let wrong = |text: &str, says: &str| {
            let error = Trace::of_snapshot_json(text).expect_err(text);
            assert!(error.contains(says), "{error}");
        };
        wrong(r#"{"segments": []}"#, "device_traces");
        wrong(r#"{"device_traces": [[]]}"#, "no events");
        wrong(r#"{"device_traces": [[{"addr": 1}]]}"#, "action");
        wrong(
            r#"{"device_traces": [[{"action": "alloc", "addr": 1, "size": -1}]]}"#,
            "-1",
        );
        let twice = r#"{"action": "alloc", "addr": 1, "size": 1}"#;
        wrong(
            &format!(r#"{{"device_traces": [[{twice},{twice}]]}}"#),
            "event 1 of device 0",
        );
        assert!(Trace::of_snapshot_pickle(b"}.").is_err_and(|e| e.contains("device_traces")));
    }
}
