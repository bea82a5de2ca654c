//! Tests of replays under all policies.

use slabwise_planner::pack::random::Random;
use slabwise_pool::{MemoryConfig, Policy, Stream};

use super::{Op, Trace};

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

/// Time quadratic in the number of arenas would be minutes in a debug build.
#[test]
fn policies_with_an_arena_for_each_block_replay_many_blocks() {
    const LIVE: u32 = 100_000;
    let alloc = Op::Alloc {
        bytes: 1 << 20,
        stream: Stream(0),
    };
    let mut ops = vec![alloc; LIVE as usize];
    for freed in 0..LIVE {
        ops.extend([Op::Free(freed), alloc]);
    }
    let trace = Trace::new(ops).unwrap();
    for policy in [Policy::Platform, Policy::Async] {
        let replay = trace.run(&config(policy), None).unwrap();
        assert_eq!(replay.peak_live_bytes, u64::from(LIVE) << 20, "{policy}");
    }
}

/// Looking for blocks to move takes time for each block, and saves little for a small request.
#[test]
fn no_blocks_move_for_requests_much_smaller_than_the_pool() {
    const LIVE: u64 = 4_000;
    let mut random = Random(7);
    let (mut ops, mut live, mut allocations) = (Vec::new(), Vec::new(), 0);
    for _ in 0..5 * LIVE {
        if (live.len() as u64) < LIVE {
            ops.push(Op::Alloc {
                bytes: (64 << 10) + random.below(960 << 10),
                stream: Stream(0),
            });
            live.push(allocations);
            allocations += 1;
        } else {
            for _ in 0..random.below(8) {
                let at = random.below(live.len() as u64) as usize;
                ops.push(Op::Free(live.swap_remove(at)));
            }
        }
    }
    let trace = Trace::new(ops).unwrap();
    for policy in [Policy::Tlsf, Policy::Vmm] {
        let statistics = trace.run(&config(policy), None).unwrap().statistics;
        assert_eq!(statistics.defrags, 0, "{policy}");
    }
}
