//! Tests of replays under all policies.

use slabwise_pool::{MemoryConfig, Policy};

use super::Trace;

/// The table of lifetimes as a trace.
fn trace(rows: &str) -> Trace {
    Trace::of_bytes(format!("id,lower,upper,size\n{rows}").as_bytes()).unwrap()
}

fn config(policy: Policy) -> MemoryConfig {
    MemoryConfig {
        policy: Some(policy),
        ..MemoryConfig::default()
    }
}

#[test]
fn blocks_as_large_as_half_the_device_are_replayed() {
    let bytes = 1u64 << 59;
    for policy in Policy::ALL {
        let replay = trace(&format!("a,0,1,{bytes}")).run(&config(policy), None);
        assert_eq!(replay.unwrap().peak_live_bytes, bytes, "{policy}");
    }
}
