use super::super::portfolio::stacked;
use super::super::tests::{assert_apart, random_problem, sections};
use super::*;
use crate::generate::{Cuts, tiling};
use arbtest::arbtest;

/// A rectangle cut into pieces that the skyline alone does not reassemble.
fn puzzle(seed: u64, pieces: usize) -> Sections {
    sections(&tiling(seed, pieces, 1 << 12, 1 << 12, Cuts::Mixed).problem)
}

fn budget(goal: u64, effort: u64, threads: usize) -> Budget {
    Budget {
        goal,
        deadline: None,
        effort,
        threads,
        seed: 3,
    }
}

fn improved(sections: &Sections, incumbent: Found, efforts: &[u64], threads: usize) -> Found {
    let lives = Lives::new(sections);
    let mut improve = Improve::new(sections, &lives, incumbent, 3, u64::MAX);
    efforts
        .iter()
        .for_each(|&effort| improve.run(&budget(sections.lower_bound(), effort, threads)));
    improve.best().clone()
}

/// One round, for a problem of any size.
const ONE_ROUND: u64 = 1;

#[test]
fn valid_and_never_worse() {
    arbtest(|u| {
        let sections = sections(&random_problem(u, 40)?);
        let incumbent = stacked(&sections);
        let found = improved(&sections, incumbent.clone(), &[ONE_ROUND], 1);
        assert!(found.height <= incumbent.height);
        assert_apart(&sections, &found);
        // A packing that cannot be improved is returned unchanged.
        assert_eq!(improved(&sections, found.clone(), &[], 1), found);
        Ok(())
    });
}

#[test]
fn threads_change_nothing() {
    let sections = puzzle(1, 250);
    let one = improved(&sections, stacked(&sections), &[500_000], 1);
    assert!(one.height > sections.lower_bound(), "all rounds are needed");
    for threads in [2, 3, 8] {
        assert_eq!(
            improved(&sections, stacked(&sections), &[500_000], threads),
            one,
            "{threads} threads"
        );
    }
}

#[test]
fn resumes_where_it_stopped() {
    let sections = puzzle(2, 250);
    let round = (LANES * (ROUND / sections.spans.len()) * sections.spans.len()) as u64;
    let at_once = improved(&sections, stacked(&sections), &[6 * round], 2);
    assert_eq!(
        improved(
            &sections,
            stacked(&sections),
            &[round, 2 * round, ONE_ROUND, 2 * round],
            1
        ),
        at_once
    );
    let less = improved(&sections, stacked(&sections), &[round], 1);
    assert!(
        at_once.height < less.height,
        "{} after six rounds, {} after one",
        at_once.height,
        less.height
    );
}

#[test]
fn the_search_stops_at_the_target_height() {
    let sections = puzzle(3, 60);
    let lives = Lives::new(&sections);
    let mut improve = Improve::new(&sections, &lives, stacked(&sections), 0, u64::MAX);
    improve.run(&budget(u64::MAX, u64::MAX, 1));
    assert_eq!(improve.placed, 0, "the incumbent is good enough");
    // Without the goal this would never end.
    let modest = sections.lower_bound() / 10 * 13;
    improve.run(&budget(modest, u64::MAX, 2));
    assert!(improve.best().height <= modest);
    let over = Budget {
        deadline: Some(std::time::Instant::now()),
        ..budget(0, u64::MAX, 2)
    };
    improve.run(&over);
}

#[test]
fn lower_than_any_order_alone() {
    for seed in 0..8 {
        let sections = puzzle(seed, 60);
        let lives = Lives::new(&sections);
        let mut skyline = Skyline::new(&sections, &lives);
        let alone = STARTS
            .iter()
            .filter_map(|rank| skyline.pack(&rank.order(&sections), u64::MAX))
            .min();
        let found = improved(&sections, stacked(&sections), &[400_000], 2);
        assert!(
            Some(found.height) < alone,
            "{} of {alone:?}, bound {}",
            found.height,
            sections.lower_bound()
        );
    }
}

#[test]
fn a_large_problem_is_charged_for_its_cost() {
    let sections = puzzle(4, 1_000);
    let lives = Lives::new(&sections);
    for effort in [1_000, 62_500, 1_000_000] {
        let mut improve = Improve::new(&sections, &lives, stacked(&sections), 0, effort);
        improve.run(&budget(0, effort, 1));
        let round = (improve.passes * sections.spans.len() * LANES) as u64;
        // One round may begin just before the end; it has at least one pass of each lane, and
        // otherwise no more than the effort.
        assert!(
            round <= effort.max((sections.spans.len() * LANES) as u64),
            "{round} of {effort}"
        );
        assert!(
            (effort..effort + round).contains(&improve.placed),
            "{} placed of {effort}",
            improve.placed
        );
    }
}
