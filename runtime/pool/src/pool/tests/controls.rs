//! Settings, and the effect of each.

use super::*;

#[test]
fn preallocation_takes_the_fraction_at_the_first_use() {
    for policy in [Policy::Tlsf, Policy::Bfc] {
        let device = FakeDevice::new(1000 * MIB);
        let pool = open(&MemoryConfig::with_policy(policy));
        assert_eq!(
            (pool.statistics().pool_bytes, device.calls()),
            (0, 0),
            "nothing at load"
        );
        let handle = take(&pool, &device, 100).expect("room");
        let s = pool.statistics();
        assert_eq!((s.bytes_limit, s.pool_bytes), (750 * MIB, 750 * MIB));
        give(&pool, &device, handle);
        assert_eq!(pool.empty_cache(&mut &device), 750 * MIB);
        assert_eq!(device.reserved_bytes(), 0);
    }
}

#[test]
fn without_preallocation_the_fraction_is_still_the_cap() {
    for policy in [
        Policy::Tlsf,
        Policy::Bfc,
        Policy::Naive,
        Policy::Round,
        Policy::Unpooled,
        Policy::Async,
        Policy::Vmm,
    ] {
        let device = FakeDevice::new(100 * MIB).with_pages(2 * MIB);
        let config = MemoryConfig {
            preallocate: Some(false),
            fraction: Some(0.5),
            reserve: Some(0),
            ..MemoryConfig::with_policy(policy)
        };
        let pool = open(&config);
        take(&pool, &device, 100).expect("room");
        assert!(
            pool.statistics().pool_bytes <= 16 * MIB,
            "{policy} grows on demand"
        );
        assert!(
            take(&pool, &device, 50 * MIB + 1).is_err(),
            "{policy} has a cap"
        );
        take(&pool, &device, 20 * MIB).expect("room below the cap");
        assert!(pool.statistics().pool_bytes <= 50 * MIB);
    }
    // JAX's platform allocator has none.
    let device = FakeDevice::new(100 * MIB);
    let pool = open(&MemoryConfig {
        fraction: Some(0.5),
        ..MemoryConfig::with_policy(Policy::Platform)
    });
    take(&pool, &device, 80 * MIB).expect("all of the device");
}

#[test]
fn two_processes_get_the_same_limit_in_either_order() {
    let device = FakeDevice::new(1000 * MIB);
    let config = MemoryConfig {
        fraction: Some(0.4),
        ..MemoryConfig::with_policy(Policy::Tlsf)
    };
    let (first, second) = (open(&config), open(&config));
    take(&first, &device, 1).expect("room");
    take(&second, &device, 1).expect("room");
    assert_eq!(
        first.statistics().bytes_limit,
        second.statistics().bytes_limit
    );
    assert_eq!(device.reserved_bytes(), 800 * MIB);
}

#[test]
fn the_device_of_another_pool_is_none_of_its_business() {
    let (a, b) = (FakeDevice::new(MIB), FakeDevice::new(64 * MIB));
    let (pool_a, pool_b) = (open(&whole(Policy::Tlsf)), open(&whole(Policy::Tlsf)));
    take(&pool_b, &b, 1000).expect("room");
    let before = pool_b.statistics();
    take(&pool_a, &a, 2 * MIB).expect_err("too much");
    assert_eq!((pool_a.statistics().ooms, pool_b.statistics()), (1, before));
}

#[test]
fn mxnets_examples_share_blocks() {
    let device = FakeDevice::new(64 * MIB);
    let pool = open(&MemoryConfig {
        round_cutoff: Some(20),
        ..whole(Policy::Round)
    });
    for [first, second] in [[32, 4095], [2_097_153, 3_145_728]] {
        let one = take(&pool, &device, first).expect("room");
        let place = pool.region(one).expect("in use");
        give(&pool, &device, one);
        let two = take(&pool, &device, second).expect("room");
        let again = pool.region(two).expect("in use");
        assert_eq!(
            (again.arena, again.offset),
            (place.arena, place.offset),
            "{first} then {second}"
        );
    }
}

#[test]
fn the_reserve_sends_cached_blocks_back_first() {
    for policy in [Policy::Naive, Policy::Round] {
        let device = FakeDevice::new(100 * MIB);
        let pool = open(&MemoryConfig {
            reserve: Some(50),
            ..whole(policy)
        });
        let block = take(&pool, &device, 32 * MIB).expect("room");
        give(&pool, &device, block);
        // 68 MiB are free: another 16 leave more than half of the device.
        let small = take(&pool, &device, 16 * MIB).expect("room");
        assert_eq!(device.reserved_bytes(), 48 * MIB, "{policy}");
        // Another 8 would not.
        take(&pool, &device, 8 * MIB).expect("room");
        assert_eq!(device.reserved_bytes(), 24 * MIB, "{policy}: 32 went back");
        give(&pool, &device, small);
    }
}

