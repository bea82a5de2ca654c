//! Worlds of threads: collectives, agreement, losses.

#[path = "support/exercise.rs"]
mod exercise;

use std::ptr::{slice_from_raw_parts, slice_from_raw_parts_mut};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use exercise::exercise;
use slabwise_comm::{Collective, Error, Group, Header, IN_FLIGHT_MAX, Kind, World};

/// Runs a program on each rank, and returns the results by rank.
fn on_ranks<T: Send>(size: usize, program: impl Fn(World) -> T + Sync) -> Vec<T> {
    let program = &program;
    thread::scope(|scope| {
        let running: Vec<_> = World::local(size)
            .into_iter()
            .map(|world| scope.spawn(move || program(world)))
            .collect();
        running
            .into_iter()
            .map(|rank| rank.join().expect("no panic"))
            .collect()
    })
}

fn lost(result: Result<(), Error>) -> (usize, String) {
    match result.expect_err("a rank is lost") {
        Error::Peer { rank, why, .. } => (rank, why),
        other => panic!("{other}"),
    }
}

#[test]
fn collectives_move_every_byte_to_its_place() {
    for size in [1, 2, 3, 4] {
        on_ranks(size, |world| {
            exercise(&world, size as u64, 200, 5000).expect("no loss")
        });
    }
}

#[test]
fn random_collectives_agree_with_their_definition() {
    arbtest::arbtest(|u| {
        let (size, seed) = (u.int_in_range(1..=5)?, u.arbitrary()?);
        on_ranks(size, |world| {
            exercise(&world, seed, 8, 64).expect("no loss")
        });
        Ok(())
    })
    .budget_ms(3000);
}

/// Starts an all-gather of each of these chunks on a rank, and finishes them in reverse order.
fn overlapped(world: &World, chunks: usize) -> Vec<Vec<u8>> {
    let sources: Vec<Vec<u8>> = (0..chunks)
        .map(|i| vec![(10 * i + world.rank()) as u8; i])
        .collect();
    let mut all: Vec<Vec<u8>> = (0..chunks).map(|i| vec![0; i * world.size()]).collect();
    let mut tickets = Vec::new();
    for (source, all) in sources.iter().zip(&mut all) {
        // SAFETY: the vectors are neither moved nor accessed before the collectives have ended.
        let ticket = unsafe {
            world.start(
                "chunk",
                Collective::AllGather,
                source.as_slice(),
                all.as_mut_slice(),
            )
        };
        tickets.push(ticket.expect("started"));
    }
    for ticket in tickets.into_iter().rev() {
        world.finish(ticket, "chunk").expect("finished");
    }
    all
}

#[test]
fn collectives_overlap_and_end_in_any_order() {
    for all in on_ranks(3, |world| overlapped(&world, IN_FLIGHT_MAX)) {
        for (i, chunk) in all.iter().enumerate() {
            let want: Vec<u8> = (0..3)
                .flat_map(|rank| vec![(10 * i + rank) as u8; i])
                .collect();
            assert_eq!(*chunk, want);
        }
    }
}

#[test]
fn too_many_collectives_in_flight_are_refused() {
    let world = World::alone();
    // SAFETY: a barrier has no regions.
    let start = || unsafe { world.start("one more", Collective::Barrier, &[], &mut []) };
    let tickets: Vec<_> = (0..IN_FLIGHT_MAX)
        .map(|_| start().expect("there is room"))
        .collect();
    let told = start().expect_err("no room").to_string();
    assert!(
        told.contains("\"one more\" is the 64th collective after one that is not finished"),
        "{told}"
    );
    for ticket in tickets {
        world.finish(ticket, "one more").expect("finished");
    }
    world.barrier("after").expect("the world still works");
}

#[test]
fn an_all_gather_may_be_in_place() {
    let gathered = on_ranks(4, |world| {
        let mut all = vec![0_u8; 8];
        let start = 2 * world.rank();
        all[start..start + 2].fill(world.rank() as u8 + 1);
        let destination = all.as_mut_ptr();
        let own = slice_from_raw_parts(destination.wrapping_add(start).cast_const(), 2);
        let whole = slice_from_raw_parts_mut(destination, 8);
        // SAFETY: the vector is not accessed before the collective has ended, and the source is
        // this rank's chunk of it.
        let ticket = unsafe { world.start("weights", Collective::AllGather, own, whole) };
        let ticket = ticket.expect("started");
        world.finish(ticket, "weights").expect("finished");
        all
    });
    assert!(
        gathered.iter().all(|all| *all == [1, 1, 2, 2, 3, 3, 4, 4]),
        "{gathered:?}"
    );
}

