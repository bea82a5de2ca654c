//! A pool of a CUDA device's memory, over a driver without a device.

use slabwise_cuda::fake::FakeDriver;

use super::*;
use crate::backend::{self, Backend};
use crate::device::Device;
use crate::error::Error;
use crate::memory::{Handle, MemoryConfig, OutOfMemory, Policy, Pool, TagId};

const INVALID_VALUE: i32 = 1;
const REFUSED: i32 = 2;
/// The bytes of a page of the driver.
const PAGE: u64 = 2 << 20;
/// Policies that cut blocks.
const CUTTING: [Policy; 3] = [Policy::Tlsf, Policy::Bfc, Policy::Vmm];

/// A device and a pool of so many bytes at most, whose memory is not preallocated.
fn open(policy: Policy, limit: u64) -> (Box<dyn Backend>, Pool) {
    let config = MemoryConfig {
        limit: Some(limit),
        preallocate: Some(false),
        ..MemoryConfig::with_policy(policy)
    };
    let mut backend = backend::open(Device::Cuda(0)).expect("it is there");
    backend
        .configure(&config)
        .expect("settings that make sense");
    (
        backend,
        Pool::new(&config).expect("settings that make sense"),
    )
}

/// Takes a block and fills it with a byte.
fn take(
    (backend, pool): &mut (Box<dyn Backend>, Pool),
    bytes: u64,
    byte: u8,
) -> Result<Handle, Box<OutOfMemory>> {
    let handle = pool.allocate(backend.source(), bytes, Stream::default(), TagId::default())?;
    let region = pool.region(handle).expect("it is in use");
    backend.fill(&region, byte).expect("it is memory");
    Ok(handle)
}

fn give((backend, pool): &mut (Box<dyn Backend>, Pool), handle: Handle) {
    pool.free(backend.source(), handle).expect("it is in use");
}

/// Asserts that a block holds nothing but this byte.
fn assert_holds((backend, pool): &(Box<dyn Backend>, Pool), handle: Handle, byte: u8) {
    let region = pool.region(handle).expect("it is in use");
    let full = backend.map_read(&region, |memory, region| {
        memory.bytes(region).iter().all(|b| *b == byte)
    });
    assert!(
        full.expect("it is memory"),
        "{region:?} is not full of {byte}"
    );
}

#[test]
fn the_driver_sees_the_bytes_that_the_pool_counts() {
    let Some(driver) = FakeDriver::install() else {
        return;
    };
    let before = driver.get("live_bytes");
    for policy in CUTTING {
        let mut own = open(policy, 10 * PAGE);
        let mut held: Vec<(Handle, u8)> = Vec::new();
        let (mut state, mut refused) = (7u64, 0);
        for turn in 0..250u32 {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            let draw = state >> 33;
            let byte = turn as u8;
            if draw % 5 < 3 || held.is_empty() {
                let bytes =
                    [300, 5_000, 200_000, 700_000, 3 << 20][(draw / 5) as usize % 5] + draw % 1000;
                match take(&mut own, bytes, byte) {
                    Ok(handle) => held.push((handle, byte)),
                    Err(_) => refused += 1,
                }
            } else {
                let (handle, byte) = held.swap_remove(draw as usize % held.len());
                assert_holds(&own, handle, byte);
                give(&mut own, handle);
            }
            if turn % 40 == 39 {
                own.1.empty_cache(own.0.source());
            }
            let counted = own.1.statistics().pool_bytes;
            assert_eq!(
                (driver.get("live_bytes") - before) as u64,
                counted,
                "{policy}, turn {turn}"
            );
            assert!(counted <= 10 * PAGE);
        }
        assert!(
            refused > 0 && held.len() > 5,
            "{policy}: the limit was met {refused} times, {} are held",
            held.len()
        );
        held.iter()
            .for_each(|&(handle, byte)| assert_holds(&own, handle, byte));
        held.drain(..)
            .for_each(|(handle, _)| give(&mut own, handle));
        own.1.empty_cache(own.0.source());
        assert_eq!(
            (driver.get("live_bytes"), own.1.statistics().pool_bytes),
            (before, 0),
            "{policy}"
        );
    }
}

/// Blocks of a pool, and the byte that each is filled with.
type Blocks = Vec<(Handle, u8)>;

/// A pool with every other page in use, up to its limit.
fn in_pieces(policy: Policy) -> ((Box<dyn Backend>, Pool), Blocks) {
    let mut own = open(policy, 10 * PAGE);
    let all: Vec<Handle> = (0..10)
        .map(|byte| take(&mut own, PAGE, byte).expect("room"))
        .collect();
    let (kept, gone): (Vec<_>, Vec<_>) = all
        .into_iter()
        .zip(0u8..)
        .partition(|(_, byte)| byte % 2 == 0);
    gone.into_iter()
        .for_each(|(handle, _)| give(&mut own, handle));
    (own, kept)
}

