//! Reuse, moving, failing: the behaviour of a pool's blocks.

use slabwise_kernels::memory::Memory;

use super::audit::{Owned, audit, intact, pattern};
use super::*;

#[test]
fn freed_blocks_are_reused_without_a_call() {
    for policy in [
        Policy::Tlsf,
        Policy::Bfc,
        Policy::Naive,
        Policy::Round,
        Policy::Vmm,
    ] {
        let device = FakeDevice::new(64 * MIB).with_pages(2 * MIB);
        let pool = open(&whole(policy));
        for bytes in [0, 1, 100, 3000, 100 * KIB, 5 * MIB] {
            let first = take(&pool, &device, bytes).expect("room");
            let place = pool.region(first).expect("in use");
            give(&pool, &device, first);
            let calls = device.calls();
            let second = take(&pool, &device, bytes).expect("room");
            assert_eq!(
                (pool.region(second), device.calls()),
                (Ok(place), calls),
                "{policy}: {bytes} bytes"
            );
            assert_ne!(first, second);
            assert_eq!(pool.region(first), Err(NotInUse { handle: first }));
            give(&pool, &device, second);
        }
    }
}

#[test]
fn direct_policies_call_the_driver_for_everything() {
    for policy in [Policy::Unpooled, Policy::Platform, Policy::Async] {
        let device = FakeDevice::new(64 * MIB);
        let pool = open(&whole(policy));
        give(&pool, &device, take(&pool, &device, 1000).expect("room"));
        let calls = device.calls();
        for _ in 0..10 {
            give(&pool, &device, take(&pool, &device, 1000).expect("room"));
        }
        assert_eq!(device.calls(), calls + 20, "{policy}");
        assert_eq!(
            (device.reserved_bytes(), pool.statistics().pool_bytes),
            (0, 0)
        );
    }
    // `unpooled` delays the free until the stream is done; `platform` synchronizes the stream.
    for (policy, kept) in [(Policy::Unpooled, 1024), (Policy::Platform, 0)] {
        let device = FakeDevice::new(64 * MIB);
        device.hold(S0);
        let pool = open(&whole(policy));
        let block = take(&pool, &device, 1000).expect("room");
        let work = pool.submit(S0);
        give(&pool, &device, block);
        assert_eq!(device.reserved_bytes(), kept, "{policy}");
        device.complete(S0, work);
        pool.wait_all(&mut &device);
        assert_eq!(device.reserved_bytes(), 0, "{policy}");
    }
}

/// Blocks all over a device, every other one freed.
fn checkerboard(pool: &Pool, device: &FakeDevice, blocks: u64, bytes: u64) -> Vec<Owned> {
    let all: Vec<Owned> = (0..blocks)
        .map(|k| {
            let one = Owned {
                handle: take(pool, device, bytes).expect("room"),
                bytes,
                seed: k as u8,
            };
            device.write(pool.region(one.handle).expect("in use"), &pattern(&one));
            one
        })
        .collect();
    all.iter()
        .step_by(2)
        .for_each(|one| give(pool, device, one.handle));
    all.into_iter().skip(1).step_by(2).collect()
}

#[test]
fn a_checkerboard_is_full_without_moving_and_half_empty_with_it() {
    for policy in CUTTING {
        for paged in [true, false] {
            if policy == Policy::Vmm && !paged {
                continue;
            }
            let make = || {
                let device = FakeDevice::new(8 * MIB).with_bytes();
                if paged {
                    device.with_pages(64 * KIB)
                } else {
                    device
                }
            };
            let (device, pool) = (
                make(),
                open(&MemoryConfig {
                    defragment: Some(false),
                    preallocate: Some(!paged),
                    ..whole(policy)
                }),
            );
            let kept = checkerboard(&pool, &device, 64, 128 * KIB);
            let report = take(&pool, &device, 3 * MIB).expect_err("only pieces are free");
            assert_eq!(
                (
                    report.fragmentation.free_bytes,
                    report.fragmentation.largest_bytes
                ),
                (4 * MIB, 128 * KIB),
                "{policy}"
            );
            assert!(report.help.contains(&Help::Defragment), "{report}");
            audit(&pool, &device, &kept, true);

            let (device, pool) = (
                make(),
                open(&MemoryConfig {
                    preallocate: Some(!paged),
                    ..whole(policy)
                }),
            );
            let mut kept = checkerboard(&pool, &device, 64, 128 * KIB);
            let handle = take(&pool, &device, 3 * MIB).expect("room, once blocks are moved");
            let large = Owned {
                handle,
                bytes: 3 * MIB,
                seed: 99,
            };
            device.write(pool.region(handle).expect("in use"), &pattern(&large));
            kept.push(large);
            audit(&pool, &device, &kept, true);
            intact(&pool, &device, &kept);
            let (s, copied) = (pool.statistics(), device.copies().1);
            assert_eq!(s.defrag_bytes, copied, "{policy}: what was copied is told");
            assert_eq!((s.defrags, s.ooms), (1, 0));
            // Pages move without copies.
            assert_eq!(
                copied == 0,
                policy == Policy::Vmm && paged,
                "{policy}: {copied} bytes"
            );
        }
    }
}

