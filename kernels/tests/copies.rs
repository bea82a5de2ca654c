//! Copies in flight: the right bytes arrive, and conflicting accesses are refused.

#[allow(dead_code)] // this test needs only the random numbers of the module
mod common;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Barrier};

use common::Random;
use slabwise_kernels::copies::Ticket;
use slabwise_kernels::memory::{Memory, Region};

/// The message of the panic that `work` ends in.
fn refused<T>(work: impl FnOnce() -> T) -> String {
    let thrown = catch_unwind(AssertUnwindSafe(work)).err().expect("refused");
    thrown
        .downcast_ref::<String>()
        .cloned()
        .or_else(|| thrown.downcast_ref::<&str>().map(|s| s.to_string()))
        .expect("a message")
}

fn arena(memory: &mut Memory, bytes: u64) -> Region {
    memory.reserve(bytes).expect("memory")
}

#[test]
fn conflicts_with_a_copy_in_flight_are_refused_until_it_was_waited_for() {
    let mut memory = Memory::new();
    let (slab, host) = (arena(&mut memory, 256), arena(&mut memory, 256));
    memory
        .bytes_mut(&slab)
        .iter_mut()
        .zip(0..=255u8)
        .for_each(|(byte, i)| *byte = i);
    let (from, to) = (slab.part(64, 64), host.part(0, 64));
    let ticket = memory.start_copy(&from, &to);
    assert_eq!(memory.in_flight(), 1);
    // The source may be read, and bytes beside either region written.
    assert_eq!(memory.bytes(&from)[3], 67);
    memory.bytes_mut(&slab.part(0, 64)).fill(1);
    memory.bytes_mut(&host.part(64, 64)).fill(1);
    assert!(refused(|| memory.bytes(&host.part(63, 8)).len()).contains("is read while a copy"));
    assert!(
        refused(|| memory.bytes_mut(&host.part(0, 1)).fill(0)).contains("is written while a copy")
    );
    assert!(
        refused(|| memory.bytes_mut(&slab.part(127, 2)).fill(0))
            .contains("is written while a copy")
    );
    assert!(refused(|| memory.elements::<f32>(&to).len()).contains("is read"));
    assert!(refused(|| memory.copy(&to, &slab.part(128, 64))).contains("is read"));
    assert!(refused(|| memory.copy(&slab.part(128, 64), &from)).contains("is written"));
    assert!(refused(|| memory.start_copy(&to, &slab.part(128, 64))).contains("is read"));
    assert!(refused(|| memory.start_copy(&slab.part(128, 64), &from)).contains("is written"));
    assert!(refused(|| memory.start_fill(&from, Box::new(|_| ()))).contains("is written"));
    assert!(refused(|| memory.start_copy(&from, &host.part(64, 32))).contains("different lengths"));
    assert!(
        refused(|| memory.start_copy(&slab.part(0, 32), &slab.part(16, 32))).contains("overlaps")
    );
    memory.wait_for(ticket);
    assert_eq!(memory.in_flight(), 0);
    assert!(memory.bytes(&to).iter().copied().eq(64..128));
    memory.bytes_mut(&from).fill(0);
}

/// Any sequence of copies, fills, writes and waits has the result of the sequential one.
#[test]
fn random_copies_equal_sequential_ones() {
    const BYTES: usize = 64;
    let (mut started, mut turned_away) = (0, 0);
    for seed in 1..=60 {
        let mut random = Random(seed);
        let mut memory = Memory::new();
        let arenas = [
            arena(&mut memory, BYTES as u64),
            arena(&mut memory, BYTES as u64),
        ];
        memory.prepare_copies(4);
        let mut plain = [[0u8; BYTES]; 2];
        let mut tickets: Vec<Ticket> = Vec::new();
        for _ in 0..20 {
            let (bytes, value) = (random.int(0, 16), random.int(0, 255) as u8);
            let [(a, from), (b, to)] =
                [(); 2].map(|()| (random.int(0, 1), random.int(0, BYTES - 16)));
            let (source, target) = (
                arenas[a].part(from as u64, bytes as u64),
                arenas[b].part(to as u64, bytes as u64),
            );
            let in_flight = memory.in_flight();
            let what = random.int(0, 3);
            if what == 3 {
                if !tickets.is_empty() {
                    memory.wait_for(tickets.swap_remove(random.int(0, tickets.len() - 1)));
                }
                continue;
            }
            let is_copy = what == 0 && !source.overlaps(&target);
            let begun = catch_unwind(AssertUnwindSafe(|| match what {
                0 if is_copy => tickets.push(memory.start_copy(&source, &target)),
                2 => memory.bytes_mut(&target).fill(value),
                _ => tickets.push(memory.start_fill(&target, Box::new(move |to| to.fill(value)))),
            }));
            if begun.is_err() {
                turned_away += 1;
                assert!(in_flight > 0, "refused without a reason");
                continue;
            }
            started += 1;
            let moved = plain[a];
            let to = &mut plain[b][to..to + bytes];
            if is_copy {
                to.copy_from_slice(&moved[from..from + bytes])
            } else {
                to.fill(value)
            }
        }
        memory.wait_for_all();
        assert_eq!(
            [memory.bytes(&arenas[0]), memory.bytes(&arenas[1])],
            [&plain[0][..], &plain[1][..]]
        );
    }
    assert!(
        started > 300 && turned_away > 100,
        "{started} started, {turned_away} refused"
    );
}

#[test]
fn memory_is_not_dropped_under_a_copy() {
    let mut memory = Memory::new();
    let slab = arena(&mut memory, 1 << 16);
    let (begun, ended) = (Arc::new(Barrier::new(2)), Arc::new(AtomicBool::new(false)));
    let (gate, flag) = (Arc::clone(&begun), Arc::clone(&ended));
    memory.start_fill(
        &slab,
        Box::new(move |bytes| {
            gate.wait();
            (0..50).for_each(|i| bytes.fill(i));
            flag.store(true, Ordering::SeqCst);
        }),
    );
    begun.wait();
    drop(memory);
    assert!(
        ended.load(Ordering::SeqCst),
        "the copy under way was waited for"
    );
}

#[test]
fn a_panic_of_a_source_goes_on_where_it_is_waited_for_and_copies_go_on() {
    let mut memory = Memory::new();
    let slab = arena(&mut memory, 128);
    memory.start_fill(
        &slab.part(0, 64),
        Box::new(|_| std::panic::resume_unwind(Box::new("broken"))),
    );
    let second = memory.start_fill(&slab.part(64, 64), Box::new(|bytes| bytes.fill(7)));
    assert_eq!(refused(|| memory.wait_for(second)), "broken");
    assert_eq!(memory.in_flight(), 0);
    assert!(memory.bytes(&slab.part(64, 64)).iter().all(|b| *b == 7));
    // A wait for everything leaves the panic to those who wait for the source.
    let third = memory.start_fill(
        &slab,
        Box::new(|_| std::panic::resume_unwind(Box::new("broken"))),
    );
    memory.wait_for_all();
    assert_eq!(memory.in_flight(), 0);
    assert_eq!(refused(|| memory.wait_for(third)), "broken");
    // An arena is given back once nothing is in flight.
    memory.start_fill(&slab, Box::new(|bytes| bytes.fill(9)));
    memory.release(slab.arena);
    assert_eq!((memory.in_flight(), memory.reserved_bytes()), (0, 0));
}
