//! Exported files are read back: by the readers of traces, by a decoder of protocol buffers, as
//! JSON.

use std::io::Read;
use std::time::Duration;

use prost::Message;
use serde_json::Value;

use super::pprof::Profile;
use super::*;
use crate::replay::{Op, Trace};
use slabwise_pool::{FakeDevice, Handle, MemoryConfig, Policy, TagId};

const KIB: u64 = 1 << 10;

/// A pool that has recorded allocations with names, frees, a failure and a move.
fn lived_in() -> Pool {
    let device = FakeDevice::new(64 * KIB).with_preallocation(true);
    let config = MemoryConfig {
        fraction: Some(1.0),
        ..MemoryConfig::with_policy(Policy::Bfc)
    };
    let pool = Pool::new(&config).expect("settings that make sense");
    pool.record(usize::MAX);
    let here = std::panic::Location::caller();
    let tag = |name: &str| {
        pool.tag(Tag {
            name: name.into(),
            layer: "body/conv".into(),
            location: Some(here),
        })
    };
    let take = |bytes, tag: TagId| pool.allocate(&mut &device, bytes, Stream(0), tag);
    let blocks: Vec<Handle> = (0..8)
        .map(|k| take(8 * KIB - 100, tag(["even", "odd"][k % 2])).expect("room"))
        .collect();
    device.advance(Duration::from_micros(5));
    for one in blocks.iter().step_by(2) {
        pool.free(&mut &device, *one).expect("in use");
    }
    take(64 * KIB, tag("too much")).expect_err("half of it is in use");
    take(20 * KIB, tag("large")).expect("room, once blocks are moved");
    assert_eq!(pool.statistics().defrags, 1);
    pool
}

#[test]
fn snapshots_are_read_back() {
    let pool = lived_in();
    let json = snapshot_json(&pool).expect("written");
    let trace = Trace::of_snapshot_json(&json).expect("read");
    assert_eq!(
        Trace::of_snapshot_pickle(&snapshot_pickle(&pool).expect("written")),
        Ok(trace.clone())
    );
    // Moves appear as frees and allocations; the other events are the same.
    let happened = Trace::of_events(&pool.events()).expect("a pool's events");
    assert!(trace.ops().len() > happened.ops().len());
    assert_eq!(trace.peak_live_bytes(), happened.peak_live_bytes());
    let net = |trace: &Trace| {
        trace
            .ops()
            .iter()
            .map(|op| if let Op::Alloc { .. } = op { 1 } else { -1 })
            .sum::<i64>()
    };
    assert_eq!(net(&trace), net(&happened));

    let value: Value = serde_json::from_str(&json).expect("JSON");
    let segments = value["segments"].as_array().expect("a list");
    let sum = |key: &str| {
        segments
            .iter()
            .map(|s| s[key].as_u64().expect("bytes"))
            .sum::<u64>()
    };
    let s = pool.statistics();
    assert_eq!(
        (sum("total_size"), sum("allocated_size")),
        (s.pool_bytes, s.bytes_in_use)
    );
    assert_eq!(
        sum("requested_size"),
        s.bytes_in_use - s.rounding_waste_bytes
    );
    for segment in segments {
        let mut at = segment["address"].as_u64();
        for block in segment["blocks"].as_array().expect("a list") {
            assert_eq!(block["address"].as_u64(), at, "blocks follow each other");
            at = at.map(|at| at + block["size"].as_u64().expect("bytes"));
            let frames = block["frames"].as_array().expect("a list");
            assert_eq!(block["state"] == "inactive", frames.is_empty());
            assert!(frames.iter().all(|f| {
                f["filename"]
                    .as_str()
                    .is_some_and(|name| name.ends_with("tests.rs"))
            }));
        }
    }
    let actions: Vec<&str> = value["device_traces"][0]
        .as_array()
        .expect("a list")
        .iter()
        .filter_map(|e| e["action"].as_str())
        .collect();
    assert!(
        [
            "segment_alloc",
            "alloc",
            "free_requested",
            "free_completed",
            "oom"
        ]
        .iter()
        .all(|action| actions.contains(action))
    );
}

#[test]
fn heap_profiles_add_up() {
    let pool = lived_in();
    let packed = heap_profile(&pool, Duration::from_secs(7)).expect("written");
    let mut bytes = Vec::new();
    flate2::read::GzDecoder::new(&packed[..])
        .read_to_end(&mut bytes)
        .expect("gzip");
    let profile = Profile::decode(&bytes[..]).expect("a profile");
    let text = |index: i64| &*profile.string_table[index as usize];
    let types: Vec<(&str, &str)> = profile
        .sample_type
        .iter()
        .map(|t| (text(t.kind), text(t.unit)))
        .collect();
    assert_eq!(types, [("allocations", "count"), ("space", "bytes")]);
    assert_eq!((text(0), profile.time_nanos), ("", 7_000_000_000));
    let sum = |at: usize| profile.sample.iter().map(|s| s.value[at]).sum::<i64>();
    assert_eq!((sum(0), sum(1)), (5, pool.statistics().bytes_in_use as i64));
    let stacks: Vec<Vec<&str>> = profile
        .sample
        .iter()
        .map(|s| {
            s.location_id
                .iter()
                .map(|id| text(profile.function[*id as usize - 1].name))
                .collect()
        })
        .collect();
    assert!(
        stacks.contains(&vec!["odd", "body/conv", "body"])
            && stacks.contains(&vec!["large", "body/conv", "body"]),
        "{stacks:?}"
    );
    for location in &profile.location {
        assert_eq!(location.line[0].function_id, location.id);
    }
}

#[test]
fn traces_close_only_events_that_they_opened() {
    let pool = lived_in();
    let value: Value = serde_json::from_str(&trace_events_json(&pool)).expect("JSON");
    let events = value["traceEvents"].as_array().expect("a list");
    let of = |ph: &str| events.iter().filter(|e| e["ph"] == ph).collect::<Vec<_>>();
    let ids = |ph: &str| {
        of(ph)
            .iter()
            .map(|e| e["id"].as_u64().expect("a number"))
            .collect::<Vec<_>>()
    };
    assert_eq!((ids("b").len(), ids("e").len()), (9, 4));
    assert!(ids("e").iter().all(|id| ids("b").contains(id)));
    let last = of("C")
        .last()
        .map(|e| (e["args"]["in use"].as_u64(), e["args"]["reserved"].as_u64()));
    assert_eq!(
        last,
        Some((Some(pool.statistics().bytes_in_use), Some(64 * KIB)))
    );
    let names: Vec<&str> = of("i").iter().filter_map(|e| e["name"].as_str()).collect();
    assert!(names.contains(&"out of memory") && names.contains(&"moved"));
    let times: Vec<f64> = events.iter().filter_map(|e| e["ts"].as_f64()).collect();
    assert!(times.is_sorted() && times.last() == Some(&5.0));
}