#[test]
fn idle_blocks_go_back_and_hot_ones_stay() {
    for policy in [Policy::Tlsf, Policy::Naive, Policy::Vmm] {
        let device = FakeDevice::new(100 * MIB).with_preallocation(false);
        let device = if policy == Policy::Vmm {
            device.with_pages(MIB)
        } else {
            device
        };
        let config = MemoryConfig {
            idle_time: Some(Duration::from_secs(10)),
            ..whole(policy)
        };
        let pool = open(&config);
        let [cold, hot] =
            [8 * MIB, 4 * MIB].map(|bytes| take(&pool, &device, bytes).expect("room"));
        give(&pool, &device, cold);
        give(&pool, &device, hot);
        let touch = || {
            // Its own size: no other block serves it better.
            let hot = take(&pool, &device, 4 * MIB).expect("room");
            give(&pool, &device, hot);
        };
        device.advance(Duration::from_secs(9));
        assert_eq!(pool.end_step(&mut &device), 0, "{policy}: not yet");
        touch();
        device.advance(Duration::from_secs(2));
        let gone = pool.end_step(&mut &device);
        assert_eq!(
            gone,
            if policy == Policy::Naive {
                8 * MIB
            } else {
                gone
            },
            "{policy}: the cold block"
        );
        device.advance(Duration::from_secs(20));
        pool.end_step(&mut &device);
        assert_eq!(device.reserved_bytes(), 0, "{policy}: nobody used anything");
    }
    let device = FakeDevice::new(100 * MIB);
    let pool = open(&MemoryConfig {
        idle_steps: Some(2),
        ..whole(Policy::Naive)
    });
    let block = take(&pool, &device, MIB).expect("room");
    give(&pool, &device, block);
    assert_eq!([0; 2].map(|_| pool.end_step(&mut &device)), [0, 0]);
    assert_eq!(pool.end_step(&mut &device), MIB);
}

#[test]
fn waiting_makes_frees_reusable_and_the_cache_empty() {
    let device = FakeDevice::new(64 * MIB).with_pages(MIB);
    device.hold(S0);
    let pool = open(&whole(Policy::Tlsf));
    let block = take(&pool, &device, 4 * MIB).expect("room");
    pool.submit(S0);
    drop(pool.lease(block));
    assert_eq!(
        pool.empty_cache(&mut &device),
        0,
        "stream 0 is at work there"
    );
    pool.wait_all(&mut &device);
    assert_eq!(pool.statistics().bytes_in_use, 0);
    assert_eq!(pool.empty_cache(&mut &device), 4 * MIB);
}

#[test]
fn memory_info_is_the_drivers() {
    let device = FakeDevice::new(64 * MIB);
    device.use_elsewhere(10 * MIB);
    let pool = open(&whole(Policy::Unpooled));
    take(&pool, &device, MIB).expect("room");
    assert_eq!(
        pool.memory_info(&mut &device),
        MemoryInfo {
            free: 53 * MIB,
            total: 64 * MIB
        }
    );
    // Memory held by others is not available; the OOM report says so.
    let report = take(&pool, &device, 60 * MIB).expect_err("others hold it");
    assert!(
        report.help.contains(&Help::Others { bytes: 63 * MIB }),
        "{report}"
    );
}

#[test]
fn events_are_kept_after_a_request_for_them() {
    let device = FakeDevice::new(64 * MIB);
    let pool = open(&whole(Policy::Tlsf));
    give(&pool, &device, take(&pool, &device, 1000).expect("room"));
    assert!(pool.events().is_empty());
    pool.record(3);
    device.advance(Duration::from_nanos(7));
    for _ in 0..3 {
        give(&pool, &device, take(&pool, &device, 1000).expect("room"));
    }
    let events = pool.events();
    let actions: Vec<Action> = events.iter().map(|e| e.action).collect();
    assert_eq!(
        actions,
        [Action::Free, Action::Alloc, Action::Free],
        "the last three"
    );
    assert!(
        events
            .iter()
            .all(|e| e.time_ns == 7 && e.region.bytes == 1000)
    );
}
