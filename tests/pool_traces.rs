//! The reserved bytes of the default pool against the lower bound of traces of real programs, their
//! peak of live bytes.
#![cfg(feature = "profiles")]

use std::path::Path;

use slabwise::memory::replay::{Replay, Trace};
use slabwise::memory::{MemoryConfig, Policy};

/// Traces, and the best measured ratio of any common allocator: reserved ÷ peak live.
const TRACES: [(&str, f64); 4] = [
    ("somas_resnet50", 1.002),
    ("somas_pangu_2.6B", 1.112),
    ("iopddl_S_1", 1.007),
    ("iopddl_Y_1", 1.010),
];

fn read(name: &str) -> Trace {
    let file = format!("data/packing/idealloc/{name}.csv.gz");
    Trace::read_file(&Path::new(env!("CARGO_MANIFEST_DIR")).join(file)).expect("a trace")
}

fn replay(trace: &Trace, capacity: Option<u64>) -> Replay {
    trace
        .run(&MemoryConfig::with_policy(Policy::Tlsf), capacity)
        .expect("room for the trace")
}

#[test]
fn the_default_pool_reserves_little_more_than_live_bytes() {
    for (name, most) in TRACES {
        let trace = read(name);
        let replay = replay(&trace, None);
        let ratio = replay.statistics.peak_pool_bytes as f64 / replay.peak_live_bytes as f64;
        assert!((1.0..=most).contains(&ratio), "{name}: {ratio}");
        assert_eq!(
            replay.statistics.bytes_in_use, 0,
            "{name}: everything was freed"
        );
    }
}

#[test]
fn two_percent_above_the_peak_suffice() {
    for (name, _) in TRACES {
        let trace = read(name);
        let replay = replay(&trace, Some(trace.peak_live_bytes() * 102 / 100));
        assert!(
            replay.statistics.defrags <= 10,
            "{name}: {} defragmentations",
            replay.statistics.defrags
        );
        assert_eq!(
            (replay.statistics.ooms, replay.statistics.driver_allocs),
            (0, 1),
            "{name}"
        );
    }
}
