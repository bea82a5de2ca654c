use std::time::Duration;

use super::*;
use crate::heap::Engine;
use crate::{FakeDevice, Help};

mod audit;
mod behaviour;
mod controls;
mod properties;

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const S0: Stream = Stream(0);
const S1: Stream = Stream(1);
/// Policies that cut blocks.
const CUTTING: [Policy; 3] = [Policy::Tlsf, Policy::Bfc, Policy::Vmm];

/// A pool on all of a device.
fn whole(policy: Policy) -> MemoryConfig {
    MemoryConfig {
        policy: Some(policy),
        fraction: Some(1.0),
        preallocate: Some(false),
        ..MemoryConfig::default()
    }
}

fn open(config: &MemoryConfig) -> Pool {
    Pool::new(config).expect("settings that make sense")
}

fn take(pool: &Pool, mut device: &FakeDevice, bytes: u64) -> Result<Handle, Box<OutOfMemory>> {
    pool.allocate(&mut device, bytes, S0, TagId::default())
}

fn give(pool: &Pool, mut device: &FakeDevice, handle: Handle) {
    pool.free(&mut device, handle).expect("a block in use");
}
