//! Random problems with every constraint, judged by the oracle and by brute force.

use crate::oracle;
use crate::random_problem::{random_problem, sound_problem};
use arbtest::arbitrary::{Result, Unstructured};
use arbtest::arbtest;
use std::cell::{Cell, RefCell};

use slabwise_packer::{InPlace, Limits, Packing, Placement, Problem, Proof, Violation, check};

/// Runs a test on many random problems, always the same ones, so that it may count results.
fn cases(count: u64, test: impl Fn(&mut Unstructured) -> Result<()>) {
    for seed in 0..count {
        let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        let byte = |_| {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            (state >> 56) as u8
        };
        let bytes: Vec<u8> = (0..4096).map(byte).collect();
        test(&mut Unstructured::new(&bytes)).expect("enough bytes");
    }
}

fn thorough() -> Limits {
    Limits {
        effort: 3000,
        ..Limits::default()
    }
}

/// Checks that the oracle and the checker accept a packing; a capacity that is too small is not its
/// fault.
fn assert_accepted(problem: &Problem, packing: &Packing) {
    assert!(
        oracle::accepts(problem, packing),
        "{problem:?}\n{packing:?}"
    );
    let verdict = check(problem, packing);
    assert!(
        matches!(verdict, Ok(()) | Err(Violation::Capacity(_))),
        "{verdict:?}\n{problem:?}\n{packing:?}"
    );
    assert_eq!(verdict.is_ok(), packing.fits(problem).is_ok());
    assert_eq!(packing.lower_bound, problem.lower_bound());
}

#[test]
fn packings_of_random_problems_are_valid() {
    let features = RefCell::new([0; 7]);
    cases(1500, |u| {
        let problem = sound_problem(u, 12)?;
        let Ok(packing) = problem.pack() else {
            return Ok(());
        };
        assert_accepted(&problem, &packing);
        let better = problem.pack_within(&thorough()).expect("packed before");
        assert_accepted(&problem, &better);
        assert!(
            better
                .spaces
                .iter()
                .zip(&packing.spaces)
                .all(|(better, quick)| better.height <= quick.height)
        );
        let Problem {
            items: _,
            fixed,
            gaps,
            aliases,
            contiguous,
            in_place,
            spaces,
            start,
        } = &problem;
        let met = [
            fixed.len(),
            gaps.len(),
            aliases.len(),
            contiguous.len(),
            in_place.len(),
            spaces.len(),
            start.len(),
        ];
        features
            .borrow_mut()
            .iter_mut()
            .zip(met)
            .for_each(|(feature, met)| *feature += usize::from(met > 0));
        Ok(())
    });
    assert!(
        features.borrow().iter().all(|&met| met > 100),
        "{features:?}"
    );
}

#[test]
fn contradictions_are_errors() {
    let (refused, accepted) = (Cell::new(0), Cell::new(0));
    cases(1000, |u| {
        let problem = random_problem(u, 8)?;
        match problem.pack() {
            Ok(packing) => {
                accepted.set(accepted.get() + 1);
                assert_accepted(&problem, &packing);
            }
            Err(error) => {
                refused.set(refused.get() + 1);
                assert_eq!(problem.verify(), Err(error));
            }
        }
        Ok(())
    });
    assert!(
        refused.get() > 50 && accepted.get() > refused.get(),
        "{refused:?} refused, {accepted:?} accepted"
    );
}

#[test]
fn the_same_problem_gives_the_same_packing() {
    arbtest(|u| {
        let problem = sound_problem(u, 10)?;
        assert_eq!(
            problem.pack_within(&thorough()),
            problem.pack_within(&thorough())
        );
        Ok(())
    });
}

/// A packing as a start never gives a worse packing, and a single offset of it is a harmless hint.
#[test]
fn a_packing_is_a_start_to_improve_on() {
    arbtest(|u| {
        let mut problem = sound_problem(u, 10)?;
        let Ok(packing) = problem.pack_within(&thorough()) else {
            return Ok(());
        };
        problem.start = packing
            .offsets
            .iter()
            .enumerate()
            .map(|(item, &offset)| Placement { item, offset })
            .collect();
        let again = problem.pack().expect("packed before");
        assert_accepted(&problem, &again);
        assert!(
            again
                .spaces
                .iter()
                .zip(&packing.spaces)
                .all(|(again, first)| again.height <= first.height),
            "{problem:?}"
        );
        problem.start.truncate(1);
        assert_accepted(&problem, &problem.pack().expect("packed before"));
        Ok(())
    });
}