#[test]
fn a_checkerboard_on_host_memory_keeps_its_bytes() {
    let mut memory = Memory::new();
    let config = MemoryConfig {
        limit: Some(8 * MIB),
        ..MemoryConfig::with_policy(Policy::Tlsf)
    };
    let pool = open(&config);
    let take = |memory: &mut Memory, bytes| pool.allocate(memory, bytes, S0, TagId::default());
    let blocks: Vec<Handle> = (0..64)
        .map(|_| take(&mut memory, 128 * KIB).expect("room"))
        .collect();
    for (k, &block) in blocks.iter().enumerate() {
        let region = pool.region(block).expect("in use");
        memory
            .bytes_mut(&region)
            .iter_mut()
            .enumerate()
            .for_each(|(i, byte)| *byte = (i * 7 + k) as u8);
    }
    for &block in blocks.iter().step_by(2) {
        pool.free(&mut memory, block).expect("in use");
    }
    assert!(take(&mut memory, 5 * MIB).is_err(), "more than is free");
    take(&mut memory, 4 * MIB).expect("all that is free");
    for (k, &block) in blocks.iter().enumerate().skip(1).step_by(2) {
        let region = pool.region(block).expect("in use");
        assert!(
            memory
                .bytes(&region)
                .iter()
                .enumerate()
                .all(|(i, byte)| *byte == (i * 7 + k) as u8),
            "block {k} changed"
        );
    }
    assert!(pool.statistics().defrag_bytes > 0);
}

/// A stream's work in a page of small blocks is ordered before a copy of the page only if the copy
/// is on that stream.
#[test]
fn pages_of_several_streams_stay_where_they_are() {
    for (freed, alone) in [(false, false), (true, false), (false, true)] {
        let device = FakeDevice::new(2 * MIB);
        [S0, S1].iter().for_each(|stream| device.hold(*stream));
        let pool = open(&MemoryConfig {
            preallocate: Some(true),
            ..whole(Policy::Tlsf)
        });
        let on = |stream, bytes| {
            pool.allocate(&mut &device, bytes, stream, TagId::default())
                .expect("room")
        };
        // One page, and pieces of its size, of which those behind the first and the second are
        // free.
        let first = on(if alone { S1 } else { S0 }, 100);
        let second = on(S1, 100);
        let pieces: Vec<Handle> = (0..31).map(|_| on(S0, 64 * KIB)).collect();
        let work = pool.submit(S1);
        let places = [first, second].map(|handle| pool.region(handle).expect("in use"));
        [0, 2].iter().for_each(|&k| give(&pool, &device, pieces[k]));
        if freed {
            give(&pool, &device, second);
        }
        let large = pool.region(on(S0, 128 * KIB)).expect("in use");
        assert_eq!(pool.statistics().defrags, 1);
        if alone {
            // The page moves with its stream's work, for which the requester waits.
            assert!(pool.region(second) != Ok(places[1]) && (&mut &device).completed(S1) > work);
        } else {
            assert_eq!(pool.region(first), Ok(places[0]));
            assert!(
                !places.iter().any(|place| place.overlaps(&large)),
                "{large:?} where a stream is at work"
            );
        }
    }
}

#[test]
fn pinned_blocks_stay_and_the_report_lists_them() {
    let device = FakeDevice::new(8 * MIB).with_bytes();
    let pool = open(&MemoryConfig {
        preallocate: Some(true),
        ..whole(Policy::Tlsf)
    });
    let kept = checkerboard(&pool, &device, 64, 128 * KIB);
    let places: Vec<Region> = kept
        .iter()
        .map(|one| pool.pin(one.handle).expect("in use"))
        .collect();
    let report = take(&pool, &device, MIB).expect_err("nothing may move");
    assert!(
        report
            .help
            .iter()
            .any(|help| matches!(help, Help::Unpin { pinned_bytes } if *pinned_bytes == 4 * MIB)),
        "{report}"
    );
    assert!(
        kept.iter()
            .zip(&places)
            .all(|(one, place)| pool.region(one.handle) == Ok(*place))
    );
    // Pins count.
    pool.pin(kept[0].handle).expect("in use");
    kept.iter()
        .for_each(|one| pool.unpin(one.handle).expect("in use"));
    take(&pool, &device, MIB).expect("room, once most may move");
    assert_eq!(
        pool.region(kept[0].handle),
        Ok(places[0]),
        "pinned twice, unpinned once"
    );
    intact(&pool, &device, &kept);
}

