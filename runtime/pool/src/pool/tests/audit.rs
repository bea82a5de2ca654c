//! An audit of a pool: everything counted again, from its table and from a naive owner's records.

use super::*;
use crate::block::{NONE, State};

/// A block as its owner knows it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Owned {
    pub handle: Handle,
    pub bytes: u64,
    pub seed: u8,
}

/// The bytes with which an owner fills a block.
pub(super) fn pattern(owned: &Owned) -> Vec<u8> {
    (0..owned.bytes)
        .map(|k| (k as u8).wrapping_mul(31).wrapping_add(owned.seed))
        .collect()
}

/// Fails unless the pool is consistent with the given owners. `synchronous`: no stream is ever
/// behind.
pub(super) fn audit(pool: &Pool, device: &FakeDevice, owned: &[Owned], synchronous: bool) {
    let mut places: Vec<Region> = Vec::new();
    for one in owned {
        let region = pool.region(one.handle).expect("a block in use");
        assert_eq!(region.bytes, one.bytes);
        assert!(
            region.offset.is_multiple_of(256),
            "{region:?} is not aligned"
        );
        assert!(device.has(region), "{region:?} has no memory behind it");
        places.push(region);
    }
    places.sort_by_key(|r| (r.arena, r.offset));
    assert!(
        places.windows(2).all(|pair| !pair[0].overlaps(&pair[1])),
        "two blocks in use overlap"
    );

    let heap = pool.lock();
    let (mut live, mut free, mut asked, mut waste) = (0, 0, 0, 0);
    let mut count = 0;
    for (row, b) in heap.table.iter() {
        assert!(b.bytes > 0 && b.state != State::Busy, "{b:?}");
        if b.after != NONE {
            let after = &heap.table[b.after];
            assert_eq!(after.before, row, "the chain is broken");
            assert_eq!(
                (b.arena, b.end()),
                (after.arena, after.offset),
                "a gap between {b:?} and {after:?}"
            );
            let both = |state| b.state == state && after.state == state;
            assert!(!both(State::Gap), "two gaps were not joined");
            assert!(
                !synchronous || !both(State::Free),
                "two free neighbours were not joined: {b:?} and {after:?}"
            );
        }
        match b.state {
            State::Live => {
                (count, live, asked) = (count + 1, live + b.bytes, asked + b.requested);
                waste += b.bytes.saturating_sub(b.requested);
            }
            State::Free => free += b.bytes,
            State::Page => {
                let (mut at, mut inside, mut pins) = (b.page, 0, 0);
                while at != NONE {
                    assert_eq!(
                        (heap.table[at].arena, heap.table[at].offset),
                        (b.arena, b.offset + inside),
                        "a page was torn"
                    );
                    assert_eq!(heap.table[at].page, row);
                    (inside, pins) = (inside + heap.table[at].bytes, pins + heap.table[at].pins);
                    at = heap.table[at].after;
                }
                assert_eq!((inside, pins), (b.bytes, b.pins), "a page holds its blocks");
            }
            _ => {}
        }
    }
    let s = heap.statistics;
    assert_eq!(count, owned.len(), "blocks in use");
    assert_eq!(asked, owned.iter().map(|o| o.bytes).sum::<u64>());
    assert_eq!((s.bytes_in_use, s.rounding_waste_bytes), (live, waste));
    assert_eq!(s.num_allocs - s.num_frees, owned.len() as u64);
    assert_eq!(heap.reserving, 0);
    if let Engine::Direct = heap.engine {
        assert_eq!(free, 0);
    } else {
        assert_eq!(
            s.pool_bytes,
            live + free,
            "in use and free are all there is"
        );
        assert_eq!(
            s.pool_bytes,
            device.reserved_bytes(),
            "the driver counts as many"
        );
    }
    assert!(s.pool_bytes <= s.peak_pool_bytes && s.bytes_in_use <= s.peak_bytes_in_use);
    assert!(s.peak_pool_bytes <= s.bytes_limit || s.bytes_limit == 0);
    assert_eq!(s.cache_hits + s.cache_misses, s.num_allocs + s.ooms);
}

/// Fails unless every block holds its owner's bytes.
pub(super) fn intact(pool: &Pool, device: &FakeDevice, owned: &[Owned]) {
    for one in owned {
        let region = pool.region(one.handle).expect("a block in use");
        assert!(
            device.read(region) == pattern(one),
            "the bytes of {one:?} changed"
        );
    }
}
