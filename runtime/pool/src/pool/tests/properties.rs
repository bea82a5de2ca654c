//! Random programs against a naive owner that remembers its blocks.

use super::audit::{Owned, audit, intact, pattern};
use super::*;

/// A size: mostly small, sometimes large, sometimes on a border.
fn size(
    u: &mut arbtest::arbitrary::Unstructured<'_>,
    most: u64,
) -> arbtest::arbitrary::Result<u64> {
    let bytes = match u.int_in_range(0..=5)? {
        0 => u.int_in_range(0..=2 * KIB)?,
        1 | 2 => u.int_in_range(0..=64 * KIB)?,
        3 => u.int_in_range(0..=most)?,
        4 => 1 << u.int_in_range(0..=most.ilog2())?,
        _ => (1 << u.int_in_range(8..=most.ilog2())?) + 1,
    };
    Ok(bytes.min(most))
}

#[test]
fn every_policy_keeps_its_books_and_loses_nothing() {
    arbtest::arbtest(|u| {
        let policy = *u.choose(&Policy::ALL)?;
        let total = u.int_in_range(1..=8)? * MIB;
        let mut device = FakeDevice::new(total).with_bytes();
        if u.ratio(2, 3)? {
            device = device.with_pages(*u.choose(&[4 * KIB, 64 * KIB])?);
        }
        let config = MemoryConfig {
            preallocate: Some(u.ratio(1, 4)?),
            defragment: Some(u.ratio(3, 4)?),
            idle_steps: u.ratio(1, 3)?.then_some(2),
            ..whole(policy)
        };
        let pool = open(&config);
        let mut owned: Vec<Owned> = Vec::new();
        for step in 0..u.int_in_range(1..=120)? {
            match u.int_in_range(0..=99)? {
                0..=72 => {
                    let bytes = size(u, total / 2)?;
                    if u.ratio(1, 20)? {
                        device.fail(u.int_in_range(0..=2)?, u.int_in_range(0..=3)?);
                    }
                    match take(&pool, &device, bytes) {
                        Ok(handle) => {
                            let one = Owned {
                                handle,
                                bytes,
                                seed: step as u8,
                            };
                            device.write(
                                pool.region(handle).expect("a block in use"),
                                &pattern(&one),
                            );
                            owned.push(one);
                        }
                        Err(report) => {
                            assert_eq!(report.requested, bytes);
                            assert!(
                                report.in_use <= report.capacity
                                    && report.holders.len() <= owned.len()
                            );
                        }
                    }
                }
                73..=92 if !owned.is_empty() => {
                    let one = owned.swap_remove(u.choose_index(owned.len())?);
                    give(&pool, &device, one.handle);
                    assert!(pool.free(&mut &device, one.handle).is_err(), "freed twice");
                }
                93 if !owned.is_empty() => {
                    let one = owned.swap_remove(u.choose_index(owned.len())?);
                    drop(pool.lease(one.handle));
                    pool.wait_all(&mut &device);
                }
                94 if !owned.is_empty() => {
                    let one = &owned[u.choose_index(owned.len())?];
                    let there = pool.pin(one.handle).expect("a block in use");
                    pool.defragment(&mut &device, total);
                    assert_eq!(
                        pool.region(one.handle),
                        Ok(there),
                        "a pinned block was moved"
                    );
                    pool.unpin(one.handle).expect("a block in use");
                }
                95 => drop(pool.defragment(&mut &device, size(u, total)?)),
                96 => drop(pool.end_step(&mut &device)),
                97 => {
                    let before = device.reserved_bytes();
                    let given = pool.empty_cache(&mut &device);
                    assert_eq!(before - device.reserved_bytes(), given);
                }
                _ => {}
            }
            audit(&pool, &device, &owned, true);
        }
        intact(&pool, &device, &owned);
        for one in owned.drain(..) {
            give(&pool, &device, one.handle);
        }
        device.fail(0, 0);
        pool.empty_cache(&mut &device);
        assert_eq!(
            (pool.statistics().pool_bytes, device.reserved_bytes()),
            (0, 0),
            "{policy}: bytes leaked"
        );
        Ok(())
    })
    .budget_ms(1500);
}

#[test]
fn streams_never_share_a_block_before_its_time() {
    arbtest::arbtest(|u| {
        let policy = *u.choose(&[
            Policy::Tlsf,
            Policy::Bfc,
            Policy::Naive,
            Policy::Vmm,
            Policy::Unpooled,
        ])?;
        let mut device = FakeDevice::new(4 * MIB).with_pages(4 * KIB);
        if policy != Policy::Vmm && u.ratio(1, 3)? {
            device = FakeDevice::new(4 * MIB);
        }
        let streams = [S0, S1, Stream(2)];
        streams.iter().for_each(|s| device.hold(*s));
        let pool = open(&whole(policy));
        let mut owned: Vec<(Owned, Stream)> = Vec::new();
        // Freed places: which stream may still be at work there, and until which number.
        let mut busy: Vec<(Region, Stream, u64)> = Vec::new();
        let mut done = [0u64; 3];
        let mut submitted = [0u64; 3];
        for step in 0..u.int_in_range(1..=100)? {
            let stream = *u.choose(&streams)?;
            let at = usize::from(stream.0);
            match u.int_in_range(0..=9)? {
                0..=4 => {
                    let bytes = u.int_in_range(1..=MIB)?;
                    let Ok(handle) = pool.allocate(&mut &device, bytes, stream, TagId::default())
                    else {
                        continue;
                    };
                    let region = pool.region(handle).expect("a block in use");
                    for (place, other, sequence) in &busy {
                        let free = *other == stream
                            || (&mut &device).completed(*other) >= *sequence
                            || !place.overlaps(&region);
                        assert!(
                            free,
                            "{stream} got {region:?}, where {other} works until {sequence}"
                        );
                    }
                    owned.push((
                        Owned {
                            handle,
                            bytes,
                            seed: step as u8,
                        },
                        stream,
                    ));
                }
                5..=6 if !owned.is_empty() => {
                    let (one, stream) = owned.swap_remove(u.choose_index(owned.len())?);
                    let region = pool.region(one.handle).expect("a block in use");
                    give(&pool, &device, one.handle);
                    busy.push((region, stream, submitted[usize::from(stream.0)]));
                }
                7..=8 => submitted[at] = pool.submit(stream),
                _ => {
                    done[at] = u.int_in_range(done[at]..=submitted[at])?;
                    device.complete(stream, done[at]);
                }
            }
        }
        let owned: Vec<Owned> = owned.into_iter().map(|(one, _)| one).collect();
        audit(&pool, &device, &owned, false);
        pool.wait_all(&mut &device);
        audit(&pool, &device, &owned, true);
        Ok(())
    })
    .budget_ms(600);
}