#[test]
fn free_pages_in_pieces_are_mapped_together_without_a_copy() {
    let Some(driver) = FakeDriver::install() else {
        return;
    };
    let (mut own, kept) = in_pieces(Policy::Vmm);
    let (copied, live) = (driver.get("copied_bytes"), driver.get("live_bytes"));
    let whole = take(&mut own, 4 * PAGE, 99).expect("as much is free");
    assert_eq!(
        (driver.get("copied_bytes"), driver.get("live_bytes")),
        (copied, live)
    );
    let statistics = own.1.statistics();
    assert_eq!(
        (statistics.defrags, statistics.defrag_bytes, statistics.ooms),
        (1, 0, 0)
    );
    // The last of the free pages is before the new ones, so that it is not moved, or all four are.
    assert!(
        (3 * PAGE..=4 * PAGE).contains(&statistics.remapped_bytes),
        "{statistics:?}"
    );
    assert_holds(&own, whole, 99);
    kept.iter()
        .for_each(|&(handle, byte)| assert_holds(&own, handle, byte));
    drop(own);
    // Without moving pages, bytes are copied.
    let (mut own, kept) = in_pieces(Policy::Tlsf);
    let copied = driver.get("copied_bytes");
    let whole = take(&mut own, 4 * PAGE, 99).expect("as much is free");
    driver.get("copied_bytes");
    assert_holds(&own, whole, 99);
    assert!(
        driver.get("copied_bytes") - copied >= 2 * PAGE as i64
            && own.1.statistics().defrag_bytes > 0
    );
    kept.iter()
        .for_each(|&(handle, byte)| assert_holds(&own, handle, byte));
}

#[test]
fn requests_that_the_driver_refuses_are_retried_and_change_no_block() {
    let Some(driver) = FakeDriver::install() else {
        return;
    };
    let before = driver.get("live_bytes");
    for call in ["cuMemCreate", "cuMemMap", "cuMemSetAccess"] {
        for policy in CUTTING {
            let mut own = open(policy, 10 * PAGE);
            let first = take(&mut own, PAGE, 1).expect("room");
            driver.fail(call, 1, REFUSED);
            let second = take(&mut own, 3 * PAGE, 2).expect("the ladder asks again");
            [(first, 1), (second, 2)]
                .iter()
                .for_each(|&(handle, byte)| assert_holds(&own, handle, byte));
            assert_eq!(
                (driver.get("live_bytes") - before) as u64,
                own.1.statistics().pool_bytes,
                "{policy}, {call}"
            );
        }
    }
    for call in ["cuMemMap", "cuMemSetAccess"] {
        let (mut own, kept) = in_pieces(Policy::Vmm);
        let live = driver.get("live_bytes");
        driver.fail(call, if call == "cuMemMap" { 2 } else { 0 }, INVALID_VALUE);
        // Nothing was moved; later retry steps continue, with the same pages or by copies.
        let whole = take(&mut own, 4 * PAGE, 99).expect("as much is free");
        let statistics = own.1.statistics();
        assert!(
            statistics.defrags == 1 && statistics.retries > 1,
            "{call}: {statistics:?}"
        );
        assert_eq!(
            (driver.get("live_bytes"), statistics.pool_bytes),
            (live, 10 * PAGE),
            "{call}"
        );
        assert_holds(&own, whole, 99);
        kept.iter()
            .for_each(|&(handle, byte)| assert_holds(&own, handle, byte));
        give(&mut own, whole);
        kept.into_iter()
            .for_each(|(handle, _)| give(&mut own, handle));
        let all = take(&mut own, 10 * PAGE, 3).expect("all of it is one block again");
        assert_holds(&own, all, 3);
    }
    assert_eq!(driver.get("live_bytes"), before);
}

#[test]
fn a_device_that_maps_no_pages_gives_arenas_and_has_no_such_allocator() {
    let Some(driver) = FakeDriver::install() else {
        return;
    };
    let refused = |config: &MemoryConfig| {
        let mut backend = backend::open(Device::Cuda(0)).expect("it is there");
        match backend.configure(config) {
            Err(Error::Device { device, why }) => {
                assert!(
                    device == "cuda:0" && why.contains("SLABWISE_ALLOCATOR"),
                    "{device}: {why}"
                );
                why
            }
            other => panic!("{other:?}"),
        }
    };
    let vmm = MemoryConfig::with_policy(Policy::Vmm);
    let ahead = refused(&MemoryConfig {
        preallocate: Some(true),
        ..vmm.clone()
    });
    assert!(ahead.contains("nothing is left to map"), "{ahead}");
    // The first session has preallocated all memory.
    let mut first = backend::open(Device::Cuda(0)).expect("it is there");
    let taken = first.reserve(1000, "something").expect("room");
    assert!(refused(&vmm).contains("another session"));
    // Its pool takes arenas from that memory.
    let pool = Pool::new(&MemoryConfig::default()).expect("settings that make sense");
    let live = driver.get("live_bytes");
    let handle = pool
        .allocate(first.source(), PAGE, Stream::default(), TagId::default())
        .expect("room");
    assert_eq!(driver.get("live_bytes"), live);
    pool.free(first.source(), handle).expect("it is in use");
    first.release(taken.arena);
    drop((first, pool));
    driver.set("maps_pages", 0);
    assert!(refused(&vmm).contains("this device cannot"));
    let before = driver.get("live_bytes");
    for policy in [Policy::Tlsf, Policy::Bfc, Policy::Platform] {
        let mut own = open(policy, 10 * PAGE);
        let handles =
            [1, 2, 3].map(|byte| take(&mut own, u64::from(byte) * PAGE, byte).expect("room"));
        handles
            .iter()
            .zip(1..)
            .for_each(|(&handle, byte)| assert_holds(&own, handle, byte));
        assert_eq!(
            (driver.get("live_bytes") - before) as u64,
            own.1.statistics().pool_bytes,
            "{policy}"
        );
        handles
            .into_iter()
            .for_each(|handle| give(&mut own, handle));
        own.1.empty_cache(own.0.source());
        assert_eq!(driver.get("live_bytes"), before, "{policy}");
    }
}