#[test]
fn lengths_that_do_not_fit_are_an_error_before_anything_moves() {
    let results = on_ranks(2, |world| {
        let told = world
            .all_to_all("bucket 3", &[0; 3], &mut [0; 3])
            .expect_err("3 over 2 ranks");
        assert!(
            told.to_string()
                .contains("\"bucket 3\": all-to-all of 3 bytes"),
            "{told}"
        );
        let told = world
            .all_gather("weights", &[0; 3], &mut [0; 5])
            .expect_err("3 into 5");
        assert!(matches!(told, Error::Size(_)), "{told}");
        world.broadcast("seed", 2, &mut [0]).expect_err("no rank 2");
        world.barrier("after")
    });
    assert_eq!(results, [Ok(()), Ok(())]);
}

#[test]
fn a_rank_that_leaves_is_named_on_all_others() {
    for leaves in 0..3 {
        let results = on_ranks(3, |world| {
            world.begin_step(7);
            world.barrier("before")?;
            if world.rank() == leaves {
                return Ok(());
            }
            world.all_gather("gradients of fc", &[1], &mut [0; 3])
        });
        for (rank, result) in results
            .into_iter()
            .enumerate()
            .filter(|(rank, _)| *rank != leaves)
        {
            let error = result.expect_err("a rank is gone").to_string();
            // A rank that is still in the barrier when another one notices is told there.
            let expected = ["before\" (collective 0", "gradients of fc\" (collective 1"].map(|at| {
                format!(
                    "rank {leaves} of 3 has left the world while \"{at} of step 7) waited for it; \
                     restart from the last checkpoint"
                )
            });
            assert!(expected.contains(&error), "rank {rank}: {error}");
        }
    }
}

#[test]
fn a_rank_that_panics_is_named_on_all_others() {
    let mut ranks = World::local(2);
    let panics = ranks.pop().expect("rank 1");
    let panicking = thread::spawn(move || {
        panics.barrier("first").expect("rank 0 is there");
        // No message in the test's output.
        std::panic::resume_unwind(Box::new("a fault of the program"));
    });
    let world = ranks.pop().expect("rank 0");
    world.barrier("first").expect("rank 1 is there");
    assert_eq!(
        lost(world.barrier("second")),
        (1, "has left the world".into())
    );
    assert!(panicking.join().is_err());
    // The world stays lost, with the first error.
    let again = world.barrier("third").expect_err("lost").to_string();
    assert!(again.contains("\"second\""), "{again}");
    assert_eq!(world.lost().map(|e| e.to_string()), Some(again));
}

#[test]
fn a_rank_that_hangs_is_named_after_the_patience() {
    let others = AtomicUsize::new(0);
    let results = on_ranks(3, |world| {
        let world = world.with_patience(Duration::from_millis(300));
        world.begin_step(12);
        // Nothing but their patience lets the others end.
        while world.rank() == 1 && others.load(Ordering::SeqCst) < 2 {
            thread::sleep(Duration::from_millis(10));
        }
        let result = world.barrier("end of epoch");
        others.fetch_add(1, Ordering::SeqCst);
        result
    });
    for (rank, result) in results.into_iter().enumerate() {
        let (late, why) = lost(result);
        assert_eq!(late, 1, "rank {rank}");
        assert!(
            why.contains("has not arrived after") && why.contains("step 12"),
            "{why}"
        );
    }
}

#[test]
fn different_collectives_are_a_mismatch_on_all_ranks() {
    let results = on_ranks(3, |world| match world.rank() {
        2 => world.all_gather("weights", &[0; 2], &mut [0; 6]),
        _ => world.all_gather("weights", &[0; 1], &mut [0; 3]),
    });
    for result in results {
        let told = result.expect_err("rank 2 differs").to_string();
        assert!(
            told.contains("AllGather of 3 bytes on rank 0, AllGather of 6 bytes on rank 2"),
            "{told}"
        );
    }
}

