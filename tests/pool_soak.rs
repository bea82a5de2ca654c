//! Threads on one pool, over a device whose driver fails now and then: no block is lost or shared,
//! and all are counted.
//!
//! Short here; long with `SLABWISE_SOAK_OPS=10000000 cargo test --release --test pool_soak`.

#[path = "support/splitmix.rs"]
mod splitmix;

use std::sync::atomic::{AtomicU64, Ordering};

use slabwise::memory::{FakeDevice, Handle, Lease, MemoryConfig, Policy, Pool, Stream, Tag, TagId};
use slabwise_kernels::memory::Region;
use splitmix::Rng;

const THREADS: u64 = 4;
const MIB: u64 = 1 << 20;

/// A block, and the mark that its owner wrote at both of its ends.
struct Owned {
    handle: Handle,
    bytes: u64,
    mark: u64,
}

/// The two ends of a block, of eight bytes each if the block is large enough.
fn ends(region: Region) -> impl Iterator<Item = Region> {
    let ends = [
        region.offset,
        region.offset + region.bytes.saturating_sub(8),
    ]
    .map(|offset| Region {
        offset,
        bytes: 8,
        ..region
    });
    ends.into_iter().filter(move |_| region.bytes >= 16)
}

fn sign(pool: &Pool, device: &FakeDevice, one: &Owned) {
    let region = pool.pin(one.handle).expect("a block in use");
    assert_eq!(region.bytes, one.bytes);
    ends(region).for_each(|end| device.write(end, &one.mark.to_le_bytes()));
    pool.unpin(one.handle).expect("a block in use");
}

fn verify(pool: &Pool, device: &FakeDevice, one: &Owned) {
    let region = pool.pin(one.handle).expect("a block in use");
    ends(region).for_each(|end| {
        assert_eq!(
            device.read(end),
            one.mark.to_le_bytes(),
            "somebody wrote into {region:?}"
        )
    });
    pool.unpin(one.handle).expect("a block in use");
}

/// The work of one thread; returns the blocks that it still owns.
fn work(
    thread: u64,
    ops: u64,
    pool: &Pool,
    mut device: &FakeDevice,
    failures: &AtomicU64,
) -> Vec<Owned> {
    let mut dice = Rng(thread);
    let mut owned: Vec<Owned> = Vec::new();
    let mut dropped: Vec<Lease> = Vec::new();
    let tag = pool.tag(Tag::named(&format!("thread {thread}")));
    for op in 0..ops {
        match dice.bits() % 100 {
            0..60 => {
                let bytes = if dice.below(4) == 0 {
                    dice.bits() % MIB
                } else {
                    dice.bits() % 4096
                };
                match pool.allocate(
                    &mut device,
                    bytes,
                    Stream(thread as u16),
                    if op % 2 == 0 { tag } else { TagId::default() },
                ) {
                    Ok(handle) => {
                        let one = Owned {
                            handle,
                            bytes,
                            mark: thread << 48 | op,
                        };
                        sign(pool, device, &one);
                        owned.push(one);
                    }
                    Err(report) => {
                        assert_eq!(report.requested, bytes);
                        failures.fetch_add(1, Ordering::Relaxed);
                        // As a program would, frees half of the blocks.
                        for one in owned.drain(owned.len() / 2..) {
                            verify(pool, device, &one);
                            pool.free(&mut device, one.handle).expect("a block in use");
                        }
                    }
                }
            }
            60..94 if !owned.is_empty() => {
                let one = owned.swap_remove(dice.below(owned.len()));
                verify(pool, device, &one);
                if dice.below(3) == 0 {
                    dropped.push(pool.lease(one.handle));
                } else {
                    pool.free(&mut device, one.handle).expect("a block in use");
                    assert!(pool.free(&mut device, one.handle).is_err(), "freed twice");
                }
            }
            94 => dropped.clear(),
            95 => drop(pool.submit(Stream(thread as u16))),
            96 => device.fail(dice.bits() % 3, dice.bits() % 4),
            97 if dice.below(20) == 0 => drop(pool.empty_cache(&mut device)),
            98 if dice.below(20) == 0 => drop(pool.defragment(&mut device, 4 * MIB)),
            99 => drop(pool.end_step(&mut device)),
            _ => {}
        }
    }
    owned
}

#[test]
fn nothing_is_lost_or_shared() {
    let ops: u64 = std::env::var("SLABWISE_SOAK_OPS")
        .ok()
        .and_then(|n| n.parse().ok())
        .unwrap_or(40_000);
    for (policy, share) in [
        (Policy::Tlsf, 2),
        (Policy::Vmm, 4),
        (Policy::Bfc, 8),
        (Policy::Naive, 8),
    ] {
        let device = FakeDevice::new(48 * MIB)
            .with_bytes()
            .with_pages(64 << 10)
            .with_preallocation(false);
        let config = MemoryConfig {
            fraction: Some(1.0),
            idle_steps: Some(50),
            ..MemoryConfig::with_policy(policy)
        };
        let pool = Pool::new(&config).expect("settings that make sense");
        let failures = AtomicU64::new(0);
        let owned: Vec<Owned> = std::thread::scope(|threads| {
            let (pool, device, failures) = (&pool, &device, &failures);
            let all: Vec<_> = (0..THREADS)
                .map(|t| {
                    threads.spawn(move || work(t, ops / share / THREADS, pool, device, failures))
                })
                .collect();
            all.into_iter()
                .flat_map(|thread| thread.join().expect("a thread that does not panic"))
                .collect()
        });
        device.fail(0, 0);
        pool.wait_all(&mut &device);
        owned.iter().for_each(|one| verify(&pool, &device, one));

        // Counted again from the owners' blocks.
        let mut places: Vec<Region> = owned
            .iter()
            .map(|one| pool.region(one.handle).expect("in use"))
            .filter(|r| r.bytes > 0)
            .collect();
        places.sort_by_key(|r| (r.arena, r.offset));
        assert!(
            places.windows(2).all(|pair| !pair[0].overlaps(&pair[1])),
            "{policy}: two blocks overlap"
        );
        let (s, holders) = (pool.statistics(), pool.live_buffers());
        assert_eq!(holders.len(), owned.len(), "{policy}");
        assert_eq!(
            holders.iter().map(|h| h.bytes).sum::<u64>(),
            owned.iter().map(|o| o.bytes).sum::<u64>(),
            "{policy}"
        );
        assert_eq!(s.num_allocs - s.num_frees, owned.len() as u64, "{policy}");
        assert_eq!(
            s.cache_hits + s.cache_misses,
            s.num_allocs + s.ooms,
            "{policy}"
        );
        assert_eq!(
            (s.ooms, s.pool_bytes),
            (failures.into_inner(), device.reserved_bytes()),
            "{policy}"
        );
        assert!(
            s.pool_bytes <= s.peak_pool_bytes && s.peak_pool_bytes <= s.bytes_limit,
            "{policy}"
        );
        assert_eq!(
            pool.fragmentation().free_bytes + s.bytes_in_use,
            s.pool_bytes,
            "{policy}"
        );

        for one in owned {
            pool.free(&mut &device, one.handle).expect("in use");
        }
        pool.wait_all(&mut &device);
        pool.empty_cache(&mut &device);
        let s = pool.statistics();
        assert_eq!(
            (
                s.bytes_in_use,
                s.rounding_waste_bytes,
                s.pool_bytes,
                device.reserved_bytes()
            ),
            (0, 0, 0, 0),
            "{policy}: leaked"
        );
    }
}