/// The smallest sum of heights: tries every offset up to a height for every item, with every set of
/// pairs.
fn optimum(problem: &Problem, heights: &[u64]) -> u64 {
    let mut best = heights.iter().sum();
    let sets = 1u32 << problem.in_place.len();
    for set in 0..sets {
        let chosen = |(at, pair): (usize, &InPlace)| (set >> at & 1 == 1).then_some(*pair);
        let in_place: Vec<InPlace> = problem
            .in_place
            .iter()
            .enumerate()
            .filter_map(chosen)
            .collect();
        let needy: Vec<bool> = (0..problem.items.len())
            .map(|item| oracle::needs_bytes(problem, item))
            .collect();
        try_all(
            problem,
            &in_place,
            &needy,
            &mut Vec::new(),
            heights,
            &mut best,
        );
    }
    best
}

fn try_all(
    problem: &Problem,
    in_place: &[InPlace],
    needy: &[bool],
    offsets: &mut Vec<u64>,
    heights: &[u64],
    best: &mut u64,
) {
    let item = offsets.len();
    if item == problem.items.len() {
        if oracle::is_valid(problem, offsets, in_place) {
            *best = oracle::heights(problem, offsets)
                .iter()
                .sum::<u64>()
                .min(*best);
        }
        return;
    }
    let it = &problem.items[item];
    let fixed = problem
        .fixed
        .iter()
        .find(|at| at.item == item)
        .map(|at| at.offset);
    let top = heights[oracle::space(problem, item)];
    // A tied item that needs no bytes may lie above all others.
    let reach = if needy[item] {
        top.saturating_sub(it.size)
    } else {
        top + 60
    };
    let free = !problem
        .aliases
        .iter()
        .chain(&problem.contiguous)
        .any(|group| group.contains(&item));
    let reach = if !needy[item] && free { 0 } else { reach };
    let candidates = (0..=reach).step_by(it.align as usize);
    let candidates: Vec<u64> = fixed.map_or_else(|| candidates.collect(), |offset| vec![offset]);
    for offset in candidates {
        offsets.push(offset);
        // A violation among the first few items cannot be repaired by the rest.
        let part = Problem {
            items: problem.items[..=item].to_vec(),
            fixed: Vec::new(),
            gaps: problem.gaps.clone(),
            aliases: problem
                .aliases
                .iter()
                .map(|group| group.iter().copied().filter(|&i| i <= item).collect())
                .collect(),
            contiguous: Vec::new(),
            in_place: problem.in_place.clone(),
            spaces: problem.spaces.clone(),
            start: Vec::new(),
        };
        let met: Vec<InPlace> = in_place
            .iter()
            .copied()
            .filter(|pair| pair.from <= item && pair.to <= item)
            .collect();
        if oracle::is_valid(&part, offsets, &met) {
            try_all(problem, in_place, needy, offsets, heights, best);
        }
        offsets.pop();
    }
}

#[test]
fn no_packing_is_below_the_optimum_and_most_are_at_it() {
    let (tried, optimal) = (Cell::new(0), Cell::new(0));
    cases(600, |u| {
        let mut problem = sound_problem(u, 4)?;
        problem
            .spaces
            .iter_mut()
            .for_each(|space| space.capacity = None);
        problem.in_place.truncate(2);
        let Ok(packing) = problem.pack_within(&thorough()) else {
            return Ok(());
        };
        if packing.height > 24 {
            return Ok(());
        }
        let heights: Vec<u64> = packing.spaces.iter().map(|extent| extent.height).collect();
        let optimum = optimum(&problem, &heights);
        assert!(
            packing.lower_bound <= optimum && optimum <= packing.height,
            "{optimum} of {problem:?}\n{packing:?}"
        );
        assert!(
            packing.proof.is_none() || packing.height == optimum,
            "{optimum} of {problem:?}\n{packing:?}"
        );
        tried.set(tried.get() + 1);
        optimal.set(optimal.get() + usize::from(packing.height == optimum));
        Ok(())
    });
    let (tried, optimal) = (tried.get(), optimal.get());
    assert!(
        tried > 200 && optimal * 100 >= tried * 98,
        "{optimal} of {tried} small problems packed optimally"
    );
}

#[test]
fn a_proof_by_the_bound_is_a_height_at_the_bound() {
    arbtest(|u| {
        let problem = sound_problem(u, 10)?;
        if let Ok(packing) = problem.pack() {
            assert_eq!(
                packing.proof == Some(Proof::Bound),
                packing.height == packing.lower_bound
            );
        }
        Ok(())
    });
}