#[test]
fn ranks_that_differ_are_refused_with_the_first_difference() {
    let results = on_ranks(4, |world| {
        let odd = world.rank() == 3;
        let graph: &[u8] = if odd { b"5 blocks" } else { b"4 blocks" };
        world.agree([
            ("version", &b"1"[..]),
            ("graph", graph),
            ("plan", &[odd as u8]),
        ])
    });
    for result in results {
        assert_eq!(
            result.expect_err("rank 3 differs").to_string(),
            "rank 3 does not run the program of the others: its graph differs (4 blocks, 5 blocks \
             on rank 3)"
        );
    }
    assert_eq!(
        on_ranks(3, |world| world.agree([("graph", &b"same"[..])])),
        vec![Ok(()); 3]
    );
}

#[test]
fn missing_facts_and_ties_are_differences_too() {
    let results = on_ranks(2, |world| {
        let facts: &[(&str, &[u8])] = &[("graph", b"a"), ("tuner", b"b")];
        world.agree(facts[..2 - world.rank()].iter().copied())
    });
    for result in results {
        assert_eq!(
            result.expect_err("rank 1 lacks one").to_string(),
            "rank 1 does not run the program of the others: its tuner differs (b, no such value on \
             rank 1)"
        );
    }
}

#[test]
fn a_step_of_another_program_or_number_is_refused() {
    for (program, step, says) in [
        (1, 5, "its step differs (4, 5 on rank 1)"),
        (2, 4, "its program"),
    ] {
        let results = on_ranks(3, |world| {
            let is_odd = world.rank() == 1;
            let header = Header {
                program: 1,
                step: 4,
                ..Header::default()
            };
            let odd = Header {
                program,
                step,
                ..header
            };
            world.header(if is_odd { &odd } else { &header }, drop)
        });
        for result in results {
            let told = result.expect_err("rank 1 differs").to_string();
            assert!(told.contains(says) && told.starts_with("rank 1 "), "{told}");
        }
    }
}

/// The groups of a world: every stride at which as many ranks divide it.
fn groups_of(size: u32) -> Vec<Group> {
    let all = (1..=size).flat_map(|ranks| (1..=size).map(move |stride| Group { ranks, stride }));
    all.filter(|group| group.divides(size as usize)).collect()
}

#[test]
fn collectives_stay_in_their_groups() {
    for size in [4, 6, 8] {
        on_ranks(size, |world| {
            let rank = world.rank();
            for (round, group) in groups_of(size as u32).into_iter().enumerate() {
                world.begin_step(round as u64);
                let members: Vec<usize> = (0..size)
                    .filter(|other| {
                        // Ranks whose numbers differ in one digit.
                        let (ranks, stride) = (group.ranks as usize, group.stride as usize);
                        let rest = |r: usize| (r % stride, r / (stride * ranks));
                        rest(*other) == rest(rank)
                    })
                    .collect();
                assert_eq!(members.len(), group.size());
                let place = members.iter().position(|r| *r == rank).expect("itself");
                assert_eq!(group.place_of(rank), place);
                assert!(group.members(rank).eq(members.iter().copied()));
                let run = |collective, source: &[u8], len| {
                    let mut all = vec![0xaa; len];
                    let ended = world.run_in(group, "group", collective, source, &mut all);
                    ended.expect("no loss");
                    all
                };
                let n = members.len();
                let before = world.sent(Kind::AllGather).bytes;
                let all = run(Collective::AllGather, &[rank as u8; 3], 3 * n);
                let want: Vec<u8> = members.iter().flat_map(|r| [*r as u8; 3]).collect();
                assert_eq!(all, want);
                let sent = world.sent(Kind::AllGather).bytes - before;
                assert_eq!(sent, 3 * (n as u64 - 1));
                let own: Vec<u8> = (0..n).map(|to| (10 * rank + to) as u8).collect();
                let all = run(Collective::AllToAll, &own, n);
                let want: Vec<u8> = members.iter().map(|r| (10 * r + place) as u8).collect();
                assert_eq!(all, want);
                let own: Vec<u8> = (0..n)
                    .flat_map(|to| ((10 * rank + to) as f32).to_le_bytes())
                    .collect();
                let sum = run(Collective::ReduceScatter, &own, 4);
                let want: f32 = members.iter().map(|r| (10 * r + place) as f32).sum();
                assert_eq!(sum, want.to_le_bytes());
                let shifted = run(Collective::Shift { by: 1 }, &[rank as u8], 1);
                assert_eq!(usize::from(shifted[0]), members[(place + n - 1) % n]);
                let from = members[n - 1];
                let root = if rank == from { 7 + from as u8 } else { 0 };
                let mut copied = [root];
                let copy = Collective::Broadcast { root: n - 1 };
                let ended = world.run_in(group, "copy", copy, &[], &mut copied);
                ended.expect("no loss");
                assert_eq!(usize::from(copied[0]), 7 + from);
            }
        });
    }
}

