use rand::rngs::Xoshiro256PlusPlus;
use rand::{RngExt, SeedableRng};

use super::*;

/// Recounts everything from the table and the regions that a naive owner remembers, and compares.
fn audit(pool: &Pool, memory: &Memory, live: &[Region]) {
    for (i, a) in live.iter().enumerate() {
        assert!(memory.contains(a), "{a:?} lies outside its arena");
        assert!(a.offset.is_multiple_of(64), "{a:?} is not aligned");
        assert!(live[..i].iter().all(|b| !a.overlaps(b)), "{a:?} overlaps another region in use");
    }
    let (mut in_use, mut free, mut waste, mut walked) = (0, 0, 0, 0);
    let mut largest_free = 0;
    for (index, block) in pool.blocks.iter().enumerate().filter(|(_, block)| block.bytes > 0) {
        walked += 1;
        let before = pool.blocks.get(block.before as usize);
        if let Some(before) = before {
            assert_eq!(before.after as usize, index, "the chain of a segment is broken");
            assert_eq!((before.arena, before.offset + before.bytes), (block.arena, block.offset), "a gap between blocks");
            assert!(before.in_use || block.in_use, "two free neighbours were not joined");
        } else {
            assert_eq!(block.offset, 0, "the first block of a segment begins inside it");
        }
        let listed = pool.free.iter().filter(|entry| entry.4 as usize == index).count();
        assert_eq!(listed, usize::from(!block.in_use), "the list of free blocks");
        if block.in_use {
            let owner = live.iter().filter(|r| (r.arena, r.offset) == (block.arena, block.offset)).collect::<Vec<_>>();
            assert_eq!(owner.len(), 1, "a block in use has one owner");
            assert!(owner[0].bytes <= block.bytes);
            in_use += block.bytes;
            waste += block.bytes - owner[0].bytes;
        } else {
            free += block.bytes;
            largest_free = largest_free.max(block.bytes);
        }
    }
    assert_eq!(walked + pool.unused.len(), pool.blocks.len(), "every row is a block or unused");
    assert_eq!(pool.live.len(), live.len());
    assert!(pool.free.is_sorted() && pool.live.is_sorted() && pool.segments.is_sorted());
    let s = pool.statistics();
    assert_eq!((s.bytes_in_use, s.rounding_waste_bytes, s.largest_free_block_bytes), (in_use, waste, largest_free));
    assert_eq!(s.pool_bytes, in_use + free, "in use and free make up the pool");
    assert_eq!(s.pool_bytes, memory.reserved_bytes());
    assert_eq!(s.num_allocs - s.num_frees, live.len() as u64);
    assert_eq!(s.num_allocs, s.cache_hits + s.cache_misses);
    assert_eq!(s.driver_allocs - s.driver_frees, pool.segments.len() as u64);
    assert!(s.peak_bytes_in_use >= s.bytes_in_use && s.peak_pool_bytes >= s.pool_bytes);
}

#[test]
fn any_sequence_keeps_the_invariants() {
    for seed in 0..12 {
        let mut random = Xoshiro256PlusPlus::seed_from_u64(seed);
        let (mut memory, mut pool) = (Memory::new(), Pool::new());
        let (mut live, mut peak, mut allocs) = (Vec::<Region>::new(), 0, 0);
        for step in 0..600 {
            // Long stretches in which regions pile up take turns with stretches in which they go.
            let grows = if step / 100 % 2 == 0 { 73 } else { 35 };
            if random.random_range(0..100) < grows {
                let bytes = match random.random_range(0..10) {
                    0 => 0,
                    1..6 => random.random_range(0..5_000),
                    6..9 => random.random_range(0..3 << 20),
                    _ => random.random_range(0..30 << 20),
                };
                let region = pool.allocate(&mut memory, bytes).unwrap();
                assert_eq!(region.bytes, bytes);
                allocs += 1;
                live.push(region);
            } else if !live.is_empty() {
                let region = live.swap_remove(random.random_range(0..live.len()));
                pool.free(region).unwrap();
                assert_eq!(pool.free(region), Err(NotInUse { region }), "freed twice");
            }
            if random.random_range(0..50) == 0 {
                let (before, held) = (memory.reserved_bytes(), pool.statistics().pool_bytes);
                let given = pool.empty_cache(&mut memory);
                assert_eq!((before - memory.reserved_bytes(), held - pool.statistics().pool_bytes), (given, given));
                let used: Vec<u32> = live.iter().map(|region| region.arena).collect();
                assert!(pool.segments.iter().all(|(arena, _)| used.contains(arena)), "an unused segment was kept");
            }
            audit(&pool, &memory, &live);
            peak = peak.max(pool.statistics().bytes_in_use);
        }
        assert_eq!(pool.statistics().peak_bytes_in_use, peak);
        assert_eq!(pool.statistics().num_allocs, allocs);
        live.drain(..).for_each(|region| pool.free(region).unwrap());
        audit(&pool, &memory, &live);
        pool.empty_cache(&mut memory);
        assert_eq!((memory.reserved_bytes(), pool.statistics().pool_bytes), (0, 0), "bytes leaked");
    }
}