#[test]
fn moving_has_a_rate() {
    let device = FakeDevice::new(8 * MIB);
    let pool = open(&MemoryConfig {
        defragment_rate: Some(0.0),
        preallocate: Some(true),
        ..whole(Policy::Tlsf)
    });
    // The size of the pool may be moved, and not a byte more.
    let mut failed = false;
    for _ in 0..20 {
        let blocks: Vec<Handle> = (0..64)
            .map_while(|_| take(&pool, &device, 128 * KIB).ok())
            .collect();
        blocks
            .iter()
            .step_by(2)
            .for_each(|one| give(&pool, &device, *one));
        match take(&pool, &device, 4 * MIB) {
            Ok(large) => give(&pool, &device, large),
            Err(report) => {
                assert!(report.help.contains(&Help::DefragmentRate), "{report}");
                failed = true;
            }
        }
        blocks
            .iter()
            .skip(1)
            .step_by(2)
            .for_each(|one| give(&pool, &device, *one));
    }
    assert!(failed && pool.statistics().defrag_bytes <= 8 * MIB);
}

#[test]
fn the_same_stream_reuses_at_once_and_others_when_it_is_done() {
    let device = FakeDevice::new(64 * MIB).with_pages(2 * MIB);
    device.hold(S0);
    device.hold(S1);
    let pool = open(&whole(Policy::Tlsf));
    let on = |stream| {
        pool.allocate(&mut &device, 2 * MIB, stream, TagId::default())
            .expect("room")
    };
    let first = on(S0);
    let place = pool.region(first);
    let work = pool.submit(S0);
    give(&pool, &device, first);
    let again = on(S0);
    assert_eq!(pool.region(again), place);
    give(&pool, &device, again);
    let other = on(S1);
    assert_ne!(pool.region(other), place, "stream 0 is not done");
    device.complete(S0, work);
    let other = on(S1);
    assert_eq!(pool.region(other), place);
}

#[test]
fn after_waiting_for_streams_the_pool_searches_again() {
    for policy in [
        Policy::Tlsf,
        Policy::Bfc,
        Policy::Naive,
        Policy::Round,
        Policy::Unpooled,
    ] {
        let device = FakeDevice::new(4 * MIB);
        device.hold(S0);
        let pool = open(&MemoryConfig {
            reserve: Some(0),
            ..whole(policy)
        });
        let block = take(&pool, &device, 3 * MIB)
            .or_else(|_| take(&pool, &device, 2 * MIB))
            .expect("room");
        pool.submit(S0);
        give(&pool, &device, block);
        // Only this memory is there, and stream 0 is still at work on it.
        let got = pool.allocate(&mut &device, 2 * MIB, S1, TagId::default());
        assert!(
            got.is_ok() || policy == Policy::Unpooled,
            "{policy}: {got:?}"
        );
    }
}

#[test]
fn failures_of_the_driver_are_survived() {
    for policy in Policy::ALL {
        for paged in [false, true] {
            let mut device = FakeDevice::new(64 * MIB).with_bytes();
            if paged {
                device = device.with_pages(64 * KIB);
            }
            let pool = open(&whole(policy));
            let mut owned = Vec::new();
            for k in 0..40u64 {
                device.fail(k % 3, k % 5);
                let bytes = (k * 7919) % (2 * MIB);
                if let Ok(handle) = take(&pool, &device, bytes) {
                    owned.push(Owned {
                        handle,
                        bytes,
                        seed: k as u8,
                    });
                }
                if k % 4 == 3 && !owned.is_empty() {
                    give(&pool, &device, owned.swap_remove(0).handle);
                }
                audit(&pool, &device, &owned, true);
            }
            device.fail(0, u64::MAX);
            take(&pool, &device, 63 * MIB).expect_err("so much was never taken from the driver");
            device.fail(0, 0);
            take(&pool, &device, MIB).expect("the pool goes on");
        }
    }
}