#[test]
fn groups_that_do_not_divide_the_world_or_differ_are_refused() {
    let group = |ranks, stride| Group { ranks, stride };
    let results = on_ranks(4, |world| {
        for (ranks, stride, shown) in [(3, 1, "3 ranks"), (2, 3, "2 ranks at a distance of 3")] {
            let ended = world.run_in(
                group(ranks, stride),
                "sum",
                Collective::Barrier,
                &[],
                &mut [],
            );
            let told = ended.expect_err("it does not fit").to_string();
            assert_eq!(told, format!("\"sum\": groups of {shown} in a world of 4"));
        }
        let own = if world.rank() == 3 {
            group(2, 2)
        } else {
            group(2, 1)
        };
        world.run_in(own, "sum", Collective::AllGather, &[1], &mut [0; 2])
    });
    // Rank 2 shares a group with rank 3, which shares one with rank 1.
    for rank in [2, 3] {
        let told = results[rank].clone().expect_err("they differ").to_string();
        let differs = [1, 2].map(|other| {
            format!(
                "AllGather of 2 bytes on rank {other}, AllGather of 2 bytes among 2 ranks at a \
                 distance of 2 on rank 3"
            )
        });
        let differs = differs.iter().any(|text| told.contains(text));
        assert!(differs || told.contains("has left the world"), "{told}");
    }
}

#[test]
fn a_rank_that_hangs_is_named_beyond_its_group() {
    // Rank 3 does not come. Rank 2 waits for it, and rank 0 for rank 2.
    let results = on_ranks(4, |world| {
        let patience = if world.rank() == 2 { 5000 } else { 300 };
        let world = world.with_patience(Duration::from_millis(patience));
        let group = |stride| Group { ranks: 2, stride };
        if world.rank() == 3 {
            thread::sleep(Duration::from_millis(1200));
            return Ok(());
        }
        world.run_in(group(1), "rows", Collective::Barrier, &[], &mut [])?;
        world.run_in(group(2), "columns", Collective::Barrier, &[], &mut [])
    });
    for (rank, result) in results.into_iter().enumerate().take(3) {
        let (late, why) = lost(result);
        assert_eq!(late, 3, "rank {rank}: {why}");
    }
}

#[test]
fn bytes_of_a_gradient_exchange_are_the_formula() {
    // Reduce-scatter and all-gather of N bytes over W ranks send 2 (W - 1) / W N from each.
    for size in [2, 4] {
        let n = 1 << 16;
        on_ranks(size, |world| {
            let chunk = vec![1; n / size];
            world
                .all_to_all("gradients", &vec![1; n], &mut vec![0; n])
                .expect("no loss");
            world
                .all_gather("weights", &chunk, &mut vec![0; n])
                .expect("no loss");
            let sent = world.sent(Kind::AllToAll).bytes + world.sent(Kind::AllGather).bytes;
            assert_eq!(sent, (2 * (size - 1) * n / size) as u64);
            assert_eq!(world.sent(Kind::AllToAll).collectives, 1);
        });
    }
}

#[test]
fn worlds_of_one_and_none_work() {
    let world = World::alone();
    assert_eq!((world.rank(), world.size(), world.leads()), (0, 1, true));
    exercise(&world, 1, 50, 100).expect("nobody to lose");
    assert!(World::local(0).is_empty());
}