#[test]
fn segments_have_the_sizes_of_their_class() {
    let (mut memory, mut pool) = (Memory::new(), Pool::new());
    let mib = 1 << 20;
    let mut grown = |pool: &mut Pool, bytes| {
        let before = memory.reserved_bytes();
        let region = pool.allocate(&mut memory, bytes).unwrap();
        (region, memory.reserved_bytes() - before)
    };
    assert_eq!(grown(&mut pool, 1).1, 2 * mib);
    assert_eq!(grown(&mut pool, mib).1, 0, "the rest of the first segment serves it");
    assert_eq!(grown(&mut pool, mib + 1).1, 20 * mib);
    assert_eq!(grown(&mut pool, 10 * mib - 1).1, 0, "the rest of the large segment serves it");
    let (own, bytes) = grown(&mut pool, 10 * mib);
    assert_eq!(bytes, 10 * mib);
    assert_eq!(grown(&mut pool, 30 * mib + 1).1, 32 * mib);
    pool.free(own).unwrap();
    assert_eq!(grown(&mut pool, 8 * mib).1, 0, "the best fit is the 10 MiB block or the rest of the 20 MiB segment");
    assert_eq!(pool.statistics().driver_allocs, 4);
}

#[test]
fn the_smallest_block_that_fits_is_taken() {
    let (mut memory, mut pool) = (Memory::new(), Pool::new());
    let mut take = |pool: &mut Pool, bytes| pool.allocate(&mut memory, bytes).unwrap();
    let (large, _a) = (take(&mut pool, 8192), take(&mut pool, 512));
    let (small, _b) = (take(&mut pool, 2048), take(&mut pool, 512));
    pool.free(large).unwrap();
    pool.free(small).unwrap();
    assert_eq!(take(&mut pool, 1500).offset, small.offset);
    assert_eq!(take(&mut pool, 1500).offset, large.offset);
}

#[test]
fn regions_of_others_are_refused() {
    let (mut memory, mut pool) = (Memory::new(), Pool::new());
    let region = pool.allocate(&mut memory, 1000).unwrap();
    let before = pool.statistics();
    let others = [
        Region { arena: region.arena + 7, ..region },
        Region { offset: region.offset + 64, ..region },
        Region { offset: 512 * 1000, ..region },
        Region { bytes: 999, ..region },
    ];
    for region in others {
        assert_eq!(pool.free(region), Err(NotInUse { region }));
    }
    assert_eq!(pool.statistics(), before);
    pool.free(region).unwrap();
}

#[test]
fn what_the_host_cannot_give_is_an_error() {
    let (mut memory, mut pool) = (Memory::new(), Pool::new());
    let kept = pool.allocate(&mut memory, 100).unwrap();
    let cached = pool.allocate(&mut memory, 5 << 20).unwrap();
    pool.free(cached).unwrap();
    for bytes in [u64::MAX, u64::MAX - 600, 1 << 62] {
        assert_eq!(pool.allocate(&mut memory, bytes), Err(OutOfMemory { bytes }));
        audit(&pool, &memory, &[kept]);
    }
    let s = pool.statistics();
    assert_eq!((s.ooms, s.retries), (3, 1), "only a size that the address space could hold is asked for twice");
    assert_eq!(s.pool_bytes, SMALL_SEGMENT, "the cached segment went back to the host before the second try");
    pool.allocate(&mut memory, 5 << 20).unwrap();
}

#[test]
fn a_repeated_step_reserves_nothing_and_grows_no_table() {
    let (mut memory, mut pool) = (Memory::new(), Pool::new());
    let sizes = [100_000, 300, 5 << 20, 700_000, 12 << 20, 64, 3 << 20];
    let mut step = |pool: &mut Pool| {
        let regions = sizes.map(|bytes| pool.allocate(&mut memory, bytes).unwrap());
        for k in [3, 0, 6, 1, 5, 2, 4] {
            pool.free(regions[k]).unwrap();
        }
        regions
    };
    let first = step(&mut pool);
    let before = pool.statistics();
    let capacities = |pool: &Pool| [pool.blocks.capacity(), pool.unused.capacity(), pool.free.capacity(), pool.live.capacity()];
    let tables = capacities(&pool);
    for _ in 0..100 {
        assert_eq!(step(&mut pool), first, "the same requests get the same places");
    }
    let after = pool.statistics();
    assert_eq!(after.cache_misses, before.cache_misses);
    assert_eq!(after.cache_hits, before.cache_hits + 700);
    assert_eq!((after.driver_allocs, after.peak_pool_bytes), (before.driver_allocs, before.peak_pool_bytes));
    assert_eq!(capacities(&pool), tables);
}
