//! The team under many regions, panics, nesting and several callers.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use slabwise_kernels::cpu::Team;

/// Runs a region and checks that each chunk runs once, under a worker index that no other chunk has
/// at that time.
fn region(team: &Team, chunks: usize) {
    let runs: Vec<AtomicUsize> = (0..chunks).map(|_| AtomicUsize::new(0)).collect();
    let taken: Vec<AtomicBool> = (0..team.threads())
        .map(|_| AtomicBool::new(false))
        .collect();
    team.run(chunks, &|chunk, worker| {
        assert!(
            !taken[worker].swap(true, Ordering::SeqCst),
            "worker {worker} is in two chunks"
        );
        runs[chunk].fetch_add(1, Ordering::SeqCst);
        taken[worker].store(false, Ordering::SeqCst);
    });
    assert!(runs.iter().all(|r| r.load(Ordering::SeqCst) == 1));
}

#[test]
fn every_chunk_runs_once() {
    for threads in [0, 1, 2, 3, 7] {
        let team = Team::new(threads);
        assert_eq!(team.threads(), threads.max(1));
        for chunks in [0, 1, 2, 3, 10, 1000, (1 << 16) + 1] {
            region(&team, chunks);
        }
    }
}

/// With as many chunks as threads, all of which run at the same time, each is run by the thread whose
/// part of the region it is, in every region: what it left in a thread's caches is found there. So
/// many regions, because a thread that leaves one late must not take another's part of the next.
#[test]
fn a_thread_runs_the_same_part_of_every_region() {
    let threads = 4;
    let team = Team::new(threads);
    for _ in 0..10_000 {
        let all = Barrier::new(threads);
        team.run(threads, &|chunk, worker| {
            all.wait();
            assert_eq!(chunk, worker);
        });
    }
}

/// The chunks of a thread that is late are taken by the others.
#[test]
fn no_thread_waits_for_a_slow_one() {
    let team = Team::new(3);
    let (started, done) = (AtomicUsize::new(0), AtomicUsize::new(0));
    team.run(99, &|_, worker| {
        if worker == 1 && started.fetch_add(1, Ordering::SeqCst) == 0 {
            // At most the chunks that this thread took with this one are left.
            let deadline = Instant::now() + Duration::from_secs(20);
            while done.load(Ordering::SeqCst) < 99 - 33 / 8 && Instant::now() < deadline {
                std::thread::yield_now();
            }
            assert!(done.load(Ordering::SeqCst) >= 99 - 33 / 8);
        }
        done.fetch_add(1, Ordering::SeqCst);
    });
    assert_eq!(done.into_inner(), 99);
}

#[test]
fn many_small_regions() {
    let team = Team::new(3);
    for round in 0..20_000 {
        region(&team, 1 + round % 5);
    }
}

/// Helpers that have gone to sleep wake up, and so does a caller that waits for a slow helper.
#[test]
fn regions_after_sleep() {
    let team = Team::new(3);
    for round in 0..20 {
        std::thread::sleep(Duration::from_millis(1));
        let ran = AtomicUsize::new(0);
        team.run(6, &|_, worker| {
            if worker == round % 3 {
                std::thread::sleep(Duration::from_millis(1));
            }
            ran.fetch_add(1, Ordering::Relaxed);
        });
        assert_eq!(ran.into_inner(), 6);
    }
}

#[test]
fn other_threads_take_part() {
    let team = Team::new(2);
    // Both chunks wait for each other: one thread alone could not finish the first.
    let arrived = AtomicUsize::new(0);
    team.run(2, &|_, _| {
        arrived.fetch_add(1, Ordering::SeqCst);
        while arrived.load(Ordering::SeqCst) < 2 {
            std::thread::yield_now();
        }
    });
}

#[test]
fn a_panic_reaches_the_caller_and_the_team_lives_on() {
    let team = Team::new(3);
    for round in 0..200 {
        let ran = AtomicUsize::new(0);
        let thrown = catch_unwind(AssertUnwindSafe(|| {
            team.run(8, &|chunk, _| {
                ran.fetch_add(1, Ordering::Relaxed);
                if chunk == round % 8 {
                    std::panic::resume_unwind(Box::new(chunk));
                }
            })
        }));
        assert_eq!(thrown.unwrap_err().downcast_ref(), Some(&(round % 8)));
        assert_eq!(ran.into_inner(), 8, "the other chunks run all the same");
        region(&team, 8);
    }
    // Every chunk panics.
    assert!(
        catch_unwind(AssertUnwindSafe(
            || team.run(50, &|_, _| std::panic::resume_unwind(Box::new(())))
        ))
        .is_err()
    );
    region(&team, 50);
}

#[test]
fn a_panic_inside_a_nested_region_reaches_the_outer_caller() {
    let team = Team::new(2);
    let thrown = catch_unwind(AssertUnwindSafe(|| {
        team.run(4, &|chunk, _| {
            team.run(4, &|inner, _| {
                if (chunk, inner) == (2, 3) {
                    std::panic::resume_unwind(Box::new("deep"))
                }
            })
        })
    }));
    assert_eq!(thrown.unwrap_err().downcast_ref(), Some(&"deep"));
    region(&team, 9);
}

#[test]
fn nested_regions_run_on_their_worker() {
    let team = Team::new(3);
    let ran = AtomicUsize::new(0);
    team.run(12, &|_, outer| {
        team.run(5, &|_, inner| {
            assert_eq!(inner, outer);
            ran.fetch_add(1, Ordering::Relaxed);
        });
    });
    assert_eq!(ran.into_inner(), 60);
}

#[test]
fn teams_within_teams() {
    let (outer, inner) = (Team::new(3), Team::new(2));
    let ran = AtomicUsize::new(0);
    outer.run(6, &|_, _| {
        inner.run(4, &|_, _| {
            // Neither waits for the other, in any order of the calls.
            outer.run(2, &|_, _| {
                ran.fetch_add(1, Ordering::Relaxed);
            })
        })
    });
    assert_eq!(ran.into_inner(), 48);
}

#[test]
fn several_callers_at_once() {
    let team = Team::new(3);
    std::thread::scope(|scope| {
        for caller in 0..4 {
            let team = &team;
            scope
                .spawn(move || (0..2_000).for_each(|round| region(team, 1 + (round + caller) % 9)));
        }
    });
}

/// Chunks may use the caller's stack, which is not accessed after `run` returns.
#[test]
fn borrows_end_with_the_call() {
    let team = Team::new(4);
    for round in 0..5_000u64 {
        let numbers: Vec<u64> = (0..16).map(|i| i * round).collect();
        let sums: Vec<AtomicUsize> = (0..4).map(|_| AtomicUsize::new(0)).collect();
        team.run(4, &|chunk, _| {
            let sum: u64 = numbers[4 * chunk..4 * chunk + 4].iter().sum();
            sums[chunk].store(sum as usize, Ordering::Relaxed);
        });
        let total: usize = sums.into_iter().map(AtomicUsize::into_inner).sum();
        assert_eq!(total as u64, numbers.iter().sum());
    }
}

#[test]
fn dropping_a_team_ends_its_threads() {
    for _ in 0..50 {
        let team = Team::new(4);
        team.run(4, &|_, _| {});
    }
}
