//! Collectives allocate nothing, on no rank's thread.

#[path = "../../../tests/support/allocator.rs"]
mod allocator;

use std::sync::Barrier;
use std::thread;

use slabwise_comm::{Collective, World};

/// Two exchanges in flight at a time, often.
fn exchanges(world: &World, source: &[Vec<u8>; 2], destination: &mut [Vec<u8>; 2]) {
    for _ in 0..100 {
        let [first, second] = destination;
        let (own, sum) = (source[0].as_slice(), &mut first[..source[0].len() / 3]);
        // SAFETY: the vectors are not accessed before the collective has ended.
        let sum = unsafe { world.start("sum", Collective::ReduceScatter, own, sum) };
        let ended = world.finish(sum.expect("no loss"), "sum");
        ended.expect("no loss");
        let started = [(&source[0], first), (&source[1], second)].map(|(from, to)| {
            let (from, to) = (from.as_slice(), to.as_mut_slice());
            // SAFETY: the vectors are not accessed before both collectives have ended.
            unsafe { world.start("gradients", Collective::AllToAll, from, to) }
        });
        for ticket in started {
            let ended = world.finish(ticket.expect("no loss"), "gradients");
            ended.expect("no loss");
        }
    }
}

#[test]
fn collectives_allocate_nothing_after_the_first() {
    let meet = Barrier::new(4);
    thread::scope(|scope| {
        for world in World::local(3) {
            let meet = &meet;
            scope.spawn(move || {
                let source = [vec![1; 9000], vec![2; 300]];
                let mut destination = source.clone();
                exchanges(&world, &source, &mut destination);
                meet.wait();
                meet.wait();
                exchanges(&world, &source, &mut destination);
                meet.wait();
                meet.wait();
            });
        }
        meet.wait();
        let counts = allocator::counted(|| {
            meet.wait();
            meet.wait();
        });
        meet.wait();
        assert_eq!(counts, (0, 0), "allocations and deallocations");
    });
}