#[test]
fn the_report_names_the_holders_of_blocks() {
    let device = FakeDevice::new(10 * MIB).with_pages(64 * KIB);
    let pool = open(&whole(Policy::Tlsf));
    let here = std::panic::Location::caller();
    let tag = |name: &str| {
        pool.tag(Tag {
            name: name.into(),
            layer: "body/conv".into(),
            location: Some(here),
        })
    };
    for (name, mib) in [("columns", 4), ("weights", 3), ("mask", 1)] {
        pool.allocate(&mut &device, mib * MIB, S0, tag(name))
            .expect("room");
    }
    let report = pool
        .allocate(&mut &device, 4 * MIB, S0, tag("grad"))
        .expect_err("8 of 10 MiB are in use");
    assert_eq!(
        (report.requested, report.capacity, report.in_use),
        (4 * MIB, 10 * MIB, 8 * MIB)
    );
    let names: Vec<&str> = report.holders.iter().map(|h| &*h.tag.name).collect();
    assert_eq!(names, ["columns", "weights", "mask"]);
    assert_eq!(
        report.help,
        [Help::Limit(2 * MIB), Help::Batch(10.0 / 12.0)]
    );
    let text = report.to_string();
    for part in [
        "4.0 MiB for \"grad\"",
        "body/conv",
        "behaviour.rs",
        "8.0 MiB of 10.0 MiB",
        "columns",
        "83 % of the batch",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
    assert!(take(&pool, &device, u64::MAX).is_err_and(|report| report.requested == u64::MAX));
    take(&pool, &device, 2 * MIB).expect("the pool goes on");
}

#[test]
fn caches_of_the_program_are_dropped_before_more_is_taken() {
    let device = Arc::new(FakeDevice::new(8 * MIB));
    let pool = Arc::new(open(&whole(Policy::Tlsf)));
    let cached = pool.lease(take(&pool, &device, 6 * MIB).expect("room"));
    let mut cache = Some(cached);
    let (inner, on) = (pool.clone(), device.clone());
    pool.on_pressure(move || {
        if cache.take().is_some() {
            // Dropping is enough; the pool frees it at the next request.
            inner.wait_all(&mut &*on);
        }
    });
    take(&pool, &device, 5 * MIB).expect("what the cache held");
    assert_eq!(pool.statistics().driver_allocs, 1);
}

#[test]
fn the_first_request_opens_the_pool_and_others_wait() {
    let pool = open(&whole(Policy::Tlsf));
    let mut heap = pool.lock();
    let [mut first, mut second] =
        [100, 200].map(|bytes| heap.request(bytes, S0, 0).expect("a size there is"));
    assert!(matches!(heap.advance(&mut first), Next::Call(Call::Info)));
    assert!(matches!(heap.advance(&mut second), Next::Wait));
    heap.conclude(
        Some(&mut first),
        Call::Info,
        Outcome::Info(
            MemoryInfo {
                free: MIB,
                total: MIB,
            },
            false,
        ),
    );
    let Next::Call(call) = heap.advance(&mut second) else {
        panic!("the pool has no addresses yet")
    };
    assert!(
        matches!(call, Call::Range { .. }) && matches!(heap.advance(&mut first), Next::Wait),
        "asked for once"
    );
    heap.conclude(Some(&mut second), call, Outcome::Range(None));
    assert!(
        [first, second]
            .iter_mut()
            .all(|r| matches!(heap.advance(r), Next::Call(Call::Reserve { .. }))),
        "each for itself"
    );
}

#[test]
fn four_threads_pass_blocks_to_each_other() {
    let device = FakeDevice::new(256 * MIB).with_pages(2 * MIB).with_bytes();
    let pool = open(&whole(Policy::Tlsf));
    let (to, from) = std::sync::mpsc::sync_channel::<(Lease, u8, u64)>(64);
    let from = Mutex::new(from);
    std::thread::scope(|threads| {
        for thread in 0..2u8 {
            let (to, pool, device) = (to.clone(), &pool, &device);
            threads.spawn(move || {
                for k in 0..3000u64 {
                    let bytes = (k * 977 + u64::from(thread) * 31) % 40_000 + 1;
                    let handle = take(pool, device, bytes).expect("room");
                    let region = pool.pin(handle).expect("in use");
                    device.write(region, &vec![k as u8; bytes as usize]);
                    pool.unpin(handle).expect("in use");
                    to.send((pool.lease(handle), k as u8, bytes))
                        .expect("a consumer");
                }
            });
        }
        drop(to);
        for _ in 0..2 {
            let (from, pool, device) = (&from, &pool, &device);
            threads.spawn(move || {
                loop {
                    let received = from.lock().expect("no thread panics").recv();
                    let Ok((lease, value, bytes)) = received else {
                        break;
                    };
                    let region = pool.pin(lease.handle()).expect("in use");
                    assert_eq!(region.bytes, bytes);
                    assert!(
                        device.read(region).iter().all(|byte| *byte == value),
                        "somebody else wrote here"
                    );
                    pool.unpin(lease.handle()).expect("in use");
                }
            });
        }
    });
    pool.wait_all(&mut &device);
    audit(&pool, &device, &[], true);
    let s = pool.statistics();
    assert_eq!((s.num_allocs, s.num_frees, s.bytes_in_use), (6000, 6000, 0));
}
